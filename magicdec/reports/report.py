"""The report as one self-contained HTML file, and as a typeset PDF of a few pages.

The HTML needs no network, reads with scripts off and prints; every text is escaped. The PDF has
vector figures, and its text goes in as data, never as markup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from magicdec.files import write_atomic
from magicdec.reports.columns import UNKNOWN, Column, Table, format_value
from magicdec.reports.data import ReportData
from magicdec.reports.figures import Chart, draw_all
from magicdec.reports.figures.chart import inline_svg, raw_svg
from magicdec.reports.headline import commands_to_reproduce, headline_of
from magicdec.reports.tables import all_tables
from magicdec.schema.plan import Plan

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).parent / "templates"
MAX_ROWS = 20
"""Most rows of a table in print; a longer one is cut, with a note. The HTML report and the CSV have
every row.
"""
CONFIGURATIONS = ("results", "candidates")
NOT_IN_PRINT = (
    "step_s",
    "tokens_per_step",
    "break_even_tokens_per_step",
    "baseline_tokens_per_s",
    "request_ttft_s",
    "bound_by",
    "acceptance_range",
    "speedup_static_batch",
    "refilled_tokens_per_s",
    "speedup_refilled",
)
"""Columns of tables of configurations that print has no room for."""
SECTIONS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("traffic", "Under arrivals", ("traffic",), ()),
    ("pays", "Where it pays", ("heatmap", "gamma", "budget", "pareto"), ("gamma",)),
    ("right", "Is the prediction right?", ("scatter",), ("errors",)),
    ("acceptance", "What is accepted", ("positions",), ()),
    ("numbers", "All numbers", (), ("results", "candidates")),
)
"""Identifier, heading, figures and tables of each section, in the report's order."""
T = TypeVar("T")


def write_report(data: ReportData, path: Path) -> None:
    """Writes the report: a PDF where the path ends in .pdf, else HTML. Raises StorageError where it
    cannot.
    """
    if path.suffix.lower() == ".pdf":
        write_atomic(path, render_pdf(data))
    else:
        write_atomic(path, render_html(data))


def _sections(
    charts: Mapping[str, T], tables: Mapping[str, T], figures: str
) -> list[dict[str, Any]]:
    """The sections that hold something, with their figures under the key `figures`."""
    sections = []
    for identifier, heading, chart_names, table_names in SECTIONS:
        own_charts = [charts[name] for name in chart_names if name in charts]
        own_tables = [tables[name] for name in table_names if name in tables]
        if own_charts or own_tables:
            section = {"id": identifier, "heading": heading}
            sections.append({**section, figures: own_charts, "tables": own_tables})
    return sections


def notes_of(plan: Plan | None) -> list[str]:
    """A plan's notes, those on arrivals first."""
    if plan is None:
        return []
    if plan.traffic is None:
        return list(plan.notes)
    return [*plan.traffic.notes, *plan.notes]


# HTML
# --------------------------------------------------------------------------------------------------


