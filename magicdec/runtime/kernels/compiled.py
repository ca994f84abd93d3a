"""Keeps compiled kernels on disk, in one folder for all checkouts and environments of a user.

A folder is for one content of the source file, one processor, and one version of Python and numba;
a kernel has its own files there. Numba numbers the files of an index without a lock: where
processes of two sources, or kernels of two shapes, shared one, each could find the other's code
under the number of its own.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding


class SharedFolder:
    """Where numba keeps a function's code: it asks for the methods below, which its own places have
    too.
    """

    def __init__(self, source: Path) -> None:
        processor = (
            binding.get_host_cpu_name(),
            binding.get_host_cpu_features().flatten(),
        )
        made_by = repr((sys.version_info[:3], numba.__version__, processor)).encode()
        self._digest = hashlib.sha256(made_by + source.read_bytes()).hexdigest()[:16]

    @classmethod
    def from_function(
        cls, function: Callable[..., Any], source: str
    ) -> SharedFolder | None:
        """The cache's folder. None: it is missing and cannot be made."""
        try:
            folder = cls(Path(source))
            folder.ensure_cache_path()
        except OSError:
            return None
        return folder

    def ensure_cache_path(self) -> None:
        path = self.get_cache_path()
        os.makedirs(path, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()

    def get_cache_path(self) -> str:
        home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        folder = os.environ.get("NUMBA_CACHE_DIR") or os.path.join(home, "magicdec")
        return os.path.join(folder, f"kernels-{self._digest}")

    def get_source_stamp(self) -> str:
        return self._digest

    def get_disambiguator(self) -> str:
        return "0"


def kept(
    compiler: Callable[..., Any], *, name: str | None = None
) -> Callable[[Callable[..., None]], Any]:
    """Compiles at once with `compiler`, and caches the result on disk under `name` if possible. A
    damaged cache entry or a full disk only costs a recompilation."""

    def decorate(function: Callable[..., None]) -> Any:
        function.__qualname__ = name or function.__name__
        before = getattr(numba.config, "CACHE_LOCATOR_CLASSES", "")
        numba.config.CACHE_LOCATOR_CLASSES = (
            f"{SharedFolder.__module__}.{SharedFolder.__name__}"
        )
        try:
            return compiler(cache=True)(function)
        except Exception:
            # were it the function's fault, compiling it without a file raises it again
            return compiler()(function)
        finally:
            numba.config.CACHE_LOCATOR_CLASSES = before

    return decorate
