"""Softmax and the choice of a token over a large vocabulary on a GPU, in Triton.

A library gives one row to one multiprocessor: a batch of few rows leaves most of the device idle,
whatever the bytes. Here a row is divided into shares, one per program; each leaves a number or two
of its own, and the second launch needs nothing else of the other shares. Sums are fp32, of a share
by a tree. Nothing is read on the host, so that a launch can be captured in a graph.

Shape suffixes: M rows, V vocabulary, C shares of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SHARE = 4096
"""Elements of a row per program: 128k tokens are 32 shares. With eight warps, 16 elements a thread.
"""
NUM_WARPS = 8


@triton.jit
def _weigh_shares_kernel(
    logits, highest, total, size, stride, temperature, SHARE: tl.constexpr
):
    """A share's largest logit, and the sum of exponentials relative to it."""
    row = tl.program_id(0).to(tl.int64)
    at_V = tl.program_id(1) * SHARE + tl.arange(0, SHARE)
    logits_V = (
        tl.load(logits + row * stride + at_V, mask=at_V < size, other=float("-inf")).to(
            tl.float32
        )
        / temperature
    )
    top = tl.max(logits_V, axis=0)
    # of a share without a finite logit
    shift = tl.where(top == float("-inf"), 0.0, top)
    share = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(highest + share, top)
    tl.store(total + share, tl.sum(tl.exp(logits_V - shift), axis=0))


@triton.jit
def _normalise_kernel(
    logits,
    highest,
    total,
    probabilities,
    size,
    stride,
    temperature,
    SHARE: tl.constexpr,
    SHARES_PAD: tl.constexpr,
):
    """The probabilities of a share, from what all of the row's shares hold."""
    row = tl.program_id(0).to(tl.int64)
    shares_C = tl.arange(0, SHARES_PAD)
    mask_C = shares_C < tl.num_programs(1)
    highest_C = tl.load(
        highest + row * tl.num_programs(1) + shares_C,
        mask=mask_C,
        other=float("-inf"),
    )
    total_C = tl.load(
        total + row * tl.num_programs(1) + shares_C, mask=mask_C, other=0.0
    )
    top = tl.max(highest_C, axis=0)
    sum_of_row = tl.sum(total_C * tl.exp(highest_C - top), axis=0)
    at_V = tl.program_id(1) * SHARE + tl.arange(0, SHARE)
    mask_V = at_V < size
    logits_V = (
        tl.load(logits + row * stride + at_V, mask=mask_V, other=float("-inf")).to(
            tl.float32
        )
        / temperature
    )
    tl.store(
        probabilities + row * size + at_V,
        tl.exp(logits_V - top) / sum_of_row,
        mask=mask_V,
    )


def softmax(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) over the last dimension, fp32. A row with NaN, or of -inf
    alone, gives NaN.
    """
    rows_MV = logits.flatten(0, -2)
    num_rows, size = rows_MV.shape
    assert rows_MV.stride(1) == 1
    num_shares = triton.cdiv(size, SHARE)
    highest = torch.empty(
        num_rows, num_shares, dtype=torch.float32, device=logits.device
    )
    total = torch.empty_like(highest)
    probabilities = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    grid = (num_rows, num_shares)
    given = (size, rows_MV.stride(0), temperature)
    _weigh_shares_kernel[grid](
        rows_MV, highest, total, *given, SHARE=SHARE, num_warps=NUM_WARPS
    )
    _normalise_kernel[grid](
        rows_MV,
        highest,
        total,
        probabilities,
        *given,
        SHARE=SHARE,
        SHARES_PAD=triton.next_power_of_2(num_shares),
        num_warps=NUM_WARPS,
    )
    return probabilities


@triton.jit
def _sum_shares_kernel(weights, total, size, stride, SHARE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at_V = tl.program_id(1) * SHARE + tl.arange(0, SHARE)
    weights_V = tl.load(weights + row * stride + at_V, mask=at_V < size, other=0.0).to(
        tl.float32
    )
    tl.store(
        total + row * tl.num_programs(1) + tl.program_id(1), tl.sum(weights_V, axis=0)
    )


@triton.jit
def _first_above(weights_X, threshold, X: tl.constexpr):
    """The first index whose cumulative weight exceeds the threshold; where rounding leaves none,
    the last with a weight above 0, and 0 where there is none at all. Only an index with such a
    weight is chosen."""
    indices_X = tl.arange(0, X)
    is_positive_X = weights_X > 0
    is_above_X = is_positive_X & (tl.cumsum(weights_X, axis=0) > threshold)
    first = tl.min(tl.where(is_above_X, indices_X, X), axis=0)
    last = tl.max(tl.where(is_positive_X, indices_X, 0), axis=0)
    return tl.where(first < X, first, last)


@triton.jit
def _choose_kernel(
    weights,
    total,
    uniform,
    tokens,
    size,
    num_shares,
    stride,
    uniform_stride,
    SHARE: tl.constexpr,
    SHARES_PAD: tl.constexpr,
):
    """One row: first the share in which its uniform number falls, then the token in that share."""
    row = tl.program_id(0).to(tl.int64)
    shares_C = tl.arange(0, SHARES_PAD)
    total_C = tl.load(
        total + row * num_shares + shares_C, mask=shares_C < num_shares, other=0.0
    )
    threshold = tl.load(uniform + row * uniform_stride) * tl.sum(total_C, axis=0)
    share = _first_above(total_C, threshold, SHARES_PAD)
    threshold -= tl.sum(tl.where(shares_C < share, total_C, 0.0), axis=0)
    at_V = share * SHARE + tl.arange(0, SHARE)
    weights_V = tl.load(weights + row * stride + at_V, mask=at_V < size, other=0.0).to(
        tl.float32
    )
    tl.store(
        tokens + row,
        (share * SHARE + _first_above(weights_V, threshold, SHARE)).to(tl.int64),
    )


def sample(weights_MV: Tensor, uniform_M: Tensor) -> Tensor:
    """The token of each row at which the cumulative sum of its weights passes uniform · total,
    int64. A token of weight 0 is never chosen, as long as the row has one above 0."""
    num_rows, size = weights_MV.shape
    assert weights_MV.stride(1) == 1
    num_shares = triton.cdiv(size, SHARE)
    total = torch.empty(
        num_rows, num_shares, dtype=torch.float32, device=weights_MV.device
    )
    tokens_M = torch.empty(num_rows, dtype=torch.int64, device=weights_MV.device)
    _sum_shares_kernel[(num_rows, num_shares)](
        weights_MV,
        total,
        size,
        weights_MV.stride(0),
        SHARE=SHARE,
        num_warps=NUM_WARPS,
    )
    _choose_kernel[(num_rows,)](
        weights_MV,
        total,
        uniform_M,
        tokens_M,
        size,
        num_shares,
        weights_MV.stride(0),
        uniform_M.stride(0),
        SHARE=SHARE,
        SHARES_PAD=triton.next_power_of_2(num_shares),
        num_warps=NUM_WARPS,
    )
    return tokens_M
