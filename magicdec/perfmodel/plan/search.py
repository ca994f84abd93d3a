"""The search: every budget, gamma, tp and batch of each draft for one device and context, under memory and limits.

Exhaustive: `predict` evaluates the whole grid of a draft at once, and what is kept of it keeps its prediction.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from magicdec.counts import Array
from magicdec.errors import CapacityError
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.intervals import Interval, interval, tokens_error
from magicdec.perfmodel.kernels.gemm import GemmCurve
from magicdec.perfmodel.kernels.op import BOUNDS, ForwardTime, Op
from magicdec.perfmodel.plan.request import DEFAULT_BATCH, Device, DraftOption
from magicdec.perfmodel.serving import WholeRequests, whole_requests
from magicdec.perfmodel.setup import Points, Setup, draft_tp, microbatch
from magicdec.perfmodel.speedup import BoolArray, Prediction, predict
from magicdec.plan_document import Candidate, Ceilings, Operation, verdict_of
from magicdec.plan_request import MAX_BATCH
from magicdec.specs.parallel import valid_tp_sizes
from magicdec.specs.precision import Precision
from magicdec.specs.speculation import draft_kind
from magicdec.units import MEGA, format_tokens

SECONDS_PER_HOUR = 3600.0
MEASURED_RANGE = 1.05
"""So far beyond the first and the last measured budget (or context) is still taken as measured."""
NO_DRAFT: dict[str, Any] = {
    "draft": "none", "draft_method": "none", "draft_budget": None, "draft_tp_size": None, "draft_step_s": 0.0,
    "accept_step_s": 0.0, "upkeep_step_s": 0.0, "acceptance_source": "", "acceptance_extrapolated": False,
    "break_even_gen_len": None,
}  # fmt: skip
OF_PREDICTION = (
    "autoregressive_step_s", "draft_step_s", "verify_step_s", "accept_step_s", "upkeep_step_s", "step_s",
    "expected_tokens_per_step", "tpot_s", "ttft_s", "tokens_per_s", "speedup", "break_even_gen_len",
)  # fmt: skip


def candidates(
    device: Device, prediction: Prediction, acceptance: AcceptanceProfile | None, *, baseline: float | None
) -> list[Candidate]:
    """One candidate per point of a prediction in rows.

    `baseline`: tokens per second, over all devices, of autoregressive decoding at its best batch; None: there is none.
    """
    points = prediction.points
    bounds = interval(prediction, tokens_error(prediction, acceptance))
    columns = {
        "batch_size": points.batch.astype(np.int64), "context_len": points.context.astype(np.int64),
        "tp_size": points.tp.astype(np.int64),
        "ep_size": np.asarray(prediction.setup.spread.ep_size(points.tp), dtype=np.int64), "gamma": points.gamma,
        "draft_budget": np.zeros(()) if points.budget is None else points.budget,
        "draft_tp_size": draft_tp(prediction.setup, points.tp),
        **{name: getattr(prediction, name) for name in OF_PREDICTION}, "tpot_low_s": bounds.tpot_low_s,
        "tpot_high_s": bounds.tpot_high_s, "tokens_per_s_per_gpu": prediction.tokens_per_s / prediction.num_gpus,
        "speedup_low": bounds.speedup_low, "speedup_high": bounds.speedup_high,
        "memory_bytes_per_gpu": prediction.memory.total_bytes, "fits": prediction.memory.fits,
        "bound_by": _binding(prediction), **_of_requests(device, prediction, bounds),
    }  # fmt: skip
    table = [prediction.full(np.asarray(values)).tolist() for values in columns.values()]
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*table, strict=True))
    return [_candidate(device, prediction.setup, acceptance, value, baseline) for value in rows]


def _candidate(
    device: Device, setup: Setup, acceptance: AcceptanceProfile | None, value: dict[str, Any], baseline: float | None
) -> Candidate:
    request, engine, hw, gamma = device.request, setup.engine, setup.hardware, value["gamma"]
    if gamma > 0 and acceptance is not None:
        budget, paid, context = int(value["draft_budget"]), value["break_even_gen_len"], value["context_len"]
        named = request.draft_model  # as engines load it
        value |= {
            "draft": setup.speculation.draft, "draft_method": setup.speculation.draft_method,
            "draft_budget": budget or None, "draft_tp_size": int(value["draft_tp_size"]),
            "acceptance_source": acceptance.source,
            "draft_checkpoint": str(Path(named).parent if named.endswith(".json") else named)
            if named is not None
            else acceptance.checkpoint,
            "acceptance_extrapolated": _is_extrapolated(acceptance, budget, context, gamma),
            "break_even_gen_len": int(paid) if math.isfinite(paid) else None,
            "marks": _marks(setup, acceptance, context),
        }  # fmt: skip
    else:
        value |= NO_DRAFT | {"verify_step_s": value["autoregressive_step_s"]}
    whole = "request_s" in value
    per_second = value["output_tokens_per_s_per_gpu" if whole else "tokens_per_s_per_gpu"]
    usd_per_s = hw.price_per_hour_usd / SECONDS_PER_HOUR if hw.price_per_hour_usd else None
    num_gpus = value["tp_size"] * setup.spread.groups
    num_replicas = max(1, (request.num_gpus or num_gpus) // num_gpus)
    if whole:
        gpu_s = device.lengths.output_len / per_second
        value["requests_per_s"] = num_replicas * num_gpus / gpu_s
        value["gpu_hours_per_million_requests"] = gpu_s / SECONDS_PER_HOUR * MEGA
        value["cost_per_million_requests_usd"] = usd_per_s * gpu_s * MEGA if usd_per_s else None
    between_s, first_s = (value[f"request_{name}" if whole else name] for name in ("tpot_s", "ttft_s"))
    low, high = (value[f"request_speedup_{end}" if whole else f"speedup_{end}"] for end in ("low", "high"))
    return Candidate(
        **value, hardware=hw.name, pp_size=setup.spread.pp, dp_size=setup.spread.dp,
        num_nodes=1 if hw.kind == "cpu" else -(-num_gpus // hw.link.num_gpus_per_node), num_replicas=num_replicas,
        is_captured=engine.is_captured(
            batch=int(microbatch(setup, value["batch_size"])), gamma=gamma, tp_size=value["tp_size"]
        ),
        speedup_vs_best_autoregressive=None if baseline is None else per_second * num_gpus * num_replicas / baseline,
        verdict=verdict_of(speedup_low=low, speedup_high=high),
        within_limits=(request.tpot_limit_s is None or between_s <= request.tpot_limit_s)
        and (request.ttft_limit_s is None or first_s <= request.ttft_limit_s),
        cost_per_million_tokens_usd=usd_per_s / per_second * MEGA if usd_per_s else None,
    )  # fmt: skip


def _marks(setup: Setup, acceptance: AcceptanceProfile, context: float) -> list[str]:
    """Reservations about a draft: no release of the engine runs it, no server was measured with it, no head read so
    far."""
    engine, formats, spec, trained = setup.engine, setup.precision, setup.speculation, acceptance.trained_len
    is_foreign = draft_kind(spec.draft, spec.draft_method) in engine.draft_notes
    is_known = engine.is_speculation_fitted(setup.hardware.name, formats.weight_dtype, formats.kv_dtype)
    found = ["plugin"] if is_foreign else []
    found += ["untested"] if is_foreign or not is_known else []
    is_far = trained is not None and context > trained * MEASURED_RANGE
    return [*found, f"trained to {format_tokens(trained or 0)}"] if is_far else found


def _of_requests(device: Device, prediction: Prediction, bounds: Interval) -> dict[str, Any]:
    """The columns of whole requests, where the length of their output is known."""
    whole = requests_of(device, prediction)
    if whole is None:
        return {}
    drafted = whole.drafted
    low, high = whole.speedup_bounds(bounds)
    return {
        "request_ttft_s": drafted.ttft_s, "request_tpot_s": drafted.tpot_s, "request_s": drafted.in_slot_s,
        "request_speedup": whole.speedup_at(prediction.speedup), "request_speedup_low": low,
        "request_speedup_high": high, "prefill_share": drafted.prefill_share,
        "output_tokens_per_s_per_gpu": whole.output_tokens_per_s / prediction.num_gpus,
    }  # fmt: skip


def requests_of(device: Device, prediction: Prediction) -> WholeRequests | None:
    """Whole requests at each point; None where the length of their output is not known."""
    lengths = device.lengths
    if not lengths.output_len:
        return None
    return whole_requests(prediction, prompts=lengths.prompts, output_len=lengths.output_len)


def _is_extrapolated(acceptance: AcceptanceProfile, budget: float, context: float, gamma: int) -> bool:
    """Whether a profile is used outside the budgets or contexts that it was measured at, or for longer blocks."""
    if acceptance.measured_gamma is not None and gamma > acceptance.measured_gamma:
        return True
    cases = ((budget, acceptance.measured_budgets), (context, acceptance.measured_contexts))
    return any(
        value > 0 and bool(measured) and not min(measured) / MEASURED_RANGE <= value <= max(measured) * MEASURED_RANGE
        for value, measured in cases
    )


def _binding(prediction: Prediction) -> Any:
    """The resource that binds most of each point's step."""
    seconds = prediction.terms.step_seconds("bound")
    stacked = np.stack([prediction.full(seconds[bound]) for bound in BOUNDS])
    return np.asarray(BOUNDS)[np.argmax(stacked, axis=0)]


