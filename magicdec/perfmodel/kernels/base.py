"""The base of every kernel: a curve that gives the seconds of some work on a device, and the tables
it is fitted to.

One file per family holds everything known of it. A constant is written once, as a field of its
curve: the default is the generic value, `Free` says that a fit moves it. A work is a NamedTuple of
arrays that broadcast.

    time = overhead + || memory , compute ||_p          memory = bytes / bandwidth,  compute = FLOPs / rate

The p-norm is a roofline with a soft ridge (p → ∞: the maximum). Bandwidth and rate are the
datasheet's times fitted efficiencies. Cache: `working_set` is what is touched between two uses of
the same data: None takes it as unbounded on GPUs (nothing stays, as in a forward pass) and as the
operands themselves on CPUs, "own" as the operands themselves (as where kernels are timed in a
loop). Ignored: clocks that fall under load, alignment, misses in address translation.

A fit minimises Σ w·ρ(ln(predicted/measured)), ρ soft L1, with weak priors (`Free.spread`) for
constants that the rows do not determine. NaN and negative inputs of a work count as 0.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar, get_type_hints

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.errors import ConfigError
from magicdec.fitting import Free, solve
from magicdec.perfmodel.kernels.op import Basis, OpTime, Source
from magicdec.specs.device import LIMITS, Device, Spec

Columns = Mapping[str, Array]
WorkingSet = Any
"""Bytes (an array), "own" or None; see the module's docstring."""
LARGEST_SIZE = 1e15
CACHE_SHARPNESS = 8.0
BORROWED_ERROR_FACTOR = 2.0
BORROWED_ERROR = 0.1
OTHER_GENERATION_ERROR = 0.25
"""Least relative errors of curves of another device: of its generation, as H100 and H200, or B200
and B300, are to each other (0.06 to 0.15 for most kernels), and of another, as L40S is to RTX PRO
6000 (0.12 to 0.27). results/LOG.md has the table."""
Rows = Mapping[str, Any]
Parameters = Mapping[str, Free]
Constants = TypeVar("Constants", bound=msgspec.Struct)
MAX_PARAMETERS = 12
MOST_SPREADS = 8.0
"""Spreads from its prior beyond which a fit does not move a constant."""
LOSS_SCALE = 0.05
PRIOR_WEIGHT = 0.006
"""Weight of one prior per square root of a row: 0.6 % of a residual, negligible wherever rows
speak.
"""
DEFAULT_RELATIVE_ERROR = 0.3
UNMEASURED_ERROR = 0.3
"""Relative error of kernels that no table holds: lightning attention's, Mamba-2's recurrence,
sparse attention over a narrow cache."""


def as_array(value: Any, *, least: float = 0.0) -> Array:
    """Floats with NaN and everything below `least` replaced by it, and huge values cut to a finite
    one.
    """
    # fmax and fmin take the number where the other is NaN
    return np.fmin(np.fmax(np.asarray(value, dtype=np.float64), least), LARGEST_SIZE)


def arrays(*values: Any) -> tuple[Array, ...]:
    """The values as clean arrays of one shape."""
    return np.broadcast_arrays(*(as_array(value) for value in values))


def soft_max(first: Array, second: Array, power: float | Array) -> Array:
    """The p-norm of two ceilings, without overflow; 0 where both are."""
    high = np.maximum(first, second)
    low = np.minimum(first, second)
    ratio = low / np.maximum(high, 1e-300)
    return high * (1.0 + ratio**power) ** (1.0 / power)


def waves(filling: Array, weight: float) -> Array:
    """Time in waves for work that fills the device `filling` times; a part of one wave takes a
    whole one's time.
    """
    return np.where(
        filling <= 1.0, 1.0, filling + weight * (np.ceil(filling) - filling)
    )


WAVES_DEVIATION = 12.0**-0.5
"""Standard deviation of what rounding up to whole waves adds, which is uniform between 0 and 1."""


def mean_waves(filling: Array) -> tuple[Array, Array]:
    """Waves of blocks of unequal length, and their standard deviation: the mean number of whole
    waves over loads of half a wave less to half a wave more. No single block more or less adds a
    wave then; where lengths are equal it does, which the deviation covers.
    """
    deviation = np.where(filling > 0.5, WAVES_DEVIATION, 0.0)
    return np.maximum(filling + 0.5, 1.0), deviation


