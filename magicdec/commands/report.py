"""`magicdec report`: records and a plan in, one HTML file and one PDF out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from magicdec.errors import ConfigError

if TYPE_CHECKING:
    from magicdec.reports.data import ReportData

SUFFIXES = (".html", ".pdf")
EPILOG = """\b
Examples:
  magicdec report results.jsonl -o report.html
  magicdec report results.jsonl predicted.jsonl --plan plan.json -o report.html -o report.pdf
"""


def report_command(
    records: Annotated[
        list[Path] | None, typer.Argument(help="Record files (JSON lines), measured and predicted.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan document (magicdec plan --format json).")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="The hardware profile (TOML), for the roofline's ceilings.")
    ] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option("--output", "-o", help="report.html, report.pdf (needs magicdec[pdf]), or both."),
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the report.")] = "Speculative decoding report",
) -> None:
    """Turn records into an HTML report, a PDF, or both.

    Each is one file, which needs no network.
    """
    from magicdec.files import check_writable

    paths = output or [Path("report.html")]
    for path in paths:
        if path.suffix.lower() not in SUFFIXES:
            raise ConfigError(f"cannot tell the format of '{path}': its name must end in {' or '.join(SUFFIXES)}")
        check_writable(path)
    data = load_report_data(records or [], plan, profile, title=title)
    for path in paths:
        if path.suffix.lower() == ".html":
            from magicdec.reports.html import write_html

            write_html(data, path)
        else:
            from magicdec.reports.pdf import write_pdf

            write_pdf(data, path)
        print(path)


def load_report_data(records: list[Path], plan: Path | None, profile: Path | None, *, title: str = "") -> ReportData:
    """Reads what a report is made from. Raises StorageError or ConfigError naming the file."""
    import shlex
    import sys

    from magicdec.plan_document import is_plan, load_plan
    from magicdec.records import read_many
    from magicdec.reports.data import ReportData, load_profile

    plans = [path for path in records if is_plan(path)]
    if len(plans) + (plan is not None) > 1:
        raise ConfigError(f"one plan is shown at a time, not also {plans[-1]}")
    plan = plan or next(iter(plans), None)
    records = [path for path in records if path not in plans]
    return ReportData.from_records(
        read_many(records),
        load_plan(plan) if plan is not None else None,
        profile=load_profile(profile) if profile is not None else None,
        title=title,
        command=shlex.join(["magicdec", *sys.argv[1:]]),
        sources=[str(path) for path in records],
    )
