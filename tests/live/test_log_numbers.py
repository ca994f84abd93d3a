"""Readers of logs and of load generators' results, each against the numbers that the lines were written from."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from magicdec.errors import ConfigError
from magicdec.live import engine_logs, logged, reported
from magicdec.live.engine_logs import LineFields, fields_of, number_in
from magicdec.live.logged import LoggedSeries, Stretch, observation_of
from magicdec.live.metrics import SGLANG, TRTLLM, VLLM
from magicdec.live.observation import UNNAMED, CounterIncreases
from magicdec.perfmodel import MAX_POSITIONS

WHOLE = st.integers(1, 500).map(float)


# Lines


@pytest.mark.parametrize(("text", "value"), [
    ("12", 12.0), (" 12.5 tokens/s", 12.5), ("-3", -3.0), ("[0.7", 0.7), ("1e3", 1000.0), ("1_000", 1000.0),
    ("2E-2 s", 0.02), ("abc", None), ("", None), ("1e999", None), ("12%", 12.0),
])  # fmt: skip
def test_a_number_is_what_a_text_begins_with(text: str, value: float | None) -> None:
    assert number_in(text) == value


def test_the_fields_of_a_line_are_read_by_name() -> None:
    told = LineFields("A b: 3 reqs, [C]: 0.5, 0.25, x, 0.1, D: words, e: 7")
    assert told.number("a b") == 3.0
    assert told.number("nothing", "e") == 7.0
    assert told.number("d") is None
    assert told.numbers("c") == (0.5, 0.25)
    assert told.text("d") == "words"
    assert told.text("nothing") == ""
    assert fields_of("no name, a: 1, 2") == {"a": ["1", "2"]}
    many = ", ".join(["0.5"] * (MAX_POSITIONS + 3))
    assert len(LineFields(f"p: {many}").numbers("p")) == MAX_POSITIONS


@pytest.mark.parametrize(("method", "checkpoint", "expected"), [
    ("eagle3", "", ("eagle3", "eagle3")), ("eagle", "x/EAGLE3-y", ("eagle3", "eagle3")),
    ("eagle", "", ("eagle", "eagle")),
    ("deepseek_mtp", "", ("mtp", "mtp")), ("draft_model", "a/b-small", ("a/b-small", "full")), ("odd", "", None),
    ("ngram", "", ("ngram", "ngram")),
])  # fmt: skip
def test_a_draft_is_known_by_its_method_or_its_checkpoint(
    method: str, checkpoint: str, expected: tuple[str, str] | None
) -> None:
    found = engine_logs.draft_named(method, checkpoint)
    assert (None if found is None else (found.name, found.method)) == expected


@given(
    drafts=st.integers(1, 2000),
    rates=st.lists(st.floats(0.05, 0.99), min_size=1, max_size=6),
    digits=st.sampled_from([2, 3]),
)
def test_positions_of_a_rounded_line_are_those_that_were_counted(
    drafts: int, rates: list[float], digits: int
) -> None:
    """Drafts of full length: their number is exact, and positions add up to the accepted tokens."""
    survived = []
    left = drafts
    for rate in rates:
        left = round(left * rate)
        survived.append(left)
    accepted = float(sum(survived))
    told = [round(each / drafts, digits) for each in survived]
    found, counts = engine_logs.positions_of(
        mean=round(1.0 + accepted / drafts, 2),
        accepted=accepted, drafted=float(drafts * len(rates)), rates=told,
    )  # fmt: skip
    assert found == pytest.approx(drafts)
    assert list(counts) == sorted(counts, reverse=True)
    assert all(0.0 <= count <= found for count in counts)
    if accepted and sum(told):
        assert math.fsum(counts) <= accepted * (1 + 1e-9)
        error = 1.0 + drafts * 10.0**-digits
        for count, true in zip(counts, survived, strict=True):
            assert count == pytest.approx(true, rel=0.02, abs=error)


def test_drafts_shorter_than_gamma_are_counted_by_the_mean() -> None:
    """100 drafts of 2 tokens where gamma is 4: drafted tokens alone would say 50."""
    found, counts = engine_logs.positions_of(
        mean=2.5, accepted=150.0, drafted=200.0, rates=[0.9, 0.6, 0.0, 0.0]
    )
    assert found == pytest.approx(100.0)
    assert counts == pytest.approx((90.0, 60.0, 0.0, 0.0))
    none, counts = engine_logs.positions_of(
        mean=1.0, accepted=0.0, drafted=40.0, rates=[0.0, 0.0]
    )
    assert (none, counts) == (20.0, (0.0, 0.0))
    few, _ = engine_logs.positions_of(mean=None, accepted=0.0, drafted=0.0, rates=[0.0])
    assert few == 1.0


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_totals_are_read_as_their_increases_and_begin_anew_after_a_fall(
    values: list[int],
) -> None:
    totals = engine_logs._Totals(True)
    before: int | None = None
    for value in values:
        (found,) = totals.increase((float(value),))
        is_anew = before is None or value < before
        assert found == (value if is_anew else value - (before or 0))
        before = value
    plain = engine_logs._Totals(False)
    assert [plain.increase((float(value),)) for value in values] == [(float(value),) for value in values]  # fmt: skip


@pytest.mark.parametrize(("line", "seconds"), [
    ("INFO 11-20 10:01:40 x", 36100.0), ("2026-01-20T00:00:01 INFO 01-20 23:59:59 x", 86399.0), ("no time", None),
    ("x" * 200 + " 10:00:00", None),
])  # fmt: skip
def test_the_last_stamp_of_a_line_is_its_clock(
    line: str, seconds: float | None
) -> None:
    assert engine_logs._clock_s(line) == seconds


@given(
    interval=st.integers(1, 3600),
    start=st.integers(0, 86_399),
    number=st.integers(2, 6),
)
def test_the_time_between_lines_is_their_usual_gap_also_over_midnight(
    interval: int, start: int, number: int
) -> None:
    line: Any = engine_logs._StatisticsLine
    lines = [
        line(engine="", clock_s=float((start + n * interval) % 86_400), throughput=LineFields(""))
        for n in range(number)
    ]  # fmt: skip
    assert engine_logs._interval_s(lines) == interval
    late = float((start + number * interval + 5000) % 86_400)
    lines.append(line(engine="", clock_s=late, throughput=LineFields("")))
    lines.append(line(engine="", clock_s=late, throughput=LineFields("")))
    assert engine_logs._interval_s(lines) == interval  # a night, and two of one moment
    assert engine_logs._interval_s(lines[:1]) == 10.0
    unstamped = [line(engine="", clock_s=None, throughput=LineFields(""))] * 3
    assert engine_logs._interval_s(unstamped) == 10.0


def test_a_count_of_drafts_belongs_to_the_line_of_its_second() -> None:
    before: Any = engine_logs._StatisticsLine(engine="0", clock_s=36000.0, throughput=LineFields("a: 1"))  # fmt: skip
    for clock, belongs in (("10:00:00", True), ("10:00:01", True), ("10:00:02", False)):
        assert engine_logs._belongs(f"INFO {clock} x", before) == belongs
    assert engine_logs._belongs("no stamp", before)
    assert not engine_logs._belongs("no stamp", dataclasses.replace(before, throughput=None))  # fmt: skip
    taken = dataclasses.replace(before, speculation=LineFields("b: 1"))
    assert not engine_logs._belongs("no stamp", taken)


VLLM_LINE = (
    "INFO 11-20 {clock} [loggers.py:111] Engine {engine}: Avg prompt throughput: {prompts:.1f} tokens/s, Avg "
    "generation throughput: {speed:.1f} tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, "
    "GPU KV cache usage: 3.5%"
)


def vllm_line(number: int, **told: Any) -> str:
    usual = {
        "engine": "000",
        "prompts": 0.0,
        "speed": 100.0,
        "running": 4,
        "waiting": 0,
    }
    return VLLM_LINE.format(clock=f"10:00:{10 * number:02d}", **usual | told)


@given(
    speed=st.integers(1, 5000).map(float),
    running=st.integers(1, 64),
    waiting=st.integers(0, 9),
    prompts=st.sampled_from([0.0, 1e6]),
)
def test_a_line_without_drafts_gives_the_time_of_a_step(
    speed: float, running: int, waiting: int, prompts: float
) -> None:
    """Each step of a batch makes a token of each; where prompts were read faster than tokens were made, only such
    lines are there to tell."""
    load: dict[str, Any] = {"speed": speed, "running": running, "waiting": waiting}
    lines = [vllm_line(number, prompts=prompts, **load) for number in range(4)]
    told = engine_logs.read_vllm_log("\n".join(lines))
    assert len(told.stretches) == 4
    for stretch in told.stretches:
        assert stretch.step_s == pytest.approx(running / speed)
        assert stretch.seconds == 10.0
        assert stretch.running == running
        assert stretch.waiting == waiting
        assert stretch.kv_usage == pytest.approx(0.035)
        assert stretch.engine == "0"
        counts = stretch.counts
        assert counts.output_tokens == counts.counted_steps == pytest.approx(10 * speed)
        assert (counts.drafts, counts.accepted, counts.requests) == (0.0, 0.0, 0.0)
    mixed = [*lines[:2], vllm_line(2, prompts=speed + 1, **load)]
    last = engine_logs.read_vllm_log("\n".join(mixed)).stretches[-1]
    assert (last.step_s is None) == (prompts == 0.0)


def test_a_batch_is_the_mean_of_a_line_and_the_one_before() -> None:
    lines = [
        vllm_line(number, engine="001", running=running)
        for number, running in enumerate((10, 20, 0, 5))
    ]
    stretches = engine_logs.read_vllm_log("\n".join(lines)).stretches
    steps = [stretch.step_s for stretch in stretches]
    assert steps == [pytest.approx(0.1), pytest.approx(0.15), None, None]


@given(
    drafts=st.integers(20, 400),
    gamma=st.integers(1, 5),
    share=st.floats(0.0, 1.0),
    undrafted=st.sampled_from([0, 1000]),
)
def test_steps_without_a_draft_are_those_that_the_speed_shows(
    drafts: int, gamma: int, share: float, undrafted: int
) -> None:
    """Tokens that are neither accepted nor of a drafted step; below 15 % they are rounding of clocks."""
    accepted = round(drafts * gamma * share)
    speed = (drafts + accepted + undrafted) / 10.0
    told = engine_logs._StatisticsLine(
        engine="0", clock_s=0.0, throughput=LineFields(f"avg generation throughput: {speed}"),
        speculation=LineFields(f"Accepted: {accepted} tokens, Drafted: {drafts * gamma} tokens"),
    )  # fmt: skip
    counts, seconds = engine_logs._vllm_counts(told, engine_logs._Totals(False), 10.0, gamma)  # fmt: skip
    assert seconds == 10.0
    assert counts.drafts == pytest.approx(drafts)
    assert counts.draft_tokens == drafts * gamma
    assert counts.accepted == accepted
    assert counts.counted_steps == pytest.approx(drafts + undrafted)
    assert counts.output_tokens == pytest.approx(drafts + accepted + undrafted)
    assert counts.requests == 0.0
    drafted = (
        f"Drafted: {drafts * gamma} tokens, Drafted throughput: {drafts * gamma / 4}"
    )
    alone = dataclasses.replace(
        told, throughput=None, speculation=LineFields(f"Accepted: {accepted} tokens, {drafted}")
    )  # fmt: skip
    counts, seconds = engine_logs._vllm_counts(alone, engine_logs._Totals(False), 10.0, gamma)  # fmt: skip
    assert seconds == pytest.approx(4.0)
    assert counts.output_tokens is None
    assert counts.requests is None
    assert counts.counted_steps == pytest.approx(drafts)


@pytest.mark.parametrize(("undrafted", "steps"), [(14, 100.0), (16, 116.0)])
def test_fewer_than_a_seventh_more_steps_are_clocks(
    undrafted: int, steps: float
) -> None:
    told = engine_logs._StatisticsLine(
        engine="0", clock_s=0.0, throughput=LineFields(f"avg generation throughput: {(150 + undrafted) / 10}"),
        speculation=LineFields("Accepted: 50 tokens, Drafted: 100 tokens"),
    )  # fmt: skip
    counts, _ = engine_logs._vllm_counts(told, engine_logs._Totals(False), 10.0, 1)
    assert counts.counted_steps == pytest.approx(steps)


@pytest.mark.parametrize(("line", "faults", "model", "draft", "gamma"), [
    ("Initializing a V1 LLM engine (v0.32.0) with config: model='a/b', "
     "speculative_config=SpeculativeConfig(method='eagle3', model='c/d', num_spec_tokens=5), enforce_eager=True",
     [engine_logs.EAGER_LINE], "a/b", "eagle3", 5),
    ("Initializing a V1 LLM engine (v0.32.0) with config: model='a/b', enforce_eager=False", [], "a/b", None, None),
    ("non-default args: {'speculative_config': {'method': 'ngram'}}", [], "", "ngram", None),
    ("WARNING setting cudagraph_mode=PIECEWISE", [engine_logs.PIECEWISE_LINE.format(mode="PIECEWISE")], "", None, None),
    ("WARNING cudagraph_mode from FULL to CUDAGraphMode.NONE", [engine_logs.EAGER_LINE], "", None, None),
    ("Asynchronous scheduling will be disabled because", [engine_logs.SYNCHRONOUS_LINE], "", None, None),
    ("something else is disabled", [], "", None, None), ("cudagraph_mode: FULL", [], "", None, None),
])  # fmt: skip
def test_what_the_start_of_a_server_tells(
    line: str, faults: list[str], model: str, draft: str | None, gamma: int | None
) -> None:
    said = engine_logs._StartSettings()
    engine_logs._vllm_start(line, said)
    assert list(said.faults) == faults
    assert said.model == model
    assert (said.draft and said.draft.name) == draft
    assert said.gamma == gamma


@given(
    gamma=st.integers(1, 8),
    running=st.integers(1, 32),
    accepted=st.floats(0.3, 1.0),
    of_drafts=st.booleans(),
    step_ms=st.floats(5.0, 50.0),
)
def test_sglangs_gamma_and_step_follow_from_its_lengths_and_rates(
    gamma: int, running: int, accepted: float, of_drafts: bool, step_ms: float
) -> None:
    length = 1.0 + gamma * accepted
    rate = (length - 1.0) / gamma if of_drafts else length / (gamma + 1)
    assume(abs((length - 1.0) / gamma - length / (gamma + 1)) > 0.02)
    speed = running * length / (step_ms / 1e3)
    line = (
        f"Decode batch, #running-req: {running}, #token: {running * 50}, token usage: 0.25, accept len: {length:.6f}, "
        f"accept rate: {rate:.6f}, cuda graph: True, gen throughput (token/s): {speed:.6f}, #queue-req: 3"
    )
    told = engine_logs.read_sglang_log("\n".join([line] * 3))
    assert told.gamma == gamma
    for stretch in told.stretches:
        counts = stretch.counts
        assert counts.drafts == counts.counted_steps == 40.0 * running
        assert counts.draft_tokens == 40.0 * running * gamma
        assert counts.accepted == pytest.approx(40.0 * running * (length - 1.0), rel=1e-4)  # fmt: skip
        assert counts.output_tokens == pytest.approx(40.0 * running * length, rel=1e-4)
        assert counts.iterations == 40.0
        assert stretch.step_s == pytest.approx(step_ms / 1e3, rel=1e-4)
        assert stretch.seconds == pytest.approx(40.0 * step_ms / 1e3, rel=1e-4)
        assert (stretch.running, stretch.waiting) == (running, 3.0)
        assert (stretch.kv_usage, stretch.context_len) == (0.25, 50.0)
    given_gamma = "server_args=ServerArgs(speculative_num_draft_tokens=4, decode_log_interval=10)"  # fmt: skip
    told = engine_logs.read_sglang_log("\n".join([given_gamma, line]))
    assert told.gamma == 3
    assert told.stretches[0].counts.iterations == 10.0


@pytest.mark.parametrize(("arguments", "gamma"), [
    ("speculative_num_draft_tokens=4", 3), ("speculative_num_draft_tokens=1, speculative_num_steps=2", 2),
    ("speculative_num_steps=5", 5), ("speculative_num_steps=0", 4), ("", 4),
])  # fmt: skip
def test_sglangs_own_setting_of_gamma_counts_first(arguments: str, gamma: int) -> None:
    """Else the fewest that its longest accepted length needs."""
    lines = [LineFields("accept len: 2.0"), LineFields("accept len: 4.2")]
    assert engine_logs._sglang_gamma(f"server_args=ServerArgs({arguments})", lines) == gamma  # fmt: skip
    assert engine_logs._sglang_gamma("", []) is None
    assert engine_logs._sglang_gamma("", [LineFields("accept len: 1.0")]) == 1


@pytest.mark.parametrize(("without", "is_fault"), [(1, False), (2, False), (3, True)])
def test_graphs_are_off_where_most_batches_ran_without(
    without: int, is_fault: bool
) -> None:
    lines = [
        f"Decode batch, #running-req: 2, cuda graph: {number >= without}, gen throughput (token/s): 10"
        for number in range(4)
    ]
    told = engine_logs.read_sglang_log("\n".join(lines))
    assert bool(told.faults) == is_fault
    if is_fault:
        assert "75% of its decode batches" in told.faults[0]
    assert len(told.stretches) == 4
    idle = engine_logs.read_sglang_log("Decode batch, #running-req: 0, cuda graph: True")  # fmt: skip
    assert idle.stretches == []


def test_what_sglangs_arguments_tell() -> None:
    text = (
        "server_args=ServerArgs(model_path='a/b', speculative_algorithm='EAGLE3', speculative_draft_model_path='c/d', "
        "disable_overlap_schedule=True)\nDecode batch, #running-req: 1, accept len: 2.0"
    )
    told = engine_logs.read_sglang_log(text)
    assert (told.model, told.series) == ("a/b", SGLANG)
    assert told.draft is not None
    assert told.draft.name == "eagle3"
    assert told.faults == (engine_logs.SYNCHRONOUS_LINE,)
    for algorithm in ("None", ""):
        plain = engine_logs.read_sglang_log(
            f"server_args=ServerArgs(speculative_algorithm={algorithm or 'None'})\nDecode batch, #running-req: 1"
        )
        assert plain.draft is UNNAMED
        assert plain.faults == ()


@given(
    running=st.integers(1, 64), gamma=st.integers(0, 6), step_ms=st.floats(1.0, 90.0)
)
def test_tensorrts_iterations_are_steps_of_their_tokens(
    running: int, gamma: int, step_ms: float
) -> None:
    line = (
        f"iter = 7, rank = 0, host_step_time = {step_ms * 2}ms, prev_device_step_time = {step_ms}ms, "
        f"num_scheduled_requests: {running}, states = {{'num_ctx_tokens': 0, "
        f"'num_generation_tokens': {running * (gamma + 1)}, 'cached_kv_tokens': {running * 100}, 'kv_cache_util': 0.5}}"
    )  # fmt: skip
    told = engine_logs.read_trtllm_log("\n".join([line] * 2))
    assert told.gamma == gamma
    assert bool(told.notes) == bool(gamma)
    for stretch in told.stretches:
        assert stretch.counts.draft_tokens == running * gamma
        assert stretch.counts.counted_steps == stretch.running == running
        assert stretch.counts.iterations == 1.0
        assert stretch.step_s == stretch.seconds == pytest.approx(step_ms / 1e3)
        assert (stretch.context_len, stretch.kv_usage) == (100.0, 0.5)
    for other in (
        line.replace("rank = 0", "rank = 1"),
        line.replace("ctx_tokens': 0", "ctx_tokens': 3"),
    ):
        assert engine_logs.read_trtllm_log(other).stretches == []
    host = line.replace("prev_device_step_time", "other")
    (stretch,) = engine_logs.read_trtllm_log(host).stretches
    assert stretch.step_s == pytest.approx(step_ms * 2 / 1e3)


@given(
    tokens=st.integers(1, 300),
    accepted=st.none() | st.integers(0, 300),
    drafts=st.none() | st.integers(1, 300),
    seconds=st.floats(0.1, 9.0),
    drafted=st.sampled_from([0.0, 9.0]),
)
def test_a_request_alone_takes_a_step_for_each_token_that_was_not_accepted(
    tokens: int, accepted: int | None, drafts: int | None, seconds: float, drafted: float
) -> None:  # fmt: skip
    request = engine_logs.Timed(
        prompt_len=7.0, prompt_s=0.5, eval_s=seconds, tokens=float(tokens), accepted=accepted and float(accepted),
        drafted=drafted, drafts=drafts and float(drafts),
    )  # fmt: skip
    if accepted == 0:
        request.accepted = 0.0
    stretch = engine_logs._llama_stretch(request)
    kept = min(accepted or 0, tokens - 1)
    steps = max(tokens - kept, 1)
    assert stretch.counts.counted_steps == steps
    assert stretch.counts.accepted == kept
    assert stretch.step_s == pytest.approx(seconds / steps)
    assert stretch.seconds == seconds
    expected = 0 if accepted is None else min(drafts or steps, steps)
    assert stretch.counts.drafts == expected
    assert stretch.counts.ttft_s == 0.5
    assert stretch.counts.prompt_tokens_sum == 7.0
    assert stretch.running == 1.0
    logged_series = engine_logs.of_llama_requests([request], None)
    if drafts:
        assert logged_series.gamma == max(math.ceil(drafted / drafts), 1)
    elif accepted is not None:
        deepest = drafted / max(tokens - accepted, 1)
        assert logged_series.gamma == max(math.ceil(deepest), 1)
    else:
        assert logged_series.gamma is None


# Stretches together


@given(
    steps=st.lists(
        st.none() | st.sampled_from([0.01, 0.011, 0.012, 0.05, 0.5]),
        min_size=1,
        max_size=9,
    )
)
def test_the_usual_step_is_the_median_of_those_within_three_times_the_lower_quarter(
    steps: list[float | None],
) -> None:
    stretches = [Stretch(counts=CounterIncreases(), step_s=step) for step in steps]
    found, left_out = logged._usual_step(stretches)
    known = sorted(step for step in steps if step)
    if not known:
        assert (found, left_out) == (None, 0)
        return
    quarter = known[(len(known) - 1) // 4]
    like = [step for step in known if step <= 3.0 * quarter]
    assert found == statistics.median(like)
    assert left_out == len(steps) - len(like)


def of_engine(engine: str, **fields: Any) -> Stretch:
    counts = CounterIncreases(
        drafts=10.0, accepted=20.0, output_tokens=30.0, requests=0.0, counted_steps=10.0
    )
    usual: dict[str, Any] = {
        "engine": engine, "running": 2.0, "waiting": 1.0, "kv_usage": 0.5, "context_len": 64.0, "step_s": 0.02,
        "seconds": 0.1,
    }  # fmt: skip
    return Stretch(counts=counts, **usual | fields)


def test_a_stretch_that_was_idle_counts_with_the_usual_step() -> None:
    idle, untimed = of_engine("", step_s=0.9, seconds=5.0), of_engine("", step_s=None)
    stretches = [of_engine(""), of_engine(""), idle, untimed]
    series = LoggedSeries(series=VLLM, stretches=stretches, form="x")
    found = observation_of(series)
    assert [segment.step_seconds for segment in found.segments] == pytest.approx([0.2] * 4)  # fmt: skip
    assert found.window_s == pytest.approx(0.4)
    assert found.counts.step_s == pytest.approx(0.02)
    assert "2 of 4 lines span idle time" in found.notes[0]
    assert found.own_tokens_per_s == pytest.approx(60.0 / 0.2)
    assert found.num_scrapes == 4
    unknown = observation_of(
        LoggedSeries(series=VLLM, stretches=[of_engine("", seconds=None)], form="x")
    )
    assert unknown.window_s is None
    assert unknown.own_tokens_per_s is None
    several = dataclasses.replace(series, number=9)
    assert observation_of(several).num_scrapes == 9


def test_means_of_a_log_are_of_what_was_running() -> None:
    busy, idle = of_engine("", running=4.0, waiting=3.0), of_engine("", running=0.0, waiting=9.0)  # fmt: skip
    stretches = [busy, idle, of_engine("")]
    load = observation_of(LoggedSeries(series=VLLM, stretches=stretches)).load
    assert (load.running, load.waiting, load.kv_usage, load.context_len) == (3.0, 2.0, 0.5, 64.0)  # fmt: skip
    nothing = Stretch(counts=CounterIncreases(output_tokens=1.0))
    load = observation_of(LoggedSeries(series=VLLM, stretches=[nothing])).load
    assert (load.running, load.waiting) == (None, None)


def test_engines_side_by_side_are_summed_and_their_batches_averaged() -> None:
    stretches = [of_engine("0"), of_engine("1", running=6.0), of_engine("0"), of_engine("1", running=6.0)]  # fmt: skip
    found = observation_of(LoggedSeries(series=VLLM, stretches=stretches, gamma=3))
    assert len(found.parts) == 2
    assert [part.target.replica for part in found.parts] == ["0", "1"]
    assert found.target.replica == ""
    assert found.counts.output_tokens == 120.0
    assert len(found.segments) == 2
    assert [segment.output_tokens for segment in found.segments] == [60.0, 60.0]
    assert (found.load.running, found.load.gamma) == (4.0, 3)
    speeds = [part.own_tokens_per_s for part in found.parts]
    assert None not in speeds
    assert found.own_tokens_per_s == pytest.approx(sum(speeds))  # type: ignore[arg-type]
    assert found.window_s == max(part.window_s or 0.0 for part in found.parts)
    uneven = observation_of(LoggedSeries(series=VLLM, stretches=stretches[:3]))
    assert len(uneven.segments) == 3
    assert uneven.load.gamma is None
    some = [*stretches[:1], of_engine("1", step_s=None)]
    assert observation_of(LoggedSeries(series=VLLM, stretches=some)).own_tokens_per_s is None  # fmt: skip


@pytest.mark.parametrize(("fields", "is_refused"), [
    ({"accepted": -1.0}, True), ({"drafts": 1e300}, True), ({"output_tokens": 5.0}, False), ({"accepted": 0.0}, False),
])  # fmt: skip
def test_counts_that_no_engine_has_are_refused(
    fields: dict[str, float], is_refused: bool
) -> None:
    series = LoggedSeries(series=VLLM, stretches=[Stretch(counts=CounterIncreases(**fields))])  # fmt: skip
    if is_refused:
        with pytest.raises(ConfigError, match="no engine has"):
            observation_of(series)
    else:
        assert observation_of(series)
    with pytest.raises(ConfigError, match="tells of no decoding"):
        observation_of(LoggedSeries(series=VLLM, stretches=[], form="x"))
    for length, too_long in ((10.0**9, False), (10.0**9 + 1, True)):
        stretch = Stretch(counts=CounterIncreases(output_tokens=1.0), context_len=length)  # fmt: skip
        own = LoggedSeries(series=VLLM, stretches=[stretch])
        if too_long:
            with pytest.raises(ConfigError, match="longer than any"):
                observation_of(own)
        else:
            assert observation_of(own).load.context_len == length


# Load generators


@pytest.mark.parametrize(("name", "value", "key", "seconds"), [
    ("Mean TTFT (ms)", 200.0, "ttft", 0.2), ("mean_ttft_ms", 200.0, "ttft", 0.2),
    ("Benchmark duration (s)", 30.0, "duration", 30.0),
    ("duration", 30.0, "duration", 30.0), ("Time To First Token (us)", 5.0, "ttft", 5e-6),
    ("Total Latency (ms)", 5.0, "duration", 5e-3),
    ("Request Latency [s]", 2.0, "latency", 2.0), ("Mean ITL (ms)", 3.0, "itl", 0.003),
    ("Inter Token Latency (ns)", 9.0, "tpot", 9e-9),
    ("Concurrency:", 3.0, None, 0.0), ("Concurrency", 3.0, "concurrency", 3.0), ("Mean TPOT (sec)", 2.0, "tpot", 2.0),
])  # fmt: skip
def test_a_number_is_known_by_any_of_its_names_and_units(
    name: str, value: float, key: str | None, seconds: float
) -> None:
    result = reported.Result()
    result.add(name, value)
    expected = {} if key is None else {key: pytest.approx(seconds)}
    assert result.numbers == expected
    result.add(name, value * 2)
    assert result.numbers == expected  # the first one counts
    for nothing in (None, -1.0, math.nan, math.inf):
        empty = reported.Result()
        empty.add(name, nothing)
        assert empty.numbers == {}


def test_a_stated_unit_counts_before_the_usual_one() -> None:
    result = reported.Result()
    result.add("inter token latency", 7.0, "us")
    result.add("position 2", 40.0)
    result.add(f"position {MAX_POSITIONS}", 40.0)
    assert result.numbers["tpot"] == pytest.approx(7e-6)
    assert result.by_position == {2: 0.4}


@given(
    requests=WHOLE, output_len=st.integers(2, 400), input_len=WHOLE, tpot_ms=st.floats(1.0, 90.0),
    ttft_ms=st.floats(1.0, 900.0), seconds=st.floats(5.0, 500.0), says=st.sampled_from(["tpot", "latency"]),
)  # fmt: skip
def test_a_run_is_of_the_requests_that_it_sent(
    requests: float, output_len: int, input_len: float, tpot_ms: float, ttft_ms: float, seconds: float, says: str
) -> None:  # fmt: skip
    """The batch is the time that all requests decoded over the run's; a time per token follows from a latency too."""
    result = reported.Result()
    result.add("successful requests", requests)
    result.add("input sequence length", input_len)
    result.add("output sequence length", float(output_len))
    result.add("mean ttft (ms)", ttft_ms)
    result.add("benchmark duration (s)", seconds)
    if says == "tpot":
        result.add("mean tpot (ms)", tpot_ms)
    else:
        result.add("request latency (ms)", ttft_ms + tpot_ms * (output_len - 1))
    stretch = reported.stretch_of(result)
    assert stretch is not None
    counts = stretch.counts
    assert counts.output_tokens == pytest.approx(requests * output_len)
    assert counts.requests == requests
    assert counts.tpot_s == pytest.approx(tpot_ms / 1e3)
    assert counts.ttft_s == pytest.approx(ttft_ms / 1e3)
    assert counts.context_len == pytest.approx(input_len + output_len / 2)
    decoded_s = requests * (output_len - 1) * tpot_ms / 1e3
    assert stretch.running == pytest.approx(decoded_s / seconds)
    assert stretch.seconds == pytest.approx(seconds)
    assert counts.counted_steps == pytest.approx(requests * (output_len - 1))
    assert (counts.drafts, counts.accepted) == (0.0, 0.0)


