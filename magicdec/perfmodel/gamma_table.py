"""The best gamma, its speedup and its verdict over batch and context, and the context from which speculation pays.

Beside it, for an engine that has the best configuration's draft set up: what drafting nothing costs there, and the best
gamma when that is what it is compared with.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from magicdec.perfmodel.cost import Array
from magicdec.perfmodel.drafts import DraftOption
from magicdec.perfmodel.intervals import interval, tokens_error
from magicdec.perfmodel.plan_request import Device
from magicdec.perfmodel.prediction import Prediction, predict
from magicdec.perfmodel.search import source_error
from magicdec.perfmodel.setup import Points, draft_kv_tokens
from magicdec.perfmodel.steps import idle_step_s
from magicdec.plan_document import Candidate, GammaTable, verdict_of

NUM_BREAK_EVEN_CONTEXTS = 65
TABLE_BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
TABLE_CONTEXTS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)


def gamma_table(device: Device, best: Candidate) -> GammaTable:
    """The table at the best candidate's tp, for usual batches and contexts and its own.

    Of what fits in memory; a cell where not even autoregressive decoding fits says what would be best if it did.
    """
    growth = device.request.gen_len
    limit = device.model.longest_context - growth
    batches = sorted({*TABLE_BATCHES, best.batch_size})
    contexts = sorted({*(each for each in TABLE_CONTEXTS if each <= limit), best.context_len})
    fine = np.geomspace(contexts[0], contexts[-1], NUM_BREAK_EVEN_CONTEXTS)
    every = Points.grid(batch=batches, context=[*contexts, *fine], tp=(best.tp_size,), gen_len=float(growth))
    shape = len(batches), len(contexts)
    alone = predict(device.setup(None), None, every)

    def of_contexts(values: Any) -> Array:
        table: Array = alone.full(values)[:, : shape[1]].reshape(shape)
        return table

    room = of_contexts(alone.memory.fits)
    cells: dict[str, Any] = {
        "speedup": np.ones(shape), "low": np.ones(shape), "high": np.ones(shape), "fits": room,
        "gamma": np.zeros(shape, dtype=np.int64),
        "paid": np.full(shape, np.inf),
    }  # fmt: skip
    set_up: dict[str, Any] = {}
    finest = np.zeros((len(batches), len(fine)))
    for option in device.options if any(device.gammas) else ():
        drafted = _best_of(device, option, every, room)
        finest = np.maximum(finest, drafted.finest)
        chosen = _cells(drafted.prediction, option.acceptance, shape, source_error(device, option))
        if (option.draft, option.method) == (best.draft, best.draft_method):
            idle = of_contexts(_idle_speedup(device, option, best, alone))
            gamma = np.where(drafted.reached > idle, chosen["gamma"], 0)
            set_up = {"idle_speedup": idle.tolist(), "gamma_set_up": gamma.tolist()}
        better = drafted.reached > cells["speedup"]
        cells = {name: np.where(better, chosen[name], value) for name, value in cells.items()}
    verdicts = [
        [verdict_of(speedup_low=low, speedup_high=high) for low, high in zip(*row, strict=True)]
        for row in zip(cells["low"].tolist(), cells["high"].tolist(), strict=True)
    ]
    return GammaTable(
        tp_size=best.tp_size,
        batch_sizes=batches,
        context_lens=contexts,
        gamma=cells["gamma"].tolist(),
        speedup=cells["speedup"].tolist(),
        verdict=verdicts,
        fits=cells["fits"].tolist(),
        break_even_gen_len=[[int(each) if np.isfinite(each) else None for each in row] for row in cells["paid"]],
        break_even_context=[_break_even(fine, row) for row in finest],
        **set_up,
    )


@dataclass(frozen=True, kw_only=True)
class _BestOf:
    """One draft at its best budget and gamma."""

    prediction: Prediction
    """By batch and context of the table, as rows."""
    reached: Array
    """Its speedups there; 0 where it does not fit and autoregressive decoding does."""
    finest: Array
    """By batch and fine context."""


def _best_of(device: Device, option: DraftOption, every: Points, room: Any) -> _BestOf:
    """`every` has the table's contexts first, then the fine ones."""
    budgets, gammas = np.reshape(option.budgets, (1, 1, 1, -1, 1)), np.reshape(device.gammas, (1, 1, 1, 1, -1))
    result = predict(device.setup(option), option.acceptance, dataclasses.replace(every, budget=budgets, gamma=gammas))
    shape, split = room.shape, room.shape[1]
    usable = result.full(np.where(result.valid, result.speedup, 0.0))
    fits = result.full(result.memory.fits)[:, :split].reshape(*shape, -1)
    flat = np.where(fits | ~room[..., None], usable[:, :split].reshape(*shape, -1), 0.0)
    where = np.argmax(flat, axis=-1)
    rows = np.arange(shape[0])[:, None] * usable.shape[1] + np.arange(split)
    return _BestOf(
        prediction=result.take((rows * flat.shape[-1] + where).ravel()),
        reached=np.take_along_axis(flat, where[..., None], axis=-1)[..., 0],
        finest=usable[:, split:].reshape(shape[0], usable.shape[1] - split, -1).max(axis=-1),
    )


def _idle_speedup(device: Device, option: DraftOption, best: Candidate, alone: Prediction) -> Array:
    """Of speculation that is set up with this draft and drafts nothing, over autoregressive decoding."""
    setup, at = device.setup(option), alone.points
    kv_len = at.context + at.gen_len / 2.0
    read = draft_kv_tokens(setup, kv_len, best.draft_budget)
    speedup: Array = alone.autoregressive_step_s / idle_step_s(
        setup, batch=at.batch, kv_len=kv_len, draft_kv_len=read, tp_size=at.tp
    )
    return speedup


def _cells(rows: Prediction, acceptance: Any, shape: tuple[int, int], error: float) -> dict[str, Array]:
    """What the table holds of one point per cell."""
    bounds = interval(rows, tokens_error(rows, acceptance, error))
    columns = {
        "speedup": rows.speedup, "low": bounds.speedup_low, "high": bounds.speedup_high,
        "gamma": rows.points.gamma, "fits": rows.memory.fits,
        "paid": rows.break_even_gen_len,
    }  # fmt: skip
    return {name: rows.full(values).reshape(shape) for name, values in columns.items()}


def _break_even(contexts: Array, speedups: Array) -> int | None:
    """The least context with a speedup of 1, by interpolation in log(context)."""
    pays = np.flatnonzero(speedups >= 1.0)
    if not len(pays):
        return None
    first = int(pays[0])
    if first == 0:
        return round(float(contexts[0]))
    low, high = speedups[first - 1], speedups[first]
    share = (1.0 - low) / (high - low)
    return round(float(contexts[first - 1] * (contexts[first] / contexts[first - 1]) ** share))
