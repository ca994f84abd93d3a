"""The layers of the transformer but its mixers, holding this shard's weights.

What lies between two matrix products is one kernel on a GPU, where each launch counts
(kernels/triton_fused.py), and plain torch elsewhere.

Shape suffixes: B sequences, T query tokens, H hidden, V vocabulary of this shard, N query and key
heads of this shard, D head_dim, M tokens, E experts, C chosen experts per token, R = M·C choices,
G groups of experts; F outputs and K inputs of an expert's product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.runtime import kernels
from magicdec.runtime.distributed import TensorParallel
from magicdec.specs.layers import Activation, MixtureOfExperts


@dataclass(frozen=True, kw_only=True)
class HiddenNorm:
    """x / sqrt(mean(x²) + eps) · weight; with `is_centered`, (x - mean) / sqrt(variance + eps) ·
    weight + bias. The weight may be in a wider format than x."""

    weight: Tensor
    eps: float
    is_centered: bool = False
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        shape = (x.shape[-1],)
        wide = x.to(self.weight.dtype)
        if not self.is_centered:
            return F.rms_norm(wide, shape, self.weight, self.eps).to(x.dtype)
        bias = None
        if self.bias is not None:
            bias = self.bias.to(self.weight.dtype)
        return F.layer_norm(wide, shape, self.weight, bias, self.eps).to(x.dtype)


def add_and_norm_(norm: HiddenNorm | None, x: Tensor, delta: Tensor | None) -> Tensor:
    """x += delta, if there is one. Returns the next sublayer's input: the norm of the sum, or
    without a norm the sum itself.
    """
    is_rms_norm = norm is not None and not norm.is_centered
    if norm is not None and is_rms_norm and delta is not None and kernels.can_fuse(x):
        from magicdec.runtime.kernels import triton_fused

        return triton_fused.add_rms_norm_(x, delta, norm.weight, norm.eps)
    if delta is not None:
        x = x.add_(delta)
    if norm is None:
        return x
    return norm(x)


@dataclass(frozen=True, kw_only=True)
class HeadNorm:
    """RMSNorm of each query and key head over head_dim (Qwen3)."""

    weight_ND: Tensor
    eps: float

    def __call__(self, heads_BTND: Tensor) -> Tensor:
        wide = heads_BTND.to(self.weight_ND.dtype)
        normed = F.rms_norm(wide, (wide.shape[-1],), None, self.eps)
        return (normed * self.weight_ND).to(heads_BTND.dtype)


@dataclass(frozen=True, kw_only=True)
class AllHeadsNorm:
    """RMSNorm of all query heads together, and of all key heads (OLMo-2): the mean square is taken
    over the shards'.
    """

    weight_ND: Tensor
    eps: float
    num_heads: int
    """The first heads are queries'."""
    tp: TensorParallel

    def __call__(self, heads_BTND: Tensor) -> Tensor:
        squares_BTN = heads_BTND.float().square().mean(-1)
        queries = squares_BTN[..., : self.num_heads]
        keys = squares_BTN[..., self.num_heads :]
        own_means = torch.stack((queries.mean(-1), keys.mean(-1)), dim=-1)
        means = self.tp.all_reduce(own_means) / self.tp.size
        scales = torch.rsqrt(means + self.eps).to(heads_BTND.dtype)
        of_queries = scales[..., :1].expand_as(queries)
        of_keys = scales[..., 1:].expand_as(keys)
        scales_BTN = torch.cat((of_queries, of_keys), dim=-1)
        return heads_BTND * scales_BTN[..., None] * self.weight_ND


@dataclass(frozen=True, kw_only=True)
class ColumnParallelLinear:
    """Rows of the weight (output features) are divided: each shard computes its own outputs,
    without a collective.
    """

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x · weightᵀ + bias."""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, kw_only=True)
class RowParallelLinear(ColumnParallelLinear):
    """Columns of the weight (input features) are divided: the shards' outputs are summed. Only
    shard 0 has the bias.
    """

    tp: TensorParallel

    def __call__(self, x: Tensor) -> Tensor:
        return self.tp.all_reduce(super().__call__(x))


@dataclass(frozen=True, kw_only=True)
class VocabParallelEmbedding:
    """Rows of the table are divided among the shards; the shards' lookups are summed."""

    weight_VH: Tensor
    tp: TensorParallel

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(tokens_BT, self.weight_VH)
        rows_BT, is_here_BT = self.tp.own_rows(tokens_BT, len(self.weight_VH))
        own_BTH = F.embedding(rows_BT, self.weight_VH) * is_here_BT[..., None]
        return self.tp.all_reduce(own_BTH)


