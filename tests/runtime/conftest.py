"""Tiny random models. Ranks import this file too, which is why transformers is not imported here."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# Skips the whole folder.
pytest.importorskip("torch")
if find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

import torch

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


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from tests.runtime.families import FAMILIES, write_checkpoint

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
