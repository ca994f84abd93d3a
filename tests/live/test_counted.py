"""What counters say of acceptance, load and times: errors against enumeration, means against the gauges behind them,
and the settings of a change as engines take them."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.errors import ConfigError, ServerError
from magicdec.live import check, forms, metrics, observation, profile
from magicdec.live.advice import Serving
from magicdec.live.metrics import NOT_TOLD, SGLANG, TRTLLM, VLLM, Scrape, Target
from magicdec.live.observation import (
    CounterIncreases,
    MeanGauges,
    Observation,
    parse_draft,
)
from magicdec.live.show import View
from magicdec.specs import (
    Speculation,
    load_engine,
    load_model_spec,
    read_serve_command,
)
from tests.perfmodel.cases import case_of, found_of

TARGET = Target(series=VLLM, model="m")


def seen(*segments: CounterIncreases, **fields: Any) -> Observation:
    counts = segments[0]
    for segment in segments[1:]:
        counts = counts + segment
    usual: dict[str, Any] = {"load": MeanGauges(), "window_s": 10.0, "num_scrapes": len(segments) + 1}  # fmt: skip
    return Observation(target=TARGET, segments=segments, counts=counts, **usual | fields)  # fmt: skip


def counted(survivors: list[int], steps: int) -> CounterIncreases:
    return CounterIncreases(
        drafts=float(steps), draft_tokens=float(steps * len(survivors)), accepted=float(sum(survivors)),
        accepted_by_position=tuple(map(float, survivors)), counted_steps=float(steps),
    )  # fmt: skip


steps_accepted = st.lists(st.integers(0, 4), min_size=1, max_size=40)


@given(lengths=steps_accepted)
def test_the_error_of_tokens_per_step_is_that_of_its_steps(lengths: list[int]) -> None:
    """The standard deviation of what each step accepted, over the root of their number."""
    survivors = [sum(length >= position for length in lengths) for position in range(1, 5)]  # fmt: skip
    found = profile.tokens_stderr(seen(counted(survivors, len(lengths))))
    assert found == pytest.approx(np.std(lengths) / math.sqrt(len(lengths)), abs=1e-9)
    assert profile.tokens_stderr(seen(CounterIncreases(drafts=0.0))) is None


def test_intervals_that_differ_count_as_clusters_from_three_on() -> None:
    """Of two nothing is known; equal ones add nothing."""
    alike = [counted([50, 25], 100)] * 3
    apart = [counted([90, 80], 100), counted([10, 5], 100), counted([50, 25], 100)]
    together = profile.tokens_stderr(seen(counted([150, 75], 300)))
    assert profile.tokens_stderr(seen(*alike)) == pytest.approx(together)
    several = profile.tokens_stderr(seen(*apart))
    means = [each.accepted / each.counted_steps for each in apart]  # type: ignore[operator]
    assert several == pytest.approx(np.std(means, ddof=1) / math.sqrt(3))
    two = profile.tokens_stderr(seen(*apart[:2]))
    assert two == pytest.approx(profile.tokens_stderr(seen(counted([100, 85], 200))))


@given(drafts=st.integers(1, 200), gamma=st.integers(1, 5), share=st.floats(0.0, 1.0))
def test_a_sum_of_accepted_tokens_is_one_rate_at_all_positions(
    drafts: int, gamma: int, share: float
) -> None:
    accepted = drafts * gamma * share
    counts = CounterIncreases(
        drafts=float(drafts), draft_tokens=float(drafts * gamma), accepted=accepted, counted_steps=float(drafts)
    )  # fmt: skip
    survivors = profile._survivors(seen(counts), counts)
    assert len(survivors) == gamma
    assert math.fsum(survivors) == pytest.approx(accepted, abs=1e-6 * drafts)
    if share > 0.01:
        rates = [now / before for before, now in zip((drafts, *survivors), survivors, strict=False)]  # fmt: skip
        assert rates == pytest.approx([rates[0]] * gamma)
    assert profile._survivors(seen(counts), dataclasses.replace(counts, accepted=None)) == ()  # fmt: skip
    assert profile._survivors(seen(counts), dataclasses.replace(counts, drafts=0.0)) == ()  # fmt: skip


def test_a_draft_that_may_be_absent_is_tried_in_every_step() -> None:
    counts = dataclasses.replace(counted([40, 20], 50), counted_steps=200.0)
    for name, trials in (("ngram", 200.0), ("eagle3", 50.0)):
        rows = profile.measurements(seen(counts), parse_draft(name), context=100.0)
        assert rows[0].trials == trials
        assert rows[0].accepted == 40.0
    budget = parse_draft("self", method="snapkv", budget=64)
    for context, expected in ((1000.0, 64.0), (30.0, 30.0)):
        rows = profile.measurements(seen(counts), budget, context=context)
        assert {row.budget for row in rows} == {expected}


@pytest.mark.parametrize(("drafts", "unit", "is_taken"), [
    (19, "scrapes", False), (20, "scrapes", True), (19, "requests", True), (19, "sequences", True),
    (19, "lines", False),
])  # fmt: skip
def test_a_profile_is_of_twenty_drafts_or_of_sequences(
    drafts: int, unit: str, is_taken: bool
) -> None:
    found = seen(counted([drafts // 2], drafts), unit=unit)
    ask: dict[str, Any] = {"model": "llama-3.1-8b", "context": 500.0}
    if not is_taken:
        with pytest.raises(ConfigError, match="at least 20"):
            profile.acceptance_profile(found, parse_draft("eagle3"), **ask)
        return
    own = profile.acceptance_profile(found, parse_draft("eagle3"), **ask)
    assert own.name == "observed"
    assert own.drafted_share == 1.0
    assert f"{drafts} drafts, {drafts} steps" in own.source
    if unit == "scrapes":
        assert own.spread == 0.0  # sequences mix between two scrapes


def test_a_profile_says_what_was_counted() -> None:
    counts = dataclasses.replace(counted([40, 20], 50), counted_steps=100.0)
    ask: dict[str, Any] = {"model": "llama-3.1-8b", "context": 500.0}
    own = profile.acceptance_profile(seen(counts), parse_draft("ngram"), **ask)
    assert own.drafted_share == pytest.approx(0.5)
    assert "conditional rate by position, from an engine's counters" in own.definition
    assert "counts as one that was not accepted" in own.definition
    summed = dataclasses.replace(counts, accepted_by_position=())
    own = profile.acceptance_profile(seen(summed, form="a log"), parse_draft("eagle3"), **ask)  # fmt: skip
    assert own.definition.startswith("one rate for all positions")
    assert own.source.startswith("a log: ")
    with pytest.raises(ConfigError, match="no draft was verified"):
        profile.acceptance_profile(seen(CounterIncreases()), parse_draft("eagle3"), **ask)  # fmt: skip
    with pytest.raises(ConfigError, match="--context"):
        profile.acceptance_profile(seen(counts), parse_draft("eagle3"), model="m")


def test_a_record_has_whole_sequences_and_tokens() -> None:
    counts = dataclasses.replace(counted([40, 20], 50), output_tokens=110.4)
    load = MeanGauges(running=2.6, context_len=99.5)
    ask: dict[str, Any] = {"model": "m", "hardware": "h100-sxm-80gb", "tp_size": 2}
    found = profile.record(seen(counts, load=load), parse_draft("eagle3"), **ask)
    assert (found.batch_size, found.context_len, found.tp_size) == (3, 100, 2)
    assert (found.draft, found.gamma) == ("eagle3", 2)
    assert found.acceptance_by_position == pytest.approx((0.8, 0.5))
    assert found.notes == ["2 scrapes", "110 tokens"]
    tiny = MeanGauges(running=0.2, context_len=0.3)
    found = profile.record(seen(counts, load=tiny), parse_draft("eagle3"), **ask)
    assert (found.batch_size, found.context_len) == (1, 1)
    alone = seen(CounterIncreases(output_tokens=9.0), load=load)
    plain = profile.record(alone, parse_draft("eagle3"), **ask)
    assert (plain.draft, plain.gamma) == ("none", 0)
    with pytest.raises(ConfigError, match="running batch"):
        profile.record(seen(counts), parse_draft("eagle3"), **ask)


# Scrapes


def scrape(time_s: float | None = None, **samples: Any) -> Scrape:
    rows = {}
    for name, value in samples.items():
        values = value if isinstance(value, list) else [({"model_name": "m"}, value)]
        rows[name.replace("__", ":")] = tuple(values)
    return Scrape(samples=rows, time_s=time_s, where="there")


def test_gauges_are_means_over_the_busy_scrapes() -> None:
    def at(running: float, waiting: float, usage: float) -> Scrape:
        return scrape(
            vllm__num_requests_running=running, vllm__num_requests_waiting=waiting, vllm__kv_cache_usage_perc=usage,
            vllm__cache_config_info=[({"num_gpu_blocks": "100", "block_size": "16"}, 1.0)],
        )  # fmt: skip

    found = observation._load([at(0.0, 9.0, 0.9), at(2.0, 1.0, 0.25), at(4.0, 3.0, 0.75)], TARGET)  # fmt: skip
    assert (found.running, found.waiting, found.kv_usage) == (3.0, 2.0, 0.5)
    # tokens in the cache over the sequences that hold them, at each moment
    assert found.context_len == pytest.approx((1600 * 0.25 / 2 + 1600 * 0.75 / 4) / 2)
    idle = observation._load([at(0.0, 9.0, 0.9)], TARGET)
    assert (idle.running, idle.context_len) == (None, None)


def test_a_cache_is_counted_in_each_engines_own_way() -> None:
    sglang = Target(series=SGLANG, model="m")
    one = scrape(
        sglang__num_running_reqs=4.0, sglang__decode_sum_seq_lens=400.0, sglang__spec_num_steps=2.6
    )  # fmt: skip
    found = observation._load([one], sglang)
    assert (found.context_len, found.gamma) == (100.0, 3)
    tensorrt = Target(series=TRTLLM, model="m")
    one = scrape(
        trtllm_num_generation_requests=4.0, trtllm_kv_cache_used_blocks=10.0, trtllm_kv_cache_tokens_per_block=32.0
    )  # fmt: skip
    assert observation._load([one], tensorrt).context_len == 80.0
    without = scrape(trtllm_num_generation_requests=4.0, trtllm_kv_cache_used_blocks=10.0)  # fmt: skip
    assert observation._load([without], tensorrt).context_len is None


def test_ranks_with_batches_of_their_own_are_said() -> None:
    sglang = Target(series=SGLANG)
    rows = [({"dp_rank": str(rank)}, 3.0 + rank) for rank in range(3)]
    one = scrape(sglang__num_running_reqs=rows)
    (note,) = observation._on_ranks(one, sglang)
    assert note.startswith("3 data-parallel ranks")
    assert "(3, 4, 5 at the end)" in note
    assert observation._on_ranks(scrape(sglang__num_running_reqs=rows[:1]), sglang) == ()  # fmt: skip
    assert observation._load([one], sglang).running == 4.0


@pytest.mark.parametrize(("blocks", "size", "replica", "tokens"), [
    ("100", "16", "", 1600.0), ("0", "16", "", None), ("x", "16", "", None), ("1e300", "1e9", "", None),
    ("100", "16", "0", 1600.0), ("100", "16", "1", None),
])  # fmt: skip
def test_the_room_of_a_cache_is_its_blocks_times_their_size(
    blocks: str, size: str, replica: str, tokens: float | None
) -> None:
    labels = {"num_gpu_blocks": blocks, "block_size": size, "engine": "0"}
    one = Scrape(samples={metrics.CACHE_INFO: ((labels, 1.0),)})
    assert metrics.cache_tokens(one, dataclasses.replace(TARGET, replica=replica)) == tokens  # fmt: skip


def test_a_window_is_within_its_bounds_and_has_two_scrapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(metrics, "read_address", lambda _: scrape(now[0]))
    address: Any = object()

    def taken(seconds: float, interval_s: float) -> list[float | None]:
        now[0] = 0.0
        found = metrics.scrapes(
            address, seconds=seconds, interval_s=interval_s, sleep=sleep, clock=lambda: now[0]
        )  # fmt: skip
        return [each.time_s for each in found]

    assert taken(10.0, 4.0) == [0.0, 4.0, 8.0, 10.0]
    assert taken(2.0, 2.0) == [0.0, 2.0]
    assert len(taken(0.2, 0.2)) == 2
    for seconds, interval_s in ((1.0, 0.19), (1.0, 1.1), (86_401.0, 1.0)):
        with pytest.raises(ConfigError, match="the interval must be"):
            taken(seconds, interval_s)
    assert min(slept) >= 0.0


def test_samples_are_summed_by_their_labels() -> None:
    rows = [({"a": "1", "b": "x"}, 1.0), ({"a": "1", "b": "y"}, 2.0), ({"a": "2", "b": "x"}, 4.0)]  # fmt: skip
    rows.append(({}, 8.0))
    one = scrape(n=rows, other=[({"a": "9"}, 1.0)])
    assert one.total("n", {}) == 15.0
    assert one.total("n", {"a": "1"}) == 3.0
    assert one.total("n", {"a": "3"}) is None
    assert one.total(None, {}) is None
    assert one.by_label("n", "b", {}) == {"x": 5.0, "y": 2.0}
    assert one.by_label("n", "b", {"a": "1"}) == {"x": 1.0, "y": 2.0}
    assert one.values("a", "n") == ["1", "2"]
    assert one.values("a", "o") == ["9"]


@pytest.mark.parametrize(("text", "said"), [
    ("vllm:x 1e301", "which no engine has"), ("", "holds no metrics"), ("vllm:x NaN", "holds no metrics"),
    ("x{", "not in"),
])  # fmt: skip
def test_what_no_engine_counts_is_refused(text: str, said: str) -> None:
    with pytest.raises(ServerError, match=said):
        metrics.parse(text, where="there")
    assert metrics.parse("other 1e301", where="there").total("other", {}) == 1e301


# Files


def test_counts_of_sequences_are_one_stretch_each() -> None:
    counts = SimpleNamespace(steps=[5, 3], accepted=[[4, 2], [1, 0]])
    found = forms.of_sequences(SimpleNamespace(counts=counts, kind="a trace"))  # type: ignore[arg-type]
    assert [stretch.counts.drafts for stretch in found.readings] == [5.0, 3.0]
    assert [stretch.counts.accepted for stretch in found.readings] == [6.0, 1.0]
    assert found.readings[0].counts.accepted_by_position == (4.0, 2.0)
    assert (found.form, found.unit, found.series) == ("a trace", "sequences", NOT_TOLD)


# A file's first lines


SERVING = Serving(model="llama-3.1-8b", hardware="h100-sxm-80gb", engine="vllm")


def test_a_file_s_headline_has_its_tokens_speed_and_step() -> None:
    counts = dataclasses.replace(
        counted([60, 30], 100), output_tokens=190.0, step_seconds=2.0, requests=0.0
    )
    load = MeanGauges(running=4.0)
    found = seen(counts, load=load, form="a log", unit="lines")
    (line,) = View().headlines(found)
    assert line == "1.90 tokens per step (2 drafted); 19 tokens/s at batch 4; a step takes 20 ms"  # fmt: skip
    lines = View(serving=SERVING, draft=parse_draft("eagle3")).headlines(found)
    assert " expected (" in lines[0]
    assert "sequences of 1024 tokens assumed (--context)" in lines[0]
    known = View(serving=SERVING, draft=parse_draft("eagle3"), context=300.0)
    assert "assumed" not in known.headlines(found)[0]
    assert any(line.startswith("  wrong: each step takes") for line in lines)
    none = seen(counted([0], 20), form="a log", faults=("it smokes",))
    told = View().headlines(none)
    assert told[1] == "  wrong: it smokes"
    assert "none of 20 drafts had a token accepted" in told[2]
    few = seen(counted([0], 19), form="a log")
    assert not any("none of" in line for line in View().headlines(few))


def test_a_file_is_predicted_at_usual_loads_where_it_does_not_tell() -> None:
    counts = counted([60, 30], 100)
    view = View(serving=SERVING, draft=parse_draft("eagle3"))
    assert view._load(seen(counts, form="x")) == (1024.0, 1.0)
    assert view._load(seen(counts)) == (None, None)
    told = seen(counts, form="x", load=MeanGauges(running=7.0, context_len=99.0))
    assert view._load(told) == (99.0, 7.0)
    assert dataclasses.replace(view, context=5.0)._load(told) == (5.0, 7.0)
    situation = view.situation(seen(counts, form="x"))
    assert situation is not None
    assert (situation.batch_size, situation.context_len, situation.gamma) == (1.0, 1024.0, 2)  # fmt: skip
    assert View().situation(seen(counts, form="x")) is None
    assert view.situation(seen(counted([9], 19), form="x")) is None
    assert view.situation(seen(counted([9], 20), form="x")) is not None
    expected = view.expected(seen(counted([9], 19), form="x"))
    assert expected is not None
    assert expected.low_s <= expected.step_s <= expected.high_s


# Options of changes


@pytest.mark.parametrize(("engine", "words"), [
    ("vllm", ['"num_speculative_tokens": 3', '"model": "EAGLE-3-HEAD"']),
    ("sglang", ["--speculative-algorithm EAGLE3", "--speculative-num-steps 3 --speculative-eagle-topk 1",
                "--speculative-num-draft-tokens 4", "--speculative-draft-model-path"]),
    ("llama.cpp", ["--spec-type draft-eagle3", "--spec-draft-n-max 3"]),
    ("trtllm", ['speculative_config: {"decoding_type": "Eagle3"', '"speculative_model": "EAGLE-3-HEAD"',
                '"max_draft_len": 3}']),
])  # fmt: skip
def test_another_draft_s_option_is_the_engines_own(
    engine: str, words: list[str]
) -> None:
    row = found_of(draft="eagle3", acceptance_rate=0.7, gamma=3).drafts[1].rows[0]
    drafting = msgspec.structs.replace(row.drafting, checkpoint="")
    profile_name = "vllm" if engine == "llama.cpp" else engine
    command: Any = SimpleNamespace(
        engine=engine, engine_profile=profile_name, speculation=None, model="llama-3.1-8b"
    )  # fmt: skip
    text = check._draft_option(command, msgspec.structs.replace(row, drafting=drafting))
    for word in words:
        assert word in text
    lookup = msgspec.structs.replace(
        row,
        drafting=msgspec.structs.replace(drafting, draft="ngram", method="ngram"),
    )
    text = check._draft_option(command, lookup)
    assert "HEAD" not in text
    assert "num-steps" not in text
    if engine == "vllm":
        assert f'"prompt_lookup_max": {check.PROMPT_LOOKUP_MAX}' in text
    if engine == "llama.cpp":
        assert text == "--spec-type ngram-simple --spec-draft-n-max 3"


@pytest.mark.parametrize(("checkpoint", "expected"), [
    ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"), ("x/EAGLE-LLaMA3.1-8B", "own"),
    ("RedHatAI/Qwen3-8B-speculator.eagle3", "own"), (None, "own"),
])  # fmt: skip
def test_a_head_that_fits_is_kept(checkpoint: str | None, expected: str) -> None:
    row = found_of(draft="eagle3", acceptance_rate=0.7, gamma=3).drafts[1].rows[0]
    own = msgspec.structs.replace(row, drafting=msgspec.structs.replace(row.drafting, checkpoint="own"))  # fmt: skip
    speculation = SimpleNamespace(checkpoint=checkpoint)
    command: Any = SimpleNamespace(speculation=speculation, model="llama-3.1-8b")
    assert check._head_of(command, own) == expected
    assert check._head_of(SimpleNamespace(speculation=None), own) == "own"  # type: ignore[arg-type]


@pytest.mark.parametrize(("engine", "draft", "checkpoint", "model", "is_own"), [
    *((engine, draft, None, "glm-4.5-air", engine == "sglang" and draft == "eagle")
      for engine, draft in product(("vllm", "sglang"), ("eagle", "eagle3"))),
    ("sglang", "eagle", "x/EAGLE3-y", "glm-4.5-air", False), ("sglang", "eagle", "x/y", "glm-4.5-air", True),
    ("sglang", "eagle", None, "llama-3.1-8b", False),
])  # fmt: skip
def test_eagle_without_a_head_of_its_own_is_the_models_module_in_sglang(
    engine: str, draft: str, checkpoint: str | None, model: str, is_own: bool
) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3}
    name = "meta-llama/Llama-3.1-8B-Instruct"
    plain = read_serve_command(f"vllm serve {name} --speculative-config '{json.dumps(config)}'")  # fmt: skip
    assert isinstance(plain.speculation, Speculation)
    speculation = msgspec.structs.replace(plain.speculation, draft=draft, checkpoint=checkpoint)  # fmt: skip
    command = msgspec.structs.replace(plain, engine=engine, speculation=speculation)
    found = check._with_own_head(command, load_model_spec(model))
    assert found.speculation is not None
    assert found.speculation.draft == ("mtp" if is_own else draft)


def test_a_table_by_batch_is_named_where_it_gains_after_its_cost() -> None:
    question: dict[str, Any] = {
        "draft": "eagle3", "acceptance_rate": 0.7, "batch_sizes": (64,), "context_lens": (1024,), "gamma": 2,
    }  # fmt: skip
    case = case_of(**question)
    row = found_of(**question).drafts[1].rows[0]
    drafted = check.Drafted(row=row, case=case, option=case.options[0], gamma=2)
    command: Any = SimpleNamespace(engine="vllm", read={})
    best = {batch: drafted.best_at(batch) for batch in (1, 4, 16, 64)}
    gammas = {batch: gamma for batch, (gamma, _) in best.items()}
    assert len(set(gammas.values())) > 1
    gains = [over.gain for _, over in best.values()]
    mean = math.prod(gains) ** 0.25
    for cost in (0.0, mean / 1.02 - 1.001, mean / 1.02 - 0.999):
        engine = case.engine.with_constants(
            {
                "graphs.gamma_table_cost": cost,
                "graphs.gamma_table_cost_low": cost / 2,
                "graphs.gamma_table_cost_high": cost * 2,
            }
        )
        own = drafted._replace(case=dataclasses.replace(case, engine=engine))
        changes = check._by_batch(command, own)
        is_worth = mean >= 1.02 * (1.0 + cost)
        assert bool(changes) == is_worth
        if changes:
            (change,) = changes
            light = max((1, 4, 16), key=lambda batch: best[batch][1].gain)
            over = best[light][1]
            assert change.at_batch == light
            assert change.gain == pytest.approx(over.gain / (1.0 + cost))
            assert change.gain_low == pytest.approx(over.low / (1.0 + 2 * cost))
            assert change.gain_high == pytest.approx(over.high / (1.0 + cost / 2))
            assert ", ".join(f"{batch}: {gamma}" for batch, gamma in gammas.items()) in change.change  # fmt: skip
            config = json.loads(change.option.split("'")[1])
            assert config["num_speculative_tokens"] == max(gammas.values())
            bands = config["num_speculative_tokens_per_batch_size"]
            assert bands[0][0] == 1
            assert bands[-1][1] == 64
    llama: Any = SimpleNamespace(engine="llama.cpp", read={})
    assert check._by_batch(llama, drafted) == []
    assert load_engine("vllm").graphs.gamma_table_cost >= 0.0


@given(tokens=st.integers(2, 500), requests=st.none() | st.integers(1, 9))
def test_a_time_per_token_is_of_the_tokens_after_each_first_one(
    tokens: int, requests: int | None
) -> None:
    """llama.cpp times all its tokens and counts no requests; TensorRT-LLM what comes after a first token."""
    counts = CounterIncreases(
        output_tokens=1000.0 + tokens, decode_seconds=20.0, decode_requests=requests
    )
    assert counts.tpot_s == pytest.approx(20.0 / (1000 + tokens - (requests or 0)))
    stepped = CounterIncreases(output_tokens=100.0, requests=10.0, step_seconds=9.0)
    assert stepped.tpot_s == pytest.approx(0.1)
    means = CounterIncreases(mean_tpot_sum=3.0, mean_tpot_count=150.0)
    assert means.tpot_s == pytest.approx(0.02)
    assert CounterIncreases(output_tokens=5.0).tpot_s is None


def test_a_damaged_file_of_several_is_the_first() -> None:
    texts = [("one.json", '{"benchmarks": [1]}'), ("two.json", '{"benchmarks": [2]}')]
    with pytest.raises(ConfigError, match=r"^one\.json is told to be of the form"):
        forms.seen_in(texts)


@pytest.mark.parametrize(("drafts", "is_named"), [(97.0, False), (98.0, True), (100.0, True)])  # fmt: skip
def test_a_draft_in_nearly_every_step_is_none_that_is_looked_up(
    drafts: float, is_named: bool
) -> None:
    """A look-up finds nothing in more than one step of fifty."""
    names = VLLM.counters
    samples = {
        names["drafts"]: drafts, names["counted_steps"]: 100.0, names["output_tokens"]: 300.0,
        VLLM.gauges["running"]: 2.0,
    }  # fmt: skip
    rows = {name: (({"model_name": "m"}, value),) for name, value in samples.items()}
    one = Scrape(samples=rows, where="there")
    found = forms.observed([one], None)
    assert (found.announced is not None) == is_named
    assert found.num_scrapes == 1
    assert found.notes[0].startswith("one scrape: all since the server started")
    two = forms.observed([Scrape(samples={}, where="there"), one], None)
    assert two.num_scrapes == 2
    assert not any("one scrape" in note for note in two.notes)
