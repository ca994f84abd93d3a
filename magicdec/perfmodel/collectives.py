"""Seconds of a collective over the ranks of one node. 0 with one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from magicdec.specs.hardware import HardwareProfile

Array = npt.NDArray[np.float64]


def _inputs(message_bytes: Any, tp_size: Any) -> tuple[Array, Array]:
    size = np.maximum(np.nan_to_num(np.asarray(message_bytes, dtype=np.float64), nan=0.0, posinf=1e30), 0.0)
    ranks = np.maximum(np.nan_to_num(np.asarray(tp_size, dtype=np.float64), nan=1.0, posinf=1e6), 1.0)
    size, ranks = np.broadcast_arrays(size, ranks)
    return size, ranks


def all_reduce_time(hw: HardwareProfile, *, message_bytes: Any, tp_size: Any) -> Array:
    """Every rank holds `message_bytes` and gets the sum."""
    curve = hw.allreduce_curve()
    size, ranks = _inputs(message_bytes, tp_size)
    bulk = 2.0 * (ranks - 1) / ranks * size / (curve.bulk_efficiency * hw.link.bytes_per_s)
    time: Array = np.where(ranks > 1, curve.overhead_s + curve.rank_overhead_s * (ranks - 2) + bulk, 0.0)
    return time


def all_gather_time(hw: HardwareProfile, *, message_bytes: Any, tp_size: Any) -> Array:
    """Every rank ends with the `message_bytes` of which it held 1/tp_size."""
    curve = hw.allreduce_curve()
    size, ranks = _inputs(message_bytes, tp_size)
    bulk = (ranks - 1) / ranks * size / (curve.bulk_efficiency * hw.link.bytes_per_s)
    time: Array = np.where(ranks > 1, curve.overhead_s + curve.rank_overhead_s * (ranks - 2) + bulk, 0.0)
    return time


def broadcast_time(hw: HardwareProfile, *, message_bytes: Any, tp_size: Any) -> Array:
    """One rank sends `message_bytes` to all others."""
    curve = hw.allreduce_curve()
    size, ranks = _inputs(message_bytes, tp_size)
    bulk = size / (curve.bulk_efficiency * hw.link.bytes_per_s)
    time: Array = np.where(ranks > 1, curve.overhead_s + curve.rank_overhead_s * (ranks - 2) + bulk, 0.0)
    return time
