"""Results on a terminal (80 columns, plain when piped), and rows as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any

import msgspec

from magicdec.records import Record
from magicdec.reports.data import WEAK_BASELINE, WEAK_BASELINE_NOTE, describe, has_weak_baseline, is_speculative
from magicdec.reports.style import GAMMA
from magicdec.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

FRACTION_WORDS = ("mape", "error", "coverage", "regret", "gamma_exact", "gamma_within", "noise", "bias")
"""Numbers whose name holds one of these words are fractions, shown in per cent."""

COMPARISON_COLUMNS = {
    "draft": "draft_method", "budget": "draft_budget", "gamma": "gamma", "batch": "batch_size",
    "context": "context_len", "predicted": "predicted_speedup", "low": "speedup_low",
    "high": "speedup_high", "measured": "measured_speedup", "error": "error_speedup",
}  # fmt: skip
"""Heading and name of what `print_comparison` shows of each point."""


def records_to_csv(records: Iterable[Record]) -> str:
    """Every field of every record, in base units; lists and mappings as JSON, the environment's fields beside them."""
    rows = []
    for record in records:
        row: dict[str, Any] = msgspec.structs.asdict(record)
        row |= msgspec.structs.asdict(row.pop("environment"))
        rows.append(row)
    names = [f.name for f in msgspec.structs.fields(Record) if f.name != "environment"]
    names += [
        f.name
        for f in msgspec.structs.fields(Record(source="measured", model="", batch_size=1, context_len=1).environment)
    ]
    return _to_csv(names, rows)


def rows_to_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Plain rows as CSV under the union of their keys, in the order they first appear."""
    rows = list(rows)
    return _to_csv(list(dict.fromkeys(key for row in rows for key in row)), rows)


def _to_csv(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_flat(row.get(name)) for name in names] for row in rows)
    return out.getvalue()


def _flat(value: object) -> object:
    if isinstance(value, list | dict | tuple):
        return msgspec.json.encode(value).decode() if value else ""
    return "" if value is None else value


def print_run(results: Sequence[Record], console: Console) -> None:
    """What `magicdec run` measured: one row per configuration, then what was accepted."""
    if not results:
        return
    first = results[0]
    console.print(
        f"[bold]{first.model}[/bold] on {first.device or 'cpu'} ({first.dtype}), batch {first.batch_size}, "
        f"context {first.context_len}, temperature {first.temperature:g}"
    )
    names = ("tok/s", "step", "draft", "verify", "accept", "tok/step", "speedup", "base MBU")
    _print_table(console, ("configuration", *names), [_run_row(record) for record in results])
    for line in (*_run_summary(first), *(line for record in results for line in _run_details(record))):
        console.print(line)
    if any(map(has_weak_baseline, results)):
        console.print(WEAK_BASELINE_NOTE)


def _run_row(record: Record) -> list[str]:
    def seconds(value: float | None) -> str:
        return "" if value is None else format_seconds(value)

    speculative = is_speculative(record)
    draft = record.draft_step_s * record.gamma if speculative and record.draft_step_s is not None else None
    tokens, mbu = record.expected_tokens_per_step, record.autoregressive_mbu
    return [
        describe(record, symbol=GAMMA),
        f"{record.tokens_per_s:.0f}" if record.tokens_per_s is not None else "",
        seconds(record.step_s),
        seconds(draft),
        seconds(record.verify_step_s) if speculative else "",
        seconds(record.accept_step_s) if speculative else "",
        f"{tokens:.2f}" if speculative and tokens is not None else "",
        f"{record.speedup:.2f}x" if record.speedup is not None else "",
        f"{mbu:.0%}{WEAK_BASELINE * has_weak_baseline(record)}" if mbu is not None else "",
    ]


def _run_summary(record: Record) -> Iterable[str]:
    """Of what all configurations share: the memory, and the first token."""
    if record.memory_bytes_per_s is not None:
        yield (
            "base MBU: rate at which the autoregressive baseline reads weights and KV, as a share of the measured "
            f"{format_rate(record.memory_bytes_per_s, 'B')}"
        )
    if record.peak_memory_bytes is not None and record.memory_bytes_per_gpu is not None:
        planned = format_bytes(record.memory_bytes_per_gpu)
        yield f"memory: at most {format_bytes(record.peak_memory_bytes)} taken, {planned} planned"
    if record.ttft_s is not None and record.prefill_s is not None:
        yield f"prefill of the batch {format_seconds(record.prefill_s)}, first token {format_seconds(record.ttft_s)}"


def _run_details(record: Record) -> Iterable[str]:
    name = describe(record, symbol=GAMMA)
    if record.achieved_bytes_per_s:
        rates = {name: format_rate(rate, "B") for name, rate in record.achieved_bytes_per_s.items()}
        baseline = rates.pop("autoregressive", "")
        shown = ", ".join(f"{phase} {rate}" for phase, rate in rates.items()) if is_speculative(record) else baseline
        per_token = f"; {format_seconds(record.tpot_s)} per token of a sequence" if record.tpot_s is not None else ""
        yield f"{name}: weights and KV read at {shown or baseline}{per_token}"
    if record.static_batch_tokens_per_s is not None:
        speedup = f", speedup {record.speedup_static_batch:.2f}" if record.speedup_static_batch is not None else ""
        yield (
            f"{name}: {record.static_batch_tokens_per_s:.0f} tok/s as a static batch, until its last sequence ends"
            f"{speedup}"
        )
    if not is_speculative(record):
        return
    if record.simulated_acceptance:
        yield f"{name}: acceptance is simulated, {' '.join(f'{rate:g}' for rate in record.simulated_acceptance)}"
    if record.acceptance_by_position:
        conditional = " ".join(f"{rate:.2f}" for rate in record.acceptance_by_position)
        reached = " ".join(f"{rate:.2f}" for rate in accumulate(record.acceptance_by_position, mul))
        yield f"{name}: accepted by position {conditional}, all up to it {reached}"
    if record.acceptance_histogram and (total := sum(record.acceptance_histogram)):
        shares = " ".join(f"{count / total:.0%}" for count in record.acceptance_histogram)
        accepted = sum(i * count for i, count in enumerate(record.acceptance_histogram))
        rate = f"{accepted / total / record.gamma:.0%} of drafted tokens accepted; " if not record.adaptive else ""
        yield f"{name}: {rate}steps with 0 to {record.gamma} accepted {shares}"
    if record.speedup is not None and record.speedup_low is not None and (record.repetitions or 0) > 1:
        yield (
            f"{name}: speedup {record.speedup:.2f}, lowest {record.speedup_low:.2f}, highest "
            f"{record.speedup_high or record.speedup:.2f} of {record.repetitions} repetitions"
        )
    if record.refilled_tokens_per_s is not None and record.speedup_refilled is not None:
        yield (
            f"{name}: {record.refilled_tokens_per_s:.0f} tok/s with slots refilled from the queue, prefill included: "
            f"speedup {record.speedup_refilled:.2f}"
        )
    if record.num_divergences is not None:
        ties = f", {record.num_near_ties} at near-ties" if record.num_near_ties else ""
        yield f"{name}: {record.num_divergences} divergences from autoregressive decoding{ties}"


def print_rows(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Plain rows as a table; keys are the headings, fractions in per cent."""
    plain = [{k: v for k, v in row.items() if not isinstance(v, list | dict | tuple)} for row in rows]
    names = list(dict.fromkeys(key for row in plain for key in row))
    if names:
        heads = [name.removesuffix("_s").replace("_", " ") for name in names]
        _print_table(console, heads, [[_cell(name, row.get(name)) for name in names] for row in plain])


