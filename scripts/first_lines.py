"""Prints the first lines of every command's help in a terminal of 80 columns: its usage and what it does.

python scripts/first_lines.py
"""

from __future__ import annotations

from collections.abc import Iterator

import typer
from typer.testing import CliRunner

from magicdec.cli import app, register_commands

WIDTH = 80


def command_paths() -> Iterator[tuple[str, ...]]:
    """Every command, and every command of a group."""
    register_commands()

    def walk(command: object, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield path
        for name, each in getattr(command, "commands", {}).items():
            yield from walk(each, (*path, name))

    yield from walk(typer.main.get_command(app), ())


def help_lines(path: tuple[str, ...], *, width: int = WIDTH) -> list[str]:
    """The lines of a command's help that hold anything, in a terminal of that width."""
    arguments = [*path, "--help"]
    shown = CliRunner().invoke(app, arguments, terminal_width=width, prog_name="magicdec")
    assert shown.exit_code == 0, shown.output
    return [line.rstrip() for line in shown.output.splitlines() if line.strip()]


def main() -> None:
    for path in command_paths():
        print("\n".join(help_lines(path)[:2]))


if __name__ == "__main__":
    main()
