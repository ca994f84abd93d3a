"""Fits a law of acceptance to counts: maximum likelihood with weak priors; few data give a plain
law with wide errors.

The residuals are signed roots of the binomial deviance, so least squares on them is maximum
likelihood; the priors are further residuals. What the binomial cannot explain (sequences that
differ, passages that differ) inflates the
errors: by the overdispersion of the cells, or, where rows name their sequence, by that of the
    sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
import numpy as np

from magicdec.counts import Array, Counts, rate_and_error
from magicdec.errors import ConfigError
from magicdec.fitting import Free, Solution, solve
from magicdec.perfmodel.acceptance.law import Law, LawError
from magicdec.specs.speculation import DraftMethod

FREE = {
    "rejection": Free(prior=0.2, spread=3.0, limits=(math.exp(-16.0), 1.0)),
    "budget_exponent": Free(scale="linear", prior=0.5, spread=0.5, limits=(0.0, 6.0)),
    "context_exponent": Free(scale="linear", prior=0.1, spread=0.2, limits=(-3.0, 3.0)),
    "fill_exponent": Free(scale="linear", prior=1.0, spread=0.7, limits=(0.0, 6.0)),
    "concentration": Free(prior=50.0, spread=1.5, limits=(0.3, 1e4)),
    "drift": Free(prior=0.2, spread=2.0, limits=(1e-3, 10.0)),
    "drift_depth": Free(prior=2.0, spread=0.5, limits=(0.3, 20.0)),
    "floor": Free(prior=0.1, spread=1.5, limits=(1e-4, 1.0)),
}
NUM_FREE = len(FREE)
LARGEST_ERROR = 10.0
"""Deviation of a logarithm of which the counts say nothing; a wider one would change no answer."""
MEAN_ABSOLUTE_NORMAL = math.sqrt(2.0 / math.pi)


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """How often drafts at one position were accepted, given that all before them in their block
    were.
    """

    draft_method: str
    budget: float
    """KV slots; the context's length for a full cache."""
    context: float
    position: int
    trials: float
    accepted: float
    temperature: float | None = None
    sequence: str | int | None = None

    def __post_init__(self) -> None:
        numbers = (self.budget, self.context, self.trials, self.accepted)
        if not all(math.isfinite(value) for value in numbers):
            raise ValueError(
                "budget, context, trials and accepted must be finite numbers"
            )
        if self.budget < 1 or self.context < 1 or self.position < 1:
            raise ValueError("budget, context and position must be at least 1")
        if not 0 <= self.accepted <= self.trials:
            raise ValueError(
                f"accepted must be between 0 and trials, not {self.accepted} of {self.trials}"
            )


