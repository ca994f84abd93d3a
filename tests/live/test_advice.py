"""Advice against brute force over scalar predictions, and its interval against sampled errors."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from scipy.stats import binom
from typer.testing import CliRunner

from magicdec.cli import app, register_commands
from magicdec.errors import ConfigError, ServerError
from magicdec.live.advice import (
    DraftedLoad,
    GammaChoice,
    Serving,
    advise,
    answer_of,
    bands,
    choices_at,
    setting,
    situation_of,
)
from magicdec.live.faults import fault_of
from magicdec.live.metrics import choose_target, parse, windows
from magicdec.live.observation import observe, parse_draft
from magicdec.live.show import advice_lines, bars, trend_lines
from magicdec.perfmodel.acceptance import constant_profile, fit_profile, save_profile
from magicdec.perfmodel.intervals import engine_error, one_token_pass, relative_errors
from magicdec.perfmodel.planner import PlanRequest, make_plan
from magicdec.perfmodel.setup import Points
from magicdec.perfmodel.speedup import predict
from magicdec.perfmodel.step import step_terms
from magicdec.specs.engine import load_engine
from tests.live.servers import Request, Vllm, random_requests

SERVING = Serving(model="llama-3.1-8b", hardware="a100-sxm-80gb", engine="ours")
EAGLE, NGRAM = parse_draft("eagle"), parse_draft("ngram")


def situation(**changes) -> DraftedLoad:
    rates = constant_profile(
        (0.8, 0.75, 0.7, 0.6, 0.5), draft="eagle", draft_method="eagle"
    )
    usual = {
        "setup": SERVING.setup(EAGLE, "vllm"),
        "acceptance": rates,
        "batch_size": 8.0,
        "context_len": 4096.0,
    }
    return DraftedLoad(**(usual | {"gamma": 3} | changes))


def brute_force(at: DraftedLoad) -> dict[int, float]:
    """Time per token of each gamma, one scalar prediction at a time."""
    found = {}
    for gamma in range(13):
        point = Points(batch=at.batch_size, context=at.context_len, gamma=gamma)
        one = predict(at.setup, at.acceptance, point)
        found[gamma] = float(one.step_s) / float(one.expected_tokens_per_step)
    return found


@pytest.mark.parametrize("batch", [1.0, 300.0])
def test_the_advised_gamma_is_the_best_of_all(batch):
    at = situation(batch_size=batch)
    tpot, advice = brute_force(at), advise(at)
    assert [choice.gamma for choice in advice.choices] == list(tpot)
    assert [choice.tpot_s for choice in advice.choices] == pytest.approx(
        list(tpot.values()), rel=1e-12
    )
    assert advice.best.gamma == min(tpot, key=tpot.__getitem__)
    assert advice.best.gain == pytest.approx(tpot[3] / min(tpot.values()))
    assert advice.speedup.gain == pytest.approx(tpot[0] / min(tpot.values()))


@pytest.mark.parametrize(
    ("batch", "share"), [(1, 0.4), (4, 0.05), (16, 0.9), (64, 0.4)]
)
def test_a_batch_verifies_the_drafts_of_those_that_have_one(batch, share):
    """Against the mean over how many sequences of the batch have a draft: such a step's pass has one token for each
    sequence, and gamma more for each that has a draft; without any it is autoregressive, and has searched for
    drafts all the same."""
    rates = msgspec.structs.replace(situation().acceptance, drafted_share=share)
    at = dataclasses.replace(
        situation(),
        setup=SERVING.setup(NGRAM, "vllm"),
        batch_size=batch,
        acceptance=rates,
    )
    for choice in advise(at).choices[1:]:
        numbers = np.arange(batch + 1)
        terms = step_terms(
            at.setup, batch=float(batch), kv_len=at.context_len, draft_kv_len=at.context_len,
            gamma=choice.gamma * numbers / batch,
        )  # fmt: skip
        step_s = np.where(numbers > 0, terms.step_s, terms.undrafted.total_s)
        mean = float(np.sum(binom.pmf(numbers, batch, share) * step_s))
        exact = 1e-9 if batch <= 8 else 0.025  # of more, nine numbers stand for all
        assert choice.tpot_s * choice.tokens_per_step == pytest.approx(mean, rel=exact)


def test_with_poor_drafts_at_a_large_batch_it_says_zero():
    poor = constant_profile(0.05, draft="eagle", draft_method="eagle")
    advice = advise(
        situation(acceptance=poor, batch_size=512.0, context_len=512.0, gamma=5)
    )
    assert (advice.best.gamma, advice.answer) == (0, "change")
    assert advice.best.gain_low > 1.0


def test_the_interval_is_that_of_sampled_errors():
    """Times of each kind of term, the engine's ratio and rates drawn from their errors; 5 % and 95 % of the gain.
    Each of these, of 1000 draws, has an error of 0.02 of the interval; 0.15 is allowed."""
    rng = np.random.default_rng(0)
    counts = [
        {"draft_method": "eagle", "budget": 4096, "context": 4096, "position": i, "trials": 300 * 0.7 ** (i - 1),
         "accepted": 300 * 0.7**i} for i in (1, 2, 3)
    ]  # fmt: skip
    at = situation(
        acceptance=fit_profile(counts, draft="eagle", spread=0.0), batch_size=64.0
    )
    gamma = 1
    (choice,) = [each for each in advise(at).choices if each.gamma == gamma]
    run = one_token_pass(at.setup)
    errors = relative_errors(run, at.setup.hardware, at.setup.engine)
    seconds = {}
    for each in (gamma, at.gamma):
        one = predict(
            at.setup, at.acceptance, Points(batch=64.0, context=4096.0, gamma=each)
        )
        seconds[each] = {
            group: float(s) for group, s in one.terms.step_seconds("group").items()
        }

    def tokens(each: int, sigma: float) -> float:
        law = at.acceptance.conditional_rates(
            budget=4096.0, context=4096.0, gamma_max=4, num_sigma=sigma
        )
        return 1.0 + float(np.cumprod(law)[:each].sum())

    gains = []
    for _ in range(1000):
        engine = np.exp(engine_error(at.setup) * 2 / 3 * rng.standard_normal())
        moved = {
            group: np.exp(error * rng.standard_normal())
            for group, error in errors.items()
        }
        sigma = rng.standard_normal()
        step = {
            each: sum(s * moved[group] for group, s in seconds[each].items())
            for each in seconds
        }
        gains.append(
            engine
            * tokens(gamma, sigma)
            / step[gamma]
            * step[at.gamma]
            / tokens(at.gamma, sigma)
        )
    low, high = np.quantile(gains, [0.05, 0.95])
    assert np.log(choice.gain_low) == pytest.approx(
        np.log(low), abs=0.15 * np.log(high / low)
    )
    assert np.log(choice.gain_high) == pytest.approx(
        np.log(high), abs=0.15 * np.log(high / low)
    )


def test_unclear_is_said_where_the_interval_holds_one():
    at = situation(batch_size=4.0, gamma=1)
    uncertain = msgspec.structs.replace(at.acceptance, spread=0.5)
    sure, unsure = advise(at), advise(dataclasses.replace(at, acceptance=uncertain))
    assert sure.best.gamma == unsure.best.gamma != 1
    assert unsure.best.gain_low < sure.best.gain_low
    for advice in (sure, unsure):
        best = advice.best
        expected = "change" if best.gain >= 1.02 and best.gain_low > 1 else "unclear"
        assert advice.answer == expected
        assert f"advice: {expected if expected != 'change' else 'gamma'}" in "\n".join(
            advice_lines(advice, None)
        )


def test_keep_is_said_where_no_other_gamma_can_gain_much():
    for others, answer in (
        ([(1.01, 0.97, 1.05)], "keep"),
        ([(1.01, 0.89, 1.15)], "unclear"),  # little by the middle, much by the end
        ([(1.05, 0.95, 1.16)], "unclear"),
        ([(1.05, 1.01, 1.09)], "change"),
        ([(1.01, 1.005, 1.015)], "keep"),
        (
            [(0.9, 0.5, 1.5)],
            "unclear",
        ),  # the one in use is the best by the middle, and perhaps far from it
        ([(0.9, 0.8, 1.05), (0.7, 0.3, 1.3)], "unclear"),
        ([(0.9, 0.8, 1.05), (0.7, 0.6, 0.8)], "keep"),
        ([(1.01, 0.99, 1.02), (0.9, 0.4, 1.4)], "unclear"),
    ):
        choices = [
            GammaChoice(
                gamma=3 + number,
                tokens_per_step=3.0,
                tpot_s=0.01,
                gain=gain,
                gain_low=low,
                gain_high=high,
                is_sure_depth=True,
            )
            for number, (gain, low, high) in enumerate([(1.0, 1.0, 1.0), *others])
        ]
        assert answer_of(choices, 3) == answer, others


def test_the_setting_is_exports_text_with_the_advised_gamma():
    advice = advise(situation())
    assert (
        f'"num_speculative_tokens": {max(gamma for *_, gamma in bands(advice))}'
        in setting(advice, "vllm")
    )
    assert "--speculative-algorithm EAGLE" in setting(advice, "sglang")
    assert "Eagle3" in setting(advice, "trtllm")
    assert f"draft {advice.best.gamma} tokens" in setting(advice, "llama.cpp")


def test_the_setting_of_the_plugins_draft_names_its_budget():
    sparse = parse_draft("self", method="streamingllm", budget=512)
    profile = constant_profile(0.9, draft="self", draft_method="streamingllm")
    advice = advise(
        situation(
            setup=SERVING.setup(sparse, "vllm"), acceptance=profile, context_len=32768.0
        )
    )
    assert advice.best.gamma > 0
    text = setting(advice, "vllm")
    assert '"draft_budget": 512' in text
    assert "magicdec_vllm.draft.SparseDraft" in text


def test_bands_cover_every_batch_once():
    ranges = bands(advise(situation(batch_size=64.0)))
    assert ranges[0][0] == 1
    assert all(after[0] == before[1] + 1 for before, after in pairwise(ranges))


def seen_on(server: Vllm, requests: list[Request]):
    before = parse(server.scrape(), where="test", time_s=0.0)
    server.serve(requests)
    after = parse(server.scrape(), where="test", time_s=10.0)
    return observe([before, after], choose_target(after, None))


def test_a_situation_holds_what_was_observed():
    requests = random_requests(1, number=16, undrafted=0.25)
    seen = seen_on(Vllm(), requests)
    drafted = np.array([each.drafted for each in requests]) > 0
    of_ngram, of_eagle = (
        situation_of(seen, NGRAM, SERVING),
        situation_of(seen, EAGLE, SERVING),
    )
    assert of_ngram.acceptance.drafted_share == pytest.approx(drafted.mean())
    assert of_eagle.acceptance.drafted_share == 1.0
    assert (of_ngram.batch_size, of_ngram.gamma) == (pytest.approx(16), 3)


def test_a_server_without_speculation_needs_a_given_profile_of_that_draft():
    plain = [
        Request(each.prompt_len, (0,) * 30, (0,) * 30) for each in random_requests(2)
    ]
    seen = seen_on(Vllm(gamma=None), plain)
    with pytest.raises(ConfigError, match="--acceptance"):
        situation_of(seen, EAGLE, SERVING)
    with pytest.raises(
        ConfigError, match=r"draft ngram \(ngram\), the plan is for eagle \(eagle\)"
    ):
        situation_of(
            seen,
            EAGLE,
            SERVING,
            acceptance=constant_profile(0.8, draft="ngram", draft_method="ngram"),
        )
    given = constant_profile(0.9, draft="eagle", draft_method="eagle")
    at = situation_of(seen, EAGLE, SERVING, acceptance=given)
    assert (at.gamma, at.batch_size) == (0, pytest.approx(40))
    assert advise(at).best.gamma > 0


def test_an_idle_server_gets_no_advice():
    idle = parse(Vllm().scrape(), where="test")
    with pytest.raises(ConfigError, match="without a load"):
        situation_of(observe([idle, idle], choose_target(idle, None)), NGRAM, SERVING)


def test_a_prediction_far_from_what_is_measured_is_said():
    advice = advise(situation())
    assert "calibrate --server" in "\n".join(
        advice_lines(advice, 10 * advice.in_use.tpot_s)
    )
    assert "calibrate --server" not in "\n".join(
        advice_lines(advice, 1.1 * advice.in_use.tpot_s)
    )


def test_a_window_slides_and_its_trend_is_drawn(serve):
    """Scrapes older than the window are let go; the trend has a bar for each one seen."""
    engine = Vllm()
    _, address = serve(
        {"/metrics": lambda handler: handler.reply(engine.scrape().encode())}
    )
    seconds = iter(range(100))

    def sleep(_: float) -> None:
        engine.serve(random_requests(next(seconds), number=5))

    history = []
    for number, taken in enumerate(
        windows(address, seconds=3600.0, interval_s=0.2, sleep=sleep)
    ):
        history.append(observe(taken, choose_target(taken[-1], None)))
        if number == 4:
            break
    assert [each.num_scrapes for each in history] == [2, 3, 4, 5, 6]
    (line,) = [line for line in trend_lines(history) if "tokens/step" in line]
    assert sum(line.count(bar) for bar in "▁▂▃▄▅▆▇█") == 5
    assert bars([0.0, None, 1.0]) == "▁ █"


def test_the_command_advises_from_two_dumps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    register_commands()
    server = Vllm(model="llama-3.1-8b")
    for name, seed in (("before.txt", 1), ("after.txt", 2)):
        server.serve(random_requests(seed))
        (tmp_path / name).write_text(server.scrape())
    words = [
        "observe",
        "before.txt",
        "after.txt",
        "--draft",
        "eagle",
        "--hardware",
        "a100-sxm-80gb",
    ]
    words += ["--records", "r.jsonl"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "advice: " in done.stdout
    assert "in use" in done.stdout
    assert "vllm serve meta-llama/Llama-3.1-8B-Instruct" in done.stdout
    save_profile(constant_profile(0.5), tmp_path / "x.json")
    assert (tmp_path / "r.jsonl").read_text().count("\n") == 1
    document = json.loads(
        CliRunner().invoke(app, [*words[:-2], "--format", "json"]).stdout
    )
    assert document["gamma"] == 3
    assert [choice["gamma"] for choice in document["advice"]["choices"]] == list(
        range(13)
    )
    assert len(document["acceptance_rates"]) == 3
    table = (
        CliRunner().invoke(app, [*words[:-2], "--format", "csv"]).stdout.splitlines()
    )
    assert table[0].startswith("gamma,tokens_per_step")
    assert len(table) == 14
    refused = CliRunner().invoke(
        app,
        [*words[:3], "--draft", "eagle", "--model", "llama-3.1-8b", "--format", "csv"],
    )
    assert refused.exit_code != 0


def test_watching_ends_with_the_last_view_when_it_is_stopped(serve):
    """Ctrl-C after a few scrapes: exit code 0, and advice and trend as they were last."""
    engine = Vllm(model="llama-3.1-8b")
    number = iter(range(1000))

    def answer(handler) -> None:
        engine.serve(random_requests(next(number), number=5))
        handler.reply(engine.scrape().encode())

    server, address = serve({"/metrics": answer})
    words = [
        "observe",
        str(address),
        "--draft",
        "eagle",
        "--hardware",
        "a100-sxm-80gb",
        "--watch",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "magicdec", *words, "--seconds", "2", "--interval", "0.2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as program:  # fmt: skip
        while len(server.seen) < 5 and program.poll() is None:
            time.sleep(0.1)
        program.send_signal(signal.SIGINT)
        printed, failed = program.communicate(timeout=60)
    assert (program.returncode, failed) == (0, "")
    assert "advice: " in printed
    assert any(bar in printed for bar in "▁▂▃▄▅▆▇█")


def test_watching_outlasts_a_restart_of_the_server(serve):
    """It stops answering for a while, comes back as another process, and what it counts since then is shown."""
    engines = [Vllm(model="llama-3.1-8b"), Vllm(model="llama-3.1-8b")]
    number, slept = iter(range(1000)), []

    def answer(handler) -> None:
        at = next(number)
        if 4 <= at < 8:  # METRICS_PATHS are two
            handler.send_error(503)
            return
        engines[at >= 8].serve(random_requests(at, number=5))
        text = (
            engines[at >= 8].scrape()
            + f"process_start_time_seconds {1.0 + (at >= 8)}\n"
        )
        handler.reply(text.encode())

    _, address = serve({"/metrics": answer, "/prometheus/metrics": answer})
    errors: list[ServerError] = []
    seen = windows(
        address, seconds=60.0, interval_s=0.2, sleep=slept.append, missed=errors.append
    )
    for taken in seen:
        observed = observe(taken, choose_target(taken[-1], None))
        if len(taken) == 8:
            break
    assert errors
    assert all("503" in str(error) for error in errors)
    assert observed.num_restarts == 1
    assert len(observed.segments) == 6
    assert observed.counts.output_tokens


def test_a_plan_and_the_advice_choose_one_gamma_of_one_profile():
    """Rates that rise with the position, and a look-up that finds a draft in some of the steps."""
    rates = (0.55, 0.68, 0.75)
    for draft, share, batch in ((EAGLE, 1.0, 96), (NGRAM, 0.3, 4)):
        left, rows = 4000.0, []
        for position, rate in enumerate(rates, 1):
            rows.append({"draft_method": draft.method, "budget": 4096, "context": 4096, "position": position,
                         "trials": left, "accepted": left * rate})  # fmt: skip
            left *= rate
        profile = msgspec.structs.replace(
            fit_profile(rows, draft=draft.name, spread=0.0), drafted_share=share
        )
        setup = dataclasses.replace(SERVING, engine="vllm").setup(draft, "vllm")
        at = situation(
            setup=setup,
            acceptance=profile,
            batch_size=float(batch),
            context_len=4096.0,
        )
        advice = advise(at)
        drafted = [choice for choice in advice.choices if choice.gamma]
        request = PlanRequest(
            model=setup.model, hardware=(setup.hardware,), engine=setup.engine, tp_size=1, batch_sizes=(batch,),
            context_lens=(4096,), draft=draft.name, draft_method=draft.method, acceptance=(profile,),
        )  # fmt: skip
        planned = make_plan(request).candidates
        rows_of_plan = {row.gamma: row.tpot_s for row in planned}
        assert (
            min(rows_of_plan, key=rows_of_plan.get)
            == min(drafted, key=lambda choice: choice.tpot_s).gamma
        )
        assert rows_of_plan == pytest.approx(
            {choice.gamma: choice.tpot_s for choice in drafted}, rel=1e-9
        )
        speedups = choices_at(at, batch, 4096.0, over=0)
        for row in planned:
            choice = speedups[row.gamma]
            assert (choice.gain_low, choice.gain_high) == pytest.approx(
                (row.speedup_low, row.speedup_high), rel=1e-9
            )


def test_a_server_slower_than_its_acceptance_says_has_a_fault_with_sized_causes():
    """A time per token made of the predicted step and a known excess; one as predicted has none."""
    engine = load_engine("vllm")
    at = situation(
        setup=Serving(model="llama-3.1-8b", hardware="h100", engine="vllm").setup(
            EAGLE, "vllm"
        )
    )
    advice = advise(at)
    now = advice.in_use
    assert fault_of(advice, now.tpot_s) is None
    excess_s = 20e-3
    tpot_s = now.tpot_s + excess_s / now.tokens_per_step
    fault = fault_of(advice, tpot_s)
    assert fault.excess_s == pytest.approx(excess_s)
    assert fault.accepted_share == pytest.approx((now.tokens_per_step - 1.0) / 3)
    assert fault.gain == pytest.approx(advice.choices[0].tpot_s / tpot_s)
    assert fault.gain < fault.expected_low < fault.expected
    late_s = 8.0 * (
        engine.overheads.older_sequence_overhead_s
        - engine.overheads.sequence_overhead_s
    )
    late_s += engine.overheads.synchronous_step_overhead_s
    assert fault.causes[
        "scheduling between steps (asynchronous scheduling off)"
    ] == pytest.approx(late_s)
    assert list(fault.causes.values()) == sorted(
        fault.causes.values(), key=lambda seconds: abs(seconds - excess_s)
    )
    assert any(
        "look for an eager drafter" in line or "eager drafter" in line
        for line in advice_lines(advice, tpot_s)
    )
    poor = constant_profile(0.1, draft="eagle", draft_method="eagle")
    assert fault_of(advise(situation(acceptance=poor)), 1.0) is None
