"""The PDF: its text, its pages, its vector figures, and that records cannot set markup."""

from __future__ import annotations

import io
import re

import msgspec
import pytest

pytest.importorskip("pypdf")
pytest.importorskip("typst")

from pypdf import PdfReader
from samples_reports import measured, plan

from magicdec.reports.data import ReportData
from magicdec.reports.report import MAX_ROWS, render_pdf
from magicdec.schema.record import Environment

pytestmark = pytest.mark.slow
NASTY = '#panic("no") *x* $y$ \\ [z] "quoted" <label> @ref // comment'


def flat(text: str) -> str:
    """Text without what line breaks, hyphens and ligatures make of it."""
    return (
        "".join(text.replace("-\n", "").split())
        .replace("\u202f", "")
        .replace("\ufb01", "fi")
        .replace("\ufb03", "ffi")
    )


@pytest.fixture(scope="module")
def document(data: ReportData) -> PdfReader:
    return PdfReader(io.BytesIO(render_pdf(data)))


def test_it_is_a_document_of_a_few_numbered_pages(document: PdfReader) -> None:
    count = len(document.pages)
    assert 3 <= count <= 6
    for number, page in enumerate(document.pages, 1):
        assert f"page{number}of{count}" in flat(page.extract_text())


def test_it_opens_with_the_answer_and_captions_every_figure(
    document: PdfReader,
) -> None:
    pages = [flat(page.extract_text()) for page in document.pages]
    assert "Yes:StreamingLLM256,γ" in pages[0]
    assert "Leaveitoffatbatch1" in pages[0]
    text = "".join(pages)
    for number in range(1, 7):
        assert f"Figure{number}." in text
    assert "Errorofthepredictions,termbyterm" in text
    assert "magicdecrun--batch32" in text
    assert document.metadata.title == "Speculative decoding report"


def test_figures_are_numbered_as_one_reads_and_captions_stay_with_their_tables(
    document: PdfReader,
) -> None:
    pages = [flat(page.extract_text()) for page in document.pages]
    numbers = [int(n) for text in pages for n in re.findall(r"Figure(\d+)\.", text)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert any("Measuredconfigurations" in text and "StreamingLLM" in text.split("Measuredconfigurations")[1]
               for text in pages)  # fmt: skip


def test_figures_are_vectors_with_their_text(document: PdfReader) -> None:
    assert sum(len(page.images) for page in document.pages) == 0
    assert "measuredspeedup" in flat(
        "".join(page.extract_text() for page in document.pages)
    )


def test_long_tables_are_cut_and_say_so(document: PdfReader) -> None:
    text = flat("".join(page.extract_text() for page in document.pages))
    assert f"Thefirst{MAX_ROWS}of36rows" in text


def test_hostile_texts_are_set_as_they_are() -> None:
    row = msgspec.structs.replace(
        measured(4, 1024), model=NASTY, environment=Environment(command=NASTY)
    )
    pdf = render_pdf(ReportData.from_records([row], plan(notes=[NASTY]), title=NASTY))
    text = flat(
        "".join(page.extract_text() for page in PdfReader(io.BytesIO(pdf)).pages)
    )
    assert text.count('#panic("no")*x*') >= 2
