"""What a check says first and how sure it is, each rule by its definition over made-up changes and rows."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.live import check_text, drafts, options, settings
from magicdec.live import load as load_of
from magicdec.live.change import Change, Served, advised
from magicdec.live.check import Check
from magicdec.live.load import AskedLoad
from magicdec.live.room import AtOnce, sequences_at_once
from magicdec.schema.row import NO_GAIN, Gain
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.serve_command import ServeCommand, Speculation, read_serve_command
from tests.perfmodel.cases import case_of, found_of

NAME = "meta-llama/Llama-3.1-8B-Instruct"


def command_of(*options: str, engine: str = "vllm serve") -> ServeCommand:
    return read_serve_command(" ".join([engine, NAME, *options]))


PLAIN = command_of()


@st.composite
def some_change(draw: st.DrawFn) -> Change:
    kind = draw(st.sampled_from(["cost", "exactness", "gain"]))
    gain = draw(st.none() | st.sampled_from([1.01, 1.02, 1.2, 1.21, 1.5]))
    low = None if gain is None else gain * draw(st.sampled_from([0.6, 0.97, 0.999]))
    high = None if gain is None else gain * draw(st.sampled_from([1.001, 1.1]))
    return Change(
        change="c", option="o", reason="r", gain=gain, gain_low=low, gain_high=high, kind=kind,
        at_batch=draw(st.sampled_from([None, None, 4])), needs_gpus=draw(st.sampled_from([None, None, 8])),
    )  # fmt: skip


def check_of(changes: list[Change], **fields: Any) -> Check:
    usual: dict[str, Any] = {
        "command": PLAIN, "hardware": "h100-sxm-80gb", "num_gpus": 1, "batch_size": 8, "context_len": 4096,
        "assumed": [], "as_it_is": found_of().drafts[0].rows[0], "without_draft": found_of().drafts[0].rows[0],
        "changes": changes, "problems": [], "asked": [], "not_understood": [], "notes": [],
    }  # fmt: skip
    return Check(**usual | fields)


def is_here(change: Change) -> bool:
    return change.at_batch is None and change.needs_gpus is None


# What comes first


@given(changes=st.lists(some_change(), max_size=7))
def test_what_is_worth_a_line_is_named_once_and_in_order(changes: list[Change]) -> None:
    """What is not exact, what surely gains, what may gain, what has no price, and what is of another load; of each
    kind the most first."""
    changes = [msgspec.structs.replace(c, option=f"{chr(97 + n)}") for n, c in enumerate(changes)]  # fmt: skip
    ordered = advised(changes)
    worth = [c for c in changes if c.is_advice]
    assert sorted(map(repr, ordered)) == sorted(map(repr, worth))
    for c in ordered:
        if c.gain is None:
            assert c.kind != "gain"
        else:
            assert c.gain >= 1.02

    def rank(change: Change) -> tuple[int, float]:
        place = 3 if change.gain is None else 1 if (change.gain_low or 0.0) > 1.02 else 2  # fmt: skip
        if not is_here(change):
            place = 5
        if change.kind == "exactness":
            place = 0
        return place, -(change.gain or 0.0)

    ranks = [rank(change) for change in ordered]
    assert ranks == sorted(ranks)


def test_settings_that_differ_by_a_size_are_one() -> None:
    sizes = [
        Change(change=f"Capture graphs of {size} tokens", option=f"--max {size}", reason="r", gain=1.2, kind="cost",
               gain_low=1.1, gain_high=1.3)
        for size in (64, 128, 96)
    ]  # fmt: skip
    (one,) = advised(sizes)
    assert one.option == "--max 128"


@given(changes=st.lists(some_change(), max_size=5), problems=st.booleans(), runs=st.booleans())  # fmt: skip
def test_the_change_to_make_is_the_first_of_this_load(
    changes: list[Change], problems: bool, runs: bool
) -> None:
    fields: dict[str, Any] = {"problems": ["p"] if problems else []}
    if not runs:
        fields["as_it_is"] = None
    found = check_of(changes, **fields)
    first = next((c for c in changes if is_here(c)), None)
    assert found.first is first
    if first is None and not runs:
        assert found.advice == "Keep it as it is: its own draft is not priced."
    elif first is None:
        assert found.advice == "Keep it as it is: no change here is likely to gain 2 %."
    elif first.gain is None:
        assert found.advice == "c: r."
    else:
        ends = f"{first.gain:.2f}x (90 %: {first.gain_low:.2f} to {first.gain_high:.2f})"  # fmt: skip
        assert found.advice.startswith(f"c: {ends}")
        is_unsure = (first.gain_low or 0.0) <= 1.0
        assert found.advice.endswith("likely to gain, so measure first.") == is_unsure
    assert found.headline == ("p" if problems else found.advice)


@pytest.mark.parametrize(("low", "chance", "is_sure", "is_advice"), [
    (1.021, None, True, True), (1.02, None, False, True), (0.7, 0.67, False, True), (0.7, 0.66, False, False),
    (None, 0.9, False, False),
])  # fmt: skip
def test_two_to_one_is_worth_a_line_and_two_percent_at_least_is_sure(
    low: float | None, chance: float | None, is_sure: bool, is_advice: bool
) -> None:
    change = Change(
        change="c", option="o", reason="r", gain=1.2, gain_low=low, gain_high=1.4, chance=chance
    )  # fmt: skip
    assert (change.is_sure, change.is_advice) == (is_sure, is_advice)


# Gains over what runs


def drafted_of(**fields: Any) -> Served:
    question: dict[str, Any] = {"draft": "eagle3", "acceptance_rate": 0.7, **fields}
    case = case_of(**question)
    row = found_of(**question).drafts[1].rows[0]
    return Served(row=row, case=case, option=case.options[0])


@pytest.mark.parametrize("gen_len", [0, 200])
def test_another_gamma_gains_what_the_plan_says(gen_len: int) -> None:
    """With the interval of decoding over the part of the time that decodes."""
    drafted = drafted_of(gen_len=gen_len, gamma=2)
    rows = drafts.gammas_at(drafted, 8).rows
    assert [row.gamma for row in rows] == list(range(1, 13))
    now = rows[1]
    for other in rows[:5]:
        over = drafts.gain_over(drafted, other, now)
        assert over.speedup == pytest.approx(other.rate / now.rate)
        assert over.low <= over.speedup <= over.high
        if other is now:
            assert (over.low, over.high) == pytest.approx((1.0, 1.0), abs=1e-5)
    if gen_len:
        plain = drafted_of(gamma=2)
        narrow = drafts.gain_over(drafted, rows[4], now)
        wide = drafts.gain_over(
            plain,
            drafts.gammas_at(plain, 8).rows[4],
            drafts.gammas_at(plain, 8).rows[1],
        )
        assert narrow.high / narrow.low < wide.high / wide.low
    best = drafts.best_gamma(rows)
    fastest = max(rows, key=lambda row: row.rate)
    assert best == (fastest.gamma if fastest.gain.speedup >= 1.0 else 0)
    for gamma in (1, 2, 5):
        assert drafts.gain_of_gamma(drafted, rows, best, gamma).speedup >= 1.0 - 1e-9
    assert drafts.gain_of_gamma(drafted, rows, 3, 3) == NO_GAIN
    poor = drafted_of(acceptance_rate=0.05, gamma=2)
    poor_rows = drafts.gammas_at(poor, 8).rows
    own = next(row for row in poor_rows if row.gamma == 2)
    assert drafts.best_gamma(poor_rows) == 0
    assert drafts.gain_of_gamma(poor, poor_rows, 0, 2) == drafts.gain_of_none(own)
    assert drafts.gain_of_gamma(poor, poor_rows, 2, 0).speedup == own.gain.speedup


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "llama.cpp"])
@pytest.mark.parametrize("gamma", [1, 5])
def test_an_option_of_gamma_is_the_engines_own(engine: str, gamma: int) -> None:
    command = ServeCommand(engine=engine, model="Qwen/Qwen3-8B")
    text = options.gamma_option(command, gamma)
    expected = {
        "vllm": f'"num_speculative_tokens": {gamma}',
        "sglang": f"--speculative-num-steps {gamma} --speculative-num-draft-tokens {gamma + 1}",
        "trtllm": f"max_draft_len: {gamma}", "llama.cpp": f"--spec-draft-n-max {gamma}",
    }[engine]  # fmt: skip
    assert expected in text
    if engine == "sglang":
        lookup = msgspec.structs.replace(
            command, speculation=Speculation(draft="ngram")
        )
        assert "steps" not in options.gamma_option(lookup, gamma)
    if engine == "vllm":
        given = {
            "--speculative-config": '{"method": "eagle3", "num_speculative_tokens": 9}'
        }
        drafting = msgspec.structs.replace(command, read=given)
        told = json.loads(options.gamma_option(drafting, gamma).split("'")[1])
        assert told == {"method": "eagle3", "num_speculative_tokens": gamma}


def test_users_beyond_what_fits_get_devices_and_requests_wait() -> None:
    """By what memory holds; a preempting engine reads prompts again, up to each one once."""
    fields: dict[str, Any] = {"batch": 400, "context_len": 8192, "hardware": "h100", "gen_len": 100}  # fmt: skip
    load = AskedLoad(**fields)
    model = load_model_spec("llama-3.1-8b")
    command = command_of("--max-num-seqs 300")
    request, _ = load_of.request_of(command, load, model)
    at_once = sequences_at_once(command, 400, request, model)
    case = case_of(draft="none", context_lens=(8192,), gen_len=100)
    fits = int(case.largest_batches()[0])
    devices, expected = (way.change for way in at_once.ways)
    assert expected.option == f"--max-num-seqs {fits}"
    assert expected.change == f"Expect {fits} sequences at once, not 300"
    assert expected.kind == "cost"
    assert expected.gain is not None
    assert expected.gain_high is not None
    assert expected.gain_low == 1.0
    assert expected.gain - 1.0 == pytest.approx((expected.gain_high - 1.0) / 2.0)
    assert devices.needs_gpus == 8 or devices.needs_gpus in (2, 4)
    assert devices.gain is not None
    assert devices.gain > 1.0
    few = command_of("--max-num-seqs 4")
    asked = AskedLoad(**fields | {"batch": 30})
    request = load_of.request_of(few, asked, model)[0]
    (way,) = sequences_at_once(few, 30, request, model).ways
    assert way.command is not None
    assert way.command.max_num_seqs == 30
    wider = way.change
    assert wider.change == "Serve 30 users at once, not 4"
    assert wider.option == "--max-num-seqs 30"
    assert wider.gain is not None
    assert wider.gain > 1.0
    right = AskedLoad(**fields | {"batch": 4})
    request = load_of.request_of(few, right, model)[0]
    assert sequences_at_once(few, 4, request, model) == AtOnce([], [])


@pytest.mark.parametrize(("text", "expected"), [
    (None, None), ("auto", None), ("compressed-tensors", None), ("fp8", "fp8"), ("int8", "int8"),
])  # fmt: skip
def test_a_format_is_the_plans_or_the_checkpoints(
    text: str | None, expected: str | None
) -> None:
    def formats(
        name: str, **stated: str | None
    ) -> tuple[dict[str, str | None], list[str]]:
        command = msgspec.structs.replace(PLAIN, **stated)
        return load_of._formats(command, load_model_spec(name))

    known, assumed = formats("llama-3.1-8b", weight_dtype=text)
    assert (known["weights"], assumed) == (expected, [])
    known, assumed = formats("deepseek-v3", weight_dtype="fp8", kv_dtype="fp8")
    assert (known["weights"], known["cache"], assumed) == (None, "fp8", [])
    known, assumed = formats("llama-3.1-8b", weight_dtype="odd", kv_dtype="q4_k_m")
    assert set(known.values()) == {None}
    assert assumed == [
        "the weights as published, as odd is not known",
        "the cache as published, as q4_k_m is not known",
    ]


def test_a_task_brings_its_output_where_none_is_given() -> None:
    usual = load_of.usual_lengths("code")
    for gen_len, longest in ((0, 10**6), (7, 10**6), (0, 100)):
        load = AskedLoad(task="code", gen_len=gen_len)
        context, output, assumed = load_of._lengths(load, longest)
        assert context == min(usual.prompt_len, longest // 2)
        assert output == (gen_len or min(usual.output_len, longest // 2))
        assert len(assumed) == (1 if gen_len else 2)


def test_an_acceptance_that_is_given_is_of_the_commands_own_draft() -> None:
    model = load_model_spec("llama-3.1-8b")
    config = {"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3}
    drafting = command_of(f"--speculative-config '{json.dumps(config)}'")
    load = AskedLoad(hardware="h100", batch=8, accept_length=2.5, drafted_share=1.0)
    request, _ = load_of.request_of(drafting, load, model)
    assert (request.accept_length, request.drafted_share, request.gamma) == (2.5, 1.0, 3)  # fmt: skip
    plain, _ = load_of.request_of(command_of(), load, model)
    assert (plain.accept_length, plain.gamma) == (None, None)
    without = load_of.without_acceptance(request, gamma=None)
    for name in ("accept_length", "drafted_share", "acceptance_rate", "gamma"):
        assert getattr(without, name) is None


@pytest.mark.parametrize("gamma", [None, 3])
def test_a_gamma_that_is_left_to_the_engine_is_said(gamma: int | None) -> None:
    model = load_model_spec("llama-3.1-8b")
    options = {"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3}
    command = command_of(f"--speculative-config '{json.dumps(options)}'")
    own = msgspec.structs.replace(command.speculation, gamma=gamma)
    command = msgspec.structs.replace(command, speculation=own)
    load = AskedLoad(hardware="h100", batch=8)
    request, _ = load_of.request_of(command, load, model)
    drafted, notes = drafts.own_draft(command, request, model)
    assert drafted is not None
    is_said = any("gamma is the engine's default" in note for note in notes)
    assert is_said == (gamma is None)
    assert gamma in (None, drafted.row.gamma)


# Settings


def served_of(**question: Any) -> Served:
    found = found_of(**question).drafts[-1]
    return Served(
        case=case_of(**question),
        option=found.option,
        row=found.rows[0],
    )


def test_a_slowed_row_is_slower_by_as_much_wherever_its_time_stands() -> None:
    row = found_of(draft="eagle3", gen_len=200).drafts[1].rows[0]
    assert settings.slowed(row, 1.0, 1.0) is row
    slow = settings.slowed(row, 2.0, 3.0)
    assert slow.between_tokens_s == pytest.approx(2.0 * row.between_tokens_s)
    assert slow.tpot_s == pytest.approx(2.0 * row.tpot_s)
    assert slow.rate == pytest.approx(row.rate / 2.0)
    assert slow.gain.speedup == pytest.approx(1.5 * row.gain.speedup)
    assert slow.gain.low == pytest.approx(1.5 * row.gain.low)
    step = slow.step
    parts_s = row.gamma * step.draft_s + step.verify_s + step.accept_s + step.upkeep_s
    assert step.step_s == pytest.approx(parts_s)


def test_what_is_set_otherwise_is_compared_alike() -> None:
    alone = served_of(draft="none")
    assert (
        settings.times_as_long(alone, settings.settings_of(command_of(), alone)) == 1.0
    )
    of_command = settings.settings_of(command_of("--enforce-eager"), alone)
    eager = settings.times_as_long(alone, of_command)
    engine = settings.with_host_times(alone.case.engine)
    row = alone.row_as(engine.as_set(settings.PathOptions(enforce_eager=True)))
    assert row is not None
    layers = alone.case.model.num_hidden_layers
    other = 1.0 + engine.graphs.piecewise_s(layers) / alone.row.step_s
    first = row.between_tokens_s / alone.row.between_tokens_s
    assert eager == pytest.approx((first + other) / 2.0)


OPTIONS = (
    "--no-async-scheduling",
    "--compilation-config.cudagraph_mode PIECEWISE",
    "eager drafter",
)


@pytest.mark.parametrize(("one", "other"), [*combinations(OPTIONS, 2)])
def test_a_setting_costs_what_the_server_gains_without_it(one: str, other: str) -> None:
    """The server with both settings over the server with one is the price of the other; an eager
    drafter is of vLLM's V1 runner, the one of dense models before 0.25."""
    served = served_of(draft="eagle3", gamma=2, acceptance_rate=0.7, engine="vllm@0.24")

    def as_set(*options: str) -> tuple[float, list[Change]]:
        config: dict[str, Any] = {"method": "eagle3", "model": "a/b", "num_speculative_tokens": 2}  # fmt: skip
        if "eager drafter" in options:
            config["enforce_eager"] = True
        written = [option for option in options if option != "eager drafter"]
        command = command_of(*written, f"--speculative-config '{json.dumps(config)}'")
        command = msgspec.structs.replace(command, version="0.24.0")
        found = settings.settings_of(command, served)
        times = settings.times_as_long(served, found)
        return times, settings.costs_of(served, found)

    both_times, costs = as_set(one, other)
    gains = sorted(change.gain or 0.0 for change in costs if change.kind == "cost")  # fmt: skip
    assert len(gains) == 2
    expected = []
    for left in (one, other):
        expected.append(both_times / as_set(left)[0])
    assert gains == pytest.approx(sorted(expected), rel=1e-6)


