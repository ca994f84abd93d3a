"""The search: every budget, gamma, tp and batch of each draft for one device and context, under
memory and limits.

Exhaustive: `predict` evaluates the whole grid of a draft at once, and what is kept of it keeps its
prediction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from magicdec.counts import Array
from magicdec.errors import CapacityError, either
from magicdec.perfmodel import memory
from magicdec.perfmodel.lanes import evidence_of
from magicdec.perfmodel.plan.request import DEFAULT_BATCH, Case, DraftOption
from magicdec.perfmodel.plan.rows import Users, candidates
from magicdec.perfmodel.setup import Points
from magicdec.perfmodel.speedup import BoolArray, Prediction, predict
from magicdec.schema.evidence import LaneEvidence
from magicdec.schema.request import MAX_BATCH
from magicdec.schema.row import Candidate, configuration
from magicdec.specs.device import LEAST_LESS, MOST_LESS
from magicdec.specs.engine import EngineProfile
from magicdec.specs.parallel import valid_tp_sizes
from magicdec.specs.precision import Precision
from magicdec.units import GIB

NEARLY_AS_MANY = 0.75
"""Share of the sequences without a draft that a draft must leave room for to set the batch."""
MAX_EVERY_BATCH = 512
"""Up to here every batch size is searched: waves of blocks make neighbours differ by several
percent.
"""
NUM_SEARCHED_BATCHES = 512
MAX_CANDIDATES = 1000
NUM_TRIED_BATCHES = 64
MAX_SUGGESTED_TP = 64
MAX_SUGGESTED_STAGES = 16
MARGIN = 0.03
"""Part of the memory that may be taken by which nobody can tell whether a server fits."""


class DraftRows(msgspec.Struct, frozen=True, kw_only=True):
    """The best candidates of one draft in one case, and their predictions in the same order.
    `option` None: autoregressive decoding."""

    option: DraftOption | None
    prediction: Prediction
    rows: list[Candidate]


class Place(NamedTuple):
    """Where a row was found: the number of its draft, and its own among the draft's rows."""

    draft: int
    row: int


class SearchResult(msgspec.Struct, frozen=True, dict=True):
    """Everything found of each draft of a case, decoding without one first; and the way back from a
    row to its draft and prediction."""

    drafts: tuple[DraftRows, ...]

    def __iter__(self) -> Iterator[DraftRows]:
        return iter(self.drafts)

    def place(self, row: Candidate) -> Place:
        return self._places[configuration(row)]

    def origin(self, row: Candidate) -> DraftRows:
        """The draft that a row is of."""
        return self.drafts[self.place(row).draft]

    def prediction(self, row: Candidate) -> Prediction:
        """The prediction that a row is of."""
        return self.origin(row).prediction.take([self.place(row).row])

    def evidence(self, row: Candidate) -> LaneEvidence:
        """The evidence from measured servers like a row's."""
        return evidence_of(self.origin(row).prediction.setup)

    @cached_property
    def _places(self) -> dict[tuple[object, ...], Place]:
        places = {}
        for number, of_draft in enumerate(self.drafts):
            for place, row in enumerate(of_draft.rows):
                places[configuration(row)] = Place(number, place)
        return places


def search(case: Case, baseline: Candidate | None) -> SearchResult:
    """Autoregressive decoding first, then each draft. `baseline`: autoregressive decoding at its
    best batch.

    Raises CapacityError when not even autoregressive decoding fits.
    """
    batches = _searched_batches(case)
    _check_capacity(case)
    rate = None
    if baseline is not None:
        rate = baseline.rate
    searched = []
    for option in (None, *case.options):
        of_draft = _found(case, option, batches, rate)
        if of_draft is not None:
            searched.append(of_draft)
    return SearchResult(tuple(searched))


def best_autoregressive(case: Case) -> Candidate | None:
    """Autoregressive decoding at its own best batch and tp within the latency limits. None: no
    batch keeps them."""
    searching = dataclasses.replace(case, searches_batch=True, options=())
    batches = _searched_batches(searching)
    if not len(batches):
        return None
    whole = predict(case.setup(None), None, _points(searching, None, batches))
    chosen = _worth_a_look(searching, whole)
    if not len(chosen):
        return None
    of_all_gpus = Users.of(case, whole).rate_per_gpu * _used(case, whole)
    rates = whole.full(of_all_gpus).ravel()[chosen]
    best = whole.take(chosen[[np.argmax(rates)]])
    (row,) = candidates(case, best, None, baseline=None)
    return msgspec.structs.replace(row, speedup_vs_best_autoregressive=1.0)


