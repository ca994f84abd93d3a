"""What an answer for a rate says of its simulations, written out request by request and instant by instant; which
layouts are worth trying; how large a simulation is."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise, takewhile
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.api import request_of
from magicdec.perfmodel.rate import capacity, load
from magicdec.perfmodel.rate.layouts import served_layouts
from magicdec.perfmodel.rate.load import Load
from magicdec.perfmodel.rate.requests import alike
from magicdec.perfmodel.rate.simulate import SimulatedTimes
from magicdec.perfmodel.rate.trials import Trial
from magicdec.specs.catalog import load_model_spec

MODEL = load_model_spec("llama-3.1-8b")
CHAT: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "hardware": "h100-sxm-80gb",
    "tp": 1,
    "context": 2048,
    "gen_len": 50,
}
FEW = 60
"""Requests of a simulation here."""


def load_of(**options: Any) -> Load:
    return Load.of(request_of(**CHAT | {"draft": "none"} | options), MODEL)


def waiting(seconds: list[float], *, last_s: float = 0.0) -> SimulatedTimes:
    """Requests that come far apart, and wait so long for their first token."""
    requests = alike(len(seconds), prompt_len=10, output_len=2)
    requests.arrival_s[:] = 1000.0 * np.arange(len(seconds))
    first_s = requests.arrival_s + np.array(seconds)
    return SimulatedTimes(
        requests=requests, first_s=first_s, last_s=first_s + last_s, replicas=[]
    )


# Means, moments and intervals

steps = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 50)), max_size=8)


@given(replicas=st.lists(steps, min_size=1, max_size=3))
def test_a_mean_over_time_is_that_of_every_instant(
    replicas: list[list[tuple[int, int]]],
) -> None:
    """Of whole seconds, in each of which a replica has one value; the last moment lasts none."""
    timelines = []
    means = []
    for moments in replicas:
        timeline = []
        instants: list[int] = []
        for lasting, value in moments:
            timeline.append((float(len(instants)), 1, value, 2))
            instants += [value] * lasting
        timelines.append(timeline)
        if len(moments) > 1:
            means.append(statistics.fmean(instants[: -moments[-1][0]]))
    expected = statistics.fmean(means) if means else 0.0
    assert capacity._mean(timelines, 2) == pytest.approx(expected)


times = st.floats(0.01, 50.0)


@given(
    seeds=st.lists(times, min_size=3, max_size=3),
    ends=st.tuples(times, times),
    least=st.floats(0.5, 1.0),
    most=st.floats(1.0, 2.0),
    is_too_much=st.booleans(),
)
def test_an_interval_adds_chance_and_costs_as_independent_errors(
    seeds: list[float],
    ends: tuple[float, float],
    least: float,
    most: float,
    is_too_much: bool,
) -> None:
    """Of 21 waits the 20th is the 95th percentile: one in 20 is longer."""

    def outcome(p95: float, last_s: float = 0.0) -> SimulatedTimes:
        return waiting([0.5 * p95] * 12 + [p95] * 8 + [2.0 * p95], last_s=last_s)

    repeats = capacity._Repeats(
        seeds=[outcome(p95) for p95 in seeds],
        cheap=outcome(ends[0]),
        dear=outcome(ends[1], last_s=1e9 if is_too_much else 0.0),
        least=least,
        most=most,
    )
    if is_too_much:
        repeats.dear.first_s[:] = 1e9
    band = repeats.band(lambda each: each.ttft_s)
    chance = 1.6448536 * statistics.stdev(seeds)
    cheaper = seeds[0] - least * ends[0]
    low = seeds[0] - math.sqrt(cheaper**2 + chance**2)
    if low <= 0.0:  # no wait is nothing
        low = min(least * ends[0], *seeds)
    assert band.low == pytest.approx(low, rel=1e-5, abs=1e-6)
    if is_too_much:
        assert band.high is None
        return
    dearer = most * ends[1] - seeds[0]
    high = seeds[0] + math.sqrt(dearer**2 + chance**2)
    assert band.high == pytest.approx(high, rel=1e-5)
    nothing = repeats.band(lambda _: np.empty(0))
    assert (nothing.low, nothing.high) == (None, None)


# Which layouts are tried


def kept(num_gpus: int, rate: float, replicas: int, highest: float) -> Any:
    """An answer whose replicas keep so many requests per second together."""
    row = SimpleNamespace(num_gpus=num_gpus)
    trial: Any = SimpleNamespace(
        layout=SimpleNamespace(row=row, rate=rate),
        highest_rate=lambda _: highest,
        excess=lambda rate, _: rate / highest,
    )
    return capacity.SizedLayout(trial=trial, replicas=replicas)


@given(
    answers=st.lists(
        st.builds(
            kept,
            st.integers(1, 4),
            st.floats(0.1, 9.0),
            st.integers(1, 4),
            st.floats(1.0, 9.0),
        ),
        max_size=6,
    )
)
def test_the_best_has_the_fewest_devices_and_of_them_keeps_the_highest_rate(
    answers: list[Any],
) -> None:
    """Within one step of searched rates; of those that keep about as much, the analytic answer's."""
    best = capacity._best_of(answers)
    if not answers:
        assert best is None
        return
    assert best is not None
    fewest = min(answer.num_gpus for answer in answers)
    assert best.num_gpus == fewest
    rivals = [answer for answer in answers if answer.num_gpus == fewest]
    most = max(answer.trial.highest_rate(0) for answer in rivals)
    assert best.trial.highest_rate(0) >= most / 1.02


