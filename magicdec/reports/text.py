"""Numbers in text, and text and tables for a terminal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Container, Sequence
from typing import Literal, NamedTuple, TextIO

from magicdec.units import KIB, printable

GAMMA = "\u03b3"
GAMMA_IS = "γ\u00a0=\u00a0"
"""With spaces at which no line breaks."""
Style = Literal["plain", "bold", "dim"]
STYLES: dict[Style, str] = {"plain": "\x1b[0m", "bold": "\x1b[1m", "dim": "\x1b[2m"}
"""A terminal's codes for what follows."""


def whole(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u202f")


def thousands(value: float) -> str:
    if value >= 10_000:
        return whole(value)
    return f"{value:g}"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}\u202f%"


def compact_tokens(value: float) -> str:
    """A token count for an axis: 512, 4k, 128k (k is 1024 where that divides it)."""
    if value >= KIB and value % KIB == 0:
        return f"{value / KIB:.0f}k"
    return thousands(value)


def needed_width(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    wraps: Container[str] | None = None,
) -> int:
    """The smallest width of a `text_table`, with its breaking columns broken between all words."""
    width = 0
    for place, head in enumerate(heads):
        texts = [row[place] for row in rows]
        breaks = wraps is None or head in wraps
        width += _widest((head, *texts), breaks=breaks) + 1
    return width - 1


def _widest(texts: Sequence[str], *, breaks: bool) -> int:
    """The longest piece of a column: a word, or a whole text where nothing breaks."""
    pieces: list[str] = []
    for text in texts:
        if breaks:
            pieces += text.split() or [""]
        else:
            pieces.append(text)
    return max(map(len, pieces))


class TextTable(NamedTuple):
    """A table of plain text: numbers to the right, nothing cut off."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    are_numbers: Sequence[bool]
    """Whether a column stands to the right."""
    breaks: Sequence[bool]
    """Whether a column breaks over lines between words, where the table is too wide."""

    def head_lines(self, width: int) -> list[str]:
        """The heads as lines of at most `width` characters; a short one stands at the bottom."""
        columns = self._columns(self.heads, self._widths(width))
        height = max(map(len, columns))
        for column in columns:
            blank = " " * len(column[0])
            column[:0] = [blank] * (height - len(column))
        return _side_by_side(columns, width)

    def row_lines(self, width: int) -> list[str]:
        """The rows as lines of at most `width` characters, their ends filled with spaces."""
        widths = self._widths(width)
        lines = []
        for row in self.rows:
            columns = self._columns(row, widths)
            height = max(map(len, columns))
            for column in columns:
                blank = " " * len(column[0])
                column.extend([blank] * (height - len(column)))
            lines += _side_by_side(columns, width)
        return lines

    def _columns(self, row: Sequence[str], widths: Sequence[int]) -> list[list[str]]:
        """Each cell of a row as lines of its column's width."""
        columns = []
        for text, is_number, room in zip(row, self.are_numbers, widths, strict=True):
            lines = wrapped(text, room)
            if is_number:
                columns.append([line.rstrip().rjust(room) for line in lines])
            else:
                columns.append([line.ljust(room) for line in lines])
        return columns

    def _widths(self, width: int) -> list[int]:
        """Characters of each column: as many as its longest line has; where that is too wide, the widest
        columns that break shrink first, none below its longest word."""
        gaps = [*[1] * (len(self.heads) - 1), 0]
        least = []
        longest = []
        for place, head in enumerate(self.heads):
            texts = [head, *(row[place] for row in self.rows)]
            least.append(_widest(texts, breaks=self.breaks[place]) + gaps[place])
            lines = [line for text in texts for line in text.split("\n")]
            longest.append(min(max(map(len, lines)) + gaps[place], width))
        widths = list(map(max, least, longest))
        if sum(widths) > width:
            shrunk = _shrunk(widths, self.breaks, width)
            widths = list(map(max, least, map(min, longest, shrunk)))
        return [room - gap for room, gap in zip(widths, gaps, strict=True)]


def _side_by_side(columns: Sequence[Sequence[str]], width: int) -> list[str]:
    return [" ".join(cells)[:width] for cells in zip(*columns, strict=True)]


