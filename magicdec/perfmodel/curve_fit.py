"""Fits the curves of a hardware profile to timed kernels: published tables or micro-benchmarks of this machine.

Each fit minimises Σ w·ρ(ln(predicted/measured)) with ρ = soft L1, so that outliers count little and what is minimised
is near the mean relative error. Weak log-normal priors (`Free.spread`) hold parameters that the rows do not determine
near generic values: without them, a fit to few tokens knows nothing of the compute ceiling. Several starts guard
against local minima. At most 12 parameters per table.

Rows are mappings of column names to arrays, one entry per timing; `time_s` is the median time of one call. SciPy is
imported on the first fit only: predicting needs none of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from magicdec.errors import ConfigError
from magicdec.perfmodel.arrays import Array
from magicdec.perfmodel.collectives import algorithm_time
from magicdec.perfmodel.roofline import (
    KvReads,
    attention_time,
    elementwise_time,
    gemm_time,
    latent_attention_time,
)
from magicdec.specs.hardware import (
    LIMITS,
    RING_EXPONENT,
    AllReduceCurve,
    AttentionCurve,
    ElementwiseCurve,
    Fit,
    GemmCurve,
    HardwareProfile,
    IndexerCurve,
    LinearCurve,
    LinearPrefillCurve,
    MoeCurve,
    PrefillCurve,
    SparseCurve,
    TopKCurve,
)

Rows = Mapping[str, Any]
Curve = TypeVar(
    "Curve", GemmCurve, AttentionCurve, PrefillCurve, MoeCurve, AllReduceCurve, ElementwiseCurve,
    LinearCurve, LinearPrefillCurve, IndexerCurve, TopKCurve, SparseCurve,
)  # fmt: skip
MAX_PARAMETERS = 12
LOSS_SCALE = 0.05
MIN_ROW_TIMINGS = 4
PRIOR_WEIGHT = 0.006
"""Weight of one prior per square root of a row: 0.6 % of a residual, negligible wherever rows speak."""


@dataclass(frozen=True, kw_only=True)
class Free:
    """A parameter to fit: its prior median and spread in the fitted scale (log, logit, or log of the excess over 1).

    The prior is the curve's generic value, its field's default, unless the kind of kernel has another (None: the
    default).
    """

    prior: float | None = None
    spread: float = 0.5
    scale: Literal["log", "unit", "above_one", "linear"] = "log"

    @property
    def center(self) -> float:
        assert self.prior is not None
        return self.encode(self.prior)

    def encode(self, value: float) -> float:
        if self.scale == "linear":
            return value
        value = max(value, 1e-12)
        if self.scale == "unit":
            value = min(max(value, 1e-4), 1 - 1e-4)
            return math.log(value / (1 - value))
        return math.log(max(value - (1.0 if self.scale == "above_one" else 0.0), 1e-12))

    def decode(self, code: float) -> float:
        if self.scale == "linear":
            return code
        if self.scale == "unit":
            return 1.0 / (1.0 + math.exp(-code))
        return math.exp(code) + (1.0 if self.scale == "above_one" else 0.0)


Parameters = Mapping[str, Free]


def with_priors(parameters: Parameters, curve: type) -> dict[str, Free]:
    """The parameters with the generic values of a kind of curve where they have no prior of their own."""
    generic = curve()
    return {
        name: replace(free, prior=getattr(generic, name)) if free.prior is None else free
        for name, free in parameters.items()
    }


GEMM_PARAMETERS: Parameters = {
    "overhead_s": Free(spread=1.0),
    "bandwidth_efficiency": Free(spread=0.15),
    "flops_efficiency": Free(spread=0.1),
    "ridge_power": Free(scale="above_one"),
    "stream_ratio": Free(spread=0.7),
    "split_overhead_s": Free(spread=1.0),
    "split_traffic": Free(spread=1.0),
    "wave_weight": Free(spread=1.0, scale="unit"),
    "l2_fraction": Free(),
    "l2_bandwidth_ratio": Free(scale="above_one"),
}
NARROW_GEMM_PARAMETERS: Parameters = {
    "overhead_s": Free(prior=6e-6, spread=0.2),
    "bandwidth_efficiency": Free(spread=0.1),
    "ridge_power": Free(prior=3.5, scale="above_one"),
    "host_s": Free(prior=2e-5, spread=2.0),
    "host_few_s": Free(prior=2e-5, spread=2.0),
}
HOST_BOUND_S = 2.5e-5
"""No kernel takes so long for the smallest product: the host did, and the table says nothing of the fixed time."""
NARROW_GEMM_STARTS: tuple[tuple[GemmCurve, tuple[str, ...]], ...] = (
    (GemmCurve(overhead_s=6e-6), ("split_overhead_s",)),
    (GemmCurve(tiles="by_rows", overhead_s=6e-6), ("split_overhead_s", "split_traffic")),
)
"""Which tiles a library takes for narrow formats is tried out, and counts as a parameter; then what does not matter."""
GEMM_PARAMETERS_UNTILED: Parameters = {
    "overhead_s": Free(prior=5e-6, spread=2.0),
    "bandwidth_efficiency": Free(prior=0.9, spread=0.5),
    "flops_efficiency": Free(prior=0.8, spread=0.5),
    "ridge_power": Free(prior=3.0, scale="above_one"),
    "half_tokens": Free(prior=8.0, spread=1.0),
    "gemv_efficiency": Free(prior=0.15, spread=1.0),
}
ATTENTION_PARAMETERS: Parameters = {
    "overhead_s": Free(spread=1.0),
    "bandwidth_efficiency": Free(spread=0.2),
    "stream_ratio": Free(spread=0.7),
    "ridge_power": Free(scale="above_one"),
    "split_overhead_s": Free(spread=1.0),
    "l2_fraction": Free(spread=0.3),
    "l2_bandwidth_ratio": Free(),
    "wave_weight": Free(spread=1.0, scale="unit"),
    "min_split_tokens": Free(),
    "max_splits": Free(spread=0.7),
    "block_overhead_s": Free(spread=1.0),
}
GROUPED_MAX_SPLITS = 128.0
"""FlashAttention 2's constant."""
BLOCKS_PER_MULTIPROCESSOR = (1.0, 2.0, 2.25, 2.5, 3.0)
"""Searched, not descended: time steps with it. Counts as a parameter."""
LATENT_BLOCKS = (1.0, 2.0)
LATENT_STARTS: tuple[Mapping[str, float], ...] = ({}, {"max_splits": 1.5}, {"max_splits": 200.0, "wave_weight": 0.05})
ATTENTION_PARAMETERS_UNTILED: Parameters = {
    "overhead_s": Free(prior=2e-5, spread=2.0),
    "bandwidth_efficiency": Free(prior=0.7, spread=0.7),
    "ridge_power": Free(prior=2.0, scale="above_one"),
    "block_overhead_s": Free(prior=1e-6, spread=2.0),
}
QUERY_PARAMETERS: Parameters = {"flops_efficiency": Free(spread=1.0)}
"""Determined only by rows with several query tokens."""
ALL_REDUCE_PARAMETERS: Parameters = {
    "overhead_s": Free(spread=1.0),
    "rank_overhead_s": Free(),
    "one_shot_efficiency": Free(),
    "one_shot_pass_s": Free(spread=1.5),
    "two_shot_overhead_s": Free(),
    "two_shot_efficiency": Free(),
    "in_switch_overhead_s": Free(),
    "in_switch_efficiency": Free(),
    "bulk_overhead_s": Free(spread=1.0),
    "bulk_rank_overhead_s": Free(),
    "bulk_efficiency": Free(),
    "rank_exponent": Free(spread=0.3, scale="linear"),
}
RING_PARAMETERS: Parameters = {
    "overhead_s": Free(spread=1.0),
    "one_shot_efficiency": Free(),
    "two_shot_efficiency": Free(),
    "bulk_overhead_s": Free(spread=1.0),
    "bulk_efficiency": Free(),
    "rank_exponent": Free(prior=RING_EXPONENT, spread=1.5, scale="linear"),
    "ring_hop_s": Free(),
}
SWITCH_SIZES = tuple(float(2**power) for power in range(20, 26))


