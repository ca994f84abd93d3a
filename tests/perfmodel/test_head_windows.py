"""Heads whose attention is cut to a window: what they read, accept, keep, and how they are exported."""

from __future__ import annotations

import numpy as np
import pytest

from magicdec import api
from magicdec.naming import draft_name
from magicdec.perfmodel.acceptance import default_profile
from magicdec.perfmodel.setup import Points, Setup, budgets_of
from magicdec.perfmodel.speedup import Prediction, predict
from magicdec.reports.exports import export
from magicdec.specs.speculation import SpeculationSpec

TARGET = "llama-3.1-8b"
BATCH = 6
CONTEXT = 65_536
WINDOW = 2048


def predicted(context: int, *, window: int | None, gamma: int = 3) -> Prediction:
    spec = SpeculationSpec(draft="eagle3", draft_method="eagle3", draft_budget=window)
    setup = Setup.of(TARGET, "h100-sxm-80gb", "sglang", spec)
    law = default_profile(TARGET, "eagle3", draft="eagle3")
    points = Points(batch=BATCH, context=context, budget=window, gamma=gamma)
    return predict(setup, law, points)


def test_a_window_cuts_the_keys_and_values_that_a_draft_step_reads() -> None:
    """Llama-3.1-8B's head has one layer of 8 KV heads of 128, in 16 bits."""
    gamma = 3
    own_drafts = (gamma - 1) / 2
    bytes_per_token = 2 * 8 * 128 * 2
    for window, tokens in ((None, CONTEXT), (WINDOW, WINDOW)):
        read = float(
            predicted(CONTEXT, window=window, gamma=gamma).terms.draft.cost.kv_bytes
        )
        assert read == pytest.approx(
            BATCH * bytes_per_token * (tokens + own_drafts), rel=1e-12
        )


def test_a_head_accepts_with_a_window_what_it_accepts_at_that_context() -> None:
    short = predicted(WINDOW, window=None)
    cut = predicted(CONTEXT, window=WINDOW)
    whole = predicted(CONTEXT, window=None)
    assert float(cut.expected_tokens_per_step) == float(short.expected_tokens_per_step)
    assert float(whole.expected_tokens_per_step) < float(cut.expected_tokens_per_step)


def test_a_window_longer_than_the_context_changes_nothing() -> None:
    cut = predicted(1024, window=WINDOW)
    whole = predicted(1024, window=None)
    assert bool(cut.valid)
    assert float(cut.speedup) == float(whole.speedup)


def test_the_cache_is_kept_whole_beside_a_window() -> None:
    cut = predicted(CONTEXT, window=WINDOW).memory
    whole = predicted(CONTEXT, window=None).memory
    assert np.array_equal(cut.draft_kv_bytes, whole.draft_kv_bytes)


def test_plan_searches_windows_where_the_engine_has_them_and_exports_its_flag() -> None:
    asked = {
        "model": TARGET,
        "hardware": "h100-sxm-80gb",
        "tp": 1,
        "draft": "eagle3",
        "context": 16_384,
        "batch": BATCH,
    }
    plan = api.plan(**asked, engine="sglang")
    budgets = {row.draft_budget for row in plan.candidates if row.draft == "eagle3"}
    assert budgets == {None, 2048, 4096}
    assert plan.best.draft_budget == WINDOW
    assert f"--speculative-draft-window-size {WINDOW}" in export("sglang", plan)
    (note,) = [each for each in plan.notes if "--speculative-draft-window-size" in each]
    assert note.startswith("EAGLE-3 sees 2,048 of 16,384 tokens")
    assert "with its whole cache" in note
    assert "at 16,384 the first drafted token" not in " ".join(plan.notes)


