"""`python -m evidence`: predictions compared with tables of others' servers, and the pages made of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from msgspec import to_builtins

from magicdec.commands import options
from magicdec.commands.options import OutputFormat, console, option, print_as, require
from magicdec.commands.validate import print_choice, print_groups
from magicdec.errors import ConfigError, MagicdecError
from magicdec.progress import StepMessage, shown_progress

if TYPE_CHECKING:
    from evidence.beliefs import AcceptanceValidation

app = typer.Typer(
    help="Compare predictions with tables of servers that others measured.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
USER_ERROR_EXIT_CODE = 2
ATLAS_SUFFIXES = (".html", ".md", ".json")


Files = Annotated[list[Path], typer.Argument(help="CSV files (.csv or .csv.gz).")]
LeaveOut = Annotated[
    str,
    option(
        "Judge one source's rows, by intervals whose widths come from the others.",
        metavar="SOURCE",
    ),
]


@app.command("kernels")
def kernels_command(
    files: Files, output_format: options.Format = OutputFormat.TABLE
) -> None:
    """Predicted kernels against measured ones.

    Error of the shipped hardware profiles on tables of GEMM, attention and all-reduce.
    """
    from evidence.kernels import validate_kernels

    print_groups(validate_kernels(files), output_format)


@app.command("serving")
def serving_command(
    files: Files,
    left_out: Annotated[
        bool,
        option(
            "Errors also with the row's device, tp or model left out of the fit.",
            "--left-out",
        ),
    ] = False,
    leave_out: LeaveOut = "",
    output_format: options.Format = OutputFormat.TABLE,
) -> None:
    """Predicted servers against measured ones.

    Tables of vLLM, SGLang and TensorRT-LLM under load.
    """
    from evidence.serving import validate_serving

    document = validate_serving(files, left_out=left_out, leave_out=leave_out)
    print_groups(document, output_format)


@app.command("pairs")
def pairs_command(
    files: Files,
    acceptance: Annotated[
        Literal["measured", "believed"],
        option("Tokens per step as each row measured them, or as a plan believes."),
    ] = "measured",
    leave_out: LeaveOut = "",
    output_format: options.Format = OutputFormat.TABLE,
) -> None:
    """Predicted speedups against measured pairs of servers.

    As `magicdec validate pairs`, with believed acceptance, sources left out, trees next to chains, and
    devices that nobody named.
    """
    from evidence.pairs import validate_pairs

    document = validate_pairs(files, acceptance=acceptance, leave_out=leave_out)
    print_groups(document, output_format)
    print_choice(document, output_format)


@app.command("lanes")
def lanes_command(
    files: Annotated[
        list[Path] | None, typer.Argument(help="CSV files; default: evidence/data's.")
    ] = None,
    output: Annotated[
        Path | None, option("The table of widths that plans read.", "--output", "-o")
    ] = None,
    calibration: Annotated[
        Path | None, option("The calibration of stated probabilities.")
    ] = None,
    output_format: options.Format = OutputFormat.TABLE,
) -> None:
    """How far predictions of each kind of server are off.

    By engine and version, sort of draft, kind of model, and whether the device's kernels were timed.
    Tables of pairs and of servers.
    """
    from evidence.lane_table import TABLES, validate_lanes

    document = validate_lanes(
        files or TABLES, output=output, calibration_output=calibration
    )
    print_groups(document, output_format)


@app.command("traffic")
def traffic_command(
    files: Files,
    output_format: options.Format = OutputFormat.TABLE,
    quiet: options.Quiet = False,
) -> None:
    """The simulation of servers under arrivals against measured ones.

    Errors of TTFT, TPOT and whole requests by percentile, of throughput, and of the largest load
    within limits.
    """
    from evidence.traffic import validate_traffic

    with shown_progress(quiet) as progress:
        document = validate_traffic(files, progress)
    print_groups(document, output_format)


@app.command("acceptance")
def acceptance_command(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="CSV files; default: the rates that the belief rests on."),
    ] = None,
    leave_out: Annotated[
        Literal[
            "model",
            "source",
            "checkpoint",
            "checkpoint-task",
            "long-context",
            "text",
            "nothing",
        ]
        | None,
        option(
            "Predict each group of rows from all others; long-context: what is beyond 2k of a "
            "checkpoint whose shorter ones are given; text: each as a user's own, from other texts "
            "and sources; nothing: given its own row too.",
            "--leave-out",
        ),
    ] = None,
    output_format: options.Format = OutputFormat.TABLE,
    quiet: options.Quiet = False,
) -> None:
    """Acceptance as plans take it against published acceptance.

    Tables with mean_acceptance_length are predicted by the belief: error of tokens per step,
    coverage and width by kind, task, context and temperature, and how often its probabilities come
    true. Tables with budgets test the law by position: fitted to short drafts (gamma <= 8), it
    predicts the tokens per step of long ones.
    """
    from evidence.beliefs import holds_rates, validate_beliefs
    from evidence.blocks import validate_blocks

    of_beliefs = []
    of_law = []
    for path in files or ():
        if holds_rates(path):
            of_beliefs.append(path)
        else:
            of_law.append(path)
    if of_law and not of_beliefs and leave_out is None:
        print_groups(validate_blocks(of_law), output_format)
        return
    require(
        not of_law, f"{', '.join(map(str, of_law))}: no column mean_acceptance_length"
    )
    with shown_progress(quiet) as show:
        validation = validate_beliefs(
            of_beliefs, leave_out=leave_out or "", progress=show
        )
    print_as(
        output_format,
        to_builtins(validation),
        to_builtins([validation.overall, *validation.groups]),
        lambda: print_beliefs(validation),
    )


def print_beliefs(validation: AcceptanceValidation) -> None:
    from evidence.beliefs import summary_line
    from magicdec.reports.text import text_table

    left_out = "not in the shipped table"
    if validation.leave_out:
        left_out = f"left out by {validation.leave_out}"
    print(summary_line(left_out, validation))
    columns = ("by", "group", "rows", "median", "mean", "coverage", "high/low")
    rows = []
    for group in validation.groups:
        row = (
            group.by,
            group.group,
            str(group.rows),
            f"{group.median_error:.1%}",
            f"{group.mean_error:.1%}",
            f"{group.coverage:.1%}",
            f"{group.width:.2f}",
        )
        rows.append(row)
    console().print(text_table(columns, rows))
    print('"more than c tokens per step", c of 1.3 to 3: said, came true, claims')
    claims = []
    for decile in validation.deciles:
        claims.append(
            (f"{decile.said:.0%}", f"{decile.came_true:.0%}", str(decile.claims))
        )
    console().print(text_table(("said", "came true", "claims"), claims))


@app.command("atlas")
def atlas_command(
    questions: Annotated[
        Path | None,
        typer.Argument(
            help="TOML file of the questions; default: evidence/atlas.toml."
        ),
    ] = None,
    output: Annotated[
        list[Path] | None, option("atlas.html, atlas.md, atlas.json.", "--output", "-o")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes.", min=1, max=256)] = 1,
    quiet: options.Quiet = False,
) -> None:
    """Answer many questions at once, as one page.

    Each model on each device under each load of a TOML file.
    """
    import msgspec

    from evidence.atlas import SHIPPED, cells_of, read_atlas
    from evidence.atlas_page import render_html, render_markdown, summary_of
    from magicdec.files import check_writable, write_atomic

    paths = output or [Path("atlas.html")]
    for path in paths:
        if path.suffix.lower() not in ATLAS_SUFFIXES:
            raise ConfigError(
                f"cannot tell the format of '{path}': its name must end in "
                f"{', '.join(ATLAS_SUFFIXES)}"
            )
        check_writable(path)
    atlas = read_atlas(questions or SHIPPED)
    total = sum(1 for _ in atlas.questions())
    cells = []
    with shown_progress(quiet) as progress:
        for cell in cells_of(atlas, jobs=jobs):
            cells.append(cell)
            doing = f"{cell.model} on {cell.device}"
            progress(StepMessage(doing, done=len(cells), total=total))
    for path in paths:
        suffix = path.suffix.lower()
        if suffix == ".json":
            text = msgspec.json.format(msgspec.json.encode(cells), indent=1).decode()
        elif suffix == ".md":
            text = render_markdown(atlas, cells)
        else:
            text = render_html(atlas, cells)
        write_atomic(path, text)
        print(path)
    print(summary_of(cells))


def main() -> None:
    """Runs the command that the arguments name; bad input is one line and exit code 2."""
    try:
        app(prog_name="python -m evidence")
    except MagicdecError as error:
        print(f"evidence: {error}", file=sys.stderr)
        sys.exit(USER_ERROR_EXIT_CODE)


if __name__ == "__main__":
    main()
