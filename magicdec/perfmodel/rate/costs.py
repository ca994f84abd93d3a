"""The seconds of one iteration, in tables.

    iteration = step(n, c, gamma) + Σ over microbatches of the fullest group's prompts / pp
    prompts   = linear(n · (gamma + 1) + k) − linear(n · (gamma + 1)) + Σ over chunks of (prompt(end) − prompt(start))
              + overhead of a pass with prompts in it + overhead of each request that enters

n sequences decode at a mean context of c, k tokens of prompts share their pass. `step` is
`predict`'s, `linear` and the rest serving.py's: no cost is modelled here. prompt(L) is attention
over a prompt of L tokens, and the draft's own
prefill: chunks add up to the whole, and a cached prefix is left out of it.
Contexts are interpolated linearly between at most NUM_CONTEXTS nodes; all numbers of sequences and
of tokens have entries of their own, made when first asked for.

Data-parallel groups run in step, so the one with most prompts decides; whole experts that they share
have the tokens of all, so that their time goes by the mean. Decoding sequences are spread evenly
over groups and microbatches. Of pp microbatches one at a time is on a stage: a prompt
delays the others by its share of one stage, and its own first token by all of them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel import memory
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.drafting import draft_kv_tokens, draft_of
from magicdec.perfmodel.serving import launching_s, pass_parts, prompt_time
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import predict
from magicdec.perfmodel.step import idle_step_s, send_op

NUM_CONTEXTS = 129
NUM_ROWS = 32
"""Numbers of sequences whose steps are tabulated together."""


def nodes(low: float, high: float, most: int = NUM_CONTEXTS) -> Array:
    """Whole numbers between two, at most `most` of them, evenly spaced by their logarithm."""
    low = max(low, 1.0)
    high = max(high, low)
    if high - low < most:
        return np.arange(np.floor(low), np.ceil(high) + 1.0)
    return np.unique(np.round(np.geomspace(low, high, most)))


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The tables of one configuration. Seconds."""

    contexts: Array
    steps: Callable[[int, Array], Array]
    """Steps of a gamma: a row for each of these numbers of sequences, a column for each context."""
    linear: list[float]
    """Time of a pass by a group's number of tokens, without attention and shared experts."""
    shared: list[float]
    """Time of the experts that data-parallel groups share, by the tokens of a group on average."""
    prompt_lens: Array
    prompts: Array
    """Attention over a prompt of such a length, and the draft's prefill of it; the whole prefill
    where an engine does not mix prompts with decoding."""
    pass_overhead_s: float
    """Added to a pass with prompts in it."""
    pass_least_s: float
    """The host's launches of a pass of prompts alone, which takes no less."""
    request_overhead_s: float
    """Added to the pass in which a request enters."""
    mixes: bool
    stages: int
    groups: int
    """Microbatches of all data-parallel groups: each has prompts of its own."""
    rows: dict[tuple[int, int], Array] = field(
        default_factory=dict, compare=False, repr=False
    )
    read: dict[int, float] = field(default_factory=dict, compare=False, repr=False)

    def row(self, gamma: int, sequences: int) -> Array:
        """A step's seconds by context."""
        if (gamma, sequences) not in self.rows:
            first = (sequences - 1) // NUM_ROWS * NUM_ROWS + 1
            batches = range(first, first + NUM_ROWS)
            table = self.steps(gamma, np.asarray(batches, dtype=np.float64))
            for batch, row in zip(batches, table, strict=True):
                self.rows[gamma, batch] = row
        return self.rows[gamma, sequences]

    def step_s(self, gamma: int, sequences: int, context: float) -> float:
        """One step of `sequences` at a mean context."""
        at = self._nodes
        row = self.row(gamma, sequences)
        if len(at) == 1:
            return float(row[0])
        place = min(max(bisect_right(at, context) - 1, 0), len(at) - 2)
        after = place + 1
        share = (context - at[place]) / (at[after] - at[place])
        share = min(max(share, 0.0), 1.0)
        return float(row[place] + share * (row[after] - row[place]))

    @cached_property
    def _nodes(self) -> list[float]:
        """`contexts`, as numbers that are quickly compared one by one."""
        nodes: list[float] = self.contexts.tolist()
        return nodes

    def prompt_s(self, length: int) -> float:
        """Seconds of a prompt of this length, interpolated in `prompts`."""
        if length not in self.read:
            self.read[length] = float(np.interp(length, self.prompt_lens, self.prompts))
        return self.read[length]

    def chunks_s(
        self, decoding: int, starts: list[int], ends: list[int], entering: int
    ) -> float:
        """The time that chunks of prompts, from a token to another, add to a pass over `decoding`
        tokens.
        """
        tokens = sum(ends) - sum(starts)
        linear_s = 0.0
        if self.mixes:
            linear_s = self.linear[decoding + tokens] - self.linear[decoding]
        own_s = sum(map(self.prompt_s, ends)) - sum(map(self.prompt_s, starts))
        own_s = max(own_s, self.pass_least_s)
        entering_s = entering * self.request_overhead_s
        return max(linear_s, 0.0) + own_s + self.pass_overhead_s + entering_s

    def experts_s(self, decoding: int, added: float) -> float:
        """The time that prompts add to shared experts: so many tokens of each group on average."""
        if not self.mixes:
            return 0.0
        return max(
            self.shared[decoding + math.ceil(added)] - self.shared[decoding], 0.0
        )