def minimise(
    start: Curve,
    parameters: Parameters,
    predict: Callable[[Curve], Array],
    seconds: Array,
    weights: Array,
    *,
    starts: Sequence[Mapping[str, float]] = ({},),
) -> tuple[Curve, float]:
    """The curve with `parameters` fitted, and its loss; other fields stay as in `start`.

    Raises ConfigError when there are too few rows, or times that are not positive numbers.
    """
    from scipy.optimize import least_squares

    names = list(parameters)
    parameters = with_priors(parameters, type(start))
    if len(names) > MAX_PARAMETERS:
        raise ValueError(f"{len(names)} free parameters, at most {MAX_PARAMETERS}")
    if seconds.size < 3 or not np.all(np.isfinite(seconds) & (seconds > 0)):
        raise ConfigError(f"cannot fit {type(start).__name__}: needs at least 3 rows with positive times")
    log_seconds = np.log(seconds)
    center = np.array([parameters[name].center for name in names])
    spread = np.array([parameters[name].spread for name in names])
    pull = PRIOR_WEIGHT * math.sqrt(seconds.size)

    def curve_at(codes: Array) -> Curve:
        values = {name: parameters[name].decode(float(code)) for name, code in zip(names, codes, strict=True)}
        return msgspec.structs.replace(start, **values)

    def residuals(codes: Array) -> Array:
        error = np.log(np.maximum(predict(curve_at(codes)), 1e-12)) - log_seconds
        return np.concatenate([weights * error, pull * (codes - center) / spread])

    best: tuple[float, Array] | None = None
    limits = [LIMITS.get(name, (0.0, 1.0 if name.endswith("_s") else 1e18)) for name in names]
    low = [parameters[name].encode(least) for name, (least, _) in zip(names, limits, strict=True)]
    high = [parameters[name].encode(most) for name, (_, most) in zip(names, limits, strict=True)]
    low, high = np.maximum(low, center - 8 * spread), np.minimum(high, center + 8 * spread)
    for override in starts:
        first = center.copy()
        for name, value in override.items():
            first[names.index(name)] = parameters[name].encode(value)
        first = np.clip(first, low + 1e-6, high - 1e-6)
        result = least_squares(residuals, first, bounds=(low, high), loss="soft_l1", f_scale=LOSS_SCALE, max_nfev=120)
        if best is None or result.cost < best[0]:
            best = (float(result.cost), result.x)
    assert best is not None
    return curve_at(best[1]), best[0]


