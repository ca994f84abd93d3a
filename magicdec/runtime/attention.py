"""Attention over a KV cache. The one place that knows which kernel is fast where.

Shape suffixes: B sequences, T query tokens, A query heads, K KV heads, G = A/K, D head_dim, S KV
slots.

Grouped-query attention folds the group into the query axis (T·G query rows per KV head), so keys
and values are read once per KV head however many query heads share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.runtime.kernels import Visible, has_triton


@dataclass(frozen=True, kw_only=True, eq=False)
class Scoring:
    """How the queries of a layer score keys, and how far back they see."""

    scale: float
    """Factor of the products of query and key."""
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    """Scores become softcap · tanh(score / softcap)."""
    sinks_A: Tensor | None = None
    """Logits, one for each query head, that take part in the softmax and attend to nothing."""

    def num_seen_before(self, position: int) -> int:
        """Number of the tokens before this position that its query sees."""
        if self.chunk is not None:
            return position % self.chunk
        if self.window is None:
            return position
        return min(position, self.window - 1)

    @property
    def is_plain(self) -> bool:
        """Whether it is a softmax of scaled products, which every kernel computes."""
        return self.softcap is None and self.sinks_A is None and self.chunk is None


REFERENCE_QUERIES = 64
"""Query tokens at a time where the reference attends to a prompt: its scores are in memory."""


class Workspace:
    """Buffers for scores, kept from call to call: at tens of megabytes, allocating costs more than
    computing.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor that holds until this name is taken again."""
        # a graph reads a buffer where it was captured, and allocating is quick
        if like.device.type == "cuda":
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=like.dtype, device=like.device)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)


def decode_attention(
    query_BTAD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    visible: Visible,
    *,
    scoring: Scoring,
    workspace: Workspace,
    probabilities: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """softmax(scale·q·kᵀ)·v for a few query tokens over the slots of a long cache that each of them
    sees: [B, T, A·D]. With `probabilities`, also the attention that each query pays to slots
    0..stop-1, summed over the query heads of a KV head: [B, K, T, stop]. The kernel is the
    machine's fastest that takes the inputs; what none of them computes (soft caps, sinks, chunks,
    values of another size than keys) is left to the reference."""
    is_plain = scoring.is_plain and keys_BKSD.shape == values_BKSD.shape
    if not is_plain:
        kernel = None
    else:
        kernel = fastest_kernel(query_BTAD, keys_BKSD, values_BKSD)
    if kernel is None:
        return reference_attention(
            query_BTAD,
            keys_BKSD,
            values_BKSD,
            visible,
            scoring=scoring,
            workspace=workspace,
            probabilities=probabilities,
        )
    return kernel(
        query_BTAD,
        keys_BKSD,
        values_BKSD,
        visible,
        scale=scoring.scale,
        probabilities=probabilities,
    )


def fastest_kernel(
    query: Tensor, keys: Tensor, values: Tensor
) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """The `decode_attention` of the kernel to use; None where only the reference takes these
    tensors.
    """
    if query.device.type == "cpu" and query.dtype == torch.float32:
        from magicdec.runtime.kernels import cpu_attention

        if cpu_attention.supports(query, keys, values):
            return cpu_attention.decode_attention
        return None
    if query.is_cuda and has_triton():
        from magicdec.runtime.kernels import triton_attention

        if triton_attention.supports(query, keys, values):
            return triton_attention.decode_attention
    return None


def reference_attention(
    query_BTAD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    visible: Visible,
    *,
    scoring: Scoring,
    workspace: Workspace,
    probabilities: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`decode_attention` in plain torch, for any device, dtype and scoring. Scores are computed as
    K·qᵀ from a row-major q: the layout in which CPU matrix products of this shape run at memory
    speed."""
    num_sequences, num_tokens, num_heads, head_dim = query_BTAD.shape
    kv_heads = keys_BKSD.shape[1]
    num_slots = visible.stop - visible.first
    matrices = num_sequences * kv_heads
    rows = num_tokens * num_heads // kv_heads
    query = query_BTAD * scoring.scale
    query = query.view(num_sequences, num_tokens, kv_heads, -1, head_dim)
    query = query.transpose(1, 2).reshape(matrices, rows, head_dim)
    keys, values = (
        kv[:, :, visible.first : visible.stop].flatten(0, 1)
        for kv in (keys_BKSD, values_BKSD)
    )
    scores = workspace.take("scores", (matrices, num_slots, rows), query)
    torch.bmm(keys, query.transpose(1, 2), out=scores)
    if rows == 1:
        weights = scores.view(matrices, 1, num_slots)
    else:
        weights = workspace.take("weights", (matrices, rows, num_slots), query)
        weights.copy_(scores.transpose(1, 2))
    if scoring.softcap is not None:
        weights.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    by_token = weights.view(num_sequences, kv_heads, num_tokens, -1, num_slots)
    if visible.is_hidden_BTS is not None:
        by_token[..., visible.num_open :].masked_fill_(
            visible.is_hidden_BTS[:, None, :, None], float("-inf")
        )
    if scoring.sinks_A is None:
        torch.softmax(weights, dim=-1, out=weights)
    else:
        sinks = scoring.sinks_A.view(kv_heads, 1, -1, 1).expand(
            num_sequences,
            -1,
            num_tokens,
            -1,
            1,
        )
        by_token.copy_(
            torch.cat((by_token, sinks.to(weights.dtype)), dim=-1).softmax(dim=-1)[
                ..., :-1
            ]
        )
    output = (
        torch.bmm(weights, values)
        .unflatten(0, (num_sequences, kv_heads))
        .unflatten(2, (num_tokens, -1))
    )
    paid = None
    if probabilities:
        paid = F.pad(by_token.sum(dim=3), (visible.first, 0))
    return output.transpose(1, 2).flatten(2), paid


