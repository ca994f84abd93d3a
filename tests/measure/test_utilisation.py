"""What a run must read, and what it takes of memory, against numbers counted by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("torch")

from magicdec.measure.configuration import BenchmarkRequest, Outputs
from magicdec.measure.environment import REFERENCE_BYTES, ReferenceKernels, ReferenceTimes
from magicdec.measure.rank import measure_request
from magicdec.measure.utilisation import MemoryMeter, autoregressive_step_bytes, phase_bytes, planned_memory_bytes
from magicdec.perfmodel.planner import PlanRequest, plan
from magicdec.records import Record, read_records
from magicdec.reports.terminal import print_run
from magicdec.runtime.distributed import SINGLE
from magicdec.specs.catalog import EMBEDDED_DIRECTORY
from magicdec.specs.speculation import AUTOREGRESSIVE, SamplingSpec, SpeculationSpec
from magicdec.units import MIB

STREAMING = SpeculationSpec(draft="self", draft_method="streamingllm", draft_budget=64, gamma=3)


def request_for(**changes: object) -> BenchmarkRequest:
    fields: dict[str, object] = {"model": "embedded", "batch_size": 2, "context_len": 200, "gen_len": 10}
    return BenchmarkRequest(**{**fields, **changes})  # type: ignore[arg-type]


def test_bytes_that_must_be_read_are_those_of_the_checkpoint_and_of_its_cache() -> None:
    """Weights counted in the file (tied, fp16 there, fp32 here); 3 layers of 6 heads of 64, keys and values."""
    file = (EMBEDDED_DIRECTORY / "model.safetensors").read_bytes()
    header = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    weights = sum(int(np.prod(entry["shape"])) for name, entry in header.items() if name != "__metadata__")
    per_token = 2 * 3 * 6 * 64
    expected = 4 * (weights + per_token * (150 + 5 + 200 + 5))
    request = request_for()
    assert autoregressive_step_bytes(request, [150, 200]) == pytest.approx(expected)
    parts = phase_bytes(request, [150, 200], STREAMING)
    assert parts == pytest.approx({"draft": 3 * 4 * (weights + per_token * 2 * 64), "verify": expected})
    full = SpeculationSpec(draft="embedded", draft_method="full", gamma=2)
    assert phase_bytes(request, [150, 200], full)["draft"] == pytest.approx(2 * expected)
    lookup = SpeculationSpec(draft="ngram", draft_method="ngram", gamma=2)
    assert phase_bytes(request, [150, 200], lookup)["draft"] == 0
    assert phase_bytes(request_for(dtype="bfloat16"), [150, 200], AUTOREGRESSIVE)["verify"] == expected / 2


def test_planned_memory_is_what_plan_says() -> None:
    request = request_for(batch_size=16, context_len=1000, gen_len=50, speculations=(STREAMING,))
    planned = plan(
        PlanRequest(
            model="embedded", hardware=("a100-sxm-80gb",), engine="ours", tp_size=1, batch_sizes=(16,),
            context_lens=(1000,), gen_len=50, draft="self", draft_method="streamingllm", draft_budgets=(64,), gamma=3,
            acceptance_rate=0.8, sampling=SamplingSpec(temperature=1.0), weight_dtype="fp32", kv_dtype="fp32",
        )
    )  # fmt: skip
    (row,) = (row for row in planned.candidates if row.gamma == 3)
    assert planned_memory_bytes(request) == pytest.approx(row.memory_bytes_per_gpu)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak starts anew on Linux only")
def test_the_meter_sees_what_was_taken_and_given_back() -> None:
    """Between the two sizes by far: the process itself comes and goes with a few tens of MiB."""
    first = np.ones(600 * MIB // 8)
    del first
    meter = MemoryMeter("cpu")
    second = np.ones(200 * MIB // 8)
    del second
    assert 120 * MIB < meter.peak_bytes() < 450 * MIB


def test_a_run_records_its_use_of_memory_and_marks_a_slow_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine whose memory gives 1 TB/s any step on a CPU is far from its limit, so the speedup is marked, in the
    record and shown."""
    at_once = ReferenceTimes(memory_s=REFERENCE_BYTES / 1e12, compute_s=0.01)
    monkeypatch.setattr(ReferenceKernels, "times", lambda kernels: at_once)
    request = request_for(speculations=(STREAMING,), repetitions=1)
    path = tmp_path / "records.jsonl"
    alone, drafted = measure_request(SINGLE, request, Outputs(records=path, quiet=True))
    assert read_records(path) == [drafted, alone]
    ceiling = drafted.memory_bytes_per_s
    assert ceiling == pytest.approx(1e12)
    achieved = drafted.achieved_bytes_per_s
    assert achieved is not None
    assert achieved.keys() == {"autoregressive", "draft", "verify", "step"}
    assert drafted.autoregressive_mbu == pytest.approx(achieved["autoregressive"] / ceiling)
    assert drafted.mbu == pytest.approx(achieved["step"] / ceiling)
    assert 0 < drafted.autoregressive_mbu < 0.6
    assert "below 60%" in drafted.notes[0]
    assert alone.notes == []
    assert drafted.peak_memory_bytes is not None
    assert drafted.peak_memory_bytes > 4 * 2 * 210 * 2 * 3 * 6 * 64  # the KV cache alone
    assert f"{drafted.autoregressive_mbu:.0%}†" in shown([alone, drafted])


def shown(records: list[Record]) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    print_run(records, console)
    return console.export_text()
