"""`magicdec sensitivity`: which input moves the best speedup most. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from magicdec.commands import options
from magicdec.commands.options import OutputFormat, option, parse_ints, parse_rates, print_as, table_console

if TYPE_CHECKING:
    from magicdec.perfmodel.plan.sensitivity import Sensitivity

EPILOG = """\b
Examples:
  magicdec sensitivity --batch 32 --context 65536
  magicdec sensitivity --model qwen3-8b --hardware h100-sxm-80gb --acceptance-rate 0.8 --format csv
"""


def sensitivity_command(
    model: options.Model = "llama-3.1-8b",
    hardware: options.Hardware = "a100-sxm-80gb",
    engine: options.Engine = None,
    tp: options.Tp = None,
    batch: Annotated[int, option("Sequences.")] = 64,
    context: Annotated[int, option("Prompt length.")] = 32768,
    gamma: options.Gamma = None,
    draft: Annotated[str | None, option("self, ngram, eagle, or a model.", options.planned_drafts)] = None,
    draft_method: options.DraftMethod = None,
    draft_budget: options.DraftBudgets = None,
    acceptance_rate: options.Rates = None,
    acceptance: options.Profiles = None,
    output_format: options.Format = OutputFormat.TABLE,
) -> None:
    """Show which input moves the speedup most.

    And so what is best measured next.
    """
    from magicdec.perfmodel.kernels.profile import load_hardware
    from magicdec.perfmodel.plan.drafts import load_profiles
    from magicdec.perfmodel.plan.planner import PlanRequest
    from magicdec.perfmodel.plan.sensitivity import sensitivity

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
    print_as(output_format, document, document["inputs"], lambda: _print_table(model, result))


def _print_table(model: str, result: Sensitivity) -> None:
    from magicdec.reports.text import text_table

    best = result.configuration
    budget = f" {best.draft_budget}" if best.draft_budget else ""
    print(f"{model}: {best.draft_method}{budget}, gamma {best.gamma}: {result.speedup:.2f}x")
    rows = [
        (
            each.name,
            f"{1.1**each.elasticity - 1:+.1%}",
            "-" if each.sigma is None else f"{each.sigma:.1%}",
            "-" if each.swing is None else f"{each.swing:.1%}",
        )
        for each in result.inputs
    ]
    table_console().print(text_table(("input", "+10 % gives", "its error", "moves the speedup"), rows))
    if result.measure_next:
        print(f"measure next: {result.measure_next}")