def tabulate(
    setup: Setup,
    acceptance: AcceptanceProfile | None,
    *,
    tp_size: int,
    max_gamma: int = 0,
    budget: int | None = None,
    lengths: tuple[int, int],
    max_tokens: int,
    step_factor: float = 1.0,
) -> Costs:
    """The tables of contexts between these lengths (the shortest prompt, the longest request), and
    of passes over at most so many tokens. `step_factor`: of every step, where gamma follows a table.
    """
    context = nodes(lengths[0], lengths[1] + 1.0)
    engine = setup.engine
    spread = setup.spread
    tokens = np.arange(max_tokens + 1.0)
    longest = lengths[1]
    between = nodes(min(16, longest), longest + 1.0, 4 * NUM_CONTEXTS)
    length = np.concatenate([[0.0], between])
    prompt = np.maximum(length, 1.0)
    alone = prompt_time(setup, prompt_len=prompt, tp_size=tp_size)
    own = alone.total_s
    if engine.scheduler.mixes_prefill:
        own = alone.group_seconds()["attention"]
    if spread.pp > 1:
        own = own + send_op(setup, tokens=prompt, tp_size=tp_size).time_s
    if draft_of(setup).has_prefill:
        points = Points(
            batch=1.0, context=prompt, tp=tp_size, budget=budget, gamma=max_gamma
        )
        own = own + predict(setup, acceptance, points).draft_prefill_s
    linear, shared = pass_parts(setup, tokens=np.maximum(tokens, 1.0), tp_size=tp_size)
    own = np.where(length > 0, np.broadcast_to(own, length.shape), 0.0)
    pass_overhead_s = 0.0
    pass_least_s = launching_s(setup)
    if engine.scheduler.mixes_prefill:
        layers = setup.model.num_hidden_layers
        pass_overhead_s = layers * engine.graphs.prefill_layer_overhead_s
        pass_least_s = 0.0
    return Costs(
        contexts=context,
        steps=partial(
            _steps,
            setup,
            acceptance,
            tp_size=tp_size,
            budget=budget,
            context=context,
            factor=step_factor,
        ),
        linear=np.broadcast_to(linear, tokens.shape).tolist(),
        shared=np.broadcast_to(shared, tokens.shape).tolist(),
        prompt_lens=length,
        prompts=np.maximum.accumulate(own),
        pass_overhead_s=pass_overhead_s,
        pass_least_s=pass_least_s,
        request_overhead_s=engine.scheduler.request_overhead_s,
        mixes=engine.scheduler.mixes_prefill,
        stages=spread.pp,
        groups=spread.groups,
    )


def _steps(
    setup: Setup,
    acceptance: AcceptanceProfile | None,
    gamma: int,
    batch: Array,
    *,
    tp_size: int,
    budget: int | None,
    context: Array,
    factor: float,
) -> Array:
    """A step's seconds: [batch, context]. With a draft set up that drafts nothing, an idle one."""
    shape = (len(batch), len(context))
    batch = batch[:, None]
    if gamma == 0 and draft_of(setup).drafts:
        seconds = idle_step_s(
            setup,
            batch=batch,
            kv_len=context,
            draft_kv_len=draft_kv_tokens(setup, context, budget),
            tp_size=tp_size,
        )
    else:
        points = Points(
            batch=batch, context=context, tp=tp_size, budget=budget, gamma=gamma
        )
        seconds = predict(setup, acceptance, points).step_s
    return np.broadcast_to(seconds * factor, shape)


def num_blocks(
    setup: Setup,
    *,
    tp_size: int,
    mean_len: float,
    budget: int | None,
    gamma: int,
    block_size: int,
) -> int:
    """Blocks of KV that the memory of each data-parallel group holds next to the weights, for
    sequences of such a length; each takes its share of the draft's cache too."""

    def need(batch: float) -> Any:
        return memory.memory_need(
            setup,
            batch=batch,
            max_len=mean_len,
            budget=budget,
            gamma=gamma,
            tp_size=tp_size,
        ).total_bytes

    fixed = need(0.0)
    capacity = memory.capacity_bytes(setup.hardware, setup.engine, tp_size)
    free = float(capacity) - float(fixed)
    of_sequence = float(need(setup.spread.dp) - fixed)
    return max(int(free / of_sequence * mean_len / block_size), 0)
