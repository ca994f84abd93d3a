"""FLOPs and bytes of a pass against a counted real module, and the limits that any pass must respect."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from magicdec.perfmodel import forward
from magicdec.perfmodel.drafting import draft_tp
from magicdec.perfmodel.forward import Pass
from magicdec.perfmodel.kernels.experts import RankExperts, experts, experts_touched
from magicdec.perfmodel.kernels.gemm import ElementwiseCurve
from magicdec.perfmodel.kernels.op import Where
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.setup import Setup
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import EngineProfile, load_engine
from magicdec.specs.mixers import Attention
from magicdec.specs.parallel import Parallelism
from magicdec.specs.precision import BF16
from magicdec.specs.speculation import SpeculationSpec
from tests.perfmodel.passes import forward_pass, prefill

A100 = load_hardware("a100-sxm-80gb")
ENGINE = load_engine("magicdec-2024")
LLAMA = load_model_spec("llama-3.1-8b")


def test_kv_bytes_are_the_cache_read_once() -> None:
    cost = forward_pass(LLAMA, A100, ENGINE, batch=5, query_len=1, kv_len=1000).cost
    assert float(cost.kv_bytes) == 5 * 1000 * LLAMA.kv_elements_per_token() * 2


def test_a_kernel_that_reads_per_query_reads_the_cache_for_each_query_token() -> None:
    again = ENGINE.with_constants({"kernels.kv_reads": "per_query"})
    once, each = (
        forward_pass(LLAMA, A100, e, batch=4, query_len=5, kv_len=4096)
        for e in (ENGINE, again)
    )
    assert float(each.cost.kv_bytes) == 5 * float(once.cost.kv_bytes)
    assert float(each.total_s) > float(once.total_s)


def test_ranks_together_do_the_same_work_and_replicate_kv_beyond_the_kv_heads() -> None:
    one, eight, sixteen = (
        forward_pass(
            LLAMA, A100, ENGINE, batch=4, query_len=1, kv_len=4096, tp_size=tp
        ).cost
        for tp in (1, 8, 16)
    )
    assert float(eight.flops) * 8 == pytest.approx(float(one.flops))
    assert float(eight.kv_bytes) * 8 == pytest.approx(float(one.kv_bytes))
    assert float(sixteen.kv_bytes) == pytest.approx(float(eight.kv_bytes))


def test_a_shared_expert_that_is_one_of_the_routed_costs_its_bytes() -> None:
    """DeepSeek-V3's of one of eight ranks in SGLang: 58 layers, gate and up of 7168 x 256 in 8 bits."""
    hw = load_hardware("h200")
    one = {"batch": 1, "query_len": 1, "kv_len": 1000, "tp_size": 8}
    ops = forward_pass(
        load_model_spec("deepseek-v3"),
        hw,
        load_engine("sglang"),
        weight_dtype="fp8_block",
        **one,
    ).ops
    (shared,) = (op for op in ops if op.name == "shared_gate_up")
    read_s = 58 * 2 * 7168 * 256 / hw.memory_bytes_per_s
    assert 1.0 <= float(shared.time_s) / read_s < 1.3


def test_experts_touched_equals_monte_carlo() -> None:
    """4000 draws of 20 tokens: standard error of the mean under 0.03 of 16 experts; tolerance 0.15 (5 sigma)."""
    rng = np.random.default_rng(0)
    drawn = [
        len(np.unique(np.argsort(rng.random((20, 16)), axis=1)[:, :2]))
        for _ in range(4000)
    ]  # each token takes 2 of 16
    assert float(experts_touched(16, 2, 20)) == pytest.approx(np.mean(drawn), abs=0.15)
    assert float(experts_touched(16, 2, 1)) == pytest.approx(2.0)


def test_a_mixture_reads_no_more_than_all_of_its_weights() -> None:
    mixtral = load_model_spec("mixtral-8x7b")
    few, many = (
        forward_pass(mixtral, A100, ENGINE, batch=b, query_len=1, kv_len=512).cost
        for b in (1, 4096)
    )
    tables = mixtral.vocab_size * mixtral.hidden_size
    assert (
        float(few.weight_bytes)
        < float(many.weight_bytes)
        <= 2.0 * (mixtral.num_parameters - tables)
    )


def test_no_work_costs_only_overheads() -> None:
    bare = EngineProfile(name="bare").with_constants(
        {"kernels.elementwise_kernels_per_layer": 0}
    )
    time = forward_pass(LLAMA, A100, bare, batch=0, query_len=1, kv_len=0)
    assert float(time.cost.flops) == 0.0
    assert float(time.cost.kv_bytes) == 0.0
    assert 0.0 < float(time.total_s) < 0.1


