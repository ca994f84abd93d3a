"""Servers under arrivals: conservation, agreement with `predict` and with the closed loop, and a scheduler written out
token by token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from magicdec.errors import CapacityError, ConfigError
from magicdec.perfmodel.acceptance import (
    AcceptanceProfile,
    MeasuredProfile,
    constant_profile,
)
from magicdec.perfmodel.acceptance.law import Law
from magicdec.perfmodel.rate.costs import NUM_CONTEXTS, nodes
from magicdec.perfmodel.rate.requests import (
    Requests,
    alike,
    drawn,
    read_requests,
)
from magicdec.perfmodel.rate.simulate import (
    Server,
    SimulatedTimes,
    simulate,
    simulate_closed,
)
from magicdec.perfmodel.serving import largest_active, serving_time, whole_requests
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import predict
from magicdec.perfmodel.step import idle_step_s
from magicdec.schema.gamma_table import TableGamma
from magicdec.specs.engine import load_engine
from magicdec.specs.parallel import Parallelism
from magicdec.specs.speculation import SpeculationSpec
from magicdec.specs.workload import RequestShape, WorkloadSpec

MIX = WorkloadSpec(
    requests=(
        RequestShape(prompt_len=600, gen_len=80),
        RequestShape(prompt_len=90, gen_len=200, weight=2.0),
    )
)
PROMPT_ENGINE = load_engine("vllm").with_constants(
    {
        "scheduler.steps_ahead": 0.0,
        "scheduler.request_latency_s": 0.0,
        "scheduler.prompt_token_latency_s": 0.0,
    }
)
"""vLLM without what lies outside of its iterations."""
AUTOREGRESSIVE = Setup.of("llama-3.1-8b", "h100-sxm-80gb", PROMPT_ENGINE)
EAGLE = Setup.of(
    "llama-3.1-8b",
    "h100-sxm-80gb",
    PROMPT_ENGINE,
    SpeculationSpec(draft="eagle3", draft_method="eagle3", gamma=3),
)


def fixed(gamma: int) -> TableGamma:
    return TableGamma(batch_sizes=(1,), context_lens=(1,), gammas=((gamma,),))


def eagle(
    requests: Requests,
    *,
    rate: float = 0.7,
    policy: TableGamma | None = None,
    **limits: int,
) -> Server:
    return Server.of(
        EAGLE,
        requests,
        acceptance=constant_profile(rate),
        policy=policy or fixed(3),
        **limits,
    )


def small(server: Server, blocks: int) -> Server:
    """The server with so small a cache."""
    return replace(server, limits=replace(server.limits, num_blocks=blocks))


def check_conserved(outcome: SimulatedTimes) -> None:
    for one in outcome.replicas:
        assert not one.in_system
        assert one._make_room(0) == one.limits.num_blocks
        assert min(waiting for _, _, waiting, _ in one.timeline) >= 0
        assert all(0 <= used <= one.limits.num_blocks for *_, used in one.timeline)
    emitted = sum(
        np.where(np.isnan(one.last_s), 0, one.emitted) for one in outcome.replicas
    )
    np.testing.assert_array_equal(emitted, outcome.requests.output_len)
    assert np.all(outcome.first_s <= outcome.last_s)
    assert np.all(outcome.first_s > outcome.requests.arrival_s)


@pytest.mark.parametrize(("setup", "gamma", "budget", "profile"), [
    (AUTOREGRESSIVE, 0, None, None), (EAGLE, 3, None, constant_profile(0.7)), (EAGLE, 0, None, constant_profile(0.7)),
    (Setup.of("llama-3.1-8b", "h100-sxm-80gb", "vllm",
              SpeculationSpec(draft="self", draft_method="streamingllm", draft_budget=512, gamma=2)),
     2, 512, constant_profile(0.8)),
])  # fmt: skip
def test_tables_are_predictions_within_half_a_percent(
    setup: Setup, gamma: int, budget: int | None, profile: AcceptanceProfile | None
) -> None:
    requests = drawn(50, rate=1.0, workload=WorkloadSpec(requests=(
        RequestShape(prompt_len=100, gen_len=50), RequestShape(prompt_len=30_000, gen_len=2000))))  # fmt: skip
    server = Server.of(
        setup,
        requests,
        acceptance=profile,
        policy=fixed(gamma) if profile else None,
        budget=budget,
    )
    random = np.random.default_rng(3)
    batch = random.integers(1, server.limits.max_sequences + 1, 200)
    context = np.round(np.exp(random.uniform(np.log(101), np.log(32_000), 200)))
    if gamma == 0 and profile is not None:
        exact = idle_step_s(
            setup, batch=batch, kv_len=context, draft_kv_len=context, tp_size=1
        )
    else:
        exact = predict(
            setup,
            profile,
            Points(batch=batch, context=context, budget=budget, gamma=gamma),
        ).step_s
    found = [
        server.costs.step_s(gamma, int(n), float(c))
        for n, c in zip(batch, context, strict=True)
    ]
    assert np.max(np.abs(np.array(found) / exact - 1.0)) < 0.005


def test_one_request_alone_takes_what_predict_says() -> None:
    prompt, output = 500, 40
    outcome = simulate(
        Server.of(
            AUTOREGRESSIVE, requests := alike(1, prompt_len=prompt, output_len=output)
        ),
        requests,
    )
    steps = predict(
        AUTOREGRESSIVE, None, Points(batch=1, context=prompt + np.arange(1.0, output))
    ).step_s
    assert outcome.last_s[0] - outcome.first_s[0] == pytest.approx(
        float(steps.sum()), rel=1e-9
    )
    wholly = constant_profile(1.0)
    outcome = simulate(eagle(requests, rate=1.0), requests)
    steps = predict(
        EAGLE,
        wholly,
        Points(batch=1, context=prompt + np.arange(1.0, output, 4.0), gamma=3),
    ).step_s
    assert outcome.last_s[0] - outcome.first_s[0] == pytest.approx(
        float(steps.sum()), rel=1e-9
    )


@pytest.mark.parametrize(("prompt", "output", "users"), [
    (1024, 512, 8), (1024, 512, 64), (4096, 256, 24), (128, 1024, 200),
    (32_768, 256, 4), (32_768, 256, 12), (32_768, 1024, 24),
])  # fmt: skip
def test_many_equal_requests_in_a_closed_loop_are_the_serving_model(
    prompt: int, output: int, users: int
) -> None:
    """Throughput and the time between tokens; with drafts, tokens per second."""
    requests = alike(8 * users, prompt_len=prompt, output_len=output)
    told = serving_time(
        AUTOREGRESSIVE, concurrency=users, prompt_len=prompt, output_len=output
    )
    outcome = simulate_closed(
        Server.of(AUTOREGRESSIVE, requests), requests, users=users
    )
    check_conserved(outcome)
    assert outcome.tokens_per_s == pytest.approx(
        float(told.requests_per_s) * output, rel=0.05
    )
    assert float(outcome.tpot_s.mean()) == pytest.approx(float(told.tpot_s), rel=0.05)
    profile = constant_profile(0.7)
    most = largest_active(
        EAGLE, prompt_len=prompt, output_len=output, tp_size=1, budget=None, gamma=3
    )
    points = Points(
        batch=np.minimum(users, most), context=prompt, gamma=3, gen_len=float(output)
    )
    drafted = whole_requests(predict(EAGLE, profile, points), output_len=output).drafted
    outcome = simulate_closed(eagle(requests), requests, users=users)
    assert outcome.tokens_per_s == pytest.approx(
        float(drafted.requests_per_s) * output, rel=0.08
    )


@pytest.mark.parametrize("balance", ["round-robin", "least-loaded"])
@pytest.mark.parametrize("policy", [None, fixed(3), TableGamma(
    batch_sizes=(1, 8, 32), context_lens=(128, 512), gammas=((3, 2), (2, 1), (0, 1)))])  # fmt: skip
def test_tokens_and_blocks_are_conserved_also_where_the_cache_is_too_small(
    policy: TableGamma | None, balance: str
) -> None:
    requests = drawn(150, rate=60.0, workload=MIX, seed=1)
    server = (
        Server.of(AUTOREGRESSIVE, requests)
        if policy is None
        else eagle(requests, policy=policy)
    )
    free = simulate(server, requests, replicas=2, balance=balance, seed=4)  # type: ignore[arg-type]
    tight = simulate(small(server, 60), requests, replicas=2, balance=balance, seed=4)  # type: ignore[arg-type]
    for outcome in (free, tight):
        check_conserved(outcome)
    assert free.preemptions == 0
    assert tight.preemptions > 0
    assert tight.e2e_s.mean() > free.e2e_s.mean()
    again = simulate(server, requests, replicas=2, balance=balance, seed=4)  # type: ignore[arg-type]
    np.testing.assert_array_equal(again.last_s, free.last_s)


def test_drafts_are_accepted_as_often_as_the_profile_says_whatever_requests_differ_by() -> (
    None
):
    """Means over 400 requests of 400 tokens: within 2 % (about 6 standard errors of the spread between them)."""
    law = Law(rejection=0.3, concentration=4.0)
    for spread in (0.0, 0.1):
        profile = MeasuredProfile(
            model="llama-3.1-8b",
            draft="eagle3",
            draft_method="eagle3",
            law=law,
            spread=spread,
        )
        requests = alike(400, prompt_len=300, output_len=400)
        server = Server.of(EAGLE, requests, acceptance=profile, policy=fixed(3))
        told = float(
            predict(
                EAGLE, profile, Points(batch=1, context=500, gamma=3)
            ).expected_tokens_per_step
        )
        assert server.drafts
        kinds = np.arange(3200) % 32
        rows = server.drafts.rows(kinds, np.full(3200, 500))
        chances = server.drafts.survivors[3].reshape(-1, 3)[rows]
        drawn_tokens = chances.sum(axis=1) + 1.0
        index = server.drafts.index(rows, 7 * np.arange(3200))
        taken = server.drafts.tokens_of(3, index, np.full(3200, 400)) / 400.0
        assert taken.mean() == pytest.approx(told, rel=0.005)
        assert drawn_tokens.mean() == pytest.approx(told, rel=0.002)
        assert (drawn_tokens.std() > 0.1) == (spread > 0)
        outcome = simulate_closed(server, requests, users=1)
        assert 400 * 399 / (outcome.replicas[0].iterations - 400) == pytest.approx(
            told, rel=0.02 + spread / 5
        )


def test_a_prompt_that_loses_its_room_goes_back_to_the_head_of_the_queue() -> None:
    """Two requests grow until the third's prompt, of which 32 tokens are computed in each pass, has no room."""
    requests = alike(4, prompt_len=64, output_len=40)
    requests.prompt_len[2:] = 320
    requests.arrival_s[2:] = 0.01
    outcome = simulate(
        small(Server.of(AUTOREGRESSIVE, requests, max_tokens=34), 29), requests
    )
    check_conserved(outcome)
    assert outcome.preemptions > 0
    assert outcome.last_s.argsort().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("model", "spread"), [
    ("llama-3.1-8b", Parallelism(pp=2)), ("gpt-oss-120b", Parallelism(dp=4, whole_experts=True)),
    ("gpt-oss-120b", Parallelism(pp=2, dp=2, whole_experts=True)),
])  # fmt: skip
def test_replicas_of_stages_and_groups_are_those_of_the_serving_model(
    model: str, spread: Parallelism
) -> None:
    """One alone takes what `predict` says; of many, whose lengths vary so that they do not begin together,
    groups wait for the one with the most prompts as often as the serving model says.
    """
    setup = Setup.of(model, "h100-sxm-80gb", PROMPT_ENGINE, spread=spread)
    alone = alike(1, prompt_len=500, output_len=40)
    outcome = simulate(Server.of(setup, alone, tp_size=2), alone)
    steps = predict(
        setup, None, Points(batch=1, context=500 + np.arange(1.0, 40), tp=2)
    ).step_s
    assert outcome.last_s[0] - outcome.first_s[0] == pytest.approx(
        float(steps.sum()), rel=1e-9
    )
    users, prompt, output = 48 * spread.groups, 512, 256
    requests = alike(12 * users, prompt_len=prompt, output_len=output)
    if spread.dp > 1:
        lengths = np.random.default_rng(0).integers(128, 385, len(requests))
        requests.output_len[:] = lengths
    outcome = simulate_closed(
        Server.of(setup, requests, tp_size=2), requests, users=users
    )
    check_conserved(outcome)
    told = serving_time(
        setup, concurrency=users, prompt_len=prompt, output_len=output, tp_size=2
    )
    assert outcome.tokens_per_s == pytest.approx(
        float(told.requests_per_s) * output, rel=0.1
    )


