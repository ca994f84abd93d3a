"""Adaptive gamma compared with every fixed gamma, 0 included, on the embedded model: interleaved, at several workloads.

The policy keeps what it learnt from run to run; its first run, in which it learns what steps cost, is the warm-up.
Prints one JSON line: `ratio` is the adaptive throughput over that of the best fixed gamma, the median of the
repetitions' own ratios (what a slow moment of the machine does to both cancels). Which gamma is best is told by one
half of the repetitions and compared with adaptive in the other, both ways round: of six that are alike, the one that
looks best in the same runs looks better than it is. `best_fixed_repeats` are such ratios of the best gamma to itself,
in the neighbouring repetition: what noise alone does.
Run: python benchmarks/adaptive.py [--workloads 1x512,8x2048,32x4096]
"""

# ruff: noqa: E402  (threads are bound before torch is loaded)
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from itertools import pairwise

from magicdec.measure.environment import bind_threads

bind_threads()

import numpy as np

from magicdec.measure.configuration import BenchmarkRequest
from magicdec.measure.session import BenchmarkSession
from magicdec.specs.speculation import AUTOREGRESSIVE, SpeculationSpec

WITHIN = 0.97
"""What adaptive gamma is to reach of the best fixed one."""


def best_fixed(rates: dict[str, list[float]]) -> str:
    return max((name for name in rates if name != "adaptive"), key=lambda name: statistics.median(rates[name]))


def measure(batch: int, context: int, options: argparse.Namespace) -> dict[str, object]:
    """One workload: tokens per second of each fixed gamma and of adaptive gamma, run in turn."""
    fixed = [
        SpeculationSpec(draft="self", draft_method="streamingllm", draft_budget=options.draft_budget, gamma=gamma)
        for gamma in range(1, options.max_gamma + 1)
    ]
    session = BenchmarkSession(
        BenchmarkRequest(
            model="embedded",
            batch_size=batch,
            context_len=context,
            gen_len=options.gen_len,
            speculations=tuple(fixed),
        )
    )
    works = {"0": (AUTOREGRESSIVE, False), **{str(each.gamma): (each, False) for each in fixed}}
    works["adaptive"] = (fixed[-1], True)
    rates: dict[str, list[float]] = {name: [] for name in works}
    chosen = np.zeros(options.max_gamma + 1, dtype=int)
    for repetition in range(-1, options.repetitions):
        for name, (speculation, is_adaptive) in works.items():
            if sys.stderr.isatty():
                sys.stderr.write(f"\r\x1b[2K{batch}x{context}, gamma {name}, {repetition + 1}/{options.repetitions}")
            run = session.run(speculation, seed=max(repetition, 0), adaptive=is_adaptive)
            if repetition >= 0:
                rates[name].append(run.steady_tokens_per_s)
                if is_adaptive:
                    chosen += np.bincount(run.gammas, minlength=len(chosen))
    halves = [{name: found[start::2] for name, found in rates.items()} for start in (0, 1)]
    bests = [best_fixed(half) for half in halves]
    ratios = [
        a / b
        for half, best in zip(halves, reversed(bests), strict=True)
        for a, b in zip(half["adaptive"], half[best], strict=True)
    ]
    overall = rates[best_fixed(rates)]
    repeats = [a / b for a, b in pairwise(overall)]
    ratio = statistics.median(ratios)
    return {
        "batch_size": batch,
        "context_len": context,
        "best_fixed_gamma": [int(best) for best in bests],
        "ratio": round(ratio, 3),
        "ratios": [round(each, 3) for each in sorted(ratios)],
        "best_fixed_repeats": [round(each, 3) for each in sorted(repeats)],
        "is_within": ratio >= WITHIN,
        "steps_by_gamma": chosen.tolist(),
        "tokens_per_s": {
            name: {
                "median": round(statistics.median(found), 1),
                "min": round(min(found), 1),
                "max": round(max(found), 1),
            }
            for name, found in rates.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="1x512,8x2048,32x4096", help="batch x context, comma-separated")
    parser.add_argument("--gen-len", type=int, default=96)
    parser.add_argument("--draft-budget", type=int, default=256)
    parser.add_argument("--max-gamma", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=8)
    options = parser.parse_args()
    workloads = [tuple(map(int, part.split("x"))) for part in options.workloads.split(",")]
    result = {
        "benchmark": "adaptive",
        "model": "embedded",
        "temperature": 1.0,
        "gen_len": options.gen_len,
        "draft": f"streamingllm {options.draft_budget}",
        "repetitions": options.repetitions,
        "cpus": os.cpu_count(),
        "workloads": [measure(batch, context, options) for batch, context in workloads],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
