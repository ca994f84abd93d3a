"""A shell's grammar: a script as statements, with each word in parts.

Written by hand, since what is read is little: words with their quotes and expansions, here-documents,
lists, pipelines, and the compound commands around them. Every scan goes forward once.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from magicdec.errors import ConfigError

MOST_DEPTH = 150
"""Compound commands within each other; real scripts stay below ten."""
BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)+|#[^\n]*")
OPERATOR = re.compile(
    r"\d*(?:<<<|<<-?|<&|>&|<>|>>|>\||[<>](?!\())|&>>?|;;&|;;|;&|&&|\|\||\|&|[;&|()\n]"
)
REDIRECTS = re.compile(r"\d*[<>]|&>")
ARITHMETIC = re.compile(r"\(\((?:[^\n()]|\([^\n()]*\)){0,500}\)\)")
PLAIN = re.compile(r"[^\s;&|<>()\"'$\\`]+")
PLAIN_IN_DEFAULT = re.compile(r"[^\"'$\\`]+")
PLAIN_IN_QUOTES = re.compile(r"[^$\\`]+")
ANSI = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)
BACKQUOTED = re.compile(r"`((?:[^`\\]|\\.)*)`", re.DOTALL)
NAME = re.compile(r"\$([A-Za-z_]\w*|[\d@*#?$!-])")
SPECIAL = re.compile(r"\\.|\$?\(|\$\{|[)}\"'`]", re.DOTALL)
ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\[[^]=]*\])?(\+?=)")
ESCAPES = {"n": "\n", "t": "\t", "'": "'", "\\": "\\", '"': '"'}


class Piece(NamedTuple):
    """A piece of a word."""

    kind: str
    """"text", "value" (the inside of ${…}), "computed" (a command's output) or "array"."""
    text: str
    is_quoted: bool
    offset: int
    """Its place in the script."""
    words: tuple[Word, ...] = ()
    """An array's."""


Word = tuple[Piece, ...]


class Token(NamedTuple):
    """A word, or an operator."""

    operator: str
    offset: int
    word: Word = ()


class Redirect(NamedTuple):
    """An operator with the word behind it, or with the here-document that it begins."""

    operator: str
    target: Word
    document: Word | None = None


class SimpleCommand(NamedTuple):
    """A simple command, `[[ … ]]`, or `((…))`, whose text is its word."""

    offset: int
    words: tuple[Word, ...]
    redirects: tuple[Redirect, ...] = ()


class Compound(NamedTuple):
    """Statements within if, case, for, while, { }, ( ) or a function."""

    offset: int
    kind: str
    """"group", "subshell", "condition", "loop", "while" or "function"."""
    branches: tuple[tuple[Pipeline, ...], ...]
    name: str = ""
    """The loop's variable, or the function's name."""


Node = SimpleCommand | Compound


class Pipeline(NamedTuple):
    """A pipeline."""

    link: str
    """"&&" or "||" where one stands before it."""
    nodes: tuple[Node, ...]
    is_background: bool


class Lines:
    """Numbers of a text's lines."""

    def __init__(self, text: str, first: int = 1) -> None:
        self.first = first
        self.ends = [match.start() for match in re.finditer("\n", text)]

    def at(self, offset: int) -> int:
        return self.first + bisect_right(self.ends, offset - 1)


class Unended(ConfigError):
    """A quote, or what else is opened, that does not end."""

    def __init__(self, offset: int) -> None:
        super().__init__(
            "the command cannot be read as a shell reads it: a quote or a brace does not end"
        )
        self.offset = offset


def parsed(text: str, first_line: int = 1) -> tuple[Pipeline, ...]:
    """The statements of a script. Raises ConfigError where a quote does not end."""
    try:
        return _Parser(list(_tokens(text))).script()
    except Unended as error:
        line = Lines(text, first_line).at(error.offset)
        shown = text[error.offset : error.offset + 40].strip()
        raise ConfigError(
            f"the command cannot be read as a shell reads it: line {line}, '{shown}'"
        ) from None


# Words


def _tokens(text: str) -> Iterator[Token]:
    position = 0
    delimiters: list[tuple[str, bool, bool]] = []
    pending: list[Token] = []
    """Tokens since the first here-document of the line, whose body stands below it."""
    while position < len(text):
        blank = BLANK.match(text, position)
        if blank is not None:
            position = blank.end()
            continue
        operator = OPERATOR.match(text, position)
        begin = position
        if operator is not None and operator[0] == "(":
            sums = ARITHMETIC.match(text, position)
            if sums is not None:
                part = Piece("text", sums[0][2:-2], False, begin)
                position = sums.end()
                pending.append(Token("((", begin, (part,)))
                continue
        if operator is not None:
            token = Token(operator[0], begin)
            position = operator.end()
        else:
            word, position = _word(text, position)
            token = Token("", begin, word)
            if pending and pending[-1].operator.lstrip("0123456789") in ("<<", "<<-"):
                written = "".join(part.text for part in word)
                is_plain = not any(part.is_quoted for part in word)
                tabs = pending[-1].operator.endswith("-")
                delimiters.append((written, is_plain, tabs))
        pending.append(token)
        if token.operator != "\n" and position < len(text):
            continue
        documents = []
        for delimiter, is_plain, tabs in delimiters:
            document, position = _document(text, position, delimiter, is_plain, tabs)
            documents.append(document)
        yield from _with_documents(pending, documents)
        delimiters = []
        pending = []
    yield from pending


def _with_documents(tokens: list[Token], documents: list[Word]) -> Iterator[Token]:
    """Tokens in which a here-document stands for its delimiter."""
    bodies = iter(documents)
    is_document = False
    for token in tokens:
        yield token._replace(word=next(bodies, ())) if is_document else token
        is_document = token.operator.lstrip("0123456789") in ("<<", "<<-")


def _document(
    text: str, position: int, delimiter: str, is_plain: bool, tabs: bool
) -> tuple[Word, int]:
    indent = "\t*" if tabs else ""
    end = re.compile(rf"^{indent}{re.escape(delimiter)}[ \t\r]*$", re.MULTILINE)
    found = end.search(text, position)
    stop = len(text) if found is None else found.start()
    body = text[position:stop]
    if tabs:
        body = re.sub(r"^\t+", "", body, flags=re.MULTILINE)
    after = len(text) if found is None else min(found.end() + 1, len(text))
    if is_plain:
        return tuple(quoted_parts(body, position)), after
    return (Piece("text", body, True, position),), after


def _word(text: str, position: int, *, ends: bool = True) -> tuple[Word, int]:
    """The word at a place, and where it ends. `ends`: blanks and operators end it; the word behind
    ${X:- goes on."""
    parts: list[Piece] = []
    plain = PLAIN if ends else PLAIN_IN_DEFAULT
    while position < len(text):
        char = text[position]
        if ends and char in " \t\r\n;&|<>()":
            if char == "(" and len(parts) == 1 and ASSIGNED.fullmatch(parts[0].text):
                array, position = _array(text, position)
                parts.append(array)
                continue
            if char in "<>" and text.startswith("(", position + 1):
                stop = _end(text, position + 2, ")")
                parts.append(
                    Piece("computed", text[position : stop + 1], True, position)
                )
                position = stop + 1
                continue
            break
        if char == "'":
            stop = text.find("'", position + 1)
            if stop < 0:
                raise Unended(position)
            parts.append(Piece("text", text[position + 1 : stop], True, position))
            position = stop + 1
        elif char == '"':
            stop = _end(text, position + 1, '"')
            parts.append(Piece("text", "", True, position))
            parts += quoted_parts(text[position + 1 : stop], position + 1)
            position = stop + 1
        elif char in "$`":
            part, position = _expansion(text, position, is_quoted=False)
            parts.append(part)
        elif char == "\\":
            escaped = text[position + 1 : position + 2]
            if escaped and escaped not in "\r\n":
                parts.append(Piece("text", escaped, True, position))
            position += 2
        else:
            match = plain.match(text, position)
            stop = position + 1 if match is None else match.end()
            parts.append(Piece("text", text[position:stop], False, position))
            position = stop
    return tuple(parts), position


def default_parts(text: str) -> Word:
    """The word behind ${X:-, outside quotes."""
    return _word(text, 0, ends=False)[0]


def quoted_parts(text: str, offset: int) -> list[Piece]:
    """Text between double quotes, or in a here-document: what is plain, and its expansions."""
    parts: list[Piece] = []
    position = 0
    while position < len(text):
        match = PLAIN_IN_QUOTES.match(text, position)
        if match is not None:
            parts.append(Piece("text", match[0], True, offset + position))
            position = match.end()
        elif text[position] == "\\":
            escaped = text[position + 1 : position + 2]
            kept = escaped if escaped in ("$", "`", '"', "\\") else f"\\{escaped}"
            if escaped != "\n":
                parts.append(Piece("text", kept, True, offset + position))
            position += 2
        else:
            part, position = _expansion(text, position, is_quoted=True)
            parts.append(part._replace(offset=offset + part.offset))
    return parts


def _expansion(text: str, position: int, *, is_quoted: bool) -> tuple[Piece, int]:
    """What a dollar or a backquote begins."""
    if text[position] == "`":
        match = BACKQUOTED.match(text, position)
        if match is None:
            raise Unended(position)
        if match[1].strip().startswith("#"):  # a comment between options
            return Piece("text", "", is_quoted, position), match.end()
        return Piece("computed", match[0], is_quoted, position), match.end()
    follows = text[position + 1 : position + 2]
    if follows == "(":
        stop = _end(text, position + 2, ")")
        written = text[position : stop + 1]
        return Piece("computed", written, is_quoted, position), stop + 1
    if follows == "{":
        stop = _end(text, position + 2, "}", is_quoted=is_quoted)
        inside = text[position + 2 : stop]
        return Piece("value", inside, is_quoted, position), stop + 1
    if follows == "'" and not is_quoted:
        match = ANSI.match(text, position)
        if match is None:
            raise Unended(position)
        return Piece("text", unescaped(match[1]), True, position), match.end()
    match = NAME.match(text, position)
    if match is None:  # a dollar alone, or $"translated"
        kept = "" if follows == '"' and not is_quoted else "$"
        return Piece("text", kept, is_quoted, position), position + 1
    return Piece("value", match[1], is_quoted, position), match.end()


def unescaped(text: str) -> str:
    """Text in which \\n is a new line."""
    return re.sub(
        r"\\(.)", lambda match: ESCAPES.get(match[1], match[0]), text, flags=re.DOTALL
    )


def _array(text: str, position: int) -> tuple[Piece, int]:
    begin = position
    position += 1
    words: list[Word] = []
    while position < len(text):
        blank = re.compile(r"(?:\s|\\\n)+|#[^\n]*").match(text, position)
        if blank is not None:
            position = blank.end()
        elif text[position] == ")":
            return Piece("array", "", True, begin, tuple(words)), position + 1
        elif text[position] in ";&|<>(":
            break
        else:
            word, position = _word(text, position)
            words.append(word)
    raise Unended(begin)


def _end(text: str, position: int, closes: str, *, is_quoted: bool = False) -> int:
    """The place of the sign that closes what was opened before `position`."""
    begin = position - 1
    opened = ['"', closes] if is_quoted else [closes]
    floor = len(opened) - 1
    while True:
        match = SPECIAL.search(text, position)
        if match is None:
            raise Unended(begin)
        sign = match[0]
        position = match.end()
        inner = opened[-1]
        in_quotes = inner == '"' or (inner == "}" and opened[-2:-1] == ['"'])
        if sign == inner:
            opened.pop()
            if len(opened) == floor:
                return match.start()
        elif sign == "$(" or (sign == "(" and inner == ")"):
            opened.append(")")
        elif sign == "${":
            opened.append("}")
        elif sign in ('"', "`") and inner != "`":
            opened.append(sign)
        elif sign == "'" and not in_quotes and inner != "`":
            position = text.find("'", position) + 1
            if position == 0:
                raise Unended(match.start())


# Statements


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.place = 0
        self.depth = 0
        self.plain: set[int] = set()
        """Places of words that look like a compound command and have no end: prose, mostly."""

    def script(self) -> tuple[Pipeline, ...]:
        return self._list(())

    def _list(self, ends: tuple[str, ...]) -> tuple[Pipeline, ...]:
        """Statements up to one of the words or operators that end them."""
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise ConfigError(f"the script nests more than {MOST_DEPTH} deep")
        statements: list[Pipeline] = []
        link = ""
        while self.place < len(self.tokens):
            operator = self.tokens[self.place].operator
            if (operator or self._keyword()) in ends:
                break
            if (
                operator
                and operator not in ("(", "((")
                and not REDIRECTS.match(operator)
            ):
                self.place += 1  # a separator, or a stray sign
                link = ""
                continue
            nodes = [self._command()]
            while self._operator() in ("|", "|&"):
                self._skip(("|", "|&", "\n"))
                if self.place < len(self.tokens):
                    nodes.append(self._command())
            after = self._operator()
            statements.append(Pipeline(link, tuple(nodes), after == "&"))
            link = after if after in ("&&", "||") else ""
            if link:
                self._skip(("&&", "||", "\n"))
        self.depth -= 1
        return tuple(statements)

    def _operator(self) -> str:
        if self.place < len(self.tokens):
            return self.tokens[self.place].operator
        return ""

    def _skip(self, operators: tuple[str, ...]) -> None:
        while self._operator() in operators and self.place < len(self.tokens):
            self.place += 1

    def _keyword(self) -> str:
        """The word at this place, where it is plain; empty: it is none."""
        if self.place >= len(self.tokens):
            return ""
        word = self.tokens[self.place].word
        if len(word) == 1 and word[0].kind == "text" and not word[0].is_quoted:
            return word[0].text
        return ""

    def _takes(self, *words: str) -> bool:
        """Whether one of these words or operators comes next, which is then passed."""
        if self.place < len(self.tokens):
            found = self.tokens[self.place].operator or self._keyword()
            if found in words:
                self.place += 1
                return True
        return False

    def _command(self) -> Node:
        begin = self.place
        depth = self.depth
        node = None
        if begin not in self.plain:
            node = self._compound()
        if node is None:
            self.place = begin
            self.depth = depth
            self.plain.add(begin)
            return self._simple()
        while REDIRECTS.match(self._operator()):
            self.place += 2
        return node

    def _compound(self) -> Compound | None:
        """A compound command; None: there is none, or it does not end."""
        offset = self.tokens[self.place].offset
        keyword = self._keyword()
        if self._takes("("):
            body = self._list((")",))
            if self._takes(")"):
                return Compound(offset, "subshell", (body,))
        elif self._takes("{"):
            body = self._list(("}",))
            if self._takes("}"):
                return Compound(offset, "group", (body,))
        elif self._takes("if"):
            return self._if(offset)
        elif self._takes("case"):
            return self._case(offset)
        elif self._takes("while", "until"):
            condition = self._list(("do",))
            if self._takes("do"):
                body = self._list(("done",))
                if self._takes("done"):
                    return Compound(offset, "while", (condition, body))
        elif self._takes("for", "select"):
            return self._for(offset)
        elif keyword == "function" or self._is_function():
            return self._function(offset)
        return None

    def _if(self, offset: int) -> Compound | None:
        branches = [self._list(("then",))]
        while self._takes("then"):
            branches.append(self._list(("elif", "else", "fi")))
            if self._takes("elif"):
                branches.append(self._list(("then",)))
            elif self._takes("else"):
                branches.append(self._list(("fi",)))
        if self._takes("fi"):
            return Compound(offset, "condition", tuple(branches))
        return None

    def _case(self, offset: int) -> Compound | None:
        self.place += 1
        self._skip(("\n",))
        if not self._takes("in"):
            return None
        branches: list[tuple[Pipeline, ...]] = [()]  # there is no condition to run
        while True:
            self._skip(("\n", ";;", ";&", ";;&"))
            if self._takes("esac"):
                return Compound(offset, "condition", tuple(branches))
            self._takes("(")
            while not self._takes(")"):  # patterns
                if self.place >= len(self.tokens) or self._operator() == "\n":
                    return None
                self.place += 1
            branches.append(self._list((";;", ";&", ";;&", "esac")))

    def _for(self, offset: int) -> Compound | None:
        name = self._keyword()
        self.place += 1  # the variable, or ((…))
        self._skip(("\n",))
        if self._takes("in"):
            while self.place < len(self.tokens) and not self._operator():
                self.place += 1
        self._skip((";", "\n"))
        if self._takes("do"):
            body = self._list(("done",))
            if self._takes("done"):
                return Compound(offset, "loop", (body,), name)
        return None

    def _is_function(self) -> bool:
        following = self.tokens[self.place + 1 : self.place + 3]
        is_call = [token.operator for token in following] == ["(", ")"]
        return is_call and bool(self._keyword())

    def _function(self, offset: int) -> Compound | None:
        self._takes("function")
        name = self._keyword()
        self.place += 1
        if self._takes("("):
            self._takes(")")
        self._skip(("\n",))
        if self.place >= len(self.tokens) or not name:
            return None
        body = self._compound()
        if body is None:
            return None
        return Compound(offset, "function", ((Pipeline("", (body,), False),),), name)

    def _simple(self) -> SimpleCommand:
        offset = self.tokens[self.place].offset
        if self._operator() == "((":
            word = self.tokens[self.place].word
            self.place += 1
            mark = Piece("text", "((", False, offset)
            return SimpleCommand(offset, ((mark,), word))
        words: list[Word] = []
        redirects: list[Redirect] = []
        in_test = self._keyword() == "[["
        while self.place < len(self.tokens):
            token = self.tokens[self.place]
            if in_test and token.operator:
                self.place += 1
            elif REDIRECTS.match(token.operator):
                redirects.append(self._redirect(token))
            elif token.operator:
                if not words and not redirects:  # a sign that begins no statement
                    self.place += 1
                break
            else:
                if in_test and self._keyword() == "]]":
                    in_test = False
                words.append(token.word)
                self.place += 1
        return SimpleCommand(offset, tuple(words), tuple(redirects))

    def _redirect(self, token: Token) -> Redirect:
        self.place += 1
        target: Word = ()
        if self.place < len(self.tokens) and not self._operator():
            target = self.tokens[self.place].word
            self.place += 1
        operator = token.operator.lstrip("0123456789")
        if operator in ("<<", "<<-", "<<<"):
            return Redirect(operator, (), target)
        if token.operator.startswith(("2>", "&>")) or operator.endswith("&"):
            return Redirect(operator, ())
        return Redirect(operator, target)
