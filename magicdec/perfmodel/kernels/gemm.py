"""Matrix products: 2·m·n·k FLOPs; weights n·k, read once; activations m·(n + k).

    time = overhead + ‖ bytes / bandwidth , tiles ‖_p

The output is cut in tiles, one per multiprocessor at a time. Few tiles leave multiprocessors idle,
so libraries choose smaller tiles or split k, each at a price; we take the cheapest of the
candidates, as they do. A tile takes as long as its compute or its loads, whichever is slower; waves
of tiles may be paid whole (`wave_weight`). On CPUs only the ceilings apply, and small batches are
computed token by token when that is faster than packing the weights.
"""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from magicdec.counts import Array
from magicdec.fitting import Free
from magicdec.perfmodel.kernels.base import (
    KernelCurve,
    KernelTable,
    Parameters,
    Rows,
    WorkingSet,
    arrays,
    as_array,
    best_fit,
    cache_speedup,
    minimise,
    soft_max,
    waves,
    with_fit,
)
from magicdec.perfmodel.kernels.op import Basis, Cost, Op, OpTime, Where, operation
from magicdec.specs.device import WEIGHT_ONLY, Device, bytes_per_element
from magicdec.specs.engine import EngineProfile
from magicdec.specs.precision import Precision

TILES = np.array(
    [(64.0, 64.0), (64.0, 128.0), (128.0, 128.0), (128.0, 256.0), (256.0, 128.0)]
)
ROWS_OF_SMALL_TILES = (64, 128)
"""Most tokens with tiles of 64 × 64, and of 64 × 128, in a library that chooses by tokens alone."""
K_SPLITS = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
MIN_SPLIT_K = 64
WEIGHT_ONLY_ROWS = 16
"""Kernels that widen narrow weights on the fly use tiles of so few tokens, the smallest matrix
instruction's.
"""
WEIGHT_ONLY_RATE = 0.7
"""Rate of such kernels relative to the dense ones' of their device. No table holds them: with int4
weights an A100's speedup at 64 users and gamma 5 was reported 0.76, with 16 bits 0.97, and this
gives their ratio."""
HALVED_RATE = 0.9
"""Most of the listed rate that tiles reach where sums in fp32 run at half the whole rate: the rest
of a block hides behind them. One layer of attention of 24 heads of 256 on an RTX 3090 takes 1.3 ms
over 16k tokens (github.com/syv-ai/qwen38-27b-rtx3090, docs/gotchas.md), and of 16 heads 2.84 ms
over 32k (github.com/avesed/vllm-ampere-optimized, patches/fa2_kvcache_verify)."""
TENSOR_RATIO = 4.0
"""FLOPs of tensor cores with 16-bit sums for one of the fp32 units, from Ampere's smaller chips on;
a device that lists fewer with fp32 sums has them halved."""
TILE_RIDGE_POWER = 4.0
RESIDENT_FRACTION = 0.8
"""Part of the L2 that can hold a working set; the timing loops behind `GemmCurve.l2_fraction`
rotate buffers.
"""
REDUCTION_BANDWIDTH_RATIO = 3.0
HOST_BOUND_S = 2.5e-5
"""No kernel takes so long for the smallest product: the host did, and the table says nothing of the
fixed time.
"""


def tensor_rate(hw: Device, share: float, dtype: str = "bf16") -> float:
    """FLOP/s of tiles that reach a share of the tensor cores' whole rate, the one with 16-bit sums."""
    listed = hw.compute_rate(dtype)
    whole = max(listed, TENSOR_RATIO * hw.flops_per_s.get("fp32", 0.0))
    return min(share * whole, max(HALVED_RATE, share) * listed)


class Product(NamedTuple):
    """m tokens (rows of activations, `compute_dtype`) through weights of n × k.

    Narrow activations (fp8, nvfp4) make outputs in 16 bits. Zero in any dimension costs nothing but
    the call's overhead.
    """

    m: Any
    n: Any
    k: Any
    weight_dtype: str = "bf16"
    compute_dtype: str = "bf16"
    weight_bytes: float | None = None
    """Bytes of a weight with its share of scales; None: the format's."""


