"""Reads what `magicdec plan --format json` wrote: the configurations that a run of it measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicdec.errors import ConfigError

if TYPE_CHECKING:
    from magicdec.runtime.adaptive import TableGamma

OPTION_OF_KEY = {
    "draft": "draft",
    "draft_method": "draft_method",
    "draft_budget": "draft_budget",
    "draft_tp_size": "draft_tp",
    "gamma": "gamma",
    "tp_size": "tp",
    "batch_size": "batch",
    "context_len": "context",
}
"""Keys of a plan's row, and the run's option that each sets."""
NOT_RUN = "eagle"
"""The draft method that is planned for and not run."""
OPTION_OF_REQUEST = {name: name for name in ("gen_len", "temperature", "top_k", "top_p")}
"""Of the plan's request, likewise: both have the same names."""
DTYPE_OF_FORMAT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""A plan's number format, and the run's dtype: that of weights and KV caches alike."""
FORMATS_OF_DTYPE = {"weight_dtype": "weights", "kv_dtype": "a KV cache", "draft_kv_dtype": "a draft's KV cache"}
"""What of a plan's formats the run's dtype decides. A draft's weights have an option of their own."""


def read_plan(path: Path, *, is_draft_given: bool = False, is_dtype_given: bool = False) -> list[dict[str, Any]]:
    """The options of the plan's best configuration and of its runner-up (the next best of the same batch, context and
    devices, where there is one), each with the plan's `gamma_table`.

    With `is_draft_given` the command line says what drafts, so that the plan's own draft need not be one that runs;
    with `is_dtype_given` likewise for the plan's number formats.
    Raises ConfigError when the file is no plan, or plans a draft or a number format that cannot be run.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read plan {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}; write it with `magicdec plan --format json`") from error
    if not isinstance(document, dict) or document.get("kind") != "plan":
        raise ConfigError(f"{path} is no plan; write one with `magicdec plan --format json`")
    try:
        best, candidates, request = document["best"], document["candidates"], document["request"]
        if not is_draft_given:
            _check_runs(path, document)
        rows = [best, *_runner_up(best, candidates)]
        common = {"model": request.get("model") or document["model"]}
        common |= {option: request[key] for key, option in OPTION_OF_REQUEST.items() if request.get(key) is not None}
        common = {name: value for name, value in common.items() if name != "gen_len" or value}  # 0: not planned
        formats = {name: value for name, value in request.items() if name.endswith("_dtype")}
        common |= _dtypes(path, formats | document.get("precision", {}), is_dtype_given=is_dtype_given)
        common["gamma_table"] = _gamma_table(document.get("gamma_table"))
        return [_options(row, common) for row in rows]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path} is not a whole plan: {error!r}") from error


def _check_runs(path: Path, document: dict[str, Any]) -> None:
    """Raises ConfigError, naming what can be run instead, when the plan's draft cannot."""
    best, candidates = document["best"], document["candidates"]
    if best["draft_method"] == NOT_RUN:
        others = [row for row in candidates if row["draft_method"] != NOT_RUN]
        instead = f"its best that is run: {_flags(others[0])}" if others else "plan again with another --draft"
        raise ConfigError(f"{path} drafts with {NOT_RUN}, which is planned for but not run; {instead}")
    unknown = document.get("needs_acceptance") or []
    if not candidates and unknown:
        first = unknown[0]
        drafts = ", ".join(f"{each['draft']}/{each['draft_method']}" for each in unknown)
        raise ConfigError(
            f"{path} holds no draft to run: the acceptance of {drafts} on {document['model']} is not known; "
            f"plan with --acceptance-rate or --acceptance, or name a draft here, such as "
            f"--draft {first['draft'] if first['draft_method'] != NOT_RUN else 'self'}"
        )


def _dtypes(path: Path, formats: dict[str, str | None], *, is_dtype_given: bool) -> dict[str, str]:
    """The run's dtype, unless it is given, and the format of the draft's weights where it differs."""
    weights, draft_weights = formats.get("weight_dtype"), formats.get("draft_weight_dtype")
    options = {"draft_weight_dtype": draft_weights} if draft_weights and draft_weights != weights else {}
    if is_dtype_given or weights is None:
        return options
    dtype = DTYPE_OF_FORMAT.get(weights, "bfloat16")
    planned = {what: formats.get(name) or weights for name, what in FORMATS_OF_DTYPE.items()}
    lacking = [f"{what} in {value}" for what, value in planned.items() if DTYPE_OF_FORMAT.get(value) != dtype]
    if lacking:
        raise ConfigError(
            f"{path} plans {' and '.join(lacking)}, which is not run; --dtype {dtype} runs the rest of it"
        )
    return options | {"dtype": dtype}


def _flags(row: dict[str, Any]) -> str:
    names = {"draft": "--draft", "draft_method": "--draft-method", "draft_budget": "--draft-budget", "gamma": "--gamma"}
    return " ".join(f"{flag} {row[key]}" for key, flag in names.items() if row[key] is not None)


def _gamma_table(table: dict[str, Any] | None) -> TableGamma | None:
    if table is None:
        return None
    from magicdec.runtime.adaptive import TableGamma

    gammas = tuple(tuple(int(gamma) for gamma in row) for row in table["gamma"])
    axes = [tuple(int(value) for value in table[name]) for name in ("batch_sizes", "context_lens")]
    if len(gammas) != len(axes[0]) or any(len(row) != len(axes[1]) for row in gammas):
        raise ValueError("gamma_table's rows do not fit its batch_sizes and context_lens")
    return TableGamma(batch_sizes=axes[0], context_lens=axes[1], gammas=gammas)


def _runner_up(best: dict[str, Any], candidates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    others = [
        row
        for row in candidates
        if row["draft_method"] != NOT_RUN and any(row[key] != best[key] for key in OPTION_OF_KEY)
    ]
    alike = [row for row in others if all(row[k] == best[k] for k in ("batch_size", "context_len", "tp_size"))]
    return (alike or others)[:1]


def _options(row: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    options = common | {option: row[key] for key, option in OPTION_OF_KEY.items()}
    if options["draft"] == "none":  # a draft named on the command line takes its method, budget and gamma from there
        for name in ("draft_method", "draft_budget", "gamma", "draft_tp"):
            del options[name]
        return options
    if options["draft"] == "ngram":
        options.pop("draft_weight_dtype", None)
    if options["draft_tp"] == options["tp"]:
        del options["draft_tp"]  # all ranks, which a --tp beside the plan may change
    # Lists on the command line, so text here.
    options["gamma"] = str(options["gamma"])
    options["draft_budget"] = str(options["draft_budget"]) if options["draft_budget"] is not None else None
    return options
