"""The equations of acceptance, written out number by number."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance import (
    BelievedProfile,
    MeasuredProfile,
    RateProfile,
    believed,
    constant_profile,
    fit_profile,
)
from magicdec.perfmodel.acceptance import measured as measuring
from magicdec.perfmodel.acceptance.fit import MeasuredRates, measurements_from_rows
from magicdec.perfmodel.acceptance.law import (
    LONGEST,
    Beyond,
    Law,
    LawError,
    Runs,
    exact_normal_cdf,
    fit_runs,
    log_deviation,
    rejected_before,
    sequence_rates,
    tokens_at,
)
from magicdec.perfmodel.acceptance.measured import cells_of, rates_near
from magicdec.perfmodel.acceptance.profile import law_of_rates
from magicdec.perfmodel.acceptance.trained_length import Trained

rates = st.floats(0.05, 0.95)
LAWS = {
    "rejection": st.floats(0.01, 3.0),
    "budget_exponent": st.floats(0.0, 2.0),
    "context_exponent": st.floats(-1.0, 1.0),
    "fill_exponent": st.floats(0.0, 3.0),
    "reference_budget": st.floats(64.0, 1024.0),
    "reference_context": st.floats(1e3, 1e5),
    "flat_below": st.floats(0.0, 5e3),
    "flat_beyond": st.floats(6e3, 1e6),
    "floor": st.floats(0.0, 0.9),
    "concentration": st.none() | st.floats(0.1, 50.0),
    "drift": st.floats(0.0, 5.0),
    "drift_depth": st.floats(0.5, 20.0),
}


# The law


def plain_rates(
    law: dict[str, Any], budget: float, context: float, gamma: int
) -> list[float]:
    budget = min(budget, context)
    r = law["rejection"] * (budget / law["reference_budget"]) ** -law["budget_exponent"]
    r = min(r * (1.0 - budget / context) ** law["fill_exponent"], 1.0)
    counted = min(max(context, law["flat_below"]), law["flat_beyond"])
    g = (counted / law["reference_context"]) ** law["context_exponent"]
    grown = min(r * g * ((1.0 + r**8) / (1.0 + (r * g) ** 8)) ** 0.125, 1.0)
    alpha = 1.0 - (law["floor"] + (1.0 - law["floor"]) * grown)
    found = []
    for i in range(1, gamma + 1):
        k = law["concentration"]
        base = alpha if k is None else (alpha * k + i - 1.0) / (k + i - 1.0)
        drifted = 1.0 - math.exp(-(i - 1) / law["drift_depth"])
        found.append(base ** (1.0 + law["drift"] * drifted))
    return found


@given(
    law=st.fixed_dictionaries(LAWS),
    budget=st.floats(16.0, 1e5),
    context=st.floats(100.0, 2e6),
)
def test_rates_are_those_of_the_equations(
    law: dict[str, Any], budget: float, context: float
) -> None:
    found = Law(**law).conditional_rates(budget=budget, context=context, gamma_max=7)
    assert found == pytest.approx(plain_rates(law, budget, context, 7), abs=1e-9)


def test_a_law_is_its_rejection_at_512_tokens_of_8192() -> None:
    """Files leave the usual reference out, so that another one would change what they mean."""
    law = Law(rejection=0.2, budget_exponent=1.5, context_exponent=0.7)
    assert law.first_rate(budget=512, context=8192) == 0.8
    error = LawError(log_rejection=0.1, budget_exponent=1.0, context_exponent=1.0)
    assert error.deviation(law, budget=512, context=8192, gamma_max=1) == [0.1]
    drifting = Law(rejection=0.2, drift=1.0).rates_after(0.8, 3)
    expected = [0.8 ** (2.0 - math.exp(-place / 2.0)) for place in range(3)]
    assert drifting == pytest.approx(expected)


@given(first=st.floats(1e-4, 0.9999), growth=st.floats(0.2, 5.0))
def test_a_growth_is_undone(first: float, growth: float) -> None:
    law = Law(rejection=first, context_exponent=1.0, reference_context=1e4)
    at = {"budget": 64, "context": 1e4 * growth}
    grown = 1.0 - float(law.first_rate(**at))
    assume(grown < 1.0 - 1e-6)
    assert rejected_before(grown, growth) == pytest.approx(first, rel=1e-6)


given_rates = st.lists(st.sampled_from([0.0, 1.0]) | rates, min_size=2, max_size=6)


@given(
    of_law=given_rates,
    first=st.sampled_from([0.0, 1.0]) | rates,
    gamma=st.integers(1, 9),
)
def test_given_rates_move_by_one_power(
    of_law: list[float], first: float, gamma: int
) -> None:
    """Also from and to sure ones, which are taken as 1e-12 away; from a first rate of 0, of which every power is 0,
    by one factor of rejections. The first rate is met either way, but where all are accepted."""
    law = law_of_rates(of_law)
    given_of = [*of_law, *[of_law[-1]] * gamma][:gamma]
    assert law.conditional_rates(budget=1, context=9, gamma_max=gamma) == pytest.approx(
        given_of, abs=1e-9
    )
    near, wanted = (min(max(rate, 1e-12), 1.0 - 1e-12) for rate in (of_law[0], first))
    if of_law[0] == 0.0:
        expected = [1.0 - (1.0 - first) * (1.0 - rate) for rate in given_of]
    else:
        power = math.log(wanted) / math.log(near)
        expected = [rate**power for rate in given_of]
    found = law.rates_after(first, gamma)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-12)
    assert of_law[0] == 1.0 or found[0] == pytest.approx(first, abs=1e-9)
    if 0.0 < first < 1.0 and of_law[0] < 1.0:
        profile = RateProfile(model="m", draft_method="eagle", law=law)
        moved = profile.at_rate(first, budget=1, context=9)
        rates_there = moved.conditional_rates(budget=1, context=9, gamma_max=gamma)
        assert rates_there == pytest.approx(found, rel=1e-6, abs=1e-9)


@given(
    error=st.tuples(*[st.floats(0.0, 3.0)] * 4),
    budget=st.floats(1.0, 1e5),
    context=st.floats(10.0, 1e6),
    flat_below=st.floats(0.0, 1e4),
)
def test_a_laws_error_grows_with_the_distance(
    error: tuple[float, ...], budget: float, context: float, flat_below: float
) -> None:
    law = Law(
        rejection=0.2,
        reference_budget=300.0,
        reference_context=5e3,
        flat_below=flat_below,
    )
    level, of_budget, of_context, depth = error
    found = LawError(
        log_rejection=level,
        budget_exponent=of_budget,
        context_exponent=of_context,
        depth=depth,
    ).deviation(law, budget=budget, context=context, gamma_max=4)
    away = math.log(min(budget, context) / 300.0)
    longer = math.log(max(context, flat_below) / 5e3)
    for place, value in enumerate(found):
        parts = (
            level,
            of_budget * away,
            of_context * longer,
            depth * math.log(place + 1),
        )
        assert value == pytest.approx(math.hypot(*parts))


BOUNDS = [
    ("rejection", 0.0, 1e3),
    ("budget_exponent", 0.0, 50.0),
    ("fill_exponent", 0.0, 50.0),
    ("drift", 0.0, 50.0),
    ("context_exponent", -5.0, 5.0),
    ("reference_budget", 1e-3, 1e15),
    ("reference_context", 1e-3, 1e15),
    ("drift_depth", 1e-3, 1e15),
    ("flat_below", 0.0, 1e15),
    ("flat_beyond", 1.0, 1e15),
    ("floor", 0.0, 1.0),
    ("concentration", 1e-3, 1e12),
]


@pytest.mark.parametrize(("name", "low", "high"), BOUNDS)
def test_constants_of_a_law_have_bounds(name: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(Law(**{"rejection": 0.1, name: value}), name) == value
    for value in (math.nextafter(low, -1e9), math.nextafter(high, 1e30), math.nan):
        with pytest.raises(ValueError, match=name):
            Law(**{"rejection": 0.1, name: value})


def test_errors_and_positions_have_bounds() -> None:
    for name in LawError.__struct_fields__:
        for value in (0.0, 50.0):
            assert getattr(LawError(**{name: value}), name) == value
        for value in (-1e-9, math.nextafter(50.0, 99.0)):
            with pytest.raises(ValueError, match=name):
                LawError(**{name: value})
    assert len(Law(rejection=0.1, by_position=[0.5] * 64).by_position) == 64
    with pytest.raises(ValueError, match="at most 64"):
        Law(rejection=0.1, by_position=[0.5] * 65)
    with pytest.raises(ValueError, match="flat_beyond"):
        Law(rejection=0.1, flat_below=10.0, flat_beyond=9.0)


# Runs


def plain_runs(logit: float, log_k: float) -> list[float]:
    a, k = 1.0 / (1.0 + math.exp(-logit)), math.exp(log_k)
    longer = [1.0]
    for i in range(1, LONGEST):
        longer.append(longer[-1] * (a * k + i - 1.0) / (k + i - 1.0))
    return longer


def plain_tokens(longer: list[float], gamma: int) -> tuple[float, float]:
    """Tokens of a run over its steps, and the share of steps that accept all drafts."""
    steps = sum(longer[:: gamma + 1])
    return sum(longer) / steps, sum(longer[gamma :: gamma + 1]) / steps


def runs_of(
    logit: float, log_k: float, covariance: Any = ((0.04, 0.01), (0.01, 0.09))
) -> Runs:
    return Runs(x=np.array([logit, log_k]), covariance=np.array(covariance), counted=3)


@given(
    logit=st.floats(-3.0, 2.0),
    log_k=st.floats(-1.0, 5.0),
    shifts=st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=2),
)
def test_runs_are_gone_through_in_steps(
    logit: float, log_k: float, shifts: list[float]
) -> None:
    """Arrays of gammas and of shifts broadcast."""
    gammas = [0, 5, 2]
    found, whole = runs_of(logit, log_k).tokens_per_step(
        np.array(gammas), shift=np.array(shifts)[:, None]
    )
    for row, shift in enumerate(shifts):
        longer = plain_runs(logit + shift, log_k)
        for column, gamma in enumerate(gammas):
            expected = plain_tokens(longer, gamma)
            assert (found[row, column], whole[row, column]) == pytest.approx(expected)


@pytest.mark.parametrize(("gamma", "over"), [(1, 3), (6, 3), (3, 3), (8, 2)])
def test_an_error_of_another_gamma_is_that_of_runs_and_of_their_shape(
    gamma: int, over: int
) -> None:
    """By finite differences of the equations, at runs of 0.7 and k of 4."""
    x = (math.log(0.7 / 0.3), math.log(4.0))

    def ratio(logit: float, log_k: float) -> float:
        longer = plain_runs(logit, log_k)
        return math.log(plain_tokens(longer, gamma)[0] / plain_tokens(longer, over)[0])

    h = 1e-5
    by_rate = (ratio(x[0] + h, x[1]) - ratio(x[0] - h, x[1])) / (2 * h)
    by_shape = (ratio(x[0], x[1] + h) - ratio(x[0], x[1] - h)) / (2 * h)
    variance = 0.04 * by_rate**2 + 0.02 * by_rate * by_shape + 0.09 * by_shape**2
    variance += (0.3 * ratio(*x)) ** 2
    assert float(runs_of(*x).log_ratio_error(gamma, over)) == pytest.approx(
        math.sqrt(variance), rel=1e-4, abs=1e-12
    )


@pytest.mark.parametrize("gamma", [2, 3, 5])
@pytest.mark.parametrize(("a", "k"), [(0.5, 3.0), (0.8, 12.0)])
def test_runs_are_found_from_their_rates(a: float, k: float, gamma: int) -> None:
    """Rates by position that are known to 0.1 %: the rates of position 1 and the tokens of other gammas are met."""
    longer = plain_runs(math.log(a / (1.0 - a)), math.log(k))
    steps = sum(longer[:: gamma + 1])
    survivors = [sum(longer[i :: gamma + 1]) / steps for i in range(gamma + 1)]
    of_position = tuple(survivors[i + 1] / survivors[i] for i in range(gamma))
    found = fit_runs(of_position, (1e-4,) * gamma)
    assert found is not None
    assert found.counted == gamma
    for other in (1, gamma, 8):
        expected = plain_tokens(longer, other)
        assert found.tokens_per_step(other) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    "flat", [(0.7,), (0.7, 0.7), (0.7, 0.6), (0.0, 0.5), (1.0, 1.0), (0.7, 0.9, 0.7)]
)
def test_rates_that_do_not_rise_are_no_runs(flat: tuple[float, ...]) -> None:
    assert fit_runs(flat, (0.01,) * len(flat)) is None


# Distributions


@given(mean=st.floats(0.1, 0.9), spread=st.floats(0.01, 0.15))
def test_rates_of_sequences_have_their_mean_and_spread(
    mean: float, spread: float
) -> None:
    """Where a Beta variable of that width has no pole."""
    total = mean * (1.0 - mean) / spread**2 - 1.0
    assume(min(mean, 1.0 - mean) * total > 1.5)
    nodes, weights = sequence_rates(mean, spread)
    assert np.all((nodes > 0.0) & (nodes < 1.0))
    assert weights.sum() == pytest.approx(1.0)
    assert weights @ nodes == pytest.approx(mean, abs=2e-4)
    assert np.sqrt(weights @ (nodes - mean) ** 2) == pytest.approx(spread, rel=0.01)


def test_sequences_that_are_all_alike_are_one() -> None:
    for mean, spread in ((0.4, 0.0), (0.0, 0.3), (1.0, 0.3)):
        nodes, weights = sequence_rates(mean, spread)
        assert (nodes.tolist(), weights.tolist()) == ([mean], [1.0])
    nodes, weights = sequence_rates(0.5, 1.0)  # no variable is as wide
    assert weights @ nodes == pytest.approx(0.5)
    assert 0.4 < np.sqrt(weights @ (nodes - 0.5) ** 2) < 0.5


def test_a_normal_variables_distribution() -> None:
    sigmas = np.array([-40.0, -9.0, -8.9, -3.0, -1e-9, 0.0, 0.5, 8.9, 9.0, 40.0])
    expected = [NormalDist().cdf(sigma) for sigma in sigmas]
    assert exact_normal_cdf(sigmas) == pytest.approx(expected, rel=1e-9, abs=1e-18)
    assert exact_normal_cdf(np.array([-8.5]))[0] == pytest.approx(
        NormalDist().cdf(-8.5), rel=1e-6
    )


uncertain = {
    "share": st.floats(0.02, 0.98),
    "gamma": st.integers(1, 16),
    "error": st.floats(0.005, 0.2),
}


@given(**uncertain)
def test_tokens_that_are_not_known_are_normal_on_the_logit_of_their_share(
    share: float, gamma: int, error: float
) -> None:
    """The error is their slope at the middle; none is below 1 or above gamma + 1."""
    middle = 1.0 + share * gamma
    sigmas = np.array([-2.0, -1e-5, 0.0, 1e-5, 1.0, 2.0, 4.0])
    found = tokens_at(sigmas, middle, gamma, error)
    assert found[2] == pytest.approx(middle)
    logits = np.log((found - 1.0) / (gamma + 1.0 - found))
    width = logits[4] - logits[2]
    assert logits - logits[2] == pytest.approx(width * sigmas, abs=1e-6)
    if width < 2.99:
        assert (found[3] - found[1]) / 2e-5 == pytest.approx(middle * error, rel=1e-3)
    else:
        assert width == pytest.approx(3.0)
    for gamma_or_error in (
        {"gamma": 0, "relative_error": error},
        {"gamma": gamma, "relative_error": 0.0},
    ):
        assert tokens_at(1.0, middle, **gamma_or_error) == middle


# Counts


def logit(rate: float) -> float:
    return math.log(rate / (1.0 - rate))


def table(
    budget: float,
    context: float,
    of: list[float],
    trials: list[float],
    stderr: list[float] | None = None,
) -> MeasuredRates:
    errors = stderr or [1e-6] * len(of)
    return MeasuredRates(
        budget=budget, context=context, rates=of, stderr=errors, trials=trials
    )


@given(rate=rates, law=rates, trials=st.floats(1.0, 1e4), stderr=st.floats(1e-3, 0.5))
def test_a_cell_weighs_its_trials_and_the_law_one(
    rate: float, law: float, trials: float, stderr: float
) -> None:
    """Fewer trials where sequences differ: as many as would have the error."""
    smooth = (rate * trials + 0.5) / (trials + 1.0)
    n = min(trials, smooth * (1.0 - smooth) / stderr**2)
    posterior = (n * rate + law) / (n + 1.0)
    measured = [table(100.0, 1e3, [rate], [trials], [stderr])]
    (cell,) = cells_of(measured, law_of_rates([law]))
    assert cell.shift[0] == pytest.approx(logit(posterior) - logit(law), abs=1e-9)
    deviation = math.sqrt(posterior * (1.0 - posterior) / (n + 2.0))
    assert cell.deviation[0] == pytest.approx(
        deviation / (posterior * -math.log(posterior))
    )


@given(
    data=st.lists(
        st.lists(st.tuples(rates, st.floats(10.0, 1e3)), min_size=3, max_size=3),
        min_size=3,
        max_size=5,
    ),
    law=rates,
)
def test_the_law_weighs_what_scatter_beyond_the_counts_leaves_it(
    data: list[list[tuple[float, float]]], law: float
) -> None:
    """κ by moments: the scatter over its degrees of freedom is 1 + mean trials / (κ + 1)."""
    measured = [
        table(
            100.0 * place, 1e4, [rate for rate, _ in row], [trials for _, trials in row]
        )
        for place, row in enumerate(data, 1)
    ]
    number = 3 * len(data)
    scatter = sum(
        n * (rate - law) ** 2 / (law * (1.0 - law)) for row in data for rate, n in row
    )
    per_rate = scatter / (number - measuring.NUM_FREE)
    mean_trials = sum(n for row in data for _, n in row) / number
    found = measuring._trials_of_law(measured, law_of_rates([law]))
    if number <= measuring.NUM_FREE:
        assert found == 1.0
    elif per_rate <= 1.0:
        assert found == 1e9
    else:
        expected = mean_trials / (per_rate - 1.0) - 1.0
        assert found == pytest.approx(min(max(expected, 1.0), 1e9))


@given(
    cells=st.lists(
        st.tuples(st.floats(64.0, 1e3), st.floats(2e3, 1e5), rates, rates),
        min_size=1,
        max_size=4,
        unique_by=(
            lambda cell: round(math.log(cell[0]), 1),
            lambda cell: round(math.log(cell[1]), 1),
        ),
    ),
    budget=st.floats(64.0, 1e4),
    context=st.floats(500.0, 2e5),
    law=rates,
)
def test_rates_between_cells_are_weighed_by_the_inverse_square_of_their_distance(
    cells: list[tuple[float, float, float, float]],
    budget: float,
    context: float,
    law: float,
) -> None:
    """In logarithms of budget and context; deviations too. The last position holds beyond it."""
    measured = [
        table(b, s, [first, second], [1e6, 1e6]) for b, s, first, second in cells
    ]
    of_law = law_of_rates([law])
    known = cells_of(measured, of_law)
    found, deviation = rates_near(
        known,
        of_law.conditional_rates(budget=budget, context=context, gamma_max=4),
        budget=budget,
        context=context,
    )
    near = [
        1.0
        / max(
            math.log(min(budget, context) / b) ** 2 + math.log(context / s) ** 2, 1e-9
        )
        for b, s, *_ in cells
    ]
    for position in range(4):
        place = min(position, 1)
        moved = sum(w * cell.shift[place] for w, cell in zip(near, known, strict=True))
        expected = logit(law) + moved / sum(near)
        assert logit(found[position]) == pytest.approx(expected, abs=1e-6)
        width = sum(
            w * cell.deviation[place] for w, cell in zip(near, known, strict=True)
        )
        assert deviation[position] == pytest.approx(width / sum(near))
    at = {"budget": cells[0][0], "context": cells[0][1]}
    own, _ = rates_near(known, of_law.conditional_rates(**at, gamma_max=2), **at)
    assert own == pytest.approx(cells[0][2:], abs=2e-3)


@given(
    rate=rates,
    last=st.integers(1, 5),
    slope=st.sampled_from([0.0, -0.4, 0.3]),
    error=st.floats(0.0, 1.0),
    variance=st.floats(0.0, 1.0),
)
def test_beyond_the_last_position_the_logit_goes_on_with_its_logarithm(
    rate: float, last: int, slope: float, error: float, variance: float
) -> None:
    beyond = Beyond(position=last, slope=slope, error=error)
    found, deviation = beyond.continued(np.full(8, rate), np.full(8, variance))
    for place in range(8):
        octaves = max(math.log((place + 1) / last), 0.0)
        expected = 1.0 / (1.0 + math.exp(-(logit(rate) + slope * octaves)))
        assert found[place] == pytest.approx(expected)
        of_logit = (1.0 - expected) / -math.log(expected)
        assert deviation[place] == pytest.approx(
            math.hypot(math.sqrt(variance), error * octaves * of_logit)
        )


@given(rate=rates, level=st.floats(0.0, 1.0), error=st.floats(0.0, 1.0))
def test_beyond_given_rates_the_slopes_error_joins_the_rates_own(
    rate: float, level: float, error: float
) -> None:
    profile = RateProfile(
        model="m",
        draft_method="constant",
        law=law_of_rates([rate]),
        error=LawError(log_rejection=level),
        beyond=Beyond(position=2, error=error),
    )
    at: dict[str, Any] = {"budget": 9.0, "context": 99.0, "gamma_max": 5}
    above = profile.conditional_rates(**at, num_sigma=1.0)
    of_logit = (1.0 - rate) / -math.log(rate)
    for place, value in enumerate(above):
        octaves = max(math.log((place + 1) / 2), 0.0)
        deviation = math.hypot(level, error * octaves * of_logit)
        assert value == pytest.approx(rate ** math.exp(-deviation))


@given(rates)
def test_a_logits_error_is_carried_to_the_logarithm_of_the_logarithm(
    rate: float,
) -> None:
    h = 1e-6
    up, down = (
        math.log(-math.log(1.0 / (1.0 + math.exp(-(logit(rate) + sign * h)))))
        for sign in (1, -1)
    )
    assert log_deviation(rate) == pytest.approx(abs(up - down) / (2 * h), rel=1e-4)


@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_bad_measurement_is_named_by_its_number(place: int) -> None:
    good = {
        "draft_method": "snapkv",
        "budget": 9,
        "context": 99,
        "position": 1,
        "trials": 20,
        "accepted": 17,
    }
    rows: list[Any] = [good, good, good]
    rows[place - 1] = good | {"accepted": 21}
    with pytest.raises(ConfigError, match=f"measurement {place}: "):
        measurements_from_rows(rows)


# Profiles


@given(
    given_rates=st.lists(rates, min_size=1, max_size=3),
    error=st.floats(0.0, 1.0),
    gamma=st.integers(1, 5),
)
def test_an_error_of_tokens_is_half_of_what_one_deviation_of_the_rates_makes(
    given_rates: list[float], error: float, gamma: int
) -> None:
    """And a shift's beside it."""
    profile = MeasuredProfile(
        model="m",
        draft_method="snapkv",
        law=law_of_rates(given_rates),
        error=LawError(log_rejection=error),
    )
    padded = [*given_rates, *[given_rates[-1]] * gamma][:gamma]

    def tokens(power: float, shift: float = 0.0) -> float:
        moved = [min(max(rate**power + shift, 0.0), 1.0) for rate in padded]
        return 1.0 + sum(math.prod(moved[: n + 1]) for n in range(gamma))

    def half(low: float, high: float) -> float:
        return (high - low) / (high + low)

    at = {"budget": 64, "context": 999, "gamma": gamma}
    own = half(tokens(math.exp(error)), tokens(math.exp(-error)))
    assert profile.tokens_error(**at) == pytest.approx(own, abs=1e-12)
    both = math.hypot(own, half(tokens(1.0, -0.03), tokens(1.0, 0.03)))
    assert profile.tokens_error(**at, shifts=[0.03, 0.0]) == pytest.approx(both)


