"""One replica's scheduler, iteration by iteration, as vLLM does it.

    each iteration    gamma + 1 tokens of every sequence that decodes, then chunks of prompts, first come first served,
                      up to `max_tokens` together; a prompt enters while there are a slot and room
                      for all of it
    no room           for the next tokens: the last that entered goes back to the head of the queue, and begins again
                      with the tokens that it has as its prompt
    ends              a prompt's last chunk emits a first token, a step one and the drafts that it accepts

A request's steps are known when it begins to decode (drafts.py), so the next end is the top of a heap,
and iterations in which nothing changes (no arrival that could enter, no end, room for all) run
together. The tokens held by all grow steadily in between, each request's by its own mean. Where gamma
changes, tokens so far are looked up and steps drawn for the rest. An engine that does not mix
prompts with decoding runs passes of prompts alone, whole ones. With data-parallel groups and
microbatches, each has `max_tokens` of its own: a prompt goes where most are left.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np

from magicdec.counts import Array
from magicdec.errors import CapacityError
from magicdec.perfmodel.rate.costs import Costs
from magicdec.perfmodel.rate.drafts import NUM_CLASSES, NUM_STEPS, Drafts
from magicdec.perfmodel.rate.requests import Requests, Whole
from magicdec.schema.gamma_table import TableGamma

STEPS = np.arange(1024.0)
"""As many steps run together at most."""
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

    def spend(self) -> None:
        """Counts a pass. Raises CapacityError beyond the bound."""
        self.left -= 1
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
        self.decoding: dict[int, None] = {}
        """Requests that decode, in the order in which they entered."""
        self.step = 0
        """Steps that any request has decoded in."""
        self.ends: list[tuple[int, int]] = []
        """The step in which each request that decodes ends, the next first."""
        self.gamma: int | None = None
        """Drafts of the steps that are drawn. None: they are to be drawn anew."""
        self.undrawn: list[int] = []
        """Requests that decode and have no steps yet."""
        # by request, when its steps are drawn
        self.drawn_at = np.zeros(count, dtype=np.int64)
        self.context = requests.prompt_len + 1
        self.left = requests.output_len - 1
        self.index = np.zeros(count, dtype=np.int64)
        random = np.random.default_rng(seed)
        self.kinds = random.integers(0, NUM_CLASSES, count)
        self.begins = random.integers(0, NUM_STEPS, count)
        self.growth_of = np.zeros(count)
        """Tokens of a step, on average until the request ends."""
        self.growth = 0.0
        """Tokens of a step of all that decode."""
        self.total = 0.0
        """Tokens held by all that decode."""
        self.longest = self._blocks(requests.lengths[1])
        self.preemptions = 0
        self.iterations = 0
        self.timeline: list[tuple[float, int, int, int]] = []
        """(time, requests that decode or are prefilled, waiting, blocks in use), at each change."""
        self._gammas: dict[int, int] = {}
        self._firsts: dict[int, list[tuple[int, int, float]]] = {}

    @property
    def in_system(self) -> int:
        return len(self.decoding) + len(self.queue) + len(self.coming) + len(self.parts)

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
            if not (self.decoding or self.queue or self.parts):
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
        if self.limits.schedules_ahead and (self.decoding or self.queue or self.parts):
            seen = self.began
        while self.coming and self.coming[0][0] <= seen:
            self.queue.append(heappop(self.coming)[1])

    def _iterate(self, until: float) -> None:
        self.work.spend()
        gamma = self._gamma()
        free = self._make_room(gamma)
        self._draw(gamma)
        chunks, free = self._chunks(gamma, free)
        running = len(self.decoding) + len(chunks)
        used = self.limits.num_blocks - free
        self.timeline.append((self.now, running, len(self.queue), used))
        if chunks:
            self._with_prompts(chunks, gamma)
        else:
            self._decode(until, gamma, free)
        self._take_out()

    # What runs next

    def _gamma(self) -> int:
        """The policy's choice."""
        n = len(self.decoding)
        if self.policy is None or not n:
            return 0
        if n not in self._gammas:
            context = self.policy.context_lens[0]
            self._gammas[n] = self.policy.choose(batch_size=n, context_len=context)
        return self._gammas[n]

    def _mean(self) -> float:
        """Tokens that a sequence holds, on average."""
        return self.total / len(self.decoding)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def _make_room(self, gamma: int) -> int:
        """Gives those that decode the blocks of their next step, where need be by preempting the
        last; the blocks that are left, counted where they may be too few and else about."""
        n = len(self.decoding)
        while True:
            free = self.limits.num_blocks
            for request, _, _ in self.parts:
                free -= self._blocks(self._final(request))
            size = self.limits.block_size
            # of each request's last block half is used, on average
            held = (self.total + n * (gamma + (size + 1) / 2)) / size
            if free - held > self.longest * (1 + len(self.queue)) + n:
                return round(free - held)
            free -= self._held(gamma)
            if free >= 0:
                return free
            self.preemptions += 1
            if self.parts:
                self.queue.appendleft(self.parts.pop()[0])
                continue
            self._settle()
            request, _ = self.decoding.popitem()
            self.total -= float(self.context[request])
            self.emitted[request] = self.output[request] - int(self.left[request])
            prompt = int(self.requests.prompt_len[request])
            self.known[request] = prompt + self.emitted[request]
            # as of when it decodes again, having emitted another token
            self.context[request] += 1
            self.left[request] -= 1
            self.queue.appendleft(request)

    def _held(self, gamma: int) -> int:
        """Blocks of those that decode, with their next step's."""
        chosen, _, tokens = self._since_drawn()
        size = self.limits.block_size
        blocks = (self.context[chosen] + tokens + (gamma + size)) // size
        return int(blocks.sum())

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
            taken = -(-len(self.decoding) // costs.groups) * (gamma + 1)
        room = [self.limits.max_tokens - taken] * costs.groups
        for request, start, group in self.parts:
            if room[group] > 0:
                end = min(self.known[request], start + room[group])
                chunks.append((request, start, end, group))
                room[group] -= end - start
        slots = self.limits.max_sequences - len(self.decoding) - len(self.parts)
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
        n = len(self.decoding)
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
            self.step += 1
            self.total += self.growth
            self._take_out()
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
        if self.emitted[request] >= self.output[request]:
            self._finish(request)
            return
        self.drawn_at[request] = self.step
        self.total += self.known[request] + 1
        self.decoding[request] = None
        self.undrawn.append(request)

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

    def _take_out(self) -> None:
        """Ends the requests that have all their tokens; a last step's tokens beyond them are
        dropped.
        """
        while self.ends and self.ends[0][0] <= self.step:
            end, request = heappop(self.ends)
            steps = end - int(self.drawn_at[request])
            growth = float(self.growth_of[request])
            self.growth -= growth
            self.total -= float(self.context[request]) + growth * steps
            del self.decoding[request]
            self.emitted[request] = self.output[request]
            self._finish(request)
        if not self.decoding:
            self.growth = self.total = 0.0

    def _finish(self, request: int) -> None:
        self.last_s[request] = sent_s = self.now + self.lag[request]
        if self.users is not None and self.users < len(self.requests):
            self.requests.arrival_s[self.users] = sent_s
            self.submit(self.users, sent_s)
            self.users += 1

    # Many iterations in which nothing else changes

    def _decode(self, until: float, gamma: int, free: int) -> None:
        """Until one ends, an arrival, or no room in the cache whatever is accepted."""
        n = len(self.decoding)
        seen = math.inf
        if self.coming and not self.queue:
            seen = self.coming[0][0]
        stop = min(until, seen)
        row = self.costs.row(gamma, n)
        in_time = (stop - self.now) / row[0] + 3.0
        steps = min(self._steps_of_room(gamma, free), in_time, len(STEPS))
        steps = max(int(min(steps, self.ends[0][0] - self.step)), 1)
        if self._gamma() != gamma:
            steps = 1  # gamma was chosen with one that has lost its room since
        contexts = (self.total + self.growth * STEPS[:steps]) / n
        seconds = np.interp(contexts, self.costs.contexts, row)
        times = self.now + seconds.cumsum()
        if times[-1] >= stop:
            to_see = int(times.searchsorted(seen)) + 1
            if self.limits.schedules_ahead:
                # what came in the last step is seen after the next
                to_see = to_see + 1 if seen > self.now else 1
            steps = min(steps, to_see, int(times.searchsorted(until)) + 1)
        self.began = self.now
        if steps > 1:
            self.began = float(times[steps - 2])
        self.now = float(times[steps - 1])
        self.iterations += steps
        self.step += steps
        self.total += self.growth * steps

    def _steps_of_room(self, gamma: int, free: int) -> int:
        """Steps that the free blocks are enough for after the next one, whatever is accepted."""
        blocks = free // len(self.decoding) - 1
        return blocks * self.limits.block_size // (gamma + 1)

    # The steps of each request

    def _draw(self, gamma: int) -> None:
        """Draws the steps of requests that have none, and of all where gamma is another."""
        if gamma != self.gamma:
            self._settle()
            self.gamma = gamma
            self.ends.clear()
            self.undrawn.clear()
            self.growth = 0.0
            requests = np.fromiter(self.decoding, dtype=np.int64)
            for request, drawn in zip(
                self.decoding, self._steps(requests), strict=True
            ):
                self._begin(request, *drawn)
        for request in self.undrawn:
            if self.emitted[request] == 1:
                self._begin(request, *self._first_steps[request])
            else:  # it was preempted
                self._begin(request, *self._steps(np.array([request]))[0])
        self.undrawn.clear()

    @property
    def _first_steps(self) -> list[tuple[int, int, float]]:
        """`_steps` of each request that has not begun, at this gamma."""
        assert self.gamma is not None
        if self.gamma not in self._firsts:
            self._firsts[self.gamma] = self._steps(np.arange(len(self.requests)))
        return self._firsts[self.gamma]

    def _steps(self, requests: Whole) -> list[tuple[int, int, float]]:
        """Where in the drawn steps each of these requests begins, the steps that it takes, and the
        tokens of one."""
        left = self.left[requests]
        index = np.zeros_like(left)
        steps = tokens = left
        if self.gamma and self.drafts is not None:
            middle = self.context[requests] + left / 2.0
            rows = self.drafts.rows(self.kinds[requests], middle)
            index = self.drafts.index(rows, self.begins[requests])
            steps = self.drafts.steps_of(self.gamma, index, left)
            tokens = self.drafts.tokens_of(self.gamma, index, steps)
        growth = tokens / np.maximum(steps, 1)
        return list(zip(index.tolist(), steps.tolist(), growth.tolist(), strict=True))

    def _begin(self, request: int, index: int, steps: int, growth: float) -> None:
        """A request goes on decoding by these steps."""
        self.index[request] = index
        self.growth_of[request] = growth
        self.growth += growth
        heappush(self.ends, (self.step + steps, request))

    def _since_drawn(self) -> tuple[Whole, Whole, Whole]:
        """The requests that decode, and the steps and tokens of each since its steps were drawn."""
        requests = np.fromiter(self.decoding, dtype=np.int64)
        steps = self.step - self.drawn_at[requests]
        if not self.gamma or self.drafts is None:
            return requests, steps, steps
        tokens = self.drafts.tokens_of(self.gamma, self.index[requests], steps)
        return requests, steps, tokens

    def _settle(self) -> None:
        """Counts the tokens of those that decode: their steps are to be drawn anew."""
        requests, steps, tokens = self._since_drawn()
        self.context[requests] += tokens
        self.left[requests] -= tokens
        self.begins[requests] = (self.begins[requests] + steps) % NUM_STEPS
        self.drawn_at[requests] = self.step
        self.total = float(self.context[requests].sum())
        self.gamma = None
