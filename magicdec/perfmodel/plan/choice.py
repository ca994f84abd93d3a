"""The rules by which a plan chooses: one objective, one limit rule, one deepest gamma. The search,
the planner, plans for a rate, gamma tables and advice on a running server all choose by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from magicdec.counts import Array
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.hybrids import repeated_error_s
from magicdec.perfmodel.speedup import BoolArray, Prediction
from magicdec.schema import Candidate, LaneEvidence, Outcome

EXTRA_PACKAGES = {"suffix": "arctic-inference"}
"""Packages that serving engines need for a draft and do not bring along."""
NEARLY_AS_FAST = 0.03
"""Difference of two drafts' rates, relative, up to which they may be tied."""
SURELY_AHEAD = 0.75
"""Probability of being faster from which one is not tied with another."""
DEFAULT_MAX_GAMMA = 12
"""Deepest gamma that is searched."""


class Objective(NamedTuple):
    """Order of configurations: those within the limits first, then those that fit in memory, then
    by generated tokens per second of all devices, or by what they lose on texts that were not named
    (texts.py).
    """

    is_within_limits: bool
    fits: bool
    score: float


def objective(row: Candidate) -> Objective:
    return Objective(row.within_limits, row.fits, row.rate)


class ArrivalsObjective(NamedTuple):
    """Order of layouts that keep the limits under arrivals, the least first: fewer devices, then a
    higher rate of requests.
    """

    num_gpus: int
    negative_rate: float


def arrivals_objective(num_gpus: int, requests_per_s: float) -> ArrivalsObjective:
    return ArrivalsObjective(num_gpus, -requests_per_s)


def keeps_limits(
    between_tokens_s: Any,
    first_token_s: Any,
    *,
    tpot_limit_s: float | None,
    ttft_limit_s: float | None,
) -> BoolArray:
    """Whether times keep the limits on latency; arrays broadcast."""
    kept = np.ones((), dtype=np.bool_)
    if tpot_limit_s is not None:
        kept = kept & (np.asarray(between_tokens_s) <= tpot_limit_s)
    if ttft_limit_s is not None:
        kept = kept & (np.asarray(first_token_s) <= ttft_limit_s)
    return kept


def deepest_gamma(acceptance: AcceptanceProfile) -> int:
    """The deepest gamma to choose: none is chosen deeper than its acceptance is known."""
    if acceptance.max_gamma is None:
        return DEFAULT_MAX_GAMMA
    return min(acceptance.max_gamma, DEFAULT_MAX_GAMMA)


def is_sure_depth(prediction: Prediction) -> BoolArray:
    """Whether each point, whose last axis is gamma, drafts no deeper than is best if attention that
    drafted tokens may repeat takes one standard deviation longer.

    Reports disagree on that cost (perfmodel/hybrids.py), which grows with gamma: by its middle deeper
    drafts gain a little where they were measured to lose.
    """
    error_s = repeated_error_s(prediction.terms.verify)
    if not np.any(error_s):
        return np.ones((), dtype=np.bool_)
    gamma = prediction.full(prediction.points.gamma)
    longer = 1.0 + error_s / prediction.step_s
    cautious = prediction.full(prediction.speedup / longer)
    best = np.argmax(cautious, axis=-1)[..., None]
    is_sure: BoolArray = gamma <= np.take_along_axis(gamma, best, axis=-1)
    return is_sure


def best_of_each_batch(
    score: Array,
    *,
    is_valid: BoolArray,
    is_within_limits: BoolArray,
    fits: BoolArray,
) -> npt.NDArray[np.int64]:
    """Flat index of the best point of each batch, which is the first axis of all arrays: valid
    points before others, then as `objective` orders them, with `score` for the rate.
    """
    num_batches = score.shape[0]
    losses = (-score, ~fits, ~is_within_limits, ~is_valid)
    keys = [each.reshape(num_batches, -1) for each in losses]
    best = np.lexsort(keys, axis=-1)[:, 0]
    return np.arange(num_batches) * keys[0].shape[1] + best


