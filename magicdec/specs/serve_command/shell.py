"""A shell's script, followed without running anything: variables, arrays, defaults, branches,
functions, here-documents, and scripts within scripts.

Its grammar is tree-sitter's. What depends on the machine (other commands' output, files, users'
arguments) stays as it is written and is listed by its name.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

from magicdec.errors import ConfigError
from magicdec.specs.serve_command.start import (
    INSTALLED,
    MENTIONS,
    MOST_BITS,
    Given,
    Start,
    start_of,
)

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

Value = str | list[str]
SHELLS = frozenset(("bash", "sh", "zsh", "dash", "ash", "ksh"))
CONTAINERS = frozenset(("docker", "podman", "nerdctl", "kubectl", "ssh", "apptainer"))
"""Commands whose script does not see the variables outside it."""
FETCHES = frozenset(
    ("pull", "push", "build", "tag", "image", "images", "rmi", "save", "load")
)
"""Words behind docker with which it starts nothing."""
SILENT = frozenset(
    (
        *("echo", "printf", "log", "info", "cat", "grep", "tail", "which", "type"),
        *("pkill", "pgrep", "kill", "killall", "ps", "trap", "sleep", "wait"),
        *("curl", "wget", "alias", "rm", "mkdir"),
    )
)
"""Commands that may name a server and start none."""
ASSIGNS = frozenset(("export", "declare", "local", "readonly", "typeset", "ENV", "ARG"))
BUILT_IN = ASSIGNS | {"FROM", "source", ".", "set", "shift", "eval"}
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
MOST_STEPS = 50_000
MOST_NESTED = 12
MOST_DEPTH = 150
MOST_WORDS = 20_000
MOST_VALUE = 200_000
MOST_VALUES = 5_000_000
"""Characters of all values that are set, one after the other."""
PARSE_S = 0.6
"""Time after which a text is given up as no script."""
DOCUMENTS = ("heredoc_redirect", "herestring_redirect")
CLAUSES = ("else_clause", "elif_clause")
QUICK_BYTES = 50_000
"""Texts that take less time whatever they hold."""
PART_BYTES = 4096
REMARK = re.compile(r"(?<=[ \t])\\[ \t]+#.*$")
"""A comment behind a line's last backslash."""
REFERENCE = re.compile(r"\$\{?(\w+|[@*#])|\$\(([^()]*)\)")
OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@cache
def _parser() -> Parser:
    import tree_sitter
    import tree_sitter_bash

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


