"""The shape of the code: one thought per line, short functions, test files that pytest can tell
apart.

Limits follow well-kept packages: httpx, click, hypothesis have 3.6 to 4.0 syntax nodes per line of
code, scipy.optimize 5.0.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "magicdec"
KERNELS = {"runtime/kernels", "vllm/page_kernels.py", "suffix_tree.py"}
"""Code for compilers (numba, Triton), which take no smaller pieces."""
TOP_LEVEL = "."
"""Files of the package outside folders."""
MOST_NODES_PER_LINE = 5.6
MOST_PACKED_PER_1000_LINES = 2.0
MOST_BRANCHES_IN_EXPRESSIONS = 0.58
TIGHTER_NODES_PER_LINE = {
    TOP_LEVEL: 5.0,
    "atlas": 5.0,
    "calibrate": 4.5,
    "commands": 4.3,
    "explore": 5.0,
    "live": 4.7,
    "logs": 5.0,
    "measure": 4.6,
    "perfmodel": 5.0,
    "reports": 5.02,
    "runtime": 5.0,
    "specs": 4.85,
    "validate": 5.0,
    "vllm": 4.2,
}
TIGHTER_IN_EXPRESSIONS = {
    TOP_LEVEL: 0.38,
    "atlas": 0.40,
    "calibrate": 0.40,
    "commands": 0.40,
    "explore": 0.40,
    "live": 0.40,
    "logs": 0.40,
    "measure": 0.36,
    "perfmodel": 0.40,
    "reports": 0.36,
    "runtime": 0.30,
    "specs": 0.40,
    "validate": 0.38,
    "vllm": 0.38,
}
"""Limits of the folders that have reached them, or come near."""
MOST_COLUMNS = 100
WITHIN_COLUMNS = (
    "calibrate",
    "commands",
    "live",
    "measure",
    "runtime",
    "specs",
    "validate",
    "vllm",
)
"""Folders without a longer line, their docstrings and messages included."""
MOST_BRANCHES = 12
MOST_FUNCTIONS_ABOVE = 10
MOST_BRANCHES_OF_ANY = 20
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
FOLDERS = sorted(
    path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()
)


def sources(folder: str = "") -> Iterator[Path]:
    """The package's files outside kernels: those of one folder, of the top level, or all."""
    found = (PACKAGE / folder).rglob("*.py")
    if folder == TOP_LEVEL:
        found = PACKAGE.glob("*.py")
    for path in sorted(found):
        inside = path.relative_to(PACKAGE).as_posix()
        if not any(inside.startswith(kernel) for kernel in KERNELS):
            yield path


def code_lines(source: str, tree: ast.Module) -> int:
    """The number of lines that hold code other than docstrings and comments."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def branches(tree: ast.AST) -> tuple[int, int]:
    """Branches that are statements, and branches inside expressions."""
    statements = 0
    expressions = 0
    for node in ast.walk(tree):
        if isinstance(
            node, ast.If | ast.For | ast.While | ast.ExceptHandler | ast.match_case
        ):
            statements += 1
        elif isinstance(node, ast.IfExp):
            expressions += 1
        elif isinstance(node, ast.comprehension):
            expressions += 1 + len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            expressions += len(node.values) - 1
    return statements, expressions


def is_packed(node: ast.AST) -> bool:
    """Whether a tuple of names is assigned two or more computed values."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    if not isinstance(node.targets[0], ast.Tuple):
        return False
    plain = ast.Name | ast.Constant | ast.Attribute
    return sum(not isinstance(value, plain) for value in node.value.elts) >= 2


def functions(
    trees: Iterable[ast.Module],
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def test_each_test_file_has_a_name_of_its_own() -> None:
    """pytest imports them by name: of two with one name, all would be refused."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("folder", [TOP_LEVEL, *FOLDERS])
def test_code_is_not_packed(folder: str) -> None:
    lines = 0
    nodes = 0
    packed = 0
    in_statements = 0
    in_expressions = 0
    for path in sources(folder):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        lines += code_lines(source, tree)
        nodes += sum(isinstance(node, ast.expr | ast.stmt) for node in ast.walk(tree))
        packed += sum(is_packed(node) for node in ast.walk(tree))
        statements, expressions = branches(tree)
        in_statements += statements
        in_expressions += expressions
    assert nodes <= TIGHTER_NODES_PER_LINE.get(folder, MOST_NODES_PER_LINE) * max(
        lines, 1
    )
    assert packed <= MOST_PACKED_PER_1000_LINES * lines / 1000.0
    most_inside = TIGHTER_IN_EXPRESSIONS.get(folder, MOST_BRANCHES_IN_EXPRESSIONS)
    assert in_expressions <= most_inside * (in_statements + in_expressions)


@pytest.mark.parametrize("folder", WITHIN_COLUMNS)
def test_lines_are_short(folder: str) -> None:
    long = []
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if len(line) > MOST_COLUMNS:
                long.append(f"{path.relative_to(ROOT)}:{number}")
    assert long == []


def test_lines_of_code_are_short() -> None:
    """Tables at module level and formulas in docstrings may be wider."""
    wide = []
    for path in sources():
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        free: set[int] = set()
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                free.update(range(node.lineno, node.end_lineno + 1))
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                free.update(range(node.lineno, node.end_lineno + 1))
        for number, line in enumerate(source.splitlines(), 1):
            if len(line) > MOST_COLUMNS and number not in free:
                wide.append(f"{path.relative_to(ROOT)}:{number}")
    assert wide == []


def test_few_functions_branch_much() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sources()]
    above = [
        each.name
        for each in functions(trees)
        if sum(branches(each)) + 1 > MOST_BRANCHES
    ]
    assert len(above) <= MOST_FUNCTIONS_ABOVE, above
    widest = max(functions(trees), key=lambda function: sum(branches(function)))
    assert sum(branches(widest)) + 1 <= MOST_BRANCHES_OF_ANY, widest.name


def test_the_formatter_is_left_out_of_tables_alone() -> None:
    outside = []
    for path in sources():
        source = path.read_text(encoding="utf-8")
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
