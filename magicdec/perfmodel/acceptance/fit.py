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
from dataclasses import dataclass
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
    "floor": Free(prior=0.1, spread=1.5, limits=(1e-4, 0.9)),
}
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
            raise ValueError("budget, context, trials and accepted must be finite numbers")
        if self.budget < 1 or self.context < 1 or self.position < 1:
            raise ValueError("budget, context and position must be at least 1")
        if not 0 <= self.accepted <= self.trials:
            raise ValueError(
                f"accepted must be between 0 and trials, not {self.accepted} of {self.trials}"
            )


class MeasuredRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counted rates of one (budget, context) by position, as they are before any law."""

    budget: float
    context: float
    rates: list[float]
    stderr: list[float]
    """Standard errors, clustered by sequence where the counts name it; ± 1.645 of them is a 90 %
    interval.
    """
    trials: list[float]


def measurements_from_rows(rows: Iterable[Measurement | Mapping[str, Any]]) -> list[Measurement]:
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


@dataclass(frozen=True, kw_only=True)
class _Cells:
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
    trials, accepted = (
        np.array(
            [sum(getattr(row, name) for row in cell) for cell in groups.values()],
            dtype=np.float64,
        )
        for name in ("trials", "accepted")
    )
    weights = trials * np.where(budget < context, 1.0, 1e-6)
    centers = (
        float(np.exp(np.average(np.log(each), weights=weights))) for each in (budget, context)
    )
    return _Cells(
        budget=budget,
        context=context,
        position=position.astype(np.int64),
        trials=trials,
        accepted=accepted,
        reference_budget=next(centers),
        reference_context=next(centers),
    )


def _law_of(values: Mapping[str, float], cells: _Cells) -> Law:
    """The law whose `rejection` is that at the cells' reference point."""
    left_out = max(1.0 - cells.reference_budget / cells.reference_context, 1e-3)
    rejection = min(values["rejection"] * left_out ** -values["fill_exponent"], 1e3)
    reference = {name: getattr(cells, name) for name in ("reference_budget", "reference_context")}
    return Law(**{"floor": 0.0, **values, "rejection": rejection, **reference})


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
    with np.errstate(divide="ignore", invalid="ignore"):
        hit = np.where(accepted > 0, accepted * np.log(observed / predicted), 0.0)
        missed = trials - accepted
        miss = np.where(missed > 0, missed * np.log((1.0 - observed) / (1.0 - predicted)), 0.0)
    return np.sign(observed - predicted) * np.sqrt(np.maximum(2.0 * (hit + miss), 0.0))


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
    free = {name: each for name, each in FREE.items() if name != "floor" or not is_self}
    solution = _fitted(cells, free, inflation=1.0)
    predicted = _predicted(_law_of(solution.values, cells), cells)
    inflation = _overdispersion(predicted, cells, num_parameters=len(free))
    if (
        inflation > 1.0
    ):  # the priors' weight against the data's follows from the data's true information
        solution = _fitted(cells, free, inflation=inflation)
        predicted = _predicted(_law_of(solution.values, cells), cells)
    law = _law_of(solution.values, cells)
    between, clustering = _between_sequences(rows, law)
    clustering = max(clustering if cluster_factor is None else cluster_factor, 1.0)
    error = _errors(solution, cells, math.sqrt(max(clustering / max(inflation, 1.0), 1.0)))
    misfit = float(
        np.average((cells.accepted / cells.trials - predicted) ** 2, weights=cells.trials)
    )
    return law, error, between if spread is None else spread, math.sqrt(misfit)


def _fitted(cells: _Cells, free: Mapping[str, Free], *, inflation: float) -> Solution:
    def residuals(values: dict[str, float]) -> Array:
        data = _deviance_residuals(
            _predicted(_law_of(values, cells), cells),
            cells.trials,
            cells.accepted,
        )
        return data / math.sqrt(inflation)

    overall = 1.0 - (cells.accepted.sum() + 0.5) / (cells.trials.sum() + 1.0)
    start = {"rejection": max(float(overall), 1e-6)}
    return solve(free, residuals, starts=(start,), max_nfev=200, xtol=1e-8, ftol=1e-8)


def _overdispersion(predicted: Array, cells: _Cells, *, num_parameters: int) -> float:
    """Pearson's chi-square per degree of freedom, at least 1."""
    if predicted.size <= num_parameters:
        return 1.0
    variance = np.maximum(cells.trials * predicted * (1.0 - predicted), 0.05)
    chi_square = float(np.sum((cells.accepted - cells.trials * predicted) ** 2 / variance))
    return max(1.0, chi_square / (predicted.size - num_parameters))


