"""Scans over many thousands of points: no time below what bytes and FLOPs take, no NaN, no undue fall."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from magicdec.perfmodel.kernels.profile import (
    HardwareProfile,
    hardware_names,
    load_hardware,
)
from magicdec.perfmodel.serving import prefill_seconds, prompt_time, serving_time
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.step import step_terms
from magicdec.specs.attention_kernels import tables
from magicdec.specs.catalog import load_model_spec, model_names
from magicdec.specs.device import bytes_per_element
from magicdec.specs.engine import engine_names, load_engine
from magicdec.specs.parallel import Parallelism, largest_tp_at_most
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec
from tests.kernels import (
    attention_time,
    gemm_time,
    indexer_time,
    latent_attention_time,
    linear_prefill_time,
    linear_time,
    moe_time,
    prefill_attention_time,
    sparse_time,
    top_k_time,
)
from tests.perfmodel.passes import forward_pass

GPUS = [name for name in hardware_names() if load_hardware(name).kind == "gpu"]
LONGER = np.unique(
    np.concatenate(
        [
            2.0 ** np.linspace(6, 17, 45).round(2),
            *([n, n + 1.0] for n in (128, 4096, 8192)),
        ]
    )
)
LARGER = np.concatenate(
    [np.arange(1.0, 40.0), np.unique(np.round(2.0 ** np.linspace(5.4, 10, 30)))]
)
SERVERS = ("vllm", "sglang", "trtllm")
MODELS = (
    "llama-3.1-8b", "gemma-3-27b", "gpt-oss-120b", "deepseek-v3", "deepseek-v3.2", "qwen3.5-35b-a3b",
    "nemotron-3-nano-30b-a3b",
)  # fmt: skip
"""Every kind of operation among them: windows, experts, shared ones, latents, an indexer, a recurrence."""
BATCH = np.unique(np.round(2.0 ** np.linspace(0, 9, 24)))
CONTEXT = np.unique(np.round(2.0 ** np.linspace(7, 17, 21)))
DIP = 0.03
"""A kernel with another tile, or one more split, may be this much quicker with a little more to do."""
ABOVE_DATASHEET = 1.06
"""Measured bandwidths of some tables exceed the datasheet's by rounding of clocks and by what the L2 held."""


def grid(*axes: np.ndarray) -> list[np.ndarray]:
    return list(np.meshgrid(*axes, indexing="ij"))


def formats(hw: HardwareProfile) -> list[str]:
    return ["bf16", *hw.gemm_formats]


@pytest.mark.parametrize("device", GPUS)
def test_products_take_at_least_their_bytes_and_flops(device):
    """12 × 24 × 24 sizes in each format: 7,000 to 28,000 points a device."""
    hw = load_hardware(device)
    m, n, k = grid(
        2.0 ** np.arange(12),
        2.0 ** np.linspace(7, 16, 24),
        2.0 ** np.linspace(7, 16, 24),
    )
    for dtype in formats(hw):
        time = gemm_time(
            hw, m=m, n=n, k=k, weight_dtype=dtype, compute_dtype=dtype
        ).time_s
        assert np.all(np.isfinite(time))
        assert np.all(
            time * hw.memory_bytes_per_s * ABOVE_DATASHEET
            >= n * k * bytes_per_element(dtype)
        )
        assert np.all(
            time * hw.compute_rate(dtype) * ABOVE_DATASHEET >= 2.0 * m * n * k
        )


@pytest.mark.parametrize("device", GPUS)
def test_attention_takes_at_least_its_bytes_and_flops(device):
    hw = load_hardware(device)
    batch, length, heads = grid(BATCH, CONTEXT, np.array([1.0, 2.0, 4.0, 8.0]))
    for dtype in ("bf16", *hw.attention_formats):
        time = attention_time(
            hw, batch=batch, query_len=1, kv_len=length, num_heads=8 * heads, num_kv_heads=heads, head_dim=128,
            kv_dtype=dtype, law=tables().kernels["packed"],
        ).time_s  # fmt: skip
        assert np.all(np.isfinite(time))
        num_bytes = 2.0 * batch * length * heads * 128 * bytes_per_element(dtype)
        assert np.all(time * hw.memory_bytes_per_s * ABOVE_DATASHEET >= num_bytes)
    prompt = prefill_attention_time(
        hw,
        batch=batch,
        query_len=length,
        kv_len=length,
        num_heads=8 * heads,
        num_kv_heads=heads,
        head_dim=128,
    ).time_s
    flops = 4.0 * batch * length * (length + 1) / 2 * 8 * heads * 128
    assert np.all(prompt * hw.compute_rate("bf16") * ABOVE_DATASHEET >= flops)
    assert np.all(np.diff(prompt, axis=1) > 0)


