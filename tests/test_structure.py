"""The shape of the code, as far as it protects a reader: no hand-made layout outside tables, one thing to a class
name, test files that pytest can tell apart. Imports and doors: import-linter and test_door.py."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "magicdec"
KERNELS = {"runtime/kernels", "suffix_tree.py"}
"""Code for compilers (numba, Triton), which take no smaller pieces."""


def sources() -> Iterator[Path]:
    """The package's files outside kernels."""
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE).as_posix()
        if not any(inside.startswith(kernel) for kernel in KERNELS):
            yield path


def test_each_test_file_has_a_name_of_its_own() -> None:
    """pytest imports them by name: of two with one name, all would be refused."""
    rooms = (ROOT / "tests", ROOT / "evidence" / "tests")
    names = Counter(path.name for room in rooms for path in room.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_formatter_is_left_out_of_tables_alone() -> None:
    outside = []
    for path in sources():
        source = path.read_text(encoding="utf-8")
        if "fmt: " not in source:
            continue
        tables = [
            range(node.lineno, node.end_lineno + 1)
            for node in ast.parse(source).body
            if isinstance(node, ast.Assign | ast.AnnAssign)
        ]
        for number, line in enumerate(source.splitlines(), 1):
            skips = "fmt: skip" in line or "fmt: off" in line
            if skips and not any(number in table for table in tables):
                outside.append(f"{path.relative_to(ROOT)}:{number}")
    assert outside == []


def test_no_class_name_stands_for_two_things() -> None:
    """Nor does a private one for what a public one names."""
    places: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                place = path.relative_to(ROOT).as_posix()
                places.setdefault(node.name.lstrip("_"), []).append(place)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
