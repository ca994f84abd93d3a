"""The layers of the transformer, holding this shard's weights.

What lies between two matrix products is one kernel on a GPU, where each launch counts (kernels/triton_fused.py), and
plain torch elsewhere.

Shape suffixes: B sequences, T query tokens, H hidden, V vocabulary of this shard, N query and key heads of this shard,
D head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.runtime import kernels
from magicdec.runtime.distributed import TensorParallel
from magicdec.runtime.quantized import QuantizedWeight
from magicdec.specs.layers import Rope, RopeScaling


@dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """x / sqrt(mean(x²) + eps) · weight."""

    weight: Tensor
    eps: float

    def after_adding_(self, x: Tensor, delta: Tensor | None) -> Tensor:
        """x += delta, where there is one, and the norm of the sum."""
        if delta is not None and kernels.can_fuse(x):
            from magicdec.runtime.kernels import triton_fused

            return triton_fused.add_rms_norm_(x, delta, self.weight, self.eps)
        whole = x if delta is None else x.add_(delta)
        return F.rms_norm(whole, (x.shape[-1],), self.weight, self.eps)


@dataclass(frozen=True, kw_only=True)
class HeadNorm:
    """RMSNorm of each query and key head over head_dim (Qwen3)."""

    weight_ND: Tensor
    eps: float

    def __call__(self, heads_BTND: Tensor) -> Tensor:
        return F.rms_norm(heads_BTND, (heads_BTND.shape[-1],), None, self.eps) * self.weight_ND


def linear(x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias, whatever the weight's format."""
    return F.linear(x, weight, bias) if isinstance(weight, Tensor) else weight.linear(x, bias)


@dataclass(frozen=True, kw_only=True)
class ColumnParallelLinear:
    """Rows of the weight (output features) are divided: each shard computes its own outputs, without a collective."""

    weight: Tensor | QuantizedWeight
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True, kw_only=True)
class RowParallelLinear:
    """Columns of the weight (input features) are divided: the shards' outputs are summed. Only shard 0 has the bias."""

    weight: Tensor | QuantizedWeight
    tp: TensorParallel
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.tp.all_reduce(linear(x, self.weight, self.bias))


@dataclass(frozen=True, kw_only=True)
class VocabParallelEmbedding:
    """Rows of the table are divided among the shards; the shards' lookups are summed."""

    weight_VH: Tensor
    tp: TensorParallel

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(tokens_BT, self.weight_VH)
        size = self.weight_VH.shape[0]
        local = tokens_BT - self.tp.rank * size
        inside = (local >= 0) & (local < size)
        hidden_BTH = F.embedding(local.clamp(0, size - 1), self.weight_VH) * inside[..., None]
        return self.tp.all_reduce(hidden_BTH)


@dataclass(frozen=True, kw_only=True)
class MLP:
    """SwiGLU: down(silu(gate(x)) · up(x)), with gate and up fused into one product."""

    gate_up: ColumnParallelLinear
    down: RowParallelLinear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate_up(x)))


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, of the two side by side in the last dimension."""
    if kernels.can_fuse(gate_up):
        from magicdec.runtime.kernels import triton_fused

        return triton_fused.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class RotaryEmbedding:
    """Rotates the query's and key's pairs of dimensions by angles that grow with the position.

    Heads are stored with the two halves of each pair side by side (weights.py interleaves the rows of q and k), so that
    a rotation is one complex product: (x[2i] + j·x[2i+1]) · exp(j · position · frequency[i]).
    """

    def __init__(self, rope: Rope, device: torch.device, dtype: torch.dtype) -> None:
        exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32, device=device) / rope.dim
        frequencies = 1.0 / rope.theta**exponents
        self._frequencies = scaled_frequencies(frequencies, rope.scaling)
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._table = torch.empty(0, device=device)

    def reserve(self, num_positions: int) -> None:
        """Makes the table cover positions 0..num_positions-1."""
        if len(self._table) < num_positions:
            positions = torch.arange(num_positions, dtype=torch.float32, device=self._frequencies.device)
            angles = torch.outer(positions, self._frequencies).to(self._dtype)
            self._table = torch.polar(torch.ones_like(angles), angles)

    def __getitem__(self, positions_BT: Tensor) -> Tensor:
        """The rotations of these positions, complex [B, T, 1, D/2], to be shared by all layers."""
        return self._table[positions_BT].unsqueeze(2)


def rotate_(heads_BTND: Tensor, rotation: Tensor, norm: HeadNorm | None = None) -> Tensor:
    """Normalises every head, where there is a norm, and applies `rotation` (from RotaryEmbedding) to it, in place."""
    if kernels.can_fuse(heads_BTND):
        from magicdec.runtime.kernels import triton_fused

        rotation_BTPJ = torch.view_as_real(rotation.squeeze(2)).expand(*heads_BTND.shape[:2], -1, -1)
        weight_ND, eps = (None, 0.0) if norm is None else (norm.weight_ND, norm.eps)
        triton_fused.rotate_(heads_BTND, rotation_BTPJ, weight_ND, eps)
        return heads_BTND
    if norm is not None:
        heads_BTND.copy_(norm(heads_BTND))
    pairs = heads_BTND.unflatten(-1, (-1, 2))
    if pairs.dtype in (torch.float32, torch.float64):
        torch.view_as_complex(pairs).mul_(rotation)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(rotation)))
    return heads_BTND


def scaled_frequencies(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    """Rotary frequencies stretched to a longer context.

    linear: all divided by `factor`. llama3: wavelengths beyond original/low_freq_factor are divided by `factor`, those
    under original/high_freq_factor are kept, and those between are interpolated.
    Source: transformers modeling_rope_utils.py, `_compute_llama3_parameters`.
    """
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    original = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    span = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = ((original / wavelengths - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * ((1 - smooth) / scaling.factor + smooth)
