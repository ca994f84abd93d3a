"""A plan's configurations as options of `magicdec run`."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

from magicdec.errors import ConfigError
from magicdec.schema.gamma_table import TableGamma
from magicdec.schema.plan import Plan, load_plan
from magicdec.schema.row import Candidate, column
from magicdec.specs.precision import DTYPE_OF_FORMAT
from magicdec.specs.speculation import HEAD_METHODS, LOOKUP_METHODS, NOT_RUN

OPTION_OF_COLUMN = {
    "draft": "draft",
    "draft_method": "draft_method",
    "draft_budget": "draft_budget",
    "draft_tp_size": "draft_tp",
    "gamma": "gamma",
    "tp_size": "tp",
    "batch_size": "batch",
    "context_len": "context",
}
"""Columns of a plan's row, and the run's option that each sets."""
FORMATS_OF_DTYPE = {
    "weight_dtype": "weights",
    "kv_dtype": "a KV cache",
    "draft_weight_dtype": "a draft's weights",
    "draft_kv_dtype": "a draft's KV cache",
}
"""Formats of a plan that the run's dtype decides."""


def options_of_plan(
    path: Path, stated: frozenset[str]
) -> tuple[list[dict[str, Any]], TableGamma]:
    """The plan's best configuration and its runner-up (the next best of the same batch, context and
    devices, where there is one) as options of `run`, and the plan's table of gammas.

    Options in `stated` are left out: they override the plan's. Where the draft is stated, the plan's own
    need not be one that runs; where the dtype is, neither need the plan's formats.

    Raises:
        ConfigError: the file is no plan, or plans a draft, a number format or a spread over devices
        that cannot be run.
        StorageError: it cannot be read.
    """
    plan = load_plan(path)
    if plan.best.num_gpus != plan.best.tp_size:
        raise ConfigError(
            f"{path} spreads a replica as {plan.best.layout.label}, which is planned for but not "
            "run; plan for one --tp"
        )
    is_draft_given = bool(stated & {"draft", "draft_method"})
    if not is_draft_given:
        _check_runs(path, plan)
    gamma_table = plan.gamma_table.policy
    request = plan.request
    shared: dict[str, Any] = {
        "model": request.model,
        "temperature": request.temperature,
    }
    if "dtype" not in stated:
        shared["dtype"] = _dtype(path, plan, is_draft_given=is_draft_given)
    if request.gen_len:
        shared["gen_len"] = request.gen_len
    if request.top_k is not None:
        shared["top_k"] = request.top_k
    if request.top_p is not None:
        shared["top_p"] = request.top_p
    runs: list[dict[str, Any]] = []
    for row in (plan.best, *_runner_up(plan)):
        planned = {
            name: value
            for name, value in (shared | _options_of(row)).items()
            if name not in stated
        }
        runs.append(planned)
    return runs, gamma_table


def _check_runs(path: Path, plan: Plan) -> None:
    """Raises ConfigError, naming what can be run instead, when the plan's draft cannot."""
    method = plan.best.draft_method
    if method in NOT_RUN:
        raise ConfigError(
            f"{path} drafts with {method}, which is planned for but not run; {_instead(plan)}"
        )
    if not plan.candidates and plan.needs_acceptance:
        drafts = ", ".join(
            f"{unknown.draft}/{unknown.draft_method}"
            for unknown in plan.needs_acceptance
        )
        first = plan.needs_acceptance[0]
        example = first.draft
        if first.draft_method in NOT_RUN:
            example = "self"
        raise ConfigError(
            f"{path} holds no draft to run: the acceptance of {drafts} on {plan.model} is not "
            "known; "
            f"plan with --acceptance-rate or --acceptance, or name a draft here, such as "
            f"--draft {example}"
        )


def _instead(plan: Plan) -> str:
    """The best candidate that is run, as options."""
    for row in plan.candidates:
        if row.draft_method not in NOT_RUN:
            break
    else:
        return "plan again with another --draft"
    words = []
    for name in ("draft", "draft_method", "draft_budget", "gamma"):
        value = getattr(row, name)
        if value is not None:
            words.append(f"--{name.replace('_', '-')} {value}")
    return f"its best that is run: {' '.join(words)}"


def _dtype(path: Path, plan: Plan, *, is_draft_given: bool) -> str:
    """The run's dtype. Raises ConfigError where the plan has formats that are not run."""
    formats = plan.precision
    dtype = DTYPE_OF_FORMAT.get(formats.weight_dtype, "bfloat16")
    without_weights = ("none", *LOOKUP_METHODS, *HEAD_METHODS)
    has_weights = not is_draft_given and plan.best.draft_method not in without_weights
    lacking = []
    for name, title in FORMATS_OF_DTYPE.items():
        value = getattr(formats, name)
        is_used = has_weights or name != "draft_weight_dtype"
        if is_used and DTYPE_OF_FORMAT.get(value) != dtype:
            lacking.append(f"{title} in {value}")
    if lacking:
        raise ConfigError(
            f"{path} plans {' and '.join(lacking)}, which is not run; --dtype {dtype} runs the "
            "rest of it"
        )
    return dtype


def _runner_up(plan: Plan) -> list[Candidate]:
    """The next best that can be run, of the same batch, context and devices where there is one."""
    best = plan.best
    load = attrgetter("batch_size", "context_len", "tp_size")
    others = []
    at_same_load = []
    for row in plan.candidates:
        if row.draft_method in NOT_RUN or _settings(row) == _settings(best):
            continue
        others.append(row)
        if load(row) == load(best):
            at_same_load.append(row)
    return (at_same_load or others)[:1]


def _settings(row: Candidate) -> dict[str, Any]:
    """A row's configuration under the names of the options of `run`."""
    return {option: column(row, name) for name, option in OPTION_OF_COLUMN.items()}


def _options_of(row: Candidate) -> dict[str, Any]:
    """The options that run a row, in the form of the command line."""
    settings = _settings(row)
    if row.draft == "none":
        # a draft named on the command line takes its method, budget and gamma from there
        return {name: settings[name] for name in ("draft", "tp", "batch", "context")}
    if row.draft_method in HEAD_METHODS:
        settings["draft_model"] = row.drafting.checkpoint
    if settings["draft_tp"] == settings["tp"]:
        del settings["draft_tp"]  # all ranks, whose number --tp may change
    for name in ("gamma", "draft_budget"):  # lists of values, as options
        if settings[name] is not None:
            settings[name] = str(settings[name])
    return settings
