"""Heads as their makers publish them draft what the same weights in the speculators library's format do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.heads.builder import load_head
from magicdec.runtime.weights import load_model
from magicdec.specs.speculation import SpeculationSpec
from magicdec.specs.speculation import load_head as load_head_spec
from tests.runtime.test_heads_reference import FIXTURES, rows_of

Config = dict[str, Any]
GAMMA = 4


def z_lab(own: Config, layers: Config) -> Config:
    """DFlash's authors: the layers that it reads and the mask in `dflash_config`."""
    names = {
        "target_layer_ids": [place - 1 for place in own["aux_hidden_state_layer_ids"]],
        "mask_token_id": own["mask_token_id"],
    }
    return {
        **layers, "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": own["block_size"], "dflash_config": names, "num_target_layers": 4, "dtype": "float32",
    }  # fmt: skip


def deep_spec(own: Config, layers: Config) -> Config:
    """DSpark's authors: all keys side by side, those of the estimate of acceptance among them."""
    kept = (
        "block_size",
        "draft_vocab_size",
        "mask_token_id",
        "markov_rank",
        "markov_head_type",
    )
    return {
        **layers, **{key: own[key] for key in kept}, "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": [place - 1 for place in own["aux_hidden_state_layer_ids"]], "num_target_layers": 4,
        "num_anchors": 512, "enable_confidence_head": True, "confidence_head_with_markov": True, "dtype": "bfloat16",
    }  # fmt: skip


def spec_forge(own: Config, layers: Config) -> Config:
    """EAGLE-3's authors and SpecForge: a Llama model of another architecture's name."""
    kept = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    return {
        **layers, **{key: own[key] for key in kept}, "architectures": ["LlamaForCausalLMEagle3"],
        "torch_dtype": "float32",
    }  # fmt: skip


def as_middle(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """EAGLE-3's only layer stands as `midlayer`."""
    return {name.replace("layers.0.", "midlayer."): tensors[name] for name in tensors}


def as_is(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors


LAYOUTS: dict[
    str, tuple[Callable[[Config, Config], Config], Callable[..., dict[str, Tensor]]]
] = {
    "dflash": (z_lab, as_is),
    "dspark": (deep_spec, as_is),
    "eagle3": (spec_forge, as_middle),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_flat_checkpoint_drafts_the_same(name: str, tmp_path: Path) -> None:
    write, rename = LAYOUTS[name]
    own = json.loads((FIXTURES / name / "config.json").read_text())
    flat = write(own, own["transformer_layer_config"])
    (tmp_path / "config.json").write_text(json.dumps(flat))
    save_file(
        rename(load_file(FIXTURES / name / "model.safetensors")),
        tmp_path / "model.safetensors",
    )
    assert load_head_spec(tmp_path).method == name
    target = load_model(FIXTURES / "target")
    rows = rows_of(name)
    engine = Engine(target, batch_size=len(rows), max_len=64)
    spec = SpeculationSpec(draft=name, draft_method=name, gamma=GAMMA)
    drafter = build_drafter(spec, engine, load_head(tmp_path, target))
    assert drafter is not None
    engine.prefill([row["prompt"] for row in rows])
    with torch.inference_mode():
        drafter.begin()
        proposal = drafter.propose(GAMMA, None)
    assert proposal.tokens_BT.tolist() == [row["drafted"] for row in rows]
