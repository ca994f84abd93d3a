"""The machine that a measurement depends on: thread binding, free memory, and how fast it is right now."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from magicdec.units import KIB, MIB

THREAD_BINDING = {"OMP_PROC_BIND": "true"}
"""Without bound threads tiny operations stall for milliseconds now and then. Read once, when torch is loaded."""


def bind_threads() -> None:
    """Sets up thread binding; must be called before torch is imported (a later call changes nothing)."""
    if "torch" not in sys.modules:
        for name, value in THREAD_BINDING.items():
            os.environ.setdefault(name, value)


class ReferenceKernel:
    """A fixed piece of work, timed beside each measurement: one pass over an array that no cache holds, by all threads.

    It is bound by memory, as decoding at long context is, and by nothing else; where the memory of a shared machine
    gets slower, so does it. The machine's speed at a moment is `time at calibration / time now`.
    """

    def __init__(self, device: str = "cpu", num_bytes: int = 256 * MIB) -> None:
        import torch

        self._data = torch.ones(num_bytes // 4, device=device)
        self._synchronise: Callable[[], object] = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
        self.time_s()

    def time_s(self, passes: int = 3) -> float:
        """Seconds of one pass over the data: the median of a few."""
        seconds = []
        for _ in range(passes):
            self._synchronise()
            start = time.perf_counter()
            self._data.sum()
            self._synchronise()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)


def available_memory_bytes(device: str) -> float:
    """Memory that can be taken now: the GPU's free memory, or what the kernel calls available."""
    if device.startswith("cuda"):
        import torch

        free, _ = torch.cuda.mem_get_info(torch.device(device))
        return float(free)
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * KIB
    except OSError:
        pass
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
