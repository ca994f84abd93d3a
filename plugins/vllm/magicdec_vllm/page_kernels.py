"""Triton kernels of page_scores.py: mean keys as the cache is written, and the choice of pages by a
query.

    average   a program per written token and KV head: that of a page's last slot averages the page,
              others end
    logits    scale · query · mean key of each candidate; each sequence's candidates are divided
              among programs
    choose    a program per sequence: softmax over candidates, summed over heads; the best, by
              bisection of the bits of their scores (numbers that are not negative have the order of
              their bits); the draft's table

Their number depends on shapes alone, and nothing waits: launches can be captured in a graph.

Shape suffixes as in page_scores.py; in the kernels S slots of a block, N pages of a block, G rows
padded.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32
"""Slots of a page that are added at once."""
BLOCK = 64
"""Pages whose logits are one product."""
MAX_SPLITS = 32
"""Most programs that divide the candidates of one KV head of a sequence."""


@triton.jit
def _average_kernel(
    cache,
    slots,
    means,
    page_stride,
    head_stride,
    slot_stride,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    head = tl.program_id(1)
    if (slot >= 0) & (slot % PAGE == PAGE - 1):
        page = slot // PAGE
        dims_D = tl.arange(0, DIM_PAD)
        is_dim_D = dims_D < HEAD_DIM
        keys = cache + page * page_stride + head.to(tl.int64) * head_stride
        sum_D = tl.zeros([DIM_PAD], dtype=tl.float32)
        for first in range(0, PAGE, ROWS):
            slots_S = first + tl.arange(0, ROWS)
            mask_SD = (slots_S < PAGE)[:, None] & is_dim_D[None, :]
            keys_SD = tl.load(
                keys + slots_S[:, None] * slot_stride + dims_D[None, :],
                mask=mask_SD,
                other=0.0,
            )
            sum_D += tl.sum(keys_SD.to(tl.float32), axis=0)
        at = means + (page * tl.num_programs(1) + head) * HEAD_DIM
        tl.store(at + dims_D, (sum_D / PAGE).to(means.dtype.element_ty), mask=is_dim_D)


@triton.jit
def _logits_kernel(
    query,
    means,
    table,
    stop,
    logits,
    scale,
    query_stride_b,
    query_stride_a,
    table_stride,
    num_columns,
    num_sinks,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    sequence, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_kv_heads, end = tl.num_programs(1), tl.load(stop + sequence).to(tl.int32)
    share = (
        tl.cdiv(tl.cdiv(tl.maximum(end - num_sinks, 0), tl.num_programs(2)), BLOCK)
        * BLOCK
    )
    begin = num_sinks + tl.program_id(2) * share
    end = tl.minimum(begin + share, end)
    group_G, dims_D = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD)
    is_dim_D = dims_D < HEAD_DIM
    head_G, is_row_G = kv_head * GROUP + group_G, group_G < GROUP
    for first in range(begin, end, BLOCK):
        query_G = query + sequence * query_stride_b + head_G * query_stride_a
        query_GD = tl.load(
            query_G[:, None] + dims_D[None, :],
            mask=is_row_G[:, None] & is_dim_D[None, :],
            other=0.0,
        )
        columns_N = first + tl.arange(0, BLOCK)
        is_candidate_N = columns_N < end
        page_N = tl.load(
            table + sequence * table_stride + columns_N,
            mask=is_candidate_N,
            other=0,
        ).to(tl.int64)
        mean_N = means + (page_N * num_kv_heads + kv_head) * HEAD_DIM
        mean_mask_ND = is_candidate_N[:, None] & is_dim_D[None, :]
        means_ND = tl.load(
            mean_N[:, None] + dims_D[None, :], mask=mean_mask_ND, other=0.0
        )
        if WIDEN:  # Triton's interpreter cannot multiply bfloat16
            query_GD, means_ND = query_GD.to(tl.float32), means_ND.to(tl.float32)
        logits_GN = tl.dot(query_GD, tl.trans(means_ND), input_precision="ieee") * scale
        row_G = (sequence * num_kv_heads * GROUP + head_G) * num_columns
        mask_GN = is_row_G[:, None] & is_candidate_N[None, :]
        tl.store(logits + row_G[:, None] + columns_N[None, :], logits_GN, mask=mask_GN)


@triton.jit
def _choose_pages_kernel(
    logits,
    table,
    stop,
    left_out,
    rows,
    chosen,
    drafts_table,
    table_stride,
    num_heads,
    num_columns,
    num_pages,
    num_sinks,
    num_chosen,
    COLUMNS_PAD: tl.constexpr,
    PAGES_PAD: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    end, skipped = (
        tl.load(stop + sequence).to(tl.int32),
        tl.load(left_out + sequence).to(tl.int32),
    )
    own = table + sequence * table_stride
    found = drafts_table + sequence * num_pages
    kept = chosen + tl.load(rows + sequence).to(tl.int64) * num_chosen
    if end > 0:
        columns_P = tl.arange(0, COLUMNS_PAD)
        is_candidate_P = (columns_P >= num_sinks) & (columns_P < end)
        score_P = tl.zeros([COLUMNS_PAD], dtype=tl.float32)
        for head in range(num_heads):
            row = logits + (sequence * num_heads + head) * num_columns
            logits_P = tl.load(
                row + columns_P, mask=is_candidate_P, other=float("-inf")
            )
            weights_P = tl.exp2(logits_P - tl.max(logits_P, axis=0))
            score_P += weights_P / tl.sum(weights_P, axis=0)
        score_P = tl.where(score_P > 0, score_P, 0.0)
        bits_P = tl.where(is_candidate_P, score_P.to(tl.int32, bitcast=True), -1)
        threshold, step = end * 0, end * 0 + (1 << 30)
        for _ in range(31):  # the highest bits that num_chosen scores reach
            trial = threshold + step
            count = tl.sum((bits_P >= trial).to(tl.int32), axis=0)
            threshold = tl.where(count >= num_chosen, trial, threshold)
            step = step >> 1
        is_above_P, is_tied_P = bits_P > threshold, bits_P == threshold
        room = num_chosen - tl.sum(is_above_P.to(tl.int32), axis=0)
        is_chosen_P = is_above_P | (
            is_tied_P & (tl.cumsum(is_tied_P.to(tl.int32), axis=0) <= room)
        )
        place_P = tl.cumsum(is_chosen_P.to(tl.int32), axis=0) - 1
        tl.store(kept + place_P, columns_P, mask=is_chosen_P)
        tl.store(
            found + num_sinks + place_P,
            tl.load(own + columns_P, mask=is_chosen_P, other=0),
            mask=is_chosen_P,
        )
    pages_M = tl.arange(0, PAGES_PAD)
    choices_end = num_sinks + tl.where(skipped > 0, num_chosen, 0)
    written_end = tl.where(end > 0, choices_end, num_sinks)
    is_choice_M = (pages_M >= num_sinks) & (pages_M < choices_end)
    earlier_M = tl.load(kept + pages_M - num_sinks, mask=is_choice_M, other=0)
    source_M = tl.where(
        is_choice_M,
        earlier_M,
        pages_M + tl.where(pages_M >= num_sinks, skipped, 0),
    )
    is_written_M = (pages_M < num_pages) & (
        (pages_M < num_sinks) | (pages_M >= written_end)
    )
    page_M = tl.load(
        own + tl.minimum(source_M, num_columns - 1), mask=is_written_M, other=0
    )
    tl.store(found + pages_M, page_M, mask=is_written_M)


def average_full_pages(keys_NKSD: Tensor, slots_T: Tensor, means_NKD: Tensor) -> None:
    """Writes the mean keys of the pages whose last slot is among `slots_T`; negative ones are
    nobody's.
    """
    _, num_kv_heads, page_size, head_dim = keys_NKSD.shape
    if len(slots_T):
        _average_kernel[(len(slots_T), num_kv_heads)](
            keys_NKSD,
            slots_T,
            means_NKD,
            *keys_NKSD.stride()[:3],
            PAGE=page_size,
            HEAD_DIM=head_dim,
            DIM_PAD=triton.next_power_of_2(head_dim),
            ROWS=ROWS,
        )


def tiling(*, group: int, head_dim: int) -> dict[str, int]:
    """Compile-time sizes of the logits: tensor cores ask for powers of two, and at least 16 rows
    and dimensions.
    """
    padded = {
        "GROUP_PAD": max(16, triton.next_power_of_2(group)),
        "DIM_PAD": max(16, triton.next_power_of_2(head_dim)),
    }
    return {"GROUP": group, "HEAD_DIM": head_dim, "BLOCK": BLOCK, **padded}


def num_warps(columns_pad: int) -> int:
    """Enough that a program holds a few of a sequence's columns in each thread."""
    return min(32, max(4, columns_pad // 1024))


def choose_pages(
    query_BAD: Tensor,
    means_NKD: Tensor,
    table_BP: Tensor,
    stop_B: Tensor,
    left_out_B: Tensor,
    row_B: Tensor,
    chosen_RC: Tensor,
    found_BM: Tensor,
    *,
    scale: float,
    num_sinks: int,
) -> None:
    """Writes the draft's table `found_BM`, and the columns of sequences that choose anew (see
    LayerChoice).
    """
    batch, num_heads, head_dim = query_BAD.shape
    num_kv_heads, num_columns, num_pages = (
        means_NKD.shape[1],
        table_BP.shape[1],
        found_BM.shape[1],
    )
    logits = torch.empty(
        batch,
        num_heads,
        num_columns,
        dtype=torch.float32,
        device=query_BAD.device,
    )
    num_splits = min(triton.cdiv(num_columns, BLOCK), MAX_SPLITS)
    _logits_kernel[(batch, num_kv_heads, num_splits)](
        query_BAD,
        means_NKD,
        table_BP,
        stop_B,
        logits,
        scale * math.log2(math.e),
        *query_BAD.stride()[:2],
        table_BP.stride(0),
        num_columns,
        num_sinks,
        **tiling(group=num_heads // num_kv_heads, head_dim=head_dim),
        WIDEN=triton.knobs.runtime.interpret and query_BAD.dtype == torch.bfloat16,
    )
    columns_pad = triton.next_power_of_2(num_columns)
    _choose_pages_kernel[(batch,)](
        logits,
        table_BP,
        stop_B,
        left_out_B,
        row_B,
        chosen_RC,
        found_BM,
        table_BP.stride(0),
        num_heads,
        num_columns,
        num_pages,
        num_sinks,
        chosen_RC.shape[1],
        COLUMNS_PAD=columns_pad,
        PAGES_PAD=triton.next_power_of_2(num_pages),
        num_warps=num_warps(columns_pad),
    )
