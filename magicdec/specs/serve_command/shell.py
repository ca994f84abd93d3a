"""A shell's script, read without running anything.

Plain assignments are followed, and of several the last counts. A name that anything else sets, as a
condition, a loop, a function, a subshell, `unset`, `read` or arithmetic, is open from there on: a mark
stands for it in the words, and whoever needs its value asks.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from magicdec.errors import ConfigError
from magicdec.specs.serve_command.start import (
    INSTALLED,
    MARKED,
    MENTIONS,
    OWN_ARGUMENTS,
    Build,
    Given,
    Start,
    build_of,
    start_of,
)
from magicdec.specs.serve_command.statements import (
    ASSIGNED,
    Piece,
    ShellStatement,
    Word,
    document_of,
    statements,
    unescaped,
)
from magicdec.specs.serve_command.variables import (
    MOST_VALUE,
    MOST_VALUES,
    Variables,
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
SETS = {
    **dict.fromkeys(("read", "mapfile", "readarray", "getopts", "unset", "printf"), ""),
    **dict.fromkeys(("for", "select"), "in a loop"),
    "let": "by arithmetic",
}
"""Commands that set names to what is not written."""
TESTS = frozenset(("[", "[[", "test", "let", "false"))
LEAVES = frozenset(("exit", "return", "exec"))
ENVIRONMENTS = re.compile(r"activate|conda|profile|bashrc|setvars|cargo/env")
"""Files that are sourced for paths, not for a server's settings."""
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
MOST_STEPS = 50_000
MOST_NESTED = 12
MOST_WORDS = 20_000
MOST_CUT = 1000
"""Characters of a value of which a pattern cuts a part."""
REMARK = re.compile(r"(?<=[ \t])\\[ \t]+#.*$")
"""A comment behind a line's last backslash."""
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
PLACES = (*map(str, range(1, 10)), "@", "*")
"""Arguments of a script or of a function."""
SUM_SETS = re.compile(
    r"([A-Za-z_]\w*)(?:\[[^]]*\])?\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)"
    r"|([A-Za-z_]\w*)\s*(?:\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
"""Names that arithmetic sets."""


class Assignment(NamedTuple):
    """NAME=value, NAME+=value or NAME[index]=value."""

    name: str
    element: str
    sign: str
    value: Word


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
        self.names = Variables(given, names, reasons)
        self.exported = set(names or ())
        self.depth = depth
        self.starts: list[Start] = []
        self.doubt = ""
        """Where the statement stands, if it may not be reached."""
        self.where = ""
        """Where the statement stands, if what it sets may not last."""
        self.function = ""
        """The function that is read, with its line."""
        self.build = Build()
        self.line = given.first_line if first_line is None else first_line
        self.is_script = first_line is not None
        """Whether lines are known; else words of a manifest are read."""
        self.steps = 0

    def run(self, text: str) -> None:
        """Reads a script. Raises ConfigError where it cannot be taken apart as a shell does."""
        if self.depth > MOST_NESTED or not MENTIONS.search(text):
            return
        if text.count("\n") > MOST_STEPS:
            raise ConfigError(f"the script has more than {MOST_STEPS} lines")
        self.is_script = True
        # a shell ignores zero bytes; blanks behind a line's last backslash are a slip
        text = text.replace("\r\n", "\n").replace("\0", "")
        text = re.sub(r"\\[ \t]+\n", "\\\n", _continued(text, self.given))
        bodies = self._read(text)
        if self.starts:
            return
        # functions as if they were called at the script's end
        for name in self.names.several:
            self.names.leave_open(name, "is set to several values")
        left = ""
        for statement in bodies:
            assert statement.block is not None
            function = statement.block.function
            if function == left:
                continue
            self.function = function
            self.doubt = self.where = statement.block.where
            leaves = self._statement(statement)
            if leaves and statement.block.is_body and not statement.before:
                left = function

    # Statements

    def _read(self, text: str) -> list[ShellStatement]:
        """Reads statements in order, and returns those that stand in functions."""
        bodies: list[ShellStatement] = []
        outer_where = self.where
        outer_doubt = self.doubt
        is_tested = False
        name = ""
        for statement in statements(text, self.line):
            self.steps += 1
            if self.steps > MOST_STEPS:
                raise ConfigError(f"the script has more than {MOST_STEPS} steps")
            line = f"(line {statement.line})"
            if statement.before not in ("&&", "||"):
                is_tested = False
            elif statement.before == "||" or name in TESTS:
                is_tested = True
            self.doubt = outer_doubt
            self.where = outer_where
            if statement.block is not None:
                self.doubt = self.where = statement.block.where
            elif statement.before in ("&&", "||"):
                self.where = f"under a condition {line}"
            elif statement.before or statement.after in ("|", "|&", "&"):
                self.where = f"in a pipe {line}"
            if is_tested and not self.doubt:
                self.doubt = f"under a condition {line}"
            name = _written(*statement.words[:1])
            self.function = "" if statement.block is None else statement.block.function
            if self.function:
                bodies.append(statement)
            leaves = self._statement(statement, defines=self.function != "")
            if leaves and not self.where:
                break
        self.where = outer_where
        self.doubt = outer_doubt
        return bodies

    def _statement(self, statement: ShellStatement, *, defines: bool = False) -> bool:
        """Reads a command. Returns whether it leaves the script or the function. `defines`: it stands
        in a function that is not called yet, so only the names that it sets count."""
        self.line = statement.line
        parts = list(statement.words)
        assignments = []
        while parts and (assignment := _assignment(parts[0])) is not None:
            assignments.append(assignment)
            parts.pop(0)
        verb = _written(*parts[:1])
        if not parts:
            for assignment in assignments:
                self._assign(assignment)
        if verb in DECLARES:
            if verb != "local" or not defines:  # a local ends with its function
                self._declare(parts)
            return False
        # for this command alone, whose words are expanded without
        before = {
            assignment.name: self._assigned(assignment.value)
            for assignment in assignments
            if assignment.name not in self.names.open
        }
        words: list[str] = []
        for part in parts:
            words += self._expanded(part)
            if len(words) > MOST_WORDS:
                raise ConfigError(f"a command has more than {MOST_WORDS} words")
        self.line = statement.line
        if verb in SETS:
            how = SETS[verb] or f"by '{verb}'"
            found = words[1:2] if verb in ("for", "select") else words[1:]
            for word in found:
                names = IDENTIFIER.findall(word) if verb == "let" else [word]
                for name in names:
                    self.names.leave_open(name, f"is set {how} (line {self.line})")
        if verb == "read":
            self.names.leave_open("REPLY", f"is set by 'read' (line {self.line})")
        if defines:
            return False
        document = None if statement.document is None else self._one(statement.document)
        target = None
        if statement.target is not None:
            target = self._one(statement.target[1])
        appends = statement.target is not None and statement.target[0] == ">>"
        if verb == "tee" and document is not None and len(words) > 1:
            self._write(words[-1], document, appends="-a" in words)
        elif document is not None and target:
            self._write(target, document, appends=appends)
        elif document is not None and SHELLS & set(words):
            self._nested(document, words, before)
            return False
        elif verb == "echo" and target:
            options = [word for word in words[1:] if word not in ("-e", "-n", "-en")]
            self._write(target, unescaped(" ".join(options)) + "\n", appends=appends)
        if words and words[0]:
            self.command(words, before)
        return verb in LEAVES and (verb != "exec" or len(words) > 1)

    def _write(self, path: str, text: str, *, appends: bool) -> None:
        """Keeps a file that the script writes."""
        if appends:
            text = self.given.files.get(path, "") + text
        if self.doubt:
            self.given.notes.append(
                f"{path[:80]} is written {self.doubt}, which is taken to hold"
            )
        if len(text) <= MOST_VALUES:
            self.given.files[path] = text

    def _declare(self, parts: Sequence[Word]) -> None:
        """export, declare, local and readonly, and a Dockerfile's ENV and ARG."""
        verb = _written(parts[0])
        is_exported = verb in ("export", "ENV", "ARG")
        options = "".join(_written(part) for part in parts if _written(part)[:1] == "-")
        if verb == "ENV" and len(parts) > 2 and _assignment(parts[1]) is None:
            self._set(_written(parts[1]), " ".join(map(self._one, parts[2:])))
            return
        for part in parts[1:]:
            assignment = _assignment(part)
            if options.strip("-x"):
                for name in IDENTIFIER.findall(_written(part)):
                    self.names.leave_open(
                        name, f"is computed by {verb} (line {self.line})"
                    )
            elif assignment is not None:
                self._assign(assignment)
            else:
                text = self._one(part)  # "X=d", or a name alone
                match = ASSIGNED.match(text)
                if match is not None:
                    assignment = Assignment(match[1], "", "=", ())
                    self._set(match[1], text[match.end() :])
            name = _written(part) if assignment is None else assignment.name
            if is_exported or "x" in options:
                self.exported.add(name)

    # Names

    def _assign(self, assignment: Assignment) -> None:
        name = assignment.name
        line = f"(line {self.line})"
        value = self._assigned(assignment.value)
        before = self.names.values.get(name, "")
        if assignment.element:
            self.names.leave_open(name, f"is set in part {line}")
            return
        self.names.leave_computed(name, value)
        outside = self.names.outside
        is_outside = name in outside and name not in self.names.values
        if assignment.sign == "+=" and is_outside:
            self.names.leave_open(name, outside[name])
        elif isinstance(before, list) and isinstance(value, str):  # its first element
            first, *rest = before or [""]
            value = [first + value if assignment.sign == "+=" else value, *rest]
        elif assignment.sign == "+=" and isinstance(value, list):
            items = before if isinstance(before, list) else [before] * bool(before)
            value = [*items, *value]
        elif assignment.sign == "+=":
            value = f"{before}{value}"
        self._set(name, value)

    def _assigned(self, word: Word) -> Value:
        if word and word[0].kind == "array":
            return [text for item in word[0].words for text in self._expanded(item)]
        return self._one(word)

    def _set(self, name: str, value: Value) -> None:
        if self.where:
            self.names.leave_open(name, f"is set {self.where}")
        else:
            self.names.set(name, value)

    def lookup(self, name: str) -> Value | None:
        """A name's value, or the mark of one that is open; None: the text never sets it."""
        if self.function and name in PLACES and name not in self.given.values:
            why = f"is an argument of {self.function}"
            return self.given.left_open(f"${name}", why)
        if name not in self.names:
            return None
        value: Value = self.names.find(name)
        return value

    def _nowhere(self, name: str) -> str:
        why = "is set nowhere in this file"
        if self.is_script:
            why += f" (line {self.line})"
        else:
            why += self.given.place(f"${name}") or self.given.place(f"${{{name}")
        return self.given.left_open(f"${name}", why)

    # Words

    def _expanded(self, word: Word) -> list[str]:
        """The words that one word is, its expansions put in and unquoted ones divided."""
        words: list[str] = []
        last: str | None = None
        for part in word:
            self.line = part.line
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
            self.line = part.line
            value = self._value(part)
            texts.append(value if isinstance(value, str) else " ".join(value))
        return "".join(texts)

    def interpolated(self, text: str) -> str:
        """Compose's ${X:-d} in a text, and $$ as a dollar."""
        pieces = re.sub(r"([\\`])", r"\\\1", text).split("$$")
        return "$".join(self._one(document_of(piece)) for piece in pieces)

    def _value(self, part: Piece) -> Value:
        if part.kind == "text":
            return part.text
        self.line = part.line
        line = f"(line {part.line})"
        if part.kind != "name":
            if part.text.startswith("$(("):
                for name in IDENTIFIER.findall(
                    " ".join(map("".join, SUM_SETS.findall(part.text)))
                ):
                    self.names.leave_open(name, f"is set by arithmetic {line}")
            written = re.sub(r"\s+", " ", part.text)
            return self.given.left_open(
                written, f"is computed when the script runs {line}"
            )
        name = part.text
        value = self.lookup(name)
        if name in ("@", "*") and value is None:
            return self.given.left_open("$@", OWN_ARGUMENTS)
        is_open = isinstance(value, str) and MARKED.match(value) is not None
        if part.element in ("@", "*"):
            if name in self.given.values:
                value = self.given.values[name].split()
            elif isinstance(value, str) and not is_open:
                value = [value]
            if part.element == "*" and part.is_quoted and isinstance(value, list):
                value = " ".join(value)
        elif isinstance(value, list):
            place = part.element or "0"
            if not re.fullmatch(r"-?\d{1,6}", place):
                why = f"is computed when the script runs {line}"
                return self.given.left_open(f"${{{name}[{place}]}}", why)
            is_there = -len(value) <= int(place) < len(value)
            value = value[int(place)] if is_there else ""
        elif part.element not in (None, "0") and value is not None and not is_open:
            value = ""
        sign = part.sign
        if sign[-1:] in ("-", "=", "+", "?") and not is_open:
            # ${X:-d}, ${X-d}, ${X:=d}, ${X:+d} and ${X:?d} of a name that is plain or never set
            is_given = value is not None and (bool(value) or sign[0] != ":")
            if sign[-1] == "+" and not is_given:
                return ""
            if is_given and sign[-1] != "+":
                return value or ""
            if sign[-1] == "?":
                return self._nowhere(name)
            word = part.words[0]
            default = self._one(word) if part.is_quoted else self._expanded(word)
            self.line = part.line
            if sign[-1] == "=":
                self._set(
                    name, default if isinstance(default, str) else " ".join(default)
                )
            return default
        if value is None:
            return self._nowhere(name)
        if sign[:1] in ("#", "%") and isinstance(value, str):
            pattern = self._one(part.words[0])
            unknown = MARKED.search(value) or MARKED.search(pattern)
            return unknown[0] if unknown is not None else _cut(value, sign, pattern)
        return value

    # Commands

    def command(
        self, words: list[str], before: Mapping[str, Value] | None = None
    ) -> None:
        """Reads a command whose words are known, as a container's. `before`: names that are set
        for it alone."""
        self.steps += 1
        if not words:
            return
        name = words[0].rpartition("/")[2]
        if MARKED.fullmatch(words[0]):
            self.given.commands += self.given.open_in(words[0])
        if re.match(r"--[A-Za-z]", words[0]):
            self.given.notes.append(
                f"'{words[0][:40]}' begins a line and is no part of the command before it"
            )
        elif name == "FROM":
            self.build = _build_in(words) or Build()
        elif name in ("source", "."):
            self._source(words[1:2])
        elif name == "shift" or (name == "set" and "--" in words):
            for place in PLACES:
                self.names.leave_open(place, f"is set by '{name}' (line {self.line})")
        elif name == "eval":
            self._evaluated(" ".join(words[1:]))
        elif name not in SILENT:
            self._look(words, before or {})

    def _evaluated(self, text: str) -> None:
        """eval: a script in this shell's own scope."""
        self.depth += 1
        if self.depth <= MOST_NESTED and len(text) <= MOST_VALUE:
            line = self.line
            self._read(text)
            self.line = line
        self.depth -= 1

    def _source(self, paths: Sequence[str]) -> None:
        for path in paths:
            text = self.given.file(path)
            if text is not None:
                self._evaluated(text)
            elif not ENVIRONMENTS.search(path):
                self.given.notes.append(
                    f"{path[:80]} (line {self.line}) is not here: what it sets is not known"
                )

    def _look(self, words: list[str], before: Mapping[str, Value]) -> None:
        """A command that may start a server, itself or in a script that it is given."""
        if "install" in words:
            installed = INSTALLED.search(" ".join(words[:40]))
            if installed is not None:
                self.build = Build(installed[1])
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
            start.built(self.build)
            start.num_gpus = self._visible(words, before)
            start.environment = self._environment(words, before)
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
        if CONTAINERS & {word.rpartition("/")[2] for word in words[:2]}:
            names = self._passed(words)
        else:
            self.steps += len(self.names.values) // 10
            reasons = self.names.outside | self.names.open
            for name, value in self.names.values.items():
                if name in self.exported and name not in self.names.open:
                    names[name] = value
                else:
                    reasons.setdefault(name, "is set and not exported")
            names |= before
            for word in words:  # env NAME=value bash -c …
                match = ASSIGNED.match(word)
                if match is not None:
                    names[match[1]] = word[match.end() :]
                elif word in SHELLS:
                    break
        inner = Shell(
            self.given,
            names,
            reasons=reasons,
            depth=self.depth + 1,
            first_line=self.line,
        )
        inner.steps = self.steps
        inner.run(text)
        self.steps = inner.steps
        for start in inner.starts:
            start.built(_build_in(words) or self.build)
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

    def _environment(
        self, words: list[str], before: Mapping[str, Value]
    ) -> dict[str, str]:
        """The variables that a command is started with."""
        variables: dict[str, Value] = {}
        if words[0].rpartition("/")[2] in CONTAINERS:
            variables = self._passed(words)
        else:
            for name, value in self.names.values.items():
                if name in self.exported and name not in self.names.open:
                    variables[name] = value
            variables |= before
            for word in words:  # env NAME=value vllm serve …
                match = ASSIGNED.match(word)
                if match is not None:
                    variables[match[1]] = word[match.end() :]
                elif word != "env":
                    break
        return {
            name: value for name, value in variables.items() if isinstance(value, str)
        }

    def _visible(self, words: list[str], before: Mapping[str, Value]) -> int | None:
        """Devices that the command may use, where it says which."""
        passed = self._passed(words[:200]) | dict(before)
        for name in VISIBLE:
            value = passed.get(name, self.names.values.get(name))
            if isinstance(value, str) and re.fullmatch(r"\d+(?:,\d+)*", value):
                return len(value.split(","))
        for option, value in _options_of(words[:200]):
            if option == "--gpus" and re.fullmatch(r"\d{1,6}", value):
                return int(value)
            if option == "--gpus" and "device=" in value:
                return len(value.strip("\"'").partition("=")[2].strip("\"'").split(","))
        return None


def _written(word: Word = ()) -> str:
    """A word as it stands there, without quotes."""
    return "".join(piece.text for piece in word)


def _assignment(word: Word) -> Assignment | None:
    """A word as an assignment; None: it is none."""
    if not word or word[0].kind != "text" or word[0].is_quoted:
        return None
    match = ASSIGNED.match(word[0].text)
    if match is None:
        return None
    value = word[1:]
    if match.end() < len(word[0].text):
        value = (word[0]._replace(text=word[0].text[match.end() :]), *value)
    return Assignment(match[1], match[2] or "", match[3], value)


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


def _build_in(words: Sequence[str]) -> Build | None:
    """The build of the first image among words that tells one."""
    return next(filter(None, map(build_of, words)), None)


def variables_of(text: str) -> dict[str, Value]:
    """The variables of an env file: a name and a value a line."""
    variables: dict[str, Value] = {}
    for line in text.splitlines():
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and not name.startswith("#"):
            variables[name.strip()] = value.strip().strip("\"'")
    return variables
