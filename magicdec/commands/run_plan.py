"""Reads what `magicdec plan --format json` wrote: the configurations that a run of it measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from magicdec.errors import ConfigError
from magicdec.plan_document import Candidate, Formats, Plan, load_plan
from magicdec.specs.precision import DTYPE_OF_FORMAT
from magicdec.specs.speculation import HEAD_METHODS

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
NOT_RUN = ("suffix", *HEAD_METHODS)
"""Draft methods that are planned for and not run."""
FORMATS_OF_DTYPE = {"weight_dtype": "weights", "kv_dtype": "a KV cache", "draft_kv_dtype": "a draft's KV cache"}
"""What of a plan's formats the run's dtype decides. A draft's weights have an option of their own."""


def read_plan(path: Path, *, is_draft_given: bool = False, is_dtype_given: bool = False) -> list[dict[str, Any]]:
    """The options of the plan's best configuration and of its runner-up (the next best of the same batch, context and
    devices, where there is one), each with the plan's `gamma_table`.

    With `is_draft_given` the command line says what drafts, so that the plan's own draft need not be one that runs;
    with `is_dtype_given` likewise for the plan's number formats.
    Raises ConfigError when the file is no plan, or plans a draft, a number format or a spread over devices that cannot
    be run; StorageError when it cannot be read.
    """
    from magicdec.specs.gamma_table import TableGamma

    plan = load_plan(path)
    if plan.best.num_gpus != plan.best.tp_size:
        raise ConfigError(
            f"{path} spreads a replica as {plan.best.layout}, which is planned for but not run; plan for one --tp"
        )
    if not is_draft_given:
        _check_runs(path, plan)
    request, table = plan.request, plan.gamma_table
    common: dict[str, Any] = {
        "model": request.model,
        "temperature": request.temperature,
        "gamma_table": TableGamma(
            batch_sizes=tuple(table.batch_sizes),
            context_lens=tuple(table.context_lens),
            gammas=tuple(tuple(row) for row in table.gamma_of_steps),
        ),
        **_dtypes(path, plan.precision, is_dtype_given=is_dtype_given),
    }
    given = {"gen_len": request.gen_len or None, "top_k": request.top_k, "top_p": request.top_p}  # 0: not planned
    common |= {name: value for name, value in given.items() if value is not None}
    return [_options(row, common) for row in [plan.best, *_runner_up(plan)]]


def _check_runs(path: Path, plan: Plan) -> None:
    """Raises ConfigError, naming what can be run instead, when the plan's draft cannot."""
    if plan.best.draft_method in NOT_RUN:
        others = [row for row in plan.candidates if row.draft_method not in NOT_RUN]
        instead = f"its best that is run: {_flags(others[0])}" if others else "plan again with another --draft"
        raise ConfigError(f"{path} drafts with {plan.best.draft_method}, which is planned for but not run; {instead}")
    if not plan.candidates and plan.needs_acceptance:
        first = plan.needs_acceptance[0]
        drafts = ", ".join(f"{each.draft}/{each.draft_method}" for each in plan.needs_acceptance)
        raise ConfigError(
            f"{path} holds no draft to run: the acceptance of {drafts} on {plan.model} is not known; "
            f"plan with --acceptance-rate or --acceptance, or name a draft here, such as "
            f"--draft {first.draft if first.draft_method not in NOT_RUN else 'self'}"
        )


def _dtypes(path: Path, formats: Formats, *, is_dtype_given: bool) -> dict[str, str]:
    """The run's dtype, unless it is given, and the format of the draft's weights where it differs."""
    weights, draft_weights = formats.weight_dtype, formats.draft_weight_dtype
    options = {"draft_weight_dtype": draft_weights} if draft_weights != weights else {}
    if is_dtype_given:
        return options
    dtype = DTYPE_OF_FORMAT.get(weights, "bfloat16")
    planned = {what: getattr(formats, name) for name, what in FORMATS_OF_DTYPE.items()}
    lacking = [f"{what} in {value}" for what, value in planned.items() if DTYPE_OF_FORMAT.get(value) != dtype]
    if lacking:
        raise ConfigError(
            f"{path} plans {' and '.join(lacking)}, which is not run; --dtype {dtype} runs the rest of it"
        )
    return options | {"dtype": dtype}


def _flags(row: Candidate) -> str:
    flags = {
        "--draft": row.draft, "--draft-method": row.draft_method, "--draft-budget": row.draft_budget,
        "--gamma": row.gamma,
    }  # fmt: skip
    return " ".join(f"{flag} {value}" for flag, value in flags.items() if value is not None)


def _runner_up(plan: Plan) -> list[Candidate]:
    """The next best that can be run, of the same batch, context and devices where there is one."""

    def values(row: Candidate, *names: str) -> list[Any]:
        return [getattr(row, name) for name in names]

    others = [
        row
        for row in plan.candidates
        if row.draft_method not in NOT_RUN and values(row, *OPTION_OF_KEY) != values(plan.best, *OPTION_OF_KEY)
    ]
    place = ("batch_size", "context_len", "tp_size")
    alike = [row for row in others if values(row, *place) == values(plan.best, *place)]
    return (alike or others)[:1]


def _options(row: Candidate, common: dict[str, Any]) -> dict[str, Any]:
    options = common | {option: getattr(row, key) for key, option in OPTION_OF_KEY.items()}
    if options["draft"] == "none":  # a draft named on the command line takes its method, budget and gamma from there
        for name in ("draft_method", "draft_budget", "gamma", "draft_tp"):
            del options[name]
        return options
    if options["draft"] == "ngram":
        options.pop("draft_weight_dtype", None)
    if options["draft_tp"] == options["tp"]:
        del options["draft_tp"]  # all ranks, whose number --tp may change
    # Lists on the command line, so text here.
    options["gamma"] = str(options["gamma"])
    options["draft_budget"] = str(options["draft_budget"]) if options["draft_budget"] is not None else None
    return options
