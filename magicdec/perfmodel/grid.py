"""Whole grids of configurations at once: (batch, context, tp, draft budget, gamma) for one draft.

Each term is evaluated on the axes that it depends on and only then broadcast, so that a point of the whole grid costs a
few additions. Large grids are cut along the batch axis, which bounds the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from magicdec.perfmodel.cost import Array
from magicdec.perfmodel.speculative import AcceptanceLaw, tokens_per_step
from magicdec.perfmodel.steps import SPARSE_METHODS, Setup, memory_need, step_terms

MAX_CHUNK_POINTS = 2_000_000
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Axes, each one-dimensional. `budgets` of a draft that reads the full cache is (0,)."""

    batch_sizes: Any
    context_lens: Any
    tp_sizes: Any
    budgets: Any
    gammas: Any
    gen_len: float = 0.0
    max_lens: Any = None
    """Tokens per slot that memory must hold, by batch size; None: context and gen_len."""

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        batch, context, tp, budget, gamma = (
            len(axis) for axis in (self.batch_sizes, self.context_lens, self.tp_sizes, self.budgets, self.gammas)
        )
        return batch, context, tp, budget, gamma

    def axes(self) -> tuple[Array, Array, Array, Array, npt.NDArray[np.int64]]:
        def axis(values: Any, position: int) -> Array:
            shape = [1] * 5
            shape[position] = -1
            return np.asarray(values, dtype=np.float64).reshape(shape)

        return (
            axis(self.batch_sizes, 0),
            axis(self.context_lens, 1),
            axis(self.tp_sizes, 2),
            axis(self.budgets, 3),
            np.asarray(self.gammas, dtype=np.int64).reshape(1, 1, 1, 1, -1),
        )


@dataclass(frozen=True, kw_only=True)
class GridResult:
    """Arrays that broadcast to the grid's shape; `speedup`, `tpot_s`, `fits` and `valid` have all of it."""

    autoregressive_step_s: Array
    step_s: Array
    expected_tokens_per_step: Array
    tpot_s: Array
    speedup: Array
    memory_bytes: Array
    fits: BoolArray
    valid: BoolArray
    """False where the budget is not below the context."""


def evaluate(setup: Setup, acceptance: AcceptanceLaw | None, grid: Grid) -> GridResult:
    """Every point of the grid. Without an acceptance law only gamma 0 can be evaluated."""
    batch, context, tp, budget, gamma = grid.axes()
    kv_len = context + grid.gen_len / 2.0
    is_sparse = setup.speculation.draft_method in SPARSE_METHODS
    draft_kv = budget if is_sparse else kv_len
    expected: Array = np.ones((1, 1, 1, 1, 1))
    everything: Array = expected
    if acceptance is not None and np.any(gamma > 0):
        read = np.minimum(draft_kv, kv_len)
        rates = acceptance.conditional_rates(budget=read, context=kv_len, gamma_max=int(gamma.max()))
        expected, everything = tokens_per_step(rates, gamma)
    terms = step_terms(
        setup,
        batch=batch,
        kv_len=kv_len,
        draft_kv_len=draft_kv,
        gamma=gamma,
        tp_size=tp,
        full_acceptance=everything,
    )
    held = context + grid.gen_len
    if grid.max_lens is not None:
        held = np.asarray(grid.max_lens, dtype=np.float64).reshape(-1, 1, 1, 1, 1)
    need = memory_need(
        setup,
        batch=batch,
        max_len=held,
        budget=budget if is_sparse else None,
        gamma=gamma,
        tp_size=tp,
    )
    autoregressive = terms.autoregressive.total_s
    step = terms.step_s
    tpot = step / expected
    used = need.total_bytes
    shape = grid.shape
    valid = (draft_kv < context) if is_sparse else np.ones((1,) * 5, dtype=bool)
    return GridResult(
        autoregressive_step_s=autoregressive,
        step_s=step,
        expected_tokens_per_step=expected,
        tpot_s=np.broadcast_to(tpot, shape),
        speedup=np.broadcast_to(autoregressive / tpot, shape),
        memory_bytes=np.broadcast_to(used, shape),
        fits=np.broadcast_to(used <= need.capacity_bytes, shape),
        valid=np.broadcast_to(valid, shape),
    )


def evaluate_in_chunks(
    setup: Setup, acceptance: AcceptanceLaw | None, grid: Grid, *, max_points: int = MAX_CHUNK_POINTS
) -> Iterator[tuple[slice, GridResult]]:
    """`evaluate` over slices of the batch axis of at most `max_points` points (but at least one batch size)."""
    shape = grid.shape
    per_batch = int(np.prod(shape[1:], dtype=np.int64))
    step = max(1, max_points // max(per_batch, 1))
    batches = np.asarray(grid.batch_sizes)
    for start in range(0, shape[0], step):
        part = slice(start, min(start + step, shape[0]))
        chunk = Grid(
            batch_sizes=batches[part],
            context_lens=grid.context_lens,
            tp_sizes=grid.tp_sizes,
            budgets=grid.budgets,
            gammas=grid.gammas,
            gen_len=grid.gen_len,
            max_lens=None if grid.max_lens is None else np.asarray(grid.max_lens)[part],
        )
        yield part, evaluate(setup, acceptance, chunk)
