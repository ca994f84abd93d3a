"""What a command's settings cost, and the order of an answer: a planted fault stands first."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache

import msgspec
import pytest

import magicdec
from magicdec.live.change import Change, Served, in_order
from magicdec.live.check import Check
from magicdec.live.load import AskedLoad, request_of
from magicdec.live.settings import costs_of, settings_of, times_as_long
from magicdec.perfmodel.planner import answered
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.serve_command import read_serve_command

MODEL = "Qwen/Qwen3-8B"
PLAIN = f"vllm serve {MODEL}"
LOAD = AskedLoad(hardware="h100", batch=8, context_len=4096)
FAULTS = {
    "eager": ("--enforce-eager", "it runs eagerly"),
    "level 0": ("-O0", "it runs eagerly"),
    "no graphs": ('-cc \'{"cudagraph_mode": "NONE"}\'', "none is replayed"),
    "piecewise": ("--compilation-config.cudagraph_mode PIECEWISE", "piecewise"),
    "few graphs": ("--max-cudagraph-capture-size 4", "Capture graphs of 8 tokens"),
    "between steps": ("--no-async-scheduling", "Schedule the next step"),
    "small step": ("--max-num-batched-tokens 4", "Let a step take"),
    "small parts": ("--max_num_batched_tokens 256", "Read prompts in parts"),
}
"""Options that plant a fault of each kind, with words of what is said of it."""


@cache
def served() -> Served:
    command = read_serve_command(PLAIN)
    model = load_model_spec(command.model)
    request, _ = request_of(command, LOAD, model)
    alone = msgspec.structs.replace(request, draft="none")
    answer = answered(alone, model, [])[0][0]
    return Served(case=answer.case, option=None, row=answer.document.best)


def costs(options: str) -> list[Change]:
    command = read_serve_command(f"{PLAIN} {options}")
    return costs_of(served(), settings_of(command, served()))


def test_a_command_without_a_fault_has_no_cost() -> None:
    assert costs("--max-num-seqs 64 --enable-prefix-caching --async-scheduling") == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_priced(fault: str) -> None:
    options, words = FAULTS[fault]
    found = costs(options)
    assert any(words in change.change for change in found)
    for change in found:
        assert change.kind == "cost"
        assert change.gain is not None
        assert change.gain_low is not None
        assert change.gain_high is not None
        assert 1.0 <= change.gain_low <= change.gain <= change.gain_high


@pytest.mark.parametrize("most", range(1, 11))
def test_a_steps_tokens_cost_exactly_where_sequences_need_more(most: int) -> None:
    """Eight sequences without a draft need a token each."""
    found = [
        change
        for change in costs(f"--max-num-batched-tokens {most}")
        if "Let a step take" in change.change
    ]
    assert len(found) == (most < LOAD.batch)
    for change in found:
        assert change.change == f"Let a step take 8 tokens, not {most}"
        assert change.gain_high == pytest.approx(LOAD.batch / most)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("eager", "between steps"),
        ("piecewise", "small parts"),
        ("few graphs", "small step"),
        ("between steps", "small step"),
    ],
)
def test_two_faults_are_both_found(first: str, second: str) -> None:
    found = costs(f"{FAULTS[first][0]} {FAULTS[second][0]}")
    for fault in (first, second):
        assert any(FAULTS[fault][1] in change.change for change in found)


def test_eager_passes_cost_more_than_piecewise_ones_and_both_more_than_none() -> None:
    (eager,) = costs("--enforce-eager")
    (piecewise,) = costs(FAULTS["piecewise"][0])
    assert eager.gain is not None
    assert piecewise.gain is not None
    assert eager.gain > piecewise.gain > 1.0


def test_the_price_is_the_engines_path() -> None:
    """The first law is a plan of the server that is set so; the second adds its own time."""
    (found,) = costs(FAULTS["piecewise"][0])
    row = served().row
    graphs = served().case.engine.graphs
    layers = load_model_spec(MODEL).num_hidden_layers
    step_s = magicdec.predict(
        model="qwen3-8b",
        hardware="h100",
        engine="vllm",
        batch=8,
        context=4096,
        draft="none",
    ).step.step_s
    assert row.step.step_s == pytest.approx(step_s, rel=1e-6)
    waits_s = max(layers * graphs.piecewise_host_layer_s - step_s, 0.0)
    second_s = graphs.piecewise_pass_s + layers * graphs.piecewise_layer_s
    middle = 1.0 + (waits_s + second_s) / 2.0 / step_s
    assert found.gain == pytest.approx(middle, rel=0.03)


def test_an_engine_whose_host_was_not_timed_takes_half_of_vllms() -> None:
    """From nothing to vLLM's: nine eager servers of SGLang gained what they would with graphs."""
    text = f"python -m sglang.launch_server --model-path {MODEL} --disable-cuda-graph"
    case = served().case
    row = magicdec.predict(
        model="qwen3-8b",
        hardware="h100",
        engine="sglang",
        batch=8,
        context=4096,
        draft="none",
    )
    sglang = replace(case, engine=load_engine("sglang"))
    here = Served(case=sglang, option=None, row=row)
    command = read_serve_command(text)
    (found,) = costs_of(here, settings_of(command, here))
    graphs = load_engine("vllm").graphs
    layers = load_model_spec(MODEL).num_hidden_layers
    waits_s = max(layers * graphs.eager_host_layer_s - row.step.step_s, 0.0)
    second_s = graphs.piecewise_pass_s + layers * graphs.piecewise_layer_s
    middle = (waits_s + second_s) / 2.0 / row.step.step_s
    assert found.gain == pytest.approx(1.0 + middle / 2.0, rel=0.03)
    assert found.gain_low == 1.0
    assert "not measured in sglang" in found.reason