def test_a_speed_alone_gives_the_time_or_the_tokens() -> None:
    def stretch_of(**numbers: float) -> Stretch | None:
        return reported.stretch_of(reported.Result(numbers=numbers))

    timed = stretch_of(speed=50.0, output_tokens=100.0, tpot=0.02, requests=10.0)
    assert timed is not None
    assert timed.seconds == pytest.approx(2.0)
    assert timed.running == pytest.approx(0.02 * 90.0 / 2.0)
    rate = stretch_of(speed=50.0, tpot=0.02, concurrency=3.0)
    assert rate is not None
    assert (rate.counts.output_tokens, rate.counts.requests) == (50.0, 0.0)
    assert rate.seconds == 1.0
    assert rate.running == pytest.approx(0.02 * 50.0)
    most = stretch_of(tpot=0.02, most_at_once=7.0)
    assert most is not None
    assert most.running == 7.0
    both = stretch_of(tpot=0.02, most_at_once=7.0, concurrency=3.0)
    assert both is not None
    assert both.running == 3.0
    assert stretch_of(speed=50.0) is None
    short = stretch_of(latency=2.0, ttft=1.0, output_len=1.0, requests=3.0)
    assert short is None
    early = stretch_of(latency=1.0, ttft=2.0, output_len=5.0, requests=3.0, drafts=4.0)
    assert early is not None
    assert early.counts.mean_tpot_sum == 0.0


