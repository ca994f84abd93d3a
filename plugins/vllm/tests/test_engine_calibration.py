"""vLLM's steps timed for a calibration, and a grid measured in it: each in an engine of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from magicdec.calibrate.engine import vllm_points
from magicdec.calibrate.local_profile import EngineShape, LocalProfile
from magicdec.measure.engines import in_own_process
from magicdec.perfmodel.acceptance import constant_profile
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.schema.record import Record, read_records
from magicdec.specs.engine import load_engine
from magicdec.specs.speculation import SamplingSpec

SMALL, LARGE = EngineShape(1, 300, 200, 2), EngineShape(6, 1200, 200, 2)


def test_the_engines_steps_are_timed_phase_by_phase() -> None:
    """Phases add up to the step, and grow with what they read: a batch of long contexts takes longer than one sequence,
    a sparse draft step less than a decoding step, and verifying three tokens less than decoding them one by one."""
    shapes = [(SMALL, SamplingSpec(temperature=1.0)), (LARGE, SamplingSpec())]
    least: dict[
        tuple[float, str], float
    ] = {}  # another job on the machine lengthens what it spoils
    for _ in range(4):
        points = vllm_points(
            "embedded",
            device="cpu",
            dtype="float32",
            clock="cpu",
            rounds=2,
            shapes=shapes,
        )
        for p in points:
            place = p.shape["batch_size"], p.table
            least[place] = min(p.time_s, least.get(place, p.time_s))
        small, large = (
            {
                table: time_s
                for (size, table), time_s in least.items()
                if size == shape.batch_size
            }
            for shape in (SMALL, LARGE)
        )
        assert set(small) == {
            "autoregressive",
            "sample",
            "bookkeeping",
            "draft",
            "verify",
            "accept",
            "upkeep",
        }
        assert min(small.values()) > 0
        decoding = (
            large["autoregressive"] - large["sample"] - large["bookkeeping"]
        )  # the pass alone
        grows = large["autoregressive"] > 1.2 * small["autoregressive"]
        if grows and 0 < large["draft"] < decoding < large["verify"] < 3 * decoding:
            return
    if (load := os.getloadavg()[0]) > 1.5 * (os.cpu_count() or 1):
        pytest.skip(
            f"this machine is busy (load {load:.1f} on {os.cpu_count()} cores): times tell nothing"
        )
    pytest.fail(f"small: {small}, large: {large}")


def run_small_grid(records: Path) -> tuple[list[Record], list[float | None]]:
    """What was measured, and the speedups that were compared. In a process of its own: what it imports must not be
    loaded where other tests start an engine, so that it gives back nothing of it either."""
    from magicdec.validate.grid import GridSpec, run_grid

    grid = GridSpec(
        engine="vllm",
        clock="cpu",
        cases=((2, 300),),
        draft_budgets=(200,),
        gammas=(1, 2),
        gen_len=24,
        repetitions=2,
    )
    acceptance = (constant_profile(0.7, model="embedded", draft_method="streamingllm"),)
    profile = LocalProfile(
        hardware=load_hardware("a100-sxm-80gb"),
        engine=load_engine("ours"),
        acceptance=acceptance,
    )
    run = run_grid(grid, profile=profile, records=records)
    return run.measured, [pair.measured.speedup for pair in run.comparison.pairs]


def test_a_grid_is_predicted_and_measured_in_the_engine(tmp_path: Path) -> None:
    """Predictions are written first; records name the engine, and hold CPU times of both kinds of decoding."""
    measured, compared = in_own_process(run_small_grid, tmp_path / "grid.jsonl")
    written = read_records(tmp_path / "grid.jsonl")
    assert [record.source for record in written] == ["calibrated"] * 3 + [
        "measured"
    ] * 3
    for record in measured[1:]:
        assert record.engine.startswith("vllm ")
        assert record.step_cpu_s
        assert record.autoregressive_step_cpu_s
        assert set(record.breakdown_cpu_s or {}) == {
            "draft",
            "verify",
            "sample",
            "rest",
        }
        assert sum((record.breakdown_cpu_s or {}).values()) == pytest.approx(
            record.step_cpu_s, rel=0.2
        )
    assert compared == [record.speedup_cpu for record in measured[1:]]