def test_what_is_not_exact_is_said() -> None:
    config = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "fly",
    }
    (found,) = costs(f"--speculative-config '{json.dumps(config)}'")
    assert found.kind == "exactness"
    assert "fly" in found.option


def test_prompts_read_anew_are_weighed_by_what_is_shared() -> None:
    (found,) = costs("--no-enable-prefix-caching")
    assert found.gain_low == 1.0
    assert found.gain is not None
    assert found.gain > 1.0
    assert not found.is_sure


def planted(kind: str, gain: float | None, low: float | None) -> Change:
    high = None if gain is None else 2.0 * gain
    return Change(
        change=kind,
        option="",
        reason="",
        gain=gain,
        gain_low=low,
        gain_high=high,
        kind=kind,
    )


def test_what_surely_gains_stands_before_what_may_gain_more() -> None:
    """Every order of changes of all kinds is sorted the same."""
    lossy = planted("exactness", None, None)
    sure = planted("gain", 2.0, 1.5)
    cost = planted("cost", 1.4, 1.03)
    barely = planted("cost", 2.5, 1.02)
    toss = planted("gain", 1.9, 0.4)
    unpriced = planted("cost", None, None)
    first_token = msgspec.structs.replace(sure, is_of_first_token=True)
    elsewhere = msgspec.structs.replace(sure, at_batch=4)
    wanted = [lossy, sure, cost, barely, toss, unpriced, first_token, elsewhere]
    for changes in itertools.islice(itertools.permutations(wanted), 0, None, 97):
        assert in_order(changes) == wanted


def test_the_headline_is_the_fault() -> None:
    command = read_serve_command(f"{PLAIN} --enforce-eager")
    changes = in_order([planted("gain", 1.9, 0.4), *costs("--enforce-eager")])
    row = served().row
    check = Check(
        command=command,
        hardware="h100-sxm-80gb",
        num_gpus=1,
        batch_size=8,
        context_len=4096,
        assumed=[],
        as_it_is=row,
        without_draft=row,
        changes=changes,
        problems=[],
        asked=[],
        not_understood=[],
        notes=[],
    )
    assert check.headline.startswith("Capture graphs: it runs eagerly: 1.")


def test_a_server_is_as_slow_as_its_graphs_that_are_not_captured() -> None:
    """Its time is that of a server without graphs, whatever else is set."""
    times = []
    for options in ("--max-cudagraph-capture-size 4", FAULTS["no graphs"][0]):
        command = read_serve_command(f"{PLAIN} {options} --no-async-scheduling")
        times.append(times_as_long(served(), settings_of(command, served())))
    assert times[0] > 1.0
    assert times[0] == pytest.approx(times[1])
    plain = settings_of(read_serve_command(PLAIN), served())
    assert times_as_long(served(), plain) == 1.0


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        ("--max-cudagraph-capture-size 64 --enforce-eager", "--enforce-eager"),
        ("--enforce_eager", "--enforce-eager"),
        ("-O0 --max-cudagraph-capture-size 64", "-O0"),
        ("-cc.cudagraph_mode NONE", """--cc '{"cudagraph_mode": "NONE"}'"""),
    ],
)
def test_what_is_left_out_is_the_option_that_says_it(
    options: str, left_out: str
) -> None:
    """Not another one whose name has "graph" in it."""
    advised = [change.option for change in costs(options)]
    assert f"leave out {left_out}" in advised
