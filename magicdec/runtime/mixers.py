"""Mixers of tokens in a layer, holding this shard's weights: projections, norms and rotations
around an attention; and rotary position embeddings, with every way of stretching them to longer
contexts.

Where keys and values are kept, and which of them a query sees, is the business of the
`AttentionPass`.

Shape suffixes: B sequences, T query tokens, H hidden, A query heads and K KV heads of this shard, N
both, D head_dim, P parts of what is kept (keys and values, or one latent), R rank of a latent, U
its rotated dimensions, V size of a head's values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from magicdec.errors import CapacityError
from magicdec.runtime import kernels
from magicdec.runtime.attention import Scoring
from magicdec.runtime.kv_cache import TokenStorage
from magicdec.runtime.layers import (
    ColumnParallelLinear,
    HeadNorm,
    HiddenNorm,
    RowParallelLinear,
)
from magicdec.specs.mixers import Rope, RopeScaling


class AttentionPass(Protocol):
    """One forward pass's view of a KV cache."""

    @property
    def positions_BT(self) -> Tensor:
        """The positions that the pass's tokens are rotated to."""

    def attend(
        self, layer: int, query_BTAD: Tensor, kv_BTPKD: Tensor, scoring: Scoring
    ) -> Tensor:
        """Stores the tokens' keys and values, and attends: [B, T, A·D]."""


class Mixer(Protocol):
    """Maps the normed hidden states [B, T, H] to the update of the residual stream."""

    @property
    def kept(self) -> TokenStorage:
        """Storage of each token's keys and values."""

    def __call__(
        self,
        x_BTH: Tensor,
        layer: int,
        attention: AttentionPass,
        rotations: Sequence[Tensor],
    ) -> Tensor: ...

    def rotate_keys_(self, keys_BKSD: Tensor, rotations: Sequence[Tensor]) -> Tensor:
        """Moves stored keys on by the positions that `rotations` turn, in place."""


@dataclass(frozen=True, kw_only=True)
class GroupedAttention:
    """Grouped-query attention."""

    kept: TokenStorage
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
    """(c, n): queries at position p are multiplied with 1 + c·ln(1 + ⌊(p + o)/n⌋), with o
    `temperature_offset`.
    """
    temperature_offset: int = 1
    gated: bool = False
    """`qkv` gives gates behind the values: the output is multiplied with their sigmoid."""

    def __call__(
        self,
        x_BTH: Tensor,
        layer: int,
        attention: AttentionPass,
        rotations: Sequence[Tensor],
    ) -> Tensor:
        num_heads = self.num_heads
        kv_heads = self.kept.num_heads
        heads = self.qkv(x_BTH).unflatten(-1, (-1, self.kept.head_dim))
        self._norm_and_rotate_(heads[:, :, : num_heads + kv_heads], rotations)
        sizes = (num_heads, 2 * kv_heads, num_heads * self.gated)
        query_BTAD, kv_BTND, gates_BTAD = heads.split(sizes, dim=2)
        kv_BTPKD = kv_BTND.unflatten(2, (2, kv_heads))
        if self.temperature is not None:
            query_BTAD = self._tempered(
                query_BTAD, attention.positions_BT, *self.temperature
            )
        mixed_BTN = attention.attend(layer, query_BTAD, kv_BTPKD, self.scoring)
        if self.gated:
            mixed_BTN = mixed_BTN * gates_BTAD.flatten(2).sigmoid()
        return self.output(mixed_BTN)

    def _tempered(
        self,
        query_BTAD: Tensor,
        positions_BT: Tensor,
        strength: float,
        interval: float,
    ) -> Tensor:
        """Queries, multiplied by their position's factor (see `temperature`)."""
        shifted_BT = positions_BT + self.temperature_offset
        intervals_BT = torch.floor(shifted_BT.float() / interval)
        scales_BT = 1.0 + strength * torch.log1p(intervals_BT)
        return (query_BTAD * scales_BT[..., None, None]).to(query_BTAD.dtype)

    def keys_and_values(self, x_BTH: Tensor, rotations: Sequence[Tensor]) -> Tensor:
        """Cache entries of tokens that attend to nothing, [B, T, P, K, D]."""
        num_heads = self.num_heads
        kv_heads = self.kept.num_heads
        heads = self.qkv(x_BTH).unflatten(-1, (-1, self.kept.head_dim))
        self._norm_and_rotate_(heads[:, :, : num_heads + kv_heads], rotations)
        kv_BTND = heads[:, :, num_heads : num_heads + 2 * kv_heads]
        return kv_BTND.unflatten(2, (2, kv_heads))

    def _norm_and_rotate_(
        self, heads_BTND: Tensor, rotations: Sequence[Tensor]
    ) -> None:
        is_whole = self.rotary is not None and self.num_rotated == self.kept.head_dim
        fused = None
        if is_whole and isinstance(self.norm, HeadNorm):
            fused = self.norm
        if self.norm is not None and fused is None:
            heads_BTND.copy_(self.norm(heads_BTND))
        if self.rotary is not None:
            rotate_(heads_BTND[..., : self.num_rotated], rotations[self.rotary], fused)
        if self.rotated_norm is not None:
            heads_BTND.copy_(self.rotated_norm(heads_BTND))

    def rotate_keys_(self, keys_BKSD: Tensor, rotations: Sequence[Tensor]) -> Tensor:
        """Rotates keys whose norm stands behind the rotation: the norm's weights are taken off
        meanwhile, and its mean square does not change.
        """
        if self.rotary is None:
            return keys_BKSD
        weight_K1D = None
        if isinstance(self.rotated_norm, HeadNorm):
            weight_K1D = self.rotated_norm.weight_ND[self.num_heads :, None]
            keys_BKSD.div_(weight_K1D.masked_fill(weight_K1D == 0, 1.0))
        rotate_(keys_BKSD[..., : self.num_rotated], rotations[self.rotary])
        if weight_K1D is None:
            return keys_BKSD
        return keys_BKSD.mul_(weight_K1D)


