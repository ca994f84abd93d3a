"""Where a load's parts meet: the end of a schedule, the instant until which a replica runs, the last token of a
pass, the lowest and the highest rate of a search."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.api import request_of
from magicdec.errors import CapacityError, ConfigError
from magicdec.perfmodel.plan.request import lengths_of
from magicdec.perfmodel.rate import capacity, layouts, load
from magicdec.perfmodel.rate.layouts import served_layouts
from magicdec.perfmodel.rate.load import Load
from magicdec.perfmodel.rate.replica import Replica
from magicdec.perfmodel.rate.requests import alike, read_requests
from magicdec.perfmodel.rate.simulate import Server, simulate
from magicdec.perfmodel.rate.trials import Trial
from magicdec.perfmodel.setup import Setup
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine

MODEL = load_model_spec("llama-3.1-8b")
CHAT: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "hardware": "h100-sxm-80gb",
    "tp": 1,
    "context": 2048,
    "gen_len": 50,
    "draft": "none",
}
ENGINE = load_engine("vllm").with_constants(
    {
        "scheduler.steps_ahead": 0.0,
        "scheduler.request_latency_s": 0.0,
        "scheduler.prompt_token_latency_s": 0.0,
    }
)
ALONE = Setup.of("llama-3.1-8b", "h100-sxm-80gb", ENGINE)


def load_of(**options: Any) -> Load:
    return Load.of(request_of(**CHAT | options), MODEL)


# Replicas


@settings(max_examples=8)
@given(
    count=st.integers(1, 12),
    gap_s=st.sampled_from([0.0, 0.004, 0.3]),
    share=st.floats(0.0, 1.1),
)
def test_a_replica_stops_before_what_begins_at_the_time_until_which_it_runs(
    count: int, gap_s: float, share: float
) -> None:
    """And goes on from there as if it had never stopped."""
    requests = alike(count, prompt_len=300, output_len=20)
    requests.arrival_s[:] = gap_s * np.arange(count)
    server = Server.of(ALONE, requests, max_sequences=3)
    whole = simulate(server, requests)

    replica = Replica(requests, server.costs, server.limits)
    for number, at in enumerate(requests.arrival_s.tolist()):
        replica.submit(number, at)
    until = share * float(whole.last_s.max())
    replica.run(until)
    assert all(moment[0] < max(until, 1e-300) for moment in replica.timeline)
    taken = replica.iterations
    replica.run(replica.now)
    assert replica.iterations == taken
    replica.run()
    assert replica.iterations == whole.replicas[0].iterations
    assert replica.last_s == pytest.approx(whole.last_s, rel=1e-9)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_prompt_begins_with_the_last_token_that_a_pass_has_left(left: int) -> None:
    """Three that decode, and a pass of so many tokens more: without one, the next prompt waits for
    an end."""
    requests = alike(4, prompt_len=3, output_len=40)
    server = Server.of(ALONE, requests, max_tokens=3 + left)
    limits = dataclasses.replace(server.limits, max_tokens=3 + left)
    outcome = simulate(dataclasses.replace(server, limits=limits), requests)
    first = np.sort(outcome.first_s)
    ends = float(outcome.last_s.min())
    assert (first[3] >= ends) == (left == 0)


# Searches


@given(
    edge=st.floats(-5.0, 5.0).map(lambda log: 10.0**log),
    analytic=st.floats(-1.0, 2.0).map(lambda log: 10.0**log),
    near=st.none() | st.floats(0.01, 100.0),
    costs=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_the_highest_rate_is_found_wherever_it_lies(
    edge: float, analytic: float, near: float | None, costs: float
) -> None:
    """Within one step of 2 %; none below a thousandth of the asked rate or of Little's, whichever is
    lower; and no end above four times the higher of them."""

    class Edge(Trial):
        def excess(self, rate: float, replicas: int, *, costs: float = 1.0) -> float:
            return rate * costs / edge * (1.0 - 1e-9)

    rate = 3.0
    layout: Any = SimpleNamespace(rate=analytic)
    trial = Edge(load=load_of(rate=rate), layout=layout)
    found = trial.highest_rate(1, costs=costs, near=near)
    highest = edge / costs
    little = analytic / costs
    lowest = 1e-3 * min(rate, little)
    top = 4.0 * max(rate, little)
    if highest < 0.98 * lowest:
        assert found == 0.0
    elif highest > 1.02 * top:
        assert found is None
    elif 1.03 * lowest < highest < 0.96 * top:
        assert found is not None
        assert found <= highest * (1.0 + 1e-6)
        assert found * 1.02 > highest * (1.0 - 1e-6)


@given(
    needed=st.integers(1, 60),
    analytic=st.floats(0.1, 30.0),
    most=st.integers(1, 64),
    near=st.none() | st.floats(0.5, 80.0),
)
def test_the_fewest_replicas_are_found_up_to_the_devices_that_there_are(
    needed: int, analytic: float, most: int, near: float | None
) -> None:
    """A number four times beyond them is not simulated at all."""

    class Enough(Trial):
        def excess(self, rate: float, replicas: int, *, costs: float = 1.0) -> float:
            return 0.5 if replicas >= needed else math.inf

    layout: Any = SimpleNamespace(rate=analytic, row=SimpleNamespace(num_gpus=1))
    trial = Enough(load=load_of(rate=3.0), layout=layout)
    found = trial.fewest(most, near=near)
    if (near or 3.0 / analytic) > 4.0 * most or needed > most:
        assert found is None
    else:
        assert found == needed
    at_the_edge = trial.fewest(most, near=4.0 * most)
    assert at_the_edge == (needed if needed <= most else None)


# Answers


@pytest.fixture(scope="module")
def trial() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(load, "MIN_REQUESTS", 60)
        patched.setattr(load, "MAX_REQUESTS", 60)
        asked = load_of(rate=6.0, p95_ttft_ms=400, p95_tpot_ms=20)
        yield Trial(load=asked, layout=served_layouts(asked, MODEL)[0])


def test_reasons_lead_from_the_steady_rate_to_the_loads_by_what_is_added(
    trial: Trial,
) -> None:
    """Regular arrivals under limits on means, arrivals that bunch, percentiles; each as the highest
    rate under it, and none where little lies between."""
    answer = capacity.SizedLayout(trial=trial, replicas=1)

    def highest(**options: Any) -> float:
        asked = load_of(rate=6.0, **options)
        own = Trial(load=asked, layout=trial.layout)
        return own.highest_rate(1) or 0.0

    means = {"ttft_ms": 400, "tpot_ms": 20}
    steady = answer.analytic
    found = capacity._reasons(answer, 0.5 * steady)
    assert [(reason.of, reason.rate_per_s) for reason in found] == [
        ("waves and prompts", steady),
        ("arrivals that bunch", pytest.approx(highest(**means, burstiness=0.0))),
        ("percentiles", pytest.approx(highest(**means))),
    ]
    for kept in (steady / 1.09, steady / 0.91, 0.0, None):
        assert capacity._reasons(answer, kept) == []
    assert capacity._reasons(answer, steady / 1.11)
    regular = Trial(
        load=load_of(rate=6.0, burstiness=0.0, **means), layout=trial.layout
    )
    of_regular = capacity.SizedLayout(trial=regular, replicas=1)
    assert len(capacity._reasons(of_regular, 0.5 * steady)) == 1


def test_less_than_one_sequence_costs_what_one_does(trial: Trial) -> None:
    """A replica that is idle most of the time has a mean batch below 1."""
    one = capacity.cost_factors(trial.layout, 1.0)
    for batch in (0.0, 0.01, 0.9):
        assert capacity.cost_factors(trial.layout, batch) == one


@pytest.mark.parametrize("count", [1, 2, 19, 400])
def test_a_percentile_of_each_time_is_that_of_its_requests(count: int) -> None:
    random = np.random.default_rng(count)
    seconds = random.exponential(1.0, count)
    ordered = sorted(seconds)
    place = 0.95 * (count - 1)
    low = ordered[math.floor(place)]
    high = ordered[math.ceil(place)]
    expected = low + (high - low) * (place - math.floor(place))
    assert capacity._p95(seconds) == pytest.approx(expected)
    found = capacity._percentiles(seconds)
    assert found is not None
    assert found.p95 == pytest.approx(expected)
    assert capacity._percentiles(seconds[:0]) is None


def test_a_load_is_simulated_with_the_draft_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the largest tp size of the devices that are given, under no limits; without a draft, no
    policy is followed."""
    monkeypatch.setattr(load, "MIN_REQUESTS", 20)
    monkeypatch.setattr(load, "MAX_REQUESTS", 20)
    options = CHAT | {"tp": None, "hardware": "2xh100-sxm-80gb", "rate": 3.0}
    drafted = options | {"draft": "ngram", "acceptance_rate": 0.7, "p95_ttft_ms": 1e-3}
    fast = capacity.simulated(request_of(**drafted), MODEL)
    slow = capacity.simulated(request_of(**options), MODEL)
    assert fast.replicas[0].policy is not None
    assert slow.replicas[0].policy is None
    assert len(fast.replicas) == 1
    assert float(np.median(fast.tpot_s)) < float(np.median(slow.tpot_s))
    for gamma in (0, 1):
        asked = request_of(**drafted | {"gamma": gamma})
        (replica,) = capacity.simulated(asked, MODEL).replicas
        assert (replica.policy is None) == (gamma == 0)
    single = options | {"hardware": "h100-sxm-80gb", "tp": 1}
    of_one = capacity.simulated(request_of(**single), MODEL)
    assert float(np.median(slow.tpot_s)) < float(np.median(of_one.tpot_s))


