"""Random heads of every sort for tiny targets."""

from __future__ import annotations

from typing import Any

import torch

from magicdec.runtime.checkpoint import RandomTensors
from magicdec.runtime.heads.builder import HeadBuilder
from magicdec.runtime.heads.chain import Head
from magicdec.runtime.heads.layout import HeadLayout
from magicdec.runtime.transformer import NORMED, Transformer
from magicdec.specs.hf_config import model_from_hf_config
from magicdec.specs.model import ModelSpec
from magicdec.specs.speculation import DraftMethod

BLOCK_SIZE = 7


def layers_of(
    target: ModelSpec, *, model_type: str = "llama", count: int = 1
) -> ModelSpec:
    """A model of small layers with the target's hidden size and vocabulary."""
    config = {
        "model_type": model_type,
        "hidden_size": target.hidden_size,
        "intermediate_size": 24,
        "num_hidden_layers": count,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    return model_from_hf_config(config, name="head", where="head")


def random_layout(method: DraftMethod, target: ModelSpec) -> HeadLayout:
    count = target.num_hidden_layers
    vocabulary = target.vocab_size
    fields: dict[str, Any] = {
        "method": method,
        "name": method,
        "spec": layers_of(target),
        "reads": (NORMED,),
        "target_hidden_size": target.hidden_size,
        "draft_vocab_size": vocabulary,
    }
    if method in ("eagle3", "p-eagle"):
        fields["reads"] = (0, count // 2, count)
        fields["draft_vocab_size"] = vocabulary - max(2, vocabulary // 3 // 4 * 4)
        fields["norm_before_residual"] = method == "p-eagle"
    if method in ("dflash", "dspark"):
        fields["reads"] = (1, count)
        fields["spec"] = layers_of(target, model_type="qwen3", count=2)
        fields["block_size"] = BLOCK_SIZE
        fields["samples_anchor"] = method == "dspark"
        fields["markov_rank"] = 4 if method == "dspark" else 0
    if method in ("p-eagle", "dflash", "dspark"):
        fields["mask_token"] = 3
    return HeadLayout(**fields)


class SpreadTensors(RandomTensors):
    """Random weights; a reduced vocabulary leaves out the tokens at the beginning."""

    def read_numbers(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return (
            torch.ones(shape, dtype=torch.long) if name == "d2t" else torch.zeros(shape)
        )


def random_head(method: DraftMethod, target: Transformer, *, seed: int = 9) -> Head:
    """A seeded head of a method; that of multi-token prediction as the speculators library has it."""
    layout = random_layout(method, target.spec)
    source = SpreadTensors(seed=seed, device=target.device, dtype=target.dtype)
    with torch.inference_mode():
        return HeadBuilder(layout, target, source).build_head()
