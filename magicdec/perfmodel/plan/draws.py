"""Configurations that compete, priced with the same joint draws of costs and acceptance, so that what
they share cancels: the probability that one is faster than another.

Draws are quasi-random: the rate of configuration a at draw n is

    rate_a · T_a / E_a · E_a(n) / T_a(n)

where E_a(n) is the tokens per step of the drawn acceptance and T_a(n) the time of the drawn costs.
Two drafts on one text share part of their acceptance, as the belief says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.acceptance.believed import joint_levels
from magicdec.perfmodel.intervals import (
    drawn_tokens,
    group_shares,
    log_shifts,
    ratio_variance,
    reported_error,
    step_errors,
    tokens_error,
)
from magicdec.perfmodel.lanes import evidence_of
from magicdec.perfmodel.plan.request import Case, DraftOption
from magicdec.perfmodel.plan.search import DraftRows
from magicdec.perfmodel.speedup import Prediction
from magicdec.schema.row import Candidate, same_configuration

NUM_PAIRS = 128
"""Draws, each with its mirror image."""
ROWS_OF_DRAFT = 6
"""Configurations of a draft that are compared: its fastest."""


@lru_cache(maxsize=8)
def normals(num: int) -> Array:
    """Quasi-random draws of this many independent standard normal variables, [draws, variables].

    Points of an additive recurrence, whose steps are the powers of 1/x with x^(num + 1) = x + 1,
    spread evenly; each comes with its mirror image, so that means are exact, and so are variances.
    """
    root = 2.0
    for _ in range(64):
        root = (1.0 + root) ** (1.0 / (num + 1.0))
    steps = root ** -np.arange(1.0, num + 1.0)
    places = (0.5 + np.outer(np.arange(1.0, NUM_PAIRS + 1.0), steps)) % 1.0
    quantile = NormalDist().inv_cdf
    half = np.vectorize(quantile)(places)
    mixing = np.linalg.cholesky(half.T @ half / NUM_PAIRS)
    half = np.linalg.solve(mixing, half.T).T  # none is correlated with another
    return np.concatenate([half, -half])


class Competitor(msgspec.Struct, frozen=True, kw_only=True):
    """Competing configurations of one draft. `option` None: decoding without a draft."""

    option: DraftOption | None
    rows: list[Candidate]
    prediction: Prediction
    error: Array
    """Relative error of the tokens per step."""

    @property
    def prefill_share(self) -> Array:
        """Share of time that prefills take, where requests are whole."""
        shares = np.zeros(len(self.rows))
        for place, row in enumerate(self.rows):
            if row.requests is not None:
                shares[place] = row.requests.prefill_share
        return shares

    def rates(self, time_factor: Array) -> Array:
        """Rates where decoding takes this much longer: [draws, rows]."""
        share = self.prefill_share
        rates = np.array([row.rate for row in self.rows])
        return rates / (share + (1.0 - share) * time_factor)


class Draws(NamedTuple):
    """Configurations that compete at one batch and layout, priced with the same draws."""

    compared: list[Competitor]
    rates: Array
    """Rates of all configurations by draw: [draws, rows]."""

    def place(self, row: Candidate) -> int | None:
        """The place of a configuration among all drafts' rows; None: it was not drawn."""
        number = 0
        for of_draft in self.compared:
            for other in of_draft.rows:
                if same_configuration(other, row):
                    return number
                number += 1
        return None

    def times_as_fast(self, row: Candidate, other: Candidate) -> Array | None:
        """A configuration's rate over another's, by draw; None: one was not drawn."""
        place = self.place(row)
        place_of_other = self.place(other)
        if place is None or place_of_other is None:
            return None
        return np.asarray(self.rates[:, place] / self.rates[:, place_of_other])

    def chance_ahead(self, row: Candidate, other: Candidate) -> float | None:
        """The probability that a configuration is faster than another; None: one was not drawn."""
        times = self.times_as_fast(row, other)
        if times is None:
            return None
        return float((times > 1.0).mean())


def draws_of(
    case: Case, found: Iterable[DraftRows], weighed: Candidate
) -> Draws | None:
    """Draws of what competes with a row. None where no draft does."""
    compared = _compared(case, found, weighed)
    if len(compared) < 2:
        return None
    return Draws(compared, _drawn(compared))


def _compared(
    case: Case, found: Iterable[DraftRows], weighed: Candidate
) -> list[Competitor]:
    """Decoding without a draft at the choice's batch and layout, then the fastest configurations of
    each draft that fit there and may be chosen, and the one that is weighed."""
    compared = []
    for of_draft in found:
        option = of_draft.option
        places = _fastest(case, of_draft, weighed)
        if not places:
            continue
        prediction = of_draft.prediction.take(np.array(places))
        law = None
        if option is not None:
            law = option.acceptance
        compared.append(
            Competitor(
                option=option,
                rows=[of_draft.rows[place] for place in places],
                prediction=prediction,
                error=prediction.full(tokens_error(prediction, law)),
            )
        )
    if not compared or compared[0].option is not None:
        return []
    return compared


