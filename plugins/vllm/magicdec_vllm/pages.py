"""Which pages of a sequence's cache a StreamingLLM draft reads: the sinks' first, then the last
ones in the budget.

The engine keeps keys and values in pages (its blocks) that a block table maps a sequence to. Keys
are stored rotated at their absolute positions, so that attention over any choice of a sequence's
pages needs no more than another table: the chosen pages in order, and a length that is shorter by
what is left out. Nothing is copied, and nothing but the draft's own tokens is written.

    kept   first `sink_pages` pages, then the last ones: window = budget − sink_pages·page, begun at
           a page's edge
    left   out: ceil((cached − budget) / page) pages, none while cached ≤ budget

cached counts the tokens with keys and values, the pending token and the block's own drafts
excluded. So a step reads at most `budget` slots besides the block's own, and at least `budget` −
page + 1 where the sequence is longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Window:
    """The pages that are read of each of B sequences: `table` [B, pages], and how many pages [B]
    each leaves out.
    """

    table: Tensor
    num_left_out: Tensor


def most_pages(*, budget: int, page_size: int, gamma: int) -> int:
    """The columns of a sparse table with room for every window, the pending token and `gamma` − 1
    drafts.
    """
    return -(-(budget + gamma) // page_size) + 1


def memory_of_cache(num_bytes: int, *, page_size: int, num_scores: int) -> int:
    """Bytes left for keys and values next to a mean key for each of their pages, and `num_scores`
    of fp32 at a time.
    """
    return max(num_bytes - num_scores * 4, 0) * 2 * page_size // (2 * page_size + 1)


def streaming_window(
    table: Tensor,
    cached: Tensor,
    *,
    budget: int,
    sink_pages: int,
    page_size: int,
    gamma: int,
) -> Window:
    """The sparse table of sequences with `cached` tokens each. Nothing of it depends on values that
    only a device has.

    table: [B, pages] of each sequence's own; cached: [B].
    """
    left_out = ((cached + (page_size - 1 - budget)) // page_size).clamp(min=0)
    num_pages = min(
        most_pages(budget=budget, page_size=page_size, gamma=gamma), table.shape[1]
    )
    columns = torch.arange(num_pages, device=table.device)
    source = columns + (columns >= sink_pages) * left_out[:, None]
    return Window(
        table=table.gather(1, source.clamp(max=table.shape[1] - 1)),
        num_left_out=left_out,
    )


def slots_of(table: Tensor, positions: Tensor, *, page_size: int) -> Tensor:
    """The slot in the engine's cache of each position [B, T], by each sequence's own table [B,
    pages].
    """
    page = positions // page_size
    return torch.add(positions, table.gather(1, page) - page, alpha=page_size)
