"""Everything that is to be measured on a GPU, stage by stage, the most valuable first (benchmarks/gpu.py --all).

Each stage is a process of its own, killed with its children when its time is over; what it has written stays, and the
next one starts. A stage that is done is not done again: the state of all is in state.json. Those that failed are tried
again after the others. Needs nothing but Python itself, so that what is missing shows as a failed stage.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT_S = 100.0
"""Kept of a call's time for the table and the report, which it ends with in any case."""
LEAST_S = 45.0
"""With less time left no stage is started: models have to be loaded."""
STOP_S = 30.0
"""So long before its limit a part that can go on later stops by itself, at the latest."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What is run, with the repository's root as working directory."""

    name: str
    measures: str
    command: tuple[str, ...]
    limit_s: float
    stops_itself: bool = False
    """Whether it takes `--minutes`, and can say that it is unfinished."""
    python: str = sys.executable


@dataclass(kw_only=True)
class Outcome:
    """How far a stage is: done, unfinished (it goes on in the next call), failed (it is tried again) or open."""

    state: str = "open"
    elapsed_s: float = 0.0
    """Of all calls."""
    why: str = ""


def vllm_python() -> str | None:
    """The Python that has vLLM: this one, or that of .venv-vllm; None where there is none."""
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    own = ROOT / ".venv-vllm" / "bin" / "python"
    return str(own) if own.exists() else None


def vllm_stages(
    output: Path, arguments: Sequence[str], python: str | None, *, is_trial: bool
) -> list[Stage]:
    if python is None:
        say("vllm: not installed here, so its stages are left out")
        return []
    chosen = ("-k", "test_greedy_output_is_the_engines_own and 0") if is_trial else ()
    lossless = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/vllm/test_engine_lossless.py",
        *chosen,
    )
    return [
        Stage(
            name="vllm",
            measures="the plugin in vLLM: autoregressive against drafted decoding, launches and gaps of a step",
            command=("benchmarks/gpu_vllm.py", "--output", str(output), *arguments),
            limit_s=300,
            python=python,
        ),
        Stage(
            name="vllm-lossless",
            measures="that greedy tokens in fp32 are the engine's own",
            command=lossless,
            limit_s=300,
            python=python,
        ),
    ]


def stages(output: Path, arguments: Sequence[str]) -> list[Stage]:
    """Together 38 minutes at most, those of vLLM 10 more, the report apart; a trial on a CPU may take longer."""
    is_trial = "--tiny" in arguments or "cpu" in arguments
    gpu = ("benchmarks/gpu.py", "--output", str(output), *arguments)
    gpu_tests = (
        ["tests/runtime"]
        if not is_trial
        else ["tests/runtime/test_device_discipline.py"]
    )
    shipped = output / "catalog"
    ship = (
        "scripts/ship_gpu_profile.py",
        str(output),
        "--hardware-directory",
        str(shipped / "hardware"),
    )
    ship += (
        "--engines-directory",
        str(shipped / "engines"),
        *(("--allow-cpu",) if is_trial else ()),
    )
    return [
        Stage(
            name="attention",
            measures="errors of the attention kernels, and their bytes per second with 1 to 8 query tokens",
            command=("-m", "benchmarks.attention_backends", "--seconds", "90"),
            limit_s=180,
        ),
        Stage(
            name="tests",
            measures="the tests that run CUDA code",
            command=("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *gpu_tests),
            limit_s=300,
        ),
        Stage(
            name="calibrate",
            measures="copy bandwidth, products, kernels and single engine steps: the profile that predicts",
            command=(*gpu, "--part", "calibrate"),
            limit_s=300,
            stops_itself=True,
        ),
        Stage(
            name="llama-3.1-8b",
            measures="its rows of the table, then a grid of budgets, gammas, batches and contexts, predicted first",
            command=(*gpu, "--part", "llama-3.1-8b"),
            limit_s=540,
            stops_itself=True,
        ),
        Stage(name="ship", measures="nothing: a name of the catalog from the calibration", command=ship, limit_s=60),
        Stage(
            name="embedded",
            measures="predictions with real acceptance, of the embedded model",
            command=(*gpu, "--part", "embedded"),
            limit_s=240,
            stops_itself=True,
        ),
        Stage(
            name="transformers",
            measures="autoregressive tokens per second beside transformers' generate()",
            command=(*gpu, "--part", "transformers"),
            limit_s=240,
            stops_itself=True,
        ),
        Stage(
            name="llama-2-7b-32k",
            measures="the same as the first model, without grouped queries: four times the KV cache",
            command=(*gpu, "--part", "llama-2-7b-32k"),
            limit_s=420,
            stops_itself=True,
        ),
        *vllm_stages(output, arguments, vllm_python(), is_trial=is_trial),
    ]  # fmt: skip


def run_all(output: Path, arguments: Sequence[str], *, budget_s: float) -> int:
    """Runs what is not done yet for as long as the budget allows, and sums up. Returns the exit status: 0 when all is
    done, 1 when something failed, 3 when another call has to go on."""
    end_s = time.monotonic() + budget_s
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(1)
    )  # what is running ends with this process
    is_gpu = any(argument.startswith("cuda") for argument in arguments)
    state = output / "state.json"
    known = json.loads(state.read_text()) if state.exists() else {}
    planned = stages(output, arguments)
    outcomes = {stage.name: Outcome(**known.get(stage.name, {})) for stage in planned}
    for stage in sorted(
        planned, key=lambda stage: outcomes[stage.name].state == "failed"
    ):
        left_s = end_s - REPORT_S - time.monotonic()
        outcome = outcomes[stage.name]
        if outcome.state == "done" or left_s < LEAST_S:
            continue
        limit_s = stage.limit_s * (1 if is_gpu else 2)
        outcomes[stage.name] = _run_stage(stage, outcome, output, min(limit_s, left_s))
        _write(state, {name: asdict(each) for name, each in outcomes.items()})
    report_s = max(REPORT_S, end_s - time.monotonic())
    return _sum_up(planned, outcomes, output, arguments, limit_s=report_s / 2)


