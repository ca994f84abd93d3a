"""Completion, asked for as bash does: the words of the line and the number of the one to complete."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from magicdec.specs.catalog import model_names
from magicdec.specs.hardware import hardware_names


def completed(*words: str) -> tuple[list[str], str]:
    """What is offered for the last word, and the names of the modules that were loaded for it."""
    asked = {
        "_MAGICDEC_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["magicdec", *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "magicdec"],
        capture_output=True, text=True, check=False, env={**os.environ, **asked},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


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
        (("pl",), ["plan", "plot"]),
        (("validate", "k"), ["kernels"]),
    ],
    ids=" ".join,
)  # fmt: skip
def test_values_are_offered_without_torch(words: tuple[str, ...], expected: list[str]) -> None:
    found, loaded = completed(*words)
    assert found == expected
    assert "| typer" in loaded
    assert "| torch\n" not in loaded


def test_a_path_is_left_to_the_shell() -> None:
    assert completed("run", "--model", "./mod")[0] == []
