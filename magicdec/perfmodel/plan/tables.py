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
from magicdec.perfmodel.serving import WholeRequests, whole_requests
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import Prediction, predict
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

NUM_BREAK_EVEN_CONTEXTS = 65
VERDICTS = np.vectorize(verdict_of)
TABLE_BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
TABLE_CONTEXTS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)


def table_contexts(case: Case, best: Candidate) -> list[int]:
    """Usual contexts that the model reads with what is generated, and the best candidate's own."""
    limit = case.model.longest_context - case.request.gen_len
    usual = {context for context in TABLE_CONTEXTS if context <= limit}
    return sorted({best.context_len, *usual})


def contexts_between(contexts: list[int]) -> Array:
    """Contexts between which those of break-even are interpolated."""
    return np.round(np.geomspace(contexts[0], contexts[-1], NUM_BREAK_EVEN_CONTEXTS))


def gamma_table(
    case: Case,
    best: Candidate,
    leading: Candidate | None,
) -> GammaTable:
    """The table of `leading`'s draft at the best candidate's tp, over usual batches and contexts
    and the candidate's own.

    It covers what fits in memory. A cell where not even autoregressive decoding fits says what
    would be best if it did. Without a `leading` row nothing is drafted anywhere."""
    batches = sorted({*TABLE_BATCHES, best.batch_size})
    contexts = table_contexts(case, best)
    fine = contexts_between(contexts)
    # arrays are [batch, context] over the contexts of the table and then the finer ones
    shape = (len(batches), len(contexts) + len(fine))
    shown = slice(len(contexts))

    def points(option: DraftOption | None, budget: int | None) -> Points:
        return Points.grid(
            batch=batches,
            context=[*contexts, *fine],
            tp=(best.tp_size,),
            budget=(budget,),
            cached=case.request.cached,
            gamma=case.gammas_of(option),
            gen_len=float(case.request.gen_len),
        )

    alone = predict(case.setup(None), None, points(None, None))
    room = alone.full(alone.memory.fits).reshape(shape)
    if leading is None or not leading.is_speculative:
        cells = room[:, shown]
        return GammaTable(
            draft="none",
            draft_method="none",
            tp_size=best.tp_size,
            batch_sizes=batches,
            context_lens=contexts,
            gamma=np.zeros(cells.shape, dtype=np.int64).tolist(),
            speedup=np.ones(cells.shape).tolist(),
            verdict=np.full(cells.shape, "does not pay").tolist(),
            fits=cells.tolist(),
            break_even_gen_len=np.full(cells.shape, None).tolist(),
            break_even_context=[None] * len(batches),
        )

    # the gamma with the highest speedup, of whole requests if a length is generated, else of decoding
    option = case.option_of(leading)
    setup = case.setup(option)
    every = predict(setup, option.acceptance, points(option, leading.draft_budget))
    has_room = every.memory.fits | ~room[..., None, None, None]
    may_run = every.valid & has_room
    can_run = every.full(may_run).reshape(*shape, -1)
    ranked_by = every.speedup
    requests = _requests(case, every)
    if requests is not None:
        ranked_by = requests.speedup_at(ranked_by)
    ranked_by = np.where(can_run, every.full(ranked_by).reshape(can_run.shape), 0.0)
    first_of_cell = np.arange(room.size) * can_run.shape[-1]
    chosen = every.take(first_of_cell + np.argmax(ranked_by, axis=-1).ravel())
    speedup = ranked_by.max(axis=-1)
    is_usable = can_run.any(axis=-1)

    # where the draft alone has no room is a gap among the contexts that could pay
    is_counted = is_usable | ~chosen.full(chosen.valid).reshape(shape)
    break_even_context: list[float | None] = []
    between = slice(len(contexts), None)
    for speedups, counted in zip(
        speedup[:, between], is_counted[:, between], strict=True
    ):
        break_even_context.append(_break_even(fine[counted], speedups[counted]))

    # intervals take longer than all else: of the contexts of the table alone
    pays = speedup[:, shown] > 1.0
    places = np.arange(room.size).reshape(shape)[:, shown]
    cells = chosen.take(places.ravel())
    bounds = interval(cells, tokens_error(cells, option.acceptance))

    def by_cell(values: Array) -> Array:
        return np.where(is_usable[:, shown], np.reshape(values, pays.shape), 0.0)

    decoding = by_cell(cells.full(cells.speedup))
    decoding_low = cells.full(bounds.speedup_low)
    decoding_high = cells.full(bounds.speedup_high)
    gains = bounds.gains
    requests = _requests(case, cells)
    if requests is not None:
        gains = requests.gains(gains)
    verdicts = VERDICTS(by_cell(gains.above()))
    gamma = cells.points.gamma.reshape(pays.shape)
    fits = cells.full(cells.memory.fits).reshape(pays.shape)
    least = cells.full(cells.break_even_gen_len).reshape(pays.shape)
    break_even_gen_len = np.full(pays.shape, None)
    is_paid_back = pays & np.isfinite(least)
    break_even_gen_len[is_paid_back] = least[is_paid_back].astype(np.int64)

    # an engine that has the draft set up pays for it where it drafts nothing, too
    idle_speedup = None
    gamma_set_up = None
    speedup_set_up = None
    if best.is_speculative:
        kv_len = alone.points.context + alone.points.gen_len / 2.0
        idle_s = idle_step_s(
            setup,
            batch=alone.points.batch,
            kv_len=kv_len,
            draft_kv_len=draft_kv_tokens(setup, kv_len, leading.draft_budget),
            tp_size=alone.points.tp,
        )
        idle = alone.full(alone.autoregressive_step_s / idle_s).reshape(shape)[:, shown]
        idle_speedup = idle.tolist()
        gamma_set_up = np.where(decoding > idle, gamma, 0).tolist()
        speedup_set_up = np.maximum(decoding, idle).tolist()
    return GammaTable(
        draft=leading.draft,
        draft_method=leading.draft_method,
        draft_budget=leading.draft_budget,
        tp_size=best.tp_size,
        batch_sizes=batches,
        context_lens=contexts,
        gamma=np.where(pays, gamma, 0).tolist(),
        speedup=np.where(pays, decoding, 1.0).tolist(),
        speedup_low=by_cell(decoding_low).tolist(),
        speedup_high=by_cell(decoding_high).tolist(),
        verdict=np.where(pays, verdicts, "does not pay").tolist(),
        fits=np.where(pays, fits, room[:, shown]).tolist(),
        break_even_gen_len=break_even_gen_len.tolist(),
        break_even_context=break_even_context,
        idle_speedup=idle_speedup,
        gamma_set_up=gamma_set_up,
        speedup_set_up=speedup_set_up,
    )


def _requests(case: Case, rows: Prediction) -> WholeRequests | None:
    """Whole requests. None: no length is generated."""
    gen_len = float(case.request.gen_len)
    if not gen_len:
        return None
    return whole_requests(rows, output_len=gen_len)


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
