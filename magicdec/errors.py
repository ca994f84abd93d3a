"""The exceptions a user can meet: one line on stderr, exit code 2. Anything else is a bug and shows its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from magicdec.units import printable


class MagicdecError(Exception):
    """Base of the errors that a user can correct. The message, a line, says what was wrong and what would be valid."""

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(" ".join(str(message).split())))


class ConfigError(MagicdecError):
    """An option, a specification or an input file has a value that cannot be used."""


class CapacityError(MagicdecError):
    """The configuration does not fit in memory or in the model's context; the message names the nearest that does."""


class CheckpointError(MagicdecError):
    """A checkpoint directory lacks a file or a tensor, or holds one that does not fit its configuration."""


class ServerError(MagicdecError):
    """A server cannot be reached, or does not answer what it is asked for."""


class StorageError(MagicdecError):
    """A file cannot be read or written. What was recorded before is intact."""


def nearest(value: object, choices: Iterable[str]) -> str | None:
    """The choice most like `value`, or else the first that begins with it."""
    known, text = sorted(choices), str(value).lower()
    close = difflib.get_close_matches(text, known, n=1, cutoff=0.5)
    return next(iter(close or [each for each in known if text and each.startswith(text)]), None)


def unknown_choice(kind: str, value: object, choices: Iterable[str]) -> ConfigError:
    """An error for `value`, which is none of `choices`, naming the closest of them (or all, when few)."""
    known = sorted(choices)
    close = nearest(value, known)
    hint = f"did you mean {close}?" if close else ""
    listing = "" if close and len(known) > 12 else f"known: {', '.join(known)}"
    return ConfigError(f"unknown {kind} '{value}': " + "; ".join(part for part in (hint, listing) if part))
