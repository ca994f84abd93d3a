"""Kernels' laws for several query tokens, and servers that differ in their attention backend alone."""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from magicdec.perfmodel.kernels.attention import Attended, AttentionCurve
from magicdec.perfmodel.kernels.latents import (
    LATENT_FLOPS_PER_PAIR,
    LATENT_ROW,
    LatentCurve,
    Latents,
    latent_seconds,
)
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.step import step_terms
from magicdec.specs.attention_kernels import tables
from magicdec.specs.engine import load_engine
from magicdec.specs.engine_path import PathOptions
from magicdec.specs.speculation import SpeculationSpec

DATA = Path(__file__).resolve().parents[1] / "data"
LEFT_OUT = "vllm-project/flash-attention pull request 193"
"""No constant of the laws is fitted to it: FlashAttention 2's rates are of an RTX A6000's servers and of the
other two sources on an RTX 3090."""
LAUNCHED = 4096
"""Tokens up to which a call's launches outlast the kernel: 70 us to decode over 8 MB."""


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def kernel_ms(row: dict[str, str], query_tokens: float) -> float:
    hw = load_hardware(row["device"])
    dtype = row["kv_dtype"]
    work = Attended(
        float(row.get("batch", 1.0)),
        query_tokens,
        float(row["context"]),
        float(row["num_heads"]),
        float(row["num_kv_heads"]),
        float(row["head_dim"]),
        dtype,
        law=tables().kernels[row["kernel"]],
    )
    time = AttentionCurve.of(hw, dtype).seconds(hw, work, "own")
    return 1e3 * float(time.time_s)


def errors_of(rows: list[dict[str, str]]) -> np.ndarray:
    ratios = [
        kernel_ms(row, float(row["query_tokens"])) / float(row["verify_ms"])
        for row in rows
    ]
    return np.abs(np.array(ratios) - 1.0)


def test_a_verification_takes_what_its_kernel_s_law_says() -> None:
    """Every row, the one of 1,500 tokens too, which was faster than the card's listed rate."""
    errors = errors_of(read(DATA / "kernels/verification.csv"))
    assert np.median(errors) < 0.1
    assert np.mean(errors) < 0.25
    assert np.mean(errors > 0.26) < 0.1


def test_a_source_that_no_constant_was_fitted_to() -> None:
    rows = [
        row
        for row in read(DATA / "kernels/verification.csv")
        if row["source"] == LEFT_OUT
    ]
    assert np.mean(errors_of(rows)) < 0.13
    ratios = []
    for row in rows:
        if row["decode_ms"] and int(row["context"]) > LAUNCHED:
            said = kernel_ms(row, float(row["query_tokens"])) / kernel_ms(row, 1.0)
            ratios.append(said * float(row["decode_ms"]) / float(row["verify_ms"]))
    assert len(ratios) == 4
    assert np.all(np.abs(np.array(ratios) - 1.0) <= 0.26)


def test_several_tokens_on_blackwell_before_and_after_they_are_packed() -> None:
    """The rereading of a token apart is fitted to 4 tokens, nothing to 2 or to the packed kernel."""
    rows = read(DATA / "kernels/trtllm_gen.csv")
    errors = errors_of(rows)
    is_apart = np.array([row["kernel"] == "trtllm-gen-apart" for row in rows])
    is_four = np.array([row["query_tokens"] == "4" for row in rows])
    assert np.mean(errors[is_apart & is_four]) < 0.06
    assert np.mean(errors[is_apart & ~is_four]) < 0.2
    assert np.mean(errors[~is_apart]) < 0.15


def latents_us(device: str, kernel: str, kv_dtype: str, *numbers: Any) -> Any:
    """`numbers`: sequences, query tokens, context, heads."""
    hw = load_hardware(device)
    law = tables().kernels[kernel]
    curve = LatentCurve if law.is_timed else AttentionCurve
    work = Latents(*numbers, LATENT_ROW, LATENT_FLOPS_PER_PAIR, kv_dtype)
    time = latent_seconds(curve.of(hw, kv_dtype), hw, work, "own", law)
    return 1e6 * time.time_s


