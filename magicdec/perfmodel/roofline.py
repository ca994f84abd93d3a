"""Seconds of one operation on a device, and which ceiling binds.

    time = overhead + || memory , compute ||_p          memory = bytes / bandwidth,  compute = FLOPs / rate

The p-norm of the two ceilings is a roofline with a soft ridge: at p → ∞ it is their maximum. Bandwidth and rate are the
datasheet's times fitted efficiencies. What a plain roofline lacks, and the curves here add:

- GEMM: the output is cut in tiles, one per multiprocessor at a time. Few tiles leave multiprocessors idle, so libraries
  choose smaller tiles or split k, each at a price; we take the cheapest of the candidates, as they do. A tile takes the
  longer of its FLOPs and of taking in its operands; waves of tiles may be paid whole (`wave_weight`).
- Attention: one block per (sequence, KV head), split over the context to fill the device where the kernel can. A block
  takes keys in at its own limited rate: below one wave, time does not depend on the batch.
- Cache: where kernels are timed in a loop, operands that fit stay in the last-level cache. In a forward pass the rest
  of the step evicts them. `working_set_bytes` is what is touched between two uses of the same data: None takes it as
  unbounded on GPUs (nothing stays) and as the operands themselves on CPUs, "own" as the operands themselves.

Ignored: clocks that fall under load, alignment, misses in address translation. All functions are pure and broadcast
over numpy arrays; NaN and negative inputs count as 0.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from magicdec.perfmodel.arrays import Array, as_array
from magicdec.specs.hardware import AttentionCurve, GemmCurve, HardwareProfile, MoeCurve, bytes_per_element

KvReads = Literal["per_sequence", "per_query"]
AttentionKernel = Literal["measured", "split"]
WorkingSet = Any
"""Bytes (an array), "own" or None; see the module's docstring."""

TILES = np.array([(64.0, 64.0), (64.0, 128.0), (128.0, 128.0), (128.0, 256.0), (256.0, 128.0)])
ROWS_OF_SMALL_TILES = (64, 128)
"""Up to so many tokens tiles are 64 × 64, and 64 × 128, where the library chooses by them alone."""
K_SPLITS = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
MIN_SPLIT_K = 64
WEIGHT_ONLY_ROWS = 16
"""Kernels that widen narrow weights on the fly use tiles of so few tokens, the smallest matrix instruction's."""
TILE_RIDGE_POWER = 4.0
CACHE_SHARPNESS = 8.0
RESIDENT_FRACTION = 0.8
"""Part of the L2 that can hold a working set; the timing loops behind `GemmCurve.l2_fraction` rotate buffers."""
REDUCTION_BANDWIDTH_RATIO = 3.0
QUERY_ROWS_PER_BLOCK = 128
HEAD_TILE_ROWS = 64.0
"""Query tokens of one head in a block of FlashAttention 2, which computes all of them however few there are. It packs
the heads of a group together, and splits the context, for one query token only."""
PARTIAL_BYTES = 4.0
BLOCK_RIDGE_POWER = 4.0
FULL_ROWS = 16.0
"""Tokens per expert from which the fullest expert is what the others wait for."""


class OpTime(NamedTuple):
    """Seconds. `time_s` is the prediction; the others say what it is made of (no sum: the ridge is soft).

    `memory_s` and `compute_s` are the two ceilings at the fitted efficiencies, `overhead_s` the fixed cost.
    """

    time_s: Array
    memory_s: Array
    compute_s: Array
    overhead_s: Array


def soft_max(first: Array, second: Array, power: float) -> Array:
    """The p-norm of two ceilings, without overflow; 0 where both are."""
    high, low = np.maximum(first, second), np.minimum(first, second)
    ratio = low / np.maximum(high, 1e-300)
    result: Array = high * (1.0 + ratio**power) ** (1.0 / power)
    return result


def cache_speedup(
    hw: HardwareProfile, fraction: float, ratio: float, own_bytes: Array, working_set_bytes: Any
) -> Array | float:
    """How many times shorter reading data again is: `ratio` if it stayed in the cache's share, 1 if not."""
    touched = own_bytes
    if ratio < 1.0:  # no caching: see AttentionCurve.l2_bandwidth_ratio
        pass
    elif working_set_bytes is None:
        if hw.kind == "gpu":
            return 1.0
    elif not isinstance(working_set_bytes, str):
        touched = np.maximum(as_array(working_set_bytes), own_bytes)
    if hw.l2_bytes * fraction <= 0:
        return 1.0
    hit = 1.0 / (1.0 + np.minimum(touched / (hw.l2_bytes * fraction), 1e9) ** CACHE_SHARPNESS)
    speedup: Array = 1.0 / (1.0 - hit * (1.0 - 1.0 / ratio))
    return speedup


