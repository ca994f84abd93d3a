"""`magicdec calibrate`: fit profiles to this machine, or to a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from magicdec.commands import options
from magicdec.commands.calibrate_machine import LOCAL_PROFILE, calibrate_machine
from magicdec.commands.calibrate_results import calibrate_cost, calibrate_results
from magicdec.commands.calibrate_server import calibrate_server
from magicdec.commands.options import option, require

EPILOG = options.examples(
    "calibrate -o local.toml",
    "plan --model embedded --hardware local.toml --engine local.engine.toml --batch 32 --context "
    "4096",
    "calibrate --engine vllm --clock cpu -o vllm.toml",
    "calibrate --server http://localhost:8000 --model llama-3.1-8b --hardware h100 --dry-run",
    "calibrate --results benchmarks.json --model llama-3.1-8b --hardware h100 --engine vllm",
)


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
        calibrate_cost(asked.results or [], asked.plan, asked.engine, asked.output)
    elif asked.results:
        calibrate_results(asked, asked.results)
    elif asked.server is not None:
        calibrate_server(asked, asked.server)
    else:
        calibrate_machine(asked)
