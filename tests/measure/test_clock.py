"""Clocks: durations come from one that nobody sets, or from processor time; and calls in a process of their own."""

from __future__ import annotations

import ast
import os
import time
from datetime import datetime
from itertools import count
from pathlib import Path

import pytest

pytest.importorskip("torch")

import magicdec
from magicdec.errors import ConfigError
from magicdec.measure.configuration import BenchmarkRequest
from magicdec.measure.engines import in_own_process
from magicdec.measure.environment import prepare, seconds
from magicdec.measure.rank import benchmark
from magicdec.specs.speculation import SpeculationSpec

STAMPS = {"schema/record.py", "reports/data.py"}
"""Say when something was made, which is the time of day."""
TIMES_OF_DAY = {
    "time.time",
    "time.time_ns",
    "datetime.now",
    "datetime.utcnow",
    "datetime.today",
    "time.localtime",
}
REQUEST = BenchmarkRequest(
    model="embedded", batch_size=2, context_len=64, gen_len=12, repetitions=2,
    speculations=(SpeculationSpec(draft="self", draft_method="streamingllm", draft_budget=16, gamma=2),),
)  # fmt: skip


def test_the_time_of_day_is_for_stamps_alone() -> None:
    package = Path(magicdec.__file__).parent
    users = set()
    for file in package.rglob("*.py"):
        text = file.read_text()
        if not any(name in text for name in TIMES_OF_DAY):
            continue
        names = {
            ast.unparse(node)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Attribute)
        }
        if names & TIMES_OF_DAY:
            users.add(str(file.relative_to(package)))
    assert users == STAMPS


def test_a_clock_that_jumps_changes_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Back and forth by a year with every reading: times are positive and within what the whole took."""
    jumps = count()
    monkeypatch.setattr(time, "time", lambda: (-1) ** next(jumps) * 3e7)
    began_s = time.monotonic()
    records = benchmark(
        REQUEST, records=tmp_path / "r.jsonl", bandwidth_bytes_per_s=1e10
    )
    took_s = time.monotonic() - began_s
    for record in records:
        assert record.prefill_s is not None
        samples = record.step_samples_s or record.autoregressive_step_samples_s
        assert samples
        assert all(
            0 < seconds < took_s
            for seconds in (record.tpot_s, record.prefill_s, *samples)
        )
        assert datetime.fromisoformat(record.environment.created_utc).year >= 2024


def test_a_call_runs_in_another_process_and_its_exception_comes_back() -> None:
    assert in_own_process(os.getpid) != os.getpid()
    with pytest.raises(ValueError, match="no number"):
        in_own_process(int, "no number")


def test_processor_time_does_not_pass_while_a_process_sleeps() -> None:
    wall, cpu = seconds("wall"), seconds("cpu")
    time.sleep(0.2)
    assert seconds("wall") - wall >= 0.2
    assert seconds("cpu") - cpu < 0.1


def test_processor_time_is_told_on_cpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    with pytest.raises(ConfigError, match="--clock cpu is for --device cpu"):
        prepare("cpu", "cuda")
    assert os.environ["OMP_NUM_THREADS"] == "8"