def waves(filling: Array, weight: float) -> Array:
    """Time in waves for work that fills the device `filling` times; a part of one wave takes a whole one's time."""
    passed: Array = np.where(filling <= 1.0, 1.0, filling + weight * (np.ceil(filling) - filling))
    return passed


def gemm_time(
    hw: HardwareProfile,
    *,
    m: Any,
    n: Any,
    k: Any,
    weight_dtype: str = "bf16",
    compute_dtype: str = "bf16",
    working_set_bytes: WorkingSet = None,
) -> OpTime:
    """One linear layer: m tokens (rows of activations, `compute_dtype`) through weights of n × k, read once.

    Narrow activations (fp8, nvfp4) make outputs in 16 bits. Zero in any dimension costs nothing but the call's
    overhead.
    """
    curve = hw.gemm_curve(compute_dtype)
    m, n, k = np.broadcast_arrays(as_array(m), as_array(n), as_array(k))
    activation_bytes = bytes_per_element(compute_dtype)
    num_bytes = n * k * bytes_per_element(weight_dtype) + m * k * activation_bytes + m * n * max(activation_bytes, 2.0)
    bandwidth = curve.bandwidth_efficiency * hw.memory_bytes_per_s
    in_a_pass = not isinstance(working_set_bytes, str)
    fraction = max(curve.l2_fraction, RESIDENT_FRACTION) if curve.tiled and in_a_pass else curve.l2_fraction
    speedup = cache_speedup(hw, fraction, curve.l2_bandwidth_ratio, num_bytes, working_set_bytes)
    memory_s = num_bytes / bandwidth / speedup
    rate = curve.flops_efficiency * hw.compute_rate(compute_dtype)
    overhead_s = np.full(memory_s.shape, curve.overhead_s)
    if curve.tiled:
        compute_s = 2.0 * m * n * k / rate
        is_weight_only = bytes_per_element(weight_dtype) < activation_bytes
        used_rows = np.ceil(m / WEIGHT_ONLY_ROWS) * WEIGHT_ONLY_ROWS if is_weight_only else np.full(m.shape, np.inf)
        busy_s = _tiled_gemm(
            hw, curve, m, n, k, memory_s=memory_s, rate=rate, element=activation_bytes, used_rows=used_rows
        )
    else:
        compute_s = 2.0 * n * k * _skinny_tokens(curve, m) / rate
        busy_s = soft_max(memory_s, compute_s, curve.ridge_power)
    time_s = overhead_s + np.where(m * n * k > 0, busy_s, 0.0)
    if not in_a_pass:
        time_s = np.maximum(time_s, np.where(m <= WEIGHT_ONLY_ROWS, curve.host_few_s, curve.host_s))
    return OpTime(time_s, memory_s, compute_s, overhead_s)


def _skinny_tokens(curve: GemmCurve, m: Array) -> Array:
    """Tokens that the matrix path would do in the time that m take: few tokens go one by one where that is quicker."""
    matrix = m + curve.half_tokens
    if curve.gemv_efficiency <= 0:
        return np.where(m > 0, matrix, 0.0)
    one_by_one = m * curve.flops_efficiency / curve.gemv_efficiency
    quicker: Array = one_by_one / (1.0 + (one_by_one / np.maximum(matrix, 1e-300)) ** 4) ** 0.25
    return quicker


def _tile_choices(curve: GemmCurve, m: Array) -> tuple[Array, Array, Array]:
    """Splits of k, rows and columns of output tiles that the library chooses from; axes: tiles, splits, m's."""
    if curve.tiles == "by_rows":
        rows = np.where(m <= ROWS_OF_SMALL_TILES[1], 64.0, 128.0)
        columns = np.where(m <= ROWS_OF_SMALL_TILES[0], 64.0, 128.0)
        return np.ones((1,) + (1,) * m.ndim), rows[None, None], columns[None, None]
    rows, columns = (side.reshape(-1, 1, *[1] * m.ndim) for side in TILES.T)
    return K_SPLITS.reshape(-1, *[1] * m.ndim), rows, columns


