"""Operations: what some work costs, in FLOPs and bytes, and how long it takes on a device with an
engine.

A pass is a list of them (`ForwardTime`). Functions are pure and broadcast over numpy arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.specs.device import Device
from magicdec.specs.engine import EngineProfile
from magicdec.specs.precision import Precision

FP32_BYTES = 4.0
REACHED_BANDWIDTH = 0.95
"""Share of the memory's peak that the best kernels reach: no engine's factor makes an operation
faster.
"""
Source = Literal["table", "carried over", "roofline", "report"]
"""Where a kernel's time comes from: a table of this kernel on this device; another device's or
format's; no table, so the datasheet's rates and usual efficiencies; one report. Fixed costs are the
engine's constants.
"""
Group = Literal["gemm", "experts", "attention", "elementwise", "link", "overhead"]
BoundBy = Literal["weights", "kv", "compute", "link", "overhead"]
GROUPS: tuple[Group, ...] = (
    "gemm",
    "experts",
    "attention",
    "elementwise",
    "link",
    "overhead",
)
BOUNDS: tuple[BoundBy, ...] = ("weights", "kv", "compute", "link", "overhead")
ROUNDING = 1e-6
LEAST_WEIGHT = 1e-300
Ranges = Mapping[str, tuple[float, float]]
"""Least and greatest value of each field of a work, over the rows of a table."""


class Cost(NamedTuple):
    """FLOPs and bytes per rank, whatever the device; fields broadcast, costs add. A multiply-add is
    two FLOPs.
    """

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
    """Seconds. `time_s` is the prediction; the others say what it is made of (no sum: the ridge is
    soft).

    `memory_s` and `compute_s` are the two ceilings at the fitted efficiencies, `overhead_s` the
    fixed cost. `spread_s`: one standard deviation over batches and lengths like the ones asked.
    """

    time_s: Array
    memory_s: Array
    compute_s: Array
    overhead_s: Array
    spread_s: Any = 0.0


class Basis(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a kernel comes from, and how sure it is."""

    kernel: str
    source: Source
    relative_error: float
    """One standard deviation of its time, relative."""
    work: Any = None
    """Shape of the work that was timed by it."""
    ranges: Ranges = msgspec.field(default_factory=dict)
    """Shapes that the table holds; empty: not known."""

    @property
    def is_inside(self) -> bool | None:
        """Whether the work lies inside the shapes of the table; None: there is none, or its shapes
        are not known.
        """
        if self.source != "table" or not self.ranges:
            return None
        for name, (low, high) in self.ranges.items():
            value = np.asarray(getattr(self.work, name))
            is_below = value < low * (1.0 - ROUNDING)
            is_above = value > high * (1.0 + ROUNDING)
            if np.any(is_below | is_above):
                return False
        return True

    def mapped(self, change: Callable[[Any], Any]) -> Basis:
        """The basis with `change` done to the arrays of its work's shape."""
        if self.work is None:
            return self
        changed = {}
        for name, value in self.work._asdict().items():
            if isinstance(value, np.ndarray):
                changed[name] = change(value)
        if not changed:
            return self
        return msgspec.structs.replace(self, work=self.work._replace(**changed))

    def averaged(self, weight: Array) -> Basis:
        """The basis with the mean shape over the last axis, by these weights."""
        whole = np.maximum(np.sum(weight, axis=-1), LEAST_WEIGHT)
        return self.mapped(lambda value: np.sum(weight * value, axis=-1) / whole)


class GridPlaces:
    """Places of some points of a grid, at which arrays that broadcast over it are read."""

    def __init__(self, shape: tuple[int, ...], chosen: Any) -> None:
        self._where = np.unravel_index(chosen, shape)
        self._places: dict[tuple[int, ...], Any] = {}
        """Indices of the points in arrays of each shape."""

    def of(self, values: Any) -> Any:
        """Values at the points; single ones stay single."""
        if not isinstance(values, np.ndarray):
            return values
        if values.size == 1:
            return values.reshape(-1)[0]
        return values[self._place(values.shape)]

    def rows(self, values: Any) -> Array:
        """Values at the points, single ones at each."""
        every: Array = np.asarray(values)
        if every.ndim == 0:
            return np.full(self._where[0].shape, every)
        rows: Array = every[self._place(every.shape)]
        return rows

    def _place(self, shape: tuple[int, ...]) -> Any:
        if shape not in self._places:
            own = self._where[len(self._where) - len(shape) :]
            place = []
            for length, index in zip(shape, own, strict=True):
                place.append(index if length > 1 else np.zeros_like(index))
            self._places[shape] = tuple(place)
        return self._places[shape]


