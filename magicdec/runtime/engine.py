"""The target model with its KV cache and the state of each sequence: how long it is, and the token
it waits to process.

A sequence of n tokens has n - 1 of them in the cache; the last, *pending*, is the next pass's first
input. Every step, autoregressive or speculative, is therefore the same: feed the pending token (and
drafted ones), keep what is accepted.

Sequences live in slots; those still decoding occupy the first `num_active`, so a finished one costs
nothing. Prompts that are being prefilled lie behind them.

Shape suffixes: B sequences, T query tokens, A query heads, K KV heads, D head_dim, S slots, P parts
(keys and values, or one latent). In this cache the slot of a token is its position, or that modulo
the size of a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from magicdec.errors import CapacityError, ConfigError
from magicdec.runtime.attention import Scoring, Workspace, decode_attention
from magicdec.runtime.kernels import Visible
from magicdec.runtime.kv_cache import KVCache
from magicdec.runtime.prefill import (
    PREFILL_TOKENS,
    PrefillFollower,
    PrefillPass,
    Prompt,
    PromptPart,
    joined,
    shares,
)
from magicdec.runtime.transformer import Taps, Transformer
from magicdec.specs.speculation import MAX_GAMMA

MAX_BACK = 32
"""Tokens before a sequence's end that a pass may begin with where layers keep their windows only:
SnapKV's observation window, as a rule."""


AttentionObserver = Callable[[int, Tensor], None]
"""Called by a pass, for each layer that attends to everything, with (layer, the attention that each
query pays to each slot, summed over the query heads of a KV head, [B, K, T, S])."""


