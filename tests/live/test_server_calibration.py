"""A black-box fit: what is timed, what is sent, and whether the fit predicts loads that it has not seen."""

from __future__ import annotations

import dataclasses
import json
import time

import numpy as np
import pytest
from scipy.stats import binom

from magicdec.errors import ConfigError, ServerError
from magicdec.live import drive as drive_module
from magicdec.live.calibration import ServerPoint, estimated_seconds, fit_server, median_of, save_fit, sent
from magicdec.live.drive import Answer, Load, Measured, drive, measure, plan_loads
from magicdec.live.http import TOKEN_VARIABLE
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.step import step_terms
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import EngineProfile, load_engine
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec

PLAN = {"concurrencies": (1, 4, 16, 64), "prompt_lens": (512, 4096, 16384), "output_len": 64, "rounds": 3}


def setup_of(gamma: int = 0) -> Setup:
    ngram = SpeculationSpec(draft="ngram", draft_method="ngram", gamma=gamma)
    return Setup(
        model=load_model_spec("llama-3.1-8b"),
        hardware=load_hardware("a100-sxm-80gb"),
        engine=load_engine("ours"),
        speculation=ngram if gamma else SpeculationSpec(),
        sampling=SamplingSpec(temperature=0.0),
    )


def true_points(gamma: int = 0, share: float = 0.0, *, noise: float, seed: int = 0) -> list[ServerPoint]:
    """Loads on a made-up engine: other kernels, other fixed costs, and noise."""
    engine = EngineProfile(
        name="truth", gemm_factor=1.3, attention_factor=0.8, forward_overhead_s=4e-3, sequence_overhead_s=50e-6
    )
    rng = np.random.default_rng(seed)
    points = []
    for load in plan_loads(**PLAN, max_len=131072).loads:
        numbers = np.arange(load.concurrency + 1)  # sequences of the batch that have a draft
        drafted = gamma * numbers / load.concurrency
        held = load.prompt_len + 32.0
        true = step_terms(
            dataclasses.replace(setup_of(gamma), engine=engine), batch=float(load.concurrency), kv_len=held,
            draft_kv_len=held, gamma=drafted,
        )  # fmt: skip
        step = float(np.sum(binom.pmf(numbers, load.concurrency, share) * true.step_s))
        step *= float(np.exp(noise * rng.standard_normal()))
        measured = Measured(
            load=load, step_s=step, tpot_s=step, tokens_per_step=1.0, context_len=load.prompt_len + 32.0, ttft_s=1.0,
            num_steps=60,
        )  # fmt: skip
        points.append(ServerPoint(measured=measured, spread=noise, drafted_share=share))
    return points


def test_a_fit_finds_the_constants_that_its_loads_tell_apart():
    """At these batches products take as long as their weights' bytes do, so that only the sum with the fixed cost is
    seen: the prior decides between the two, and predictions do not depend on it."""
    fit = fit_server(true_points(noise=0.0), setup=setup_of(), tp_size=1, gamma=0, name="fitted")
    assert fit.held_out_error < 0.01
    expected = {"attention_factor": 0.8, "sequence_overhead_s": 50e-6}
    for name, value in expected.items():
        assert fit.constants[name][0] == pytest.approx(value, rel=0.05), name


@pytest.mark.parametrize(("gamma", "share"), [(0, 0.0), pytest.param(3, 0.6, marks=pytest.mark.slow)])
def test_loads_that_only_judge_are_predicted_within_the_noise(gamma, share):
    """Median error of 6 judged loads at 5 % noise, over 5 seeds: about 0.034 if the fit were perfect."""
    errors = [
        fit_server(
            true_points(gamma, share, noise=0.05, seed=seed), setup=setup_of(gamma), tp_size=1, gamma=gamma, name="x"
        ).held_out_error
        for seed in range(5)
    ]
    assert np.median(errors) < 0.07


