"""Heads that draft a whole block in one pass over masked positions: DFlash and DSpark.

The target's states at each position, fused into one, are keys and values of the head's layers: that
is its context. A block is the pending token and mask tokens behind it, which see the context and
each other.

Shape suffixes: B sequences, T positions of a block, H the head's hidden size, R Markov rank, V
tokens of this shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from magicdec.runtime.attention import (
    Scoring,
    Workspace,
    decode_attention,
    reference_attention,
)
from magicdec.runtime.heads.chain import Head
from magicdec.runtime.kernels import Visible
from magicdec.runtime.kv_cache import KVCache
from magicdec.runtime.layers import ColumnParallelLinear, HiddenNorm, add_and_norm_
from magicdec.runtime.mixers import GroupedAttention
from magicdec.runtime.transformer import through_layers


@dataclass(frozen=True, kw_only=True)
class BlockVisible(Visible):
    """As `Visible`, and nothing before a slot of each sequence's own is seen."""

    floor_B: Tensor

    @cached_property
    def is_hidden_BTS(self) -> Tensor | None:
        start = self.first + self.num_open
        slots_S = torch.arange(start, self.stop, device=self.last_BT.device)
        is_behind_BTS = slots_S > self.last_BT[..., None]
        is_before_BTS = slots_S < self.floor_B[:, None, None]
        return is_behind_BTS | is_before_BTS


class BlockPass:
    """A block of each sequence behind its context, whose positions see each other; in layers with a
    window that is causal, where the head was trained so, and reaches as far back from every
    position as from the first.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        lengths_B: Tensor,
        host_lengths: np.ndarray,
        num_tokens: int,
        workspace: Workspace,
        static_shapes: bool,
        is_window_causal: bool,
    ) -> None:
        self._cache = cache
        self._workspace = workspace
        self._is_window_causal = is_window_causal
        self._lengths_B = lengths_B
        steps_T = torch.arange(num_tokens, device=lengths_B.device)
        self.positions_BT = lengths_B[:, None] + steps_T
        last_B1 = self.positions_BT[:, -1:]
        self._last_BT = last_B1.expand_as(self.positions_BT).contiguous()
        self._stop = int(host_lengths.max()) + num_tokens
        self._num_open = int(host_lengths.min())
        if static_shapes:
            self._stop = cache.num_slots
            self._num_open = 0

    def attend(
        self, layer: int, query_BTAD: Tensor, kv_BTPKD: Tensor, scoring: Scoring
    ) -> Tensor:
        self._cache.write(layer, self.positions_BT, kv_BTPKD)
        keys, values = self._cache.read(layer, slice(len(query_BTAD)))
        workspace = self._workspace
        if scoring.window is None:
            visible = Visible(
                last_BT=self._last_BT, stop=self._stop, num_open=self._num_open
            )
            return decode_attention(
                query_BTAD,
                keys,
                values,
                visible,
                scoring=scoring,
                workspace=workspace,
            )[0]
        windowed = BlockVisible(
            last_BT=self.positions_BT if self._is_window_causal else self._last_BT,
            stop=self._stop,
            floor_B=self._lengths_B - scoring.window,
        )
        plain = replace(scoring, window=None)
        return reference_attention(
            query_BTAD,
            keys,
            values,
            windowed,
            scoring=plain,
            workspace=workspace,
        )[0]


@dataclass(frozen=True, kw_only=True)
class Markov:
    """DSpark's Markov head: the token before shifts a position's logits, by a product of low rank."""

    tokens_VR: Tensor
    """Embeddings of the target's tokens; whole on every shard."""
    shift: ColumnParallelLinear

    def __call__(self, tokens_B: Tensor) -> Tensor:
        """The shift of the logits behind these tokens, [B, V]."""
        return self.shift(self.tokens_VR[tokens_B])


@dataclass(frozen=True, kw_only=True)
class BlockHead(Head):
    """DFlash (arXiv 2602.06036); with `markov`, DSpark."""

    fusion: ColumnParallelLinear
    state_norm: HiddenNorm
    norm: HiddenNorm
    markov: Markov | None = None

    def fuse(self, states: Tensor) -> Tensor:
        return self.state_norm(self.fusion(states))

    def context(self, fused_BTH: Tensor, positions_BT: Tensor) -> list[Tensor]:
        """Each layer's keys and values of the context, [B, T, P, K, D]."""
        rotations = [rotary[positions_BT] for rotary in self.rotaries]
        stored = []
        for layer in self.layers:
            assert isinstance(layer.mixer, GroupedAttention)
            stored.append(layer.mixer.keys_and_values(fused_BTH, rotations))
        return stored

    def outputs(self, tokens_BT: Tensor, attention: BlockPass) -> Tensor:
        """The normed outputs of a block's positions, [B, T, H]."""
        rotations: Sequence[Tensor] = self.rotations(attention)
        hidden_BTH, delta_BTH = through_layers(
            self.layers,
            self.embedding(tokens_BT),
            None,
            attention=attention,
            rotations=rotations,
        )
        return add_and_norm_(self.norm, hidden_BTH, delta_BTH)
