"""Best rates of this machine, how well a measured run uses its memory, and the run's peak of it.

    MBU = bytes that must be read / (time · measured bandwidth)

Bytes are those of the weights that a pass touches (of experts: those that its tokens choose, if
evenly) and of what it sees of caches and states, each once, of all ranks together; the bandwidth is
that of all ranks together. Activations, and what a kernel reads twice, are not counted: they are
what keeps the share below 1.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from magicdec.measure.configuration import BenchmarkRequest, model_setup, planned_memory
from magicdec.measure.environment import REFERENCE_BYTES, Clock, seconds
from magicdec.perfmodel.drafting import draft_kv_tokens
from magicdec.perfmodel.step import read_bytes
from magicdec.runtime.distributed import TensorParallel
from magicdec.specs.speculation import AUTOREGRESSIVE, SpeculationSpec
from magicdec.units import KIB, MIB


def is_cuda(device: str) -> bool:
    return device.startswith("cuda")


def seconds_per_call(
    call: Callable[[], object],
    *,
    device: str,
    clock: Clock = "wall",
    min_s: float = 2e-3,
    max_calls: int = 200,
) -> float:
    """Mean seconds of a call, repeated until `min_s` have passed."""
    calls = 1
    while True:
        elapsed = elapsed_s(call, calls, device, clock)
        if elapsed >= min_s or calls >= max_calls:
            return elapsed / calls
        calls = min(
            max_calls, max(calls * 2, int(calls * 1.2 * min_s / max(elapsed, 1e-7)))
        )


def elapsed_s(
    call: Callable[[], object], calls: int, device: str, clock: Clock = "wall"
) -> float:
    """Seconds of `calls` calls by the clock; on a CUDA device by its events."""
    if is_cuda(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    begin_s = seconds(clock)
    for _ in range(calls):
        call()
    return seconds(clock) - begin_s


def bandwidth_bytes_per_s(
    *,
    device: str,
    num_bytes: int = REFERENCE_BYTES,
    rounds: int = 7,
    clock: Clock = "wall",
) -> float:
    """Bytes per second of reading memory: the best of a few passes over an array that no cache
    holds.
    """
    data = torch.ones(num_bytes // 4, device=device)
    data.sum()
    return num_bytes / min(
        seconds_per_call(data.sum, device=device, clock=clock) for _ in range(rounds)
    )


def copy_bytes_per_s(
    *, device: str, num_bytes: int = 2048 * MIB, rounds: int = 7
) -> float:
    """Bytes read plus bytes written per second of a copy, the best of a few."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    best = min(
        seconds_per_call(lambda: target.copy_(source), device=device)
        for _ in range(rounds)
    )
    return 2 * num_bytes / best


def peak_flops_per_s(
    *,
    device: str,
    dtype: str,
    size: int = 1024,
    rounds: int = 5,
    clock: Clock = "wall",
) -> float:
    """FLOP/s of a square matrix product: the best of a few."""
    a = torch.randn(size, size, device=device, dtype=getattr(torch, dtype))
    b = torch.randn(size, size, device=device, dtype=getattr(torch, dtype))
    best = min(
        seconds_per_call(lambda: a @ b, device=device, clock=clock)
        for _ in range(rounds)
    )
    return 2 * size**3 / best


def all_ranks_bandwidth_bytes_per_s(tp: TensorParallel, device: str) -> float:
    """Memory bandwidth that the ranks reach together: each reads at the same time."""
    tp.all_reduce(torch.zeros(1, device=device))
    own = torch.tensor(
        bandwidth_bytes_per_s(device=device), dtype=torch.float64, device=device
    )
    return float(tp.all_reduce(own))


def phase_bytes(
    request: BenchmarkRequest, prompt_lens: Sequence[int], speculation: SpeculationSpec
) -> dict[str, float]:
    """Bytes that each phase of a step must read; `draft` is the block's gamma steps together, and
    `autoregressive` a step without them.

    KV lengths are those of the middle of the generation.
    """
    setup = model_setup(request, speculation)
    kv_len = float(np.mean(prompt_lens)) + request.gen_len / 2
    draft_tokens = draft_kv_tokens(setup, kv_len, speculation.draft_budget)
    needed = read_bytes(
        setup,
        batch=request.batch_size,
        kv_len=kv_len,
        draft_kv_len=draft_tokens,
        gamma=speculation.gamma,
    )
    return {phase: float(num_bytes) for phase, num_bytes in needed.items()}


def planned_memory_bytes(request: BenchmarkRequest) -> float:
    """Memory that the fullest configuration of a request needs on each rank, by the planner."""
    needs = [
        planned_memory(request, each)
        for each in (AUTOREGRESSIVE, *request.speculations)
    ]
    return max(float(need.total_bytes) for need in needs)


class MemoryMeter:
    """The peak memory of this process from now on, beyond what it holds already."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device.startswith("cuda")
        self._before_bytes = 0.0
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before_bytes = float(torch.cuda.memory_allocated())
        else:
            try:
                # the kernel's peak starts anew
                Path("/proc/self/clear_refs").write_text("5")
                self._before_bytes = _status_bytes("VmRSS")
            except OSError:
                pass  # not Linux: the peak then counts from the process's start

    def peak_bytes(self) -> float:
        if self._is_cuda:
            return float(torch.cuda.max_memory_allocated()) - self._before_bytes
        try:
            return _status_bytes("VmHWM") - self._before_bytes
        except OSError:
            return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB)


def _status_bytes(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return float(line.split()[1]) * KIB
    raise OSError(f"the kernel does not report {name}")
