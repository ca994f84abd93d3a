"""Loads of plans for a rate: what is simulated of them, how the searches end, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import magicdec
from magicdec.api import request_of
from magicdec.counts import Z_90
from magicdec.errors import CapacityError, ConfigError
from magicdec.perfmodel.intervals import step_errors
from magicdec.perfmodel.rate import capacity
from magicdec.perfmodel.rate.layouts import served_layouts
from magicdec.perfmodel.rate.load import ENOUGH_REQUESTS, Load
from magicdec.perfmodel.rate.replica import PassLimit
from magicdec.perfmodel.rate.requests import Turns, drawn
from magicdec.perfmodel.rate.simulate import simulate
from magicdec.perfmodel.rate.trials import Trial, last_kept
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.step import step_terms
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.speculation import SamplingSpec
from magicdec.specs.workload import RequestShape, WorkloadSpec

CHAT: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "hardware": "h100-sxm-80gb",
    "tp": 1,
    "context": 2048,
    "gen_len": 100,
    "draft": "none",
}
ONE_PATCH = [HealthCheck.function_scoped_fixture]
MIX = WorkloadSpec(requests=(RequestShape(prompt_len=500, gen_len=60),))


def trial_of(**options: Any) -> Trial:
    model = load_model_spec("llama-3.1-8b")
    load = Load.of(request_of(**CHAT | options), model)
    return Trial(load=load, layout=served_layouts(load, model)[0])


def write_trace(path: Path, arrivals: list[float]) -> str:
    rows = "".join(f"{arrival!r},100,10\n" for arrival in arrivals)
    path.write_text("arrival,prompt,output\n" + rows)
    return str(path)


@given(
    low=st.integers(-50, 50),
    span=st.integers(0, 100),
    start=st.integers(0, 100),
    edge=st.integers(-60, 170),
    slope=st.sampled_from([0.0, 1e-3, 0.1, 3.0]),
    is_cliff=st.booleans(),
    known=st.sets(st.integers(-60, 170), max_size=4),
)
def test_the_last_number_that_is_kept_is_the_one_of_a_linear_scan(
    low: int,
    span: int,
    start: int,
    edge: int,
    slope: float,
    is_cliff: bool,
    known: set[int],
) -> None:
    """Whatever the excess rises by, or where it has a cliff instead; in few tries where it rises
    steadily."""
    high = low + span
    tries = []

    def excess(number: int) -> float:
        if number > edge and is_cliff:
            return math.inf
        return math.exp(slope * (number - edge - 0.5)) + (number > edge) * 1e-9

    def tried(number: int) -> float:
        assert low <= number <= high
        tries.append(number)
        return excess(number)

    found = last_kept(
        tried,
        start=min(low + start, high),
        low=low,
        high=high,
        known={number: excess(number) for number in known if low <= number <= high},
    )
    kept = [number for number in range(low, high + 1) if excess(number) <= 1.0]
    assert found == max(kept, default=low - 1)
    assert len(tries) == len(set(tries)) <= 18


@given(mine=st.integers(1, 9), more=st.integers(0, 40), count=st.integers(1, 200))
def test_requests_of_some_replicas_are_those_of_their_turns(
    mine: int, more: int, count: int
) -> None:
    """A constant rate of 1: each arrival's time is its number among those of all replicas."""
    turns = Turns(mine=mine, every=mine + more)
    places = turns.of(count * turns.every)
    np.testing.assert_array_equal(
        np.cumsum(turns.gaps(len(places)))[:count], places[:count] + 1.0
    )
    alone = drawn(count, rate=1.0, workload=MIX, burstiness=0.0, turns=turns)
    np.testing.assert_allclose(alone.arrival_s, places[:count] + 1.0)
    assert len(turns.evenly(1000)) == pytest.approx(1000 * turns.share, abs=1.0)


def test_a_few_replicas_stand_for_all() -> None:
    """16 replicas simulated in whole, and the few that a plan simulates of them: within the noise
    of as many requests.
    """
    trial = trial_of(rate=160.0)
    few = trial.at(160.0, 16)
    assert len(few.replicas) < 4
    every = simulate(
        trial.server,
        drawn(8000, rate=160.0, workload=trial.load.workload),
        replicas=16,
        warm_up=0.2,
    )
    assert few.tokens_per_s == pytest.approx(every.tokens_per_s, rel=0.1)
    assert few.goodput(None, None) == pytest.approx(160.0, rel=0.1)
    for share in (0.5, 0.95):
        assert np.quantile(few.e2e_s, share) == pytest.approx(
            np.quantile(every.e2e_s, share), rel=0.06
        )


