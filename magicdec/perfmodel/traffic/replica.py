"""One replica's scheduler, iteration by iteration, as vLLM does it.

    each iteration    gamma + 1 tokens of every sequence that decodes, then chunks of prompts, first come first served,
                      up to `max_tokens` together; a prompt enters while there are a slot and room for all of it
    no room           for the next tokens: the last that entered goes back to the head of the queue, and begins again
                      with the tokens that it has as its prompt
    ends              a prompt's last chunk emits a first token, a step one and the drafts that it accepts

Iterations in which nothing can change (no arrival that could enter, no end, room for all) run in a short loop over
three numbers; without drafts it has no arrays. An engine that does not mix prompts with decoding runs passes of prompts
alone, whole ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.traffic.costs import Costs, Drafts
from magicdec.perfmodel.traffic.requests import Requests, Whole
from magicdec.specs.gamma_table import TableGamma


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The scheduler's settings."""

    max_sequences: int
    max_tokens: int
    num_blocks: int
    block_size: int = 16
    reserves_output: bool = False
    """Whether a request enters only with room for all its tokens."""
    schedules_ahead: bool = False
    """Whether a step is scheduled while the one before it runs: what comes then waits for both."""
    latency_s: float = 0.0
    """From a client to the scheduler, and from the first token back."""
    token_latency_s: float = 0.0
    """Per token of the prompt on that way."""


