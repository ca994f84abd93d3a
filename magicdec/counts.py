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
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from magicdec.units import INTERVAL_ENDS

Array = npt.NDArray[np.float64]
Z_90 = NormalDist().inv_cdf(INTERVAL_ENDS[1])
"""A normal variable lies within ± this many standard deviations with probability INTERVAL_SHARE."""

NOTHING = 0.005
"""Rate of first drafts up to which nothing is accepted: published drafts accept many times as much."""
ENOUGH_STEPS = 200
"""Drafts after which one that accepts nothing is known not to work."""
CAUSES = (
    "usual causes: a checkpoint of another method or target than it is served as (an EAGLE-3 head as "
    "EAGLE), prompts without the target's chat template, a fault of this version of the engine"
)
"""Why a draft accepts nothing."""


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
        """From the number of steps in each cluster that accepted at least 0, 1, 2, … drafts. All
        steps of a cluster had one draft per position; nothing was tried beyond the last."""
        rows = [np.asarray(row, dtype=np.float64) for row in survivors]
        width = max(map(len, rows))
        reached = np.zeros((len(rows), width))
        for cluster, row in enumerate(rows):
            reached[cluster, : len(row)] = row
        positions = np.arange(width - 1)
        lengths = np.array([len(row) - 1 for row in rows])
        is_drafted = positions < lengths[:, None]
        tried = np.where(is_drafted, reached[:, :-1], 0.0)
        return cls(steps=reached[:, 0], tried=tried, accepted=reached[:, 1:])

    @classmethod
    def of_lists(
        cls,
        steps: Sequence[Any],
        tried: Sequence[Any],
        accepted: Sequence[Any],
    ) -> Counts:
        """From what `to_lists` gave."""
        return cls(
            steps=np.array(steps), tried=np.array(tried), accepted=np.array(accepted)
        )

    def to_lists(self) -> tuple[Any, Any, Any]:
        return self.steps.tolist(), self.tried.tolist(), self.accepted.tolist()

    @classmethod
    def of_histograms(cls, histograms: Any) -> Counts:
        """From how often 0, 1, … drafts were accepted: [clusters, positions + 1]."""
        counted = np.asarray(histograms, dtype=np.float64)
        at_least = counted[:, ::-1].cumsum(axis=1)[:, ::-1]
        return cls.of_survivors(at_least)

    @classmethod
    def of_steps(cls, num_accepted: Any, drafted: Any, positions: int) -> Counts:
        """From the drafts accepted in each step of each sequence, [steps, sequences] (negative
        where it had none), of `drafted` in that step: [steps]."""
        accepted = np.asarray(num_accepted)[..., None]
        place = np.arange(positions)
        is_drafted = np.asarray(drafted)[:, None, None] > place
        has_draft = accepted[..., 0] >= 0
        is_tried = (accepted >= place) & is_drafted
        is_accepted = accepted > place
        return cls(
            steps=has_draft.sum(axis=0).astype(np.float64),
            tried=is_tried.sum(axis=0).astype(np.float64),
            accepted=is_accepted.sum(axis=0).astype(np.float64),
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
            tried = float(self.tried[cluster, position])
            accepted = float(self.accepted[cluster, position])
            yield cluster, position + 1, tried, accepted

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
        rates = []
        for accepted, tried in zip(self.accepted.T, self.tried.T, strict=True):
            if tried.sum():
                rates.append(rate_and_error(accepted, tried))
            else:
                rates.append((0.0, 0.5))
        return rates

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


def is_nothing(accepted: float, tried: float) -> bool:
    """Whether enough drafts were tried to know that next to none of their first tokens is accepted."""
    return tried >= ENOUGH_STEPS and accepted <= NOTHING * tried


def nothing_accepted(draft: str, *, accepted: float, tried: float) -> str:
    """The sentence that a draft does not work, by drafts whose first token was accepted."""
    name = f"{draft[0].upper()}{draft[1:]}"
    some = round(accepted) or "none"
    return f"{name} does not work: {some} of {tried:.0f} drafts had a token accepted."


def clustered_stderr(above: Any, below: Any) -> float | None:
    """Standard error of Σ above / Σ below, by cluster; None for one cluster."""
    above = np.atleast_1d(np.asarray(above, dtype=np.float64))
    below = np.atleast_1d(np.asarray(below, dtype=np.float64))
    clusters = len(below)
    if clusters < 2:
        return None
    whole = below.sum()
    excess = above - below * above.sum() / whole
    variance = clusters / (clusters - 1) * np.sum(excess**2)
    return float(np.sqrt(variance) / whole)


def rate_and_error(accepted: Any, tried: Any) -> tuple[float, float]:
    """A rate and its standard error, from the counts of clusters.

    The error is the clustered one, but no less than of independent trials, with half a success and
    half a failure added so that an observed 0 or 1 is not taken as certain.
    """
    trials = float(np.sum(tried))
    rate = float(np.sum(accepted)) / trials
    smooth = (rate * trials + 0.5) / (trials + 1.0)
    independent = math.sqrt(smooth * (1.0 - smooth) / trials)
    clustered = clustered_stderr(accepted, tried) or 0.0
    return rate, max(independent, clustered)


def survival(rates: Any) -> Array:
    """P(at least i drafts accepted), i = 1..γ: the running product of the conditional rates."""
    values: Array = np.asarray(rates, dtype=np.float64)
    valid = np.clip(values, 0.0, 1.0)
    return np.asarray(np.cumprod(valid, axis=-1), dtype=np.float64)


def expected_tokens_per_step(rates: Any, gamma: Any) -> Array:
    """E(γ). `rates` has positions on its last axis, at least max(gamma) of them; `gamma` broadcasts
    against the other axes."""
    return _at_depth(1.0 + np.cumsum(survival(rates), axis=-1), gamma)


def all_accepted(rates: Any, gamma: Any) -> Array:
    """The probability that all γ drafts are accepted; arrays as of `expected_tokens_per_step`."""
    return _at_depth(survival(rates), gamma)


def _at_depth(values: Array, gamma: Any) -> Array:
    """Values by position, on a last axis, at depth gamma: 1 where nothing is drafted."""
    depth: npt.NDArray[np.int64] = np.asarray(gamma, dtype=np.int64)
    if depth.size and (depth.min() < 0 or depth.max() > values.shape[-1]):
        raise ValueError(
            f"gamma must be between 0 and the {values.shape[-1]} positions that rates has"
        )
    undrafted = np.ones((*values.shape[:-1], 1))
    by_depth = np.concatenate([undrafted, values], axis=-1)
    if depth.ndim == 0:
        return np.asarray(by_depth[..., depth])
    shape = np.broadcast_shapes(by_depth.shape[:-1], depth.shape)
    by_depth = np.broadcast_to(by_depth, (*shape, by_depth.shape[-1]))
    chosen = np.broadcast_to(depth, shape)[..., None]
    return np.asarray(np.take_along_axis(by_depth, chosen, axis=-1)[..., 0])


def constant_rate(tokens_per_step: Any, gamma: Any) -> Array:
    """The rate that, alike at all positions, gives these tokens per step: (1 − α^(γ+1)) / (1 − α),
    by bisection.
    """
    low = np.zeros_like(tokens_per_step, dtype=np.float64)
    high = np.full_like(tokens_per_step, 1.0, dtype=np.float64)
    verified = np.asarray(gamma) + 1.0
    for _ in range(50):
        middle = 0.5 * (low + high)
        tokens = (1.0 - middle**verified) / (1.0 - middle)
        is_low = tokens < tokens_per_step
        low = np.where(is_low, middle, low)
        high = np.where(is_low, high, middle)
    return np.asarray(0.5 * (low + high))
