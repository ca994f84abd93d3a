"""Loads that are sent and what is measured of them, against the clocks and tokens that they were made from; and an
engine's constants against those of the server that was timed."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.errors import ConfigError, ServerError
from magicdec.live import (
    benchmark_results,
    calibration,
    cost_check,
    drive,
    metrics,
)
from magicdec.live.benchmark_results import TimedRequest
from magicdec.live.drive import (
    LoadPlan,
    Measured,
    SentAnswer,
    SentLoad,
    WindowTooShort,
)
from magicdec.live.http import parse_address
from magicdec.live.metrics import Scrape
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import predict
from magicdec.specs import load_model_spec
from magicdec.specs.engine import EngineProfile
from magicdec.specs.speculation import SpeculationSpec

LOAD = SentLoad(concurrency=2, prompt_len=100, output_len=10)


def measured_of(**fields: Any) -> Measured:
    usual: dict[str, Any] = {
        "load": LOAD, "step_s": 0.02, "tpot_s": 0.01, "tokens_per_step": 2.0, "context_len": 105.0, "ttft_s": 0.5,
        "num_steps": 9,
    }  # fmt: skip
    return Measured(**usual | fields)


# What is sent


@given(
    concurrencies=st.lists(st.integers(1, 64), min_size=3, max_size=4, unique=True),
    prompts=st.lists(st.integers(8, 4096), min_size=3, max_size=4, unique=True),
    rounds=st.integers(1, 4),
    gamma=st.integers(0, 4),
    seed=st.integers(0, 9),
)
def test_a_plan_is_every_pair_in_every_round_with_the_smallest_around_them(
    concurrencies: list[int],
    prompts: list[int],
    rounds: int,
    gamma: int,
    seed: int,
) -> None:
    plan = drive.plan_loads(
        concurrencies=concurrencies, prompt_lens=prompts, output_len=64, rounds=rounds, max_len=10**6, gamma=gamma,
        seed=seed,
    )  # fmt: skip
    pairs = {(load.concurrency, load.prompt_len) for load in plan.loads}
    assert pairs == {(c, p) for c in concurrencies for p in prompts}
    for load in plan.loads:
        row = sorted(concurrencies).index(load.concurrency)
        column = sorted(prompts).index(load.prompt_len)
        assert load.is_judge == bool((row + column) % 2)
        # while one decodes, prompts of the others come in, 2048 tokens and gamma + 1 tokens a step
        others = load.concurrency * load.prompt_len // 2048
        assert load.output_len == 64 + (gamma + 1) * others
        assert load.num_tokens == load.concurrency * (load.prompt_len + load.output_len)
    order = plan.order
    smallest = min(load.num_tokens for load in plan.loads)
    assert order[0] == order[-1]
    assert order[0].num_tokens == smallest
    inside = order[1:-1]
    for number in range(rounds):
        one = inside[number * len(plan.loads) :][: len(plan.loads)]
        assert sorted(map(str, one)) == sorted(map(str, plan.loads))
    assert plan.order == order
    assert plan.num_tokens == sum(load.num_tokens for load in order)
    assert plan.num_requests == sum(load.concurrency for load in order)
    assert plan.about["sent"] == {
        "requests": plan.num_requests, "tokens": plan.num_tokens, "rounds": rounds, "seed": seed,
    }  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), [
    ({"concurrencies": (0, 1, 2)}, "between 1 and 1024, not 0"), ({"concurrencies": (1, 2, 1025)}, "not 1025"),
    ({"concurrencies": (1, 2, 1024), "prompt_lens": (8, 9, 10)}, None), ({"prompt_lens": (8, 9, 0)}, "do not fit"),
    ({"prompt_lens": (8, 9, 937)}, "the longest prompt is 936"), ({"prompt_lens": (8, 9, 935)}, None),
    ({"output_len": 7}, "at least 8 output"), ({"output_len": 8}, None), ({"rounds": 0}, "1 to 100 rounds"),
    ({"rounds": 100}, None), ({"rounds": 101}, "1 to 100 rounds"), ({"max_len": 0}, "longest context of 0"),
    ({"concurrencies": (1,)}, "too few"), ({"concurrencies": (1, 2), "prompt_lens": (8, 9)}, "too few"),
    ({"concurrencies": (1, 2), "prompt_lens": (8, 9, 10, 11)}, None),
    ({"concurrencies": (1, 2, 1000), "prompt_lens": (8, 9, 450), "rounds": 90}, "would send"),
])  # fmt: skip
def test_a_plan_is_refused_beyond_its_bounds(
    fields: dict[str, Any], words: str | None
) -> None:
    asked: Any = {
        "concurrencies": (1, 2, 3), "prompt_lens": (8, 9, 10), "output_len": 64, "rounds": 1, "max_len": 1000,
    } | fields  # fmt: skip
    if words is None:
        assert drive.plan_loads(**asked).loads
        return
    with pytest.raises(ConfigError, match=words):
        drive.plan_loads(**asked)


@pytest.mark.parametrize("max_len", [200, 1000, 2500, 100_000])
def test_usual_prompts_are_as_far_apart_below_what_fits(max_len: int) -> None:
    plan = drive.plan_loads(
        concurrencies=(1, 2, 8), prompt_lens=(), output_len=16, rounds=1, max_len=max_len
    )  # fmt: skip
    lengths = sorted({load.prompt_len for load in plan.loads})
    assert len(lengths) == 3
    assert lengths[-1] == 2048 or max_len < 2100
    for usual, length in zip((256, 1024, 2048), lengths, strict=True):
        assert length == usual * lengths[-1] // 2048
    longest = max(load.prompt_len + load.output_len for load in plan.loads)
    assert longest <= max_len
    assert lengths[-1] == 2048 or longest > max_len * 0.7


# What is measured


def answers_of(
    step_s: float,
    tokens: int,
    starts: list[float],
    counts: list[int],
    *,
    told: bool = True,
) -> list[SentAnswer]:
    """Sequences that emit `tokens` tokens in each step."""
    answers = []
    for start, count in zip(starts, counts, strict=True):
        events = [start + step_s * number for number in range(count)]
        so_far = [1 + tokens * number for number in range(count)] if told else []
        answers.append(
            SentAnswer(sent_s=start - 0.3, events_s=events, num_tokens=1 + tokens * (count - 1), tokens=so_far)
        )  # fmt: skip
    return answers


@given(
    step_ms=st.integers(2, 90),
    tokens=st.integers(1, 4),
    late=st.integers(0, 3),
    told=st.booleans(),
    more=st.integers(0, 5),
)
def test_a_window_is_where_all_decode(
    step_ms: int, tokens: int, late: int, told: bool, more: int
) -> None:
    """From the last first token to the first end; the step, its tokens and what was held are those of the window."""
    step_s = step_ms / 1000.0
    answers = answers_of(step_s, tokens, [0.0, late * step_s], [20, 20 + more], told=told)  # fmt: skip
    found = drive.measure(LOAD, answers)
    assert found.step_s == pytest.approx(step_s)
    assert found.tpot_s == pytest.approx(step_s / tokens)
    assert found.tokens_per_step == pytest.approx(tokens)
    inside = 19 - late
    assert found.num_steps in (
        2 * inside,
        2 * inside - 1,
    )  # the last event may round out
    held = [
        100 + 1 + tokens * (late + 19) / 2,
        100 + 1 + tokens * inside / 2,
    ]
    assert found.context_len == pytest.approx(sum(held) / 2, abs=tokens)
    assert found.ttft_s == pytest.approx(0.3)


def test_a_window_of_four_steps_is_the_least() -> None:
    drive.measure(LOAD, answers_of(0.25, 1, [0.0, 0.0], [5, 9]))
    with pytest.raises(WindowTooShort, match="too few steps"):
        drive.measure(LOAD, answers_of(0.25, 1, [0.0, 0.0], [4, 9]))
    at_once = [SentAnswer(sent_s=0.0, events_s=[1.0] * 9, num_tokens=9)] * 2
    with pytest.raises(WindowTooShort, match="came at once"):
        drive.measure(LOAD, at_once)


@given(step=st.floats(0.001, 1.0), number=st.integers(4, 40), lag=st.integers(0, 3))
def test_a_slope_is_the_step_although_a_reader_lags(
    step: float, number: int, lag: int
) -> None:
    times = [step * place for place in range(number)]
    assert drive._slope(times) == pytest.approx(step)
    if number > 20:
        late = list(times)
        for place in range(5, 5 + lag):
            late[place] = times[5 + lag]
        assert drive._slope(late) == pytest.approx(step, rel=0.05)


def test_tokens_up_to_an_event_are_counted_or_evenly_spread() -> None:
    told = SentAnswer(sent_s=0.0, events_s=[1.0, 2.0, 3.0], num_tokens=9, tokens=[1, 2, 9])  # fmt: skip
    assert [told.tokens_up_to(event) for event in range(3)] == [1, 2, 9]
    even = dataclasses.replace(told, tokens=[])
    assert [even.tokens_up_to(event) for event in range(3)] == [1.0, 5.0, 9.0]
    one = SentAnswer(sent_s=0.0, events_s=[1.0], num_tokens=4)
    assert one.tokens_up_to(0) == 1.0


@pytest.mark.parametrize(("tokens", "are"), [
    ([], True), ([1, 2, 9], True), ([0, 0, 9], True), ([2, 1], False), ([1, 10], False), ([-1, 2], False),
    ([1.0, 2], False), ([True, 2], False),
])  # fmt: skip
def test_counts_of_tokens_grow_to_the_output(tokens: list[Any], are: bool) -> None:
    assert drive._are_counts(tokens, 9) == are


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=7, unique=True))
def test_of_rounds_the_middle_one_counts_with_their_range(times: list[float]) -> None:
    rounds = [measured_of(tpot_s=time, ttft_s=time * 10, num_steps=n) for n, time in enumerate(times)]  # fmt: skip
    found = calibration.median_of(rounds)
    ordered = sorted(times)
    middle = ordered[len(times) // 2]
    assert found.tpot_s == middle
    assert found.num_steps == times.index(middle)
    assert found.ttft_s == pytest.approx(10 * statistics.median(times))
    if len(times) == 1:
        assert found.spread is None
    else:
        spread = (ordered[-1] - ordered[0]) / 2.0 / middle
        assert found.spread == pytest.approx(spread)
    # where steps have drafts, an event is a step
    drafted = [dataclasses.replace(each, drafted_share=1.0, step_s=1.0 / each.tpot_s) for each in rounds]  # fmt: skip
    again = calibration.median_of(drafted)
    steps = sorted(each.step_s for each in drafted)
    assert again.step_s == steps[len(steps) // 2]


@pytest.mark.parametrize(("spreads", "drift", "noise", "line"), [
    ((0.02, 0.04, None), 0.02, 0.03, "± 3.0% between rounds, 2.0% between the first load"),
    ((0.02, 0.04), 0.5, 0.25, "± 3.0% between rounds, 50.0% between the first"),
    ((None,), 0.2, 0.1, "no load was sent twice, 20.0%"),
    ((None,), None, None, "noise: not known, no load was sent twice"),
    ((0.02,), None, 0.02, "noise: ± 2.0% between rounds"),
])  # fmt: skip
def test_noise_is_the_larger_of_rounds_and_half_the_drift(
    spreads: tuple[float | None, ...],
    drift: float | None,
    noise: float | None,
    line: str,
) -> None:
    points = [measured_of(spread=spread) for spread in spreads]
    sent = calibration.Sent(points=points, drift=drift, skipped=[])
    assert sent.noise == (None if noise is None else pytest.approx(noise))
    assert line in sent.noise_line


def test_an_estimate_is_of_prefills_one_after_another_and_then_the_steps() -> None:
    setup = Setup.of("llama-3.1-8b", "a100-sxm-80gb", "ours", SpeculationSpec())
    loads = (LOAD, SentLoad(concurrency=5, prompt_len=900, output_len=30))
    plan = LoadPlan(loads=loads, rounds=3)
    seconds = 0.0
    for load in loads:
        at = Points(batch=float(load.concurrency), context=float(load.prompt_len), tp=1.0, gamma=0)  # fmt: skip
        one = predict(setup, None, at)
        seconds += load.concurrency * float(one.ttft_s)
        seconds += load.output_len * float(one.autoregressive_step_s)
    assert calibration.estimated_seconds(plan, setup, tp_size=1) == pytest.approx(3 * seconds)  # fmt: skip


def test_first_tokens_wait_for_the_passes_before_them() -> None:
    """One request has its own pass alone; of several, each waits for the passes that its predecessors fill."""
    setup = Setup.of("llama-3.1-8b", "a100-sxm-80gb", "vllm", SpeculationSpec())
    engine = setup.engine.with_constants(
        {"scheduler.request_latency_s": 0.1, "scheduler.request_overhead_s": 0.01}
    )

    def seconds(concurrency: int, prompt: int) -> float:
        point = measured_of(load=SentLoad(concurrency=concurrency, prompt_len=prompt, output_len=8))  # fmt: skip
        return float(calibration.first_token_s([point], setup, engine, tp_size=1)[0])

    at = dataclasses.replace(setup, engine=engine)

    def alone(prompt: int) -> Any:
        lengths = np.array([float(prompt)])
        return calibration.prompt_time(at, prompt_len=lengths, tp_size=1)

    assert seconds(1, 1000) == pytest.approx(0.11 + float(alone(1000).total_s[0]))
    waits = [seconds(number, 1000) for number in (1, 2, 4, 8, 64)]
    assert waits == sorted(waits)
    assert len(set(waits)) == 5
    # half the requests wait on average, for passes that take as long as their tokens
    long = int(engine.scheduler.prefill_tokens)
    tokens = np.array([float(long)])
    rest = calibration.pass_seconds(at, tokens=tokens, tp_size=1)[0]
    own = float(alone(long).group_seconds()["attention"][0])
    for others in (1, 3):
        mean_waits = sum(range(1, others + 1)) / (others + 1.0)
        expected = seconds(1, long) + mean_waits * (rest + own + 0.01)
        assert seconds(others + 1, long) == pytest.approx(expected)


@pytest.mark.parametrize("longest", [None, 5000, 10**9])
def test_a_server_is_described_by_its_answers(
    monkeypatch: pytest.MonkeyPatch, longest: int | None
) -> None:
    """Its own name, the shorter of its context and the model's, and what it drafts: nothing where it counts none."""
    listed = {"data": [{"id": "name", "max_model_len": longest}]}
    monkeypatch.setattr(calibration, "get", lambda _: json.dumps(listed).encode())
    samples = {
        name: (({"model_name": "m"}, 5.0),)
        for name in (metrics.VLLM.counters["output_tokens"], metrics.VLLM.gauges["running"])
    }  # fmt: skip
    spec = load_model_spec("llama-3.1-8b")
    address = parse_address("localhost:8000")
    for scrape in (None, Scrape(samples=samples)):
        monkeypatch.setattr(calibration, "_scrape", lambda _, found=scrape: found)
        server = calibration.describe_server(address, spec)
        assert server.model == "name"
        assert server.max_len == min(longest or 131_072, 131_072)
        assert (server.gamma, server.draft) == (0, None)
        assert server.engine == ("" if scrape is None else "vllm")
    for wrong in (b"{", b"[]", b'{"data": []}', b'{"data": [{}]}'):
        monkeypatch.setattr(calibration, "get", lambda _, found=wrong: found)
        with pytest.raises(ServerError, match="does not list a model"):
            calibration.describe_server(address, spec)


