"""scripts/ship_gpu_profile.py: from what benchmarks/gpu.py left to names of the catalog."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

from magicdec.calibrate.local_profile import LocalProfile
from magicdec.perfmodel.kernels.gemm import ElementwiseCurve
from magicdec.perfmodel.kernels.profile import HardwareProfile, load_hardware
from magicdec.schema.record import Record, append_record
from magicdec.specs.engine import EngineProfile, load_engine
from scripts import ship_gpu_profile
from tests.processes import Done

ROOT = Path(__file__).resolve().parents[2]
FACTS: dict[str, Any] = {
    "tiny": False,
    "environment": {
        "created_utc": "2026-03-05T10:00:00+00:00",
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
    },
    "fit_error": {
        "autoregressive": 0.021,
        "draft": 0.034,
        "verify": 0.028,
        "gemm": 0.05,
    },
}
RUN: dict[str, Any] = {"model": "llama-3.1-8b", "batch_size": 8, "context_len": 4096}


def write_results(
    directory: Path, *, device: str = "nvidia-h200", kind: str = "gpu", **facts: Any
) -> None:
    """As a calibration leaves them, with the catalog's curves in place of timings."""
    known = load_hardware("h200")
    assert known.allreduce is not None
    hardware = msgspec.structs.replace(
        known, name=device, kind=kind, aliases=(), memory_bytes_per_s=4.123456789e12, reference_s=0.001, sources={},
        elementwise=ElementwiseCurve.of(known),
    )  # fmt: skip
    engine = load_engine("ours").with_constants(
        {
            "name": "ours here",
            "memory.workspace_bytes": 0.0,
            "errors.relative_error": 0.06,
        }
    )
    LocalProfile(hardware=hardware, engine=engine, acceptance=()).save(
        directory / "llama-3.1-8b.toml"
    )
    (directory / "facts.json").write_text(
        json.dumps({"calibration llama-3.1-8b": FACTS | facts})
    )


def write_runs(
    directory: Path, count: int, *, error: float, device: str = "nvidia-h200"
) -> None:
    """Predicted runs, and measured ones that took so much longer."""
    for gamma in range(1, count + 1):
        shared = RUN | {
            "draft": "self",
            "draft_method": "streamingllm",
            "gamma": gamma,
            "device": "cuda",
        }
        predicted = Record(
            source="calibrated", hardware=device, step_s=0.01, speedup=1.5, **shared
        )
        measured = Record(
            source="measured", step_s=0.01 * (1 + error), speedup=1.5, **shared
        )
        for record in (predicted, measured):
            append_record(directory / "records.jsonl", record)


@pytest.fixture
def ship(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Calls the script in this process."""
    path = ROOT / "scripts" / "ship_gpu_profile.py"

    def call(directory: Path, *options: str) -> Done:
        places = [
            "--hardware-directory",
            directory / "hardware",
            "--engines-directory",
            directory / "engines",
        ]
        monkeypatch.setattr(
            sys, "argv", [str(path), str(directory), *options, *map(str, places)]
        )
        try:
            ship_gpu_profile.main()
        except SystemExit as ended:
            return Done(int(ended.code or 0), *capsys.readouterr())
        return Done(0, *capsys.readouterr())

    return call


def shipped(directory: Path, device: str) -> tuple[HardwareProfile, EngineProfile]:
    hardware = load_hardware(directory / "hardware" / f"{device}-measured.toml")
    return hardware, load_engine(directory / "engines" / f"ours-{device}.toml")


def test_a_measured_gpu_goes_under_the_catalogs_name_with_date_versions_and_errors(
    tmp_path: Path, ship: Callable[..., Done]
) -> None:
    write_results(tmp_path)
    done = ship(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    hardware, engine = shipped(tmp_path, "h200-sxm-141gb")
    assert (hardware.name, hardware.aliases, hardware.reference_s) == (
        "h200-sxm-141gb-measured",
        (),
        None,
    )
    assert hardware.memory_bytes_per_s == 4.1235e12
    assert hardware.memory_bytes == load_hardware("h200").memory_bytes
    for key in (
        "memory_bytes",
        "memory_bytes_per_s",
        "flops_per_s",
        "num_multiprocessors",
        "l2_bytes",
    ):
        assert hardware.sources[key].startswith(
            "measured by benchmarks/gpu.py, 2026-03-05, torch 2.11.0, triton 3.6.0"
        )
    assert "https://" in hardware.sources["link"]
    for curve in (hardware.gemm, hardware.attention, hardware.elementwise):
        assert "nvidia-h200, 2026-03-05, torch 2.11.0" in curve.fit.fitted_on
        assert curve.fit.relative_error > 0
    assert (engine.name, engine.fitted_device) == ("ours-h200-sxm-141gb", hardware.name)
    assert engine.errors.relative_error == 0.06
    assert engine.memory.workspace_bytes == load_engine("ours").memory.workspace_bytes
    assert engine.sources["fit"].endswith(
        "autoregressive 2.1%, draft 3.4%, verify 2.8%"
    )


def test_errors_are_no_less_than_what_predicted_runs_missed_by(
    tmp_path: Path, ship: Callable[..., Done]
) -> None:
    write_results(tmp_path)
    write_runs(tmp_path, 12, error=0.25)
    assert ship(tmp_path).returncode == 0
    _, engine = shipped(tmp_path, "h200-sxm-141gb")
    assert engine.errors.relative_error == pytest.approx(
        0.2
    )  # predicted / measured - 1
    assert (
        engine.errors.speedup_relative_error
        == load_engine("ours").errors.speedup_relative_error
    )
    assert "12 runs" in engine.sources["errors.relative_error"]


def test_a_device_that_the_catalog_does_not_know_goes_under_its_own_name(
    tmp_path: Path, ship: Callable[..., Done]
) -> None:
    write_results(tmp_path, device="quadro-t400")
    assert ship(tmp_path).returncode == 0
    hardware, engine = shipped(tmp_path, "quadro-t400")
    assert hardware.sources["link"] == "assumed"
    assert engine.name == "ours-quadro-t400"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no profile", "llama-3.1-8b.toml is missing"),
        ("cpu", "nvidia-h200 is no GPU; --allow-cpu"),
        ("tiny", "tiny models"),
        (
            "another device",
            "has predictions for nvidia-a100, but the profile is of nvidia-h200",
        ),
        ("runs on a cpu", "has runs on cpu, but the profile is of nvidia-h200"),
        ("older facts", "does not say environment, tiny; calibrate again"),
        ("no facts", "cannot read"),
    ],
)
def test_what_cannot_be_shipped_is_refused_in_one_line(
    case: str, message: str, tmp_path: Path, ship: Callable[..., Done]
) -> None:
    if case != "no profile":
        write_results(
            tmp_path, kind="cpu" if case == "cpu" else "gpu", tiny=case == "tiny"
        )
    if case == "another device":
        write_runs(tmp_path, 1, error=0.0, device="nvidia-a100")
    if case == "runs on a cpu":
        append_record(
            tmp_path / "records.jsonl", Record(source="measured", device="cpu", **RUN)
        )
    if case == "older facts":
        (tmp_path / "facts.json").write_text(
            json.dumps({"calibration llama-3.1-8b": {"fit_error": {}}})
        )
    if case == "no facts":
        (tmp_path / "facts.json").unlink()
    done = ship(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "hardware").exists()
