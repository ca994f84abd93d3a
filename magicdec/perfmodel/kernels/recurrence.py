"""Recurrences (gated delta nets, Lightning attention, Mamba 2): a state per sequence instead of a
cache.

    few tokens    overhead + ‖ states / bandwidth , tokens · t_token ‖_p
    prompts       overhead + convolution + ‖ waves · (t_block + chunks · t_chunk) , passes · bytes ‖_p

A state is read once and written after each token that may be the last one accepted; it is in fp32.
"""

from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np

from magicdec.fitting import Free
from magicdec.perfmodel.kernels.base import (
    Columns,
    KernelCurve,
    KernelTable,
    WorkingSet,
    arrays,
    cache_speedup,
    soft_max,
    unmeasured,
    waves,
)
from magicdec.perfmodel.kernels.gemm import ElementwiseCurve, Stream
from magicdec.perfmodel.kernels.op import FP32_BYTES, Cost, Op, OpTime, Where, operation
from magicdec.specs.device import Device

CHUNK_TOKENS = 64
STATE_ROW, CONV_KERNEL = 128.0, 4.0
"""In the tables a block's state is of 128 × 128, others count as so many of them; convolutions are
over 4 tokens.
"""


class Recurrence(NamedTuple):
    """One layer over `query_len` tokens of each sequence; `conv_element`: bytes of a number that
    its convolution keeps."""

    batch: Any
    query_len: Any
    state_elements: Any
    conv_elements: Any
    conv_kernel: Any = CONV_KERNEL
    states_written: Any = 1.0
    conv_element: Any = 2.0
    state_element: Any = FP32_BYTES

    def cost(self) -> Cost:
        """Per element a decay, an outer product and a read-out: 6 FLOPs."""
        batch, query, state, conv = (
            np.asarray(value, dtype=np.float64) for value in self[:4]
        )
        slot_bytes = state * self.state_element + conv * self.conv_element
        return Cost(
            flops=6.0 * batch * query * state,
            kv_bytes=batch * slot_bytes * (1.0 + self.states_written),
        )


def _of_rows(rows: Columns, query_len: str) -> Recurrence:
    channels = STATE_ROW * (2.0 * rows["num_key_heads"] + rows["num_value_heads"])
    states = rows["num_value_heads"] * STATE_ROW**2
    return Recurrence(
        rows["batch_size"],
        rows[query_len],
        states,
        channels * CONV_KERNEL,
        states_written=rows[query_len],
    )


class LinearCurve(KernelCurve, frozen=True, kw_only=True):
    """Time of one layer's recurrence over a few tokens, decoding or verifying, and of its short
    convolution.
    """

    key: ClassVar[str] = "linear"
    tables: ClassVar[tuple[KernelTable, ...]] = (
        KernelTable(
            kind="linear",
            columns=("batch_size", "query_len", "num_key_heads", "num_value_heads"),
            shape=("num_key_heads", "num_value_heads", "query_len"),
            work=lambda rows, _: _of_rows(rows, "query_len"),
            counted=lambda rows: rows["batch_size"] * rows["num_value_heads"] >= 64,
            is_near=lambda rows: rows["query_len"] <= 2,
            is_borrowed=True,
        ),
    )
    overhead_s: Annotated[float, Free(spread=1.0)] = 6e-6
    """Fixed time of both kernels."""
    bandwidth_efficiency: Annotated[float, Free(spread=0.15)] = 0.8
    l2_fraction: Annotated[float, Free(spread=0.3)] = 0.8
    l2_bandwidth_ratio: Annotated[float, Free(scale="above_one")] = 2.0
    token_s: Annotated[float, Free(spread=1.0)] = 6e-7
    """Time of one token: those of a sequence go one after the other, however little is read."""
    ridge_power: Annotated[float, Free(scale="above_one")] = 2.5

    def seconds(
        self, hw: Device, work: Recurrence, working_set: WorkingSet = None
    ) -> OpTime:
        batch, query, state, conv, written = arrays(*work[:4], work.states_written)
        slot_bytes = batch * (state * work.state_element + conv * work.conv_element)
        resident = slot_bytes * np.maximum(written, 1.0)
        speedup = cache_speedup(
            hw,
            self.l2_fraction,
            self.l2_bandwidth_ratio,
            resident,
            working_set,
        )
        memory_s = (
            slot_bytes
            * (1.0 + written)
            / (self.bandwidth_efficiency * hw.memory_bytes_per_s)
            / speedup
        )
        busy_s = soft_max(memory_s, query * self.token_s, self.ridge_power)
        return self.at_overhead(
            np.where(slot_bytes > 0, busy_s, 0.0),
            memory_s,
            np.zeros_like(memory_s),
            self.overhead_s,
        )


