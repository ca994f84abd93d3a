"""Layouts tried by simulation: the fewest replicas that keep a load's limits, and the highest rate
that a number of them keeps.

`costs` multiplies all predicted costs. Costs twice as large are arrivals twice as fast and limits
half as long, in time that runs half as fast, so simulations stay at the predicted ones.

Both searches start at the analytic answer and are bounded by it: a load of BEYOND times what
Little's law gives is taken as too much without a simulation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
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

    def keeps(self, rate: float, replicas: int, *, costs: float = 1.0) -> bool:
        outcome = self.at(rate * costs, replicas)
        return self.load.with_limits_over(costs).kept_by(outcome)

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

        def keeps(replicas: int) -> bool:
            return self.keeps(self.load.rate, replicas, costs=costs)

        return least(keeps, start=min(math.ceil(needed), most), low=1, high=most)

    def highest_rate(
        self, replicas: int, *, costs: float = 1.0, near: float | None = None
    ) -> float | None:
        """Highest rate (within 2 %) at which `replicas` replicas meet the limits, looked for near a
        rate, by default the analytic one. Never below the requested rate if they meet it there; 0.0:
        none; None: the requests are too few to exceed the limits at any rate.
        """
        rate = self.load.rate
        analytic = max(self.layout.rate * replicas / costs, 1e-9)
        guess = _steps(analytic / self.load.rate)
        if near:
            guess = _steps(near / rate) + 1
        if self.keeps(rate, replicas, costs=costs):
            low = 1
            high = max(_steps(BEYOND * analytic / rate), _steps(BEYOND))
        else:
            low = min(_steps(LOWEST * analytic / rate), _steps(LOWEST))
            high = 0
        start = min(max(guess, low), high)

        def fails(step: int) -> bool:
            return not self.keeps(rate * RATIO**step, replicas, costs=costs)

        failing = least(fails, start=start, low=low, high=high)
        if failing is None:
            return None
        if failing == low < 1:
            return 0.0
        return rate * RATIO ** (failing - 1)


def _steps(ratio: float) -> int:
    """Steps of RATIO between two rates."""
    return math.floor(math.log(ratio) / math.log(RATIO))


def least(
    holds: Callable[[int], bool], *, start: int, low: int, high: int
) -> int | None:
    """The least number from `low` to `high` that holds, where all above it do; None: not even
    `high` does. It is looked for in doubling steps away from `start`, then by halves.
    """
    step = 1
    if holds(start):
        holding = start
        while holding > low:
            tried = max(holding - step, low)
            if not holds(tried):
                return bisect(tried, holding, holds)
            holding = tried
            step *= 2
        return holding
    failing = start
    while failing < high:
        tried = min(failing + step, high)
        if holds(tried):
            return bisect(failing, tried, holds)
        failing = tried
        step *= 2
    return None


def bisect(failing: int, holding: int, holds: Callable[[int], bool]) -> int:
    """The least number above `failing`, which does not hold, up to `holding`, which does."""
    while holding - failing > 1:
        middle = (failing + holding) // 2
        if holds(middle):
            holding = middle
        else:
            failing = middle
    return holding
