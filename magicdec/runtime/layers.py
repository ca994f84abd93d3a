"""The layers of the transformer, holding this shard's weights.

What lies between two matrix products is one kernel on a GPU, where each launch counts (kernels/triton_fused.py), and
plain torch elsewhere.

Shape suffixes: B sequences, T query tokens, H hidden, V vocabulary of this shard, N query and key heads of this shard,
D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.runtime import kernels
from magicdec.runtime.distributed import TensorParallel
from magicdec.runtime.quantized import QuantizedWeight
from magicdec.specs.layers import Activation


class Norm(Protocol):
    """Normalises the last dimension."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def after_adding_(self, x: Tensor, delta: Tensor | None) -> Tensor:
        """x += delta, where there is one, and the norm of the sum."""


@dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """x / sqrt(mean(x²) + eps) · weight. The weight may be in a wider format than x."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.dtype == x.dtype:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return F.rms_norm(x.to(self.weight.dtype), (x.shape[-1],), self.weight, self.eps).to(x.dtype)

    def after_adding_(self, x: Tensor, delta: Tensor | None) -> Tensor:
        if delta is not None and kernels.can_fuse(x):
            from magicdec.runtime.kernels import triton_fused

            return triton_fused.add_rms_norm_(x, delta, self.weight, self.eps)
        return self(x if delta is None else x.add_(delta))


@dataclass(frozen=True, kw_only=True)
class LayerNorm:
    """(x - mean) / sqrt(variance + eps) · weight + bias."""

    weight: Tensor
    eps: float
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(self.weight.dtype)
        return F.layer_norm(x.to(self.weight.dtype), (x.shape[-1],), self.weight, bias, self.eps).to(x.dtype)

    def after_adding_(self, x: Tensor, delta: Tensor | None) -> Tensor:
        return self(x if delta is None else x.add_(delta))


def add_and_norm_(norm: Norm | None, x: Tensor, delta: Tensor | None) -> Tensor:
    """x += delta, where there is one, and what the next sublayer reads: the norm of the sum, or the sum itself."""
    if norm is not None:
        return norm.after_adding_(x, delta)
    return x if delta is None else x.add_(delta)


@dataclass(frozen=True, kw_only=True)
class HeadNorm:
    """RMSNorm of each query and key head over head_dim (Qwen3)."""

    weight_ND: Tensor
    eps: float

    def __call__(self, heads_BTND: Tensor) -> Tensor:
        normed = F.rms_norm(heads_BTND.to(self.weight_ND.dtype), (heads_BTND.shape[-1],), None, self.eps)
        return (normed * self.weight_ND).to(heads_BTND.dtype)


@dataclass(frozen=True, kw_only=True)
class HeadLayerNorm:
    """LayerNorm of each query and key head over head_dim, without a bias (Command-R+)."""

    weight_ND: Tensor
    eps: float

    def __call__(self, heads_BTND: Tensor) -> Tensor:
        return F.layer_norm(heads_BTND, (heads_BTND.shape[-1],), None, None, self.eps) * self.weight_ND


@dataclass(frozen=True, kw_only=True)
class PlainHeadNorm:
    """RMSNorm of each query and key head over head_dim, without weights (Llama 4)."""

    eps: float

    def __call__(self, heads_BTND: Tensor) -> Tensor:
        return F.rms_norm(heads_BTND, (heads_BTND.shape[-1],), None, self.eps)


@dataclass(frozen=True, kw_only=True)
class AllHeadsNorm:
    """RMSNorm of all query heads together, and of all key heads (OLMo-2): the mean square is taken over the shards'."""

    weight_ND: Tensor
    eps: float
    num_heads: int
    """The first heads are queries'."""
    tp: TensorParallel

    def __call__(self, heads_BTND: Tensor) -> Tensor:
        squares_BTN = heads_BTND.float().square().mean(-1)
        queries, keys = squares_BTN[..., : self.num_heads], squares_BTN[..., self.num_heads :]
        means = torch.stack((queries.mean(-1), keys.mean(-1)), dim=-1)
        scales = torch.rsqrt(self.tp.all_reduce(means) / self.tp.size + self.eps).to(heads_BTND.dtype)
        counts = torch.tensor([queries.shape[-1], keys.shape[-1]], device=heads_BTND.device)
        scales_BTN = scales.repeat_interleave(counts, dim=-1, output_size=heads_BTND.shape[2])
        return heads_BTND * scales_BTN[..., None] * self.weight_ND


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
        rows_BT, is_here_BT = self.tp.own_rows(tokens_BT, len(self.weight_VH))
        return self.tp.all_reduce(F.embedding(rows_BT, self.weight_VH) * is_here_BT[..., None])


@dataclass(frozen=True, kw_only=True)
class XIELU:
    """positive·x² + beta·x above 0, negative·(exp(min(x, eps)) - 1 - x) + beta·x below (arXiv 2411.13010)."""

    positive_1: Tensor
    negative_1: Tensor
    beta: float = 0.5
    eps: float = -1e-6

    def __call__(self, x: Tensor) -> Tensor:
        below = (torch.expm1(x.clamp(max=self.eps)) - x) * self.negative_1
        return (torch.where(x > 0, self.positive_1 * x * x, below) + self.beta * x).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class MLP:
    """down(activation(gate(x)) · up(x)), with gate and up fused into one product; or down(activation(up(x)))."""

    gate_up: ColumnParallelLinear
    """The products of gate and up, or of up alone where the layer is not gated."""
    down: RowParallelLinear
    activation: Activation = "silu"
    gated: bool = True
    learned: XIELU | None = None
    """The activation where the layer has learned it, in place of the named one."""

    def __call__(self, x: Tensor) -> Tensor:
        activate = self.learned or (GATED if self.gated else UNGATED)[self.activation]
        return self.down(activate(self.gate_up(x)))


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, of the two side by side in the last dimension."""
    if kernels.can_fuse(gate_up):
        from magicdec.runtime.kernels import triton_fused

        return triton_fused.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _gated(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate).mul_(up)


def _clamped_swiglu(gate_up: Tensor) -> Tensor:
    """gpt-oss's: gate at most 7, up within ±7; (up + 1) · gate · sigmoid(1.702 · gate)."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


UNGATED: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
GATED: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    **{name: partial(_gated, function) for name, function in UNGATED.items()},
    "silu": silu_mul,
    "swigluoai": _clamped_swiglu,
}
"""activation(gate) · up, of the two side by side in the last dimension."""
