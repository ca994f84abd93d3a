"""Laws that hold for every load under arrivals: conservation, the scale of time, Little's law, and a
queue with one server in closed form.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.perfmodel.acceptance import constant_profile
from magicdec.perfmodel.rate.costs import Costs
from magicdec.perfmodel.rate.replica import Replica
from magicdec.perfmodel.rate.requests import Requests, alike, drawn
from magicdec.perfmodel.rate.simulate import Server, SimulatedTimes, simulate
from magicdec.perfmodel.setup import Setup
from magicdec.schema.gamma_table import TableGamma
from magicdec.specs.engine import load_engine
from magicdec.specs.speculation import SpeculationSpec
from magicdec.specs.workload import RequestShape, WorkloadSpec

ENGINE = load_engine("vllm").with_constants(
    {
        "scheduler.steps_ahead": 0.0,
        "scheduler.request_latency_s": 0.0,
        "scheduler.prompt_token_latency_s": 0.0,
    }
)
"""vLLM without what lies outside of its iterations."""
ALONE = Setup.of("llama-3.1-8b", "h100-sxm-80gb", ENGINE)
EAGLE = Setup.of(
    "llama-3.1-8b",
    "h100-sxm-80gb",
    ENGINE,
    SpeculationSpec(draft="eagle3", draft_method="eagle3", gamma=3),
)
TABLE = TableGamma(
    batch_sizes=(1, 4, 16), context_lens=(100, 1000), gammas=((5, 3), (3, 2), (1, 0))
)


@st.composite
def loads(draw: st.DrawFn) -> tuple[Server, Requests, int, int]:
    """A server, with a small cache or a large one, its requests, replicas and a seed."""
    shapes = draw(
        st.lists(
            st.tuples(st.integers(20, 900), st.integers(1, 60)), min_size=1, max_size=3
        )
    )
    workload = WorkloadSpec(
        requests=tuple(
            RequestShape(prompt_len=prompt, gen_len=out) for prompt, out in shapes
        )
    )
    requests = drawn(
        draw(st.integers(1, 60)),
        rate=draw(st.sampled_from([1.0, 20.0, 300.0])),
        workload=workload,
        burstiness=draw(st.sampled_from([0.0, 1.0, 9.0])),
        cached_len=draw(st.sampled_from([0, 16])),
        seed=draw(st.integers(0, 99)),
    )
    is_drafted = draw(st.booleans())
    server = Server.of(
        EAGLE if is_drafted else ALONE,
        requests,
        acceptance=constant_profile(0.6) if is_drafted else None,
        policy=TABLE if is_drafted else None,
        max_sequences=draw(st.sampled_from([1, 3, 200])),
        max_tokens=draw(st.sampled_from([64, 512])),
    )
    longest = int((requests.prompt_len + requests.output_len).max()) + 8
    blocks = draw(st.sampled_from([-(-longest // 16) + 1, 400]))
    limits = replace(
        server.limits,
        num_blocks=max(blocks, -(-longest // 16) + 1),
        reserves_output=draw(st.booleans()),
    )
    return (
        replace(server, limits=limits),
        requests,
        draw(st.integers(1, 3)),
        draw(st.integers(0, 9)),
    )


@given(load=loads())
def test_every_request_ends_with_all_its_tokens_and_every_block_is_free_again(
    load: tuple[Server, Requests, int, int],
) -> None:
    server, requests, replicas, seed = load
    outcome = simulate(server, requests, replicas=replicas, seed=seed)
    of_replica = np.arange(len(requests)) % replicas
    for place, replica in enumerate(outcome.replicas):
        mine = of_replica == place
        assert np.array_equal(np.isnan(replica.last_s), ~mine)
        assert np.array_equal(
            np.array(replica.emitted)[mine], requests.output_len[mine]
        )
        assert replica.in_system == 0
        assert replica.total == 0
        assert replica._make_room(0) == server.limits.num_blocks
        for _, batch, waiting, used in replica.timeline:
            assert 0 <= used <= server.limits.num_blocks
            assert 0 < batch <= server.limits.max_sequences
            assert 0 <= waiting <= mine.sum()
    assert np.all(outcome.first_s > requests.arrival_s)
    assert np.all(outcome.last_s >= outcome.first_s)
    several = requests.output_len > 1
    assert np.all(outcome.last_s[several] > outcome.first_s[several])
    assert len(outcome.tpot_s) == several.sum()


def slower(costs: Costs, factor: float) -> Costs:
    return replace(
        costs,
        steps=lambda gamma, batch: factor * costs.steps(gamma, batch),
        linear=[factor * seconds for seconds in costs.linear],
        prompts=factor * costs.prompts,
        pass_overhead_s=factor * costs.pass_overhead_s,
        pass_least_s=factor * costs.pass_least_s,
        request_overhead_s=factor * costs.request_overhead_s,
        rows={},
        read={},
    )


@given(load=loads())
def test_costs_twice_as_large_are_arrivals_twice_as_fast_in_slower_time(
    load: tuple[Server, Requests, int, int],
) -> None:
    """Powers of two, so that floating point does the same."""
    server, requests, replicas, seed = load
    one = simulate(server, requests, replicas=replicas, seed=seed)
    late = replace(requests, arrival_s=2.0 * requests.arrival_s)
    slow = replace(server, costs=slower(server.costs, 2.0))
    two = simulate(slow, late, replicas=replicas, seed=seed)
    np.testing.assert_allclose(two.first_s, 2.0 * one.first_s, rtol=1e-9)
    np.testing.assert_allclose(two.last_s, 2.0 * one.last_s, rtol=1e-9)
    assert two.preemptions == one.preemptions
    assert two.tokens_per_s == pytest.approx(one.tokens_per_s / 2.0)
    assert two.is_overloaded == one.is_overloaded


def _one_at_a_time(load: float, count: int) -> tuple[SimulatedTimes, float]:
    """Equal prompts with one token each, one at a time, and the time that each takes."""
    one = alike(1, prompt_len=400, output_len=1)
    server = Server.of(ALONE, one, max_sequences=1)
    service = float(simulate(server, one).e2e_s[0])
    random = np.random.default_rng(5)
    requests = alike(count, prompt_len=400, output_len=1)
    requests.arrival_s[:] = np.cumsum(random.exponential(service / load, count))
    return simulate(server, requests), service


@pytest.mark.parametrize("load", [0.3, 0.9, 1.5])
def test_waits_of_equal_requests_follow_lindleys_recursion(load: float) -> None:
    """Each waits for what the one before it waited and took, less the gap between them."""
    outcome, service = _one_at_a_time(load, 500)
    gaps = np.diff(outcome.requests.arrival_s)
    waits = [0.0]
    for gap in gaps:
        waits.append(max(waits[-1] + service - gap, 0.0))
    np.testing.assert_allclose(outcome.ttft_s, np.array(waits) + service, rtol=1e-9)


def test_a_queue_of_equal_requests_waits_as_the_closed_form_says() -> None:
    """M/D/1: a mean wait of load / (2 (1 - load)) services; 20,000 draws err by some 5 %."""
    load = 0.6
    outcome, service = _one_at_a_time(load, 20_000)
    waited = float(outcome.ttft_s.mean()) - service
    assert waited == pytest.approx(load / (2.0 * (1.0 - load)) * service, rel=0.08)
    assert not outcome.is_overloaded


def test_a_queue_beyond_its_capacity_is_an_overload_and_serves_at_capacity() -> None:
    outcome, service = _one_at_a_time(1.5, 4000)
    assert outcome.is_overloaded
    assert outcome.tokens_per_s == pytest.approx(1.0 / service, rel=0.01)


@pytest.mark.parametrize("rate", [8.0, 14.0])
def test_requests_held_are_their_rate_times_their_stay(rate: float) -> None:
    """Little's law: batch and queue of the timeline, over time, against whole requests. The replica
    is never idle; requests that arrive or end within an iteration are seen after it.
    """
    workload = WorkloadSpec(requests=(RequestShape(prompt_len=500, gen_len=200),))
    requests = drawn(1500, rate=rate, workload=workload, seed=3)
    outcome = simulate(Server.of(ALONE, requests), requests)
    timeline = np.array(outcome.replicas[0].timeline)
    lasting = np.diff(timeline[:, 0], append=outcome.last_s.max())
    held = float(((timeline[:, 1] + timeline[:, 2]) * lasting).sum())
    assert held == pytest.approx(float(outcome.e2e_s.sum()), rel=0.03)


@pytest.fixture(scope="module")
def drafting() -> tuple[Requests, Server]:
    requests = alike(2, prompt_len=100, output_len=10)
    server = Server.of(EAGLE, requests, acceptance=constant_profile(0.6), policy=TABLE)
    return requests, server


@given(batch=st.integers(1, 40))
def test_gamma_while_running_is_the_tables_at_the_loads_length(
    drafting: tuple[Requests, Server], batch: int
) -> None:
    requests, server = drafting
    replica = Replica(
        requests,
        server.costs,
        server.limits,
        policy=server.policy,
        drafts=server.drafts,
    )
    replica.decoding = dict.fromkeys(range(batch))
    assert replica._gamma() == TABLE.choose(batch_size=batch, context_len=105.0)


@given(
    load=loads(),
    limits=st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 0.1)),
)
def test_an_outcomes_figures_are_those_of_its_requests(
    load: tuple[Server, Requests, int, int], limits: tuple[float, float]
) -> None:
    """Written out for each request: times, and what keeps the limits."""
    server, requests, replicas, seed = load
    outcome = simulate(server, requests, replicas=replicas, seed=seed, warm_up=0.2)
    skipped = len(requests) // 5
    arrival = requests.arrival_s
    kept = 0
    for number in range(skipped, len(requests)):
        place = number - skipped
        first = float(outcome.first_s[number])
        assert outcome.ttft_s[place] == pytest.approx(first - arrival[number])
        assert outcome.e2e_s[place] == pytest.approx(
            outcome.last_s[number] - arrival[number]
        )
        gaps = int(requests.output_len[number]) - 1
        between = (float(outcome.last_s[number]) - first) / gaps if gaps else 0.0
        kept += first - arrival[number] <= limits[0] and between <= limits[1]
    until = outcome.last_s[skipped:].max() if outcome.is_overloaded else arrival[-1]
    span = max(float(until - arrival[skipped]), 1e-12)
    assert outcome.goodput(*limits) == pytest.approx(kept / span)
    assert outcome.goodput(None, None) == pytest.approx(
        (len(requests) - skipped) / span
    )
    assert outcome.goodput(limits[0], None) >= outcome.goodput(*limits)


@given(growth=st.floats(-0.2, 0.4), count=st.integers(40, 400), base=st.integers(0, 5))
def test_an_overload_is_a_queue_that_grows_over_the_second_half(
    growth: float, count: int, base: int
) -> None:
    """Requests a second apart; each takes its share of `growth` longer than the one before it."""
    requests = alike(count, prompt_len=10, output_len=2)
    requests.arrival_s[:] = np.arange(count)
    waits = np.maximum(base + growth * np.arange(count), 0.01)
    ends = requests.arrival_s + waits
    outcome = SimulatedTimes(
        requests=requests, first_s=ends, last_s=ends + 0.005, replicas=[]
    )
    half = count // 2
    end = float(requests.arrival_s[-1])

    def present(at: float) -> int:
        return int(np.sum((requests.arrival_s <= at) & (outcome.last_s > at)))

    grown = present(end) - present(float(half))
    expected = grown > max(0.05 * (count - half), 3.0)
    assert outcome.is_overloaded == expected


@given(
    growth=st.floats(0.0, 0.4),
    count=st.integers(60, 400),
    spans=st.integers(1, 8),
)
def test_a_queue_that_grows_towards_the_middle_is_an_overload_of_a_load_that_changes(
    growth: float, count: int, spans: int
) -> None:
    """Requests a second apart, whose waits rise up to the middle and fall as fast."""
    requests = alike(count, prompt_len=10, output_len=2)
    requests.arrival_s[:] = np.arange(count)
    middle = np.arange(count) - count // 2
    ends = requests.arrival_s + np.maximum(growth * (count // 2 - np.abs(middle)), 0.01)
    edges = np.linspace(0.0, count - 1.0, spans + 1)
    steady = SimulatedTimes(
        requests=requests, first_s=ends, last_s=ends + 0.005, replicas=[]
    )
    changing = replace(steady, edges_s=edges)

    def present(at: float) -> int:
        return int(np.sum((requests.arrival_s <= at) & (ends > at)))

    grows = []
    for start, until in pairwise(edges.tolist()):
        arrived = np.sum((requests.arrival_s >= start) & (requests.arrival_s <= until))
        grows.append(present(until) - present(start) > max(0.05 * arrived, 3.0))
    assert not steady.is_overloaded
    assert changing.is_overloaded == any(grows)
    if growth > 0.25 and spans % 2 == 0:
        assert changing.is_overloaded


@given(load=loads(), share=st.floats(0.0, 1.2))
def test_requests_in_a_replica_are_those_that_came_and_have_not_ended(
    load: tuple[Server, Requests, int, int], share: float
) -> None:
    """At any time, on their way, in the queue, in prefill or decoding; a balancer chooses by it."""
    server, requests, _, seed = load
    found = server.finding(requests)
    replica = Replica(
        found,
        server.costs,
        server.limits,
        policy=server.policy,
        drafts=server.drafts,
        seed=seed,
    )
    until = share * float(simulate(server, requests, seed=seed).last_s.max())
    sent = requests.arrival_s <= until
    for number in np.flatnonzero(sent).tolist():
        replica.submit(number, float(requests.arrival_s[number]))
    assert replica.in_system == sent.sum()
    replica.run(until)
    ended = ~np.isnan(replica.last_s)
    assert not np.any(ended & ~sent)
    assert replica.in_system == sent.sum() - ended.sum()
    if ended.any() or not replica.decoding:
        return
    # a lone request's tokens follow from its steps
    chosen, _, tokens = replica._since_drawn()
    sizes = replica.context[chosen] + tokens + 1
    assert replica._held(0) == sum(-(-int(size) // 16) for size in sizes)
    assert replica.total == pytest.approx(int((sizes - 1).sum()), rel=0.2)


@given(
    count=st.integers(1, 40),
    replicas=st.integers(1, 5),
    gap_s=st.sampled_from([0.0, 1e-4, 9.0]),
)
def test_the_replica_with_fewest_requests_takes_the_next(
    count: int, replicas: int, gap_s: float
) -> None:
    """Equal requests at once are dealt evenly; the first replica takes all that come alone."""
    requests = alike(count, prompt_len=200, output_len=30)
    requests.arrival_s[:] = gap_s * np.arange(count)
    server = Server.of(ALONE, requests, max_sequences=2)
    outcome = simulate(server, requests, replicas=replicas, balance="least-loaded")
    dealt = [int(np.sum(~np.isnan(replica.last_s))) for replica in outcome.replicas]
    if gap_s > 1.0:
        assert dealt == [count] + [0] * (replicas - 1)
    else:
        assert max(dealt) - min(dealt) <= 1
    assert sum(dealt) == count
    whole = simulate(server, requests, replicas=replicas, of_replicas=3 * replicas)
    assert whole.share == pytest.approx(1.0 / 3.0)
    span = float(whole.last_s.max() - requests.arrival_s[0])
    assert whole.tokens_per_s == pytest.approx(3.0 * count * 30 / span)
    assert (
        whole.goodput(None, None)
        == pytest.approx(3.0 * count / max(float(np.ptp(requests.arrival_s)), 1e-12))
        or whole.is_overloaded
    )


@given(
    count=st.integers(1, 300),
    rate=st.floats(0.1, 50.0),
    factor=st.floats(0.2, 5.0),
    shift=st.floats(0.0, 1e4),
)
def test_a_rate_is_gaps_over_their_time_and_scales(
    count: int, rate: float, factor: float, shift: float
) -> None:
    requests = drawn(
        count,
        rate=rate,
        workload=WorkloadSpec(requests=(RequestShape(prompt_len=9, gen_len=4),)),
        cached_len=20,
    )
    assert requests.cached_len.tolist() == [8] * count
    late = replace(requests, arrival_s=requests.arrival_s + shift)
    if count == 1:
        assert late.rate == 0.0
        return
    gaps = np.diff(late.arrival_s)
    assert late.rate == pytest.approx(1.0 / gaps.mean())
    scaled = requests.at_rate(factor * requests.rate)
    assert scaled.rate == pytest.approx(factor * requests.rate)
    np.testing.assert_allclose(scaled.arrival_s, requests.arrival_s / factor)


def test_requests_that_grow_in_number_but_wait_no_longer_are_no_overload() -> None:
    """A second apart, ten seconds to each first token, and answers that take ever longer."""
    requests = alike(200, prompt_len=10, output_len=2)
    requests.arrival_s[:] = np.arange(200)
    first = requests.arrival_s + 10.5
    last = first + np.arange(200)
    outcome = SimulatedTimes(requests=requests, first_s=first, last_s=last, replicas=[])
    assert not outcome.is_overloaded
    grows = replace(outcome, first_s=last - 0.1)
    assert grows.is_overloaded


@given(prompt=st.integers(1, 300), output=st.integers(1, 100), is_drafted=st.booleans())
def test_a_request_alone_runs_in_the_blocks_that_it_needs(
    prompt: int, output: int, is_drafted: bool
) -> None:
    """With one block less it would never end; a draft's tokens need room too."""
    requests = alike(1, prompt_len=prompt, output_len=output)
    server = Server.of(
        EAGLE if is_drafted else ALONE,
        requests,
        acceptance=constant_profile(1.0) if is_drafted else None,
        policy=TABLE if is_drafted else None,
    )
    tokens = prompt + output
    if is_drafted and output > 1:
        tokens = max(prompt + 1 + step + 6 for step in range(0, output - 1, 6))
    blocks = max(-(-tokens // 16), -(-prompt // 16))
    limits = replace(server.limits, num_blocks=blocks)
    outcome = simulate(replace(server, limits=limits), requests)
    assert outcome.preemptions == 0
    assert outcome.replicas[0].emitted == [output]
    # a pass with the prompt, then one for each token, or for five drafts and one more
    if not is_drafted:
        assert outcome.replicas[0].iterations == output
    elif prompt + output < 300:  # of longer ones the table drafts fewer
        assert outcome.replicas[0].iterations == 1 + -(-(output - 1) // 6)