class _Words:
    """Words that an expansion is writing."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.open: str | None = None

    def add(self, text: str) -> None:
        self.open = (self.open or "") + text

    def close(self) -> None:
        if self.open is not None:
            self.done.append(self.open)
        self.open = None

    def write(self, text: str, *, quoted: bool) -> None:
        if quoted:
            self.add(text)
        else:
            self.split(text)

    def split(self, text: str) -> None:
        """Adds an unquoted expansion, which blanks divide into words."""
        for place, part in enumerate(re.split(r"[ \t\n]+", text)):
            if place:
                self.close()
            if part:
                self.add(part)


class Shell:
    """A shell that reads one script."""

    def __init__(
        self,
        given: Given,
        variables: Mapping[str, Value] | None = None,
        *,
        arguments: Sequence[str] = (),
        depth: int = 0,
    ) -> None:
        self.given = given
        self.variables: dict[str, Value] = dict(variables or {})
        self.arguments: Sequence[str] | None = arguments or None
        self.depth = depth
        self.functions: dict[str, Node] = {}
        self.called: set[str] = set()
        self.starts: list[Start] = []
        self.doubtful: dict[str, str] = {}
        """Variables that were set where a condition is not known, with that place."""
        self.doubt = ""
        self.version: str | None = None
        self.steps = 0
        self.characters = 0
        self.followed: Mapping[str, Callable[[Node, int], None]] = {
            "command": self._command,
            "variable_assignment": self._assignments,
            "declaration_command": self._assignments,
            "redirected_statement": self._redirected,
            "list": self._list,
            "if_statement": self._if,
            "case_statement": self._case,
            "for_statement": self._for,
            "while_statement": self._while,
            "function_definition": self._function,
        }

    def run(self, text: str) -> None:
        """Follows a script. Raises ConfigError where the part that starts a server is no shell."""
        if self.depth > MOST_NESTED or not MENTIONS.search(text):
            return
        root = _parsed(_continued(text, self.given))
        self._statement(root, 0)
        if root.has_error:
            _check_quotes(root, text)
        for name, body in self.functions.items():
            if name not in self.called and not self.starts:
                self._statement(body, 0)

    # Statements

    def _statement(self, node: Node, depth: int) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise ConfigError(f"the script has more than {MOST_STEPS} steps")
        if depth > MOST_DEPTH:
            raise ConfigError(f"the script nests more than {MOST_DEPTH} deep")
        follow = self.followed.get(node.type)
        if follow is not None:
            follow(node, depth)
            return
        if node.type == "ERROR" and MENTIONS.search(_text(node)):
            raise ConfigError(_unreadable(node))
        for child in node.named_children:
            self._statement(child, depth + 1)

    def _function(self, node: Node, _: int) -> None:
        name = node.child_by_field_name("name")
        body = node.child_by_field_name("body")
        if name is not None and body is not None:
            self.functions[_text(name)] = body

    def _list(self, node: Node, depth: int) -> None:
        """a && b, a || b: the second is left out where the first decides it."""
        parts = node.named_children
        if len(parts) != 2:
            for part in parts:
                self._statement(part, depth + 1)
            return
        first, second = parts
        result = self._holds(first)
        self._statement(first, depth + 1)
        is_and = any(child.type == "&&" for child in node.children)
        if result is None or result == is_and:
            self._statement(second, depth + 1)

    def _if(self, node: Node, depth: int) -> None:
        """The first branch whose condition holds, or may."""
        for place, test, statements in _branches(node):
            result = True if test is None else self._holds(test)
            if result is False:
                continue
            with self._doubting(place, is_certain=result is True):
                for statement in statements:
                    self._statement(statement, depth + 1)
            return

    def _case(self, node: Node, depth: int) -> None:
        value = node.child_by_field_name("value")
        subject = ""
        if value is not None:
            subject = self._one(value)
        items = [child for child in node.named_children if child.type == "case_item"]
        is_known = not REFERENCE.search(subject)
        chosen = next((item for item in items if self._fits(item, subject)), None)
        if not is_known:
            serving = (item for item in items if MENTIONS.search(_text(item)))
            chosen = next(serving, chosen)
        if chosen is None:
            return
        patterns = chosen.children_by_field_name("value")
        with self._doubting(node, is_certain=is_known):
            for child in chosen.named_children:
                if child not in patterns:
                    self._statement(child, depth + 1)

    def _fits(self, item: Node, subject: str) -> bool:
        """Whether one of an item's patterns fits."""
        patterns = item.children_by_field_name("value")
        return any(
            fnmatch.fnmatchcase(subject, self._one(pattern)) for pattern in patterns
        )

    def _for(self, node: Node, depth: int) -> None:
        """The first round of a loop."""
        name = node.child_by_field_name("variable")
        body = node.child_by_field_name("body")
        words: list[str] = []
        for value in node.children_by_field_name("value"):
            words += self._expanded(value)
        if body is None or name is None:
            return
        if words:
            self.variables[_text(name)] = words[0]
        if len(words) > 1 and MENTIONS.search(_text(body)):
            self.given.notes.append(
                f"the loop over {_text(name)} ({_line(node)}) is read for {words[0]}, "
                f"the first of {len(words)}"
            )
        self._statement(body, depth + 1)

    def _while(self, node: Node, depth: int) -> None:
        condition = node.child_by_field_name("condition")
        body = node.child_by_field_name("body")
        if body is None or (condition is not None and self._holds(condition) is False):
            return
        if "shift" in _text(body) and not self.arguments:
            return  # reads the script's own arguments, of which there are none
        self._statement(body, depth + 1)

    def _doubting(self, node: Node, *, is_certain: bool) -> _Doubt:
        place = ""
        if not is_certain:
            place = _line(node)
        return _Doubt(self, place)

    # Conditions

    def _holds(self, node: Node) -> bool | None:
        """Whether a condition holds; None: that depends on the machine."""
        kind = node.type
        if kind == "negated_command" and node.named_children:
            inner = self._holds(node.named_children[0])
            return None if inner is None else not inner
        if kind == "command":
            return {"true": True, ":": True, "false": False}.get(_text(node).strip())
        if kind == "list" and len(node.named_children) == 2:
            first, second = map(self._holds, node.named_children)
            return _joined(first, second, node)
        if kind != "test_command" or not node.named_children:
            return None
        return self._test(node.named_children[0])

    def _test(self, node: Node) -> bool | None:
        kind = node.type
        parts = node.named_children
        if kind == "parenthesized_expression" and parts:
            return self._test(parts[0])
        if kind == "unary_expression":
            return self._tested_alone(node)
        if kind == "binary_expression":
            return self._compared(node)
        if kind in ("word", "string", "simple_expansion", "expansion", "concatenation"):
            return bool(self._known(node))
        return None

    def _tested_alone(self, node: Node) -> bool | None:
        """-n, -z and !; whether a file exists is not known."""
        parts = node.named_children
        sign = _text(node).split(None, 1)[0]
        if sign == "-n":
            return bool(self._known(parts[-1]))
        if sign == "-z":
            return not self._known(parts[-1])
        if not sign.startswith("!"):
            return None
        inner = self._test(parts[-1])
        return None if inner is None else not inner

    def _compared(self, node: Node) -> bool | None:
        left = node.child_by_field_name("left")
        right = node.child_by_field_name("right")
        if left is None or right is None:
            return None
        sign = next(
            (_text(child) for child in node.children if child not in (left, right)), ""
        )
        if sign in ("&&", "||", "-a", "-o"):
            return _joined(self._test(left), self._test(right), node)
        first = self._known(left)
        second = self._known(right)
        if sign in ("=", "==", "!="):
            if "$(" in first + second:
                return None
            return fnmatch.fnmatchcase(first, second) == (sign != "!=")
        compare = {
            "-eq": operator.eq,
            "-ne": operator.ne,
            "-gt": operator.gt,
            "-ge": operator.ge,
            "-lt": operator.lt,
            "-le": operator.le,
            "<": operator.lt,
            ">": operator.gt,
            "<=": operator.le,
            ">=": operator.ge,
        }.get(sign)
        if compare is None or not (_is_whole(first) and _is_whole(second)):
            return None
        return bool(compare(int(first), int(second)))

    def _known(self, node: Node) -> str:
        """A word in a condition, where what is set nowhere is empty, as a shell has it."""
        before = dict(self.given.unset)
        text = self._one(node)
        for reference in set(self.given.unset) - set(before):
            del self.given.unset[reference]
            if not reference.startswith("$("):
                text = text.replace(reference, "")
        return text

    # Variables

    def _assignments(self, node: Node, _: int = 0) -> None:
        parts = [node]
        if node.type == "declaration_command":
            parts = list(node.named_children)
        for part in parts:
            if part.type == "variable_assignment":
                self._assign(part)
                continue
            name, equals, value = self._one(part).partition("=")
            if part is not node and equals and name.isidentifier():  # export "X=d"
                self.variables[name] = value

    def _assign(self, node: Node) -> None:
        name_node = node.child_by_field_name("name")
        value_node = node.child_by_field_name("value")
        if name_node is None:
            return
        name = _text(name_node).partition("[")[0]
        value: Value = ""
        computed = ""
        if value_node is not None and value_node.type == "array":
            value = []
            for item in value_node.named_children:
                value += self._expanded(item)
        elif value_node is not None:
            value = self._one(value_node)
            if value.startswith("$("):
                computed = value
        if any(child.type == "+=" for child in node.children):
            value = _appended(self.variables.get(name, ""), value)
        if len(value) > MOST_VALUE:
            raise ConfigError(f"{name} has more than {MOST_VALUE} characters")
        self.characters += len(value)
        if self.characters > MOST_VALUES:
            raise ConfigError(
                f"the script's values have more than {MOST_VALUES} characters"
            )
        self.doubtful.pop(name, None)
        if self.doubt:
            self.doubtful[name] = self.doubt
        if computed:
            self.variables.pop(name, None)
            self.given.unset[f"${name}"] = (
                f"is computed when the script runs ({_line(node)})"
            )
            return
        self.variables[name] = value

    def lookup(self, name: str) -> Value | None:
        """A variable's value; None: nothing in the text sets it."""
        if name in self.given.values:
            return self.given.values[name]
        if name in self.doubtful:
            self.given.notes.append(
                f"${name} is set under a condition that is not evaluated "
                f"({self.doubtful[name]}); it is taken to hold"
            )
            self.doubtful.pop(name)
        return self.variables.get(name)

    def _unset(self, reference: str, written: str) -> str:
        self.given.leave_open(reference, written)
        return reference

    # Words

    def _expanded(self, node: Node) -> list[str]:
        words = _Words()
        self._write(node, words, quoted=False)
        words.close()
        return words.done

    def _one(self, node: Node) -> str:
        return " ".join(self._expanded(node))

    def _write(self, node: Node, words: _Words, *, quoted: bool) -> None:
        kind = node.type
        if kind == "raw_string":
            words.add(_text(node)[1:-1])
        elif kind in ("string", "translated_string"):
            words.add("")
            self._write_parts(node, words)
        elif kind == "ansi_c_string":
            words.add(_unescaped(_text(node)[2:-1]))
        elif kind in ("simple_expansion", "expansion"):
            self._write_value(node, words, quoted=quoted)
        elif kind == "command_substitution":
            self._write_substitution(node, words, quoted=quoted)
        elif kind == "arithmetic_expansion":
            words.add(self._sum(node))
        elif kind in ("concatenation", "command_name"):
            for child in node.children:
                self._write(child, words, quoted=quoted)
        else:
            words.add(re.sub(r"\\(\r?\n|.)", _unquoted, _text(node), flags=re.DOTALL))

    def _write_parts(self, node: Node, words: _Words) -> None:
        """The inside of double quotes, or of a here-document: text between expansions."""
        source = node.text or b""
        begin = 0
        end = len(source)
        if node.type != "heredoc_body":
            begin = source.index(b'"') + 1
            end -= 1
        for child in node.named_children:
            if not child.type.endswith(("expansion", "substitution")):
                continue
            first = child.start_byte - node.start_byte
            words.add(_in_quotes(source[begin:first].decode()))
            self._write(child, words, quoted=True)
            begin = child.end_byte - node.start_byte
        words.add(_in_quotes(source[begin:end].decode()))

    def _write_value(self, node: Node, words: _Words, *, quoted: bool) -> None:
        written = _text(node)
        inside = written.strip("${}")
        name = re.match(r"[\w@*#?!$-]+", inside)
        if name is None:
            words.add(written)
            return
        rest = inside[name.end() :]
        if name[0] == "#" and rest:
            self._write_length(rest, words)
            return
        value = self._value_of(name[0], written)
        if rest.startswith("["):
            index, _, rest = rest[1:].partition("]")
            value = _element(value, index)
        if re.match(r":?[-+=?]", rest):
            self._write_default(node, name[0], value, words, quoted=quoted)
        elif value is None:
            words.add(self._unset(f"${name[0]}", written))
        elif isinstance(value, list):
            self._write_list(value, words, quoted=quoted)
        else:
            words.write(_changed(value, rest), quoted=quoted)

    def _value_of(self, name: str, written: str) -> Value | None:
        if name in ("@", "*"):
            if self.arguments is None:
                self.given.leave_open("$@", written)
                return None
            return list(self.arguments)
        if name == "#":
            return str(len(self.arguments or ()))
        if name.isdigit():
            place = int(name) - 1
            if self.arguments is not None and 0 <= place < len(self.arguments):
                return self.arguments[place]
            return None
        return self.lookup(name)

    def _write_list(self, value: list[str], words: _Words, *, quoted: bool) -> None:
        for place, item in enumerate(value):
            if place:
                words.close()
            if quoted:
                words.add(item)
            else:
                words.split(item)
        if not value and words.open == "" and quoted:
            words.open = None  # "${EMPTY[@]}" is no word

    def _write_length(self, rest: str, words: _Words) -> None:
        name = re.match(r"\w+", rest)
        value = None
        if name is not None:
            value = self.lookup(name[0])
        words.add(str(len(value or "")))

    def _write_default(
        self,
        node: Node,
        name: str,
        value: Value | None,
        words: _Words,
        *,
        quoted: bool,
    ) -> None:
        """${X:-d}, ${X-d}, ${X:=d}, ${X:+d} and ${X:?d}."""
        sign, alternative = _default_of(node)
        is_given = value is not None
        if sign.startswith(":"):
            is_given = bool(value)
        if sign.endswith("+"):
            if is_given:
                self._write_nodes(node, alternative, words, quoted=quoted)
            return
        if is_given:
            assert value is not None
            if isinstance(value, list):
                self._write_list(value, words, quoted=quoted)
            else:
                words.write(value, quoted=quoted)
            return
        if sign.endswith("?"):
            words.add(self._unset(f"${name}", _text(node)))
            return
        inner = _Words()
        self._write_nodes(node, alternative, inner, quoted=quoted)
        inner.close()
        text = " ".join(inner.done)
        if sign.endswith("="):
            self.variables[name] = text
        words.write(text, quoted=quoted)

    def _write_nodes(
        self, node: Node, parts: list[Node], words: _Words, *, quoted: bool
    ) -> None:
        source = node.text or b""
        last = None
        for part in parts:
            if last is not None and part.start_byte > last:
                gap = source[last - node.start_byte : part.start_byte - node.start_byte]
                if quoted:
                    words.add(gap.decode())
                else:
                    words.close()
            self._write(part, words, quoted=quoted)
            last = part.end_byte

    def _write_substitution(self, node: Node, words: _Words, *, quoted: bool) -> None:
        """The output of a command, where its text gives it: a here-document, echo, basename."""
        inner = Shell(self.given, self.variables, depth=self.depth + 1)
        inner.given = self.given
        text = inner.output_of(node)
        if text is None:
            written = _text(node)
            self.given.unset.setdefault(
                written, f"is computed when the script runs ({_line(node)})"
            )
            words.add(written)
        else:
            words.write(text, quoted=quoted)

    def output_of(self, node: Node) -> str | None:
        statements = node.named_children
        if len(statements) != 1 or self.depth > MOST_NESTED:
            return None
        (statement,) = statements
        if statement.type == "redirected_statement":
            for child in statement.named_children:
                if child.type == "heredoc_redirect" and _text(statement).startswith(
                    "cat"
                ):
                    return self._document(child).rstrip("\n")
            return None
        if statement.type != "command":
            return None
        words = self._words_of(statement)
        if words[:1] == ["echo"]:
            return " ".join(words[1:])
        if words[:1] == ["basename"] and len(words) == 2:
            return words[1].rstrip("/").rpartition("/")[2]
        return None

    def _sum(self, node: Node) -> str:
        inside = _text(node)[3:-2]

        def number(match: re.Match[str]) -> str:
            value = self.lookup(match[1])
            if isinstance(value, str):
                return value or "0"
            return match[0]

        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", number, inside)
        value = _calculated(text)
        if value is None:
            written = _text(node)
            self.given.unset.setdefault(
                written, f"cannot be calculated ({_line(node)})"
            )
            return written
        return str(value)

    # Redirections and files

    def _redirected(self, node: Node, depth: int) -> None:
        """A statement whose output is kept as a file, or whose input is a document."""
        documents, parts = _divided(node)
        targets = [self._target(part) for part in parts if part.type == "file_redirect"]
        target = next(filter(None, targets), "")
        text = None
        if documents:
            text = self._document(documents[0])
        for statement in parts:
            if statement.type == "command":
                target, text = self._written(statement, target, text)
            elif statement.type != "file_redirect":
                self._statement(statement, depth + 1)
        if text is not None and target:
            self.given.files[target] = text

    def _written(
        self, command: Node, target: str, text: str | None
    ) -> tuple[str, str | None]:
        """Follows a command of a redirected statement; the file that it writes, with its text."""
        words = self._words_of(command)
        name = words[0].rpartition("/")[2] if words else ""
        if name == "tee" and len(words) > 1:
            return words[-1], text
        if text is not None and not target and SHELLS & set(words):
            self._nested(text, words)
        elif name in ("echo", "printf") and target:
            return target, _printed(words)
        else:
            self._command(command)
        return target, text

    def _target(self, node: Node) -> str:
        """The file that output goes to; empty: it goes to another place."""
        is_output = any(child.type in (">", ">>", ">|") for child in node.children)
        if not is_output or any(
            child.type == "file_descriptor" for child in node.children
        ):
            return ""
        destination = node.named_children[-1]
        return self._one(destination)

    def _document(self, node: Node) -> str:
        if node.type == "herestring_redirect":
            return self._one(node.named_children[0])
        start = ""
        body = None
        for child in node.children:
            if child.type == "heredoc_start":
                start = _text(child)
            if child.type == "heredoc_body":
                body = child
        if body is None:
            return ""
        text = _text(body)
        if not re.search(r"['\"\\]", start):
            words = _Words()
            self._write_parts(body, words)
            text = words.open or ""
        if any(child.type == "<<-" for child in node.children):
            text = re.sub(r"^\t+", "", text, flags=re.MULTILINE)
        return text

    # Commands

    def _words_of(self, node: Node) -> list[str]:
        words: list[str] = []
        for child in node.named_children:
            if child.type.endswith("_redirect") or child.type == "variable_assignment":
                continue
            words += self._expanded(child)
            if len(words) > MOST_WORDS:
                raise ConfigError(f"a command has more than {MOST_WORDS} words")
        return words

    def _command(self, node: Node, _: int = 0) -> None:
        if node.has_error and MENTIONS.search(_text(node)):
            raise ConfigError(_unreadable(node))
        before = {}
        for child in node.named_children:
            if child.type == "variable_assignment":
                name = child.child_by_field_name("name")
                if name is not None:
                    before[_text(name)] = self.variables.get(_text(name))
                self._assign(child)
        self.command(self._words_of(node))
        for written, value in before.items():  # set for this command alone
            if value is None:
                self.variables.pop(written, None)
            else:
                self.variables[written] = value

    def command(self, words: list[str]) -> None:
        """Follows a command whose words are known, as a container's."""
        self.steps += 1
        if not words:
            return
        name = words[0].rpartition("/")[2]
        if re.match(r"--[A-Za-z]", words[0]):
            self.given.notes.append(
                f"'{words[0][:40]}' begins a line and is no part of the command before it"
            )
        elif name in self.functions:
            self._call(name, words[1:])
        elif name in BUILT_IN:
            self._built_in(name, words)
        elif name not in SILENT:
            self._look(words)

    def _built_in(self, name: str, words: list[str]) -> None:
        """Commands that change the shell itself, and a Dockerfile's."""
        if name in ASSIGNS:
            for word in words[1:]:
                key, equals, value = word.partition("=")
                if equals:
                    self.variables[key] = value
        elif name == "FROM":
            self.version = _version_in(words)
        elif name in ("source", "."):
            self._source(words[1:2])
        elif name == "set" and "--" in words:
            self.arguments = words[words.index("--") + 1 :]
        elif name == "shift" and self.arguments:
            self.arguments = self.arguments[1:]
        elif name == "eval":
            self._nested(" ".join(words[1:]), words)

    def _call(self, name: str, arguments: list[str]) -> None:
        self.called.add(name)
        if self.depth > MOST_NESTED:
            return
        outer = self.arguments
        self.arguments = arguments
        self.depth += 1
        self._statement(self.functions[name], 0)
        self.depth -= 1
        self.arguments = outer

    def _source(self, paths: list[str]) -> None:
        for path in paths:
            text = self.given.file(path)
            if text is not None and self.depth <= MOST_NESTED:
                self.depth += 1
                self._statement(_parsed(text), 0)
                self.depth -= 1

    def _look(self, words: list[str]) -> None:
        """A command that may start a server, itself or in a script that it is given."""
        if "install" in words:
            installed = INSTALLED.search(" ".join(words[:40]))
            self.version = installed[1] if installed is not None else self.version
            return
        if not any(MENTIONS.search(word) for word in words):
            return
        is_container = words[0].rpartition("/")[2] in CONTAINERS
        if is_container and FETCHES & set(words[1:3]):
            return
        place = _script_in(words)
        if place is not None:
            self._nested(words[place], words, arguments=words[place + 2 :])
            return
        start = start_of(words)
        if start is not None:
            start.version = start.version or self.version
            start.num_gpus = self._visible(words)
            self.starts.append(start)
            return
        for word in words[1:]:
            if " " in word.strip() and MENTIONS.search(word):
                self._nested(word, words)

    def _nested(
        self, text: str, words: list[str], *, arguments: Sequence[str] = ()
    ) -> None:
        variables: Mapping[str, Value] = self.variables
        is_apart = CONTAINERS & {word.rpartition("/")[2] for word in words[:2]}
        if is_apart:
            variables = self._passed(words)
        inner = Shell(self.given, variables, arguments=arguments, depth=self.depth + 1)
        inner.functions = self.functions
        inner.steps = self.steps
        inner.run(text)
        self.steps = inner.steps
        for start in inner.starts:
            start.version = start.version or _version_in(words) or self.version
            start.num_gpus = start.num_gpus or self._visible(words)
            self.starts.append(start)

    def _passed(self, words: list[str]) -> dict[str, Value]:
        """Variables that a container is given by -e and --env-file."""
        passed: dict[str, Value] = {}
        for option, value in _options_of(words):
            if option in ("-e", "--env"):
                name, equals, text = value.partition("=")
                outer = self.lookup(name)
                if equals:
                    passed[name] = text
                elif outer is not None:
                    passed[name] = outer
            if option == "--env-file":
                passed |= variables_of(self.given.file(value) or "")
        return passed

    def _visible(self, words: list[str]) -> int | None:
        """Devices that the command may use, where it says which."""
        passed = self._passed(words[:200])
        for name in VISIBLE:
            value = passed.get(name, self.variables.get(name))
            if isinstance(value, str) and re.fullmatch(r"\d+(?:,\d+)*", value):
                return len(value.split(","))
        for option, value in _options_of(words[:200]):
            if option == "--gpus" and value.isdigit():
                return int(value)
            if option == "--gpus" and "device=" in value:
                return len(value.strip("\"'").partition("=")[2].strip("\"'").split(","))
        return None


