"""Pairing of measured with predicted rows, and the tables made from them."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from samples_reports import grid, measured, plan, predicted

import magicdec
from magicdec.errors import ConfigError
from magicdec.files import rows_to_csv
from magicdec.naming import describe
from magicdec.reports.data import ReportData, median_pair, plan_records
from magicdec.reports.headline import headline_of
from magicdec.reports.tables import all_tables, error_table, faster_from
from magicdec.reports.terminal import (
    print_comparison,
    print_groups,
    print_run,
    print_verdict,
)
from magicdec.schema.record import Record, read_many, record_rows


def pair(real: float, guess: float, gamma: int, **fields: float) -> list[Record]:
    """A measured and a predicted row that differ in speedup alone."""
    row = msgspec.structs.replace(measured(4, 1024, gamma=gamma), speedup=real)
    return [
        row,
        msgspec.structs.replace(
            predicted(4, 1024, gamma=gamma), speedup=guess, **fields
        ),
    ]


def test_a_calibrated_prediction_goes_before_an_analytical_one_and_a_later_measurement_before_an_earlier() -> (
    None
):
    real, guess = pair(1.5, 1.4, 3)
    datasheet = msgspec.structs.replace(guess, source="analytical", speedup=9.0)
    again = msgspec.structs.replace(real, speedup=1.6)
    for order in ([guess, datasheet], [datasheet, guess]):
        data = ReportData.from_records([real, *order, again])
        (only,) = data.comparison.pairs
        assert (only.measured.speedup, only.predicted.speedup) == (1.6, 1.4)


def test_errors_are_predicted_over_measured_minus_one() -> None:
    """Errors -10 %, 0 %, +50 %: the 90th percentile lies 0.8 of the way from 10 % to 50 %."""
    rows = [*pair(2.0, 1.8, 1), *pair(1.0, 1.0, 2), *pair(1.0, 1.5, 3)]
    table = error_table(ReportData.from_records(rows).comparison)
    row = next(r for r in table.rows if r[0] == "speedup")
    assert row[1] == 3
    assert row[2:6] == pytest.approx((0.1, 0.42, 0.5, 0.0))


def test_every_term_counts_once_per_speculative_configuration(data: ReportData) -> None:
    table = error_table(data.comparison)
    points = {row[0]: row[1] for row in table.rows}
    assert set(points.values()) == {22}
    assert "autoregressive step" in points


def test_every_table_says_the_same_in_csv_json_and_markdown(data: ReportData) -> None:
    for table in all_tables(data):
        from_csv = list(csv.reader(io.StringIO(table.to_csv())))
        from_json = json.loads(table.to_json())["rows"]
        lines = table.to_markdown().splitlines()
        assert len(from_csv) - 1 == len(from_json) == len(lines) - 2 == len(table.rows)
        assert from_csv[0] == list(from_json[0])
        for text, value in zip(from_csv[1], from_json[0].values(), strict=True):
            assert text == ("" if value is None else str(value))
        assert len({line.count(" | ") for line in lines}) == 1


def test_records_become_csv_with_every_field() -> None:
    text = rows_to_csv(record_rows(grid()[:3]))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 3
    assert set(Record.__struct_fields__) - {"environment"} <= set(rows[0])
    assert rows[1]["commit"] == "0123456789ab"
    assert json.loads(rows[3 - 2]["versions"])["torch"] == "2.13.0"


def test_nothing_to_report_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to report"):
        ReportData.from_records([])


def test_the_headline_answers_with_the_plan_and_what_was_measured_of_it(
    data: ReportData,
) -> None:
    real = data.find_measured(data.reference)  # type: ignore[arg-type]  # there is a plan
    summary = headline_of(data)
    assert summary.answer.startswith("Yes: StreamingLLM 256, γ\u00a0=\u00a03, decodes")
    assert f"{real.speedup:.2f}×" in summary.answer
    assert "90\u202f% interval" in summary.certainty
    assert summary.when_not.startswith("Leave it off at batch 1")


def test_the_headline_does_not_pick_the_luckiest_measurement() -> None:
    """Without a plan the answer is the configuration predicted fastest, at its measured speedup."""
    rows = [*pair(1.2, 1.5, 3), *pair(1.9, 1.1, 5)]
    assert "γ\u00a0=\u00a03" in headline_of(ReportData.from_records(rows)).answer
    assert "1.20×" in headline_of(ReportData.from_records(rows)).answer


def test_the_headline_says_when_speculation_does_not_pay() -> None:
    off = plan(best=plan().autoregressive)
    assert headline_of(ReportData.from_records([], off)).answer.endswith(
        "no draft that was considered pays"
    )
    slow = ReportData.from_records(pair(0.8, 0.7, 3))
    assert "is no faster" in headline_of(slow).answer
    assert headline_of(slow).when_not.startswith(
        "Leave it off at batch 4 with context 1024"
    )


def printed(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width, color_system=None)


def test_a_run_prints_within_80_columns() -> None:
    console = printed()
    rows = [
        measured(32, 4096, gamma=0),
        *(measured(32, 4096, gamma=g) for g in (1, 3, 6)),
    ]
    print_run(rows, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # a StringIO
    assert all(line.startswith("StreamingLLM") or len(line) <= 80 for line in lines)
    assert sum(describe(rows[1], symbol="γ") in line for line in lines) >= 2
    assert f"{rows[2].speedup:.2f}x" in "".join(lines)


def test_a_comparison_prints_its_figures_and_verdict() -> None:
    console = printed(100)
    rows = pair(1.5, 1.4, 3, speedup_low=1.3, speedup_high=1.6)
    print_comparison(ReportData.from_records(rows).comparison, console)
    print_verdict(["p90 speedup error 0.067 exceeds 0.060"], console)
    text = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert re.search(r"1.40x\s+1.30x\s+1.60x\s+1.50x\s+-6.7%", text)
    assert re.search(r"speedup\s+1\s+6.7%\s+6.7%\s+6.7%\s+-6.7%", text)
    assert "1 of 1 measured speedups (100.0%)" in text
    assert "threshold missed: p90 speedup error 0.067 exceeds 0.060" in text
    assert text.rstrip().endswith("failed")


def test_groups_print_fractions_in_per_cent() -> None:
    console = printed()
    print_groups(
        [
            {
                "name": "a100/gemm",
                "rows": 12,
                "mape": 0.0712,
                "drift": 0.0712,
                "bias": None,
            }
        ],
        console,
    )
    assert console.file.getvalue() == "a100/gemm\n  rows 12, mape 7.1%\n"  # type: ignore[attr-defined]


def test_rows_become_csv_under_all_their_keys() -> None:
    rows = [
        {"name": "a100/gemm", "rows": 12, "mape": 0.0712},
        {"name": "x", "latency_mape": None, "rows": [1]},
    ]
    assert rows_to_csv(rows).splitlines() == [
        "name,rows,mape,latency_mape",
        "a100/gemm,12,0.0712,",
        "x,[1],,",
    ]


def test_the_rates_beside_a_speedup_are_of_one_repetition_and_give_it() -> None:
    """Of paired runs whose medians lie in different repetitions: the ratio of the medians is not the speedup."""
    rows = [
        r
        for r in read_many([Path("results/demo-2-cores.jsonl")])
        if r.source == "measured" and r.is_speculative
    ]
    apart = 0
    for record in rows:
        rate, baseline = median_pair(record)
        assert rate / baseline == pytest.approx(record.speedup)
        assert record.batch_size / baseline in map(
            pytest.approx, record.autoregressive_step_samples_s or []
        )
        apart += (
            abs(
                (record.tokens_per_s or 0) / (record.autoregressive_tokens_per_s or 1)
                - rate / baseline
            )
            > 0.02
        )
    assert apart > 0


def test_the_headline_names_what_measured_better_than_the_plans_choice() -> None:
    chosen = msgspec.structs.replace(
        measured(8, 2048, gamma=3), speedup=1.5, speedup_low=1.4, speedup_high=1.6
    )
    guess = msgspec.structs.replace(predicted(8, 2048, gamma=3), speedup=1.9)
    rival = msgspec.structs.replace(
        measured(8, 2048, budget=64, gamma=3),
        speedup=1.7,
        speedup_low=1.65,
        speedup_high=1.8,
    )
    elsewhere = msgspec.structs.replace(
        measured(8, 4096, budget=64, gamma=3), speedup=3.0
    )
    better = headline_of(
        ReportData.from_records([chosen, guess, rival, elsewhere])
    ).better
    assert better.startswith("StreamingLLM 64, ")
    assert "1.70× (1.65–1.80) instead of 1.50× (1.40–1.60)." in better
    assert (
        "overlap"
        in headline_of(
            ReportData.from_records(
                [chosen, guess, msgspec.structs.replace(rival, speedup_low=1.55)]
            )
        ).better
    )
    assert headline_of(ReportData.from_records([chosen, guess, elsewhere])).better == ""


def test_a_break_even_at_the_edge_of_the_grid_is_an_upper_bound() -> None:
    assert faster_from(512, 512) == "≤ 512"
    assert faster_from(512.4, 512) == "512"
    assert faster_from(None, 512) is None


def test_a_report_of_a_pipeline_counts_all_of_its_devices() -> None:
    answer = magicdec.plan(
        model="llama-3.3-70b",
        hardware="h100-sxm-80gb",
        tp=4,
        pp=2,
        batch=8,
        context=4096,
    )
    data = ReportData.from_records(plan_records(answer), plan=answer)
    (table,) = [each for each in all_tables(data) if each.name == "candidates"]
    titles = [column.title for column in table.columns]
    assert "PP" in titles
    assert not {"DP", "EP"} & set(titles)
    assert {row[titles.index("PP")] for row in table.rows} == {2}
    assert "8 × H100 SXM 80\u00a0GB" in headline_of(data).question
