"""What a device is: datasheet ceilings, and how near to them its kernels and links were measured to come.

A profile is one TOML file. The ceilings (`memory_bytes_per_s`, `flops_per_s`, `link`) are the datasheet's, dense,
without sparsity; `sources` names where each was read. The curves (`gemm`, `attention`, `allreduce`, `elementwise`)
hold dimensionless efficiencies relative to those ceilings and fixed costs in seconds, fitted to measurements named in
`fitted_on` (fitting: perfmodel/curve_fit.py; what each parameter does: perfmodel/roofline.py and collectives.py). A
device whose kernels nobody measured takes the curves of `curves_from`, or generic ones, with a wider `relative_error`.

The same structs describe a CPU that was calibrated locally.
"""

from __future__ import annotations

import math
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from magicdec.errors import ConfigError, unknown_choice
from magicdec.files import write_atomic

HARDWARE_DIRECTORY = Path(__file__).resolve().parent / "data" / "hardware"
DTYPE_BYTES: dict[str, float] = {
    "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp8_block": 1, "int8": 1, "nvfp4": 0.5625, "mxfp4": 0.53125, "int4": 0.5
}  # fmt: skip
"""Bytes per element, with the scales of nvfp4 (one byte per 16) and mxfp4 (per 32); other scales (to 6 %) are ignored.

`fp8` has a scale per tensor or channel, `fp8_block` one per 128 × 128; int8, int4 and mxfp4 hold weights only.
"""
COMPUTE_FALLBACK = {
    "fp16": "bf16", "fp8": "bf16", "fp8_block": "fp8", "int8": "bf16", "nvfp4": "bf16", "mxfp4": "bf16", "int4": "bf16",
    "bf16": "fp32",
}  # fmt: skip
"""What a dtype computes in where the device has no rate for it (weights are widened on the fly)."""
WEIGHT_ONLY = ("int8", "mxfp4", "int4")
"""Formats of weights alone."""
BORROWED_ERROR_FACTOR = 2.0
DEFAULT_RELATIVE_ERROR = 0.3
KERNEL_LAUNCH_S = 4e-6
RING_EXPONENT = 0.5
"""Generic `AllReduceCurve.rank_exponent` of a ring over PCIe."""


class _Spec(msgspec.Struct, frozen=True, kw_only=True):
    """Base: a struct read from a file, whose numbers must be finite and within the range of `LIMITS`."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float | int) and not isinstance(value, bool):
                low, high = LIMITS.get(name, (0.0, 1e4 if name.endswith("_s") else 1e18))
                if not (math.isfinite(value) and low <= value <= high):
                    raise ValueError(f"'{name}' must be between {low:g} and {high:g}, not {value!r}")


LIMITS: dict[str, tuple[float, float]] = {
    "memory_bytes": (1, 1e18),
    "memory_bytes_per_s": (1, 1e18),
    "bytes_per_s": (1, 1e18),
    "between_nodes_bytes_per_s": (1, 1e18),
    "num_multiprocessors": (1, 1e6),
    "num_gpus_per_node": (1, 1e6),
    "num_gpus_linked": (1, 1e6),
    "bandwidth_efficiency": (1e-6, 1e3),
    "flops_efficiency": (1e-6, 1e3),
    "l2_fraction": (0, 16),
    "l2_bandwidth_ratio": (0.1, 1e3),
    "stream_ratio": (1e-3, 1e9),
    "blocks_per_multiprocessor": (1e-2, 1e3),
    "min_split_tokens": (1, 1e9),
    "max_splits": (1, 1e6),
    "passes": (0, 1e3),
    "one_shot_efficiency": (1e-6, 1e3),
    "two_shot_efficiency": (1e-6, 1e3),
    "in_switch_efficiency": (1e-6, 1e3),
    "in_switch_ranks": (2, 1e6),
    "bulk_efficiency": (1e-6, 1e3),
    "link_efficiency": (1e-6, 1e3),
    "network_efficiency": (1e-6, 1e3),
    "rank_exponent": (-4, 4),
    "ridge_power": (1, 64),
    "wave_weight": (0, 1),
    "gemv_efficiency": (0, 1e3),
    "relative_error": (0, 10),
    "error": (0, 10),
}
"""Range of each number; others are from 0 to 1e18. Times are in seconds, so that none is a year by mistake."""


class Fit(_Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where a curve comes from and how right it is."""

    fitted_on: str = ""
    """What was measured, by whom; empty for a generic curve."""
    num_rows: int = 0
    num_parameters: int = 0
    error: float | None = None
    """Mean absolute relative error on shapes left out of the fit, over the rows that matter."""
    relative_error: float = DEFAULT_RELATIVE_ERROR
    """One standard deviation of a prediction, relative; what intervals are built from."""
    borrowed_from: str = ""
    """The device the curve was measured on, when it was another one."""


