"""Cost and time of each operation of a forward pass, on one rank of a tensor-parallel group.

    linear      2·m·n·k FLOPs; weights n·k; activations m·(n + k)
    attention   4·batch·q·kv·heads·head_dim FLOPs; KV 2·batch·kv·kv_heads·head_dim, once per sequence or per query token
    experts     the experts that a batch touches, E·(1 − (1 − k/E)^tokens), each read once
    softmax &c. passes over rows × vocabulary in fp32

Ignored: biases, the embedding's gather (one row per token), rotary tables, imbalance between experts beyond its mean.
All arguments broadcast. A rank's share of KV heads is at least one head: beyond tp = KV heads they are replicated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from magicdec.perfmodel.collectives import (
    all_gather_time,
    all_reduce_time,
    broadcast_time,
    exchange_time,
    send_time,
)
from magicdec.perfmodel.cost import Array, Cost, total
from magicdec.perfmodel.layer_times import (
    KEY_BYTES,
    indexer_time,
    linear_prefill_time,
    linear_time,
    sparse_time,
    top_k_time,
)
from magicdec.perfmodel.roofline import (
    OpTime,
    attention_time,
    causal_pairs,
    elementwise_time,
    experts_touched,
    gemm_time,
    latent_attention_time,
    moe_time,
    prefill_attention_time,
)
from magicdec.specs.engine import EngineProfile
from magicdec.specs.hardware import HardwareProfile, MoeCurve, bytes_per_element
from magicdec.specs.layers import Part
from magicdec.specs.precision import Precision

Group = Literal["gemm", "experts", "attention", "elementwise", "link", "overhead"]
BoundBy = Literal["weights", "kv", "compute", "link", "overhead"]
GROUPS: tuple[Group, ...] = ("gemm", "experts", "attention", "elementwise", "link", "overhead")
BOUNDS: tuple[BoundBy, ...] = ("weights", "kv", "compute", "link", "overhead")
FP32_BYTES = 4.0
REACHED_BANDWIDTH = 0.95
"""Share of the memory's peak that the best kernels reach: no engine's factor makes an operation faster."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """A named operation: its cost and its time, over all of its repetitions in the pass."""

    name: str
    group: Group
    cost: Cost
    time_s: Array
    memory_s: Array
    compute_s: Array
    overhead_s: Array

    def times(self, factor: Any) -> Op:
        """The operation so many times."""
        return replace(
            self, cost=self.cost.times(factor), time_s=self.time_s * factor, memory_s=self.memory_s * factor,
            compute_s=self.compute_s * factor, overhead_s=self.overhead_s * factor,
        )  # fmt: skip


def _op(
    name: str, group: Group, cost: Cost, time: OpTime, *, count: Any = 1.0, factor: Any = 1.0, least_s: Any = 0.0
) -> Op:
    """No factor makes an operation faster than `least_s` (the curve itself may be, out of a cache)."""
    scale = count * factor
    return Op(
        name=name,
        group=group,
        cost=cost.times(count),
        time_s=np.maximum(time.time_s * factor, np.minimum(time.time_s, least_s)) * count,
        memory_s=time.memory_s * scale,
        compute_s=time.compute_s * scale,
        overhead_s=time.overhead_s * scale,
    )


def _least_s(hw: HardwareProfile, cost: Cost, dtype: str) -> Array:
    """Seconds in which the memory and the processor's peak in `dtype` can do the work. What a matrix product reads of
    activations is left out: a cache may hold it."""
    num_bytes = cost.weight_bytes + cost.kv_bytes
    least: Array = np.maximum(
        num_bytes / (REACHED_BANDWIDTH * hw.memory_bytes_per_s), cost.flops / hw.compute_rate(dtype)
    )
    return least


def fixed(name: str, group: Group, seconds: Any, cost: Cost | None = None) -> Op:
    """An operation of known duration: overheads and collectives."""
    time = np.asarray(seconds, dtype=np.float64)
    zero = np.zeros_like(time)
    return Op(name=name, group=group, cost=cost or Cost(), time_s=time, memory_s=zero, compute_s=zero, overhead_s=time)


def matrix_dtype(hw: HardwareProfile, engine: EngineProfile, precision: Precision) -> str:
    """The format that products run in: the weights' own where engine and device have it, else 16 or 32 bits."""
    own = precision.weight_dtype
    return own if own in engine.native_formats and hw.computes_in(own) else precision.compute_dtype


