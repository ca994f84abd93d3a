"""`magicdec calibrate`: micro-benchmarks of this machine, fitted to a hardware profile and to the
profile of an engine on it, our runtime or vLLM."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from magicdec.calibrate import kernel_bench
from magicdec.calibrate.acceptance_bench import (
    AcceptanceRequest,
    fit_profiles,
    measure_acceptance,
)
from magicdec.calibrate.engine import (
    TimedHead,
    engine_points,
    fit_engine,
    vllm_points,
)
from magicdec.calibrate.kernel_bench import TimedCall
from magicdec.calibrate.local_profile import LocalProfile, TimedPoint
from magicdec.calibrate.unfinished import Unfinished
from magicdec.errors import unknown_choice
from magicdec.measure.configuration import Weights, check_device
from magicdec.measure.engines import Runtime, installed_engine
from magicdec.measure.environment import (
    Clock,
    ReferenceKernels,
    ReferenceTimes,
    median_times,
    spread_of_times,
)
from magicdec.measure.utilisation import (
    bandwidth_bytes_per_s,
    copy_bytes_per_s,
    is_cuda,
    peak_flops_per_s,
)
from magicdec.perfmodel.kernels.attention import Attended, AttentionCurve
from magicdec.perfmodel.kernels.gemm import ElementwiseCurve, GemmCurve, Product, Stream
from magicdec.perfmodel.kernels.profile import (
    HardwareProfile,
    hardware_names,
    load_hardware,
)
from magicdec.progress import Progress, Stages, StepMessage
from magicdec.runtime.heads.builder import load_head
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.weights import load_model
from magicdec.schema.record import current_environment
from magicdec.specs.catalog import checkpoint_directory, load_model_spec
from magicdec.specs.device import Link
from magicdec.specs.engine import EngineProfile, load_engine
from magicdec.specs.known_heads import NamedHead
from magicdec.specs.model import ModelSpec
from magicdec.specs.precision import PROFILE_DTYPES, Precision
from magicdec.units import KIB, MIB

HEAD_QUERY_LENGTHS = (1, 2, 4, 6)
"""Tokens per sequence at which a head's attention is timed."""
STAGE_SHARES = (1.0, 12.0, 18.0, 3.0)
"""About how the time goes: ceilings, kernels, the engine's steps, the second pass and the fit."""
CALIBRATION_SHARE = 0.6
"""Share of the time that the calibration takes, the measurement of acceptance following."""


@dataclass(frozen=True)
class Calibration:
    """A calibrated machine: what was measured and fitted.

    `references` are the reference kernels' times during the engine's steps. `drift` says how much
    slower the machine was then than during the kernels, relative: "memory" and "compute" by those
    two, "kernels" by the linear layers (timed again at the end, against the first pass).
    """

    hardware: HardwareProfile
    engine: EngineProfile
    points: list[TimedPoint]
    phase_error: dict[str, float]
    references: ReferenceTimes
    drift: dict[str, float]
    elapsed_s: float

    @property
    def noise(self) -> float:
        """Median over the points of the spread between rounds."""
        return float(np.median([point.spread for point in self.points]))


