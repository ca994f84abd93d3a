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

Columns after the semicolon may be missing: bf16, and vLLM's kernels. Each value of them has a curve of its own. What a
table is to its kernel stands with the kernel's curve (`Curve.tables`).
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from magicdec.errors import ConfigError
from magicdec.perfmodel.kernels.base import Array, Columns, Curve, Table
from magicdec.perfmodel.kernels.profile import KERNELS, HardwareProfile
from magicdec.units import MICRO

Mask = npt.NDArray[np.bool_]
HELD_OUT_ONE_IN = 4
MAX_FIT_ROWS = 3000
EAGER = "eager"
VARIANTS = {
    "bf16": "", "bfloat16": "", "vLLM": "", "SGLang_CustomAllReduce_graph": "sglang", "TRTLLM": "trtllm",
    "SGLang_CustomAllReduce_eager": EAGER, "w4a16_mxfp4": "mxfp4",
}  # fmt: skip
"""The tables' names of what profiles call otherwise. Eager kernels are left out: decoding runs captured graphs."""
CURVES: dict[str, type[Curve]] = {table.kind: curve for curve in KERNELS for table in curve.tables}
TABLES: tuple[Table, ...] = tuple(
    sorted((table for curve in KERNELS for table in curve.tables), key=lambda table: -len(table.columns))
)
"""A file is read as the first whose columns it has: the one with most."""


class Group(NamedTuple):
    """Rows that one curve describes: of a device, and of a number format or an engine ("": bf16, vLLM)."""

    device: str
    variant: str

    def name(self, kind: str) -> str:
        return "/".join((self.device, kind, self.variant)).rstrip("/")


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
    names = set(frame.columns)
    table = next((table for table in TABLES if {*table.columns, *table.marks} <= names), None)
    if table is None or not {"device", "latency_us"} <= names:
        wanted = "; ".join(", ".join(("device", *table.columns, "latency_us")) for table in TABLES)
        raise ConfigError(f"{path} has the columns {', '.join(map(str, frame.columns))}; known tables have {wanted}")
    try:
        frame = table.select(frame)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
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
    for flag, (name, text) in table.flags.items():
        numbers[flag] = np.where(frame[name].astype(str) == text, 1.0, 0.0)
    devices = frame["device"].astype(str).to_numpy()
    if table.variant in frame:
        variants = frame[table.variant].fillna("").astype(str).map(lambda name: VARIANTS.get(name, name)).to_numpy()
    else:
        variants = np.full(devices.size, "", dtype=object)
    groups = {}
    for key in dict.fromkeys(zip(devices, variants, strict=True)):
        if key[1] != EAGER:
            rows = select(numbers, (devices == key[0]) & (variants == key[1]))
            groups[Group(*key)] = table.select_group(rows)
    return table, groups


def row_seconds(table: Table, hw: HardwareProfile, rows: Columns, variant: str = "") -> Array:
    """Seconds of each row. Operands that fit stay in the L2, as where kernels are timed in a loop."""
    curve = CURVES[table.kind].of(hw, variant)
    return curve.table_seconds(hw, table.work(rows, variant))


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
    return CURVES[table.kind].of(hw, variant)


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
    kind = CURVES[table.kind]
    work, is_own = table.work(rows, variant), kind.own(hw, variant) is not None
    curve = kind.of(hw, variant).refitted(hw, work, weighted, fitted_on=fitted_on, is_own=is_own)
    fitted: HardwareProfile = curve.placed(hw, variant)
    return fitted
