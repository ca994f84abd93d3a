"""`--format json` of every command: one JSON document on standard output, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from magicdec.cli import app, register_commands
from tests.fuzz.damage import parsed
from tests.processes import Program
from tests.validate.test_pairs import lookup_rows

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
RECORDS = ROOT / "results" / "demo-2-cores.jsonl"
SMALL = "--model llama-3.1-8b --hardware l4-24gb --gpus 1 --context 1024 --batch 2"
ARGUMENTS = {
    "plan": [
        SMALL,
        f"--logs {ROOT / 'docs' / 'samples' / 'requests.jsonl'} --hardware l4-24gb --gpus 1",
    ],
    "check": [str(ROOT / "docs" / "samples" / "serve.sh")],
    "sensitivity": [
        "--model llama-3.1-8b --hardware h100 --draft ngram --acceptance-rate 0.6"
    ],
    "models": [""],
    "hardware": ["", "h100"],
    "engines": ["", "vllm"],
    "validate pairs": ["lookups.csv"],
    "validate records": [str(RECORDS)],
    "records ls": [str(RECORDS)],
}
ELSEWHERE = {
    "run": "decodes, with torch (tests/commands/test_run_command.py)",
    "plot": "figures; its formats are others",
    "observe": "a server (tests/live/test_observation.py)",
    "validate grid": "runs this machine's grid",
    "validate published": "all shipped speedups (tests/validate/test_published_speedups.py)",
}


def with_format(group: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from with_format(command, (*path, name))
        elif any("--format" in parameter.opts for parameter in command.params):
            yield " ".join((*path, name))


def test_no_command_is_forgotten() -> None:
    register_commands()
    assert set(with_format(typer.main.get_command(app))) == {*ARGUMENTS, *ELSEWHERE}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param(
            name,
            arguments,
            marks=[pytest.mark.slow] if "--logs" in arguments else [],
            id=f"{name} {place}",
        )
        for name, calls in ARGUMENTS.items()
        for place, arguments in enumerate(calls)
    ],
)
def test_standard_output_is_one_document(
    program: Program,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    arguments: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "validate pairs":
        # A look-up's row without its users and its share, of which something is assumed.
        lookup_rows(tmp_path, "1.6,,", users="", version="patched")
    if "--logs" in arguments:
        pytest.importorskip("numba")
    done = program(*name.split(), *arguments.split(), "--format", "json")
    assert done.stdout, done.stderr
    assert parsed(done.stdout) is not None