def columns(rows: Rows, names: Sequence[str], **defaults: float) -> list[Array]:
    """Float arrays of the named columns; ConfigError for a missing one."""
    arrays = []
    length = len(np.asarray(rows["time_s"])) if "time_s" in rows else 0
    for name in names:
        if name not in rows and name not in defaults:
            raise ConfigError(f"rows to fit lack the column '{name}' (they have {', '.join(rows)})")
        arrays.append(np.asarray(rows.get(name, np.full(length, defaults.get(name, 0.0))), dtype=np.float64))
    return arrays


def mean_absolute_error(predicted: Array, measured: Array) -> float:
    """Mean absolute relative error of predictions; NaN for no rows."""
    return float(np.mean(np.abs(predicted / measured - 1.0))) if measured.size else math.nan


def with_fit(curve: Curve, num_parameters: int, seconds: Array, predicted: Array, fitted_on: str) -> Curve:
    rms = float(np.sqrt(np.mean(np.log(predicted / seconds) ** 2)))
    fit = Fit(
        fitted_on=fitted_on,
        num_rows=seconds.size,
        num_parameters=num_parameters,
        relative_error=min(max(rms, 0.02), 10.0),
    )
    fitted: Curve = msgspec.structs.replace(curve, fit=fit)
    return fitted


def row_weights(rows: Rows, seconds: Array) -> Array:
    return np.asarray(rows["weight"], dtype=np.float64) if "weight" in rows else np.ones(seconds.size)


def _cache_parameters(hw: HardwareProfile) -> Parameters:
    """Parameters of a CPU's last-level cache, where its size is known."""
    if hw.l2_bytes <= 0:
        return {}
    return {
        "l2_fraction": Free(prior=0.7, spread=0.7),
        "l2_bandwidth_ratio": Free(prior=4.0, spread=0.7, scale="above_one"),
    }