class _Doubt:
    """A part of a script that runs under a condition which is not known."""

    def __init__(self, shell: Shell, place: str) -> None:
        self.shell = shell
        self.place = place
        self.outer = shell.doubt

    def __enter__(self) -> None:
        self.shell.doubt = self.place or self.outer

    def __exit__(self, *_: object) -> None:
        self.shell.doubt = self.outer


def _divided(node: Node) -> tuple[list[Node], list[Node]]:
    """A redirected statement's documents, and its other parts, which may stand within these."""
    documents = [child for child in node.named_children if child.type in DOCUMENTS]
    parts = [child for child in node.named_children if child.type not in DOCUMENTS]
    for document in documents:
        inside = document.named_children
        parts += [part for part in inside if not part.type.startswith("heredoc")]
    return documents, parts


def _branches(node: Node) -> Iterator[tuple[Node, Node | None, list[Node]]]:
    """The branches of an if, each with its condition and statements."""
    condition = node.child_by_field_name("condition")
    body = [child for child in node.named_children if child.type not in CLAUSES]
    yield node, condition, [child for child in body if child != condition]
    for clause in node.named_children:
        parts = clause.named_children
        if clause.type == "elif_clause" and parts:
            yield clause, parts[0], parts[1:]
        elif clause.type == "else_clause":
            yield clause, None, parts


