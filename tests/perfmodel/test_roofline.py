"""GEMM, attention and elementwise times: limits, order, and sanity on any input."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.perfmodel.kernels.attention import AttentionCurve
from magicdec.perfmodel.kernels.base import soft_max
from magicdec.perfmodel.kernels.gemm import ElementwiseCurve, GemmCurve
from magicdec.perfmodel.kernels.profile import (
    HardwareProfile,
    hardware_names,
    load_hardware,
)
from magicdec.specs.attention_kernels import tables
from magicdec.specs.device import Link
from tests.kernels import attention_time, elementwise_time, gemm_time

MEASURED = (
    "a100-sxm-80gb",
    "h100-sxm-80gb",
    "h200-sxm-141gb",
    "b200-sxm-192gb",
    "l40s-48gb",
)
dimension = st.one_of(
    st.integers(0, 2**20), st.floats(allow_nan=True, allow_infinity=True), st.just(-1)
)
devices = st.sampled_from(sorted(hardware_names()))


def cpu(**curves) -> HardwareProfile:
    return HardwareProfile(
        name="cpu", kind="cpu", memory_bytes=1e10, memory_bytes_per_s=1e10, flops_per_s={"fp32": 1e11},
        num_multiprocessors=2, link=Link(bytes_per_s=1e9, topology="shared-memory"), **curves,
    )  # fmt: skip


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1, 64))
def test_the_soft_maximum_lies_between_the_maximum_and_the_sum(first, second, power):
    value = float(soft_max(np.array(first), np.array(second), power))
    assert max(first, second) * (1 - 1e-9) <= value <= (first + second) * (1 + 1e-9)


@pytest.mark.parametrize("device", MEASURED)
def test_products_take_the_time_of_their_bytes_or_of_their_flops(device):
    """One token through 1 GiB of weights, and 16384³: within 15 % of the fitted ceiling, not below the datasheet's; the
    memory's is the higher one below the ridge, the processor's above it."""
    hw = load_hardware(device)
    bandwidth, rate = hw.memory_bytes_per_s, hw.flops_per_s["bf16"]
    for m, n, at_peak, efficiency in (
        (1, 32768, 2 * 32768 * 16384 / bandwidth, hw.gemm.bandwidth_efficiency),
        (16384, 16384, 2 * 16384**3 / rate, hw.gemm.flops_efficiency),
    ):
        time = float(gemm_time(hw, m=m, n=n, k=16384).time_s)
        assert at_peak < time == pytest.approx(at_peak / efficiency, rel=0.15)
    ridge = rate * hw.gemm.flops_efficiency / (bandwidth * hw.gemm.bandwidth_efficiency)
    below, above = (
        gemm_time(hw, m=ridge * factor, n=16384, k=16384) for factor in (1 / 3, 3)
    )
    assert below.memory_s > below.compute_s
    assert above.memory_s < above.compute_s


def test_empty_work_costs_its_overhead_only():
    hw = load_hardware("h100")
    for time in (gemm_time(hw, m=0, n=4096, k=4096), gemm_time(hw, m=4, n=4096, k=0)):
        assert float(time.time_s) == hw.gemm.overhead_s
    empty = attention_time(
        hw, batch=8, query_len=1, kv_len=0, num_heads=8, num_kv_heads=8, head_dim=128
    )
    assert float(empty.time_s) == hw.attention.overhead_s
    assert float(elementwise_time(hw, num_bytes=0, num_kernels=0).time_s) == 0.0


@given(
    devices,
    st.integers(1, 4096),
    st.integers(1, 4096),
    st.integers(64, 32768),
    st.integers(64, 32768),
)
def test_more_tokens_never_take_less_time(device, first, second, n, k):
    times = gemm_time(
        load_hardware(device), m=np.sort([first, second]), n=n, k=k
    ).time_s
    assert times[0] <= times[1] * (1 + 1e-9)


@given(
    devices,
    st.integers(1, 512),
    st.integers(1, 200_000),
    st.integers(1, 200_000),
    st.sampled_from([1, 2, 8]),
)
def test_longer_contexts_never_take_less_time(
    device, batch, first, second, num_kv_heads
):
    hw = load_hardware(device)
    times = attention_time(
        hw, batch=batch, query_len=1, kv_len=np.sort([first, second]), num_heads=8,
        num_kv_heads=num_kv_heads, head_dim=128,
    ).time_s  # fmt: skip
    # a longer context is split further, which costs up to split_overhead_s and may bring block_overhead_s
    assert times[0] <= times[1] * (1 + 1e-6) + AttentionCurve.of(hw).block_overhead_s


@given(
    devices,
    st.lists(dimension, min_size=6, max_size=6),
    st.sampled_from(sorted(tables().kernels)),
    st.booleans(),
)
def test_times_are_finite_and_not_negative_for_any_input(
    device, sizes, kernel, per_query
):
    hw, names = (
        load_hardware(device),
        ("batch", "query_len", "kv_len", "num_heads", "num_kv_heads", "head_dim"),
    )
    reads = "per_query" if per_query else "per_sequence"
    attended = attention_time(
        hw,
        **dict(zip(names, sizes, strict=True)),
        law=tables().kernels[kernel],
        kv_reads=reads,
    )
    for time in (
        *attended,
        *gemm_time(hw, m=sizes[0], n=sizes[1], k=sizes[2], working_set_bytes="own"),
    ):
        assert np.all(np.isfinite(time))
        assert np.all(time >= 0)


def test_below_one_wave_an_unsplit_kernel_takes_a_time_that_depends_on_the_context_alone():
    """The published A100 rows: about 23 ns per token of context from 1 to 32 blocks of 128-wide heads."""
    hw = load_hardware("a100-sxm-80gb")
    times = attention_time(
        hw,
        batch=np.array([1, 8, 32]),
        query_len=1,
        kv_len=32768,
        num_heads=1,
        num_kv_heads=1,
        head_dim=128,
    ).time_s
    assert times.max() / times.min() < 1.05
    assert times.mean() / 32768 == pytest.approx(23e-9, rel=0.08)


def test_a_split_kernel_does_not_pay_for_idle_multiprocessors():
    hw = load_hardware("a100-sxm-80gb")
    shape = {
        "batch": 1,
        "query_len": 1,
        "kv_len": 131072,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 128,
    }
    unsplit, split = (
        float(attention_time(hw, **shape, law=tables().kernels[kernel]).time_s)
        for kernel in ("fa2", "packed")
    )
    read_s = 2 * 4 * 131072 * 128 * 2 / hw.memory_bytes_per_s
    assert unsplit > 5 * split
    assert read_s < split < 2.5 * read_s


def test_several_query_tokens_cost_little_where_reading_the_cache_binds():
    """Memory-bound verification: the measured ratio of the paper's A100 kernel is about 1.05."""
    hw = load_hardware("a100-sxm-80gb")
    shape = {
        "batch": 64,
        "kv_len": 32768,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 128,
        "law": tables().kernels["packed"],
    }
    one, four = (float(attention_time(hw, query_len=q, **shape).time_s) for q in (1, 4))
    assert 1.0 <= four / one < 1.1