def fit_gemm(
    rows: Rows,
    hw: HardwareProfile,
    *,
    weight_dtype: str = "bf16",
    compute_dtype: str = "bf16",
    rotated: bool = False,
    fitted_on: str = "",
) -> GemmCurve:
    """Fits linear layers: columns m, n, k, time_s, and optionally weight.

    `hw` gives the ceilings that efficiencies refer to. A `kind` "cpu" gets the untiled curve, which is not flat in m.
    Calls are taken to be timed in a loop, so that operands that fit stay in the cache; `rotated`: on others each time,
    so that none does.
    """
    m, n, k, seconds = columns(rows, ("m", "n", "k", "time_s"))
    tiled = hw.kind == "gpu"
    parameters = dict(GEMM_PARAMETERS if tiled else {**GEMM_PARAMETERS_UNTILED, **_cache_parameters(hw)})
    if rotated:
        parameters = {name: free for name, free in parameters.items() if not name.startswith("l2_")}

    def predict(curve: GemmCurve) -> Array:
        profile = msgspec.structs.replace(hw, gemm=curve, gemm_formats={})
        return gemm_time(
            profile, m=m, n=n, k=k, weight_dtype=weight_dtype, compute_dtype=compute_dtype,
            working_set_bytes=None if rotated else "own",
        ).time_s  # fmt: skip

    if not tiled or compute_dtype in ("bf16", "fp16", "fp32"):
        start = GemmCurve(tiled=tiled)
        starts = ({}, {"wave_weight": 0.95}) if tiled else ({}, {"half_tokens": 1.0}, {"half_tokens": 30.0})
        curve, _ = minimise(start, parameters, predict, seconds, row_weights(rows, seconds), starts=starts)
        return with_fit(curve, len(parameters), seconds, predict(curve), fitted_on)
    fits: list[tuple[GemmCurve, float, int]] = []
    host_bound = ("overhead_s",) if seconds.min() > HOST_BOUND_S else ()
    for start, unused in NARROW_GEMM_STARTS:
        free = {**parameters, **NARROW_GEMM_PARAMETERS}
        free = {name: value for name, value in free.items() if name not in unused + host_bound}
        curve, loss = minimise(start, free, predict, seconds, row_weights(rows, seconds))
        fits.append((curve, loss, len(free)))
    curve, _, num_free = min(fits, key=lambda fit: fit[1])
    return with_fit(curve, num_free + 1, seconds, predict(curve), fitted_on)


def fit_attention(
    rows: Rows,
    hw: HardwareProfile,
    *,
    kv_dtype: str = "bf16",
    kv_reads: KvReads = "per_sequence",
    splits: Literal["always", "grouped"] = "always",
    library: str = "measured",
    rotated: bool = False,
    fitted_on: str = "",
) -> AttentionCurve:
    """Fits attention: columns batch_size, num_heads, num_kv_heads, head_dim, kv_len, time_s; query_len (1), weight.

    The compute ceiling is fitted only where rows have several query tokens. `rotated` as in `fit_gemm`.
    """
    names = ("batch_size", "num_heads", "num_kv_heads", "head_dim", "kv_len", "time_s")
    batch, heads, kv_heads, head_dim, kv_len, seconds = columns(rows, names)
    (query_len,) = columns(rows, ("query_len",), query_len=1.0)
    tiled = hw.kind == "gpu"
    parameters = dict(ATTENTION_PARAMETERS if tiled else {**ATTENTION_PARAMETERS_UNTILED, **_cache_parameters(hw)})
    if np.any(query_len > 1):
        if tiled:
            del parameters["max_splits"]
        parameters |= QUERY_PARAMETERS

    def predict(curve: AttentionCurve) -> Array:
        profile = msgspec.structs.replace(hw, attention=curve, attention_formats={})
        return attention_time(
            profile, batch=batch, query_len=query_len, kv_len=kv_len, num_heads=heads, num_kv_heads=kv_heads,
            head_dim=head_dim, kv_dtype=kv_dtype, kv_reads=kv_reads, working_set_bytes=None if rotated else "own",
        ).time_s  # fmt: skip

    weights = row_weights(rows, seconds)
    start = AttentionCurve(library=library, splits=splits)
    if splits == "grouped":
        parameters.pop("max_splits", None)
        start = msgspec.structs.replace(start, max_splits=GROUPED_MAX_SPLITS)
    if not tiled:
        start = msgspec.structs.replace(start, wave_weight=0.0, stream_ratio=1e6, max_splits=1.0)
        curve, _ = minimise(start, parameters, predict, seconds, weights, starts=({}, {"ridge_power": 6.0}))
        factors = _row_factors(query_len * heads / kv_heads, seconds / predict(curve))
        curve = msgspec.structs.replace(curve, row_factors=factors)
        return with_fit(curve, len(parameters) + len(factors), seconds, predict(curve), fitted_on)
    starts: Sequence[Mapping[str, float]] = ({}, {"wave_weight": 0.9, "bandwidth_efficiency": 0.78})
    candidates = [
        minimise(
            msgspec.structs.replace(start, blocks_per_multiprocessor=blocks), parameters, predict, seconds, weights,
            starts=starts,
        )
        for blocks in BLOCKS_PER_MULTIPROCESSOR
    ]  # fmt: skip
    curve = min(candidates, key=lambda candidate: candidate[1])[0]
    return with_fit(curve, len(parameters) + 1, seconds, predict(curve), fitted_on)


