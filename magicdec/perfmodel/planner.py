"""The planner: which draft, method, budget and gamma, on how many devices and at which batch; or no speculation at all.

    >>> from magicdec.perfmodel.planner import PlanRequest, plan
    >>> document = plan(PlanRequest(model="llama-3.1-8b", hardware=("a100-sxm-80gb",), tp_size=8,
    ...                             batch_sizes=(64,), context_lens=(32768,)))
    >>> document.best["draft_method"]
    'streamingllm'

With batch sizes given, each (hardware, batch, context) is answered for itself. Without them the batch is searched too,
under the latency limits and the memory. Every candidate is evaluated: the search is exhaustive over the grid.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from magicdec.errors import CapacityError, ConfigError
from magicdec.perfmodel import candidates, memory
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.candidates import Points, Row
from magicdec.perfmodel.cost import Array
from magicdec.perfmodel.document import SCHEMA_VERSION, PlanDocument, gamma_table
from magicdec.perfmodel.drafts import DraftOption, draft_options
from magicdec.perfmodel.grid import BoolArray, Grid, GridResult, evaluate
from magicdec.perfmodel.steps import Setup, memory_need, prefill_terms
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import EngineProfile, load_engine
from magicdec.specs.hardware import HardwareProfile, load_hardware
from magicdec.specs.model import ModelSpec
from magicdec.specs.parallel import check_tp, largest_tp_at_most, valid_tp_sizes
from magicdec.specs.precision import Precision
from magicdec.specs.speculation import MAX_GAMMA, SamplingSpec
from magicdec.specs.workload import WorkloadSpec

DEFAULT_MAX_GAMMA = 12
DEFAULT_BATCH = 64
MAX_BATCH = 65_536
MAX_CONTEXT = 2**26
NUM_SEARCHED_BATCHES = 48
MAX_CANDIDATES = 1000
SOURCE_ERROR = 0.05
"""Acceptance rates of two harnesses on one task differ by about this much."""
AT_TEMPERATURE_ONE = SamplingSpec(temperature=1.0)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is asked. Names are looked up in the catalogs; None lets the planner choose."""

    model: str | ModelSpec = "llama-3.1-8b"
    hardware: tuple[str | HardwareProfile, ...] = ("a100-sxm-80gb",)
    engine: str | EngineProfile | None = None
    """None: "magicdec-2024" on GPUs, "ours" on a CPU."""
    tp_size: int | None = None
    num_gpus: int | None = None
    batch_sizes: tuple[int, ...] = ()
    context_lens: tuple[int, ...] = (32_768,)
    gen_len: int = 0
    gamma: int | None = None
    draft: str | None = None
    draft_method: str | None = None
    draft_budgets: tuple[int, ...] = ()
    draft_tp_size: int | None = None
    sampling: SamplingSpec = AT_TEMPERATURE_ONE
    acceptance_rate: float | None = None
    acceptance: tuple[AcceptanceProfile, ...] = ()
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    draft_weight_dtype: str | None = None
    draft_kv_dtype: str | None = None
    tpot_limit_s: float | None = None
    ttft_limit_s: float | None = None
    workload: WorkloadSpec | None = None
    """Lengths of requests; replaces `context_lens` and `gen_len`."""

    def __post_init__(self) -> None:
        for what, values in (("batch", self.batch_sizes), ("context", self.context_lens)):
            limit = MAX_BATCH if what == "batch" else MAX_CONTEXT
            for value in values:
                if not 1 <= value <= limit:
                    raise ConfigError(f"{what} must be between 1 and {limit}, not {value}")
        for what, seconds in (("tpot limit", self.tpot_limit_s), ("ttft limit", self.ttft_limit_s)):
            if seconds is not None and not 0 < seconds < float("inf"):
                raise ConfigError(f"the {what} must be above 0, not {seconds}")
        if not self.context_lens or not self.hardware:
            raise ConfigError("a plan needs at least one context length and one device")
        if not 0 <= self.gen_len <= MAX_CONTEXT:
            raise ConfigError(f"gen-len must be between 0 and {MAX_CONTEXT}, not {self.gen_len}")
        if self.gamma is not None and not 0 <= self.gamma <= MAX_GAMMA:
            raise ConfigError(f"gamma must be between 0 and {MAX_GAMMA}, not {self.gamma}")
        if self.num_gpus is not None and not 1 <= self.num_gpus <= 10**6:
            raise ConfigError(f"gpus must be at least 1, not {self.num_gpus}")
        if self.acceptance_rate is not None and not 0.0 <= self.acceptance_rate <= 1.0:
            raise ConfigError(f"the acceptance rate must be between 0 and 1, not {self.acceptance_rate}")


