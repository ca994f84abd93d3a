"""The vectorised grid against one prediction at a time."""

from __future__ import annotations

import numpy as np
import pytest

from magicdec.perfmodel.acceptance import AcceptanceProfile, constant_profile
from magicdec.perfmodel.acceptance_law import Law
from magicdec.perfmodel.grid import Grid, evaluate, evaluate_in_chunks
from magicdec.perfmodel.speculative import predict
from magicdec.perfmodel.steps import Setup
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.hardware import load_hardware
from magicdec.specs.speculation import SpeculationSpec

A100, ENGINE, LLAMA = load_hardware("a100-sxm-80gb"), load_engine("magicdec-2024"), load_model_spec("llama-3.1-8b")
LAW = AcceptanceProfile(
    model="m", draft_method="streamingllm", law=Law(rejection=0.2, budget_exponent=0.3, fill_exponent=0.5, drift=0.4)
)
GRID = Grid(
    batch_sizes=[1, 7, 64], context_lens=[300.0, 5000.0, 90_000.0], tp_sizes=[1, 8], budgets=[64, 512], gammas=[0, 1, 5]
)


def setup_of(method: str) -> Setup:
    spec = SpeculationSpec(draft="self", draft_method=method, draft_budget=64, gamma=1)  # type: ignore[arg-type]
    return Setup(model=LLAMA, hardware=A100, engine=ENGINE, speculation=spec)


@pytest.mark.parametrize("method", ["streamingllm", "topk"])
def test_every_point_equals_its_own_prediction(method: str) -> None:
    setup = setup_of(method)
    result = evaluate(setup, LAW, GRID)
    for index in np.ndindex(GRID.shape):
        b, s, t, k, g = index
        budget, context, gamma = GRID.budgets[k], GRID.context_lens[s], GRID.gammas[g]
        if not result.valid[index]:
            assert budget >= context
            continue
        one = predict(
            LLAMA, None, A100, ENGINE, setup.speculation, batch=GRID.batch_sizes[b], context=context,
            tp_size=GRID.tp_sizes[t], acceptance=LAW, gamma=gamma, draft_budget=budget,
        )  # fmt: skip
        assert float(result.speedup[index]) == pytest.approx(float(one.speedup), rel=1e-9)
        assert float(result.tpot_s[index]) == pytest.approx(float(one.tpot_s), rel=1e-9)
        assert float(result.memory_bytes[index]) == pytest.approx(float(one.memory.total_bytes), rel=1e-12)
        assert bool(result.fits[index]) == bool(one.memory.fits)


def test_chunks_equal_the_whole() -> None:
    whole = evaluate(setup_of("streamingllm"), LAW, GRID)
    parts = list(evaluate_in_chunks(setup_of("streamingllm"), LAW, GRID, max_points=40))
    assert len(parts) > 1
    np.testing.assert_allclose(np.concatenate([part.speedup for _, part in parts]), whole.speedup, rtol=1e-12)
    assert [part.start for part, _ in parts] == [0, 1, 2]


def test_a_grid_without_acceptance_holds_gamma_zero() -> None:
    grid = Grid(batch_sizes=[1, 2], context_lens=[1000.0], tp_sizes=[1], budgets=[0], gammas=[0])
    result = evaluate(Setup(model=LLAMA, hardware=A100, engine=ENGINE), None, grid)
    np.testing.assert_array_equal(result.speedup, 1.0)


def test_a_full_cache_draft_is_valid_at_every_context() -> None:
    spec = SpeculationSpec(draft="self", draft_method="full", gamma=1)
    setup = Setup(model=LLAMA, hardware=A100, engine=ENGINE, speculation=spec)
    grid = Grid(batch_sizes=[4], context_lens=[16.0, 9000.0], tp_sizes=[8], budgets=[0], gammas=[2])
    result = evaluate(setup, constant_profile(0.7), grid)
    assert result.valid.all()
