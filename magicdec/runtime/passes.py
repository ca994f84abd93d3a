"""Forward passes over the target's cache: prefill of one sequence, and decoding or verification of all of them.

Shape suffixes: B sequences, T query tokens, A query heads, K KV heads, G = A/K, D head_dim, S slots; 2 is (key, value).
In this cache the slot of a token is its position.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from magicdec.runtime.attention import Visible, Workspace, decode_attention, prefill_attention
from magicdec.runtime.kv_cache import KVCache

AttentionObserver = Callable[[int, Tensor], None]
"""Called by a pass with (layer, the attention that each query pays to each slot, summed over the query heads of a KV
head, [B, K, T, S])."""


class PrefillPass:
    """`num_tokens` tokens of one sequence, after `num_past` cached ones."""

    def __init__(self, cache: KVCache, *, row: int, num_past: int, num_tokens: int, window: int | None) -> None:
        self._cache, self._row, self._window = cache, row, window
        self._num_past, self._stop = num_past, num_past + num_tokens
        self.positions_BT = torch.arange(num_past, self._stop, device=cache.device)[None]

    def attend(self, layer: int, query_BTAD: Tensor, kv_BT2KD: Tensor) -> Tensor:
        row = slice(self._row, self._row + 1)
        self._cache.write_slice(layer, row, slice(self._num_past, self._stop), kv_BT2KD)
        keys, values = self._cache.read_row(layer, self._row, self._stop)
        return prefill_attention(query_BTAD, keys, values, num_past=self._num_past, window=self._window)


class DecodePass:
    """The same number of tokens for each of the first B sequences, after their own cached lengths.

    What a shorter sequence or an earlier token must not see is hidden from it. `write` is False for a pass over tokens
    whose keys and values are cached already. With `static_shapes` nothing depends on the host's lengths.
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
        static_shapes: bool = False,
    ) -> None:
        self._cache, self._workspace, self._observer, self._write = cache, workspace, observer, write
        shortest, longest = int(host_lengths.min()), int(host_lengths.max())
        self.positions_BT = lengths_B[:, None] + torch.arange(num_tokens, device=lengths_B.device)
        stop = longest + num_tokens
        first = 0 if window is None else max(0, shortest + 1 - window)
        is_hidden_early = window is not None and stop > window
        num_open = 0 if is_hidden_early else shortest + 1
        if static_shapes:
            stop, first, num_open = cache.num_slots, 0, 0
        self._visible = Visible(last_BT=self.positions_BT, first=first, stop=stop, num_open=num_open, window=window)

    def attend(self, layer: int, query_BTAD: Tensor, kv_BT2KD: Tensor) -> Tensor:
        if self._write:
            self._cache.write(layer, self.positions_BT, kv_BT2KD)
        keys, values = self._cache.read(layer, len(query_BTAD))
        is_observed = self._observer is not None
        output, paid = decode_attention(
            query_BTAD, keys, values, self._visible, workspace=self._workspace, probabilities=is_observed
        )
        if self._observer is not None:
            assert paid is not None
            self._observer(layer, paid)
        return output