# Choices among layouts, by trials whose answers are known


class Told:
    """A trial that is told what it finds."""

    def __init__(self, load: Load, layout: Any) -> None:
        self.load = load
        self.layout = layout

    def most_replicas(self, most_devices: int) -> int:
        return int(most_devices // self.layout.row.num_gpus)

    def highest_rate(self, replicas: int) -> float | None:
        return self.layout.highest * replicas if self.layout.highest else None

    def excess(self, rate: float, replicas: int) -> float:
        return rate / (self.layout.highest * replicas or 1e9)

    def fewest(self, most_devices: int) -> int | None:
        needed = self.layout.needed
        return needed if needed * self.layout.row.num_gpus <= most_devices else None


def told_layout(num_gpus: int, rate: float, highest: float, needed: int) -> Any:
    row = SimpleNamespace(num_gpus=num_gpus, layout=SimpleNamespace(label="tp 1"))
    return SimpleNamespace(row=row, rate=rate, highest=highest, needed=needed)


told = st.builds(
    told_layout,
    st.integers(1, 8),
    st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0]),
    st.sampled_from([0.0, 0.4, 1.0, 2.5]),
    st.integers(1, 12),
)


@given(layouts=st.lists(told, max_size=5), given_devices=st.integers(1, 30))
def test_too_few_devices_take_the_layout_that_keeps_the_highest_rate_on_them(
    layouts: list[Any], given_devices: int
) -> None:
    asked = load_of(rate=50.0)
    highest = [
        each.highest * (given_devices // each.row.num_gpus) if each.rate else 0.0
        for each in layouts
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(capacity, "Trial", Told)
        if max(highest, default=0.0) == 0.0:
            for limited, words in (
                (asked, "nothing keeps up at 50 requests/s"),
                (load_of(rate=50.0, p95_ttft_ms=9), "nothing keeps the limits at 50"),
            ):
                with pytest.raises(CapacityError, match=words):
                    capacity._keeping_most(limited, layouts, given_devices)
            return
        best = capacity._keeping_most(asked, layouts, given_devices)
    assert best.layout is layouts[highest.index(max(highest))]
    assert best.replicas == given_devices // best.layout.row.num_gpus
    refused = str(capacity._too_much(best))
    assert f"{best.num_gpus} devices do not keep 50 requests/s" in refused
    assert f"{best.replicas} x tp 1 keep up to {max(highest):.2g}" in refused


@given(layouts=st.lists(told.filter(lambda each: each.rate > 0.0), max_size=5))
def test_the_layout_with_the_fewest_devices_is_found_near_the_analytic_answer(
    layouts: list[Any],
) -> None:
    """Of those within half as many devices more as the fewest of Little's law, by asking each; of as
    many devices one that keeps the highest rate, within a step."""
    asked = load_of(rate=5.0)
    messages: list[Any] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(capacity, "Trial", Told)
        found = capacity._fewest(asked, layouts, 60, messages.append)
    assert (messages[0].done, messages[0].total >= 1) == (0, True)
    assert all(0 <= each.done <= each.total for each in messages)
    analytic = [each.row.num_gpus * math.ceil(5.0 / each.rate) for each in layouts]
    worths = [
        (each.needed * each.row.num_gpus, -(each.highest * each.needed or math.inf))
        for each, devices in zip(layouts, analytic, strict=True)
        if devices <= 1.5 * min(analytic) and each.needed * each.row.num_gpus <= 60
    ]
    if not worths:
        assert found is None
        return
    assert found is not None
    fewest, negative = min(worths)
    highest = found.layout.highest * found.replicas or math.inf
    assert found.num_gpus == fewest
    assert highest >= -negative / 1.02


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.25])
def test_other_costs_move_the_rate_and_the_devices(trial: Trial, factor: float) -> None:
    """As the searches at those costs have it; half of the work that is allowed is left for them."""
    answer = capacity.SizedLayout(trial=trial, replicas=2)
    highest = trial.highest_rate(2)
    found = capacity._at_costs(answer, factor, highest)
    assert found.rate == pytest.approx(trial.highest_rate(2, costs=factor))
    fewest = trial.fewest(4096, costs=factor)
    assert fewest is not None
    assert found.num_gpus == fewest * trial.layout.row.num_gpus
    work = trial.load.work
    left = work.left
    try:
        work.left = math.ceil(work.most / 2) - 1
        assert capacity._at_costs(answer, factor, highest) == capacity._AtCosts()
        work.left = math.ceil(work.most / 2)
        assert capacity._at_costs(answer, factor, highest) == found
    finally:
        work.left = left


