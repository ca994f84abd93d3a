"""Mixtures of experts: a router, the experts that it chooses for each token, and those that every token passes.

Each shard holds a part of every expert's width, so that one sum over the shards completes routed and shared ones alike.

Shape suffixes: M tokens, E experts, C chosen experts per token, H hidden, F groups of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.runtime.distributed import TensorParallel
from magicdec.runtime.layers import MLP
from magicdec.specs.layers import MixtureOfExperts


@dataclass(frozen=True, kw_only=True)
class Router:
    """Chooses experts and their weights, in fp32."""

    kind: MixtureOfExperts
    weight_EH: Tensor
    bias_E: Tensor | None = None
    correction_E: Tensor | None = None
    """Takes part in choosing, not in weighting."""

    def __call__(self, x_MH: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen experts' weights and numbers, both [M, C]."""
        kind, bias = self.kind, self.bias_E
        logits_ME = F.linear(x_MH.float(), self.weight_EH.float(), None if bias is None else bias.float())
        if kind.scoring == "sparse_mixer":
            return self._one_by_one(logits_ME)
        if kind.scoring in ("softmax_of_chosen", "sigmoid_of_input"):
            chosen_MC, experts_MC = logits_ME.topk(kind.num_experts_per_tok, dim=-1)
            return chosen_MC.softmax(-1) if kind.scoring == "softmax_of_chosen" else chosen_MC.sigmoid(), experts_MC
        scores_ME = logits_ME.softmax(-1) if kind.scoring == "softmax" else logits_ME.sigmoid()
        choice_ME = scores_ME if self.correction_E is None else scores_ME + self.correction_E
        experts_MC = self._among_best_groups(choice_ME).topk(kind.num_experts_per_tok, dim=-1).indices
        weights_MC = scores_ME.gather(1, experts_MC)
        if kind.normalized:
            weights_MC = weights_MC / (weights_MC.sum(-1, keepdim=True) + 1e-20)
        return weights_MC * kind.scaling_factor, experts_MC

    def _one_by_one(self, logits_ME: Tensor) -> tuple[Tensor, Tensor]:
        """The best expert, by a softmax among those that are near it; then the best of the others, and so on."""
        left_ME, weights, experts = logits_ME, [], []
        for _ in range(self.kind.num_experts_per_tok):
            best_M1, expert_M1 = left_ME.max(-1, keepdim=True)
            is_far_ME = (best_M1 - logits_ME) / logits_ME.abs().maximum(best_M1) > 2 * self.kind.nearness
            weights.append(left_ME.masked_fill(is_far_ME, float("-inf")).softmax(-1).gather(1, expert_M1))
            experts.append(expert_M1)
            left_ME = left_ME.scatter(1, expert_M1, float("-inf"))
        return torch.cat(weights, dim=1), torch.cat(experts, dim=1)

    def _among_best_groups(self, choice_ME: Tensor) -> Tensor:
        """The scores, with those of experts outside the best groups at -inf."""
        kind = self.kind
        if kind.num_chosen_groups == kind.num_groups:
            return choice_ME
        by_group = choice_ME.unflatten(1, (kind.num_groups, -1))
        best = by_group.amax(-1) if kind.group_score == "max" else by_group.topk(2, dim=-1).values.sum(-1)
        chosen_MF = torch.zeros_like(best, dtype=torch.bool)
        chosen_MF.scatter_(1, best.topk(kind.num_chosen_groups, dim=-1).indices, True)
        return by_group.masked_fill(~chosen_MF[..., None], float("-inf")).flatten(1)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The chosen experts' outputs by their weights, and the shared experts'.

    An expert computes for the tokens that chose it, which the host has to know: no CUDA graph captures it.
    """

    router: Router
    experts: Sequence[MLP]
    tp: TensorParallel
    shared: MLP | None = None
    shared_gate_1H: Tensor | None = None
    """The shared experts' output is multiplied with sigmoid of this projection."""

    def __call__(self, x_BTH: Tensor) -> Tensor:
        x_MH = x_BTH.flatten(0, -2)
        weights_MC, experts_MC = self.router(x_MH)
        if self.shared is None:
            output_MH = torch.zeros_like(x_MH)
        else:
            output_MH = self.shared(x_MH)
            if self.shared_gate_1H is not None:
                output_MH = output_MH * F.linear(x_MH, self.shared_gate_1H).sigmoid()
        for expert in experts_MC.unique().tolist():
            tokens, places = (experts_MC == expert).nonzero(as_tuple=True)
            weight_N1 = weights_MC[tokens, places, None].to(x_MH.dtype)
            if self.router.kind.scoring == "sigmoid_of_input":
                output_MH.index_add_(0, tokens, self.experts[expert](x_MH[tokens] * weight_N1))
            else:
                output_MH.index_add_(0, tokens, self.experts[expert](x_MH[tokens]) * weight_N1)
        return self.tp.all_reduce(output_MH).view(x_BTH.shape)