def _tiled_gemm(
    hw: HardwareProfile,
    curve: GemmCurve,
    m: Array,
    n: Array,
    k: Array,
    *,
    memory_s: Array,
    rate: float,
    element: float,
    used_rows: Array,
) -> Array:
    """Time of the cheapest choice of output tile and split of k.

    For a given split, the tile that is cheapest alone is cheapest with the memory ceiling too, so tiles are compared
    first and the ridge is taken once per split.
    """
    num_sm = hw.num_multiprocessors
    tile_rate = rate / num_sm
    stream_rate = curve.stream_ratio * hw.memory_bytes_per_s / num_sm
    bandwidth = curve.bandwidth_efficiency * hw.memory_bytes_per_s
    splits, rows, columns = _tile_choices(curve, m)
    filling = np.ceil(m / rows) * np.ceil(n / columns) / num_sm * splits
    operands_s = (np.minimum(m, rows) + columns) * element / stream_rate
    per_k_s = soft_max(2.0 * np.minimum(used_rows, rows) * columns / tile_rate, operands_s, TILE_RIDGE_POWER)
    k_per_split = np.maximum(k / splits, MIN_SPLIT_K)
    tiles_s = np.min(waves(filling, curve.wave_weight) * k_per_split * per_k_s, axis=0)
    reduction_s = curve.split_traffic * 8.0 * m * n / (REDUCTION_BANDWIDTH_RATIO * bandwidth)
    splitting_s = np.where(splits > 1, curve.split_overhead_s + splits * reduction_s, 0.0)
    best: Array = np.min(soft_max(memory_s, tiles_s, curve.ridge_power) + splitting_s, axis=0)
    return best


class Tiles(NamedTuple):
    """How query rows are cut in tiles: their number per KV head, the padded rows over the real ones, how often the
    cache is read from memory, and the fp32 bytes that each part of a split context writes for another kernel to add.

    Those are of one tile: more of them fill the device with fewer parts."""

    count: Any
    padding: Any
    reads: Any
    part_bytes: Any


def attention_time(
    hw: HardwareProfile,
    *,
    batch: Any,
    query_len: Any,
    kv_len: Any,
    num_heads: Any,
    num_kv_heads: Any,
    head_dim: Any,
    kv_dtype: str = "bf16",
    kv_reads: KvReads = "per_sequence",
    kernel: AttentionKernel = "measured",
    curve: AttentionCurve | None = None,
    tiles: Tiles | None = None,
    working_set_bytes: WorkingSet = None,
) -> OpTime:
    """One layer's attention of `query_len` tokens per sequence, each over all of `kv_len` cached ones.

    `kv_reads` "per_query" is a kernel that reads the cache again for each query token. `kernel` "split" is one that
    splits the context over blocks even where the device's measured kernel does not. `curve`: of another kernel than
    the device's for ordinary attention. `tiles`: how its query rows are cut, where that is known. Causal savings within
    the query tokens are the caller's to account for.
    """
    curve = curve or hw.attention_curve(kv_dtype)
    batch, query_len, kv_len, num_heads, num_kv_heads, head_dim = np.broadcast_arrays(
        as_array(batch), as_array(query_len), as_array(kv_len),
        as_array(num_heads), as_array(num_kv_heads), as_array(head_dim),
    )  # fmt: skip
    reads = query_len if kv_reads == "per_query" else np.minimum(query_len, 1.0)
    row_bytes = 2.0 * head_dim * bytes_per_element(kv_dtype) * reads
    kv_bytes = batch * num_kv_heads * kv_len * row_bytes
    activation_bytes = 4.0 if kv_dtype == "fp32" else 2.0
    query_bytes = 2.0 * batch * query_len * num_heads * head_dim * activation_bytes
    speedup = cache_speedup(hw, curve.l2_fraction, curve.l2_bandwidth_ratio, kv_bytes, working_set_bytes)
    group = num_heads / np.maximum(num_kv_heads, 1.0)
    if tiles is None:
        tiles = Tiles(np.ceil(query_len * group / QUERY_ROWS_PER_BLOCK), 1.0, 1.0, 0.0)
    memory_s = (kv_bytes * tiles.reads + query_bytes) / (curve.bandwidth_efficiency * hw.memory_bytes_per_s) / speedup
    rate = curve.flops_efficiency * hw.compute_rate("fp32" if kv_dtype == "fp32" else "bf16")
    compute_s = 4.0 * batch * query_len * kv_len * num_heads * head_dim * tiles.padding / rate

    blocks = batch * num_kv_heads * tiles.count
    can_split = (group > 1.0) | (curve.splits == "always" or kernel == "split")
    if kernel == "measured" and curve.splits == "grouped":
        by_head, in_tiles = query_len > 1.0, np.ceil(query_len / HEAD_TILE_ROWS)
        blocks, can_split = np.where(by_head, batch * num_heads * in_tiles, blocks), can_split & ~by_head
        block_s = 4.0 * HEAD_TILE_ROWS * kv_len * head_dim / (rate / hw.num_multiprocessors)
        compute_s = np.where(by_head, block_s * waves(blocks / hw.num_multiprocessors, 1.0), compute_s)
    busy_s, splitting_s = _blocks(hw, curve, blocks, kv_len, row_bytes, can_split=can_split, memory_s=memory_s)
    parts = _splits(hw, curve, batch * num_kv_heads, kv_len)
    moved = 2.0 * batch * num_kv_heads * (parts - 1.0) * tiles.part_bytes
    splitting_s = splitting_s + curve.combine_traffic * moved / hw.memory_bytes_per_s
    busy_s = np.where(kv_bytes > 0, soft_max(busy_s, compute_s, curve.ridge_power), 0.0)
    if curve.row_factors:
        busy_s = busy_s * np.interp(query_len * group, np.arange(len(curve.row_factors)) + 1.0, curve.row_factors)
    overhead_s = curve.overhead_s + np.where(kv_bytes > 0, splitting_s, 0.0)
    return OpTime(overhead_s + busy_s, memory_s, compute_s, overhead_s)


