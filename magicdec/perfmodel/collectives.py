"""Seconds of a collective over the ranks of one node, or of several. 0 with one rank.

All-reduce of S bytes over p ranks, each with a link of B bytes/s per direction:

    direct, one-shot   a + (p-2)·r + (p-1)·S / (e1·B) + t·max(S/grid - 1, 0)     each rank reads all others' messages
    direct, two-shot   a + (p-2)·r + a2 + (p-2)·r2 + 2(p-1)/p·S / (e2·B)          reduce-scatter, then all-gather
    in the switch      a + (p-2)·r + a4 + (1+1/p)·S / (e4·B)                      NVSwitch adds and copies
    bulk               a + a3 + (p-2)·r3 + 2(p-1)/p·S / (e3·B·(p/2)^-x)
    ring               base + 2(p-1)·hop + 2(p-1)/p·S / (e·B·(p/2)^-x)            e = e2 for small messages, e3 for bulk

The direct kernels read peers' memory (vLLM's custom all-reduce, and the like) with a fixed grid of threads, which a
message larger than `grid` passes several times. They switch from one-shot to two-shot at fixed sizes (512 KiB up to 4
ranks, 256 KiB above; two ranks always one-shot) and hand over to the switch, or to a bulk algorithm, from
`direct_bytes` on: this is the knee. Without peer access (more than two ranks on PCIe) a ring is all there is; the fixed
part of its latency is the constant of NCCL's tuning model. Constants are shared by all p.

Over several nodes of q ranks, each with a network link of B_n bytes/s, a sum is made within the nodes, and that of each
rank's share across them by a ring, with NCCL's constants for a network (an estimate: nothing of it was measured):

    T(S, q) + base + 2(n-1)·hop + 2(n-1)/n·S / (q·B_n)         n nodes

Sending each token to the ranks of its k experts (or their outputs back), of S bytes per rank in all, over p ranks of
which q share the link:

    a + a_n + max(min(q, p)/p · S / (e·B), (1 − q/p) · S / (e_n·B_n))       a_n, and the second term, beyond q ranks

as measured by DeepEP's low-latency kernels, which send every copy on its own. Prefill's kernels send a token once to
each further node, n−1 of them, that holds any of its experts: (n−1)·(1 − (1 − 1/n)^k) copies instead of k·(1 − q/p).

Sending hidden states to the next stage of a pipeline: SEND_BASE_S, and their bytes over the link or the network.

Ignored: links shared with other traffic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from magicdec.perfmodel.arrays import Array, as_array
from magicdec.specs.hardware import AllReduceCurve, HardwareProfile
from magicdec.units import KIB

FEW_RANKS = 4
ONE_SHOT_BYTES = (512.0 * KIB, 256.0 * KIB)
"""Sizes from which the direct kernels are two-shot, up to `FEW_RANKS` and above."""
GRID_BYTES = 36 * 512 * 16
"""One pass of the direct kernel: blocks × threads × bytes per load (csrc/custom_all_reduce.cuh of vLLM)."""
RING_BASE_S = 6.6e-6
"""NCCL's latency of a ring with the low-latency protocol, before its hops (src/graph/tuning.cc of NCCL)."""

NETWORK_HOP_S = 2.7e-6
"""The same model's latency of one hop over a network."""

SEND_BASE_S = 1e-5
"""Latency of sending to one other rank: p2p_latency of aiconfigurator-core's system files, which calls it its own
correction."""


def _across_nodes(hw: HardwareProfile, size: Array, ranks: Array) -> Array:
    """What several nodes add to a sum; 0 within one, and where the network is not known."""
    rate, local = hw.link.between_nodes_bytes_per_s, float(hw.link.reach)
    if rate is None or ranks.max(initial=0.0) <= local:
        return np.zeros(())
    nodes = np.ceil(ranks / local)
    added = RING_BASE_S + 2.0 * (nodes - 1.0) * NETWORK_HOP_S + 2.0 * (nodes - 1.0) / nodes * size / (local * rate)
    across: Array = np.where(nodes > 1, added, 0.0)
    return across


def _inputs(message_bytes: Any, tp_size: Any) -> tuple[Array, Array]:
    size, ranks = np.broadcast_arrays(as_array(message_bytes), as_array(tp_size, least=1.0))
    return size, ranks


def all_reduce_time(hw: HardwareProfile, *, message_bytes: Any, tp_size: Any, kernels: str = "") -> Array:
    """Every rank holds `message_bytes` and gets the sum over `tp_size` ranks, with the `kernels` of an engine.

    No message takes longer than a larger one, which the library's next algorithm takes: a table of timed kernels may
    have such a hump (vLLM's on eight B200s: 26 us at 256 KiB, 17 us at 1 MiB), measured servers show none.
    """
    curve = hw.allreduce_curve(kernels)
    size, ranks = _inputs(message_bytes, tp_size)
    across = _across_nodes(hw, size, ranks)
    within = as_array(tp_size, least=1.0)
    if hw.link.between_nodes_bytes_per_s is not None:
        within = np.minimum(within, float(hw.link.reach))
    time = algorithm_time(hw, curve, message_bytes=size, tp_size=within)
    for switch in {*ONE_SHOT_BYTES, curve.direct_bytes, curve.direct_bytes_wide, curve.in_switch_bytes}:
        after = algorithm_time(hw, curve, message_bytes=switch, tp_size=within)
        time = np.where(size < switch, np.minimum(time, after), time)
    return time + across


