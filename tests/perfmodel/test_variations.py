"""A plan on another engine, and elasticities against finite differences of whole plans with a changed input."""

from __future__ import annotations

import json
import math

import msgspec
import numpy as np
import pytest

from magicdec.errors import ConfigError
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.planner import PlanRequest, make_plan
from magicdec.perfmodel.variations import Sensitivity, for_engine, sensitivity
from magicdec.reports.exports import export
from magicdec.schema.plan import Plan, plan_of
from magicdec.specs.engine import load_engine

CASE = {
    "model": "llama-3.1-8b",
    "hardware": ("h100-sxm-80gb",),
    "tp_size": 1,
    "batch_sizes": (8,),
}
ROUNDED = 1e-4
"""Relative: a plan's document holds five digits of a row's number."""


def read(plan: Plan) -> Plan:
    """The plan as it comes from its file."""
    return plan_of(json.loads(plan.to_json()))


@pytest.fixture(scope="module")
def planned() -> Plan:
    """With several drafts ranked, the best of which only some engines run."""
    request = PlanRequest(engine="vllm", context_lens=(32_768,), plugin=True, **CASE)
    return read(make_plan(request))


def test_an_engine_gets_a_draft_that_it_runs_with_its_own_prediction(
    planned: Plan,
) -> None:
    assert not load_engine("sglang").runs(planned.best.draft, planned.best.draft_method)
    again = for_engine(planned, "sglang")
    assert "does not run" in again.reason
    assert again.plan.engine == "sglang"
    best = again.plan.best
    if best.is_speculative:
        assert load_engine("sglang").runs(best.draft, best.draft_method)
    else:
        assert "times autoregressive decoding" in again.reason


def test_the_same_engine_keeps_the_candidate_and_its_numbers(planned: Plan) -> None:
    best = for_engine(planned, "vllm").plan.best
    assert (best.draft, best.draft_method, best.draft_budget, best.gamma) == (
        planned.best.draft, planned.best.draft_method, planned.best.draft_budget, planned.best.gamma,
    )  # fmt: skip
    assert best.speedup == pytest.approx(planned.best.speedup, rel=1e-9)


def test_the_gamma_table_shown_is_the_exported_one(planned: Plan) -> None:
    best = planned.best
    own = make_plan(
        PlanRequest(
            engine="vllm", context_lens=(32_768,), draft=best.draft, draft_method=best.draft_method,
            draft_budgets=() if best.draft_budget is None else (best.draft_budget,), **CASE,
        )
    )  # fmt: skip
    again, shown = for_engine(planned, "vllm").plan.gamma_table, planned.gamma_table
    assert again == own.gamma_table
    assert (shown.draft, shown.draft_method, shown.draft_budget) == (
        best.draft,
        best.draft_method,
        best.draft_budget,
    )
    assert shown.gamma_of_steps == again.gamma_of_steps
    np.testing.assert_allclose(shown.speedup, again.speedup, rtol=1e-9)


def test_a_chosen_candidate_is_exported_with_the_speedup_of_that_candidate(
    planned: Plan,
) -> None:
    number, row = next(
        (n, row)
        for n, row in enumerate(planned.candidates, 1)
        if row.draft_method == "eagle3"
    )
    again = for_engine(planned, "vllm", number=number)
    if again.plan.best.is_speculative:
        assert again.plan.best.speedup == pytest.approx(row.speedup, rel=ROUNDED)
    else:
        assert f"{row.speedup:.2f} times" in again.reason
    text = export("vllm", again.plan, reason=again.reason)
    heading = " ".join(line[2:] for line in text.splitlines() if line.startswith("# "))
    said = (
        "Predicted speedup of decoding"
        if again.plan.best.is_speculative
        else "Note: eagle3/eagle3"
    )
    assert (
        f"{row.speedup:.2f}"
        in heading[heading.index(said) :].split(" times")[0].split(" (90")[0]
    )