def _run_stage(stage: Stage, before: Outcome, output: Path, limit_s: float) -> Outcome:
    command = list(stage.command)
    if stage.stops_itself:
        command += ["--minutes", f"{max(0.5 * limit_s, limit_s - STOP_S) / 60:.3f}"]
    say(f"{stage.name}, {limit_s / 60:.1f} minutes at most: {stage.measures}")
    started_s = time.monotonic()
    status = run_bounded(
        command, output / f"{stage.name}.log", limit_s, python=stage.python
    )
    elapsed_s = time.monotonic() - started_s
    text = (output / f"{stage.name}.log").read_text(errors="replace")
    result = last_json(text)
    if result is not None:
        _write(output / f"{stage.name}.json", result)
    if status is None:
        state, why = (
            ("unfinished" if stage.stops_itself else "failed"),
            f"stopped after {limit_s:.0f} s",
        )
    elif status != 0:
        state, why = (
            "failed",
            f"exit status {status}: {_last_line(str((result or {}).get('failed') or text))}",
        )
    elif result is not None and result.get("unfinished"):
        state, why = "unfinished", "another call goes on"
    else:
        state, why = "done", _last_line(text) if result is None else ""
    say(f"{stage.name}: {state} after {elapsed_s:.0f} s{'; ' + why if why else ''}")
    return Outcome(state=state, elapsed_s=before.elapsed_s + elapsed_s, why=why)


def run_bounded(
    command: Sequence[str], log: Path, limit_s: float, python: str = sys.executable
) -> int | None:
    """The exit status of a Python command whose output goes to the log; None where its time was over. No process that
    it started is left."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w") as file:
        process = subprocess.Popen(
            [python, *command],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _sum_up(
    planned: Sequence[Stage],
    outcomes: dict[str, Outcome],
    output: Path,
    arguments: Sequence[str],
    *,
    limit_s: float,
) -> int:
    """The table of wanted and reached, the report, and one JSON line last."""
    log, table, printed = (
        output / "report.log",
        output / "table.md",
        ["No table: nothing was calibrated yet."],
    )
    gpu = ["benchmarks/gpu.py", "--output", str(output), *arguments, "--part", "report"]
    rows: list[dict[str, str]] = []
    problems = []
    if run_bounded(gpu, log, limit_s) == 0:
        rows = (last_json(log.read_text()) or {}).get("rows", [])
        printed = table.read_text().splitlines() or printed
    else:
        problems.append(f"no table: {_last_line(log.read_text())}")
    records = output / "records.jsonl"
    if records.exists():
        command = ["-m", "magicdec", "report", str(records)]
        if (
            run_bounded([*command, "-o", str(output / "report.html")], log, limit_s)
            != 0
        ):
            problems.append(f"no report: {_last_line(log.read_text())}")
    lines = ["# Stages", "", "| stage | state | seconds | |", "|---|---|---|---|"]
    for stage in planned:
        outcome = outcomes[stage.name]
        lines.append(
            f"| {stage.name} | {outcome.state} | {outcome.elapsed_s:.0f} | {outcome.why} |"
        )
    lines += ["", "# Wanted and reached", "", *printed, *problems]
    (output / "summary.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)
    states = {name: outcome.state for name, outcome in outcomes.items()}
    print(
        json.dumps(
            {
                "benchmark": "gpu --all",
                "stages": states,
                "rows": rows,
                "problems": problems,
            }
        )
    )
    if problems or "failed" in states.values():
        return 1
    return 0 if set(states.values()) == {"done"} else 3


def last_json(text: str) -> dict | None:
    """The JSON object in the last line that is one."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                return dict(json.loads(line))
            except ValueError:
                continue
    return None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"[|\s]+", " ", lines[-1])[:200] if lines else "no output"


def _write(path: Path, document: dict) -> None:
    """Whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(path)


def say(message: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)