@given(
    given_rates=st.lists(rates, min_size=1, max_size=3),
    error=st.floats(0.0, 1.0),
    gamma=st.integers(0, 5),
    over=st.integers(0, 5),
    shift=st.floats(0.0, 0.1),
)
def test_an_error_of_one_gamma_over_another_leaves_out_what_both_share(
    given_rates: list[float], error: float, gamma: int, over: int, shift: float
) -> None:
    common: dict[str, Any] = {
        "model": "m",
        "draft_method": "snapkv",
        "law": law_of_rates(given_rates),
        "error": LawError(log_rejection=error),
    }
    padded = [*given_rates, *[given_rates[-1]] * 5][:5]

    def ratio(power: float, by: float = 0.0) -> float:
        moved = [min(max(rate**power + by, 0.0), 1.0) for rate in padded]
        one, other = (
            1.0 + sum(math.prod(moved[: n + 1]) for n in range(depth))
            for depth in (gamma, over)
        )
        return math.log(one / other)

    at: dict[str, Any] = {"budget": 64, "context": 999}
    own = (ratio(math.exp(-error)) - ratio(math.exp(error))) / 2.0
    moved = (ratio(1.0, shift) - ratio(1.0, -shift)) / 2.0
    for profile in (MeasuredProfile(**common), BelievedProfile(**common)):
        found = profile.ratio_error(gamma, over, **at)
        assert found == pytest.approx(abs(own), abs=1e-9)
        found = profile.ratio_error(gamma, over, **at, shift=shift)
        assert found == pytest.approx(math.hypot(own, moved), abs=1e-9)


