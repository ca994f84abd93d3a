"""A model described in a file of our own schema (TOML): for an architecture whose layers are known and whose
`config.json` is not. docs/extending.md has an example."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from magicdec.errors import ConfigError
from magicdec.files import converted, read_toml
from magicdec.specs.layers import Layer
from magicdec.specs.model import ModelSpec, Norm

MAX_LAYERS = 10_000


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
    return ModelSpec(
        name=file.name,
        architecture=file.schema,
        hidden_size=file.hidden_size,
        vocab_size=file.vocab_size,
        max_position_embeddings=file.max_position_embeddings,
        layers=tuple(file.layers[name] for run in file.pattern for _ in range(run.repeat) for name in run.layers),
        norm=file.norm,
        tie_word_embeddings=file.tie_word_embeddings,
    )
