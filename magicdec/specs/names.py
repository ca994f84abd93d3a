"""Models as people name them.

A name is one of the catalog's, or a Hugging Face id in any case: with or without its owner, with or
without -Instruct, -Chat, -it, -hf or -Base, and with the suffix of a format (-FP8, -AWQ, -NVFP4,
...), which sets the format of the weights. `data/model_names.json` holds one row per model: its
checkpoints, the model whose shape it shares, and its source.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from magicdec.specs.mixers import RopeScaling

NAMES_FILE = Path(__file__).resolve().parent / "data" / "model_names.json"
SAID_IN_PASSING = frozenset(("instruct", "chat", "it", "hf", "base"))
"""Parts of a checkpoint's name that change neither shape nor format."""

PER_CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "channel",
                "symmetric": True,
            },
        }
    },
    "ignore": ["lm_head"],
}
BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def _integers(bits: int) -> dict[str, Any]:
    """compressed-tensors with integer weights: groups of 128 in 4 bits, channels in 8."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
    }
    if bits == 4:
        weights |= {"strategy": "group", "group_size": 128}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if bits == 4 else "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "sym": True,
}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
MXFP4 = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": 32,
            },
        }
    },
    "ignore": ["lm_head"],
}
FORMATS: dict[str, dict[str, Any] | None] = {
    "fp8-static-pertensor": {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": ["lm_head"],
    },
    "fp8-dynamic": PER_CHANNEL,
    "fp8-kv": PER_CHANNEL | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    "fp8": PER_CHANNEL,
    "autoround-int8": AUTO_ROUND | {"bits": 8},
    "int8-autoround": AUTO_ROUND | {"bits": 8},
    "autoround-int4": AUTO_ROUND,
    "int4-autoround": AUTO_ROUND,
    "autoround": AUTO_ROUND,
    "awq-int4": AWQ,
    "awq-4bit": AWQ,
    "awq": AWQ,
    "gptq-int4": GPTQ,
    "gptq-int8": GPTQ | {"bits": 8},
    "gptq-4b-128g": GPTQ,
    "gptq-4bit": GPTQ,
    "gptq": GPTQ,
    "nvfp4": NVFP4,
    "fp4": NVFP4,
    "mxfp4": MXFP4,
    "quantized.w4a16": _integers(4),
    "w4a16": _integers(4),
    "int4": _integers(4),
    "quantized.w8a8": _integers(8),
    "w8a8": _integers(8),
    "int8": _integers(8),
    "unsloth-bnb-4bit": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "bnb-4bit": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "bnb-8bit": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "qat-q4-0-unquantized": None,
    "bf16": None,
    "fp16": None,
}
"""Suffixes of checkpoints, each with the quantization_config that checkpoints of that name usually
have.
"""
PUBLISHED_IN_BLOCKS = ("qwen3", "deepseek", "minimax", "kimi", "glm-5")
"""Families whose publishers scale fp8 weights by blocks of 128 x 128."""
LATENT_PROJECTIONS = [
    f"*self_attn.{name}*" for name in ("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj")
]
WIDE_IN_NVFP4 = {
    "gemma-4-26b": ["*self_attn*", "*.mlp.*"],
    "gemma-4": ["*self_attn*"],
    "deepseek": LATENT_PROJECTIONS,
    "glm-5": ["*self_attn*"],
    "minimax": ["*self_attn*"],
}
"""Projections that NVIDIA's NVFP4 checkpoints of a family, or of one model before its family, leave in 16 bits."""


class NamedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of the catalog."""

    checkpoints: tuple[str, ...]
    """Repositories on the Hugging Face hub; exports name the first."""
    shape: str | None = None
    """The model whose config.json it shares; None: it has its own."""
    max_position_embeddings: int | None = None
    """Longest context, where it is not the shape's."""
    extension: RopeScaling | None = None
    """A longer context than config.json asks for: the rope scaling that the publisher's card names
    ("Processing Long Texts")."""
    source: str
    """Where its sizes were read, a key of `sources`."""
    note: str | None = None
    tokenizer: str | None = None
    """Family whose tokenizer it has, where its name does not begin with the family's."""

    def tokenizer_family(self, name: str) -> str:
        """The family that this model shares a tokenizer with: the beginning of its shape's name."""
        if self.tokenizer:
            return self.tokenizer
        beginning = re.match(r"[a-z]*\d?", self.shape or name)
        assert beginning is not None  # the pattern matches any text
        return beginning[0]


class NamesFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sources: dict[str, str]
    models: dict[str, NamedModel]


