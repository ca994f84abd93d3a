"""A few rows times a matrix of 8- or 4-bit weights on a GPU, in Triton: the weights are widened in
registers, so that what is read from memory is the narrow format, and products run in the
activations' dtype.

Formats of the weights [N, K] (runtime/quantized.py):
    int8, fp8    one element per byte, one scale per row, applied to the sums
    int4         two elements per byte, one scale per `group` columns: byte i of a group holds
                 columns i and i + group/2

Shape suffixes: M rows of activations, N output features, K input features, H bytes of a block.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_WEIGHTS = 128
"""Weights of a row per step: a line of memory in 8 bits. More of them in 4 bits spill registers."""


@triton.jit
def _widened_dot(weights_NK, activations_MK, sums_NM, WIDEN: tl.constexpr):
    """sums + weights · activationsᵀ, in the activations' dtype. Triton's interpreter cannot
    multiply bfloat16: there both are widened."""
    if WIDEN:
        weights_NK = weights_NK.to(tl.float32)
        activations_MK = activations_MK.to(tl.float32)
    else:
        weights_NK = weights_NK.to(activations_MK.dtype)
    return tl.dot(weights_NK, tl.trans(activations_MK), sums_NM, input_precision="ieee")


@triton.jit
def _linear_kernel(
    activations,
    weights,
    scales,
    output,
    num_rows,
    num_outputs,
    num_inputs,
    activation_stride,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One block of outputs [N, M]. GROUP is 0 where a row has one scale and a byte one element."""
    n_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_M = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_bytes = num_inputs if GROUP == 0 else num_inputs // 2
    weights_N = weights + n_N.to(tl.int64) * row_bytes
    activations_M = activations + m_M.to(tl.int64) * activation_stride
    sums_NM = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for first in range(0, row_bytes, BLOCK):
        bytes_H = first + tl.arange(0, BLOCK)
        inside_H = bytes_H < row_bytes
        weight_mask_NH = (n_N < num_outputs)[:, None] & inside_H[None, :]
        activation_mask_MH = (m_M < num_rows)[:, None] & inside_H[None, :]
        weights_NH = tl.load(
            weights_N[:, None] + bytes_H[None, :], mask=weight_mask_NH, other=0.0
        )
        if GROUP == 0:
            activations_MH = tl.load(
                activations_M[:, None] + bytes_H[None, :],
                mask=activation_mask_MH,
                other=0,
            )
            sums_NM = _widened_dot(weights_NH, activations_MH, sums_NM, WIDEN)
        else:
            group_H = bytes_H // (GROUP // 2)
            low_H = group_H * GROUP + bytes_H % (GROUP // 2)
            scales_N = scales + n_N.to(tl.int64) * (num_inputs // GROUP)
            scales_NH = tl.load(
                scales_N[:, None] + group_H[None, :],
                mask=weight_mask_NH,
                other=0.0,
            )
            scales_NH = scales_NH.to(tl.float32)
            low_NH = ((weights_NH & 15).to(tl.float32) - 8.0) * scales_NH
            high_NH = ((weights_NH >> 4).to(tl.float32) - 8.0) * scales_NH
            low_MH = tl.load(
                activations_M[:, None] + low_H[None, :],
                mask=activation_mask_MH,
                other=0,
            )
            high_MH = tl.load(
                activations_M[:, None] + low_H[None, :] + GROUP // 2,
                mask=activation_mask_MH,
                other=0,
            )
            sums_NM = _widened_dot(low_NH, low_MH, sums_NM, WIDEN)
            sums_NM = _widened_dot(high_NH, high_MH, sums_NM, WIDEN)
    if GROUP == 0:
        scale_N = tl.load(scales + n_N, mask=n_N < num_outputs, other=0.0)
        sums_NM = sums_NM * scale_N[:, None]
    mask_NM = (n_N < num_outputs)[:, None] & (m_M < num_rows)[None, :]
    output_NM = output + m_M.to(tl.int64)[None, :] * num_outputs + n_N[:, None]
    tl.store(output_NM, sums_NM.to(output.dtype.element_ty), mask=mask_NM)


def tiling(
    num_rows: int,
    num_outputs: int,
    num_multiprocessors: int,
    *,
    group: int = 0,
) -> dict[str, Any]:
    """The largest blocks that still give every multiprocessor one, so all of the memory's bandwidth
    is used."""
    block_n = 64 if group else 128  # as many weights of either width in registers
    while block_n > 16 and triton.cdiv(num_outputs, block_n) < num_multiprocessors:
        block_n //= 2
    block_m = min(64, max(16, triton.next_power_of_2(num_rows)))
    block = BLOCK_WEIGHTS // 2 if group else BLOCK_WEIGHTS
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK": block,
        "num_warps": 4,
        "num_stages": 3,
    }


def weight_only_linear(
    x: Tensor, weights: Tensor, scales: Tensor, *, group: int
) -> Tensor:
    """x [.., K] times quantised weights: [.., N]. `group` is the int4 groups' size, 0 for the 8-bit
    formats.
    """
    rows_MK = x.flatten(0, -2)
    num_rows, num_inputs = rows_MK.shape
    num_outputs = len(weights)
    output = torch.empty(*x.shape[:-1], num_outputs, dtype=x.dtype, device=x.device)
    device = x.device
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )
    constants = tiling(num_rows, num_outputs, processors, group=group)
    grid = (
        triton.cdiv(num_outputs, constants["BLOCK_N"]),
        triton.cdiv(num_rows, constants["BLOCK_M"]),
    )
    _linear_kernel[grid](
        rows_MK,
        weights,
        scales,
        output,
        num_rows,
        num_outputs,
        num_inputs,
        rows_MK.stride(0),
        GROUP=group,
        WIDEN=triton.knobs.runtime.interpret and x.dtype == torch.bfloat16,
        **constants,
    )
    return output
