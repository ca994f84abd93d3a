"""Decode and verify attention on a GPU, in Triton: each key and value is read once per sequence,
whatever gamma is.

    1. split    all T·G query rows of a KV head are one tile; the slots that a sequence sees are
                divided among `num_splits` programs, each of which keeps a softmax of its own
                (flash-decoding, arXiv 2311.01282 §5)
    2. combine  the splits' outputs, weighted by exp of their log-sum-exp
    3. weigh    if probabilities are wanted: the keys once more, against the log-sum-exp now known

Where sequences end is read on the device, and the number of splits depends on shapes alone, so that
a launch can be captured in a graph. Short sequences are divided too: every program has the same
share of its own sequence.

Scores are held in units of log 2, so that exp2 serves. Accumulation is in fp32; probabilities are
rounded to the values' dtype for the second product, as in flash attention.

Shape suffixes: B sequences, T query tokens, A query heads, K KV heads, G = A/K, D head_dim, S KV
slots; in the kernels R = T·G padded rows and N slots of a block.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from magicdec.runtime.kernels import TRITON_DTYPES, Visible

MAX_TILE_ROWS = 128
"""More query rows than this are several tiles, which read the keys and values each (from L2, as a
rule).
"""
MIN_SPLIT_SLOTS = 256
MAX_SPLITS = 128
PROGRAMS_PER_MULTIPROCESSOR = 4
TILE_BYTES = 16 * 1024
"""Bytes of a block of keys, and as many of values: with three stages two programs fit a
multiprocessor of 228 KiB.
"""
BLOCKS_PER_WEIGHING_PROGRAM = 8
COUNTS = (
    "num_sequences",
    "num_kv_heads",
    "num_tokens",
    "num_slots",
    "num_rows",
    "num_splits",
    "empty_stop",
)
"""Arguments that only bound loops and masks: compiled for their value (1, or a multiple of 16) they
would make three times as many variants, each of which takes seconds to compile.
"""


@triton.jit
def dot(a, b, WIDEN: tl.constexpr):
    """Matrix product, accumulated in fp32. Triton's interpreter cannot multiply bfloat16: widened,
    it is the same.
    """
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _slots(positions_N, RING: tl.constexpr):
    """Where the tokens at these positions are stored."""
    slots_N = positions_N
    if RING > 0:
        slots_N = positions_N % RING
    return slots_N


@triton.jit
def _is_visible(
    slots_N,
    last_R,
    empty_first,
    empty_stop,
    WINDOW: tl.constexpr,
    HAS_EMPTY: tl.constexpr,
):
    seen_RN = slots_N[None, :] <= last_R[:, None]
    if WINDOW > 0:
        seen_RN = seen_RN & (slots_N[None, :] > last_R[:, None] - WINDOW)
    if HAS_EMPTY:
        seen_RN = seen_RN & ((slots_N < empty_first) | (slots_N >= empty_stop))[None, :]
    return seen_RN


@triton.jit
def _block_scores(
    query_RD,
    keys,
    slots_N,
    inside_N,
    last_R,
    empty_first,
    empty_stop,
    scale,
    slot_stride,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    HAS_EMPTY: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Scores [R, N] of a block of slots, -inf where a row does not see the slot."""
    dims_D = tl.arange(0, DIM_PAD)
    key_mask_ND = inside_N[:, None] & (dims_D < HEAD_DIM)[None, :]
    key_N = keys + _slots(slots_N, RING) * slot_stride
    keys_ND = tl.load(key_N[:, None] + dims_D[None, :], mask=key_mask_ND, other=0.0)
    scores_RN = dot(query_RD, tl.trans(keys_ND), WIDEN) * scale
    seen_RN = (
        _is_visible(slots_N, last_R, empty_first, empty_stop, WINDOW, HAS_EMPTY)
        & inside_N[None, :]
    )
    return tl.where(seen_RN, scores_RN, float("-inf"))


