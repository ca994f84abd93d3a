"""Attention of a few tokens per sequence over a cache: decoding, drafting and verification, of
heads and of latents.

    4·batch·q·kv·heads·head_dim FLOPs; KV 2·batch·kv·kv_heads·head_dim, once per sequence or per
    query token time = overhead + splitting + ‖ blocks , FLOPs / rate ‖_p

One block per (sequence, KV head), split over the context to fill the device where the kernel can. A
block takes keys in at its own limited rate: below one wave, time does not depend on the batch.
Latent attention has many heads over one row of numbers per token: 2·batch·q·kv·heads·(latent +
value) FLOPs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.fitting import Free
from magicdec.perfmodel.kernels.base import (
    Columns,
    KernelCurve,
    KernelTable,
    Parameters,
    Rows,
    WorkingSet,
    arrays,
    as_array,
    best_fit,
    cache_speedup,
    mean_waves,
    minimise,
    soft_max,
    waves,
    with_fit,
)
from magicdec.perfmodel.kernels.gemm import cache_parameters, tensor_rate
from magicdec.perfmodel.kernels.op import Cost, Op, OpTime, Where, operation
from magicdec.specs.attention_kernels import (
    AttentionLayer,
    AttentionPath,
    KernelLaw,
    attention_path,
    tables,
)
from magicdec.specs.device import WEIGHT_ONLY, Device, bytes_per_element
from magicdec.specs.engine import EngineProfile

KvReads = Literal["per_sequence", "per_query"]
QUERY_ROWS_PER_BLOCK = 128
QUERY_TILE_ROWS = 16
"""Query rows (heads of one KV head times query tokens) that one reading of the cache serves at
least.
"""
UNSPLIT_GENERATIONS = ("turing", "ampere", "ada")
"""Generations whose library is FlashAttention 2: FlashAttention 3 needs Hopper."""
TRITON_TILE_TOKENS = 32.0
"""Cached tokens that a block of Triton's kernels takes at a time: the least part."""
GROUPED_MAX_SPLITS = 128.0
"""FlashAttention 2's constant."""
BLOCKS_PER_MULTIPROCESSOR = (1.0, 2.0, 2.25, 2.5, 3.0)
"""Searched, not descended: time steps with it. Counts as a parameter."""
MIN_ROW_TIMINGS = 4
TINY_S = 1e-30
BLOCK_RIDGE_POWER = 4.0
"""Power for blocks that each go through a context alone, reading and computing at once."""
WINDOW_TILES = (0.0, 32.0, 64.0, 128.0, 192.0)
"""Searched: what windows add to the curve of ordinary attention."""
WINDOWED_SHARE = 0.25
"""Share of shapes with several rows from which a table of attention is taken to hold windows too.
"""


class Attended(NamedTuple):
    """One layer's `query_len` tokens per sequence, each over all of `kv_len` cached ones.

    `kv_reads` "per_query" is a kernel that reads the cache again for each query token. `law`: the
    kernel's; None: the one that the curve was measured with. `window`: attended tokens, where
    `kv_len` may be more. Causal savings within the query tokens are the caller's to account for.
    """

    batch: Any
    query_len: Any
    kv_len: Any
    num_heads: Any
    num_kv_heads: Any
    head_dim: Any
    kv_dtype: str = "bf16"
    kv_reads: KvReads = "per_sequence"
    law: KernelLaw | None = None
    reread: float = 0.0
    """Share of reading the cache that each `QUERY_TILE_ROWS` beyond the first repeat, where a
    kernel's tiles are not known.
    """
    window: Any = None
    has_sinks: bool = False
    mixed_heads: bool = False
    """Whether the model's layers differ in head size, by which an engine chooses the kernel."""
    has_mixed_lengths: bool = False
    """Whether sequences differ in length, so that blocks do not end in whole waves."""


class Tiles(NamedTuple):
    """How query rows are cut in tiles: their number per KV head, the padded rows over the real
    ones, how often the cache is read from memory, and the fp32 bytes that each part of a split
    context writes for another kernel to add.

    Those are of one tile: more of them fill the device with fewer parts."""

    count: Any
    padding: Any
    reads: Any
    part_bytes: Any


