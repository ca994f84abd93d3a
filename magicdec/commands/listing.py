"""Rows of a catalog as a table or as JSON, for the commands that list names."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from magicdec.commands.options import option, table_console
from magicdec.units import GIGA, MEGA, TERA, format_bytes

Format = Annotated[Literal["table", "json"], option("table or json.", "--format")]

PROSE = ("layers", "fitted on", "models", "run")
"""Headings of columns that wrap."""

HEADINGS = {
    "parameters": "params", "active_parameters": "active", "kv_bytes_per_token": "KV/token",
    "state_bytes_per_sequence": "state", "longest_context": "longest", "memory_bytes": "memory",
    "memory_bytes_per_s": "bandwidth", "bf16_flops_per_s": "bf16", "runs": "run",
}  # fmt: skip


def print_rows(rows: list[dict[str, Any]], output: str) -> None:
    if output == "json":
        print(json.dumps(rows, indent=1))
        return
    from magicdec.reports.text import text_table

    heads = [HEADINGS.get(name, name.replace("_", " ")) for name in rows[0]]
    cells = [[cell(name, value) for name, value in row.items()] for row in rows]
    table_console().print(text_table(heads, cells, wraps=PROSE))


def cell(name: str, value: Any) -> str:
    if "parameters" in name:
        if value >= TERA:
            return f"{value / GIGA:.0f} G"
        if value >= GIGA / 10:
            return f"{value / GIGA:.3g} G"
        return f"{value / MEGA:.3g} M"
    if name.endswith("flops_per_s"):
        return f"{value / TERA:.4g} TFLOP/s"
    if name.endswith("bytes_per_s"):
        return f"{value / GIGA:.4g} GB/s"
    if "bytes" in name:
        if not value:
            return "-"
        return format_bytes(value)
    return str(value)


def print_sources(sources: dict[str, str]) -> None:
    """A line each, which no table cuts: most hold an address."""
    if sources:
        print()
    for key, text in sources.items():
        print(f"{key}: {text}")
