"""Forward passes over the target's cache: prefill of one sequence, and decoding or verification of all of them.

Shape suffixes: B sequences, T query tokens, A query heads, K KV heads, G = A/K, D head_dim, S slots, P parts (keys and
values, or one latent). In this cache the slot of a token is its position, or that modulo the size of a ring.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from magicdec.runtime.attention import Scoring, Workspace, decode_attention, prefill_attention
from magicdec.runtime.kernels import Visible
from magicdec.runtime.kv_cache import KVCache, keys_and_values

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
        ring = self._cache.ring(layer)
        if ring is not None:
            return self._attend_in_ring(layer, ring, query_BTAD, kv_BTPKD, scoring)
        row = slice(self._row, self._row + 1)
        self._cache.write_slice(layer, row, slice(self._num_past, self._stop), kv_BTPKD)
        keys, values = self._cache.read_row(layer, self._row, self._stop)
        return prefill_attention(query_BTAD, keys, values, num_past=self._num_past, scoring=scoring)

    def _attend_in_ring(self, layer: int, ring: int, query_BTAD: Tensor, kv_BTPKD: Tensor, scoring: Scoring) -> Tensor:
        """Over the cached tokens that the first query sees and the pass's own, side by side; of these the ring then
        takes the last. Masks count from the first cached token that is seen, which is where a chunk begins."""
        num_seen = scoring.num_seen_before(self._num_past)
        kv_PBKTD = kv_BTPKD.permute(2, 0, 3, 1, 4)
        past_PBKTD = self._cache.last_of_row(layer, self._row, self._num_past, num_seen)
        keys, values = keys_and_values(torch.cat((past_PBKTD, kv_PBKTD), dim=3), self._cache.kept[layer])
        output = prefill_attention(query_BTAD, keys, values, num_past=num_seen, scoring=scoring)
        slots_T = self.positions_BT[0, -ring:] % ring
        self._cache.write_row(layer, self._row, slots_T, kv_PBKTD[:, 0, :, -ring:])
        return output


class DecodePass:
    """A pass over equally many tokens of each of the first B sequences, after their own cached lengths.

    Slots that a shorter sequence or an earlier token must not see are hidden from it. `write` is False for a pass over
    tokens whose keys and values are cached already. With `static_shapes` nothing depends on the host's lengths.
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
        self._slots: dict[int | None, Tensor] = {None: self.positions_BT}

    def _visible_to(self, scoring: Scoring, ring: int | None) -> Visible:
        """The slots that the queries of a layer see; made once for all layers that see as far."""
        window, chunk = scoring.window, scoring.chunk
        if (window, chunk) not in self._visible:
            stop = self._longest + self._num_tokens
            first = 0 if window is None else max(0, self._shortest + 1 - window)
            is_hidden_early = (window is not None and stop > window) or chunk is not None
            num_open = 0 if is_hidden_early else self._shortest + 1
            if self._static_shapes or ring is not None:
                stop, first, num_open = ring or self._cache.num_slots, 0, 0
            self._visible[window, chunk] = Visible(
                last_BT=self.positions_BT, first=first, stop=stop, num_open=num_open, window=window, chunk=chunk,
                ring=ring,
            )  # fmt: skip
        return self._visible[window, chunk]

    def _slots_in(self, ring: int | None) -> Tensor:
        """Where the pass's tokens are stored; made once for all layers with a ring of this size."""
        if ring not in self._slots:
            assert ring is not None
            self._slots[ring] = self.positions_BT % ring
        return self._slots[ring]

    def attend(self, layer: int, query_BTAD: Tensor, kv_BTPKD: Tensor, scoring: Scoring) -> Tensor:
        ring = self._cache.ring(layer)
        if self._write:
            self._cache.write(layer, self._slots_in(ring), kv_BTPKD)
        keys, values = self._cache.read(layer, len(query_BTAD))
        observer = self._observer if scoring.window is None and scoring.chunk is None else None
        output, paid = decode_attention(
            query_BTAD, keys, values, self._visible_to(scoring, ring),
            scoring=scoring, workspace=self._workspace, probabilities=observer is not None,
        )  # fmt: skip
        if observer is not None:
            assert paid is not None
            observer(layer, paid)
        return output
