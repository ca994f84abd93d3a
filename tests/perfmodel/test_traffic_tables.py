"""Tables of a simulated server against the functions that they are made of, at drawn places."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.perfmodel import memory
from magicdec.perfmodel.acceptance import MeasuredProfile
from magicdec.perfmodel.acceptance.law import Law
from magicdec.perfmodel.drafting import draft_kv_tokens, draft_of
from magicdec.perfmodel.rate.costs import Costs, nodes, num_blocks, tabulate
from magicdec.perfmodel.rate.drafts import NUM_CLASSES
from magicdec.perfmodel.rate.requests import Requests, alike
from magicdec.perfmodel.rate.simulate import Server
from magicdec.perfmodel.serving import pass_parts, pass_seconds, prompt_time
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.step import send_op
from magicdec.schema.gamma_table import TableGamma
from magicdec.specs.engine import load_engine
from magicdec.specs.parallel import Parallelism
from magicdec.specs.speculation import AUTOREGRESSIVE, SpeculationSpec

LONGEST = 3000
EAGLE = SpeculationSpec(draft="eagle3", draft_method="eagle3", gamma=3)
SETUPS = {
    "mixes": Setup.of("llama-3.1-8b", "h100-sxm-80gb", "vllm"),
    "prompts alone": Setup.of("llama-3.1-8b", "h100-sxm-80gb", "magicdec-2024"),
    "stages": Setup.of(
        "llama-3.1-8b", "h100-sxm-80gb", "vllm", spread=Parallelism(pp=2)
    ),
    "groups": Setup.of(
        "gpt-oss-120b",
        "h100-sxm-80gb",
        "vllm",
        spread=Parallelism(dp=2, whole_experts=True),
    ),
}
PROFILE = MeasuredProfile(
    model="llama-3.1-8b",
    draft="eagle3",
    draft_method="eagle3",
    law=Law(rejection=0.3, concentration=4.0),
    spread=0.1,
)


@cache
def tables(name: str) -> tuple[Setup, Costs]:
    setup = SETUPS[name]
    return setup, tabulate(
        setup, None, tp_size=1, lengths=(20, LONGEST), max_tokens=600
    )


@cache
def drafting() -> Server:
    requests = alike(3, prompt_len=50, output_len=LONGEST)
    table = TableGamma(batch_sizes=(1, 8), context_lens=(1,), gammas=((3,), (1,)))
    setup = replace(SETUPS["mixes"], speculation=EAGLE)
    return Server.of(setup, requests, acceptance=PROFILE, policy=table)


NAMED = st.sampled_from(sorted(SETUPS))


@given(name=NAMED, length=st.integers(1, LONGEST))
def test_a_prompt_takes_its_attention_or_all_of_its_prefill(
    name: str, length: int
) -> None:
    """The send to the next stage is added where there is one."""
    setup, costs = tables(name)
    alone = prompt_time(setup, prompt_len=float(length), tp_size=1)
    exact = float(np.ravel(alone.group_seconds()["attention"])[0])
    if not setup.engine.scheduler.mixes_prefill:
        exact = float(np.ravel(alone.total_s)[0])
    assert costs.prompt_s(0) == 0.0
    found = costs.prompt_s(length)
    if setup.spread.pp > 1:
        exact += float(
            np.ravel(send_op(setup, tokens=float(length), tp_size=1).time_s)[0]
        )
    if length >= 16:
        assert found == pytest.approx(exact, rel=0.02)
    else:
        assert found == pytest.approx(costs.prompt_s(16) * length / 16)
    assert costs.prompt_s(length + 1) >= found


@given(
    name=NAMED,
    decoding=st.integers(1, 60),
    cuts=st.lists(st.integers(1, LONGEST), min_size=2, max_size=4, unique=True).map(
        sorted
    ),
    entering=st.integers(0, 3),
)
def test_chunks_add_up_to_their_prompt(
    name: str, decoding: int, cuts: list[int], entering: int
) -> None:
    """Each adds its tokens to a pass and the difference of prompts; requests that enter cost their
    own.
    """
    setup, costs = tables(name)
    starts, ends = cuts[:-1], cuts[1:]
    ends = [min(end, start + 150) for start, end in zip(starts, ends, strict=True)]
    found = costs.chunks_s(decoding, starts, ends, entering)
    tokens = sum(end - start for start, end in zip(starts, ends, strict=True))
    expected = sum(
        costs.prompt_s(end) - costs.prompt_s(start)
        for start, end in zip(starts, ends, strict=True)
    )
    if setup.engine.scheduler.mixes_prefill:
        sizes = np.array([decoding + tokens, decoding], dtype=float)
        own, shared = pass_parts(setup, tokens=sizes, tp_size=1)
        expected += max(float(np.ptp(own)), 0.0)
        whole = pass_seconds(setup, tokens=sizes, tp_size=1)
        assert whole == pytest.approx(own + shared, rel=1e-12)
        found_shared = costs.experts_s(decoding, tokens)
        assert found_shared == pytest.approx(float(np.ptp(shared * np.ones(2))))
        assert (found_shared > 0) == (name == "groups")
    expected += (
        setup.model.num_hidden_layers * setup.engine.graphs.prefill_layer_overhead_s
    )
    expected += entering * setup.engine.scheduler.request_overhead_s
    assert found == pytest.approx(expected, rel=1e-9)


@given(
    name=NAMED,
    sequences=st.integers(1, 200),
    contexts=st.lists(st.floats(1.0, 5000.0), min_size=2, max_size=2),
)
def test_a_step_takes_no_less_with_more_tokens_and_is_constant_beyond_the_table(
    name: str, sequences: int, contexts: list[float]
) -> None:
    setup, costs = tables(name)
    low, high = (costs.step_s(0, sequences, context) for context in sorted(contexts))
    assert low <= high * (1.0 + 1e-12)
    row = costs.row(0, sequences)
    for context in contexts:
        told = np.interp(context, costs.contexts, row)
        assert costs.step_s(0, sequences, context) == pytest.approx(told, rel=1e-12)
    assert costs.step_s(0, sequences + 1, low) >= costs.step_s(0, sequences, low) * (
        1 - 1e-3
    )
    assert (costs.stages, costs.groups) == (
        setup.spread.pp,
        setup.spread.pp * setup.spread.dp,
    )


@given(
    mean_len=st.floats(200.0, 50_000.0),
    gamma=st.sampled_from([0, 3]),
    size=st.sampled_from([1, 16]),
)
def test_blocks_fill_the_memory(mean_len: float, gamma: int, size: int) -> None:
    """Sequences that fill them fit, and those of two blocks more do not."""
    setup = Setup.of(
        "llama-3.1-8b", "h100-sxm-80gb", "vllm", EAGLE if gamma else AUTOREGRESSIVE
    )
    found = num_blocks(
        setup, tp_size=1, mean_len=mean_len, budget=None, gamma=gamma, block_size=size
    )
    free = memory.capacity_bytes(setup.hardware, setup.engine)
    for blocks, fits in ((found, True), (found + 2, False)):
        need = memory.memory_need(
            setup,
            batch=blocks * size / mean_len,
            max_len=mean_len,
            budget=None,
            gamma=gamma,
            tp_size=1,
        ).total_bytes
        assert (float(need) <= free * (1.0 + 1e-12)) == fits


@given(
    context=st.integers(50, LONGEST),
    gamma=st.sampled_from([1, 3]),
    kind=st.integers(0, 31),
)
def test_requests_accept_by_class_and_as_the_profile_says_over_classes(
    context: int, gamma: int, kind: int
) -> None:
    server = drafting()
    setup = server.setup
    drafts = server.drafts
    assert drafts is not None
    for contexts in (drafts.contexts, server.costs.contexts):  # a step's drafts too
        assert (contexts[0], contexts[-1] >= 50 + LONGEST + 4) == (50.0, True)
    rows = drafts.rows(np.arange(NUM_CLASSES), np.full(NUM_CLASSES, context))
    every = drafts.survivors[gamma].reshape(-1, gamma)[rows].T
    (node,) = [each for each in drafts.contexts if each >= context][:1] or [
        drafts.contexts[-1]
    ]
    read = draft_kv_tokens(setup, np.array([node]), None)
    seen = draft_of(setup).context_seen(np.array([node]), None)
    told, _ = PROFILE.tokens_per_step(budget=read, context=seen, gamma=gamma)
    assert every.shape == (gamma, NUM_CLASSES)
    assert 1.0 + every.sum(axis=0).mean() == pytest.approx(float(told[0]), rel=2e-3)
    assert np.all(np.diff(every, axis=0) <= 1e-12)
    assert np.all(np.diff(every, axis=1) >= -1e-12)
    steps = drafts.index(rows[kind : kind + 1], np.array([0])) + np.arange(4097)
    emitted = np.diff(drafts.emitted(gamma)[steps])
    for position in range(gamma):
        share = float((emitted > position + 1).mean())
        assert share == pytest.approx(every[position, kind], abs=1.0 / 4096)


@given(
    gamma=st.sampled_from([1, 3]),
    row=st.integers(0, 287),
    begin=st.integers(0, 4095),
    tokens=st.integers(1, 30_000),
)
def test_steps_are_the_fewest_that_emit_the_tokens(
    gamma: int, row: int, begin: int, tokens: int
) -> None:
    """Counted step by step, around a row's steps as often as it takes."""
    drafts = drafting().drafts
    assert drafts is not None
    index = drafts.index(np.array([row]), np.array([begin]))
    of_row = np.diff(drafts.emitted(gamma)[row * 8192 : row * 8192 + 4097])
    counted = np.cumsum(np.tile(np.roll(of_row, -begin), 8))
    expected = int(np.argmax(counted >= tokens)) + 1
    assert drafts.steps_of(gamma, index, np.array([tokens])).tolist() == [expected]
    emitted = drafts.tokens_of(gamma, index, np.array([expected]))
    assert emitted.tolist() == [counted[expected - 1]]