def test_least_loaded_replicas_share_what_turns_do_not() -> None:
    """Every other request is long, so turns give one of two replicas all of them."""
    requests = alike(120, prompt_len=64, output_len=4)
    requests.output_len[::2] = 300
    requests.arrival_s[:] = 0.1 * np.arange(120)
    server = Server.of(AUTOREGRESSIVE, requests, max_sequences=8)
    turns, least = (
        simulate(server, requests, replicas=2, balance=each)
        for each in ("round-robin", "least-loaded")
    )
    assert least.ttft_s.mean() < 0.5 * turns.ttft_s.mean()
    served = [sum(~np.isnan(one.last_s[::2])) for one in turns.replicas]
    assert served == [60, 0]
    assert min(sum(~np.isnan(one.last_s[::2])) for one in least.replicas) >= 20


def test_a_cached_prefix_is_not_computed_again() -> None:
    """50k cached and 2k new cost a fraction of 52k, and more than 2k alone, whose attention reads less."""
    times = []
    for prompt, cached in ((52_000, 0), (52_000, 50_000), (2000, 0)):
        requests = alike(1, prompt_len=prompt, output_len=2, cached_len=cached)
        times.append(
            float(simulate(Server.of(AUTOREGRESSIVE, requests), requests).ttft_s[0])
        )
    assert times[2] < times[1] < 0.2 * times[0]


