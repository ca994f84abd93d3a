"""Configurations whose model_type is not known: renamed known ones, whose own reader is the truth."""

from __future__ import annotations

import json

import pytest

from magicdec.errors import ConfigError
from magicdec.perfmodel.planner import PlanRequest, make_plan
from magicdec.reports.story import story_of
from magicdec.specs.catalog import MODELS_DIRECTORY
from magicdec.specs.hf_config import model_from_hf_config
from magicdec.specs.model import ModelSpec


def config_of(name: str) -> dict:
    return json.loads((MODELS_DIRECTORY / f"{name}.json").read_text())


def renamed(name: str) -> tuple[ModelSpec, ModelSpec]:
    config = config_of(name)
    known = model_from_hf_config(config, name=name, where=name)
    other = json.loads(json.dumps(config))
    other["model_type"] = "not_known_yet"
    if "text_config" in other:
        other["text_config"].pop("model_type", None)
    return known, model_from_hf_config(other, name=name, where=name)


@pytest.mark.parametrize(
    "name",
    [
        "llama-3.1-8b",
        "qwen3-8b",
        "mistral-nemo-12b",
        "qwen2.5-7b",
        "qwen3-30b-a3b",
        "glm-4.5-air",
        "deepseek-v3",
        "moonlight-16b-a3b",
        "mixtral-8x7b",
        "minimax-m2.5",
        "olmo-2-7b",
        "yi-1.5-6b",
    ],
)
def test_a_renamed_model_has_the_weights_and_the_cache_of_the_known_one(name):
    known, taken = renamed(name)
    assert "not_known_yet" in taken.assumed
    assert len(taken.layers) == len(known.layers)
    assert taken.num_parameters == pytest.approx(known.num_parameters, rel=0.01)
    assert taken.active_parameters == pytest.approx(known.active_parameters, rel=0.02)
    assert [layer.mixer.caches() for layer in taken.layers] == [
        layer.mixer.caches() for layer in known.layers
    ]


def test_what_is_not_read_is_named():
    config = config_of("llama-3.1-8b") | {"model_type": "xyz", "new_gate_width": 64}
    taken = model_from_hf_config(config, name="a", where="config.json")
    assert "not read: " in taken.assumed
    assert "new_gate_width" in taken.assumed


@pytest.mark.parametrize(
    "changed",
    [
        {"hidden_size": None},
        {"hidden_size": "4096"},
        {"mamba_d_state": 128},
        {"compress_ratios": [0, 4, 128]},
        {"sparse_attention_config": {"sparse_topk_blocks": 16}},
        {"index_topk": 2048},
        {"layer_types": ["linear_attention"] * 32},
        {"intermediate_size": None},
    ],
)
def test_fields_that_are_not_the_usual_ones_are_refused(changed):
    config = config_of("llama-3.1-8b") | {"model_type": "xyz"} | changed
    with pytest.raises(ConfigError, match="'xyz' is not known"):
        model_from_hf_config(config, name="a", where="config.json")


def test_a_plan_says_what_was_assumed(tmp_path):
    config = config_of("qwen3-0.6b") | {"model_type": "xyz"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = PlanRequest(
        model=str(tmp_path / "config.json"), hardware=("l4",), batch_sizes=(1,)
    )
    plan = make_plan(asked)
    shown = [line.text for line in story_of(plan, plan)]
    assert any("'xyz' is not known: planned by its fields" in line for line in shown)
