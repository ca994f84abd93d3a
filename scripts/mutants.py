"""Draws small changes of the code, each of which must fail a test.

    python scripts/mutants.py                         40 changes in each folder (make mutants)
    python scripts/mutants.py logs live --number 10 --seed 7

cosmic-ray makes the changes: an operator, a comparison, a number, a condition or a loop; flags that only declare
(`frozen`, `kw_only`, `strict`, numba's `cache`) are left out. Each is judged in a copy of the working tree by the
folder's fast tests, files that name the changed module first, until one fails. One that takes much longer than the
unchanged tests is noticed too. Survivors are printed with their line. The exit code is 1 where a folder's tests notice
fewer than nine in ten.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parent.parent
FOLDERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "traffic": (
        ("magicdec/perfmodel/rate/*.py", "evidence/traffic.py"),
        ("tests/perfmodel/test_tra*.py", "tests/perfmodel/test_ca*.py", "tests/perfmodel/test_load*.py",
         "tests/perfmodel/test_g*way.py", "tests/perfmodel/test_pref*.py", "evidence/tests/test_traffic_rows.py"),
    ),
    "logs": (
        ("magicdec/logs/*.py",),
        ("tests/logs/test_*.py", "tests/fuzz/test_commands_and_logs.py"),
    ),
    "live": (("magicdec/live/*.py",), ("tests/live/test_*.py",)),
    "acceptance": (
        ("magicdec/perfmodel/acceptance/*.py",),
        ("tests/perfmodel/test_acceptance*.py", "tests/perfmodel/test_mixed_tasks.py",
         "evidence/tests/test_deeper_blocks.py"),
    ),
    "plan": (
        ("magicdec/perfmodel/plan/*.py",),
        ("tests/perfmodel/test_plan*.py", "tests/perfmodel/test_choice.py", "tests/perfmodel/test_gains.py",
         "tests/perfmodel/test_outlook.py", "tests/perfmodel/test_standing.py", "tests/perfmodel/test_variations.py",
         "tests/perfmodel/test_monotony.py", "tests/perfmodel/test_soundness.py",
         "tests/perfmodel/test_any_request.py", "tests/perfmodel/test_texts.py"),
    ),
}  # fmt: skip
"""Of each folder: its modules, and the tests that judge them."""
OPERATORS = re.compile(
    r"core/(NumberReplacer|AddNot|ReplaceAndWithOr|ReplaceOrWithAnd|ReplaceTrueWithFalse|ReplaceFalseWithTrue|"
    r"ReplaceBreakWithContinue|ReplaceContinueWithBreak|ZeroIterationForLoop|"
    r"ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Pow_Mul|Mod_Mul)|"
    r"ReplaceComparisonOperator_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is)|"
    r"ReplaceUnaryOperator_(Delete_Not|Delete_USub))"
)
"""One other for each operator, so that no place is drawn more often than another."""
DECLARED = frozenset({"cache", "frozen", "kw_only", "strict"})
"""Flags by name that declare something of code or data that is right either way: whether numba keeps it, whether
nobody assigns to it, how it is called, that two lengths are equal."""
LEAST_KILLED = 0.9
NO_END_FACTOR = 3.0
"""A change whose tests take so much longer than without it comes to no end, which a user would notice."""
NOT_COPIED = (
    ".git",
    ".venv*",
    ".mypy_cache",
    ".ruff_cache",
    "site",
    "dist",
    "build",
)


class Change(NamedTuple):
    module: Path
    """From the root."""
    operator: str
    occurrence: int
    line: int


def changes_of(copy: Path, module: Path) -> list[Change]:
    """Every change that a module offers, each once."""
    nodes = list(ast_nodes(get_ast((copy / module).read_text(encoding="utf-8"))))
    found = []
    for name in operator_names():
        if OPERATORS.fullmatch(name):
            operator = get_operator(name)()
            places = [(place, node) for node in nodes for place in operator.mutation_positions(node)]  # fmt: skip
            for number, (((line, _), _), node) in enumerate(places):
                if not is_without_effect(node):
                    found.append(Change(module, name, number, line))
    return found


def is_without_effect(node: Any) -> bool:
    """Whether a change of it changes no result: the star before parameters by name, which is no operator, and a flag
    that only declares."""
    if node.parent is None:
        return False
    is_star = node.parent.type == "parameters" and node.value == "*"
    is_flag = node.type == "keyword" and node.value in ("True", "False")
    return is_star or (
        is_flag
        and node.parent.type == "argument"
        and node.parent.get_first_leaf().value in DECLARED
    )


def files_of(copy: Path, patterns: tuple[str, ...]) -> list[Path]:
    """From the root."""
    return [
        path.relative_to(copy)
        for pattern in patterns
        for path in sorted(copy.glob(pattern))
    ]


def drawn(copy: Path, folder: str, seed: int) -> list[Change]:
    """A folder's changes in the order in which they are judged."""
    modules = files_of(copy, FOLDERS[folder][0])
    every = [change for module in modules for change in changes_of(copy, module)]
    random.Random(f"{folder} {seed}").shuffle(every)
    return every


