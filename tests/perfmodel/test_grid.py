"""The vectorised grid against one prediction at a time."""

from __future__ import annotations

import numpy as np
import pytest

from magicdec.perfmodel.acceptance import MeasuredProfile, constant_profile
from magicdec.perfmodel.acceptance.law import Law
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import predict
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.speculation import SpeculationSpec

A100, ENGINE, LLAMA = (
    load_hardware("a100-sxm-80gb"),
    load_engine("magicdec-2024"),
    load_model_spec("llama-3.1-8b"),
)
LAW = MeasuredProfile(
    model="m",
    draft_method="streamingllm",
    law=Law(rejection=0.2, budget_exponent=0.3, fill_exponent=0.5, drift=0.4),
)
GRID = Points.grid(
    batch=[1, 7, 64],
    context=[300.0, 5000.0, 90_000.0],
    tp=[1, 8],
    budget=[64, 512],
    gamma=[0, 1, 5],
    gen_len=100.0,
)


def setup_of(method: str) -> Setup:
    spec = SpeculationSpec(draft="self", draft_method=method, draft_budget=64, gamma=1)  # type: ignore[arg-type]
    return Setup(model=LLAMA, hardware=A100, engine=ENGINE, speculation=spec)


@pytest.mark.parametrize("method", ["streamingllm", "topk"])
def test_every_point_equals_its_own_prediction(method: str) -> None:
    setup = setup_of(method)
    result = predict(setup, LAW, GRID)
    rows = result.take(np.arange(np.prod(GRID.shape)))
    axes = [
        np.broadcast_to(each, GRID.shape).ravel()
        for each in (GRID.context, GRID.batch, GRID.tp, GRID.budget)
    ]
    gammas = np.broadcast_to(GRID.gamma, GRID.shape).ravel()
    for index, (context, batch, tp, budget) in enumerate(zip(*axes, strict=True)):
        if not result.full(result.valid).ravel()[index]:
            assert budget >= context
            continue
        one = predict(
            setup, LAW,
            Points(batch=batch, context=context, tp=tp, budget=budget, gamma=gammas[index], gen_len=100.0),
        )  # fmt: skip
        for name in ("speedup", "tpot_s", "step_s", "break_even_gen_len"):
            expected = pytest.approx(float(getattr(one, name)), rel=1e-9)
            assert float(result.full(getattr(result, name)).ravel()[index]) == expected
            assert float(rows.full(getattr(rows, name))[index]) == expected
        assert float(rows.full(rows.memory.total_bytes)[index]) == pytest.approx(
            float(one.memory.total_bytes), 1e-12
        )
        assert bool(result.full(result.memory.fits).ravel()[index]) == bool(
            one.memory.fits
        )


def test_points_that_are_taken_keep_every_operation() -> None:
    """What a table, an interval and a breakdown read of a row is what the grid has at its place."""
    result = predict(setup_of("topk"), LAW, GRID)
    chosen = np.array([5, 40, 41, 70])
    rows = result.take(chosen)
    for ours, all_of_it in zip(
        rows.terms.verify.ops, result.terms.verify.ops, strict=True
    ):
        np.testing.assert_array_equal(
            rows.full(ours.time_s), result.full(all_of_it.time_s).ravel()[chosen]
        )
        np.testing.assert_array_equal(
            rows.full(ours.cost.flops),
            result.full(all_of_it.cost.flops).ravel()[chosen],
        )
    np.testing.assert_array_equal(
        rows.points.gamma, result.full(GRID.gamma).ravel()[chosen]
    )


def test_a_grid_without_acceptance_holds_gamma_zero() -> None:
    result = predict(
        Setup(model=LLAMA, hardware=A100, engine=ENGINE),
        None,
        Points.grid(batch=[1, 2], context=[1000]),
    )
    np.testing.assert_array_equal(result.speedup, 1.0)


def test_a_full_cache_draft_is_valid_at_every_context() -> None:
    spec = SpeculationSpec(draft="self", draft_method="full", gamma=1)
    setup = Setup(model=LLAMA, hardware=A100, engine=ENGINE, speculation=spec)
    grid = Points.grid(batch=[4], context=[16.0, 9000.0], tp=[8], gamma=[2])
    assert predict(setup, constant_profile(0.7), grid).valid.all()
