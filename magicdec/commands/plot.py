"""`magicdec plot`: one figure or table of a report, as SVG, PNG, Markdown, CSV or JSON."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from magicdec.commands import completion
from magicdec.errors import ConfigError, unknown_choice

if TYPE_CHECKING:
    from magicdec.reports.data import ReportData
    from magicdec.reports.tables import Table

EPILOG = """\b
Examples:
  magicdec plot heatmap --plan plan.json -o heatmap.svg
  magicdec plot scatter results.jsonl predicted.jsonl -o scatter.png
  magicdec plot errors results.jsonl predicted.jsonl --format markdown
"""


class PlotFormat(StrEnum):
    SVG = "svg"
    PNG = "png"
    MARKDOWN = "markdown"
    CSV = "csv"
    JSON = "json"


SUFFIXES = {".svg": PlotFormat.SVG, ".png": PlotFormat.PNG, ".md": PlotFormat.MARKDOWN, ".csv": PlotFormat.CSV,
            ".json": PlotFormat.JSON}  # fmt: skip
PICTURES = (PlotFormat.SVG, PlotFormat.PNG)


def plot_command(
    name: Annotated[
        str, typer.Argument(help="A figure or a table; `list` names them all.", autocompletion=completion.figures)
    ],
    records: Annotated[list[Path] | None, typer.Argument(help="Record files (JSON lines).")] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan document (magicdec plan --format json).")] = None,
    profile: Annotated[Path | None, typer.Option(help="The hardware profile (TOML), for the roofline.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; none: stdout.")] = None,
    output_format: Annotated[
        PlotFormat | None, typer.Option("--format", help="Default: the file name's suffix.")
    ] = None,
) -> None:
    """Write one figure or one table of a report.

    The figure as a picture, or its values as a table.
    """
    from magicdec.files import write_atomic
    from magicdec.reports.figures import FIGURES
    from magicdec.reports.tables import TABLE_NAMES

    if name == "list":
        print(f"figures: {', '.join(FIGURES)}\ntables: {', '.join(TABLE_NAMES)}")
        return
    if name not in (*FIGURES, *TABLE_NAMES):
        raise unknown_choice("figure or table", name, [*FIGURES, *TABLE_NAMES])
    kind = _format(name in FIGURES, output, output_format)
    from magicdec.commands.report import load_report_data

    content = _content(name, load_report_data(records or [], plan, profile), kind)
    if output is not None:
        write_atomic(output, content)
        print(output)
    elif isinstance(content, bytes):
        raise ConfigError("a PNG is written to a file: give -o FILE.png")
    else:
        print(content, end="")


def _format(is_figure: bool, output: Path | None, given: PlotFormat | None) -> PlotFormat:
    """The format asked for, or the one of the file's name; SVG for a figure and Markdown for a table otherwise."""
    kind = given
    if kind is None and output is not None:
        kind = SUFFIXES.get(output.suffix.lower())
        if kind is None:
            raise ConfigError(f"cannot tell the format of '{output}': use {', '.join(SUFFIXES)}, or --format")
    kind = kind or (PlotFormat.SVG if is_figure else PlotFormat.MARKDOWN)
    if kind in PICTURES and not is_figure:
        raise ConfigError(f"a table is not written as {kind}: use markdown, csv or json")
    if kind is PlotFormat.PNG and output is None:
        raise ConfigError("a PNG is written to a file: give -o FILE.png")
    return kind


def _content(name: str, data: ReportData, kind: PlotFormat) -> str | bytes:
    from magicdec.reports.figures import FIGURES, draw
    from magicdec.reports.style import PAPER, png, raw_svg
    from magicdec.reports.tables import all_tables

    if name in FIGURES:
        chart = draw(name, data)
        if chart is None:
            raise ConfigError(f"the records and the plan hold nothing to draw '{name}' from")
        if kind is PlotFormat.SVG:
            return raw_svg(chart.standalone(), background=PAPER)
        if kind is PlotFormat.PNG:
            return png(chart.standalone())
        return _table_text(chart.table, kind)
    table = next((table for table in all_tables(data) if table.name == name), None)
    if table is None:
        raise ConfigError(f"the records and the plan hold no rows for '{name}'")
    return _table_text(table, kind)


def _table_text(table: Table, kind: PlotFormat) -> str:
    writers = {PlotFormat.CSV: table.to_csv, PlotFormat.JSON: table.to_json, PlotFormat.MARKDOWN: table.to_markdown}
    return writers[kind]()
