"""How a choice depends on what is not known, and which measurement is worth most.

Costs and acceptance are drawn together, quasi-randomly, and every configuration is priced with the
same draws: the rate of configuration a at draw n is

    rate_a · T_a / E_a · E_a(n) / T_a(n)

where E_a(n) is the tokens per step of the drawn acceptance and T_a(n) the time of the drawn costs.
Two drafts on one text share part of their acceptance, as the belief says.

A measurement reveals some of the drawn values. After it, one would choose the configuration with
the least mean time per token given its result, as one does now. Its worth is how much shorter that
time is on average. Means given a result are regressions of the times on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.acceptance.assumed import joint_levels
from magicdec.perfmodel.intervals import (
    drawn_tokens,
    group_shares,
    log_shifts,
    normal_cdf,
    ratio_variance,
    reported_error,
    step_errors,
    tokens_error,
)
from magicdec.perfmodel.lanes import evidence_of
from magicdec.perfmodel.plan.choice import same_configuration
from magicdec.perfmodel.plan.request import Case, DraftOption
from magicdec.perfmodel.plan.search import Found
from magicdec.perfmodel.speedup import Prediction
from magicdec.schema import Candidate, MeasurementGain, OfTask, Outlook
from magicdec.specs import LOOKUP_METHODS, SELF

NUM_PAIRS = 128
"""Draws, each with its mirror image."""
ROWS_OF_DRAFT = 6
"""Configurations of a draft that are compared: its fastest."""
MEASURED_ERROR = 0.042
"""Relative error of tokens per step after some 200 logged requests, or ten minutes of a server: 90
% within a factor of 1.15."""
TUNED_ERROR = 0.03
"""Relative error of a speedup that a server was timed with and without its draft for."""
NEARLY_WORTH = 0.8
"""Share of the highest worth from which a measurement that takes less is made first."""
UNCLEAR = (0.1, 0.9)
"""Probabilities between which it is unclear whether a draft pays."""


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
    own = np.linalg.cholesky(half.T @ half / NUM_PAIRS)
    half = np.linalg.solve(own, half.T).T  # none is correlated with another
    return np.concatenate([half, -half])


@dataclass(frozen=True, kw_only=True)
class Compared:
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


class Drawn(NamedTuple):
    """Rates of configurations by draw, [draws, rows], and what they were drawn from."""

    rates: Array
    acceptance: Array
    """Standard deviations of each draft's acceptance: [draws, drafts]."""
    time: Array
    """Logarithm of the time factor of each configuration's step: [draws, rows]."""
    noise: Array
    """Standard deviations of a measurement's own error: [draws]."""

    def gain(self, place: int) -> Array:
        """Logarithm of a configuration's rate over that without a draft, by draw."""
        return np.log(self.rates[:, place] / self.rates[:, 0])


class Draws(NamedTuple):
    """Configurations that compete at one batch and layout, priced with the same draws."""

    compared: list[Compared]
    drawn: Drawn

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
        rates = self.drawn.rates
        return np.asarray(rates[:, place] / rates[:, place_of_other])

    def chance_ahead(self, row: Candidate, other: Candidate) -> float | None:
        """The probability that a configuration is faster than another; None: one was not drawn."""
        times = self.times_as_fast(row, other)
        return None if times is None else float((times > 1.0).mean())


def draws_of(case: Case, found: Iterable[Found], weighed: Candidate) -> Draws | None:
    """Draws of what competes with a row. None where no draft does."""
    compared = _compared(case, found, weighed)
    if len(compared) < 2:
        return None
    return Draws(compared, _drawn(compared))


def outlook(
    case: Case,
    draws: Draws,
    chosen: Candidate,
    weighed: Candidate,
    tasks: list[OfTask],
) -> Outlook:
    """The outlook of a choice; `weighed` is the draft that is chosen, or that was left out, and one
    of those drawn."""
    compared, drawn = draws
    place = draws.place(weighed)
    assert place is not None  # what is weighed was drawn
    alone = drawn.rates[:, 0]
    own = drawn.rates[:, place]
    if chosen.is_speculative:
        kept_share = own / alone
    else:
        kept_share = alone / own
    losses = 1.0 - kept_share[kept_share < 1.0]
    loss_if_wrong = 0.0
    if len(losses):
        loss_if_wrong = float(losses.mean())
    return Outlook(
        draft=weighed.draft,
        draft_method=weighed.draft_method,
        draft_budget=weighed.draft_budget,
        gamma=weighed.gamma,
        pays=weighed.gain.probability,
        is_best=float((own >= drawn.rates.max(axis=1)).mean()),
        loss_if_wrong=loss_if_wrong,
        measurements=_measurements(case, compared, drawn, place),
        tasks=tasks,
    )


