"""A plan's best gamma by batch and context, and the one rule by which it is looked up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from magicdec.errors import ConfigError


class BatchBand(NamedTuple):
    """Batch sizes, from the first to the last, with one gamma."""

    first: int
    last: int
    gamma: int


class TableGamma(msgspec.Struct, frozen=True, kw_only=True):
    """A plan's best gamma by batch and context; a batch or context between two of the table takes
    the nearest in logarithm. gammas: [batch][context], the axes ascending.
    """

    batch_sizes: tuple[int, ...]
    context_lens: tuple[int, ...]
    gammas: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for axis in (self.batch_sizes, self.context_lens):
            if not axis or axis[0] < 1 or list(axis) != sorted(set(axis)):
                raise ConfigError(
                    "a gamma table's batch sizes and contexts must be positive and ascending"
                )
        lengths = [len(row) for row in self.gammas]
        if lengths != [len(self.context_lens)] * len(self.batch_sizes):
            raise ConfigError(
                "a gamma table's rows do not fit its batch sizes and contexts"
            )
        if min(map(min, self.gammas)) < 0:
            raise ConfigError("a gamma table's entries must be at least 0")

    def choose(self, *, batch_size: int, context_len: float) -> int:
        row = self.gammas[nearest(self.batch_sizes, batch_size)]
        return row[nearest(self.context_lens, context_len)]

    def at_context(self, context_len: float) -> TableGamma:
        """The table of one context: gamma by batch alone."""
        column = nearest(self.context_lens, context_len)
        return msgspec.structs.replace(
            self,
            context_lens=(self.context_lens[column],),
            gammas=tuple((row[column],) for row in self.gammas),
        )

    def bands(self, context_len: float, *, most: int | None = None) -> list[BatchBand]:
        """Ranges of the batch size that `choose` gives one gamma each at a context, without gaps
        from batch 1 to `most` (default: the table's last batch).
        """
        column = nearest(self.context_lens, context_len)
        end = most
        if end is None:
            end = self.batch_sizes[-1]
        lasts = []
        for here, after in pairwise(self.batch_sizes):
            lasts.append(math.isqrt(here * after))
        lasts.append(end)
        bands: list[BatchBand] = []
        first = 1
        for row, last in zip(self.gammas, lasts, strict=True):
            gamma = row[column]
            last_within = min(last, end)
            if last_within < first:
                continue
            if bands and bands[-1].gamma == gamma:
                bands[-1] = bands[-1]._replace(last=last_within)
            else:
                bands.append(BatchBand(first, last_within, gamma))
            first = last + 1
        return bands

    @property
    def max_gamma(self) -> int:
        return self.distinct_gammas[0]

    @property
    def distinct_gammas(self) -> list[int]:
        """Every gamma that is chosen somewhere, the largest first."""
        gammas: set[int] = set().union(*self.gammas)
        return sorted(gammas, reverse=True)

    @property
    def digest(self) -> str:
        """Identifies the table."""
        import hashlib  # OpenSSL takes as long to load as a row to price

        text = repr((self.batch_sizes, self.context_lens, self.gammas))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def nearest(values: Sequence[int], wanted: float) -> int:
    """Index of the value nearest to `wanted` in logarithm, the smaller of two as near; the values
    ascend.
    """
    squared = wanted * wanted
    for index, (here, after) in enumerate(pairwise(values)):
        if squared <= here * after:
            return index
    return len(values) - 1