@dataclass(frozen=True, kw_only=True)
class _Device:
    """One device's share of a request, resolved."""

    request: PlanRequest
    model: ModelSpec
    hardware: HardwareProfile
    engine: EngineProfile
    tp_sizes: tuple[int, ...]
    precision: Precision
    draft_precision: Precision
    searches_batch: bool
    options: list[DraftOption] = field(default_factory=list)

    def setup(self, option: DraftOption | None) -> Setup:
        common: dict[str, Any] = {
            "model": self.model,
            "hardware": self.hardware,
            "engine": self.engine,
            "sampling": self.request.sampling,
            "precision": self.precision,
        }
        if option is None:
            return Setup(**common)
        return Setup(
            **common,
            speculation=option.speculation(),
            draft_model=option.model,
            draft_precision=self.draft_precision,
        )

    @property
    def gammas(self) -> tuple[int, ...]:
        if self.request.gamma is not None:
            return (self.request.gamma,)
        return tuple(range(1, DEFAULT_MAX_GAMMA + 1))


def plan(request: PlanRequest) -> PlanDocument:
    """Answers a request.

    Raises:
        ConfigError: an impossible combination; the message names the nearest that works.
        CapacityError: the model fits on no number of the devices, or not with this batch and context.
    """
    model = request.model if isinstance(request.model, ModelSpec) else load_model_spec(request.model)
    for context in request.context_lens:
        if context + request.gen_len > model.max_position_embeddings:
            raise CapacityError(
                f"{model.name} reads at most {model.max_position_embeddings} tokens: context {context} + {request.gen_len} "
                "generated is too long"
            )
    options, lacking = draft_options(
        target=model,
        draft=request.draft,
        method=request.draft_method,
        budgets=request.draft_budgets,
        context=min(request.context_lens),
        profiles=request.acceptance,
        rate=request.acceptance_rate,
        draft_tp_size=request.draft_tp_size,
    )
    rows: list[Row] = []
    baselines: list[Row] = []
    devices = [_resolve(request, model, hardware, options) for hardware in request.hardware]
    for device in devices:
        found = _answer(device)
        baselines.extend(_best_autoregressive(device))
        rows.extend(found)
    return _document(request, devices, rows, baselines, lacking)


def _resolve(
    request: PlanRequest,
    model: ModelSpec,
    hardware: str | HardwareProfile,
    options: list[DraftOption],
) -> _Device:
    hw = hardware if isinstance(hardware, HardwareProfile) else load_hardware(hardware)
    on_cpu = hw.kind == "cpu"
    engine = request.engine or ("ours" if on_cpu else "magicdec-2024")
    node = 1 if on_cpu else hw.link.num_gpus_per_node
    if request.tp_size is not None:
        check_tp(model, request.tp_size)
        if request.num_gpus is not None and request.tp_size > request.num_gpus:
            raise ConfigError(f"tp {request.tp_size} needs more than the {request.num_gpus} GPUs given")
        tp_sizes: tuple[int, ...] = (request.tp_size,)
    elif request.num_gpus is not None:
        tp_sizes = tuple(valid_tp_sizes(model, min(request.num_gpus, node)))
    else:
        tp_sizes = (largest_tp_at_most(model, node),)
    limited = request.tpot_limit_s is not None or request.ttft_limit_s is not None or request.num_gpus is not None
    default = "fp32" if on_cpu else "bf16"
    weights, kv = request.weight_dtype or default, request.kv_dtype or default
    device = _Device(
        request=request,
        model=model,
        hardware=hw,
        engine=engine if isinstance(engine, EngineProfile) else load_engine(engine),
        tp_sizes=tp_sizes,
        precision=Precision(weight_dtype=weights, kv_dtype=kv),
        draft_precision=Precision(
            weight_dtype=request.draft_weight_dtype or weights, kv_dtype=request.draft_kv_dtype or kv
        ),
        searches_batch=not request.batch_sizes and limited,
        options=options,
    )
    for option in options:
        device.setup(option)  # a draft of another vocabulary is refused here
    return device


def _batches(device: _Device, context: int) -> Array:
    """The batch sizes to evaluate: the given ones, or a geometric range up to the largest that fits."""
    request = device.request
    if not device.searches_batch:
        return np.asarray(request.batch_sizes or (DEFAULT_BATCH,), dtype=np.float64)
    return _batch_range(int(_largest_batches(device, context).max(initial=0)))


def _batch_range(largest: int) -> Array:
    if largest < 1:
        return np.zeros(0)
    return np.unique(np.round(np.geomspace(1, min(largest, MAX_BATCH), NUM_SEARCHED_BATCHES)))