class MeasuredRates(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Counted rates of one (budget, context) by position, as they are before any law."""

    budget: float
    context: float
    rates: list[float]
    stderr: list[float]
    """Standard errors, clustered by sequence where the counts name it; ± 1.645 of them is a 90 %
    interval.
    """
    trials: list[float]


def measurements_from_rows(
    rows: Iterable[Measurement | Mapping[str, Any]],
) -> list[Measurement]:
    """Measurements of rows; those without trials are dropped. Raises ConfigError naming the row."""
    kept: list[Measurement] = []
    for number, row in enumerate(rows, 1):
        try:
            if isinstance(row, Measurement):
                each = row
            else:
                each = msgspec.convert(row, Measurement, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"acceptance measurement {number}: {error}") from error
        if each.trials > 0:
            kept += [each]
    if not kept:
        raise ConfigError("no acceptance measurement with at least one trial")
    return kept


def _grouped(rows: Iterable[Measurement], *names: str) -> dict[Any, list[Measurement]]:
    """Rows by what these fields hold, in order."""
    key = attrgetter(*names)
    found: dict[Any, list[Measurement]] = {}
    for row in sorted(rows, key=key):
        found.setdefault(key(row), []).append(row)
    return found


class _Cells(msgspec.Struct, frozen=True, kw_only=True):
    """Counts by (budget, context, position), with the reference point about which the law is
    centred.
    """

    budget: Array
    context: Array
    position: Any
    trials: Array
    accepted: Array
    reference_budget: float
    reference_context: float


def _cells(rows: Sequence[Measurement]) -> _Cells:
    groups = _grouped(rows, "budget", "context", "position")
    budget, context, position = np.array(list(groups), dtype=np.float64).T
    sums = []
    for cell in groups.values():
        trials_of_cell = sum(row.trials for row in cell)
        accepted_of_cell = sum(row.accepted for row in cell)
        sums.append((trials_of_cell, accepted_of_cell))
    trials, accepted = np.array(sums, dtype=np.float64).T
    weights = trials * np.where(budget < context, 1.0, 1e-6)
    return _Cells(
        budget=budget,
        context=context,
        position=position.astype(np.int64),
        trials=trials,
        accepted=accepted,
        reference_budget=_center(budget, weights),
        reference_context=_center(context, weights),
    )


def _center(values: Array, weights: Array) -> float:
    """Weighted geometric mean."""
    log_mean = np.average(np.log(values), weights=weights)
    return float(np.exp(log_mean))


def _law_of(values: Mapping[str, float], cells: _Cells) -> Law:
    """The law whose `rejection` is that at the cells' reference point."""
    left_out = max(1.0 - cells.reference_budget / cells.reference_context, 1e-3)
    rejection = values["rejection"] * left_out ** -values["fill_exponent"]
    constants: dict[str, Any] = {"floor": 0.0, **values}
    constants["rejection"] = min(rejection, 1e3)
    return Law(
        **constants,
        reference_budget=cells.reference_budget,
        reference_context=cells.reference_context,
    )


def _predicted(law: Law, cells: _Cells) -> Array:
    rates = law.conditional_rates(
        budget=cells.budget,
        context=cells.context,
        gamma_max=int(cells.position.max()),
    )
    chosen: Array = np.take_along_axis(rates, cells.position[:, None] - 1, axis=1)[:, 0]
    return np.clip(chosen, 1e-9, 1.0 - 1e-9)


def _deviance_residuals(predicted: Array, trials: Array, accepted: Array) -> Array:
    """Signed roots of 2·(log-likelihood of the observed rate − of the predicted one)."""
    observed = accepted / trials
    rejected = trials - accepted
    with np.errstate(divide="ignore", invalid="ignore"):
        of_accepted = accepted * np.log(observed / predicted)
        of_rejected = rejected * np.log((1.0 - observed) / (1.0 - predicted))
    gained = np.where(accepted > 0, of_accepted, 0.0) + np.where(
        rejected > 0, of_rejected, 0.0
    )
    deviance = np.maximum(2.0 * gained, 0.0)
    return np.sign(observed - predicted) * np.sqrt(deviance)


def fit_law(
    rows: Sequence[Measurement],
    *,
    is_self: bool,
    spread: float | None = None,
    cluster_factor: float | None = None,
) -> tuple[Law, LawError, float, float]:
    """The law of one method's counts, its errors, the spread between sequences, and the rates' root
    mean square misfit. `cluster_factor` is the variance inflation when it is known."""
    cells = _cells(rows)
    free = dict(FREE)
    if is_self:
        del free["floor"]
    solution = _fitted(cells, free, inflation=1.0)
    law = _law_of(solution.values, cells)
    predicted = _predicted(law, cells)
    inflation = _overdispersion(predicted, cells, num_parameters=len(free))
    if inflation > 1.0:
        # the priors' weight against the data's follows from the data's true information
        solution = _fitted(cells, free, inflation=inflation)
        law = _law_of(solution.values, cells)
        predicted = _predicted(law, cells)
    between, clustering = _between_sequences(rows, law)
    if spread is None:
        spread = between
    if cluster_factor is None:
        cluster_factor = clustering
    widening = max(cluster_factor, 1.0) / max(inflation, 1.0)
    error = _errors(solution, cells, math.sqrt(max(widening, 1.0)))
    missed = (cells.accepted / cells.trials - predicted) ** 2
    misfit = float(np.average(missed, weights=cells.trials))
    return law, error, spread, math.sqrt(misfit)


def _fitted(cells: _Cells, free: Mapping[str, Free], *, inflation: float) -> Solution:
    def residuals(values: dict[str, float]) -> Array:
        law = _law_of(values, cells)
        predicted = _predicted(law, cells)
        data = _deviance_residuals(predicted, cells.trials, cells.accepted)
        return data / math.sqrt(inflation)

    overall = 1.0 - (cells.accepted.sum() + 0.5) / (cells.trials.sum() + 1.0)
    start = {"rejection": max(float(overall), 1e-6)}
    return solve(free, residuals, starts=(start,), max_nfev=200, xtol=1e-8, ftol=1e-8)


def _overdispersion(predicted: Array, cells: _Cells, *, num_parameters: int) -> float:
    """Pearson's chi-square per degree of freedom, at least 1."""
    if predicted.size <= num_parameters:
        return 1.0
    variance = np.maximum(cells.trials * predicted * (1.0 - predicted), 0.05)
    excess = cells.accepted - cells.trials * predicted
    chi_square = float(np.sum(excess**2 / variance))
    freedom = predicted.size - num_parameters
    return max(1.0, chi_square / freedom)


def _between_sequences(rows: Sequence[Measurement], law: Law) -> tuple[float, float]:
    """Standard deviation of alpha between sequences, and the variance inflation of totals clustered
    by sequence.
    """
    totals: dict[str | int, Array] = {}
    gamma = max(row.position for row in rows)
    for row in rows:
        if row.sequence is None:
            continue
        rates = law.conditional_rates(
            budget=row.budget, context=row.context, gamma_max=gamma
        )
        rate = float(rates[row.position - 1])
        first = float(row.position == 1)
        excess = row.accepted - row.trials * rate
        variance = row.trials * rate * (1.0 - rate)
        entry = np.array(
            [excess, variance, first * excess, first * variance, first * row.trials]
        )
        totals[row.sequence] = totals.get(row.sequence, np.zeros(5)) + entry
    if len(totals) < 2:
        return 0.0, 1.0
    excess, variance, first_excess, first_variance, trials = np.array(
        list(totals.values())
    ).T
    num = len(totals)
    ratio = float(np.sum(excess**2) / max(np.sum(variance), 1e-9))
    inflation = ratio * num / (num - 1)
    has_first = trials > 0
    num = has_first.sum()
    if num < 2:
        return 0.0, inflation
    weights = trials[has_first]
    of_rate = (first_excess[has_first] / weights) ** 2
    of_counting = first_variance[has_first] / weights**2
    mean = float(np.average(of_rate - of_counting, weights=weights))
    between = mean * num / (num - 1)
    return math.sqrt(min(max(between, 0.0), 0.25)), inflation


def _errors(solution: Solution, cells: _Cells, factor: float) -> LawError:
    """Standard errors in the form of LawError, by the delta method about the reference point."""
    deepest = max(int(cells.position.max()), 2)

    def log_hazard(values: dict[str, float], position: int) -> float:
        rates = _law_of(values, cells).conditional_rates(
            budget=cells.reference_budget,
            context=cells.reference_context,
            gamma_max=position,
        )
        hazard = -math.log(max(float(rates[-1]), 1e-12))
        return math.log(max(hazard, 1e-12))

    def hazard_error(position: int) -> float:
        return factor * solution.deviation_of(partial(log_hazard, position=position))

    def constant_error(name: str) -> float:
        return min(factor * solution.deviation_of(itemgetter(name)), LARGEST_ERROR)

    first = hazard_error(1)
    last = hazard_error(deepest)
    growth = math.sqrt(max(last**2 - first**2, 0.0)) / math.log(deepest)
    return LawError(
        log_rejection=min(first, LARGEST_ERROR),
        budget_exponent=constant_error("budget_exponent"),
        context_exponent=constant_error("context_exponent"),
        depth=min(growth, LARGEST_ERROR),
    )


def measurements_of(
    counts: Counts,
    *,
    draft_method: DraftMethod,
    budget: float,
    context: float,
    temperature: float | None = None,
) -> list[Measurement]:
    """Counts at one budget and context as rows to fit. Each of several clusters is a sequence of
    its own, apart from those of other contexts.
    """
    rows = []
    for cluster, position, tried, accepted in counts.cells():
        sequence = None
        if len(counts.steps) > 1:
            sequence = f"{context:g}:{cluster}"
        rows.append(
            Measurement(
                draft_method=draft_method,
                budget=budget,
                context=context,
                position=position,
                trials=tried,
                accepted=accepted,
                temperature=temperature,
                sequence=sequence,
            )
        )
    return rows


def measured_rates(rows: Sequence[Measurement]) -> list[MeasuredRates]:
    """The counts as rates with standard errors, by budget and context."""
    tables = []
    for (budget, context), cell in _grouped(rows, "budget", "context").items():
        table = MeasuredRates(
            budget=budget, context=context, rates=[], stderr=[], trials=[]
        )
        for counts in _grouped(cell, "position").values():
            rate, stderr, trials = _rate(counts)
            table.rates.append(rate)
            table.stderr.append(stderr)
            table.trials.append(trials)
        tables.append(table)
    return tables


def _rate(rows: Sequence[Measurement]) -> tuple[float, float, float]:
    """Rate, standard error and trials of counts of one kind; sequences that are named are taken as
    clusters.
    """
    clusters: dict[str | int | None, Array] = {}
    for row in rows:
        entry = np.array([row.accepted, row.trials])
        clusters[row.sequence] = clusters.get(row.sequence, np.zeros(2)) + entry
    accepted, tried = np.array(list(clusters.values())).T
    return *rate_and_error(accepted, tried), float(tried.sum())


def held_out(
    rows: Sequence[Measurement], *, is_self: bool
) -> tuple[float, float] | None:
    """The mean absolute error of the law on rates of budgets that it was not fitted on, and the
    error that the rates' own standard errors would leave if the law were right.

    Each budget between the smallest and the largest is left out in turn. Rates are weighted by
    trials, positions apart and contexts together. None with fewer than three budgets.
    """
    errors = []
    noises = []
    weights = []
    by_budget = _grouped(rows, "budget")
    for budget in sorted(by_budget)[1:-1]:
        others = [row for row in rows if row.budget != budget]
        law, *_ = fit_law(others, is_self=is_self)
        for position, chosen in _grouped(by_budget[budget], "position").items():
            rate, stderr, trials = _rate(chosen)
            predicted = _mean_rate(law, chosen, budget=budget, position=position)
            errors.append(abs(rate - predicted))
            noises.append(MEAN_ABSOLUTE_NORMAL * stderr)
            weights.append(trials)
    if not errors:
        return None
    error = np.average(errors, weights=weights)
    noise = np.average(noises, weights=weights)
    return float(error), float(noise)


def _mean_rate(
    law: Law, rows: Sequence[Measurement], *, budget: float, position: int
) -> float:
    """The law's rate at a position, averaged over the contexts of the rows by their trials."""
    contexts = np.array([row.context for row in rows])
    rates = law.conditional_rates(budget=budget, context=contexts, gamma_max=position)
    trials = [row.trials for row in rows]
    return float(np.average(rates[:, -1], weights=trials))
