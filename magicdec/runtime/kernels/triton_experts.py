"""Matrix products of a mixture's experts on a GPU, in Triton: one launch for all of them.

Rows come sorted by expert; a program computes some outputs of one tile of an expert's rows. There
are programs for the most rows that an expert could have; those beyond its last one end at once, so
only chosen experts' weights are read. Where an expert's rows begin is read on the device, and the
grid depends on shapes alone, so that a launch can be captured in a graph. torch's grouped_mm can be
captured too, but only in bf16 on Hopper and datacenter Blackwell: elsewhere it copies the offsets
to the host (https://github.com/pytorch/pytorch/issues/169970).

Shape suffixes: E experts, R rows, F outputs, K inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from magicdec.runtime.kernels.triton_attention import dot

MAX_TILE_ROWS = 128
MANY_ROWS = 64
"""Rows of a tile from which products, rather than reading weights, take the time: more outputs per
program."""


@triton.jit
def _grouped_product_kernel(
    inputs,
    weight,
    bias,
    order,
    starts,
    output,
    rows_per_input,
    num_outputs,
    num_inputs,
    input_stride,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Some outputs of a tile of one expert's rows."""
    expert = tl.program_id(2).to(tl.int64)
    first = tl.load(starts + expert) + tl.program_id(0) * ROWS
    stop = tl.load(starts + expert + 1)
    if first >= stop:
        return
    at_R = first + tl.arange(0, ROWS)
    inside_R1 = (at_R < stop)[:, None]
    row_R = tl.load(order + at_R, mask=at_R < stop, other=0)
    outputs_F = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside_F = outputs_F < num_outputs
    inputs_K = tl.arange(0, INPUTS)
    input_RK = inputs + (row_R // rows_per_input)[:, None] * input_stride + inputs_K
    weight_F = weight + (expert * num_outputs + outputs_F) * num_inputs
    weight_FK = weight_F[:, None] + inputs_K[None, :]
    sum_RF = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    for k in range(0, num_inputs, INPUTS):
        inside_1K = (inputs_K < num_inputs - k)[None, :]
        x_RK = tl.load(input_RK + k, mask=inside_R1 & inside_1K, other=0.0)
        weight_mask_FK = inside_F[:, None] & inside_1K
        w_FK = tl.load(weight_FK + k, mask=weight_mask_FK, other=0.0)
        sum_RF += dot(x_RK, tl.trans(w_FK), WIDEN)
    if HAS_BIAS:
        bias_at_F = bias + expert * num_outputs + outputs_F
        bias_F = tl.load(bias_at_F, mask=inside_F, other=0.0).to(tl.float32)
        sum_RF += bias_F[None, :]
    tl.store(
        output + row_R[:, None] * num_outputs + outputs_F[None, :],
        sum_RF.to(output.dtype.element_ty),
        mask=inside_R1 & inside_F[None, :],
    )


def grouped_product(
    inputs: Tensor,
    weight_EFK: Tensor,
    bias_EF: Tensor | None,
    order_R: Tensor,
    starts: Tensor,
    *,
    most_rows: int,
) -> Tensor:
    """Each row's inputs times its expert's weight, plus its bias, [R, F]. Rows
    order_R[starts[e]] to order_R[starts[e + 1] - 1] are of expert e, at most `most_rows`. With
    fewer inputs than rows, equally many neighbouring rows share each."""
    num_experts, num_outputs, num_inputs = weight_EFK.shape
    num_rows = len(order_R)
    assert inputs.stride(1) == 1
    assert weight_EFK.is_contiguous()
    assert bias_EF is None or bias_EF.is_contiguous()
    output = inputs.new_empty(num_rows, num_outputs)
    tiling = product_tiling(num_rows, num_experts, inputs.element_size())
    grid = (
        triton.cdiv(most_rows, tiling["ROWS"]),
        triton.cdiv(num_outputs, tiling["OUTPUTS"]),
        num_experts,
    )
    _grouped_product_kernel[grid](
        inputs,
        weight_EFK,
        weight_EFK if bias_EF is None else bias_EF,
        order_R,
        starts,
        output,
        num_rows // len(inputs),
        num_outputs,
        num_inputs,
        inputs.stride(0),
        HAS_BIAS=bias_EF is not None,
        WIDEN=triton.knobs.runtime.interpret and inputs.dtype == torch.bfloat16,
        **tiling,
    )
    return output


def product_tiling(
    num_rows: int, num_experts: int, element_bytes: int
) -> dict[str, int]:
    """Compile-time sizes, and the number of warps: a tile for twice the rows that an expert has on
    average, so that most experts are one tile and their weights read once."""
    wanted = triton.next_power_of_2(triton.cdiv(2 * num_rows, num_experts))
    rows = min(MAX_TILE_ROWS, max(16, wanted))
    if rows < MANY_ROWS:
        return {
            "ROWS": rows,
            "OUTPUTS": 64,
            "INPUTS": 256 // element_bytes,
            "num_warps": 4,
        }
    return {
        "ROWS": rows,
        "OUTPUTS": 128,
        "INPUTS": 128 // element_bytes,
        "num_warps": 8,
    }