def _largest_batches(device: _Device, context: int) -> Array:
    """The largest autoregressive batch that fits, per tp size."""
    setup, tp = device.setup(None), np.asarray(device.tp_sizes, dtype=np.float64)

    def need(batch: float) -> Array:
        length = context + device.request.gen_len
        return memory_need(setup, batch=batch, max_len=length, budget=None, gamma=0, tp_size=tp).total_bytes

    return memory.largest_batch(need(0.0), need(1.0), memory.capacity_bytes(device.hardware, device.engine))


def _answer(device: _Device) -> list[Row]:
    """Rows of every context: autoregressive ones first, then the drafts'."""
    request = device.request
    rows: list[Row] = []
    sources = {option.acceptance.source for option in device.options if option.acceptance is not None}
    for context in request.context_lens:
        batches = _batches(device, context)
        _check_capacity(device, context, batches)
        ttft = prefill_terms(
            device.setup(None),
            batch=1.0,
            prompt_len=float(context),
            tp_size=np.asarray(device.tp_sizes, dtype=np.float64),
        ).total_s
        rows.extend(_evaluate_option(device, None, context, batches, ttft, 0.0))
        for index, option in enumerate(device.options):
            error = SOURCE_ERROR if len(sources) > 1 and index > 0 else 0.0
            rows.extend(_evaluate_option(device, option, context, batches, ttft, error))
    return rows


