"""Writes a finished file in one move, so that a crash or a full disk never leaves half a report."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from magicdec.errors import StorageError


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes beside `path` and renames; what was there before stays until the new content is complete.

    Raises:
        StorageError: the directory or the file cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = ""
    try:
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
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def check_writable(path: Path) -> None:
    """Fails before the work rather than after it. Raises StorageError when `path` cannot be written."""
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    if path.is_dir():
        raise StorageError(f"cannot write {path}: it is a directory")
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise StorageError(f"cannot write {path}: {parent} is not a writable directory")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
