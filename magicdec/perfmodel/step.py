"""The terms of one step, autoregressive or speculative: what is computed, sent and kept, for a
given setup.

    T_step = gamma · T_draft + T_verify + T_accept + T_upkeep

`step_terms` is the only place where these terms are composed. At gamma = 0 a step is an
autoregressive one.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from statistics import NormalDist
from typing import Any, Literal

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.drafting import Block, Draft, PrefillPrompts, draft_of
from magicdec.perfmodel.drafting.base import StagedPass, launches, uncaptured
from magicdec.perfmodel.forward import Pass, forward_pass, prefill
from magicdec.perfmodel.hybrids import launched
from magicdec.perfmodel.kernels.links import Message, send
from magicdec.perfmodel.kernels.op import ForwardTime, GridPlaces, Op, fixed
from magicdec.perfmodel.kernels.profile import HardwareProfile
from magicdec.perfmodel.setup import ModelSetup, Setup, microbatch
from magicdec.perfmodel.vocabulary import sampling_ops, vocabulary_ops
from magicdec.specs.device import DTYPE_BYTES
from magicdec.specs.engine_path import StepPath
from magicdec.specs.parallel import TENSOR_PARALLEL

MOST_EXACT = 8
"""Sequences up to which every number of them that has a looked-up draft is a case of its own."""
ANY_DEVICE = HardwareProfile(
    name="any",
    memory_bytes=1e12,
    memory_bytes_per_s=1e12,
    flops_per_s=dict.fromkeys(DTYPE_BYTES, 1e12),
)
"""A device without measured kernels, for costs, which are the same on all."""


class StepTerms(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The terms of a step; `draft` is one draft step, `upkeep` everything else paid per speculative
    step.
    """

    autoregressive: ForwardTime
    draft: ForwardTime
    verify: ForwardTime
    accept: ForwardTime
    upkeep: ForwardTime
    gamma: Array
    undrafted: ForwardTime
    """A step for which nothing was drafted, with the draft set up. Look-ups still search then."""

    @cached_property
    def step_s(self) -> Array:
        """The whole speculative step."""
        once = self.verify.total_s + self.accept.total_s + self.upkeep.total_s
        return np.where(
            self.gamma > 0,
            self.gamma * self.draft.total_s + once,
            self.autoregressive.total_s,
        )

    @property
    def spread_s(self) -> Array:
        """One standard deviation of a step's time over batches and lengths like the ones asked, and
        over laws that fit what was measured."""
        once = self.verify.spread_s + self.upkeep.spread_s
        drafted = self.gamma * self.draft.spread_s + once
        alone = self.autoregressive.spread_s
        return np.asarray(np.where(self.gamma > 0, drafted, alone))

    def step_seconds(self, by: Literal["group", "bound"]) -> dict[str, Array]:
        """The step's seconds by kind of term, or by what binds."""

        def split(time: ForwardTime) -> dict[Any, Array]:
            if by == "group":
                return time.group_seconds()
            return time.bound_seconds()

        once = split(self.verify.plus(self.accept, self.upkeep))
        draft = split(self.draft)
        alone = split(self.autoregressive)
        return {
            key: np.where(
                self.gamma > 0, self.gamma * draft[key] + once[key], alone[key]
            )
            for key in once
        }

    def taken(self, places: GridPlaces) -> StepTerms:
        """The terms at some points of a grid; operations that several terms share are taken once."""
        taken: dict[int, Op] = {}

        def at_places(time: ForwardTime) -> ForwardTime:
            for op in time.ops:
                if id(op) not in taken:
                    taken[id(op)] = op.taken(places)
            return ForwardTime(tuple(taken[id(op)] for op in time.ops))

        return StepTerms(
            autoregressive=at_places(self.autoregressive),
            draft=at_places(self.draft),
            verify=at_places(self.verify),
            accept=at_places(self.accept),
            upkeep=at_places(self.upkeep),
            gamma=places.of(self.gamma),
            undrafted=at_places(self.undrafted),
        )

    def averaged(self, probability: Array, gamma: Array) -> StepTerms:
        """The mean step over the last axis, whose cases have this probability. The operations of
        steps that draft nothing count to the verification."""
        drafts = np.where(self.gamma > 0, probability, 0.0)
        return StepTerms(
            autoregressive=self.autoregressive.summed(probability),
            draft=self.draft.summed(drafts),
            verify=self.verify.summed(drafts).plus(
                self.undrafted.summed(probability - drafts)
            ),
            accept=self.accept.summed(drafts),
            upkeep=self.upkeep.summed(drafts),
            gamma=gamma,
            undrafted=self.undrafted.summed(probability),
        )