def linear(
    name: str,
    hw: HardwareProfile,
    engine: EngineProfile,
    precision: Precision,
    *,
    m: Any,
    n: Any,
    k: Any,
    count: Any = 1.0,
    is_beside: bool = False,
) -> Op:
    """`count` linear layers of m tokens through weights n × k. `is_beside`: they run next to another operation, so
    their work is paid and their launches are not."""
    m, n, k = (np.asarray(value, dtype=np.float64) for value in (m, n, k))
    compute_dtype = matrix_dtype(hw, engine, precision)
    read, written = bytes_per_element(compute_dtype), 4.0 if compute_dtype == "fp32" else 2.0
    cost = Cost(
        flops=2.0 * m * n * k,
        weight_bytes=n * k * precision.weight_bytes,
        activation_bytes=m * (n * written + k * read),
    )
    time = gemm_time(hw, m=m, n=n, k=k, weight_dtype=precision.weight_dtype, compute_dtype=compute_dtype)
    is_narrow = compute_dtype != precision.compute_dtype
    factor = engine.narrow_gemm_factor if is_narrow else engine.gemm_factor
    least_s = _least_s(hw, cost, compute_dtype)
    if is_beside:
        work_s = np.maximum(time.time_s - time.overhead_s, 0.0)
        time = time._replace(time_s=work_s, overhead_s=np.zeros_like(time.overhead_s))
    return _op(name, "gemm", cost, time, count=count, factor=factor, least_s=least_s)


def experts(
    hw: HardwareProfile,
    engine: EngineProfile,
    precision: Precision,
    *,
    tokens: Any,
    hidden_size: Any,
    width: Any,
    num_experts: Any,
    num_experts_per_tok: Any,
    num_inner: int = 2,
    own_tokens: Any = None,
    count: Any = 1.0,
) -> list[Op]:
    """`count` layers of routed experts, of which one rank holds `width` of each; `num_inner` matrices before the last.

    Of whole experts divided over ranks, `num_experts` and `num_experts_per_tok` are one rank's share, and `own_tokens`
    those of `tokens` whose hidden states it has itself. By the curve of fused kernels where the engine has them and the
    device's were measured; else the touched experts' weights side by side, each for its share of tokens.
    """
    tokens = np.asarray(tokens, dtype=np.float64)
    curve = experts_curve(hw, engine, precision)
    touched = experts_touched(num_experts, num_experts_per_tok, tokens, 1.0 if curve is None else curve.independence)
    shared = {"m": tokens * num_experts_per_tok / np.maximum(touched, 1e-9), "count": count}
    parts = [
        linear("gate_up", hw, engine, precision, n=num_inner * touched * width, k=hidden_size, **shared),
        linear("down", hw, engine, precision, n=hidden_size, k=touched * width, **shared),
    ]
    if curve is None:
        return parts
    compute_dtype = matrix_dtype(hw, engine, precision)
    time = moe_time(
        hw, curve, tokens=tokens, hidden_size=hidden_size, width=width, num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok, num_matrices=num_inner + 1.0, weight_dtype=precision.weight_dtype,
        compute_dtype=compute_dtype, own_tokens=own_tokens,
    )  # fmt: skip
    cost = total([part.cost for part in parts])
    cost = cost.times(1.0 / np.asarray(count))
    least_s = _least_s(hw, cost, compute_dtype)
    return [_op("experts", "experts", cost, time, count=count, factor=engine.experts_factor, least_s=least_s)]