@pytest.mark.parametrize(
    "device", [name for name in GPUS if load_hardware(name).latent]
)
def test_latent_attention_takes_at_least_its_bytes_and_no_less_with_more_query_tokens(
    device,
):
    """22 batches × 21 contexts × 4 numbers of heads × 6 of query tokens: 11,000 points a format and device."""
    hw = load_hardware(device)
    batch, length, heads, queries = grid(
        BATCH, CONTEXT, np.array([8.0, 16.0, 64.0, 128.0]), 2.0 ** np.arange(6)
    )
    for dtype, curve in hw.latent.items():
        time = latent_attention_time(
            hw, batch=batch, query_len=queries, kv_len=length, num_heads=heads, row=576, flops_per_pair=2176.0,
            kv_dtype=dtype, curve=curve,
        ).time_s  # fmt: skip
        assert np.all(np.isfinite(time))
        num_bytes = batch * length * 576 * bytes_per_element(dtype)
        assert np.all(time * hw.memory_bytes_per_s * ABOVE_DATASHEET >= num_bytes)
        assert np.all(np.diff(time, axis=3) >= -DIP * time[..., :-1])
        flops = batch * length * heads * queries * 2176.0
        assert np.all(
            time
            * hw.compute_rate(
                "fp8" if dtype == "fp8" and "fp8" in hw.flops_per_s else "bf16"
            )
            * 1.2
            >= flops
        )


@pytest.mark.parametrize(
    "device", [name for name in GPUS if load_hardware(name).linear]
)
def test_a_recurrence_takes_at_least_its_states_and_more_with_every_token(device):
    """States read once and written after every token; prompts no less than one chunk after the other."""
    hw = load_hardware(device)
    batch, heads, queries = grid(BATCH, 2.0 ** np.arange(1, 8), np.arange(1.0, 17.0))
    state, conv = heads * 128**2, heads * 128 * 6
    time = linear_time(
        hw,
        hw.linear,
        batch=batch,
        query_len=queries,
        state_elements=state,
        conv_elements=conv,
        states_written=queries,
    ).time_s
    num_bytes = batch * state * 4.0 * (1.0 + queries)
    assert np.all(time * hw.memory_bytes_per_s * ABOVE_DATASHEET >= num_bytes)
    assert np.all(np.diff(time, axis=0) >= 0)
    assert np.all(np.diff(time, axis=2) > 0)
    prompt = 64.0 * 2.0 ** np.arange(10)
    batch, heads, length = grid(BATCH, 2.0 ** np.arange(1, 8), prompt)
    time = linear_prefill_time(
        hw,
        hw.linear_prefill,
        batch=batch,
        query_len=length,
        state_elements=heads * 128**2,
        channels=heads * 256,
    ).time_s
    assert np.all(np.diff(time, axis=0) >= 0)
    assert np.all(np.diff(time, axis=2) > 0)
    assert np.all(
        time * hw.compute_rate("bf16") >= 6.0 * batch * length * heads * 128**2
    )


@pytest.mark.parametrize(
    "device", [name for name in GPUS if load_hardware(name).indexer]
)
def test_an_indexer_and_what_it_chooses_take_at_least_their_work(device):
    hw = load_hardware(device)
    batch, length, queries = grid(BATCH, CONTEXT, np.array([1.0, 2.0, 4.0, 8.0]))
    time = indexer_time(
        hw,
        hw.indexer,
        batch=batch,
        query_len=queries,
        kv_len=length,
        num_heads=64,
        head_dim=128,
    ).time_s
    assert np.all(
        time * hw.memory_bytes_per_s * ABOVE_DATASHEET >= batch * length * 128
    )
    assert np.all(
        time * hw.compute_rate("fp8") >= 2.0 * batch * queries * length * 64 * 128
    )
    assert np.all(np.diff(time, axis=2) > 0)
    for curve in hw.top_k.values():
        chosen = top_k_time(hw, curve, rows=batch * queries, kv_len=length).time_s
        assert np.all(
            chosen * hw.memory_bytes_per_s * ABOVE_DATASHEET
            >= 4.0 * batch * queries * length
        )
        assert np.all(np.diff(chosen, axis=1) > 0)
    for curve in hw.sparse.values():
        time = sparse_time(
            hw, curve, tokens=batch * queries, num_chosen=np.minimum(length, 2048.0), num_heads=64,
            flops_per_pair=2176.0, row_bytes=1152.0,
        ).time_s  # fmt: skip
        assert np.all(
            time * hw.compute_rate("bf16")
            >= batch * queries * np.minimum(length, 2048.0) * 64 * 2176.0
        )


