"""`magicdec plan`: which draft, budget and gamma; on how many devices; or no speculation. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from magicdec import plan_request
from magicdec.commands import options
from magicdec.commands.options import OutputFormat, list_of, option, parse_ints, parse_rates, table_console
from magicdec.plan_request import Asked

if TYPE_CHECKING:
    from magicdec.plan_document import Plan

OFFERS = {
    "model": options.models, "hardware": list_of(options.hardware_names), "engine": options.engines,
    "draft": options.planned_drafts, "draft_method": options.planned_methods,
    **dict.fromkeys(("weight_dtype", "kv_dtype", "draft_weight_dtype", "draft_kv_dtype"), options.formats),
}  # fmt: skip
"""What completes an option's value."""
AS_TEXT = (tuple[int, ...], tuple[str, ...], float | tuple[float, ...] | None)
EPILOG = """\b
Examples:
  magicdec plan
  magicdec plan --model llama-3.1-70b --hardware h100-sxm-80gb --gpus 8 --context 16384,65536
  magicdec plan --draft none --batch 64 --why
  magicdec plan --acceptance-rate 0.8 --format json
"""


def asks_plan(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of a plan in place of its `**given`, as plan_request declares them."""
    own = [each for each in signature(command, eval_str=True).parameters.values() if each.kind != Parameter.VAR_KEYWORD]
    made = [_parameter(name, asked) for name, asked in plan_request.options().items()]
    command.__signature__ = Signature([*made, *own])  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in (*made, *own)}
    return command


def _parameter(name: str, asked: Asked) -> Parameter:
    """An option on the command line, where lists are text, and files paths."""
    default: Any = asked.default
    kind: Any = asked.kind
    if name == "acceptance":
        default, kind = None, list[Path] | None
    elif name == "workload":
        kind = Path | None
    elif kind in AS_TEXT:
        default = ",".join(map(str, default)) if default else None
        kind = str if default else str | None
    names = (f"--{name.replace('_', '-')}",) if kind is bool else ()
    annotation = Annotated.__class_getitem__((kind, option(asked.option.help, OFFERS.get(name), *names)))  # type: ignore[attr-defined]  # made at run time
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _read(name: str, value: Any) -> Any:
    """An option's value from its text."""
    asked, shown = plan_request.options()[name], f"--{name.replace('_', '-')}"
    if not isinstance(value, str) or asked.kind not in AS_TEXT:
        return value
    if name == "acceptance_rate":
        return parse_rates(value)
    if asked.is_whole:
        return parse_ints(value, shown) if value else None
    return [part.strip() for part in value.split(",") if part.strip()]


@asks_plan
def plan_command(
    *,
    record: Annotated[
        Path | None, option("Append the evaluated grid as records.", None, "--record", "--records")
    ] = None,
    output_format: options.Format = OutputFormat.TABLE,
    why: Annotated[bool, option("Show the breakdown by operation.", None, "--why")] = False,
    **given: Any,
) -> None:
    """Predict which drafts pay, and by how much.

    For a model, devices, contexts and batches; each answer has a 90 % interval.
    """
    from magicdec.api import plan

    answer = plan(**{name: _read(name, value) for name, value in given.items()})
    if record is not None:
        _record(answer, record)
    if output_format is OutputFormat.JSON:
        print(answer.to_json())
    elif output_format is OutputFormat.CSV:
        print(answer.to_csv(), end="")
    else:
        from magicdec.reports.terminal_plan import print_plan

        print_plan(answer, table_console(), why=why)


def _record(answer: Plan, path: Path) -> None:
    """Appends every evaluated row as a record of `source: analytical`."""
    import msgspec

    from magicdec.records import append_record, current_environment
    from magicdec.reports.data import candidate_record

    environment = current_environment()
    for row in answer.rows:
        planned = candidate_record(answer, row)
        append_record(path, msgspec.structs.replace(planned, kind="plan", environment=environment))
