"""Engines' options: which there are in which version, which take no value, and what those that bear
on speed mean.

Names are read from the engines' own parsers by scripts/read_engine_options.py, TensorRT-LLM's from
its documentation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from magicdec.errors import ConfigError
from magicdec.files import bounded, read_toml
from magicdec.naming import ENGINE_TITLES

OPTIONS_DIRECTORY = Path(__file__).resolve().parent.parent / "data" / "options"
LLAMA_CPP = "llama.cpp"
ENGINES = ("vllm", "sglang", "trtllm")
"""Engines whose parsers share options and take the beginning of a name."""
MEANINGS = read_toml(OPTIONS_DIRECTORY.parent / "option_meanings.toml")
OPTIONS: Mapping[str, Mapping[str, str]] = {
    **{engine: MEANINGS["shared"] | MEANINGS[engine] for engine in ENGINES},
    LLAMA_CPP: MEANINGS[LLAMA_CPP],
}
"""Options that bear on speed, by what they say."""
INSIDE: Mapping[tuple[str, str], frozenset[str]] = {
    (row["engines"], row["object"]): frozenset(row["keys"].split())
    for row in MEANINGS["inside"]
}
"""Keys that the reader of an object takes, by engine and option."""
NAME = re.compile(r"--?[A-Za-z]")
MOST_OPTION_VALUES = 1000
MOST_OPTION_NESTED = 20


class Names(msgspec.Struct, frozen=True):
    """An engine's options by kind, and the versions that lack some."""

    kinds: dict[str, str]
    versions: tuple[str, ...]
    only_in: dict[str, str]
    """Versions of an option that not all have."""
    keys: dict[str, frozenset[str]]
    """Keys of options that take an object."""
    removed: dict[str, str] = {}
    """Options of older versions, with what took their place."""
    variables: dict[str, str] = {}
    """Variables that set an option."""

    @property
    def range(self) -> str:
        """The versions known: "0.32–0.33"."""
        first, last = (".".join(version.split(".")[:3]) for version in self.ends)
        first, last = first.removesuffix(".0"), last.removesuffix(".0")
        return first if first == last else f"{first}–{last}"

    @property
    def ends(self) -> tuple[str, str]:
        return self.versions[0], self.versions[-1]


class GivenOption(msgspec.Struct, frozen=True):
    """An option as it is given; the name of a positional argument is empty."""

    name: str
    value: str | None
    written: str = ""
    """Its spelling in the command."""


@cache
def names_of(engine: str) -> Names:
    """An engine's options."""
    document = read_toml(OPTIONS_DIRECTORY / f"{engine}.toml")
    kinds: dict[str, str] = {}
    only_in: dict[str, str] = {}
    for versions, by_kind in document["options"].items():
        for kind, names in by_kind.items():
            for name in names:
                kinds[name] = kind
                if versions != "all":
                    only_in[name] = versions
    keys = {}
    for option, by_version in document.get("keys", {}).items():
        groups = {name: frozenset(fields) for name, fields in by_version.items()}
        keys[option] = frozenset().union(*groups.values())
        for name, fields in groups.items():
            if name != "all":
                keys[name.replace("_", "-")] = fields
        if option == "config":
            keys["config"] = groups["all"]
    return Names(
        kinds=kinds,
        versions=tuple(document["versions"]),
        only_in=only_in,
        keys=keys,
        removed=document.get("removed", {}),
        variables=document.get("variables", {}),
    )


def title_of(engine: str) -> str:
    """The engine's name without the version that profiles were fitted on."""
    return re.sub(r" [\d.]+$", "", ENGINE_TITLES.get(engine, engine))


def is_engine_option(option: str) -> bool:
    """Whether any engine has an option, in one of the versions that are known."""
    return any(
        option in names_of(engine).kinds or option in OPTIONS[engine]
        for engine in ENGINES
    )


def note_of(engine: str, name: str, value: str | None) -> str | None:
    """The cost that an option, a key or a variable without a price can have, with its address; "": none at
    this value (None: it is not known); None: nobody looked at it."""
    for row in MEANINGS["noted"]:
        if engine not in row["engines"].split() or not _is_among(row["names"], name):
            continue
        values = row.get("values", "").split()
        if value is None or value in values or (not values and value != "false"):
            return f"{row['says']} ({row['address']})"
        return ""
    lists = MEANINGS["without_effect"]
    names = " ".join([*lists["all"], *lists[engine]])
    return "" if _is_among(names, name) else None