@given(
    drafts=st.integers(10, 500),
    length=st.floats(1.1, 5.0),
    undrafted=st.sampled_from([0, 400]),
)
def test_drafts_of_a_run_are_counted_or_follow_from_tokens_per_step(
    drafts: int, length: float, undrafted: int
) -> None:
    accepted = drafts * (length - 1.0)
    after_first = drafts + accepted + undrafted
    steps = drafts + undrafted
    stated = {"drafts": float(drafts), "accepted": accepted, "draft_tokens": drafts * 6.0}  # fmt: skip
    by_length = {"accept_length": length, "accepted": accepted}
    for told in (stated, by_length):
        found = reported._draft_counts(reported.Result(numbers=dict(told)), after_first)
        assert found["drafts"] == pytest.approx(drafts)
        assert found["accepted"] == pytest.approx(accepted)
        assert found["counted_steps"] == pytest.approx(steps)
        assert found["draft_tokens"] == told.get("draft_tokens")
    alone = reported._draft_counts(reported.Result(numbers={"accept_length": length}), after_first)  # fmt: skip
    assert alone["drafts"] == pytest.approx(after_first / length)
    assert alone["accepted"] == pytest.approx(after_first * (1.0 - 1.0 / length))
    result = reported.Result(numbers=dict(stated), by_position={1: 0.3, 0: 0.6, 2: 0.5})
    found = reported._draft_counts(result, after_first)
    assert found["accepted_by_position"] == pytest.approx((0.6 * drafts, 0.3 * drafts, 0.3 * drafts))  # fmt: skip


