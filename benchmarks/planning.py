"""How fast planning is, on one core; prints one JSON line for each:

cold start     wall time of `magicdec plan` with default arguments, from a fresh process
throughput     configurations per second: the times of all terms of a step, tokens per step, speedup, and the fit in
               memory of every (batch, context, tp, draft, budget, gamma), element by element in numpy
replays        tokens of a log per second of processor time, for one setting of each look-up

python benchmarks/planning.py
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time

import numpy as np

from magicdec.logs.lookups import lookup
from magicdec.logs.ngram import NgramReplay
from magicdec.logs.suffix import SuffixReplay
from magicdec.perfmodel.acceptance import MeasuredProfile
from magicdec.perfmodel.acceptance.law import Law
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import predict
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.speculation import SPARSE_METHODS, SpeculationSpec
from magicdec.units import KIB, MIB

REPETITIONS = 7


def cold_start() -> dict[str, float]:
    times = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "magicdec", "plan"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        times.append(time.perf_counter() - started)
    return {
        "median_s": round(statistics.median(times), 3),
        "best_s": round(min(times), 3),
    }


def throughput() -> dict[str, float]:
    law = Law(
        rejection=0.2,
        budget_exponent=0.3,
        fill_exponent=0.5,
        concentration=20.0,
        drift=0.4,
    )
    acceptance = MeasuredProfile(
        model="llama-3.1-8b", draft_method="streamingllm", law=law
    )
    grids = [
        Points.grid(
            batch=np.unique(np.round(np.geomspace(1, 512, 48))), context=np.geomspace(1024, 131_072, 24), tp=(tp,),
            budget=(64, 128, 256, 512, 1024, 2048, 4096, 8192), gamma=range(1, 17),
        )
        for tp in (1, 2, 4, 8)
    ]  # fmt: skip
    points, rates = (
        len(SPARSE_METHODS) * sum(int(np.prod(grid.shape)) for grid in grids),
        [],
    )
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        for method in SPARSE_METHODS:
            setup = Setup(
                model=load_model_spec("llama-3.1-8b"),
                hardware=load_hardware("a100-sxm-80gb"),
                engine=load_engine("magicdec-2024"),
                speculation=SpeculationSpec(
                    draft="self", draft_method=method, draft_budget=64, gamma=1
                ),
            )
            for grid in grids:
                part = predict(setup, acceptance, grid)
                np.argmax(np.where(part.memory.fits & part.valid, part.speedup, 0.0))
        rates.append(points / (time.perf_counter() - started))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB / MIB
    return {
        "points": points,
        "points_per_s": round(statistics.median(rates)),
        "peak_memory_mib": round(peak),
    }


def replays() -> dict[str, int]:
    """Median tokens per second over texts that repeat parts of themselves."""
    rng = np.random.default_rng(0)
    parts = rng.integers(0, 32_000, (400, 50), dtype=np.int32)
    texts = [parts[rng.integers(0, 400, 200)].ravel() for _ in range(20)]
    prompt_len, found = 4000, {}
    for name in ("ngram", "suffix"):
        replay: NgramReplay | SuffixReplay = (
            NgramReplay([lookup("ngram", gamma=3)])
            if name == "ngram"
            else SuffixReplay([lookup("suffix", gamma=8)])
        )
        replay.replay(texts[0], prompt_len)  # compiles
        rates = []
        for _ in range(REPETITIONS):
            started = time.process_time()
            for text in texts:
                replay.replay(text, prompt_len)
            tokens = sum(len(text) for text in texts)
            rates.append(tokens / (time.process_time() - started))
        found[name] = round(statistics.median(rates))
    return found


if __name__ == "__main__":
    for measure in (cold_start, throughput, replays):
        print(
            json.dumps(
                {"benchmark": measure.__name__, "repetitions": REPETITIONS, **measure()}
            ),
            flush=True,
        )
