"""A drawn figure with its words and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from magicdec.reports.style import Tips
from magicdec.reports.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

TITLE_SIZE, TITLE_X, LINE_HEIGHT, POINTS_PER_INCH = 10.0, 0.02, 1.35, 72.0


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A drawn figure. The title says the finding; the table holds the values drawn, for readers who cannot see them."""

    title: str
    caption: str
    figure: Figure
    table: Table
    marks: Tips

    @property
    def name(self) -> str:
        return self.marks.name

    @property
    def tips(self) -> dict[str, str]:
        """The value of each mark."""
        return self.marks.texts

    @property
    def alt(self) -> str:
        """A text alternative: the finding, and what is drawn."""
        return f"{self.title}. {self.caption} The values are in the table below the figure."

    def standalone(self) -> Figure:
        """The figure with its title on it, wrapped to the figure's width, to be saved by itself."""
        figure = self.figure
        if not figure.get_suptitle():
            title = figure.suptitle(self.title, fontsize=TITLE_SIZE, fontweight="bold", x=TITLE_X, ha="left")
            lines = _wrapped(self.title, title, figure.bbox.width * (1.0 - 2.0 * TITLE_X))
            title.set_text("\n".join(lines))
            width, height = figure.get_size_inches()
            figure.set_size_inches(width, height + len(lines) * TITLE_SIZE * LINE_HEIGHT / POINTS_PER_INCH)
        return figure


def _wrapped(text: str, drawn: Text, limit: float) -> list[str]:
    """The words of `text` in lines that are at most `limit` pixels wide in the face of `drawn`."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".lstrip()
        drawn.set_text(longer)
        if lines[-1] and drawn.get_window_extent().width > limit:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