def _between_sequences(rows: Sequence[Measurement], law: Law) -> tuple[float, float]:
    """Standard deviation of alpha between sequences, and the variance inflation of totals clustered
    by sequence.
    """
    totals: dict[str | int, Array] = {}
    gamma = max(row.position for row in rows)
    for row in rows:
        if row.sequence is None:
            continue
        rate = float(
            law.conditional_rates(budget=row.budget, context=row.context, gamma_max=gamma)[
                row.position - 1
            ]
        )
        first = float(row.position == 1)
        excess = row.accepted - row.trials * rate
        variance = row.trials * rate * (1.0 - rate)
        entry = np.array([excess, variance, first * excess, first * variance, first * row.trials])
        totals[row.sequence] = totals.get(row.sequence, np.zeros(5)) + entry
    if len(totals) < 2:
        return 0.0, 1.0
    excess, variance, first_excess, first_variance, trials = np.array(list(totals.values())).T
    inflation = (
        float(np.sum(excess**2) / max(np.sum(variance), 1e-9)) * len(totals) / (len(totals) - 1)
    )
    seen = trials > 0
    if seen.sum() < 2:
        return 0.0, inflation
    squares = (first_excess[seen] / trials[seen]) ** 2 - first_variance[seen] / trials[seen] ** 2
    between = float(np.average(squares, weights=trials[seen])) * seen.sum() / (seen.sum() - 1)
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
        return math.log(max(-math.log(max(float(rates[-1]), 1e-12)), 1e-12))

    first, last = (
        factor * solution.deviation_of(partial(log_hazard, position=position))
        for position in (1, deepest)
    )
    of_budget, of_context = (
        min(factor * solution.deviation_of(itemgetter(name)), 10.0)
        for name in ("budget_exponent", "context_exponent")
    )
    return LawError(
        log_rejection=min(first, 10.0),
        budget_exponent=of_budget,
        context_exponent=of_context,
        depth=min(math.sqrt(max(last**2 - first**2, 0.0)) / math.log(deepest), 10.0),
    )


def measurements_of(
    counts: Counts,
    *,
    draft_method: DraftMethod,
    budget: float,
    context: float,
    temperature: float | None = None,
) -> list[Measurement]:
    """Counts at one budget and context as rows to fit; several clusters are told apart, and from
    other contexts'.
    """
    return [
        Measurement(
            draft_method=draft_method,
            budget=budget,
            context=context,
            position=position,
            trials=tried,
            accepted=accepted,
            temperature=temperature,
            sequence=f"{context:g}:{cluster}" if len(counts.steps) > 1 else None,
        )
        for cluster, position, tried, accepted in counts.cells()
    ]


def measured_rates(rows: Sequence[Measurement]) -> list[MeasuredRates]:
    """The counts as rates with standard errors, by budget and context."""
    tables = []
    for (budget, context), cell in _grouped(rows, "budget", "context").items():
        by_position = map(_rate, _grouped(cell, "position").values())
        rates, stderr, trials = (list(values) for values in zip(*by_position, strict=True))
        tables.append(
            MeasuredRates(budget=budget, context=context, rates=rates, stderr=stderr, trials=trials)
        )
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


def held_out(rows: Sequence[Measurement], *, is_self: bool) -> tuple[float, float] | None:
    """How far the law misses rates of budgets that it was not fitted on, each between the smallest
    and the largest left out in turn (mean absolute, weighted by trials, positions apart and
    contexts together); and how far it would on average if it were right, from the rates' standard
    errors. None with fewer than three budgets."""
    misses = []
    for budget in sorted({row.budget for row in rows})[1:-1]:
        law = fit_law([row for row in rows if row.budget != budget], is_self=is_self)[0]
        for position, chosen in _grouped(
            (row for row in rows if row.budget == budget), "position"
        ).items():
            rate, stderr, trials = _rate(chosen)
            contexts = np.array([row.context for row in chosen])
            rates = law.conditional_rates(budget=budget, context=contexts, gamma_max=position)[
                :, -1
            ]
            predicted = float(np.average(rates, weights=[row.trials for row in chosen]))
            misses.append((abs(rate - predicted), MEAN_ABSOLUTE_NORMAL * stderr, trials))
    if not misses:
        return None
    errors, noises, weights = zip(*misses, strict=True)
    return float(np.average(errors, weights=weights)), float(np.average(noises, weights=weights))
