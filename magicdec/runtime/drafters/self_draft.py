"""Self-drafting over a compact cache: the target's own weights, reading `budget` of its keys and
values.

    slots 0 .. budget-1            tokens of the target's cache, chosen by the method
    slots budget .. budget+gamma   the block's own tokens

In methods with a ring, slots 0..num_fixed-1 stay as they are (attention sinks, or what was
selected), and a token at position p goes to slot num_fixed + (p - origin) mod ring size. After each
verification the accepted tokens' exact keys and values, just computed by the target, are copied
there: no second prefill, no re-gathering, and nothing special when a whole block was accepted.

Keys are rotated at their absolute positions, so their order in the cache does not matter. A
sequence shorter than the budget holds all its tokens, each in the slot of its position.

Layers that see a window or a chunk only are not thinned out: the draft reads them in the target's
cache, where it keeps its block's tokens too, until the verification overwrites them with the same
or better.

Where several ranks hold copies of a KV head, each chooses for the query heads it has.

Shape suffixes: L layers, B sequences, T tokens of a block, P parts (keys and values, or one
latent), K KV heads, S slots or positions, A query heads, D head_dim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.runtime.attention import Scoring, Workspace, decode_attention
from magicdec.runtime.drafters.base import Drafter, ModelProposalBuilder
from magicdec.runtime.engine import DecodePass, Engine
from magicdec.runtime.kernels import Visible
from magicdec.runtime.kv_cache import KVCache
from magicdec.runtime.sampling import Proposal, VerifiedBlock
from magicdec.runtime.transformer import Transformer
from magicdec.specs.speculation import SpeculationSpec, check_gamma

PROBE_TOKENS = 4
"""Observed tokens per pass: about a verification's, so scores need no more memory than it does."""


class SlotsPass:
    """One or two drafted tokens per sequence, each stored in a slot of its own, over the slots of a
    draft's cache that they see; in layers that the cache lacks, over the target's own."""

    def __init__(
        self,
        cache: KVCache,
        *,
        positions_BT: Tensor,
        slots_BT: Tensor,
        visible: Visible,
        workspace: Workspace,
        target: DecodePass | None = None,
    ) -> None:
        self._cache = cache
        self._slots_BT = slots_BT
        self._target = target
        self._visible = visible
        self._workspace = workspace
        self.positions_BT = positions_BT

    def attend(
        self, layer: int, query_BTAD: Tensor, kv_BTPKD: Tensor, scoring: Scoring
    ) -> Tensor:
        if self._target is not None and layer not in self._cache.kept:
            return self._target.attend(layer, query_BTAD, kv_BTPKD, scoring)
        self._cache.write(layer, self._slots_BT, kv_BTPKD)
        keys, values = self._cache.read(layer, slice(len(query_BTAD)))
        output, _ = decode_attention(
            query_BTAD,
            keys,
            values,
            self._visible,
            scoring=scoring,
            workspace=self._workspace,
        )
        return output


class CompactDrafter(Drafter):
    """Drafts over the compact cache. A method says how `admit` fills it and how `accept` keeps it
    up.
    """

    def __init__(
        self, engine: Engine, spec: SpeculationSpec, model: Transformer
    ) -> None:
        """`model` drafts: the target, or a copy with its weights in a narrower format."""
        super().__init__(engine)
        assert spec.draft_budget is not None
        self.model = model
        self.budget = spec.draft_budget
        model.reserve(engine.cache.num_slots, longest=engine.max_len)
        self.cache = engine.cache.sparse(num_slots=self.budget + engine.max_gamma + 1)
        self.slots_S = torch.arange(self.cache.num_slots, device=engine.model.device)

    @abstractmethod
    def admit(self) -> None:
        """Fills the active sequences' compact cache from the target's."""

    def graph_key(self, gamma: int) -> Hashable:
        return self._is_unfilled

    @property
    def _is_unfilled(self) -> bool:
        """Whether a sequence is shorter than the budget."""
        return bool(self.engine.host_lengths.min() < self.budget)

    def propose(self, gamma: int, uniforms: Tensor | None) -> Proposal:
        engine = self.engine
        builder = ModelProposalBuilder(self.model, self.sampling, uniforms)
        token_B1 = engine.pending_B[:, None]
        empty = None
        if self._is_unfilled:
            empty = (engine.lengths_B, self.budget)
        for step in range(gamma):
            target = engine.decode_pass(1, ahead=step)
            stop = self.budget + step + 1
            num_open = stop
            if empty is not None:
                num_open = 0
            last_BT = torch.full_like(target.positions_BT, stop - 1)
            attention = SlotsPass(
                self.cache,
                positions_BT=target.positions_BT,
                slots_BT=self.slots_S[stop - 1].expand_as(last_BT),
                visible=Visible(
                    last_BT=last_BT, stop=stop, num_open=num_open, empty=empty
                ),
                workspace=engine.workspace,
                target=target,
            )
            token_B1 = builder.step(token_B1, attention)
        return builder.build()

    def swap(self, first: int, second: int) -> None:
        self.cache.swap(first, second)