def breakdown(prediction: Prediction) -> dict[str, list[Operation]]:
    """Operations of one configuration: time, the datasheet's ceiling for the same work, and what binds."""
    terms, tp_size = prediction.terms, int(prediction.points.tp.flat[0])
    return {
        name: [_operation(prediction.setup, op, tp_size) for op in getattr(terms, name).ops if _first(op.time_s) > 0]
        for name in ("autoregressive", "draft", "verify", "accept", "upkeep")
    }


def ceilings(setup: Setup) -> Ceilings:
    """The device's roof for the formats of a setup."""
    hw, dtype = setup.hardware, setup.precision.compute_dtype
    gemm, rate = GemmCurve.of(hw, dtype), hw.compute_rate(dtype)
    return Ceilings(
        memory_bytes_per_s=hw.memory_bytes_per_s, flops_per_s=rate,
        gemm_bytes_per_s=gemm.bandwidth_efficiency * hw.memory_bytes_per_s,
        gemm_flops_per_s=gemm.flops_efficiency * rate,
    )  # fmt: skip


def _first(value: Any) -> float:
    return float(np.ravel(np.asarray(value, dtype=np.float64))[0])


def _operation(setup: Setup, op: Op, tp_size: int) -> Operation:
    hw = setup.hardware
    flops, weight_bytes, kv_bytes, activation_bytes, sent = (_first(value) for value in op.cost)
    num_bytes = weight_bytes + kv_bytes + activation_bytes
    wire = 2.0 * (tp_size - 1) / tp_size * sent / hw.link.bytes_per_s
    ceiling = max(num_bytes / hw.memory_bytes_per_s, flops / hw.compute_rate(setup.precision.compute_dtype), wire)
    one = ForwardTime((op,)).bound_seconds()
    return Operation(
        op=op.name, time_s=_first(op.time_s), ceiling_s=ceiling,
        bound_by=max(BOUNDS, key=lambda each: _first(one[each])), flops=flops,
        bytes=num_bytes if op.group != "link" else sent,
    )  # fmt: skip


