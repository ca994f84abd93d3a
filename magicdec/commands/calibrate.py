"""`magicdec calibrate`: fit profiles to this machine, or to a server."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from magicdec.commands import options
from magicdec.commands.options import (
    LOCAL_PROFILE,
    option,
    parse_ints,
    require,
    server_tp,
)
from magicdec.errors import ConfigError, ServerError, unknown_choice
from magicdec.progress import kept, shown_progress
from magicdec.redaction import quoted
from magicdec.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from magicdec.calibrate.machine import Calibration
    from magicdec.live.advice import Serving
    from magicdec.live.calibration import ServerFit
    from magicdec.live.drive import LoadPlan, Measured, SentLoad
    from magicdec.specs.engine import EngineProfile

EPILOG = options.examples(
    "calibrate -o local.toml",
    "plan --model embedded --hardware local.toml --engine local.engine.toml --batch 32 --context "
    "4096",
    "calibrate --engine vllm --clock cpu -o vllm.toml",
    "calibrate --server http://localhost:8000 --model llama-3.1-8b --hardware h100 --dry-run",
    "calibrate --results benchmarks.json --model llama-3.1-8b --hardware h100 --engine vllm",
)
SERVER_PROFILE = Path("server.engine.toml")
UNKNOWN_FROM = 100.0
"""Ratio of an interval's ends from which the loads say nothing of a factor."""
RUNTIMES: dict[str, Literal["ours", "vllm"]] = {"ours": "ours", "vllm": "vllm"}
DRIFT_TO_WARN_OF = 0.1
NOISE_TO_WARN_OF = 0.3
WAYS_TO_LAUNCH = ("launched from Python", "a graph alone", "one of a graph's 200")
SEVERAL_TOKENS = 1.05


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Options of `magicdec calibrate`: the machine or server to fit."""

    output: Annotated[Path, option("Profile to write (TOML).", "--output", "-o")] = (
        LOCAL_PROFILE
    )
    model: options.Checkpoint = "embedded"
    weights: Annotated[
        Literal["checkpoint", "random"], option("checkpoint, or random.")
    ] = "checkpoint"
    dtype: options.OptionalDtype = None
    device: options.DeviceName = "cpu"
    quick: Annotated[bool, option("Fewer shapes and rounds.", "--quick")] = False
    clock: Annotated[Literal["wall", "cpu"], option(options.CLOCK_HELP)] = "wall"
    server: Annotated[
        str | None, option("Fit an engine profile to this running server instead.")
    ] = None
    results: Annotated[
        list[Path] | None,
        option(
            "Fit to GuideLLM's or AIPerf's results instead, or, with --plan, to a cost check's; "
            "repeatable."
        ),
    ] = None
    plan: Annotated[
        Path | None,
        option(
            "The plan whose cost was checked (export --check-cost); with --results."
        ),
    ] = None
    hardware: Annotated[
        str | None, option("The server's device; with --server or --results.")
    ] = None
    engine: Annotated[
        str | None,
        option(
            "ours, or vllm with magicdec's plugin (docs/vllm.md); with --server the profile to "
            "start from."
        ),
    ] = None
    tp: options.ServerTp = None
    weight_dtype: options.ServerFormat = None
    kv_dtype: options.ServerFormat = None
    concurrency: Annotated[
        str, option("Requests at once to send the server, a list.")
    ] = "1,2,4,8,16"
    prompt_len: Annotated[
        str | None,
        option(
            "Prompt lengths to send, a list; default: 256,1024,2048, shortened to fit the server."
        ),
    ] = None
    output_len: Annotated[int, option("Tokens to generate per request.")] = 48
    rounds: Annotated[int, option("Times that every load is sent.")] = 3
    dry_run: Annotated[
        bool, option("Say what would be sent, and its cost; send none.", "--dry-run")
    ] = False
    quiet: options.Quiet = False


@options.asks(CalibrateOptions)
def calibrate_command(asked: CalibrateOptions) -> None:
    """Fit profiles to this machine, or to a server.

    By micro-benchmarks of this machine, or by timing a running server from outside.
    """
    require(
        asked.server is None or not asked.results,
        "--server is timed, --results are read: give one of them",
    )
    require(
        asked.plan is None or bool(asked.results),
        "--plan goes with --results of its cost check",
    )
    if asked.plan is not None:
        _calibrate_cost(asked.results or [], asked.plan, asked.engine, asked.output)
    elif asked.results:
        _calibrate_results(asked, asked.results)
    elif asked.server is not None:
        _calibrate_server(asked, asked.server)
    else:
        _calibrate_machine(asked)


def _calibrate_machine(asked: CalibrateOptions) -> None:
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
    from magicdec.calibrate.unfinished import unfinished_path
    from magicdec.files import check_writable
    from magicdec.specs.known_heads import head_beside

    head = None
    if runtime == "ours":
        head = head_beside(asked.model)
    check_writable(asked.output)
    keep = unfinished_path(asked.output)
    kept_line = f"{keep} keeps what was timed; the same command goes on with it"
    with shown_progress(asked.quiet) as show, kept(lambda: kept_line):
        result = calibrate(
            model=asked.model,
            weights=asked.weights,
            dtype=asked.dtype or "float32",
            device=asked.device,
            quick=asked.quick,
            engine=runtime,
            clock=asked.clock,
            head=head,
            keep=keep,
            progress=show,
        )
    profile = LocalProfile(
        hardware=result.hardware, engine=result.engine, acceptance=()
    )
    files = [*profile.save(asked.output), save_points(result.points, asked.output)]
    keep.unlink()
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


def _serving_of(asked: CalibrateOptions) -> Serving:
    """The server that is asked about. Raises ConfigError without its device, or for an unknown
    number format."""
    from magicdec.live.advice import Serving
    from magicdec.specs.precision import PROFILE_DTYPES

    require(
        asked.hardware is not None,
        "--server and --results need the server's device: give --hardware",
    )
    require(
        not (asked.results and asked.dry_run),
        "--dry-run goes with --server: nothing is sent for --results",
    )
    if asked.dtype is not None and asked.dtype not in PROFILE_DTYPES:
        raise unknown_choice("dtype", asked.dtype, PROFILE_DTYPES)
    return Serving(
        model=asked.model,
        hardware=asked.hardware or "",
        engine=asked.engine,
        tp_size=server_tp(asked.tp, asked.hardware),
        temperature=0.0,
        weight_dtype=asked.weight_dtype or asked.dtype,
        kv_dtype=asked.kv_dtype or asked.dtype,
    )


def _profile_of_server(asked: CalibrateOptions) -> Path:
    """The file of a server's profile: unless one is named, not that of this machine."""
    if asked.output == LOCAL_PROFILE:
        return SERVER_PROFILE
    return asked.output


