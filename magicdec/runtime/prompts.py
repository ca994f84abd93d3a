"""Prompts that need no download: long documents from the running interpreter's own standard
library.

A file is *held out* by a hash of its path relative to the standard library, so the rule is the same
for every Python
version: the embedded model was trained on the other files only (scripts/train_embedded_model.py
    uses this module).
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from magicdec.errors import CheckpointError, ConfigError, unknown_choice
from magicdec.files import RESULTS_LIMIT_BYTES, read_json, read_text

HELD_OUT_FILE_ONE_IN = 10
_OF_STDLIB = ("stdlib", "recall")
_SKIPPED_PARTS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "encodings", "lib2to3"}
)
_TEST_PARTS = frozenset({"test", "tests", "idle_test"})


def is_held_out(relative_path: str) -> bool:
    """Whether the standard-library file (posix path relative to its root) was kept from
    training."""
    first_byte = _digest(relative_path)[0]
    return first_byte % HELD_OUT_FILE_ONE_IN == 0


def _digest(relative_path: str) -> bytes:
    return hashlib.sha256(relative_path.encode()).digest()


def stdlib_documents(*, held_out: bool, tests: bool = False) -> Iterator[str]:
    """Texts of the standard library's Python files, in a fixed order that mixes packages. `tests`
    chooses the library's own test suite instead of its sources. Tables of character encodings are
    left out: they are not text."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = _SKIPPED_PARTS
    if not tests:
        skipped = _SKIPPED_PARTS | _TEST_PARTS
    chosen = []
    for directory, names, files in os.walk(root):
        # of an installation, most files are of packages
        names[:] = [name for name in names if name not in skipped]
        place = Path(directory).relative_to(root)
        is_test = bool(_TEST_PARTS.intersection(place.parts))
        if is_test != tests:
            continue
        for name in files:
            relative = (place / name).as_posix()
            if name.endswith(".py") and is_held_out(relative) == held_out:
                chosen.append((_digest(relative), root / relative))
    for _, path in sorted(chosen):
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.strip():
            yield text


def load_tokenizer(checkpoint: Path, *, vocab_size: int) -> Tokenizer:
    """The tokenizer of a checkpoint directory. Raises CheckpointError when there is none, it cannot
    be read, or it has more tokens than the model."""
    file = checkpoint / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"{checkpoint} has no tokenizer.json; prompts of text need one (or use --prompts "
            "random)"
        )
    state = file.stat()
    try:
        tokenizer = _tokenizer(file, state.st_mtime_ns, state.st_size)
    except Exception as error:  # the library raises bare Exception for a damaged file
        raise CheckpointError(f"{file} is not a readable tokenizer: {error}") from error
    if tokenizer.get_vocab_size() > vocab_size:
        size = tokenizer.get_vocab_size()
        raise CheckpointError(
            f"{file} has {size} tokens, the model only {vocab_size}: they do not belong together"
        )
    return tokenizer


@lru_cache(maxsize=4)
def _tokenizer(file: Path, _mtime_ns: int, _size: int) -> Tokenizer:
    """One object for a file that has not changed, so that what it made of the standard library is
    found again."""
    return Tokenizer.from_file(str(file))


def generation_eos_token_ids(
    checkpoint: Path, *, vocab_size: int
) -> tuple[int, ...] | None:
    """The tokens that end a text, by the checkpoint's generation_config.json, which has the last
    word on them, as in transformers. None: the file does not state them. Raises CheckpointError for
    a file that cannot be read or that lists no token."""
    file = checkpoint / "generation_config.json"
    if not file.is_file():
        return None
    try:
        given = read_json(file, error=CheckpointError).get("eos_token_id")
    except AttributeError as error:
        raise CheckpointError(
            f"{file} is not a readable generation configuration: {error}"
        ) from error
    if given is None:
        return None
    ids = given
    if not isinstance(given, list):
        ids = [given]
    for number in ids:
        if type(number) is not int or not 0 <= number < vocab_size:
            raise CheckpointError(
                f"{file}: eos_token_id {given} is no token, or list of them, of {vocab_size}"
            )
    return tuple(ids)


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """`count` prompts of `context_len` tokens. source: "stdlib" (held-out files of the running
    standard library), "recall" (the same, each ending with the start of a passage from its first
    half), "random" (seeded tokens), or a path to a text file or a directory of them.
    context_spread: prompt lengths are spread evenly from `context_len·(1 − context_spread)` to
    `context_len`. calibration: take the half of the text that measured runs do not use."""

    source: str = "stdlib"
    count: int
    context_len: int
    context_spread: float = 0.0
    seed: int = 0
    calibration: bool = False

    @property
    def lengths(self) -> list[int]:
        shortest = round(self.context_len * (1 - self.context_spread))
        spaced = np.linspace(shortest, self.context_len, self.count)
        return list(map(int, spaced.round()))