class KernelTable(msgspec.Struct, frozen=True, kw_only=True):
    """How a file of timed kernels is read: its columns, the work of its rows, and which rows
    count."""

    kind: str
    columns: tuple[str, ...]
    shape: tuple[str, ...]
    """Columns whose values make a shape; held out together."""
    work: Callable[[Columns, str], Any]
    """The work of rows of a variant."""
    counted: Callable[[Columns], Any]
    is_near: Callable[[Columns], Any]
    """Rows that the extrapolation is fitted on."""
    variant: str = "none"
    """The column that names a number format or an engine's kernels; may be missing."""
    near_name: str = "mape_extrapolated"
    """Name of the extrapolation's error."""
    least_rows: int = 36
    """Rows without which no fit is tried."""
    other_weight: float = 0.3
    """Weight in the fit of rows that do not count."""
    marks: tuple[str, ...] = ()
    """Further columns by which the file is recognised."""
    flags: Mapping[str, tuple[str, str]] = msgspec.field(default_factory=dict)
    """Columns that are 1 where another has some text, else 0."""
    select: Callable[[Any], Any] = lambda frame: frame
    """The rows of a file's data frame that are timings of this kernel."""
    select_group: Callable[[dict[str, Array]], dict[str, Array]] = lambda rows: rows
    """The rows of one device and variant that are timings of this kernel."""
    is_borrowed: bool = False
    """Whether devices without a table borrow the curve, so that it is compared with other devices'
    tables.
    """


def borrowed_error(error: float, least: float = BORROWED_ERROR) -> float:
    """The error of a curve that was fitted to another device's or another format's kernel with this
    error.
    """
    return min(10.0, max(least, BORROWED_ERROR_FACTOR * error))


def unmeasured(kernel: str, source: Source = "roofline") -> Basis:
    """The basis of a kernel that no table holds."""
    return Basis(kernel=kernel, source=source, relative_error=UNMEASURED_ERROR)


SETTINGS = ("law", "reread", "is_balanced", "weight_bytes")
"""Fields of works that are an engine's or a table's settings, and no part of a shape."""


def ranges_of(work: Any) -> dict[str, tuple[float, float]]:
    """The least and the greatest of each number of a work."""
    ranges = {}
    for name, value in work._asdict().items():
        if value is None or isinstance(value, str | bool) or name in SETTINGS:
            continue
        numbers = np.asarray(value, dtype=np.float64)
        ranges[name] = (float(np.min(numbers)), float(np.max(numbers)))
    return ranges