MAX_EVERY_BATCH = 512
"""Up to here every batch size is searched: waves of blocks make neighbours differ by several percent."""
NUM_SEARCHED_BATCHES = 512
MAX_CANDIDATES = 1000
MAX_SUGGESTED_TP = 64


@dataclass(frozen=True, kw_only=True)
class Found:
    """Candidates kept of one draft (None: autoregressive decoding) in one case, and their prediction as rows in the
    same order."""

    option: DraftOption | None
    prediction: Prediction
    rows: list[Candidate]

    def of(self, row: Candidate) -> Prediction:
        """The prediction of one of the rows."""
        return self.prediction.take([self.rows.index(row)])


def search(device: Device, baseline: Candidate | None) -> list[Found]:
    """Autoregressive decoding first, then each draft. `baseline`: autoregressive decoding at its best batch.

    Raises CapacityError when not even autoregressive decoding fits.
    """
    batches = _searched_batches(device)
    _check_capacity(device, batches)
    rate = baseline.rate if baseline is not None else None
    found = [_found(device, option, batches, rate) for option in (None, *device.options)]
    return [each for each in found if each is not None]


def best_autoregressive(device: Device) -> Candidate | None:
    """Autoregressive decoding at its own best batch and tp, within the latency limits; None where it keeps them at no
    batch."""
    searching = dataclasses.replace(device, searches_batch=True, options=())
    batches = _searched_batches(searching)
    if not len(batches):
        return None
    whole = predict(device.setup(None), None, _points(searching, None, batches))
    chosen = _worth_a_look(searching, whole)
    if not len(chosen):
        return None
    rates = whole.full(_Seen.of(device, whole).rate_per_gpu * _used(device, whole)).ravel()[chosen]
    best = candidates(device, whole.take(chosen[[np.argmax(rates)]]), None, baseline=None)[0]
    return msgspec.structs.replace(best, speedup_vs_best_autoregressive=1.0)