class Replica:
    """One replica at work. `first_s` and `last_s` are when a request's first and last token came."""

    def __init__(
        self, requests: Requests, costs: Costs, limits: Limits, *, policy: TableGamma | None = None,
        drafts: Drafts | None = None, seed: int = 0, users: int | None = None,
    ) -> None:  # fmt: skip
        """With `users`, a closed loop: so many requests at first, and the next whenever one ends."""
        self.requests, self.costs, self.limits, self.drafts = requests, costs, limits, drafts
        self.policy = policy if drafts is not None else None
        count, slots = len(requests), limits.max_sequences
        self.first_s, self.last_s = np.full(count, np.nan), np.full(count, np.nan)
        self.known = requests.prompt_len.copy()
        """Tokens to compute before a request decodes: its prompt, and what it had emitted when it was preempted."""
        self.emitted = np.zeros(count, dtype=np.int64)
        self.random = np.random.default_rng(seed)
        self.kinds = self.random.integers(0, 2**31, count)
        self.now = self.began = 0.0
        """Now, and when the last iteration began."""
        self.coming: list[tuple[float, int]] = []
        """On their way, the next first."""
        self.queue: deque[int] = deque()
        self.users = users
        self.part: tuple[int, int] | None = None
        """The request whose prompt is being computed, and its tokens so far."""
        self.n = 0
        self.ids, self.context, self.left = (np.zeros(slots, dtype=np.int64) for _ in range(3))
        self.held = 0
        """Blocks of those that decode."""
        self.preemptions = self.iterations = 0
        self.timeline: list[tuple[float, int, int, int]] = []
        """(time, requests that decode or are prefilled, waiting, blocks in use), at each change."""
        self._rows: dict[int, tuple[list[float], tuple[int, ...]]] = {}

    @property
    def in_system(self) -> int:
        return self.n + len(self.queue) + len(self.coming) + (self.part is not None)

    def submit(self, request: int, sent_s: float) -> None:
        """A request that a client sends at this time."""
        limits = self.limits
        latency = limits.latency_s + limits.token_latency_s * float(self.requests.prompt_len[request])
        heappush(self.coming, (sent_s + latency, request))

    def run(self, until: float = float("inf")) -> None:
        """Every iteration that begins before `until`."""
        while True:
            is_busy = bool(self.n or self.queue or self.part)
            seen = self.began if is_busy and self.limits.schedules_ahead else self.now
            while self.coming and self.coming[0][0] <= seen:
                self.queue.append(heappop(self.coming)[1])
            if not (is_busy or self.queue):
                if not self.coming or self.coming[0][0] >= until:
                    return
                self.now = self.coming[0][0]
                continue
            if self.now >= until:
                return
            self._iterate(until)

    def _iterate(self, until: float) -> None:
        gamma = self._gamma()
        free = self._make_room(gamma)
        chunks, free = self._chunks(gamma, free)
        self.timeline.append((
            self.now, self.n + len(chunks), len(self.queue), self.limits.num_blocks - free,
        ))  # fmt: skip
        if chunks:
            self._with_prompts(chunks, gamma)
        elif gamma:
            self._draft(until, gamma, free)
        else:
            self._decode(until, free)

    # What runs next

    def _gamma(self, mean: float | None = None) -> int:
        """The policy's choice, for a mean context that is known already."""
        if self.policy is None or not self.n:
            return 0
        if self.n not in self._rows:
            contexts = self.policy.context_lens
            edges = [(low * high) ** 0.5 for low, high in pairwise(contexts)]
            chosen = tuple(self.policy.choose(batch_size=self.n, context_len=each) for each in contexts)
            self._rows[self.n] = edges, chosen
        edges, chosen = self._rows[self.n]
        if not edges:
            return chosen[0]
        return chosen[bisect_right(edges, self._mean() if mean is None else mean)]

    def _mean(self) -> float:
        """Tokens that a sequence holds, on average."""
        return int(np.add.reduce(self.context[: self.n])) / self.n

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def _make_room(self, gamma: int) -> int:
        """Gives those that decode the blocks of their next step, where need be by preempting the last; the blocks that
        are left."""
        size = self.limits.block_size
        while True:
            self.held = int(np.add.reduce((self.context[: self.n] + (gamma + size)) // size))
            part = self._blocks(self._final(self.part[0])) if self.part else 0
            if (free := self.limits.num_blocks - self.held - part) >= 0:
                return free
            self.preemptions += 1
            if self.part is not None:
                self.queue.appendleft(self.part[0])
                self.part = None
                continue
            self.n -= 1
            last = int(self.ids[self.n])
            self.known[last] = self.requests.prompt_len[last] + self.emitted[last]
            self.queue.appendleft(last)

    def _final(self, request: int) -> int:
        """Tokens that a request must find room for to enter."""
        whole = self.requests.prompt_len[request] + self.requests.output_len[request]
        return int(whole if self.limits.reserves_output else self.known[request])

    def _chunks(self, gamma: int, free: int) -> tuple[list[tuple[int, int, int]], int]:
        """The (request, start, end) of the prompts in this pass, and the blocks that are left."""
        found: list[tuple[int, int, int]] = []
        room = self.limits.max_tokens - self.n * (gamma + 1) if self.costs.mixes else self.limits.max_tokens
        if self.part is not None and room > 0:
            request, start = self.part
            end = min(int(self.known[request]), start + room)
            found.append((request, start, end))
            room -= end - start
        while self.queue and room > 0 and self.n + len(found) < self.limits.max_sequences:
            request = self.queue[0]
            need = self._blocks(self._final(request))
            if need > free:
                break
            self.queue.popleft()
            free -= need
            start = int(min(self.requests.cached_len[request], self.known[request] - 1))
            end = int(self.known[request]) if not self.costs.mixes else min(int(self.known[request]), start + room)
            found.append((request, start, end))
            room -= end - start
        return found, free

    # One iteration

    def _with_prompts(self, chunks: list[tuple[int, int, int]], gamma: int) -> None:
        starts, ends = [each[1] for each in chunks], [each[2] for each in chunks]
        decodes = self.n > 0 and self.costs.mixes
        mean = self._mean() if decodes else float(ends[0])
        taken = self.n * (gamma + 1) if decodes else 1
        self.began = self.now
        alone = self.costs.step_s(gamma if decodes else 0, self.n if decodes else 1, mean)
        entering = len(chunks) - (self.part is not None)
        self.now += self.costs.chunks_s(taken, starts, ends, entering) + (alone if self.costs.mixes else 0.0)
        self.iterations += 1
        if decodes:
            self._emit(self._accepted(gamma) if gamma else 1)
        self.part = None
        for request, _, end in chunks:
            if end < self.known[request]:
                self.part = request, end
                continue
            if np.isnan(self.first_s[request]):
                self.first_s[request] = self.now
            self.emitted[request] += 1
            if (left := int(self.requests.output_len[request] - self.emitted[request])) <= 0:
                self._finish(request)
                continue
            self.ids[self.n], self.left[self.n] = request, left
            self.context[self.n] = self.known[request] + 1
            self.n += 1

    def _accepted(self, gamma: int) -> Whole:
        """Tokens that each sequence emits in a step."""
        emitted: Whole = np.add.reduce(self.random.random(self.n) < self._survivors(gamma), axis=0, dtype=np.int64) + 1
        return emitted

    def _survivors(self, gamma: int) -> Array:
        assert self.drafts is not None
        kinds = self.kinds[self.ids[: self.n]] % self.drafts.survivors[gamma].shape[1]
        return self.drafts.of_requests(gamma, kinds, self.context[: self.n])

    def _emit(self, count: Whole | int) -> None:
        n = self.n
        self.left[:n] -= count
        self.context[:n] += count
        self.emitted[self.ids[:n]] += count
        self._end()

    def _end(self) -> None:
        """Takes out those that have all their tokens; a last step's tokens beyond them are dropped."""
        n = self.n
        if n and np.minimum.reduce(self.left[:n]) <= 0:
            ended = self.left[:n] <= 0
            for request in self.ids[:n][ended].tolist():
                self._finish(request)
            self.n = int(n - ended.sum())
            for values in (self.ids, self.context, self.left):
                values[: self.n] = values[:n][~ended]

    def _finish(self, request: int) -> None:
        self.last_s[request] = self.now
        self.emitted[request] = self.requests.output_len[request]
        if self.users is not None and self.users < len(self.requests):
            self.requests.arrival_s[self.users] = self.now
            self.submit(self.users, self.now)
            self.users += 1

    # Many iterations in which nothing else changes

    def _quiet(self, until: float, free: int, tokens: int) -> tuple[float, int]:
        """When these end at the latest, and how many have room in the cache whatever is accepted."""
        blocked = bool(self.queue)
        stop = until if blocked or not self.coming else min(until, self.coming[0][0])
        return stop, max((free // self.n - 1) * self.limits.block_size // tokens, 1)

    def _decode(self, until: float, free: int) -> None:
        """Without drafts: until the first ends, an arrival, or no room."""
        n = self.n
        stop, most = self._quiet(until, free, 1)
        most = min(int(self.left[:n].min()), most)
        at, row, mean, now = self.costs.contexts, self.costs.row(0, n), self._mean(), self.now
        last, count = len(at) - 2, 0
        place = min(max(bisect_right(at, mean) - 1, 0), max(last, 0))
        while count < most and (now < stop or not count):
            self.began = now
            while place < last and mean >= at[place + 1]:
                place += 1
            if last < 0:
                now += row[0]
            else:
                share = (mean - at[place]) / (at[place + 1] - at[place])
                now += row[place] + min(max(share, 0.0), 1.0) * (row[place + 1] - row[place])
            mean += 1.0
            count += 1
        self.now = now
        self.iterations += count
        self._emit(count)

    def _draft(self, until: float, gamma: int, free: int) -> None:
        """With drafts: until one ends, an arrival, no room, or another gamma."""
        n, costs = self.n, self.costs
        stop, most = self._quiet(until, free, gamma + 1)
        survivors, ids = self._survivors(gamma), self.ids[:n]
        context, left = self.context[:n], self.left[:n]
        before, count, total = context.copy(), 0, int(context.sum())
        while count < most and (self.now < stop or not count):
            self.began = self.now
            self.now += costs.step_s(gamma, n, total / n)
            emitted = np.add.reduce(self.random.random(n) < survivors, axis=0, dtype=np.int64) + 1
            context += emitted
            left -= emitted
            total += int(np.add.reduce(emitted))
            count += 1
            if np.minimum.reduce(left) <= 0 or self._gamma(total / n) != gamma:
                break
        self.emitted[ids] += context - before
        self.iterations += count
        self._end()
