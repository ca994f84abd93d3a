"""Kernels that stream their operands once: norms, rotary, residuals, softmax over the vocabulary."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np

from magicdec.fitting import Free
from magicdec.perfmodel.kernels.base import Cost, Curve, Op, OpTime, Where, WorkingSet, arrays, operation
from magicdec.specs.device import Device


class Stream(NamedTuple):
    """`num_kernels` kernels that stream `num_bytes` in all (reads and writes)."""

    num_bytes: Any
    num_kernels: Any = 1.0


class ElementwiseCurve(Curve, frozen=True, kw_only=True):
    """Time of kernels that stream their operands once."""

    key: ClassVar[str] = "elementwise"
    overhead_s: Annotated[float, Free(spread=2.0)] = 3e-6
    bandwidth_efficiency: Annotated[float, Free(spread=1.0)] = 0.75

    def seconds(self, hw: Device, work: Stream, working_set: WorkingSet = None) -> OpTime:
        num_bytes, num_kernels = arrays(*work)
        memory_s = num_bytes / (self.bandwidth_efficiency * hw.memory_bytes_per_s)
        overhead_s = num_kernels * self.overhead_s
        return OpTime(memory_s + overhead_s, memory_s, np.zeros_like(memory_s), overhead_s)


def streaming(name: str, at: Where, *, num_bytes: Any, num_kernels: Any = 1.0, count: Any = 1.0) -> Op:
    """`count` times `num_kernels` kernels that stream `num_bytes` in all."""
    num_bytes = np.asarray(num_bytes, dtype=np.float64)
    time = ElementwiseCurve.of(at.hw).seconds(at.hw, Stream(num_bytes, num_kernels))
    cost, factor = Cost(activation_bytes=num_bytes), at.engine.elementwise_factor
    return operation(name, "elementwise", at, cost, time, at.precision.compute_dtype, count=count, factor=factor)
