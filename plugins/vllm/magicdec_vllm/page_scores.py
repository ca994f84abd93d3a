"""Top-k over pages: each layer's draft reads the pages whose keys its query meets most, beside the
sinks and the last.

    score(page) = Σ over query heads of softmax over candidates of
                  scale · query · mean key of the page
    candidates    the pages behind the sinks', `num_chosen` more than StreamingLLM leaves out
                  (pages.py)
    num_chosen    a budget's pages less the sinks' and two: each window has as many, and the last
                  full one
    kept          the `num_chosen` best candidates (the earlier of equal ones), the sinks' pages,
                  and all the last ones

So the draft's table is StreamingLLM's with `num_chosen` of its entries replaced, and its lengths
are the same. After Quest (arXiv 2406.10774), which bounds a page's keys instead of averaging.

A page's mean is made by the write of its last slot, whoever writes: prefill, verification, a draft.
Rejected tokens and keys of former owners are written over, and so is the last slot, before a page
is a candidate (again): the mean of a candidate is that of what its slots hold, and nothing has to
be counted or reset.

The query is that of a block's first draft pass; what it chooses serves `refresh` blocks. Columns
are kept, not pages, so that they are always the sequence's own: a choice that is out of date costs
acceptance at most.

Shape suffixes: B sequences, P pages of a sequence, M pages of a draft's table, N pages of the
cache, K KV heads, G query heads of each (A = K·G), D head_dim, S slots of a page, R rows where the
runner keeps sequences, C chosen pages.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from magicdec.errors import ConfigError
from magicdec.specs.vllm_plugin import DraftSettings, num_sink_pages
from magicdec_vllm.pages import most_pages

if TYPE_CHECKING:
    from magicdec_vllm.draft_pass import DraftBlock, DraftPasses

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
"""Attention backends that learn which pages to read from a table in the metadata alone."""
DIGIT = 256
"""Whole numbers below this are exact in every format of keys."""
NEVER = -(1 << 40)


class PageMeans:
    """Mean keys [N, K, D] of the pages of one layer's cache, kept up as the cache is written."""

    def __init__(self, layer: Any) -> None:
        self._layer, self._write = layer, layer.impl.do_kv_cache_update
        self.scale = float(layer.impl.scale)
        self.means_NKD = torch.empty(0)
        self._place_KSD: Tensor | None = None
        layer.impl.do_kv_cache_update = self._write_and_average
        layer.impl.forward = _with_choice(layer.impl.forward)

    def _write_and_average(
        self,
        layer: Any,
        key: Tensor,
        value: Tensor,
        cache: Tensor,
        slots_T: Tensor,
    ) -> None:
        self._write(layer, key, value, cache, slots_T)
        (num_pages, num_kv_heads, page_size, _), head_dim = (
            cache.shape,
            self._layer.impl.head_size,
        )
        if len(self.means_NKD) != num_pages:  # not cleared: a capture would record that
            self.means_NKD = torch.empty(
                num_pages,
                num_kv_heads,
                head_dim,
                dtype=cache.dtype,
                device=cache.device,
            )
        if cache.is_cuda:
            from magicdec_vllm.page_kernels import average_full_pages

            average_full_pages(cache[..., :head_dim], slots_T, self.means_NKD)
            return
        if self._place_KSD is None:
            self._place_KSD = self._places_of_keys(
                cache, (num_kv_heads, page_size, head_dim)
            )
        pages = (
            slots_T[(slots_T >= 0) & (slots_T % page_size == page_size - 1)]
            // page_size
        )
        if len(pages):
            self.means_NKD[pages] = (
                cache[pages]
                .flatten(1)[:, self._place_KSD]
                .float()
                .mean(dim=2)
                .to(cache.dtype)
            )

    def _places_of_keys(self, cache: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """Where in a page of the cache each number of each key lies [K, S, D], learnt by writing a
        page of known
        numbers: CPUs pack pages in ways of their own."""
        numbers_KSD = torch.arange(shape[0] * shape[1] * shape[2]).reshape(shape)
        numbers = torch.zeros(cache[0].numel(), dtype=torch.long)
        is_key = torch.zeros_like(numbers, dtype=torch.bool)
        scale = 1
        while scale < numbers_KSD.numel():
            page = torch.zeros_like(cache[:1])
            # [S, K, D]; 0 is no key
            digits = (numbers_KSD // scale % DIGIT + 1).transpose(0, 1).to(page.dtype)
            self._write(
                self._layer,
                digits.contiguous(),
                torch.zeros_like(digits),
                page,
                torch.arange(shape[1]),
            )
            read = page.reshape(-1).long()
            is_key = read > 0
            numbers += torch.where(is_key, read - 1, 0) * scale
            scale *= DIGIT
        places = torch.empty(numbers_KSD.numel(), dtype=torch.long)
        places[numbers[is_key]] = is_key.nonzero().squeeze(1)
        return places.reshape(shape)


def watch_layers(config: Any) -> dict[str, PageMeans]:
    """Maintains the mean keys of an engine's layers from now on. Call it before any key is stored
    or graph captured. Raises ConfigError for an attention backend that does not read the pages of a
    block table."""
    context = config.compilation_config.static_forward_context
    layers = {}
    for name, layer in context.items():
        if hasattr(layer, "attn_backend"):
            layers[name] = layer
    for backend in {
        layer.attn_backend.get_name() for layer in layers.values()
    }.difference(BACKENDS):
        raise ConfigError(
            f"draft method topk in vLLM does not run with the attention backend {backend}; use "
            "--attention-backend "
            "FLASH_ATTN, or draft method streamingllm"
        )
    return {name: PageMeans(layer) for name, layer in layers.items()}


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """One layer's table for a block of drafts, written in place when the layer's first query is
    known.
    """

    means: PageMeans
    own_BP: Tensor
    """The sequences' own tables."""
    stop_B: Tensor
    """The column behind the last candidate of each sequence that chooses anew, 0 for others."""
    left_out_B: Tensor
    row_B: Tensor
    chosen_RC: Tensor
    """Chosen columns, in order."""
    num_sinks: int
    table: Tensor

    def choose(self, query: Tensor) -> None:
        """Fills the table by the queries [B or more, A, D]; in kernels where Triton compiles or
        interprets them.
        """
        query_BAD = query[: len(self.table)]
        means_NKD = self.means.means_NKD
        if query.is_cuda or os.environ.get("TRITON_INTERPRET") == "1":
            from magicdec_vllm.page_kernels import choose_pages

            choose_pages(
                query_BAD,
                means_NKD,
                self.own_BP,
                self.stop_B,
                self.left_out_B,
                self.row_B,
                self.chosen_RC,
                self.table,
                scale=self.means.scale,
                num_sinks=self.num_sinks,
            )
            return
        first = self.num_sinks
        count = self.chosen_RC.shape[1]
        longest = int(self.stop_B.max())
        if longest > 0:
            columns_P = torch.arange(longest)
            is_candidate_BP = (columns_P >= first) & (columns_P < self.stop_B[:, None])
            means_BPKD = means_NKD[self.own_BP[:, :longest]].float()
            query_BKGD = query_BAD.float().unflatten(1, (means_BPKD.shape[2], -1))
            logits_BKGP = (
                torch.einsum("bkgd,bpkd->bkgp", query_BKGD, means_BPKD)
                * self.means.scale
            )
            shares_BKGP = logits_BKGP.masked_fill(
                ~is_candidate_BP[:, None, None], -torch.inf
            ).softmax(dim=-1)
            scores_BP = (
                shares_BKGP.nan_to_num()
                .sum(dim=(1, 2))
                .masked_fill(~is_candidate_BP, -1.0)
            )
            order_BP = scores_BP.argsort(dim=1, descending=True, stable=True)
            best_BC = order_BP[:, :count].sort(dim=1).values.int()
            self.chosen_RC[self.row_B] = torch.where(
                self.stop_B[:, None] > 0,
                best_BC,
                self.chosen_RC[self.row_B],
            )
        columns_M = torch.arange(self.table.shape[1])
        source_BM = columns_M + torch.where(
            columns_M >= first, self.left_out_B[:, None], 0
        )
        chosen_BC = source_BM[:, first : first + count]
        chosen_BC.copy_(
            torch.where(
                self.left_out_B[:, None] > 0, self.chosen_RC[self.row_B], chosen_BC
            )
        )
        self.table.copy_(
            self.own_BP.gather(1, source_BM.clamp(max=self.own_BP.shape[1] - 1))
        )


class PageSelector:
    """Chooses pages for the sequences of a batch, layer by layer, and stores the choices."""

    def __init__(
        self,
        means: dict[str, PageMeans],
        settings: DraftSettings,
        passes: DraftPasses,
        *,
        num_rows: int,
        max_gamma: int,
    ) -> None:
        """num_rows: sequences that the runner has at most."""
        size = passes.page_size
        budget = settings.draft_budget
        device = passes.starts.device
        self.settings = settings
        self._means = means
        self._num_rows = num_rows
        self._max_gamma = max_gamma
        self._num_sinks = num_sink_pages(settings.num_sink_tokens, page_size=size)
        self._num_chosen = max(
            min(budget // size - 2, passes.longest // size) - self._num_sinks, 0
        )
        self._last_R = torch.full((num_rows + 1,), NEVER, device=device)
        self._age_R = torch.zeros_like(self._last_R)
        chosen = torch.zeros(
            len(means),
            num_rows + 1,
            self._num_chosen,
            dtype=torch.int32,
            device=device,
        )
        num_places = num_rows * most_pages(
            budget=budget, page_size=size, gamma=max_gamma
        )
        tables = torch.zeros(len(means), num_places, dtype=torch.int32, device=device)
        self._kept = dict(zip(means, zip(chosen, tables, strict=True), strict=True))

    def choosing(
        self,
        block: DraftBlock,
        table: Tensor,
        cached_B: Tensor,
        row_B: Tensor,
    ) -> DraftBlock:
        """A block whose layers choose their pages themselves. row_B: where the runner keeps each
        sequence's state, negative for nobody's."""
        if not self._num_chosen:
            return block
        own_BP, cached_B, left_out_B, row_B = (
            tensor.to(self._last_R.device, non_blocking=True)
            for tensor in (table, cached_B, block.num_left_out, row_B)
        )
        row_B = torch.where(row_B < 0, self._num_rows, row_B).long()
        is_new_B = self._is_due(cached_B, left_out_B, row_B)
        stop_B = (self._num_sinks + self._num_chosen + left_out_B) * is_new_B
        batch, num_pages = block.table.shape
        choices = {}
        for name, (chosen_RC, places) in self._kept.items():
            choices[name] = LayerChoice(
                means=self._means[name],
                own_BP=own_BP,
                stop_B=stop_B,
                left_out_B=left_out_B,
                row_B=row_B,
                chosen_RC=chosen_RC,
                num_sinks=self._num_sinks,
                table=places[: batch * num_pages].view(batch, num_pages),
            )
        return replace(block, choices=choices)

    def _is_due(self, cached_B: Tensor, left_out_B: Tensor, row_B: Tensor) -> Tensor:
        """Which sequences choose anew: those that have pages to leave out, and have not in the last
        `refresh` − 1 blocks. One that is not as long as a block could have made it is another than
        its row had."""
        is_long_B = left_out_B > 0
        if self.settings.refresh == 1:
            return is_long_B
        last_B = self._last_R[row_B]
        age_B = self._age_R[row_B] + 1
        goes_on_B = (
            (last_B < cached_B)
            & (cached_B <= last_B + self._max_gamma + 1)
            & (age_B < self.settings.refresh)
        )
        self._last_R[row_B] = torch.where(is_long_B, cached_B.long(), NEVER)
        self._age_R[row_B] = age_B * goes_on_B
        return is_long_B & ~goes_on_B


def _with_choice(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Attention whose metadata may have a choice of pages to make first."""

    def attend(
        layer: Any,
        query: Tensor,
        key: Any,
        value: Any,
        cache: Any,
        metadata: Any,
        *rest: Any,
        **named: Any,
    ) -> Any:
        if (choice := getattr(metadata, "choice_of_pages", None)) is not None:
            choice.choose(query)
        return forward(layer, query, key, value, cache, metadata, *rest, **named)

    return attend
