"""How right the shipped hardware profiles are on tables of timed kernels, and how well their form predicts new shapes.

A table is a CSV file (gzip or not) with a column `device`, `latency_us`, and

    GEMM               m, n, k                                                    bf16 (m,k) × (k,n)
    decode attention   batch_size, num_heads, num_kv_heads, head_dim, kv_len      bf16 KV, one query token per sequence
    all-reduce         tp_size, message_bytes                                     payload per rank, in a captured graph

Groups are device × table. `mape` is the shipped profile's error on the rows that matter (`counted`): GEMM with m ≤ 1024
and n, k ≥ 512; attention with kv_len ≥ 1024 and batch ≥ 8; all-reduce up to 16 MB. `mape_held_out` refits the same form
on three quarters of the file's shapes and scores it on the others; `mape_extrapolated` refits on m ≤ 256 (kv_len ≤ 16k)
and scores it on the counted rows above; `mape_8_from_2` refits on two ranks and scores it on more.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from magicdec.errors import ConfigError
from magicdec.perfmodel.arrays import Array
from magicdec.perfmodel.collectives import all_reduce_time
from magicdec.perfmodel.curve_fit import fit_allreduce, fit_attention, fit_gemm, mean_absolute_error
from magicdec.perfmodel.roofline import attention_time, gemm_time
from magicdec.specs.hardware import HardwareProfile, load_hardware
from magicdec.units import MIB, MICRO

TableKind = Literal["gemm", "attention", "allreduce"]
Mask = npt.NDArray[np.bool_]
Columns = Mapping[str, Array]
HELD_OUT_ONE_IN = 4
MAX_FIT_ROWS = 3000
MAX_ALL_REDUCE_BYTES = 16 * MIB


@dataclass(frozen=True, kw_only=True)
class Table:
    """What is known of one kind of table."""

    kind: TableKind
    columns: tuple[str, ...]
    shape: tuple[str, ...]
    """Columns whose values make a shape; held out together."""
    counted: Callable[[Columns], Mask]
    is_near: Callable[[Columns], Mask]
    """Rows that the extrapolation is fitted on."""
    other_weight: float
    """Weight in the fit of rows that do not count."""


TABLES = (
    Table(
        kind="gemm",
        columns=("m", "n", "k"),
        shape=("n", "k"),
        counted=lambda rows: (rows["m"] <= 1024) & (rows["n"] >= 512) & (rows["k"] >= 512),
        is_near=lambda rows: rows["m"] <= 256,
        other_weight=0.3,
    ),
    Table(
        kind="attention",
        columns=("batch_size", "num_heads", "num_kv_heads", "head_dim", "kv_len"),
        shape=("num_heads", "num_kv_heads", "head_dim"),
        counted=lambda rows: (rows["kv_len"] >= 1024) & (rows["batch_size"] >= 8),
        is_near=lambda rows: rows["kv_len"] <= 16384,
        other_weight=0.35,
    ),
    Table(
        kind="allreduce",
        columns=("tp_size", "message_bytes"),
        shape=("message_bytes",),
        counted=lambda rows: rows["message_bytes"] <= MAX_ALL_REDUCE_BYTES,
        is_near=lambda rows: rows["tp_size"] <= 2,
        other_weight=0.2,
    ),
)


def table_of(kind: TableKind) -> Table:
    return next(table for table in TABLES if table.kind == kind)


def read_table(path: Path) -> tuple[Table, dict[str, dict[str, Array]]]:
    """The rows of a file by device: its columns as floats, and `time_s`.

    Raises ConfigError for a file that is none of the tables, or a value that is not a positive number (with its line).
    """
    import pandas as pd

    try:
        frame = pd.read_csv(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} is not a readable CSV file: {str(error).splitlines()[0]}") from error
    table = next((table for table in TABLES if set(table.columns) <= set(frame.columns)), None)
    if table is None or not {"device", "latency_us"} <= set(frame.columns):
        wanted = "; ".join(", ".join(("device", *table.columns, "latency_us")) for table in TABLES)
        raise ConfigError(f"{path} has the columns {', '.join(map(str, frame.columns))}; known tables have {wanted}")
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
    devices = frame["device"].astype(str).to_numpy()
    return table, {
        device: {name: values[devices == device] for name, values in numbers.items()}
        for device in dict.fromkeys(devices)
    }


def predict(table: Table, hw: HardwareProfile, rows: Columns) -> Array:
    """Seconds of each row. Operands that fit stay in the L2, as where kernels are timed in a loop."""
    if table.kind == "gemm":
        return gemm_time(hw, m=rows["m"], n=rows["n"], k=rows["k"], working_set_bytes="own").time_s
    if table.kind == "attention":
        return attention_time(
            hw, batch=rows["batch_size"], query_len=1, kv_len=rows["kv_len"], num_heads=rows["num_heads"],
            num_kv_heads=rows["num_kv_heads"], head_dim=rows["head_dim"], working_set_bytes="own",
        ).time_s  # fmt: skip
    return all_reduce_time(hw, message_bytes=rows["message_bytes"], tp_size=rows["tp_size"])


def select(rows: Columns, mask: Mask) -> dict[str, Array]:
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


def refit(
    table: Table, hw: HardwareProfile, rows: Columns, *, fitted_on: str = "", max_rows: int | None = MAX_FIT_ROWS
) -> HardwareProfile:
    """The profile with this table's curve fitted to `rows` (evenly thinned to `max_rows`)."""
    length = rows["time_s"].size
    if max_rows is not None and length > max_rows:
        chosen = np.zeros(length, dtype=np.bool_)
        chosen[np.random.default_rng(0).choice(length, size=max_rows, replace=False)] = True
        rows = select(rows, chosen)
    weighted: dict[str, Any] = {**rows, "weight": np.where(table.counted(rows), 1.0, table.other_weight)}
    if table.kind == "gemm":
        return msgspec.structs.replace(hw, gemm=fit_gemm(weighted, hw, fitted_on=fitted_on))
    if table.kind == "attention":
        known = hw.attention_curve()
        curve = fit_attention(weighted, hw, splits=known.splits, library=known.library, fitted_on=fitted_on)
        return msgspec.structs.replace(hw, attention=curve)
    library = hw.allreduce_curve().library
    allreduce = fit_allreduce(weighted, hw, library=library, fitted_on=fitted_on, start=hw.allreduce)
    return msgspec.structs.replace(hw, allreduce=allreduce)