def step_terms(
    setup: Setup,
    *,
    batch: Any,
    kv_len: Any,
    draft_kv_len: Any,
    gamma: Any,
    tp_size: Any = 1,
    full_acceptance: Any = 1.0,
    uniform: Any = 1.0,
) -> StepTerms:
    """The terms of one step for `batch` sequences that hold `kv_len` tokens each, of which the
    draft reads `draft_kv_len`. `full_acceptance` is the probability that a sequence accepts all its
    drafts; `uniform` is the chance that all sequences have drafts of gamma tokens.

    Spread over groups and stages, the operations are those of one microbatch of the fullest
    group, through all stages."""
    whole, kv_len, draft_kv_len, gamma, tp = (
        np.asarray(value, dtype=np.float64)
        for value in (batch, kv_len, draft_kv_len, gamma, tp_size)
    )
    step = _StepParts(
        setup=setup,
        whole=whole,
        batch=microbatch(setup, whole),
        kv_len=kv_len,
        draft_kv_len=draft_kv_len,
        gamma=gamma,
        tp=tp,
        uniform=uniform,
    )
    nothing = ForwardTime(())
    autoregressive = step.autoregressive()
    alone = StepTerms(
        autoregressive=autoregressive,
        undrafted=step.undrafted(autoregressive),
        draft=nothing,
        verify=nothing,
        accept=nothing,
        upkeep=nothing,
        gamma=np.zeros_like(gamma),
    )
    if not step.drafter.drafts:
        return alone
    draft = step.drafter.step(step)
    verify = step.verify()
    accept = step.accept()
    upkeep = step.upkeep().plus(*step.catch_up(draft, full_acceptance))
    step_s = gamma * draft.total_s + verify.total_s + accept.total_s + upkeep.total_s
    upkeep = upkeep.plus(
        *step.in_stages(step_s, step.staged_passes()), *launched(setup, step_s, tp)
    )
    return msgspec.structs.replace(
        alone,
        draft=draft,
        verify=verify,
        accept=accept,
        upkeep=upkeep,
        gamma=gamma,
    )


