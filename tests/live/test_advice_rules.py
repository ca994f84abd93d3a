"""What advice, a tuning and a terminal make of predictions, each by its definition over made-up choices."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.counts import Z_90
from magicdec.live import advice, judgement, show
from magicdec.live.advice import DraftedLoad, GammaChoice, Serving, choices_at
from magicdec.live.metrics import LLAMA_CPP, NOT_TOLD, SGLANG, TRTLLM, VLLM, Target
from magicdec.live.observation import (
    UNNAMED,
    CounterIncreases,
    MeanGauges,
    Observation,
    parse_draft,
)
from magicdec.perfmodel.acceptance import constant_profile
from magicdec.perfmodel.intervals import engine_error
from magicdec.specs.engine import load_engine

GAINS = st.floats(0.5, 2.0)


@st.composite
def some_choices(draw: st.DrawFn, least: int = 2) -> tuple[GammaChoice, ...]:
    found = []
    for gamma in range(draw(st.integers(least, 6))):
        gain, below, above = draw(GAINS), draw(GAINS), draw(GAINS)
        found.append(
            GammaChoice(
                gamma=gamma, tokens_per_step=1.0 + gamma / 2, tpot_s=0.01 / gain, gain=gain,
                gain_low=gain * min(below, 1.0), gain_high=gain * max(above, 1.0),
                is_sure_depth=draw(st.booleans()) or not gamma,
            )
        )  # fmt: skip
    return tuple(found)


def advice_of(choices: tuple[GammaChoice, ...], in_use: int) -> Any:
    """Advice with these choices."""
    return advice.Advice(
        situation=SimpleNamespace(gamma=in_use),  # type: ignore[arg-type]
        choices=choices, best=advice.best_of(choices, in_use), speedup=choices[0],
        answer=advice.answer_of(choices, in_use), batch_sizes=(1, 8), context_lens=(100, 200),
        table=(((0, True), (3, False)), ((2, True), (1, True))),
    )  # fmt: skip


# What to advise


@given(choices=some_choices(), data=st.data())
def test_the_best_gains_most_of_those_that_are_sure_or_no_deeper_than_in_use(
    choices: tuple[GammaChoice, ...], data: st.DataObject
) -> None:
    in_use = data.draw(st.integers(0, len(choices) - 1))
    best = advice.best_of(choices, in_use)
    for choice in choices:
        if choice.is_sure_depth or choice.gamma <= in_use:
            assert best.gain >= choice.gain
    assert best.is_sure_depth or best.gamma <= in_use
    assert advice.best_of(choices) == advice.best_of(choices, 0)
    rival = advice_of(choices, in_use).rival
    others = [choice for choice in choices if choice.gamma != in_use]
    assert rival in others
    assert rival.gain_high == max(choice.gain_high for choice in others)


@given(choices=some_choices(), data=st.data())
def test_a_change_is_worth_two_percent_and_surely_gains(
    choices: tuple[GammaChoice, ...], data: st.DataObject
) -> None:
    """To keep what is in use is advised where nothing else may gain a tenth; what lies between is not clear."""
    in_use = data.draw(st.integers(0, len(choices) - 1))
    best = advice.best_of(choices, in_use)
    is_other = best.gamma != in_use
    others = [choice for choice in choices if choice.gamma != in_use]
    is_far = max(choice.gain_high for choice in others) < 1.1
    answer = advice.answer_of(choices, in_use)
    if is_other and best.gain >= 1.02 and best.gain_low > 1.0:
        assert answer == "change"
    elif is_far and not (is_other and best.gain >= 1.02):
        assert answer == "keep"
    else:
        assert answer == "unclear"


def test_at_the_bounds_of_an_answer() -> None:
    def choice(gamma: int, gain: float, low: float, high: float) -> GammaChoice:
        return GammaChoice(
            gamma=gamma, tokens_per_step=2.0, tpot_s=0.01, gain=gain, gain_low=low, gain_high=high, is_sure_depth=True
        )  # fmt: skip

    now = choice(0, 1.0, 1.0, 1.0)
    for gain, low, high, answer in (
        (1.02, 1.01, 1.05, "change"), (1.0199, 1.01, 1.05, "keep"), (1.02, 1.0, 1.05, "unclear"),
        (0.9, 0.8, 1.0999, "keep"), (0.9, 0.8, 1.1, "unclear"), (1.2, 1.0001, 1.4, "change"),
    ):  # fmt: skip
        assert advice.answer_of((now, choice(1, gain, low, high)), 0) == answer


# Choices of a load


def load_of(draft: str, **changes: Any) -> DraftedLoad:
    served = parse_draft(draft)
    serving = Serving(model="llama-3.1-8b", hardware="h100-sxm-80gb", engine="vllm")
    rates = constant_profile((0.8, 0.7, 0.6), draft=draft, draft_method=served.method)
    usual = {
        "setup": serving.setup(served), "acceptance": rates, "batch_size": 8.0, "context_len": 4096.0, "gamma": 2,
    }  # fmt: skip
    return DraftedLoad(**usual | changes)


@pytest.mark.parametrize(("engine", "gammas"), [("vllm", 4), ("sglang", 2)])
def test_a_block_that_an_engine_takes_whole_is_advised_whole_or_not(
    engine: str, gammas: int
) -> None:
    """SGLang's DSPARK: 0 and the 3 in use, of which vLLM takes fewer too."""
    served = parse_draft("dspark")
    serving = Serving(model="qwen3-8b", hardware="h100-sxm-80gb", engine=engine)
    load = load_of("dspark", setup=serving.setup(served), gamma=3)
    choices = choices_at(load, 8.0, 4096.0, over=0)[:4]
    assert sum(choice.is_offered for choice in choices) == gammas
    assert choices[0].is_offered
    assert choices[3].is_offered


