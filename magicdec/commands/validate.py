"""`magicdec validate`: compare predictions with measurements: this machine's, published ones, or a
user's files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from msgspec import to_builtins

from magicdec.commands import options
from magicdec.commands.options import (
    CommandGroup,
    OutputFormat,
    console,
    option,
    print_as,
    require,
)
from magicdec.progress import kept, shown_progress

if TYPE_CHECKING:
    from magicdec.schema.comparison import Comparison
    from magicdec.validate.grid import Thresholds

app = typer.Typer(
    help="Compare predictions with measurements.",
    no_args_is_help=True,
    cls=CommandGroup,
)

OptionalFiles = Annotated[
    list[Path] | None, typer.Argument(help="CSV files; default: the shipped tables.")
]

Clock = Annotated[Literal["wall", "cpu"] | None, option(options.CLOCK_HELP)]


@app.command(
    "pairs",
    epilog=options.examples("validate pairs", "validate pairs MY.csv --format json"),
)
def pairs_command(
    files: OptionalFiles = None,
    output_format: options.Format = OutputFormat.TABLE,
) -> None:
    """Predicted speedups against measured pairs of servers.

    With and without speculation, tokens per step as each row measured them: errors of the whole
    request's speedup and of the time between tokens, and what the plan's gamma would lose.
    """
    from magicdec.validate.pair_errors import validate_pairs
    from magicdec.validate.rows import published

    document = validate_pairs(files or published("speculation_pairs.csv"))
    print_groups(document, output_format)
    print_choice(document, output_format)


def print_choice(document: dict[str, Any], output_format: OutputFormat) -> None:
    """Prints how much each policy for gamma loses, where loads were measured at several."""
    if output_format is OutputFormat.TABLE and document["choice"]["cells"]:
        choice = document["choice"]
        losses = []
        for name, value in choice.items():
            if isinstance(value, float):
                losses.append(f"{name} {value:.1%}")
        console().print(
            f"lost to the best gamma, mean of {choice['cells']} loads: {', '.join(losses)}"
        )


@app.command(
    "published",
    epilog=options.examples(
        "validate published", "validate published --acceptance believed"
    ),
)
def published_command(
    files: OptionalFiles = None,
    acceptance: Annotated[
        Literal["profile", "believed"],
        option("The pairs' shipped profiles, or what a plan without any believes."),
    ] = "profile",
    output_format: options.Format = OutputFormat.TABLE,
) -> None:
    """Predictions against published speedups and latencies."""
    from magicdec.validate.published_speedups import validate_published

    document = validate_published(files or None, acceptance=acceptance)
    print_groups(document, output_format)


@app.command(
    "grid",
    epilog=options.examples(
        "validate grid --quick",
        "validate grid docs/grid.toml --profile local.toml --records grid.jsonl",
        "validate grid --engine vllm --records vllm.jsonl",
    ),
)
def grid_command(
    grid: Annotated[
        Path | None,
        typer.Argument(help="A grid file (TOML); default: a small built-in grid."),
    ] = None,
    profile: Annotated[
        Path | None,
        option("PROFILE.toml of `magicdec calibrate`; default: calibrate first."),
    ] = None,
    records: Annotated[
        Path, option("Predictions, then measurements are appended to it.")
    ] = Path("grid.jsonl"),
    engine: Annotated[
        options.Runtime | None,
        option(
            "ours, or vllm with magicdec's plugin (docs/vllm.md); default: the grid file's, or "
            "ours."
        ),
    ] = None,
    clock: Clock = None,
    quick: Annotated[
        bool, option("A few small points, for continuous integration.", "--quick")
    ] = False,
    quiet: options.Quiet = False,
    output_format: options.Format = OutputFormat.TABLE,
) -> None:
    """Run a grid on this machine against its predictions.

    Each configuration is predicted from the calibration alone, before the first is run.
    """
    from magicdec.measure.environment import bind_threads, prepare
    from magicdec.validate.grid import choose_grid, run_grid

    require(
        not (quick and grid),
        "--quick is a grid of its own: give it or a grid file, not both",
    )
    spec = choose_grid(grid, quick=quick, engine=engine, clock=clock)
    prepare(spec.clock, spec.device)
    bind_threads()
    from magicdec.calibrate.local_profile import load_local_profile

    def what_is_kept() -> str:
        if not records.exists():
            return "nothing is kept"
        return f"{records} keeps what was measured; the command again goes on with it"

    with shown_progress(quiet) as show, kept(what_is_kept):
        local = None
        if profile:
            local = load_local_profile(profile)
        run = run_grid(spec, profile=local, records=records, quick=quick, progress=show)
    _print_comparison(
        run.comparison, output_format, verdict=(spec.thresholds, run.failures)
    )
    if run.failures:
        raise typer.Exit(1)


@app.command(
    "records",
    epilog=options.examples(
        "validate records results/grid-2-cores.jsonl",
        "validate records predicted.jsonl measured.jsonl --format json",
        "validate records results/vllm-2-cores.jsonl --clock cpu",
    ),
)
def records_command(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Records files (JSON lines) with predictions and measurements."
        ),
    ],
    clock: Clock = None,
    output_format: options.Format = OutputFormat.TABLE,
) -> None:
    """Predictions in records files against measurements.

    Errors by term and case, coverage of the intervals, and what following the predictions loses.
    """
    from magicdec.schema.comparison import Comparison, by_cpu_time, pair_records
    from magicdec.schema.record import read_many

    rows = read_many(files)
    if clock == "cpu":
        rows = list(map(by_cpu_time, rows))
    comparison = Comparison(pairs=pair_records(rows))
    require(
        bool(comparison.pairs),
        f"{', '.join(map(str, files))}: no configuration was both predicted and measured",
    )
    _print_comparison(comparison, output_format)


def _print_comparison(
    comparison: Comparison,
    output_format: OutputFormat,
    *,
    verdict: tuple[Thresholds, list[str]] | None = None,
) -> None:
    from magicdec.reports.terminal import print_comparison, print_verdict

    document = comparison.to_document()
    if verdict is not None:
        thresholds, failures = verdict
        document |= {
            "thresholds": to_builtins(thresholds),
            "passed": not failures,
            "failures": failures,
        }

    def table() -> None:
        print_comparison(comparison, console())
        if verdict is not None:
            print_verdict(verdict[1], console())

    print_as(output_format, document, document["rows"], table)


def print_groups(document: dict[str, Any], output_format: OutputFormat) -> None:
    """Errors by group, with what was assumed and which rows were skipped."""
    from magicdec.reports.terminal import print_groups as print_figures
    from magicdec.validate.rows import by_cause

    if output_format is OutputFormat.TABLE:
        for line in by_cause(document.get("assumed", ())):
            print(f"assumed: {line}")
    for line in by_cause(document.get("refused", ())):
        typer.echo(f"skipped: {line}", err=True)
    print_as(
        output_format,
        document,
        document["groups"],
        lambda: print_figures(document["groups"], console()),
    )
