"""Storage for keys and values, allocated once; the lengths grow, the shapes do not.

A layer that sees the last tokens only may keep them in a *ring* of R slots: the token at position p
is in slot p mod R, where the one at p - R was. Which position a slot holds for a query follows from
the query's own.

Shape suffixes: L layers, P parts (keys and values, or one latent), B sequences, T tokens, K KV
heads of this shard, S slots, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A layer's storage of each token on this shard: a key and a value per head; or, where
    `latent_value_dim` is set, one vector per head that is the key, and whose first so many numbers
    are the value."""

    num_heads: int
    head_dim: int
    latent_value_dim: int | None = None
    span: int | None = None
    """No query sees more tokens than the last so many, its own included; None: all."""


@dataclass(frozen=True)
class Block:
    """The storage of layers that keep alike."""

    layers: tuple[int, ...]
    kept: Kept
    data: Tensor
    """[L, P, B, K, S, D]."""


class KVCache:
    """Keys and values of `num_slots` tokens per sequence and layer. Users say what a slot means.
    Layers go by their number in the model; those that keep alike share a block of storage. With
    `spare`, a slot is a position, and a layer that sees `span` tokens has a ring of span + spare
    slots, where that is shorter: so many tokens may be written ahead of a query, or lie behind it,
    before one that it sees is overwritten."""

    def __init__(
        self,
        kept: Mapping[int, Kept],
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
        layers: dict[Kept, list[int]] = {}
        for layer, each in kept.items():
            layers.setdefault(each, []).append(layer)
        self.blocks = tuple(self._block(tuple(numbers), each) for each, numbers in layers.items())
        self._layers = {
            layer: block.data[i] for block in self.blocks for i, layer in enumerate(block.layers)
        }
        self._rows = torch.arange(batch_size, device=device)[:, None]

    def _block(self, layers: tuple[int, ...], kept: Kept) -> Block:
        """Zeros, not uninitialised memory: a masked slot still enters products, and 0 · NaN is NaN.
        On a CPU the memory comes from numpy, which asks the kernel for huge pages; torch does
        not."""
        if kept.latent_value_dim is None:
            parts = 2
        else:
            parts = 1
        num_slots = self._ring(kept) or self.num_slots
        shape = (len(layers), parts, self._batch_size, kept.num_heads, num_slots, kept.head_dim)
        if self.device.type == "cpu" and self._dtype == torch.float32:
            return Block(layers, kept, torch.from_numpy(np.zeros(shape, dtype=np.float32)))
        return Block(layers, kept, torch.zeros(shape, dtype=self._dtype, device=self.device))

    def _ring(self, kept: Kept) -> int | None:
        if self._spare is None or kept.span is None or kept.span + self._spare >= self.num_slots:
            return None
        return kept.span + self._spare

    def ring(self, layer: int) -> int | None:
        """The slots of a layer that keeps its last tokens in a ring; None where it keeps them all."""
        return self._ring(self.kept[layer])

    @property
    def rings(self) -> Sequence[Tensor]:
        """The storage of all rings: what decoding overwrites of a prompt."""
        return [block.data for block in self.blocks if self._ring(block.kept) is not None]

    def sparse(self, *, num_slots: int) -> KVCache:
        """An empty cache for the layers that a sparse draft may thin out, with another number of
        slots: not those of a window, which it reads as they are."""
        kept = {layer: each for layer, each in self.kept.items() if each.span is None}
        batch_size = self._batch_size
        dtype = self._dtype
        device = self.device
        return KVCache(kept, batch_size=batch_size, num_slots=num_slots, dtype=dtype, device=device)

    def read(self, layer: int, rows: slice, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """Views of the keys and values [B, K, S, D] of some sequences, all slots or those before
        `stop`.
        """
        return keys_and_values(self._layers[layer][:, rows, :, :stop], self.kept[layer])

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
        slots_T = (
            torch.arange(stop - count, stop, device=self.device) % self._layers[layer].shape[3]
        )
        return self._layers[layer][:, row : row + 1].index_select(3, slots_T)

    def write(self, layer: int, slots_BT: Tensor, kv_BTPKD: Tensor) -> None:
        """Stores tokens of the first B sequences, each in its own slots."""
        self._layers[layer][:, self._rows[: len(slots_BT)], :, slots_BT] = kv_BTPKD

    def write_row(self, layer: int, row: int, slots: Tensor | slice, kv_PKTD: Tensor) -> None:
        """Stores tokens of one sequence in these slots."""
        self._layers[layer][:, row][:, :, slots] = kv_PKTD

    def copy_by_head(self, layer: int, source: KVCache, slots_BKS: Tensor) -> None:
        """Fills the first slots of a layer with another cache's tokens, chosen for each sequence
        and KV head.
        """
        count, _, num_slots = slots_BKS.shape
        theirs = source._layers[layer][:, :count]
        index = slots_BKS[None, ..., None].expand(len(theirs), -1, -1, -1, theirs.shape[-1])
        self._layers[layer][:, :count, :, :num_slots] = theirs.gather(3, index)

    def fill_with_noise(self, seed: int) -> None:
        """Uniform in [-1, 1) everywhere."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        for block in self.blocks:
            block.data.uniform_(-1.0, 1.0, generator=generator)

    def copy_tokens(self, slots_BT: Tensor, source: KVCache, source_slots_BT: Tensor) -> None:
        """Stores another cache's tokens of the first B sequences, all own layers, in these slots."""
        rows_B1 = self._rows[: len(slots_BT)]
        theirs = {block.kept: block.data for block in source.blocks}
        for block in self.blocks:
            block.data[:, :, rows_B1, :, slots_BT] = theirs[block.kept][
                :, :, rows_B1, :, source_slots_BT
            ]

    def swap(self, first: int, second: int) -> None:
        """Exchanges two sequences' storage."""
        for block in self.blocks:
            held = block.data[:, :, first].clone()
            block.data[:, :, first] = block.data[:, :, second]
            block.data[:, :, second] = held


def keys_and_values(data_PBKSD: Tensor, kept: Kept) -> tuple[Tensor, Tensor]:
    """Views of stored tokens as keys and values."""
    if kept.latent_value_dim is None:
        keys, values = data_PBKSD.unbind(0)
        return keys, values
    return data_PBKSD[0], data_PBKSD[0, ..., : kept.latent_value_dim]
