"""Seeded damage to documents: every field once of each wrong type and size, and bytes cut, flipped and doubled."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from typing import Any

NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 10**6, 10**22, -(10**18), 0.5, -0.5, 1.7, 1e-320, 1e300, 1e308,
    math.nan, math.inf, -math.inf, "", "x", "1", "nan", "\u0000", "\x1b[2J", "a" * 300, [], [1], [None], ["x"], [[1]],
    {}, {"x": 1},
)  # fmt: skip
"""Values that a field may be given instead of its own."""
DELETED = object()
Path = tuple[str | int, ...]


def places(document: Any, place: Path = ()) -> Iterator[Path]:
    """Every field of a document, containers included; of a list its first and last entry."""
    if place:
        yield place
    if isinstance(document, dict):
        for key, value in document.items():
            yield from places(value, (*place, key))
    elif isinstance(document, list) and document:
        for index in {0, len(document) - 1}:
            yield from places(document[index], (*place, index))


def with_value(document: Any, place: Path, value: Any) -> Any:
    """A copy of a document with one field set, or taken out."""
    changed = copy.deepcopy(document)
    parent = changed
    for step in place[:-1]:
        parent = parent[step]
    if value is DELETED:
        del parent[place[-1]]
    else:
        parent[place[-1]] = value
    return changed


def damaged(
    document: Any, *, count: int, seed: int, values: tuple[Any, ...] = NASTY
) -> Iterator[tuple[str, Any]]:
    """`count` copies with one field damaged, each named by what was done; fields and values in seeded random order."""
    choices = [
        (place, value) for place in places(document) for value in (*values, DELETED)
    ]
    random.Random(seed).shuffle(choices)
    for place, value in choices[:count]:
        name = "/".join(map(str, place))
        yield (
            f"{name} = {'deleted' if value is DELETED else repr(value)[:40]}",
            with_value(document, place, value),
        )


def damaged_bytes(text: bytes, *, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """`count` copies with bytes cut off, flipped, doubled or put in."""
    rng = random.Random(seed)
    for _ in range(count):
        at, kind = (
            rng.randrange(len(text)),
            rng.choice(("cut", "flip", "double", "insert")),
        )
        if kind == "cut":
            changed = text[:at]
        elif kind == "flip":
            changed = (
                text[:at] + bytes([text[at] ^ rng.randrange(1, 256)]) + text[at + 1 :]
            )
        elif kind == "double":
            changed = text[: at + 1] + text[at // 2 :]
        else:
            changed = text[:at] + rng.randbytes(rng.randrange(1, 9)) + text[at:]
        yield f"{kind} at byte {at}", changed


def finite_everywhere(document: Any) -> bool:
    """Whether a parsed JSON document holds no NaN and no infinity."""
    if isinstance(document, dict):
        return all(map(finite_everywhere, document.values()))
    if isinstance(document, list):
        return all(map(finite_everywhere, document))
    return not isinstance(document, float) or math.isfinite(document)


def parsed(text: str) -> Any:
    """JSON as other programs read it: NaN and Infinity, which Python would accept, are errors."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} in JSON")

    return json.loads(text, parse_constant=refuse)