def refit_error(table: Table, hw: HardwareProfile, rows: Columns, train: Mask, test: Mask) -> float | None:
    """Error on the counted `test` rows of the form fitted to `train`; None with too few rows of either."""
    test = test & table.counted(rows)
    if np.count_nonzero(train) < 3 * 12 // (2 if table.kind == "allreduce" else 1) or not test.any():
        return None
    fitted = refit(table, hw, select(rows, train))
    wanted = select(rows, test)
    return mean_absolute_error(predict(table, fitted, wanted), wanted["time_s"])


def extrapolation_error(table: Table, hw: HardwareProfile, rows: Columns) -> float | None:
    """Error on the counted rows above what the refit saw; None where the file does not reach both sides."""
    near = table.is_near(rows)
    if hw.allreduce is not None:  # two ranks do not show what more do: nothing of it may stay
        hw = msgspec.structs.replace(hw, allreduce=hw.allreduce.unfitted())
    return refit_error(table, hw, rows, near, ~near)


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def validate_group(table: Table, device: str, rows: Columns, *, with_refit: bool) -> dict[str, Any]:
    """One device × table: errors of the shipped profile and, if asked, of refits of its form."""
    hw = load_hardware(device)
    fits = {
        "gemm": hw.gemm_curve().fit, "attention": hw.attention_curve().fit, "allreduce": hw.allreduce_curve().fit
    }  # fmt: skip
    fit = fits[table.kind]
    counted = table.counted(rows)
    predicted, measured = predict(table, hw, rows), rows["time_s"]
    group: dict[str, Any] = {
        "name": f"{device}/{table.kind}",
        "rows": int(np.count_nonzero(counted)),
        "rows_all": int(measured.size),
        "mape": _number(mean_absolute_error(predicted[counted], measured[counted])),
        "mape_all": _number(mean_absolute_error(predicted, measured)),
        "bias": _number(float(np.median(predicted[counted] / measured[counted] - 1.0)) if counted.any() else None),
        "num_parameters": fit.num_parameters,
        "fitted_on": fit.fitted_on,
        "borrowed_from": fit.borrowed_from,
        "mape_shipped_held_out": fit.error,
        "mape_held_out": None,
        "mape_extrapolated": None,
    }
    if with_refit:
        test = held_out(table, rows)
        group["mape_held_out"] = refit_error(table, hw, rows, ~test, test)
        name = "mape_8_from_2" if table.kind == "allreduce" else "mape_extrapolated"
        group[name] = extrapolation_error(table, hw, rows)
    return group


def validate_kernels(paths: Sequence[Path], *, with_refit: bool = True) -> dict[str, Any]:
    """Errors of the shipped profiles on the files' rows: {"groups": [{"name": "device/table", "rows", "mape", …}]}.

    Rows of a device that the catalog does not have make a group without numbers that says so (`refused`).

    Raises ConfigError for an unreadable file, and when the catalog has no device of any file.
    """
    groups: list[dict[str, Any]] = []
    refused: list[str] = []
    for path in paths:
        table, by_device = read_table(Path(path))
        for device, rows in by_device.items():
            try:
                load_hardware(device)
            except ConfigError as error:
                refused.append(f"{path}: {error}")
                unknown = {"mape": None, "mape_all": None, "refused": str(error)}
                groups.append({"name": f"{device}/{table.kind}", "rows": int(rows["time_s"].size), **unknown})
                continue
            groups.append(validate_group(table, device, rows, with_refit=with_refit))
    if len(refused) == len(groups):
        raise ConfigError(refused[0])
    return {"groups": groups}
