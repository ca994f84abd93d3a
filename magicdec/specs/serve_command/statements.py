"""A shell's text as a flat list of statements, with each word in pieces.

No grammar: a statement ends at a separator, and keywords, braces and brackets only open and close blocks
around it. Every scan goes forward once.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from magicdec.errors import ConfigError

MOST_DEPTH = 100
"""Quotes and expansions within each other; real scripts stay below ten."""
BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)+|#[^\n]*")
OPERATOR = re.compile(
    r"\d{0,3}(?:<<<|<<-?|<&|>&|<>|>>|>\||[<>](?!\())|&>>?|;;&|;;|;&|&&|\|\||\|&|[;&|()\n]"
)
PIECE = re.compile(
    r"""(?P<computed>\$\(|[<>]\(|`(?:[^`\\]|\\.)*+`) | (?P<end>[\s;&|<>()]) | '(?P<single>[^']*)'
    | \$'(?P<ansi>(?:[^'\\]|\\.)*+)'
    | \$\{(?P<braced>[A-Za-z_]\w*|\d+|[@*\#?$!-])?(?:\[(?P<index>[^]]{0,100})\])?(?P<sign>:?[-=?+]|\#\#?|%%?)?
    | \$(?P<name>[A-Za-z_]\w*|[\d@*\#?$!-]) | \\(?P<escaped>.|$)
    | (?P<plain>[^\s;&|<>()"'$\\`}]+|.)""",
    re.VERBOSE | re.DOTALL,
)
ARITHMETIC = re.compile(r"\(\(((?:[^\n()]|\([^\n()]*\)){0,500})\)\)")
FUNCTION = re.compile(
    r"function[ \t]+([\w:.-]+)(?:[ \t]*\([ \t]*\))?|([\w:.-]+)[ \t]*\([ \t]*\)"
)
ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\[[^]=]*\])?(\+?=)")
ESCAPES = {"n": "\n", "t": "\t", "'": "'", "\\": "\\", '"': '"'}
OPENERS = {
    **dict.fromkeys(("if", "case"), "under a condition"),
    **dict.fromkeys(("while", "until", "for", "select"), "in a loop"),
    "{": "in a block",
    "(": "in a subshell",
}
CLOSERS = {"if": "fi", "case": "esac", "{": "}", "(": ")"}
"""Ends of what is no loop."""
JOINTS = frozenset(("then", "else", "elif", "do", "!", "time"))
LINKS = frozenset(("&&", "||", "|", "|&"))


class Piece(NamedTuple):
    """A piece of a word."""

    kind: str
    """"text", "name" (as in ${…}), "computed" (a command's output) or "array"."""
    text: str
    is_quoted: bool
    line: int
    element: str | None = None
    """The index in brackets."""
    sign: str = ""
    """A default's or a cut's, behind the name."""
    words: tuple[Word, ...] = ()
    """An array's, or the one behind the sign."""


Word = tuple[Piece, ...]


class ShellBlock(NamedTuple):
    """A nesting: a compound command, or a function's body."""

    closer: str
    where: str
    function: str = ""
    """The innermost function around it, with its line."""
    is_body: bool = False


class ShellStatement(NamedTuple):
    """A simple command."""

    line: int
    words: tuple[Word, ...]
    before: str
    """The sign that joins it to the statement before it, as "&&"; else empty."""
    after: str
    block: ShellBlock | None
    """The innermost."""
    target: tuple[str, Word] | None
    """The operator and the file that output goes to."""
    document: Word | None
    """A here-document."""


def statements(text: str, first_line: int = 1) -> Iterator[ShellStatement]:
    """The statements of a script. Raises ConfigError where a quote does not end."""
    return _Text(text, first_line).statements()


def document_of(text: str) -> Word:
    """A text in which expansions alone are read, as in a here-document."""
    return _Text(text, 1).word(0, is_quoted=True)[0]


def unescaped(text: str) -> str:
    """Text in which \\n is a new line."""
    return re.sub(
        r"\\(.)", lambda match: ESCAPES.get(match[1], match[0]), text, flags=re.DOTALL
    )


class _Text:
    def __init__(self, text: str, first_line: int) -> None:
        self.text = text
        self.first_line = first_line
        self.ends = [match.start() for match in re.finditer("\n", text)]
        self.resume: int | None = None
        """Where the text goes on behind the here-documents of a line."""

    def line(self, offset: int) -> int:
        return self.first_line + bisect_right(self.ends, offset - 1)

    def unended(self, offset: int) -> ConfigError:
        shown = self.text[offset : offset + 40].strip()
        return ConfigError(
            f"the command cannot be read as a shell reads it: line {self.line(offset)}, '{shown}'"
        )

    def word(
        self,
        position: int,
        closes: str = "",
        *,
        is_quoted: bool = False,
        depth: int = 0,
    ) -> tuple[Word, int]:
        """The word at a place, and the place behind it.

        `closes`: the sign that ends it, as a quote; empty: a blank or an operator does, or, where
        it is quoted, the text's end.
        """
        text = self.text
        begin = position
        if depth > MOST_DEPTH:
            raise ConfigError(f"the script nests more than {MOST_DEPTH} deep")
        pieces: list[Piece] = []
        while position < len(text):
            if closes and text[position] == closes:
                return tuple(pieces), position + 1
            match = PIECE.match(text, position)
            assert match is not None
            start = position
            line = self.line(start)
            position = match.end()
            written = match[0]
            piece = Piece("text", written, is_quoted, line)
            if match["end"] and not is_quoted and closes in ("", ")"):
                if written == "(" and closes:
                    _, position = self.word(position, ")", depth=depth + 1)
                elif not closes and written == "(" and _begins_array(pieces):
                    piece, position = self.array(position, depth + 1)
                elif not closes:
                    return tuple(pieces), start
            elif written == '"' and (closes or not is_quoted):
                pieces.append(piece._replace(text="", is_quoted=True))
                inner, position = self.word(
                    position, '"', is_quoted=True, depth=depth + 1
                )
                pieces += inner
                continue
            elif match["computed"] and not (is_quoted and written in ("<(", ">(")):
                if written[0] != "`":
                    _, position = self.word(position, ")", depth=depth + 1)
                    written = text[start:position]
                elif written[1:].lstrip().startswith("#"):  # a comment between options
                    continue
                piece = Piece("computed", written, is_quoted, line)
            elif written.startswith("${"):
                rest, position = self.word(
                    position, "}", is_quoted=is_quoted, depth=depth + 1
                )
                sign = match["sign"] or ""
                name = match["braced"]
                piece = Piece(
                    "name", name or "", is_quoted, line, match["index"], sign, (rest,)
                )
                if name is None or (rest and not sign) or (name == "#" and rest):
                    # a length, a reference to a name, a part
                    piece = Piece("computed", text[start:position], is_quoted, line)
            elif match["name"]:
                piece = Piece("name", match["name"], is_quoted, line)
            elif match["escaped"] is not None:
                escaped = match["escaped"].strip("\n")
                means = ("$", "`", "\\", "\n", closes, '"' if closes else "")
                if is_quoted and match["escaped"] not in means:
                    escaped = written
                piece = Piece("text", escaped, True, line)
                if not escaped:
                    continue
            elif is_quoted:
                if match["single"] is not None or match["ansi"] is not None:
                    position = start + 1
                    piece = piece._replace(text=written[0])
                elif written == "`":
                    raise self.unended(start)
            elif match["single"] is not None:
                piece = Piece("text", match["single"], True, line)
            elif match["ansi"] is not None:
                piece = Piece("text", unescaped(match["ansi"]), True, line)
            elif written in ("'", "`"):
                raise self.unended(start)
            elif written == "$" and text.startswith('"', position):  # a translated text
                continue
            pieces.append(piece)
        if closes:
            raise self.unended(begin - 1)
        return tuple(pieces), position

    def array(self, position: int, depth: int) -> tuple[Piece, int]:
        begin = position
        words: list[Word] = []
        while position < len(self.text):
            blank = re.compile(r"(?:\s|\\\n)+|#[^\n]*").match(self.text, position)
            if blank is not None:
                position = blank.end()
            elif self.text[position] == ")":
                line = self.line(begin)
                return Piece(
                    "array", "", True, line, None, "", tuple(words)
                ), position + 1
            else:
                word, stop = self.word(position, depth=depth)
                if stop == position:
                    break
                words.append(word)
                position = stop
        raise self.unended(begin - 1)

    def document(self, position: int, delimiter: Word, *, has_tabs: bool) -> Word:
        """The here-document that begins on the next line."""
        begin = self.resume
        if begin is None:
            begin = (self.text + "\n").index("\n", position) + 1
        written = re.escape("".join(piece.text for piece in delimiter))
        tabs = "\t*" if has_tabs else ""
        end = re.compile(rf"^{tabs}{written}[ \t\r]*$", re.MULTILINE)
        found = end.search(self.text, begin)
        stop = len(self.text) if found is None else found.start()
        body = self.text[begin:stop]
        self.resume = len(self.text) if found is None else found.end()
        if has_tabs:
            body = re.sub(r"^\t+", "", body, flags=re.MULTILINE)
        if any(piece.is_quoted for piece in delimiter):
            return (Piece("text", body, True, self.line(begin)),)
        return _Text(body, self.line(begin)).word(0, is_quoted=True)[0]

    def statements(self) -> Iterator[ShellStatement]:
        position = 0
        begin = 0
        words: list[Word] = []
        before = ""
        blocks: list[ShellBlock] = []
        function = ""
        redirect = ""
        target: tuple[str, Word] | None = None
        document: Word | None = None
        while position <= len(self.text):
            blank = BLANK.match(self.text, position)
            if blank is not None:
                position = blank.end()
                continue
            operator = OPERATOR.match(self.text, position)
            sign = "\n" if position == len(self.text) else ""
            if operator is not None:
                sign = operator[0].lstrip("0123456789")
            opener = ""
            if not words:
                begin = position
            if sign == "(" and not words:
                arithmetic = ARITHMETIC.match(self.text, position)
                if arithmetic is not None:
                    line = self.line(position)
                    words = [
                        (Piece("text", text, True, line),)
                        for text in ("let", arithmetic[1])
                    ]
                    position = arithmetic.end()
                    continue
                opener = "("
                position += 1
            elif sign[:1] in ("<", ">") or sign in ("&>", "&>>"):
                assert operator is not None
                redirect = sign
                position = operator.end()
                continue
            elif sign:
                # what ends a statement
                if words or document is not None:
                    block = blocks[-1] if blocks else None
                    is_pattern = (
                        sign == ")" and block is not None and block.closer == "esac"
                    )
                    if not is_pattern:
                        yield ShellStatement(
                            self.line(begin),
                            tuple(words),
                            before,
                            sign,
                            block,
                            target,
                            document,
                        )
                    before = ""
                words = []
                target = None
                document = None
                redirect = ""
                if sign in LINKS:
                    before = sign
                elif sign != "\n":
                    before = ""
                if sign == ")" and blocks and blocks[-1].closer == ")":
                    blocks.pop()
                position += len(sign) if operator is None else len(operator[0])
                if sign == "\n" and self.resume is not None:
                    position = max(position, self.resume)
                    self.resume = None
                continue
            else:
                defines = None if words else FUNCTION.match(self.text, position)
                if defines is not None:
                    name = defines[1] or defines[2]
                    function = f"the function {name} (line {self.line(position)})"
                    position = defines.end()
                    continue
                word, stop = self.word(position)
                if redirect.startswith("<<") and redirect != "<<<":
                    document = self.document(stop, word, has_tabs=redirect == "<<-")
                elif redirect in (">", ">>", ">|"):
                    target = (redirect, word)
                position = max(stop, position + 1)
                if redirect:
                    redirect = ""
                    continue
                plain = ""
                if len(word) == 1 and word[0].kind == "text" and not word[0].is_quoted:
                    plain = word[0].text
                if not words and blocks and blocks[-1].closer == plain:
                    blocks.pop()
                    continue
                if not words and plain in JOINTS:
                    continue
                if not words and plain in OPENERS:
                    opener = plain
                if not opener or opener in ("for", "select", "case"):
                    words.append(word)
            if opener:
                where = f"{OPENERS[opener]} (line {self.line(begin)})"
                inner = blocks[-1].function if blocks else ""
                if function:
                    where = f"in {function}"
                    inner = function
                blocks.append(
                    ShellBlock(
                        CLOSERS.get(opener, "done"),
                        where,
                        inner,
                        is_body=bool(function),
                    )
                )
                function = ""


def _begins_array(pieces: list[Piece]) -> bool:
    return len(pieces) == 1 and ASSIGNED.fullmatch(pieces[0].text) is not None
