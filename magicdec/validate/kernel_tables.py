"""Tables of timed kernels: how each is read, predicted, and refitted.

A table is a CSV file (gzip or not) with a column `device`, `latency_us`, and

    GEMM               m, n, k; dtype                                             (m,k) × (k,n)
    decode attention   batch_size, num_heads, num_kv_heads, head_dim, kv_len; kv_dtype    one query token per sequence
    latent attention   batch_size, num_heads, kv_len; scope; kv_dtype             DeepSeek's; one query token each
    prefill attention  batch_size, num_heads, num_kv_heads, head_dim, prompt_len  causal, nothing cached before
    experts            num_tokens, hidden_size, moe_intermediate_size, num_experts_per_tok, num_experts, tp_size,
                       distribution; dtype                                        a layer's routed experts on one rank
    all-reduce         tp_size, message_bytes; engine                             payload per rank, in a captured graph
    windowed attention batch_size, num_heads, num_kv_heads, head_dim, kv_len, window_size; kv_dtype
    recurrence         batch_size, query_len, num_key_heads, num_value_heads      decoding and verification, with its
                                                                                  convolution
    of prompts         batch_size, prompt_len, num_key_heads, num_value_heads
    indexer            batch_size, query_len, kv_len, num_index_heads             scores over a paged fp8 cache
    top-k              batch_size, query_len, kv_len, top_k; scores               choosing by those scores
    sparse attention   batch_size, query_len, num_heads, num_chosen; kv_dtype     of the latents that were chosen

Columns after the semicolon may be missing: bf16, and vLLM's kernels. Each value of them has a curve of its own.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from magicdec.errors import ConfigError
from magicdec.perfmodel.arrays import Array
from magicdec.perfmodel.collectives import algorithm_time
from magicdec.perfmodel.curve_fit import fit_allreduce, fit_attention, fit_gemm, fit_latent
from magicdec.perfmodel.layer_fit import fit_moe, fit_prefill
from magicdec.perfmodel.roofline import (
    attention_time,
    gemm_time,
    latent_attention_time,
    moe_time,
    prefill_attention_time,
)
from magicdec.specs.hardware import WEIGHT_ONLY, HardwareProfile, MoeCurve
from magicdec.units import MIB, MICRO
from magicdec.validate import layer_kinds
from magicdec.validate.layer_kinds import KINDS, LATENT_FLOPS_PER_PAIR, LATENT_ROW, LayerKind

TableKind = Literal["gemm", "attention", "prefill", "latent", "moe", "allreduce"] | LayerKind
Mask = npt.NDArray[np.bool_]
Columns = Mapping[str, Array]
HELD_OUT_ONE_IN = 4
MAX_FIT_ROWS = 3000
MAX_ALL_REDUCE_BYTES = 16 * MIB
NEMOTRON_EXPERTS, NEMOTRON_WIDTH = 22, 1856
WINDOWED_SHARE = 0.25
"""Share of shapes with several rows from which a table of attention is taken to hold windows too."""
KERNEL_ALONE = "attention kernel"
LATENT_LANE = "TensorRT-LLM"
EAGER = "eager"
VARIANTS = {
    "bf16": "", "bfloat16": "", "vLLM": "", "SGLang_CustomAllReduce_graph": "sglang", "TRTLLM": "trtllm",
    "SGLang_CustomAllReduce_eager": EAGER, "w4a16_mxfp4": "mxfp4",
}  # fmt: skip
"""The tables' names of what profiles call otherwise. Eager kernels are left out: decoding runs captured graphs."""


class Group(NamedTuple):
    """Rows that one curve describes: of a device, and of a number format or an engine ("": bf16, vLLM)."""

    device: str
    variant: str

    def name(self, kind: TableKind) -> str:
        return "/".join((self.device, kind, self.variant)).rstrip("/")


@dataclass(frozen=True, kw_only=True)
class Table:
    """What is known of one kind of table."""

    kind: TableKind
    columns: tuple[str, ...]
    shape: tuple[str, ...]
    """Columns whose values make a shape; held out together."""
    variant: str
    """The column that names a number format or an engine's kernels; may be missing."""
    counted: Callable[[Columns], Mask]
    is_near: Callable[[Columns], Mask]
    """Rows that the extrapolation is fitted on."""
    other_weight: float
    """Weight in the fit of rows that do not count."""


