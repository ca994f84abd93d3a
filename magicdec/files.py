"""Files written in one move, so a crash or a full disk never leaves half a report; files of users
read within bounds of size, depth and encoding, with one kind of error; and rows as CSV."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import math
import os
import re
import stat
import tempfile
import tomllib
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from magicdec.errors import ConfigError, MagicdecError, StorageError
from magicdec.units import MIB, MOST_BITS, format_bytes

PROFILE_LIMIT_BYTES = 64 * MIB
"""Size above which no profile, configuration or grid is read."""
RESULTS_LIMIT_BYTES = 1024 * MIB
"""Size above which no records and no result file of another tool are read."""
MAX_DEPTH = 100
TOO_LARGE = f"it has a whole number of more than {MOST_BITS} bits"
TOO_DEEP = f"it nests more than {MAX_DEPTH} deep"
LONG_KEY = re.compile(
    r"""(?:\.\s*(?:[\w-]+|"[^"\n]*"|'[^'\n]*')\s*)""" + f"{{{MAX_DEPTH}}}"
)
T = TypeVar("T")


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a temporary file next to `path` and renames it: the old content stays until the new is
    complete. A link stays one: what it points to is written. What is no regular file, such as a
    terminal, is written to directly.

    Raises:
        StorageError: the directory or the file cannot be written.
    """
    if isinstance(content, str):
        data = content.encode()
    else:
        data = content
    temporary = ""
    try:
        path = path.resolve()
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(21, "is a directory")
        with tempfile.NamedTemporaryFile(
            dir=path.parent,
            prefix=f".{path.name}.",
            delete=False,
        ) as file:
            temporary = file.name
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.umask(mask := os.umask(0))
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
        temporary = ""
    except (
        OSError,
        RuntimeError,
    ) as error:  # the latter of links that go round in a circle
        raise StorageError(
            f"cannot write {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    finally:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def read_bytes(
    path: Path,
    what: str = "",
    *,
    limit_bytes: int = PROFILE_LIMIT_BYTES,
    error: type[MagicdecError] = ConfigError,
) -> bytes:
    """The content of any file that a user names, unless it is larger than `limit_bytes`; of a pipe,
    if something writes to it.

    Raises `error` naming the file, and `what` it is.
    """
    named = f"{what} {path}".strip()
    try:
        with open(
            path,
            "rb",
            opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK),
        ) as file:
            # None of a pipe that is still empty, no byte of one without a writer
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_size > limit_bytes:
                raise error(
                    f"{named} has more than the {format_bytes(limit_bytes)} that are read"
                )
            begun = file.raw.read(1)
            if begun == b"" and stat.S_ISFIFO(status.st_mode):
                raise error(f"{named} is a pipe that nothing writes to")
            os.set_blocking(file.fileno(), True)
            data = begun or b""
            if stat.S_ISREG(
                status.st_mode
            ):  # read at once: two parts take twice the room
                file.seek(0)
                data = file.read(limit_bytes + 1)
            elif begun != b"":
                data += file.read(limit_bytes)
    except (
        OSError,
        ValueError,
    ) as failure:  # the latter of names that no file can have
        raise error(
            f"cannot read {named}: {getattr(failure, 'strerror', None) or failure}"
        ) from failure
    if len(data) > limit_bytes:
        raise error(
            f"{named} has more than the {format_bytes(limit_bytes)} that are read"
        )
    return data


def read_text(
    path: Path,
    what: str = "",
    *,
    limit_bytes: int = PROFILE_LIMIT_BYTES,
    error: type[MagicdecError] = ConfigError,
) -> str:
    """The UTF-8 text of a file, as `read_bytes`."""
    try:
        return read_bytes(path, what, limit_bytes=limit_bytes, error=error).decode(
            "utf-8-sig"
        )
    except UnicodeDecodeError as failure:
        raise error(
            f"{path} is not UTF-8 text: {failure.reason} at byte {failure.start}"
        ) from failure


def read_csv(path: Path, what: str = "") -> list[dict[str, str]]:
    """The rows of a CSV file under its header; one whose name ends in .gz is compressed.

    Raises ConfigError.
    """
    try:
        data = read_bytes(path, what)
        if path.suffix == ".gz":
            text = gzip.GzipFile(fileobj=io.BytesIO(data)).read(PROFILE_LIMIT_BYTES)
        else:
            text = data
        rows = list(csv.DictReader(text.decode("utf-8-sig").splitlines()))
    except (OSError, EOFError, zlib.error) as failure:
        raise ConfigError(f"cannot read {path}: {failure}") from failure
    except (ValueError, csv.Error) as failure:
        raise ConfigError(f"{path} is not a UTF-8 text table: {failure}") from failure
    for number, row in enumerate(rows, 2):
        if any(row.get(None, [])):  # where csv keeps surplus cells
            raise ConfigError(
                f"{path}:{number} has more cells than the header has columns"
            )
    return [
        {
            name.strip(): cell or ""
            for name, cell in row.items()
            if isinstance(name, str)
        }
        for row in rows
    ]


def read_toml(path: Path, what: str = "") -> dict[str, Any]:
    """The values of a TOML file. Raises ConfigError naming the file, and `what` it is."""

    def loads(text: str) -> dict[str, Any]:
        if LONG_KEY.search(
            text
        ):  # tomllib's time grows with the square of a key's parts
            raise ValueError(TOO_DEEP)
        return tomllib.loads(text)

    return dict(_document(path, what, "TOML", loads, ConfigError))


def read_json(
    path: Path,
    what: str = "",
    *,
    decode: Callable[[str], Any] | None = None,
    error: type[MagicdecError] = ConfigError,
) -> Any:
    """The values of a JSON file, as `read_toml`. By default it has neither NaN nor an infinity."""
    return _document(path, what, "JSON", decode or strict_json, error)


def strict_json(text: str | bytes) -> Any:
    """The values of a JSON text, which has neither NaN nor an infinity. Raises ValueError."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    def finite(digits: str) -> float:
        if math.isfinite(value := float(digits)):
            return value
        return refuse(digits)

    return json.loads(text, parse_constant=refuse, parse_float=finite)


