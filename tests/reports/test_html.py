"""The HTML file by itself: whole, self-contained, and safe whatever the records say."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from samples_reports import grid, measured, plan, predicted

from magicdec.errors import StorageError
from magicdec.records import Environment
from magicdec.reports.html import render_html, write_html
from magicdec.reports.tables import ReportData

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
    assert page.tags.count("figure") == 11


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
    assert text.count("<details>") == 11


def test_hostile_texts_stay_texts() -> None:
    row = msgspec.structs.replace(measured(4, 1024), model=NASTY, environment=Environment(command=NASTY, commit=NASTY))
    guess = msgspec.structs.replace(predicted(4, 1024), model=NASTY, hardware=NASTY)
    document = plan() | {"model": NASTY, "notes": [NASTY], "hardware": NASTY}
    for row_ in document["candidates"]:
        row_["bound_by"] = NASTY
    text = render_html(ReportData.from_records([row, guess], document, title=NASTY))
    page = Page(text)
    assert page.tags.count("script") == 1
    assert "img" not in page.tags


def test_the_file_is_of_a_size_to_mail(html_file: Path) -> None:
    assert html_file.stat().st_size < 800_000


def test_a_failed_write_leaves_the_old_report(
    data: ReportData, html_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = html_file.read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        write_html(data, html_file)
    assert html_file.read_text() == before
    assert list(html_file.parent.iterdir()) == [html_file]


def test_a_report_of_a_single_record_is_a_page() -> None:
    assert Page(render_html(ReportData.from_records(grid()[:1]))).headings[0] == 1
