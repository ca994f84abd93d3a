"""A plan, the predictions frozen from it and measurements of it in one report: as `magicdec demo` writes them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from magicdec.measure.configuration import BenchmarkRequest, configuration_fields
from magicdec.perfmodel.planner import PlanRequest, make_plan
from magicdec.reports.data import ReportData, candidate_record
from magicdec.reports.headline import headline_of
from magicdec.reports.report import render_html
from magicdec.schema.plan import Plan
from magicdec.schema.record import Record
from magicdec.specs.speculation import SpeculationSpec

REQUEST = BenchmarkRequest(
    model="embedded", batch_size=32, context_len=4096, gen_len=64
)


@pytest.fixture(scope="module")
def planned() -> Plan:
    return make_plan(
        PlanRequest(
            model="embedded", hardware=("a100-sxm-80gb",), engine="ours", tp_size=1, batch_sizes=(REQUEST.batch_size,),
            context_lens=(REQUEST.context_len,), gen_len=REQUEST.gen_len, draft="self", draft_method="streamingllm",
            draft_budgets=(64, 256), acceptance_rate=0.8, weight_dtype="fp32",
            kv_dtype="fp32",
        )
    )  # fmt: skip


def drafted(planned: Plan) -> Record:
    return max(
        (candidate_record(planned, row) for row in planned.candidates if row.gamma),
        key=lambda row: row.speedup or 0.0,
    )


def measured_like(row: Record, speedup: float, **changes: object) -> Record:
    """A measurement of a planned row, with the identity that `magicdec run` gives it."""
    speculation = SpeculationSpec(
        draft="self",
        draft_method="streamingllm",
        draft_budget=row.draft_budget,
        gamma=row.gamma,
    )
    request = replace(REQUEST, **changes)  # type: ignore[arg-type]
    return Record(
        source="measured", **configuration_fields(request, speculation), speedup=speedup, speedup_low=speedup - 0.1,
        speedup_high=speedup + 0.1, speedup_samples=[speedup - 0.1, speedup, speedup + 0.1], repetitions=3,
    )  # fmt: skip


def test_a_report_with_a_plan_answers_with_what_was_measured(planned: Plan) -> None:
    best = drafted(planned)
    best_plan = msgspec.structs.replace(
        planned,
        choice=planned.choosing(
            next(
                row
                for row in planned.candidates
                if candidate_record(planned, row) == best
            )
        ),
    )
    measured = measured_like(best, 1.67, run_to_end=True)
    data = ReportData.from_records([measured], plan=best_plan)
    answer = headline_of(data)
    assert "1.67× as fast" in answer.answer
    assert answer.certainty.startswith(
        "measured, 1.57–1.77 over 3 repetitions; predicted"
    )
    assert [
        (pair.predicted.speedup, pair.measured.speedup)
        for pair in data.comparison.pairs
    ] == [(best.speedup, 1.67)]
    page = render_html(data)
    assert "Measured speedup" in page
    assert data.find_measured(best) == measured


def test_a_candidate_pairs_with_each_way_that_its_configuration_was_run_and_with_no_other(
    planned: Plan,
) -> None:
    best = drafted(planned)
    runs = [measured_like(best, 1.4, context_spread=spread) for spread in (0.0, 0.5)]
    others = [measured_like(best, 1.3, batch_size=8)]
    others += [msgspec.structs.replace(runs[0], draft_weight_dtype="int8")]
    data = ReportData.from_records([*runs, *others], plan=planned)
    assert [pair.measured for pair in data.comparison.pairs] == runs


def test_a_prediction_of_the_run_itself_takes_the_candidates_place(
    planned: Plan,
) -> None:
    """The page then holds one predicted row of that configuration, and the pair is with the one that states it."""
    best = drafted(planned)
    measured = measured_like(best, 1.67)
    frozen = msgspec.structs.replace(
        measured, source="calibrated", hardware=best.hardware, speedup=1.6
    )
    data = ReportData.from_records([frozen, measured], plan=planned)
    (pair,) = data.comparison.pairs
    assert pair.predicted == frozen
    same = [
        row
        for row in data.predicted
        if (row.draft_budget, row.gamma) == (best.draft_budget, best.gamma)
    ]
    assert same == [frozen]
