"""Sparse attention's kernels: an indexer scores every cached token, the best are chosen, attention reads those.

scores       overhead + rows · t_row + ‖ keys / bandwidth , FLOPs / rate ‖_p
choosing     overhead + ‖ waves · (t_row + scores · t_score) , bytes / bandwidth ‖_p
attention    overhead + ‖ waves · tile's FLOPs / rate of a multiprocessor , bytes / bandwidth ‖_p
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np

from magicdec.fitting import Free
from magicdec.perfmodel.kernels.attention import Latents
from magicdec.perfmodel.kernels.base import (
    Cost,
    Curve,
    Op,
    OpTime,
    Table,
    Where,
    WorkingSet,
    arrays,
    as_array,
    cache_speedup,
    operation,
    soft_max,
    waves,
)
from magicdec.perfmodel.kernels.latent import LATENT_FLOPS_PER_PAIR, LATENT_ROW, latent_attention
from magicdec.specs.device import Device

KEY_BYTES = 1.0 + 4.0 / 128.0
"""An indexer's keys are fp8 with a scale of 32 bits per 128 numbers."""
SCORE_BYTES = 4.0
TILE_HEADS = 64
INDEX_HEAD_DIM = 128


class Scores(NamedTuple):
    """One layer's scores of `query_len` tokens per sequence: small heads over one fp8 key per cached token."""

    batch: Any
    query_len: Any
    kv_len: Any
    num_heads: Any
    head_dim: Any


class Choice(NamedTuple):
    """The best of the `kv_len` scores of each of `rows` query tokens."""

    rows: Any
    kv_len: Any


class Chosen(NamedTuple):
    """One layer's attention of `tokens` query tokens, each to `num_chosen` latents of its own."""

    tokens: Any
    num_chosen: Any
    num_heads: Any
    flops_per_pair: Any
    row_bytes: Any


class IndexerCurve(Curve, frozen=True, kw_only=True):
    """Time of an indexer's scores over a paged cache of fp8 keys."""

    key: ClassVar[str] = "indexer"
    tables: ClassVar[tuple[Table, ...]] = (
        Table(
            kind="indexer",
            columns=("batch_size", "query_len", "kv_len", "num_index_heads"),
            shape=("batch_size", "query_len"),
            work=lambda rows, _: Scores(
                rows["batch_size"], rows["query_len"], rows["kv_len"], rows["num_index_heads"], INDEX_HEAD_DIM
            ),
            counted=lambda rows: (rows["kv_len"] >= 1024) & (rows["batch_size"] * rows["query_len"] >= 4),
            is_near=lambda rows: rows["query_len"] <= 2,
            is_borrowed=True,
        ),
    )
    overhead_s: Annotated[float, Free()] = 4e-6
    bandwidth_efficiency: Annotated[float, Free(spread=0.1)] = 0.8
    flops_efficiency: Annotated[float, Free()] = 0.4
    """Share of the fp8 rate (16 bits' where the device has none)."""
    l2_fraction: float = 0.8
    l2_bandwidth_ratio: Annotated[float, Free(scale="above_one")] = 2.0
    row_s: Annotated[float, Free(spread=1.0)] = 5e-9
    """Time of each query token, whatever it scores."""
    ridge_power: Annotated[float, Free(scale="above_one")] = 2.0

    def seconds(self, hw: Device, work: Scores, working_set: WorkingSet = None) -> OpTime:
        batch, query, kv_len, heads, size = arrays(*work)
        key_bytes = batch * kv_len * size * KEY_BYTES
        num_bytes = key_bytes + batch * query * kv_len * SCORE_BYTES
        speedup = cache_speedup(hw, self.l2_fraction, self.l2_bandwidth_ratio, num_bytes, working_set)
        memory_s = num_bytes / (self.bandwidth_efficiency * hw.memory_bytes_per_s) / speedup
        rate = self.flops_efficiency * hw.compute_rate("fp8" if hw.computes_in("fp8") else "bf16")
        compute_s = 2.0 * batch * query * kv_len * heads * size / rate
        busy_s = soft_max(memory_s, compute_s, self.ridge_power) + batch * query * self.row_s
        return self.at_overhead(busy_s, memory_s, compute_s, self.overhead_s)


class TopKCurve(Curve, frozen=True, kw_only=True):
    """Time of choosing the tokens that a sparse attention reads; a block chooses for one query token."""

    key: ClassVar[str] = "top_k"
    tables: ClassVar[tuple[Table, ...]] = (
        Table(
            kind="top_k",
            columns=("batch_size", "query_len", "kv_len", "top_k"),
            shape=("batch_size", "query_len"),
            variant="scores",
            work=lambda rows, _: Choice(rows["batch_size"] * rows["query_len"], rows["kv_len"]),
            counted=lambda rows: rows["kv_len"] >= 2 * rows["top_k"],
            is_near=lambda rows: rows["kv_len"] <= 32768,
            is_borrowed=True,
        ),
    )
    overhead_s: Annotated[float, Free()] = 4e-6
    row_s: Annotated[float, Free(spread=1.0)] = 4e-6
    """Fixed time of a block."""
    score_s: Annotated[float, Free(spread=1.0)] = 3e-10
    """Time of each score in a block."""
    wave_weight: Annotated[float, Free(spread=1.0, scale="unit")] = 0.2
    bandwidth_efficiency: Annotated[float, Free(spread=0.7)] = 0.3
    ridge_power: Annotated[float, Free(scale="above_one")] = 3.0

    def seconds(self, hw: Device, work: Choice, working_set: WorkingSet = None) -> OpTime:
        rows, kv_len = arrays(*work)
        block_s = self.row_s + kv_len * self.score_s
        chosen_s = waves(rows / hw.num_multiprocessors, self.wave_weight) * block_s
        memory_s = rows * kv_len * SCORE_BYTES / (self.bandwidth_efficiency * hw.memory_bytes_per_s)
        return self.at_overhead(soft_max(chosen_s, memory_s, self.ridge_power), memory_s, chosen_s, self.overhead_s)


