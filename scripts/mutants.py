"""How much of the code the tests watch: seeded small changes, each of which must fail a test.

    python scripts/mutants.py                         40 changes in each folder (make mutants)
    python scripts/mutants.py logs live --number 10 --seed 7
    python scripts/mutants.py plan --skip 10 --number 10 --keep build/watched      the eleventh to the twentieth

cosmic-ray makes the changes: an operator, a comparison, a number, a condition or a loop; flags that only declare
(`frozen`, `kw_only`, `strict`, numba's `cache`) are left out. Each is judged in a copy of the working tree by the
folder's fast tests, until one fails: first those that run the changed line (of a constant or a compiled function, that
name it or run a line that does), then those of the same files, then those that enter the module, of each the quickest
that run the fewest lines, for as long as MOST_JUDGED_S. Which test runs which lines is found once, by coverage of the
quickest tests of each file (WATCHED_S), and kept for the next call (`--keep`). Survivors are printed with their line.
A test that fails must pass without the change, after the same tests: one that fails then too judges nothing any more. A
judge that dies is asked a second time; a change whose second judge dies too is not judged, and no more noticed than one
that survives. The exit code is 1 where a folder's tests notice fewer than nine in ten.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import msgspec
import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parent.parent
FOLDERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "traffic": (
        ("magicdec/perfmodel/rate/*.py", "evidence/traffic.py"),
        ("tests/perfmodel/test_tra*.py", "tests/perfmodel/test_ca*.py", "tests/perfmodel/test_load*.py",
         "tests/perfmodel/test_g*way.py", "tests/perfmodel/test_pref*.py", "tests/validate/test_traffic_rows.py"),
    ),
    "logs": (
        ("magicdec/logs/*.py",),
        ("tests/logs/test_*.py", "tests/fuzz/test_commands_and_logs.py"),
    ),
    "live": (("magicdec/live/*.py",), ("tests/live/test_*.py",)),
    "acceptance": (
        ("magicdec/perfmodel/acceptance/*.py",),
        ("tests/perfmodel/test_acceptance*.py", "tests/perfmodel/test_mixed_tasks.py",
         "tests/validate/test_published_acceptance.py"),
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
MOST_JUDGED_S = 60.0
"""Time that the tests of one change take without it, where none fails."""
MOST_TEST_S = 3.0
"""Of the processor's time. Slower tests judge nothing."""
MOST_FIRST_S = 90.0
"""The first time, when functions are compiled."""
MOST_FILE_S = 600
WATCHED_S = 20.0
"""Of the tests of a file that judge, together, without coverage."""
NO_END_FACTOR = 10.0
"""A test that works so much longer than any that judges comes to no end: noticed, since an endless loop would be.
One that waits tells nothing: others use the machine too."""
ALL_FACTOR = 3.0
"""Of the time that the judging tests take: more of the processor's is no end."""
WAITING_FACTOR = 20.0
"""Time over that of the processor, after which a test or a judge counts as waiting."""
COMPILATION_S = 90.0
"""More for changes of what numba compiles."""
MOST_BYTES = 12 << 30
"""Address space of a judge, against changes that allocate without end."""
NO_END = "no end"
DIED = "not judged"
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
OFTEN_IMPORTED = (
    "numpy scipy.stats pandas numba hypothesis typer.testing httpx yaml jinja2"
)
"""Of others, and by most tests: judges are forked from a process that has them."""


class Change(NamedTuple):
    module: Path
    """From the root."""
    operator: str
    occurrence: int
    line: int


class Watched(NamedTuple):
    """A test that passes."""

    seconds: float
    lines: dict[str, list[int]]
    """What it runs of each module of the folder."""


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


# Judges


def apart(copy: Path, limit_s: int, work: Callable[..., Any], *given: Any) -> Any:
    """What a function returns in a process of its own, at work in the copy. NO_END: a test worked longer than its
    limit. DIED: the process ended of anything else, its whole limit too (which first compilations in a fresh copy can
    reach), or waits."""
    forked = multiprocessing.get_context("fork")
    here, there = forked.Pipe(duplex=False)
    process = forked.Process(target=_at_work, args=(copy, limit_s, there, work, given))
    process.start()
    pid = process.pid
    assert pid is not None
    there.close()
    try:
        returned = here.recv() if here.poll(WAITING_FACTOR * limit_s) else DIED
    except EOFError:
        process.join()
        returned = NO_END if process.exitcode == -signal.SIGPROF else DIED
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        process.join()
    return returned


