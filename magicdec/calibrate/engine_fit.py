"""From micro-benchmark points to the profiles that `plan` takes: this machine's hardware, and our engine on it.

The hardware profile holds the kernels' curves (perfmodel/kernels/ fits them). The engine profile holds what the
engine's own steps take beyond the kernels: factors on the kernels' times, and fixed costs. Its terms are predicted by
perfmodel/step.py, the formula that plans use; here its constants are chosen to fit the timed phases in log scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class EngineFit:
    """The fitted profile, and the relative error of each phase over the points it was fitted on (median)."""

    profile: EngineProfile
    phase_error: dict[str, float]


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


def fit_engine(
    points: Sequence[Point],
    *,
    model: ModelSpec,
    hardware: HardwareProfile,
    precision: Precision,
    base: EngineProfile,
) -> EngineFit:
    """Fits `base`'s constants to the engine's timed phases."""
    engine = _fit_vocabulary_and_upkeep(points, model=model, base=base)
    tables = {name: _columns(points, name, greedy=False) for name in FITTED_PHASES}

    def errors(candidate: EngineProfile) -> dict[str, Array]:
        predicted = {
            name: predict_phase(name, columns, model=model, hardware=hardware, precision=precision, engine=candidate)
            for name, columns in tables.items()
        }
        return {name: np.log(predicted[name] / tables[name]["time_s"]) for name in FITTED_PHASES}

    solution = solve(
        FREE,
        lambda values: np.concatenate([*errors(msgspec.structs.replace(engine, **values)).values()]),
        pull=PRIOR_WEIGHT,
        loss="soft_l1",
        f_scale=0.1,
    )
    fitted = msgspec.structs.replace(engine, **solution.values)
    phase_error = {name: float(np.median(np.abs(np.expm1(e)))) for name, e in errors(fitted).items()}
    num_timings = sum(table["time_s"].size for table in tables.values())
    in_sample = np.sqrt(num_timings / max(num_timings - len(FREE), 1.0))
    of_step, of_speedup = (
        float(np.clip(in_sample * error, SMALLEST_ERROR, LARGEST_ERROR))
        for error in unexplained_errors(points, model=model, hardware=hardware, precision=precision, engine=fitted)
    )
    fitted = msgspec.structs.replace(fitted, relative_error=of_step, speedup_relative_error=of_speedup)
    return EngineFit(fitted, phase_error)


STEP_PHASES = ("verify", "accept", "upkeep")
"""The phases of a speculative step other than its draft steps."""


def unexplained_errors(
    points: Sequence[Point],
    *,
    model: ModelSpec,
    hardware: HardwareProfile,
    precision: Precision,
    engine: EngineProfile,
) -> tuple[float, float]:
    """Root mean square of what the kernels' own errors leave unexplained, over the timed shapes: of the times of whole
    steps, and of their ratio, autoregressive over speculative, in which errors of terms that both have cancel.

    The kernels' part is the one that perfmodel/intervals.py takes into its intervals.
    """
    tables = {name: _columns(points, name, greedy=False) for name in ("autoregressive", "draft", *STEP_PHASES)}
    columns = tables["autoregressive"]
    alone_s = columns["time_s"]
    step_s = columns["gamma"] * tables["draft"]["time_s"] + sum(tables[name]["time_s"] for name in STEP_PHASES)
    terms = _terms(columns, model=model, hardware=hardware, precision=precision, engine=engine)
    missed_alone, missed_step = np.log(terms.autoregressive.total_s / alone_s), np.log(terms.step_s / step_s)
    kernels = {group: error for group, error in relative_errors(hardware, engine).items() if group != "overhead"}
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


def predict_phase(
    name: str,
    columns: dict[str, Array],
    *,
    model: ModelSpec,
    hardware: HardwareProfile,
    precision: Precision,
    engine: EngineProfile,
) -> Array:
    """Seconds of one phase at the columns' shapes."""
    terms = _terms(columns, model=model, hardware=hardware, precision=precision, engine=engine)
    seconds: Array = getattr(terms, name).total_s
    return seconds


def _terms(
    columns: dict[str, Array],
    *,
    model: ModelSpec,
    hardware: HardwareProfile,
    precision: Precision,
    engine: EngineProfile,
) -> StepTerms:
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


def _columns(points: Sequence[Point], table: str, *, greedy: bool) -> dict[str, Array]:
    chosen = [p for p in points if p.table == table and bool(p.shape["is_greedy"]) == greedy]
    columns = {key: np.array([p.shape[key] for p in chosen], dtype=np.float64) for key in chosen[0].shape}
    columns["time_s"] = np.array([p.time_s for p in chosen])
    return columns


def _fit_vocabulary_and_upkeep(points: Sequence[Point], *, model: ModelSpec, base: EngineProfile) -> EngineProfile:
    """Costs that are linear in the batch: sampling and acceptance over the vocabulary, and the draft cache's upkeep."""
    vocabulary = model.vocab_size
    sample, greedy = (_columns(points, "sample", greedy=g) for g in (False, True))
    sample_base, per_element = _line(sample["batch_size"] * vocabulary, sample["time_s"])
    _, greedy_per_element = _line(greedy["batch_size"] * vocabulary, greedy["time_s"])
    accept, greedy_accept = (_columns(points, "accept", greedy=g) for g in (False, True))
    accept_base, accept_per_element = _line(_verified(accept) * vocabulary, accept["time_s"])
    _, greedy_accept_per_element = _line(_verified(greedy_accept) * vocabulary, greedy_accept["time_s"])
    return msgspec.structs.replace(
        _fit_upkeep(points, base=base),
        sampling_base_s=sample_base,
        sampling_s_per_element=per_element,
        greedy_s_per_element=greedy_per_element,
        accept_base_s=accept_base,
        accept_s_per_element=accept_per_element,
        greedy_accept_s_per_element=greedy_accept_per_element,
    )


def _fit_upkeep(points: Sequence[Point], *, base: EngineProfile) -> EngineProfile:
    """Fits what is paid once per step. Where the draft has a cache of its own, its upkeep grows as the verified tokens;
    elsewhere what there is of a step beside its phases grows as the sequences, with and without a draft."""
    upkeep = _columns(points, "upkeep", greedy=False)
    bookkeeping = [p for p in points if p.table == "bookkeeping"]
    if base.streaming_in_place:
        per_step, per_sequence = _line(upkeep["batch_size"], upkeep["time_s"])
        alone = float(np.median([p.time_s - per_sequence * p.shape["batch_size"] for p in bookkeeping]))
        return msgspec.structs.replace(
            base,
            step_overhead_s=per_step,
            sequence_overhead_s=per_sequence,
            autoregressive_overhead_s=max(alone, 0.0),
        )
    per_step, per_token = _line(_verified(upkeep), upkeep["time_s"])
    return msgspec.structs.replace(
        base,
        upkeep_base_s=per_step,
        upkeep_s_per_token=per_token,
        step_overhead_s=0.0,
        # what an autoregressive step does after sampling; its forward pass shares the constants of verification
        autoregressive_overhead_s=float(np.median([p.time_s for p in bookkeeping])),
    )


def _verified(columns: dict[str, Array]) -> Array:
    tokens: Array = columns["batch_size"] * (columns["gamma"] + 1)
    return tokens


def _line(x: Array, y: Array) -> tuple[float, float]:
    """Non-negative (intercept, slope) of y over x, relative errors weighted alike."""
    design = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    scale = design.max(axis=0)
    solution, _ = nnls(design / scale, np.ones_like(y))
    return float(solution[0] / scale[0]), float(solution[1] / scale[1])
