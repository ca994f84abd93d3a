"""The attention kernel by engine, version, device, cache and heads, as their sources choose it."""

from __future__ import annotations

import pytest

from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.specs.attention_kernels import (
    AttentionLayer,
    attention_path,
    layers_of,
    refusal_of,
    splitting_backend,
    tables,
)
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.engine_path import PathOptions

CHOSEN = [
    # engine, device, layer, backend, whether verification keeps its graphs
    ("vllm", "a100", AttentionLayer(), "FLASH_ATTN", True),
    ("vllm", "rtx-4090", AttentionLayer(), "FLASH_ATTN", True),
    ("vllm", "rtx-5090", AttentionLayer(), "FLASH_ATTN", True),
    ("vllm", "gb10", AttentionLayer(), "FLASH_ATTN", True),
    ("vllm", "h100", AttentionLayer("fp8"), "FLASH_ATTN", True),
    ("vllm", "b200", AttentionLayer(), "FLASHINFER", True),
    ("vllm@0.8.5", "b200", AttentionLayer(), "FLASH_ATTN", True),
    ("vllm@0.32", "a100", AttentionLayer("fp8"), "FLASHINFER", False),
    ("vllm@0.33", "a100", AttentionLayer("fp8"), "FLASHINFER", True),
    ("vllm@0.10", "a100", AttentionLayer("fp8"), "FLASHINFER", True),
    ("vllm@0.27.1", "rtx-5090", AttentionLayer("fp8"), "FLASHINFER", False),
    ("vllm@0.28", "rtx-5090", AttentionLayer("fp8"), "FLASHINFER", True),
    ("vllm", "rtx-3090", AttentionLayer("int8"), "TRITON_ATTN", True),
    ("vllm", "a100", AttentionLayer(has_sinks=True), "TRITON_ATTN", True),
    ("vllm@0.20", "a100", AttentionLayer(head_dim=512), "TRITON_ATTN", True),
    ("vllm@0.20", "h100", AttentionLayer(head_dim=256, mixed_heads=True), "TRITON_ATTN", True),
    ("vllm@0.24", "h100", AttentionLayer(head_dim=256, mixed_heads=True), "FLASH_ATTN", True),
    ("vllm", "rtx-3090", AttentionLayer(head_dim=256, mixed_heads=True), "TRITON_ATTN", True),
    ("vllm", "b200", AttentionLayer(head_dim=512, mixed_heads=True), "TRITON_ATTN", True),
    ("vllm", "arc-pro-b70", AttentionLayer("fp8"), "FLASH_ATTN", True),
    ("vllm@0.28", "rx-7900-xtx", AttentionLayer(head_dim=512, mixed_heads=True), "TRITON_ATTN", True),
    ("sglang", "mi300x", AttentionLayer(head_dim=512, mixed_heads=True), "triton", True),
    ("vllm@0.20", "t4", AttentionLayer(), "FLASHINFER", False),
    ("vllm", "t4", AttentionLayer(), "TRITON_ATTN", True),
    ("sglang", "a100", AttentionLayer(), "flashinfer", True),
    ("sglang", "a100", AttentionLayer(has_sinks=True), "triton", True),
    ("sglang", "h100", AttentionLayer(), "fa3", True),
    ("sglang", "b200", AttentionLayer(), "trtllm_mha", True),
    ("sglang", "a100", AttentionLayer(head_dim=512, mixed_heads=True), "triton", True),
    ("sglang@0.5.2", "b200", AttentionLayer(), "flashinfer", True),
    ("trtllm", "a100", AttentionLayer(), "TRTLLM", True),
    ("vllm", "h100", AttentionLayer("bf16", 576, sort="latents"), "FLASH_ATTN_MLA", True),
    ("vllm", "h100", AttentionLayer("fp8", 576, sort="latents"), "FLASHMLA", True),
    ("vllm@0.14", "b200", AttentionLayer("bf16", 576, sort="latents"), "CUTLASS_MLA", False),
    ("vllm@0.15", "b200", AttentionLayer("bf16", 576, sort="latents"), "FLASHINFER_MLA", True),
    ("vllm@0.30", "a100", AttentionLayer("bf16", 576, sort="latents"), "TRITON_MLA", False),
    ("vllm@0.32", "rtx-5090", AttentionLayer("bf16", 576, sort="latents"), "TRITON_MLA", True),
    ("vllm@0.15", "h200", AttentionLayer("bf16", 576, sort="chosen"), "FLASHMLA_SPARSE", False),
    ("vllm@0.24", "b200", AttentionLayer("fp8", 576, sort="chosen"), "FLASHINFER_MLA_SPARSE", True),
    ("sglang", "h200", AttentionLayer("bf16", 576, sort="latents"), "fa3", True),
    ("sglang", "b200", AttentionLayer("bf16", 576, sort="latents"), "trtllm_mla", True),
    ("sglang@0.5.2", "b200", AttentionLayer("bf16", 576, sort="latents"), "flashinfer", True),
    ("sglang", "rtx-5090", AttentionLayer("bf16", 576, sort="latents"), "triton", True),
    ("vllm@0.15", "mi300x", AttentionLayer(), "TRITON_ATTN", True),
    ("vllm@0.20", "mi300x", AttentionLayer(), "ROCM_ATTN", True),
    ("vllm", "mi300x", AttentionLayer(has_sinks=True), "ROCM_AITER_UNIFIED_ATTN", True),
    ("vllm", "rx-7900-xtx", AttentionLayer(has_sinks=True), "TRITON_ATTN", True),
    ("vllm", "mi355x", AttentionLayer("bf16", 576, sort="latents"), "ROCM_AITER_MLA", True),
    ("sglang", "mi300x", AttentionLayer(), "aiter", True),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "device", "layer", "backend", "has_graphs"), CHOSEN)
