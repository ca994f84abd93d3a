"""What a plan draws: configurations under one set of draws, against the intervals of each, and the loadings against
the belief's correlations."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from magicdec.perfmodel.acceptance.believed import joint_levels
from magicdec.perfmodel.plan import draws as joint
from magicdec.perfmodel.plan.draws import Draws, draws_of, normals
from magicdec.schema.row import Candidate
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
def test_draws_have_the_median_rate_and_the_chance_that_rows_state(
    question: dict[str, Any],
) -> None:
    """A row's rate is the median; the chance that it pays and its ends come from its distribution. 256 even draws
    tell a median within 5 %, a chance within 7 points and an interval's width within 10 %."""
    draws, _ = drawn_of(question)
    place = 0
    for of_draft in draws.compared:
        for row in of_draft.rows:
            rates = draws.rates[:, place]
            place += 1
            assert np.median(rates) == pytest.approx(row.rate, rel=0.05)
            if of_draft.option is not None:
                times = rates / draws.rates[:, 0]
                times *= row.gain.speedup / np.median(times)
                pays = float((times > 1.0).mean())
                assert pays == pytest.approx(row.gain.probability, abs=0.07)
                if row.requests is None:
                    low, high = np.quantile(times, (0.05, 0.95))
                    width = math.log(row.gain.high / row.gain.low)
                    assert math.log(high / low) == pytest.approx(width, rel=0.1)
    assert place == draws.rates.shape[1]


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
        rates = draws.rates
        assert times == pytest.approx(rates[:, place] / rates[:, 0])
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
        assert len(rows) == min(len(able), joint.ROWS_OF_DRAFT)
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
    loadings = joint._loadings(mixed)
    correlation = loadings @ loadings.T
    _, covariance = joint_levels([option.question for option in options])  # type: ignore[misc]
    expected = np.eye(len(mixed))
    for one in range(len(options)):
        for other in range(len(options)):
            between = covariance[one, other]
            own = covariance[one, one] * covariance[other, other]
            expected[one + 1, other + 1] = between / math.sqrt(own)
    np.testing.assert_allclose(correlation, expected, atol=1e-9)
    assert joint._loadings([measured]) == pytest.approx(np.ones((1, 1)))


@pytest.mark.parametrize("num", [1, 2, 3])
def test_each_variable_s_draws_are_spread_as_evenly_as_a_grid(num: int) -> None:
    """The share of draws below any number is the normal distribution's within 2 points, where independent draws
    leave 2 to 5; a pair of variables lies below both its numbers as often as the product, within 3 points."""
    draws = normals(num)
    assert draws.shape == (2 * joint.NUM_PAIRS, num)
    np.testing.assert_allclose(draws[: joint.NUM_PAIRS], -draws[joint.NUM_PAIRS :])
    levels = np.linspace(-2.0, 2.0, 17)
    exact = np.array([0.5 * math.erfc(-level / math.sqrt(2.0)) for level in levels])
    below = draws[:, :, None] <= levels
    assert np.abs(below.mean(axis=0) - exact).max() < 0.02
    pairs = np.einsum("nia,njb->ijab", below.astype(float), below) / len(draws)
    for one in range(num):
        for other in range(one):
            product = np.outer(exact, exact)
            assert np.abs(pairs[one, other] - product).max() < 0.03