def test_below_one_speculation_is_left_off_and_the_reason_is_said() -> None:
    losing = make_plan(
        PlanRequest(
            engine="sglang",
            context_lens=(2048,),
            draft="llama-3.2-1b",
            acceptance_rate=0.02,
            **CASE,
        )
    )
    again = for_engine(read(losing), "sglang", number=1)
    assert not again.plan.best.is_speculative
    text = export("sglang", again.plan, reason=again.reason)
    assert "--speculative" not in text
    heading = " ".join(line[2:] for line in text.splitlines() if line.startswith("# "))
    assert "leave it off" in heading
    assert "times autoregressive decoding" in heading


def test_sglang_is_told_its_batch_limit_which_speculation_would_reset() -> None:
    case = CASE | {"model": "llama-3.1-70b", "tp_size": 8, "batch_sizes": (64,)}
    gaining = make_plan(
        PlanRequest(
            engine="sglang",
            context_lens=(2048,),
            draft="llama-3.2-1b",
            acceptance_rate=0.95,
            **case,
        )
    )
    again = for_engine(gaining, "sglang")
    assert again.plan.best.is_speculative
    assert "--max-running-requests 64" in export("sglang", again.plan)


def test_what_cannot_be_exported_is_refused(planned: Plan) -> None:
    with pytest.raises(ConfigError, match="has candidates 1 to"):
        for_engine(planned, "vllm", number=10**6)
    self_draft = next(
        n for n, row in enumerate(planned.candidates, 1) if row.draft == "self"
    )
    with pytest.raises(ConfigError, match="engine sglang does not run self/"):
        for_engine(planned, "sglang", number=self_draft)
    own = msgspec.structs.replace(
        planned, request=msgspec.structs.replace(planned.request, acceptance=["mine"])
    )
    with pytest.raises(ConfigError, match="'mine'; give its file with --acceptance"):
        for_engine(own, "vllm", number=1)


HARDWARE, ENGINE = load_hardware("a100-sxm-80gb"), load_engine("magicdec-2024")
REQUEST = PlanRequest(
    hardware=(HARDWARE,), engine=ENGINE, tp_size=8, batch_sizes=(64,), context_lens=(32768,), draft="self",
    draft_method="streamingllm", draft_budgets=(512,), gamma=3,
)  # fmt: skip


def difference(low: PlanRequest, high: PlanRequest) -> float:
    low_s, high_s = (make_plan(each).candidates[0].speedup for each in (low, high))
    return math.log(high_s / low_s) / math.log(1.1 / 0.9)


@pytest.fixture(scope="module")
def varied() -> Sensitivity:
    return sensitivity(REQUEST)


def test_elasticities_are_the_differences_of_plans(varied: Sensitivity) -> None:
    found = {each.name: each for each in varied.inputs}

    def hardware(factor: float) -> PlanRequest:
        rate = HARDWARE.memory_bytes_per_s * factor
        return msgspec.structs.replace(
            REQUEST,
            hardware=(msgspec.structs.replace(HARDWARE, memory_bytes_per_s=rate),),
        )

    def engine(factor: float) -> PlanRequest:
        overhead = ENGINE.overheads.layer_overhead_s * factor
        return msgspec.structs.replace(
            REQUEST,
            engine=ENGINE.with_constants({"overheads.layer_overhead_s": overhead}),
        )

    assert found["memory bandwidth"].elasticity == pytest.approx(
        difference(hardware(0.9), hardware(1.1)), rel=1e-6
    )
    assert found["overhead per layer"].elasticity == pytest.approx(
        difference(engine(0.9), engine(1.1)), rel=1e-6
    )
    assert found["rejection rate at position 1"].elasticity < 0
    assert varied.speedup == pytest.approx(
        make_plan(REQUEST).candidates[0].speedup, rel=1e-9
    )


def test_inputs_are_sorted_by_what_their_uncertainty_costs(
    varied: Sensitivity,
) -> None:
    swings = [each.swing or 0.0 for each in varied.inputs]
    assert swings == sorted(swings, reverse=True)
    assert swings[0] > 0
    assert varied.measure_next.startswith(varied.inputs[0].name)
