"""The tables around a choice: the best gamma of its draft by batch and context, with speedup and verdict,
and whether a server follows it; its operations, memory and limits.

The table of gammas describes the draft and budget of the best configuration, or of the leading draft if the
best is autoregressive. An engine with this draft set up can follow it. Such an engine pays for the
draft even when it drafts nothing, so the table has two more rows: `idle_speedup`, and the best
gamma compared with drafting nothing on that engine. With a generated length, whole requests decide
whether a draft pays, as in the ranking. The speedups shown are those of decoding, which is what is
measured.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.acceptance.law import static_batch_efficiency
from magicdec.perfmodel.drafting import draft_kv_tokens
from magicdec.perfmodel.intervals import interval, tokens_error
from magicdec.perfmodel.kernels.gemm import GemmCurve
from magicdec.perfmodel.kernels.op import BOUNDS, ForwardTime, Op
from magicdec.perfmodel.plan.choice import CaseChoice
from magicdec.perfmodel.plan.request import Case, DraftOption
from magicdec.perfmodel.plan.rows import candidates
from magicdec.perfmodel.plan.search import is_sure_depth
from magicdec.perfmodel.serving import WholeRequests, whole_requests
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import BoolArray, Prediction, predict
from magicdec.perfmodel.step import idle_step_s
from magicdec.schema.plan import (
    Ceilings,
    GammaTable,
    KernelTime,
    Limit,
    MemoryUse,
    Operation,
)
from magicdec.schema.row import Candidate, verdict_of
from magicdec.units import INTERVAL_ENDS

NUM_BREAK_EVEN_CONTEXTS = 65
VERDICTS = np.vectorize(
    lambda low, high: verdict_of(speedup_low=low, speedup_high=high)
)
TABLE_BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
TABLE_CONTEXTS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """A draft at its best gamma and budget of each batch and context; arrays are [batch,
    context]."""

    rows: Prediction
    is_usable: BoolArray
    """Whether it can run: its budget is below the context, and it fits in memory if autoregressive
    decoding does."""
    speedup: Array
    """Speedup of whole requests if a length is generated, else of decoding. 0: it cannot run."""
    low: Array
    high: Array
    """The ends of its interval, over the contexts that were asked for."""
    decoding: Array
    """Speedup of decoding and the ends of its interval, [3, batch, context], over these contexts. 0:
    it cannot run."""


def _best_gammas(
    case: Case,
    option: DraftOption,
    points: Points,
    room: BoolArray,
    bounded: slice,
) -> Best:
    """The gamma with the highest speedup: of whole requests if a
    length is generated, else of decoding. `room`: where autoregressive decoding fits;
    `bounded`: contexts that need intervals, which take longer than all else."""
    result = predict(case.setup(option), option.acceptance, points)
    shape = room.shape
    has_room = result.memory.fits | ~room[..., None, None, None]
    may_run = result.valid & has_room & is_sure_depth(result)
    can_run = result.full(may_run).reshape(*shape, -1)
    ranked_by = result.speedup
    of_all = _requests(case, result)
    if of_all is not None:
        ranked_by = of_all.speedup_at(ranked_by)
    ranked_by = np.where(can_run, result.full(ranked_by).reshape(can_run.shape), 0.0)
    chosen = np.argmax(ranked_by, axis=-1)
    first_of_cell = np.arange(chosen.size) * can_run.shape[-1]
    rows = result.take(first_of_cell + chosen.ravel())
    is_usable = can_run.any(axis=-1)

    cells = np.arange(room.size).reshape(shape)[:, bounded]
    within = rows.take(cells.ravel())
    bounds = interval(within, tokens_error(within, option.acceptance))
    low = within.full(bounds.speedup_low)
    high = within.full(bounds.speedup_high)
    decoding = np.stack([within.full(within.speedup), low, high])
    requests = _requests(case, within)
    if requests is not None:
        low, high = requests.gains(bounds.gains).quantiles(INTERVAL_ENDS)

    def of_usable(values: Array) -> Array:
        return np.where(is_usable[:, bounded], np.reshape(values, cells.shape), 0.0)

    return Best(
        rows=rows,
        is_usable=is_usable,
        speedup=ranked_by.max(axis=-1),
        low=of_usable(low),
        high=of_usable(high),
        decoding=np.stack([of_usable(values) for values in decoding]),
    )


def _requests(case: Case, rows: Prediction) -> WholeRequests | None:
    """Whole requests. None: no length is generated."""
    gen_len = float(case.request.gen_len)
    if not gen_len:
        return None
    return whole_requests(rows, output_len=gen_len)


class Axes(msgspec.Struct, frozen=True, kw_only=True):
    """Batches and contexts of a table. Columns of its arrays are the contexts, then `fine`."""

    batches: list[int]
    contexts: list[int]
    fine: Array
    """Contexts between which break-even contexts are interpolated."""

    @staticmethod
    def of(case: Case, best: Candidate) -> Axes:
        limit = case.model.longest_context - case.request.gen_len
        contexts = {best.context_len}
        for context in TABLE_CONTEXTS:
            if context <= limit:
                contexts.add(context)
        shortest = min(contexts)
        longest = max(contexts)
        return Axes(
            batches=sorted({*TABLE_BATCHES, best.batch_size}),
            contexts=sorted(contexts),
            fine=np.round(np.geomspace(shortest, longest, NUM_BREAK_EVEN_CONTEXTS)),
        )

    @property
    def all_contexts(self) -> list[Any]:
        return [*self.contexts, *self.fine]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.batches), len(self.all_contexts)

    @property
    def shown(self) -> slice:
        return slice(len(self.contexts))

    @property
    def between(self) -> slice:
        return slice(len(self.contexts), None)


class TableCells(msgspec.Struct, frozen=True, kw_only=True):
    """The cells of a table; arrays are [batch, context] over all contexts of its axes."""

    speedup: Array
    gamma: Array
    break_even: Array
    """Generated length from which on drafting is faster; infinity where it is not."""
    is_counted: BoolArray
    """False where the draft alone has no room, which is a gap among the contexts that could pay."""
    fits: BoolArray
    verdict: Array
    """Over the shown contexts, as the next."""
    decoding: Array
    """Speedup of decoding."""


def gamma_table(
    case: Case,
    best: Candidate,
    leading: Candidate | None,
) -> GammaTable:
    """The table of `leading`'s draft at the best candidate's tp, over usual batches and contexts
    and the candidate's own.

    It covers what fits in memory. A cell where not even autoregressive decoding fits says what
    would be best if it did. Without a `leading` row nothing is drafted anywhere."""
    axes = Axes.of(case, best)
    alone = predict(
        case.setup(None), None, _grid_of(case, best, axes.batches, axes.all_contexts)
    )
    room = alone.full(alone.memory.fits).reshape(axes.shape)
    if leading is None or not leading.is_speculative:
        return _table(axes, best, leading, _cells_without_draft(axes, room))
    option = case.option_of(leading)
    points = _grid_of(case, best, axes.batches, axes.all_contexts, option, leading)
    drafted = _best_gammas(case, option, points, room, axes.shown)
    table = _table(axes, best, leading, _cells_of(axes, drafted, room))
    decoding, low, high = drafted.decoding
    table = msgspec.structs.replace(
        table,
        speedup_low=low.tolist(),
        speedup_high=high.tolist(),
    )
    if not best.is_speculative:
        return table
    idle = alone.full(_idle_speedup(case, option, leading, alone))
    idle = idle.reshape(axes.shape)[:, axes.shown]
    chosen = drafted.rows.points.gamma.reshape(axes.shape)[:, axes.shown]
    followed = np.where(decoding > idle, chosen, 0)
    return msgspec.structs.replace(
        table,
        idle_speedup=idle.tolist(),
        gamma_set_up=followed.tolist(),
        speedup_set_up=np.maximum(decoding, idle).tolist(),
    )


def _table(
    axes: Axes, best: Candidate, leading: Candidate | None, cells: TableCells
) -> GammaTable:
    """The table of `leading`'s draft, without what is known of a loaded draft only."""
    draft = "none"
    draft_method = "none"
    draft_budget = None
    if leading is not None:
        draft = leading.draft
        draft_method = leading.draft_method
        draft_budget = leading.draft_budget
    return GammaTable(
        draft=draft,
        draft_method=draft_method,
        draft_budget=draft_budget,
        tp_size=best.tp_size,
        batch_sizes=axes.batches,
        context_lens=axes.contexts,
        gamma=cells.gamma[:, axes.shown].tolist(),
        speedup=cells.decoding.tolist(),
        verdict=cells.verdict.tolist(),
        fits=cells.fits[:, axes.shown].tolist(),
        break_even_gen_len=_whole_or_none(cells.break_even[:, axes.shown]),
        break_even_context=_break_even_contexts(axes, cells),
    )


