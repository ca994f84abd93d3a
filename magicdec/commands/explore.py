"""`magicdec explore`: what if? A page in the browser, answered by the planner as its controls move. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from magicdec.commands import options
from magicdec.commands.options import option

EPILOG = """\b
Examples:
  magicdec explore
  magicdec explore --model path/to/config.json --port 8080 --no-browser
  magicdec explore --host 0.0.0.0 --allow-host planner.example.org --no-browser
  magicdec explore --model embedded --hardware local.toml --engine local.engine.toml
"""


def explore_command(
    model: Annotated[str | None, option("Catalog name, config.json or its directory.", options.models)] = None,
    hardware: Annotated[str | None, option("Catalog name or TOML file.", options.hardware)] = None,
    engine: Annotated[str | None, option("Of that hardware: catalog name or TOML file.", options.engines)] = None,
    acceptance: Annotated[list[Path] | None, option("Measured acceptance profile of that model; repeatable.")] = None,
    host: Annotated[str, option("Address to listen on; beyond loopback it needs --allow-host.")] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None, option("A host name that requests may ask for, such as a container's; repeatable.")
    ] = None,
    port: Annotated[int, option("Port; 0 takes a free one.", min=0, max=65535)] = 8642,
    browser: Annotated[bool, option("Open the page.", None, "--browser/--no-browser")] = True,
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
