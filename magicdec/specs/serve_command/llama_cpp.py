"""`llama-server`'s command: GGUF files and repositories, by their names' formats, and its drafts.

Option names are those of llama.cpp's common/arg.cpp, older spellings included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from magicdec.errors import ConfigError
from magicdec.naming import draft_by_name

OPTIONS = {
    "model": ("m", "model"),
    "repository": ("hf", "hfr", "hf-repo"),
    "draft": ("md", "model-draft", "spec-draft-model"),
    "draft_repository": ("hfd", "hfrd", "hf-repo-draft", "spec-draft-hf"),
    "gamma": ("draft-max", "draft", "draft-n", "spec-draft-n-max", "spec-draft-max"),
    "method": ("spec-type",),
    "batch": ("np", "parallel"),
    "length": ("c", "ctx-size"),
    "keys": ("ctk", "cache-type-k"),
    "layers": ("ngl", "gpu-layers", "n-gpu-layers"),
}
ON_HOST = frozenset(
    (
        *("nkvo", "no-kv-offload", "cmoe", "cpu-moe", "ncmoe", "n-cpu-moe"),
        *("ot", "override-tensor"),
    )
)
"""Options that keep weights or the cache on the host."""
MEANINGS = {name: meaning for meaning, names in OPTIONS.items() for name in names}
USUAL_FORMAT = "Q4_K_M"
"""Format of a repository's file that -hf takes, where it names none."""
DRAFT_MAX = 16
"""Drafted tokens of a draft model, where the command does not say."""
FORMAT = re.compile(
    r"[-_.:](?:UD[-_])?((?:IQ|TQ|Q)\d(?:_\w+)?|MXFP4(?:_\w+)?|NVFP4|BF16|F16|F32)$",
    re.IGNORECASE,
)
SHARD = re.compile(r"-\d{5}-of-\d{5}$")
BITS = {"1": 2.0, "2": 3.0, "3": 3.9, "4": 4.8, "5": 5.7, "6": 6.6, "8": 8.5}
"""Bits of a weight, by the digit of a format's name: block scales and wider tables included."""


class Gguf(NamedTuple):
    """A GGUF file by its name."""

    model: str
    label: str
    """Its format as it is called; "": the name has none."""
    weight_dtype: str | None
    """The format that is nearest in bits."""


def gguf_of(name: str) -> Gguf:
    """The model and the format that the name of a file, or of a repository with its tag, tells."""
    base = name.rstrip("/").rpartition("/")[2]
    repository, _, tag = base.partition(":")
    base = SHARD.sub("", re.sub(r"\.gguf$", "", repository, flags=re.IGNORECASE))
    label = ""
    found = FORMAT.search(base)
    if found is not None:
        label = found[1]
        base = base[: found.start()]
    if tag:
        found = FORMAT.search(f":{tag}")
        label = found[1] if found is not None else tag
    base = re.sub(r"[-_.]GGUF$", "", base, flags=re.IGNORECASE)
    return Gguf(base, label.upper(), _format(label.upper()))


def _format(label: str) -> str | None:
    if not label:
        return None
    if "FP4" in label:
        return "int4"
    digit = re.search(r"Q(\d)", label)
    if digit is None:
        return "bf16"
    if BITS.get(digit[1], 16.0) <= 6.0:
        return "int4"
    return "int8"


class LlamaCommand(NamedTuple):
    """The fields of a command, by `OPTIONS`, and its other options."""

    said: dict[str, str]
    written: dict[str, str]
    others: list[str]


def read_words(words: Sequence[str]) -> LlamaCommand:
    said: dict[str, str] = {}
    written: dict[str, str] = {}
    others = []
    for name, value in _options(words):
        meaning = MEANINGS.get(name)
        dashes = "-" if len(name) < 4 else "--"
        if meaning is None:
            others.append(f"{dashes}{name}")
            continue
        said[meaning] = value
        written[f"{dashes}{name}"] = value
    return LlamaCommand(said, written, others)


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not re.match(r"--?[A-Za-z]", word):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not equals and place < len(words):
            follows = words[place]
            if not re.match(r"--?[A-Za-z]", follows):
                value = follows
                place += 1
        yield name, value


def draft_of(command: LlamaCommand) -> tuple[str, int | None, str | None] | None:
    """The draft, its gamma and its checkpoint; None: it drafts nothing.

    Raises ConfigError for a sort of draft that is not planned for.
    """
    gamma = None
    if re.fullmatch(r"\d{1,4}", command.said.get("gamma", "")):
        gamma = int(command.said["gamma"])
    method = command.said.get("method", "").partition(",")[0]
    if method.startswith("ngram"):
        return "ngram", gamma, None
    checkpoint = command.said.get("draft") or command.said.get("draft_repository")
    named = draft_by_name(method.removeprefix("draft-")) if method else None
    if named is not None:
        return named, gamma, checkpoint
    if method not in ("", "none", "draft", "draft-simple"):
        raise ConfigError(f"--spec-type {method[:40]} is not planned for")
    if not checkpoint:
        return None
    return gguf_of(checkpoint).model, gamma or DRAFT_MAX, checkpoint