def _compared(case: Case, found: Iterable[Found], weighed: Candidate) -> list[Compared]:
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
            Compared(
                option=option,
                rows=[of_draft.rows[place] for place in places],
                prediction=prediction,
                error=prediction.full(tokens_error(prediction, law)),
            )
        )
    if not compared or compared[0].option is not None:
        return []
    return compared


def _fastest(case: Case, of_draft: Found, weighed: Candidate) -> list[int]:
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


def _drawn(compared: Sequence[Compared]) -> Drawn:
    """The rates of all configurations under the same draws."""
    options = [_option(of_draft) for of_draft in compared[1:]]
    sources = _sources(compared)
    draws = normals(len(sources) + len(options) + 1)
    of_cost = dict(zip(sources, draws.T, strict=False))
    acceptance = draws[:, len(sources) : -1] @ _loadings(options).T
    alone = compared[0]
    time = _log_time(alone, of_cost)
    times = [time]
    rates = [alone.rates(np.exp(time))]
    for of_draft, sigmas in zip(compared[1:], acceptance.T, strict=True):
        time = _log_time(of_draft, of_cost)
        prediction = of_draft.prediction
        tokens = drawn_tokens(prediction, sigmas, of_draft.error)
        # over those expected: [draws, rows]
        more = tokens / prediction.full(prediction.expected_tokens_per_step)
        times.append(time)
        rates.append(of_draft.rates(np.exp(time) / more))
    return Drawn(
        rates=np.hstack(rates),
        acceptance=acceptance,
        time=np.hstack(times),
        noise=draws[:, -1],
    )


REPORTED = "reported"


def _engine_of(prediction: Prediction) -> str:
    """The engine's own error, which drafts of one lane share."""
    return f"engine: {evidence_of(prediction.setup).lane}"


def _sources(compared: Sequence[Compared]) -> list[str]:
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


def _log_time(of: Compared, draws: dict[str, Array]) -> Array:
    """Logarithm of the factor on each configuration's step, whose mean is 1: [draws, rows]."""
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
        own = prediction.full(shift)
        total += np.outer(draws[source], own) - own**2 / 2.0
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


# What measuring is worth
# ------------------------------------------------------------


class PossibleMeasurement(NamedTuple):
    """A measurement that could be made."""

    kind: Any
    drafts: list[str]
    command: str
    effort: str
    tells: Array
    """Values that the measurement would give, by draw."""


LOGS = "requests.jsonl"
SERVER = "http://localhost:8000"


def _measurements(
    case: Case,
    compared: Sequence[Compared],
    drawn: Drawn,
    place: int,
) -> list[MeasurementGain]:
    """Possible measurements. First comes the easiest one whose worth is close to the highest."""
    gain = drawn.gain(place)
    now = normal_cdf(np.array([gain.mean() / max(float(gain.std()), 1e-9)]))
    measurements = []
    for asked in _possible(case, compared, drawn, place):
        after = _chance_after(gain, asked.tells)
        measurements.append(
            MeasurementGain(
                kind=asked.kind,
                drafts=asked.drafts,
                command=asked.command,
                effort=asked.effort,
                worth=_worth(1.0 / drawn.rates, asked.tells),
                unclear_now=_share_unclear(now),
                unclear_after=_share_unclear(after),
            )
        )
    most = max(map(_worth_of, measurements), default=0.0)
    first = []
    others = []
    for measurement in measurements:
        if measurement.worth >= NEARLY_WORTH * most:
            first.append(measurement)
        else:
            others.append(measurement)
    others.sort(key=_worth_of, reverse=True)
    return [*first, *others]


def _worth_of(measurement: MeasurementGain) -> float:
    return measurement.worth


