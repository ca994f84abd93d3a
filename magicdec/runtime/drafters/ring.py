"""A compact cache whose last slots are a ring of recent tokens.

    slots 0 .. num_fixed-1           stay as they are (attention sinks, or what was selected)
    slots num_fixed .. budget-1      a token at position p goes to num_fixed + (p - origin) mod ring size

After each verification the accepted tokens' exact keys and values, just computed by the target, are copied to the ring:
no second prefill, no re-gathering, and nothing special when a whole block was accepted.

Shape suffixes: B sequences, T tokens of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicdec.runtime.drafters.compact import CompactDrafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.verification import Outcome, Proposal
from magicdec.specs.speculation import SpeculationSpec, check_gamma


class RingDrafter(CompactDrafter):
    """The part that methods with a ring share; they differ in what `admit` puts into the cache at the start."""

    def __init__(self, engine: Engine, model: Transformer, *, budget: int, num_fixed: int) -> None:
        super().__init__(engine, model, budget=budget)
        self.num_fixed, self.ring_size = num_fixed, budget - num_fixed
        self.origin_B = torch.full((engine.batch_size,), num_fixed, device=engine.model.device)

    def propose(self, gamma: int, uniforms: Tensor | None) -> Proposal:
        check_gamma(gamma, budget=self.budget, num_recent=self.ring_size)
        return super().propose(gamma, uniforms)

    def accept(self, outcome: Outcome, gamma: int) -> None:
        steps_T = self.steps_T[: gamma + 1]
        positions_BT = self.engine.lengths_B[:, None] + steps_T
        # A rejected token's values go to a slot of the block, which the next block overwrites.
        is_kept_BT = steps_T <= outcome.num_accepted_B[:, None]
        slots_BT = torch.where(is_kept_BT, self.slots_of(positions_BT), self.budget + steps_T)
        self.cache.copy_tokens(slots_BT, self.engine.cache, positions_BT)

    def slots_of(self, positions_BT: Tensor) -> Tensor:
        """The slots of tokens at these positions; those of the fixed part stay at their own position."""
        origin_B1 = self.origin_B[: len(positions_BT), None]
        return ring_slots(positions_BT, num_fixed=self.num_fixed, ring_size=self.ring_size, origin=origin_B1)

    def swap(self, first: int, second: int) -> None:
        super().swap(first, second)
        self.origin_B[[first, second]] = self.origin_B[[second, first]]


class StreamingLLMDrafter(RingDrafter):
    """StreamingLLM (arXiv 2309.17453): self-drafting over the first `num_sink_tokens` tokens (attention sinks) and a
    window of the last `draft_budget - num_sink_tokens`."""

    def __init__(self, engine: Engine, spec: SpeculationSpec, model: Transformer) -> None:
        assert spec.draft_budget is not None
        super().__init__(engine, model, budget=spec.draft_budget, num_fixed=spec.num_sink_tokens)

    def admit(self) -> None:
        last_B1 = self.engine.lengths_B[:, None] - 1
        slots_S = self.slots_S[: self.budget]
        # The last position of each sequence that belongs in a slot of the ring.
        ring_BS = last_B1 - (last_B1 - slots_S) % self.ring_size
        positions_BS = torch.where(slots_S < self.num_fixed, slots_S, ring_BS).clamp_min(0)
        self.cache.copy_tokens(slots_S.expand_as(positions_BS), self.engine.cache, positions_BS)
        self.origin_B.fill_(self.num_fixed)


def ring_slots(positions: Tensor, *, num_fixed: int, ring_size: int, origin: Tensor | int) -> Tensor:
    """Positions under `num_fixed` at themselves, the others in the ring behind them, beginning with `origin`."""
    return torch.where(positions < num_fixed, positions, num_fixed + (positions - origin) % ring_size)
