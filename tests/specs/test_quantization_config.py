"""What `quantization_config` says of a model's parts; odd values are refused, never guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from magicdec.errors import ConfigError
from magicdec.perfmodel.footprint import weights_bytes
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.hf_config import READERS, model_from_hf_config
from magicdec.specs.precision import Precision
from magicdec.specs.quantization import Quantization, matches

FIXTURES = Path(__file__).resolve().parents[1] / "data" / "quantized"
LLAMA = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 1000,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
PUBLISHED_GIB = {"gpt-oss-120b": 60.8, "gpt-oss-20b": 12.8}
"""Sizes of the checkpoints, arXiv 2508.10925, table 1."""


def quantization(value: Any) -> Quantization | None:
    return model_from_hf_config(
        {**LLAMA, "quantization_config": value}, name="m", where="config.json"
    ).quantization


def group(bits: int, targets: list[str], **weights: Any) -> dict[str, Any]:
    return {
        "targets": targets,
        "weights": {"num_bits": bits, "type": "int", "symmetric": True, **weights},
    }


@pytest.mark.parametrize("name", PUBLISHED_GIB)
def test_a_checkpoint_is_as_large_as_its_publisher_says(name: str) -> None:
    spec = load_model_spec(name)
    num_bytes = float(weights_bytes(spec, Precision(weight_dtype="mxfp4"), 1))
    assert num_bytes / 2**30 == pytest.approx(PUBLISHED_GIB[name], rel=0.002)


def test_parts_have_the_format_of_most_of_their_weights() -> None:
    """A first layer that is left in 16 bits counts for its bytes, not for the format."""
    found = quantization(
        {
            "quant_method": "fbgemm_fp8",
            "modules_to_not_convert": ["model.layers.0.mlp", "self_attn", "lm_head"],
        }
    )
    assert [part.dtype for part in (found.mixer, found.mlp, found.head)] == [
        "bf16",
        "fp8",
        "bf16",
    ]
    down, up = 1 + 4 / 512, 1 + 4 / 256  # an fp32 scale per row
    assert found.mlp.num_bytes == pytest.approx((2 + 2 * (down + 2 * up) / 3) / 3)


def test_groups_of_one_configuration_have_formats_of_their_own() -> None:
    groups = {
        "a": group(8, ["re:.*self_attn.*"], strategy="channel"),
        "b": group(4, ["Linear"], strategy="group", group_size=32),
    }
    found = quantization(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": groups,
            "ignore": [],
        }
    )
    assert [part.dtype for part in (found.mixer, found.mlp, found.head)] == [
        "int8",
        "int4",
        "int4",
    ]
    assert found.weight_dtype == "int4"
    assert found.scheme_of("model.layers.1.self_attn.q_proj") is found.schemes[0]


@pytest.mark.parametrize(
    ("pattern", "module", "is_named"),
    [
        ("lm_head", "language_model.lm_head", True),
        ("gate", "model.layers.1.mlp.gate", True),
        ("gate", "model.layers.1.mlp.gate_proj", False),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("model.layers.*.self_attn", "model.layers.7.self_attn.k_proj", True),
        ("*self_attn*", "model.layers.7.self_attn.k_proj", True),
        (
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "model.layers.0.mlp.up_proj",
            True,
        ),
        (
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "model.layers.1.mlp.experts.3.up_proj",
            False,
        ),
    ],
)
def test_patterns_name_modules_as_their_libraries_read_them(
    pattern: str, module: str, is_named: bool
) -> None:
    assert matches(pattern, module) == is_named


def test_a_method_that_is_not_known_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"gptqq.*gptq"):
        quantization({"quant_method": "gptqq"})
    for value in (
        3,
        [],
        {},
        {"quant_method": ["gptq"]},
        {"quant_algo": "FP7"},
        {"quant_method": "gptq", "bits": 3},
    ):
        with pytest.raises(ConfigError) as refusal:
            quantization(value)
        assert len(str(refusal.value).splitlines()) == 1


ODD = (None, True, -7, 0, 1.5, "", "x", "re:(", [], [None], ["re:("], {}, {"a": None})


@pytest.mark.parametrize(
    "name", sorted(path.name for path in FIXTURES.iterdir() if path.name != "kimi-k2.5")
)
def test_odd_values_are_read_or_refused_in_one_line(name: str) -> None:
    """Each key of a real configuration, and of what is inside it, with each odd value."""
    value = json.loads((FIXTURES / name / "config.json").read_text())[
        "quantization_config"
    ]
    assert value["quant_method"] in READERS
    count, refusals = 0, []
    for changed in _changed(value):
        try:
            found = quantization(changed)
            assert found is None or found.weight_dtype
        except ConfigError as refusal:
            refusals.append(str(refusal))
        count += 1
    assert count >= 3 * len(ODD)
    assert refusals
    assert all(len(each.splitlines()) == 1 for each in refusals)


def _changed(value: Any) -> Any:
    if not isinstance(value, dict):
        return
    for key in value:
        for odd in ODD:
            yield {**value, key: odd}
        for inside in _changed(value[key]):
            yield {**value, key: inside}
