"""A fit's parts by hand: groups of counts, deviances, inflation, spreads, errors; and what replays say."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from magicdec.perfmodel.acceptance import fit
from magicdec.perfmodel.acceptance.fit import Measurement
from magicdec.perfmodel.acceptance.law import Law, LawError, static_batch_efficiency
from magicdec.perfmodel.acceptance.measured import MeasuredProfile
from magicdec.perfmodel.acceptance.profile import law_of_rates
from magicdec.perfmodel.acceptance.replayed import (
    LookupSetting,
    Replay,
    ReplayedProfile,
)

fewer = settings(max_examples=15)
rates = st.floats(0.05, 0.95)
counts = st.integers(1, 300).flatmap(
    lambda tried: st.tuples(st.just(tried), st.integers(0, tried))
)


def row(
    tried: float,
    accepted: float,
    *,
    budget: float = 256.0,
    context: float = 4096.0,
    position: int = 1,
    sequence: str | None = None,
) -> Measurement:
    return Measurement(
        draft_method="snapkv",
        budget=budget,
        context=context,
        position=position,
        trials=tried,
        accepted=accepted,
        sequence=sequence,
    )


# Fits


@given(
    drawn=st.lists(
        st.tuples(
            st.sampled_from([64.0, 256.0, 4096.0]),
            st.sampled_from([4096.0, 16384.0]),
            st.integers(1, 2),
            counts,
        ),
        min_size=1,
        max_size=9,
    )
)
def test_counts_are_summed_by_setting_about_their_geometric_mean(
    drawn: list[tuple[float, float, int, tuple[int, int]]],
) -> None:
    """Settings with the whole cache tell nothing of the budget, and are hardly asked where it lies."""
    made = [
        row(tried, accepted, budget=budget, context=context, position=position)
        for budget, context, position, (tried, accepted) in drawn
    ]
    found = fit._cells(made)
    sums: dict[tuple[float, float, int], list[float]] = {}
    for each in made:
        of_cell = sums.setdefault(
            (each.budget, each.context, each.position), [0.0, 0.0]
        )
        of_cell[0] += each.trials
        of_cell[1] += each.accepted
    columns = (
        found.budget,
        found.context,
        found.position,
        found.trials,
        found.accepted,
    )
    assert list(zip(*columns, strict=True)) == [
        (*key, *of_cell) for key, of_cell in sorted(sums.items())
    ]
    total = on_budget = on_context = 0.0
    for (budget, context, _), (tried, _) in sums.items():
        weight = tried if budget < context else 1e-6 * tried
        total += weight
        on_budget += weight * math.log(budget)
        on_context += weight * math.log(context)
    assert found.reference_budget == pytest.approx(math.exp(on_budget / total))
    assert found.reference_context == pytest.approx(math.exp(on_context / total))


@given(counts, rates)
def test_residuals_are_signed_roots_of_the_binomial_deviance(
    counted: tuple[int, int], predicted: float
) -> None:
    tried, accepted = counted
    (found,) = fit._deviance_residuals(
        np.array([predicted]), np.array([float(tried)]), np.array([float(accepted)])
    )
    best = binom.logpmf(accepted, tried, accepted / tried)
    deviance = 2.0 * (best - binom.logpmf(accepted, tried, predicted))
    assert found**2 == pytest.approx(deviance, abs=1e-6)
    assert found * (accepted / tried - predicted) >= 0.0


def cells_of(drawn: list[tuple[int, int]]) -> fit._Cells:
    return fit._cells(
        [
            row(tried, accepted, position=place)
            for place, (tried, accepted) in enumerate(drawn, 1)
        ]
    )


@given(drawn=st.lists(counts, min_size=2, max_size=6), predicted=rates)
def test_what_scatters_more_than_counts_do_is_pearsons_chi_square(
    drawn: list[tuple[int, int]], predicted: float
) -> None:
    """Per degree of freedom; counts that scatter less, and as many numbers as counts, say nothing."""
    cells = cells_of(drawn)
    expected = np.full(len(drawn), predicted)
    chi_square = sum(
        (accepted - tried * predicted) ** 2
        / max(tried * predicted * (1.0 - predicted), 0.05)
        for tried, accepted in drawn
    )
    for number in range(len(drawn) + 1):
        found = fit._overdispersion(expected, cells, num_parameters=number)
        freedom = len(drawn) - number
        if freedom:
            assert found == pytest.approx(max(chi_square / freedom, 1.0))
        else:
            assert found == 1.0


@given(
    drawn=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 2), counts),
        min_size=1,
        max_size=8,
    ),
    of_law=st.tuples(rates, rates),
)
def test_sequences_spread_by_what_their_counts_do_not_explain(
    drawn: list[tuple[str, int, tuple[int, int]]], of_law: tuple[float, float]
) -> None:
    """First rates by moments, weighed by their trials; all positions together by the inflation of
    a sequence's total. A row without a sequence tells neither."""
    made = [
        row(tried, accepted, position=position, sequence=name)
        for name, position, (tried, accepted) in drawn
    ]
    found = fit._between_sequences(
        [*made, row(50, 1), row(9, 9, position=2)], law_of_rates(list(of_law))
    )
    names = sorted({name for name, *_ in drawn})
    if len(names) < 2:
        assert found == (0.0, 1.0)
        return
    missed = expected = 0.0
    first = []
    for name in names:
        own = [each for each in made if each.sequence == name]
        missed += sum(e.accepted - e.trials * of_law[e.position - 1] for e in own) ** 2
        expected += sum(
            e.trials * of_law[e.position - 1] * (1.0 - of_law[e.position - 1])
            for e in own
        )
        tried = sum(e.trials for e in own if e.position == 1)
        accepted = sum(e.accepted for e in own if e.position == 1)
        if tried:
            first.append((tried, accepted / tried - of_law[0]))
    number = len(names)
    assert found[1] == pytest.approx(missed / expected * number / (number - 1))
    if len(first) < 2:
        assert found[0] == 0.0
        return
    whole = sum(tried for tried, _ in first)
    variance = sum(
        tried / whole * (away**2 - of_law[0] * (1.0 - of_law[0]) / tried)
        for tried, away in first
    )
    variance *= len(first) / (len(first) - 1)
    assert found[0] == pytest.approx(math.sqrt(min(max(variance, 0.0), 0.25)))


