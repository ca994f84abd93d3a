"""Rows of tables that a user points a `validate` command at, as structs; one line for each that
cannot be used. Names of models, engines and number formats as sources write them, and the
catalog's."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, TypeVar, get_args, get_type_hints

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.errors import ConfigError, MagicdecError, unknown_choice
from magicdec.files import read_csv
from magicdec.specs.engine import engine_names
from magicdec.specs.model import ModelSpec

PUBLISHED_DIRECTORY = Path(__file__).resolve().parent / "data" / "published"
LARGEST = 1e12
T = TypeVar("T", bound=msgspec.Struct)
K = TypeVar("K", bound=Hashable)
Count = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
Length = Annotated[float, msgspec.Meta(ge=0, le=LARGEST)]
Size = Annotated[float, msgspec.Meta(ge=1, le=LARGEST)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=LARGEST)]
NEWEST = "9999"
"""The version of a row that states none."""
FORMATS = {
    "fp16": "bf16", "float16": "bf16", "bfloat16": "bf16", "half": "bf16", "auto": "bf16", "16bit": "bf16",
    "float32": "fp32", "awq": "int4", "gptq": "int4", "w4a16": "int4", "awq_int4": "int4", "gptq_int4": "int4",
    "int4_awq": "int4", "int4_gptq": "int4", "awq_marlin": "int4", "gptq_marlin": "int4", "w8a16": "int8",
    "w8a8": "int8", "w8a8_int8": "int8", "w8a8_fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "float8": "fp8",
    "fp8_dynamic": "fp8", "fp8_per_tensor": "fp8", "fp8_blockwise": "fp8_block", "fp4": "nvfp4",
}  # fmt: skip
"""Other names of number formats, and what is priced for them."""


def published(*names: str) -> list[Path]:
    """The tables that ship with the package."""
    return [PUBLISHED_DIRECTORY / name for name in names]


def read_lines(path: str | Path) -> list[dict[str, str]]:
    """The lines of a CSV file by column, and "where" they are. Raises ConfigError for one without,
    or not readable.
    """
    lines = []
    for number, line in enumerate(read_csv(Path(path)), 2):
        lines.append(
            {"where": f"{path}:{number}"} | {key: value.strip() for key, value in line.items()}
        )
    if not lines:
        raise ConfigError(f"{path} holds no rows")
    return lines


def read_rows(
    paths: Sequence[str | Path], kind: type[T], *, one_of: Iterable[str] = ()
) -> tuple[list[T], list[str]]:
    """The rows that can be used, and one line for each that cannot, with its file, line and column.
    A struct's field `where` says where its row stands; its own checks raise ConfigError.

    Raises ConfigError for a file that cannot be read or lacks a column (or all `one_of` some), and
    when no row of any can be used.
    """
    rows: list[T] = []
    refused: list[str] = []
    required = [field.encode_name for field in msgspec.structs.fields(kind) if field.required]
    for path in paths:
        lines = read_lines(path)
        _, *has = lines[0]
        if lacking := sorted(set(required) - set(has)):
            raise ConfigError(
                f"{path} lacks the column(s) {', '.join(lacking)}; it has {', '.join(has)}"
            )
        if one_of and not set(one_of) & set(has):
            raise ConfigError(
                f"{path} lacks the columns {' and '.join(one_of)}: it needs one of them"
            )
        for line in lines:
            try:
                if missing := [column for column in required if not line[column]]:
                    raise ConfigError(f"column '{', '.join(missing)}' is missing or empty")
                rows.append(
                    msgspec.convert(
                        {key: text for key, text in line.items() if text}, kind, strict=False
                    )
                )
            except msgspec.ValidationError as error:
                refused.append(f"{line['where']}: {_explained(str(error), line, kind)}")
            except MagicdecError as error:
                refused.append(f"{line['where']}: {error}")
    if not rows:
        raise ConfigError(refused[0])
    return rows, refused


def _explained(message: str, line: dict[str, str], kind: type[msgspec.Struct]) -> str:
    """A validation error in the words of a table."""
    what, _, place = message.partition(" - at ")
    column = place.strip("`$.")
    if what.startswith("Invalid enum value"):
        name = next(
            field.name for field in msgspec.structs.fields(kind) if field.encode_name == column
        )
        return str(
            unknown_choice(
                column.replace("_", " "), line[column], get_args(get_type_hints(kind)[name])
            )
        )
    expected = re.sub(r"Expected `(\w+)[^`]*`(, got .*)?", r"\1", what)
    expected = expected.replace("int", "a whole number").replace("float", "a number")
    if column:
        return f"column '{column}' must be {expected}, not '{line.get(column, '')}'"
    return what.replace("`", "'")


def by_cause(refused: Sequence[str]) -> list[str]:
    """One line per cause: "first file:line: what is wrong (and n more rows)"."""
    causes = [re.sub(r"^.*?:\d+: ", "", line) for line in refused]
    more = {cause: count - 1 for cause, count in Counter(causes).items()}
    first = dict(zip(reversed(causes), reversed(refused), strict=True))
    rows = {}
    for cause, n in more.items():
        rows[cause] = f" (and {n} more row{'s' if n > 1 else ''})" if n else ""
    return [first[cause] + rows[cause] for cause in more]


def places(keys: Iterable[Iterable[K]]) -> dict[K, list[int]]:
    """The places of the rows that have each key, of those that each row has."""
    found: dict[K, list[int]] = defaultdict(list)
    for index, own in enumerate(keys):
        for key in own:
            found[key].append(index)
    return found


def columns(rows: Sequence[object], *names: str) -> list[Array]:
    """The rows' values of some fields."""
    return [np.array([getattr(row, name) for row in rows], dtype=np.float64) for name in names]


@lru_cache(maxsize=256)
def engine_name(text: str) -> str:
    """The profile that a version's name belongs to ("vllm 0.12.0": vllm). Raises ConfigError,
    naming the nearest.
    """
    word = "".join(text.split()[:1]).lower().replace("tensorrt-llm", "trtllm")
    if word not in engine_names():
        raise unknown_choice("engine", text, engine_names())
    return word


def format_name(text: str) -> str:
    """The number format that is priced for one of this name."""
    return FORMATS.get(text.lower(), text.lower())


def weight_format(model: ModelSpec, text: str) -> str:
    """The format of a checkpoint's weights that a source names roughly: one published in blocks of
    fp8 is served as it is, and four bits of gpt-oss are its own."""
    dtype = format_name(text)
    if dtype == "nvfp4" and model.name.startswith("gpt-oss"):
        return "mxfp4"
    if (
        dtype == "fp8"
        and model.quantization is not None
        and model.quantization.weight_dtype == "fp8_block"
    ):
        return "fp8_block"
    return dtype
