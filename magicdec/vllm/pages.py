"""Which pages of a sequence's cache a StreamingLLM draft reads: the sinks' first, then the last ones in the budget.

The engine keeps keys and values in pages (its blocks) that a block table maps a sequence to. Keys are stored rotated at
their absolute positions, so that attention over any choice of a sequence's pages needs no more than another table: the
chosen pages in order, and a length that is shorter by what is left out. Nothing is copied, and nothing but the draft's
own tokens is written.

    kept   first `sink_pages` pages, then the last ones: window = budget − sink_pages·page, begun at a page's edge
    left   out: ceil((cached + sink_pages·page − budget) / page) − sink_pages pages, none while cached ≤ budget

cached counts the tokens with keys and values, the pending token and the block's own drafts excluded. So a step reads at
most `budget` slots besides the block's own, and at least `budget` − page + 1 where the sequence is longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]


@dataclass(frozen=True, kw_only=True)
class Window:
    """The pages that are read of each of B sequences: `table` [B, pages], and how many pages [B] each leaves out."""

    table: Ints
    num_left_out: Ints


def streaming_window(table: Ints, cached: Ints, *, budget: int, sink_pages: int, page_size: int, gamma: int) -> Window:
    """The sparse table of sequences with `cached` tokens each, with room for the pending token and `gamma` − 1 drafts.

    table: [B, pages] of each sequence's own; cached: [B].
    """
    over = cached + sink_pages * page_size - budget
    first = -(-over // page_size)  # page at which the window begins
    left_out = np.where(cached > budget, np.maximum(first - sink_pages, 0), 0)
    num_pages = int((-(-(cached + gamma) // page_size) - left_out).max())
    columns = np.arange(num_pages)
    source = columns + np.where(columns >= sink_pages, left_out[:, None], 0)
    return Window(
        table=np.take_along_axis(table, np.minimum(source, table.shape[1] - 1), axis=1),
        num_left_out=left_out,
    )


def slots_of(table: Ints, positions: Ints, *, page_size: int) -> Ints:
    """The slot in the engine's cache of each position [B, T], by each sequence's own table [B, pages]."""
    pages = np.take_along_axis(table, positions // page_size, axis=1).astype(np.int64)
    return pages * page_size + positions % page_size
