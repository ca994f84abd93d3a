"""Heads that draft token by token, each step on the one before it: EAGLE, EAGLE-3, and multi-token
prediction.

The entry at position p combines the token at p + 1 with what is known of position p: the target's
states, which `fuse` prepares; or, past the verified text, the head's own output of the step before.
Its output predicts the token at p + 2.

Shape suffixes: B sequences, T entries, H the head's hidden size, F the states that it reads, V
tokens of this shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.runtime.heads.layout import HeadLayout
from magicdec.runtime.heads.vocabulary import ReducedVocabulary
from magicdec.runtime.kv_cache import TokenStorage
from magicdec.runtime.layers import (
    ColumnParallelLinear,
    HiddenNorm,
    VocabParallelEmbedding,
    add_and_norm_,
)
from magicdec.runtime.mixers import AttentionPass, RotaryEmbedding
from magicdec.runtime.transformer import TransformerLayer, through_layers


@dataclass(frozen=True, kw_only=True)
class Head(ABC):
    """This shard's weights of a trained head."""

    layout: HeadLayout
    embedding: VocabParallelEmbedding
    layers: tuple[TransformerLayer, ...]
    rotaries: tuple[RotaryEmbedding, ...]
    output: Callable[[Tensor], Tensor]
    """This shard's part of the logits of normed outputs: the head's own, or the target's."""
    vocabulary: ReducedVocabulary | None = None

    @property
    def kept(self) -> dict[int, TokenStorage]:
        """Storage of an entry in each layer."""
        kept = {}
        for index, layer in enumerate(self.layers):
            if layer.mixer is not None:
                kept[index] = layer.mixer.kept
        return kept

    def reserve(self, num_positions: int, *, longest: int) -> None:
        """Prepares rotations of positions 0..num_positions-1. A head reads beyond the length that
        it was trained for: its drafts are then worse, and the output is the same.
        """
        for rotary in self.rotaries:
            rotary.reserve(num_positions, longest=longest)

    def rotations(self, attention: AttentionPass) -> list[Tensor]:
        return [rotary[attention.positions_BT] for rotary in self.rotaries]

    @abstractmethod
    def fuse(self, states: Tensor) -> Tensor:
        """Inputs of the head from the target's states, [.., F] to [.., H]."""


@dataclass(frozen=True, kw_only=True)
class ChainHead(Head):
    """A head that drafts token by token."""

    @abstractmethod
    def step(
        self, tokens_BT: Tensor, fused_BTH: Tensor, attention: AttentionPass
    ) -> Tensor:
        """The entries' outputs, which the next step reads as `fused_BTH`: [B, T, H]."""

    @abstractmethod
    def logits(self, output: Tensor) -> Tensor:
        """This shard's part of the logits of an output, [.., V]."""


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """EAGLE-3's: the states of several layers become one of the head's size."""

    norms: Sequence[HiddenNorm]
    """None; one of all states together; or one of each."""
    linear: ColumnParallelLinear

    def __call__(self, states: Tensor) -> Tensor:
        if self.norms:
            parts = states.chunk(len(self.norms), dim=-1)
            normed = [norm(part) for norm, part in zip(self.norms, parts, strict=True)]
            states = torch.cat(normed, dim=-1)
        return self.linear(states)


