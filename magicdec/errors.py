"""The exceptions a user can meet: one line on stderr, exit code 2. Anything else is a bug and shows
its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from magicdec.redaction import quoted


class MagicdecError(Exception):
    """Base of the errors that a user can correct. The message, a line, says what was wrong and what
    would be valid.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(quoted(" ".join(str(message).split())))


class ConfigError(MagicdecError):
    """An option, a specification or an input file has a value that cannot be used."""


class CapacityError(MagicdecError):
    """The configuration does not fit in memory or in the model's context; the message names the
    nearest that does.
    """


class CheckpointError(MagicdecError):
    """A checkpoint directory lacks a file or a tensor, or holds one that does not fit its
    configuration.
    """


class ServerError(MagicdecError):
    """A server cannot be reached, or does not answer what it is asked for."""


class StorageError(MagicdecError):
    """A file cannot be read or written. What was recorded before is intact."""


LIKE = 0.62
"""Similarity, from 0 to 1, above which a choice may be what was meant: two of three letters."""
LONGEST_NAME = 64
"""Letters of a name up to which others are compared with it, which takes time by their product."""
MOST_NAMED = 3
LONG_LIST = 12
"""Known choices above this number are not listed next to the nearest."""


def closest(value: object, choices: Iterable[str]) -> list[str]:
    """The choices that `value` may stand for, nearest first: those that begin with it, shortest
    first, or else the one most like it.
    """
    known = sorted(choices)
    text = str(value).lower()
    if len(text) > LONGEST_NAME:
        return []
    if text:
        begun = [choice for choice in known if choice.lower().startswith(text)]
        if begun:
            return sorted(begun, key=len)[:MOST_NAMED]
    like = difflib.get_close_matches(text, known, n=1, cutoff=LIKE)
    first, _, version = text.partition(" ")
    if version and not like:
        return difflib.get_close_matches(first, known, n=1, cutoff=LIKE)
    return like


def nearest(value: object, choices: Iterable[str]) -> str | None:
    """The choice that `value` most likely stands for."""
    return next(iter(closest(value, choices)), None)


def either(names: Sequence[str]) -> str:
    """ "a", "a or b", "a, b or c"."""
    *first, last = names
    if not first:
        return last
    return f"{', '.join(first)} or {last}"


def unknown_choice(
    kind: str,
    value: object,
    choices: Iterable[str],
    *,
    or_else: str = "",
) -> ConfigError:
    """An error for `value`, which is none of `choices`, naming the closest of them (or all, when
    few). `or_else` says what else would do where none is close.
    """
    known = sorted(choices)
    close = closest(value, known)
    hints = []
    if close:
        hints.append(f"did you mean {either(close)}?")
    if len(known) <= LONG_LIST or not (close or or_else):
        hints.append(f"known: {', '.join(known)}")
    if or_else and not close:
        hints.append(or_else)
    return ConfigError(f"unknown {kind} '{value}': " + "; ".join(hints))
