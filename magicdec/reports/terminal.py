"""Results on a terminal (80 columns, plain when piped)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any

from magicdec.counts import Z_90
from magicdec.naming import describe
from magicdec.reports.columns import fitted
from magicdec.reports.data import WEAK_BASELINE, WEAK_BASELINE_NOTE, has_weak_baseline
from magicdec.reports.tables import case_table, error_table, point_table
from magicdec.reports.text import GAMMA, text_table
from magicdec.schema.comparison import Comparison
from magicdec.schema.record import Record, busy_machine
from magicdec.units import INTERVAL, format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

GROUP_CONSTANTS = {
    "acceptance_rate",
    "acceptance",
    "concentration",
    "drift",
    "drift_depth",
}
"""Fitted constants, which are in JSON and CSV and left out of the text."""
GROUP_LABELS = {"name", "source", "model", "hardware", "draft", "formats", "compared"}
"""Parts of a group's name."""
RUN_HEADS = (
    "configuration",
    "tok/s",
    "step",
    "draft",
    "verify",
    "accept",
    "tok/step",
    "speedup",
    "base MBU",
)


def print_run(results: Sequence[Record], console: Console) -> None:
    """Prints the results of `magicdec run`: one row per configuration, then the acceptance."""
    from rich.text import Text

    if not results:
        return
    first = results[0]
    swings = [record.reference_swing or 0.0 for record in results]
    for line in busy_machine(max(swings)):
        console.print(line)
    device = first.device or "cpu"
    load = f"batch {first.batch_size}, context {first.context_len}"
    console.print(
        Text.assemble(
            (str(first.model), "bold"),
            f" on {device} ({first.dtype}), {load}, temperature {first.temperature:g}",
        )
    )
    rows = [_run_row(record) for record in results]
    console.print(text_table(RUN_HEADS, rows))
    for line in _run_summary(first):
        console.print(line)
    for record in results:
        for line in _run_details(record):
            console.print(line)
    if any(map(has_weak_baseline, results)):
        console.print(WEAK_BASELINE_NOTE)


def _run_row(record: Record) -> list[str]:
    tokens_per_s = ""
    if record.tokens_per_s is not None:
        tokens_per_s = f"{record.tokens_per_s:.0f}"
    speedup = ""
    if record.speedup is not None:
        speedup = f"{record.speedup:.2f}x"
    mbu = ""
    if record.autoregressive_mbu is not None:
        mbu = f"{record.autoregressive_mbu:.0%}"
    if mbu and has_weak_baseline(record):
        mbu += WEAK_BASELINE
    phases = ["", "", "", ""]
    if record.is_speculative:
        draft_s = None
        if record.draft_step_s is not None:
            draft_s = record.draft_step_s * record.gamma
        tokens = ""
        if record.expected_tokens_per_step is not None:
            tokens = f"{record.expected_tokens_per_step:.2f}"
        phases = [
            _seconds_or_blank(draft_s),
            _seconds_or_blank(record.verify_step_s),
            _seconds_or_blank(record.accept_step_s),
            tokens,
        ]
    return [
        describe(record, symbol=GAMMA),
        tokens_per_s,
        _seconds_or_blank(record.step_s),
        *phases,
        speedup,
        mbu,
    ]


def _seconds_or_blank(value: float | None) -> str:
    if value is None:
        return ""
    return format_seconds(value)


def _run_summary(record: Record) -> Iterable[str]:
    """Lines that all configurations share: the memory, and the time to the first token."""
    if record.memory_bytes_per_s is not None:
        rate = format_rate(record.memory_bytes_per_s, "B")
        yield (
            "base MBU: rate at which the autoregressive baseline reads weights and KV, as a share "
            f"of the measured {rate}"
        )
    if record.peak_memory_bytes is not None and record.memory_bytes_per_gpu is not None:
        peak = format_bytes(record.peak_memory_bytes)
        planned = format_bytes(record.memory_bytes_per_gpu)
        yield f"memory: at most {peak} taken, {planned} planned"
    if record.ttft_s is not None and record.prefill_s is not None:
        prefill = format_seconds(record.prefill_s)
        yield f"prefill of the batch {prefill}, first token {format_seconds(record.ttft_s)}"


def _run_details(record: Record) -> Iterable[str]:
    """Lines about one record: rates, acceptance, repetitions, divergences."""
    name = describe(record, symbol=GAMMA)
    if record.achieved_bytes_per_s:
        yield f"{name}: {_read_rates(record, record.achieved_bytes_per_s)}"
    if record.static_batch_tokens_per_s is not None:
        speedup = ""
        if record.speedup_static_batch is not None:
            speedup = f", speedup {record.speedup_static_batch:.2f}"
        yield (
            f"{name}: {record.static_batch_tokens_per_s:.0f} tok/s as a static batch, until its "
            f"last sequence ends{speedup}"
        )
    if record.is_speculative:
        for text in _acceptance_details(record):
            yield f"{name}: {text}"
        for text in _speedup_details(record):
            yield f"{name}: {text}"


def _read_rates(record: Record, bytes_per_s: Mapping[str, float]) -> str:
    """Rates at which weights and KV are read, of a draft's phases or of autoregressive decoding."""
    shown = ""
    phases = []
    for phase, rate in bytes_per_s.items():
        text = format_rate(rate, "B")
        if phase == "autoregressive":
            shown = text
        else:
            phases.append(f"{phase} {text}")
    if record.is_speculative and phases:
        shown = ", ".join(phases)
    per_token = ""
    if record.tpot_s is not None:
        per_token = f"; {format_seconds(record.tpot_s)} per token of a sequence"
    return f"weights and KV read at {shown}{per_token}"


