"""`magicdec calibrate` and `magicdec profile-acceptance`: measure this machine or a server, and a
model on it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from magicdec.commands import options
from magicdec.commands.options import option, parse_ints, require
from magicdec.errors import ConfigError, ServerError, unknown_choice
from magicdec.progress import shown_progress
from magicdec.specs.speculation import SELF
from magicdec.units import format_bytes, format_rate, format_seconds, printable

if TYPE_CHECKING:
    from magicdec.calibrate.machine import Calibration
    from magicdec.live.advice import Serving
    from magicdec.live.calibration import ServerFit
    from magicdec.live.drive import LoadPlan, Measured
    from magicdec.live.http import Address
    from magicdec.perfmodel.acceptance import AcceptanceProfile

LOCAL_PROFILE = Path("local.toml")
SERVER_PROFILE = Path("server.engine.toml")
RUNTIMES: dict[str, Literal["ours", "vllm"]] = {"ours": "ours", "vllm": "vllm"}
DRIFT_TO_WARN_OF = 0.1
NOISE_TO_WARN_OF = 0.3
SEVERAL_TOKENS = 1.05
UNTOLD = 100.0
"""A factor whose interval spans so much says nothing."""

CALIBRATE_EPILOG = options.examples(
    "calibrate -o local.toml",
    "plan --model embedded --hardware local.toml --engine local.engine.toml --batch 32 --context 4096",
    "calibrate --engine vllm --clock cpu -o vllm.toml",
    "calibrate --server http://localhost:8000 --model llama-3.1-8b --hardware h100 --dry-run",
    "calibrate --results benchmarks.json --model llama-3.1-8b --hardware h100 --engine vllm",
)
PROFILE_EPILOG = options.examples(
    "profile-acceptance -o local.toml --draft-budget 64,256,1024",
    "profile-acceptance --model path/to/checkpoint --prompts texts/ --draft-method streamingllm,snapkv",
    "profile-acceptance --draft ngram --prompts recall",
    "profile-acceptance --outputs docs/samples/requests.jsonl --draft ngram,suffix",
)


def calibrate_command(
    output: Annotated[Path, option("Profile to write (TOML).", "--output", "-o")] = LOCAL_PROFILE,
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
        list[Path] | None, option("Fit to GuideLLM's or AIPerf's results instead; repeatable.")
    ] = None,
    hardware: Annotated[
        str | None, option("The server's device; with --server or --results.")
    ] = None,
    engine: Annotated[
        str | None,
        option(
            "ours, or vllm with magicdec's plugin (docs/vllm.md); with --server the profile to start from."
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
            "Prompt lengths to send, a list; default: 256,1024,2048, or as many that the server takes."
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
        server is None or not results, "--server is timed, --results are read: give one of them"
    )
    if server is not None or results:
        from magicdec.live.advice import Serving
        from magicdec.live.drive import plan_loads
        from magicdec.live.http import parse_address
        from magicdec.specs.precision import PROFILE_DTYPES

        require(
            hardware is not None, "--server and --results need the server's device: give --hardware"
        )
        require(
            not (results and dry_run), "--dry-run goes with --server: nothing is sent for --results"
        )
        if dtype not in (None, *PROFILE_DTYPES):
            raise unknown_choice("dtype", dtype or "", PROFILE_DTYPES)
        serving = Serving(
            model=model,
            hardware=hardware or "",
            engine=engine,
            tp_size=tp,
            temperature=0.0,
            weight_dtype=weight_dtype or dtype,
            kv_dtype=kv_dtype or dtype,
        )
        to = output if output != LOCAL_PROFILE else SERVER_PROFILE
        if results:
            calibrate_results(results, serving, to)
            return
        plan = partial(
            plan_loads,
            concurrencies=parse_ints(concurrency, "--concurrency"),
            output_len=output_len,
            rounds=rounds,
            prompt_lens=parse_ints(prompt_len, "--prompt-len") if prompt_len else (),
        )
        calibrate_server(
            parse_address(server or ""), serving, to, plan=plan, dry_run=dry_run, quiet=quiet
        )
        return
    require(not dry_run, "--dry-run goes with --server")
    require(
        weight_dtype is None and kv_dtype is None,
        "--weight-dtype and --kv-dtype are a server's; give --dtype",
    )
    runtime = RUNTIMES.get(engine or "ours")
    if runtime is None:
        raise unknown_choice("engine to calibrate", engine or "", RUNTIMES)
    require(clock == "wall" or runtime == "vllm", "--clock cpu goes with --engine vllm")
    require(
        weights == "checkpoint" or runtime == "ours", "--weights random goes with --engine ours"
    )
    from magicdec.measure.environment import bind_threads, prepare

    prepare(clock, device)
    bind_threads()
    from magicdec.calibrate.local_profile import LocalProfile, save_points
    from magicdec.calibrate.machine import calibrate
    from magicdec.files import check_writable

    check_writable(output)
    with shown_progress(quiet) as show:
        result = calibrate(
            model=model,
            weights=weights,
            dtype=dtype or "float32",
            device=device,
            quick=quick,
            engine=runtime,
            clock=clock,
            progress=show,
        )
    files = LocalProfile(hardware=result.hardware, engine=result.engine, acceptance=()).save(output)
    files.append(save_points(result.points, output))
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
    from magicdec.live.calibration import (
        describe_server,
        estimated_seconds,
        fit_server,
        save_loads,
        send_plan,
    )
    from magicdec.live.drive import Load, drive
    from magicdec.specs.catalog import load_model_spec

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
    if server.gamma:
        drafts = f"gamma {server.gamma} by {server.draft}"
    else:
        drafts = "no draft"
    print(f"{address}: {printable(server.model)}, {server.engine or 'an unknown engine'}, {drafts}")
    print(
        f"{len(loads.loads)} loads x {loads.rounds} rounds, {sum(load.is_judge for load in loads.loads)} loads only to "
        f"judge, the smallest once more first and last: {loads.num_requests} requests, {loads.num_tokens} tokens, "
        f"about {format_seconds(estimated_seconds(loads, setup, tp_size=tp))} by the {setup.engine.name} profile"
    )
    for load in loads.loads:
        print(f"  {load}" + ("  (judges)" if load.is_judge else ""))
    if dry_run:
        print("nothing was sent")
        return

    def send(load: Load, seed: int) -> Measured:
        return drive(address, load, model=server.model, vocab_size=spec.vocab_size, seed=seed)

    with shown_progress(quiet) as show:
        found = send_plan(address, loads, send, max_len=server.max_len, progress=show)
    for line in found.skipped:
        print(f"left out: {line}")
    print(found.noise_line)
    try:
        fit = fit_server(
            found.points,
            setup=setup,
            tp_size=tp,
            gamma=server.gamma,
            name=output.stem,
            noise=found.noise or 0.0,
        )
    except ConfigError as error:
        print(f"kept what was measured: {save_loads(found.points, loads.about, output)}")
        raise (ServerError(f"{found.stopped}; {error}") if found.stopped else error) from None
    _print_fit(fit, found.points)
    _save_fit(fit, found.points, loads.about, serving, output)
    if found.stopped:
        raise ServerError(
            f"{found.stopped}; fitted to the {len(found.points)} loads that were measured before"
        )


def calibrate_results(paths: Sequence[Path], serving: Serving, output: Path) -> None:
    """Fits an engine profile to the result files of a load generator."""
    from magicdec.files import check_writable
    from magicdec.live.benchmark_results import points_of, read_runs, tokens_per_event
    from magicdec.live.calibration import NOISE_LIMIT, fit_server, noise

    check_writable(output)
    runs = [run for path in paths for run in read_runs(path)]
    points = points_of(runs)
    num_requests = sum(map(len, runs))
    fit = fit_server(
        points, setup=serving.setup(None), tp_size=serving.tp_size, gamma=0, name=output.stem
    )
    print(
        f"{num_requests} requests in {len(runs)} runs, {len(points)} loads by batch and prompt length"
    )
    if (per_event := tokens_per_event(runs)) > SEVERAL_TOKENS:
        print(
            f"{per_event:.2f} tokens came with each event: were these runs without a draft? The fit is of such"
        )
    _print_fit(fit, points, between="requests")
    if (noise(points) or 0.0) > NOISE_LIMIT:
        print(
            "the requests differ much: the server or its machine did other work; measure again when it is quieter"
        )
    origin = {"read": {"files": [path.name for path in paths], "requests": num_requests}}
    _save_fit(fit, points, origin, serving, output)


def _save_fit(
    fit: ServerFit,
    points: Sequence[Measured],
    origin: dict[str, Any],
    serving: Serving,
    output: Path,
) -> None:
    from magicdec.live.calibration import save_fit

    print("wrote " + ", ".join(map(str, save_fit(fit, points, origin, output))))
    print(
        f"next: {options.command('plan', model=serving.model, hardware=serving.hardware, engine=output)}"
    )


def _print_fit(fit: ServerFit, points: Sequence[Measured], *, between: str = "rounds") -> None:
    """Every load with its error, the constants with their intervals, and the two medians."""
    for point, error in zip(points, fit.errors, strict=True):
        role = "judges" if point.load.is_judge else "fitted"
        if point.spread is None:
            spread = "sent once"
        else:
            spread = f"± {point.spread:.0%} between {between}"
        print(
            f"  {point.load!s:<16} {role}: {format_seconds(point.tpot_s)} per token measured ({spread}), predicted "
            f"{error:+.1%}"
        )
    for name, (value, low, high) in fit.constants.items():
        if not name.endswith("_factor") or high < UNTOLD * low:
            told = ""
        else:
            told = ": these loads do not tell it"
        print(f"  {name}: {value:.4g} (90 % interval {low:.4g} to {high:.4g}){told}")
    print(
        f"median error {fit.fitted_error:.1%} of the fitted loads, {fit.held_out_error:.1%} of those that judge"
    )


def _print_machine(result: Calibration) -> None:
    """Print what was fitted and how well, the engine's costs beyond the kernels', and how quiet the
    machine was.
    """
    machine = result.hardware
    rates = ", ".join(
        f"{format_rate(rate, 'FLOP')} {name}" for name, rate in machine.flops_per_s.items()
    )
    memory = (
        f"{format_bytes(machine.memory_bytes)} at {format_rate(machine.memory_bytes_per_s, 'B')}"
    )
    print(f"{machine.name}: {memory}, {rates}")
    errors = ", ".join(f"{phase} {error:.1%}" for phase, error in result.phase_error.items())
    print(
        f"{len(result.points)} points in {format_seconds(result.elapsed_s)}; median error of the fit: {errors}"
    )
    curves = {
        "linear": machine.gemm,
        "attention": machine.attention,
        "elementwise": machine.elementwise,
    }
    fits = ", ".join(
        f"{name} {curve.fit.relative_error:.1%}" for name, curve in curves.items() if curve
    )
    print(f"root mean square error of the kernels' curves: {fits}")
    launches = [point for point in result.points if point.table == "launch"]
    for point, what in zip(
        launches, ("launched from Python", "a graph alone", "one of a graph's 200"), strict=False
    ):
        print(f"a small kernel, {what}: {format_seconds(point.time_s)}")
    engine = result.engine
    factors = {"linear layers": engine.gemm_factor, "attention": engine.attention_factor}
    factors |= {
        "of verification": engine.verify_attention_factor,
        "of drafts": engine.draft_attention_factor,
    }
    print(
        f"{engine.name}, times its kernels: "
        + ", ".join(f"{name} {value:.2f}" for name, value in factors.items())
    )
    costs = {
        "layer of a pass": engine.layer_overhead_s,
        "draft step": engine.draft_step_overhead_s,
        "verification": engine.verify_overhead_s,
        "speculative step": engine.step_overhead_s + engine.upkeep_base_s,
        "autoregressive step": engine.autoregressive_overhead_s,
        "sequence of a step": engine.sequence_overhead_s,
    }
    print(
        "fixed costs per "
        + ", ".join(f"{name} {format_seconds(value)}" for name, value in costs.items())
    )
    drifts = ", ".join(f"{what} {drift:+.1%}" for what, drift in result.drift.items())
    print(f"noise between rounds {result.noise:.1%}; from the first pass to the second: {drifts}")
    if result.noise > NOISE_TO_WARN_OF:
        print(
            "the machine is too noisy for predictions to be trusted; calibrate again when it is quieter"
        )
    elif max(map(abs, result.drift.values())) > DRIFT_TO_WARN_OF:
        print(
            "the machine's speed changed while it was measured; calibrate again when it is quieter"
        )


def profile_acceptance_command(
    output: Annotated[
        Path, option("PROFILE.toml; acceptance files are written next to it.", "--output", "-o")
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
        str | None, option("A trained head's directory; of --draft mtp: default, the target's.")
    ] = None,
    tokenizer: options.LogTokenizer = None,
    draft_method: Annotated[
        str | None,
        option("streamingllm, snapkv, topk; a model's: full, streamingllm; a list measures each."),
    ] = None,
    draft_budget: Annotated[str, option("Budgets to measure.")] = "64,128,256,512,1024",
    context: Annotated[str, option("Contexts to measure.")] = "4096",
    num_prompts: Annotated[int, option("Prompts per context.", min=2)] = 32,
    gen_len: Annotated[int, option("Tokens to generate per prompt and budget.", min=1)] = 64,
    gamma: Annotated[int, option("Deepest position to measure.", min=1)] = 6,
    temperature: options.Temperature = 1.0,
    seed: Annotated[int, option("Seeds prompts and sampling.")] = 1,
    prompts: Annotated[str, option("stdlib, recall, or a text file or directory.")] = "stdlib",
    dtype: options.Dtype = "float32",
    device: options.DeviceName = "cpu",
    gammas: Annotated[
        str | None, option("With --outputs: gammas to replay, a list; default: those in use.")
    ] = None,
    lookup_min: Annotated[
        str | None, option("With --outputs: shortest n-grams to replay, a list; default: 1 to 5.")
    ] = None,
    lookup_max: Annotated[
        str | None, option("With --outputs: longest n-grams to replay, a list; default: 3 to 8.")
    ] = None,
    max_model_len: Annotated[
        int | None,
        option("With --outputs: the engine's longest sequence, which cuts drafts.", min=2),
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
    from magicdec.measure.environment import bind_threads

    bind_threads()
    from magicdec.calibrate.acceptance_bench import (
        AcceptanceRequest,
        fit_profiles,
        measure_acceptance,
    )
    from magicdec.calibrate.local_profile import acceptance_path
    from magicdec.perfmodel.acceptance import save_profile
    from magicdec.specs.named_head import named_head

    head = named_head(model, draft, draft_model)
    if head is not None:
        draft = head.method
        draft_method = draft_method or head.method
    methods = draft_method or {SELF: "streamingllm", "ngram": "ngram"}.get(draft, "full")
    request = AcceptanceRequest(
        model=model,
        draft=draft,
        head=head,
        draft_methods=tuple(methods.split(",")),  # AcceptanceRequest checks each
        draft_budgets=tuple(parse_ints(draft_budget, "--draft-budget")),
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
    print(
        "next: "
        + next_plan(
            output,
            files,
            model=model,
            draft=draft,
            draft_model=None if head is None else head.checkpoint,
            context=max(request.context_lens),
        )
    )


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
    from magicdec.calibrate.local_profile import engine_path

    is_profiled = profile.is_file() and engine_path(profile).is_file()
    if is_profiled:
        own = {"hardware": profile, "engine": engine_path(profile)}
    else:
        own = {}
    named = None if draft in (SELF, "ngram") else draft
    return options.command(
        "plan",
        model=model,
        **own,
        draft=named,
        draft_model=draft_model,
        acceptance=acceptance,
        context=context,
    )


def _print_profile(profile: AcceptanceProfile) -> None:
    """Counted rates with their 90 % intervals, the fitted law's rates, and how far the law is off."""
    from magicdec.counts import Z_90

    print(f"{profile.draft_method}: accepted by position, ± half a 90 % interval (the law)")
    for each in profile.measured:
        law = profile.conditional_rates(
            budget=each.budget, context=each.context, gamma_max=len(each.rates)
        )
        cells = zip(each.rates, each.stderr, law, strict=True)
        rates = "  ".join(
            f"{rate:.2f}±{Z_90 * stderr:.2f} ({fitted:.2f})" for rate, stderr, fitted in cells
        )
        print(f"  {each.budget:5.0f} at {each.context:.0f}: {rates}")
    if profile.held_out_error is not None:
        print(
            f"  error of the law on budgets left out {profile.held_out_error:.3f} (of its counts alone "
            f"{profile.held_out_noise:.3f}), spread between sequences {profile.spread:.3f}"
        )
