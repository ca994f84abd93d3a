"""How well a measured run uses memory: what its phases must read over the measured ceiling, and its peak over the plan.

    MBU = bytes that must be read / (time · measured bandwidth)

Bytes are those of the weights that a pass touches (of experts: those that its tokens choose, if evenly) and of what it
sees of caches and states, each once, of all ranks together; the bandwidth is that of all ranks together. Activations,
and what a kernel reads twice, are not counted: they are what keeps the share below 1.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from magicdec.measure.ceilings import bandwidth_bytes_per_s
from magicdec.measure.configuration import BenchmarkRequest, model_setup, planned_memory
from magicdec.perfmodel.setup import draft_kv_tokens
from magicdec.perfmodel.step import read_bytes
from magicdec.runtime.distributed import TensorParallel
from magicdec.specs.speculation import AUTOREGRESSIVE, SpeculationSpec
from magicdec.units import KIB


def all_ranks_bandwidth_bytes_per_s(tp: TensorParallel, device: str) -> float:
    """Memory bandwidth that the ranks reach together: each reads at the same time."""
    tp.all_reduce(torch.zeros(1, device=device))
    own = torch.tensor(bandwidth_bytes_per_s(device=device), dtype=torch.float64, device=device)
    return float(tp.all_reduce(own))


def phase_bytes(
    request: BenchmarkRequest, prompt_lens: Sequence[int], speculation: SpeculationSpec
) -> dict[str, float]:
    """Bytes that each phase of a step must read; `draft` is the block's gamma steps together, and `autoregressive` a
    step without them.

    KV lengths are those of the middle of the generation.
    """
    setup = model_setup(request, speculation)
    kv_len = float(np.mean(prompt_lens)) + request.gen_len / 2
    seen = draft_kv_tokens(setup, kv_len, speculation.draft_budget)
    needed = read_bytes(
        setup, batch=request.batch_size, kv_len=kv_len, draft_kv_len=seen, gamma=speculation.gamma
    )  # fmt: skip
    return {phase: float(num_bytes) for phase, num_bytes in needed.items()}


def planned_memory_bytes(request: BenchmarkRequest) -> float:
    """Memory that the fullest configuration of a request needs on each rank, by the planner."""
    needs = [planned_memory(request, each) for each in (AUTOREGRESSIVE, *request.speculations)]
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
                Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak starts anew
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