@given(
    prompts=st.lists(st.integers(16, 4000), min_size=1, max_size=5),
    most=st.none() | st.integers(1, 2000),
    tokens=st.none() | st.integers(64, 9000),
    device=st.sampled_from(["h100-sxm-80gb", "l4-24gb"]),
    dp=st.sampled_from([1, 2]),
)
def test_a_servers_limits_are_its_engines(
    prompts: list[int], most: int | None, tokens: int | None, device: str, dp: int
) -> None:
    """1024 sequences at once on devices of 70 GB and more, else 256, as far as their prompts fit."""
    engine = load_engine("vllm")
    spread = Parallelism(dp=dp, whole_experts=dp > 1)
    model = "llama-3.2-1b" if dp == 1 else "qwen3-30b-a3b"
    hardware = device if dp == 1 else "h100-sxm-80gb"
    setup = Setup.of(model, hardware, engine, spread=spread)
    count = len(prompts)
    requests = Requests(
        arrival_s=np.zeros(count),
        prompt_len=np.array(prompts),
        output_len=np.full(count, 9),
        cached_len=np.zeros(count, dtype=np.int64),
    )
    server = Server.of(setup, requests, max_sequences=most, max_tokens=tokens)
    limits = server.limits
    contexts = server.costs.contexts
    assert contexts[0] == min(prompts)
    assert contexts[-1] >= max(prompts) + 9
    assert len(server.costs.linear) > limits.max_tokens
    usual = 1024 if setup.hardware.memory_bytes >= 70e9 else 256
    blocks = num_blocks(
        setup,
        tp_size=1,
        mean_len=requests.mean_len,
        budget=None,
        gamma=0,
        block_size=16,
    )
    fit = max(blocks // -(-min(prompts) // 16), 1)
    assert limits.max_sequences == dp * min(most or usual, fit)
    assert limits.max_tokens == (tokens or round(engine.scheduler.prefill_tokens))
    assert (limits.num_blocks, limits.block_size) == (dp * blocks, 16)
    assert limits.reserves_output == (engine.scheduler.admission == "whole")
    assert limits.schedules_ahead == (engine.scheduler.steps_ahead > 0)


@given(low=st.floats(0.1, 1e5), factor=st.floats(1.0, 1e3), most=st.integers(3, 200))
def test_nodes_are_whole_ascend_and_hold_both_ends(
    low: float, factor: float, most: int
) -> None:
    high = low * factor
    found = nodes(low, high, most)
    assert np.all(found == np.round(found))
    assert np.all(np.diff(found) > 0)
    assert found[0] <= max(low, 1.0) + 0.5
    assert found[-1] >= max(high, 1.0) - 0.5
    assert len(found) <= most + 1
    if high - max(low, 1.0) < most:
        assert np.all(np.diff(found) == 1.0)
    else:
        assert np.all(
            np.diff(found)
            <= 1.0 + found[:-1] * (max(high, 1) / max(low, 1)) ** (2 / most)
        )
