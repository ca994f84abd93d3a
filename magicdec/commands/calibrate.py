"""`magicdec calibrate` and `magicdec profile-acceptance`: measure this machine or a server, and a
model on it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from magicdec.commands import options
from magicdec.commands.options import option, parse_ints, require
from magicdec.errors import ConfigError, ServerError, unknown_choice
from magicdec.progress import shown_progress
from magicdec.specs import SELF
from magicdec.units import format_bytes, format_rate, format_seconds, printable

if TYPE_CHECKING:
    from magicdec.calibrate import Calibration
    from magicdec.live import Address, LoadPlan, Measured, ServerFit, Serving
    from magicdec.perfmodel import MeasuredProfile
    from magicdec.specs import EngineProfile

LOCAL_PROFILE = Path("local.toml")
SERVER_PROFILE = Path("server.engine.toml")
USUAL_BUDGETS = "64,128,256,512,1024"
RUNTIMES: dict[str, Literal["ours", "vllm"]] = {"ours": "ours", "vllm": "vllm"}
DRIFT_TO_WARN_OF = 0.1
NOISE_TO_WARN_OF = 0.3
WAYS_TO_LAUNCH = ("launched from Python", "a graph alone", "one of a graph's 200")
SEVERAL_TOKENS = 1.05
UNKNOWN_FROM = 100.0
"""Ratio of an interval's ends from which the loads say nothing of a factor."""

CALIBRATE_EPILOG = options.examples(
    "calibrate -o local.toml",
    "plan --model embedded --hardware local.toml --engine local.engine.toml --batch 32 --context "
    "4096",
    "calibrate --engine vllm --clock cpu -o vllm.toml",
    "calibrate --server http://localhost:8000 --model llama-3.1-8b --hardware h100 --dry-run",
    "calibrate --results benchmarks.json --model llama-3.1-8b --hardware h100 --engine vllm",
)
PROFILE_EPILOG = options.examples(
    "profile-acceptance -o local.toml --draft-budget 64,256,1024",
    "profile-acceptance --model path/to/checkpoint --prompts texts/ --draft-method "
    "streamingllm,snapkv",
    "profile-acceptance --draft ngram --prompts recall",
    "profile-acceptance --outputs docs/samples/requests.jsonl --draft ngram,suffix",
)