def named_first(copy: Path, folder: str, module: Path) -> list[Path]:
    """A folder's test files, those that name the module first."""
    tests = files_of(copy, FOLDERS[folder][1])
    name = re.compile(rf"\b{module.stem}\b")
    return sorted(tests, key=lambda path: not name.search((copy / path).read_text()))


def fails(copy: Path, tests: list[Path], limit_s: float | None = None) -> bool:
    """Whether a test fails in the copy as it is, or all together take longer than the limit."""
    pytest = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    try:
        done = subprocess.run(
            [*pytest, *map(str, tests)], cwd=copy, env=environment, timeout=limit_s, capture_output=True, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def what_changed(before: str, after: str) -> str:
    """The first line that differs, with its number and what it became."""
    lines = zip(before.splitlines(), after.splitlines(), strict=False)
    for number, (old, new) in enumerate(lines, 1):
        if old != new:
            return f"{number}: {old.strip()}  ->  {new.strip()}"
    return "the end"


def is_noticed(copy: Path, folder: str, change: Change, limit_s: float) -> bool:
    """Judges one change; prints it where it survives."""
    path = copy / change.module
    before = path.read_text(encoding="utf-8")
    after: Any = mutate_code(before, get_operator(change.operator)(), change.occurrence)
    written = path.stat()
    path.write_text(after, encoding="utf-8")
    # the caches of bytecode and of numba tell contents apart by seconds and length
    seconds = zlib.crc32(after.encode())
    os.utime(path, (seconds, seconds))
    try:
        noticed = fails(copy, named_first(copy, folder, change.module), limit_s)
    finally:
        path.write_text(before, encoding="utf-8")
        os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    if not noticed:
        print(f"{change.module}:{what_changed(before, after)}", flush=True)
    return noticed


def judged(copy: Path, folder: str, number: int, seed: int) -> float:
    """Prints a folder's survivors; returns the share that was noticed."""
    begun = time.monotonic()
    if fails(copy, files_of(copy, FOLDERS[folder][1])):
        sys.exit(f"{folder}: a test fails without a change")
    limit_s = NO_END_FACTOR * (time.monotonic() - begun)
    changes = drawn(copy, folder, seed)[:number]
    killed = sum(is_noticed(copy, folder, change, limit_s) for change in changes)
    print(f"{folder}, seed {seed}: {killed} of {len(changes)} noticed", flush=True)
    return killed / max(len(changes), 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help=", ".join(FOLDERS))
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if unknown := set(given.folders) - set(FOLDERS):
        parser.error(f"no folder {', '.join(unknown)}; there are {', '.join(FOLDERS)}")
    with tempfile.TemporaryDirectory(prefix="magicdec-mutants-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        shares = []
        for chosen in given.folders or FOLDERS:
            shares.append(judged(copy, chosen, given.number, given.seed))
    return int(min(shares) < LEAST_KILLED)


if __name__ == "__main__":
    sys.exit(main())
