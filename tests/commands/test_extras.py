"""What an extra brings is asked for in one line when it is missing, and planning and reports work without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from magicdec.cli import EXTRAS
from tests.processes import Program

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = "import sys; sys.modules.update(dict.fromkeys({missing!r})); import magicdec.cli as c; c.main()"
"""None in `sys.modules` makes Python say that there is no such module."""


def run(missing: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT.format(missing=missing), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        ("typst", ("report", str(ROOT / "results" / "demo-2-cores.jsonl"), "-o", "report.pdf")),
        ("pandas", ("records", "export", str(ROOT / "results" / "demo-2-cores.jsonl"), "-o", "records.json")),
    ],
)
def test_a_missing_extra_is_named(
    missing: str, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    assert program(*arguments).refusal.endswith(f"needs {missing}: pip install 'magicdec[{EXTRAS[missing][0]}]'")
    assert list(tmp_path.iterdir()) == []


def test_planning_and_reports_need_no_extra(tmp_path: Path) -> None:
    done = run(list(EXTRAS), "plan", "--format", "json")
    assert done.returncode == 0, done.stderr
    plan, report = tmp_path / "plan.json", tmp_path / "report.html"
    plan.write_text(done.stdout)
    assert run(list(EXTRAS), "report", "--plan", str(plan), "-o", str(report)).returncode == 0
    assert report.stat().st_size > 10_000