@pytest.mark.parametrize(("draft_tokens", "drafts", "longest", "gamma"), [
    (30.0, 10.0, 2.0, 3), (34.0, 10.0, 2.0, 3), (1.0, 10.0, 2.0, 1), (None, None, 3.4, 3), (None, None, 1.0, 1),
    (None, None, 0.0, None), (None, None, 1e9, MAX_POSITIONS), (0.0, 10.0, 4.0, 3),
])  # fmt: skip
def test_the_depth_is_counted_or_the_least_that_the_tokens_need(
    draft_tokens: float | None,
    drafts: float | None,
    longest: float,
    gamma: int | None,
) -> None:
    stretch = Stretch(counts=CounterIncreases(draft_tokens=draft_tokens, drafts=drafts))
    assert reported._depth([Stretch(counts=CounterIncreases()), stretch], longest) == gamma  # fmt: skip


def test_runs_are_taken_together_and_say_so() -> None:
    one = reported.Result(numbers={"tpot": 0.02, "output_tokens": 90.0}, engine="sglang", model="m")  # fmt: skip
    nothing = reported.Result()
    told = reported._logged([one, nothing])
    assert (len(told.stretches), told.series, told.model, told.notes) == (1, SGLANG, "m", ())  # fmt: skip
    assert told.gamma is None
    told = reported._logged([one, one])
    assert told.notes == ("2 runs are taken together, whatever their loads",)
    drafted = reported.Result(numbers={"tpot": 0.02, "output_tokens": 90.0, "accept_length": 2.5})  # fmt: skip
    told = reported._logged([drafted])
    assert told.gamma == 2
    assert told.notes == ("drafted tokens per step are not told: at least 2",)
    assert reported._logged([]).stretches == []