def _calibrate_server(asked: CalibrateOptions, server_address: str) -> None:
    """Fits an engine profile to a running server, as a black box, by loads that suit it."""
    from magicdec.files import check_writable
    from magicdec.live.calibration import (
        describe_server,
        estimated_seconds,
        fit_server,
        save_loads,
        send_plan,
    )
    from magicdec.live.drive import drive_load, plan_loads
    from magicdec.live.http import parse_address
    from magicdec.specs.catalog import load_model_spec

    serving = _serving_of(asked)
    output = _profile_of_server(asked)
    prompt_lens: Sequence[int] = ()
    if asked.prompt_len:
        prompt_lens = parse_ints(asked.prompt_len, "--prompt-len")
    concurrencies = parse_ints(asked.concurrency, "--concurrency")
    address = parse_address(server_address)
    spec = load_model_spec(serving.model)
    tp = serving.tp_size
    require(
        not address.path,
        "--server is the server's own address, without a path: http://localhost:8000",
    )
    check_writable(output)
    server = describe_server(address, spec)
    setup = serving.setup(server.draft, server.engine)
    # prompts that were sent before would be cached, so the seed is new
    loads = plan_loads(
        concurrencies=concurrencies,
        output_len=asked.output_len,
        rounds=asked.rounds,
        prompt_lens=prompt_lens,
        max_len=server.max_len,
        gamma=server.gamma,
        seed=secrets.randbits(31),
    )
    drafts = "no draft"
    if server.gamma:
        drafts = f"gamma {server.gamma} by {server.draft}"
    print(
        f"{address}: {quoted(server.model)}, {server.engine or 'an unknown engine'}, {drafts}"
    )
    seconds = format_seconds(estimated_seconds(loads, setup, tp_size=tp))
    _print_loads(loads, f"about {seconds} by the {setup.engine.name} profile")
    if asked.dry_run:
        print("nothing was sent")
        return

    def send(load: SentLoad, seed: int) -> Measured:
        return drive_load(
            address, load, model=server.model, vocab_size=spec.vocab_size, seed=seed
        )

    with shown_progress(asked.quiet) as show:
        sent = send_plan(address, loads, send, max_len=server.max_len, progress=show)
    for line in sent.skipped:
        print(f"left out: {line}")
    print(sent.noise_line)
    try:
        fit = fit_server(
            sent.points,
            setup=setup,
            tp_size=tp,
            gamma=server.gamma,
            name=output.stem,
            noise=sent.noise or 0.0,
        )
    except ConfigError as error:
        print(f"kept what was measured: {save_loads(sent.points, loads.about, output)}")
        if sent.stopped:
            raise ServerError(f"{sent.stopped}; {error}") from None
        raise
    _print_fit(fit, sent.points)
    _write_fit(fit, sent.points, loads.about, serving, output)
    if sent.stopped:
        raise ServerError(
            f"{sent.stopped}; fitted to the {len(sent.points)} loads that were measured before"
        )


