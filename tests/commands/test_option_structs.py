"""A command's options are the fields of one struct: what the line says, and what it leaves."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import pytest
import typer.main

from magicdec.cli import app, register_commands
from magicdec.commands.calibrate import CalibrateOptions
from magicdec.commands.observe import ObserveOptions
from magicdec.commands.options import server_tp
from magicdec.commands.plan import PlanOptions
from magicdec.commands.profile_acceptance import ProfileOptions
from magicdec.commands.request_form import values_of
from magicdec.commands.run import RunOptions
from magicdec.perfmodel.planner import request_of
from magicdec.schema.request import request_options
from tests.asked import command_of

FORMS = {
    "run": RunOptions,
    "plan": PlanOptions,
    "calibrate": CalibrateOptions,
    "profile-acceptance": ProfileOptions,
    "observe": ObserveOptions,
}


def defaults(form: Any) -> dict[str, Any]:
    return {
        field.name: field.default
        for field in fields(form)
        if field.default is not MISSING
    }


@pytest.mark.parametrize("name", FORMS)
def test_a_line_without_options_gives_the_structs_defaults(name: str) -> None:
    words = ["http://localhost"] if name == "observe" else []
    context = command_of(name).make_context(name, words)
    read = {key: value or None for key, value in context.params.items()}
    read.pop("source", None)
    assert read == {key: value or None for key, value in defaults(FORMS[name]).items()}


def test_an_option_with_its_default_is_stated_all_the_same() -> None:
    context = command_of("run").make_context("run", ["--gamma", "3", "--tp", "1"])
    asked = RunOptions(invocation=context, **context.params)
    assert asked.gamma == defaults(RunOptions)["gamma"]
    assert asked.stated == {"gamma", "tp"}


def test_a_plan_with_every_default_stated_is_the_plan_without_options() -> None:
    context = command_of("plan").make_context("plan", [])
    asked = PlanOptions(invocation=context, **context.params)
    assert request_of(**values_of(asked, request_options())) == request_of()


def helps(command: Any, path: str) -> dict[str, str]:
    """The help of a command and of those below it."""
    context = typer.Context(command, info_name=path)
    found = {path: command.get_help(context)}
    if hasattr(command, "list_commands"):
        for name in command.list_commands(context):
            found |= helps(command.get_command(context, name), f"{path} {name}")
    return found


def test_help_shows_one_value_of_an_option_that_is_given_several_times() -> None:
    register_commands()
    shown = helps(typer.main.get_command(app), "magicdec")
    assert [path for path, text in shown.items() if "list[" in text] == []
    assert "--results <path>" in shown["magicdec calibrate"]
    assert "source... <str>" in shown["magicdec observe"]


@pytest.mark.parametrize(
    ("tp", "hardware", "ranks"),
    [(None, "2xh100", 2), (4, "8xh100", 4), (None, "h100", 1), (None, None, 1)],
)
def test_a_server_runs_on_all_devices_that_are_named(
    tp: int | None, hardware: str | None, ranks: int
) -> None:
    assert server_tp(tp, hardware) == ranks