@dataclass(frozen=True, kw_only=True)
class AbsorbedAttention:
    """Multi-head latent attention, absorbed (arXiv 2405.04434): each head attends to the latents
    themselves. A latent c [R] beside a rotated key [U] is all that is kept of a token. A head's key
    is Wk·c and its value Wv·c, so that q·(Wk·c) = (Wkᵀ·q)·c, and the sum of weighted values is Wv
    times that of weighted latents."""

    kept: TokenStorage
    num_heads: int
    query: ColumnParallelLinear
    latent: ColumnParallelLinear
    """Projection to the latent and the rotated key, whole on every shard, because every shard keeps
    them.
    """
    latent_norm: HiddenNorm
    keys_ADR: Tensor
    values_AVR: Tensor
    output: RowParallelLinear
    scoring: Scoring
    rotary: int | None
    query_latent: ColumnParallelLinear | None = None
    """Where queries come from a latent of their own: what leads to it, the same on every shard."""
    query_norm: HiddenNorm | None = None

    def __call__(
        self,
        x_BTH: Tensor,
        layer: int,
        attention: AttentionPass,
        rotations: Sequence[Tensor],
    ) -> Tensor:
        rank = self._rank
        num_rotated = self.kept.head_dim - rank
        query_x = x_BTH
        if self.query_latent is not None and self.query_norm is not None:
            query_x = self.query_norm(self.query_latent(x_BTH))
        heads_BTAD = self.query(query_x).unflatten(-1, (self.num_heads, -1))
        num_plain = self.keys_ADR.shape[1]
        plain_BTAD, rotated_BTAU = heads_BTAD.split((num_plain, num_rotated), dim=-1)
        # Wkᵀ·q: queries that meet latents [R] instead of keys [D]
        absorbed_BTAR = torch.einsum("btad,adr->btar", plain_BTAD, self.keys_ADR)
        query_BTAD = torch.cat((absorbed_BTAR, rotated_BTAU), dim=-1)
        latents_BTR, keys_BTU = self.latent(x_BTH).split((rank, num_rotated), dim=-1)
        kept_BTD = torch.cat((self.latent_norm(latents_BTR), keys_BTU), dim=-1)
        kept_BTPKD = kept_BTD[:, :, None, None]
        self.rotate_keys_(kept_BTPKD.squeeze(2), rotations)
        self.rotate_keys_(query_BTAD, rotations)
        mixed_BTN = attention.attend(layer, query_BTAD, kept_BTPKD, self.scoring)
        mixed_BTAR = mixed_BTN.unflatten(-1, (self.num_heads, -1))
        output_BTAV = torch.einsum("btar,avr->btav", mixed_BTAR, self.values_AVR)
        return self.output(output_BTAV.flatten(2))

    @property
    def _rank(self) -> int:
        """Size of the latent."""
        return self.latent_norm.weight.shape[0]

    def rotate_keys_(self, keys_BKSD: Tensor, rotations: Sequence[Tensor]) -> Tensor:
        if self.rotary is not None:
            rotated = keys_BKSD[..., self._rank :]
            rotate_(rotated, rotations[self.rotary])
        return keys_BKSD


