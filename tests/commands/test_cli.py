"""The program as a user meets it: bad input gets one line and exit code 2, and nothing recorded is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from magicdec import api
from magicdec.cli import app, main, register_commands
from magicdec.progress import Interrupted
from magicdec.schema.record import read_records
from tests.processes import Program, magicdec


def test_the_program_itself_ends_with_a_line_and_exit_code_2() -> None:
    assert (
        "did you mean llama-3.1-8b"
        in magicdec("plan", "--model", "llama-3.1-8x").refusal
    )


def test_run_prints_and_records_and_reports(tmp_path: Path, program: Program) -> None:
    """The user's path: measure, find it recorded, report it."""
    pytest.importorskip("torch")
    records = tmp_path / "r.jsonl"
    options = [
        "--batch",
        "2",
        "--context",
        "200",
        "--gen-len",
        "8",
        "--draft-budget",
        "32",
        "--gamma",
        "1,2",
    ]
    options += ["--repetitions", "1", "--quiet", "--records", str(records)]
    done = program("run", *options, "--format", "json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row.get("gamma", 0) for row in rows] == [0, 1, 2]
    written = records.read_bytes()
    assert len(read_records(records)) == 3
    again = program("run", *options, "--resume")
    assert again.returncode == 0, again.stderr
    assert records.read_bytes() == written
    assert all(len(line) <= 100 for line in again.stdout.splitlines())
    report = program("report", str(records), "-o", str(tmp_path / "r.html"))
    assert report.returncode == 0, report.stderr
    assert (tmp_path / "r.html").stat().st_size > 10_000


def test_version_and_help(program: Program) -> None:
    assert program("--version").stdout.startswith("magicdec 0.")
    text = program("--help").stdout
    for command in ("plan", "run", "calibrate", "validate", "report", "demo", "export"):
        assert command in text


ROOT = Path(__file__).resolve().parents[2]
WITHOUT = "import sys; sys.modules.update(dict.fromkeys({missing!r})); import magicdec.cli as c; c.main()"
"""None in `sys.modules` makes Python say that there is no such module."""


def run(missing: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT.format(missing=missing), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_plan_runs_in_one_thread() -> None:
    """The operating system's count at the end, in which NumPy's BLAS threads are."""
    script = (
        "import os, sys, magicdec.cli as c\n"
        "try: c.main()\n"
        "except SystemExit: print(len(os.listdir('/proc/self/task')), file=sys.stderr)"
    )
    command = [sys.executable, "-c", script, "plan", "--format", "json"]
    environment = {
        name: value for name, value in os.environ.items() if "THREADS" not in name
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr.split()[-1] == "1"


def test_a_library_leaves_its_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    before = dict(os.environ)
    api.plan(model="llama-3.1-8b", hardware="h100", batch=1)
    assert dict(os.environ) == before


def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    records = str(ROOT / "results" / "demo-2-cores.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "typst", None)
    line = program("report", records, "-o", "report.pdf").refusal
    assert line.endswith("needs typst: pip install 'magicdec[pdf]'")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_planning_and_reports_need_no_extra(tmp_path: Path) -> None:
    done = run(["typst", "pandas"], "plan", "--format", "json")
    assert done.returncode == 0, done.stderr
    plan, report = tmp_path / "plan.json", tmp_path / "report.html"
    plan.write_text(done.stdout)
    assert (
        run(
            ["typst", "pandas"], "report", "--plan", str(plan), "-o", str(report)
        ).returncode
        == 0
    )
    assert report.stat().st_size > 10_000


def test_every_option_stands_in_a_group_of_its_command_s_help() -> None:
    """Groups are listed by hand; an option without one would be none of the help's."""
    register_commands()
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        done = CliRunner().invoke(app, [name, "--help"])
        assert done.exit_code == 0, (name, done.exception)
        for param in getattr(command, "params", ()):
            if param.param_type_name == "option" and not param.hidden:
                assert max(param.opts, key=len) in done.output


@pytest.mark.parametrize("said", ["", "a.jsonl keeps what was measured"])
def test_an_interrupted_command_says_what_is_kept(
    said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise Interrupted(said) if said else KeyboardInterrupt

    monkeypatch.setattr("magicdec.cli._run", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == (
        f"magicdec: interrupted; {said or 'nothing is kept'}\n"
    )


@pytest.mark.parametrize(
    ("records", "is_there", "said"),
    [
        ([], False, "nothing is kept: --records keeps what is measured"),
        (["--records", "a.jsonl"], False, "nothing was measured yet for a.jsonl"),
        (
            ["--records", "a.jsonl"],
            True,
            "a.jsonl keeps what was measured; --resume goes on with it",
        ),
    ],
)
def test_a_run_that_is_interrupted_before_its_first_record_says_what_there_is(
    records: list[str],
    is_there: bool,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if is_there:
        Path("a.jsonl").write_text("{}\n")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    register_commands()
    monkeypatch.setattr("magicdec.commands.run._request", interrupted)
    monkeypatch.setattr(sys, "argv", ["magicdec", "run", *records])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == f"magicdec: interrupted; {said}\n"
