"""Prompts that need no download: long documents from the running interpreter's own standard library.

A file is *held out* by a hash of its path relative to the standard library, so the rule is the same for every Python
version: the embedded model was trained on the other files only (scripts/train_embedded_model.py uses this module).
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

HELD_OUT_ONE_IN = 10
_SKIPPED_PARTS = frozenset({"site-packages", "dist-packages", "__pycache__", "encodings", "lib2to3"})
_TEST_PARTS = frozenset({"test", "tests", "idle_test"})


def is_held_out(relative_path: str) -> bool:
    """Whether the standard-library file (posix path relative to its root) was kept from training."""
    return hashlib.sha256(relative_path.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def stdlib_documents(*, held_out: bool, tests: bool = False) -> Iterator[str]:
    """Texts of the standard library's Python files, in a fixed order that mixes packages.

    `tests` chooses the library's own test suite instead of its sources. Tables of character encodings are left out:
    they are not text.
    """
    root = Path(sysconfig.get_path("stdlib"))
    chosen = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        parts = set(relative.parts)
        if parts & _SKIPPED_PARTS or bool(parts & _TEST_PARTS) != tests:
            continue
        if is_held_out(relative.as_posix()) == held_out:
            chosen.append((hashlib.sha256(relative.as_posix().encode()).digest(), path))
    for _, path in sorted(chosen):
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.strip():
            yield text