class RotaryEmbedding:
    """Rotates the query's and key's pairs of dimensions by angles that grow with the position.
    Heads are stored with the two halves of each pair side by side (builder.py interleaves the rows
    of q and k), so that a rotation is one complex product: (x[2i] + j·x[2i+1]) · exp(j · position ·
    frequency[i])."""

    def __init__(self, rope: Rope, device: torch.device, dtype: torch.dtype) -> None:
        self._rope = rope
        self._device = device
        self._dtype = torch.float32
        if dtype == torch.float64:
            self._dtype = torch.float64
        self._table = torch.empty(0, device=device)
        self._is_long = False
        self.shortest = 1
        """Least tokens of a prompt. Longrope's long factors hold for sequences beyond the original
        length from their first token on; a sequence that crosses that length would need its cache
        computed anew, as `generate` does."""

    def reserve(self, num_positions: int, *, longest: int) -> None:
        """Makes the table cover positions 0..num_positions-1, for sequences of at most `longest`
        tokens. Raises CapacityError if the frequencies would have to change with a sequence's
        length, because cached keys were rotated by the old ones."""
        scaling = self._rope.scaling
        kind = None
        original = longest
        if scaling is not None:
            kind = scaling.rope_type
            original = scaling.original_max_position_embeddings
        is_long = longest > original
        if is_long and scaling is not None:
            _check_long(scaling, original, longest)
        if len(self._table) and kind == "longrope" and is_long != self._is_long:
            raise CapacityError(
                f"rotary embeddings of the longrope kind differ up to {original} tokens and "
                f"beyond; load the model again for sequences of up to {longest}"
            )
        self._is_long = is_long
        if is_long and kind == "longrope":
            self.shortest = original + 1
        if len(self._table) < num_positions:
            frequencies = rotary_frequencies(self._rope, self._device, is_long=is_long)
            positions = torch.arange(
                num_positions, dtype=torch.float32, device=self._device
            )
            angles = torch.outer(positions, frequencies).to(self._dtype)
            sizes = torch.full_like(angles, self._attention_factor)
            self._table = torch.polar(sizes, angles)

    @property
    def _attention_factor(self) -> float:
        """Factor of rotated queries and keys."""
        if self._rope.scaling is None:
            return 1.0
        return self._rope.scaling.attention_factor

    def __getitem__(self, positions_BT: Tensor) -> Tensor:
        """The rotations of these positions, complex [B, T, 1, D/2], to be shared by all layers."""
        return self._table[positions_BT].unsqueeze(2)

    def turns(self, distances_BT: Tensor) -> Tensor:
        """Rotations of size 1 that move rotated keys on by these distances, complex [B, T, 1,
        D/2].
        """
        return self[distances_BT] / self._attention_factor


