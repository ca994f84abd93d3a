"""A pool that only decodes: its steps hold no prompts, which arrive over a link of a stated rate."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.errors import ConfigError
from magicdec.perfmodel.planner import make_plan, request_of
from magicdec.perfmodel.rate.costs import nodes
from magicdec.perfmodel.rate.replica import Replica
from magicdec.perfmodel.rate.requests import Requests, alike
from magicdec.perfmodel.rate.simulate import Server, simulate, simulate_closed
from magicdec.perfmodel.serving import whole_requests
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import predict
from magicdec.specs.speculation import AUTOREGRESSIVE

LINK = 25e9
HERE = Setup.of("llama-3.1-8b", "h100-sxm-80gb", "vllm", AUTOREGRESSIVE)
ELSEWHERE = dataclasses.replace(HERE, kv_link_bytes_per_s=LINK)
BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2
"""Keys and values of 32 layers with 8 heads of 128 in 16 bits."""


@pytest.mark.parametrize("tp_size", [1, 4])
def test_a_prompt_takes_its_bytes_over_the_link(tp_size: int) -> None:
    points = Points(batch=1, context=4096.0, tp=tp_size)
    here = predict(HERE, None, points)
    sent = predict(ELSEWHERE, None, points)
    seconds = 4096 * BYTES_PER_TOKEN / tp_size / LINK
    assert float(sent.transfer_s) == pytest.approx(seconds, rel=1e-9)
    assert float(sent.ttft_s - here.ttft_s) == pytest.approx(seconds, rel=1e-9)
    assert float(here.transfer_s) == 0.0


def test_steps_without_prompts_are_those_of_decoding() -> None:
    points = Points(batch=32, context=2048.0, gen_len=256.0)
    decoding = predict(ELSEWHERE, None, points)
    cycle = whole_requests(decoding, output_len=256.0).drafted
    assert float(cycle.tpot_s) == pytest.approx(float(decoding.tpot_s), rel=1e-12)
    assert float(cycle.prefill_share) == 0.0
    first_s = float(decoding.ttft_s) + 1.5 * float(decoding.step_s)
    assert float(cycle.ttft_s) == pytest.approx(first_s, rel=1e-9)
    beside_prompts = whole_requests(predict(HERE, None, points), output_len=256.0)
    assert cycle.tpot_s < beside_prompts.drafted.tpot_s


def test_a_simulated_pool_agrees_with_the_steady_one() -> None:
    """In a closed loop whose users wait for prefill and transfer outside the batch."""
    prompt, output, users = 2048, 256, 32
    requests = alike(6 * users, prompt_len=prompt, output_len=output)
    requests.output_len[:] = np.random.default_rng(0).integers(128, 385, len(requests))
    outcome = simulate_closed(Server.of(ELSEWHERE, requests), requests, users=users)
    points = Points(batch=float(users), context=float(prompt), gen_len=float(output))
    told = predict(ELSEWHERE, None, points)
    assert outcome.tpot_s.mean() == pytest.approx(float(told.tpot_s), rel=0.1)
    alone = alike(1, prompt_len=prompt, output_len=output)
    single = simulate(Server.of(ELSEWHERE, alone), alone)
    least_s = float(
        predict(ELSEWHERE, None, Points(batch=1, context=float(prompt))).ttft_s
    )
    assert least_s < single.ttft_s[0] < least_s + 0.05


def test_the_plan_says_what_it_leaves_out_and_refuses_what_cannot_be() -> None:
    asked = {
        "model": "llama-3.1-8b",
        "hardware": "h100",
        "context": 4096,
        "gen_len": 256,
        "tpot_ms": 15,
        "draft": "none",
    }
    here = make_plan(request_of(**asked))
    pool = make_plan(request_of(**asked, prefill="elsewhere", kv_link_gb_s=10))
    assert pool.best.rate > 1.5 * here.best.rate
    assert any("10 GB/s per device" in note for note in pool.key_notes)
    for wrong in (
        {"prefill": "there"},
        {"kv_link_gb_s": 10},
        {"prefill": "elsewhere", "kv_link_gb_s": 0},
    ):
        with pytest.raises(ConfigError):
            request_of(**asked, **wrong)


@cache
def served(tp_size: int) -> tuple[Requests, Server]:
    requests = alike(1, prompt_len=6000, output_len=9)
    assert Server.of(HERE, requests, tp_size=tp_size).limits.elsewhere_s is None
    return requests, Server.of(ELSEWHERE, requests, tp_size=tp_size)


@given(
    prompt=st.integers(0, 200),
    cached=st.none() | st.integers(0, 200),
    tp_size=st.sampled_from([1, 2]),
)
def test_a_prompt_comes_after_what_is_not_cached_of_its_prefill_and_all_of_its_bytes(
    prompt: int, cached: int | None, tp_size: int
) -> None:
    """At every length that is tabulated. A pool that prefills itself waits for nothing."""
    requests, server = served(tp_size)
    elsewhere_s = server.limits.elsewhere_s
    assert elsewhere_s is not None
    tabulated = nodes(1.0, 6000.0)
    longest = len(tabulated) - 1
    prompt_len = tabulated[min(prompt, longest)]
    cached_len = 0.0 if cached is None else tabulated[min(cached, prompt, longest)]

    def prefill_s(length: float) -> float:
        points = Points(batch=1.0, context=length, tp=tp_size)
        return float(predict(HERE, None, points).prefill_s)

    expected = prefill_s(prompt_len) + prompt_len * BYTES_PER_TOKEN / tp_size / LINK
    if cached_len:
        expected -= prefill_s(cached_len)
    found = float(elsewhere_s(prompt_len, cached_len))
    assert found == pytest.approx(expected, rel=1e-9)
    replica = Replica(requests, server.costs, server.limits)
    assert replica.before_s == elsewhere_s(6000, 0)
    assert replica.cached == [6000]
