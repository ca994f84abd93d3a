"""Rows of a table that a user points a `validate` command at, with errors that name file, line and column."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from magicdec.errors import ConfigError

PUBLISHED_DIRECTORY = Path(__file__).resolve().parent / "data" / "published"


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    values: dict[str, str]
    where: str

    def has(self, column: str) -> bool:
        return bool(self.values.get(column, "").strip())

    def text(self, column: str, default: str | None = None) -> str:
        if self.has(column):
            return self.values[column].strip()
        if default is None:
            raise ConfigError(f"{self.where}: column '{column}' is missing or empty")
        return default

    def number(self, column: str, *, low: float, high: float = 1e12) -> float:
        """A finite number between `low` and `high`; ConfigError names the line and the column."""
        text = self.text(column)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise ConfigError(f"{self.where}: column '{column}' must be between {low:g} and {high:g}, not '{text}'")
        return value

    def integer(self, column: str, *, low: int, high: int = 10**9) -> int:
        value = self.number(column, low=low, high=high)
        if value != int(value):
            raise ConfigError(f"{self.where}: column '{column}' must be a whole number, not '{self.text(column)}'")
        return int(value)


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a CSV file with a header; one whose name ends in .gz is compressed.

    Raises ConfigError when it cannot be read or holds no row.
    """
    try:
        content = Path(path).read_bytes()
        text = (gzip.decompress(content) if Path(path).suffix == ".gz" else content).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a UTF-8 text table") from error
    reader = csv.DictReader(text.splitlines())
    rows = []
    for number, line in enumerate(reader, 2):
        values = {key.strip(): value or "" for key, value in line.items() if isinstance(key, str)}
        rows.append(Row(values, f"{path}:{number}"))
    if not rows:
        raise ConfigError(f"{path} holds no rows")
    return rows


def require_columns(path: str | Path, rows: Sequence[Row], columns: Iterable[str]) -> None:
    """Raises ConfigError naming the columns that a table lacks."""
    lacking = sorted(set(columns) - set(rows[0].values))
    if lacking:
        raise ConfigError(f"{path} lacks the column(s) {', '.join(lacking)}; it has {', '.join(rows[0].values)}")


def published(*names: str) -> list[Path]:
    """The tables that ship with the package."""
    return [PUBLISHED_DIRECTORY / name for name in names]