def test_a_full_answer_is_between_its_costs(trial: Trial) -> None:
    answer = capacity.SizedLayout(trial=trial, replicas=1)
    point = capacity._full_point(answer, explains=True)
    highest = point.highest_rate_per_s
    assert highest == trial.highest_rate(1)
    assert point.highest_rate_low_per_s <= highest <= point.highest_rate_high_per_s
    assert point.num_gpus_low <= point.num_gpus_high
    assert point.ttft_p95_low_s < point.ttft.p95 < point.ttft_p95_high_s
    assert point.tpot_p95_low_s < point.tpot.p95 < point.tpot_p95_high_s


def test_an_overload_has_neither_percentiles_nor_their_ends(trial: Trial) -> None:
    far = capacity.SizedLayout(
        trial=Trial(load=load_of(rate=900.0), layout=trial.layout), replicas=1
    )
    beyond = capacity._full_point(far, explains=True)
    assert beyond.overloaded
    assert beyond.ttft_p95_low_s is beyond.ttft_p95_high_s is beyond.ttft is None


# What is said of a request


@pytest.mark.parametrize("place", [1, 2, 5])
def test_a_request_that_is_too_long_is_named_by_its_place(
    place: int, tmp_path: Path
) -> None:
    """By prompt and output together, against the model and against the cache."""
    path = tmp_path / "trace.csv"
    rows = [f"{n},{5000 - n},{10 + n}" for n in range(1, 6)]
    rows[place - 1] = f"{place},131000,73"
    path.write_text("\n".join(["arrival,prompt,output", *rows]))
    asked = request_of(
        model="llama-3.1-8b", hardware="h100-sxm-80gb", draft="none", requests=path
    )
    with pytest.raises(ConfigError, match=f"request {place} of .* has 131073 tokens"):
        Load.of(asked, MODEL)
    requests = alike(5, prompt_len=100, output_len=9)
    requests.prompt_len[place - 1] = 10**8
    requests.output_len[-1] += 1
    with pytest.raises(CapacityError, match=rf"request {place} \(100000000 \+ "):
        Server.of(ALONE, requests)
    rows = [f"{n},50,10" for n in (3, 4, 9, 7, 8)]
    path.write_text("\n".join(["arrival,prompt,output", *rows]))
    with pytest.raises(ConfigError, match=r":5: arrives at 7, before .* \(9\)"):
        read_requests(path)


