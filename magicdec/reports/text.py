"""Numbers in text, and tables of plain text for a terminal."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Literal

from magicdec.redaction import quoted
from magicdec.units import KIB

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

GAMMA = "\u03b3"
GAMMA_IS = "γ\u00a0=\u00a0"
"""With spaces at which no line breaks."""


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
        width += _widest(head, (head, *texts), wraps) + 1
    return width - 1


def _widest(head: str, texts: Sequence[str], wraps: Container[str] | None) -> int:
    """The longest piece of a column that is not broken."""
    is_whole = wraps is not None and head not in wraps
    pieces: list[str] = []
    for text in texts:
        if is_whole:
            pieces.append(text)
        else:
            pieces += text.split() or [""]
    return max(map(len, pieces))


def text_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    wraps: Container[str] | None = None,
) -> Table:
    """A table with numbers to the right and nothing cut off.

    Where it does not fit the terminal, the columns with a heading in `wraps` break over lines
    between words; None: all columns do, headings too.
    """
    from rich.table import Table
    from rich.text import Text

    heads = list(map(_printable_lines, heads))
    rows = [list(map(_printable_lines, row)) for row in rows]
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    for place, head in enumerate(heads):
        texts = [row[place] for row in rows]
        justify: Literal["left", "right"] = "left"
        if _are_numbers(texts, is_first=place == 0):
            justify = "right"
        table.add_column(
            Text(head),
            justify=justify,
            overflow="fold",
            no_wrap=wraps is not None and head not in wraps,
            min_width=_widest(head, (head, *texts), wraps),
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _printable_lines(text: str) -> str:
    return "\n".join(map(quoted, text.split("\n")))


def _are_numbers(texts: Sequence[str], *, is_first: bool) -> bool:
    """Whether a column holds numbers alone; in the first, where names stand, whole ones."""
    for text in filter(None, texts):
        is_number = text[0].isdigit() or text[0] in "-+"
        if is_first:
            is_number = text.isdigit()
        if not is_number:
            return False
    return True


def plain_console(
    width: int | None = None, *, color_system: Literal["auto"] | None = "auto"
) -> Console:
    """The console that all text is printed on: brackets and colons in it are no markup."""
    from rich.console import Console

    return Console(
        width=width,
        markup=False,
        emoji=False,
        highlight=False,
        color_system=color_system,
    )


def table_lines(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, width: int = 100
) -> list[str]:
    """Lays out a `text_table` as lines of text."""
    console = plain_console(width, color_system=None)
    with console.capture() as captured:
        console.print(text_table(heads, rows))
    return [line.rstrip() for line in captured.get().splitlines()]
