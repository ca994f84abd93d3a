"""A shell's script, followed without running anything.

Plain assignments are followed, and of several the last counts. A name that a condition, a loop, a
function, `unset`, `read`, `let` or arithmetic may set is open: a mark stands for it in the words, and
whoever needs its value asks. What is set in a subshell or a pipe ends with it, as in a shell.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from magicdec.errors import ConfigError
from magicdec.specs.serve_command.start import (
    INSTALLED,
    MARKED,
    MENTIONS,
    OPEN,
    OTHER_IMAGES,
    OWN_ARGUMENTS,
    Given,
    Start,
    start_of,
)
from magicdec.specs.serve_command.syntax import (
    ASSIGNED,
    Compound,
    Lines,
    Node,
    Piece,
    Pipeline,
    SimpleCommand,
    Word,
    default_parts,
    parsed,
    quoted_parts,
    unescaped,
)

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
DECLARES = frozenset(
    ("export", "declare", "local", "readonly", "typeset", "ENV", "ARG")
)
READS = frozenset(("read", "mapfile", "readarray", "getopts", "unset", "let", "printf"))
"""Commands that set names to what is not written."""
TESTS = frozenset(("[", "[[", "test", "((", "false", "!"))
LEAVES = frozenset(("exit", "return", "exec", "break", "continue"))
ENVIRONMENTS = re.compile(r"activate|conda|profile|bashrc|setvars|cargo/env")
"""Files that are sourced for paths, not for a server's settings."""
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
MOST_STEPS = 50_000
MOST_NESTED = 12
MOST_WORDS = 20_000
MOST_VALUE = 200_000
MOST_VALUES = 5_000_000
"""Characters of all values that are set, one after the other."""
MOST_CUT = 1000
"""Characters of a value of which a pattern cuts a part."""
REMARK = re.compile(r"(?<=[ \t])\\[ \t]+#.*$")
"""A comment behind a line's last backslash."""
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
SUM_SETS = re.compile(
    r"([A-Za-z_]\w*)(?:\[[^]]*\])?\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)"
    r"|([A-Za-z_]\w*)\s*(?:\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
"""Names that arithmetic sets."""
INSIDE = re.compile(
    r"([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[([^]]*)\])?(?:(:?[-=?+])|(##?|%%?))?(.*)", re.S
)
"""The inside of ${…}: a name, an element, a default's or a cut's sign, and the rest."""


class Shell:
    """A shell that reads one script."""

    def __init__(
        self,
        given: Given,
        names: Mapping[str, Value] | None = None,
        *,
        reasons: Mapping[str, str] | None = None,
        depth: int = 0,
        first_line: int | None = None,
    ) -> None:
        self.given = given
        self.names: dict[str, Value] = dict(names or {})
        self.open: dict[str, str] = dict(reasons or {})
        """Why names that something sets are not known."""
        self.exported = {*self.names, *self.open}
        self.exports_all = False
        self.ended: dict[str, str] = {}
        """Names that were set where it did not last."""
        self.journal: list[tuple[str, Value | None, str | None]] = []
        """States of names before each change, to go back to where a block ends."""
        self.settled: set[str] = set()
        """Names that were plainly set to more than one value."""
        self.set_by: dict[str, dict[str, str]] = {}
        """Names that functions set: by function, why they are open elsewhere."""
        self.functions: list[Compound] = []
        self.inside = ""
        """The function that is read."""
        self.depth = depth
        self.starts: list[Start] = []
        self.doubt = ""
        self.version: str | None = None
        self.lines = Lines("", given.first_line if first_line is None else first_line)
        self.is_script = first_line is not None
        """Whether lines are known; else words of a manifest are read."""
        self.offset = 0
        self.steps = 0
        self.characters = 0

    def run(self, text: str) -> None:
        """Reads a script. Raises ConfigError where it cannot be taken apart as a shell does."""
        if self.depth > MOST_NESTED or not MENTIONS.search(text):
            return
        if text.count("\n") > MOST_STEPS:
            raise ConfigError(f"the script has more than {MOST_STEPS} lines")
        first = self.lines.first
        # a shell ignores zero bytes; blanks behind a line's last backslash are a slip
        text = text.replace("\r\n", "\n").replace("\0", "")
        text = re.sub(r"\\[ \t]+\n", "\\\n", _continued(text, self.given))
        statements = parsed(text, first)
        self.lines = Lines(text, first)
        self.is_script = True
        self.functions = list(_functions(statements))
        for function in self.functions:
            why = f"is set in the function {function.name} ({self._line(function)})"
            for name in _function_sets(function):
                self.set_by.setdefault(name, {})[function.name] = why
        self._list(statements)
        if not self.starts:
            for function in self.functions:
                self._function(function)

    # Statements

    def _list(self, statements: Sequence[Pipeline]) -> bool:
        """Reads statements one after the other; whether they leave what they stand in."""
        chain: int | None = None
        outer = self.doubt
        line = ""
        before: Node | None = None
        for statement in statements:
            self.offset = statement.nodes[0].offset
            if chain is not None and statement.link != "&&":
                self._end_block(chain, f"is set under a condition ({line})")
                chain = None
                self.doubt = outer
            if statement.link:
                if chain is None:
                    chain = len(self.journal)
                    line = self._line(statement.nodes[0])
                if statement.link == "||" or _is_test(before):
                    self.doubt = f"under a condition ({line})"
            leaves = self._pipeline(statement)
            before = statement.nodes[-1]
            if leaves and chain is None:
                return True
        if chain is not None:
            self._end_block(chain, f"is set under a condition ({line})")
            self.doubt = outer
        return False

    def _pipeline(self, statement: Pipeline) -> bool:
        if len(statement.nodes) == 1 and not statement.is_background:
            return self._node(statement.nodes[0])
        for node in statement.nodes:
            mark = len(self.journal)
            self._node(node)
            self._end_block(mark, "", f"is set in a pipe ({self._line(node)})")
        return False

    def _node(self, node: Node) -> bool:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise ConfigError(f"the script has more than {MOST_STEPS} steps")
        self.offset = node.offset
        if isinstance(node, SimpleCommand):
            return self._command(node)
        mark = len(self.journal)
        line = self._line(node)
        outer = self.doubt
        if node.kind == "group":
            return self._list(node.branches[0])
        if node.kind == "subshell":
            self._list(node.branches[0])
            self._end_block(mark, "", f"is set in a subshell ({line})")
        elif node.kind == "condition":
            names: set[str] = set()
            for place, branch in enumerate(node.branches):
                if place:
                    self.doubt = f"under a condition ({line})"
                self._list(branch)
                names |= self._end_block(mark)
            for name in names:
                self._leave_open(name, f"is set under a condition ({line})")
        elif node.kind in ("loop", "while"):
            why = f"is set in a loop ({line})"
            for name in _sets(node):
                self._leave_open(name, why)
            mark = len(self.journal)
            if node.kind == "while":
                self.doubt = f"under a condition ({line})"
            for branch in node.branches:
                self._list(branch)
            self._end_block(mark, why)
        self.doubt = outer
        return False

    def _function(self, function: Compound) -> None:
        """Reads a function's body as if it were called at the script's end."""
        self.inside = function.name
        line = self._line(function)
        self.doubt = f"in the function {function.name} ({line})"
        self.steps += len(self.settled)
        for name in self.settled:
            self._leave_open(name, "is set to several values")
        for place in (*map(str, range(10)), "@", "*"):
            if place not in self.given.values:
                why = f"is an argument of the function {function.name} ({line})"
                self._leave_open(place, why)
        mark = len(self.journal)
        self._list(function.branches[0])
        self._end_block(mark)
        self.inside = ""

    def _end_block(self, mark: int, why: str = "", ended: str = "") -> set[str]:
        """Takes names back to what they were before a block; `why`: those that it set are open."""
        names = set()
        while len(self.journal) > mark:
            name, value, reason = self.journal.pop()
            names.add(name)
            self.names.pop(name, None)
            self.open.pop(name, None)
            if value is not None:
                self.names[name] = value
            if reason is not None:
                self.open[name] = reason
        for name in names:
            if why:
                self._leave_open(name, why)
            elif ended:
                self.ended[name] = ended
        return names

    def _line(self, node: Node) -> str:
        return f"line {self.lines.at(node.offset)}"

    # Names

    def _set(self, name: str, value: Value) -> None:
        if len(value) > MOST_VALUE:
            raise ConfigError(f"{name[:40]} has more than {MOST_VALUE} characters")
        self.characters += len(value) + 1
        if self.characters > MOST_VALUES:
            raise ConfigError(
                f"the script's values have more than {MOST_VALUES} characters"
            )
        before = self.names.get(name)
        if before is not None and before != value:
            self.settled.add(name)
        self.journal.append((name, before, self.open.pop(name, None)))
        self.names[name] = value

    def _leave_open(self, name: str, why: str) -> None:
        self.journal.append((name, self.names.pop(name, None), self.open.get(name)))
        self.open[name] = why

    def lookup(self, name: str) -> Value | None:
        """A name's value, or the mark of one that is open; None: the text never sets it."""
        if name in self.given.values:
            return self.given.values[name]
        for function, why in self.set_by.get(name, {}).items():
            if function != self.inside or not function:
                return self.given.left_open(f"${name}", why)
        if name in self.open:
            return self.given.left_open(f"${name}", self.open[name])
        return self.names.get(name)

    def _nowhere(self, name: str) -> str:
        why = self.ended.get(name, "is set nowhere in this file")
        if name not in self.ended and self.is_script:
            why += f" (line {self.lines.at(self.offset)})"
        elif name not in self.ended:
            why += self.given.place(f"${name}") or self.given.place(f"${{{name}")
        return self.given.left_open(f"${name}", why)

    def _assign(self, name: str, sign: str, index: str, parts: Word) -> None:
        """An assignment, plain where all of its value is written."""
        line = f"line {self.lines.at(self.offset)}"
        if index:
            self._leave_open(name, f"is set in part ({line})")
            return
        value: Value
        if parts and parts[0].kind == "array":
            value = [text for word in parts[0].words for text in self._expanded(word)]
        else:
            value = self._one(parts)
            first = next(iter(self.given.open_in(value)), "$NAME")
            is_name = re.fullmatch(r"\$[\w@*]+", first) is not None
            if not is_name and value.startswith(OPEN):
                self._leave_open(name, f"is computed when the script runs ({line})")
                return
        if sign == "+=" and name in self.open:
            return
        before = self.names.get(name, "")
        if isinstance(before, list) and isinstance(value, str):  # its first element
            first, *rest = before or [""]
            value = [first + value if sign == "+=" else value, *rest]
        elif sign == "+=":
            value = _appended(before, value)
        self._set(name, value)

    # Words

    def _expanded(self, word: Word) -> list[str]:
        """The words that one word is, its expansions put in and unquoted ones divided."""
        words: list[str] = []
        last: str | None = None
        for part in word:
            self.offset = part.offset
            value = self._value(part)
            if isinstance(value, str):
                # a blank at an end of what is not quoted ends the word there
                pieces = [value] if part.is_quoted else re.split(r"[ \t\n]+", value)
            elif part.is_quoted:
                pieces = value
            else:
                pieces = [piece for item in value for piece in item.split()]
            if not pieces and part.is_quoted and last == "":
                last = None  # "${EMPTY[@]}" is no word
            for place, piece in enumerate(pieces):
                if place and last is not None:
                    words.append(last)
                    last = None
                if piece or part.is_quoted:
                    last = (last or "") + piece
        if last is not None:
            words.append(last)
        return words

    def _one(self, word: Sequence[Piece]) -> str:
        """A word that is not divided, as an assignment's value."""
        texts = []
        for part in word:
            self.offset = part.offset
            value = self._value(part)
            texts.append(value if isinstance(value, str) else " ".join(value))
        return "".join(texts)

    def interpolated(self, text: str) -> str:
        """Compose's ${X:-d} in a text, and $$ as a dollar."""
        pieces = re.sub(r"([\\`])", r"\\\1", text).split("$$")
        return "$".join(self._one(quoted_parts(piece, 0)) for piece in pieces)

    def _value(self, part: Piece) -> Value:
        if part.kind == "text":
            return part.text
        line = f"line {self.lines.at(part.offset)}"
        if part.kind != "value":
            for name in _sum_sets(part.text):
                self._leave_open(name, f"is set by arithmetic ({line})")
            return self._computed(part.text)
        return self._braced(part.text, part.is_quoted)

    def _computed(self, written: str) -> str:
        line = self.lines.at(self.offset)
        why = f"is computed when the script runs (line {line})"
        return self.given.left_open(re.sub(r"\s+", " ", written), why)

    def _braced(self, inside: str, is_quoted: bool) -> Value:
        match = INSIDE.fullmatch(inside)
        if match is None or (match[1] == "#" and match[5]):
            return self._computed(f"${{{inside}}}")  # a length, a reference to a name
        name, index, default, cut, rest = match.groups()
        value = self.lookup(name)
        if name in ("@", "*") and value is None:
            return self.given.left_open("$@", OWN_ARGUMENTS)
        if name in self.given.values and index in ("@", "*"):
            value = self.given.values[name].split()
        elif index is not None:
            element = _element(value, index)
            if element is None and value is not None:
                return self._computed(f"${{{inside}}}")
            value = element
        elif isinstance(value, list):
            value = value[0] if value else ""
        if index == "*" and is_quoted and isinstance(value, list):
            value = " ".join(value)
        is_open = isinstance(value, str) and value.startswith(OPEN)
        if default and not is_open:
            return self._default(name, default, value, rest, is_quoted)
        if default and default.endswith("+") and is_open:
            return value or ""
        if value is None:
            return self._nowhere(name)
        if cut and isinstance(value, str):
            pattern = self._one(default_parts(rest))
            unknown = MARKED.search(value) or MARKED.search(pattern)
            if unknown is not None:
                return unknown[0]
            return _cut(value, cut, pattern)
        if (rest and not default) or cut:
            return value if is_open else self._computed(f"${{{inside}}}")
        return value

    def _default(
        self, name: str, sign: str, value: Value | None, word: str, is_quoted: bool
    ) -> Value:
        """${X:-d}, ${X-d}, ${X:=d}, ${X:+d} and ${X:?d} of a name that is plain or never set."""
        is_given = value is not None and (bool(value) or not sign.startswith(":"))
        if sign.endswith("+") and not is_given:
            return ""
        if is_given and not sign.endswith("+"):
            assert value is not None
            return value
        if sign.endswith("?"):
            return self._nowhere(name)
        if self.depth + word.count("${") > 4 * MOST_NESTED:
            raise ConfigError("a variable's default nests too deep")
        offset = self.offset
        if is_quoted:
            text: Value = self._one(quoted_parts(word, offset))
        else:
            text = self._expanded(default_parts(word))
        self.offset = offset
        if sign.endswith("="):
            self._set(name, text if isinstance(text, str) else " ".join(text))
        return text

    # Commands

    def _command(self, node: SimpleCommand) -> bool:
        """Reads a command; whether it leaves the script or the function."""
        line = self._line(node)
        parts = list(node.words)
        before: dict[str, Value] = {}
        mark = len(self.journal)
        while parts and _assignment(parts[0]) is not None:
            assignment = _assignment(parts.pop(0))
            assert assignment is not None
            self._assign(*assignment)
        if not parts and not node.redirects:
            return False
        if parts:  # for this command alone, whose words are expanded without
            changed = {name for name, _, _ in self.journal[mark:]}
            before = {name: self.lookup(name) or "" for name in changed}
            self._end_block(mark)
        if parts and _written(parts[0]) in DECLARES:
            self._declare(parts, line)
            return False
        words: list[str] = []
        for word in parts:
            words += self._expanded(word)
            if len(words) > MOST_WORDS:
                raise ConfigError(f"a command has more than {MOST_WORDS} words")
        self.offset = node.offset
        name = words[0].rpartition("/")[2] if words else ""
        if name in READS or name == "((":
            for changed_name in _command_sets(parts):
                how = "arithmetic" if name in ("((", "let") else f"'{name}'"
                self._leave_open(changed_name, f"is set by {how} ({line})")
        target, document = self._redirected(node)
        if name == "tee" and document is not None and len(words) > 1:
            self._write(words[-1], document, appends="-a" in words)
        elif document is not None and target:
            self._write(target[1], document, appends=target[0] == ">>")
        elif document is not None and SHELLS & set(words):
            self._nested(document, words, before)
            return False
        elif name == "echo" and target:
            options = [word for word in words[1:] if word not in ("-e", "-n", "-en")]
            self._write(
                target[1], unescaped(" ".join(options)) + "\n", target[0] == ">>"
            )
        if words:
            self.command(words, before)
        return name in LEAVES and (name != "exec" or len(words) > 1)

    def _redirected(
        self, node: SimpleCommand
    ) -> tuple[tuple[str, str] | None, str | None]:
        """The operator and file that output goes to, and the document that input comes from."""
        target = None
        document = None
        for redirect in node.redirects:
            if redirect.document is not None:
                document = self._one(redirect.document)
            elif redirect.operator in (">", ">>", ">|") and redirect.target:
                target = (redirect.operator, self._one(redirect.target))
        return target, document

    def _write(self, path: str, text: str, appends: bool) -> None:
        """Keeps a file that the script writes."""
        if appends:
            text = self.given.files.get(path, "") + text
        if self.doubt:
            self.given.notes.append(
                f"{path[:80]} is written {self.doubt}, which is taken to hold"
            )
        if len(text) <= MOST_VALUES:
            self.given.files[path] = text

    def _declare(self, parts: Sequence[Word], line: str) -> None:
        """export, declare, local and readonly, and a Dockerfile's ENV and ARG."""
        verb = _written(parts[0])
        options = {
            sign
            for part in parts[1:]
            for sign in _written(part)
            if _written(part).startswith("-")
        }
        for part in parts[1:]:
            assignment = _assignment(part)
            if assignment is not None:
                self._assign(*assignment)
                name = assignment[0]
            else:
                text = self._one(part)  # "X=d", or a name alone
                match = ASSIGNED.match(text)
                name = text
                if match is not None:
                    name = match[1]
                    self._set(name, text[match.end() :])
            if verb in ("export", "ENV", "ARG") or "x" in options:
                self.exported.add(name)
            if "n" in options:  # a name of another name
                for other in (name, _written(part).partition("=")[2]):
                    self.set_by[other] = {"": f"has two names ({line})"}
            if options & set("ilu") and IDENTIFIER.fullmatch(name):
                self._leave_open(name, f"is computed by {verb} ({line})")
        if verb == "ENV" and len(parts) > 2 and _assignment(parts[1]) is None:
            self._set(_written(parts[1]), " ".join(map(self._one, parts[2:])))

    def command(
        self, words: list[str], before: Mapping[str, Value] | None = None
    ) -> None:
        """Reads a command whose words are known, as a container's. `before`: names that are set
        for it alone."""
        self.steps += 1
        if not words:
            return
        name = words[0].rpartition("/")[2]
        if re.match(r"--[A-Za-z]", words[0]):
            self.given.notes.append(
                f"'{words[0][:40]}' begins a line and is no part of the command before it"
            )
        elif name == "FROM":
            self.version = _version_in(words)
        elif name in ("source", "."):
            self._source(words[1:2])
        elif name == "set" and {"-a", "allexport"} & set(words):
            self.exports_all = True
        elif name == "shift" or (name == "set" and "--" in words):
            line = self.lines.at(self.offset)
            for place in (*map(str, range(1, 10)), "@", "*"):
                self._leave_open(place, f"is set by '{name}' (line {line})")
        elif name == "eval":
            self._evaluated(" ".join(words[1:]))
        elif name not in SILENT:
            self._look(words, before or {})

    def _evaluated(self, text: str) -> None:
        """eval: a script in this shell's own scope."""
        self.depth += 1
        if self.depth <= MOST_NESTED and len(text) <= MOST_VALUE:
            lines = self.lines
            first = lines.at(self.offset)
            statements = parsed(text, first)
            self.lines = Lines(text, first)
            self._list(statements)
            self.lines = lines
        self.depth -= 1

    def _source(self, paths: Sequence[str]) -> None:
        for path in paths:
            text = self.given.file(path)
            if text is not None:
                self._evaluated(text)
            elif not ENVIRONMENTS.search(path):
                line = self.lines.at(self.offset)
                self.given.notes.append(
                    f"{path[:80]} (line {line}) is not here: what it sets is not known"
                )

    def _look(self, words: list[str], before: Mapping[str, Value]) -> None:
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
            self._nested(words[place], words, before)
            return
        start = start_of(words)
        if start is not None:
            start.version = start.version or self.version
            start.num_gpus = self._visible(words, before)
            start.doubt = self.doubt
            self.starts.append(start)
            return
        for word in words[1:]:
            if " " in word.strip() and MENTIONS.search(word):
                self._nested(word, words, before)

    def _nested(self, text: str, words: list[str], before: Mapping[str, Value]) -> None:
        """A script within a word: a shell of its own, which sees what is exported to it."""
        names: dict[str, Value] = {}
        reasons: dict[str, str] = {}
        is_apart = CONTAINERS & {word.rpartition("/")[2] for word in words[:2]}
        if is_apart:
            names = self._passed(words)
        else:
            exported = self.exported
            if self.exports_all:
                exported = {*self.names, *self.open}
            self.steps += len(exported) // 10
            for name in exported:
                if name in self.open:
                    reasons[name] = self.open[name]
                elif (value := self.lookup(name)) is not None:
                    names[name] = value
            names |= before
            for word in words:  # env NAME=value bash -c …
                match = ASSIGNED.match(word)
                if match is None and "=" not in word and word in SHELLS:
                    break
                if match is not None:
                    names[match[1]] = word[match.end() :]
        first = self.lines.at(self.offset)
        inner = Shell(
            self.given, names, reasons=reasons, depth=self.depth + 1, first_line=first
        )
        inner.ended = {
            name: "is set and not exported"
            for name in self.names
            if name not in names and not is_apart
        }
        inner.steps = self.steps
        inner.run(text)
        self.steps = inner.steps
        for start in inner.starts:
            start.version = start.version or _version_in(words) or self.version
            start.num_gpus = start.num_gpus or self._visible(words, before)
            start.doubt = start.doubt or self.doubt
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

    def _visible(self, words: list[str], before: Mapping[str, Value]) -> int | None:
        """Devices that the command may use, where it says which."""
        passed = self._passed(words[:200]) | dict(before)
        for name in VISIBLE:
            value = passed.get(name, self.names.get(name))
            if isinstance(value, str) and re.fullmatch(r"\d+(?:,\d+)*", value):
                return len(value.split(","))
        for option, value in _options_of(words[:200]):
            if option == "--gpus" and value.isdigit():
                return int(value)
            if option == "--gpus" and "device=" in value:
                return len(value.strip("\"'").partition("=")[2].strip("\"'").split(","))
        return None


# Names that statements set


def _functions(statements: Iterable[Pipeline]) -> Iterator[Compound]:
    for statement in statements:
        for node in statement.nodes:
            if isinstance(node, Compound):
                if node.kind == "function":
                    yield node
                for branch in node.branches:
                    yield from _functions(branch)


def _function_sets(function: Compound) -> set[str]:
    """Names that a function sets outside itself."""
    names: set[str] = set()
    own: set[str] = set()
    body = function.branches[0][0].nodes[0]
    assert isinstance(body, Compound)
    for statement in body.branches[0]:
        for node in statement.nodes:
            found = _sets(node)
            is_local = (
                isinstance(node, SimpleCommand) and _written(*node.words[:1]) == "local"
            )
            if is_local and len(statement.nodes) == 1 and not statement.link:
                own |= found - names
            else:
                names |= found - own
    for branch in body.branches[1:]:
        for statement in branch:
            for node in statement.nodes:
                names |= _sets(node)
    return names


def _written(word: Word = ()) -> str:
    """A word as it stands there, without quotes."""
    return "".join(part.text for part in word)


def _sets(node: Node) -> set[str]:
    """All names that may be set within a node."""
    if isinstance(node, SimpleCommand):
        return _command_sets(node.words)
    names = set()
    if node.kind == "loop" and node.name:
        names = set(IDENTIFIER.findall(node.name))
    for branch in node.branches:
        for statement in branch:
            for inner in statement.nodes:
                names |= _sets(inner)
    return names


def _command_sets(words: Sequence[Word]) -> set[str]:
    """Names that a command may set, by its words as they are written."""
    names: set[str] = set()
    texts = [_written(word) for word in words]
    for word in words:
        for part in word:
            if part.kind == "value":
                match = re.match(r"([A-Za-z_]\w*):?=", part.text)
                names |= {match[1]} if match is not None else set()
            elif part.kind == "computed":
                names |= _sum_sets(part.text)
    place = 0
    while place < len(words) and (found := _assignment(words[place])) is not None:
        names.add(found[0])
        place += 1
    if place == len(words):
        return names
    name = texts[place].rpartition("/")[2]
    rest = texts[place + 1 :]
    if name in DECLARES or name in ("eval", "env"):
        for text in rest:
            names |= {match[1] for match in re.finditer(r"([A-Za-z_]\w*)\+?=", text)}
    if name in DECLARES and any(text.startswith("-") for text in rest):
        for text in rest:
            names |= set(IDENTIFIER.findall(text.partition("=")[0]))
    elif name in ("((", "let"):
        for text in rest:
            names |= _sum_sets(f"$(({text}))")
    elif name == "printf":
        if rest[:1] == ["-v"]:
            names |= set(rest[1:2])
    elif name in READS:
        names |= {text for text in rest if IDENTIFIER.fullmatch(text)}
        if name == "read" and not names:
            names.add("REPLY")
    elif name in ("set", "shift"):
        names |= {*map(str, range(1, 10)), "@", "*"}
    return names


def _sum_sets(written: str) -> set[str]:
    """Names that $((…)) sets; $(…) and backquotes set none that last."""
    if not written.startswith("$(("):
        return set()
    return {name for found in SUM_SETS.findall(written) for name in found if name}


def _assignment(word: Word) -> tuple[str, str, str, Word] | None:
    """The name, sign, index and value of NAME=value; None: the word is none."""
    if not word or word[0].kind != "text" or word[0].is_quoted:
        return None
    match = ASSIGNED.match(word[0].text)
    if match is None:
        return None
    rest = word[0]._replace(text=word[0].text[match.end() :])
    value = word[1:]
    if rest.text:
        value = (rest, *value)
    return match[1], match[3], match[2] or "", value


def _is_test(node: Node | None) -> bool:
    """Whether a command does nothing but decide what runs behind it."""
    if not isinstance(node, SimpleCommand) or not node.words:
        return False
    return _written(node.words[0]) in TESTS


# Texts


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
            lines[-1] += " \\"
        lines.append(line)
    return "\n".join(lines)


def _appended(before: Value, value: Value) -> Value:
    if isinstance(before, list) or isinstance(value, list):
        first = before if isinstance(before, list) else [before] * bool(before)
        second = value if isinstance(value, list) else [value]
        return [*first, *second][:MOST_WORDS]
    return before + value


def _element(value: Value | None, index: str) -> Value | None:
    """${A[i]}; None: the index is not written as a number."""
    if index in ("@", "*") or value is None:
        return [value] if isinstance(value, str) and OPEN not in value else value
    if isinstance(value, str):
        return value if index == "0" or OPEN in value else None
    if not re.fullmatch(r"-?\d{1,6}", index):
        return None
    place = int(index)
    return value[place] if -len(value) <= place < len(value) else ""


def _cut(value: str, sign: str, pattern: str) -> str:
    """${X##*/}, ${X%.*}: a value without its head or tail."""
    if len(value) > MOST_CUT or len(pattern) > 100:
        raise ConfigError(f"a value of more than {MOST_CUT} characters is not cut")
    cuts: Iterable[int] = range(len(value) + 1)
    if sign in ("##", "%"):  # the longest head, the shortest tail
        cuts = reversed(range(len(value) + 1))
    for cut in cuts:
        part = value[:cut] if sign[0] == "#" else value[cut:]
        if fnmatch.fnmatchcase(part, pattern):
            return value[cut:] if sign[0] == "#" else value[:cut]
    return value


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
