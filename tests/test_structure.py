"""The map of the code names every module, and nothing else; a file's name says which one it is."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "magicdec"
MAP = ROOT / "docs" / "structure.md"
SHARED = {
    "engine",  # specs: what one costs; runtime: the one that decodes
    "gamma_table",  # specs: looked up while decoding; perfmodel: how it is computed
    "layers",  # specs: what they are; runtime: how they are computed
    "sampling",  # runtime: ours; vllm: as that engine does it
    "serving",  # perfmodel: the equations; validate: how right they are
}
LONGEST_FUNCTION = 60
"""Lines. Commands are longer by the text of their options, kernels by what a compiler cannot take apart."""
MODULES = {path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py")}


def is_named(module: str) -> bool:
    return not module.endswith(("__init__", "__main__"))


def mapped() -> list[str]:
    """The modules of the map's bullets: `folder/` first, then the names of its modules."""
    section = MAP.read_text(encoding="utf-8").partition("## Modules")[2].partition("\n## ")[0]
    found = []
    for bullet in section.split("\n- ")[1:]:
        folder, *names = re.findall(r"`([\w/]+)`", bullet)
        prefix = "" if folder == "magicdec/" else folder
        found += [prefix + name for name in names]
    return found


def test_the_map_names_every_module_once_and_no_other() -> None:
    named, present = Counter(mapped()), Counter(filter(is_named, MODULES))
    assert present - named == Counter(), "modules that docs/structure.md does not name"
    assert named - present == Counter(), "names in docs/structure.md that are no module, or stand there twice"


def test_every_path_in_the_map_exists_and_it_is_short() -> None:
    text = MAP.read_text(encoding="utf-8")
    paths = re.findall(r"`([\w/]+/[\w/]*)`", text)
    assert len(paths) > 20
    for path in paths:
        found = PACKAGE / path
        assert path == "magicdec/" or found.exists() or found.with_suffix(".py").exists(), path
    assert len(text.splitlines()) <= 60


def test_a_name_of_a_file_is_used_once_in_the_package() -> None:
    """Commands are named as users call them, which may be what a module does the work of."""
    names = Counter(Path(module).name for module in filter(is_named, MODULES) if not module.startswith("commands/"))
    assert {name for name, count in names.items() if count > 1} <= SHARED


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
