"""What a plan draws: configurations under one set of draws, against the intervals of each, and the loadings against
the belief's correlations."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from magicdec.perfmodel.acceptance.assumed import joint_levels
from magicdec.perfmodel.plan import outlook
from magicdec.perfmodel.plan.outlook import Draws, draws_of, normals
from magicdec.schema import Candidate
from magicdec.specs import LOOKUP_METHODS
from tests.perfmodel.cases import case_of, found_of

QUESTIONS: list[dict[str, Any]] = [
    {"plugin": True},
    {"plugin": True, "gen_len": 400},
    {"hardware": ("v100-sxm-32gb",), "batch_sizes": (2,)},
]
"""With a search for each draft that differs by sequence, with whole requests, and on a device that nobody timed."""


def drawn_of(question: dict[str, Any]) -> tuple[Draws, Candidate]:
    """The draws beside the fastest drafted row, and that row."""
    found = found_of(**question)
    rows = [row for of_draft in found if of_draft.option for row in of_draft.rows]
    fastest = max(rows, key=lambda row: row.rate)
    draws = draws_of(case_of(**question), found, fastest)
    assert draws is not None
    return draws, fastest


@pytest.mark.parametrize("question", QUESTIONS)
def test_draws_have_the_mean_time_and_the_chance_that_rows_state(
    question: dict[str, Any],
) -> None:
    """A row's rate is the inverse of its mean time; the chance that it pays and its ends come from its distribution.
    256 even draws tell a mean within 2 %, a chance within 5 points and an interval's width within 10 %."""
    draws, _ = drawn_of(question)
    place = 0
    for of_draft in draws.compared:
        for row in of_draft.rows:
            rates = draws.drawn.rates[:, place]
            place += 1
            assert 1.0 / (1.0 / rates).mean() == pytest.approx(row.rate, rel=0.02)
            if of_draft.option is not None:
                times = rates / draws.drawn.rates[:, 0]
                pays = float((times > 1.0).mean())
                assert pays == pytest.approx(row.gain.probability, abs=0.05)
                if row.requests is None:
                    low, high = np.quantile(times, (0.05, 0.95))
                    width = math.log(row.gain.high / row.gain.low)
                    assert math.log(high / low) == pytest.approx(width, rel=0.1)
    assert place == draws.drawn.rates.shape[1] == draws.drawn.time.shape[1]


@pytest.mark.parametrize("question", QUESTIONS)
def test_each_row_that_was_drawn_has_its_place_and_no_other_row_has(
    question: dict[str, Any],
) -> None:
    draws, fastest = drawn_of(question)
    rows = [row for of_draft in draws.compared for row in of_draft.rows]
    assert [draws.place(row) for row in rows] == list(range(len(rows)))
    for place, row in enumerate(rows):
        times = draws.times_as_fast(row, rows[0])
        assert times is not None
        rates = draws.drawn.rates
        assert times == pytest.approx(rates[:, place] / rates[:, 0])
        assert draws.drawn.gain(place) == pytest.approx(np.log(times))
        ahead = draws.chance_ahead(row, rows[-1])
        behind = draws.chance_ahead(rows[-1], row)
        assert ahead is not None
        assert behind is not None
        assert ahead + behind == pytest.approx(0.0 if row is rows[-1] else 1.0)
    other = msgspec.structs.replace(fastest, batch_size=fastest.batch_size + 1)
    assert draws.place(other) is None
    for pair in ((other, fastest), (fastest, other)):
        assert draws.times_as_fast(*pair) is None
        assert draws.chance_ahead(*pair) is None


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_is_drawn_are_the_fastest_that_may_be_chosen(
    question: dict[str, Any],
) -> None:
    """By sorting all rows: the same batch and devices, within limits, of drafts that are admitted."""
    case = case_of(**question)
    found = found_of(**question)
    draws, fastest = drawn_of(question)
    of_drafts = {each.option.draft: each for each in draws.compared if each.option}
    assert draws.compared[0].option is None
    for of_draft in found:
        option = of_draft.option
        if option is None:
            continue
        able = [
            row
            for row in of_draft.rows
            if row.fits and case.admits(row) and row.batch_size == fastest.batch_size
        ]
        able.sort(key=lambda row: row.rate, reverse=True)
        if not able:
            assert option.draft not in of_drafts
            continue
        rows = of_drafts[option.draft].rows
        assert rows == able[: len(rows)]
        assert len(rows) == min(len(able), outlook.ROWS_OF_DRAFT)
        if fastest in of_draft.rows:
            assert rows[0] is fastest


