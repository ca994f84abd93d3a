"""Causal attention of whole prompts, or chunks of them.

    time = overhead + ‖ bytes / bandwidth , ‖ FLOPs / rate , w · longest block ‖_4 ‖_p

A block takes 128 queries of one head over the keys before them; its diagonal tile is computed whole. The last block of
a prompt is the longest, which is what short batches wait for.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NamedTuple, Self

import numpy as np

from magicdec.fitting import Free
from magicdec.perfmodel.kernels.attention import QUERY_ROWS_PER_BLOCK
from magicdec.perfmodel.kernels.base import (
    Array,
    Cost,
    Curve,
    Op,
    OpTime,
    Table,
    Where,
    WorkingSet,
    arrays,
    as_array,
    operation,
    soft_max,
)
from magicdec.perfmodel.kernels.fit import Rows, minimise, with_fit
from magicdec.specs.device import Device, bytes_per_element

BLOCK_RIDGE_POWER = 4.0


class Prompts(NamedTuple):
    """One layer's `query_len` new tokens per sequence, the last of the `kv_len` that are cached. `pairs` of a query and
    a key that it sees, where a window leaves fewer than all before it."""

    batch: Any
    query_len: Any
    kv_len: Any
    num_heads: Any
    num_kv_heads: Any
    head_dim: Any
    kv_dtype: str = "bf16"
    pairs: Any = None


def causal_pairs(query_len: Any, kv_len: Any) -> Array:
    """Pairs of a query, one of the last `query_len` of `kv_len` tokens, and a key up to it."""
    query_len, kv_len = as_array(query_len), as_array(kv_len)
    pairs: Array = query_len * np.maximum(kv_len - query_len, 0.0) + query_len * (query_len + 1.0) / 2.0
    return pairs


class PrefillCurve(Curve, frozen=True, kw_only=True):
    """Time of one layer's causal attention of whole prompts, or chunks of them."""

    key: ClassVar[str] = "prefill"
    tables: ClassVar[tuple[Table, ...]] = (
        Table(
            kind="prefill",
            columns=("batch_size", "num_heads", "num_kv_heads", "head_dim", "prompt_len"),
            shape=("num_heads", "num_kv_heads", "head_dim"),
            variant="kv_dtype",
            work=lambda rows, dtype: Prompts(
                rows["batch_size"], rows["prompt_len"], rows["prompt_len"], rows["num_heads"], rows["num_kv_heads"],
                rows["head_dim"],
            ),
            counted=lambda rows: (rows["prompt_len"] >= 512) & (rows["head_dim"] <= 128),
            is_near=lambda rows: rows["prompt_len"] <= 4096,
        ),
    )  # fmt: skip
    overhead_s: Annotated[float, Free(spread=1.0)] = 1e-5
    flops_efficiency: Annotated[float, Free(spread=0.3)] = 0.6
    narrow_head_efficiency: Annotated[float, Free(spread=0.3)] = 0.7
    """Rate with heads of 64 dimensions and fewer, relative to 128."""
    wide_head_efficiency: Annotated[float, Free(spread=0.3)] = 1.0
    """Rate with heads of more than 128 dimensions, relative to 128."""
    block_weight: Annotated[float, Free(spread=0.7)] = 0.9
    """Time of the longest block (128 queries over all keys) relative to its share of the device's rate."""
    bandwidth_efficiency: Annotated[float, Free(spread=0.7)] = 0.4
    ridge_power: Annotated[float, Free(scale="above_one")] = 1.2

    def seconds(self, hw: Device, work: Prompts, working_set: WorkingSet = None) -> OpTime:
        batch, query_len, kv_len, num_heads, num_kv_heads, head_dim = arrays(*work[:6])
        element = bytes_per_element(work.kv_dtype)
        activation = 4.0 if work.kv_dtype == "fp32" else 2.0
        of_head = np.where(
            head_dim <= 64, self.narrow_head_efficiency, np.where(head_dim <= 128, 1.0, self.wide_head_efficiency)
        )
        rate = self.flops_efficiency * of_head * hw.compute_rate("fp32" if work.kv_dtype == "fp32" else "bf16")
        kv_len = np.maximum(kv_len, query_len)
        tile = np.minimum(query_len, QUERY_ROWS_PER_BLOCK)
        seen = causal_pairs(query_len, kv_len) if work.pairs is None else as_array(work.pairs)
        whole_tiles = seen + query_len * np.maximum(tile - 1.0, 0.0) / 2.0
        compute_s = 4.0 * batch * whole_tiles * num_heads * head_dim / rate
        block_s = 4.0 * QUERY_ROWS_PER_BLOCK * kv_len * head_dim / rate * hw.num_multiprocessors
        num_bytes = 2.0 * batch * (query_len * num_heads * activation + kv_len * num_kv_heads * element) * head_dim
        memory_s = num_bytes / (self.bandwidth_efficiency * hw.memory_bytes_per_s)
        longest_s = np.where(compute_s > 0, self.block_weight * block_s, 0.0)
        busy_s = soft_max(memory_s, soft_max(compute_s, longest_s, BLOCK_RIDGE_POWER), self.ridge_power)
        return self.at_overhead(busy_s, memory_s, compute_s, self.overhead_s)

    def refitted(
        self, hw: Device, work: Prompts, rows: Rows, *, fitted_on: str = "", rotated: bool = False, is_own: bool = False
    ) -> Self:
        parameters = self.free()
        if not np.any(as_array(work.head_dim) > 128):
            del parameters["wide_head_efficiency"]
        if not np.any(as_array(work.head_dim) <= 64):
            del parameters["narrow_head_efficiency"]
        curve, _ = minimise(type(self)(), parameters, lambda each: each.table_seconds(hw, work), rows)
        return with_fit(curve, len(parameters), rows, curve.table_seconds(hw, work), fitted_on)


def prefill_attention(
    at: Where, work: Prompts, curve: PrefillCurve, *, num_chunks: Any, window: int | None = None, count: Any = 1.0
) -> Op:
    """`count` layers of causal attention of whole prompts (`query_len`), in `num_chunks` equal chunks, each of which
    reads the keys before it; at most `window` of them."""
    precision = at.precision
    batch, prompt = (np.asarray(value, dtype=np.float64) for value in work[:2])
    pairs = causal_pairs(prompt, prompt)
    chunk = prompt / num_chunks
    seen = (prompt + chunk) / 2.0  # the mean of the chunks
    if window is not None:
        beyond = np.maximum(prompt - window, 0.0)
        pairs = pairs - causal_pairs(beyond, beyond)
        seen = np.minimum(seen, window + chunk)
    cost = Cost(
        flops=4.0 * batch * pairs / num_chunks * work.num_heads * work.head_dim,
        kv_bytes=2.0 * batch * seen * work.num_kv_heads * work.head_dim * precision.kv_bytes,
    )
    work = work._replace(query_len=chunk, kv_len=seen, kv_dtype=precision.kv_dtype, pairs=pairs / num_chunks)
    time, dtype = curve.seconds(at.hw, work), precision.kv_dtype
    return operation("attention", "attention", at, cost, time, dtype, count=count * num_chunks)
