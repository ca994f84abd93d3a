"""`magicdec records`: list and show what was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from magicdec.commands import options
from magicdec.commands.options import CommandGroup, table_console
from magicdec.errors import ConfigError, unknown_choice
from magicdec.naming import draft_id
from magicdec.units import format_number

app = typer.Typer(help="List and show records.", no_args_is_help=True, cls=CommandGroup)
Files = Annotated[list[Path], typer.Argument(help="Records files (JSON lines).")]
KEY_SHOWN = 8
LISTED = (
    "key",
    "source",
    "model",
    "draft",
    "draft_method",
    "draft_budget",
    "gamma",
    "batch_size",
    "context_len",
    "tokens_per_s",
    "speedup",
)
"""Fields of a record that the table shows."""


@app.command(
    "ls",
    epilog=options.examples(
        "records ls grid.jsonl", "records ls grid.jsonl --format csv > grid.csv"
    ),
)
def ls_command(
    files: Files, output_format: options.Format = options.OutputFormat.TABLE
) -> None:
    """List records, one line each.

    As JSON and CSV with every field, lists and mappings as JSON, the environment in fields of their
    own.
    """
    from magicdec.reports.text import GAMMA, text_table
    from magicdec.schema.record import read_many, record_rows

    rows = record_rows(read_many(files))

    def table() -> None:
        heads = (
            "key",
            "source",
            "model",
            "draft",
            "budget",
            GAMMA,
            "batch",
            "context",
            "tok/s",
            "speedup",
        )
        table_console().print(
            text_table(
                heads, [_cells(row) for row in rows], wraps=("source", "model", "draft")
            )
        )
        print(f"{len(rows)} records")

    options.print_as(output_format, rows, rows, table)


def _cells(record: dict[str, Any]) -> list[str]:
    row = {name: record[name] for name in LISTED}
    rate = row["tokens_per_s"]
    speedup = row["speedup"]
    shown_rate = None
    if rate is not None:
        shown_rate = format_number(rate)
    shown_speedup = None
    if speedup is not None:
        shown_speedup = f"{speedup:.2f}x"
    shown = row | {
        "key": row["key"][:KEY_SHOWN],
        "draft": draft_id(row["draft"], row.pop("draft_method")),
        "tokens_per_s": shown_rate,
        "speedup": shown_speedup,
    }
    return ["-" if shown[name] is None else str(shown[name]) for name in row]


@app.command("show", epilog=options.examples("records show 3f2a grid.jsonl"))
def show_command(
    key: Annotated[str, typer.Argument(help="A record's key, or its beginning.")],
    files: Files,
) -> None:
    """Show one record in full, as JSON.

    Of several with the same key, the last.
    """
    from magicdec.schema.record import read_many

    records = read_many(files)
    matching = {}
    for record in records:
        if key and record.key.startswith(key):
            matching[record.key] = record
    if not matching:
        raise unknown_choice("record", key, {record.key for record in records})
    if len(matching) > 1:
        raise ConfigError(
            f"'{key}' begins {len(matching)} keys: {', '.join(sorted(matching)[:8])}; give more of "
            "one"
        )
    found = next(iter(matching.values()))
    document = {
        "key": found.key,
        "schema_version": found.schema_version,
        **msgspec.to_builtins(found),
    }
    print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
