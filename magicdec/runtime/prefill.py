"""Prompts on their way into a cache, a pass over so many tokens at a time.

A pass takes parts of several prompts side by side, without padding: each part attends in its own
sequence's cache, and all else is done for all tokens at once. The earliest prompt goes first; what
room it leaves is the next one's.

Shape suffixes: B sequences, T tokens of a part, N of all parts, A query heads, P parts (keys and
values, or one latent), K KV heads, D head_dim, F states that are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from magicdec.runtime.attention import Scoring, prefill_attention
from magicdec.runtime.kv_cache import KVCache, keys_and_values
from magicdec.runtime.mixers import AttentionPass

PREFILL_TOKENS = 4096
"""Tokens of prompts in one pass, by default."""


@dataclass(kw_only=True)
class Prompt:
    """A prompt of which the first `num_cached` tokens are cached; its last one never is: it waits
    for the first step."""

    slot: int
    length: int
    num_cached: int = 0

    @property
    def num_left(self) -> int:
        return self.length - 1 - self.num_cached


@dataclass(frozen=True, kw_only=True)
class PromptPart:
    """Tokens of a prompt that one pass takes, from position `start` on."""

    slot: int
    start: int
    tokens_T: Tensor
    next_T: Tensor
    """The token after each."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_T)

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


class PrefillFollower(Protocol):
    """Sees the prompts that an engine prefills, as a draft head has to."""

    @property
    def reads(self) -> Sequence[int]:
        """The states that it reads (transformer.Taps), in the order in which they are joined."""

    def follow(self, parts: Sequence[PromptPart], states_NF: Tensor | None) -> None:
        """Sees the parts of prompts that one pass took, with the target's states of their tokens
        (None for a follower that reads no states)."""


class PrefillPass:
    """`num_tokens` tokens of one sequence, after `num_past` cached ones."""

    def __init__(
        self, cache: KVCache, *, row: int, num_past: int, num_tokens: int
    ) -> None:
        self._cache, self._row = cache, row
        self._num_past = num_past
        self._stop = num_past + num_tokens
        self.positions_BT = torch.arange(num_past, self._stop, device=cache.device)[
            None
        ]

    def attend(
        self, layer: int, query_BTAD: Tensor, kv_BTPKD: Tensor, scoring: Scoring
    ) -> Tensor:
        ring = self._cache.ring(layer)
        if ring is not None:
            return self._attend_in_ring(layer, ring, query_BTAD, kv_BTPKD, scoring)
        self._cache.write_row(
            layer,
            self._row,
            slice(self._num_past, self._stop),
            kv_BTPKD[0].permute(1, 2, 0, 3),
        )
        keys, values = self._cache.read(
            layer, slice(self._row, self._row + 1), self._stop
        )
        return prefill_attention(
            query_BTAD, keys, values, num_past=self._num_past, scoring=scoring
        )

    def _attend_in_ring(
        self,
        layer: int,
        ring: int,
        query_BTAD: Tensor,
        kv_BTPKD: Tensor,
        scoring: Scoring,
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
        output = prefill_attention(
            query_BTAD, keys, values, num_past=num_seen, scoring=scoring
        )
        slots_T = self.positions_BT[0, -ring:] % ring
        self._cache.write_row(layer, self._row, slots_T, kv_PBKTD[:, 0, :, -ring:])
        return output


class JoinedPass:
    """Passes over parts of several sequences as one over all their tokens, [1, N]."""

    def __init__(self, passes: Sequence[AttentionPass]) -> None:
        self._passes = passes
        positions = [part.positions_BT for part in passes]
        self._sizes = [positions_1T.shape[1] for positions_1T in positions]
        self.positions_BT = torch.cat(positions, dim=1)

    def attend(
        self, layer: int, query_BTAD: Tensor, kv_BTPKD: Tensor, scoring: Scoring
    ) -> Tensor:
        queries = query_BTAD.split(self._sizes, dim=1)
        stored = kv_BTPKD.split(self._sizes, dim=1)
        outputs = []
        for part, query_1TAD, kv_1TPKD in zip(
            self._passes, queries, stored, strict=True
        ):
            outputs.append(part.attend(layer, query_1TAD, kv_1TPKD, scoring))
        return torch.cat(outputs, dim=1)


def joined(passes: Sequence[AttentionPass]) -> AttentionPass:
    """One pass over the tokens of all."""
    if len(passes) == 1:
        return passes[0]
    return JoinedPass(passes)


def shares(prompts: Sequence[Prompt], max_tokens: int) -> list[tuple[Prompt, int]]:
    """The prompts that a pass over at most so many tokens takes, and of each how many tokens."""
    room = max_tokens
    taken = []
    for prompt in prompts:
        count = min(prompt.num_left, room)
        if count:
            taken.append((prompt, count))
        room -= count
    return taken
