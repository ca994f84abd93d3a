"""Predictions as candidates of a plan: every number of one configuration, with its interval and its verdict."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.forward import ForwardTime
from magicdec.perfmodel.intervals import Interval, interval, tokens_error
from magicdec.perfmodel.kernels.base import BOUNDS, Op
from magicdec.perfmodel.kernels.gemm import GemmCurve
from magicdec.perfmodel.plan.device import Device, Lengths
from magicdec.perfmodel.serving import WholeRequests, whole_requests
from magicdec.perfmodel.setup import Setup, draft_tp
from magicdec.perfmodel.speedup import Prediction
from magicdec.perfmodel.stages import microbatch
from magicdec.plan_document import Candidate, Ceilings, Operation, verdict_of
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
    device: Device,
    lengths: Lengths,
    prediction: Prediction,
    acceptance: AcceptanceProfile | None,
    *,
    baseline: float | None,
) -> list[Candidate]:
    """One candidate per point of a prediction in rows.

    `baseline`: tokens per second, over all devices, of autoregressive decoding at its best batch; None: there is none.
    """
    points = prediction.points
    bounds = interval(prediction, tokens_error(prediction, acceptance))
    columns = {
        "batch_size": points.batch.astype(np.int64),
        "context_len": points.context.astype(np.int64),
        "tp_size": points.tp.astype(np.int64),
        "ep_size": np.asarray(prediction.setup.spread.ep_size(points.tp), dtype=np.int64),
        "gamma": points.gamma,
        "draft_budget": np.zeros(()) if points.budget is None else points.budget,
        "draft_tp_size": draft_tp(prediction.setup, points.tp),
        **{name: getattr(prediction, name) for name in OF_PREDICTION},
        "tpot_low_s": bounds.tpot_low_s,
        "tpot_high_s": bounds.tpot_high_s,
        "tokens_per_s_per_gpu": prediction.tokens_per_s / prediction.num_gpus,
        "speedup_low": bounds.speedup_low,
        "speedup_high": bounds.speedup_high,
        "memory_bytes_per_gpu": prediction.memory.total_bytes,
        "fits": prediction.memory.fits,
        "bound_by": _binding(prediction),
        **_of_requests(lengths, prediction, bounds),
    }
    table = [prediction.full(np.asarray(values)).tolist() for values in columns.values()]
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*table, strict=True))
    return [_candidate(device, lengths, prediction.setup, acceptance, value, baseline) for value in rows]


def _candidate(
    device: Device,
    lengths: Lengths,
    setup: Setup,
    acceptance: AcceptanceProfile | None,
    value: dict[str, Any],
    baseline: float | None,
) -> Candidate:
    if value["gamma"] > 0:
        budget, paid = int(value["draft_budget"]), value["break_even_gen_len"]
        value |= {
            "draft": setup.speculation.draft,
            "draft_method": setup.speculation.draft_method,
            "draft_budget": budget or None,
            "draft_tp_size": int(value["draft_tp_size"]),
            "acceptance_source": acceptance.source if acceptance is not None else "",
            "draft_checkpoint": _checkpoint(device, acceptance),
            "acceptance_extrapolated": is_extrapolated(acceptance, budget, value["context_len"], value["gamma"]),
            "break_even_gen_len": int(paid) if math.isfinite(paid) else None,
            "marks": _marks(setup, acceptance, value["context_len"]),
        }
    else:
        value |= NO_DRAFT | {"verify_step_s": value["autoregressive_step_s"]}
    request, whole = device.request, "request_s" in value
    per_second = value["output_tokens_per_s_per_gpu" if whole else "tokens_per_s_per_gpu"]
    price = setup.hardware.price_per_hour_usd
    num_gpus = value["tp_size"] * setup.spread.groups
    num_replicas = max(1, (request.num_gpus or num_gpus) // num_gpus)
    gain = per_second * num_gpus * num_replicas / baseline if baseline is not None else None
    if whole:
        gpu_s = lengths.output_len / per_second
        value["requests_per_s"] = num_replicas * num_gpus / gpu_s
        value["gpu_hours_per_million_requests"] = gpu_s / SECONDS_PER_HOUR * MEGA
        value["cost_per_million_requests_usd"] = price / SECONDS_PER_HOUR * gpu_s * MEGA if price else None
    between_s = value["request_tpot_s" if whole else "tpot_s"]
    first_s = value["request_ttft_s" if whole else "ttft_s"]
    seen = "request_speedup" if whole else "speedup"
    return Candidate(
        **value,
        hardware=setup.hardware.name,
        pp_size=setup.spread.pp,
        dp_size=setup.spread.dp,
        num_nodes=1 if setup.hardware.kind == "cpu" else -(-num_gpus // setup.hardware.link.num_gpus_per_node),
        num_replicas=num_replicas,
        is_captured=setup.engine.is_captured(
            batch=int(microbatch(setup, value["batch_size"])), gamma=value["gamma"], tp_size=value["tp_size"]
        ),
        speedup_vs_best_autoregressive=gain,
        verdict=verdict_of(speedup_low=value[f"{seen}_low"], speedup_high=value[f"{seen}_high"]),
        within_limits=(request.tpot_limit_s is None or between_s <= request.tpot_limit_s)
        and (request.ttft_limit_s is None or first_s <= request.ttft_limit_s),
        cost_per_million_tokens_usd=price / SECONDS_PER_HOUR / per_second * MEGA if price else None,
    )


def _checkpoint(device: Device, acceptance: AcceptanceProfile | None) -> str:
    """The head that was named, as engines load it, else the one whose acceptance was published."""
    if (named := device.request.draft_model) is not None:
        return str(Path(named).parent if named.endswith(".json") else named)
    return acceptance.checkpoint if acceptance is not None else ""


def _marks(setup: Setup, acceptance: AcceptanceProfile | None, context: float) -> list[str]:
    """Reservations about a draft: no release of the engine runs it, no server was measured with it, no head read so
    far."""
    engine, formats, spec, found = setup.engine, setup.precision, setup.speculation, []
    is_foreign = draft_kind(spec.draft, spec.draft_method) in engine.draft_notes
    if is_foreign:
        found.append("plugin")
    if is_foreign or not engine.is_speculation_fitted(setup.hardware.name, formats.weight_dtype, formats.kv_dtype):
        found.append("untested")
    trained = acceptance.trained_len if acceptance is not None else None
    if trained is not None and context > trained * MEASURED_RANGE:
        found.append(f"trained to {format_tokens(trained)}")
    return found


def _of_requests(lengths: Lengths, prediction: Prediction, bounds: Interval) -> dict[str, Any]:
    """The columns of whole requests, where the length of their output is known."""
    whole = requests_of(lengths, prediction)
    if whole is None:
        return {}
    drafted = whole.drafted
    low, high = whole.speedup_bounds(bounds)
    return {
        "request_ttft_s": drafted.ttft_s,
        "request_tpot_s": drafted.tpot_s,
        "request_s": drafted.in_slot_s,
        "request_speedup": whole.speedup_at(prediction.speedup),
        "request_speedup_low": low,
        "request_speedup_high": high,
        "prefill_share": drafted.prefill_share,
        "output_tokens_per_s_per_gpu": whole.output_tokens_per_s / prediction.num_gpus,
    }


def requests_of(lengths: Lengths, prediction: Prediction) -> WholeRequests | None:
    """Whole requests of these lengths at each point; None where the length of their output is not known."""
    if not lengths.output_len:
        return None
    return whole_requests(prediction, prompts=lengths.prompts, output_len=lengths.output_len)


def is_extrapolated(acceptance: AcceptanceProfile | None, budget: float, context: float, gamma: int) -> bool:
    """Whether a profile is used outside the budgets or contexts that it was measured at, or for longer blocks."""
    if acceptance is None:
        return False
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
    passes = {
        "autoregressive": terms.autoregressive,
        "draft": terms.draft,
        "verify": terms.verify,
        "accept": terms.accept,
        "upkeep": terms.upkeep,
    }
    return {
        name: [_operation(prediction.setup, op, tp_size) for op in time.ops if _first(op.time_s) > 0]
        for name, time in passes.items()
    }


def ceilings(setup: Setup) -> Ceilings:
    """The device's roof for the formats of a setup."""
    hw, dtype = setup.hardware, setup.precision.compute_dtype
    gemm, rate = GemmCurve.of(hw, dtype), hw.compute_rate(dtype)
    return Ceilings(
        memory_bytes_per_s=hw.memory_bytes_per_s,
        flops_per_s=rate,
        gemm_bytes_per_s=gemm.bandwidth_efficiency * hw.memory_bytes_per_s,
        gemm_flops_per_s=gemm.flops_efficiency * rate,
    )


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
        op=op.name,
        time_s=_first(op.time_s),
        ceiling_s=ceiling,
        bound_by=max(BOUNDS, key=lambda each: _first(one[each])),
        flops=flops,
        bytes=num_bytes if op.group != "link" else sent,
    )
