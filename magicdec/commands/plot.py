"""`magicdec plot`: one figure or one table of a report, as a file."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from magicdec.commands import options
from magicdec.commands.options import option
from magicdec.errors import ConfigError, unknown_choice

if TYPE_CHECKING:
    from magicdec.reports.columns import Table
    from magicdec.reports.data import ReportData

EPILOG = options.examples(
    "plot heatmap --plan plan.json -o heatmap.svg",
    "plot scatter results.jsonl predicted.jsonl -o scatter.png",
    "plot errors results.jsonl predicted.jsonl --format markdown",
)


class PlotFormat(StrEnum):
    SVG = "svg"
    PNG = "png"
    MARKDOWN = "markdown"
    CSV = "csv"
    JSON = "json"


SUFFIXES = {
    ".svg": PlotFormat.SVG,
    ".png": PlotFormat.PNG,
    ".md": PlotFormat.MARKDOWN,
    ".csv": PlotFormat.CSV,
    ".json": PlotFormat.JSON,
}

PICTURES = (PlotFormat.SVG, PlotFormat.PNG)


def plot_command(
    name: Annotated[
        str, typer.Argument(help="A figure or a table; `list` names them all.")
    ],
    records: options.RecordFiles = None,
    plan: options.PlanFile = None,
    output: options.Output = None,
    output_format: Annotated[
        PlotFormat | None, option("Default: the file name's suffix.", "--format")
    ] = None,
) -> None:
    """Write one figure or one table of a report.

    The figure as a picture, or its values as a table.
    """
    from magicdec.files import write_atomic
    from magicdec.reports.data import ReportData
    from magicdec.reports.figures import FIGURES
    from magicdec.reports.tables import TABLES

    if name == "list":
        print(f"figures: {', '.join(FIGURES)}\ntables: {', '.join(TABLES)}")
        return
    if name not in (*FIGURES, *TABLES):
        raise unknown_choice("figure or table", name, [*FIGURES, *TABLES])
    kind = _format(name in FIGURES, output, output_format)
    content = _content(name, ReportData.from_files(records or (), plan), kind)
    if output is not None:
        write_atomic(output, content)
        print(output)
    elif isinstance(content, bytes):
        raise ConfigError("a PNG is written to a file: give -o FILE.png")
    else:
        print(content, end="")


def _format(
    is_figure: bool, output: Path | None, given: PlotFormat | None
) -> PlotFormat:
    """The format asked for, or the one of the file's name; SVG for a figure and Markdown for a
    table otherwise.
    """
    kind = given
    if kind is None and output is not None:
        kind = SUFFIXES.get(output.suffix.lower())
        if kind is None:
            raise ConfigError(
                f"cannot tell the format of '{output}': use {', '.join(SUFFIXES)}, or --format"
            )
    kind = kind or (PlotFormat.SVG if is_figure else PlotFormat.MARKDOWN)
    if kind in PICTURES and not is_figure:
        raise ConfigError(
            f"a table is not written as {kind}: use markdown, csv or json"
        )
    if kind is PlotFormat.PNG and output is None:
        raise ConfigError("a PNG is written to a file: give -o FILE.png")
    return kind


def _content(name: str, data: ReportData, kind: PlotFormat) -> str | bytes:
    from magicdec.reports.figures import FIGURES, draw
    from magicdec.reports.figures.chart import PAPER, png, raw_svg
    from magicdec.reports.tables import TABLES

    if name in FIGURES:
        chart = draw(name, data)
        if chart is None:
            raise ConfigError(
                f"the records and the plan hold nothing to draw '{name}' from"
            )
        if kind is PlotFormat.SVG:
            return raw_svg(chart.standalone(), background=PAPER)
        if kind is PlotFormat.PNG:
            return png(chart.standalone())
        table: Table | None = chart.table
    else:
        table = TABLES[name](data)
    if table is None:
        raise ConfigError(f"the records and the plan hold no rows for '{name}'")
    text: str = getattr(table, f"to_{kind}")()
    return text
