"""Rates of drafts that were counted: the counts where they were taken, a law elsewhere.

    posterior_i = (n · c_i + κ · m_i) / (n + κ)              rate of position i where it was counted
    logit rate_i(b, S) = logit m_i(b, S) + Σ_cells w · (logit posterior_i − logit m_i)

c_i is the counted rate of n trials (fewer where sequences differ), m_i the law's, b and S the draft's
budget and context. The counts are beta-binomial: rates of cells scatter around the law's like a Beta
variable of κ trials. κ follows from how much they scatter beyond their counting errors; where there
are too few cells to tell, the law weighs one trial. So a law that holds smooths noisy cells, and one
that does not is overruled. Weights w fall with the distance from a cell in logarithms of budget and
context, squared, so that a cell's own rates are met there.

Beyond the last counted position the logit goes on with `Beyond.slope` per ln(position).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.acceptance.fit import NUM_FREE, MeasuredRates
from magicdec.perfmodel.acceptance.law import Law, sanitize

LEAST_TRIALS = 1.0
"""Trials that the law counts for at least."""
MOST_TRIALS = 1e9
"""Trials that the law counts for where the counts do not contradict it."""
NEAR = 1e-9
"""Squared distance in log budget and log context below which a cell is met."""
INSIDE = 1e-9


class Beyond(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rates go on beyond the positions that are known."""

    position: int
    """The last known position."""
    slope: float = 0.0
    """Change of the rate's logit per unit of ln(position)."""
    error: float = 0.0
    """Standard deviation of the slope."""

    def octaves(self, gamma_max: int) -> Array:
        """ln(i / position) of positions i = 1..gamma_max, 0 up to the last known one."""
        positions = np.arange(1, gamma_max + 1, dtype=np.float64)
        return np.log(np.maximum(positions / self.position, 1.0))

    def continued(self, rates: Array, variance: Array) -> tuple[Array, Array]:
        """Rates by position on a last axis and the deviation of log(−log rate), from rates that are
        taken as those of the last known position, and the variance without the slope's."""
        octaves = self.octaves(rates.shape[-1])
        if self.slope:
            rates = from_logit(logit(rates) + self.slope * octaves)
        of_slope = self.error * octaves * log_deviation(rates)
        return rates, np.sqrt(variance + of_slope**2)


class Cell(NamedTuple):
    """Counts of one budget and context beside the law."""

    budget: float
    context: float
    shift: Array
    """Logit of the posterior minus that of the law, by position."""
    deviation: Array
    """Standard deviation of log(−log rate), by position."""


def cells_of(measured: Sequence[MeasuredRates], law: Law) -> list[Cell]:
    """Each cell's posterior beside the law."""
    weight = _trials_of_law(measured, law)
    cells = []
    for counted in measured:
        rates = np.array(counted.rates)
        trials = _effective_trials(counted)
        of_law = _of_law(counted, law)
        posterior = _inside((trials * rates + weight * of_law) / (trials + weight))
        variance = posterior * (1.0 - posterior) / (trials + weight + 1.0)
        cells.append(
            Cell(
                budget=counted.budget,
                context=counted.context,
                shift=logit(posterior) - logit(of_law),
                deviation=np.sqrt(variance) / (posterior * -np.log(posterior)),
            )
        )
    return cells


def rates_near(
    cells: Sequence[Cell], of_law: Array, *, budget: Any, context: Any
) -> tuple[Array, Array]:
    """Rates by position at a budget and context, and the deviation of log(−log rate) that the counts
    leave, from the law's rates there; positions are on the last axis."""
    gamma_max = of_law.shape[-1]
    weights = _weights(cells, budget=budget, context=context)
    shifts = np.stack([_continued(cell.shift, gamma_max) for cell in cells])
    deviations = np.stack([_continued(cell.deviation, gamma_max) for cell in cells])
    rates = from_logit(logit(of_law) + weights @ shifts)
    return rates, weights @ deviations


def _continued(values: Array, length: int) -> Array:
    """Values by position; those beyond the last are as the last."""
    return np.asarray(values[np.minimum(np.arange(length), len(values) - 1)])


def _weights(cells: Sequence[Cell], *, budget: Any, context: Any) -> Array:
    """Weights of the cells on a last axis, behind broadcast(budget, context)."""
    context = sanitize(context, 1.0)
    budget = np.minimum(sanitize(budget, 1.0), context)
    of_budget = np.log(budget[..., None] / [cell.budget for cell in cells])
    of_context = np.log(context[..., None] / [cell.context for cell in cells])
    near = 1.0 / np.maximum(of_budget**2 + of_context**2, NEAR)
    return np.asarray(near / near.sum(axis=-1, keepdims=True))


def _effective_trials(counted: MeasuredRates) -> Array:
    """Independent trials that would have each rate's standard error."""
    rates = np.array(counted.rates)
    trials = np.array(counted.trials)
    smooth = (rates * trials + 0.5) / (trials + 1.0)
    stderr = np.maximum(counted.stderr, 1e-9)
    return np.asarray(np.minimum(smooth * (1.0 - smooth) / stderr**2, trials))


def _of_law(counted: MeasuredRates, law: Law) -> Array:
    rates = law.conditional_rates(
        budget=counted.budget, context=counted.context, gamma_max=len(counted.rates)
    )
    return _inside(rates)


def _trials_of_law(measured: Sequence[MeasuredRates], law: Law) -> float:
    """κ: the trials that the law counts for, by the moments of the counts' scatter around it."""
    scatter = 0.0
    num_rates = 0
    total_trials = 0.0
    for counted in measured:
        of_law = _of_law(counted, law)
        trials = _effective_trials(counted)
        missed = np.array(counted.rates) - of_law
        scatter += float(np.sum(trials * missed**2 / (of_law * (1.0 - of_law))))
        num_rates += len(of_law)
        total_trials += float(trials.sum())
    freedom = num_rates - NUM_FREE
    if freedom <= 0:
        return LEAST_TRIALS
    # each rate's expected scatter is 1 + trials / (κ + 1)
    excess = scatter * num_rates / freedom - num_rates
    if excess <= 0.0:
        return MOST_TRIALS
    return min(max(total_trials / excess - 1.0, LEAST_TRIALS), MOST_TRIALS)


def _inside(rates: Any) -> Array:
    return np.asarray(np.clip(rates, INSIDE, 1.0 - INSIDE))


def logit(rate: Any) -> Array:
    inside = _inside(rate)
    return np.asarray(np.log(inside / (1.0 - inside)))


def from_logit(value: Any) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-np.asarray(value))))


def log_deviation(rate: Any) -> Array:
    """Standard deviation of log(−log rate) per standard deviation of the rate's logit."""
    inside = np.clip(rate, 1e-12, 1.0 - 1e-12)
    return np.asarray((1.0 - inside) / -np.log(inside))
