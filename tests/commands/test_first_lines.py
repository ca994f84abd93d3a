"""Each command's help in a terminal of 80 columns: nothing is cut off, and the list says what each does in a line."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
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


SCRIPT = load()
PATHS = list(SCRIPT.command_paths())


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_fits_and_loses_nothing(path: tuple[str, ...], width: int) -> None:
    lines = SCRIPT.help_lines(path, width=width)
    assert lines[0].split()[1 : 2 + len(path)] == ["magicdec", *path]
    before = lines[: next((i for i, line in enumerate(lines) if line.strip() == "Examples:"), len(lines))]
    assert max(map(len, before)) <= width  # an example is one line, to be copied
    assert lines[1].endswith(".")  # what it does is one line


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_every_option_is_named_in_full(path: tuple[str, ...]) -> None:
    group = typer.main.get_command(app)
    for name in path:
        group = group.commands[name]  # type: ignore[attr-defined]  # a group of commands
    names = {name for each in group.params for name in (*each.opts, *each.secondary_opts) if name.startswith("--")}
    assert names <= set(" ".join(SCRIPT.help_lines(path)).replace(",", " ").split())


def test_the_list_of_commands_is_a_line_for_each() -> None:
    lines = SCRIPT.help_lines(())
    listed = lines[lines.index("Commands:") + 1 :]
    assert not [line for line in listed if line.endswith("...")]
    assert [line.split()[0] for line in listed] == [path[0] for path in PATHS if len(path) == 1]
