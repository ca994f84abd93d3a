"""Multi-head latent attention: every head attends to one row of numbers per cached token.

    2·batch·q·kv·heads·(latent + value) FLOPs; the latents read once

Absorbed, as in decoding, it is grouped-query attention over one KV head (`AttentionCurve.latent_seconds`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import msgspec
import numpy as np

from magicdec.errors import ConfigError
from magicdec.fitting import Free
from magicdec.perfmodel.kernels.attention import AttentionCurve, Latents
from magicdec.perfmodel.kernels.base import Array, Cost, Op, Table, Where, operation
from magicdec.perfmodel.kernels.fit import Rows, minimise, with_fit
from magicdec.specs.device import Device

LATENT_ROW, LATENT_FLOPS_PER_PAIR = 512 + 64, 2.0 * (512 + 64 + 512)
"""Sizes of DeepSeek-V3's latents, and all since, whose kernels the tables hold."""
LATENT_BLOCKS = (1.0, 2.0)
LATENT_STARTS: tuple[Mapping[str, float], ...] = ({}, {"max_splits": 1.5}, {"max_splits": 200.0, "wave_weight": 0.05})
KERNEL_ALONE = "attention kernel"
LATENT_LANE = "TensorRT-LLM"


def _latent_kernels(frame: Any) -> Any:
    """Rows of the kernel alone, as TensorRT-LLM's table has it where the file's sources name several: SGLang's for a
    cache in fp8 on Hopper takes seven times as long (it widens the cache), and no server is seen to use it."""
    kernels = frame[frame["scope"] == KERNEL_ALONE]
    if "source" in frame and kernels["source"].str.contains(LATENT_LANE).any():
        kernels = kernels[kernels["source"].str.contains(LATENT_LANE)]
    if kernels.empty:
        raise ConfigError(f"no row's scope is '{KERNEL_ALONE}'")
    return kernels.reset_index(drop=True)


class LatentCurve(AttentionCurve, frozen=True, kw_only=True):
    """Time of one layer's absorbed latent attention by a kernel of its own."""

    key: ClassVar[str] = "latent"
    variants_key: ClassVar[str] = ""
    tables: ClassVar[tuple[Table, ...]] = (
        Table(
            kind="latent",
            columns=("batch_size", "num_heads", "kv_len"),
            marks=("scope",),
            shape=("num_heads", "batch_size"),
            variant="kv_dtype",
            work=lambda rows, dtype: Latents(
                rows["batch_size"], 1.0, rows["kv_len"], rows["num_heads"], LATENT_ROW, LATENT_FLOPS_PER_PAIR,
                dtype or "bf16",
            ),
            counted=lambda rows: (rows["kv_len"] >= 1024) & (rows["batch_size"] >= 4),
            is_near=lambda rows: rows["num_heads"] <= 64,
            other_weight=0.35,
            select=_latent_kernels,
        ),
    )  # fmt: skip

    @classmethod
    def of(cls, hw: Device, variant: str = "") -> Self:
        """The curve of latents in a format; unmeasured, of ordinary attention."""
        alike = AttentionCurve.of(hw, variant)
        return cls.known(hw, variant) or cls(**{name: getattr(alike, name) for name in alike.__struct_fields__})

    @classmethod
    def may_borrow(cls, hw: Device, donor: Device, variant: str) -> bool:
        return False

    def table_seconds(self, hw: Device, work: Latents) -> Array:
        return self.latent_seconds(hw, work, "own").time_s

    def refitted(
        self, hw: Device, work: Any, rows: Rows, *, fitted_on: str = "", rotated: bool = False, is_own: bool = False
    ) -> Self:
        """Fits decoding of latent attention. The compute ceiling shows where many heads read one latent. This curve has
        the tiles of query rows, and whether the kernel splits contexts (`combine_traffic` > 0): what the parts found is
        then added up at a price for each query row. Splits have no other: more query tokens, which need fewer of them,
        could take less time. A cache in a narrow format is read at the bandwidth that one in 16 bits showed; kernels of
        narrow tiles compute in its format."""
        start = msgspec.structs.replace(self, split_overhead_s=0.0)
        has_narrow = start.narrow_heads > 0
        rate = hw.compute_rate(work.kv_dtype) / hw.compute_rate("bf16") if has_narrow else 1.0
        parameters = {**self.free(), "flops_efficiency": Free(prior=0.65 * rate, spread=0.2)}
        del parameters["split_overhead_s"]
        if start.combine_traffic > 0:
            parameters["combine_traffic"] = Free(prior=0.5, spread=0.7)
            del parameters["wave_weight"]
        if has_narrow:
            parameters["tile_traffic"] = Free(prior=0.3, spread=0.7)
            del parameters["block_overhead_s"]
        wide = self.known(hw, "bf16")
        if work.kv_dtype != "bf16" and wide is not None and start.combine_traffic > 0:
            parameters["bandwidth_efficiency"] = Free(prior=wide.bandwidth_efficiency, spread=0.03)
        starts = [{name: value for name, value in each.items() if name in parameters} for each in LATENT_STARTS]
        candidates = [
            minimise(
                msgspec.structs.replace(start, blocks_per_multiprocessor=blocks), parameters,
                lambda curve: curve.table_seconds(hw, work), rows, starts=starts,
            )
            for blocks in LATENT_BLOCKS
        ]  # fmt: skip
        curve = min(candidates, key=lambda candidate: candidate[1])[0]
        return with_fit(curve, len(parameters) + 1, rows, curve.table_seconds(hw, work), fitted_on)


def latent_attention(at: Where, work: Latents, *, name: str = "attention", count: Any = 1.0, factor: Any = 1.0) -> Op:
    """`count` layers of many heads over one row of numbers per token: absorbed latent attention, whose heads all attend
    to the same latents, by their curve, which no factor of an engine is about; an indexer (`name`) by the curve of
    ordinary attention."""
    hw, engine, precision = at
    batch, query_len, kv_len, heads = (np.asarray(value, dtype=np.float64) for value in work[:4])
    reads = query_len if engine.kv_reads == "per_query" else np.minimum(query_len, 1.0)
    cost = Cost(
        flops=batch * query_len * kv_len * heads * work.flops_per_pair,
        kv_bytes=batch * kv_len * work.row * precision.kv_bytes * reads,
    )
    kv_dtype = precision.kv_dtype
    own = LatentCurve.known(hw, kv_dtype) if name == "attention" else None
    factor = factor * (engine.attention_factor if own is None else 1.0)
    curve = own or AttentionCurve.of(hw, kv_dtype)
    time = curve.latent_seconds(hw, work._replace(kv_dtype=kv_dtype, kv_reads=engine.kv_reads))
    return operation(name, "attention", at, cost, time, kv_dtype, count=count, factor=factor)
