"""Tensor parallelism: one process per shard, and the collectives between them.

A world of one needs no process group; its collectives return their argument. On GPUs they are
NCCL's, else gloo's.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The gathering collective into one tensor, by its name from torch 2.13 on and by the one before.
"""


class CollectiveClock:
    """Time spent in collectives, waiting for the other ranks included. Off, it costs nothing."""

    def __init__(self) -> None:
        self.enabled = False
        self._total_s = 0.0

    def run(self, device: torch.device, collective: Callable[[], object]) -> None:
        if not self.enabled:
            collective()
            return
        start_s = now_s(device)
        collective()
        self._total_s += now_s(device) - start_s

    def take_s(self) -> float:
        """The time since the last call."""
        total_s, self._total_s = self._total_s, 0.0
        return total_s


def now_s(device: torch.device) -> float:
    """The time once the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """This process's place among the `size` shards of a model. `group` is None for the default
    process group. Ranks are those within the group, which always begins with global rank 0."""

    rank: int = 0
    size: int = 1
    group: Any = None
    clock: CollectiveClock = field(default_factory=CollectiveClock)

    @property
    def can_capture(self) -> bool:
        """Whether a CUDA graph can hold this group's collectives."""
        return self.size == 1 or dist.get_backend(self.group) == "nccl"

    def all_reduce(self, tensor: Tensor, *, largest: bool = False) -> Tensor:
        """The sum over the shards, or the maximum, in place."""
        if self.size == 1:
            return tensor
        operation = dist.ReduceOp.SUM
        if largest:
            operation = dist.ReduceOp.MAX

        def reduce() -> None:
            dist.all_reduce(tensor, op=operation, group=self.group)

        self.clock.run(tensor.device, reduce)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The shards' tensors (of equal shape) stacked in a new first dimension."""
        if self.size == 1:
            return tensor[None]
        shape = (self.size, *tensor.shape)
        parts = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        own = tensor.contiguous().view(-1)

        def gather() -> None:
            _gather(parts.view(-1), own, group=self.group)

        self.clock.run(tensor.device, gather)
        return parts

    def all_gather_last(self, tensor: Tensor) -> Tensor:
        """The shards' tensors (of equal shape) side by side in the last dimension."""
        if self.size == 1:
            return tensor
        parts = self.all_gather(tensor)
        return parts.movedim(0, -2).flatten(-2)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, in place."""
        if self.size == 1:
            return tensor

        def send() -> None:
            dist.broadcast(tensor, src=0, group=self.group)

        self.clock.run(tensor.device, send)
        return tensor

    def scatter(self, whole: Tensor | None, like: Tensor) -> Tensor:
        """This rank's part of the last dimension of rank 0's tensor, of the shape and kind of
        `like`.
        """
        if self.size == 1:
            assert whole is not None
            return whole
        part = torch.empty_like(like)
        parts = None
        if whole is not None:
            chunks = whole.chunk(self.size, dim=-1)
            parts = [chunk.contiguous() for chunk in chunks]

        def scatter() -> None:
            dist.scatter(part, parts, src=0, group=self.group)

        self.clock.run(part.device, scatter)
        return part

    def first(self, size: int) -> TensorParallel | None:
        """The first `size` ranks as a group of their own; None on the others. Every rank has to
        call this.
        """
        if size == self.size:
            return self
        group = dist.new_group(list(range(size)))
        if self.rank < size:
            return TensorParallel(rank=self.rank, size=size, group=group)
        return None

    def slice_of(self, total: int) -> slice:
        """This shard's part of a dimension that the shards divide evenly."""
        assert total % self.size == 0, (total, self.size)
        part = total // self.size
        start = self.rank * part
        return slice(start, start + part)

    def own_rows(self, tokens: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The tokens' rows among this shard's `size` of the vocabulary (any row for a token of
        another shard), and which tokens are this shard's."""
        local = tokens - self.rank * size
        is_here = (local >= 0) & (local < size)
        return local.clamp(0, size - 1), is_here


SINGLE = TensorParallel()


def join_world(
    device_type: str, listener: socket.socket | None = None
) -> TensorParallel:
    """This process's place among the ranks of its environment (torchrun's variables), which are one
    tensor-parallel group. Without such variables: a group of one.

    `listener` is an open socket at the port where ranks meet, which rank 0 takes over; without it
    rank 0, or torchrun, opens that port.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return TensorParallel()
    if not dist.is_initialized():
        backend = "gloo"
        if device_type == "cuda":
            backend = "nccl"
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if listener is not None:
            # the group's own store joins the server that this process runs at its port; held
            # until it has
            address, port = listener.getsockname()
            meeting = dist.TCPStore(  # type: ignore[attr-defined]  # noqa: F841
                address,
                port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                timeout=COLLECTIVE_TIMEOUT,
                master_listen_fd=listener.detach(),
            )
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    return TensorParallel(rank=dist.get_rank(), size=dist.get_world_size())


def leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
