"""Tokens per step at another gamma than the one that rates were counted at: runs of text that the draft knows.

Where text is easy it stays easy for a while. A run has L tokens that the draft gets right, and one that it misses; it
is gone through in steps of gamma + 1 tokens, each of which begins where the last one ended, so that a larger gamma
takes fewer steps for the easy part and the same for the misses:

    R_j = P(L ≥ j) = Π_{i ≤ j} (a·k + i − 1) / (k + i − 1)      beta-geometric: runs differ in how easy they are
    E(γ) = Σ_j R_j / Σ_m R_{m(γ+1)}                             tokens of a run over its steps
    S_i(γ) = Σ_m R_{m(γ+1)+i} / Σ_m R_{m(γ+1)}                  share of steps that accept at least i drafts

With k = ∞ all tokens are alike and these are α^i. A law by position (perfmodel/acceptance_law.py) takes the rates of a
step's positions as given whatever gamma is: too few tokens below the gamma that was measured, too many above it.

Ignored: drafts that get worse over their own tokens. Rates that fall with the position show that, and are no runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from magicdec.perfmodel.cost import Array

LONGEST = 1024
"""Tokens of a run at most; with 64 the tokens per step differ by 1 %."""
PRIOR = (math.log(10.0), 2.0)
"""Of log k: mean and standard deviation. Rates at one or two positions hardly tell it."""
SHAPE_ERROR = 0.3
"""Of log(E(gamma) / E(gamma that was counted)), one standard deviation: runs are not quite beta-geometric."""
STEP = 1e-4


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Fitted to rates by position. `x` = (logit a, log k)."""

    x: Array
    covariance: Array

    def tokens(self, gamma: int) -> float:
        """Expected tokens per step."""
        return float(_survivors(self.x, gamma).sum())

    def log_ratio_error(self, gamma: int, over: int) -> float:
        """One standard deviation of log(E(gamma) / E(over))."""

        def ratio(x: Array) -> float:
            return math.log(_survivors(x, gamma).sum() / _survivors(x, over).sum())

        gradient = np.array([(ratio(self.x + up) - ratio(self.x - up)) / (2 * STEP) for up in np.eye(2) * STEP])
        counted = float(gradient @ self.covariance @ gradient)
        return math.sqrt(max(counted, 0.0) + (SHAPE_ERROR * ratio(self.x)) ** 2)


def fit_runs(rates: Sequence[float], stderr: Sequence[float]) -> Runs | None:
    """Runs with these conditional rates by position, counted at gamma = their number; None where they do not rise."""
    from scipy.optimize import least_squares

    gamma = len(rates)
    if gamma < 2 or rates[-1] <= rates[0] or not 0.0 < rates[0] < 1.0:
        return None
    counted, error = np.array(rates), np.maximum(stderr, 1e-4)

    def residuals(x: Array) -> Array:
        survivors = _survivors(x, gamma)
        missed = (survivors[1:] / survivors[:-1] - counted) / error
        return np.append(missed, (x[1] - PRIOR[0]) / PRIOR[1])

    solved = least_squares(residuals, [math.log(rates[0] / (1.0 - rates[0])), 1.0], bounds=([-12, -4], [12, 12]))
    jacobian = np.asarray(solved.jac, dtype=np.float64)
    covariance = np.asarray(np.linalg.pinv(jacobian.T @ jacobian), dtype=np.float64)
    return Runs(x=np.asarray(solved.x, dtype=np.float64), covariance=covariance)


def _survivors(x: Array, gamma: int) -> Array:
    """S_i of i = 0..gamma."""
    a, k = 1.0 / (1.0 + math.exp(-x[0])), math.exp(x[1])
    i = np.arange(1, LONGEST)
    longer = np.append(1.0, np.cumprod((a * k + i - 1.0) / (k + i - 1.0)))
    steps = np.append(longer, np.zeros(-len(longer) % (gamma + 1))).reshape(-1, gamma + 1)
    survivors: Array = steps.sum(axis=0) / steps[:, 0].sum()
    return survivors
