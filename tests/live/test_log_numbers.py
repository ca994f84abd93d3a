"""Readers of logs and of load generators' results, each against the numbers that the lines were written from."""

from __future__ import annotations

import dataclasses
import gzip
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from magicdec.errors import ConfigError, ServerError, StorageError, closest
from magicdec.live import engine_logs, load_results
from magicdec.live.engine_logs import read_sglang_log, read_vllm_log
from magicdec.live.forms import read_files, seen_in
from magicdec.live.judgement import Judgement, ServerFacts
from magicdec.live.llama_cpp import read_llama_log
from magicdec.live.metrics import VLLM
from magicdec.live.observation import CounterIncreases
from magicdec.live.reading import Reading, Readings, observation_of
from magicdec.live.show import lines_of
from magicdec.specs.families import architecture

WHOLE = st.integers(1, 500).map(float)


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
    told = read_vllm_log("\n".join(lines))
    assert len(told.readings) == 4
    for reading in told.readings:
        assert reading.step_s == pytest.approx(running / speed)
        assert reading.seconds == 10.0
        assert reading.running == running
        assert reading.waiting == waiting
        assert reading.kv_usage == pytest.approx(0.035)
        assert reading.engine == "0"
        counts = reading.counts
        assert counts.output_tokens == counts.counted_steps == pytest.approx(10 * speed)
        assert (counts.drafts, counts.accepted, counts.requests) == (0.0, 0.0, 0.0)
    mixed = [*lines[:2], vllm_line(2, prompts=speed + 1, **load)]
    last = read_vllm_log("\n".join(mixed)).readings[-1]
    assert (last.step_s is None) == (prompts == 0.0)


def test_a_batch_is_the_mean_of_a_line_and_the_one_before() -> None:
    lines = [
        vllm_line(number, engine="001", running=running)
        for number, running in enumerate((10, 20, 0, 5))
    ]
    readinges = read_vllm_log("\n".join(lines)).readings
    steps = [reading.step_s for reading in readinges]
    assert steps == [pytest.approx(0.1), pytest.approx(0.15), None, None]


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
    told = read_sglang_log("\n".join([line] * 3))
    assert told.gamma == gamma
    for reading in told.readings:
        counts = reading.counts
        assert counts.drafts == counts.counted_steps == 40.0 * running
        assert counts.draft_tokens == 40.0 * running * gamma
        assert counts.accepted == pytest.approx(40.0 * running * (length - 1.0), rel=1e-4)  # fmt: skip
        assert counts.output_tokens == pytest.approx(40.0 * running * length, rel=1e-4)
        assert counts.iterations == 40.0
        assert reading.step_s == pytest.approx(step_ms / 1e3, rel=1e-4)
        assert reading.seconds == pytest.approx(40.0 * step_ms / 1e3, rel=1e-4)
        assert (reading.running, reading.waiting) == (running, 3.0)
        assert (reading.kv_usage, reading.context_len) == (0.25, 50.0)
    given_gamma = "server_args=ServerArgs(speculative_num_draft_tokens=4, decode_log_interval=10)"  # fmt: skip
    told = read_sglang_log("\n".join([given_gamma, line]))
    assert told.gamma == 3
    assert told.readings[0].counts.iterations == 10.0


@pytest.mark.parametrize(("without", "is_fault"), [(1, False), (2, False), (3, True)])
def test_graphs_are_off_where_most_batches_ran_without(
    without: int, is_fault: bool
) -> None:
    lines = [
        f"Decode batch, #running-req: 2, cuda graph: {number >= without}, gen throughput (token/s): 10"
        for number in range(4)
    ]
    told = read_sglang_log("\n".join(lines))
    assert bool(told.faults) == is_fault
    if is_fault:
        assert "75% of its decode batches" in told.faults[0]
    assert len(told.readings) == 4
    idle = read_sglang_log("Decode batch, #running-req: 0, cuda graph: True")  # fmt: skip
    assert idle.readings == []


COUNTED = "INFO 11-20 {clock} SpecDecoding metrics: Accepted: {accepted} tokens, Drafted: {drafted} tokens"