def largest_that_runs(
    case: Case, option: DraftOption, row: Candidate
) -> Candidate | None:
    """The best row of a draft at the largest batch at which it fits and keeps the limits, with the
    budget and on the tp size of `row`; None where it runs at no batch.
    """
    narrowed = dataclasses.replace(
        case,
        tp_sizes=(row.tp_size,),
        options=(dataclasses.replace(option, budgets=(row.draft_budget,)),),
    )
    option = narrowed.options[0]
    largest = int(narrowed.largest_batches(option=option, budget=row.draft_budget)[0])
    if largest < 1:
        return None
    batches = np.unique(
        np.round(np.geomspace(1.0, min(largest, MAX_BATCH), NUM_TRIED_BATCHES))
    )
    whole = predict(
        narrowed.setup(option), option.acceptance, _points(narrowed, option, batches)
    )
    users = Users.of(narrowed, whole)
    runs = whole.full(whole.valid & whole.memory.fits & users.is_within_limits)
    able = np.flatnonzero(runs)
    if not len(able):
        return None
    batch_of = whole.full(whole.points.batch).ravel()[able]
    able = able[batch_of == batch_of.max()]
    rate = whole.full(users.rate_per_gpu).ravel()[able]
    best = whole.take(able[[np.argmax(rate)]])
    return candidates(narrowed, best, option.acceptance, baseline=None)[0]


def same_on(
    engine: EngineProfile, case: Case, option: DraftOption | None, row: Candidate
) -> Candidate | None:
    """The row's configuration on an engine that is set otherwise; None: it does not run."""
    options: tuple[DraftOption, ...] = ()
    request = case.request
    if option is not None:
        options = (option,)
        request = msgspec.structs.replace(request, gamma=row.gamma)
    otherwise = dataclasses.replace(
        case, engine=engine, options=options, request=request
    )
    for of_draft in search(otherwise, None):
        for other in of_draft.rows:
            is_same = (other.gamma, other.batch_size) == (row.gamma, row.batch_size)
            if is_same and other.draft_budget == row.draft_budget:
                return other
    return None


def every_gamma(
    case: Case, option: DraftOption, row: Candidate, *, deepest: int = 0
) -> DraftRows:
    """The row's draft with its budget, at the row's batch and on its devices, at every gamma that
    may be chosen and every one up to `deepest`."""
    free = dataclasses.replace(
        case,
        request=msgspec.structs.replace(case.request, gamma=None),
        tp_sizes=(row.tp_size,),
    )
    narrowed = dataclasses.replace(option, budgets=(row.draft_budget,))
    gammas = free.gammas_of(option)
    if len(gammas) > 1:
        gammas = tuple(sorted({*range(1, deepest + 1), *gammas}))
    elif deepest and deepest not in gammas:
        gammas = (*gammas, deepest)
    batches = np.asarray([float(row.batch_size)])
    points = _points(free, narrowed, batches, gammas)
    whole = predict(free.setup(option), option.acceptance, points)
    prediction = whole.take(np.flatnonzero(whole.full(whole.valid)))
    rows = candidates(free, prediction, option.acceptance, baseline=None)
    return DraftRows(option=option, prediction=prediction, rows=rows)


def _searched_batches(case: Case) -> Array:
    """The batch sizes to evaluate.

    - Requested batches; if none fits, the largest that fit with and without drafts.
    - Without a request, the default batch, or the largest smaller power of two that fits.
    - If batches are searched, a range up to the largest that fits.
    """
    if case.request.batch_sizes and not case.searches_batch:
        asked = np.asarray(case.request.batch_sizes, dtype=np.float64)
        most = most_that_fit(case)
        if asked.min() <= most or most < 1:
            return asked
        alone = float(case.largest_batches().max())
        return np.unique([most, min(alone, float(asked.min()))])
    largest = case.largest_batches().max(initial=0)
    if not case.searches_batch:
        usual = float(DEFAULT_BATCH)
        if largest >= 1:
            power_of_two = 2.0 ** np.floor(np.log2(largest))
            usual = min(usual, float(power_of_two))
        return np.asarray([usual])
    every = np.arange(1.0, min(largest, MAX_EVERY_BATCH) + 1.0)
    if largest <= MAX_EVERY_BATCH:
        return every
    beyond = np.geomspace(
        MAX_EVERY_BATCH, min(largest, MAX_BATCH), NUM_SEARCHED_BATCHES
    )
    return np.unique([*every, *np.round(beyond)])


