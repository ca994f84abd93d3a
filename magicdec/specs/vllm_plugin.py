"""The plugin that drafts in vLLM (the package magicdec-vllm), as plans and exports know it: the class
to name, the versions it was tested with, and the settings of a draft in the engine's
`--additional-config '{"magicdec": {...}}'`. Neither vLLM nor torch is needed.

    {"draft_method": "streamingllm", "draft_budget": 512, "num_sink_tokens": 4, "refresh": 1,
     "gamma_table": {"batch_sizes": [1, 8], "context_lens": [1024, 4096], "gammas": [[0, 1], [0,
     3]]}}

Every key may be left out. Without a table gamma is `num_speculative_tokens` of the speculative
configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from magicdec.errors import ConfigError, unknown_choice
from magicdec.schema.gamma_table import TableGamma

CONFIG_KEY = "magicdec"
Method = Literal["streamingllm", "topk"]
VLLM_METHODS: tuple[Method, ...] = ("streamingllm", "topk")
DRAFT_CLASS = "magicdec_vllm.draft.SparseDraft"
TESTED_VERSIONS = ("0.32",)
"""Series of vLLM that are known to have the private parts that the plugin patches."""


class DraftSettings(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """A draft's settings. Budget and sinks count KV slots as in specs/speculation.py; in the engine
    they come in whole pages.
    """

    draft_method: str = "streamingllm"
    draft_budget: int = 512
    num_sink_tokens: int = 4
    refresh: int = 1
    """Blocks of drafts for which a choice of pages serves (topk)."""
    gamma_table: TableGamma | None = None

    def __post_init__(self) -> None:
        if self.draft_method not in VLLM_METHODS:
            raise unknown_choice(
                "draft method in vLLM", self.draft_method, VLLM_METHODS
            )
        if self.num_sink_tokens < 0:
            raise ConfigError(
                f"num_sink_tokens must be at least 0, not {self.num_sink_tokens}"
            )
        if self.refresh < 1:
            raise ConfigError(
                f"refresh must be at least 1 block of drafts, not {self.refresh}"
            )
        if self.refresh > 1 and self.draft_method != "topk":
            raise ConfigError(
                f"draft method {self.draft_method} chooses no pages; leave refresh out, or use topk"
            )


def read_settings(additional_config: Mapping[str, Any]) -> DraftSettings:
    """Raises ConfigError for an unknown key or a value that cannot be used."""
    try:
        return msgspec.convert(additional_config.get(CONFIG_KEY, {}), DraftSettings)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(
            f"additional_config['{CONFIG_KEY}']: {error}; known keys: "
            f"{', '.join(DraftSettings.__struct_fields__)}"
        ) from None


def check_pages(settings: DraftSettings, *, page_size: int, max_gamma: int) -> None:
    """Raises ConfigError where the budget holds no whole page of recent tokens besides the
    sinks."""
    sink_pages = num_sink_pages(settings.num_sink_tokens, page_size=page_size)
    smallest = (sink_pages + 2) * page_size
    if settings.draft_budget < smallest:
        raise ConfigError(
            f"draft budget {settings.draft_budget} is too small for pages of {page_size} tokens, "
            "of which "
            f"{sink_pages} hold the sinks; use at least {smallest}, or a smaller --block-size"
        )
    table = settings.gamma_table
    if table is not None and table.max_gamma > max_gamma:
        raise ConfigError(
            f"the gamma table asks for {table.max_gamma} drafts; set num_speculative_tokens to "
            f"that, not {max_gamma}"
        )


def num_sink_pages(num_sink_tokens: int, *, page_size: int) -> int:
    """Pages that the sinks take: sinks are the first tokens, so these are a sequence's first
    pages."""
    return -(-num_sink_tokens // page_size)


def is_tested(version: str) -> bool:
    """Whether the plugin was tested with this version of vLLM."""
    return any(
        version == tested or version.startswith(f"{tested}.")
        for tested in TESTED_VERSIONS
    )
