"""Files written in one move, so a crash or a full disk never leaves half a report; documents read with one kind of
error; and rows as CSV."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from magicdec.errors import ConfigError, MagicdecError, StorageError
from magicdec.units import MIB, format_bytes

LIMIT_BYTES = 64 * MIB
"""Size above which no profile, configuration or grid is read."""
RESULTS_LIMIT_BYTES = 1024 * MIB
"""Size above which no result file of another tool is read."""
T = TypeVar("T")


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a temporary file next to `path` and renames it: the old content stays until the new is complete. A link
    stays one: what it points to is written. What is no regular file, such as a terminal, is written to directly.

    Raises:
        StorageError: the directory or the file cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = ""
    try:
        path = path.resolve()
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(21, "is a directory")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = file.name
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        temporary = ""
    except (OSError, RuntimeError) as error:  # the latter of links that go round in a circle
        raise StorageError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def read_text(path: Path, *, limit_bytes: int, error: type[MagicdecError] = StorageError) -> str:
    """The text of a file from elsewhere, unless it is larger than `limit_bytes`. Raises `error` naming the file."""
    try:
        if (size := path.stat().st_size) > limit_bytes:
            raise error(f"{path} has {format_bytes(size)}, more than the {format_bytes(limit_bytes)} that are read")
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as failure:
        raise error(f"cannot read {path}: {failure.strerror or failure}") from failure


def json_documents(text: str) -> list[tuple[int, Any]]:
    """The whole as one JSON document, or one for each line, with the line's number. Raises ValueError naming a line."""
    with contextlib.suppress(ValueError):
        return [(1, json.loads(text))]
    documents = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                documents.append((number, json.loads(line)))
            except ValueError as failure:
                raise ValueError(f"line {number} is not JSON: {failure}") from None
    return documents


def read_toml(path: Path, what: str = "") -> dict[str, Any]:
    """The values of a TOML file, at most `LIMIT_BYTES` large. Raises ConfigError naming the file, and `what` it is."""
    values: dict[str, Any] = _document(path, what, "TOML", tomllib.loads)
    return values


def read_json(path: Path, what: str = "") -> Any:
    """The values of a JSON file, as `read_toml`."""
    return _document(path, what, "JSON", strict_json)


def strict_json(text: str | bytes) -> Any:
    """The values of a JSON text, which has neither NaN nor an infinity. Raises ValueError."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def _document(path: Path, what: str, form: str, decode: Callable[[str], Any]) -> Any:
    try:
        if (size := path.stat().st_size) > LIMIT_BYTES:
            raise ConfigError(f"{path} has {format_bytes(size)}; at most {format_bytes(LIMIT_BYTES)} are read")
        return decode(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise ConfigError(f"cannot read {f'{what} ' * bool(what)}{path}: {failure.strerror or failure}") from failure
    except (ValueError, RecursionError) as failure:
        raise ConfigError(f"{path} is not valid {form}: {failure}") from failure


def converted(document: Any, kind: type[T], *, where: str, strict: bool = True) -> T:
    """A document's values as a struct. Raises ConfigError naming `where` and the key that is wrong."""
    try:
        return msgspec.convert(document, kind, strict=strict)
    except msgspec.ValidationError as error:
        message, _, place = str(error).replace("`", "'").partition(" - at ")
        message = message.replace("Object missing required field", "missing key")
        message = message.replace("Object contains unknown field", "unknown key")
        key = place.strip("'$.")
        raise ConfigError(f"{where}: " + (f"key '{key}': " if key else "") + message) from error


def check_writable(path: Path) -> None:
    """Fails before the work rather than after it. Raises StorageError when `path` cannot be written."""
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
    """Raises StorageError when two of these files, each under its option's name, are one: by whatever link, or where
    only some systems tell their names apart."""
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
                raise StorageError(f"{option} and {seen[identity]} are one file, {path}; give two")


def rows_to_csv(rows: Iterable[Mapping[str, Any]], names: Iterable[str] | None = None) -> str:
    """Rows under `names`, or else the union of their keys in the order they first appear. Lists and mappings are JSON;
    what is None or empty is an empty cell."""
    rows = list(rows)
    names = list(names if names is not None else dict.fromkeys(key for row in rows for key in row))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_cell(row.get(name)) for name in names] for row in rows)
    return out.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, list | dict | tuple):
        return json.dumps(value, separators=(",", ":")) if value else ""
    return "" if value is None else value


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
