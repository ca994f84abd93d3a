"""benchmarks/gpu.py: what it would measure on a large GPU, and that its commands work from end to end on a CPU."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

import magicdec
from evidence.kernel_tables import read_table
from magicdec.schema.record import read_records
from magicdec.specs.catalog import load_model_spec
from tests.processes import still_alive_after

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def gpu_shapes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_shapes")


@pytest.mark.parametrize(
    ("name", "free_bytes"),
    [("llama-3.1-8b", 120e9), ("llama-2-7b-32k", 122e9), ("llama-3.1-8b", 63e9)],
)
def test_what_is_measured_fits_the_gpu_and_covers_the_grid(
    name: str, free_bytes: float, gpu_shapes: ModuleType
) -> None:
    """On an H200, and on an H100. Beside the weights: the caches of target and draft of each item, from the model's
    dimensions. The headline's batches are the largest: a fifth more would not fit."""
    spec = load_model_spec(name)
    maker = gpu_shapes.Maker(
        shapes=gpu_shapes.FULL, model_argument=name, spec=spec, device="cuda", dtype="bfloat16",
        free_bytes=free_bytes, cuda_graphs=True,
    )  # fmt: skip
    headline = gpu_shapes.headline_items(maker)
    grid = gpu_shapes.grid_items(maker)
    slot_bytes = (
        2
        * 2
        * spec.num_hidden_layers
        * spec.num_key_value_heads
        * spec.attention.head_dim
    )

    def needed(item: Any) -> list[float]:
        request = item.request
        return [
            request.batch_size
            * (request.context_len + request.gen_len + s.gamma + s.draft_budget)
            * slot_bytes
            for s in request.speculations
        ]

    for item in headline + grid:
        assert max(needed(item)) < 0.95 * free_bytes
        request = item.request
        assert request.context_len + request.gen_len < spec.max_position_embeddings
    for item in headline:
        batch = item.request.batch_size
        assert min(needed(item)) * (batch + max(1, batch // 5)) / batch > 0.85 * free_bytes  # fmt: skip
        assert [s.gamma for s in item.request.speculations] == [2, 3, 4]
        assert item.acceptance.source == "stated"
    stated = [
        (
            item.request.speculations[0].draft_method,
            item.request.context_len,
            item.request.simulate_acceptance[0],
        )
        for item in headline
    ]
    assert stated == [
        ("streamingllm", 16_384, 0.81),
        ("streamingllm", 32_000, 0.81),
        ("snapkv", 32_000, 0.91),
    ]
    points = [s for item in grid for s in item.request.speculations]
    assert len(points) >= 24
    assert {s.gamma for s in points} == set(range(1, 7))
    assert {s.draft_budget for s in points} == {256, 512, 1024, 2048}


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_one_command_does_everything(tmp_path: Path) -> None:
    """On a CPU. Every stage is done; predictions stand in the file before any measurement; and what was calibrated and
    shipped is planned with."""
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "gpu.py"),
            *("--all", "--device", "cpu", "--tiny", "--output", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["problems"] == []
    assert set(result["stages"].values()) == {"done"}
    records = read_records(tmp_path / "records.jsonl")
    main = [record for record in records if record.model == "tiny-llama-3.1-8b"]
    measured_keys: set[str] = set()
    for record in main:
        assert record.source == "measured" or record.key not in measured_keys
        measured_keys |= {record.key} if record.source == "measured" else set()
    measured = [record for record in main if record.source == "measured"]
    assert sum(record.gamma > 0 for record in measured) >= 12
    assert all(
        record.prompts == "noise" and record.weights == "random" for record in measured
    )
    assert all(record.simulated_acceptance for record in measured if record.gamma)
    verdicts = {
        row["verdict"] for row in result["rows"] if row["model"] == "llama-3.1-8b"
    }
    assert verdicts <= {"reached", "missed", "-"}
    assert {row["model"] for row in result["rows"]} == {"llama-3.1-8b", "embedded"}
    assert "| tests | done |" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "report.html").stat().st_size > 10_000
    (hardware,) = (tmp_path / "catalog" / "hardware").glob("*.toml")
    (engine,) = (tmp_path / "catalog" / "engines").glob("*.toml")
    planned = magicdec.plan(
        model=str(tmp_path / "tiny-llama-3.1-8b"), hardware=str(hardware), engine=str(engine), batch=4, context=512,
        acceptance_rate=0.8,
    )  # fmt: skip
    assert planned.best.decoding.tpot_s > 0.0


@pytest.mark.slow
def test_every_configuration_is_predicted_before_the_first_run(
    gpu_shapes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the real run, which the trial's tiny ones are not; by the command that writes them down."""
    module = importlib.import_module("gpu_expected")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    module.write_expected("h200", ("llama-3.1-8b",))
    document = json.loads(module.expected_path("h200-sxm-141gb").read_text())
    grid = [
        row
        for row in document["predictions"]
        if row["engine"] == "ours" and row["gamma"]
    ]
    assert {row["gamma"] for row in grid} == set(range(1, 7))
    assert all(
        row["speedup_low"] < row["speedup"] < row["speedup_high"] for row in grid
    )
    assert len(module.expected_rows("h200-sxm-141gb")) == len(document["rows"]) >= 12
    assert module.expected_rows("a device without a run") == {}


def test_the_wheels_to_carry_are_the_tested_versions() -> None:
    def versions(path: Path) -> dict[str, str]:
        lines = [
            line.split("==") for line in path.read_text().splitlines() if "==" in line
        ]
        return {name.lower().replace("_", "-"): version for name, version in lines}

    carried, tested = (
        versions(ROOT / "benchmarks" / "gpu-wheels.txt"),
        versions(ROOT / "constraints.txt"),
    )
    assert {
        "numba",
        "safetensors",
        "tokenizers",
        "transformers",
        "pytest",
        "msgspec",
    } <= set(carried)
    assert not {"torch", "triton"} & set(carried)
    assert {
        name: version
        for name, version in carried.items()
        if tested.get(name, version) != version
    } == {}


@pytest.fixture
def gpu_all(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_all")


def _call(
    gpu_all: ModuleType,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    programs: dict[str, str],
    **options: float,
) -> tuple[int, dict[str, dict]]:
    """One call with Python programs as stages; and what is known of them afterwards."""
    stages = [
        gpu_all.Stage(
            name=name,
            measures="",
            command=("-c", program),
            limit_s=options.get("limit_s", 60),
        )
        for name, program in programs.items()
    ]
    monkeypatch.setattr(gpu_all, "REPORT_S", 0.0)
    monkeypatch.setattr(gpu_all, "LEAST_S", 0.0)
    return _run_stages(
        gpu_all, output, monkeypatch, stages, budget_s=options.get("budget_s", 60)
    )


def _run_stages(
    gpu_all: ModuleType,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    stages: list[Any],
    *,
    budget_s: float,
) -> tuple[int, dict[str, dict]]:
    monkeypatch.setattr(gpu_all, "stages", lambda output, arguments: stages)
    monkeypatch.setattr(gpu_all, "run_bounded", _without_report(gpu_all.run_bounded))
    status = gpu_all.run_all(output, ["--device", "cuda"], budget_s=budget_s)
    state = output / "state.json"
    return status, json.loads(state.read_text()) if state.exists() else {}


SCALE = 1 / 40
"""Seconds of a rehearsal for one on the GPU."""
WORK = """
import os, sys, time
output, name, seconds, rows = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
started = ticks / os.sysconf("SC_CLK_TCK") - time.clock_gettime(time.CLOCK_BOOTTIME)
begun = time.monotonic() + started  # its start up is part of its time
for row in range(rows):
    time.sleep(max(0.0, begun + seconds * (row + 1) / rows - time.monotonic()))
    with open(f"{output}/rows", "a") as file:
        file.write(f"{name} {row} {time.time()}\\n")
"""
TROUBLE = {
    "hangs": "import time; time.sleep(600)",
    "dies": "import os; os.abort()",
    "fills the disk": "open({output!r} + '/large', 'wb').write(b'0' * 50_000_000)",
}


def _rehearse(
    gpu_all: ModuleType,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    slower: float = 1.0,
    trouble: dict[str, str] | None = None,
) -> tuple[list[float], dict[str, dict]]:
    """The campaign in 5.5 minutes of a time that runs 40 times as fast: its own stages, with programs that take the
    planned seconds (those without a plan: their limit) or that get into trouble. Returns when each row of the headline
    was written, in seconds of the GPU's, and the state."""
    stages = []
    for stage in gpu_all.stages(output, ["--device", "cuda"]):
        seconds = slower * SCALE * (stage.planned_s or stage.limit_s)
        arguments = (str(output), stage.name, str(seconds), "9")
        command = ("-S", "-c", WORK, *arguments)
        if trouble and stage.name in trouble:
            program = TROUBLE[trouble[stage.name]].format(output=str(output))
            command = ("-S", "-c", program)
        stages.append(
            replace(
                stage,
                command=command,
                limit_s=SCALE * stage.limit_s,
                planned_s=stage.planned_s and SCALE * stage.planned_s,
            )
        )
    for name in ("REPORT_S", "LEAST_S", "STOP_S"):
        monkeypatch.setattr(gpu_all, name, SCALE * getattr(gpu_all, name))
    monkeypatch.setattr(gpu_all, "LARGEST_FILE_BYTES", 1_000_000)
    begun_s = time.time()
    _, state = _run_stages(gpu_all, output, monkeypatch, stages, budget_s=330 * SCALE)
    assert time.time() - begun_s < (330 + 40) * SCALE  # processes start at no scale
    rows = [line.split() for line in (output / "rows").read_text().splitlines()]
    return [
        (float(at_s) - begun_s) / SCALE for name, _, at_s in rows if name == "headline"
    ], state


@pytest.mark.slow
@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_the_headline_is_there_in_six_minutes(
    slower: float,
    gpu_all: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With stages that take the planned seconds, and half as long again. A second call does the rest."""
    headline, state = _rehearse(gpu_all, tmp_path, monkeypatch, slower=slower)
    assert len(headline) >= (9 if slower == 1.0 else 8)
    assert max(headline) < 330
    assert state["calibrate"]["state"] == "done"
    print("rows of the headline at", [round(at_s) for at_s in headline], "s")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "trouble"),
    [("kernels", "hangs"), *(("calibrate", trouble) for trouble in TROUBLE)],
)
def test_the_headline_comes_home_whatever_the_stage_before_it_does(
    stage: str,
    trouble: str,
    gpu_all: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    headline, state = _rehearse(
        gpu_all, tmp_path, monkeypatch, trouble={stage: trouble}
    )
    assert len(headline) == 9
    assert max(headline) < 330
    assert state[stage]["state"] == "failed"


def test_a_full_disk_ends_no_call(
    gpu_all: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the state nor a stage's log can be written: the others run nevertheless."""
    for name in ("state.tmp", "summary.tmp"):
        (tmp_path / name).symlink_to("/dev/full")
    (tmp_path / "first.log").mkdir()
    touch = f"open({str(tmp_path / 'ran')!r}, 'a').write('%s ')"
    programs = {"first": touch % "first", "second": touch % "second"}
    status, state = _call(gpu_all, tmp_path, monkeypatch, programs)
    assert (status, state) == (1, {})
    assert (tmp_path / "ran").read_text() == "second "


def _without_report(run_bounded: Any) -> Any:
    def run(
        command: list[str], log: Path, limit_s: float, python: str = sys.executable
    ) -> int | None:
        if "report" not in command:
            return run_bounded(command, log, limit_s, python)
        (log.parent / "table.md").write_text("the table\n")
        log.write_text('{"rows": []}\n')
        return 0

    return run


def test_a_stage_that_fails_leaves_the_others_alone_and_is_tried_again_last(
    gpu_all: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "order"
    note = f"open({str(log)!r}, 'a').write('%s ')"
    programs = {
        "first": note % "first" + "; import missing_package",
        "second": note % "second" + "; print('{\"times\": [1]}')",
    }
    status, state = _call(gpu_all, tmp_path, monkeypatch, programs)
    assert status == 1
    assert (state["first"]["state"], state["second"]["state"]) == ("failed", "done")
    assert "No module named 'missing_package'" in state["first"]["why"]
    assert json.loads((tmp_path / "second.json").read_text()) == {"times": [1]}
    programs["first"] = note % "first"
    programs["third"] = note % "third"
    status, state = _call(gpu_all, tmp_path, monkeypatch, programs)
    assert status == 0
    assert log.read_text() == "first second third first "
    assert "| first | done |" in (tmp_path / "summary.md").read_text()


def test_a_stage_ends_at_its_limit_with_its_children(
    gpu_all: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child would sleep for ten minutes. Where the machine is too busy to start it in time, there is more time."""
    started = tmp_path / "started"
    child = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    program = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    )
    for limit_s in (1.0, 10.0, 100.0):
        (tmp_path / "state.json").unlink(missing_ok=True)
        status, state = _call(
            gpu_all,
            tmp_path,
            monkeypatch,
            {"slow": program},
            limit_s=limit_s,
            budget_s=600,
        )
        assert (status, state["slow"]["state"], state["slow"]["why"]) == (
            1,
            "failed",
            f"stopped after {limit_s:.0f} s",
        )
        if started.exists() and started.read_text():
            break
    assert not still_alive_after(30, [int(started.read_text())])


def test_all_stages_together_take_40_minutes_at_most(
    gpu_all: ModuleType, tmp_path: Path
) -> None:
    stages = gpu_all.stages(tmp_path, ["--device", "cuda"])
    ours = [stage for stage in stages if not stage.name.startswith("vllm")]
    assert sum(stage.limit_s for stage in ours) + gpu_all.REPORT_S <= 40 * 60
    for_vllm = gpu_all.vllm_stages(
        tmp_path, ["--device", "cuda"], sys.executable, is_trial=False
    )
    assert sum(stage.limit_s for stage in for_vllm) <= 10 * 60
    assert [stage.name for stage in stages[:4]] == [
        "kernels",
        "calibrate",
        "headline",
        "tests",
    ]
    for stage in stages:
        assert stage.limit_s <= 540  # as long as a call of ten minutes allows


@pytest.mark.slow
def test_all_reduces_are_timed_by_message_size(tmp_path: Path) -> None:
    """Between two processes on CPUs; the file is one that fits and checks of the catalog read."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu_all_reduce.py"),
        "--device",
        "cpu",
        "--rounds",
        "2",
    ]
    command += ["--sizes", "1024,65536", "--output", str(tmp_path / "all-reduce.csv")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["message_bytes"] for row in rows] == [1024, 65536]
    table, groups = read_table(tmp_path / "all-reduce.csv")
    (columns,) = (columns for group, columns in groups.items() if group.device == "cpu")
    assert table.kind == "allreduce"
    assert columns["time_s"] == pytest.approx(
        [row["latency_us"] * 1e-6 for row in rows], rel=1e-3
    )
