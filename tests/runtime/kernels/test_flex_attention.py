"""FlexAttention, given our description of what a query sees, against attention by definition in fp64."""

from __future__ import annotations

import pytest
import torch

from magicdec.runtime.kernels.flex_attention import block_mask, decode_attention
from tests.runtime.kernels.oracle import TOLERANCE, Case, exact_attention, random_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu
CASES = {
    "decode": Case(heads=4, kv_heads=2, head_dim=64, tokens=1, slots=256),
    "verify": Case(heads=4, kv_heads=1, head_dim=64, tokens=5, slots=384),
    "window": Case(heads=4, kv_heads=4, head_dim=16, tokens=4, slots=384, window=37),
    "ring": Case(heads=4, kv_heads=2, head_dim=16, tokens=4, slots=384, window=150, ring=160),
    "hole": Case(heads=4, kv_heads=2, head_dim=16, tokens=4, slots=384, hole_stop=200),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", CASES)
def test_output_equals_the_definition(case: str) -> None:
    inputs = random_inputs(CASES[case], torch.float32, device=DEVICE)
    stored = inputs.in_ring(CASES[case].ring)
    keys, values = stored.keys_BKSD, stored.values_BKSD
    mask = block_mask(inputs.last_BT, keys.shape[2], window=inputs.window, ring=stored.ring, empty=inputs.empty)
    output = decode_attention(inputs.query_BTAD, keys, values, mask)
    assert (output - exact_attention(inputs)[0]).abs().max() < TOLERANCE[torch.float32]


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case].ring is None])
def test_no_block_that_a_query_sees_is_left_out(case: str) -> None:
    """And none is listed beyond a sequence's end: short sequences read less."""
    inputs = random_inputs(CASES[case], torch.float32)
    mask = block_mask(inputs.last_BT, inputs.keys_BKSD.shape[2], window=inputs.window, empty=inputs.empty)
    for b, last_T in enumerate(inputs.last_BT.tolist()):
        count = int(mask.kv_num_blocks[b, 0, 0])
        listed = set(mask.kv_indices[b, 0, 0, :count].tolist())
        lowest = 0 if inputs.window is None else max(0, last_T[0] + 1 - inputs.window)
        assert listed == set(range(lowest // 128, last_T[-1] // 128 + 1))