@pytest.mark.parametrize("draft", ["eagle3", "ngram"])
@pytest.mark.parametrize("over", [0, 1, 3])
def test_gains_are_ratios_and_their_errors_grow_with_what_differs(
    draft: str, over: int
) -> None:
    """Over itself a gamma gains nothing for sure; over 0 its gain turns round with its interval."""
    load = load_of(draft)
    choices = choices_at(load, 8.0, 4096.0, over=over)
    assert [choice.gamma for choice in choices] == list(load.gammas)
    for choice in choices:
        assert choice.gain == pytest.approx(choices[over].tpot_s / choice.tpot_s)
        assert choice.gain_low <= choice.gain <= choice.gain_high
    own = choices[over]
    assert (own.gain, own.gain_low, own.gain_high) == pytest.approx((1.0, 1.0, 1.0), abs=1e-5)  # fmt: skip
    if over:
        back = choices_at(load, 8.0, 4096.0, over=0)[over]
        assert choices[0].gain_low == pytest.approx(1.0 / back.gain_high)
        assert choices[0].gain_high == pytest.approx(1.0 / back.gain_low)
        error = engine_error(load.setup)
        for choice in choices[1:]:
            width = math.log(choice.gain_high / choice.gain_low) / (2.0 * Z_90)
            share = abs(choice.gamma - over) / max(choice.gamma, over)
            assert width >= error * share - 1e-9
        widths = [choice.gain_high / choice.gain_low for choice in choices[over:]]
        assert widths == sorted(widths)


def test_more_sequences_leave_less_to_chance() -> None:
    """The part of a gain's error that differs between sequences falls with the root of their number."""
    usual = load_of("eagle3").acceptance
    rates = msgspec.structs.replace(usual, spread=0.5)
    widths = []
    for batch in (1.0, 100.0):
        choice = choices_at(load_of("eagle3", acceptance=rates), batch, 512.0, over=1)[2]  # fmt: skip
        widths.append(math.log(choice.gain_high / choice.gain_low))
    assert widths[1] < 0.7 * widths[0]


# A server at fault


# In a terminal


def observed(**fields: Any) -> Observation:
    usual: dict[str, Any] = {
        "target": Target(series=VLLM, model="m"), "segments": (), "counts": CounterIncreases(), "load": MeanGauges(),
        "window_s": 10.0, "num_scrapes": 2,
    }  # fmt: skip
    return Observation(**usual | fields)


DRAFTED = CounterIncreases(
    drafts=100.0, draft_tokens=300.0, accepted=150.0, accepted_by_position=(80.0, 50.0, 20.0), output_tokens=260.0,
    requests=10.0, counted_steps=100.0, step_seconds=2.0,
)  # fmt: skip


