"""Tensor parallelism: one process per shard, and the collectives between them.

A world of one needs no process group; its collectives return their argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """This process's place among the `size` shards of a model. `group` is None for the default process group."""

    rank: int = 0
    size: int = 1
    group: Any = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the shards, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """The maximum over the shards, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The shards' tensors (of equal shape) stacked in a new first dimension."""
        if self.size == 1:
            return tensor[None]
        parts = torch.empty(self.size, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
        dist.all_gather(list(parts.unbind(0)), tensor.contiguous(), group=self.group)
        return parts

    def slice_of(self, total: int) -> slice:
        """This shard's part of a dimension that the shards divide evenly."""
        assert total % self.size == 0, (total, self.size)
        part = total // self.size
        return slice(self.rank * part, (self.rank + 1) * part)


SINGLE = TensorParallel()