@given(
    running=st.integers(1, 40), gamma=st.integers(1, 6), accepted=st.integers(0, 60), step_ms=st.floats(1.0, 90.0)
)  # fmt: skip
def test_iterations_as_json_are_steps_with_their_drafts(
    running: int, gamma: int, accepted: int, step_ms: float
) -> None:
    told = {
        "iterLatencyMS": step_ms, "numQueuedRequests": 2,
        "inflightBatchingStats": {"numGenRequests": running, "numCtxTokens": 0},
        "specDecodingStats": {
            "numRequestsWithDraftTokens": running, "numDraftTokens": running * gamma, "numAcceptedTokens": accepted,
        },
        "kvCacheStats": {"usedNumBlocks": 10 * running, "tokensPerBlock": 32},
    }  # fmt: skip
    prompt = json.loads(json.dumps(told))
    prompt["inflightBatchingStats"]["numCtxTokens"] = 7
    series = reported.read_iterations(json.dumps([told, prompt, told]))
    assert (series.gamma, series.series, len(series.stretches)) == (gamma, TRTLLM, 2)
    stretch = series.stretches[0]
    assert stretch.counts.drafts == stretch.counts.counted_steps == running
    assert stretch.counts.draft_tokens == running * gamma
    assert (stretch.counts.accepted, stretch.counts.output_tokens) == (accepted, running + accepted)  # fmt: skip
    assert stretch.counts.iterations == 1.0
    assert (stretch.running, stretch.waiting, stretch.context_len) == (running, 2, 320.0)  # fmt: skip
    assert stretch.step_s == stretch.seconds == pytest.approx(step_ms / 1e3)
    plain = {"iterLatencyMS": step_ms, "inflightBatchingStats": {"numGenRequests": running}}  # fmt: skip
    series = reported.read_iterations(json.dumps(plain))
    assert series.gamma is None
    assert series.stretches[0].context_len is None


