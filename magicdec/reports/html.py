"""The report as one self-contained HTML file: no network, readable with scripts off, printable."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicdec.files import write_atomic
from magicdec.reports.data import ReportData
from magicdec.reports.figures import Chart, draw_all
from magicdec.reports.headline import commands_to_reproduce, headline
from magicdec.reports.style import inline_svg
from magicdec.reports.tables import Table, all_tables

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"


def write_html(data: ReportData, path: Path) -> None:
    """Writes the report. Raises StorageError when it cannot be written."""
    write_atomic(path, render_html(data))


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
    charts = {chart.name: chart_view(chart) for chart in draw_all(data)}
    tables = {table.name: table_view(table) for table in all_tables(data)}
    return (
        template_environment()
        .get_template("report.html")
        .render(
            data=data,
            headline=headline(data),
            charts=charts,
            tables=tables,
            sections=_sections(charts, tables),
            commands=commands_to_reproduce(data),
            notes=data.plan.notes if data.plan is not None else [],
            needs_acceptance=data.plan.needs_acceptance if data.plan is not None else [],
            style=_raw("report.css"),
            script=_raw("report.js"),
        )
    )


SECTIONS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("pays", "Where it pays", ("heatmap", "speedup-by-batch", "gamma", "speedup-by-budget", "pareto"), ("gamma",)),
    ("traffic", "Under arrivals", ("traffic", "goodput", "timeline"), ()),
    ("right", "Is the prediction right?", ("scatter", "residuals"), ("errors",)),
    ("time", "Where the time goes", ("phases", "limits", "roofline"), ()),
    ("acceptance", "What is accepted", ("positions", "budget"), ()),
    ("memory", "What it takes", ("memory",), ()),
    ("numbers", "All numbers", (), ("results", "candidates")),
)
"""Identifier, heading, figures and tables of each section, in the report's order."""


def _sections(charts: dict[str, Any], tables: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for identifier, heading, chart_names, table_names in SECTIONS:
        section = {
            "id": identifier,
            "heading": heading,
            "charts": [charts[n] for n in chart_names if n in charts],
            "tables": [tables[n] for n in table_names if n in tables],
        }
        if section["charts"] or section["tables"]:
            found.append(section)
    return found


def _raw(name: str) -> Markup:
    """One of the package's stylesheets or scripts, inserted verbatim."""
    from markupsafe import Markup

    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


def chart_view(chart: Chart) -> dict[str, Any]:
    """A figure as the templates take it."""
    from markupsafe import Markup

    # Safe: an XML serialiser wrote it, so every text in it is escaped.
    svg = Markup(inline_svg(chart.figure, name=chart.name, label=chart.alt, tips=chart.tips, series=chart.marks.series))
    return {
        "name": chart.name,
        "title": chart.title,
        "caption": chart.caption,
        "svg": svg,
        "table": table_view(chart.table),
        "slider": _slider(chart) if chart.name == "gamma" else None,
    }


def _slider(chart: Chart) -> dict[str, Any]:
    """One line of precomputed values per gamma, for the slider under the figure."""
    names, steps = [column.name for column in chart.table.columns], []
    for row, texts in zip(chart.table.rows, chart.table.cells, strict=True):
        cells = {name: text for name, value, text in zip(names, row, texts, strict=True) if value is not None}
        parts = []
        for field, word in (("tokens", "tokens per step"), ("step", "step"), ("speedup", "speedup")):
            values = [
                f"{cells[key]} {kind}" for kind in ("predicted", "measured") if (key := f"{field}_{kind}") in cells
            ]
            if values:
                parts.append(f"{word} {', '.join(values)}")
        steps.append({"gamma": cells["gamma"], "text": "; ".join(parts)})
    best = max(range(len(chart.table.rows)), key=lambda i: float(chart.table.rows[i][5] or chart.table.rows[i][6] or 0))
    return {"steps": steps, "best": best}


def table_view(table: Table) -> dict[str, Any]:
    """A table as the templates take it."""
    rows = [
        [
            {"text": text, "sort": "" if value is None else value, "number": column.is_number}
            for column, value, text in zip(table.columns, row, cells, strict=True)
        ]
        for row, cells in zip(table.rows, table.cells, strict=True)
    ]
    return {
        "name": table.name,
        "title": table.title,
        "note": table.note,
        "columns": [{"title": c.title, "number": c.is_number} for c in table.columns],
        "rows": rows,
        "filterable": len(rows) > 8,
    }