def _at_work(
    copy: Path, limit_s: int, there: Connection, work: Callable[..., Any], given: tuple[Any, ...]
) -> None:  # fmt: skip
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, 2 * limit_s))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)
    there.send(work(*given))


def run_tests(tests: list[str], plugin: object, *options: str) -> int:
    plain = ("-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist")
    return int(pytest.main([*plain, *options, *tests], plugins=[plugin]))


def worked_s() -> float:
    """The processor's time, with that of processes that have ended."""
    return sum(os.times()[:4])


class Watch:
    """How long each test takes, and which lines it runs."""

    def __init__(self, measured: coverage.Coverage | None = None) -> None:
        self.measured = measured
        self.seconds: dict[str, float] = {}
        self.not_passed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self.measured is not None:
            self.measured.switch_context(item.nodeid)
        begun_s = worked_s()
        result = yield
        self.seconds[item.nodeid] = worked_s() - begun_s
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.not_passed.add(report.nodeid)

    @property
    def passed(self) -> dict[str, float]:
        """The time of each test that passed."""
        return {test: seconds for test, seconds in self.seconds.items() if test not in self.not_passed}  # fmt: skip


def watched_in(copy: Path, modules: list[Path], tests: Path) -> dict[str, Watched]:
    """The tests of a file that pass and that may judge, by their node ids: the quickest that take WATCHED_S together,
    since coverage makes a simulation several times as long."""
    seconds = timed_apart(copy, [str(tests)])
    slow = [test for test, each_s in seconds.items() if each_s > MOST_TEST_S]
    if slow:  # once more, now that what they call is compiled
        seconds |= dict.fromkeys(slow, MOST_FIRST_S) | timed_apart(copy, slow)
    left_s = WATCHED_S
    chosen = []
    for test in sorted(seconds, key=seconds.__getitem__):
        left_s -= seconds[test]
        if left_s >= 0.0 and seconds[test] <= MOST_TEST_S:
            chosen.append(test)
    lines = apart(copy, MOST_FILE_S, lines_of, copy, modules, chosen) if chosen else {}
    if lines in (NO_END, DIED):
        sys.exit(f"{tests} takes more than {MOST_FILE_S} s, or ends the process")
    return {test: Watched(seconds[test], lines[test]) for test in chosen if test in lines}  # fmt: skip


def timed_apart(copy: Path, tests: list[str]) -> dict[str, float]:
    seconds = apart(copy, MOST_FILE_S, timed, tests)
    if seconds in (NO_END, DIED):
        sys.exit(f"{tests[0]} takes more than {MOST_FILE_S} s, or ends the process")
    found: dict[str, float] = seconds
    return found


def timed(tests: list[str]) -> dict[str, float]:
    """The time of each test that passes."""
    watch = Watch()
    run_tests(tests, watch, f"--timeout={MOST_FIRST_S}")
    return watch.passed


def lines_of(
    copy: Path, modules: list[Path], tests: list[str]
) -> dict[str, dict[str, list[int]]]:
    """What each test that passes runs of each module."""
    sources = {str(module): str(copy / module) for module in modules}
    measured = coverage.Coverage(data_file=None, config_file=False, include=[*sources.values()])  # fmt: skip
    watch = Watch(measured)
    measured.start()
    run_tests(tests, watch, f"--timeout={MOST_FIRST_S}")
    measured.stop()
    data = measured.get_data()
    found: dict[str, dict[str, list[int]]] = {test: {} for test in watch.passed}
    for module, source in sources.items():
        for line, contexts in data.contexts_by_lineno(source).items():
            for test in set(contexts) & set(found):
                found[test].setdefault(module, []).append(line)
    return found


def watched(copy: Path, folder: str, keep: Path) -> dict[str, Watched]:
    """The tests of a folder that may judge, by their node ids. Those of files that an earlier call watched are read,
    as long as neither they nor the folder's modules have changed: a change elsewhere hardly moves what they run, and
    a test that then fails judges nothing."""
    modules = files_of(copy, FOLDERS[folder][0])
    judged = hashlib.sha256(f"{WATCHED_S} {MOST_TEST_S}".encode())
    for module in modules:
        judged.update((copy / module).read_bytes())
    found: dict[str, Watched] = {}
    for tests in files_of(copy, FOLDERS[folder][1]):
        digest = judged.copy()
        digest.update((copy / tests).read_bytes())
        kept = keep / f"{folder}-{tests.stem}-{digest.hexdigest()[:16]}.json"
        if not kept.exists():
            kept.write_bytes(msgspec.json.encode(watched_in(copy, modules, tests)))
        found |= msgspec.json.decode(kept.read_bytes(), type=dict[str, Watched])
    return found


