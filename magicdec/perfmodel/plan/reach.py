"""The contexts at which drafts pay: the widest range in which a draft's best gamma and budget beat
decoding without it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.plan.gamma import Axes, best_gammas, grid_of, runs_of, span_of
from magicdec.perfmodel.plan.request import Case, DraftOption
from magicdec.perfmodel.speedup import predict
from magicdec.schema import Candidate, Reach, Span


def reaches_of(
    case: Case,
    best: Candidate,
    options: Sequence[DraftOption],
) -> list[Reach]:
    """The reaches of drafts at the best candidate's batch and tp, of those that can run. Contexts
    at which not even autoregressive decoding fits are left out."""
    contexts = _contexts(case, best)
    reaches: list[Reach] = []
    if not len(contexts):
        return reaches
    for option in options:
        reach = _reach(case, option, best, contexts)
        if reach is not None:
            reaches.append(reach)
    return reaches


def _contexts(case: Case, best: Candidate) -> Array:
    fine = Axes.of(case, best).fine
    points = grid_of(case, best, (best.batch_size,), fine)
    alone = predict(case.setup(None), None, points)
    fits = alone.full(alone.memory.fits).ravel()
    return np.asarray(fine[fits][::2])


def _reach(
    case: Case, option: DraftOption, best: Candidate, contexts: Array
) -> Reach | None:
    """The contexts at which a draft pays at the best candidate's batch and tp, up to the longest at
    which it can run. None: it cannot run."""
    points = grid_of(case, best, (best.batch_size,), contexts, option)
    drafted = best_gammas(
        case, option, points, np.ones((1, len(contexts)), dtype=np.bool_)
    )
    if not drafted.is_usable.any():
        return None
    longest = int(np.flatnonzero(drafted.is_usable[0])[-1])
    upto = slice(longest + 1)
    contexts = contexts[upto]
    pays, surely, possibly = _spans(
        contexts,
        drafted.speedup[0, upto],
        drafted.low[0, upto],
        drafted.high[0, upto],
    )
    return Reach(
        draft=option.draft,
        draft_method=option.method,
        batch_size=best.batch_size,
        pays=pays,
        surely=surely,
        possibly=possibly,
        contexts=(round(float(contexts[0])), round(float(contexts[-1]))),
    )


def _spans(
    contexts: Array,
    speedups: Array,
    low: Array,
    high: Array,
) -> tuple[Span | None, Span | None, Span | None]:
    """The widest range of contexts that pays, the widest inside it that surely does, and the one
    around it that possibly does."""

    def widest(runs: list[Span]) -> Span | None:
        return max(
            runs, key=lambda run: contexts[run[1]] / contexts[run[0]], default=None
        )

    def span(values: Array, run: Span | None) -> Span | None:
        if run is None:
            return None
        return span_of(contexts, values, run)

    pays = widest(runs_of(speedups))
    around = runs_of(high)
    inside: list[Span] = []
    if pays is not None:
        inside = [run for run in runs_of(low) if pays[0] <= run[0] <= pays[1]]
        around = [run for run in around if run[0] <= pays[0] <= run[1]]
    surely = widest(inside)
    possibly = widest(around)
    return span(speedups, pays), span(low, surely), span(high, possibly)
