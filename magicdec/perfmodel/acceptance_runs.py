"""Tokens per step at another gamma than the one that rates were counted at: runs of text that the draft knows.

Where text is easy it stays easy for a while. A run has L tokens that the draft gets right, and one that it misses; it
is gone through in steps of gamma + 1 tokens, each of which begins where the last one ended, so that a larger gamma
takes fewer steps for the easy part and the same for the misses:

    R_j = P(L ≥ j) = Π_{i ≤ j} (a·k + i − 1) / (k + i − 1)      beta-geometric: runs differ in how easy they are
    E(γ) = Σ_j R_j / Σ_m R_{m(γ+1)}                             tokens of a run over its steps
    S_i(γ) = Σ_m R_{m(γ+1)+i} / Σ_m R_{m(γ+1)}                  share of steps that accept at least i drafts

With k = ∞ all tokens are alike and these are α^i. A law by position (perfmodel/acceptance_law.py) takes the rates of a
step's positions as given whatever gamma is: too few tokens below the gamma that was measured, too many above it.

At another budget or context logit(a) moves by as much as the law's logit of the first position's rate; k stays.

Ignored: drafts that get worse over their own tokens. Rates that fall with the position show that, and are no runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from magicdec.perfmodel.kernels.base import Array
from magicdec.specs.speculation import MAX_GAMMA

LONGEST = 1024
"""Tokens of a run at most; with 64 the tokens per step differ by 1 %."""
PRIOR = (math.log(10.0), 2.0)
"""Of log k: mean and standard deviation. Rates at one or two positions hardly tell it."""
SHAPE_ERROR = 0.3
"""Of log(E(gamma) / E(gamma that was counted)), one standard deviation: runs are not quite beta-geometric."""
STEP = 1e-4


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Runs fitted to rates by position that were counted at gamma = `counted`."""

    x: Array
    """(logit a, log k)."""
    covariance: Array
    counted: int

    def tokens_per_step(self, gamma: Any, *, shift: Any = 0.0) -> tuple[Array, Array]:
        """E(gamma), and the probability that all gamma drafts are accepted, with logit(a) moved by `shift`; arrays
        broadcast."""
        gamma, shift = np.asarray(gamma, dtype=np.int64), np.asarray(shift, dtype=np.float64)
        shifts, row = np.unique(shift, return_inverse=True)
        gammas, column = np.unique(gamma, return_inverse=True)
        longer = _longer(self.x[0] + shifts[:, None], self.x[1])
        steps = np.stack([longer[:, :: each + 1].sum(axis=-1) for each in gammas], axis=-1)
        whole = np.stack([longer[:, each :: each + 1].sum(axis=-1) for each in gammas], axis=-1)
        where = row.reshape(shift.shape), column.reshape(gamma.shape)
        return (longer.sum(axis=-1)[:, None] / steps)[where], (whole / steps)[where]

    def tokens(self, gamma: int) -> float:
        """Expected tokens per step."""
        return float(self.tokens_per_step(gamma)[0])

    def log_ratio_error(self, gamma: Any, over: Any) -> Array:
        """One standard deviation of log(E(gamma) / E(over)); arrays broadcast."""
        gamma, over = np.broadcast_arrays(gamma, over)
        ratio = self._log_tokens[:, gamma] - self._log_tokens[:, over]
        gradient = (ratio[1:3] - ratio[3:5]) / (2 * STEP)
        counted = np.einsum("i...,ij,j...", gradient, self.covariance, gradient)
        error: Array = np.sqrt(np.maximum(counted, 0.0) + (SHAPE_ERROR * ratio[0]) ** 2)
        return error

    @cached_property
    def _log_tokens(self) -> Array:
        """log E of gamma = 0..MAX_GAMMA on the last axis, at x and a STEP up and down in either of its parts."""
        steps = np.eye(2) * STEP
        moved = [self, *(replace(self, x=self.x + step) for step in (*steps, *-steps))]
        return np.log([runs.tokens_per_step(np.arange(MAX_GAMMA + 1))[0] for runs in moved])


@lru_cache(maxsize=64)
def fit_runs(rates: tuple[float, ...], stderr: tuple[float, ...]) -> Runs | None:
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
    return Runs(x=np.asarray(solved.x, dtype=np.float64), covariance=covariance, counted=gamma)


def _longer(logit: Any, log_k: float) -> Array:
    """R_j of j = 0..LONGEST − 1 on the last axis."""
    a, k = 1.0 / (1.0 + np.exp(-np.asarray(logit))), math.exp(log_k)
    i = np.arange(1, LONGEST)
    later = np.cumprod((a * k + i - 1.0) / (k + i - 1.0), axis=-1)
    longer: Array = np.concatenate([np.ones((*later.shape[:-1], 1)), later], axis=-1)
    return longer


def _survivors(x: Array, gamma: int) -> Array:
    """S_i of i = 0..gamma."""
    longer = _longer(x[0], x[1])
    steps = np.append(longer, np.zeros(-len(longer) % (gamma + 1))).reshape(-1, gamma + 1)
    survivors: Array = steps.sum(axis=0) / steps[:, 0].sum()
    return survivors
