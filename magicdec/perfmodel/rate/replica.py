"""One replica's scheduler, iteration by iteration, as vLLM does it.

    each iteration    gamma + 1 tokens of every sequence that decodes, then chunks of prompts, first come first served,
                      up to `max_tokens` together; a prompt enters while there are a slot and room
                      for all of it
    no room           for the next tokens: the last that entered goes back to the head of the queue, and begins again
                      with the tokens that it has as its prompt
    ends              a prompt's last chunk emits a first token, a step one and the drafts that it accepts

Iterations in which nothing can change (no arrival that could enter, no end, room for all) run
together: what they emit is drawn at once. An engine that does not mix prompts with decoding runs
passes of prompts alone, whole ones. With data-parallel groups and microbatches, each has
`max_tokens` of its own: a prompt goes where most are left.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from magicdec.counts import Array
from magicdec.errors import CapacityError
from magicdec.perfmodel.rate.costs import Costs, Drafts
from magicdec.perfmodel.rate.requests import Requests, Whole
from magicdec.schema.gamma_table import TableGamma

MOST_DRAWN = 256
"""Steps that are drawn at once."""
DRAWN_PER_PASS = 4096
"""Random numbers that take as long as a pass."""
MOST_WORK = 20_000_000
"""Passes of one simulation that nothing else bounds: a quarter of an hour of one core."""
Chunk = tuple[int, int, int, int]
"""A request, its tokens before and after a pass, and the group that computes them."""


class PassLimit:
    """A bound on the passes of all schedulers that one question simulates."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.left = most

    @property
    def is_spent(self) -> bool:
        return self.left < 0

    def spend(self, drawn: int = 0) -> None:
        """Counts a pass, and what it draws. Raises CapacityError beyond the bound."""
        self.left -= 1 + drawn // DRAWN_PER_PASS
        if self.left < 0:
            raise CapacityError(
                f"simulating these requests takes more than {self.most} passes of a scheduler; "
                "give fewer or shorter requests, or more limits"
            )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The scheduler's settings."""

    max_sequences: int
    max_tokens: int
    """Tokens of a pass, of each group."""
    num_blocks: int
    block_size: int
    reserves_output: bool
    """Whether a request enters only with room for all its tokens."""
    schedules_ahead: bool
    """Whether a step is scheduled while the one before it runs: what comes then waits for both."""
    latency_s: float
    """From a client to the scheduler, and from the first token back."""
    token_latency_s: float
    """Per token of the prompt on that way."""
    elsewhere_s: Callable[[Any, Any], Array] | None = None
    """Time of prompts, of which so many tokens are cached, before they come prefilled from elsewhere;
    None: they are prefilled here.
    """


