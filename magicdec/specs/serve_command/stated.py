"""A command's options by what they mean, in order: of two that mean the same the last counts."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from magicdec.errors import ConfigError
from magicdec.files import bounded
from magicdec.specs.rules import finding
from magicdec.specs.serve_command.options import (
    INSIDE,
    LLAMA_CPP,
    OPTIONS,
    GivenOption,
    bears_on_engine,
    is_of_dynamo,
    names_of,
    note_of,
    options_of,
    scalar,
    unknown_in,
)
from magicdec.specs.serve_command.start import (
    MARKED,
    OPEN,
    OWN_ARGUMENTS,
    SHOWN,
    Given,
    Start,
    json_of,
    text_of,
)
from magicdec.units import parse_count

MOST_OBJECT = 20_000
QUOTES_LOST = (
    "a shell takes quotes away: give the command in a file, through a pipe (magicdec check -), or "
    "in the other sort of quotes"
)
NEEDED = (
    *("model", "tp", "pp", "dp", "ep", "weights"),
    *("speculation", "algorithm", "draft", "method", "gamma", "topk", "tree"),
    *("repository", "draft_repository"),
)
"""Meanings without which there is no answer."""
OBJECTS = {
    "speculation": "speculative-config",
    "compilation": "compilation-config",
    "attention_config": "attention-config",
}
"""Options that take an object whose keys are sorted, by meaning."""
SAMPLES = {
    "model": "Qwen/Qwen3-8B",
    "file": "settings.yaml",
    "draft": "Qwen/Qwen3-0.6B",
    "weights": "fp8",
    "kv_dtype": "fp8",
    "dtype": "bfloat16",
    "algorithm": "EAGLE3",
    "attention_backend": "FLASHINFER",
    "method": "eagle3",
    "memory": "0.9",
    **dict.fromkeys(("length", "chunk"), "8192"),
    **dict.fromkeys(("batch", "captured"), "64"),
    **dict.fromkeys(("eager", "prefixes", "asynchronous", "chunked"), "true"),
}
"""Values that a question suggests, by meaning."""


class StatedOptions:
    """The options of one command."""

    def __init__(self, start: Start, given: Given) -> None:
        self.start = start
        self.given = given
        self.meanings: dict[str, str] = {}
        """Values by meaning."""
        self.names: dict[str, str] = {}
        """The option that gave each meaning, as it is typed."""
        self.written: dict[str, str] = {}
        """Values by option."""
        self.noted: dict[str, str] = {}
        """Options without a price, with what they can cost."""
        self.without_effect: list[str] = []
        self.not_looked_at: list[str] = []
        self.unknown: list[str] = []
        self.problems: list[str] = []
        self.asked: list[str] = []
        self.open: list[str] = []
        """References whose values may be any option."""

    def add_environment(self, variables: Mapping[str, str]) -> None:
        """Takes the variables in that the server is started with."""
        engine = self.start.engine
        for name, value in variables.items():
            option = names_of(engine).variables.get(name)
            if option is not None:
                self._option(option, value, GivenOption(name, value, name))
                continue
            meaning = OPTIONS[engine].get(name)
            if meaning is not None:
                self.written[name] = value
                truth = {"1": "true", "0": "false"}.get(value, value.lower())
                self.state(meaning, truth, name)
            elif bears_on_engine(name):
                self.sort(name, name, value)

    def sort(self, name: str, shown: str, value: str) -> None:
        """Puts an option, a key or a variable without a price where it belongs."""
        known = None if self.given.open_in(value) else value
        note = note_of(self.start.engine, name, known)
        if note is None:
            self.not_looked_at.append(shown)
        elif note:
            self.noted[shown] = note
        else:
            self.without_effect.append(shown)

    def sort_keys(self, option: str, shown: str, values: Mapping[Any, Any]) -> None:
        """Sorts an object's keys; those that its reader takes are priced."""
        engine = self.start.engine
        known = names_of(engine).keys.get(option, frozenset())
        taken = INSIDE.get((engine, option), frozenset())
        for key, value in values.items():
            name = text_of(key)
            if name in taken:
                continue
            if known and name not in known:
                self.unknown.append(f"{shown}.{name}"[:SHOWN])
                continue
            text = json_of(value) if isinstance(value, Mapping) else text_of(value)
            self.sort(f"{option}.{name}", f"{shown}.{name}"[:SHOWN], text)

    def add(self, words: list[str]) -> None:
        """Takes a command's words in."""
        engine = self.start.engine
        for option in options_of(engine, words):
            if not option.name:
                self._positional(option.value or "")
                continue
            name = option.name
            value = option.value
            if name not in OPTIONS[engine] and name.startswith("no-"):
                bare = name.removeprefix("no-")
                if bare in OPTIONS[engine] or bare in names_of(engine).kinds:
                    name = bare
                    value = "false"
            self._option(name, "true" if value is None else value, option)

    def find(self, name: str, *, settings: Collection[str] = (), **values: Any) -> None:
        """Adds what the rules say of a situation in this engine's version."""
        version = self.start.version or ""
        found = finding(name, self.start.engine, version, settings=settings, **values)
        if found is not None:
            kinds = {
                "wrong": self.problems,
                "note": self.given.notes,
                "asked": self.asked,
            }
            kinds[found.kind].append(found.says)

    def _positional(self, value: str) -> None:
        engine = self.start.engine
        if engine == LLAMA_CPP:  # takes none
            return
        references = self.given.open_in(value)
        takes_model = engine != "sglang" or not references
        if "model" not in self.meanings and takes_model:
            self.meanings["model"] = value
            self.names["model"] = "the model"
            return
        if value in ("serve", ""):
            return
        if references == ["$@"] and self.given.reasons["$@"][1] == OWN_ARGUMENTS:
            self.given.notes.append(
                "the script's own arguments ($@) are not known here"
            )
        elif references:  # it may be any option
            self.open += references
        else:
            self.unknown.append(value[:SHOWN])

    def _option(self, name: str, value: str, given: GivenOption) -> None:
        engine = self.start.engine
        written = given.name
        dashes = "--"
        if engine == LLAMA_CPP:
            dashes = given.written[: -len(given.written.lstrip("-")) or None]
        missing = unknown_in(engine, name, self.start.version)
        if missing is not None:
            if is_of_dynamo(name):
                self.sort(name, f"{dashes}{written}", value)
                return
            if self.start.version in names_of(engine).versions:
                situation = "an option of other versions"
                if self.start.is_other_build:
                    situation = "an option that an image may add"
                self.find(situation, missing=missing)
            if name not in OPTIONS[engine]:
                if self.given.open_in(written):
                    self.open += self.given.open_in(written)
                    return
                self.unknown.append(f"{dashes}{written}")
                return
        meaning = OPTIONS[engine].get(name)
        if meaning is None:
            self.sort(name, f"{dashes}{written}", value)
            return
        if value.startswith("{") and not self.given.open_in(value):
            inside = json_object(name, value)
            value = json.dumps(inside)
            option = OBJECTS.get(meaning)
            if option is not None:
                self.sort_keys(option, option, inside)
        value = _joined(self.meanings.get(meaning), value)
        shown = "speculative-config" if meaning == "speculation" else name
        self.written[f"{dashes}{shown}"] = value
        self.state(meaning, value, given.written)

    def state(self, meaning: str, value: str, name: str) -> None:
        """Sets a meaning; "not X" sets X to the opposite."""
        if meaning.startswith("not "):
            meaning = meaning.removeprefix("not ")
            value = {"true": "false", "false": "true"}.get(value, value)
        self.meanings[meaning] = value
        self.names[meaning] = name

    def check_resolved(self) -> None:
        """Asks for references that the answer needs, all in one ConfigError; names the others."""
        questions = []
        for meaning, value in list(self.meanings.items()):
            references = self.given.open_in(value)
            if not references:
                continue
            self.meanings[meaning] = self.given.shown(value)
            if meaning in ("model", "draft") and _named_anyway(value):
                continue
            sample = SAMPLES.get(meaning, "4")
            asked = [self.given.question(name, sample) for name in references]
            if meaning in NEEDED:
                questions += asked
            else:
                option = self.names.get(meaning, meaning)
                self.asked.append(f"{option} is not known: {'; '.join(asked)}")
                del self.meanings[meaning]
        for reference in self.open:
            questions.append(self.given.question(reference, '"--max-num-seqs 64"'))
        self.given.ask(questions)
        self.written = {name: self.given.shown(v) for name, v in self.written.items()}

    def count(self, meaning: str) -> int | None:
        """A whole number from 1 on; None: it is left to the engine."""
        text = self.meanings.get(meaning)
        option = self.names.get(meaning, meaning)
        if text is None or text in ("auto", "null", "None", ""):
            return None
        try:
            value = parse_count(text)
        except ValueError:
            raise ConfigError(
                f"{option} must be a whole number, not '{text[:SHOWN]}'"
            ) from None
        if value < 1:
            raise ConfigError(f"{option} must be at least 1, not {value}")
        return value

    def truth(self, meaning: str) -> bool | None:
        """Whether a setting is on; None: nothing is said of it."""
        return {"true": True, "false": False}.get(self.meanings.get(meaning, ""))