def _cells_without_draft(axes: Axes, room: BoolArray) -> TableCells:
    shape = room.shape
    return TableCells(
        speedup=np.zeros(shape),
        gamma=np.zeros(shape, dtype=np.int64),
        break_even=np.full(shape, np.inf),
        is_counted=np.ones(shape, dtype=bool),
        verdict=np.full((len(axes.batches), len(axes.contexts)), "does not pay"),
        fits=room,
        decoding=np.ones((len(axes.batches), len(axes.contexts))),
    )


def _cells_of(axes: Axes, drafted: Best, room: BoolArray) -> TableCells:
    shape = room.shape
    rows = drafted.rows
    pays = drafted.speedup > 1.0
    gamma = rows.points.gamma.reshape(shape)
    break_even = rows.full(rows.break_even_gen_len).reshape(shape)
    is_valid = rows.full(rows.valid).reshape(shape)
    fits = rows.full(rows.memory.fits).reshape(shape)
    pays_shown = pays[:, axes.shown]
    verdicts = VERDICTS(drafted.low, drafted.high)
    return TableCells(
        speedup=drafted.speedup,
        gamma=np.where(pays, gamma, 0),
        break_even=np.where(pays, break_even, np.inf),
        is_counted=drafted.is_usable | ~is_valid,
        verdict=np.where(pays_shown, verdicts, "does not pay"),
        fits=np.where(pays, fits, room),
        decoding=np.where(pays_shown, drafted.decoding[0], 1.0),
    )