def _document(
    path: Path,
    what: str,
    form: str,
    decode: Callable[[str], Any],
    error: type[MagicdecError],
) -> Any:
    try:
        return bounded(decode, read_text(path, what, error=error))
    except ValueError as failure:
        raise error(f"{path} is not valid {form}: {failure}") from failure


def bounded(decode: Callable[[Any], Any], text: Any) -> Any:
    """A decoded document that nests at most `MAX_DEPTH` deep: whatever reads it may recurse. Raises
    ValueError.
    """
    try:
        document = decode(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    children: list[Any] = [document]
    for _ in range(MAX_DEPTH + 2):
        for child in children:
            if isinstance(child, int) and child.bit_length() > MOST_BITS:
                raise ValueError(TOO_LARGE)
        parents = [child for child in children if isinstance(child, dict | list)]
        if not parents:
            return document
        children = []
        for parent in parents:
            children += parent.values() if isinstance(parent, dict) else parent
    raise ValueError(TOO_DEEP)


def decode_json(data: bytes | str, kind: Any = Any) -> Any:
    """A JSON document as a struct. Raises msgspec.DecodeError for what is not JSON, does not fit or
    nests too deep.
    """
    try:
        if kind is not Any:
            return msgspec.json.decode(data, type=kind)
        return bounded(msgspec.json.decode, data)
    except msgspec.DecodeError:
        raise
    except UnicodeDecodeError as failure:
        raise msgspec.DecodeError(f"not UTF-8 text: {failure.reason}") from failure
    except (ValueError, RecursionError) as failure:
        raise msgspec.DecodeError(TOO_DEEP) from failure


def json_documents(text: str) -> list[tuple[int, Any]]:
    """The whole as one JSON document, or one for each line, with the line's number. Raises
    ValueError naming a line.
    """
    with contextlib.suppress(ValueError):
        return [(1, bounded(json.loads, text))]
    documents = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                documents.append((number, bounded(json.loads, line)))
            except ValueError as failure:
                raise ValueError(f"line {number} is not JSON: {failure}") from None
    return documents


def converted(document: Any, kind: type[T], *, where: str, strict: bool = True) -> T:
    """A document's values as a struct. Raises ConfigError naming `where` and the wrong key."""
    try:
        return msgspec.convert(document, kind, strict=strict)
    except msgspec.ValidationError as error:
        message, _, place = str(error).replace("`", "'").partition(" - at ")
        message = message.replace("Object missing required field", "missing key")
        message = message.replace("Object contains unknown field", "unknown key")
        key = place.strip("'$.")
        place = ""
        if key:
            place = f"key '{key}': "
        raise ConfigError(f"{where}: " + place + message) from error


def check_writable(path: Path) -> None:
    """Fails before the work rather than after it. Raises StorageError when `path` cannot be
    written.
    """
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    if path.is_dir():
        raise StorageError(f"cannot write {path}: it is a directory")
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise StorageError(f"cannot write {path}: {parent} is not a writable directory")
    if path.exists() and not os.access(path, os.W_OK):
        raise StorageError(f"cannot write {path}: it is read-only")


def check_apart(files: Mapping[str, Path | None]) -> None:
    """Raises StorageError when two of these files, each under its option's name, are one: by
    whatever link, or where only some systems tell their names apart."""
    seen: dict[object, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        identities: list[object] = [str(path.resolve()).casefold()]
        if path.is_file():
            status = path.stat()
            identities.append((status.st_dev, status.st_ino))
        for identity in identities:
            if seen.setdefault(identity, option) != option:
                raise StorageError(
                    f"{option} and {seen[identity]} are one file, {path}; give two"
                )


def rows_to_csv(
    rows: Iterable[Mapping[str, Any]], names: Iterable[str] | None = None
) -> str:
    """Rows under `names`, or else the union of their keys in the order they first appear. Lists and
    mappings are JSON; what is None or empty is an empty cell."""

    def cell(value: object) -> object:
        if isinstance(value, list | dict | tuple):
            if value:
                return json.dumps(value, separators=(",", ":"))
            return ""
        if value is None:
            return ""
        return value

    rows = list(rows)
    names = list(
        names
        if names is not None
        else dict.fromkeys(key for row in rows for key in row)
    )
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        [names, *([cell(row.get(name)) for name in names] for row in rows)]
    )
    return out.getvalue()
