"""The search: every budget, gamma, tp and batch of each draft for one device and context, under memory and limits.

Exhaustive: `predict` evaluates the whole grid of a draft at once, and what is kept of it keeps its prediction.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from magicdec.errors import CapacityError
from magicdec.perfmodel.intervals import interval, tokens_error
from magicdec.perfmodel.kernels.base import Array
from magicdec.perfmodel.plan.answer import candidates, requests_of
from magicdec.perfmodel.plan.device import DEFAULT_BATCH, Device, Lengths
from magicdec.perfmodel.plan.drafts import DraftOption
from magicdec.perfmodel.serving import WholeRequests
from magicdec.perfmodel.setup import Points
from magicdec.perfmodel.speedup import BoolArray, Prediction, predict
from magicdec.plan_document import Candidate
from magicdec.plan_request import MAX_BATCH
from magicdec.specs.parallel import valid_tp_sizes
from magicdec.specs.precision import Precision

MAX_EVERY_BATCH = 512
"""Up to here every batch size is searched: waves of blocks make neighbours differ by several percent."""
NUM_SEARCHED_BATCHES = 512
MAX_CANDIDATES = 1000
MAX_SUGGESTED_TP = 64


@dataclass(frozen=True, kw_only=True)
class Found:
    """Candidates kept of one draft (None: autoregressive decoding) in one case, and their prediction as rows in the
    same order."""

    option: DraftOption | None
    prediction: Prediction
    rows: list[Candidate]


def search(device: Device, lengths: Lengths, baseline: Candidate | None) -> list[Found]:
    """Autoregressive decoding first, then each draft. `baseline`: autoregressive decoding at its best batch.

    Raises CapacityError when not even autoregressive decoding fits.
    """
    batches = searched_batches(device, lengths)
    _check_capacity(device, lengths, batches)
    rate = baseline.rate if baseline is not None else None
    found = [_found(device, option, lengths, batches, rate) for option in (None, *device.options)]
    return [each for each in found if each is not None]


def best_autoregressive(device: Device, lengths: Lengths) -> Candidate | None:
    """Autoregressive decoding at its own best batch and tp, within the latency limits; None where it keeps them at no
    batch."""
    searching = dataclasses.replace(device, searches_batch=True, options=())
    batches = searched_batches(searching, lengths)
    if not len(batches):
        return None
    whole = predict(device.setup(None), None, _points(searching, None, lengths, batches))
    chosen = _worth_a_look(searching, lengths, whole)
    if not len(chosen):
        return None
    rates = whole.full(seen_by_users(lengths, whole).rate_per_gpu * _used(whole, device.request.num_gpus)).ravel()[
        chosen
    ]
    best = candidates(device, lengths, whole.take(chosen[[np.argmax(rates)]]), None, baseline=None)[0]
    return msgspec.structs.replace(best, speedup_vs_best_autoregressive=1.0)


def searched_batches(device: Device, lengths: Lengths) -> Array:
    """The batch sizes to evaluate: the given ones; a usual one, or the largest power of two that fits where that does
    not; or where it is searched, a geometric range up to the largest that fits."""
    if device.request.batch_sizes and not device.searches_batch:
        return np.asarray(device.request.batch_sizes, dtype=np.float64)
    largest = device.largest_batches(lengths).max(initial=0)
    if not device.searches_batch:
        return np.asarray([DEFAULT_BATCH if largest < 1 else min(DEFAULT_BATCH, 2.0 ** np.floor(np.log2(largest)))])
    if largest < 1:
        return np.zeros(0)
    every = np.arange(1.0, min(largest, MAX_EVERY_BATCH) + 1.0)
    if largest <= MAX_EVERY_BATCH:
        return every
    beyond = np.geomspace(MAX_EVERY_BATCH, min(largest, MAX_BATCH), NUM_SEARCHED_BATCHES)
    return np.asarray(sorted({*every.tolist(), *(float(round(each)) for each in beyond.tolist())}))


def _found(
    device: Device, option: DraftOption | None, lengths: Lengths, batches: Array, baseline: float | None
) -> Found | None:
    """Every point of one draft, or where the batch is searched those worth a look; None where there are none."""
    gammas = device.gammas_of(option)
    if not len(batches) or (option is not None and gammas == (0,)):
        return None
    law = option.acceptance if option is not None else None
    whole = predict(device.setup(option), law, _points(device, option, lengths, batches))
    if device.searches_batch:
        chosen = _worth_a_look(device, lengths, whole)
    else:
        chosen = _fastest(whole)
        if len(chosen) > MAX_CANDIDATES:
            leading = _leading(device, lengths, whole, tokens_error(whole, law))
            chosen = np.concatenate([chosen[:MAX_CANDIDATES], np.setdiff1d(leading, chosen[:MAX_CANDIDATES])])
    if not len(chosen):
        return None
    prediction = whole.take(chosen)
    rows = candidates(device, lengths, prediction, law, baseline=baseline)
    return Found(option=option, prediction=prediction, rows=rows)


def _points(device: Device, option: DraftOption | None, lengths: Lengths, batches: Array) -> Points:
    return Points.grid(
        batch=batches, context=(lengths.prompt_len,), tp=device.tp_sizes, gamma=device.gammas_of(option),
        budget=option.budgets if option is not None else (0,), gen_len=lengths.growth, max_len=lengths.max_len(batches),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SeenByUsers:
    """Latencies and rates that limits bear on: of whole requests where their lengths are known."""

    prediction: Prediction
    whole: WholeRequests | None

    @property
    def first_s(self) -> Array:
        return self.prediction.ttft_s if self.whole is None else self.whole.drafted.ttft_s

    @property
    def between_s(self) -> Array:
        return self.prediction.tpot_s if self.whole is None else self.whole.drafted.tpot_s

    @property
    def rate_per_gpu(self) -> Array:
        replica = self.prediction.tokens_per_s if self.whole is None else self.whole.output_tokens_per_s
        rate: Array = replica / self.prediction.num_gpus
        return rate


def seen_by_users(lengths: Lengths, result: Prediction) -> SeenByUsers:
    return SeenByUsers(prediction=result, whole=requests_of(lengths, result))


def within_limits(device: Device, seen: SeenByUsers) -> BoolArray:
    request = device.request
    allowed: BoolArray = np.ones((), dtype=np.bool_)
    if request.tpot_limit_s is not None:
        allowed = allowed & (seen.between_s <= request.tpot_limit_s)
    if request.ttft_limit_s is not None:
        allowed = allowed & (seen.first_s <= request.ttft_limit_s)
    return allowed


def _fastest(result: Prediction) -> npt.NDArray[np.int64]:
    """Flat indices of the points that can be drafted, fastest first."""
    flat = np.flatnonzero(result.full(result.valid))
    fastest: npt.NDArray[np.int64] = flat[np.argsort(-result.full(result.speedup).ravel()[flat], kind="stable")]
    return fastest


def _leading(device: Device, lengths: Lengths, result: Prediction, tokens: Array) -> npt.NDArray[np.int64]:
    """Flat indices, of each batch, of the points with the highest rate and with the highest lower end of it (`tokens`:
    the error of tokens per step), so that a batch's answer does not hang on how many were asked for."""
    seen = seen_by_users(lengths, result)
    rate = result.full(seen.rate_per_gpu)
    share = interval(result, tokens).speedup_low / result.speedup
    if seen.whole is not None:
        share = seen.whole.speedup_at(share * result.speedup) / seen.whole.speedup_at(result.speedup)
    is_first = (
        2.0 * result.full(within_limits(device, seen))
        + result.full(result.memory.fits)
        - 4.0 * ~result.full(result.valid)
    )
    num_batches = result.points.shape[0]
    scores = [(is_first + each / (2.0 * rate.max())).reshape(num_batches, -1) for each in (rate, rate * share)]
    first = np.arange(num_batches) * scores[0].shape[1]
    return np.unique(np.concatenate([first + score.argmax(axis=1) for score in scores]))


