"""Storage for keys and values, allocated once; the lengths grow, the shapes do not.

A layer that sees the last tokens only may keep them in a *ring* of R slots: the token at position p is in slot p mod R,
where the one at p - R was. Which position a slot holds for a query follows from the query's own.

Shape suffixes: L layers, P parts (keys and values, or one latent), B sequences, T tokens, K KV heads of this shard,
S slots, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A layer's storage of each token on this shard: a key and a value per head; or, where `latent_value_dim` is set,
    one vector per head that is the key, and whose first so many numbers are the value."""

    num_heads: int
    head_dim: int
    latent_value_dim: int | None = None
    span: int | None = None
    """No query sees more tokens than the last so many, its own included; None: all."""

    @property
    def is_sparsifiable(self) -> bool:
        """A sparse draft may leave tokens of it out: not those of a window, whose layers it reads as they are."""
        return self.span is None

    @property
    def num_parts(self) -> int:
        return 2 if self.latent_value_dim is None else 1


@dataclass(frozen=True)
class Block:
    """The storage of layers that keep alike."""

    layers: tuple[int, ...]
    kept: Kept
    data: Tensor
    """[L, P, B, K, S, D]."""


class KVCache:
    """Keys and values of `num_slots` tokens per sequence and layer. Users say what a slot means.

    Layers go by their number in the model; those that keep alike share a block of storage. With `spare`, a slot is a
    position, and a layer that sees `span` tokens has a ring of span + spare slots, where that is shorter: so many
    tokens may be written ahead of a query, or lie behind it, before one that it sees is overwritten.
    """

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
        self.kept, self._batch_size, self._dtype = dict(kept), batch_size, dtype
        self.num_slots, self.device, self.spare = num_slots, device, spare
        layers: dict[Kept, list[int]] = {}
        for layer, each in kept.items():
            layers.setdefault(each, []).append(layer)
        self.blocks = tuple(self._block(tuple(numbers), each) for each, numbers in layers.items())
        self._layers = {layer: block.data[i] for block in self.blocks for i, layer in enumerate(block.layers)}
        self._rows = torch.arange(batch_size, device=device)[:, None]

    def _block(self, layers: tuple[int, ...], kept: Kept) -> Block:
        num_slots = self._ring(kept) or self.num_slots
        shape = (len(layers), kept.num_parts, self._batch_size, kept.num_heads, num_slots, kept.head_dim)
        return Block(layers, kept, _zeros(shape, self._dtype, self.device))

    def _ring(self, kept: Kept) -> int | None:
        if self.spare is None or kept.span is None or kept.span + self.spare >= self.num_slots:
            return None
        return kept.span + self.spare

    def ring(self, layer: int) -> int | None:
        """The slots of a layer that keeps its last tokens in a ring; None where it keeps them all."""
        return self._ring(self.kept[layer])

    @property
    def rings(self) -> Sequence[Tensor]:
        """The storage of all rings: what decoding overwrites of a prompt."""
        return [block.data for block in self.blocks if self._ring(block.kept) is not None]

    def sparse(self, *, num_slots: int) -> KVCache:
        """An empty cache for the layers that a sparse draft may thin out, with another number of slots."""
        return KVCache(
            {layer: each for layer, each in self.kept.items() if each.is_sparsifiable},
            batch_size=self._batch_size,
            num_slots=num_slots,
            dtype=self._dtype,
            device=self.device,
        )

    def __contains__(self, layer: int) -> bool:
        return layer in self._layers

    @property
    def layers(self) -> Sequence[int]:
        return tuple(self._layers)

    def num_heads(self, layer: int) -> int:
        return self.kept[layer].num_heads

    @property
    def num_bytes(self) -> int:
        return sum(block.data.numel() * block.data.element_size() for block in self.blocks)

    def read(self, layer: int, num_sequences: int) -> tuple[Tensor, Tensor]:
        """Views of the keys and values [B, K, S, D] of the first sequences, all slots."""
        return keys_and_values(self._layers[layer][:, :num_sequences], self.kept[layer])

    def read_row(self, layer: int, row: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views of one sequence's keys and values [1, K, S, D], the slots before `stop`."""
        return keys_and_values(self._layers[layer][:, row : row + 1, :, :stop], self.kept[layer])

    def last_of_row(self, layer: int, row: int, stop: int, count: int) -> Tensor:
        """A copy of a sequence's last `count` tokens before position `stop`, from a ring: [P, 1, K, T, D]."""
        slots_T = torch.arange(stop - count, stop, device=self.device) % self._layers[layer].shape[3]
        return self._layers[layer][:, row : row + 1].index_select(3, slots_T)

    def first_keys(self, block: Block, num_sequences: int, num_slots: int) -> Tensor:
        """A view of the keys in the first slots of the first sequences, a block's layers: [L, B, K, S, D]."""
        return block.data[:, 0, :num_sequences, :, :num_slots]

    def write(self, layer: int, slots_BT: Tensor, kv_BTPKD: Tensor) -> None:
        """Stores tokens of the first B sequences, each in its own slots."""
        self._layers[layer][:, self._rows[: len(slots_BT)], :, slots_BT] = kv_BTPKD

    def write_slice(self, layer: int, rows: slice, slots: slice, kv_BTPKD: Tensor) -> None:
        """Stores tokens of a range of sequences in the same slots of each."""
        self._layers[layer][:, rows, :, slots].copy_(kv_BTPKD.permute(2, 0, 3, 1, 4))

    def write_row(self, layer: int, row: int, slots_T: Tensor, kv_PKTD: Tensor) -> None:
        """Stores tokens of one sequence in these slots."""
        self._layers[layer][:, row].index_copy_(2, slots_T, kv_PKTD)

    def copy_by_head(self, layer: int, source: KVCache, slots_BKS: Tensor) -> None:
        """Fills the first slots of a layer with another cache's tokens, chosen for each sequence and KV head."""
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
            block.data[:, :, rows_B1, :, slots_BT] = theirs[block.kept][:, :, rows_B1, :, source_slots_BT]

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


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not uninitialised memory: a masked slot still enters products, and 0 · NaN is NaN.

    On a CPU the memory comes from numpy, which asks the kernel for huge pages; torch does not.
    """
    if device.type == "cpu" and dtype == torch.float32:
        return torch.from_numpy(np.zeros(shape, dtype=np.float32))
    return torch.zeros(shape, dtype=dtype, device=device)
