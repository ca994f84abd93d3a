"""How much of perfmodel and validate/traffic.py the tests watch: seeded mutants, each of which must fail one.

    python scripts/mutants.py                       200 mutants, with the survivors listed (make mutants)
    python scripts/mutants.py --number 40 --seed 7
    python scripts/mutants.py --only perfmodel/memory.py --verbose
    python scripts/mutants.py --only traffic --tests traffic traces     judged by files of tests so named alone

A mutant changes one operator, comparison, constant, branch or minimum of one module. A fork of a process that has
imported everything else runs the tests that execute its line, golden answers among them: the quickest first, until one
fails that passes without the change, or until they have taken long enough. Which tests execute which lines is recorded
once per package and test file, and kept in the temporary folder. Survivors are printed with their line; a reason is
added by hand (results/LOG.md).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import hashlib
import importlib
import io
import os
import pickle
import pkgutil
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import SourceFileLoader
from itertools import accumulate
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "magicdec" / "perfmodel"
BESIDE = (ROOT / "magicdec" / "validate" / "traffic.py",)
"""Modules outside of perfmodel that are changed too."""
WATCHED = (str(PACKAGE), *map(str, BESIDE))
TRAFFIC = ("magicdec/perfmodel/rate/", "magicdec/validate/traffic.py")
"""Files that are reported by themselves."""
KEPT = Path(tempfile.gettempdir()) / f"magicdec-mutants-{os.getuid()}"
FOLDERS = ("perfmodel", "validate")
"""Folders whose tests judge, where they name perfmodel."""
MOST_SECONDS, BEYOND_SECONDS = 30.0, 10.0
"""Processor time of a mutant's tests, as recorded, and of one test beyond thrice that."""
MOST_BYTES = 6 << 30
OUTCOMES = ("a golden answer", "a test", "a crash", "survives")
BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}  # fmt: skip
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
FUNCTIONS = {
    "minimum": "maximum",
    "maximum": "minimum",
    "ceil": "floor",
    "floor": "ceil",
    "min": "max",
    "max": "min",
}
UNWATCHED = (ast.Raise, ast.Assert, ast.AnnAssign, ast.ImportFrom, ast.Import)
"""Statements without numbers of an answer: what a message says, types, imports; fields' defaults are watched."""


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    what: str
    source: str
    """The module's text with the change."""


