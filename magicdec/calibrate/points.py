"""Timed points: an operation of one shape, and an engine's shapes. Neither torch nor an engine is needed."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

Shape = dict[str, int]


@dataclass(frozen=True)
class Point:
    """One timed operation: its shape, and seconds per call of each round."""

    table: str
    shape: Shape
    seconds: list[float]

    @property
    def time_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        if len(self.seconds) < 3:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / self.time_s


@dataclass(frozen=True)
class EngineShape:
    """A batch at a context, with a draft."""

    batch_size: int
    context_len: int
    draft_budget: int
    gamma: int

    def columns(self, *, is_greedy: bool) -> Shape:
        """As a timed point's shape."""
        return {**asdict(self), "is_greedy": int(is_greedy)}
