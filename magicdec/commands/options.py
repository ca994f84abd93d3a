"""Options that several commands share, each declared once with its type and help, and the groups in
which a command's help shows them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from magicdec.commands.engine_options import as_ours, quoted_server_command
from magicdec.errors import ConfigError, unknown_choice
from magicdec.reports.text import plain_console
from magicdec.units import LARGEST_COUNT, parse_count, parse_share

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

MAX_VALUES = 10_000
"""Limit on the numbers that one option may name: a longer range is a slip of the keyboard."""
LOCAL_PROFILE = Path("local.toml")
"""This machine's profile, unless another file is named."""
PIPED_WIDTH = 80
TEXT_WIDTH = 100


def examples(*lines: str) -> str:
    """The end of a command's help: each example within 80 columns, broken before options."""
    text = "\b\nExamples:\n"
    for line in lines:
        first, *words = re.split(r" (?=-)", f"magicdec {line}")
        rows = [first]
        for word in words:
            if len(rows[-1]) + len(word) < PIPED_WIDTH - 6:
                rows[-1] += f" {word}"
            else:
                rows.append(word)
        folded = " \\\n      ".join(rows)
        text += f"  {folded}\n"
    return text


def command(name: str, **given: Any) -> str:
    """A command to paste, with these options; none for a value that is empty, one for each of a
    list.
    """
    words = ["magicdec", name]
    for key, value in given.items():
        values = value
        if not isinstance(value, list):
            values = [value]
        for single in filter(None, values):
            words += [f"--{key.replace('_', '-')}", str(single)]
    return shlex.join(words)


