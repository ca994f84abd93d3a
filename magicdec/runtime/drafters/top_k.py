"""Top-k: after each verification, the tokens that its last accepted query attended to most, per KV head.

The verification computes that attention anyway; re-gathering the chosen keys and values is this method's upkeep. Where
ranks hold copies of a KV head, each chooses for the query heads it has.

Shape suffixes: B sequences, K KV heads, T query tokens, S positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicdec.runtime.drafters.compact import CompactDrafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.verification import Outcome
from magicdec.specs.speculation import SpeculationSpec


class TopKDrafter(CompactDrafter):
    """Self-drafting over the `draft_budget` tokens with the highest attention, refreshed every step."""

    def __init__(self, engine: Engine, spec: SpeculationSpec, model: Transformer) -> None:
        assert spec.draft_budget is not None
        super().__init__(engine, model, budget=spec.draft_budget)
        self._scores: dict[int, Tensor] = {}
        self.observer = self._observe

    def admit(self) -> None:
        self.engine.probe(1, self._observe, num_back=1)
        self._refresh(torch.zeros_like(self.engine.lengths_B), self.engine.lengths_B)

    def accept(self, outcome: Outcome, gamma: int) -> None:
        self._refresh(outcome.num_accepted_B, self.engine.lengths_B + outcome.num_accepted_B + 1)

    def _observe(self, layer: int, paid_BKTS: Tensor) -> None:
        """Keeps a layer's attention, without a copy, until `accept` says which query counts. Where a verification is
        captured as a graph, so is the choice behind it, in the same step: it reads where the graph leaves them."""
        self._scores[layer] = paid_BKTS

    def _refresh(self, query_B: Tensor, lengths_B: Tensor) -> None:
        """Chooses by the attention of one query of each sequence, which now has `lengths_B` cached tokens."""
        rows_B = torch.arange(len(query_B), device=query_B.device)
        own_S = self.slots_S[: self.budget]
        for layer, scores_BKTS in self._scores.items():
            scores_BKS = scores_BKTS[rows_B, :, query_B]
            positions_S = torch.arange(scores_BKS.shape[-1], device=query_B.device)
            scores_BKS = scores_BKS.masked_fill(positions_S >= lengths_B[:, None, None], -1.0)
            best_BKS = scores_BKS.topk(min(self.budget, len(positions_S)), dim=-1).indices
            if best_BKS.shape[-1] < self.budget:
                best_BKS = own_S.expand(*best_BKS.shape[:2], -1)
            is_short_B = lengths_B <= self.budget
            self.copy_by_head(layer, torch.where(is_short_B[:, None, None], own_S, best_BKS))
