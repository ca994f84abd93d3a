"""Whatever a file or an option holds: an answer of finite numbers, or one line that says what is wrong.

Never a traceback.

Seeded, in process, so that the same cases run everywhere. MAGICDEC_FUZZ multiplies their number.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from damage import NASTY, damaged, damaged_bytes, finite_everywhere, parsed

from magicdec.cli import main
from magicdec.perfmodel.kernels.profile import HARDWARE_DIRECTORY
from magicdec.records import read_many
from magicdec.specs.catalog import MODELS_DIRECTORY
from magicdec.specs.engine import ENGINES_DIRECTORY

pytestmark = pytest.mark.slow
MANY = int(os.environ.get("MAGICDEC_FUZZ", "1"))
RESULTS = Path(__file__).resolve().parents[2] / "results"
QUICK_PLAN = ("--batch", "8", "--context", "2048", "--gamma", "3", "--draft-budget", "256", "--format", "json")
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Runs a command in this process. Gives its exit code and what it printed; anything but SystemExit goes through."""

    monkeypatch.chdir(tmp_path)  # options name files to write

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["magicdec", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def check(outcome: tuple[int, str, str], what: str, *, is_json: bool = False) -> int:
    code, out, err = outcome
    assert code in (0, 2), f"{what}: exit code {code}"
    assert "Traceback" not in err, what
    if code == 2:
        line = err.splitlines()[-1]
        assert line.startswith("magicdec: "), f"{what}: {err!r}"
        assert len(line) < 1000, f"{what}: a line of {len(line)} characters"
    elif is_json:
        assert finite_everywhere(parsed(out)), f"{what}: a number that is none"
    return code


def outcomes(cases: Iterator[tuple[str, int]]) -> None:
    """Both an answer and a refusal must occur, or the cases test nothing."""
    codes = {code for _, code in cases}
    assert codes == {0, 2}


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "mistral-7b-v0.1"])
def test_any_field_of_a_model_configuration(name: str, call: Call, tmp_path: Path) -> None:
    document = json.loads((MODELS_DIRECTORY / f"{name}.json").read_text())
    file = tmp_path / "config.json"

    def cases() -> Iterator[tuple[str, int]]:
        every = [("as it is", document), *damaged(document, count=120 * MANY, seed=1)]
        for what, changed in every:
            file.write_text(json.dumps(changed))
            yield what, check(call("plan", "--model", str(file), *QUICK_PLAN), what, is_json=True)

    outcomes(cases())


@pytest.mark.parametrize(
    ("directory", "name", "option"),
    [
        (HARDWARE_DIRECTORY, "h100-sxm-80gb", "--hardware"),
        (HARDWARE_DIRECTORY, "l4-24gb", "--hardware"),
        (ENGINES_DIRECTORY, "magicdec-2024", "--engine"),
    ],
)
def test_any_field_of_a_profile(directory: Path, name: str, option: str, call: Call, tmp_path: Path) -> None:
    document = tomllib.loads((directory / f"{name}.toml").read_text())
    file = tmp_path / "profile.toml"

    def cases() -> Iterator[tuple[str, int]]:
        for what, changed in damaged(document, count=100 * MANY, seed=2):
            try:
                file.write_text(tomli_w.dumps(changed))
            except (TypeError, ValueError, RecursionError):  # TOML has no such value
                continue
            yield what, check(call("plan", option, str(file), *QUICK_PLAN), what, is_json=True)

    outcomes(cases())


def test_any_field_of_an_acceptance_profile(call: Call, tmp_path: Path) -> None:
    from magicdec.perfmodel.acceptance import PROFILES_DIRECTORY

    document = json.loads((PROFILES_DIRECTORY / "llama-3.1-8b-streamingllm-pg19.json").read_text())
    file = tmp_path / "acceptance.json"

    def cases() -> Iterator[tuple[str, int]]:
        for what, changed in damaged(document, count=150 * MANY, seed=3):
            file.write_text(json.dumps(changed))
            yield what, check(call("plan", "--acceptance", str(file), *QUICK_PLAN), what, is_json=True)

    outcomes(cases())


def test_any_field_of_a_record(call: Call, tmp_path: Path) -> None:
    rows = [msgspec.to_builtins(row) | {"schema_version": row.schema_version}
            for row in read_many([RESULTS / "demo-2-cores.jsonl"])]  # fmt: skip
    good = json.dumps(rows[0])
    file = tmp_path / "records.jsonl"

    def cases() -> Iterator[tuple[str, int]]:
        for what, changed in damaged(rows[-1], count=150 * MANY, seed=4):
            file.write_text(f"{json.dumps(changed)}\n{good}\n")
            yield what, check(call("records", "export", str(file), "-o", str(tmp_path / "out.json")), what)
            yield what, check(call("records", "ls", str(file)), what)

    assert {code for _, code in cases()} <= {0, 2}


