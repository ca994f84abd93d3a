"""A trained head drafts, over a cache of its own with an entry for each position of the text.

The entry at position p needs the target's states at p and the token at p + 1, so a verification
that accepts some tokens of a block makes new entries known: those of its own positions. They wait,
as the *block*, for the head's next pass, which processes them and gives the first drafted token; an
entry of a rejected token is computed too, and overwritten before anything sees it. Entries past the
text, of drafted tokens, read the head's own output instead, and are computed anew when the
target's states are known.

    text        x0 .. xL       xL pending: the target's states are known at positions 0 .. L-1
    head        entries 0 .. L-2 in the cache, and the block's up to L-1
    first pass  entries of the block; the output at L-1 predicts the token at L+1
    later ones  one entry each at L, L+1, .. of the token just drafted

A prompt's entries are computed during the target's prefill, whose states the engine shows. With a
draft budget only sinks and a window of entries are kept (head_window.py).

Shape suffixes: B sequences, T entries, N entries of parts of prompts, H the head's hidden size, F
the states that it reads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.errors import ConfigError
from magicdec.runtime.attention import Workspace
from magicdec.runtime.drafters.base import Drafter, ProposalBuilder
from magicdec.runtime.drafters.head_window import (
    HeadWindow,
    WindowDecodePass,
    WindowPrefillPass,
)
from magicdec.runtime.engine import DecodePass, Engine
from magicdec.runtime.heads.chain import ChainHead, Eagle3Head, Head
from magicdec.runtime.heads.parallel import BlockHead, BlockPass
from magicdec.runtime.kv_cache import KVCache
from magicdec.runtime.mixers import AttentionPass
from magicdec.runtime.prefill import PrefillPass, PromptPart, joined
from magicdec.runtime.sampling import Proposal, VerifiedBlock
from magicdec.runtime.transformer import Taps
from magicdec.specs.speculation import SpeculationSpec

NOISE_SEED = 1
NOT_FOLLOWED = -1


class HeadDrafter(Drafter):
    """The part that all heads share: the cache, the block that waits, and prompts."""

    def __init__(self, engine: Engine, spec: SpeculationSpec, head: Head) -> None:
        super().__init__(engine)
        self._check(engine, spec, head)
        model = engine.model
        self.head = head
        self.reads = head.layout.reads
        self.taps = Taps(self.reads)
        # of a block, and masks behind it
        num_slots = engine.cache.num_slots + engine.max_gamma + 1
        head.reserve(num_slots, longest=engine.max_len)
        self._window = None
        if spec.draft_budget is not None:
            self._window = HeadWindow(
                num_sinks=spec.num_sink_tokens,
                size=spec.draft_budget - spec.num_sink_tokens,
                ahead=2 * engine.max_gamma + 2,
            )
            num_slots = min(num_slots, self._window.num_slots)
        if self._window is not None and num_slots < self._window.num_slots:
            self._window = None  # which would hold every entry
        self.cache = KVCache(
            head.kept,
            batch_size=engine.batch_size,
            num_slots=num_slots,
            dtype=model.dtype,
            device=model.device,
        )
        self._workspace = Workspace()
        self._rows_B = torch.arange(engine.batch_size, device=model.device)
        size = head.layout.spec.hidden_size
        states = (engine.batch_size, engine.max_gamma + 1, size)
        self._block_BTH = torch.zeros(states, dtype=model.dtype, device=model.device)
        """Inputs of the head from the target's states at the block's positions."""
        self._first_B = torch.zeros(
            engine.batch_size, dtype=torch.long, device=model.device
        )
        """The block's first position."""
        self._host_first = np.zeros(engine.batch_size, dtype=np.int64)
        self._width = 1
        """Positions of the block."""
        self._last_BH = torch.zeros_like(self._block_BTH[:, 0])
        """The last position of each prompt, as `_block_BTH`."""
        self._sequence_of_slot = np.arange(engine.batch_size)
        self._followed = np.full(engine.batch_size, NOT_FOLLOWED, dtype=np.int64)
        """Cached tokens of the prompt that was followed in each slot."""
        self._prompts: dict[int, list[Tensor]] = {}
        """The windows of prompts, by sequence: decoding overwrites them."""
        engine.follow_with(self)

    @staticmethod
    def _check(engine: Engine, spec: SpeculationSpec, head: Head) -> None:
        most = head.layout.most_drafts
        if most is not None and spec.gamma > most:
            raise ConfigError(
                f"head {head.layout.name} was trained on blocks that propose {most} tokens; "
                f"use a gamma of at most {most}, not {spec.gamma}"
            )
        if spec.draft_budget is not None and head.layout.block_size is not None:
            raise ConfigError(
                f"--draft-budget is not run for heads of {head.layout.method}, whose window is "
                "trained in; leave it out"
            )
        if spec.draft_tp_size not in (None, engine.model.tp.size):
            raise ConfigError(
                f"a head is on all ranks of its target, not on {spec.draft_tp_size} of "
                f"{engine.model.tp.size}; leave --draft-tp out"
            )

    def begin(self) -> None:
        """Aligns the slots with the engine's, whose sequences other runs may have exchanged."""
        engine = self.engine
        for slot, sequence in enumerate(engine.sequence_of_slot.tolist()):
            slots = np.flatnonzero(self._sequence_of_slot == sequence)
            if len(slots):
                self._exchange(slot, int(slots[0]))
        if engine.is_noise:
            self.cache.fill_with_noise(NOISE_SEED)
            self._sequence_of_slot = engine.sequence_of_slot.copy()
            self._followed[: engine.num_active] = engine.host_lengths
        self.admit()

    def admit(self) -> None:
        engine = self.engine
        count = engine.num_active
        for slot in range(count):
            is_same = self._sequence_of_slot[slot] == engine.sequence_of_slot[slot]
            if not is_same or self._followed[slot] != engine.host_lengths[slot]:
                engine.show_again(slot, self)
                self._followed[slot] = engine.host_lengths[slot]
                self._sequence_of_slot[slot] = engine.sequence_of_slot[slot]
            if self._window is not None:
                self._keep_prompt(slot)
        self._block_BTH[:count, 0] = self._last_BH[:count]
        self._first_B[:count] = (engine.lengths_B - 1).clamp_min(0)
        self._host_first[:count] = np.maximum(engine.host_lengths - 1, 0)
        if count == engine.batch_size:
            self._width = 1

    def _keep_prompt(self, slot: int) -> None:
        """Copies the window of a prompt that was just followed, or takes it from the copy."""
        sequence = int(self._sequence_of_slot[slot])
        if sequence in self._prompts:
            self.cache.restore_row(slot, self._prompts[sequence])
        elif sequence < self.engine.batch_size:  # others come from a queue, once
            self._prompts[sequence] = self.cache.row(slot)

    def follow(self, parts: Sequence[PromptPart], states_NF: Tensor | None) -> None:
        assert states_NF is not None
        fused_NH = self.head.fuse(states_NF)
        sequence_of_slot = self.engine.sequence_of_slot
        count = 0
        for part in parts:
            count += part.num_tokens
            self._last_BH[part.slot] = fused_NH[count - 1]
            self._followed[part.slot] = part.stop
            self._sequence_of_slot[part.slot] = sequence_of_slot[part.slot]
            self._prompts.pop(int(sequence_of_slot[part.slot]), None)
        self._prefill(parts, fused_NH)

    @abstractmethod
    def _prefill(self, parts: Sequence[PromptPart], fused_NH: Tensor) -> None:
        """Caches the entries of parts of prompts."""

    @abstractmethod
    def _catch_up(self, width: int) -> object:
        """Caches the block's entries."""

    def graph_key(self, gamma: int) -> Hashable:
        """The width that a step processes: at one gamma that of its blocks, from the first on."""
        return max(self._width, gamma + 1)

    def accept(self, outcome: VerifiedBlock, gamma: int) -> None:
        assert self.taps is not None
        engine = self.engine
        count = engine.num_active
        if gamma == 0:  # nothing was proposed, so the last block still waits
            self._catch_up(max(self._width, 1))
        self._first_B[:count] = engine.lengths_B
        states = self.taps.joined(self.reads)
        self._block_BTH[:count, : gamma + 1] = self.head.fuse(states)

    def count(self, num_accepted: np.ndarray, gamma: int) -> None:
        self._host_first[: len(num_accepted)] = self.engine.host_lengths
        self._width = gamma + 1

    def swap(self, first: int, second: int) -> None:
        self._exchange(first, second)

    def _exchange(self, first: int, second: int) -> None:
        if first == second:
            return
        self.cache.swap(first, second)
        there = [first, second]
        back = [second, first]
        for tensor in (self._block_BTH, self._first_B, self._last_BH):
            tensor[there] = tensor[back]
        for array in (self._host_first, self._sequence_of_slot, self._followed):
            array[there] = array[back]

    def _pass(
        self,
        lengths_B: Tensor,
        host_lengths: np.ndarray,
        num_tokens: int,
    ) -> DecodePass | WindowDecodePass:
        """A pass over entries from these positions on."""
        if self._window is not None:
            return WindowDecodePass(
                self.cache,
                self._window,
                lengths_B=lengths_B,
                num_tokens=num_tokens,
                workspace=self._workspace,
            )
        return DecodePass(
            self.cache,
            lengths_B=lengths_B,
            host_lengths=host_lengths,
            num_tokens=num_tokens,
            workspace=self._workspace,
            static_shapes=self.engine.static_shapes,
        )

    def _prompt_pass(self, parts: Sequence[PromptPart]) -> AttentionPass:
        """A pass over entries of parts of prompts."""
        passes: list[AttentionPass] = []
        for part in parts:
            where = {
                "row": part.slot,
                "num_past": part.start,
                "num_tokens": part.num_tokens,
            }
            if self._window is None:
                passes.append(PrefillPass(self.cache, **where))
            else:
                passes.append(WindowPrefillPass(self.cache, self._window, **where))
        return joined(passes)

    def _block_pass(self, num_tokens: int) -> DecodePass | WindowDecodePass:
        """A pass over entries from the block's first on."""
        count = self.engine.num_active
        first_B = self._first_B[:count]
        return self._pass(first_B, self._host_first[:count], num_tokens)

    @property
    def _last_valid_B(self) -> Tensor:
        """The place in the block of the last position whose next token is known."""
        first_B = self._first_B[: self.engine.num_active]
        last_B = self.engine.lengths_B - 1
        return (last_B - first_B).clamp_min(0)

    def _tokens_behind(self, positions_BT: Tensor) -> Tensor:
        """The tokens after these positions."""
        tokens_BS = self.engine.tokens_BS
        last = tokens_BS.shape[1] - 1
        next_BT = (positions_BT + 1).clamp_max(last)
        return tokens_BS.gather(1, next_BT)

    def _builder(self, uniforms: Tensor | None) -> ProposalBuilder:
        tp = self.engine.model.tp
        return ProposalBuilder(tp, self.sampling, uniforms, self.head.vocabulary)