def test_several_tokens_over_latents_take_what_their_kernel_s_law_says() -> None:
    """Nothing is fitted to these rows. A single sequence of up to 1,000k is beyond every table: of it the order
    of two kernels holds."""
    ratios = []
    alone: dict[Any, dict[str, tuple[float, float]]] = defaultdict(dict)
    for row in read(DATA / "kernels/latent_verification.csv"):
        names = ("batch", "query_tokens", "context", "num_heads")
        numbers = [float(row[name]) for name in names]
        said = latents_us(row["device"], row["kernel"], row["kv_dtype"], *numbers)
        measured = float(row["verify_us"])
        if numbers[0] >= 8:
            ratios.append(float(said) / measured)
        elif numbers[1] > 1 and numbers[2] >= 500e3:
            cell = alone[row["kv_dtype"], numbers[2]]
            cell[row["kernel"]] = (float(said), measured)
    errors = np.abs(np.array(ratios) - 1.0)
    assert np.median(errors) < 0.1
    assert np.max(errors) < 0.3
    assert len(alone) == 4
    for cell in alone.values():
        apart, folded = cell["trtllm-gen-mla"], cell["folded-mla"]
        assert apart[0] > folded[0]
        assert apart[1] > folded[1]


def latent_rows(*scopes: str) -> list[dict[str, str]]:
    with gzip.open(DATA / "kernels/mla_decode.csv.gz", "rt", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["scope"] in scopes]


def test_triton_over_latents_on_the_one_card_where_it_was_timed() -> None:
    """SGLang 0.5.14's table of an L40S: only the rate of a block is of it, by up to 16 heads."""
    rows = [
        row
        for row in latent_rows("attention kernel")
        if row["device"] == "l40s-48gb"
        and "SGLang" in row["source"]
        and int(row["kv_len"]) >= 1024
    ]
    batch, kv_len, heads, measured = (
        np.array([float(row[name]) for row in rows])
        for name in ("batch_size", "kv_len", "num_heads", "latency_us")
    )
    said = latents_us("l40s", "triton-mla", "bf16", batch, 1.0, kv_len, heads)
    errors = np.abs(said / measured - 1.0)
    assert np.mean(errors[heads <= 16]) < 0.15
    assert np.mean(errors[heads > 16]) < 0.25


VLLM_KERNELS = {
    ("l40s-48gb", "bf16"): ("triton-mla", 0.2),
    ("h100-sxm-80gb", "bf16"): ("fa3-mla", 0.08),
    ("h200-sxm-141gb", "bf16"): ("fa3-mla", 0.12),
    ("h100-sxm-80gb", "fp8"): ("flashmla", 0.08),
    ("h200-sxm-141gb", "fp8"): ("flashmla", 0.08),
    ("b200-sxm-192gb", "bf16"): ("trtllm-gen-mla", 0.08),
    ("b200-sxm-192gb", "fp8"): ("trtllm-gen-mla", 0.12),
}
"""Kernels of vLLM 0.24 by device and cache, with bounds of their mean errors."""


def test_vllm_s_layers_of_latents_grow_with_the_context_as_its_backend_s_kernel() -> (
    None
):
    """Whole layers by context: projections cancel. Nothing but Triton's rereading, on the L40S, is fitted to them."""
    layers: dict[Any, dict[float, float]] = defaultdict(dict)
    for row in latent_rows("attention module with its projections"):
        if row["gemm_dtype"] == "bfloat16" and int(row["kv_len"]) >= 2048:
            dtype = "fp8" if row["kv_dtype"] == "fp8" else "bf16"
            key = (row["device"], dtype, row["num_heads"], row["batch_size"])
            layers[key][float(row["kv_len"])] = float(row["latency_us"])
    errors = defaultdict(list)
    for (device, dtype, heads, batch), of_context in layers.items():
        kernel, _ = VLLM_KERNELS[device, dtype]
        shortest, longest = min(of_context), max(of_context)
        growth = of_context[longest] - of_context[shortest]
        if growth < 30.0:
            continue
        short, long = (
            latents_us(device, kernel, dtype, float(batch), 1.0, context, float(heads))
            for context in (shortest, longest)
        )
        errors[device, dtype].append(abs((long - short) / growth - 1.0))
    assert set(errors) == set(VLLM_KERNELS)
    for key, (_, bound) in VLLM_KERNELS.items():
        assert np.mean(errors[key]) < bound, key


def step_ms(row: dict[str, str]) -> float:
    options = PathOptions(
        attention_backend=row["backend"], draft_attention_backend=row["backend"]
    )
    setup = Setup.of(
        row["model"],
        row["device"],
        load_engine(f"vllm@{row['version']}").as_set(options),
        SpeculationSpec(
            draft=row["draft"], draft_method=row["draft"], gamma=int(row["gamma"])
        ),
        weight_dtype=row["weights"],
        kv_dtype=row["cache"],
    )
    context = float(row["context"])
    terms = step_terms(
        setup,
        batch=1,
        kv_len=context,
        draft_kv_len=context,
        gamma=int(row["gamma"]),
        tp_size=int(row["tp"]),
    )
    return 1e3 * float(terms.step_s)


