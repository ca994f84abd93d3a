"""`magicdec explore`: what if? A page in the browser, answered by the planner as its controls move. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from magicdec.commands import completion

EPILOG = """\b
Examples:
  magicdec explore
  magicdec explore --model path/to/config.json --port 8080 --no-browser
  magicdec explore --host 0.0.0.0 --allow-host planner.example.org --no-browser
  magicdec explore --model embedded --hardware local.toml --engine local.engine.toml
"""


def explore_command(
    model: Annotated[
        str | None, typer.Option(help="Catalog name, config.json or its directory.", autocompletion=completion.models)
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Catalog name or TOML file.", autocompletion=completion.hardware)
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Of that hardware: catalog name or TOML file.", autocompletion=completion.engines)
    ] = None,
    acceptance: Annotated[
        list[Path] | None, typer.Option(help="Measured acceptance profile of that model; repeatable.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback it needs --allow-host.")] = (
        "127.0.0.1"
    ),
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A host name that requests may ask for, such as a container's; repeatable.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8642,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page.")] = True,
) -> None:
    """Ask what-if questions on a local page.

    Move a control, and the planner answers.
    """
    import webbrowser

    from magicdec.explore.page import Explorer
    from magicdec.explore.server import Server
    from magicdec.explore.state import Catalog

    catalog = Catalog.given(
        model=model, hardware=hardware, engine=engine, acceptance=[str(path) for path in acceptance or ()]
    )
    with Server(Explorer(catalog), host, port, allowed_hosts=allow_host or ()) as server:
        print(f"{server.url}  (Ctrl-C stops it)", flush=True)
        if browser:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