@pytest.mark.parametrize(("fields", "words", "is_said"), [
    ({}, "the server was idle", True), ({"counts": DRAFTED}, "the server was idle", False),
    ({"counts": CounterIncreases(output_tokens=9.0)}, "runs without speculation", True),
    ({"counts": DRAFTED}, "runs without speculation", False),
    ({"counts": CounterIncreases(output_tokens=9.0), "unit": "runs", "form": "x"}, "it counts no drafts", True),
    ({"counts": DRAFTED, "unit": "runs", "form": "x"}, "it counts no drafts", False),
    ({"counts": dataclasses.replace(DRAFTED, accepted_by_position=())}, "does not count by position", True),
    ({"counts": DRAFTED}, "does not count by position", False),
    ({"counts": dataclasses.replace(DRAFTED, requests=None)}, "does not count requests", True),
    ({"counts": DRAFTED}, "does not count requests", False),
    ({"counts": dataclasses.replace(DRAFTED, requests=None), "form": "x", "unit": "lines"}, "count requests", False),
    ({"num_restarts": 2}, "restarted 2 times", True), ({}, "restarted", False),
    ({"window_s": None}, "saved scrapes hold no times", True), ({}, "hold no times", False),
    ({"window_s": None, "num_scrapes": 1}, "hold no times", False),
    ({"window_s": None, "form": "x", "unit": "lines"}, "hold no times", False),
    ({"counts": DRAFTED}, "not shown by this server", True), ({}, "not shown by this server", False),
    ({"counts": DRAFTED, "form": "x", "unit": "lines"}, "not shown by this server", False),
    ({"notes": ("mind the gap",)}, "mind the gap", True),
])  # fmt: skip
def test_a_note_is_said_where_it_holds(
    fields: dict[str, Any], words: str, is_said: bool
) -> None:
    told = show.notes(observed(**fields), parse_draft("eagle3"))
    assert any(words in line for line in told) == is_said


def test_what_is_missing_is_named_and_where_it_is_to_be_had() -> None:
    full = dataclasses.replace(DRAFTED, ttft_sum=1.0, ttft_count=2.0)
    load = MeanGauges(running=3.0, context_len=100.0)
    assert show._missing(observed(counts=full, load=load)) == ""
    text = show._missing(observed(counts=DRAFTED))
    assert text == "not shown by this server: running batch, sequences' length, time to first token"  # fmt: skip
    target = Target(series=TRTLLM, model="m")
    assert "return_perf_metrics" in show._missing(observed(counts=DRAFTED, target=target))  # fmt: skip


def test_a_draft_that_is_taken_for_granted_is_said() -> None:
    for draft, is_said in ((UNNAMED, True), (parse_draft("eagle3"), False)):
        told = show.notes(observed(counts=DRAFTED), draft)
        assert any("does not say what drafts" in line for line in told) == is_said
    plain = CounterIncreases(output_tokens=9.0)
    told = show.notes(observed(counts=plain), UNNAMED)
    assert not any("does not say what drafts" in line for line in told)


@pytest.mark.parametrize(("series", "fields", "start"), [
    (VLLM, {}, "vllm, m: 10 s, 2 scrapes"), (VLLM, {"num_scrapes": 1}, "vllm, m: 10 s, 1 scrape"),
    (VLLM, {"window_s": None}, "vllm, m: 2 scrapes"),
    (SGLANG, {"form": "a log", "unit": "decode batches", "num_scrapes": 1}, "a log, sglang, m: 10 s, 1 decode batch"),
    (NOT_TOLD, {"form": "report", "unit": "runs"}, "report, m: 10 s, 2 runs"),
    (LLAMA_CPP, {"form": "log", "unit": "requests", "num_scrapes": 1}, "log, llama.cpp, m: 10 s, 1 request"),
])  # fmt: skip
def test_the_first_line_says_what_was_read(
    series: Any, fields: dict[str, Any], start: str
) -> None:
    seen = observed(target=Target(series=series, model="m"), **fields)
    line, *_ = show.observation_lines(seen, parse_draft("eagle3"))
    assert line == start


def test_load_times_and_acceptance_are_shown_with_their_numbers() -> None:
    load = MeanGauges(running=3.0, waiting=2.0, kv_usage=0.5)
    counts = dataclasses.replace(
        DRAFTED, prompt_tokens_sum=900.0, prompt_tokens_count=9.0, request_output_sum=180.0, ttft_sum=1.0,
        ttft_count=4.0,
    )  # fmt: skip
    seen = observed(counts=counts, load=load, segments=(counts,))
    text = "\n".join(show.observation_lines(seen, parse_draft("eagle3")))
    for part in (
        "batch 3.0, running 3.0, waiting 2.0, 110 tokens per sequence, KV cache 50 % full", "8 ms per output token",
        "250 ms to the first", "26.0 tokens/s", "100 by EAGLE-3, gamma 3, 3.00 tokens each, in 100.0% of the steps",
        "2.500 ±", "0.800±", "0.625±", "0.400±", "by position",
    ):  # fmt: skip
        assert part in text, part
    stderr = math.sqrt((80 + 3 * 50 + 5 * 20) / 100 - 1.5**2) / 10.0
    assert f"2.500 ± {Z_90 * stderr:.3f}" in text
    named = dataclasses.replace(seen, announced=parse_draft("eagle3"))
    assert "(as the server says)" in "\n".join(show.observation_lines(named, parse_draft("eagle3")))  # fmt: skip
    assert "(as the server says)" not in text


