"""The draft that options, or an object of them, configure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from magicdec.errors import ConfigError
from magicdec.naming import DRAFT_NAMES, head_named_in, parallel_form
from magicdec.specs.serve_command.options import scalar
from magicdec.specs.serve_command.server import Speculation
from magicdec.specs.serve_command.start import SHOWN, model_of
from magicdec.specs.serve_command.stated import StatedOptions, json_object
from magicdec.specs.speculation import TreeSpec

OF_A_MODEL = ("draft_model", "standalone", "drafttarget", "draft_target")
OF_A_HEAD = {
    "eagle_of_trtllm": "eagle3",  # its EAGLE heads are EAGLE-3's
    "eagle_one_model": "eagle3",
    "mtp_eagle": "mtp",
    "mtp_eagle_one_model": "mtp",
    "mtp_vanilla": "mtp",
    "sa": "suffix",
}
TABLE_KEY = "num_speculative_tokens_per_batch_size"


def speculation_of(text: str) -> Speculation | None:
    """vLLM's --speculative-config; None: it drafts nothing. Raises ConfigError."""
    return _of_config(json_object("speculative-config", text), [])


def stated_speculation(said: StatedOptions) -> Speculation | None:
    meanings = said.meanings
    if "speculation" in meanings:
        text = meanings["speculation"]
        if text in ("null", "None", ""):
            return None
        config = json_object("speculative-config", text)
        return _of_config(config, said.problems)
    if "algorithm" in meanings:
        return _of_sglang(said)
    if "draft" in meanings or "method" in meanings:
        draft = _draft(meanings.get("method", ""), meanings.get("draft"), said.problems)
        return Speculation(
            draft=draft,
            gamma=said.count("gamma"),
            checkpoint=meanings.get("draft"),
        )
    return None


def _of_sglang(said: StatedOptions) -> Speculation:
    meanings = said.meanings
    method = meanings["algorithm"].lower()
    gamma = said.count("gamma")
    tree = said.count("tree")
    width = said.count("topk") or 1
    checkpoint = meanings.get("draft")
    if checkpoint is not None:
        checkpoint = model_of(checkpoint)
    draft = _draft(method, checkpoint, said.problems)
    contradiction = ""
    if gamma is None and tree is not None and width == 1 and tree > 1:
        gamma = tree - 1
    elif gamma and tree and width == 1 and tree != gamma + 1:
        contradiction = (
            f"{said.names['tree']} {tree} is not taken: with one branch SGLang verifies the "
            f"{gamma} drafted tokens and one more, {gamma + 1}"
        )
    shape = None
    if width > 1 and gamma:
        most = 1 + width + (gamma - 1) * width**2
        if tree is not None and tree > most:
            contradiction = (
                f"{said.names['tree']} {tree} is more than {gamma} steps of top-k {width} "
                f"give: {most}, the root included"
            )
        shape = TreeSpec(top_k=width, num_steps=gamma)
        gamma = max((tree or gamma + 1) - 1, 1)
    lossy = []
    for meaning in ("threshold_single", "threshold_acc"):
        threshold = scalar(meanings.get(meaning, "1"))
        is_number = isinstance(threshold, int | float) and threshold is not False
        if is_number and threshold < 1.0:
            lossy.append(f"{said.names[meaning]} {meanings[meaning]}")
    return Speculation(
        draft=draft,
        gamma=gamma,
        checkpoint=checkpoint,
        by_batch=meanings.get("adaptive") == "true",
        is_tree=width > 1,
        tree=shape,
        window=said.count("window"),
        lossy=lossy,
        contradiction=contradiction,
    )