class _StepParts(Block, frozen=True, kw_only=True, dict=True):
    """One step of a microbatch: what its terms are made of."""

    whole: Array
    """Sequences of all microbatches and groups."""

    @cached_property
    def drafter(self) -> Draft:
        return draft_of(self.setup)

    def autoregressive(self) -> ForwardTime:
        """The target's pass over one token of each sequence, and the choice of the next."""
        setup = self.setup
        engine = setup.engine
        step_s, _ = engine.step_overheads(setup.hardware.name)
        alone = self._target_pass(1.0)
        time = alone.plus(
            *sampling_ops(
                setup, rows=self.batch, ranks=self.tp, vocab_size=setup.model.vocab_size
            ),
            fixed(
                "step overhead",
                "overhead",
                step_s + self.batch * engine.overheads.sequence_overhead_s,
            ),
            *launches(setup, self.plain_path, alone.total_s, uniform=1.0),
        )
        return time.plus(
            *self.in_stages(time.total_s, [(alone, np.ones(()), np.ones(()))])
        )

    def undrafted(self, autoregressive: ForwardTime) -> ForwardTime:
        """An autoregressive step with the draft set up."""
        own = self.drafter.without_draft(self)
        path = self.drafter.path
        if path.graph_mode != self.plain_path.graph_mode:
            # one token of each sequence is no block, so no whole graph fits it
            pass_s = self._target_pass(1.0).total_s
            own += launches(self.setup, path, pass_s, uniform=0.0)
        return autoregressive.plus(*own)

    @property
    def plain_path(self) -> StepPath:
        """The path of steps without a draft."""
        return self.setup.engine.path("none", "none")

    def verify(self) -> ForwardTime:
        """The target's pass over a block of each sequence."""
        setup = self.setup
        engine = setup.engine
        host_s = (
            engine.overheads.verify_overhead_s
            + self.verified * engine.overheads.scored_token_s
        )
        return self._block_pass.plus(
            fixed("verify overhead", "overhead", host_s),
            *launches(setup, self.drafter.path, self._block_pass.total_s, self.uniform),
            *uncaptured(setup, setup.model.num_hidden_layers),
        )

    @cached_property
    def _block_pass(self) -> ForwardTime:
        return self._target_pass(self.gamma + 1.0)

    def _target_pass(self, query_len: Any) -> ForwardTime:
        return forward_pass(
            self.setup.model,
            Pass(
                at=self.setup.at,
                batch=self.batch,
                query_len=query_len,
                kv_len=self.kv_len + query_len - 1.0,
                tp=self.tp,
                spread=self.setup.spread,
            ),
        )

    def accept(self) -> ForwardTime:
        """Acceptance of drafted tokens against the target's distribution at each verified one, and
        the draw of the next."""
        engine = self.setup.engine
        if self.setup.sampling.is_greedy:
            own = engine.sampling.greedy_accept_passes
            if own is None:
                passes = engine.sampling.greedy_passes
            else:
                passes = own
            given = engine.sampling.greedy_accept_s_per_element
        else:
            passes, given = (
                engine.sampling.accept_passes,
                engine.sampling.accept_s_per_element,
            )
        operations = vocabulary_ops(
            self.setup,
            "rejection",
            rows=self.verified,
            ranks=self.tp,
            size=self.setup.model.vocab_size,
            base_s=engine.sampling.accept_base_s,
            passes=passes,
            given=given,
        )
        return ForwardTime(tuple(operations))

    def upkeep(self) -> ForwardTime:
        """Everything paid once per speculative step: fixed costs, and the draft's own."""
        engine = self.drafter.constants
        sequence_s = (
            engine.overheads.sequence_overhead_s
            + engine.overheads.speculation_sequence_s
        )
        _, step_s = engine.step_overheads(self.setup.hardware.name)
        if self.setup.speculation.tree is not None:
            step_s = step_s + engine.overheads.tree_step_s
        bookkeeping = fixed(
            "step overhead", "overhead", step_s + self.batch * sequence_s
        )
        return ForwardTime((bookkeeping, *self.drafter.upkeep(self)))

    def catch_up(self, draft: ForwardTime, full_acceptance: Any) -> list[Op]:
        """The last drafted token processed by the draft too, where all drafts of some sequence were
        accepted.
        """
        if not self.drafter.catches_up:
            return []
        some_sequence = 1.0 - (1.0 - np.clip(full_acceptance, 0.0, 1.0)) ** self.batch
        longer_s = np.maximum(self.drafter.step(self, 2.0).total_s - draft.total_s, 0.0)
        return [fixed("catch-up", "gemm", some_sequence * longer_s)]

    def staged_passes(self) -> list[StagedPass]:
        """The passes of a speculative step that go through all stages."""
        if self.setup.spread.pp == 1:
            return []
        verification = (self._block_pass, np.ones(()), self.gamma + 1.0)
        return [verification, *self.drafter.staged_passes(self)]

    def in_stages(self, step_s: Array, passes: list[StagedPass]) -> list[Op]:
        """The operations that stages add to a step of `step_s`: sends, and waiting for the slowest.
        The rest of the step, next to `passes`, is the last stage's."""
        if self.setup.spread.pp == 1:
            return []
        layers_s: Array = np.asarray(0.0)
        sends: list[Op] = []
        for time, count, tokens in passes:
            send = send_op(self.setup, tokens=self.batch * tokens, tp_size=self.tp)
            # on the last stage
            head_s = sum(
                (op.time_s for op in time.ops if op.name == "lm_head"), np.asarray(0.0)
            )
            layers_s = layers_s + count * (time.total_s - head_s)
            sends.append(
                fixed("send", "link", count * send.time_s, send.cost.times(count))
            )
        sends_s: Array = sum((op.time_s for op in sends), np.asarray(0.0))
        waiting = waiting_op(
            self.setup,
            batch=self.whole,
            layers_s=layers_s,
            last_s=step_s - layers_s,
            sends_s=sends_s,
        )
        return [*sends, waiting]