def imported_by(tree: ast.Module) -> set[str]:
    return {name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names}  # fmt: skip


def is_at(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or 0)


def unseen_at(copy: Path, change: Change) -> list[str]:
    """The names by which coverage's blind spots are known: what the changed line defines, where it is of a module or
    a class and runs when they are imported; the compiled functions of a module, where it is of one of them."""
    tree = ast.parse((copy / change.module).read_text(encoding="utf-8"))
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]  # fmt: skip
    is_compiling = "numba" in imported_by(tree)
    compiled = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]  # fmt: skip
    if is_compiling and any(is_at(node, change.line) for node in compiled):
        return [node.name for node in compiled]
    for statement in chain.from_iterable(bodies):
        if is_at(statement, change.line) and isinstance(statement, ast.Assign | ast.AnnAssign):  # fmt: skip
            targets = [statement.target] if isinstance(statement, ast.AnnAssign) else statement.targets  # fmt: skip
            names = [node for target in targets for node in ast.walk(target)]
            return [node.id for node in names if isinstance(node, ast.Name)]
    return []


@cache
def functions_of(tests: Path) -> dict[str, str]:
    """The text of each test of a file, by its name."""
    text = tests.read_text(encoding="utf-8")
    return {
        node.name: ast.get_source_segment(text, node) or ""
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    }


def near_to(copy: Path, change: Change, tests: dict[str, Watched]) -> set[str]:
    """The tests that run the changed line; of a constant, those that name it, or run a line that does."""
    module = str(change.module)
    if names := unseen_at(copy, change):
        named = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
        at: dict[str, set[int]] = {}
        for each in {each for seen in tests.values() for each in seen.lines}:
            text = (copy / each).read_text(encoding="utf-8").splitlines()
            at[each] = {number for number, line in enumerate(text, 1) if named.search(line)}  # fmt: skip

        def is_near(test: str, seen: Watched) -> bool:
            path, _, name = test.partition("::")
            text = functions_of(copy / path).get(name.partition("[")[0], "")
            runs = any(at[each] & set(lines) for each, lines in seen.lines.items())
            return runs or bool(named.search(text))

        return {test for test, seen in tests.items() if is_near(test, seen)}
    ran = sorted({line for seen in tests.values() for line in seen.lines.get(module, [])})  # fmt: skip
    if not ran:
        return set()
    # coverage knows a statement by the lines that its bytecode names, which a number within it need not be
    place = ran[max(bisect_right(ran, change.line) - 1, 0)]
    return {test for test, seen in tests.items() if place in seen.lines.get(module, [])}


def judges(copy: Path, change: Change, tests: dict[str, Watched]) -> list[str]:
    """The tests to run, in their order."""
    module = str(change.module)
    near = near_to(copy, change, tests)
    files = {test.partition("::")[0] for test in near}
    inside = near | {test for test, seen in tests.items() if module in seen.lines}

    def order(test: str) -> tuple[bool, bool, float]:
        is_far = test.partition("::")[0] not in files
        seen = tests[test]
        num_lines = sum(map(len, seen.lines.values()))
        # a whole plan is quicker than a property of one function over many inputs, and says less of each line
        return test not in near, is_far, seen.seconds * num_lines

    chosen = []
    left_s = MOST_JUDGED_S
    for test in sorted(inside, key=order):
        if tests[test].seconds <= left_s:
            left_s -= tests[test].seconds
            chosen.append(test)
    return chosen


class First:
    """The first failure."""

    def __init__(self, most_test_s: float) -> None:
        self.most_test_s = most_test_s
        self.failed: str | None = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    def pytest_runtest_logstart(self) -> None:
        # without a handler its signal ends the process, also in compiled code
        signal.setitimer(signal.ITIMER_PROF, self.most_test_s)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.failed is None:
            waits = "from pytest-timeout" in report.longreprtext
            self.failed = DIED if waits else report.nodeid


def first_failure(tests: list[str], most_test_s: float) -> str | None:
    """The first test that fails; None where all pass."""
    first = First(most_test_s)
    run_tests(tests, first, "-x", f"--timeout={WAITING_FACTOR * most_test_s}")
    return first.failed


