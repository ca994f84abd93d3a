"""`magicdec calibrate`: this machine's profiles, by micro-benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from magicdec.commands.options import require
from magicdec.errors import unknown_choice
from magicdec.progress import shown_progress
from magicdec.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from magicdec.calibrate.machine import Calibration
    from magicdec.commands.calibrate import CalibrateOptions
    from magicdec.specs.engine import EngineProfile

LOCAL_PROFILE = Path("local.toml")
RUNTIMES: dict[str, Literal["ours", "vllm"]] = {"ours": "ours", "vllm": "vllm"}
DRIFT_TO_WARN_OF = 0.1
NOISE_TO_WARN_OF = 0.3
WAYS_TO_LAUNCH = ("launched from Python", "a graph alone", "one of a graph's 200")


def calibrate_machine(asked: CalibrateOptions) -> None:
    """Runs the micro-benchmarks of this machine and writes its profiles and their points."""
    require(not asked.dry_run, "--dry-run goes with --server")
    require(
        asked.weight_dtype is None and asked.kv_dtype is None,
        "--weight-dtype and --kv-dtype describe a server; give --dtype for this machine",
    )
    runtime = _runtime(asked)
    from magicdec.measure.environment import bind_threads, prepare

    prepare(asked.clock, asked.device)
    bind_threads()  # before torch is imported, which reads the binding once
    from magicdec.calibrate.local_profile import LocalProfile, save_points
    from magicdec.calibrate.machine import calibrate
    from magicdec.files import check_writable
    from magicdec.specs.known_heads import head_beside

    head = None
    if runtime == "ours":
        head = head_beside(asked.model)
    check_writable(asked.output)
    with shown_progress(asked.quiet) as show:
        result = calibrate(
            model=asked.model,
            weights=asked.weights,
            dtype=asked.dtype or "float32",
            device=asked.device,
            quick=asked.quick,
            engine=runtime,
            clock=asked.clock,
            head=head,
            progress=show,
        )
    profile = LocalProfile(
        hardware=result.hardware, engine=result.engine, acceptance=()
    )
    files = [*profile.save(asked.output), save_points(result.points, asked.output)]
    _print_machine(result)
    print("wrote " + ", ".join(map(str, files)))
    print(f"next: magicdec profile-acceptance --model {asked.model} -o {asked.output}")


def _runtime(asked: CalibrateOptions) -> Literal["ours", "vllm"]:
    """The runtime to calibrate. Raises ConfigError for options that it does not take."""
    engine = asked.engine or "ours"
    runtime = RUNTIMES.get(engine)
    if runtime is None:
        raise unknown_choice("engine to calibrate", engine, RUNTIMES)
    require(
        asked.clock == "wall" or runtime == "vllm",
        "--clock cpu goes with --engine vllm",
    )
    require(
        asked.weights == "checkpoint" or runtime == "ours",
        "--weights random goes with --engine ours",
    )
    return runtime


def _print_machine(result: Calibration) -> None:
    """Prints what was fitted and how well, the engine's costs beyond the kernels', and how quiet
    the machine was.
    """
    _print_hardware(result)
    _print_engine(result.engine)
    drifts = ", ".join(f"{name} {drift:+.1%}" for name, drift in result.drift.items())
    print(
        f"noise between rounds {result.noise:.1%}; from the first pass to the second: {drifts}"
    )
    if result.noise > NOISE_TO_WARN_OF:
        print(
            "the machine is too noisy for predictions to be trusted; calibrate again when it is "
            "quieter"
        )
    elif max(map(abs, result.drift.values())) > DRIFT_TO_WARN_OF:
        print(
            "the machine's speed changed while it was measured; calibrate again when it is quieter"
        )


def _print_hardware(result: Calibration) -> None:
    """The device's rates, how well they fit, and the time of small kernels."""
    machine = result.hardware
    size = format_bytes(machine.memory_bytes)
    bandwidth = format_rate(machine.memory_bytes_per_s, "B")
    rates = []
    for name, rate in machine.flops_per_s.items():
        rates.append(f"{format_rate(rate, 'FLOP')} {name}")
    print(f"{machine.name}: {size} at {bandwidth}, {', '.join(rates)}")
    errors = ", ".join(
        f"{phase} {error:.1%}" for phase, error in result.phase_error.items()
    )
    seconds = format_seconds(result.elapsed_s)
    print(
        f"{len(result.points)} points in {seconds}; median error of the fit: {errors}"
    )
    curves = {
        "linear": machine.gemm,
        "attention": machine.attention,
        "elementwise": machine.elementwise,
    }
    fits = []
    for name, curve in curves.items():
        if curve:
            fits.append(f"{name} {curve.fit.relative_error:.1%}")
    print(f"root mean square error of the kernels' curves: {', '.join(fits)}")
    launches = [point for point in result.points if point.table == "launch"]
    for point, way in zip(launches, WAYS_TO_LAUNCH, strict=False):
        print(f"a small kernel, {way}: {format_seconds(point.time_s)}")


def _print_engine(engine: EngineProfile) -> None:
    """The engine's factors over its kernels, and its fixed costs."""
    factors = {
        "linear layers": engine.kernels.gemm_factor,
        "attention": engine.kernels.attention_factor,
        "of verification": engine.kernels.verify_attention_factor,
        "of drafts": engine.kernels.draft_attention_factor,
    }
    times = ", ".join(f"{name} {value:.2f}" for name, value in factors.items())
    print(f"{engine.name}, times its kernels: {times}")
    costs = {
        "layer of a pass": engine.overheads.layer_overhead_s,
        "draft step": engine.overheads.draft_step_overhead_s,
        "block of drafts": engine.overheads.draft_block_overhead_s,
        "verification": engine.overheads.verify_overhead_s,
        "speculative step": engine.overheads.step_overhead_s
        + engine.overheads.upkeep_base_s,
        "autoregressive step": engine.overheads.autoregressive_overhead_s,
        "sequence of a step": engine.overheads.sequence_overhead_s,
    }
    fixed = ", ".join(
        f"{name} {format_seconds(value)}" for name, value in costs.items()
    )
    print(f"fixed costs per {fixed}")
