"""One report of the sample records, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples_reports import grid, plan

from magicdec.reports import report
from magicdec.reports.data import ReportData
from magicdec.reports.report import write_report
from tests.headless import driver  # noqa: F401  # a fixture


@pytest.fixture(scope="session")
def data() -> ReportData:
    return ReportData.from_records(
        grid(), plan(), command="magicdec report records.jsonl"
    )


@pytest.fixture(scope="session")
def html_file(data: ReportData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(data, path)
    return path


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without their figures, which take most of the time, where only text is read."""
    monkeypatch.setattr(report, "draw_all", lambda _: [])
