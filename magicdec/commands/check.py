"""`magicdec check`: a server's command line, predicted as it is, and what to change."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from magicdec.commands import options
from magicdec.commands.options import (
    OutputFormat,
    option,
    parse_rates,
    print_as,
    table_console,
)
from magicdec.errors import ConfigError
from magicdec.tasks import task_named

if TYPE_CHECKING:
    from magicdec.live.check import Check

EPILOG = options.examples(
    "check 'vllm serve Qwen/Qwen3-32B -tp 2 --max-num-seqs 64' --hardware h100",
    "check serve.sh --hardware h200 --batch 16 --context 8k",
    "check docker-compose.yml --strict",
)


def check_command(
    command: Annotated[
        list[str],
        typer.Argument(
            help="The command in quotes, a file with it (script, YAML), or - for stdin."
        ),
    ],
    hardware: Annotated[
        str | None, option("Its devices; default: as a manifest names them.")
    ] = None,
    batch: Annotated[int | None, option("Users at once.", min=1)] = None,
    context: Annotated[int | None, option("Prompt length in tokens.", min=1)] = None,
    gen_len: Annotated[int, option("Tokens generated after the prompt.", min=0)] = 0,
    task: Annotated[
        str | None,
        option("Text that is served: chat, code, rag, ...; brings usual lengths."),
    ] = None,
    temperature: Annotated[
        float | None,
        option("Of its requests, 0 is greedy; default: the command's, else 1.", min=0),
    ] = None,
    acceptance_rate: Annotated[
        str | None,
        option("Of its draft: one rate for every position, or a list by position."),
    ] = None,
    accept_length: Annotated[
        float | None,
        option(
            "Of its draft: tokens per step at its gamma, as engines print them (mean acceptance "
            "length).",
            min=1,
        ),
    ] = None,
    drafted_share: Annotated[
        float | None,
        option(
            "Share of steps that had a draft, where --accept-length is of these alone (look-ups in "
            "vLLM); 1: it is of all steps.",
            min=0,
            max=1,
        ),
    ] = None,
    weight_dtype: Annotated[
        str | None,
        option(
            "Of its weights, where the command does not tell: q4_k_m, ud_q4_k_xl@18.7GB (the size of "
            "its file)."
        ),
    ] = None,
    strict: Annotated[
        bool,
        option(
            "Exit with 1 where it does not start, or a change surely gains.", "--strict"
        ),
    ] = False,
    values: Annotated[
        list[str] | None,
        option(
            "A variable that the file leaves open, NAME=VALUE; repeatable.", "--set"
        ),
    ] = None,
    output_format: options.Format = OutputFormat.TABLE,
) -> None:
    """Check a server's command: what to change, and what it gains.

    Reads what starts vLLM, SGLang or TensorRT-LLM, predicts it as it is, and weighs gamma, the
    draft, no draft, gamma by batch, the most sequences at once and captured graphs.
    """
    import msgspec

    from magicdec.live.check import check_command as check
    from magicdec.live.load import AskedLoad
    from magicdec.specs.serve_command import read_serve_command

    rates = parse_rates(acceptance_rate)
    load = AskedLoad(
        hardware=hardware,
        batch=batch,
        context_len=context,
        gen_len=gen_len,
        task=None if task is None else task_named(task),
        temperature=temperature,
        acceptance_rate=rates,
        accept_length=accept_length,
        drafted_share=drafted_share,
        weight_dtype=weight_dtype,
    )
    text, folder = _text(command)
    assigned = {}
    for given in values or ():
        variable, equals, value = given.partition("=")
        if not equals or not variable:
            raise ConfigError(f"--set takes NAME=VALUE, not '{given}'")
        assigned[variable] = value
    read = read_serve_command(text, folder=folder, values=assigned)
    result = check(read, load)
    document = msgspec.to_builtins(result) | {"headline": result.headline}
    print_as(output_format, document, document["changes"], lambda: _print(result))
    is_faulty = bool(result.problems) or any(each.is_sure for each in result.changes)
    if strict and is_faulty:
        raise typer.Exit(1)


def _text(words: list[str]) -> tuple[str, Path | None]:
    """The text that an argument stands for: itself, a file's with its folder, or stdin's."""
    if words == ["-"]:
        return sys.stdin.read(), None
    text = " ".join(words)
    if len(words) > 1 or " " in text.strip():
        return text, None
    path = Path(text)
    try:
        return path.read_text(encoding="utf-8"), path.parent
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{text} is neither a command that starts a server nor a file with one: {error}"
        ) from None


def _print(result: Check) -> None:
    from magicdec.live.check_text import lines_of

    say = table_console().print
    for line in lines_of(result):
        if line.is_option:
            print(f"    {line.text}")  # to copy, so in one line
        else:
            say(line.text)
