"""Seconds of a collective over the ranks of one node, or of several. 0 with one rank.

All-reduce of S bytes over p ranks, each with a link of B bytes/s per direction:

    direct, one-shot   a + (p-2)·r + (p-1)·S / (e1·B) + t·max(S/grid - 1, 0)     each rank reads all others' messages
    direct, two-shot   a + (p-2)·r + a2 + (p-2)·r2 + 2(p-1)/p·S / (e2·B)          reduce-scatter, then all-gather
    in the switch      a + (p-2)·r + a4 + (1+1/p)·S / (e4·B)                      NVSwitch adds and copies
    bulk               a + a3 + (p-2)·r3 + 2(p-1)/p·S / (e3·B·(p/2)^-x)
    ring               base + 2(p-1)·hop + 2(p-1)/p·S / (e·B·(p/2)^-x)            e = e2 for small messages, e3 for bulk

The direct kernels (vLLM's custom all-reduce, and the like) read peers' memory with a fixed grid of
threads; they turn two-shot at fixed sizes (two ranks never), and hand over to the switch or a bulk
algorithm from `direct_bytes` on. Without peer access (more than two ranks on PCIe) a ring is all
there is, whose traffic crosses one bridge: x is about 1, so its time goes with p − 1. Constants are
shared by all p. Over n nodes of q ranks, each with a network link of B_n bytes/s (an estimate with
NCCL's constants: nothing of it was measured):

    T(S, q) + base + 2(n-1)·hop + 2(n-1)/n·S / (q·B_n)

Sending each token to the ranks of its k experts (or their outputs back), S bytes per rank in all,
over p ranks of which q share the link, as DeepEP's low-latency kernels do, which send every copy on
its own (those of prefill a token once to each further node, (n−1)·(1 − (1 − 1/n)^k) copies instead
of k·(1 − q/p)):

    a + a_n + max(min(q, p)/p · S / (e·B), (1 − q/p) · S / (e_n·B_n))       a_n, and the second term, beyond q ranks

Ignored: links shared with other traffic.
"""

from typing import Annotated, Any, ClassVar, NamedTuple, Self

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.fitting import Free
from magicdec.perfmodel.kernels.base import (
    Curve,
    FittedCurve,
    KernelTable,
    Parameters,
    Rows,
    as_array,
    minimise,
    that_matter,
    unmeasured,
    with_fit,
)
from magicdec.perfmodel.kernels.op import Cost, Op, Where, fixed
from magicdec.specs.device import Device
from magicdec.units import KIB, MIB

FEW_RANKS = 4
ONE_SHOT_BYTES = (512.0 * KIB, 256.0 * KIB)
"""Sizes from which the direct kernels are two-shot, up to `FEW_RANKS` and above."""
GRID_BYTES = 36 * 512 * 16
"""One pass of the direct kernel: blocks × threads × bytes per load (csrc/custom_all_reduce.cuh of
vLLM).
"""
RING_BASE_S = 6.6e-6
"""NCCL's latency of a ring with the low-latency protocol, before its hops (src/graph/tuning.cc of
NCCL).
"""
NETWORK_HOP_S = 2.7e-6
"""Latency of one hop over a network, by the same model."""
SEND_BASE_S = 1e-5
"""Latency of sending to one other rank: p2p_latency of aiconfigurator-core's system files, which
calls it its own correction."""
KERNEL_LAUNCH_S = 4e-6
RING_EXPONENT = 1.0
"""Generic `AllReduceCurve.rank_exponent` of a ring over PCIe: 1 GiB takes 431 and 961 ms on four and
eight L40S, as 3 to 7 (aiconfigurator-core 0.12.0)."""
RING_EFFICIENCY = 0.25
"""Generic `AllReduceCurve.ring_efficiency`, likewise: half of what two ranks reach."""
RINGS = ("pcie", "shared-memory")
"""Links without access to peers' memory."""
SWITCH_SIZES = tuple(float(2**power) for power in range(20, 26))
MAX_ALL_REDUCE_BYTES = 16 * MIB


class Message(NamedTuple):
    """`message_bytes` that every one of `ranks` holds, or ends with."""

    message_bytes: Any
    ranks: Any


