"""`magicdec demo`: the whole path on this machine, ending with a report."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from magicdec.commands import options
from magicdec.commands.options import option
from magicdec.progress import Done, kept, shown_progress
from magicdec.units import format_seconds

if TYPE_CHECKING:
    from magicdec.validate.demo import DemoResult

EPILOG = options.examples("demo", "demo --quick -o elsewhere")

WHOLE, QUICK = "about 5 minutes on two idle cores", "about 90 s on two idle cores"


def demo_command(
    output: Annotated[
        Path,
        option("Directory for profile, plan, records and report.", "--output", "-o"),
    ] = Path("demo-output"),
    quick: Annotated[
        bool,
        option(
            "Fewer shapes, prompts and configurations: about 90 seconds.", "--quick"
        ),
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Calibrate, plan, run, compare, report: a few minutes.

    The whole path on this machine, with the embedded model.
    """
    from magicdec.measure.environment import bind_threads

    bind_threads()
    from magicdec.files import check_writable, write_atomic
    from magicdec.reports.data import ReportData
    from magicdec.reports.report import write_report
    from magicdec.validate.demo import run_demo

    started = time.monotonic()
    check_writable(output / "report.html")
    # there while a demo of this kind is unfinished; any other is of this machine, now
    unfinished = output / "unfinished"
    kind = f"quick: {quick}"
    goes_on = unfinished.exists() and unfinished.read_text() == kind
    if not goes_on:
        for name in ("records.jsonl", "local.toml", "local.unfinished.jsonl"):
            (output / name).unlink(missing_ok=True)
        write_atomic(unfinished, kind)
    kept_line = f"{output} keeps what was measured; the same command goes on with it"
    with shown_progress(quiet) as show, kept(lambda: kept_line):
        loads = "three"
        duration = WHOLE
        if quick:
            loads = "two"
            duration = QUICK
        steps = f"calibrate, plan, decode at {loads} loads, check greedy output, report"
        if goes_on:
            show(Done(f"going on with what {output} holds"))
        show(Done(f"{steps}: {duration}"))
        result = run_demo(output, progress=show, quick=quick)
        show("writing the report")
        write_atomic(output / "plan.json", result.plan.to_json())
        data = ReportData.from_records(
            [*result.predicted, *result.measured],
            plan=result.plan,
            title="magicdec demo",
        )
        write_report(data, output / "report.html")
        has_pdf = find_spec("typst") is not None
        if has_pdf:
            write_report(data, output / "report.pdf")
    unfinished.unlink()
    _print_summary(result, output, time.monotonic() - started, has_pdf=has_pdf)


def _print_chosen(result: DemoResult) -> None:
    """The planned configuration, its predicted and its measured speedup."""
    chosen = result.chosen
    best = result.plan.best
    print(
        f"batch {chosen.batch_size}, context {chosen.context_len}, temperature "
        f"{chosen.temperature:g}: planned {chosen.draft_method} {chosen.draft_budget}, gamma "
        f"{chosen.gamma}"
    )
    interval = f"{best.speedup_low:.2f} to {best.speedup_high:.2f}"
    samples = ", ".join(f"{sample:.2f}" for sample in chosen.speedup_samples or [])
    print(
        f"speedup: predicted {best.speedup:.2f}x ({interval}), measured {chosen.speedup:.2f}x "
        f"(repetitions {samples})"
    )
    pair = next(
        pair for pair in result.comparison.pairs if pair.measured.key == chosen.key
    )
    rescaled = pair.normalised("speedup")
    if rescaled is not None:
        print(
            "rescaled to the speed of memory and processor during the runs: predicted "
            f"{rescaled:.2f}x"
        )


def _print_summary(
    result: DemoResult, output: Path, elapsed_s: float, *, has_pdf: bool
) -> None:
    small = next(
        row for row in result.measured if row.batch_size == 1 and row.gamma > 0
    )
    verdict = "pays"
    if result.small_plan.best.gamma == 0:
        verdict = "does not pay"
    print(
        f"batch 1, context {small.context_len}: the plan says speculation {verdict}; "
        f"gamma {small.gamma} measured {small.speedup:.2f}x"
    )
    for check in result.greedy:
        print(f"greedy output against autoregressive, {check}")
    if result.plan.best.gamma == 0:
        print(
            "batch 32, context 4096: the plan says speculation does not pay on this machine"
        )
    else:
        _print_chosen(result)
    if has_pdf:
        pdf = f" and {output / 'report.pdf'}"
    else:
        pdf = "; as a PDF too with pip install 'magicdec[pdf]'"
    print(f"report: {output / 'report.html'}{pdf} ({format_seconds(elapsed_s)})")