PLAIN_TABLES = (
    Table(
        kind="gemm",
        columns=("m", "n", "k"),
        shape=("n", "k"),
        variant="dtype",
        counted=lambda rows: (rows["m"] <= 1024) & (rows["n"] >= 512) & (rows["k"] >= 512),
        is_near=lambda rows: rows["m"] <= 256,
        other_weight=0.3,
    ),
    Table(
        kind="attention",
        columns=("batch_size", "num_heads", "num_kv_heads", "head_dim", "kv_len"),
        shape=("num_heads", "num_kv_heads", "head_dim"),
        variant="kv_dtype",
        counted=lambda rows: (rows["kv_len"] >= 1024) & (rows["batch_size"] >= 8) & (rows["head_dim"] <= 128),
        is_near=lambda rows: rows["kv_len"] <= 16384,
        other_weight=0.35,
    ),
    Table(
        kind="latent",
        columns=("batch_size", "num_heads", "kv_len"),
        shape=("num_heads", "batch_size"),
        variant="kv_dtype",
        counted=lambda rows: (rows["kv_len"] >= 1024) & (rows["batch_size"] >= 4),
        is_near=lambda rows: rows["num_heads"] <= 64,
        other_weight=0.35,
    ),
    Table(
        kind="prefill",
        columns=("batch_size", "num_heads", "num_kv_heads", "head_dim", "prompt_len"),
        shape=("num_heads", "num_kv_heads", "head_dim"),
        variant="kv_dtype",
        counted=lambda rows: (rows["prompt_len"] >= 512) & (rows["head_dim"] <= 128),
        is_near=lambda rows: rows["prompt_len"] <= 4096,
        other_weight=0.3,
    ),
    Table(
        kind="moe",
        columns=("num_tokens", "hidden_size", "moe_intermediate_size", "num_experts_per_tok", "num_experts", "tp_size"),
        shape=("hidden_size", "moe_intermediate_size", "num_experts_per_tok", "num_experts"),
        variant="dtype",
        counted=lambda rows: (rows["tp_size"] <= 8) & (rows["num_tokens"] <= 1024),
        is_near=lambda rows: rows["num_tokens"] <= 256,
        other_weight=0.3,
    ),
    Table(
        kind="allreduce",
        columns=("tp_size", "message_bytes"),
        shape=("message_bytes",),
        variant="kernel",
        counted=lambda rows: rows["message_bytes"] <= MAX_ALL_REDUCE_BYTES,
        is_near=lambda rows: rows["tp_size"] <= 2,
        other_weight=0.2,
    ),
)
TABLES = (
    *(
        Table(
            kind=kind, columns=each.columns, shape=each.shape, variant=each.variant, counted=each.counted,
            is_near=each.is_near, other_weight=0.3,
        )
        for kind, each in KINDS.items()
    ),
    *PLAIN_TABLES,
)  # fmt: skip
"""A file is read as the first whose columns it has."""


def read_table(path: Path) -> tuple[Table, dict[Group, dict[str, Array]]]:
    """The rows of a file by device and variant: its columns as floats, and `time_s`.

    Raises ConfigError for a file that is none of the tables, or a value that is not a positive number (with its line).
    """
    import pandas as pd

    try:
        frame = pd.read_csv(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} is not a readable CSV file: {str(error).splitlines()[0]}") from error
    table = next((table for table in TABLES if _holds(table, set(frame.columns))), None)
    if table is None or not {"device", "latency_us"} <= set(frame.columns):
        wanted = "; ".join(", ".join(("device", *table.columns, "latency_us")) for table in TABLES)
        raise ConfigError(f"{path} has the columns {', '.join(map(str, frame.columns))}; known tables have {wanted}")
    if table.kind == "latent":
        frame = _latent_kernels(path, frame)
    numbers: dict[str, Array] = {}
    for name in (*table.columns, "latency_us"):
        values = pd.to_numeric(frame[name], errors="coerce").to_numpy(dtype=np.float64)
        bad = ~(np.isfinite(values) & (values > 0))
        if bad.any():
            line = int(np.argmax(bad))
            raise ConfigError(
                f"{path}: line {line + 2}: '{name}' must be a positive number, not {frame[name].iloc[line]}"
            )
        numbers[name] = values
    numbers["time_s"] = numbers.pop("latency_us") * MICRO
    if table.kind == "moe":
        numbers["is_balanced"] = np.where(frame["distribution"].astype(str) == "balanced", 1.0, 0.0)
    devices = frame["device"].astype(str).to_numpy()
    if table.variant in frame:
        variants = frame[table.variant].fillna("").astype(str).map(lambda name: VARIANTS.get(name, name)).to_numpy()
    else:
        variants = np.full(devices.size, "", dtype=object)
    keys = dict.fromkeys(zip(devices, variants, strict=True))
    groups = {Group(*key): select(numbers, (devices == key[0]) & (variants == key[1])) for key in keys}
    groups = {key: rows for key, rows in groups.items() if key.variant != EAGER}
    if table.kind == "attention":
        groups = {key: _full_attention(table, rows) for key, rows in groups.items()}
    if table.kind == "moe":
        groups = {key: select(rows, ~_has_two_matrices(rows)) for key, rows in groups.items()}
    return table, groups


