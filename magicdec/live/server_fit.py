"""Fits an engine profile to a server's timed loads: what its steps take beyond the kernels of the hardware profile.

    step(load) = Σ_n P(n) · (T_verify + T_accept + T_upkeep)(γ · n / b)         n = 0: T_autoregressive

as perfmodel/steps.py predicts it, the formula of plans, for looked-up drafts: n of the batch's b sequences have one, by
the share of steps with a draft (0 without speculation), which the server counts.
Fitted in log scale, robustly: factors on the kernels' times (a priori 1), the fixed cost of a step, and that of each
of its sequences (both at least 0).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from magicdec.live.drive import Measured
from magicdec.perfmodel.cost import Array
from magicdec.perfmodel.intervals import Z_90
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.steps import looked_up_terms
from magicdec.specs.engine import EngineProfile
from magicdec.units import MICRO, MILLI

FACTORS = ("gemm_factor", "attention_factor")
FACTOR_PRIOR = 1.0
"""Standard deviation, in log, by which a factor is expected to differ from 1: another engine's kernels."""
PRIOR_WEIGHT = 0.05
"""A prior's standard deviation counts as an error of this size of one load."""
SCALES = {"forward_overhead_s": MILLI, "sequence_overhead_s": 100 * MICRO}
LOSS_SCALE = 0.1
MIN_ERROR, MAX_ERROR = 0.03, 0.5


@dataclass(frozen=True, kw_only=True)
class ServerPoint:
    """The median of a load's rounds, and how far they differ."""

    measured: Measured
    spread: float
    """Half the range of the rounds' step times, over their median."""
    drafted_share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ServerFit:
    """`errors`: predicted over measured TPOT, less 1, of each point in order."""

    profile: EngineProfile
    constants: dict[str, tuple[float, float, float]]
    """Each fitted constant with its 90 % interval."""
    errors: tuple[float, ...]
    fitted_error: float
    """Median over the points that were fitted; the other over those that only judge."""
    held_out_error: float


def fit_server(points: Sequence[ServerPoint], *, setup: Setup, tp_size: int, gamma: int, name: str) -> ServerFit:
    """Fits the constants of `setup.engine` to the points that do not judge."""
    from scipy.optimize import least_squares

    chosen = [point for point in points if not point.measured.load.is_judge]
    measured = np.log(_measured_steps(chosen, gamma))

    def residuals(x: Array) -> Array:
        engine = _engine(x, setup)
        missed = np.log(predicted_steps(chosen, setup, engine, tp_size=tp_size, gamma=gamma)) - measured
        return np.concatenate([missed, x[: len(FACTORS)] * (PRIOR_WEIGHT / FACTOR_PRIOR)])

    size, known = len(FACTORS) + len(SCALES), len(FACTORS)
    start = np.concatenate([np.zeros(known), np.ones(size - known)])
    low, high = np.full(size, -3.0), np.full(size, 3.0)
    low[known:], high[known:] = 0.0, 1e4
    solved = least_squares(residuals, start, bounds=(low, high), loss="soft_l1", f_scale=LOSS_SCALE, x_scale="jac")
    x = np.asarray(solved.x, dtype=np.float64)
    engine = _engine(x, setup)
    predicted = predicted_steps(points, setup, engine, tp_size=tp_size, gamma=gamma)
    missed = np.log(predicted) - np.log(_measured_steps(points, gamma))
    judges = np.array([point.measured.load.is_judge for point in points])
    unexplained = float(np.sqrt(np.sum(missed[~judges] ** 2) / max(len(chosen) - size, 1)))
    constants = _with_intervals(x, np.asarray(solved.jac, dtype=np.float64), unexplained)
    error = float(np.clip(unexplained, MIN_ERROR, MAX_ERROR))
    engine = msgspec.structs.replace(
        engine,
        name=name,
        description=f"{setup.engine.name}, fitted to a running server from outside",
        fitted_device=setup.hardware.name,
        fitted_devices=(setup.hardware.name,),
        fitted_models=(setup.model.name,),
        relative_error=error,
        speedup_relative_error=max(error, setup.engine.speedup_relative_error),
        sources={key: f"{value:.4g} (90 % interval {a:.4g} to {b:.4g})" for key, (value, a, b) in constants.items()},
    )
    errors = np.expm1(missed)
    return ServerFit(
        profile=engine,
        constants=constants,
        errors=tuple(float(each) for each in errors),
        fitted_error=float(np.median(np.abs(errors[~judges]))),
        held_out_error=float(np.median(np.abs(errors[judges]))),
    )


def _measured_steps(points: Sequence[ServerPoint], gamma: int) -> list[float]:
    """Without drafts a step makes one token, and an event of two is two steps that came together."""
    return [point.measured.step_s if gamma else point.measured.tpot_s for point in points]


def predicted_steps(
    points: Sequence[ServerPoint], setup: Setup, engine: EngineProfile, *, tp_size: int, gamma: int
) -> Array:
    """Seconds of each point's step."""
    terms, probability = looked_up_terms(
        dataclasses.replace(setup, engine=engine),
        batch=np.array([float(point.measured.load.concurrency) for point in points]),
        kv_len=np.array([point.measured.context_len for point in points]),
        gamma=np.full(len(points), gamma),
        share=np.array([point.drafted_share for point in points]),
        tp_size=float(tp_size),
    )
    steps: Array = np.sum(probability * terms.step_s, axis=-1)
    return steps


def _engine(x: Array, setup: Setup) -> EngineProfile:
    """The profile of the fitted numbers, which hold what a step takes beyond its kernels."""
    factors = dict(zip(FACTORS, np.exp(x[: len(FACTORS)]).tolist(), strict=True))
    costs = {name: float(v) * scale for (name, scale), v in zip(SCALES.items(), x[len(FACTORS) :], strict=True)}
    return msgspec.structs.replace(
        setup.engine, **factors, **costs, layer_overhead_s=0.0, autoregressive_overhead_s=0.0, step_overhead_s=0.0
    )


def _with_intervals(x: Array, jacobian: Array, error: float) -> dict[str, tuple[float, float, float]]:
    """Each constant with its 90 % interval, from the curvature at the fit and the error left."""
    deviation = np.sqrt(np.diag(np.linalg.pinv(jacobian.T @ jacobian))) * max(error, 1e-6)
    low, high = x - Z_90 * deviation, x + Z_90 * deviation
    found = {}
    for index, name in enumerate(FACTORS):
        found[name] = tuple(float(np.exp(each[index])) for each in (x, low, high))
    for index, (name, scale) in enumerate(SCALES.items(), len(FACTORS)):
        found[name] = tuple(float(max(each[index], 0.0)) * scale for each in (x, low, high))
    return found  # type: ignore[return-value]  # three numbers each
