"""Forward passes over the target's cache: prefill of one sequence, and decoding or verification of all of them.

Shape suffixes: B sequences, T query tokens, A query heads, K KV heads, G = A/K, D head_dim, S slots; 2 is (key, value).
In this cache the slot of a token is its position.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from magicdec.runtime.attention import Workspace, causal_bias, decode_attention, prefill_attention
from magicdec.runtime.kv_cache import KVCache

AttentionObserver = Callable[[int, Tensor], None]
"""Called by a pass with (layer, attention probabilities [B, K, T, G, S])."""


class PrefillPass:
    """`num_tokens` tokens of one sequence, after `num_past` cached ones."""

    def __init__(self, cache: KVCache, *, row: int, num_past: int, num_tokens: int, window: int | None) -> None:
        self._cache, self._row, self._window = cache, row, window
        self._num_past, self._stop = num_past, num_past + num_tokens
        self.positions_BT = torch.arange(num_past, self._stop, device=cache.data.device)[None]

    def attend(self, layer: int, query_BTAD: Tensor, kv_BT2KD: Tensor) -> Tensor:
        row = slice(self._row, self._row + 1)
        self._cache.write_slice(layer, row, slice(self._num_past, self._stop), kv_BT2KD)
        keys, values = self._cache.data[layer, :, row, :, : self._stop].unbind(0)
        return prefill_attention(query_BTAD, keys, values, num_past=self._num_past, window=self._window)


class DecodePass:
    """The same number of tokens for each of the first B sequences, after their own cached lengths.

    Slots are read up to the longest sequence's end (and from the window's beginning, where the model has one); one
    bias, shared by the layers, hides what a shorter sequence or an earlier token must not see. `write` is False for a
    pass over tokens whose keys and values are cached already.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        lengths_B: Tensor,
        host_lengths: np.ndarray,
        num_tokens: int,
        window: int | None,
        workspace: Workspace,
        observer: AttentionObserver | None = None,
        write: bool = True,
    ) -> None:
        self._cache, self._workspace, self._observer, self._write = cache, workspace, observer, write
        shortest, longest = int(host_lengths.min()), int(host_lengths.max())
        self._stop = longest + num_tokens
        self._first = 0 if window is None else max(0, shortest + 1 - window)
        self.positions_BT = lengths_B[:, None] + torch.arange(num_tokens, device=lengths_B.device)
        self._bias = None
        is_hidden_early = window is not None and self._stop > window
        if shortest < longest or num_tokens > 1 or is_hidden_early:
            hidden_from = self._first if is_hidden_early else shortest
            self._bias = causal_bias(
                self.positions_BT,
                first=hidden_from,
                stop=self._stop,
                num_open=hidden_from - self._first,
                window=window,
                dtype=cache.data.dtype,
            )

    def attend(self, layer: int, query_BTAD: Tensor, kv_BT2KD: Tensor) -> Tensor:
        if self._write:
            self._cache.write(layer, self.positions_BT, kv_BT2KD)
        keys, values = self._cache.read(layer, len(query_BTAD), self._first, self._stop)
        output, weights = decode_attention(query_BTAD, keys, values, workspace=self._workspace, bias=self._bias)
        if self._observer is not None:
            self._observer(layer, weights)
        return output
