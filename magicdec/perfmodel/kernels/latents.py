"""Multi-head latent attention, full or sparse: an indexer scores every cached token, and attention
reads the best.

latents      2·batch·q·kv·heads·(latent + value) FLOPs; the latents read once
scores       overhead + rows · t_row + ‖ keys / bandwidth , FLOPs / rate ‖_p
choosing     overhead + ‖ waves · (t_row + scores · t_score) , bytes / bandwidth ‖_p
chosen       overhead + ‖ waves · tile's FLOPs / rate of a multiprocessor , bytes / bandwidth ‖_p

Absorbed, as in decoding, latent attention is grouped-query attention over one KV head.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.errors import ConfigError
from magicdec.fitting import Free
from magicdec.perfmodel.kernels.attention import (
    Attended,
    AttentionCurve,
    KvReads,
    Tiles,
    by_path,
    least_tile,
)
from magicdec.perfmodel.kernels.base import (
    KernelCurve,
    KernelTable,
    Rows,
    WorkingSet,
    arrays,
    as_array,
    best_fit,
    cache_speedup,
    soft_max,
    unmeasured,
    waves,
)
from magicdec.perfmodel.kernels.op import Cost, Op, OpTime, Where, operation
from magicdec.specs.attention_kernels import (
    AttentionLayer,
    AttentionPath,
    KernelLaw,
    attention_path,
)
from magicdec.specs.device import Device


class Latents(NamedTuple):
    """One layer's attention of many heads over one row of `row` numbers per cached token, with
    `flops_per_pair` of a head and a token."""

    batch: Any
    query_len: Any
    kv_len: Any
    num_heads: Any
    row: Any
    flops_per_pair: Any
    kv_dtype: str = "bf16"
    kv_reads: KvReads = "per_sequence"


INDEXER_ERROR = 0.25
"""Least relative error of an indexer's scores: the distance of such layers' growth with the
context, timed in two engines, from the curves of their kernels (results/LOG.md)."""
LATENT_ROW = 512 + 64
LATENT_FLOPS_PER_PAIR = 2.0 * (512 + 64 + 512)
"""Sizes of DeepSeek-V3's latents, and all since, whose kernels the tables hold."""
PARTIAL_BYTES = 4.0
LATENT_BLOCKS = (1.0, 2.0)
LATENT_STARTS: tuple[Mapping[str, float], ...] = (
    {},
    {"max_splits": 1.5},
    {"max_splits": 200.0, "wave_weight": 0.05},
)
UNTIMED = KernelLaw(title="attention over one row", is_timed=False)
KERNEL_ALONE = "attention kernel"
LATENT_LANE = "TensorRT-LLM"


def _latent_kernels(frame: Any) -> Any:
    """Rows of the kernel alone, as TensorRT-LLM's table has it where the file's sources name
    several: SGLang's for a cache in fp8 on Hopper takes seven times as long (it widens the cache),
    and no server is seen to use it."""
    kernels = frame[frame["scope"] == KERNEL_ALONE]
    if "source" in frame and kernels["source"].str.contains(LATENT_LANE).any():
        kernels = kernels[kernels["source"].str.contains(LATENT_LANE)]
    if kernels.empty:
        raise ConfigError(f"no row's scope is '{KERNEL_ALONE}'")
    return kernels.reset_index(drop=True)


def latent_seconds(
    curve: AttentionCurve,
    hw: Device,
    work: Latents,
    working_set: WorkingSet = None,
    law: KernelLaw | None = None,
) -> OpTime:
    """Grouped-query attention over one KV head, of the same bytes and FLOPs."""
    heads = work.num_heads * work.flops_per_pair / (2.0 * work.row)
    alike = Attended(*work[:3], heads, 1.0, work.row / 2.0, *work[6:], law)
    tiles = _tiles(curve, work, law)
    return AttentionCurve.seconds(curve, hw, alike, working_set, tiles)


