"""Fits recover known constants from synthetic timings, and refuse what cannot be fitted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from evidence.kernel_tables import curve_of, read_table, refit, row_seconds
from magicdec.errors import ConfigError
from magicdec.fitting import Free
from magicdec.perfmodel.kernels.base import MAX_PARAMETERS, minimise
from magicdec.perfmodel.kernels.experts import _of_rows
from magicdec.perfmodel.kernels.gemm import ElementwiseCurve
from magicdec.perfmodel.kernels.profile import HardwareProfile, load_hardware
from magicdec.specs.device import WEIGHT_ONLY, Link
from tests.kernels import (
    all_reduce_time,
    attention_time,
    elementwise_time,
    fit_allreduce,
    fit_attention,
    fit_elementwise,
    fit_gemm,
    gemm_time,
)

NOISE = 0.02


def local_cpu(l2_bytes: float = 0.0) -> HardwareProfile:
    return HardwareProfile(
        name="local", kind="cpu", memory_bytes=8e9, memory_bytes_per_s=1e10, flops_per_s={"fp32": 1e11},
        num_multiprocessors=2, l2_bytes=l2_bytes, link=Link(bytes_per_s=5e9, topology="shared-memory"),
    )  # fmt: skip


def noisy(times, seed=0):
    return np.asarray(times) * np.exp(
        np.random.default_rng(seed).normal(0, NOISE, np.shape(times))
    )


def grid(**axes):
    mesh = np.meshgrid(*axes.values(), indexing="ij")
    return {
        name: values.ravel().astype(float)
        for name, values in zip(axes, mesh, strict=True)
    }


def test_a_cpus_linear_layers_are_fitted_although_they_are_not_flat_in_tokens():
    """Timings of a rule that shares no code with the model: 1 and 2 tokens alike, 4 cost 2 ×, 8 3 ×, 16 4.5 × one."""
    tokens = np.array([1, 2, 4, 8, 16, 32, 64, 128])
    multiple = np.array([1, 1, 2, 3, 4.5, 7.5, 13.5, 25.5])
    rows = grid(m=tokens, n=[512, 2048, 4096], k=[512, 2048])
    weights_s = rows["n"] * rows["k"] * 4 / 9e9
    rows["time_s"] = noisy(8e-6 + weights_s * np.interp(rows["m"], tokens, multiple))
    curve = fit_gemm(rows, local_cpu(), weight_dtype="fp32", compute_dtype="fp32")
    hw = msgspec.structs.replace(local_cpu(), gemm=curve)
    times = gemm_time(
        hw, m=tokens, n=3072, k=1024, weight_dtype="fp32", compute_dtype="fp32"
    ).time_s
    expected = 8e-6 + 3072 * 1024 * 4 / 9e9 * multiple
    assert np.max(np.abs(times / expected - 1)) < 0.25
    assert np.mean(np.abs(times / expected - 1)) < 0.12
    assert curve.fit.num_parameters <= MAX_PARAMETERS
    assert not curve.tiled


def test_a_cpus_attention_finds_the_bandwidth_and_the_skinny_rate():
    """Bytes at 8 GB/s against FLOPs at 12 GFLOP/s in a 2-norm: four query tokens cost about 1.7 × one."""
    rows = grid(
        batch_size=[1, 4, 16, 32], query_len=[1, 2, 4, 6], kv_len=[256, 1024, 4096]
    )
    rows |= {
        "num_heads": np.full(48, 8.0),
        "num_kv_heads": np.full(48, 8.0),
        "head_dim": np.full(48, 32.0),
    }
    cells = rows["batch_size"] * rows["kv_len"] * 8 * 32
    truth = 2e-5 + np.hypot(cells * 8 / 8e9, 4 * cells * rows["query_len"] / 12e9)
    rows["time_s"] = noisy(truth)
    curve = fit_attention(rows, local_cpu(), kv_dtype="fp32")
    assert curve.bandwidth_efficiency * 1e10 == pytest.approx(8e9, rel=0.1)
    assert curve.flops_efficiency * 1e11 == pytest.approx(12e9, rel=0.1)
    hw = msgspec.structs.replace(local_cpu(), attention=curve)
    one, four = attention_time(
        hw,
        batch=24,
        query_len=np.array([1, 4]),
        kv_len=3000,
        num_heads=8,
        num_kv_heads=8,
        head_dim=32,
        kv_dtype="fp32",
    ).time_s
    assert four / one == pytest.approx(
        np.hypot(1, 4 / 3) / np.hypot(1, 1 / 3), rel=0.08
    )


def test_a_cpus_cache_is_found_where_its_size_is_known():
    """Reads of up to half of 32 MB run at 50 GB/s, larger ones at 8 GB/s."""
    rows = grid(
        batch_size=[1, 2, 4, 8, 16, 32, 64], query_len=[1], kv_len=[256, 1024, 4096]
    )
    rows |= {
        "num_heads": np.full(21, 8.0),
        "num_kv_heads": np.full(21, 8.0),
        "head_dim": np.full(21, 32.0),
    }
    num_bytes = rows["batch_size"] * rows["kv_len"] * 8 * 32 * 8
    rows["time_s"] = noisy(1e-5 + num_bytes / np.where(num_bytes <= 16e6, 50e9, 8e9))
    fast = msgspec.structs.replace(
        local_cpu(l2_bytes=32e6), flops_per_s={"fp32": 1e14}
    )  # so that only bytes count
    curve = fit_attention(rows, fast, kv_dtype="fp32")
    assert curve.bandwidth_efficiency * 1e10 == pytest.approx(8e9, rel=0.15)
    assert (
        curve.bandwidth_efficiency * curve.l2_bandwidth_ratio * 1e10
        == pytest.approx(50e9, rel=0.2)
    )


def test_a_gpus_matrix_product_curve_is_recovered():
    """Rows made by a known profile with 2 % noise: predictions on other shapes within 4 % on average, ceilings 5 %."""
    hw = load_hardware("h100")
    rows = grid(
        m=[1, 8, 64, 192, 512, 1024, 4096],
        n=[512, 2048, 8192, 28672],
        k=[512, 2048, 8192],
    )
    truth = gemm_time(
        hw, m=rows["m"], n=rows["n"], k=rows["k"], working_set_bytes="own"
    ).time_s
    curve = fit_gemm(rows | {"time_s": noisy(truth)}, hw)
    assert curve.bandwidth_efficiency == pytest.approx(
        hw.gemm.bandwidth_efficiency, rel=0.05
    )
    assert curve.flops_efficiency == pytest.approx(hw.gemm.flops_efficiency, rel=0.05)
    other = grid(m=[3, 100, 700], n=[1024, 5120], k=[1024, 14336])
    fitted = msgspec.structs.replace(hw, gemm=curve)
    ratio = gemm_time(fitted, **other).time_s / gemm_time(hw, **other).time_s
    assert np.mean(np.abs(ratio - 1)) < 0.04
    assert np.max(np.abs(ratio - 1)) < 0.1


def test_a_gpus_attention_curve_is_recovered():
    hw = load_hardware("h100")
    rows = grid(
        batch_size=[1, 4, 16, 64, 256],
        kv_len=[256, 1024, 4096, 16384, 65536],
        num_kv_heads=[1, 4, 8],
    )
    rows |= {"num_heads": rows["num_kv_heads"] * 4, "head_dim": np.full(75, 128.0)}
    names = {"batch_size": "batch"}
    shape = {names.get(name, name): values for name, values in rows.items()}
    truth = attention_time(hw, query_len=1, working_set_bytes="own", **shape).time_s
    curve = fit_attention(rows | {"time_s": noisy(truth)}, hw)
    fitted = msgspec.structs.replace(hw, attention=curve)
    other = {"batch": np.array([8, 32, 128]), "kv_len": np.array([2048, 30000, 7000])}
    heads = {"query_len": 1, "num_heads": 16, "num_kv_heads": 2, "head_dim": 128}
    ratio = (
        attention_time(fitted, **other, **heads).time_s
        / attention_time(hw, **other, **heads).time_s
    )
    assert np.max(np.abs(ratio - 1)) < 0.06


def test_an_all_reduce_curve_is_recovered_with_its_knee():
    hw = load_hardware("a100")
    rows = grid(tp_size=[2, 8], message_bytes=2.0 ** np.arange(8, 27))
    truth = all_reduce_time(
        hw, message_bytes=rows["message_bytes"], tp_size=rows["tp_size"]
    )
    curve = fit_allreduce(rows | {"time_s": noisy(truth)}, hw)
    assert curve.direct_bytes == hw.allreduce.direct_bytes
    fitted = msgspec.structs.replace(hw, allreduce=curve)
    sizes = 3.0 * 2.0 ** np.arange(8, 24)
    ratio = all_reduce_time(fitted, message_bytes=sizes, tp_size=4) / all_reduce_time(
        hw, message_bytes=sizes, tp_size=4
    )
    assert np.max(np.abs(ratio - 1)) < 0.12


def test_streaming_kernels_give_their_launch_cost_and_bandwidth():
    rows = grid(num_bytes=[1e3, 1e5, 1e6, 1e7, 1e8], num_kernels=[1, 4])
    rows["time_s"] = noisy(rows["num_bytes"] / 7e9 + rows["num_kernels"] * 4e-6)
    curve = fit_elementwise(rows, local_cpu())
    assert curve.overhead_s == pytest.approx(4e-6, rel=0.1)
    assert curve.bandwidth_efficiency * 1e10 == pytest.approx(7e9, rel=0.1)
    hw = msgspec.structs.replace(local_cpu(), elementwise=curve)
    assert float(elementwise_time(hw, num_bytes=7e8).time_s) == pytest.approx(
        0.1, rel=0.1
    )


def test_one_stalled_timing_among_many_does_not_move_the_fit():
    rows = grid(num_bytes=2.0 ** np.arange(12, 28))
    clean = rows["num_bytes"] / 7e9 + 4e-6
    stalled = clean.copy()
    stalled[5] *= 1000
    curve = fit_elementwise(rows | {"time_s": stalled}, local_cpu())
    assert curve.bandwidth_efficiency * 1e10 == pytest.approx(7e9, rel=0.05)


def test_too_few_rows_and_times_that_are_no_positive_numbers_are_refused():
    with pytest.raises(ConfigError, match="at least 3 rows"):
        fit_gemm({"m": [1], "n": [64], "k": [64], "time_s": [1e-5]}, local_cpu())
    for bad in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ConfigError, match="positive times"):
            fit_elementwise(
                {"num_bytes": [1e3, 1e4, 1e5], "time_s": [1e-6, 2e-6, bad]}, local_cpu()
            )


def test_more_than_twelve_parameters_are_a_bug():
    parameters = {f"p{index}": Free(prior=1.0) for index in range(MAX_PARAMETERS + 1)}
    with pytest.raises(ValueError, match="at most 12"):
        minimise(
            ElementwiseCurve(),
            parameters,
            lambda curve: np.ones(3),
            {"time_s": np.ones(3)},
        )


def test_a_cpu_whose_kernel_has_its_own_speed_per_number_of_rows_is_recovered() -> None:
    """Synthetic rows in which four query rows take no longer than three: the fit must not smooth that away."""
    hw = HardwareProfile(
        name="cpu",
        kind="cpu",
        memory_bytes=1e10,
        memory_bytes_per_s=4e10,
        flops_per_s={"fp32": 2e11},
    )
    factor = {1: 1.0, 2: 1.1, 3: 1.4, 4: 1.4, 5: 1.8}
    shapes = [
        (b, s, q) for b in (4, 8, 16, 32) for s in (1000, 2000, 4000) for q in factor
    ]
    batch, kv_len, query_len = (
        np.array(column, dtype=float) for column in zip(*shapes, strict=True)
    )
    seconds = (
        2
        * batch
        * kv_len
        * 6
        * 64
        * 4
        / 4e10
        * np.array([factor[int(q)] for q in query_len])
    )
    constant = {
        "num_heads": np.full(len(shapes), 6.0),
        "num_kv_heads": np.full(len(shapes), 6.0),
    }
    rows = {
        "batch_size": batch,
        "kv_len": kv_len,
        "query_len": query_len,
        "time_s": seconds,
        **constant,
    }
    curve = fit_attention(
        {**rows, "head_dim": np.full(len(shapes), 64.0)}, hw, kv_dtype="fp32"
    )
    assert len(curve.row_factors) == 5
    assert curve.fit.relative_error <= 0.05


@pytest.mark.parametrize("name", [
    "gemm_bf16", "decode_attention_bf16", "prefill_attention_bf16", "moe", "allreduce_bf16", "linear_attention",
    "linear_prefill", "indexer", "top_k", "sparse_attention",
])  # fmt: skip
def test_a_fit_begins_at_the_generic_curve_and_stays_there_where_rows_agree(name):
    """One generic value per constant: timings that the generic curve gives are fitted by it."""
    table, groups = read_table(
        Path(__file__).parents[1] / "data/kernels" / f"{name}.csv.gz"
    )
    key, rows = next(
        (key, rows)
        for key, rows in groups.items()
        if key.device in ("h100-sxm-80gb", "h200-sxm-141gb")
    )
    device = load_hardware(key.device)
    generic = type(curve_of(table, device, key.variant))()
    device = generic.placed(device, key.variant)
    rows = {column: values[:200] for column, values in rows.items()}
    rows["time_s"] = row_seconds(table, device, rows, key.variant)
    fitted = curve_of(
        table, refit(table, device, rows, variant=key.variant), key.variant
    )
    for constant in generic.__struct_fields__:
        value = getattr(generic, constant)
        if type(value) is float:
            assert getattr(fitted, constant) == pytest.approx(value, rel=1e-3), constant


def test_rows_of_weight_only_formats_compute_in_16_bits() -> None:
    """The kernels of int4 experts multiply in bf16; those of fp8 in fp8."""
    names = (
        "num_tokens",
        "hidden_size",
        "moe_intermediate_size",
        "tp_size",
        "num_experts",
        "num_experts_per_tok",
    )
    rows = {name: np.ones(2) for name in (*names, "is_balanced")}
    formats = {
        dtype: _of_rows(rows, dtype).compute_dtype
        for dtype in ("", "fp8", *WEIGHT_ONLY)
    }
    assert formats == {"": "bf16", "fp8": "fp8"} | dict.fromkeys(WEIGHT_ONLY, "bf16")
