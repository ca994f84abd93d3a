"""The door of the package: the names of the Python interface, each loaded when first used.

`magicdec/__init__.py` lists them once, under `if TYPE_CHECKING:`, as imports that type checkers read:

    if TYPE_CHECKING:
        from magicdec.api import plan
    else:
        __getattr__, __dir__, __all__ = door(__name__, __file__)

`from magicdec import plan` then imports `magicdec.api` and nothing else, which keeps the start of a command light.
Inside the package a name is imported from the module that has it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def door(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Module-level `__getattr__`, `__dir__` and `__all__` of a package that lists its names as above."""
    module_of = _listed(Path(file))
    names = sorted(module_of)

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        module = import_module(module_of[name])
        value = getattr(module, name)
        # later look-ups find the value itself and do not come here
        setattr(import_module(package), name, value)
        return value

    return load, lambda: names, names


def _listed(file: Path) -> dict[str, str]:
    """Module of each name that the file imports under `if TYPE_CHECKING:`."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    listed = {}
    for block in tree.body:
        if not isinstance(block, ast.If):
            continue
        for statement in block.body:
            if isinstance(statement, ast.ImportFrom) and statement.module:
                for name in statement.names:
                    listed[name.name] = statement.module
    return listed
