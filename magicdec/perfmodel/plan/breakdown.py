"""Operations of one configuration, and the roof over them."""

from __future__ import annotations

from typing import Any

import numpy as np

from magicdec.perfmodel.kernels.gemm import GemmCurve
from magicdec.perfmodel.kernels.op import BOUNDS, Basis, ForwardTime, Op
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.speedup import Prediction
from magicdec.schema import Ceilings, KernelTime, Operation


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
    return Operation(
        op=op.name,
        time_s=_first(op.time_s),
        ceiling_s=ceiling,
        bound_by=max(BOUNDS, key=lambda each: _first(one[each])),
        flops=flops,
        bytes=num_bytes if op.group != "link" else sent,
        kernels=_kernel_times(op),
    )


def _kernel_times(op: Op) -> list[KernelTime]:
    times: list[KernelTime] = []
    for basis in op.bases:
        time = _kernel_time(basis)
        if time not in times:
            times.append(time)
    return times


def _kernel_time(basis: Basis) -> KernelTime:
    return KernelTime(
        kernel=basis.kernel,
        source=basis.source,
        relative_error=basis.relative_error,
        is_inside=basis.is_inside,
    )
