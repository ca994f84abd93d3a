"""The terms of one step, autoregressive or speculative: what is computed, sent and kept, for a given setup.

    T_step = gamma · T_draft + T_verify + T_accept + T_upkeep

`step_terms` is the only place where these terms are composed. At gamma = 0 a step is an autoregressive one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel import memory
from magicdec.perfmodel.forward import Pass, forward_pass, prefill, size
from magicdec.perfmodel.kernels.gemm import linear, streaming
from magicdec.perfmodel.kernels.links import Message, all_gather, all_reduce, broadcast, send
from magicdec.perfmodel.kernels.op import FP32_BYTES, ForwardTime, Op, fixed
from magicdec.perfmodel.kernels.profile import HardwareProfile
from magicdec.perfmodel.setup import ModelSetup, Setup, draft_kv_tokens, draft_tp, microbatch
from magicdec.specs.device import DTYPE_BYTES
from magicdec.specs.engine import EngineProfile
from magicdec.specs.parallel import TENSOR_PARALLEL
from magicdec.specs.speculation import PARALLEL_METHODS, SPARSE_METHODS

TOKEN_BYTES = 8.0
FEWEST_GROUPS = 32
MOST_CASES = 65_536
ANY_DEVICE = HardwareProfile(
    name="any", memory_bytes=1e12, memory_bytes_per_s=1e12, flops_per_s=dict.fromkeys(DTYPE_BYTES, 1e12)
)
"""A device without measured kernels, for costs, which are the same on all."""


@dataclass(frozen=True, kw_only=True)
class StepTerms:
    """The terms of a step; `draft` is one draft step, `upkeep` everything else paid per speculative step."""

    autoregressive: ForwardTime
    draft: ForwardTime
    verify: ForwardTime
    accept: ForwardTime
    upkeep: ForwardTime
    gamma: Array

    @cached_property
    def step_s(self) -> Array:
        """The whole speculative step."""
        once = self.verify.total_s + self.accept.total_s + self.upkeep.total_s
        return np.where(self.gamma > 0, self.gamma * self.draft.total_s + once, self.autoregressive.total_s)

    def step_seconds(self, by: Literal["group", "bound"]) -> dict[str, Array]:
        """The step's seconds by kind of term, or by what binds."""

        def split(time: ForwardTime) -> dict[Any, Array]:
            return time.group_seconds() if by == "group" else time.bound_seconds()

        once, draft = split(self.verify.plus(self.accept, self.upkeep)), split(self.draft)
        alone = split(self.autoregressive)
        return {key: np.where(self.gamma > 0, self.gamma * draft[key] + once[key], alone[key]) for key in once}

    def averaged(self, probability: Array, gamma: Array) -> StepTerms:
        """The mean step over the last axis, whose cases have this probability. Steps that draft nothing there are
        autoregressive; their operations count to the verification."""
        drafts = np.where(self.gamma > 0, probability, 0.0)
        return StepTerms(
            autoregressive=self.autoregressive.summed(probability), draft=self.draft.summed(drafts),
            verify=self.verify.summed(drafts).plus(self.autoregressive.summed(probability - drafts)),
            accept=self.accept.summed(drafts), upkeep=self.upkeep.summed(drafts), gamma=gamma,
        )  # fmt: skip