@dataclass(frozen=True, kw_only=True)
class Eagle3Head(ChainHead):
    """EAGLE-3 (arXiv 2503.01840): states of three layers; the first layer's attention reads the
    token's embedding and them side by side. Also P-EAGLE (arXiv 2602.01469), where `mask_states_F`
    stands for states that are not known yet, and the whole block is one pass.
    """

    fusion: Fusion
    token_norm: HiddenNorm
    state_norm: HiddenNorm
    norm: HiddenNorm
    mask_states_F: Tensor | None = None

    def fuse(self, states: Tensor) -> Tensor:
        return self.fusion(states)

    def step(
        self, tokens_BT: Tensor, fused_BTH: Tensor, attention: AttentionPass
    ) -> Tensor:
        rotations = self.rotations(attention)
        normed_BTH = self.state_norm(fused_BTH)
        embedded_BTH = self.token_norm(self.embedding(tokens_BT))
        inputs = torch.cat((embedded_BTH, normed_BTH), dim=-1)
        residual_BTH = fused_BTH.clone()
        if self.layout.norm_before_residual:
            residual_BTH = normed_BTH
        mixer = self.layers[0].mixer
        assert mixer is not None
        mixed_BTH = mixer(inputs, 0, attention, rotations)
        hidden_BTH, delta_BTH = through_layers(
            self.layers,
            residual_BTH,
            mixed_BTH,
            attention=attention,
            rotations=rotations,
            first_is_mixed=True,
        )
        if self.layout.norm_output:
            return add_and_norm_(self.norm, hidden_BTH, delta_BTH)
        assert delta_BTH is not None
        return hidden_BTH.add_(delta_BTH)

    def logits(self, output: Tensor) -> Tensor:
        if self.layout.norm_output:
            return self.output(output)
        return self.output(self.norm(output))


@dataclass(frozen=True, kw_only=True)
class EagleHead(ChainHead):
    """EAGLE (arXiv 2401.15077): predicts the target's last normed state, of which the target's own
    output layer makes logits. Its first layer has no norm before its attention.
    """

    fusion: ColumnParallelLinear
    """Projection of the token's embedding and the state, side by side."""

    def fuse(self, states: Tensor) -> Tensor:
        return states

    def step(
        self, tokens_BT: Tensor, fused_BTH: Tensor, attention: AttentionPass
    ) -> Tensor:
        inputs = torch.cat((self.embedding(tokens_BT), fused_BTH), dim=-1)
        hidden_BTH, delta_BTH = through_layers(
            self.layers,
            self.fusion(inputs),
            None,
            attention=attention,
            rotations=self.rotations(attention),
        )
        assert delta_BTH is not None
        return hidden_BTH.add_(delta_BTH)

    def logits(self, output: Tensor) -> Tensor:
        return self.output(output)


@dataclass(frozen=True, kw_only=True)
class PredictionHead(ChainHead):
    """A module of multi-token prediction (arXiv 2412.19437): a layer like the target's over the
    projection of the normed embedding and the normed state.
    """

    token_norm: HiddenNorm
    state_norm: HiddenNorm
    projection: ColumnParallelLinear
    norm: HiddenNorm
    feeds_normed: bool
    """Whether the next step reads the normed output (Qwen3-Next) or the one before it
    (DeepSeek-V3)."""
    hides_first: bool
    """Whether the first position's embedding is left out, as engines do for DeepSeek-V3."""

    def fuse(self, states: Tensor) -> Tensor:
        return states

    def step(
        self, tokens_BT: Tensor, fused_BTH: Tensor, attention: AttentionPass
    ) -> Tensor:
        embedded_BTH = self.embedding(tokens_BT)
        if self.hides_first:
            is_shown_BT = attention.positions_BT > 0
            embedded_BTH = embedded_BTH * is_shown_BT[..., None]
        tokens_BTH = self.token_norm(embedded_BTH)
        states_BTH = self.state_norm(fused_BTH)
        inputs = torch.cat((tokens_BTH, states_BTH), dim=-1)
        hidden_BTH, delta_BTH = through_layers(
            self.layers,
            self.projection(inputs),
            None,
            attention=attention,
            rotations=self.rotations(attention),
        )
        if self.feeds_normed:
            return add_and_norm_(self.norm, hidden_BTH, delta_BTH)
        assert delta_BTH is not None
        return hidden_BTH.add_(delta_BTH)

    def logits(self, output: Tensor) -> Tensor:
        if self.feeds_normed:
            return self.output(output)
        return self.output(self.norm(output))
