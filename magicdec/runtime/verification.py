"""Which drafted tokens stay, and which token follows them, so that the output is distributed as the target's own.

Shape suffixes: B sequences, T = gamma drafted tokens, V vocabulary of this shard.

    u < p(x) / q(x)                          accept the drafted token x with this probability
    x' ~ max(0, p - q) / sum(max(0, p - q))  replace the first rejected one from the residual distribution
    x' ~ p                                   when all were accepted: one more token for free

p is the target's distribution, q the draft's; greedy decoding is the case where both have one token.
Source: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.runtime.distributed import TensorParallel
from magicdec.runtime.sampling import ACCEPT, TARGET, greedy, probabilities, sample, token_probabilities
from magicdec.specs.speculation import SamplingSpec


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Drafted tokens; and, unless each was certain, their probabilities and the distributions they were drawn from.

    `distribution` gives this shard's part [B, V] of each sequence's draft distribution at a position [B]: what the
    residual needs, and no more.
    """

    tokens_BT: Tensor
    token_probabilities_BT: Tensor | None = None
    distribution: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The first `num_accepted` drafted tokens stay; `next_token` follows them."""

    num_accepted_B: Tensor
    next_token_B: Tensor


def verify(
    logits_BTV: Tensor,
    proposal: Proposal | None,
    *,
    sampling: SamplingSpec,
    tp: TensorParallel,
    uniforms: Tensor | None,
    simulated_rates_T: Tensor | None = None,
) -> Outcome:
    """Judges a proposal by the target's logits after the pending token and each drafted one, [B, gamma + 1, V].

    `simulated_rates_T`, where given, decides acceptance by position instead (everything is computed all the same).
    """
    if sampling.is_greedy:
        return _verify_greedy(logits_BTV, proposal, tp, uniforms, simulated_rates_T)
    assert uniforms is not None
    return _verify_sampled(probabilities(logits_BTV, sampling, tp), proposal, tp, uniforms, simulated_rates_T)


def _verify_greedy(
    logits_BTV: Tensor,
    proposal: Proposal | None,
    tp: TensorParallel,
    uniforms: Tensor | None,
    simulated_rates_T: Tensor | None,
) -> Outcome:
    best_BT = greedy(logits_BTV, tp)
    if proposal is None:
        return Outcome(num_accepted_B=torch.zeros_like(best_BT[:, 0]), next_token_B=best_BT[:, 0])
    is_accepted_BT = proposal.tokens_BT == best_BT[:, :-1]
    if simulated_rates_T is not None:
        is_accepted_BT = _simulate(uniforms, simulated_rates_T)
    num_accepted_B = count_leading(is_accepted_BT)
    return Outcome(num_accepted_B=num_accepted_B, next_token_B=best_BT.gather(1, num_accepted_B[:, None]).squeeze(1))


def _verify_sampled(
    target_BTV: Tensor,
    proposal: Proposal | None,
    tp: TensorParallel,
    uniforms: Tensor,
    simulated_rates_T: Tensor | None,
) -> Outcome:
    rows = torch.arange(len(target_BTV), device=target_BTV.device)
    if proposal is None:
        num_accepted_B = torch.zeros_like(rows)
        return Outcome(num_accepted_B=num_accepted_B, next_token_B=sample(target_BTV[:, 0], uniforms[:, 0, TARGET], tp))
    tokens_BT = proposal.tokens_BT
    gamma = tokens_BT.shape[1]
    p_BT = token_probabilities(target_BTV[:, :gamma], tokens_BT, tp)
    threshold_BT = uniforms[:, :gamma, ACCEPT]
    if proposal.token_probabilities_BT is not None:
        threshold_BT = threshold_BT * proposal.token_probabilities_BT
    is_accepted_BT = threshold_BT < p_BT
    if simulated_rates_T is not None:
        is_accepted_BT = _simulate(uniforms, simulated_rates_T)
    num_accepted_B = count_leading(is_accepted_BT)
    target_BV = target_BTV[rows, num_accepted_B]
    is_rejected_B = num_accepted_B < gamma
    position_B = num_accepted_B.clamp_max(gamma - 1)
    if proposal.distribution is None:
        rejected_B = tokens_BT[rows, position_B]
        residual_BV = _without(target_BV, rejected_B, is_rejected_B, tp)
    else:
        residual_BV = (target_BV - proposal.distribution(position_B) * is_rejected_B[:, None]).clamp_min_(0)
    # Where p and q agree up to rounding, a rejection leaves nothing: any choice from p is then as good. And where q is
    # not a number, nothing was drawn from it, so that its token is rejected, and p is right.
    is_empty_B1 = ~(tp.all_reduce(residual_BV.sum(dim=-1, keepdim=True)) > 0)
    residual_BV = torch.where(is_empty_B1, target_BV, residual_BV)
    uniform_B = uniforms[rows, num_accepted_B, TARGET]
    return Outcome(num_accepted_B=num_accepted_B, next_token_B=sample(residual_BV, uniform_B, tp))


def _without(weights_BV: Tensor, tokens_B: Tensor, is_removed_B: Tensor, tp: TensorParallel) -> Tensor:
    """The weights with one token's set to 0 in the rows where it is to be removed."""
    rows_B, is_here_B = tp.own_rows(tokens_B, weights_BV.shape[-1])
    one_hot_BV = F.one_hot(rows_B, weights_BV.shape[-1]).bool() & (is_here_B & is_removed_B)[:, None]
    return weights_BV.masked_fill(one_hot_BV, 0.0)


def _simulate(uniforms: Tensor | None, rates_T: Tensor) -> Tensor:
    assert uniforms is not None
    return uniforms[:, : len(rates_T), ACCEPT] < rates_T


def count_leading(is_accepted_BT: Tensor) -> Tensor:
    """How many of the first positions are all true."""
    return is_accepted_BT.long().cumprod(dim=1).sum(dim=1)
