"""The CPU kernel against attention by its definition in fp64, on ragged random inputs."""

from __future__ import annotations

import pytest
import torch

from magicdec.runtime.attention import Scoring, Workspace, reference_attention
from magicdec.runtime.kernels import Visible, cpu_attention
from tests.runtime.kernels.oracle import TOLERANCE, Case, exact_attention, random_inputs

CASES = [
    Case(heads=6, kv_heads=6, head_dim=64, tokens=1, slots=300),
    Case(heads=6, kv_heads=6, head_dim=64, tokens=4, slots=513),
    Case(heads=8, kv_heads=2, head_dim=64, tokens=5, slots=333, window=100),
    Case(heads=4, kv_heads=4, head_dim=64, tokens=2, slots=90, hole_stop=50),
    Case(heads=8, kv_heads=1, head_dim=64, tokens=17, slots=200, sequences=2),
    Case(heads=6, kv_heads=3, head_dim=16, tokens=3, slots=40, window=7),
    Case(heads=8, kv_heads=2, head_dim=64, tokens=5, slots=333, window=100, ring=104),
    Case(
        heads=6,
        kv_heads=3,
        head_dim=16,
        tokens=3,
        slots=40,
        window=7,
        ring=9,
        sequences=7,
    ),
    Case(
        heads=1,
        kv_heads=1,
        head_dim=64,
        tokens=2,
        slots=1000,
        window=300,
        ring=340,
        sequences=1,
    ),
    # split along the context
    Case(heads=1, kv_heads=1, head_dim=64, tokens=1, slots=1000, sequences=1),
]
"""Few pairs of rows at a time and head_dim: each is a kernel that is compiled."""
WIDE = Case(heads=8, kv_heads=2, head_dim=128, tokens=1, slots=300)


@pytest.mark.parametrize(
    "case", [*CASES, pytest.param(WIDE, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_agrees_with_exact_attention(case: Case, kernel: str) -> None:
    inputs = random_inputs(case, torch.float32)
    stored = inputs.in_ring(case.ring)
    given = {
        **stored.arguments,
        "keys_BKSD": stored.keys_BKSD.contiguous(),
        "values_BKSD": stored.values_BKSD.contiguous(),
    }
    if kernel == "cpu":
        assert cpu_attention.supports(
            given["query_BTAD"], given["keys_BKSD"], given["values_BKSD"]
        )
        output, paid = cpu_attention.decode_attention(
            **given, probabilities=case.ring is None
        )
    else:
        scoring = Scoring(scale=case.head_dim**-0.5)
        output, paid = reference_attention(
            **given,
            scoring=scoring,
            workspace=Workspace(),
            probabilities=case.ring is None,
        )
    exact, exact_paid = exact_attention(inputs)
    torch.testing.assert_close(
        output.double(), exact, rtol=0, atol=TOLERANCE[torch.float32]
    )
    if case.ring is not None:
        return
    torch.testing.assert_close(
        paid.double(), exact_paid, rtol=0, atol=TOLERANCE[torch.float32]
    )


def test_nan_in_a_query_or_a_key_reaches_the_output() -> None:
    """So that a broken model is noticed, not hidden."""
    query, keys, values = (
        torch.randn(1, 2, 2, 32),
        torch.randn(1, 2, 50, 32),
        torch.randn(1, 2, 50, 32),
    )
    visible = Visible(last_BT=torch.tensor([[48, 49]]), stop=50)
    for broken in (query[0, 0, 0], keys[0, 0, 30], values[0, 0, 30]):
        kept = broken.clone()
        broken[3] = float("nan")
        output, _ = cpu_attention.decode_attention(query, keys, values, visible)
        assert output[0, 0, :32].isnan().any()
        assert not output[..., 32:].isnan().any()
        broken.copy_(kept)


def test_slots_beyond_the_last_are_not_read() -> None:
    """What lies behind a sequence's end is memory of something else."""
    query, keys, values = (
        torch.randn(2, 1, 2, 64),
        torch.randn(2, 2, 70, 64),
        torch.randn(2, 2, 70, 64),
    )
    last_BT = torch.tensor([[5], [40]])
    visible = Visible(last_BT=last_BT, stop=70)
    expected, _ = cpu_attention.decode_attention(query, keys, values, visible)
    for row, last in enumerate(last_BT.flatten().tolist()):
        keys[row, :, last + 1 :] = values[row, :, last + 1 :] = float("nan")
    output, _ = cpu_attention.decode_attention(query, keys, values, visible)
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