def test_a_profiles_spread_and_carried_error_have_bounds() -> None:
    """No rate between 0 and 1 spreads by more than a half."""
    common: dict[str, Any] = {
        "model": "m",
        "draft_method": "eagle",
        "law": law_of_rates([0.5]),
    }
    for name, high in (("spread", 0.5), ("carried_error", 10.0)):
        for value in (0.0, high):
            found = MeasuredProfile(**common, **{name: value})
            assert getattr(found, name) == value
        for value in (-1e-9, math.nextafter(high, 99.0), math.nan):
            with pytest.raises(ValueError, match=name):
                MeasuredProfile(**common, **{name: value})
    for version in (0, 2):
        with pytest.raises(ValueError, match="reads 1"):
            MeasuredProfile(**common, schema_version=version)
    for rates_given in ([0.0] * 64, [1.0] * 64, 0.0, 1.0):
        constant_profile(rates_given)
    for refused in ([0.5] * 65, [], [0.5, math.nextafter(1.0, 2.0)], -1e-9):
        with pytest.raises(ConfigError):
            constant_profile(refused)


@given(
    measured=st.none() | st.integers(1, 9),
    most=st.none() | st.integers(1, 9),
    is_counted=st.booleans(),
)
def test_a_plan_goes_as_deep_as_was_measured_unless_it_was_counted_by_position(
    measured: int | None, most: int | None, is_counted: bool
) -> None:
    """And never beyond what the draft proposes."""
    profile = MeasuredProfile(
        model="m",
        draft_method="eagle",
        law=law_of_rates([0.5]),
        measured_gamma=measured,
        most_drafts=most,
        measured=[table(64.0, 999.0, [0.5], [9.0])] if is_counted else [],
    )
    allowed = [
        gamma
        for gamma in range(1, 30)
        if (most is None or gamma <= most)
        and (is_counted or measured is None or gamma <= measured)
    ]
    assert (profile.max_gamma or 29) == max(allowed)


