"""Top-k over pages: each layer's draft reads the pages whose keys its query meets most, beside the sinks and the last.

    score(page) = Σ over query heads of softmax over pages of  scale · query · mean key of the page

A page's mean key is computed once, when the page is full. The query is that of the block's first draft pass; what it
chooses serves the whole block. Budget, and the number of pages, are those of StreamingLLM (pages.py): the pages in the
middle are chosen, not the last ones. After Quest (arXiv 2406.10774), which bounds a page's keys instead of averaging.

A score decides no more than which of a sequence's own pages are read, so that a stale mean costs acceptance at most.

Shape suffixes: B sequences, P pages of a sequence, N pages of the cache, K KV heads, G query heads of each, D head_dim,
S slots of a page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from magicdec.vllm.draft_pass import DraftBlock
from magicdec.vllm.settings import DraftSettings, num_sink_pages

Ints = NDArray[np.integer]
DIGIT = 256
"""Whole numbers below this are exact in every format of keys."""


class PageMeans:
    """Mean keys [N, K, D] of the pages of one layer's cache."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        cache = layer.kv_cache
        num_pages, num_kv_heads, page_size, _ = cache.shape
        shape = (num_kv_heads, page_size, layer.impl.head_size)
        self._place_KSD = _places_of_keys(layer, shape)
        self.means_NKD = torch.zeros(num_pages, num_kv_heads, shape[2], device=cache.device)

    def update(self, pages: Tensor) -> None:
        """Computes the means of these pages, which must be full."""
        flat = self._layer.kv_cache[pages].reshape(len(pages), -1)
        keys = flat[:, self._place_KSD.reshape(-1)].reshape(len(pages), *self._place_KSD.shape)
        self.means_NKD[pages] = keys.float().mean(dim=2)

    def scores(self, query_BAD: Tensor, table_BP: Tensor, is_candidate_BP: Tensor) -> Tensor:
        """Scores [B, P] of each sequence's candidates; meaningless for other pages."""
        means_BPKD = self.means_NKD[table_BP]
        query_BKGD = query_BAD.float().reshape(len(query_BAD), means_BPKD.shape[2], -1, query_BAD.shape[-1])
        logits_BKGP = torch.einsum("bkgd,bpkd->bkgp", query_BKGD, means_BPKD) * self._layer.impl.scale
        shares_BKGP = logits_BKGP.masked_fill(~is_candidate_BP[:, None, None], -torch.inf).softmax(dim=-1)
        scores_BP: Tensor = shares_BKGP.nan_to_num().sum(dim=(1, 2))
        return scores_BP