def most_that_fit(case: Case) -> float:
    """The largest batch that fits without a draft, or with the drafts if they cost few
    sequences."""
    alone = float(case.largest_batches().max(initial=0))
    most = alone
    for option in case.options:
        # the widest window where windows are tried: the whole cache is then one choice of several
        windows = [budget for budget in option.budgets if budget is not None]
        budget = max(windows, default=None)
        drafted = float(
            case.largest_batches(option=option, budget=budget, gamma=1).max()
        )
        if drafted >= NEARLY_AS_MANY * alone:
            most = min(most, drafted)
    return most


def _found(
    case: Case,
    option: DraftOption | None,
    batches: Array,
    baseline: float | None,
) -> DraftRows | None:
    """Every point of one draft; if the batch is searched, the undominated points only. None: there
    are none.
    """
    if not len(batches):
        return None
    law = None
    if option is not None:
        if case.gammas_of(option) == (0,):
            return None
        law = option.acceptance
    whole = predict(case.setup(option), law, _points(case, option, batches))
    if case.searches_batch:
        chosen = _worth_a_look(case, whole)
    else:
        chosen = _fastest_first(case, whole)
    if not len(chosen):
        return None
    prediction = whole.take(chosen)
    rows = candidates(case, prediction, law, baseline=baseline)
    return DraftRows(option=option, prediction=prediction, rows=rows)


def _fastest_first(case: Case, whole: Prediction) -> npt.NDArray[np.int64]:
    """Flat indices of all valid points by speedup; of too many the fastest, and those that lead at
    each batch."""
    valid = np.flatnonzero(whole.full(whole.valid))
    speedup = whole.full(whole.speedup).ravel()[valid]
    order = np.argsort(-speedup, kind="stable")
    ranked: npt.NDArray[np.int64] = valid[order]
    if len(ranked) <= MAX_CANDIDATES:
        return ranked
    fastest = ranked[:MAX_CANDIDATES]
    # so that a batch's answer does not depend on which other batches were requested
    users = Users.of(case, whole)
    leading = best_of_each_batch(
        whole.full(users.rate_per_gpu),
        is_valid=whole.full(whole.valid),
        is_within_limits=whole.full(users.is_within_limits),
        fits=whole.full(whole.memory.fits),
    )
    return np.concatenate([fastest, np.setdiff1d(leading, fastest)])


def with_best_settings(case: Case) -> Case:
    """The case with each replayed look-up at the setting that is fastest."""
    batches = _searched_batches(case)
    if not len(batches):
        return case
    options = []
    for option in case.options:
        best = option
        settings = option.acceptance.settings
        if len(settings) > 1 and case.gammas_of(option) != (0,):
            setup = case.setup(option)
            points = _points(case, option, batches)
            fastest = 0.0
            for law in settings:
                whole = predict(setup, law, points)
                speedup = whole.full(whole.speedup)
                speedup = np.where(whole.full(whole.valid), speedup, 0.0)
                if speedup.max(initial=0.0) > fastest:
                    fastest = float(speedup.max())
                    best = dataclasses.replace(option, acceptance=law)
        options.append(best)
    return dataclasses.replace(case, options=tuple(options))


def _points(
    case: Case,
    option: DraftOption | None,
    batches: Array,
    gammas: tuple[int, ...] | None = None,
) -> Points:
    """Every combination that the case searches of a draft; `gammas` None: those of the case."""
    lengths = case.lengths
    budgets: tuple[int | None, ...] = (None,)
    if option is not None:
        budgets = option.budgets
    return Points.grid(
        batch=batches,
        context=(lengths.prompt_len,),
        tp=case.tp_sizes,
        budget=budgets,
        gamma=gammas or case.gammas_of(option),
        gen_len=lengths.growth,
        max_len=lengths.max_len(batches),
        cached=case.request.cached,
    )


def _worth_a_look(case: Case, result: Prediction) -> npt.NDArray[np.int64]:
    """Flat indices of the points that fit, keep the limits, and that no other point of this draft
    beats in both latency and throughput of all devices."""
    users = Users.of(case, result)
    runs = result.memory.fits & result.valid & users.is_within_limits
    able = np.flatnonzero(result.full(runs))
    of_all_gpus = users.rate_per_gpu * _used(case, result)
    rate = result.full(of_all_gpus).ravel()[able]
    latency = result.full(users.between_s).ravel()[able]
    order = np.lexsort((-rate, latency))
    ordered = rate[order]
    faster_in_latency = np.concatenate([[0.0], ordered[:-1]])
    is_highest = ordered > np.maximum.accumulate(faster_in_latency)
    undominated: npt.NDArray[np.int64] = able[order[is_highest]]
    return undominated


def _used(case: Case, result: Prediction) -> Array:
    """Devices that all replicas use."""
    return result.num_gpus * np.maximum(
        1.0, (case.request.num_gpus or 1) // result.num_gpus
    )