class GemmCurve(KernelCurve, frozen=True, kw_only=True):
    """Time of one linear layer. The defaults are a generic GPU library's."""

    key: ClassVar[str] = "gemm"
    variants_key: ClassVar[str] = "gemm_formats"
    has_formats: ClassVar[bool] = True
    tables: ClassVar[tuple[KernelTable, ...]] = (
        KernelTable(
            kind="gemm",
            columns=("m", "n", "k"),
            shape=("n", "k"),
            variant="dtype",
            work=lambda rows, dtype: Product(
                rows["m"],
                rows["n"],
                rows["k"],
                dtype or "bf16",
                dtype or "bf16",
            ),
            counted=lambda rows: (
                (rows["m"] <= 1024) & (rows["n"] >= 512) & (rows["k"] >= 512)
            ),
            is_near=lambda rows: rows["m"] <= 256,
        ),
    )
    overhead_s: Annotated[float, Free(spread=1.0)] = 3e-6
    bandwidth_efficiency: Annotated[float, Free(spread=0.15)] = 0.82
    flops_efficiency: Annotated[float, Free(spread=0.1)] = 0.8
    ridge_power: Annotated[float, Free(scale="above_one")] = 2.5
    l2_fraction: float = 0.15
    """Part of the L2 that kept operands between calls where kernels were timed (tests rotate their
    buffers).
    """
    l2_bandwidth_ratio: float = 2.5
    tiled: bool = True
    """Output tiles are spread over multiprocessors (GPUs). If not, only the ceilings and the two
    below apply (CPUs).
    """
    tiles: Literal["cheapest", "by_rows"] = "cheapest"
    """How the library chooses output tiles: the cheapest of all, split over k where that helps; or
    by m alone, without splits (64 × 64 up to 64 tokens, 64 × 128 up to 128, 128 × 128 above:
    CUTLASS as vLLM calls it for fp8)."""
    host_s: float = 0.0
    """Least time of a call where kernels were timed launched by the host one by one; captured
    graphs do not pay it.
    """
    host_few_s: float = 0.0
    """Least time of such a call with up to 16 tokens, where fewer kernels are launched."""
    stream_ratio: Annotated[float, Free(spread=0.7)] = 5.0
    """Bandwidth at which all multiprocessors together can take operands in, relative to the
    memory's peak.
    """
    split_overhead_s: Annotated[float, Free(spread=1.0)] = 2e-6
    split_traffic: Annotated[float, Free(spread=1.0)] = 1.0
    """Cost of reducing a split k's partial sums, relative to their fp32 traffic at three times the
    memory's rate.
    """
    wave_weight: Annotated[float, Free(spread=1.0, scale="unit")] = 0.3
    """How much of a last, part-filled wave of tiles is paid as a whole one (0: work flows evenly,
    1: whole waves).
    """
    half_tokens: float = 0.0
    """Tokens' worth of time that the matrix path spends before its first token (packing the
    weights).
    """
    gemv_efficiency: float = 0.0
    """Rate of the one-token-at-a-time path relative to the peak; 0 where there is none."""

    @classmethod
    def may_borrow(cls, hw: Device, donor: Device, variant: str) -> bool:
        return not variant or hw.computes_in(variant) or variant in WEIGHT_ONLY

    def seconds(
        self, hw: Device, work: Product, working_set: WorkingSet = None
    ) -> OpTime:
        m, n, k = map(as_array, work[:3])
        compute_dtype = work.compute_dtype
        stored = bytes_per_element(work.weight_dtype)
        weight_bytes = work.weight_bytes or stored
        element = bytes_per_element(compute_dtype)
        of_weights = n * k * weight_bytes
        of_inputs = m * k * element
        of_outputs = m * n * max(element, 2.0)
        num_bytes = of_weights + of_inputs + of_outputs
        bandwidth = self.bandwidth_efficiency * hw.memory_bytes_per_s
        in_a_pass = not isinstance(working_set, str)
        fraction = self.l2_fraction
        if self.tiled and in_a_pass:
            fraction = max(fraction, RESIDENT_FRACTION)
        speedup = cache_speedup(
            hw, fraction, self.l2_bandwidth_ratio, num_bytes, working_set
        )
        memory_s = num_bytes / bandwidth / speedup
        rate = self.flops_efficiency * hw.compute_rate(compute_dtype)
        overhead_s = np.full(memory_s.shape, self.overhead_s)
        if self.tiled:
            used_rows = np.asarray(np.inf)
            if stored < element:
                share = WEIGHT_ONLY_RATE * self.flops_efficiency
                rate = tensor_rate(hw, share, compute_dtype)
                tokens = as_array(work.m)
                used_rows = np.ceil(tokens / WEIGHT_ONLY_ROWS) * WEIGHT_ONLY_ROWS
            compute_s = 2.0 * m * n * k / rate
            busy_s = self._in_tiles(
                hw, work, memory_s=memory_s, rate=rate, used_rows=used_rows
            )
        else:
            compute_s = 2.0 * n * k * self._skinny_tokens(m) / rate
            busy_s = soft_max(memory_s, compute_s, self.ridge_power)
        time_s = overhead_s + np.where(m * n * k > 0, busy_s, 0.0)
        if not in_a_pass:
            host_s = np.where(m <= WEIGHT_ONLY_ROWS, self.host_few_s, self.host_s)
            time_s = np.maximum(time_s, host_s)
        return OpTime(time_s, memory_s, compute_s, overhead_s)

    def _skinny_tokens(self, m: Array) -> Array:
        """Tokens that the matrix path would do in the time that m take: few go one by one where
        that is faster.
        """
        matrix = m + self.half_tokens
        if self.gemv_efficiency <= 0:
            return np.where(m > 0, matrix, 0.0)
        one_by_one = m * self.flops_efficiency / self.gemv_efficiency
        ratio = one_by_one / np.maximum(matrix, 1e-300)
        return one_by_one / (1.0 + ratio**4) ** 0.25

    def _tile_choices(self, m: Array) -> tuple[Array, Array, Array]:
        """Splits of k, rows and columns of output tiles that the library chooses from; axes: tiles,
        splits, m's.
        """
        each_m = [1] * m.ndim
        if self.tiles == "by_rows":
            few, more = ROWS_OF_SMALL_TILES
            rows = np.where(m <= more, 64.0, 128.0)
            columns = np.where(m <= few, 64.0, 128.0)
            return np.ones((1, *each_m)), rows[None, None], columns[None, None]
        rows = TILES[:, 0].reshape(-1, 1, *each_m)
        columns = TILES[:, 1].reshape(-1, 1, *each_m)
        return K_SPLITS.reshape(-1, *each_m), rows, columns

    def _in_tiles(
        self,
        hw: Device,
        work: Product,
        *,
        memory_s: Array,
        rate: float,
        used_rows: Array,
    ) -> Array:
        """Time of the cheapest choice of output tile and split of k.

        For a given split, the tile that is cheapest alone is cheapest with the memory ceiling too,
        so tiles are compared first and the ridge is taken once per split.
        """
        # each on its own axes: a search over tp has few n and k for its many m
        m, n, k = map(as_array, work[:3])
        m = np.array(m, ndmin=memory_s.ndim)
        num_sm = hw.num_multiprocessors
        tile_rate = rate / num_sm
        stream_rate = self.stream_ratio * hw.memory_bytes_per_s / num_sm
        bandwidth = self.bandwidth_efficiency * hw.memory_bytes_per_s
        splits, rows, columns = self._tile_choices(m)
        num_tiles = np.ceil(m / rows) * np.ceil(n / columns)
        filling = num_tiles / num_sm * splits
        element = bytes_per_element(work.compute_dtype)
        operands_s = (np.minimum(m, rows) + columns) * element / stream_rate
        products_s = 2.0 * np.minimum(used_rows, rows) * columns / tile_rate
        per_k_s = soft_max(products_s, operands_s, TILE_RIDGE_POWER)
        k_per_split = np.maximum(k / splits, MIN_SPLIT_K)
        tiles_s = np.min(
            waves(filling, self.wave_weight) * k_per_split * per_k_s, axis=0
        )
        reduction_s = (
            self.split_traffic * 8.0 * m * n / (REDUCTION_BANDWIDTH_RATIO * bandwidth)
        )
        splitting_s = np.where(
            splits > 1, self.split_overhead_s + splits * reduction_s, 0.0
        )
        by_split = soft_max(memory_s, tiles_s, self.ridge_power) + splitting_s
        return np.asarray(np.min(by_split, axis=0))

    def refitted(
        self,
        hw: Device,
        work: Product,
        rows: Rows,
        *,
        fitted_on: str = "",
        rotated: bool = False,
        is_own: bool = False,
    ) -> Self:
        """Fits linear layers. `hw` gives the ceilings that efficiencies refer to. A `kind` "cpu"
        gets the untiled curve, which is not flat in m. Calls are assumed to be timed in a loop, so
        operands that fit stay in the cache. `rotated`: each call had other operands, so none
        stays."""
        tiled = hw.kind == "gpu"
        if tiled:
            parameters = {**self.free(), **IN_A_LOOP}
        else:
            parameters = {**UNTILED, **cache_parameters(hw)}
        if rotated:
            parameters = without(
                parameters, [name for name in parameters if name[:3] == "l2_"]
            )

        def predict(curve: Self) -> Array:
            return curve.seconds(hw, work, None if rotated else "own").time_s

        if not tiled or work.compute_dtype in ("bf16", "fp16", "fp32"):
            starts: list[dict[str, float]] = [
                {},
                {"half_tokens": 1.0},
                {"half_tokens": 30.0},
            ]
            if tiled:
                starts = [{}, {"wave_weight": 0.95}]
            return best_fit(
                [type(self)(tiled=tiled)],
                parameters,
                predict,
                rows,
                fitted_on,
                starts=starts,
            )
        fits: list[tuple[Self, float, int]] = []
        host_bound: tuple[str, ...] = ()
        if np.min(rows["time_s"]) > HOST_BOUND_S:
            host_bound = ("overhead_s",)
        for tiles, unused in NARROW_TILES:
            free = without({**parameters, **NARROW}, unused + host_bound)
            curve, loss = minimise(
                type(self)(tiles=tiles, overhead_s=6e-6), free, predict, rows
            )
            fits.append((curve, loss, len(free)))
        curve, _, num_free = min(fits, key=lambda fit: fit[1])
        return with_fit(curve, num_free + 1, rows, predict(curve), fitted_on)