def _worth_a_look(device: Device, lengths: Lengths, result: Prediction) -> npt.NDArray[np.int64]:
    """Flat indices of those that fit, keep the limits, and that no other of this draft beats in both latency and
    throughput of all devices."""
    seen = seen_by_users(lengths, result)
    flat = np.flatnonzero(result.full(result.memory.fits & result.valid & within_limits(device, seen)))
    rate = result.full(seen.rate_per_gpu * _used(result, device.request.num_gpus)).ravel()[flat]
    latency = result.full(seen.between_s).ravel()[flat]
    order = np.lexsort((-rate, latency))
    highest = np.maximum.accumulate(np.concatenate([[0.0], rate[order][:-1]]))
    unbeaten: npt.NDArray[np.int64] = flat[order[rate[order] > highest]]
    return unbeaten


def _used(result: Prediction, num_gpus: int | None) -> Array:
    """Devices that all replicas use."""
    used: Array = result.num_gpus * np.maximum(1.0, (num_gpus or 1) // result.num_gpus)
    return used


def _check_capacity(device: Device, lengths: Lengths, batches: Array) -> None:
    """Refuses what cannot run even without a draft, naming the nearest that does."""
    largest = device.largest_batches(lengths)
    name, hw, context = device.model.name, device.hardware.name, round(lengths.prompt_len)
    if largest.max(initial=0) < 1:
        raise CapacityError(
            f"{name} with context {context} does not fit on {device.tp_sizes[-1] * device.spread.groups} x {hw}"
            f"{device.spread_name}; {_what_fits(device, lengths)}"
        )
    if len(batches) and batches.min() > largest.max():
        tp = device.tp_sizes[int(np.argmax(largest))] * device.spread.groups
        raise CapacityError(
            f"batch {int(batches.min())} of {name} at context {context} does not fit on {tp} x {hw}; "
            f"the largest batch that fits is {int(largest.max())}"
        )


def _what_fits(device: Device, lengths: Lengths) -> str:
    """The smallest tp that holds one sequence, or the narrower weights that do."""
    valid = valid_tp_sizes(device.model, MAX_SUGGESTED_TP, device.engine.vocabulary_multiple)
    sizes = [size for size in valid if size > max(device.tp_sizes)]
    if sizes:
        wider = dataclasses.replace(device, tp_sizes=tuple(sizes))
        enough = [size for size, batch in zip(sizes, wider.largest_batches(lengths), strict=True) if batch >= 1]
        if enough:
            return f"tp {enough[0]} would hold it"
    for dtype in ("fp8", "int4"):
        narrower = dataclasses.replace(device, precision=Precision(weight_dtype=dtype, kv_dtype=dtype))
        if narrower.largest_batches(lengths).max(initial=0) >= 1:
            return f"with weights and KV in {dtype} it would"
    return "it takes a device with more memory, or a shorter context"
