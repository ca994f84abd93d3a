"""Self-drafting over a compact cache: the target's own weights, reading `budget` of its keys and values.

    slots 0 .. num_fixed-1           stay as they are (attention sinks, or what was selected)
    slots num_fixed .. budget-1      a ring: a token at position p goes to num_fixed + (p - origin) mod ring size
    slots budget .. budget+gamma     the block's own tokens

Keys are rotated at their absolute positions, so their order in the cache does not matter. After each verification the
accepted tokens' exact keys and values, just computed by the target, are copied to the ring: no second prefill, no
re-gathering, and nothing special when a whole block was accepted.

Shape suffixes: B sequences, T tokens of a block, S slots, K KV heads, D head_dim; 2 is (key, value).
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicdec.errors import ConfigError
from magicdec.runtime.attention import AttentionBias, Workspace, decode_attention
from magicdec.runtime.drafters.base import Drafter, ProposalBuilder, TokenChooser
from magicdec.runtime.engine import Engine
from magicdec.runtime.kv_cache import KVCache
from magicdec.runtime.verification import Outcome, Proposal
from magicdec.specs.speculation import SamplingSpec


class DraftPass:
    """One drafted token per sequence, stored in the same slot of each, over all slots up to it."""

    def __init__(
        self,
        cache: KVCache,
        *,
        positions_BT: Tensor,
        slot: int,
        workspace: Workspace,
        bias: AttentionBias | None,
    ) -> None:
        self._cache, self._slot, self._workspace, self._bias = cache, slot, workspace, bias
        self.positions_BT = positions_BT

    def attend(self, layer: int, query_BTAD: Tensor, kv_BT2KD: Tensor) -> Tensor:
        count = len(query_BTAD)
        self._cache.write_slice(layer, slice(0, count), slice(self._slot, self._slot + 1), kv_BT2KD)
        keys, values = self._cache.read(layer, count, 0, self._slot + 1)
        return decode_attention(query_BTAD, keys, values, workspace=self._workspace, bias=self._bias)[0]


class RingDrafter(Drafter):
    """The part that methods with a ring of recent tokens share; they differ in what `start` puts into the cache."""

    def __init__(self, engine: Engine, *, budget: int, num_fixed: int) -> None:
        super().__init__(engine)
        self.budget, self.num_fixed = budget, num_fixed
        self.ring_size = budget - num_fixed
        target, device = engine.cache, engine.model.device
        self.cache = KVCache(
            num_layers=target.data.shape[0],
            batch_size=engine.batch_size,
            num_kv_heads=target.data.shape[3],
            num_slots=budget + engine.max_gamma + 1,
            head_dim=target.data.shape[5],
            dtype=target.data.dtype,
            device=device,
        )
        self._origin_B = torch.full((engine.batch_size,), num_fixed, device=device)
        self._steps_T = torch.arange(engine.max_gamma + 1, device=device)
        self._chooser = TokenChooser(sampling=SamplingSpec(), tp=engine.model.tp)

    def start(self, sampling: SamplingSpec) -> None:
        self._chooser = TokenChooser(sampling=sampling, tp=self.engine.model.tp)
        self.fill()

    def fill(self) -> None:
        """Fills the compact cache from the target's."""
        raise NotImplementedError

    def propose(self, gamma: int, uniforms: Tensor | None) -> Proposal:
        if gamma >= self.ring_size:
            raise ConfigError(
                f"draft budget {self.budget} leaves a window of {self.ring_size} tokens, which must exceed gamma {gamma}; "
                f"use a budget of at least {self.num_fixed + gamma + 1}"
            )
        engine = self.engine
        builder = ProposalBuilder(engine.model, self._chooser, uniforms)
        positions_BT = engine.lengths_B[:, None] + self._steps_T[:gamma]
        hidden_BS = self._unfilled(gamma)
        token_B1 = engine.pending_B[:, None]
        for step in range(gamma):
            slot = self.budget + step
            bias = None
            if hidden_BS is not None:
                bias = AttentionBias(values_BTS=hidden_BS[:, None, : slot + 1], num_open=0)
            attention = DraftPass(
                self.cache,
                positions_BT=positions_BT[:, step : step + 1],
                slot=slot,
                workspace=engine.workspace,
                bias=bias,
            )
            token_B1 = builder.step(token_B1, attention)
        return builder.build()

    def _unfilled(self, gamma: int) -> Tensor | None:
        """-inf for slots that hold nothing yet, where a sequence is shorter than the budget; None where none is."""
        if self.engine.host_lengths.min() >= self.budget:
            return None
        slots_S = torch.arange(self.budget + gamma, device=self.cache.data.device)
        empty_BS = (slots_S >= self.engine.lengths_B[:, None]) & (slots_S < self.budget)
        return torch.zeros(empty_BS.shape, dtype=self.cache.data.dtype, device=empty_BS.device).masked_fill_(
            empty_BS, float("-inf")
        )

    def accept(self, outcome: Outcome, gamma: int) -> None:
        steps_T = self._steps_T[: gamma + 1]
        positions_BT = self.engine.lengths_B[:, None] + steps_T
        # A rejected token's values go to a slot of the block, which the next block overwrites.
        is_kept_BT = steps_T <= outcome.num_accepted_B[:, None]
        slots_BT = torch.where(is_kept_BT, self.slots_of(positions_BT), self.budget + steps_T)
        self.cache.scatter(slots_BT, self.engine.cache.gather(positions_BT))

    def slots_of(self, positions_BT: Tensor) -> Tensor:
        """Where tokens at these positions are kept: in a sequence shorter than the fixed part, at their own position."""
        origin_B1 = self._origin_B[: len(positions_BT), None]
        ring_BT = self.num_fixed + (positions_BT - origin_B1) % self.ring_size
        return torch.where(positions_BT < self.num_fixed, positions_BT, ring_BT)

    def swap(self, first: int, second: int) -> None:
        if first != second:
            self.cache.swap(first, second)
            self._origin_B[[first, second]] = self._origin_B[[second, first]]
