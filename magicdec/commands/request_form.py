"""A plan's request as the command line has it: schema/request.py's fields, under the options' names,
with lists as text and files as paths."""

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
from magicdec.schema import (
    COUNT_OR_SHARE,
    COUNTS_OR_SHARES,
    NUMBER_OR_TEXT,
    Option,
    request_options,
)

AS_TEXT = (
    tuple[int, ...],
    tuple[str, ...],
    COUNTS_OR_SHARES,
    float | tuple[float, ...] | None,
    NUMBER_OR_TEXT,
    COUNT_OR_SHARE,
)
"""Types of fields that are written as text."""


def request_form(*names: str) -> Any:
    """A struct whose fields are these options of a plan, or all, for a command's own to extend."""
    fields = []
    for name, asked in request_options().items():
        if not names or name in names:
            kind, default = _on_the_line(name, asked)
            fields.append((name, kind, field(default=default)))
    return make_dataclass("RequestForm", fields, frozen=True, kw_only=True)


def _on_the_line(name: str, asked: Option) -> tuple[Any, Any]:
    """An option's type on the command line, with its help, and its default."""
    default: Any = asked.default
    kind: Any = asked.kind
    if name == "acceptance":
        default = None
        kind = list[Path] | None
    elif name == "workload":
        kind = Path | None
    elif kind in AS_TEXT:
        if default:
            default = ",".join(map(str, default))
        else:
            default = None
        kind = str if default else str | None
    names: tuple[str, ...] = ()
    if kind is bool:
        names = (f"--{name.replace('_', '-')}",)
    reads = as_formats if name.endswith("dtype") else None
    shown = option(asked.help, *names, callback=reads, hidden=asked.is_hidden)
    return Annotated[kind, shown], default


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
        or asked.kind in (NUMBER_OR_TEXT, COUNT_OR_SHARE)
    ):
        return value
    if name == "acceptance_rate":
        return parse_rates(value)
    if asked.kind == COUNTS_OR_SHARES:
        return parse_counts(value, shown) if value else None
    if asked.is_whole:
        return parse_ints(value, shown) if value else None
    return [part.strip() for part in value.split(",") if part.strip()]
