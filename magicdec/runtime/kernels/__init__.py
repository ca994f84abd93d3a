"""Kernels for one kind of device each, where no library has one good enough; and what those of
attention are asked for.

Shape suffixes: B sequences, T query tokens, S KV slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec

import torch
from torch import Tensor

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@cache
def has_triton() -> bool:
    """Whether Triton is installed; its kernels' modules cannot be imported without."""
    return find_spec("triton") is not None


def can_fuse(x: Tensor) -> bool:
    """Whether Triton's kernels take this tensor: on a GPU, of a dtype that fp32 arithmetic
    serves."""
    return x.is_cuda and x.dtype in TRITON_DTYPES and has_triton()


@dataclass(frozen=True, kw_only=True)
class Visible:
    """Which slots each query sees: those up to its last one, at most `window` of them, that are not
    empty. In a ring, all of this is said of positions, and position p is in slot p mod `ring`."""

    last_BT: Tensor
    """The last slot that each query sees, int64."""
    stop: int
    """No query sees this slot or a later one. Known to the host, as are the two below."""
    first: int = 0
    """No query sees an earlier slot."""
    num_open: int = 0
    """Number of slots, from `first` on, that every query sees."""
    window: int | None = None
    chunk: int | None = None
    """Size of chunks; a query sees only slots of its own chunk."""
    ring: int | None = None
    """The slots of a ring, which are then all read: `first` is 0, `stop` this, and none is open."""
    empty: tuple[Tensor, int] | None = None
    """(first_B, stop): in sequence b, slots first_B[b]..stop-1 hold nothing, as where it is shorter
    than a budget.
    """

    @cached_property
    def is_hidden_BTS(self) -> Tensor | None:
        """Whether a query does not see a slot, for slots first + num_open .. stop - 1. None: every
        query sees them all."""
        if self.first + self.num_open == self.stop:
            return None
        slots_S = torch.arange(
            self.first + self.num_open, self.stop, device=self.last_BT.device
        )
        if self.ring is not None:
            # A slot holds the token so many places back from a query as it is behind the query's
            # slot; or a later one,
            # of the block or rejected, where that is too far back to be seen.
            num_seen_BT = self.last_BT + 1
            if self.window is not None:
                num_seen_BT = num_seen_BT.clamp_max(self.window)
            if self.chunk is not None:
                num_seen_BT = self.last_BT % self.chunk + 1
            return (self.last_BT[..., None] - slots_S) % self.ring >= num_seen_BT[
                ..., None
            ]
        hidden_BTS = slots_S > self.last_BT[..., None]
        if self.window is not None:
            hidden_BTS |= slots_S <= self.last_BT[..., None] - self.window
        if self.chunk is not None:
            hidden_BTS |= slots_S < self.last_BT[..., None] // self.chunk * self.chunk
        if self.empty is not None:
            first_B, stop = self.empty
            hidden_BTS |= ((slots_S >= first_B[:, None]) & (slots_S < stop))[:, None]
        return hidden_BTS
