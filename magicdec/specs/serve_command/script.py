"""Python that starts an engine, by its syntax: `LLM(…)`, `AsyncEngineArgs(…)`, `sgl.Engine(…)`,
`LLMConfig(…)`, and commands handed to a process.

Nothing is run. The module's plain assignments of literals and names are followed, and of several the
last counts. A name that anything else sets or changes, as a condition, a loop, a function or a method,
is open in the whole text, and so is what only a run computes.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from magicdec.errors import ConfigError
from magicdec.redaction import HIDDEN
from magicdec.specs.serve_command.manifest import start_of_llm_config
from magicdec.specs.serve_command.shell import Shell
from magicdec.specs.serve_command.start import (
    INSTALLED,
    MARKED,
    MOST_STARTS,
    OPEN,
    Given,
    Start,
    json_of,
    text_of,
    words_of,
)
from magicdec.specs.serve_command.variables import Variables
from magicdec.units import MOST_BITS

ENGINES = {
    "LLM": "vllm",
    "EngineArgs": "vllm",
    "AsyncEngineArgs": "vllm",
    "Engine": "sglang",
    "ServerArgs": "sglang",
    "Runtime": "sglang",
    "LLMConfig": "vllm",
}
"""Calls that make an engine."""
RUNS = frozenset(
    ("Popen", "run", "call", "check_call", "check_output", "system", "exec", "execvp")
)
LOOKS = re.compile(
    # no \s before them: of many empty lines each would be read to the last
    r"^[ \t]*(?:import|from)\s+\w|^[ \t]*[\w.]*\b(?:LLM|EngineArgs|Engine|LLMConfig)\s*\(",
    re.M,
)
MOST_PYTHON = 250_000
ENVIRONMENT = ("os.environ.get", "os.getenv", "getenv", "environ.get")
CHANGES = frozenset(
    (
        *("append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse"),
        *("update", "setdefault", "popitem", "__setitem__"),
    )
)
"""Methods that change a list or a dict."""
SHARES = (ast.Name, ast.List, ast.Tuple, ast.Dict)
"""Values that may hold a list or a dict of another name."""
EXITS = ("sys.exit", "exit", "quit", "os._exit")
CONFIG_METHODS = {
    "Eagle3DecodingConfig": "eagle3",
    "EagleDecodingConfig": "eagle3",
    "MTPDecodingConfig": "mtp",
    "NGramDecodingConfig": "ngram",
    "DraftTargetDecodingConfig": "draft_target",
    "MedusaDecodingConfig": "medusa",
    "LookaheadDecodingConfig": "lookahead",
    "AutoDecodingConfig": "auto",
    "SADecodingConfig": "suffix",
    "PARDDecodingConfig": "pard",
}
"""TensorRT-LLM's configurations of speculation."""


def starts_of_python(given: Given) -> list[Start]:
    """The engines that a Python text starts; empty: it is no Python, or starts none."""
    if not LOOKS.search(given.text) or len(given.text) > MOST_PYTHON:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(given.text.replace(HIDDEN, "..."))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    reader = _Reader(given)
    try:
        reader.module(tree)
    except RecursionError:
        raise ConfigError("the script nests too deep") from None
    for start in reader.starts:
        start.version = start.version or reader.version
    return reader.starts


