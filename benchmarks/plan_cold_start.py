"""Wall time of `magicdec plan` with default arguments from a fresh process; prints one JSON line.

Run: python benchmarks/plan_cold_start.py
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

REPETITIONS = 7


def main() -> None:
    times = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "magicdec", "plan"], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    print(
        json.dumps(
            {
                "benchmark": "plan_cold_start",
                "median_s": round(statistics.median(times), 3),
                "best_s": round(min(times), 3),
                "repetitions": REPETITIONS,
            }
        )
    )


if __name__ == "__main__":
    main()