def experts_curve(hw: HardwareProfile, engine: EngineProfile, precision: Precision) -> MoeCurve | None:
    """The curve of fused kernels for experts of this format; None where the engine or the device has none.

    On Hopper the table's for fp8 per tensor reach 15-21 % of the bandwidth, which no measured server shows: of the
    two kinds of fp8 kernels, those that read weights faster. The tables' for mxfp4 widen its weights to 16 bits; where
    products run in it, nvfp4's are its like.
    """
    own = precision.weight_dtype
    alike = ("fp8", "fp8_block") if own == "fp8" else (own,)
    if own == "mxfp4" and matrix_dtype(hw, engine, precision) == own and "nvfp4" in hw.moe:
        alike = ("nvfp4",)
    known = [hw.moe[name] for name in alike if name in hw.moe and engine.fused_experts]
    return max(known, key=lambda curve: curve.bandwidth_efficiency, default=None)


def attention(
    hw: HardwareProfile,
    engine: EngineProfile,
    precision: Precision,
    *,
    batch: Any,
    query_len: Any,
    kv_len: Any,
    num_heads: Any,
    num_kv_heads: Any,
    head_dim: int,
    count: Any = 1.0,
    factor: Any = 1.0,
) -> Op:
    """`count` layers of attention of `query_len` tokens per sequence over `kv_len` cached ones."""
    batch, query_len, kv_len = (np.asarray(value, dtype=np.float64) for value in (batch, query_len, kv_len))
    reads = query_len if engine.kv_reads == "per_query" else 1.0
    cost = Cost(
        flops=4.0 * batch * query_len * kv_len * num_heads * head_dim,
        kv_bytes=2.0 * batch * kv_len * num_kv_heads * head_dim * precision.kv_bytes * reads,
    )
    time = attention_time(
        hw,
        batch=batch,
        query_len=query_len,
        kv_len=kv_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_dtype=precision.kv_dtype,
        kv_reads=engine.kv_reads,
        kernel=engine.attention_kernel,
    )
    factor = engine.attention_factor * factor * _last_wave(hw, engine, blocks=batch * num_kv_heads)
    least_s = _least_s(hw, cost, precision.kv_dtype)
    return _op("attention", "attention", cost, time, count=count, factor=factor, least_s=least_s)


def prefill_attention(
    hw: HardwareProfile,
    precision: Precision,
    *,
    batch: Any,
    prompt_len: Any,
    num_chunks: Any,
    num_heads: Any,
    num_kv_heads: Any,
    head_dim: int,
    window: int | None = None,
    count: Any = 1.0,
) -> Op:
    """`count` layers of causal attention of whole prompts, in `num_chunks` equal chunks, of which each reads the keys
    before it; at most `window` of them."""
    batch, prompt = np.asarray(batch, dtype=np.float64), np.asarray(prompt_len, dtype=np.float64)
    pairs = causal_pairs(prompt, prompt)
    chunk = prompt / num_chunks
    seen = (prompt + chunk) / 2.0  # the mean of the chunks
    if window is not None:
        beyond = np.maximum(prompt - window, 0.0)
        pairs = pairs - causal_pairs(beyond, beyond)
        seen = np.minimum(seen, window + chunk)
    cost = Cost(
        flops=4.0 * batch * pairs / num_chunks * num_heads * head_dim,
        kv_bytes=2.0 * batch * seen * num_kv_heads * head_dim * precision.kv_bytes,
    )
    time = prefill_attention_time(
        hw, batch=batch, query_len=chunk, kv_len=seen, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, kv_dtype=precision.kv_dtype, pairs=pairs / num_chunks,
    )  # fmt: skip
    return _op("attention", "attention", cost, time, count=count * num_chunks)


