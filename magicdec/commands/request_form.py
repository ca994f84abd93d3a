"""A plan's request as options of a command line: its fields under the options' names, and the
parsing of their texts.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Annotated, Any

from magicdec.commands.options import (
    as_formats,
    option,
    parse_counts,
    parse_ints,
    parse_rates,
)
from magicdec.schema.request import (
    COUNT_OR_SHARE,
    COUNTS_OR_SHARES,
    Option,
    request_options,
)

AS_TEXT = (
    tuple[int, ...],
    tuple[str, ...],
    COUNTS_OR_SHARES,
    float | tuple[float, ...] | None,
    COUNT_OR_SHARE,
)
"""Types of a request's fields that a command line has as text."""


def request_form(*names: str) -> Any:
    """A struct whose fields are these options of a plan, or all, as a command line has them: the
    fields of schema/request.py under the options' names, lists as text and files as paths. For a
    command's own struct to extend."""
    fields = []
    for name, asked in request_options().items():
        if names and name not in names:
            continue
        default: Any = asked.default
        kind: Any = asked.kind
        if name == "acceptance":
            default = None
            kind = list[Path] | None
        elif name == "workload":
            kind = Path | None
        elif kind in AS_TEXT:
            default = ",".join(map(str, default)) if default else None
            kind = str if default else str | None
        flags = []
        if kind is bool:
            flags.append(f"--{name.replace('_', '-')}")  # else typer adds --no-...
        reads = as_formats if name.endswith("dtype") else None
        shown = option(asked.help, *flags, callback=reads)
        fields.append((name, Annotated[kind, shown], field(default=default)))
    # each method of so many fields is compiled anew at every start
    return make_dataclass(
        "RequestForm", fields, frozen=True, kw_only=True, repr=False, eq=False
    )


def values_of(form: Any, names: Container[str]) -> dict[str, Any]:
    """These options of a request, read from their text: keywords of a plan. Other names are left
    out. Raises ConfigError for a text that is no such list."""
    return {
        name: _read(name, asked, getattr(form, name))
        for name, asked in request_options().items()
        if name in names
    }


def _read(name: str, asked: Option, value: Any) -> Any:
    """An option's value from its text."""
    shown = f"--{name.replace('_', '-')}"
    if (
        not isinstance(value, str)
        or asked.kind not in AS_TEXT
        or asked.kind == COUNT_OR_SHARE
    ):
        return value
    if name == "acceptance_rate":
        return parse_rates(value)
    if asked.kind == COUNTS_OR_SHARES:
        return parse_counts(value, shown) if value else None
    if asked.is_whole:
        return parse_ints(value, shown) if value else None
    return [part.strip() for part in value.split(",") if part.strip()]