@given(
    interval=st.integers(2, 3600),
    start=st.integers(0, 86_399),
    number=st.integers(2, 6),
)
def test_the_time_between_lines_is_their_usual_gap_also_over_midnight(
    interval: int, start: int, number: int
) -> None:
    """Neither a night without load nor two lines of one moment move it."""
    seconds = [start + step * interval for step in range(number)]
    seconds += [start + number * interval + 5000] * 2
    lines = []
    for second in seconds:
        hours, rest = divmod(second % 86_400, 3600)
        clock = f"{hours:02d}:{rest // 60:02d}:{rest % 60:02d}"
        lines.append(
            VLLM_LINE.format(
                clock=clock, engine="0", prompts=0.0, speed=10.0, running=1, waiting=0
            )
        )
    for stamped, expected in ((lines, interval), (lines[:1], 10)):
        for reading in read_vllm_log("\n".join(stamped)).readings:
            assert reading.seconds == expected
    unstamped = [line.partition("] ")[2] for line in lines]
    assert read_vllm_log("\n".join(unstamped)).readings[0].seconds == 10.0


@pytest.mark.parametrize(
    ("clock", "is_one"), [("10:00:00", True), ("10:00:01", True), ("10:00:02", False)]
)
def test_a_count_of_drafts_belongs_to_the_line_of_its_second(
    clock: str, is_one: bool
) -> None:
    lines = [vllm_line(0), COUNTED.format(clock=clock, accepted=5, drafted=20)]
    (reading, *others) = read_vllm_log("\n".join(lines)).readings
    assert others == []
    assert (reading.counts.output_tokens is not None) == is_one


@pytest.mark.parametrize(("undrafted", "steps"), [(0, 100.0), (14, 100.0), (16, 116.0), (1000, 1100.0)])  # fmt: skip
def test_steps_without_a_draft_are_those_that_the_speed_shows(
    undrafted: int, steps: float
) -> None:
    """Tokens that are neither accepted nor of a drafted step; below 15 % they are rounding of clocks."""
    config = (
        "LLM engine (v0.32.0) with config: model='m', "
        "SpeculativeConfig(method='eagle3', model='h', num_spec_tokens=1)"
    )
    speed = (100 + 50 + undrafted) / 10.0
    lines = [
        config,
        vllm_line(0, speed=speed),
        COUNTED.format(clock="10:00:00", accepted=50, drafted=100),
    ]
    counts = read_vllm_log("\n".join(lines)).readings[0].counts
    assert (counts.drafts, counts.draft_tokens, counts.accepted) == (100.0, 100.0, 50.0)
    assert counts.counted_steps == pytest.approx(steps)
    assert counts.output_tokens == pytest.approx(150.0 + undrafted)


def test_what_the_start_of_servers_tells() -> None:
    drafted = "INFO 11-20 10:00:00 [metrics.py:86] SpecDecoding metrics: Accepted: 5 tokens, Drafted: 20 tokens"
    config = "Initializing a V1 LLM engine (v0.32.0) with config: model='a/b', "
    speculation = "speculative_config=SpeculativeConfig(method='eagle3', model='c/d', num_spec_tokens=5)"  # fmt: skip
    told = read_vllm_log(f"{config}{speculation}, enforce_eager=True\n{drafted}")
    assert (told.model, told.gamma, told.faults) == ("a/b", 5, (engine_logs.EAGER_LINE,))  # fmt: skip
    assert told.draft is not None
    assert told.draft.name == "eagle3"
    for line, fault in (
        ("WARNING setting cudagraph_mode=PIECEWISE", engine_logs.PIECEWISE_LINE.format(mode="PIECEWISE")),
        ("WARNING cudagraph_mode from FULL to CUDAGraphMode.NONE", engine_logs.EAGER_LINE),
        ("Asynchronous scheduling will be disabled because", engine_logs.SYNCHRONOUS_LINE),
        ("something else is disabled", None), ("cudagraph_mode: FULL", None), (f"{config}enforce_eager=False", None),
    ):  # fmt: skip
        assert read_vllm_log(f"{line}\n{drafted}").faults == ((fault,) if fault else ())
    given_method = "non-default args: {'speculative_config': {'method': 'ngram'}}"
    named = read_vllm_log(f"{given_method}\n{drafted}").draft
    assert named is not None
    assert named.name == "ngram"
    batch = "Decode batch, #running-req: 1, accept len: 2.0"
    arguments = (
        "server_args=ServerArgs(model_path='a/b', speculative_algorithm='EAGLE3', speculative_draft_model_path='c/d', "
        "disable_overlap_schedule=True)"
    )
    told = read_sglang_log(f"{arguments}\n{batch}")
    assert (told.model, told.faults) == ("a/b", (engine_logs.SYNCHRONOUS_LINE,))
    assert told.draft is not None
    assert told.draft.name == "eagle3"
    plain = read_sglang_log(f"server_args=ServerArgs(speculative_algorithm=None)\n{batch}")  # fmt: skip
    assert plain.draft is not None
    assert plain.draft.is_assumed
    assert plain.faults == ()