class LinearPrefillCurve(KernelCurve, frozen=True, kw_only=True):
    """Time of one layer's recurrence over whole prompts, in chunks of 64 tokens that wait for each
    other.
    """

    key: ClassVar[str] = "linear_prefill"
    tables: ClassVar[tuple[KernelTable, ...]] = (
        KernelTable(
            kind="linear_prefill",
            columns=("batch_size", "prompt_len", "num_key_heads", "num_value_heads"),
            shape=("num_key_heads", "num_value_heads"),
            work=lambda rows, _: _of_rows(rows, "prompt_len"),
            counted=lambda rows: rows["prompt_len"] >= 128,
            is_near=lambda rows: rows["prompt_len"] <= 4096,
            is_borrowed=True,
        ),
    )
    overhead_s: Annotated[float, Free(spread=1.0)] = 1e-5
    chunk_s: Annotated[float, Free(spread=1.0)] = 3e-6
    """Time of 64 tokens of one state, which wait for the 64 before them."""
    block_s: Annotated[float, Free(spread=1.0)] = 4e-6
    """Time of one state before its first chunk."""
    wave_weight: Annotated[float, Free(spread=1.0, scale="unit")] = 0.8
    passes: Annotated[float, Free(spread=1.0)] = 2.0
    """How often queries, keys, values and outputs go through memory."""
    bandwidth_efficiency: Annotated[float, Free(spread=0.3)] = 0.5
    """Share of the memory's bandwidth that the convolution reaches."""
    l2_fraction: Annotated[float, Free()] = 0.5
    l2_bandwidth_ratio: Annotated[float, Free(scale="above_one")] = 2.0
    ridge_power: Annotated[float, Free(scale="above_one")] = 3.0

    def seconds(
        self, hw: Device, work: Recurrence, working_set: WorkingSet = None
    ) -> OpTime:
        batch, query, state, conv, kernel = arrays(*work[:5])
        states = batch * state / STATE_ROW**2
        chunks = np.ceil(query / CHUNK_TOKENS)
        chain_s = waves(states / hw.num_multiprocessors, self.wave_weight) * (
            self.block_s + chunks * self.chunk_s
        )
        conv_bytes = (
            2.0 * work.conv_element * batch * query * (conv / np.maximum(kernel, 1.0))
        )
        speedup = cache_speedup(
            hw,
            self.l2_fraction,
            self.l2_bandwidth_ratio,
            conv_bytes,
            working_set,
        )
        conv_s = (
            conv_bytes / (self.bandwidth_efficiency * hw.memory_bytes_per_s) / speedup
        )
        moved = 4.0 * 2.0 * STATE_ROW * states * query
        memory_s = self.passes * moved / hw.memory_bytes_per_s / speedup
        busy_s = conv_s + soft_max(chain_s, memory_s, self.ridge_power)
        return self.at_overhead(
            np.where(states * query > 0, busy_s, 0.0),
            conv_s + memory_s,
            chain_s,
            self.overhead_s,
        )


def recurrence(
    at: Where,
    work: Recurrence,
    *,
    is_in_table: bool,
    is_prefill: bool = False,
    count: Any = 1.0,
) -> Op:
    """`count` layers of a recurrence, by their kernel's curve; where none was measured, as
    streaming of the states. `is_in_table`: the curve is of this recurrence's own kernel.
    """
    hw, engine = at.hw, at.engine
    work = work._replace(conv_element=at.precision.activation_bytes)
    cost = work.cost()
    curve = LinearCurve.known(hw)
    factor = 1.0
    if is_prefill and (prompts := LinearPrefillCurve.known(hw)) is not None:
        time = prompts.seconds(hw, work)
    elif curve is not None:
        time = curve.seconds(hw, work)
    else:
        time = ElementwiseCurve.of(hw).seconds(hw, Stream(cost.kv_bytes, 2.0))
        factor = engine.kernels.attention_factor
    basis = LinearCurve.basis(hw, "recurrence", work)
    if not is_in_table:
        basis = unmeasured("recurrence", "carried over" if curve else "roofline")
    dtype = at.precision.compute_dtype
    name = "linear attention"
    return operation(
        name,
        "attention",
        at,
        cost,
        time,
        dtype,
        basis=basis,
        count=count,
        factor=factor,
    )