def test_nothing_is_drawn_where_no_draft_competes() -> None:
    """Beside a row of another batch there is nothing; without decoding alone, nothing to compare with."""
    case = case_of(plugin=True)
    found = found_of(plugin=True)
    (alone, *drafts) = found.drafts
    row = max(alone.rows, key=lambda row: row.rate)
    elsewhere = msgspec.structs.replace(row, batch_size=row.batch_size + 1)
    assert draws_of(case, found, elsewhere) is None
    assert draws_of(case, drafts, drafts[0].rows[0]) is None
    assert draws_of(case, [alone], row) is None
    assert draws_of(case, [alone, drafts[0]], row) is not None


def test_a_slow_row_is_drawn_where_it_is_the_one_that_is_weighed() -> None:
    case = case_of(plugin=True)
    found = found_of(plugin=True)
    for of_draft in found.drafts[1:]:
        slowest = min(of_draft.rows, key=lambda row: row.rate)
        draws = draws_of(case, found, slowest)
        assert draws is not None
        (own,) = [each for each in draws.compared if each.option is of_draft.option]
        assert own.rows[0] is slowest
        assert slowest not in own.rows[1:]


def test_drafts_share_what_the_belief_says_and_measured_ones_nothing() -> None:
    """Loadings times themselves are the correlations: one with itself, the belief's between two believed drafts,
    none with a measured one."""
    options = [each for each in case_of().options if each.question is not None]
    assert len(options) >= 3
    measured = dataclasses.replace(options[0], question=None)
    mixed = [measured, *options, measured]
    loadings = outlook._loadings(mixed)
    correlation = loadings @ loadings.T
    _, covariance = joint_levels([option.question for option in options])  # type: ignore[misc]
    expected = np.eye(len(mixed))
    for one in range(len(options)):
        for other in range(len(options)):
            between = covariance[one, other]
            own = covariance[one, one] * covariance[other, other]
            expected[one + 1, other + 1] = between / math.sqrt(own)
    np.testing.assert_allclose(correlation, expected, atol=1e-9)
    assert outlook._loadings([measured]) == pytest.approx(np.ones((1, 1)))


@pytest.mark.parametrize("num", [1, 2, 3])
def test_each_variable_s_draws_are_spread_as_evenly_as_a_grid(num: int) -> None:
    """The share of draws below any number is the normal distribution's within 2 points, where independent draws
    leave 2 to 5; a pair of variables lies below both its numbers as often as the product, within 3 points."""
    draws = normals(num)
    assert draws.shape == (2 * outlook.NUM_PAIRS, num)
    np.testing.assert_allclose(draws[: outlook.NUM_PAIRS], -draws[outlook.NUM_PAIRS :])
    levels = np.linspace(-2.0, 2.0, 17)
    exact = np.array([0.5 * math.erfc(-level / math.sqrt(2.0)) for level in levels])
    below = draws[:, :, None] <= levels
    assert np.abs(below.mean(axis=0) - exact).max() < 0.02
    pairs = np.einsum("nia,njb->ijab", below.astype(float), below) / len(draws)
    for one in range(num):
        for other in range(one):
            product = np.outer(exact, exact)
            assert np.abs(pairs[one, other] - product).max() < 0.03


