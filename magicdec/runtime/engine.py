"""The target model with its KV cache and the state of each sequence: how long it is, and the token
it waits to process.

A sequence of n tokens has n - 1 of them in the cache; the last, *pending*, is the next pass's first
input. Every step, autoregressive or speculative, is therefore the same: feed the pending token (and
drafted ones), keep what is accepted.

Sequences live in slots; those still decoding occupy the first `num_active`, so a finished one costs
nothing.

Shape suffixes: B sequences, T query tokens, A query heads, K KV heads, D head_dim, S slots, P parts
(keys and values, or one latent). In this cache the slot of a token is its position, or that modulo
the size of a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from magicdec.errors import CapacityError, ConfigError
from magicdec.runtime.attention import Scoring, Workspace, decode_attention, prefill_attention
from magicdec.runtime.kernels import Visible
from magicdec.runtime.kv_cache import KVCache, keys_and_values
from magicdec.runtime.transformer import Taps, Transformer
from magicdec.specs.speculation import MAX_GAMMA

DEFAULT_PREFILL_CHUNK = 4096
MAX_BACK = 32
"""Tokens before a sequence's end that a pass may begin with where layers keep their windows only:
SnapKV's observation window, as a rule."""


AttentionObserver = Callable[[int, Tensor], None]
"""Called by a pass, for each layer that attends to everything, with (layer, the attention that each
query pays to each slot, summed over the query heads of a KV head, [B, K, T, S])."""


class PrefillFollower(Protocol):
    """Sees the states of the prompts that an engine prefills, as a draft head has to."""

    @property
    def reads(self) -> Sequence[int]:
        """The states that it reads (transformer.Taps), in the order in which they are joined."""

    def follow(self, slot: int, start: int, next_T: Tensor, states_TF: Tensor) -> None:
        """Part of the prompt in a slot, from position `start` on: the target's states at each
        position, and the token that follows it.
        """


