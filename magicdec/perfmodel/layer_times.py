"""Seconds of other kernels than those of attention over a whole cache: recurrences, indexers and what they choose for.

    recurrence, few tokens    overhead + ‖ states / bandwidth , tokens · t_token ‖_p
    recurrence, prompts       overhead + convolution + ‖ waves · (t_block + chunks · t_chunk) , passes · bytes ‖_p
    an indexer's scores       overhead + rows · t_row + ‖ keys / bandwidth , FLOPs / rate ‖_p
    choosing of them          overhead + ‖ waves · (t_row + scores · t_score) , bytes / bandwidth ‖_p
    attention to the chosen   overhead + ‖ waves · tile's FLOPs / rate of a multiprocessor , bytes / bandwidth ‖_p

As in roofline.py: pure functions that broadcast; a state is fp32. Tables are timed in a loop, where what fits stays in
the cache (`working_set_bytes` "own").
"""

from __future__ import annotations

from typing import Any

import numpy as np

from magicdec.perfmodel.arrays import Array, as_array
from magicdec.perfmodel.roofline import OpTime, WorkingSet, cache_speedup, soft_max, waves
from magicdec.specs.hardware import (
    HardwareProfile,
    IndexerCurve,
    LinearCurve,
    LinearPrefillCurve,
    SparseCurve,
    TopKCurve,
)

STATE_BYTES = 4.0
CHUNK_TOKENS = 64
STATE_ROW, STATE_ELEMENTS = 128.0, 128.0 * 128.0
"""A block's state in the tables; others count as so many of them."""
KEY_BYTES = 1.0 + 4.0 / 128.0
"""An indexer's keys are fp8 with a scale of 32 bits per 128 numbers."""
SCORE_BYTES = 4.0
TILE_HEADS = 64


def linear_time(
    hw: HardwareProfile,
    curve: LinearCurve,
    *,
    batch: Any,
    query_len: Any,
    state_elements: Any,
    conv_elements: Any,
    states_written: Any,
    conv_element: float = 2.0,
    working_set_bytes: WorkingSet = None,
) -> OpTime:
    """One layer's recurrence over `query_len` tokens of each sequence: its state is read once. `conv_element`: bytes of
    one number that the convolution keeps."""
    batch, query, state, conv, written = np.broadcast_arrays(
        *(as_array(value) for value in (batch, query_len, state_elements, conv_elements, states_written))
    )
    slot_bytes = batch * (state * STATE_BYTES + conv * conv_element)
    resident = slot_bytes * np.maximum(written, 1.0)
    speedup = cache_speedup(hw, curve.l2_fraction, curve.l2_bandwidth_ratio, resident, working_set_bytes)
    memory_s = slot_bytes * (1.0 + written) / (curve.bandwidth_efficiency * hw.memory_bytes_per_s) / speedup
    busy_s = soft_max(memory_s, query * curve.token_s, curve.ridge_power)
    overhead_s = np.full(memory_s.shape, curve.overhead_s)
    return OpTime(overhead_s + np.where(slot_bytes > 0, busy_s, 0.0), memory_s, np.zeros_like(memory_s), overhead_s)


def linear_prefill_time(
    hw: HardwareProfile,
    curve: LinearPrefillCurve,
    *,
    batch: Any,
    query_len: Any,
    state_elements: Any,
    channels: Any,
    conv_element: float = 2.0,
    working_set_bytes: WorkingSet = None,
) -> OpTime:
    """One layer's recurrence over prompts of `query_len` tokens; the convolution is over `channels` numbers a token."""
    batch, query, state, channels = np.broadcast_arrays(
        *(as_array(value) for value in (batch, query_len, state_elements, channels))
    )
    states = batch * state / STATE_ELEMENTS
    chunks = np.ceil(query / CHUNK_TOKENS)
    chain_s = waves(states / hw.num_multiprocessors, curve.wave_weight) * (curve.block_s + chunks * curve.chunk_s)
    conv_bytes = 2.0 * conv_element * batch * query * channels
    speedup = cache_speedup(hw, curve.l2_fraction, curve.l2_bandwidth_ratio, conv_bytes, working_set_bytes)
    conv_s = conv_bytes / (curve.bandwidth_efficiency * hw.memory_bytes_per_s) / speedup
    moved = 4.0 * 2.0 * STATE_ROW * states * query
    memory_s = curve.passes * moved / hw.memory_bytes_per_s / speedup
    busy_s = conv_s + soft_max(chain_s, memory_s, curve.ridge_power)
    overhead_s = np.full(busy_s.shape, curve.overhead_s)
    return OpTime(overhead_s + np.where(states * query > 0, busy_s, 0.0), conv_s + memory_s, chain_s, overhead_s)