def load_prompts(
    request: PromptRequest, *, tokenizer: Tokenizer | None, vocab_size: int
) -> list[list[int]]:
    """Token ids of each prompt, the longest last. Raises ConfigError when the source is unknown,
    cannot be read or is shorter than one prompt."""
    if request.source == "random":
        generator = np.random.default_rng(request.seed)
        prompts = []
        for length in request.lengths:
            prompts.append(generator.integers(1, vocab_size, size=length).tolist())
        return prompts
    if tokenizer is None:
        raise ConfigError(
            f"prompts '{request.source}' need a tokenizer; without one use --prompts random"
        )
    stream = _token_stream(request, tokenizer)
    if not stream:
        raise ConfigError(
            f"prompts '{request.source}' hold no text; give a text file, or a directory of them"
        )
    if len(stream) < request.context_len:
        raise ConfigError(
            f"prompts '{request.source}' hold {len(stream)} tokens, fewer than one prompt of "
            f"{request.context_len}; use a context of at most {len(stream)}"
        )
    # Evenly spaced windows: disjoint where the text is long enough, overlapping otherwise.
    last = len(stream) - request.context_len
    most = max(1, min(last, request.context_len))
    offset = np.random.default_rng(request.seed).integers(0, most)
    spaced = np.linspace(0, last, request.count, endpoint=request.count == 1)
    prompts = []
    for i, length in enumerate(request.lengths):
        start = int(offset + spaced[i]) % (last + 1)
        prompt = stream[start : start + length]
        if request.source == "recall":
            prompt = _with_repeated_passage(prompt, seed=request.seed + i)
        prompts.append(prompt)
    return prompts


def _with_repeated_passage(prompt: list[int], *, seed: int) -> list[int]:
    """The prompt with its last 24 tokens replaced by the start of a passage from its first half:
    the continuation has to be recalled from thousands of tokens back."""
    cue = 24
    passage = min(256, len(prompt) // 4)
    last = len(prompt) // 2 - passage
    start = int(np.random.default_rng(seed).integers(0, max(1, last)))
    return prompt[:-cue] + prompt[start : start + cue]


def _token_stream(request: PromptRequest, tokenizer: Tokenizer) -> list[int]:
    """The source's documents as one stream of tokens, separated by the end-of-text token if the
    tokenizer has one.
    """
    if request.source in _OF_STDLIB:
        ids = _stdlib_ids(tokenizer)
    else:
        ids = _ids(_texts(request.source), tokenizer)
    half = len(ids) // 2
    if half < request.context_len:
        return ids
    if request.calibration:
        return ids[:half]
    return ids[half:]


@lru_cache(maxsize=2)
def _stdlib_ids(tokenizer: Tokenizer) -> list[int]:
    """The standard library's tokens, kept since a megabyte takes half a second and every session
    of a process reads it. Callers must not change the list."""
    return _ids(stdlib_documents(held_out=True), tokenizer)


def _ids(texts: Iterable[str], tokenizer: Tokenizer) -> list[int]:
    separator = tokenizer.token_to_id("<|endoftext|>")
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text).ids
        if separator is not None:
            ids.append(separator)
    return ids


def _texts(source: str) -> Iterator[str]:
    """The texts of a user's file, or of a directory of files."""
    path = Path(source)
    if not path.exists():
        raise unknown_choice("prompts", source, (*_OF_STDLIB, "random"))
    files = [path]
    if path.is_dir():
        files = sorted(filter(Path.is_file, path.rglob("*")))
    for file in files:
        try:
            text = read_text(file, limit_bytes=RESULTS_LIMIT_BYTES)
        except ConfigError as error:
            if file == path or not isinstance(error.__cause__, UnicodeDecodeError):
                raise
            continue  # a directory may hold other things than text
        if text.strip():
            yield text
