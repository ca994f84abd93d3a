"""Tiny random models, and checkpoints of each family written by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

# Skips the whole folder.
pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from magicdec.runtime.engine import Engine
from magicdec.runtime.generate import DecodeOptions, decode
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.weights import load_model
from magicdec.specs.hf_config import model_from_hf_config
from magicdec.specs.model import ModelSpec
from magicdec.specs.speculation import SamplingSpec

torch.set_num_threads(
    1
)  # tiny operations gain nothing from a second thread, and wait for it when the machine is busy

SMALL = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.25,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama-mha": LlamaConfig(
        **{**SMALL, "num_key_value_heads": 6}, tie_word_embeddings=False
    ),
    "llama-gqa-tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama-3.1-rope": LlamaConfig(
        **SMALL, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False
    ),
    "llama-biases": LlamaConfig(
        **SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=False
    ),
    "mistral-window": MistralConfig(
        **SMALL, sliding_window=16, tie_word_embeddings=False
    ),
    "qwen2": Qwen2Config(
        **{k: v for k, v in SMALL.items() if k != "head_dim"}, tie_word_embeddings=True
    ),
    "qwen3": Qwen3Config(**{**SMALL, "head_dim": 16}, tie_word_embeddings=False),
}


def write_checkpoint(
    directory: Path,
    config: PreTrainedConfig,
    *,
    seed: int = 0,
    max_shard_size: str = "5GB",
) -> Path:
    """A randomly initialised checkpoint of transformers' own model, biases and norms included in the randomness."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        name: write_checkpoint(root / name, config) for name, config in FAMILIES.items()
    }


def tiny_spec(name: str = "tiny", **changes: object) -> ModelSpec:
    fields: dict[str, object] = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
        "max_position_embeddings": 1024, "tie_word_embeddings": True,
    }  # fmt: skip
    return model_from_hf_config({**fields, **changes}, name=name, where=name)


@pytest.fixture(scope="session")
def tiny_model() -> Transformer:
    return load_model(tiny_spec(), weights="random", seed=3)


def started(
    model: Transformer, prompts: Sequence[Sequence[int]], max_len: int, **options: Any
) -> Engine:
    """An engine that holds these prompts."""
    engine = Engine(model, batch_size=len(prompts), max_len=max_len, **options)
    engine.prefill(prompts)
    return engine


def alone(engine: Engine, max_new_tokens: int | list[int]) -> list[list[int]]:
    """Greedy tokens without a draft, from where the engine stands."""
    return decode(
        engine, None, SamplingSpec(), DecodeOptions(max_new_tokens=max_new_tokens)
    ).tokens