@pytest.mark.parametrize("method", ["eagle3", "eagle", "mtp", "full", "ngram"])
@pytest.mark.parametrize("exponent", [0.0, 0.2])
@pytest.mark.parametrize("start", [0.0, 2047.6])
@pytest.mark.parametrize("window", [None, 4096.0])
def test_a_heads_trained_length_is_where_it_begins_to_accept_less(
    method: str, exponent: float, start: float, window: float | None
) -> None:
    law = Law(
        rejection=0.3,
        context_exponent=exponent,
        flat_below=start,
        **({} if window is None else {"flat_beyond": window}),
    )
    found = MeasuredProfile(model="m", draft_method=method, law=law).trained_len
    falls = exponent > 0.0 and start > 0.0 and window is None
    assert found == (2048 if falls and method in ("eagle3", "eagle") else None)


@given(rate=rates, error=st.floats(0.01, 0.5), gamma=st.integers(1, 8))
def test_a_believed_look_up_drafts_twice_what_is_accepted(
    rate: float, error: float, gamma: int
) -> None:
    """On average, as far as every step may; other drafts propose at each step."""
    made: dict[str, Any] = {
        "model": "m",
        "law": law_of_rates([rate]),
        "error": LawError(log_rejection=error),
    }
    lookup = BelievedProfile(draft_method="ngram", **made)
    at: dict[str, Any] = {"budget": None, "context": 1.0, "gamma": gamma}
    tokens, _ = lookup.tokens_per_step(**at)
    assert lookup.drafted_share_at(gamma) == pytest.approx(
        min((float(tokens) - 1.0) / (0.5 * gamma), 1.0)
    )
    assert BelievedProfile(draft_method="eagle", **made).drafted_share_at(gamma) == 1.0


