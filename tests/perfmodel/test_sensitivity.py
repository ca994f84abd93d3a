"""Elasticities against finite differences of whole plans with a changed input."""

from __future__ import annotations

import math

import msgspec
import pytest

from magicdec.errors import ConfigError
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.plan.planner import PlanRequest, plan
from magicdec.perfmodel.plan.variations import sensitivity
from magicdec.specs.engine import load_engine

HARDWARE, ENGINE = load_hardware("a100-sxm-80gb"), load_engine("magicdec-2024")
REQUEST = PlanRequest(
    hardware=(HARDWARE,), engine=ENGINE, tp_size=8, batch_sizes=(64,), context_lens=(32768,), draft="self",
    draft_method="streamingllm", draft_budgets=(512,), gamma=3,
)  # fmt: skip


def difference(low: PlanRequest, high: PlanRequest) -> float:
    low_s, high_s = (plan(each).candidates[0].speedup for each in (low, high))
    return math.log(high_s / low_s) / math.log(1.1 / 0.9)


def test_elasticities_are_the_differences_of_plans() -> None:
    found = {each.name: each for each in sensitivity(REQUEST).inputs}

    def hardware(factor: float) -> PlanRequest:
        rate = HARDWARE.memory_bytes_per_s * factor
        return msgspec.structs.replace(REQUEST, hardware=(msgspec.structs.replace(HARDWARE, memory_bytes_per_s=rate),))

    def engine(factor: float) -> PlanRequest:
        overhead = ENGINE.layer_overhead_s * factor
        return msgspec.structs.replace(REQUEST, engine=msgspec.structs.replace(ENGINE, layer_overhead_s=overhead))

    assert found["memory bandwidth"].elasticity == pytest.approx(difference(hardware(0.9), hardware(1.1)), rel=1e-6)
    assert found["overhead per layer"].elasticity == pytest.approx(difference(engine(0.9), engine(1.1)), rel=1e-6)
    assert found["rejection rate at position 1"].elasticity < 0
    assert sensitivity(REQUEST).speedup == pytest.approx(plan(REQUEST).candidates[0].speedup, rel=1e-9)


def test_inputs_are_sorted_by_what_their_uncertainty_costs() -> None:
    result = sensitivity(REQUEST)
    swings = [each.swing or 0.0 for each in result.inputs]
    assert swings == sorted(swings, reverse=True)
    assert swings[0] > 0
    assert result.measure_next.startswith(result.inputs[0].name)


def test_without_an_acceptance_there_is_nothing_to_vary() -> None:
    with pytest.raises(ConfigError, match="acceptance"):
        sensitivity(msgspec.structs.replace(REQUEST, draft_method="topk", engine="ours"))