# In words


@given(changes=st.lists(some_change(), max_size=4), problems=st.booleans(), runs=st.booleans())  # fmt: skip
def test_the_lines_hold_all_that_was_found_once(
    changes: list[Change], problems: bool, runs: bool
) -> None:
    changes = [
        msgspec.structs.replace(change, change=f"c{number}", option=f"o{number}", reason=f"r{number}")
        for number, change in enumerate(changes)
    ]  # fmt: skip
    fields: dict[str, Any] = {
        "problems": ["p"] if problems else [], "notes": ["n"], "asked": ["q"], "assumed": ["a", "b"],
        "not_understood": ["--x"],
    }  # fmt: skip
    if not runs:
        fields["as_it_is"] = None
    found = check_of(changes, **fields)
    lines = list(check_text.lines_of(found))
    texts = [line.text for line in lines]
    assert (texts[0] == "wrong: p") == problems
    first = found.first
    if first is not None or not problems:
        assert found.advice in texts
    for number, change in enumerate(changes):
        options = [line for line in lines if line.text == f"o{number}"]
        assert [line.is_option for line in options] == [True]
        if change is not first:
            ways = "or " if change.is_alternative else ""
            assert f"- {ways}{check_text._gain(change)}: c{number}. R{number}." in texts
    if first is not None and first.gain is not None:
        assert f"why: {first.reason}" in texts
    assert "assumed: a, b" in texts
    assert "note: n" in texts
    assert "asked: q" in texts
    assert any(text.startswith("not understood (") and text.endswith("): --x") for text in texts)  # fmt: skip
    start = "once it starts: " if problems else "as it is: "
    assert any(text.startswith(start) for text in texts) == runs
    assert not any(text.startswith("without a draft") for text in texts)


def test_as_it_is_is_told_with_its_time_and_its_gain() -> None:
    row = found_of(draft="none").drafts[0].rows[0]
    seconds = check_text.format_seconds
    plain = check_text._described(check_of([], as_it_is=row), row)
    assert plain.endswith(f"{seconds(row.between_tokens_s)} per token")
    assert "no draft on 1 x h100-sxm-80gb (tp 1), engine vllm, batch 8, context 4096" in plain  # fmt: skip
    drafted = found_of(draft="eagle3").drafts[1].rows[0]
    told = check_text._described(check_of([], as_it_is=drafted), drafted)
    gain: Gain = drafted.gain
    assert f"EAGLE-3, gamma {drafted.gamma} on" in told
    assert told.endswith(f", {gain.speedup:.2f}x over no draft (90 %: {gain.low:.2f} to {gain.high:.2f})")  # fmt: skip