def template_environment(*directories: Path) -> jinja2.Environment:
    """Templates of `directories` and of the reports; every text is escaped."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([*directories, TEMPLATES]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def render_html(data: ReportData) -> str:
    page = template_environment().get_template("report.html")
    return page.render(**html_context(data), **html_style())


def html_context(data: ReportData) -> dict[str, Any]:
    """Everything that answer.html sets, of a report or of the what-if page."""
    charts = {chart.name: chart_view(chart) for chart in draw_all(data)}
    tables = {table.name: table_view(table) for table in all_tables(data)}
    needs_acceptance = []
    if data.plan is not None:
        needs_acceptance = data.plan.needs_acceptance
    return {
        "data": data,
        "headline": headline_of(data),
        "tables": tables,
        "sections": _sections(charts, tables, "charts"),
        "commands": commands_to_reproduce(data),
        "notes": notes_of(data.plan),
        "needs_acceptance": needs_acceptance,
    }


def html_style() -> dict[str, str]:
    """The style and the script of a page with an answer."""
    from markupsafe import Markup

    return {
        "style": Markup((TEMPLATES / "report.css").read_text("utf-8")),
        "script": Markup((TEMPLATES / "report.js").read_text("utf-8")),
    }


def chart_view(chart: Chart) -> dict[str, Any]:
    """A figure as the templates take it."""
    from markupsafe import Markup

    slider = None
    if chart.name == "gamma":
        slider = _slider(chart)
    return {
        "name": chart.name,
        "title": chart.title,
        "caption": chart.caption,
        "svg": Markup(
            inline_svg(chart)
        ),  # safe: an XML serialiser wrote it, so every text in it is escaped
        "table": table_view(chart.table),
        "slider": slider,
    }


def _slider(chart: Chart) -> dict[str, Any]:
    """One line of precomputed values per gamma, for the slider under the figure."""
    names = [column.name for column in chart.table.columns]
    steps = []
    for row, texts in zip(chart.table.rows, chart.table.cells, strict=True):
        cells = {}
        for name, value, text in zip(names, row, texts, strict=True):
            if value is not None:
                cells[name] = text
        steps.append({"gamma": cells["gamma"], "text": _slider_text(cells)})
    gains = []
    for record in chart.table.records:
        gain = record["speedup_predicted"] or record["speedup_measured"] or 0
        gains.append(float(gain))
    best = gains.index(max(gains))
    return {"steps": steps, "best": best}


def _slider_text(cells: Mapping[str, str]) -> str:
    """The values of one gamma, predicted and measured, in a line."""
    words = {"tokens": "tokens per step", "step": "step", "speedup": "speedup"}
    parts = []
    for field, word in words.items():
        values = []
        for kind in ("predicted", "measured"):
            key = f"{field}_{kind}"
            if key in cells:
                values.append(f"{cells[key]} {kind}")
        if values:
            parts.append(f"{word} {', '.join(values)}")
    return "; ".join(parts)


def table_view(table: Table) -> dict[str, Any]:
    """A table as the templates take it."""
    rows = []
    for values, texts in zip(table.rows, table.cells, strict=True):
        cells = []
        for column, value, text in zip(table.columns, values, texts, strict=True):
            sort_key = value
            if value is None:
                sort_key = ""
            cells.append({"text": text, "sort": sort_key, "number": column.is_number})
        rows.append(cells)
    columns = [
        {"title": column.title, "number": column.is_number} for column in table.columns
    ]
    return {
        "name": table.name,
        "title": table.title,
        "note": table.note,
        "columns": columns,
        "rows": rows,
        "filterable": len(rows) > 8,
    }


# PDF
# --------------------------------------------------------------------------------------------------


def render_pdf(data: ReportData) -> bytes:
    import matplotlib
    import typst

    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    template: Any = (TEMPLATES / "report.typ").read_bytes()
    inputs = {"report": json.dumps(_document(data))}
    result: Any = typst.compile(template, font_paths=[str(fonts)], sys_inputs=inputs)
    assert isinstance(result, bytes)
    return result


def _document(data: ReportData) -> dict[str, Any]:
    """Everything the template sets, as plain strings and lists."""
    charts = {}
    for chart in draw_all(data):
        charts[chart.name] = {
            "title": chart.title,
            "caption": chart.caption,
            "alt": chart.alt,
            "svg": raw_svg(chart.figure),
        }
    tables = {table.name: table for table in all_tables(data)}
    typeset = {name: _typeset(table) for name, table in tables.items()}
    return {
        "title": data.title,
        "created": data.created_utc[:10],
        **asdict(headline_of(data)),
        "sections": _sections(charts, typeset, "figures"),
        "environment": _environments(tables.get("environment")),
        "commands": commands_to_reproduce(data),
        "notes": notes_of(data.plan),
    }


def _environments(table: Table | None) -> list[list[list[str]]]:
    """For each environment, the titles and values that are known."""
    if table is None:
        return []
    environments = []
    for row in table.rows:
        lines = []
        for column, value in zip(table.columns, row, strict=True):
            if value not in (None, ""):
                lines.append([column.title, format_value(column, value)])
        environments.append(lines)
    return environments


def _typeset(table: Table) -> dict[str, Any]:
    """The first rows of a table; the note holds what all configurations share."""
    note = table.note
    printed = table
    if table.name in CONFIGURATIONS and len(table.rows) > 1:
        # columns that hold the same in every row: the note says it once
        shared = {}
        for column, *cells in zip(table.columns, *table.cells, strict=True):
            if len(set(cells)) == 1:
                shared[column] = cells[0]
        names = [column.name for column in shared]
        printed = table.without(*names, *NOT_IN_PRINT)
        note += _note_of_left_out(table, shared)
    num_rows = len(table.rows)
    if num_rows > MAX_ROWS:
        note += f" The first {MAX_ROWS} of {num_rows} rows."
    return {
        "title": table.title,
        "note": note.strip(),
        "head": [column.title for column in printed.columns],
        "numbers": [column.is_number for column in printed.columns],
        "rows": printed.cells[:MAX_ROWS],
    }


def _note_of_left_out(table: Table, shared: Mapping[Column, str]) -> str:
    """Sentences on the columns that hold the same in every row, and on those without room."""
    note = ""
    common = []
    for column, cell in shared.items():
        if cell != UNKNOWN:
            common.append(f"{column.title.lower()} {cell}")
    if common:
        note += f" In every row: {', '.join(common)}."
    left_out = []
    for column in table.columns:
        if column.name in NOT_IN_PRINT and column not in shared:
            left_out.append(column.title.lower())
    if left_out:
        note += f" Not printed: {', '.join(left_out)}."
    return note