def read_bytes(
    setup: ModelSetup,
    *,
    batch: Any,
    kv_len: Any,
    draft_kv_len: Any,
    gamma: Any,
) -> dict[str, Array]:
    """Bytes that the phases of a step must read: weights that its tokens touch, and what it sees of
    caches and states, each once, on all ranks together. `draft` is the block's gamma draft
    steps."""
    engine = setup.engine.with_constants({"kernels.kv_reads": "per_sequence"})
    counted = dataclasses.replace(setup, engine=engine, spread=TENSOR_PARALLEL)
    on_device = Setup(**vars(counted), hardware=ANY_DEVICE)
    terms = step_terms(
        on_device, batch=batch, kv_len=kv_len, draft_kv_len=draft_kv_len, gamma=gamma
    )

    def read(time: ForwardTime) -> Array:
        return np.asarray(time.cost.weight_bytes + time.cost.kv_bytes, dtype=np.float64)

    return {
        "autoregressive": read(terms.autoregressive),
        "draft": terms.gamma * read(terms.draft),
        "verify": read(terms.verify),
    }


def looked_up_terms(
    setup: Setup,
    *,
    batch: Any,
    kv_len: Any,
    gamma: Any,
    share: Any,
    draft_len: Any = None,
    tp_size: Any = 1,
) -> tuple[StepTerms, Array]:
    """The terms of a step with looked-up drafts, which each sequence has with probability `share`:
    by the number n of sequences that have one, on a last axis, and the probability of each.

    A pass has one token for each sequence and `draft_len` (None: gamma) more for each that has a
    draft, draft_len · n / batch per sequence on average; without any draft it is autoregressive. n
    is binomial, sequences being independent; of many, as many equally likely cases as of MOST_EXACT
    stand for it. Drafts shorter than gamma are half of it on average, so 2 · draft_len / gamma - 1
    of them, if any, have gamma tokens; a pass is uniform where all sequences have such a draft.
    """
    if draft_len is None:
        draft_len = gamma
    batch, kv_len, gamma, share, length, tp_size = (
        np.asarray(value, dtype=np.float64)[..., None]
        for value in (batch, kv_len, gamma, share, draft_len, tp_size)
    )
    count = np.maximum(np.round(batch), 1.0)
    number = np.arange(min(int(count.max()), MOST_EXACT) + 1.0)
    few = np.minimum(count, MOST_EXACT)
    ways = np.vectorize(math.comb, otypes=[np.float64])(
        few.astype(int), number.astype(int)
    )
    exact = ways * share**number * (1.0 - share) ** np.maximum(few - number, 0.0)
    quantiles = (number + 0.5) / len(number)
    sigmas = np.array([NormalDist().inv_cdf(each) for each in quantiles])
    spread = np.sqrt(count * share * (1.0 - share))
    usual = np.clip(count * share + spread * sigmas, 0.0, count)
    is_many = count > MOST_EXACT
    having = np.where(is_many, usual, np.minimum(number, count))
    probability = np.where(is_many, 1.0 / len(number), exact)
    drafted = length * having / count
    whole = np.clip(2.0 * length / np.maximum(gamma, 1.0) - 1.0, 0.0, 1.0)
    terms = step_terms(
        setup,
        batch=batch,
        kv_len=kv_len,
        draft_kv_len=kv_len,
        gamma=drafted,
        tp_size=tp_size,
        uniform=(having == count) * whole**count,
    )
    return terms, probability