def _check_long(scaling: RopeScaling, original: int, longest: int) -> None:
    """Raises CapacityError for kinds that cannot be run beyond the original length."""
    if scaling.rope_type == "longrope" and not scaling.long_factor:
        raise CapacityError(
            f"this model's longrope is run up to its original {original} tokens, not to {longest}: "
            "there is no agreed reading of it beyond them"
        )
    if scaling.rope_type == "dynamic":
        raise CapacityError(
            f"rotary embeddings of the dynamic kind change with the length beyond {original} "
            "tokens, which can be planned but not run; run at most that many, not "
            f"{longest}"
        )


def rotate_(
    heads_BTND: Tensor, rotation: Tensor, norm: HeadNorm | None = None
) -> Tensor:
    """Normalises every head, if there is a norm, and applies `rotation` (from RotaryEmbedding), in
    place."""
    if kernels.can_fuse(heads_BTND):
        from magicdec.runtime.kernels import triton_fused

        parts = torch.view_as_real(rotation.squeeze(2))
        rotation_BTPJ = parts.expand(*heads_BTND.shape[:2], -1, -1)
        weight_ND = None
        eps = 0.0
        if norm is not None:
            weight_ND = norm.weight_ND
            eps = norm.eps
        triton_fused.rotate_(heads_BTND, rotation_BTPJ, weight_ND, eps)
        return heads_BTND
    if norm is not None:
        heads_BTND.copy_(norm(heads_BTND))
    pairs = heads_BTND.unflatten(-1, (-1, 2))
    offsets = (pairs.storage_offset(), *pairs.stride()[:-1])
    is_aligned = not any(offset % 2 for offset in offsets)
    if is_aligned and pairs.dtype in (torch.float32, torch.float64):
        torch.view_as_complex(pairs).mul_(rotation)
        return heads_BTND
    wide = torch.empty(pairs.shape, dtype=rotation.real.dtype, device=pairs.device)
    wide.copy_(pairs)
    rotated = torch.view_as_complex(wide).mul_(rotation)
    pairs.copy_(torch.view_as_real(rotated))
    return heads_BTND


def rotary_frequencies(rope: Rope, device: torch.device, *, is_long: bool) -> Tensor:
    """The angle per position of each pair, [D/2], stretched to longer contexts.

    linear: all divided by `factor`. llama3: wavelengths beyond original/low_freq_factor are divided
        by `factor`, those under original/high_freq_factor are kept, and those between are
        interpolated. yarn: the same between pairs that turn beta_slow and beta_fast times within
        the original length (arXiv 2309.00071). longrope: each pair divided by a factor of its own,
        of one of two lists (arXiv 2402.13753). dynamic: as they are, up to the original length.
    Source: transformers modeling_rope_utils.py.
    """
    dims = torch.arange(0, rope.dim, 2, dtype=torch.float32, device=device)
    wavelengths = rope.theta ** (dims / rope.dim)
    frequencies = 1.0 / wavelengths
    scaling = rope.scaling
    if scaling is None or scaling.rope_type == "dynamic":
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    if scaling.rope_type == "longrope":
        factors = scaling.short_factor
        if is_long:
            factors = scaling.long_factor
        stretches = torch.tensor(factors, dtype=torch.float32, device=device)
        return 1.0 / (stretches * wavelengths)
    if scaling.rope_type == "yarn":
        kept = 1.0 - _yarn_ramp(rope, scaling).to(device)
        stretched = 1.0 / (scaling.factor * wavelengths)
        return stretched * (1 - kept) + frequencies * kept
    original = scaling.original_max_position_embeddings
    span = scaling.high_freq_factor - scaling.low_freq_factor
    turns = original * frequencies / (2 * math.pi)
    smooth = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * ((1 - smooth) / scaling.factor + smooth)


def _yarn_ramp(rope: Rope, scaling: RopeScaling) -> Tensor:
    """How far each pair is stretched: 0 for pairs that turn `beta_fast` times or more, 1 for pairs
    that turn `beta_slow` times or fewer."""

    def pair_that_turns(times: float) -> float:
        share = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return rope.dim * math.log(share) / (2 * math.log(rope.theta))

    low = pair_that_turns(scaling.beta_fast)
    high = pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(rope.dim // 2, dtype=torch.float32)
    return ((pairs - low) / (high - low)).clamp(0, 1)
