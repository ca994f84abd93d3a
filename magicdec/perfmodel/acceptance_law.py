"""How many drafted tokens are accepted: by position in the block, by draft budget, by context.

    1 − α(b, S) = floor + (1 − floor) · A · (b/b₀)^−c · (S/S₀)^e · (1 − b/S)^d            position 1
    rate_i      = [ (α·k + i − 1) / (k + i − 1) ] ^ D_i ,  D_i = 1 + G·(1 − exp(−(i − 1)/τ))   position i

b = draft budget (KV slots read per draft step), S = context, k = `concentration`, G = `drift`, τ = `drift_depth`.

Two effects pull apart. The base is the beta-geometric law: α differs between sequences and passages as a Beta
distribution of parameters α·k and (1 − α)·k, so that those which survive are easier, and the rate rises with i (k =
∞: all alike). The exponent is the draft's drift away from the target over its own tokens: it multiplies −log(rate),
so that a draft that never errs does not drift, and levels off at 1 + G after about τ positions, because published
rates fall over the first few positions and then no further. With b ≥ S the draft sees all that the target sees: only
the floor (another model, other weights) is left. Contexts below `flat_below` count as that long: a head loses
acceptance only beyond about the length that it was trained at.

Where rates by position are given instead, they are the law: rate_i = given_i, the last one for all further positions,
and for another rate at position 1 (another budget, context) each to the power log(that rate) / log(given_1).

Ignored: the content of the block, and that the rates after a rejection differ from those after a full block.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
MAX_POSITIONS = 64
LARGEST = 1e15


class Law(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The constants of the equations above."""

    rejection: float
    """A: 1 - alpha at the reference budget and context, before the fill factor (1 - b/S)^d and the floor."""
    budget_exponent: float = 0.0
    context_exponent: float = 0.0
    fill_exponent: float = 0.0
    reference_budget: float = 512.0
    reference_context: float = 8192.0
    flat_below: float = 0.0
    floor: float = 0.0
    """1 - alpha of a draft with a full cache; 0 for self-speculation with the target's own weights."""
    concentration: float | None = None
    """k; None is infinity: no heterogeneity."""
    drift: float = 0.0
    drift_depth: float = 2.0
    by_position: list[float] = []
    """Given rates, in place of the law by position."""

    def __post_init__(self) -> None:
        _check("rejection", self.rejection, 0.0, 1e3)
        for name in ("budget_exponent", "fill_exponent", "drift"):
            _check(name, getattr(self, name), 0.0, 50.0)
        _check("context_exponent", self.context_exponent, -5.0, 5.0)
        for name in ("reference_budget", "reference_context", "drift_depth"):
            _check(name, getattr(self, name), 1e-3, LARGEST)
        _check("flat_below", self.flat_below, 0.0, LARGEST)
        _check("floor", self.floor, 0.0, 1.0)
        if self.concentration is not None:
            _check("concentration", self.concentration, 1e-3, 1e12)
        if len(self.by_position) > MAX_POSITIONS:
            raise ValueError(f"'by_position' holds {len(self.by_position)} rates; at most {MAX_POSITIONS} are read")
        for rate in self.by_position:
            _check("by_position", rate, 0.0, 1.0)

    def first_rate(self, *, budget: Any, context: Any) -> Array:
        """α: P(first drafted token accepted), of shape broadcast(budget, context)."""
        context = sanitize(context, 1.0)
        budget = np.minimum(sanitize(budget, 1.0), context)
        scale = (budget / self.reference_budget) ** -self.budget_exponent
        scale = scale * (np.maximum(context, self.flat_below) / self.reference_context) ** self.context_exponent
        sparse = self.rejection * scale * (1.0 - budget / context) ** self.fill_exponent
        rate: Array = (1.0 - self.floor) * (1.0 - np.minimum(sparse, 1.0))
        return rate

    def conditional_rates(self, *, budget: Any, context: Any, gamma_max: int) -> Array:
        """P(position i accepted | all before accepted), i = 1..gamma_max, on a last axis."""
        return self.rates_after(self.first_rate(budget=budget, context=context), gamma_max)

    def rates_after(self, first_rate: Any, gamma_max: int) -> Array:
        """The law by position for a given rate at position 1; shape (..., gamma_max)."""
        alpha = np.clip(np.asarray(first_rate, dtype=np.float64), 0.0, 1.0)[..., None]
        if self.by_position:
            return self._given_rates(alpha, gamma_max)
        before: Array = np.arange(gamma_max).astype(np.float64)
        if self.concentration is not None:
            alpha = (alpha * self.concentration + before) / (self.concentration + before)
        exponent = 1.0 + self.drift * -np.expm1(-before / self.drift_depth)
        rates: Array = alpha**exponent
        return rates

    def _given_rates(self, alpha: Array, gamma_max: int) -> Array:
        last = len(self.by_position) - 1
        given = np.array([self.by_position[min(position, last)] for position in range(gamma_max)])
        first = np.clip(given[:1], 1e-12, 1.0 - 1e-12)
        power = np.log(np.clip(alpha, 1e-12, 1.0 - 1e-12)) / np.log(first)
        rates: Array = given**power
        return rates


