"""A plan's best gamma by batch and context, as what runs it looks it up step by step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from magicdec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TableGamma:
    """A plan's best gamma by batch and context; what lies between is looked up at the nearest in logarithm. gammas:
    [batch][context], the axes ascending."""

    batch_sizes: tuple[int, ...]
    context_lens: tuple[int, ...]
    gammas: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        axes = (self.batch_sizes, self.context_lens)
        if any(not axis or min(axis) < 1 or list(axis) != sorted(set(axis)) for axis in axes):
            raise ConfigError("a gamma table's batch sizes and contexts must be positive and ascending")
        if len(self.gammas) != len(self.batch_sizes) or any(len(row) != len(self.context_lens) for row in self.gammas):
            raise ConfigError("a gamma table's rows do not fit its batch sizes and contexts")
        if any(gamma < 0 for row in self.gammas for gamma in row):
            raise ConfigError("a gamma table's entries must be at least 0")

    def choose(self, *, batch_size: int, context_len: float) -> int:
        return self.gammas[_nearest(self.batch_sizes, batch_size)][_nearest(self.context_lens, context_len)]

    @property
    def max_gamma(self) -> int:
        return self.distinct_gammas[0]

    @property
    def distinct_gammas(self) -> list[int]:
        """Every gamma that is chosen somewhere, the largest first."""
        return sorted({gamma for row in self.gammas for gamma in row}, reverse=True)

    @property
    def digest(self) -> str:
        """Tells tables apart."""
        return hashlib.sha256(repr((self.batch_sizes, self.context_lens, self.gammas)).encode()).hexdigest()[:12]


def _nearest(values: Sequence[int], wanted: float) -> int:
    return min(range(len(values)), key=lambda i: abs(math.log(values[i] / wanted)))
