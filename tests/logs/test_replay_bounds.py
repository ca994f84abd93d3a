"""Where replays end: the room that they keep, an engine's longest sequence, the settings that are taken; and the counts
of steps, written out step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba")

from magicdec.errors import ConfigError
from magicdec.logs import suffix
from magicdec.logs import tally_kernel as columns
from magicdec.logs.load import PrefixCache
from magicdec.logs.lookups import lookup
from magicdec.logs.suffix import SuffixReplay
from magicdec.logs.tally import CONTEXT_BOUNDS, OUTPUT_BOUNDS, Tally
from magicdec.suffix_tree import SuffixSettings
from tests.logs.plain_rules import PlainSuffix

texts = st.lists(st.integers(0, 4), min_size=3, max_size=60)
requests = st.lists(st.tuples(texts, st.floats(0.05, 0.9)), min_size=1, max_size=8)


def prompt_of(text: Sequence[int], share: float) -> int:
    return max(1, min(len(text) - 1, int(len(text) * share)))


@given(requests=requests, cached=st.sampled_from([-1, 1, 2, 3]))
def test_the_responses_kept_are_the_last_ones_and_their_tokens(
    requests: list[tuple[list[int], float]], cached: int
) -> None:
    """As many as are allowed (a negative number: all). What has been evicted is moved out before it is more than half,
    beyond a bound."""
    chosen = SuffixSettings(max_depth=8, max_cached_requests=cached)
    replay = SuffixReplay([lookup("suffix", gamma=3)], chosen)
    outputs: list[list[int]] = []
    before = suffix.COMPACT_ABOVE
    suffix.COMPACT_ABOVE = 20
    try:
        for text, share in requests:
            prompt_len = prompt_of(text, share)
            replay.replay(np.array(text, dtype=np.int32), prompt_len)
            outputs.append(text[prompt_len:])
            kept = outputs if cached < 0 else outputs[-cached:]
            found = [
                replay._responses[start : start + length].tolist()
                for start, length in replay._live
            ]
            assert found == kept
            assert replay._num_response_tokens <= len(replay._responses)
            earlier = replay._num_response_tokens - len(kept[-1])
            dead = replay._live[0][0]
            assert dead <= max(20, earlier // 2)
    finally:
        suffix.COMPACT_ABOVE = before


@given(requests=requests, more=st.integers(2, 12), gamma=st.integers(1, 6))
def test_suffix_drafts_end_before_the_engines_longest_sequence(
    requests: list[tuple[list[int], float]], more: int, gamma: int
) -> None:
    """As plain counts of every sequence have it; none is drafted that would be the last token or stand beyond it."""
    chosen = SuffixSettings(max_depth=8, max_cached_requests=10, max_factor=1.5)
    replay = SuffixReplay([lookup("suffix", gamma=gamma)], chosen)
    plain = PlainSuffix(depth=8, factor=1.5, least=0.1, cached=10)
    for text, share in requests:
        prompt_len = prompt_of(text, share)
        most = len(text) - 1 + more
        (steps,) = replay.steps(
            np.array(text, dtype=np.int32), prompt_len, max_len=most
        )
        found = [tuple(step) for step in steps.tolist()]
        assert found == plain.steps(text, prompt_len, gamma, most)
        assert all(place + drafted + 2 <= most for place, drafted, _ in found if drafted)  # fmt: skip


@pytest.mark.parametrize("rule", ["ngram", "ngram-gpu", "llama.cpp"])
def test_the_bounds_of_settings(rule: str) -> None:
    """Drafts and n-grams of 1 to 64 tokens."""
    assert lookup(rule, gamma=64, min_ngram=64, max_ngram=64).max_ngram == 64
    assert lookup(rule, gamma=1, min_ngram=1, max_ngram=1).min_ngram == 1
    for gamma, low, high in ((0, 1, 2), (65, 1, 2), (1, 0, 2), (1, 1, 65), (1, 3, 2)):
        with pytest.raises(ConfigError, match="1 to 64 tokens"):
            lookup(rule, gamma=gamma, min_ngram=low, max_ngram=high)


# Counts


@st.composite
def replayed(draw: st.DrawFn) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
    """Requests: the text's length, the prompt's, and steps (place, drafted, accepted)."""
    found = []
    for _ in range(draw(st.integers(1, 5))):
        prompt_len = draw(st.sampled_from([1, 60, 127, 128, 200]))
        text_len = prompt_len + draw(st.integers(1, 90))
        place = prompt_len
        steps = []
        while place < text_len - 1:
            drafted = draw(st.integers(0, 4))
            accepted = draw(st.integers(0, min(drafted, text_len - 1 - place)))
            steps.append((place, drafted, accepted))
            place += accepted + 1
        found.append((text_len, prompt_len, steps))
    return found


def counted(found: list[tuple[int, int, list[tuple[int, int, int]]]]) -> Tally:
    tally = Tally.empty([lookup("ngram", gamma=3)])
    for text_len, prompt_len, steps in found:
        table = np.array(steps, dtype=np.int32).reshape(1, -1, 3)
        counts = np.array([len(steps)])
        tally.add(table, counts, text_len=text_len, prompt_len=prompt_len)
    return tally


def error_of(parts: list[int], wholes: list[int]) -> Fraction:
    """The squared standard error of a ratio of sums over clusters."""
    ratio = Fraction(sum(parts), sum(wholes))
    spread = sum((a - ratio * n) ** 2 for a, n in zip(parts, wholes, strict=True))
    count = len(parts)
    return Fraction(count, count - 1) * spread / sum(wholes) ** 2


@given(found=replayed())
def test_counts_are_of_every_step(
    found: list[tuple[int, int, list[tuple[int, int, int]]]],
) -> None:
    """A step emits what it accepted and one more, as far as the log goes; what an engine may have accepted beyond its
    end is counted apart."""
    setting = counted(found).of(0)
    every = [
        (text_len - 1 - place, place, place + 1 - prompt_len, drafted, accepted)
        for text_len, prompt_len, steps in found
        for place, drafted, accepted in steps
    ]
    emitted = [min(accepted + 1, left) for left, _, _, _, accepted in every]
    assert setting.num_requests == len(found)
    assert setting.num_steps == len(every)
    assert setting.totals[columns.EMITTED] == sum(emitted)
    assert setting.drafts == sum(drafted > 0 for *_, drafted, _ in every)
    assert setting.drafted_tokens == sum(drafted for *_, drafted, _ in every)
    steps = max(len(every), 1)
    assert setting.drafted_share == setting.drafts / steps
    assert setting.drafted_per_step == setting.drafted_tokens / steps
    beyond = sum(
        drafted - accepted for left, *_, drafted, accepted in every if accepted == left
    )
    seen = sum(min(accepted, 3) for *_, accepted in every)
    assert setting.positions[:, columns.ACCEPTED].sum() == seen
    assert setting.totals[columns.OPEN_DRAFTED] == beyond
    for bounds, table, column in (
        (CONTEXT_BOUNDS, setting.by_context, 1),
        (OUTPUT_BOUNDS, setting.by_output, 2),
    ):
        for number, row in enumerate(table.tolist()):
            low = 0 if number == 0 else int(bounds[number - 1])
            high = int(bounds[number]) if number < len(bounds) else math.inf
            at = [
                place + 1 if column == 1 else output for _, place, output, _, _ in every
            ]
            inside = [low < where <= high for where in at]
            assert row[0] == sum(inside)
            assert row[3] == sum(
                tokens for tokens, is_in in zip(emitted, inside, strict=True) if is_in
            )


@given(found=replayed())
def test_errors_are_those_of_ratios_over_requests(
    found: list[tuple[int, int, list[tuple[int, int, int]]]],
) -> None:
    """In exact fractions; a rate is no surer than of independent trials, and one request tells no error."""
    setting = counted(found).of(0)
    own = [
        [(text_len - 1 - place, accepted) for place, _, accepted in steps]
        for text_len, _, steps in found
    ]
    emitted = [sum(min(acc + 1, left) for left, acc in steps) for steps in own]
    number = [len(steps) for steps in own]
    tokens = setting.tokens_per_step
    if not sum(number):
        assert (tokens.value, tokens.stderr) == (0.0, None)
        assert setting.requests_for(0.05) is None
        return
    assert tokens.value == pytest.approx(sum(emitted) / sum(number))
    assert tokens.trials == sum(number)
    if len(found) < 2:
        assert tokens.stderr is None
        assert setting.requests_for(0.05) is None
        return
    squared = error_of(emitted, number)
    assert tokens.stderr == pytest.approx(math.sqrt(squared), abs=1e-9)
    needed = setting.requests_for(0.1)
    assert needed is not None
    enough = Fraction(len(found)) * squared * Fraction(1.959963984540054 / 0.1) ** 2
    enough /= Fraction(sum(emitted), sum(number)) ** 2
    assert needed - 1.001 <= enough <= needed + 0.001
    for position, rate in enumerate(setting.rates):
        tried = [
            sum(accepted >= position and left > position for left, accepted in steps)
            for steps in own
        ]
        right = [sum(accepted > position for _, accepted in steps) for steps in own]
        assert rate.value == pytest.approx(sum(right) / sum(tried))
        assert rate.stderr is not None
        assert rate.stderr >= math.sqrt(error_of(right, tried)) * (1 - 1e-9) - 1e-12


# A prefix cache


class PlainCache:
    """Beginnings of texts in whole blocks, the least recently used first."""

    def __init__(self, size: int, room: int) -> None:
        self.size = size
        self.room = room
        self.kept: list[tuple[int, ...]] = []

    def beginnings(self, text: list[int]) -> list[tuple[int, ...]]:
        count = len(text) // self.size
        return [tuple(text[: self.size * (end + 1)]) for end in range(count)]

    def use(self, beginning: tuple[int, ...]) -> None:
        self.kept = [*(each for each in self.kept if each != beginning), beginning]

    def shared(self, text: list[int]) -> int:
        for number, beginning in enumerate(self.beginnings(text)):
            if beginning not in self.kept:
                return number * self.size
            self.use(beginning)
        return len(self.beginnings(text)) * self.size

    def add(self, text: list[int]) -> None:
        for beginning in self.beginnings(text):
            self.use(beginning)
        self.kept = self.kept[-self.room :]


@given(
    used=st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 1), max_size=12)), max_size=20
    ),
    size=st.sampled_from([1, 2, 4]),
    room_tokens=st.integers(1, 40),
)
def test_a_cache_keeps_the_blocks_that_were_used_last(
    used: list[tuple[bool, list[int]]], size: int, room_tokens: int
) -> None:
    cache = PrefixCache(block_tokens=size, room_tokens=room_tokens)
    plain = PlainCache(size, max(room_tokens // size, 1))
    for is_added, text in used:
        tokens = np.array(text, dtype=np.int32)
        assert cache.shared_tokens(tokens) == plain.shared(text)
        if is_added:
            cache.add(tokens)
            plain.add(text)
