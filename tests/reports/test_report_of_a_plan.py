"""The report of a plan says what was asked, the answer at each context, what the map leaves empty, and the command."""

from __future__ import annotations

import re
from html import unescape

import pytest

import magicdec
from magicdec.reports.data import ReportData
from magicdec.reports.report import render_html
from magicdec.reports.sentences import acceptance_line, first_line
from magicdec.reports.several import loads_lines
from magicdec.schema.plan import Plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return magicdec.plan(
        model="llama-3.1-70b",
        hardware="4xh100",
        context=[8192, 65_536],
        batch=32,
        task="chat",
        tpot_ms=40,
        price=2.5,
    )


@pytest.fixture(scope="module")
def page(plan: Plan) -> str:
    command = "magicdec report --plan plan.json -o report.html"
    return render_html(ReportData.from_records([], plan, command=command))


def words(page: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", page)))


def test_the_head_names_question_limits_engine_and_acceptance(
    page: str, plan: Plan
) -> None:
    head = words(page.split("<nav", maxsplit=1)[0])
    assert "at batch 32 and contexts 8192 and 65 536?" in head
    assert "limits mean TPOT 40 ms" in head
    assert "vllm" in head
    assert acceptance_line(plan.choice)[1:] in head
    for limit in plan.choice.limits:
        assert limit.of in head


def test_each_context_has_its_answer_and_the_first_line_is_the_terminals(
    page: str, plan: Plan
) -> None:
    head = words(page.split("<nav", maxsplit=1)[0])
    heading = re.search(r"<h1>(.*?)</h1>", page, re.DOTALL)
    assert heading is not None
    assert unescape(heading[1]) == re.sub(r"\s+", " ", loads_lines(plan)[0])
    for case in plan.cases:
        context = {8192: "8192", 65_536: "65 536"}[case.context_len]
        assert words(f"Context {context}: {first_line(case)}") in head


@pytest.mark.usefixtures("without_figures")
def test_a_plan_of_one_context_says_its_answer_once() -> None:
    plan = magicdec.plan(model="llama-3.1-8b", hardware="h100", context=2048, batch=8)
    page = render_html(ReportData.from_records([], plan))
    head = words(page.split("<nav")[0])
    assert head.count(words(first_line(plan)).removesuffix(".")) == 1
    assert 'class="cases"' not in page


@pytest.mark.usefixtures("without_figures")
def test_several_devices_with_prices_say_which_to_buy() -> None:
    plan = magicdec.plan(
        model="llama-3.1-8b",
        hardware=["h100=2.5", "l40s=1"],
        draft="eagle3",
        context=2048,
        batch=8,
        gen_len=200,
    )
    page = render_html(ReportData.from_records([], plan))
    assert "<h1>Buy " in page
    assert "H100 SXM 80" in words(page.split("<h1>")[0])
    assert "L40S" in words(page.split("<h1>")[0])


def test_the_map_says_how_many_settings_do_not_fit(page: str, plan: Plan) -> None:
    table = plan.gamma_table
    empty = sum(not fits for row in table.fits for fits in row)
    total = len(table.batch_sizes) * len(table.context_lens)
    assert empty > 0
    sentence = f"empty, in {empty} of {total} settings: does not fit in memory."
    assert sentence in words(page)


def test_the_plans_command_is_there(page: str) -> None:
    commands = [unescape(text) for text in re.findall(r"<code>(.*?)</code>", page)]
    (command,) = [text for text in commands if text.startswith("magicdec plan")]
    assert "--context 8192,65536" in command
    assert "--task chat" in command


def test_at_most_forty_rows_stand_before_the_fold(page: str, plan: Plan) -> None:
    table = re.search(r'data-table="candidates".*?</table>', page, re.DOTALL)
    assert table is not None
    assert len(re.findall(r"<tr>", table[0])) - 1 == len(plan.candidates) > 40
    assert re.search(r'class="table long" data-table="candidates"', page)
    assert ".long:not(:has([data-every]:checked))" in page
    assert "nth-child(n + 41)" in page


def test_the_room_beside_an_odd_number_of_figures_holds_the_tables(
    page: str,
) -> None:
    sections = re.findall(r"<section id=.*?</section>", page, re.DOTALL)
    odd = 0
    for section in sections:
        figures = [found.start() for found in re.finditer("<figure ", section)]
        tables = [
            found.start()
            for found in re.finditer(r'<div class="table[^>]*data', section)
        ]
        captioned = [
            place for place in tables if '<p class="caption"' in section[place:][:200]
        ]
        if len(figures) > 1 and captioned:
            is_odd = len(figures) % 2 == 1
            odd += is_odd
            assert (captioned[0] < figures[-1]) == is_odd
    assert odd