class Replica:
    """One replica at work. `first_s` and `last_s` are when a request's first and last token
    came."""

    def __init__(
        self,
        requests: Requests,
        costs: Costs,
        limits: Limits,
        *,
        policy: TableGamma | None = None,
        drafts: Drafts | None = None,
        seed: int = 0,
        users: int | None = None,
        work: PassLimit | None = None,
    ) -> None:
        """With `users`, a closed loop: that many requests at first, and the next whenever one
        ends."""
        self.work = work or PassLimit(MOST_WORK)
        self.requests = requests
        self.costs = costs
        self.limits = limits
        self.drafts = drafts
        self.policy = policy
        if drafts is None:
            self.policy = None
        count = len(requests)
        slots = limits.max_sequences
        self.first_s = np.full(count, np.nan)
        self.last_s = np.full(count, np.nan)
        self.output: list[int] = requests.output_len.tolist()
        self.cached: list[int] = requests.cached_len.tolist()
        self.known: list[int] = requests.prompt_len.tolist()
        """Tokens to compute before a request decodes: its prompt, and what it had emitted when it
        was preempted.
        """
        self.emitted = [0] * count
        """Tokens emitted by requests that do not decode now."""
        self.lag = [0.0] * count
        """Time by which a request's tokens leave the last stage after the others' of its round, as
        its prompt did.
        """
        self.random = np.random.default_rng(seed)
        kinds = self.random.integers(0, 2**31, count)
        if drafts is not None:
            kinds %= drafts.num_classes
        self.kinds: list[int] = kinds.tolist()
        self.before_s = np.zeros(count)
        """Time of each prompt elsewhere, and of its keys and values on their way."""
        if limits.elsewhere_s is not None:
            self.before_s = limits.elsewhere_s(requests.prompt_len, requests.cached_len)
            self.cached = requests.prompt_len.tolist()
        self.now = 0.0
        self.began = 0.0
        """When the last iteration began."""
        self.coming: list[tuple[float, int]] = []
        """On their way, the next first."""
        self.queue: deque[int] = deque()
        self.users = users
        self.parts: list[tuple[int, int, int]] = []
        """Requests whose prompts are being computed, their tokens so far, and by which group."""
        self.n = 0
        self.slots = np.zeros((4, slots), dtype=np.int64)
        self.ids, self.context, self.left, self.kind = self.slots
        self.total = 0
        """Tokens held by decoding requests."""
        self.held = 0
        """Blocks held by decoding requests."""
        self.preemptions = 0
        self.iterations = 0
        self.timeline: list[tuple[float, int, int, int]] = []
        """(time, requests that decode or are prefilled, waiting, blocks in use), at each change."""
        self._rows: dict[int, tuple[list[float], tuple[int, ...]]] = {}

    @property
    def in_system(self) -> int:
        return self.n + len(self.queue) + len(self.coming) + len(self.parts)

    def submit(self, request: int, sent_s: float) -> None:
        """A request that a client sends at this time."""
        limits = self.limits
        arrives_s = (
            sent_s + limits.latency_s + limits.token_latency_s * self.known[request]
        ) + float(self.before_s[request])
        heappush(self.coming, (arrives_s, request))

    def run(self, until: float = float("inf")) -> None:
        """Runs every iteration that begins before `until`."""
        while True:
            self._receive()
            if not (self.n or self.queue or self.parts):
                if not self.coming or self.coming[0][0] >= until:
                    return
                self.now = self.coming[0][0]
                continue
            if self.now >= until:
                return
            self._iterate(until)

    def _receive(self) -> None:
        """Puts the requests that have arrived into the queue. A busy server that schedules ahead
        sees those that arrived before its iteration began."""
        seen = self.now
        if self.limits.schedules_ahead and (self.n or self.queue or self.parts):
            seen = self.began
        while self.coming and self.coming[0][0] <= seen:
            self.queue.append(heappop(self.coming)[1])

    def _iterate(self, until: float) -> None:
        self.work.spend()
        gamma = self._gamma()
        free = self._make_room(gamma)
        chunks, free = self._chunks(gamma, free)
        running = self.n + len(chunks)
        used = self.limits.num_blocks - free
        self.timeline.append((self.now, running, len(self.queue), used))
        if chunks:
            self._with_prompts(chunks, gamma)
        else:
            self._decode(until, gamma, free)

    # What runs next

    def _gamma(self) -> int:
        """The policy's choice."""
        if self.policy is None or not self.n:
            return 0
        edges, chosen = self._choices()
        return chosen[bisect_right(edges, self._mean())]

    def _choices(self) -> tuple[list[float], tuple[int, ...]]:
        """The policy at so many sequences: the mean contexts between which gamma changes, and the
        gammas.
        """
        if self.n not in self._rows:
            assert self.policy is not None
            contexts = self.policy.context_lens
            edges = []
            chosen = [self.policy.choose(batch_size=self.n, context_len=contexts[0])]
            for low, high in pairwise(contexts):
                gamma = self.policy.choose(batch_size=self.n, context_len=high)
                if gamma != chosen[-1]:
                    edges.append((low * high) ** 0.5)
                    chosen.append(gamma)
            self._rows[self.n] = edges, tuple(chosen)
        return self._rows[self.n]

    def _mean(self) -> float:
        """Tokens that a sequence holds, on average."""
        return self.total / self.n

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def _make_room(self, gamma: int) -> int:
        """Gives those that decode the blocks of their next step, where need be by preempting the
        last; the blocks that are left."""
        size = self.limits.block_size
        while True:
            self.held = 0
            if self.n:
                blocks = (self.context[: self.n] + (gamma + size)) // size
                self.held = int(np.add.reduce(blocks))
            free = self.limits.num_blocks - self.held
            for request, _, _ in self.parts:
                free -= self._blocks(self._final(request))
            if free >= 0:
                return free
            self.preemptions += 1
            if self.parts:
                self.queue.appendleft(self.parts.pop()[0])
                continue
            self.n -= 1
            self.total -= int(self.context[self.n])
            last = int(self.ids[self.n])
            self.emitted[last] = self.output[last] - int(self.left[self.n])
            self.known[last] = int(self.requests.prompt_len[last]) + self.emitted[last]
            self.queue.appendleft(last)

    def _final(self, request: int) -> int:
        """Tokens that a request must find room for to enter."""
        known = self.known[request]
        if self.limits.reserves_output:
            return known + self.output[request] - self.emitted[request]
        return known

    def _chunks(self, gamma: int, free: int) -> tuple[list[Chunk], int]:
        """The prompts in this pass, and the blocks that are left."""
        if not (self.parts or self.queue):
            return [], free
        costs = self.costs
        chunks: list[Chunk] = []
        taken = 0
        if costs.mixes:
            taken = -(-self.n // costs.groups) * (gamma + 1)
        room = [self.limits.max_tokens - taken] * costs.groups
        for request, start, group in self.parts:
            if room[group] > 0:
                end = min(self.known[request], start + room[group])
                chunks.append((request, start, end, group))
                room[group] -= end - start
        slots = self.limits.max_sequences - self.n - len(self.parts)
        while self.queue and slots > 0:
            most = max(room)
            if most <= 0:
                break
            request = self.queue[0]
            need = self._blocks(self._final(request))
            if need > free:
                break
            self.queue.popleft()
            free -= need
            slots -= 1
            known = self.known[request]
            group = room.index(most)
            start = min(self.cached[request], known - 1)
            end = known
            if costs.mixes:
                end = min(known, start + most)
            chunks.append((request, start, end, group))
            room[group] -= end - start
        return chunks, free

    # One iteration

    def _with_prompts(self, chunks: list[Chunk], gamma: int) -> None:
        costs = self.costs
        n = self.n
        self.began = self.now
        decodes = n > 0 and costs.mixes
        decoding = 1
        if decodes:
            self.now += costs.step_s(gamma, n, self._mean())
            decoding = -(-n // costs.groups) * (gamma + 1)
        elif costs.mixes:
            self.now += costs.step_s(0, 1, float(chunks[0][2]))
        own = self._own_s(chunks, decoding)
        fullest_s = self._fullest_s(own, chunks, decoding)
        self.now += fullest_s / costs.stages
        self.iterations += 1
        if decodes:
            survivors = self._survivors(gamma)
            accepted: Any = 0
            if survivors is not None:
                accepted = self._accepted(survivors, 1)[0]
            self.context[:n] += accepted + 1
            self.left[:n] -= accepted + 1
            self.total = int(np.add.reduce(self.context[:n]))
            self._take_out(int(np.minimum.reduce(self.left[:n])))
        if self.parts:
            going = {request for request, *_ in chunks}
            self.parts = [part for part in self.parts if part[0] not in going]
        for request, _, end, group in chunks:
            if end < self.known[request]:
                self.parts.append((request, end, group))
            else:
                self._start_decoding(request, own[group])

    def _fullest_s(self, own: list[float], chunks: list[Chunk], decoding: int) -> float:
        """The longest time of the groups at each stage, and that of the experts that they share,
        added up.
        """
        per_stage = self.costs.groups // self.costs.stages
        added = [0] * self.costs.groups
        for _, start, end, group in chunks:
            added[group] += end - start
        total = 0.0
        for first in range(0, self.costs.groups, per_stage):
            last = first + per_stage
            mean = sum(added[first:last]) / per_stage
            shared_s = self.costs.experts_s(decoding, mean)
            total += max(own[first:last]) + shared_s
        return total

    def _start_decoding(self, request: int, prompt_s: float) -> None:
        """A request whose prompt is computed emits its first token."""
        self.lag[request] = prompt_s * (1.0 - 1.0 / self.costs.stages)
        if math.isnan(self.first_s[request]):
            self.first_s[request] = self.now + self.lag[request]
        self.emitted[request] += 1
        left = self.output[request] - self.emitted[request]
        if left <= 0:
            self._finish(request)
            return
        context = self.known[request] + 1
        place = self.n
        self.ids[place] = request
        self.context[place] = context
        self.left[place] = left
        self.kind[place] = self.kinds[request]
        self.total += context
        self.n += 1

    def _own_s(self, chunks: list[Chunk], decoding: int) -> list[float]:
        """The time of each group's prompts."""
        going = {request for request, *_ in self.parts}
        own = [0.0] * self.costs.groups
        for group in {chunk[3] for chunk in chunks}:
            starts = []
            ends = []
            entering = 0
            for request, start, end, of_chunk in chunks:
                if of_chunk == group:
                    starts.append(start)
                    ends.append(end)
                    entering += request not in going
            own[group] = self.costs.chunks_s(decoding, starts, ends, entering)
        return own

    def _survivors(self, gamma: int) -> Array | None:
        """The probabilities that each sequence accepts at least so many drafts: [i, n]; None where
        none are made.
        """
        if not gamma or self.drafts is None:
            return None
        n = self.n
        return self.drafts.of_requests(gamma, self.kind[:n], self.context[:n])

    def _take_out(self, fewest: int) -> None:
        """Ends the requests that have all their tokens, where the fewest that one lacks are none; a
        last step's tokens beyond them are dropped.
        """
        if fewest > 0:
            return
        goes_on = self.left[: self.n] > 0
        for request in self.ids[: self.n][~goes_on].tolist():
            self.emitted[request] = self.output[request]
            self._finish(request)
        going = goes_on.nonzero()[0]
        self.n = len(going)
        self.slots[:, : self.n] = self.slots.take(going, axis=1)
        self.total = int(np.add.reduce(self.context[: self.n]))

    def _finish(self, request: int) -> None:
        self.last_s[request] = sent_s = self.now + self.lag[request]
        if self.users is not None and self.users < len(self.requests):
            self.requests.arrival_s[self.users] = sent_s
            self.submit(self.users, sent_s)
            self.users += 1

    # Many iterations in which nothing else changes

    def _decode(self, until: float, gamma: int, free: int) -> None:
        """Until one ends, an arrival, no room in the cache whatever is accepted, or another
        gamma."""
        n = self.n
        stop = until
        if self.coming and not self.queue:
            stop = min(until, self.coming[0][0])
        row = self.costs.row(gamma, n)
        context = self.context[:n]
        left = self.left[:n]
        room = self._steps_of_room(gamma, free)
        survivors = self._survivors(gamma)
        per_step = 1.0
        if survivors is not None:
            per_step += float(np.add.reduce(survivors, axis=None)) / n
            # compared with rows of draws, many times
            survivors = np.ascontiguousarray(survivors)
        fewest = int(np.minimum.reduce(left))
        while True:
            likely = fewest
            if survivors is not None:
                likely = int(1.2 * fewest / per_step + 3)
            in_time = (stop - self.now) / row[0] + 2.0
            steps = max(int(min(room, likely, in_time, MOST_DRAWN)), 1)
            self.work.spend(steps * n * gamma)
            emitted, together = self._emitted(survivors, steps)
            means = (self.total + together) / n
            seconds = np.interp(means[:-1], self.costs.contexts, row)
            times = self.now + seconds.cumsum()
            taken = self._steps_until_change(emitted, means[1:], gamma)
            taken = min(taken, int(times.searchsorted(stop)) + 1)
            if taken > 1:
                self.began = float(times[taken - 2])
            else:
                self.began = self.now
            last = taken - 1
            self.now = float(times[last])
            self.iterations += taken
            context += emitted[last]
            left -= emitted[last]
            self.total += int(together[taken])
            room -= taken
            fewest = int(np.minimum.reduce(left))
            if room <= 0 or self.now >= stop:
                break
            if fewest <= 0 or self._gamma() != gamma:
                break
        self._take_out(fewest)

    def _steps_of_room(self, gamma: int, free: int) -> int:
        """Steps that the free blocks are enough for after the next one, whatever is accepted."""
        blocks = free // self.n - 1
        return blocks * self.limits.block_size // (gamma + 1)

    def _steps_until_change(self, emitted: Whole, means: Array, gamma: int) -> int:
        """Steps up to the first after which a request ends, or the policy takes another gamma; at
        most all of them.
        """
        taken = len(means)
        if emitted.ndim == 2:
            goes_on = np.logical_and.reduce(emitted < self.left[: self.n], axis=1)
            taken = min(taken, int(np.count_nonzero(goes_on)) + 1)
        if self.policy is None:
            return taken
        edges, chosen = self._choices()
        if edges:
            gammas = np.array(chosen)[np.searchsorted(edges, means, side="right")]
            is_other = gammas != gamma
            if is_other.any():
                taken = min(taken, int(is_other.argmax()) + 1)
        return taken

    def _emitted(self, survivors: Array | None, steps: int) -> tuple[Whole, Whole]:
        """Tokens of each sequence after each step, [steps (, n)], and of all together from before
        the first, [steps + 1]."""
        if survivors is None:
            steps_taken = np.arange(steps + 1)
            return steps_taken[1:], self.n * steps_taken
        accepted = self._accepted(survivors, steps)
        emitted = np.add.accumulate(accepted + 1, axis=0, dtype=np.int64)
        together = np.zeros(steps + 1, dtype=np.int64)
        together[1:] = np.add.reduce(emitted, axis=1)
        return emitted, together

    def _accepted(self, survivors: Array, steps: int) -> npt.NDArray[np.int16]:
        """Drafts that each sequence accepts in each step, drawn: [steps, n]."""
        is_accepted = self.random.random((steps, self.n)) < survivors[:, None]
        # [i, steps, n], and as bytes: whole rows are added at once
        ones = is_accepted.view(np.uint8)
        accepted: npt.NDArray[np.int16] = np.add.reduce(ones, axis=0, dtype=np.int16)
        return accepted
