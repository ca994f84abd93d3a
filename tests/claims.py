"""What a document's statements hang on: each place of it in turn gets other values, and the statements that are no
longer the same hang on it. Of the numbers that a statement prints, what they round."""

from __future__ import annotations

import re
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from magicdec.naming import METHODS
from magicdec.tasks import TASKS

Claims = Mapping[str, tuple[str, ...]]
"""Of each kind of statement, the paths of the fields that it hangs on."""


class Place(NamedTuple):
    """Where a value stands in a document."""

    owner: Any
    key: Any
    value: Any
    hints: tuple[Any, ...] = ()
    """The types that its field may hold."""

    def put(self, value: Any) -> None:
        if isinstance(self.owner, msgspec.Struct):
            msgspec.structs.force_setattr(self.owner, self.key, value)
        else:
            self.owner[self.key] = value


@cache
def hints_of(kind: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    return {
        name: get_args(hint)
        if get_origin(hint) in (Union, types.UnionType)
        else (hint,)
        for name, hint in get_type_hints(kind).items()
    }


def places(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Place]]:
    """Every place of a document with its path, where `*` is any entry of a list or a mapping."""
    if isinstance(node, msgspec.Struct):
        hints = hints_of(type(node))
        inner = [
            (name, name, getattr(node, name), hints[name])
            for name in node.__struct_fields__
        ]
    elif isinstance(node, list):
        inner = [("*", key, value, ()) for key, value in enumerate(node)]
    elif isinstance(node, dict):
        inner = [("*", key, value, ()) for key, value in node.items()]
    else:
        return
    for name, key, value, hints in inner:
        yield ".".join((*path, name)), Place(node, key, value, hints)
        yield from places(value, (*path, name))


VOCABULARIES = (METHODS, TASKS, ("vllm", "sglang"))
"""Names of which another one takes a name's place."""
NEW: dict[Any, Any] = {float: 1.0, int: 3, str: "chat", Any: "x"}


def others(place: Place) -> list[Any]:
    """Other values that a place may have."""
    value = place.value
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 3, max(value - 3, 0), 1]
    if isinstance(value, float):
        return [value * 1.37 + 0.01, value * 0.6, value * 0.98]
    if isinstance(value, tuple):
        return [tuple(each * 2 for each in value)]
    if isinstance(value, str):
        for names in VOCABULARIES:
            if value in names:
                return [next(name for name in names if name != value)]
        return [f"{value}x"]
    if isinstance(value, list) and not value:
        return [["x"]] if list[str] in place.hints else []
    if isinstance(value, list) and not isinstance(value[0], int | float):
        return [value[:-1], []]
    if value is None:
        return [new for kind, new in NEW.items() if kind in place.hints][:1]
    return [None] if type(None) in place.hints else []


def covers(claim: str, path: str) -> bool:
    """Whether a claim is of a field, of one above it (which holds it), or of one below."""
    return f"{path}.".startswith(f"{claim}.") or claim.startswith(f"{path}.")


def moved_by(
    document: Any, said: Callable[[Any], Mapping[str, list[str]]]
) -> dict[str, frozenset[str]]:
    """The kinds of statement that other values at a path change, by path. Of a document that cannot be, nothing is
    said."""
    before = said(document)
    by_path = defaultdict(list)
    for path, place in places(document):
        by_path[path].append(place)
    moved = {}
    for path, of_path in by_path.items():
        kinds: set[str] = set()
        for number in range(max(len(others(place)) for place in of_path)):
            for place in of_path:
                if number < len(values := others(place)):
                    place.put(values[number])
            try:
                after = said(document)
            finally:
                for place in of_path:
                    place.put(place.value)
            if after:
                kinds |= {
                    kind
                    for kind in {*before, *after}
                    if after.get(kind) != before.get(kind)
                }
        moved[path] = frozenset(kinds)
    assert said(document) == before
    return moved


def unclaimed(
    moved: Mapping[str, frozenset[str]], claims: Claims
) -> set[tuple[str, str]]:
    """Kinds that hang on a path that they do not claim."""
    return {
        (kind, path)
        for path, kinds in moved.items()
        for kind in kinds
        if not any(covers(claim, path) for claim in claims[kind])
    }


def idle(
    documents: Iterable[Mapping[str, frozenset[str]]], claims: Claims
) -> set[tuple[str, str]]:
    """Claims of a field on which the statement hangs in none of the documents."""
    moved = [each for document in documents for each in document.items()]
    return {
        (kind, claim)
        for kind, paths in claims.items()
        for claim in paths
        if not any(kind in kinds and covers(claim, path) for path, kinds in moved)
    }


NAMED = (
    "90 %",
    "95 %",
    "10th, 50th, 90th",
    "$/Mtok",
    "over 99 %",
    "under 1 %",
    "60 % and more",
)
"""Figures of speech: the levels of intervals, and ends of what is said of a probability."""
NUMBER = re.compile(r"(?<![\w./-])(\d+(?:\.\d+)?)(?:[eE]\+?(\d+))?(k|M)?(?!\w*[-.]\w)")
UNITS = {"": (1.0,), "k": (1e3, 1024.0), "M": (1e6, 1024.0**2)}


def printed(text: str, names: Iterable[str]) -> Iterator[tuple[str, float, float]]:
    """Numbers of a sentence but for those in names: as printed, and the ends of what they round."""
    for name in sorted((*names, *NAMED), key=len, reverse=True):
        text = text.replace(name, "")
    for match in NUMBER.finditer(text):
        digits, power, unit = match.group(1), int(match.group(2) or 0), match.group(3)
        half = 0.5 * 10.0 ** -len(digits.partition(".")[2])
        for factor in UNITS[unit or ""]:
            scale = factor * 10.0**power
            yield (
                match.group(),
                (float(digits) - half) * scale,
                (float(digits) + half) * scale,
            )


def claimed(document: Any, claims: tuple[str, ...]) -> tuple[list[float], set[str]]:
    """The numbers and names of the fields that are claimed."""
    numbers: list[float] = []
    names: set[str] = set()
    for path, place in places(document):
        if any(f"{path}.".startswith(f"{claim}.") for claim in claims):
            value = place.value
            if isinstance(value, str):
                names.add(value)
            elif isinstance(value, tuple | list):
                numbers += [each for each in value if isinstance(each, int | float)]
            elif isinstance(value, int | float):
                numbers.append(value)
    return numbers, names


def unfounded(text: str, values: Iterable[float], names: Iterable[str]) -> list[str]:
    """The numbers of a text that are none of the values, nor one in percent or in thousandths (ms), to the last digit
    that is printed."""
    known = [value * scale for value in values for scale in (1.0, 100.0, 1000.0)]
    by_print: dict[str, bool] = defaultdict(bool)
    for number, low, high in printed(text, names):
        by_print[number] |= any(low <= value <= high * (1 + 1e-12) for value in known)
    return [number for number, is_known in by_print.items() if not is_known]