def _parsed(text: str) -> Node:
    """The script's syntax. Raises ConfigError for a text that takes too long."""
    # a shell ignores zero bytes, and the parser takes each for the end
    source = text.replace("\r\n", "\n").replace("\0", "")
    # a blank behind a line's last backslash
    source = re.sub(r"\\[ \t]+\n", "\\\n", source)
    # a comment between options, whose output is empty
    source = re.sub(r"`[ \t]*#[^`\n]*`", "", source)
    data = source.encode(errors="replace")
    if len(data) > QUICK_BYTES:
        _check_time(data)
    return _parser().parse(data).root_node


def _check_time(data: bytes) -> None:
    """Raises ConfigError for a text that takes too long to parse, as long ones with errors do."""
    end = time.monotonic() + PARSE_S

    def part(begin: int, _: object) -> bytes:
        return data[begin : begin + PART_BYTES]

    def is_late(*_: object) -> bool:
        return time.monotonic() > end

    try:
        _parser().parse(part, progress_callback=is_late)
    except ValueError:  # it was ended
        _parser().reset()
        raise ConfigError("the text takes too long to read as a script") from None


def _continued(text: str, given: Given) -> str:
    """A script in which a line that begins with an option goes on with the line before it, whose
    last backslash was lost, or stands before a comment."""
    lines: list[str] = []
    for number, whole in enumerate(text.split("\n"), 1):
        line = REMARK.sub(r"\\", whole)
        if line != whole:
            given.notes.append(
                f"line {number} has a comment behind its backslash, which ends the command in a "
                "shell: it is read without"
            )
        before = lines[-1].strip() if lines else ""
        is_option = re.match(r"[ \t]+--?[A-Za-z]", line) is not None
        is_open = (
            before and not before.endswith(("\\", "(", ";", "&&")) and before[0] != "#"
        )
        if is_option and is_open and MENTIONS.search(lines[-1]):
            given.notes.append(
                f"line {number} begins with an option: it is read as a part of the command before"
            )
            lines[-1] += line
        else:
            lines.append(line)
    return "\n".join(lines)


