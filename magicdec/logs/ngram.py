"""Replays of n-gram look-ups: every setting's steps on one request, from one index of its text.

The index is a hash table of the n-grams of each length in use. An entry holds the first, the last
and the last but one place where its n-gram ended, so the earliest and the latest earlier place are
found in constant time. Places are compared token by token, so a hash collision does no harm. All
settings share the index: each has a cursor, the token at which its next step begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from magicdec.logs.lookups import Lookup

Ints = npt.NDArray[np.int32]
Steps = npt.NDArray[np.int32]
"""Steps of one setting on one request, [steps, 3]: index in the text of the last token emitted
before the step, drafted tokens, accepted tokens as far as the log goes."""

NGRAM, NGRAM_GPU, LLAMA = range(3)
CODES = {
    "ngram": NGRAM,
    "ngram-gpu": NGRAM_GPU,
    "llama.cpp": LLAMA,
}
BASE = np.uint64(0x9E3779B97F4A7C15)
LENGTH_SALT = np.uint64(0xC2B2AE3D27D4EB4F)
TOKEN_SALT = np.uint64(0x632BE59BD9B4E019)
NO_PLACE = -1


class Index(NamedTuple):
    """A hash table of n-grams. Entries of earlier requests have another stamp and count as
    empty."""

    stamp: Ints
    length: Ints
    first: Ints
    """Index of the n-gram's last token at its first place."""
    last: Ints
    before_last: Ints


def new_index(num_entries: int) -> Index:
    """Return an empty table for at most `num_entries` n-grams."""
    size = 1 << max(2 * num_entries - 1, 15).bit_length()
    return Index(*(np.zeros(size, dtype=np.int32) for _ in Index._fields))


class NgramReplay:
    """Replays requests under many n-gram settings at once; the requests share its memory."""

    def __init__(self, lookups: Sequence[Lookup]) -> None:
        self.lookups = tuple(lookups)
        settings = []
        lengths: set[int] = set()
        for row in lookups:
            settings.append((CODES[row.rule], row.gamma, row.min_ngram, row.max_ngram))
            shortest = row.min_ngram
            if row.rule == "llama.cpp":
                shortest = row.max_ngram
            lengths.update(range(shortest, row.max_ngram + 1))
        self._settings = np.array(settings, dtype=np.int32)
        self._lengths = np.array(sorted(lengths), dtype=np.int32)
        self._index = new_index(1)
        self._stamp = 0
        self._steps = np.zeros((len(lookups), 0, 3), dtype=np.int32)

    def replay(
        self,
        text: Ints,
        prompt_len: int,
        *,
        max_len: int = 0,
    ) -> tuple[Steps, npt.NDArray[np.int64]]:
        """Return the steps of one request, [settings, steps, 3], and how many each setting has.
        Both are valid until the next call.

        `text` is the prompt and the output, `max_len` the engine's longest sequence (0: any).
        """
        num_entries = len(text) * len(self._lengths)
        if 2 * num_entries > len(self._index.stamp):
            self._index = new_index(num_entries)
            self._stamp = 0
        output_len = len(text) - prompt_len
        if output_len > self._steps.shape[1]:
            self._steps = np.zeros(
                (len(self.lookups), 2 * output_len, 3), dtype=np.int32
            )
        self._stamp += 1
        cursors = np.full(len(self.lookups), prompt_len)
        counts = replay(
            text,
            cursors,
            self._settings,
            self._lengths,
            self._index,
            self._stamp,
            max_len,
            self._steps,
        )
        return self._steps, counts

    def steps(self, text: Ints, prompt_len: int, *, max_len: int = 0) -> list[Steps]:
        """Return each setting's steps on one request; valid until the next call."""
        steps, counts = self.replay(text, prompt_len, max_len=max_len)
        return [
            rows[:count] for rows, count in zip(steps, counts.tolist(), strict=True)
        ]