class RingDrafter(CompactDrafter):
    """The part that methods with a ring share; they differ in what `admit` puts into the cache at
    the start.
    """

    def __init__(
        self, engine: Engine, spec: SpeculationSpec, model: Transformer
    ) -> None:
        super().__init__(engine, spec, model)
        assert spec.num_recent_slots is not None
        self.num_fixed = self.budget - spec.num_recent_slots
        self.ring_size = spec.num_recent_slots
        self.origin_B = torch.full(
            (engine.batch_size,), self.num_fixed, device=engine.model.device
        )

    def propose(self, gamma: int, uniforms: Tensor | None) -> Proposal:
        check_gamma(gamma, budget=self.budget, num_recent=self.ring_size)
        return super().propose(gamma, uniforms)

    def accept(self, outcome: VerifiedBlock, gamma: int) -> None:
        steps_T = self.slots_S[: gamma + 1]
        positions_BT = self.engine.lengths_B[:, None] + steps_T
        # A rejected token's values go to a slot of the block, which the next block overwrites.
        is_kept_BT = steps_T <= outcome.num_accepted_B[:, None]
        ring_BT = self.slots_of(positions_BT)
        block_T = self.budget + steps_T
        slots_BT = torch.where(is_kept_BT, ring_BT, block_T)
        self.cache.copy_tokens(slots_BT, self.engine.cache, positions_BT)

    def slots_of(self, positions_BT: Tensor) -> Tensor:
        """The slots of tokens at these positions. Tokens of the fixed part stay at their own
        position."""
        origin_B1 = self.origin_B[: len(positions_BT), None]
        return ring_slots(positions_BT, self.num_fixed, self.ring_size, origin_B1)

    def swap(self, first: int, second: int) -> None:
        super().swap(first, second)
        self.origin_B[[first, second]] = self.origin_B[[second, first]]


def ring_slots(
    positions: Tensor, num_fixed: int, ring_size: int, origin: Tensor | int
) -> Tensor:
    """Positions under `num_fixed` at themselves, the others in the ring behind them, beginning with
    `origin`.
    """
    in_ring = (positions - origin) % ring_size
    return torch.where(positions < num_fixed, positions, num_fixed + in_ring)


class StreamingLLMDrafter(RingDrafter):
    """StreamingLLM (arXiv 2309.17453): self-drafting over the first `num_sink_tokens` tokens
    (attention sinks) and a window of the last `draft_budget - num_sink_tokens`."""

    def admit(self) -> None:
        last_B1 = self.engine.lengths_B[:, None] - 1
        slots_S = self.slots_S[: self.budget]
        # The last position of each sequence that belongs in a slot of the ring.
        behind_BS = (last_B1 - slots_S) % self.ring_size
        ring_BS = last_B1 - behind_BS
        positions_BS = torch.where(slots_S < self.num_fixed, slots_S, ring_BS)
        positions_BS = positions_BS.clamp_min(0)
        slots_BS = slots_S.expand_as(positions_BS)
        self.cache.copy_tokens(slots_BS, self.engine.cache, positions_BS)
        self.origin_B.fill_(self.num_fixed)