def step_terms(
    setup: Setup, *, batch: Any, kv_len: Any, draft_kv_len: Any, gamma: Any, tp_size: Any = 1,
    full_acceptance: Any = 1.0,
) -> StepTerms:  # fmt: skip
    """The terms of one step for `batch` sequences that hold `kv_len` tokens each, of which the draft reads
    `draft_kv_len`. `full_acceptance` is the probability that a sequence accepts all its drafts. Spread over groups and
    stages, the operations are those of one microbatch of the fullest group, through all stages."""
    whole, kv_len, draft_kv_len, gamma, tp = (
        np.asarray(value, dtype=np.float64) for value in (batch, kv_len, draft_kv_len, gamma, tp_size)
    )
    step = _Step(
        setup=setup, whole=whole, batch=microbatch(setup, whole), kv_len=kv_len, draft_kv_len=draft_kv_len,
        gamma=gamma, tp=tp,
    )  # fmt: skip
    nothing = ForwardTime(())
    alone = StepTerms(
        autoregressive=step.autoregressive(), draft=nothing, verify=nothing, accept=nothing, upkeep=nothing,
        gamma=np.zeros_like(gamma),
    )  # fmt: skip
    if setup.kind == "none":
        return alone
    draft, verify, accept = step.draft(), step.verify(), step.accept()
    upkeep = step.upkeep().plus(*step.catch_up(draft, full_acceptance))
    step_s = gamma * draft.total_s + verify.total_s + accept.total_s + upkeep.total_s
    upkeep = upkeep.plus(*step.in_stages(step_s, step.staged_passes()))
    return dataclasses.replace(alone, draft=draft, verify=verify, accept=accept, upkeep=upkeep, gamma=gamma)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One step of a microbatch: what its terms are made of."""

    setup: Setup
    whole: Array
    """Sequences of all microbatches and groups."""
    batch: Array
    kv_len: Array
    draft_kv_len: Array
    gamma: Array
    tp: Array

    @cached_property
    def speculating(self) -> EngineProfile:
        """The engine's constants in this step, if it speculates."""
        engine = self.setup.engine
        return engine.self_drafting if self.setup.kind == "self" else engine

    @property
    def verified(self) -> Array:
        """Tokens that are verified."""
        return self.batch * (self.gamma + 1.0)

    def autoregressive(self) -> ForwardTime:
        """The target's pass over one token of each sequence, and the choice of the next."""
        setup, engine = self.setup, self.setup.engine
        step_s, _ = engine.step_overheads(setup.hardware.name)
        alone = self._target_pass(1.0)
        time = alone.plus(
            *self._sampling(self.batch, self.tp, setup.model.vocab_size),
            fixed("step overhead", "overhead", step_s + self.batch * engine.sequence_overhead_s),
        )
        return time.plus(*self.in_stages(time.total_s, [(alone, np.ones(()), np.ones(()))]))

    def verify(self) -> ForwardTime:
        """The target's pass over a block of each sequence."""
        setup = self.setup
        engine = setup.engine
        host_s = engine.verify_overhead_s + self.verified * engine.scored_token_s
        time = self._block_pass.plus(fixed("verify overhead", "overhead", host_s))
        return time.plus(self._uncaptured(setup.model.num_hidden_layers)) if setup.leaves_graphs else time

    @cached_property
    def _block_pass(self) -> ForwardTime:
        return self._target_pass(self.gamma + 1.0)

    def _target_pass(self, query_len: Any) -> ForwardTime:
        return forward_pass(
            self.setup.model,
            Pass(
                at=self.setup.at, batch=self.batch, query_len=query_len, kv_len=self.kv_len + query_len - 1.0,
                tp=self.tp, spread=self.setup.spread,
            ),
        )  # fmt: skip

    def draft(self, query_len: Any = 1.0) -> ForwardTime:
        """One draft step of `query_len` tokens, on average over a block, whose own drafts it also reads. A parallel
        head takes one pass of gamma masked positions and the last token for the whole block: each step's share of
        it."""
        setup, engine, batch = self.setup, self.speculating, self.batch
        if setup.kind == "ngram":
            return ForwardTime(())
        is_parallel = setup.speculation.draft_method in PARALLEL_METHODS
        drafted = self._draft_pass(self.gamma + 1.0 if is_parallel else query_len)
        ranks, vocabulary = draft_tp(setup, self.tp), setup.drafter.vocab_size
        extra = [
            *self._sampling(batch * self.gamma if is_parallel else batch, ranks, vocabulary),
            fixed("draft overhead", "overhead", engine.draft_step_overhead_s),
        ]
        if setup.kind in ("standalone", "self") and engine.draft_model_layer_s:
            seconds = setup.drafter.num_hidden_layers * engine.draft_model_layer_s
            extra.append(fixed("uncaptured", "overhead", seconds))
        if setup.leaves_graphs:
            extra.append(self._uncaptured(setup.drafter.num_hidden_layers))
        if setup.kind == "eagle" and not is_parallel:
            extra.extend(self._head_input(ranks))
        if not setup.sampling.is_greedy and engine.sampling_s_per_element is None:
            stored = batch * vocabulary * FP32_BYTES / (ranks if engine.vocabulary == "sharded" else 1.0)
            extra.append(streaming("store distribution", setup.at, num_bytes=stored))
        whole = drafted.plus(*extra)
        return whole.times(1.0 / np.maximum(self.gamma, 1.0)) if is_parallel else whole

    def _uncaptured(self, layers: int) -> Op:
        """The time that a pass outside captured graphs adds."""
        engine = self.setup.engine
        seconds = engine.uncaptured_pass_s + layers * engine.prefill_layer_overhead_s
        return fixed("uncaptured", "overhead", seconds)

    def _draft_pass(self, query_len: Any) -> ForwardTime:
        """The network's pass of a draft step."""
        setup, method = self.setup, self.setup.speculation.draft_method
        own = np.maximum(self.gamma - 1.0, 0.0) / 2.0
        return forward_pass(
            setup.drafter,
            Pass(
                at=setup.drafting_at, batch=self.batch, query_len=query_len, kv_len=self.kv_len + own,
                full_kv_len=self.draft_kv_len + own, tp=draft_tp(setup, self.tp),
                logit_rows=self.batch * self.gamma if method in PARALLEL_METHODS else self.batch,
                attention_factor=setup.engine.draft_attention_factor if method in SPARSE_METHODS else 1.0,
                spread=setup.draft_spread,
            ),
        )  # fmt: skip

    def _head_input(self, ranks: Array) -> list[Op]:
        """How a draft head takes in the target's hidden state and the last token's embedding: EAGLE and multi-token
        prediction join them; the layer of EAGLE-3 projects both to queries, keys and values."""
        setup, hidden = self.setup, self.setup.drafter.hidden_size
        if setup.speculation.draft_method != "eagle3":
            return [linear("fuse", setup.drafting_at, m=self.batch, n=hidden, k=2 * hidden)]
        ((mixer, _),) = setup.drafter.mixers
        heads = size(mixer.projections(hidden)[0].outputs, ranks)
        return [
            linear("fuse", setup.drafting_at, m=self.batch, n=heads, k=hidden),
            fixed("draft overhead", "overhead", setup.engine.eagle3_draft_overhead_s),
        ]

    def accept(self) -> ForwardTime:
        """Acceptance of drafted tokens against the target's distribution at each verified one, and the draw of the
        next."""
        engine = self.setup.engine
        if self.setup.sampling.is_greedy:
            own = engine.greedy_accept_passes
            passes, given = engine.greedy_passes if own is None else own, engine.greedy_accept_s_per_element
        else:
            passes, given = engine.accept_passes, engine.accept_s_per_element
        operations = _vocabulary_ops(
            self.setup, "rejection", rows=self.verified, ranks=self.tp, size=self.setup.model.vocab_size,
            base_s=engine.accept_base_s, passes=passes, given=given,
        )  # fmt: skip
        return ForwardTime(tuple(operations))

    def _sampling(self, rows: Array, ranks: Array, vocab_size: int) -> list[Op]:
        """One token drawn from each of `rows` rows of logits (or the greatest taken)."""
        engine, is_greedy = self.setup.engine, self.setup.sampling.is_greedy
        passes = engine.greedy_passes if is_greedy else engine.sampling_passes
        given = engine.greedy_s_per_element if is_greedy else engine.sampling_s_per_element
        return _vocabulary_ops(
            self.setup, "sampling", rows=rows, ranks=ranks, size=vocab_size, base_s=engine.sampling_base_s,
            passes=passes, given=given,
        )  # fmt: skip

    def upkeep(self) -> ForwardTime:
        """Everything paid once per speculative step: the draft's cache, the hand-over between ranks, fixed costs."""
        setup, engine, batch = self.setup, self.speculating, self.batch
        sequence_s = engine.sequence_overhead_s + engine.speculation_sequence_s
        _, step_s = engine.step_overheads(setup.hardware.name)
        operations = [fixed("step overhead", "overhead", step_s + batch * sequence_s)]
        if setup.kind == "ngram":
            seconds = engine.ngram_lookup_s + batch * engine.ngram_lookup_s_per_sequence
            operations.append(fixed("lookup", "overhead", seconds))
        if setup.speculation.draft_method == "eagle3":  # three layers' hidden states of the verified tokens made one
            hidden = setup.model.hidden_size
            operations.append(linear("fuse", setup.drafting_at, m=self.verified, n=hidden, k=3.0 * hidden))
            operations.append(fixed("step overhead", "overhead", engine.eagle3_step_overhead_s))
        if setup.speculation.draft_method in PARALLEL_METHODS:
            operations.extend(_features(setup, tokens=self.verified, tp=self.tp))
        if setup.keeps_draft_cache:
            operations.extend(self._cache_upkeep())
        fewer = draft_tp(setup, self.tp) < self.tp
        if setup.kind != "ngram" and np.any(fewer):
            probabilities = 0.0 if setup.sampling.is_greedy else setup.model.vocab_size * FP32_BYTES
            message = batch * self.gamma * (TOKEN_BYTES + probabilities)
            operations.append(broadcast(setup.at, Message(message, np.where(fewer, self.tp, 1.0))))
        return ForwardTime(tuple(operations))

    def _cache_upkeep(self) -> list[Op]:
        """Verified tokens copied to a self-draft's cache; of top-k also the scores of the block's last query written by
        each head, pooled, the best chosen, and their KV gathered."""
        setup, engine, at = self.setup, self.setup.engine, self.setup.at
        layers = setup.model.num_full_attention_layers
        per_token = memory.sparse_kv_bytes_per_token(setup.model, setup.drafting_precision, self.tp)
        operations = [fixed("upkeep", "overhead", engine.upkeep_base_s)]
        if engine.upkeep_s_per_token is not None:
            operations.append(fixed("upkeep", "elementwise", self.verified * engine.upkeep_s_per_token))
        else:
            moved = 2.0 * self.verified * per_token
            operations.append(streaming("upkeep", at, num_bytes=moved, num_kernels=layers))
        if setup.speculation.draft_method == "topk":
            scores = self.batch * self.kv_len * setup.model.num_attention_heads / self.tp * FP32_BYTES
            gathered = 2.0 * self.batch * self.draft_kv_len * per_token
            operations += [
                streaming("score extraction", at, num_bytes=4.0 * scores, num_kernels=3.0, count=layers),
                streaming("gather", at, num_bytes=gathered, num_kernels=layers),
            ]
        return operations

    def catch_up(self, draft: ForwardTime, full_acceptance: Any) -> list[Op]:
        """The last drafted token processed by the draft too, where all drafts of some sequence were accepted."""
        setup, when = self.setup, self.setup.engine.catch_up
        if setup.kind == "ngram" or not (when == "always" or (when == "standalone" and setup.kind == "standalone")):
            return []
        some_sequence = 1.0 - (1.0 - np.clip(full_acceptance, 0.0, 1.0)) ** self.batch
        return [fixed("catch-up", "gemm", some_sequence * np.maximum(self.draft(2.0).total_s - draft.total_s, 0.0))]

    def staged_passes(self) -> list[tuple[ForwardTime, Array, Array]]:
        """The passes of a speculative step that go through all stages: each with how often, and its tokens per
        sequence."""
        if self.setup.spread.pp == 1:
            return []
        passes = [(self._block_pass, np.ones(()), self.gamma + 1.0)]
        own = [(self._draft_pass(1.0), self.gamma, np.ones(()))] if self.setup.kind == "self" else []
        return [*passes, *own]

    def in_stages(self, step_s: Array, passes: list[tuple[ForwardTime, Array, Array]]) -> list[Op]:
        """The operations that stages add to a step of `step_s`: sends, and waiting for the slowest. The rest of the
        step, next to `passes`, is the last stage's."""
        if self.setup.spread.pp == 1:
            return []
        layers_s: Array = np.asarray(0.0)
        sends: list[Op] = []
        for time, count, tokens in passes:
            send = send_op(self.setup, tokens=self.batch * tokens, tp_size=self.tp)
            head_s = sum((op.time_s for op in time.ops if op.name == "lm_head"), np.asarray(0.0))  # on the last stage
            layers_s = layers_s + count * (time.total_s - head_s)
            sends.append(fixed("send", "link", count * send.time_s, send.cost.times(count)))
        sends_s: Array = sum((op.time_s for op in sends), np.asarray(0.0))
        waiting = waiting_op(self.setup, batch=self.whole, layers_s=layers_s, last_s=step_s - layers_s, sends_s=sends_s)
        return [*sends, waiting]


