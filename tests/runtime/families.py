"""Checkpoints of each family, written by transformers: apart from what ranks import, which do without it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

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