def test_intervals_of_constants_hold_the_truth_and_judges_do_not_move_the_fit():
    points = true_points(noise=0.03, seed=1)
    fit = fit_server(points, setup=setup_of(), tp_size=1, gamma=0, name="x")
    value, low, high = fit.constants["forward_overhead_s"]
    assert low <= 4e-3 <= high
    assert low < value < high
    spoilt = [
        dataclasses.replace(p, measured=dataclasses.replace(p.measured, step_s=9.0)) if p.measured.load.is_judge else p
        for p in points
    ]
    assert fit_server(spoilt, setup=setup_of(), tp_size=1, gamma=0, name="x").constants == fit.constants


def test_the_file_holds_every_load_with_its_error_and_role(tmp_path):
    points = true_points(noise=0.03)
    fit = fit_server(points, setup=setup_of(), tp_size=1, gamma=0, name="x")
    profile, loads = save_fit(fit, points, sent(plan_loads(**PLAN, max_len=131072)), tmp_path / "server.engine.toml")
    assert load_engine(profile).gemm_factor == fit.profile.gemm_factor
    assert "90 % interval" in load_engine(profile).sources["gemm_factor"]
    document = json.loads(loads.read_text())
    assert len(document["loads"]) == 12
    judged = [abs(row["error"]) for row in document["loads"] if row["judges"]]
    assert np.median(judged) == pytest.approx(document["median_error"]["held_out"])


def test_a_plan_says_what_it_costs_and_splits_as_a_chequerboard():
    plan = plan_loads(**PLAN, max_len=131072)
    assert plan.num_requests == 3 * (1 + 4 + 16 + 64) * 3
    sizes = [c * (p + 64 + c * p // 2048) for c in (1, 4, 16, 64) for p in (512, 4096, 16384)]
    assert plan.num_tokens == 3 * sum(sizes)
    judges = {(load.concurrency, load.prompt_len) for load in plan.loads if load.is_judge}
    assert judges == {(1, 4096), (4, 512), (4, 16384), (16, 4096), (64, 512), (64, 16384)}
    assert sorted(map(str, plan.order)) == sorted(str(load) for load in plan.loads for _ in range(3))
    assert estimated_seconds(plan, setup_of(), tp_size=1) > 60
    drafted = {(load.concurrency, load.prompt_len): load for load in plan_loads(**PLAN, max_len=131072, gamma=3).loads}
    assert drafted[64, 4096].output_len == 64 + 4 * 64 * 4096 // 2048  # meanwhile up to 4 tokens in a step


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"max_len": 16400}, "the longest prompt is"),
        ({"concurrencies": (0, 1, 2)}, "concurrency must be"),
        ({"concurrencies": (1,)}, "too few"),
        ({"output_len": 4}, "at least 8"),
        ({"rounds": 0}, "rounds"),
        ({"prompt_lens": (100_000, 100_001, 100_002), "rounds": 90}, "tokens, more than"),
    ],
)
def test_a_plan_that_cannot_be_sent_is_refused(changed, said):
    with pytest.raises(ConfigError, match=said):
        plan_loads(**({**PLAN, "max_len": 131072} | changed))


def test_the_window_has_neither_prefill_nor_the_end_in_it():
    """Three sequences whose first tokens come at 1, 2 and 5 s: only steps after 5 s and before the first end count."""
    step = 0.1
    answers = [
        Answer(
            sent_s=0.0,
            events_s=[first + stall + step * i for i, stall in enumerate([0.0] + [wait] * 49)],
            num_tokens=50,
        )
        for first, wait in ((1.0, 4.0), (2.0, 3.0), (5.0, 0.0))
    ]
    load = Load(concurrency=3, prompt_len=100, output_len=50)
    found = measure(load, answers)
    assert found.step_s == pytest.approx(step)
    assert found.tpot_s == pytest.approx(step)
    assert found.tokens_per_step == pytest.approx(1.0)
    assert found.ttft_s == pytest.approx((1 + 2 + 5) / 3)
    assert found.context_len == pytest.approx(100 + 1 + 49 / 2, abs=1.0)


def test_a_reader_that_lags_does_not_change_the_step():
    """The first six events are read late and at once: the times between the others say what a step takes."""
    events = [max(0.1 * i, 0.6) for i in range(60)]
    found = measure(
        Load(concurrency=1, prompt_len=10, output_len=60), [Answer(sent_s=0.0, events_s=events, num_tokens=60)]
    )
    assert found.step_s == pytest.approx(0.1, rel=0.01)