def _shrunk(widths: Sequence[int], breaks: Sequence[bool], width: int) -> Sequence[int]:
    """Widths of columns that add up to `width`: of those that break, the widest become as narrow as the
    next, and so on; if that is not enough, all become narrower."""
    able = [place for place, may_break in enumerate(breaks) if may_break]
    while able and sum(widths) > width:
        widest = max(widths[place] for place in able)
        if not widest:
            break
        at_most = [place for place in able if widths[place] == widest]
        next_width = max(
            (widths[place] for place in able if widths[place] < widest), default=0
        )
        widths = _less(widths, sum(widths) - width, at_most, widest - next_width)
    if sum(widths) > width:
        widths = _less(widths, sum(widths) - width, range(len(widths)), width)
    return widths


def _less(
    widths: Sequence[int], excess: int, places: Sequence[int], most: int
) -> list[int]:
    """The widths with the excess taken off these places in equal parts, of each at most `most`."""
    narrower = list(widths)
    for taken, place in enumerate(places):
        part = min(round(excess / (len(places) - taken)), most, narrower[place])
        narrower[place] -= part
        excess -= part
    return narrower


WORD = re.compile(r"\s*\S+\s*")
"""A word with the space behind it, which stays on its line."""


def wrapped(text: str, width: int) -> list[str]:
    """The text as lines of at most `width` characters: broken between words, and inside those that are
    longer."""
    lines = []
    for paragraph in text.split("\n"):
        line = ""
        for word in WORD.findall(paragraph) or [paragraph]:
            length = len(word.rstrip())
            if len(line) + length <= width:
                line += word
                continue
            if line:
                lines.append(line)
            line = word
            while length > width and len(line) > width:
                lines.append(line[:width])
                line = line[width:]
        lines.append(line)
    # a space at which a line breaks may stand beyond its end
    return [line[: max(width, len(line.rstrip()))] for line in lines]


def text_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    wraps: Container[str] | None = None,
) -> TextTable:
    """A table with numbers to the right and nothing cut off.

    Where it does not fit the terminal, the columns with a heading in `wraps` break over lines
    between words; None: all columns do, headings too.
    """
    heads = list(map(_printable_lines, heads))
    rows = [list(map(_printable_lines, row)) for row in rows]
    are_numbers = []
    for place in range(len(heads)):
        texts = [row[place] for row in rows]
        are_numbers.append(_are_numbers(texts, is_first=place == 0))
    breaks = [wraps is None or head in wraps for head in heads]
    return TextTable(heads, rows, are_numbers, breaks)


class Page:
    """Where text is printed: lines of one width, emphasised on a terminal."""

    def __init__(self, width: int, file: TextIO | None = None) -> None:
        self.width = width
        self._file = file

    def print(
        self, text: str | TextTable = "", *, style: Style = "plain", breaks: bool = True
    ) -> None:
        """Prints lines of the page's width; a text that does not break as it is."""
        if isinstance(text, TextTable):
            self._write(text.head_lines(self.width), "bold")
            self._write(text.row_lines(self.width), style)
        elif breaks:
            self._write(wrapped(text, self.width), style)
        else:
            self._write([text], style)

    def _write(self, lines: Sequence[str], style: Style) -> None:
        file = self._file or sys.stdout
        is_styled = file.isatty() and os.environ.get("TERM") != "dumb"
        for line in lines:
            shown = line
            if is_styled:
                shown = f"{STYLES[style]}{line}{STYLES['plain']}"
            file.write(f"{shown}\n")


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def _are_numbers(texts: Sequence[str], *, is_first: bool) -> bool:
    """Whether a column holds numbers alone; in the first, where names stand, whole ones."""
    for text in filter(None, texts):
        is_number = text[0].isdigit() or text[0] in "-+"
        if is_first:
            is_number = text.isdigit()
        if not is_number:
            return False
    return True


def table_lines(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, width: int = 100
) -> list[str]:
    """Lays out a `text_table` as lines of text."""
    table = text_table(heads, rows)
    lines = [*table.head_lines(width), *table.row_lines(width)]
    return [line.rstrip() for line in lines]