IN_A_LOOP: Parameters = {
    "l2_fraction": Free(),
    "l2_bandwidth_ratio": Free(scale="above_one"),
}
NARROW: Parameters = {
    "overhead_s": Free(prior=6e-6, spread=0.2),
    "bandwidth_efficiency": Free(spread=0.1),
    "ridge_power": Free(prior=3.5, scale="above_one"),
    "host_s": Free(prior=2e-5, spread=2.0),
    "host_few_s": Free(prior=2e-5, spread=2.0),
}
"""Constants that differ in kernels of narrow formats."""
NARROW_TILES: tuple[tuple[Literal["cheapest", "by_rows"], tuple[str, ...]], ...] = (
    ("cheapest", ("split_overhead_s",)),
    ("by_rows", ("split_overhead_s", "split_traffic")),
)
"""Tile choices to try for narrow formats, each with the constants that do not matter under it. The
choice counts as a parameter."""
UNTILED: Parameters = {
    "overhead_s": Free(prior=5e-6, spread=2.0), "bandwidth_efficiency": Free(prior=0.9, spread=0.5),
    "flops_efficiency": Free(prior=0.8, spread=0.5), "ridge_power": Free(prior=3.0, scale="above_one"),
    "half_tokens": Free(prior=8.0, spread=1.0), "gemv_efficiency": Free(prior=0.15, spread=1.0),
}  # fmt: skip