@pytest.mark.parametrize(
    ("accepted", "tried"), [(0.0, 5000.0), (1.0, 5.0), (2500.0, 5000.0)]
)
def test_a_network_that_accepts_nothing_has_a_fault_and_a_look_up_has_not(
    accepted: float, tried: float
) -> None:
    tables = [table(64.0, 999.0, [accepted / tried], [tried / 2.0]) for _ in range(2)]
    common: dict[str, Any] = {"model": "m", "law": law_of_rates([0.5])}
    for method in ("eagle", "ngram", "suffix"):
        found = MeasuredProfile(draft_method=method, measured=tables, **common)
        is_faulty = method == "eagle" and accepted == 0.0
        assert found.accepts_nothing == is_faulty
        assert bool(found.fault) == is_faulty
        if is_faulty:
            assert "none of 5000 drafts" in found.fault
        assert not MeasuredProfile(draft_method=method, **common).accepts_nothing


@pytest.mark.parametrize("accepted", [0.0, 2.0, 20.0, 400.0])
def test_a_fault_is_told_by_the_first_draft_whatever_later_ones_were_counted(
    accepted: float,
) -> None:
    """Of all settings together."""
    first = table(64.0, 999.0, [accepted / 5000], [5000.0])
    deeper = table(64.0, 999.0, [accepted / 5000, 0.5], [5000.0, 40.0])
    common: dict[str, Any] = {
        "model": "m",
        "draft_method": "eagle",
        "law": law_of_rates([0.5]),
    }
    one, two = (
        MeasuredProfile(measured=[each, first], **common) for each in (first, deeper)
    )
    assert one.fault == two.fault
    assert bool(one.fault) == (accepted / 5000 < 0.005)
    if 0.0 < accepted < 25.0:
        assert f"{2 * accepted:g} of 10000" in one.fault