def test_a_step_of_several_tokens_is_one_event():
    answers = [Answer(sent_s=0.0, events_s=[0.2 * i for i in range(21)], num_tokens=41)] * 2
    found = measure(Load(concurrency=2, prompt_len=10, output_len=41), answers)
    assert (found.step_s, found.tokens_per_step) == (pytest.approx(0.2), pytest.approx(2.0))
    assert found.tpot_s == pytest.approx(0.1)


def test_a_window_with_hardly_a_step_is_refused():
    answers = [Answer(sent_s=0.0, events_s=[at + 0.1 * i for i in range(10)], num_tokens=10) for at in (0.0, 0.8)]
    with pytest.raises(ServerError, match="too few steps"):
        measure(Load(concurrency=2, prompt_len=10, output_len=10), answers)


def test_the_median_of_rounds_is_taken_with_their_range():
    rounds = [(dataclasses.replace(true_points(noise=0.0)[0].measured, step_s=s), 0.5) for s in (1.0, 3.0, 1.2)]
    point = median_of(rounds)
    assert (point.measured.step_s, point.spread, point.drafted_share) == (1.2, pytest.approx(1.0 / 1.2), 0.5)


LOAD = Load(concurrency=3, prompt_len=20, output_len=16)


def test_exactly_the_planned_requests_are_sent(engine):
    server, address = engine
    found = drive(address, LOAD, model="m", vocab_size=100, seed=1, clock=server.steps)
    asked = list(map(json.loads, server.bodies))
    assert len(asked) == 3
    assert all(len(body["prompt"]) == 20 and body["max_tokens"] == 16 for body in asked)
    assert len({tuple(body["prompt"]) for body in asked}) == 3
    assert found.step_s == pytest.approx(server.steps.STEP_S)
    assert found.ttft_s == pytest.approx(server.steps.STEP_S)
    assert found.tokens_per_step == 1.0


def test_the_first_error_stops_a_load(engine):
    server, address = engine
    server.status = 503
    with pytest.raises(ServerError, match="status 503; nothing more was sent"):
        drive(address, LOAD, model="m", vocab_size=100, seed=1)
    assert len(server.seen) <= 3


def test_a_load_is_not_sent_on_to_another_host(serve, monkeypatch):
    """Neither the prompts nor the token follow a redirect, and no error shows the token."""
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
    other, there = serve({"/v1/completions": lambda handler: handler.send_error(500)})
    server, here = serve(
        {"/v1/completions": lambda handler: handler.reply(b"", 307, Location=f"{there}/v1/completions")}
    )
    with pytest.raises(ServerError, match="status 307; nothing more was sent") as caught:
        drive(here, LOAD, model="m", vocab_size=100, seed=1)
    assert "s3cret" not in str(caught.value)
    assert set(server.seen) == {("/v1/completions", "Bearer s3cret")}
    assert other.seen == []


@pytest.mark.parametrize(
    ("piece", "answer_s", "said"), [(b"x" * 4096, 3600.0, "more than 64 KiB"), (b": ping\n\n", 0.5, r"within 0\.5 s")]
)
def test_an_answer_is_bounded_in_size_and_in_time(serve, monkeypatch, piece, answer_s, said):
    """Also a line that never ends, and signs of life that never end. Each meets its own bound alone: a line long before
    an hour is over, pings (five a second) long before they fill the bound."""
    monkeypatch.setattr(drive_module, "ANSWER_S", answer_s)

    def endless(handler):
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(piece)
            handler.wfile.flush()
            if len(piece) < 100:
                time.sleep(0.2)

    _, address = serve({"/v1/completions": endless})
    with pytest.raises(ServerError, match=said):
        drive(address, LOAD, model="m", vocab_size=100, seed=1)


def test_a_server_that_ends_early_is_refused(engine):
    server, address = engine
    server.short = 5
    with pytest.raises(ServerError, match="generated 5 tokens where 16"):
        drive(address, LOAD, model="m", vocab_size=100, seed=1, clock=server.steps)