def what_changed(before: str, after: str) -> str:
    """The first line that differs, with its number and what it became."""
    lines = zip(before.splitlines(), after.splitlines(), strict=False)
    for number, (old, new) in enumerate(lines, 1):
        if old != new:
            return f"{number}: {old.strip()}  ->  {new.strip()}"
    return "the end"


class Judge:
    """Of one folder's changes."""

    def __init__(self, copy: Path, tests: dict[str, Watched]) -> None:
        self.copy = copy
        self.tests = tests
        self.sound: set[str] = set()
        """Tests that failed with a change and passed without it."""

    def failure(self, tests: list[str], most_test_s: float) -> str | None:
        """The first test that fails in the copy as it is."""
        limit_s = round(ALL_FACTOR * MOST_JUDGED_S + most_test_s)
        for _ in range(2):
            failed: str | None = apart(self.copy, limit_s, first_failure, tests, most_test_s)  # fmt: skip
            if failed != DIED:
                break
        return failed

    def verdict(self, change: Change) -> tuple[str, str | None]:
        """What changes, and the first test that fails."""
        path = self.copy / change.module
        before = path.read_text(encoding="utf-8")
        operator = get_operator(change.operator)()
        after: Any = mutate_code(before, operator, change.occurrence)
        what = what_changed(before, after)
        most_test_s = NO_END_FACTOR * MOST_TEST_S
        if "numba" in before:
            most_test_s += COMPILATION_S
        while tests := judges(self.copy, change, self.tests):
            written = path.stat()
            path.write_text(after, encoding="utf-8")
            # the caches of bytecode and of numba tell contents apart by seconds and length
            seconds = zlib.crc32(after.encode())
            os.utime(path, (seconds, seconds))
            try:
                failed = self.failure(tests, most_test_s)
            finally:
                path.write_text(before, encoding="utf-8")
                os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
            if failed not in self.tests or failed in self.sound:
                return what, failed
            same = tests[: tests.index(failed) + 1]
            unsound = self.failure(same, most_test_s)
            if unsound not in self.tests:
                self.sound.add(failed)
                return what, failed
            print(f"without a change too: {unsound}", flush=True)
            del self.tests[unsound]
        return what, None


def judged(copy: Path, folder: str, keep: Path, given: argparse.Namespace) -> float:
    """Print a folder's survivors; return the share that was noticed."""
    tests = watched(copy, folder, keep)
    judge = Judge(copy, tests)
    found = drawn(copy, folder, given.seed)[given.skip :][: given.number]
    killed = endless = died = 0
    begun = time.monotonic()
    for change in found:
        what, failed = judge.verdict(change)
        survives = failed in (None, DIED)
        killed += not survives
        died += failed == DIED
        endless += failed is not None and failed.startswith(NO_END)
        if survives or given.verbose:
            print(f"{change.module}:{what}")
            print(f"    {failed or f'survives {len(judges(copy, change, tests))} tests'}", flush=True)  # fmt: skip
    each_s = (time.monotonic() - begun) / max(len(found), 1)
    print(
        f"{folder}, seed {given.seed}: {killed} of {len(found)} noticed, {endless} of them by coming to no end; "
        f"{died} not judged; {each_s:.1f} s each, by {len(tests)} tests",
        flush=True,
    )
    return killed / max(len(found), 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help=", ".join(FOLDERS))
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--skip", type=int, default=0, help="of the first changes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep",
        type=Path,
        default=ROOT / "build/mutants",
        metavar="DIR",
        help="the copy, and what its tests run",
    )
    parser.add_argument("--verbose", action="store_true", help="also what was noticed")
    given = parser.parse_args()
    if unknown := set(given.folders) - set(FOLDERS):
        parser.error(f"no folder {', '.join(unknown)}; there are {', '.join(FOLDERS)}")
    for name in OFTEN_IMPORTED.split():
        importlib.import_module(name)
    keep = given.keep.resolve()
    copy = keep / "tree"
    for path in copy.rglob("*.py"):
        if not (ROOT / path.relative_to(copy)).exists():
            path.unlink()
    ignored = shutil.ignore_patterns(*NOT_COPIED)
    shutil.copytree(ROOT, copy, ignore=ignored, dirs_exist_ok=True)
    chosen = given.folders or list(FOLDERS)
    shares = {folder: judged(copy, folder, keep, given) for folder in chosen}
    print("; ".join(f"{folder} {share:.0%}" for folder, share in shares.items()))
    return int(min(shares.values()) < LEAST_KILLED)


if __name__ == "__main__":
    sys.exit(main())