def test_what_stays_in_the_cache_is_read_faster_and_a_forward_pass_is_cold():
    hw = load_hardware("l40s-48gb")
    shape = {"m": 8, "n": 4096, "k": 1024}
    cold = float(gemm_time(hw, **shape).time_s)
    warm = float(gemm_time(hw, **shape, working_set_bytes="own").time_s)
    large = float(gemm_time(hw, **shape, working_set_bytes=1e9).time_s)
    small = float(gemm_time(hw, **shape, working_set_bytes=3e7).time_s)
    assert warm < 0.7 * cold
    assert large == pytest.approx(cold, rel=1e-6)
    assert small < 0.7 * cold


def test_on_a_cpu_few_tokens_go_one_by_one_and_many_at_the_matrix_rate():
    """Packing worth 10 tokens, a vector path at a fifth of the rate: 1 token is half of 2, and 64 far less than 64."""
    hw = cpu(
        gemm=GemmCurve(tiled=False, overhead_s=0.0, flops_efficiency=1.0, gemv_efficiency=0.2, half_tokens=10.0,
                       bandwidth_efficiency=100.0)
    )  # fmt: skip
    times = gemm_time(
        hw,
        m=np.array([1, 2, 64]),
        n=512,
        k=512,
        weight_dtype="fp32",
        compute_dtype="fp32",
    ).time_s
    token_s = 2 * 512 * 512 / 1e11
    assert times[0] == pytest.approx(5 * token_s, rel=0.05)
    assert times[1] / times[0] == pytest.approx(2, rel=0.15)
    assert times[2] == pytest.approx(74 * token_s, rel=0.05)


def test_on_a_cpu_attention_of_several_queries_follows_the_skinny_rate():
    curve = AttentionCurve(
        overhead_s=0.0, bandwidth_efficiency=1.0, flops_efficiency=0.1, ridge_power=2.0, wave_weight=0.0,
        stream_ratio=1e6, max_splits=1.0, block_overhead_s=0.0,
    )  # fmt: skip
    shape = {
        "batch": 16,
        "kv_len": 4096,
        "num_heads": 8,
        "num_kv_heads": 8,
        "head_dim": 32,
        "kv_dtype": "fp32",
    }
    times = attention_time(
        cpu(attention=curve), query_len=np.array([1, 2, 4]), **shape
    ).time_s
    read_s = (2 * 16 * 8 * 4096 * 32 + 2 * 16 * 8 * 32 * np.array([1, 2, 4])) * 4 / 1e10
    work_s = 4 * 16 * 8 * 4096 * 32 * np.array([1, 2, 4]) / 1e10
    np.testing.assert_allclose(times, np.hypot(read_s, work_s), rtol=1e-6)


def test_elementwise_time_is_bytes_over_bandwidth_plus_launches():
    hw = load_hardware("h100")
    hw = msgspec.structs.replace(hw, elementwise=None)
    curve = ElementwiseCurve.of(hw)
    time = float(elementwise_time(hw, num_bytes=1e9, num_kernels=3).time_s)
    assert time == pytest.approx(
        1e9 / (3.35e12 * curve.bandwidth_efficiency) + 3 * curve.overhead_s, rel=1e-9
    )
