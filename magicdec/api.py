"""The Python interface: what the commands answer, from plain values.

    import magicdec

    plan = magicdec.plan(model="llama-3.1-8b", hardware="h100", context="32k", batch=[16, 64])
    plan.best.speedup, plan.best.verdict
    plan.to_frame()             # every candidate, as a pandas table
    magicdec.predict(batch=64, context=32768, draft_budget=512, gamma=3).tpot_s
    magicdec.simulate(rate=4, replicas=2, tp=4, workload="rag.csv").ttft_s      # of every request
    magicdec.load_records("results.jsonl").to_frame()
    magicdec.report("report.html", plan=plan)
    magicdec.models(), magicdec.hardware(), magicdec.engines()

Options of a plan are the fields of schema/request.py; None is the same as leaving one out. One
value may stand for a list of one, and numbers of tokens may be written "32k". A model, device or
engine is a name, a path or a spec; a model may also be the dictionary of its config.json.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from magicdec.errors import ConfigError
from magicdec.perfmodel import variations
from magicdec.perfmodel.kernels.profile import hardware_names
from magicdec.perfmodel.planner import make_plan, request_of
from magicdec.perfmodel.variations import Sensitivity
from magicdec.schema.plan import Plan
from magicdec.schema.plan import load_plan as read_plan
from magicdec.schema.record import Record, read_many, record_rows
from magicdec.schema.request import request_options
from magicdec.schema.row import Candidate
from magicdec.specs.catalog import load_model_spec, model_names
from magicdec.specs.engine import engine_names
from magicdec.specs.model import ModelSpec

if TYPE_CHECKING:
    import pandas as pd

    from magicdec.perfmodel.rate.simulate import SimulatedTimes

F = TypeVar("F", bound=Callable[..., Any])
IDENTITY = (
    "hardware",
    "batch_size",
    "context_len",
    "draft",
    "draft_method",
    "draft_budget",
    "gamma",
)


def _takes_options(function: F) -> F:
    """Gives a function the options of a plan (schema/request.py) as keywords, for editors and
    `inspect`, and a line on each in its docstring, for help()."""
    asked = request_options()
    signature = inspect.signature(function)
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            parameters.append(parameter)
    for name in asked:
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        )
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    lines = [f"        {name}: {option.help}" for name, option in asked.items()]
    before, raises, after = (function.__doc__ or "").partition("\n    Raises:")
    function.__doc__ = "\n".join(
        [before.rstrip(), "", "    Options:", *lines, raises + after]
    )
    return function


@_takes_options
def plan(**options: Any) -> Plan:
    """Which draft, budget and gamma pay, or none: `magicdec plan`, with options of the same names.

    Raises:
        ConfigError: an option, a name or a combination that cannot be; the message names the
        nearest that can.
        CapacityError: what does not fit on the devices, or within the limits on latency.
    """
    return make_plan(request_of(**options))


@_takes_options
def predict(**options: Any) -> Candidate:
    """One configuration: of `plan`'s options, one device, batch, context, draft, budget and gamma.

    Gamma 0 (or draft "none") is autoregressive decoding.

    Raises:
        ConfigError: several configurations, or a draft whose acceptance is unknown.
    """
    request = request_of(**options)
    has_draft = request.gamma != 0 and request.draft != "none"
    wanted = [row for row in make_plan(request).rows if row.is_speculative == has_draft]
    if not wanted:
        raise ConfigError(
            f"no acceptance is known for this draft of {request.model}; give acceptance_rate"
        )
    if len(wanted) > 1:
        varied = []
        for name in IDENTITY:
            if len({getattr(row, name) for row in wanted}) > 1:
                varied.append(name)
        raise ConfigError(
            f"predict takes one configuration; give one {', one '.join(varied)}"
        )
    return wanted[0]


@_takes_options
def sensitivity(**options: Any) -> Sensitivity:
    """Which input of one configuration moves its speedup most, and what to measure next: `magicdec
    sensitivity`.

    Raises:
        ConfigError: as `plan`; or no draft to vary the inputs of.
    """
    return variations.sensitivity(request_of(**options))


def models() -> list[str]:
    """Models that can be planned by name; any other is given as its config.json."""
    return model_names()


def hardware() -> list[str]:
    """Devices that can be planned by name; any other takes a TOML file (docs/extending.md)."""
    return list(hardware_names())


def engines() -> list[str]:
    """Engines that can be planned for by name; any other is given as a TOML file."""
    return list(engine_names())


@_takes_options
def simulate(
    *,
    replicas: int = 1,
    seed: int = 0,
    **options: Any,
) -> SimulatedTimes:
    """Replicas under arrivals: `plan`'s options with a rate or requests; arrays of every request's
    times.

    A draft that is named takes its gamma from the plan's table, by batch.

    Raises:
        ConfigError: an option or combination that cannot be, or a draft whose acceptance is
        unknown.
        CapacityError: a request that does not fit.
    """
    request = request_of(**options)
    if not request.has_arrivals:
        raise ConfigError("a simulation needs a rate, or requests")
    model = request.model
    if not isinstance(model, ModelSpec):
        model = load_model_spec(model)
    from magicdec.perfmodel.rate.capacity import simulated

    return simulated(request, model, replicas=replicas, seed=seed)


class Records(list[Record]):
    """Records with a table of them."""

    def to_frame(self) -> pd.DataFrame:
        """A row per record, under the schema's names (docs/records.md)."""
        import pandas as pd

        return pd.DataFrame(record_rows(self)).convert_dtypes()


def load_plan(path: str | Path) -> Plan:
    """A plan that was written with `magicdec plan -o` or `plan.to_json()`. Raises StorageError or
    ConfigError.
    """
    return read_plan(Path(path))


def report(
    path: str | Path,
    *,
    records: str | Path | Iterable[str | Path] = (),
    plan: Plan | None = None,
    title: str = "Speculative decoding report",
) -> Path:
    """Writes a report of records files, a plan or both: `magicdec report`. A path that ends in .pdf
    becomes a PDF.

    Raises:
        ConfigError: nothing to report.
        StorageError: a file that cannot be read or written.
    """
    from magicdec.reports.data import ReportData
    from magicdec.reports.report import write_report

    data = ReportData.from_records(load_records(records), plan, title=title)
    write_report(data, Path(path))
    return Path(path)


def load_records(paths: str | Path | Iterable[str | Path]) -> Records:
    """Every readable record of one or more files. Raises StorageError."""
    if isinstance(paths, str | Path):
        paths = [paths]
    return Records(read_many([Path(path) for path in paths]))
