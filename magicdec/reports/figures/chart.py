"""A figure, how every figure looks, and how it becomes SVG or PNG.

A figure is drawn once in the colours of the light theme. For HTML each known colour becomes a CSS
variable with that colour as its fallback, so the same drawing follows the reader's theme; the PDF
takes the plain colours.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from magicdec.reports.columns import Column, Table, Value
from magicdec.reports.text import thousands

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

INK = "#1c2126"
MUTED = "#5b646e"
GRID = "#dfe3e8"
PAPER = "#fefefe"
ON_COLOUR = "#fffffd"
# Okabe-Ito's and Tol's colour-blind-safe hues, darkened to 3:1 against paper; never the only
# carrier of a meaning.
BLUE = "#0069a8"
RED = "#c9500a"
GREEN = "#00855f"
PURPLE = "#9a3d8f"
OCHRE = "#8f6b00"
GREY = "#7b848e"
SERIES = (BLUE, RED, GREEN, PURPLE, OCHRE, GREY)
MARKERS = ("o", "s", "^", "D", "v", "P")
CSS_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--rule",
    PAPER: "--paper",
    ON_COLOUR: "--on-colour",
    BLUE: "--blue",
    RED: "--red",
    GREEN: "--green",
    PURPLE: "--purple",
    OCHRE: "--ochre",
    GREY: "--grey",
}
WIDTH_IN = 4.7
MOST_TICKS = 12
TITLE_SIZE = 10.0
TITLE_X = 0.02
"""Left edge of the title, as a share of the figure's width."""
LINE_HEIGHT = 1.35
POINTS_PER_INCH = 72.0
RC: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "lines.linewidth": 1.7,
    "lines.markersize": 5.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "magicdec",
    "axes.unicode_minus": True,
}
SVG_FONTS = (
    "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu "
    "Sans', "
    "sans-serif"
)
SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


class Chart:
    """A figure of the common width while it is drawn, and then with its words.

    The title says the finding; the table holds the values drawn, for readers who cannot see them.
    """

    title: str
    caption: str
    table: Table

    def __init__(
        self,
        name: str,
        *,
        height: float = 3.1,
        width: float = WIDTH_IN,
        rows: int = 1,
        **options: Any,
    ) -> None:
        """Axes one above the other."""
        from matplotlib.figure import Figure

        self.name = name
        self.figure: Figure = Figure(figsize=(width, height), layout="constrained")
        self.axes: list[Axes] = list(
            self.figure.subplots(rows, 1, squeeze=False, **options)[:, 0]
        )
        self.tips: dict[str, str] = {}
        """The value of each mark, by the mark's identifier."""
        self.series: dict[str, str] = {}
        """The series that a mark, line or band is shown and hidden with, by identifier."""
        self.rows: list[tuple[Value, ...]] = []

    def told(
        self,
        *,
        title: str,
        caption: str,
        table: str,
        columns: Sequence[Column],
        name: str = "",
    ) -> Chart:
        """The finished figure; `table` is the title of its values, which have the figure's name by
        default.
        """
        self.title = title
        self.caption = caption
        self.table = Table(
            name or self.name,
            table,
            tuple(columns),
            tuple(self.rows),
        )
        return self

    def tip(self, artist: Artist, text: str, series: str = "") -> None:
        """A mark shows its value when the reader points at it."""
        identifier = f"{self.name}-tip{len(self.tips)}"
        artist.set_gid(identifier)
        self.tips[identifier] = text
        if series:
            self.series[identifier] = series

    def part(self, series: str, *artists: Artist) -> None:
        """Lines, bars and bands belong to a series, and have no value of their own to show."""
        for artist in artists:
            identifier = f"{self.name}-part{len(self.series)}"
            artist.set_gid(identifier)
            self.series[identifier] = series

    def mark(
        self,
        axes: Axes,
        at: tuple[float, float],
        marker: str,
        text: str,
        series: str = "",
        **look: Any,
    ) -> None:
        """A point with its value."""
        style: dict[str, Any] = {"mec": PAPER, "mew": 0.6}
        (artist,) = axes.plot(*at, marker, **(style | look))
        self.tip(artist, text, series)

    def interval(
        self,
        axes: Axes,
        at: tuple[float, float],
        ends: Ends,
        series: str,
        colour: str,
    ) -> None:
        """The bar from one end of an interval to the other, where both are known."""
        spread = spread_of(at[1], ends)
        if spread is not None:
            bars = axes.errorbar(*at, yerr=spread, fmt="none", ecolor=colour, lw=1)
            self.part(series, *bars.lines[2])

    @property
    def alt(self) -> str:
        """A text alternative: the finding, and what is drawn."""
        return f"{self.title}. {self.caption} The values are in the table below the figure."

    def standalone(self) -> Figure:
        """The figure with its title on it, wrapped to the figure's width, to be saved by itself."""
        figure = self.figure
        if figure.get_suptitle():
            return figure
        title = figure.suptitle(
            self.title,
            fontsize=TITLE_SIZE,
            fontweight="bold",
            x=TITLE_X,
            ha="left",
        )
        width = figure.bbox.width * (1.0 - 2.0 * TITLE_X)
        lines = _wrapped(self.title, title, width)
        title.set_text("\n".join(lines))
        width, height = figure.get_size_inches()
        height += len(lines) * TITLE_SIZE * LINE_HEIGHT / POINTS_PER_INCH
        figure.set_size_inches(width, height)
        return figure


