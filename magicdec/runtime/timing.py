"""Wall-clock time by phase. With fences off nothing is measured and nothing waits for the device."""

from __future__ import annotations

import time
from collections import defaultdict

import torch


class PhaseTimer:
    """Splits a loop into phases: entering one closes the phase before it.

    Each time the device is waited for, so that phases do not overlap; that wait is what a run without fences saves.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled
        self.phases: dict[str, list[float]] = defaultdict(list)
        self._is_cuda = device.type == "cuda"
        self._phase: str | None = None
        self._last_s = 0.0

    def start(self) -> None:
        """Begins, and forgets what was measured before."""
        self.phases.clear()
        self._phase = None
        if self.enabled:
            self._last_s = self._now_s()

    def enter(self, phase: str) -> None:
        """The first phase after `start` or `end` begins there."""
        self._close()
        self._phase = phase

    def end(self) -> None:
        """Closes the last phase of a round."""
        self._close()
        self._phase = None

    def phases_so_far(self) -> dict[str, list[float]]:
        """Seconds of each phase in each round that had it."""
        return {name: list(values) for name, values in self.phases.items()}

    def _close(self) -> None:
        if self.enabled and self._phase is not None:
            now_s = self._now_s()
            self.phases[self._phase].append(now_s - self._last_s)
            self._last_s = now_s

    def _now_s(self) -> float:
        if self._is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()
