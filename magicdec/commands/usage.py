"""Help and errors of a command line: long help in groups, an error in one line that names the nearest valid option,
command or value.

Typer's errors are told by the names of their classes: where these classes are depends on its version.
"""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

from magicdec.errors import nearest, unknown_choice

EXTRA_ARGUMENTS = re.compile(r"Got unexpected extra argument\S* \((.*?)[ )]")


FEW_OPTIONS = 9
"""Up to so many options are one list."""
SECTIONS = {
    "Model and devices": "model hardware engine tp gpus pp ep dp_attention weights weight_dtype kv_dtype dtype device",
    "Load and limits": "batch context context_spread gen_len workload tpot_ms ttft_ms price prompts queue num_prompts",
    "Arrivals": "rate burstiness requests cached balance p95_ttft_ms p95_tpot_ms",
    "Draft": "draft draft_model draft_method draft_budget draft_tp gamma draft_weight_dtype draft_kv_dtype acceptance "
    "acceptance_rate simulate_acceptance adaptive",
    "Sampling": "temperature top_p top_k seed stop_at_eos",
    "A server": "server results concurrency prompt_len output_len rounds dry_run target",
    "Output": "record records output output_format why every quiet resume save_output stream help",
}
"""Options of the long commands by their headings in --help; the others stand under "Other"."""


class Command(TyperCommand):
    """A command whose options are listed in groups, where they are many."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        listed = [(param, param.get_help_record(ctx)) for param in self.get_params(ctx)]
        found = [(str(param.name), record) for param, record in listed if record is not None]
        if len(found) <= FEW_OPTIONS or any(param.param_type_name == "argument" for param in self.params):
            super().format_options(ctx, formatter)
            return
        grouped = {head: names.split() for head, names in SECTIONS.items()}
        known = {name for names in grouped.values() for name in names}
        for head, names in (*grouped.items(), ("Other", [name for name, _ in found if name not in known])):
            if records := [record for name, record in found if name in names]:
                with formatter.section(head):
                    formatter.write_dl(records)


class CommandGroup(TyperGroup):
    """A group of commands that refuses an unknown one with the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        is_name = not ctx.resilient_parsing and not args[0].startswith("-")
        if is_name and self.get_command(ctx, args[0]) is None:
            raise unknown_choice("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


def describe(error: Any) -> str:
    """The line for an error of typer's; "" where it has shown the help instead."""
    writers = {
        "NoSuchOption": _unknown_option,
        "BadOptionUsage": _option_value,
        "MissingParameter": _missing,
        "BadParameter": _bad_value,
        "UsageError": _extra_arguments,
    }
    writer = writers.get(type(error).__name__)
    return writer(error) if writer else str(error.format_message())


def _unknown_option(error: Any) -> str:
    options = _options(error.ctx)
    close = nearest(error.option_name.lstrip("-"), options)
    hint = f"did you mean {options[close]}?" if close else _see_help(error.ctx)
    return f"unknown option '{error.option_name}': {hint}"


def _options(ctx: Any) -> dict[str, str]:
    """Options of a command by their names without dashes."""
    names = (name for param in ctx.command.get_params(ctx) for name in (*param.opts, *param.secondary_opts))
    return {name.lstrip("-"): name for name in names if name.startswith("-")}


def _see_help(ctx: Any) -> str:
    return f"see {ctx.command_path} --help"


def _option_value(error: Any) -> str:
    what = "takes no value" if "does not" in error.format_message() else "needs a value"
    return f"{error.option_name} {what}"


def _missing(error: Any) -> str:
    return f"{error.ctx.command_path} needs {_name(error.param)}{_help(error.param)}"


def _bad_value(error: Any) -> str:
    """A number that is none or out of range, or none of a closed set; typer's own words for anything else."""
    described = getattr(error.param, "type_descriptor", None)
    reasons = getattr(error.__cause__, "errors", None)
    if described is None or reasons is None:
        return str(error.format_message())
    name, value = _name(error.param), reasons()[0]["input"]
    if described.choices:
        return str(unknown_choice(name, value, map(str, described.choices)))
    if described.annotation not in (int, float):
        return str(error.format_message())
    number = "a whole number" if described.annotation is int else "a number"
    return f"{name} must be {number}{_limits(described.parameter_info)}, not '{value}'"


def _limits(info: Any) -> str:
    if info.min is not None and info.max is not None:
        return f" from {info.min} to {info.max}"
    if info.min is not None:
        return f" of at least {info.min}"
    return f" of at most {info.max}" if info.max is not None else ""


def _extra_arguments(error: Any) -> str:
    found = EXTRA_ARGUMENTS.match(error.format_message())
    if found is None:
        return str(error.format_message())
    option = _options(error.ctx).get(found[1])
    hint = f"did you mean {option}?" if option else _see_help(error.ctx)
    return f"{error.ctx.command_path} takes no argument '{found[1]}': {hint}"


def _name(param: Any) -> str:
    return max(param.opts, key=len) if param.param_type_name == "option" else f"'{param.name}'"


def _help(param: Any) -> str:
    text = (getattr(param, "help", None) or "").strip().rstrip(".")
    return f": {text}" if text else ""
