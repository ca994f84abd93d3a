"""Reads the tables that a user gives to a `validate` command: rows as structs, and one line for
each unusable row. Translates names of models, engines and number formats from the source's spelling
to the catalog's."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, TypeVar, get_args, get_type_hints

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.errors import ConfigError, MagicdecError, unknown_choice
from magicdec.files import read_csv
from magicdec.specs.engine import engine_names
from magicdec.specs.formats import format_name
from magicdec.specs.model import ModelSpec
from magicdec.units import format_count

PUBLISHED_DIRECTORY = Path(__file__).resolve().parent / "data" / "published"
LARGEST_FIGURE = 1e12
T = TypeVar("T", bound=msgspec.Struct)
K = TypeVar("K", bound=Hashable)
Line = dict[str, str]
"""A line's cells by column, its place under "where" among them."""
Count = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
Length = Annotated[float, msgspec.Meta(ge=0, le=LARGEST_FIGURE)]
Size = Annotated[float, msgspec.Meta(ge=1, le=LARGEST_FIGURE)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=LARGEST_FIGURE)]
NEWEST = "9999"
"""The version of a row that states none."""


def published(*names: str) -> list[Path]:
    """The tables that ship with the package."""
    return [PUBLISHED_DIRECTORY / name for name in names]


def read_lines(path: str | Path) -> list[Line]:
    """The lines of a CSV file by column, each with its place under "where".

    Raises ConfigError for a file without lines or one that cannot be read.
    """
    lines = []
    for number, line in enumerate(read_csv(Path(path)), 2):
        cells = {"where": f"{path}:{number}"}
        for column, text in line.items():
            cells[column] = text.strip()
        lines.append(cells)
    if not lines:
        raise ConfigError(f"{path} holds no rows")
    return lines


def read_rows(
    paths: Sequence[str | Path],
    kind: type[T],
    *,
    one_of: Iterable[str] = (),
    fill: Callable[[list[Line]], None] | None = None,
) -> tuple[list[T], list[str]]:
    """The usable rows, and one line with file, line and column for each unusable row.

    The struct's field `where` holds the row's place. Its own checks raise ConfigError. `fill` puts
    values that follow from other rows into the cells of all files before they are read.

    Raises ConfigError for a file that cannot be read or lacks a column (or all of `one_of`), and
    when no file has a usable row.
    """
    rows: list[T] = []
    refused: list[str] = []
    required = _required(kind)
    lines = []
    for path in paths:
        of_file = read_lines(path)
        _check_columns(path, of_file[0], required, one_of)
        lines += of_file
    if fill is not None:
        fill(lines)
    for line in lines:
        try:
            rows.append(row_of(line, kind))
        except MagicdecError as error:
            refused.append(f"{line['where']}: {error}")
    if not rows:
        raise ConfigError(refused[0])
    return rows, refused


def _check_columns(
    path: str | Path,
    line: Line,
    required: Sequence[str],
    one_of: Iterable[str],
) -> None:
    _, *columns = line  # the first is "where"
    lacking = sorted(set(required) - set(columns))
    if lacking:
        raise ConfigError(
            f"{path} lacks the column(s) {', '.join(lacking)}; it has {', '.join(columns)}"
        )
    if one_of and not set(one_of) & set(columns):
        raise ConfigError(
            f"{path} lacks the columns {' and '.join(one_of)}: it needs one of them"
        )


def row_of(line: Line, kind: type[T]) -> T:
    """The row of a line. Raises ConfigError for a cell that is missing or not what it must be."""
    missing = [column for column in _required(kind) if not line[column]]
    if missing:
        names = ", ".join(missing)
        raise ConfigError(f"column '{names}' is missing or empty")
    # "auto" leaves a format to the engine, as an empty cell does
    filled = {column: text for column, text in line.items() if text not in ("", "auto")}
    try:
        return msgspec.convert(filled, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_explained(str(error), line, kind)) from None


@lru_cache(maxsize=16)
def _required(kind: type[msgspec.Struct]) -> list[str]:
    return [
        field.encode_name for field in msgspec.structs.fields(kind) if field.required
    ]


def _explained(message: str, line: Line, kind: type[msgspec.Struct]) -> str:
    """A validation error in a table's words."""
    what, _, place = message.partition(" - at ")
    column = place.strip("`$.")
    if what.startswith("Invalid enum value"):
        words = column.replace("_", " ")
        choices = _choices_of(column, kind)
        return str(unknown_choice(words, line[column], choices))
    if not column:
        return what.replace("`", "'")
    expected = re.sub(r"Expected `(\w+)[^`]*`(, got .*)?", r"\1", what)
    expected = expected.replace("int", "a whole number").replace("float", "a number")
    stated = line.get(column, "")
    return f"column '{column}' must be {expected}, not '{stated}'"


def _choices_of(column: str, kind: type[msgspec.Struct]) -> tuple[str, ...]:
    for field in msgspec.structs.fields(kind):
        if field.encode_name == column:
            return get_args(get_type_hints(kind)[field.name])
    raise AssertionError(f"{kind.__name__} has no column {column}")


def by_cause(refused: Sequence[str]) -> list[str]:
    """One line per cause: "first file:line: what is wrong (and n more rows)"."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for line in refused:
        cause = re.sub(r"^.*?:\d+: ", "", line)
        first.setdefault(cause, line)
        counts[cause] += 1
    lines = []
    for cause, line in first.items():
        others = counts[cause] - 1
        more = f" (and {format_count(others, 'more row')})" if others else ""
        lines.append(f"{line}{more}")
    return lines


def places(keys: Iterable[Iterable[K]]) -> dict[K, list[int]]:
    """The places of the rows by key. A row may have several keys."""
    import pandas as pd

    keys_of_rows = pd.Series(list(map(list, keys)), dtype=object)
    key = keys_of_rows.explode().dropna()
    by_key = {}
    for name, rows in key.groupby(key, sort=False):
        by_key[name] = list(rows.index)
    return by_key


def columns(rows: Sequence[object], *names: str) -> list[Array]:
    """One array per named field, over the rows."""
    arrays = []
    for name in names:
        values = [getattr(row, name) for row in rows]
        arrays.append(np.array(values, dtype=np.float64))
    return arrays


@lru_cache(maxsize=256)
def engine_name(text: str) -> str:
    """The profile of a named version ("vllm 0.12.0": vllm). Raises ConfigError, which suggests the
    nearest name."""
    name, _, _ = text.strip().partition(" ")
    name = name.lower().replace("tensorrt-llm", "trtllm")
    if name not in engine_names():
        raise unknown_choice("engine", text, engine_names())
    return name


def weight_format(model: ModelSpec, text: str) -> str:
    """The exact format of weights that a source names roughly. A checkpoint published in fp8 blocks
    is served in them, and gpt-oss in four bits means its own mxfp4."""
    dtype = format_name(text)
    if dtype == "nvfp4" and model.name.startswith("gpt-oss"):
        return "mxfp4"
    published_in = None
    if model.quantization is not None:
        published_in = model.quantization.weight_dtype
    if dtype == "fp8" and published_in == "fp8_block":
        return "fp8_block"
    return dtype