# A point of the answer


@pytest.fixture(scope="module", params=["none", "eagle3"])
def trial(request: pytest.FixtureRequest) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(load, "MIN_REQUESTS", FEW)
        patched.setattr(load, "MAX_REQUESTS", FEW)
        asked = load_of(
            hardware="h100-sxm-80gb=3",
            draft=request.param,
            rate=6.0,
            p95_ttft_ms=400,
            p95_tpot_ms=20,
        )
        layout = served_layouts(asked, MODEL)[-1]
        assert (layout.option is None) == (request.param == "none")
        yield Trial(load=asked, layout=layout)


@pytest.mark.parametrize(("rate", "replicas"), [(6.0, 1), (6.0, 2), (900.0, 1)])
def test_a_point_says_what_its_simulation_gives(
    trial: Trial, rate: float, replicas: int
) -> None:
    outcome = trial.at(rate, replicas)
    point = capacity._point(trial, replicas, rate)
    row = trial.layout.row
    assert (point.draft, point.policy) == (row.draft, trial.layout.policy_name)
    assert (point.num_replicas, point.rate_per_s) == (replicas, rate)
    assert point.num_gpus == row.num_gpus * replicas
    first = int(0.1 * FEW)
    arrival = outcome.requests.arrival_s
    ttft = [float(outcome.first_s[at] - arrival[at]) for at in range(first, FEW)]
    tpot = [
        float(outcome.last_s[at] - outcome.first_s[at]) / 49 for at in range(first, FEW)
    ]
    until = float(outcome.last_s[first:].max()) if point.overloaded else arrival[-1]
    good = sum(
        one <= 0.4 and other <= 0.02 for one, other in zip(ttft, tpot, strict=True)
    )
    assert point.goodput_per_s == pytest.approx(good / (until - arrival[first]))
    whole_s = float(outcome.last_s.max() - arrival[0])
    assert point.output_tokens_per_s == pytest.approx(50 * FEW / whole_s)
    batches, held = [], []
    for one in outcome.replicas:
        lasting = [then[0] - now[0] for now, then in pairwise(one.timeline)]
        span = sum(lasting)
        of_time = list(zip(lasting, one.timeline, strict=False))
        batches.append(sum(last * moment[1] for last, moment in of_time) / span)
        held.append(sum(last * moment[3] for last, moment in of_time) / span)
    assert point.mean_batch == pytest.approx(statistics.fmean(batches), rel=1e-6)
    blocks = trial.server.limits.num_blocks
    assert point.kv_share == pytest.approx(statistics.fmean(held) / blocks, rel=1e-6)
    price = trial.layout.case.hardware.price_per_hour_usd
    assert price
    cost = point.cost_per_million_tokens_usd
    assert cost is not None
    millions_per_hour = point.output_tokens_per_s * 3600.0 / 1e6
    assert cost * millions_per_hour == pytest.approx(price * point.num_gpus)
    is_kept = np.quantile(ttft, 0.95) <= 0.4 and np.quantile(tpot, 0.95) <= 0.02
    assert point.within_limits == (is_kept and not point.overloaded)
    assert (point.ttft is None) == point.overloaded
    if point.ttft is not None:
        assert point.ttft.mean == pytest.approx(statistics.fmean(ttft))
        assert point.ttft.p95 == pytest.approx(np.quantile(ttft, 0.95))
        assert point.tpot is not None
        assert point.tpot.p50 == pytest.approx(statistics.median(tpot))
    assert point.analytic_rate_per_s == pytest.approx(trial.layout.rate * replicas)