# Requests of other generators


def request_of(start: float, events: list[float], **fields: Any) -> TimedRequest:
    usual: dict[str, Any] = {"prompt_len": 100, "output_len": len(events), "is_timed": True}  # fmt: skip
    return TimedRequest(start_s=start, events_s=np.array(events), **usual | fields)


def steady(start: float, number: int, step: float, **fields: Any) -> TimedRequest:
    return request_of(start, [start + 1.0 + step * n for n in range(number)], **fields)


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_step_is_of_all_that_decode_meanwhile(number: int, tokens: int) -> None:
    run = [steady(0.0, 9, 0.25, output_len=1 + 8 * tokens) for _ in range(number)]
    found = benchmark_results._decoding(run[0], run)
    assert found is not None
    assert found.batch == pytest.approx(number)
    assert found.step_s == pytest.approx(0.25 / tokens)
    assert (found.num_steps, found.ttft_s, found.prompt_len) == (8, 1.0, 100)


def test_steps_while_others_wait_for_their_first_token_are_left_out() -> None:
    """Each event is timed: of 12 steps four pass while another is prefilled, and then there are two. Where only the
    first and the last are, a tenth of the time may."""
    one = request_of(0.0, [0.25 * n for n in range(1, 14)])
    other = request_of(1.25, [2.25 + 0.25 * n for n in range(9)])
    found = benchmark_results._decoding(one, [one, other])
    assert found is not None
    assert found.num_steps == 8
    assert found.batch == pytest.approx(1.0 + 4 / 8)
    assert found.step_s == pytest.approx(0.25)
    for wait, is_taken in ((0.29, True), (0.31, False)):
        brief = request_of(1.25, [1.25 + wait + 0.25 * n for n in range(9)])
        blurred = dataclasses.replace(one, is_timed=False)
        assert (benchmark_results._decoding(blurred, [blurred, brief]) is not None) == is_taken  # fmt: skip
    short = request_of(0.0, [0.25 * n for n in range(1, 5)])
    assert benchmark_results._decoding(short, [short]) is None
    assert benchmark_results._decoding(steady(0.0, 5, 0.25), []) is not None
    busy = request_of(0.9, [4.5])
    assert benchmark_results._decoding(one, [one, busy]) is None