def _check_quotes(root: Node, text: str) -> None:
    """Raises ConfigError for a quote that does not end."""
    if text.count("'") + text.count('"') == 0:
        return
    stack = [root]
    while stack:
        node = stack.pop()
        is_error = node.type == "ERROR" or node.is_missing
        if is_error and re.search(r"['\"]", _text(node)):
            raise ConfigError(_unreadable(node))
        if node.has_error:
            stack += node.children


def _unreadable(node: Node) -> str:
    return (
        f"the command cannot be read as a shell reads it: {_line(node)}, "
        f"'{_text(node).strip()[:40]}'"
    )


def _text(node: Node) -> str:
    return (node.text or b"").decode(errors="replace")


def _line(node: Node) -> str:
    return f"line {node.start_point.row + 1}"


def _joined(first: bool | None, second: bool | None, node: Node) -> bool | None:
    """Two conditions' and, or or."""
    is_and = any(
        child.type in ("&&", "-a") or _text(child) == "-a" for child in node.children
    )
    decides = not is_and
    if decides in (first, second):
        return decides
    if None in (first, second):
        return None
    return is_and


def _is_whole(text: str) -> bool:
    return re.fullmatch(r"-?\d{1,12}", text.strip()) is not None


def _appended(before: Value, value: Value) -> Value:
    if isinstance(before, list) or isinstance(value, list):
        first = before if isinstance(before, list) else [before] * bool(before)
        second = value if isinstance(value, list) else [value]
        return [*first, *second][:MOST_WORDS]
    return before + value


