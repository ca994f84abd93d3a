"""The `magicdec` program: gathers the commands, and turns a user's error into one line on stderr and exit code 2."""

from __future__ import annotations

import sys

import typer

from magicdec.errors import MagicdecError

USER_ERROR_EXIT_CODE = 2

app = typer.Typer(
    name="magicdec",
    help="Plan, run and check speculative decoding for long contexts and large batches.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def register_commands() -> None:
    """Adds each command; a command imports what it needs when it is called, so that starting is quick."""
    from magicdec.commands import calibrate, demo, plan, report, run, validate

    app.command("plan")(plan.plan_command)
    app.command("run")(run.run_command)
    app.command("calibrate")(calibrate.calibrate_command)
    app.command("profile-acceptance")(calibrate.profile_acceptance_command)
    app.add_typer(validate.app, name="validate")
    app.command("report")(report.report_command)
    app.command("demo")(demo.demo_command)


def main() -> None:
    register_commands()
    try:
        app()
    except MagicdecError as error:
        print(f"magicdec: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(USER_ERROR_EXIT_CODE)
