"""Prints which lines of the package everyday use reaches, which a feature owns, and which neither.

    make reach                            records what is entered (minutes), then prints
    python scripts/reach.py --recorded    prints the last recording again
    python scripts/reach.py --names       names the functions that nothing enters and no feature owns

Entered: a line of the function ran in this process while the commands of README, those of docs/questions.md and the
error lines of tests/commands ran; what runs in ranks and servers of its own is owned. Owned: a line of FEATURES.md
names the function, or the class that it belongs to.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import coverage

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "magicdec"
RECORDING = ROOT / "build" / "reach" / "entered.coverage"
ENTERING = (
    "tests/test_documented_commands.py",
    "tests/test_questions.py",
    "tests/test_readme.py",
    "tests/commands",
)
OWNED = re.compile(r"`([\w/]+\.py): ([^`]+)`")
"""A place in FEATURES.md: a file of the package, and its functions or classes."""


class Function(NamedTuple):
    """A function of the package, or a method of one of its classes."""

    file: str
    name: str
    first_line: int
    last_line: int

    @property
    def room(self) -> str:
        """The folder; files at the top of the package are a room of their own."""
        folder, slash, _ = self.file.partition("/")
        return folder if slash else "(top)"

    @property
    def num_lines(self) -> int:
        return self.last_line - self.first_line + 1


def functions(file: Path) -> Iterator[Function]:
    """The outermost functions of a file, methods with their class's name in front."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    name = str(file.relative_to(PACKAGE))
    stack: list[tuple[ast.AST, str]] = [(tree, "")]
    while stack:
        parent, prefix = stack.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                last_line = node.end_lineno or node.lineno
                yield Function(name, prefix + node.name, node.body[0].lineno, last_line)
            elif isinstance(node, ast.ClassDef):
                stack.append((node, f"{prefix}{node.name}."))
            elif isinstance(node, ast.If | ast.Try):
                stack.append((node, prefix))


def record() -> None:
    """Run the documents' commands, noting the lines that they enter."""
    RECORDING.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "coverage", "run"),
        *(f"--data-file={RECORDING}", f"--source={PACKAGE}"),
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", *ENTERING),
    ]
    subprocess.run(command, cwd=ROOT, check=True)


def entered_lines() -> dict[str, set[int]]:
    """By file of the package, the lines that ran."""
    if not RECORDING.exists():
        raise SystemExit("reach: nothing is recorded yet: make reach")
    data = coverage.CoverageData(str(RECORDING))
    data.read()
    return {
        str(Path(file).relative_to(PACKAGE)): set(data.lines(file) or ())
        for file in data.measured_files()
    }


def owned_names() -> dict[str, set[str]]:
    """By file of the package, the names that FEATURES.md gives."""
    owned: dict[str, set[str]] = {}
    text = (ROOT / "FEATURES.md").read_text(encoding="utf-8")
    for file, names in OWNED.findall(text):
        owned.setdefault(file, set()).update(re.split(r",\s*", names))
    return owned


def unknown_names(owned: dict[str, set[str]]) -> list[str]:
    """Names that FEATURES.md gives and the package does not have."""
    unknown = []
    for file, names in owned.items():
        path = PACKAGE / file
        if not path.exists():
            unknown.append(f"{file} (no such file)")
            continue
        known = {function.name for function in functions(path)}
        known |= {name.rpartition(".")[0] for name in known}
        unknown += [f"{file}: {name}" for name in sorted(names - known)]
    return unknown


def is_owned(function: Function, owned: dict[str, set[str]]) -> bool:
    """Whether a feature names the function or its class."""
    names = owned.get(function.file, set())
    return function.name in names or function.name.rpartition(".")[0] in names


def show(*, with_names: bool) -> int:
    """Print the lines of functions by room; the exit status is 1 where FEATURES.md names what is not there."""
    entered = entered_lines()
    owned = owned_names()
    counts: dict[str, list[int]] = {}
    neither: list[Function] = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for function in functions(file):
            lines = range(function.first_line, function.last_line + 1)
            if not entered.get(function.file, set()).isdisjoint(lines):
                column = 0
            elif is_owned(function, owned):
                column = 1
            else:
                column = 2
                neither.append(function)
            counts.setdefault(function.room, [0, 0, 0])[column] += function.num_lines
    print(f"{'lines of functions in':24}{'entered':>9}{'owned':>9}{'neither':>9}")
    for room, row in sorted(counts.items()):
        print(f"{room:24}" + "".join(f"{lines:9,}" for lines in row))
    total = [sum(column) for column in zip(*counts.values(), strict=True)]
    print(f"{'all':24}" + "".join(f"{lines:9,}" for lines in total))
    if with_names:
        for function in neither:
            print(f"{function.file}:{function.first_line}: {function.name}")
    unknown = unknown_names(owned)
    for name in unknown:
        print(f"FEATURES.md names what is not there: {name}")
    return int(bool(unknown))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recorded", action="store_true", help="do not record again")
    parser.add_argument("--names", action="store_true", help="name what nothing enters")
    given = parser.parse_args()
    if not (given.recorded or given.names):
        record()
    return show(with_names=given.names)


if __name__ == "__main__":
    sys.exit(main())
