"""`make` chooses an interpreter that will do, or says in one line why none does, before anything is downloaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def make_venv(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "scripts/make_venv.sh", str(folder), "constraints.txt"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def interpreter(folder: Path, version: str) -> Path:
    """A program that answers every question with a version of Python."""
    program = folder / "python3"
    program.write_text(f"#!/bin/sh\necho {version}\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("version", ["2.7", "3.10", "3.15"])
def test_an_interpreter_that_is_not_supported_is_named(
    tmp_path: Path, version: str
) -> None:
    old = interpreter(tmp_path, version)
    done = make_venv(tmp_path / "venv", PYTHON=str(old))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"{old} is Python {version}" in done.stderr
    assert "Python 3.11 to 3.14" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.slow
def test_no_wheel_of_torch_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    """With an index that has nothing at all."""
    done = make_venv(
        tmp_path / "venv",
        PYTHON=sys.executable,
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(tmp_path),
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no wheel of torch" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_the_versions_are_those_that_the_package_states() -> None:
    stated = (ROOT / "pyproject.toml").read_text()
    script = (ROOT / "scripts" / "make_venv.sh").read_text()
    for minor in (11, 12, 13, 14):
        assert f'"Programming Language :: Python :: 3.{minor}"' in stated
        assert f"3.{minor} |" in script or f"| 3.{minor})" in script