def _holds(table: Table, names: set[str]) -> bool:
    return set(table.columns) <= names and (table.kind != "latent" or "scope" in names)


def _latent_kernels(path: Path, frame: Any) -> Any:
    """Rows of the kernel alone, as TensorRT-LLM's table has it where the file's sources name several: SGLang's for a
    cache in fp8 on Hopper takes seven times as long (it widens the cache), and no server is seen to use it."""
    kernels = frame[frame["scope"] == KERNEL_ALONE]
    if "source" in frame and kernels["source"].str.contains(LATENT_LANE).any():
        kernels = kernels[kernels["source"].str.contains(LATENT_LANE)]
    if kernels.empty:
        raise ConfigError(f"{path}: no row's scope is '{KERNEL_ALONE}'")
    return kernels.reset_index(drop=True)


def _has_two_matrices(rows: Columns) -> Mask:
    """Nemotron's experts are not gated: two matrices, where the table's other models have three; it does not say so."""
    mask: Mask = (rows["num_experts_per_tok"] == NEMOTRON_EXPERTS) | (rows["moe_intermediate_size"] == NEMOTRON_WIDTH)
    return mask


def _full_attention(table: Table, rows: Columns) -> dict[str, Array]:
    """Of several rows that differ in nothing but time the slowest: the others attend to a window, which the table does
    not name. In such a table a shape with a single row is left out, since it may be either."""
    order = np.argsort(-rows["time_s"], kind="stable")
    keys = np.stack([rows[name][order] for name in table.columns], axis=1)
    _, first, count = np.unique(keys, axis=0, return_index=True, return_counts=True)
    chosen = first[count > 1] if np.mean(count > 1) > WINDOWED_SHARE else first
    return select(rows, np.sort(order[chosen]))


def predict(table: Table, hw: HardwareProfile, rows: Columns, variant: str = "") -> Array:
    """Seconds of each row. Operands that fit stay in the L2, as where kernels are timed in a loop."""
    dtype = variant or "bf16"
    if table.kind in KINDS:
        return KINDS[table.kind].predict(hw, curve_of(table, hw, variant), rows, variant)
    if table.kind == "gemm":
        return gemm_time(
            hw, m=rows["m"], n=rows["n"], k=rows["k"], weight_dtype=dtype, compute_dtype=dtype, working_set_bytes="own"
        ).time_s
    if table.kind == "attention":
        return attention_time(
            hw, batch=rows["batch_size"], query_len=1, kv_len=rows["kv_len"], num_heads=rows["num_heads"],
            num_kv_heads=rows["num_kv_heads"], head_dim=rows["head_dim"], kv_dtype=dtype, working_set_bytes="own",
        ).time_s  # fmt: skip
    if table.kind == "latent":
        return latent_attention_time(
            hw, batch=rows["batch_size"], query_len=1, kv_len=rows["kv_len"], num_heads=rows["num_heads"],
            row=LATENT_ROW, flops_per_pair=LATENT_FLOPS_PER_PAIR, kv_dtype=dtype, curve=hw.latent_curve(dtype),
            working_set_bytes="own",
        ).time_s  # fmt: skip
    if table.kind == "moe":
        return moe_time(
            hw, hw.moe.get(dtype) or MoeCurve(), tokens=rows["num_tokens"], hidden_size=rows["hidden_size"],
            width=rows["moe_intermediate_size"] / rows["tp_size"], num_experts=rows["num_experts"],
            num_experts_per_tok=rows["num_experts_per_tok"], weight_dtype=dtype, compute_dtype=_compute_dtype(dtype),
            is_balanced=rows["is_balanced"] > 0,
        ).time_s  # fmt: skip
    if table.kind == "prefill":
        return prefill_attention_time(
            hw, batch=rows["batch_size"], query_len=rows["prompt_len"], kv_len=rows["prompt_len"],
            num_heads=rows["num_heads"], num_kv_heads=rows["num_kv_heads"], head_dim=rows["head_dim"],
        ).time_s  # fmt: skip
    curve = hw.allreduce_curve(variant)
    return algorithm_time(hw, curve, message_bytes=rows["message_bytes"], tp_size=rows["tp_size"])


def _compute_dtype(weight_dtype: str) -> str:
    return "bf16" if weight_dtype in WEIGHT_ONLY else weight_dtype