def fit_latent(
    rows: Rows,
    hw: HardwareProfile,
    *,
    kv_dtype: str = "bf16",
    tiles: AttentionCurve | None = None,
    library: str = "measured",
    fitted_on: str = "",
) -> AttentionCurve:
    """Fits decoding of latent attention: columns batch_size, num_heads, kv_len, time_s; row, flops_per_pair; weight.

    The compute ceiling shows where many heads read one latent. `tiles` is a curve whose tiles of query rows are known,
    and whether the kernel splits contexts (`combine_traffic` > 0): what the parts found is then added up at a price for
    each query row. Splits have no other: more query tokens, which need fewer of them, could take less time. A cache in
    a narrow format is read at the bandwidth that one in 16 bits showed; kernels of narrow tiles compute in its format.
    """
    names = ("batch_size", "num_heads", "kv_len", "row", "flops_per_pair", "time_s")
    batch, heads, kv_len, row, flops_per_pair, seconds = columns(rows, names)

    def predict(curve: AttentionCurve) -> Array:
        return latent_attention_time(
            hw, batch=batch, query_len=1.0, kv_len=kv_len, num_heads=heads, row=row, flops_per_pair=flops_per_pair,
            kv_dtype=kv_dtype, curve=curve, working_set_bytes="own",
        ).time_s  # fmt: skip

    start = msgspec.structs.replace(tiles or AttentionCurve(), library=library, split_overhead_s=0.0)
    has_narrow = start.narrow_heads > 0
    rate = hw.compute_rate(kv_dtype) / hw.compute_rate("bf16") if has_narrow else 1.0
    parameters = {**ATTENTION_PARAMETERS, "flops_efficiency": Free(prior=0.65 * rate, spread=0.2)}
    del parameters["split_overhead_s"]
    if start.combine_traffic > 0:
        parameters["combine_traffic"] = Free(prior=0.5, spread=0.7)
        del parameters["wave_weight"]
    if has_narrow:
        parameters["tile_traffic"] = Free(prior=0.3, spread=0.7)
        del parameters["block_overhead_s"]
    if kv_dtype != "bf16" and "bf16" in hw.latent and start.combine_traffic > 0:
        parameters["bandwidth_efficiency"] = Free(prior=hw.latent["bf16"].bandwidth_efficiency, spread=0.03)
    starts = [{name: value for name, value in each.items() if name in parameters} for each in LATENT_STARTS]
    candidates = [
        minimise(
            msgspec.structs.replace(start, blocks_per_multiprocessor=blocks), parameters, predict, seconds,
            row_weights(rows, seconds), starts=starts,
        )
        for blocks in LATENT_BLOCKS
    ]  # fmt: skip
    curve = min(candidates, key=lambda candidate: candidate[1])[0]
    return with_fit(curve, len(parameters) + 1, seconds, predict(curve), fitted_on)