class EntryDrafter(HeadDrafter):
    """The part that heads share whose context is entries of a token and the state before it."""

    head: ChainHead

    def _prefill(self, parts: Sequence[PromptPart], fused_NH: Tensor) -> None:
        next_N = torch.cat([part.next_T for part in parts])
        self.head.step(next_N[None], fused_NH[None], self._prompt_pass(parts))


class ChainDrafter(EntryDrafter):
    """Drafts token by token: EAGLE, EAGLE-3 and multi-token prediction."""

    def _catch_up(self, width: int) -> Tensor:
        """Caches the block's entries. Returns the head's output at the last valid one."""
        attention = self._block_pass(width)
        tokens_BT = self._tokens_behind(attention.positions_BT)
        count = len(tokens_BT)
        block_BTH = self._block_BTH[:count, :width]
        output_BTH = self.head.step(tokens_BT, block_BTH, attention)
        return output_BTH[self._rows_B[:count], self._last_valid_B]

    def propose(self, gamma: int, uniforms: Tensor | None) -> Proposal:
        engine = self.engine
        builder = self._builder(uniforms)
        output_BH = self._catch_up(max(self._width, gamma + 1))
        token_B = builder.choose(self.head.logits(output_BH))
        for step in range(gamma - 1):
            attention = self._pass(
                engine.lengths_B + step, engine.host_lengths + step, 1
            )
            token_B1 = token_B[:, None]
            output_BTH = self.head.step(token_B1, output_BH[:, None], attention)
            output_BH = output_BTH[:, 0]
            token_B = builder.choose(self.head.logits(output_BH))
        return builder.build()