class Fit(
    Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
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
    ranges: dict[str, tuple[float, float]] = msgspec.field(default_factory=dict)
    """Least and greatest value of each field of the work that was timed."""


class Curve(
    Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The constants of a kernel's time on a device, by which a profile holds and lends them."""

    key: ClassVar[str]
    """The field of a hardware profile that holds the curve, or one for each variant."""
    variants_key: ClassVar[str] = ""
    """The field that holds curves of further variants, which have the one of `key` where they lack
    their own.
    """
    has_formats: ClassVar[bool] = False
    """Whether variants are number formats."""
    borrowed_errors: ClassVar[tuple[float, float]] = (
        BORROWED_ERROR,
        OTHER_GENERATION_ERROR,
    )
    """Least relative error on another device of the same generation, and of another."""
    tables: ClassVar[tuple[KernelTable, ...]] = ()
    fit: Fit = Fit()
    library: str = "generic"

    @classmethod
    def own(cls, hw: Device, variant: str = "") -> Self | None:
        """The device's curve of this kernel for this very variant (any, where it has none)."""
        key = cls.key
        if variant and cls.variants_key:
            key = cls.variants_key
        held: Any = getattr(hw, key)
        if isinstance(held, dict):
            held = held.get(variant or "bf16")
        curve: Self | None = held
        return curve

    @classmethod
    def known(cls, hw: Device, variant: str = "") -> Self | None:
        """The device's curve of this kernel for a variant, or the one that stands for it; None
        where neither was measured."""
        own = cls.own(hw, variant)
        if own is None and cls.variants_key:
            return cls.own(hw)
        return own

    @classmethod
    def variants(cls, hw: Device) -> dict[str, Self]:
        """The device's curves of this kernel by variant."""
        held = getattr(hw, cls.variants_key or cls.key)
        if isinstance(held, dict):
            return held
        if held is not None:
            return {"": held}
        return {}

    @classmethod
    def of(cls, hw: Device, variant: str = "") -> Self:
        """The device's curve of this kernel for a variant, or the generic one."""
        return cls.known(hw, variant) or cls()

    @classmethod
    def basis(cls, hw: Device, kernel: str, work: Any, variant: str = "") -> Basis:
        """Where this kernel's time on a device comes from, for a variant. Another variant's curve
        that stands for it is as sure as one borrowed from another device.
        """
        curve = cls.known(hw, variant)
        if curve is None:
            return unmeasured(kernel)
        fit = curve.fit
        is_own = curve is cls.own(hw, variant)
        error = fit.relative_error
        if not is_own:
            error = borrowed_error(error)
        source: Source = "table"
        if not fit.fitted_on:
            source = "roofline"
        elif fit.borrowed_from or not is_own:
            source = "carried over"
        return Basis(
            kernel=kernel,
            source=source,
            relative_error=error,
            work=work,
            ranges=fit.ranges,
        )

    @classmethod
    def may_borrow(cls, hw: Device, donor: Device, variant: str) -> bool:
        """Whether a device without the curve takes another's."""
        return True

    @classmethod
    def free(cls) -> dict[str, Free]:
        """The constants that a fit moves."""
        free = {}
        for name, hint in get_type_hints(cls, include_extras=True).items():
            for mark in getattr(hint, "__metadata__", ()):
                if isinstance(mark, Free):
                    free[name] = mark
        return free

    def over(self, work: Any) -> Self:
        """The curve with the shapes of the work that it was fitted to."""
        fit = msgspec.structs.replace(self.fit, ranges=ranges_of(work))
        return msgspec.structs.replace(self, fit=fit)

    def placed(self, hw: Any, variant: str = "") -> Any:
        """The device's profile with this curve for a variant."""
        if self.variants_key and variant:
            return msgspec.structs.replace(
                hw,
                **{
                    self.variants_key: {**getattr(hw, self.variants_key), variant: self}
                },
            )
        held = getattr(hw, self.key)
        value: Any = self
        if isinstance(held, dict):
            value = {**held, variant or "bf16": self}
        return msgspec.structs.replace(hw, **{self.key: value})


class FittedCurve(Curve, frozen=True, kw_only=True):
    """A curve that a table of timed kernels is fitted to."""

    @abstractmethod
    def table_seconds(self, hw: Device, work: Any) -> Array:
        """Seconds of a table's rows, which were timed in a loop: what fits stays in the cache."""

    def refitted(
        self,
        hw: Device,
        work: Any,
        rows: Rows,
        *,
        fitted_on: str = "",
        rotated: bool = False,
        is_own: bool = False,
    ) -> Self:
        """The curve fitted to rows of this work: `time_s`, and optionally `weight`. `rotated`:
        operands were not in the cache. `is_own`: this curve is the device's own for these very
        kernels."""
        start = type(self)(library=self.library)
        return best_fit(
            [start],
            self.free(),
            lambda each: each.table_seconds(hw, work),
            rows,
            fitted_on,
        )


class KernelCurve(FittedCurve, frozen=True, kw_only=True):
    """A curve with the ceilings of memory and compute."""

    @abstractmethod
    def seconds(self, hw: Device, work: Any, working_set: WorkingSet = None) -> OpTime:
        """Seconds of some work, and the ceilings that they come from."""

    def table_seconds(self, hw: Device, work: Any) -> Array:
        return self.seconds(hw, work, "own").time_s

    def at_overhead(
        self,
        busy_s: Array,
        memory_s: Array,
        compute_s: Array,
        overhead_s: float,
    ) -> OpTime:
        fixed_s = np.full(busy_s.shape, overhead_s)
        return OpTime(fixed_s + busy_s, memory_s, compute_s, fixed_s)


def cache_speedup(
    hw: Device,
    fraction: float,
    ratio: float,
    own_bytes: Array,
    working_set: WorkingSet,
) -> Array | float:
    """How many times shorter reading data again is: `ratio` if it stayed in the cache's share, 1 if
    not.
    """
    touched = own_bytes
    if ratio < 1.0:  # no caching: see AttentionCurve.l2_bandwidth_ratio
        pass
    elif working_set is None:
        if hw.kind == "gpu":
            return 1.0
    elif not isinstance(working_set, str):
        touched = np.maximum(as_array(working_set), own_bytes)
    if hw.l2_bytes * fraction <= 0:
        return 1.0
    filling = np.minimum(touched / (hw.l2_bytes * fraction), 1e9)
    hit = 1.0 / (1.0 + filling ** _sharpness(ratio))
    return 1.0 / (1.0 - hit * (1.0 - 1.0 / ratio))


def _sharpness(ratio: float) -> float:
    """The power by which reads outgrow the cache; where the short ones are the slow ones, at most
    that up to which more bytes never take less time: bytes · (1 + k hit), with k = 1 / ratio - 1,
    grows everywhere where k (s - 1)² <= 4 s.
    """
    if ratio >= 1.0:
        return CACHE_SHARPNESS
    middle = 1.0 + 2.0 / (1.0 / ratio - 1.0)
    return min(CACHE_SHARPNESS, middle + math.sqrt(middle**2 - 1.0))


def with_priors(parameters: Parameters, generic: msgspec.Struct) -> dict[str, Free]:
    """The parameters, with the generic curve's values where they have no prior of their own."""
    with_prior = dict(parameters)
    for name, free in parameters.items():
        if free.prior is None:
            with_prior[name] = msgspec.structs.replace(
                free, prior=getattr(generic, name)
            )
    return with_prior


def minimise(
    start: Constants,
    parameters: Parameters,
    predict: Callable[[Constants], Array],
    rows: Rows,
    *,
    starts: Sequence[Mapping[str, float]] = ({},),
) -> tuple[Constants, float]:
    """The curve with `parameters` fitted to the rows' `time_s` (and `weight`), and its loss; other
    fields stay as in `start`.

    Raises ConfigError when there are too few rows, or times that are not positive numbers.
    """
    seconds = np.asarray(rows["time_s"], dtype=np.float64)
    weights = np.asarray(rows.get("weight", np.ones(seconds.size)), dtype=np.float64)
    parameters = with_priors(parameters, type(start)())
    if len(parameters) > MAX_PARAMETERS:
        raise ValueError(f"{len(parameters)} free parameters, at most {MAX_PARAMETERS}")
    if seconds.size < 3 or not np.all(np.isfinite(seconds) & (seconds > 0)):
        raise ConfigError(
            f"cannot fit {type(start).__name__}: needs at least 3 rows with positive times"
        )
    log_seconds = np.log(seconds)
    bounds = []
    for name, free in parameters.items():
        usual = (0.0, 1.0) if name.endswith("_s") else (0.0, 1e18)
        least, most = LIMITS.get(name, usual)
        low = free.center - MOST_SPREADS * free.spread
        high = free.center + MOST_SPREADS * free.spread
        bounds.append((max(free.encode(least), low), min(free.encode(most), high)))

    def residuals(values: dict[str, float]) -> Array:
        predicted = predict(msgspec.structs.replace(start, **values))
        return np.asarray(
            weights * (np.log(np.maximum(predicted, 1e-12)) - log_seconds)
        )

    solution = solve(
        parameters,
        residuals,
        pull=PRIOR_WEIGHT * math.sqrt(seconds.size),
        starts=starts,
        bounds=(np.array(bounds)[:, 0], np.array(bounds)[:, 1]),
        loss="soft_l1",
        f_scale=LOSS_SCALE,
        max_nfev=120,
    )
    return msgspec.structs.replace(start, **solution.values), solution.cost


def best_fit(
    curves: Iterable[Constants],
    parameters: Parameters,
    predict: Callable[[Constants], Array],
    rows: Rows,
    fitted_on: str,
    *,
    starts: Sequence[Mapping[str, float]] = ({},),
    num_chosen: int = 0,
) -> Constants:
    """The best of several curves, each with `parameters` fitted; their choice counts as
    `num_chosen` parameters.
    """
    fits = [
        minimise(start, parameters, predict, rows, starts=starts) for start in curves
    ]
    curve, _ = min(fits, key=lambda fit: fit[1])
    return with_fit(
        curve, len(parameters) + num_chosen, rows, predict(curve), fitted_on
    )


def with_fit(
    curve: Constants,
    num_parameters: int,
    rows: Rows,
    predicted: Array,
    fitted_on: str,
) -> Constants:
    """The curve with a note of its fit and the spread of its errors."""
    measured = np.asarray(rows["time_s"], dtype=np.float64)
    log_errors = np.log(predicted / measured)
    rms = float(np.sqrt(np.mean(log_errors**2)))
    relative_error = min(max(rms, 0.02), 10.0)
    num_rows = len(predicted)
    fit = Fit(
        fitted_on=fitted_on,
        num_rows=num_rows,
        num_parameters=num_parameters,
        relative_error=relative_error,
    )
    return msgspec.structs.replace(curve, fit=fit)


def that_matter(
    parameters: Parameters,
    curve: Constants,
    predict: Callable[[Constants], Array],
) -> dict[str, Free]:
    """The parameters that some row's prediction depends on."""
    known = with_priors(parameters, type(curve)())
    priors = {name: free.prior for name, free in known.items()}
    generic = msgspec.structs.replace(curve, **priors)
    usual = predict(generic)
    that_move = {}
    for name, free in known.items():
        moved = msgspec.structs.replace(
            generic, **{name: free.decode(free.center + 0.4)}
        )
        if np.any(predict(moved) != usual):
            that_move[name] = free
    return that_move
