"""From an engine's timed phases to its profile: factors on the kernels' times, and fixed costs. The terms of its steps
are predicted by perfmodel/step.py, the formula that plans use; the constants are fitted in log scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
from scipy.optimize import nnls

from magicdec.calibrate.local_profile import Point
from magicdec.counts import Array
from magicdec.fitting import Free, solve
from magicdec.perfmodel.intervals import relative_errors
from magicdec.perfmodel.kernels.profile import HardwareProfile
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.step import StepTerms, step_terms
from magicdec.specs.engine import EngineProfile
from magicdec.specs.model import ModelSpec
from magicdec.specs.precision import Precision
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec
from magicdec.units import MICRO, MILLI

FREE = {
    name: Free(prior=1.0, spread=0.25, limits=(math.exp(-1.5), math.exp(1.5)))
    for name in ("gemm_factor", "attention_factor", "verify_attention_factor", "draft_attention_factor")
} | {
    name: Free(scale="linear", prior=40 * MICRO, spread=math.inf, limits=(0.0, 40 * MILLI), unit=200 * MICRO)
    for name in ("layer_overhead_s", "draft_step_overhead_s", "verify_overhead_s")
}
"""Factors on the kernels' times, which are expected to differ from 1 by their spread, and fixed costs."""
PRIOR_WEIGHT = 0.05
FITTED_PHASES = ("autoregressive", "draft", "verify")
SMALLEST_ERROR, LARGEST_ERROR = 0.03, 0.5


class EngineFit(NamedTuple):
    """The fitted profile, and the relative error of each phase over the points it was fitted on (median)."""

    profile: EngineProfile
    phase_error: dict[str, float]


def fit_engine(
    points: Sequence[Point], *, model: ModelSpec, hardware: HardwareProfile, precision: Precision, base: EngineProfile
) -> EngineFit:
    """Fits `base`'s constants to the engine's timed phases."""
    engine = _fit_upkeep(points, base=_fit_vocabulary(points, vocabulary=model.vocab_size, base=base))
    tables = {name: _columns(points, name) for name in (*FITTED_PHASES, "accept", "upkeep")}
    predict = partial(predicted_steps, model=model, hardware=hardware, precision=precision)

    def errors(candidate: EngineProfile) -> dict[str, Array]:
        steps = {name: predict(tables[name], engine=candidate) for name in FITTED_PHASES}
        return {name: np.log(getattr(steps[name], name).total_s / tables[name]["time_s"]) for name in FITTED_PHASES}

    solution = solve(
        FREE,
        lambda values: np.concatenate([*errors(msgspec.structs.replace(engine, **values)).values()]),
        pull=PRIOR_WEIGHT,
        loss="soft_l1",
        f_scale=0.1,
    )
    fitted = msgspec.structs.replace(engine, **solution.values)
    num_timings = sum(tables[name]["time_s"].size for name in FITTED_PHASES)
    in_sample = np.sqrt(num_timings / max(num_timings - len(FREE), 1.0))
    of_step, of_speedup = (
        float(np.clip(in_sample * error, SMALLEST_ERROR, LARGEST_ERROR))
        for error in _unexplained_errors(
            tables, predict(tables["autoregressive"], engine=fitted), relative_errors(hardware, fitted)
        )
    )
    return EngineFit(
        profile=msgspec.structs.replace(fitted, relative_error=of_step, speedup_relative_error=of_speedup),
        phase_error={name: float(np.median(np.abs(np.expm1(each)))) for name, each in errors(fitted).items()},
    )


def _unexplained_errors(
    tables: dict[str, dict[str, Array]], terms: StepTerms, kernel_errors: dict[str, float]
) -> tuple[float, float]:
    """Root mean square of what the kernels' own errors leave unexplained, over the timed shapes: of the times of whole
    steps, and of their ratio, autoregressive over speculative, in which errors of terms that both have cancel.

    The kernels' part is the one that perfmodel/intervals.py takes into its intervals.
    """
    kernels = {group: error for group, error in kernel_errors.items() if group != "overhead"}
    step_s = tables["autoregressive"]["gamma"] * tables["draft"]["time_s"] + sum(
        tables[name]["time_s"] for name in ("verify", "accept", "upkeep")
    )
    missed_alone = np.log(terms.autoregressive.total_s / tables["autoregressive"]["time_s"])
    missed_step = np.log(terms.step_s / step_s)
    alone_seconds = {str(group): seconds for group, seconds in terms.autoregressive.group_seconds().items()}
    alone_share, share = (
        np.stack([seconds[group] / total * error for group, error in kernels.items()])
        for seconds, total in (
            (alone_seconds, terms.autoregressive.total_s),
            (terms.step_seconds("group"), terms.step_s),
        )
    )

    def left(missed: Array, explained: Array) -> float:
        return float(np.sqrt(max(np.mean(missed**2) - np.mean(np.sum(explained**2, axis=0)), 0.0)))

    of_step = left(np.concatenate([missed_alone, missed_step]), np.concatenate([alone_share, share], axis=1))
    return of_step, left(missed_alone - missed_step, alone_share - share)


