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
from magicdec.live import findings, forms, metrics, options, profile
from magicdec.live.advice import Serving
from magicdec.live.judgement import Judgement, ServerFacts
from magicdec.live.metrics import VLLM, Scrape, Target
from magicdec.live.observation import (
    CounterIncreases,
    MeanGauges,
    Observation,
    parse_draft,
)
from magicdec.live.show import headlines
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.serve_command import Speculation, read_serve_command
from magicdec.specs.serve_command.server import UNFITTED
from tests.perfmodel.cases import found_of

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


@pytest.mark.parametrize(("text", "said"), [
    ("vllm:x 1e301", "which no engine has"), ("", "holds no metrics"), ("vllm:x NaN", "holds no metrics"),
    ("x{", "not in"),
])  # fmt: skip
def test_what_no_engine_counts_is_refused(text: str, said: str) -> None:
    with pytest.raises(ServerError, match=said):
        metrics.parse(text, where="there")
    assert metrics.parse("other 1e301", where="there").total("other", {}) == 1e301


# Files


# A file's first lines


SERVING = Serving(model="llama-3.1-8b", hardware="h100-sxm-80gb", engine="vllm")


def test_a_file_s_headline_has_its_tokens_speed_and_step() -> None:
    counts = dataclasses.replace(
        counted([60, 30], 100), output_tokens=190.0, step_seconds=2.0, requests=0.0
    )
    load = MeanGauges(running=4.0)
    found = seen(counts, load=load, form="a log", unit="lines")
    (line,) = headlines(Judgement(found, ServerFacts()))
    assert line == "1.90 tokens per step (2 drafted); 19 tokens/s at batch 4; a step takes 20 ms"  # fmt: skip
    served = ServerFacts(serving=SERVING, draft=parse_draft("eagle3"))
    lines = headlines(Judgement(found, served))
    assert " expected (" in lines[0]
    assert "sequences of 1024 tokens assumed (--context)" in lines[0]
    known = ServerFacts(serving=SERVING, draft=parse_draft("eagle3"), context=300.0)
    assert "assumed" not in headlines(Judgement(found, known))[0]
    assert any(line.startswith("  wrong: each step takes") for line in lines)
    none = seen(counted([0], 20), form="a log", faults=("it smokes",))
    told = headlines(Judgement(none, ServerFacts()))
    assert told[1] == "  wrong: it smokes"
    assert "none of 20 drafts had a token accepted" in told[2]
    few = seen(counted([0], 19), form="a log")
    assert not any(
        "none of" in line for line in headlines(Judgement(few, ServerFacts()))
    )


def test_a_file_is_predicted_at_usual_loads_where_it_does_not_tell() -> None:
    counts = counted([60, 30], 100)
    view = ServerFacts(serving=SERVING, draft=parse_draft("eagle3"))
    assert Judgement(seen(counts, form="x"), view).load == (1024.0, 1.0)
    assert Judgement(seen(counts), view).load == (None, None)
    told = seen(counts, form="x", load=MeanGauges(running=7.0, context_len=99.0))
    assert Judgement(told, view).load == (99.0, 7.0)
    assert Judgement(told, dataclasses.replace(view, context=5.0)).load == (5.0, 7.0)
    situation = Judgement(seen(counts, form="x"), view).situation
    assert situation is not None
    assert (situation.batch_size, situation.context_len, situation.gamma) == (1.0, 1024.0, 2)  # fmt: skip
    assert Judgement(seen(counts, form="x"), ServerFacts()).situation is None
    assert Judgement(seen(counted([9], 19), form="x"), view).situation is None
    assert Judgement(seen(counted([9], 20), form="x"), view).situation is not None
    expected = Judgement(seen(counted([9], 19), form="x"), view).expected
    assert expected is not None
    assert expected.low_s <= expected.step_s <= expected.high_s


# Options of changes


@pytest.mark.parametrize(("engine", "words"), [
    ("vllm", ['"num_speculative_tokens": 3', '"model": "EAGLE-3-HEAD"']),
    ("sglang", ["--speculative-algorithm EAGLE3", "--speculative-num-steps 3 --speculative-eagle-topk 1",
                "--speculative-num-draft-tokens 4", "--speculative-draft-model-path"]),
    ("llama.cpp", ["--spec-type draft-eagle3", "--spec-draft-n-max 3"]),
    ("trtllm", ['speculative_config: {decoding_type: "Eagle3"', 'speculative_model: "EAGLE-3-HEAD"',
                'max_draft_len: 3}']),
])  # fmt: skip
def test_another_draft_s_option_is_the_engines_own(
    engine: str, words: list[str]
) -> None:
    row = found_of(draft="eagle3", acceptance_rate=0.7, gamma=3).drafts[1].rows[0]
    drafting = msgspec.structs.replace(row.drafting, checkpoint="")
    profile_name = str(UNFITTED / "llama.cpp.toml") if engine == "llama.cpp" else engine
    command: Any = SimpleNamespace(
        engine=engine, engine_profile=profile_name, speculation=None, model="gemma-3-27b", read={}, version=None,
    )  # fmt: skip
    text = options.draft_option(
        command, msgspec.structs.replace(row, drafting=drafting)
    )
    for word in words:
        assert word in text
    lookup = msgspec.structs.replace(
        row,
        drafting=msgspec.structs.replace(drafting, draft="ngram", method="ngram"),
    )
    text = options.draft_option(command, lookup)
    assert "HEAD" not in text
    assert "num-steps" not in text
    if engine == "vllm":
        assert f'"prompt_lookup_max": {options.PROMPT_LOOKUP_MAX}' in text
    if engine == "llama.cpp":
        assert text == "--spec-type ngram-simple --spec-ngram-simple-size-m 3"


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
    found = findings._with_own_head(command, load_model_spec(model))
    assert found.speculation is not None
    assert found.speculation.draft == ("mtp" if is_own else draft)


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
