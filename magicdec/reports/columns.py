"""Tables of plans, reports and comparisons, as data: named columns with a kind, and rows of plain values,
formatted at the edge. Terminal, HTML, PDF, figures and files print these.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal

from magicdec.files import rows_to_csv
from magicdec.reports.text import (
    GAMMA,
    needed_width,
    percent,
    text_table,
    thousands,
    whole,
)
from magicdec.schema.row import COLUMNS, Candidate
from magicdec.schema.row import column as value_of
from magicdec.units import MILLI, format_bytes, format_number, format_seconds

if TYPE_CHECKING:
    from rich.table import Table as RichTable

UNKNOWN = "–"
PLAIN = str.maketrans({"\u202f": None, "\u2212": "-", "\u2013": "-", "×": "x"})
BREAKS_FIRST = 3
"""Rank below which a column is worth more than names on one line."""
Kind = Literal[
    "text",
    "integer",
    "number",
    "figure",
    "seconds",
    "milliseconds",
    "bytes",
    "percent",
    "signed_percent",
    "ratio",
    "rate",
    "mbu",
]
Value = str | float | int | None


@dataclass(frozen=True)
class Column:
    """A column's name in files, its heading, the kind of its values, and its value for an item; by
    default the item's quantity of that name."""

    name: str
    title: str
    kind: Kind = "text"
    value: Callable[[Any], Value] | None = None
    shown: Callable[[Sequence[Any]], bool] = lambda items: True
    """Whether a table of these items has the column."""
    rank: int = 0
    """Where a terminal has no room, the highest rank goes first; 0 stays."""

    @property
    def is_number(self) -> bool:
        return self.kind != "text"

    def of(self, item: Any) -> Value:
        if self.value is not None:
            return self.value(item)
        value: Value = quantity(item, self.name)
        return value


def quantity(item: Any, name: str) -> Any:
    """A column or a property of a candidate, or a field of another item."""
    if isinstance(item, Candidate) and name in COLUMNS:
        return value_of(item, name)
    return getattr(item, name)


def differs(name: str) -> Callable[[Sequence[Any]], bool]:
    """Whether a quantity tells items apart."""
    return lambda items: len({quantity(item, name) for item in items}) > 1


def is_known(name: str) -> Callable[[Sequence[Any]], bool]:
    """Whether any item has a quantity."""
    return lambda items: any(quantity(item, name) for item in items)


BATCH = Column("batch_size", "Batch", kind="integer")
CONTEXT = Column("context_len", "Context", kind="integer")
BUDGET = Column("draft_budget", "Budget", kind="integer")
GAMMA_COLUMN = Column("gamma", GAMMA, kind="integer")
SPEEDUP = Column("speedup", "Speedup", kind="ratio")


@dataclass(frozen=True)
class Table:
    """Rows are in the order of the columns; None is "not known"."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""

    @classmethod
    def of(
        cls,
        name: str,
        title: str,
        columns: Sequence[Column],
        items: Sequence[Any],
        *,
        note: str = "",
    ) -> Table:
        """A row for each item."""
        shown = tuple(column for column in columns if column.shown(items))
        rows = tuple(tuple(column.of(item) for column in shown) for item in items)
        return cls(name, title, shown, rows, note)

    def without_empty(self, *names: str) -> Table:
        """The table less those of the named columns that hold nothing."""
        empty = set()
        for place, column in enumerate(self.columns):
            if all(row[place] is None for row in self.rows):
                empty.add(column.name)
        return self.without(*empty.intersection(names))

    def without(self, *names: str) -> Table:
        """The table less the named columns."""
        is_shown = [column.name not in names for column in self.columns]
        columns = tuple(compress(self.columns, is_shown))
        rows = tuple(tuple(compress(row, is_shown)) for row in self.rows)
        return replace(self, columns=columns, rows=rows)

    @property
    def cells(self) -> list[list[str]]:
        """Every value as text."""
        return [list(map(format_value, self.columns, row)) for row in self.rows]

    @property
    def records(self) -> list[dict[str, Value]]:
        """Every row by the columns' names."""
        names = [column.name for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]

    def to_markdown(self) -> str:
        head = []
        ruler = []
        for column in self.columns:
            head.append(column.title)
            ruler.append("---:" if column.is_number else "---")
        lines = []
        for cells in (head, ruler, *self.cells):
            escaped = [cell.replace("|", "\\|") for cell in cells]
            line = " | ".join(escaped)
            lines.append(f"| {line} |\n")
        return "".join(lines)

    def to_csv(self) -> str:
        """Plain values in base units under the columns' names."""
        return rows_to_csv(self.records, [c.name for c in self.columns])

    def to_json(self) -> str:
        content = {
            "name": self.name,
            "title": self.title,
            "note": self.note,
            "rows": self.records,
        }
        return json.dumps(content, indent=1) + "\n"