def latent_attention(
    hw: HardwareProfile,
    engine: EngineProfile,
    precision: Precision,
    *,
    batch: Any,
    query_len: Any,
    kv_len: Any,
    num_heads: Any,
    latent_dim: int,
    value_dim: int,
    is_sparse: bool = False,
    count: Any = 1.0,
    factor: Any = 1.0,
) -> Op:
    """`count` layers of absorbed latent attention: every head attends to the same `latent_dim` numbers per token, the
    first `value_dim` of which are the values. 2·b·q·kv·heads·(latent + value) FLOPs; the latents read once, or
    (`is_sparse`) once per query token, whose choices differ.
    """
    batch, query_len, kv_len = (np.asarray(value, dtype=np.float64) for value in (batch, query_len, kv_len))
    if is_sparse and precision.kv_dtype in hw.sparse:
        return _sparse(
            hw, precision, tokens=batch * query_len, num_chosen=kv_len, num_heads=num_heads, row=latent_dim,
            flops_per_pair=2.0 * (latent_dim + value_dim), count=count, factor=factor,
        )  # fmt: skip
    if is_sparse:
        batch, query_len = batch * query_len, np.minimum(query_len, 1.0)
    return _one_latent(
        "attention", hw, engine, precision, batch=batch, query_len=query_len, kv_len=kv_len, num_heads=num_heads,
        row=latent_dim, flops_per_pair=2.0 * (latent_dim + value_dim), count=count, factor=factor,
    )  # fmt: skip


def _sparse(
    hw: HardwareProfile,
    precision: Precision,
    *,
    tokens: Array,
    num_chosen: Array,
    num_heads: Any,
    row: int,
    flops_per_pair: float,
    count: Any,
    factor: Any,
) -> Op:
    """Attention of each query token to latents chosen for it alone, by the kernel's own curve."""
    row_bytes = row * precision.kv_bytes
    cost = Cost(
        flops=tokens * num_chosen * np.asarray(num_heads, dtype=np.float64) * flops_per_pair,
        kv_bytes=tokens * num_chosen * row_bytes,
    )
    time = sparse_time(
        hw, hw.sparse[precision.kv_dtype], tokens=tokens, num_chosen=num_chosen, num_heads=num_heads,
        flops_per_pair=flops_per_pair, row_bytes=row_bytes,
    )  # fmt: skip
    least_s = _least_s(hw, cost, precision.kv_dtype)
    return _op("attention", "attention", cost, time, count=count, factor=factor, least_s=least_s)


def latent_prefill_attention(
    hw: HardwareProfile,
    engine: EngineProfile,
    precision: Precision,
    *,
    batch: Any,
    query_len: Any,
    kv_len: Any,
    num_heads: Any,
    key_dim: int,
    value_dim: int,
    count: Any = 1.0,
    factor: Any = 1.0,
) -> Op:
    """`count` layers of latent attention over expanded keys and values, as in prefill: heads of their own KV."""
    batch, query_len, kv_len = (np.asarray(value, dtype=np.float64) for value in (batch, query_len, kv_len))
    heads = np.asarray(num_heads, dtype=np.float64)
    cost = Cost(
        flops=2.0 * batch * query_len * kv_len * heads * (key_dim + value_dim),
        kv_bytes=batch * kv_len * heads * (key_dim + value_dim) * precision.kv_bytes,
    )
    time = attention_time(
        hw, batch=batch, query_len=query_len, kv_len=kv_len, num_heads=heads, num_kv_heads=heads,
        head_dim=(key_dim + value_dim) / 2.0, kv_dtype=precision.kv_dtype, kv_reads=engine.kv_reads,
        kernel=engine.attention_kernel,
    )  # fmt: skip
    factor, least_s = engine.attention_factor * factor, _least_s(hw, cost, precision.kv_dtype)
    return _op("attention", "attention", cost, time, count=count, factor=factor, least_s=least_s)


