"""Configurations against the parameter counts their publishers state, and what is refused in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from magicdec.errors import CapacityError, ConfigError
from magicdec.perfmodel.planner import PlanRequest, make_plan
from magicdec.specs.catalog import MODELS_DIRECTORY, load_model_spec
from magicdec.specs.hf_config import model_from_hf_config


def dense(
    hidden: int,
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": 32768, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "near"),
    [
        ("kimi_linear", "kimi_k2"),
        ("gemma3n", "gemma3"),
        ("longcat_flash", ""),
        ("xyz", ""),
    ],
)
def test_an_architecture_that_is_not_known_is_refused_with_the_nearest_and_what_to_do(
    model_type: str, near: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        model_from_hf_config({"model_type": model_type}, name="a", where="config.json")
    line = str(refusal.value)
    assert (
        f"config.json: model_type '{model_type}' is not known; the nearest by name is '{near}"
        in line
    )
    assert "docs/extending.md" in line
    assert len(line) < 300
    assert "\n" not in line


@pytest.mark.parametrize(
    ("file", "name"), [("config.json", "mine"), ("qwen.json", "qwen"), (".", "mine")]
)
def test_a_file_without_a_name_has_that_of_its_directory_or_its_own(
    file: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given from inside its directory, which named it nothing."""
    directory = tmp_path / "mine"
    directory.mkdir()
    for each in ("config.json", "qwen.json"):
        (directory / each).write_text(
            (MODELS_DIRECTORY / "qwen3-8b.json").read_text(encoding="utf-8")
        )
    monkeypatch.chdir(directory)
    assert load_model_spec(file).name == name


def test_sliding_window_belongs_to_mistral_v01_only() -> None:
    windows = {
        n: load_model_spec(n).attention.span
        for n in ("llama-3.1-8b", "mistral-7b-v0.1", "mistral-7b-v0.3", "qwen2.5-7b")
    }
    assert {n: w for n, w in windows.items() if w} == {"mistral-7b-v0.1": 4096}


def sparse(model_type: str, **more: Any) -> dict[str, Any]:
    return dense(
        64, 96, 4, 4, 4, 128, model_type=model_type, n_routed_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=32, n_group=1, topk_group=1, **more,
    )  # fmt: skip


VALID: dict[str, tuple[dict[str, Any], str]] = {
    "windows of a size, in no layer": (
        dense(
            64,
            96,
            4,
            4,
            4,
            128,
            model_type="gemma2",
            sliding_window=16,
            layer_types=["full_attention"] * 4,
        ),
        "4 full, 4 mlp",
    ),
    "experts in every layer of deepseek_v2": (
        sparse("deepseek_v2", first_k_dense_replace=0),
        "4 latent, 4 2 of 8 experts",
    ),
    "experts in every layer of glm4_moe": (
        sparse("glm4_moe", first_k_dense_replace=0),
        "4 full, 4 2 of 8 experts",
    ),
    "dense layers that the class counts": (
        sparse("kimi_k2"),
        "4 latent, 3 mlp, 1 2 of 8 experts",
    ),
}
"""Configurations that transformers loads, and their layers."""


@pytest.mark.parametrize("name", VALID)
def test_keys_without_a_layer_that_they_concern_are_no_reason_to_refuse(
    name: str,
) -> None:
    config, layers = VALID[name]
    assert model_from_hf_config(config, name=name, where=name).summary() == layers


def test_attention_to_chunks_is_planned_up_to_their_length_with_a_note(
    tmp_path: Path,
) -> None:
    """Qwen2.5-1M's, as published."""
    chunks = {
        "chunk_size": 262144,
        "local_size": 8192,
        "original_max_position_embeddings": 262144,
    }
    config = json.loads(
        (MODELS_DIRECTORY / "qwen2.5-14b.json").read_text(encoding="utf-8")
    )
    config |= {
        "max_position_embeddings": 1010000,
        "dual_chunk_attention_config": chunks,
    }
    file = tmp_path / "qwen2.5-14b-1m.json"
    file.write_text(json.dumps(config))
    request = PlanRequest(
        model=str(file), batch_sizes=(8,), context_lens=(131072,), acceptance_rate=0.8
    )
    assert any(
        "beyond 262144 tokens, is not modelled" in note
        for note in make_plan(request).notes
    )
    with pytest.raises(CapacityError, match="reads at most 262144 tokens"):
        make_plan(msgspec.structs.replace(request, context_lens=(300000,)))


def test_gemma_4_drafts_by_a_small_network_over_its_own_cache() -> None:
    """The assistant of 31B has 0.94 GB in 16 bits, that of 26B-A4B 0.4 billion parameters, as published."""
    sizes = {}
    for name in ("gemma-4-31b", "gemma-4-26b-a4b"):
        target = load_model_spec(name)
        assistant = target.prediction_head
        assert not assistant.caches
        projections = 3 * target.hidden_size * assistant.hidden_size
        sizes[name] = assistant.num_parameters + projections
    assert 2.0 * sizes["gemma-4-31b"] == pytest.approx(0.94e9, rel=0.01)
    assert round(sizes["gemma-4-26b-a4b"] / 1e9, 1) == 0.4