class ParallelEagleDrafter(EntryDrafter):
    """P-EAGLE: behind the block's entries stand masked ones, and all are one pass."""

    head: Eagle3Head

    def __init__(self, engine: Engine, spec: SpeculationSpec, head: Eagle3Head) -> None:
        super().__init__(engine, spec, head)
        assert head.mask_states_F is not None
        self._mask_H = head.fuse(head.mask_states_F)
        """The input of the head where the target's states are not known."""

    def _catch_up(self, width: int) -> Tensor:
        return self._entries(width, 0)[0]

    def _entries(self, width: int, num_masked: int) -> tuple[Tensor, Tensor]:
        """The outputs of the block's entries and of masked ones behind the last valid one, [B, T,
        H], and the place of that one, [B, 1].
        """
        head = self.head
        mask_token = head.layout.mask_token
        assert mask_token is not None
        attention = self._block_pass(width + num_masked)
        tokens_BT = self._tokens_behind(attention.positions_BT)
        count = len(tokens_BT)
        last_B1 = self._last_valid_B[:, None]
        places_T = torch.arange(width + num_masked, device=tokens_BT.device)
        is_masked_BT = places_T > last_B1
        block_BTH = self._block_BTH[:count, :width]
        fused_BTH = F.pad(block_BTH, (0, 0, 0, num_masked))
        fused_BTH = torch.where(is_masked_BT[..., None], self._mask_H, fused_BTH)
        tokens_BT = tokens_BT.masked_fill(is_masked_BT, mask_token)
        return head.step(tokens_BT, fused_BTH, attention), last_B1

    def propose(self, gamma: int, uniforms: Tensor | None) -> Proposal:
        builder = self._builder(uniforms)
        width = max(self._width, gamma + 1)
        outputs_BTH, last_B1 = self._entries(width, gamma - 1)
        last_B = last_B1[:, 0]
        rows_B = self._rows_B[: len(last_B)]
        for step in range(gamma):
            output_BH = outputs_BTH[rows_B, last_B + step]
            builder.choose(self.head.logits(output_BH))
        return builder.build()


