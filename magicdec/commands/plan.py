"""`magicdec plan`: which draft, budget and gamma; on how many devices; or no speculation. `magicdec
sensitivity`: which input moves that answer most. `magicdec explore`: a page in the browser,
answered by the planner as its controls move. None needs torch."""

from __future__ import annotations

import shlex
from collections.abc import Container
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicdec.commands import options
from magicdec.commands.options import (
    OutputFormat,
    as_formats,
    option,
    parse_counts,
    parse_ints,
    parse_rates,
    print_as,
    table_console,
)
from magicdec.progress import shown_progress
from magicdec.schema.request import (
    COUNT_OR_SHARE,
    COUNTS_OR_SHARES,
    Option,
    request_options,
)

if TYPE_CHECKING:
    from magicdec.perfmodel.variations import Sensitivity
    from magicdec.schema.plan import Plan

PLAN_EPILOG = options.examples(
    "plan",
    "plan --model llama-3.1-70b --hardware 8xh100 --context 16k,64k",
    "plan --draft none --batch 64 --why",
    "plan --acceptance-rate 0.8 --format json",
)
SENSITIVITY_EPILOG = options.examples(
    "sensitivity --batch 32 --context 65536",
    "sensitivity --model qwen3-8b --hardware h100 --acceptance-rate 0.8",
)
EXPLORE_EPILOG = options.examples(
    "explore",
    "explore --model path/to/config.json --port 8080 --no-browser",
    "explore --host 0.0.0.0 --allow-host planner.example.org --no-browser",
    "explore --model embedded --hardware local.toml --engine local.engine.toml",
)
SENSITIVITY_OPTIONS = (
    "model",
    "hardware",
    "engine",
    "tp",
    "batch",
    "context",
    "gamma",
    "draft",
    "draft_method",
    "draft_budget",
    "acceptance_rate",
    "accept_length",
    "drafted_share",
    "acceptance",
)

AS_TEXT = (
    tuple[int, ...],
    tuple[str, ...],
    COUNTS_OR_SHARES,
    float | tuple[float, ...] | None,
    COUNT_OR_SHARE,
)
"""Types of a request's fields that a command line has as text."""


def request_form(*names: str) -> Any:
    """A struct whose fields are these options of a plan, or all, as a command line has them: the
    fields of schema/request.py under the options' names, lists as text and files as paths. For a
    command's own struct to extend."""
    fields = []
    for name, asked in request_options().items():
        if names and name not in names:
            continue
        default: Any = asked.default
        kind: Any = asked.kind
        if name == "acceptance":
            default = None
            kind = list[Path] | None
        elif name == "workload":
            kind = Path | None
        elif kind in AS_TEXT:
            default = ",".join(map(str, default)) if default else None
            kind = str if default else str | None
        flags = []
        if kind is bool:
            flags.append(f"--{name.replace('_', '-')}")  # else typer adds --no-...
        reads = as_formats if name.endswith("dtype") else None
        shown = option(asked.help, *flags, callback=reads)
        fields.append((name, Annotated[kind, shown], field(default=default)))
    return make_dataclass("RequestForm", fields, frozen=True, kw_only=True)


def values_of(form: Any, names: Container[str]) -> dict[str, Any]:
    """These options of a request, read from their text: keywords of a plan. Other names are left
    out. Raises ConfigError for a text that is no such list."""
    return {
        name: _read(name, asked, getattr(form, name))
        for name, asked in request_options().items()
        if name in names
    }


def _read(name: str, asked: Option, value: Any) -> Any:
    """An option's value from its text."""
    shown = f"--{name.replace('_', '-')}"
    if (
        not isinstance(value, str)
        or asked.kind not in AS_TEXT
        or asked.kind == COUNT_OR_SHARE
    ):
        return value
    if name == "acceptance_rate":
        return parse_rates(value)
    if asked.kind == COUNTS_OR_SHARES:
        return parse_counts(value, shown) if value else None
    if asked.is_whole:
        return parse_ints(value, shown) if value else None
    return [part.strip() for part in value.split(",") if part.strip()]


RequestForm: Any = request_form()
SensitivityForm: Any = request_form(*SENSITIVITY_OPTIONS)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(RequestForm):  # type: ignore[misc]
    """Options of `magicdec plan`: a request, and where its answer goes."""

    invocation: typer.Context
    record: Annotated[
        Path | None,
        option("Append the evaluated grid as records.", "--record", "--records"),
    ] = None
    output_format: options.Format = OutputFormat.TABLE
    output: Annotated[
        Path | None,
        option("Also write the plan, as JSON, to this file.", "--output", "-o"),
    ] = None
    why: Annotated[bool, option("Show the breakdown by operation.", "--why")] = False
    every: Annotated[
        bool, option("Show all rows, layouts, gammas and notes.", "--all")
    ] = False
    logs: Annotated[
        list[str] | None,
        option(
            "Logged requests: arrivals, lengths, cached prefixes and look-ups' acceptance."
        ),
    ] = None
    tokenizer: options.LogTokenizer = None