class LawError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One standard deviation of log(1 − α) at the reference point, and how it grows away from it.

    `depth` is the standard deviation of the log of −log(rate) per unit of log(position): extrapolation in depth.
    """

    log_rejection: float = 0.0
    budget_exponent: float = 0.0
    context_exponent: float = 0.0
    depth: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            _check(name, getattr(self, name), 0.0, 50.0)

    def deviation(self, law: Law, *, budget: Any, context: Any, gamma_max: int) -> Array:
        """Standard deviation of log(−log rate_i), of shape broadcast(budget, context) + (gamma_max,)."""
        context = sanitize(context, 1.0)
        budget = np.minimum(sanitize(budget, 1.0), context)
        by_budget = self.budget_exponent * np.log(budget / law.reference_budget)
        by_context = self.context_exponent * np.log(np.maximum(context, law.flat_below) / law.reference_context)
        variance = np.asarray(self.log_rejection**2 + by_budget**2 + by_context**2)[..., None]
        by_depth = self.depth * np.log(np.arange(1, gamma_max + 1, dtype=np.float64))
        deviation: Array = np.sqrt(variance + by_depth**2)
        return deviation


def _check(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"'{name}' must be between {low:g} and {high:g}, not {value!r}")


def sanitize(value: Any, low: float) -> Array:
    """A float array without NaN, infinity, or values below `low`. None is "all": as large as can be."""
    array = np.asarray(LARGEST if value is None else value, dtype=np.float64)
    clean: Array = np.clip(np.nan_to_num(array, nan=low, posinf=LARGEST, neginf=low), low, LARGEST)
    return clean


def survival(rates: Any) -> Array:
    """P(at least i drafts accepted), i = 1..gamma_max: the running product of the conditional rates."""
    values: Array = np.asarray(rates, dtype=np.float64)
    return np.asarray(np.cumprod(np.clip(values, 0.0, 1.0), axis=-1), dtype=np.float64)


def expected_tokens_per_step(rates: Any, gamma: Any) -> Array:
    """1 + Σ_{i=1..gamma} Π_{j≤i} rate_j: the accepted drafts and the token that the verification adds.

    `rates` has positions on its last axis, at least max(gamma) of them; `gamma` broadcasts against the other axes.
    """
    rates = np.asarray(rates, dtype=np.float64)
    depth: npt.NDArray[np.int64] = np.asarray(gamma, dtype=np.int64)
    if depth.size and (depth.min() < 0 or depth.max() > rates.shape[-1]):
        raise ValueError(f"gamma must be between 0 and the {rates.shape[-1]} positions that rates has")
    first = np.ones((*rates.shape[:-1], 1))
    totals = np.concatenate([first, 1.0 + np.cumsum(survival(rates), axis=-1)], axis=-1)
    shape = np.broadcast_shapes(totals.shape[:-1], depth.shape)
    totals = np.broadcast_to(totals, (*shape, totals.shape[-1]))
    tokens: Array = np.take_along_axis(totals, np.broadcast_to(depth, shape)[..., None], axis=-1)[..., 0]
    return tokens