def _vocabulary_ops(
    setup: Setup, name: str, *, rows: Array, ranks: Array, size: int, base_s: float, passes: float, given: float | None
) -> list[Op]:
    """Work on rows × vocabulary in fp32, after a gather of the logits on every rank, or on each rank's shard: by passes
    over memory, or by a measured time per element, which a sort lengthens by its share of passes."""
    engine, at = setup.engine, setup.at
    is_filtered = setup.sampling.top_p is not None or setup.sampling.top_k is not None
    sort = engine.top_p_passes if is_filtered and not setup.sampling.is_greedy else 0.0
    gathers = engine.vocabulary == "gather"
    elements = rows * size / (1.0 if gathers else ranks)
    operations = [fixed(name, "overhead", base_s)] if base_s else []
    if given is not None:
        each_s = given * (passes + sort) / max(passes, 1e-9)
        operations.append(fixed(name, "elementwise", elements * each_s))
    elif passes + sort:
        num_bytes = elements * FP32_BYTES * (passes + sort)
        operations.append(streaming(name, at, num_bytes=num_bytes, num_kernels=np.ceil((passes + sort) / 2.0)))
    if np.any(ranks > 1):
        if gathers:
            operations.append(all_gather(at, Message(elements * setup.precision.activation_bytes, ranks)))
        else:  # maximum and sum of each row
            operations.append(all_reduce(at, Message(rows * 2.0 * FP32_BYTES, ranks), count=2.0))
    return operations


