"""Layers that see a window or a chunk of the tokens before: what their passes compute, against attention under the
masks that transformers makes.

Shape suffixes: N tokens of a sequence, P parts (keys and values), A query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.masking_utils import create_chunked_causal_mask, create_sliding_window_causal_mask

from magicdec.runtime.attention import Scoring, Workspace
from magicdec.runtime.kv_cache import Kept, KVCache
from magicdec.runtime.passes import DecodePass, PrefillPass

HEADS, KV_HEADS, LENGTH, SPAN = 4, 2, 60, 11
PROMPTS = (5, 23, 40)
"""Shorter than the span, and longer."""
Mask = Literal["window", "chunk"]


def their_mask(mask: Mask) -> Tensor:
    """Whether a query sees a token, [N, N]."""
    config = LlamaConfig(num_attention_heads=HEADS)
    config._attn_implementation = "eager"  # whose masks are added to the scores
    config.sliding_window = config.attention_chunk_size = SPAN
    make = create_sliding_window_causal_mask if mask == "window" else create_chunked_causal_mask
    added = make(
        config=config, inputs_embeds=torch.zeros(1, LENGTH, 8), attention_mask=None, past_key_values=None,
        position_ids=torch.arange(LENGTH)[None],
    )  # fmt: skip
    assert isinstance(added, Tensor)
    return added[0, 0] == 0


@dataclass(frozen=True)
class Text:
    """Queries, keys and values of each token of a batch, and what attention gives for them by its definition."""

    query_BNAD: Tensor
    kv_BNPKD: Tensor
    output_BNE: Tensor

    def part(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.query_BNAD[row : row + 1, start:stop], self.kv_BNPKD[row : row + 1, start:stop]


def random_text(mask: Mask, head_dim: int) -> Text:
    generator = torch.Generator().manual_seed(head_dim)
    query = torch.randn(len(PROMPTS), LENGTH, HEADS, head_dim, generator=generator)
    kv = torch.randn(len(PROMPTS), LENGTH, 2, KV_HEADS, head_dim, generator=generator)
    keys, values = kv.repeat_interleave(HEADS // KV_HEADS, dim=3).unbind(2)
    scores = torch.einsum("bnad,bsad->bans", query, keys) * 0.3
    weights = scores.masked_fill(~their_mask(mask), -torch.inf).softmax(-1)
    return Text(query, kv, torch.einsum("bans,bsad->bnad", weights, values).flatten(2))


@pytest.mark.parametrize("head_dim", [8, 16])  # of which kernels take the second
@pytest.mark.parametrize("part", [1, 7, 64])
@pytest.mark.parametrize("mask", ["window", "chunk"])
def test_passes_see_what_transformers_masks_show(mask: Mask, part: int, head_dim: int) -> None:
    """Prompts in parts, and then blocks of which some tokens, or all, are rejected: a rejected token is another one
    than what comes in its place."""
    text = random_text(mask, head_dim)
    scoring = Scoring(scale=0.3, window=SPAN if mask == "window" else None, chunk=SPAN if mask == "chunk" else None)
    kept = Kept(num_heads=KV_HEADS, head_dim=head_dim, is_sparsifiable=False)
    cache = KVCache(
        {0: kept}, batch_size=len(PROMPTS), num_slots=LENGTH, dtype=torch.float32, device=torch.device("cpu")
    )
    for row, length in enumerate(PROMPTS):
        for start in range(0, length, part):
            stop = min(start + part, length)
            prefill = PrefillPass(cache, row=row, num_past=start, num_tokens=stop - start)
            found = prefill.attend(0, *text.part(row, start, stop), scoring)[0]
            torch.testing.assert_close(found, text.output_BNE[row, start:stop], atol=1e-5, rtol=1e-5)
    lengths, generator = np.array(PROMPTS), np.random.default_rng(1)
    while lengths.max() + 4 <= LENGTH:
        block = torch.arange(4) + torch.from_numpy(lengths)[:, None]
        rows = torch.arange(len(PROMPTS))[:, None]
        num_right = generator.integers(0, 5, len(PROMPTS))
        query, kv = text.query_BNAD[rows, block], text.kv_BNPKD[rows, block].clone()
        for row, count in enumerate(num_right):
            kv[row, count:] = 100.0
        attention = DecodePass(
            cache, lengths_B=torch.from_numpy(lengths), host_lengths=lengths, num_tokens=4, workspace=Workspace()
        )
        found = attention.attend(0, query, kv, scoring)
        for row, count in enumerate(num_right):
            expected = text.output_BNE[row, lengths[row] : lengths[row] + count]
            torch.testing.assert_close(found[row, :count], expected, atol=1e-5, rtol=1e-5)
        lengths = lengths + num_right
