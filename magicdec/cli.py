"""The `magicdec` program: gathers the commands, and turns a user's error into one line on stderr
and exit code 2.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import warnings
from importlib import import_module
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from magicdec import __version__
from magicdec.commands.options import Command, CommandGroup
from magicdec.errors import ConfigError, MagicdecError, nearest, unknown_choice
from magicdec.progress import Interrupted
from magicdec.redaction import quoted

USER_ERROR_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT
TERMINATED_EXIT_CODE = 128 + signal.SIGTERM
NO_MORE_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
LONGEST_MESSAGE = 800
WIDEST_HELP = 120
EXTRA_ARGUMENTS = re.compile(r"Got unexpected extra argument\S* \((.*?)[ )]")
RUN_PACKAGES = ("torch", "tokenizers", "safetensors")

_terminated: list[int] = []
"""The termination that is being followed."""

app = typer.Typer(
    name="magicdec",
    cls=CommandGroup,
    help="Plan, run and check speculative decoding for long contexts and large batches.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of long options off at 80 columns
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": WIDEST_HELP,
    },
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"magicdec {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            is_eager=True,
            callback=_print_version,
        ),
    ] = False,
) -> None:
    """Plan, run and check speculative decoding for long contexts and large batches."""


COMMANDS = (
    "plan",
    "check",
    "run",
    "calibrate",
    "profile-acceptance",
    "report",
    "plot",
    "export",
    "observe",
    "explore",
    "sensitivity",
    "models",
    "hardware",
    "engines",
    "demo",
)
"""In the order that the help shows. Each has a module in commands/ of its own name, with its
function and the EPILOG of its help.
"""
COMMAND_GROUPS = ("validate", "records")
"""Modules in commands/ of commands that have commands of their own."""
RUN_MODELS = ("run", "calibrate", "profile-acceptance", "demo", *COMMAND_GROUPS)
"""Commands that compute, or start what computes: these keep the threads that were set up for it."""


def register_commands(*names: str) -> None:
    """Adds these commands, or all; one that is there already stays.

    `main` adds the one that is called: importing all, and reading their options, takes as long as a
    small plan.
    """
    names = names or (*COMMANDS, *COMMAND_GROUPS)
    there = {each.name for each in app.registered_commands} | {
        each.name for each in app.registered_groups
    }
    for name in names:
        if name in there:
            continue
        if name in COMMAND_GROUPS:
            app.add_typer(import_module(f"magicdec.commands.{name}").app, name=name)
        else:
            module_name = name.replace("-", "_")
            module = import_module(f"magicdec.commands.{module_name}")
            function = getattr(module, f"{module_name}_command")
            app.command(name, cls=Command, epilog=module.EPILOG)(function)
    app.registered_commands.sort(key=lambda each: COMMANDS.index(str(each.name)))


def main() -> None:
    """Runs the `magicdec` program: chooses the command, and turns its errors into exit codes."""
    warnings.formatwarning = _one_line
    _terminated.clear()
    code: object = None
    what_is_kept = "nothing is kept"
    try:
        code = _run()
    except MagicdecError as error:
        _fail(str(error))
    except Interrupted as error:
        what_is_kept = str(error)
        code = INTERRUPTED_EXIT_CODE
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED_EXIT_CODE
    except ModuleNotFoundError as error:
        _fail_for_missing(error)
    except OSError as error:
        _fail_for_output(error)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.ctx.get_help())  # type: ignore[attr-defined]
            sys.exit(0)
        _fail(describe(error))
    if code == INTERRUPTED_EXIT_CODE and not _terminated:
        print(f"magicdec: interrupted; {what_is_kept}", file=sys.stderr)
    if _terminated:
        sys.exit(TERMINATED_EXIT_CODE)
    if isinstance(code, int):
        sys.exit(code)
    sys.exit(0)


def _run() -> object:
    """Registers and runs the command that the arguments name. Returns its exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for word in sys.argv[1:]:
        _require_utf8(word)
    command = ""
    if len(sys.argv) > 1:
        command = sys.argv[1]
    if command not in RUN_MODELS:
        # NumPy's BLAS takes one thread per core as it is loaded, which wait in a loop between the
        # small products of a plan: half as much processor time again, and no less waiting.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if command in COMMANDS or command in COMMAND_GROUPS:
        register_commands(command)
    else:
        register_commands()
    code = app(prog_name="magicdec", standalone_mode=False)
    sys.stdout.flush()
    return code


def _require_utf8(word: str) -> None:
    """Refuses an argument with surrogates, which no output could hold."""
    if any("\ud800" <= character <= "\udfff" for character in word):
        raise ConfigError(
            f"'{word}' is not UTF-8 text; give a file with such a name another one"
        )


def _fail_for_missing(error: ModuleNotFoundError) -> None:
    """Exits with the extra that brings a missing package. Raises the error for any other module."""
    if error.name == "typst":
        _fail("a PDF needs typst: pip install 'magicdec[pdf]'")
    if error.name not in RUN_PACKAGES:
        raise error
    _fail(
        f"this command needs {error.name}: pip install 'magicdec[run]' "
        "(planning and reports work without)"
    )