def _print_loads(loads: LoadPlan, duration: str) -> None:
    """Lines that say which loads will be sent, and how long they take."""
    num_judges = sum(load.is_judge for load in loads.loads)
    print(
        f"{len(loads.loads)} loads x {loads.rounds} rounds, {num_judges} loads only to judge, the "
        f"smallest once more first and last: {loads.num_requests} requests, {loads.num_tokens} "
        f"tokens, {duration}"
    )
    for load in loads.loads:
        judges = ""
        if load.is_judge:
            judges = "  (judges)"
        print(f"  {load}{judges}")


def _calibrate_results(asked: CalibrateOptions, paths: Sequence[Path]) -> None:
    """Fits an engine profile to the result files of a load generator."""
    from magicdec.files import check_writable
    from magicdec.live.benchmark_results import points_of, read_runs, tokens_per_event
    from magicdec.live.calibration import NOISE_LIMIT, fit_server, noise

    serving = _serving_of(asked)
    output = _profile_of_server(asked)
    check_writable(output)
    runs = list(chain.from_iterable(map(read_runs, paths)))
    points = points_of(runs)
    num_requests = sum(map(len, runs))
    fit = fit_server(
        points,
        setup=serving.setup(None),
        tp_size=serving.tp_size,
        gamma=0,
        name=output.stem,
    )
    print(
        f"{num_requests} requests in {len(runs)} runs, {len(points)} loads by batch and prompt "
        "length"
    )
    per_event = tokens_per_event(runs)
    if per_event > SEVERAL_TOKENS:
        print(
            f"{per_event:.2f} tokens came with each event: were these runs without a draft? The "
            "fit assumes that"
        )
    _print_fit(fit, points, between="requests")
    if (noise(points) or 0.0) > NOISE_LIMIT:
        print(
            "the requests differ much: the server or its machine did other work; measure again "
            "when it is quieter"
        )
    origin = {
        "read": {"files": [path.name for path in paths], "requests": num_requests}
    }
    _write_fit(fit, points, origin, serving, output)


def _print_fit(
    fit: ServerFit, points: Sequence[Measured], *, between: str = "rounds"
) -> None:
    """Every load with its error, the constants with their intervals, and the two medians."""
    for point, error in zip(points, fit.errors, strict=True):
        role = "fitted"
        if point.load.is_judge:
            role = "judges"
        spread = "sent once"
        if point.spread is not None:
            spread = f"± {point.spread:.0%} between {between}"
        measured = f"{format_seconds(point.tpot_s)} per token measured ({spread})"
        print(f"  {point.load!s:<16} {role}: {measured}, predicted {error:+.1%}")
    for name, (value, low, high) in fit.constants.items():
        doubt = ""
        if name.endswith("_factor") and high >= UNKNOWN_FROM * low:
            doubt = ": these loads do not tell it"
        print(f"  {name}: {value:.4g} (90 % interval {low:.4g} to {high:.4g}){doubt}")
    print(
        f"median error {fit.fitted_error:.1%} of the fitted loads, {fit.held_out_error:.1%} of "
        "those that judge"
    )


def _write_fit(
    fit: ServerFit,
    points: Sequence[Measured],
    origin: dict[str, Any],
    serving: Serving,
    output: Path,
) -> None:
    from magicdec.live.calibration import save_fit

    files = save_fit(fit, points, origin, output)
    print("wrote " + ", ".join(map(str, files)))
    command = options.command(
        "plan", model=serving.model, hardware=serving.hardware, engine=output
    )
    print(f"next: {command}")


def _calibrate_cost(
    paths: Sequence[Path], plan: Path, engine: str | None, output: Path
) -> None:
    """Fits the plan's engine to the results of its cost check."""
    from magicdec.files import check_writable
    from magicdec.live.cost_check import fit_cost, read_cost_run
    from magicdec.perfmodel.variations import for_engine, priced
    from magicdec.schema.plan import load_plan
    from magicdec.specs.engine import save_engine

    check_writable(output)
    runs = [read_cost_run(path) for path in paths]
    planned = load_plan(plan)
    if engine is not None and engine != planned.engine:
        planned = for_engine(planned, engine).plan
    choice = priced(planned, planned.engine)
    fit = fit_cost(
        choice.setup,
        runs,
        tp_size=choice.points.tp,
        budget=choice.points.budget,
        name=output.stem,
    )
    for run, before, after in zip(runs, fit.before, fit.after, strict=True):
        drafted = "without a draft"
        if run.gamma:
            drafted = f"gamma {run.gamma}, {run.tokens:g} tokens per step"
        print(
            f"{drafted}: {format_seconds(run.tpot_s)} between tokens; predicted {before:+.0%}, now "
            f"{after:+.0%}"
        )
    save_engine(fit.profile, output)
    print(f"wrote {output}")
    row = planned.best
    command = options.command(
        "plan",
        model=planned.model,
        hardware=row.hardware,
        engine=output,
        draft=row.draft,
        batch=row.batch_size,
        context=row.context_len,
        tp=row.tp_size,
    )
    print(f"next: {command}")