def _places_of_keys(layer: Any, shape: tuple[int, int, int]) -> Tensor:
    """Where in a page of the cache each number of each key lies [K, S, D], learnt by writing a page of known numbers:
    backends pack pages in ways of their own."""
    num_kv_heads, page_size, head_dim = shape
    numbers_KSD = torch.arange(num_kv_heads * page_size * head_dim).reshape(shape)
    found = torch.zeros(layer.kv_cache[0].numel(), dtype=torch.long)
    is_key = torch.zeros_like(found, dtype=torch.bool)
    scale = 1
    while scale < numbers_KSD.numel():
        page = torch.zeros_like(layer.kv_cache[:1])
        digits = (numbers_KSD // scale % DIGIT + 1).transpose(0, 1).to(page.dtype)  # [S, K, D]; 0 is no key
        layer.impl.do_kv_cache_update(
            layer, digits.contiguous(), torch.zeros_like(digits), page, torch.arange(page_size)
        )
        read = page.reshape(-1).long()
        is_key = read > 0
        found += torch.where(is_key, read - 1, 0) * scale
        scale *= DIGIT
    places = torch.empty(numbers_KSD.numel(), dtype=torch.long)
    places[found[is_key]] = is_key.nonzero().squeeze(1)
    return places.reshape(shape)


class PageSelector:
    """Chooses pages for the sequences of a batch, layer by layer."""

    def __init__(self, layers: dict[str, Any], *, page_size: int) -> None:
        self._page_size = page_size
        self._means = {name: PageMeans(layer) for name, layer in layers.items()}
        self._num_summarised: dict[str, int] = {}
        for layer in layers.values():
            layer.impl.forward = _with_selection(layer.impl.forward)

    def choosing(
        self,
        block: DraftBlock,
        table: Tensor,
        cached: Ints,
        settings: DraftSettings,
        request_ids: Sequence[str],
        *,
        present: Sequence[str],
    ) -> DraftBlock:
        """A block whose layers choose their pages themselves; `request_ids` draft, of all that are `present`."""
        pages = table.numpy()
        self.observe(request_ids, pages, cached, present=present)
        sinks = num_sink_pages(settings.num_sink_tokens, page_size=self._page_size)
        left_out, num_pages = block.num_left_out.numpy(), block.table.shape[1]
        return replace(block, choices=self.choices(pages, cached, left_out, sink_pages=sinks, num_pages=num_pages))

    def observe(self, request_ids: Sequence[str], table: Ints, cached: Ints, *, present: Sequence[str]) -> None:
        """Brings the means up to date. A sequence that left the batch since, as a preempted one does, starts anew."""
        here = set(present)
        self._num_summarised = {name: count for name, count in self._num_summarised.items() if name in here}
        new: list[Ints] = []
        for request_id, row, length in zip(request_ids, table, cached.tolist(), strict=True):
            num_full = length // self._page_size
            known = self._num_summarised.get(request_id, 0)
            if num_full != known:
                known = known if num_full > known else 0
                new.append(row[known:num_full])
                self._num_summarised[request_id] = num_full
        if new:
            pages = torch.from_numpy(np.concatenate(new).astype(np.int64))
            for means in self._means.values():
                means.update(pages)

    def choices(
        self, table: Ints, cached: Ints, num_left_out: Ints, *, sink_pages: int, num_pages: int
    ) -> dict[str, Callable[[Tensor], Tensor]]:
        """For each layer: from its query [B, heads, D] to its table [B, num_pages].

        num_left_out: pages that each sequence does not read. The last full page, and those after it, are always read.
        """
        count = -(-int(cached.max() + 1) // self._page_size) + 1
        table_BP = torch.from_numpy(table[:, : max(count, num_pages)].astype(np.int64))
        columns_P = torch.arange(table_BP.shape[1])
        first_recent_B1 = torch.from_numpy(np.maximum(cached // self._page_size - 1, sink_pages))[:, None]
        is_candidate_BP = (columns_P >= sink_pages) & (columns_P < first_recent_B1)
        num_chosen_B1 = first_recent_B1 - sink_pages - torch.from_numpy(num_left_out)[:, None]

        def choose(means: PageMeans, query_BAD: Tensor) -> Tensor:
            scores_BP = means.scores(query_BAD, table_BP, is_candidate_BP).masked_fill(~is_candidate_BP, -1.0)
            rank_BP = scores_BP.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
            is_left_out_BP = is_candidate_BP & (rank_BP >= num_chosen_B1)
            order_BP = is_left_out_BP.int().argsort(dim=1, stable=True)[:, :num_pages]
            return table_BP.gather(1, order_BP).int()

        return {name: partial(choose, means) for name, means in self._means.items()}


def _with_selection(forward: Any) -> Any:
    """Attention that lets its metadata choose the pages to read, where it has a choice to make."""

    def attend(
        layer: Any, query: Tensor, key: Any, value: Any, cache: Any, metadata: Any, *rest: Any, **named: Any
    ) -> Any:
        choose = getattr(metadata, "choose_pages", None)
        if choose is not None:
            metadata.block_table = choose(query)
        return forward(layer, query, key, value, cache, metadata, *rest, **named)

    return attend