def _tiles(curve: AttentionCurve, work: Latents, law: KernelLaw | None) -> Tiles | None:
    """By the kernel's law, or as in the one that was timed. Rows are padded to whole tiles, but not
    in a kernel of narrow ones."""
    heads = as_array(work.num_heads)
    query_len = as_array(work.query_len)
    rows = np.maximum(heads * query_len, 1e-9)
    is_narrow: Any = heads <= curve.narrow_heads
    size: Any = np.where(is_narrow, curve.narrow_tile_rows, curve.tile_rows)
    packs = True
    packs_tokens = curve.narrow_heads <= 0
    reread = curve.tile_traffic
    if law is not None and law.tiles:
        is_narrow, packs, packs_tokens = False, law.packs, law.packs_tokens
        size = least_tile(law, rows if packs_tokens else heads)
        reread = max(reread, law.reread)
    elif curve.tile_rows <= 0:
        return None
    if packs and packs_tokens:
        count = np.ceil(rows / size)
    elif packs:
        count = query_len * np.ceil(heads / size)
    else:
        count = heads * np.ceil(query_len / size)
    padding = np.where(is_narrow, 1.0, count * size / rows)
    reads = 1.0 + reread * np.maximum(count - 1.0, 0.0)
    part_rows = np.minimum(rows, np.maximum(curve.tile_rows, size))
    return Tiles(count, padding, reads, part_rows * as_array(work.row) * PARTIAL_BYTES)


class LatentCurve(AttentionCurve, frozen=True, kw_only=True):
    """Time of one layer's absorbed latent attention by a kernel of its own."""

    key: ClassVar[str] = "latent"
    variants_key: ClassVar[str] = ""
    tables: ClassVar[tuple[KernelTable, ...]] = (
        KernelTable(
            kind="latent",
            columns=("batch_size", "num_heads", "kv_len"),
            marks=("scope",),
            shape=("num_heads", "batch_size"),
            variant="kv_dtype",
            work=lambda rows, dtype: Latents(
                rows["batch_size"],
                1.0,
                rows["kv_len"],
                rows["num_heads"],
                LATENT_ROW,
                LATENT_FLOPS_PER_PAIR,
                dtype or "bf16",
            ),
            counted=lambda rows: (rows["kv_len"] >= 1024) & (rows["batch_size"] >= 4),
            is_near=lambda rows: rows["num_heads"] <= 64,
            other_weight=0.35,
            select=_latent_kernels,
        ),
    )

    @classmethod
    def of(cls, hw: Device, variant: str = "") -> Self:
        """The curve of latents in a format; unmeasured, of ordinary attention."""
        known = cls.known(hw, variant)
        if known is not None:
            return known
        alike = AttentionCurve.of(hw, variant)
        constants = {name: getattr(alike, name) for name in alike.__struct_fields__}
        return cls(**constants)

    @classmethod
    def may_borrow(cls, hw: Device, donor: Device, variant: str) -> bool:
        return hw.generation == donor.generation

    def table_seconds(self, hw: Device, work: Latents) -> Array:
        return latent_seconds(self, hw, work, "own").time_s

    def refitted(
        self,
        hw: Device,
        work: Any,
        rows: Rows,
        *,
        fitted_on: str = "",
        rotated: bool = False,
        is_own: bool = False,
    ) -> Self:
        """Fits decoding of latent attention. The compute ceiling shows where many heads read one
        latent. This curve has the tiles of query rows, and whether the kernel splits contexts
        (`combine_traffic` > 0): what the parts found is then added up at a price for each query
        row. Splits have no other: more query tokens, which need fewer of them, could take less
        time. A cache in a narrow format is read at the bandwidth that one in 16 bits showed;
        kernels of narrow tiles compute in its format."""
        start = msgspec.structs.replace(self, split_overhead_s=0.0)
        has_narrow = start.narrow_heads > 0
        rate = 1.0
        if has_narrow:
            rate = hw.compute_rate(work.kv_dtype) / hw.compute_rate("bf16")
        parameters = {
            **self.free(),
            "flops_efficiency": Free(prior=0.65 * rate, spread=0.2),
        }
        del parameters["split_overhead_s"]
        if start.combine_traffic > 0:
            parameters["combine_traffic"] = Free(prior=0.5, spread=0.7)
            del parameters["wave_weight"]
        if has_narrow:
            parameters["tile_traffic"] = Free(prior=0.3, spread=0.7)
            del parameters["block_overhead_s"]
        wide = self.known(hw, "bf16")
        if work.kv_dtype != "bf16" and wide is not None and start.combine_traffic > 0:
            parameters["bandwidth_efficiency"] = Free(
                prior=wide.bandwidth_efficiency, spread=0.03
            )
        starts = [
            {name: each[name] for name in each if name in parameters}
            for each in LATENT_STARTS
        ]
        curves = [
            msgspec.structs.replace(start, blocks_per_multiprocessor=blocks)
            for blocks in LATENT_BLOCKS
        ]
        return best_fit(
            curves,
            parameters,
            lambda curve: curve.table_seconds(hw, work),
            rows,
            fitted_on,
            starts=starts,
            num_chosen=1,
        )


