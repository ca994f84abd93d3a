"""Storage for keys and values, allocated once; the lengths grow, the shapes do not.

Shape suffixes: L layers, B sequences, T tokens, K KV heads of this shard, S slots, D head_dim; the 2 is (key, value).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class KVCache:
    """Keys and values of `num_slots` tokens per sequence and layer, [L, 2, B, K, S, D]. Users say what a slot means."""

    def __init__(
        self,
        *,
        num_layers: int,
        batch_size: int,
        num_kv_heads: int,
        num_slots: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, batch_size, num_kv_heads, num_slots, head_dim)
        self.data = _zeros(shape, dtype, device)
        self.num_slots = num_slots
        self._rows = torch.arange(batch_size, device=device)[:, None]

    def like(self, *, num_slots: int) -> KVCache:
        """An empty cache for the same layers, sequences and heads, with another number of slots."""
        num_layers, _, batch_size, num_kv_heads, _, head_dim = self.data.shape
        return KVCache(
            num_layers=num_layers,
            batch_size=batch_size,
            num_kv_heads=num_kv_heads,
            num_slots=num_slots,
            head_dim=head_dim,
            dtype=self.data.dtype,
            device=self.data.device,
        )

    @property
    def num_layers(self) -> int:
        return self.data.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.data.shape[3]

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def read(self, layer: int, num_sequences: int) -> tuple[Tensor, Tensor]:
        """Views of the keys and values [B, K, S, D] of the first sequences, all slots."""
        keys, values = self.data[layer, :, :num_sequences].unbind(0)
        return keys, values

    def read_row(self, layer: int, row: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views of one sequence's keys and values [1, K, S, D], the slots before `stop`."""
        keys, values = self.data[layer, :, row : row + 1, :, :stop].unbind(0)
        return keys, values

    def first_keys(self, num_sequences: int, num_slots: int) -> Tensor:
        """A view of the keys in the first slots of the first sequences, all layers: [L, B, K, S, D]."""
        return self.data[:, 0, :num_sequences, :, :num_slots]

    def write(self, layer: int, slots_BT: Tensor, kv_BT2KD: Tensor) -> None:
        """Stores tokens of the first B sequences, each in its own slots."""
        self.data[layer][:, self._rows[: len(slots_BT)], :, slots_BT] = kv_BT2KD

    def write_slice(self, layer: int, rows: slice, slots: slice, kv_BT2KD: Tensor) -> None:
        """Stores tokens of a range of sequences in the same slots of each."""
        self.data[layer, :, rows, :, slots].copy_(kv_BT2KD.permute(2, 0, 3, 1, 4))

    def write_row(self, layer: int, row: int, slots_T: Tensor, kv_2KTD: Tensor) -> None:
        """Stores tokens of one sequence in these slots."""
        self.data[layer, :, row].index_copy_(2, slots_T, kv_2KTD)

    def copy_by_head(self, layer: int, source: KVCache, slots_BKS: Tensor) -> None:
        """Fills the first slots of a layer with another cache's tokens, chosen for each sequence and KV head."""
        count, _, num_slots = slots_BKS.shape
        theirs = source.data[layer, :, :count]
        index = slots_BKS[None, ..., None].expand(2, -1, -1, -1, theirs.shape[-1])
        self.data[layer, :, :count, :, :num_slots] = theirs.gather(3, index)

    def fill_with_noise(self, seed: int) -> None:
        """Uniform in [-1, 1) everywhere."""
        self.data.uniform_(-1.0, 1.0, generator=torch.Generator(device=self.device).manual_seed(seed))

    def gather(self, slots_BT: Tensor) -> Tensor:
        """All layers' keys and values in these slots of the first B sequences: [B, T, L, 2, K, D]."""
        return self.data[:, :, self._rows[: len(slots_BT)], :, slots_BT]

    def scatter(self, slots_BT: Tensor, kv_BTL2KD: Tensor) -> None:
        """Stores what `gather` gave in these slots."""
        self.data[:, :, self._rows[: len(slots_BT)], :, slots_BT] = kv_BTL2KD

    def swap(self, first: int, second: int) -> None:
        """Exchanges two sequences' storage."""
        held = self.data[:, :, first].clone()
        self.data[:, :, first] = self.data[:, :, second]
        self.data[:, :, second] = held


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not uninitialised memory: a masked slot still enters products, and 0 · NaN is NaN.

    On a CPU the memory comes from numpy, which asks the kernel for huge pages; torch does not.
    """
    if device.type == "cpu" and dtype == torch.float32:
        return torch.from_numpy(np.zeros(shape, dtype=np.float32))
    return torch.zeros(shape, dtype=dtype, device=device)