@dataclass(frozen=True, kw_only=True)
class XIELU:
    """positive·x² + beta·x above 0, negative·(exp(min(x, eps)) - 1 - x) + beta·x below (arXiv
    2411.13010).
    """

    positive_1: Tensor
    negative_1: Tensor
    beta: float = 0.5
    eps: float = -1e-6

    def __call__(self, x: Tensor) -> Tensor:
        below = (torch.expm1(x.clamp(max=self.eps)) - x) * self.negative_1
        curved = torch.where(x > 0, self.positive_1 * x * x, below)
        return (curved + self.beta * x).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class ShardedMLP:
    """down(activation(gate(x)) · up(x)), with gate and up fused into one product; or
    down(activation(up(x))).
    """

    gate_up: ColumnParallelLinear
    """The products of gate and up, or of up alone where the layer is not gated."""
    down: RowParallelLinear
    activation: Activation = "silu"
    gated: bool = True
    learned: XIELU | None = None
    """The activation where the layer has learned it, in place of the named one."""

    def __call__(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up(x)
        if self.learned is not None:
            return self.down(self.learned(gate_up))
        return self.down(activated(gate_up, self.activation, gated=self.gated))


def activated(gate_up: Tensor, activation: Activation, *, gated: bool) -> Tensor:
    """activation(gate) · up of the two side by side, or activation(up) alone."""
    activations = GATED if gated else UNGATED
    return activations[activation](gate_up)


def _gated(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    """activation(gate) · up, of the two side by side in the last dimension."""
    if activation is F.silu and kernels.can_fuse(gate_up):
        from magicdec.runtime.kernels import triton_fused

        return triton_fused.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate).mul_(up)


def _clamped_swiglu(gate_up: Tensor) -> Tensor:
    """gpt-oss's: gate at most 7, up within ±7; (up + 1) · gate · sigmoid(1.702 · gate)."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=7.0)
    up = up.clamp(-7.0, 7.0)
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
    "swigluoai": _clamped_swiglu,
}


@dataclass(frozen=True, kw_only=True)
class Router:
    """Chooses experts and their weights. All its tensors are in fp32."""

    kind: MixtureOfExperts
    weight_EH: Tensor
    bias_E: Tensor | None = None
    correction_E: Tensor | None = None
    """Takes part in choosing, not in weighting."""

    def __call__(self, x_MH: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen experts' weights and numbers, both [M, C]."""
        kind = self.kind
        num_chosen = kind.num_experts_per_tok
        logits_ME = F.linear(x_MH.float(), self.weight_EH, self.bias_E)
        if kind.scoring == "sparse_mixer":
            return self._one_by_one(logits_ME)
        has_groups = kind.num_chosen_groups < kind.num_groups
        is_by_score = self.correction_E is None and not has_groups
        # shares of a softmax over all, divided by their sum, are one over the chosen
        is_normalized = kind.scoring == "softmax" and kind.normalized and is_by_score
        if kind.scoring == "softmax_of_chosen" or is_normalized:
            chosen_MC, experts_MC = logits_ME.topk(num_chosen, dim=-1)
            return self._scaled(chosen_MC.softmax(-1)), experts_MC
        if kind.scoring == "sigmoid_of_input":
            chosen_MC, experts_MC = logits_ME.topk(num_chosen, dim=-1)
            return chosen_MC.sigmoid(), experts_MC
        if kind.scoring == "softmax":
            scores_ME = logits_ME.softmax(-1)
        else:
            scores_ME = logits_ME.sigmoid()
        choice_ME = scores_ME
        if self.correction_E is not None:
            choice_ME = scores_ME + self.correction_E
        choice_ME = self._among_best_groups(choice_ME)
        experts_MC = choice_ME.topk(num_chosen, dim=-1).indices
        weights_MC = scores_ME.gather(1, experts_MC)
        if kind.normalized:
            weights_MC = weights_MC / (weights_MC.sum(-1, keepdim=True) + 1e-20)
        return self._scaled(weights_MC), experts_MC

    def _scaled(self, weights_MC: Tensor) -> Tensor:
        if self.kind.scaling_factor == 1.0:
            return weights_MC
        return weights_MC * self.kind.scaling_factor

    def _one_by_one(self, logits_ME: Tensor) -> tuple[Tensor, Tensor]:
        """The best expert, weighted by a softmax over experts near it; then the best of the others,
        and so on."""
        nothing = float("-inf")
        left_ME = logits_ME
        weights = []
        experts = []
        for _ in range(self.kind.num_experts_per_tok):
            best_M1, expert_M1 = left_ME.max(-1, keepdim=True)
            sizes_ME = logits_ME.abs().maximum(best_M1)
            distances_ME = (best_M1 - logits_ME) / sizes_ME
            is_far_ME = distances_ME > 2 * self.kind.nearness
            shares_ME = left_ME.masked_fill(is_far_ME, nothing).softmax(-1)
            weights.append(shares_ME.gather(1, expert_M1))
            experts.append(expert_M1)
            left_ME = left_ME.scatter(1, expert_M1, nothing)
        return torch.cat(weights, dim=1), torch.cat(experts, dim=1)

    def _among_best_groups(self, choice_ME: Tensor) -> Tensor:
        """The scores; experts outside the best groups get -inf."""
        kind = self.kind
        if kind.num_chosen_groups == kind.num_groups:
            return choice_ME
        by_group = choice_ME.unflatten(1, (kind.num_groups, -1))
        if kind.group_score == "max":
            best = by_group.amax(-1)
        else:
            best = by_group.topk(2, dim=-1).values.sum(-1)
        groups_MC = best.topk(kind.num_chosen_groups, dim=-1).indices
        is_chosen_MG = torch.zeros_like(best, dtype=torch.bool)
        is_chosen_MG.scatter_(1, groups_MC, True)
        is_outside = ~is_chosen_MG[..., None]
        return by_group.masked_fill(is_outside, float("-inf")).flatten(1)


class Choices(NamedTuple):
    """The tokens' choices, C for each token in turn, by expert."""

    order_R: Tensor
    """Numbers of the choices, sorted by expert."""
    starts: Tensor
    """Where each expert's choices begin in `order_R`, and at last their number, [E + 1]."""
    num_tokens: int
    """The most choices that an expert can have."""


@dataclass(frozen=True, kw_only=True)
class GroupedLinear:
    """A product of each choice with its expert's weight. One kernel on a GPU, for which the host
    need not know who chose what; elsewhere an expert after the other."""

    weight_EFK: Tensor
    bias_EF: Tensor | None = None

    def __call__(self, x: Tensor, choices: Choices) -> Tensor:
        """The choices' outputs, [R, F], from their inputs [R, K] or their tokens' [M, K]."""
        order_R, starts, num_tokens = choices
        if kernels.can_fuse(x):
            from magicdec.runtime.kernels import triton_experts

            return triton_experts.grouped_product(
                x,
                self.weight_EFK,
                self.bias_EF,
                order_R,
                starts,
                most_rows=num_tokens,
            )
        inputs_RK = x[order_R // (len(order_R) // len(x))]
        outputs = []
        bias_F = None
        for expert, (first, stop) in enumerate(pairwise(starts.tolist())):
            if first == stop:
                continue
            if self.bias_EF is not None:
                bias_F = self.bias_EF[expert]
            weight_FK = self.weight_EFK[expert]
            outputs.append(F.linear(inputs_RK[first:stop], weight_FK, bias_F))
        sorted_RF = torch.cat(outputs)
        return torch.empty_like(sorted_RF).index_copy_(0, order_R, sorted_RF)


@dataclass(frozen=True, kw_only=True)
class ShardedExperts:
    """The chosen experts' outputs by their weights, and the shared experts'. Each shard holds a
    part of every expert's width, so that one sum over the shards completes routed and shared ones
    alike."""

    router: Router
    gate_up: GroupedLinear
    """As in a ShardedMLP."""
    down: GroupedLinear
    bounds: Tensor
    """0 to the number of experts."""
    tp: TensorParallel
    shared: ShardedMLP | None = None
    shared_gate_1H: Tensor | None = None
    """The shared experts' output is multiplied with sigmoid of this projection."""

    def __call__(self, x_BTH: Tensor) -> Tensor:
        x_MH = x_BTH.flatten(0, -2)
        kind = self.router.kind
        weights_MC, experts_MC = self.router(x_MH)
        weights_MC = weights_MC.to(x_MH.dtype)
        experts_R, order_R = experts_MC.flatten().sort()
        starts = torch.searchsorted(experts_R, self.bounds)
        choices = Choices(order_R, starts, len(x_MH))
        inputs = x_MH
        if kind.scoring == "sigmoid_of_input":
            inputs = (weights_MC[..., None] * x_MH[:, None]).flatten(0, 1)
            weights_MC = torch.ones_like(weights_MC)
        inner_RF = activated(
            self.gate_up(inputs, choices), kind.activation, gated=kind.gated
        )
        outputs_MCH = self.down(inner_RF, choices).view(*weights_MC.shape, -1)
        output_MH = torch.bmm(weights_MC[:, None], outputs_MCH).squeeze(1)
        if self.shared is not None:
            shared_MH = self.shared(x_MH)
            if self.shared_gate_1H is not None:
                shared_MH = shared_MH * F.linear(x_MH, self.shared_gate_1H).sigmoid()
            output_MH += shared_MH
        return self.tp.all_reduce(output_MH).view(x_BTH.shape)