def test_shares_of_a_curve_rise_through_the_asked_rate_without_a_gap() -> None:
    shares = capacity.SHARES
    assert 1.0 in shares
    assert 0.0 < shares[0] < 0.5
    assert 1.5 < shares[-1] < 2.0
    for low, high in pairwise(shares):
        assert low < high <= 2.0 * low


@given(
    kept=st.lists(
        st.tuples(st.integers(1, 8), st.integers(1, 6)), min_size=1, max_size=2
    ),
)
def test_curves_are_of_each_layout_on_the_devices_of_the_best(
    kept: list[tuple[int, int]],
) -> None:
    asked = load_of(rate=6.0)
    answers = [
        capacity.SizedLayout(
            trial=Told(asked, told_layout(num_gpus, 1.0, 1.0, 1)),  # type: ignore[arg-type]
            replicas=replicas,
        )
        for num_gpus, replicas in kept
    ]
    for answer in answers:
        answer.layout.option = None  # type: ignore[misc]
    best = answers[-1]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(capacity, "_in_parallel", lambda call, jobs, *_: jobs)
        jobs = capacity._curves(answers, best, lambda _: None)
    expected = [
        (answer.trial, max(best.num_gpus // answer.layout.row.num_gpus, 1), share * 6.0)
        for answer in answers
        for share in capacity.SHARES
    ]
    assert jobs == expected


@pytest.mark.parametrize("count", [0, 1, 3])
def test_jobs_are_done_in_order_and_their_progress_is_said(count: int) -> None:
    messages: list[Any] = []
    jobs = [(2, number) for number in range(count)]
    assert capacity._in_parallel(pow, jobs, messages.append, "powers") == [
        2**number for number in range(count)
    ]
    assert [(each.done, each.total) for each in messages] == [
        (0, max(count, 1)),
        *[(done, count) for done in range(1, count + 1)],
    ]


@given(
    devices=st.integers(0, 4096),
    num_gpus=st.integers(1, 8),
    each=st.integers(1, 40_000),
    shown=st.integers(1, 64),
)
def test_as_many_replicas_as_one_simulation_holds(
    devices: int, num_gpus: int, each: int, shown: int
) -> None:
    """A million times of requests; halves of what the devices hold are tried."""
    asked: Any = SimpleNamespace(
        rate=6.0,
        requests=lambda rate, replicas: range(each * replicas),
        replicas=lambda rate, replicas: min(shown, replicas),
    )
    layout: Any = SimpleNamespace(row=SimpleNamespace(num_gpus=num_gpus))
    found = Trial(load=asked, layout=layout).most_replicas(devices)
    tried = [devices // num_gpus // 2**halves for halves in range(13)]
    fitting = [n for n in tried if n <= 1 or each * n * min(shown, n) <= 1_000_000]
    assert found == fitting[0]


def test_a_rate_is_simulated_once_whatever_its_last_bit(trial: Trial) -> None:
    once = trial.at(6.0, 1)
    assert trial.at(math.nextafter(6.0, 7.0), 1) is once
    assert trial.at(6.000001, 1) is not once
    assert trial.at(6.0, 1, seed=1) is not once


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1),
        ({"hardware": "4xh100-sxm-80gb"}, 4),
        ({"hardware": "4xh100-sxm-80gb", "pp": 1}, 4),
        ({"hardware": "4xh100-sxm-80gb", "pp": 2}, None),
        ({"hardware": "4xh100-sxm-80gb", "ep": 2}, None),
        ({"hardware": "4xh100-sxm-80gb", "dp_attention": True}, None),
        ({"tp": 2}, None),
    ],
)
def test_layouts_are_searched_over_a_node_where_nothing_is_given(
    options: dict[str, Any], expected: int | None
) -> None:
    asked = request_of(**CHAT | {"tp": None, "rate": 6.0} | options)
    (lengths,) = lengths_of(asked)
    assert layouts._node(asked, MODEL, lengths) == expected
    if not {"ep", "dp_attention"} & set(options):  # this model has no experts
        cases = layouts._cases(Load.of(asked, MODEL), MODEL, widest=False)
        assert all(case.searches_batch and len(case.tp_sizes) == 1 for case in cases)
        (largest,) = layouts._cases(Load.of(asked, MODEL), MODEL, widest=True)
        sizes = [case.tp_sizes[0] for case in cases if case.setup(None).spread.pp == 1]
        if options.get("pp") == 2:
            assert largest.tp_sizes == (2,)
        elif expected is not None:
            assert sizes == [size for size in (1, 2, 4) if size <= expected]
            assert largest.tp_sizes == (expected,)
        elif "tp" in options:
            assert sizes == [2]
