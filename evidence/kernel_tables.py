"""Reads tables of timed kernels, and fits the curves of a hardware profile to them."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from magicdec.counts import Array
from magicdec.errors import ConfigError
from magicdec.perfmodel.kernels.base import Columns, FittedCurve, KernelTable
from magicdec.perfmodel.kernels.profile import KERNELS, HardwareProfile
from magicdec.units import MICRO

if TYPE_CHECKING:
    import pandas as pd

Mask = npt.NDArray[np.bool_]
HELD_OUT_ONE_IN = 4
MAX_FIT_ROWS = 3000
EAGER = "eager"
VARIANTS = {
    "bf16": "", "bfloat16": "", "vLLM": "", "SGLang_CustomAllReduce_graph": "sglang", "TRTLLM": "trtllm",
    "SGLang_CustomAllReduce_eager": EAGER, "w4a16_mxfp4": "mxfp4", "NCCL": "nccl",
}  # fmt: skip
"""The tables' names of what profiles call otherwise. Eager kernels are left out: decoding runs
captured graphs.
"""
CURVES: dict[str, type[FittedCurve]] = {}
"""The curve that is fitted to each kind of table."""
for kernel in KERNELS:
    if issubclass(kernel, FittedCurve):
        CURVES |= {table.kind: kernel for table in kernel.tables}


TABLES = sorted(
    (table for kernel in KERNELS for table in kernel.tables),
    key=lambda table: -len(table.columns),
)
"""Tables by the number of their columns. A file is read as the first whose columns it has."""


class Group(NamedTuple):
    """Rows that one curve describes: of a device, and of a number format or an engine ("": bf16,
    vLLM).
    """

    device: str
    variant: str

    def name(self, kind: str) -> str:
        return "/".join((self.device, kind, self.variant)).rstrip("/")


def read_table(path: Path) -> tuple[KernelTable, dict[Group, dict[str, Array]]]:
    """The rows of a file by device and variant: its columns as floats, and `time_s`.

    Raises ConfigError for a file that is none of the tables, or a value that is not a positive
    number (with its line).
    """
    frame = _read_frame(path)
    table = _table_of(frame, path)
    try:
        frame = table.select(frame)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    numbers: dict[str, Array] = {}
    for name in (*table.columns, "latency_us"):
        numbers[name] = _positive(frame, name, path)
    numbers["time_s"] = numbers.pop("latency_us") * MICRO
    for flag, (name, text) in table.flags.items():
        numbers[flag] = np.where(frame[name].astype(str) == text, 1.0, 0.0)
    devices = frame["device"].astype(str).to_numpy()
    variants = np.full(devices.size, "", dtype=object)
    if table.variant in frame:
        names = frame[table.variant].fillna("").astype(str)
        variants = names.map(lambda name: VARIANTS.get(name, name)).to_numpy()
    groups = {}
    for key in dict.fromkeys(zip(devices, variants, strict=True)):
        group = Group(*key)
        if group.variant != EAGER:
            rows = select(
                numbers, (devices == group.device) & (variants == group.variant)
            )
            groups[group] = table.select_group(rows)
    return table, groups


def _read_frame(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        return pd.read_csv(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{path} is not a readable CSV file: {str(error).splitlines()[0]}"
        ) from error


def _table_of(frame: pd.DataFrame, path: Path) -> KernelTable:
    """The first table whose columns a file has."""
    names = set(frame.columns)
    if {"device", "latency_us"} <= names:
        for table in TABLES:
            if {*table.columns, *table.marks} <= names:
                return table
    known = [", ".join(("device", *table.columns, "latency_us")) for table in TABLES]
    raise ConfigError(
        f"{path} has the columns {', '.join(map(str, frame.columns))}; known tables have "
        f"{'; '.join(known)}"
    )


def _positive(frame: pd.DataFrame, name: str, path: Path) -> Array:
    import pandas as pd

    values: Array = pd.to_numeric(frame[name], errors="coerce").to_numpy(
        dtype=np.float64
    )
    is_bad = ~(np.isfinite(values) & (values > 0))
    if is_bad.any():
        line = int(np.argmax(is_bad))
        raise ConfigError(
            f"{path}: line {line + 2}: '{name}' must be a positive number, not "
            f"{frame[name].iloc[line]}"
        )
    return values


def row_seconds(
    table: KernelTable, hw: HardwareProfile, rows: Columns, variant: str = ""
) -> Array:
    """Seconds of each row. Operands that fit stay in the L2, as where kernels are timed in a
    loop."""
    curve = CURVES[table.kind].of(hw, variant)
    return curve.table_seconds(hw, table.work(rows, variant))


def select(rows: Columns, mask: npt.NDArray[Any]) -> dict[str, Array]:
    return {name: values[mask] for name, values in rows.items()}


def held_out(table: KernelTable, rows: Columns) -> Mask:
    """A quarter of the shapes, chosen by a hash of the shape, the same on every machine."""
    shapes = np.stack([rows[name] for name in table.shape], axis=1)
    unique, inverse = np.unique(shapes, axis=0, return_inverse=True)
    hashes = np.array([_hash(shape) % HELD_OUT_ONE_IN for shape in unique])
    mask: Mask = (hashes == 0)[inverse.reshape(-1)]
    return mask


def _hash(values: Sequence[float]) -> int:
    text = ",".join(str(int(value)) for value in values)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return int(digest, 16)


def curve_of(table: KernelTable, hw: HardwareProfile, variant: str = "") -> Any:
    """The curve that predicts the table's rows of this variant."""
    return CURVES[table.kind].of(hw, variant)


def refit(
    table: KernelTable,
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
        drawn = np.random.default_rng(0).choice(length, size=max_rows, replace=False)
        is_drawn = np.zeros(length, dtype=np.bool_)
        is_drawn[drawn] = True
        rows = select(rows, is_drawn)
    weight = np.where(table.counted(rows), 1.0, table.other_weight)
    weighted: dict[str, Any] = {**rows, "weight": weight}
    kind = CURVES[table.kind]
    work = table.work(rows, variant)
    is_own = kind.own(hw, variant) is not None
    curve = kind.of(hw, variant).refitted(
        hw, work, weighted, fitted_on=fitted_on, is_own=is_own
    )
    if table.kind != "window":
        curve = curve.over(work)
    fitted: HardwareProfile = curve.placed(hw, variant)
    return fitted
