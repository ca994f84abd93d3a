"""Chosen configurations as rows of a plan document: every number of one configuration, with its interval."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.forward import ForwardTime
from magicdec.perfmodel.intervals import interval, tokens_error
from magicdec.perfmodel.ops import BOUNDS, Op
from magicdec.perfmodel.prediction import Prediction
from magicdec.perfmodel.setup import Setup, draft_tp
from magicdec.units import MEGA

SECONDS_PER_HOUR = 3600.0
MEASURED_RANGE = 1.05
"""So far beyond the first and the last measured budget (or context) is still taken as measured."""
Row = dict[str, Any]


def rows(prediction: Prediction, acceptance: AcceptanceProfile | None, *, source_error: float = 0.0) -> list[Row]:
    """One row per point. `source_error` widens acceptance's uncertainty (a source unlike the others')."""
    points = prediction.points
    bounds = interval(prediction, tokens_error(prediction, acceptance, source_error))
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
        "ttft_s": prediction.ttft_s,
        "break_even_gen_len": prediction.break_even_gen_len,
        "memory_bytes_per_gpu": prediction.memory.total_bytes,
        "fits": prediction.memory.fits,
    }
    table = {name: prediction.full(values).tolist() for name, values in columns.items()}
    binding = _binding(prediction)
    return [_row(prediction, acceptance, table, index, bound) for index, bound in enumerate(binding)]


def _row(
    prediction: Prediction,
    acceptance: AcceptanceProfile | None,
    table: dict[str, list[Any]],
    index: int,
    bound: str,
) -> Row:
    setup, points = prediction.setup, prediction.points
    value = {name: column[index] for name, column in table.items()}
    drafts = value["gamma"] > 0
    budget = int(points.budget[index]) if points.budget is not None else 0
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
    paid = value["break_even_gen_len"]
    row["break_even_gen_len"] = int(paid) if drafts and math.isfinite(paid) else None
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


def _binding(prediction: Prediction) -> list[str]:
    seconds = prediction.terms.step_seconds("bound")
    stacked = np.stack([prediction.full(seconds[bound]) for bound in BOUNDS])
    return [BOUNDS[index] for index in np.argmax(stacked, axis=0)]


def breakdown(prediction: Prediction) -> dict[str, list[Row]]:
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
        name: [_op_row(prediction.setup, op, tp_size) for op in time.ops if _seconds(op) > 0]
        for name, time in passes.items()
    }


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
