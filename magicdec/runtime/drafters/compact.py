"""Self-drafting over a compact cache: the target's own weights, reading `budget` of its keys and values.

    slots 0 .. budget-1              chosen tokens of the target's cache; the methods differ in which
    slots budget .. budget+gamma     the block's own tokens

Of methods with a ring, slots 0..num_fixed-1 stay as they are (attention sinks, or what was selected), and a token at
position p goes to slot num_fixed + (p - origin) mod ring size. After each verification the accepted tokens' exact keys
and values, just computed by the target, are copied there: no second prefill, no re-gathering, and nothing special when
a whole block was accepted.

Keys are rotated at their absolute positions, so their order in the cache does not matter. A sequence shorter than the
budget holds all its tokens, each in the slot of its position.

Layers that see a window or a chunk only are not thinned out: the draft reads them in the target's cache, where it keeps
its block's tokens too, until the verification overwrites them with the same or better.

Shape suffixes: L layers, B sequences, T tokens of a block, P parts (keys and values, or one latent), K KV heads,
S slots, A query heads, D head_dim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable

import torch
from torch import Tensor

from magicdec.runtime.attention import Scoring, Workspace, decode_attention
from magicdec.runtime.drafters.base import Drafter, ProposalBuilder
from magicdec.runtime.engine import Engine
from magicdec.runtime.kernels import Visible
from magicdec.runtime.kv_cache import KVCache
from magicdec.runtime.passes import DecodePass
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.verification import Outcome, Proposal
from magicdec.specs.speculation import SpeculationSpec, check_gamma


class SlotsPass:
    """One or two drafted tokens per sequence, each stored in a slot of its own, over the slots of a draft's cache that
    they see; in layers that the cache lacks, over the target's own."""

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
        self._cache, self._slots_BT, self._target = cache, slots_BT, target
        self._visible, self._workspace = visible, workspace
        self.positions_BT = positions_BT

    def attend(self, layer: int, query_BTAD: Tensor, kv_BTPKD: Tensor, scoring: Scoring) -> Tensor:
        if self._target is not None and layer not in self._cache:
            return self._target.attend(layer, query_BTAD, kv_BTPKD, scoring)
        self._cache.write(layer, self._slots_BT, kv_BTPKD)
        keys, values = self._cache.read(layer, len(query_BTAD))
        workspace = self._workspace
        return decode_attention(query_BTAD, keys, values, self._visible, scoring=scoring, workspace=workspace)[0]


class CompactDrafter(Drafter):
    """Drafts over the compact cache. A method says how `admit` fills it and how `accept` keeps it up."""

    def __init__(self, engine: Engine, model: Transformer, *, budget: int) -> None:
        """`model`: whose weights draft, the target's, or a copy of them in a narrower format."""
        super().__init__(engine)
        self.model = model
        model.reserve(engine.cache.num_slots, longest=engine.max_len)
        self.budget = budget
        self.cache = engine.cache.sparse(num_slots=budget + engine.max_gamma + 1)
        self.steps_T = torch.arange(engine.max_gamma + 1, device=engine.model.device)
        self.slots_S = torch.arange(budget + engine.max_gamma + 1, device=engine.model.device)

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
        builder = ProposalBuilder(self.model, self.sampling, uniforms)
        token_B1 = engine.pending_B[:, None]
        for step in range(gamma):
            target, stop = engine.decode_pass(1, ahead=step), self.budget + step + 1
            slots_BT = self.slots_S[stop - 1].expand_as(target.positions_BT)
            empty = (engine.lengths_B, self.budget) if self._is_unfilled else None
            last_BT = torch.full_like(target.positions_BT, stop - 1)
            visible = Visible(last_BT=last_BT, stop=stop, num_open=0 if empty else stop, empty=empty)
            attention = SlotsPass(
                self.cache,
                positions_BT=target.positions_BT,
                slots_BT=slots_BT,
                visible=visible,
                workspace=engine.workspace,
                target=target,
            )
            token_B1 = builder.step(token_B1, attention)
        return builder.build()

    def copy_by_head(self, layer: int, positions_BKS: Tensor) -> None:
        """Fills slots 0..budget-1 of a layer with the target's tokens at these positions, chosen per KV head."""
        self.cache.copy_by_head(layer, self.engine.cache, positions_BKS)

    def swap(self, first: int, second: int) -> None:
        self.cache.swap(first, second)


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