class Where(NamedTuple):
    """The device, engine and formats that every operation of a pass shares."""

    hw: Device
    engine: EngineProfile
    precision: Precision


SECONDS = ("time_s", "memory_s", "compute_s", "overhead_s", "least_s", "spread_s")
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
    """Lower bound on the time: bytes and FLOPs at the device's peak rates. Operations without
    either keep their own time. """
    # made by factories: a default on the class would be found before `_Mapped` is asked for its own
    spread_s: Any = field(default_factory=float)
    """One standard deviation of the time over batches and lengths like the ones asked: where its
    blocks happen to end."""
    bases: tuple[Basis, ...] = field(default_factory=tuple)
    """Sources of its kernels' times. Empty: an engine's constants."""

    def times(self, count: Any) -> Op:
        """A share of the operation, or several of it."""
        return replace(
            self,
            cost=self.cost.times(count),
            **{name: getattr(self, name) * count for name in SECONDS},
        )

    def mapped(
        self,
        change: Callable[[Any], Any],
        basis_change: Callable[[Basis], Basis],
    ) -> Op:
        """The operation with `change` done to its cost and seconds, and the other to its bases."""
        mapped = object.__new__(_Mapped)
        vars(mapped).update(
            name=self.name,
            group=self.group,
            _source=self,
            _change=change,
            _basis_change=basis_change,
        )
        return mapped

    def taken(self, places: GridPlaces) -> Op:
        """The operation at some points of a grid."""
        return self.mapped(places.of, lambda basis: basis.mapped(places.of))

    def named(self, suffix: str) -> Op:
        """The operation with this behind the names of its kernels."""
        bases = (
            msgspec.structs.replace(basis, kernel=basis.kernel + suffix)
            for basis in self.bases
        )
        return replace(self, bases=tuple(bases))

    def by(self, factor: Any) -> Op:
        """The operation `factor` times slower, but no faster than its lower bound."""
        return replace(
            self,
            time_s=np.maximum(self.time_s * factor, self.least_s),
            spread_s=self.spread_s * factor,
        )


class _Mapped(Op):
    """A changed operation, each of its quantities when it is first asked for: most are not."""

    def __getattr__(self, name: str) -> Any:
        if name in SECONDS:
            value = self._change(getattr(self._source, name))
        elif name == "cost":
            value = Cost(*map(self._change, self._source.cost))
        elif name == "bases":
            value = tuple(map(self._basis_change, self._source.bases))
        else:
            raise AttributeError(name)
        vars(self)[name] = value
        return value


def operation(
    name: str,
    group: Group,
    at: Where,
    cost: Cost,
    time: OpTime,
    dtype: str,
    *,
    basis: Basis,
    count: Any = 1.0,
    factor: Any = 1.0,
) -> Op:
    """`count` times some work, and an engine's `factor` on its time.

    No factor makes an operation faster than the memory moves its bytes and the processor's peak in
    `dtype` does its FLOPs (the curve itself may be, out of a cache). Activations count where they
    are all that moves: what a matrix product reads of them a cache may hold. A CPU has no such
    peak: its rate is what one library's products reached, and another's may use vectors twice as
    wide.
    """
    moved = cost.weight_bytes + cost.kv_bytes
    if group == "elementwise":
        moved = cost.activation_bytes
    peak = math.inf
    if at.hw.kind != "cpu":
        peak = at.hw.compute_rate(dtype)
    memory_s = moved / (REACHED_BANDWIDTH * at.hw.memory_bytes_per_s)
    least_s = np.maximum(memory_s, cost.flops / peak)
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
        spread_s=time.spread_s * scale,
        bases=(basis,),
    )