def _of_rows(rows: Columns, dtype: str) -> Attended:
    return Attended(
        rows["batch_size"],
        1,
        rows["kv_len"],
        rows["num_heads"],
        rows["num_kv_heads"],
        rows["head_dim"],
        dtype or "bf16",
        window=rows.get("window_size"),
    )


def _full_attention(rows: dict[str, Array]) -> dict[str, Array]:
    """The slowest of several rows that differ in nothing but time: the others attend to a window,
    which the table does not name. In such a table a shape with a single row is left out, since it
    may be either."""
    order = np.argsort(-rows["time_s"], kind="stable")
    keys = np.stack([rows[name][order] for name in ATTENTION_COLUMNS], axis=1)
    _, first, count = np.unique(keys, axis=0, return_index=True, return_counts=True)
    if np.mean(count > 1) > WINDOWED_SHARE:
        chosen = first[count > 1]
    else:
        chosen = first
    return {name: values[np.sort(order[chosen])] for name, values in rows.items()}


ATTENTION_COLUMNS = ("batch_size", "num_heads", "num_kv_heads", "head_dim", "kv_len")
SomeCurve = TypeVar("SomeCurve", bound=KernelCurve)


class AttentionCurve(KernelCurve, frozen=True, kw_only=True):
    """Time of one layer's attention over a KV cache with one kernel library."""

    key: ClassVar[str] = "attention"
    variants_key: ClassVar[str] = "attention_formats"
    has_formats: ClassVar[bool] = True
    tables: ClassVar[tuple[KernelTable, ...]] = (
        KernelTable(
            kind="attention",
            columns=ATTENTION_COLUMNS,
            shape=("num_heads", "num_kv_heads", "head_dim"),
            variant="kv_dtype",
            work=_of_rows,
            counted=lambda rows: (
                (rows["kv_len"] >= 1024)
                & (rows["batch_size"] >= 8)
                & (rows["head_dim"] <= 128)
            ),
            is_near=lambda rows: rows["kv_len"] <= 16384,
            other_weight=0.35,
            select_group=_full_attention,
        ),
        KernelTable(
            kind="window",
            columns=(*ATTENTION_COLUMNS, "window_size"),
            shape=("num_heads", "num_kv_heads", "head_dim", "window_size"),
            variant="kv_dtype",
            work=_of_rows,
            counted=lambda rows: (rows["kv_len"] >= 1024) & (rows["batch_size"] >= 8),
            is_near=lambda rows: rows["window_size"] <= 1024,
            is_borrowed=True,
        ),
    )
    splits: Literal["always", "grouped"] = "always"
    """Whether the measured kernel splits the context of one sequence over blocks for one query
    token: always, or only with grouped-query heads.
    """
    overhead_s: Annotated[float, Free(spread=1.0)] = 1e-5
    bandwidth_efficiency: Annotated[float, Free(spread=0.2)] = 0.85
    flops_efficiency: float = 0.6
    """Assumed where no rows with several query tokens were fitted (FlashAttention 2 and 3 report
    0.6-0.75 of peak).
    """
    stream_ratio: Annotated[float, Free(spread=0.7)] = 4.0
    """Bandwidth at which the blocks that fill the device can take keys and values in, relative to
    the memory's peak.
    """
    ridge_power: Annotated[float, Free(scale="above_one")] = 3.5
    split_overhead_s: Annotated[float, Free(spread=1.0)] = 4e-6
    """Cost of splitting and combining: of every call of the splitting kernel if `splits` is
    "grouped".
    """
    l2_fraction: Annotated[float, Free(spread=0.3)] = 0.85
    l2_bandwidth_ratio: Annotated[float, Free()] = 2.0
    """Bandwidth of a cache smaller than `l2_fraction` of the L2, relative to a larger one. Below 1
    it is no caching but short reads that miss the full bandwidth (measured on A100, cause unknown),
    and holds whether the L2 is warm or not.
    """
    wave_weight: Annotated[float, Free(spread=1.0, scale="unit")] = 0.5
    min_split_tokens: Annotated[float, Free()] = 256.0
    max_splits: Annotated[float, Free(spread=0.7)] = 32.0
    block_overhead_s: Annotated[float, Free(spread=1.0)] = 1e-6
    """Fixed time of each further wave of blocks."""
    blocks_per_multiprocessor: float = 2.0
    window_tile_tokens: float = 0.0
    """Cached tokens that are read beyond a sliding window, which begins within a tile."""
    tile_rows: float = 0.0
    """Query rows (heads times query tokens) that one matrix instruction of latent attention takes;
    fewer cost as much.
    0: work grows smoothly."""
    narrow_heads: float = 0.0
    """Up to so many heads another kernel takes `narrow_tile_rows` at a time. Where there are two
    kernels, a tile holds one query token's heads. 0: there is one, whose tiles hold several
    tokens'."""
    narrow_tile_rows: float = 16.0
    tile_traffic: float = 0.0
    """How much of the reading of the cache is repeated by each further tile of query rows (0: all
    of it is found in the L2; 1: none)."""
    combine_traffic: float = 0.0
    """Cost of adding up what the parts of a split context found, relative to its fp32 traffic at
    the memory's peak.
    """
    row_factors: tuple[float, ...] = ()
    """Time with 1, 2, 3, ... query rows per KV head relative to the smooth curve: CPU matrix
    libraries have a kernel of its own for each small number of rows, and four may take no longer
    than three."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(
            math.isfinite(factor) and 0.05 <= factor <= 20.0
            for factor in self.row_factors
        ):
            raise ValueError(
                f"'row_factors' must be between 0.05 and 20, not {list(self.row_factors)!r}"
            )

    @classmethod
    def of(cls, hw: Device, variant: str = "") -> Self:
        """The device's curve for a number format, or the generic one with the way of splitting that
        its generation's library has."""
        curve = cls.known(hw, variant)
        if curve is not None:
            return curve
        generation = hw.generation.lower()
        if hw.kind == "gpu" and generation in UNSPLIT_GENERATIONS:
            return cls(splits="grouped", max_splits=GROUPED_MAX_SPLITS)
        return cls()

    @classmethod
    def may_borrow(cls, hw: Device, donor: Device, variant: str) -> bool:
        return not variant or hw.computes_in(variant) or variant in WEIGHT_ONLY

    def seconds(
        self,
        hw: Device,
        work: Attended,
        working_set: WorkingSet = None,
        tiles: Tiles | None = None,
    ) -> OpTime:
        """`tiles`: how the kernel's query rows are cut, where that is known."""
        kv_dtype, law = work.kv_dtype, work.law
        batch, query_len, kv_len, num_heads, num_kv_heads, head_dim = arrays(*work[:6])
        if work.window is not None:  # in whole tiles, of which it begins within one
            kv_len = np.minimum(kv_len, work.window + self.window_tile_tokens)
        if work.kv_reads == "per_query":
            reads = query_len
        else:
            reads = np.minimum(query_len, 1.0)
        number_bytes = bytes_per_element(kv_dtype)
        row_bytes = 2.0 * head_dim * number_bytes * reads
        kv_bytes = batch * num_kv_heads * kv_len * row_bytes
        if kv_dtype == "fp32":
            activation_bytes = 4.0
        else:
            activation_bytes = 2.0
        query_bytes = 2.0 * batch * query_len * num_heads * head_dim * activation_bytes
        speedup = cache_speedup(
            hw,
            self.l2_fraction,
            self.l2_bandwidth_ratio,
            kv_bytes,
            working_set,
        )
        group = num_heads / np.maximum(num_kv_heads, 1.0)
        rows = query_len * group
        tiled = None
        if law is not None and law.tiles and tiles is None:
            tiled = _tiled(law, batch, query_len, group)
            tiles = Tiles(tiled.per_kv_head, 1.0, tiled.reads, 0.0)
        elif tiles is None:
            further = np.maximum(rows, QUERY_TILE_ROWS) - np.maximum(
                group, QUERY_TILE_ROWS
            )
            tiles = Tiles(
                np.ceil(rows / QUERY_ROWS_PER_BLOCK),
                1.0,
                1.0 + work.reread * np.maximum(further, 0.0) / QUERY_TILE_ROWS,
                0.0,
            )
        bandwidth = self.bandwidth_efficiency * hw.memory_bytes_per_s
        if self.l2_bandwidth_ratio < 1.0:  # short reads, which queries are no part of
            num_bytes = kv_bytes * tiles.reads / speedup + query_bytes
        else:
            num_bytes = (kv_bytes * tiles.reads + query_bytes) / speedup
        memory_s = num_bytes / bandwidth
        rate = self.flops_efficiency * hw.compute_rate(
            "fp32" if kv_dtype == "fp32" else "bf16"
        )
        compute_s = (
            4.0
            * batch
            * query_len
            * kv_len
            * num_heads
            * head_dim
            * tiles.padding
            / rate
        )

        blocks = batch * num_kv_heads * tiles.count
        spread_s: Array = np.zeros(())
        ridge_power: Any = self.ridge_power
        can_split = (group > 1.0) | (self.splits != "grouped")
        if law is not None:
            can_split = (
                ((group > 1.0) | law.splits_single_heads)
                & (query_len <= law.splits_to)
                & (batch * num_kv_heads <= law.split_blocks)
            )
        if law is not None and tiled is not None:
            block_s = 4.0 * tiled.rows * kv_len * head_dim / tile_flops_per_s(hw, law)
            filling = blocks / hw.num_multiprocessors
            deviation: Array = np.zeros(())
            if work.has_mixed_lengths:
                num_waves, deviation = mean_waves(filling)
            else:
                num_waves = waves(filling, 1.0)
            is_unsplit = tiled.is_several & ~can_split
            spread_s = np.where(is_unsplit, block_s * deviation, 0.0)
            alone = max(self.ridge_power, BLOCK_RIDGE_POWER)
            ridge_power = np.where(is_unsplit, alone, ridge_power)
            of_tiles_s = block_s * np.where(is_unsplit, num_waves, filling)
            compute_s = np.where(tiled.is_several, of_tiles_s, compute_s)
        busy_s, splitting_s = self._blocks(
            hw,
            blocks,
            kv_len,
            row_bytes,
            number_bytes,
            can_split=can_split,
            memory_s=memory_s,
            law=law,
        )
        parts = self._splits(hw, batch * num_kv_heads, kv_len)
        moved = 2.0 * batch * num_kv_heads * (parts - 1.0) * tiles.part_bytes
        splitting_s = splitting_s + self.combine_traffic * moved / hw.memory_bytes_per_s
        busy_s = np.where(kv_bytes > 0, soft_max(busy_s, compute_s, ridge_power), 0.0)
        by_compute = compute_s / np.maximum(busy_s, compute_s + TINY_S)
        spread_s = spread_s * by_compute ** (ridge_power - 1.0)
        if self.row_factors:
            busy_s = busy_s * np.interp(
                rows,
                np.arange(len(self.row_factors)) + 1.0,
                self.row_factors,
            )
        overhead_s = self.overhead_s + np.where(kv_bytes > 0, splitting_s, 0.0)
        return OpTime(overhead_s + busy_s, memory_s, compute_s, overhead_s, spread_s)

    def _splits(
        self, hw: Device, blocks: Array, kv_len: Array, law: KernelLaw | None = None
    ) -> Array:
        """Parts that each of so many blocks is split into, to fill the device. A law with a rate of
        its own is of another kernel than the curve's."""
        slots = hw.num_multiprocessors * self.blocks_per_multiprocessor
        most, least_tokens = self.max_splits, self.min_split_tokens
        if law is not None and law.block_numbers_per_s is not None:
            most, least_tokens = law.max_parts, TRITON_TILE_TOKENS
        parts = np.minimum(most, np.maximum(kv_len / least_tokens, 1.0))
        return np.clip(slots / np.maximum(blocks, 1e-9), 1.0, parts)

    def _blocks(
        self,
        hw: Device,
        blocks: Array,
        kv_len: Array,
        row_bytes: Array,
        number_bytes: float,
        *,
        can_split: Any,
        memory_s: Array,
        law: KernelLaw | None = None,
    ) -> tuple[Array, Array]:
        """Time of reading the cache with so many blocks on the device's multiprocessors, and of
        splitting and combining."""
        slots = hw.num_multiprocessors * self.blocks_per_multiprocessor
        splits = np.where(can_split, self._splits(hw, blocks, kv_len, law), 1.0)
        stream_bytes_per_s = self.stream_ratio * hw.memory_bytes_per_s / slots
        if law is not None and law.block_numbers_per_s is not None:
            stream_bytes_per_s = law.block_numbers_per_s * number_bytes
        filling = blocks * splits / slots
        block_s = kv_len / splits * row_bytes / stream_bytes_per_s
        even_s = soft_max(
            memory_s, block_s * np.maximum(filling, 1.0), self.ridge_power
        )
        if self.wave_weight > 0:
            full = np.floor(filling)
            part = filling - np.floor(filling)
            wave_memory_s = memory_s / np.maximum(filling, 1e-9)
            tail_s = soft_max(
                wave_memory_s * part,
                np.where(part > 1e-9, block_s, 0.0),
                self.ridge_power,
            )
            stepped_s = (
                full * soft_max(wave_memory_s, block_s, self.ridge_power) + tail_s
            )
            even_s = np.where(
                filling > 1.0,
                even_s + self.wave_weight * (stepped_s - even_s),
                even_s,
            )
        waiting_s = self.block_overhead_s * np.maximum(filling - 1.0, 0.0)
        if self.splits == "grouped":
            splitting = np.where(can_split, 1.0, 0.0)
        else:
            splitting = 1.0 - 1.0 / splits
        return even_s + waiting_s, self.split_overhead_s * splitting

    def refitted(
        self,
        hw: Device,
        work: Attended,
        rows: Rows,
        *,
        fitted_on: str = "",
        rotated: bool = False,
        is_own: bool = False,
    ) -> Self:
        """The curve fitted with this library and way of splitting. The compute ceiling is fitted
        only where rows have several query tokens. Rows of windows choose the tile that they begin
        in."""
        if work.window is not None:
            return _with_window_tile(self, hw, work, rows)
        tiled = hw.kind == "gpu"
        query_len = as_array(work.query_len)
        parameters = dict(self.free() if tiled else {**UNTILED, **cache_parameters(hw)})
        if np.any(query_len > 1):
            if tiled:
                del parameters["max_splits"]
            parameters |= SEVERAL_QUERIES

        def predict(curve: Self) -> Array:
            return curve.seconds(hw, work, None if rotated else "own").time_s

        start = type(self)(library=self.library, splits=self.splits)
        if self.splits == "grouped":
            parameters.pop("max_splits", None)
            start = msgspec.structs.replace(start, max_splits=GROUPED_MAX_SPLITS)
        if not tiled:
            start = msgspec.structs.replace(
                start,
                wave_weight=0.0,
                stream_ratio=1e6,
                max_splits=1.0,
            )
            curve, _ = minimise(
                start, parameters, predict, rows, starts=({}, {"ridge_power": 6.0})
            )
            ratios = np.asarray(rows["time_s"], dtype=np.float64) / predict(curve)
            factors = _row_factors(
                query_len * as_array(work.num_heads) / as_array(work.num_kv_heads),
                ratios,
            )
            curve = msgspec.structs.replace(curve, row_factors=factors)
            return with_fit(
                curve, len(parameters) + len(factors), rows, predict(curve), fitted_on
            )
        starts: Sequence[Mapping[str, float]] = (
            {},
            {"wave_weight": 0.9, "bandwidth_efficiency": 0.78},
        )
        curves = (
            msgspec.structs.replace(start, blocks_per_multiprocessor=each)
            for each in BLOCKS_PER_MULTIPROCESSOR
        )
        return best_fit(
            curves, parameters, predict, rows, fitted_on, starts=starts, num_chosen=1
        )


