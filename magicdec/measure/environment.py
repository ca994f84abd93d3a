"""The machine that a measurement depends on: clocks, thread binding, free memory, and how fast it
is right now. No torch until a reference kernel is made."""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from magicdec.errors import ConfigError
from magicdec.units import KIB, MIB

Clock = Literal["wall", "cpu"]
"""Wall-clock time, or the processor time of this process.

On a machine that others use too, one thread's processor time is what its wall-clock time would be
without them: it repeats where the other does not. It is measured on CPUs only, and with one thread,
which makes it a duration.
"""
THREAD_BINDING = {"OMP_PROC_BIND": "true"}
"""Without bound threads tiny operations stall for milliseconds now and then. Read once, when torch
is loaded.
"""


def seconds(clock: Clock) -> float:
    """The clock's reading; only differences mean something."""
    if clock == "cpu":
        return time.process_time()
    return time.perf_counter()


def prepare(clock: Clock, device: str) -> None:
    """Runs with one thread where processor time is measured. Called before torch is imported, since
    libraries read the number of threads once.

    Raises ConfigError for a device that is no CPU.
    """
    if clock == "wall":
        return
    if device != "cpu":
        raise ConfigError(
            f"--clock cpu is for --device cpu: on {device} the processor's time says nothing"
        )
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def bind_threads() -> None:
    """Sets up thread binding; must be called before torch is imported (a later call changes
    nothing).
    """
    if "torch" not in sys.modules:
        for name, value in THREAD_BINDING.items():
            os.environ.setdefault(name, value)


REFERENCE_BYTES = 256 * MIB
REFERENCE_PRODUCTS, REFERENCE_ROWS, REFERENCE_SIZE = 50, 48, 512


class ReferenceTimes(NamedTuple):
    """Seconds of the reference kernels at a moment."""

    memory_s: float
    compute_s: float

    @property
    def memory_bytes_per_s(self) -> float:
        return REFERENCE_BYTES / self.memory_s


def median_times(times: Iterable[ReferenceTimes]) -> ReferenceTimes:
    """The median of each kernel's times, at least one."""
    memory_s, compute_s = zip(*times, strict=True)
    return ReferenceTimes(statistics.median(memory_s), statistics.median(compute_s))


def spread_of_times(runs: Iterable[ReferenceTimes]) -> ReferenceTimes:
    """Standard deviation of the logarithms of each kernel's times, 0 for fewer than two."""
    log_memory_s = []
    log_compute_s = []
    for times in runs:
        log_memory_s.append(math.log(times.memory_s))
        log_compute_s.append(math.log(times.compute_s))
    if len(log_memory_s) < 2:
        return ReferenceTimes(0.0, 0.0)
    return ReferenceTimes(
        statistics.stdev(log_memory_s), statistics.stdev(log_compute_s)
    )


class ReferenceKernels:
    """Two fixed pieces of work, timed by all threads around each measurement: how fast the machine
    is at that moment.

    memory: one pass over 256 MiB, which no cache holds. compute: 50 products of 48 rows with a
        512-square matrix, one after the other, which a cache holds: as a model's linear layers,
        small operations that wait for the processor only. What others do on a shared machine slows
        the one down, or the other, or both.
    """

    def __init__(self, device: str = "cpu", clock: Clock = "wall") -> None:
        import torch

        self._clock = clock
        self._data = torch.ones(REFERENCE_BYTES // 4, device=device)
        self._x = torch.ones(REFERENCE_ROWS, REFERENCE_SIZE, device=device)
        self._weight = torch.eye(REFERENCE_SIZE, device=device)
        self._synchronise: Callable[[], object] = lambda: None
        if device.startswith("cuda"):
            self._synchronise = partial(torch.cuda.synchronize, device)
        self.times()

    def times(self) -> ReferenceTimes:
        """The median of a few times of each."""
        return ReferenceTimes(
            memory_s=self._time_s(self._data.sum),
            compute_s=self._time_s(self._multiply),
        )

    def _multiply(self) -> None:
        x = self._x
        for _ in range(REFERENCE_PRODUCTS):
            x = x @ self._weight

    def _time_s(self, work: Callable[[], object], repeats: int = 3) -> float:
        taken = []
        for _ in range(repeats):
            self._synchronise()
            start = seconds(self._clock)
            work()
            self._synchronise()
            taken.append(seconds(self._clock) - start)
        return statistics.median(taken)


def available_memory_bytes(device: str) -> float:
    """Memory that can be allocated now: the GPU's free memory; on a CPU the kernel's available
    memory, within this process's control groups."""
    if device.startswith("cuda"):
        import torch

        free, _ = torch.cuda.mem_get_info(torch.device(device))
        return float(free)
    free_bytes = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free_bytes = float(line.split()[1]) * KIB
    return min([free_bytes, *cgroup_free_bytes()])


def cgroup_free_bytes(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> list[float]:
    """Memory that each control group of this process, of either version, still grants; those
    without a limit are left out. File pages that the kernel would drop count as free."""
    free_bytes = []
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return []
    for number, controllers, place in lines:
        if number == "0":
            base = root
            names = ("memory.max", "memory.current")
            dropped = "inactive_file"
        elif "memory" in controllers.split(","):
            base = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            dropped = "total_inactive_file"
        else:
            continue
        group = base / place.lstrip("/")
        for directory in (group, *group.parents):
            if not directory.is_relative_to(base):
                break
            # no limit is a word, or a file that is not there
            with suppress(OSError, ValueError):
                limit, used = (
                    float(int((directory / name).read_text())) for name in names
                )
                statistics_of = dict(
                    line.split()
                    for line in (directory / "memory.stat").read_text().splitlines()
                )
                free_bytes.append(
                    max(0.0, limit - used + float(statistics_of.get(dropped, 0)))
                )
    return free_bytes