def predicted_steps(
    columns: dict[str, Array],
    *,
    model: ModelSpec,
    hardware: HardwareProfile,
    precision: Precision,
    engine: EngineProfile,
) -> StepTerms:
    """Predictions of the steps at the columns' shapes."""
    setup = Setup(
        model=model,
        hardware=hardware,
        engine=engine,
        speculation=SpeculationSpec(draft="self", draft_method="streamingllm", draft_budget=64, gamma=1),
        sampling=SamplingSpec(temperature=1.0),
        precision=precision,
    )
    return step_terms(
        setup,
        batch=columns["batch_size"],
        kv_len=columns["context_len"],
        draft_kv_len=np.minimum(columns["draft_budget"], columns["context_len"]),
        gamma=columns["gamma"],
        tp_size=1,
        full_acceptance=0.0,
    )


def _columns(points: Sequence[Point], table: str, *, greedy: bool = False) -> dict[str, Array]:
    chosen = [p for p in points if p.table == table and bool(p.shape["is_greedy"]) == greedy]
    columns = {key: np.array([p.shape[key] for p in chosen], dtype=np.float64) for key in chosen[0].shape}
    columns["verified"] = columns["batch_size"] * (columns["gamma"] + 1)
    return {**columns, "time_s": np.array([p.time_s for p in chosen])}


def _fit_vocabulary(points: Sequence[Point], *, vocabulary: int, base: EngineProfile) -> EngineProfile:
    """Fits the costs that are linear in the tokens: sampling and acceptance over the vocabulary."""
    (sample_base, sample), (_, greedy_sample), (accept_base, accept), (_, greedy_accept) = (
        _line(columns[size] * vocabulary, columns["time_s"])
        for table, size in (("sample", "batch_size"), ("accept", "verified"))
        for columns in (_columns(points, table, greedy=greedy) for greedy in (False, True))
    )
    return msgspec.structs.replace(
        base,
        sampling_base_s=sample_base,
        sampling_s_per_element=sample,
        greedy_s_per_element=greedy_sample,
        accept_base_s=accept_base,
        accept_s_per_element=accept,
        greedy_accept_s_per_element=greedy_accept,
    )


def _fit_upkeep(points: Sequence[Point], *, base: EngineProfile) -> EngineProfile:
    """Fits what is paid once per step. Where the draft has a cache of its own, its upkeep grows as the verified tokens;
    elsewhere what there is of a step beside its phases grows as the sequences, with and without a draft."""
    upkeep = _columns(points, "upkeep")
    per_step, per_item = _line(upkeep["batch_size" if base.streaming_in_place else "verified"], upkeep["time_s"])
    # what an autoregressive step does after sampling; its forward pass shares the constants of verification
    of_sequence = per_item if base.streaming_in_place else 0.0
    bookkeeping = [p.time_s - of_sequence * p.shape["batch_size"] for p in points if p.table == "bookkeeping"]
    costs = {"autoregressive_overhead_s": max(float(np.median(bookkeeping)), 0.0)}
    if base.streaming_in_place:
        costs |= {"step_overhead_s": per_step, "sequence_overhead_s": per_item}
    else:
        costs |= {"step_overhead_s": 0.0, "upkeep_base_s": per_step, "upkeep_s_per_token": per_item}
    return msgspec.structs.replace(base, **costs)


def _line(x: Array, y: Array) -> tuple[float, float]:
    """Non-negative (intercept, slope) of y over x, relative errors weighted alike."""
    design = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    scale = design.max(axis=0)
    solution, _ = nnls(design / scale, np.ones_like(y))
    return float(solution[0] / scale[0]), float(solution[1] / scale[1])
