"""Storage for keys and values, allocated once; the lengths grow, the shapes do not.

A layer that sees the last tokens only may keep them in a *ring* of R slots: the token at position p
is in slot p mod R, where the one at p - R was. Which position a slot holds for a query follows from
the query's own.

Shape suffixes: L layers, P parts (keys and values, or one latent), B sequences, T tokens, K KV
heads of this shard, S slots, D head_dim.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenStorage:
    """A layer's storage per token on this shard: a key and a value per head. With
    `latent_value_dim`, one vector per head is the key, and its first `latent_value_dim` numbers are
    the value."""

    num_heads: int
    head_dim: int
    latent_value_dim: int | None = None
    span: int | None = None
    """Most tokens that a query sees, its own included. None: all."""


@dataclass(frozen=True)
class LayerStorage:
    """The storage of all layers with the same `TokenStorage`."""

    layers: tuple[int, ...]
    kept: TokenStorage
    data: Tensor
    """[L, P, B, K, S, D]."""


class KVCache:
    """Keys and values of `num_slots` tokens per sequence and layer. Users say what a slot means.
    Layers go by their number in the model; layers with the same `TokenStorage` share a block of storage.
    With `spare`, a slot is a position, and a layer that sees `span` tokens has a ring of span +
    spare slots if that is shorter. Then `spare` tokens may be written ahead of a query, or lie
    behind it, before a token that it sees is overwritten."""

    def __init__(
        self,
        kept: Mapping[int, TokenStorage],
        *,
        batch_size: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        spare: int | None = None,
    ) -> None:
        self.kept = dict(kept)
        self._batch_size = batch_size
        self._dtype = dtype
        self.num_slots = num_slots
        self.device = device
        self._spare = spare
        layers_of: dict[TokenStorage, list[int]] = defaultdict(list)
        for layer, what in kept.items():
            layers_of[what].append(layer)
        blocks = []
        for what, layers in layers_of.items():
            blocks.append(self._block(tuple(layers), what))
        self.blocks = tuple(blocks)
        self._layers: dict[int, Tensor] = {}
        for block in blocks:
            self._layers.update(zip(block.layers, block.data, strict=True))
        rows_B = torch.arange(batch_size, device=device)
        self._rows_B1 = rows_B[:, None]

    def _block(self, layers: tuple[int, ...], kept: TokenStorage) -> LayerStorage:
        """Zeros, not uninitialised memory: a masked slot still enters products, and 0 · NaN is NaN.
        On a CPU the memory comes from numpy, which asks the kernel for huge pages; torch does
        not."""
        parts = 2
        if kept.latent_value_dim is not None:
            parts = 1
        shape = (
            len(layers),
            parts,
            self._batch_size,
            kept.num_heads,
            self._ring(kept) or self.num_slots,
            kept.head_dim,
        )
        if self.device.type == "cpu" and self._dtype == torch.float32:
            zeros = torch.from_numpy(np.zeros(shape, dtype=np.float32))
        else:
            zeros = torch.zeros(shape, dtype=self._dtype, device=self.device)
        return LayerStorage(layers, kept, zeros)

    def _ring(self, kept: TokenStorage) -> int | None:
        if self._spare is None or kept.span is None:
            return None
        ring = kept.span + self._spare
        if ring >= self.num_slots:
            return None
        return ring

    def ring(self, layer: int) -> int | None:
        """The slots of a layer that keeps its last tokens in a ring. None: it keeps all tokens."""
        return self._ring(self.kept[layer])

    @property
    def rings(self) -> Sequence[Tensor]:
        """The storage of all rings, where decoding overwrites prompts."""
        rings = []
        for block in self.blocks:
            if self._ring(block.kept) is not None:
                rings.append(block.data)
        return rings

    def sparse(self, *, num_slots: int) -> KVCache:
        """An empty cache, with another number of slots, for the layers that a sparse draft may thin
        out: all but windowed ones, which it reads as they are."""
        kept = {}
        for layer, what in self.kept.items():
            if what.span is None:
                kept[layer] = what
        return KVCache(
            kept,
            batch_size=self._batch_size,
            num_slots=num_slots,
            dtype=self._dtype,
            device=self.device,
        )

    def read(
        self, layer: int, rows: slice, stop: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Views of the keys and values [B, K, S, D] of some sequences, all slots or those before
        `stop`.
        """
        data_PBKSD = self._layers[layer][:, rows, :, :stop]
        return keys_and_values(data_PBKSD, self.kept[layer])

    def of_row(self, layer: int, row: int, slots_T: Tensor) -> Tensor:
        """A copy of what one sequence has in these slots, [P, K, T, D]."""
        return self._layers[layer][:, row].index_select(2, slots_T)

    def row(self, row: int) -> list[Tensor]:
        """A copy of all that one sequence has, by block."""
        return [block.data[:, :, row].clone() for block in self.blocks]

    def restore_row(self, row: int, held: Sequence[Tensor]) -> None:
        """Gives a sequence what `row` has copied."""
        for block, data in zip(self.blocks, held, strict=True):
            block.data[:, :, row] = data

    def last_of_row(self, layer: int, row: int, stop: int, count: int) -> Tensor:
        """A copy of a sequence's last `count` tokens before position `stop`, from a ring: [P, 1, K,
        T, D].
        """
        data_PBKSD = self._layers[layer]
        ring = data_PBKSD.shape[3]
        positions_T = torch.arange(stop - count, stop, device=self.device)
        return data_PBKSD[:, row : row + 1].index_select(3, positions_T % ring)

    def write(self, layer: int, slots_BT: Tensor, kv_BTPKD: Tensor) -> None:
        """Stores tokens of the first B sequences, each in its own slots."""
        rows_B1 = self._rows_B1[: len(slots_BT)]
        self._layers[layer][:, rows_B1, :, slots_BT] = kv_BTPKD

    def write_row(
        self, layer: int, row: int, slots: Tensor | slice, kv_PKTD: Tensor
    ) -> None:
        """Stores tokens of one sequence in these slots."""
        row_PKSD = self._layers[layer][:, row]
        row_PKSD[:, :, slots] = kv_PKTD

    def copy_by_head(self, layer: int, source: KVCache, slots_BKS: Tensor) -> None:
        """Fills the first slots of a layer with another cache's tokens, chosen for each sequence
        and KV head.
        """
        count, _, num_slots = slots_BKS.shape
        theirs = source._layers[layer][:, :count]
        num_parts = len(theirs)
        head_dim = theirs.shape[-1]
        index = slots_BKS[None, ..., None].expand(num_parts, -1, -1, -1, head_dim)
        self._layers[layer][:, :count, :, :num_slots] = theirs.gather(3, index)

    def fill_with_noise(self, seed: int) -> None:
        """Uniform in [-1, 1) everywhere."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        for block in self.blocks:
            block.data.uniform_(-1.0, 1.0, generator=generator)

    def copy_tokens(
        self, slots_BT: Tensor, source: KVCache, source_slots_BT: Tensor
    ) -> None:
        """Stores another cache's tokens of the first B sequences, all own layers, in these
        slots."""
        rows_B1 = self._rows_B1[: len(slots_BT)]
        data_of = {block.kept: block.data for block in source.blocks}
        for block in self.blocks:
            theirs = data_of[block.kept]
            tokens = theirs[:, :, rows_B1, :, source_slots_BT]
            block.data[:, :, rows_B1, :, slots_BT] = tokens

    def swap(self, first: int, second: int) -> None:
        """Exchanges two sequences' storage."""
        for block in self.blocks:
            held = block.data[:, :, first].clone()
            block.data[:, :, first] = block.data[:, :, second]
            block.data[:, :, second] = held


def keys_and_values(data_PBKSD: Tensor, kept: TokenStorage) -> tuple[Tensor, Tensor]:
    """Views of stored tokens as keys and values."""
    if kept.latent_value_dim is None:
        keys, values = data_PBKSD.unbind(0)
        return keys, values
    latents_BKSD = data_PBKSD[0]
    return latents_BKSD, latents_BKSD[..., : kept.latent_value_dim]