def test_extreme_numbers_in_records_are_drawn_or_refused(call: Call, tmp_path: Path) -> None:
    rows = [msgspec.to_builtins(row) for row in read_many([RESULTS / "demo-2-cores.jsonl"])]
    numbers = [name for name, value in rows[-1].items() if isinstance(value, float)]
    file = tmp_path / "records.jsonl"
    rng = random.Random(5)
    for _ in range(6 * MANY):
        changed = [dict(row) for row in rows]
        name, value = rng.choice(numbers), rng.choice([1e308, 1e-320, 0.0, -1.0, 1e22])
        changed[rng.randrange(len(rows))][name] = value
        file.write_text("".join(json.dumps(row) + "\n" for row in changed))
        what = f"{name} = {value}"
        check(call("report", str(file), "-o", str(tmp_path / "report.html")), what)


def test_damaged_bytes_of_every_kind_of_file(call: Call, tmp_path: Path) -> None:
    kinds: list[tuple[Path, str, tuple[str, ...]]] = [
        (MODELS_DIRECTORY / "llama-3.1-8b.json", "config.json", ("plan", *QUICK_PLAN, "--model")),
        (HARDWARE_DIRECTORY / "a100-sxm-80gb.toml", "device.toml", ("plan", *QUICK_PLAN, "--hardware")),
        (ENGINES_DIRECTORY / "ours.toml", "engine.toml", ("plan", *QUICK_PLAN, "--engine")),
        (RESULTS / "demo-2-cores.jsonl", "records.jsonl", ("records", "ls")),
    ]
    for source, name, command in kinds:
        text = source.read_bytes()[:20_000]
        for what, changed in damaged_bytes(text, count=60 * MANY, seed=6):
            (tmp_path / name).write_bytes(changed)
            check(call(*command, str(tmp_path / name)), f"{name}: {what}")


def options_of(command: Any) -> list[str]:
    return [name for param in command.params for name in param.opts if name.startswith("--") and not param.is_flag]


def test_any_value_of_any_option_of_commands_that_compute(call: Call, tmp_path: Path) -> None:
    import typer

    from magicdec.cli import app, register_commands

    if not app.registered_commands:
        register_commands()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    values = ["", "x", "-1", "0", "1", "3", "1.5", "nan", "inf", "1e400", str(10**22), "1-3000000000", "1,,2", "a,b",
              "\u00e9", "-", "..", "/", "8,16", "0.5", "bf16", "self", "32k", "%s", "a" * 5000]  # fmt: skip
    rng = random.Random(7)
    cheap = {"plan": QUICK_PLAN, "sensitivity": ()}
    for name, usual in cheap.items():
        options = [each for each in options_of(commands[name]) if each not in ("--output", "--format")]
        for _ in range(150 * MANY):
            chosen = rng.sample(options, rng.choice((1, 1, 2)))
            arguments = [part for option in chosen for part in (option, rng.choice(values))]
            check(call(name, *usual, *arguments), f"{name} {' '.join(arguments)[:200]}", is_json=name == "plan")


def test_nasty_values_are_of_every_kind() -> None:
    """So that the seeds above do not quietly test one kind only."""
    assert {type(value) for value in NASTY} == {type(None), bool, int, float, str, list, dict}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends where its ranks would start, after all that is checked before."""
    pytest.importorskip("torch")

    def end(*_: object, **__: object) -> None:
        raise SystemExit(0)

    monkeypatch.setattr("magicdec.runtime.launch.launch", end)


@pytest.mark.usefixtures("checked")
def test_any_field_of_a_plan(call: Call, tmp_path: Path) -> None:
    """As it is run, exported and reported."""
    usual = ("--model", "embedded", "--batch", "2", "--context", "120", "--gen-len", "5", "--acceptance-rate", "0.9")
    formats = ("--weight-dtype", "fp32", "--kv-dtype", "fp32", "--draft-budget", "32", "--gamma", "2")
    _, text, _ = call("plan", *usual, *formats, "--draft", "self", "--tp", "1", "--format", "json")
    document = parsed(text)
    file = tmp_path / "plan.json"
    commands: list[tuple[str, ...]] = [("run", "--quiet", "--plan", str(file)), ("export", "vllm", str(file))]

    def cases() -> Iterator[tuple[str, int]]:
        for what, changed in [("as it is", document), *damaged(document, count=100 * MANY, seed=8)]:
            file.write_text(json.dumps(changed))
            for command in commands:
                yield what, check(call(*command), f"{command[0]}: {what}")

    outcomes(cases())