def within_memory(case: Case) -> Case:
    """The case with a word on what one sequence takes, where that is within `MARGIN` of what may be
    taken; it is then planned on as much memory as it may take at most."""
    tp = np.asarray(case.tp_sizes, dtype=np.float64)
    need = memory.memory_need(
        case.setup(None),
        batch=float(case.spread.dp),
        max_len=case.lengths.max_len(1.0),
        budget=None,
        gamma=0,
        tp_size=tp,
    ).total_bytes
    capacity = memory.capacity_bytes(case.hardware, case.engine, tp)
    need, capacity = np.broadcast_arrays(need, capacity)
    roomiest = int(np.argmin(need / np.maximum(capacity, 1.0)))
    taken = float(need[roomiest])
    most = float(capacity[roomiest])
    usable, error = case.hardware.usable_memory
    share = most / usable
    least = (case.hardware.least_usable_bytes or usable * (1.0 - MARGIN)) * share
    if not least < taken <= (1.0 + MARGIN) * most:
        return case
    of = f"{most / GIB:.1f} GiB"
    if case.hardware.least_usable_bytes is not None:
        of = f"{least / GIB:.1f} to {of}, by the machine's settings,"
    if error:
        of += (
            f" ({100 * LEAST_LESS:g} to {100 * MOST_LESS:g} % below nvidia-smi's total)"
        )
    may_not_fit = (
        f"may not fit: {taken / GIB:.1f} of {of} that {case.engine.name} may take of each "
        f"{case.hardware.name}"
    )
    more = max(taken - most, 0.0)
    hardware = msgspec.structs.replace(
        case.hardware, usable_bytes=usable + more / share
    )
    return dataclasses.replace(case, hardware=hardware, may_not_fit=may_not_fit)


def _check_capacity(case: Case) -> None:
    """Raises CapacityError for a case that does not fit even without a draft, and suggests the
    nearest one that does."""
    if case.largest_batches().max(initial=0) >= 1:
        return
    parts = []
    for part, size in (("pp", case.spread.pp), ("dp", case.spread.dp)):
        if size > 1:
            parts.append(f"{part} {size}")
    spread = ""
    if parts:
        spread = f" ({', '.join(parts)})"
    context = round(case.lengths.prompt_len)
    count = case.tp_sizes[-1] * case.spread.groups
    raise CapacityError(
        f"{case.model.name} with context {context} does not fit on {count} x {case.hardware.name}"
        f"{spread}; {_what_fits(case)}"
    )


def _what_fits(case: Case) -> str:
    """The smallest number of devices that holds one sequence, and the weight formats that do on
    these: of what this engine can do."""
    ways = []
    if case.engine.paths.stages_by_itself:
        for count in range(case.spread.pp + 1, MAX_SUGGESTED_STAGES + 1):
            spread = dataclasses.replace(case.spread, pp=count)
            if dataclasses.replace(case, spread=spread).largest_batches()[0] >= 1:
                ways.append(f"{count} devices")
                break
        if formats_that_fit(case):
            ways.append("a file of fewer bits")
        return f"{either([*ways, 'layers on the host (a smaller -ngl)'])} would"
    for size in valid_tp_sizes(
        case.model, MAX_SUGGESTED_TP, case.engine.sampling.vocabulary_multiple
    ):
        if size <= max(case.tp_sizes):
            continue
        wider = dataclasses.replace(case, tp_sizes=(size,))
        if wider.largest_batches()[0] >= 1:
            ways.append(f"tp {size}")
            break
    ways += [f"--weight-dtype {dtype}" for dtype in formats_that_fit(case)]
    if ways:
        return f"{either(ways)} would"
    if formats_that_fit(case, kv_dtype="fp8"):
        return "weights in int4 and a KV cache in fp8 would"
    return "it takes a device with more memory, or a shorter context"


def formats_that_fit(
    case: Case, *, batch: int = 1, kv_dtype: str | None = None
) -> list[str]:
    """Narrower formats of the weights with which a batch fits, the widest first."""
    now = case.precision
    fitting = []
    for dtype in ("fp8", "int4"):
        precision = Precision(weight_dtype=dtype, kv_dtype=kv_dtype or now.kv_dtype)
        if precision.weight_bytes >= now.weight_bytes:
            continue
        narrower = dataclasses.replace(case, precision=precision)
        if narrower.largest_batches().max(initial=0) >= batch:
            fitting.append(dtype)
    return fitting


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
    keys = [loss.reshape(num_batches, -1) for loss in losses]
    best = np.lexsort(keys, axis=-1)[:, 0]
    return np.arange(num_batches) * keys[0].shape[1] + best