@pytest.mark.parametrize(("arguments", "gamma"), [
    ("speculative_num_draft_tokens=4", 3), ("speculative_num_draft_tokens=1, speculative_num_steps=2", 2),
    ("speculative_num_steps=5", 5), ("speculative_num_steps=0", None), ("", None),
])  # fmt: skip
def test_sglangs_own_setting_of_gamma_counts_first(
    arguments: str, gamma: int | None
) -> None:
    """Else accept length and rate tell it; a length alone does not."""
    lines = [f"Decode batch, #running-req: 1, accept len: {length}" for length in (2.0, 4.2)]  # fmt: skip
    text = "\n".join([f"server_args=ServerArgs({arguments})", *lines])
    assert read_sglang_log(text).gamma == gamma


def test_totals_of_the_oldest_logs_are_drafts_of_full_length() -> None:
    """A hundred drafts of which each made two tokens, as many again, and a restart."""
    lines = [
        f"Speculative metrics: Number of speculative tokens: 5, Number of draft tokens: {500 * number}, "
        f"Number of emitted tokens: {200 * number}"
        for number in (1, 2, 1)
    ]
    for reading in read_vllm_log("\n".join(lines)).readings:
        counts = reading.counts
        assert (counts.drafts, counts.draft_tokens, counts.accepted) == (100.0, 500.0, 100.0)  # fmt: skip


def test_a_request_alone_takes_a_step_for_each_token_that_was_not_accepted() -> None:
    """llama.cpp counts the drafts of all requests since its start."""
    text = """
prompt eval time =     500.00 ms /     7 tokens (    0.81 ms per token,  1241.66 tokens per second)
       eval time =    3000.00 ms /   100 tokens (   16.01 ms per token,    62.48 tokens per second)
draft acceptance rate = 0.5 (   40 accepted /   80 generated)
statistics draft-mtp: #calls = 1, #gen drafts = 30
       eval time =    6000.00 ms /    60 tokens (   16.01 ms per token,    62.48 tokens per second)
draft acceptance rate = 0.5 (    0 accepted /   60 generated)
statistics draft-mtp: #calls = 1, #gen drafts = 50
"""
    told = read_llama_log(text)
    first, second = told.readings
    assert (first.counts.counted_steps, first.counts.drafts) == (60.0, 30.0)
    assert first.step_s == pytest.approx(0.05)
    assert (first.counts.ttft_s, first.counts.prompt_tokens_sum) == (0.5, 7.0)
    assert (second.counts.counted_steps, second.counts.drafts) == (60.0, 20.0)
    assert second.step_s == pytest.approx(0.1)
    assert told.gamma == 3
    assert told.draft is not None
    assert told.draft.name == "mtp"


@pytest.mark.parametrize("stated", [True, False])
def test_drafts_of_a_run_are_counted_or_follow_from_tokens_per_step(
    stated: bool,
) -> None:
    """200 drafts that made 500 tokens, and 400 steps without one."""
    numbers = {
        "accept_length": 2.5,
        "accepted": 300.0,
        "tpot": 0.02,
        "output_tokens": 910.0,
        "requests": 10.0,
    }
    if stated:
        numbers |= {"drafts": 200.0, "draft_tokens": 1200.0}
    run = load_results.LoadRun(numbers=numbers, by_position={1: 0.3, 0: 0.6, 2: 0.5})
    reading = load_results.reading_of(run)
    assert reading is not None
    counts = reading.counts
    assert (counts.drafts, counts.accepted, counts.counted_steps) == (200.0, 300.0, 600.0)  # fmt: skip
    # no draft survives more positions than the position before
    assert counts.accepted_by_position == pytest.approx((120.0, 60.0, 60.0))


