"""`magicdec engines` and `magicdec hardware`: what is known of each, and one of them described."""

from __future__ import annotations

import json

import pytest

from magicdec.commands.engines import engines_command
from magicdec.commands.hardware import hardware_command
from magicdec.errors import ConfigError
from magicdec.perfmodel.kernels.profile import hardware_names, load_hardware
from magicdec.specs.engine import engine_names, load_engine


def test_every_engine_is_described_with_its_drafts_and_sources(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in engine_names():
        engine = load_engine(name)
        engines_command(name, "json")
        told = json.loads(capsys.readouterr().out)
        runs = [kind for kind, draft in engine.drafts.items() if draft.runs]
        assert list(dict.fromkeys(row["draft"] for row in told["drafts"])) == runs
        assert told["sources"] == engine.sources


def test_a_path_that_differs_between_versions_is_told_for_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engines_command("vllm", "json")
    rows = json.loads(capsys.readouterr().out)["drafts"]
    of_ngram = {row["version"]: row for row in rows if row["draft"] == "ngram"}
    assert of_ngram["newest"]["runner"] == "V2"
    assert of_ngram["before 0.30"]["runner"] == "V1"
    assert "piecewise" in of_ngram["before 0.30"]["path"]
    of_eagle3 = {row["version"]: row for row in rows if row["draft"] == "eagle3"}
    assert of_eagle3["newest"]["runner"] == "V2"
    assert of_eagle3["before 0.25"]["runner"] == "V1"
    assert "without asynchronous" in of_eagle3["before 0.14"]["path"]
    engines_command("vllm", "table")
    assert "before 0.30" in capsys.readouterr().out


def test_an_unknown_engine_is_one_line() -> None:
    with pytest.raises(ConfigError, match="vllm"):
        engines_command("vlm")


def test_every_device_is_described_with_its_kernels_and_sources(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A kernel for each curve of its file, by what its fit says; the text holds every source whole."""
    for name in hardware_names():
        device = load_hardware(name)
        hardware_command(name, "json")
        told = json.loads(capsys.readouterr().out)
        assert told["memory_bytes"] == device.memory_bytes
        assert told["flops_per_s"] == device.flops_per_s
        assert told.get("sources", {}) == device.sources
        of_gemm = [each for each in told["kernels"] if each["kernel"] == "gemm"]
        assert [each["fitted_on"] for each in of_gemm] == (
            [device.gemm.fit.fitted_on or "no measurement"] if device.gemm else []
        )
        formats = [each["kernel"] for each in told["kernels"]]
        assert [f"moe {each}" in formats for each in device.moe] == [True] * len(
            device.moe
        )
        hardware_command(name, "table")
        text = capsys.readouterr().out
        assert all(source in text for source in device.sources.values())


def test_an_alias_names_its_device_and_another_name_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hardware_command("gaudi2", "table")
    assert "no kernel was measured on it" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="did you mean h100"):
        hardware_command("h10")