def latent_attention_time(
    hw: HardwareProfile,
    *,
    batch: Any,
    query_len: Any,
    kv_len: Any,
    num_heads: Any,
    row: Any,
    flops_per_pair: Any,
    kv_dtype: str = "bf16",
    kv_reads: KvReads = "per_sequence",
    curve: AttentionCurve | None = None,
    working_set_bytes: WorkingSet = None,
) -> OpTime:
    """One layer's attention of many heads over one row of `row` numbers per cached token, with `flops_per_pair` of a
    head and a token: grouped-query attention over one KV head, of the same bytes and FLOPs. Several query tokens are to
    the kernel what as many times the heads are, cut in tiles of `curve.tile_rows`."""
    heads = as_array(num_heads) * as_array(flops_per_pair) / (2.0 * as_array(row))
    tiles = None if curve is None else _latent_tiles(curve, as_array(num_heads), as_array(query_len), as_array(row))
    return attention_time(
        hw, batch=batch, query_len=query_len, kv_len=kv_len, num_heads=heads, num_kv_heads=1.0,
        head_dim=as_array(row) / 2.0, kv_dtype=kv_dtype, kv_reads=kv_reads, curve=curve, tiles=tiles,
        working_set_bytes=working_set_bytes,
    )  # fmt: skip


def _latent_tiles(curve: AttentionCurve, heads: Array, query_len: Array, value_dim: Array) -> Tiles | None:
    """Rows are padded to whole tiles, but not in a kernel of narrow ones."""
    if curve.tile_rows <= 0:
        return None
    rows = np.maximum(heads * query_len, 1e-9)
    if curve.narrow_heads > 0:
        is_narrow = heads <= curve.narrow_heads
        size = np.where(is_narrow, curve.narrow_tile_rows, curve.tile_rows)
        count = query_len * np.ceil(heads / size)
        padding = np.where(is_narrow, 1.0, count * size / rows)
    else:
        count = np.ceil(rows / curve.tile_rows)
        padding = count * curve.tile_rows / rows
    reads = 1.0 + curve.tile_traffic * np.maximum(count - 1.0, 0.0)
    return Tiles(count, padding, reads, np.minimum(rows, curve.tile_rows) * value_dim * PARTIAL_BYTES)


def _splits(hw: HardwareProfile, curve: AttentionCurve, blocks: Array, kv_len: Array) -> Array:
    """Parts that each of so many blocks is split into, to fill the device."""
    slots = hw.num_multiprocessors * curve.blocks_per_multiprocessor
    most = np.minimum(curve.max_splits, np.maximum(kv_len / curve.min_split_tokens, 1.0))
    splits: Array = np.clip(slots / np.maximum(blocks, 1e-9), 1.0, most)
    return splits


