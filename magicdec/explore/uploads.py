"""Files of requests that a page sent: kept in a folder of their own until the server ends, a few at
a time, under names that say what they hold. A link names them; it reads no other file.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

from magicdec.errors import ConfigError

MOST_UPLOAD_BYTES = 32_000_000
MOST_FILES = 8
"""Files that are kept, the newest: nobody tells a server that a page was closed."""
ENDINGS = (".csv", ".jsonl", ".ndjson", ".json")
LONGEST_NAME = 60
TOKEN = re.compile(r"[0-9a-f]{16}-[\w.-]{1,60}")


class Uploads:
    """The files of one server, the oldest forgotten first."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._tokens: list[str] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Uploads], tuple[()]]:
        """Another process has none of the files."""
        return Uploads, ()

    def add(self, name: str, chunks: Iterable[bytes]) -> str:
        """Keeps a file, and gives the token that a link names it by.

        Raises ConfigError for a name of another sort of file, or too many bytes.
        """
        name = _plain(name)
        content = bytearray()
        for chunk in chunks:
            content += chunk
            if len(content) > MOST_UPLOAD_BYTES:
                raise ConfigError(too_large(name))
        if not content.strip():
            raise ConfigError(f"{name} is empty")
        token = f"{hashlib.sha256(content).hexdigest()[:16]}-{name}"
        with self._lock:
            if token not in self._tokens:
                path = self._path(token)
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)
                self._tokens.append(token)
            for old in self._tokens[:-MOST_FILES]:
                self._path(old).unlink(missing_ok=True)
                self._path(old).parent.rmdir()
            del self._tokens[:-MOST_FILES]
        return token

    def checked(self, token: str) -> str:
        """The token of a file that is kept. Raises ConfigError for any other text."""
        if TOKEN.fullmatch(token) is None:
            raise ConfigError("requests must be a file that this page uploaded")
        if token not in self._tokens:
            raise ConfigError(
                f"{self.name_of(token)} is not kept any more; upload it again"
            )
        return token

    def folder_of(self, token: str) -> Path:
        """The folder that holds this file alone."""
        return self._path(token).parent

    def name_of(self, token: str) -> str:
        """The file's own name."""
        return token.partition("-")[2]

    def _path(self, token: str) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="magicdec-uploads-")
        return Path(self._folder.name) / token / self.name_of(token)


def too_large(name: str) -> str:
    return (
        f"{name} is larger than {MOST_UPLOAD_BYTES / 1e6:.0f} MB; magicdec plan --requests reads it "
        "from disk"
    )


def _plain(name: str) -> str:
    """A file's own name without folders and unusual characters. Raises ConfigError for another
    sort of file."""
    base = re.split(r"[/\\]", name)[-1]
    stem, dot, ending = base.rpartition(".")
    ending = dot + ending.lower()
    if ending not in ENDINGS:
        known = ", ".join(ENDINGS)
        raise ConfigError(f"requests are read from {known} files, not '{base[:40]}'")
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-_") or "requests"
    return stem[: LONGEST_NAME - len(ending)] + ending