@given(tried=st.integers(300, 5000), rate=st.floats(0.2, 0.8))
@settings(max_examples=15)
def test_the_error_of_one_rate_is_the_binomials(tried: int, rate: float) -> None:
    """Of log(-log rate): by the counts alone, whose weight is far above the prior's."""
    accepted = round(tried * rate)
    rate = accepted / tried
    _, error, spread, misfit = fit.fit_law([row(tried, accepted)], is_self=True)
    of_rate = math.sqrt(rate * (1.0 - rate) / tried)
    assert error.log_rejection == pytest.approx(
        of_rate / (rate * -math.log(rate)), rel=0.05
    )
    assert spread == 0.0
    assert misfit == pytest.approx(0.0, abs=2e-3)


def dense(scatter: float = 0.0) -> list[Measurement]:
    """Counts of a law at five budgets, three contexts and three positions, moved up and down."""
    law = Law(
        rejection=0.2, budget_exponent=0.4, context_exponent=0.1, fill_exponent=0.5,
        reference_budget=256, concentration=10.0,
    )  # fmt: skip
    made = []
    for place, budget in enumerate((64.0, 128.0, 256.0, 512.0, 1024.0)):
        for turn, context in enumerate((4096.0, 8192.0, 16384.0)):
            of_law = law.conditional_rates(budget=budget, context=context, gamma_max=3)
            for position, rate in enumerate(of_law.tolist(), 1):
                sign = (-1) ** (place + turn + position)
                moved = rate + sign * scatter
                made.append(
                    row(2000, 2000 * moved, budget=budget, context=context, position=position)
                )  # fmt: skip
    return made


