"""What a figure function returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from magicdec.reports.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A drawn figure. The title says the finding; the table holds the values drawn, for readers who cannot see them."""

    name: str
    title: str
    caption: str
    figure: Figure
    table: Table
    tips: dict[str, str] = field(default_factory=dict)
    series: dict[str, str] = field(default_factory=dict)
    """Marks by the series that a reader may hide."""

    @property
    def alt(self) -> str:
        """A text alternative: the finding, and what is drawn."""
        return f"{self.title}. {self.caption} The values are in the table below the figure."

    def standalone(self) -> Figure:
        """The figure with its title on it, to be saved by itself."""
        import textwrap

        figure = self.figure
        if figure.get_suptitle() != (title := "\n".join(textwrap.wrap(self.title, 62))):
            figure.suptitle(title, fontsize=10, fontweight="bold", x=0.02, ha="left")
        return figure