def read_bytes(setup: ModelSetup, *, batch: Any, kv_len: Any, draft_kv_len: Any, gamma: Any) -> dict[str, Array]:
    """Bytes that the phases of a step must read: weights that its tokens touch, and what it sees of caches and states,
    each once, on all ranks together. `draft` is the block's gamma draft steps."""
    engine = msgspec.structs.replace(setup.engine, kv_reads="per_sequence")
    fields = {each.name: getattr(setup, each.name) for each in dataclasses.fields(setup)}
    counted = Setup(**{**fields, "engine": engine, "spread": TENSOR_PARALLEL, "hardware": ANY_DEVICE})
    terms = step_terms(counted, batch=batch, kv_len=kv_len, draft_kv_len=draft_kv_len, gamma=gamma)

    def read(time: ForwardTime) -> Array:
        return np.asarray(time.cost.weight_bytes + time.cost.kv_bytes, dtype=np.float64)

    return {
        "autoregressive": read(terms.autoregressive), "draft": terms.gamma * read(terms.draft),
        "verify": read(terms.verify),
    }  # fmt: skip


def looked_up_terms(
    setup: Setup, *, batch: Any, kv_len: Any, gamma: Any, share: Any, tp_size: Any = 1
) -> tuple[StepTerms, Array]:
    """The terms of a step with looked-up drafts, which each sequence has with probability `share`: by the number n of
    sequences that have one, 0 to the largest batch on a last axis, and the probability of each.

    A pass has one token for each sequence and gamma more for each that has a draft, gamma · n / batch per sequence on
    average; without any draft it is autoregressive. n is binomial: sequences are taken as independent, and on large
    grids as so many equal groups of them.
    """
    from scipy.special import gammaln, xlog1py, xlogy

    batch, kv_len, gamma, share, tp_size = (
        np.asarray(value, dtype=np.float64)[..., None] for value in (batch, kv_len, gamma, share, tp_size)
    )
    cells = np.broadcast(batch, kv_len, gamma, share, tp_size).size
    count = np.clip(np.round(batch), 1.0, max(FEWEST_GROUPS, MOST_CASES // cells))
    number = np.arange(int(count.max()) + 1.0)
    having = np.minimum(number, count)
    ways = gammaln(count + 1.0) - gammaln(having + 1.0) - gammaln(count - having + 1.0)
    probability = np.exp(ways + xlogy(having, share) + xlog1py(count - having, -share)) * (number <= count)
    drafted = gamma * having / count
    terms = step_terms(setup, batch=batch, kv_len=kv_len, draft_kv_len=kv_len, gamma=drafted, tp_size=tp_size)
    return terms, probability


def idle_step_s(setup: Setup, *, batch: Any, kv_len: Any, draft_kv_len: Any, tp_size: Any) -> Array:
    """A step of an engine that has this draft set up and drafts nothing (K = 0): an autoregressive one with the
    bookkeeping of speculation, and one step of a draft with a cache of its own, which must know every token."""
    terms = step_terms(
        setup, batch=batch, kv_len=kv_len, draft_kv_len=draft_kv_len, gamma=np.zeros(()), tp_size=tp_size
    )
    idle: Array = terms.autoregressive.total_s + terms.upkeep.total_s
    if setup.kind in ("standalone", "eagle"):
        idle = idle + terms.draft.total_s
    return idle


def _features(setup: Setup, *, tokens: Array, tp: Array) -> list[Op]:
    """How a parallel head takes in tokens of the text: hidden states of as many of the target's layers as it has are
    made one, from which each of its own layers computes keys and values."""
    at, drafter = setup.drafting_at, setup.drafter
    hidden, layers = float(drafter.hidden_size), float(drafter.num_hidden_layers)
    cached = sum(cache.num_heads * cache.elements_per_token * count for cache, count in drafter.caches)
    return [
        linear("fuse", at, m=tokens, n=hidden, k=layers * hidden),
        linear("features", at, m=tokens, n=cached / layers / tp, k=hidden, count=layers),
    ]


def prefill_terms(setup: Setup, *, batch: Any, prompt_len: Any, tp_size: Any = 1, budget: Any = None) -> ForwardTime:
    """Prefill of `batch` prompts on one group of tp ranks, the draft's share included, while every group has as many.

    A standalone draft reads the prompt too, of which a parallel head only needs keys and values; a sparse cache
    is selected (SnapKV, top-k: the observation window's scores over the prompt) and copied.
    """
    tp = np.asarray(tp_size, dtype=np.float64)
    batch, prompt = np.asarray(batch, dtype=np.float64), np.asarray(prompt_len, dtype=np.float64)
    time = prefill(setup.model, setup.at, batch=batch, prompt_len=prompt, tp=tp, spread=setup.spread)
    if setup.spread.pp > 1:
        time = time.plus(send_op(setup, tokens=batch * prompt, tp_size=tp))
    if setup.speculation.draft_method in PARALLEL_METHODS:
        time = time.plus(*_features(setup, tokens=batch * prompt, tp=tp))
    elif setup.kind in ("standalone", "eagle"):
        ranks, spread = draft_tp(setup, tp), setup.draft_spread
        own = prefill(setup.drafter, setup.drafting_at, batch=batch, prompt_len=prompt, tp=ranks, spread=spread)
        time = time.plus(own)
    if setup.keeps_draft_cache:
        kept = draft_kv_tokens(setup, prompt, budget)
        copied = 2.0 * batch * kept * memory.sparse_kv_bytes_per_token(setup.model, setup.drafting_precision, tp)
        layers = setup.model.num_full_attention_layers
        time = time.plus(streaming("draft cache", setup.at, num_bytes=copied, num_kernels=layers))
        if setup.speculation.draft_method in ("snapkv", "topk"):
            window = setup.speculation.observation_window
            scores = batch * prompt * window * setup.model.num_attention_heads / tp * FP32_BYTES
            time = time.plus(streaming("selection", setup.at, num_bytes=4.0 * scores, num_kernels=4.0, count=layers))
    return time


TENSORS_SENT = 2.0
"""Hidden states and the residual beside them (as vLLM sends them)."""


def send_op(setup: Setup, *, tokens: Any, tp_size: Any) -> Op:
    """The sends of `tokens` per group, over all stages."""
    ranks, spread, link = np.asarray(tp_size, dtype=np.float64), setup.spread, setup.hardware.link
    element = setup.precision.activation_bytes
    is_far = ranks * spread.groups > link.reach
    message = tokens * setup.model.hidden_size * element * TENSORS_SENT
    one = send(setup.at, Message(message, ranks), is_far=is_far)
    return fixed("send", "link", spread.pp * one.time_s, one.cost.times(spread.pp))


def waiting_op(setup: Setup, *, batch: Any, layers_s: Any, last_s: Any, sends_s: Any) -> Op:
    """The time that a step of all microbatches takes beyond one of them passing all stages: `layers_s` and `sends_s`,
    spread over the stages, and `last_s` on the last."""
    spread = setup.spread
    counts = np.asarray(spread.stage_layers(setup.model.num_hidden_layers), dtype=np.float64)
    shares = counts / counts.sum()
    slowest = np.maximum(shares[:-1].max() * layers_s, shares[-1] * layers_s + last_s) + sends_s / spread.pp
    per_group = np.ceil(np.asarray(batch, dtype=np.float64) / spread.dp)
    num_microbatches = np.minimum(per_group, float(spread.pp))
    through = layers_s + last_s + sends_s
    return fixed("waiting", "overhead", np.maximum(num_microbatches * slowest - through, 0.0))
