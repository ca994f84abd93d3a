"""`magicdec export`: a plan as the flags of a serving engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from magicdec.commands import completion

EPILOG = """\b
Examples:
  magicdec plan --draft llama-3.2-1b --acceptance-rate 0.75 --format json > plan.json
  magicdec export vllm plan.json
  magicdec export sglang plan.json --candidate 3
  magicdec export trtllm plan.json -o speculative.yaml
"""


def export_command(
    engine: Annotated[str, typer.Argument(help="vllm, sglang or trtllm.", autocompletion=completion.serving_engines)],
    plan: Annotated[Path, typer.Argument(help="A plan document (magicdec plan --format json).")],
    candidate: Annotated[
        int | None, typer.Option(help="Of the plan's candidates, from 1; default: the best that the engine runs.")
    ] = None,
    acceptance: Annotated[list[Path] | None, typer.Option(help="Acceptance profile of the plan; repeatable.")] = None,
    hardware: Annotated[Path | None, typer.Option(help="Profile of a device that is not in the catalog.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file, not to stdout.")] = None,
) -> None:
    """Write a plan's choice as a serving engine's flags.

    One configuration, predicted anew on that engine.
    """
    from magicdec.files import write_atomic
    from magicdec.perfmodel.acceptance import load_profile
    from magicdec.perfmodel.replan import for_engine
    from magicdec.plan_document import load_plan
    from magicdec.reports.exports import check_engine, export

    check_engine(engine)
    profiles = tuple(map(load_profile, acceptance or ()))
    again = for_engine(load_plan(plan), engine, number=candidate, acceptance=profiles, hardware=hardware)
    text = export(engine, again.plan, reason=again.reason)
    if output is None:
        print(text, end="")
    else:
        write_atomic(output, text)
        print(output)
