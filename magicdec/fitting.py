"""Robust least squares for numbers with priors, and the errors of the quantities computed from
them.

    minimise  ½ Σ ρ(residual²)        residuals: the data's, and pull · (code − prior's code) /
    spread of each number

A code is the number's logarithm, its logit, or the logarithm of its excess over 1, so any code is a
possible number; or it is the number itself in a unit. SciPy is imported on the first fit only,
because predicting does not need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from magicdec.counts import Z_90, Array

INSIDE = 1e-6
"""Distance of a start from the bounds."""
GRADIENT_STEP = 1e-4


class Free(msgspec.Struct, frozen=True, kw_only=True):
    """A number to fit: its prior, whose `spread` is the standard deviation of the code (infinite:
    no prior).
    """

    spread: float = 0.5
    scale: Literal["log", "unit", "above_one", "linear"] = "log"
    prior: float | None = None
    """The number to start from and to be drawn to; of a kernel's constant by default its curve's
    generic value.
    """
    limits: tuple[float, float] | None = None
    unit: float = 1.0
    """The number whose code is 1 in a linear scale."""

    @property
    def center(self) -> float:
        assert self.prior is not None
        return self.encode(self.prior)

    def encode(self, value: float) -> float:
        if self.scale == "linear":
            return value / self.unit
        value = max(value, 1e-12)
        if self.scale == "unit":
            value = min(max(value, 1e-4), 1 - 1e-4)
            return math.log(value / (1 - value))
        shift = 0.0
        if self.scale == "above_one":
            shift = 1.0
        return math.log(max(value - shift, 1e-12))

    def decode(self, code: Any) -> Any:
        """The number at a code, or at each of an array of them."""
        exp: Callable[[Any], Any] = math.exp
        if isinstance(code, np.ndarray):
            exp = np.exp
        if self.scale == "linear":
            return code * self.unit
        if self.scale == "unit":
            return 1.0 / (1.0 + exp(-code))
        shift = 0.0
        if self.scale == "above_one":
            shift = 1.0
        return exp(code) + shift

    def at(self, deviations: Any) -> Any:
        """The number that lies so many spreads from the prior."""
        return self.decode(self.center + self.spread * deviations)

    def deviations(self, value: float) -> float:
        """How many spreads a number lies from the prior."""
        return (self.encode(value) - self.center) / self.spread


class Solution(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a fit, and the covariance of their codes where residuals have variance 1."""

    free: Mapping[str, Free]
    codes: Array
    bounds: tuple[Array, Array]
    covariance: Array
    cost: float

    @property
    def values(self) -> dict[str, float]:
        return decoded(self.free, self.codes)

    def deviation_of(self, function: Callable[[dict[str, float]], float]) -> float:
        """Standard deviation of what follows from the numbers, by its gradient."""
        steps = GRADIENT_STEP * np.maximum(np.abs(self.codes), 1.0)
        low, high = self.bounds
        gradient = np.zeros(self.codes.size)
        for index, step in enumerate(np.diag(steps)):
            up = np.clip(self.codes + step, low, high)
            down = np.clip(self.codes - step, low, high)
            rise = function(decoded(self.free, up)) - function(decoded(self.free, down))
            gradient[index] = rise / (up[index] - down[index])
        variance = float(gradient @ self.covariance @ gradient)
        return math.sqrt(max(variance, 0.0))

    def intervals(self, error: float = 1.0) -> dict[str, tuple[float, float, float]]:
        """Each number with its 90 % interval, where residuals have this standard deviation."""
        deviation = np.sqrt(np.diag(self.covariance)) * error
        half_width = Z_90 * deviation
        middle = self.values
        low = decoded(self.free, self.codes - half_width)
        high = decoded(self.free, self.codes + half_width)
        return {name: (middle[name], low[name], high[name]) for name in self.free}


def decoded(free: Mapping[str, Free], codes: Array) -> dict[str, float]:
    values = {}
    for (name, number), code in zip(free.items(), codes, strict=True):
        values[name] = number.decode(float(code))
    return values


def _limits(free: Mapping[str, Free]) -> tuple[Array, Array]:
    """The least and the greatest code of each number."""
    low = []
    high = []
    for number in free.values():
        least, most = number.limits or (-math.inf, math.inf)
        low.append(number.encode(least))
        high.append(number.encode(most))
    return np.array(low), np.array(high)


def solve(
    free: Mapping[str, Free],
    residuals: Callable[[dict[str, float]], Array],
    *,
    pull: float = 1.0,
    starts: Sequence[Mapping[str, float]] = ({},),
    bounds: tuple[Array, Array] | None = None,
    **options: Any,
) -> Solution:
    """The best fit from several starts: the priors, but for the numbers that a start names.

    `bounds`, of codes, replace the numbers' limits; further options are those of scipy's
    least_squares.
    """
    from scipy.optimize import least_squares

    names = list(free)
    center = np.array([number.center for number in free.values()])
    spread = np.array([number.spread for number in free.values()])
    if bounds is None:
        bounds = _limits(free)

    def all_residuals(codes: Array) -> Array:
        of_data = residuals(decoded(free, codes))
        of_priors = pull * (codes - center) / spread
        return np.concatenate([of_data, of_priors])

    best: Any = None
    for start in starts:
        first = center.copy()
        for name, value in start.items():
            first[names.index(name)] = free[name].encode(value)
        first = np.clip(first, bounds[0] + INSIDE, bounds[1] - INSIDE)
        found = least_squares(all_residuals, first, bounds=bounds, **options)
        if best is None or found.cost < best.cost:
            best = found
    jacobian = np.asarray(best.jac, dtype=np.float64)
    covariance: Array = np.linalg.pinv(jacobian.T @ jacobian).astype(np.float64)
    return Solution(
        free=free,
        codes=best.x,
        bounds=bounds,
        covariance=covariance,
        cost=float(best.cost),
    )
