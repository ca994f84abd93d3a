"""Seconds of one operation on a device, and which ceiling binds.

    time = overhead + || bytes / bandwidth , FLOPs / rate ||_p

The p-norm of the two ceilings is a roofline with a soft ridge: at p → ∞ it is their maximum. Bandwidth and rate are the
datasheet's times fitted efficiencies. All functions are pure and broadcast over numpy arrays.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from magicdec.specs.hardware import HardwareProfile, bytes_per_element

Array = npt.NDArray[np.float64]
KvReads = Literal["per_sequence", "per_query"]
AttentionKernel = Literal["measured", "split"]


class OpTime(NamedTuple):
    """Seconds. `time_s` is the prediction; the others say what it is made of (no sum: the ridge is soft)."""

    time_s: Array
    memory_s: Array
    compute_s: Array
    overhead_s: Array


def _array(value: Any) -> Array:
    return np.maximum(np.nan_to_num(np.asarray(value, dtype=np.float64), nan=0.0, posinf=1e30), 0.0)


def soft_max(first: Array, second: Array, power: float) -> Array:
    """The p-norm of two ceilings, without overflow; 0 where both are."""
    high = np.maximum(first, second)
    low = np.minimum(first, second)
    ratio = np.divide(low, high, out=np.zeros(np.broadcast(low, high).shape), where=high > 0)
    result: Array = high * (1.0 + ratio**power) ** (1.0 / power)
    return result


def gemm_time(
    hw: HardwareProfile, *, m: Any, n: Any, k: Any, weight_dtype: str = "bf16", compute_dtype: str = "bf16"
) -> OpTime:
    """One linear layer: m tokens through weights of n × k, read once."""
    curve = hw.gemm_curve()
    m, n, k = _array(m), _array(n), _array(k)
    weight_bytes, activation_bytes = bytes_per_element(weight_dtype), bytes_per_element(compute_dtype)
    num_bytes = n * k * weight_bytes + (m * k + m * n) * activation_bytes
    memory_s = num_bytes / (curve.bandwidth_efficiency * hw.memory_bytes_per_s)
    peak = hw.compute_rate(compute_dtype)
    compute_s = 2.0 * (m + curve.half_tokens) * n * k / (curve.flops_efficiency * peak)
    overhead_s = np.full(np.shape(memory_s), curve.overhead_s)
    return OpTime(overhead_s + soft_max(memory_s, compute_s, curve.ridge_power), memory_s, compute_s, overhead_s)


def attention_time(
    hw: HardwareProfile,
    *,
    batch: Any,
    query_len: Any,
    kv_len: Any,
    num_heads: Any,
    num_kv_heads: Any,
    head_dim: Any,
    kv_dtype: str = "bf16",
    kv_reads: KvReads = "per_sequence",
    kernel: AttentionKernel = "measured",
) -> OpTime:
    """One layer's attention of `query_len` tokens per sequence, each over all of `kv_len` cached ones."""
    curve = hw.attention_curve()
    batch, query_len, kv_len = _array(batch), _array(query_len), _array(kv_len)
    num_heads, num_kv_heads, head_dim = _array(num_heads), _array(num_kv_heads), _array(head_dim)
    element = bytes_per_element(kv_dtype)
    reads = query_len if kv_reads == "per_query" else 1.0
    num_bytes = 2.0 * batch * kv_len * num_kv_heads * head_dim * element * reads
    memory_s = num_bytes / (curve.bandwidth_efficiency * hw.memory_bytes_per_s)
    peak = hw.compute_rate("fp32" if kv_dtype == "fp32" else "bf16")
    compute_s = 4.0 * batch * query_len * kv_len * num_heads * head_dim / (curve.flops_efficiency * peak)
    overhead_s = np.full(np.broadcast(memory_s, compute_s).shape, curve.overhead_s)
    return OpTime(overhead_s + soft_max(memory_s, compute_s, curve.ridge_power), memory_s, compute_s, overhead_s)


def elementwise_time(hw: HardwareProfile, *, num_bytes: Any, num_kernels: Any = 1) -> OpTime:
    """`num_kernels` kernels that stream `num_bytes` in all (reads and writes)."""
    curve = hw.elementwise_curve()
    memory_s = _array(num_bytes) / (curve.bandwidth_efficiency * hw.memory_bytes_per_s)
    overhead_s = _array(num_kernels) * curve.overhead_s
    memory_s, overhead_s = np.broadcast_arrays(memory_s, overhead_s)
    return OpTime(memory_s + overhead_s, memory_s, np.zeros_like(memory_s), overhead_s)