def _blocks(
    hw: HardwareProfile,
    curve: AttentionCurve,
    blocks: Array,
    kv_len: Array,
    row_bytes: Array,
    *,
    can_split: Any,
    memory_s: Array,
) -> tuple[Array, Array]:
    """Time of reading the cache with so many blocks on the device's multiprocessors, and of splitting and combining."""
    slots = hw.num_multiprocessors * curve.blocks_per_multiprocessor
    splits = np.where(can_split, _splits(hw, curve, blocks, kv_len), 1.0)
    filling = blocks * splits / slots
    block_s = kv_len / splits * row_bytes * slots / (curve.stream_ratio * hw.memory_bytes_per_s)
    even_s = soft_max(memory_s, block_s * np.maximum(filling, 1.0), curve.ridge_power)
    if curve.wave_weight > 0:
        full, part = np.floor(filling), filling - np.floor(filling)
        wave_memory_s = memory_s / np.maximum(filling, 1e-9)
        tail_s = soft_max(wave_memory_s * part, np.where(part > 1e-9, block_s, 0.0), curve.ridge_power)
        stepped_s = full * soft_max(wave_memory_s, block_s, curve.ridge_power) + tail_s
        even_s = np.where(filling > 1.0, even_s + curve.wave_weight * (stepped_s - even_s), even_s)
    waiting_s = curve.block_overhead_s * np.maximum(filling - 1.0, 0.0)
    splitting = np.where(can_split, 1.0, 0.0) if curve.splits == "grouped" else 1.0 - 1.0 / splits
    return even_s + waiting_s, curve.split_overhead_s * splitting


def causal_pairs(query_len: Any, kv_len: Any) -> Array:
    """Pairs of a query, one of the last `query_len` of `kv_len` tokens, and a key up to it."""
    query_len, kv_len = as_array(query_len), as_array(kv_len)
    pairs: Array = query_len * np.maximum(kv_len - query_len, 0.0) + query_len * (query_len + 1.0) / 2.0
    return pairs


def prefill_attention_time(
    hw: HardwareProfile,
    *,
    batch: Any,
    query_len: Any,
    kv_len: Any,
    num_heads: Any,
    num_kv_heads: Any,
    head_dim: Any,
    kv_dtype: str = "bf16",
    pairs: Any = None,
) -> OpTime:
    """One layer's causal attention of `query_len` new tokens per sequence, the last of the `kv_len` that are cached.

    `pairs` of a query and a key that it sees, where a window leaves fewer than all before it.

    time = overhead + ‖ bytes / bandwidth , ‖ FLOPs / rate , w · longest block ‖_4 ‖_p

    A block takes 128 queries of one head over the keys before them; its diagonal tile is computed whole. The last block
    of a prompt is the longest, which is what short batches wait for.
    """
    curve = hw.prefill_curve()
    batch, query_len, kv_len, num_heads, num_kv_heads, head_dim = np.broadcast_arrays(
        as_array(batch), as_array(query_len), as_array(kv_len),
        as_array(num_heads), as_array(num_kv_heads), as_array(head_dim),
    )  # fmt: skip
    element = bytes_per_element(kv_dtype)
    activation = 4.0 if kv_dtype == "fp32" else 2.0
    of_head = np.where(
        head_dim <= 64, curve.narrow_head_efficiency, np.where(head_dim <= 128, 1.0, curve.wide_head_efficiency)
    )
    rate = curve.flops_efficiency * of_head * hw.compute_rate("fp32" if kv_dtype == "fp32" else "bf16")
    kv_len = np.maximum(kv_len, query_len)
    tile = np.minimum(query_len, QUERY_ROWS_PER_BLOCK)
    seen = causal_pairs(query_len, kv_len) if pairs is None else as_array(pairs)
    whole_tiles = seen + query_len * np.maximum(tile - 1.0, 0.0) / 2.0
    compute_s = 4.0 * batch * whole_tiles * num_heads * head_dim / rate
    block_s = 4.0 * QUERY_ROWS_PER_BLOCK * kv_len * head_dim / rate * hw.num_multiprocessors
    num_bytes = 2.0 * batch * (query_len * num_heads * activation + kv_len * num_kv_heads * element) * head_dim
    memory_s = num_bytes / (curve.bandwidth_efficiency * hw.memory_bytes_per_s)
    longest_s = np.where(compute_s > 0, curve.block_weight * block_s, 0.0)
    busy_s = soft_max(memory_s, soft_max(compute_s, longest_s, BLOCK_RIDGE_POWER), curve.ridge_power)
    overhead_s = np.full(busy_s.shape, curve.overhead_s)
    return OpTime(overhead_s + busy_s, memory_s, compute_s, overhead_s)


