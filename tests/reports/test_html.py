"""The HTML file by itself: whole, self-contained, and safe whatever the records say."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from samples_reports import changed, grid, measured, plan, predicted

from magicdec.errors import StorageError
from magicdec.reports.columns import format_value
from magicdec.reports.data import ReportData
from magicdec.reports.headline import headline_of
from magicdec.reports.report import render_html, write_report
from magicdec.reports.tables import result_table
from magicdec.schema.record import Environment

VOID = {"meta", "link", "input", "br"}
URL_ATTRIBUTES = {"src", "href", "xlink:href", "action", "poster", "srcset"}
NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"


class Page(HTMLParser):
    """Elements, headings, identifiers and references of a page; fails on wrong nesting."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.headings: list[int] = []
        self.ids: list[str] = []
        self.urls: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} has a script in {name}"
            if name == "id":
                self.ids.append(value or "")
            if name in URL_ATTRIBUTES:
                self.urls.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(html_file: Path) -> Page:
    return Page(html_file.read_text())


def test_the_page_is_well_formed_with_headings_in_order(page: Page) -> None:
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    steps = zip(page.headings, page.headings[1:], strict=False)
    assert all(after - before <= 1 for before, after in steps)
    assert len(page.ids) == len(set(page.ids))
    assert page.tags.count("figure") == 6


def test_nothing_is_fetched_from_elsewhere(html_file: Path, page: Page) -> None:
    assert all(url.startswith(("#", "data:")) for url in page.urls)
    text = html_file.read_text()
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "default-src 'none'" in text


def test_links_within_the_page_lead_somewhere(page: Page) -> None:
    assert {url[1:] for url in page.urls if url.startswith("#")} <= set(page.ids)


def test_it_reads_without_scripts(html_file: Path, data: ReportData) -> None:
    """Every measured row and the values of every figure are in the file itself."""
    text = html_file.read_text()
    for row in data.measured:
        assert f'data-sort="{row.step_s}"' in text
    assert text.count("<details>") == 6


def test_hostile_texts_stay_texts() -> None:
    row = msgspec.structs.replace(
        measured(4, 1024),
        model=NASTY,
        environment=Environment(command=NASTY, commit=NASTY),
    )
    guess = msgspec.structs.replace(predicted(4, 1024), model=NASTY, hardware=NASTY)
    rows = [changed(each, bound_by=NASTY, draft=NASTY) for each in plan().candidates]
    document = plan(model=NASTY, notes=[NASTY], hardware=NASTY, candidates=rows)
    text = render_html(ReportData.from_records([row, guess], document, title=NASTY))
    page = Page(text)
    assert page.tags.count("script") == 1
    assert "img" not in page.tags


def test_the_file_is_of_a_size_to_mail(html_file: Path) -> None:
    assert html_file.stat().st_size < 800_000


@pytest.mark.usefixtures("without_figures")
def test_a_failed_write_leaves_the_old_report(
    data: ReportData, html_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = html_file.read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        write_report(data, html_file)
    assert html_file.read_text() == before
    assert list(html_file.parent.iterdir()) == [html_file]


def test_a_report_of_a_single_record_is_a_page() -> None:
    assert Page(render_html(ReportData.from_records(grid()[:1]))).headings[0] == 1


def test_a_speedup_over_a_weak_baseline_is_marked() -> None:
    """Below 60 % of the memory's bandwidth the answer and the table say so; at 60 % they do not."""
    weak = msgspec.structs.replace(measured(32, 4096), autoregressive_mbu=0.59)
    sound = msgspec.structs.replace(measured(8, 4096), autoregressive_mbu=0.6)
    data = ReportData.from_records([weak, sound])
    table = result_table(data)
    assert table is not None
    column = next(i for i, c in enumerate(table.columns) if c.name == "baseline_mbu")
    place = [c.name for c in table.columns].index("batch_size")
    cells = {
        row[place]: format_value(table.columns[column], row[column])
        for row in table.rows
    }
    assert cells == {32: "59\u202f% †", 8: "60\u202f%"}
    assert "†" in table.note
    assert (
        "over a baseline at 59\u202f% of the memory's bandwidth"
        in headline_of(ReportData.from_records([weak])).certainty
    )
    assert "baseline" not in headline_of(ReportData.from_records([sound])).certainty


def test_refilled_static_and_adaptive_results_have_their_columns() -> None:
    plain = measured(8, 4096)
    rich = msgspec.structs.replace(
        measured(32, 4096),
        adaptive=True,
        refilled_tokens_per_s=812.0,
        speedup_refilled=1.21,
        speedup_static_batch=1.1,
    )
    names = {"refilled_tokens_per_s", "speedup_refilled", "speedup_static_batch"}
    without = result_table(ReportData.from_records([plain]))
    table = result_table(ReportData.from_records([plain, rich]))
    assert without is not None
    assert table is not None
    assert not names & {c.name for c in without.columns}
    assert names <= {c.name for c in table.columns}
    row = dict(zip((c.name for c in table.columns), table.rows[1], strict=True))
    assert (
        row["refilled_tokens_per_s"],
        row["speedup_refilled"],
        row["speedup_static_batch"],
    ) == (
        812.0,
        1.21,
        1.1,
    )
    assert str(row["draft"]).endswith("γ up to")


def test_an_adaptive_run_is_not_paired_with_the_prediction_of_a_fixed_gamma() -> None:
    adaptive = msgspec.structs.replace(measured(32, 4096), adaptive=True)
    assert (
        ReportData.from_records([adaptive, predicted(32, 4096)]).comparison.pairs == []
    )
    assert (
        len(
            ReportData.from_records(
                [measured(32, 4096), predicted(32, 4096)]
            ).comparison.pairs
        )
        == 1
    )


@pytest.mark.usefixtures("without_figures")
def test_the_report_names_the_engine_the_limits_and_the_plan_s_command() -> None:
    document = plan()
    data = ReportData.from_records([], document, command="magicdec report plan.json")
    text = render_html(data)
    assert f", {document.engine}, batch" in text
    assert "; no limits on latency." in text
    assert f"magicdec plan --model {document.request.model} --hardware" in text