def _element(value: Value | None, index: str) -> Value | None:
    if index in ("@", "*"):
        if isinstance(value, str):
            return [value]
        return value
    if isinstance(value, list) and index.isdigit():
        return value[int(index)] if int(index) < len(value) else ""
    return value


def _changed(value: str, rest: str) -> str:
    """${X##*/}, ${X%.*}, ${X/a/b}, ${X,,}: a value with a part taken away."""
    if rest in (",,", "^^"):
        return value.lower() if rest == ",," else value.upper()
    match = re.fullmatch(r"(##?|%%?)(.*)", rest, flags=re.DOTALL)
    if match is not None:
        sign, pattern = match.groups()
        cuts = list(range(len(value) + 1))[:1000]
        order: Iterable[int] = reversed(cuts)
        if sign in ("#", "%%"):  # the shortest head, the longest tail
            order = cuts
        for cut in order:
            part = value[:cut] if sign[0] == "#" else value[cut:]
            if fnmatch.fnmatchcase(part, pattern):
                return value[cut:] if sign[0] == "#" else value[:cut]
        return value
    replaced = re.fullmatch(r"(//?)([^/]+)/?(.*)", rest)
    if replaced is not None:
        count = -1 if replaced[1] == "//" else 1
        return value.replace(replaced[2].replace("\\", ""), replaced[3], count)
    return value