def _fail_for_output(error: OSError) -> None:
    """Exits where the output cannot be written. Raises the error for anything else."""
    if error.errno == errno.ENAMETOOLONG:
        _fail(f"{error.filename}: too long for the name of a file")
    if error.errno not in NO_MORE_OUTPUT or error.filename is not None:
        raise error
    with open(
        os.devnull, "w"
    ) as nowhere:  # the rest of the output would fail again at the end
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    if error.errno == errno.EPIPE:  # the reader has closed the pipe
        sys.exit(1)
    _fail(f"cannot write the output: {error.strerror}")


def _one_line(message: Warning | str, *_: object, **__: object) -> str:
    """A warning for a user, without the place in the code that gave it."""
    return f"magicdec: warning: {quoted(' '.join(str(message).split()))}\n"


def _terminate(number: int, frame: FrameType | None) -> None:
    """Ends the program in order, as an interrupt does: started ranks are ended, temporary files
    removed, measurements kept, an event loop is left by its own way."""
    _terminated.append(number)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def _fail(message: str) -> NoReturn:
    line = quoted(" ".join(message.split()))
    if len(line) > LONGEST_MESSAGE:  # what was given may be a whole file
        line = f"{line[: LONGEST_MESSAGE // 2]} ... {line[-LONGEST_MESSAGE // 2 :]}"
    if line:
        print(f"magicdec: {line}", file=sys.stderr)
    sys.exit(USER_ERROR_EXIT_CODE)


def describe(error: Any) -> str:
    """The line for an error of typer's, told by the name of its class, whose place depends on
    typer's version.
    """
    writers = {
        "NoSuchOption": _unknown_option,
        "BadOptionUsage": _option_value,
        "MissingParameter": _missing,
        "BadParameter": _bad_value,
        "UsageError": _extra_arguments,
    }
    writer = writers.get(type(error).__name__)
    if writer:
        return writer(error)
    return str(error.format_message())


def _unknown_option(error: Any) -> str:
    options = _options(error.ctx)
    close = nearest(error.option_name.lstrip("-"), options)
    return f"unknown option '{error.option_name}': {_hint(error.ctx, options.get(close or ''))}"


def _options(ctx: Any) -> dict[str, str]:
    """Options of a command by their names without dashes."""
    names = []
    for param in ctx.command.get_params(ctx):
        for name in (*param.opts, *param.secondary_opts):
            names.append(name)
    options = {}
    for name in names:
        if name.startswith("-"):
            options[name.lstrip("-")] = name
    return options


def _hint(ctx: Any, option: str | None) -> str:
    if option:
        return f"did you mean {option}?"
    return f"see {ctx.command_path} --help"


def _option_value(error: Any) -> str:
    what = "needs a value"
    if "does not" in error.format_message():
        what = "takes no value"
    return f"{error.option_name} {what}"


def _missing(error: Any) -> str:
    text = (getattr(error.param, "help", None) or "").strip().rstrip(".")
    return f"{error.ctx.command_path} needs {_name(error.param)}{f': {text}' if text else ''}"


def _bad_value(error: Any) -> str:
    """A number that is none or out of range, or none of a closed set; typer's own words for
    anything else.
    """
    described = getattr(error.param, "type_descriptor", None)
    reasons = getattr(error.__cause__, "errors", None)
    if described is None or reasons is None:
        return str(error.format_message())
    name = _name(error.param)
    value = reasons()[0]["input"]
    if described.choices:
        return str(unknown_choice(name, value, map(str, described.choices)))
    if described.annotation not in (int, float):
        return str(error.format_message())
    number = "a number"
    if described.annotation is int:
        number = "a whole number"
    least, most = described.parameter_info.min, described.parameter_info.max
    if least is None:
        limits = ""
    else:
        limits = f" of at least {least}"
    if most is not None:
        if least is None:
            limits = f" of at most {most}"
        else:
            limits = f" from {least} to {most}"
    return f"{name} must be {number}{limits}, not '{value}'"


def _extra_arguments(error: Any) -> str:
    found = EXTRA_ARGUMENTS.match(error.format_message())
    if found is None:
        return str(error.format_message())
    hint = _meant(found[1]) or _hint(error.ctx, _options(error.ctx).get(found[1]))
    return f"{error.ctx.command_path} takes no argument '{found[1]}': {hint}"


def _meant(word: str) -> str:
    """The option that a word without one is a value of; "" where it is no name of the catalog."""
    from magicdec.perfmodel.kernels.profile import counted, hardware_aliases
    from magicdec.specs.names import resolve_name

    if resolve_name(word) is not None:
        return f"did you mean --model {word}?"
    if counted(word).name.lower() in hardware_aliases():
        return f"did you mean --hardware {word}?"
    return ""


def _name(param: Any) -> str:
    if param.param_type_name == "option":
        return str(max(param.opts, key=len))
    return f"'{param.name}'"
