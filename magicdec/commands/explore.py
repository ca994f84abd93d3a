"""`magicdec explore`: a page in the browser with a plan's options as a form, and its answer as a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from magicdec.commands import options
from magicdec.commands.options import option

EPILOG = options.examples(
    "explore",
    "explore --model path/to/config.json --port 8080 --no-browser",
    "explore --host 0.0.0.0 --allow-host planner.example.org --no-browser",
    "explore --model embedded --hardware local.toml --engine local.engine.toml",
)


def explore_command(
    model: Annotated[
        str | None, option("Catalog name, config.json or its directory.")
    ] = None,
    hardware: Annotated[str | None, option("Catalog name or TOML file.")] = None,
    engine: Annotated[
        str | None, option("Engine on that hardware: catalog name or TOML file.")
    ] = None,
    acceptance: Annotated[
        list[Path] | None,
        option("Measured acceptance profile of that model; repeatable."),
    ] = None,
    host: Annotated[
        str, option("Address to listen on; beyond loopback it needs --allow-host.")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        option(
            "A host name that requests may ask for, such as a container's; repeatable."
        ),
    ] = None,
    port: Annotated[int, option("Port; 0 takes a free one.", min=0, max=65535)] = 8642,
    browser: Annotated[bool, option("Open the page.", "--browser/--no-browser")] = True,
) -> None:
    """Ask what-if questions on a local page.

    A form with the options of a plan, and the answer as a report.
    """
    import webbrowser

    from magicdec.explore.server import ExplorerServer

    start = {"model": model, "hardware": hardware, "engine": engine}
    with ExplorerServer(
        {name: text for name, text in start.items() if text is not None},
        [str(path) for path in acceptance or ()],
        host=host,
        port=port,
        allowed_hosts=allow_host or (),
    ) as server:
        print(f"{server.url}  (Ctrl-C stops it)", flush=True)
        if browser:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
