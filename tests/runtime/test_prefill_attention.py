"""Attention of a prompt's parts after those before."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from magicdec.runtime.attention import Scoring, prefill_attention

SCORING = Scoring(scale=0.3)


@pytest.mark.parametrize(("num_past", "num_tokens"), [(0, 7), (5, 7), (20, 3), (9, 1)])
def test_the_bias_that_gpus_take_is_the_mask_that_cpus_take(
    num_past: int, num_tokens: int
) -> None:
    """With and without cached tokens, heads in groups."""
    generator = torch.Generator().manual_seed(num_past)
    num_slots = num_past + num_tokens
    query_BTAD = torch.randn(1, num_tokens, 6, 8, generator=generator)
    keys, values = torch.randn(2, 1, 2, num_slots, 8, generator=generator)
    expected = prefill_attention(
        query_BTAD, keys, values, num_past=num_past, scoring=SCORING
    )
    bias = causal_lower_right(num_tokens, num_slots)
    found = F.scaled_dot_product_attention(
        query_BTAD.transpose(1, 2),
        keys,
        values,
        attn_mask=bias,
        scale=0.3,
        enable_gqa=True,
    )
    assert torch.allclose(found.transpose(1, 2).flatten(2), expected, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_computes_what_a_cpu_does(dtype: torch.dtype) -> None:
    query_BTAD = torch.randn(1, 33, 6, 16)
    keys, values = torch.randn(2, 1, 2, 100, 16)
    expected = prefill_attention(query_BTAD, keys, values, num_past=67, scoring=SCORING)
    on_gpu = (tensor.to("cuda", dtype) for tensor in (query_BTAD, keys, values))
    found = prefill_attention(*on_gpu, num_past=67, scoring=SCORING)
    assert torch.allclose(
        found.float().cpu(), expected, atol=1e-4 if dtype == torch.float32 else 3e-2
    )
