"""`magicdec calibrate --results`: an engine profile from what was measured before, by a load
generator or by the cost check of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from magicdec.commands import options
from magicdec.commands.calibrate_server import (
    print_fit,
    profile_of_server,
    serving_of,
    write_fit,
)
from magicdec.units import format_seconds

if TYPE_CHECKING:
    from magicdec.commands.calibrate import CalibrateOptions

SEVERAL_TOKENS = 1.05


def calibrate_results(asked: CalibrateOptions, paths: Sequence[Path]) -> None:
    """Fits an engine profile to the result files of a load generator."""
    from magicdec.files import check_writable
    from magicdec.live.benchmark_results import points_of, read_runs, tokens_per_event
    from magicdec.live.calibration import NOISE_LIMIT, fit_server, noise

    serving = serving_of(asked)
    output = profile_of_server(asked)
    check_writable(output)
    runs = list(chain.from_iterable(map(read_runs, paths)))
    points = points_of(runs)
    num_requests = sum(map(len, runs))
    fit = fit_server(
        points,
        setup=serving.setup(None),
        tp_size=serving.tp_size,
        gamma=0,
        name=output.stem,
    )
    print(
        f"{num_requests} requests in {len(runs)} runs, {len(points)} loads by batch and prompt "
        "length"
    )
    per_event = tokens_per_event(runs)
    if per_event > SEVERAL_TOKENS:
        print(
            f"{per_event:.2f} tokens came with each event: were these runs without a draft? The "
            "fit assumes that"
        )
    print_fit(fit, points, between="requests")
    if (noise(points) or 0.0) > NOISE_LIMIT:
        print(
            "the requests differ much: the server or its machine did other work; measure again "
            "when it is quieter"
        )
    origin = {
        "read": {"files": [path.name for path in paths], "requests": num_requests}
    }
    write_fit(fit, points, origin, serving, output)


def calibrate_cost(
    paths: Sequence[Path], plan: Path, engine: str | None, output: Path
) -> None:
    """Fits the plan's engine to the results of its cost check."""
    from magicdec.files import check_writable
    from magicdec.live.cost_check import fit_cost, read_cost_run
    from magicdec.perfmodel.variations import for_engine, priced
    from magicdec.schema.plan import load_plan
    from magicdec.specs.engine import save_engine

    check_writable(output)
    runs = [read_cost_run(path) for path in paths]
    planned = load_plan(plan)
    if engine is not None and engine != planned.engine:
        planned = for_engine(planned, engine).plan
    choice = priced(planned, planned.engine)
    fit = fit_cost(
        choice.setup,
        runs,
        tp_size=choice.points.tp,
        budget=choice.points.budget,
        name=output.stem,
    )
    for run, before, after in zip(runs, fit.before, fit.after, strict=True):
        drafted = "without a draft"
        if run.gamma:
            drafted = f"gamma {run.gamma}, {run.tokens:g} tokens per step"
        print(
            f"{drafted}: {format_seconds(run.tpot_s)} between tokens; predicted {before:+.0%}, now "
            f"{after:+.0%}"
        )
    save_engine(fit.profile, output)
    print(f"wrote {output}")
    row = planned.best
    command = options.command(
        "plan",
        model=planned.model,
        hardware=row.hardware,
        engine=output,
        draft=row.draft,
        batch=row.batch_size,
        context=row.context_len,
        tp=row.tp_size,
    )
    print(f"next: {command}")
