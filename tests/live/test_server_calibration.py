"""A black-box fit: what is timed, what is sent, and whether the fit predicts loads that it has not seen."""

from __future__ import annotations

import dataclasses
import json
import time

import numpy as np
import pytest
from scipy.stats import binom
from typer.testing import CliRunner

from magicdec.cli import app, register_commands
from magicdec.errors import ConfigError, ServerError
from magicdec.live import drive as drive_module
from magicdec.live.calibration import (
    estimated_seconds,
    first_token_s,
    fit_server,
    median_of,
    save_fit,
    send_plan,
)
from magicdec.live.drive import (
    Measured,
    SentAnswer,
    SentLoad,
    WindowTooShort,
    drive_load,
    measure,
    plan_loads,
)
from magicdec.live.http import TOKEN_VARIABLE
from magicdec.perfmodel.rate.requests import alike
from magicdec.perfmodel.rate.simulate import Server, simulate
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.step import step_terms
from magicdec.specs.engine import EngineProfile, load_engine
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec
from tests.live.servers import Vllm, random_requests

PLAN = {
    "concurrencies": (1, 4, 16, 64),
    "prompt_lens": (512, 4096, 16384),
    "output_len": 64,
    "rounds": 3,
}


SPARSE = SpeculationSpec(
    draft="self", draft_method="streamingllm", draft_budget=512, gamma=3
)


def setup_of(gamma: int = 0, draft: SpeculationSpec | None = None) -> Setup:
    ngram = draft or SpeculationSpec(draft="ngram", draft_method="ngram", gamma=gamma)
    spec = ngram if gamma else SpeculationSpec()
    return Setup.of(
        "llama-3.1-8b",
        "a100-sxm-80gb",
        "ours",
        spec,
        sampling=SamplingSpec(temperature=0.0),
    )


def true_points(
    gamma: int = 0, share: float = 0.0, *, noise: float, seed: int = 0
) -> list[Measured]:
    """Loads on a made-up engine: other kernels, other fixed costs, and noise."""
    engine = EngineProfile(name="truth").with_constants(
        {
            "kernels.gemm_factor": 1.3,
            "kernels.attention_factor": 0.8,
            "overheads.forward_overhead_s": 4e-3,
            "overheads.sequence_overhead_s": 50e-6,
        }
    )
    rng = np.random.default_rng(seed)
    points = []
    for load in plan_loads(**PLAN, max_len=131072).loads:
        numbers = np.arange(
            load.concurrency + 1
        )  # sequences of the batch that have a draft
        drafted = gamma * numbers / load.concurrency
        held = load.prompt_len + 32.0
        true = step_terms(
            dataclasses.replace(setup_of(gamma), engine=engine), batch=float(load.concurrency), kv_len=held,
            draft_kv_len=held, gamma=drafted,
        )  # fmt: skip
        step = float(np.sum(binom.pmf(numbers, load.concurrency, share) * true.step_s))
        step *= float(np.exp(noise * rng.standard_normal()))
        points.append(Measured(
            load=load, step_s=step, tpot_s=step, tokens_per_step=1.0, context_len=load.prompt_len + 32.0, ttft_s=1.0,
            num_steps=60, spread=noise, drafted_share=share,
        ))  # fmt: skip
    return points


def test_a_fit_finds_the_constants_that_its_loads_tell_apart():
    """At these batches products take as long as their weights' bytes do, so that only the sum with the fixed cost is
    seen: the prior decides between the two, and predictions do not depend on it."""
    fit = fit_server(
        true_points(noise=0.0), setup=setup_of(), tp_size=1, gamma=0, name="fitted"
    )
    assert fit.held_out_error < 0.01
    expected = {"kernels.attention_factor": 0.8, "overheads.sequence_overhead_s": 50e-6}
    for name, value in expected.items():
        assert fit.constants[name][0] == pytest.approx(value, rel=0.05), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gamma", "share"), [(0, 0.0), pytest.param(3, 0.6, marks=pytest.mark.slow)]
)
def test_loads_that_only_judge_are_predicted_within_the_noise(gamma, share):
    """Median error of 6 judged loads at 5 % noise, over 3 seeds: about 0.034 if the fit were perfect."""
    errors = [
        fit_server(
            true_points(gamma, share, noise=0.05, seed=seed),
            setup=setup_of(gamma),
            tp_size=1,
            gamma=gamma,
            name="x",
        ).held_out_error
        for seed in range(3)
    ]
    assert np.median(errors) < 0.07


