"""Counts of accepted drafts, the rates by position that they show, and the tokens per step that
rates give.

    rate_i = accepted_i / tried_i                        P(draft i accepted | all before it
    accepted)
    E(γ)   = 1 + Σ_{i ≤ γ} Π_{j ≤ i} rate_j              tokens per step: the verification adds one

Blocks of one sequence are alike, so sequences are clusters: the standard error of a ratio r = Σ a_c
/ Σ n_c of C clusters is linearised, se² = C/(C − 1) · Σ (a_c − r·n_c)² / (Σ n_c)².
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Z_90 = 1.6448536269514715
"""A normal variable lies within ± this many standard deviations with probability 0.9."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Drafted and accepted tokens of some clusters (sequences, or intervals of time), by position
    in their block.
    """

    steps: Array
    """Decoding steps of each cluster, without a draft too: [clusters]."""
    tried: Array
    """Drafts at each position whose predecessors were all accepted: [clusters, positions]."""
    accepted: Array
    """Drafts accepted at each position: [clusters, positions]."""

    @classmethod
    def of_survivors(cls, survivors: Iterable[Sequence[float] | Array]) -> Counts:
        """From the steps of each cluster that accepted at least 0, 1, 2, … drafts, all of as many
        drafts as that says; clusters of shorter blocks tried nothing beyond them."""
        rows = [np.asarray(each, dtype=np.float64) for each in survivors]
        width = max(map(len, rows))
        reached = np.stack([np.pad(row, (0, width - len(row))) for row in rows])
        lengths = np.array([len(row) - 1 for row in rows])[:, None]
        tried = np.where(np.arange(width - 1) < lengths, reached[:, :-1], 0.0)
        return cls(steps=reached[:, 0], tried=tried, accepted=reached[:, 1:])

    @classmethod
    def of_lists(
        cls,
        steps: Sequence[Any],
        tried: Sequence[Any],
        accepted: Sequence[Any],
    ) -> Counts:
        """From what `to_lists` gave."""
        return cls(steps=np.array(steps), tried=np.array(tried), accepted=np.array(accepted))

    def to_lists(self) -> tuple[Any, Any, Any]:
        return self.steps.tolist(), self.tried.tolist(), self.accepted.tolist()

    @classmethod
    def of_histograms(cls, histograms: Any) -> Counts:
        """From how often 0, 1, … drafts were accepted: [clusters, positions + 1]."""
        counted = np.asarray(histograms, dtype=np.float64)
        return cls.of_survivors(counted[:, ::-1].cumsum(axis=1)[:, ::-1])

    @classmethod
    def of_steps(cls, num_accepted: Any, drafted: Any, positions: int) -> Counts:
        """From the drafts accepted in each step of each sequence, [steps, sequences] (negative
        where it had none), of `drafted` in that step: [steps]."""
        accepted = np.asarray(num_accepted)[..., None]
        place = np.arange(positions)
        is_drafted = np.asarray(drafted)[:, None, None] > place
        return cls(
            steps=(accepted[..., 0] >= 0).sum(axis=0).astype(np.float64),
            tried=((accepted >= place) & is_drafted).sum(axis=0).astype(np.float64),
            accepted=(accepted > place).sum(axis=0).astype(np.float64),
        )

    def __add__(self, other: Counts) -> Counts:
        """More counts of the same clusters."""
        return Counts(
            steps=self.steps + other.steps,
            tried=self.tried + other.tried,
            accepted=self.accepted + other.accepted,
        )

    def cells(self) -> Iterator[tuple[int, int, float, float]]:
        """(cluster, position from 1 on, tried, accepted) of all that were tried."""
        for cluster, position in np.argwhere(self.tried > 0).tolist():
            yield (
                cluster,
                position + 1,
                float(self.tried[cluster, position]),
                float(self.accepted[cluster, position]),
            )

    @property
    def trials(self) -> list[int]:
        """Drafts tried at each position."""
        return [round(each) for each in self.tried.sum(axis=0).tolist()]

    @property
    def rates(self) -> list[float]:
        """Rate of each position; 0 where none was tried."""
        return [rate for rate, _ in self._rates()]

    @property
    def stderr(self) -> list[float]:
        """Standard error of each position's rate."""
        return [stderr for _, stderr in self._rates()]

    def _rates(self) -> list[tuple[float, float]]:
        columns = zip(self.accepted.T, self.tried.T, strict=True)
        return [
            rate_and_error(accepted, tried) if tried.sum() else (0.0, 0.5)
            for accepted, tried in columns
        ]

    @property
    def histogram(self) -> list[int]:
        """How many steps accepted 0, 1, … drafts."""
        reached = [self.steps.sum(), *self.accepted.sum(axis=0), 0.0]
        return [round(more - fewer) for more, fewer in pairwise(reached)]

    @property
    def tokens_per_step(self) -> float:
        """Mean over all steps."""
        return 1.0 + float(self.accepted.sum() / self.steps.sum())

    @property
    def tokens_stderr(self) -> float | None:
        """Standard error of the tokens per step; None for one cluster."""
        return clustered_stderr(self.accepted.sum(axis=1), self.steps)

    def record_fields(self) -> dict[str, Any]:
        """A record's fields on what was accepted."""
        return {
            "tokens_per_step_stderr": self.tokens_stderr,
            "acceptance_by_position": self.rates,
            "acceptance_stderr_by_position": self.stderr,
            "acceptance_trials_by_position": self.trials,
            "acceptance_histogram": self.histogram,
        }