@numba.njit(cache=True, nogil=True)
def replay(text, cursors, settings, lengths, index, stamp, max_len, steps):
    """Fill `steps`, [settings, steps, 3], and return how many each setting has."""
    num_settings = len(settings)
    counts = np.zeros(num_settings, np.int64)
    longest = lengths[-1]
    first = np.full(longest + 1, NO_PLACE, np.int32)
    last = np.full(longest + 1, NO_PLACE, np.int32)
    before_last = np.full(longest + 1, NO_PLACE, np.int32)
    end = len(text) - 1
    for place in range(end):
        _enter(text, place, lengths, index, stamp, first, last, before_last)
        for number in range(num_settings):
            if cursors[number] != place:
                continue
            code, gamma, low, high = settings[number]
            if max_len > 0:
                gamma = min(gamma, max_len - place - 2)
            start, drafted = _draft(
                code, gamma, low, high, place, first, last, before_last
            )
            accepted = 0
            while accepted < drafted and place + accepted < end:
                source = start + accepted
                guess = text[source] if source <= place and start > 0 else text[place]
                if guess != text[place + accepted + 1]:
                    break
                accepted += 1
            step = counts[number]
            steps[number, step, 0] = place
            steps[number, step, 1] = drafted
            steps[number, step, 2] = accepted
            counts[number] = step + 1
            cursors[number] = place + accepted + 1
    return counts


@numba.njit(cache=True, nogil=True)
def _enter(text, place, lengths, index, stamp, first, last, before_last):
    """Enter the n-grams that end at `place`, and note where each ended earlier."""
    mask = np.uint64(len(index.stamp) - 1)
    hashed = np.uint64(0)
    behind = 0
    for number in range(len(lengths)):
        length = lengths[number]
        first[length] = NO_PLACE
        last[length] = NO_PLACE
        before_last[length] = NO_PLACE
        if length > place + 1:
            continue
        while behind < length:
            hashed = hashed * BASE + (np.uint64(text[place - behind]) ^ TOKEN_SALT)
            behind += 1
        key = hashed ^ (np.uint64(length) * LENGTH_SALT)
        key ^= key >> np.uint64(32)
        key *= BASE
        key ^= key >> np.uint64(29)
        slot = np.int64(key & mask)
        while index.stamp[slot] == stamp:
            if index.length[slot] == length and _same(
                text, index.first[slot], place, length
            ):
                break
            slot = np.int64((np.uint64(slot) + np.uint64(1)) & mask)
        if index.stamp[slot] == stamp:
            first[length] = index.first[slot]
            last[length] = index.last[slot]
            before_last[length] = index.before_last[slot]
            index.before_last[slot] = index.last[slot]
            index.last[slot] = place
        else:
            index.stamp[slot] = stamp
            index.length[slot] = length
            index.first[slot] = place
            index.last[slot] = place
            index.before_last[slot] = NO_PLACE


@numba.njit(cache=True, nogil=True)
def _same(text, one, other, length):
    """Whether the last `length` tokens up to two places are equal."""
    back = 0
    while back < length and text[one - back] == text[other - back]:
        back += 1
    return back == length


@numba.njit(cache=True, nogil=True)
def _draft(code, gamma, low, high, place, first, last, before_last):
    """Return where the draft begins in the text (0: nowhere) and how many tokens it has."""
    if gamma <= 0:
        return 0, 0
    if code == LLAMA:
        return _draft_of_llama(gamma, high, place, last, before_last)
    for length in range(high, low - 1, -1):
        if first[length] == NO_PLACE:
            continue
        if code == NGRAM_GPU:
            return last[length] + 1, gamma
        return first[length] + 1, min(gamma, place - first[length])
    if code == NGRAM_GPU:
        return 0, gamma
    return 0, 0


@numba.njit(cache=True, nogil=True)
def _draft_of_llama(gamma, length, place, last, before_last):
    """llama.cpp's ngram-simple: its history lacks the token just emitted."""
    if place <= length + gamma + 1:
        return 0, 0
    ended = last[length]
    if ended == place - 1:
        ended = before_last[length]
    if ended == NO_PLACE or ended - length + 1 <= 0:
        return 0, 0
    drafted = min(gamma, place - ended - 1)
    if drafted < length:
        return 0, 0
    return ended + 1, drafted
