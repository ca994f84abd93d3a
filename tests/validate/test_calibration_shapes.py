"""No calibration point shares what a measured grid varies."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from magicdec.validate import demo
from magicdec.validate.acceptance_profile import AcceptanceRequest
from magicdec.validate.engine_bench import GREEDY_SHAPES, SAMPLED_SHAPES
from magicdec.validate.grid import BUILT_IN_GRID

GRID_BUDGETS = {2**n for n in range(5, 13)}
GRID_BATCHES = {2**n for n in range(8)}
GRID_CONTEXTS = {256 * n for n in range(1, 17)}


def test_engine_shapes_share_no_batch_and_context_with_grids_of_round_numbers() -> None:
    """Users' grids are made of powers of two and multiples of 256; calibration keeps clear of all of them."""
    for shape in (*SAMPLED_SHAPES, *GREEDY_SHAPES):
        assert not (shape.batch_size in GRID_BATCHES and shape.context_len in GRID_CONTEXTS), shape
        assert shape.draft_budget not in GRID_BUDGETS, shape


def test_built_in_workloads_are_not_calibrated_on() -> None:
    """The demo's and the built-in grid's own points are among none of the calibration's."""
    calibrated = {(s.batch_size, s.context_len) for s in (*SAMPLED_SHAPES, *GREEDY_SHAPES)}
    measured = {(r.batch_size, r.context_len) for r in (demo.MAIN, demo.MIDDLE, demo.SMALL)}
    measured |= set(BUILT_IN_GRID.cases)
    assert not calibrated & measured


def test_acceptance_is_profiled_on_other_prompts() -> None:
    """The profile's prompts come from the half of the text that measured runs leave alone, and have another seed."""
    assert AcceptanceRequest().seed != demo.MAIN.sampling.seed
    assert not demo.MAIN.calibration_prompts