class SparseCurve(Curve, frozen=True, kw_only=True):
    """Time of attention to chosen latents; a block takes 64 heads of one query token."""

    key: ClassVar[str] = "sparse"
    has_formats: ClassVar[bool] = True
    tables: ClassVar[tuple[Table, ...]] = (
        Table(
            kind="sparse",
            columns=("batch_size", "query_len", "num_heads", "num_chosen"),
            shape=("batch_size", "query_len"),
            variant="kv_dtype",
            work=lambda rows, _: Chosen(
                rows["batch_size"] * rows["query_len"], rows["num_chosen"], rows["num_heads"], LATENT_FLOPS_PER_PAIR,
                LATENT_ROW * 2.0,
            ),
            counted=lambda rows: rows["num_chosen"] >= 1024,
            is_near=lambda rows: rows["batch_size"] * rows["query_len"] <= 512,
            is_borrowed=True,
        ),
    )  # fmt: skip
    overhead_s: Annotated[float, Free(spread=0.7)] = 8e-6
    flops_efficiency: Annotated[float, Free(spread=0.2)] = 0.6
    wave_weight: Annotated[float, Free(spread=1.0, scale="unit")] = 0.9
    bandwidth_efficiency: Annotated[float, Free(spread=0.1)] = 0.8
    ridge_power: Annotated[float, Free(scale="above_one")] = 4.0

    def seconds(self, hw: Device, work: Chosen, working_set: WorkingSet = None) -> OpTime:
        tokens, chosen, heads = arrays(*work[:3])
        tiles = np.ceil(heads / TILE_HEADS)
        tile_flops = TILE_HEADS * chosen * as_array(work.flops_per_pair)
        rate = as_array(self.flops_efficiency * hw.compute_rate("bf16") / hw.num_multiprocessors)
        compute_s = waves(tokens * tiles / hw.num_multiprocessors, self.wave_weight) * tile_flops / rate
        memory_s = tokens * chosen * as_array(work.row_bytes) / (self.bandwidth_efficiency * hw.memory_bytes_per_s)
        return self.at_overhead(soft_max(compute_s, memory_s, self.ridge_power), memory_s, compute_s, self.overhead_s)


def indexer(at: Where, work: Scores, *, top_k: int, count: Any = 1.0) -> list[Op]:
    """`count` layers of an indexer's scores, each query token's small heads over one key of each cached token, and of
    choosing the `top_k` best where there are more. By the curves of their kernels, whose keys are fp8; where none was
    measured as attention over one row, and choosing costs nothing."""
    hw, (batch, query_len, kv_len) = at.hw, (np.asarray(value, dtype=np.float64) for value in work[:3])
    curve, pairs = IndexerCurve.known(hw), 2.0 * (work.head_dim + 1)
    if curve is None:
        alike = Latents(batch, query_len, kv_len, work.num_heads, work.head_dim, pairs)
        return [latent_attention(at, alike, name="indexer", count=count)]
    cost = Cost(
        flops=batch * query_len * kv_len * work.num_heads * pairs, kv_bytes=batch * kv_len * work.head_dim * KEY_BYTES
    )
    scores = operation("indexer", "attention", at, cost, curve.seconds(hw, work), "fp8", count=count)
    choice = Choice(batch * query_len, kv_len)
    chosen = [each.seconds(hw, choice) for each in TopKCurve.variants(hw).values()]
    if not chosen:
        return [scores]
    mean = OpTime(*(np.mean(np.stack(part), axis=0) for part in zip(*chosen, strict=True)))
    needed = np.where(kv_len > top_k, 1.0, 0.0)
    cost = Cost(activation_bytes=SCORE_BYTES * choice.rows * kv_len)
    return [scores, operation("top k", "attention", at, cost, mean, "bf16", count=count * needed)]


def sparse_attention(at: Where, work: Latents, *, count: Any = 1.0, factor: Any = 1.0) -> Op:
    """`count` layers of attention of each query token to latents chosen for it alone, by the kernel's own curve; where
    none was measured, as latent attention that reads the latents once per query token."""
    precision = at.precision
    batch, query_len, kv_len = (np.asarray(value, dtype=np.float64) for value in work[:3])
    tokens, curve = batch * query_len, SparseCurve.known(at.hw, precision.kv_dtype)
    if curve is None:
        alone = work._replace(batch=tokens, query_len=np.minimum(query_len, 1.0))
        return latent_attention(at, alone, count=count, factor=factor)
    row_bytes = work.row * precision.kv_bytes
    cost = Cost(
        flops=tokens * kv_len * np.asarray(work.num_heads, dtype=np.float64) * work.flops_per_pair,
        kv_bytes=tokens * kv_len * row_bytes,
    )
    time = curve.seconds(at.hw, Chosen(tokens, kv_len, work.num_heads, work.flops_per_pair, row_bytes))
    return operation("attention", "attention", at, cost, time, precision.kv_dtype, count=count, factor=factor)