def test_the_backend_is_the_first_that_takes_the_layer(
    engine, device, layer, backend, has_graphs
):
    path = attention_path(load_engine(engine), load_hardware(device), layer)
    assert path.backend == backend
    assert (path.loses_graphs == 0.0) == has_graphs


def test_a_backend_that_is_asked_for_runs_where_it_takes_the_layer():
    engine = load_engine("vllm@0.32").as_set(
        PathOptions(attention_backend="FLASHINFER")
    )
    ampere = load_hardware("a100")
    assert attention_path(engine, ampere, AttentionLayer()).backend == "FLASHINFER"
    assert (
        attention_path(engine, ampere, AttentionLayer("int8")).backend == "TRITON_ATTN"
    )
    # from 0.22 on the draft chooses for itself, as SGLang's never does
    assert engine.of_draft.paths.attention_backend == ""
    older = load_engine("vllm@0.21").as_set(PathOptions(attention_backend="FLASHINFER"))
    assert older.of_draft.paths.attention_backend == "FLASHINFER"


def test_a_backend_of_heads_refuses_latents_and_one_of_latents_heads():
    latents = AttentionLayer("bf16", 576, sort="latents")
    refusal = refusal_of("vllm", "0.32", "hopper", latents, "FLASHINFER")
    assert refusal is not None
    assert "latents" in refusal.says
    refusal = refusal_of("vllm", "0.32", "hopper", AttentionLayer(), "FLASHMLA")
    assert refusal is not None
    assert "keys and values" in refusal.says
    assert refusal_of("vllm", "0.32", "hopper", latents, "FLASHMLA") is None
    assert refusal_of("sglang", "0.5.23", "hopper", latents, "flashinfer") is None


def test_verification_over_an_expanded_context_is_no_splitting():
    layers = layers_of(load_model_spec("deepseek-r1"), "fp8")
    b200 = load_hardware("b200")
    assert splitting_backend(load_engine("vllm@0.14"), b200, layers, 4.0) == (
        "FLASHINFER_MLA"
    )
    assert splitting_backend(load_engine("vllm@0.32"), b200, layers, 4.0) == ""


def test_nobody_knows_the_kernel_of_a_device_that_no_row_names():
    unknown = load_hardware("gaudi3-128gb")
    laws = attention_path(load_engine("vllm"), unknown, AttentionLayer()).laws
    assert {law.packs for law in laws} == {True, False}


@pytest.mark.parametrize(
    ("engine", "device", "model", "tokens", "splitting"),
    [
        ("vllm", "a100", "llama-3.1-8b", 4, "FLASHINFER"),
        ("vllm", "a100", "llama-3.1-8b", 16, "FLASHINFER"),
        ("vllm@0.32", "a100", "llama-3.1-8b", 4, "FLASHINFER"),
        ("vllm@0.32", "a100", "gpt-oss-20b", 4, ""),
        ("vllm", "a100", "gpt-oss-20b", 4, ""),
        ("vllm", "a100", "llama-3.1-8b", 1, ""),
        ("vllm@0.28", "h100", "llama-3.1-8b", 4, ""),
        ("sglang", "a100", "llama-3.1-8b", 4, ""),
    ],
)
def test_the_backend_that_splits_the_context_where_the_usual_one_does_not(
    engine, device, model, tokens, splitting
):
    layers = layers_of(load_model_spec(model), "bf16")
    found = splitting_backend(
        load_engine(engine), load_hardware(device), layers, float(tokens)
    )
    assert found == splitting


def test_every_row_names_a_kernel_and_every_default_a_backend():
    known = tables()
    named = {(row.engine, row.backend) for row in known.backends}
    for row in known.backends:
        named_kernels = {row.kernel, row.or_kernel, row.one_token}
        assert named_kernels <= {*known.kernels, ""}
    for row in known.defaults:
        assert {(row.engine, backend) for backend in row.backends} <= named
    for row in known.refusals:
        assert (row.engine, row.backend) in named
        assert row.address