@pytest.mark.parametrize(("output_len", "events", "tokens"), [
    (9, 9, 1.0), (17, 9, 2.0), (3, 9, 1.0), (5, 1, 4.0),
])  # fmt: skip
def test_tokens_of_an_event_are_those_after_the_first(
    output_len: int, events: int, tokens: float
) -> None:
    request = steady(0.0, events, 0.1, output_len=output_len)
    assert request.tokens_per_event == tokens
    many = [steady(0.0, 9, 0.1, output_len=17)] * 3 + [steady(0.0, 4, 0.1, output_len=900)]  # fmt: skip
    assert benchmark_results.tokens_per_event([many]) == 2.0
    assert benchmark_results.tokens_per_event([many[3:]]) == 1.0


@given(size=st.floats(1.0, 1e5))
def test_loads_of_half_a_doubling_are_one(size: float) -> None:
    found = benchmark_results._bin(size)
    assert abs(math.log2(size) - found / 2.0) <= 0.25 + 1e-9
    assert benchmark_results._bin(0.3) == 0


def test_a_point_is_the_median_of_its_requests() -> None:
    decodings = [
        benchmark_results._RequestStep(
            batch=batch, prompt_len=prompt, output_len=40, step_s=step, ttft_s=step * 9, num_steps=7
        )
        for batch, prompt, step in ((3.6, 90, 0.02), (4.0, 100, 0.03), (4.4, 110, 0.04), (4.2, 104, 0.05))
    ]  # fmt: skip
    found = benchmark_results._point(decodings, is_judge=True)
    assert (found.load.concurrency, found.load.prompt_len, found.load.output_len) == (4, 102, 40)  # fmt: skip
    assert found.load.is_judge
    assert found.step_s == found.tpot_s == pytest.approx(0.035)
    assert found.context_len == pytest.approx(102 + 20)
    assert found.ttft_s == pytest.approx(0.315)
    assert found.num_steps == 28
    assert found.spread == pytest.approx((0.0425 - 0.0275) / 2.0 / 0.035)


