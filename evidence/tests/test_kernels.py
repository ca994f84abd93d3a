"""Errors of kernels, what is refused, and the shipped profiles' error on a sample of published rows."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import numpy as np
import pytest

from evidence import DATA
from evidence.kernel_tables import TABLES, held_out, read_table, refit, select
from evidence.kernels import validate_kernels
from magicdec.errors import ConfigError
from magicdec.perfmodel.kernels.links import AllReduceCurve, Message, all_reduce_time
from magicdec.perfmodel.kernels.profile import load_hardware
from tests.kernels import gemm_time

SAMPLE = Path(__file__).parents[2] / "tests" / "data" / "kernels"
# Mean absolute percentage error to reach on shapes not fitted on
TARGETS = {
    "gemm": {
        "a100-sxm-80gb": 8,
        "h100-sxm-80gb": 7,
        "h200-sxm-141gb": 7,
        "b200-sxm-192gb": 10,
        "l40s-48gb": 12,
    },
    "gemm/fp8": {
        "h100-sxm-80gb": 11,
        "h200-sxm-141gb": 12,
        "b200-sxm-192gb": 16,
        "l40s-48gb": 17,
    },
    "gemm/fp8_block": {
        "h100-sxm-80gb": 9,
        "h200-sxm-141gb": 9,
        "b200-sxm-192gb": 14,
        "l40s-48gb": 10,
    },
    "gemm/nvfp4": {"b200-sxm-192gb": 11},
    "attention": {
        "a100-sxm-80gb": 7,
        "h100-sxm-80gb": 5,
        "h200-sxm-141gb": 5,
        "b200-sxm-192gb": 7,
        "l40s-48gb": 12,
    },
    "attention/fp8": {
        "h100-sxm-80gb": 7,
        "h200-sxm-141gb": 8,
        "b200-sxm-192gb": 9,
        "l40s-48gb": 14,
    },
    "latent": {
        "a100-sxm-80gb": 6,
        "h100-sxm-80gb": 6,
        "h200-sxm-141gb": 7,
        "b200-sxm-192gb": 9,
        "l40s-48gb": 6,
    },
    "latent/fp8": {
        "a100-sxm-80gb": 6,
        "h100-sxm-80gb": 7,
        "h200-sxm-141gb": 7,
        "b200-sxm-192gb": 10,
        "l40s-48gb": 6,
    },
    "prefill": {
        "a100-sxm-80gb": 10,
        "h100-sxm-80gb": 10,
        "h200-sxm-141gb": 10,
        "b200-sxm-192gb": 11,
        "l40s-48gb": 11,
    },
    "moe": {
        "a100-sxm-80gb": 19,
        "h100-sxm-80gb": 10,
        "h200-sxm-141gb": 10,
        "b200-sxm-192gb": 14,
        "l40s-48gb": 19,
    },
    "moe/fp8": {
        "h100-sxm-80gb": 14,
        "h200-sxm-141gb": 16,
        "b200-sxm-192gb": 15,
        "l40s-48gb": 25,
    },
    "moe/fp8_block": {
        "h100-sxm-80gb": 11,
        "h200-sxm-141gb": 11,
        "b200-sxm-192gb": 13,
        "l40s-48gb": 20,
    },
    "moe/mxfp4": {
        "h100-sxm-80gb": 11,
        "h200-sxm-141gb": 11,
        "b200-sxm-192gb": 19,
        "l40s-48gb": 20,
    },
    "moe/nvfp4": {"b200-sxm-192gb": 15},
    "linear": {
        "h100-sxm-80gb": 6,
        "h200-sxm-141gb": 6,
        "b200-sxm-192gb": 9,
        "l40s-48gb": 9,
    },
    "linear_prefill": {
        "h100-sxm-80gb": 6,
        "h200-sxm-141gb": 6,
        "b200-sxm-192gb": 4,
        "l40s-48gb": 12,
    },
    "indexer": {"h100-sxm-80gb": 6, "h200-sxm-141gb": 6, "b200-sxm-192gb": 9},
    "top_k/flat": {"h100-sxm-80gb": 13, "h200-sxm-141gb": 13, "b200-sxm-192gb": 13},
    "top_k/top_last": {"h100-sxm-80gb": 13, "h200-sxm-141gb": 13, "b200-sxm-192gb": 13},
    "sparse": {"h100-sxm-80gb": 9, "h200-sxm-141gb": 9, "b200-sxm-192gb": 12},
    # priced by the curve of ordinary attention; Ada's kernel reads a window for each query head
    "window": {
        "h100-sxm-80gb": 15,
        "h200-sxm-141gb": 15,
        "b200-sxm-192gb": 10,
        "l40s-48gb": 50,
    },
    "window/fp8": {
        "h100-sxm-80gb": 17,
        "h200-sxm-141gb": 20,
        "b200-sxm-192gb": 13,
        "l40s-48gb": 16,
    },
    "allreduce": {
        "a100-sxm-80gb": 6,
        "h100-sxm-80gb": 5,
        "h200-sxm-141gb": 4,
        "b200-sxm-192gb": 8,
        "l40s-48gb": 20,
    },
    "allreduce/sglang": dict.fromkeys(
        (
            "a100-sxm-80gb",
            "h100-sxm-80gb",
            "h200-sxm-141gb",
            "b200-sxm-192gb",
            "l40s-48gb",
        ),
        12,
    ),
    "allreduce/trtllm": dict.fromkeys(
        (
            "a100-sxm-80gb",
            "h100-sxm-80gb",
            "h200-sxm-141gb",
            "b200-sxm-192gb",
            "l40s-48gb",
        ),
        12,
    ),
    "allreduce/nccl": dict.fromkeys(
        ("a100-sxm-80gb", "h100-sxm-80gb", "l40s-48gb"), 12
    ),
}


def write(path: Path, header: str, *lines: str) -> Path:
    path.write_text("\n".join((header, *lines)) + "\n")
    return path


def test_the_shipped_profiles_are_within_the_targets_on_the_sample():
    groups = validate_kernels(sorted(SAMPLE.glob("*.csv.gz")), with_refit=False)[
        "groups"
    ]
    assert {group["name"] for group in groups} == {
        f"{device}/{kind}" for kind in TARGETS for device in TARGETS[kind]
    }
    for group in groups:
        device, kind = group["name"].split("/", 1)
        assert group["mape"] < TARGETS[kind][device] / 100, group
        assert group["num_parameters"] <= 12
        assert group["fitted_on"]
        if (
            not kind.startswith("allreduce")
            and group["mape_shipped_held_out"] is not None
        ):
            assert group["mape_shipped_held_out"] < TARGETS[kind][device] / 100


BLACKWELL = {"attention": 9, "gemm": 7, "gemm/fp8": 17, "gemm/nvfp4": 11}
"""Percent."""


def test_blackwell_devices_have_curves_of_their_own() -> None:
    """B300, GB200 and GB300 within these limits; the RTX PRO 6000, whose fp4 products are the worst, within twice."""
    groups = validate_kernels(
        sorted((SAMPLE / "blackwell").glob("*.csv.gz")), with_refit=False
    )["groups"]
    assert len(groups) == 20
    for group in groups:
        device, kind = group["name"].split("/", 1)
        limit = BLACKWELL[kind.replace("attention/fp8", "attention")] / 100
        if device == "rtx-pro-6000-96gb":
            limit = 2.0 * limit
        assert group["mape"] < limit, group
        assert not group["borrowed_from"]


@pytest.mark.parametrize(("file", "device", "limits"), [
    pytest.param("decode_attention_bf16", "a100-sxm-80gb", {"held_out": 0.105, "extrapolated": 0.14},
                 marks=pytest.mark.slow),
    ("gemm_bf16", "a100-sxm-80gb", {"held_out": 0.12, "extrapolated": 0.16}),
    pytest.param("mla_decode", "b200", {"extrapolated": 0.25}, marks=pytest.mark.slow),
    ("linear_attention", "h200", {"extrapolated": 0.2}),
    ("allreduce_bf16", "h100", {"8_from_2": 0.15}),
])  # fmt: skip
def test_the_form_predicts_shapes_and_sizes_it_was_not_fitted_on(
    tmp_path, file, device, limits
):
    """Refitted on the sample alone: shapes held out; longer contexts and larger products; of latent attention 128 heads
    from 64, and what several query tokens are to the kernel (of two kernels the one of narrow tiles is left above 32
    heads, without which the error was 37 and 68 %); of a recurrence nine states for eight tokens, of which the fit saw
    at most three; eight ranks from two."""
    lines = (
        gzip.decompress((SAMPLE / f"{file}.csv.gz").read_bytes()).decode().splitlines()
    )
    path = write(
        tmp_path / "one.csv", lines[0], *(line for line in lines if device in line)
    )
    groups = validate_kernels([path])["groups"]
    assert len(groups) == (2 if file == "mla_decode" else 1)
    for group in groups:
        assert {
            kind for kind, limit in limits.items() if group[f"mape_{kind}"] >= limit
        } == set()


def test_errors_are_means_over_the_rows_that_count(tmp_path):
    """Two rows, one of them outside n, k ≥ 512, with measured times set 10 % below and 50 % above the prediction."""
    hw = load_hardware("h100")
    first, second = (
        float(gemm_time(hw, m=8, n=size, k=4096, working_set_bytes="own").time_s) * 1e6
        for size in (4096, 256)
    )
    path = write(
        tmp_path / "two.csv",
        "device,m,n,k,latency_us",
        f"h100-sxm-80gb,8,4096,4096,{first / 0.9}",
        f"h100-sxm-80gb,8,256,4096,{second / 1.5}",
    )
    (group,) = validate_kernels([path])["groups"]
    assert group["rows"] == 1
    assert group["rows_all"] == 2
    assert group["mape"] == pytest.approx(0.1)
    assert group["mape_all"] == pytest.approx(0.3)
    assert group["mape_extrapolated"] is None


def test_a_group_without_rows_that_count_has_no_error(tmp_path):
    path = write(
        tmp_path / "small.csv", "device,m,n,k,latency_us", "h100,8,256,256,3.0"
    )
    (group,) = validate_kernels([path], with_refit=False)["groups"]
    assert group["rows"] == 0
    assert group["mape"] is None
    assert group["name"] == "h100/gemm"


def test_no_shape_is_on_both_sides_of_the_hold_out():
    for file in SAMPLE.glob("*.csv.gz"):
        table, by_group = read_table(file)
        for rows in by_group.values():
            mask = held_out(table, rows)
            shapes = list(zip(*(rows[name] for name in table.shape), strict=True))
            sides = [
                {shape for shape, out in zip(shapes, mask, strict=True) if out == side}
                for side in (True, False)
            ]
            assert not sides[0] & sides[1]
            assert all(sides) or len(set(shapes)) < 6


def test_an_unknown_device_is_named_with_the_file(tmp_path):
    path = write(
        tmp_path / "x.csv", "device,tp_size,message_bytes,latency_us", "h999,2,1024,5"
    )
    with pytest.raises(ConfigError, match=r"x\.csv: unknown hardware 'h999'"):
        validate_kernels([path])


@pytest.mark.parametrize("value", ["nan", "-3", "0", "fast", ""])
def test_a_value_that_is_not_a_positive_number_is_named_with_its_line(tmp_path, value):
    path = write(
        tmp_path / "x.csv",
        "device,m,n,k,latency_us",
        "h100,8,256,256,3.0",
        f"h100,8,256,256,{value}",
    )
    with pytest.raises(ConfigError, match=r"x\.csv: line 3: 'latency_us'"):
        validate_kernels([path])


def test_files_that_are_no_tables_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="known tables have"):
        validate_kernels([write(tmp_path / "x.csv", "a,b", "1,2")])
    with pytest.raises(ConfigError, match="cannot read"):
        validate_kernels([tmp_path / "missing.csv"])
    (tmp_path / "torn.csv.gz").write_bytes(
        gzip.compress(b"device,m,n,k,latency_us\n" * 1000)[:40]
    )
    with pytest.raises(ConfigError, match="torn"):
        validate_kernels([tmp_path / "torn.csv.gz"])


def test_what_counts_is_what_the_targets_are_stated_for():
    tables = {table.kind: table for table in TABLES}
    rows = {
        "m": np.array([1024, 1025, 1, 1]),
        "n": np.array([512, 512, 511, 512]),
        "k": np.array([512, 512, 512, 511]),
    }
    assert tables["gemm"].counted(rows).tolist() == [True, False, False, False]
    rows = {
        "kv_len": np.array([1024, 1023, 1024]),
        "batch_size": np.array([8, 8, 7]),
        "head_dim": np.full(3, 128),
    }
    assert tables["attention"].counted(rows).tolist() == [True, False, False]
    assert tables["allreduce"].counted(
        {"message_bytes": np.array([2**24, 2**24 + 1])}
    ).tolist() == [True, False]


def test_rows_of_an_unknown_device_leave_those_of_the_others(tmp_path):
    path = write(
        tmp_path / "x.csv",
        "device,tp_size,message_bytes,latency_us",
        "h999,4,1024,5",
        "h100,4,1024,5",
    )
    unknown, known = validate_kernels([path])["groups"]
    assert "h999" in unknown["refused"]
    assert unknown["mape"] is None
    assert known["mape"] == pytest.approx(0.1, abs=0.1)


def test_sums_of_more_than_two_boards_cross_one_bridge():
    """Four L40S, every second size left out of the fit in turn; and a board that nobody timed, to
    which the law that time goes with p - 1 is all that is known."""
    kernels = DATA / "kernels"
    table, of_devices = read_table(kernels / "allreduce_bf16.csv.gz")
    _, of_four = read_table(kernels / "allreduce_l40s_tp4.csv")
    (two_and_eight,) = (
        rows for key, rows in of_devices.items() if key.device == "l40s-48gb"
    )
    (four,) = of_four.values()
    bare = msgspec.structs.replace(load_hardware("l40s-48gb"), allreduce=None)
    is_even = np.arange(four["time_s"].size) % 2 == 0
    errors = []
    for is_known in (is_even, ~is_even):
        known = select(four, is_known)
        rows = {
            name: np.concatenate([two_and_eight[name], known[name]]) for name in known
        }
        fitted = refit(table, bare, rows)
        unseen = select(four, ~is_known)
        predicted = AllReduceCurve.of(fitted).table_seconds(
            fitted, table.work(unseen, "")
        )
        errors.append(np.abs(predicted / unseen["time_s"] - 1.0))
    assert np.concatenate(errors).mean() < 0.09
    untimed = load_hardware("a100-pcie-80gb")
    large = float(1 << 30)
    four_s, eight_s = all_reduce_time(untimed, Message(large, np.array([4.0, 8.0])))
    assert four_s == pytest.approx(431e-3, rel=0.1)  # as four L40S, on PCIe 4.0 too
    assert eight_s / four_s == pytest.approx(7 / 3, rel=1e-3)