Ends = tuple[float | None, float | None]


def spread_of(value: float, ends: Ends) -> list[list[float]] | None:
    """The distances to the ends of an interval, as error bars take them."""
    low, high = ends
    if low is None or high is None:
        return None
    return [
        [max(value - low, 0)],
        [max(high - value, 0)],
    ]


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


def plain_ticks(axis: Any, values: Sequence[float]) -> None:
    """Ticks at these values of a logarithmic axis, where there is room, and nowhere else, written
    out.
    """
    apart = (values[-1] / values[0]) ** (1 / MOST_TICKS)
    ticks: list[float] = []
    for value in reversed(values):
        if not ticks or ticks[-1] / value >= apart:
            ticks.append(value)
    ticks.reverse()
    axis.set_ticks(ticks, labels=list(map(thousands, ticks)))
    axis.set_ticks([], minor=True)


def raw_svg(figure: Figure, *, background: str = "none") -> str:
    """The figure as an SVG file; one that stands alone needs a background of its own on a dark
    page.
    """
    import matplotlib

    out = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context(RC):
        figure.savefig(out, format="svg", facecolor=background, metadata=metadata)
    return out.getvalue()


def png(figure: Figure, *, dpi: int = 200) -> bytes:
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context(RC):
        figure.savefig(
            out, format="png", dpi=dpi, facecolor="white", metadata={"Software": None}
        )
    return out.getvalue()


def inline_svg(chart: Chart) -> str:
    """SVG to set into an HTML page: themed, identifiers of its own, the tips as titles, and each
    mark's series.

    The titles are the browser's own tooltips while scripts are off; the page's script shows them
    better.
    """
    ET.register_namespace("", SVG)
    ET.register_namespace("xlink", XLINK)
    root = ET.fromstring(raw_svg(chart.figure))
    for metadata in root.findall(f"{{{SVG}}}metadata"):
        root.remove(metadata)
    _give_own_identifiers(root, chart)
    for element in root.iter():
        style = element.get("style")
        if style:
            element.set("style", themed(style))
    root.set("role", "img")
    root.set("aria-label", chart.alt)
    root.set("class", "chart")
    root.set("tabindex", "0")
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    return ET.tostring(root, encoding="unicode")


def themed(style: str) -> str:
    """A style attribute whose known colours are CSS variables, and whose font is the page's."""

    def replace(match: re.Match[str]) -> str:
        colour = match.group(0).lower()
        if colour in CSS_VARIABLES:
            return f"var({CSS_VARIABLES[colour]}, {colour})"
        return colour

    style = re.sub(r"#[0-9a-fA-F]{6}\b", replace, style)
    return re.sub(r"'?DejaVu Sans'?(, sans-serif)?", SVG_FONTS, style)


def _give_own_identifiers(root: ET.Element, chart: Chart) -> None:
    """Marks get their tip and series; identifiers that are referred to get the chart's name in
    front, and all others go.
    """
    text = ET.tostring(root, encoding="unicode")
    used = set(re.findall(r'href="#([^"]+)"', text))
    used |= set(re.findall(r"url\(#([^)]+)\)", text))
    for element in root.iter():
        identifier = element.get("id")
        if identifier in chart.series:
            element.set("data-series", chart.series[identifier])
        if identifier in chart.tips:
            tip = chart.tips[identifier]
            element.set("class", "tip")
            element.set("data-tip", tip)
            title = ET.Element(f"{{{SVG}}}title")
            title.text = tip
            element.insert(0, title)
        if identifier in used and identifier not in chart.tips:
            element.set("id", f"{chart.name}-{identifier}")
        elif identifier is not None:
            del element.attrib["id"]
        for key, value in list(element.attrib.items()):
            if key.endswith("href") and value.startswith("#"):
                element.set(key, f"#{chart.name}-{value[1:]}")
            elif "url(#" in value:
                element.set(key, value.replace("url(#", f"url(#{chart.name}-"))
