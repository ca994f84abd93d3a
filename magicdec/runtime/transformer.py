"""One decoder-only transformer, composed of layers of the kinds in specs/layers.py.

Where keys and values are kept, and which of them a query sees, is the business of the `AttentionPass` it is given: the
same weights serve prefill, decoding, verification and a self-draft over a sparse cache.

Shape suffixes: B sequences, T query tokens, H hidden, V vocabulary of this shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.runtime.distributed import TensorParallel
from magicdec.runtime.kv_cache import Kept
from magicdec.runtime.layers import MLP, ColumnParallelLinear, Experts, Norm, VocabParallelEmbedding, add_and_norm_
from magicdec.runtime.mixers import AttentionPass, Mixer, RotaryEmbedding
from magicdec.specs.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A mixer and a feed-forward, added to the residual stream, with norms of what they read and of what they write. A
    block may have only one of them. Without a norm of its own in parallel, the feed-forward reads what the mixer
    reads."""

    mixer: Mixer | None = None
    mlp: MLP | Experts | None = None
    input_norm: Norm | None = None
    mixed_norm: Norm | None = None
    mlp_norm: Norm | None = None
    output_norm: Norm | None = None
    is_parallel: bool = False


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """This shard's weights and how they are applied. Built by weights.load_model."""

    spec: ModelSpec
    tp: TensorParallel
    kept: dict[int, Kept]
    """Storage of a token in each layer that has a mixer."""
    embedding: VocabParallelEmbedding
    layers: tuple[Layer, ...]
    norm: Norm
    head: ColumnParallelLinear
    rotaries: tuple[RotaryEmbedding, ...]
    weight_dtype: str | None = None
    """The format of the linear layers' weights, where it is narrower than `dtype`."""

    @property
    def device(self) -> torch.device:
        return self.embedding.weight_VH.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight_VH.dtype

    @property
    def can_capture(self) -> bool:
        """Whether a CUDA graph can hold a pass."""
        return self.tp.can_capture and not self.spec.is_moe

    def reserve(self, num_positions: int, *, longest: int) -> None:
        """Prepares rotations of positions 0..num_positions-1, for sequences of at most `longest` tokens."""
        for rotary in self.rotaries:
            rotary.reserve(num_positions, longest=longest)

    @property
    def shortest_prompt(self) -> int:
        """Tokens that a prompt needs for the lengths that were reserved."""
        return max((rotary.shortest for rotary in self.rotaries), default=1)

    def turns(self, distances_BT: Tensor) -> list[Tensor]:
        """Rotations that move rotated keys on by so many positions, by rotary embedding."""
        return [rotary.turns(distances_BT) for rotary in self.rotaries]

    def hidden(
        self, tokens_BT: Tensor, attention: AttentionPass, inspect: Callable[[int, Tensor], None] | None = None
    ) -> Tensor:
        """The last layer's output after the final norm, [B, T, H]. `inspect` is shown each layer's output. What a layer
        adds to the residual stream is added where the next norm reads it: one kernel does both."""
        rotations = [rotary[attention.positions_BT] for rotary in self.rotaries]
        scale = self.spec.residual_scale
        hidden_BTH = self.embedding(tokens_BT)
        if self.spec.embedding_scale != 1.0:
            hidden_BTH = hidden_BTH * self.spec.embedding_scale
        delta_BTH: Tensor | None = None
        for index, layer in enumerate(self.layers):
            if layer.mixer is not None:
                x_BTH = add_and_norm_(layer.input_norm, hidden_BTH, delta_BTH)
                delta_BTH = _written(layer.mixed_norm, layer.mixer(x_BTH, index, attention, rotations), scale)
            if layer.mlp is not None and layer.is_parallel:
                assert delta_BTH is not None
                delta_BTH = delta_BTH + _written(None, layer.mlp(x_BTH), scale)
            elif layer.mlp is not None:
                x_BTH = add_and_norm_(layer.mlp_norm, hidden_BTH, delta_BTH)
                delta_BTH = _written(layer.output_norm, layer.mlp(x_BTH), scale)
            if inspect is not None:
                inspect(index, hidden_BTH if delta_BTH is None else hidden_BTH + delta_BTH)
        return add_and_norm_(self.norm, hidden_BTH, delta_BTH)

    def logits_of(self, hidden: Tensor) -> Tensor:
        """This shard's part of the next-token logits of normed hidden states, [.., V]."""
        logits, spec = self.head(hidden), self.spec
        if spec.logit_scale != 1.0:
            logits = logits * spec.logit_scale
        if spec.logit_softcap is not None:
            logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
        return logits


def _written(norm: Norm | None, output_BTH: Tensor, scale: float) -> Tensor:
    """A sublayer's contribution to the residual stream."""
    delta_BTH = output_BTH if norm is None else norm(output_BTH)
    return delta_BTH if scale == 1.0 else delta_BTH * scale
