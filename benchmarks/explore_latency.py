"""Time of the what-if page's answers: CPU time of the planner and the page's piece, for states never asked before.

python benchmarks/explore_latency.py
"""

from __future__ import annotations

import json
import statistics
import time

from magicdec.explore.page import Explorer
from magicdec.explore.state import Catalog
from magicdec.units import MILLI

REPETITIONS = 7
QUERIES = {
    "every measured draft": "context={}",
    "one draft": "draft=streamingllm&context={}",
    "one draft and budget": "draft=streamingllm&budget=512&context={}",
    "typed acceptance": "acceptance=0.8&context={}",
    "larger model": "model=llama-3.1-70b&hardware=h100-sxm-80gb&acceptance=0.8&batch=16&context={}",
}


def main() -> None:
    explorer = Explorer(Catalog.given())
    explorer.answer("")  # imports, catalogs
    found = {}
    for name, query in QUERIES.items():
        times = []
        for repetition in range(REPETITIONS):
            started = time.process_time()
            explorer.answer(query.format(16_384 + repetition))
            times.append((time.process_time() - started) / MILLI)
        found[name] = {"median_ms": round(statistics.median(times), 1), "fastest_ms": round(min(times), 1)}
    print(json.dumps({"benchmark": "explore_latency", "clock": "CPU time of the process", "answers": found}))


if __name__ == "__main__":
    main()