def indexer(
    hw: HardwareProfile,
    engine: EngineProfile,
    precision: Precision,
    *,
    batch: Any,
    query_len: Any,
    kv_len: Any,
    num_heads: int,
    head_dim: int,
    top_k: int,
    count: Any = 1.0,
) -> list[Op]:
    """`count` layers of an indexer's scores, each query token's small heads over one key of each cached token, and of
    choosing the `top_k` best where there are more. By the curves of their kernels, whose keys are fp8; where none was
    measured as attention over one row, and choosing costs nothing."""
    batch, query_len, kv_len = (np.asarray(value, dtype=np.float64) for value in (batch, query_len, kv_len))
    if hw.indexer is None:
        return [
            _one_latent(
                "indexer", hw, engine, precision, batch=batch, query_len=query_len, kv_len=kv_len, num_heads=num_heads,
                row=head_dim, flops_per_pair=2.0 * (head_dim + 1), count=count, factor=1.0,
            )
        ]  # fmt: skip
    cost = Cost(
        flops=batch * query_len * kv_len * num_heads * 2.0 * (head_dim + 1),
        kv_bytes=batch * kv_len * head_dim * KEY_BYTES,
    )
    time = indexer_time(
        hw, hw.indexer, batch=batch, query_len=query_len, kv_len=kv_len, num_heads=num_heads, head_dim=head_dim
    )
    scores = _op("indexer", "attention", cost, time, count=count)
    if not hw.top_k:
        return [scores]
    rows = batch * query_len
    chosen = [top_k_time(hw, curve, rows=rows, kv_len=kv_len) for curve in hw.top_k.values()]
    mean = OpTime(*(np.mean(np.stack(part), axis=0) for part in zip(*chosen, strict=True)))
    needed = np.where(kv_len > top_k, 1.0, 0.0)
    choosing = _op("top k", "attention", Cost(activation_bytes=4.0 * rows * kv_len), mean, count=count * needed)
    return [scores, choosing]


def _one_latent(
    name: str,
    hw: HardwareProfile,
    engine: EngineProfile,
    precision: Precision,
    *,
    batch: Array,
    query_len: Array,
    kv_len: Array,
    num_heads: Any,
    row: int,
    flops_per_pair: float,
    count: Any,
    factor: Any,
) -> Op:
    """Many heads over one row of numbers per token. By the curve of latent attention, which no factor of an engine is
    about; an indexer's by that of ordinary attention."""
    heads = np.asarray(num_heads, dtype=np.float64)
    reads = query_len if engine.kv_reads == "per_query" else np.minimum(query_len, 1.0)
    cost = Cost(
        flops=batch * query_len * kv_len * heads * flops_per_pair,
        kv_bytes=batch * kv_len * row * precision.kv_bytes * reads,
    )
    curve = hw.latent.get(precision.kv_dtype) if name == "attention" else None
    time = latent_attention_time(
        hw, batch=batch, query_len=query_len, kv_len=kv_len, num_heads=heads, row=row, flops_per_pair=flops_per_pair,
        kv_dtype=precision.kv_dtype, kv_reads=engine.kv_reads, curve=curve,
    )  # fmt: skip
    factor = factor * (engine.attention_factor if curve is None else 1.0)
    least_s = _least_s(hw, cost, precision.kv_dtype)
    return _op(name, "attention", cost, time, count=count, factor=factor, least_s=least_s)


def linear_attention(
    hw: HardwareProfile,
    engine: EngineProfile,
    precision: Precision,
    *,
    batch: Any,
    query_len: Any,
    state_elements: Any,
    conv_elements: Any,
    states_written: Any,
    count: Any = 1.0,
) -> Op:
    """`count` layers of a recurrence: each sequence's state read once and `states_written` of them written, in fp32; a
    decay, an outer product and a read-out per token and element (6 FLOPs). By the kernels' curve, or, where none was
    measured, as streaming."""
    batch, query_len = np.asarray(batch, dtype=np.float64), np.asarray(query_len, dtype=np.float64)
    state = np.asarray(state_elements, dtype=np.float64) * FP32_BYTES
    num_bytes = batch * (state + np.asarray(conv_elements) * precision.activation_bytes) * (1.0 + states_written)
    cost = Cost(flops=6.0 * batch * query_len * state / FP32_BYTES, kv_bytes=num_bytes)
    if hw.linear is None:
        time = elementwise_time(hw, num_bytes=num_bytes, num_kernels=2.0)
        factor, least_s = engine.attention_factor, _least_s(hw, cost, precision.compute_dtype)
        return _op("linear attention", "attention", cost, time, count=count, factor=factor, least_s=least_s)
    time = linear_time(
        hw, hw.linear, batch=batch, query_len=query_len, state_elements=state_elements, conv_elements=conv_elements,
        states_written=states_written, conv_element=precision.activation_bytes,
    )  # fmt: skip
    return _op("linear attention", "attention", cost, time, count=count)