def _whole_or_none(values: Array) -> list[list[int | None]]:
    """Whole numbers by row. None: not finite."""
    rows = []
    for row in values:
        whole: list[int | None] = []
        for value in row:
            whole.append(int(value) if np.isfinite(value) else None)
        rows.append(whole)
    return rows


def _break_even_contexts(axes: Axes, cells: TableCells) -> list[float | None]:
    contexts: list[float | None] = []
    speedups = cells.speedup[:, axes.between]
    is_counted = cells.is_counted[:, axes.between]
    for speedup, counted in zip(speedups, is_counted, strict=True):
        contexts.append(_break_even(axes.fine[counted], speedup[counted]))
    return contexts


def _grid_of(
    case: Case,
    best: Candidate,
    batches: Any,
    contexts: Any,
    option: DraftOption | None = None,
    leading: Candidate | None = None,
) -> Points:
    """Batches and contexts at the best candidate's tp. With a draft, every gamma of it, at
    `leading`'s budget or at all budgets."""
    budgets: tuple[int | None, ...]
    if option is None:
        budgets = (None,)
    elif leading is None:
        budgets = option.budgets
    else:
        budgets = (leading.draft_budget,)
    return Points.grid(
        batch=batches,
        context=contexts,
        tp=(best.tp_size,),
        budget=budgets,
        cached=case.request.cached,
        gamma=case.gammas_of(option),
        gen_len=float(case.request.gen_len),
    )


