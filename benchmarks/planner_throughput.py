"""How many configurations per second the performance model evaluates on one core; prints one JSON line.

A point is one (batch, context, tp, draft, budget, gamma): the times of all terms of its step, expected tokens per step,
speedup, and whether it fits. Everything is element by element in numpy, hence on one thread.
Run: python benchmarks/planner_throughput.py
"""

from __future__ import annotations

import json
import resource
import statistics
import time

import numpy as np

from magicdec.perfmodel.acceptance import AcceptanceProfile, Law
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import predict_in_chunks
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.speculation import SPARSE_METHODS, SpeculationSpec
from magicdec.units import MIB

REPETITIONS = 5


def main() -> None:
    law = Law(rejection=0.2, budget_exponent=0.3, fill_exponent=0.5, concentration=20.0, drift=0.4)
    acceptance = AcceptanceProfile(model="llama-3.1-8b", draft_method="streamingllm", law=law)
    grid = Points.grid(
        batch=np.unique(np.round(np.geomspace(1, 512, 48))),
        context=np.geomspace(1024, 131_072, 24),
        tp=(1, 2, 4, 8),
        budget=(64, 128, 256, 512, 1024, 2048, 4096, 8192),
        gamma=range(1, 17),
    )
    points = len(SPARSE_METHODS) * int(np.prod(grid.shape))
    rates = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        for method in SPARSE_METHODS:
            setup = Setup(
                model=load_model_spec("llama-3.1-8b"),
                hardware=load_hardware("a100-sxm-80gb"),
                engine=load_engine("magicdec-2024"),
                speculation=SpeculationSpec(draft="self", draft_method=method, draft_budget=64, gamma=1),
            )
            for _, part in predict_in_chunks(setup, acceptance, grid):
                np.argmax(np.where(part.memory.fits & part.valid, part.speedup, 0.0))
        rates.append(points / (time.perf_counter() - started))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB
    print(
        json.dumps(
            {
                "benchmark": "planner_throughput",
                "points": points,
                "points_per_s": round(statistics.median(rates)),
                "points_per_s_best": round(max(rates)),
                "repetitions": REPETITIONS,
                "threads": 1,
                "peak_memory_mib": round(peak),
            }
        )
    )


if __name__ == "__main__":
    main()
