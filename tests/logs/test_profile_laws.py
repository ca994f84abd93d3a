"""What a profile says of replayed steps, written out request by request; and which settings are replayed."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from magicdec.logs import profiles
from magicdec.logs.lookups import lookup
from magicdec.logs.replay import LogReplay
from magicdec.logs.requests import Account
from magicdec.logs.tally import CONTEXT_BOUNDS, OUTPUT_BOUNDS
from magicdec.perfmodel.acceptance.law import Law
from tests.logs.test_replay_bounds import counted, replayed

COPIES = 15
"""Of each drawn request, so that ranges have the trials that a profile asks for."""


def binomial(accepted: int, tried: int) -> float:
    """Variance of a rate: none is surer than of half a trial that went the other way."""
    inside = min(max(accepted, 0.5), tried - 0.5)
    return inside * (tried - inside) / tried**3


@given(found=replayed())
def test_ranges_and_rates_are_those_of_their_steps(
    found: list[tuple[int, int, list[tuple[int, int, int]]]],
) -> None:
    found = [request for request in found for _ in range(COPIES)]
    every = [
        (place + 1, place + 1 - prompt_len, text_len - 1 - place, drafted, accepted)
        for text_len, prompt_len, steps in found
        for place, drafted, accepted in steps
    ]
    assume(every)
    tally = counted(found)
    account = Account(num_requests=len(found), prompt_tokens=7, output_tokens=9)
    replay = LogReplay(
        account=account,
        settings=tuple(tally.settings),
        replay_s=0.0,
        elapsed_s=0.0,
        replayed_tokens=0,
    )
    (profile,) = profiles.profiles_of(replay, model="m", dataset="d")
    assert (profile.name, profile.draft, profile.draft_method) == (
        "d-ngram",
        "ngram",
        "ngram",
    )
    told = profile.replay
    assert (told.requests, told.steps, told.gamma) == (len(found), len(every), 3)
    assert (told.prompt_tokens, told.output_tokens) == (7, 9)
    beyond = sum(
        drafted - accepted for *_, left, drafted, accepted in every if accepted == left
    )
    assert told.not_determined == beyond
    for bounds, ranges, column in (
        (CONTEXT_BOUNDS, told.by_context, 0),
        (OUTPUT_BOUNDS, told.by_output, 1),
    ):
        low = 0.0
        expected = []
        for upto in [*bounds.tolist(), None]:
            high = math.inf if upto is None else upto
            inside = [step for step in every if low < step[column] <= high]
            low = high
            if inside:
                emitted = sum(
                    min(accepted + 1, left) for *_, left, _, accepted in inside
                )
                drafts = sum(drafted > 0 for *_, drafted, _ in inside)
                expected.append(
                    (upto, len(inside), emitted / len(inside), drafts / len(inside))
                )
        assert [
            (row.upto, row.steps, row.tokens_per_step, row.drafted_share)
            for row in ranges
        ] == expected

    def tried(steps: list[Any], position: int) -> tuple[int, int]:
        """Trials at a position, and how many were right."""
        at = [
            accepted
            for *_, left, _, accepted in steps
            if accepted >= position and left > position
        ]
        return len(at), sum(accepted > position for accepted in at)

    widening = []
    for position, rate in enumerate(tally.of(0).rates):
        trials, right = tried(every, position)
        assert rate.stderr is not None
        widening.append(max(1.0, rate.stderr**2 / binomial(right, trials)))
    tables = {table.context: table for table in profile.measured}
    assert list(tables) == profile.measured_contexts
    for high in CONTEXT_BOUNDS.tolist():
        low = 0 if high == CONTEXT_BOUNDS[0] else high // 2
        inside = [step for step in every if low < step[0] <= high]
        middle = high / math.sqrt(2.0)
        table = next(
            (row for at, row in tables.items() if at == pytest.approx(middle)), None
        )
        if len(inside) < 30:
            assert table is None
            continue
        assert table is not None
        pairs = [tried(inside, position) for position in range(3)]
        pairs = [pair for pair in pairs if pair[0]]
        assert table.budget == table.context
        assert table.trials == [trials for trials, _ in pairs]
        assert table.rates == [right / trials for trials, right in pairs]
        errors = [
            factor * binomial(right, trials)
            for factor, (trials, right) in zip(widening, pairs, strict=False)
        ]
        assert np.square(table.stderr) == pytest.approx(errors)
    own = [
        tried(
            [
                (0, 0, text_len - 1 - place, drafted, accepted)
                for place, drafted, accepted in steps
            ],
            0,
        )
        for text_len, _, steps in found
    ]
    trials, right = (sum(column) for column in zip(*own, strict=True))
    pairs_of_one = sum(n * (n - 1) for n, _ in own)
    if not pairs_of_one:
        assert profile.spread == 0.0
        return
    rate = right / trials
    between = sum((a - rate * n) ** 2 for n, a in own) - rate * (1.0 - rate) * trials
    variance = min(max(between / pairs_of_one, 0.0), 0.25)
    assert profile.spread**2 == pytest.approx(variance, abs=1e-12)


@given(
    rejection=st.floats(0.02, 0.98),
    gamma=st.integers(1, 12),
    relative=st.floats(1e-3, 0.3),
)
def test_a_laws_error_is_that_of_its_tokens(
    rejection: float, gamma: int, relative: float
) -> None:
    """Rates to the power of e to the minus and to the plus of it lie so far apart, up to a largest error of 3."""
    rate = 1.0 - rejection
    found = profiles._deviation(Law(rejection=rejection), gamma, relative)

    def tokens(shift: float) -> float:
        return sum(rate ** (math.exp(shift) * count) for count in range(gamma + 1))

    def apart(deviation: float) -> float:
        most, least = tokens(-deviation), tokens(deviation)
        return (most - least) / (most + least)

    if apart(3.0) <= relative:
        assert found == 3.0
    else:
        assert apart(found) == pytest.approx(relative, rel=0.02, abs=1e-4)


@given(
    st.lists(
        st.tuples(st.floats(1.0, 8.0), st.floats(0.0, 16.0)), min_size=1, max_size=5
    )
)
def test_a_settings_worth_is_its_best_gain_with_a_fiftieth_of_a_step_for_each_token(
    rows: list[tuple[float, float]],
) -> None:
    tokens, drafted = zip(*rows, strict=True)
    setting: Any = SimpleNamespace(tokens_per_step=tokens, drafted_per_step=drafted)
    gains = [50.0 * gain / (50.0 + each) for gain, each in rows]
    assert profiles._worth(setting) == pytest.approx(max(gains))


# Settings

UP_TO_8 = [1, 2, 3, 4, 5, 6, 8, 12, 16]
GRIDS: dict[str, tuple[list[int], Callable[[int, int], bool]]] = {
    "ngram": (UP_TO_8, lambda low, high: high in (3, 4, 5, 8) and low <= 5),
    "ngram-gpu": (UP_TO_8, lambda low, high: high in (3, 4, 5, 8) and low <= 5),
}
"""Gammas, and pairs of shortest and longest n-gram, of a grid of which one end is asked for."""


@pytest.mark.parametrize("rule", GRIDS)
@settings(max_examples=15)
@given(asked=st.sets(st.integers(1, 9), min_size=1, max_size=3))
def test_a_grid_is_every_pair_of_the_ends_that_are_asked_for_and_the_usual_others(
    rule: str, asked: set[int]
) -> None:
    gammas, is_usual = GRIDS[rule]
    ends = range(1, 10)
    usual_lows = {low for low in ends for high in ends if is_usual(low, high)}
    usual_highs = {high for low in ends for high in ends if is_usual(low, high)}
    for name, lows, highs in (
        ("min_ngrams", asked, usual_highs),
        ("max_ngrams", usual_lows, asked),
    ):
        pairs = {(low, high) for low, high in product(lows, highs) if low <= high}
        given_ends: dict[str, Any] = {name: sorted(asked)}
        if not pairs:
            with pytest.raises(profiles.ConfigError, match="as long as the shortest"):
                profiles.sweep([rule], **given_ends)
            continue
        found = profiles.sweep([rule], **given_ends)
        expected = {
            lookup(rule, gamma=gamma, min_ngram=low, max_ngram=high)
            for gamma in gammas
            for low, high in pairs
        }
        assert set(found) == expected
        assert len(found) == len(expected)


def test_a_grid_where_nothing_is_asked_for() -> None:
    """N-grams of vLLM, from short to long; llama.cpp's have one length; suffix decoding has depths alone."""
    pairs = {(row.min_ngram, row.max_ngram) for row in profiles.sweep(["ngram"])}
    usual = GRIDS["ngram"][1]
    assert pairs < {
        (low, high) for low in range(1, 9) for high in range(low, 9) if usual(low, high)
    }
    assert len(pairs) == 13
    assert {low for low, _ in pairs} == {1, 2, 3, 4, 5}
    assert {row.max_ngram for row in profiles.sweep(["llama.cpp"])} == {4, 8, 12, 16}
    for row in profiles.sweep(["llama.cpp"]):
        assert row.min_ngram == row.max_ngram
    assert [row.gamma for row in profiles.sweep(["suffix"])] == [
        1,
        2,
        3,
        4,
        6,
        8,
        12,
        16,
        24,
    ]
    assert profiles.sweep(["ngram", "suffix", "ngram"]) == profiles.sweep(
        ["ngram", "suffix"]
    )


@pytest.mark.parametrize("rule", ["ngram", "ngram-gpu", "llama.cpp"])
@pytest.mark.parametrize(
    ("length", "is_taken"), [(0, False), (1, True), (64, True), (65, False)]
)
def test_n_grams_of_a_grid_have_bounds(rule: str, length: int, is_taken: bool) -> None:
    if is_taken:
        lookups = profiles.sweep(
            [rule], gammas=[2], min_ngrams=[length], max_ngrams=[length]
        )
        assert lookups == [lookup(rule, gamma=2, min_ngram=length, max_ngram=length)]
        return
    with pytest.raises(profiles.ConfigError, match=r"1 to 64 tokens"):
        profiles.sweep([rule], min_ngrams=[length], max_ngrams=[length])