def test_too_much_load_is_called_so_and_little_load_is_not() -> None:
    requests = drawn(1500, rate=1.0, workload=MIX)
    server = Server.of(AUTOREGRESSIVE, requests, max_sequences=16)
    alone = simulate_closed(
        server, replace(requests, arrival_s=requests.arrival_s.copy()), users=16
    )
    capacity = len(requests) / float(alone.last_s.max())
    assert not simulate(server, requests.at_rate(0.8 * capacity)).is_overloaded
    assert simulate(server, requests.at_rate(1.3 * capacity)).is_overloaded


def test_a_request_that_never_fits_is_named() -> None:
    requests = alike(2, prompt_len=100, output_len=10)
    requests.prompt_len[1] = 900_000
    with pytest.raises(
        CapacityError, match=r"request 2 \(900000 \+ 10 tokens\) does not fit"
    ):
        Server.of(AUTOREGRESSIVE, requests)


def test_scheduling_ahead_makes_a_request_wait_for_one_step_more() -> None:
    """Of a server that is busy; on average, over arrivals at any point of a step."""
    requests = alike(400, prompt_len=64, output_len=400)
    requests.arrival_s[:] = np.arange(400) * 0.1037
    server = Server.of(AUTOREGRESSIVE, requests)
    ahead = replace(server, limits=replace(server.limits, schedules_ahead=True))
    now, then = (simulate(each, requests) for each in (server, ahead))
    waited = (then.ttft_s - now.ttft_s)[100:].mean()
    assert waited == pytest.approx(float(now.tpot_s.mean()), rel=0.1)