def latent_attention(
    at: Where,
    work: Latents,
    *,
    name: str = "attention",
    count: Any = 1.0,
    factor: Any = 1.0,
) -> Op:
    """`count` layers of many heads over one row of numbers per token: absorbed latent attention,
    whose heads all attend to the same latents, by their curve, which no factor of an engine is
    about; an indexer (`name`) by the curve of ordinary attention."""
    hw, engine, precision = at
    batch, query_len, kv_len, heads = (
        np.asarray(value, dtype=np.float64) for value in work[:4]
    )
    rereads = engine.kernels.kv_reads == "per_query"
    reads = query_len if rereads else np.minimum(query_len, 1.0)
    cost = Cost(
        flops=batch * query_len * kv_len * heads * work.flops_per_pair,
        kv_bytes=batch * kv_len * work.row * precision.kv_bytes * reads,
    )
    kv_dtype = precision.kv_dtype
    path = AttentionPath("", (UNTIMED,))
    if name == "attention":
        layer = AttentionLayer(kv_dtype, float(work.row), sort="latents")
        path = attention_path(engine, hw, layer)
    is_timed = (path.one_token or path.laws[0]).is_timed
    own = LatentCurve.known(hw, kv_dtype) if is_timed else None
    if own is None:
        factor = factor * engine.kernels.attention_factor
    curve = own or AttentionCurve.of(hw, kv_dtype)
    work = work._replace(kv_dtype=kv_dtype, kv_reads=engine.kernels.kv_reads)
    basis = unmeasured(name, "carried over" if path.backend else "roofline")
    if is_timed:
        basis = LatentCurve.basis(hw, name, work, precision.narrow_cache)

    def seconds(law: KernelLaw) -> OpTime:
        return latent_seconds(curve, hw, work, law=law)

    time = by_path(path, query_len, seconds)
    return operation(
        name,
        "attention",
        at,
        cost,
        time,
        kv_dtype,
        basis=basis,
        count=count,
        factor=factor,
    )


KEY_BYTES = 1.0 + 4.0 / 128.0
"""An indexer's keys are fp8 with a scale of 32 bits per 128 numbers."""
SCORE_BYTES = 4.0
TILE_HEADS = 64
INDEX_HEAD_DIM = 128


class Scores(NamedTuple):
    """One layer's scores of `query_len` tokens per sequence: small heads over one fp8 key per
    cached token.
    """

    batch: Any
    query_len: Any
    kv_len: Any
    num_heads: Any
    head_dim: Any


class ScoreSelection(NamedTuple):
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


