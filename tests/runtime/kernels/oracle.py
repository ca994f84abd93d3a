"""Attention by its definition, in fp64, and random ragged inputs for the kernels that are held against it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from magicdec.runtime.kernels import Visible

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Largest error of an output of unit scale: some units in the last place of each dtype."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes, and what each query sees. A hole ends at `hole_stop` and begins anywhere before it."""

    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    slots: int
    sequences: int = 3
    window: int | None = None
    hole_stop: int | None = None
    ring: int | None = None


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Strided views, as a cache and a fused projection give them."""

    query_BTAD: Tensor
    keys_BKSD: Tensor
    values_BKSD: Tensor
    last_BT: Tensor
    window: int | None
    empty: tuple[Tensor, int] | None
    ring: int | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """What a kernel's `decode_attention` is given."""
        visible = Visible(
            last_BT=self.last_BT,
            stop=self.keys_BKSD.shape[2],
            window=self.window,
            ring=self.ring,
            empty=self.empty,
        )
        named = {
            "query_BTAD": self.query_BTAD,
            "keys_BKSD": self.keys_BKSD,
            "values_BKSD": self.values_BKSD,
        }
        return {**named, "visible": visible}

    def in_ring(self, ring: int | None) -> Inputs:
        """The same, but with keys and values in a ring of so many slots, in the order in which they came."""
        if ring is None:
            return self
        keys, values = (
            kv[:, :, :ring].clone() for kv in (self.keys_BKSD, self.values_BKSD)
        )
        for row, stop in enumerate((self.last_BT.amax(1) + 1).tolist()):
            for start in range(0, stop, ring):
                part = slice(start, min(start + ring, stop))
                keys[row, :, : part.stop - start] = self.keys_BKSD[row, :, part]
                values[row, :, : part.stop - start] = self.values_BKSD[row, :, part]
        return replace(self, keys_BKSD=keys, values_BKSD=values, ring=ring)


def random_inputs(
    case: Case, dtype: torch.dtype, *, seed: int = 0, device: str = "cpu"
) -> Inputs:
    """The longest sequence ends at the last slot, the shortest at its first tokens (but behind a hole)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, case.sequences, case.kv_heads, case.slots + 5, case.head_dim)
    storage = torch.randn(shape, generator=generator).to(device, dtype)
    keys, values = storage[:, :, :, : case.slots].unbind(0)
    fused = torch.randn(
        case.sequences, case.tokens, case.heads + 3, case.head_dim, generator=generator
    )
    lowest = case.hole_stop or 0
    lengths_B = torch.linspace(lowest, case.slots - case.tokens, case.sequences).long()
    empty = None
    if case.hole_stop is not None:
        empty = (
            torch.linspace(1, case.hole_stop, case.sequences).long().to(device),
            case.hole_stop,
        )
    return Inputs(
        query_BTAD=fused.to(device, dtype)[:, :, : case.heads], keys_BKSD=keys, values_BKSD=values,
        last_BT=(lengths_B[:, None] + torch.arange(case.tokens)).to(device), window=case.window, empty=empty,
    )  # fmt: skip


def exact_attention(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The output [B, T, A·D], and the probabilities summed over a KV head's query heads [B, K, T, S]."""
    query, keys, values = (
        t.double() for t in (inputs.query_BTAD, inputs.keys_BKSD, inputs.values_BKSD)
    )
    num_tokens, num_heads = query.shape[1:3]
    num_sequences, kv_heads, num_slots, head_dim = keys.shape
    group = num_heads // kv_heads
    keys, values = (
        keys.repeat_interleave(group, dim=1),
        values.repeat_interleave(group, dim=1),
    )
    scores = torch.einsum("btad,basd->bats", query, keys) / head_dim**0.5
    slots_S = torch.arange(num_slots, device=query.device)
    seen_BTS = slots_S <= inputs.last_BT[..., None]
    if inputs.window is not None:
        seen_BTS &= slots_S > inputs.last_BT[..., None] - inputs.window
    if inputs.empty is not None:
        first_B, stop = inputs.empty
        seen_BTS &= ((slots_S < first_B[:, None]) | (slots_S >= stop))[:, None]
    weights = scores.masked_fill(~seen_BTS[:, None], -torch.inf).softmax(-1)
    output = torch.einsum("bats,basd->btad", weights, values).flatten(2)
    return output, weights.view(
        num_sequences, kv_heads, group, num_tokens, num_slots
    ).sum(2)
