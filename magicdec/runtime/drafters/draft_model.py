"""A smaller model drafts, with a KV cache of its own: all of the context, or sinks and a window of
it.

Its cache holds what it processed: the pending token and all drafted ones but the last. When a whole
block was accepted, the last drafted token is still to be processed, and the next block's first step
takes it along with the pending one (for every sequence: those that need it not compute the same
values again). So it is with tokens that the target went on by alone.

Shape suffixes: L layers, B sequences, T tokens, K KV heads, S slots, D head_dim, P parts (keys and
values, or one latent), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from magicdec.errors import CapacityError, ConfigError
from magicdec.runtime.attention import Scoring, Workspace, prefill_attention
from magicdec.runtime.distributed import TensorParallel
from magicdec.runtime.drafters.base import Drafter, ModelProposalBuilder
from magicdec.runtime.drafters.self_draft import SlotsPass, ring_slots
from magicdec.runtime.engine import Engine, Snapshot
from magicdec.runtime.kernels import Visible
from magicdec.runtime.kv_cache import KVCache, keys_and_values
from magicdec.runtime.prefill import PromptPart
from magicdec.runtime.sampling import Proposal, VerifiedBlock
from magicdec.runtime.transformer import Transformer
from magicdec.specs.speculation import SpeculationSpec, check_gamma


class ModelDrafter(Drafter):
    """Drafts with another model of the same vocabulary. Raises ConfigError where its tokens would
    mean others to the target."""

    def __init__(self, engine: Engine, model: Transformer) -> None:
        super().__init__(engine)
        target = engine.model.spec
        draft = model.spec
        if target.vocab_size != draft.vocab_size:
            raise ConfigError(
                f"draft {draft.name} has a vocabulary of {draft.vocab_size}, "
                f"target {target.name} of {target.vocab_size}: they must be the same"
            )
        self._num_behind = 0
        """Tokens before the pending one that it has not processed."""

    def count(self, num_accepted: np.ndarray, gamma: int) -> None:
        if gamma:
            self._num_behind = int((num_accepted == gamma).any())
        else:
            self._num_behind = self._num_behind + 1


class DraftModelDrafter(ModelDrafter):
    """Keeps a full KV cache. Its prefill is kept, for runs from the same prompts."""

    def __init__(
        self, engine: Engine, spec: SpeculationSpec, model: Transformer
    ) -> None:
        super().__init__(engine, model)
        self._own = Engine(
            model,
            batch_size=engine.batch_size,
            max_len=engine.max_len,
            max_gamma=engine.max_gamma,
            max_back=engine.max_back,
        )
        self._prefilled: Snapshot | None = None
        self._prefill_count = -1

    def begin(self) -> None:
        self._num_behind = 0
        sequences = self.engine.sequence_of_slot[: self.engine.num_active]
        lengths = np.zeros(self.engine.batch_size, dtype=np.int64)
        lengths[sequences] = self.engine.host_lengths
        is_kept = self._prefilled is not None and np.array_equal(
            self._prefilled.lengths, lengths
        )
        if (
            self._prefilled is None
            or not is_kept
            or self._prefill_count != self.engine.prefill_count
        ):
            self._prefill()
        else:
            self._own.restore(self._prefilled)
        for slot, sequence in enumerate(self.engine.sequence_of_slot.tolist()):
            (own_slot,) = np.flatnonzero(
                self._own.sequence_of_slot == sequence
            ).tolist()
            self._own.exchange(slot, own_slot)

    def _prefill(self) -> None:
        """Processes each sequence's tokens; a slot that is no longer active gets a token to keep
        its place.
        """
        tokens = self.engine.tokens_BS.cpu().numpy()
        engine = self.engine
        by_sequence: list[list[int]] = [[0]] * engine.batch_size
        for slot, length in enumerate(engine.host_lengths.tolist()):
            sequence = int(engine.sequence_of_slot[slot])
            by_sequence[sequence] = tokens[slot, : length + 1].tolist()
        self._own.prefill(by_sequence)
        self._prefilled = self._own.snapshot()
        self._prefill_count = engine.prefill_count

    def follow(self, parts: Sequence[PromptPart], states_NF: Tensor | None) -> None:
        """The draft processes the same tokens of a queued prompt as the target."""
        self._own.cache_parts(parts)
        self._prefilled = None

    def graph_key(self, gamma: int) -> Hashable:
        """The number of tokens before the pending one that the first draft step processes too."""
        return min(self._num_behind, int(self.engine.host_lengths.min()))

    def propose(self, gamma: int, uniforms: Tensor | None) -> Proposal:
        engine = self.engine
        num_back = min(self._num_behind, int(self.engine.host_lengths.min()))
        builder = ModelProposalBuilder(self._own.model, self.sampling, uniforms)
        most = engine.max_gamma + 1  # tokens of a pass, where a window is kept alone
        while num_back >= most:
            attention = self._own.decode_pass(most, ahead=-num_back, of=engine)
            tokens_BT = engine.tokens_BS.gather(1, attention.positions_BT)
            self._own.model.hidden(tokens_BT, attention)
            num_back -= most
        attention = self._own.decode_pass(num_back + 1, ahead=-num_back, of=engine)
        tokens_BT = engine.tokens_BS.gather(1, attention.positions_BT)
        for step in range(gamma):
            if step:
                attention = self._own.decode_pass(1, ahead=step, of=engine)
            tokens_BT = builder.step(tokens_BT, attention)
        return builder.build()

    def swap(self, first: int, second: int) -> None:
        self._own.exchange(first, second)


class WindowedPrefillPass:
    """The kept tokens of one sequence, attending among themselves; token i is stored in
    slots_T[i]."""

    def __init__(
        self, cache: KVCache, *, row: int, positions_T: Tensor, slots_T: Tensor
    ) -> None:
        self._cache = cache
        self._row = row
        self._slots_T = slots_T
        self.positions_BT = positions_T[None]

    def attend(
        self, layer: int, query_BTAD: Tensor, kv_BTPKD: Tensor, scoring: Scoring
    ) -> Tensor:
        kv_PKTD = kv_BTPKD[0].permute(1, 2, 0, 3)
        self._cache.write_row(layer, self._row, self._slots_T, kv_PKTD)
        keys, values = keys_and_values(kv_PKTD[:, None], self._cache.kept[layer])
        return prefill_attention(
            query_BTAD,
            keys,
            values,
            num_past=0,
            scoring=replace(scoring, window=None, chunk=None),
        )


class SparseModelDrafter(ModelDrafter):
    """Keeps `num_sink_tokens` sinks and a window that fills the rest of the budget, at in-cache
    positions.

    Its budget, not the context, must fit the length that the draft model was trained for.
    StreamingLLM re-indexes all cached tokens by their place in the cache. Attention depends on
    differences of positions only, so here the window keeps its absolute positions and the few sinks
    move along instead: they stand where the window begins.

        position of sink i = i + max(0, length - budget)

    The prefill is windowed too: the draft processes the sinks and the last tokens only. Afterwards,
    the keys and values that the draft computed for accepted tokens move from the block's slots to
    the ring.
    """

    def __init__(
        self, engine: Engine, spec: SpeculationSpec, model: Transformer
    ) -> None:
        super().__init__(engine, model)
        assert spec.draft_budget is not None
        longest = spec.draft_budget + spec.gamma + 1
        if longest > model.spec.max_position_embeddings:
            raise CapacityError(
                f"draft {model.spec.name} holds {model.spec.max_position_embeddings} positions; a "
                "budget of "
                f"{spec.draft_budget} with gamma {spec.gamma} needs {longest}"
            )
        self.budget = spec.draft_budget
        self._num_sinks = spec.num_sink_tokens
        self._ring_size = self.budget - self._num_sinks
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
        self._first_shift_B = torch.zeros(
            engine.batch_size, dtype=torch.long, device=model.device
        )
        self._slots_S = torch.arange(self.cache.num_slots, device=model.device)
        self._workspace = Workspace()

    def begin(self) -> None:
        self._num_behind = 0
        self.admit()

    def admit(self) -> None:
        count = self.engine.num_active
        for row, length in enumerate(self.engine.host_lengths.tolist()):
            self._prefill(row, length)
        for first, now in zip(self._first_sinks, self._sinks(count), strict=True):
            first[:, :count] = now
        self._first_shift_B[:count] = self._shift_B

    def _prefill(self, row: int, length: int) -> None:
        """Processes a sequence's sinks and the last tokens that its budget holds."""
        num_kept = min(length, self.budget)
        if not num_kept:
            return
        positions_T = torch.arange(length - num_kept, length, device=self._model.device)
        kept_T = positions_T.clone()
        kept_T[: self._num_sinks] = self._slots_S[: min(self._num_sinks, num_kept)]
        slots_T = self._slots_of(kept_T)
        attention = WindowedPrefillPass(
            self.cache,
            row=row,
            positions_T=positions_T,
            slots_T=slots_T,
        )
        self._model.hidden(self.engine.tokens_BS[row : row + 1, kept_T], attention)

    @property
    def _shift_B(self) -> Tensor:
        """The position at which each sequence's window begins."""
        return (self.engine.lengths_B - self.budget).clamp_min(0)

    def _slots_of(self, positions: Tensor) -> Tensor:
        return ring_slots(positions, self._num_sinks, self._ring_size, self._num_sinks)

    def _sinks(self, count: int) -> list[Tensor]:
        """The sinks' keys of the first sequences, views [L, B, K, S, D] of each block's layers."""
        sinks = []
        for block in self.cache.blocks:
            sinks.append(block.data[:, 0, :count, :, : self._num_sinks])
        return sinks

    def _move_sinks(self) -> None:
        """Rotates the sinks' keys from their first positions to where the window begins now."""
        count = self.engine.num_active
        lengths_B = self.engine.lengths_B
        # sinks that have not moved yet may still be coming in
        if self.engine.host_lengths.min() <= self.budget:
            is_still_B = lengths_B <= self.budget
            for first, now in zip(self._first_sinks, self._sinks(count), strict=True):
                first[:, :count] = torch.where(
                    is_still_B[:, None, None, None],
                    now,
                    first[:, :count],
                )
        moved_B = self._shift_B - self._first_shift_B[:count]
        # [B, 1, 1, D/2], for every head and sink alike
        rotations = self._model.turns(moved_B[:, None])
        for block, first, now in zip(
            self.cache.blocks,
            self._first_sinks,
            self._sinks(count),
            strict=True,
        ):
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
        check_gamma(gamma, budget=self.budget, num_recent=self._ring_size)
        if self._num_behind > 1:  # the target went on alone
            self.begin()
        self._move_sinks()
        builder = ModelProposalBuilder(self._model, self.sampling, uniforms)
        tokens_BT = self.engine.pending_B[:, None]
        for step in range(gamma):
            is_catching_up = self._num_behind > 0 and step == 0
            attention = self._pass(step, is_catching_up=is_catching_up)
            if is_catching_up:
                tokens_BT = self.engine.tokens_BS.gather(1, attention.positions_BT)
            tokens_BT = builder.step(tokens_BT, attention)
        return builder.build()

    def _pass(self, step: int, *, is_catching_up: bool) -> SlotsPass:
        lengths_B1 = self.engine.lengths_B[:, None]
        positions_BT = lengths_B1 + step
        num_slots = self.budget + step + 1
        slots_BT = self._slots_S[num_slots - 1].expand_as(positions_BT)
        if is_catching_up:
            ring_B1 = self._slots_of(lengths_B1 - 1)
            positions_BT = torch.cat((lengths_B1 - 1, positions_BT), dim=1)
            slots_BT = torch.cat((ring_B1, slots_BT), dim=1)
        is_unfilled = bool(self.engine.host_lengths.min() < self.budget)
        last_BT = torch.full_like(positions_BT, num_slots - 1)
        if is_catching_up:
            # the token before the pending one does not see it
            last_BT[:, 0].fill_(self.budget - 1)
        num_open = num_slots
        if is_unfilled or is_catching_up:
            num_open = 0
        empty = None
        if is_unfilled:
            empty = (self.engine.lengths_B, self.budget)
        visible = Visible(
            last_BT=last_BT, stop=num_slots, num_open=num_open, empty=empty
        )
        workspace = self._workspace
        return SlotsPass(
            self.cache,
            positions_BT=positions_BT,
            slots_BT=slots_BT,
            visible=visible,
            workspace=workspace,
        )

    def accept(self, outcome: VerifiedBlock, gamma: int) -> None:
        if gamma == 0:
            return
        steps_T = self._slots_S[:gamma]
        block_BT = (self.budget + steps_T).expand(self.engine.num_active, -1)
        positions_BT = self.engine.lengths_B[:, None] + steps_T
        is_kept_BT = steps_T <= outcome.num_accepted_B[:, None]
        slots_BT = torch.where(is_kept_BT, self._slots_of(positions_BT), block_BT)
        self.cache.copy_tokens(slots_BT, self.cache, block_BT)

    def swap(self, first: int, second: int) -> None:
        self.cache.swap(first, second)
        there = [first, second]
        back = [second, first]
        self._first_shift_B[there] = self._first_shift_B[back]
        for first_keys in self._first_sinks:
            first_keys[:, there] = first_keys[:, back]


