"""A plan's best gamma by batch and context, and the one rule by which it is looked up."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from magicdec.errors import ConfigError


class Band(NamedTuple):
    """Batch sizes, from the first to the last, with one gamma."""

    first: int
    last: int
    gamma: int


@dataclass(frozen=True, kw_only=True)
class TableGamma:
    """A plan's best gamma by batch and context; a batch or context between two of the table takes
    the nearest in logarithm. gammas: [batch][context], the axes ascending.
    """

    batch_sizes: tuple[int, ...]
    context_lens: tuple[int, ...]
    gammas: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        axes = (self.batch_sizes, self.context_lens)
        if any(not axis or min(axis) < 1 or list(axis) != sorted(set(axis)) for axis in axes):
            raise ConfigError(
                "a gamma table's batch sizes and contexts must be positive and ascending"
            )
        if len(self.gammas) != len(self.batch_sizes) or any(
            len(row) != len(self.context_lens) for row in self.gammas
        ):
            raise ConfigError("a gamma table's rows do not fit its batch sizes and contexts")
        if any(gamma < 0 for row in self.gammas for gamma in row):
            raise ConfigError("a gamma table's entries must be at least 0")

    def choose(self, *, batch_size: int, context_len: float) -> int:
        row = self.gammas[nearest(self.batch_sizes, batch_size)]
        return row[nearest(self.context_lens, context_len)]

    def at_context(self, context_len: float) -> TableGamma:
        """The table of one context: gamma by batch alone."""
        column = nearest(self.context_lens, context_len)
        return replace(
            self,
            context_lens=(self.context_lens[column],),
            gammas=tuple((row[column],) for row in self.gammas),
        )

    def is_one_at(self, contexts: tuple[float, float]) -> bool:
        """Whether gamma is by batch alone between these contexts."""
        low, high = (nearest(self.context_lens, each) for each in contexts)
        return all(len(set(row[low : high + 1])) == 1 for row in self.gammas)

    def bands(self, context_len: float, *, most: int | None = None) -> list[Band]:
        """Ranges of the batch size that `choose` gives one gamma each at a context, without gaps
        from batch 1 to `most` (default: the table's last batch).
        """
        column = nearest(self.context_lens, context_len)
        if most is None:
            end = self.batch_sizes[-1]
        else:
            end = most
        lasts = [math.isqrt(here * after) for here, after in pairwise(self.batch_sizes)]
        bands: list[Band] = []
        first = 1
        for row, last in zip(self.gammas, [*lasts, end], strict=True):
            gamma = row[column]
            if min(last, end) < first:
                continue
            if bands and bands[-1].gamma == gamma:
                bands[-1] = bands[-1]._replace(last=min(last, end))
            else:
                bands.append(Band(first, min(last, end), gamma))
            first = last + 1
        return bands

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
        return hashlib.sha256(
            repr((self.batch_sizes, self.context_lens, self.gammas)).encode()
        ).hexdigest()[:12]


def nearest(values: Sequence[int], wanted: float) -> int:
    """Index of the value nearest to `wanted` in logarithm, the smaller of two as near; the values
    ascend.
    """
    index = 0
    while index + 1 < len(values) and wanted * wanted > values[index] * values[index + 1]:
        index += 1
    return index