@pytest.mark.parametrize(("engine", "pull"), [("vllm", "53827"), ("trtllm", "14200")])
def test_engines_without_a_released_window_get_none_and_the_plan_says_so(
    engine: str, pull: str
) -> None:
    """Beyond the trained length, and wherever a budget is asked for."""
    asked = {"model": TARGET, "hardware": "h100-sxm-80gb", "tp": 1, "draft": "eagle3"}
    plan = api.plan(**asked, context=16_384, batch=BATCH, engine=engine)
    assert {row.draft_budget for row in plan.candidates} == {None}
    (note,) = [each for each in plan.notes if pull in each]
    assert "trained on up to 2,048 tokens" in note
    short = api.plan(**asked, context=1024, batch=BATCH, engine=engine)
    assert not any(pull in each for each in short.notes)
    budgeted = api.plan(
        **asked, context=1024, batch=BATCH, engine=engine, draft_budget=[512]
    )
    assert any(
        "whatever --draft-budget says" in each and pull in each
        for each in budgeted.notes
    )
    assert "window" not in export(engine, budgeted)


LONG_HEAD = {
    "model": "qwen3.5-35b-a3b",
    "hardware": "h200-sxm-141gb",
    "tp": 1,
    "draft": "mtp",
    "batch": 4,
    "engine": "sglang",
}


def test_a_head_trained_long_gains_what_it_does_not_read_alone() -> None:
    """Multi-token prediction: equal acceptance, a shorter draft step, and sinks beside the window.
    At 8k, where nothing is gained, no window is tried.
    """
    short = api.plan(**LONG_HEAD, context=8192)
    assert {row.draft_budget for row in short.candidates} == {None}
    long = api.plan(**LONG_HEAD, context=262_144, gamma=3)
    by_window = {row.draft_budget: row for row in long.candidates}
    assert set(by_window) == {None, 2048, 4096}
    tokens = {row.drafting.tokens_per_step for row in long.candidates}
    assert len(tokens) == 1
    draft_s = [by_window[each].step.draft_s for each in (2048, 4096, None)]
    assert draft_s == sorted(draft_s)
    assert draft_s[0] < 0.9 * draft_s[2]
    assert long.best.draft_budget == 2048
    exported = export("sglang", long)
    assert "--speculative-draft-window-size 2044" in exported
    assert "Not supported" not in exported
    named = draft_name(long.best.draft, long.best.draft_method, 2048)
    assert f"{named}, gamma 3." in " ".join(exported.replace("\n#", "").split())
    assert "--speculative-draft-sink-size 4" in exported


def test_our_runtime_keeps_the_window_alone() -> None:
    """The ring's slots: the budget, and two blocks that may yet be rejected."""
    spec = SpeculationSpec(draft="eagle3", draft_method="eagle3", draft_budget=WINDOW)
    setup = Setup.of(TARGET, "h100-sxm-80gb", "ours", spec)
    law = default_profile(TARGET, "eagle3", draft="eagle3")
    gamma = 3
    points = Points(batch=BATCH, context=CONTEXT, budget=WINDOW, gamma=gamma)
    slots = WINDOW + 2 * (gamma + 1) + setup.engine.memory.spare_slots
    kept = float(predict(setup, law, points).memory.draft_kv_bytes)
    assert kept == pytest.approx(BATCH * slots * 2 * 8 * 128 * 2)


@pytest.mark.parametrize("engine", ["ours", "sglang"])
def test_a_whole_cache_beside_windows_is_that_of_a_head_without_any(
    engine: str,
) -> None:
    """A search has windows and the whole cache, None, on one axis."""

    def at(budget: int | None, axis: tuple[int | None, ...]) -> Prediction:
        spec = SpeculationSpec(
            draft="eagle3", draft_method="eagle3", draft_budget=budget
        )
        setup = Setup.of(TARGET, "h100-sxm-80gb", engine, spec)
        grid = Points.grid(batch=[BATCH], context=[CONTEXT], budget=axis, gamma=[3])
        return predict(setup, default_profile(TARGET, "eagle3", draft="eagle3"), grid)

    budgets = (WINDOW, None)
    beside = at(WINDOW, budgets)
    alone = at(None, (None,))
    for name in ("step_s", "tpot_s", "ttft_s", "expected_tokens_per_step"):
        values = beside.full(getattr(beside, name)).ravel()
        assert values[1] == alone.full(getattr(alone, name)).item()
        assert values[0] != values[1] or name == "ttft_s"
    memory = beside.full(beside.memory.total_bytes).ravel()
    assert memory[1] == alone.full(alone.memory.total_bytes).item()
    assert budgets_of(beside.points.budget.ravel()) == list(budgets)
