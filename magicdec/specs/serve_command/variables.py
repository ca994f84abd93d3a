"""Variables of a script, shell's or Python's: the values that it plainly sets, and why others are not
known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from magicdec.errors import ConfigError
from magicdec.specs.serve_command.start import MARKED, Given

MOST_VALUE = 200_000
MOST_VALUES = 5_000_000
"""Characters of all values that are set or put in."""


class Variables:
    """Variables at one place of a script."""

    def __init__(
        self,
        given: Given,
        values: Mapping[str, Any] | None = None,
        outside: Mapping[str, str] | None = None,
    ) -> None:
        self.given = given
        self.values: dict[str, Any] = dict(values or {})
        self.outside = dict(outside or {})
        """Why names that are set outside the script are not known."""
        self.open: dict[str, str] = {}
        """Why names that the script itself sets are not known."""
        self.several: set[str] = set()
        """Names that were plainly set to more than one value."""
        self.sizes: dict[str, int] = {}
        """Characters of values; lists of lists can stand for billions."""
        self.characters = 0

    def set(self, name: str, value: Any) -> None:
        """Sets a name. Raises ConfigError beyond the bounds."""
        size = len(str(value))
        if size > MOST_VALUE:
            raise ConfigError(f"{name[:40]} has more than {MOST_VALUE} characters")
        self._count(size)
        if name in self.values and self.values[name] != value:
            self.several.add(name)
        self.values[name] = value
        self.sizes[name] = size

    def leave_open(self, name: str, why: str) -> None:
        self.open.setdefault(name, why)

    def leave_computed(self, name: str, value: Any) -> None:
        """Leaves a name open whose value only a run computes, since --set can give the name."""
        if isinstance(value, str) and MARKED.fullmatch(value):
            _, why = self.given.reasons[self.given.open_in(value)[0]]
            if why.startswith("is computed"):
                self.leave_open(name, why)

    def __contains__(self, name: str) -> bool:
        places = (self.given.values, self.open, self.values, self.outside)
        return any(name in names for names in places)

    def find(self, name: str) -> Any:
        """The value of a name that the script or the user sets, or the mark of one that is open."""
        if name in self.given.values:
            return self.given.values[name]
        if name in self.open:
            return self.given.left_open(f"${name}", self.open[name])
        if name in self.values:
            value = self.values[name]
            if name not in self.sizes:
                self.sizes[name] = len(str(value))
            self._count(self.sizes[name])
            return value
        return self.given.left_open(f"${name}", self.outside[name])

    def _count(self, characters: int) -> None:
        self.characters += characters + 1
        if self.characters > MOST_VALUES:
            raise ConfigError(
                f"the script's values have more than {MOST_VALUES} characters"
            )
