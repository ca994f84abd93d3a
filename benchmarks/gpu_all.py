"""Everything that is to be measured on a GPU, stage by stage, the most valuable first (benchmarks/gpu.py --all).

Each stage is a process of its own, killed with its children when its time is over; what it has written stays, and the
next one starts. A stage that is done is not done again: the state of all is in state.json. Those that failed are tried
again after the others, those of the headline in their place. Needs nothing but Python itself, so that what is missing
shows as a failed stage.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT_S = 20.0
"""Kept of a call's time for the table, which it ends with in any case; on a CPU five times that."""
LEAST_S = 45.0
"""With less time left no stage is started: models have to be loaded."""
STOP_S = 15.0
"""So long before its limit a part that can go on later stops by itself, at the latest."""
LARGEST_FILE_BYTES = 2 * 2**30
"""A stage that writes a larger file than this fails, before the disk is full for all."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What is run, with the repository's root as working directory."""

    name: str
    measures: str
    command: tuple[str, ...]
    limit_s: float
    planned_s: float | None = None
    """Seconds that it should take on a GPU, less than two thirds of its limit. None: no headline waits for it."""
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
        "plugins/vllm/tests/test_engine_lossless.py",
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
    """The headline first: its stages may take half as long again as planned, and its records are there after 280
    seconds. All together 40 minutes at most, those of vLLM 10 more; a trial on a CPU, which may take longer, has one
    model."""
    is_trial = "--tiny" in arguments or "cpu" in arguments
    gpu = ("benchmarks/gpu.py", "--output", str(output), *arguments)
    gpu_tests = (
        ["tests/runtime"]
        if not is_trial
        else ["tests/runtime/test_device_discipline.py"]
    )
    second_model = Stage(
        name="llama-2-7b-32k",
        measures="headline and grid without grouped queries: four times the KV cache",
        command=(*gpu, "--part", "llama-2-7b-32k"),
        limit_s=420,
        stops_itself=True,
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
            name="kernels",
            measures="errors and times of attention at the headline's shapes",
            command=("-m", "benchmarks.attention_backends", "--rows", "--batch", "25", "--seconds", "8"),
            planned_s=18,
            limit_s=30,
        ),
        Stage(
            name="calibrate",
            measures="copy bandwidth, products, kernels and single engine steps: the profile that predicts",
            command=(*gpu, "--part", "calibrate"),
            planned_s=60,
            limit_s=100,
        ),
        Stage(
            name="headline",
            measures="autoregressive decoding and gamma 2 to 4 at the largest batches that fit, predicted first",
            command=(*gpu, "--part", "headline"),
            planned_s=95,
            limit_s=150,
            stops_itself=True,
        ),
        Stage(
            name="tests",
            measures="the tests that run CUDA code",
            command=("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *gpu_tests),
            limit_s=300,
        ),
        Stage(
            name="attention",
            measures="attention kernels in every dtype against fp64, and their bytes per second by number of splits",
            command=("-m", "benchmarks.attention_backends", "--seconds", "90"),
            limit_s=150,
        ),
        Stage(
            name="llama-3.1-8b",
            measures="a grid of budgets, gammas, batches and contexts, predicted first",
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
        *([] if is_trial else [second_model]),
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
    report_s = REPORT_S if is_gpu else 5 * REPORT_S
    state = output / "state.json"
    known = json.loads(state.read_text()) if state.exists() else {}
    planned = stages(output, arguments)
    outcomes = {stage.name: Outcome(**known.get(stage.name, {})) for stage in planned}

    def comes_last(stage: Stage) -> bool:
        return stage.planned_s is None and outcomes[stage.name].state == "failed"

    for stage in sorted(planned, key=comes_last):
        left_s = end_s - report_s - time.monotonic()
        outcome = outcomes[stage.name]
        least_s = min(LEAST_S, stage.planned_s or LEAST_S)
        if outcome.state == "done" or left_s < least_s:
            continue
        limit_s = stage.limit_s * (1 if is_gpu else 2)
        outcomes[stage.name] = _run_stage(stage, outcome, output, min(limit_s, left_s))
        _write(state, {name: asdict(each) for name, each in outcomes.items()})
    end_s = max(end_s, time.monotonic() + report_s)
    return _sum_up(planned, outcomes, output, arguments, end_s=end_s)


def _run_stage(stage: Stage, before: Outcome, output: Path, limit_s: float) -> Outcome:
    command = list(stage.command)
    if stage.stops_itself:
        command += ["--minutes", f"{max(0.5 * limit_s, limit_s - STOP_S) / 60:.3f}"]
    say(f"{stage.name}, {limit_s / 60:.1f} minutes at most: {stage.measures}")
    started_s = time.monotonic()
    log = output / f"{stage.name}.log"
    try:
        status = run_bounded(command, log, limit_s, python=stage.python)
        text = log.read_text(errors="replace")
    except OSError as error:  # a full disk, say
        say(f"{stage.name}: {error}")
        return Outcome(
            state="failed",
            elapsed_s=before.elapsed_s + time.monotonic() - started_s,
            why=str(error),
        )
    elapsed_s = time.monotonic() - started_s
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
            largest = (LARGEST_FILE_BYTES, LARGEST_FILE_BYTES)
            with contextlib.suppress(ProcessLookupError):  # it has ended
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, largest)
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
    end_s: float,
) -> int:
    """The table of wanted and reached, where time is left the report, and one JSON line last."""
    log, table, printed = (
        output / "report.log",
        output / "table.md",
        ["No table: nothing was measured yet."],
    )
    gpu = ["benchmarks/gpu.py", "--output", str(output), *arguments, "--part", "report"]
    rows: list[dict[str, str]] = []
    problems = []

    def run(command: Sequence[str]) -> bool:
        try:
            return run_bounded(command, log, end_s - time.monotonic()) == 0
        except OSError as error:
            problems.append(str(error))
            return False

    if run(gpu):
        rows = (last_json(log.read_text()) or {}).get("rows", [])
        printed = table.read_text().splitlines() or printed
    else:
        problems.append(f"no table: {_log_ending(log)}")
    records = output / "records.jsonl"
    has_time = end_s - time.monotonic() > REPORT_S / 4
    if records.exists() and has_time:
        command = ["-m", "magicdec", "report", str(records)]
        if not run([*command, "-o", str(output / "report.html")]):
            problems.append(f"no report: {_log_ending(log)}")
    lines = ["# Stages", "", "| stage | state | seconds | |", "|---|---|---|---|"]
    for stage in planned:
        outcome = outcomes[stage.name]
        lines.append(
            f"| {stage.name} | {outcome.state} | {outcome.elapsed_s:.0f} | {outcome.why} |"
        )
    lines += ["", "# Wanted and reached", "", *printed, *problems]
    _write_text(output / "summary.md", "\n".join(lines) + "\n")
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


def _log_ending(log: Path) -> str:
    return _last_line(log.read_text(errors="replace")) if log.exists() else "no log"


def _write(path: Path, document: dict) -> None:
    _write_text(path, json.dumps(document, indent=1) + "\n")


def _write_text(path: Path, text: str) -> None:
    """Whole or not at all: what cannot be written is said, and the next stage starts nevertheless."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        say(f"{path.name} is not written: {error}")


def say(message: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)