class Tiled(NamedTuple):
    """How a kernel's law cuts query rows in tiles."""

    rows: Any
    """Rows of a tile, all of which are computed."""
    per_kv_head: Any
    """Tiles for each KV head."""
    reads: Any
    """How often they read the cache from memory."""
    is_several: Any


def least_tile(law: KernelLaw, rows: Any) -> Array:
    """Rows of the least tile that holds so many, or of the largest."""
    sizes = np.asarray(law.tiles)
    return np.asarray(sizes[np.searchsorted(sizes, np.minimum(rows, sizes[-1]))])


def _tiled(law: KernelLaw, batch: Any, query_len: Any, group: Any) -> Tiled:
    """The least tile that holds the rows, or several of the largest. One token's heads share tiles
    in every kernel."""
    is_several = query_len > 1.0
    per_token = group
    apart: Array = np.ones(())
    if not law.packs:
        per_token = np.where(is_several, 1.0, group)
        apart = np.where(is_several, group, 1.0)
    rows = query_len * per_token
    if not law.packs_tokens:
        rows, apart = per_token, query_len
    deciding = rows
    if law.tile_of_batch:
        deciding = (batch * query_len - batch + 1.0) * per_token
    size = least_tile(law, deciding)
    count = np.ceil(rows / size)
    reading = count if law.packs_tokens else apart * count
    further = np.where(is_several, reading - 1.0, 0.0)
    return Tiled(size, apart * count, 1.0 + law.reread * further, is_several)