def _fastest(case: Case, of_draft: DraftRows, weighed: Candidate) -> list[int]:
    """Places of a draft's fastest rows that may be chosen instead of the weighed one, at its batch
    and on its devices; that one first."""
    is_admitted = of_draft.option is None
    ranked = []
    for place, row in enumerate(of_draft.rows):
        is_beside = (row.batch_size, row.tp_size) == (
            weighed.batch_size,
            weighed.tp_size,
        )
        runs = is_beside and row.within_limits and row.fits
        if row is weighed or (runs and (is_admitted or case.admits(row))):
            rate = math.inf if same_configuration(row, weighed) else row.rate
            ranked.append((-rate, place))
    ranked.sort()
    return [place for _, place in ranked[:ROWS_OF_DRAFT]]


def _drawn(compared: Sequence[Competitor]) -> Array:
    """The rates of all configurations under the same draws."""
    options = [of_draft.option for of_draft in compared if of_draft.option is not None]
    sources = _sources(compared)
    # one variable more than are drawn: the sequence's steps depend on their number, and the ties that
    # were checked are of these draws
    draws = normals(len(sources) + len(options) + 1)
    of_cost = dict(zip(sources, draws.T, strict=False))
    acceptance = draws[:, len(sources) : -1] @ _loadings(options).T
    alone = compared[0]
    rates = [alone.rates(np.exp(_log_time(alone, of_cost)))]
    for of_draft, sigmas in zip(compared[1:], acceptance.T, strict=True):
        time = _log_time(of_draft, of_cost)
        prediction = of_draft.prediction
        tokens = drawn_tokens(prediction, sigmas, of_draft.error)
        # over those expected: [draws, rows]
        more = tokens / prediction.full(prediction.expected_tokens_per_step)
        rates.append(of_draft.rates(np.exp(time) / more))
    return np.hstack(rates)


REPORTED = "reported"


def _engine_of(prediction: Prediction) -> str:
    """The engine's own error, which drafts of one lane share."""
    return f"engine: {evidence_of(prediction.setup).lane}"


def _sources(compared: Sequence[Competitor]) -> list[str]:
    """The errors of costs that are drawn."""
    prediction = compared[0].prediction
    engines = [_engine_of(of_draft.prediction) for of_draft in compared[1:]]
    _, step = group_shares(prediction.terms)
    shifts = log_shifts(
        prediction.setup,
        prediction.terms.autoregressive,
        step,
        prediction.points.tp,
    )
    return [*shifts, *dict.fromkeys(engines), REPORTED]


def _log_time(of: Competitor, draws: dict[str, Array]) -> Array:
    """Logarithm of the factor on each configuration's step, whose median is 1: [draws, rows]."""
    prediction = of.prediction
    setup = prediction.setup
    terms = prediction.terms
    shares, of_drafted = group_shares(terms)
    if of.option is not None:
        shares = of_drafted
    shifts = log_shifts(setup, terms.autoregressive, shares, prediction.points.tp)
    if of.option is not None:
        shifts[_engine_of(prediction)] = _own_error(prediction)
        shifts[REPORTED] = reported_error(terms)
    total = np.zeros((2 * NUM_PAIRS, len(of.rows)))
    for source, shift in shifts.items():
        total += np.outer(draws[source], prediction.full(shift))
    return total


def _own_error(prediction: Prediction) -> Array:
    """The error of a speedup, which rows state, without those of kernels and reports."""
    setup = prediction.setup
    terms = prediction.terms
    tp_size = prediction.points.tp
    whole, _ = step_errors(setup, terms, tp_size)
    alone, of_drafted = group_shares(terms)
    of_kernels = ratio_variance(setup, terms.autoregressive, alone, of_drafted, tp_size)
    known = of_kernels + reported_error(terms) ** 2
    return np.sqrt(np.maximum(whole**2 - known, 0.0))


def _loadings(options: Sequence[DraftOption]) -> Array:
    """Rows of which a draft's acceptance is made of independent variables: what the belief says
    that drafts share, and of measured ones nothing."""
    correlation = np.eye(len(options))
    places = []
    questions = []
    for number, option in enumerate(options):
        if option.question is not None:
            places.append(number)
            questions.append(option.question)
    if questions:
        _, covariance = joint_levels(questions)
        deviation = np.sqrt(covariance.diagonal())
        correlation[np.ix_(places, places)] = covariance / np.outer(
            deviation, deviation
        )
    values, vectors = np.linalg.eigh(correlation)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)))