def test_runs_are_taken_together_and_say_so() -> None:
    report = """============ Serving Benchmark Result ============
Total generated tokens: 90
Mean TPOT (ms): 20.0
Accept length: 2.5
"""
    one = load_results.read_report(report)
    assert one.gamma is None
    assert one.notes == ()
    two = load_results.read_report(report * 2)
    assert two.notes[0] == "2 runs are taken together, whatever their loads"
    assert len(two.readings) == 2


# Readings together


def of_engine(engine: str, **fields: Any) -> Reading:
    counts = CounterIncreases(
        drafts=10.0, accepted=20.0, output_tokens=30.0, requests=0.0, counted_steps=10.0
    )
    usual: dict[str, Any] = {
        "engine": engine, "running": 2.0, "waiting": 1.0, "kv_usage": 0.5, "context_len": 64.0, "step_s": 0.02,
        "seconds": 0.1,
    }  # fmt: skip
    return Reading(counts=counts, **usual | fields)


def test_a_reading_that_was_idle_counts_with_the_usual_step() -> None:
    idle, untimed = of_engine("", step_s=0.9, seconds=5.0), of_engine("", step_s=None)
    readinges = [of_engine(""), of_engine(""), idle, untimed]
    series = Readings(series=VLLM, readings=readinges, form="x")
    found = observation_of(series)
    assert [segment.step_seconds for segment in found.segments] == pytest.approx([0.2] * 4)  # fmt: skip
    assert found.window_s == pytest.approx(0.4)
    assert found.counts.step_s == pytest.approx(0.02)
    assert "2 of 4 lines span idle time" in found.notes[0]
    assert found.own_tokens_per_s == pytest.approx(60.0 / 0.2)
    assert found.num_scrapes == 4
    unknown = observation_of(
        Readings(series=VLLM, readings=[of_engine("", seconds=None)], form="x")
    )
    assert unknown.window_s is None
    assert unknown.own_tokens_per_s is None
    several = dataclasses.replace(series, number=9)
    assert observation_of(several).num_scrapes == 9


def test_means_of_a_log_are_of_what_was_running() -> None:
    busy, idle = of_engine("", running=4.0, waiting=3.0), of_engine("", running=0.0, waiting=9.0)  # fmt: skip
    readinges = [busy, idle, of_engine("")]
    load = observation_of(Readings(series=VLLM, readings=readinges)).load
    assert (load.running, load.waiting, load.kv_usage, load.context_len) == (3.0, 2.0, 0.5, 64.0)  # fmt: skip
    nothing = Reading(counts=CounterIncreases(output_tokens=1.0))
    load = observation_of(Readings(series=VLLM, readings=[nothing])).load
    assert (load.running, load.waiting) == (None, None)


def test_engines_side_by_side_are_summed_and_their_batches_averaged() -> None:
    readinges = [
        of_engine("0"),
        of_engine("1", running=6.0),
        of_engine("0"),
        of_engine("1", running=6.0),
    ]
    found = observation_of(Readings(series=VLLM, readings=readinges, gamma=3))
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
    uneven = observation_of(Readings(series=VLLM, readings=readinges[:3]))
    assert len(uneven.segments) == 3
    assert uneven.load.gamma is None
    some = [*readinges[:1], of_engine("1", step_s=None)]
    assert observation_of(Readings(series=VLLM, readings=some)).own_tokens_per_s is None  # fmt: skip


