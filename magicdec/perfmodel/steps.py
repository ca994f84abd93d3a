"""The terms of one step, autoregressive or speculative: what is computed, sent and kept, for a given setup.

    T_step = gamma · T_draft + T_verify + T_accept + T_upkeep

`step_terms` is the only place where these terms are composed. At gamma = 0 a step is an autoregressive one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import msgspec
import numpy as np

from magicdec.perfmodel import memory, stages
from magicdec.perfmodel.forward import ForwardTime, forward_pass, prefill
from magicdec.perfmodel.kernels.base import FP32_BYTES, Array, Cost, Op, fixed
from magicdec.perfmodel.kernels.elementwise import streaming
from magicdec.perfmodel.kernels.gemm import linear
from magicdec.perfmodel.kernels.links import Message, all_gather, all_reduce, broadcast
from magicdec.perfmodel.kernels.profile import HardwareProfile
from magicdec.perfmodel.layer_ops import size
from magicdec.perfmodel.setup import ModelSetup, Setup, draft_kv_tokens, draft_tp
from magicdec.specs.device import DTYPE_BYTES
from magicdec.specs.model import ModelSpec
from magicdec.specs.parallel import TENSOR_PARALLEL, Parallelism
from magicdec.specs.precision import Precision
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
        step: Array = np.where(self.gamma > 0, self.gamma * self.draft.total_s + once, self.autoregressive.total_s)
        return step

    def step_seconds(self, by: Literal["group", "bound"]) -> dict[str, Array]:
        """The step's seconds by kind of term, or by what binds."""

        def split(time: ForwardTime) -> dict[str, Array]:
            if by == "group":
                return {str(group): seconds for group, seconds in time.group_seconds().items()}
            return {str(bound): seconds for bound, seconds in time.bound_seconds().items()}

        once, draft = split(self.verify.plus(self.accept, self.upkeep)), split(self.draft)
        alone = split(self.autoregressive)
        return {key: np.where(self.gamma > 0, self.gamma * draft[key] + once[key], alone[key]) for key in once}

    def averaged(self, probability: Array, gamma: Array) -> StepTerms:
        """The mean step over the last axis, whose cases have this probability. Steps that draft nothing there are
        autoregressive; their operations count to the verification."""
        drafts = np.where(self.gamma > 0, probability, 0.0)
        verify = _mean(self.verify, drafts).plus(_mean(self.autoregressive, probability - drafts))
        return StepTerms(
            autoregressive=_mean(self.autoregressive, probability), draft=_mean(self.draft, drafts), verify=verify,
            accept=_mean(self.accept, drafts), upkeep=_mean(self.upkeep, drafts), gamma=gamma,
        )  # fmt: skip


def _mean(time: ForwardTime, weight: Array) -> ForwardTime:
    """The operations of a pass summed over the last axis with these weights."""

    def summed(value: Any) -> Array:
        total: Array = np.sum(weight * value, axis=-1)
        return total

    return ForwardTime(
        tuple(
            replace(
                op, cost=Cost(*map(summed, op.cost)), time_s=summed(op.time_s), memory_s=summed(op.memory_s),
                compute_s=summed(op.compute_s), overhead_s=summed(op.overhead_s),
            )
            for op in time.ops
        )
    )  # fmt: skip


def sampling_ops(setup: Setup, *, rows: Any, tp_size: Any, vocab_size: int) -> list[Op]:
    """One token drawn from each of `rows` rows of logits (or the greatest taken)."""
    engine = setup.engine
    greedy, filtered = setup.sampling.is_greedy, setup.sampling.top_p is not None or setup.sampling.top_k is not None
    passes = engine.greedy_passes if greedy else engine.sampling_passes
    given = engine.greedy_s_per_element if greedy else engine.sampling_s_per_element
    sort = engine.top_p_passes if filtered and not greedy else 0.0
    return _over_vocabulary(
        "sampling", setup, rows=rows, tp_size=tp_size, vocab_size=vocab_size, base_s=engine.sampling_base_s,
        passes=passes + sort, seconds_per_element=_scaled(given, passes, sort),
    )  # fmt: skip