def algorithm_time(hw: HardwareProfile, curve: AllReduceCurve, *, message_bytes: Any, tp_size: Any) -> Array:
    """Seconds in one node of the algorithm that the library takes for this size and number of ranks, as tables time
    it."""
    size, ranks = as_array(message_bytes), as_array(tp_size, least=1.0)
    link = hw.link.bytes_per_s
    others = ranks - 1.0
    two_way = 2.0 * others / ranks * size
    widening = (np.maximum(ranks, 2.0) / 2.0) ** curve.rank_exponent
    more = np.maximum(ranks - 2.0, 0.0)
    base = curve.overhead_s + curve.rank_overhead_s * more
    bulk_s = two_way * widening / (curve.bulk_efficiency * link)

    passes_s = curve.one_shot_pass_s * np.maximum(size / GRID_BYTES - 1.0, 0.0)
    one_shot = base + others * size / (curve.one_shot_efficiency * link) + passes_s
    two_shot = base + curve.two_shot_overhead_s + curve.two_shot_rank_overhead_s * more
    two_shot = two_shot + two_way / (curve.two_shot_efficiency * link)
    one_shot_bytes = np.where(ranks <= FEW_RANKS, *ONE_SHOT_BYTES)
    direct = np.where((ranks <= 2) | (size < one_shot_bytes), one_shot, two_shot)
    bulk = base + curve.bulk_overhead_s + curve.bulk_rank_overhead_s * more + bulk_s
    is_bulk = size >= np.where(ranks <= FEW_RANKS, curve.direct_bytes, curve.direct_bytes_wide)
    time = np.where(is_bulk, bulk, direct)
    if curve.in_switch_ranks is not None:
        added_s = (1.0 + 1.0 / ranks) * size / (curve.in_switch_efficiency * link)
        in_switch = (ranks >= curve.in_switch_ranks) & (size < curve.in_switch_bytes) & is_bulk
        time = np.where(in_switch, base + curve.in_switch_overhead_s + added_s, time)

    ring_s = np.where(is_bulk, bulk_s, two_way * widening / (curve.two_shot_efficiency * link))
    ring = RING_BASE_S + 2.0 * others * curve.ring_hop_s + ring_s
    time = np.where(ranks > max(curve.direct_ranks, 1), ring, time)
    result: Array = np.where(ranks > 1, time, 0.0)
    return result


def all_gather_time(hw: HardwareProfile, *, message_bytes: Any, tp_size: Any) -> Array:
    """Every rank ends with `message_bytes`, of which it held 1/tp_size. Half the traffic of a two-shot all-reduce.

    Not measured: the fixed cost is an all-reduce's, the bandwidth its bulk one.
    """
    return _one_way(hw, message_bytes, tp_size, share=lambda ranks: (ranks - 1.0) / ranks)


def broadcast_time(hw: HardwareProfile, *, message_bytes: Any, tp_size: Any) -> Array:
    """One rank sends `message_bytes` to all others, pipelined. Not measured; see all_gather_time."""
    return _one_way(hw, message_bytes, tp_size, share=lambda ranks: np.minimum(ranks - 1.0, 1.0))


def _one_way(hw: HardwareProfile, message_bytes: Any, tp_size: Any, *, share: Any) -> Array:
    curve, link = hw.allreduce_curve(), hw.link.bytes_per_s
    size, ranks = _inputs(message_bytes, tp_size)
    latency = all_reduce_time(hw, message_bytes=0.0, tp_size=ranks)
    latency = latency + (_across_nodes(hw, size, ranks) - _across_nodes(hw, np.zeros(()), ranks)) / 2.0
    widening = (np.maximum(ranks, 2.0) / 2.0) ** curve.rank_exponent
    result: Array = latency + np.where(ranks > 1, share(ranks) * size * widening / (curve.bulk_efficiency * link), 0.0)
    return result


def exchange_time(
    hw: HardwareProfile,
    *,
    tokens: Any,
    token_bytes: float,
    num_experts_per_tok: int,
    num_ranks: Any,
    once_per_node: bool = False,
) -> Array:
    """Every rank sends each of its `tokens` to the ranks of its experts; 0 with one rank. `once_per_node`: a token
    crosses to a further node once, however many of its experts are there (prefill)."""
    curve, link = hw.exchange_curve(), hw.link
    sent, ranks = np.broadcast_arrays(as_array(tokens) * token_bytes, as_array(num_ranks, least=1.0))
    near = np.minimum(link.reach, ranks) / ranks
    seconds = num_experts_per_tok * near * sent / (curve.link_efficiency * link.bytes_per_s)
    if link.between_nodes_bytes_per_s is not None:
        copies: Array = num_experts_per_tok * (1.0 - near)
        if once_per_node:
            nodes = np.ceil(ranks / link.reach)
            copies = np.minimum(copies, (nodes - 1.0) * (1.0 - (1.0 - 1.0 / nodes) ** num_experts_per_tok))
        network_s = copies * sent / (curve.network_efficiency * link.between_nodes_bytes_per_s)
        seconds = np.maximum(seconds, network_s) + np.where(near < 1, curve.network_overhead_s, 0.0)
    result: Array = np.where(ranks > 1, curve.overhead_s + seconds, 0.0)
    return result


def send_time(hw: HardwareProfile, *, message_bytes: Any, is_far: Any) -> Array:
    """One rank sends to another, over the network where `is_far`."""
    link = hw.link
    rate = np.where(is_far, link.between_nodes_bytes_per_s or link.bytes_per_s, link.bytes_per_s)
    seconds: Array = SEND_BASE_S + as_array(message_bytes) / rate
    return seconds
