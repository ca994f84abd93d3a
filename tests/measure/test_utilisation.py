"""What a run must read, and what it takes of memory, against numbers counted by hand."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("torch")

from magicdec.measure.configuration import BenchmarkRequest, Outputs
from magicdec.measure.environment import (
    REFERENCE_BYTES,
    ReferenceKernels,
    ReferenceTimes,
)
from magicdec.measure.rank import measure_request
from magicdec.measure.utilisation import phase_bytes, planned_memory_bytes
from magicdec.perfmodel.planner import PlanRequest, make_plan
from magicdec.reports.terminal import print_run
from magicdec.runtime.distributed import SINGLE
from magicdec.schema.record import Record, read_records
from magicdec.specs.catalog import EMBEDDED_DIRECTORY, load_model_spec
from magicdec.specs.speculation import AUTOREGRESSIVE, SpeculationSpec
from magicdec.units import MIB

STREAMING = SpeculationSpec(
    draft="self", draft_method="streamingllm", draft_budget=64, gamma=3
)


def request_for(**changes: object) -> BenchmarkRequest:
    fields: dict[str, object] = {
        "model": "embedded",
        "batch_size": 2,
        "context_len": 200,
        "gen_len": 10,
    }
    return BenchmarkRequest(**{**fields, **changes})  # type: ignore[arg-type]


def test_bytes_that_must_be_read_are_those_of_the_checkpoint_and_of_its_cache() -> None:
    """Weights counted in the file, norms left out (tied, fp16 there, fp32 here); 3 layers of 6 heads of 64, keys and
    values. Verification reads the three drafts' keys too, and a draft step those of the drafts before it."""
    file = (EMBEDDED_DIRECTORY / "model.safetensors").read_bytes()
    header = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    shapes = {
        name: entry["shape"] for name, entry in header.items() if name != "__metadata__"
    }
    weights = sum(
        int(np.prod(shape)) for name, shape in shapes.items() if "norm" not in name
    )
    assert (
        sum(int(np.prod(shape)) for shape in shapes.values()) - weights == 7 * 192
    )  # what is left out
    per_token = 2 * 3 * 6 * 64
    expected = 4 * (weights + per_token * (150 + 5 + 200 + 5))
    request = request_for()
    assert phase_bytes(request, [150, 200], AUTOREGRESSIVE)[
        "autoregressive"
    ] == pytest.approx(expected)
    parts = phase_bytes(request, [150, 200], STREAMING)
    drafts = 3 * 4 * (weights + per_token * 2 * (64 + 1))
    assert parts == pytest.approx(
        {
            "autoregressive": expected,
            "draft": drafts,
            "verify": expected + 4 * per_token * 2 * 3,
        }
    )
    full = SpeculationSpec(draft="embedded", draft_method="full", gamma=2)
    assert phase_bytes(request, [150, 200], full)["draft"] == pytest.approx(
        2 * (expected + 4 * per_token * 2 * 0.5)
    )
    lookup = SpeculationSpec(draft="ngram", draft_method="ngram", gamma=2)
    assert phase_bytes(request, [150, 200], lookup)["draft"] == 0
    narrow = phase_bytes(request_for(dtype="bfloat16"), [150, 200], AUTOREGRESSIVE)
    assert narrow["autoregressive"] == expected / 2


def test_experts_that_no_token_chose_and_tokens_outside_a_window_need_not_be_read() -> (
    None
):
    """Mixtral 8x7B's one token chooses 2 of 8 experts per layer; 52 of Gemma 3 27B's 62 layers see 1,024 tokens.

    All experts and full contexts would be 93 and 121 GB.
    """
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 8 * 4096 + 2 * 3 * 4096 * 14336
    mixtral = 2 * (32 * (layer + 2 * 8 * 128 * 1000) + 32000 * 4096)
    request = request_for(
        model="mixtral-8x7b",
        dtype="bfloat16",
        batch_size=1,
        context_len=1000,
        gen_len=0,
    )
    assert phase_bytes(request, [1000], AUTOREGRESSIVE)[
        "autoregressive"
    ] == pytest.approx(mixtral)
    request = request_for(
        model="gemma-3-27b",
        dtype="bfloat16",
        batch_size=16,
        context_len=8192,
        gen_len=0,
    )
    layer = 5376 * (32 + 2 * 16) * 128 + 32 * 128 * 5376 + 3 * 5376 * 21504
    cached = 16 * 2 * 16 * 128 * (52 * 1024 + 10 * 8192)
    gemma = 2 * (62 * layer + load_model_spec("gemma-3-27b").vocab_size * 5376 + cached)
    assert phase_bytes(request, [8192] * 16, AUTOREGRESSIVE)[
        "autoregressive"
    ] == pytest.approx(gemma)


def test_planned_memory_is_what_plan_says() -> None:
    request = request_for(
        batch_size=16, context_len=1000, gen_len=50, speculations=(STREAMING,)
    )
    planned = make_plan(
        PlanRequest(
            model="embedded", hardware=("a100-sxm-80gb",), engine="ours", tp_size=1, batch_sizes=(16,),
            context_lens=(1000,), gen_len=50, draft="self", draft_method="streamingllm", draft_budgets=(64,), gamma=3,
            acceptance_rate=0.8, temperature=1.0, weight_dtype="fp32", kv_dtype="fp32",
        )
    )  # fmt: skip
    (row,) = (row for row in planned.candidates if row.gamma == 3)
    assert planned_memory_bytes(request) == pytest.approx(row.memory.bytes_per_gpu)


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="the peak starts anew on Linux only",
)
def test_the_meter_sees_what_was_taken_and_given_back() -> None:
    """Between the two sizes by far: the process itself comes and goes with a few tens of MiB. In a
    process of its own, where nothing that other tests hold is given back in between.
    """
    program = """
import numpy as np
from magicdec.measure.utilisation import MemoryMeter
first = np.ones(600 * 2**20 // 8)
del first
meter = MemoryMeter("cpu")
second = np.ones(200 * 2**20 // 8)
del second
print(meter.peak_bytes())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert 120 * MIB < float(done.stdout) < 450 * MIB


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
    assert achieved.keys() == {"autoregressive", "draft", "verify", "step"}
    assert drafted.autoregressive_mbu == pytest.approx(
        achieved["autoregressive"] / ceiling
    )
    assert drafted.mbu == pytest.approx(achieved["step"] / ceiling)
    assert 0 < drafted.autoregressive_mbu < 0.6
    assert "below 60%" in drafted.notes[0]
    assert alone.notes == []
    assert (
        drafted.peak_memory_bytes > 4 * 2 * 210 * 2 * 3 * 6 * 64
    )  # the KV cache alone
    assert f"{drafted.autoregressive_mbu:.0%}†" in shown([alone, drafted])


def shown(records: list[Record]) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    print_run(records, console)
    return console.export_text()