def _possible(
    case: Case, compared: Sequence[Compared], drawn: Drawn, place: int
) -> list[PossibleMeasurement]:
    """Possible measurements, the easiest first."""
    counted = [
        (_option(of_draft), _counted(of_draft, sigmas, drawn.noise))
        for of_draft, sigmas in zip(compared[1:], drawn.acceptance.T, strict=True)
    ]
    lookups = [
        (option, tells) for option, tells in counted if option.method in LOOKUP_METHODS
    ]
    others = [
        (option, tells)
        for option, tells in counted
        if option.method not in LOOKUP_METHODS
    ]
    asked = []
    if lookups:
        asked.append(_replay_lookups(lookups))
    for option, tells in counted:
        if option.model is not None and option.draft != SELF:
            asked.append(_replay_draft(option, tells))
    for option, tells in others:
        asked.append(_observe(case, option, tells))
    served = f"{SERVER} --model {case.model.name} --hardware {case.hardware.name}"
    error = TUNED_ERROR * drawn.noise
    # a server without a draft tells the step's cost, and nothing of acceptance
    step = drawn.time[:, place] - drawn.time[:, 0]
    calibrated = PossibleMeasurement(
        kind="calibrate",
        drafts=[],
        command=f"magicdec calibrate --server {served} -o local.engine.toml",
        effort="some minutes of an idle server without a draft",
        tells=(step + error)[:, None],
    )
    return [*asked, calibrated]


def _counted(of_draft: Compared, sigmas: Array, noise: Array) -> Array:
    """The acceptance that counting a draft's tokens would give, by draw, in standard deviations of
    what is known now."""
    known = max(float(of_draft.error[0]), MEASURED_ERROR)
    return sigmas + noise * MEASURED_ERROR / known


def _replay_lookups(
    lookups: Sequence[tuple[DraftOption, Array]],
) -> PossibleMeasurement:
    names = [option.draft for option, _ in lookups]
    tells = [values for _, values in lookups[:2]]
    return PossibleMeasurement(
        kind="replay",
        drafts=names,
        command=f"magicdec profile-acceptance --outputs {LOGS} --draft {','.join(names)}",
        effort="200 logged requests, a minute, no GPU",
        tells=np.stack(tells, axis=1),
    )


def _replay_draft(option: DraftOption, tells: Array) -> PossibleMeasurement:
    return PossibleMeasurement(
        kind="replay",
        drafts=[option.draft],
        command=f"magicdec profile-acceptance --outputs {LOGS} --draft path/to/{option.draft}",
        effort="200 logged requests, one pass of the draft over them",
        tells=tells[:, None],
    )


def _observe(case: Case, option: DraftOption, tells: Array) -> PossibleMeasurement:
    draft = f"--draft {option.draft}"
    if option.draft == SELF:
        draft += f" --draft-method {option.method}"
    command = (
        f"magicdec observe {SERVER} {draft} --model {case.model.name} --seconds 600"
    )
    return PossibleMeasurement(
        kind="observe",
        drafts=[option.draft],
        command=f"{command} -o acceptance.json",
        effort="10 minutes of a server that drafts with it",
        tells=tells[:, None],
    )


def _option(of: Compared) -> DraftOption:
    assert of.option is not None  # only drafts are measured
    return of.option


def _regressed(values: Array, tells: Array) -> Array:
    """Means of values given what a measurement tells, by draw."""
    # a cubic in what it tells: times are not linear in it
    scaled = tells / tells.std(axis=0)
    powers = [np.ones(len(scaled))]
    for column in scaled.T:
        powers += [column, column**2, column**3]
    if scaled.shape[1] > 1:
        product = scaled[:, 0] * scaled[:, 1]
        powers += [product, product * scaled[:, 0], product * scaled[:, 1]]
    terms = np.stack(powers, axis=1)
    solved = np.linalg.lstsq(terms, values, rcond=None)[0]
    return np.asarray(terms @ solved)


def _worth(times: Array, tells: Array) -> float:
    """How many times longer a token takes on average, less 1, if one chooses now rather than after a
    measurement."""
    now = float(times.mean(axis=0).min())
    after = float(_regressed(times, tells).min(axis=1).mean())
    return max(now / after - 1.0, 0.0)


def _chance_after(gain: Array, tells: Array) -> Array:
    """The probability that a draft pays after a measurement, by draw; `gain` is the logarithm."""
    mean = _regressed(gain, tells)
    left = float((gain - mean).std())
    return normal_cdf(mean / max(left, 1e-9))


def _share_unclear(chances: Array) -> float:
    low, high = UNCLEAR
    is_unclear = (chances > low) & (chances < high)
    return float(is_unclear.mean())
