"""The architectures that are understood, by `model_type`: a row each, in the file of its family,
with its readers.

A row reads every structural key of its configurations; what no row reads is refused. Where the
publisher may leave a key out, it is what transformers' configuration class takes
(data/config_defaults.json).
"""

from __future__ import annotations

import re
from difflib import get_close_matches

from magicdec.errors import LONGEST_NAME, ConfigError
from magicdec.specs.families import deepseek, gemma, hybrids, llama, others, qwen
from magicdec.specs.families.parts import Architecture

FAMILIES = (llama, qwen, deepseek, gemma, hybrids, others)
ARCHITECTURES: dict[str, Architecture] = {
    name: row for family in FAMILIES for name, row in family.ROWS.items()
}

WRAPPERS = {
    "mistral3": "mistral",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "llama4": "llama4_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "kimi_k25": "kimi_k2",
    "cohere2_vision": "cohere2",
}
"""Models of several modalities: `text_config` describes their decoder, of this architecture where
it names none.
"""


NOT_MODELLED = {
    r"deepseek[-_]?v4": "attention to compressed keys and several residual streams",
    r"minimax[-_]?m3": "attention to blocks that an indexer chooses",
    r"kimi[-_]?k3": "attention to the outputs of earlier layers",
    r"qwen[-_]?4|qwen3\.8-flash-next": "several residual streams",
    r"gemma[-_]?4-e\d": "layers that share keys and values, and embeddings of each layer",
}
"""Models that are asked for, by a part of their name, and what of them no row reads."""


def not_modelled(name: str) -> str:
    """Why a model, or a model_type, is not planned, in a sentence; "": nothing is known of it."""
    for pattern, what in NOT_MODELLED.items():
        if re.search(pattern, name.lower()):
            return (
                f"{name} is not covered ({what}: not modelled), so its config.json does not help "
                "either; a file of magicdec's own schema may describe it by known layers "
                "(docs/extending.md, Describe a model)"
            )
    return ""


def is_known(model_type: str) -> bool:
    return model_type in ARCHITECTURES or model_type in qwen.MULTIMODAL


def architecture(model_type: str, where: str) -> Architecture:
    """The row of an architecture. Raises ConfigError naming the nearest one, and how to describe
    another.
    """
    rows = {**ARCHITECTURES, **qwen.MULTIMODAL}
    if model_type not in rows:
        reason = not_modelled(model_type)
        if reason:
            raise ConfigError(f"{where}: {reason}")
        known = (*ARCHITECTURES, *WRAPPERS)
        begin = model_type[:LONGEST_NAME]
        near = get_close_matches(begin, known, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"{where}: model_type '{model_type}' is not known; the nearest by name is '{near}', "
            "and `magicdec models "
            "--architectures` lists all. A model of layers that are known may be described in a "
            "file of magicdec's own "
            "schema (docs/extending.md, Describe a model)"
        )
    return rows[model_type]
