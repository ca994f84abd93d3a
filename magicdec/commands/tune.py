"""`magicdec tune`: predicts the best gamma of a running server, tries those that matter, and reports the regret."""

from __future__ import annotations

from typing import Annotated

import typer

from magicdec.commands import completion
from magicdec.progress import shown_progress
from magicdec.units import format_seconds

EPILOG = """\b
Examples:
  magicdec tune http://localhost:8000 --model llama-3.1-8b --hardware h100-sxm-80gb --restart "./serve.sh {gamma}"
"""


def tune_command(
    server: Annotated[str, typer.Argument(help="The server's address.")],
    restart: Annotated[str, typer.Option(help="Command that restarts it, with {gamma} in it; 0 is no draft.")],
    model: Annotated[str, typer.Option(help="The target, as plans call it.", autocompletion=completion.models)],
    hardware: Annotated[str, typer.Option(help="The server's device.", autocompletion=completion.hardware)],
    draft: Annotated[
        str | None, typer.Option(help="What it drafts with: ngram, eagle, or a model; else as it says, or ngram.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="Engine profile.", autocompletion=completion.engines)] = None,
    tp: Annotated[int, typer.Option(min=1, help="The server's tensor-parallel size.")] = 1,
    temperature: Annotated[float, typer.Option(help="Of its requests; 0 is greedy.")] = 1.0,
    target: Annotated[str | None, typer.Option(help="MODEL or MODEL/ENGINE, where an address has several.")] = None,
    seconds: Annotated[float, typer.Option(help="How long to look at each gamma.")] = 60.0,
    interval: Annotated[float, typer.Option(help="Seconds between scrapes.")] = 5.0,
    yes: Annotated[bool, typer.Option("--yes", help="Restart without asking.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")] = False,
) -> None:
    """Try the gammas that matter on a server, and compare.

    Observes it, predicts, restarts it with two or three gammas, and prints what each took.
    """
    from magicdec.live.advice import advise
    from magicdec.live.http import parse_address
    from magicdec.live.metrics import choose_target
    from magicdec.live.observation import observe
    from magicdec.live.scraping import scrapes
    from magicdec.live.served_draft import agreed, parse_draft
    from magicdec.live.show import advice_lines
    from magicdec.live.situation import Serving, situation_of
    from magicdec.live.tune import candidates, check_command, regret, try_gamma

    check_command(restart)
    address, given = parse_address(server), None if draft is None else parse_draft(draft)
    taken = list(scrapes(address, seconds=seconds, interval_s=interval))
    seen = observe(taken, choose_target(taken[-1], target))
    kind = agreed(given, seen.announced)
    serving = Serving(model=model, hardware=hardware, engine=engine, tp_size=tp, temperature=temperature)
    advice = advise(situation_of(seen, kind, serving))
    print("\n".join(advice_lines(advice, seen.counts.tpot_s)))
    chosen = candidates(advice)
    print(f"to try, each with a restart and {format_seconds(seconds)}: gamma {', '.join(map(str, chosen))}", flush=True)
    if not yes:
        typer.confirm("restart the server?", abort=True)
    trials = []
    for gamma in chosen:
        with shown_progress(quiet) as show:
            show(f"gamma {gamma}: restarting and looking")
            trial = try_gamma(
                address, restart, gamma, predicted_tpot_s=advice.choices[gamma].tpot_s, seconds=seconds,
                interval_s=interval, target=target,
            )  # fmt: skip
        trials.append(trial)
        print(
            f"gamma {trial.gamma}: {format_seconds(trial.tpot_s)} per token measured, "
            f"{format_seconds(trial.predicted_tpot_s)} predicted; {trial.tokens_per_step:.2f} tokens per step, "
            f"batch {trial.batch_size:.1f}",
            flush=True,
        )
    best = min(trials, key=lambda trial: trial.tpot_s)
    print(f"best of these: gamma {best.gamma}; the advised gamma {chosen[0]} loses {regret(trials):.1%} against it")
    print(
        f"the server runs with gamma {chosen[-1]} now"
        + (f"; restart it with {best.gamma}" if best != trials[-1] else "")
    )