FILES = {
    "own.csv": "arrival,prompt,output,cached\n0.5,100,20,\n1.5,200,1,150\n",
    "own.jsonl": '{"arrival": 0.5, "prompt": 100, "output": 20}\n'
                 '{"arrival": 1.5, "prompt": 200, "output": 1, "cached": 150}\n',
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_requests_are_read_from_columns_and_from_keys(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(FILES[name])
    found = read_requests(tmp_path / name)
    np.testing.assert_allclose(found.arrival_s, [0.0, 1.0], atol=1e-6)
    assert found.prompt_len.tolist() == [100, 200]
    assert found.output_len.tolist() == [20, 1]
    assert found.cached_len.tolist() == [0, 150]


@pytest.mark.parametrize(("text", "message"), [
    ("arrival,prompt,output\n1,5,5\n0.5,5,5\n", ":3: arrives at 0.5, before the request above it (1)"),
    ("arrival,prompt,output\n-1,5,5\n", ":2: arrival must be at least 0"),
    ("arrival,prompt,output\n1,0,5\n", ":2: prompt must be between 1 and"),
    ("arrival,prompt,output,cached\n1,5,5,9\n", ":2: 9 tokens cached, of a prompt of 5"),
    ("arrival,prompt,output\n1,x,5\n", ":2: not a request"),
    ("time,tokens\n1,5\n", "has the columns time, tokens"),
    ("arrival,prompt,output\n", "holds no requests"),
])  # fmt: skip
def test_a_bad_trace_is_refused_by_its_line(
    text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_requests(tmp_path / "bad.csv")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_nodes_are_all_whole_numbers_where_there_are_few() -> None:
    assert nodes(1, 5).tolist() == [1, 2, 3, 4, 5]
    assert nodes(0.0, 0.5).tolist() == [1]
    many = nodes(1, 100_000)
    assert (len(many) <= NUM_CONTEXTS, many[0], many[-1]) == (True, 1, 100_000)


def test_gaps_between_arrivals_have_the_rate_and_the_burstiness() -> None:
    """Squared coefficient of variation of 20,000 gaps: within 10 % (beyond 4 standard errors at burstiness 4)."""
    for burstiness in (0.0, 0.5, 1.0, 4.0):
        options = (
            {"burstiness": burstiness} if burstiness != 1.0 else {}
        )  # 1 is the default
        gaps = np.diff(drawn(20_000, rate=5.0, workload=MIX, **options).arrival_s)
        assert gaps.mean() == pytest.approx(0.2, rel=0.06)
        assert gaps.var() / gaps.mean() ** 2 == pytest.approx(
            burstiness, rel=0.1, abs=1e-9
        )
