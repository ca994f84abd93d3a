"""Rows of a plan's document, packed: a plan of several devices holds thousands, which differ in few of
their quantities.

    {"same": {"hardware": "h100-sxm-80gb", "draft": "suffix", ...},
     "each": {"gamma": [1, 2, 3], "speedup": [1.1, 1.3, 1.4],
              "batch_size": {"values": [1, 16], "places": [0, 0, 1]}, ...}}

`rows` of a document is a list of such groups, one per device, context and draft. Wherever the plan
lists rows, its document has their numbers, counted through all groups. Quantities have the names of
`PLACES`, those of the CSV; one that a row lacks is left out, or null.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from magicdec.errors import ConfigError
from magicdec.schema.row import PATHS, PLACES, nested

DIGITS = 5
"""Significant digits of the quantities of packed rows, whose errors are percents: with all 17 they
would take twice as long. What stands outside of `rows`, the chosen row among it, has all its digits."""
OF_CASE = ("best_by_batch", "pareto", "layouts")
OF_CHOICE = (
    "row",
    "without_draft",
    "best_without_draft",
    "left_out",
    "left_out_fits",
)
OF_PLAN = ("autoregressive_rows", "candidates")
LINE_LENGTH = 200
GROUPED_BY = ("hardware", "context_len", "draft", "draft_method")

Document = dict[str, Any]


def packed(plan: Document) -> Document:
    """A plan's document, of its values with every row in full."""
    document = dict(plan)
    for case in (document, *document["other_cases"]):
        for name, part in case["choice"].items():
            if name in OF_CHOICE and part is not None:
                case["choice"][name] = nested(_flat(part))
    lists = [(document, name) for name in OF_PLAN]
    for case in (document, *document["other_cases"]):
        lists += [(case, name) for name in OF_CASE]
    table = _DistinctRows()
    keys = [[table.add(row) for row in holder[name]] for holder, name in lists]
    numbers = table.numbers()
    for (holder, name), of_list in zip(lists, keys, strict=True):
        holder[name] = [numbers[key] for key in of_list]
    document["rows"] = table.groups()
    return document


def unpacked(document: Document, *, where: str) -> Document:
    """The values of a plan from its document. Raises ConfigError where rows are damaged."""
    plan = dict(document)
    try:
        rows = [row for group in plan.pop("rows") for row in _rows_of(group)]
        cases = [dict(case) for case in plan["other_cases"]]
        plan["other_cases"] = cases
        for name in OF_PLAN:
            plan[name] = _numbered(rows, plan[name])
        for case in (plan, *cases):
            for name in OF_CASE:
                case[name] = _numbered(rows, case.get(name, []))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where} is not a whole plan: its rows are damaged"
        ) from error
    return plan


def _numbered(rows: Sequence[Document], numbers: Iterable[int]) -> list[Document]:
    chosen = []
    for number in numbers:
        if number < 0:
            raise IndexError(number)
        chosen.append(rows[number])
    return chosen


class _DistinctRows:
    """Distinct rows by group, in the order in which they came."""

    def __init__(self) -> None:
        self._groups: dict[bytes, dict[bytes, Document]] = {}

    def add(self, row: Document) -> bytes:
        """The row's key, by which `numbers` has its number."""
        quantities = _rounded(_flat(row))
        key = _key(quantities)
        group = _key([quantities.get(name) for name in GROUPED_BY])
        self._groups.setdefault(group, {}).setdefault(key, quantities)
        return key

    def numbers(self) -> dict[bytes, int]:
        """The number of each row, by its key."""
        keys = [key for group in self._groups.values() for key in group]
        return {key: number for number, key in enumerate(keys)}

    def groups(self) -> list[Document]:
        return [_group(list(group.values())) for group in self._groups.values()]


def _key(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _flat(row: Document) -> Document:
    """A row's quantities by name, those without a value left out."""
    quantities = {}
    for name, path in PATHS.items():
        value: Any = row
        for part in path:
            value = value.get(part)
            if value is None:
                break
        else:
            quantities[name] = value
    return quantities


def _group(rows: Sequence[Document]) -> Document:
    same: Document = {}
    each: Document = {}
    for name in PLACES:
        values = [row.get(name) for row in rows]
        if all(value == values[0] for value in values):
            if values[0] is not None:
                same[name] = values[0]
        else:
            each[name] = _column(values)
    return {"same": same, "each": each}


def _column(values: Sequence[Any]) -> Any:
    """The values, or where that is shorter the distinct ones and where each stands."""
    keys = [_key(value) for value in values]
    places = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    distinct = {
        "values": [msgspec.json.decode(key) for key in places],
        "places": [places[key] for key in keys],
    }
    if len(_key(distinct)) < len(_key(values)):
        return distinct
    return list(values)


def _rows_of(group: Document) -> Iterator[Document]:
    columns = {}
    for name, column in group["each"].items():
        columns[name] = column
        if isinstance(column, dict):
            columns[name] = [column["values"][place] for place in column["places"]]
    if not columns:  # a single row
        yield nested(group["same"])
    for row in zip(*columns.values(), strict=True):
        yield nested(group["same"] | dict(zip(columns, row, strict=True)))


def _rounded(value: Any) -> Any:
    """Plain data with numbers of DIGITS significant digits, whole ones without a fraction."""
    if isinstance(value, float):
        return _short(value)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


@lru_cache(maxsize=2**16)
def _short(value: float) -> float | int:
    """The number in DIGITS digits; rows share many."""
    number = float(f"{value:.{DIGITS}g}")
    return int(number) if number.is_integer() else number


def written(value: Any, indent: str = "") -> str:
    """JSON of a line per key, and per object in a list; what is short, or a list of plain values,
    stays on one line.
    """
    line = _key(value).decode()
    deeper = indent + " "
    if len(line) <= LINE_LENGTH:
        return line
    if isinstance(value, dict):
        lines = []
        for name, item in value.items():
            lines.append(f"{deeper}{_key(name).decode()}: {written(item, deeper)}")
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        lines = [deeper + written(item, deeper) for item in value]
        return "[\n" + ",\n".join(lines) + f"\n{indent}]"
    return line
