"""A grid killed half-way goes on where it stopped: every point once, under the predictions frozen at first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from magicdec.calibrate.local_profile import LocalProfile
from magicdec.errors import ConfigError
from magicdec.measure.environment import ReferenceTimes
from magicdec.perfmodel.acceptance import constant_profile
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.schema.comparison import Pair
from magicdec.schema.record import UNFINISHED, Record, read_records
from magicdec.specs.engine import load_engine
from magicdec.validate.grid import (
    GridSpec,
    freeze_predictions,
    load_grid,
    prediction_note,
    run_grid,
)

NUM_POINTS = 2 * 3


def run(file: Path) -> None:
    grid = GridSpec(
        cases=((1, 128), (2, 160)), draft_budgets=(32,), gammas=(1, 2), gen_len=8, repetitions=2,
        dtype="float32",
    )  # fmt: skip
    law = constant_profile(0.8, model="embedded", draft_method="streamingllm")
    profile = LocalProfile(
        hardware=load_hardware("a100-sxm-80gb"),
        engine=load_engine("ours"),
        acceptance=(law,),
    )
    run_grid(grid, profile=profile, records=file)


def measured(file: Path) -> list[Record]:
    return (
        [record for record in read_records(file) if record.source == "measured"]
        if file.exists()
        else []
    )


@pytest.mark.slow
def test_a_killed_grid_resumes_without_losing_or_doubling_a_point(
    tmp_path: Path,
) -> None:
    file = tmp_path / "grid.jsonl"
    code = f"from pathlib import Path; from {__name__} import run; run(Path({str(file)!r}))"
    running = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        while not measured(file) and running.poll() is None:
            time.sleep(0.01)
    finally:
        running.kill()
    assert running.wait() == -signal.SIGKILL
    assert 0 < len(measured(file)) < NUM_POINTS
    before = [record for record in read_records(file) if UNFINISHED not in record.notes]
    run(file)
    after = read_records(file)
    assert after[: len(before)] == before
    assert set(Counter((record.source, record.key) for record in after).values()) == {1}
    assert Counter(record.source for record in after) == {
        "calibrated": NUM_POINTS,
        "measured": NUM_POINTS,
    }
    assert all(
        record.reference_s and record.compute_reference_s for record in measured(file)
    )
    places = {
        (record.source, record.batch_size, record.gamma): n
        for n, record in enumerate(after)
    }
    for (source, *point), place in places.items():
        if source == "measured":  # predicted before
            assert places["calibrated", *point] < place


GRID_FILE = Path(__file__).resolve().parents[2] / "docs" / "grid.toml"


def test_a_profile_without_the_acceptance_of_a_method_is_a_one_line_error(
    tmp_path: Path,
) -> None:
    profile = LocalProfile(
        hardware=load_hardware("a100-sxm-80gb"),
        engine=load_engine("ours"),
        acceptance=(),
    )
    with pytest.raises(
        ConfigError, match="profile-acceptance --draft-method streamingllm"
    ):
        freeze_predictions(
            list(load_grid(GRID_FILE).requests()), profile, tmp_path / "grid.jsonl"
        )


def test_the_shipped_grid_spans_what_it_says() -> None:
    grid = load_grid(GRID_FILE)
    requests = list(grid.requests())
    assert sum(len(request.speculations) for request in requests) == 130
    work = [request.batch_size * request.context_len for request in requests]
    assert work == sorted(work)
    assert {b for b, _ in grid.cases} >= {4, 64}
    assert {c for _, c in grid.cases} >= {1024, 4096}
    assert {64, 1024} <= set(grid.draft_budgets)
    assert {1, 6} <= set(grid.gammas)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("median_speed_error = 0.1", "median_speed_error"),
        ("coverage = 0.8", "coverage"),
        ("regret = 'low'", "regret"),
    ],
)
def test_a_broken_threshold_is_refused_naming_it(
    tmp_path: Path, line: str, named: str
) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(f"cases = [[1, 128]]\n[thresholds]\n{line}\n")
    with pytest.raises(ConfigError, match=named):
        load_grid(file)


def frozen(
    records: Path, *, rate: float = 0.8, at: ReferenceTimes | None = None
) -> list[Record]:
    law = constant_profile(rate, model="embedded", draft_method="streamingllm")
    hardware = msgspec.structs.replace(
        load_hardware("a100-sxm-80gb"), reference_s=0.01, compute_reference_s=0.02
    )
    profile = LocalProfile(
        hardware=hardware, engine=load_engine("ours"), acceptance=(law,)
    )
    grid = GridSpec(cases=((4, 1024), (64, 4096)), draft_budgets=(64,), gammas=(1, 3))
    return freeze_predictions(list(grid.requests()), profile, records, at=at)


def test_predictions_are_frozen_with_what_their_normalisation_needs(
    tmp_path: Path,
) -> None:
    predicted = frozen(tmp_path / "grid.jsonl")
    assert predicted == read_records(tmp_path / "grid.jsonl")
    for record in predicted:
        assert record.notes == [prediction_note(record)]
        assert (record.reference_s, record.compute_reference_s) == (0.01, 0.02)
        shares = record.memory_shares or {}
        assert 0.0 <= shares["autoregressive_step_s"] <= 1.01
    small, large = (
        next(r for r in predicted if r.batch_size == batch and not r.gamma)
        for batch in (4, 64)
    )
    assert (small.memory_shares or {})["autoregressive_step_s"] < (
        large.memory_shares or {}
    )["autoregressive_step_s"]


def test_a_prediction_is_made_for_the_machine_as_it_is_then(tmp_path: Path) -> None:
    """Memory twice as slow as at calibration: a time grows by its share of memory, and its rescaled error, which is
    measured from these references, is none where the run found them again. A later call keeps what is written."""
    usual = frozen(tmp_path / "usual.jsonl")
    slow = frozen(tmp_path / "slow.jsonl", at=ReferenceTimes(0.02, 0.02))
    for before, after in zip(usual, slow, strict=True):
        shares = before.memory_shares or {}
        for term in ("autoregressive_step_s", "draft_step_s", "step_s"):
            if not getattr(before, term):
                continue
            growth = getattr(after, term) / getattr(before, term)
            assert growth == pytest.approx(1.0 + shares[term])
        by_times = after.autoregressive_step_s / after.step_s
        by_times /= before.autoregressive_step_s / before.step_s
        assert after.speedup / before.speedup == pytest.approx(by_times)
        assert after.speedup_high / after.speedup_low == pytest.approx(
            before.speedup_high / before.speedup_low
        )
        assert after.tokens_per_s * after.tpot_s == pytest.approx(
            before.tokens_per_s * before.tpot_s
        )
        assert (after.reference_s, after.compute_reference_s) == (0.02, 0.02)
        found = msgspec.structs.replace(after, source="measured")
        pair = Pair(predicted=after, measured=found)
        assert pair.normalised_error("step_s") == pytest.approx(0.0)
        assert pair.drift == pytest.approx(0.0)
        assert Pair(predicted=before, measured=found).drift == pytest.approx(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert frozen(tmp_path / "slow.jsonl") == slow


def test_another_profile_does_not_change_frozen_predictions_and_says_so(
    tmp_path: Path,
) -> None:
    first = frozen(tmp_path / "grid.jsonl")
    with pytest.warns(UserWarning, match="another profile's"):
        assert frozen(tmp_path / "grid.jsonl", rate=0.6) == first


def test_a_prediction_that_was_changed_afterwards_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "grid.jsonl"
    changed = [msgspec.structs.replace(record, speedup=9.0) for record in frozen(file)]
    file.write_bytes(
        b"".join(msgspec.json.encode(record) + b"\n" for record in changed)
    )
    with pytest.raises(
        ConfigError, match="is not what was written before the measurements"
    ):
        frozen(file)


def test_acceptance_of_another_temperature_is_used_with_a_warning(
    tmp_path: Path,
) -> None:
    law = msgspec.structs.replace(
        constant_profile(0.8, model="embedded", draft_method="streamingllm"), temperature=1.0
    )  # fmt: skip
    profile = LocalProfile(
        hardware=load_hardware("a100-sxm-80gb"),
        engine=load_engine("ours"),
        acceptance=(law,),
    )
    grid = GridSpec(
        cases=((1, 64),),
        draft_budgets=(32,),
        gammas=(1,),
        gen_len=4,
        repetitions=1,
        temperatures=(0.0,),
    )
    with pytest.warns(
        UserWarning, match=r"measured at temperature 1; predictions at 0 use it"
    ):
        run = run_grid(grid, profile=profile, records=tmp_path / "grid.jsonl")
    assert [record.gamma for record in run.measured] == [0, 1]


@pytest.mark.parametrize(
    "name",
    ["grid-2-cores", "grid-2-cores-earlier-1", "grid-heads-2-cores", "demo-2-cores"],
)
def test_shipped_predictions_are_what_was_committed_to(name: str) -> None:
    """Each predicted row still has the hash that was written before the first measurement."""
    records = read_records(
        Path(__file__).resolve().parents[2] / "results" / f"{name}.jsonl"
    )
    predicted = [
        each
        for each in records
        if each.notes and each.notes[0].startswith("prediction sha256")
    ]
    assert len(predicted) in (15, 30, 135)
    assert all(each.notes == [prediction_note(each)] for each in predicted)