@pytest.mark.slow
def test_a_server_that_drafts_for_itself_is_fitted_as_such():
    """Steps of the plugin's draft: gamma passes over 512 tokens and a verification, on an engine with other constants.
    As looked-up drafts, which cost nothing, the same steps are missed."""
    truth = dataclasses.replace(
        setup_of(draft=SPARSE),
        engine=load_engine("ours").with_constants(
            {"kernels.gemm_factor": 1.3, "overheads.forward_overhead_s": 4e-3}
        ),
    )
    engine = truth.engine.with_constants(
        {
            "overheads.layer_overhead_s": 0.0,
            "overheads.autoregressive_overhead_s": 0.0,
            "overheads.step_overhead_s": 0.0,
            "overheads.overhead_on": {},
        }
    )
    truth = dataclasses.replace(truth, engine=engine)
    points = []
    for point in true_points(noise=0.0):
        held = point.context_len
        at = {
            "batch": float(point.load.concurrency),
            "kv_len": held,
            "draft_kv_len": min(held, 512.0),
        }
        step = float(step_terms(truth, **at, gamma=np.array(3.0)).step_s)
        points.append(
            dataclasses.replace(
                point,
                step_s=step,
                tpot_s=step / 2.5,
                tokens_per_step=2.5,
                drafted_share=1.0,
            )
        )
    fit = fit_server(points, setup=setup_of(draft=SPARSE), tp_size=1, gamma=3, name="x")
    assert fit.held_out_error < 0.01
    looked_up = fit_server(points, setup=setup_of(3), tp_size=1, gamma=3, name="x")
    assert looked_up.held_out_error > 0.01 > 5 * fit.held_out_error


@pytest.mark.slow
def test_a_fit_is_never_surer_than_its_loads_repeat():
    points = true_points(noise=0.0)
    quiet, noisy = (
        fit_server(points, setup=setup_of(), tp_size=1, gamma=0, name="x", noise=n)
        for n in (0.0, 0.2)
    )
    errors = [fit.profile.errors.relative_error for fit in (quiet, noisy)]
    assert errors[1] >= 0.2 > errors[0]
    widths = [
        fit.constants["kernels.attention_factor"][2]
        - fit.constants["kernels.attention_factor"][1]
        for fit in (quiet, noisy)
    ]
    assert widths[1] > 5 * widths[0]
    with pytest.raises(ConfigError, match="vary by 40% by themselves"):
        fit_server(points, setup=setup_of(), tp_size=1, gamma=0, name="x", noise=0.4)


@pytest.mark.slow
def test_intervals_of_constants_hold_the_truth_and_judges_do_not_move_the_fit():
    points = true_points(noise=0.03, seed=1)
    fit = fit_server(points, setup=setup_of(), tp_size=1, gamma=0, name="x")
    value, low, high = fit.constants["overheads.forward_overhead_s"]
    assert low <= 4e-3 <= high
    assert low < value < high
    spoilt = [
        dataclasses.replace(p, step_s=9.0) if p.load.is_judge else p for p in points
    ]
    assert (
        fit_server(spoilt, setup=setup_of(), tp_size=1, gamma=0, name="x").constants
        == fit.constants
    )


def test_the_file_holds_every_load_with_its_error_and_role(tmp_path):
    points = true_points(noise=0.03)
    fit = fit_server(points, setup=setup_of(), tp_size=1, gamma=0, name="x")
    profile, loads = save_fit(
        fit,
        points,
        plan_loads(**PLAN, max_len=131072).about,
        tmp_path / "server.engine.toml",
    )
    assert load_engine(profile).kernels.gemm_factor == fit.profile.kernels.gemm_factor
    assert "90 % interval" in load_engine(profile).sources["kernels.gemm_factor"]
    document = json.loads(loads.read_text())
    assert len(document["loads"]) == 12
    judged = [abs(row["error"]) for row in document["loads"] if row["judges"]]
    assert np.median(judged) == pytest.approx(document["median_error"]["held_out"])


