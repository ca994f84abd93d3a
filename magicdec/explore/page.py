"""The page of a request: the planner's answer, and the reports' figures of it."""

from __future__ import annotations

import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from magicdec.errors import MagicdecError
from magicdec.explore.state import CONTROLS, MAIN_CONTROLS, Catalog, link, shown
from magicdec.perfmodel.plan.planner import Plan, plan
from magicdec.plan_document import Candidate
from magicdec.plan_request import Request
from magicdec.reports.data import ReportData
from magicdec.reports.figures import Chart, draw
from magicdec.reports.figures.chart import PAPER, raw_svg
from magicdec.reports.headline import headline
from magicdec.reports.report import TEMPLATES as REPORT_TEMPLATES
from magicdec.reports.report import chart_view, table_view, template_environment
from magicdec.reports.tables import Table, candidate_table

TEMPLATES = Path(__file__).parent / "templates"
FIGURES = ("heatmap", "gamma", "speedup-by-batch", "speedup-by-budget", "limits", "memory")
"""The figures of the page, in its order; those that a state holds nothing for are left out."""
DRAFT_FIELDS = ("draft", "draft_method", "draft_budget")
REMEMBERED = 32
_drawing = threading.Lock()  # matplotlib keeps state between calls


class Explorer:
    """Answers states. The last few are remembered, since each of a state's figures asks again."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._templates = template_environment(TEMPLATES)
        self._plan = lru_cache(maxsize=REMEMBERED)(self._planned)

    def plan(self, query: str) -> Plan:
        """The planner's answer to a link. Raises MagicdecError, as `magicdec plan` does."""
        return self._plan(self.catalog.read(query))

    def _planned(self, state: Request) -> Plan:
        return plan(self.catalog.request(state))

    def answer(self, query: str) -> str:
        """The answer as a piece of the page. Raises MagicdecError."""
        return self._templates.get_template("answer.html").render(self._answered(query))

    def error(self, error: MagicdecError) -> str:
        """The one line of an error as a piece of the page."""
        return self._templates.get_template("answer.html").render(error=" ".join(str(error).split()))

    def page(self, query: str) -> tuple[str, bool]:
        """The whole page with its answer, readable with scripts off, and whether there is one."""
        given = _first_values(query)
        try:
            state = self.catalog.read(query)
            answered = self._answered(query)
        except MagicdecError as error:
            state, answered = self.catalog.start, {"error": " ".join(str(error).split())}
        values = {name: given.get(name, text) for name, text in shown(state).items()}
        choices = {name: self.catalog.choices(name) for name, each in CONTROLS.items() if each.kind == "choice"}
        page = self._templates.get_template("explore.html").render(
            controls=CONTROLS,
            main=MAIN_CONTROLS,
            start=_start(self.catalog),
            values=values,
            choices=choices,
            figures=FIGURES,
            **answered,
        )
        return page, "error" not in answered

    def _answered(self, query: str) -> dict[str, Any]:
        state = self.catalog.read(query)
        document = self._plan(state)
        data = _report_data(document)
        leading = _leading_drafts(document)
        return {
            "headline": headline(data),
            "table": table_view(leading) if leading is not None else None,
            "notes": document.notes,
            "needs_acceptance": document.needs_acceptance,
            "command": self.catalog.command(state),
            "query": link(state),
        }

    def figure(self, name: str, query: str) -> str | None:
        """One figure as a piece of the page; None where the state holds nothing for it. Raises MagicdecError."""
        with _drawing:
            chart = self._chart(name, query)
            return (
                None if chart is None else self._templates.get_template("figure.html").render(chart=chart_view(chart))
            )

    def picture(self, name: str, query: str) -> str | None:
        """One figure as an SVG file. Raises MagicdecError."""
        with _drawing:
            chart = self._chart(name, query)
            return None if chart is None else raw_svg(chart.standalone(), background=PAPER)

    def _chart(self, name: str, query: str) -> Chart | None:
        return draw(name, _report_data(self.plan(query)))


def _start(catalog: Catalog) -> dict[str, str]:
    """The controls' values without a query, by name; the others start empty."""
    return {name: text for name, text in shown(catalog.start).items() if "_" not in name}


def script() -> str:
    return "".join(
        (directory / name).read_text(encoding="utf-8")
        for directory, name in ((REPORT_TEMPLATES, "report.js"), (TEMPLATES, "explore.js"))
    )


def style() -> str:
    return "".join(
        (directory / name).read_text(encoding="utf-8")
        for directory, name in ((REPORT_TEMPLATES, "report.css"), (TEMPLATES, "explore.css"))
    )


def _report_data(document: Plan) -> ReportData:
    return ReportData.from_records([], document)


def _leading_drafts(document: Plan) -> Table | None:
    """The candidates' best gamma for each draft and budget (the planner puts the best first)."""
    best: dict[tuple[Any, ...], Candidate] = {}
    for row in document.candidates:
        best.setdefault(tuple(getattr(row, name) for name in DRAFT_FIELDS), row)
    table = candidate_table(_report_data(msgspec.structs.replace(document, candidates=list(best.values()))))
    return None if table is None else table.without("batch_size", "context_len", "tp_size")


def _first_values(query: str) -> dict[str, str]:
    from urllib.parse import parse_qsl

    return dict(parse_qsl(query, keep_blank_values=True))
