"""Compares the shipped hardware profiles with tables of timed kernels, and tests how well their
form predicts new shapes.

Groups are device × table (× number format or engine). evidence/kernel_tables.py reads the
tables. The figures of a group:

- `mape`: error of the shipped profile on the rows that matter (`counted`): GEMM with m ≤ 1024 and
  n, k ≥ 512; decode attention with kv_len ≥ 1024 and batch ≥ 8; prefill attention of at least 512
  tokens with heads of at most 128; all-reduce up to 16 MB.
- `mape_held_out`: error on a quarter of the file's shapes of the same form refitted on the others;
  `median_held_out` and `p90_held_out` are the median and the 90th percentile of these errors.
- `mape_extrapolated`: error on the larger counted rows of a refit on m ≤ 256 (kv_len ≤ 16k,
  prompts ≤ 4k).
- `mape_8_from_2`: error on more ranks of a refit on two.
- `mape_nearest_device`, `mape_farthest_device` (recurrences, indexers, windows): errors of the best
  and the worst shipped curve among the file's other devices, as a device without a table would
  borrow it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from evidence.kernel_tables import (
    Group,
    Mask,
    curve_of,
    held_out,
    read_table,
    refit,
    row_seconds,
    select,
)
from magicdec.errors import ConfigError
from magicdec.perfmodel.kernels.base import Columns, KernelTable
from magicdec.perfmodel.kernels.profile import HardwareProfile, load_hardware
from magicdec.schema.comparison import ErrorSummary


def refit_errors(
    table: KernelTable,
    hw: HardwareProfile,
    rows: Columns,
    train: Mask,
    test: Mask,
    variant: str,
) -> ErrorSummary | None:
    """Errors on the counted `test` rows of the form fitted to `train`. None: too few rows of
    either."""
    test = test & table.counted(rows)
    if np.count_nonzero(train) < table.least_rows or not test.any():
        return None
    refitted = refit(table, hw, select(rows, train), variant=variant)
    return _errors(table, refitted, select(rows, test), variant)


def _errors(
    table: KernelTable, hw: HardwareProfile, rows: Columns, variant: str
) -> ErrorSummary | None:
    """Errors of a profile. None: no rows."""
    if not rows["time_s"].size:
        return None
    predicted_s = row_seconds(table, hw, rows, variant)
    return ErrorSummary.of(predicted_s / rows["time_s"] - 1.0)


def extrapolation_error(
    table: KernelTable,
    hw: HardwareProfile,
    rows: Columns,
    variant: str,
) -> float | None:
    """Error on the counted rows beyond the range of the refit. None: the file lacks either side."""
    near = table.is_near(rows)
    # Two ranks show nothing about more, so no constant fitted on more may stay.
    unfitted = {name: curve.unfitted() for name, curve in hw.allreduce_engines.items()}
    if hw.allreduce is None:
        allreduce = None
    else:
        allreduce = hw.allreduce.unfitted()
    bare = msgspec.structs.replace(hw, allreduce_engines=unfitted, allreduce=allreduce)
    beyond = refit_errors(table, bare, rows, near, ~near, variant)
    if beyond:
        return beyond.mape
    return None


def _validate_group(
    table: KernelTable, key: Group, rows: Columns, *, with_refit: bool
) -> dict[str, Any]:
    """One device × table × variant: errors of the shipped profile and, if asked, of refits of its
    form.
    """
    hw = load_hardware(key.device)
    fit = curve_of(table, hw, key.variant).fit
    is_counted = table.counted(rows)
    errors = _errors(table, hw, select(rows, is_counted), key.variant)
    errors_all = _errors(table, hw, rows, key.variant)
    group: dict[str, Any] = {
        "name": key.name(table.kind),
        "rows": int(np.count_nonzero(is_counted)),
        "rows_all": int(is_counted.size),
        "mape": None,
        "mape_all": None,
        "bias": None,
        "num_parameters": fit.num_parameters,
        "fitted_on": fit.fitted_on,
        "borrowed_from": fit.borrowed_from,
        "mape_shipped_held_out": fit.error,
        "mape_held_out": None,
        "median_held_out": None,
        "p90_held_out": None,
        "mape_extrapolated": None,
    }
    if errors:
        group |= {"mape": errors.mape, "bias": errors.bias}
    if errors_all:
        group["mape_all"] = errors_all.mape
    if with_refit:
        test = held_out(table, rows)
        held = refit_errors(table, hw, rows, ~test, test, key.variant)
        if held:
            group["mape_held_out"] = held.mape
            group["median_held_out"] = held.median_error
            group["p90_held_out"] = held.p90_error
        group[table.near_name] = extrapolation_error(table, hw, rows, key.variant)
    return group


def _errors_when_borrowed(
    table: KernelTable,
    key: Group,
    rows: Columns,
    devices: Iterable[Group],
) -> dict[str, float | None]:
    """Errors of the curves that a device without this table could borrow from the others."""
    variant = key.variant
    hw = load_hardware(key.device)
    counted = select(rows, table.counted(rows))
    errors = []
    for other in devices:
        if other == key or other.variant != variant:
            continue
        own = curve_of(table, load_hardware(other.device), variant)
        summary = _errors(table, own.placed(hw, variant), counted, variant)
        if summary is not None:
            errors.append(summary.mape)
    if not errors:
        return {"mape_nearest_device": None, "mape_farthest_device": None}
    return {"mape_nearest_device": min(errors), "mape_farthest_device": max(errors)}


def validate_kernels(
    paths: Sequence[Path], *, with_refit: bool = True
) -> dict[str, Any]:
    """Errors of the shipped profiles on the files' rows: {"groups": [{"name": "device/table",
    "rows", "mape", …}]}.

    Rows of a device that the catalog lacks make a group without numbers, with the reason under
    `refused`.

    Raises ConfigError for an unreadable file, and when the catalog has no device of any file.
    """
    groups: list[dict[str, Any]] = []
    refused: list[str] = []
    for path in paths:
        table, by_group = read_table(Path(path))
        for key, rows in by_group.items():
            try:
                load_hardware(key.device)
            except ConfigError as error:
                refused.append(f"{path}: {error}")
                groups.append(
                    {
                        "name": key.name(table.kind),
                        "rows": int(rows["time_s"].size),
                        "mape": None,
                        "mape_all": None,
                        "refused": str(error),
                    }
                )
                continue
            group = _validate_group(table, key, rows, with_refit=with_refit)
            if table.is_borrowed:
                group |= _errors_when_borrowed(table, key, rows, by_group)
            groups.append(group)
    if len(refused) == len(groups):
        raise ConfigError(refused[0])
    return {"groups": groups}