class AllReduceCurve(FittedCurve, frozen=True, kw_only=True):
    """Time of one all-reduce over the ranks of a node."""

    key: ClassVar[str] = "allreduce"
    variants_key: ClassVar[str] = "allreduce_engines"
    borrowed_errors: ClassVar[tuple[float, float]] = (0.15, 0.6)
    """Between H100 and H200, and B200, B300 and GB300 0.04 to 0.13; between others 0.3 to 1.2."""
    tables: ClassVar[tuple[KernelTable, ...]] = (
        KernelTable(
            kind="allreduce",
            columns=("tp_size", "message_bytes"),
            shape=("message_bytes",),
            variant="kernel",
            work=lambda rows, _: Message(rows["message_bytes"], rows["tp_size"]),
            counted=lambda rows: rows["message_bytes"] <= MAX_ALL_REDUCE_BYTES,
            is_near=lambda rows: rows["tp_size"] <= 2,
            near_name="mape_8_from_2",
            other_weight=0.2,
            least_rows=18,
        ),
    )
    direct_ranks: int = 8
    """Up to this many ranks read each other's memory in one kernel; more (or no peer access) use a
    ring.
    """
    overhead_s: Annotated[float, Free(spread=1.0)] = 5e-6
    rank_overhead_s: Annotated[float, Free()] = 1e-7
    one_shot_efficiency: Annotated[float, Free()] = 0.6
    one_shot_pass_s: Annotated[float, Free(spread=1.5)] = 1e-7
    """Each further pass of the direct kernel's grid over a long message."""
    two_shot_overhead_s: Annotated[float, Free()] = 6e-6
    two_shot_rank_overhead_s: float = 5e-7
    two_shot_efficiency: Annotated[float, Free()] = 0.6
    direct_bytes: float = 8388608.0
    """Messages of at least this many bytes use the bulk algorithm."""
    direct_bytes_wide: float = 8388608.0
    """Messages of at least this many bytes use the bulk algorithm on more than four ranks."""
    in_switch_ranks: int | None = None
    """From this number of ranks on, the switch adds messages too large for the direct kernels
    (NVLS); None: never.
    """
    in_switch_bytes: float = 67108864.0
    """Up to this size."""
    in_switch_overhead_s: Annotated[float, Free()] = 5e-6
    in_switch_efficiency: Annotated[float, Free()] = 0.5
    bulk_overhead_s: Annotated[float, Free(spread=1.0)] = 2e-5
    bulk_rank_overhead_s: Annotated[float, Free()] = 1e-6
    bulk_efficiency: Annotated[float, Free()] = 0.65
    rank_exponent: Annotated[float, Free(spread=0.3, scale="linear")] = 0.0
    """Bulk and ring bandwidth fall as (ranks/2) to this power (below 0: they rise)."""
    ring_hop_s: float = 1.3e-6
    ring_efficiency: float | None = None
    """Share of the link's bandwidth that a ring of more than `direct_ranks` gets for bulk messages;
    None: `bulk_efficiency`, which two ranks with peer access reach too."""

    def unfitted(self) -> "AllReduceCurve":
        """A curve with these algorithms for these ranks and sizes, without fitted constants."""
        kept = (
            "library",
            "direct_ranks",
            "direct_bytes",
            "direct_bytes_wide",
            "in_switch_ranks",
            "in_switch_bytes",
        )
        return AllReduceCurve(**{name: getattr(self, name) for name in kept})

    @classmethod
    def of(cls, hw: Device, variant: str = "") -> Self:
        """An engine's own kernels where they were measured, else vLLM's, else generic ones."""
        known = cls.known(hw, variant)
        if known is not None:
            return known
        overhead_s = KERNEL_LAUNCH_S + hw.link.latency_s
        if hw.link.topology not in RINGS:
            return cls(overhead_s=overhead_s)
        ring = cls(
            library="generic ring",
            direct_ranks=2,
            rank_exponent=RING_EXPONENT,
            overhead_s=overhead_s,
        )
        if hw.link.topology == "shared-memory":  # no bridge but the memory itself
            return ring
        return msgspec.structs.replace(
            ring,
            two_shot_efficiency=RING_EFFICIENCY,
            ring_efficiency=RING_EFFICIENCY,
        )

    @classmethod
    def may_borrow(cls, hw: Device, donor: Device, variant: str) -> bool:
        return hw.link.topology == donor.link.topology

    def table_seconds(self, hw: Device, work: Message) -> Array:
        """Seconds in one node of the algorithm that the library takes for this size and number of
        ranks.
        """
        size = as_array(work.message_bytes)
        ranks = as_array(work.ranks, least=1.0)
        link = hw.link.bytes_per_s
        others = ranks - 1.0
        two_way = 2.0 * others / ranks * size
        widening = (np.maximum(ranks, 2.0) / 2.0) ** self.rank_exponent
        more = np.maximum(ranks - 2.0, 0.0)
        base = self.overhead_s + self.rank_overhead_s * more
        bulk_s = two_way * widening / (self.bulk_efficiency * link)

        passes_s = self.one_shot_pass_s * np.maximum(size / GRID_BYTES - 1.0, 0.0)
        one_shot = base + others * size / (self.one_shot_efficiency * link) + passes_s
        two_shot = (
            base + self.two_shot_overhead_s + self.two_shot_rank_overhead_s * more
        )
        two_shot = two_shot + two_way / (self.two_shot_efficiency * link)
        one_shot_bytes = np.where(ranks <= FEW_RANKS, *ONE_SHOT_BYTES)
        direct = np.where((ranks <= 2) | (size < one_shot_bytes), one_shot, two_shot)
        bulk = base + self.bulk_overhead_s + self.bulk_rank_overhead_s * more + bulk_s
        is_bulk = size >= np.where(
            ranks <= FEW_RANKS, self.direct_bytes, self.direct_bytes_wide
        )
        time = np.where(is_bulk, bulk, direct)
        if self.in_switch_ranks is not None:
            added_s = (1.0 + 1.0 / ranks) * size / (self.in_switch_efficiency * link)
            in_switch = (
                (ranks >= self.in_switch_ranks)
                & (size < self.in_switch_bytes)
                & is_bulk
            )
            time = np.where(in_switch, base + self.in_switch_overhead_s + added_s, time)

        ring_efficiency = np.where(
            is_bulk,
            self.ring_efficiency or self.bulk_efficiency,
            self.two_shot_efficiency,
        )
        ring_s = two_way * widening / (ring_efficiency * link)
        ring = RING_BASE_S + 2.0 * others * self.ring_hop_s + ring_s
        time = np.where(ranks > max(self.direct_ranks, 1), ring, time)
        return np.where(ranks > 1, time, 0.0)

    def refitted(
        self,
        hw: Device,
        work: Message,
        rows: Rows,
        *,
        fitted_on: str = "",
        rotated: bool = False,
        is_own: bool = False,
    ) -> Self:
        """If `is_own`, the ranges of sizes of this curve's algorithms are known, and constants that
        no row depends on stay as they are. Else more than two ranks are a ring where there is no
        peer access (PCIe, shared memory), and the size at which the bulk algorithm takes over is
        searched on powers of two, apart for up to four ranks and for more where both are direct."""
        is_ring = hw.link.topology in RINGS
        if is_ring:
            parameters = RING
        else:
            parameters = self.free()

        def predict(curve: Self) -> Array:
            return curve.table_seconds(hw, work)

        def fit(curve: Self) -> tuple[Self, float, int]:
            free = that_matter(parameters, curve, predict)
            return *minimise(curve, free, predict, rows), len(free)

        if is_own:
            curve, _, num_free = fit(self)
            return with_fit(curve, num_free, rows, predict(curve), fitted_on)
        is_few = as_array(work.ranks) <= FEW_RANKS
        pairs = [(size, size) for size in SWITCH_SIZES]
        if is_few.any() and not is_few.all() and not is_ring:
            pairs = [(few, wide) for few in SWITCH_SIZES for wide in SWITCH_SIZES]
        direct_ranks = 8
        if is_ring:
            direct_ranks = 2
        fits = []
        for few, wide in pairs:
            start = type(self)(
                library=self.library,
                direct_ranks=direct_ranks,
                direct_bytes=few,
                direct_bytes_wide=wide,
            )
            fits.append(fit(start))
        curve, _, num_free = min(fits, key=lambda fitted: fitted[1])
        return with_fit(curve, num_free + 2, rows, predict(curve), fitted_on)


