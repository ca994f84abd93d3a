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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from magicdec.errors import CheckpointError, ConfigError, unknown_choice
from magicdec.files import RESULTS_LIMIT_BYTES, read_json, read_text

HELD_OUT_ONE_IN = 10
_SKIPPED_PARTS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "encodings", "lib2to3"}
)
_TEST_PARTS = frozenset({"test", "tests", "idle_test"})


def is_held_out(relative_path: str) -> bool:
    """Whether the standard-library file (posix path relative to its root) was kept from
    training."""
    return hashlib.sha256(relative_path.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def stdlib_documents(*, held_out: bool, tests: bool = False) -> Iterator[str]:
    """Texts of the standard library's Python files, in a fixed order that mixes packages. `tests`
    chooses the library's own test suite instead of its sources. Tables of character encodings are
    left out: they are not text."""
    root = Path(sysconfig.get_path("stdlib"))
    if tests:
        skipped = _SKIPPED_PARTS
    else:
        skipped = _SKIPPED_PARTS | _TEST_PARTS
    chosen = []
    for directory, names, files in os.walk(root):
        names[:] = [
            name for name in names if name not in skipped
        ]  # of an installation, most files are of packages
        place = Path(directory).relative_to(root)
        if tests != bool(_TEST_PARTS.intersection(place.parts)):
            continue
        for relative in (place / name for name in files if name.endswith(".py")):
            if is_held_out(relative.as_posix()) == held_out:
                chosen.append(
                    (hashlib.sha256(relative.as_posix().encode()).digest(), root / relative)
                )
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
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a damaged file
        raise CheckpointError(f"{file} is not a readable tokenizer: {error}") from error
    if tokenizer.get_vocab_size() > vocab_size:
        size = tokenizer.get_vocab_size()
        raise CheckpointError(
            f"{file} has {size} tokens, the model only {vocab_size}: they do not belong together"
        )
    return tokenizer


def generation_eos_token_ids(checkpoint: Path, *, vocab_size: int) -> tuple[int, ...] | None:
    """The tokens that end a text, where the checkpoint's generation_config.json says it; it has the
    last word on them, as in transformers. None where it does not. Raises CheckpointError when it
    cannot be read, or names what is no token."""
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
    if isinstance(given, list):
        ids = given
    else:
        ids = [given]
    if not all(type(each) is int and 0 <= each < vocab_size for each in ids):
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
        return [int(x) for x in np.linspace(shortest, self.context_len, self.count).round()]


def load_prompts(
    request: PromptRequest, *, tokenizer: Tokenizer | None, vocab_size: int
) -> list[list[int]]:
    """Token ids of each prompt, the longest last. Raises ConfigError when the source is unknown,
    cannot be read or is shorter than one prompt."""
    if request.source == "random":
        generator = np.random.default_rng(request.seed)
        return [generator.integers(1, vocab_size, size=n).tolist() for n in request.lengths]
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
            f"{request.context_len}; "
            f"use a context of at most {len(stream)}"
        )
    # Evenly spaced windows: disjoint where the text is long enough, overlapping otherwise.
    last = len(stream) - request.context_len
    offset = np.random.default_rng(request.seed).integers(0, max(1, min(last, request.context_len)))
    spaced = np.linspace(0, last, request.count, endpoint=request.count == 1)
    starts = [int(offset + x) % (last + 1) for x in spaced]
    prompts = [stream[start : start + n] for start, n in zip(starts, request.lengths, strict=True)]
    if request.source == "recall":
        prompts = [
            _with_repeated_passage(prompt, seed=request.seed + i)
            for i, prompt in enumerate(prompts)
        ]
    return prompts


def _with_repeated_passage(
    prompt: list[int],
    *,
    seed: int,
    passage: int = 256,
    cue: int = 24,
) -> list[int]:
    """The prompt with its last `cue` tokens replaced by the start of a passage from its first half,
    so that what comes next is to be recalled from thousands of tokens back."""
    passage = min(passage, len(prompt) // 4)
    start = int(np.random.default_rng(seed).integers(0, max(1, len(prompt) // 2 - passage)))
    return [*prompt[:-cue], *prompt[start : start + cue]]


def _token_stream(request: PromptRequest, tokenizer: Tokenizer) -> list[int]:
    """The source's documents as one stream of tokens, separated by the end-of-text token if the
    tokenizer has one.
    """
    separator = tokenizer.token_to_id("<|endoftext|>")
    ids: list[int] = []
    for text in _texts(request.source):
        ids += tokenizer.encode(text).ids
        if separator is not None:
            ids.append(separator)
    half = len(ids) // 2
    if half < request.context_len:
        return ids
    if request.calibration:
        return ids[:half]
    return ids[half:]


def _texts(source: str) -> Iterator[str]:
    if source in ("stdlib", "recall"):
        yield from stdlib_documents(held_out=True)
        return
    path = Path(source)
    if not path.exists():
        raise unknown_choice("prompts", source, ("stdlib", "recall", "random"))
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
    else:
        files = [path]
    for file in files:
        try:
            text = read_text(file, limit_bytes=RESULTS_LIMIT_BYTES)
        except ConfigError as error:
            if file == path or not isinstance(error.__cause__, UnicodeDecodeError):
                raise
            continue  # a directory may hold other things than text
        if text.strip():
            yield text