@pytest.mark.parametrize(("fields", "refusal"), [
    ({"accepted": -1.0}, "accepted: -1 is"), ({"drafts": 1e300}, "drafts: 1e"), ({"output_tokens": 5.0}, ""),
    ({"accepted": 0.0}, ""), ({"ttft_sum": 1e-320, "ttft_count": 1.0}, "time to the first token: 9.99"),
    ({"accepted": 50.0, "draft_tokens": 40.0, "drafts": 20.0}, "50 tokens accepted of 40 drafted"),
    ({"accepted": 40.0, "draft_tokens": 40.0, "drafts": 20.0}, ""),
    ({"accepted": 84.0, "drafts": 20.0}, "accept length of 5.20 with 3 drafted tokens: a step makes 4 at most"),
    ({"accepted": 60.0, "drafts": 20.0}, ""), ({"requests": -2.0}, "requests: -2 is"),
])  # fmt: skip
def test_counts_that_no_engine_has_are_refused_by_name(
    fields: dict[str, float], refusal: str
) -> None:
    series = Readings(series=VLLM, readings=[Reading(counts=CounterIncreases(**fields))], gamma=3)  # fmt: skip
    if refusal:
        with pytest.raises(ConfigError, match=refusal):
            observation_of(series)
    else:
        assert observation_of(series)
    with pytest.raises(ConfigError, match="tells of no decoding"):
        observation_of(Readings(series=VLLM, readings=[], form="x"))
    for length, too_long in ((10.0**9, False), (10.0**9 + 1, True)):
        reading = Reading(counts=CounterIncreases(output_tokens=1.0), context_len=length)  # fmt: skip
        own = Readings(series=VLLM, readings=[reading])
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
    ("Request Latency [s]", 2.0, "latency", 2.0), ("Mean E2EL (ms)", 3.0, "latency", 0.003),
    ("Inter Token Latency (ns)", 9.0, "tpot", 9e-9),
    ("Concurrency:", 3.0, None, 0.0), ("Concurrency", 3.0, "concurrency", 3.0), ("Mean TPOT (sec)", 2.0, "tpot", 2.0),
])  # fmt: skip
def test_a_number_is_known_by_any_of_its_names_and_units(
    name: str, value: float, key: str | None, seconds: float
) -> None:
    result = load_results.LoadRun()
    result.add(name, value)
    expected = {} if key is None else {key: pytest.approx(seconds)}
    assert result.numbers == expected
    result.add(name, value * 2)
    assert result.numbers == expected  # the first one counts
    for nothing in (None, math.nan, math.inf):
        empty = load_results.LoadRun()
        empty.add(name, nothing)
        assert empty.numbers == {}
    if key is not None:
        with pytest.raises(ConfigError, match="-1 is none that a run has"):
            load_results.LoadRun().add(name, -1.0)
    if key in load_results.TIMES:
        with pytest.raises(ConfigError, match="is no time that an engine takes"):
            load_results.LoadRun().add(name, 1e-320)


@given(
    requests=WHOLE, output_len=st.integers(2, 400), input_len=WHOLE, tpot_ms=st.floats(1.0, 90.0),
    ttft_ms=st.floats(1.0, 900.0), seconds=st.floats(5.0, 500.0), says=st.sampled_from(["tpot", "latency"]),
)  # fmt: skip
def test_a_run_is_of_the_requests_that_it_sent(
    requests: float, output_len: int, input_len: float, tpot_ms: float, ttft_ms: float, seconds: float, says: str
) -> None:  # fmt: skip
    """The batch is the time that all requests decoded over the run's; a time per token follows from a latency too."""
    result = load_results.LoadRun()
    result.add("successful requests", requests)
    result.add("input sequence length", input_len)
    result.add("output sequence length", float(output_len))
    result.add("mean ttft (ms)", ttft_ms)
    result.add("benchmark duration (s)", seconds)
    if says == "tpot":
        result.add("mean tpot (ms)", tpot_ms)
    else:
        result.add("request latency (ms)", ttft_ms + tpot_ms * (output_len - 1))
    reading = load_results.reading_of(result)
    assert reading is not None
    counts = reading.counts
    assert counts.output_tokens == pytest.approx(requests * output_len)
    assert counts.requests == requests
    assert counts.tpot_s == pytest.approx(tpot_ms / 1e3)
    assert counts.ttft_s == pytest.approx(ttft_ms / 1e3)
    assert counts.context_len == pytest.approx(input_len + output_len / 2)
    decoded_s = requests * (output_len - 1) * tpot_ms / 1e3
    assert reading.running == pytest.approx(decoded_s / seconds)
    assert reading.seconds == pytest.approx(seconds)
    assert counts.counted_steps == pytest.approx(requests * (output_len - 1))
    assert (counts.drafts, counts.accepted) == (0.0, 0.0)


