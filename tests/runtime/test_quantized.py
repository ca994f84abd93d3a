"""Weights in narrow formats: their rounding, their products, and that drafts which use them change no output."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from magicdec.errors import ConfigError
from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.drafters.self_draft import CompactDrafter
from magicdec.runtime.generate import DecodeOptions, decode
from magicdec.runtime.quantized import QuantizedWeight, check_fp8, quantize
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.weights import with_weight_dtype
from magicdec.specs.speculation import (
    DRAFT_WEIGHT_DTYPES,
    SamplingSpec,
    SpeculationSpec,
)
from tests.runtime.conftest import alone, started
from tests.runtime.drafts import DRAFTS, draft_model_for

RELATIVE_STEP = {"bf16": 2.0**-8, "fp8": 2.0**-4}
"""Half the distance to the next number, over the number; fp8 where it is not subnormal."""


def random_weight(outputs: int = 96, inputs: int = 192) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return (
        torch.randn(outputs, inputs, generator=generator)
        * torch.logspace(-3, 1, outputs)[:, None]
    )


def test_rounding_is_to_the_nearest_number_of_the_format() -> None:
    """Of bf16 and fp8 relative to the weight, of int8 to its row's scale, of int4 to its group's."""
    weight = random_weight()
    error = {
        name: (quantize(weight, name).dequantized(torch.float32) - weight).abs()
        for name in DRAFT_WEIGHT_DTYPES
    }
    assert (error["bf16"] <= RELATIVE_STEP["bf16"] * weight.abs()).all()
    largest = weight.abs().amax(dim=1, keepdim=True)
    is_normal = weight.abs() > largest / 448 * 2**-6
    assert (error["fp8"] <= RELATIVE_STEP["fp8"] * weight.abs() * 1.001)[
        is_normal
    ].all()
    assert (error["int8"] <= 0.5001 * largest / 127).all()
    grouped, lost = weight.unflatten(1, (-1, 64)), error["int4"].unflatten(1, (-1, 64))
    step = grouped.abs().amax(dim=-1, keepdim=True) / 8
    assert (lost <= 1.05 * step).all()  # the farthest end of the other sign is clamped
    assert (lost <= 0.55 * step).float().mean() > 0.97


@pytest.mark.parametrize(
    ("name", "bytes_per_weight"), [("bf16", 2), ("fp8", 1), ("int8", 1), ("int4", 0.5)]
)
def test_memory_is_that_of_the_format_and_its_scales(
    name: str, bytes_per_weight: float
) -> None:
    weight = random_weight()
    scales = {
        "bf16": 0,
        "fp8": 4 * len(weight),
        "int8": 4 * len(weight),
        "int4": 2 * weight.numel() // 64,
    }
    narrow = quantize(weight, name)
    found = narrow.data_NK.nbytes + (
        0 if narrow.scales is None else narrow.scales.nbytes
    )
    assert found == bytes_per_weight * weight.numel() + scales[name]


def test_a_gpu_that_cannot_widen_fp8_says_so_and_newer_ones_take_it() -> None:
    for major, minor in ((7, 5), (8, 0), (8, 6)):
        message = f"need compute capability 8.9 or newer, this GPU has {major}.{minor}; use int8 or int4"
        with pytest.raises(ConfigError, match=message):
            check_fp8((major, minor))
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        check_fp8(capability)


def test_int4_keeps_what_it_can_represent() -> None:
    """Each of its sixteen steps, in every column of a group: nothing is mixed up in packing."""
    steps = torch.stack([torch.arange(64).roll(i) % 16 - 8 for i in range(64)]).float()
    weight = torch.cat((steps * 0.5, steps * -2), dim=1)
    assert torch.equal(quantize(weight, "int4").dequantized(torch.float32), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DRAFT_WEIGHT_DTYPES)
def test_a_product_is_that_of_the_dequantised_weight(
    name: str, dtype: torch.dtype
) -> None:
    quantized = quantize(random_weight(), name)
    x, bias = torch.randn(3, 2, 192).to(dtype), torch.randn(96).to(dtype)
    expected = x.double() @ quantized.dequantized(torch.float64).T + bias.double()
    output = quantized.linear(x, bias)
    assert output.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert (
        (output - expected).abs()
        <= tolerance * (1 + expected.abs().max(dim=-1, keepdim=True).values)
    ).all()


def test_rows_of_zeros_stay_zeros() -> None:
    for name in DRAFT_WEIGHT_DTYPES:
        assert not quantize(torch.zeros(4, 64), name).dequantized(torch.float32).any()


def test_unknown_formats_and_odd_shapes_are_refused(tiny_model: Transformer) -> None:
    with pytest.raises(ConfigError, match="int3"):
        SpeculationSpec(draft_weight_dtype="int3")
    with pytest.raises(ConfigError, match="use int8"):
        quantize(torch.ones(4, 40), "int4")
    with pytest.raises(ConfigError, match="int8 already"):
        with_weight_dtype(with_weight_dtype(tiny_model, "int8"), "int4")


def test_everything_but_the_linear_layers_is_shared(tiny_model: Transformer) -> None:
    narrow = with_weight_dtype(tiny_model, "int8")
    assert narrow.embedding is tiny_model.embedding
    assert narrow.rotaries is tiny_model.rotaries
    assert isinstance(narrow.head.weight, QuantizedWeight)
    assert isinstance(tiny_model.head.weight, torch.Tensor)
    assert with_weight_dtype(tiny_model, None) is tiny_model
    assert with_weight_dtype(narrow, "int8") is narrow


@pytest.mark.parametrize("weight_dtype", DRAFT_WEIGHT_DTYPES)
@pytest.mark.parametrize("draft", ["streamingllm", "snapkv", "topk", "model"])
def test_greedy_output_does_not_depend_on_the_drafts_weights(
    draft: str, weight_dtype: str, tiny_model: Transformer
) -> None:
    """Ragged prompts, shorter and longer than the budget: every token is that of autoregressive decoding."""
    generator = np.random.default_rng(1)
    engine = started(
        tiny_model, [generator.integers(0, 64, n).tolist() for n in (3, 20, 60)], 160
    )
    snapshot = engine.snapshot()
    expected = alone(engine, 60)
    engine.restore(snapshot)
    spec = msgspec.structs.replace(DRAFTS[draft], draft_weight_dtype=weight_dtype)
    drafter = build_drafter(spec, engine, draft_model_for(spec, engine.model))
    result = decode(
        engine, drafter, SamplingSpec(), DecodeOptions(gamma=3, max_new_tokens=60)
    )
    assert result.tokens == expected
    if isinstance(drafter, CompactDrafter):
        assert drafter.model.weight_dtype == weight_dtype


def test_a_draft_that_reads_everything_errs_by_its_rounding_only(
    tiny_model: Transformer,
) -> None:
    """With a budget beyond the sequence the exact draft is always right; int8 nearly; int4 less often."""
    generator = np.random.default_rng(2)
    engine = started(
        tiny_model, [generator.integers(0, 64, 40).tolist() for _ in range(4)], 160
    )
    snapshot = engine.snapshot()
    rates = {}
    for weight_dtype in (None, "int8", "int4"):
        engine.restore(snapshot)
        spec = SpeculationSpec(
            draft="self",
            draft_method="streamingllm",
            draft_budget=150,
            gamma=2,
            draft_weight_dtype=weight_dtype,
        )
        result = decode(
            engine,
            build_drafter(spec, engine),
            SamplingSpec(),
            DecodeOptions(gamma=2, max_new_tokens=100),
        )
        rates[weight_dtype] = result.counts.rates[0]
    assert rates[None] == 1
    assert 0.9 < rates["int8"] < 1.0001
    assert 0.3 < rates["int4"] < rates["int8"]
