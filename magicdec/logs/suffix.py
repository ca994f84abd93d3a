"""Replays of suffix decoding over logged requests, by the trees of magicdec/suffix_tree.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numba
import numpy as np
import numpy.typing as npt

from magicdec.logs.lookups import Lookup
from magicdec.logs.ngram import Ints, Steps
from magicdec.suffix_tree import (
    NUM_ACTIVE,
    SuffixSettings,
    append,
    bucket_size,
    clear,
    most_nodes,
    new_tree,
    refer,
    remove,
    speculate,
    with_room,
)

COMPACT_ABOVE = 1 << 20
"""Tokens of evicted responses that are kept before the rest is moved together."""


class SuffixReplay:
    """Replays requests in their order under several gammas; the tree of responses lasts from one to
    the next."""

    def __init__(
        self, lookups: Sequence[Lookup], settings: SuffixSettings | None = None
    ) -> None:
        self.lookups = tuple(lookups)
        self.settings = settings or SuffixSettings()
        self._gammas = np.array([row.gamma for row in lookups], dtype=np.int32)
        cached = self.settings.max_cached_requests
        self._is_global = np.array(
            [row.rule == "suffix" and cached != 0 for row in lookups]
        )
        self._has_global = bool(self._is_global.any())
        self._local = new_tree(1024, self.settings.max_depth)
        self._global = new_tree(1024, self.settings.max_depth)
        self._responses: Ints = np.zeros(1024, dtype=np.int32)
        self._num_response_tokens = 0
        self._live: deque[tuple[int, int]] = deque()
        self._steps = np.zeros((len(lookups), 0, 3), dtype=np.int32)

    def replay(
        self,
        text: Ints,
        prompt_len: int,
        *,
        max_len: int = 0,
    ) -> tuple[Steps, npt.NDArray[np.int64]]:
        """Return the steps of one request, [settings, steps, 3], and how many each setting has;
        both are valid until the next call."""
        output_len = len(text) - prompt_len
        depth = self.settings.max_depth
        num_nodes = most_nodes(len(text))
        if num_nodes > len(self._local.nodes):
            self._local = new_tree(2 * num_nodes, self.settings.max_depth)
        clear(self._local, bucket_size(num_nodes))
        start = self._num_response_tokens
        if self._has_global:
            self._prepare_global(output_len)
            start = self._num_response_tokens
        if output_len > self._steps.shape[1]:
            self._steps = np.zeros(
                (len(self.lookups), 2 * output_len, 3), dtype=np.int32
            )
        counts = replay(
            text,
            prompt_len,
            self._gammas,
            self._is_global,
            self._local,
            self._global,
            self._responses,
            start,
            np.float32(self.settings.max_factor),
            np.float32(self.settings.min_probability),
            depth,
            max_len,
            self._has_global,
            self._steps,
        )
        if self._has_global:
            self._live.append((start, output_len))
            self._num_response_tokens = start + output_len
        return self._steps, counts

    def steps(self, text: Ints, prompt_len: int, *, max_len: int = 0) -> list[Steps]:
        """Return each setting's steps on one request; valid until the next call."""
        steps, counts = self.replay(text, prompt_len, max_len=max_len)
        return [
            rows[:count] for rows, count in zip(steps, counts.tolist(), strict=True)
        ]

    def _prepare_global(self, output_len: int) -> None:
        """Make room for one more response, and drop the oldest where there are too many."""
        limit = self.settings.max_cached_requests
        while limit >= 0 and len(self._live) + 1 > limit:
            start, length = self._live.popleft()
            remove(self._global, self._responses, start, start + length)
        # compact when evicted responses hold more than half as many tokens as there are
        dead = self._live[0][0] if self._live else self._num_response_tokens
        if dead > max(COMPACT_ABOVE, self._num_response_tokens // 2):
            self._compact()
        needed = self._num_response_tokens + output_len
        if needed > len(self._responses):
            more = np.zeros(2 * needed - len(self._responses), dtype=np.int32)
            self._responses = np.concatenate([self._responses, more])
        self._global = with_room(self._global, most_nodes(output_len))
        self._global.state[NUM_ACTIVE] = 0

    def _compact(self) -> None:
        """Move the live responses to the front; every edge then refers to one of them."""
        live_tokens = sum(length for _, length in self._live)
        moved = np.zeros(2 * live_tokens, dtype=np.int32)
        place = 0
        live: deque[tuple[int, int]] = deque()
        for start, length in self._live:
            moved[place : place + length] = self._responses[start : start + length]
            refer(
                self._global,
                moved,
                place,
                place + length,
                self.settings.max_depth,
            )
            live.append((place, length))
            place += length
        self._responses = moved
        self._live = live
        self._num_response_tokens = place


@numba.njit(cache=True, nogil=True)
def _num_accepted(draft, drafted, text, place):
    """Drafted tokens that are those emitted after `place`, as far as the text goes."""
    most = min(drafted, len(text) - 1 - place)
    accepted = 0
    while accepted < most and draft[accepted] == text[place + accepted + 1]:
        accepted += 1
    return accepted


@numba.njit(cache=True, nogil=True)
def replay(
    text,
    prompt_len,
    gammas,
    is_global,
    local,
    responses_tree,
    responses,
    response_start,
    factor,
    min_probability,
    max_depth,
    max_len,
    has_global,
    steps,
):
    """Fill `steps`, [settings, steps, 3], and return how many each setting has."""
    num_settings = len(gammas)
    counts = np.zeros(num_settings, np.int64)
    cursors = np.full(num_settings, prompt_len)
    most = gammas.max()
    scratch = np.zeros(most, np.int32)
    own = np.zeros(most, np.int32)
    other = np.zeros(most, np.int32)
    end = len(text) - 1
    for place in range(end + 1):
        append(local, text, place, max_depth)
        if place < prompt_len:
            continue
        if has_global:
            response_place = response_start + place - prompt_len
            responses[response_place] = text[place]
            append(responses_tree, responses, response_place, max_depth)
        if place == end:
            break
        for number in range(num_settings):
            if cursors[number] != place:
                continue
            room = gammas[number]
            if max_len > 0:
                room = min(room, max_len - place - 2)
            drafted, score = speculate(
                local,
                text,
                text,
                place,
                place + 1,
                room,
                factor,
                min_probability,
                max_depth,
                scratch,
                own,
            )
            draft = own
            if is_global[number]:
                of_others, others_score = speculate(
                    responses_tree,
                    responses,
                    text,
                    place,
                    place + 1 - prompt_len,
                    room,
                    factor,
                    min_probability,
                    max_depth,
                    scratch,
                    other,
                )
                if others_score > score:
                    draft = other
                    drafted = of_others
            accepted = _num_accepted(draft, drafted, text, place)
            step = counts[number]
            steps[number, step, 0] = place
            steps[number, step, 1] = drafted
            steps[number, step, 2] = accepted
            counts[number] = step + 1
            cursors[number] = place + accepted + 1
    return counts
