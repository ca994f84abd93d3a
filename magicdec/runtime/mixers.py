"""Mixers of tokens in a layer, holding this shard's weights: projections, norms and rotations around an attention.

Where keys and values are kept, and which of them a query sees, is the business of the `AttentionPass`.

Shape suffixes: B sequences, T query tokens, H hidden, A query heads and K KV heads of this shard, N both, D head_dim,
P parts of what is kept (keys and values, or one latent), R rank of a latent, U its rotated dimensions, V size of a
head's values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from magicdec.runtime.attention import Scoring
from magicdec.runtime.kv_cache import Kept
from magicdec.runtime.layers import ColumnParallelLinear, HeadNorm, Norm, RowParallelLinear
from magicdec.runtime.rotary import rotate_


class AttentionPass(Protocol):
    """One forward pass's view of a KV cache."""

    @property
    def positions_BT(self) -> Tensor:
        """The positions that the pass's tokens are rotated to."""

    def attend(self, layer: int, query_BTAD: Tensor, kv_BTPKD: Tensor, scoring: Scoring) -> Tensor:
        """Stores the tokens' keys and values, and attends: [B, T, A·D]."""


class Mixer(Protocol):
    """Reads the normed hidden states [B, T, H] and gives what is added to the residual stream."""

    @property
    def kept(self) -> Kept:
        """Storage of each token."""

    def __call__(self, x_BTH: Tensor, layer: int, attention: AttentionPass, rotations: Sequence[Tensor]) -> Tensor: ...

    def rotate_keys_(self, keys_BKSD: Tensor, rotations: Sequence[Tensor]) -> Tensor:
        """Moves stored keys on by so many positions, in place."""