def test_a_speed_alone_gives_the_time_or_the_tokens() -> None:
    def reading_of(**numbers: float) -> Reading | None:
        return load_results.reading_of(load_results.LoadRun(numbers=numbers))

    timed = reading_of(speed=50.0, output_tokens=100.0, tpot=0.02, requests=10.0)
    assert timed is not None
    assert timed.seconds == pytest.approx(2.0)
    assert timed.running == pytest.approx(0.02 * 90.0 / 2.0)
    rate = reading_of(speed=50.0, tpot=0.02, concurrency=3.0)
    assert rate is not None
    assert (rate.counts.output_tokens, rate.counts.requests) == (50.0, 0.0)
    assert rate.seconds == 1.0
    assert rate.running == pytest.approx(0.02 * 50.0)
    most = reading_of(tpot=0.02, most_at_once=7.0)
    assert most is not None
    assert most.running == 7.0
    both = reading_of(tpot=0.02, most_at_once=7.0, concurrency=3.0)
    assert both is not None
    assert both.running == 3.0
    assert reading_of(speed=50.0) is None
    short = reading_of(latency=2.0, ttft=1.0, output_len=1.0, requests=3.0)
    assert short is None
    early = reading_of(latency=1.0, ttft=2.0, output_len=5.0, requests=3.0, drafts=4.0)
    assert early is not None
    assert early.counts.mean_tpot_sum == 0.0


@pytest.mark.parametrize("histogram", [[3, 2, 1], {"0": 3, "1": 2, "2": 1}])
def test_a_request_s_histogram_is_its_drafts_and_no_time(histogram: Any) -> None:
    """How often 0, 1 and 2 drafts were accepted: six drafts of two tokens, three and one of which lived so long."""
    told = {"acceptance_histogram": histogram, "num_spec_tokens": 2}
    (reading,) = load_results._drafted([told])
    counts = reading.counts
    assert (counts.drafts, counts.draft_tokens, counts.accepted) == (6.0, 12.0, 4.0)
    assert counts.accepted_by_position == (3.0, 1.0)
    assert counts.counted_steps == 6.0
    assert (counts.output_tokens, counts.requests, reading.seconds) == (0.0, 0.0, 0.0)


def test_lines_of_engines_side_by_side_are_told_apart() -> None:
    """SGLang's by their rank; a count of drafts without a line of its own is of vLLM's engine before it."""
    lines = [
        f"[2026-01-20 10:00:00 DP{rank} TP0] Decode batch, #running-req: {rank + 1}, gen throughput (token/s): 10"
        for rank in (0, 1)
    ]
    told = read_sglang_log("\n".join(lines))
    assert [reading.engine for reading in told.readings] == ["0", "1"]
    counted = "INFO 11-20 10:00:{} SpecDecoding metrics: Accepted: {} tokens, Drafted: 20 tokens"  # fmt: skip
    lines = [vllm_line(0), vllm_line(0, engine="001"), counted.format("00", 5), counted.format("10", 7)]  # fmt: skip
    found = read_vllm_log("\n".join(lines)).readings
    by_engine = [(reading.engine, reading.counts.accepted) for reading in found]
    assert ("1", 5.0) in by_engine
    assert ("1", 7.0) in by_engine
    alone = read_vllm_log(counted.format("00", 5)).readings
    assert [reading.engine for reading in alone] == [""]


