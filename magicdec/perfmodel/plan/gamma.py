"""The best gamma of a draft over batch and context, with its speedup and verdict; and the contexts
at which drafts pay.

A table is of the best configuration's draft and budget (where that is autoregressive, the leading
draft's), so an engine with this draft set up can follow it. Drafting nothing then costs something:
`idle_speedup`, and the best gamma when that is what it is compared with. Where a length is
generated, whole requests say whether a draft pays, as in the ranking; the speedups shown are of
decoding, which is what is measured. A draft's reach is the widest stretch of contexts in which its
best gamma and budget are faster than decoding without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.drafting import draft_kv_tokens
from magicdec.perfmodel.intervals import interval, tokens_error
from magicdec.perfmodel.plan.request import Case, DraftOption
from magicdec.perfmodel.serving import WholeRequests, whole_requests
from magicdec.perfmodel.setup import Points
from magicdec.perfmodel.speedup import BoolArray, Prediction, predict
from magicdec.perfmodel.step import idle_step_s
from magicdec.plan_document import GammaTable, Reach, Span
from magicdec.plan_rows import Candidate, verdict_of

NUM_BREAK_EVEN_CONTEXTS = 65
VERDICTS = np.vectorize(lambda low, high: verdict_of(speedup_low=low, speedup_high=high))
TABLE_BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
TABLE_CONTEXTS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)


@dataclass(frozen=True, kw_only=True)
class Best:
    """A draft at its best gamma and budget of each batch and context; arrays are [batch, context]."""

    rows: Prediction
    is_usable: BoolArray
    """Whether it can run: with a budget below the context, and in memory wherever autoregressive
    decoding fits.
    """
    speedup: Array
    """Speedup of whole requests where a length is generated, else of decoding; 0 where it cannot
    run.
    """
    low: Array
    high: Array
    decoding: Array
    """Speedup of decoding, with the ends of its interval; 0 where it cannot run: [3, batch,
    context].
    """


def best_gammas(case: Case, option: DraftOption, points: Points, room: BoolArray) -> Best:
    """The choice of gamma, for tables and reaches alike: the highest speedup of whole requests
    where a length is generated, else of decoding. `room`: where autoregressive decoding fits."""
    result = predict(case.setup(option), option.acceptance, points)
    shape = room.shape
    gen_len = float(case.request.gen_len)

    def seen(at: Prediction) -> tuple[WholeRequests | None, Array]:
        if not gen_len:
            requests = None
        else:
            requests = whole_requests(at, output_len=gen_len)
        return requests, at.full(
            at.speedup if requests is None else requests.speedup_at(at.speedup)
        )

    usable = result.full(
        result.valid & (result.memory.fits | ~room[..., None, None, None])
    ).reshape(*shape, -1)
    where = np.argmax(np.where(usable, seen(result)[1].reshape(usable.shape), 0.0), axis=-1)
    rows = result.take(np.arange(where.size) * usable.shape[-1] + where.ravel())
    requests, speedup = seen(rows)
    bounds = interval(rows, tokens_error(rows, option.acceptance))
    is_usable = usable.any(axis=-1)
    decoding = np.stack(
        [rows.full(each) for each in (rows.speedup, bounds.speedup_low, bounds.speedup_high)]
    )
    ends = (decoding[1], decoding[2])
    if requests is not None:
        ends = requests.speedup_bounds(bounds)
    speedup, low, high = (
        np.where(is_usable, np.reshape(each, shape), 0.0) for each in (speedup, *ends)
    )
    decoding = np.where(is_usable, decoding.reshape(3, *shape), 0.0)
    return Best(
        rows=rows, is_usable=is_usable, speedup=speedup, low=low, high=high, decoding=decoding
    )


def gamma_table(
    case: Case, best: Candidate, leading: Candidate | None
) -> tuple[GammaTable, list[Reach]]:
    """The table of `leading`'s draft at the best candidate's tp, for usual batches and contexts and
    its own; and where each draft pays at the best candidate's batch.

    It covers what fits in memory; a cell where not even autoregressive decoding fits says what
    would be best if it did. Without a `leading` row nothing is drafted anywhere.
    """
    limit = case.model.longest_context - case.request.gen_len
    batches = sorted({*TABLE_BATCHES, best.batch_size})
    contexts = sorted({*(each for each in TABLE_CONTEXTS if each <= limit), best.context_len})
    fine = np.round(np.geomspace(contexts[0], contexts[-1], NUM_BREAK_EVEN_CONTEXTS))
    every = _grid(case, best, batches, [*contexts, *fine])
    alone = predict(case.setup(None), None, every)
    shape = every.shape[:2]
    split = len(contexts)
    usual = slice(len(contexts))
    room = alone.full(alone.memory.fits).reshape(shape)
    if leading is None or leading.gamma == 0:
        named = None
    else:
        named = (leading.draft, leading.draft_method)
    option = next((each for each in case.options if (each.draft, each.method) == named), None)
    near = fine[room[batches.index(best.batch_size), split:]][::2]
    drafting = [each for each in case.options if case.gammas_of(each) != (0,) and len(near)]
    drafting.sort(key=lambda each: each is not option)
    reaches = [_reach(case, each, best, near) for each in drafting]
    speedup = np.zeros(shape)
    gamma = np.zeros(shape, dtype=np.int64)
    paid = np.full(shape, np.inf)
    counted = np.ones(
        shape, dtype=bool
    )  # but where the draft alone has no room: a gap in the contexts it could pay at
    verdict = np.full(shape, "does not pay")
    fits = room
    shown = np.ones((len(batches), split))
    set_up = {}
    if option is not None and leading is not None:
        found = best_gammas(
            case, option, _grid(case, best, batches, [*contexts, *fine], option, leading), room
        )
        rows = found.rows
        speedup = found.speedup
        pays = found.speedup > 1.0
        counted = found.is_usable | ~rows.full(rows.valid).reshape(shape)
        chosen = rows.points.gamma.reshape(shape)
        gamma = np.where(pays, chosen, 0)
        paid = np.where(pays, rows.full(rows.break_even_gen_len).reshape(shape), np.inf)
        fits = np.where(pays, rows.full(rows.memory.fits).reshape(shape), room)
        verdict = np.where(pays, VERDICTS(found.low, found.high), verdict)
        decoding, *ends = found.decoding[..., usual]
        shown = np.where(pays[:, usual], decoding, 1.0)
        set_up = {"speedup_low": ends[0].tolist(), "speedup_high": ends[1].tolist()}
        if best.is_speculative:
            idle = alone.full(_idle_speedup(case, option, leading, alone)).reshape(shape)[:, usual]
            followed = np.where(decoding > idle, chosen[:, usual], 0)
            set_up |= {"idle_speedup": idle.tolist(), "gamma_set_up": followed.tolist()}
    table = GammaTable(
        tp_size=best.tp_size,
        draft="none" if leading is None else leading.draft,
        draft_method="none" if leading is None else leading.draft_method,
        draft_budget=None if leading is None else leading.draft_budget,
        batch_sizes=batches,
        context_lens=contexts,
        gamma=gamma[:, usual].tolist(),
        speedup=shown.tolist(),
        verdict=verdict[:, usual].tolist(),
        fits=fits[:, usual].tolist(),
        break_even_gen_len=[
            [int(each) if np.isfinite(each) else None for each in row] for row in paid[:, usual]
        ],
        break_even_context=[
            _break_even(fine[each], row[each])
            for row, each in zip(speedup[:, split:], counted[:, split:], strict=True)
        ],
        **set_up,
    )
    return table, [each for each in reaches if each is not None]


def _grid(
    case: Case,
    best: Candidate,
    batches: Any,
    contexts: Any,
    option: DraftOption | None = None,
    leading: Candidate | None = None,
) -> Points:
    """Batches and contexts at the best candidate's tp; with every gamma of a draft, at `leading`'s
    budget or all.
    """
    budgets: tuple[int, ...]
    if option is None:
        budgets = (0,)
    elif leading is None:
        budgets = option.budgets
    else:
        budgets = (leading.draft_budget or 0,)
    return Points.grid(
        batch=batches,
        context=contexts,
        tp=(best.tp_size,),
        budget=budgets,
        cached=case.request.cached,
        gamma=case.gammas_of(option),
        gen_len=float(case.request.gen_len),
    )


def _idle_speedup(case: Case, option: DraftOption, leading: Candidate, alone: Prediction) -> Any:
    """The speedup of an engine that has this draft set up and drafts nothing, over autoregressive
    decoding.
    """
    setup = case.setup(option)
    at = alone.points
    kv_len = at.context + at.gen_len / 2.0
    read = draft_kv_tokens(setup, kv_len, leading.draft_budget)
    return alone.autoregressive_step_s / idle_step_s(
        setup, batch=at.batch, kv_len=kv_len, draft_kv_len=read, tp_size=at.tp
    )


def _reach(case: Case, option: DraftOption, best: Candidate, contexts: Array) -> Reach | None:
    """Where a draft pays at the best candidate's batch and tp, up to the longest context at which
    it can run.
    """
    points = _grid(case, best, (best.batch_size,), contexts, option)
    found = best_gammas(case, option, points, np.ones((1, len(contexts)), dtype=np.bool_))
    if not found.is_usable.any():
        return None
    upto = slice(int(np.flatnonzero(found.is_usable[0])[-1]) + 1)
    contexts = contexts[upto]
    pays, surely, possibly = _spans(
        contexts, *(each[0, upto] for each in (found.speedup, found.low, found.high))
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


def _break_even(contexts: Array, speedups: Array) -> int | None:
    """The context from which on, to the longest, the speedup is at least 1."""
    runs = _runs(speedups)
    if runs and runs[-1][1] == len(contexts) - 1:
        return _span(contexts, speedups, runs[-1])[0]
    return None


def _spans(
    contexts: Array, speedups: Array, low: Array, high: Array
) -> tuple[Span | None, Span | None, Span | None]:
    """The widest stretch of contexts that pays, the widest in it that surely does, and the one
    around it that possibly does, so each lies inside the next."""

    def widest(runs: list[Span]) -> Span | None:
        return max(runs, key=lambda run: contexts[run[1]] / contexts[run[0]], default=None)

    pays = widest(_runs(speedups))
    surely = widest(
        [run for run in _runs(low) if pays is not None and pays[0] <= run[0] <= pays[1]]
    )
    possibly = widest([run for run in _runs(high) if pays is None or run[0] <= pays[0] <= run[1]])
    found = ((speedups, pays), (low, surely), (high, possibly))
    first, second, third = (
        None if run is None else _span(contexts, values, run) for values, run in found
    )
    return first, second, third


def _runs(speedups: Array) -> list[Span]:
    """First and last index of each run of contexts with a speedup of at least 1."""
    pays = np.concatenate(([False], speedups >= 1.0, [False]))
    starts = np.flatnonzero(pays[1:] & ~pays[:-1])
    ends = np.flatnonzero(pays[:-1] & ~pays[1:]) - 1
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def _span(contexts: Array, speedups: Array, run: Span) -> Span:
    """The contexts at which a run begins and ends, by interpolation in log(context)."""

    def edge(inside: int, outside: int) -> int:
        if (
            not 0 <= outside < len(contexts) or speedups[outside] <= 0.0
        ):  # 0: the draft cannot run there at all
            return round(float(contexts[inside]))
        share = (speedups[inside] - 1.0) / (speedups[inside] - speedups[outside])
        return round(float(contexts[inside] * (contexts[outside] / contexts[inside]) ** share))

    return edge(run[0], run[0] - 1), edge(run[1], run[1] + 1)
