"""The shape of the code: short functions, and test files that pytest can tell apart."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "magicdec"
LONGEST_FUNCTION = 60
"""Lines. Commands are longer by the text of their options, kernels by what a compiler cannot take apart."""


def test_each_test_file_has_a_name_of_its_own() -> None:
    """pytest imports them by name: of two with one name, all would be refused."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_function_is_longer_than_a_page() -> None:
    long = []
    for path in PACKAGE.rglob("*.py"):
        if {"commands", "kernels"} & set(path.relative_to(PACKAGE).parts):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= LONGEST_FUNCTION:
                long.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert long == []
