"""Forward passes over the target's cache: prefill of one sequence, and decoding or verification of all of them.

Shape suffixes: B sequences, T query tokens, A query heads, K KV heads, G = A/K, D head_dim, S slots, P parts (keys and
values, or one latent). In this cache the slot of a token is its position.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from magicdec.runtime.attention import Scoring, Visible, Workspace, decode_attention, prefill_attention
from magicdec.runtime.kv_cache import KVCache

AttentionObserver = Callable[[int, Tensor], None]
"""Called by a pass, for each layer that attends to everything, with (layer, the attention that each query pays to each
slot, summed over the query heads of a KV head, [B, K, T, S])."""


class PrefillPass:
    """`num_tokens` tokens of one sequence, after `num_past` cached ones."""

    def __init__(self, cache: KVCache, *, row: int, num_past: int, num_tokens: int) -> None:
        self._cache, self._row = cache, row
        self._num_past, self._stop = num_past, num_past + num_tokens
        self.positions_BT = torch.arange(num_past, self._stop, device=cache.device)[None]

    def attend(self, layer: int, query_BTAD: Tensor, kv_BTPKD: Tensor, scoring: Scoring) -> Tensor:
        row = slice(self._row, self._row + 1)
        self._cache.write_slice(layer, row, slice(self._num_past, self._stop), kv_BTPKD)
        keys, values = self._cache.read_row(layer, self._row, self._stop)
        return prefill_attention(query_BTAD, keys, values, num_past=self._num_past, scoring=scoring)


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
        workspace: Workspace,
        observer: AttentionObserver | None = None,
        write: bool = True,
        static_shapes: bool = False,
    ) -> None:
        self._cache, self._workspace, self._observer, self._write = cache, workspace, observer, write
        self._shortest, self._longest = int(host_lengths.min()), int(host_lengths.max())
        self._num_tokens, self._static_shapes = num_tokens, static_shapes
        self.positions_BT = lengths_B[:, None] + torch.arange(num_tokens, device=lengths_B.device)
        self._visible: dict[tuple[int | None, int | None], Visible] = {}

    def _visible_to(self, scoring: Scoring) -> Visible:
        """What the queries of a layer see; made once for all layers that see as far."""
        window, chunk = scoring.window, scoring.chunk
        if (window, chunk) not in self._visible:
            stop = self._longest + self._num_tokens
            first = 0 if window is None else max(0, self._shortest + 1 - window)
            is_hidden_early = (window is not None and stop > window) or chunk is not None
            num_open = 0 if is_hidden_early else self._shortest + 1
            if self._static_shapes:
                stop, first, num_open = self._cache.num_slots, 0, 0
            self._visible[window, chunk] = Visible(
                last_BT=self.positions_BT, first=first, stop=stop, num_open=num_open, window=window, chunk=chunk
            )
        return self._visible[window, chunk]

    def attend(self, layer: int, query_BTAD: Tensor, kv_BTPKD: Tensor, scoring: Scoring) -> Tensor:
        if self._write:
            self._cache.write(layer, self.positions_BT, kv_BTPKD)
        keys, values = self._cache.read(layer, len(query_BTAD))
        observer = self._observer if scoring.window is None and scoring.chunk is None else None
        output, paid = decode_attention(
            query_BTAD, keys, values, self._visible_to(scoring),
            scoring=scoring, workspace=self._workspace, probabilities=observer is not None,
        )  # fmt: skip
        if observer is not None:
            assert paid is not None
            observer(layer, paid)
        return output
