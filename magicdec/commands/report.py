"""`magicdec report`: records and a plan as a file for people."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

from magicdec.commands import options
from magicdec.commands.options import option
from magicdec.errors import ConfigError

EPILOG = options.examples(
    "report results.jsonl -o report.html",
    "report results.jsonl predicted.jsonl --plan plan.json -o report.html -o report.pdf",
)

REPORT_SUFFIXES = (".html", ".pdf")


def report_command(
    records: options.RecordFiles = None,
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
    from magicdec.reports.data import ReportData
    from magicdec.reports.report import write_report

    paths = output or [Path("report.html")]
    for path in paths:
        if path.suffix.lower() not in REPORT_SUFFIXES:
            raise ConfigError(
                f"cannot tell the format of '{path}': its name must end in "
                f"{' or '.join(REPORT_SUFFIXES)}"
            )
        check_writable(path)
    data = ReportData.from_files(
        records or (),
        plan,
        title=title,
        command=shlex.join(["magicdec", *sys.argv[1:]]),
    )
    for path in paths:
        write_report(data, path)
        print(path)