def test_errors_grow_with_the_inflation_of_the_variance() -> None:
    """Of sequences where it is known, and never shrink by one; else by the scatter of the cells."""
    rows = dense()
    plain, doubled, shrunk = (
        msgspec.structs.astuple(
            fit.fit_law(rows, is_self=True, cluster_factor=factor, spread=0.07)[1]
        )
        for factor in (1.0, 4.0, 0.25)
    )
    assert doubled == pytest.approx([2.0 * each for each in plain])
    assert shrunk == plain
    assert fit.fit_law(rows, is_self=True, spread=0.07)[2] == 0.07
    scattered = dense(0.03)
    _, error, _, misfit = fit.fit_law(scattered, is_self=True)
    assert misfit == pytest.approx(0.03, rel=0.1)
    free = len(fit.FREE) - 1
    variance = np.mean(
        [
            1.0 / (r.accepted / r.trials * (1.0 - r.accepted / r.trials))
            for r in scattered
        ]
    )
    inflation = 2000 * 0.03**2 * variance * len(rows) / (len(rows) - free)
    ratio = error.budget_exponent / plain[1]
    assert ratio == pytest.approx(math.sqrt(inflation), rel=0.25)
    known = fit.fit_law(scattered, is_self=True, cluster_factor=inflation)[1]
    assert known.budget_exponent == pytest.approx(error.budget_exponent, rel=0.1)


def test_a_laws_errors_are_those_of_laws_as_likely() -> None:
    """Of 2,000 laws drawn from the fit's own covariance: the first and the last position's hazards
    at the reference point, of which the last is counted less, and both exponents."""
    rows = []
    for r in dense():
        trials = {1: 400.0, 2: 60.0, 3: 9.0}[r.position]
        accepted = trials * r.accepted / r.trials
        rows.append(msgspec.structs.replace(r, trials=trials, accepted=accepted))
    cells = fit._cells(rows)
    free = {name: each for name, each in fit.FREE.items() if name != "floor"}
    solution = fit._fitted(cells, free, inflation=1.0)
    error = fit._errors(solution, cells, 1.0)
    rng = np.random.default_rng(1)
    drawn = rng.multivariate_normal(solution.codes, 0.01 * solution.covariance, 2000)
    logs = []
    exponents = []
    for codes in drawn:
        values = {
            n: each.decode(float(c))
            for (n, each), c in zip(free.items(), codes, strict=True)
        }
        law = fit._law_of(values, cells)
        of_law = law.conditional_rates(
            budget=cells.reference_budget, context=cells.reference_context, gamma_max=3
        )
        logs.append(np.log(-np.log(of_law[[0, 2]])))
        exponents.append((values["budget_exponent"], values["context_exponent"]))
    first, last = 10.0 * np.std(logs, axis=0)
    # a standard deviation of 2,000 is known to 1.6 %: four of those
    assert error.log_rejection == pytest.approx(first, rel=0.065)
    assert last > 1.2 * first
    of_depth = math.hypot(error.log_rejection, error.depth * math.log(3.0))
    assert of_depth == pytest.approx(last, rel=0.065)
    by_budget, by_context = 10.0 * np.std(exponents, axis=0)
    assert error.budget_exponent == pytest.approx(by_budget, rel=0.065)
    assert error.context_exponent == pytest.approx(by_context, rel=0.065)


USUAL = {
    "budget_exponent": (0.5, 0.5),
    "context_exponent": (0.1, 0.2),
    "fill_exponent": (1.0, 0.7),
    "concentration": (50.0, 1.5),
    "drift": (0.2, 2.0),
    "drift_depth": (2.0, 0.5),
}
"""What a first position at one setting does not tell, and how far it spreads (positive ones in their logarithm)."""


