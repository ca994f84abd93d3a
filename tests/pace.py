"""How slow this machine is, for the few tests of a stated time: limits in processor time grow with it."""

from __future__ import annotations

import time
from collections.abc import Callable

USUAL_S = 0.025
"""Of the fixed work below, on the machine that the stated times are of (2 cores of an AMD EPYC, CPython 3.11)."""


def cpu_seconds(work: Callable[[], object], *, repeats: int = 5) -> float:
    """The least processor time of several tries: what else the machine does only ever adds to it."""
    seconds = []
    for _ in range(repeats):
        start_s = time.process_time()
        work()
        seconds.append(time.process_time() - start_s)
    return min(seconds)


def slowness() -> float:
    """This machine's time for a fixed piece of Python over the usual one's, at least 1."""
    return max(1.0, cpu_seconds(_count) / USUAL_S)


def _count() -> None:
    counts: dict[int, int] = {}
    for number in range(300_000):
        counts[number % 997] = counts.get(number % 997, 0) + number
