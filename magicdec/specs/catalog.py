"""Named models that ship with the package, each with the Hugging Face configuration its publisher
released or another model's of the same shape.

A model argument is, in this order: a name of the catalog as people write it (names.py), a TOML file
of our own schema, a `config.json` or the directory that holds it, or `owner/name` on the Hugging
Face hub.
"""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec

from magicdec.errors import ConfigError, unknown_choice
from magicdec.files import converted, read_toml
from magicdec.specs.families import not_modelled
from magicdec.specs.families.keys import MAX_LAYERS
from magicdec.specs.hf_config import load_hf_config, model_from_hf_config
from magicdec.specs.hub import hub_checkpoint, hub_config, is_hub_name
from magicdec.specs.layers import Layer
from magicdec.specs.model import ModelSpec, Norm
from magicdec.specs.names import (
    ModelName,
    checkpoint_of,
    folder_name,
    named_models,
    resolve_name,
)

PACKAGE_DIRECTORY = Path(__file__).resolve().parent.parent
MODELS_DIRECTORY = PACKAGE_DIRECTORY / "specs" / "data" / "models"
ARCHITECTURES_FILE = PACKAGE_DIRECTORY / "specs" / "data" / "architectures.json"
"""Facts of every architecture, written by scripts/architectures_table.py."""
EMBEDDED = "embedded"
OTHER_MODELS = (
    "magicdec models lists the known; a config.json or a Hugging Face id does too"
)
EMBEDDED_DIRECTORY = PACKAGE_DIRECTORY / "data" / "embedded"


def model_names() -> list[str]:
    return [EMBEDDED, *sorted(named_models())]


def model_shapes() -> list[str]:
    """Models of the catalog that have a configuration of their own."""
    return sorted(path.stem for path in MODELS_DIRECTORY.glob("*.json"))


