"""Options of a command as its line is read, for tests of what is made of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import typer.main

from magicdec.cli import app, register_commands
from magicdec.commands.run import RunOptions
from magicdec.measure.plan_runs import options_of_plan


@cache
def command_of(name: str) -> Any:
    register_commands(name)
    return typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]


def asked_of_run(*words: str) -> RunOptions:
    context = command_of("run").make_context("run", list(words))
    return RunOptions(invocation=context, **context.params)


def planned_runs(path: Path, *words: str) -> list[RunOptions]:
    """The runs of a plan that a command line with these further options asks for."""
    asked = asked_of_run("--plan", str(path), *words)
    planned, _ = options_of_plan(path, asked.stated)
    return [replace(asked, **settings) for settings in planned]