def _default_of(node: Node) -> tuple[str, list[Node]]:
    """The sign of ${X:-word}, and the nodes of its word."""
    children = node.children
    for place, child in enumerate(children):
        sign = _text(child)
        if sign in (":-", "-", ":=", "=", ":+", "+", ":?", "?"):
            return sign, [part for part in children[place + 1 :] if part.type != "}"]
    return ":-", []


def _unquoted(match: re.Match[str]) -> str:
    return "" if match[1].endswith("\n") else match[1]


def _in_quotes(text: str) -> str:
    return re.sub(r"\\([$`\"\\]|\n)", lambda match: match[1].strip("\n"), text)


def _unescaped(text: str) -> str:
    known = {"n": "\n", "t": "\t", "'": "'", "\\": "\\", '"': '"'}
    return re.sub(r"\\(.)", lambda match: known.get(match[1], match[0]), text)


def _calculated(text: str) -> int | None:
    """A sum of whole numbers."""
    if len(text) > 200:
        return None
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError):
        return None


def _value(node: ast.expr) -> int | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left = _value(node.left)
        right = _value(node.right)
        if left is not None and right is not None:
            result = OPERATORS[type(node.op)](left, right)
            return result if result.bit_length() <= MOST_BITS else None
    return None


def _printed(words: list[str]) -> str:
    """The output of echo or printf."""
    options = [word for word in words[1:] if word not in ("-e", "-n", "-en")]
    if words[0] == "printf" and options and "%s" in options[0]:
        return "\n".join(options[1:]) + "\n"
    return _unescaped(" ".join(options)) + "\n"


def _script_in(words: Sequence[str]) -> int | None:
    """The place of the script that a shell's -c is given."""
    for place in range(1, len(words)):
        is_script = re.fullmatch(r"-\w*c", words[place - 1]) is not None
        if is_script and _has_shell(words[:place]):
            return place
    return None


def _has_shell(words: Sequence[str]) -> bool:
    """Whether a -c is a shell's."""
    if len(words) < 2:
        return True
    return any(re.split(r"[/=]", word)[-1] in SHELLS for word in words)


def _options_of(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            continue
        if name.startswith("--") and equals:
            yield name, value
        elif place + 1 < len(words):
            yield word, words[place + 1]


def _version_in(words: Sequence[str]) -> str | None:
    from magicdec.specs.serve_command.start import OTHER_IMAGES

    for word in words:
        tagged = OTHER_IMAGES.search(word)
        if tagged is not None:
            return tagged["version"]
    return None


def variables_of(text: str) -> dict[str, Value]:
    """The variables of an env file: a name and a value a line."""
    variables: dict[str, Value] = {}
    for line in text.splitlines():
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and not name.startswith("#"):
            variables[name.strip()] = value.strip().strip("\"'")
    return variables