def test_loads_of_a_chequerboard_judge() -> None:
    runs = [
        [steady(0.0, 9, 0.01 * batch, prompt_len=prompt) for _ in range(batch)]
        for batch in (1, 4, 16)
        for prompt in (100, 1000, 4000)
    ]
    points = benchmark_results.points_of(runs)
    assert len(points) == 9
    for place, point in enumerate(points):
        row, column = divmod(place, 3)
        assert point.load.concurrency == (1, 4, 16)[row]
        assert point.load.prompt_len == (100, 1000, 4000)[column]
        assert point.load.is_judge == bool((row + column) % 2)
        assert point.step_s == pytest.approx(0.01 * (1, 4, 16)[row])
    for wrong in ({"is_drafted": True}, {"output_len": 1 + 8 * 2}):
        with pytest.raises(ConfigError, match="drafted"):
            benchmark_results.points_of([[steady(0.0, 9, 0.01, **wrong)]])
    lagging = [[steady(0.0, 9, 0.01, output_len=1 + 12)]]  # 1.5 tokens an event
    with pytest.raises(ConfigError, match="too few"):
        benchmark_results.points_of(lagging)


# A cost check


COST_SETUP = Setup.of(
    "llama-3.1-8b", "h100-sxm-80gb", "vllm", SpeculationSpec(draft="eagle3", draft_method="eagle3", gamma=1)
)  # fmt: skip


