"""Completion, asked for as bash does: the words of the line and the number of the one to complete."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from magicdec.perfmodel.kernels.profile import hardware_names
from magicdec.specs.catalog import model_names
from tests.processes import Program


def asked(*words: str) -> dict[str, str]:
    """The environment in which a shell asks for what may stand in place of the last word."""
    place = str(len(words))
    return {"_MAGICDEC_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["magicdec", *words]), "COMP_CWORD": place}


@pytest.fixture
def completed(program: Program, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    def offered(*words: str) -> list[str]:
        for name, value in asked(*words).items():
            monkeypatch.setenv(name, value)
        done = program()
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return offered


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("run", "--model", "lla"), [name for name in model_names() if name.startswith("lla")]),
        (("plan", "--model", "qwen3-3"), ["qwen3-30b-a3b", "qwen3-32b"]),
        (("plan", "--hardware", "h"), [name for name in hardware_names() if name.startswith("h")]),
        (("plan", "--hardware", "l4-24gb,a10"), ["l4-24gb,a10" + each for each in (
            "0-pcie-40gb", "0-pcie-80gb", "0-sxm-40gb", "0-sxm-80gb", "g-24gb")]),
        (("run", "--draft-method", "s"), ["streamingllm", "snapkv"]),
        (("plan", "--draft", "e"), ["eagle", "eagle3", "embedded"]),
        (("run", "--draft", "e"), ["embedded"]),
        (("plan", "--engine", ""), ["magicdec-2024", "ours", "sglang", "trtllm", "vllm"]),
        (("run", "--prompts", "r"), ["recall", "random"]),
        (("run", "--dtype", "b"), ["bfloat16"]),
        (("run", "--draft-weight-dtype", "fp8,int"), ["fp8,int8", "fp8,int4"]),
        (("plan", "--weight-dtype", "f"), ["fp32", "fp16", "fp8", "fp8_block"]),
        (("plan", "--format", ""), ["table", "json", "csv"]),
        (("export", "t"), ["trtllm"]),
        (("plot", "he"), ["heatmap"]),
        (("run", "--ga"), ["--gamma"]),
        (("plan", "--mod"), ["--model"]),
        (("pl",), ["plan", "plot"]),
        (("validate", "k"), ["kernels"]),
    ],
    ids=" ".join,
)  # fmt: skip
def test_values_are_offered(words: tuple[str, ...], expected: list[str], completed: Callable[..., list[str]]) -> None:
    assert completed(*words) == expected


def test_values_are_offered_without_torch() -> None:
    """In a process of its own, as a shell starts it, by the names of the modules that are loaded."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "magicdec"],
        capture_output=True, text=True, check=True, env={**os.environ, **asked("run", "--model", "embe")},
    )  # fmt: skip
    assert done.stdout.split() == ["embedded"]
    assert "| typer" in done.stderr
    assert "| torch\n" not in done.stderr


def test_a_path_is_left_to_the_shell(completed: Callable[..., list[str]]) -> None:
    assert completed("run", "--model", "./mod") == []