@dataclass(frozen=True, kw_only=True)
class GroupedAttention:
    """Grouped-query attention."""

    kept: Kept
    num_heads: int
    qkv: ColumnParallelLinear
    output: RowParallelLinear
    scoring: Scoring
    rotary: int | None
    """Number of the transformer's rotary embedding that rotates queries and keys, if any."""
    num_rotated: int
    """The first dimensions of each head, which it rotates."""
    norm: Callable[[Tensor], Tensor] | None = None
    """Norm of query and key heads before rotation."""
    rotated_norm: Callable[[Tensor], Tensor] | None = None
    """Norm of query and key heads after rotation."""
    temperature: tuple[float, float] | None = None
    """(c, n): queries at position p are multiplied with 1 + c·ln(1 + ⌊(p + o)/n⌋), with o `temperature_offset`."""
    temperature_offset: int = 1
    gated: bool = False
    """`qkv` gives gates behind the values: the output is multiplied with their sigmoid."""

    def __call__(self, x_BTH: Tensor, layer: int, attention: AttentionPass, rotations: Sequence[Tensor]) -> Tensor:
        heads = self.qkv(x_BTH).unflatten(-1, (-1, self.kept.head_dim))
        num_heads, kv_heads = self.num_heads, self.kept.num_heads
        self._norm_and_rotate_(heads[:, :, : num_heads + kv_heads], rotations)
        query_BTAD, kv_BTND, gates_BTAD = heads.split((num_heads, 2 * kv_heads, num_heads * self.gated), dim=2)
        if self.temperature is not None:
            strength, interval = self.temperature
            intervals_BT = torch.floor((attention.positions_BT + self.temperature_offset).float() / interval)
            scales_BT = 1.0 + strength * torch.log1p(intervals_BT)
            query_BTAD = (query_BTAD * scales_BT[..., None, None]).to(query_BTAD.dtype)
        mixed_BTN = attention.attend(layer, query_BTAD, kv_BTND.unflatten(2, (2, kv_heads)), self.scoring)
        return self.output(mixed_BTN * gates_BTAD.flatten(2).sigmoid() if self.gated else mixed_BTN)

    def _norm_and_rotate_(self, heads_BTND: Tensor, rotations: Sequence[Tensor]) -> None:
        is_whole = self.rotary is not None and self.num_rotated == self.kept.head_dim
        fused = self.norm if is_whole and isinstance(self.norm, HeadNorm) else None
        if self.norm is not None and fused is None:
            heads_BTND.copy_(self.norm(heads_BTND))
        if self.rotary is not None:
            rotate_(heads_BTND[..., : self.num_rotated], rotations[self.rotary], fused)
        if self.rotated_norm is not None:
            heads_BTND.copy_(self.rotated_norm(heads_BTND))

    def rotate_keys_(self, keys_BKSD: Tensor, rotations: Sequence[Tensor]) -> Tensor:
        """A norm's weights on rotated keys are taken off meanwhile: its mean square does not change."""
        if self.rotary is None:
            return keys_BKSD
        weight_K1D = None
        if isinstance(self.rotated_norm, HeadNorm):
            weight_K1D = self.rotated_norm.weight_ND[self.num_heads :, None]
            keys_BKSD.div_(weight_K1D.masked_fill(weight_K1D == 0, 1.0))
        rotate_(keys_BKSD[..., : self.num_rotated], rotations[self.rotary])
        return keys_BKSD if weight_K1D is None else keys_BKSD.mul_(weight_K1D)


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention, absorbed (arXiv 2405.04434): each head attends to the latents themselves.

    A latent c [R] beside a rotated key [U] is all that is kept of a token. A head's key is Wk·c and its value Wv·c, so
    that q·(Wk·c) = (Wkᵀ·q)·c, and the sum of weighted values is Wv times that of weighted latents.
    """

    kept: Kept
    num_heads: int
    query: ColumnParallelLinear
    latent: ColumnParallelLinear
    """Projection to the latent and the rotated key, whole on every shard, because every shard keeps them."""
    latent_norm: Norm
    keys_ADR: Tensor
    values_AVR: Tensor
    output: RowParallelLinear
    scoring: Scoring
    rotary: int | None
    query_latent: ColumnParallelLinear | None = None
    """Where queries come from a latent of their own: what leads to it, the same on every shard."""
    query_norm: Norm | None = None

    def __call__(self, x_BTH: Tensor, layer: int, attention: AttentionPass, rotations: Sequence[Tensor]) -> Tensor:
        rank, query_x = self.latent_norm.weight.shape[0], x_BTH
        if self.query_latent is not None and self.query_norm is not None:
            query_x = self.query_norm(self.query_latent(x_BTH))
        heads_BTAD = self.query(query_x).unflatten(-1, (self.num_heads, -1))
        plain_BTAD, rotated_BTAU = heads_BTAD.split((self.keys_ADR.shape[1], self.kept.head_dim - rank), dim=-1)
        latents_BTN, keys_BTU = self.latent(x_BTH).split((rank, self.kept.head_dim - rank), dim=-1)
        kept_BTPKD = torch.cat((self.latent_norm(latents_BTN), keys_BTU), dim=-1)[:, :, None, None]
        query_BTAD = torch.cat((torch.einsum("btad,adr->btar", plain_BTAD, self.keys_ADR), rotated_BTAU), dim=-1)
        self.rotate_keys_(kept_BTPKD.squeeze(2), rotations)
        self.rotate_keys_(query_BTAD, rotations)
        mixed_BTAR = attention.attend(layer, query_BTAD, kept_BTPKD, self.scoring).unflatten(-1, (self.num_heads, -1))
        return self.output(torch.einsum("btar,avr->btav", mixed_BTAR, self.values_AVR).flatten(2))

    def rotate_keys_(self, keys_BKSD: Tensor, rotations: Sequence[Tensor]) -> Tensor:
        if self.rotary is not None:
            rotate_(keys_BKSD[..., self.latent_norm.weight.shape[0] :], rotations[self.rotary])
        return keys_BKSD
