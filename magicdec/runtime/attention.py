"""Attention over a KV cache. The one place that knows which kernel is fast where.

Shape suffixes: B sequences, T query tokens, A query heads, K KV heads, G = A/K, D head_dim, S KV slots.

Grouped-query attention folds the group into the query axis (T·G query rows per KV head), so keys and values are read
once per KV head however many query heads share them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionBias:
    """What is added to the scores: 0 where a query may look, -inf where not. The first `num_open` slots that are read
    are open to every query and have no value here."""

    values_BTS: Tensor
    num_open: int


def causal_bias(
    positions_BT: Tensor, *, first: int, stop: int, num_open: int, window: int | None, dtype: torch.dtype
) -> AttentionBias:
    """A query sees the slots up to its own position, and at most `window` of them. Covers slots first..stop-1."""
    slots_S = torch.arange(first, stop, device=positions_BT.device)
    hidden_BTS = slots_S > positions_BT[..., None]
    if window is not None:
        hidden_BTS |= slots_S <= positions_BT[..., None] - window
    values_BTS = torch.zeros(hidden_BTS.shape, dtype=dtype, device=positions_BT.device)
    return AttentionBias(values_BTS=values_BTS.masked_fill_(hidden_BTS, float("-inf")), num_open=num_open)


class Workspace:
    """Buffers for scores, kept from call to call: at tens of megabytes, allocating costs more than computing."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor that holds until this name is taken again."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=like.dtype, device=like.device)
        return buffer[:size].view(shape)


def decode_attention(
    query_BTAD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    *,
    workspace: Workspace,
    bias: AttentionBias | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q·kᵀ/√D + bias)·v for a few query tokens over a long cache.

    Returns the output [B, T, A·D] and the probabilities [B, K, T, G, S], which last until the workspace's next use.
    Scores are computed as K·qᵀ from a row-major q: the layout in which CPU matrix products of this shape run at memory
    speed.
    """
    num_sequences, num_tokens, num_heads, head_dim = query_BTAD.shape
    kv_heads, num_slots = keys_BKSD.shape[1], keys_BKSD.shape[2]
    matrices, rows = num_sequences * kv_heads, num_tokens * num_heads // kv_heads
    query = (query_BTAD * head_dim**-0.5).view(num_sequences, num_tokens, kv_heads, -1, head_dim)
    query = query.transpose(1, 2).reshape(matrices, rows, head_dim)
    keys, values = keys_BKSD.flatten(0, 1), values_BKSD.flatten(0, 1)
    scores = workspace.take("scores", (matrices, num_slots, rows), query)
    torch.bmm(keys, query.transpose(1, 2), out=scores)
    if rows == 1:
        weights = scores.view(matrices, 1, num_slots)
    else:
        weights = workspace.take("weights", (matrices, rows, num_slots), query)
        weights.copy_(scores.transpose(1, 2))
    by_token = weights.view(num_sequences, kv_heads, num_tokens, -1, num_slots)
    if bias is not None:
        by_token[..., bias.num_open :] += bias.values_BTS[:, None, :, None]
    torch.softmax(weights, dim=-1, out=weights)
    output = torch.bmm(weights, values).view(num_sequences, kv_heads, num_tokens, -1, head_dim).transpose(1, 2)
    return output.reshape(num_sequences, num_tokens, num_heads * head_dim), by_token


def prefill_attention(
    query_BTAD: Tensor, keys_BKSD: Tensor, values_BKSD: Tensor, *, num_past: int, window: int | None
) -> Tensor:
    """Attention of many query tokens after `num_past` cached ones, causal and at most `window` back: [B, T, A·D]."""
    num_tokens, num_slots = query_BTAD.shape[1], keys_BKSD.shape[2]
    needs_window = window is not None and num_slots > window
    mask = None
    if num_past or needs_window:
        positions_T1 = torch.arange(num_past, num_slots, device=query_BTAD.device)[:, None]
        slots_S = torch.arange(num_slots, device=query_BTAD.device)
        mask = slots_S <= positions_T1
        if window is not None:
            mask &= slots_S > positions_T1 - window
    output_BATD = F.scaled_dot_product_attention(
        query_BTAD.transpose(1, 2),
        keys_BKSD,
        values_BKSD,
        attn_mask=mask,
        is_causal=mask is None and num_tokens > 1,
        enable_gqa=query_BTAD.shape[2] != keys_BKSD.shape[1],
    )
    return output_BATD.transpose(1, 2).flatten(2)