def tile_flops_per_s(hw: Device, law: KernelLaw) -> float:
    """Rate of one multiprocessor in a tile of several query tokens."""
    return tensor_rate(hw, law.rate) / hw.num_multiprocessors


UNTILED: Parameters = {
    "overhead_s": Free(prior=2e-5, spread=2.0),
    "bandwidth_efficiency": Free(prior=0.7, spread=0.7),
    "ridge_power": Free(prior=2.0, scale="above_one"),
    "block_overhead_s": Free(prior=1e-6, spread=2.0),
}
SEVERAL_QUERIES: Parameters = {"flops_efficiency": Free(spread=1.0)}


def _with_window_tile(
    known: SomeCurve, hw: Device, work: Attended, rows: Rows
) -> SomeCurve:
    def error(curve: SomeCurve) -> float:
        predicted = curve.table_seconds(hw, work)
        return float(
            np.mean(rows["weight"] * np.abs(np.log(predicted / rows["time_s"])))
        )

    return min(
        (
            msgspec.structs.replace(known, window_tile_tokens=tokens)
            for tokens in WINDOW_TILES
        ),
        key=error,
    )


def _row_factors(rows: Array, ratios: Array) -> tuple[float, ...]:
    """Median of measured / smooth for each number of query rows, from 1 to the most there are
    enough timings of.
    """
    counted = {}
    for n in np.unique(rows):
        if np.sum(rows == n) >= MIN_ROW_TIMINGS:
            counted[int(n)] = float(np.median(ratios[rows == n]))
    if len(counted) < 2:
        return ()
    known = sorted(counted)
    every = np.arange(1, known[-1] + 1)
    return tuple(float(f) for f in np.interp(every, known, [counted[n] for n in known]))


