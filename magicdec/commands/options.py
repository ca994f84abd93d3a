"""What several commands' options share: lists of numbers, and printing."""

from __future__ import annotations

import sys
from enum import StrEnum

from rich.console import Console

from magicdec.errors import ConfigError
from magicdec.units import parse_count

MAX_VALUES = 10_000
"""Of one option: a longer range is a slip of the keyboard."""


class OutputFormat(StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def parse_ints(text: str, option: str) -> list[int]:
    """ "1,2,4-6,32k" -> [1, 2, 4, 5, 6, 32768]; k is 1024, m its square. Raises ConfigError naming the option."""
    values: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            low = parse_count(first)
            high = parse_count(last) if dash else low
        except ValueError:
            raise ConfigError(f"{option} must be numbers like 4, 32k or 1,2,4-6, not '{text}'") from None
        if len(values) + high - low >= MAX_VALUES:
            raise ConfigError(f"{option} {part.strip()} names more than {MAX_VALUES} numbers; give fewer")
        values += range(low, high + 1)
    if not values:
        raise ConfigError(f"{option} '{text}' names no number")
    return values


def parse_floats(text: str, option: str) -> list[float]:
    """ "0.9,0.85" -> [0.9, 0.85]. Raises ConfigError naming the option."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} must be numbers like 0.8 or 0.9,0.85, not '{text}'") from None


def parse_rates(text: str | None) -> float | tuple[float, ...] | None:
    """ "0.8" -> 0.8, "0.8,0.7" -> by position. Raises ConfigError naming the option."""
    if text is None:
        return None
    rates = parse_floats(text, "--acceptance-rate")
    return rates[0] if len(rates) == 1 else tuple(rates)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


PIPED_WIDTH = 80


def table_console() -> Console:
    """A console for tables: as wide as the terminal, plain text and 80 columns when piped."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def console() -> Console:
    """A console for stdout: at most 100 columns, plain text when piped."""
    plain = Console(highlight=False)
    return Console(highlight=False, width=min(plain.width, 100) if sys.stdout.isatty() else 100)
