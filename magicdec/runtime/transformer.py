"""One decoder-only transformer, composed of layers of the kinds in specs/layers.py.

Where keys and values are kept, and which of them a query sees, is the business of the
`AttentionPass` it is given: the same weights serve prefill, decoding, verification and a self-draft
over a sparse cache.

Shape suffixes: B sequences, T query tokens, H hidden, V vocabulary of this shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.runtime import kernels
from magicdec.runtime.distributed import TensorParallel
from magicdec.runtime.kv_cache import TokenStorage
from magicdec.runtime.layers import (
    ColumnParallelLinear,
    HiddenNorm,
    ShardedExperts,
    ShardedMLP,
    VocabParallelEmbedding,
    add_and_norm_,
)
from magicdec.runtime.mixers import AttentionPass, Mixer, RotaryEmbedding
from magicdec.specs.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class TransformerLayer:
    """A mixer and a feed-forward, added to the residual stream, with norms of what they read and of
    what they write. A block may have only one of them. Without a norm of its own in parallel, the
    feed-forward reads what the mixer reads."""

    mixer: Mixer | None = None
    mlp: ShardedMLP | ShardedExperts | None = None
    input_norm: HiddenNorm | None = None
    mixed_norm: HiddenNorm | None = None
    mlp_norm: HiddenNorm | None = None
    output_norm: HiddenNorm | None = None
    is_parallel: bool = False


NORMED = -1
"""The output of the final norm, among the states that are read."""


class Taps:
    """Takes states of the residual stream out of a pass: after each of these numbers of layers, or
    NORMED."""

    def __init__(self, reads: Iterable[int]) -> None:
        self._reads = frozenset(reads)
        self._states: dict[int, Tensor] = {}

    def see(
        self, num_layers: int, hidden_BTH: Tensor, delta_BTH: Tensor | None
    ) -> None:
        """The stream after `num_layers` layers, in the parts that `through_layers` has."""
        if num_layers not in self._reads:
            return
        if delta_BTH is None:
            self._states[num_layers] = hidden_BTH.clone()
        else:
            self._states[num_layers] = hidden_BTH + delta_BTH

    def see_normed(self, normed_BTH: Tensor) -> None:
        if NORMED in self._reads:
            self._states[NORMED] = normed_BTH

    def joined(self, reads: Sequence[int]) -> Tensor:
        """The last pass's states side by side, [B, T, F]."""
        states = [self._states[read] for read in reads]
        if len(states) == 1:
            return states[0]
        return torch.cat(states, dim=-1)


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """This shard's weights and how they are applied. Built by weights.load_model."""

    spec: ModelSpec
    tp: TensorParallel
    kept: dict[int, TokenStorage]
    """Storage of a token in each layer that has a mixer."""
    embedding: VocabParallelEmbedding
    layers: tuple[TransformerLayer, ...]
    norm: HiddenNorm
    head: ColumnParallelLinear
    rotaries: tuple[RotaryEmbedding, ...]

    @property
    def device(self) -> torch.device:
        return self.embedding.weight_VH.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight_VH.dtype

    @property
    def can_capture(self) -> bool:
        """Whether a CUDA graph can hold a pass. Where no kernel takes a mixture's experts together,
        the host has to know what the router chose."""
        weight = self.embedding.weight_VH
        has_kernels = not self.spec.is_moe or kernels.can_fuse(weight)
        return weight.is_cuda and has_kernels and self.tp.can_capture

    def reserve(self, num_positions: int, *, longest: int) -> None:
        """Prepares rotations of positions 0..num_positions-1, for sequences of at most `longest`
        tokens.
        """
        for rotary in self.rotaries:
            rotary.reserve(num_positions, longest=longest)

    @property
    def shortest_prompt(self) -> int:
        """Tokens that a prompt needs for the lengths that were reserved."""
        return max((rotary.shortest for rotary in self.rotaries), default=1)

    def turns(self, distances_BT: Tensor) -> list[Tensor]:
        """Rotations that move rotated keys on by these distances, by rotary embedding."""
        return [rotary.turns(distances_BT) for rotary in self.rotaries]

    def hidden(
        self,
        tokens_BT: Tensor,
        attention: AttentionPass,
        taps: Taps | None = None,
    ) -> Tensor:
        """The last layer's output after the final norm, [B, T, H]. `taps` take states on the
        way."""
        rotations = [rotary[attention.positions_BT] for rotary in self.rotaries]
        hidden_BTH = self.embedding(tokens_BT)
        if self.spec.embedding_scale != 1.0:
            hidden_BTH = hidden_BTH * self.spec.embedding_scale
        if taps is not None:
            taps.see(0, hidden_BTH, None)
        hidden_BTH, delta_BTH = through_layers(
            self.layers,
            hidden_BTH,
            None,
            attention=attention,
            rotations=rotations,
            scale=self.spec.residual_scale,
            taps=taps,
        )
        normed_BTH = add_and_norm_(self.norm, hidden_BTH, delta_BTH)
        if taps is not None:
            taps.see_normed(normed_BTH)
        return normed_BTH

    def logits_of(self, hidden: Tensor) -> Tensor:
        """This shard's part of the next-token logits of normed hidden states, [.., V]."""
        logits = self.head(hidden)
        spec = self.spec
        if spec.logit_scale != 1.0:
            logits = logits * spec.logit_scale
        if spec.logit_softcap is not None:
            logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
        return logits


def through_layers(
    layers: Sequence[TransformerLayer],
    hidden_BTH: Tensor,
    delta_BTH: Tensor | None,
    *,
    attention: AttentionPass,
    rotations: Sequence[Tensor],
    scale: float = 1.0,
    taps: Taps | None = None,
    first_is_mixed: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The residual stream behind the layers, as two parts that are still to be added: a layer's
    output is added where the next norm reads it, so one kernel does both. `hidden_BTH` is changed
    in place; `delta_BTH` is what is still to be added to it. With `first_is_mixed` that is what the
    first layer's mixer wrote.
    """
    for index, layer in enumerate(layers):
        is_mixed = first_is_mixed and index == 0
        if layer.mixer is not None and not is_mixed:
            x_BTH = add_and_norm_(layer.input_norm, hidden_BTH, delta_BTH)
            mixed_BTH = layer.mixer(x_BTH, index, attention, rotations)
            delta_BTH = _written(layer.mixed_norm, mixed_BTH, scale)
        if layer.mlp is not None and layer.is_parallel:
            assert delta_BTH is not None
            delta_BTH = delta_BTH + _written(None, layer.mlp(x_BTH), scale)
        elif layer.mlp is not None:
            x_BTH = add_and_norm_(layer.mlp_norm, hidden_BTH, delta_BTH)
            delta_BTH = _written(layer.output_norm, layer.mlp(x_BTH), scale)
        if taps is not None:
            taps.see(index + 1, hidden_BTH, delta_BTH)
    return hidden_BTH, delta_BTH


def _written(norm: HiddenNorm | None, output_BTH: Tensor, scale: float) -> Tensor:
    """A sublayer's contribution to the residual stream."""
    if norm is None:
        delta_BTH = output_BTH
    else:
        delta_BTH = norm(output_BTH)
    if scale == 1.0:
        return delta_BTH
    return delta_BTH * scale