def format_value(column: Column, value: Value) -> str:
    """A cell as text."""
    if value is None:
        return UNKNOWN
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return UNKNOWN
    formats: dict[Kind, Callable[[float], str]] = {
        "text": str,
        "integer": lambda number: thousands(round(number)),
        "number": "{:.2f}".format,
        "figure": format_number,
        "seconds": format_seconds,
        "milliseconds": lambda seconds: format_number(seconds / MILLI),
        "bytes": format_bytes,
        "percent": lambda share: percent(share, 1),
        # a minus sign, which is as wide as a plus and does not break from its number
        "signed_percent": lambda share: f"{100 * share:+.1f}\u202f%".replace(
            "-", "\u2212"
        ),
        "ratio": "{:.2f}×".format,
        "mbu": _mbu,
        "rate": _rate,
    }
    return formats[column.kind](value)


def _mbu(share: float) -> str:
    """A share of the memory's bandwidth, marked where it is low."""
    # a plan has none, and does not wait for the records' schema
    from magicdec.reports.data import WEAK_BASELINE
    from magicdec.schema.record import BASELINE_MBU_FLOOR

    text = percent(share)
    if share < BASELINE_MBU_FLOOR:
        return f"{text} {WEAK_BASELINE}"
    return text


def _rate(per_s: float) -> str:
    if per_s >= 100:
        return whole(per_s)
    return f"{per_s:.3g}"


# On a terminal
# ------------------------------------------------------------


def fitted(
    table: Table, width: int, *, wraps: Container[str] | None = None
) -> RichTable:
    """A table in plain characters. Where it is too wide, columns go by rank; without ranks, those
    that are the same in all rows.

    `wraps`: headings of the columns that may break over lines, though columns from BREAKS_FIRST on
    go before they do; None: all may.
    """
    ranks = {column.rank for column in table.columns} - {0}
    for rank in sorted(ranks, reverse=True):
        breaking: Container[str] | None = ()
        if rank < BREAKS_FIRST:
            breaking = wraps
        if needed_width(*_heads_and_cells(table), wraps=breaking) > width:
            ranked = [column.name for column in table.columns if column.rank == rank]
            table = table.without(*ranked)
    heads, cells = _heads_and_cells(table)
    if not ranks and needed_width(heads, cells) > width:
        same = []
        for column, *texts in zip(table.columns, *cells, strict=True):
            if len(set(texts)) <= 1:
                same.append(column.name)
        heads, cells = _heads_and_cells(table.without(*same))
    return text_table(heads, cells, wraps=wraps)


def _heads_and_cells(table: Table) -> tuple[list[str], list[list[str]]]:
    cells = []
    for row in table.rows:
        cells.append(list(map(_plain, table.columns, row)))
    return [column.title for column in table.columns], cells


def _plain(column: Column, value: Value) -> str:
    if isinstance(value, str):
        return value
    return format_value(column, value).translate(PLAIN)
