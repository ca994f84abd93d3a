"""The best gamma, its speedup and its verdict over batch and context, and the context from which speculation pays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from magicdec.perfmodel.cost import Array
from magicdec.perfmodel.intervals import interval, tokens_error
from magicdec.perfmodel.plan_request import Device, Lengths
from magicdec.perfmodel.prediction import Prediction, predict
from magicdec.perfmodel.search import searched_batches, source_error
from magicdec.perfmodel.setup import Points
from magicdec.plan_document import Candidate, GammaTable, verdict_of

NUM_BREAK_EVEN_CONTEXTS = 65
TABLE_BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
TABLE_CONTEXTS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)


def gamma_table(device: Device, best: Candidate) -> GammaTable:
    """The table at the best candidate's tp, for usual batches and contexts and its own.

    Of what fits in memory; a cell where not even autoregressive decoding fits says what would be best if it did.
    """
    limit = device.model.max_position_embeddings - device.request.gen_len
    batches = sorted({*TABLE_BATCHES, best.batch_size})
    contexts = sorted({*(each for each in TABLE_CONTEXTS if each <= limit), best.context_len})
    fine = np.geomspace(contexts[0], contexts[-1], NUM_BREAK_EVEN_CONTEXTS)
    every = Points.grid(
        batch=batches, context=[*contexts, *fine], tp=(best.tp_size,), gen_len=float(device.request.gen_len)
    )
    split, shape = len(contexts), (len(batches), len(contexts))
    alone = predict(device.setup(None), None, every)
    cells: dict[str, Any] = {
        "speedup": np.ones(shape), "low": np.ones(shape), "high": np.ones(shape),
        "rate": alone.full(alone.tokens_per_s)[:, :split].reshape(shape), "gamma": np.zeros(shape, dtype=np.int64),
        "fits": alone.full(alone.memory.fits)[:, :split].reshape(shape), "paid": np.full(shape, np.inf),
    }  # fmt: skip
    room = cells["fits"]
    finest = np.zeros((len(batches), len(fine)))
    for option in device.options if any(device.gammas) else ():
        points = dataclasses.replace(
            every,
            budget=np.reshape(option.budgets, (1, 1, 1, -1, 1)),
            gamma=np.reshape(device.gammas, (1, 1, 1, 1, -1)),
        )
        result = predict(device.setup(option), option.acceptance, points)
        usable = result.full(np.where(result.valid, result.speedup, 0.0))
        finest = np.maximum(finest, usable[:, split:].reshape(*finest.shape, -1).max(axis=-1))
        fits = result.full(result.memory.fits)[:, :split].reshape(*shape, -1)
        flat = np.where(fits | ~room[..., None], usable[:, :split].reshape(*shape, -1), 0.0)
        where = np.argmax(flat, axis=-1)
        rows = np.arange(shape[0])[:, None] * len(every.context[0]) + np.arange(split)
        chosen = _cells(result.take((rows * flat.shape[-1] + where).ravel()), option.acceptance, shape,
                        source_error(device, option))  # fmt: skip
        better = np.take_along_axis(flat, where[..., None], axis=-1)[..., 0] > cells["speedup"]
        cells = {name: np.where(better, chosen[name], value) for name, value in cells.items()}
    gain = cells["rate"] / best.tp_size / best_rates(device, contexts)
    verdicts = [
        [
            verdict_of(speedup_low=low, speedup_high=high, gain_over_best_autoregressive=each)
            for low, high, each in zip(*row, strict=True)
        ]
        for row in zip(cells["low"].tolist(), cells["high"].tolist(), gain.tolist(), strict=True)
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
    )


def _cells(rows: Prediction, acceptance: Any, shape: tuple[int, int], error: float) -> dict[str, Array]:
    """What the table holds of one point per cell."""
    bounds = interval(rows, tokens_error(rows, acceptance, error))
    columns = {
        "speedup": rows.speedup, "low": bounds.speedup_low, "high": bounds.speedup_high, "rate": rows.tokens_per_s,
        "gamma": rows.points.gamma, "fits": rows.memory.fits, "paid": rows.break_even_gen_len,
    }  # fmt: skip
    return {name: rows.full(values).reshape(shape) for name, values in columns.items()}


def best_rates(device: Device, contexts: list[int]) -> Array:
    """Tokens per second and device of autoregressive decoding at its best batch and tp, by context: 0 where it fits (or
    keeps the limit on the time per token) at none."""
    searching = dataclasses.replace(device, searches_batch=True)
    growth = float(device.request.gen_len)
    batches = searched_batches(searching, Lengths(prompt_len=float(contexts[0]), growth=growth))
    if not len(batches):
        batches = np.ones(1)
    points = Points.grid(batch=batches, context=contexts, tp=device.tp_sizes, gen_len=growth)
    alone = predict(device.setup(None), None, points)
    limit = device.request.tpot_limit_s
    allowed = alone.memory.fits & (alone.tpot_s <= (np.inf if limit is None else limit))
    rates = np.where(allowed, alone.tokens_per_s / points.tp, 0.0)
    best: Array = np.maximum(alone.full(rates).max(axis=(0, 2, 3, 4)), 1e-300)
    return best


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
