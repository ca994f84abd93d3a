"""How right the shipped hardware profiles are on tables of timed kernels, and how well their form
predicts new shapes.

Groups are device × table (× number format or engine); perfmodel/kernels/profile.py says what tables
hold. `mape` is the shipped profile's error on the rows that matter (`counted`): GEMM with m ≤ 1024
and n, k ≥ 512; decode attention with kv_len ≥ 1024 and batch ≥ 8; prefill attention of 512 tokens
and more with heads of at most 128; all-reduce up to 16 MB. `mape_held_out` refits the same form on
three quarters of the file's shapes and scores it on the others; `mape_extrapolated` refits on m ≤
256 (kv_len ≤ 16k, prompts ≤ 4k) and scores it on the counted rows above; `mape_8_from_2` refits on
two ranks and scores it on more. `median_held_out` and `p90_held_out` are of the errors behind
`mape_held_out`. `mape_nearest_device` and `mape_farthest_device` (recurrences, indexers, windows)
are by the shipped curves of the file's other devices, the best and the worst of them: what a device
without a table borrows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from magicdec.comparison import ErrorSummary
from magicdec.errors import ConfigError
from magicdec.perfmodel.kernels.base import Columns, Table
from magicdec.perfmodel.kernels.profile import (
    Group,
    HardwareProfile,
    Mask,
    curve_of,
    held_out,
    load_hardware,
    read_table,
    refit,
    row_seconds,
    select,
)


def refit_errors(
    table: Table, hw: HardwareProfile, rows: Columns, train: Mask, test: Mask, variant: str
) -> ErrorSummary | None:
    """Errors on the counted `test` rows of the form fitted to `train`; None with too few rows of
    either.
    """
    test = test & table.counted(rows)
    if np.count_nonzero(train) < table.least_rows or not test.any():
        return None
    return _errors(
        table, refit(table, hw, select(rows, train), variant=variant), select(rows, test), variant
    )


def _errors(table: Table, hw: HardwareProfile, rows: Columns, variant: str) -> ErrorSummary | None:
    """None for no rows."""
    if not rows["time_s"].size:
        return None
    return ErrorSummary.of(row_seconds(table, hw, rows, variant) / rows["time_s"] - 1.0)


def _other_device_errors(
    table: Table, hw: HardwareProfile, rows: Columns, variant: str, others: Sequence[str]
) -> list[float]:
    """Mean error on the counted rows with each other device's shipped curve, in order of the
    errors.
    """
    wanted = select(rows, table.counted(rows))
    profiles = []
    for other in others:
        profiles.append(curve_of(table, load_hardware(other), variant).placed(hw, variant))
    return sorted(
        each.mape for hw in profiles if (each := _errors(table, hw, wanted, variant)) is not None
    )


def extrapolation_error(
    table: Table, hw: HardwareProfile, rows: Columns, variant: str
) -> float | None:
    """Error on the counted rows above what the refit saw; None where the file does not reach both
    sides.
    """
    near = table.is_near(rows)
    # two ranks do not show what more do: nothing of it may stay
    unfitted = {name: curve.unfitted() for name, curve in hw.allreduce_engines.items()}
    if hw.allreduce is None:
        allreduce = None
    else:
        allreduce = hw.allreduce.unfitted()
    bare = msgspec.structs.replace(hw, allreduce_engines=unfitted, allreduce=allreduce)
    found = refit_errors(table, bare, rows, near, ~near, variant)
    if found:
        return found.mape
    return None


def _validate_group(table: Table, key: Group, rows: Columns, *, with_refit: bool) -> dict[str, Any]:
    """One device × table × variant: errors of the shipped profile and, if asked, of refits of its
    form.
    """
    hw = load_hardware(key.device)
    fit = curve_of(table, hw, key.variant).fit
    counted = table.counted(rows)
    errors, errors_all = (
        _errors(table, hw, each, key.variant) for each in (select(rows, counted), rows)
    )
    held: ErrorSummary | None = None
    if with_refit:
        test = held_out(table, rows)
        held = refit_errors(table, hw, rows, ~test, test, key.variant)
    group: dict[str, Any] = {
        "name": key.name(table.kind),
        "rows": int(np.count_nonzero(counted)),
        "rows_all": int(counted.size),
        "mape": errors.mape if errors else None,
        "mape_all": errors_all.mape if errors_all else None,
        "bias": errors.bias if errors else None,
        "num_parameters": fit.num_parameters,
        "fitted_on": fit.fitted_on,
        "borrowed_from": fit.borrowed_from,
        "mape_shipped_held_out": fit.error,
        "mape_held_out": held.mape if held else None,
        "median_held_out": held.median_error if held else None,
        "p90_held_out": held.p90_error if held else None,
        "mape_extrapolated": None,
    }
    if with_refit:
        group[table.near_name] = extrapolation_error(table, hw, rows, key.variant)
    return group


def validate_kernels(paths: Sequence[Path], *, with_refit: bool = True) -> dict[str, Any]:
    """Errors of the shipped profiles on the files' rows: {"groups": [{"name": "device/table",
    "rows", "mape", …}]}.

    Rows of a device that the catalog does not have make a group without numbers that says so
    (`refused`).

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
                unknown = {"mape": None, "mape_all": None, "refused": str(error)}
                groups.append(
                    {"name": key.name(table.kind), "rows": int(rows["time_s"].size), **unknown}
                )
                continue
            groups.append(_validate_group(table, key, rows, with_refit=with_refit))
            if table.is_borrowed:
                others = []
                for each in by_group:
                    if each != key and each.variant == key.variant:
                        others.append(each.device)
                of_others = _other_device_errors(
                    table, load_hardware(key.device), rows, key.variant, others
                )
                groups[-1]["mape_nearest_device"] = of_others[0] if of_others else None
                groups[-1]["mape_farthest_device"] = of_others[-1] if of_others else None
    if len(refused) == len(groups):
        raise ConfigError(refused[0])
    return {"groups": groups}
