"""The search: every budget, gamma, tp and batch of each draft on one device, under its memory and latency limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from magicdec.errors import CapacityError
from magicdec.perfmodel import candidates
from magicdec.perfmodel.candidates import SECONDS_PER_HOUR, Row
from magicdec.perfmodel.cost import Array
from magicdec.perfmodel.drafts import DraftOption
from magicdec.perfmodel.intervals import SOURCE_ERROR
from magicdec.perfmodel.plan_request import DEFAULT_BATCH, MAX_BATCH, Device, Lengths
from magicdec.perfmodel.prediction import BoolArray, Prediction, predict
from magicdec.perfmodel.setup import Points
from magicdec.perfmodel.steps import prefill_terms
from magicdec.specs.parallel import valid_tp_sizes
from magicdec.specs.precision import Precision
from magicdec.units import MEGA

MAX_EVERY_BATCH = 512
"""Up to here every batch size is searched: waves of blocks make neighbours differ by several percent."""
NUM_SEARCHED_BATCHES = 512
MAX_CANDIDATES = 1000
MAX_SUGGESTED_TP = 64


def answer(device: Device) -> list[Row]:
    """Rows of every context: the autoregressive ones, then each draft's.

    Raises CapacityError when not even autoregressive decoding fits.
    """
    rows: list[Row] = []
    sources = {option.acceptance.source for option in device.options if option.acceptance is not None}
    for lengths in device.lengths:
        batches = _batches(device, lengths)
        _check_capacity(device, lengths, batches)
        rows.extend(_rows(device, None, lengths, batches))
        for index, option in enumerate(device.options):
            error = SOURCE_ERROR if len(sources) > 1 and index > 0 else 0.0
            rows.extend(_rows(device, option, lengths, batches, error))
    return rows


def best_autoregressive(device: Device) -> list[Row]:
    """Autoregressive decoding at its own best batch and tp, per context, within the latency limits."""
    searching = dataclasses.replace(device, searches_batch=True, options=())
    found = [_rows(searching, None, lengths, _batches(searching, lengths)) for lengths in device.lengths]
    return [max(rows, key=lambda row: float(row["tokens_per_s_per_gpu"])) for rows in found if rows]


def _batches(device: Device, lengths: Lengths) -> Array:
    """The batch sizes to evaluate: the given ones, or a geometric range up to the largest that fits."""
    if not device.searches_batch:
        return np.asarray(device.request.batch_sizes or (DEFAULT_BATCH,), dtype=np.float64)
    largest = device.largest_batches(lengths).max(initial=0)
    if largest < 1:
        return np.zeros(0)
    every = np.arange(1.0, min(largest, MAX_EVERY_BATCH) + 1.0)
    if largest <= MAX_EVERY_BATCH:
        return every
    beyond = np.geomspace(MAX_EVERY_BATCH, min(largest, MAX_BATCH), NUM_SEARCHED_BATCHES)
    return np.asarray(sorted({*every.tolist(), *(float(round(each)) for each in beyond.tolist())}))


def _rows(
    device: Device, option: DraftOption | None, lengths: Lengths, batches: Array, source_error: float = 0.0
) -> list[Row]:
    """The rows of one draft at one context: every point, or where the batch is searched those worth a look."""
    gammas = device.gammas if option is not None else (0,)
    if not len(batches) or (option is not None and gammas == (0,)):
        return []
    setup, law = device.setup(option), option.acceptance if option is not None else None
    points = Points.grid(
        batch=batches, context=(lengths.prompt_len,), tp=device.tp_sizes, gamma=gammas,
        budget=option.budgets if option is not None else (0,), gen_len=lengths.growth, max_len=lengths.max_len(batches),
    )  # fmt: skip
    prediction = predict(setup, law, points)
    chosen = _select(device, prediction, _allowed(device, lengths, prediction))
    if not len(chosen):
        return []
    rows = candidates.rows(prediction.take(chosen), law, source_error=source_error)
    for row in rows:
        finish(device, lengths, row)
    return rows


def finish(device: Device, lengths: Lengths, row: Row) -> None:
    """What a row says of the request as a whole: replicas, limits, and a workload's prefill."""
    request = device.request
    row["num_replicas"] = max(1, (request.num_gpus or row["tp_size"]) // row["tp_size"])
    row["within_limits"] = bool(
        (request.tpot_limit_s is None or row["tpot_s"] <= request.tpot_limit_s)
        and (request.ttft_limit_s is None or row["ttft_s"] <= request.ttft_limit_s)
    )
    if lengths.workload is not None:
        decode_s = lengths.workload.mean_gen_len * row["tpot_s"] / row["batch_size"]
        request_s = row["ttft_s"] + decode_s
        row["prefill_share"] = row["ttft_s"] / request_s
        row["requests_per_s"] = row["num_replicas"] / request_s
        row["gpu_hours_per_million_requests"] = request_s * row["tp_size"] / SECONDS_PER_HOUR * MEGA


def _allowed(device: Device, lengths: Lengths, result: Prediction) -> BoolArray:
    request = device.request
    allowed: BoolArray = result.full(result.valid).copy()
    if device.searches_batch:
        allowed &= result.memory.fits
        if request.tpot_limit_s is not None:
            allowed &= result.tpot_s <= request.tpot_limit_s
        if request.ttft_limit_s is not None:
            first = prefill_terms(device.setup(None), batch=1.0, prompt_len=lengths.prompt_len, tp_size=device.tp)
            allowed &= np.reshape(first.total_s <= request.ttft_limit_s, (1, 1, -1, 1, 1))
    return allowed


def _select(device: Device, result: Prediction, allowed: BoolArray) -> Any:
    """Flat indices: of all allowed points, fastest first; or where the batch is searched, of those that no other of
    this draft beats in both latency and throughput per device."""
    flat = np.flatnonzero(allowed)
    if not device.searches_batch:
        order = np.argsort(-result.full(result.speedup).ravel()[flat], kind="stable")
        return flat[order[:MAX_CANDIDATES]]
    rate = result.full(result.tokens_per_s / result.points.tp).ravel()[flat]
    latency = result.full(result.tpot_s).ravel()[flat]
    order = np.lexsort((-rate, latency))
    highest = np.maximum.accumulate(np.concatenate([[0.0], rate[order][:-1]]))
    return flat[order[rate[order] > highest]]


def _check_capacity(device: Device, lengths: Lengths, batches: Array) -> None:
    """Refuses what cannot run even without a draft, naming the nearest that does."""
    largest = device.largest_batches(lengths)
    name, hw, context = device.model.name, device.hardware.name, round(lengths.prompt_len)
    if largest.max(initial=0) < 1:
        raise CapacityError(
            f"{name} with context {context} does not fit on {device.tp_sizes[-1]} x {hw}; {_what_fits(device, lengths)}"
        )
    if len(batches) and batches.min() > largest.max():
        tp = device.tp_sizes[int(np.argmax(largest))]
        raise CapacityError(
            f"batch {int(batches.min())} of {name} at context {context} does not fit on {tp} x {hw}; "
            f"the largest batch that fits is {int(largest.max())}"
        )


def _what_fits(device: Device, lengths: Lengths) -> str:
    """The smallest tp that holds one sequence, or the narrower weights that do."""
    sizes = [size for size in valid_tp_sizes(device.model, MAX_SUGGESTED_TP) if size > max(device.tp_sizes)]
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
