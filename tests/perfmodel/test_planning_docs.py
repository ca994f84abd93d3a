"""The examples of docs/planning.md and of the planner's docstring run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "planning.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_an_example_runs_and_prints(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(BLOCKS[number], f"planning.md example {number}", "exec"), {})
    printed = capsys.readouterr().out.strip()
    assert printed.startswith("streamingllm 512") if number == 0 else printed == "(3, 5)"