def print_groups(groups: Sequence[Mapping[str, Any]], console: Console) -> None:
    """One block per group: its name, then each of its other values; for rows too wide to be a table."""
    for group in groups:
        console.print(f"[bold]{group.get('name', '')}[/bold]", soft_wrap=True)
        values = [
            f"{name.replace('_', ' ')} {_cell(name, value)}"
            for name, value in group.items()
            if name != "name" and value is not None and not isinstance(value, list | dict | tuple)
        ]
        console.print("  " + ", ".join(values), soft_wrap=False)


def print_comparison(document: Mapping[str, Any], console: Console) -> None:
    """Predicted against measured: the error of every term, point by point in speedup, and the verdict."""
    rows = document.get("rows") or []
    print_rows([{title: row.get(name) for title, name in COMPARISON_COLUMNS.items()} for row in rows], console)
    summary = [{"term": term, **values} for term, values in (document.get("summary") or {}).items()]
    if summary:
        console.print()
        print_rows(summary, console)
    for name, text in (
        ("coverage", "of the measured speedups lie in their 90 % interval"),
        ("noise", "is the spread of repetitions, as a share of the speedup"),
        ("prompt_noise", "is the standard error of tokens per step, from the choice of prompts"),
        ("regret", "is lost by following the prediction instead of the measured best"),
    ):
        if isinstance(value := document.get(name), int | float):
            console.print(f"{value:.1%} {text}")
    for case in document.get("regrets") or []:
        console.print(
            f"  batch {case['batch_size']}, context {case['context_len']}: planned {case['planned']}; measured best "
            f"{case['best']}; {case['regret']:.1%} lost",
            soft_wrap=True,
        )
    for failure in document.get("failures") or []:
        console.print(f"[bold]not met:[/bold] {failure}", soft_wrap=True)
    if "passed" in document:
        console.print("[bold]passed[/bold]" if document["passed"] else "[bold]failed[/bold]")


def _cell(name: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        formats: list[tuple[Callable[[str], bool], Callable[[float], str]]] = [
            (lambda n: any(word in n for word in FRACTION_WORDS), lambda v: f"{v:.1%}"),
            (lambda n: n.endswith("_s"), format_seconds),
            (lambda n: "speedup" in n or n in COMPARISON_COLUMNS, lambda v: f"{v:.2f}"),
        ]
        for matches, show in formats:
            if matches(name):
                return show(value)
        return f"{value:.3g}"
    return str(value)


def _print_table(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Numbers to the right. Where it does not fit the terminal, the headings wrap and the first column with them."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for i, head in enumerate(heads):
        texts = [row[i] for row in rows]
        words = all(not text or not (text[0].isdigit() or text[0] in "-+") for text in texts) or i == 0
        table.add_column(escape(head), justify="left" if words else "right", no_wrap=False, overflow="fold")
    for row in rows:
        table.add_row(*(escape(text) for text in row))
    console.print(table)