@triton.jit
def _tile(
    pid, num_kv_heads, num_tokens, TOKENS_PAD: tl.constexpr, GROUP_PAD: tl.constexpr
):
    """A program's sequence and KV head, and the token and query head (within the group) of each of
    its rows.
    """
    tiles = tl.cdiv(num_tokens, TOKENS_PAD)
    kv_head = (pid // tiles) % num_kv_heads
    sequence = pid // (tiles * num_kv_heads)
    rows_R = tl.arange(0, TOKENS_PAD * GROUP_PAD)
    token_R = (pid % tiles) * TOKENS_PAD + rows_R // GROUP_PAD
    return sequence, kv_head, token_R, rows_R % GROUP_PAD


@triton.jit(do_not_specialize=COUNTS)
def _split_kernel(
    query,
    keys,
    values,
    last,
    empty_first,
    output,
    log_sum,
    scale,
    query_stride_b,
    query_stride_t,
    query_stride_a,
    key_stride_b,
    key_stride_k,
    key_stride_s,
    value_stride_b,
    value_stride_k,
    value_stride_s,
    last_stride_b,
    last_stride_t,
    num_sequences,
    num_kv_heads,
    num_tokens,
    num_slots,
    empty_stop,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    TOKENS_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    HAS_EMPTY: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One split of one (sequence, KV head): normalised output [.., D] and log2-sum-exp2 of each
    row.
    """
    sequence, kv_head, token_R, group_R = _tile(
        tl.program_id(0),
        num_kv_heads,
        num_tokens,
        TOKENS_PAD,
        GROUP_PAD,
    )
    split = tl.program_id(1)
    dims_D = tl.arange(0, DIM_PAD)
    is_token_R = token_R < num_tokens
    row_mask_R = is_token_R & (group_R < GROUP)
    head_R = kv_head * GROUP + group_R
    row_mask_RD = row_mask_R[:, None] & (dims_D < HEAD_DIM)[None, :]
    query_R = (
        query
        + sequence.to(tl.int64) * query_stride_b
        + token_R * query_stride_t
        + head_R * query_stride_a
    )
    query_RD = tl.load(query_R[:, None] + dims_D[None, :], mask=row_mask_RD, other=0.0)
    last_at_R = last + sequence * last_stride_b + token_R * last_stride_t
    last_R = tl.load(last_at_R, mask=is_token_R, other=-1).to(tl.int32)
    hole = 0
    if HAS_EMPTY:
        hole = tl.load(empty_first + sequence).to(tl.int32)

    end = tl.max(last_R, axis=0) + 1
    stop = end if RING > 0 else tl.minimum(end, num_slots)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(
            tl.min(tl.where(is_token_R, last_R, end), axis=0) + 1 - WINDOW, 0
        )
    share = (
        tl.cdiv(tl.cdiv(tl.maximum(stop - begin, 0), tl.num_programs(1)), BLOCK) * BLOCK
    )
    begin = begin + split * share
    stop = tl.minimum(begin + share, stop)

    keys += sequence.to(tl.int64) * key_stride_b + kv_head.to(tl.int64) * key_stride_k
    values += (
        sequence.to(tl.int64) * value_stride_b + kv_head.to(tl.int64) * value_stride_k
    )
    highest_R = tl.full([TOKENS_PAD * GROUP_PAD], float("-inf"), dtype=tl.float32)
    total_R = tl.zeros([TOKENS_PAD * GROUP_PAD], dtype=tl.float32)
    sum_RD = tl.zeros([TOKENS_PAD * GROUP_PAD, DIM_PAD], dtype=tl.float32)
    for first in range(begin, stop, BLOCK):
        slots_N = first + tl.arange(0, BLOCK)
        inside_N = slots_N < stop
        scores_RN = _block_scores(
            query_RD,
            keys,
            slots_N,
            inside_N,
            last_R,
            hole,
            empty_stop,
            scale,
            key_stride_s,
            HEAD_DIM,
            DIM_PAD,
            WINDOW,
            RING,
            HAS_EMPTY,
            WIDEN,
        )
        value_mask_ND = inside_N[:, None] & (dims_D < HEAD_DIM)[None, :]
        value_N = values + _slots(slots_N, RING) * value_stride_s
        values_ND = tl.load(
            value_N[:, None] + dims_D[None, :], mask=value_mask_ND, other=0.0
        )
        new_R = tl.maximum(highest_R, tl.max(scores_RN, axis=1))
        # a row that has seen nothing yet
        shift_R = tl.where(new_R == float("-inf"), 0.0, new_R)
        rescale_R = tl.exp2(highest_R - shift_R)
        weights_RN = tl.exp2(scores_RN - shift_R[:, None])
        total_R = total_R * rescale_R + tl.sum(weights_RN, axis=1)
        sum_RD = sum_RD * rescale_R[:, None]
        sum_RD += dot(weights_RN.to(values_ND.dtype), values_ND, WIDEN)
        highest_R = new_R

    is_seen_R = total_R > 0
    safe_R = tl.where(is_seen_R, total_R, 1.0)
    num_heads = num_kv_heads * GROUP
    row_R = (
        (split * num_sequences + sequence).to(tl.int64) * num_tokens + token_R
    ) * num_heads + head_R
    result_RD = (sum_RD / safe_R[:, None]).to(output.dtype.element_ty)
    tl.store(
        output + row_R[:, None] * HEAD_DIM + dims_D[None, :],
        result_RD,
        mask=row_mask_RD,
    )
    log_sum_R = tl.where(is_seen_R, highest_R + tl.log2(safe_R), float("-inf"))
    tl.store(log_sum + row_R, log_sum_R, mask=row_mask_R)


@triton.jit(do_not_specialize=COUNTS)
def _combine_kernel(
    partial,
    partial_log_sum,
    output,
    log_sum,
    num_rows,
    num_splits,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):
    """One row (sequence, token, query head): its splits' outputs, weighted."""
    row = tl.program_id(0).to(tl.int64)
    splits_P = tl.arange(0, SPLITS_PAD)
    dims_D = tl.arange(0, DIM_PAD)
    log_sum_P = tl.load(
        partial_log_sum + splits_P * num_rows + row,
        mask=splits_P < num_splits,
        other=float("-inf"),
    )
    highest = tl.max(log_sum_P, axis=0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    weight_P = tl.exp2(log_sum_P - highest)
    total = tl.sum(weight_P, axis=0)
    safe = tl.where(total > 0, total, 1.0)
    mask_PD = (weight_P > 0)[:, None] & (dims_D < HEAD_DIM)[None, :]
    offset_PD = (splits_P.to(tl.int64) * num_rows + row)[:, None] * HEAD_DIM + dims_D[
        None, :
    ]
    partial_PD = tl.load(partial + offset_PD, mask=mask_PD, other=0.0)
    result_D = tl.sum(partial_PD * weight_P[:, None], axis=0) / safe
    tl.store(
        output + row * HEAD_DIM + dims_D,
        result_D.to(output.dtype.element_ty),
        mask=dims_D < HEAD_DIM,
    )
    tl.store(log_sum + row, tl.where(total > 0, highest + tl.log2(safe), float("-inf")))


@triton.jit(do_not_specialize=COUNTS)
def _weigh_kernel(
    query,
    keys,
    last,
    empty_first,
    log_sum,
    probabilities,
    scale,
    query_stride_b,
    query_stride_t,
    query_stride_a,
    key_stride_b,
    key_stride_k,
    key_stride_s,
    last_stride_b,
    last_stride_t,
    num_kv_heads,
    num_tokens,
    num_slots,
    empty_stop,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    TOKENS_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_EMPTY: tl.constexpr,
    WIDEN: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Probabilities of some slots of one (sequence, KV head), summed over its query heads: [T,
    slots].
    """
    sequence, kv_head, token_R, group_R = _tile(
        tl.program_id(0),
        num_kv_heads,
        num_tokens,
        TOKENS_PAD,
        GROUP_PAD,
    )
    dims_D = tl.arange(0, DIM_PAD)
    is_token_R = token_R < num_tokens
    row_mask_R = is_token_R & (group_R < GROUP)
    head_R = kv_head * GROUP + group_R
    query_R = (
        query
        + sequence.to(tl.int64) * query_stride_b
        + token_R * query_stride_t
        + head_R * query_stride_a
    )
    row_mask_RD = row_mask_R[:, None] & (dims_D < HEAD_DIM)[None, :]
    query_RD = tl.load(query_R[:, None] + dims_D[None, :], mask=row_mask_RD, other=0.0)
    last_at_R = last + sequence * last_stride_b + token_R * last_stride_t
    last_R = tl.load(last_at_R, mask=is_token_R, other=-1).to(tl.int32)
    row_R = (sequence.to(tl.int64) * num_tokens + token_R) * (
        num_kv_heads * GROUP
    ) + head_R
    log_sum_R = tl.load(log_sum + row_R, mask=row_mask_R, other=float("inf"))
    # a row that saw nothing weighs nothing
    log_sum_R = tl.where(
        log_sum_R == float("-inf"),
        float("inf"),
        log_sum_R,
    )
    hole = 0
    if HAS_EMPTY:
        hole = tl.load(empty_first + sequence).to(tl.int32)

    stop = tl.minimum(tl.max(last_R, axis=0) + 1, num_slots)
    keys += sequence.to(tl.int64) * key_stride_b + kv_head.to(tl.int64) * key_stride_k
    token_T = tl.min(tl.reshape(token_R, [TOKENS_PAD, GROUP_PAD]), axis=1)
    row_T = (sequence * num_kv_heads + kv_head).to(tl.int64) * num_tokens + token_T
    begin = tl.program_id(1) * (NUM_BLOCKS * BLOCK)
    for first in range(begin, tl.minimum(begin + NUM_BLOCKS * BLOCK, num_slots), BLOCK):
        slots_N = first + tl.arange(0, BLOCK)
        scores_RN = _block_scores(
            query_RD,
            keys,
            slots_N,
            slots_N < stop,
            last_R,
            hole,
            empty_stop,
            scale,
            key_stride_s,
            HEAD_DIM,
            DIM_PAD,
            WINDOW,
            0,
            HAS_EMPTY,
            WIDEN,
        )
        weights_RN = tl.exp2(scores_RN - log_sum_R[:, None])
        weights_TN = tl.sum(
            tl.reshape(weights_RN, [TOKENS_PAD, GROUP_PAD, BLOCK]), axis=1
        )
        mask_TN = (token_T < num_tokens)[:, None] & (slots_N < num_slots)[None, :]
        tl.store(
            probabilities + row_T[:, None] * num_slots + slots_N[None, :],
            weights_TN,
            mask=mask_TN,
        )


def tiling(
    *, group: int, head_dim: int, num_tokens: int, element_bytes: int
) -> dict[str, int]:
    """Compile-time sizes: those that tensor cores and tl.arange ask to be powers of two, and at
    least 16 rows.
    """
    group_pad, dim_pad = (
        triton.next_power_of_2(group),
        max(16, triton.next_power_of_2(head_dim)),
    )
    most = max(1, MAX_TILE_ROWS // group_pad)
    tokens_pad = max(min(triton.next_power_of_2(num_tokens), most), 16 // group_pad, 1)
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "GROUP_PAD": group_pad,
        "TOKENS_PAD": tokens_pad,
        "DIM_PAD": dim_pad,
        "BLOCK": min(128, max(16, TILE_BYTES // (dim_pad * element_bytes))),
        "num_warps": 8 if tokens_pad * group_pad >= 64 else 4,
        "num_stages": 3,
    }


@lru_cache
def _num_multiprocessors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )


def choose_num_splits(
    *, num_programs: int, num_slots: int, num_multiprocessors: int
) -> int:
    """Number of splits: enough to fill the device's multiprocessors several times over, unless they
    would become too short."""
    wanted = triton.cdiv(
        PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors, num_programs
    )
    return max(1, min(wanted, triton.cdiv(num_slots, MIN_SPLIT_SLOTS), MAX_SPLITS))


def supports(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `decode_attention` takes these: on a GPU, of one of the three float types, each head
    contiguous.
    """
    tensors = (query, keys, values)
    is_alike = all(t.dtype == query.dtype and t.stride(-1) == 1 for t in tensors)
    return query.is_cuda and query.dtype in TRITON_DTYPES and is_alike


def decode_attention(
    query_BTAD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    visible: Visible,
    *,
    scale: float | None = None,
    probabilities: bool = False,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attends over the slots that each query sees, softmax(scale·q·kᵀ)·v; the scale is 1/√D if not
    given.

    A row that sees nothing gives zeros. Keys and values may be strided views. The windows of all
    tokens fit into a ring, which gives no probabilities.

    Returns the output [B, T, A·D], and with `probabilities` each slot's, summed over the query
    heads of a KV head: fp32 [B, K, T, S], 0 where not seen. They cost a second reading of the keys.
    """
    num_sequences, num_tokens, num_heads, head_dim = query_BTAD.shape
    kv_heads, num_slots = keys_BKSD.shape[1], min(keys_BKSD.shape[2], visible.stop)
    window, ring, last_BT = visible.window, visible.ring, visible.last_BT
    device = query_BTAD.device
    assert ring is None or (window is not None and not probabilities)
    constants = tiling(
        group=num_heads // kv_heads,
        head_dim=head_dim,
        num_tokens=num_tokens,
        element_bytes=keys_BKSD.element_size(),
    )
    num_programs = (
        num_sequences * kv_heads * triton.cdiv(num_tokens, constants["TOKENS_PAD"])
    )
    if num_splits is None:
        num_splits = choose_num_splits(
            num_programs=num_programs,
            num_slots=num_slots,
            num_multiprocessors=_num_multiprocessors(device),
        )
    rows = (num_sequences, num_tokens, num_heads)
    output = torch.empty(*rows, head_dim, dtype=query_BTAD.dtype, device=device)
    log_sum = torch.empty(rows, dtype=torch.float32, device=device)
    partial, partial_log_sum = output, log_sum
    if num_splits > 1:
        partial = torch.empty(
            num_splits, *rows, head_dim, dtype=torch.float32, device=device
        )
        partial_log_sum = torch.empty(
            num_splits, *rows, dtype=torch.float32, device=device
        )
    scale = (scale or head_dim**-0.5) * math.log2(math.e)
    constants |= {
        "WINDOW": window or 0,
        "HAS_EMPTY": visible.empty is not None,
        "WIDEN": triton.knobs.runtime.interpret and query_BTAD.dtype == torch.bfloat16,
    }
    hole_B, empty_stop = visible.empty or (last_BT, 0)
    _split_kernel[(num_programs, num_splits)](
        query_BTAD,
        keys_BKSD,
        values_BKSD,
        last_BT,
        hole_B,
        partial,
        partial_log_sum,
        scale,
        *query_BTAD.stride()[:3],
        *keys_BKSD.stride()[:3],
        *values_BKSD.stride()[:3],
        *last_BT.stride(),
        num_sequences,
        kv_heads,
        num_tokens,
        num_slots,
        empty_stop,
        **constants,
        RING=ring or 0,
    )
    if num_splits > 1:
        _combine_kernel[(math.prod(rows),)](
            partial,
            partial_log_sum,
            output,
            log_sum,
            math.prod(rows),
            num_splits,
            HEAD_DIM=head_dim,
            DIM_PAD=constants["DIM_PAD"],
            SPLITS_PAD=triton.next_power_of_2(num_splits),
        )
    weights = None
    if probabilities:
        weights = torch.empty(
            num_sequences,
            kv_heads,
            num_tokens,
            num_slots,
            dtype=torch.float32,
            device=device,
        )
        share = BLOCKS_PER_WEIGHING_PROGRAM * constants["BLOCK"]
        _weigh_kernel[(num_programs, triton.cdiv(num_slots, share))](
            query_BTAD,
            keys_BKSD,
            last_BT,
            hole_B,
            log_sum,
            weights,
            scale,
            *query_BTAD.stride()[:3],
            *keys_BKSD.stride()[:3],
            *last_BT.stride(),
            kv_heads,
            num_tokens,
            num_slots,
            empty_stop,
            **constants,
            NUM_BLOCKS=BLOCKS_PER_WEIGHING_PROGRAM,
        )
    return output.flatten(2), weights