RING: Parameters = {
    "overhead_s": Free(spread=1.0), "one_shot_efficiency": Free(), "two_shot_efficiency": Free(),
    "bulk_overhead_s": Free(spread=1.0), "bulk_efficiency": Free(),
    "rank_exponent": Free(prior=RING_EXPONENT, spread=0.3, scale="linear"), "ring_hop_s": Free(),
    "ring_efficiency": Free(prior=RING_EFFICIENCY),
}  # fmt: skip


class ExchangeCurve(Curve, frozen=True, kw_only=True):
    """Time of sending tokens to the ranks of their experts, or back. The defaults are those of
    Hopper on InfiniBand.
    """

    key: ClassVar[str] = "exchange"
    overhead_s: float = 1.2e-5
    link_efficiency: float = 0.6
    """Share of the link's bandwidth, for what stays among the devices that it joins."""
    network_overhead_s: float = 1.2e-5
    """Added fixed time where there are further ones."""
    network_efficiency: float = 0.9
    """Share of the network's bandwidth."""

    @classmethod
    def may_borrow(cls, hw: Device, donor: Device, variant: str) -> bool:
        return False


def _across_nodes(hw: Device, size: Array, ranks: Array) -> Array:
    """Seconds that several nodes add to a sum; 0 within one, and where the network is not known."""
    rate = hw.link.between_nodes_bytes_per_s
    local = float(hw.link.reach)
    if rate is None or ranks.max(initial=0.0) <= local:
        return np.zeros(())
    nodes = np.ceil(ranks / local)
    others = nodes - 1.0
    latency_s = RING_BASE_S + 2.0 * others * NETWORK_HOP_S
    moved_s = 2.0 * others / nodes * size / (local * rate)
    return np.where(nodes > 1, latency_s + moved_s, 0.0)