def test_a_run_of_requests_is_timed_by_their_first_and_last_tokens() -> None:
    run: Any = [
        SimpleNamespace(start_s=1.0, first_s=2.0, last_s=5.0, prompt_len=10, output_len=4),
        SimpleNamespace(start_s=3.0, first_s=3.5, last_s=9.0, prompt_len=30, output_len=7),
    ]  # fmt: skip
    told = reported._of_requests(run, None).numbers
    assert told == pytest.approx({
        "requests": 2.0, "input_tokens": 40.0, "output_tokens": 11.0, "ttft": 0.75, "tpot": 8.5 / 9.0, "duration": 8.0,
    })  # fmt: skip
    assert reported._of_requests(run, 20).numbers["duration"] == 20.0
    assert reported._of_requests(run, 0).numbers["duration"] == 8.0
    assert reported._of_requests([], None).numbers == {}


@pytest.mark.parametrize("histogram", [[3, 2, 1], {"0": 3, "1": 2, "2": 1}])
def test_a_request_s_histogram_is_its_drafts_and_no_time(histogram: Any) -> None:
    """How often 0, 1 and 2 drafts were accepted: six drafts of two tokens, three and one of which lived so long."""
    told = {"acceptance_histogram": histogram, "num_spec_tokens": 2}
    (stretch,) = reported._drafted([told])
    counts = stretch.counts
    assert (counts.drafts, counts.draft_tokens, counts.accepted) == (6.0, 12.0, 4.0)
    assert counts.accepted_by_position == (3.0, 1.0)
    assert counts.counted_steps == 6.0
    assert (counts.output_tokens, counts.requests, stretch.seconds) == (0.0, 0.0, 0.0)