def test_what_counts_do_not_tell_is_as_usual_and_as_unsure() -> None:
    rows = [row(4000, 3000)]
    law, error, *_ = fit.fit_law(rows, is_self=True)
    for name, (usual, _) in USUAL.items():
        assert getattr(law, name) == pytest.approx(usual, rel=1e-3)
    assert error.budget_exponent == pytest.approx(0.5, rel=1e-3)
    assert error.context_exponent == pytest.approx(0.2, rel=1e-3)
    free = {name: each for name, each in fit.FREE.items() if name != "floor"}
    solution = fit._fitted(fit._cells(rows), free, inflation=1.0)
    spreads = dict(zip(free, np.sqrt(np.diag(solution.covariance)), strict=True))
    for name, (_, spread) in USUAL.items():
        assert spreads[name] == pytest.approx(spread, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("budget_exponent", 3.0),
        ("context_exponent", -1.5),
        ("fill_exponent", 4.0),
        ("concentration", 0.6),
        ("drift", 6.0),
        ("drift_depth", 12.0),
    ],
)
def test_a_law_far_from_the_usual_is_found_from_enough_counts(
    name: str, value: float
) -> None:
    constants = {
        "budget_exponent": 0.4, "context_exponent": 0.1, "fill_exponent": 0.5, "concentration": 10.0, "drift": 2.0,
    }  # fmt: skip
    law = Law(rejection=0.2, reference_budget=600.0, **constants | {name: value})
    rows = []
    for budget in (400.0, 600.0, 900.0):
        for context in (3000.0, 6000.0, 12000.0):
            of_law = law.conditional_rates(budget=budget, context=context, gamma_max=8)
            rows += [
                row(1e9, 1e9 * rate, budget=budget, context=context, position=position)
                for position, rate in enumerate(of_law.tolist(), 1)
            ]
    found, *_ = fit.fit_law(rows, is_self=True)
    assert getattr(found, name) == pytest.approx(value, rel=0.05)


def test_budgets_left_out_are_judged_by_the_mean_over_contexts() -> None:
    """Each inner budget by a fit of the others; the noise is that of a normal variable's absolute."""
    rows = [r for r in dense(0.02) if r.budget < 600.0]
    found = fit.held_out(rows, is_self=True)
    errors = []
    noises = []
    for budget in (128.0, 256.0):
        law, *_ = fit.fit_law([r for r in rows if r.budget != budget], is_self=True)
        for position in (1, 2, 3):
            own = [r for r in rows if (r.budget, r.position) == (budget, position)]
            counted = sum(r.accepted for r in own) / sum(r.trials for r in own)
            of_law = [
                law.conditional_rates(budget=budget, context=r.context, gamma_max=3)[position - 1]
                for r in own
            ]  # fmt: skip
            errors.append(
                abs(counted - np.average(of_law, weights=[r.trials for r in own]))
            )
            noises.append(math.sqrt(counted * (1.0 - counted) / 6000.0))
    sigmas = np.linspace(-8.0, 8.0, 4001)
    density = np.exp(-(sigmas**2) / 2.0)
    absolute = float((np.abs(sigmas) * density).sum() / density.sum())
    assert found is not None
    assert found[0] == pytest.approx(np.mean(errors), rel=1e-6)
    assert found[1] == pytest.approx(absolute * np.mean(noises), rel=1e-3)
    three = {64.0, 128.0, 256.0}
    assert fit.held_out([r for r in rows if r.budget in three], is_self=True)
    assert not fit.held_out([r for r in rows if r.budget < 200.0], is_self=True)


# Static batches