def select(rows: Columns, mask: npt.NDArray[Any]) -> dict[str, Array]:
    return {name: values[mask] for name, values in rows.items()}


def held_out(table: Table, rows: Columns) -> Mask:
    """A quarter of the shapes, chosen by a hash of the shape, the same on every machine."""
    shapes = np.stack([rows[name] for name in table.shape], axis=1)
    unique, inverse = np.unique(shapes, axis=0, return_inverse=True)
    chosen = np.array([_hash(row) % HELD_OUT_ONE_IN == 0 for row in unique], dtype=np.bool_)
    mask: Mask = chosen[inverse.reshape(-1)]
    return mask


def _hash(values: Sequence[float]) -> int:
    return int(hashlib.sha256(",".join(str(int(value)) for value in values).encode()).hexdigest(), 16)


def curve_of(table: Table, hw: HardwareProfile, variant: str = "") -> Any:
    """The curve that predicts the table's rows of this variant."""
    if table.kind in KINDS:
        return layer_kinds.curve_of(table.kind, hw, variant)
    if table.kind == "gemm":
        return hw.gemm_curve(variant or "bf16")
    if table.kind == "attention":
        return hw.attention_curve(variant or "bf16")
    if table.kind == "latent":
        return hw.latent_curve(variant or "bf16")
    if table.kind == "moe":
        return hw.moe.get(variant or "bf16") or MoeCurve()
    return hw.prefill_curve() if table.kind == "prefill" else hw.allreduce_curve(variant)


def with_curve(table: Table, hw: HardwareProfile, variant: str, curve: Any) -> HardwareProfile:
    """The profile with that curve in its place."""
    if table.kind in KINDS:
        return layer_kinds.with_curve(table.kind, hw, variant, curve)
    if table.kind in ("moe", "latent"):
        return msgspec.structs.replace(hw, **{table.kind: {**getattr(hw, table.kind), variant or "bf16": curve}})
    if not variant:
        return msgspec.structs.replace(hw, **{table.kind: curve})
    field = "allreduce_engines" if table.kind == "allreduce" else f"{table.kind}_formats"
    return msgspec.structs.replace(hw, **{field: {**getattr(hw, field), variant: curve}})


def refit(
    table: Table,
    hw: HardwareProfile,
    rows: Columns,
    *,
    variant: str = "",
    fitted_on: str = "",
    max_rows: int | None = MAX_FIT_ROWS,
) -> HardwareProfile:
    """The profile with this table's curve fitted to `rows` (evenly thinned to `max_rows`)."""
    length = rows["time_s"].size
    if max_rows is not None and length > max_rows:
        chosen = np.zeros(length, dtype=np.bool_)
        chosen[np.random.default_rng(0).choice(length, size=max_rows, replace=False)] = True
        rows = select(rows, chosen)
    weighted: dict[str, Any] = {**rows, "weight": np.where(table.counted(rows), 1.0, table.other_weight)}
    dtype, known = variant or "bf16", curve_of(table, hw, variant)
    curve: Any
    if table.kind in KINDS:
        curve = layer_kinds.refitted(table.kind, hw, weighted, variant, fitted_on)
    elif table.kind == "gemm":
        curve = fit_gemm(weighted, hw, weight_dtype=dtype, compute_dtype=dtype, fitted_on=fitted_on)
    elif table.kind == "attention":
        curve = fit_attention(
            weighted, hw, kv_dtype=dtype, splits=known.splits, library=known.library, fitted_on=fitted_on
        )
    elif table.kind == "latent":
        weighted |= {"row": LATENT_ROW, "flops_per_pair": LATENT_FLOPS_PER_PAIR}
        curve = fit_latent(weighted, hw, kv_dtype=dtype, tiles=known, library=known.library, fitted_on=fitted_on)
    elif table.kind == "moe":
        curve = fit_moe(weighted, hw, weight_dtype=dtype, compute_dtype=_compute_dtype(dtype), fitted_on=fitted_on)
    elif table.kind == "prefill":
        curve = fit_prefill(weighted, hw, fitted_on=fitted_on)
    else:
        curve = fit_allreduce(
            weighted, hw, library=known.library, fitted_on=fitted_on,
            start=known if with_own_curve(hw, variant) else None,
        )  # fmt: skip
    return with_curve(table, hw, variant, curve)


def with_own_curve(hw: HardwareProfile, variant: str) -> bool:
    """Whether the device has an all-reduce curve of its own for these kernels, whose algorithms' sizes are known."""
    return hw.allreduce is not None if not variant else variant in hw.allreduce_engines