def _idle_speedup(
    case: Case, option: DraftOption, leading: Candidate, alone: Prediction
) -> Any:
    """Speedup over autoregressive decoding of an engine that has this draft set up but drafts
    nothing."""
    setup = case.setup(option)
    points = alone.points
    kv_len = points.context + points.gen_len / 2.0
    read = draft_kv_tokens(setup, kv_len, leading.draft_budget)
    return alone.autoregressive_step_s / idle_step_s(
        setup,
        batch=points.batch,
        kv_len=kv_len,
        draft_kv_len=read,
        tp_size=points.tp,
    )


def follows_table(case: Case, table: GammaTable, row: Candidate) -> bool:
    """Whether a server follows the table of the row's draft: its gammas are faster than the row's own
    at every batch up to the row's, after the price that the engine takes at each step for following
    them, full batch or not (`gamma_table_cost`).

    A server of so many sequences often runs fewer, where another gamma is best. Which batches it sees
    is not known without a rate of arrivals: those of the table, about evenly spaced in logarithm,
    count alike.
    """
    if table.speedup_set_up is None:
        return False
    option = case.option_of(row)
    points = Points.grid(
        batch=table.batch_sizes,
        context=(row.context_len,),
        tp=(row.tp_size,),
        budget=(row.draft_budget,),
        cached=case.request.cached,
        gamma=(row.gamma,),
        gen_len=float(case.request.gen_len),
    )
    constant = predict(case.setup(option), option.acceptance, points)
    runs = constant.full(constant.valid & constant.memory.fits).ravel()
    speedups = constant.full(constant.speedup).ravel()
    column = table.context_lens.index(row.context_len)
    ratios = []
    gammas = set()
    for place, batch in enumerate(table.batch_sizes):
        if batch <= row.batch_size and runs[place]:
            ratios.append(table.speedup_set_up[place][column] / speedups[place])
            gammas.add(table.gamma_of_steps[place][column])
    if len(gammas) < 2:
        return False
    cost, _, _ = case.engine.table_costs(row.draft)
    return float(np.exp(np.log(ratios).mean())) / (1.0 + cost) > 1.0


def _break_even(contexts: Array, speedups: Array) -> int | None:
    """The context from which on the speedup is at least 1 up to the longest, by interpolation in
    log(context). None: it is not."""
    pays = speedups >= 1.0
    if not len(pays) or not pays[-1]:
        return None
    below = np.flatnonzero(~pays)
    first = int(below[-1]) + 1 if len(below) else 0
    # 0: the draft cannot run there at all
    if first == 0 or speedups[first - 1] <= 0.0:
        return round(float(contexts[first]))
    gain = speedups[first] - 1.0
    share = gain / (speedups[first] - speedups[first - 1])
    ratio = contexts[first - 1] / contexts[first]
    return round(float(contexts[first] * ratio**share))


# The best configuration
# ------------------------------------------------------------


def limits_of(case: Case, best: Candidate) -> list[Limit]:
    request = case.request
    limits = []
    if request.tpot_limit_s is not None:
        between_s = best.between_tokens_s
        limits.append(
            Limit(of="time per token", limit_s=request.tpot_limit_s, value_s=between_s)
        )
    if request.ttft_limit_s is not None:
        first_s = best.first_token_s
        limits.append(
            Limit(of="first token", limit_s=request.ttft_limit_s, value_s=first_s)
        )
    return limits


def without_draft(choice: CaseChoice, baseline: Candidate | None) -> Candidate:
    """Autoregressive decoding at the best row's tp and batch, within the limits or not."""
    best = choice.row
    for row in choice.alone:
        if (row.tp_size, row.batch_size) == (best.tp_size, best.batch_size):
            return row
    case = choice.case
    point = choice.searched.prediction(best).points
    undrafted = dataclasses.replace(
        point, gamma=np.zeros_like(point.gamma), budget=None
    )
    rate = None
    if baseline is not None:
        rate = baseline.rate
    (row,) = candidates(
        case, predict(case.setup(None), None, undrafted), None, baseline=rate
    )
    return row