@pytest.mark.parametrize("rate", [0.01, 3.0, 900.0])
@pytest.mark.parametrize("balance", ["round-robin", "least-loaded"])
@pytest.mark.parametrize("replicas", [1, 3, 4096])
def test_a_simulation_is_as_large_as_the_question_needs(
    rate: float, balance: str, replicas: int
) -> None:
    load = Load.of(
        request_of(**CHAT, rate=rate, balance=balance), load_model_spec("llama-3.1-8b")
    )
    requests = load.requests(rate, replicas)
    simulated = load.replicas(rate, replicas)
    assert len(requests) <= ENOUGH_REQUESTS
    per_replica = rate / replicas
    assert requests.rate == pytest.approx(per_replica * simulated, rel=0.25)
    assert load.request.balance == "round-robin" or simulated >= min(8, replicas)


@pytest.mark.usefixtures("few_requests")
@pytest.mark.parametrize(
    "arrivals",
    [
        [0.0, 1.0],
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        [0.0] * 199 + [1.0],
    ],
    ids=["two", "eight", "burst and one"],
)
def test_few_requests_have_an_answer_and_perhaps_no_highest_rate(
    arrivals: list[float], tmp_path: Path
) -> None:
    trace = write_trace(tmp_path / "trace.csv", arrivals)
    options = {name: CHAT[name] for name in ("model", "hardware", "tp", "draft")}
    traffic = magicdec.plan(**options, requests=trace).traffic
    assert traffic.best.num_replicas == 1
    highest = traffic.best.highest_rate_per_s
    assert highest is None or highest >= traffic.rate_per_s
    assert (highest is None) == any(
        "too few to exceed" in note for note in traffic.notes
    )