def _last_wave(hw: Device, engine: EngineProfile, *, blocks: Any) -> Any:
    """How much longer attention takes because its last wave of blocks does not fill the device: 1 +
    w·(ceil(x)/x − 1) for x = blocks / slots above 1; below, the kernel splits the context and fills
    the device."""
    per_multiprocessor = engine.kernels.attention_blocks_per_multiprocessor
    if per_multiprocessor is None:
        return 1.0
    filling = np.maximum(
        np.asarray(blocks, dtype=np.float64)
        / (per_multiprocessor * hw.num_multiprocessors),
        1.0,
    )
    return 1.0 + engine.kernels.attention_wave_weight * (
        np.ceil(filling) / filling - 1.0
    )


def by_path(
    path: AttentionPath, query_len: Any, seconds: Callable[[KernelLaw], OpTime]
) -> OpTime:
    """The time by a kernel's law. Where either of two may run several tokens it is the geometric mean
    of both, each one standard deviation away."""
    time, *others = (seconds(law) for law in path.laws)
    for other in others:
        middle_s = np.sqrt(time.time_s * other.time_s)
        apart = np.abs(np.log(other.time_s / time.time_s)) / 2.0
        spread_s = np.hypot(time.spread_s, middle_s * apart)
        time = time._replace(time_s=middle_s, spread_s=spread_s)
    if path.one_token is None:
        return time
    is_one = as_array(query_len) <= 1.0
    pairs = zip(time, seconds(path.one_token), strict=True)
    return OpTime(*(np.where(is_one, one, several) for several, one in pairs))


