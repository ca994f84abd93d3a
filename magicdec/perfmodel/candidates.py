"""Chosen configurations as rows of a plan document: every number of one configuration, with its interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.acceptance_law import expected_tokens_per_step
from magicdec.perfmodel.cost import Array
from magicdec.perfmodel.forward import ForwardTime
from magicdec.perfmodel.ops import BOUNDS, Op
from magicdec.perfmodel.speculative import StepPrediction, interval, predict
from magicdec.perfmodel.steps import Setup, draft_kv_tokens, draft_tp, prefill_terms
from magicdec.units import MEGA

SECONDS_PER_HOUR = 3600.0
MEASURED_RANGE = 1.05
"""So far beyond the first and the last measured budget (or context) is still taken as measured."""
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Points:
    """Configurations of one setup, one entry per point in each array."""

    batch: Array
    context: Array
    tp: Array
    budget: Array
    gamma: npt.NDArray[np.int64]
    gen_len: float = 0.0
    """Twice what a slot holds beyond its prompt, on average."""
    max_len: Array | None = None
    """Tokens per slot that memory must hold; None: prompt and gen_len."""

    def __len__(self) -> int:
        return len(self.batch)


def predict_points(setup: Setup, acceptance: AcceptanceProfile | None, points: Points) -> StepPrediction:
    """`predict` at the points."""
    return predict(
        setup.model,
        setup.draft_model,
        setup.hardware,
        setup.engine,
        setup.speculation,
        batch=points.batch,
        context=points.context,
        tp_size=points.tp,
        acceptance=acceptance,
        sampling=setup.sampling,
        precision=setup.precision,
        draft_precision=setup.draft_precision,
        gen_len=points.gen_len,
        gamma=points.gamma,
        draft_budget=points.budget,
        max_len=points.max_len,
    )


def rows(setup: Setup, acceptance: AcceptanceProfile | None, points: Points, *, source_error: float = 0.0) -> list[Row]:
    """The rows of `points`. `source_error` widens acceptance's uncertainty (a source unlike the others')."""
    if not len(points):
        return []
    prediction = predict_points(setup, acceptance, points)
    error = tokens_error(setup, acceptance, points, source_error)
    bounds = interval(prediction, error)
    ttft, draft_prefill = _prefill(setup, points)
    columns = {
        "batch_size": points.batch,
        "context_len": points.context,
        "tp_size": points.tp,
        "gamma": points.gamma,
        "autoregressive_step_s": prediction.autoregressive_step_s,
        "draft_step_s": prediction.draft_step_s,
        "verify_step_s": prediction.verify_step_s,
        "accept_step_s": prediction.accept_step_s,
        "upkeep_step_s": prediction.upkeep_step_s,
        "step_s": prediction.step_s,
        "expected_tokens_per_step": prediction.expected_tokens_per_step,
        "tpot_s": prediction.tpot_s,
        "tpot_low_s": bounds.tpot_low_s,
        "tpot_high_s": bounds.tpot_high_s,
        "tokens_per_s": prediction.tokens_per_s,
        "tokens_per_s_per_gpu": prediction.tokens_per_s / points.tp,
        "speedup": prediction.speedup,
        "speedup_low": bounds.speedup_low,
        "speedup_high": bounds.speedup_high,
        "ttft_s": ttft,
        "draft_prefill_s": draft_prefill,
        "memory_bytes_per_gpu": prediction.memory.total_bytes,
        "fits": prediction.memory.fits,
    }
    table = {name: np.broadcast_to(np.asarray(values), (len(points),)).tolist() for name, values in columns.items()}
    binding = _binding(prediction, len(points))
    return [_row(setup, acceptance, table, points, index, binding[index]) for index in range(len(points))]


def _row(
    setup: Setup,
    acceptance: AcceptanceProfile | None,
    table: dict[str, list[Any]],
    points: Points,
    index: int,
    bound: str,
) -> Row:
    value = {name: column[index] for name, column in table.items()}
    drafts = value["gamma"] > 0
    budget = int(points.budget[index])
    price = setup.hardware.price_per_hour_usd
    per_second = value["tokens_per_s_per_gpu"]
    row: Row = {
        "hardware": setup.hardware.name,
        "draft": setup.speculation.draft if drafts else "none",
        "draft_method": setup.speculation.draft_method if drafts else "none",
        "draft_budget": budget if drafts and budget > 0 else None,
        "draft_tp_size": int(draft_tp(setup, points.tp[index])) if drafts else None,
        "acceptance_extrapolated": drafts and is_extrapolated(acceptance, budget, float(points.context[index])),
        "acceptance_source": getattr(acceptance, "source", "") if drafts and acceptance is not None else "",
        "bound_by": bound,
        "cost_per_million_tokens_usd": price / SECONDS_PER_HOUR / per_second * MEGA if price else None,
        **value,
    }
    for name in ("batch_size", "context_len", "tp_size", "gamma"):
        row[name] = int(row[name])
    if not drafts:
        row.update(draft_step_s=0.0, verify_step_s=row["autoregressive_step_s"], accept_step_s=0.0, upkeep_step_s=0.0)
    saved = row["autoregressive_step_s"] - row["tpot_s"]
    extra = row.pop("draft_prefill_s") if drafts else row.pop("draft_prefill_s") * 0.0
    row["break_even_gen_len"] = math.ceil(extra / saved) if drafts and saved > 0 else None
    return row


def is_extrapolated(acceptance: AcceptanceProfile | None, budget: float, context: float) -> bool:
    """Whether a profile is used outside the budgets or contexts that it was measured at."""
    if acceptance is None:
        return False
    cases = ((budget, acceptance.measured_budgets), (context, acceptance.measured_contexts))
    return any(
        value > 0 and bool(measured) and not min(measured) / MEASURED_RANGE <= value <= max(measured) * MEASURED_RANGE
        for value, measured in cases
    )


def _prefill(setup: Setup, points: Points) -> tuple[Array, Array]:
    """Seconds to the first token of one request, and what the draft adds to a batch's prefill per generated token."""
    budget = points.budget if setup.kind != "none" else None
    first = prefill_terms(setup, batch=1.0, prompt_len=points.context, tp_size=points.tp, budget=budget).total_s
    if setup.kind == "none":
        return first, np.zeros_like(first)
    without = Setup(
        model=setup.model,
        hardware=setup.hardware,
        engine=setup.engine,
        sampling=setup.sampling,
        precision=setup.precision,
    )
    alone = prefill_terms(without, batch=1.0, prompt_len=points.context, tp_size=points.tp).total_s
    return first, points.batch * np.maximum(first - alone, 0.0)


