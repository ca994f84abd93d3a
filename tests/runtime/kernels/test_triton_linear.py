"""The Triton product with 8- and 4-bit weights against the same product in fp64: on a GPU where there is one,
interpreted otherwise."""

from __future__ import annotations

import pytest
import torch

from magicdec.runtime.quantized import QuantizedWeight, quantize

triton = pytest.importorskip("triton")

from magicdec.runtime.kernels.triton_linear import tiling, weight_only_linear  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cpu" and not triton.knobs.runtime.interpret,
        reason="neither a GPU nor Triton's interpreter",
    ),
]


def on_device(weight: QuantizedWeight) -> QuantizedWeight:
    return QuantizedWeight(
        data_NK=weight.data_NK.to(DEVICE),
        scales=weight.scales.to(DEVICE),
        group=weight.group,
    )


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(1, 70, 192), (5, 16, 320), (70, 130, 48), (5, 130, 48), (70, 16, 320)],
)
@pytest.mark.parametrize("weight_dtype", ["int8", "fp8", "int4"])
def test_the_product_is_that_of_the_dequantised_weight(
    weight_dtype: str, rows: int, outputs: int, inputs: int
) -> None:
    """Outputs and inputs that no block divides, few rows and many."""
    generator = torch.Generator().manual_seed(rows)
    quantized = on_device(
        quantize(torch.randn(outputs, inputs, generator=generator), weight_dtype)
    )
    x = torch.randn(rows, inputs + 8, generator=generator).to(DEVICE)[:, :inputs]
    assert quantized.scales is not None
    output = weight_only_linear(
        x, quantized.data_NK, quantized.scales, group=quantized.group
    )
    expected = x.double() @ quantized.dequantized(torch.float64).T
    assert (output - expected).abs().max() < 2e-4


@pytest.mark.parametrize("weight_dtype", ["int8", "fp8", "int4"])
def test_bfloat16_activations_lose_their_own_rounding_only(weight_dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    quantized = on_device(
        quantize(torch.randn(48, 128, generator=generator), weight_dtype)
    )
    x = torch.randn(2, 3, 128, generator=generator).to(DEVICE, torch.bfloat16)
    assert quantized.scales is not None
    output = weight_only_linear(
        x, quantized.data_NK, quantized.scales, group=quantized.group
    )
    expected = x.double() @ quantized.dequantized(torch.float64).T
    assert output.shape == (2, 3, 48)
    assert output.dtype == torch.bfloat16
    assert (output - expected).abs().max() < 0.02 * expected.abs().max()


def test_blocks_leave_every_multiprocessor_one() -> None:
    """The products of an 8-billion-parameter model on 132 multiprocessors."""
    for outputs in (4096, 6144, 28672, 128256):
        block = tiling(32, outputs, 132)["BLOCK_N"]
        assert outputs // block >= 132 or block == 16
    assert tiling(32, 128256, 132)["BLOCK_N"] == 128
    assert tiling(32, 4096, 132)["BLOCK_N"] == 16