def attention(
    at: Where,
    work: Attended,
    *,
    count: Any = 1.0,
    factor: Any = 1.0,
    is_prefill: bool = False,
) -> Op:
    """`count` layers of attention of `query_len` tokens per sequence over `kv_len` cached ones, or
    a window of them. Prompts fill whatever tiles a kernel has; latents are expanded for them to keys
    and values of each head."""
    hw, engine, precision = at
    kv_dtype = precision.kv_dtype
    curve = AttentionCurve.of(hw, kv_dtype)
    batch, query_len, kv_len = work[:3]
    if work.window is not None:
        kv_len = np.minimum(kv_len, work.window + curve.window_tile_tokens)
    if engine.kernels.kv_reads == "per_query":
        reads = query_len
    else:
        reads = 1.0
    cost = Cost(
        flops=4.0 * batch * query_len * kv_len * work.num_heads * work.head_dim,
        kv_bytes=2.0
        * batch
        * kv_len
        * work.num_kv_heads
        * work.head_dim
        * precision.kv_bytes
        * reads,
    )
    work = work._replace(
        kv_len=kv_len,
        window=None,
        kv_dtype=kv_dtype,
        kv_reads=engine.kernels.kv_reads,
        reread=engine.kernels.query_tile_reread,
        has_mixed_lengths=engine.kernels.has_mixed_lengths,
    )
    own = None
    if curve.splits == "grouped" and not is_prefill:
        factor = factor * engine.kernels.grouped_attention_factor
    elif not is_prefill:
        own = engine.kernels.split_attention_factor
    factor = factor * (engine.kernels.attention_factor if own is None else own)
    if not is_prefill:
        factor = factor * _last_wave(hw, engine, blocks=batch * work.num_kv_heads)
    path = AttentionPath("", (tables().kernels["packed"],))
    if not is_prefill:
        layer = AttentionLayer(
            kv_dtype, float(work.head_dim), work.has_sinks, work.mixed_heads
        )
        path = attention_path(engine, hw, layer)

    def seconds(law: KernelLaw) -> OpTime:
        return curve.seconds(hw, work._replace(law=law))

    time = by_path(path, query_len, seconds)
    basis = AttentionCurve.basis(hw, "attention", work, precision.narrow_cache)
    return operation(
        "attention",
        "attention",
        at,
        cost,
        time,
        kv_dtype,
        basis=basis,
        count=count,
        factor=factor,
    )


