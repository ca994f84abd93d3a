"""One decoder-only transformer for every dense family: Llama, Mistral, Qwen2, Qwen3 and their kin.

Where keys and values are kept, and which of them a query sees, is the business of the `AttentionPass` it is given: the
same weights serve prefill, decoding, verification and a self-draft over a sparse cache.

Shape suffixes: B sequences, T query tokens, H hidden, A query heads and K KV heads of this shard, D head_dim,
V vocabulary of this shard; the 2 is (key, value).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from magicdec.runtime.distributed import TensorParallel
from magicdec.runtime.layers import (
    MLP,
    ColumnParallelLinear,
    HeadNorm,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    rotate_,
)
from magicdec.specs.model import ModelSpec


class AttentionPass(Protocol):
    """One forward pass's view of a KV cache."""

    @property
    def positions_BT(self) -> Tensor:
        """The positions that the pass's tokens are rotated to."""

    def attend(self, layer: int, query_BTAD: Tensor, kv_BT2KD: Tensor) -> Tensor:
        """Stores the tokens' keys and values, and attends: [B, T, A·D]."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Attention and MLP, each behind a norm and added to the residual stream."""

    input_norm: RMSNorm
    qkv: ColumnParallelLinear
    output: RowParallelLinear
    post_attention_norm: RMSNorm
    mlp: MLP
    head_norm: HeadNorm | None = None


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """This shard's weights and how they are applied. Built by weights.load_model."""

    spec: ModelSpec
    tp: TensorParallel
    num_heads: int
    num_kv_heads: int
    embedding: VocabParallelEmbedding
    layers: tuple[Layer, ...]
    norm: RMSNorm
    head: ColumnParallelLinear
    rotary: RotaryEmbedding
    weight_dtype: str | None = None
    """The format of the linear layers' weights, where it is narrower than `dtype`."""

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def hidden(
        self, tokens_BT: Tensor, attention: AttentionPass, inspect: Callable[[int, Tensor], None] | None = None
    ) -> Tensor:
        """The last layer's output after the final norm, [B, T, H]. `inspect` is shown each layer's output.

        What a layer adds to the residual stream is added where the next norm reads it: one kernel does both.
        """
        rotation = self.rotary[attention.positions_BT]
        hidden_BTH = self.embedding(tokens_BT)
        delta_BTH: Tensor | None = None
        for index, layer in enumerate(self.layers):
            x_BTH = layer.input_norm.after_adding_(hidden_BTH, delta_BTH)
            query_BTAD, kv_BT2KD = self._query_and_kv(layer, x_BTH, rotation)
            delta_BTH = layer.output(attention.attend(index, query_BTAD, kv_BT2KD))
            delta_BTH = layer.mlp(layer.post_attention_norm.after_adding_(hidden_BTH, delta_BTH))
            if inspect is not None:
                inspect(index, hidden_BTH + delta_BTH)
        return self.norm.after_adding_(hidden_BTH, delta_BTH)

    def logits(self, tokens_BT: Tensor, attention: AttentionPass) -> Tensor:
        """This shard's part of the next-token logits after each token, [B, T, V]."""
        return self.head(self.hidden(tokens_BT, attention))

    def _query_and_kv(self, layer: Layer, x_BTH: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        heads = layer.qkv(x_BTH).unflatten(-1, (-1, self.spec.attention.head_dim))
        num_rotated = self.num_heads + self.num_kv_heads
        rotate_(heads[:, :, :num_rotated], rotation, layer.head_norm)
        kv_BT2KD = heads[:, :, self.num_heads :].unflatten(2, (2, self.num_kv_heads))
        return heads[:, :, : self.num_heads], kv_BT2KD
