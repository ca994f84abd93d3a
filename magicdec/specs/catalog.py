"""Named models that ship with the package, each as the Hugging Face configuration its publisher released.

A model argument is, in this order: a directory with a `config.json`, a JSON file, or a name of the catalog.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from magicdec.errors import ConfigError, unknown_choice
from magicdec.files import converted, read_toml
from magicdec.specs.families.keys import MAX_LAYERS
from magicdec.specs.hf_config import load_hf_config
from magicdec.specs.layers import Layer
from magicdec.specs.mixers import RopeScaling
from magicdec.specs.model import ModelSpec, Norm

PACKAGE_DIRECTORY = Path(__file__).resolve().parent.parent
MODELS_DIRECTORY = PACKAGE_DIRECTORY / "specs" / "data" / "models"
ARCHITECTURES_FILE = PACKAGE_DIRECTORY / "specs" / "data" / "architectures.json"
"""Facts of every architecture, written by scripts/architectures_table.py."""
WANTED = ["config.json", "tokenizer.json", "tokenizer_config.json"]
"""Files of a checkpoint on the Hugging Face hub besides its weights."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
EMBEDDED = "embedded"
EMBEDDED_DIRECTORY = PACKAGE_DIRECTORY / "data" / "embedded"


def model_names() -> list[str]:
    return [EMBEDDED, *sorted(path.stem for path in MODELS_DIRECTORY.glob("*.json"))]


class ArchitectureFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts of an architecture: the kinds of its layers, whether it is run, how it is tested."""

    architecture: str
    layers: tuple[str, ...]
    planned: bool
    why_not_run: str | None
    parity_configurations: int
    """Drawn ones whose tokens and logits are compared with transformers' when it is run."""
    oracle: str | None
    """The implementation that weights, caches and FLOPs are compared with."""
    models: dict[str, int]
    """Models of the catalog, each with its number of parameters."""


def architecture_facts() -> tuple[ArchitectureFacts, ...]:
    table = msgspec.json.decode(ARCHITECTURES_FILE.read_bytes())["architectures"]
    return msgspec.convert(table, tuple[ArchitectureFacts, ...])


def checkpoint_directory(model: str) -> Path | None:
    """Where the weights of a model argument are, when it names a local checkpoint."""
    if model == EMBEDDED:
        return EMBEDDED_DIRECTORY
    path = Path(model)
    return path if path.is_dir() else None


@cache
def _tables(name: str) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = msgspec.toml.decode((MODELS_DIRECTORY / name).read_bytes())
    return tables


def served_names(*models: str) -> dict[str, str]:
    """The checkpoint that an engine loads for each model argument, a directory or a repository, where one is known."""
    sources = _tables("SOURCES.toml")
    published = {name: "/".join(url.split("/")[3:5]) for name, url in sources["published"].items()}
    found = {name: checkpoint_directory(name) or (published | sources["checkpoints"]).get(name) for name in models}
    return {name: str(checkpoint) for name, checkpoint in found.items() if checkpoint}


def resolve_hub_name(model: str, *, with_weights: bool) -> str:
    """The local directory of `owner/name`, downloaded on first use; any other model argument as it is. Raises
    ConfigError when it looks like a hub name but cannot be fetched."""
    if Path(model).exists() or not _HUB_NAME.fullmatch(model) or model.startswith("."):
        return model
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"{model} is no local directory, and fetching it from the hub needs the package huggingface_hub"
        ) from error
    patterns = [*WANTED, "*.safetensors", "*.safetensors.index.json"] if with_weights else WANTED
    try:
        return str(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the client raises its own, the transport's and OSError
        reason = str(error).strip().splitlines()
        raise ConfigError(
            f"{model} is no local directory and cannot be fetched from the hub: "
            f"{reason[0] if reason else type(error).__name__}"
        ) from error


class _Size(msgspec.Struct):
    """Keys that tell roughly how large a model is, read without the rest of its configuration."""

    vocab_size: int = 0
    hidden_size: int = 0
    num_hidden_layers: int = 0


@lru_cache(maxsize=16)
def models_of_vocabulary(vocab_size: int) -> tuple[str, ...]:
    """The catalog's models with a vocabulary of this size, the smallest first by width and depth."""
    sizes = {path.stem: msgspec.json.decode(path.read_bytes(), type=_Size) for path in MODELS_DIRECTORY.glob("*.json")}
    found = [name for name, each in sizes.items() if each.vocab_size == vocab_size]
    return tuple(sorted(found, key=lambda name: sizes[name].hidden_size ** 2 * sizes[name].num_hidden_layers))


def load_model_spec(model: str) -> ModelSpec:
    """The spec of a model argument; a file is read anew each time. Raises ConfigError when it is neither a file, a
    directory nor a known name."""
    known = _of_catalog(model)
    if known is not None:
        return known
    path = Path(model)
    if path.suffix == ".toml":
        return load_model_file(path)
    if path.exists():
        return load_hf_config(path)
    if "/" in model or model.endswith(".json"):
        raise ConfigError(
            f"no configuration at {model}: give a config.json, its directory, or a name like llama-3.1-8b"
        )
    raise unknown_choice("model", model, model_names())


@lru_cache(maxsize=128)
def _of_catalog(name: str) -> ModelSpec | None:
    if name == EMBEDDED:
        return load_hf_config(EMBEDDED_DIRECTORY, name=EMBEDDED)
    path = MODELS_DIRECTORY / f"{name}.json"
    if "/" in name or not path.is_file():
        return None
    extension = msgspec.convert(_tables("EXTENSIONS.toml").get(name), RopeScaling | None)
    return msgspec.structs.replace(load_hf_config(path, name=name), extension=extension)


# A model described in a file of our own schema ----------------------------------------------------------------------


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """These layers, in this order, so many times."""

    layers: tuple[str, ...]
    repeat: int = 1


class ModelFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers by a name of one's own, and the order in which they stand; the other fields are ModelSpec's."""

    schema: Literal["magicdec.model/1"]
    name: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    layers: dict[str, Layer]
    pattern: tuple[Run, ...]
    norm: Norm = Norm()
    tie_word_embeddings: bool = False


def load_model_file(path: Path) -> ModelSpec:
    """Raises ConfigError when it cannot be read, breaks the schema, or names a layer that it does not describe."""
    file = converted(read_toml(path), ModelFile, where=str(path))
    sizes = (file.hidden_size, file.vocab_size, file.max_position_embeddings, *(run.repeat for run in file.pattern))
    if min(sizes) < 1:
        raise ConfigError(f"{path}: sizes and repeats must be at least 1")
    names = [name for run in file.pattern for name in run.layers]
    if unknown := sorted(set(names) - set(file.layers)):
        raise ConfigError(f"{path}: the pattern names layer '{unknown[0]}'; described are {', '.join(file.layers)}")
    if not 1 <= sum(run.repeat * len(run.layers) for run in file.pattern) <= MAX_LAYERS:
        raise ConfigError(f"{path}: the pattern must have between 1 and {MAX_LAYERS} layers")
    layers = tuple(file.layers[name] for run in file.pattern for _ in range(run.repeat) for name in run.layers)
    given = {
        name: getattr(file, name) for name in file.__struct_fields__ if name not in ("schema", "layers", "pattern")
    }
    return ModelSpec(architecture=file.schema, layers=layers, **given)