class PrefillPass:
    """`num_tokens` tokens of one sequence, after `num_past` cached ones."""

    def __init__(self, cache: KVCache, *, row: int, num_past: int, num_tokens: int) -> None:
        self._cache, self._row = cache, row
        self._num_past = num_past
        self._stop = num_past + num_tokens
        self.positions_BT = torch.arange(num_past, self._stop, device=cache.device)[None]

    def attend(self, layer: int, query_BTAD: Tensor, kv_BTPKD: Tensor, scoring: Scoring) -> Tensor:
        ring = self._cache.ring(layer)
        if ring is not None:
            return self._attend_in_ring(layer, ring, query_BTAD, kv_BTPKD, scoring)
        self._cache.write_row(
            layer, self._row, slice(self._num_past, self._stop), kv_BTPKD[0].permute(1, 2, 0, 3)
        )
        keys, values = self._cache.read(layer, slice(self._row, self._row + 1), self._stop)
        return prefill_attention(query_BTAD, keys, values, num_past=self._num_past, scoring=scoring)

    def _attend_in_ring(
        self, layer: int, ring: int, query_BTAD: Tensor, kv_BTPKD: Tensor, scoring: Scoring
    ) -> Tensor:
        """Over the cached tokens that the first query sees and the pass's own, side by side; of
        these the ring then takes the last. Masks count from the first cached token that is seen,
        which is where a chunk begins."""
        num_seen = scoring.num_seen_before(self._num_past)
        kv_PBKTD = kv_BTPKD.permute(2, 0, 3, 1, 4)
        past_PBKTD = self._cache.last_of_row(layer, self._row, self._num_past, num_seen)
        keys, values = keys_and_values(
            torch.cat((past_PBKTD, kv_PBKTD), dim=3), self._cache.kept[layer]
        )
        output = prefill_attention(query_BTAD, keys, values, num_past=num_seen, scoring=scoring)
        slots_T = self.positions_BT[0, -ring:] % ring
        self._cache.write_row(layer, self._row, slots_T, kv_PBKTD[:, 0, :, -ring:])
        return output


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
        static_shapes: bool = False,
    ) -> None:
        self._cache = cache
        self._workspace = workspace
        self._observer = observer
        self._write = write
        self._shortest = int(host_lengths.min())
        self._longest = int(host_lengths.max())
        self._num_tokens, self._static_shapes = num_tokens, static_shapes
        self.positions_BT = lengths_B[:, None] + torch.arange(num_tokens, device=lengths_B.device)
        self._visible: dict[tuple[int | None, int | None], Visible] = {}
        self._slots: dict[int | None, Tensor] = {None: self.positions_BT}

    def _visible_to(self, scoring: Scoring, ring: int | None) -> Visible:
        """The slots that the queries of a layer see; made once for all layers that see as far."""
        window, chunk = scoring.window, scoring.chunk
        if (window, chunk) not in self._visible:
            stop = self._longest + self._num_tokens
            if window is None:
                first = 0
            else:
                first = max(0, self._shortest + 1 - window)
            is_hidden_early = (window is not None and stop > window) or chunk is not None
            if is_hidden_early:
                num_open = 0
            else:
                num_open = self._shortest + 1
            if self._static_shapes or ring is not None:
                stop = ring or self._cache.num_slots
                first = 0
                num_open = 0
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

    def attend(self, layer: int, query_BTAD: Tensor, kv_BTPKD: Tensor, scoring: Scoring) -> Tensor:
        ring = self._cache.ring(layer)
        if self._write:
            if (
                ring is not None and ring not in self._slots
            ):  # made once for all layers with a ring of this size
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

    With `static_shapes` (None: on a CUDA device) a pass reads the whole extent of the cache, and
    the lengths on the device hide what is beyond a sequence's end: no shape depends on the lengths,
    as captured graphs need it.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        batch_size: int,
        max_len: int,
        max_gamma: int = MAX_GAMMA,
        max_back: int = MAX_BACK,
        static_shapes: bool | None = None,
    ) -> None:
        limit = model.spec.max_position_embeddings
        if max_len > limit:
            raise CapacityError(
                f"{model.spec.name} holds {limit} tokens of prompt and output together, not {max_len}"
            )
        if batch_size < 1 or max_len < 1:
            raise ConfigError(f"batch size {batch_size} and length {max_len} must be at least 1")
        self.model = model
        self.batch_size = batch_size
        self.max_len = max_len
        self.max_gamma = max_gamma
        self.max_back = max_back
        if static_shapes is None:
            self.static_shapes = model.device.type == "cuda"
        else:
            self.static_shapes = static_shapes
        num_slots = max_len + max_gamma  # a block drafted at the very end reaches this far
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
        self.prompts: list[list[int]] = []
        self.sequence_of_slot = np.arange(batch_size)
        self._lengths = np.zeros(batch_size, dtype=np.int64)
        self._device_lengths = torch.zeros(batch_size, dtype=torch.long, device=model.device)
        self._tokens = torch.zeros(batch_size, num_slots + 1, dtype=torch.long, device=model.device)
        self.prefill_count = 0
        self._is_noise = False
        self._followers: list[ref[PrefillFollower]] = []

    @property
    def is_noise(self) -> bool:
        """Whether what is cached is seeded noise, and no text."""
        return self._is_noise

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
        return self.tokens_BS.gather(1, self.lengths_B[:, None]).squeeze(1)

    @torch.inference_mode()
    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        chunk: int = DEFAULT_PREFILL_CHUNK,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Caches all but the last token of each prompt, `chunk` tokens at a time; `progress` hears
        of each prompt done.
        Raises CapacityError when a prompt is empty, or longer than the engine's `max_len`
        allows."""
        if len(prompts) != self.batch_size:
            raise ConfigError(f"{len(prompts)} prompts given for a batch of {self.batch_size}")
        self._check_prompts(prompts)
        self.prefill_count += 1
        self._is_noise = False
        self.sequence_of_slot = np.arange(self.batch_size)
        self.prompts = [list(prompt) for prompt in prompts]
        for slot, prompt in enumerate(self.prompts):
            self._prefill_slot(slot, prompt, chunk, self._present_followers)
            if progress is not None:
                progress(slot)
        self.num_active = self.batch_size

    def _check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        vocab_size, shortest = self.model.spec.vocab_size, self.model.shortest_prompt
        for index, prompt in enumerate(prompts):
            if 1 <= len(prompt) < shortest <= self.max_len:
                raise CapacityError(
                    f"prompt {index} has {len(prompt)} tokens and may grow to {self.max_len}, and the factors of this "
                    f"model's longrope change at {shortest}: let all end before, or give prompts of at least that many"
                )
            if not 1 <= len(prompt) <= self.max_len:
                raise CapacityError(
                    f"prompt {index} has {len(prompt)} tokens; between 1 and {self.max_len} fit here"
                )
            if not 0 <= min(prompt) <= max(prompt) < vocab_size:
                raise ConfigError(
                    f"prompt {index} has a token outside the model's vocabulary of {vocab_size}"
                )

    def follow_with(self, follower: PrefillFollower) -> None:
        """Shows a follower the prompts of every batch from now on, while somebody keeps it."""
        self._followers.append(ref(follower))

    @property
    def _present_followers(self) -> list[PrefillFollower]:
        """In the order in which they came, which is the same on every rank."""
        present = [follower() for follower in self._followers]
        return [follower for follower in present if follower is not None]

    @torch.inference_mode()
    def show_again(self, slot: int, follower: PrefillFollower) -> None:
        """Prefills an active sequence's cached tokens once more, for a follower that came late."""
        tokens = self._tokens[slot, : int(self._lengths[slot]) + 1].tolist()
        self._prefill_slot(slot, tokens, DEFAULT_PREFILL_CHUNK, [follower])

    def _prefill_slot(
        self, slot: int, prompt: list[int], chunk: int, followers: Sequence[PrefillFollower]
    ) -> None:
        """Caches a prompt's tokens but the last, for all that follow to see."""
        reads = {read for follower in followers for read in follower.reads}
        if not reads:
            taps = None
        else:
            taps = Taps(reads)
        tokens = torch.tensor(prompt, device=self.model.device)
        num_cached = len(prompt) - 1
        for start in range(0, num_cached, chunk):
            part = tokens[None, start : min(start + chunk, num_cached)]
            attention = PrefillPass(self.cache, row=slot, num_past=start, num_tokens=part.shape[1])
            self.model.hidden(part, attention, taps)
            next_tokens = tokens[start + 1 : start + 1 + part.shape[1]]
            for follower in followers:
                if taps is not None and follower.reads:
                    states = taps.joined(follower.reads)[0]
                    follower.follow(slot, start, next_tokens, states)
        self._lengths[slot] = self._device_lengths[slot] = num_cached
        self._tokens[slot, : len(prompt)] = tokens

    @torch.inference_mode()
    def replace_first(
        self,
        sequence: int,
        prompt: Sequence[int],
        *,
        chunk: int = DEFAULT_PREFILL_CHUNK,
        followers: Sequence[PrefillFollower] = (),
    ) -> None:
        """A new sequence, with a number of its own, takes slot 0, for these followers to see.
        Snapshots of before are void.
        """
        self._check_prompts([prompt])
        self._is_noise = False
        self.prefill_count += 1
        self.sequence_of_slot[0] = sequence
        self._prefill_slot(0, list(prompt), chunk, followers)

    def fill_with_noise(self, lengths: Sequence[int], *, seed: int = 0) -> None:
        """Makes the first sequences of the batch active, each with that many tokens of seeded noise
        cached: for timing, where what is cached does not matter. The noise is drawn on the first
        call."""
        if (
            not 1 <= len(lengths) <= self.batch_size
            or not 1 <= min(lengths) <= max(lengths) <= self.max_len
        ):
            raise ConfigError(
                f"noise of {max(lengths, default=0)} tokens in {len(lengths)} sequences does not fit"
            )
        if not self._is_noise:
            self.cache.fill_with_noise(seed)
            self._is_noise = True
        self.prefill_count += 1
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
            rings=tuple(data[:, :, order].to("cpu", copy=True) for data in self.cache.rings),
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Every sequence active again, as it was when the snapshot was taken."""
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
        return self.model.logits_of(self.model.hidden(tokens_BT, attention, taps))

    def first_bad_layer(self, tokens_BT: Tensor) -> int | None:
        """The first layer whose output holds NaN or infinity in a repetition of this pass; None
        when none does.
        """
        layers = range(1, len(self.model.layers) + 1)
        taps = Taps(layers)
        self.model.hidden(tokens_BT, self.decode_pass(tokens_BT.shape[1]), taps)
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
    def probe(self, num_tokens: int, observer: AttentionObserver, *, num_back: int) -> None:
        """Shows the observer how `num_tokens` cached tokens, the first of them `num_back` before
        the end, attend.

        Nothing is written. What a sequence shorter than `num_back` shows, from its beginning, means
        nothing.

        Raises ConfigError where a layer's window no longer holds what they see.
        """
        if num_back > self.max_back and self.cache.rings:
            raise ConfigError(
                f"{self.model.spec.name} keeps the windows of the last {self.max_back} tokens here; observe at most so "
                f"many, not {num_back}"
            )
        attention = self.decode_pass(num_tokens, ahead=-num_back, observer=observer, write=False)
        self.model.hidden(self.tokens_BS.gather(1, attention.positions_BT), attention)

    def advance(self, emitted_BT: Tensor, num_emitted_B: Tensor) -> None:
        """Keeps the first `num_emitted` tokens of the last pass's block; the last of them becomes
        pending. What `emitted_BT` holds beyond them is overwritten by the next block. `count` has
        to follow."""
        steps_T = torch.arange(1, emitted_BT.shape[1] + 1, device=emitted_BT.device)
        self.tokens_BS.scatter_(1, self.lengths_B[:, None] + steps_T, emitted_BT)
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
