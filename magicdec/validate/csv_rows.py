"""Rows of tables that a user points a `validate` command at, as structs; one line for each that cannot be used."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar, get_args, get_type_hints

import msgspec

from magicdec.errors import ConfigError, MagicdecError, unknown_choice
from magicdec.files import read_csv

PUBLISHED_DIRECTORY = Path(__file__).resolve().parent / "data" / "published"
LARGEST = 1e12
T = TypeVar("T", bound=msgspec.Struct)
Count = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
Length = Annotated[float, msgspec.Meta(ge=0, le=LARGEST)]
Size = Annotated[float, msgspec.Meta(ge=1, le=LARGEST)]


def read_lines(path: str | Path) -> list[dict[str, str]]:
    """The lines of a CSV file by column, and "where" they are; one whose name ends in .gz is compressed.

    Raises ConfigError when it cannot be read or holds no row.
    """
    lines = [
        {"where": f"{path}:{number}"} | {key: value.strip() for key, value in line.items()}
        for number, line in enumerate(read_csv(Path(path)), 2)
    ]
    if not lines:
        raise ConfigError(f"{path} holds no rows")
    return lines


def read_rows(paths: Sequence[str | Path], kind: type[T], *, one_of: Iterable[str] = ()) -> tuple[list[T], list[str]]:
    """The rows that can be used, and one line for each that cannot, with its file, line and column. A struct's field
    `where` says where its row stands; its own checks raise ConfigError.

    Raises ConfigError for a file that cannot be read or lacks a column (or all `one_of` some), and when no row of any
    can be used.
    """
    rows: list[T] = []
    refused: list[str] = []
    for path in paths:
        lines = read_lines(path)
        required = [field.encode_name for field in msgspec.structs.fields(kind) if field.required]
        _check_columns(path, list(lines[0])[1:], required, list(one_of))
        for line in lines:
            try:
                if missing := [column for column in required if not line[column]]:
                    raise ConfigError(f"column '{', '.join(missing)}' is missing or empty")
                rows.append(msgspec.convert({key: text for key, text in line.items() if text}, kind, strict=False))
            except msgspec.ValidationError as error:
                refused.append(f"{line['where']}: {_explained(str(error), line, kind)}")
            except MagicdecError as error:
                refused.append(f"{line['where']}: {error}")
    if not rows:
        raise ConfigError(refused[0])
    return rows, refused


def _check_columns(path: str | Path, has: list[str], required: list[str], one_of: list[str]) -> None:
    if lacking := sorted(set(required) - set(has)):
        raise ConfigError(f"{path} lacks the column(s) {', '.join(lacking)}; it has {', '.join(has)}")
    if one_of and not set(one_of) & set(has):
        raise ConfigError(f"{path} lacks the columns {' and '.join(one_of)}: it needs one of them")


def _explained(message: str, line: dict[str, str], kind: type[msgspec.Struct]) -> str:
    """A validation error in the words of a table."""
    what, _, place = message.partition(" - at ")
    column = place.strip("`$.")
    if what.startswith("Invalid enum value"):
        name = next(field.name for field in msgspec.structs.fields(kind) if field.encode_name == column)
        return str(unknown_choice(column.replace("_", " "), line[column], get_args(get_type_hints(kind)[name])))
    expected = re.sub(r"Expected `(\w+)[^`]*`(, got .*)?", r"\1", what)
    expected = expected.replace("int", "a whole number").replace("float", "a number")
    return f"column '{column}' must be {expected}, not '{line.get(column, '')}'" if column else what.replace("`", "'")


def by_cause(refused: Sequence[str]) -> list[str]:
    """One line per cause: "first file:line: what is wrong (and n more rows)"."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for line in refused:
        cause = re.sub(r"^.*?:\d+: ", "", line)
        first.setdefault(cause, line)
        counts[cause] += 1
    more = {cause: count - 1 for cause, count in counts.items()}
    rows = {cause: f" (and {n} more row{'s' if n > 1 else ''})" if n else "" for cause, n in more.items()}
    return [line + rows[cause] for cause, line in first.items()]


def published(*names: str) -> list[Path]:
    """The tables that ship with the package."""
    return [PUBLISHED_DIRECTORY / name for name in names]