def with_static_batch(choice: CaseChoice) -> Candidate:
    """The configuration to run with what it keeps in a batch that waits for its slowest sequence,
    where a length is generated.
    """
    case = choice.case
    option = choice.option
    best = choice.row
    gen_len = case.request.gen_len
    lengths = case.lengths
    if option is None or gen_len == 0:
        return best
    kept = static_batch_efficiency(
        option.acceptance,
        budget=best.draft_budget,
        context=lengths.prompt_len + lengths.growth / 2.0,
        gamma=best.gamma,
        batch_size=best.batch_size,
        gen_len=gen_len,
    )
    decoding = msgspec.structs.replace(
        best.decoding, speedup_static_batch=best.speedup * kept
    )
    return msgspec.structs.replace(best, decoding=decoding)


def memory_use(
    case: Case,
    option: DraftOption | None,
    best: Candidate,
    prediction: Prediction,
) -> MemoryUse:
    where = case.tp_sizes.index(best.tp_size)
    drafted = case.largest_batches(
        option=option, budget=best.draft_budget, gamma=best.gamma
    )
    use = {}
    for name, value in msgspec.structs.asdict(prediction.memory).items():
        use[name] = float(np.ravel(value)[0])
    return MemoryUse(
        **use,
        largest_batch=float(drafted[where]),
        largest_autoregressive_batch=float(case.largest_batches()[where]),
    )


def breakdown(prediction: Prediction) -> dict[str, list[Operation]]:
    """Operations of one configuration: time, the datasheet's ceiling for the same work, and what
    binds.
    """
    terms = prediction.terms
    tp_size = int(prediction.points.tp.flat[0])
    return {
        name: [
            _operation(prediction.setup, op, tp_size)
            for op in getattr(terms, name).ops
            if _first(op.time_s) > 0
        ]
        for name in ("autoregressive", "draft", "verify", "accept", "upkeep")
    }


def ceilings(setup: Setup) -> Ceilings:
    """The device's roof for the formats of a setup."""
    hw, dtype = setup.hardware, setup.precision.compute_dtype
    gemm = GemmCurve.of(hw, dtype)
    rate = hw.compute_rate(dtype)
    return Ceilings(
        memory_bytes_per_s=hw.memory_bytes_per_s,
        flops_per_s=rate,
        gemm_bytes_per_s=gemm.bandwidth_efficiency * hw.memory_bytes_per_s,
        gemm_flops_per_s=gemm.flops_efficiency * rate,
    )


def _first(value: Any) -> float:
    return float(np.ravel(np.asarray(value, dtype=np.float64))[0])


def _operation(setup: Setup, op: Op, tp_size: int) -> Operation:
    hw = setup.hardware
    flops, weight_bytes, kv_bytes, activation_bytes, sent = (
        _first(value) for value in op.cost
    )
    num_bytes = weight_bytes + kv_bytes + activation_bytes
    wire = 2.0 * (tp_size - 1) / tp_size * sent / hw.link.bytes_per_s
    ceiling = max(
        num_bytes / hw.memory_bytes_per_s,
        flops / hw.compute_rate(setup.precision.compute_dtype),
        wire,
    )
    one = ForwardTime((op,)).bound_seconds()
    kernels: list[KernelTime] = []
    for basis in op.bases:
        time = KernelTime(
            kernel=basis.kernel,
            source=basis.source,
            relative_error=basis.relative_error,
            is_inside=basis.is_inside,
        )
        if time not in kernels:
            kernels.append(time)
    return Operation(
        op=op.name,
        time_s=_first(op.time_s),
        ceiling_s=ceiling,
        bound_by=max(BOUNDS, key=lambda bound: _first(one[bound])),
        flops=flops,
        bytes=num_bytes if op.group != "link" else sent,
        kernels=kernels,
    )