@pytest.mark.parametrize("device", [name for name in GPUS if load_hardware(name).moe])
def test_experts_take_at_least_the_bytes_of_those_touched_and_no_less_with_more_tokens(
    device,
):
    hw = load_hardware(device)
    tokens, width, experts, chosen = grid(
        2.0 ** np.arange(13),
        2.0 ** np.arange(6, 14),
        np.array([8.0, 64.0, 128.0, 256.0]),
        np.array([1.0, 4.0, 8.0]),
    )
    for dtype, curve in hw.moe.items():
        arguments = {
            "tokens": tokens, "hidden_size": 4096, "width": width, "num_experts": experts,
            "num_experts_per_tok": chosen, "weight_dtype": dtype, "compute_dtype": "bf16",
        }  # fmt: skip
        time = moe_time(hw, curve, **arguments).time_s
        assert np.all(np.isfinite(time))
        assert np.all(np.diff(time, axis=0) > 0)
        least = (
            chosen * 3 * 4096 * width * bytes_per_element(dtype)
        )  # one token's experts
        assert np.all(time * hw.memory_bytes_per_s * ABOVE_DATASHEET >= least)


@pytest.mark.parametrize("engine", SERVERS)
def test_steps_grow_with_batch_and_context_and_take_at_least_their_bytes(engine):
    """4 devices × 3 models × 2 formats × 4 tp × 22 batches × 21 contexts: 44,000 points an engine."""
    profile, tp = load_engine(engine), np.array([1.0, 2.0, 4.0, 8.0])
    batch, context, ranks = grid(BATCH, CONTEXT, tp)
    devices = ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-192gb")
    for device, model, dtype in itertools.product(
        devices, ("llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b"), ("bf16", "fp8")
    ):
        hw = load_hardware(device)
        time = forward_pass(
            load_model_spec(model), hw, profile, batch=batch, query_len=1, kv_len=context, tp_size=ranks,
            weight_dtype=dtype, kv_dtype=dtype,
        )  # fmt: skip
        total = time.total_s
        assert np.all(np.isfinite(total))
        assert np.all(np.diff(total, axis=0) >= -DIP * total[:-1])
        assert np.all(np.diff(total, axis=1) >= -DIP * total[:, :-1])
        floor = (time.cost.weight_bytes + time.cost.kv_bytes) / hw.memory_bytes_per_s
        assert np.all(total >= floor), (
            device,
            model,
            dtype,
            float(np.min(total / floor)),
        )


ON_DEVICES = list(
    itertools.product(GPUS, (("bf16", "bf16"), ("fp8", "bf16"), ("fp8", "fp8")))
)
PAIRS = list(itertools.product(engine_names(), MODELS))
EVERY = 17
"""Of 35 pairs of engine and model each takes one device and format of so many by default: each is tried with two
engines and models or more."""


