"""`magicdec sensitivity`: which input moves the best speedup most. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from magicdec.commands import completion
from magicdec.commands.options import OutputFormat, parse_ints, parse_rates

EPILOG = """\b
Examples:
  magicdec sensitivity --batch 32 --context 65536
  magicdec sensitivity --model qwen3-8b --hardware h100-sxm-80gb --acceptance-rate 0.8 --format csv
"""


def sensitivity_command(
    model: Annotated[
        str, typer.Option(help="Catalog name, config.json or its directory.", autocompletion=completion.models)
    ] = "llama-3.1-8b",
    hardware: Annotated[
        str, typer.Option(help="Catalog name or TOML file.", autocompletion=completion.hardware)
    ] = "a100-sxm-80gb",
    engine: Annotated[
        str | None, typer.Option(help="Catalog name or TOML file.", autocompletion=completion.engines)
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel size; default: the node.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 64,
    context: Annotated[int, typer.Option(help="Prompt length.")] = 32768,
    gamma: Annotated[int | None, typer.Option(help="Drafted tokens per step; default: searched.")] = None,
    draft: Annotated[
        str | None, typer.Option(help="self, ngram, eagle, or a model.", autocompletion=completion.planned_drafts)
    ] = None,
    draft_method: Annotated[
        str | None, typer.Option(help="streamingllm, snapkv, topk or full.", autocompletion=completion.planned_methods)
    ] = None,
    draft_budget: Annotated[str | None, typer.Option(help="KV slots per sequence, a list.")] = None,
    acceptance_rate: Annotated[
        str | None, typer.Option(help="One rate for every position, or a list by position.")
    ] = None,
    acceptance: Annotated[list[Path] | None, typer.Option(help="Measured acceptance profile; repeatable.")] = None,
    output_format: Annotated[OutputFormat, typer.Option("--format", help="table, json or csv.")] = OutputFormat.TABLE,
) -> None:
    """Show which input moves the speedup most.

    And so what is best measured next.
    """
    from magicdec.files import rows_to_csv
    from magicdec.perfmodel.drafts import load_profiles
    from magicdec.perfmodel.planner import PlanRequest
    from magicdec.perfmodel.sensitivity import sensitivity
    from magicdec.specs.hardware import load_hardware

    result = sensitivity(
        PlanRequest(
            model=model,
            hardware=(load_hardware(hardware),),
            engine=engine,
            tp_size=tp,
            batch_sizes=(batch,),
            context_lens=(context,),
            gamma=gamma,
            draft=draft,
            draft_method=draft_method,
            draft_budgets=tuple(parse_ints(draft_budget, "--draft-budget")) if draft_budget else (),
            acceptance_rate=parse_rates(acceptance_rate),
            acceptance=load_profiles(acceptance or (), draft=draft, method=draft_method),
        )
    )
    document = result.to_document()
    if output_format is OutputFormat.JSON:
        print(json.dumps(document, indent=1))
        return
    if output_format is OutputFormat.CSV:
        print(rows_to_csv(document["inputs"]), end="")
        return
    best = result.configuration
    budget = f" {best.draft_budget}" if best.draft_budget else ""
    print(f"{model}: {best.draft_method}{budget}, gamma {best.gamma}: {result.speedup:.2f}x")
    print(f"{'input':<36}{'+10 % gives':>12}{'its error':>11}{'moves the speedup':>19}")
    for each in result.inputs:
        sigma = "-" if each.sigma is None else f"{each.sigma:.1%}"
        swing = "-" if each.swing is None else f"{each.swing:.1%}"
        print(f"{each.name:<36}{1.1**each.elasticity - 1:>+12.1%}{sigma:>11}{swing:>19}")
    if result.measure_next:
        print(f"measure next: {result.measure_next}")