def experts_touched(num_experts: Any, num_experts_per_tok: Any, tokens: Any, independence: float = 1.0) -> Array:
    """How many experts `tokens` tokens choose: E·(1 − (1 − k/E)^(tokens^c)). c = 1: each chooses evenly, alone."""
    share = np.minimum(as_array(num_experts_per_tok) / np.maximum(as_array(num_experts), 1.0), 1.0)
    touched: Array = as_array(num_experts) * (1.0 - (1.0 - share) ** (as_array(tokens) ** independence))
    return touched


def moe_time(
    hw: HardwareProfile,
    curve: MoeCurve,
    *,
    tokens: Any,
    hidden_size: Any,
    width: Any,
    num_experts: Any,
    num_experts_per_tok: Any,
    num_matrices: Any = 3.0,
    weight_dtype: str = "bf16",
    compute_dtype: str = "bf16",
    is_balanced: Any = False,
    own_tokens: Any = None,
) -> OpTime:
    """One layer's routed experts; `width` is one rank's share of an expert's.

    time = overhead + hidden · t_h + touched · t_e + ‖ weights / bandwidth , FLOPs / rate ‖_p + activations / bandwidth

    The touched experts' weights are read once. Their tokens, rows = tokens · k / touched, take the time of no fewer
    than `tile_rows`, as √(rows² + tile²), and of the fullest expert's as they grow. `is_balanced`: every expert is
    chosen as often as every other, as some tables were timed. `own_tokens`: those whose hidden states are read and
    whose sums are written here (None: all); the others' copies come from other ranks.
    """
    tokens, hidden, width, experts, chosen = np.broadcast_arrays(
        as_array(tokens), as_array(hidden_size), as_array(width), as_array(num_experts), as_array(num_experts_per_tok)
    )
    even = np.minimum(experts, chosen * tokens)
    touched = np.where(is_balanced, even, experts_touched(experts, chosen, tokens, curve.independence))
    rows = tokens * chosen / np.maximum(touched, 1e-9)
    per_expert = num_matrices * hidden * width
    memory_s = touched * per_expert * bytes_per_element(weight_dtype)
    memory_s = memory_s / (curve.bandwidth_efficiency * hw.memory_bytes_per_s)
    fullest = np.where(is_balanced, 1.0, 1.0 + curve.imbalance * np.minimum(np.sqrt(rows / FULL_ROWS), 1.0))
    padded = np.sqrt(rows**2 + curve.tile_rows**2) * fullest
    compute_s = 2.0 * touched * per_expert * padded / (curve.flops_efficiency * hw.compute_rate(compute_dtype))
    own = tokens if own_tokens is None else as_array(own_tokens)
    moved = 2.0 * (own * 2.0 * hidden + tokens * chosen * (2.0 * hidden + num_matrices * width))
    moved_s = moved / (curve.activation_efficiency * hw.memory_bytes_per_s)
    busy_s = soft_max(memory_s, compute_s, curve.ridge_power) + moved_s
    fixed_s = curve.overhead_s + hidden * curve.hidden_overhead_s
    overhead_s = fixed_s + touched * curve.expert_overhead_s
    return OpTime(overhead_s + busy_s, memory_s, compute_s, overhead_s)


def elementwise_time(hw: HardwareProfile, *, num_bytes: Any, num_kernels: Any = 1) -> OpTime:
    """`num_kernels` kernels that stream `num_bytes` in all (reads and writes)."""
    curve = hw.elementwise_curve()
    memory_s = as_array(num_bytes) / (curve.bandwidth_efficiency * hw.memory_bytes_per_s)
    overhead_s = as_array(num_kernels) * curve.overhead_s
    memory_s, overhead_s = np.broadcast_arrays(memory_s, overhead_s)
    return OpTime(memory_s + overhead_s, memory_s, np.zeros_like(memory_s), overhead_s)