def preferred(
    best: Candidate,
    tied: Sequence[Candidate],
    evidence: Callable[[Candidate], LaneEvidence],
) -> Candidate:
    """The one to take of drafts that are as good: one that was checked on servers, that needs no
    extra package, that drafts less."""

    def order(row: Candidate) -> tuple[bool, bool, int]:
        is_unchecked = evidence(row).rows == 0
        return is_unchecked, row.draft_method in EXTRA_PACKAGES, row.gamma

    return min([best, *tied], key=order)


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Rows that compete, ranked."""

    place: int
    """Place among the requested loads."""
    best: Candidate
    """The configuration to run."""
    drafted: list[Candidate]
    """The drafted rows, best first."""


def choose(
    place: int,
    alone: Sequence[Candidate],
    drafted: Sequence[Candidate],
    is_admitted: Callable[[Candidate], bool],
    score: Callable[[Candidate], float] | None = None,
) -> Ranking:
    """The configuration to run of rows that compete, by `objective`: the rate is the expected one,
    whatever is known of a draft's acceptance. Drafts that are not admitted are ranked behind the
    others, and never chosen. `score` replaces the rate.
    """

    def objective(row: Candidate) -> Objective:
        value = row.rate if score is None else score(row)
        return Objective(row.within_limits, row.fits, value)

    def order(row: Candidate) -> tuple[bool, Objective]:
        return is_admitted(row), objective(row)

    ranked = sorted(drafted, key=order, reverse=True)
    admitted = [row for row in ranked if is_admitted(row)]
    best = max([*alone, *admitted], key=objective, default=None)
    if best is None:
        best = ranked[0]  # nothing else runs here at all
    return Ranking(place=place, best=best, drafted=ranked)


def fastest_left_out(
    ranking: Ranking, is_admitted: Callable[[Candidate], bool]
) -> Candidate | None:
    """The drafted row of the same batch with the highest gain, where no draft is chosen; of all
    batches where none is of the same.
    """
    if ranking.best.is_speculative:
        return None
    admitted = [row for row in ranking.drafted if is_admitted(row)]
    same_batch = [row for row in admitted if row.batch_size == ranking.best.batch_size]
    return max(same_batch or admitted, key=_speedup, default=None)


def _speedup(row: Candidate) -> float:
    return row.gain.speedup


def outcome_of(
    best: Candidate,
    left_out: Candidate | None,
    to_train: Candidate | None,
    *,
    lacks_acceptance: bool,
) -> Outcome:
    """Whether speculation is chosen, or why not. `left_out`: the fastest draft that is not chosen;
    `to_train`: the best that is not published."""
    if best.is_speculative:
        return "speculate"
    if left_out is None:
        if to_train is not None:
            return "not published"
        if lacks_acceptance:
            return "no acceptance"
        return "not asked"
    if left_out.gain.speedup <= 1.0:
        return "no gain"
    if not left_out.fits:
        return "no room"
    if not left_out.within_limits:
        return "over limits"
    return "no gain"


def faster_with_plugin(
    ranking: Ranking, is_admitted: Callable[[Candidate], bool]
) -> Candidate | None:
    """The best row of drafts that need the plugin, where they are not admitted and it beats the
    choice.
    """
    others = []
    for row in ranking.drafted:
        if row.drafting.needs_plugin and not is_admitted(row):
            others.append(row)
    best = max(others, key=objective, default=None)
    if best is None or objective(best) <= objective(ranking.best):
        return None
    return best


def best_to_train(ranking: Ranking) -> Candidate | None:
    """The best row of drafts that are not published for the model."""
    rows = [row for row in ranking.drafted if row.drafting.is_hypothetical]
    return max(rows, key=objective, default=None)


def same_configuration(row: Candidate, other: Candidate) -> bool:
    """Whether two rows run the same draft, gamma, layout and batch."""
    return configuration(row) == configuration(other)


def configuration(row: Candidate) -> tuple[object, ...]:
    """The draft, gamma, layout and batch of a row: what tells configurations of a case apart."""
    return (*at_any_gamma(row), row.gamma)


def at_any_gamma(row: Candidate) -> tuple[object, ...]:
    """A row's configuration but for its gamma."""
    draft = (row.draft, row.draft_method, row.draft_budget)
    layout = (
        row.layout.tp_size,
        row.layout.pp_size,
        row.layout.dp_size,
        row.layout.ep_size,
    )
    return (*draft, *layout, row.batch_size)


def pareto(rows: Iterable[Candidate]) -> list[Candidate]:
    """Rows that no other beats in both latency and throughput of all devices, fastest first."""
    frontier: list[Candidate] = []
    highest = 0.0
    for row in sorted(rows, key=lambda each: (each.between_tokens_s, -each.rate)):
        if row.fits and row.within_limits and row.rate > highest:
            frontier.append(row)
            highest = row.rate
    return frontier