def _named_anyway(value: str) -> bool:
    """Whether the last part of a path names a model, whatever folder it lies in."""
    last = value.rstrip("/").rpartition("/")[2]
    return "/" in value and bool(last) and not MARKED.search(last)


def _joined(before: str | None, given: str) -> str:
    """An option given in parts (--speculative-config.method ngram) as one object."""
    if before is None or not (before.startswith("{") and given.startswith("{")):
        return given
    if OPEN in before + given:  # asked for before it is taken apart
        return f"{before}{given}"
    return json.dumps(json_object("option", before) | json_object("option", given))


def json_object(name: str, text: str) -> dict[str, Any]:
    """An option's JSON object. Raises ConfigError."""
    try:
        value = bounded(json.loads, text)
    except ValueError:
        value = _without_quotes(text)
    if isinstance(value, dict):
        return value
    raise ConfigError(
        f"--{name} must be a JSON object, not {text[:SHOWN]}; {QUOTES_LOST}"
    )


def _without_quotes(text: str) -> Any:
    """A JSON object whose quotes a shell took away, as {method:ngram}; None: it is none."""
    if len(text) > MOST_OBJECT:
        return None
    words = []
    for word in re.findall(r'"[^"]*"|[{}\[\],:]|[^\s{}\[\],:"]+', text):
        is_json = word[0] in '"{}[],:' or isinstance(scalar(word), int | float | None)
        words.append(word if is_json else json.dumps(word))
    try:
        return bounded(json.loads, "".join(words))
    except ValueError:
        return None
