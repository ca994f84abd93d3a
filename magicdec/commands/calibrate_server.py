"""`magicdec calibrate --server`: says what it would send, sends it, fits, and prints how well the fit predicts.
`magicdec calibrate --results` fits to what a load generator has measured.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from magicdec.commands.options import parse_ints, require
from magicdec.progress import shown_progress
from magicdec.units import format_seconds

if TYPE_CHECKING:
    from magicdec.live.served_draft import Draft
    from magicdec.live.server_fit import ServerFit, ServerPoint
    from magicdec.perfmodel.setup import Setup

DEFAULT_OUTPUT = Path("server.engine.toml")
NOISE_TO_WARN_OF = 0.3
SEVERAL_TOKENS = 1.05


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The command's options, as they were given."""

    server: str
    results: tuple[Path, ...]
    output: Path
    model: str
    hardware: str
    engine: str | None
    tp_size: int
    dtype: str | None
    weight_dtype: str | None
    kv_dtype: str | None
    concurrency: str
    prompt_len: str
    output_len: int
    rounds: int
    dry_run: bool
    quiet: bool


def calibrate_server(options: ServerOptions) -> None:
    """Fits an engine profile to a running server, as a black box."""
    from magicdec.files import check_writable
    from magicdec.live.drive import Measured, drive
    from magicdec.live.http import parse_address
    from magicdec.live.loads import Load, plan_loads
    from magicdec.live.served_draft import parse_draft
    from magicdec.live.server_calibration import (
        describe_server,
        estimated_seconds,
        save_fit,
        send_plan,
        sent,
    )
    from magicdec.live.server_fit import fit_server
    from magicdec.specs.catalog import load_model_spec

    address, spec = parse_address(options.server), load_model_spec(options.model)
    require(not address.path, "--server is the server's own address, without a path: http://localhost:8000")
    check_writable(options.output)
    server = describe_server(address, spec)
    setup = _setup(options, server.engine, parse_draft("ngram") if server.gamma else None)
    plan = plan_loads(
        concurrencies=parse_ints(options.concurrency, "--concurrency"),
        prompt_lens=parse_ints(options.prompt_len, "--prompt-len"),
        output_len=options.output_len,
        rounds=options.rounds,
        max_len=server.max_len,
        gamma=server.gamma,
        seed=secrets.randbits(31),  # prompts that were sent before would be cached
    )
    expected = estimated_seconds(plan, setup, tp_size=options.tp_size)
    judges = sum(load.is_judge for load in plan.loads)
    print(f"{address}: {server.model}, {server.engine or 'an unknown engine'}, gamma {server.gamma or 'none'}")
    print(
        f"{len(plan.loads)} loads x {plan.rounds} rounds, {judges} loads only to judge: {plan.num_requests} requests, "
        f"{plan.num_tokens} tokens, about {format_seconds(expected)} by the {setup.engine.name} profile"
    )
    for load in plan.loads:
        print(f"  {load}" + ("  (judges)" if load.is_judge else ""))
    if options.dry_run:
        print("nothing was sent")
        return

    def send(load: Load, seed: int) -> Measured:
        return drive(address, load, model=server.model, vocab_size=spec.vocab_size, seed=seed)

    with shown_progress(options.quiet) as show:
        points = send_plan(address, plan, send, progress=show)
    fit = fit_server(points, setup=setup, tp_size=options.tp_size, gamma=server.gamma, name=options.output.stem)
    _print_fit(fit, points)
    files = save_fit(fit, points, sent(plan), options.output)
    print("sent as planned; wrote " + ", ".join(map(str, files)))


def calibrate_results(options: ServerOptions) -> None:
    """Fits an engine profile to the result files of a load generator."""
    from magicdec.files import check_writable
    from magicdec.live.benchmark_results import points_of, read_runs, tokens_per_event
    from magicdec.live.server_calibration import save_fit
    from magicdec.live.server_fit import fit_server

    require(not options.dry_run, "--dry-run goes with --server: nothing is sent for --results")
    check_writable(options.output)
    runs = [run for path in options.results for run in read_runs(path)]
    points = points_of(runs)
    setup = _setup(options, "", None)
    fit = fit_server(points, setup=setup, tp_size=options.tp_size, gamma=0, name=options.output.stem)
    num_requests = sum(map(len, runs))
    print(f"{num_requests} requests in {len(runs)} runs, {len(points)} loads by batch and prompt length")
    if (per_event := tokens_per_event(runs)) > SEVERAL_TOKENS:
        print(f"{per_event:.2f} tokens came with each event: were these runs without a draft? The fit is of such")
    _print_fit(fit, points, between="requests")
    origin = {"read": {"files": [path.name for path in options.results], "requests": num_requests}}
    files = save_fit(fit, points, origin, options.output)
    print("wrote " + ", ".join(map(str, files)))


def _setup(options: ServerOptions, engine: str, draft: Draft | None) -> Setup:
    from magicdec.errors import unknown_choice
    from magicdec.live.situation import Serving
    from magicdec.specs.precision import PROFILE_DTYPES

    if options.dtype not in (None, *PROFILE_DTYPES):
        raise unknown_choice("dtype", options.dtype, PROFILE_DTYPES)
    serving = Serving(
        model=options.model,
        hardware=options.hardware,
        engine=options.engine,
        tp_size=options.tp_size,
        temperature=0.0,
        weight_dtype=options.weight_dtype or options.dtype,
        kv_dtype=options.kv_dtype or options.dtype,
    )
    return serving.setup(draft, engine)


def _print_fit(fit: ServerFit, points: list[ServerPoint], *, between: str = "rounds") -> None:
    """Every load with its error, the constants with their intervals, and the two medians."""
    from magicdec.live.server_calibration import noise

    for point, error in zip(points, fit.errors, strict=True):
        measured = point.measured
        role = "judges" if measured.load.is_judge else "fitted"
        print(
            f"  {measured.load!s:<16} {role}: {format_seconds(measured.tpot_s)} per token measured "
            f"(± {point.spread:.0%} between {between}), predicted {error:+.1%}"
        )
    for name, (value, low, high) in fit.constants.items():
        print(f"  {name}: {value:.4g} (90 % interval {low:.4g} to {high:.4g})")
    print(f"median error {fit.fitted_error:.1%} of the fitted loads, {fit.held_out_error:.1%} of those that judge")
    if noise(points) > NOISE_TO_WARN_OF:
        print(
            f"the {between} differ much: the server or its machine does other work; calibrate again when it is quieter"
        )