@pytest.mark.parametrize("rate", [0.03, 0.3, 0.9])
@pytest.mark.parametrize("spread", [0.0, 0.2])
@pytest.mark.parametrize("gen_len", [1, 3, 9, 100])
def test_no_batch_is_faster_than_a_steady_one(
    rate: float, spread: float, gen_len: int
) -> None:
    """Its last step may make more tokens than are asked for, and none makes up for it."""
    profile = MeasuredProfile(
        model="m", draft_method="snapkv", law=Law(rejection=1.0 - rate), spread=spread
    )
    for gamma in (1, 6):
        for batch_size in (1, 2, 30):
            found = static_batch_efficiency(
                profile,
                budget=64,
                context=999,
                gamma=gamma,
                batch_size=batch_size,
                gen_len=gen_len,
            )
            assert 0.0 < found <= 1.0


# Replays


@st.composite
def replays(draw: Any) -> ReplayedProfile:
    gammas = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True))
    gammas.sort()

    def values(low: float, high: float) -> list[float]:
        number = len(gammas)
        return draw(st.lists(st.floats(low, high), min_size=number, max_size=number))

    made = []
    for place in range(draw(st.integers(1, 4))):
        of_positions = draw(st.lists(st.just(0.0) | rates, min_size=1, max_size=3))
        made.append(
            LookupSetting(
                min_ngram=2,
                max_ngram=3 + place,
                gammas=gammas,
                tokens_per_step=values(1.0, 3.0),
                tokens_stderr=values(0.0, 0.2),
                drafted_share=values(0.1, 1.0),
                drafted_per_step=values(0.1, 4.0),
                rates=of_positions,
                stderr=[0.1] * len(of_positions),
                trials=[20] * len(of_positions),
                rates_gamma=gammas[-1],
            )
        )
    chosen = draw(st.integers(0, len(made) - 1))
    replay = Replay(
        rule="ngram",
        requests=9,
        prompt_tokens=900,
        output_tokens=500,
        steps=400,
        gamma=draw(st.integers(1, 9)),
        chosen=chosen,
        settings=made,
    )
    return ReplayedProfile(
        model="m",
        draft="ngram",
        draft_method="ngram",
        law=law_of_rates(made[chosen].rates),
        error=LawError(log_rejection=0.1),
        replay=replay,
    )


def between(
    gammas: list[int], values: list[float], gamma: int, at_zero: float
) -> float:
    """On straight lines from 0 through the replayed gammas; beyond the last as there."""
    places = [0, *gammas]
    known = [at_zero, *values]
    for low, high, before, after in zip(
        places, places[1:], known, known[1:], strict=False
    ):
        if low <= gamma <= high:
            return before + (after - before) * (gamma - low) / (high - low)
    return known[-1]


@fewer
@given(profile=replays(), shift=st.floats(-0.1, 0.1))
def test_a_replays_tokens_are_its_own_and_move_as_the_laws_do(
    profile: ReplayedProfile, shift: float
) -> None:
    told = profile.replay.setting
    of_law = [*told.rates, *[told.rates[-1]] * 12]
    gammas = np.arange(12)
    at: dict[str, Any] = {"budget": None, "context": 999.0, "gamma": gammas}
    found, everything = profile.tokens_per_step(**at)
    moved, _ = profile.tokens_per_step(**at, shift=shift)
    lower, _ = profile.tokens_per_step(**at, shift=-shift)
    error = profile.tokens_error(**at, shifts=[shift, 0.0])
    for gamma in range(12):
        tokens = between(told.gammas, told.tokens_per_step, gamma, 1.0)

        def gain(by: float, gamma: int = gamma) -> float:
            inside = [min(max(rate + by, 0.0), 1.0) for rate in of_law]
            return sum(math.prod(inside[: n + 1]) for n in range(gamma))

        own = gain(0.0)
        assert everything[gamma] == pytest.approx(math.prod(of_law[:gamma]), abs=1e-9)
        if own > 1e-9 or gamma == 0:
            expected = 1.0 + (tokens - 1.0) * (gain(shift) / own if gamma else 1.0)
            assert found[gamma] == pytest.approx(tokens)
            assert moved[gamma] == pytest.approx(expected)
        stderr = between(told.gammas, told.tokens_stderr, gamma, 0.0) / tokens
        half = (moved[gamma] - lower[gamma]) / (moved[gamma] + lower[gamma])
        assert error[gamma] == pytest.approx(math.hypot(stderr, half), abs=1e-9)
    assert np.all(np.isfinite(found))


