"""The terms of a step and their composition: limits, monotonicity, and acceptance against simulation."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance import constant_profile
from magicdec.perfmodel.acceptance.law import Law
from magicdec.perfmodel.drafting import draft_kv_tokens
from magicdec.perfmodel.forward import Pass, forward_pass
from magicdec.perfmodel.intervals import (
    interval,
    one_token_pass,
    relative_errors,
    untimed,
)
from magicdec.perfmodel.kernels.profile import HardwareProfile, load_hardware
from magicdec.perfmodel.memory import memory_need
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import Prediction, predict
from magicdec.perfmodel.step import prefill_terms
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import EngineProfile, load_engine
from magicdec.specs.model import ModelSpec
from magicdec.specs.precision import Precision
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec

A100 = load_hardware("a100-sxm-80gb")
ENGINE = load_engine("magicdec-2024")
LLAMA = load_model_spec("llama-3.1-8b")
LLAMA2, TINYLLAMA = load_model_spec("llama-2-7b-32k"), load_model_spec("tinyllama-1.1b")
STREAMING = SpeculationSpec(
    draft="self", draft_method="streamingllm", draft_budget=512, gamma=3
)
RATE = constant_profile(0.8)


def step(
    speculation: SpeculationSpec = STREAMING,
    engine: EngineProfile = ENGINE,
    **fields: Any,
) -> Prediction:
    """Llama-3.1-8B on 8 x A100, batch 64, context 32,000, a rate of 0.8; unless `fields` of setup or points differ."""
    acceptance = fields.pop("acceptance", RATE)
    options = {
        "model": LLAMA,
        "hardware": A100,
        "engine": engine,
        "speculation": speculation,
    }
    budget = speculation.draft_budget
    numbers: dict[str, Any] = {
        "batch": 64,
        "context": 32_000,
        "tp": 8,
        "budget": budget,
    }
    for name, value in fields.items():
        (numbers if name in Points.__dataclass_fields__ else options)[name] = value
    return predict(Setup(**options), acceptance, Points(**numbers))


def test_gamma_zero_is_autoregressive_decoding() -> None:
    prediction = step(gamma=np.array([0, 1]))
    assert float(prediction.step_s[0]) == float(prediction.autoregressive_step_s)
    assert float(prediction.speedup[0]) == 1.0
    alone = step(SpeculationSpec(), acceptance=None)
    assert float(alone.step_s) == float(alone.autoregressive_step_s)
    assert float(alone.speedup) == 1.0


def test_a_step_is_the_sum_of_its_terms() -> None:
    p = step(gamma=np.arange(1, 9))
    terms = (
        np.arange(1, 9) * p.draft_step_s
        + p.verify_step_s
        + p.accept_step_s
        + p.upkeep_step_s
    )
    np.testing.assert_allclose(p.step_s, terms)
    for by in ("group", "bound"):
        np.testing.assert_allclose(sum(p.terms.step_seconds(by).values()), p.step_s)


def test_expected_tokens_equal_simulation() -> None:
    """200,000 simulated steps of 5 drafts: standard error 0.004; tolerance 0.02 (5 sigma, false alarms < 1e-6)."""
    rates = np.array([0.9, 0.7, 0.8, 0.6, 0.5])
    rng = np.random.default_rng(1)
    accepted = np.cumprod(rng.random((200_000, 5)) < rates, axis=1)
    expected, everything = constant_profile(rates.tolist()).tokens_per_step(
        budget=None, context=100.0, gamma=5
    )
    assert float(expected) == pytest.approx(1.0 + accepted.sum(axis=1).mean(), abs=0.02)
    assert float(everything) == pytest.approx(accepted[:, -1].mean(), abs=0.005)


def test_sure_and_hopeless_drafts_are_the_limits() -> None:
    assert float(step(acceptance=constant_profile(1.0)).expected_tokens_per_step) == 4.0
    hopeless = step(acceptance=constant_profile(0.0))
    assert float(hopeless.expected_tokens_per_step) == 1.0
    assert float(hopeless.speedup) < 1.0


def test_short_contexts_make_speculation_lose() -> None:
    """With nothing in the cache a self-draft costs as much as the target, so no acceptance below 1 can pay."""
    speedups = step(
        context=1.0, acceptance=constant_profile(0.99), gamma=np.arange(1, 9)
    ).speedup
    assert np.all(speedups < 1.0)


def test_at_long_context_the_ratio_tends_to_tokens_per_step_over_verification() -> None:
    """As S grows drafts and overheads vanish beside the KV reads, which verification does once: speedup -> E."""
    p = step(
        engine=ENGINE.with_constants({"kernels.verify_attention_factor": 1.0}),
        context=3e7,
        batch=256,
    )
    assert float(p.speedup) == pytest.approx(
        float(p.expected_tokens_per_step), rel=0.03
    )


def test_stored_logits_of_a_large_batch_reach_a_gigabyte() -> None:
    """Batch 256, gamma 7, a 128k vocabulary: 2048 rows of fp32 logits are 1.05 GB."""
    few, many = (
        step(batch=b, gamma=7, sampling=SamplingSpec()).memory.workspace_bytes
        for b in (1, 256)
    )
    assert float(many) - float(few) == pytest.approx(255 * 8 * 128_256 * 4)


def test_a_quantised_self_draft_is_quicker_and_takes_memory() -> None:
    engine = ENGINE.with_constants({"overheads.layer_overhead_s": 0.0})
    int4 = step(engine=engine, draft_precision=Precision(weight_dtype="int4"), tp=1)
    same = step(engine=engine, tp=1)
    assert float(int4.draft_step_s) < float(same.draft_step_s)
    norms = 2 * LLAMA.num_hidden_layers + 1
    wide = (
        2.0 * (2 * LLAMA.vocab_size + norms) * LLAMA.hidden_size
    )  # embedding, head and norms stay in 16 bits
    assert float(int4.memory.draft_weights_bytes) - wide == pytest.approx(
        (float(int4.memory.weights_bytes) - wide) * 4.15625 / 16, rel=1e-12
    )


def test_a_draft_on_fewer_ranks_pays_for_the_broadcast_of_probabilities() -> None:
    spec = msgspec.structs.replace(STREAMING, draft_tp_size=1)
    sampled, greedy = step(spec), step(spec, sampling=SamplingSpec())
    assert "broadcast" in {op.name for op in sampled.terms.upkeep.ops}
    assert float(sampled.upkeep_step_s) > float(greedy.upkeep_step_s)


def test_the_full_cache_of_a_standalone_draft_grows_with_the_context() -> None:
    setup = Setup(
        model=LLAMA2, hardware=A100, engine=ENGINE, draft_model=TINYLLAMA,
        speculation=SpeculationSpec(draft="tinyllama-1.1b", draft_method="full", gamma=2),
    )  # fmt: skip
    need = memory_need(setup, batch=4, max_len=1000, budget=None, gamma=0, tp_size=1)
    assert (
        float(need.draft_kv_bytes) == 4 * 1001 * TINYLLAMA.kv_elements_per_token() * 2
    )
    assert float(draft_kv_tokens(setup, 5000.0, 512)) == 5000.0


def test_snapkv_pays_for_its_selection_at_prefill() -> None:
    def seconds(method: Any) -> float:
        spec = SpeculationSpec(draft="self", draft_method=method, draft_budget=512)
        setup = Setup(model=LLAMA, hardware=A100, engine=ENGINE, speculation=spec)
        return float(
            prefill_terms(
                setup, batch=1, prompt_len=32_000, tp_size=8, budget=512
            ).total_s
        )

    none = Setup(model=LLAMA, hardware=A100, engine=ENGINE)
    alone = float(prefill_terms(none, batch=1, prompt_len=32_000, tp_size=8).total_s)
    assert alone < seconds("streamingllm") < seconds("snapkv")


def test_measured_vocabulary_costs_replace_the_estimate() -> None:
    engine = ENGINE.with_constants(
        {
            "sampling.accept_base_s": 1e-3,
            "sampling.accept_s_per_element": 1e-12,
            "overheads.upkeep_base_s": 2e-3,
            "overheads.upkeep_s_per_token": 1e-6,
        }
    )
    p = step(engine=engine, tp=1, batch=2)
    assert float(p.accept_step_s) == pytest.approx(1e-3 + 2 * 4 * 128_256 * 1e-12)
    catch_up = next(op.time_s for op in p.terms.upkeep.ops if op.name == "catch-up")
    assert float(p.upkeep_step_s) == pytest.approx(
        2e-3 + 8e-6 + engine.overheads.step_overhead_s + float(catch_up)
    )


def test_drafting_without_acceptance_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs an acceptance"):
        step(acceptance=None)


@pytest.mark.parametrize(
    "fields",
    [
        {"batch": 0}, {"batch": float("nan")}, {"batch": np.array([1.0, 1e300])}, {"context": -1}, {"tp": 0},
        {"context": float("inf")}, {"gamma": -1}, {"gamma": 33}, {"budget": float("nan")},
        {"budget": 0}, {"budget": None}, {"gen_len": float("nan")},
    ],
)  # fmt: skip
def test_numbers_out_of_range_never_reach_the_formula(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"must be between|reads a budget"):
        step(**fields)


def test_intervals_hold_the_prediction_and_widen_with_each_error() -> None:
    narrow, wide = interval(step()), interval(step(), 0.1)
    p = step()
    assert (
        float(wide.speedup_low)
        < float(narrow.speedup_low)
        < float(p.speedup)
        < float(narrow.speedup_high)
    )
    assert float(narrow.speedup_high) < float(wide.speedup_high)
    alone = interval(step(gamma=0))
    assert float(alone.speedup_low) == float(alone.speedup_high) == 1.0


def test_interval_of_the_speedup_covers_as_stated_when_terms_err_together() -> None:
    """Errors of the stated size drawn for each kind of term, 4000 times: 90 % ± 2 % (4 sigma) fall inside."""
    p = step()
    bounds = interval(p)
    rng = np.random.default_rng(0)
    ours, alone = p.terms.step_seconds("group"), p.terms.autoregressive.group_seconds()
    errors = relative_errors(p.terms.autoregressive, A100, ENGINE)
    inside = 0
    for _ in range(4000):
        factor = {g: np.exp(e * rng.standard_normal()) for g, e in errors.items()}
        rest = np.exp(ENGINE.errors.speedup_relative_error * rng.standard_normal())
        true = sum(alone[g] * f for g, f in factor.items()) / sum(
            ours[g] * f for g, f in factor.items()
        )
        true = float(true * p.expected_tokens_per_step) * rest
        inside += float(bounds.speedup_low) <= true <= float(bounds.speedup_high)
    assert inside / 4000 == pytest.approx(0.9, abs=0.025)


LAWS = st.builds(
    lambda a, g: (
        constant_profile(a)
        if g
        else msgspec.structs.replace(constant_profile(a), law=Law(rejection=1 - a))
    ),
    st.floats(0.0, 1.0),
    st.booleans(),
)


@given(
    st.fixed_dictionaries({
        "batch": st.integers(1, 4096), "context": st.integers(1, 2_000_000), "tp": st.sampled_from([1, 2, 8, 16, 32]),
        "acceptance": LAWS, "sampling": st.builds(SamplingSpec, temperature=st.sampled_from([0.0, 1.0])),
        "precision": st.builds(Precision, weight_dtype=st.sampled_from(["bf16", "fp8", "int4", "fp32"])),
    }),
    st.builds(
        SpeculationSpec, draft=st.just("self"), draft_method=st.sampled_from(["streamingllm", "snapkv", "topk"]),
        draft_budget=st.integers(5, 8192), gamma=st.integers(0, 32),
    ),
)  # fmt: skip
def test_no_input_gives_a_nan_or_a_negative_time(
    fields: dict[str, Any], spec: SpeculationSpec
) -> None:
    p = step(spec, **fields)
    bounds = interval(p)
    for value in (p.step_s, p.autoregressive_step_s, p.draft_step_s, p.verify_step_s, p.tpot_s, p.speedup,
                  p.tokens_per_s, p.memory.total_bytes, bounds.speedup_low, bounds.tpot_high_s):  # fmt: skip
        assert np.all(np.isfinite(value))
        assert np.all(np.asarray(value) >= 0.0)
    assert 1.0 <= float(p.expected_tokens_per_step) <= spec.gamma + 1
    assert float(bounds.speedup_low) <= float(p.speedup) <= float(bounds.speedup_high)


def test_an_engine_on_another_device_than_it_was_fitted_on_is_less_sure() -> None:
    """Only its fixed costs: a speedup that they hardly enter keeps its interval."""

    def width(hardware: HardwareProfile) -> float:
        bounds = interval(step(hardware=hardware))
        return float(bounds.speedup_high / bounds.speedup_low)

    renamed = msgspec.structs.replace(A100, name="another-device")
    anywhere = msgspec.structs.replace(ENGINE, fitted_device="")
    assert width(renamed) > width(A100)
    assert errors(LLAMA, renamed)["overhead"] == 0.2
    assert errors(LLAMA, renamed, anywhere) == errors(LLAMA, A100)


def errors(
    model: ModelSpec,
    hardware: HardwareProfile,
    engine: EngineProfile = ENGINE,
    **precision: str,
) -> dict[str, float]:
    setup = Setup(
        model=model, hardware=hardware, engine=engine, precision=Precision(**precision)
    )
    return relative_errors(one_token_pass(setup), hardware, engine)


def test_experts_are_as_sure_as_the_fits_of_their_own_kernels() -> None:
    b200, vllm = load_hardware("b200-sxm-192gb"), load_engine("vllm")

    def of(weight_dtype: str, engine: EngineProfile = vllm) -> float:
        model = load_model_spec("qwen3-30b-a3b")
        return errors(model, b200, engine, weight_dtype=weight_dtype)["experts"]

    assert (
        of("bf16") == b200.moe["bf16"].fit.relative_error > b200.gemm.fit.relative_error
    )
    assert of("nvfp4") == b200.moe["nvfp4"].fit.relative_error
    unfused = vllm.with_constants({"kernels.fused_experts": False})
    assert of("bf16", unfused) == b200.gemm.fit.relative_error


def test_kernels_that_no_table_holds_are_less_sure() -> None:
    """Qwen3.5's recurrence is in one, Nemotron's is not, nor is sparse attention over an fp8 cache."""
    hw = load_hardware("h200")

    def of(model: str, kv_dtype: str = "bf16") -> float:
        return errors(load_model_spec(model), hw, kv_dtype=kv_dtype)["attention"]

    assert of("llama-3.1-8b") == hw.attention.fit.relative_error
    assert of("qwen3.5-35b-a3b") == max(
        of("llama-3.1-8b"), hw.linear.fit.relative_error
    )
    assert of("nemotron-3-nano-30b-a3b") == of("deepseek-v3.2", "fp8") == 0.3
    assert of("deepseek-v3") < of("deepseek-v3.2") < 0.3


def test_products_are_as_sure_as_the_kernels_of_the_format_that_runs() -> None:
    """Weights that are widened on the way run in kernels that no table holds, like those of a borrowed curve."""
    b200, vllm, model = (
        load_hardware("b200-sxm-192gb"),
        load_engine("vllm"),
        load_model_spec("llama-3.1-8b"),
    )

    def of(weight_dtype: str) -> tuple[float, list[str]]:
        run = one_token_pass(Setup.of(model, b200, vllm, weight_dtype=weight_dtype))
        return relative_errors(run, b200, vllm)["gemm"], untimed(run)

    assert of("bf16") == (b200.gemm.fit.relative_error, [])
    assert of("fp8") == (b200.gemm_formats["fp8"].fit.relative_error, [])
    assert of("int4") == (2.0 * b200.gemm.fit.relative_error, ["int4 products"])


def test_an_operation_says_whether_its_shape_was_timed() -> None:
    """Tables of decoding hold one query token and up to 4,096 rows; a device that borrows has none."""
    h100 = load_hardware("h100")

    def inside(
        hardware: HardwareProfile, **shape: float
    ) -> dict[str, tuple[str, bool | None]]:
        at = Setup(model=LLAMA, hardware=hardware, engine=ENGINE).at
        run = forward_pass(
            LLAMA, Pass(at=at, **({"query_len": 1, "kv_len": 4096} | shape))
        )
        return {op.name: (b.source, b.is_inside) for op in run.ops for b in op.bases}

    decoding = inside(h100, batch=16)
    assert decoding["attention"] == decoding["o"] == ("table", True)
    assert decoding["lm_head"] == ("table", False)  # 128,256 columns
    assert inside(h100, batch=16, query_len=4)["attention"] == ("table", False)
    assert inside(h100, batch=16, kv_len=200_000)["attention"] == ("table", False)
    assert inside(h100, batch=8192)["o"] == ("table", False)
    other = load_hardware("h100-pcie-80gb")
    assert inside(other, batch=16)["o"] == ("carried over", None)
    assert inside(HardwareProfile(
        name="bare", memory_bytes=1e11, memory_bytes_per_s=1e12, flops_per_s={"bf16": 1e14}, link=h100.link
    ), batch=16)["o"] == ("roofline", None)  # fmt: skip


def test_a_machine_whose_speed_moves_widens_the_interval() -> None:
    """A memory faster and a processor slower by a standard deviation each move the speedup by nearly one of what they
    add to its interval: both predicted apart, on such a machine."""
    memory, compute = 0.02, 0.01

    def sigma(hardware: HardwareProfile) -> float:
        bounds = interval(step(hardware=hardware))
        return float(np.log(bounds.speedup_high / bounds.speedup_low)) / (
            2 * 1.6448536269514722
        )

    moving = msgspec.structs.replace(A100, memory_spread=memory, compute_spread=compute)
    added = np.sqrt(sigma(moving) ** 2 - sigma(A100) ** 2)
    prediction = step()
    alone, whole = (
        prediction.terms.autoregressive.group_seconds(),
        prediction.terms.step_seconds("group"),
    )
    faster = {
        group: np.exp(-memory if group == "attention" else compute) for group in whole
    }
    moved = sum(float(alone[g]) * faster[g] for g in whole) / sum(
        float(whole[g]) * faster[g] for g in whole
    )
    usual = sum(float(alone[g]) for g in whole) / sum(float(whole[g]) for g in whole)
    assert added == pytest.approx(abs(np.log(moved / usual)), rel=0.05)