@given(first=rates, second=rates, gamma=st.integers(1, 8))
def test_counted_runs_meet_the_counts_at_their_own_gamma(
    first: float, second: float, gamma: int
) -> None:
    """Elsewhere they tell how what is gained changes."""
    assume(second > first + 0.02)
    counts = table(64.0, 999.0, [first, second], [1e6, 1e6], [1e-3, 1e-3])
    profile = MeasuredProfile(
        model="m",
        draft_method="eagle",
        law=law_of_rates([first, second]),
        measured=[counts],
    )
    runs = profile.runs
    assert runs is not None
    at: dict[str, Any] = {"budget": 64.0, "context": 999.0}
    found, _ = profile.tokens_per_step(**at, gamma=np.array([gamma, 2]))
    assert found[1] == pytest.approx(1.0 + first + first * second, rel=1e-4)
    of_runs, _ = runs.tokens_per_step(np.array([gamma, 2]))
    gains = (of_runs - 1.0) / (of_runs[1] - 1.0)
    assert found[0] - 1.0 == pytest.approx((found[1] - 1.0) * gains[0], rel=1e-3)
    two = MeasuredProfile(
        model="m", draft_method="eagle", law=profile.law, measured=[counts, counts]
    )
    assert two.runs is None


@pytest.mark.parametrize(
    ("error", "is_taken"), [(0.0, True), (10.0, True), (-0.01, False), (10.01, False)]
)
def test_the_error_of_a_carried_profile_has_bounds(
    error: float, is_taken: bool
) -> None:
    def made() -> MeasuredProfile:
        law = Law(rejection=0.2)
        return MeasuredProfile(
            model="m", draft_method="eagle", law=law, carried_error=error
        )

    if is_taken:
        assert made().carried_error == error
        return
    with pytest.raises(ValueError, match="'carried_error' must be between 0 and 10"):
        made()


