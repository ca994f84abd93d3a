"""`magicdec validate`: hold predictions against measurements: this machine's, the published ones, or a user's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from magicdec.commands.options import OutputFormat, console, end_progress, progress_printer, require
from magicdec.commands.usage import CommandGroup

app = typer.Typer(help="Hold predictions against measurements.", no_args_is_help=True, cls=CommandGroup)

Files = Annotated[list[Path], typer.Argument(help="CSV files (.csv or .csv.gz).")]
PUBLISHED_EPILOG = """Examples:\n
  magicdec validate published\n
  magicdec validate published --format csv
"""
GRID_EPILOG = """Examples:\n
  magicdec validate grid --quick\n
  magicdec validate grid docs/grid.toml --profile local.toml --records grid.jsonl
"""
OptionalFiles = Annotated[list[Path] | None, typer.Argument(help="CSV files; none: the ones that ship.")]
Format = Annotated[OutputFormat, typer.Option("--format", help="How to print.")]


@app.command("kernels", epilog="Examples:\n\n  magicdec validate kernels gemm.csv attention.csv.gz")
def kernels_command(files: Files, output_format: Format = OutputFormat.TABLE) -> None:
    """Error of the shipped hardware profiles on tables of measured kernels (GEMM, decode attention, all-reduce)."""
    from magicdec.validate.kernels import validate_kernels

    _print_groups(validate_kernels(files), output_format)


@app.command("published", epilog=PUBLISHED_EPILOG)
def published_command(
    files: OptionalFiles = None,
    fit_acceptance: Annotated[
        bool, typer.Option("--fit-acceptance", help="Fit one acceptance rate per pair on the rows of the call.")
    ] = False,
    output_format: Format = OutputFormat.TABLE,
) -> None:
    """Published end-to-end speedups and latencies, against their predictions."""
    from magicdec.validate.published_speedups import validate_published

    _print_groups(validate_published(files or None, fit_acceptance=fit_acceptance), output_format)


@app.command("acceptance", epilog="Examples:\n\n  magicdec validate acceptance")
def acceptance_command(files: OptionalFiles = None, output_format: Format = OutputFormat.TABLE) -> None:
    """Published acceptance: the law fitted on short drafts (gamma <= 8) predicts tokens per step at long ones."""
    from magicdec.validate.published_acceptance import validate_acceptance

    _print_groups(validate_acceptance(files or None), output_format)


@app.command("grid", epilog=GRID_EPILOG)
def grid_command(
    grid: Annotated[Path | None, typer.Argument(help="A grid file (TOML); none: a small built-in grid.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="PROFILE.toml of `magicdec calibrate`; none: calibrate first.")
    ] = None,
    records: Annotated[Path, typer.Option(help="Appended to: predictions, then measurements.")] = Path("grid.jsonl"),
    quick: Annotated[bool, typer.Option("--quick", help="A few small points, for continuous integration.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")] = False,
    output_format: Format = OutputFormat.TABLE,
) -> None:
    """Run a grid of configurations on this machine, predict each from the calibration alone, and compare."""
    from magicdec.measure.environment import bind_threads

    bind_threads()
    from magicdec.calibrate.local_profile import load_local_profile
    from magicdec.reports import tables
    from magicdec.validate.grid import QUICK_GRID, load_grid, run_grid

    require(not (quick and grid), "--quick is a grid of its own: give it or a grid file, not both")
    spec = QUICK_GRID if quick else load_grid(grid)
    show = progress_printer(quiet)
    try:
        local = load_local_profile(profile) if profile else None
        comparison = run_grid(spec, profile=local, records=records, quick=quick, progress=show).comparison
    finally:
        end_progress(quiet)
    if output_format is OutputFormat.TABLE:
        tables.print_comparison(comparison.to_document(), console())
    elif output_format is OutputFormat.CSV:
        print(tables.rows_to_csv(comparison.to_document()["rows"]), end="")
    else:
        print(json.dumps(comparison.to_document(), indent=1))
    raise typer.Exit(0 if comparison.passed else 1)


def _print_groups(document: dict[str, Any], output_format: OutputFormat) -> None:
    from magicdec.reports import tables

    if output_format is OutputFormat.JSON:
        print(json.dumps(document))
    elif output_format is OutputFormat.CSV:
        print(tables.rows_to_csv(document["groups"]), end="")
    else:
        tables.print_groups(document["groups"], console())
