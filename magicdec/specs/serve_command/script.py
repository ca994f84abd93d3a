"""Python that starts an engine, by its syntax: `LLM(…)`, `AsyncEngineArgs(…)`, `sgl.Engine(…)`,
`LLMConfig(…)`, and commands handed to a process.

Nothing is run. Statements are read in their order: plain assignments of constants, f-strings, dict and
list displays are followed, and of several the last counts. A name that a condition, a loop, a function
or anything but a plain assignment sets is open, and so is what only a run computes.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from magicdec.errors import ConfigError
from magicdec.specs.serve_command.manifest import start_of_llm_config
from magicdec.specs.serve_command.shell import Shell
from magicdec.specs.serve_command.start import (
    INSTALLED,
    MARKED,
    MOST_BITS,
    MOST_STARTS,
    OPEN,
    Given,
    Start,
    json_of,
    text_of,
    words_of,
)

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
MOST_SCRIPT_DEPTH = 60
MOST_SCRIPT_STEPS = 20_000
MOST_SCRIPT_VALUE = 50_000
MOST_PYTHON = 250_000
ENVIRONMENT = ("os.environ.get", "os.getenv", "getenv", "environ.get")
CHANGES = (
    "append",
    "extend",
    "update",
    "insert",
    "pop",
    "remove",
    "clear",
    "setdefault",
)
"""Methods that change a list or a dict."""
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
BRANCHES = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.Match),
)
Function = ast.FunctionDef | ast.AsyncFunctionDef
BOUND_APART = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
"""Expressions with names of their own."""


def starts_of_python(given: Given) -> list[Start]:
    """The engines that a Python text starts; empty: it is no Python, or starts none."""
    if not LOOKS.search(given.text) or len(given.text) > MOST_PYTHON:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(given.text)
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
        self.names: dict[str, Any] = {}
        self.open: dict[str, str] = {}
        """Why names are not known."""
        self.several: set[str] = set()
        """Names that the module sets to more than one value."""
        self.shared: dict[str, str] = {}
        """Names that functions set outside themselves."""
        self.arguments: dict[str, Any] = {}
        """Defaults of the command line's options."""
        self.modules: dict[str, str] = {}
        self.functions: list[Function] = []
        self.starts: list[Start] = []
        self.version: str | None = None
        self.doubt = ""
        self.prefix = ""
        """Before names that a class's body sets."""
        self.steps = 0

    def module(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                installed = INSTALLED.search(node.value[:200])
                self.version = installed[1] if installed is not None else self.version
            elif isinstance(node, ast.Global | ast.Nonlocal):
                why = f"is set in a function (line {node.lineno})"
                self.shared |= dict.fromkeys(node.names, why)
        self._block(tree.body)
        if self.starts:
            return
        for name in self.several:
            self._leave_open(name, "is set to several values")
        outer_names = dict(self.names)
        outer_open = dict(self.open)
        for function in self.functions:
            self.names = dict(outer_names)
            self.open = dict(outer_open)
            arguments = function.args
            for argument in (
                *arguments.posonlyargs,
                *arguments.args,
                *arguments.kwonlyargs,
                *filter(None, (arguments.vararg, arguments.kwarg)),
            ):
                why = f"is an argument of {function.name} (line {function.lineno})"
                self._leave_open(argument.arg, why)
            for node in ast.walk(function):  # local wherever the function sets it
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    self.names.pop(node.id, None)
            self.steps += len(self.names) // 100
            self._block(function.body)

    # Statements

    def _block(self, statements: Sequence[ast.stmt]) -> bool:
        """Reads statements in their order; whether they leave what they stand in."""
        return any(map(self._statement, statements))

    def _statement(self, node: ast.stmt) -> bool:
        self.steps += 1
        if len(self.starts) >= MOST_STARTS:
            return True
        line = f"line {node.lineno}"
        if isinstance(node, Function):
            self.functions.append(node)
            self._leave_open(node.name, f"is a function ({line})")
        elif isinstance(node, ast.ClassDef):
            outer = self.prefix
            self.prefix = f"{outer}{node.name}."
            self._block(node.body)
            self.prefix = outer
        elif isinstance(node, ast.If) and _is_main(node.test):
            return self._block(node.body)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self._expressions(item)
            return self._block(node.body)
        elif isinstance(node, BRANCHES):
            self._uncertain(node, line)
        else:
            self._expressions(node)
            self._simple(node, line)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                return _called(node.value) in EXITS
            return isinstance(node, ast.Return | ast.Raise | ast.Break | ast.Continue)
        return False

    def _uncertain(self, node: ast.stmt, line: str) -> None:
        """Branches and loops: what they set is open outside, and in a loop throughout."""
        is_loop = isinstance(node, ast.For | ast.AsyncFor | ast.While)
        why = f"is set {'in a loop' if is_loop else 'under a condition'} ({line})"
        changed = set(_changed(node))
        if is_loop:
            for name in changed:
                self._leave_open(name, why)
        outer_names = dict(self.names)
        outer_open = dict(self.open)
        self.steps += len(outer_names) // 100
        outer_doubt = self.doubt
        if not isinstance(node, ast.For | ast.AsyncFor | ast.Try):
            self.doubt = f"under a condition ({line})"
        for _, field in ast.iter_fields(node):
            if isinstance(field, ast.expr):
                self._expressions(field)
            elif isinstance(field, list) and field:
                for inner in field if not isinstance(field[0], ast.stmt) else [None]:
                    body = field if inner is None else getattr(inner, "body", [])
                    self._block(body)
                    self.names = dict(outer_names)
                    self.open = dict(outer_open)
        self.doubt = outer_doubt
        for name in changed:
            self._leave_open(name, why)

    def _simple(self, node: ast.stmt, line: str) -> None:
        """Follows what a simple statement sets."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._assign(node.target, node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            is_sum = isinstance(node.op, ast.Add)
            self._extend(node.target.id, node.value, line, is_plain=is_sum)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                module = alias.name
                if isinstance(node, ast.ImportFrom):
                    module = node.module or ""
                name = alias.asname or alias.name
                self.modules[name] = module
                self._leave_open(name, f"is imported ({line})")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value
            if isinstance(call.func, ast.Attribute):
                self._mutate(call, call.func, line)
        else:
            for name in _changed(node):
                self._leave_open(name, f"is not plainly set ({line})")

    def _mutate(self, call: ast.Call, function: ast.Attribute, line: str) -> None:
        """words.append(…), words.extend(…), options.update(…), parser.add_argument(…)."""
        owner = function.value
        if function.attr == "add_argument" and call.args:
            flag = call.args[-1]
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            if isinstance(flag, ast.Constant) and "default" in given:
                name = str(flag.value).lstrip("-").replace("-", "_")
                self.arguments[name] = self._value(given["default"])
        elif isinstance(owner, ast.Name) and owner.id in self.names:
            value: ast.expr = ast.Constant(None)
            is_plain = len(call.args) == 1 and not call.keywords
            if is_plain and function.attr == "append":
                value = ast.List(elts=[call.args[0]], ctx=ast.Load())
            elif is_plain and function.attr in ("extend", "update"):
                value = call.args[0]
            elif function.attr not in CHANGES:
                return
            else:
                is_plain = False
            self._extend(owner.id, value, line, is_plain=is_plain)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        line = f"line {target.lineno}"
        if isinstance(target, ast.Name | ast.Attribute):
            self._set(self.prefix + _written(target), self._value(value))
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            addition = ast.Dict(keys=[target.slice], values=[value])
            self._extend(target.value.id, addition, line, is_plain=True)
        elif (
            isinstance(target, ast.Tuple | ast.List)
            and isinstance(value, ast.Tuple | ast.List)
            and len(target.elts) == len(value.elts)
        ):
            values = [self._value(item) for item in value.elts]
            for item, each in zip(target.elts, values, strict=True):
                if isinstance(item, ast.Name):
                    self._set(self.prefix + item.id, each)
        else:
            for name in _changed(target):
                self._leave_open(name, f"is not plainly set ({line})")

    def _set(self, name: str, value: Any) -> None:
        if name in self.names or name in self.open:
            self.several.add(name)
        if isinstance(value, str) and MARKED.fullmatch(value):
            (reference,) = self.given.open_in(value)
            _, why = self.given.reasons[reference]
            if why.startswith("is computed"):
                self._leave_open(name, why)
                return
        self.open.pop(name, None)
        self.names[name] = value

    def _extend(self, name: str, more: ast.expr, line: str, *, is_plain: bool) -> None:
        value = self.names.get(name)
        added = self._value(more) if is_plain else None
        self.several.add(name)
        if isinstance(value, list) and isinstance(added, list):
            value += self._bounded(added)  # other names of the list see it
            self._bounded(value)
        elif isinstance(value, dict) and isinstance(added, dict):
            value |= added
        elif isinstance(value, str) and isinstance(added, str):
            self.names[name] = self._bounded(value + added)
        else:
            self._leave_open(name, f"is not plainly set ({line})")

    def _leave_open(self, name: str, why: str) -> None:
        self.names.pop(name, None)
        self.open[name] = why

    # Starts

    def _expressions(self, node: ast.AST) -> None:
        """Engines that a statement's calls make, and the names that its expressions bind."""
        bound = {}
        for inner in ast.walk(node):
            if isinstance(inner, ast.NamedExpr) and isinstance(inner.target, ast.Name):
                self._leave_open(
                    inner.target.id, f"is not plainly set (line {inner.lineno})"
                )
            elif isinstance(inner, BOUND_APART):
                for name in _bound(inner):
                    bound[name] = f"is set in an expression (line {inner.lineno})"
        outer = dict(self.names) if bound else self.names
        for name in bound:
            self.names.pop(name, None)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call) and len(self.starts) < MOST_STARTS:
                start = self._start(inner)
                if start is not None:
                    start.doubt = start.doubt or self.doubt
                    self.starts.append(start)
        self.names = outer

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
            value = self._value(keyword.value)
            if keyword.arg is not None:
                options[keyword.arg] = value
            elif isinstance(value, Mapping):
                options |= value
            else:
                options[""] = value
        return options

    def _process(self, call: ast.Call) -> Start | None:
        """A command that is handed to a process, as words or as a shell's text."""
        command = self._value(call.args[0])
        shell = Shell(self.given, first_line=call.lineno)
        if isinstance(command, list):
            shell.command([text_of(word) for word in command])
        elif isinstance(command, str) and not command.startswith(OPEN):
            shell.run(command)
        return shell.starts[0] if shell.starts else None

    # Values

    def _value(self, node: ast.expr, depth: int = 0) -> Any:
        """A value where the text writes it; the mark of an open reference where not."""
        self._step()
        if depth > MOST_SCRIPT_DEPTH:
            return self._computed(node)
        if isinstance(node, ast.Constant):
            value = node.value
            is_long = isinstance(value, int) and value.bit_length() > MOST_BITS
            return self._computed(node) if is_long else self._bounded(value)
        if isinstance(node, ast.Name):
            return self._named(node.id, node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.List | ast.Tuple):
            items: list[Any] = []
            for element in node.elts:
                if isinstance(element, ast.Starred):
                    inner = self._value(element.value, depth + 1)
                    items += inner if isinstance(inner, list) else [inner]
                else:
                    items.append(self._value(element, depth + 1))
            self.steps += len(items)
            return items
        if isinstance(node, ast.Dict):
            return self._dict(node, depth)
        if isinstance(node, ast.JoinedStr):
            parts = []
            for part in node.values:
                inner = part
                if isinstance(part, ast.FormattedValue) and not part.format_spec:
                    inner = part.value
                parts.append(text_of(self._value(inner, depth + 1)))
            return self._bounded("".join(parts))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left = self._value(node.left, depth + 1)
            right = self._value(node.right, depth + 1)
            if isinstance(left, str) and isinstance(right, str):
                return self._bounded(left + right)
            if isinstance(left, list) and isinstance(right, list):
                return self._bounded(left + right)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._value(node.operand, depth + 1)
            if isinstance(value, int | float):
                return -value
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        if isinstance(node, ast.Subscript):
            return self._subscript(node, depth)
        return self._computed(node)

    def _count(self, value: Any) -> None:
        """Counts what a name stands for: lists of lists can stand for billions."""
        stack = [value]
        while stack:
            inner = stack.pop()
            self._step()
            if isinstance(inner, list):
                stack += inner
            elif isinstance(inner, dict):
                stack += inner.values()

    def _step(self) -> None:
        self.steps += 1
        if self.steps > MOST_SCRIPT_STEPS:
            raise ConfigError(
                f"the script's values take more than {MOST_SCRIPT_STEPS} steps"
            )

    def _bounded(self, value: Any) -> Any:
        if isinstance(value, str | list) and len(value) > MOST_SCRIPT_VALUE:
            raise ConfigError(
                f"a value of the script has more than {MOST_SCRIPT_VALUE} characters"
            )
        return value

    def _computed(self, node: ast.expr) -> str:
        line = getattr(node, "lineno", 0)
        why = f"is computed when the script runs (line {line})"
        return self.given.left_open(f"${_written(node)}", why)

    def _named(self, name: str, node: ast.expr) -> Any:
        if name in self.given.values:
            return self.given.values[name]
        if name in self.shared:
            return self.given.left_open(f"${name}", self.shared[name])
        if name in self.names:
            self._count(self.names[name])
            return self.names[name]
        why = f"is set nowhere in this file (line {node.lineno})"
        return self.given.left_open(f"${name}", self.open.get(name, why))

    def _attribute(self, node: ast.Attribute) -> Any:
        written = _written(node)
        if node.attr in self.given.values:
            return self.given.values[node.attr]
        if written in self.names:
            self._count(self.names[written])
            return self.names[written]
        if node.attr in self.arguments:
            return self.arguments[node.attr]
        owner = _written(node.value)
        is_class = owner.rpartition(".")[2][:1].isupper()
        if written not in self.open and (is_class or owner == "torch"):
            return node.attr  # a member of an enumeration
        why = f"is set nowhere in this file (line {node.lineno})"
        return self.given.left_open(f"${node.attr}", self.open.get(written, why))

    def _dict(self, node: ast.Dict, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            value = self._value(item, depth + 1)
            if key is not None:
                values[text_of(self._value(key, depth + 1))] = value
            elif isinstance(value, Mapping):
                values |= value
            else:
                values[""] = value
        return values

    def _call(self, node: ast.Call, depth: int) -> Any:
        name = _called(node)
        last = name.rpartition(".")[2]
        if name in ENVIRONMENT and node.args:
            return self._environment(node, depth)
        if name in ("str", "int", "float") and len(node.args) == 1:
            return self._value(node.args[0], depth + 1)
        if last in CONFIG_METHODS:
            return self._keywords(node) | {"decoding_type": CONFIG_METHODS[last]}
        if name == "dict" or re.search(r"(?:Config|Args)$", last):
            return self._keywords(node)
        if last == "dumps" and node.args:
            return json_of(self._value(node.args[0], depth + 1))
        if last == "split" and isinstance(node.func, ast.Attribute) and not node.args:
            text = self._value(node.func.value, depth + 1)
            if isinstance(text, str) and OPEN not in text:
                return text.split()
        if last == "join" and isinstance(node.func, ast.Attribute) and node.args:
            items = self._value(node.args[0], depth + 1)
            between: Any = " "
            if name != "shlex.join":
                between = self._value(node.func.value, depth + 1)
            if isinstance(items, list) and isinstance(between, str):
                return self._bounded(between.join(map(text_of, items)))
        return self._computed(node)

    def _environment(self, node: ast.Call, depth: int) -> Any:
        """os.environ.get(name, default): a name that the text does not set has its default."""
        name = text_of(self._value(node.args[0], depth + 1))
        if name in self.given.values:
            return self.given.values[name]
        written = f'os.environ["{name}"]'
        if written in self.names or written in self.open:
            return self._computed(node)
        if len(node.args) > 1:
            return self._value(node.args[1], depth + 1)
        why = f"is set nowhere in this file (line {node.lineno})"
        return self.given.left_open(f"${name}", why)

    def _subscript(self, node: ast.Subscript, depth: int) -> Any:
        key = self._value(node.slice, depth + 1)
        if _written(node.value) in ("os.environ", "environ"):
            if text_of(key) in self.given.values:
                return self.given.values[text_of(key)]
            why = f"is set nowhere in this file (line {node.lineno})"
            return self.given.left_open(f"${text_of(key)}", why)
        owner = self._value(node.value, depth + 1)
        if isinstance(owner, Mapping) and isinstance(key, str) and key in owner:
            return owner[key]
        is_place = isinstance(key, int) and not isinstance(key, bool)
        if isinstance(owner, list) and is_place and -len(owner) <= key < len(owner):
            return owner[key]
        return self._computed(node)


def _is_main(test: ast.expr) -> bool:
    """Whether a condition is __name__ == "__main__"."""
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq):
        return False
    return isinstance(test.left, ast.Name) and test.left.id == "__name__"


def _changed(node: ast.AST) -> Iterator[str]:
    """Names that a node may set, or whose lists and dicts it may change."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name | ast.Attribute | ast.Subscript):
            if isinstance(inner.ctx, ast.Store | ast.Del):
                owner = inner.value if isinstance(inner, ast.Subscript) else inner
                yield _written(owner)
        elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            if isinstance(inner.func.value, ast.Name):
                yield inner.func.value.id
        elif isinstance(inner, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            if inner.name:
                yield inner.name
        elif isinstance(inner, ast.alias):
            yield inner.asname or inner.name


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that a comprehension or a lambda has for itself."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id
        elif isinstance(inner, ast.arg):
            yield inner.arg


def _written(node: ast.expr) -> str:
    """An expression's text; one that cannot be written is none that names a value."""
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