class OutputFormat(StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def option(text: str, *names: str, **more: Any) -> Any:
    """An option with its help."""
    return typer.Option(*names, help=text, **more)


def asks(form: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Gives a command that takes one struct the options that the struct's fields declare."""

    def decorate(command: Callable[[T], None]) -> Callable[..., None]:
        def called(**values: Any) -> None:
            command(form(**values))

        called.__name__ = command.__name__
        called.__doc__ = command.__doc__
        # typer reads options off a function's signature, and follows __wrapped__ to the struct's
        called.__annotations__ = {}
        called.__wrapped__ = form  # type: ignore[attr-defined]
        return called

    return decorate


def stated(invocation: typer.Context) -> frozenset[str]:
    """The options that the command line states."""
    names = set()
    for name in invocation.params:
        source = invocation.get_parameter_source(name)
        if source is None or source.name != "DEFAULT":
            names.add(name)
    return frozenset(names)


def as_dtype(text: str | None) -> str | None:
    """torch's name of a number format: "bf16" is understood as bfloat16."""
    from magicdec.specs.precision import DTYPE_OF_FORMAT

    return text and DTYPE_OF_FORMAT.get(text, text)


def as_formats(text: str | None) -> str | None:
    """The profiles' names of a list of number formats: "bfloat16" is understood as bf16, "awq" as
    int4; "auto" is the format as published.
    """
    from magicdec.specs.formats import format_name

    if not text or text == "auto":
        return None
    return ",".join(format_name(part) for part in text.split(","))


# What is predicted
Hardware = Annotated[str, option("Catalog name or TOML file.")]
Temperature = Annotated[float, option("0 is greedy.")]

# What is run here
Checkpoint = Annotated[
    str, option("Catalog name, or a Hugging Face checkpoint directory.")
]
Runtime = Literal["ours", "vllm"]
Dtype = Annotated[str, option("float32, bfloat16 or float16.", callback=as_dtype)]
OptionalDtype = Annotated[
    str | None,
    option(
        "float32, bfloat16 or float16; default float32; a server's as in its plan.",
        callback=as_dtype,
    ),
]
DeviceName = Annotated[str, option("cpu, cuda or cuda:N.")]
CLOCK_HELP = "wall, or cpu: the processor time of one thread, which other processes disturb less."

# A server
ServerFormat = Annotated[
    str | None,
    option("The server's; default as published, on a CPU fp32.", callback=as_formats),
]
ServerTp = Annotated[
    int | None,
    option(
        "The server's tensor-parallel size; default: as many devices as --hardware counts.",
        min=1,
    ),
]
ServerTemperature = Annotated[float, option("Of its requests; 0 is greedy.")]
Target = Annotated[
    str | None, option("MODEL or MODEL/ENGINE, where an address has several.")
]

# Logged requests
LoggedOutputs = Annotated[
    list[str] | None,
    option(
        "Logged requests to replay (JSON lines, JSON, .gz, .parquet; globs); repeatable."
    ),
]
LogTokenizer = Annotated[
    Path | None,
    option(
        "With logs of text: the model's tokenizer.json, or its directory.",
        "--tokenizer",
    ),
]

# Files and output
Quiet = Annotated[bool, option("No progress display.", "--quiet", "-q")]
Format = Annotated[OutputFormat, option("table, json or csv.", "--format")]
Output = Annotated[
    Path | None, option("Write to this file, not to stdout.", "--output", "-o")
]
RecordFiles = Annotated[
    list[Path] | None,
    typer.Argument(help="Record files (JSON lines), measured and predicted."),
]
PlanFile = Annotated[
    Path | None, option("A plan document (magicdec plan --format json).")
]


FEW_OPTIONS = 9
"""Commands with at most this many options show them as one list."""
DIGITS = re.compile(r"[0-9]{1,9}")
DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
LISTED = re.compile(r"<list\[(\w+)\]>")
"""How typer shows the values of an option that is given once for each."""
CLICK_KINDS: Mapping[str, type] = {
    "text": str,
    "integer": int,
    "integer range": int,
    "float": float,
    "float range": float,
    "boolean": bool,
}
"""Types of options by click's names of them."""
SECTIONS = {
    "Model and devices": "model hardware engine attention_backend tp gpus pp ep dp_attention weights weight_dtype "
    "kv_dtype dtype device",
    "Load and limits": "task batch context context_spread gen_len workload tpot_ms ttft_ms price "
    "prefill kv_link_gb_s "
    "prompts queue num_prompts",
    "Arrivals": "rate burstiness requests cached balance p95_ttft_ms p95_tpot_ms",
    "Draft": "draft draft_model draft_method draft_budget draft_tp gamma draft_weight_dtype "
    "draft_kv_dtype plugin acceptance "
    "acceptance_rate accept_length drafted_share simulate_acceptance adaptive",
    "Sampling": "temperature top_p top_k seed stop_at_eos",
    "Logged requests": "logs outputs tokenizer gammas lookup_min lookup_max max_model_len jobs",
    "Measurement": "plan repetitions run_to_end cuda_graphs quick clock",
    "A server": "server results concurrency prompt_len output_len rounds dry_run target",
    "Output": "record records output output_format why every quiet resume save_output help",
}
"""Options of the long commands by their headings in --help."""


def kind_of(param: Any) -> type | None:
    """The type that an option's text is converted to; None for a choice, a list or a path.

    Newer versions of typer keep the annotation, earlier ones a type of click's.
    """
    described = getattr(param, "type_descriptor", None)
    if described is None:
        return CLICK_KINDS.get(getattr(param.type, "name", ""))
    if isinstance(described.annotation, type):
        return described.annotation
    return None


def _plain(param: Any, kind: type, text: str) -> Any:
    """A choice by its name, a number in digits, a file that is not there yet, where no limits are
    set; other text as it is.
    """
    if issubclass(kind, StrEnum) and text in list(kind):
        return kind(text)
    described = getattr(param, "type_descriptor", None)
    limits = getattr(described, "parameter_info", None)
    if limits is None:
        return text
    if kind is Path:
        if not (limits.exists or limits.resolve_path or os.path.exists(text)):
            return Path(text)
    elif limits.min is None and limits.max is None:
        if kind is int and DIGITS.fullmatch(text):
            return int(text)
        if kind is float and DECIMAL.fullmatch(text):
            return float(text)
    return text


class LazyOption(TyperOption):
    """An option that typer converts only where it must: neither one that is not stated, nor what is
    plain. Typer makes a converter of pydantic's for every option of a command, which takes
    as long as a third of a plan.
    """

    def process_value(self, ctx: Any, value: Any) -> Any:
        kind = kind_of(self)
        ready = value
        if value is None and self.multiple:
            ready = ()
        is_absent = value is None and not self.required
        if kind is not None and isinstance(value, str):
            ready = _plain(self, kind, value)
        if is_absent or (kind is not None and isinstance(ready, kind)):
            return self.callback(ctx, self, ready) if self.callback else ready
        return super().process_value(ctx, value)

    def get_help_record(self, ctx: Any) -> Any:
        return _of_one_value(super().get_help_record(ctx))


class Argument(TyperArgument):
    """An argument whose line of help shows what each of its values is."""

    def get_help_record(self, ctx: Any) -> Any:
        return _of_one_value(super().get_help_record(ctx))


def _of_one_value(record: tuple[str, str] | None) -> tuple[str, str] | None:
    """A line of help in which a list shows what each of its values is."""
    if record is None:
        return None
    name, text = record
    return LISTED.sub(lambda found: f"<{found[1].lower()}>", name), text


def _light(params: list[Any]) -> list[Any]:
    """The parameters with classes of ours: typer makes its own by name."""
    ours: dict[type, type] = {TyperOption: LazyOption, TyperArgument: Argument}
    for param in params:
        param.__class__ = ours.get(type(param), type(param))
    return params


class Command(TyperCommand):
    """A command whose options are listed in groups, where they are many, and which reads engines'
    names for them.
    """

    def get_params(self, ctx: Any) -> Any:
        return _light(super().get_params(ctx))  # --help among them, which click adds

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        names: list[str] = []
        flags: list[str] = []
        counts: list[str] = []
        for param in self.get_params(ctx):
            if param.param_type_name != "option":
                continue
            names += [*param.opts, *param.secondary_opts]
            if getattr(param, "is_flag", False):
                flags += [*param.opts, *param.secondary_opts]
            if kind_of(param) is int:
                counts += param.opts
        if ctx.info_name == "check":
            args = quoted_server_command(args, names=names, flags=flags)
        read = as_ours(args, names=names, counts=counts, say=_say)
        return super().parse_args(ctx, read)

    def invoke(self, ctx: Any) -> Any:
        for param in self.get_params(ctx):
            value = ctx.params.get(param.name)
            if isinstance(value, int) and abs(value) > LARGEST_COUNT:
                raise ConfigError(
                    f"{param.opts[0]} must be at most {LARGEST_COUNT:.0e}, and has "
                    f"{value.bit_length() // 3.32:.0f} digits"
                )
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        records = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                # click has a name of its own for the parameter of --help
                name = "help" if "--help" in param.opts else str(param.name)
                records[name] = record
        has_arguments = any(
            param.param_type_name == "argument" for param in self.params
        )
        if has_arguments or len(records) <= FEW_OPTIONS:
            super().format_options(ctx, formatter)
            return
        head_of: dict[str, str] = {}
        for head, names in SECTIONS.items():
            head_of |= dict.fromkeys(names.split(), head)
        sections: dict[str, list[Any]] = {head: [] for head in SECTIONS}
        for name, record in records.items():
            sections[head_of[name]].append(record)
        for head, rows in sections.items():
            if rows:
                with formatter.section(head):
                    formatter.write_dl(rows)


def _say(note: str) -> None:
    print(f"magicdec: {note}", file=sys.stderr)


class CommandGroup(TyperGroup):
    """A group of commands that refuses an unknown one with the nearest."""

    def get_params(self, ctx: Any) -> Any:
        return _light(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _light(command.params)
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        is_name = not ctx.resilient_parsing and not args[0].startswith("-")
        if is_name and self.get_command(ctx, args[0]) is None:
            raise unknown_choice("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


def parse_ints(text: str, option: str) -> list[int]:
    """ "1,2,4-6,32k" -> [1, 2, 4, 5, 6, 32768]; k is 1024, m its square. Raises ConfigError naming
    the option.
    """
    values: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            low = parse_count(first)
            high = low
            if dash:
                high = parse_count(last)
        except ValueError:
            raise ConfigError(
                f"{option} must be numbers like 4, 32k or 1,2,4-6, not '{text}'"
            ) from None
        if len(values) + high - low >= MAX_VALUES:
            raise ConfigError(
                f"{option} {part.strip()} names more than {MAX_VALUES} numbers; give fewer"
            )
        values += range(low, high + 1)
    if not values:
        raise ConfigError(f"{option} '{text}' names no number")
    return values


def parse_counts(text: str, option: str) -> list[int | str]:
    """ "512,7%" -> [512, "7%"]: numbers, and shares of the context as their text. Raises
    ConfigError
    naming the option.
    """
    values: list[int | str] = []
    for part in text.split(","):
        share = part.strip()
        if not share.endswith("%"):
            values += parse_ints(share, option)
        elif parse_share(share) is None:
            raise ConfigError(
                f"{option} must be above 0% and up to 100%, not '{share}'"
            )
        else:
            values.append(share)
    return values


def parse_floats(text: str, option: str) -> list[float]:
    """ "0.9,0.85" -> [0.9, 0.85]. Raises ConfigError naming the option."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{option} must be numbers like 0.8 or 0.9,0.85, not '{text}'"
        ) from None


def parse_rates(text: str | None) -> float | tuple[float, ...] | None:
    """ "0.8" -> 0.8, "0.8,0.7" -> by position. Raises ConfigError naming the option."""
    if text is None:
        return None
    rates = parse_floats(text, "--acceptance-rate")
    if len(rates) == 1:
        return rates[0]
    return tuple(rates)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def print_as(
    form: OutputFormat,
    document: Any,
    rows: Iterable[Mapping[str, Any]],
    table: Callable[[], None],
) -> None:
    """Prints a result as JSON of its document, as CSV of its rows, or by its table."""
    from magicdec.files import rows_to_csv

    if form is OutputFormat.TABLE:
        table()
    elif form is OutputFormat.CSV:
        print(rows_to_csv(rows), end="")
    else:
        print(json.dumps(document, indent=1))


def print_fault(fault: str) -> None:
    """Prints that a measured draft does not work, and why that may be; nothing for one that does."""
    from magicdec.counts import CAUSES

    if fault:
        print(f"{fault}\n{CAUSES}")


def table_console() -> Console:
    """A console for tables: as wide as the terminal, plain text and 80 columns when piped."""
    return plain_console(None if sys.stdout.isatty() else PIPED_WIDTH)


def console() -> Console:
    """A console for stdout: at most 100 columns, plain text when piped."""
    if sys.stdout.isatty():
        return plain_console(min(plain_console().width, TEXT_WIDTH))
    return plain_console(TEXT_WIDTH)


def server_tp(tp: int | None, hardware: str | None) -> int:
    """A server's tensor-parallel size: given, or all devices of "4xh100", or 1."""
    from magicdec.perfmodel.kernels.profile import counted

    devices = counted(hardware or "")
    return tp or devices.num_gpus or 1