class FewerRanksDrafter(Drafter):
    """A draft model on fewer ranks than the target: the first ones draft with `inner`, all of them
    learn the result. On the others `inner` and `draft_tp` are None. Per step one broadcast carries
    the drafted tokens (and, when sampling, their probabilities); after acceptance, when sampling,
    the draft's distribution at the rejected position only is scattered, divided like the target's
    head."""

    def __init__(
        self,
        engine: Engine,
        inner: Drafter | None,
        draft_tp: TensorParallel | None,
    ) -> None:
        super().__init__(engine)
        self._inner = inner
        self._draft_tp = draft_tp
        self._tp = engine.model.tp

    def begin(self) -> None:
        if self._inner is not None:
            self._inner.start(self.sampling)

    def admit(self) -> None:
        if self._inner is not None:
            self._inner.admit()

    def follow(self, parts: Sequence[PromptPart], states_NF: Tensor | None) -> None:
        if self._inner is not None:
            self._inner.follow(parts, states_NF)

    def propose(self, gamma: int, uniforms: Tensor | None) -> Proposal:
        own = None
        if self._inner is not None:
            own = self._inner.propose(gamma, uniforms)
        if self.sampling.is_greedy:
            parts = 1
        else:
            parts = 2
        # Token ids are exact in float64, so one message can carry both.
        packed = torch.empty(
            parts,
            self.engine.num_active,
            gamma,
            dtype=torch.float64,
            device=self.engine.model.device,
        )
        if own is not None:
            packed[0] = own.tokens_BT
            if own.token_probabilities_BT is not None:
                packed[1] = own.token_probabilities_BT
        self._tp.broadcast(packed)
        tokens_BT = packed[0].long()
        if self.sampling.is_greedy:
            return Proposal(tokens_BT=tokens_BT)
        return Proposal(
            tokens_BT=tokens_BT,
            token_probabilities_BT=packed[1].float(),
            distribution=lambda position_B: self._scatter(own, position_B),
        )

    def _scatter(self, own: Proposal | None, position_B: Tensor) -> Tensor:
        """This rank's part of each sequence's draft distribution at a position, [B, V / target
        ranks].
        """
        whole_BV = None
        if own is not None and self._draft_tp is not None:
            assert own.distribution is not None
            draft_BV = own.distribution(position_B)
            whole_BV = self._draft_tp.all_gather_last(draft_BV)
        size = self.engine.model.spec.vocab_size // self._tp.size
        like = torch.empty(len(position_B), size, device=position_B.device)
        if self._tp.rank > 0:
            whole_BV = None
        return self._tp.scatter(whole_BV, like)

    def accept(self, outcome: VerifiedBlock, gamma: int) -> None:
        if self._inner is not None:
            self._inner.accept(outcome, gamma)

    def count(self, num_accepted: np.ndarray, gamma: int) -> None:
        if self._inner is not None:
            self._inner.count(num_accepted, gamma)

    def swap(self, first: int, second: int) -> None:
        if self._inner is not None:
            self._inner.swap(first, second)