@pytest.mark.usefixtures("few_requests")
@pytest.mark.parametrize("gap", [0.0, 5e-324])
def test_requests_that_come_at_once_take_a_rate_and_arrive_at_it(
    gap: float, tmp_path: Path
) -> None:
    trace = write_trace(tmp_path / "trace.csv", [0.0] * 99 + [gap])
    options = {name: CHAT[name] for name in ("model", "hardware", "tp", "draft")}
    with pytest.raises(ConfigError, match=r"at one time only .* give --rate too"):
        magicdec.plan(**options, requests=trace)
    traffic = magicdec.plan(**options, requests=trace, rate=5.0).traffic
    assert traffic.rate_per_s == 5.0


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        (9.9e-7, "rate must be at least 1e-06"),
        (0.0, "rate must be above 0"),
        (1.1e6, "at most 1000000"),
    ],
)
def test_rates_that_nothing_can_be_simulated_at_are_refused(
    rate: float, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        magicdec.plan(**CHAT, rate=rate)


@pytest.mark.usefixtures("few_requests")
def test_far_more_than_all_devices_keep_is_refused_with_what_they_do() -> None:
    with pytest.raises(CapacityError, match=r"4096 devices .* keep up to \d"):
        magicdec.plan(**CHAT, rate=1e6)


@pytest.mark.usefixtures("few_requests")
def test_outputs_of_one_token_have_no_time_between_tokens() -> None:
    best = magicdec.plan(**CHAT | {"gen_len": 1}, rate=2.0).traffic.best
    assert best.tpot is None
    assert best.ttft is not None
    assert best.tpot_p95_low_s is None
    assert best.ttft_p95_low_s is not None


@pytest.mark.usefixtures("few_requests")
@pytest.mark.parametrize("limit", ["tpot_ms", "ttft_ms"])
def test_limits_on_means_hold_under_a_rate(limit: str) -> None:
    """The limit is less than what one device gives at this rate."""

    def mean(trial: Trial, replicas: int) -> float:
        outcome = trial.at(8.0, replicas)
        seconds = outcome.tpot_s if limit == "tpot_ms" else outcome.ttft_s
        return float(seconds.mean())

    free = trial_of(rate=8.0)
    assert free.fewest(64) == 1
    allowed = 0.9 * mean(free, 1)
    limited = trial_of(rate=8.0, **{limit: 1000.0 * allowed})
    replicas = limited.fewest(64)
    assert replicas is not None
    assert replicas > 1
    assert mean(limited, replicas) <= allowed < mean(limited, replicas - 1)


def test_work_beyond_its_bound_is_refused_in_one_line() -> None:
    trial = trial_of(rate=4.0)
    trial.load.work.left = 2000
    with pytest.raises(CapacityError, match="takes more than 4000000 passes"):
        trial.at(4.0, 1)
    bounded = PassLimit(10)
    for _ in range(10):
        bounded.spend()
    with pytest.raises(CapacityError):
        bounded.spend()


def test_the_error_of_a_rate_is_that_of_a_steps_time() -> None:
    """As intervals of steady plans: of kernels and engine, which for an MI355X is larger than the
    engine's alone.
    """
    model = load_model_spec("llama-3.1-70b")
    request = request_of(
        model="llama-3.1-70b",
        hardware="mi355x-288gb",
        tp=8,
        context=4096,
        gen_len=200,
        rate=2.0,
        draft="none",
    )
    (layout,) = served_layouts(Load.of(request, model), model)
    setup = Setup.of("llama-3.1-70b", "mi355x-288gb", "vllm", sampling=SamplingSpec())
    length = layout.row.context_len
    terms = step_terms(
        setup, batch=16, kv_len=length, draft_kv_len=length, gamma=0, tp_size=8
    )
    _, of_time = step_errors(setup, terms, 8)
    least, most = capacity.cost_factors(layout, 16.0)
    found = math.log(most) / Z_90
    # factors are whole steps of 2 %
    assert found == pytest.approx(float(np.ravel(of_time)[0]), abs=0.01)
    assert least == pytest.approx(1.0 / most, rel=0.01)
    assert found > 1.5 * setup.engine.error_for("mi355x-288gb", "llama-3.1-70b")


@pytest.mark.usefixtures("few_requests")
@pytest.mark.parametrize("tpot_ms", [None, 20.0])
def test_at_larger_costs_fewer_requests_and_more_devices(tpot_ms: float | None) -> None:
    """Without limits only the clock changes, so the rate falls by the costs' factor; the fewest
    devices are those whose highest rate reaches the load."""
    rate = 12.0
    trial = trial_of(rate=rate, p95_tpot_ms=tpot_ms) if tpot_ms else trial_of(rate=rate)
    replicas = trial.fewest(64)
    assert replicas is not None
    highest = {}
    for factor in (1.02**-10, 1.0, 1.02**10):
        highest[factor] = trial.highest_rate(replicas, costs=factor) or 0.0
        fewest = trial.fewest(64, costs=factor)
        assert fewest is not None
        assert trial.excess(rate, fewest, costs=factor) <= 1.0
        assert fewest == 1 or trial.excess(rate, fewest - 1, costs=factor) > 1.0
        assert (fewest <= replicas) == (highest[factor] >= rate)
    assert list(highest.values()) == sorted(highest.values(), reverse=True)
    if tpot_ms is None:
        for factor, found in highest.items():
            assert found * factor == pytest.approx(highest[1.0], rel=0.025)


@pytest.mark.usefixtures("few_requests")
@settings(max_examples=5, deadline=None, suppress_health_check=ONE_PATCH)
@given(
    rate=st.floats(0.5, 40.0),
    replicas=st.integers(1, 4),
    tpot_ms=st.none() | st.floats(7.0, 40.0),
)
def test_the_highest_rate_keeps_the_limits_and_a_higher_one_does_not(
    rate: float, replicas: int, tpot_ms: float | None
) -> None:
    """The planted fault of a search that stops early or walks past the edge shows here."""
    trial = trial_of(rate=rate, p95_tpot_ms=tpot_ms) if tpot_ms else trial_of(rate=rate)
    highest = trial.highest_rate(replicas)
    assert highest is not None
    if highest > 0.0:
        assert trial.excess(highest, replicas) <= 1.0
        assert trial.excess(highest * 1.02, replicas) > 1.0


def test_no_more_replicas_are_tried_than_one_simulation_holds() -> None:
    trial = trial_of(rate=15.0, context=512, gen_len=20)
    most = trial.most_replicas(4096)
    requests = len(trial.load.requests(15.0, most))
    assert trial.load.replicas(15.0, most) * requests <= 1_000_000