def without(parameters: Parameters, names: Iterable[str]) -> dict[str, Free]:
    """The other parameters."""
    left_out = set(names)
    return {name: free for name, free in parameters.items() if name not in left_out}


def cache_parameters(hw: Device) -> Parameters:
    """Constants of a CPU's last-level cache, where its size is known."""
    if hw.l2_bytes <= 0:
        return {}
    return {
        "l2_fraction": Free(prior=0.7, spread=0.7),
        "l2_bandwidth_ratio": Free(prior=4.0, spread=0.7, scale="above_one"),
    }


def matrix_dtype(hw: Device, engine: EngineProfile, precision: Precision) -> str:
    """The format that products run in: the weights' own where engine and device have it, else 16 or
    32 bits.
    """
    own = precision.kernels
    if own in engine.kernels.native_formats and hw.computes_in(own):
        return own
    return precision.compute_dtype


def linear(
    name: str,
    at: Where,
    *,
    m: Any,
    n: Any,
    k: Any,
    count: Any = 1.0,
    is_beside: bool = False,
) -> Op:
    """`count` linear layers of m tokens through weights n × k. `is_beside`: they run next to
    another operation, so their work is paid and their launches are not."""
    hw, engine, precision = at
    m, n, k = (np.asarray(value, dtype=np.float64) for value in (m, n, k))
    dtype = matrix_dtype(hw, engine, precision)
    read = bytes_per_element(dtype)
    written = 2.0
    if dtype == "fp32":
        written = 4.0
    cost = Cost(
        flops=2.0 * m * n * k,
        weight_bytes=n * k * precision.weight_bytes,
        activation_bytes=m * (n * written + k * read),
    )
    work = Product(m, n, k, precision.kernels, dtype, precision.weight_bytes)
    time = GemmCurve.of(hw, dtype).seconds(hw, work)
    if is_beside:
        work_s = np.maximum(time.time_s - time.overhead_s, 0.0)
        if engine.kernels.fused_shared_experts:
            work_s = np.maximum(time.memory_s, time.compute_s)
        time = time._replace(time_s=work_s, overhead_s=np.zeros_like(time.overhead_s))
    factor = engine.kernels.gemm_factor
    if dtype != precision.compute_dtype:
        factor = engine.kernels.narrow_gemm_factor
    basis = products_basis(at, work)
    return operation(
        name, "gemm", at, cost, time, dtype, basis=basis, count=count, factor=factor
    )


