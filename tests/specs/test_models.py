"""The catalog's configurations against the parameter counts their publishers state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from magicdec.errors import CapacityError, ConfigError
from magicdec.perfmodel.plan.planner import PlanRequest, plan
from magicdec.specs.catalog import MODELS_DIRECTORY, load_model_spec
from magicdec.specs.hf_config import model_from_hf_config

PUBLISHED_PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-7b-32k": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-68m": 68_030_208,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "yi-1.5-6b": 6_061_035_520,
    "yi-1.5-34b": 34_388_917_248,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
}
"""Tensor elements in each published safetensors index (a tied head counted once)."""


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameter_count_equals_the_published_one(name: str) -> None:
    """Those of other models are counted by transformers: test_architectures_table.py."""
    assert load_model_spec(name).num_parameters == PUBLISHED_PARAMETERS[name]


def dense(hidden: int, width: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": 32768, **more,
    }  # fmt: skip


PUBLISHED_ELSEWHERE: dict[str, tuple[int, dict[str, Any]]] = {
    "SmolLM3-3B": (
        3_075_098_624,
        dense(2048, 11008, 36, 16, 4, 128256, model_type="smollm3", no_rope_layers=[1, 1, 1, 0] * 9),
    ),
    "Seed-OSS-36B": (
        36_151_104_512,
        dense(5120, 27648, 64, 80, 8, 155136, model_type="seed_oss", head_dim=128, attention_bias=True),
    ),
    "EXAONE-4.0-32B": (
        32_003_216_384,
        dense(5120, 27392, 64, 40, 8, 102400, model_type="exaone4", head_dim=128, sliding_window_pattern="LLLG",
            layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 16),
    ),
    "Apertus-8B": (8_053_338_176, dense(4096, 21504, 32, 32, 8, 131072, model_type="apertus", hidden_act="xielu")),
    "GLM-4-9B": (9_399_951_360, dense(4096, 13696, 40, 32, 2, 151552, model_type="glm", head_dim=128)),
    "OLMoE-1B-7B": (
        6_919_161_856,
        dense(2048, 1024, 16, 16, 16, 50304, model_type="olmoe", num_experts=64, num_experts_per_tok=8),
    ),
    "Phi-3.5-MoE": (
        41_873_153_344,
        dense(
            4096, 6400, 32, 32, 8, 32064, model_type="phimoe", num_local_experts=16, num_experts_per_tok=2,
            attention_bias=True, lm_head_bias=True,
        ),
    ),
    "ERNIE-4.5-21B-A3B": (
        21_825_437_888,
        dense(
            2560, 12288, 28, 20, 4, 103424, model_type="ernie4_5_moe", moe_num_experts=64, moe_k=6,
            moe_intermediate_size=1536, moe_num_shared_experts=2, head_dim=128,
        ),
    ),
    "dots.llm1": (
        142_774_381_696,
        dense(
            4096, 10944, 62, 32, 32, 152064, model_type="dots1", n_routed_experts=128, num_experts_per_tok=6,
            n_shared_experts=2, moe_intermediate_size=1408, first_k_dense_replace=1, sliding_window=None,
        ),
    ),
    "granite-4.0-h-small": (
        32_207_337_984,
        dense(
            4096, 768, 40, 32, 8, 100352, model_type="granitemoehybrid", num_local_experts=72, num_experts_per_tok=10,
            shared_intermediate_size=1536, mamba_d_state=128, tie_word_embeddings=True,
            layer_types=(["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
        ),
    ),
}  # fmt: skip
"""Tensor elements of checkpoints that the catalog lacks, on their pages, with what their config.json says of shapes."""


@pytest.mark.parametrize("name", PUBLISHED_ELSEWHERE)
def test_models_that_are_not_in_the_catalog_have_their_published_count(name: str) -> None:
    published, config = PUBLISHED_ELSEWHERE[name]
    assert model_from_hf_config(config, name=name, where=name).num_parameters == published


@pytest.mark.parametrize(
    ("model_type", "near"), [("kimi_linear", "kimi_k2"), ("gemma3n", "gemma3"), ("longcat_flash", ""), ("xyz", "")]
)
def test_an_architecture_that_is_not_known_is_refused_with_the_nearest_and_what_to_do(
    model_type: str, near: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        model_from_hf_config({"model_type": model_type}, name="a", where="config.json")
    line = str(refusal.value)
    assert f"config.json: model_type '{model_type}' is not known; the nearest by name is '{near}" in line
    assert "docs/extending.md" in line
    assert len(line) < 300
    assert "\n" not in line


@pytest.mark.parametrize(("file", "name"), [("config.json", "mine"), ("qwen.json", "qwen"), (".", "mine")])
def test_a_file_without_a_name_has_that_of_its_directory_or_its_own(
    file: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given from inside its directory, which named it nothing."""
    directory = tmp_path / "mine"
    directory.mkdir()
    for each in ("config.json", "qwen.json"):
        (directory / each).write_text((MODELS_DIRECTORY / "qwen3-8b.json").read_text(encoding="utf-8"))
    monkeypatch.chdir(directory)
    assert load_model_spec(file).name == name


def test_sliding_window_belongs_to_mistral_v01_only() -> None:
    windows = {n: load_model_spec(n).attention.span for n in PUBLISHED_PARAMETERS}
    assert {n: w for n, w in windows.items() if w} == {"mistral-7b-v0.1": 4096}


def sparse(model_type: str, **more: Any) -> dict[str, Any]:
    return dense(
        64, 96, 4, 4, 4, 128, model_type=model_type, n_routed_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=32, n_group=1, topk_group=1, **more,
    )  # fmt: skip


VALID: dict[str, tuple[dict[str, Any], str]] = {
    "windows of a size, in no layer": (
        dense(64, 96, 4, 4, 4, 128, model_type="gemma2", sliding_window=16, layer_types=["full_attention"] * 4),
        "4 full, 4 mlp",
    ),
    "experts in every layer of deepseek_v2": (
        sparse("deepseek_v2", first_k_dense_replace=0),
        "4 latent, 4 2 of 8 experts",
    ),
    "experts in every layer of glm4_moe": (sparse("glm4_moe", first_k_dense_replace=0), "4 full, 4 2 of 8 experts"),
    "dense layers that the class counts": (sparse("kimi_k2"), "4 latent, 3 mlp, 1 2 of 8 experts"),
}
"""Configurations that transformers loads, and their layers."""


@pytest.mark.parametrize("name", VALID)
def test_keys_without_a_layer_that_they_concern_are_no_reason_to_refuse(name: str) -> None:
    config, layers = VALID[name]
    assert model_from_hf_config(config, name=name, where=name).summary() == layers


def test_attention_to_chunks_is_planned_up_to_their_length_with_a_note(tmp_path: Path) -> None:
    """Qwen2.5-1M's, as published."""
    chunks = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    config = json.loads((MODELS_DIRECTORY / "qwen2.5-14b.json").read_text(encoding="utf-8"))
    config |= {"max_position_embeddings": 1010000, "dual_chunk_attention_config": chunks}
    file = tmp_path / "qwen2.5-14b-1m.json"
    file.write_text(json.dumps(config))
    request = PlanRequest(model=str(file), batch_sizes=(8,), context_lens=(131072,), acceptance_rate=0.8)
    assert any("beyond 262144 tokens, is not modelled" in note for note in plan(request).notes)
    with pytest.raises(CapacityError, match="reads at most 262144 tokens"):
        plan(msgspec.structs.replace(request, context_lens=(300000,)))