def bears_on_engine(variable: str) -> bool:
    """Whether a variable's name is of an engine or of what it runs on."""
    return _is_among(MEANINGS["variables"], variable)


def _is_among(patterns: str, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split())


def is_of_dynamo(option: str) -> bool:
    """Whether an option is one of NVIDIA's Dynamo, which starts engines with theirs and its own."""
    return _is_among(" ".join(MEANINGS["dynamo"]), option)


def unknown_in(engine: str, option: str, version: str | None) -> str | None:
    """Why an option is not understood: of which versions' lists it is missing; None: it is there.

    With the engine's version known, and its options too, an option that it lacks is a fault.
    """
    names = names_of(engine)
    title = title_of(engine)
    if option in names.removed:
        return None
    if option in names.kinds:
        versions = names.only_in.get(option)
        is_listed = version in names.versions
        if versions is None or not is_listed or version in versions.split():
            return None
        return f"{title} {version} has no --{option}; it is in {versions}"
    if option in OPTIONS[engine] and version not in names.versions:
        return None
    is_beginning = engine in ENGINES
    if is_beginning and sum(known.startswith(option) for known in names.kinds) == 1:
        # engines' parsers take an unambiguous beginning: --tp for --tp-size
        return None
    if version in names.versions:
        return f"{title} {version} has no --{option}"
    return f"not in {title} {names.range}"


def options_of(engine: str, words: Sequence[str]) -> Iterator[GivenOption]:
    """The options of a command's words, as the engine's own parser takes them apart: underscores,
    --no-x, -O3, --option.key value, values with and without "=".
    """
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if word == "--":  # what follows are no options' values
            continue
        if not NAME.match(word):
            yield GivenOption("", word)
            continue
        written, equals, given = word.lstrip("-").partition("=")
        value: str | None = given
        if re.fullmatch(r"-O[0-3]", word):
            yield GivenOption("O", word[-1], "-O")
            continue
        head, _, inside = written.partition(".")
        name = _spelled(engine, head.replace("_", "-"))
        if not equals:
            kind = "value" if inside else _kind_of(engine, name)
            taken = _taken(words[place : place + MOST_OPTION_VALUES], kind)
            place += len(taken)
            value = " ".join(taken) if taken else None
        if inside:  # --speculative-config.method ngram
            value = _nested(inside.split("."), value or "")
        dashes = word[: len(word) - len(word.lstrip("-"))]
        yield GivenOption(name, value, f"{dashes}{written}")


def _taken(words: Sequence[str], kind: str) -> list[str]:
    """The words behind an option that are its values."""
    taken: list[str] = []
    for word in words:
        is_truth = word.lower() in ("true", "false")
        if NAME.match(word) or word == "--" or (kind == "flag" and not is_truth):
            break
        taken.append(word)
        if kind != "list":
            break
    return taken


def _nested(path: Sequence[str], text: str) -> str:
    """An object with one value at a path. Raises ConfigError for a path that no option has."""
    if len(path) > MOST_OPTION_NESTED:
        raise ConfigError(f"an option's name has more than {MOST_OPTION_NESTED} dots")
    nested: Any = scalar(text)
    for key in reversed(path):
        nested = {key: nested}
    return json.dumps(nested, ensure_ascii=False)


def _kind_of(engine: str, name: str) -> str:
    """flag, value or list."""
    kinds = names_of(engine).kinds
    if name in kinds:
        return kinds[name]
    if name.startswith("no-") and kinds.get(name[3:]) == "flag":
        return "flag"
    if OPTIONS[engine].get(name) == "captured":  # vLLM's, in versions that no list has
        return "list"
    return "value"


def _spelled(engine: str, name: str) -> str:
    """The option that a name is the beginning of, where it is of one alone."""
    names = names_of(engine).kinds
    if name in names or name in OPTIONS[engine] or len(name) < 5:
        return name
    if engine not in ENGINES:
        return name
    if name.removeprefix("no-") in names:
        return name
    longer = [option for option in names if option.startswith(name)]
    if len(longer) == 1:
        return longer[0]
    return name


def scalar(text: str) -> Any:
    """A value as JSON writes it; else the text."""
    try:
        return bounded(json.loads, text)
    except ValueError:
        return text