def indexer_time(
    hw: HardwareProfile,
    curve: IndexerCurve,
    *,
    batch: Any,
    query_len: Any,
    kv_len: Any,
    num_heads: Any,
    head_dim: Any,
    working_set_bytes: WorkingSet = None,
) -> OpTime:
    """One layer's scores of `query_len` tokens per sequence: small heads over the fp8 keys of `kv_len` tokens."""
    batch, query, kv_len, heads, size = np.broadcast_arrays(
        *(as_array(value) for value in (batch, query_len, kv_len, num_heads, head_dim))
    )
    key_bytes = batch * kv_len * size * KEY_BYTES
    num_bytes = key_bytes + batch * query * kv_len * SCORE_BYTES
    speedup = cache_speedup(hw, curve.l2_fraction, curve.l2_bandwidth_ratio, num_bytes, working_set_bytes)
    memory_s = num_bytes / (curve.bandwidth_efficiency * hw.memory_bytes_per_s) / speedup
    rate = curve.flops_efficiency * hw.compute_rate("fp8" if hw.computes_in("fp8") else "bf16")
    compute_s = 2.0 * batch * query * kv_len * heads * size / rate
    busy_s = soft_max(memory_s, compute_s, curve.ridge_power) + batch * query * curve.row_s
    overhead_s = np.full(busy_s.shape, curve.overhead_s)
    return OpTime(overhead_s + busy_s, memory_s, compute_s, overhead_s)


def top_k_time(hw: HardwareProfile, curve: TopKCurve, *, rows: Any, kv_len: Any) -> OpTime:
    """Choosing among the `kv_len` scores of each of `rows` query tokens; a block takes one."""
    rows, kv_len = np.broadcast_arrays(as_array(rows), as_array(kv_len))
    block_s = curve.row_s + kv_len * curve.score_s
    chosen_s = waves(rows / hw.num_multiprocessors, curve.wave_weight) * block_s
    memory_s = rows * kv_len * SCORE_BYTES / (curve.bandwidth_efficiency * hw.memory_bytes_per_s)
    overhead_s = np.full(chosen_s.shape, curve.overhead_s)
    return OpTime(overhead_s + soft_max(chosen_s, memory_s, curve.ridge_power), memory_s, chosen_s, overhead_s)


def sparse_time(
    hw: HardwareProfile,
    curve: SparseCurve,
    *,
    tokens: Any,
    num_chosen: Any,
    num_heads: Any,
    flops_per_pair: Any,
    row_bytes: Any,
) -> OpTime:
    """One layer's attention of `tokens` query tokens, each to `num_chosen` latents of its own; 64 heads a block."""
    tokens, chosen, heads = np.broadcast_arrays(*(as_array(value) for value in (tokens, num_chosen, num_heads)))
    tiles = np.ceil(heads / TILE_HEADS)
    tile_flops = TILE_HEADS * chosen * as_array(flops_per_pair)
    rate: Array = as_array(curve.flops_efficiency * hw.compute_rate("bf16") / hw.num_multiprocessors)
    compute_s = waves(tokens * tiles / hw.num_multiprocessors, curve.wave_weight) * tile_flops / rate
    memory_s = tokens * chosen * as_array(row_bytes) / (curve.bandwidth_efficiency * hw.memory_bytes_per_s)
    overhead_s = np.full(compute_s.shape, curve.overhead_s)
    return OpTime(overhead_s + soft_max(compute_s, memory_s, curve.ridge_power), memory_s, compute_s, overhead_s)
