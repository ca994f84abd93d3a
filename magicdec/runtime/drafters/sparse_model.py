"""A smaller model drafts over a sparse cache of its own: sinks and a window, at in-cache positions.

Its budget, not the context, must fit the length that the draft model was trained for. StreamingLLM re-indexes all
cached tokens by their place in the cache. Attention depends on differences of positions only, so here the window
keeps its absolute positions and the few sinks move along instead: they stand where the window begins.

    position of sink i = i + max(0, length - budget)

The prefill is windowed too: the draft processes the sinks and the last tokens only. Afterwards, the keys and values
that the draft computed for accepted tokens move from the block's slots to the ring. When a whole block was accepted,
the last drafted token is processed together with the pending one (as in draft_model.py).

Shape suffixes: L layers, B sequences, T tokens, K KV heads, S slots, D head_dim, P parts (keys and values, or one
latent).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from magicdec.errors import CapacityError
from magicdec.runtime.attention import Scoring, Workspace, prefill_attention
from magicdec.runtime.drafters.base import Drafter, ProposalBuilder
from magicdec.runtime.drafters.compact import SlotsPass, ring_slots
from magicdec.runtime.drafters.draft_model import check_vocabulary
from magicdec.runtime.engine import Engine
from magicdec.runtime.kernels import Visible
from magicdec.runtime.kv_cache import KVCache, keys_and_values
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.verification import Outcome, Proposal
from magicdec.specs.speculation import SpeculationSpec, check_gamma


class WindowedPrefillPass:
    """The kept tokens of one sequence, attending among themselves; token i is stored in slots_T[i]."""

    def __init__(self, cache: KVCache, *, row: int, positions_T: Tensor, slots_T: Tensor) -> None:
        self._cache, self._row, self._slots_T = cache, row, slots_T
        self.positions_BT = positions_T[None]

    def attend(self, layer: int, query_BTAD: Tensor, kv_BTPKD: Tensor, scoring: Scoring) -> Tensor:
        kv_PKTD = kv_BTPKD[0].permute(1, 2, 0, 3)
        self._cache.write_row(layer, self._row, self._slots_T, kv_PKTD)
        keys, values = keys_and_values(kv_PKTD[:, None], self._cache.kept[layer])
        return prefill_attention(
            query_BTAD, keys, values, num_past=0, scoring=replace(scoring, window=None, chunk=None)
        )


class SparseModelDrafter(Drafter):
    """Drafts with another model over `num_sink_tokens` sinks and a window that fills the rest of the budget."""

    def __init__(self, engine: Engine, spec: SpeculationSpec, model: Transformer) -> None:
        super().__init__(engine)
        check_vocabulary(engine.model, model)
        assert spec.draft_budget is not None
        longest = spec.draft_budget + spec.gamma + 1
        if longest > model.spec.max_position_embeddings:
            raise CapacityError(
                f"draft {model.spec.name} holds {model.spec.max_position_embeddings} positions; a budget of "
                f"{spec.draft_budget} with gamma {spec.gamma} needs {longest}"
            )
        self.budget, self._num_sinks = spec.draft_budget, spec.num_sink_tokens
        self._model = model
        model.reserve(engine.max_len + engine.max_gamma + 1, longest=longest)
        self.cache = KVCache(
            model.kept,
            batch_size=engine.batch_size,
            num_slots=self.budget + engine.max_gamma + 1,
            dtype=model.dtype,
            device=model.device,
        )
        self._first_sinks = [keys.clone() for keys in self._sinks(engine.batch_size)]
        self._first_shift_B = torch.zeros(engine.batch_size, dtype=torch.long, device=model.device)
        self._steps_T = torch.arange(engine.max_gamma + 1, device=model.device)
        self._slots_S = torch.arange(self.cache.num_slots, device=model.device)
        self._workspace = Workspace()
        self._num_behind = 0

    def begin(self) -> None:
        self._num_behind = 0
        self.admit()

    def admit(self) -> None:
        count = self.engine.num_active
        for row, length in enumerate(self.engine.host_lengths.tolist()):
            self._prefill(row, length)
        for first, now in zip(self._first_sinks, self._sinks(count), strict=True):
            first[:, :count] = now
        self._first_shift_B[:count] = self._shift_of(self.engine.lengths_B)

    def _prefill(self, row: int, length: int) -> None:
        """Processes a sequence's sinks and the last tokens that its budget holds."""
        num_kept = min(length, self.budget)
        if not num_kept:
            return
        positions_T = torch.arange(length - num_kept, length, device=self._model.device)
        kept_T = positions_T.clone()
        kept_T[: self._num_sinks] = self._slots_S[: min(self._num_sinks, num_kept)]
        slots_T = self._slots_of(kept_T)
        attention = WindowedPrefillPass(self.cache, row=row, positions_T=positions_T, slots_T=slots_T)
        self._model.hidden(self.engine.tokens_BS[row : row + 1, kept_T], attention)

    def _slots_of(self, positions: Tensor) -> Tensor:
        ring_size = self.budget - self._num_sinks
        return ring_slots(positions, num_fixed=self._num_sinks, ring_size=ring_size, origin=self._num_sinks)

    def _shift_of(self, lengths_B: Tensor) -> Tensor:
        return (lengths_B - self.budget).clamp_min(0)

    def _sinks(self, count: int) -> list[Tensor]:
        """The sinks' keys of the first sequences, views [L, B, K, S, D] of each block's layers."""
        return [self.cache.first_keys(block, count, self._num_sinks) for block in self.cache.blocks]

    def _move_sinks(self) -> None:
        """Rotates the sinks' keys from their first positions to where the window begins now."""
        count = self.engine.num_active
        if self.engine.host_lengths.min() <= self.budget:  # sinks that have not moved yet may still be coming in
            is_still_B = self.engine.lengths_B <= self.budget
            for first, now in zip(self._first_sinks, self._sinks(count), strict=True):
                first[:, :count] = torch.where(is_still_B[:, None, None, None], now, first[:, :count])
        moved_B = self._shift_of(self.engine.lengths_B) - self._first_shift_B[:count]
        rotations = self._model.turns(moved_B[:, None])  # [B, 1, 1, D/2], for every head and sink alike
        for block, first, now in zip(self.cache.blocks, self._first_sinks, self._sinks(count), strict=True):
            for index, layer in enumerate(block.layers):
                mixer = self._model.layers[layer].mixer
                assert mixer is not None
                now[index] = mixer.rotate_keys_(first[index, :count].clone(), rotations)

    def graph_key(self, gamma: int) -> Hashable | None:
        if self._num_behind > 1:  # prefills again
            return None
        shortest = int(self.engine.host_lengths.min())
        return self._num_behind, shortest < self.budget, shortest == self.budget

    def propose(self, gamma: int, uniforms: Tensor | None) -> Proposal:
        check_gamma(gamma, budget=self.budget, num_recent=self.budget - self._num_sinks)
        if self._num_behind > 1:  # the target went on alone
            self._num_behind = 0
            self.admit()
        self._move_sinks()
        builder = ProposalBuilder(self._model, self.sampling, uniforms)
        tokens_BT = self.engine.pending_B[:, None]
        for step in range(gamma):
            attention = self._pass(step, is_catching_up=self._num_behind > 0 and step == 0)
            if attention.positions_BT.shape[1] == 2:
                tokens_BT = self.engine.tokens_BS.gather(1, attention.positions_BT)
            tokens_BT = builder.step(tokens_BT, attention)
        return builder.build()

    def _pass(self, step: int, *, is_catching_up: bool) -> SlotsPass:
        lengths_B1 = self.engine.lengths_B[:, None]
        positions_BT, num_slots = lengths_B1 + step, self.budget + step + 1
        slots_BT = self._slots_S[num_slots - 1].expand_as(positions_BT)
        if is_catching_up:
            ring_B1 = self._slots_of(lengths_B1 - 1)
            positions_BT = torch.cat((lengths_B1 - 1, positions_BT), dim=1)
            slots_BT = torch.cat((ring_B1, slots_BT), dim=1)
        is_unfilled = bool(self.engine.host_lengths.min() < self.budget)
        last_BT = torch.full_like(positions_BT, num_slots - 1)
        if is_catching_up:
            last_BT[:, 0].fill_(self.budget - 1)  # the token before the pending one does not see it
        visible = Visible(
            last_BT=last_BT,
            stop=num_slots,
            num_open=0 if is_unfilled or is_catching_up else num_slots,
            empty=(self.engine.lengths_B, self.budget) if is_unfilled else None,
        )
        return SlotsPass(
            self.cache,
            positions_BT=positions_BT,
            slots_BT=slots_BT,
            visible=visible,
            workspace=self._workspace,
        )

    def count(self, num_accepted: np.ndarray, gamma: int) -> None:
        self._num_behind = int((num_accepted == gamma).any()) if gamma else self._num_behind + 1

    def accept(self, outcome: Outcome, gamma: int) -> None:
        if gamma == 0:
            return
        steps_T = self._steps_T[:gamma]
        block_BT = (self.budget + steps_T).expand(self.engine.num_active, -1)
        positions_BT = self.engine.lengths_B[:, None] + steps_T
        is_kept_BT = steps_T <= outcome.num_accepted_B[:, None]
        slots_BT = torch.where(is_kept_BT, self._slots_of(positions_BT), block_BT)
        self.cache.copy_tokens(slots_BT, self.cache, block_BT)

    def swap(self, first: int, second: int) -> None:
        self.cache.swap(first, second)
        there, back = [first, second], [second, first]
        self._first_shift_B[there] = self._first_shift_B[back]
        for first_keys in self._first_sinks:
            first_keys[:, there] = first_keys[:, back]