def _inputs(work: Message) -> tuple[Array, Array]:
    size = as_array(work.message_bytes)
    ranks = as_array(work.ranks, least=1.0)
    size, ranks = np.broadcast_arrays(size, ranks)
    return size, ranks


def all_reduce_time(hw: Device, work: Message, kernels: str = "") -> Array:
    """Every rank gets the sum over all ranks, with the `kernels` of an engine.

    No message takes longer than a larger one, which the library's next algorithm takes: a table of
    timed kernels may have such a hump (vLLM's on eight B200s: 26 us at 256 KiB, 17 us at 1 MiB),
    measured servers show none.
    """
    curve = AllReduceCurve.of(hw, kernels)
    size, ranks = _inputs(work)
    if ranks.max(initial=1.0) <= 1.0:
        return np.zeros(size.shape)
    across = _across_nodes(hw, size, ranks)
    within = as_array(work.ranks, least=1.0)
    if hw.link.between_nodes_bytes_per_s is not None:
        within = np.minimum(within, float(hw.link.reach))
    time = curve.table_seconds(hw, Message(size, within))
    # one call for all sizes at which the algorithm changes, on an axis before the others
    switches = np.reshape(
        [
            *ONE_SHOT_BYTES,
            curve.direct_bytes,
            curve.direct_bytes_wide,
            curve.in_switch_bytes,
        ],
        (-1, *[1] * size.ndim),
    )
    after = curve.table_seconds(hw, Message(switches, within))
    larger = np.where(size < switches, after, np.inf).min(axis=0)
    return np.asarray(np.minimum(time, larger)) + across


def one_way_time(hw: Device, work: Message, *, is_broadcast: bool = False) -> Array:
    """Every rank ends with `message_bytes`, having held 1/ranks of them; in a broadcast one rank
    sends them to all others, pipelined. Not measured: the fixed cost is an all-reduce's, the
    bandwidth its bulk one."""
    curve = AllReduceCurve.of(hw)
    link = hw.link.bytes_per_s
    size, ranks = _inputs(work)
    if is_broadcast:
        share = np.minimum(ranks - 1.0, 1.0)
    else:
        share = (ranks - 1.0) / ranks
    latency = all_reduce_time(hw, Message(0.0, ranks))
    latency = (
        latency
        + (_across_nodes(hw, size, ranks) - _across_nodes(hw, np.zeros(()), ranks))
        / 2.0
    )
    widening = (np.maximum(ranks, 2.0) / 2.0) ** curve.rank_exponent
    return latency + np.where(
        ranks > 1,
        share * size * widening / (curve.bulk_efficiency * link),
        0.0,
    )


EXCHANGE_ERROR = 0.15
"""Least relative error of sending tokens to their experts: of the fits, with each number of ranks
left out in turn.
"""


class Exchange(NamedTuple):
    """Each of a rank's `tokens` sent to the ranks of its experts. `once_per_node`: it crosses to a
    further node once, however many of its experts are there (prefill)."""

    tokens: Any
    num_experts_per_tok: int
    num_ranks: Any
    once_per_node: bool = False


def exchange_time(hw: Device, work: Exchange, token_bytes: float) -> Array:
    """Every rank sends its tokens, of `token_bytes` each; 0 with one rank."""
    curve = ExchangeCurve.of(hw)
    link = hw.link
    chosen = work.num_experts_per_tok
    sent = as_array(work.tokens) * token_bytes
    sent, ranks = np.broadcast_arrays(sent, as_array(work.num_ranks, least=1.0))
    near = np.minimum(link.reach, ranks) / ranks
    seconds = chosen * near * sent / (curve.link_efficiency * link.bytes_per_s)
    if link.between_nodes_bytes_per_s is not None:
        copies: Array = chosen * (1.0 - near)
        if work.once_per_node:
            nodes = np.ceil(ranks / link.reach)
            chosen_there = 1.0 - (1.0 - 1.0 / nodes) ** chosen
            copies = np.minimum(copies, (nodes - 1.0) * chosen_there)
        network_s = (
            copies * sent / (curve.network_efficiency * link.between_nodes_bytes_per_s)
        )
        network_overhead_s = np.where(near < 1, curve.network_overhead_s, 0.0)
        seconds = np.maximum(seconds, network_s) + network_overhead_s
    return np.where(ranks > 1, curve.overhead_s + seconds, 0.0)