def runs_on(engine: EngineProfile) -> list[cost_check.CostRun]:
    """What a server of this engine would show."""
    at = dataclasses.replace(COST_SETUP, engine=engine)
    runs = []
    for gamma, tokens in ((0, 1.0), (1, 1.6), (5, 2.8)):
        run = cost_check.CostRun(
            gamma=gamma, tokens=tokens, tpot_s=1.0, concurrency=16.0, prompt_len=1000.0, output_len=200.0
        )  # fmt: skip
        tpot_s = cost_check.predicted_tpot_s(at, run, 1.0, None)
        runs.append(dataclasses.replace(run, tpot_s=tpot_s))
    return runs


@pytest.mark.parametrize(("factor", "step_s", "draft_s"), [(0.3, 3e-3, 5e-4)])
def test_a_cost_check_finds_the_server_that_was_timed(
    factor: float, step_s: float, draft_s: float
) -> None:
    """Its kernels by the run without a draft, and by those with one the costs of a step and of each drafted token."""
    usual = COST_SETUP.engine
    scaled = {name: usual.constant(name) * factor for name in cost_check.FACTORS}  # fmt: skip
    if usual.kernels.split_attention_factor is not None:
        scaled["kernels.split_attention_factor"] = (
            usual.kernels.split_attention_factor * factor
        )
    truth = usual.with_constants(
        {
            **scaled,
            "overheads.step_overhead_s": usual.overheads.step_overhead_s + step_s,
            "overheads.draft_step_overhead_s": usual.overheads.draft_step_overhead_s
            + draft_s,
        }
    )
    runs = runs_on(truth)
    fit = cost_check.fit_cost(COST_SETUP, runs, tp_size=1.0, budget=None, name="mine")
    assert fit.after == pytest.approx((0.0, 0.0, 0.0), abs=2e-3)
    assert max(map(abs, fit.before)) > 0.05
    own = fit.profile
    for name in cost_check.FACTORS:
        assert getattr(own.kernels, name) == pytest.approx(scaled[name], rel=1e-3)
    found, true = own.overheads, truth.overheads
    assert found.step_overhead_s == pytest.approx(true.step_overhead_s, abs=5e-5)
    assert found.draft_step_overhead_s == pytest.approx(true.draft_step_overhead_s, abs=2e-5)  # fmt: skip
    assert own.name == "mine"
    assert own.errors.cost_error == cost_check.REPETITION_ERROR
    assert own.errors.cost_step_s == runs[0].tpot_s
    assert own.errors.relative_error == cost_check.REPETITION_ERROR
    assert (own.fitted_device, own.fitted_models) == ("h100-sxm-80gb", ("llama-3.1-8b",))  # fmt: skip


