"""How well a measured run uses memory: what its phases must read over the measured ceiling, and its peak over the plan.

    MBU = bytes that must be read / (time · measured bandwidth)

Bytes are those of weights and of cached keys and values, each once, of all ranks together; the bandwidth is that of all
ranks together. Activations, and what a kernel reads twice, are not counted: they are what keeps the share below 1.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from magicdec.measure.ceilings import bandwidth_bytes_per_s
from magicdec.measure.configuration import BenchmarkRequest, model_setup, planned_memory
from magicdec.perfmodel.memory import pass_bytes
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
    """Bytes that each phase of a step must read; `draft` is the block's gamma steps together.

    KV lengths are those of the middle of the generation.
    """
    setup = model_setup(request, speculation)
    kv_tokens = request.batch_size * (float(np.mean(prompt_lens)) + request.gen_len / 2)
    target = float(pass_bytes(setup.model, setup.precision, kv_tokens=kv_tokens))
    if speculation.is_autoregressive:
        return {"verify": target}
    if setup.kind == "ngram":
        return {"draft": 0.0, "verify": target}
    if speculation.draft_budget is not None:
        kv_tokens = min(kv_tokens, float(request.batch_size * speculation.draft_budget))
    draft = float(pass_bytes(setup.drafter, setup.drafting_precision, kv_tokens=kv_tokens))
    return {"draft": speculation.gamma * draft, "verify": target}


def autoregressive_step_bytes(request: BenchmarkRequest, prompt_lens: Sequence[int]) -> float:
    """Bytes that one autoregressive step must read."""
    return phase_bytes(request, prompt_lens, AUTOREGRESSIVE)["verify"]


def planned_memory_bytes(request: BenchmarkRequest) -> float:
    """What the planner says the fullest configuration of a request takes of each rank's memory."""
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