def clustered_stderr(above: Any, below: Any) -> float | None:
    """Standard error of Σ above / Σ below, by cluster; None for one cluster."""
    above, below = (np.atleast_1d(np.asarray(each, dtype=np.float64)) for each in (above, below))
    clusters = len(below)
    if clusters < 2:
        return None
    excess = above - below * above.sum() / below.sum()
    return float(np.sqrt(clusters / (clusters - 1) * np.sum(excess**2)) / below.sum())


def rate_and_error(accepted: Any, tried: Any) -> tuple[float, float]:
    """A rate and its standard error, from the counts of clusters.

    The error is the clustered one, but no less than of independent trials, with half a success and
    half a failure added so that an observed 0 or 1 is not taken as certain.
    """
    trials = float(np.sum(tried))
    rate = float(np.sum(accepted)) / trials
    smooth = (rate * trials + 0.5) / (trials + 1.0)
    independent = math.sqrt(smooth * (1.0 - smooth) / trials)
    return rate, max(independent, clustered_stderr(accepted, tried) or 0.0)


def survival(rates: Any) -> Array:
    """P(at least i drafts accepted), i = 1..γ: the running product of the conditional rates."""
    values: Array = np.asarray(rates, dtype=np.float64)
    return np.asarray(np.cumprod(np.clip(values, 0.0, 1.0), axis=-1), dtype=np.float64)


def expected_tokens_per_step(rates: Any, gamma: Any) -> Array:
    """E(γ). `rates` has positions on its last axis, at least max(gamma) of them; `gamma` broadcasts
    against the other axes."""
    rates = np.asarray(rates, dtype=np.float64)
    depth: npt.NDArray[np.int64] = np.asarray(gamma, dtype=np.int64)
    if depth.size and (depth.min() < 0 or depth.max() > rates.shape[-1]):
        raise ValueError(
            f"gamma must be between 0 and the {rates.shape[-1]} positions that rates has"
        )
    first = np.ones((*rates.shape[:-1], 1))
    totals = np.concatenate([first, 1.0 + np.cumsum(survival(rates), axis=-1)], axis=-1)
    shape = np.broadcast_shapes(totals.shape[:-1], depth.shape)
    totals = np.broadcast_to(totals, (*shape, totals.shape[-1]))
    return np.asarray(
        np.take_along_axis(totals, np.broadcast_to(depth, shape)[..., None], axis=-1)[..., 0]
    )


def constant_rate(tokens_per_step: Any, gamma: Any) -> Array:
    """The rate that, alike at all positions, gives these tokens per step: (1 − α^(γ+1)) / (1 − α),
    by bisection.
    """
    low = np.zeros_like(tokens_per_step, dtype=np.float64)
    high = np.full_like(tokens_per_step, 1.0, dtype=np.float64)
    for _ in range(50):
        middle = 0.5 * (low + high)
        is_low = (1.0 - middle ** (np.asarray(gamma) + 1.0)) / (1.0 - middle) < tokens_per_step
        low = np.where(is_low, middle, low)
        high = np.where(is_low, high, middle)
    return np.asarray(0.5 * (low + high))