def test_one_of_several_engines_has_a_line_of_its_own() -> None:
    part = observed(
        counts=DRAFTED, load=MeanGauges(running=3.0), target=Target(series=VLLM, model="m", replica="1")
    )  # fmt: skip
    words = " ".join(show.part_line(part).split())
    assert words == "engine 1 batch 3.0, 2.50 tokens per step, 26.0 tokens/s"
    whole = dataclasses.replace(part, parts=(part, part), segments=(DRAFTED,))
    assert ", 2 engines: " in show.observation_lines(whole, parse_draft("eagle3"))[0]


@given(choices=some_choices(), data=st.data())
def test_the_advice_says_what_to_run_and_what_it_gains(
    choices: tuple[GammaChoice, ...], data: st.DataObject
) -> None:
    in_use = data.draw(st.integers(0, len(choices) - 1))
    told = advice_of(choices, in_use)
    line = show._advice_line(told)
    shown = told.best if told.best.gamma != in_use else told.rival
    assert f"{shown.gain - 1.0:+.0%} goodput" in line
    ends = f"{shown.gain_low - 1.0:+.0%} to {shown.gain_high - 1.0:+.0%}"
    assert f"90 % interval {ends}" in line
    if told.answer == "keep":
        change = "lose" if shown.gain_high < 1.0 else "change little"
        assert f"keep gamma {in_use}; gamma {shown.gamma} would {change}" in line
    elif told.answer == "change":
        assert f"gamma {told.best.gamma} instead of {in_use}" in line
    else:
        assert f"gamma {shown.gamma} against {in_use}" in line
        reach = f"gamma {told.rival.gamma} may reach {told.rival.gain_high - 1.0:+.0%}"
        assert reach in line


def test_a_draft_of_which_nothing_is_accepted_is_a_fault_unless_it_may_be_absent() -> (
    None
):
    none = dataclasses.replace(
        DRAFTED, drafts=2000.0, counted_steps=2000.0, accepted=0.0, accepted_by_position=(0.0, 0.0, 0.0)
    )  # fmt: skip
    some = dataclasses.replace(none, accepted=900.0, accepted_by_position=(900.0, 0.0, 0.0))  # fmt: skip
    cases = ((none, "eagle3", True), (none, "ngram", False), (some, "eagle3", False))
    for counts, draft, is_fault in cases:
        seen = observed(counts=counts, segments=(counts,))
        assert bool(judgement.fault_in(seen, parse_draft(draft))) == is_fault
    assert judgement.fault_in(observed(), parse_draft("eagle3")) == ""


# Observations


@given(
    drafts=st.floats(1.0, 100.0),
    mean=st.floats(0.1, 6.0),
    accepted=st.lists(st.sampled_from([0.0, 5.0]), max_size=6),
    setting=st.none() | st.integers(1, 6),
)
def test_gamma_is_the_deepest_position_that_was_drafted(
    drafts: float, mean: float, accepted: list[float], setting: int | None
) -> None:
    """At least the mean, rounded up, and every position at which something was accepted."""
    counts = CounterIncreases(
        drafts=drafts, draft_tokens=drafts * mean, accepted_by_position=tuple(accepted)
    )
    found = observed(counts=counts, load=MeanGauges(gamma=setting)).gamma
    least = math.ceil(counts.draft_tokens / drafts)  # type: ignore[operator]
    if accepted:
        deepest = max((n for n, each in enumerate(accepted, 1) if each), default=0)
        assert found == max(min(least, len(accepted)), deepest)
    else:
        assert found == (setting or least)
    unknown = dataclasses.replace(counts, draft_tokens=None)
    found = observed(counts=unknown, load=MeanGauges(gamma=setting)).gamma
    assert found == (len(accepted) or setting)


def test_serving_engines_that_are_known_are_predicted_as_themselves() -> None:
    plain = Serving(model="llama-3.1-8b", hardware="h100-sxm-80gb")
    for name, expected in (("vllm", "vllm"), ("sglang", "sglang"), ("other", "ours"), ("", "ours")):  # fmt: skip
        assert plain.setup(None, name).engine == load_engine(expected)
    given_engine = dataclasses.replace(plain, engine="trtllm")
    assert given_engine.setup(None, "vllm").engine.name == "trtllm"
    assert plain.setup(None).speculation.draft_method == "none"
    assert plain.setup(parse_draft("eagle3")).speculation.gamma == 1
    assert np.isclose(plain.setup(None).sampling.temperature, 1.0)
