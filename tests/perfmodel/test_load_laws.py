"""The load of a plan for a rate: how many requests and replicas are simulated, and the limits that are kept."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from magicdec.api import request_of
from magicdec.perfmodel.rate import load
from magicdec.perfmodel.rate.load import Load
from magicdec.perfmodel.rate.requests import Requests, alike
from magicdec.perfmodel.rate.simulate import SimulatedTimes
from magicdec.specs.catalog import load_model_spec

MODEL = load_model_spec("llama-3.1-8b")
CHAT: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "hardware": "h100-sxm-80gb",
    "tp": 1,
    "context": 2048,
    "gen_len": 50,
}


def load_of(**options: Any) -> Load:
    return Load.of(request_of(**CHAT | {"draft": "none"} | options), MODEL)


@given(
    rate=st.floats(0.01, 3000.0),
    replicas=st.integers(1, 400),
    balance=st.sampled_from(["round-robin", "least-loaded"]),
)
def test_as_many_replicas_are_simulated_as_get_3000_requests_in_400_seconds(
    rate: float, replicas: int, balance: str
) -> None:
    """By trying every number; a balancer that compares loads is seen with eight at least. They get 500 requests or
    more, and 3000 at most."""
    asked = load_of(rate=rate, balance=balance)
    least = 8 if balance == "least-loaded" else 1
    enough = replicas
    for number in range(least, replicas + 1):
        if rate * 400.0 * number / replicas >= 3000.0 * (1.0 - 1e-12):
            enough = number
            break
    found = asked.replicas(rate, replicas)
    assert found == enough
    count = len(asked.requests(rate, replicas))
    expected = min(max(rate * found / replicas * 400.0, 500.0), 3000.0)
    assert count == pytest.approx(expected, abs=1.0 + 1e-9)


traced = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=700
)


@given(lengths=traced)
def test_shapes_of_a_trace_are_its_requests_or_evenly_chosen_ones(
    lengths: list[tuple[int, int]],
) -> None:
    prompts, outputs = np.array(lengths).T
    trace = Requests(
        arrival_s=np.arange(float(len(lengths))),
        prompt_len=prompts,
        output_len=outputs,
        cached_len=np.zeros(len(lengths), dtype=np.int64),
    )
    weights = {
        (shape.prompt_len, shape.gen_len): shape.weight
        for shape in load._shapes(trace).requests
    }
    assert sum(weights.values()) == min(len(lengths), 512)
    counted = Counter(lengths)
    if len(lengths) <= 512:
        assert weights == counted
    assert set(weights) <= set(counted)
    assert all(weight <= counted[shape] for shape, weight in weights.items())


@given(
    seconds=st.lists(st.integers(1, 9).map(float), max_size=30),
    mean=st.none() | st.integers(1, 9).map(float),
    p95=st.none() | st.integers(1, 9).map(float),
)
def test_limits_are_kept_up_to_the_limit_itself(
    seconds: list[float], mean: float | None, p95: float | None
) -> None:
    """The percentile lies between two of the sorted times."""
    expected = True
    if seconds and mean is not None:
        expected &= sum(seconds) <= mean * len(seconds)
    if seconds and p95 is not None:
        place = Fraction(19, 20) * (len(seconds) - 1)
        low, high = sorted(seconds)[int(place)], sorted(seconds)[math.ceil(place)]
        percentile = Fraction(low) + (place - int(place)) * (
            Fraction(high) - Fraction(low)
        )
        assume(low == high or percentile != p95)  # floats between two may miss it
        expected &= percentile <= p95
    assert (load._over(np.array(seconds), mean=mean, p95=p95) <= 1.0) == expected
    given_limits = [limit for limit in (mean, p95) if limit is not None]
    tighter = sorted(given_limits)[0] if given_limits else None
    assert load._tighter(mean, p95) == tighter


@given(
    limits=st.fixed_dictionaries(
        {
            name: st.none() | st.floats(1.0, 900.0)
            for name in ("ttft_ms", "tpot_ms", "p95_ttft_ms", "p95_tpot_ms")
        }
    ),
    factor=st.floats(0.5, 2.0),
    seconds=st.lists(st.floats(0.001, 2.0), min_size=1, max_size=9),
)
def test_costs_so_many_times_as_large_are_limits_as_many_times_as_short(
    limits: dict[str, float | None], factor: float, seconds: list[float]
) -> None:
    """Times that keep the limits, in time that runs so much slower, and no others."""
    given_limits = {name: limit for name, limit in limits.items() if limit is not None}
    asked = load_of(rate=3.0, **given_limits)
    requests = alike(len(seconds), prompt_len=9, output_len=2)
    requests.arrival_s[:] = 1e4 * np.arange(len(seconds))
    waited = np.array(seconds)

    def outcome(speed: float) -> SimulatedTimes:
        first_s = requests.arrival_s + waited / speed
        last_s = first_s + waited / speed / 20.0
        return SimulatedTimes(
            requests=requests, first_s=first_s, last_s=last_s, replicas=[]
        )

    shorter = load_of(
        rate=3.0, **{name: limit / factor for name, limit in given_limits.items()}
    )
    assert shorter.has_limits == asked.has_limits == bool(given_limits)
    kept, sooner, later = (asked.excess(outcome(by)) <= 1.0 for by in (1.0, 1.000001, 0.999999))  # fmt: skip
    if sooner == later:
        assert (shorter.excess(outcome(factor)) <= 1.0) == kept
        assert (asked.excess(outcome(factor)) * factor <= 1.0) == kept