def accept_ops(setup: Setup, *, rows: Any, tp_size: Any) -> list[Op]:
    """Acceptance of drafted tokens against the target's distribution at each verified one, and the draw of the next."""
    engine = setup.engine
    greedy, filtered = setup.sampling.is_greedy, setup.sampling.top_p is not None or setup.sampling.top_k is not None
    greedily = engine.greedy_passes if engine.greedy_accept_passes is None else engine.greedy_accept_passes
    passes = greedily if greedy else engine.accept_passes
    given = engine.greedy_accept_s_per_element if greedy else engine.accept_s_per_element
    sort = engine.top_p_passes if filtered and not greedy else 0.0
    return _over_vocabulary(
        "rejection", setup, rows=rows, tp_size=tp_size, vocab_size=setup.model.vocab_size, base_s=engine.accept_base_s,
        passes=passes + sort, seconds_per_element=_scaled(given, passes, sort),
    )  # fmt: skip


def _scaled(seconds_per_element: float | None, passes: float, sort: float) -> float | None:
    """A measured time per element, lengthened by the passes of a sort that it does not hold."""
    return None if seconds_per_element is None else seconds_per_element * (passes + sort) / max(passes, 1e-9)


def _over_vocabulary(
    name: str, setup: Setup, *, rows: Any, tp_size: Any, vocab_size: int, base_s: float, passes: float,
    seconds_per_element: float | None,
) -> list[Op]:  # fmt: skip
    """Work on rows × vocabulary in fp32: after a gather of the logits on every rank, or on each rank's shard."""
    tp = np.asarray(tp_size, dtype=np.float64)
    gathers = setup.engine.vocabulary == "gather"
    elements = np.asarray(rows, dtype=np.float64) * vocab_size / (1.0 if gathers else tp)
    operations = [fixed(name, "overhead", base_s)] if base_s else []
    if seconds_per_element is not None:
        operations.append(fixed(name, "elementwise", elements * seconds_per_element))
    elif passes:
        num_bytes = elements * FP32_BYTES * passes
        operations.append(streaming(name, setup.at, num_bytes=num_bytes, num_kernels=np.ceil(passes / 2.0)))
    if np.any(tp > 1):
        if gathers:
            element = setup.precision.activation_bytes
            exchange = all_gather(setup.at, Message(elements * element, tp))
        else:  # maximum and sum of each row
            rows_bytes = np.asarray(rows, dtype=np.float64) * 2.0 * FP32_BYTES
            exchange = all_reduce(setup.at, Message(rows_bytes, tp), count=2.0)
        operations.append(exchange)
    return operations


