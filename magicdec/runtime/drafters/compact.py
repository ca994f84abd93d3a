"""Self-drafting over a compact cache: the target's own weights, reading `budget` of its keys and values.

    slots 0 .. budget-1              chosen tokens of the target's cache; the methods differ in which
    slots budget .. budget+gamma     the block's own tokens

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
from magicdec.runtime.verification import Proposal


class DraftPass:
    """One drafted token per sequence, stored in the same slot of each, over all slots up to it; in the layers that the
    compact cache lacks, over the target's own."""

    def __init__(
        self,
        cache: KVCache,
        *,
        target: DecodePass,
        slot: int,
        workspace: Workspace,
        empty: tuple[Tensor, int] | None,
    ) -> None:
        self._cache, self._slot, self._workspace, self._target = cache, slot, workspace, target
        self.positions_BT = target.positions_BT
        last_BT = torch.full_like(self.positions_BT, slot)
        num_open = slot + 1 if empty is None else 0
        self._visible = Visible(last_BT=last_BT, stop=slot + 1, num_open=num_open, empty=empty)

    def attend(self, layer: int, query_BTAD: Tensor, kv_BTPKD: Tensor, scoring: Scoring) -> Tensor:
        if layer not in self._cache:
            return self._target.attend(layer, query_BTAD, kv_BTPKD, scoring)
        count = len(query_BTAD)
        self._cache.write_slice(layer, slice(0, count), slice(self._slot, self._slot + 1), kv_BTPKD)
        keys, values = self._cache.read(layer, count)
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
            attention = DraftPass(
                self.cache,
                target=engine.decode_pass(1, ahead=step),
                slot=self.budget + step,
                workspace=engine.workspace,
                empty=(engine.lengths_B, self.budget) if self._is_unfilled else None,
            )
            token_B1 = builder.step(token_B1, attention)
        return builder.build()

    def copy_by_head(self, layer: int, positions_BKS: Tensor) -> None:
        """Fills slots 0..budget-1 of a layer with the target's tokens at these positions, chosen per KV head."""
        self.cache.copy_by_head(layer, self.engine.cache, positions_BKS)

    def swap(self, first: int, second: int) -> None:
        self.cache.swap(first, second)
