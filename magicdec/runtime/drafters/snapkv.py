"""SnapKV: what the last tokens of the prompt attended to, and a window of recent tokens. arXiv 2404.14469.

Selected once, from the attention of the last `observation_window` cached tokens: probabilities (scaled, causally
masked) summed over those tokens and over the query heads of a KV head, pooled along the context, highest first. Where
several ranks hold copies of a KV head, each selects for the query heads it has.

    slots 0 .. budget/2 - 1       the best of what was selected
    slots budget/2 .. budget-1    a ring: the rest of what was selected, worst first, then the observation window

So the cache is always full. Generated tokens first replace the worst of what was selected; once they fill the ring, it
holds a sliding window of the most recent ones.

Shape suffixes: B sequences, K KV heads, T observed tokens, S slots or positions.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.runtime.drafters.compact import RingDrafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.transformer import Transformer
from magicdec.specs.speculation import SpeculationSpec

PROBE_TOKENS = 4
"""Observed tokens per pass: as many as a verification would take, so that scores need no more memory."""


class SnapKVDrafter(RingDrafter):
    """Self-drafting over `draft_budget` slots per KV head, half of them kept for what was selected."""

    def __init__(
        self, engine: Engine, spec: SpeculationSpec, model: Transformer, *, pooling: Literal["avg", "max"] = "avg"
    ) -> None:
        assert spec.draft_budget is not None
        super().__init__(engine, model, budget=spec.draft_budget, num_fixed=spec.num_selected)
        self._window = min(spec.observation_window, self.ring_size)
        self._kernel, self._pooling = spec.pooling_kernel, pooling

    def admit(self) -> None:
        lengths_B = self.engine.lengths_B
        is_long_B = lengths_B > self.budget
        scores = self._observe() if (self.engine.host_lengths > self.budget).any() else None
        for layer in self.cache.layers:
            own_BKS = self.slots_S[: self.budget].expand(len(lengths_B), self.cache.num_heads(layer), -1)
            positions_BKS = own_BKS
            if scores is not None:
                positions_BKS = torch.where(is_long_B[:, None, None], self._select(scores[layer]), own_BKS)
            self.copy_by_head(layer, positions_BKS)
        self.origin_B[: len(lengths_B)] = torch.where(is_long_B, lengths_B, self.num_fixed)

    def _observe(self) -> dict[int, Tensor]:
        """Each layer's attention [B, K, S] summed over the observation window."""
        longest = int(self.engine.host_lengths.max())
        scores = {
            layer: torch.zeros(self.engine.num_active, self.cache.num_heads(layer), longest, device=self.cache.device)
            for layer in self.cache.layers
        }

        def add(layer: int, paid_BKTS: Tensor) -> None:
            num_slots = min(paid_BKTS.shape[-1], longest)
            scores[layer][..., :num_slots] += paid_BKTS[..., :num_slots].sum(dim=2)

        for start in range(self._window, 0, -PROBE_TOKENS):
            self.engine.probe(min(PROBE_TOKENS, start), add, num_back=start)
        return scores

    def _select(self, scores_BKS: Tensor) -> Tensor:
        """The positions for each KV head's slots, [B, K, budget]; meaningful for sequences longer than the budget."""
        lengths_B11 = self.engine.lengths_B[:, None, None]
        pool = F.avg_pool1d if self._pooling == "avg" else F.max_pool1d
        pooled_BKS = pool(scores_BKS, self._kernel, stride=1, padding=self._kernel // 2)[..., : scores_BKS.shape[-1]]
        positions_S = torch.arange(scores_BKS.shape[-1], device=scores_BKS.device)
        pooled_BKS = pooled_BKS.masked_fill(positions_S >= lengths_B11 - self._window, -1.0)
        best_BKS = pooled_BKS.topk(self.budget - self._window, dim=-1).indices
        kept_BKS, replaced_BKS = best_BKS[..., : self.num_fixed], best_BKS[..., self.num_fixed :].flip(-1)
        recent_BKS = (lengths_B11 - self._window + self.slots_S[: self._window]).expand(*best_BKS.shape[:2], -1)
        return torch.cat((kept_BKS, replaced_BKS, recent_BKS.clamp_min(0)), dim=-1)