class ArchitectureFacts(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
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
    """Directory of a model argument's weights. None: the argument is no local checkpoint."""
    if model == EMBEDDED:
        return EMBEDDED_DIRECTORY
    path = Path(model)
    if path.is_dir():
        return path
    return None


def served_checkpoint(model: str) -> str | None:
    """The checkpoint that an engine loads for a model argument: a directory or a repository; None
    where none is known.
    """
    directory = checkpoint_directory(model)
    if directory is None:
        return checkpoint_of(model)
    return str(directory)


def local_model(model: str, *, with_weights: bool) -> str:
    """The model argument that a run loads: for `owner/name` of the hub its local directory,
    downloaded on first use, if weights are requested or the catalog lacks the model; any other
    argument unchanged. Raises ConfigError if the download fails."""
    if not is_hub_name(model) or not (with_weights or resolve_name(model) is None):
        return model
    return hub_checkpoint(model, with_weights=with_weights)


def shipped_head(model: str, method: str) -> Path | None:
    """The directory of a head of this kind that stands in a model's own directory, if any."""
    directory = checkpoint_directory(model)
    if directory is None or not (directory / "heads" / method).is_dir():
        return None
    return directory / "heads" / method


class _Size(msgspec.Struct):
    """Keys that tell roughly how large a model is, read without the rest of its configuration."""

    vocab_size: int = 0
    hidden_size: int = 0
    num_hidden_layers: int = 0

    @property
    def least_parameters(self) -> int:
        """A bound from below: each layer has more than one square matrix of the hidden size."""
        return self.hidden_size**2 * self.num_hidden_layers


@lru_cache(maxsize=1)
def _sizes() -> dict[str, _Size]:
    return {
        name: msgspec.json.decode(
            (MODELS_DIRECTORY / f"{name}.json").read_bytes(), type=_Size
        )
        for name in model_shapes()
    }


def models_that_may_draft(
    target: ModelSpec, *, most_parameters: float = math.inf
) -> list[str]:
    """The catalog's models with the target's vocabulary, the smallest first by width and depth,
    without those that surely have more than `most_parameters`.

    Two families may have vocabularies of one size; where the catalog has the target, its family
    decides.
    """
    row = named_models().get(target.name)
    if row is None:
        family = None
    else:
        family = row.tokenizer_family(target.name)
    sizes = _sizes()
    able = [
        name
        for name, size in sizes.items()
        if size.vocab_size == target.vocab_size
        and size.least_parameters <= most_parameters
        and family in (None, named_models()[name].tokenizer_family(name))
    ]
    return sorted(able, key=lambda name: sizes[name].least_parameters)


def load_model_spec(model: str) -> ModelSpec:
    """The spec of a model argument. A file is read anew each time. Raises ConfigError for a name
    that is not known, a file that cannot be read, and a repository that the hub lacks."""
    if model == EMBEDDED:
        return _embedded()
    path = Path(model)
    if path.suffix == ".toml":
        return load_model_file(path)
    if path.exists():
        return load_hf_config(path)
    name = resolve_name(model)
    if name is not None:
        return _of_catalog(name)
    if model.endswith(".json") or ("/" in model and not is_hub_name(model)):
        raise ConfigError(
            f"no configuration at {model}: give a config.json, its directory, a name like "
            "llama-3.1-8b, or a Hugging Face id like meta-llama/Llama-3.1-8B-Instruct"
        )
    reason = not_modelled(model)
    if reason:
        raise ConfigError(reason)
    if is_hub_name(model):
        try:
            return load_hf_config(hub_config(model), name=model.rpartition("/")[2])
        except ConfigError:
            spec = _by_parts_of_its_name(model)
            if spec is None:
                raise
            return spec
    raise unknown_choice("model", model, model_names(), or_else=OTHER_MODELS)


OTHER_BITS = re.compile(r"[235-7]-?bits?\b")
"""Formats of a name that no known format is."""


def _by_parts_of_its_name(repository: str) -> ModelSpec | None:
    """A repository that cannot be read, as the model and the format that its name holds. None: it holds none, or
    no format."""
    name = folder_name(repository)
    if name is None or OTHER_BITS.search(repository.lower()):
        return None
    known = resolve_name(name)
    if known is None or known.weight_format is None:
        return None
    spec = _of_catalog(known)
    assumed = f"{repository} could not be read: by its name it is {known.model} in {known.weight_format}"
    return msgspec.structs.replace(spec, assumed=assumed)


def known_model(text: str) -> ModelSpec | None:
    """The spec of a model argument; None: nothing is known of it."""
    if not is_model(text):
        return None
    try:
        return load_model_spec(text)
    except ConfigError:
        return None


def is_model(text: str) -> bool:
    """Whether a text names a model, rather than being no name at all."""
    return (
        text == EMBEDDED
        or "/" in text
        or Path(text).exists()
        or resolve_name(text) is not None
    )


@lru_cache(maxsize=1)
def _embedded() -> ModelSpec:
    return load_hf_config(EMBEDDED_DIRECTORY, name=EMBEDDED)


@lru_cache(maxsize=256)
def _of_catalog(name: ModelName) -> ModelSpec:
    row = named_models()[name.model]
    path = MODELS_DIRECTORY / f"{row.shape or name.model}.json"
    if name.weight_format is None:
        spec = load_hf_config(path, name=name.model)
    else:
        config = json.loads(path.read_bytes())
        for part in (config, config.get("text_config", {})):
            part.pop("quantization_config", None)
        quantization = name.quantization_config()
        if quantization is not None:
            config["quantization_config"] = quantization
        spec = model_from_hf_config(config, name=name.model, where=str(path))
    if row.max_position_embeddings is not None:
        spec = msgspec.structs.replace(
            spec, max_position_embeddings=row.max_position_embeddings
        )
    return msgspec.structs.replace(spec, extension=row.extension)


# A model described in a file of our own schema
# ----------------------------------------------------------------------


class RepeatedLayers(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Layers in this order, repeated this often."""

    layers: tuple[str, ...]
    repeat: int = 1


class ModelFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers by a name of one's own, and the order in which they stand; the other fields are
    ModelSpec's.
    """

    schema: Literal["magicdec.model/1"]
    name: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    layers: dict[str, Layer]
    pattern: tuple[RepeatedLayers, ...]
    norm: Norm = Norm()
    tie_word_embeddings: bool = False


def load_model_file(path: Path) -> ModelSpec:
    """The model that a file describes. Raises ConfigError if the file cannot be read, breaks the
    schema, or names a layer that it does not describe."""
    file = converted(read_toml(path), ModelFile, where=str(path))
    sizes = [file.hidden_size, file.vocab_size, file.max_position_embeddings]
    for run in file.pattern:
        sizes.append(run.repeat)
    if min(sizes) < 1:
        raise ConfigError(f"{path}: sizes and repeats must be at least 1")
    names = {name for run in file.pattern for name in run.layers}
    unknown = sorted(names - set(file.layers))
    if unknown:
        raise ConfigError(
            f"{path}: the pattern names layer '{unknown[0]}'; described are "
            f"{', '.join(file.layers)}"
        )
    if not 1 <= sum(run.repeat * len(run.layers) for run in file.pattern) <= MAX_LAYERS:
        raise ConfigError(
            f"{path}: the pattern must have between 1 and {MAX_LAYERS} layers"
        )
    fields = msgspec.structs.asdict(file)
    for name in ("schema", "layers", "pattern"):
        del fields[name]
    layers: list[Layer] = []
    for run in file.pattern:
        layers += [file.layers[name] for name in run.layers] * run.repeat
    return ModelSpec(architecture=file.schema, layers=tuple(layers), **fields)
