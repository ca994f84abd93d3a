"""Python that starts an engine, by its syntax: `LLM(…)`, `AsyncEngineArgs(…)`, `sgl.Engine(…)`,
`LLMConfig(…)`, and commands handed to a process.

Nothing is run: constants, the module's own names, f-strings, dict and list displays and defaults of
the environment and of argparse are followed; all else stays a name.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from magicdec.errors import ConfigError
from magicdec.specs.serve_command.manifest import start_of_llm_config
from magicdec.specs.serve_command.shell import Shell
from magicdec.specs.serve_command.start import (
    INSTALLED,
    MOST_BITS,
    MOST_STARTS,
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
RUNS = (
    "Popen",
    "run",
    "call",
    "check_call",
    "check_output",
    "system",
    "exec",
    "execvp",
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


class _Unknown(str):
    """A value that only a run gives, as it is written."""


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
    return _Reader(given, tree).starts()


class _Reader:
    def __init__(self, given: Given, tree: ast.Module) -> None:
        self.given = given
        self.names: dict[str, ast.expr] = {}
        self.additions: dict[str, list[ast.expr]] = {}
        self.arguments: dict[str, ast.expr] = {}
        self.calls: list[ast.Call] = []
        self.modules: dict[str, str] = {}
        self.version: str | None = None
        self.steps = 0
        self.readers: Mapping[type, Callable[[Any, int], Any]] = {
            ast.Constant: lambda node, _: node.value,
            ast.Name: self._named,
            ast.List: lambda node, depth: self._items(node.elts, depth),
            ast.Tuple: lambda node, depth: self._items(node.elts, depth),
            ast.Dict: self._dict,
            ast.JoinedStr: self._text,
            ast.BinOp: self._sum,
            ast.BoolOp: self._either,
            ast.IfExp: self._chosen,
            ast.UnaryOp: self._negative,
            ast.Call: self._of_call,
            ast.Attribute: self._attribute,
            ast.Subscript: self._subscript,
        }
        for node in ast.walk(tree):
            self._note(node)

    def starts(self) -> list[Start]:
        starts = []
        for call in self.calls:
            start = self._start(call)
            if start is not None:
                start.version = start.version or self.version
                starts.append(start)
            if len(starts) == MOST_STARTS:
                break
        return starts

    def _note(self, node: ast.AST) -> None:
        """Keeps what a statement says of names; the first value of a name counts."""
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._name(node.targets[0], node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._name(node.target, node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            self.additions.setdefault(node.target.id, []).append(node.value)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            self._note_import(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._defaults(node.args)
        elif isinstance(node, ast.Call):
            self.calls.append(node)
            self._note_call(node)
        elif isinstance(node, ast.Constant):
            installed = INSTALLED.search(text_of(node.value)[:200])
            self.version = installed[1] if installed is not None else self.version

    def _note_import(self, node: ast.ImportFrom | ast.Import) -> None:
        for alias in node.names:
            module = alias.name
            if isinstance(node, ast.ImportFrom):
                module = node.module or ""
            self.modules[alias.asname or alias.name] = module

    def _name(self, target: ast.expr, value: ast.expr) -> None:
        name = _written(target) if isinstance(target, ast.Attribute) else ""
        if isinstance(target, ast.Name):
            name = target.id
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            key = target.slice
            addition = ast.Dict(keys=[key], values=[value])
            self.additions.setdefault(target.value.id, []).append(addition)
        if name:
            self.names.setdefault(name, value)

    def _defaults(self, arguments: ast.arguments) -> None:
        names = [*arguments.posonlyargs, *arguments.args]
        for name, value in zip(names[::-1], arguments.defaults[::-1], strict=False):
            self.names.setdefault(name.arg, value)
        for name, default in zip(
            arguments.kwonlyargs, arguments.kw_defaults, strict=True
        ):
            if default is not None:
                self.names.setdefault(name.arg, default)

    def _note_call(self, call: ast.Call) -> None:
        if not isinstance(call.func, ast.Attribute):
            return
        verb = call.func.attr
        owner = call.func.value
        if verb == "add_argument" and call.args:
            flag = call.args[-1]
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            if isinstance(flag, ast.Constant) and "default" in given:
                name = str(flag.value).lstrip("-").replace("-", "_")
                self.arguments[name] = given["default"]
        if verb in ("append", "extend", "update") and isinstance(owner, ast.Name):
            for argument in call.args[:1]:
                value = argument
                if verb == "append":
                    value = ast.List(elts=[argument], ctx=ast.Load())
                self.additions.setdefault(owner.id, []).append(value)

    # Starts

    def _start(self, call: ast.Call) -> Start | None:
        owner, _, last = _called(call).rpartition(".")
        if last in RUNS and call.args:
            return self._process(call)
        engine = self._engine_of(owner, last)
        if engine is None:
            return None
        options = self._keywords(call)
        if last == "LLMConfig":
            is_served = {"engine_kwargs", "model_loading_config"} & set(options)
            return start_of_llm_config(options) if is_served else None
        words = [text_of(value) for value in map(self._value, call.args[:1])]
        if not words and not {"model", "model_path", "model_tag"} & set(options):
            return None
        return Start(engine=engine, words=[*words, *words_of(options)])

    def _engine_of(self, owner: str, name: str) -> str | None:
        """The engine that a call makes; other libraries have an Engine too."""
        engine = ENGINES.get(name)
        module = self.modules.get(name) or self.modules.get(owner) or owner
        if engine == "sglang" and "sgl" not in module:
            return None
        if engine is not None and "tensorrt_llm" in module:
            return "trtllm"
        return engine

    def _keywords(self, call: ast.Call) -> dict[str, Any]:
        options: dict[str, Any] = {}
        for keyword in call.keywords:
            value = self._value(keyword.value)
            if keyword.arg is None and isinstance(value, Mapping):
                options |= value
            elif keyword.arg is not None:
                options[keyword.arg] = value
        return options

    def _process(self, call: ast.Call) -> Start | None:
        """A command that is handed to a process, as words or as a shell's text."""
        command = self._value(call.args[0])
        shell = Shell(self.given)
        if isinstance(command, list):
            words = [text_of(word) for word in command]
            shell.command(words)
        elif isinstance(command, str) and not isinstance(command, _Unknown):
            shell.run(command)
        return shell.starts[0] if shell.starts else None

    # Values

    def _value(self, node: ast.expr, depth: int = 0) -> Any:
        """A value as far as the text gives it."""
        self.steps += 1
        if self.steps > MOST_SCRIPT_STEPS:
            raise ConfigError(
                f"the script's values take more than {MOST_SCRIPT_STEPS} steps"
            )
        read = self.readers.get(type(node))
        if depth > MOST_SCRIPT_DEPTH or read is None:
            return self._unknown(node)
        value = read(node, depth)
        if isinstance(value, str) and len(value) > MOST_SCRIPT_VALUE:
            raise ConfigError(
                f"a value of the script has more than {MOST_SCRIPT_VALUE} characters"
            )
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            return self._unknown(node)
        return value

    def _text(self, node: ast.JoinedStr, depth: int) -> str:
        parts = []
        for part in node.values:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            parts.append(text_of(self._value(inner, depth + 1)))
        return "".join(parts)

    def _either(self, node: ast.BoolOp, depth: int) -> Any:
        """The first of several values that is known and true, or the last."""
        values = [self._value(option, depth + 1) for option in node.values]
        if isinstance(node.op, ast.And):
            return self._unknown(node)
        known = [value for value in values if value and not isinstance(value, _Unknown)]
        return known[0] if known else values[-1]

    def _negative(self, node: ast.UnaryOp, depth: int) -> Any:
        value = self._value(node.operand, depth + 1)
        if isinstance(node.op, ast.USub) and isinstance(value, int | float):
            return -value
        return self._unknown(node)

    def _chosen(self, node: ast.IfExp, depth: int) -> Any:
        """One of two values, where the text says which."""
        test = self._value(node.test, depth + 1)
        if isinstance(test, _Unknown):
            return self._unknown(node)
        if test:
            return self._value(node.body, depth + 1)
        return self._value(node.orelse, depth + 1)

    def _unknown(self, node: ast.expr) -> _Unknown:
        written = f"${_written(node)}"[:120]
        line = getattr(node, "lineno", 0)
        why = f"is computed when the script runs (line {line})"
        self.given.unset.setdefault(written, why)
        return _Unknown(written)

    def _named(self, node: ast.Name, depth: int) -> Any:
        name = node.id
        if name in self.given.values:
            return self.given.values[name]
        if name not in self.names:
            return self._unknown(node)
        value = self._value(self.names[name], depth + 1)
        for addition in self.additions.get(name, ()):
            more = self._value(addition, depth + 1)
            if isinstance(value, list) and isinstance(more, list):
                value = [*value, *more]
            elif isinstance(value, dict) and isinstance(more, dict):
                value = value | more
            elif isinstance(value, str) and isinstance(more, str):
                value = value + more
        return value

    def _items(self, nodes: list[ast.expr], depth: int) -> list[Any]:
        items: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                inner = self._value(node.value, depth + 1)
                items += inner if isinstance(inner, list) else [inner]
            else:
                items.append(self._value(node, depth + 1))
        return items

    def _dict(self, node: ast.Dict, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            value = self._value(item, depth + 1)
            if key is None and isinstance(value, Mapping):
                values |= value
            elif key is not None:
                values[text_of(self._value(key, depth + 1))] = value
        return values

    def _sum(self, node: ast.BinOp, depth: int) -> Any:
        """Two texts or lists joined, two numbers added or multiplied."""
        left = self._value(node.left, depth + 1)
        right = self._value(node.right, depth + 1)
        join = {ast.Add: operator.add, ast.Mult: operator.mul}.get(type(node.op))
        for kind in (str, list, int):
            are_alike = isinstance(left, kind) and isinstance(right, kind)
            if are_alike and join is not None and (kind is int or join is operator.add):
                return join(left, right)
        return self._unknown(node)

    def _of_call(self, node: ast.Call, depth: int) -> Any:
        name = _called(node)
        last = name.rpartition(".")[2]
        if name in ENVIRONMENT and node.args:
            return self._of_environment(node, depth)
        if last in ("str", "int", "float") and len(node.args) == 1:
            return self._value(node.args[0], depth + 1)
        if last in CONFIG_METHODS:
            return self._keywords(node) | {"decoding_type": CONFIG_METHODS[last]}
        if last == "dict" or re.search(r"(?:Config|Args)$", last):
            return self._keywords(node)
        if last == "dumps" and node.args:
            return json_of(self._value(node.args[0], depth + 1))
        if last in ("join", "split"):
            return self._of_words(node, name, depth)
        return self._unknown(node)

    def _of_words(self, node: ast.Call, name: str, depth: int) -> Any:
        """ " ".join(words), shlex.join(words), text.split()."""
        assert isinstance(node.func, ast.Attribute | ast.Name)
        if isinstance(node.func, ast.Name):
            return self._unknown(node)
        if node.func.attr == "split":
            text = self._value(node.func.value, depth + 1)
            is_text = isinstance(text, str) and not node.args
            return text.split() if is_text else self._unknown(node)
        items = self._value(node.args[0], depth + 1) if node.args else None
        between = " "
        if name != "shlex.join":
            between = text_of(self._value(node.func.value, depth + 1))
        if isinstance(items, list):
            return between.join(map(text_of, items))
        return self._unknown(node)

    def _of_environment(self, node: ast.Call, depth: int) -> Any:
        name = self._value(node.args[0], depth + 1)
        if name in self.given.values:
            return self.given.values[name]
        if len(node.args) > 1:
            return self._value(node.args[1], depth + 1)
        self.given.leave_open(f"${name}", str(name))
        return _Unknown(f"${name}")

    def _attribute(self, node: ast.Attribute, depth: int) -> Any:
        written = _written(node)
        if node.attr in self.given.values:
            return self.given.values[node.attr]
        if written in self.names:
            return self._value(self.names[written], depth + 1)
        if node.attr in self.arguments:
            return self._value(self.arguments[node.attr], depth + 1)
        if isinstance(node.value, ast.Name) and node.value.id in (
            "args",
            "self",
            "opts",
        ):
            self.given.unset.setdefault(
                f"${node.attr}", f"is set nowhere in this file (line {node.lineno})"
            )
            return _Unknown(f"${node.attr}")
        return _Unknown(node.attr)  # a member of an enumeration

    def _subscript(self, node: ast.Subscript, depth: int) -> Any:
        key = self._value(node.slice, depth + 1)
        if _written(node.value) in ("os.environ", "environ"):
            known = self.given.values.get(text_of(key))
            if known is not None:
                return known
            why = f"is set nowhere in this file (line {node.lineno})"
            self.given.unset.setdefault(f"${key}", why)
            return _Unknown(f"${key}")
        owner = self._value(node.value, depth + 1)
        if isinstance(owner, Mapping) and key in owner:
            return owner[key]
        if (
            isinstance(owner, list)
            and isinstance(key, int)
            and -len(owner) <= key < len(owner)
        ):
            return owner[key]
        return self._unknown(node)


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
