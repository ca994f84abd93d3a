"""What a plan says, as one JSON object (docs/planning.md), and the table of the best gamma over batch and context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from magicdec.files import rows_to_csv
from magicdec.perfmodel.candidates import Row
from magicdec.perfmodel.drafts import DraftOption
from magicdec.perfmodel.prediction import Prediction, predict
from magicdec.perfmodel.setup import Points, Setup

SCHEMA_VERSION = 1
NUM_BREAK_EVEN_CONTEXTS = 65


@dataclass(frozen=True)
class PlanDocument:
    """The answer to a plan request. `document` is the whole of it; the properties are its parts most asked for."""

    document: dict[str, Any]

    @property
    def candidates(self) -> list[Row]:
        """Drafted configurations, best first."""
        rows: list[Row] = self.document["candidates"]
        return rows

    @property
    def best(self) -> Row:
        """The configuration to run; gamma 0 where speculation does not pay."""
        row: Row = self.document["best"]
        return row

    @property
    def autoregressive(self) -> Row:
        """Autoregressive decoding at the best configuration's device, tp, batch and context."""
        row: Row = self.document["autoregressive"]
        return row

    def to_dict(self) -> dict[str, Any]:
        return self.document

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self.document), indent=2).decode()

    def to_csv(self) -> str:
        """Autoregressive rows and candidates as one table with a header."""
        return rows_to_csv([*self.document["autoregressive_rows"], *self.candidates])


def gamma_table(
    cases: Sequence[tuple[Setup, DraftOption]],
    *,
    tp_size: int,
    batch_sizes: Sequence[int],
    context_lens: Sequence[int],
    gammas: Sequence[int],
    gen_len: int,
) -> dict[str, Any]:
    """The best gamma and its speedup for each batch and context (0 and 1 where speculation does not pay), whether it
    fits, and the generated tokens from which it pays back the draft's own prefill; and for each batch the least context
    from which speculation pays (None: at none of them)."""
    shape = (len(batch_sizes), len(context_lens))
    best = np.ones(shape)
    gamma = np.zeros(shape, dtype=np.int64)
    fits = np.ones(shape, dtype=bool)
    gen_len_paid = np.full(shape, np.nan)
    fine = np.geomspace(min(context_lens), max(context_lens), NUM_BREAK_EVEN_CONTEXTS)
    finest = np.zeros((len(batch_sizes), len(fine)))
    every, split = [*context_lens, *fine], len(context_lens)
    for setup, option in cases if any(gammas) else ():
        points = Points.grid(
            batch=batch_sizes, context=every, tp=(tp_size,), budget=option.budgets, gamma=gammas, gen_len=gen_len
        )
        result = predict(setup, option.acceptance, points)
        speedup = result.full(np.where(result.valid, result.speedup, 0.0))
        where = np.argmax(speedup[:, :split].reshape(*shape, -1), axis=-1)[..., None]

        def chosen(values: Any, result: Prediction = result, where: Any = where) -> Any:
            flat = result.full(values)[:, :split].reshape(*shape, -1)
            return np.take_along_axis(flat, where, axis=-1)[..., 0]

        reached = chosen(speedup)
        better = reached > best
        best = np.where(better, reached, best)
        gamma = np.where(better, chosen(result.points.gamma), gamma)
        fits = np.where(better, chosen(result.memory.fits), fits)
        gen_len_paid = np.where(better, chosen(result.break_even_gen_len), gen_len_paid)
        finest = np.maximum(finest, speedup[:, split:].reshape(*finest.shape, -1).max(axis=-1))
    return {
        "tp_size": tp_size,
        "batch_sizes": [int(value) for value in batch_sizes],
        "context_lens": [int(value) for value in context_lens],
        "gamma": gamma.tolist(),
        "speedup": best.tolist(),
        "fits": fits.tolist(),
        "break_even_gen_len": [[None if np.isnan(each) else int(each) for each in row] for row in gen_len_paid],
        "break_even_context": [_break_even(fine, row) for row in finest],
    }


def _break_even(contexts: Any, speedups: Any) -> int | None:
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