def test_a_plan_says_what_it_costs_and_splits_as_a_chequerboard():
    plan = plan_loads(**PLAN, max_len=131072)
    assert plan.num_requests == 3 * (1 + 4 + 16 + 64) * 3 + 2
    sizes = [
        c * (p + 64 + c * p // 2048) for c in (1, 4, 16, 64) for p in (512, 4096, 16384)
    ]
    assert plan.num_tokens == 3 * sum(sizes) + 2 * (512 + 64)
    judges = {
        (load.concurrency, load.prompt_len) for load in plan.loads if load.is_judge
    }
    assert judges == {
        (1, 4096),
        (4, 512),
        (4, 16384),
        (16, 4096),
        (64, 512),
        (64, 16384),
    }
    smallest = plan.loads[0]
    assert plan.order[0] == plan.order[-1] == smallest
    assert sorted(map(str, plan.order[1:-1])) == sorted(
        str(load) for load in plan.loads for _ in range(3)
    )
    assert estimated_seconds(plan, setup_of(), tp_size=1) > 60
    drafted = {
        (load.concurrency, load.prompt_len): load
        for load in plan_loads(**PLAN, max_len=131072, gamma=3).loads
    }
    assert (
        drafted[64, 4096].output_len == 64 + 4 * 64 * 4096 // 2048
    )  # meanwhile up to 4 tokens in a step


def test_a_plan_that_cannot_be_sent_is_refused():
    for changed, said in (
        ({"max_len": 16400}, "the longest prompt is"),
        ({"concurrencies": (0, 1, 2)}, "concurrency must be"),
        ({"concurrencies": (1,)}, "too few"),
        ({"output_len": 4}, "at least 8"),
        ({"rounds": 0}, "rounds"),
        (
            {"prompt_lens": (100_000, 100_001, 100_002), "rounds": 90},
            "tokens, more than",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            plan_loads(**({**PLAN, "max_len": 131072} | changed))


def test_the_usual_prompts_are_those_that_the_server_takes():
    for max_len in (160, 600, 2048, 131_072):
        plan = plan_loads(
            concurrencies=(1, 2, 4),
            prompt_lens=(),
            output_len=48,
            rounds=1,
            max_len=max_len,
        )
        longest = max(load.prompt_len + load.output_len for load in plan.loads)
        assert 0.6 * min(max_len, 2048) < longest <= max_len
        assert len({load.prompt_len for load in plan.loads}) == 3


def test_the_window_has_neither_prefill_nor_the_end_in_it():
    """Three sequences whose first tokens come at 1, 2 and 5 s: only steps after 5 s and before the first end count."""
    step = 0.1
    answers = [
        SentAnswer(
            sent_s=0.0,
            events_s=[
                first + stall + step * i for i, stall in enumerate([0.0] + [wait] * 49)
            ],
            num_tokens=50,
        )
        for first, wait in ((1.0, 4.0), (2.0, 3.0), (5.0, 0.0))
    ]
    load = SentLoad(concurrency=3, prompt_len=100, output_len=50)
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
        SentLoad(concurrency=1, prompt_len=10, output_len=60),
        [SentAnswer(sent_s=0.0, events_s=events, num_tokens=60)],
    )
    assert found.step_s == pytest.approx(0.1, rel=0.01)


def test_a_step_of_several_tokens_is_one_event():
    answers = [
        SentAnswer(sent_s=0.0, events_s=[0.2 * i for i in range(21)], num_tokens=41)
    ] * 2
    found = measure(SentLoad(concurrency=2, prompt_len=10, output_len=41), answers)
    assert (found.step_s, found.tokens_per_step) == (
        pytest.approx(0.2),
        pytest.approx(2.0),
    )
    assert found.tpot_s == pytest.approx(0.1)


def test_tokens_are_counted_where_events_hold_the_tokens_of_several_steps():
    """A stream that lags towards its end: 20 steps one by one, then 20 in pairs. In the window, which ends with the
    other sequence, there was a token per event; the mean over the whole answer says otherwise."""
    times = [0.1 * i for i in range(21)] + [2.0 + 0.2 * i for i in range(1, 11)]
    tokens = [*range(1, 22), *range(23, 43, 2)]
    lagging = SentAnswer(sent_s=0.0, events_s=times, num_tokens=41, tokens=tokens)
    short = SentAnswer(
        sent_s=0.0, events_s=times[:21], num_tokens=21, tokens=tokens[:21]
    )
    found = measure(
        SentLoad(concurrency=2, prompt_len=10, output_len=41), [lagging, short]
    )
    assert found.tpot_s == pytest.approx(0.1)
    assert found.tokens_per_step == 1.0
    assert found.context_len == pytest.approx(10 + (1 + 21) / 2)
    uncounted = dataclasses.replace(lagging, tokens=[])
    assert (
        measure(
            SentLoad(concurrency=2, prompt_len=10, output_len=41), [uncounted, short]
        ).tpot_s
        < 0.095
    )


SMALL_PLAN = plan_loads(
    concurrencies=(1, 2, 4),
    prompt_lens=(64, 128, 256),
    output_len=16,
    rounds=2,
    max_len=4096,
)


def timed(load: SentLoad, tpot_s: float = 0.1) -> Measured:
    return Measured(
        load=load,
        step_s=tpot_s,
        tpot_s=tpot_s,
        tokens_per_step=1.0,
        context_len=64.0,
        ttft_s=1.0,
        num_steps=9,
    )


def sent_by(address, send):
    return send_plan(address, SMALL_PLAN, send, max_len=4096)


def test_a_load_that_is_too_short_is_sent_longer_and_else_left_out(engine):
    """One load is long enough with twice the output, another never; the others are kept."""
    seen = []

    def send(load, seed):
        seen.append(load.output_len)
        if load.concurrency == 4 and load.prompt_len == 64 and load.output_len < 32:
            raise WindowTooShort("too few steps")
        if load.concurrency == 4 and load.prompt_len == 256:
            raise WindowTooShort("of a load of 4 x 256 too few steps")
        return timed(load)

    found = sent_by(engine[1], send)
    assert len(found.points) == 8
    assert all(point.load in SMALL_PLAN.loads for point in found.points)
    assert found.skipped == ["of a load of 4 x 256 too few steps"]
    assert (found.stopped, found.drift, found.noise) == ("", 0.0, 0.0)
    assert seen.count(32) >= 3


@pytest.mark.parametrize("error", [ServerError("status 503"), KeyboardInterrupt()])
def test_what_was_measured_is_kept_when_a_plan_ends_early(engine, error):
    count = iter(range(100))

    def send(load, seed):
        if next(count) == 11:
            raise error
        return timed(load)

    found = sent_by(engine[1], send)
    assert len(found.points) == 9  # the first round is whole
    assert found.stopped in ("status 503", "interrupted")
    assert found.drift is None
    assert found.points[1].spread is None, (
        "a load that was sent once says nothing of noise"
    )
    assert found.noise == 0.0, "of those that were sent twice"


def test_the_noise_is_what_the_first_load_differs_by_at_the_end(engine):
    """A machine that slows down by 1 % per load: rounds differ by half of it, the ends by all."""
    count = iter(range(100))
    found = sent_by(
        engine[1], lambda load, seed: timed(load, 0.1 * 1.01 ** next(count))
    )
    assert found.drift == pytest.approx(19 * np.log(1.01))
    assert found.noise >= found.drift / 2 > 0.09


def test_the_command_writes_what_it_measured(serve, tmp_path):
    """Whether the machine is quiet enough for a fit or not; a constant's interval does not leave what it may be."""

    def complete(handler):
        asked = json.loads(handler.body)
        handler.send_response(200)
        handler.end_headers()
        for number in range(1, asked["max_tokens"] + 1):
            time.sleep(2e-3)
            event = {"choices": [{"text": "a"}], "usage": {"completion_tokens": number}}
            handler.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    models = b'{"data": [{"id": "m", "max_model_len": 4096}]}'
    _, address = serve(
        {
            "/v1/completions": complete,
            "/v1/models": lambda handler: handler.reply(models),
        }
    )
    register_commands()
    words = ["calibrate", "--server", str(address), "--model", "embedded", "--hardware", "l40s-48gb", "--rounds", "1",
             "--concurrency", "1,2,4", "--prompt-len", "32,64,128", "--output-len", "12"]  # fmt: skip
    done = CliRunner().invoke(app, [*words, "-o", str(tmp_path / "s.engine.toml")])
    assert done.exit_code == 0 or "by themselves" in str(done.exception), done.output
    document = json.loads((tmp_path / "s.engine.loads.json").read_text())
    assert len(document["loads"]) == 9
    assert document["sent"]["requests"] == 3 * (1 + 2 + 4) + 2
    assert "noise: " in done.stdout
    assert ("next: magicdec plan --model embedded" in done.stdout) == (
        done.exit_code == 0
    )
    limits = {
        "kernels.gemm_factor": np.exp(3.0),
        "kernels.attention_factor": np.exp(3.0),
    }
    assert all(
        document["constants"][name]["high"] <= most
        for name, most in limits.items()
        if done.exit_code == 0
    )


def test_a_window_with_hardly_a_step_is_refused():
    answers = [
        SentAnswer(
            sent_s=0.0, events_s=[at + 0.1 * i for i in range(10)], num_tokens=10
        )
        for at in (0.0, 0.8)
    ]
    with pytest.raises(ServerError, match="too few steps"):
        measure(SentLoad(concurrency=2, prompt_len=10, output_len=10), answers)


def test_the_median_of_rounds_is_taken_with_their_range():
    of = true_points(noise=0.0)[0]
    point = median_of([dataclasses.replace(of, tpot_s=t) for t in (1.0, 3.0, 1.2)])
    assert (point.tpot_s, point.spread) == (1.2, pytest.approx(1.0 / 1.2))


@pytest.mark.slow
def test_a_step_has_the_tokens_that_the_server_counts(serve):
    """Events of several steps: the server's counters between two scrapes say how long a step of it took."""
    server = Vllm()
    requests = [request for seed in range(5) for request in random_requests(seed)]
    _, address = serve(
        {"/metrics": lambda handler: handler.reply(server.scrape().encode())}
    )

    def send(load, seed):
        server.serve(requests)
        return timed(load)

    point = send_plan(address, SMALL_PLAN, send, max_len=4096).points[0]
    tokens = 1.0 + sum(map(sum, (each.accepted for each in requests))) / sum(
        len(each.accepted) for each in requests
    )
    assert (point.drafted_share, point.tokens_per_step) == (1.0, pytest.approx(tokens))
    assert point.step_s == pytest.approx(0.1 * tokens)


LOAD = SentLoad(concurrency=3, prompt_len=20, output_len=16)


def test_exactly_the_planned_requests_are_sent(engine):
    server, address = engine
    found = drive_load(
        address, LOAD, model="m", vocab_size=100, seed=1, clock=server.steps
    )
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
        drive_load(address, LOAD, model="m", vocab_size=100, seed=1)
    assert len(server.seen) <= 3


def test_a_load_is_not_sent_on_to_another_host(serve, monkeypatch):
    """Neither the prompts nor the token follow a redirect, and no error shows the token."""
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
    other, there = serve({"/v1/completions": lambda handler: handler.send_error(500)})
    server, here = serve(
        {
            "/v1/completions": lambda handler: handler.reply(
                b"", 307, Location=f"{there}/v1/completions"
            )
        }
    )
    with pytest.raises(
        ServerError, match="status 307; nothing more was sent"
    ) as caught:
        drive_load(here, LOAD, model="m", vocab_size=100, seed=1)
    assert "s3cret" not in str(caught.value)
    assert set(server.seen) == {("/v1/completions", "Bearer s3cret")}
    assert other.seen == []


@pytest.mark.parametrize(
    ("piece", "answer_s", "said"),
    [(b"x" * 4096, 3600.0, "more than 64 KiB"), (b": ping\n\n", 0.5, r"within 0\.5 s")],
)
def test_an_answer_is_bounded_in_size_and_in_time(
    serve, monkeypatch, piece, answer_s, said
):
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
        drive_load(address, LOAD, model="m", vocab_size=100, seed=1)


def test_a_server_that_ends_early_is_refused(engine):
    server, address = engine
    server.short = 5
    with pytest.raises(ServerError, match="generated 5 tokens where 16"):
        drive_load(address, LOAD, model="m", vocab_size=100, seed=1, clock=server.steps)


def test_first_tokens_are_fitted_by_what_prompts_cost_and_requests_take_from_others():
    """Loads on a made-up server, simulated: the first request is in a pass of its own, the others come just after it.
    Whatever is told apart, all are predicted within 12 %."""
    truth = load_engine("vllm").with_constants(
        {
            "scheduler.prefill_factor": 1.6,
            "kernels.prefill_attention_factor": 1.9,
            "scheduler.request_latency_s": 0.02,
            "scheduler.request_overhead_s": 0.004,
            "scheduler.prompt_token_latency_s": 0.0,
            "scheduler.steps_ahead": 0.0,
            "graphs.prefill_layer_overhead_s": 0.0,
        }
    )
    known = truth.with_constants(
        {
            "scheduler.prefill_factor": 1.0,
            "kernels.prefill_attention_factor": None,
            "scheduler.request_latency_s": 0.0,
            "scheduler.request_overhead_s": 0.0,
        }
    )
    points = []
    for point in true_points(noise=0.0):
        load = point.load
        requests = alike(load.concurrency, prompt_len=load.prompt_len, output_len=2000)
        requests.arrival_s[1:] = 1e-6
        server = Server.of(dataclasses.replace(setup_of(), engine=truth), requests)
        ttft_s = float(simulate(server, requests).ttft_s.mean())
        points.append(dataclasses.replace(point, ttft_s=ttft_s))
    setup = dataclasses.replace(setup_of(), engine=known)
    found = fit_server(points, setup=setup, tp_size=1, gamma=0, name="x").profile
    told = first_token_s(points, setup, found, tp_size=1)
    for point, each in zip(
        points[:-1], told, strict=False
    ):  # the last load is larger than the cache
        assert each == pytest.approx(point.ttft_s, rel=0.12), point.load