def _searched_batches(device: Device) -> Array:
    """The batch sizes to evaluate: the given ones; a usual one, or the largest power of two that fits where that does
    not; or where it is searched, a geometric range up to the largest that fits."""
    if device.request.batch_sizes and not device.searches_batch:
        return np.asarray(device.request.batch_sizes, dtype=np.float64)
    largest = device.largest_batches().max(initial=0)
    if not device.searches_batch:
        return np.asarray([DEFAULT_BATCH if largest < 1 else min(DEFAULT_BATCH, 2.0 ** np.floor(np.log2(largest)))])
    every = np.arange(1.0, min(largest, MAX_EVERY_BATCH) + 1.0)
    if largest <= MAX_EVERY_BATCH:
        return every
    beyond = np.geomspace(MAX_EVERY_BATCH, min(largest, MAX_BATCH), NUM_SEARCHED_BATCHES)
    return np.unique([*every, *np.round(beyond)])


def _found(device: Device, option: DraftOption | None, batches: Array, baseline: float | None) -> Found | None:
    """Every point of one draft, or where the batch is searched those worth a look; None where there are none."""
    if not len(batches) or (option is not None and device.gammas_of(option) == (0,)):
        return None
    law = option.acceptance if option is not None else None
    whole = predict(device.setup(option), law, _points(device, option, batches))
    if device.searches_batch:
        chosen = _worth_a_look(device, whole)
    else:
        flat = np.flatnonzero(whole.full(whole.valid))
        chosen = flat[np.argsort(-whole.full(whole.speedup).ravel()[flat], kind="stable")]  # fastest first
        if len(chosen) > MAX_CANDIDATES:
            leading = _leading(device, whole, tokens_error(whole, law))
            chosen = np.concatenate([chosen[:MAX_CANDIDATES], np.setdiff1d(leading, chosen[:MAX_CANDIDATES])])
    if not len(chosen):
        return None
    prediction = whole.take(chosen)
    rows = candidates(device, prediction, law, baseline=baseline)
    return Found(option=option, prediction=prediction, rows=rows)


