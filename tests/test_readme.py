"""README says what the records say, and its commands are ones that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from magicdec.cli import app, register_commands

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_tables_and_picture_are_what_the_records_give() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "readme_table.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def runner() -> CliRunner:
    if not app.registered_commands:
        register_commands()
    return CliRunner()


def commands() -> list[str]:
    """Every line of the documents that calls magicdec, comments left out."""
    found = []
    for text in TEXTS:
        for line in text.read_text(encoding="utf-8").splitlines():
            if re.match(r"\s+magicdec ", line):
                found.append(line.split("#")[0].strip())
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_documented_options_exist(command: str, runner: CliRunner) -> None:
    """Each documented option is one of its command's (the commands themselves are run by their own tests)."""
    words = command.split()[1:]
    path = words[:2] if words[0] == "validate" else words[:1]
    shown = runner.invoke(app, [*path, "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert shown.exit_code == 0, command
    for word in words:
        if word.startswith("--"):
            assert word in shown.output, f"{command}: {word}"
