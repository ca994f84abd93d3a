"""`python -m evidence`: predictions compared with tables of others' servers, and the pages made of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from magicdec.commands import options
from magicdec.commands.options import option
from magicdec.errors import ConfigError, MagicdecError
from magicdec.progress import StepMessage, shown_progress

app = typer.Typer(
    help="Compare predictions with tables of servers that others measured.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
USER_ERROR_EXIT_CODE = 2
ATLAS_SUFFIXES = (".html", ".md", ".json")


@app.callback()
def evidence() -> None:
    """Keeps the name of the command on the command line while there is one command alone."""


@app.command("atlas")
def atlas_command(
    questions: Annotated[
        Path | None,
        typer.Argument(
            help="TOML file of the questions; default: evidence/atlas.toml."
        ),
    ] = None,
    output: Annotated[
        list[Path] | None, option("atlas.html, atlas.md, atlas.json.", "--output", "-o")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes.", min=1, max=256)] = 1,
    quiet: options.Quiet = False,
) -> None:
    """Answer many questions at once, as one page.

    Each model on each device under each load of a TOML file.
    """
    import msgspec

    from evidence.atlas import SHIPPED, cells_of, read_atlas
    from evidence.atlas_page import render_html, render_markdown, summary_of
    from magicdec.files import check_writable, write_atomic

    paths = output or [Path("atlas.html")]
    for path in paths:
        if path.suffix.lower() not in ATLAS_SUFFIXES:
            raise ConfigError(
                f"cannot tell the format of '{path}': its name must end in "
                f"{', '.join(ATLAS_SUFFIXES)}"
            )
        check_writable(path)
    atlas = read_atlas(questions or SHIPPED)
    total = sum(1 for _ in atlas.questions())
    cells = []
    with shown_progress(quiet) as progress:
        for cell in cells_of(atlas, jobs=jobs):
            cells.append(cell)
            doing = f"{cell.model} on {cell.device}"
            progress(StepMessage(doing, done=len(cells), total=total))
    for path in paths:
        suffix = path.suffix.lower()
        if suffix == ".json":
            text = msgspec.json.format(msgspec.json.encode(cells), indent=1).decode()
        elif suffix == ".md":
            text = render_markdown(atlas, cells)
        else:
            text = render_html(atlas, cells)
        write_atomic(path, text)
        print(path)
    print(summary_of(cells))


def main() -> None:
    """Runs the command that the arguments name; bad input is one line and exit code 2."""
    try:
        app(prog_name="python -m evidence")
    except MagicdecError as error:
        print(f"evidence: {error}", file=sys.stderr)
        sys.exit(USER_ERROR_EXIT_CODE)


if __name__ == "__main__":
    main()
