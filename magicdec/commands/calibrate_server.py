"""`magicdec calibrate --server`: an engine profile from a running server, timed from outside."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicdec.commands import options
from magicdec.commands.calibrate_machine import LOCAL_PROFILE
from magicdec.commands.options import parse_ints, require, server_tp
from magicdec.errors import ConfigError, ServerError, unknown_choice
from magicdec.progress import shown_progress
from magicdec.units import format_seconds, printable

if TYPE_CHECKING:
    from magicdec.commands.calibrate import CalibrateOptions
    from magicdec.live.advice import Serving
    from magicdec.live.calibration import ServerFit
    from magicdec.live.drive import LoadPlan, Measured, SentLoad

SERVER_PROFILE = Path("server.engine.toml")
UNKNOWN_FROM = 100.0
"""Ratio of an interval's ends from which the loads say nothing of a factor."""


def serving_of(asked: CalibrateOptions) -> Serving:
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


def profile_of_server(asked: CalibrateOptions) -> Path:
    """The file of a server's profile: unless one is named, not that of this machine."""
    if asked.output == LOCAL_PROFILE:
        return SERVER_PROFILE
    return asked.output


def calibrate_server(asked: CalibrateOptions, server_address: str) -> None:
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

    serving = serving_of(asked)
    output = profile_of_server(asked)
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
        f"{address}: {printable(server.model)}, {server.engine or 'an unknown engine'}, {drafts}"
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
    print_fit(fit, sent.points)
    write_fit(fit, sent.points, loads.about, serving, output)
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


def write_fit(
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


def print_fit(
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
