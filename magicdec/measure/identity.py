"""Digests of the files that a run reads, by content: two checkpoints may have one name, and a file may change.

A weights file is known by its size, its header, which names every tensor with its shape, and samples of its bytes: all
of it where it is small, evenly spread ones where reading it all would take as long as loading it.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from magicdec.errors import CheckpointError, ConfigError
from magicdec.specs.catalog import checkpoint_directory, load_model_spec
from magicdec.units import KIB, MIB

SAMPLED_ABOVE_BYTES = 64 * MIB
SAMPLE_BYTES, NUM_SAMPLES = 64 * KIB, 256
SETTINGS = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json")


def inputs_digest(models: Iterable[str], *, with_weights: bool, prompts: str, for_calibration: bool) -> str:
    """Digest of all that a run reads: its models, in their order, and its prompts' text, half of which it takes."""
    digests = [model_digest(model, with_weights=with_weights) for model in models]
    return _hash([each.encode() for each in (*digests, prompts_digest(prompts), str(for_calibration))])


def model_digest(model: str, *, with_weights: bool) -> str:
    """Digest of a model argument: of its directory's settings and weights, or of its specification alone.

    Raises CheckpointError when a file of it cannot be read.
    """
    directory = checkpoint_directory(model)
    if directory is None or not with_weights:
        return _hash([repr(load_model_spec(model)).encode()])
    files = [directory / name for name in SETTINGS if (directory / name).is_file()]
    return _files_digest(directory, [*files, *sorted(directory.glob("*.safetensors"))])


def prompts_digest(source: str) -> str:
    """Digest of a file's or a directory's bytes; text that ships with Python is known by its version."""
    path = Path(source)
    if not path.exists():
        return f"{source} of Python {platform.python_version()}"
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return _files_digest(path, files)


def _files_digest(root: Path, files: list[Path]) -> str:
    """The digest of files by content; one whose size and time of change stay is not read again."""
    return _read_digest(root, *((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files))


@lru_cache(maxsize=64)
def _read_digest(root: Path, *files: tuple[Path, int, int]) -> str:
    parts = []
    for file, size, _ in files:
        name = file.relative_to(root) if file != root else Path()
        parts += [name.as_posix().encode(), str(size).encode()]
        try:
            parts.append(hashlib.sha256(b"".join(_samples(file, size))).digest())
        except OSError as error:
            kind = CheckpointError if file.suffix == ".safetensors" else ConfigError
            raise kind(f"cannot read {file}: {error.strerror or error}") from error
    return _hash(parts)


def _samples(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        if size <= SAMPLED_ABOVE_BYTES:
            yield file.read()
            return
        length = int.from_bytes(file.read(8), "little")  # of the header, in a safetensors file
        yield file.read(min(length, SAMPLED_ABOVE_BYTES))
        for number in range(NUM_SAMPLES):
            file.seek((size - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)


def _hash(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
