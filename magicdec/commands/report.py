"""`magicdec report`, `magicdec plot` and `magicdec export`: records and plans as files for people
and for engines.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from magicdec.commands import options
from magicdec.commands.options import option
from magicdec.errors import ConfigError, unknown_choice

if TYPE_CHECKING:
    from magicdec.reports.data import ReportData
    from magicdec.reports.tables import Table

REPORT_EPILOG = options.examples(
    "report results.jsonl -o report.html",
    "report results.jsonl predicted.jsonl --plan plan.json -o report.html -o report.pdf",
)
PLOT_EPILOG = options.examples(
    "plot heatmap --plan plan.json -o heatmap.svg",
    "plot scatter results.jsonl predicted.jsonl -o scatter.png",
    "plot errors results.jsonl predicted.jsonl --format markdown",
)
EXPORT_EPILOG = options.examples(
    "plan --draft llama-3.2-1b --acceptance-rate 0.75 --format json > plan.json",
    "export vllm plan.json",
    "export sglang plan.json --candidate 3",
    "export trtllm plan.json -o speculative.yaml",
)
REPORT_SUFFIXES = (".html", ".pdf")


class PlotFormat(StrEnum):
    SVG = "svg"
    PNG = "png"
    MARKDOWN = "markdown"
    CSV = "csv"
    JSON = "json"


SUFFIXES = {
    ".svg": PlotFormat.SVG,
    ".png": PlotFormat.PNG,
    ".md": PlotFormat.MARKDOWN,
    ".csv": PlotFormat.CSV,
    ".json": PlotFormat.JSON,
}
PICTURES = (PlotFormat.SVG, PlotFormat.PNG)


Records = Annotated[
    list[Path] | None,
    typer.Argument(help="Record files (JSON lines), measured and predicted."),
]


def report_command(
    records: Records = None,
    plan: options.PlanFile = None,
    output: Annotated[
        list[Path] | None,
        option(
            "report.html, report.pdf (needs magicdec[pdf]), or both.", "--output", "-o"
        ),
    ] = None,
    title: Annotated[
        str, option("Title of the report.")
    ] = "Speculative decoding report",
) -> None:
    """Turn records into an HTML report, a PDF, or both.

    Each is one file, which needs no network.
    """
    from magicdec.files import check_writable
    from magicdec.reports.report import write_report

    paths = output or [Path("report.html")]
    for path in paths:
        if path.suffix.lower() not in REPORT_SUFFIXES:
            raise ConfigError(
                f"cannot tell the format of '{path}': its name must end in "
                f"{' or '.join(REPORT_SUFFIXES)}"
            )
        check_writable(path)
    data = load_report_data(records or [], plan, title=title)
    for path in paths:
        write_report(data, path)
        print(path)


def load_report_data(
    records: list[Path], plan: Path | None, *, title: str = ""
) -> ReportData:
    """Reads what a report is made from. Raises StorageError or ConfigError naming the file."""
    import shlex
    import sys

    from magicdec.reports.data import ReportData
    from magicdec.schema.plan import load_plan
    from magicdec.schema.record import read_many

    plans = []
    for path in records:
        if path.suffix == ".json":
            plans.append(path)
    if len(plans) + (plan is not None) > 1:
        raise ConfigError(f"one plan is shown at a time, not also {plans[-1]}")
    plan = plan or next(iter(plans), None)
    records = [path for path in records if path not in plans]
    measured_plan = None
    if plan is not None:
        measured_plan = load_plan(plan)
    return ReportData.from_records(
        read_many(records),
        measured_plan,
        title=title,
        command=shlex.join(["magicdec", *sys.argv[1:]]),
    )


def plot_command(
    name: Annotated[
        str, typer.Argument(help="A figure or a table; `list` names them all.")
    ],
    records: Records = None,
    plan: options.PlanFile = None,
    output: options.Output = None,
    output_format: Annotated[
        PlotFormat | None, option("Default: the file name's suffix.", "--format")
    ] = None,
) -> None:
    """Write one figure or one table of a report.

    The figure as a picture, or its values as a table.
    """
    from magicdec.files import write_atomic
    from magicdec.reports.figures import FIGURES
    from magicdec.reports.tables import TABLES

    if name == "list":
        print(f"figures: {', '.join(FIGURES)}\ntables: {', '.join(TABLES)}")
        return
    if name not in (*FIGURES, *TABLES):
        raise unknown_choice("figure or table", name, [*FIGURES, *TABLES])
    kind = _format(name in FIGURES, output, output_format)
    content = _content(name, load_report_data(records or [], plan), kind)
    if output is not None:
        write_atomic(output, content)
        print(output)
    elif isinstance(content, bytes):
        raise ConfigError("a PNG is written to a file: give -o FILE.png")
    else:
        print(content, end="")


def _format(
    is_figure: bool, output: Path | None, given: PlotFormat | None
) -> PlotFormat:
    """The format asked for, or the one of the file's name; SVG for a figure and Markdown for a
    table otherwise.
    """
    kind = given
    if kind is None and output is not None:
        kind = SUFFIXES.get(output.suffix.lower())
        if kind is None:
            raise ConfigError(
                f"cannot tell the format of '{output}': use {', '.join(SUFFIXES)}, or --format"
            )
    kind = kind or (PlotFormat.SVG if is_figure else PlotFormat.MARKDOWN)
    if kind in PICTURES and not is_figure:
        raise ConfigError(
            f"a table is not written as {kind}: use markdown, csv or json"
        )
    if kind is PlotFormat.PNG and output is None:
        raise ConfigError("a PNG is written to a file: give -o FILE.png")
    return kind


def _content(name: str, data: ReportData, kind: PlotFormat) -> str | bytes:
    from magicdec.reports.figures import FIGURES, draw
    from magicdec.reports.figures.chart import PAPER, png, raw_svg
    from magicdec.reports.tables import TABLES

    if name in FIGURES:
        chart = draw(name, data)
        if chart is None:
            raise ConfigError(
                f"the records and the plan hold nothing to draw '{name}' from"
            )
        if kind is PlotFormat.SVG:
            return raw_svg(chart.standalone(), background=PAPER)
        if kind is PlotFormat.PNG:
            return png(chart.standalone())
        table: Table | None = chart.table
    else:
        table = TABLES[name](data)
    if table is None:
        raise ConfigError(f"the records and the plan hold no rows for '{name}'")
    text: str = getattr(table, f"to_{kind}")()
    return text


def export_command(
    engine: Annotated[str, typer.Argument(help="vllm, sglang or trtllm.")],
    plan: Annotated[
        Path, typer.Argument(help="A plan document (magicdec plan --format json).")
    ],
    candidate: Annotated[
        int | None,
        option(
            "Of the plan's candidates, from 1; default: the best that the engine runs."
        ),
    ] = None,
    acceptance: Annotated[
        list[Path] | None, option("Acceptance profile of the plan; repeatable.")
    ] = None,
    hardware: Annotated[
        Path | None, option("Profile of a device that is not in the catalog.")
    ] = None,
    check_cost: Annotated[
        bool,
        option(
            "Runs that settle the plan's cost on your server, acceptance imposed.",
            "--check-cost",
        ),
    ] = False,
    output: options.Output = None,
) -> None:
    """Write a plan's choice as a serving engine's flags.

    One configuration, predicted anew on that engine.
    """
    from magicdec.files import write_atomic
    from magicdec.perfmodel.acceptance import load_profile
    from magicdec.perfmodel.variations import for_engine, priced
    from magicdec.reports.cost_check import write_cost_check
    from magicdec.reports.exports import check_engine, export
    from magicdec.schema.plan import load_plan

    check_engine(engine)
    profiles = tuple(map(load_profile, acceptance or ()))
    again = for_engine(
        load_plan(plan),
        engine,
        number=candidate,
        acceptance=profiles,
        hardware=hardware,
    )
    if check_cost:
        choice = priced(again.plan, engine, acceptance=profiles, hardware=hardware)
        tokens = {
            gamma: choice.tokens_at(gamma) for gamma in {1, again.plan.best.gamma}
        }
        text = write_cost_check(
            engine, again.plan, tokens, plan_file=str(plan), site=again.site
        )
    else:
        text = export(engine, again.plan, reason=again.reason, site=again.site)
    if output is None:
        print(text, end="")
    else:
        write_atomic(output, text)
        print(output)
