"""Files of logged requests, in shards that are read as a stream: JSON lines, JSON, .gz and
Parquet."""

from __future__ import annotations

import glob
import gzip
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from magicdec.errors import ConfigError
from magicdec.files import RESULTS_LIMIT_BYTES
from magicdec.logs.formats import Companions, UnreadableError, as_document, companion_of
from magicdec.units import MIB, format_bytes

SHARD_BYTES = 64 * MIB
"""Part of a file that one process replays: small enough for several to end about together."""
LINE_SUFFIXES = (".jsonl", ".ndjson")
LINE_LIMIT_BYTES = 256 * MIB
"""Size above which a line is no request."""
COMPRESSED_LIMIT_BYTES = 16 * MIB
MOST_COMPRESSED = 50
"""A line or a document may have so many bytes, and so many times those of its compressed file: what
JSON of a few kilobytes can unfold to would fill any memory."""
EXPANDED_LIMIT_BYTES = 1024 * MIB
MOST_EXPANDED = 200
"""All lines of a compressed file may have so many bytes, and so many times those of the file: a megabyte can
unfold to a gigabyte for each that it has, and to hours."""
PARQUET_ROWS = 256
"""Rows of a table that are in memory at once."""
COMPANION_LIMIT = 1_000_000
"""Prompts that are kept for outputs in other files."""
Kind = Literal["lines", "document", "parquet"]


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a file that one process reads."""

    path: Path
    kind: Kind
    begin: int = 0
    """First byte of lines, or first row group of a table."""
    end: int | None = None
    """Byte, or row group, after the last; None: to the end."""
    num_bytes: int
    """Bytes on disk that reading it takes, about."""


def files_of(patterns: Sequence[str | Path]) -> list[Path]:
    """Return the files that these names and globs stand for, each once, in order.

    Raises:
        ConfigError: one of them stands for no file.
    """
    files: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        if path.is_file():
            files[path] = None
            continue
        matches = sorted(Path(name) for name in glob.glob(str(pattern), recursive=True))
        matches = [match for match in matches if match.is_file()]
        if not matches:
            raise ConfigError(
                f"{pattern} is no file, and no pattern that any file matches"
            )
        files.update(dict.fromkeys(matches))
    return list(files)


def shards_of(files: Sequence[Path], *, shard_bytes: int = SHARD_BYTES) -> list[Shard]:
    """Return the parts of these files, in order; a compressed file or a JSON document is one
    part."""
    shards: list[Shard] = []
    for file in files:
        path = file.absolute()  # processes that read it may run elsewhere
        try:
            shards += _parts(path, path.stat().st_size, shard_bytes)
        except OSError as failure:
            raise ConfigError(
                f"cannot read {path}: {failure.strerror or failure}"
            ) from None
    return shards


def _parts(path: Path, size: int, shard_bytes: int) -> list[Shard]:
    if path.suffix == ".parquet":
        return [Shard(path=path, kind="parquet", num_bytes=size)]
    if not has_lines(path):
        return [Shard(path=path, kind="document", num_bytes=size)]
    if path.suffix == ".gz" or size <= shard_bytes:
        return [Shard(path=path, kind="lines", num_bytes=size)]
    return [
        Shard(
            path=path,
            kind="lines",
            begin=begin,
            end=min(begin + shard_bytes, size),
            num_bytes=min(shard_bytes, size - begin),
        )
        for begin in range(0, size, shard_bytes)
    ]


def has_lines(path: Path) -> bool:
    """Whether a file has one JSON document a line, rather than one over several."""
    names = [suffix for suffix in path.suffixes if suffix != ".gz"]
    if names and names[-1] in LINE_SUFFIXES:
        return True
    limit = _limit_bytes(path, LINE_LIMIT_BYTES)
    with opened(path) as file:
        while line := file.readline(limit):
            if not line.strip():
                continue
            if len(line) >= limit:
                return False
            try:
                return isinstance(msgspec.json.decode(line), dict)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return False
    return True


def _limit_bytes(path: Path, most: int) -> int:
    """The bytes of a file's line or document that are read at once, `most` of one not compressed."""
    if path.suffix != ".gz":
        return most
    return min(most, COMPRESSED_LIMIT_BYTES + MOST_COMPRESSED * path.stat().st_size)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, or what is compressed in it.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            if path.suffix == ".gz":
                with gzip.open(file) as inner:
                    yield inner  # type: ignore[misc]  # a buffered reader of bytes
            else:
                yield file
    except (OSError, EOFError, zlib.error) as failure:
        raise ConfigError(
            f"cannot read {path}: {getattr(failure, 'strerror', None) or failure}"
        ) from None


Place = int
"""Line, or row, from 1 on within its shard."""


