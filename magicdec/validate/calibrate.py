"""`magicdec calibrate`: micro-benchmarks of this machine -> a hardware profile, and our engine's profile on it."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from magicdec.errors import unknown_choice
from magicdec.perfmodel.calibration import fit_attention, fit_elementwise, fit_gemm
from magicdec.records import current_environment
from magicdec.runtime.weights import load_model
from magicdec.specs.engine import EngineProfile, load_engine
from magicdec.specs.hardware import HardwareProfile, Link
from magicdec.specs.precision import Precision
from magicdec.units import KIB, MIB
from magicdec.validate import microbench
from magicdec.validate.acceptance_profile import AcceptanceRequest, fit_profiles, measure_acceptance
from magicdec.validate.engine_bench import engine_points
from magicdec.validate.engine_fit import fit_engine
from magicdec.validate.environment import ReferenceKernel
from magicdec.validate.local_profile import LocalProfile
from magicdec.validate.microbench import Point
from magicdec.validate.predict import PROFILE_DTYPES
from magicdec.validate.request import Weights, check_device


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured and fitted. `drift` is the reference kernel's largest change of time during it, relative."""

    hardware: HardwareProfile
    engine: EngineProfile
    points: list[Point]
    phase_error: dict[str, float]
    reference_s: float
    drift: float
    elapsed_s: float

    @property
    def noise(self) -> float:
        """Median over the points of the spread between rounds."""
        return float(np.median([point.spread for point in self.points]))


def calibrate(
    *,
    model: str = "embedded",
    weights: Weights = "checkpoint",
    device: str = "cpu",
    dtype: str = "float32",
    rounds: int = 5,
    quick: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measures and fits. `quick` times every other engine shape, in fewer rounds."""
    if dtype not in PROFILE_DTYPES:
        raise unknown_choice("dtype", dtype, PROFILE_DTYPES)
    check_device(device)
    started = time.perf_counter()
    reference = ReferenceKernel()
    references = [reference.time_s()]
    target = load_model(model, weights=weights, device=device, dtype=dtype)
    rounds = max(3, rounds // 2) if quick else rounds
    progress("copy and matrix rates")
    base = _ceilings(device=device, dtype=dtype)
    points: list[Point] = []
    for table, works in (
        ("linear layers", microbench.linear_works([target.spec], device=device, dtype=dtype)),
        ("attention", microbench.attention_works(target.spec, device=device, dtype=dtype)),
        ("streaming passes", microbench.streaming_works(device=device)),
    ):
        progress(f"{table}: {len(works)} shapes, {rounds} rounds")
        points += microbench.time_interleaved(works, device=device, rounds=rounds)
        del works
        references.append(reference.time_s())
    timed = engine_points(target, rounds=rounds, quick=quick, progress=progress)
    references.append(reference.time_s())
    progress("fitting")
    precision = Precision(weight_dtype=PROFILE_DTYPES[dtype], kv_dtype=PROFILE_DTYPES[dtype])
    hardware = _fit_hardware(base, points, precision)
    fit = fit_engine(timed, model=target.spec, hardware=hardware, precision=precision, base=_base_engine(base.name))
    return Calibration(
        hardware=hardware,
        engine=fit.profile,
        points=[*points, *timed],
        phase_error=fit.phase_error,
        reference_s=float(np.median(references)),
        drift=max(references) / min(references) - 1.0,
        elapsed_s=time.perf_counter() - started,
    )


def _ceilings(*, device: str, dtype: str) -> HardwareProfile:
    """Measured rates as the profile's ceilings; efficiencies are relative to them."""
    bandwidth = microbench.bandwidth_bytes_per_s(device=device)
    rates = {PROFILE_DTYPES[dtype]: microbench.peak_flops_per_s(device=device, dtype=dtype)}
    how = "measured by magicdec calibrate"
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(torch.device(device))
        return HardwareProfile(
            name=_slug(properties.name),
            kind="gpu",
            memory_bytes=float(properties.total_memory),
            memory_bytes_per_s=max(bandwidth, microbench.copy_bytes_per_s(device=device)),
            flops_per_s=rates,
            num_multiprocessors=properties.multi_processor_count,
            l2_bytes=float(getattr(properties, "L2_cache_size", 0)),
            link=Link(bytes_per_s=bandwidth, topology="nvlink"),
            sources={"memory_bytes_per_s": how, "flops_per_s": how},
        )
    memory = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return HardwareProfile(
        name=_slug(f"cpu-{current_environment().host_cpu}"),
        kind="cpu",
        memory_bytes=memory,
        memory_bytes_per_s=bandwidth,
        flops_per_s=rates,
        num_multiprocessors=torch.get_num_threads(),
        l2_bytes=_last_level_cache_bytes(),
        link=Link(bytes_per_s=bandwidth / 4, topology="shared-memory", num_gpus_per_node=1),
        sources={"memory_bytes_per_s": how, "flops_per_s": how},
    )


def _fit_hardware(base: HardwareProfile, points: Sequence[Point], precision: Precision) -> HardwareProfile:
    fitted_on = f"micro-benchmarks on {base.name}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    dtype = precision.weight_dtype
    gemm = fit_gemm(_rows(points, "linear"), base, weight_dtype=dtype, compute_dtype=dtype, fitted_on=fitted_on)
    attention = fit_attention(
        _rows(points, "attention"), base, kv_dtype=precision.kv_dtype, library="magicdec", fitted_on=fitted_on
    )
    elementwise = fit_elementwise(_rows(points, "elementwise"), base, fitted_on=fitted_on)
    return msgspec.structs.replace(base, gemm=gemm, attention=attention, elementwise=elementwise)


def _rows(points: Sequence[Point], table: str) -> dict[str, np.ndarray]:
    chosen = [point for point in points if point.table == table]
    rows = {key: np.array([p.shape[key] for p in chosen], dtype=np.float64) for key in chosen[0].shape}
    rows["time_s"] = np.array([p.time_s for p in chosen])
    return rows


def _base_engine(hardware_name: str) -> EngineProfile:
    """Our engine before anything is measured."""
    ours = load_engine("ours")
    return msgspec.structs.replace(
        ours,
        name=f"ours on {hardware_name}",
        fitted_on=f"single engine steps on {hardware_name}",
        attention_kernel="measured",
        forward_overhead_s=0.0,
        workspace_bytes=0.0,
    )


def _last_level_cache_bytes() -> float:
    """The largest cache of the first processor, as the kernel tells it; 0 when it does not."""
    sizes = [0.0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM]?)", file.read_text().strip())
        if match:
            sizes.append(float(match[1]) * {"": 1, "K": KIB, "M": MIB}[match[2]])
    return max(sizes)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or platform.machine()


def obtain_profile(
    model: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    request: AcceptanceRequest | None = None,
    quick: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> LocalProfile:
    """Calibrates this machine and measures the model's acceptance on it."""
    calibration = calibrate(model=model, dtype=dtype, device=device, quick=quick, progress=progress)
    request = request or AcceptanceRequest(model=model, dtype=dtype, device=device)
    rows = measure_acceptance(request, progress=progress)
    return LocalProfile(
        hardware=calibration.hardware,
        engine=calibration.engine,
        acceptance=tuple(fit_profiles(request, rows)),
    )
