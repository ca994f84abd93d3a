"""The Triton attention kernels against attention by definition in fp64: on a GPU where there is one, interpreted
otherwise; and that they compile for GPUs that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.runtime.kernels.oracle import TOLERANCE, Case, exact_attention, random_inputs

triton = pytest.importorskip("triton")

from magicdec.runtime.kernels import triton_attention  # noqa: E402
from magicdec.runtime.kernels.triton_attention import (  # noqa: E402
    choose_num_splits,
    decode_attention,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cpu" and not triton.knobs.runtime.interpret,
        reason="neither a GPU nor Triton's interpreter",
    ),
]

CASES = {
    "decode": Case(heads=4, kv_heads=2, head_dim=64, tokens=1, slots=200),
    "verify-2": Case(heads=8, kv_heads=2, head_dim=32, tokens=2, slots=150),
    "verify-5": Case(heads=4, kv_heads=1, head_dim=128, tokens=5, slots=150),
    "verify-8": Case(heads=8, kv_heads=2, head_dim=64, tokens=8, slots=140),
    "verify-16": Case(
        heads=6, kv_heads=6, head_dim=16, tokens=16, slots=100, sequences=2
    ),
    "two-tiles": Case(
        heads=16, kv_heads=1, head_dim=16, tokens=16, slots=40, sequences=1
    ),
    "group-of-3": Case(heads=6, kv_heads=2, head_dim=16, tokens=3, slots=90),
    "group-of-7": Case(heads=7, kv_heads=1, head_dim=16, tokens=4, slots=90),
    "head-dim-80": Case(heads=2, kv_heads=1, head_dim=80, tokens=3, slots=130),
    "head-dim-8": Case(heads=2, kv_heads=2, head_dim=8, tokens=2, slots=40),
    "window": Case(heads=4, kv_heads=2, head_dim=16, tokens=4, slots=300, window=37),
    "ring": Case(
        heads=4, kv_heads=2, head_dim=16, tokens=4, slots=300, window=37, ring=45
    ),
    "hole": Case(heads=4, kv_heads=2, head_dim=16, tokens=4, slots=260, hole_stop=140),
    "one-sequence": Case(
        heads=2, kv_heads=1, head_dim=16, tokens=1, slots=33, sequences=1
    ),
}
SAMPLED = ("verify-2", "verify-8", "verify-16", "group-of-3", "head-dim-8")
"""Shapes that the slow tests add: interpreted, each takes most of a second."""


@pytest.mark.parametrize(
    ("case", "num_splits"),
    [
        pytest.param(
            name,
            (1, 3)[number % 2],
            marks=[pytest.mark.slow] if name in SAMPLED else [],
        )
        for number, name in enumerate(CASES)
    ],
)
def test_output_and_probabilities_equal_the_definition(
    case: str, num_splits: int
) -> None:
    """fp32, ragged, with one split and with several (in half precision: two)."""
    inputs = random_inputs(CASES[case], torch.float32, seed=len(case), device=DEVICE)
    stored, has_weights = inputs.in_ring(CASES[case].ring), CASES[case].ring is None
    output, weights = decode_attention(
        **stored.arguments, probabilities=has_weights, num_splits=num_splits
    )
    expected, expected_weights = exact_attention(inputs)
    assert (output - expected).abs().max() < TOLERANCE[torch.float32]
    if not has_weights:
        return
    assert (weights - expected_weights).abs().max() < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("decode", torch.bfloat16),
        ("verify-5", torch.float16),
        ("hole", torch.float16),
    ],
)
def test_half_precision_stays_within_its_rounding(
    case: str, dtype: torch.dtype
) -> None:
    """The inputs' own rounding is shared with the oracle: what remains is the probabilities' and the output's."""
    inputs = random_inputs(CASES[case], dtype, device=DEVICE)
    output, weights = decode_attention(
        **inputs.arguments, probabilities=True, num_splits=2
    )
    expected, expected_weights = exact_attention(inputs)
    assert output.dtype == dtype
    assert (output - expected).abs().max() < TOLERANCE[dtype]
    assert (weights - expected_weights).abs().max() < TOLERANCE[torch.float32]


