"""Weights in fewer bits, for drafts: a draft's errors cost acceptance, never the output.

Only weights are narrow; products run in the activations' dtype (as specs/precision.py's weight
formats say).

    bf16    rounded (of an fp32 model)
    fp8     e4m3, one scale per output feature: its largest weight is 448
    int8    one scale per output feature: its largest weight is ±127
    int4    one scale per `group` of input features: the largest is -8, so all 16 steps are used

Shape suffixes: N output features, K input features, C groups per row, W columns of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.errors import ConfigError, unknown_choice
from magicdec.runtime.kernels import has_triton
from magicdec.specs import DRAFT_WEIGHT_DTYPES

GROUP_SIZES = (64, 32, 16)
"""Sizes of an int4 group; the first that divides the input features is taken. At 64 the scales add
6 % to the bytes.
"""
INT4_MIDDLE = 8
"""Added to signed steps of int4 when they are stored."""
FP8_MAX = 448.0
INT8_MAX = 127.0
FP8_CAPABILITY = (8, 9)
"""The oldest GPUs that convert e4m3; on others Triton has no such type."""


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A linear layer's weight [N, K] in a narrow format."""

    data_NK: Tensor
    """bfloat16, float8_e4m3fn or int8; of int4 uint8 [N, K/2] (packing: kernels/triton_linear.py).
    """
    scales: Tensor | None
    """fp32 [N, 1], of int4 bf16 [N, C]; None for bf16."""
    group: int = 0
    """Columns of an int4 group; 0 for the other formats."""

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] that this stands for."""
        if self.scales is None:
            return self.data_NK.to(dtype)
        if not self.group:
            wide_NK = self.data_NK.to(torch.float32)
            return (wide_NK * self.scales).to(dtype)
        packed_NCH = self.data_NK.unflatten(1, (-1, self.group // 2))
        low = packed_NCH & 15
        high = packed_NCH >> 4
        steps_NCW = torch.cat((low, high), dim=-1).float() - INT4_MIDDLE
        scales_NC1 = self.scales[..., None].float()
        return (steps_NCW * scales_NC1).to(dtype).flatten(1)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x · weightᵀ + bias. On a GPU only the narrow weights are read; on a CPU that is so for
        int8, while the other formats are widened in memory first."""
        if x.is_cuda and self.scales is not None and has_triton():
            from magicdec.runtime.kernels.triton_linear import weight_only_linear

            output = weight_only_linear(x, self.data_NK, self.scales, group=self.group)
        elif self.data_NK.dtype == torch.int8 and x.device.type == "cpu":
            assert self.scales is not None
            scales_N = self.scales.squeeze(1).to(x.dtype)
            rows = x.flatten(0, -2).contiguous()
            output = torch._weight_int8pack_mm(rows, self.data_NK, scales_N)
            output = output.unflatten(0, x.shape[:-1])
        else:
            return F.linear(x, self.dequantized(x.dtype), bias)
        if bias is None:
            return output
        return output.add_(bias)


def quantize(weight_NK: Tensor, weight_dtype: str) -> QuantizedWeight:
    """A weight in one of DRAFT_WEIGHT_DTYPES, rounded to nearest. Raises ConfigError for another
    format, for fp8 if the weight's GPU cannot widen it, and for input features that no int4 group
    divides."""
    if weight_dtype == "bf16":
        return QuantizedWeight(data_NK=weight_NK.to(torch.bfloat16), scales=None)
    weight = weight_NK.float()
    if weight_dtype == "int4":
        return _quantize_int4(weight)
    smallest = torch.finfo(torch.float32).tiny
    largest_N1 = weight.abs().amax(dim=1, keepdim=True).clamp_min(smallest)
    if weight_dtype == "fp8":
        if weight_NK.is_cuda and has_triton():
            check_fp8(torch.cuda.get_device_capability(weight_NK.device))
        scales = largest_N1 / FP8_MAX
        data_NK = (weight / scales).to(torch.float8_e4m3fn)
    elif weight_dtype == "int8":
        scales = largest_N1 / INT8_MAX
        data_NK = (weight / scales).round().to(torch.int8)
    else:
        raise unknown_choice("draft weight dtype", weight_dtype, DRAFT_WEIGHT_DTYPES)
    return QuantizedWeight(data_NK=data_NK, scales=scales)


def check_fp8(capability: tuple[int, int]) -> None:
    """Raises ConfigError where a GPU of this compute capability cannot widen fp8 weights."""
    if capability < FP8_CAPABILITY:
        needed = "{}.{}".format(*FP8_CAPABILITY)
        own = "{}.{}".format(*capability)
        raise ConfigError(
            f"fp8 weights need compute capability {needed} or newer, this GPU has {own}; "
            "use int8 or int4"
        )


def _quantize_int4(weight_NK: Tensor) -> QuantizedWeight:
    group = _group_size(weight_NK.shape[1])
    weight_NCW = weight_NK.unflatten(1, (-1, group))
    place_NC1 = weight_NCW.abs().argmax(dim=-1, keepdim=True)
    largest_NC1 = weight_NCW.gather(-1, place_NC1)
    scales_NC1 = (largest_NC1 / -8).to(torch.bfloat16)
    divisor_NC1 = torch.where(scales_NC1 == 0, 1, scales_NC1.float())
    steps_NCW = (weight_NCW / divisor_NC1).round_().clamp_(-8, 7)
    low, high = (
        (steps_NCW.to(torch.int16) + INT4_MIDDLE).to(torch.uint8).chunk(2, dim=-1)
    )
    packed_NCH = low | high << 4
    return QuantizedWeight(
        data_NK=packed_NCH.flatten(1),
        scales=scales_NC1.squeeze(-1),
        group=group,
    )


def _group_size(num_inputs: int) -> int:
    """The largest int4 group that divides the input features."""
    for size in GROUP_SIZES:
        if num_inputs % size == 0:
            return size
    raise ConfigError(
        f"int4 weights need a number of input features that {GROUP_SIZES[-1]} divides, "
        f"not {num_inputs}; use int8"
    )
