"""The draft that options, or an object of them, configure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from magicdec.errors import ConfigError
from magicdec.naming import DRAFT_NAMES, METHODS, head_named_in, parallel_form
from magicdec.redaction import redacted
from magicdec.specs.serve_command.options import scalar
from magicdec.specs.serve_command.server import Speculation
from magicdec.specs.serve_command.start import SHOWN, model_of
from magicdec.specs.serve_command.stated import StatedOptions, json_object
from magicdec.specs.speculation import TreeSpec
from magicdec.units import LARGEST_COUNT, whole_number

OF_A_MODEL = ("draft_model", "standalone", "drafttarget", "draft_target")
OTHER_NAMES = {
    "eagle_of_trtllm": "eagle3",  # its EAGLE heads are EAGLE-3's
    "eagle_one_model": "eagle3",
    "mtp_eagle": "mtp",
    "mtp_eagle_one_model": "mtp",
    "mtp_vanilla": "mtp",
    "sa": "suffix",
    "ngram_gpu": "ngram",
}
UNKNOWN_DRAFTS = ("medusa", "mlp_speculator", "pard", "custom_class")
"""Methods that engines have and whose acceptance nobody counted here."""
DROPPED = ("medusa", "mlp_speculator")
OF_EAGLE = ("eagle", "eagle3", "nextn", "standalone")
IN_BLOCKS = ("dflash", "dspark", "ngram")
"""SGLang's algorithms that draft in one step, as many tokens as it verifies but for one."""
TABLE_KEY = "num_speculative_tokens_per_batch_size"


def speculation_of(text: str) -> Speculation | None:
    """vLLM's --speculative-config; None: it drafts nothing. Raises ConfigError."""
    config = json_object("speculative-config", redacted(text))
    return _of_config(config, lambda *_, **__: None)


def stated_speculation(said: StatedOptions) -> Speculation | None:
    meanings = said.meanings
    if "speculation" in meanings:
        text = meanings["speculation"]
        if text in ("null", "None", ""):
            return None
        config = json_object("speculative-config", text)
        return _of_config(config, said.find)
    if "algorithm" in meanings:
        return _of_sglang(said)
    if "draft" in meanings or "method" in meanings:
        draft = _draft(meanings.get("method", ""), meanings.get("draft"), said.find)
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
    block = said.count("drafts_of_block")
    if block is not None:
        tree = block + 1  # DSpark's blocks do not count the verified token
    width = said.count("topk") or 1
    checkpoint = meanings.get("draft")
    if checkpoint is not None:
        checkpoint = model_of(checkpoint)
    draft = _draft(method, checkpoint, said.find)
    shape = None
    option = said.names.get("tree", "")
    if method in IN_BLOCKS:
        gamma = None if tree is None else max(tree - 1, 1)
        width = 1
    elif width == 1 and tree is not None:
        if gamma is None:
            gamma = max(tree - 1, 1)
            if method in OF_EAGLE and meanings.get("adaptive") != "true":
                said.find("drafts without steps", option=option)
        elif tree != gamma + 1:
            said.find(
                "drafts beside the steps of a chain",
                option=option,
                given=tree,
                gamma=gamma,
                taken=gamma + 1,
            )
    elif gamma:
        most = 1 + width + (gamma - 1) * width**2
        if tree is not None and tree > most:
            said.find(
                "more drafts than a tree has",
                option=option,
                given=tree,
                steps=gamma,
                width=width,
                most=most,
            )
        if width > 1:
            if said.truth("overlapped_drafting"):
                said.find(
                    "a tree beside overlapped drafting",
                    option=said.names["topk"],
                    width=width,
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
    )


def _of_config(
    config: Mapping[str, Any], find: Callable[..., None]
) -> Speculation | None:
    """vLLM's --speculative-config; `find` takes what it finds for the rules."""
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
        find("a number of 0 drafts")
        return None
    ranks = _whole(config, "draft_tensor_parallel_size", least=1)
    draft = _draft(method, checkpoint, find, path=config.get("model") or "")
    is_apart = draft in METHODS and METHODS[draft].is_trained_apart
    if checkpoint is None and is_apart and draft != "dspark":
        find("no model of the draft", draft=METHODS[draft].text)
    # its configuration tells the number of a prediction module, and of DSpark
    tells_number = checkpoint is not None and draft in ("mtp", "dspark")
    if gamma is None and draft != "suffix" and not tells_number:
        find("no number of drafts")
    if draft is not None and config.get("parallel_drafting") is True:
        draft = parallel_form(draft) if draft in METHODS else "pard"
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
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not least <= value <= LARGEST_COUNT
    ):
        raise ConfigError(f"{key} must be a whole number, not {value!r:.80}")
    return value


def _lossy(config: Mapping[str, Any]) -> list[str]:
    """Settings with which a draft is accepted that the target would not have given."""
    lossy = []
    method = str(config.get("rejection_sample_method") or "")
    if method in ("fly", "synthetic"):
        setting = f'"rejection_sample_method": "{method}"'
        # vLLM refuses a length or rates without the method
        given = [key for key in config if key.startswith(f"{method}_")]
        lossy.append(" and ".join([setting, *map(json.dumps, given)]))
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
        rows = [[whole_number(str(number)) for number in row] for row in table]
        return tuple((first, last, gamma) for first, last, gamma in rows)
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
"""The method that vLLM takes for a draft without one: that of the first of these texts in its whole
path (vllm/config/speculative.py, 0.15 to 0.33)."""


def _draft(
    method: str, checkpoint: Any, find: Callable[..., None], *, path: str = ""
) -> str:
    """Our name of a draft. `path`: its model's as it is written, where the engine finds the method in
    it, as vLLM does."""
    key = method.replace("-", "_")
    key = OTHER_NAMES.get(key, key)
    if key in DRAFT_NAMES:
        return DRAFT_NAMES[key]
    if key.endswith("_mtp"):
        return "mtp"
    if key in UNKNOWN_DRAFTS:
        if key in DROPPED:
            find("a method that was dropped", method=method)
        return key
    if key and key not in OF_A_MODEL:
        known = ", ".join(sorted({*DRAFT_NAMES, *OF_A_MODEL, *UNKNOWN_DRAFTS}))
        raise ConfigError(
            f"speculative method '{method}' is not planned for; known: {known}"
        )
    if not isinstance(checkpoint, str) or not checkpoint:
        lacks = f"a model for '{method}'" if key else "a method or a model"
        raise ConfigError(f"the speculative configuration lacks {lacks}")
    if checkpoint in ("ngram", "[ngram]"):
        return "ngram"
    part = head_named_in(checkpoint)
    lowered = path.lower()
    taken = next((kind for text, kind in TAKEN_FOR if text in lowered), None)
    if taken is not None and taken != part:
        by_name = "" if part is None else f"; by its name it is {METHODS[part].text}"
        find(
            "a method by the draft's path",
            checkpoint=checkpoint,
            taken=METHODS[taken].text,
            by_name=by_name,
        )
    elif part is not None and not key and taken is None:
        find(
            "a method by the draft's architecture",
            checkpoint=checkpoint,
            part=METHODS[part].text,
        )
    return taken or part or checkpoint