def step_terms(
    setup: Setup,
    *,
    batch: Any,
    kv_len: Any,
    draft_kv_len: Any,
    gamma: Any,
    tp_size: Any = 1,
    full_acceptance: Any = 1.0,
) -> StepTerms:
    """The terms of one step for `batch` sequences that hold `kv_len` tokens each, of which the draft reads
    `draft_kv_len`. `full_acceptance` is the probability that a sequence accepts all its drafts. Spread over groups and
    stages, the operations are those of one microbatch of the fullest group, through all stages."""
    batch, kv_len, gamma = (np.asarray(value, dtype=np.float64) for value in (batch, kv_len, gamma))
    whole, batch = batch, stages.microbatch(setup, batch)
    engine, precision, tp = setup.engine, setup.precision, np.asarray(tp_size, dtype=np.float64)

    def target_pass(query_len: Any) -> ForwardTime:
        return forward_pass(
            setup.model, setup.hardware, engine, batch=batch, query_len=query_len, kv_len=kv_len + query_len - 1.0,
            tp_size=tp, weight_dtype=precision.weight_dtype, kv_dtype=precision.kv_dtype, spread=setup.spread,
        )  # fmt: skip

    alone = target_pass(1.0)
    step_s, _ = engine.step_overheads(setup.hardware.name)
    autoregressive = alone.plus(
        *sampling_ops(setup, rows=batch, tp_size=tp, vocab_size=setup.model.vocab_size),
        fixed("step overhead", "overhead", step_s + batch * engine.sequence_overhead_s),
    )
    once = [(alone, np.ones(()), np.ones(()))]
    autoregressive = autoregressive.plus(
        *_in_stages(setup, autoregressive.total_s, once, whole=whole, batch=batch, tp=tp)
    )
    if setup.kind == "none":
        nothing = ForwardTime(())
        return StepTerms(
            autoregressive=autoregressive, draft=nothing, verify=nothing, accept=nothing, upkeep=nothing,
            gamma=np.zeros_like(gamma),
        )  # fmt: skip
    verified = target_pass(gamma + 1.0)
    verify = verified.plus(fixed("verify overhead", "overhead", engine.verify_overhead_s))
    if setup.leaves_graphs:
        verify = verify.plus(_uncaptured(setup, setup.model.num_hidden_layers))
    accept = ForwardTime(tuple(accept_ops(setup, rows=batch * (gamma + 1.0), tp_size=tp)))
    draft = _draft_step(setup, batch=batch, kv_len=kv_len, draft_kv_len=draft_kv_len, gamma=gamma, tp=tp)
    upkeep = _upkeep(setup, batch=batch, kv_len=kv_len, draft_kv_len=draft_kv_len, gamma=gamma, tp=tp)
    catches_up = engine.catch_up == "always" or (engine.catch_up == "standalone" and setup.kind == "standalone")
    if catches_up and setup.kind != "ngram":
        some_sequence = 1.0 - (1.0 - np.clip(full_acceptance, 0.0, 1.0)) ** batch
        of_two = _draft_step(
            setup, batch=batch, kv_len=kv_len, draft_kv_len=draft_kv_len, gamma=gamma, tp=tp, query_len=2.0
        )
        extra = some_sequence * np.maximum(of_two.total_s - draft.total_s, 0.0)
        upkeep = upkeep.plus(fixed("catch-up", "gemm", extra))
    passes = [(verified, np.ones(()), gamma + 1.0)]
    if setup.kind == "self" and setup.spread.pp > 1:
        own = _draft_pass(setup, batch=batch, kv_len=kv_len, draft_kv_len=draft_kv_len, gamma=gamma, tp=tp)
        passes.append((own, gamma, np.ones(())))
    step_s = gamma * draft.total_s + verify.total_s + accept.total_s + upkeep.total_s
    upkeep = upkeep.plus(*_in_stages(setup, step_s, passes, whole=whole, batch=batch, tp=tp))
    return StepTerms(
        autoregressive=autoregressive, draft=draft, verify=verify, accept=accept, upkeep=upkeep, gamma=gamma
    )


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


def _in_stages(
    setup: Setup,
    step_s: Array,
    passes: list[tuple[ForwardTime, Array, Array]],
    *,
    whole: Array,
    batch: Array,
    tp: Array,
) -> list[Op]:
    """What stages add to a step of `step_s`: sends, and waiting for the slowest. `passes` go through all stages: each
    with how often, and its tokens per sequence. The rest of the step is the last stage's."""
    if setup.spread.pp == 1:
        return []
    layers_s: Array = np.asarray(0.0)
    sends: list[Op] = []
    for time, count, tokens in passes:
        send = stages.send_op(setup, tokens=batch * tokens, tp_size=tp)
        layers_s = layers_s + count * (time.total_s - stages.head_s(time))
        sends.append(fixed("send", "link", count * send.time_s, send.cost.times(count)))
    sends_s: Array = sum((op.time_s for op in sends), np.asarray(0.0))
    waiting = stages.waiting_op(setup, batch=whole, layers_s=layers_s, last_s=step_s - layers_s, sends_s=sends_s)
    return [*sends, waiting]


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


