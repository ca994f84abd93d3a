"""`magicdec export`: a plan as the flags of a serving engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from magicdec.commands import completion

EPILOG = """Examples:\n
  magicdec plan --draft llama-3.2-1b --acceptance-rate 0.75 --format json > plan.json\n
  magicdec export vllm plan.json\n
  magicdec export trtllm plan.json -o speculative.yaml
"""


def export_command(
    engine: Annotated[str, typer.Argument(help="vllm, sglang or trtllm.", autocompletion=completion.serving_engines)],
    plan: Annotated[Path, typer.Argument(help="A plan document (magicdec plan --format json).")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file, not to stdout.")] = None,
) -> None:
    """Write a plan as a serving engine's flags, and say what of it the engine does not support."""
    from magicdec.files import write_atomic
    from magicdec.plan_document import load_plan
    from magicdec.reports.exports import export

    text = export(engine, load_plan(plan))
    if output is None:
        print(text, end="")
    else:
        write_atomic(output, text)
        print(output)
