"""Chooses the number of drafted tokens each step from what was accepted and how long steps took so far.

    tokens per second of gamma = (1 + rate_1 + rate_1·rate_2 + ..) / step time of gamma

Rates are running estimates by position (a position not reached yet takes the rate before it); step times are medians of
the latest ones, and for a gamma without any the line through the others. A policy keeps what it learnt from run to run.
"""

from __future__ import annotations

import statistics
from collections import deque
from itertools import pairwise
from typing import Protocol

import numpy as np

from magicdec.counts import expected_tokens_per_step

FIRST_RATE = 0.7
PRIOR_TRIALS = 4.0
DECAY = 0.98
"""Weight of what was accepted a step earlier."""
KEPT_TIMES = 15
TRIES_EACH = 4
"""Steps of each gamma tried at the start; the first of a gamma allocates and is not counted."""
EXPLORE_EVERY = 16
EXPLORE_ABOVE = 0.85
"""Another gamma is tried again when it promises this share of the best one's throughput."""


class GammaPolicy(Protocol):
    """Chooses each step's gamma."""

    def choose(self, *, batch_size: int, context_len: float) -> int:
        """The next step's gamma, for this many active sequences of this mean length."""

    def observe(self, gamma: int, num_accepted: np.ndarray, step_s: float) -> None:
        """Hears of a step: how much of `gamma` drafted tokens each sequence accepted, and its wall-clock."""


class AdaptiveGamma:
    """0..max_gamma drafted tokens: at first a few values in turn, then the best, now and then one that comes close."""

    def __init__(self, max_gamma: int) -> None:
        self.max_gamma = max_gamma
        self._trials = [0.0] * max_gamma
        self._accepted = [0.0] * max_gamma
        self._times: list[deque[float]] = [deque(maxlen=KEPT_TIMES) for _ in range(max_gamma + 1)]
        self._medians: dict[int, float] = {}
        self._seen = [0] * (max_gamma + 1)
        self._last_step = [0] * (max_gamma + 1)
        self._step = 0
        first = dict.fromkeys((max_gamma, 0, (max_gamma + 1) // 2))
        self._to_try = [gamma for gamma in first for _ in range(TRIES_EACH)]

    def choose(self, *, batch_size: int, context_len: float) -> int:
        """The next step's gamma; batch and context show in the step times, which are what counts here."""
        if self._to_try:
            return self._to_try[0]
        values = self.tokens_per_s()
        best = max(range(len(values)), key=values.__getitem__)
        if self._step % EXPLORE_EVERY == 0:
            close = [g for g, value in enumerate(values) if g != best and value >= EXPLORE_ABOVE * values[best]]
            return min(close, key=self._last_step.__getitem__, default=best)
        return best

    def observe(self, gamma: int, num_accepted: np.ndarray, step_s: float) -> None:
        """Learns from a step."""
        if self._to_try and self._to_try[0] == gamma:
            self._to_try.pop(0)
        self._step += 1
        self._last_step[gamma] = self._step
        for position in range(gamma):
            self._trials[position] = DECAY * self._trials[position] + float((num_accepted >= position).sum())
            self._accepted[position] = DECAY * self._accepted[position] + float((num_accepted > position).sum())
        self._seen[gamma] += 1
        if self._seen[gamma] > 1:
            self._times[gamma].append(step_s)
            self._medians[gamma] = statistics.median(self._times[gamma])

    def rates(self) -> list[float]:
        """Estimated P(position accepted | all before it accepted)."""
        rates, before = [], FIRST_RATE
        for accepted, trials in zip(self._accepted, self._trials, strict=True):
            before = (accepted + PRIOR_TRIALS * before) / (trials + PRIOR_TRIALS)
            rates.append(before)
        return rates

    def tokens_per_s(self) -> list[float]:
        """Estimated throughput per sequence of each gamma."""
        gammas = np.arange(self.max_gamma + 1)
        expected = expected_tokens_per_step(self.rates(), gammas).tolist()
        return [tokens / self._step_time_s(gamma) for gamma, tokens in enumerate(expected)]

    def _step_time_s(self, gamma: int) -> float:
        """A median of its own, or the line through the nearest measured neighbours (beyond them: through the ends)."""
        if gamma in self._medians:
            return self._medians[gamma]
        known = sorted(self._medians)
        if len(known) < 2:
            return self._medians[known[0]] if known else 1.0
        low, high = next(((a, b) for a, b in pairwise(known) if gamma < b), (known[-2], known[-1]))
        slope = max(0.0, (self._medians[high] - self._medians[low]) / (high - low))
        return self._medians[low] + slope * (gamma - low)