def _evaluate_option(
    device: _Device, option: DraftOption | None, context: int, batches: Array, ttft: Array, source_error: float
) -> list[Row]:
    """The rows of one draft at one context: every point, or when the batch is searched the best of each batch and tp."""
    request = device.request
    setup = device.setup(option)
    gammas = device.gammas if option is not None else (0,)
    if not len(batches) or (option is not None and gammas == (0,)):
        return []
    grid = Grid(
        batch_sizes=batches,
        context_lens=(float(context),),
        tp_sizes=device.tp_sizes,
        budgets=option.budgets if option is not None else (0,),
        gammas=gammas,
        gen_len=float(request.gen_len),
    )
    law = option.acceptance if option is not None else None
    result = evaluate(setup, law, grid)
    allowed = _allowed(device, result, ttft)
    chosen = _select(device, result, allowed)
    where = np.unravel_index(chosen, grid.shape)
    points = Points(
        batch=batches[where[0]],
        context=np.full(len(chosen), float(context)),
        tp=np.asarray(device.tp_sizes, dtype=np.float64)[where[2]],
        budget=np.asarray(grid.budgets, dtype=np.float64)[where[3]],
        gamma=np.asarray(grid.gammas, dtype=np.int64)[where[4]],
    )
    rows = candidates.rows(setup, law, points, gen_len=float(request.gen_len), source_error=source_error)
    for row in rows:
        row["num_replicas"] = max(1, (request.num_gpus or row["tp_size"]) // row["tp_size"])
        row["within_limits"] = bool(
            (request.tpot_limit_s is None or row["tpot_s"] <= request.tpot_limit_s)
            and (request.ttft_limit_s is None or row["ttft_s"] <= request.ttft_limit_s)
        )
    return rows


def _allowed(device: _Device, result: GridResult, ttft: Array) -> BoolArray:
    request = device.request
    allowed: BoolArray = result.valid.copy()
    if device.searches_batch:
        allowed &= result.fits
        if request.tpot_limit_s is not None:
            allowed &= result.tpot_s <= request.tpot_limit_s
        if request.ttft_limit_s is not None:
            allowed &= np.reshape(
                np.broadcast_to(ttft, (len(device.tp_sizes),)) <= request.ttft_limit_s, (1, 1, -1, 1, 1)
            )
    return allowed


def _select(device: _Device, result: GridResult, allowed: BoolArray) -> Any:
    """Flat indices: of all allowed points, or of the fastest budget and gamma for each batch and tp."""
    speedup = np.where(allowed, result.speedup, -np.inf)
    if not device.searches_batch:
        flat = np.flatnonzero(allowed)
        order = np.argsort(-speedup.ravel()[flat], kind="stable")
        return flat[order[:MAX_CANDIDATES]]
    per_case = speedup.reshape(*speedup.shape[:3], -1)
    inner = np.argmax(per_case, axis=-1)
    best = np.take_along_axis(per_case, inner[..., None], axis=-1)[..., 0]
    outer = np.flatnonzero(np.isfinite(best))
    return outer * per_case.shape[-1] + inner.ravel()[outer]


def _best_autoregressive(device: _Device) -> list[Row]:
    """Autoregressive decoding at its own best batch and tp, per context, within the latency limits."""
    searching = _Device(**{**device.__dict__, "searches_batch": True, "options": []})
    rows = []
    for context in device.request.context_lens:
        batches = _batch_range(int(_largest_batches(device, context).max(initial=0)))
        ttft = prefill_terms(
            device.setup(None),
            batch=1.0,
            prompt_len=float(context),
            tp_size=np.asarray(device.tp_sizes, dtype=np.float64),
        ).total_s
        found = _evaluate_option(searching, None, context, batches, ttft, 0.0)
        if found:
            rows.append(max(found, key=lambda row: float(row["tokens_per_s_per_gpu"])))
    return rows


def _check_capacity(device: _Device, context: int, batches: Array) -> None:
    """Refuses what cannot run even without a draft, naming the nearest that does."""
    largest = _largest_batches(device, context)
    name, hw = device.model.name, device.hardware.name
    if largest.max(initial=0) < 1:
        raise CapacityError(
            f"{name} with context {context} does not fit on {_where(device)}; {_what_fits(device, context)}"
        )
    if len(batches) and batches.min() > largest.max():
        tp = device.tp_sizes[int(np.argmax(largest))]
        raise CapacityError(
            f"batch {int(batches.min())} of {name} at context {context} does not fit on {tp} x {hw}; "
            f"the largest batch that fits is {int(largest.max())}"
        )


def _where(device: _Device) -> str:
    return f"{device.tp_sizes[-1]} x {device.hardware.name}"


def _what_fits(device: _Device, context: int) -> str:
    """The smallest tp that holds one sequence, or the shorter context or narrower weights that do."""
    sizes = [size for size in valid_tp_sizes(device.model, 64) if size > max(device.tp_sizes)]
    if sizes:
        wider = _Device(**{**device.__dict__, "tp_sizes": tuple(sizes)})
        enough = [size for size, batch in zip(sizes, _largest_batches(wider, context), strict=True) if batch >= 1]
        if enough:
            return f"tp {enough[0]} would"
    for dtype in ("fp8", "int4"):
        narrower = _Device(**{**device.__dict__, "precision": Precision(weight_dtype=dtype, kv_dtype=dtype)})
        if _largest_batches(narrower, context).max(initial=0) >= 1:
            return f"with weights and KV in {dtype} it would"
    return "a device with more memory, or a shorter context, is needed"


def _objective(row: Row) -> tuple[bool, bool, float]:
    return bool(row["within_limits"]), bool(row["fits"]), float(row["tokens_per_s_per_gpu"])


def _document(
    request: PlanRequest, devices: list[_Device], rows: list[Row], baselines: list[Row], lacking: list[dict[str, str]]
) -> PlanDocument:
    best_alone = {(row["hardware"], row["context_len"]): row for row in baselines}
    for row in [*rows, *baselines]:
        alone = best_alone.get((row["hardware"], row["context_len"]), row)
        row["speedup_vs_best_autoregressive"] = row["tokens_per_s_per_gpu"] / alone["tokens_per_s_per_gpu"]
    drafted = sorted((row for row in rows if row["gamma"] > 0), key=_objective, reverse=True)
    alone_rows = [row for row in rows if row["gamma"] == 0]
    best = max(rows, key=_objective)
    device = next(each for each in devices if each.hardware.name == best["hardware"])
    same = ("hardware", "batch_size", "context_len", "tp_size")
    alone = next((row for row in alone_rows if all(row[key] == best[key] for key in same)), best)
    detail = _detail(device, best)
    return PlanDocument(
        {
            "schema_version": SCHEMA_VERSION,
            "kind": "plan",
            "model": device.model.name,
            "hardware": device.hardware.name,
            "engine": device.engine.name,
            "source": "calibrated" if device.engine.fitted_on and device.hardware.is_measured else "analytical",
            "request": _request_record(request),
            "best": best,
            "autoregressive": alone,
            "best_autoregressive": baselines,
            "best_by_case": _best_by_case(rows),
            "pareto": _pareto(rows),
            "needs_acceptance": lacking,
            **detail,
            "gamma_table": _gamma_table(device, best),
            "notes": _notes(device, devices, best, drafted),
            "autoregressive_rows": alone_rows,
            "candidates": drafted,
        }
    )


def _detail(device: _Device, best: Row) -> dict[str, Any]:
    """Breakdown and memory of the best configuration."""
    option = _option_of(device, best)
    setup = device.setup(option)
    prediction = candidates.predict_points(
        setup,
        option.acceptance if option else None,
        Points(
            batch=np.asarray([float(best["batch_size"])]),
            context=np.asarray([float(best["context_len"])]),
            tp=np.asarray([float(best["tp_size"])]),
            budget=np.asarray([float(best["draft_budget"] or 0)]),
            gamma=np.asarray([best["gamma"]], dtype=np.int64),
        ),
        float(device.request.gen_len),
    )
    need = prediction.memory
    sizes = {
        name: float(np.ravel(getattr(need, name))[0])
        for name in (
            "weights_bytes",
            "kv_bytes",
            "draft_weights_bytes",
            "draft_kv_bytes",
            "workspace_bytes",
            "capacity_bytes",
        )
    }
    sizes["largest_batch"] = float(_largest_batch_with(device, option, best))
    sizes["largest_autoregressive_batch"] = float(_largest_batch_with(device, None, best))
    return {"breakdown": candidates.breakdown(setup, prediction, best["tp_size"]), "memory": sizes}


def _option_of(device: _Device, row: Row) -> DraftOption | None:
    for option in device.options:
        if row["gamma"] > 0 and (option.draft, option.method) == (row["draft"], row["draft_method"]):
            return option
    return None


def _largest_batch_with(device: _Device, option: DraftOption | None, best: Row) -> int:
    setup, tp = device.setup(option), best["tp_size"]
    length, budget = best["context_len"] + device.request.gen_len, best["draft_budget"]
    gamma = best["gamma"] if option is not None else 0

    def need(batch: float) -> Array:
        return memory_need(setup, batch=batch, max_len=length, budget=budget, gamma=gamma, tp_size=tp).total_bytes

    return int(memory.largest_batch(need(0.0), need(1.0), memory.capacity_bytes(device.hardware, device.engine)))


def _request_record(request: PlanRequest) -> dict[str, Any]:
    """The request in plain values: names for specs."""
    record: dict[str, Any] = {}
    for key, value in request.__dict__.items():
        if key == "acceptance":
            record[key] = [profile.name or profile.source for profile in value]
        elif key == "hardware":
            record[key] = [each if isinstance(each, str) else each.name for each in value]
        elif key == "sampling":
            record.update(temperature=value.temperature, top_k=value.top_k, top_p=value.top_p)
        else:
            record[key] = value.name if isinstance(value, ModelSpec | EngineProfile) else value
    return record


def _best_by_case(rows: list[Row]) -> list[Row]:
    """The best row of each device, context and (where it was given) batch."""
    cases: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        case = (row["hardware"], row["context_len"], row["batch_size"])
        if case not in cases or _objective(row) > _objective(cases[case]):
            cases[case] = row
    return list(cases.values())


def _pareto(rows: list[Row]) -> list[Row]:
    """Rows that no other of the same device and context beats in both latency and throughput per device."""
    frontier: list[Row] = []
    for case in {(row["hardware"], row["context_len"]): None for row in rows}:
        same = [row for row in rows if (row["hardware"], row["context_len"]) == case and row["fits"]]
        highest = 0.0
        for row in sorted(same, key=lambda each: (each["tpot_s"], -each["tokens_per_s_per_gpu"])):
            if row["tokens_per_s_per_gpu"] > highest:
                highest = row["tokens_per_s_per_gpu"]
                frontier.append(row)
    return frontier


TABLE_BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
TABLE_CONTEXTS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)


