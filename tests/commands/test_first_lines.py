"""Each command's help in a terminal of 80 columns: nothing is cut off, and the list says what each does in a line."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import typer

from magicdec.cli import app

PATH = Path(__file__).resolve().parents[2] / "scripts" / "first_lines.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("first_lines", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def faults(script: ModuleType, path: tuple[str, ...], width: int) -> Iterator[str]:
    """What is wrong with the help of one command in a terminal of this width."""
    lines = script.help_lines(path, width=width)
    if lines[0].split()[1 : 2 + len(path)] != ["magicdec", *path]:
        yield f"its usage is {lines[0]!r}"
    if not lines[1].endswith("."):
        yield f"what it does is not one line: {lines[1]!r}"
    before = lines[: next((i for i, line in enumerate(lines) if line.strip() == "Examples:"), len(lines))]
    yield from (f"too long: {line!r}" for line in before if len(line) > width)  # an example is one line, to be copied
    command = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]  # type: ignore[attr-defined]  # a group of commands
    names = {name for each in command.params for name in (*each.opts, *each.secondary_opts) if name.startswith("--")}
    yield from (f"lacks {name}" for name in names - set(" ".join(lines).replace(",", " ").split()))


def test_help_fits_and_loses_nothing() -> None:
    script = load()
    paths = list(script.command_paths())
    assert len(paths) > 20
    found = {(path, width): list(faults(script, path, width)) for path in paths for width in (80, 120)}
    assert not {where: wrong for where, wrong in found.items() if wrong}


def test_the_list_of_commands_is_a_line_for_each() -> None:
    script = load()
    lines = script.help_lines(())
    listed = lines[lines.index("Commands:") + 1 :]
    assert not [line for line in listed if line.endswith("...")]
    assert [line.split()[0] for line in listed] == [path[0] for path in script.command_paths() if len(path) == 1]
