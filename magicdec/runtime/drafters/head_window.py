"""A head's cache of sinks and a window: the first entries, and a ring of the last ones.

    slots 0 .. S-1      entries 0 .. S-1 (sinks)
    slots S .. S+R-1    the entry at position p >= S in slot S + (p - S) mod R

A query sees the sinks and the last W entries up to its own. The ring has room for W and for what a
pass writes ahead of its first query: entries of rejected tokens lie there until they are computed
anew, and overwrite nothing that is still seen. Keys keep the rotation of their own positions.

Shape suffixes: B sequences, T query tokens, A query heads, K KV heads, D head_dim, S slots, P
parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.errors import ConfigError
from magicdec.runtime.attention import Scoring, Workspace, reference_attention
from magicdec.runtime.drafters.self_draft import ring_slots
from magicdec.runtime.kernels import Visible
from magicdec.runtime.kv_cache import KVCache, keys_and_values


@dataclass(frozen=True, kw_only=True)
class HeadWindow:
    """How many entries a head keeps and sees."""

    num_sinks: int
    size: int
    """W: the entries behind the sinks that a query sees, its own included."""
    ahead: int
    """The most entries that a pass writes."""

    @property
    def ring(self) -> int:
        return self.size + self.ahead

    @property
    def num_slots(self) -> int:
        return self.num_sinks + self.ring

    def slots(self, positions: Tensor) -> Tensor:
        return ring_slots(positions, self.num_sinks, self.ring, self.num_sinks)

    def is_seen(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Whether queries see keys; both broadcast."""
        distance = query_positions - key_positions
        is_near = distance < self.size
        is_sink = key_positions < self.num_sinks
        return (distance >= 0) & (is_near | is_sink)

    def check(self, scoring: Scoring) -> None:
        if (
            scoring.softcap is not None
            or scoring.sinks_A is not None
            or scoring.chunk is not None
        ):
            raise ConfigError(
                "a draft budget is run for heads of plain attention; leave --draft-budget out"
            )


@dataclass(frozen=True, kw_only=True)
class WindowVisible(Visible):
    """The slots of a window of a head's cache; `last_BT` are the queries' positions."""

    geometry: HeadWindow

    @cached_property
    def is_hidden_BTS(self) -> Tensor | None:
        window = self.geometry
        last_BT1 = self.last_BT[..., None]
        slots_S = torch.arange(window.num_slots, device=self.last_BT.device)
        is_sink_S = slots_S < window.num_sinks
        # The last position up to the query's that a slot of the ring can hold.
        behind_BTS = (last_BT1 - slots_S) % window.ring
        positions_BTS = torch.where(is_sink_S, slots_S, last_BT1 - behind_BTS)
        is_there_BTS = is_sink_S | (positions_BTS >= window.num_sinks)
        is_seen_BTS = window.is_seen(last_BT1, positions_BTS)
        return ~(is_seen_BTS & is_there_BTS)


class WindowDecodePass:
    """Entries of each sequence from its own position on, over the window."""

    def __init__(
        self,
        cache: KVCache,
        window: HeadWindow,
        *,
        lengths_B: Tensor,
        num_tokens: int,
        workspace: Workspace,
    ) -> None:
        assert num_tokens <= window.ahead, (num_tokens, window.ahead)
        self._cache = cache
        self._workspace = workspace
        self._window = window
        self.positions_BT = lengths_B[:, None] + torch.arange(
            num_tokens, device=lengths_B.device
        )
        self._slots_BT = window.slots(self.positions_BT)
        self._visible = WindowVisible(
            last_BT=self.positions_BT,
            stop=window.num_slots,
            geometry=window,
        )

    def attend(
        self, layer: int, query_BTAD: Tensor, kv_BTPKD: Tensor, scoring: Scoring
    ) -> Tensor:
        self._window.check(scoring)
        self._cache.write(layer, self._slots_BT, kv_BTPKD)
        keys, values = self._cache.read(layer, slice(len(query_BTAD)))
        return reference_attention(
            query_BTAD,
            keys,
            values,
            self._visible,
            scoring=scoring,
            workspace=self._workspace,
        )[0]


class WindowPrefillPass:
    """Part of one sequence's prompt, over the window; the last entries of it are kept."""

    def __init__(
        self,
        cache: KVCache,
        window: HeadWindow,
        *,
        row: int,
        num_past: int,
        num_tokens: int,
    ) -> None:
        self._cache = cache
        self._window = window
        self._row = row
        positions_T = torch.arange(num_past, num_past + num_tokens, device=cache.device)
        self.positions_BT = positions_T[None]
        sinks = torch.arange(min(window.num_sinks, num_past), device=cache.device)
        first = max(window.num_sinks, num_past - window.size + 1)
        recent = torch.arange(min(first, num_past), num_past, device=cache.device)
        self._past_S = torch.cat((sinks, recent[recent >= window.num_sinks]))
        seen_S = torch.cat((self._past_S, positions_T))
        self._is_seen_TS = window.is_seen(positions_T[:, None], seen_S)
        is_sink_T = positions_T < window.num_sinks
        is_last_T = positions_T >= num_past + num_tokens - window.ring
        self._kept_T = (is_sink_T | is_last_T).nonzero()[:, 0]

    def attend(
        self, layer: int, query_BTAD: Tensor, kv_BTPKD: Tensor, scoring: Scoring
    ) -> Tensor:
        window = self._window
        window.check(scoring)
        kv_PKTD = kv_BTPKD[0].permute(1, 2, 0, 3)
        past_slots_S = window.slots(self._past_S)
        past_PKSD = self._cache.of_row(layer, self._row, past_slots_S)
        both_PKSD = torch.cat((past_PKSD, kv_PKTD), dim=2)
        keys, values = keys_and_values(both_PKSD[:, None], self._cache.kept[layer])
        kept_positions_T = self.positions_BT[0, self._kept_T]
        kept_PKTD = kv_PKTD[:, :, self._kept_T]
        self._cache.write_row(
            layer, self._row, window.slots(kept_positions_T), kept_PKTD
        )
        output_BATD = F.scaled_dot_product_attention(
            query_BTAD.transpose(1, 2),
            keys,
            values,
            attn_mask=self._is_seen_TS,
            scale=scoring.scale,
            enable_gqa=query_BTAD.shape[2] != keys.shape[1],
        )
        return output_BATD.transpose(1, 2).flatten(2)
