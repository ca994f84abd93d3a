"""No calibration point shares what a measured grid varies."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from magicdec.calibrate.acceptance_bench import AcceptanceRequest
from magicdec.calibrate.engine import (
    GREEDY_SHAPES,
    HEAD_SHAPES,
    SAMPLED_SHAPES,
    VLLM_GREEDY_SHAPES,
    VLLM_SAMPLED_SHAPES,
)
from magicdec.calibrate.kernel_bench import ATTENTION_SHAPES
from magicdec.runtime.prompts import PromptRequest, load_prompts, load_tokenizer
from magicdec.specs.catalog import checkpoint_directory, load_model_spec
from magicdec.validate import demo
from magicdec.validate.grid import (
    BUILT_IN_GRID,
    QUICK_GRID,
    VLLM_GRID,
    acceptance_request,
    load_grid,
)

GRID_FILE = Path(__file__).resolve().parents[2] / "docs" / "grid.toml"
SHAPES = {
    "ours": (*SAMPLED_SHAPES, *GREEDY_SHAPES, *HEAD_SHAPES),
    "vllm": (*VLLM_SAMPLED_SHAPES, *VLLM_GREEDY_SHAPES),
}
GRID_BUDGETS = {2**n for n in range(5, 13)}
GRID_BATCHES = {2**n for n in range(8)}
GRID_CONTEXTS = {256 * n for n in range(1, 17)}


def test_engine_shapes_share_no_batch_and_context_with_grids_of_round_numbers() -> None:
    """Users' grids are made of powers of two and multiples of 256; calibration keeps clear of all of them."""
    for shape in (*SHAPES["ours"], *SHAPES["vllm"]):
        assert not (
            shape.batch_size in GRID_BATCHES and shape.context_len in GRID_CONTEXTS
        ), shape
        assert shape.draft_budget not in GRID_BUDGETS, shape


GRIDS = {
    "built-in": BUILT_IN_GRID,
    "quick": QUICK_GRID,
    "docs/grid.toml": load_grid(GRID_FILE),
    "vllm": VLLM_GRID,
}


HEADS_GRID = {"docs/grid-heads.toml": load_grid(GRID_FILE.with_name("grid-heads.toml"))}


@pytest.mark.parametrize("name", GRIDS | HEADS_GRID)
def test_shipped_grids_are_not_calibrated_on(name: str) -> None:
    """No calibration point, of kernels or of engine steps, shares its (batch, context) with one; nor its (budget,
    gamma), where there is a choice of budgets: a trained head reads its whole cache, and its gammas may recur."""
    grid = (GRIDS | HEADS_GRID)[name]
    measured = list(grid.requests())
    cases = {(request.batch_size, request.context_len) for request in measured}
    choices = {
        (s.draft_budget, s.gamma)
        for request in measured
        for s in request.speculations
        if s.draft_budget is not None
    }
    shapes = SHAPES[grid.engine]
    assert not cases & {(s.batch_size, s.context_len) for s in shapes}
    assert not cases & set(ATTENTION_SHAPES)
    assert not choices & {(s.draft_budget, s.gamma) for s in shapes}


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("quick", [True, False])
def test_acceptance_of_shipped_grids_is_profiled_apart(name: str, quick: bool) -> None:
    """At budgets, contexts and a gamma that the grid has not, and which surround the grid's budgets."""
    grid = GRIDS[name]
    request = acceptance_request(grid, quick=quick)
    assert request.gamma > max(grid.gammas)
    assert not set(request.draft_budgets) & set(grid.draft_budgets)
    assert not set(request.context_lens) & {context for _, context in grid.cases}
    assert (
        min(request.draft_budgets)
        < min(grid.draft_budgets)
        <= max(grid.draft_budgets)
        < max(request.draft_budgets)
    )
    assert len(request.draft_budgets) >= 3


def test_the_demo_is_not_calibrated_on() -> None:
    calibrated = {
        (s.batch_size, s.context_len)
        for s in (*SAMPLED_SHAPES, *GREEDY_SHAPES, *HEAD_SHAPES)
    }
    assert not calibrated & {
        (r.batch_size, r.context_len) for r in (demo.MAIN, demo.MIDDLE, demo.SMALL)
    }


def test_calibration_prompts_share_no_text_with_measured_ones() -> None:
    """Windows of 16 tokens, of which held-out text has many that occur once: those of the two kinds of prompts, at the
    grid's and the profile's own contexts and seeds, hardly overlap (licence headers and idioms recur)."""
    grid = GRIDS["docs/grid.toml"]
    spec = load_model_spec(grid.model)
    checkpoint = checkpoint_directory(grid.model)
    tokenizer = load_tokenizer(checkpoint, vocab_size=spec.vocab_size)
    profiled = acceptance_request(grid)

    def windows(
        context: int, count: int, seed: int, calibration: bool
    ) -> set[tuple[int, ...]]:
        request = PromptRequest(
            count=count, context_len=context, seed=seed, calibration=calibration
        )
        prompts = load_prompts(request, tokenizer=tokenizer, vocab_size=spec.vocab_size)
        return {
            tuple(p[i : i + 16])
            for p in prompts
            for i in range(0, len(p) - 16, 16 if calibration else 1)
        }

    calibration = windows(
        profiled.context_lens[-1], profiled.num_prompts, profiled.seed, True
    )
    largest = max(
        grid.requests(), key=lambda request: request.batch_size * request.context_len
    )
    measured = windows(
        largest.context_len, largest.batch_size, largest.sampling.seed, False
    )
    assert len(calibration & measured) < 0.02 * len(calibration)


def test_acceptance_is_profiled_on_other_prompts() -> None:
    """The profile's prompts come from the half of the text that measured runs leave alone, and have another seed."""
    assert AcceptanceRequest().seed != demo.MAIN.sampling.seed
    assert not demo.MAIN.calibration_prompts