def _sent(
    name: str,
    at: Where,
    work: Message,
    seconds: Array,
    *,
    kernels: str = "",
    wire: Any = 1.0,
    count: Any = 1.0,
) -> Op:
    """`count` collectives, with an engine's factor and fixed cost on each; its payload counts
    beyond one rank. No factor makes one faster than a rank's link moves `wire` times the
    message."""
    size, ranks = (np.asarray(value, dtype=np.float64) for value in work)
    wire_s = wire * size / at.hw.link.bytes_per_s
    least_s = np.minimum(seconds, np.where(ranks > 1, wire_s, 0.0))
    seconds = np.maximum(at.engine.kernels.collective_factor * seconds, least_s)
    overhead_s = np.where(ranks > 1, at.engine.overheads.collective_overhead_s, 0.0)
    seconds = count * (seconds + overhead_s)
    cost = Cost(collective_bytes=np.where(ranks > 1, size * count, 0.0))
    basis = AllReduceCurve.basis(at.hw, "all-reduce", work, kernels)
    if name != "all_reduce":
        basis = msgspec.structs.replace(basis, kernel=name, source="carried over")
    return fixed(name, "link", seconds, cost, least_s=count * least_s, bases=(basis,))


def all_reduce(at: Where, work: Message, *, count: Any = 1.0) -> Op:
    ranks = as_array(work.ranks, least=1.0)
    kernels = at.engine.kernels.allreduce_kernels
    wire = 2.0 - 2.0 / ranks
    in_switch = AllReduceCurve.of(at.hw, kernels).in_switch_ranks
    if in_switch is not None:
        through_switch = np.minimum(wire, 1.0 + 1.0 / ranks)
        wire = np.where(ranks >= in_switch, through_switch, wire)
    seconds = all_reduce_time(at.hw, work, kernels)
    return _sent(
        "all_reduce", at, work, seconds, kernels=kernels, wire=wire, count=count
    )


def all_gather(at: Where, work: Message) -> Op:
    wire = 1.0 - 1.0 / as_array(work.ranks, least=1.0)
    return _sent("all_gather", at, work, one_way_time(at.hw, work), wire=wire)


def broadcast(at: Where, work: Message) -> Op:
    return _sent("broadcast", at, work, one_way_time(at.hw, work, is_broadcast=True))


def exchange(
    at: Where,
    work: Exchange,
    *,
    hidden_size: int,
    dispatch_element: float,
    count: Any,
) -> list[Op]:
    """`count` times: each of a rank's tokens sent to the ranks of its experts, and their outputs
    back in 16 bits.
    """
    found = []
    for name, element in (("dispatch", dispatch_element), ("combine", 2.0)):
        token_bytes = hidden_size * element
        copies = work.tokens * token_bytes * work.num_experts_per_tok
        sent = np.where(np.asarray(work.num_ranks) > 1, copies, 0.0)
        seconds = count * exchange_time(at.hw, work, token_bytes)
        basis = ExchangeCurve.basis(at.hw, "exchange of tokens", work)
        basis = msgspec.structs.replace(
            basis, relative_error=max(basis.relative_error, EXCHANGE_ERROR)
        )
        cost = Cost(collective_bytes=count * sent)
        found.append(fixed(name, "link", seconds, cost, bases=(basis,)))
    return found


def send(at: Where, work: Message, *, is_far: Any) -> Op:
    """Hidden states to the next stage, over the network where `is_far`: each rank sends its share,
    which the ranks there then gather."""
    size, ranks = (np.asarray(value, dtype=np.float64) for value in work)
    link = at.hw.link
    far_rate = link.between_nodes_bytes_per_s or link.bytes_per_s
    rate = np.where(is_far, far_rate, link.bytes_per_s)
    seconds = SEND_BASE_S + as_array(size / ranks) / rate
    gathered = at.engine.kernels.collective_factor * one_way_time(
        at.hw, Message(size, ranks)
    )
    cost = Cost(collective_bytes=size / ranks)
    return fixed("send", "link", seconds + gathered, cost, bases=(unmeasured("send"),))