class BlockDrafter(HeadDrafter):
    """DFlash and DSpark: the context's keys and values come from the target's states alone, and the
    pending token and masks behind it are one pass.
    """

    head: BlockHead

    def _prefill(self, parts: Sequence[PromptPart], fused_NH: Tensor) -> None:
        places = []
        for part in parts:
            places.append(torch.arange(part.start, part.stop, device=fused_NH.device))
        stored = self.head.context(fused_NH[None], torch.cat(places)[None])
        sizes = [part.num_tokens for part in parts]
        for layer, kv_BNPKD in enumerate(stored):
            by_part = kv_BNPKD[0].split(sizes)
            for part, positions_T, kv_TPKD in zip(parts, places, by_part, strict=True):
                self.cache.write_row(
                    layer, part.slot, positions_T, kv_TPKD.permute(1, 2, 0, 3)
                )

    def _catch_up(self, width: int) -> None:
        count = self.engine.num_active
        steps_T = torch.arange(width, device=self._first_B.device)
        positions_BT = self._first_B[:count, None] + steps_T
        block_BTH = self._block_BTH[:count, :width].contiguous()
        stored = self.head.context(block_BTH, positions_BT)
        for layer, kv_BTPKD in enumerate(stored):
            self.cache.write(layer, positions_BT, kv_BTPKD)

    def propose(self, gamma: int, uniforms: Tensor | None) -> Proposal:
        engine = self.engine
        layout = self.head.layout
        assert layout.mask_token is not None
        self._catch_up(max(self._width, gamma + 1))
        if layout.samples_anchor:
            num_tokens = gamma
        else:
            num_tokens = gamma + 1
        attention = BlockPass(
            self.cache,
            lengths_B=engine.lengths_B,
            host_lengths=engine.host_lengths,
            num_tokens=num_tokens,
            workspace=self._workspace,
            static_shapes=engine.static_shapes,
            is_window_causal=layout.is_window_causal,
        )
        tokens_BT = torch.full_like(attention.positions_BT, layout.mask_token)
        tokens_BT[:, 0] = engine.pending_B
        outputs_BTH = self.head.outputs(tokens_BT, attention)[:, num_tokens - gamma :]
        builder = self._builder(uniforms)
        token_B = engine.pending_B
        markov = self.head.markov
        for step in range(gamma):
            logits_BV = self.head.output(outputs_BTH[:, step])
            if markov is not None:
                logits_BV = logits_BV + markov(token_B)
            token_B = builder.choose(logits_BV)
        return builder.build()
