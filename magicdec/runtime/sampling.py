"""Choosing tokens from logits that are divided over the vocabulary among the shards: the next one,
and which drafted ones stay before it, so that the output is distributed as the target's own.

    u < p(x) / q(x)                          accept the drafted token x with this probability
    x' ~ max(0, p - q) / sum(max(0, p - q))  replace the first rejected one from the residual
    distribution
    x' ~ p                                   when all were accepted: one more token for free

p is the target's distribution, q the draft's; greedy decoding is the case where both have one
token.
Source: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.

Random numbers are one table per sequence and step from a counter-based generator keyed by (seed,
sequence), so a run repeats, and a sequence's numbers do not depend on which others share its batch.
Every step draws fresh numbers: a number that chose a rejected draft is never used again, which
keeps rejection sampling exact whatever the draft learns from the verification of the tokens it
lost.

Shape suffixes: B sequences, T positions (= gamma drafted tokens), V vocabulary of this shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.runtime import kernels
from magicdec.runtime.distributed import TensorParallel
from magicdec.specs.speculation import SamplingSpec

DRAFT: Final = 0
ACCEPT: Final = 1
TARGET: Final = 2
_STEPS_PER_REFILL = 64
MIN_TEMPERATURE = 1e-30
"""Lower ones are taken for this: logits over it are still finite in fp32, and any difference of
theirs decides.
"""


class UniformStream:
    """Uniform numbers in [0, 1): for each step, `width` positions × (draft, accept, target) of each
    sequence. They keep their place, from which captured steps read them.
    """

    def __init__(
        self,
        *,
        seed: int,
        num_sequences: int,
        batch_size: int,
        width: int,
        device: torch.device,
    ) -> None:
        self.drawn = torch.zeros(batch_size, width, 3, device=device)
        """The step's numbers by slot."""
        self._generators: list[np.random.Generator] = []
        for sequence in range(num_sequences):
            philox = np.random.Philox(key=[seed % 2**64, sequence])
            self._generators.append(np.random.Generator(philox))
        self._step = _STEPS_PER_REFILL
        self._block = torch.empty(0)

    def draw(self, sequences: np.ndarray) -> None:
        """Draws the next step's numbers of the sequences in these slots."""
        if self._step == _STEPS_PER_REFILL:
            self._refill()
        step = self._block[self._step]
        self._step += 1
        is_in_order = (sequences[:-1] < sequences[1:]).all()
        if not is_in_order or len(sequences) < len(step):
            step = step[torch.from_numpy(sequences).to(self.drawn.device)]
        self.drawn[: len(sequences)] = step

    def _refill(self) -> None:
        """Draws the numbers of the next steps, each sequence's from its own generator."""
        shape = (_STEPS_PER_REFILL, *self.drawn.shape[1:])
        numbers = []
        for generator in self._generators:
            numbers.append(generator.random(shape, dtype=np.float32))
        block = torch.from_numpy(np.stack(numbers, axis=1))
        self._block = block.to(self.drawn.device)
        self._step = 0


def greedy(logits: Tensor, tp: TensorParallel) -> Tensor:
    """The index of the largest logit in the whole vocabulary (the lowest such index), [...]."""
    if tp.size == 1:
        return logits.argmax(dim=-1)
    values, tokens = logits.max(dim=-1)
    first_token = tp.rank * logits.shape[-1]
    all_values = tp.all_gather(values)
    all_tokens = tp.all_gather(tokens + first_token)
    best_rank = all_values.argmax(dim=0, keepdim=True)
    return all_tokens.gather(0, best_rank).squeeze(0)


def probabilities(logits: Tensor, sampling: SamplingSpec, tp: TensorParallel) -> Tensor:
    """This shard's part of the distribution to sample from: temperature, then top-k, then top-p, as
    in transformers.
    """
    assert not sampling.is_greedy
    temperature = max(sampling.temperature, MIN_TEMPERATURE)
    is_whole = sampling.top_k is None and sampling.top_p in (None, 1.0)
    if is_whole and tp.size == 1 and kernels.can_fuse(logits):
        from magicdec.runtime.kernels import triton_sampling

        return triton_sampling.softmax(logits, temperature)
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    if sampling.top_k is not None:
        scaled = _keep_top_k(scaled, sampling.top_k, tp)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        scaled = _keep_top_p(scaled, sampling.top_p, tp)
    if tp.size == 1:
        return torch.softmax(scaled, dim=-1)
    highest = tp.all_reduce(scaled.amax(dim=-1, keepdim=True), largest=True)
    weights = (scaled - highest).exp_()
    total = tp.all_reduce(weights.sum(dim=-1, keepdim=True))
    return weights.div_(total)


