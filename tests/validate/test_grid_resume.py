"""A grid killed half-way goes on where it stopped: every point once, under the predictions frozen at first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")

from magicdec.errors import ConfigError
from magicdec.records import Record, read_records
from magicdec.specs.engine import load_engine
from magicdec.specs.hardware import load_hardware
from magicdec.validate.grid import acceptance_request, freeze_predictions, load_grid
from magicdec.validate.local_profile import LocalProfile

RUN = """
import sys
from pathlib import Path
from magicdec.perfmodel.acceptance import constant_profile
from magicdec.specs.engine import load_engine
from magicdec.specs.hardware import load_hardware
from magicdec.validate.grid import GridSpec, run_grid
from magicdec.validate.local_profile import LocalProfile

grid = GridSpec(cases=((1, 128), (2, 128), (2, 160), (2, 192)), draft_budgets=(32,), gammas=(1, 2), gen_len=8,
                repetitions=2, dtype="float32")
law = constant_profile(0.8, model="embedded", draft_method="streamingllm")
profile = LocalProfile(hardware=load_hardware("a100-sxm-80gb"), engine=load_engine("ours"), acceptance=(law,))
run_grid(grid, profile=profile, records=Path(sys.argv[1]))
"""
NUM_POINTS = 4 * 3


def measured(file: Path) -> list[Record]:
    return [record for record in read_records(file) if record.source == "measured"] if file.exists() else []


@pytest.mark.timeout(180)
def test_a_killed_grid_resumes_without_losing_or_doubling_a_point(tmp_path: Path) -> None:
    file = tmp_path / "grid.jsonl"
    command = [sys.executable, "-c", RUN, str(file)]
    running = subprocess.Popen(command)
    deadline = time.monotonic() + 120
    while not measured(file) and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(running.pid, signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    before = read_records(file)
    assert 0 < len(measured(file)) < NUM_POINTS
    subprocess.run(command, check=True, timeout=120)
    after = read_records(file)
    assert after[: len(before)] == before
    assert set(Counter((record.source, record.key) for record in after).values()) == {1}
    assert Counter(record.source for record in after) == {"calibrated": NUM_POINTS, "measured": NUM_POINTS}
    assert all(record.reference_s for record in measured(file))


GRID_FILE = Path(__file__).resolve().parents[2] / "docs" / "grid.toml"


def test_a_profile_without_the_acceptance_of_a_method_is_a_one_line_error(tmp_path: Path) -> None:
    profile = LocalProfile(hardware=load_hardware("a100-sxm-80gb"), engine=load_engine("ours"), acceptance=())
    with pytest.raises(ConfigError, match="profile-acceptance --draft-method streamingllm"):
        freeze_predictions(list(load_grid(GRID_FILE).requests()), profile, tmp_path / "grid.jsonl")


def test_the_shipped_grid_measures_acceptance_apart_from_its_points() -> None:
    grid = load_grid(GRID_FILE)
    request = acceptance_request(grid)
    assert set(request.draft_methods) == set(grid.draft_methods)
    assert request.gamma not in grid.gammas
    assert not set(request.context_lens) & {context for _, context in grid.cases}


def test_the_shipped_grid_has_48_points() -> None:
    grid = load_grid(GRID_FILE)
    assert sum(len(request.speculations) for request in grid.requests()) == 48
