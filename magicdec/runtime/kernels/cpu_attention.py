"""Attention of a few query tokens over a long cache, on a CPU: each key and value is read from
memory once.

A matrix library computes scores and outputs as two products with a softmax between, each a pass of
its own over matrices that no cache holds. Here a block of keys goes through all three at once
(online softmax, arXiv 2205.14135), and while the scores of a block are computed its values are on
their way from memory, and while its values are used the next block's keys are: without that,
reading and computing take turns.

Vector code is written out (fused multiply-adds on whole registers) because LLVM's own vectoriser
halves the speed; the rest is plain numba. Threads are those of torch: both use the process's one
OpenMP runtime.

Shapes: B sequences, T query tokens, K KV heads, G query heads per KV head, D head_dim, S slots. The
T·G query rows of one sequence and KV head are a *unit*; where there are fewer units than threads, a
unit's context is split as well.
"""

from __future__ import annotations

import math
import os
import sys
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

if "numba" not in sys.modules:  # which reads it once, and refuses another value later
    os.environ.setdefault("NUMBA_NUM_THREADS", str(torch.get_num_threads()))

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from magicdec.runtime.kernels import Visible
from magicdec.runtime.kernels.compiled import kept

numba.config.THREADING_LAYER_PRIORITY = ["omp", "workqueue", "tbb"]

BLOCK_FLOATS = 4096
"""Floats of keys per block. With equally many of values they fit a second-level cache (16 KB
each)."""
HIDDEN = -1e30
"""Score of a slot that a query does not see. It is finite, so a block in which a query sees nothing
gives no NaN."""
CACHE_LINE_FLOATS = 16


def _vector_unit() -> tuple[int, int]:
    """(floats per register, registers for accumulating) of this processor."""
    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return 16, 16
    if features.get("avx2"):
        return 8, 8
    return 4, 16


LANES, ACCUMULATORS = _vector_unit()
_FLOAT, _INT = ir.FloatType(), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)