def calibrate(
    *,
    model: str | Transformer = "embedded",
    weights: Weights = "checkpoint",
    device: str = "cpu",
    dtype: str = "float32",
    rounds: int = 5,
    quick: bool = False,
    engine: Runtime = "ours",
    clock: Clock = "wall",
    head: NamedHead | None = None,
    keep: Path | None = None,
    progress: Progress = lambda _: None,
) -> Calibration:
    """Measures and fits, with a model's shapes (a name, which vLLM loads itself, or a loaded model
    of the device and dtype). `quick` times every other engine shape, in fewer rounds. `head`: a
    trained head of the model, whose steps are timed too. `keep`: the file of what was measured, with
    which an interrupted calibration goes on."""
    if dtype not in PROFILE_DTYPES:
        raise unknown_choice("dtype", dtype, PROFILE_DTYPES)
    precision = Precision(
        weight_dtype=PROFILE_DTYPES[dtype], kv_dtype=PROFILE_DTYPES[dtype]
    )
    check_device(device)
    started = time.perf_counter()
    kernels = ReferenceKernels(device, clock)
    before = [kernels.times()]
    during: list[ReferenceTimes] = []

    def speed_of_steps() -> ReferenceTimes:
        during.append(kernels.times())
        return during[-1]

    if quick:
        rounds = max(min(rounds, 3), rounds // 2)
    about = (str(model), weights, device, dtype, rounds, quick, engine, clock)
    environment = (current_environment().host_cpu, torch.get_num_threads())
    unfinished = Unfinished(keep, of=repr((*about, *environment, torch.__version__)))
    time_steps: Callable[..., list[TimedPoint]]
    timed_head = None
    if engine == "vllm" and isinstance(model, str):
        spec = load_model_spec(model)
        name = installed_engine(engine)
        time_steps = partial(
            vllm_points, model, device=device, dtype=dtype, clock=clock
        )
    else:
        directory = None
        if not isinstance(model, Transformer):
            directory = checkpoint_directory(model)
            model = load_model(model, weights=weights, device=device, dtype=dtype)
        spec, name = model.spec, "ours"
        if head is not None:
            timed_head = _loaded(head, model, weights=weights, inside=directory)
        speed: Callable[[], ReferenceTimes] | None = speed_of_steps
        if is_cuda(device):
            # a GPU keeps its speed, and small references wait for their launches
            speed = None
        time_steps = partial(
            engine_points, model, head=timed_head, speed=speed, unfinished=unfinished
        )
    show_first, show_kernels, show_engine, show_last = map(
        Stages(progress, STAGE_SHARES).stage, range(4)
    )
    show_first("copy and matrix rates")
    if is_cuda(device):
        base = _cuda_ceilings(device, dtype)
    else:
        base = _cpu_ceilings(dtype, clock)

    tables = []
    timed = partial(kernel_bench.time_interleaved, device=device, clock=clock)
    networks = [spec]
    if timed_head is not None:
        networks.append(timed_head.weights.layout.spec)
    kinds = _kernels(networks, device=device, dtype=dtype)
    for number, (table, works_of) in enumerate(kinds.items()):
        works = works_of()
        time_kernels = partial(timed, works, rounds=rounds)
        show_kernels(
            StepMessage(
                f"{table}: {len(works)} shapes, {rounds} rounds",
                done=number,
                total=len(kinds),
            )
        )
        tables.append(unfinished.part(table, time_kernels))
        before.append(kernels.times())
    if is_cuda(device):
        launches = kernel_bench.launch_points(device=device, rounds=rounds)
    else:
        launches = []
    points = [*launches, *(point for table in tables for point in table)]
    speed_of_steps()
    steps = time_steps(rounds=rounds, quick=quick, progress=show_engine)
    show_last("second pass")
    again = timed(kinds["linear layers"](), rounds=2)
    show_last("fitting")
    first = median_times(before)
    then = median_times(during)
    spread = spread_of_times([*before, *during])
    base = msgspec.structs.replace(
        base,
        reference_s=then.memory_s,
        compute_reference_s=then.compute_s,
    )
    hardware = _fit_hardware(base, points, precision)
    fit = fit_engine(
        steps,
        model=spec,
        hardware=hardware,
        precision=precision,
        base=_base_engine(name, base.name),
        head=None if timed_head is None else timed_head.speculation,
    )
    hardware = msgspec.structs.replace(
        hardware,
        memory_spread=spread.memory_s,
        compute_spread=spread.compute_s,
    )
    drift = _drift(first, then, tables[0], again)
    elapsed_s = time.perf_counter() - started
    return Calibration(
        hardware,
        fit.profile,
        [*points, *steps],
        fit.phase_error,
        then,
        drift,
        elapsed_s,
    )


def _loaded(
    head: NamedHead, model: Transformer, *, weights: Weights, inside: Path | None
) -> TimedHead:
    """A head with its weights, random ones beside a target of random ones. `inside`: the target's
    checkpoint, where the head is a part of it."""
    place = None
    if head.checkpoint is not None:
        place = Path(head.checkpoint)
    return TimedHead(
        head,
        load_head(
            place,
            model,
            method=head.method,
            weights=weights,
            target_directory=inside,
        ),
    )


def _drift(
    first: ReferenceTimes,
    then: ReferenceTimes,
    linear: Sequence[TimedPoint],
    again: Sequence[TimedPoint],
) -> dict[str, float]:
    kernels = np.median(
        [b.time_s / a.time_s for a, b in zip(linear, again, strict=True)]
    )
    memory = then.memory_s / first.memory_s
    compute = then.compute_s / first.compute_s
    return {
        "kernels": float(kernels) - 1.0,
        "memory": memory - 1.0,
        "compute": compute - 1.0,
    }


def _kernels(
    networks: Sequence[ModelSpec], *, device: str, dtype: str
) -> dict[str, Callable[[], list[TimedCall]]]:
    """The kernels that are timed by themselves, table by table, at the shapes of the target and of
    its head."""

    def attention_works() -> list[TimedCall]:
        target, *heads = networks
        works = kernel_bench.attention_works(target, device=device, dtype=dtype)
        for head in heads:
            works += kernel_bench.attention_works(
                head, device=device, dtype=dtype, query_lengths=HEAD_QUERY_LENGTHS
            )
        return works

    return {
        "linear layers": partial(
            kernel_bench.linear_works, networks, device=device, dtype=dtype
        ),
        "attention": attention_works,
        "streaming passes": partial(kernel_bench.streaming_works, device=device),
    }


MEASURED = "measured by magicdec calibrate"


def _cpu_ceilings(dtype: str, clock: Clock) -> HardwareProfile:
    """Measured rates as the profile's ceilings; efficiencies are relative to them."""
    bandwidth = bandwidth_bytes_per_s(device="cpu", clock=clock)
    return HardwareProfile(
        name=_slug(f"cpu-{current_environment().host_cpu}"),
        kind="cpu",
        memory_bytes=float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        memory_bytes_per_s=bandwidth,
        flops_per_s={
            PROFILE_DTYPES[dtype]: peak_flops_per_s(
                device="cpu", dtype=dtype, clock=clock
            )
        },
        num_multiprocessors=torch.get_num_threads(),
        l2_bytes=_last_level_cache_bytes(),
        # an exchange through memory reads and writes each byte at the sender, and again at the receiver
        link=Link(
            bytes_per_s=bandwidth / 4, topology="shared-memory", num_gpus_per_node=1
        ),
        sources={"memory_bytes_per_s": MEASURED, "flops_per_s": MEASURED},
    )


CUDA_PEAK_SIZE = 8192
"""Rows and columns of the product that is timed for the peak: three such matrices exceed any cache."""


def _cuda_ceilings(device: str, dtype: str) -> HardwareProfile:
    """Links, which one process cannot measure, are the catalog's where it knows the device."""
    properties = torch.cuda.get_device_properties(torch.device(device))
    name = _slug(properties.name)
    bandwidth = copy_bytes_per_s(device=device)
    rate = peak_flops_per_s(device=device, dtype=dtype, size=CUDA_PEAK_SIZE)
    known = device_in_catalog(name)
    allreduce = None
    # of the order of PCIe's, where nothing is known of the device
    link = Link(bytes_per_s=bandwidth / 10, topology="pcie")
    source = "assumed"
    if known:
        allreduce = known.allreduce
        link = known.link
        source = f"the catalog's {known.name}"
    return HardwareProfile(
        name=name,
        kind="gpu",
        memory_bytes=float(properties.total_memory),
        usable_bytes=float(properties.total_memory),
        memory_bytes_per_s=bandwidth,
        flops_per_s={PROFILE_DTYPES[dtype]: rate},
        num_multiprocessors=properties.multi_processor_count,
        l2_bytes=float(kernel_bench.l2_bytes(device)),
        link=link,
        allreduce=allreduce,
        sources={
            "memory_bytes_per_s": f"{MEASURED}: bytes read and written per second of a copy",
            "flops_per_s": f"{MEASURED}: a product of {CUDA_PEAK_SIZE}-square matrices",
            "link": source,
        },
    )


def device_in_catalog(name: str) -> HardwareProfile | None:
    """The catalog's profile of a device that calls itself so ("NVIDIA H200"), by the longest name
    that fits.
    """
    name = _slug(name)
    for known in sorted(hardware_names(), key=len, reverse=True):
        profile = load_hardware(known)
        if any(f"-{alias}-" in f"-{name}-" for alias in (known, *profile.aliases)):
            return profile
    return None


def _fit_hardware(
    base: HardwareProfile,
    points: Sequence[TimedPoint],
    precision: Precision,
) -> HardwareProfile:
    fitted_on = (
        f"micro-benchmarks on {base.name}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads"
    )
    dtype = precision.weight_dtype
    rotated = base.kind == "gpu"
    rows = _rows(points, "linear")
    products = Product(
        rows["m"],
        rows["n"],
        rows["k"],
        dtype,
        dtype,
    )
    gemm = GemmCurve().refitted(
        base, products, rows, rotated=rotated, fitted_on=fitted_on
    )
    rows = _rows(points, "attention")
    known = AttentionCurve(library="magicdec")
    attended = Attended(
        rows["batch_size"],
        rows["query_len"],
        rows["kv_len"],
        rows["num_heads"],
        rows["num_kv_heads"],
        rows["head_dim"],
        precision.kv_dtype,
    )
    attention = known.refitted(
        base, attended, rows, rotated=rotated, fitted_on=fitted_on
    )
    rows = _rows(points, "elementwise")
    streams = Stream(rows["num_bytes"], rows["num_kernels"])
    elementwise = ElementwiseCurve().refitted(base, streams, rows, fitted_on=fitted_on)
    return msgspec.structs.replace(
        base,
        gemm=gemm.over(products),
        attention=attention.over(attended),
        elementwise=elementwise.over(streams),
    )


def _rows(points: Sequence[TimedPoint], table: str) -> dict[str, np.ndarray]:
    chosen = []
    for point in points:
        if point.table == table:
            chosen.append(point)
    rows = {}
    for key in chosen[0].shape:
        rows[key] = np.array([point.shape[key] for point in chosen], dtype=np.float64)
    rows["time_s"] = np.array([point.time_s for point in chosen])
    return rows


def _base_engine(name: str, hardware_name: str) -> EngineProfile:
    """An engine ("ours", "vllm 0.32.0") before anything is measured."""
    known = load_engine(name.partition(" ")[0])
    if known.name != "ours":
        # the catalog's constants are fitted to other devices; what the engine can do stays
        known = EngineProfile(name=known.name, drafts=known.drafts).with_constants(
            {
                "kernels.native_formats": known.kernels.native_formats,
                "kernels.fused_experts": known.kernels.fused_experts,
                "paths.draft_on_all_ranks": known.paths.draft_on_all_ranks,
                "paths.catch_up": known.paths.catch_up,
                "paths.streaming_in_place": True,
            }
        )
    return known.with_constants(
        {
            "name": f"{name} on {hardware_name}",
            "fitted_on": f"single engine steps on {hardware_name}",
            "overheads.forward_overhead_s": 0.0,
            "memory.workspace_bytes": 0.0,
        }
    )


def _last_level_cache_bytes() -> float:
    """The largest cache of the first processor, as reported by the kernel; 0 if it reports none."""
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
    engine: Runtime = "ours",
    clock: Clock = "wall",
    request: AcceptanceRequest | None = None,
    quick: bool = False,
    head: NamedHead | None = None,
    keep: Path | None = None,
    progress: Progress = lambda _: None,
) -> LocalProfile:
    """Calibrates this machine and measures the model's acceptance on it. `keep`: as `calibrate`."""
    stages = Stages(progress, (CALIBRATION_SHARE, 1.0 - CALIBRATION_SHARE))
    found = calibrate(
        model=model,
        dtype=dtype,
        device=device,
        quick=quick,
        engine=engine,
        clock=clock,
        head=head,
        keep=keep,
        progress=stages.stage(0),
    )
    request = request or AcceptanceRequest(model=model, dtype=dtype, device=device)
    laws = fit_profiles(request, measure_acceptance(request, progress=stages.stage(1)))
    return LocalProfile(
        hardware=found.hardware, engine=found.engine, acceptance=tuple(laws)
    )