def _of_config(config: Mapping[str, Any], problems: list[str]) -> Speculation | None:
    """vLLM's --speculative-config."""
    checkpoint = config.get("model")
    if checkpoint is not None and not isinstance(checkpoint, str):
        raise ConfigError(f"the draft's model must be a name, not {checkpoint!r:.80}")
    if checkpoint is not None:
        checkpoint = model_of(checkpoint)
    method = str(config.get("method") or "").lower()
    table = config.get(TABLE_KEY)
    gamma = _whole(config, "num_speculative_tokens", least=0)
    if gamma is None and table:
        gamma = max(gamma for _, _, gamma in _bands(table))
    if gamma == 0:
        return None
    if gamma is None and method not in ("suffix", "mtp", "auto"):
        problems.append(
            "--speculative-config has no num_speculative_tokens; vLLM does not start"
        )
    ranks = _whole(config, "draft_tensor_parallel_size", least=1)
    draft = _draft(method, checkpoint, problems, is_told_by_name=True)
    if draft is not None and config.get("parallel_drafting") is True:
        draft = parallel_form(draft)
    return Speculation(
        draft=draft,
        gamma=gamma,
        checkpoint=checkpoint,
        tp_size=ranks,
        by_batch=bool(table) or bool(config.get("by_batch")),
        bands=_bands(table) if table else (),
        is_tree=bool(config.get("speculative_token_tree")),
        is_eager=config.get("enforce_eager") is True,
        switches=[key for key, value in config.items() if value is True],
        lossy=_lossy(config),
    )


def _whole(config: Mapping[str, Any], key: str, *, least: int) -> int | None:
    """A whole number of a configuration; None: it has none."""
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{key} must be a whole number, not {value!r:.80}")
    return value


def _lossy(config: Mapping[str, Any]) -> list[str]:
    """Settings with which a draft is accepted that the target would not have given."""
    lossy = []
    method = str(config.get("rejection_sample_method") or "")
    if method in ("fly", "synthetic"):
        lossy.append(f'"rejection_sample_method": "{method}"')
    for key in (
        "posterior_threshold",
        "posterior_alpha",
        "typical_acceptance_sampler_posterior_threshold",
        "use_relaxed_acceptance_for_thinking",
    ):
        if config.get(key):
            lossy.append(f"{key}: {json.dumps(config[key])}")
    if config.get("acceptance_method") == "typical_acceptance_sampler":
        lossy.append('"acceptance_method": "typical_acceptance_sampler"')
    return lossy


def _bands(table: Any) -> tuple[tuple[int, int, int], ...]:
    """A table of gammas by batch: rows of (first batch, last batch, gamma)."""
    try:
        return tuple(
            (int(first), int(last), int(gamma)) for first, last, gamma in table
        )
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"{TABLE_KEY} must be rows of first batch, last batch and gamma, not "
            f"{str(table)[:SHOWN]}"
        ) from None


TAKEN_FOR = (
    ("eagle-", "eagle"),
    ("eagle3", "eagle3"),
    ("dflash", "dflash"),
    ("dspark", "dspark"),
)
"""The method by which vLLM takes a head that is given without one: that of the first of these texts
in its model's name (vllm/config/speculative.py of 0.32)."""


def _draft(
    method: str,
    checkpoint: Any,
    problems: list[str],
    *,
    is_told_by_name: bool = False,
) -> str:
    """Our name of a draft. `is_told_by_name`: whether the engine finds the method of a head in its
    name, as vLLM does."""
    key = method.replace("-", "_")
    key = OF_A_HEAD.get(key, key)
    if key in DRAFT_NAMES:
        return DRAFT_NAMES[key]
    if key.endswith("_mtp"):
        return "mtp"
    if key and key not in OF_A_MODEL:
        known = ", ".join(sorted({*DRAFT_NAMES, *OF_A_MODEL}))
        raise ConfigError(
            f"speculative method '{method}' is not planned for; known: {known}"
        )
    if not isinstance(checkpoint, str) or not checkpoint:
        raise ConfigError(
            "the speculative configuration names neither a method nor a model"
        )
    if checkpoint in ("ngram", "[ngram]"):
        return "ngram"
    part = head_named_in(checkpoint)
    if part is None:
        return checkpoint
    taken = ""
    if is_told_by_name:
        name = checkpoint.lower()
        taken = next((kind for text, kind in TAKEN_FOR if text in name), "")
    if not key and taken != part:
        takes = f", and vLLM takes this one for {taken}" if taken else ""
        problems.append(
            f"no method is given{takes}; by its name {checkpoint} is {part}"
        )
    return part