class GemmCurve(_Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Time of one linear layer; equations in perfmodel/roofline.py. The defaults are a generic GPU library's."""

    fit: Fit = Fit()
    overhead_s: float = 3e-6
    bandwidth_efficiency: float = 0.82
    flops_efficiency: float = 0.8
    ridge_power: float = 2.5
    l2_fraction: float = 0.15
    """Part of the L2 that kept operands between calls where kernels were timed (tests rotate their buffers)."""
    l2_bandwidth_ratio: float = 2.5
    tiled: bool = True
    """Output tiles are spread over multiprocessors (GPUs). If not, only the ceilings and the two below apply (CPUs)."""
    tiles: Literal["cheapest", "by_rows"] = "cheapest"
    """How the library chooses output tiles: the cheapest of all, split over k where that helps; or by m alone, without
    splits (64 × 64 up to 64 tokens, 64 × 128 up to 128, 128 × 128 above: CUTLASS as vLLM calls it for fp8)."""
    host_s: float = 0.0
    """Least time of a call where kernels were timed launched by the host one by one; captured graphs do not pay it."""
    host_few_s: float = 0.0
    """The same up to 16 tokens, where fewer kernels are launched."""
    stream_ratio: float = 5.0
    """Bandwidth at which all multiprocessors together can take operands in, relative to the memory's peak."""
    split_overhead_s: float = 2e-6
    split_traffic: float = 1.0
    """Cost of reducing a split k's partial sums, relative to their fp32 traffic at three times the memory's rate."""
    wave_weight: float = 0.3
    """How much of a last, part-filled wave of tiles is paid as a whole one (0: work flows evenly, 1: whole waves)."""
    half_tokens: float = 0.0
    """Tokens' worth of time that the matrix path spends before its first token (packing the weights)."""
    gemv_efficiency: float = 0.0
    """Rate of the one-token-at-a-time path relative to the peak; 0 where there is none."""


class AttentionCurve(_Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Time of one layer's attention over a KV cache with one kernel library."""

    fit: Fit = Fit()
    library: str = "generic"
    splits: Literal["always", "grouped"] = "always"
    """Whether the context of one sequence is split over blocks: always, or only with grouped-query heads."""
    overhead_s: float = 1e-5
    bandwidth_efficiency: float = 0.85
    flops_efficiency: float = 0.6
    """Assumed where no rows with several query tokens were fitted (FlashAttention 2 and 3 report 0.6-0.75 of peak)."""
    ridge_power: float = 3.5
    l2_fraction: float = 0.85
    l2_bandwidth_ratio: float = 2.0
    """Bandwidth of a cache smaller than `l2_fraction` of the L2, relative to a larger one. Below 1 it is no caching but
    short reads that miss the full bandwidth (measured on A100, cause unknown), and holds whether the L2 is warm or not.
    """
    blocks_per_multiprocessor: float = 2.0
    stream_ratio: float = 4.0
    """Bandwidth at which the blocks that fill the device can take keys and values in, relative to the memory's peak."""
    block_overhead_s: float = 1e-6
    """Fixed time of each further wave of blocks."""
    wave_weight: float = 0.5
    split_overhead_s: float = 4e-6
    """Cost of splitting and combining: of every call of the splitting kernel if `splits` is "grouped"."""
    min_split_tokens: float = 256.0
    max_splits: float = 32.0
    window_tile_tokens: float = 0.0
    """Cached tokens that are read beyond a sliding window, which begins within a tile."""
    tile_rows: float = 0.0
    """Of latent attention: query rows (heads times query tokens) that one matrix instruction takes; fewer cost as much.
    0: work grows smoothly."""
    narrow_heads: float = 0.0
    """Up to so many heads another kernel takes `narrow_tile_rows` at a time. Where there are two kernels, a tile
    holds one query token's heads. 0: there is one, whose tiles hold several tokens'."""
    narrow_tile_rows: float = 16.0
    tile_traffic: float = 0.0
    """How much of the reading of the cache is repeated by each further tile of query rows (0: all of it is found in the
    L2; 1: none)."""
    combine_traffic: float = 0.0
    """Cost of adding up what the parts of a split context found, relative to its fp32 traffic at the memory's peak."""
    row_factors: tuple[float, ...] = ()
    """Time with 1, 2, 3, ... query rows per KV head relative to the smooth curve: CPU matrix libraries have a kernel of
    its own for each small number of rows, and four may take no longer than three."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(math.isfinite(factor) and 0.05 <= factor <= 20.0 for factor in self.row_factors):
            raise ValueError(f"'row_factors' must be between 0.05 and 20, not {list(self.row_factors)!r}")


class PrefillCurve(_Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Time of one layer's causal attention of whole prompts, or chunks of them; equation in perfmodel/roofline.py."""

    fit: Fit = Fit()
    overhead_s: float = 1e-5
    flops_efficiency: float = 0.6
    narrow_head_efficiency: float = 0.7
    """Rate with heads of 64 dimensions and fewer, relative to 128."""
    wide_head_efficiency: float = 1.0
    """The same with more than 128."""
    block_weight: float = 0.9
    """Time of the longest block (128 queries over all keys) relative to its share of the device's rate."""
    bandwidth_efficiency: float = 0.4
    ridge_power: float = 1.2


class MoeCurve(_Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Time of one layer's routed experts, from the router's choice to their sum; equation in perfmodel/roofline.py."""

    fit: Fit = Fit()
    overhead_s: float = 2e-5
    hidden_overhead_s: float = 1e-9
    """Per number of the hidden state: products whose depth no split shortens."""
    expert_overhead_s: float = 2e-7
    """Per expert that some token chose."""
    bandwidth_efficiency: float = 0.8
    flops_efficiency: float = 0.6
    activation_efficiency: float = 0.5
    """Of the memory's bandwidth, for the tokens' copies by expert and their sum."""
    ridge_power: float = 1.7
    tile_rows: float = 10.0
    """Tokens that an expert's product takes the time of, at least."""
    independence: float = 0.93
    """Exponent below 1: t tokens touch as many experts as t to this power that choose evenly."""
    imbalance: float = 0.15
    """How much longer the fullest expert makes products of many tokens."""


class LinearCurve(_Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Time of one layer's recurrence over a few tokens, and of its short convolution; equation in
    perfmodel/layer_times.py."""

    fit: Fit = Fit()
    library: str = "generic"
    overhead_s: float = 6e-6
    """Of both kernels."""
    bandwidth_efficiency: float = 0.8
    l2_fraction: float = 0.8
    l2_bandwidth_ratio: float = 2.0
    token_s: float = 6e-7
    """Of one token after the other in a sequence, however little is read."""
    ridge_power: float = 2.5


class LinearPrefillCurve(_Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Time of one layer's recurrence over whole prompts, chunk by chunk; equation in perfmodel/layer_times.py."""

    fit: Fit = Fit()
    library: str = "generic"
    overhead_s: float = 1e-5
    chunk_s: float = 3e-6
    """Of 64 tokens of one state, which wait for the 64 before them."""
    block_s: float = 4e-6
    """Of one state, before its first chunk."""
    wave_weight: float = 0.8
    passes: float = 2.0
    """How often queries, keys, values and outputs go through memory."""
    bandwidth_efficiency: float = 0.5
    """Of the convolution."""
    l2_fraction: float = 0.5
    l2_bandwidth_ratio: float = 2.0
    ridge_power: float = 3.0


class IndexerCurve(_Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Time of an indexer's scores over a paged cache of fp8 keys; equation in perfmodel/layer_times.py."""

    fit: Fit = Fit()
    library: str = "generic"
    overhead_s: float = 4e-6
    bandwidth_efficiency: float = 0.8
    flops_efficiency: float = 0.4
    """Of the fp8 rate (of 16 bits where the device has none)."""
    l2_fraction: float = 0.8
    l2_bandwidth_ratio: float = 2.0
    row_s: float = 5e-9
    """Of each query token, whatever it scores."""
    ridge_power: float = 2.0


class TopKCurve(_Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Time of choosing the tokens that a sparse attention reads; equation in perfmodel/layer_times.py."""

    fit: Fit = Fit()
    library: str = "generic"
    overhead_s: float = 4e-6
    row_s: float = 4e-6
    """Of a block, which chooses for one query token."""
    score_s: float = 3e-10
    """Of each score, in a block."""
    wave_weight: float = 0.2
    bandwidth_efficiency: float = 0.3
    ridge_power: float = 3.0


class SparseCurve(_Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Time of attention to chosen latents where a block takes one query token's; equation in
    perfmodel/layer_times.py."""

    fit: Fit = Fit()
    library: str = "generic"
    overhead_s: float = 8e-6
    flops_efficiency: float = 0.6
    wave_weight: float = 0.9
    bandwidth_efficiency: float = 0.8
    ridge_power: float = 4.0


class AllReduceCurve(_Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Time of one all-reduce over the ranks of a node; the equations are in perfmodel/collectives.py."""

    fit: Fit = Fit()
    library: str = "generic"
    direct_ranks: int = 8
    """Up to this many ranks read each other's memory in one kernel; more (or no peer access) use a ring."""
    overhead_s: float = 5e-6
    rank_overhead_s: float = 1e-7
    one_shot_efficiency: float = 0.6
    one_shot_pass_s: float = 1e-7
    """Each further pass of the direct kernel's grid over a long message."""
    two_shot_overhead_s: float = 6e-6
    two_shot_rank_overhead_s: float = 5e-7
    two_shot_efficiency: float = 0.6
    direct_bytes: float = 8388608.0
    """Messages of at least this many bytes use the bulk algorithm."""
    direct_bytes_wide: float = 8388608.0
    """The same with more than four ranks."""
    in_switch_ranks: int | None = None
    """From this number of ranks on, the switch adds messages too large for the direct kernels (NVLS); None: never."""
    in_switch_bytes: float = 67108864.0
    """Up to this size."""
    in_switch_overhead_s: float = 5e-6
    in_switch_efficiency: float = 0.5
    bulk_overhead_s: float = 2e-5
    bulk_rank_overhead_s: float = 1e-6
    bulk_efficiency: float = 0.65
    rank_exponent: float = 0.0
    """Bulk and ring bandwidth fall as (ranks/2) to this power (below 0: they rise)."""
    ring_hop_s: float = 1.3e-6

    def unfitted(self) -> AllReduceCurve:
        """The same algorithms for the same ranks and sizes, without what was fitted."""
        return AllReduceCurve(
            library=self.library,
            direct_ranks=self.direct_ranks,
            direct_bytes=self.direct_bytes,
            direct_bytes_wide=self.direct_bytes_wide,
            in_switch_ranks=self.in_switch_ranks,
            in_switch_bytes=self.in_switch_bytes,
        )


class ElementwiseCurve(_Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Time of kernels that stream their operands once (norms, rotary, residuals, softmax over the vocabulary)."""

    fit: Fit = Fit()
    overhead_s: float = 3e-6
    bandwidth_efficiency: float = 0.75


class ExchangeCurve(_Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Time of sending tokens to the ranks of their experts, or back; the equation is in perfmodel/collectives.py. The
    defaults are those of Hopper on InfiniBand."""

    fit: Fit = Fit()
    library: str = "generic"
    overhead_s: float = 1.2e-5
    link_efficiency: float = 0.6
    """Of the link's bandwidth, for what stays among the devices that it joins."""
    network_overhead_s: float = 1.2e-5
    """On top, where there are further ones."""
    network_efficiency: float = 0.9
    """Of the network's bandwidth."""


class Link(_Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What joins the devices. `bytes_per_s` is per device and direction."""

    bytes_per_s: float
    latency_s: float = 2e-6
    topology: Literal["nvlink", "nvlink-pair", "xgmi", "pcie", "shared-memory"] = "pcie"
    num_gpus_per_node: int = 8
    between_nodes_bytes_per_s: float | None = None
    """Of the network, per device and direction; None: not known."""
    num_gpus_linked: int | None = None
    """Devices that the link joins, where it reaches beyond a node (72 in a rack of GB200); None: those of a node."""

    @property
    def reach(self) -> int:
        """Devices that the link joins: beyond them is the network."""
        return self.num_gpus_linked or self.num_gpus_per_node


class HardwareProfile(_Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One device: ceilings from its datasheet, and fitted curves."""

    name: str
    aliases: tuple[str, ...] = ()
    kind: Literal["gpu", "cpu"] = "gpu"
    memory_bytes: float
    memory_bytes_per_s: float
    flops_per_s: dict[str, float]
    num_multiprocessors: int = 1
    l2_bytes: float = 0.0
    link: Link = Link(bytes_per_s=1e9)
    price_per_hour_usd: float | None = None
    curves_from: str = ""
    sources: dict[str, str] = {}
    reference_s: float | None = None
    compute_reference_s: float | None = None
    """Of a calibrated machine: how long the reference kernels (measure/environment.py), of memory and of arithmetic,
    took while it was measured."""
    memory_spread: float = 0.0
    compute_spread: float = 0.0
    """Standard deviation of the logarithms of those times: how much the machine's speed drifts by itself."""
    gemm: GemmCurve | None = None
    gemm_formats: dict[str, GemmCurve] = {}
    """Linear layers whose products run in a narrow format (fp8, fp8_block, nvfp4)."""
    attention: AttentionCurve | None = None
    attention_formats: dict[str, AttentionCurve] = {}
    """Attention over a KV cache in a narrow format (fp8)."""
    latent: dict[str, AttentionCurve] = {}
    """Decoding of multi-head latent attention, by the format of the cache."""
    prefill: PrefillCurve | None = None
    linear: LinearCurve | None = None
    """Decoding and verification of gated delta nets, and of what else keeps a state of fixed size."""
    linear_prefill: LinearPrefillCurve | None = None
    indexer: IndexerCurve | None = None
    top_k: dict[str, TopKCurve] = {}
    """By how the scores that were timed are distributed."""
    sparse: dict[str, SparseCurve] = {}
    """Attention to the tokens that an indexer chose, by the format of the cache."""
    moe: dict[str, MoeCurve] = {}
    """Mixtures of experts, by the format of the experts' weights."""
    allreduce: AllReduceCurve | None = None
    allreduce_engines: dict[str, AllReduceCurve] = {}
    """Of engines with kernels of their own; `allreduce` is vLLM's."""
    exchange: ExchangeCurve | None = None
    """Of tokens between the ranks of whole experts."""
    elementwise: ElementwiseCurve | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            *self.gemm_formats, *self.attention_formats, *self.latent, *self.sparse, *self.moe,
        ):  # fmt: skip
            if name not in DTYPE_BYTES:
                raise ValueError(f"curves for the unknown dtype '{name}' (known: {', '.join(DTYPE_BYTES)})")
        if not self.flops_per_s:
            raise ValueError("'flops_per_s' must hold at least one dtype")
        for dtype, rate in self.flops_per_s.items():
            if dtype not in DTYPE_BYTES:
                raise ValueError(f"'flops_per_s' has the unknown dtype '{dtype}' (known: {', '.join(DTYPE_BYTES)})")
            if not (math.isfinite(rate) and 1 <= rate <= 1e21):
                raise ValueError(f"'flops_per_s.{dtype}' must be a positive number, not {rate!r}")

    @property
    def is_measured(self) -> bool:
        """Whether kernels of this very device were measured."""
        curves = (self.gemm, self.attention)
        return all(curve is not None and curve.fit.fitted_on and not curve.fit.borrowed_from for curve in curves)

    def gemm_curve(self, compute_dtype: str = "bf16") -> GemmCurve:
        """Of products in `compute_dtype`; in one that nobody measured, bf16's efficiencies."""
        return self.gemm_formats.get(compute_dtype) or self.gemm or GemmCurve()

    def attention_curve(self, kv_dtype: str = "bf16") -> AttentionCurve:
        """Over a cache in `kv_dtype`; in one that nobody measured, bf16's efficiencies."""
        return self.attention_formats.get(kv_dtype) or self.attention or AttentionCurve()

    def latent_curve(self, kv_dtype: str = "bf16") -> AttentionCurve:
        """Of latent attention over a cache in `kv_dtype`; unmeasured, of ordinary attention."""
        return self.latent.get(kv_dtype) or self.attention_curve(kv_dtype)

    def prefill_curve(self) -> PrefillCurve:
        return self.prefill or PrefillCurve()

    def exchange_curve(self) -> ExchangeCurve:
        return self.exchange or ExchangeCurve()

    def computes_in(self, dtype: str) -> bool:
        """Whether products of two operands in `dtype` have a rate of their own here."""
        return dtype in self.flops_per_s or (dtype == "fp8_block" and "fp8" in self.flops_per_s)

    def allreduce_curve(self, kernels: str = "") -> AllReduceCurve:
        """Of an engine's own kernels where they were measured, else of vLLM's, else a generic one."""
        if kernels in self.allreduce_engines:
            return self.allreduce_engines[kernels]
        if self.allreduce is not None:
            return self.allreduce
        overhead_s = KERNEL_LAUNCH_S + self.link.latency_s
        if self.link.topology in ("pcie", "shared-memory"):
            return AllReduceCurve(
                library="generic ring", direct_ranks=2, rank_exponent=RING_EXPONENT, overhead_s=overhead_s
            )
        return AllReduceCurve(overhead_s=overhead_s)

    def elementwise_curve(self) -> ElementwiseCurve:
        return self.elementwise or ElementwiseCurve()

    def compute_rate(self, dtype: str) -> float:
        """Peak FLOP/s in `dtype`, or in what the device widens it to.

        Raises ConfigError for a dtype that does not exist.
        """
        bytes_per_element(dtype)
        candidate: str | None = dtype
        while candidate is not None:
            if candidate in self.flops_per_s:
                return self.flops_per_s[candidate]
            candidate = COMPUTE_FALLBACK.get(candidate)
        return max(self.flops_per_s.values())


def bytes_per_element(dtype: str) -> float:
    """Bytes of one number. Raises ConfigError for an unknown dtype."""
    if dtype not in DTYPE_BYTES:
        raise unknown_choice("dtype", dtype, DTYPE_BYTES)
    return DTYPE_BYTES[dtype]


@lru_cache(maxsize=1)
def _aliases() -> dict[str, str]:
    """Catalog names and aliases."""
    names: dict[str, str] = {}
    for path in sorted(HARDWARE_DIRECTORY.glob("*.toml")):
        names[path.stem] = path.stem
        for alias in tomllib.loads(path.read_text(encoding="utf-8")).get("aliases", ()):
            names.setdefault(alias, path.stem)
    return names


def hardware_names() -> list[str]:
    """Names of the catalog, without aliases."""
    return sorted(set(_aliases().values()))


def load_hardware(name_or_path: str | Path) -> HardwareProfile:
    """A profile of the catalog (by name or alias), or of a TOML file, which is read anew each time.

    Raises ConfigError naming the file and the key, or the nearest known name.
    """
    text = str(name_or_path)
    if "/" in text or text.endswith(".toml"):
        return _load_file(Path(name_or_path))
    return _of_catalog(text.lower(), text)


@lru_cache(maxsize=64)
def _of_catalog(name: str, given: str) -> HardwareProfile:
    direct = HARDWARE_DIRECTORY / f"{name}.toml"
    if direct.is_file():
        return _load_file(direct)
    stem = _aliases().get(name)
    if stem is None:
        raise unknown_choice("hardware", given, hardware_names())
    return _load_file(HARDWARE_DIRECTORY / f"{stem}.toml")


def _load_file(path: Path) -> HardwareProfile:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read hardware profile {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    profile = profile_from_document(document, where=str(path))
    if profile.curves_from:
        if profile.curves_from not in _aliases() or _aliases()[profile.curves_from] == path.stem:
            raise ConfigError(
                f"{path}: key 'curves_from': {unknown_choice('hardware', profile.curves_from, _aliases())}"
            )
        profile = _borrow(profile, load_hardware(profile.curves_from))
    return profile


def profile_from_document(document: dict[str, Any], *, where: str) -> HardwareProfile:
    """The profile that a parsed TOML document describes; ConfigError names `where` and the key."""
    try:
        return msgspec.convert(document, HardwareProfile)
    except msgspec.ValidationError as error:
        message = (
            str(error)
            .replace("Object missing required field", "missing key")
            .replace("Object contains unknown field", "unknown key")
        )
        message, _, place = message.partition(" - at ")
        key = place.strip("`$.") if place else ""
        raise ConfigError(f"{where}: " + (f"key '{key}': " if key else "") + message.replace("`", "'")) from error


def lent(curve: Any, donor: str) -> Any:
    """A curve measured on another device, marked so and with a wider error."""
    wider = min(10.0, max(0.1, BORROWED_ERROR_FACTOR * curve.fit.relative_error))
    fit = msgspec.structs.replace(curve.fit, relative_error=wider, borrowed_from=donor)
    return msgspec.structs.replace(curve, fit=fit)


def _borrow(profile: HardwareProfile, donor: HardwareProfile) -> HardwareProfile:
    """`profile` with the donor's curves where it has none, marked so and with a wider error."""
    changes: dict[str, Any] = {}
    for name in ("gemm", "attention", "prefill", "linear", "linear_prefill", "indexer", "allreduce", "elementwise"):
        curve = getattr(donor, name)
        if name == "allreduce" and profile.link.topology != donor.link.topology:
            continue
        if getattr(profile, name) is None and curve is not None:
            changes[name] = lent(curve, donor.name)
    if profile.link.topology == donor.link.topology and not profile.allreduce_engines:
        changes["allreduce_engines"] = {
            engine: lent(curve, donor.name) for engine, curve in donor.allreduce_engines.items()
        }
    for name in ("top_k", "sparse"):
        borrowed = {key: lent(curve, donor.name) for key, curve in getattr(donor, name).items()}
        changes[name] = borrowed | getattr(profile, name)
    for name in ("gemm_formats", "attention_formats", "moe"):
        own: dict[str, Any] = getattr(profile, name)
        alike = {
            dtype: curve
            for dtype, curve in getattr(donor, name).items()
            if profile.computes_in(dtype) or dtype in WEIGHT_ONLY
        }
        changes[name] = {dtype: lent(curve, donor.name) for dtype, curve in alike.items()} | own
    return msgspec.structs.replace(profile, **changes)


def save_hardware(profile: HardwareProfile, path: Path) -> None:
    """Writes a profile as TOML, whole or not at all.

    Raises StorageError when the file cannot be written.
    """
    write_atomic(path, msgspec.toml.encode(profile))
