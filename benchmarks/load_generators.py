"""Our driver against AIPerf and GuideLLM on one server: the same loads, interleaved, by its engine's processor time.

    python benchmarks/load_generators.py http://127.0.0.1:8000 ENGINE_PIDS local.toml --aiperf PATH -o compared.json

On a machine that does other work the wall's clock says what that work does. A process beside notes how much processor
time the engine had used at each millisecond; the times that a tool recorded are looked up there. What is fitted and
judged is then what `magicdec calibrate --server` fits and judges, with each tool.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from magicdec.errors import ConfigError, ServerError
from magicdec.live.benchmark_results import Request, points_of, read_runs
from magicdec.live.drive import Answer, Measured, measure, send_all
from magicdec.live.http import Address, parse_address
from magicdec.live.load_generator import answers_by, find_generator
from magicdec.live.loads import Load, plan_loads
from magicdec.live.server_calibration import base_engine, describe_server, median_of
from magicdec.live.server_fit import ServerPoint, fit_server
from magicdec.perfmodel.setup import Setup
from magicdec.specs.catalog import EMBEDDED_DIRECTORY, load_model_spec
from magicdec.specs.hardware import load_hardware
from magicdec.specs.precision import Precision
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec

Clock = Callable[[float], float]
EVERY_S = 1e-3
ATTEMPTS = 3


def watch(pids: list[int], path: Path) -> None:
    """Writes (time, processor time) in pairs until it is ended."""
    clocks = [(~pid << 3) | 2 for pid in pids]
    with path.open("wb", buffering=0) as file:
        while True:
            np.array([time.time(), sum(map(time.clock_gettime, clocks))]).tofile(file)
            time.sleep(EVERY_S)


@contextmanager
def processor_clock(pids: list[int]) -> Iterator[Clock]:
    """From seconds since 1970 to seconds that the processes had run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clock"
        given = [str(Path(__file__).resolve()), "--watch", str(path), ",".join(map(str, pids))]
        process = subprocess.Popen([sys.executable, *given])

        def clock(at: float) -> float:
            seen = np.fromfile(path)
            pairs = seen[: len(seen) // 2 * 2].reshape(-1, 2)
            return float(np.interp(at, pairs[:, 0], pairs[:, 1]))

        try:
            while not path.exists() or path.stat().st_size < 64:
                time.sleep(0.1)
            yield clock
        finally:
            process.kill()
            process.wait()


def on_clock(answers: list[Answer], clock: Clock) -> list[Answer]:
    return [
        dataclasses.replace(each, sent_s=clock(each.sent_s), events_s=[clock(at) for at in each.events_s])
        for each in answers
    ]


def guidellm(path: str, address: Address, loads: list[Load], clock: Clock) -> list[list[Request]]:
    """One run for each prompt length, a benchmark for each concurrency; by its first and last events."""
    found = []
    for prompt in sorted({load.prompt_len for load in loads}):
        users = sorted({load.concurrency for load in loads if load.prompt_len == prompt})
        output = max(load.output_len for load in loads if load.prompt_len == prompt)
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "benchmarks.json"
            command = [
                path, "run", "--disable-console",
                "--backend", f"kind=openai_http,target={address},request_format=/v1/completions",
                "--profile", "kind=concurrent", "--override", "profile.streams", ",".join(map(str, users)),
                "--constraint", f"kind=max_requests,count={max(users)}",
                "--tokenizer", f"kind=huggingface_auto,model={EMBEDDED_DIRECTORY}",
                "--data", f"kind=synthetic_text,prompt_tokens={prompt},output_tokens={output}",
                "--output", f"kind=json,path={report}",
            ]  # fmt: skip
            subprocess.run(command, check=True, capture_output=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
            for run in read_runs(report):
                found.append([
                    dataclasses.replace(
                        each, start_s=clock(each.start_s), events_s=np.array([clock(at) for at in each.events_s])
                    )
                    for each in run
                ])  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server")
    parser.add_argument("pids", help="the processes of the engine, comma-separated")
    parser.add_argument("hardware")
    parser.add_argument("--engine", help="the profile to start from")
    parser.add_argument("--aiperf", default="aiperf")
    parser.add_argument("--guidellm", help="left out without")
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--prompt-len", default="256,1024,2048")
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, default=Path("compared.json"))
    given = parser.parse_args()
    address, spec = parse_address(given.server), load_model_spec("embedded")
    server, generator = describe_server(address, spec), find_generator(given.aiperf)
    setup = Setup(
        model=spec, hardware=load_hardware(given.hardware), engine=base_engine(server, given.engine),
        speculation=SpeculationSpec(), sampling=SamplingSpec(temperature=0.0),
        precision=Precision(weight_dtype="fp32", kv_dtype="fp32"),
    )  # fmt: skip
    plan = plan_loads(
        concurrencies=[int(each) for each in given.concurrency.split(",")],
        prompt_lens=[int(each) for each in given.prompt_len.split(",")],
        output_len=given.output_len, rounds=given.rounds, max_len=server.max_len, seed=secrets.randbits(31),
    )  # fmt: skip
    tools: dict[str, Callable[[Load, int], list[Answer]]] = {
        "ours": lambda load, seed: asyncio.run(
            send_all(
                address, load, model=server.model, vocab_size=spec.vocab_size, seed=seed, clock=time.time,
            )
        ),
        f"aiperf {generator.version}": lambda load, seed: answers_by(
            generator, address, load, model=server.model, vocab_size=spec.vocab_size, seed=seed
        ),
    }  # fmt: skip
    rounds: dict[str, dict[Load, list[tuple[Measured, float]]]] = {
        name: {load: [] for load in plan.loads} for name in tools
    }
    with processor_clock([int(each) for each in given.pids.split(",")]) as clock:
        for number, load in enumerate(plan.order):
            for name in random.sample(list(tools), len(tools)):
                rounds[name][load].append((timed(tools[name], load, plan.seed + 100 * number, name, clock), 0.0))
                seen = rounds[name][load][-1][0]
                print(f"{load} {name}: {1e3 * seen.tpot_s:.2f} ms, {seen.tokens_per_step:.2f} per event", flush=True)
        points = {name: [median_of(each) for each in found.values()] for name, found in rounds.items()}
        if given.guidellm:
            points["guidellm"] = points_of(guidellm(given.guidellm, address, list(plan.loads), clock))
    document = {name: judged(found, setup, name) for name, found in points.items()}
    given.output.write_text(json.dumps(document, indent=2) + "\n")


def timed(send: Callable[[Load, int], list[Answer]], load: Load, seed: int, name: str, clock: Clock) -> Measured:
    """Sends again where too few events were told apart."""
    for attempt in range(ATTEMPTS):
        try:
            answers = send(load, seed + 10 * attempt + (name == "ours"))
            time.sleep(10 * EVERY_S)
            return measure(load, on_clock(answers, clock))
        except ServerError as error:
            print(f"{load} {name}: {error}", flush=True)
    raise ConfigError(f"{load} could not be timed by {name}")


def judged(points: list[ServerPoint], setup: Setup, name: str) -> dict[str, object]:
    fit = fit_server(points, setup=setup, tp_size=1, gamma=0, name=name)
    print(f"{name}: median error {fit.fitted_error:.1%} fitted, {fit.held_out_error:.1%} held out; {fit.constants}")
    rows = [
        {
            "load": str(point.measured.load), "judges": point.measured.load.is_judge,
            "tpot_s": point.measured.tpot_s, "spread": point.spread, "error": error,
        }
        for point, error in zip(points, fit.errors, strict=True)
    ]  # fmt: skip
    for row in rows:
        print(f"  {row}")
    return {"median_error": {"fitted": fit.fitted_error, "held_out": fit.held_out_error}, "loads": rows}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        watch([int(each) for each in sys.argv[3].split(",")], Path(sys.argv[2]))
    else:
        main()
