"""Fits the catalog's hardware profiles to the published kernel tables in a directory, and rewrites their TOML files.

    python -m evidence.fits.hardware_profiles DIRECTORY [FILE…]

The directory holds FILES, below (or only the named ones are fitted), of any devices. Each curve is fitted twice: on
three quarters of the shapes, for the error on the others, which the profile states; then on all rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from evidence.kernel_tables import (
    CURVES,
    Group,
    curve_of,
    held_out,
    read_table,
    refit,
    row_seconds,
    select,
)
from evidence.kernels import extrapolation_error, refit_errors
from magicdec.errors import MagicdecError
from magicdec.perfmodel.kernels.attention import AttentionCurve
from magicdec.perfmodel.kernels.base import KernelTable
from magicdec.perfmodel.kernels.latents import LatentCurve
from magicdec.perfmodel.kernels.links import AllReduceCurve
from magicdec.perfmodel.kernels.profile import (
    KERNELS,
    HardwareProfile,
    lent,
    load_hardware,
    save_hardware,
)
from magicdec.specs.device import HARDWARE_DIRECTORY
from magicdec.units import KIB, MIB

FILES = (
    "gemm.csv.gz", "decode_attention.csv.gz", "mla_decode.csv.gz", "prefill_attention.csv.gz", "moe.csv.gz",
    "allreduce.csv.gz", "allreduce_nccl.csv.gz", "linear_attention.csv.gz", "linear_prefill.csv.gz", "indexer.csv.gz",
    "top_k.csv.gz",
    "sparse_attention.csv.gz", "window_attention.csv.gz",
)  # fmt: skip
"""Tables that evidence/extract_kernel_tables.py writes; `window` after `decode_attention`, whose curve it completes."""
SOURCE = "aiconfigurator-core 0.12.0 measured-kernel tables, {lane} lane, {dtype}"
ENGINE_LANES = {
    "sglang": ("SGLang 0.5.14", "SGLang 0.5.10", "SGLang's custom all-reduce"),
    "trtllm": (
        "TensorRT-LLM 1.3.0rc20",
        "TensorRT-LLM 1.0.0",
        "TensorRT-LLM's all-reduce",
    ),
    "nccl": ("NCCL 2.29.2", "NCCL 2.27.3", "NCCL"),
}
SERVERS_ALL_REDUCE = dict.fromkeys(
    ("b200-sxm-192gb", "b300-sxm-288gb", "gb200-nvl72", "gb300-nvl72"), "sglang"
)
"""Devices whose table for vLLM has a hump (26 us at 256 KiB on eight B200s, 17 us at 1 MiB; B300 alike) that measured
servers on B200 do not show: there vLLM's servers get this engine's curve, lowest of the three tables within 10 %."""
MOST_RANKS = {"gb300-nvl72": 4, "gb200-nvl72": 4}
"""Ranks of a tray: between trays SGLang's and vLLM's all-reduces are others (30 us at 16 KiB on eight GB300s in SGLang
0.5.14 where four take 4 us), which no curve here holds."""
OLDER_LANE = {
    "sglang": (),
    "trtllm": ("a100-sxm-80gb",),
    "nccl": ("a100-sxm-80gb", "l40s-48gb"),
}
VERSIONS = {"a100-sxm-80gb": "0.14.0"}
ALL_REDUCE_VERSIONS = {
    "a100-sxm-80gb": "0.14.0", "l40s-48gb": "0.14.0", "rtx-pro-6000-96gb": "0.24.0",
}  # fmt: skip
LATENT_VERSIONS = {"a100-sxm-80gb": "1.0.0", "l40s-48gb": "1.0.0"}
ATTENTION = {
    "a100-sxm-80gb": (
        "FlashAttention 2 (vLLM 0.14.0): splits the context with grouped heads only",
        "grouped",
    ),
    "l40s-48gb": (
        "FlashAttention 2 (vLLM 0.24.0): splits the context with grouped heads only",
        "grouped",
    ),
    "rtx-pro-6000-96gb": (
        "FlashAttention 2 (vLLM 0.24.0): splits the context with grouped heads only",
        "grouped",
    ),
}
VLLM = "vLLM custom all-reduce, then NCCL"
VLLM_SWITCH = "vLLM custom all-reduce, then symmetric memory in the switch, then NCCL"
HOPPER = AllReduceCurve(
    library=VLLM_SWITCH, direct_bytes=8.0 * MIB, direct_bytes_wide=256.0 * KIB, in_switch_ranks=4,
    in_switch_bytes=64.0 * MIB,
    two_shot_overhead_s=4.4e-6, two_shot_efficiency=0.62,
)  # fmt: skip
BLACKWELL = AllReduceCurve(
    library=VLLM_SWITCH, direct_bytes=2.0 * MIB, direct_bytes_wide=1.0 * MIB, in_switch_ranks=6,
    in_switch_bytes=128.0 * MIB, two_shot_rank_overhead_s=1.5e-6,
)  # fmt: skip
ALL_REDUCE = {
    "a100-sxm-80gb": AllReduceCurve(library=VLLM),
    "h100-sxm-80gb": HOPPER,
    "h200-sxm-141gb": HOPPER,
    "b200-sxm-192gb": BLACKWELL,
    "b300-sxm-288gb": BLACKWELL,
    "gb200-nvl72": BLACKWELL,
    "gb300-nvl72": BLACKWELL,
    "l40s-48gb": AllReduceCurve(library=VLLM, direct_ranks=2, direct_bytes=2.0 * MIB, direct_bytes_wide=2.0 * MIB),
}  # fmt: skip
"""Which algorithm vLLM takes for which size: its all_reduce_utils.py (L40S: where NCCL's step is in the table).

The tables here hold two and eight ranks. What only lies between, the two-shot kernel on Hopper (4 ranks and more) and
its growth with the ranks on Blackwell, is from the timings in https://github.com/vllm-project/vllm/pull/24111, less the
1 us by which that benchmark exceeds the tables where both have a row.
"""
BLACKWELL_LATENTS = LatentCurve(tile_rows=128.0, narrow_heads=32.0, combine_traffic=1.0)
LATENT_TILES = {
    "b300-sxm-288gb": BLACKWELL_LATENTS,
    "gb200-nvl72": BLACKWELL_LATENTS,
    "gb300-nvl72": BLACKWELL_LATENTS,
    "rtx-pro-6000-96gb": LatentCurve(tile_rows=64.0),
    "a100-sxm-80gb": LatentCurve(tile_rows=64.0),
    "l40s-48gb": LatentCurve(tile_rows=64.0),
    "h100-sxm-80gb": LatentCurve(tile_rows=64.0, combine_traffic=1.0),
    "h200-sxm-141gb": LatentCurve(tile_rows=64.0, combine_traffic=1.0),
    "b200-sxm-192gb": BLACKWELL_LATENTS,
}
"""Query rows of TensorRT-LLM's kernels for latents: instructions of 64 rows; on Blackwell a kernel of 16 rows up to 32
heads and above it one of 64 rows, or 128 on two multiprocessors (its selectMlaGenerationKernel). On Ampere and Ada one
block walks over a whole context."""
LAYER_LANES = {
    "linear": "vLLM 0.24.0 and, verifying, 0.1.dev19262", "linear_prefill": "vLLM 0.24.0", "indexer": "vLLM 0.24.0",
    "top_k": "SGLang 0.5.14", "sparse": "SGLang 0.5.14",
}  # fmt: skip
LAYER_LIBRARIES = {
    "linear": "vLLM's packed decode kernel of gated delta nets, and its recurrence of several tokens",
    "linear_prefill": "FlashInfer's chunked gated delta rule, as vLLM calls it (L40S: Triton's)",
    "indexer": "DeepGEMM's paged scores", "top_k": "SGLang's fused top-k", "sparse": "FlashMLA's sparse kernel",
}  # fmt: skip
LENT = {
    "linear": ("a100-sxm-80gb", "h100-sxm-80gb"),
    "linear_prefill": ("a100-sxm-80gb", "l40s-48gb"),
}
"""Devices whose curve is another's: that table has none of vLLM's kernels of theirs."""
MOST_READ = 0.99
"""Share of the memory's peak that decode attention's curve may tend to: a cache is read no faster."""
MAX_ROWS = 6000
"""Rows that a curve is fitted to, evenly thinned."""
ERROR_TO_DEVIATION = 1.25
"""Standard deviation over mean absolute deviation of a normal distribution."""


def source_of(table: KernelTable, key: Group) -> str:
    """The lane of the tables that a curve comes from."""
    if table.kind == "allreduce" and key.variant:
        newer, older, _ = ENGINE_LANES[key.variant]
        return SOURCE.format(
            lane=older if key.device in OLDER_LANE[key.variant] else newer, dtype="bf16"
        )
    if table.kind == "latent":
        version = LATENT_VERSIONS.get(key.device, "1.3.0rc20")
        return SOURCE.format(
            lane=f"TensorRT-LLM {version}", dtype=key.variant or "bf16"
        )
    if table.kind in LAYER_LANES:
        return SOURCE.format(lane=LAYER_LANES[table.kind], dtype=key.variant or "bf16")
    versions = ALL_REDUCE_VERSIONS if table.kind == "allreduce" else VERSIONS
    default = "0.19.0" if table.kind == "allreduce" else "0.24.0"
    return SOURCE.format(
        lane=f"vLLM {versions.get(key.device, default)}", dtype=key.variant or "bf16"
    )


def fit_table(
    profile: HardwareProfile,
    table: KernelTable,
    key: Group,
    rows: dict[str, np.ndarray],
) -> HardwareProfile:
    """The profile with one curve fitted, and its error on shapes left out."""
    test, variant = held_out(table, rows), key.variant
    held = refit_errors(table, profile, rows, ~test, test, variant)
    error = None if held is None else held.mape
    extrapolated = extrapolation_error(table, profile, rows, variant)
    fitted = refit(
        table,
        profile,
        rows,
        variant=variant,
        fitted_on=source_of(table, key),
        max_rows=MAX_ROWS,
    )
    curve = curve_of(table, fitted, variant)
    if table.kind == "attention":
        reached = min(curve.bandwidth_efficiency, MOST_READ)
        curve = msgspec.structs.replace(curve, bandwidth_efficiency=reached)
        fitted = curve.placed(fitted, variant)
    counted = table.counted(rows)
    deviation = np.abs(row_seconds(table, fitted, rows, variant) / rows["time_s"] - 1.0)
    print(
        f"{key.name(table.kind)}: {rows['time_s'].size} rows, {curve.fit.num_parameters} parameters, "
        f"in sample {deviation[counted].mean():.2%} (all rows {deviation.mean():.2%}), "
        f"held out {error or float('nan'):.2%}, extrapolated {extrapolated or float('nan'):.2%}",
        flush=True,
    )
    if table.kind == "window":
        return fitted
    relative_error = ERROR_TO_DEVIATION * float(
        error if error is not None else deviation[counted].mean()
    )
    fit = msgspec.structs.replace(
        curve.fit, num_rows=int(rows["time_s"].size), error=round(float(error), 4) if error is not None else None,
        relative_error=round(relative_error, 4),
    )  # fmt: skip
    return msgspec.structs.replace(rounded(curve), fit=fit).placed(fitted, variant)


def rounded(curve: Any) -> Any:
    """Five significant digits: more would say more than the rows do."""
    values = {name: getattr(curve, name) for name in curve.__struct_fields__}
    numbers = {
        name: value
        for name, value in values.items()
        if type(value) is float and "bytes" not in name
    }
    return msgspec.structs.replace(
        curve, **{name: float(f"{value:.5g}") for name, value in numbers.items()}
    )


def start(profile: HardwareProfile, table: KernelTable, key: Group) -> Any:
    """The profile with what is known of the kernels' algorithms, before the fit."""
    splits: Any
    if table.kind == "attention":
        library, splits = ATTENTION.get(
            key.device, ("vLLM 0.24.0's default decode kernel for the device", "always")
        )
        if key.variant:
            library, splits = (
                "vLLM 0.24.0's default decode kernel for the device, fp8 cache",
                "always",
            )
        return AttentionCurve(library=library, splits=splits).placed(
            profile, key.variant
        )
    if table.kind == "latent":
        tiles = LATENT_TILES[key.device]
        curve = msgspec.structs.replace(
            tiles, library="TensorRT-LLM's kernel for latents"
        )
        return curve.placed(profile, key.variant)
    if table.kind in LAYER_LIBRARIES:
        known = CURVES[table.kind](library=LAYER_LIBRARIES[table.kind])
        return known.placed(profile, key.variant)
    if table.kind != "allreduce":
        return profile
    if not key.variant:
        return msgspec.structs.replace(profile, allreduce=ALL_REDUCE.get(key.device))
    engines = {
        name: curve
        for name, curve in profile.allreduce_engines.items()
        if name != key.variant
    }
    return msgspec.structs.replace(profile, allreduce_engines=engines)


def own_profile(name: str) -> HardwareProfile:
    """A profile of the catalog without the curves that it borrows."""
    profile = load_hardware(name)
    if not profile.curves_from:
        return profile
    changes: dict[str, Any] = {}
    for kind in KERNELS:
        for key in filter(None, (kind.key, kind.variants_key)):
            held = getattr(profile, key)
            if isinstance(held, dict):
                changes[key] = {
                    variant: curve
                    for variant, curve in held.items()
                    if not curve.fit.borrowed_from
                }
            elif held is not None and held.fit.borrowed_from:
                changes[key] = None
    return msgspec.structs.replace(profile, **changes)


def main(directory: Path, files: Sequence[str]) -> None:
    profiles: dict[str, HardwareProfile] = {}
    for file in files:
        if not (directory / file).is_file():
            continue
        table, by_group = read_table(directory / file)
        for key, every in by_group.items():
            rows = every
            if table.kind == "allreduce" and key.device in MOST_RANKS:
                rows = select(every, every["tp_size"] <= MOST_RANKS[key.device])
            if np.count_nonzero(table.counted(rows)) < table.least_rows:
                print(f"{key.name(table.kind)}: too few rows that matter")
                continue
            profile = start(
                profiles.get(key.device) or own_profile(key.device), table, key
            )
            fitted = fit_table(profile, table, key, rows)
            if key.variant and SERVERS_ALL_REDUCE.get(key.device) == key.variant:
                fitted = curve_of(table, fitted, key.variant).placed(fitted, "vllm")
            profiles[key.device] = fitted
            save_hardware(
                profiles[key.device], HARDWARE_DIRECTORY / f"{key.device}.toml"
            )
    for kind, (device, donor) in LENT.items():
        if device not in profiles:
            continue
        profile = profiles.get(device) or load_hardware(device)
        lender = profiles.get(donor) or load_hardware(donor)
        curve = lent(getattr(lender, kind), lender, profile)
        save_hardware(
            msgspec.structs.replace(profile, **{kind: curve}),
            HARDWARE_DIRECTORY / f"{device}.toml",
        )


if __name__ == "__main__":
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= set(FILES):
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]), sys.argv[2:] or FILES)
    except MagicdecError as error:
        sys.exit(f"error: {error}")
