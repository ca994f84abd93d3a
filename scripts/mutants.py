"""How much of perfmodel the proof watches: seeded mutants, each of which must move an answer or fail a test.

    python scripts/mutants.py                       240 mutants, with the survivors listed (make mutants)
    python scripts/mutants.py --number 40 --seed 7
    python scripts/mutants.py --only perfmodel/memory.py

A mutant changes one operator, comparison, constant, branch or minimum of one module. It is imported in a fork of a
process that holds numpy and scipy already, and answers the golden requests of scripts/proof_golden.py until a number
differs from the unchanged package's by more than 1e-12; one that moves none has the tests that name its module run
against it. Survivors are printed with their line; a reason is added by hand (results/LOG.md).
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import scipy.optimize
import scipy.special  # noqa: F401

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
PACKAGE = ROOT / "magicdec" / "perfmodel"
CPU_SECONDS = 200
TOLERANCE = 1e-12
MOST_REQUESTS = 60
MOVED, FAILED, LIVES, UNMOVED = 10, 11, 12, 13
OUTCOMES = {MOVED: "an answer", FAILED: "a test", LIVES: "survives"}
BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}  # fmt: skip
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
FUNCTIONS = {"minimum": "maximum", "maximum": "minimum", "ceil": "floor", "floor": "ceil", "min": "max", "max": "min"}
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
        if isinstance(node, UNWATCHED) and not (isinstance(node, ast.AnnAssign) and _is_number(node.value)):
            return node
        return super().visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        node.value = self.visit(node.value) if node.value is not None else None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.args.defaults = [self.visit(each) for each in node.args.defaults]
        node.args.kw_defaults = [each and self.visit(each) for each in node.args.kw_defaults]
        node.body = [self.visit(each) for each in node.body]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        other = BINARY.get(type(node.op))
        is_text = any(isinstance(each, ast.Constant | ast.JoinedStr) and not _is_number(each) for each in (node.left,))
        if other is None or is_text or not self._is_wanted(node, f"{type(node.op).__name__} -> {other.__name__}"):
            return node
        return ast.copy_location(ast.BinOp(node.left, other(), node.right), node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        for place, op in enumerate(node.ops):
            other = COMPARED.get(type(op))
            if getattr(node, "chooses_its_own_side", False) and type(op) in ORDERED:
                continue
            if other is not None and self._is_wanted(node, f"{type(op).__name__} -> {other.__name__}"):
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
            node.test.chooses_its_own_side = sides == {ast.dump(node.body), ast.dump(node.orelse)}  # type: ignore[attr-defined]
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
        if not _is_number(node) or not self._is_wanted(node, f"{node.value} -> {_other(node.value)}"):
            return node
        return ast.copy_location(ast.Constant(_other(node.value)), node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        other = FUNCTIONS.get(node.attr)
        of_numpy = isinstance(node.value, ast.Name) and node.value.id == "np"
        if of_numpy and other is not None and self._is_wanted(node, f"{node.attr} -> {other}"):
            node.attr = other
        return node


def _is_number(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)


def _other(value: float) -> float:
    return value + 1 if isinstance(value, int) else value * 2.0 if value else 1.0


def mutants(number: int, seed: int, only: str) -> list[Mutant]:
    """Drawn from all changes that perfmodel offers, each as likely."""
    offered: list[tuple[Path, int]] = []
    for path in sorted(PACKAGE.rglob("*.py")):
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


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a mutant's text."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.name = mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        where = ROOT / self.mutant.path
        is_package = where.name == "__init__.py"
        folders = [str(where.parent)] if is_package else None
        return importlib.util.spec_from_file_location(fullname, where, loader=self, submodule_search_locations=folders)

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.mutant.source, str(ROOT / self.mutant.path), "exec"), module.__dict__)


def forked(work: Any) -> int:
    """The exit status of `work` in a fork; one that takes too long, or dies, found the mutant."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    status = MOVED
    try:
        status = work()
    except BaseException:  # an import that fails, a crash: the mutant is found
        status = MOVED
    finally:
        os._exit(status)


def numbered_answer(number: int) -> dict[str, Any]:
    from proof_answers import answer
    from proof_golden import golden_requests

    with np.errstate(all="ignore"):
        return answer(golden_requests()[number])


