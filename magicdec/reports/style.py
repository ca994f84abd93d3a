"""How every figure looks, and how it becomes SVG or PNG.

A figure is drawn once in the colours of the light theme. For HTML each known colour becomes a CSS variable with that
colour as its fallback, so the same drawing follows the reader's theme; the PDF takes the plain colours.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from magicdec.units import KIB

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER, ON_COLOUR = "#1c2126", "#5b646e", "#dfe3e8", "#fefefe", "#fffffd"
GAMMA = "\u03b3"
# Okabe-Ito's and Tol's colour-blind-safe hues, darkened to 3:1 against paper; never the only carrier of a meaning.
BLUE, RED, GREEN, PURPLE, OCHRE, GREY = "#0069a8", "#c9500a", "#00855f", "#9a3d8f", "#8f6b00", "#7b848e"
SERIES = (BLUE, RED, GREEN, PURPLE, OCHRE, GREY)
MARKERS = ("o", "s", "^", "D", "v", "P")
CSS_VARIABLES = {
    INK: "--ink", MUTED: "--muted", GRID: "--rule", PAPER: "--paper", ON_COLOUR: "--on-colour",
    BLUE: "--blue", RED: "--red", GREEN: "--green", PURPLE: "--purple", OCHRE: "--ochre", GREY: "--grey",
}  # fmt: skip
LIMIT_COLOURS = {"weights": BLUE, "kv": RED, "compute": GREEN, "link": PURPLE, "overhead": GREY}
LIMIT_TITLES = {"weights": "weights", "kv": "KV", "compute": "compute", "link": "link", "overhead": "overhead"}
LIMIT_NAMES = {
    "weights": "reading weights",
    "kv": "reading KV",
    "compute": "computing",
    "link": "the link",
    "overhead": "overhead",
}
PHASE_COLOURS = {
    "autoregressive": GREY,
    "draft": BLUE,
    "verify": RED,
    "accept": GREEN,
    "upkeep": PURPLE,
    "other": OCHRE,
}
FIGURE_WIDTH_IN = 4.7

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
SVG_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"

GAMMA_IS = "γ\u00a0=\u00a0"
"""With spaces at which no line breaks."""
SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


def new_figure(*, height: float = 3.1, rows: int = 1, **options: Any) -> tuple[Figure, Sequence[Axes]]:
    """A figure of the common width with its axes, one above the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(FIGURE_WIDTH_IN, height), layout="constrained")
    axes = figure.subplots(rows, 1, squeeze=False, **options)
    return figure, list(axes[:, 0])


class Tips:
    """Values shown when the reader points at a mark: an identifier per artist, and its text."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.texts: dict[str, str] = {}
        self.series: dict[str, str] = {}

    def add(self, artist: Artist, text: str, series: str = "") -> None:
        """A mark with its value, and the series that it is shown and hidden with."""
        identifier = f"{self.name}-tip{len(self.texts)}"
        artist.set_gid(identifier)
        self.texts[identifier] = text
        if series:
            self.series[identifier] = series

    def belongs(self, series: str, *artists: Artist) -> None:
        """Lines, bars and bands of a series, which have no value of their own to show."""
        for artist in artists:
            identifier = f"{self.name}-part{len(self.series)}"
            artist.set_gid(identifier)
            self.series[identifier] = series


def plain_ticks(axis: Any, values: Sequence[float]) -> None:
    """Ticks at these values and nowhere else, written out."""
    axis.set_ticks(list(values), labels=[thousands(v) for v in values])
    axis.set_ticks([], minor=True)


def thousands(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u202f") if value >= 10_000 else f"{value:g}"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}\u202f%"


def compact_tokens(value: float) -> str:
    """A token count for an axis: 512, 4k, 128k (k is 1024 where that divides it)."""
    if value >= KIB and value % KIB == 0:
        return f"{value / KIB:.0f}k"
    return thousands(value)


def raw_svg(figure: Figure, *, background: str = "none") -> str:
    """The figure as an SVG file; one that stands alone needs a background of its own on a dark page."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context(RC):
        figure.savefig(
            out,
            format="svg",
            facecolor=background,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    return out.getvalue()


def png(figure: Figure, *, dpi: int = 200) -> bytes:
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context(RC):
        figure.savefig(out, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return out.getvalue()


def inline_svg(
    figure: Figure, *, name: str, label: str, tips: dict[str, str], series: dict[str, str] | None = None
) -> str:
    """SVG to set into an HTML page: themed, identifiers of its own, the tips as titles, and each mark's series.

    The titles are the browser's own tooltips while scripts are off; the page's script shows them better.
    """
    ET.register_namespace("", SVG)
    ET.register_namespace("xlink", XLINK)
    root = ET.fromstring(raw_svg(figure))
    for metadata in root.findall(f"{{{SVG}}}metadata"):
        root.remove(metadata)
    _give_own_identifiers(root, name, tips, series or {})
    for element in root.iter():
        if style := element.get("style"):
            element.set("style", themed(style))
    for name_, value in {"role": "img", "aria-label": label, "class": "chart", "tabindex": "0"}.items():
        root.set(name_, value)
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    return ET.tostring(root, encoding="unicode")


def themed(style: str) -> str:
    """A style attribute whose known colours are CSS variables, and whose font is the page's."""

    def replace(match: re.Match[str]) -> str:
        colour = match.group(0).lower()
        return f"var({CSS_VARIABLES[colour]}, {colour})" if colour in CSS_VARIABLES else colour

    style = re.sub(r"#[0-9a-fA-F]{6}\b", replace, style)
    return re.sub(r"'?DejaVu Sans'?(, sans-serif)?", SVG_FONTS, style)


def _give_own_identifiers(root: ET.Element, name: str, tips: dict[str, str], series: dict[str, str]) -> None:
    text = ET.tostring(root, encoding="unicode")
    used = set(re.findall(r'href="#([^"]+)"', text)) | set(re.findall(r"url\(#([^)]+)\)", text))
    for element in root.iter():
        identifier = element.get("id")
        if identifier is not None:
            if identifier in series:
                element.set("data-series", series[identifier])
            if identifier in tips:
                element.set("class", "tip")
                element.set("data-tip", tips[identifier])
                title = ET.Element(f"{{{SVG}}}title")
                title.text = tips[identifier]
                element.insert(0, title)
                del element.attrib["id"]
            elif identifier in used:
                element.set("id", f"{name}-{identifier}")
            else:
                del element.attrib["id"]
        for key, value in list(element.attrib.items()):
            if key.endswith("href") and value.startswith("#"):
                element.set(key, f"#{name}-{value[1:]}")
            elif "url(#" in value:
                element.set(key, value.replace("url(#", f"url(#{name}-"))