def test_a_rate_of_its_own_leaves_the_law_no_error_of_level() -> None:
    profile = MeasuredProfile(
        model="m",
        draft_method="streamingllm",
        law=Law(rejection=0.2, budget_exponent=0.4),
        error=LawError(
            log_rejection=0.3, budget_exponent=0.2, context_exponent=0.1, depth=0.5
        ),
    )
    moved = profile.at_rate(0.7, budget=200, context=4096)
    assert moved.error == LawError(budget_exponent=0.2, context_exponent=0.1, depth=0.5)
    for rate in (0.0, 1.0):
        sure = profile.at_rate(rate, budget=200, context=4096)
        assert sure == constant_profile(
            rate, model="m", draft=profile.draft, draft_method="streamingllm"
        )


# Mixtures


@given(
    texts=st.lists(
        st.tuples(st.floats(0.05, 1.0), rates, rates), min_size=2, max_size=4
    ),
    gamma=st.integers(1, 4),
)
def test_a_batch_of_texts_accepts_as_its_sequences_do(
    texts: list[tuple[float, float, float]], gamma: int
) -> None:
    """Shares of tokens over tokens per step are shares of sequences; tokens per step are their harmonic mean."""
    total = sum(share for share, *_ in texts)
    shares = np.array([share / total for share, *_ in texts])
    of_text = [np.array([first] + [second] * 15) for _, first, second in texts]
    weights, tokens = believed._weights_of_texts(shares, of_text)
    depth = believed.USUAL_GAMMA
    by_hand = [
        1.0 + sum(math.prod(each[: n + 1]) for n in range(depth)) for each in of_text
    ]
    assert tokens == pytest.approx(by_hand)
    slots = [share / each for share, each in zip(shares, by_hand, strict=True)]
    assert weights == pytest.approx([slot / sum(slots) for slot in slots])
    of_mix = believed._rates_of_mixture(weights, of_text)
    survivor = sum(
        w * math.prod(each[:gamma]) for w, each in zip(weights, of_text, strict=True)
    )
    assert math.prod(of_mix[:gamma]) == pytest.approx(survivor)
    whole = 1.0 + sum(math.prod(of_mix[: n + 1]) for n in range(depth))
    assert whole == pytest.approx(1.0 / sum(slots))


# Beliefs


@given(
    levels=st.lists(st.floats(-3.0, 3.0), min_size=9, max_size=9),
    roots=st.lists(st.floats(-1.0, 1.0), min_size=81, max_size=81),
)
def test_one_of_several_drafts_is_a_mixture(
    levels: list[float], roots: list[float]
) -> None:
    """Its second moments are the mean of theirs."""
    root = np.array(roots).reshape(9, 9)
    mean, covariance = np.array(levels), root @ root.T
    middle, found = believed._mixed(mean, covariance, 3)
    moments = np.zeros((3, 3))
    for n in range(3):
        own = slice(3 * n, 3 * n + 3)
        moments += (covariance[own, own] + np.outer(mean[own], mean[own])) / 3.0
    assert middle == pytest.approx((mean[:3] + mean[3:6] + mean[6:]) / 3.0, abs=1e-12)
    assert found + np.outer(middle, middle) == pytest.approx(moments, abs=1e-9)


@given(
    logits=st.lists(st.floats(-4.0, 4.0), min_size=1, max_size=5),
    variance=st.lists(st.floats(0.0, 1.0), min_size=5, max_size=5),
    kind=st.sampled_from(["eagle3", "ngram", "mtp"]),
)
def test_a_slope_is_that_of_a_line_through_the_rates_and_what_is_believed(
    logits: list[float], variance: list[float], kind: str
) -> None:
    """Least squares over level and slope, with the belief as one more observation of the slope."""
    question = believed.Question("no such model", kind, 8.0)
    number = len(logits)
    depths = believed._depths(number)
    assert depths == pytest.approx(
        [math.log(n + 1) - believed.REFERENCE_DEPTH for n in range(number)]
    )
    slope, error = believed._believed_slope(question)
    weights = [1.0 / math.sqrt(each + 0.01) for each in variance[:number]]
    rows = [[w, w * depth] for w, depth in zip(weights, depths, strict=True)]
    rows.append([0.0, 1.0 / error])
    wanted = [w * each for w, each in zip(weights, logits, strict=True)]
    wanted.append(slope / error)
    solved, *_ = np.linalg.lstsq(np.array(rows), np.array(wanted), rcond=None)
    inverse = np.linalg.inv(np.array(rows).T @ np.array(rows))
    found = believed._slope(
        depths, np.array(logits), np.array(variance[:number]), question
    )
    assert found == pytest.approx(
        (solved[1], math.sqrt(inverse[1, 1])), rel=1e-6, abs=1e-9
    )