def test_counting_a_draft_tells_its_acceptance_as_surely_as_the_sample_allows() -> None:
    """A measurement's own error in standard deviations of what is known: of an error twice as large it is half."""
    draws, _ = drawn_of(QUESTIONS[0])
    of_draft = draws.compared[1]
    sigmas, noise = draws.drawn.acceptance[:, 0], draws.drawn.noise
    for times in (1.0, 2.0, 8.0):
        known = dataclasses.replace(
            of_draft, error=np.full(len(of_draft.rows), times * outlook.MEASURED_ERROR)
        )
        told = outlook._counted(known, sigmas, noise)
        assert told - sigmas == pytest.approx(noise / times)
    known = dataclasses.replace(of_draft, error=np.zeros(len(of_draft.rows)))
    assert outlook._counted(known, sigmas, noise) - sigmas == pytest.approx(noise)


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_draft_can_be_measured_in_its_own_way(question: dict[str, Any]) -> None:
    """Look-ups and draft models by replay, heads and self-drafts on a server, the step and the gain by timing."""
    draws, fastest = drawn_of(question)
    place = draws.place(fastest)
    assert place is not None
    case = case_of(**question)
    options = [each.option for each in draws.compared[1:] if each.option]
    possible = outlook._possible(case, draws.compared, draws.drawn, place)
    told = {(each.kind, draft) for each in possible for draft in each.drafts}
    for option in options:
        is_replayed = option.method in LOOKUP_METHODS or option.model is not None
        assert (("replay", option.draft) in told) == is_replayed
        is_served = option.method not in LOOKUP_METHODS
        assert (("observe", option.draft) in told) == is_served
    commands = " ".join(each.command for each in possible)
    for each in possible:
        assert each.tells.shape[0] == 2 * outlook.NUM_PAIRS
        if each.kind == "calibrate":
            assert f"--model {case.model.name} --hardware {case.hardware.name}" in each.command  # fmt: skip
    assert commands.count("calibrate") == 1
    # what is told is the thing itself, blurred: the draft's step over one without
    blur = outlook.TUNED_ERROR * draws.drawn.noise
    (step,) = [each.tells[:, 0] for each in possible if each.kind == "calibrate"]
    time = draws.drawn.time
    assert step - blur == pytest.approx(time[:, place] - time[:, 0])


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_outlook_counts_its_draws(question: dict[str, Any]) -> None:
    """How often the choice is the best, and what it loses on average where it was wrong, draw by draw."""
    draws, fastest = drawn_of(question)
    case = case_of(**question)
    rates = draws.drawn.rates
    place = draws.place(fastest)
    assert place is not None
    alone = draws.compared[0].rows[0]
    for chosen in (fastest, alone):
        found = outlook.outlook(case, draws, chosen, fastest, [])
        kept, other = (place, 0) if chosen is fastest else (0, place)
        losses = [1.0 - own / best for own, best in rates[:, [kept, other]] if own < best]  # fmt: skip
        expected = sum(losses) / len(losses) if losses else 0.0
        assert found.loss_if_wrong == pytest.approx(expected)
        best = sum(row[place] >= row.max() for row in rates) / len(rates)
        assert found.is_best == pytest.approx(best)
        assert found.pays == fastest.gain.probability
        assert (found.draft, found.gamma) == (fastest.draft, fastest.gamma)


@pytest.mark.parametrize("question", QUESTIONS)
def test_measurements_worth_nearly_the_most_come_first_and_in_order_of_effort(
    question: dict[str, Any],
) -> None:
    draws, fastest = drawn_of(question)
    case = case_of(**question)
    place = draws.place(fastest)
    assert place is not None
    possible = outlook._possible(case, draws.compared, draws.drawn, place)
    found = outlook._measurements(case, draws.compared, draws.drawn, place)
    most = max(each.worth for each in found)
    near = [each.worth >= outlook.NEARLY_WORTH * most for each in found]
    assert near == sorted(near, reverse=True)
    ease = [each.command for each in possible]
    first = [each.command for each, is_near in zip(found, near, strict=True) if is_near]
    assert first == sorted(first, key=ease.index)
    rest = [each.worth for each, is_near in zip(found, near, strict=True) if not is_near]  # fmt: skip
    assert rest == sorted(rest, reverse=True)
    assert sorted(each.command for each in found) == sorted(ease)
    for each in found:
        assert 0.0 <= each.unclear_after <= 1.0
        assert each.unclear_now in (0.0, 1.0)
