"""Has AIPerf send the planned loads: its executable is run as a process, its records are read by benchmark_results.

A load is one run of `aiperf profile --config load.json`: as many requests as the load has, all at once, each body taken
from a file word for word, so that AIPerf sends what drive sends, and no more. Its records hold the time of every event
with text, of which the window in which all requests decode is timed. The prompts are token ids; AIPerf loads a
tokenizer all the same, and gets the embedded model's.

A bearer token stays in the environment: the configuration names its variable. AIPerf quotes its configuration in some
errors, so that the token is struck out of what is passed on.

Why not GuideLLM: its prompts are text, and its report has the first and the last event of a request only (held out 14 %
against 6 % by AIPerf's records, results/LOG.md). What it measured is read by benchmark_results.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicdec.errors import ConfigError, ServerError
from magicdec.live.benchmark_results import read_runs
from magicdec.live.drive import Answer, Measured, bodies, measure
from magicdec.live.http import TOKEN_VARIABLE, Address, token
from magicdec.live.loads import Load
from magicdec.specs.catalog import EMBEDDED_DIRECTORY

LIMIT_S = 1800.0
"""Longest run of one load."""
CONFIG, PAYLOADS, RECORDS = "load.json", "payloads.json", "artifacts/profile_export.jsonl"
HIDDEN = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Offline AIPerf takes a tokenizer from the cache by its name only; a directory needs no network anyway."""
HINT = (
    "install it in an environment of its own (python3 -m venv aiperf && aiperf/bin/pip install aiperf), and give "
    "--load-generator aiperf/bin/aiperf"
)


@dataclass(frozen=True, kw_only=True)
class LoadGenerator:
    """An executable that was found, and what it says of its version."""

    executable: Path
    version: str

    @property
    def command(self) -> list[str]:
        """Run in a folder that holds the load's `CONFIG` and `PAYLOADS`."""
        return [str(self.executable), "profile", "--config", CONFIG]


def find_generator(given: str) -> LoadGenerator:
    """ "aiperf" from PATH, or the executable at a path.

    Raises ConfigError where there is none, or it is another tool.
    """
    found = shutil.which(given)
    if Path(given).name.startswith("guidellm"):
        raise ConfigError("GuideLLM cannot send the plan as it is: run it yourself, and give its file to --results")
    if found is None:
        raise ConfigError(f"there is no load generator '{given}': {HINT}")
    try:
        done = subprocess.run(
            [found, "--version"], capture_output=True, text=True, check=False, timeout=LIMIT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{given} cannot be run: {error}") from None
    version = done.stdout.strip()
    if done.returncode or not re.fullmatch(r"\d+(\.\w+)+", version):
        raise ConfigError(f"{given} is not AIPerf, which answers --version with a number: {HINT}")
    return LoadGenerator(executable=Path(found).absolute(), version=version)


def configuration(address: Address, load: Load, *, model: str) -> dict[str, Any]:
    """What AIPerf is told of one load. The token, where there is one, is named and not given."""
    endpoint: dict[str, Any] = {
        "urls": [str(address)], "type": "completions", "streaming": True, "use_server_token_count": True,
        "timeout": LIMIT_S, "connection_reuse": "never",
    }  # fmt: skip
    if token():
        endpoint["api_key"] = f"${{{TOKEN_VARIABLE}}}"
    number = load.concurrency
    return {
        "schemaVersion": "2.0",
        "benchmark": {
            "models": [model],
            "endpoint": endpoint,
            "datasets": [{"name": "planned", "type": "file", "path": PAYLOADS, "format": "inputs_json"}],
            "phases": [{"name": "profiling", "type": "concurrency", "concurrency": number, "requests": number}],
            "tokenizer": {"name": str(EMBEDDED_DIRECTORY)},
            "artifacts": {"dir": str(Path(RECORDS).parent)},
            "gpu_telemetry": {"enabled": False},
            "server_metrics": {"enabled": False},
            "runtime": {"ui": "none"},
        },
    }


def send_by(
    generator: LoadGenerator, address: Address, load: Load, *, model: str, vocab_size: int, seed: int
) -> Measured:
    """Has one load sent, and times its window.

    Raises ServerError where a request failed, or the generator did.
    """
    return measure(load, answers_by(generator, address, load, model=model, vocab_size=vocab_size, seed=seed))


def answers_by(
    generator: LoadGenerator, address: Address, load: Load, *, model: str, vocab_size: int, seed: int
) -> list[Answer]:
    """Has one load sent. Seconds since 1970. Raises ServerError."""
    sessions = [
        {"session_id": str(number), "payloads": [body]}
        for number, body in enumerate(bodies(load, model=model, vocab_size=vocab_size, seed=seed))
    ]
    with tempfile.TemporaryDirectory(prefix="magicdec-") as name:
        folder = Path(name)
        (folder / CONFIG).write_text(json.dumps(configuration(address, load, model=model)))
        (folder / PAYLOADS).write_text(json.dumps({"data": sessions}))
        _run(generator, folder, address)
        return _answers(folder / RECORDS, load, address)


def _run(generator: LoadGenerator, folder: Path, address: Address) -> None:
    secret = token()
    environment = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    if secret:
        environment[TOKEN_VARIABLE] = secret
    try:
        process = subprocess.Popen(
            generator.command, cwd=folder, env=environment, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except OSError as error:
        raise ServerError(f"{generator.executable} cannot be run: {error}; nothing more was sent") from None
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise ServerError(f"a load of {LIMIT_S:.0f} s at {address} was ended; nothing more was sent") from None
    finally:
        _end(process)
    if process.returncode:
        said = said.replace(secret, "***") if secret else said
        lines = [line.strip(" │") for line in said.splitlines() if re.search(r"ERROR|Error\b|Reason", line)]
        raise ServerError(
            f"the load generator ended with status {process.returncode}; nothing more was sent"
            + (f": {lines[0][:300]}" if lines else "")
        )


def _end(process: subprocess.Popen[str]) -> None:
    """Also its workers, which would go on sending: it is the leader of a session of its own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _answers(path: Path, load: Load, address: Address) -> list[Answer]:
    """Raises ServerError where fewer requests than the load has were answered, or not at the length asked for."""
    try:
        requests = [request for run in read_runs(path) for request in run]
    except ConfigError as error:
        raise ServerError(f"of a load of {load} nothing can be timed; nothing more was sent: {error}") from None
    if len(requests) != load.concurrency:
        raise ServerError(
            f"{address} answered {len(requests)} of {load.concurrency} requests without an error; nothing more was sent"
        )
    for request in requests:
        if request.output_len != load.output_len:
            raise ServerError(
                f"{address} generated {request.output_len} tokens where {load.output_len} were asked for: "
                "it does not know ignore_eos"
            )
    return [
        Answer(sent_s=each.start_s, events_s=[float(at) for at in each.events_s], num_tokens=each.output_len)
        for each in requests
    ]
