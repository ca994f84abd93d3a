"""One replica's scheduler, iteration by iteration, as vLLM does it.

    each iteration    gamma + 1 tokens of every sequence that decodes, then chunks of prompts, first come first served,
                      up to `max_tokens` together; a prompt enters while there are a slot and room for all of it
    no room           for the next tokens: the last that entered goes back to the head of the queue, and begins again
                      with the tokens that it has as its prompt
    ends              a prompt's last chunk emits a first token, a step one and the drafts that it accepts

Iterations in which nothing can change (no arrival that could enter, no end, room for all) run together: what they emit
is drawn at once. An engine that does not mix prompts with decoding runs passes of prompts alone, whole ones. With
data-parallel groups and microbatches, each has `max_tokens` of its own: a prompt goes where most are left.
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

MOST_DRAWN = 256
"""Steps that are drawn at once."""
Chunk = tuple[int, int, int, int]
"""A request, its tokens before and after a pass, and the group that computes them."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The scheduler's settings."""

    max_sequences: int
    max_tokens: int
    """Tokens of a pass, of each group."""
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
        self.output: list[int] = requests.output_len.tolist()
        self.cached: list[int] = requests.cached_len.tolist()
        self.known: list[int] = requests.prompt_len.tolist()
        """Tokens to compute before a request decodes: its prompt, and what it had emitted when it was preempted."""
        self.emitted = [0] * count
        """Tokens of those that do not decode now."""
        self.lag = [0.0] * count
        """Time by which a request's tokens leave the last stage after the others' of its round, as its prompt did."""
        self.random = np.random.default_rng(seed)
        self.kinds = self.random.integers(0, 2**31, count)
        self.now = self.began = 0.0
        """Now, and when the last iteration began."""
        self.coming: list[tuple[float, int]] = []
        """On their way, the next first."""
        self.queue: deque[int] = deque()
        self.users = users
        self.parts: list[tuple[int, int, int]] = []
        """Requests whose prompts are being computed, their tokens so far, and by which group."""
        self.n = 0
        self.slots = np.zeros((3, slots), dtype=np.int64)
        self.ids, self.context, self.left = self.slots
        self.held = 0
        """Blocks of those that decode."""
        self.preemptions = self.iterations = 0
        self.timeline: list[tuple[float, int, int, int]] = []
        """(time, requests that decode or are prefilled, waiting, blocks in use), at each change."""
        self._rows: dict[int, tuple[list[float], tuple[int, ...]]] = {}

    @property
    def in_system(self) -> int:
        return self.n + len(self.queue) + len(self.coming) + len(self.parts)

    def submit(self, request: int, sent_s: float) -> None:
        """A request that a client sends at this time."""
        limits = self.limits
        heappush(self.coming, (sent_s + limits.latency_s + limits.token_latency_s * self.known[request], request))

    def run(self, until: float = float("inf")) -> None:
        """Every iteration that begins before `until`."""
        while True:
            is_busy = bool(self.n or self.queue or self.parts)
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
        else:
            self._decode(until, gamma, free)

    # What runs next

    def _gamma(self) -> int:
        """The policy's choice."""
        if self.policy is None or not self.n:
            return 0
        edges, chosen = self._choices()
        return chosen[bisect_right(edges, self._mean()) if edges else 0]

    def _choices(self) -> tuple[list[float], tuple[int, ...]]:
        """The policy at so many sequences: the mean contexts between which gamma changes, and the gammas."""
        if self.n not in self._rows:
            assert self.policy is not None
            contexts = self.policy.context_lens
            edges = [(low * high) ** 0.5 for low, high in pairwise(contexts)]
            chosen = tuple(self.policy.choose(batch_size=self.n, context_len=each) for each in contexts)
            self._rows[self.n] = edges, chosen
        return self._rows[self.n]

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
            parts = sum(self._blocks(self._final(request)) for request, _, _ in self.parts)
            if (free := self.limits.num_blocks - self.held - parts) >= 0:
                return free
            self.preemptions += 1
            if self.parts:
                self.queue.appendleft(self.parts.pop()[0])
                continue
            self.n -= 1
            last = int(self.ids[self.n])
            self.emitted[last] = self.output[last] - int(self.left[self.n])
            self.known[last] = int(self.requests.prompt_len[last]) + self.emitted[last]
            self.queue.appendleft(last)

    def _final(self, request: int) -> int:
        """Tokens that a request must find room for to enter."""
        known = self.known[request]
        return known + self.output[request] - self.emitted[request] if self.limits.reserves_output else known

    def _chunks(self, gamma: int, free: int) -> tuple[list[Chunk], int]:
        """The prompts in this pass, and the blocks that are left."""
        costs, found = self.costs, list[Chunk]()
        taken = -(-self.n // costs.groups) * (gamma + 1) if costs.mixes else 0
        room = [self.limits.max_tokens - taken] * costs.groups
        for request, start, group in self.parts:
            if room[group] > 0:
                end = min(self.known[request], start + room[group])
                found.append((request, start, end, group))
                room[group] -= end - start
        slots = self.limits.max_sequences - self.n - len(self.parts)
        while self.queue and slots > 0 and (most := max(room)) > 0:
            request = self.queue[0]
            need = self._blocks(self._final(request))
            if need > free:
                break
            self.queue.popleft()
            free -= need
            slots -= 1
            known, group = self.known[request], room.index(most)
            start = min(self.cached[request], known - 1)
            end = known if not costs.mixes else min(known, start + most)
            found.append((request, start, end, group))
            room[group] -= end - start
        return found, free

    # One iteration

    def _with_prompts(self, chunks: list[Chunk], gamma: int) -> None:
        costs, n = self.costs, self.n
        decodes = n > 0 and costs.mixes
        self.began = self.now
        if costs.mixes:
            mean = self._mean() if decodes else float(chunks[0][2])
            self.now += costs.step_s(gamma if decodes else 0, n if decodes else 1, mean)
        own = self._own_s(chunks, -(-n // costs.groups) * (gamma + 1) if decodes else 1)
        per_stage = costs.groups // costs.stages
        fullest = sum(max(own[first : first + per_stage]) for first in range(0, costs.groups, per_stage))
        self.now += fullest / costs.stages
        self.iterations += 1
        if decodes:
            self._emit(self._emitted(self._survivors(gamma), 1)[0][0])
        going = {request for request, *_ in chunks}
        self.parts = [part for part in self.parts if part[0] not in going]
        for request, _, end, group in chunks:
            if end < self.known[request]:
                self.parts.append((request, end, group))
                continue
            self.lag[request] = own[group] * (1.0 - 1.0 / costs.stages)
            if np.isnan(self.first_s[request]):
                self.first_s[request] = self.now + self.lag[request]
            self.emitted[request] += 1
            if (left := self.output[request] - self.emitted[request]) <= 0:
                self._finish(request)
                continue
            self.slots[:, self.n] = request, self.known[request] + 1, left
            self.n += 1

    def _own_s(self, chunks: list[Chunk], decoding: int) -> list[float]:
        """The time of each group's prompts."""
        going, own = {request for request, *_ in self.parts}, [0.0] * self.costs.groups
        for group in {each[3] for each in chunks}:
            here = [each for each in chunks if each[3] == group]
            starts, ends = [each[1] for each in here], [each[2] for each in here]
            entering = sum(each[0] not in going for each in here)
            own[group] = self.costs.chunks_s(decoding, starts, ends, entering)
        return own

    def _survivors(self, gamma: int) -> Array | None:
        """The probabilities that each sequence accepts at least so many drafts: [i, n]; None where none are made."""
        if not gamma or self.drafts is None:
            return None
        kinds = self.kinds[self.ids[: self.n]] % self.drafts.survivors[gamma].shape[1]
        return self.drafts.of_requests(gamma, kinds, self.context[: self.n])

    def _emit(self, count: Whole | int) -> None:
        """Counts what was emitted, and takes out those that have all their tokens; a last step's tokens beyond them are
        dropped."""
        n = self.n
        self.left[:n] -= count
        self.context[:n] += count
        if n and np.minimum.reduce(self.left[:n]) <= 0:
            goes_on = self.left[:n] > 0
            for request, left in self.slots[::2, :n][:, ~goes_on].T.tolist():
                self.emitted[request] = self.output[request] - max(left, 0)
                self._finish(request)
            self.n = int(np.count_nonzero(goes_on))
            self.slots[:, : self.n] = self.slots[:, :n][:, goes_on]

    def _finish(self, request: int) -> None:
        self.last_s[request] = sent_s = self.now + self.lag[request]
        if self.users is not None and self.users < len(self.requests):
            self.requests.arrival_s[self.users] = sent_s
            self.submit(self.users, sent_s)
            self.users += 1

    # Many iterations in which nothing else changes

    def _decode(self, until: float, gamma: int, free: int) -> None:
        """Until one ends, an arrival, no room in the cache whatever is accepted, or another gamma."""
        n, size = self.n, self.limits.block_size
        stop = until if self.queue or not self.coming else min(until, self.coming[0][0])
        most = max((free // n - 1) * size // (gamma + 1), 1)
        at, row, context, left = self.costs.contexts, self.costs.row(gamma, n), self.context[:n], self.left[:n]
        total, fewest = int(np.add.reduce(context)), int(np.minimum.reduce(left))
        edges, chosen = self._choices() if self.policy is not None else ([], ())
        survivors = self._survivors(gamma)
        while True:
            likely = fewest if survivors is None else 1.2 * fewest / (1.0 + np.add.reduce(survivors, axis=None) / n) + 3
            steps = max(int(min(most, likely, (stop - self.now) / row[0] + 2.0, MOST_DRAWN)), 1)
            emitted, together = self._emitted(survivors, steps)
            means = (total + together) / n
            times = self.now + np.cumsum(np.interp(means[:-1], at, row))
            taken = min(steps, int(np.searchsorted(times, stop)) + 1)
            if survivors is not None:
                taken = min(taken, int(np.count_nonzero(np.logical_and.reduce(emitted < left, axis=1))) + 1)
            if edges:
                others = np.take(chosen, np.searchsorted(edges, means[1:], side="right")) != gamma
                taken = min(taken, int(np.argmax(others)) + 1) if others.any() else taken
            self.began = float(times[taken - 2]) if taken > 1 else self.now
            self.now = float(times[taken - 1])
            self.iterations += taken
            context += emitted[taken - 1]
            left -= emitted[taken - 1]
            total, most, fewest = total + int(together[taken]), most - taken, int(np.minimum.reduce(left))
            changes = bool(edges) and chosen[bisect_right(edges, total / n)] != gamma
            if most <= 0 or fewest <= 0 or self.now >= stop or changes:
                break
        self._emit(0)

    def _emitted(self, survivors: Array | None, steps: int) -> tuple[Whole, Whole]:
        """Tokens of each sequence after so many steps, and of all together from before the first: [steps (, n)],
        [steps + 1]."""
        if survivors is None:
            every = np.arange(steps + 1)
            return every[1:], self.n * every
        drawn = self.random.random((steps, 1, self.n)) < survivors
        emitted = np.cumsum(np.add.reduce(drawn, axis=1, dtype=np.int64) + 1, axis=0)
        return emitted, np.concatenate(([0], np.add.reduce(emitted, axis=1)))
