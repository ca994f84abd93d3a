"""`magicdec records`: list, show and export what was recorded."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from magicdec.commands import options
from magicdec.commands.options import CommandGroup, option, table_console
from magicdec.errors import ConfigError, unknown_choice
from magicdec.files import write_atomic
from magicdec.naming import draft_id
from magicdec.units import format_number

app = typer.Typer(help="List, show and export records.", no_args_is_help=True, cls=CommandGroup)
Files = Annotated[list[Path], typer.Argument(help="Records files (JSON lines).")]
KEY_SHOWN = 8
LISTED = (
    "key", "source", "model", "draft", "draft_method", "draft_budget", "gamma", "batch_size", "context_len",
    "tokens_per_s", "speedup",
)  # fmt: skip
"""Fields of a record that `ls` shows."""
EXPORT_SUFFIXES = (".csv", ".json", ".parquet")


@app.command("ls", epilog=options.examples("records ls grid.jsonl", "records ls grid.jsonl --format json"))
def ls_command(files: Files, output_format: options.Format = options.OutputFormat.TABLE) -> None:
    """List records, one line each."""
    from magicdec.records import read_many
    from magicdec.reports.text import GAMMA, text_table

    rows = [{name: getattr(record, name) for name in LISTED} for record in read_many(files)]

    def table() -> None:
        heads = ("key", "source", "model", "draft", "budget", GAMMA, "batch", "context", "tok/s", "speedup")
        table_console().print(text_table(heads, [_cells(row) for row in rows], wraps=("source", "model", "draft")))
        print(f"{len(rows)} records")

    options.print_as(output_format, rows, rows, table)


def _cells(row: dict[str, Any]) -> list[str]:
    rate, speedup = row["tokens_per_s"], row["speedup"]
    shown = row | {
        "key": row["key"][:KEY_SHOWN],
        "draft": draft_id(row["draft"], row.pop("draft_method")),
        "tokens_per_s": None if rate is None else format_number(rate),
        "speedup": None if speedup is None else f"{speedup:.2f}x",
    }
    return ["-" if shown[name] is None else str(shown[name]) for name in row]


@app.command("show", epilog=options.examples("records show 3f2a grid.jsonl"))
def show_command(key: Annotated[str, typer.Argument(help="A record's key, or its beginning.")], files: Files) -> None:
    """Show one record in full, as JSON.

    Of several with the same key, the last.
    """
    from magicdec.records import read_many

    records = read_many(files)
    matching = {record.key: record for record in records if key and record.key.startswith(key)}
    if not matching:
        raise unknown_choice("record", key, {record.key for record in records})
    if len(matching) > 1:
        raise ConfigError(f"'{key}' begins {len(matching)} keys: {', '.join(sorted(matching)[:8])}; give more of one")
    found = next(iter(matching.values()))
    document = {"key": found.key, "schema_version": found.schema_version, **msgspec.to_builtins(found)}
    print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


@app.command("export", epilog=options.examples("records export grid.jsonl -o grid.csv"))
def export_command(
    files: Files, output: Annotated[Path, option("A .csv, .json or .parquet file to write.", None, "--output", "-o")]
) -> None:
    """Write every field of every record as one table.

    Lists and mappings as JSON text, the environment in columns.
    """
    from magicdec.files import rows_to_csv
    from magicdec.records import read_many, record_rows

    suffix = output.suffix.lower()
    if suffix not in EXPORT_SUFFIXES:
        raise unknown_choice("export format", suffix or output.name, EXPORT_SUFFIXES)
    if suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError("parquet needs pyarrow (pip install pyarrow); csv and json need nothing more")
    records = read_many(files)
    rows = record_rows(records)
    if suffix == ".csv":
        write_atomic(output, rows_to_csv(rows))
    else:
        import pandas as pd

        flat = [{name: _flat(value) for name, value in row.items()} for row in rows]
        frame, buffer = pd.DataFrame(flat).convert_dtypes(), io.BytesIO()
        if suffix == ".parquet":
            frame.to_parquet(buffer, index=False)
        else:
            frame.to_json(buffer, orient="records", indent=1, double_precision=15)
        write_atomic(output, buffer.getvalue())
    print(f"wrote {output}: {len(records)} records")


def _flat(value: object) -> object:
    """Lists and mappings as JSON text."""
    if isinstance(value, list | dict):
        return msgspec.json.encode(value).decode() if value else None
    return value
