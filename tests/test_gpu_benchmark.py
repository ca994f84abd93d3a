"""benchmarks/gpu.py: what it would measure on a large GPU, and that its commands work from end to end on a CPU."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")

from magicdec.calibrate.local_profile import LocalProfile
from magicdec.records import read_records
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.hardware import bytes_per_element, load_hardware
from magicdec.validate.kernels import read_table

ROOT = Path(__file__).resolve().parent.parent
H200 = LocalProfile(hardware=load_hardware("h200"), engine=load_engine("ours"), acceptance=())


@pytest.fixture
def gpu_shapes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_shapes")


@pytest.mark.parametrize(("name", "free_bytes"), [("llama-3.1-8b", 120e9), ("llama-2-7b-32k", 122e9)])
def test_what_is_measured_on_an_h200_fits_it_and_covers_the_grid(
    name: str, free_bytes: float, gpu_shapes: ModuleType
) -> None:
    """Beside the weights: the caches of target and draft of each item, and the draft's narrower weights where it has
    some, from the model's dimensions."""
    spec = load_model_spec(name)
    items = gpu_shapes.model_items(
        gpu_shapes.FULL,
        name=name,
        model_argument=name,
        spec=spec,
        device="cuda",
        dtype="bfloat16",
        free_bytes=free_bytes,
        profile=H200,
        cuda_graphs=True,
    )
    slot_bytes = 2 * 2 * spec.num_hidden_layers * spec.num_key_value_heads * spec.head_dim
    for item in items:
        request = item.request
        for speculation in request.speculations:
            slots = request.context_len + request.gen_len + speculation.gamma + speculation.draft_budget
            copy = speculation.draft_weight_dtype
            needed = request.batch_size * slots * slot_bytes
            needed += spec.num_parameters * bytes_per_element(copy) if copy else 0
            assert needed < 0.95 * free_bytes
        assert request.context_len + request.gen_len < spec.max_position_embeddings
    grid = [s for item in items for s in item.request.speculations if item.acceptance.source != "stated"]
    assert len(grid) >= 24
    assert {s.gamma for s in grid} == set(range(1, 7))
    assert {s.draft_budget for s in grid} == {256, 512, 1024, 2048}
    stated = [item for item in items if item.acceptance.source == "stated"]
    assert [(i.request.speculations[0].draft_method, i.request.speculations[0].draft_weight_dtype) for i in stated] == [
        ("streamingllm", None), ("streamingllm", "fp8"), ("snapkv", None),
    ]  # fmt: skip
    assert {rate for item in stated[:2] for rate in item.request.simulate_acceptance} == {0.81}
    if name == "llama-3.1-8b":
        assert (32, 16_384) in {(item.request.batch_size, item.request.context_len) for item in items}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_work_on_a_cpu_and_go_on_where_they_stopped(tmp_path: Path) -> None:
    """Calibration, the grid and the report; predictions stand in the file before any measurement; a second call
    measures nothing again."""
    result = _run(tmp_path, "calibrate", "llama-3.1-8b")
    records = read_records(tmp_path / "records.jsonl")
    sources = [record.source for record in records]
    first_measured = sources.index("measured")
    assert "calibrated" not in sources[first_measured:]
    measured = records[first_measured:]
    assert result["num_points"]["llama-3.1-8b"] == sum(record.gamma > 0 for record in measured) >= 12
    assert all(record.prompts == "noise" and record.weights == "random" for record in measured)
    assert all(record.simulated_acceptance for record in measured if record.gamma)
    rows = result["table"]["llama-3.1-8b"]
    assert [what for what, value in rows.items() if value == "not measured"] == [list(rows)[-1]]
    assert (tmp_path / "table.md").read_text().count("|") > 40
    _run(tmp_path, "llama-3.1-8b")
    assert read_records(tmp_path / "records.jsonl") == records


def _run(output: Path, *parts: str) -> dict:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--tiny", "--minutes", "12"]
    command += ["--output", str(output), *(word for part in parts for word in ("--part", part))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=850)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_all_reduces_are_timed_by_message_size(tmp_path: Path) -> None:
    """Between two processes on CPUs; the file is one that fits and checks of the catalog read."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_all_reduce.py"), "--device", "cpu", "--rounds", "2"]
    command += ["--sizes", "1024,65536", "--output", str(tmp_path / "all-reduce.csv")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["message_bytes"] for row in rows] == [1024, 65536]
    table, by_device = read_table(tmp_path / "all-reduce.csv")
    assert table.kind == "allreduce"
    assert by_device["cpu"]["time_s"] == pytest.approx([row["gloo_us"] * 1e-6 for row in rows], rel=1e-3)
