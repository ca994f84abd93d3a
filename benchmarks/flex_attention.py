"""Decode and verify attention by torch's FlexAttention, to compare with: its decoding kernel also keeps a KV head's
query rows together and splits the context, but gives no probabilities.

Blocks of slots are listed per sequence from its length on the device; which slots of a block a query sees, a mask says.
Compiled on a GPU; on a CPU it runs uncompiled, as torch's own reference.

Shape suffixes: B sequences, T query tokens, A query heads, K KV heads, D head_dim, S KV slots, N blocks of slots.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128


@cache
def _attend(device_type: str) -> Callable[..., Any]:
    attend: Callable[..., Any] = flex_attention
    return torch.compile(attend, dynamic=False) if device_type == "cuda" else attend


def block_mask(
    last_BT: Tensor,
    num_slots: int,
    *,
    window: int | None = None,
    empty: tuple[Tensor, int] | None = None,
) -> BlockMask:
    """What each query sees, for all layers of a pass: as in `triton_attention.decode_attention`."""
    num_tokens, device = last_BT.shape[1], last_BT.device
    blocks_N = torch.arange(-(-num_slots // BLOCK), dtype=torch.int32, device=device)
    first_B = torch.zeros(len(last_BT), dtype=torch.int32, device=device)
    if window is not None:
        first_B = ((last_BT.amin(1) + 1 - window).clamp_min(0) // BLOCK).int()
    count_B = (last_BT.amax(1) // BLOCK + 1).int() - first_B
    indices_BN = (first_B[:, None] + blocks_N).clamp_max(len(blocks_N) - 1)

    def is_visible(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        visible = s <= last_BT[b, t]
        if window is not None:
            visible &= s > last_BT[b, t] - window
        if empty is not None:
            visible &= (s < empty[0][b]) | (s >= empty[1])
        return visible

    return BlockMask.from_kv_blocks(
        count_B[:, None, None],
        indices_BN[:, None, None],
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=is_visible,
        seq_lengths=(num_tokens, num_slots),
    )


def decode_attention(query_BTAD: Tensor, keys_BKSD: Tensor, values_BKSD: Tensor, mask: BlockMask) -> Tensor:
    """softmax(q·kᵀ/√D)·v over what the mask of `block_mask` shows: [B, T, A·D]."""
    is_grouped = query_BTAD.shape[2] != keys_BKSD.shape[1]
    attend = _attend(query_BTAD.device.type)
    output_BATD = attend(query_BTAD.transpose(1, 2), keys_BKSD, values_BKSD, block_mask=mask, enable_gqa=is_grouped)
    return output_BATD.transpose(1, 2).flatten(2)