@pytest.mark.parametrize(
    "every", [EVERY, pytest.param(1, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(("engine", "model"), PAIRS)
def test_no_factor_of_an_engine_makes_any_operation_faster_than_the_device(
    engine, model, every
):
    """Each operation takes 1 / 0.95 of its bytes at the memory's bandwidth and its FLOPs at the peak, a collective what
    a link needs, or what its kernel's curve alone says; every device, 3 formats, and factors of 0.3 too."""
    spec, profile = load_model_spec(model), load_engine(engine)
    factors = [
        f"kernels.{name}"
        for name in profile.kernels.__struct_fields__
        if name.endswith("_factor")
    ]
    assert factors
    alone, hasty = (
        profile.with_constants(dict.fromkeys(factors, each)) for each in (1.0, 0.3)
    )
    batch, context, queries = grid(
        np.array([1.0, 32.0, 512.0]),
        np.array([512.0, 8192.0, 131072.0]),
        np.array([1, 4]),
    )
    first = PAIRS.index((engine, model)) % every
    for device, dtypes in ON_DEVICES[first::every]:
        hw = load_hardware(device)
        shape = {
            "batch": batch,
            "query_len": queries,
            "kv_len": context,
            "tp_size": 4,
            "attention_factor": 1.0,
        }
        shape |= {"weight_dtype": dtypes[0], "kv_dtype": dtypes[1]}
        curve = {
            op.name: op.time_s for op in forward_pass(spec, hw, alone, **shape).ops
        }
        for each in (profile, hasty):
            for op in forward_pass(spec, hw, each, **shape).ops:
                if op.group == "overhead":
                    continue
                moved = op.cost.weight_bytes + op.cost.kv_bytes
                moved = moved + (
                    op.cost.activation_bytes if op.group == "elementwise" else 0.0
                )
                least = np.maximum(
                    moved / (0.95 * hw.memory_bytes_per_s),
                    op.cost.flops / hw.compute_rate(dtypes[0]),
                )
                least = np.maximum(
                    least, 0.75 * op.cost.collective_bytes / hw.link.bytes_per_s
                )
                least = np.minimum(least, curve[op.name])
                assert np.all(op.time_s >= least * (1 - 1e-9)), (
                    device,
                    dtypes,
                    op.name,
                    np.min(op.time_s / least),
                )


def test_no_factor_makes_prompts_faster_than_the_processor():
    model, engine = (
        load_model_spec("llama-3.1-70b"),
        load_engine("sglang").with_constants({"scheduler.prefill_factor": 0.1}),
    )
    prompt, tp_size = 2.0 ** np.arange(5, 18), 4
    for device in GPUS:
        hw = load_hardware(device)
        setup = Setup(model=model, hardware=hw, engine=engine)
        seconds = prefill_seconds(setup, active=1.0, prompt_len=prompt, tp_size=tp_size)
        flops = (
            2.0
            * (model.num_parameters - 2 * model.vocab_size * model.hidden_size)
            * prompt
            / tp_size
        )
        assert np.all(seconds > flops / hw.compute_rate("bf16")), device


def test_an_engine_may_beat_the_rate_that_one_library_reached_on_a_cpu():
    """Its products use vectors half as wide as the engine's may be."""
    model, slow = load_model_spec("llama-68m"), load_engine("ours")
    fast = slow.with_constants({"scheduler.prefill_factor": 0.5})
    hw = HardwareProfile(
        name="x",
        kind="cpu",
        memory_bytes=1e10,
        memory_bytes_per_s=4e10,
        flops_per_s={"fp32": 1e11},
    )
    times = [
        prompt_time(
            Setup(model=model, hardware=hw, engine=each), prompt_len=1024.0, tp_size=1
        ).group_seconds()["gemm"]
        for each in (slow, fast)
    ]
    assert times[1] == pytest.approx(0.5 * times[0])


@pytest.mark.parametrize("engine", SERVERS)
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "ngram"])
def test_speculative_steps_are_finite_and_grow_with_what_is_drafted(engine, method):
    spec = SpeculationSpec(draft=method, draft_method=method)
    setup = Setup.of("llama-3.1-70b", "h100", engine, spec, sampling=SamplingSpec())
    batch, context, gamma = grid(BATCH, CONTEXT, np.arange(1.0, 9.0))
    terms = step_terms(
        setup,
        batch=batch,
        kv_len=context,
        draft_kv_len=context,
        gamma=gamma,
        tp_size=4,
        full_acceptance=0.2,
    )
    assert np.all(np.isfinite(terms.step_s))
    assert np.all(np.diff(terms.step_s, axis=2) > -DIP * terms.step_s[..., :-1])
    assert np.all(terms.step_s > terms.autoregressive.total_s * (1 - DIP))


@pytest.mark.parametrize("engine", SERVERS)
def test_served_times_are_finite_and_no_work_is_lost(engine):
    """22 loads × 20 prompts × 20 outputs: 8,800 points; throughput is never above that of prefill or of decoding."""
    setup = Setup.of(
        "llama-3.1-70b",
        "h200",
        engine,
        weight_dtype="fp8",
        kv_dtype="fp8",
        sampling=SamplingSpec(),
    )
    load, prompt, output = grid(
        BATCH, 2.0 ** np.linspace(5, 15, 20), 2.0 ** np.linspace(2, 13, 20)
    )
    time = serving_time(
        setup, concurrency=load, prompt_len=prompt, output_len=output, tp_size=4
    )
    for values in (time.tpot_s, time.ttft_s, time.request_s, time.requests_per_s):
        assert np.all(np.isfinite(values))
        assert np.all(values > 0)
    assert np.all(time.requests_per_s * time.prompt_s <= 1.0 + 1e-6)
    assert np.all(
        time.requests_per_s * (output - 1) * time.token_s <= time.active * (1.0 + 1e-6)
    )
    assert np.all(time.prefill_share >= 0)
    assert np.all(time.prefill_share < 1)


@pytest.mark.parametrize("pp", [1, 4])
def test_time_never_falls_with_context_or_batch(pp):
    """For every second catalog model: across windows and chunks of attention, waves of blocks, and microbatches."""
    hw, engine = load_hardware("h100-sxm-80gb"), load_engine("vllm")
    for name in model_names()[::2]:
        model = load_model_spec(name)
        setup = Setup(
            model=model,
            hardware=hw,
            engine=engine,
            spread=Parallelism(pp=min(pp, model.num_hidden_layers)),
        )
        tp = float(largest_tp_at_most(model, 8))
        for batch, context in (
            (np.array([[1.0], [16.0]]), LONGER),
            (LARGER, np.array([[512.0], [16_384.0]])),
        ):
            terms = step_terms(
                setup,
                batch=batch,
                kv_len=context,
                draft_kv_len=context,
                gamma=0.0,
                tp_size=tp,
            )
            seconds = terms.autoregressive.total_s
            worst = np.min(
                seconds[:, 1:] / np.maximum.accumulate(seconds, axis=1)[:, :-1]
            )
            assert worst >= 1.0 - 1e-9, (name, worst)
