"""`magicdec engines`: the engines that can be planned for, or one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicdec.commands import options
from magicdec.commands.listing import Format, print_rows, print_sources
from magicdec.commands.options import table_console

if TYPE_CHECKING:
    from magicdec.specs.engine import EngineProfile

EPILOG = options.examples("engines", "engines vllm")


def engines_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="One engine: its drafts, their paths by version, and sources.",
            show_default=False,
        ),
    ] = None,
    output: Format = "table",
) -> None:
    """List the engines that can be planned for, or describe one.

    With what their profiles were fitted on.
    """
    from magicdec.specs.engine import engine_names, load_engine

    if name is not None:
        _describe(load_engine(name), output)
        return
    rows = []
    for known in engine_names():
        rows.append({"engine": known, "fitted_on": load_engine(known).fitted_on or "-"})
    print_rows(rows, output)


def _describe(engine: EngineProfile, output: str) -> None:
    """An engine's drafts with their paths, by version, and where its constants are from."""
    from magicdec.reports.text import text_table

    drafts = []
    for kind, own in engine.drafts.items():
        if not own.runs:
            continue
        draft, _, method = kind.rpartition("/")
        said: tuple[str, str] | None = None
        for bound in ("", *engine.bounds):
            at = engine.just_before(bound) if bound else engine
            path = at.path(draft or method, method)
            told = (path.runners or "-", path.words)
            if not at.runs(draft or method, method):
                told = ("-", "not run")
            if told != said:
                runner, text = told
                drafts.append(
                    {
                        "draft": kind,
                        "version": f"before {bound}"
                        if bound
                        else own.newest_version or "newest",
                        "runner": runner,
                        "path": text,
                    }
                )
            said = told
    if output == "json":
        document = {"engine": engine.name, "drafts": drafts, "sources": engine.sources}
        print(json.dumps(document, indent=1))
        return
    console = table_console()
    console.print(f"{engine.description}; fitted on {engine.fitted_on or '-'}\n")
    heads = list(drafts[0])
    cells = [list(row.values()) for row in drafts]
    console.print(text_table(heads, cells, wraps=("runner", "path")))
    differences = [
        [f"before {bound}", address, str(value)]
        for bound in engine.bounds
        for address, value in _constants(engine.before[bound])
    ]
    if differences:
        console.print()
        console.print(text_table(["version", "differs in", "value"], differences))
    print_sources(engine.sources)


def _constants(
    tables: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """The values of tables within tables, each under its address."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _constants(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