def documents_of(
    shard: Shard,
) -> Iterator[tuple[Place, dict[str, Any] | UnreadableError]]:
    """Give each document of a shard, or why it cannot be read, with its place."""
    if shard.kind == "parquet":
        yield from _table_rows(shard.path)
    elif shard.kind == "document":
        yield from _whole(shard.path)
    else:
        for place, line in _lines(shard):
            if isinstance(line, UnreadableError):
                yield place, line
            elif line.strip():
                yield place, _decoded(line)


def _lines(shard: Shard) -> Iterator[tuple[Place, bytes | UnreadableError]]:
    """Lines that begin within the shard.

    Raises:
        ConfigError: a compressed file unfolds to more than it may.
    """
    limit = _limit_bytes(shard.path, LINE_LIMIT_BYTES)
    too_long = UnreadableError(f"a line of more than {format_bytes(limit)}")
    with opened(shard.path) as file:
        if shard.begin:
            file.seek(shard.begin - 1)
            file.readline()
        place = 0
        is_within = True
        for line in _pieces(file, shard, limit):
            if is_within:
                place += 1
                yield place, line if len(line) < limit else too_long
            is_within = len(line) < limit or line.endswith(b"\n")


def _pieces(file: IO[bytes], shard: Shard, limit: int) -> Iterator[bytes]:
    """Lines, the longer of them in several pieces of `limit` bytes."""
    most = math.inf
    if shard.path.suffix == ".gz":
        most = EXPANDED_LIMIT_BYTES + MOST_EXPANDED * shard.path.stat().st_size
    num_bytes = 0
    is_whole = True
    while not is_whole or shard.end is None or file.tell() < shard.end:
        piece = file.readline(limit)
        if not piece:
            return
        num_bytes += len(piece)
        if num_bytes > most:
            raise ConfigError(
                f"{shard.path} unfolds to more than {format_bytes(most)}, over {MOST_EXPANDED} times its size; "
                "decompress it to read it all"
            )
        yield piece
        is_whole = len(piece) < limit or piece.endswith(b"\n")


def _decoded(line: bytes) -> dict[str, Any] | UnreadableError:
    try:
        document = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return UnreadableError("not JSON")
    if isinstance(document, dict):
        return document
    return UnreadableError("not a JSON object")


def _whole(path: Path) -> Iterator[tuple[Place, dict[str, Any] | UnreadableError]]:
    """The documents of a file that is one: the elements of its list, or itself."""
    limit = _limit_bytes(path, RESULTS_LIMIT_BYTES)
    with opened(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ConfigError(
            f"{path} is one JSON document of more than {format_bytes(limit)}, "
            "which is read whole; write it as JSON lines, which are streamed"
        )
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failure:
        raise ConfigError(f"{path} is neither JSON nor JSON lines: {failure}") from None
    if isinstance(document, dict) and isinstance(document.get("data"), list):
        document = document["data"]
    if isinstance(document, list):
        rows = document
    else:
        rows = [document]
    for place, row in enumerate(rows, 1):
        yield (
            place,
            row if isinstance(row, dict) else UnreadableError("not a JSON object"),
        )


def _table_rows(path: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(
            "reading .parquet needs a package: pip install 'magicdec[logs]'"
        ) from None
    try:
        place = 0
        with ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=PARQUET_ROWS):
                for row in batch.to_pylist():
                    place += 1
                    yield place, as_document(row)
    except (ArrowInvalid, OSError) as failure:
        raise ConfigError(f"{path} is no Parquet table: {failure}") from None


def companions_of(shards: Sequence[Shard]) -> Companions:
    """Return the prompts that stand in files of their own, by the id that joins them to their
    outputs.

    Only files whose first row is such a prompt are read.

    Raises:
        ConfigError: there are more than `COMPANION_LIMIT`.
    """
    companions: Companions = {}
    is_companion: dict[Path, bool] = {}
    for shard in shards:
        if shard.path not in is_companion:
            first = next(documents_of(shard), (0, None))[1]
            is_companion[shard.path] = companion_of(first) is not None
        if not is_companion[shard.path]:
            continue
        for _, document in documents_of(shard):
            joined = companion_of(document)
            if joined is not None:
                companions[joined[0]] = joined[1]
        if len(companions) > COMPANION_LIMIT:
            raise ConfigError(
                f"more than {COMPANION_LIMIT} prompts stand apart from their outputs; join them, "
                "or split the files"
            )
    return companions


def total_bytes(shards: Sequence[Shard]) -> int:
    return sum(shard.num_bytes for shard in shards)


def cpu_count() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def dataset_of(files: list[Path]) -> str:
    """Return a name for some files: the only one's, or the first and how many more."""
    name = files[0].name.split(".")[0]
    if len(files) == 1:
        return name
    return f"{name} and {len(files) - 1} more"