def tokens_error(setup: Setup, acceptance: AcceptanceProfile | None, points: Points, source_error: float) -> Array:
    """One relative standard deviation of the tokens per step: from that of the law's rates, and from which sequences
    a batch happens to hold, whose own rates differ by the profile's `spread`."""
    if acceptance is None or not np.any(points.gamma > 0):
        return np.zeros(len(points))
    kv_len = points.context + points.gen_len / 2.0
    read = draft_kv_tokens(setup, kv_len, points.budget)
    gamma_max = int(points.gamma.max())

    def rates(num_sigma: float) -> Array:
        return acceptance.conditional_rates(budget=read, context=kv_len, gamma_max=gamma_max, num_sigma=num_sigma)

    own = _half_range(rates(-1.0), rates(1.0), points.gamma)
    middle = rates(0.0)

    def shifted(by: Array) -> Array:
        return _half_range(middle - by, middle + by, points.gamma) if np.any(by) else np.zeros(len(points))

    of_source = shifted(np.asarray(source_error))
    of_batch = shifted((acceptance.spread / np.sqrt(points.batch))[:, None])
    error: Array = np.sqrt(own**2 + of_source**2 + of_batch**2)
    return error


def _half_range(low_rates: Array, high_rates: Array, gamma: npt.NDArray[np.int64]) -> Array:
    """Half the relative difference of the tokens per step that two sets of rates give."""
    low = expected_tokens_per_step(np.clip(low_rates, 0.0, 1.0), gamma)
    high = expected_tokens_per_step(np.clip(high_rates, 0.0, 1.0), gamma)
    half: Array = (high - low) / (high + low)
    return half


def _binding(prediction: StepPrediction, count: int) -> list[str]:
    seconds = prediction.terms.step_seconds("bound")
    stacked = np.stack([np.broadcast_to(seconds[bound], (count,)) for bound in BOUNDS])
    return [BOUNDS[index] for index in np.argmax(stacked, axis=0)]


def breakdown(setup: Setup, prediction: StepPrediction, tp_size: int) -> dict[str, list[Row]]:
    """Operations of one configuration: time, the datasheet's ceiling for the same work, and what binds."""
    terms = prediction.terms
    passes = {
        "autoregressive": terms.autoregressive,
        "draft": terms.draft,
        "verify": terms.verify,
        "accept": terms.accept,
        "upkeep": terms.upkeep,
    }
    return {name: [_op_row(setup, op, tp_size) for op in time.ops if _seconds(op) > 0] for name, time in passes.items()}


def _seconds(op: Op) -> float:
    return float(np.ravel(op.time_s)[0])


def _op_row(setup: Setup, op: Op, tp_size: int) -> Row:
    hw = setup.hardware
    cost = [float(np.ravel(np.asarray(value, dtype=np.float64))[0]) for value in op.cost]
    flops, weight_bytes, kv_bytes, activation_bytes, sent = cost
    num_bytes = weight_bytes + kv_bytes + activation_bytes
    wire = 2.0 * (tp_size - 1) / tp_size * sent / hw.link.bytes_per_s
    ceiling = max(num_bytes / hw.memory_bytes_per_s, flops / hw.compute_rate(setup.precision.compute_dtype), wire)
    one = ForwardTime((op,)).bound_seconds()
    bound = max(BOUNDS, key=lambda each: float(np.ravel(one[each])[0]))
    return {
        "op": op.name,
        "time_s": _seconds(op),
        "ceiling_s": ceiling,
        "bound_by": bound,
        "flops": flops,
        "bytes": num_bytes if op.group != "link" else sent,
    }
