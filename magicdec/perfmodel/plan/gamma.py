"""The best gamma of one draft over batch and context, with its speedup and verdict, and where speculation pays.

The draft and its budget are the best configuration's (where that is autoregressive, the leading draft's), so the table
is the one that an engine with this draft set up can follow, and that exports write. Once it is set up, drafting nothing
costs something: `idle_speedup`, and the best gamma when that is what it is compared with.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from magicdec.perfmodel.intervals import interval, tokens_error
from magicdec.perfmodel.kernels.base import Array
from magicdec.perfmodel.plan.device import Device
from magicdec.perfmodel.plan.drafts import DraftOption
from magicdec.perfmodel.setup import Points, draft_kv_tokens
from magicdec.perfmodel.speedup import Prediction, predict
from magicdec.perfmodel.step import idle_step_s
from magicdec.plan_document import Candidate, GammaTable, verdict_of

NUM_BREAK_EVEN_CONTEXTS = 65
TABLE_BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
TABLE_CONTEXTS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)


def gamma_table(device: Device, best: Candidate, leading: Candidate | None) -> GammaTable:
    """The table of `leading`'s draft at the best candidate's tp, for usual batches and contexts and its own.

    It covers what fits in memory; a cell where not even autoregressive decoding fits says what would be best if it did.
    Without a `leading` row nothing is drafted anywhere.
    """
    growth = device.request.gen_len
    limit = device.model.longest_context - growth
    batches = sorted({*TABLE_BATCHES, best.batch_size})
    contexts = sorted({*(each for each in TABLE_CONTEXTS if each <= limit), best.context_len})
    fine = np.round(np.geomspace(contexts[0], contexts[-1], NUM_BREAK_EVEN_CONTEXTS))
    every = Points.grid(batch=batches, context=[*contexts, *fine], tp=(best.tp_size,), gen_len=float(growth))
    alone = predict(device.setup(None), None, every)
    shape, split = every.shape[:2], len(contexts)
    room = alone.full(alone.memory.fits).reshape(shape)
    option = None if leading is None or leading.gamma == 0 else _option_of(device, leading)
    speedup, gamma, paid = np.zeros(shape), np.zeros(shape, dtype=np.int64), np.full(shape, np.inf)
    verdict, fits, set_up = np.full(shape, "does not pay"), room, {}
    if option is not None and leading is not None:
        rows, is_usable = _best_gammas(device, option, leading, every, room)
        bounds = interval(rows, tokens_error(rows, option.acceptance))
        speedup = np.where(is_usable, rows.full(rows.speedup).reshape(shape), 0.0)
        pays = speedup > 1.0
        chosen = rows.points.gamma.reshape(shape)
        gamma = np.where(pays, chosen, 0)
        paid = np.where(pays, rows.full(rows.break_even_gen_len).reshape(shape), np.inf)
        fits = np.where(pays, rows.full(rows.memory.fits).reshape(shape), room)
        judged = np.vectorize(lambda low, high: verdict_of(speedup_low=low, speedup_high=high))
        verdict = np.where(pays, judged(bounds.speedup_low, bounds.speedup_high).reshape(shape), verdict)
        if best.is_speculative:
            idle = alone.full(_idle_speedup(device, option, leading, alone)).reshape(shape)[:, :split]
            followed = np.where(speedup[:, :split] > idle, chosen[:, :split], 0)
            set_up = {"idle_speedup": idle.tolist(), "gamma_set_up": followed.tolist()}
    return GammaTable(
        tp_size=best.tp_size,
        draft="none" if leading is None else leading.draft,
        draft_method="none" if leading is None else leading.draft_method,
        draft_budget=None if leading is None else leading.draft_budget,
        batch_sizes=batches,
        context_lens=contexts,
        gamma=gamma[:, :split].tolist(),
        speedup=np.maximum(speedup, 1.0)[:, :split].tolist(),
        verdict=verdict[:, :split].tolist(),
        fits=fits[:, :split].tolist(),
        break_even_gen_len=[[int(each) if np.isfinite(each) else None for each in row] for row in paid[:, :split]],
        break_even_context=[_break_even(fine, row) for row in speedup[:, split:]],
        **set_up,
    )


def _option_of(device: Device, row: Candidate) -> DraftOption:
    return next(each for each in device.options if (each.draft, each.method) == (row.draft, row.draft_method))


def _best_gammas(
    device: Device, option: DraftOption, leading: Candidate, every: Points, room: Any
) -> tuple[Prediction, Any]:
    """The draft at its best gamma of each batch and context, as rows, and whether it can run there: below its context,
    and in memory wherever autoregressive decoding fits (`room`)."""
    gammas = np.reshape(device.gammas_of(option), (1, 1, 1, 1, -1))
    points = dataclasses.replace(every, budget=np.reshape(leading.draft_budget or 0, (1, 1, 1, 1, 1)), gamma=gammas)
    result = predict(device.setup(option), option.acceptance, points)
    shape = (*room.shape, gammas.size)
    usable = result.full(result.valid).reshape(shape)
    usable = usable & (result.full(result.memory.fits).reshape(shape) | ~room[..., None])
    where = np.argmax(np.where(usable, result.full(result.speedup).reshape(shape), 0.0), axis=-1)
    rows = result.take(np.arange(where.size) * gammas.size + where.ravel())
    return rows, np.take_along_axis(usable, where[..., None], axis=-1)[..., 0]


def _idle_speedup(device: Device, option: DraftOption, leading: Candidate, alone: Prediction) -> Array:
    """The speedup of an engine that has this draft set up and drafts nothing, over autoregressive decoding."""
    setup, at = device.setup(option), alone.points
    kv_len = at.context + at.gen_len / 2.0
    read = draft_kv_tokens(setup, kv_len, leading.draft_budget)
    speedup: Array = alone.autoregressive_step_s / idle_step_s(
        setup, batch=at.batch, kv_len=kv_len, draft_kv_len=read, tp_size=at.tp
    )
    return speedup


def _break_even(contexts: Array, speedups: Array) -> int | None:
    """The context from which on, to the longest, the speedup is at least 1, by interpolation in log(context)."""
    fails = np.flatnonzero(speedups < 1.0)
    if not len(fails):
        return round(float(contexts[0]))
    last = int(fails[-1])
    if last == len(contexts) - 1:
        return None
    low, high = speedups[last], speedups[last + 1]
    share = (1.0 - low) / (high - low) if low > 0.0 else 1.0  # 0: the draft cannot run there at all
    return round(float(contexts[last] * (contexts[last + 1] / contexts[last]) ** share))
