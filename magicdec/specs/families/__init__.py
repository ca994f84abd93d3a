"""The architectures that are understood, by `model_type`: a row each, in the file of its family, with its readers.

A row reads every structural key of its configurations; what no row reads is refused. Where the publisher may leave a
key out, the row's default is that of transformers' configuration class (models/NAME/configuration_NAME.py).
"""

from __future__ import annotations

from difflib import get_close_matches

from magicdec.errors import ConfigError
from magicdec.specs.families import deepseek, gemma, granite, llama, minimax, nemotron, others, qwen
from magicdec.specs.families.parts import Architecture

FAMILIES = (llama, qwen, gemma, deepseek, granite, minimax, nemotron, others)
ARCHITECTURES: dict[str, Architecture] = {name: row for family in FAMILIES for name, row in family.ROWS.items()}

WRAPPERS = {
    "mistral3": "mistral", "gemma3": "gemma3_text", "llama4": "llama4_text", "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
    "kimi_k25": "kimi_k2", "cohere2_vision": "cohere2",
}  # fmt: skip
"""Models of several modalities: `text_config` describes their decoder, of this architecture where it names none."""

SAME = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe", "qwen2_5_vl_text": "qwen2"}
"""Decoders of such models that are another architecture's."""


def architecture(model_type: str, where: str) -> Architecture:
    """The row of an architecture. Raises ConfigError naming the nearest one, and how to describe another."""
    name = SAME.get(model_type, model_type)
    if name not in ARCHITECTURES:
        known = (*ARCHITECTURES, *WRAPPERS)
        near = get_close_matches(model_type, known, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"{where}: model_type '{model_type}' is not known; the nearest by name is '{near}', and `magicdec models "
            "--architectures` lists all. A model of layers that are known may be described in a file of magicdec's own "
            "schema (docs/extending.md, Describe a model)"
        )
    return ARCHITECTURES[name]