def test_more_splits_than_slots_leave_some_without_work() -> None:
    inputs = random_inputs(CASES["head-dim-8"], torch.float32, device=DEVICE)
    output, _ = decode_attention(**inputs.arguments, num_splits=9)
    assert (output - exact_attention(inputs)[0]).abs().max() < TOLERANCE[torch.float32]


def test_what_is_cached_behind_a_sequence_does_not_matter() -> None:
    """Slots beyond a sequence's end may hold anything, NaN included: they are not read."""
    inputs = random_inputs(CASES["decode"], torch.float32, device=DEVICE)
    expected, _ = exact_attention(inputs)
    for b, last in enumerate(inputs.last_BT[:, -1].tolist()):
        inputs.keys_BKSD[b, :, last + 1 :] = torch.nan
        inputs.values_BKSD[b, :, last + 1 :] = torch.nan
    output, weights = decode_attention(
        **inputs.arguments, probabilities=True, num_splits=2
    )
    assert (output - expected).abs().max() < TOLERANCE[torch.float32]
    assert bool(weights.isfinite().all())


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    inputs = random_inputs(CASES["verify-2"], torch.float32, device=DEVICE)
    inputs.last_BT[0] = -1
    output, weights = decode_attention(
        **inputs.arguments, probabilities=True, num_splits=2
    )
    assert not output[0].any()
    assert not weights[0].any()
    assert (output[1:] - exact_attention(inputs)[0][1:]).abs().max() < TOLERANCE[
        torch.float32
    ]


@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8])
def test_one_tile_holds_every_row_up_to_sixteen_tokens(group: int) -> None:
    """Then a program reads keys and values for all query tokens at once."""
    for tokens in range(1, 17):
        sizes = triton_attention.tiling(
            group=group, head_dim=128, num_tokens=tokens, element_bytes=2
        )
        assert sizes["TOKENS_PAD"] >= tokens
        assert sizes["TOKENS_PAD"] * sizes["GROUP_PAD"] >= max(16, tokens * group)


def test_splits_fill_the_device_but_stay_long() -> None:
    """One sequence of 8 KV heads on 132 multiprocessors is divided, a batch of 256 is not, a short one hardly."""
    assert (
        choose_num_splits(num_programs=8, num_slots=131072, num_multiprocessors=132) * 8
        >= 4 * 132
    )
    assert (
        choose_num_splits(num_programs=2048, num_slots=131072, num_multiprocessors=132)
        == 1
    )
    assert (
        choose_num_splits(num_programs=8, num_slots=512, num_multiprocessors=132) == 2
    )
    assert (
        choose_num_splits(num_programs=1, num_slots=10_000_000, num_multiprocessors=132)
        == 128
    )


@pytest.mark.slow
def test_few_variants_are_compiled() -> None:
    """Calibration and the headline of the GPU campaign together: by tile, by the number of splits, and no others."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.kernels.count_variants"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )
    counts = json.loads(done.stdout.splitlines()[-1])
    assert 2 <= counts["_split_kernel"] <= 8
    assert counts["_combine_kernel"] <= 6


@pytest.mark.slow
def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """Those of the other modules too, for sm_80 and sm_90: within their shared memory, with copies that overlap the
    products where there are any, and bf16 without spilled registers."""
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    with_products = {"_split_kernel", "_weigh_kernel", "_grouped_product_kernel"}
    fused = {"_add_rms_norm_kernel", "_rotate_kernel", "_silu_mul_kernel"}
    sampling = {
        "_weigh_shares_kernel",
        "_normalise_kernel",
        "_sum_shares_kernel",
        "_choose_kernel",
    }
    assert {row["kernel"] for row in compiled} == {
        "_combine_kernel"
    } | with_products | fused | sampling
    limit = {80: 163 * 1024, 90: 227 * 1024}
    for row in compiled:
        assert row["shared_bytes"] <= limit[row["capability"]], row
        if row["kernel"] in with_products:
            assert row["async_copies"] > 0, row
        if row["dtype"] == "bf16" or row["kernel"] not in with_products:
            assert row["spilled_bytes"] == 0, row
