"""What the plugin costs where it drafts nothing: vLLM without it, and with gamma 0, by process CPU time per step.

Both engines are started, each in a process with one thread, and decode in turns, so that what else the machine does
meets both. The forward pass, which is the same code on the same numbers, differs by several per cent between two
processes, and stays so as long as they live: so they are started anew several times, and what is added beside the pass
is told apart. Run in the environment of vLLM:

    .venv-vllm/bin/python benchmarks/vllm_idle.py --batch 8 --context 4000
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

KINDS = ("without", "gamma 0")


def work(kind: str, batch: int, context: int, gen_len: int) -> None:
    """Decodes once for each line of stdin, and writes seconds of process CPU time per step, whole and by phase."""
    from magicdec.measure.configuration import BenchmarkRequest
    from magicdec.measure.vllm_session import VllmSession
    from magicdec.specs.speculation import SamplingSpec, SpeculationSpec

    draft = SpeculationSpec(draft="self", draft_method="streamingllm", draft_budget=512, gamma=3)
    request = BenchmarkRequest(
        model="embedded", engine="vllm", batch_size=batch, context_len=context, gen_len=gen_len,
        speculations=() if kind == "without" else (draft,), sampling=SamplingSpec(temperature=0.0),
    )  # fmt: skip
    session = VllmSession(request)
    session.run(gen_len=12)
    print("ready", flush=True)
    for _ in sys.stdin:
        run = session.run()
        print(json.dumps({"step": run.step_cpu_s, **run.phases_cpu_s}), flush=True)


def measure(shape: list[str], repetitions: int) -> dict[str, dict[str, float]]:
    """Medians of the times of each kind, of one start of both."""
    workers = {
        kind: subprocess.Popen(
            [sys.executable, __file__, "--worker", kind, *shape],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for kind in KINDS
    }  # fmt: skip

    def answer(kind: str) -> str:
        """The worker's next line that is its own: the engine writes to stdout too."""
        output = workers[kind].stdout
        assert output is not None
        for line in output:
            if line.startswith(("ready", '{"step"')):
                return line
        raise SystemExit(f"the engine {kind} ended")

    for kind in KINDS:
        answer(kind)
    times: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for repetition in range(repetitions):
        for kind in KINDS if repetition % 2 else reversed(KINDS):
            stdin = workers[kind].stdin
            assert stdin is not None
            print(file=stdin, flush=True)
            times[kind].append(json.loads(answer(kind)))
    for worker in workers.values():
        worker.communicate()
    return {
        kind: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for kind, runs in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--gen-len", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.batch, options.context, options.gen_len)
        return
    shape = ["--batch", str(options.batch), "--context", str(options.context), "--gen-len", str(options.gen_len)]
    ratios, added = [], []
    for start in range(options.starts):
        alone, idle = measure(shape, options.repetitions).values()
        for kind, medians in zip(KINDS, (alone, idle), strict=True):
            phases = ", ".join(f"{name} {value * 1e3:.2f}" for name, value in medians.items())
            print(f"start {start + 1}, {kind}, ms of CPU time: {phases}", flush=True)
        ratios.append(idle["step"] / alone["step"])
        added.append((idle["step"] - idle["verify"] - alone["step"] + alone["verify"]) / alone["step"])
    for name, values in (
        ("step, gamma 0 over without, less 1", [r - 1 for r in ratios]),
        ("added beside the pass", added),
    ):
        print(f"{name}: median {statistics.median(values):+.1%}, {min(values):+.1%} to {max(values):+.1%}")


if __name__ == "__main__":
    main()