class SnapKVDrafter(RingDrafter):
    """SnapKV (arXiv 2404.14469): the tokens that the prompt's last ones attended to, and a window
    of recent tokens.

    Selected once, from the attention of the last `observation_window` cached tokens: probabilities
    (scaled, causally masked) summed over those tokens and over the query heads of a KV head, pooled
    along the context, highest first.

        slots 0 .. budget/2 - 1       the best of what was selected
        slots budget/2 .. budget-1    a ring: the rest of what was selected, worst first, then the
                                      observation window

    So the cache is always full. Generated tokens first replace the worst of what was selected; once
    they fill the ring, it holds a sliding window of the most recent ones.
    """

    def __init__(
        self, engine: Engine, spec: SpeculationSpec, model: Transformer
    ) -> None:
        super().__init__(engine, spec, model)
        self._window = min(spec.observation_window, self.ring_size)
        self._kernel = spec.pooling_kernel

    def admit(self) -> None:
        lengths_B = self.engine.lengths_B
        is_long_B = lengths_B > self.budget
        scores = None
        if (self.engine.host_lengths > self.budget).any():
            scores = self._observe()
        own_S = self.slots_S[: self.budget]
        for layer, kept in self.cache.kept.items():
            positions_BKS = own_S.expand(len(lengths_B), kept.num_heads, -1)
            if scores is not None:
                selected_BKS = self._select(scores[layer])
                is_long_B11 = is_long_B[:, None, None]
                positions_BKS = torch.where(is_long_B11, selected_BKS, positions_BKS)
            self.cache.copy_by_head(layer, self.engine.cache, positions_BKS)
        origin_B = torch.where(is_long_B, lengths_B, self.num_fixed)
        self.origin_B[: len(lengths_B)] = origin_B

    def _observe(self) -> dict[int, Tensor]:
        """Each layer's attention [B, K, S] summed over the observation window."""
        count = self.engine.num_active
        longest = int(self.engine.host_lengths.max())
        scores = {}
        for layer, kept in self.cache.kept.items():
            shape = (count, kept.num_heads, longest)
            scores[layer] = torch.zeros(shape, device=self.cache.device)

        def add(layer: int, paid_BKTS: Tensor) -> None:
            num_slots = min(paid_BKTS.shape[-1], longest)
            paid_BKS = paid_BKTS[..., :num_slots].sum(dim=2)
            scores[layer][..., :num_slots] += paid_BKS

        for num_back in range(self._window, 0, -PROBE_TOKENS):
            num_tokens = min(PROBE_TOKENS, num_back)
            self.engine.probe(num_tokens, add, num_back=num_back)
        return scores

    def _select(self, scores_BKS: Tensor) -> Tensor:
        """The positions for each KV head's slots, [B, K, budget]; meaningful for sequences longer
        than the budget.
        """
        num_slots = scores_BKS.shape[-1]
        window_start_B11 = self.engine.lengths_B[:, None, None] - self._window
        padding = self._kernel // 2
        pooled_BKS = F.avg_pool1d(scores_BKS, self._kernel, stride=1, padding=padding)
        pooled_BKS = pooled_BKS[..., :num_slots]
        positions_S = torch.arange(num_slots, device=scores_BKS.device)
        is_recent_B1S = positions_S >= window_start_B11
        pooled_BKS = pooled_BKS.masked_fill(is_recent_B1S, -1.0)
        best_BKS = pooled_BKS.topk(self.budget - self._window, dim=-1).indices
        kept_BKS = best_BKS[..., : self.num_fixed]
        replaced_BKS = best_BKS[..., self.num_fixed :].flip(-1)
        recent_B1S = window_start_B11 + self.slots_S[: self._window]
        recent_BKS = recent_B1S.clamp_min(0).expand(*best_BKS.shape[:2], -1)
        return torch.cat((kept_BKS, replaced_BKS, recent_BKS), dim=-1)


class TopKDrafter(CompactDrafter):
    """After each verification, the `draft_budget` tokens that its last accepted query attended to
    most, per KV head. The verification computes that attention anyway; re-gathering the chosen keys
    and values is this method's upkeep."""

    def __init__(
        self, engine: Engine, spec: SpeculationSpec, model: Transformer
    ) -> None:
        super().__init__(engine, spec, model)
        self._scores: dict[int, Tensor] = {}
        # Keeps a layer's attention, without a copy, until `accept` says which query counts. Where a
        # verification is
        # captured as a graph, so is the choice behind it, in the same step: it reads where the
        # graph leaves them.
        self.observer = self._scores.__setitem__

    def admit(self) -> None:
        self.engine.probe(1, self._scores.__setitem__, num_back=1)
        self._refresh(torch.zeros_like(self.engine.lengths_B), self.engine.lengths_B)

    def accept(self, outcome: VerifiedBlock, gamma: int) -> None:
        query_B = outcome.num_accepted_B
        self._refresh(query_B, self.engine.lengths_B + query_B + 1)

    def _refresh(self, query_B: Tensor, lengths_B: Tensor) -> None:
        """Chooses by the attention of one query of each sequence, which now has `lengths_B` cached
        tokens.
        """
        rows_B = torch.arange(len(query_B), device=query_B.device)
        lengths_B11 = lengths_B[:, None, None]
        is_short_B11 = lengths_B11 <= self.budget
        own_S = self.slots_S[: self.budget]
        for layer, scores_BKTS in self._scores.items():
            scores_BKS = scores_BKTS[rows_B, :, query_B]
            num_slots = scores_BKS.shape[-1]
            positions_S = torch.arange(num_slots, device=query_B.device)
            scores_BKS = scores_BKS.masked_fill(positions_S >= lengths_B11, -1.0)
            best_BKS = scores_BKS.topk(min(self.budget, num_slots), dim=-1).indices
            if num_slots < self.budget:
                best_BKS = own_S.expand(*best_BKS.shape[:2], -1)
            positions_BKS = torch.where(is_short_B11, own_S, best_BKS)
            self.cache.copy_by_head(layer, self.engine.cache, positions_BKS)