class Mutation(ast.NodeTransformer):
    """Applies the `wanted`-th change that a module offers, or counts them. A comparison that chooses the larger or
    smaller of its own two sides is not changed: where they are equal, both are alike."""

    def __init__(self, wanted: int = -1) -> None:
        self.wanted, self.count, self.line, self.what = wanted, 0, 0, ""

    def _is_wanted(self, node: ast.AST, what: str) -> bool:
        self.count += 1
        if self.count - 1 != self.wanted:
            return False
        self.line, self.what = getattr(node, "lineno", 0), what
        return True

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, UNWATCHED) and not (
            isinstance(node, ast.AnnAssign) and _is_number(node.value)
        ):
            return node
        return super().visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        node.value = self.visit(node.value) if node.value is not None else None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.args.defaults = [self.visit(each) for each in node.args.defaults]
        node.args.kw_defaults = [
            each and self.visit(each) for each in node.args.kw_defaults
        ]
        node.body = [self.visit(each) for each in node.body]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        other = BINARY.get(type(node.op))
        is_text = any(
            isinstance(each, ast.Constant | ast.JoinedStr) and not _is_number(each)
            for each in (node.left,)
        )
        if (
            other is None
            or is_text
            or not self._is_wanted(
                node, f"{type(node.op).__name__} -> {other.__name__}"
            )
        ):
            return node
        return ast.copy_location(ast.BinOp(node.left, other(), node.right), node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        for place, op in enumerate(node.ops):
            other = COMPARED.get(type(op))
            if getattr(node, "chooses_its_own_side", False) and type(op) in ORDERED:
                continue
            if other is not None and self._is_wanted(
                node, f"{type(op).__name__} -> {other.__name__}"
            ):
                node.ops[place] = other()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        other = ast.And if isinstance(node.op, ast.Or) else ast.Or
        if self._is_wanted(node, f"{type(node.op).__name__} -> {other.__name__}"):
            node.op = other()
        return node

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        if (
            isinstance(node.test, ast.Compare) and len(node.test.ops) == 1
        ):  # x if x > 0 else 0: alike where they are equal
            sides = {ast.dump(node.test.left), ast.dump(node.test.comparators[0])}
            node.test.chooses_its_own_side = sides == {
                ast.dump(node.body),
                ast.dump(node.orelse),
            }  # type: ignore[attr-defined]
        self.generic_visit(node)
        if self._is_wanted(node, "the other branch"):
            node.body, node.orelse = node.orelse, node.body
        return node

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if self._is_wanted(node, "the other branch"):
            node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        return node

    def visit_Constant(self, node: ast.Constant) -> Any:
        if not _is_number(node) or not self._is_wanted(
            node, f"{node.value} -> {_other(node.value)}"
        ):
            return node
        return ast.copy_location(ast.Constant(_other(node.value)), node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        other = FUNCTIONS.get(node.attr)
        of_numpy = isinstance(node.value, ast.Name) and node.value.id == "np"
        if (
            of_numpy
            and other is not None
            and self._is_wanted(node, f"{node.attr} -> {other}")
        ):
            node.attr = other
        return node


def _is_number(node: ast.AST | None) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    )


def _other(value: float) -> float:
    return value + 1 if isinstance(value, int) else value * 2.0 if value else 1.0


def mutants(number: int, seed: int, only: str) -> list[Mutant]:
    """Drawn from all changes that perfmodel offers, each as likely."""
    offered: list[tuple[Path, int]] = []
    for path in [*sorted(PACKAGE.rglob("*.py")), *BESIDE]:
        if only in str(path):
            counter = Mutation()
            counter.visit(ast.parse(path.read_text(encoding="utf-8")))
            offered += [(path, place) for place in range(counter.count)]
    chosen = random.Random(seed).sample(offered, min(number, len(offered)))
    print(f"{len(chosen)} of {len(offered)} mutants", flush=True)
    return [_mutant(path, place) for path, place in chosen]


def _mutant(path: Path, place: int) -> Mutant:
    mutation = Mutation(place)
    changed = mutation.visit(ast.parse(path.read_text(encoding="utf-8")))
    text = ast.unparse(ast.fix_missing_locations(changed))
    return Mutant(str(path.relative_to(ROOT)), mutation.line, mutation.what, text)


def spans_around(mutant: Mutant) -> list[range]:
    """Lines of the statements around a mutant, the innermost first (of a compound one the head, then all), and all."""
    text = (ROOT / mutant.path).read_text(encoding="utf-8")
    found = [range(1, text.count("\n") + 2)]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            found.append(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            if body := getattr(node, "body", None):
                found.append(range(node.lineno, max(node.lineno + 1, body[0].lineno)))
    return sorted((each for each in found if mutant.line in each), key=len)


def install(mutant: Mutant) -> None:
    """Has one module imported from a mutant's text."""
    path, get_code = str(ROOT / mutant.path), SourceFileLoader.get_code

    def changed(self: SourceFileLoader, fullname: str) -> CodeType | None:
        return (
            compile(mutant.source, path, "exec")
            if self.path == path
            else get_code(self, fullname)
        )

    SourceFileLoader.get_code = changed  # type: ignore[method-assign]


def forked(work: Callable[[], Any]) -> Any:
    """What `work` returns in a fork; None, where it dies or takes too long."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "said")
        if not (child := os.fork()):
            try:
                resource.setrlimit(
                    resource.RLIMIT_DATA, (MOST_BYTES, resource.RLIM_INFINITY)
                )
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                file.write_bytes(pickle.dumps(work()))
            except BaseException as error:
                print(f"  {type(error).__name__}: {error}", file=sys.stderr)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return pickle.loads(file.read_bytes()) if file.exists() else None


def run_tests(names: list[str], plugin: object, *options: str) -> None:
    pytest.main(
        ["-q", "--tb=no", "-p", "no:cacheprovider", *options, *names], plugins=[plugin]
    )


Lines = set[tuple[str, int]]


@dataclass
class Recorded:
    """Tests of one file that pass, by name: how long each takes, and which of them execute a line of perfmodel."""

    seconds: dict[str, float] = field(default_factory=dict)
    executed: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    before: Lines = field(default_factory=set)
    """Lines that run before any of them: at import or collection, in fixtures."""

    def around(self, path: str, spans: list[range]) -> list[tuple[int, float, str]]:
        """Tests in the order in which to run them: those that execute the innermost span; where it runs before any
        test, also the others, those near it first. A golden answer is worth a few tests."""
        runs_before = any((path, line) in self.before for line in spans[0])
        ranks: dict[str, int] = {}
        for rank, span in enumerate(spans if runs_before else spans[:1]):
            for line in span:
                for name in self.executed.get((path, line), ()):
                    ranks.setdefault(name, rank)
        ranks = {
            name: ranks.get(name, len(spans))
            for name in (self.seconds if runs_before else ranks)
        }
        return [
            (rank, self.seconds[name] / (1 + 3 * ("test_golden" in name)), name)
            for name, rank in ranks.items()
        ]


class Recorder:
    """A plugin of pytest that traces which lines of perfmodel run in which test."""

    def __init__(self) -> None:
        self.lines: Lines = set()
        self.found = Recorded()

    def call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self.line if frame.f_code.co_filename.startswith(WATCHED) else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self.line

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        empty_caches()
        before, self.lines, begun = self.lines, set(), time.process_time()
        called = yield
        if called.excinfo is None:
            self.found.seconds[item.nodeid] = time.process_time() - begun
            for line in self.lines:
                self.found.executed.setdefault(line, []).append(item.nodeid)
        self.lines = before


def empty_caches() -> None:
    """Of perfmodel, so whichever test needs a value works it out."""
    for name in [each for each in sys.modules if each.startswith("magicdec.perfmodel")]:
        for value in vars(sys.modules[name]).values():
            if hasattr(value, "cache_clear") and value.__module__.startswith(
                "magicdec.perfmodel"
            ):
                value.cache_clear()


def recorded(file: str) -> Recorded:
    recorder = Recorder()
    sys.settrace(recorder.call)
    for each in pkgutil.walk_packages([str(PACKAGE)], "magicdec.perfmodel."):
        importlib.import_module(each.name)
    importlib.import_module("magicdec.validate.traffic")
    run_tests([file], recorder)
    sys.settrace(None)
    recorder.found.before = recorder.lines
    return recorder.found


def failing(names: list[str], seconds: dict[str, float]) -> str:
    """The first of these tests that fails, or a file that cannot be collected; "" where all pass."""
    failed: list[str] = []

    class Plugin:
        def pytest_runtest_setup(self, item: pytest.Item) -> None:
            most = time.process_time() + BEYOND_SECONDS + 3.0 * seconds[item.nodeid]
            resource.setrlimit(resource.RLIMIT_CPU, (int(most), resource.RLIM_INFINITY))

        def pytest_runtest_logreport(self, report: Any) -> None:
            failed.extend([report.nodeid] * report.failed)

        pytest_collectreport = pytest_runtest_logreport

    run_tests(names, Plugin(), "-x")
    return failed[0] if failed else ""


class Judge:
    """Runs mutants' tests."""

    def __init__(self, files: list[str]) -> None:
        sources = sorted(
            [*PACKAGE.parent.rglob("*.py"), *PACKAGE.parent.rglob("*.toml")]
        )
        package = hashlib.sha256(
            b"".join(each.read_bytes() for each in sources)
        ).digest()
        self.files = []
        for file in files:
            kept = (
                KEPT
                / f"{hashlib.sha256(package + (ROOT / file).read_bytes()).hexdigest()[:24]}.pickle"
            )
            if not kept.exists():
                KEPT.mkdir(exist_ok=True)
                if (found := forked(partial(recorded, file))) is None:
                    raise SystemExit(f"mutants: {file} did not run to its end")
                kept.write_bytes(pickle.dumps(found))
            self.files.append(pickle.loads(kept.read_bytes()))
        self.seconds = {
            name: seconds
            for file in self.files
            for name, seconds in file.seconds.items()
        }
        self.passes: dict[str, bool] = {}

    def outcome(self, mutant: Mutant) -> tuple[str, str]:
        """How a mutant is noticed, and by which test."""
        path, spans = str(ROOT / mutant.path), spans_around(mutant)
        near = sorted(each for file in self.files for each in file.around(path, spans))
        total = accumulate(self.seconds[name] for _, _, name in near)
        names = [
            name
            for (_, _, name), until in zip(near, total, strict=True)
            if until <= MOST_SECONDS
        ]
        names = [name for name in names if self.passes.get(name, True)]

        def judged() -> str:
            install(mutant)
            return failing(names, self.seconds) if names else ""

        while found := forked(judged):
            if found not in self.seconds or self._passes(found):
                return "a golden answer" if "test_golden" in found else "a test", found
            names.remove(found)
        return (
            ("a crash", "")
            if found is None
            else ("survives", f"{len(names)} of {len(near)} tests")
        )

    def _passes(self, name: str) -> bool:
        """Whether a test that fails with a mutant passes without it, by itself."""
        if name not in self.passes:
            self.passes[name] = forked(lambda: failing([name], self.seconds)) == ""
        return self.passes[name]


def warmed_up(named: list[str]) -> list[str]:
    """The files of tests, of those whose name holds any of `named`; with every module that they need imported but the
    repository's own."""
    hypothesis.settings.register_profile(
        "mutants", derandomize=True, deadline=None, database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )  # fmt: skip
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    files = [
        str(each.relative_to(ROOT))
        for folder in FOLDERS
        for each in sorted((ROOT / "tests" / folder).glob("test_*.py"))
        if "perfmodel" in (text := each.read_text(encoding="utf-8"))
        or "proof_golden" in text
        if not named or any(part in each.name for part in named)
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        run_tests(files, object(), "--collect-only")
    for name, module in list(sys.modules.items()):
        where = str(getattr(module, "__file__", None))
        if where.startswith(
            (f"{ROOT}/magicdec/", f"{ROOT}/tests/", f"{ROOT}/scripts/proof")
        ):
            del sys.modules[name]
    gc.freeze()
    return files


def cpu_seconds() -> float:
    return sum(
        sum(resource.getrusage(who)[:2])
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only",
        default="",
        metavar="PATH",
        help="mutants of files whose path holds this",
    )
    parser.add_argument(
        "--tests",
        nargs="*",
        default=[],
        metavar="PART",
        help="judge by test files so named alone",
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="also which test notices each of the others",
    )
    given = parser.parse_args()
    found = mutants(given.number, given.seed, given.only)
    counts = dict.fromkeys(OUTCOMES, 0)
    of_traffic = dict.fromkeys(OUTCOMES, 0)
    judge, ready_s = Judge(warmed_up(given.tests)), cpu_seconds()
    print(
        f"{len(judge.seconds)} tests; ready in {ready_s:.0f} s of processor time",
        flush=True,
    )
    for number, mutant in enumerate(found, 1):
        kind, by = judge.outcome(mutant)
        counts[kind] += 1
        if mutant.path.startswith(TRAFFIC):
            of_traffic[kind] += 1
        if given.verbose or kind == "survives":
            text = (
                (ROOT / mutant.path)
                .read_text(encoding="utf-8")
                .splitlines()[mutant.line - 1]
                .strip()
            )
            print(
                f"{mutant.path}:{mutant.line}: {mutant.what}: {text}\n    {kind} ({by})",
                flush=True,
            )
        if number % 20 == 0 or number == len(found):
            each_s = (cpu_seconds() - ready_s) / number
            print(
                f"  {number}: {counts}; {each_s:.1f} s of processor time each",
                flush=True,
            )
    share = 1.0 - counts["survives"] / max(len(found), 1)
    print(f"{len(found)} mutants: {share:.1%} found")
    number = sum(of_traffic.values())
    if number:
        share_of_traffic = 1.0 - of_traffic["survives"] / number
        print(f"of {' and '.join(TRAFFIC)} {number}: {share_of_traffic:.1%} found")
    return int(share < 0.95)


if __name__ == "__main__":
    sys.exit(main())