def test_a_server_that_no_kernels_explain_is_refused_or_leaves_an_error() -> None:
    runs = runs_on(COST_SETUP.engine)
    slow = [dataclasses.replace(run, tpot_s=run.tpot_s * 60.0) for run in runs]
    with pytest.raises(ConfigError, match="is more than 20 times"):
        cost_check.fit_cost(COST_SETUP, slow, tp_size=1.0, budget=None, name="x")
    fast = [dataclasses.replace(run, tpot_s=run.tpot_s / 100.0) for run in runs[:2]]
    fit = cost_check.fit_cost(COST_SETUP, fast, tp_size=1.0, budget=None, name="x")
    kernels = fit.profile.kernels.gemm_factor / COST_SETUP.engine.kernels.gemm_factor
    assert kernels == pytest.approx(1.0 / 20.0)
    left = math.sqrt(sum(math.log1p(miss) ** 2 for miss in fit.after) / 2)
    assert fit.profile.errors.cost_error == pytest.approx(left)
    assert fit.profile.overheads.step_overhead_s >= 0.0
    assert fit.profile.overheads.draft_step_overhead_s >= -1e-12
    for some in (runs[:1], runs[1:]):
        with pytest.raises(ConfigError, match=r"needs cost-plain\.json"):
            cost_check.fit_cost(COST_SETUP, some, tp_size=1.0, budget=None, name="x")
    two = cost_check.fit_cost(COST_SETUP, runs[:2], tp_size=1.0, budget=None, name="x")
    assert two.after == pytest.approx((0.0, 0.0), abs=2e-3)