@fewer
@given(profile=replays())
def test_a_replays_drafts_are_those_of_its_steps(profile: ReplayedProfile) -> None:
    """At less than the least gamma as many steps have a draft; none is longer than gamma."""
    told = profile.replay.setting
    assert profile.is_partly_drafted
    for gamma in range(12):
        share = between(told.gammas, told.drafted_share, gamma, told.drafted_share[0])
        drafted = between(told.gammas, told.drafted_per_step, gamma, 0.0)
        assert profile.drafted_share_at(gamma) == pytest.approx(share)
        assert profile.draft_len_at(gamma) == pytest.approx(min(drafted / share, gamma))


@fewer
@given(profile=replays())
def test_settings_that_lead_are_those_that_none_beats(profile: ReplayedProfile) -> None:
    """In tokens per step with no more drafted tokens; the chosen one is always among them."""
    replay = profile.replay
    at = [
        (
            between(each.gammas, each.tokens_per_step, replay.gamma, 1.0),
            -between(each.gammas, each.drafted_per_step, replay.gamma, 0.0),
        )
        for each in replay.settings
    ]
    expected = [
        place
        for place, own in enumerate(at)
        if place == replay.chosen
        or not any(o != own and o[0] >= own[0] and o[1] >= own[1] for o in at)
    ]
    assert replay.leading == expected
    assert [each.replay.chosen for each in profile.settings] == expected
    for each in profile.settings:
        setting = each.replay.setting
        assert each.law == law_of_rates(setting.rates)
        assert each.lookup_lengths == (2, setting.max_ngram)
        if each.replay.chosen == replay.chosen:
            assert each == profile
            continue
        assert each.num_trials == sum(setting.trials)
        assert each.drafted_share == pytest.approx(
            between(setting.gammas, setting.drafted_share, setting.rates_gamma, 0.0)
        )
    suffix = msgspec.structs.replace(replay.setting, min_ngram=0, max_ngram=0)
    bare = msgspec.structs.replace(replay, settings=[suffix], chosen=0)
    without = msgspec.structs.replace(profile, replay=bare)
    assert without.lookup_lengths == (None, None)


@given(profile=replays())
@settings(max_examples=5)
def test_a_replay_that_does_not_fit_itself_is_refused(profile: ReplayedProfile) -> None:
    for chosen in (-1, len(profile.replay.settings)):
        with pytest.raises(ValueError, match="'chosen' must be below"):
            msgspec.structs.replace(profile.replay, chosen=chosen)
    setting = profile.replay.setting
    for name in (
        "tokens_per_step",
        "tokens_stderr",
        "drafted_share",
        "drafted_per_step",
    ):
        longer = [*getattr(setting, name), 1.0]
        with pytest.raises(ValueError, match=f"'{name}' needs one value"):
            msgspec.structs.replace(setting, **{name: longer})
    for name in ("rates", "stderr", "trials"):
        longer = [*getattr(setting, name), 1]
        with pytest.raises(ValueError, match="equal lengths"):
            msgspec.structs.replace(setting, **{name: longer})


@given(profile=replays(), rate=rates)
@settings(max_examples=10)
def test_a_rate_of_its_own_leaves_a_law(profile: ReplayedProfile, rate: float) -> None:
    assume(profile.replay.setting.rates[0] > 0.0)
    moved = profile.at_rate(rate, budget=64.0, context=999.0)
    assert not isinstance(moved, ReplayedProfile)
    found = moved.conditional_rates(budget=64.0, context=999.0, gamma_max=1)
    assert found[0] == pytest.approx(rate, abs=1e-6)