class IndexerCurve(KernelCurve, frozen=True, kw_only=True):
    """Time of an indexer's scores over a paged cache of fp8 keys."""

    key: ClassVar[str] = "indexer"
    tables: ClassVar[tuple[KernelTable, ...]] = (
        KernelTable(
            kind="indexer",
            columns=("batch_size", "query_len", "kv_len", "num_index_heads"),
            shape=("batch_size", "query_len"),
            work=lambda rows, _: Scores(
                rows["batch_size"],
                rows["query_len"],
                rows["kv_len"],
                rows["num_index_heads"],
                INDEX_HEAD_DIM,
            ),
            counted=lambda rows: (
                (rows["kv_len"] >= 1024) & (rows["batch_size"] * rows["query_len"] >= 4)
            ),
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

    def seconds(
        self, hw: Device, work: Scores, working_set: WorkingSet = None
    ) -> OpTime:
        batch, query, kv_len, heads, size = arrays(*work)
        key_bytes = batch * kv_len * size * KEY_BYTES
        num_bytes = key_bytes + batch * query * kv_len * SCORE_BYTES
        speedup = cache_speedup(
            hw, self.l2_fraction, self.l2_bandwidth_ratio, num_bytes, working_set
        )
        memory_s = (
            num_bytes / (self.bandwidth_efficiency * hw.memory_bytes_per_s) / speedup
        )
        dtype = "bf16"
        if hw.computes_in("fp8"):
            dtype = "fp8"
        rate = self.flops_efficiency * hw.compute_rate(dtype)
        compute_s = 2.0 * batch * query * kv_len * heads * size / rate
        rows_s = batch * query * self.row_s
        busy_s = soft_max(memory_s, compute_s, self.ridge_power) + rows_s
        return self.at_overhead(busy_s, memory_s, compute_s, self.overhead_s)


class TopKCurve(KernelCurve, frozen=True, kw_only=True):
    """Time of choosing the tokens that a sparse attention reads; a block chooses for one query
    token.
    """

    key: ClassVar[str] = "top_k"
    tables: ClassVar[tuple[KernelTable, ...]] = (
        KernelTable(
            kind="top_k",
            columns=("batch_size", "query_len", "kv_len", "top_k"),
            shape=("batch_size", "query_len"),
            variant="scores",
            work=lambda rows, _: ScoreSelection(
                rows["batch_size"] * rows["query_len"], rows["kv_len"]
            ),
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

    def seconds(
        self, hw: Device, work: ScoreSelection, working_set: WorkingSet = None
    ) -> OpTime:
        rows, kv_len = arrays(*work)
        block_s = self.row_s + kv_len * self.score_s
        chosen_s = waves(rows / hw.num_multiprocessors, self.wave_weight) * block_s
        bandwidth = self.bandwidth_efficiency * hw.memory_bytes_per_s
        memory_s = rows * kv_len * SCORE_BYTES / bandwidth
        busy_s = soft_max(chosen_s, memory_s, self.ridge_power)
        return self.at_overhead(busy_s, memory_s, chosen_s, self.overhead_s)


class SparseCurve(KernelCurve, frozen=True, kw_only=True):
    """Time of attention to chosen latents; a block takes 64 heads of one query token."""

    key: ClassVar[str] = "sparse"
    has_formats: ClassVar[bool] = True
    tables: ClassVar[tuple[KernelTable, ...]] = (
        KernelTable(
            kind="sparse",
            columns=("batch_size", "query_len", "num_heads", "num_chosen"),
            shape=("batch_size", "query_len"),
            variant="kv_dtype",
            work=lambda rows, _: Chosen(
                rows["batch_size"] * rows["query_len"],
                rows["num_chosen"],
                rows["num_heads"],
                LATENT_FLOPS_PER_PAIR,
                LATENT_ROW * 2.0,
            ),
            counted=lambda rows: rows["num_chosen"] >= 1024,
            is_near=lambda rows: rows["batch_size"] * rows["query_len"] <= 512,
            is_borrowed=True,
        ),
    )
    overhead_s: Annotated[float, Free(spread=0.7)] = 8e-6
    flops_efficiency: Annotated[float, Free(spread=0.2)] = 0.6
    wave_weight: Annotated[float, Free(spread=1.0, scale="unit")] = 0.9
    bandwidth_efficiency: Annotated[float, Free(spread=0.1)] = 0.8
    ridge_power: Annotated[float, Free(scale="above_one")] = 4.0

    def seconds(
        self, hw: Device, work: Chosen, working_set: WorkingSet = None
    ) -> OpTime:
        tokens, chosen, heads = arrays(*work[:3])
        tiles = np.ceil(heads / TILE_HEADS)
        tile_flops = TILE_HEADS * chosen * as_array(work.flops_per_pair)
        rate = as_array(
            self.flops_efficiency * hw.compute_rate("bf16") / hw.num_multiprocessors
        )
        filling = tokens * tiles / hw.num_multiprocessors
        compute_s = waves(filling, self.wave_weight) * tile_flops / rate
        bandwidth = self.bandwidth_efficiency * hw.memory_bytes_per_s
        memory_s = tokens * chosen * as_array(work.row_bytes) / bandwidth
        busy_s = soft_max(compute_s, memory_s, self.ridge_power)
        return self.at_overhead(busy_s, memory_s, compute_s, self.overhead_s)


def indexer(at: Where, work: Scores, *, top_k: int, count: Any = 1.0) -> list[Op]:
    """`count` layers of an indexer's scores, each query token's small heads over one key of each
    cached token, and of choosing the `top_k` best where there are more. By the curves of their
    kernels, whose keys are fp8; where none was measured as attention over one row, and choosing
    costs nothing."""
    hw = at.hw
    batch, query_len, kv_len = (
        np.asarray(value, dtype=np.float64) for value in work[:3]
    )
    curve = IndexerCurve.known(hw)
    pairs = 2.0 * (work.head_dim + 1)
    if curve is None:
        alike = Latents(batch, query_len, kv_len, work.num_heads, work.head_dim, pairs)
        return [latent_attention(at, alike, name="indexer", count=count)]
    cost = Cost(
        flops=batch * query_len * kv_len * work.num_heads * pairs,
        kv_bytes=batch * kv_len * work.head_dim * KEY_BYTES,
    )
    basis = IndexerCurve.basis(hw, "indexer", work)
    basis = msgspec.structs.replace(
        basis, relative_error=max(basis.relative_error, INDEXER_ERROR)
    )
    time = curve.seconds(hw, work)
    scores = operation(
        "indexer", "attention", at, cost, time, "fp8", basis=basis, count=count
    )
    choice = ScoreSelection(batch * query_len, kv_len)
    chosen = [each.seconds(hw, choice) for each in TopKCurve.variants(hw).values()]
    if not chosen:
        return [scores]
    mean = OpTime(
        *(np.mean(np.stack(part), axis=0) for part in zip(*chosen, strict=True))
    )
    needed = np.where(kv_len > top_k, 1.0, 0.0)
    cost = Cost(activation_bytes=SCORE_BYTES * choice.rows * kv_len)
    basis = TopKCurve.basis(hw, "top k", choice, next(iter(TopKCurve.variants(hw))))
    count = count * needed
    choosing = operation(
        "top k", "attention", at, cost, mean, "bf16", basis=basis, count=count
    )
    return [scores, choosing]


def sparse_attention(
    at: Where, work: Latents, *, count: Any = 1.0, factor: Any = 1.0
) -> Op:
    """`count` layers of attention of each query token to latents chosen for it alone, by the
    kernel's own curve; where none was measured, as latent attention that reads the latents once per
    query token."""
    precision = at.precision
    batch, query_len, kv_len = (
        np.asarray(value, dtype=np.float64) for value in work[:3]
    )
    tokens = batch * query_len
    curve = SparseCurve.known(at.hw, precision.kv_dtype)
    if curve is None:
        alone = work._replace(batch=tokens, query_len=np.minimum(query_len, 1.0))
        dense = latent_attention(at, alone, count=count, factor=factor)
        return replace(dense, bases=(unmeasured("attention", "carried over"),))
    row_bytes = work.row * precision.kv_bytes
    cost = Cost(
        flops=tokens
        * kv_len
        * np.asarray(work.num_heads, dtype=np.float64)
        * work.flops_per_pair,
        kv_bytes=tokens * kv_len * row_bytes,
    )
    chosen = Chosen(tokens, kv_len, work.num_heads, work.flops_per_pair, row_bytes)
    time = curve.seconds(at.hw, chosen)
    basis = SparseCurve.basis(at.hw, "attention", chosen, precision.narrow_cache)
    dtype = precision.kv_dtype
    return operation(
        "attention",
        "attention",
        at,
        cost,
        time,
        dtype,
        basis=basis,
        count=count,
        factor=factor,
    )
