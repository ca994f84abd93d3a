"""Wall-clock time by phase. With fences off nothing is measured and nothing waits for the device."""

from __future__ import annotations

import time
from collections import defaultdict

import torch


class PhaseTimer:
    """Splits a loop into phases: each `lap` closes the stretch since the previous one under a phase's name.

    A lap waits for the device, so phases do not overlap; that wait is what a run without fences saves.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled
        self.phases: dict[str, list[float]] = defaultdict(list)
        self._is_cuda = device.type == "cuda"
        self._last_s = 0.0

    def start(self) -> None:
        """Begins, and forgets what was measured before."""
        self.phases.clear()
        if self.enabled:
            self._last_s = self._now_s()

    def lap(self, phase: str) -> None:
        if self.enabled:
            now_s = self._now_s()
            self.phases[phase].append(now_s - self._last_s)
            self._last_s = now_s

    def _now_s(self) -> float:
        if self._is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()