@pytest.mark.parametrize(
    ("dtype", "ratio"), [("fp8", 0.5), ("int8", 0.5), ("int4", 4.15625 / 16)]
)
def test_quantised_weights_shrink_the_bytes_and_the_time(
    dtype: str, ratio: float
) -> None:
    wide, narrow = (
        forward_pass(
            LLAMA, A100, ENGINE, batch=1, query_len=1, kv_len=128, weight_dtype=d
        )
        for d in ("bf16", dtype)
    )
    head = 2.0 * LLAMA.vocab_size * LLAMA.hidden_size  # stays in 16 bits
    assert float(narrow.cost.weight_bytes) - head == ratio * (
        float(wide.cost.weight_bytes) - head
    )
    assert float(narrow.total_s) < float(wide.total_s)


def test_prefill_counts_causal_attention_and_one_row_of_logits() -> None:
    prompt = 2000
    ours = prefill(LLAMA, A100, ENGINE, batch=1, prompt_len=prompt).cost.flops
    parts = (*LLAMA.mixers, *LLAMA.feed_forwards)
    matrices = sum(
        count * part.num_parameters(LLAMA.hidden_size) for part, count in parts
    )
    pairs = prompt * (prompt + 1) / 2
    attention = (
        4
        * pairs
        * LLAMA.attention.num_heads
        * LLAMA.attention.head_dim
        * LLAMA.num_hidden_layers
    )
    assert float(ours) == pytest.approx(
        2 * prompt * matrices + attention + 2 * LLAMA.vocab_size * LLAMA.hidden_size
    )


def test_prefill_of_a_sliding_window_counts_each_pair_once() -> None:
    mistral = load_model_spec("mistral-7b-v0.1")
    prompt, window = 10_000, 4096
    pairs = sum(min(i, window) for i in range(1, prompt + 1))
    time = prefill(mistral, A100, ENGINE, batch=1, prompt_len=prompt)
    attention = next(op for op in time.ops if op.name == "attention")
    per_pair = (
        4
        * mistral.attention.num_heads
        * mistral.attention.head_dim
        * mistral.num_hidden_layers
    )
    assert float(attention.cost.flops) == pytest.approx(pairs * per_pair, rel=1e-6)


@pytest.mark.parametrize(("engine", "states"), [("vllm", 1 + 4), ("sglang", 1 + 4 + 2)])
def test_verification_writes_a_recurrence_after_every_token(
    engine: str, states: int
) -> None:
    """Four tokens: read once, written four times, and in SGLang the accepted state copied. At a batch whose states take
    milliseconds the time is in that proportion to decoding's two, within what is fixed."""
    model, hw = load_model_spec("qwen3.5-35b-a3b"), load_hardware("h200")
    passes = (
        forward_pass(
            model, hw, load_engine(engine), batch=512, query_len=q, kv_len=1000
        )
        for q in (1, 4)
    )
    decode, verify = (
        next(op for op in each.ops if op.name == "linear attention") for each in passes
    )
    assert float(verify.cost.kv_bytes / decode.cost.kv_bytes) == pytest.approx(
        states / 2
    )
    assert float(verify.time_s / decode.time_s) == pytest.approx(states / 2, rel=0.05)


def test_chunks_are_seen_up_to_the_mean_place_of_a_batchs_contexts() -> None:
    """A chunk of 9, and contexts alike from 4 below to 4 above, or from 1: of each the place in its chunk is seen."""

    def attended(span: int | None, kv_len: int) -> float:
        mixer = Attention(
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            mask="chunk" if span else "full",
            span=span,
        )
        model = msgspec.structs.replace(
            LLAMA, layers=(msgspec.structs.replace(LLAMA.layers[0], mixer=mixer),)
        )
        time = forward_pass(model, A100, ENGINE, batch=1, query_len=1, kv_len=kv_len)
        return float(next(op.cost.flops for op in time.ops if op.name == "attention"))

    for context in range(1, 40):
        around = min(context - 1, 4)
        places = [
            (each - 1) % 9 + 1 for each in range(context - around, context + around + 1)
        ]
        assert attended(9, context) == pytest.approx(
            np.mean([attended(None, each) for each in places])
        )


SMOOTH = EngineProfile(name="smooth")
WAVES = SMOOTH.with_constants(
    {
        "kernels.attention_blocks_per_multiprocessor": 2.0,
        "kernels.attention_wave_weight": 1.0,
    }
)


def attention_s(engine: EngineProfile, batch: list[int]) -> np.ndarray:
    """Llama-2-7B at tp 8: 4 KV heads per rank, so 4 blocks per sequence; the A100 runs 216 at a time."""
    time = forward_pass(
        load_model_spec("llama-2-7b-32k"), load_hardware("a100-sxm-80gb"), engine, batch=batch, query_len=1,
        kv_len=8000, tp_size=8,
    )  # fmt: skip
    return next(op.time_s for op in time.ops if op.name == "attention")