def test_the_backend_that_was_faster_is_faster() -> None:
    """Acceptance is not stated, so backends are compared at one context, where it is the same."""
    cells: dict[Any, dict[str, tuple[float, float]]] = defaultdict(dict)
    for row in read(DATA / "pairs/backends.csv"):
        cell = (row["source"], row["draft"], row["context"])
        cells[cell][row["backend"]] = (step_ms(row), float(row["tok_s"]))
    errors = []
    for cell, of_backend in cells.items():
        (first_ms, first_rate), (second_ms, second_rate) = of_backend.values()
        said = second_ms / first_ms
        measured = first_rate / second_rate
        assert (said > 1.0) == (measured > 1.0), cell
        errors.append(abs(said / measured - 1.0))
    assert np.median(errors) < 0.3


SPLIT = {"1": 2.05, "2": 1.93, "4": 1.94}
"""Tokens per second with Triton's kernel split for several tokens over those without, by drafted tokens:
Gemma-4-31B in int4 with its assistant over 30,000 tokens on an A100 (vLLM pull request 45450)."""


def test_what_splitting_a_verification_gives() -> None:
    """Nothing is fitted to it. 0.33 splits."""
    row = {
        "model": "gemma-4-31b",
        "device": "a100",
        "tp": "1",
        "weights": "int4",
        "cache": "bf16",
        "backend": "TRITON_ATTN",
        "draft": "mtp",
        "context": "30000",
    }
    for gamma, measured in SPLIT.items():
        before, after = (
            step_ms({**row, "version": version, "gamma": gamma})
            for version in ("0.28", "0.33")
        )
        assert 1.0 < before / after / measured < 1.6


INTEL = {"qwen3.6-27b": (46.3, 14.9), "qwen3.6-35b-a3b": (103.3, 24.8)}
"""Tokens per second without context and after 32,768 tokens, with prediction modules, in int4 and an fp8 cache on
an Arc Pro B70 (steveseguin/b70-optimization-lab, dominick253-qwen36-int4-b2-1gpu); prompts have 2,048."""


def test_a_verification_on_intel_goes_through_the_context_unsplit() -> None:
    """A block's rate is of both models together, at 2 drafted tokens, which their acceptance fits."""
    for model, (near, far) in INTEL.items():
        row = {
            "model": model,
            "device": "arc-pro-b70",
            "tp": "1",
            "weights": "int4",
            "cache": "fp8",
            "backend": "",
            "draft": "mtp",
            "gamma": "2",
            "version": "0.26",
        }
        steps = [step_ms({**row, "context": str(2500 + depth)}) for depth in (0, 32768)]
        assert abs(steps[1] / steps[0] / (near / far) - 1.0) < 0.15


def test_what_a_token_of_context_costs_by_backend_on_two_r9700() -> None:
    """Qwen3.8-27B in fp8 with its module, K 4: slopes, since the level is of the card and its link. A block's rates
    in ROCM_ATTN, and with an fp8 cache, are of these rows; AITER's is not."""
    lines: dict[Any, list[tuple[float, float, float]]] = defaultdict(list)
    for row in read(DATA / "kernels/context_r9700.csv"):
        options = PathOptions(
            attention_backend=row["backend"],
            draft_attention_backend=row["draft_backend"],
        )
        setup = Setup.of(
            "qwen3.8-27b",
            "r9700",
            load_engine(f"vllm@{row['version']}").as_set(options),
            SpeculationSpec(draft="mtp", draft_method="mtp", gamma=4),
            weight_dtype="fp8",
            kv_dtype=row["cache"],
        )
        context = float(row["context"])
        terms = step_terms(
            setup, batch=1, kv_len=context, draft_kv_len=context, gamma=4, tp_size=2
        )
        line = lines[row["version"], row["backend"], row["cache"], row["draft_backend"]]
        line.append((context, float(row["step_ms"]), 1e3 * float(terms.step_s)))
    slopes = {}
    for key, line in lines.items():
        context, measured, said = np.array(line).T
        of_measured = np.polyfit(context, measured, 1)[0]
        slopes[key[1:3]] = np.polyfit(context, said, 1)[0] / of_measured
    assert 0.7 < slopes["ROCM_ATTN", "bf16"] < 1.3
    assert 0.7 < slopes["ROCM_ATTN", "fp8"] < 1.3
    assert 0.7 < slopes["TRITON_ATTN", "fp8"] < 1.3
    assert 0.7 < slopes["ROCM_AITER_UNIFIED_ATTN", "fp8"] < 1.3
