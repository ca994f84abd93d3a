"""Collectives over several nodes, recomputed by hand, and how a plan says that they are an estimate."""

import numpy as np
import pytest

from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.plan.planner import plan
from magicdec.perfmodel.plan.request import PlanRequest
from tests.kernels import all_gather_time, all_reduce_time

H100 = load_hardware("h100-sxm-80gb")


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("size", [8192.0, 1e6, 1e8])
def test_a_sum_over_nodes_is_one_within_each_and_a_ring_across_them(nodes: int, size: float) -> None:
    """8 GPUs and 400 Gb/s per GPU; NCCL's ring over a network: 6.6 us, and 2.7 us per hop."""
    within = float(all_reduce_time(H100, message_bytes=size, tp_size=8))
    hops = 2 * (nodes - 1)
    ring = 6.6e-6 + hops * 2.7e-6 + hops / nodes * (size / 8) / 50e9
    assert float(all_reduce_time(H100, message_bytes=size, tp_size=8 * nodes)) == pytest.approx(within + ring)


def test_one_node_knows_no_network_and_more_nodes_take_longer() -> None:
    ranks = np.array([1, 2, 4, 8, 16, 32, 64])
    times = all_reduce_time(H100, message_bytes=1e6, tp_size=ranks)
    alone = [float(all_reduce_time(H100, message_bytes=1e6, tp_size=int(each))) for each in ranks]
    np.testing.assert_allclose(times, alone)
    assert np.all(np.diff(times[3:]) > 0)
    gathers = all_gather_time(H100, message_bytes=1e7, tp_size=ranks[3:])
    assert np.all(np.diff(gathers) > 0)


def test_a_plan_over_nodes_says_that_it_is_an_estimate_and_is_less_sure() -> None:
    case = {"model": "llama-3.1-70b", "hardware": ("h100-sxm-80gb",), "batch_sizes": (8,), "context_lens": (4096,)}
    one, two = (plan(PlanRequest(**case, tp_size=tp, draft="none")) for tp in (8, 16))
    assert any("spans nodes of 8" in note and "estimate" in note for note in two.notes)
    assert not any("nodes" in note for note in one.notes)
    width = [np.log(row.tpot_high_s / row.tpot_low_s) for row in (one.best, two.best)]
    assert width[1] > 1.2 * width[0]


def test_without_a_known_network_a_plan_says_so() -> None:
    document = plan(
        PlanRequest(model="llama-3.1-70b", hardware=("h100-pcie-80gb",), tp_size=16, batch_sizes=(8,), draft="none")
    )
    assert any("is not known" in note and "between_nodes_bytes_per_s" in note for note in document.notes)