class DecodePass:
    """A pass over equally many tokens of each of the first B sequences, after their own cached
    lengths. Slots that a shorter sequence or an earlier token must not see are hidden from it.
    `write` is False for a pass over tokens whose keys and values are cached already. With
    `static_shapes` nothing depends on the host's lengths."""

    def __init__(
        self,
        cache: KVCache,
        *,
        lengths_B: Tensor,
        host_lengths: np.ndarray,
        num_tokens: int,
        workspace: Workspace,
        observer: AttentionObserver | None = None,
        write: bool = True,
        static_shapes: bool,
    ) -> None:
        self._cache = cache
        self._workspace = workspace
        self._observer = observer
        self._write = write
        self._shortest = int(host_lengths.min())
        self._longest = int(host_lengths.max())
        self._num_tokens, self._static_shapes = num_tokens, static_shapes
        steps_T = torch.arange(num_tokens, device=lengths_B.device)
        self.positions_BT = lengths_B[:, None] + steps_T
        self._visible: dict[tuple[int | None, int | None], Visible] = {}
        self._slots: dict[int | None, Tensor] = {None: self.positions_BT}

    def _visible_to(self, scoring: Scoring, ring: int | None) -> Visible:
        """The slots that the queries of a layer see; made once for all layers that see as far."""
        window, chunk = scoring.window, scoring.chunk
        if (window, chunk) not in self._visible:
            first = 0
            num_open = 0
            if self._static_shapes or ring is not None:
                stop = ring or self._cache.num_slots
            else:
                stop = self._longest + self._num_tokens
                if window is not None:
                    first = max(0, self._shortest + 1 - window)
                is_seen_early = window is None or stop <= window
                if is_seen_early and chunk is None:
                    num_open = self._shortest + 1
            self._visible[window, chunk] = Visible(
                last_BT=self.positions_BT,
                first=first,
                stop=stop,
                num_open=num_open,
                window=window,
                chunk=chunk,
                ring=ring,
            )
        return self._visible[window, chunk]

    def attend(
        self, layer: int, query_BTAD: Tensor, kv_BTPKD: Tensor, scoring: Scoring
    ) -> Tensor:
        ring = self._cache.ring(layer)
        if self._write:
            # made once for all layers with a ring of this size
            if ring is not None and ring not in self._slots:
                self._slots[ring] = self.positions_BT % ring
            self._cache.write(layer, self._slots[ring], kv_BTPKD)
        keys, values = self._cache.read(layer, slice(len(query_BTAD)))
        observer = None
        if scoring.window is None and scoring.chunk is None:
            observer = self._observer
        output, paid = decode_attention(
            query_BTAD,
            keys,
            values,
            self._visible_to(scoring, ring),
            scoring=scoring,
            workspace=self._workspace,
            probabilities=observer is not None,
        )
        if observer is not None:
            assert paid is not None
            observer(layer, paid)
        return output


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state after a prefill. Of the cache, only rings are copied, to the host: elsewhere
    decoding writes behind the prompts only."""

    lengths: np.ndarray
    """Cached tokens of each sequence."""
    prefill_count: int
    rings: tuple[Tensor, ...]


class Engine:
    """`batch_size` sequences of at most `max_len` tokens each (prompt and generated together).

    A layer of a window keeps so many tokens, and as many more as a pass may write beyond
    (`max_gamma`) or begin before (`max_back`) a sequence's end.

    On a CUDA device, with `static_shapes`, a pass reads the whole extent of the cache, and the
    lengths on the device hide what is beyond a sequence's end: no shape depends on the lengths, as
    captured graphs need it.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        batch_size: int,
        max_len: int,
        max_gamma: int = MAX_GAMMA,
        max_back: int = MAX_BACK,
    ) -> None:
        limit = model.spec.max_position_embeddings
        if max_len > limit:
            raise CapacityError(
                f"{model.spec.name} holds {limit} tokens of prompt and output together, not "
                f"{max_len}"
            )
        if batch_size < 1 or max_len < 1:
            raise ConfigError(
                f"batch size {batch_size} and length {max_len} must be at least 1"
            )
        self.model = model
        self.batch_size = batch_size
        self.max_len = max_len
        self.max_gamma = max_gamma
        self.max_back = max_back
        self.static_shapes = model.device.type == "cuda"
        # a block drafted at the very end reaches this far
        num_slots = max_len + max_gamma
        model.reserve(num_slots, longest=max_len)
        self.cache = KVCache(
            model.kept,
            batch_size=batch_size,
            num_slots=num_slots,
            dtype=model.dtype,
            device=model.device,
            spare=max_gamma + max_back,
        )
        self.workspace = Workspace()
        self.num_active = 0
        self._prompts: list[Prompt] = []
        """Not yet active, the earliest first."""
        self.sequence_of_slot = np.arange(batch_size)
        self._lengths = np.zeros(batch_size, dtype=np.int64)
        self._device_lengths = torch.zeros(
            batch_size, dtype=torch.long, device=model.device
        )
        self._tokens = torch.zeros(
            batch_size, num_slots + 1, dtype=torch.long, device=model.device
        )
        self.prefill_count = 0
        self.is_noise = False
        """Whether what is cached is seeded noise, and no text."""
        self._followers: list[ref[PrefillFollower]] = []

    @property
    def lengths_B(self) -> Tensor:
        """Cached tokens of each active sequence, on the device."""
        return self._device_lengths[: self.num_active]

    @property
    def host_lengths(self) -> np.ndarray:
        """Cached tokens of each active sequence on the host, kept in step without reading the
        device.
        """
        return self._lengths[: self.num_active]

    @property
    def tokens_BS(self) -> Tensor:
        """Each active sequence's tokens by position: the cached ones, the pending one, and then
        nothing of meaning.
        """
        return self._tokens[: self.num_active]

    @property
    def pending_B(self) -> Tensor:
        """The token each active sequence waits to process."""
        last_B1 = self.lengths_B[:, None]
        return self.tokens_BS.gather(1, last_B1).squeeze(1)

    @torch.inference_mode()
    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        chunk: int = PREFILL_TOKENS,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Caches all but the last token of each prompt, in passes over at most `chunk` tokens;
        `progress` hears of each prompt done.
        Raises CapacityError when a prompt is empty, or longer than the engine's `max_len`
        allows."""
        if len(prompts) != self.batch_size:
            raise ConfigError(
                f"{len(prompts)} prompts given for a batch of {self.batch_size}"
            )
        self._check_prompts(prompts)
        self._prompts.clear()
        self.num_active = 0
        for sequence, prompt in enumerate(prompts):
            self._begin(sequence, prompt)
        while self._prompts:
            # in the order in which they came, which is the same on every rank
            present = [follower() for follower in self._followers]
            followers = [follower for follower in present if follower is not None]
            self.prefill_part(chunk, followers)
            while self.admit_first() is not None:
                if progress is not None:
                    progress(self.num_active - 1)

    def begin_prompt(self, sequence: int, prompt: Sequence[int]) -> None:
        """A new sequence, with a number of its own, takes a free slot: `prefill_part` caches it.
        Snapshots of before are void.
        """
        self._check_prompts([prompt])
        self._begin(sequence, prompt)

    def _begin(self, sequence: int, prompt: Sequence[int]) -> None:
        taken = {prompt.slot for prompt in self._prompts}
        slot = min(set(range(self.num_active, self.batch_size)) - taken)
        self.is_noise = False
        self.prefill_count += 1
        self.sequence_of_slot[slot] = sequence
        self._tokens[slot, : len(prompt)] = torch.tensor(
            prompt, device=self.model.device
        )
        self._prompts.append(Prompt(slot=slot, length=len(prompt)))

    @property
    def num_prompts(self) -> int:
        """Prompts that are being prefilled."""
        return len(self._prompts)

    @torch.inference_mode()
    def prefill_part(
        self, max_tokens: int, followers: Sequence[PrefillFollower]
    ) -> None:
        """One pass over at most so many tokens of the prompts that were begun, for these followers
        to see.
        """
        self._take(shares(self._prompts, max_tokens), followers)

    def admit_first(self) -> tuple[int, int] | None:
        """Makes the earliest prompt active, where all of it is cached: the two slots that were
        exchanged for that, of which the second is the last active one.
        """
        if not self._prompts or self._prompts[0].num_left:
            return None
        prompt = self._prompts.pop(0)
        self._lengths[prompt.slot] = self._device_lengths[prompt.slot] = (
            prompt.num_cached
        )
        place = self.num_active
        self.exchange(prompt.slot, place)
        self.num_active += 1
        return prompt.slot, place

    def _check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        vocab_size, shortest = self.model.spec.vocab_size, self.model.shortest_prompt
        for index, prompt in enumerate(prompts):
            if 1 <= len(prompt) < shortest <= self.max_len:
                raise CapacityError(
                    f"prompt {index} has {len(prompt)} tokens and may grow to {self.max_len}, and "
                    "the factors of this "
                    f"model's longrope change at {shortest}: let all end before, or give prompts "
                    "of at least that many"
                )
            if not 1 <= len(prompt) <= self.max_len:
                raise CapacityError(
                    f"prompt {index} has {len(prompt)} tokens; between 1 and {self.max_len} fit "
                    "here"
                )
            if not 0 <= min(prompt) <= max(prompt) < vocab_size:
                raise ConfigError(
                    f"prompt {index} has a token outside the model's vocabulary of {vocab_size}"
                )

    def follow_with(self, follower: PrefillFollower) -> None:
        """Shows a follower the prompts of every batch from now on, while somebody keeps it."""
        self._followers.append(ref(follower))

    @torch.inference_mode()
    def show_again(self, slot: int, follower: PrefillFollower) -> None:
        """Prefills an active sequence's cached tokens once more, for a follower that came late."""
        prompt = Prompt(slot=slot, length=int(self._lengths[slot]) + 1)
        while prompt.num_left:
            self._take(shares([prompt], PREFILL_TOKENS), [follower])

    def _take(
        self, taken: Sequence[tuple[Prompt, int]], followers: Sequence[PrefillFollower]
    ) -> None:
        """Caches the next tokens of prompts, of each so many."""
        if not taken:
            return
        parts = []
        for prompt, count in taken:
            start = prompt.num_cached
            prompt.num_cached += count
            tokens_T = self._tokens[prompt.slot, start : prompt.num_cached + 1]
            part = PromptPart(
                slot=prompt.slot,
                start=start,
                tokens_T=tokens_T[:-1],
                next_T=tokens_T[1:],
            )
            parts.append(part)
        self.cache_parts(parts, followers)

    @torch.inference_mode()
    def cache_parts(
        self, parts: Sequence[PromptPart], followers: Sequence[PrefillFollower] = ()
    ) -> None:
        """One pass over parts of prompts, this engine's or those of another with the same slots."""
        reads = {read for follower in followers for read in follower.reads}
        if not reads:
            taps = None
        else:
            taps = Taps(reads)
        passes = []
        for part in parts:
            each = PrefillPass(
                self.cache,
                row=part.slot,
                num_past=part.start,
                num_tokens=part.num_tokens,
            )
            passes.append(each)
        tokens_N = torch.cat([part.tokens_T for part in parts])
        self.model.hidden(tokens_N[None], joined(passes), taps)
        for follower in followers:
            states_NF = None
            if taps is not None and follower.reads:
                states_NF = taps.joined(follower.reads)[0]
            follower.follow(parts, states_NF)

    def fill_with_noise(self, lengths: Sequence[int], *, seed: int = 0) -> None:
        """Makes the first sequences of the batch active, each with that many tokens of seeded noise
        cached: for timing, where what is cached does not matter. The noise is drawn on the first
        call."""
        if (
            not 1 <= len(lengths) <= self.batch_size
            or not 1 <= min(lengths) <= max(lengths) <= self.max_len
        ):
            raise ConfigError(
                f"noise of {max(lengths, default=0)} tokens in {len(lengths)} sequences does not "
                "fit"
            )
        if not self.is_noise:
            self.cache.fill_with_noise(seed)
            self.is_noise = True
        self.prefill_count += 1
        self._prompts.clear()
        self.sequence_of_slot = np.arange(self.batch_size)
        self.num_active = len(lengths)
        self._lengths[: len(lengths)] = lengths
        self._device_lengths.copy_(torch.from_numpy(self._lengths))
        self._tokens.zero_()

    def snapshot(self) -> Snapshot:
        """The state to return to; take it after `prefill`."""
        order = np.argsort(self.sequence_of_slot)
        return Snapshot(
            lengths=self._lengths[order],
            prefill_count=self.prefill_count,
            rings=tuple(
                data[:, :, order].to("cpu", copy=True) for data in self.cache.rings
            ),
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Every sequence active again, as it was when the snapshot was taken."""
        self._prompts.clear()
        assert snapshot.prefill_count == self.prefill_count, (
            "the prompts of this snapshot have been overwritten"
        )
        self._lengths = snapshot.lengths[self.sequence_of_slot].copy()
        self._device_lengths.copy_(torch.from_numpy(self._lengths))
        for data, held in zip(self.cache.rings, snapshot.rings, strict=True):
            data.copy_(held[:, :, self.sequence_of_slot])
        self.num_active = self.batch_size

    @torch.inference_mode()
    def forward(
        self,
        tokens_BT: Tensor,
        *,
        observer: AttentionObserver | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """One pass of all active sequences over their pending token and what is drafted after it.
        Returns this shard's logits [B, T, V]. Lengths do not change: `advance` says how much of it
        stays."""
        attention = self.decode_pass(tokens_BT.shape[1], observer=observer)
        hidden_BTH = self.model.hidden(tokens_BT, attention, taps)
        return self.model.logits_of(hidden_BTH)

    def first_bad_layer(self, tokens_BT: Tensor) -> int | None:
        """The first layer whose output holds NaN or infinity in a repetition of this pass; None
        when none does.
        """
        layers = range(1, len(self.model.layers) + 1)
        taps = Taps(layers)
        attention = self.decode_pass(tokens_BT.shape[1])
        self.model.hidden(tokens_BT, attention, taps)
        for layer in layers:
            if not taps.joined([layer]).isfinite().all():
                return layer - 1
        return None

    def decode_pass(
        self,
        num_tokens: int,
        *,
        ahead: int = 0,
        of: Engine | None = None,
        observer: AttentionObserver | None = None,
        write: bool = True,
    ) -> DecodePass:
        """A pass over tokens behind the cached ones of each active sequence (of another engine with
        the same ones), from `ahead` tokens further on; or, for a negative number, before their
        end."""
        engine = of or self
        lengths_B, host_lengths = engine.lengths_B, engine.host_lengths
        if ahead:
            lengths_B = lengths_B + ahead
            host_lengths = host_lengths + ahead
        if ahead < 0:
            lengths_B = lengths_B.clamp_min(0)
            host_lengths = np.maximum(host_lengths, 0)
        return DecodePass(
            self.cache,
            lengths_B=lengths_B,
            host_lengths=host_lengths,
            num_tokens=num_tokens,
            workspace=self.workspace,
            observer=observer,
            write=write,
            static_shapes=self.static_shapes and write,
        )

    @torch.inference_mode()
    def probe(
        self, num_tokens: int, observer: AttentionObserver, *, num_back: int
    ) -> None:
        """Shows the observer how `num_tokens` cached tokens, the first of them `num_back` before
        the end, attend.

        Nothing is written. What a sequence shorter than `num_back` shows, from its beginning, means
        nothing.

        Raises ConfigError where a layer's window no longer holds what they see.
        """
        if num_back > self.max_back and self.cache.rings:
            raise ConfigError(
                f"{self.model.spec.name} keeps the windows of the last {self.max_back} tokens "
                "here; observe at most so "
                f"many, not {num_back}"
            )
        attention = self.decode_pass(
            num_tokens, ahead=-num_back, observer=observer, write=False
        )
        tokens_BT = self.tokens_BS.gather(1, attention.positions_BT)
        self.model.hidden(tokens_BT, attention)

    def advance(self, emitted_BT: Tensor, num_emitted_B: Tensor) -> None:
        """Keeps the first `num_emitted` tokens of the last pass's block; the last of them becomes
        pending. What `emitted_BT` holds beyond them is overwritten by the next block. `count` has
        to follow."""
        num_tokens = emitted_BT.shape[1]
        steps_T = torch.arange(1, num_tokens + 1, device=emitted_BT.device)
        positions_BT = self.lengths_B[:, None] + steps_T
        self.tokens_BS.scatter_(1, positions_BT, emitted_BT)
        self.lengths_B.add_(num_emitted_B)

    def count(self, num_emitted: np.ndarray) -> None:
        """Keeps the lengths that the host knows in step with `advance`."""
        self.host_lengths[:] += num_emitted

    def retire(self, slot: int) -> int:
        """Ends the sequence in an active slot. Returns the slot that it was exchanged with (the
        last active one).
        """
        self.num_active -= 1
        self.exchange(slot, self.num_active)
        return self.num_active

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Makes the sequence in slot 0 the only active one for as long as the context lasts."""
        num_active = self.num_active
        self.num_active = 1
        try:
            yield
        finally:
            self.num_active = num_active

    def exchange(self, first: int, second: int) -> None:
        """Exchanges all that two slots hold."""
        if first == second:
            return
        self.cache.swap(first, second)
        there = [first, second]
        back = [second, first]
        for array in (self._lengths, self.sequence_of_slot):
            array[there] = array[back]
        for tensor in (self._device_lengths, self._tokens):
            tensor[there] = tensor[back]
        for prompt in self._prompts:
            if prompt.slot in there:
                prompt.slot = back[there.index(prompt.slot)]