@options.asks(PlanOptions)
def plan_command(asked: PlanOptions) -> None:
    """Predict which drafts pay, and by how much.

    For a model, devices, contexts and batches; each answer has a 90 % interval.
    """
    from magicdec.files import check_writable, write_atomic
    from magicdec.perfmodel.planner import make_plan, request_of

    if asked.output is not None:
        check_writable(asked.output)
    stated = values_of(asked, options.stated(asked.invocation))
    if asked.logs:
        from magicdec.commands.plan_logs import options_from_logs

        stated |= options_from_logs(asked, asked.logs)
    else:
        options.require(asked.tokenizer is None, "--tokenizer goes with --logs")
    request = request_of(**stated)
    with shown_progress(not request.has_arrivals) as show:
        answer = make_plan(request, show)
    if asked.record is not None:
        _record(answer, asked.record)
    if asked.output is not None:
        write_atomic(asked.output, answer.to_json())
    if asked.output_format is OutputFormat.JSON:
        print(answer.to_json())
    elif asked.output_format is OutputFormat.CSV:
        print(answer.to_csv(), end="")
    else:
        from magicdec.reports.terminal_plan import print_plan

        saved_as = None
        if asked.output is not None:
            saved_as = shlex.quote(str(asked.output))
        print_plan(
            answer,
            table_console(),
            why=asked.why,
            every=asked.every,
            saved_as=saved_as,
        )


def _record(answer: Plan, path: Path) -> None:
    """Appends every evaluated row as a record of `source: analytical`."""
    import msgspec

    from magicdec.reports.data import candidate_record
    from magicdec.schema.record import append_record, current_environment

    environment = current_environment()
    for row in answer.rows:
        planned = candidate_record(answer, row)
        append_record(
            path, msgspec.structs.replace(planned, kind="plan", environment=environment)
        )


@dataclass(frozen=True, kw_only=True)
class SensitivityOptions(SensitivityForm):  # type: ignore[misc]
    """Options of `magicdec sensitivity`: one configuration."""

    output_format: options.Format = OutputFormat.TABLE


@options.asks(SensitivityOptions)
def sensitivity_command(asked: SensitivityOptions) -> None:
    """Show which input moves the speedup most.

    That input is the one to measure next.
    """
    from magicdec.perfmodel.planner import request_of
    from magicdec.perfmodel.variations import sensitivity

    result = sensitivity(request_of(**values_of(asked, SENSITIVITY_OPTIONS)))
    document = result.to_document()
    print_as(
        asked.output_format,
        document,
        document["inputs"],
        lambda: _print_sensitivity(asked.model, result),
    )


def _print_sensitivity(model: str, result: Sensitivity) -> None:
    from magicdec.reports.text import text_table

    best = result.configuration
    if best.draft_budget is not None:
        budget = f" {best.draft_budget}"
    else:
        budget = ""
    verdict = ""
    if result.speedup < 1.0:
        verdict = ", slower than without a draft; the inputs that could change that:"
    print(
        f"{model}: {best.draft_method}{budget}, gamma {best.gamma}: {result.speedup:.2f}x{verdict}"
    )
    rows = [
        (
            each.name,
            f"{1.1**each.elasticity - 1:+.1%}",
            "-" if each.sigma is None else f"{each.sigma:.1%}",
            "-" if each.swing is None else f"{each.swing:.1%}",
        )
        for each in result.inputs
    ]
    table_console().print(
        text_table(("input", "+10 % gives", "its error", "moves the speedup"), rows)
    )
    if result.measure_next:
        print(f"measure next: {result.measure_next}")


def explore_command(
    model: Annotated[
        str | None, option("Catalog name, config.json or its directory.")
    ] = None,
    hardware: Annotated[str | None, option("Catalog name or TOML file.")] = None,
    engine: Annotated[
        str | None, option("Engine on that hardware: catalog name or TOML file.")
    ] = None,
    acceptance: Annotated[
        list[Path] | None,
        option("Measured acceptance profile of that model; repeatable."),
    ] = None,
    host: Annotated[
        str, option("Address to listen on; beyond loopback it needs --allow-host.")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        option(
            "A host name that requests may ask for, such as a container's; repeatable."
        ),
    ] = None,
    port: Annotated[int, option("Port; 0 takes a free one.", min=0, max=65535)] = 8642,
    browser: Annotated[bool, option("Open the page.", "--browser/--no-browser")] = True,
) -> None:
    """Ask what-if questions on a local page.

    A form with the options of a plan, and the answer as a report.
    """
    import webbrowser

    from magicdec.explore.server import ExplorerServer

    start = {"model": model, "hardware": hardware, "engine": engine}
    with ExplorerServer(
        {name: text for name, text in start.items() if text is not None},
        [str(path) for path in acceptance or ()],
        host=host,
        port=port,
        allowed_hosts=allow_host or (),
    ) as server:
        print(f"{server.url}  (Ctrl-C stops it)", flush=True)
        if browser:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
