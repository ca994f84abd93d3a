"""What fits: sums, shards, and the largest batch against counting up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.memory import (
    capacity_bytes,
    kv_bytes,
    largest_batch,
    memory_need,
    state_bytes,
    weights_bytes,
)
from magicdec.perfmodel.setup import Setup
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import ENGINES_DIRECTORY, load_engine
from magicdec.specs.parallel import Parallelism
from magicdec.specs.precision import BF16, Precision
from magicdec.specs.speculation import MAX_GAMMA, SpeculationSpec
from tests.perfmodel.passes import forward_pass

A100, ENGINE, LLAMA = (
    load_hardware("a100-sxm-80gb"),
    load_engine("ours"),
    load_model_spec("llama-3.1-8b"),
)

PAPER = load_engine("magicdec-2024")  # has no spare slots


def test_one_rank_holds_the_published_weights() -> None:
    assert float(weights_bytes(LLAMA, BF16, 1)) == 2.0 * 8_030_261_248


def test_ranks_share_weights_and_replicate_kv_projections_beyond_the_kv_heads() -> None:
    eight, sixteen = (
        float(weights_bytes(LLAMA, BF16, 8)),
        float(weights_bytes(LLAMA, BF16, 16)),
    )
    assert eight * 8 == pytest.approx(2.0 * LLAMA.num_parameters)
    assert sixteen * 16 > 2.0 * LLAMA.num_parameters


def test_kv_of_llama_3_1_is_128_kib_per_token() -> None:
    assert float(kv_bytes(LLAMA, PAPER, BF16, 1, 1)) == 128 * 1024
    assert (
        float(kv_bytes(LLAMA, PAPER, Precision(kv_dtype="int4"), 10, 1))
        == 10 * 32 * 1024
    )
    assert float(kv_bytes(LLAMA, PAPER, BF16, 1, 16)) == float(
        kv_bytes(LLAMA, PAPER, BF16, 1, 8)
    )


@pytest.mark.parametrize(
    ("method", "budget"), [("none", None), ("streamingllm", 512), ("snapkv", 4096)]
)
def test_largest_batch_equals_counting_up(method: str, budget: int | None) -> None:
    spec = SpeculationSpec(
        draft="none" if method == "none" else "self",
        draft_method=method,
        draft_budget=budget,
    )  # type: ignore[arg-type]
    setup = Setup(model=LLAMA, hardware=A100, engine=ENGINE, speculation=spec)

    def need(batch: float) -> float:
        total = memory_need(
            setup, batch=batch, max_len=32_768, budget=budget, gamma=4, tp_size=8
        ).total_bytes
        return float(total)

    capacity = capacity_bytes(A100, ENGINE)
    counted = 0
    while need(counted + 1) <= capacity:
        counted += 1
    assert int(largest_batch(need(0), need(1), capacity)) == counted > 0


def test_a_draft_takes_as_much_of_the_cache_as_servers_report() -> None:
    """Tokens that fit fall by 8 % with EAGLE, 18.9 % with n-gram and 27 % with DSpark, a head of five layers (vLLM's
    reports at its start): layers of the head, its weights, and logits of gamma + 1 rows for each of as many sequences
    as it is set up for. Their servers are not said, so usual ones are taken, and a third of the figure is allowed for.
    SGLang's DFlash of a 27B hybrid holds a quarter of the cache, 20 of 79.6 KiB per token, whatever its window (sglang
    pull request 40563)."""

    def tokens(
        model: str, hardware: str, sequences: int, method: str, gamma: int
    ) -> float:
        spec = SpeculationSpec(draft=method, draft_method=method, gamma=gamma)  # type: ignore[arg-type]
        setup = Setup.of(model, hardware, "vllm", spec)
        need = memory_need(
            setup, batch=sequences, max_len=4096, budget=None, gamma=gamma, tp_size=1
        )
        fixed = need.weights_bytes + need.draft_weights_bytes + need.workspace_bytes
        cached = (need.kv_bytes + need.draft_kv_bytes) / sequences / 4096
        return float((capacity_bytes(setup.hardware, setup.engine) - fixed) / cached)

    for server, method, gamma, reported in (
        (("llama-3.1-8b", "a100-sxm-80gb", 256), "eagle3", 3, 0.08),
        (("llama-3.1-8b", "a100-sxm-80gb", 1024), "ngram", 5, 0.189),
        (("apertus-8b", "gh200-96gb", 256), "dspark", 7, 0.27),
    ):
        taken = 1.0 - tokens(*server, method, gamma) / tokens(*server, "none", 0)
        assert taken == pytest.approx(reported, rel=1 / 3), method
    spec = SpeculationSpec(draft="dflash", draft_method="dflash", gamma=7)
    need = memory_need(
        Setup.of("qwen3.5-27b", "h200-sxm-141gb", "sglang", spec), batch=8, max_len=2**17, budget=None, gamma=7,
        tp_size=1,
    )  # fmt: skip
    assert float(need.draft_kv_bytes) / 8 / 2**17 == pytest.approx(20 * 1024, rel=0.01)


def test_top_k_holds_the_attention_that_it_chooses_by() -> None:
    """32 layers of 8 heads, 3 sequences, 5 verified tokens, 8192 + 5 slots, fp32: what StreamingLLM does without."""
    need = {}
    for method in ("streamingllm", "topk"):
        spec = SpeculationSpec(draft="self", draft_method=method, draft_budget=512)  # type: ignore[arg-type]
        setup = Setup(model=LLAMA, hardware=A100, engine=ENGINE, speculation=spec)
        need[method] = memory_need(
            setup, batch=3, max_len=8192, budget=512, gamma=4, tp_size=1
        )
    more = float(need["topk"].workspace_bytes - need["streamingllm"].workspace_bytes)
    assert more == 32 * 8 * 3 * 5 * (8192 + 5) * 4


def test_what_does_not_fit_at_all_has_no_batch() -> None:
    assert float(largest_batch(10.0, 11.0, 9.0)) == 0.0
    np.testing.assert_array_equal(
        largest_batch(0.0, np.array([1.0, 3.0]), 9.0), [9.0, 3.0]
    )


def test_a_sliding_window_caps_the_cache_where_the_engine_keeps_it_so() -> None:
    """Mistral, 8 x 16,384 in bf16, one slot more than held: 128 KiB per token and sequence, or those of 4096 alone."""
    mistral = load_model_spec("mistral-7b-v0.1")
    for kept, tokens in (("all", 16_385), ("window", 4096)):
        engine = load_engine("magicdec-2024").with_constants(
            {"memory.window_cache": kept}
        )
        setup = Setup(model=mistral, hardware=A100, engine=engine)
        need = memory_need(
            setup, batch=8, max_len=16_384, budget=None, gamma=0, tp_size=1
        )
        assert float(need.kv_bytes) == 8 * tokens * 128 * 1024


@pytest.mark.parametrize(
    ("model", "context", "kept"),
    [("embedded", 4000, None), ("mistral-7b-v0.1", 8000, 4096)],
)
def test_the_runtime_allocates_what_is_planned(
    model: str, context: int, kept: int | None
) -> None:
    """The cache that an engine of this package makes for these lengths, counted: of a window, itself and 64 slots."""
    pytest.importorskip("torch")
    from magicdec.measure.configuration import BenchmarkRequest, session_bytes

    request = BenchmarkRequest(
        model=model, batch_size=8, context_len=context, gen_len=64
    )
    spec = load_model_spec(model)
    slots = (
        request.max_len + MAX_GAMMA if kept is None else kept + MAX_GAMMA + 32
    )  # runtime/engine.py
    assert session_bytes(request)[1] == slots * spec.kv_elements_per_token() * 4
    planned = memory_need(
        Setup(model=spec, hardware=A100, engine=ENGINE, precision=Precision(weight_dtype="fp32", kv_dtype="fp32")),
        batch=8, max_len=context + 64, budget=None, gamma=0, tp_size=1,
    )  # fmt: skip
    fixed, per_sequence = session_bytes(request)
    assert float(planned.total_bytes - planned.workspace_bytes) == pytest.approx(
        fixed + 8 * per_sequence
    )


@pytest.mark.parametrize(("engine", "beside"), [("vllm", 0), ("sglang", 1)])
def test_a_recurrence_keeps_a_state_for_each_verified_token(
    engine: str, beside: int
) -> None:
    """One of 32 × 128 × 128 fp32 numbers and a window of 4 × 8192 in 16 bits in each of 30 of Qwen3.5-35B's 40 layers;
    while speculating gamma + 1 of them, in SGLang beside the running one."""
    model = load_model_spec("qwen3.5-35b-a3b")

    def kept(draft: str, gamma: int) -> float:
        spec = SpeculationSpec(
            draft="self" if draft == "ngram" else "none", draft_method=draft
        )  # type: ignore[arg-type]
        setup = Setup(
            model=model,
            hardware=load_hardware("h200"),
            engine=load_engine(engine),
            speculation=spec,
        )
        need = memory_need(
            setup, batch=8, max_len=4096, budget=None, gamma=gamma, tp_size=1
        )
        slots = 4096 + gamma + 1
        return float(
            need.kv_bytes - 8 * kv_bytes(model, setup.engine, setup.precision, slots, 1)
        )

    state = 8 * 30 * (32 * 128 * 128 * 4 + 4 * 8192 * 2)
    assert kept("none", 0) == pytest.approx(state)
    assert kept("ngram", 3) == pytest.approx((4 + beside) * state)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_a_convolutions_state_is_in_16_bits_whatever_the_cache_is_in(
    kv_dtype: str,
) -> None:
    """In memory, in the bytes of a pass and in its time: 30 layers of 32 × 128 × 128 in fp32 and 4 × 8192 in 16 bits,
    read once and written once."""
    model, hw = load_model_spec("qwen3.5-35b-a3b"), load_hardware("h200")
    state = 30 * (32 * 128 * 128 * 4 + 4 * 8192 * 2)
    assert float(state_bytes(model, ENGINE, Precision(kv_dtype=kv_dtype), 1)) == state
    time = {
        dtype: next(
            op
            for op in forward_pass(
                model,
                hw,
                load_engine("vllm"),
                batch=8,
                query_len=1,
                kv_len=100,
                kv_dtype=dtype,
            ).ops
            if op.name == "linear attention"
        )
        for dtype in ("bf16", kv_dtype)
    }
    assert float(time[kv_dtype].cost.kv_bytes) == 8 * 2 * state
    assert time[kv_dtype].time_s == time["bf16"].time_s


def sglang_s_share(usable_mib: float, tp: int) -> float:
    """SGLang's own rule for devices of 60 GiB and more, restated from sglang/srt/arg_groups/memory_hook.py of 0.5.23
    for a model without latent attention."""
    chunk, captured = (8192, 256) if usable_mib < 160 * 1024 else (16384, 512)
    sizes = len([*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64),
                 *range(1280, 4097, 256), *range(4608, chunk + 1, 512)])  # fmt: skip
    reserved = 512 + 1.5 * chunk + 2 * captured + 8 * sizes + tp / 8 * 1024
    return round((usable_mib - max(reserved, 10 * 1024)) / usable_mib, 3)


@pytest.mark.parametrize(
    ("engine", "hardware", "tp", "share"),
    [
        ("vllm", "h100-sxm-80gb", 1, 0.92),
        ("vllm@0.20.0", "h100-sxm-80gb", 8, 0.92),
        ("vllm@0.19.0", "h100-sxm-80gb", 1, 0.9),
        ("sglang", "h100-sxm-80gb", 1, sglang_s_share(79.11 * 1024, 1)),
        ("sglang", "mi355x-288gb", 2, sglang_s_share(287.98 * 1024, 2)),
        ("sglang", "h20-sxm-96gb", 8, sglang_s_share(97871 * 0.9875, 8)),
        ("sglang@0.5.2", "h100-sxm-80gb", 4, round(1 - (9.5 + 4 / 2) / 79.11, 3)),
        ("../unfitted/llama.cpp.toml", "rtx-4090-24gb", 1, 1.0),
    ],
)
def test_the_share_of_memory_is_the_engine_s_own(engine, hardware, tp, share) -> None:
    if engine.endswith(".toml"):
        engine = str(ENGINES_DIRECTORY / engine)
    device = load_hardware(hardware)
    taken = float(capacity_bytes(device, load_engine(engine), tp))
    assert taken / device.usable_memory.num_bytes == pytest.approx(share, abs=1e-3)


def test_exchanges_take_the_buffers_that_deepep_allocates() -> None:
    """Its LowLatencyLayout (csrc/config.hpp), for DeepSeek-V3 with 128 sequences on each of 8 ranks: twice a buffer to
    send, of 16-bit rows for every expert, and one to receive, of rows with a header of 16 bytes."""
    alone = Setup.of(load_model_spec("deepseek-v3"), "h200", "vllm")
    spread = replace(alone, spread=Parallelism(dp=8, whole_experts=True))
    rows, experts, width = 128, 256, 7168
    sent = experts * rows * width * 2
    received = experts * rows * (width * 2 + 16)

    def workspace(setup: Setup, batch: int) -> float:
        need = memory_need(
            setup, batch=batch, max_len=64, budget=64, gamma=0, tp_size=1
        )
        return float(need.workspace_bytes)

    exchanged = workspace(spread, 8 * rows) - workspace(alone, rows)
    assert exchanged == pytest.approx(2 * (sent + received), rel=2e-3)
