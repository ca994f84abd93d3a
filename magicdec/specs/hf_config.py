"""A ModelSpec from a Hugging Face `config.json`, as its publisher wrote it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from magicdec.errors import ConfigError
from magicdec.files import read_json
from magicdec.specs.families import WRAPPERS, architecture
from magicdec.specs.families.keys import MAX_LAYERS, Keys, fields_of
from magicdec.specs.families.rope import reach
from magicdec.specs.hf_quantization import read_quantization
from magicdec.specs.model import ModelSpec
from magicdec.units import printable

MODALITIES = (
    "vision", "image", "video", "audio", "boi", "eoi", "mm_", "multimodal", "projector", "projection", "spatial",
    "use_unified_vision", "language_model_only", "media",
)  # fmt: skip
"""Beginnings of keys that describe what stands before the decoder."""
MODELOPT_FILE = "hf_quant_config.json"
"""Where ModelOpt says how it has quantised a checkpoint, if not in its config.json."""
BESIDE = ("tie_word_embeddings", "quantization_config", "eos_token_id")
"""Keys that a model of several modalities may give outside its decoder's configuration."""


def model_from_hf_config(config: dict[str, Any], *, name: str, where: str) -> ModelSpec:
    """The spec that a Hugging Face configuration describes. `where` names the file in errors. Raises ConfigError for an
    architecture that is not known, for a missing or unusable key, and for a key that may matter and is not
    understood."""
    values = _decoder(config, where)
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"{where}: key 'model_type' must be a string, not {model_type!r}")
    if values is config and model_type == "mistral" and "layer_types" in config:
        model_type = "ministral"  # as transformers' AutoConfig takes it
    row = architecture(model_type, where)
    keys = Keys(values, where, fields_of(model_type))
    for key, allowed in row.fixed.items():
        keys.require(key, *allowed)
    keys.ignore(*row.ignored.split(), "max_position_embeddings", "vision_config")
    if (count := keys.optional_size("num_hidden_layers") or 0) > MAX_LAYERS:
        raise keys.error("num_hidden_layers", f"at most {MAX_LAYERS}", count)
    layers = tuple(row.layers(keys))
    positions = keys.size("max_position_embeddings")
    details = row.details(keys)
    reached = max(reach(layer.mixer.rotary if layer.mixer else None, positions) for layer in layers)
    details.setdefault("max_position_embeddings", reached)
    if row.mtp_key is not None:
        heads = keys.optional_size(row.mtp_key, least=0) or 0
        details["mtp_layers"] = (layers[-1],) * heads
    hidden, vocabulary = keys.size("hidden_size"), keys.size("vocab_size")
    spec = ModelSpec(
        name=name,
        architecture=model_type,
        hidden_size=hidden,
        vocab_size=vocabulary,
        layers=layers,
        norm=msgspec.structs.replace(row.norm, eps=keys.number(row.eps_key, most=1.0)),
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        quantization=read_quantization(keys, layers=layers, hidden_size=hidden, vocab_size=vocabulary, names=row.names),
        names=row.names,
        eos_token_ids=_token_ids(values.get("eos_token_id"), where),
        **details,
    )
    if unread := keys.unread():
        raise ConfigError(
            f"{where}: key '{unread[0]}' is not known for {model_type}, and may change what the model computes; "
            "remove it if it does not"
        )
    return spec


def _decoder(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The decoder's own configuration: `text_config`, with the keys next to it, in a model of several modalities."""
    model_type, inside = config.get("model_type"), config.get("text_config")
    if not isinstance(model_type, str) or model_type not in WRAPPERS or inside is None:
        return config
    if not isinstance(inside, dict):
        raise ConfigError(f"{where}: key 'text_config' must be an object, not {inside!r}")
    beside = Keys(config, where)
    beside.ignore("text_config", "vocab_size", "hidden_size", "ignore_index", "tie_word_embeddings", *BESIDE)
    unread = [key for key in beside.unread() if not key.startswith(MODALITIES) and not key.endswith("token_id")]
    if unread:
        raise ConfigError(f"{where}: key '{unread[0]}' is not known for {model_type}")
    shared = {key: config[key] for key in BESIDE if config.get(key) is not None}
    return {"model_type": WRAPPERS[model_type], **shared, **inside}


def _token_ids(value: Any, where: str) -> tuple[int, ...]:
    """`eos_token_id`: nothing, one, or a list."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 2**31 for each in listed):
        raise ConfigError(f"{where}: key 'eos_token_id' must be a token's number, or a list of them, not {value!r}")
    return tuple(listed)


def load_hf_config(path: Path, *, name: str | None = None) -> ModelSpec:
    """Reads a `config.json`, or the one in a checkpoint directory, with ModelOpt's file next to it where there is one.
    Raises ConfigError when there is none, or it is not a JSON object."""
    file = path / "config.json" if path.is_dir() else path
    config = _json_object(file)
    if path.is_dir() and (beside := path / MODELOPT_FILE).is_file() and not _names_quantization(config):
        config = {**config, "quantization_config": {"quant_method": "modelopt", **_json_object(beside)}}
    directory = Path(os.path.abspath(file)).parent.name  # not resolved: of a link, the name is the user's
    return model_from_hf_config(
        config, name=name or printable(directory if file.name == "config.json" else file.stem), where=str(file)
    )


def _names_quantization(config: dict[str, Any]) -> bool:
    inside = config.get("text_config")
    return any("quantization_config" in each for each in (config, inside) if isinstance(each, dict))


def _json_object(file: Path) -> dict[str, Any]:
    config = read_json(file, decode=json.loads)  # transformers writes infinities
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold a JSON object, not a {type(config).__name__}")
    return config