def linear_prefill(
    hw: HardwareProfile,
    engine: EngineProfile,
    precision: Precision,
    *,
    batch: Any,
    query_len: Any,
    state_elements: Any,
    conv_elements: Any,
    conv_kernel: int,
    count: Any = 1.0,
) -> Op:
    """`count` layers of a recurrence over `query_len` tokens of prompts, chunk by chunk; the state is read and written
    once. Where no kernel was measured, as reading and writing the state."""
    shared = {"batch": batch, "query_len": query_len, "state_elements": state_elements}
    once = linear_attention(
        hw, engine, precision, **shared, conv_elements=conv_elements, states_written=1.0, count=count
    )
    if hw.linear_prefill is None:
        return once
    channels = np.asarray(conv_elements, dtype=np.float64) / max(conv_kernel, 1)
    time = linear_prefill_time(
        hw, hw.linear_prefill, **shared, channels=channels, conv_element=precision.activation_bytes
    )
    return replace(_op("linear attention", "attention", Cost(), time, count=count), cost=once.cost)


def _last_wave(hw: HardwareProfile, engine: EngineProfile, *, blocks: Any) -> Array:
    """How much longer attention takes because its last wave of blocks does not fill the device.

    1 + w·(ceil(x)/x − 1) for x = blocks / slots above 1; below, the kernel splits the context and fills the device.
    """
    per_multiprocessor = engine.attention_blocks_per_multiprocessor
    if per_multiprocessor is None:
        return np.ones(())
    waves = np.maximum(np.asarray(blocks, dtype=np.float64) / (per_multiprocessor * hw.num_multiprocessors), 1.0)
    longer: Array = 1.0 + engine.attention_wave_weight * (np.ceil(waves) / waves - 1.0)
    return longer


def streaming(
    name: str, hw: HardwareProfile, engine: EngineProfile, *, num_bytes: Any, num_kernels: Any = 1.0, count: Any = 1.0
) -> Op:
    """`count` times `num_kernels` kernels that stream `num_bytes` in all."""
    num_bytes = np.asarray(num_bytes, dtype=np.float64)
    time = elementwise_time(hw, num_bytes=num_bytes, num_kernels=num_kernels)
    cost = Cost(activation_bytes=num_bytes)
    least_s = num_bytes / (REACHED_BANDWIDTH * hw.memory_bytes_per_s)
    return _op(name, "elementwise", cost, time, count=count, factor=engine.elementwise_factor, least_s=least_s)


def all_reduce(hw: HardwareProfile, engine: EngineProfile, *, message_bytes: Any, tp_size: Any, count: Any) -> Op:
    ranks = np.asarray(tp_size, dtype=np.float64)
    reduced_s = all_reduce_time(hw, message_bytes=message_bytes, tp_size=ranks, kernels=engine.allreduce_kernels)
    seconds = engine.collective_factor * reduced_s
    seconds = count * (seconds + np.where(ranks > 1, engine.collective_overhead_s, 0.0))
    sent = np.where(ranks > 1, np.asarray(message_bytes, dtype=np.float64) * count, 0.0)
    return fixed("all_reduce", "link", seconds, Cost(collective_bytes=sent))


