"""Fits a kernel's constants to timings: published tables or micro-benchmarks of this machine.

Each fit minimises Σ w·ρ(ln(predicted/measured)) with ρ = soft L1, so that outliers count little and what is minimised
is near the mean relative error. Weak priors (`Free.spread`, at the curve's generic values) hold constants that the rows
do not determine: without them, a fit to few tokens knows nothing of the compute ceiling. Several starts guard against
local minima. At most 12 constants per table.

Rows are mappings of column names to arrays, one entry per timing; `time_s` is the median time of one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.errors import ConfigError
from magicdec.fitting import Free, solve
from magicdec.specs.device import LIMITS, Spec

Rows = Mapping[str, Any]
Constants = TypeVar("Constants", bound=msgspec.Struct)
MAX_PARAMETERS = 12
LOSS_SCALE = 0.05
PRIOR_WEIGHT = 0.006
"""Weight of one prior per square root of a row: 0.6 % of a residual, negligible wherever rows speak."""
DEFAULT_RELATIVE_ERROR = 0.3


class Fit(Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where a curve comes from and how right it is."""

    fitted_on: str = ""
    """Source of the measurements; empty for a generic curve."""
    num_rows: int = 0
    num_parameters: int = 0
    error: float | None = None
    """Mean absolute relative error on shapes left out of the fit, over the rows that matter."""
    relative_error: float = DEFAULT_RELATIVE_ERROR
    """One standard deviation of a prediction, relative; intervals are built from it."""
    borrowed_from: str = ""
    """The device that the curve was measured on, when it was another one."""


Parameters = Mapping[str, Free]


def with_priors(parameters: Parameters, generic: msgspec.Struct) -> dict[str, Free]:
    """The parameters, with the generic curve's values where they have no prior of their own."""
    return {
        name: replace(free, prior=getattr(generic, name)) if free.prior is None else free
        for name, free in parameters.items()
    }


def minimise(
    start: Constants,
    parameters: Parameters,
    predict: Callable[[Constants], Array],
    rows: Rows,
    *,
    starts: Sequence[Mapping[str, float]] = ({},),
) -> tuple[Constants, float]:
    """The curve with `parameters` fitted to the rows' `time_s` (and `weight`), and its loss; other fields stay as in
    `start`.

    Raises ConfigError when there are too few rows, or times that are not positive numbers.
    """
    (seconds,) = columns(rows, ("time_s",))
    weights = np.asarray(rows["weight"], dtype=np.float64) if "weight" in rows else np.ones(seconds.size)
    parameters = with_priors(parameters, type(start)())
    if len(parameters) > MAX_PARAMETERS:
        raise ValueError(f"{len(parameters)} free parameters, at most {MAX_PARAMETERS}")
    if seconds.size < 3 or not np.all(np.isfinite(seconds) & (seconds > 0)):
        raise ConfigError(f"cannot fit {type(start).__name__}: needs at least 3 rows with positive times")
    log_seconds = np.log(seconds)
    limits = {name: LIMITS.get(name, (0.0, 1.0 if name.endswith("_s") else 1e18)) for name in parameters}
    codes = [
        (each.encode(limits[name][0]), each.encode(limits[name][1]), each.center, each.spread)
        for name, each in parameters.items()
    ]
    low, high, center, spread = np.array(codes).T
    solution = solve(
        parameters,
        lambda values: (
            weights * (np.log(np.maximum(predict(msgspec.structs.replace(start, **values)), 1e-12)) - log_seconds)
        ),
        pull=PRIOR_WEIGHT * math.sqrt(seconds.size),
        starts=starts,
        bounds=(np.maximum(low, center - 8 * spread), np.minimum(high, center + 8 * spread)),
        loss="soft_l1",
        f_scale=LOSS_SCALE,
        max_nfev=120,
    )
    return msgspec.structs.replace(start, **solution.values), solution.cost


def columns(rows: Rows, names: Sequence[str], **defaults: float) -> list[Array]:
    """Float arrays of the named columns; ConfigError for a missing one."""
    arrays = []
    length = len(np.asarray(rows["time_s"])) if "time_s" in rows else 0
    for name in names:
        if name not in rows and name not in defaults:
            raise ConfigError(f"rows to fit lack the column '{name}' (they have {', '.join(rows)})")
        arrays.append(np.asarray(rows.get(name, np.full(length, defaults.get(name, 0.0))), dtype=np.float64))
    return arrays


def with_fit(curve: Constants, num_parameters: int, rows: Rows, predicted: Array, fitted_on: str) -> Constants:
    """The curve with a note of its fit and the spread of its errors."""
    (seconds,) = columns(rows, ("time_s",))
    rms = float(np.sqrt(np.mean(np.log(predicted / seconds) ** 2)))
    fit = Fit(
        fitted_on=fitted_on,
        num_rows=seconds.size,
        num_parameters=num_parameters,
        relative_error=min(max(rms, 0.02), 10.0),
    )
    return msgspec.structs.replace(curve, fit=fit)


def that_matter(parameters: Parameters, curve: Constants, predict: Callable[[Constants], Array]) -> dict[str, Free]:
    """The parameters that some row's prediction depends on."""
    known = with_priors(parameters, type(curve)())
    generic = msgspec.structs.replace(curve, **{name: free.prior for name, free in known.items()})
    usual = predict(generic)
    return {
        name: free
        for name, free in known.items()
        if np.any(predict(msgspec.structs.replace(generic, **{name: free.decode(free.center + 0.4)})) != usual)
    }