def idle_step_s(
    setup: Setup, *, batch: Any, kv_len: Any, draft_kv_len: Any, tp_size: Any
) -> Array:
    """A step of an engine that has this draft set up and drafts nothing (K = 0): an autoregressive
    one with the bookkeeping of speculation, and one step of a draft with a cache of its own, which
    must know every token."""
    terms = step_terms(
        setup,
        batch=batch,
        kv_len=kv_len,
        draft_kv_len=draft_kv_len,
        gamma=np.zeros(()),
        tp_size=tp_size,
    )
    idle: Array = terms.autoregressive.total_s + terms.upkeep.total_s
    if draft_of(setup).knows_every_token:
        idle = idle + terms.draft.total_s
    return idle


def prefill_terms(
    setup: Setup,
    *,
    batch: Any,
    prompt_len: Any,
    tp_size: Any = 1,
    budget: Any = None,
) -> ForwardTime:
    """Prefill of `batch` prompts on one group of tp ranks, the draft's share included, while every
    group has as many.

    A standalone draft reads the prompt too, of which a parallel head only needs keys and values; a
    sparse cache is selected (SnapKV, top-k: the observation window's scores over the prompt) and
    copied.
    """
    tp = np.asarray(tp_size, dtype=np.float64)
    batch = np.asarray(batch, dtype=np.float64)
    prompt = np.asarray(prompt_len, dtype=np.float64)
    time = prefill(
        setup.model,
        setup.at,
        batch=batch,
        prompt_len=prompt,
        tp=tp,
        spread=setup.spread,
    )
    if setup.spread.pp > 1:
        time = time.plus(send_op(setup, tokens=batch * prompt, tp_size=tp))
    prompts = PrefillPrompts(
        setup=setup, batch=batch, prompt_len=prompt, tp=tp, budget=budget
    )
    return time.plus(*draft_of(setup).prefill(prompts))


TENSORS_SENT = 2.0
"""Hidden states and the residual beside them (as vLLM sends them)."""


def send_op(setup: Setup, *, tokens: Any, tp_size: Any) -> Op:
    """The sends of `tokens` per group, over all stages."""
    ranks = np.asarray(tp_size, dtype=np.float64)
    spread = setup.spread
    link = setup.hardware.link
    element = setup.precision.activation_bytes
    is_far = ranks * spread.groups > link.reach
    message = tokens * setup.model.hidden_size * element * TENSORS_SENT
    one = send(setup.at, Message(message, ranks), is_far=is_far)
    return fixed("send", "link", spread.pp * one.time_s, one.cost.times(spread.pp))


def waiting_op(
    setup: Setup, *, batch: Any, layers_s: Any, last_s: Any, sends_s: Any
) -> Op:
    """The time that a step of all microbatches takes beyond one of them passing all stages:
    `layers_s` and `sends_s`, spread over the stages, and `last_s` on the last."""
    spread = setup.spread
    counts = np.asarray(
        spread.stage_layers(setup.model.num_hidden_layers), dtype=np.float64
    )
    shares = counts / counts.sum()
    slowest = (
        np.maximum(shares[:-1].max() * layers_s, shares[-1] * layers_s + last_s)
        + sends_s / spread.pp
    )
    per_group = np.ceil(np.asarray(batch, dtype=np.float64) / spread.dp)
    num_microbatches = np.minimum(per_group, float(spread.pp))
    through = layers_s + last_s + sends_s
    return fixed(
        "waiting", "overhead", np.maximum(num_microbatches * slowest - through, 0.0)
    )
