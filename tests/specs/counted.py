"""What transformers' own modules count of a published configuration."""

from __future__ import annotations

from importlib import import_module
from typing import Any

OTHERS_ROW = {
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2",
    "gemma4_unified_text": "gemma4_text",
}
"""Architectures that are another's under a name of their own."""


def counted_parameters(config: dict[str, Any]) -> int:
    """Weights of the decoder that a `config.json` describes, built on the meta device; a tied head counted once."""
    import torch
    import transformers

    import_module("tests.specs.decilm")  # what transformers lacks
    beside = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    text = {**beside, **config["text_config"]} if "text_config" in config else config
    kept = {
        key: value
        for key, value in text.items()
        if key not in ("quantization_config", "auto_map")
    }
    kept["model_type"] = OTHERS_ROW.get(kept["model_type"], kept["model_type"])
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**kept)
        )
    theirs.tie_weights()
    buffers = [
        value for key, value in theirs.named_buffers() if "correction_bias" in key
    ]
    return sum(each.numel() for each in (*theirs.parameters(), *buffers))