def _keep_top_k(logits: Tensor, k: int, tp: TensorParallel) -> Tensor:
    """Logits under the k-th largest become -inf; ties with it stay."""
    best = logits.topk(min(k, logits.shape[-1]), dim=-1).values
    if tp.size > 1:
        best = tp.all_gather_last(best)
        best = best.topk(min(k, best.shape[-1]), dim=-1).values
    is_below = logits < best[..., -1:]
    return logits.masked_fill(is_below, float("-inf"))


def _keep_top_p(logits: Tensor, top_p: float, tp: TensorParallel) -> Tensor:
    """Keeps the smallest set of most likely tokens whose probabilities reach top_p; ties are broken
    by the token's id. Needs the whole vocabulary in order, so the shards' logits are gathered."""
    whole = tp.all_gather_last(logits)
    ordered, order = whole.sort(dim=-1, descending=True, stable=True)
    cumulative = ordered.softmax(dim=-1).cumsum(dim=-1)
    is_behind = cumulative[..., :-1] >= top_p
    ordered[..., 1:].masked_fill_(is_behind, float("-inf"))
    kept = torch.empty_like(ordered).scatter_(-1, order, ordered)
    if tp.size == 1:
        return kept
    own = tp.slice_of(kept.shape[-1])
    return kept[..., own]


def sample(weights_BV: Tensor, uniform_B: Tensor, tp: TensorParallel) -> Tensor:
    """A token of each row by inverting the cumulative sum of its (not necessarily normalised)
    weights. A token of weight 0 is never chosen, as long as the row has one above 0."""
    if tp.size == 1 and kernels.can_fuse(weights_BV):
        from magicdec.runtime.kernels import triton_sampling

        return triton_sampling.sample(weights_BV, uniform_B)
    cumulative_BV = weights_BV.cumsum(dim=-1)
    own_total_B1 = cumulative_BV[:, -1:]
    if tp.size == 1:
        threshold_B1 = uniform_B[:, None] * own_total_B1
        return _invert(cumulative_BV, threshold_B1, own_total_B1)
    totals_RB = tp.all_gather(cumulative_BV[:, -1])
    ends_RB = totals_RB.cumsum(dim=0)
    total_B = ends_RB[-1]
    threshold_B = torch.minimum(uniform_B * total_B, _just_below(total_B))
    owner_B = (ends_RB <= threshold_B).sum(dim=0)
    start_B = (ends_RB - totals_RB)[tp.rank]
    own_threshold_B1 = (threshold_B - start_B)[:, None].clamp_min(0)
    token_B = _invert(cumulative_BV, own_threshold_B1, own_total_B1)
    first_token = tp.rank * weights_BV.shape[-1]
    chosen_B = torch.where(owner_B == tp.rank, token_B + first_token, 0)
    return tp.all_reduce(chosen_B)


