"""What mixes tokens in a layer, holding this shard's weights: projections, norms and rotations around an attention.

Where keys and values are kept, and which of them a query sees, is the business of the `AttentionPass`.

Shape suffixes: B sequences, T query tokens, H hidden, A query heads and K KV heads of this shard, N both, D head_dim,
P parts of what is kept (keys and values, or one latent).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from magicdec.runtime.attention import Scoring
from magicdec.runtime.kv_cache import Kept
from magicdec.runtime.layers import ColumnParallelLinear, HeadNorm, Narrow, RowParallelLinear
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
        """What is kept of each token."""

    def __call__(self, x_BTH: Tensor, layer: int, attention: AttentionPass, rotations: Sequence[Tensor]) -> Tensor: ...

    def rotate_keys_(self, keys_BKSD: Tensor, rotations: Sequence[Tensor]) -> Tensor:
        """Moves stored keys on by so many positions, in place."""

    def narrowed(self, narrow: Narrow) -> Mixer:
        """With its linear layers in another format."""


@dataclass(frozen=True, kw_only=True)
class GroupedAttention:
    """Grouped-query attention."""

    kept: Kept
    num_heads: int
    qkv: ColumnParallelLinear
    output: RowParallelLinear
    scoring: Scoring
    rotary: int | None
    """Which of the transformer's rotary embeddings rotates queries and keys, if any."""
    num_rotated: int
    """The first dimensions of each head, which it rotates."""
    norm: Callable[[Tensor], Tensor] | None = None
    """Of query and key heads, before rotation."""

    def __call__(self, x_BTH: Tensor, layer: int, attention: AttentionPass, rotations: Sequence[Tensor]) -> Tensor:
        heads = self.qkv(x_BTH).unflatten(-1, (-1, self.kept.head_dim))
        num_heads, kv_heads = self.num_heads, self.kept.num_heads
        self._norm_and_rotate_(heads[:, :, : num_heads + kv_heads], rotations)
        kv_BT2KD = heads[:, :, num_heads:].unflatten(2, (2, kv_heads))
        return self.output(attention.attend(layer, heads[:, :, :num_heads], kv_BT2KD, self.scoring))

    def _norm_and_rotate_(self, heads_BTND: Tensor, rotations: Sequence[Tensor]) -> None:
        norm = self.norm
        if (
            self.rotary is not None
            and self.num_rotated == self.kept.head_dim
            and (norm is None or isinstance(norm, HeadNorm))
        ):
            rotate_(heads_BTND, rotations[self.rotary], norm)
            return
        if norm is not None:
            heads_BTND.copy_(norm(heads_BTND))
        if self.rotary is not None:
            rotate_(heads_BTND[..., : self.num_rotated], rotations[self.rotary])

    def rotate_keys_(self, keys_BKSD: Tensor, rotations: Sequence[Tensor]) -> Tensor:
        if self.rotary is not None:
            rotate_(keys_BKSD[..., : self.num_rotated], rotations[self.rotary])
        return keys_BKSD

    def narrowed(self, narrow: Narrow) -> GroupedAttention:
        return replace(self, qkv=narrow(self.qkv), output=narrow(self.output))
