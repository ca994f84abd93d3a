"""`magicdec plan`: which draft, budget and gamma; on how many devices; or no speculation."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicdec.commands import options
from magicdec.commands.options import OutputFormat, option, table_console
from magicdec.commands.request_form import request_form, values_of
from magicdec.progress import shown_progress

if TYPE_CHECKING:
    from magicdec.schema.plan import Plan

EPILOG = options.examples(
    "plan",
    "plan --model llama-3.1-70b --hardware 8xh100 --context 16k,64k",
    "plan --draft none --batch 64 --why",
    "plan --acceptance-rate 0.8 --format json",
)

RequestForm: Any = request_form()


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
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
        from magicdec.logs.plan_options import READ_FROM_LOGS, options_of_logs
        from magicdec.logs.sources import files_of

        def say(line: str) -> None:
            if asked.output_format is OutputFormat.TABLE:
                print(line)

        for name in READ_FROM_LOGS:
            options.require(
                not getattr(asked, name), f"--logs says it: leave --{name} out"
            )
        stated |= options_of_logs(
            files_of(asked.logs),
            stated,
            batch=asked.batch,
            tokenizer=asked.tokenizer,
            say=say,
        )
    else:
        options.require(asked.tokenizer is None, "--tokenizer goes with --logs")
    request = request_of(**stated)
    with shown_progress(not request.has_arrivals, after_s=2.0) as show:
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