def _invert(cumulative_BV: Tensor, threshold_B1: Tensor, total_B1: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds the threshold."""
    last = cumulative_BV.shape[-1] - 1
    threshold_B1 = torch.minimum(threshold_B1, _just_below(total_B1))
    place_B1 = torch.searchsorted(cumulative_BV, threshold_B1, right=True)
    return place_B1.squeeze(1).clamp_max(last)


def _just_below(x: Tensor) -> Tensor:
    """The largest number under x (x > 0), so that a threshold never reaches the total."""
    return torch.nextafter(x, torch.zeros((), dtype=x.dtype, device=x.device))


def token_probabilities(
    probabilities_BTV: Tensor, tokens_BT: Tensor, tp: TensorParallel
) -> Tensor:
    """The probability of one token at each position, [B, T]."""
    if tp.size == 1:
        return probabilities_BTV.gather(-1, tokens_BT[..., None]).squeeze(-1)
    rows_BT, is_here_BT = tp.own_rows(tokens_BT, probabilities_BTV.shape[-1])
    own_BT = probabilities_BTV.gather(-1, rows_BT[..., None]).squeeze(-1)
    return tp.all_reduce(own_BT * is_here_BT)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Drafted tokens; and, unless each was certain, their probabilities and the distributions they
    were drawn from. `distribution` gives this shard's part [B, V] of each sequence's draft
    distribution at a position [B]: what the residual needs, and no more. `num_drafted_B`, where not
    all are drafts: how many of the first ones are; the rest is never accepted."""

    tokens_BT: Tensor
    num_drafted_B: Tensor | None = None
    token_probabilities_BT: Tensor | None = None
    distribution: Callable[[Tensor], Tensor] | None = None

    def only_drafts(self, is_accepted_BT: Tensor) -> Tensor:
        """The verdict without what fills a shorter draft up."""
        if self.num_drafted_B is None:
            return is_accepted_BT
        gamma = is_accepted_BT.shape[1]
        steps_T = torch.arange(gamma, device=is_accepted_BT.device)
        is_drafted_BT = steps_T < self.num_drafted_B[:, None]
        return is_accepted_BT & is_drafted_BT


@dataclass(frozen=True, kw_only=True)
class VerifiedBlock:
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
) -> VerifiedBlock:
    """Judges a proposal by the target's logits after the pending token and each drafted one, [B,
    gamma + 1, V]. `simulated_rates_T`, where given, decides acceptance by position instead
    (everything is computed all the same)."""
    if sampling.is_greedy:
        best_BT = greedy(logits_BTV, tp)
        if proposal is None:
            first_B = best_BT[:, 0]
            return VerifiedBlock(
                num_accepted_B=torch.zeros_like(first_B), next_token_B=first_B
            )
        is_accepted_BT = proposal.only_drafts(proposal.tokens_BT == best_BT[:, :-1])
        num_accepted_B = _num_accepted(is_accepted_BT, uniforms, simulated_rates_T)
        next_token_B = best_BT.gather(1, num_accepted_B[:, None]).squeeze(1)
        return VerifiedBlock(num_accepted_B=num_accepted_B, next_token_B=next_token_B)
    assert uniforms is not None
    target_BTV = probabilities(logits_BTV, sampling, tp)
    rows = torch.arange(len(target_BTV), device=target_BTV.device)
    if proposal is None:
        next_token_B = sample(target_BTV[:, 0], uniforms[:, 0, TARGET], tp)
        return VerifiedBlock(
            num_accepted_B=torch.zeros_like(rows), next_token_B=next_token_B
        )
    tokens_BT = proposal.tokens_BT
    gamma = tokens_BT.shape[1]
    threshold_BT = uniforms[:, :gamma, ACCEPT]
    if proposal.token_probabilities_BT is not None:
        threshold_BT = threshold_BT * proposal.token_probabilities_BT
    wanted_BT = token_probabilities(target_BTV[:, :gamma], tokens_BT, tp)
    is_accepted_BT = proposal.only_drafts(threshold_BT < wanted_BT)
    num_accepted_B = _num_accepted(is_accepted_BT, uniforms, simulated_rates_T)
    target_BV = target_BTV[rows, num_accepted_B]
    is_rejected_B = num_accepted_B < gamma
    if proposal.num_drafted_B is not None:
        is_rejected_B = num_accepted_B < proposal.num_drafted_B
    position_B = num_accepted_B.clamp_max(gamma - 1)
    if proposal.distribution is None:
        vocab_size = target_BV.shape[-1]
        token_B = tokens_BT[rows, position_B]
        rows_B, is_here_B = tp.own_rows(token_B, vocab_size)
        is_lost_B1 = (is_here_B & is_rejected_B)[:, None]
        one_hot_BV = F.one_hot(rows_B, vocab_size).bool()
        residual_BV = target_BV.masked_fill(one_hot_BV & is_lost_B1, 0.0)
    else:
        lost_BV = proposal.distribution(position_B) * is_rejected_B[:, None]
        residual_BV = (target_BV - lost_BV).clamp_min_(0)
        # as large as the probabilities; the planned memory does not count it
        del lost_BV
    # Where p and q agree up to rounding, a rejection leaves nothing: any choice from p is then as
    # good. And where q is not a number, nothing was drawn from it, so its token is rejected, and p
    # is right.
    total_B1 = tp.all_reduce(residual_BV.sum(dim=-1, keepdim=True))
    is_empty_B1 = ~(total_B1 > 0)
    residual_BV = torch.where(is_empty_B1, target_BV, residual_BV)
    uniform_B = uniforms[rows, num_accepted_B, TARGET]
    next_token_B = sample(residual_BV, uniform_B, tp)
    return VerifiedBlock(num_accepted_B=num_accepted_B, next_token_B=next_token_B)


def _num_accepted(
    is_accepted_BT: Tensor, uniforms: Tensor | None, simulated_rates_T: Tensor | None
) -> Tensor:
    """Number of accepted tokens before the first rejection; simulated rates, if given, decide
    instead."""
    if simulated_rates_T is not None:
        assert uniforms is not None
        gamma = len(simulated_rates_T)
        is_accepted_BT = uniforms[:, :gamma, ACCEPT] < simulated_rates_T
    are_all_accepted_BT = is_accepted_BT.long().cumprod(dim=1)
    return are_all_accepted_BT.sum(dim=1)