@given(gains=st.lists(st.sampled_from([0.0, 0.7, 1.0, 1.01, 1.02, 1.5, 2.0]), min_size=1, max_size=5))  # fmt: skip
def test_a_policy_pays_from_one_rate_up_to_another(gains: list[float]) -> None:
    """By a hundredth or more: the first stretch is told; what it gains at higher rates again is not."""
    rates = [float(2**number) for number in range(len(gains))]
    said = capacity._paying(list(zip(rates, gains, strict=True)))
    of_rates = list(zip(rates, gains, strict=True))
    idle = list(takewhile(lambda pair: pair[1] < 1.01, of_rates))
    paying = list(takewhile(lambda pair: pair[1] >= 1.01, of_rates[len(idle) :]))
    after = of_rates[len(idle) + len(paying) :]
    if not paying:
        assert said == "speculation does not pay at 1 requests/s, nor above"
        return
    expected = ""
    if idle:
        expected = f"speculation does not pay at {idle[-1][0]:g} requests/s; "
    expected += f"the median request is {paying[0][1]:.2f} times as fast at {paying[0][0]:g} requests/s"
    if len(paying) > 1:
        expected += f", {paying[-1][1]:.2f} times at {paying[-1][0]:g}"
    if after:
        expected += f", and it stops paying below {after[0][0]:g}"
    assert said == expected


def test_costs_at_both_ends_are_those_of_a_step_and_of_prompts(trial: Trial) -> None:
    """The row's own interval of a token, and the step's of prompts, by their parts of a request: wider than a step's
    error alone only by acceptance, and to the nearest 2 %."""
    row = trial.layout.row
    assert row.requests is not None
    least, most = capacity.cost_factors(trial.layout, row.batch_size)
    share = row.requests.prefill_share
    tokens = (
        row.decoding.tpot_low_s / row.tpot_s,
        row.decoding.tpot_high_s / row.tpot_s,
    )
    prompts = ((least - (1.0 - share) * tokens[0]) / share,
               (most - (1.0 - share) * tokens[1]) / share)  # fmt: skip
    assert tokens[0] < least * 1.02
    assert most / 1.02 < tokens[1]
    assert least < 1.0 < most
    assert prompts[0] * prompts[1] == pytest.approx(1.0, abs=0.06 / share)
    for factor in (least, most):
        whole_steps = math.log(factor) / math.log(1.02)
        assert whole_steps == pytest.approx(round(whole_steps), abs=1e-6)


def test_a_note_warns_where_the_limit_lies_inside_the_interval(trial: Trial) -> None:
    point = capacity._point(trial, 1, 6.0)
    best = capacity.SizedLayout(trial=trial, replicas=1)

    def notes(high_s: float | None, highest: float | None = 7.0) -> str:
        changed = msgspec.structs.replace(
            point, ttft_p95_high_s=high_s, highest_rate_per_s=highest
        )
        return " ".join(capacity._notes(best, changed))

    assert notes(0.4) == ""
    assert "p95 of TTFT may reach 401 ms" in notes(0.401)
    assert "plan for some room" in notes(None)
    assert "too few to exceed the limits" in notes(0.1, None)