def supports(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `decode_attention` takes these: fp32 in host memory, each token's head contiguous."""
    head_dim = query.shape[-1]
    return (
        query.device.type == "cpu"
        and query.dtype == keys.dtype == torch.float32
        and head_dim % max(LANES, CACHE_LINE_FLOATS) == 0
        and keys.stride()[2:] == values.stride()[2:] == (head_dim, 1)
    )


def decode_attention(
    query_BTAD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    visible: Visible,
    *,
    scale: float | None = None,
    probabilities: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attends over the slots that each query sees, softmax(scale·q·kᵀ)·v: output [B, T, A·D]. The
    scale is 1/√D if not given. With `probabilities`, which a ring does not give, also the attention
    paid to each slot by each query, summed over the query heads of a KV head, [B, K, T, S]. The
    windows of all tokens fit into a ring."""
    keys_BKSD, values_BKSD = (
        keys_BKSD[:, :, : visible.stop],
        values_BKSD[:, :, : visible.stop],
    )
    window, ring, last = visible.window, visible.ring, visible.last_BT.numpy()
    num_sequences, num_tokens, num_heads, head_dim = query_BTAD.shape
    kv_heads, num_slots = keys_BKSD.shape[1:3]
    assert ring is None or (window is not None and not probabilities)
    rows, units = num_tokens * num_heads // kv_heads, num_sequences * kv_heads
    tile = -(-rows // -(-rows // 4))  # rows at a time: at most 4, and as even as can be
    padded_rows = -(-rows // tile) * tile
    query = query_BTAD.new_zeros(num_sequences, kv_heads, padded_rows, head_dim)
    by_head = (
        (query_BTAD * (scale or head_dim**-0.5))
        .view(num_sequences, num_tokens, kv_heads, -1, head_dim)
        .transpose(1, 2)
    )
    query[:, :, :rows].view(num_sequences, kv_heads, num_tokens, -1, head_dim).copy_(
        by_head
    )
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    splits = -(-threads // units)
    output = query.new_empty(units, splits, padded_rows, head_dim)
    log_sums = query.new_empty(units, splits, padded_rows)
    scores = query.new_full(
        (units, padded_rows, num_slots) if probabilities else (1, 1, 1), HIDDEN
    )
    empty_first, empty_stop = last[:, 0], 0
    if visible.empty is not None:
        empty_first, empty_stop = visible.empty[0].numpy(), visible.empty[1]
    work = np.repeat(
        np.minimum(last.max(axis=1) + 1, window or num_slots), kv_heads * splits
    ).cumsum()
    bounds = np.searchsorted(work, work[-1] * np.arange(threads + 1) // threads)
    bounds[-1] = len(work)
    last_BM = np.repeat(last, rows // num_tokens, axis=1)
    empty_first = np.ascontiguousarray(empty_first)
    arguments = np.array(
        [
            query.data_ptr(),
            output.data_ptr(),
            log_sums.data_ptr(),
            scores.data_ptr(),
            last_BM.ctypes.data,
            empty_first.ctypes.data,
            keys_BKSD.data_ptr(),
            values_BKSD.data_ptr(),
            *(
                4 * stride
                for stride in (*keys_BKSD.stride()[:2], *values_BKSD.stride()[:2])
            ),
            num_sequences,
            kv_heads,
            rows,
            padded_rows,
            num_slots,
            splits,
            window or num_slots + 1,
            empty_stop,
            probabilities,
            ring or num_slots,
        ]
    )
    numba.set_num_threads(threads)
    _divide(_kernel(tile, head_dim).address, bounds, arguments)
    log_sum = log_sums[:, 0]
    merged = output[:, 0]
    if splits > 1:
        log_sum = log_sums.logsumexp(dim=1)
        merged = (output * (log_sums - log_sum[:, None]).exp()[..., None]).sum(dim=1)
    by_row = merged[:, :rows].view(num_sequences, kv_heads, num_tokens, -1, head_dim)
    weights = None
    if probabilities:
        weights = scores.sub_(log_sum[..., None]).exp_()[:, :rows]
        weights = weights.view(num_sequences, kv_heads, num_tokens, -1, num_slots).sum(
            dim=3
        )
    return by_row.transpose(1, 2).reshape(
        num_sequences, num_tokens, num_heads * head_dim
    ), weights


RELAXED = {"contract", "reassoc", "nsz", "arcp", "afn"}
"""Liberties that the compiler may take with floating-point arithmetic; infinities and NaN stay what
they are.
"""


@intrinsic
def _call(typing_context, function, first_item, stop_item, arguments):
    """Calls the kernel at an address."""

    def generate(context, builder, signature, arguments):
        function_type = ir.FunctionType(ir.VoidType(), [_INT] * 3)
        builder.call(
            builder.inttoptr(arguments[0], function_type.as_pointer()), arguments[1:]
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


def _array_at(dtype):
    """For compiled code: a pointer to elements of a type at an address."""

    @intrinsic
    def pointer(typing_context, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(
                arguments[0], context.get_value_type(types.CPointer(dtype))
            )

        return types.CPointer(dtype)(types.int64), generate

    return pointer


_integers_at, _floats_at = _array_at(types.int64), _array_at(types.float32)


@kept(
    partial(
        numba.njit,
        types.void(types.int64, types.int64[::1], types.int64[::1]),
        parallel=True,
        nogil=True,
    )
)
def _divide(kernel, bounds, arguments):
    """Gives each thread its items. Apart from the kernels, since code with parallel loops takes 3
    times as long to compile."""
    for thread in numba.prange(len(bounds) - 1):
        _call(kernel, bounds[thread], bounds[thread + 1], arguments.ctypes.data)


@lru_cache
def _kernel(rows: int, head_dim: int) -> Any:
    """The kernel for this many query rows at a time and this head_dim; compiled once, kept on disk
    where possible.
    """
    block = max(8, BLOCK_FLOATS // head_dim)
    group_floats = LANES * head_dim
    width = min(head_dim, ACCUMULATORS // rows * LANES)
    while head_dim % width:
        width -= LANES

    def attend(first_item, stop_item, arguments):
        given = numba.carray(_integers_at(arguments), 22)
        query_base, output_base, keys, values = given[0], given[1], given[6], given[7]
        key_batch, key_head, value_batch, value_head = (
            given[8],
            given[9],
            given[10],
            given[11],
        )
        num_sequences, kv_heads, num_rows, padded_rows = (
            given[12],
            given[13],
            given[14],
            given[15],
        )
        num_slots, splits, window, empty_stop, keep_scores = (
            given[16],
            given[17],
            given[18],
            given[19],
            given[20],
        )
        ring = given[21]
        units, row_bytes = num_sequences * kv_heads, 4 * head_dim
        output_UIMD = numba.carray(
            _floats_at(output_base), (units, splits, padded_rows, head_dim)
        )
        log_sums_UIM = numba.carray(_floats_at(given[2]), (units, splits, padded_rows))
        scores_UMS = numba.carray(_floats_at(given[3]), (units, padded_rows, num_slots))
        last_BM = numba.carray(_integers_at(given[4]), (num_sequences, num_rows))
        empty_first_B = numba.carray(_integers_at(given[5]), num_sequences)
        weights = np.empty((padded_rows, block), np.float32)
        weights_base = weights.ctypes.data
        powers = np.empty(block, np.int32)
        top, total = (
            np.empty(padded_rows, np.float32),
            np.empty(padded_rows, np.float32),
        )
        for item in range(first_item, stop_item):
            unit, split = item // splits, item % splits
            sequence, head = unit // kv_heads, unit % kv_heads
            query_at = query_base + unit * padded_rows * row_bytes
            output_at = output_base + item * padded_rows * row_bytes
            keys_at = keys + sequence * key_batch + head * key_head
            values_at = values + sequence * value_batch + head * value_head
            output = output_UIMD[unit, split]
            output[:] = 0
            top[:] = HIDDEN
            total[:] = 0
            begin, end = (
                max(0, last_BM[sequence].min() - window + 1),
                last_BM[sequence].max() + 1,
            )
            length = -(-(end - begin) // (splits * block)) * block
            begin, end = begin + split * length, min(end, begin + (split + 1) * length)
            hole = min(empty_first_B[sequence], empty_stop)
            position = begin
            while position < end:
                if hole <= position < empty_stop:
                    position = empty_stop
                    continue
                slot = position % ring
                count = min(
                    block,
                    (hole if position < hole else end) - position,
                    end - position,
                    ring - slot,
                )
                for first_row in range(0, padded_rows, rows):
                    tile, tile_weights = (
                        query_at + first_row * row_bytes,
                        weights_base + first_row * 4 * block,
                    )
                    whole = count // LANES * LANES
                    for j in range(0, whole, LANES):
                        at = (slot + j) * row_bytes
                        if first_row == 0:
                            _prefetch(values_at + at, group_floats)
                        _dot_products(
                            tile,
                            keys_at + at,
                            tile_weights + 4 * j,
                            rows,
                            head_dim,
                            block,
                            LANES,
                        )
                    for j in range(whole, count):
                        at = (slot + j) * row_bytes
                        if first_row == 0:
                            _prefetch(values_at + at, head_dim)
                        _dot_products(
                            tile,
                            keys_at + at,
                            tile_weights + 4 * j,
                            rows,
                            head_dim,
                            block,
                            1,
                        )
                for row in range(padded_rows):
                    line = weights[row]
                    if row < num_rows:
                        stop = last_BM[sequence, row] + 1
                        for j in range(stop - position, count):
                            line[max(j, 0)] = HIDDEN
                        for j in range(min(count, stop - window - position)):
                            line[j] = HIDDEN
                    if keep_scores:
                        scores_UMS[unit, row, position : position + count] = line[
                            :count
                        ]
                    for j in range(count, block):
                        line[j] = HIDDEN
                    highest = line[0]
                    for j in range(block):
                        highest = max(highest, line[j])
                    if highest > top[row]:
                        factor = np.float32(math.exp(top[row] - highest))
                        top[row] = highest
                        total[row] *= factor
                        for d in range(head_dim):
                            output[row, d] *= factor
                    total[row] += _exponentials(line, top[row], powers)
                for first_row in range(0, padded_rows, rows):
                    for first in range(0, head_dim, width):
                        tile = output_at + first_row * row_bytes + 4 * first
                        tile_weights = weights_base + first_row * 4 * block
                        value_at = values_at + slot * row_bytes + 4 * first
                        whole = count // 8 * 8
                        for j in range(0, whole, 8):
                            if first_row == 0 and first == 0:
                                for i in range(8):
                                    _prefetch(
                                        keys_at + (slot + block + j + i) * row_bytes,
                                        head_dim,
                                    )
                            at = value_at + j * row_bytes
                            _accumulate(
                                tile,
                                tile_weights + 4 * j,
                                at,
                                rows,
                                head_dim,
                                width,
                                block,
                                8,
                            )
                        for j in range(whole, count):
                            at = value_at + j * row_bytes
                            _accumulate(
                                tile,
                                tile_weights + 4 * j,
                                at,
                                rows,
                                head_dim,
                                width,
                                block,
                                1,
                            )
                position += count
            for row in range(padded_rows):
                log_sums_UIM[unit, split, row] = HIDDEN
                if total[row] > 0:
                    log_sums_UIM[unit, split, row] = top[row] + np.float32(
                        math.log(total[row])
                    )
                    inverse = 1 / total[row]
                    for d in range(head_dim):
                        output[row, d] *= inverse

    compiler = partial(
        numba.cfunc,
        types.void(types.int64, types.int64, types.int64),
        fastmath=RELAXED,
    )
    return kept(compiler, name=f"attend_{rows}_{head_dim}")(attend)


@numba.njit(fastmath=RELAXED)
def _exponentials(line, highest, powers):
    """line = exp(line - highest) in place, and their sum: 2^(whole + fraction), the fraction by its
    Taylor series.
    """
    for j in range(len(line)):
        x = max((line[j] - highest) * np.float32(1.4426950408889634), np.float32(-126))
        whole = np.floor(x + np.float32(0.5))
        f = x - whole
        y = np.float32(1.5403530e-4)
        for factor in (
            1.3333558e-3,
            9.6181291e-3,
            5.5504109e-2,
            2.4022651e-1,
            6.9314718e-1,
            1.0,
        ):
            y = y * f + np.float32(factor)
        # the bits of 2^whole
        powers[j] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        line[j] = y
    total = np.float32(0)
    scale = powers.view(np.float32)
    for j in range(len(line)):
        line[j] *= scale[j]
        total += line[j]
    return total


@intrinsic(prefer_literal=True)
def _dot_products(typing_context, queries, keys, scores, rows, head_dim, stride, count):
    """scores[m · stride + j] = queries[m] · keys[j] for each of the rows, and for one key or LANES
    of them. Addresses, and literal sizes in floats. A product leaves LANES partial sums; those of
    LANES keys are added up together, pair by pair, which takes a third of the instructions that
    adding up each by itself takes."""

    def generate(context, builder, signature, arguments):
        query_at, key_at, score_at = arguments[:3]
        size = head_dim.literal_value
        columns = range(0, size, LANES)
        for m in range(rows.literal_value):
            query = [_load(builder, query_at, m * size + i) for i in columns]

            def sums(first, number, query=query):
                if number > 1:
                    half = number // 2
                    return _add_up_pair(
                        builder,
                        sums(first, half),
                        sums(first + half, half),
                        number,
                    )
                lanes = ir.Constant(_VECTOR, [0.0] * LANES)
                for part, i in zip(query, columns, strict=True):
                    lanes = _fma(
                        builder, part, _load(builder, key_at, first * size + i), lanes
                    )
                return lanes

            found = sums(0, count.literal_value)
            offset = m * stride.literal_value
            if count.literal_value == 1:
                builder.store(
                    _sum_of_lanes(builder, found),
                    _pointer(builder, score_at, offset, _FLOAT),
                )
            else:
                builder.store(
                    found, _pointer(builder, score_at, offset, _VECTOR), align=4
                )
        return context.get_dummy_value()

    return types.void(
        types.int64,
        types.int64,
        types.int64,
        rows,
        head_dim,
        stride,
        count,
    ), generate


def _add_up_pair(builder: Any, a: Any, b: Any, number: int) -> Any:
    """From the partial sums of number/2 keys in `a` and of as many in `b`, those of all,
    LANES/number for each: first neighbours within each four lanes are added up, then whole fours,
    since lanes move most cheaply that way."""
    if number <= 4:
        step = number // 2
        low = [
            side + four + i
            for four in range(0, LANES, 4)
            for i0 in range(0, 2, step)
            for side in (0, LANES)
            for i in range(i0, i0 + step)
        ]
        shift = 2
    else:
        low = [four + i for four in range(0, 2 * LANES, 8) for i in range(4)]
        shift = 4
    lane = ir.IntType(32)
    first, second = (
        ir.Constant(ir.VectorType(lane, LANES), [i + by for i in low])
        for by in (0, shift)
    )
    return builder.fadd(
        builder.shuffle_vector(a, b, first), builder.shuffle_vector(a, b, second)
    )


def _sum_of_lanes(builder: Any, lanes: Any) -> Any:
    name, function_type = (
        f"llvm.vector.reduce.fadd.v{LANES}f32",
        ir.FunctionType(_FLOAT, [_FLOAT, _VECTOR]),
    )
    add_up = cgutils.get_or_insert_function(builder.module, function_type, name)
    return builder.call(
        add_up, [ir.Constant(_FLOAT, 0.0), lanes], fastmath=("reassoc", "nsz")
    )


@intrinsic(prefer_literal=True)
def _accumulate(
    typing_context, outputs, weights, values, rows, head_dim, width, stride, count
):
    """outputs[m] += Σ_j weights[m · stride + j] · values[j], over `count` values and `width` of
    their floats.
    """

    def generate(context, builder, signature, arguments):
        output_at, weight_at, value_at = arguments[:3]
        size, columns = head_dim.literal_value, range(0, width.literal_value, LANES)
        sums = {
            (m, i): _load(builder, output_at, m * size + i)
            for m in range(rows.literal_value)
            for i in columns
        }
        for j in range(count.literal_value):
            parts = {i: _load(builder, value_at, j * size + i) for i in columns}
            for m in range(rows.literal_value):
                weight = builder.load(
                    _pointer(builder, weight_at, m * stride.literal_value + j, _FLOAT)
                )
                weight_lanes = _splat(builder, weight)
                for i in columns:
                    sums[m, i] = _fma(builder, weight_lanes, parts[i], sums[m, i])
        for (m, i), lanes in sums.items():
            builder.store(
                lanes, _pointer(builder, output_at, m * size + i, _VECTOR), align=4
            )
        return context.get_dummy_value()

    return types.void(
        types.int64,
        types.int64,
        types.int64,
        rows,
        head_dim,
        width,
        stride,
        count,
    ), generate


@intrinsic(prefer_literal=True)
def _prefetch(typing_context, address, num_floats):
    """Prefetches the cache lines of `num_floats` floats into the second level, since the first can
    wait for few at a time."""

    def generate(context, builder, signature, arguments):
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        prefetch = cgutils.get_or_insert_function(
            builder.module, function_type, "llvm.prefetch.p0"
        )
        to_read, second_level, data = (ir.Constant(flag, value) for value in (0, 2, 1))
        for first in range(0, num_floats.literal_value, CACHE_LINE_FLOATS):
            builder.call(
                prefetch,
                [
                    _pointer(builder, arguments[0], first, ir.IntType(8)),
                    to_read,
                    second_level,
                    data,
                ],
            )
        return context.get_dummy_value()

    return types.void(types.int64, num_floats), generate


def _pointer(builder: Any, address: Any, offset_floats: int, to: Any) -> Any:
    """A pointer to what lies so many floats behind an address."""
    return builder.inttoptr(
        builder.add(address, ir.Constant(_INT, 4 * offset_floats)), to.as_pointer()
    )


def _load(builder: Any, address: Any, offset_floats: int) -> Any:
    return builder.load(_pointer(builder, address, offset_floats, _VECTOR), align=4)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    function_type = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(
        cgutils.get_or_insert_function(
            builder.module, function_type, f"llvm.fma.v{LANES}f32"
        ),
        [a, b, c],
    )


def _splat(builder: Any, value: Any) -> Any:
    undefined, first = (
        ir.Constant(_VECTOR, ir.Undefined),
        ir.Constant(ir.IntType(32), 0),
    )
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(
        builder.insert_element(undefined, value, first), undefined, zeros
    )