def _draft_step(
    setup: Setup, *, batch: Array, kv_len: Array, draft_kv_len: Any, gamma: Array, tp: Array, query_len: Any = 1.0
) -> ForwardTime:
    """One draft step of `query_len` tokens, on average over a block, whose own drafts it also reads. A parallel head
    takes one pass of gamma masked positions and the last token for the whole block: each step's share of it."""
    engine = setup.engine
    if setup.kind == "ngram":
        return ForwardTime(())
    is_parallel = setup.speculation.draft_method in PARALLEL_METHODS
    rows = batch * gamma if is_parallel else batch
    query_len = gamma + 1.0 if is_parallel else query_len
    drafted = _draft_pass(
        setup, batch=batch, kv_len=kv_len, draft_kv_len=draft_kv_len, gamma=gamma, tp=tp, query_len=query_len
    )
    ranks, vocabulary = draft_tp(setup, tp), setup.drafter.vocab_size
    extra = [
        *sampling_ops(setup, rows=rows, tp_size=ranks, vocab_size=vocabulary),
        fixed("draft overhead", "overhead", engine.draft_step_overhead_s),
    ]
    if setup.kind == "standalone" and engine.draft_model_layer_s:
        seconds = setup.drafter.num_hidden_layers * engine.draft_model_layer_s
        extra.append(fixed("uncaptured", "overhead", seconds))
    if setup.leaves_graphs:
        extra.append(_uncaptured(setup, setup.drafter.num_hidden_layers))
    if setup.kind == "eagle" and not is_parallel:
        extra.extend(_head_input(setup, batch=batch, ranks=ranks))
    if not setup.sampling.is_greedy and engine.sampling_s_per_element is None:
        stored = batch * vocabulary * FP32_BYTES / (ranks if engine.vocabulary == "sharded" else 1.0)
        extra.append(streaming("store distribution", setup.at, num_bytes=stored))
    whole = drafted.plus(*extra)
    return whole.times(1.0 / np.maximum(gamma, 1.0)) if is_parallel else whole


def _uncaptured(setup: Setup, layers: int) -> Op:
    """What a pass outside captured graphs takes longer."""
    engine = setup.engine
    seconds = engine.uncaptured_pass_s + layers * engine.prefill_layer_overhead_s
    return fixed("uncaptured", "overhead", seconds)


def _draft_pass(
    setup: Setup, *, batch: Array, kv_len: Array, draft_kv_len: Any, gamma: Array, tp: Array, query_len: Any = 1.0
) -> ForwardTime:
    """The network's pass of a draft step."""
    ranks, precision, drafter = draft_tp(setup, tp), setup.drafting_precision, setup.drafter
    own = np.maximum(gamma - 1.0, 0.0) / 2.0
    is_sparse = setup.speculation.draft_method in SPARSE_METHODS
    return forward_pass(
        drafter, setup.hardware, setup.engine, batch=batch, query_len=query_len, kv_len=kv_len + own,
        full_kv_len=np.asarray(draft_kv_len) + own,
        tp_size=ranks, weight_dtype=precision.weight_dtype, kv_dtype=precision.kv_dtype,
        logit_rows=batch * gamma if setup.speculation.draft_method in PARALLEL_METHODS else batch,
        attention_factor=setup.engine.draft_attention_factor if is_sparse else 1.0, spread=setup.draft_spread,
    )  # fmt: skip


def _head_input(setup: Setup, *, batch: Array, ranks: Array) -> list[Op]:
    """How a draft head takes in the target's hidden state and the last token's embedding: EAGLE and multi-token
    prediction join them; the layer of EAGLE-3 projects both to queries, keys and values."""
    engine, drafter = setup.engine, setup.drafter
    hidden = drafter.hidden_size
    if setup.speculation.draft_method != "eagle3":
        return [linear("fuse", setup.drafting_at, m=batch, n=hidden, k=2 * hidden)]
    ((mixer, _),) = drafter.mixers
    heads = size(mixer.projections(hidden)[0].outputs, ranks)
    return [
        linear("fuse", setup.drafting_at, m=batch, n=heads, k=hidden),
        fixed("draft overhead", "overhead", engine.eagle3_draft_overhead_s),
    ]