def test_a_last_wave_that_is_not_full_costs_a_whole_one() -> None:
    batch = [32, 48, 64, 108, 128]
    longer = attention_s(WAVES, batch) / attention_s(SMOOTH, batch)
    blocks = 4 * np.array(batch)
    expected = np.where(blocks <= 216, 1.0, np.ceil(blocks / 216) * 216 / blocks)
    np.testing.assert_allclose(longer, expected)


@pytest.mark.parametrize(
    ("said", "runtime", "ranks"), [(None, None, 4), (None, 1, 1), (2, 1, 2)]
)
def test_a_standalone_draft_runs_where_it_is_said_or_where_the_runtime_puts_it(
    said: int | None, runtime: int | None, ranks: int
) -> None:
    engine = SMOOTH.with_constants({"paths.standalone_draft_tp_size": runtime})
    spec = SpeculationSpec(
        draft="tinyllama-1.1b", draft_method="full", gamma=2, draft_tp_size=said
    )
    assert float(draft_tp(Setup.of("llama-2-7b-32k", A100, engine, spec), 4)) == ranks


def test_a_pass_that_is_kept_is_the_one_that_was_asked_for() -> None:
    """Passes that differ in one thing alone, each against itself timed anew."""
    h100 = load_hardware("h100-sxm-80gb")
    fp8 = msgspec.structs.replace(BF16, weight_dtype="fp8")
    engines = (ENGINE, ENGINE.with_constants({"overheads.layer_overhead_s": 1e-4}))
    wide = Parallelism(pp=2)
    usual = Pass(at=Where(A100, ENGINE, BF16), batch=4.0, query_len=1.0, kv_len=1000.0)
    passes = [
        (LLAMA, usual),
        (load_model_spec("llama-3.2-1b"), usual),
        (LLAMA, replace(usual, at=Where(h100, ENGINE, BF16))),
        (LLAMA, replace(usual, at=Where(A100, engines[1], BF16))),
        (LLAMA, replace(usual, at=Where(A100, ENGINE, fp8))),
        (LLAMA, replace(usual, batch=8.0)),
        (LLAMA, replace(usual, query_len=5.0)),
        (LLAMA, replace(usual, kv_len=np.array([1000.0, 2000.0]))),
        (LLAMA, replace(usual, kv_len=np.array([[1000.0], [2000.0]]))),
        (LLAMA, replace(usual, tp=2)),
        (LLAMA, replace(usual, num_passes=2.0)),
        (LLAMA, replace(usual, logit_rows=1.0)),
        (LLAMA, replace(usual, is_prefill=True)),
        (LLAMA, replace(usual, attention_factor=2.0)),
        (LLAMA, replace(usual, spread=wide)),
    ]
    kept = [forward.forward_pass(model, p).total_s for model, p in [*passes, *passes]]
    assert forward._kept.cache_info().hits >= len(passes)
    anew = []
    for model, p in passes:
        forward._kept.cache_clear()
        anew.append(forward.forward_pass(model, p).total_s)
    for one, other in zip(kept, [*anew, *anew], strict=True):
        np.testing.assert_array_equal(one, other)
    assert len({time.tobytes() for time in anew}) >= len(passes) - 2


def test_our_runtime_launches_small_kernels_around_its_experts():
    """Each with the device's own fixed time, in each of 48 layers; dense models and engines whose fused kernels hold
    them have none. Nothing waits for the host."""
    fixed_s = ElementwiseCurve.of(A100).overhead_s
    engine = load_engine("ours")
    routing = {}
    for model, name in (
        ("qwen3-30b-a3b", "ours"),
        ("qwen3-8b", "ours"),
        ("qwen3-30b-a3b", "vllm"),
    ):
        spec = load_model_spec(model)
        run = forward_pass(
            spec, A100, load_engine(name), batch=1, query_len=1, kv_len=100
        )
        own = [op.overhead_s for op in run.ops if op.name == "routing"]
        routing[model, name] = float(sum(own))
        if name == "ours":
            host_s = sum(op.time_s for op in run.ops if op.group == "overhead")
            layers_s = spec.num_hidden_layers * engine.overheads.layer_overhead_s
            passes_s = engine.overheads.forward_overhead_s
            assert float(host_s) == pytest.approx(layers_s + passes_s)
    launches = engine.kernels.routing_kernels
    assert routing.pop(("qwen3-30b-a3b", "ours")) == pytest.approx(
        48 * launches * fixed_s
    )
    assert set(routing.values()) == {0.0}


def test_a_cpu_computes_one_expert_after_the_other():
    """A token's eight of 128 take as long as eight times the only one."""
    cpu = msgspec.structs.replace(A100, kind="cpu")
    at = Where(cpu, load_engine("ours"), BF16)
    eight = RankExperts(1.0, 2048, 768, 128, 8)
    only = RankExperts(1.0, 2048, 768, 1, 1)
    seconds = []
    for work in (eight, only):
        products = [op for op in experts(at, work) if op.group == "gemm"]
        seconds.append(float(sum(op.time_s for op in products)))
    assert seconds[0] == pytest.approx(8 * seconds[1])
