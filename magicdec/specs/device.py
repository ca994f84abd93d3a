"""A device's datasheet: ceilings of memory, arithmetic and link.

Ceilings are dense, without sparsity; `sources` names where each was read. How near to them kernels
come is in the curves of a hardware profile (perfmodel/kernels/profile.py).
"""

import math
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from magicdec.errors import unknown_choice

HARDWARE_DIRECTORY = Path(__file__).resolve().parent / "data" / "hardware"
"""Profiles of the devices that ship."""
DTYPE_BYTES: dict[str, float] = {
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "fp8_block": 1,
    "int8": 1,
    "nvfp4": 0.5625,
    "mxfp4": 0.53125,
    "int4": 0.5,
}
"""Bytes per element, with the scales of nvfp4 (one byte per 16) and mxfp4 (per 32); other scales
(to 6 %) are ignored.

`fp8` has a scale per tensor or channel, `fp8_block` one per 128 × 128; int8, int4 and mxfp4 hold
weights only.
"""
COMPUTE_FALLBACK = {
    "fp16": "bf16",
    "fp8": "bf16",
    "fp8_block": "fp8",
    "int8": "bf16",
    "nvfp4": "bf16",
    "mxfp4": "bf16",
    "int4": "bf16",
    "bf16": "fp32",
}
"""The dtype that another computes in where the device has no rate for it (weights are widened on
the fly).
"""
LEAST_LESS = 0.005
MOST_LESS = 0.02
"""Parts of nvidia-smi's total, the least and the most, that CUDA does not give to programs."""
WEIGHT_ONLY = ("int8", "mxfp4", "int4")
"""Formats of weights alone."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """Base: a struct read from a file, whose numbers must be finite and within the range of
    `LIMITS`.
    """

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float | int) and not isinstance(value, bool):
                low, high = LIMITS.get(
                    name, (0.0, 1e4 if name.endswith("_s") else 1e18)
                )
                if not (math.isfinite(value) and low <= value <= high):
                    raise ValueError(
                        f"'{name}' must be between {low:g} and {high:g}, not {value!r}"
                    )


LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(
        (
            "memory_bytes",
            "usable_bytes",
            "least_usable_bytes",
            "memory_bytes_per_s",
            "bytes_per_s",
            "between_nodes_bytes_per_s",
        ),
        (1, 1e18),
    ),
    **dict.fromkeys(
        ("num_multiprocessors", "num_gpus_per_node", "num_gpus_linked", "max_splits"),
        (1, 1e6),
    ),
    **dict.fromkeys(
        (
            "bandwidth_efficiency",
            "flops_efficiency",
            "one_shot_efficiency",
            "two_shot_efficiency",
            "in_switch_efficiency",
            "bulk_efficiency",
            "link_efficiency",
            "network_efficiency",
        ),
        (1e-6, 1e3),
    ),
    "l2_fraction": (0, 16),
    "l2_bandwidth_ratio": (0.1, 1e3),
    "stream_ratio": (1e-3, 1e9),
    "passes": (0, 1e3),
    "blocks_per_multiprocessor": (1e-2, 1e3),
    "min_split_tokens": (1, 1e9),
    "in_switch_ranks": (2, 1e6),
    "rank_exponent": (-4, 4),
    "ridge_power": (1, 64),
    "wave_weight": (0, 1),
    "gemv_efficiency": (0, 1e3),
    "relative_error": (0, 10),
    "error": (0, 10),
}
"""Range of each number; numbers that are not listed lie between 0 and 1e18. Times are in
seconds."""


class Link(
    Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The link that joins devices. `bytes_per_s` is per device and direction."""

    bytes_per_s: float
    latency_s: float = 2e-6
    topology: Literal["nvlink", "nvlink-pair", "xgmi", "pcie", "shared-memory"] = "pcie"
    num_gpus_per_node: int = 8
    is_single: bool = False
    """Whether such devices are bought one by one: where neither their number nor a batch is asked
    for, a plan takes as few as hold one sequence.
    """
    between_nodes_bytes_per_s: float | None = None
    """The network's, per device and direction; None: not known."""
    num_gpus_linked: int | None = None
    """Devices that the link joins if it reaches beyond a node (72 in a rack of GB200). None: those
    of a node."""

    @property
    def reach(self) -> int:
        """Devices that the link joins: beyond them is the network."""
        return self.num_gpus_linked or self.num_gpus_per_node


class UsableMemory(NamedTuple):
    """Memory that programs can have."""

    num_bytes: float
    relative_error: float
    """0: a program was told this total."""


class Device(
    Spec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One device: the ceilings of its datasheet."""

    name: str
    aliases: tuple[str, ...] = ()
    kind: Literal["gpu", "cpu"] = "gpu"
    generation: str = ""
    """Its vendor's name of the architecture; "": not known."""
    memory_bytes: float
    """The driver's total, as nvidia-smi and rocm-smi print it; nominal where nobody printed it."""
    usable_bytes: float | None = None
    """The total that CUDA or ROCm gives to programs, of which engines take their share. None: not
    known."""
    least_usable_bytes: float | None = None
    """The part that programs get where the machine's settings give them no more. None: all."""
    memory_bytes_per_s: float
    flops_per_s: dict[str, float]
    has_bf16: bool = True
    """Whether it computes in bf16; where not, fp16 takes its place, at the rate listed for bf16."""
    num_multiprocessors: int = 1
    l2_bytes: float = 0.0
    link: Link = Link(bytes_per_s=1e9)
    price_per_hour_usd: float | None = None
    curves_from: str = ""
    sources: dict[str, str] = {}
    reference_s: float | None = None
    compute_reference_s: float | None = None
    """Times of a calibrated machine's reference kernels (measure/environment.py), of memory and of
    arithmetic, while it was measured."""
    memory_spread: float = 0.0
    compute_spread: float = 0.0
    """Standard deviation of the logarithms of those times: how much the machine's speed drifts by
    itself.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.flops_per_s:
            raise ValueError("'flops_per_s' must hold at least one dtype")
        for dtype, rate in self.flops_per_s.items():
            if dtype not in DTYPE_BYTES:
                raise ValueError(
                    f"'flops_per_s' has the unknown dtype '{dtype}' (known: "
                    f"{', '.join(DTYPE_BYTES)})"
                )
            if not (math.isfinite(rate) and 1 <= rate <= 1e21):
                raise ValueError(
                    f"'flops_per_s.{dtype}' must be a positive number, not {rate!r}"
                )

    @property
    def usable_memory(self) -> UsableMemory:
        """Memory that engines take their share of."""
        if self.usable_bytes is not None:
            return UsableMemory(self.usable_bytes, 0.0)
        if self.kind == "cpu":
            return UsableMemory(self.memory_bytes, 0.0)
        less = (LEAST_LESS + MOST_LESS) / 2.0
        error = (MOST_LESS - LEAST_LESS) / 2.0
        return UsableMemory(self.memory_bytes * (1.0 - less), error)

    def computes_in(self, dtype: str) -> bool:
        """Whether products of two operands in `dtype` have a rate of their own here."""
        return dtype in self.flops_per_s or (
            dtype == "fp8_block" and "fp8" in self.flops_per_s
        )

    def compute_rate(self, dtype: str) -> float:
        """Peak FLOP/s in `dtype`, or in what the device widens it to. Raises ConfigError for a
        dtype that does not exist."""
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
