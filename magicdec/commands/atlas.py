"""`magicdec atlas`: one plan for each cell of models, devices and loads, as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from magicdec.commands import options
from magicdec.commands.options import option
from magicdec.errors import ConfigError

EPILOG = options.examples(
    "atlas -o atlas.html",
    "atlas questions.toml -o atlas.html -o atlas.md --jobs 4",
)
SUFFIXES = (".html", ".md", ".json")


def atlas_command(
    questions: Annotated[
        Path | None,
        typer.Argument(help="TOML file of the questions; default: the shipped one."),
    ] = None,
    output: Annotated[
        list[Path] | None, option("atlas.html, atlas.md, atlas.json.", "--output", "-o")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes.", min=1, max=256)] = 1,
    quiet: Annotated[bool, option("Show no progress.", "--quiet", "-q")] = False,
) -> None:
    """Answer many questions at once, as one page.

    Each model on each device under each load of a TOML file.
    """
    import msgspec

    from magicdec.atlas.cells import cells_of
    from magicdec.atlas.page import render_html, render_markdown, summary_of
    from magicdec.atlas.questions import SHIPPED, read_atlas
    from magicdec.files import check_writable, write_atomic
    from magicdec.progress import StepMessage, shown_progress

    paths = output or [Path("atlas.html")]
    for path in paths:
        if path.suffix.lower() not in SUFFIXES:
            raise ConfigError(
                f"cannot tell the format of '{path}': its name must end in {', '.join(SUFFIXES)}"
            )
        check_writable(path)
    atlas = read_atlas(questions or SHIPPED)
    total = sum(1 for _ in atlas.questions())
    cells = []
    with shown_progress(quiet) as progress:
        for cell in cells_of(atlas, jobs=jobs):
            cells.append(cell)
            progress(
                StepMessage(
                    f"{cell.model} on {cell.device}", done=len(cells), total=total
                )
            )
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