@pytest.mark.parametrize(
    ("kind", "trained_len", "anchor"),
    [
        ("ngram", None, 777.0),
        ("suffix", 3000, 777.0),
        ("eagle3", None, 2048.0),
        ("eagle3", 3000, 3000.0),
        ("full", 3000, 4096.0),
        ("streamingllm", None, believed.belief.CONTEXT_START["self"]),
    ],
)
def test_a_law_is_anchored_where_acceptance_begins_to_hang_on_the_context(
    kind: str, trained_len: int | None, anchor: float
) -> None:
    """Up to there every context is alike but to a draft over a part of the cache; a look-up's is as it is
    asked for."""
    question = believed.Question(
        "no such model", kind, 8.0, context=777.0, trained=Trained(trained_len)
    )
    assert believed._anchor(question) == anchor
    law = believed.assumed(question).law
    assert law.reference_context == anchor
    if kind == "streamingllm":
        assert law.flat_below == 0.0 < law.context_exponent
        return
    for context in (anchor / 4.0, anchor):
        at = law.conditional_rates(budget=None, context=context, gamma_max=4)
        assert at == pytest.approx(law.by_position[:4], abs=1e-4)
    if kind in ("ngram", "suffix"):
        assert law.context_exponent == law.flat_below == 0.0
    else:
        assert law.flat_below == anchor


def test_a_deviation_by_medians_is_that_of_a_normal_variable() -> None:
    """Of 99 slopes at its quantiles; of a group with too few the networks' are taken together."""
    quantiles = [NormalDist(-0.2, 0.3).inv_cdf(n / 100) for n in range(1, 100)]
    slopes = {
        "head": quantiles[::2],
        "mtp": quantiles[1::2],
        "lookup": [9.0] * 50,
        "model": [5.0] * 9,
    }
    with pytest.MonkeyPatch.context() as patch:
        shipped = believed.belief.fitted_belief()
        own = msgspec.structs.replace(shipped.coefficients, slopes=slopes)
        other = msgspec.structs.replace(shipped, coefficients=own)
        patch.setattr(believed.belief, "fitted_belief", lambda: other)
        group = believed.Situation(kind="full").group
        slopes[group] = []
        middle, deviation = believed._believed_slope(
            believed.Question("m", "full", 8.0)
        )
        assert (middle, deviation) == (
            pytest.approx(-0.2, abs=0.01),
            pytest.approx(0.3, rel=0.05),
        )
        for number in (9, 10):
            slopes[group] = [1.0] * number
            middle, _ = believed._believed_slope(believed.Question("m", "full", 8.0))
            assert (middle == 1.0) == (number == 10)


def test_a_fit_takes_cells_that_accept_everything() -> None:
    """A self-draft with the whole cache: predicted for sure, whatever is counted elsewhere."""
    rows = [
        {
            "draft_method": "snapkv",
            "budget": budget,
            "context": 4096,
            "position": 1,
            "trials": 500,
            "accepted": accepted,
        }
        for budget, accepted in ((64, 350), (256, 425), (4096, 500))
    ]
    profile = fit_profile(rows)
    at = {"context": 4096, "gamma_max": 1}
    assert profile.conditional_rates(budget=4096, **at)[0] == pytest.approx(
        1.0, abs=2e-3
    )
    assert profile.conditional_rates(budget=256, **at)[0] == pytest.approx(
        0.85, abs=0.03
    )
    assert profile.law.conditional_rates(budget=64, **at)[0] == pytest.approx(
        0.7, abs=0.05
    )


@given(
    tables=st.lists(
        st.lists(st.tuples(rates, st.floats(1e-3, 0.2)), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
        unique_by=len,
    )
)
def test_known_rates_are_the_deepest_counts_with_their_logits_variance(
    tables: list[list[tuple[float, float]]],
) -> None:
    measured = [
        table(
            64.0, 999.0, [r for r, _ in rows], [9.0] * len(rows), [e for _, e in rows]
        )
        for rows in tables
    ]
    common: dict[str, Any] = {"model": "m", "draft_method": "eagle"}
    profile = MeasuredProfile(law=law_of_rates([0.5]), measured=measured, **common)
    known = profile.known_rates(context=99.0, num_given=0)
    assert known is not None
    deepest = max(tables, key=len)
    assert known.rates == pytest.approx([rate for rate, _ in deepest])
    h = 1e-6
    for (rate, error), variance in zip(deepest, known.variance, strict=True):
        slope = (logit(rate + h) - logit(rate - h)) / (2 * h)
        assert variance == pytest.approx((slope * error) ** 2, rel=1e-4)


@pytest.mark.parametrize("kind", ["ngram", "suffix", "streamingllm"])
def test_a_believed_slope_of_look_ups_and_self_drafts_is_that_of_their_rates(
    kind: str,
) -> None:
    question = believed.Question("llama-3.1-8b", kind, 8.0, task="code")
    found = believed.assumed(question._replace(task=""))
    of_rate = [logit(rate) for rate in found.law.by_position]
    inside = [
        place
        for place, rate in enumerate(found.law.by_position)
        if 0.021 < rate < 0.984
    ]
    last = inside[-1]
    slope, error = believed._believed_slope(question)
    assert slope == pytest.approx(
        (of_rate[last] - of_rate[0]) / math.log(last + 1), abs=2e-3
    )
    level = of_rate[0] + slope * believed.REFERENCE_DEPTH
    factor = (1.0 - 1.0 / (1.0 + math.exp(-level))) / math.log(1.0 + math.exp(-level))
    assert found.error.depth == pytest.approx(
        believed.DEPTH_SHARE * factor * error, rel=0.02
    )


@pytest.mark.parametrize("gamma", [1, 4])
def test_the_shortest_and_the_longest_length_are_sure_rates(gamma: int) -> None:
    question = believed.Question("no such model", "eagle3", 8.0)
    for tokens, rate in ((1.0, 0.0), (gamma + 1.0, 1.0)):
        found = believed.of_length(tokens, gamma, question)
        given_rates = found.conditional_rates(budget=None, context=9, gamma_max=gamma)
        assert given_rates.tolist() == [rate] * gamma