def _points(device: Device, option: DraftOption | None, batches: Array) -> Points:
    lengths, budgets = device.lengths, option.budgets if option is not None else (0,)
    return Points.grid(
        batch=batches, context=(lengths.prompt_len,), tp=device.tp_sizes, budget=budgets,
        gamma=device.gammas_of(option), gen_len=lengths.growth, max_len=lengths.max_len(batches),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """Latencies and rates that users see and limits bear on: of whole requests where their lengths are known."""

    device: Device
    prediction: Prediction
    whole: WholeRequests | None

    @classmethod
    def of(cls, device: Device, prediction: Prediction) -> _Seen:
        return cls(device=device, prediction=prediction, whole=requests_of(device, prediction))

    @property
    def between_s(self) -> Array:
        return self.prediction.tpot_s if self.whole is None else self.whole.drafted.tpot_s

    @property
    def rate_per_gpu(self) -> Array:
        replica = self.prediction.tokens_per_s if self.whole is None else self.whole.output_tokens_per_s
        return replica / self.prediction.num_gpus

    @property
    def is_within_limits(self) -> BoolArray:
        request, allowed = self.device.request, np.ones((), dtype=np.bool_)
        if request.tpot_limit_s is not None:
            allowed = allowed & (self.between_s <= request.tpot_limit_s)
        if request.ttft_limit_s is not None:
            first_s = self.prediction.ttft_s if self.whole is None else self.whole.drafted.ttft_s
            allowed = allowed & (first_s <= request.ttft_limit_s)
        return allowed


def _leading(device: Device, result: Prediction, tokens: Array) -> npt.NDArray[np.int64]:
    """Flat indices, of each batch, of the points with the highest rate and with the highest lower end of it (`tokens`:
    the error of tokens per step), so that a batch's answer does not hang on how many were asked for."""
    seen = _Seen.of(device, result)
    rate = result.full(seen.rate_per_gpu)
    share = interval(result, tokens).speedup_low / result.speedup
    if seen.whole is not None:
        share = seen.whole.speedup_at(share * result.speedup) / seen.whole.speedup_at(result.speedup)
    is_first = (
        2.0 * result.full(seen.is_within_limits) + result.full(result.memory.fits) - 4.0 * ~result.full(result.valid)
    )
    num_batches = result.points.shape[0]
    scores = [(is_first + each / (2.0 * rate.max())).reshape(num_batches, -1) for each in (rate, rate * share)]
    first = np.arange(num_batches) * scores[0].shape[1]
    return np.unique(np.concatenate([first + score.argmax(axis=1) for score in scores]))


def _worth_a_look(device: Device, result: Prediction) -> npt.NDArray[np.int64]:
    """Flat indices of those that fit, keep the limits, and that no other of this draft beats in both latency and
    throughput of all devices."""
    seen = _Seen.of(device, result)
    flat = np.flatnonzero(result.full(result.memory.fits & result.valid & seen.is_within_limits))
    rate = result.full(seen.rate_per_gpu * _used(device, result)).ravel()[flat]
    latency = result.full(seen.between_s).ravel()[flat]
    order = np.lexsort((-rate, latency))
    highest = np.maximum.accumulate(np.concatenate([[0.0], rate[order][:-1]]))
    found: npt.NDArray[np.int64] = flat[order[rate[order] > highest]]
    return found


def _used(device: Device, result: Prediction) -> Array:
    """Devices that all replicas use."""
    return result.num_gpus * np.maximum(1.0, (device.request.num_gpus or 1) // result.num_gpus)


def _check_capacity(device: Device, batches: Array) -> None:
    """Refuses what cannot run even without a draft, naming the nearest that does."""
    largest, groups = device.largest_batches(), device.spread.groups
    name, hw, context = device.model.name, device.hardware.name, round(device.lengths.prompt_len)
    if largest.max(initial=0) < 1:
        parts = [f"{part} {size}" for part, size in (("pp", device.spread.pp), ("dp", device.spread.dp)) if size > 1]
        spread = f" ({', '.join(parts)})" if parts else ""
        raise CapacityError(
            f"{name} with context {context} does not fit on {device.tp_sizes[-1] * groups} x {hw}{spread}; "
            f"{_what_fits(device)}"
        )
    if len(batches) and batches.min() > largest.max():
        raise CapacityError(
            f"batch {int(batches.min())} of {name} at context {context} does not fit on "
            f"{device.tp_sizes[int(np.argmax(largest))] * groups} x {hw}; "
            f"the largest batch that fits is {int(largest.max())}"
        )


def _what_fits(device: Device) -> str:
    """The smallest tp that holds one sequence, or the narrower weights that do."""
    for size in valid_tp_sizes(device.model, MAX_SUGGESTED_TP, device.engine.vocabulary_multiple):
        if size > max(device.tp_sizes) and dataclasses.replace(device, tp_sizes=(size,)).largest_batches()[0] >= 1:
            return f"tp {size} would hold it"
    for dtype in ("fp8", "int4"):
        narrower = dataclasses.replace(device, precision=Precision(weight_dtype=dtype, kv_dtype=dtype))
        if narrower.largest_batches().max(initial=0) >= 1:
            return f"with weights and KV in {dtype} it would"
    return "it takes a device with more memory, or a shorter context"
