"""Published weights in fewer bits, as wider numbers: what a device that cannot compute in them computes with.

fp8, by block   e4m3 times one fp32 scale per block of rows and columns (DeepSeek-V3; `weight_scale_inv`)
mxfp4           pairs of e2m1 per byte, the lower half first, times 2^(scale - 127) per 32 inputs (OCP MX 1.0; gpt-oss)
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the sixteen codes."""
MX_EXPONENT_BIAS = 127


def widened_blocks(data: Tensor, scales: Tensor, *, block: tuple[int, int], first: tuple[int, int]) -> Tensor:
    """Rows and columns of a matrix from `first` on, with the scales of the blocks that they touch, in fp32."""
    rows, columns = data.shape
    by_row = scales.float().repeat_interleave(block[0], 0)[first[0] % block[0] :][:rows]
    by_element = by_row.repeat_interleave(block[1], 1)[:, first[1] % block[1] :][:, :columns]
    return data.float() * by_element


def widened_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[.., groups of 32 inputs, 16 bytes] and [.., groups] as [.., inputs], in fp32."""
    values = torch.tensor(E2M1)
    pairs = torch.stack((values[(blocks & 15).long()], values[(blocks >> 4).long()]), dim=-1)
    return torch.ldexp(pairs.flatten(-2), scales.int()[..., None] - MX_EXPONENT_BIAS).flatten(-2)