def _upkeep(setup: Setup, *, batch: Array, kv_len: Array, draft_kv_len: Any, gamma: Array, tp: Array) -> ForwardTime:
    """What is paid once per speculative step: the draft's cache, the hand-over between ranks, fixed costs."""
    engine = setup.engine
    sequence_s = engine.sequence_overhead_s + engine.speculation_sequence_s
    _, step_s = engine.step_overheads(setup.hardware.name)
    operations = [fixed("step overhead", "overhead", step_s + batch * sequence_s)]
    if setup.kind == "ngram":
        seconds = engine.ngram_lookup_s + batch * engine.ngram_lookup_s_per_sequence
        operations.append(fixed("lookup", "overhead", seconds))
    if setup.speculation.draft_method == "eagle3":  # three layers' hidden states of the verified tokens made one
        hidden = setup.model.hidden_size
        tokens = batch * (gamma + 1.0)
        operations.append(linear("fuse", setup.drafting_at, m=tokens, n=hidden, k=3.0 * hidden))
        operations.append(fixed("step overhead", "overhead", engine.eagle3_step_overhead_s))
    if setup.speculation.draft_method in PARALLEL_METHODS:
        operations.extend(_features(setup, tokens=batch * (gamma + 1.0), tp=tp))
    if setup.keeps_draft_cache:
        per_token = memory.sparse_kv_bytes_per_token(setup.model, setup.drafting_precision, tp)
        tokens = batch * (gamma + 1.0)
        operations.append(fixed("upkeep", "overhead", engine.upkeep_base_s))
        if engine.upkeep_s_per_token is not None:
            operations.append(fixed("upkeep", "elementwise", tokens * engine.upkeep_s_per_token))
        else:
            layers = setup.model.num_full_attention_layers
            operations.append(streaming("upkeep", setup.at, num_bytes=2.0 * tokens * per_token, num_kernels=layers))
        if setup.speculation.draft_method == "topk":
            operations.extend(_topk_refresh(setup, batch=batch, kv_len=kv_len, draft_kv_len=draft_kv_len, tp=tp))
    fewer = draft_tp(setup, tp) < tp
    if setup.kind != "ngram" and np.any(fewer):
        probabilities = 0.0 if setup.sampling.is_greedy else setup.model.vocab_size * FP32_BYTES
        message = batch * gamma * (TOKEN_BYTES + probabilities)
        operations.append(broadcast(setup.at, Message(message, np.where(fewer, tp, 1.0))))
    return ForwardTime(tuple(operations))


def _features(setup: Setup, *, tokens: Array, tp: Array) -> list[Op]:
    """How a parallel head takes in verified tokens: hidden states of as many of the target's layers as it has are made
    one, from which each of its own layers computes keys and values."""
    drafter = setup.drafter
    hidden, layers = float(drafter.hidden_size), float(drafter.num_hidden_layers)
    width = sum(cache.num_heads * cache.elements_per_token * count for cache, count in drafter.caches) / layers / tp
    return [
        linear("fuse", setup.drafting_at, m=tokens, n=hidden, k=layers * hidden),
        linear("features", setup.drafting_at, m=tokens, n=width, k=hidden, count=layers),
    ]


def _topk_refresh(setup: Setup, *, batch: Array, kv_len: Array, draft_kv_len: Any, tp: Array) -> list[Op]:
    """The scores of the block's last query written by each head, pooled, the best chosen, and their KV gathered."""
    layers = setup.model.num_full_attention_layers
    scores = batch * kv_len * setup.model.num_attention_heads / tp * FP32_BYTES
    per_token = memory.sparse_kv_bytes_per_token(setup.model, setup.drafting_precision, tp)
    gathered = 2.0 * batch * np.asarray(draft_kv_len) * per_token
    return [
        streaming("score extraction", setup.at, num_bytes=4.0 * scores, num_kernels=3.0, count=layers),
        streaming("gather", setup.at, num_bytes=gathered, num_kernels=layers),
    ]


def prefill_terms(setup: Setup, *, batch: Any, prompt_len: Any, tp_size: Any = 1, budget: Any = None) -> ForwardTime:
    """Prefill of `batch` prompts on one group of tp ranks, the draft's share included, while every group has as many.

    A standalone draft reads the prompt too; a sparse cache is selected (SnapKV, top-k: the observation window's scores
    over the prompt) and copied.
    """
    tp = np.asarray(tp_size, dtype=np.float64)
    batch, prompt = np.asarray(batch, dtype=np.float64), np.asarray(prompt_len, dtype=np.float64)
    engine, hw = setup.engine, setup.hardware

    def of(model: ModelSpec, precision: Precision, ranks: Array, spread: Parallelism) -> ForwardTime:
        return prefill(
            model, hw, engine, batch=batch, prompt_len=prompt, tp_size=ranks, weight_dtype=precision.weight_dtype,
            kv_dtype=precision.kv_dtype, spread=spread,
        )  # fmt: skip

    time = of(setup.model, setup.precision, tp, setup.spread)
    if setup.spread.pp > 1:
        time = time.plus(stages.send_op(setup, tokens=batch * prompt, tp_size=tp))
    if setup.kind in ("standalone", "eagle"):
        time = time.plus(of(setup.drafter, setup.drafting_precision, draft_tp(setup, tp), setup.draft_spread))
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
