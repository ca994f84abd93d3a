"""The Python interface: what the commands answer, from plain values.

    import magicdec

    plan = magicdec.plan(model="llama-3.1-8b", hardware="h100-sxm-80gb", context=32768, batch=[16, 64])
    plan.best.speedup, plan.best.verdict
    plan.to_frame()                                     # every candidate, as a pandas table
    magicdec.predict(batch=64, context=32768, draft_budget=512, gamma=3).tpot_s
    magicdec.load_records("results.jsonl").to_frame()

One value may stand for a list of one; numbers of tokens may be written "32k"; names, paths and specs are all taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar, Unpack

from magicdec.errors import ConfigError, unknown_choice
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.plan.drafts import load_profiles
from magicdec.perfmodel.plan.planner import plan as answer
from magicdec.perfmodel.plan.request import PlanRequest
from magicdec.plan_document import Candidate, Plan
from magicdec.records import Record, read_many, record_rows
from magicdec.specs.engine import EngineProfile
from magicdec.specs.hardware import HardwareProfile
from magicdec.specs.model import ModelSpec
from magicdec.specs.speculation import SamplingSpec
from magicdec.specs.workload import WorkloadSpec, load_workload
from magicdec.units import MILLI, parse_count

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
Many: TypeAlias = T | Iterable[T]
Tokens = int | str
"""A number of tokens or sequences; a string may end in k (1024) or m (its square)."""


class PlanOptions(TypedDict, total=False):
    """What `plan` takes; what is left out, the planner chooses. Named as the options of `magicdec plan`."""

    model: str | Path | ModelSpec | None
    hardware: Many[str | Path | HardwareProfile] | None
    engine: str | Path | EngineProfile | None
    tp: int | None
    gpus: int | None
    pp: int | None
    """Stages of a pipeline."""
    ep: int | None
    """Ranks that whole experts are divided over."""
    dp_attention: bool
    """Data-parallel attention: groups of tp ranks hold sequences of their own."""
    batch: Many[Tokens] | None
    context: Many[Tokens] | None
    gen_len: Tokens | None
    gamma: int | None
    draft: str | None
    draft_method: str | None
    draft_budget: Many[Tokens] | None
    draft_tp: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    acceptance_rate: float | Iterable[float] | None
    """One for every position, or one by position."""
    acceptance: Many[str | Path | AcceptanceProfile] | None
    weight_dtype: str | None
    kv_dtype: str | None
    draft_weight_dtype: str | None
    draft_kv_dtype: str | None
    tpot_ms: float | None
    ttft_ms: float | None
    price: float | None
    """US dollars per device and hour."""
    workload: str | Path | WorkloadSpec | None


RENAMED = {
    "tp": "tp_size",
    "pp": "pp_size",
    "ep": "ep_size",
    "gpus": "num_gpus",
    "draft_tp": "draft_tp_size",
    "price": "price_per_hour_usd",
}
COUNTS = {"batch": "batch_sizes", "context": "context_lens", "draft_budget": "draft_budgets"}
LIMITS = {"tpot_ms": "tpot_limit_s", "ttft_ms": "ttft_limit_s"}
SAMPLING = ("temperature", "top_p", "top_k")
IDENTITY = ("hardware", "batch_size", "context_len", "draft", "draft_method", "draft_budget", "gamma")


def plan(**options: Unpack[PlanOptions]) -> Plan:
    """Which draft, budget and gamma pay, or none: `magicdec plan`.

    Raises:
        ConfigError: an option, a name or a combination that cannot be; the message names the nearest that can.
        CapacityError: what does not fit on the devices, or within the limits on latency.
    """
    return answer(plan_request(**options))


def predict(**options: Unpack[PlanOptions]) -> Candidate:
    """One configuration: of `plan`'s options, one device, batch, context, draft, budget and gamma.

    Gamma 0 (or draft "none") is autoregressive decoding.

    Raises:
        ConfigError: several configurations, or a draft whose acceptance is unknown.
    """
    request = plan_request(**options)
    rows = answer(request).rows
    wanted = [row for row in rows if row.is_speculative == (request.gamma != 0 and request.draft != "none")]
    if not wanted:
        raise ConfigError(f"no acceptance is known for this draft of {request.model}; give acceptance_rate")
    if len(wanted) > 1:
        varied = [name for name in IDENTITY if len({getattr(row, name) for row in wanted}) > 1]
        raise ConfigError(f"predict takes one configuration; give one {', one '.join(varied)}")
    return wanted[0]


class Records(list[Record]):
    """Records with a table of them."""

    def to_frame(self) -> pd.DataFrame:
        """A row per record, under the schema's names (docs/records.md)."""
        import pandas as pd

        return pd.DataFrame(record_rows(self)).convert_dtypes()


def load_records(paths: Many[str | Path]) -> Records:
    """Every readable record of one or more files. Raises StorageError."""
    return Records(read_many([Path(path) for path in _many(paths)]))


def plan_request(**options: Unpack[PlanOptions]) -> PlanRequest:
    """The planner's request for plain options. Raises ConfigError."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    unknown = set(given) - set(PlanOptions.__annotations__)
    if unknown:
        raise unknown_choice("option", min(unknown), PlanOptions.__annotations__)
    request: dict[str, Any] = {}
    for name, value in given.items():
        if name in COUNTS:
            request[COUNTS[name]] = tuple(_count(name, each) for each in _many(value))
        elif name in LIMITS:
            request[LIMITS[name]] = value * MILLI
        elif name not in (*SAMPLING, "acceptance"):
            request[RENAMED.get(name, name)] = value
    if "gen_len" in request:
        request["gen_len"] = _count("gen_len", request["gen_len"])
    if "hardware" in given:
        request["hardware"] = tuple(_named(each) for each in _many(given["hardware"]))
    for name in ("model", "engine"):
        if name in request:
            request[name] = _named(request[name])
    if not isinstance(rate := given.get("acceptance_rate", 0.0), int | float):
        request["acceptance_rate"] = tuple(rate)
    request["sampling"] = SamplingSpec(**{"temperature": 1.0} | {key: given[key] for key in SAMPLING if key in given})
    request["acceptance"] = _profiles(given)
    if isinstance(workload := given.get("workload"), str | Path):
        request["workload"] = load_workload(Path(workload))
    return PlanRequest(**request)


def _profiles(given: dict[str, Any]) -> tuple[AcceptanceProfile, ...]:
    every = list(_many(given.get("acceptance", ())))
    files = [Path(each) for each in every if not isinstance(each, AcceptanceProfile)]
    loaded = load_profiles(files, draft=given.get("draft"), method=given.get("draft_method"))
    return (*(each for each in every if isinstance(each, AcceptanceProfile)), *loaded)


def _named(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _many(value: Any) -> tuple[Any, ...]:
    """A tuple of values; a string, a path, a spec or a number is one of them."""
    is_several = isinstance(value, Iterable) and not isinstance(value, str | Path)
    return tuple(value) if is_several else (value,)


def _count(name: str, value: Any) -> int:
    if isinstance(value, str):
        try:
            return parse_count(value)
        except ValueError:
            raise ConfigError(f"{name} must be a number like 4096 or 32k, not '{value}'") from None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, not {value!r}")
    return value
