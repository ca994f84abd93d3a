"""Loads that are sent and what is measured of them, against the clocks and tokens that they were made from; and an
engine's constants against those of the server that was timed."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.errors import ConfigError, ServerError
from magicdec.live import benchmark_results, calibration, cost_check, drive, metrics
from magicdec.live.benchmark_results import TimedRequest
from magicdec.live.drive import (
    Measured,
    SentAnswer,
    SentLoad,
    WindowTooShort,
)
from magicdec.live.http import parse_address
from magicdec.live.metrics import Scrape
from magicdec.perfmodel.setup import Setup
from magicdec.specs.catalog import load_model_spec
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
        factor = getattr(own.kernels, name.removeprefix("kernels."))
        assert factor == pytest.approx(scaled[name], rel=1e-3)
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
