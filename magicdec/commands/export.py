"""`magicdec export`: a plan's choice as a serving engine's flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from magicdec.commands import options
from magicdec.commands.options import option

EPILOG = options.examples(
    "plan --draft llama-3.2-1b --acceptance-rate 0.75 --format json > plan.json",
    "export vllm plan.json",
    "export sglang plan.json --candidate 3",
    "export trtllm plan.json -o speculative.yaml",
)


def export_command(
    engine: Annotated[str, typer.Argument(help="vllm, sglang or trtllm.")],
    plan: Annotated[
        Path, typer.Argument(help="A plan document (magicdec plan --format json).")
    ],
    candidate: Annotated[
        int | None,
        option(
            "Of the plan's candidates, from 1; default: the best that the engine runs."
        ),
    ] = None,
    acceptance: Annotated[
        list[Path] | None, option("Acceptance profile of the plan; repeatable.")
    ] = None,
    hardware: Annotated[
        Path | None, option("Profile of a device that is not in the catalog.")
    ] = None,
    check_cost: Annotated[
        bool,
        option(
            "Runs that settle the plan's cost on your server, acceptance imposed.",
            "--check-cost",
        ),
    ] = False,
    output: options.Output = None,
) -> None:
    """Write a plan's choice as a serving engine's flags.

    One configuration, predicted anew on that engine.
    """
    from magicdec.files import write_atomic
    from magicdec.perfmodel.acceptance import load_profile
    from magicdec.perfmodel.variations import for_engine, priced
    from magicdec.reports.cost_check import write_cost_check
    from magicdec.reports.exports import check_engine, export
    from magicdec.schema.plan import load_plan

    check_engine(engine)
    profiles = tuple(map(load_profile, acceptance or ()))
    again = for_engine(
        load_plan(plan),
        engine,
        number=candidate,
        acceptance=profiles,
        hardware=hardware,
    )
    if check_cost:
        choice = priced(again.plan, engine, acceptance=profiles, hardware=hardware)
        tokens = {
            gamma: choice.tokens_at(gamma) for gamma in {1, again.plan.best.gamma}
        }
        text = write_cost_check(
            engine, again.plan, tokens, plan_file=str(plan), site=again.site
        )
    else:
        text = export(engine, again.plan, reason=again.reason, site=again.site)
    if output is None:
        print(text, end="")
    else:
        write_atomic(output, text)
        print(output)
