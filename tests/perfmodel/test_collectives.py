"""Collective times: limits of the link, the published all-reduce rows, and several nodes recomputed by hand."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.perfmodel.kernels.links import AllReduceCurve, Message, all_reduce
from magicdec.perfmodel.kernels.op import Where
from magicdec.perfmodel.kernels.profile import hardware_names, load_hardware
from magicdec.perfmodel.plan.request import PlanRequest
from magicdec.perfmodel.planner import make_plan
from magicdec.specs.engine import load_engine
from magicdec.specs.precision import Precision
from tests.kernels import all_gather_time, all_reduce_time, broadcast_time

devices = st.sampled_from(sorted(hardware_names()))
number = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True), st.integers(-5, 2**40)
)


@given(devices, number, number)
def test_times_are_finite_and_not_negative_for_any_input(device, size, ranks):
    hw = load_hardware(device)
    for function in (all_reduce_time, all_gather_time, broadcast_time):
        time = function(hw, message_bytes=size, tp_size=ranks)
        assert np.isfinite(time)
        assert time >= 0
        assert float(function(hw, message_bytes=1e9, tp_size=1)) == 0.0


@given(devices, st.sampled_from([2, 4, 8]), st.integers(2**16, 2**30))
def test_an_all_reduce_is_never_faster_than_the_link(device, ranks, size):
    """Each rank must send and receive (p-1)/p of the message twice, half of it in each direction at a time."""
    hw = load_hardware(device)
    least = (ranks - 1) / ranks * size / hw.link.bytes_per_s
    assert float(all_reduce_time(hw, message_bytes=size, tp_size=ranks)) > least


@pytest.mark.parametrize(("device", "ranks", "size", "microseconds", "near"), [
    ("a100-sxm-80gb", 8, 1024, 5.8, 0.1), ("a100-sxm-80gb", 8, 2**20, 21.7, 0.1),
    ("a100-sxm-80gb", 2, 2**23, 89.7, 0.1), ("h100-sxm-80gb", 8, 2**20, 14.8, 0.1),
    ("h200-sxm-141gb", 2, 2**22, 20.4, 0.1), ("b200-sxm-192gb", 8, 2**22, 26.3, 0.1),
    ("l40s-48gb", 2, 2**20, 60.2, 0.1), ("l40s-48gb", 8, 2**22, 4014.0, 0.1),
    ("b200", 4, 2**19, 17, 0.2), ("b200", 4, 2**20, 18, 0.2),
])  # fmt: skip
def test_published_all_reduces_are_met(device, ranks, size, microseconds, near):
    """The last two are of another harness, rounded to 1 us (https://github.com/vllm-project/vllm/pull/24111)."""
    time = float(
        all_reduce_time(load_hardware(device), message_bytes=size, tp_size=ranks)
    )
    assert time * 1e6 == pytest.approx(microseconds, rel=near)


def test_bulk_bandwidth_of_an_all_gather_is_about_twice_an_all_reduces():
    hw = load_hardware("h100")
    gather, reduce = (
        float(f(hw, message_bytes=2**30, tp_size=8))
        for f in (all_gather_time, all_reduce_time)
    )
    assert reduce / gather == pytest.approx(2, rel=0.05)


def test_more_than_two_ranks_on_pcie_are_a_ring_with_a_latency_per_hop():
    hw = load_hardware("l4")
    two, four, eight = (
        float(all_reduce_time(hw, message_bytes=256, tp_size=ranks))
        for ranks in (2, 4, 8)
    )
    assert two < four < eight
    hop = AllReduceCurve.of(hw).ring_hop_s
    assert eight - four == pytest.approx(8 * hop, rel=0.05)


def test_without_measurements_the_link_latency_is_paid():
    hw = msgspec.structs.replace(load_hardware("mi300x"), allreduce=None)
    slow = msgspec.structs.replace(
        hw, link=msgspec.structs.replace(hw.link, latency_s=hw.link.latency_s + 5e-6)
    )
    quick, late = (
        float(all_reduce_time(profile, message_bytes=1024, tp_size=4))
        for profile in (hw, slow)
    )
    assert late - quick == pytest.approx(5e-6)


@pytest.mark.parametrize("device", ["a100", "h100", "h200", "b200"])
@pytest.mark.parametrize("size", [2**10, 2**16, 2**17])
def test_one_kernel_takes_longer_with_more_ranks(device, size):
    """Up to 128 KiB all three run the one-shot kernel."""
    hw = load_hardware(device)
    two, four, eight = (
        float(all_reduce_time(hw, message_bytes=size, tp_size=ranks))
        for ranks in (2, 4, 8)
    )
    assert two < four < eight


def test_the_switch_adds_long_messages_of_enough_ranks():
    """Hopper: with eight ranks from 256 KiB to 64 MiB; with two never."""
    hw = load_hardware("h100")
    without = msgspec.structs.replace(
        hw, allreduce=msgspec.structs.replace(hw.allreduce, in_switch_ranks=None)
    )
    sizes = np.array([2.0**17, 2.0**18, 2.0**22, 2.0**25, 2.0**26])
    for ranks, uses in ((2, []), (8, [2**18, 2**22, 2**25])):
        times, others = (
            all_reduce_time(profile, message_bytes=sizes, tp_size=ranks)
            for profile in (hw, without)
        )
        assert sizes[times != others].tolist() == uses


def test_sizes_at_which_the_algorithm_changes_are_whole_powers_of_two():
    """They are constants of the library; a rounded one would put the message of that very size on the wrong side."""
    for device in ("a100", "h100", "h200", "b200", "l40s"):
        curve = load_hardware(device).allreduce
        for size in (
            curve.direct_bytes,
            curve.direct_bytes_wide,
            curve.in_switch_bytes,
        ):
            assert np.log2(size) % 1 == 0, device


@pytest.mark.parametrize("device", hardware_names())
def test_no_message_takes_longer_than_a_larger_one(device):
    """400 sizes from 1 KiB to 1 GiB, by each engine's kernels, on 2 to 16 ranks."""
    hw = load_hardware(device)
    sizes, ranks = np.meshgrid(
        2.0 ** np.linspace(10, 30, 400), np.arange(2.0, 17.0), indexing="ij"
    )
    for kernels in ("", *hw.allreduce_engines):
        time = all_reduce_time(hw, message_bytes=sizes, tp_size=ranks, kernels=kernels)
        assert np.all(np.diff(time, axis=0) >= 0), kernels


H100 = load_hardware("h100-sxm-80gb")


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("size", [8192.0, 1e6, 1e8])
def test_a_sum_over_nodes_is_one_within_each_and_a_ring_across_them(
    nodes: int, size: float
) -> None:
    """8 GPUs and 400 Gb/s per GPU; NCCL's ring over a network: 6.6 us, and 2.7 us per hop."""
    within = float(all_reduce_time(H100, message_bytes=size, tp_size=8))
    hops = 2 * (nodes - 1)
    ring = 6.6e-6 + hops * 2.7e-6 + hops / nodes * (size / 8) / 50e9
    assert float(
        all_reduce_time(H100, message_bytes=size, tp_size=8 * nodes)
    ) == pytest.approx(within + ring)


def test_one_node_knows_no_network_and_more_nodes_take_longer() -> None:
    ranks = np.array([1, 2, 4, 8, 16, 32, 64])
    times = all_reduce_time(H100, message_bytes=1e6, tp_size=ranks)
    alone = [
        float(all_reduce_time(H100, message_bytes=1e6, tp_size=int(each)))
        for each in ranks
    ]
    np.testing.assert_allclose(times, alone)
    assert np.all(np.diff(times[3:]) > 0)
    gathers = all_gather_time(H100, message_bytes=1e7, tp_size=ranks[3:])
    assert np.all(np.diff(gathers) > 0)


def test_a_plan_over_nodes_says_that_it_is_an_estimate_and_is_less_sure() -> None:
    case = {
        "model": "llama-3.1-70b",
        "hardware": ("h100-sxm-80gb",),
        "batch_sizes": (8,),
        "context_lens": (4096,),
    }
    one, two = (
        make_plan(PlanRequest(**case, tp_size=tp, draft="none")) for tp in (8, 16)
    )
    assert any("spans nodes of 8" in note and "estimate" in note for note in two.notes)
    assert not any("nodes" in note for note in one.notes)
    width = [
        np.log(row.decoding.tpot_high_s / row.decoding.tpot_low_s)
        for row in (one.best, two.best)
    ]
    assert width[1] > 1.2 * width[0]


def test_without_a_known_network_a_plan_says_so() -> None:
    document = make_plan(
        PlanRequest(
            model="llama-3.1-70b",
            hardware=("h100-pcie-80gb",),
            tp_size=16,
            batch_sizes=(8,),
            draft="none",
        )
    )
    assert any(
        "is not known" in note and "between_nodes_bytes_per_s" in note
        for note in document.notes
    )


@pytest.mark.parametrize(("device", "ranks", "times"), [
    ("h100-sxm-80gb", 2, 1.0), ("h100-sxm-80gb", 8, 1.125), ("a100-sxm-80gb", 8, 1.75),
])  # fmt: skip
def test_no_factor_of_an_engine_makes_an_all_reduce_faster_than_its_link(
    device, ranks, times
):
    """A rank sends (p-1)/p of the message twice; where the switch adds, the message and 1/p of it."""
    engine = load_engine("vllm").with_constants(
        {"kernels.collective_factor": 1e-9, "overheads.collective_overhead_s": 0.0}
    )
    hw = load_hardware(device)
    op = all_reduce(Where(hw, engine, Precision()), Message(1e9, float(ranks)))
    assert float(op.time_s) == pytest.approx(times * 1e9 / hw.link.bytes_per_s)