def products_basis(at: Where, work: Product) -> Basis:
    """Where the time of products in a format comes from. No kernel was timed that widens narrow
    weights on the way."""
    own = at.precision.kernels
    if bytes_per_element(own) >= 2.0:
        return GemmCurve.basis(at.hw, "products in 16 bits", work)
    variant = own
    if work.compute_dtype != own:
        variant = f"{own}, widened"
    return GemmCurve.basis(at.hw, f"{own} products", work, variant)


class Stream(NamedTuple):
    """`num_kernels` kernels that stream `num_bytes` in all (reads and writes)."""

    num_bytes: Any
    num_kernels: Any = 1.0


class ElementwiseCurve(KernelCurve, frozen=True, kw_only=True):
    """Time of kernels that stream their operands once."""

    key: ClassVar[str] = "elementwise"
    overhead_s: Annotated[float, Free(spread=2.0)] = 3e-6
    bandwidth_efficiency: Annotated[float, Free(spread=1.0)] = 0.75

    def seconds(
        self, hw: Device, work: Stream, working_set: WorkingSet = None
    ) -> OpTime:
        num_bytes, num_kernels = arrays(*work)
        memory_s = num_bytes / (self.bandwidth_efficiency * hw.memory_bytes_per_s)
        overhead_s = num_kernels * self.overhead_s
        return OpTime(
            memory_s + overhead_s, memory_s, np.zeros_like(memory_s), overhead_s
        )


def streaming(
    name: str,
    at: Where,
    *,
    num_bytes: Any,
    num_kernels: Any = 1.0,
    count: Any = 1.0,
) -> Op:
    """`count` times `num_kernels` kernels that stream `num_bytes` in all."""
    num_bytes = np.asarray(num_bytes, dtype=np.float64)
    work = Stream(num_bytes, num_kernels)
    time = ElementwiseCurve.of(at.hw).seconds(at.hw, work)
    basis = ElementwiseCurve.basis(at.hw, "elementwise kernels", work)
    cost = Cost(activation_bytes=num_bytes)
    factor = at.engine.kernels.elementwise_factor
    dtype = at.precision.compute_dtype
    return operation(
        name,
        "elementwise",
        at,
        cost,
        time,
        dtype,
        basis=basis,
        count=count,
        factor=factor,
    )
