"""Stages and data-parallel attention with whole experts: a simulated pipeline, counted bytes, drawn routing, and the
plan's choice."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from magicdec.errors import ConfigError
from magicdec.perfmodel import forward
from magicdec.perfmodel.footprint import weights_bytes
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.memory import memory_need
from magicdec.perfmodel.plan.request import PlanRequest
from magicdec.perfmodel.planner import make_plan
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.step import step_terms, waiting_op
from magicdec.reports.terminal_plan import print_plan
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.parallel import Parallelism
from magicdec.specs.precision import Precision
from tests.kernels import exchange_time
from tests.perfmodel.passes import forward_pass

H100, VLLM = load_hardware("h100-sxm-80gb"), load_engine("vllm")
DEEPSEEK, LLAMA = load_model_spec("deepseek-v3"), load_model_spec("llama-3.1-405b")
FP8 = Precision(weight_dtype="fp8_block", kv_dtype="bf16")
EXPERT = 3 * 7168 * 2048
"""Weights of one of DeepSeek-V3's experts."""


def simulated(times: list[float], num_microbatches: int, rounds: int = 400) -> float:
    """Seconds per round in steady state: each microbatch passes the stages in turn, a stage takes one at a time, in
    order, and a microbatch begins again once it has left the last."""
    free = [0.0] * len(times)
    ready = [0.0] * num_microbatches
    halfway = 0.0
    for number in range(rounds):
        for each in range(num_microbatches):
            at = ready[each]
            for stage, seconds in enumerate(times):
                at = free[stage] = max(at, free[stage]) + seconds
            ready[each] = at
        halfway = ready[0] if number == rounds // 2 - 1 else halfway
    return (ready[0] - halfway) / (rounds - rounds // 2)


@given(
    pp=st.integers(2, 6), batch=st.integers(1, 40), layers_s=st.floats(1.0, 50.0), last_s=st.floats(0.0, 20.0),
    sends_s=st.floats(0.0, 5.0),
)  # fmt: skip
def test_a_step_in_stages_takes_what_a_simulated_pipeline_takes(
    pp: int, batch: int, layers_s: float, last_s: float, sends_s: float
) -> None:
    setup = Setup(model=LLAMA, hardware=H100, engine=VLLM, spread=Parallelism(pp=pp))
    counts = setup.spread.stage_layers(126)
    times = [count / 126 * layers_s + sends_s / pp for count in counts]
    times[-1] += last_s
    waiting = waiting_op(
        setup, batch=batch, layers_s=layers_s, last_s=last_s, sends_s=sends_s
    )
    expected = simulated(times, min(pp, batch))
    assert float(layers_s + last_s + sends_s + waiting.time_s) == pytest.approx(
        expected, rel=1e-6
    )


def test_two_stages_hold_half_the_layers_and_double_the_batch_that_fits() -> None:
    """405B: 126 layers of 8 KV heads of 128 numbers; a stage has one of the two tables of 128256 x 16384."""
    table, total = (
        128_256 * 16_384,
        405_853_388_800,
    )  # parameters as published, tables included
    setup = Setup(model=LLAMA, hardware=H100, engine=VLLM, spread=Parallelism(pp=2))
    need = memory_need(setup, batch=10, max_len=4095, budget=None, gamma=0, tp_size=8)
    assert float(need.weights_bytes) == pytest.approx(
        ((total - 2 * table) / 2 + table) / 8 * 2, rel=1e-4
    )
    assert float(need.kv_bytes) == 10 * 63 * 2 * 1 * 128 * 2 * 4096


def test_a_rank_holds_its_experts_whole_and_the_rest_as_every_other_rank() -> None:
    """671 026 419 200 weights without the prediction head, as published; 58 layers of 256 experts. Routers and tables
    are in 16 bits, the others in 8 with a scale of 4 bytes per block of 128 x 128."""
    table, total = 129_280 * 7168, 671_026_419_200
    spread = Parallelism(dp=16, whole_experts=True)
    dense = total - 2 * table - 58 * 256 * EXPERT
    scaled, routers = 1 + 4 / 128**2, 58 * 256 * 7168
    expected = (dense + 58 * 16 * EXPERT - routers) * scaled + 2 * (routers + 2 * table)
    assert float(weights_bytes(DEEPSEEK, FP8, 1, spread)) == pytest.approx(
        expected, rel=1e-4
    )
    uneven = replace(spread, dp=24)  # 10 or 11 experts: the fullest has 11
    assert float(weights_bytes(DEEPSEEK, FP8, 1, uneven)) == pytest.approx(
        expected - 58 * 5 * EXPERT * scaled, rel=1e-4
    )


def test_each_group_caches_its_own_sequences_only() -> None:
    """A latent of 576 numbers in each of 61 layers, which tensor parallelism does not divide."""
    alone = Setup(model=DEEPSEEK, hardware=H100, engine=VLLM, precision=FP8)
    spread = replace(alone, spread=Parallelism(dp=16, whole_experts=True))
    sequence = 61 * 576 * 2 * 4096
    caches = [
        float(
            memory_need(
                setup, batch=40, max_len=4095, budget=None, gamma=0, tp_size=tp
            ).kv_bytes
        )
        for setup, tp in ((alone, 16), (spread, 1))
    ]
    assert caches == [
        40 * sequence,
        3 * sequence,
    ]  # 40 sequences over 16 groups: 2 or 3


def test_a_rank_reads_the_experts_that_all_groups_tokens_choose_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drawn: 8 ranks of 8 of 64 experts; 6 groups' tokens choose 4 each."""
    monkeypatch.setattr(forward, "EXPERT_IMBALANCE", 1.0)
    model = load_model_spec("qwen3-30b-a3b")
    mlp, count = next((mlp, count) for mlp, count in model.feed_forwards)
    engine = VLLM.with_constants({"kernels.fused_experts": False})
    spread = Parallelism(dp=8, whole_experts=True)
    time = forward_pass(
        model, H100, engine, batch=3, query_len=1, kv_len=64, spread=spread
    )
    read = sum(
        float(op.cost.weight_bytes) for op in time.ops if op.name in ("gate_up", "down")
    )
    rng = np.random.default_rng(0)
    touched = []
    for _ in range(2000):
        chosen = np.concatenate(
            [
                rng.permutation(mlp.num_experts)[: mlp.num_experts_per_tok]
                for _ in range(24)
            ]
        )
        touched.append(len(np.unique(chosen[chosen < mlp.num_experts // 8])))
    expected = count * np.mean(touched) * 3 * model.hidden_size * mlp.width * 2
    assert read == pytest.approx(expected, rel=0.02)  # the mean's own error: 0.4 %


def test_tokens_are_sent_to_their_experts_in_8_bits_and_come_back_in_16() -> None:
    """5 tokens of each rank to 8 experts each, in 58 layers; a scale in 32 bits per 128 numbers."""
    spread = Parallelism(dp=32, whole_experts=True)
    arguments: dict[str, Any] = {
        "batch": 5,
        "query_len": 1,
        "kv_len": 64,
        "weight_dtype": "fp8_block",
    }
    time = forward_pass(DEEPSEEK, H100, VLLM, spread=spread, **arguments)
    sent = {
        op.name: float(op.cost.collective_bytes)
        for op in time.ops
        if op.group == "link"
    }
    assert sent["dispatch"] == 58 * 5 * 8 * (7168 + 7168 / 128 * 4)
    assert sent["combine"] == 58 * 5 * 8 * 7168 * 2
    assert sent["all_reduce"] == 0
    one_group = forward_pass(
        DEEPSEEK,
        H100,
        VLLM,
        tp_size=8,
        spread=Parallelism(whole_experts=True),
        **arguments,
    )
    assert not any(op.name in ("dispatch", "combine") for op in one_group.ops)


@pytest.mark.parametrize(
    ("element", "published_us"),
    [(1 + 4 / 128, (118, 155, 173, 192, 194)), (2, (195, 273, 314, 369, 360))],
)
def test_exchanges_over_infiniband_take_what_deepep_publishes(
    element: float, published_us: tuple[int, ...]
) -> None:
    """DeepEP's table of its low-latency kernels (docs/legacy.md of its repository): 128 tokens to 8 experts each on 16
    to 256 H800 with 400 Gb/s each, whose network is an H100's. No constant was fitted to it."""
    ranks = np.array([16, 32, 64, 128, 256])
    seconds = exchange_time(
        H100, tokens=128, token_bytes=7168 * element, num_experts_per_tok=8, num_ranks=ranks
    )  # fmt: skip
    errors = np.abs(seconds * 1e6 / np.array(published_us) - 1)
    assert errors.max() < 0.14
    assert errors.mean() < 0.10


def test_prefill_sends_a_token_once_to_each_node() -> None:
    """Drawn: the further of 4 nodes that hold any of 8 experts, chosen independently."""
    rng = np.random.default_rng(0)
    nodes = rng.integers(0, 4, (20_000, 8))
    copies = np.mean([len(set(row) - {0}) for row in nodes.tolist()])
    one, all_copies = (
        exchange_time(
            H100,
            tokens=1e6,
            token_bytes=1e4,
            num_experts_per_tok=8,
            num_ranks=32,
            once_per_node=once,
        )
        for once in (True, False)
    )
    assert float(one / all_copies) == pytest.approx(
        copies / 6, rel=0.01
    )  # 8 copies, 3/4 of them to other nodes


def test_a_group_of_one_and_one_stage_are_tensor_parallelism() -> None:
    setup = Setup(model=DEEPSEEK, hardware=H100, engine=VLLM, precision=FP8)
    same = replace(setup, spread=Parallelism(pp=1, dp=1))
    arguments: dict[str, Any] = {
        "batch": 7,
        "kv_len": 999,
        "draft_kv_len": 0,
        "gamma": 0,
        "tp_size": 8,
    }
    assert float(step_terms(setup, **arguments).step_s) == float(
        step_terms(same, **arguments).step_s
    )


def test_405b_over_two_nodes_compares_stages_with_tensor_parallelism() -> None:
    """An H100 node has 640 GB for 812 GB of weights."""
    case: dict[str, Any] = {
        "model": "llama-3.1-405b",
        "hardware": ("h100-sxm-80gb",),
        "context_lens": (8192,),
    }
    answer = make_plan(PlanRequest(**case, num_gpus=16))
    assert [row.layout.label for row in answer.layouts] == ["tp 8 x pp 2", "tp 16"]
    assert answer.best.layout.label == "tp 8 x pp 2"
    assert answer.best.num_gpus == 16
    assert answer.best.decoding.tokens_per_s_per_gpu == pytest.approx(
        answer.best.tokens_per_s / 16
    )
    (unpublished,) = answer.needs_acceptance  # what vLLM runs with stages
    assert unpublished.draft_method == "eagle3"
    assert not answer.candidates
    assert any("eagle3" in note and "is known to run" in note for note in answer.notes)
    asked = make_plan(
        PlanRequest(
            **case,
            tp_size=8,
            pp_size=2,
            batch_sizes=(answer.best.batch_size,),
            draft="none",
        )
    )
    assert asked.best.tokens_per_s == pytest.approx(answer.autoregressive.tokens_per_s)
    with pytest.raises(ConfigError, match="plugin for vLLM does not run with pp 2"):
        make_plan(PlanRequest(**case, tp_size=8, pp_size=2, draft="self"))


def test_the_answer_is_the_best_of_the_layouts_listed_and_every_group_size_is_tried() -> (
    None
):
    case: dict[str, Any] = {
        "model": "deepseek-v3",
        "hardware": ("h200-sxm-141gb",),
        "context_lens": (32_768,),
    }
    answer = make_plan(PlanRequest(**case, num_gpus=8, tpot_limit_s=0.04))
    assert {row.layout.label for row in answer.layouts} == {
        "tp 8",
        "dp 8, ep 8",
        "dp 4 x tp 2, ep 8",
        "dp 2 x tp 4, ep 8",
    }
    assert answer.best.layout.label == answer.layouts[0].layout.label
    assert answer.best.rate_per_gpu == max(row.rate_per_gpu for row in answer.layouts)
    assert all(row.within_limits for row in answer.layouts)
    only_tp = next(row for row in answer.layouts if row.layout.label == "tp 8")
    assert (
        answer.best.batch_size > 3 * only_tp.batch_size
    )  # eight caches in place of one


def test_every_device_given_is_used_or_said_to_be_idle() -> None:
    case: dict[str, Any] = {
        "hardware": ("a100-sxm-80gb",),
        "context_lens": (4096,),
        "num_gpus": 3,
        "draft": "eagle3",
    }
    answer = make_plan(PlanRequest(**case))
    assert (answer.best.tp_size, answer.best.num_replicas) == (1, 3)
    assert not any("idle" in note for note in answer.notes)
    assert max(row.rate for row in answer.rows if row.within_limits) == answer.best.rate
    of_two = make_plan(PlanRequest(**case, tp_size=2))
    assert any("1 of the 3 GPUs given stays idle" in note for note in of_two.notes)
    text = StringIO()
    print_plan(
        make_plan(PlanRequest(**case | {"num_gpus": 16, "tp_size": 4})),
        Console(file=text, width=100),
    )
    shown = text.getvalue()
    assert "on 16 x A100 SXM 80 GB (4 replicas)" in shown
    assert "in 4 replicas (tp 4)" in shown
    assert " each, context" in " ".join(shown.split())