class Prompts(NamedTuple):
    """One layer's `query_len` new tokens per sequence, the last of the `kv_len` that are cached.
    `pairs` of a query and a key that it sees, where a window leaves fewer than all before it."""

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
    query_len = as_array(query_len)
    kv_len = as_array(kv_len)
    return np.asarray(
        query_len * np.maximum(kv_len - query_len, 0.0)
        + query_len * (query_len + 1.0) / 2.0
    )


class PrefillCurve(KernelCurve, frozen=True, kw_only=True):
    """Time of one layer's causal attention of whole prompts, or chunks of them."""

    key: ClassVar[str] = "prefill"
    tables: ClassVar[tuple[KernelTable, ...]] = (
        KernelTable(
            kind="prefill",
            columns=(
                "batch_size",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "prompt_len",
            ),
            shape=("num_heads", "num_kv_heads", "head_dim"),
            variant="kv_dtype",
            work=lambda rows, dtype: Prompts(
                rows["batch_size"],
                rows["prompt_len"],
                rows["prompt_len"],
                rows["num_heads"],
                rows["num_kv_heads"],
                rows["head_dim"],
            ),
            counted=lambda rows: (
                (rows["prompt_len"] >= 512) & (rows["head_dim"] <= 128)
            ),
            is_near=lambda rows: rows["prompt_len"] <= 4096,
        ),
    )
    overhead_s: Annotated[float, Free(spread=1.0)] = 1e-5
    flops_efficiency: Annotated[float, Free(spread=0.3)] = 0.6
    narrow_head_efficiency: Annotated[float, Free(spread=0.3)] = 0.7
    """Rate with heads of 64 dimensions and fewer, relative to 128."""
    wide_head_efficiency: Annotated[float, Free(spread=0.3)] = 1.0
    """Rate with heads of more than 128 dimensions, relative to 128."""
    block_weight: Annotated[float, Free(spread=0.7)] = 0.9
    """Time of the longest block (128 queries over all keys) relative to its share of the device's
    rate.
    """
    bandwidth_efficiency: Annotated[float, Free(spread=0.7)] = 0.4
    ridge_power: Annotated[float, Free(scale="above_one")] = 1.2

    def seconds(
        self, hw: Device, work: Prompts, working_set: WorkingSet = None
    ) -> OpTime:
        batch, query_len, kv_len, num_heads, num_kv_heads, head_dim = arrays(*work[:6])
        element = bytes_per_element(work.kv_dtype)
        if work.kv_dtype == "fp32":
            activation = 4.0
        else:
            activation = 2.0
        of_head = np.where(
            head_dim <= 64,
            self.narrow_head_efficiency,
            np.where(head_dim <= 128, 1.0, self.wide_head_efficiency),
        )
        rate = (
            self.flops_efficiency
            * of_head
            * hw.compute_rate("fp32" if work.kv_dtype == "fp32" else "bf16")
        )
        kv_len = np.maximum(kv_len, query_len)
        tile = np.minimum(query_len, QUERY_ROWS_PER_BLOCK)
        if work.pairs is None:
            seen = causal_pairs(query_len, kv_len)
        else:
            seen = as_array(work.pairs)
        whole_tiles = seen + query_len * np.maximum(tile - 1.0, 0.0) / 2.0
        compute_s = 4.0 * batch * whole_tiles * num_heads * head_dim / rate
        block_s = (
            4.0
            * QUERY_ROWS_PER_BLOCK
            * kv_len
            * head_dim
            / rate
            * hw.num_multiprocessors
        )
        num_bytes = (
            2.0
            * batch
            * (query_len * num_heads * activation + kv_len * num_kv_heads * element)
            * head_dim
        )
        memory_s = num_bytes / (self.bandwidth_efficiency * hw.memory_bytes_per_s)
        longest_s = np.where(compute_s > 0, self.block_weight * block_s, 0.0)
        busy_s = soft_max(
            memory_s,
            soft_max(compute_s, longest_s, BLOCK_RIDGE_POWER),
            self.ridge_power,
        )
        return self.at_overhead(busy_s, memory_s, compute_s, self.overhead_s)

    def refitted(
        self,
        hw: Device,
        work: Prompts,
        rows: Rows,
        *,
        fitted_on: str = "",
        rotated: bool = False,
        is_own: bool = False,
    ) -> Self:
        parameters = self.free()
        if not np.any(as_array(work.head_dim) > 128):
            del parameters["wide_head_efficiency"]
        if not np.any(as_array(work.head_dim) <= 64):
            del parameters["narrow_head_efficiency"]
        return best_fit(
            [type(self)()],
            parameters,
            lambda each: each.table_seconds(hw, work),
            rows,
            fitted_on,
        )


def prefill_attention(
    at: Where,
    work: Prompts,
    curve: PrefillCurve,
    *,
    num_chunks: Any,
    window: int | None = None,
    count: Any = 1.0,
) -> Op:
    """`count` layers of causal attention of whole prompts (`query_len`), in `num_chunks` equal
    chunks, each of which reads the keys before it; at most `window` of them."""
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
        kv_bytes=2.0
        * batch
        * seen
        * work.num_kv_heads
        * work.head_dim
        * precision.kv_bytes,
    )
    work = work._replace(
        query_len=chunk,
        kv_len=seen,
        kv_dtype=precision.kv_dtype,
        pairs=pairs / num_chunks,
    )
    time = curve.seconds(at.hw, work)
    basis = PrefillCurve.basis(at.hw, "prefill attention", work)
    return operation(
        "attention",
        "attention",
        at,
        cost,
        time,
        precision.kv_dtype,
        basis=basis,
        count=count * num_chunks,
    )
