"""Rotary position embeddings, with every way of stretching them to longer contexts.

Shape suffixes: B sequences, T tokens, N heads, D rotated dimensions of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from magicdec.errors import CapacityError
from magicdec.runtime import kernels
from magicdec.runtime.layers import HeadNorm
from magicdec.specs.layers import Rope, RopeScaling


class RotaryEmbedding:
    """Rotates the query's and key's pairs of dimensions by angles that grow with the position.

    Heads are stored with the two halves of each pair side by side (builder.py interleaves the rows of q and k), so that
    a rotation is one complex product: (x[2i] + j·x[2i+1]) · exp(j · position · frequency[i]).
    """

    def __init__(self, rope: Rope, device: torch.device, dtype: torch.dtype) -> None:
        self._rope, self._device = rope, device
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._table = torch.empty(0, device=device)
        self._is_long = False
        self.shortest = 1
        """Tokens that a prompt needs. Longrope's long factors are those of sequences beyond the original length from
        their first token on; one that crosses it would need its cache computed anew, as `generate` does."""

    def reserve(self, num_positions: int, *, longest: int) -> None:
        """Makes the table cover positions 0..num_positions-1, for sequences of at most `longest` tokens.

        Raises CapacityError where the frequencies would have to change with a sequence's length: what is cached was
        rotated by other ones.
        """
        scaling = self._rope.scaling
        original = longest if scaling is None else scaling.original_max_position_embeddings
        is_long = longest > original
        if is_long and scaling is not None and scaling.rope_type == "longrope" and not scaling.long_factor:
            raise CapacityError(
                f"this model's longrope is run up to its original {original} tokens, not to {longest}: there is no "
                "agreed reading of it beyond them"
            )
        if is_long and scaling is not None and scaling.rope_type == "dynamic":
            raise CapacityError(
                f"rotary embeddings of the dynamic kind change with the length beyond {original} tokens, which can be "
                f"planned but not run; run at most that many, not {longest}"
            )
        if len(self._table) and scaling is not None and scaling.rope_type == "longrope" and is_long != self._is_long:
            raise CapacityError(
                f"rotary embeddings of the longrope kind are others up to {original} tokens and beyond; load the model "
                f"again for sequences of up to {longest}"
            )
        self._is_long = is_long
        if is_long and scaling is not None and scaling.rope_type == "longrope":
            self.shortest = original + 1
        if len(self._table) < num_positions:
            frequencies = rotary_frequencies(self._rope, self._device, is_long=is_long)
            positions = torch.arange(num_positions, dtype=torch.float32, device=self._device)
            angles = torch.outer(positions, frequencies).to(self._dtype)
            factor = 1.0 if scaling is None else scaling.attention_factor
            self._table = torch.polar(torch.full_like(angles, factor), angles)

    def __getitem__(self, positions_BT: Tensor) -> Tensor:
        """The rotations of these positions, complex [B, T, 1, D/2], to be shared by all layers."""
        return self._table[positions_BT].unsqueeze(2)

    def turns(self, distances_BT: Tensor) -> Tensor:
        """Rotations of size 1 that move rotated keys on by so many positions, complex [B, T, 1, D/2]."""
        scaling = self._rope.scaling
        return self[distances_BT] / (1.0 if scaling is None else scaling.attention_factor)


def rotate_(heads_BTND: Tensor, rotation: Tensor, norm: HeadNorm | None = None) -> Tensor:
    """Normalises every head, where there is a norm, and applies `rotation` (from RotaryEmbedding) to it, in place."""
    if kernels.can_fuse(heads_BTND):
        from magicdec.runtime.kernels import triton_fused

        rotation_BTPJ = torch.view_as_real(rotation.squeeze(2)).expand(*heads_BTND.shape[:2], -1, -1)
        weight_ND, eps = (None, 0.0) if norm is None else (norm.weight_ND, norm.eps)
        triton_fused.rotate_(heads_BTND, rotation_BTPJ, weight_ND, eps)
        return heads_BTND
    if norm is not None:
        heads_BTND.copy_(norm(heads_BTND))
    pairs = heads_BTND.unflatten(-1, (-1, 2))
    is_aligned = not any(size % 2 for size in (pairs.storage_offset(), *pairs.stride()[:-1]))
    if is_aligned and pairs.dtype in (torch.float32, torch.float64):
        torch.view_as_complex(pairs).mul_(rotation)
    else:
        wide = torch.empty(pairs.shape, dtype=rotation.real.dtype, device=pairs.device).copy_(pairs)
        pairs.copy_(torch.view_as_real(torch.view_as_complex(wide).mul_(rotation)))
    return heads_BTND


def rotary_frequencies(rope: Rope, device: torch.device, *, is_long: bool = False) -> Tensor:
    """The angle per position of each pair, [D/2], stretched to longer contexts.

    linear: all divided by `factor`. llama3: wavelengths beyond original/low_freq_factor are divided by `factor`, those
    under original/high_freq_factor are kept, and those between are interpolated. yarn: the same between pairs that turn
    beta_slow and beta_fast times within the original length (arXiv 2309.00071). longrope: each pair divided by a factor
    of its own, of one of two lists (arXiv 2402.13753). dynamic: as they are, up to the original length.
    Source: transformers modeling_rope_utils.py.
    """
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32, device=device) / rope.dim
    wavelengths = rope.theta**exponents
    scaling = rope.scaling
    if scaling is None or scaling.rope_type == "dynamic":
        return 1.0 / wavelengths
    if scaling.rope_type == "linear":
        return 1.0 / wavelengths / scaling.factor
    if scaling.rope_type == "longrope":
        factors = scaling.long_factor if is_long else scaling.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device=device) * wavelengths)
    if scaling.rope_type == "yarn":
        kept = 1.0 - _yarn_ramp(rope, scaling).to(device)
        return (1.0 / (scaling.factor * wavelengths)) * (1 - kept) + 1.0 / wavelengths * kept
    frequencies = 1.0 / wavelengths
    original = scaling.original_max_position_embeddings
    span = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = ((original * frequencies / (2 * math.pi) - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * ((1 - smooth) / scaling.factor + smooth)


def _yarn_ramp(rope: Rope, scaling: RopeScaling) -> Tensor:
    """How far each pair is stretched: 0 for those that turn `beta_fast` times or more, 1 for `beta_slow` or fewer."""

    def pair_that_turns(times: float) -> float:
        share = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return rope.dim * math.log(share) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    high += 0.001 if low == high else 0.0
    return ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