class ModelName(msgspec.Struct, frozen=True, kw_only=True):
    """A name resolved."""

    model: str
    """Name in the catalog."""
    weight_format: str | None = None
    """The suffix that sets the format of the weights, a key of FORMATS; None: as published."""

    def quantization_config(self) -> dict[str, Any] | None:
        """The `quantization_config` that the suffix stands for; None: weights in 16 bits."""
        if self.weight_format == "fp8" and self.model.startswith(PUBLISHED_IN_BLOCKS):
            return BLOCKS
        config = FORMATS[self.weight_format or "bf16"]
        for family, wide in WIDE_IN_NVFP4.items():
            if config is NVFP4 and self.model.startswith(family):
                return NVFP4 | {"ignore": ["lm_head", *wide]}
        return config


@cache
def names_file() -> NamesFile:
    return msgspec.json.decode(NAMES_FILE.read_bytes(), type=NamesFile)


def named_models() -> dict[str, NamedModel]:
    """Models of the catalog by name."""
    return names_file().models


def resolve_name(text: str) -> ModelName | None:
    """The model that a name stands for; None where the catalog has none."""
    if text in named_models():
        return ModelName(model=text)
    short, weight_format = _without_format(_plain(text))
    key = _key(short)
    model = _keys().get(key) or _keys_without_dots().get(key)
    if model is None:
        return None
    return ModelName(model=model, weight_format=weight_format)


MOST_PATH = 400
"""Characters of a path whose folders' names are looked at."""


def folder_name(path: str) -> str | None:
    """The catalog's name, with its format, that a folder of a path begins with, whatever follows
    ("gemma-4-31b-qat-w4a16", ".../Qwen3-32B/AWQ"); None: none does."""
    if len(path) > MOST_PATH:
        return None
    parts = [_plain(part) for part in path.strip("/").split("/")]
    for place in range(len(parts) - 1, -1, -1):
        words = "-".join(parts[place:]).split("-")
        for end in range(len(words), 0, -1):
            found = resolve_name("-".join(words[:end]))
            if found is None:
                continue
            rest = f"-{'-'.join(words[end:])}-"
            told = (suffix for suffix in FORMATS if f"-{suffix}-" in rest)
            weights = found.weight_format or next(told, None)
            return found.model if weights is None else f"{found.model}-{weights}"
    return None


def model_name(text: str) -> str:
    """The catalog's name for a model in any format; other text unchanged."""
    name = resolve_name(text)
    if name is None:
        return text
    return name.model


def catalog_name(text: str) -> str:
    """The catalog's name for a model in its published format; other text unchanged."""
    name = resolve_name(text)
    if name is None or name.weight_format is not None:
        return text
    return name.model


def checkpoint_of(text: str) -> str | None:
    """The repository that an engine loads for a name: the one it is, or the model's own; None where
    none is known.
    """
    name = resolve_name(text)
    if name is None:
        return None
    if "/" in text:
        return text
    if name.weight_format is None:
        return named_models()[name.model].checkpoints[0]
    return None


def _plain(text: str) -> str:
    """A name without its owner, in small letters, its parts divided by dashes."""
    return (
        text.rstrip("/")
        .rpartition("/")[2]
        .lower()
        .replace("_", "-")
        .replace(":", "-")
        .replace(" ", "-")
    )


def _without_format(name: str) -> tuple[str, str | None]:
    for suffix in FORMATS:
        if name.endswith(f"-{suffix}"):
            return name.removesuffix(f"-{suffix}"), suffix
    return name, None


def _key(name: str) -> str:
    """A name that identifies a model, however its parts are separated."""
    parts = [part for part in name.split("-") if part not in SAID_IN_PASSING] or [name]
    if parts[0] in ("meta", "nvidia"):
        parts = parts[1:]
    return "".join(parts)


@cache
def _keys() -> dict[str, str]:
    """Models by the keys of their names and checkpoints; a name goes before a checkpoint."""
    keys = {_key(model): model for model in named_models()}
    for model, row in named_models().items():
        for checkpoint in row.checkpoints:
            keys.setdefault(_key(_plain(checkpoint)), model)
    return keys


@cache
def _keys_without_dots() -> dict[str, str | None]:
    """Models by their keys as clouds write them ("llama-3-1-8b"); None where two would be alike."""
    models: dict[str, str | None] = {}
    for key, model in _keys().items():
        short = key.replace(".", "")
        if models.setdefault(short, model) != model:
            models[short] = None
    return models
