"""StreamingLLM: the first tokens (attention sinks) and a sliding window of the last. arXiv 2309.17453."""

from __future__ import annotations

import torch

from magicdec.runtime.drafters.ring import RingDrafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.transformer import Transformer
from magicdec.specs.speculation import SpeculationSpec


class StreamingLLMDrafter(RingDrafter):
    """Self-drafting over `num_sink_tokens` sinks and a window of `draft_budget - num_sink_tokens` tokens."""

    def __init__(self, engine: Engine, spec: SpeculationSpec, model: Transformer) -> None:
        assert spec.draft_budget is not None
        super().__init__(engine, model, budget=spec.draft_budget, num_fixed=spec.num_sink_tokens)

    def fill(self) -> None:
        last_B1 = self.engine.lengths_B[:, None] - 1
        slots_S = self.slots_S[: self.budget]
        # The last position of each sequence that belongs in a slot of the ring.
        ring_BS = last_B1 - (last_B1 - slots_S) % self.ring_size
        positions_BS = torch.where(slots_S < self.num_fixed, slots_S, ring_BS).clamp_min(0)
        self.cache.copy_tokens(slots_S.expand_as(positions_BS), self.engine.cache, positions_BS)
        self.origin_B.fill_(self.num_fixed)