def long_log(kind: str, lines: int) -> str:
    """Statistics of a server whose draft's length changes over the day: 2 to 3 tokens per step."""
    rows = []
    for place in range(lines):
        clock = f"{place // 3600 % 24:02d}:{place // 60 % 60:02d}:{place % 60:02d}"
        length = 2.0 + place / lines
        if kind == "sglang":
            rows.append(
                f"[2026-11-20 {clock} TP0] Decode batch, #running-req: 8, #token: 800, token usage: 0.01, "
                f"accept len: {length:.4f}, gen throughput (token/s): {400 * length:.2f}, #queue-req: 0"
            )
        else:
            rows.append(
                f"INFO 01-01 {clock} x.py:1] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation "
                f"throughput: {1000 * length:.1f} tokens/s, Running: 8 reqs, Waiting: 0 reqs"
            )
            accepted = 10_000 * (length - 1.0)
            rows.append(
                f"INFO 01-01 {clock} x.py:1] SpecDecoding metrics: Mean acceptance length: {length:.4f}, Accepted: "
                f"{accepted:.0f} tokens, Drafted: 20000 tokens, Per-position acceptance rate: "
                f"{min(length - 1.0, 1.0):.4f}, {max(length - 2.0, 0.0):.4f}"
            )
    return "\n".join(rows)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_long_log_is_counted_in_parts_spread_over_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times as many lines as are counted, whose mean is that of all: 2.5 tokens per step, to a part."""
    monkeypatch.setattr(engine_logs, "MOST_LINES", 1600)
    seen = seen_in([("a log", long_log(kind, 6400))])
    assert seen is not None
    assert seen.num_scrapes == 1600
    assert seen.counts.tokens_per_step == pytest.approx(2.5, rel=1 / 32)
    assert any("1600 of 6400 lines" in note for note in seen.notes)


def test_a_line_broken_ten_thousand_times_takes_time_by_its_length() -> None:
    """Processor time: four times the pieces, about four times the time, and never sixteen."""
    seconds = []
    for pieces in (20_000, 80_000):
        text = (
            "Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 9.0 tokens/s, Running: 1 reqs,\n"
            + "Waiting: 0 reqs,\n" * pieces
        )
        begun = time.process_time()
        seen_in([("a log", text)])
        seconds.append(time.process_time() - begun)
    assert seconds[1] < 10 * seconds[0] + 0.2


def test_a_compressed_log_is_named_as_one(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(gzip.compress(long_log("vllm", 10).encode()))
    with pytest.raises(StorageError, match="is compressed: gunzip"):
        read_files([path])


def test_a_log_of_gigabytes_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.touch()
    os.truncate(path, 5_000_000_000)
    begun = time.process_time()
    with pytest.raises(StorageError, match="more than the 256 MiB that are read"):
        read_files([path])
    assert time.process_time() - begun < 1.0


def test_names_of_thousands_of_letters_are_not_compared() -> None:
    """Twenty thousand letters cost 20 s."""
    begun = time.process_time()
    assert closest("x" * 20_000, (f"{'x' * 40}{place}" for place in range(200))) == []
    with pytest.raises(ConfigError, match="is not known"):
        architecture("y" * 20_000, "here")
    assert time.process_time() - begun < 1.0
    assert closest("llama-3.1-8", ["llama-3.1-8b"]) == ["llama-3.1-8b"]


SAMPLES = Path(__file__).resolve().parents[2] / "docs" / "samples" / "logs"
HUGE = ("9" * 400, "9" * 25, "1e400", "-1e300")


@pytest.mark.parametrize("path", sorted(SAMPLES.iterdir()), ids=lambda path: path.name)
def test_a_number_that_none_has_is_refused_or_unread(path: Path) -> None:
    """The first number behind each name, as one of 400 digits and as one that no float holds: an answer of finite
    numbers or one line."""
    text = path.read_text(encoding="utf-8")
    places: dict[str, re.Match[str]] = {}
    for found in re.finditer(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", text):
        name = re.sub(r"[^a-z]", "", text[: found.start()][-24:].lower())
        places.setdefault(name, found)
    for place, found in enumerate(places.values()):
        digits = HUGE[place % len(HUGE)]
        changed = f"{text[: found.start()]}{digits}{text[found.end() :]}"
        try:
            seen = seen_in([("a file", changed)])
        except (ConfigError, ServerError):
            continue
        if seen is not None:
            shown = "\n".join(lines_of(Judgement(seen, ServerFacts())))
            assert not re.search(r"\b(?:inf|nan)\b", shown), (found, shown)