def prefill_attention(
    query_BTAD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    *,
    num_past: int,
    scoring: Scoring,
) -> Tensor:
    """Attention of many query tokens after `num_past` cached ones, causal and at most a window
    back: [B, T, A·D].
    """
    if not scoring.is_plain or keys_BKSD.shape != values_BKSD.shape:
        return _reference_prefill(query_BTAD, keys_BKSD, values_BKSD, num_past, scoring)
    num_tokens = query_BTAD.shape[1]
    num_slots = keys_BKSD.shape[2]
    needs_window = scoring.window is not None and num_slots > scoring.window
    mask: Tensor | None = None
    if num_past and not needs_window and query_BTAD.is_cuda:
        # which loads torch's compiler
        from torch.nn.attention.bias import (
            causal_lower_right,
        )

        # a mask in memory would rule flash attention out
        mask = causal_lower_right(num_tokens, num_slots)
    elif num_past or needs_window:
        positions_T = torch.arange(num_past, num_slots, device=query_BTAD.device)
        positions_T1 = positions_T[:, None]
        slots_S = torch.arange(num_slots, device=query_BTAD.device)
        mask = slots_S <= positions_T1
        if scoring.window is not None:
            mask &= slots_S > positions_T1 - scoring.window
    output_BATD = F.scaled_dot_product_attention(
        query_BTAD.transpose(1, 2),
        keys_BKSD,
        values_BKSD,
        attn_mask=mask,
        is_causal=mask is None and num_tokens > 1,
        scale=scoring.scale,
        enable_gqa=query_BTAD.shape[2] != keys_BKSD.shape[1],
    )
    return output_BATD.transpose(1, 2).flatten(2)


def _reference_prefill(
    query_BTAD: Tensor,
    keys: Tensor,
    values: Tensor,
    num_past: int,
    scoring: Scoring,
) -> Tensor:
    """A few query tokens at a time, by the reference: their scores are in memory."""
    workspace = Workspace()
    outputs = []
    for start in range(0, query_BTAD.shape[1], REFERENCE_QUERIES):
        part = query_BTAD[:, start : start + REFERENCE_QUERIES]
        first = num_past + start
        positions_T = torch.arange(first, first + part.shape[1], device=part.device)
        first_seen = 0
        if scoring.window is not None:
            first_seen = max(0, first + 1 - scoring.window)
        visible = Visible(
            last_BT=positions_T.expand(len(part), -1),
            stop=first + part.shape[1],
            first=first_seen,
            window=scoring.window,
            chunk=scoring.chunk,
        )
        output, _ = reference_attention(
            part,
            keys,
            values,
            visible,
            scoring=scoring,
            workspace=workspace,
        )
        outputs.append(output)
    return torch.cat(outputs, dim=1)
