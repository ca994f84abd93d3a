"""The base of every kernel: a curve that gives the seconds of some work on a device, and the tables it is fitted to.

One file per family holds everything known of it. A constant is written once, as a field of its curve: the default is
the generic value, `Free` says that a fit moves it. A work is a NamedTuple of what broadcasts; its curve's `seconds`
counts bytes and FLOPs against the fitted ceilings:

    time = overhead + || memory , compute ||_p          memory = bytes / bandwidth,  compute = FLOPs / rate

The p-norm of the two ceilings is a roofline with a soft ridge: at p → ∞ it is their maximum. Bandwidth and rate are the
datasheet's times fitted efficiencies.

Cache: where kernels are timed in a loop, operands that fit stay in the last-level cache. In a forward pass the rest of
the step evicts them. `working_set` is what is touched between two uses of the same data: None takes it as unbounded on
GPUs (nothing stays) and as the operands themselves on CPUs, "own" as the operands themselves.

Ignored: clocks that fall under load, alignment, misses in address translation. All functions are pure and broadcast
over numpy arrays; NaN and negative inputs count as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt

from magicdec.fitting import Free
from magicdec.perfmodel.kernels.fit import Fit, Rows, minimise, with_fit
from magicdec.specs.device import Device, Spec
from magicdec.specs.engine import EngineProfile
from magicdec.specs.precision import Precision

Array = npt.NDArray[np.float64]
Columns = Mapping[str, Array]
WorkingSet = Any
"""Bytes (an array), "own" or None; see the module's docstring."""
LARGEST = 1e15
FP32_BYTES = 4.0
CACHE_SHARPNESS = 8.0
BORROWED_ERROR_FACTOR = 2.0
REACHED_BANDWIDTH = 0.95
"""Share of the memory's peak that the best kernels reach: no engine's factor makes an operation faster."""

Group = Literal["gemm", "experts", "attention", "elementwise", "link", "overhead"]
BoundBy = Literal["weights", "kv", "compute", "link", "overhead"]
GROUPS: tuple[Group, ...] = ("gemm", "experts", "attention", "elementwise", "link", "overhead")
BOUNDS: tuple[BoundBy, ...] = ("weights", "kv", "compute", "link", "overhead")


def as_array(value: Any, *, least: float = 0.0) -> Array:
    """Floats with NaN and everything below `least` replaced by it, and huge values cut to a finite one."""
    # fmax and fmin take the number where the other is NaN
    clipped: Array = np.fmin(np.fmax(np.asarray(value, dtype=np.float64), least), LARGEST)
    return clipped


def arrays(*values: Any) -> tuple[Array, ...]:
    """The values as clean arrays of one shape."""
    return np.broadcast_arrays(*(as_array(value) for value in values))