def calibrate_command(
    output: Annotated[
        Path, option("Profile to write (TOML).", "--output", "-o")
    ] = LOCAL_PROFILE,
    model: options.Checkpoint = "embedded",
    weights: Annotated[
        Literal["checkpoint", "random"], option("checkpoint, or random.")
    ] = "checkpoint",
    dtype: options.OptionalDtype = None,
    device: options.DeviceName = "cpu",
    quick: Annotated[bool, option("Fewer shapes and rounds.", "--quick")] = False,
    clock: Annotated[Literal["wall", "cpu"], option(options.CLOCK_HELP)] = "wall",
    server: Annotated[
        str | None, option("Fit an engine profile to this running server instead.")
    ] = None,
    results: Annotated[
        list[Path] | None,
        option(
            "Fit to GuideLLM's or AIPerf's results instead, or, with --plan, to a cost check's; "
            "repeatable."
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        option(
            "The plan whose cost was checked (export --check-cost); with --results."
        ),
    ] = None,
    hardware: Annotated[
        str | None, option("The server's device; with --server or --results.")
    ] = None,
    engine: Annotated[
        str | None,
        option(
            "ours, or vllm with magicdec's plugin (docs/vllm.md); with --server the profile to "
            "start from."
        ),
    ] = None,
    tp: options.ServerTp = 1,
    weight_dtype: options.ServerFormat = None,
    kv_dtype: options.ServerFormat = None,
    concurrency: Annotated[
        str, option("Requests at once to send the server, a list.")
    ] = "1,2,4,8,16",
    prompt_len: Annotated[
        str | None,
        option(
            "Prompt lengths to send, a list; default: 256,1024,2048, shortened to fit the server."
        ),
    ] = None,
    output_len: Annotated[int, option("Tokens to generate per request.")] = 48,
    rounds: Annotated[int, option("Times that every load is sent.")] = 3,
    dry_run: Annotated[
        bool, option("Say what would be sent, and its cost; send none.", "--dry-run")
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Fit profiles to this machine, or to a server.

    By micro-benchmarks of this machine, or by timing a running server from outside.
    """
    require(
        server is None or not results,
        "--server is timed, --results are read: give one of them",
    )
    if plan is not None:
        require(bool(results), "--plan goes with --results of its cost check")
        calibrate_cost(results or [], plan, engine, output)
        return
    if server is None and not results:
        require(not dry_run, "--dry-run goes with --server")
        require(
            weight_dtype is None and kv_dtype is None,
            "--weight-dtype and --kv-dtype describe a server; give --dtype for this machine",
        )
        runtime = _runtime(engine, clock=clock, weights=weights)
        from magicdec.measure import bind_threads, prepare

        prepare(clock, device)
        bind_threads()
        from magicdec.calibrate import calibrate
        from magicdec.specs import head_beside

        head = None
        if runtime == "ours":
            head = head_beside(model)
        measure = partial(
            calibrate,
            model=model,
            weights=weights,
            dtype=dtype or "float32",
            device=device,
            quick=quick,
            engine=runtime,
            clock=clock,
            head=head,
        )
        calibrate_machine(measure, output, model=model, quiet=quiet)
        return
    from magicdec.live import Serving, parse_address, plan_loads

    require(
        hardware is not None,
        "--server and --results need the server's device: give --hardware",
    )
    require(
        not (results and dry_run),
        "--dry-run goes with --server: nothing is sent for --results",
    )
    _check_dtype(dtype)
    serving = Serving(
        model=model,
        hardware=hardware or "",
        engine=engine,
        tp_size=tp,
        temperature=0.0,
        weight_dtype=weight_dtype or dtype,
        kv_dtype=kv_dtype or dtype,
    )
    if output == LOCAL_PROFILE:
        output = SERVER_PROFILE
    if results:
        calibrate_results(results, serving, output)
        return
    prompt_lens: Sequence[int] = ()
    if prompt_len:
        prompt_lens = parse_ints(prompt_len, "--prompt-len")
    loads = partial(
        plan_loads,
        concurrencies=parse_ints(concurrency, "--concurrency"),
        output_len=output_len,
        rounds=rounds,
        prompt_lens=prompt_lens,
    )
    address = parse_address(server or "")
    calibrate_server(address, serving, output, plan=loads, dry_run=dry_run, quiet=quiet)


def _check_dtype(dtype: str | None) -> None:
    """Raises ConfigError for a dtype that no profile has."""
    from magicdec.specs import PROFILE_DTYPES

    if dtype is not None and dtype not in PROFILE_DTYPES:
        raise unknown_choice("dtype", dtype, PROFILE_DTYPES)


def _runtime(
    engine: str | None, *, clock: str, weights: str
) -> Literal["ours", "vllm"]:
    """The runtime to calibrate. Raises ConfigError for options that it does not take."""
    runtime = RUNTIMES.get(engine or "ours")
    if runtime is None:
        raise unknown_choice("engine to calibrate", engine or "", RUNTIMES)
    require(clock == "wall" or runtime == "vllm", "--clock cpu goes with --engine vllm")
    require(
        weights == "checkpoint" or runtime == "ours",
        "--weights random goes with --engine ours",
    )
    return runtime


def calibrate_machine(
    measure: Callable[..., Calibration],
    output: Path,
    *,
    model: str,
    quiet: bool,
) -> None:
    """Runs the micro-benchmarks of this machine and writes its profiles and their points."""
    from magicdec.calibrate import LocalProfile, save_points
    from magicdec.files import check_writable

    check_writable(output)
    with shown_progress(quiet) as show:
        result = measure(progress=show)
    profile = LocalProfile(
        hardware=result.hardware, engine=result.engine, acceptance=()
    )
    files = [*profile.save(output), save_points(result.points, output)]
    _print_machine(result)
    print("wrote " + ", ".join(map(str, files)))
    print(f"next: magicdec profile-acceptance --model {model} -o {output}")


def calibrate_server(
    address: Address,
    serving: Serving,
    output: Path,
    *,
    plan: Callable[..., LoadPlan],
    dry_run: bool,
    quiet: bool,
) -> None:
    """Fits an engine profile to a running server, as a black box, by the loads that `plan` gives
    for it.
    """
    from magicdec.files import check_writable
    from magicdec.live import (
        Load,
        describe_server,
        drive_load,
        estimated_seconds,
        fit_server,
        save_loads,
        send_plan,
    )
    from magicdec.specs import load_model_spec

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
    loads = plan(max_len=server.max_len, gamma=server.gamma, seed=secrets.randbits(31))
    drafts = "no draft"
    if server.gamma:
        drafts = f"gamma {server.gamma} by {server.draft}"
    print(
        f"{address}: {printable(server.model)}, {server.engine or 'an unknown engine'}, {drafts}"
    )
    seconds = format_seconds(estimated_seconds(loads, setup, tp_size=tp))
    _print_loads(loads, f"about {seconds} by the {setup.engine.name} profile")
    if dry_run:
        print("nothing was sent")
        return

    def send(load: Load, seed: int) -> Measured:
        return drive_load(
            address, load, model=server.model, vocab_size=spec.vocab_size, seed=seed
        )

    with shown_progress(quiet) as show:
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
    _save_fit(fit, sent.points, loads.about, serving, output)
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


def calibrate_results(paths: Sequence[Path], serving: Serving, output: Path) -> None:
    """Fits an engine profile to the result files of a load generator."""
    from magicdec.files import check_writable
    from magicdec.live import (
        NOISE_LIMIT,
        fit_server,
        noise,
        points_of,
        read_runs,
        tokens_per_event,
    )

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
    _save_fit(fit, points, origin, serving, output)


def calibrate_cost(
    paths: Sequence[Path], plan: Path, engine: str | None, output: Path
) -> None:
    """Fits the plan's engine to the results of its cost check."""
    from magicdec.files import check_writable
    from magicdec.live import fit_cost, read_cost_run
    from magicdec.perfmodel import for_engine, priced
    from magicdec.schema import load_plan
    from magicdec.specs import save_engine

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


def _save_fit(
    fit: ServerFit,
    points: Sequence[Measured],
    origin: dict[str, Any],
    serving: Serving,
    output: Path,
) -> None:
    from magicdec.live import save_fit

    files = save_fit(fit, points, origin, output)
    print("wrote " + ", ".join(map(str, files)))
    command = options.command(
        "plan", model=serving.model, hardware=serving.hardware, engine=output
    )
    print(f"next: {command}")


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


def profile_acceptance_command(
    output: Annotated[
        Path,
        option(
            "PROFILE.toml; acceptance files are written next to it.", "--output", "-o"
        ),
    ] = LOCAL_PROFILE,
    model: options.Checkpoint = "embedded",
    outputs: options.LoggedOutputs = None,
    draft: Annotated[
        str,
        option(
            "self, ngram, a head's method or directory, or a draft model's checkpoint; with "
            "--outputs a list: ngram, suffix, other rules (docs/acceptance.md), a draft model."
        ),
    ] = SELF,
    draft_model: Annotated[
        str | None,
        option("A trained head's directory; of --draft mtp: default, the target's."),
    ] = None,
    tokenizer: options.LogTokenizer = None,
    draft_method: Annotated[
        str | None,
        option(
            "streamingllm, snapkv, topk; a model's: full, streamingllm; a list measures each."
        ),
    ] = None,
    draft_budget: Annotated[
        str | None,
        option("Budgets to measure of a sparse draft; default: 64,128,256,512,1024."),
    ] = None,
    context: Annotated[str, option("Contexts to measure.")] = "4096",
    num_prompts: Annotated[int, option("Prompts per context.", min=2)] = 32,
    gen_len: Annotated[
        int, option("Tokens to generate per prompt and budget.", min=1)
    ] = 64,
    gamma: Annotated[int, option("Deepest position to measure.", min=1)] = 6,
    temperature: options.Temperature = 1.0,
    seed: Annotated[int, option("Seeds prompts and sampling.")] = 1,
    prompts: Annotated[
        str, option("stdlib, recall, or a text file or directory.")
    ] = "stdlib",
    dtype: options.Dtype = "float32",
    device: options.DeviceName = "cpu",
    gammas: Annotated[
        str | None,
        option("With --outputs: gammas to replay, a list; default: those in use."),
    ] = None,
    lookup_min: Annotated[
        str | None,
        option("With --outputs: shortest n-grams to replay, a list; default: 1 to 5."),
    ] = None,
    lookup_max: Annotated[
        str | None,
        option("With --outputs: longest n-grams to replay, a list; default: 3 to 8."),
    ] = None,
    max_model_len: Annotated[
        int | None,
        option(
            "With --outputs: the engine's longest sequence, which cuts drafts.", min=2
        ),
    ] = None,
    jobs: Annotated[
        int | None, option("With --outputs: processes; default: one per core.", min=1)
    ] = None,
    quiet: options.Quiet = False,
) -> None:
    """Measure how much of a draft is accepted, for `plan`.

    By position, budget and context, with real blocks; or, with --outputs, by replaying logged
    requests, without a model. `plan --acceptance` takes what is written.
    """
    if outputs:
        from magicdec.commands.logs import LogRequest, profile_logs

        profile_logs(
            LogRequest.of(
                outputs=outputs,
                draft=draft,
                output=output,
                model=model,
                tokenizer=tokenizer,
                gammas=gammas,
                lookup_min=lookup_min,
                lookup_max=lookup_max,
                max_model_len=max_model_len,
                jobs=jobs,
                dtype=dtype,
                device=device,
                quiet=quiet,
            )
        )
        return
    only_logs = {
        "--tokenizer": tokenizer,
        "--gammas": gammas,
        "--lookup-min": lookup_min,
        "--lookup-max": lookup_max,
        "--max-model-len": max_model_len,
        "--jobs": jobs,
    }
    for name, value in only_logs.items():
        require(value is None, f"{name} goes with --outputs: it is of logged requests")
    from magicdec.measure import bind_threads

    bind_threads()
    from magicdec.calibrate import (
        AcceptanceRequest,
        acceptance_path,
        fit_profiles,
        measure_acceptance,
    )
    from magicdec.perfmodel import save_profile
    from magicdec.specs import named_head

    head = named_head(model, draft, draft_model)
    if head is not None:
        require(
            draft_budget is None,
            "profile-acceptance measures a head over its whole cache; leave --draft-budget out "
            "(run measures windows)",
        )
        draft = head.method
        draft_method = draft_method or head.method
    usual = {SELF: "streamingllm", "ngram": "ngram", "suffix": "suffix"}
    methods = draft_method or usual.get(draft, "full")
    request = AcceptanceRequest(
        model=model,
        draft=draft,
        head=head,
        draft_methods=tuple(methods.split(",")),  # AcceptanceRequest checks each
        draft_budgets=tuple(
            parse_ints(draft_budget or USUAL_BUDGETS, "--draft-budget")
        ),
        context_lens=tuple(parse_ints(context, "--context")),
        num_prompts=num_prompts,
        gen_len=gen_len,
        gamma=gamma,
        temperature=temperature,
        seed=seed,
        prompts=prompts,
        dtype=dtype,
        device=device,
    )
    with shown_progress(quiet) as show:
        counts = measure_acceptance(request, progress=show)
    files: list[Path] = []
    for profile in fit_profiles(request, counts):
        _print_profile(profile)
        path = acceptance_path(output, profile.draft_method, draft=profile.draft)
        save_profile(profile, path)
        print(f"  wrote {path}")
        files.append(path)
    checkpoint = None
    if head is not None:
        checkpoint = head.checkpoint
    command = next_plan(
        output,
        files,
        model=model,
        draft=draft,
        draft_model=checkpoint,
        context=max(request.context_lens),
    )
    print(f"next: {command}")


def next_plan(
    profile: Path,
    acceptance: list[Path],
    *,
    model: str,
    draft: str,
    context: int,
    draft_model: str | None = None,
) -> str:
    """The plan with what was measured: the machine's files where they are there, and the
    acceptance.
    """
    from magicdec.calibrate import engine_path

    own = {}
    if profile.is_file() and engine_path(profile).is_file():
        own = {"hardware": profile, "engine": engine_path(profile)}
    named = None
    if draft not in (SELF, "ngram"):
        named = draft
    return options.command(
        "plan",
        model=model,
        **own,
        draft=named,
        draft_model=draft_model,
        acceptance=acceptance,
        context=context,
    )


def _print_profile(profile: MeasuredProfile) -> None:
    """Counted rates with their 90 % intervals, the fitted law's rates, and the error of the law."""
    from magicdec.counts import Z_90

    options.print_fault(profile.fault)
    print(
        f"{profile.draft_method}: accepted by position, ± half a 90 % interval (the law)"
    )
    for counted in profile.measured:
        law = profile.conditional_rates(
            budget=counted.budget,
            context=counted.context,
            gamma_max=len(counted.rates),
        )
        cells = []
        for rate, stderr, fitted in zip(
            counted.rates, counted.stderr, law, strict=True
        ):
            cells.append(f"{rate:.2f}±{Z_90 * stderr:.2f} ({fitted:.2f})")
        print(f"  {counted.budget:5.0f} at {counted.context:.0f}: {'  '.join(cells)}")
    if profile.held_out_error is not None:
        print(
            f"  error of the law on budgets left out {profile.held_out_error:.3f} (of its counts "
            "alone "
            f"{profile.held_out_noise:.3f}), spread between sequences {profile.spread:.3f}"
        )
