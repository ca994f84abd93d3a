"""How much of the code the tests watch: seeded small changes, each of which must fail a test.

    python scripts/mutants.py                         40 changes in each folder (make mutants)
    python scripts/mutants.py logs live --number 10 --seed 7

cosmic-ray makes the changes: an operator, a comparison, a number, a condition or a loop. Each is judged in a copy of
the working tree by the fast tests of its folder, those that name its module first, until one fails. Survivors are
printed with their line. The exit code is 1 where a folder has more than one survivor in ten.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parent.parent
FOLDERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "traffic": (
        ("magicdec/perfmodel/rate/*.py", "magicdec/validate/traffic.py"),
        ("tests/perfmodel/test_tra*.py", "tests/perfmodel/test_ca*.py", "tests/perfmodel/test_load.py",
         "tests/perfmodel/test_g*way.py", "tests/perfmodel/test_prefix*.py", "tests/validate/test_traffic_rows.py"),
    ),
    "logs": (
        ("magicdec/logs/*.py",),
        ("tests/logs/test_*.py", "tests/fuzz/test_commands_and_logs.py"),
    ),
    "live": (("magicdec/live/*.py",), ("tests/live/test_*.py",)),
    "acceptance": (
        ("magicdec/perfmodel/acceptance/*.py",),
        ("tests/perfmodel/test_acceptance*.py", "tests/perfmodel/test_curve_fit.py", "tests/perfmodel/test_texts.py"),
    ),
    "plan": (
        ("magicdec/perfmodel/plan/*.py",),
        ("tests/perfmodel/test_planner.py", "tests/perfmodel/test_choice.py", "tests/perfmodel/test_gains.py",
         "tests/perfmodel/test_outlook.py", "tests/perfmodel/test_standing.py", "tests/perfmodel/test_variations.py",
         "tests/perfmodel/test_monotony.py", "tests/perfmodel/test_soundness.py",
         "tests/perfmodel/test_any_request.py"),
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
LEAST_KILLED = 0.9
MOST_S = 300.0
"""Time of one change's tests; longer counts as noticed, since an endless loop would."""
NOT_COPIED = (
    ".git",
    ".venv*",
    ".mypy_cache",
    ".ruff_cache",
    "site",
    "dist",
    "build",
    "shared",
)


class Change(NamedTuple):
    module: Path
    """From the root."""
    operator: str
    occurrence: int


def changes_of(module: Path) -> list[Change]:
    """Every change that a module offers, each once."""
    nodes = list(ast_nodes(get_ast((ROOT / module).read_text(encoding="utf-8"))))
    found = []
    for name in operator_names():
        if OPERATORS.fullmatch(name):
            operator = get_operator(name)()
            count = sum(1 for node in nodes for _ in operator.mutation_positions(node))
            found += [Change(module, name, number) for number in range(count)]
    return found


def drawn(folder: str, number: int, seed: int) -> list[Change]:
    modules = [
        path.relative_to(ROOT)
        for pattern in FOLDERS[folder][0]
        for path in sorted(ROOT.glob(pattern))
    ]
    every = [change for module in modules for change in changes_of(module)]
    random.Random(f"{folder} {seed}").shuffle(every)
    return every[:number]


def tests_of(folder: str, module: Path) -> list[str]:
    """The folder's test files: those that name the module first, the smaller first."""
    files = [
        path for pattern in FOLDERS[folder][1] for path in sorted(ROOT.glob(pattern))
    ]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    named = re.compile(rf"\b{module.stem}\b")
    files.sort(key=lambda path: (not named.search(texts[path]), len(texts[path])))
    return [str(path.relative_to(ROOT)) for path in files]


def first_failure(copy: Path, tests: list[str], seed: int) -> str | None:
    """The first test that fails; None where all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider",
               "-p", "no:xdist", f"--hypothesis-seed={seed}", *tests]  # fmt: skip
    environment = os.environ | {
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with subprocess.Popen(
        command, cwd=copy, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as running:  # fmt: skip
        try:
            said, _ = running.communicate(timeout=MOST_S)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            return "no end"
    if running.returncode == 0:
        return None
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    return failed[0] if failed else f"exit code {running.returncode}"


def what_changed(before: str, after: str) -> str:
    """The first line that differs, with its number and what it became."""
    lines = zip(before.splitlines(), after.splitlines(), strict=False)
    for number, (old, new) in enumerate(lines, 1):
        if old != new:
            return f"{number}: {old.strip()}  ->  {new.strip()}"
    return "the end"


def judged(copy: Path, folder: str, given: argparse.Namespace) -> float:
    """Print a folder's survivors; return the share that was noticed."""
    found = drawn(folder, given.number, given.seed)
    killed = 0
    begun = time.monotonic()
    for number, change in enumerate(found, 1):
        path = copy / change.module
        before = path.read_text(encoding="utf-8")
        operator = get_operator(change.operator)()
        after: Any = mutate_code(before, operator, change.occurrence)
        path.write_text(after, encoding="utf-8")
        try:
            failed = first_failure(copy, tests_of(folder, change.module), given.seed)
        finally:
            path.write_text(before, encoding="utf-8")
        killed += failed is not None
        if failed is None or given.verbose:
            line = f"{change.module}:{what_changed(before, after)}"
            print(f"{line}\n    {failed or 'survives'}", flush=True)
        if number % 10 == 0 or number == len(found):
            each_s = (time.monotonic() - begun) / number
            print(
                f"{folder}: {killed} of {number} noticed, {each_s:.0f} s each",
                flush=True,
            )
    return killed / max(len(found), 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help=", ".join(FOLDERS))
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="also what was noticed")
    given = parser.parse_args()
    if unknown := set(given.folders) - set(FOLDERS):
        parser.error(f"no folder {', '.join(unknown)}; there are {', '.join(FOLDERS)}")
    with tempfile.TemporaryDirectory(prefix="mutants-") as where:
        copy = Path(where, "tree")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        chosen = given.folders or list(FOLDERS)
        shares = {folder: judged(copy, folder, given) for folder in chosen}
    print("; ".join(f"{folder} {share:.0%}" for folder, share in shares.items()))
    return int(min(shares.values()) < LEAST_KILLED)


if __name__ == "__main__":
    sys.exit(main())