def test_the_drafts_of_requests_take_the_place_of_the_runs_own() -> None:
    run = reported._logged([reported.Result(numbers={"tpot": 0.02, "output_tokens": 90.0})])  # fmt: skip
    assert reported._with_drafts(run, []) is run
    drafted = Stretch(
        counts=CounterIncreases(drafts=10.0, draft_tokens=40.0, accepted=5.0)
    )
    found = reported._with_drafts(run, [drafted, drafted])
    assert (found.unit, found.number, found.gamma) == ("requests", 2, 4)
    assert [stretch.counts.counted_steps for stretch in found.stretches] == [0.0, None, None]  # fmt: skip
    assert found.stretches[0].counts.draft_tokens == 0.0


def test_lines_of_engines_side_by_side_are_told_apart() -> None:
    """SGLang's by their rank; a count of drafts without a line of its own is of vLLM's engine before it."""
    lines = [
        f"[2026-01-20 10:00:00 DP{rank} TP0] Decode batch, #running-req: {rank + 1}, gen throughput (token/s): 10"
        for rank in (0, 1)
    ]
    told = engine_logs.read_sglang_log("\n".join(lines))
    assert [stretch.engine for stretch in told.stretches] == ["0", "1"]
    counted = "INFO 11-20 10:00:{} SpecDecoding metrics: Accepted: {} tokens, Drafted: 20 tokens"  # fmt: skip
    lines = [vllm_line(0), vllm_line(0, engine="001"), counted.format("00", 5), counted.format("10", 7)]  # fmt: skip
    found = engine_logs.read_vllm_log("\n".join(lines)).stretches
    by_engine = [(stretch.engine, stretch.counts.accepted) for stretch in found]
    assert ("1", 5.0) in by_engine
    assert ("1", 7.0) in by_engine
    alone = engine_logs.read_vllm_log(counted.format("00", 5)).stretches
    assert [stretch.engine for stretch in alone] == [""]


@pytest.mark.parametrize(("cells", "sections"), [
    (["", "A", "", "", "B", ""], ["", "A", "A", "A", "B", "B"]), ([], []), (["A"], ["A"]), (["", ""], ["", ""]),
])  # fmt: skip
def test_a_section_stands_over_the_columns_up_to_the_next(
    cells: list[str], sections: list[str]
) -> None:
    assert reported._carried(cells) == sections


@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_totals_of_the_oldest_logs_are_drafts_of_full_length(gamma: int) -> None:
    """A hundred drafts of which each made two tokens, then as many again."""
    totals = engine_logs._Totals(True)
    for number in (1, 2):
        told = LineFields(
            f"Number of speculative tokens: {gamma}, Number of draft tokens: {100 * gamma * number}, "
            f"Number of emitted tokens: {200 * number}"
        )
        line = engine_logs._StatisticsLine(engine="", clock_s=None, speculation=told, is_total=True)  # fmt: skip
        found = engine_logs._vllm_drafts(line, told, totals, None, None)
        assert found == (100.0, 100.0 * gamma, 100.0, ())
