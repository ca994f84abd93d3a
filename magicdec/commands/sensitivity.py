"""`magicdec sensitivity`: which input moves a plan's answer most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from magicdec.commands import options
from magicdec.commands.options import OutputFormat, print_as, table_console
from magicdec.commands.request_form import request_form, values_of

if TYPE_CHECKING:
    from magicdec.perfmodel.variations import Sensitivity

EPILOG = options.examples(
    "sensitivity --batch 32 --context 65536",
    "sensitivity --model qwen3-8b --hardware h100 --acceptance-rate 0.8",
)

ASKED = (
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

SensitivityForm: Any = request_form(*ASKED)


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

    result = sensitivity(request_of(**values_of(asked, ASKED)))
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
