"""The machine that a measurement depends on: thread binding, free memory, and how fast it is right now."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

from magicdec.units import KIB, MIB

THREAD_BINDING = {"OMP_PROC_BIND": "true"}
"""Without bound threads tiny operations stall for milliseconds now and then. Read once, when torch is loaded."""


def bind_threads() -> None:
    """Sets up thread binding; must be called before torch is imported (a later call changes nothing)."""
    if "torch" not in sys.modules:
        for name, value in THREAD_BINDING.items():
            os.environ.setdefault(name, value)


class ReferenceKernel:
    """A fixed piece of memory-bound work, timed beside each measurement so that errors can be given normalised by it.

    The machine's speed at a moment is `calibration time / time now`.
    """

    def __init__(self, num_bytes: int = 128 * MIB) -> None:
        self._data = np.ones(num_bytes // 8)
        self.time_s()

    def time_s(self) -> float:
        """Seconds of one pass over the data (the better of two, to leave a first touch out)."""
        best = float("inf")
        for _ in range(2):
            start = time.perf_counter()
            self._data.sum()
            best = min(best, time.perf_counter() - start)
        return best


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