def differs(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether any term moved; a message alone is no answer."""
    if before.keys() != after.keys():
        return True
    for term, values in before.items():
        if term == "refusal":
            continue
        others = after[term]
        if values == others:
            continue
        if len(values) != len(others) or any(isinstance(each, str) for each in (*values, *others)):
            return True
        old, new = (
            np.array([np.nan if each is None else each for each in side], dtype=float) for side in (values, others)
        )
        if not np.allclose(new, old, rtol=TOLERANCE, atol=0.0, equal_nan=True):
            return True
    return False


class Expected:
    """What the unchanged package answers, and which requests enter each function of perfmodel."""

    def __init__(self) -> None:
        from proof_golden import golden_requests

        self.answers: list[dict[str, Any]] = []
        self.taken_s: list[float] = []
        self.entered: dict[tuple[str, int], list[int]] = {}
        for number in range(len(golden_requests())):
            seen: set[tuple[str, int]] = set()

            def enter(frame: FrameType, event: str, argument: Any, seen: set[tuple[str, int]] = seen) -> None:
                if event == "call" and "/perfmodel/" in frame.f_code.co_filename:
                    seen.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

            begun = time.process_time()
            sys.setprofile(enter)
            self.answers.append(numbered_answer(number))
            sys.setprofile(None)
            self.taken_s.append(time.process_time() - begun)
            for place in seen:
                self.entered.setdefault(place, []).append(number)

    def requests(self, mutant: Mutant) -> list[int]:
        """Those that enter the function of a mutant, the quickest first; all, where it stands in none."""
        path = str(ROOT / mutant.path)
        functions = [
            (min([node.lineno, *(each.lineno for each in node.decorator_list)]), node.end_lineno or 0)
            for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef)
        ]
        around = [(first, last) for first, last in functions if first <= mutant.line <= last]
        if not around:
            return sorted(range(len(self.answers)), key=self.taken_s.__getitem__)
        first, last = max(around)
        within = {
            each
            for (name, line), places in self.entered.items()
            if name == path and first <= line <= last
            for each in places
        }
        return sorted(within, key=self.taken_s.__getitem__)


def judged(mutant: Mutant, expected: Expected) -> int:
    """In a fork: whether an answer moves, or a test fails."""
    sys.meta_path.insert(0, Finder(mutant))
    for number in expected.requests(mutant)[:MOST_REQUESTS]:
        if differs(expected.answers[number], numbered_answer(number)):
            return MOVED
    return UNMOVED


def tested(mutant: Mutant | None, test: Path) -> int:
    """In a fork: whether a test of this file fails with the mutant; None: with the package as it is."""
    import pytest

    if mutant is not None:
        sys.meta_path.insert(0, Finder(mutant))
    os.chdir(ROOT)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    return LIVES if pytest.main([*options, str(test)]) in (0, pytest.ExitCode.NO_TESTS_COLLECTED) else FAILED


def outcome(mutant: Mutant, expected: Expected, passing: dict[Path, bool]) -> str:
    """`passing`: whether a test file that failed with a mutant passes with the package as it is."""
    status = forked(lambda: judged(mutant, expected))
    if status != UNMOVED:
        return OUTCOMES[MOVED]
    stem = Path(mutant.path).stem
    for path in sorted((ROOT / "tests").rglob("test_*.py"), key=lambda path: path.stat().st_size):
        if not _watches(path, mutant, stem) or forked(lambda path=path: tested(mutant, path)) == LIVES:
            continue
        if path not in passing:
            passing[path] = forked(lambda path=path: tested(None, path)) == LIVES
        if passing[path]:
            return OUTCOMES[FAILED]
    return OUTCOMES[LIVES]


def _watches(test: Path, mutant: Mutant, stem: str) -> bool:
    """Whether a test imports something of the mutant's module, and is one of perfmodel's or near it."""
    if test.name == "test_golden.py" or test.parent.name not in ("perfmodel", "plan", "kernels", "validate", "tests"):
        return False
    text = test.read_text(encoding="utf-8")
    module = mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    parent, _, name = module.rpartition(".")
    return (
        f"{module} import" in text
        or (parent != "magicdec.perfmodel" and f"from {parent}." in text)  # a folder is tested by its uppermost module
        or (f"from {parent} import" in text and name in text)
        or test.stem == f"test_{stem}"
    )


def expected_answers(path: Path) -> None:
    """Written by a fork, so the package is not imported here."""

    def write() -> int:
        path.write_bytes(pickle.dumps(Expected()))
        return 0

    if forked(write):
        raise SystemExit("mutants: the unchanged package does not answer")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="PATH", help="mutants of files whose path holds this")
    given = parser.parse_args()
    sys.path[:0] = [str(SCRIPTS), str(ROOT)]
    found = mutants(given.number, given.seed, given.only)
    counts = dict.fromkeys(OUTCOMES.values(), 0)
    passing: dict[Path, bool] = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "expected")
        expected_answers(file)
        expected: Expected = pickle.loads(file.read_bytes())
        for number, mutant in enumerate(found):
            found_by = outcome(mutant, expected, passing)
            counts[found_by] += 1
            if found_by == OUTCOMES[LIVES]:
                text = (ROOT / mutant.path).read_text(encoding="utf-8").splitlines()[mutant.line - 1].strip()
                print(f"{mutant.path}:{mutant.line}: {mutant.what}: {text}", flush=True)
            if number % 20 == 19:
                print(f"  {number + 1} in {time.monotonic() - started:.0f} s: {counts}", flush=True)
    share = 1.0 - counts[OUTCOMES[LIVES]] / max(len(found), 1)
    print(f"{len(found)} mutants: {counts}; {share:.1%} found")
    return int(share < 0.95)


if __name__ == "__main__":
    sys.exit(main())