def _acceptance_details(record: Record) -> Iterable[str]:
    if record.simulated_acceptance:
        rates = " ".join(f"{rate:g}" for rate in record.simulated_acceptance)
        yield f"acceptance is simulated, {rates}"
    if record.acceptance_by_position:
        conditional = record.acceptance_by_position
        reached = accumulate(conditional, mul)
        yield (
            f"accepted by position {_two_decimals(conditional)}, all up to it "
            f"{_two_decimals(reached)}"
        )
    histogram = record.acceptance_histogram or []
    steps = sum(histogram)
    if steps:
        shares = " ".join(f"{count / steps:.0%}" for count in histogram)
        of_drafted = ""
        if not record.adaptive:
            accepted = 0
            for number, count in enumerate(histogram):
                accepted += number * count
            share = accepted / (steps * record.gamma)
            of_drafted = f"{share:.0%} of drafted tokens accepted; "
        yield f"{of_drafted}steps with 0 to {record.gamma} accepted {shares}"


def _two_decimals(rates: Iterable[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)


def _speedup_details(record: Record) -> Iterable[str]:
    has_range = record.speedup is not None and record.speedup_low is not None
    if has_range and (record.repetitions or 0) > 1:
        yield (
            f"speedup {record.speedup:.2f}, lowest {record.speedup_low:.2f}, highest "
            f"{record.speedup_high or record.speedup:.2f} of {record.repetitions} repetitions"
        )
    if record.refilled_tokens_per_s is not None and record.speedup_refilled is not None:
        yield (
            f"{record.refilled_tokens_per_s:.0f} tok/s with slots refilled from the queue, "
            f"prefill included: speedup {record.speedup_refilled:.2f}"
        )
    if record.num_divergences is not None:
        ties = ""
        if record.num_near_ties:
            ties = f", {record.num_near_ties} at near-ties"
        yield f"{record.num_divergences} divergences from autoregressive decoding{ties}"


def print_groups(groups: Sequence[Mapping[str, Any]], console: Console) -> None:
    """One block per group: its name, then its other values, shares in per cent; for rows too wide
    to be a table.
    """
    for group in groups:
        console.print(str(group.get("name", "")), style="bold", soft_wrap=True)
        values = []
        for name, value in group.items():
            if name in GROUP_LABELS or name in GROUP_CONSTANTS:
                continue
            if value is None or isinstance(value, list | dict | tuple):
                continue
            text = str(value)
            if isinstance(value, float):
                text = f"{value:.1%}"
            words = name.replace("_", " ")
            values.append(f"{words} {text}")
        line = ", ".join(values)
        console.print(f"  {line}", soft_wrap=False)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Predicted and measured speedups point by point, the error statistics of every term, and those
    of each case.
    """
    if not comparison.pairs:
        console.print("no configuration has both a prediction and a measurement")
        return
    tables = (
        point_table(comparison),
        error_table(comparison),
        case_table(comparison),
    )
    for table in filter(None, tables):
        if table is not tables[0]:
            console.print()
        in_lines = [
            replace(column, title=column.title.lower()) for column in table.columns
        ]
        console.print(fitted(replace(table, columns=tuple(in_lines)), console.width))
    console.print()
    for line in _quality(comparison):
        console.print(line, soft_wrap=True)
    rates = comparison.memory_bytes_per_s
    if rates is not None:
        low = format_rate(rates[0], "B")
        high = format_rate(rates[1], "B")
        console.print(f"memory bandwidth {low} to {high} during the runs")
    for case in comparison.cases:
        if case.regret is not None:
            console.print(
                f"  batch {case.batch_size}, context {case.context_len}: planned {case.planned}; "
                "measured best "
                f"{case.best}; {case.regret:.1%} lost",
                soft_wrap=True,
            )


def _quality(comparison: Comparison) -> Iterable[str]:
    """Lines on coverage, on what following the plan loses, and on the noise."""
    inside, total = comparison.covered
    if total:
        share = inside / total
        yield f"{inside} of {total} measured speedups ({share:.1%}) lie in their {INTERVAL}"
    if comparison.regret is not None:
        yield _lost(comparison.regret, comparison.regret_error)
    if comparison.noise is not None:
        yield (
            f"{comparison.noise:.1%} of the speedup is the spread of its repetitions (median of "
            "points)"
        )
    if comparison.prompt_noise is not None:
        yield (
            f"{comparison.prompt_noise:.1%} is the standard error of tokens per step, from the "
            "choice of prompts"
        )


def _lost(regret: float, error: float | None) -> str:
    """Says what following the prediction loses; nothing, where the repetitions cannot tell."""
    if regret <= Z_90 * (error or 0.0):
        return (
            "following the prediction loses nothing that these repetitions can tell from the "
            "measured best"
        )
    within = ""
    if error is not None:
        within = f" ± {error:.1%}"
    return (
        f"{regret:.1%}{within} is lost by following the prediction instead of the measured best "
        "(regret, mean of cases)"
    )


def print_verdict(failures: Sequence[str], console: Console) -> None:
    from rich.text import Text

    for failure in failures:
        missed = Text.assemble(("threshold missed:", "bold"), f" {failure}")
        console.print(missed, soft_wrap=True)
    console.print("failed" if failures else "passed", style="bold")