def test_the_result_of_a_run_is_read_from_its_last_line(tmp_path: Path) -> None:
    result = {
        "completed": 10, "mean_tpot_ms": 20.0, "max_concurrency": 8, "total_input_tokens": 5000,
        "total_output_tokens": 700,
    }  # fmt: skip
    wrong = json.dumps(result | {"mean_tpot_ms": 1.0})
    path = tmp_path / "cost-k3-2.5.json"
    path.write_text(f"{wrong}\n{json.dumps(result)}\n")
    run = cost_check.read_cost_run(path)
    assert run == cost_check.CostRun(
        gamma=3, tokens=2.5, tpot_s=0.02, concurrency=8.0, prompt_len=500.0, output_len=70.0
    )  # fmt: skip
    plain = tmp_path / "cost-plain.json"
    plain.write_text(json.dumps(result, indent=1))
    assert (cost_check.read_cost_run(plain).gamma, cost_check.read_cost_run(plain).tokens) == (0, 1.0)  # fmt: skip
    for name, is_taken in (("k3-1", True), ("k3-4", True), ("k3-4.1", False), ("k3-0.9", False)):  # fmt: skip
        own = tmp_path / f"cost-{name}.json"
        own.write_text(json.dumps(result))
        if is_taken:
            assert cost_check.read_cost_run(own).gamma == 3
        else:
            with pytest.raises(ConfigError, match="are not from 1 to 4"):
                cost_check.read_cost_run(own)
    for field in result:
        plain.write_text(json.dumps(result | {field: 0}))
        with pytest.raises(ConfigError):
            cost_check.read_cost_run(plain)