class _Reader:
    def __init__(self, given: Given) -> None:
        self.given = given
        self.names = Variables(given)
        self.changed: set[str] = set()
        """Names, attributes and elements that something changes in place."""
        self.arguments: dict[str, ast.expr | None] = {}
        """Defaults of the command line's options; None: there are two."""
        self.modules: dict[str, str] = {}
        self.starts: list[Start] = []
        self.environment: dict[str, str] = {}
        """Variables that the module plainly sets for what it starts."""
        self.version: str | None = None

    def module(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            self._declaration(node)
        statements = list(_body(tree.body))
        self._leave_open_what_changes(statements)
        for place, statement in enumerate(statements):
            doubt = _where(statement)
            if doubt.startswith("in the "):
                continue
            self._engines(statement, doubt)
            for name, value in _assignments(statement):
                found = self._value(value)
                self.names.leave_computed(name, found)
                self.names.set(name, found)
            for variable, value in _exported(statement):
                name = text_of(self._value(variable))
                self.environment[name] = text_of(self._value(value))
            if _exits(statement):
                del statements[place:]
                break
        if self.starts:
            return
        for name in self.names.several:
            self.names.leave_open(name, "is set to several values")
        for statement in statements:
            self._engines(statement, _where(statement))

    def _declaration(self, node: ast.AST) -> None:
        """An import, a requirement, an option of the command line."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            installed = INSTALLED.search(node.value[:200])
            self.version = installed[1] if installed is not None else self.version
        elif isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                module = alias.name
                if isinstance(node, ast.ImportFrom):
                    module = node.module or ""
                self.modules[alias.asname or alias.name] = module
        elif isinstance(node, ast.Call) and _called(node).endswith(".add_argument"):
            flag = node.args[-1] if node.args else None
            for keyword in node.keywords:
                if isinstance(flag, ast.Constant) and keyword.arg == "default":
                    name = str(flag.value).lstrip("-").replace("-", "_")
                    is_second = name in self.arguments
                    self.arguments[name] = None if is_second else keyword.value

    # Names

    def _leave_open_what_changes(self, statements: Sequence[ast.stmt]) -> None:
        """Leaves names open that something but the module's plain assignments sets or changes."""
        shared: dict[str, set[str]] = {}
        """Names whose lists and dicts a name may hold."""
        for statement in statements:
            line = f"(line {statement.lineno})"
            where = _where(statement)
            plain = dict(_assignments(statement))
            for name, kind in _changes(statement):
                if kind == "sets" and name in plain:
                    continue
                why = f"is set {where}" if where else f"is not plainly set {line}"
                if kind == "takes":
                    owner = getattr(statement, "name", "a function")
                    why = f"is an argument of {owner} {line}"
                elif kind == "changes":
                    self.changed.add(name)
                self.names.leave_open(name, why)
            for name, value in plain.items():
                if isinstance(value, SHARES):
                    inner = [
                        node.id
                        for node in ast.walk(value)
                        if isinstance(node, ast.Name)
                    ]
                    shared.setdefault(name, set()).update(inner, plain)
        changed = list(self.changed)
        while changed:
            name = changed.pop()
            for other in shared.pop(name, ()):
                self.names.leave_open(other, self.names.open[name])
                changed.append(other)

    def _lookup(self, name: str, node: ast.expr) -> Any:
        """A name's value, or the mark of one that is open."""
        if name in self.names:
            return self.names.find(name)
        why = f"is set nowhere in this file (line {node.lineno})"
        return self.given.left_open(f"${name}", why)

    # Starts

    def _engines(self, statement: ast.stmt, doubt: str) -> None:
        calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
            start = self._start(call)
            if start is not None and len(self.starts) < MOST_STARTS:
                start.doubt = start.doubt or doubt
                start.environment = self.environment | start.environment
                self.starts.append(start)

    def _start(self, call: ast.Call) -> Start | None:
        owner, _, last = _called(call).rpartition(".")
        if last in RUNS and call.args:
            return self._process(call)
        engine = ENGINES.get(last)
        module = self.modules.get(last) or self.modules.get(owner) or owner
        if engine is None or (engine == "sglang" and "sgl" not in module):
            return None  # other libraries have an Engine too
        if "tensorrt_llm" in module:
            engine = "trtllm"
        options = self._keywords(call)
        if last == "LLMConfig":
            is_served = {"engine_kwargs", "model_loading_config"} & set(options)
            return start_of_llm_config(options) if is_served else None
        words = [text_of(value) for value in map(self._value, call.args[:1])]
        if not words and not {"model", "model_path", "model_tag"} & set(options):
            return None
        return Start(engine=engine, words=[*words, *words_of(options)])

    def _keywords(self, call: ast.Call) -> dict[str, Any]:
        options: dict[str, Any] = {}
        for keyword in call.keywords:
            _put(options, keyword.arg or "", self._value(keyword.value))
        return options

    def _process(self, call: ast.Call) -> Start | None:
        """A command that is handed to a process, as words or as a shell's text."""
        command = self._value(call.args[0])
        shell = Shell(self.given, first_line=call.lineno)
        if isinstance(command, list):
            shell.command([text_of(word) for word in command])
        elif isinstance(command, str) and MARKED.fullmatch(command):
            shell.command([command])
        elif isinstance(command, str):
            shell.run(command)
        return shell.starts[0] if shell.starts else None

    # Values

    def _value(self, node: ast.expr) -> Any:
        """A value where the text writes it; the mark of an open reference where not."""
        if isinstance(node, ast.Constant):
            value = node.value
            is_long = isinstance(value, int) and value.bit_length() > MOST_BITS
            return self._computed(node) if is_long else value
        if isinstance(node, ast.Name):
            return self._lookup(node.id, node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(item) for item in node.elts]
        if isinstance(node, ast.Dict):
            values: dict[str, Any] = {}
            for key, item in zip(node.keys, node.values, strict=True):
                name = "" if key is None else text_of(self._value(key))
                _put(values, name, self._value(item))
            return values
        if isinstance(node, ast.JoinedStr):
            texts = []
            for part in node.values:
                inner = part
                if isinstance(part, ast.FormattedValue) and not part.format_spec:
                    inner = part.value
                texts.append(text_of(self._value(inner)))
            return "".join(texts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._value(node.operand)
            return -value if isinstance(value, int | float) else self._computed(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        return self._computed(node)

    def _computed(self, node: ast.expr) -> str:
        why = f"is computed when the script runs (line {node.lineno})"
        return self.given.left_open(f"${_written(node)}", why)

    def _attribute(self, node: ast.Attribute) -> Any:
        if node.attr in self.given.values:
            return self.given.values[node.attr]
        default = self.arguments.get(node.attr)
        if default is not None and _written(node) not in self.names.open:
            return self._value(default)
        if _root(node) in self.modules:
            return node.attr  # a member of an enumeration, a type
        return self._lookup(node.attr, node)

    def _call(self, node: ast.Call) -> Any:
        name = _called(node)
        last = name.rpartition(".")[2]
        first = node.args[0] if node.args else None
        if name in ENVIRONMENT and first is not None:
            return self._environment(self._value(first), node.args[1:], node)
        if (
            name in ("str", "int", "float")
            and first is not None
            and len(node.args) == 1
        ):
            return self._value(first)
        if last in CONFIG_METHODS:
            return self._keywords(node) | {"decoding_type": CONFIG_METHODS[last]}
        if name == "dict" or re.search(r"(?:Config|Args)$", last):
            return self._keywords(node)
        if last == "dumps" and first is not None:
            return json_of(self._value(first))
        if isinstance(node.func, ast.Attribute) and last in ("split", "join"):
            owner = " " if name == "shlex.join" else self._value(node.func.value)
            if last == "split" and first is None and OPEN not in text_of(owner):
                return text_of(owner).split()
            items = self._value(first) if last == "join" and first is not None else None
            is_given = isinstance(first, ast.Name) and first.id in self.given.values
            if is_given or (isinstance(items, str) and MARKED.fullmatch(items)):
                return items
            if isinstance(items, list) and isinstance(owner, str):
                return owner.join(map(text_of, items))
        return self._computed(node)

    def _environment(
        self, name: Any, default: Sequence[ast.expr], node: ast.expr
    ) -> Any:
        """A variable of the environment: one that the text does not set has its default."""
        if text_of(name) in self.given.values:
            return self.given.values[text_of(name)]
        written = f"os.environ[{text_of(name)!r}]"
        if {written, "os.environ", "environ"} & self.changed:
            return self._computed(node)
        if default:
            return self._value(default[0])
        why = f"is set nowhere in this file (line {node.lineno})"
        return self.given.left_open(f"${text_of(name)}", why)

    def _subscript(self, node: ast.Subscript) -> Any:
        key = self._value(node.slice)
        if _written(node.value) in ("os.environ", "environ"):
            return self._environment(key, (), node)
        owner = self._value(node.value)
        if isinstance(owner, Mapping) and isinstance(key, str) and key in owner:
            return owner[key]
        is_place = isinstance(key, int) and not isinstance(key, bool)
        if isinstance(owner, list) and is_place and -len(owner) <= key < len(owner):
            return owner[key]
        return self._computed(node)


def _body(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """A module's statements, those of `if __name__ == "__main__"` among them."""
    for statement in statements:
        test = statement.test if isinstance(statement, ast.If) else None
        if (
            isinstance(statement, ast.If)
            and isinstance(test, ast.Compare)
            and isinstance(test.left, ast.Name)
            and test.left.id == "__name__"
            and isinstance(test.ops[0], ast.Eq)
        ):
            yield from statement.body
        else:
            yield statement


def _where(statement: ast.stmt) -> str:
    """Where a statement's parts stand, if they may not run; empty: it is a simple one."""
    line = f"(line {statement.lineno})"
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"in the function {statement.name} {line}"
    if isinstance(statement, ast.ClassDef):
        return f"in the class {statement.name} {line}"
    if isinstance(statement, ast.For | ast.AsyncFor | ast.While):
        return f"in a loop {line}"
    if isinstance(statement, ast.With | ast.AsyncWith):
        return f"in a block {line}"
    if isinstance(statement, ast.If | ast.Try | ast.TryStar | ast.Match):
        return f"under a condition {line}"
    return ""


def _exported(statement: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Names and values of os.environ[...] = ..., at the module's own level."""
    if isinstance(statement, ast.Assign):
        elements = [
            target for target in statement.targets if isinstance(target, ast.Subscript)
        ]
        for element in elements:
            if _written(element.value) in ("os.environ", "environ"):
                yield element.slice, statement.value


def _assignments(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """The names that a plain assignment sets, with their values."""
    targets: list[ast.expr] = []
    value = None
    if isinstance(statement, ast.Assign):
        targets = statement.targets
        value = statement.value
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
        value = statement.value
    for target in targets:
        if isinstance(target, ast.Name) and value is not None:
            yield target.id, value
        elif (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            for item, each in zip(target.elts, value.elts, strict=True):
                if isinstance(item, ast.Name):
                    yield item.id, each


def _changes(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """Names that a statement "sets", "takes" as arguments, or whose lists and dicts it "changes"."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id, "sets"
        elif isinstance(node, ast.Attribute | ast.Subscript):
            if not isinstance(node.ctx, ast.Load):
                yield _root(node), "changes"
                yield _written(node), "changes"
        elif isinstance(node, ast.AugAssign):
            yield _root(node.target), "changes"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in CHANGES:
                yield _root(node.func), "changes"
                yield _written(node.func.value), "changes"
        elif isinstance(node, ast.arg):
            yield node.arg, "takes"
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            yield node.name or "", "sets"
        elif isinstance(node, ast.MatchMapping):
            yield node.rest or "", "sets"
        elif isinstance(node, ast.alias):
            yield node.asname or node.name, "sets"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, "sets"


def _exits(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return _called(statement.value) in EXITS
    return isinstance(statement, ast.Raise)


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    """Adds an option, or those of a mapping that is put in by **."""
    if name or not isinstance(value, Mapping):
        values[name] = value
    else:
        values |= value


def _root(node: ast.expr) -> str:
    """The name at the head of an attribute or a subscript; empty: it has none."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _written(node: ast.expr) -> str:
    """An expression's text, or (…) for one that cannot be written out, which no value has as its
    name."""
    try:
        return ast.unparse(node)
    except (ValueError, RecursionError):  # a number of too many digits, too deep
        return "(…)"


def _called(call: ast.Call) -> str:
    """The dotted name that is called; empty: another expression."""
    parts: list[str] = []
    node = call.func
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return ".".join(reversed(parts))
