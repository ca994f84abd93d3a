"""The report as a typeset PDF of a few pages, with vector figures. The text goes in as data, never as markup."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from magicdec.files import write_atomic
from magicdec.reports.data import ReportData
from magicdec.reports.figures import draw_all
from magicdec.reports.headline import commands_to_reproduce, headline
from magicdec.reports.html import SECTIONS, TEMPLATES
from magicdec.reports.style import raw_svg
from magicdec.reports.tables import Table, all_tables, format_value

MAX_ROWS = 20
"""Most rows of a table in print; a longer one is cut, with a note. The HTML report and the CSV have every row."""


def write_pdf(data: ReportData, path: Path) -> None:
    """Writes the report. Raises StorageError when it cannot be written."""
    write_atomic(path, render_pdf(data))


def render_pdf(data: ReportData) -> bytes:
    import matplotlib
    import typst

    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    template: Any = (TEMPLATES / "report.typ").read_bytes()
    result: Any = typst.compile(
        template,
        font_paths=[str(fonts)],
        sys_inputs={"report": json.dumps(_document(data))},
    )
    assert isinstance(result, bytes)
    return result


def _document(data: ReportData) -> dict[str, Any]:
    """Everything the template sets, as plain strings and lists."""
    charts = {chart.name: chart for chart in draw_all(data)}
    tables = {table.name: table for table in all_tables(data)}
    summary = headline(data)
    sections = []
    for _, heading, chart_names, table_names in SECTIONS:
        figures = [
            {"title": c.title, "caption": c.caption, "alt": c.alt, "svg": raw_svg(c.figure)}
            for name in chart_names
            if (c := charts.get(name)) is not None
        ]
        shown = [_table(tables[name]) for name in table_names if name in tables]
        if figures or shown:
            sections.append({"heading": heading, "figures": figures, "tables": shown})
    environment = tables.get("environment")
    return {
        "title": data.title,
        "created": data.created_utc[:10],
        **asdict(summary),
        "sections": sections,
        "environment": _environment(environment) if environment is not None else [],
        "commands": commands_to_reproduce(data),
        "notes": list(data.plan.notes) if data.plan is not None else [],
    }


def _table(table: Table) -> dict[str, Any]:
    note = table.note
    if len(table.rows) > MAX_ROWS:
        note = f"{note} The first {MAX_ROWS} of {len(table.rows)} rows.".strip()
    return {
        "title": table.title,
        "note": note,
        "head": [c.title for c in table.columns],
        "numbers": [c.is_number for c in table.columns],
        "rows": table.cells[:MAX_ROWS],
    }


def _environment(table: Table) -> list[list[list[str]]]:
    """One list of (name, value) per environment."""
    return [
        [[c.title, format_value(c, v)] for c, v in zip(table.columns, row, strict=True) if v not in (None, "")]
        for row in table.rows
    ]
