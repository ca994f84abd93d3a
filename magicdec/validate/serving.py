"""How right predictions for servers are: measured rows in groups by source, hardware, engine and what is in the figure.

Each group has `rows`, `mape` (mean absolute relative error), `bias` (median error), `p90` (its 90th percentile) and
`coverage` (share of rows within their 90 % interval); by tp too. Rows whose note says that requests queued, or that
they lie below the bytes to be read, make groups of their own. `left_out` adds each error with the row's device, tp or
model left out of the engine's fit (fitted on the other rows of the call).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from magicdec.perfmodel.arrays import Array
from magicdec.specs.engine import load_engine
from magicdec.validate.serving_fit import LEFT_OUT, Z_90, left_out_predictions
from magicdec.validate.serving_rows import ServingRow, predict_rows, read_serving


def group_name(row: ServingRow) -> str:
    """source / hardware / engine / what is in the figure."""
    if row.is_left_out:
        what = "queues or below the bytes"
    elif row.metric == "speedup":
        what = "speculative"
    else:
        what = "decoding alone" if row.is_isolated else "prefill inside"
    return "/".join((row.source, row.hardware, row.engine, what))


def relative_errors(rows: Sequence[ServingRow]) -> Array:
    """One standard deviation of each prediction, relative."""
    errors = []
    for row in rows:
        engine = load_engine(row.engine)
        is_speedup = row.metric == "speedup"
        errors.append(engine.speedup_relative_error if is_speedup else engine.error_for(row.hardware, row.model))
    return np.array(errors)


def _summary(name: str, indices: Sequence[int], error: Array, deviation: Array) -> dict[str, Any]:
    chosen = error[list(indices)]
    inside = np.abs(np.log1p(np.maximum(chosen, -0.999))) <= Z_90 * deviation[list(indices)]
    return {
        "name": name,
        "rows": len(indices),
        "mape": float(np.mean(np.abs(chosen))),
        "bias": float(np.median(chosen)),
        "p90": float(np.quantile(np.abs(chosen), 0.9)),
        "coverage": float(np.mean(inside)),
    }


def validate_serving(paths: Sequence[Path], *, left_out: bool = False) -> dict[str, Any]:
    """{"groups": […], "refused": [one line per row that cannot be judged]}.

    Raises ConfigError for a file that cannot be read or lacks a column, and when no row can be judged.
    """
    rows, refused = read_serving(paths)
    measured = np.array([row.measured for row in rows])
    error = predict_rows(rows) / measured - 1.0
    deviation = relative_errors(rows)
    without = _without(rows, measured) if left_out else {}
    members: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        name = group_name(row)
        members[name].append(index)
        members[f"{name}/tp {row.tp_size}"].append(index)
        members[f"all/{name.rsplit('/', 1)[1]}"].append(index)
    groups = []
    for name in sorted(members):
        group = _summary(name, members[name], error, deviation)
        for kind, other in without.items():
            known = other[members[name]]
            known = known[np.isfinite(known)]
            group[f"mape_other_{kind}"] = float(np.mean(np.abs(known))) if known.size else None
        groups.append(group)
    return {"groups": groups, "refused": refused}


def _without(rows: Sequence[ServingRow], measured: Array) -> dict[str, Array]:
    """Errors with the row's device, tp or model left out of the fit."""
    errors: dict[str, Array] = {}
    for kind in LEFT_OUT:
        errors[kind] = np.full(len(rows), np.nan)
        for engine in {row.engine for row in rows}:
            if not load_engine(engine).fitted_devices:
                continue
            mine = [index for index, row in enumerate(rows) if row.engine == engine]
            predicted = left_out_predictions([rows[index] for index in mine], engine, kind)
            errors[kind][mine] = predicted / measured[mine] - 1.0
    return errors