class Cost(NamedTuple):
    """FLOPs and bytes per rank, whatever the device; fields broadcast, costs add. A multiply-add is two FLOPs."""

    flops: Any = 0.0
    weight_bytes: Any = 0.0
    kv_bytes: Any = 0.0
    activation_bytes: Any = 0.0
    collective_bytes: Any = 0.0
    """Payload of collectives (not bytes on the wire, which depend on the algorithm)."""

    @property
    def memory_bytes(self) -> Any:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    def plus(self, other: Cost) -> Cost:
        return Cost(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def times(self, count: Any) -> Cost:
        return Cost(*(value * count for value in self))


def total(costs: list[Cost]) -> Cost:
    result = Cost()
    for cost in costs:
        result = result.plus(cost)
    return result


class OpTime(NamedTuple):
    """Seconds. `time_s` is the prediction; the others say what it is made of (no sum: the ridge is soft).

    `memory_s` and `compute_s` are the two ceilings at the fitted efficiencies, `overhead_s` the fixed cost.
    """

    time_s: Array
    memory_s: Array
    compute_s: Array
    overhead_s: Array


def soft_max(first: Array, second: Array, power: float) -> Array:
    """The p-norm of two ceilings, without overflow; 0 where both are."""
    high, low = np.maximum(first, second), np.minimum(first, second)
    ratio = low / np.maximum(high, 1e-300)
    result: Array = high * (1.0 + ratio**power) ** (1.0 / power)
    return result


def waves(filling: Array, weight: float) -> Array:
    """Time in waves for work that fills the device `filling` times; a part of one wave takes a whole one's time."""
    passed: Array = np.where(filling <= 1.0, 1.0, filling + weight * (np.ceil(filling) - filling))
    return passed


@dataclass(frozen=True, kw_only=True)
class Table:
    """How a file of timed kernels is read: its columns, the work of its rows, and which rows count."""

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
    """Further columns that tell such a file from others."""
    flags: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Columns that are 1 where another has some text, else 0."""
    select: Callable[[Any], Any] = lambda frame: frame
    """The rows of a file's data frame that are timings of this kernel."""
    select_group: Callable[[dict[str, Array]], dict[str, Array]] = lambda rows: rows
    """The rows of one device and variant that are timings of this kernel."""
    is_borrowed: bool = False
    """Whether devices without a table borrow the curve, so that it is compared with other devices' tables."""


def borrowed_error(error: float) -> float:
    """The error of a curve that was fitted to another device's or another format's kernel with this error."""
    return min(10.0, max(0.1, BORROWED_ERROR_FACTOR * error))


class Curve(Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A kernel's seconds on a device. Fields are its constants."""

    key: ClassVar[str]
    """The field of a hardware profile that holds the curve, or one for each variant."""
    variants_key: ClassVar[str] = ""
    """The field that holds curves of further variants, which have the one of `key` where they lack their own."""
    has_formats: ClassVar[bool] = False
    """Whether variants are number formats."""
    tables: ClassVar[tuple[Table, ...]] = ()
    fit: Fit = Fit()
    library: str = "generic"

    @classmethod
    def own(cls, hw: Device, variant: str = "") -> Self | None:
        """The device's curve of this kernel for this very variant (any, where it has none)."""
        held = getattr(hw, cls.variants_key if variant and cls.variants_key else cls.key)
        return held.get(variant or "bf16") if isinstance(held, dict) else held

    @classmethod
    def known(cls, hw: Device, variant: str = "") -> Self | None:
        """The device's curve of this kernel for a variant, or the one that stands for it; None where neither was
        measured."""
        own = cls.own(hw, variant)
        return cls.own(hw) if own is None and cls.variants_key else own

    @classmethod
    def variants(cls, hw: Device) -> dict[str, Self]:
        """The device's curves of this kernel by variant."""
        held = getattr(hw, cls.variants_key or cls.key)
        return held if isinstance(held, dict) else {"": held} if held is not None else {}

    @classmethod
    def of(cls, hw: Device, variant: str = "") -> Self:
        """The device's curve of this kernel for a variant, or the generic one."""
        return cls.known(hw, variant) or cls()

    @classmethod
    def is_timed_on(cls, hw: Device, variant: str = "") -> bool:
        """Whether this very kernel was timed on this very device."""
        own = cls.own(hw, variant)
        return own is not None and bool(own.fit.fitted_on) and not own.fit.borrowed_from

    @classmethod
    def error_on(cls, hw: Device, variant: str = "") -> float | None:
        """One relative standard deviation of this kernel's time on a device, for a variant: another's curve that stands
        for it is as sure as a borrowed one. None where neither was measured."""
        own, known = cls.own(hw, variant), cls.known(hw, variant)
        if known is None:
            return None
        return known.fit.relative_error if known is own else borrowed_error(known.fit.relative_error)

    @classmethod
    def may_borrow(cls, hw: Device, donor: Device, variant: str) -> bool:
        """Whether a device without the curve takes another's."""
        return True

    @classmethod
    def free(cls) -> dict[str, Free]:
        """The constants that a fit moves."""
        hints = get_type_hints(cls, include_extras=True).items()
        marks = ((name, each) for name, hint in hints for each in getattr(hint, "__metadata__", ()))
        return {name: each for name, each in marks if isinstance(each, Free)}

    def seconds(self, hw: Device, work: Any, working_set: WorkingSet = None) -> OpTime:
        raise NotImplementedError

    def table_seconds(self, hw: Device, work: Any) -> Array:
        """Seconds of a table's rows, which were timed in a loop: what fits stays in the cache."""
        return self.seconds(hw, work, "own").time_s

    def refitted(
        self, hw: Device, work: Any, rows: Rows, *, fitted_on: str = "", rotated: bool = False, is_own: bool = False
    ) -> Self:
        """The curve fitted to rows of this work: `time_s`, and optionally `weight`. `rotated`: operands were not in the
        cache. `is_own`: this curve is the device's own for these very kernels."""
        free, start = self.free(), type(self)(library=self.library)
        curve, _ = minimise(start, free, lambda each: each.table_seconds(hw, work), rows)
        return with_fit(curve, len(free), rows, curve.table_seconds(hw, work), fitted_on)

    def placed(self, hw: Any, variant: str = "") -> Any:
        """The device's profile with this curve for a variant."""
        if self.variants_key and variant:
            return msgspec.structs.replace(hw, **{self.variants_key: {**getattr(hw, self.variants_key), variant: self}})
        held = getattr(hw, self.key)
        value = {**held, variant or "bf16": self} if isinstance(held, dict) else self
        return msgspec.structs.replace(hw, **{self.key: value})

    def at_overhead(self, busy_s: Array, memory_s: Array, compute_s: Array, overhead_s: float) -> OpTime:
        fixed_s = np.full(busy_s.shape, overhead_s)
        return OpTime(fixed_s + busy_s, memory_s, compute_s, fixed_s)


def cache_speedup(
    hw: Device, fraction: float, ratio: float, own_bytes: Array, working_set: WorkingSet
) -> Array | float:
    """How many times shorter reading data again is: `ratio` if it stayed in the cache's share, 1 if not."""
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
    hit = 1.0 / (1.0 + np.minimum(touched / (hw.l2_bytes * fraction), 1e9) ** CACHE_SHARPNESS)
    speedup: Array = 1.0 / (1.0 - hit * (1.0 - 1.0 / ratio))
    return speedup


class Where(NamedTuple):
    """The device, engine and formats that every operation of a pass shares."""

    hw: Device
    engine: EngineProfile
    precision: Precision


SECONDS = ("time_s", "memory_s", "compute_s", "overhead_s", "least_s")
"""The fields of an operation that are seconds."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """A named operation: its cost and its time, over all of its repetitions in the pass."""

    name: str
    group: Group
    cost: Cost
    time_s: Array
    memory_s: Array
    compute_s: Array
    overhead_s: Array
    least_s: Array
    """The limit that no factor passes: its bytes and FLOPs at the device's peaks, or the time that it has."""

    def times(self, count: Any) -> Op:
        """A share of the operation, or several of it."""
        return replace(self, cost=self.cost.times(count), **{name: getattr(self, name) * count for name in SECONDS})

    def by(self, factor: Any) -> Op:
        """The operation run so many times slower, within its limits."""
        return replace(self, time_s=np.maximum(self.time_s * factor, self.least_s))


def operation(
    name: str, group: Group, at: Where, cost: Cost, time: OpTime, dtype: str, *, count: Any = 1.0, factor: Any = 1.0
) -> Op:
    """`count` times some work, and an engine's `factor` on its time.

    No factor makes an operation faster than the memory moves its bytes and the processor's peak in `dtype` does its
    FLOPs (the curve itself may be, out of a cache). Activations count where they are all that moves: what a matrix
    product reads of them a cache may hold.
    """
    moved = cost.activation_bytes if group == "elementwise" else cost.weight_bytes + cost.kv_bytes
    least_s = np.maximum(moved / (REACHED_BANDWIDTH * at.hw.memory_bytes_per_s), cost.flops / at.hw.compute_rate(dtype))
    least_s = np.minimum(time.time_s, least_s)
    scale = count * factor
    return Op(
        name=name,
        group=group,
        cost=cost.times(count),
        time_s=np.maximum(time.time_s * factor, least_s) * count,
        memory_s=time.memory_s * scale,
        compute_s=time.compute_s * scale,
        overhead_s=time.overhead_s * scale,
        least_s=least_s * count,
    )


def fixed(name: str, group: Group, seconds: Any, cost: Cost | None = None, *, least_s: Any = 0.0) -> Op:
    """An operation of known duration: overheads and collectives."""
    time = np.asarray(seconds, dtype=np.float64)
    zero = np.zeros_like(time)
    return Op(
        name=name, group=group, cost=cost or Cost(), time_s=time, memory_s=zero, compute_s=zero, overhead_s=time,
        least_s=zero + least_s,
    )  # fmt: skip


def merged(operations: list[Op]) -> tuple[Op, ...]:
    """One operation for those of one name."""
    by_name: dict[str, list[Op]] = {}
    for op in operations:
        by_name.setdefault(op.name, []).append(op)
    return tuple(each[0] if len(each) == 1 else _sum(each) for each in by_name.values())


def _sum(operations: list[Op]) -> Op:
    def added(key: str) -> Array:
        result: Array = sum((getattr(op, key) for op in operations), np.asarray(0.0))
        return result

    seconds = {key: added(key) for key in SECONDS}
    first = operations[0]
    return Op(name=first.name, group=first.group, cost=total([op.cost for op in operations]), **seconds)