def _gamma_table(device: _Device, best: Row) -> dict[str, Any]:
    limit = device.model.max_position_embeddings - device.request.gen_len
    batches = sorted({*TABLE_BATCHES, best["batch_size"]})
    contexts = sorted({*(each for each in TABLE_CONTEXTS if each <= limit), best["context_len"]})
    return gamma_table(
        [(device.setup(option), option) for option in device.options],
        tp_size=best["tp_size"],
        batch_sizes=batches,
        context_lens=contexts,
        gammas=device.gammas,
        gen_len=device.request.gen_len,
    )


def _notes(device: _Device, devices: list[_Device], best: Row, drafted: list[Row]) -> list[str]:
    notes = []
    for each in devices:
        if not each.hardware.is_measured:
            notes.append(
                f"no kernels were measured on {each.hardware.name}: its curves are estimates, with wider intervals"
            )
    if not device.engine.fitted_on:
        notes.append(
            f"engine profile {device.engine.name} is not fitted to measurements: its fixed costs are estimates"
        )
    if len({row["acceptance_source"] for row in drafted}) > 1:
        notes.append(
            "acceptance comes from different sources, which is in the intervals of all but the first: "
            "a measured profile of each method on the same task would rank them better"
        )
    if best["gamma"] == 0 and drafted:
        notes.append("speculation does not pay here: decode autoregressively")
    return notes