def _row_factors(rows: Array, ratios: Array) -> tuple[float, ...]:
    """Median of measured / smooth for each number of query rows, from 1 to the most there are enough timings of."""
    counted = {
        int(n): float(np.median(ratios[rows == n])) for n in np.unique(rows) if np.sum(rows == n) >= MIN_ROW_TIMINGS
    }
    if len(counted) < 2:
        return ()
    known = sorted(counted)
    every = np.arange(1, known[-1] + 1)
    return tuple(float(f) for f in np.interp(every, known, [counted[n] for n in known]))


def fit_allreduce(
    rows: Rows,
    hw: HardwareProfile,
    *,
    library: str = "measured",
    fitted_on: str = "",
    start: AllReduceCurve | None = None,
) -> AllReduceCurve:
    """Fits all-reduce: columns tp_size, message_bytes, time_s, and optionally weight.

    `start` is a curve whose algorithms' ranges of sizes are known; parameters that no row depends on stay as they are
    in it. Without it, more than two ranks are a ring where there is no peer access (PCIe, shared memory), and the size
    at which the bulk algorithm takes over is searched on powers of two, apart for up to four ranks and for more.
    """
    tp_size, message_bytes, seconds = columns(rows, ("tp_size", "message_bytes", "time_s"))
    ring = hw.link.topology in ("pcie", "shared-memory")
    parameters = RING_PARAMETERS if ring else ALL_REDUCE_PARAMETERS
    weights = row_weights(rows, seconds)

    def predict(curve: AllReduceCurve) -> Array:
        return algorithm_time(hw, curve, message_bytes=message_bytes, tp_size=tp_size)

    def fit(curve: AllReduceCurve) -> tuple[AllReduceCurve, float, int]:
        free = _that_matter(parameters, curve, predict)
        return *minimise(curve, free, predict, seconds, weights), len(free)

    if start is not None:
        curve, _, num_free = fit(msgspec.structs.replace(start, library=library))
        return with_fit(curve, num_free, seconds, predict(curve), fitted_on)
    has_few, has_wide = bool(np.any(tp_size <= 4)), bool(np.any(tp_size > 4))
    both = has_few and has_wide
    ranks = 2 if ring else 8
    starts = [
        AllReduceCurve(library=library, direct_ranks=ranks, direct_bytes=few, direct_bytes_wide=wide)
        for few in SWITCH_SIZES
        for wide in (SWITCH_SIZES if both else (few,))
    ]
    curve, _, num_free = min((fit(each) for each in starts), key=lambda fitted: fitted[1])
    return with_fit(curve, num_free + 2, seconds, predict(curve), fitted_on)


def _that_matter(parameters: Parameters, curve: Curve, predict: Callable[[Curve], Array]) -> Parameters:
    """The parameters that some row's prediction depends on."""
    known = with_priors(parameters, type(curve))
    generic = msgspec.structs.replace(curve, **{name: free.prior for name, free in known.items()})
    usual = predict(generic)
    return {
        name: free
        for name, free in known.items()
        if np.any(predict(msgspec.structs.replace(generic, **{name: free.decode(free.center + 0.4)})) != usual)
    }


def fit_elementwise(rows: Rows, hw: HardwareProfile, *, fitted_on: str = "") -> ElementwiseCurve:
    """Fits streaming kernels: columns num_bytes, num_kernels (1), time_s, and optionally weight."""
    num_bytes, seconds = columns(rows, ("num_bytes", "time_s"))
    (num_kernels,) = columns(rows, ("num_kernels",), num_kernels=1.0)
    parameters = {
        "overhead_s": Free(prior=3e-6, spread=2.0),
        "bandwidth_efficiency": Free(prior=0.75, spread=1.0),
    }

    def predict(curve: ElementwiseCurve) -> Array:
        profile = msgspec.structs.replace(hw, elementwise=curve)
        return elementwise_time(profile, num_bytes=num_bytes, num_kernels=num_kernels).time_s

    curve, _ = minimise(ElementwiseCurve(), parameters, predict, seconds, row_weights(rows, seconds))
    return with_fit(curve, len(parameters), seconds, predict(curve), fitted_on)
