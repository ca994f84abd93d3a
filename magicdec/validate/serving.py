"""How right predictions for servers are: measured rows in groups by source, hardware, engine and what is in the figure.

Each group has `rows`, `mape` (mean absolute relative error), `bias` (median error), `p90` (its 90th percentile) and
`coverage` (share of rows within their 90 % interval); by tp too. Rows whose note says that requests queued, or that
they lie below the bytes to be read, make groups of their own. `left_out` adds each error with the row's device, tp or
model left out of the engines' fits (fitted on the other rows of the call), and the coverage of the intervals that the
errors of other devices (tps, models), left out in their turn, give it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from magicdec.comparison import ErrorSummary
from magicdec.counts import Array
from magicdec.perfmodel.intervals import step_errors
from magicdec.specs.engine import load_engine
from magicdec.validate.csv_rows import read_rows
from magicdec.validate.serving_fit import LEFT_OUT, left_out_predictions, nested_deviations
from magicdec.validate.serving_rows import ServingRow, alike, predict_rows, row_steps


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
    """One standard deviation of each prediction, relative: that of a plan's intervals."""
    errors = np.zeros(len(rows))
    for indices in alike(rows).values():
        some = [rows[index] for index in indices]
        of_speedup, of_time = step_errors(*row_steps(some, load_engine(some[0].engine)))
        errors[indices] = of_speedup if some[0].metric == "speedup" else of_time
    return errors


def validate_serving(paths: Sequence[Path], *, left_out: bool = False) -> dict[str, Any]:
    """{"groups": […], "refused": [one line per row that cannot be judged]}.

    Raises ConfigError for a file that cannot be read or lacks a column, and when no row can be judged.
    """
    rows, refused = read_rows(paths, ServingRow)
    measured = np.array([row.measured for row in rows])
    error = predict_rows(rows) / measured - 1.0
    deviation = relative_errors(rows)
    without = _without(rows) if left_out else {}
    members: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        name = group_name(row)
        members[name].append(index)
        members[f"{name}/tp {row.tp_size}"].append(index)
        members[f"all/{name.rsplit('/', 1)[1]}"].append(index)
    groups = []
    for name in sorted(members):
        chosen = members[name]
        group: dict[str, Any] = {"name": name, **ErrorSummary.of(error[chosen], deviation[chosen]).figures()}
        for kind, (log_error, width) in without.items():
            known = [index for index in members[name] if np.isfinite(log_error[index])]
            errors = ErrorSummary.of(np.expm1(log_error[known]), width[known]) if known else None
            group[f"mape_other_{kind}"] = errors.mape if errors else None
            group[f"coverage_other_{kind}"] = errors.coverage if errors else None
        groups.append(group)
    return {"groups": groups, "refused": refused}


def _without(rows: Sequence[ServingRow]) -> dict[str, tuple[Array, Array]]:
    """Errors (of the logarithm) with the row's device, tp or model left out of the fit, and the standard deviations
    that the rows of other devices (tps, models) give them."""
    bases = {name: load_engine(name) for name in dict.fromkeys(row.engine for row in rows)}
    bases = {name: engine for name, engine in bases.items() if engine.fitted_devices}
    measured = np.array([row.measured for row in rows])
    found: dict[str, tuple[Array, Array]] = {}
    for kind in LEFT_OUT:
        log_error = np.log(left_out_predictions(rows, bases, kind) / measured)
        found[kind] = log_error, nested_deviations(rows, log_error, kind)
    return found