def all_gather(hw: HardwareProfile, engine: EngineProfile, *, message_bytes: Any, tp_size: Any) -> Op:
    ranks = np.asarray(tp_size, dtype=np.float64)
    seconds = engine.collective_factor * all_gather_time(hw, message_bytes=message_bytes, tp_size=ranks)
    seconds = seconds + np.where(ranks > 1, engine.collective_overhead_s, 0.0)
    sent = np.where(ranks > 1, np.asarray(message_bytes, dtype=np.float64), 0.0)
    return fixed("all_gather", "link", seconds, Cost(collective_bytes=sent))


def exchange(
    hw: HardwareProfile,
    *,
    tokens: Any,
    hidden_size: int,
    num_experts_per_tok: int,
    num_ranks: Any,
    dispatch_element: float,
    once_per_node: bool,
    count: Any,
) -> list[Op]:
    """`count` times: each of a rank's `tokens` sent to the ranks of its experts, and their outputs back in 16 bits."""
    found = []
    for name, element in (("dispatch", dispatch_element), ("combine", 2.0)):
        token_bytes = hidden_size * element
        seconds = exchange_time(
            hw, tokens=tokens, token_bytes=token_bytes, num_experts_per_tok=num_experts_per_tok, num_ranks=num_ranks,
            once_per_node=once_per_node,
        )  # fmt: skip
        sent = np.where(np.asarray(num_ranks) > 1, tokens * token_bytes * num_experts_per_tok, 0.0)
        found.append(fixed(name, "link", count * seconds, Cost(collective_bytes=count * sent)))
    return found


def send(hw: HardwareProfile, engine: EngineProfile, *, message_bytes: Any, tp_size: Any, is_far: Any) -> Op:
    """Hidden states to the next stage: each rank sends its share, which the ranks there then gather."""
    ranks = np.asarray(tp_size, dtype=np.float64)
    size = np.asarray(message_bytes, dtype=np.float64)
    seconds = send_time(hw, message_bytes=size / ranks, is_far=is_far)
    gathered = engine.collective_factor * all_gather_time(hw, message_bytes=size, tp_size=ranks)
    return fixed("send", "link", seconds + gathered, Cost(collective_bytes=size / ranks))


def broadcast(hw: HardwareProfile, engine: EngineProfile, *, message_bytes: Any, tp_size: Any) -> Op:
    ranks = np.asarray(tp_size, dtype=np.float64)
    seconds = engine.collective_factor * broadcast_time(hw, message_bytes=message_bytes, tp_size=ranks)
    seconds = seconds + np.where(ranks > 1, engine.collective_overhead_s, 0.0)
    sent = np.where(ranks > 1, np.asarray(message_bytes, dtype=np.float64), 0.0)
    return fixed("broadcast", "link", seconds, Cost(collective_bytes=sent))


def share(num_heads: int, tp_size: Any) -> Array:
    """A rank's share of some heads; at least one, so replicated where there are more ranks than heads."""
    heads: Array = np.maximum(np.ceil(num_heads / np.asarray(tp_size, dtype=np.float64)), 1.0)
    return heads


def size(parts: Iterable[Part], tp_size: Any) -> Array:
    """One rank's share of one side of a matrix."""
    return sum((share(part.num_heads, tp_size) * part.size for part in parts), np.asarray(0.0))


def merged(operations: list[Op]) -> tuple[Op, ...]:
    """One operation for those of one name."""
    by_name: dict[str, list[Op]] = {}
    for op in operations:
        by_name.setdefault(op.name, []).append(op)
    return tuple(each[0] if len(each) == 1 else _sum(each) for each in by_name.values())


def _sum(operations: list[Op]) -> Op:
    def added(key: str) -> Array:
        result: Array = sum((getattr(op, key) for op in operations), np.asarray(0.0))
        return result

    return Op(
        name=operations[0].name,
        group=operations[0].group,
        cost=total([op.cost for op in operations]),
        time_s=added("time_s"),
        memory_s=added("memory_s"),
        compute_s=added("compute_s"),
        overhead_s=added("overhead_s"),
    )
