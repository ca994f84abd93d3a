"""Layouts tried by simulation: the fewest replicas that keep a load's limits, and the highest rate
that a number of them keeps.

`costs` multiplies all predicted costs. Costs twice as large are arrivals twice as fast and limits
half as long, in time that runs half as fast, so simulations stay at the predicted ones.

Both searches start at the analytic answer and are bounded by it: a load of BEYOND times what
Little's law gives is taken as too much without a simulation. Rates are steps of RATIO from the
requested one, so what was simulated for one question narrows the search for the next.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import cast

from magicdec.perfmodel.rate.layouts import ServedLayout
from magicdec.perfmodel.rate.load import Load
from magicdec.perfmodel.rate.simulate import (
    WARM_UP,
    Balance,
    Server,
    SimulatedTimes,
    simulate,
)

BEYOND = 4.0
"""No replicas keep so many times the rate of Little's law."""
LOWEST = 1e-3
"""Share of the rate of Little's law below which none is searched: requests meet no other there."""
MOST_CELLS = 1_000_000
"""Replicas times requests of one simulation: each replica keeps times of all requests."""
RATIO = 1.02
"""Factor from one searched rate to the next."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A layout with its tables, simulated at any rate on any number of replicas."""

    load: Load
    layout: ServedLayout
    outcomes: dict[tuple[float, int, int], SimulatedTimes] = dataclasses.field(
        default_factory=dict,
        compare=False,
        repr=False,
    )

    @cached_property
    def server(self) -> Server:
        return self.layout.server(self.load.requests(self.load.rate))

    def at(self, rate: float, replicas: int, *, seed: int = 0) -> SimulatedTimes:
        # A rate is reached by different products of the same steps, which differ in a last bit.
        key = (float(f"{rate:.12g}"), replicas, seed)
        if key not in self.outcomes:
            self.outcomes[key] = self._simulated(self.load, rate, replicas, seed)
        return self.outcomes[key]

    def _simulated(
        self, load: Load, rate: float, replicas: int, seed: int
    ) -> SimulatedTimes:
        is_drawn = load.trace is None
        requests = load.requests(rate, replicas, seed=seed)
        return simulate(
            self.server,
            requests,
            replicas=load.replicas(rate, replicas),
            of_replicas=replicas,
            balance=cast(Balance, load.request.balance),
            seed=seed,
            warm_up=WARM_UP if is_drawn else 0.0,
            edges_s=load.edges_s(requests),
            work=load.work,
        )

    def excess(self, rate: float, replicas: int, *, costs: float = 1.0) -> float:
        """The largest of the limited times, over its limit."""
        return self.load.excess(self.at(rate * costs, replicas)) * costs

    def most_replicas(self, most_devices: int) -> int:
        """Replicas on so many devices, as far as one simulation can hold them: with bursts no
        number of replicas may keep up.
        """
        most = most_devices // self.layout.row.num_gpus
        rate = self.load.rate
        while most > 1:
            requests = len(self.load.requests(rate, most))
            if self.load.replicas(rate, most) * requests <= MOST_CELLS:
                break
            most //= 2
        return most

    def fewest(
        self, most_devices: int, *, costs: float = 1.0, near: float | None = None
    ) -> int | None:
        """The fewest replicas that keep the limits, looked for near a number of them, by default the
        analytic one. None: the devices are too few."""
        most = self.most_replicas(most_devices)
        needed = near or self.load.rate / max(self.layout.rate, 1e-9)
        if most < 1 or needed > BEYOND * most:
            return None

        def excess(negative: int) -> float:
            return self.excess(self.load.rate, -negative, costs=costs)

        start = -min(math.ceil(needed), most)
        fewest = -last_kept(excess, start=start, low=-most, high=-1)
        return fewest if fewest <= most else None

    def highest_rate(
        self, replicas: int, *, costs: float = 1.0, near: float | None = None
    ) -> float | None:
        """Highest rate (within 2 %) at which `replicas` replicas meet the limits, looked for near a
        rate, by default the analytic one. Never below the requested rate if they meet it there; 0.0:
        none; None: the requests are too few to exceed the limits at any rate.
        """
        rate = self.load.rate
        analytic = max(self.layout.rate * replicas / costs, 1e-9)
        guess = _steps((near or analytic) / rate)

        def excess(step: int) -> float:
            return self.excess(rate * RATIO**step, replicas, costs=costs)

        if excess(0) <= 1.0:
            low = 1
            high = max(_steps(BEYOND * analytic / rate), _steps(BEYOND))
        else:
            low = min(_steps(LOWEST * analytic / rate), _steps(LOWEST))
            high = -1
        known = {0: excess(0)}
        for simulated, of_replicas, seed in self.outcomes:
            step = round(math.log(simulated / costs / rate) / math.log(RATIO))
            is_step = math.isclose(simulated, rate * costs * RATIO**step)
            if is_step and low <= step <= high and (of_replicas, seed) == (replicas, 0):
                known[step] = excess(step)
        step = last_kept(
            excess, start=min(max(guess, low), high), low=low, high=high, known=known
        )
        if step == high > 0:
            return None
        if step < low < 0:
            return 0.0
        return rate * RATIO**step


def _steps(ratio: float) -> int:
    """Steps of RATIO between two rates."""
    return math.floor(math.log(ratio) / math.log(RATIO))


def last_kept(
    excess: Callable[[int], float],
    *,
    start: int,
    low: int,
    high: int,
    known: Mapping[int, float] = MappingProxyType({}),
) -> int:
    """The greatest number from `low` to `high` whose excess is at most 1, where that of greater ones
    is above it; low - 1: not even `low`. It is looked for in doubling strides away from `start`,
    then where excesses on both sides say, or halfway. `known`: excesses that cost nothing.
    """
    tried = dict(known)
    failing = min((n for n in tried if tried[n] > 1.0), default=high + 1)
    kept = max((n for n in tried if tried[n] <= 1.0 and n < failing), default=low - 1)
    stride = 1
    halves = False
    while failing - kept > 1:
        gap = failing - kept
        if kept in tried and failing in tried:
            number = kept + gap // 2
            if not halves and tried[kept] > 0.0 and tried[failing] < math.inf:
                above = math.log(tried[failing])
                share = math.log(tried[kept]) / (math.log(tried[kept]) - above)
                number = min(max(kept + round(gap * share), kept + 1), failing - 1)
        elif kept < start < failing:
            number = start
        elif kept in tried:
            number = min(kept + stride, high)
            stride *= 2
        else:
            number = max(failing - stride, low)
            stride *= 2
        tried[number] = excess(number)
        if tried[number] > 1.0:
            failing = number
        else:
            kept = number
        halves = failing - kept > gap // 2
    return kept