def fixed(
    name: str,
    group: Group,
    seconds: Any,
    cost: Cost | None = None,
    *,
    least_s: Any = 0.0,
    bases: tuple[Basis, ...] = (),
) -> Op:
    """An operation of known duration: overheads and collectives."""
    time = np.asarray(seconds, dtype=np.float64)
    zero = np.zeros_like(time)
    return Op(
        name=name,
        group=group,
        cost=cost or Cost(),
        time_s=time,
        memory_s=zero,
        compute_s=zero,
        overhead_s=time,
        least_s=zero + least_s,
        bases=bases,
    )


def merged(operations: list[Op]) -> tuple[Op, ...]:
    """Operations of one name merged into one."""
    by_name: dict[str, list[Op]] = {}
    for op in operations:
        by_name.setdefault(op.name, []).append(op)
    return tuple(map(_sum, by_name.values()))


def _sum(operations: list[Op]) -> Op:
    if len(operations) == 1:
        return operations[0]
    seconds: Any = {}
    for key in SECONDS:
        seconds[key] = sum((getattr(op, key) for op in operations), np.asarray(0.0))
    bases: list[Basis] = []
    for op in operations:
        bases.extend(op.bases)
    cost = total([op.cost for op in operations])
    return replace(operations[0], cost=cost, bases=tuple(bases), **seconds)


class ForwardTime(msgspec.Struct, frozen=True, dict=True):
    """The operations of a pass (or of several: they concatenate), with totals."""

    ops: tuple[Op, ...]

    @cached_property
    def total_s(self) -> Array:
        seconds: Array = np.asarray(0.0)
        for op in sorted(self.ops, key=lambda op: op.time_s.size):
            seconds = seconds + op.time_s
        return seconds

    @property
    def spread_s(self) -> Any:
        """One standard deviation of the total: all layers' blocks end alike."""
        return sum(op.spread_s for op in self.ops)

    @property
    def cost(self) -> Cost:
        return total([op.cost for op in self.ops])

    def group_seconds(self) -> dict[Group, Array]:
        """Seconds by kind of term: what the calibration's errors are stated for."""
        seconds: dict[Group, Array] = {group: np.asarray(0.0) for group in GROUPS}
        for op in self.ops:
            seconds[op.group] = seconds[op.group] + op.time_s
        return seconds

    def bound_seconds(self) -> dict[BoundBy, Array]:
        """Seconds by what binds: an operation's fixed part is overhead, the rest belongs to its
        higher ceiling.
        """
        seconds: dict[BoundBy, Array] = {bound: np.asarray(0.0) for bound in BOUNDS}
        for op in self.ops:
            if op.group in ("elementwise", "overhead"):
                seconds["overhead"] = seconds["overhead"] + op.time_s
            elif op.group == "link":
                seconds["link"] = seconds["link"] + op.time_s
            else:
                memory: BoundBy = "weights"
                if op.group == "attention":
                    memory = "kv"
                work = np.maximum(op.time_s - op.overhead_s, 0.0)
                by_compute = op.compute_s > op.memory_s
                seconds["overhead"] = seconds["overhead"] + (op.time_s - work)
                seconds["compute"] = seconds["compute"] + np.where(
                    by_compute, work, 0.0
                )
                seconds[memory] = seconds[memory] + np.where(by_compute, 0.0, work)
        return seconds

    def times(self, count: Any) -> ForwardTime:
        """A share of the pass, or several of them."""
        return ForwardTime(tuple(op.times(count) for op in self.ops))

    def by(self, factor: Any) -> ForwardTime:
        """The pass `factor` times slower, but no operation faster than its lower bound."""
        return ForwardTime(tuple(op.by(factor) for op in self.ops))

    def summed(self, weight: Array) -> ForwardTime:
        """The operations summed over the last axis with these weights."""

        whole = np.sum(weight, axis=-1)

        def over(value: Any) -> Any:
            if (
                np.ndim(value) == 0
            ):  # alike in all cases, such as costs that are nothing
                return whole * value
            return np.sum(weight * value, axis=-1)

        def summed(op: Op) -> Op:
            return op.mapped(over, lambda basis: basis.averaged(weight))

        return ForwardTime(tuple(map(summed, self.ops)))

    def plus(self, *others: ForwardTime | Op) -> ForwardTime:
        ops = list(self.ops)
        for other in others:
            if isinstance(other, ForwardTime):
                ops.extend(other.ops)
            else:
                ops.append(other)
        return ForwardTime(tuple(ops))
