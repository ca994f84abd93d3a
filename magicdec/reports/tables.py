"""Tables of a report, as data: named columns with a kind, and rows of plain values, formatted at the edge."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from magicdec.comparison import TERMS, Comparison
from magicdec.files import rows_to_csv
from magicdec.naming import describe, draft_name
from magicdec.records import BASELINE_MBU_FLOOR, SPREAD_FIELDS, Record
from magicdec.reports.data import (
    WEAK_BASELINE,
    WEAK_BASELINE_NOTE,
    ReportData,
    candidate_record,
    has_weak_baseline,
    median_pair,
)
from magicdec.reports.style import GAMMA, thousands
from magicdec.units import format_bytes, format_seconds

Kind = Literal["text", "integer", "number", "seconds", "bytes", "percent", "signed_percent", "ratio", "rate", "mbu"]
Value = str | float | int | None


@dataclass(frozen=True, kw_only=True)
class Column:
    name: str
    title: str
    kind: Kind = "text"

    @property
    def is_number(self) -> bool:
        return self.kind != "text"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows are in the order of the columns; None is "not known"."""

    name: str
    title: str
    note: str = ""
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]

    def without_empty(self, *names: str) -> Table:
        """The table less those of the named columns that hold nothing."""
        empty = {c.name for i, c in enumerate(self.columns) if all(row[i] is None for row in self.rows)}
        return self.without(*empty.intersection(names))

    def without(self, *names: str) -> Table:
        """The table less the named columns."""
        kept = [i for i, column in enumerate(self.columns) if column.name not in names]
        return replace(
            self,
            columns=tuple(self.columns[i] for i in kept),
            rows=tuple(tuple(row[i] for i in kept) for row in self.rows),
        )

    def to_markdown(self) -> str:
        head = [c.title for c in self.columns]
        ruler = ["---:" if c.is_number else "---" for c in self.columns]
        body = [[format_value(c, v) for c, v in zip(self.columns, row, strict=True)] for row in self.rows]
        return "".join(
            f"| {' | '.join(x.replace('|', chr(92) + '|') for x in line)} |\n" for line in [head, ruler, *body]
        )

    def to_csv(self) -> str:
        """Plain values in base units under the columns' names."""
        names = [c.name for c in self.columns]
        return rows_to_csv((dict(zip(names, row, strict=True)) for row in self.rows), names)

    def to_json(self) -> str:
        names = [c.name for c in self.columns]
        rows = [dict(zip(names, row, strict=True)) for row in self.rows]
        return json.dumps({"name": self.name, "title": self.title, "note": self.note, "rows": rows}, indent=1) + "\n"


def format_value(column: Column, value: Value) -> str:
    """A cell as text; an em dash for what is not known."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, str):
        return value
    formats: dict[Kind, Callable[[float], str]] = {
        "text": str,
        "integer": lambda v: thousands(round(v)),
        "number": lambda v: f"{v:.2f}",
        "seconds": format_seconds,
        "bytes": format_bytes,
        "percent": lambda v: f"{100 * v:.1f}\u202f%",
        "signed_percent": lambda v: f"{100 * v:+.1f}\u202f%".replace("-", "\u2212"),
        "ratio": lambda v: f"{v:.2f}×",
        "mbu": lambda v: f"{100 * v:.0f}\u202f%" + (f" {WEAK_BASELINE}" if v < BASELINE_MBU_FLOOR else ""),
        "rate": lambda v: f"{v:,.0f}".replace(",", "\u202f") if v >= 100 else f"{v:.3g}",
    }
    return formats[column.kind](value)


# Error of the predictions --------------------------------------------------------------------------------------------


def label_of(record: Record) -> str:
    return f"batch {record.batch_size}, context {record.context_len}, {describe(record, symbol=GAMMA)}"


def error_table(comparison: Comparison) -> Table | None:
    """The error statistics of each term; those normalised to the machine's speed where the records allow it."""
    summaries = comparison.summaries
    if not summaries:
        return None
    columns = (
        Column(name="term", title="Term"),
        Column(name="points", title="Points", kind="integer"),
        Column(name="median_error", title="Median error", kind="percent"),
        Column(name="p90_error", title="90th percentile", kind="percent"),
        Column(name="max_error", title="Largest", kind="percent"),
        Column(name="bias", title="Bias", kind="signed_percent"),
        Column(name="normalised_median_error", title="Median, normalised", kind="percent"),
        Column(name="normalised_p90_error", title="90th, normalised", kind="percent"),
        Column(name="noise_floor", title="Noise floor", kind="percent"),
    )
    rows = tuple(
        (TERMS[term], *(getattr(summary, column.name) for column in columns[1:])) for term, summary in summaries.items()
    )
    inside, total = comparison.covered
    note = "Error is predicted / measured − 1; the bias is the median of the signed errors."
    if any(summary.normalised_median_error is not None for summary in summaries.values()):
        note += " Normalised: with every prediction rescaled to the machine's speed during the measurement."
    if total:
        note += f" {inside} of {total} measured speedups lie inside their predicted 90 % interval."
    table = Table(name="errors", title="Error of the predictions, term by term", note=note, columns=columns, rows=rows)
    return table.without_empty(*(column.name for column in columns[-3:]))


def case_table(comparison: Comparison) -> Table:
    """The errors of the speedups, and what following the plan loses, by batch, context and temperature."""
    columns = (
        Column(name="batch_size", title="Batch", kind="integer"),
        Column(name="context_len", title="Context", kind="integer"),
        Column(name="temperature", title="Temperature", kind="number"),
        Column(name="points", title="Points", kind="integer"),
        Column(name="median_error", title="Median error", kind="percent"),
        Column(name="p90_error", title="90th percentile", kind="percent"),
        Column(name="other_median_error", title="Median elsewhere", kind="percent"),
        Column(name="other_p90_error", title="90th elsewhere", kind="percent"),
        Column(name="regret", title="Regret", kind="percent"),
    )
    rows = tuple(tuple(getattr(case, column.name) for column in columns) for case in comparison.cases)
    return Table(name="cases", title="Speedups by case", columns=columns, rows=rows)


def point_table(comparison: Comparison) -> Table:
    """Predicted and measured speedup of every point."""
    columns = (
        Column(name="batch_size", title="Batch", kind="integer"),
        Column(name="context_len", title="Context", kind="integer"),
        Column(name="configuration", title="Configuration"),
        Column(name="predicted", title="Predicted", kind="ratio"),
        Column(name="low", title="Low", kind="ratio"),
        Column(name="high", title="High", kind="ratio"),
        Column(name="measured", title="Measured", kind="ratio"),
        Column(name="error", title="Error", kind="signed_percent"),
    )
    rows = tuple(
        (
            pair.measured.batch_size, pair.measured.context_len, describe(pair.measured, symbol=GAMMA),
            pair.predicted.speedup, pair.predicted.speedup_low, pair.predicted.speedup_high, pair.measured.speedup,
            pair.error("speedup"),
        )
        for pair in comparison.pairs
    )  # fmt: skip
    return Table(name="points", title="Predicted and measured speedups", columns=columns, rows=rows)


# Results -------------------------------------------------------------------------------------------------------------


def result_table(data: ReportData) -> Table | None:
    """One row per configuration, with its measurement and prediction."""
    pairs = {pair.measured.key: pair for pair in data.comparison.pairs}
    rows: list[tuple[Value, ...]] = []
    for record in sorted(data.measured, key=_order):
        pair = pairs.get(record.key)
        speculative = record.is_speculative
        rate, baseline = median_pair(record)
        rows.append(
            (
                record.batch_size, record.context_len, _method(record), record.draft_budget, record.gamma,
                record.step_s, record.expected_tokens_per_step if speculative else None,
                rate, baseline if speculative else None, record.autoregressive_mbu if speculative else None,
                record.speedup if speculative else None, _interval(record), pair.predicted.speedup if pair else None,
                pair.error("speedup") if pair else None, record.speedup_static_batch,
                record.refilled_tokens_per_s, record.speedup_refilled,
            )
        )  # fmt: skip
    if not rows:
        return None
    columns = (
        Column(name="batch_size", title="Batch", kind="integer"),
        Column(name="context_len", title="Context", kind="integer"),
        Column(name="draft", title="Draft"),
        Column(name="draft_budget", title="Budget", kind="integer"),
        Column(name="gamma", title="γ", kind="integer"),
        Column(name="step_s", title="Step", kind="seconds"),
        Column(name="tokens_per_step", title="Tokens per step", kind="number"),
        Column(name="tokens_per_s", title="Tokens/s", kind="rate"),
        Column(name="baseline_tokens_per_s", title="Its baseline", kind="rate"),
        Column(name="baseline_mbu", title="Baseline MBU", kind="mbu"),
        Column(name="speedup", title="Speedup", kind="ratio"),
        Column(name="spread", title="Lowest–highest"),
        Column(name="predicted_speedup", title="Predicted", kind="ratio"),
        Column(name="error", title="Error", kind="signed_percent"),
        Column(name="speedup_static_batch", title="Static batch", kind="ratio"),
        Column(name="refilled_tokens_per_s", title="Refilled tokens/s", kind="rate"),
        Column(name="speedup_refilled", title="Refilled", kind="ratio"),
    )
    note = (
        "Steady state. Each repetition is paired with an autoregressive run beside it: the speedup is the median of "
        "the pairs, tokens/s and baseline are of that pair, and the spread is the lowest and highest pair."
    )
    if any(has_weak_baseline(record) for record in data.measured):
        note += f" {WEAK_BASELINE_NOTE}"
    if any(record.adaptive for record in data.measured):
        note += " “γ up to”: chosen anew each step."
    table = Table(name="results", title="Measured configurations", note=note, columns=columns, rows=tuple(rows))
    return table.without_empty(*(column.name for column in columns[-4:]))


def candidate_table(data: ReportData) -> Table | None:
    """The plan's candidates, fastest first."""
    if data.plan is None or not data.plan.candidates:
        return None
    rows: list[tuple[Value, ...]] = []
    for row in sorted(data.plan.candidates, key=lambda each: -each.speedup):
        record = candidate_record(data.plan, row)
        spread = (getattr(row, name) for name in SPREAD_FIELDS)
        rows.append(
            (
                row.batch_size, row.context_len, _method(record), row.draft_budget, row.gamma, row.tp_size,
                *(size if size > 1 else None for size in spread), row.step_s,
                row.expected_tokens_per_step, row.tokens_per_s, row.speedup, _interval(record), row.verdict,
                row.request_ttft_s, row.request_s, row.request_speedup, row.cost_per_million_tokens_usd,
                row.bound_by, "yes" if row.fits else "no",
                "extrapolated" if row.acceptance_extrapolated else "in range",
            )
        )  # fmt: skip
    columns = (
        Column(name="batch_size", title="Batch", kind="integer"),
        Column(name="context_len", title="Context", kind="integer"),
        Column(name="draft", title="Draft"),
        Column(name="draft_budget", title="Budget", kind="integer"),
        Column(name="gamma", title="γ", kind="integer"),
        Column(name="tp_size", title="TP", kind="integer"),
        Column(name="pp_size", title="PP", kind="integer"),
        Column(name="dp_size", title="DP", kind="integer"),
        Column(name="ep_size", title="EP", kind="integer"),
        Column(name="step_s", title="Step", kind="seconds"),
        Column(name="tokens_per_step", title="Tokens/step", kind="number"),
        Column(name="tokens_per_s", title="Tokens/s", kind="rate"),
        Column(name="speedup", title="Speedup", kind="ratio"),
        Column(name="interval", title="90 % interval"),
        Column(name="verdict", title="Verdict"),
        Column(name="request_ttft_s", title="First token", kind="seconds"),
        Column(name="request_s", title="Whole request", kind="seconds"),
        Column(name="request_speedup", title="Its speedup", kind="ratio"),
        Column(name="cost_per_million_tokens_usd", title="$ per million tokens", kind="number"),
        Column(name="bound_by", title="Bound by"),
        Column(name="fits", title="Fits"),
        Column(name="acceptance_range", title="Acceptance"),
    )
    table = Table(name="candidates", title="What the plan considered", columns=columns, rows=tuple(rows))
    return table.without_empty(
        *SPREAD_FIELDS, "request_ttft_s", "request_s", "request_speedup", "cost_per_million_tokens_usd"
    )


def environment_table(data: ReportData) -> Table | None:
    """Where the records come from, one row per distinct environment."""
    rows: dict[tuple[Value, ...], tuple[Value, ...]] = {}
    counts: dict[tuple[Value, ...], int] = {}
    for record in data.measured:
        env = record.environment
        versions = ", ".join(f"{k} {v}" for k, v in sorted(env.versions.items()))
        key = (record.model, record.device, record.dtype, env.host_cpu, env.python, versions, env.commit)
        counts[key] = counts.get(key, 0) + 1
        rows[key] = (*key, env.created_utc, counts[key])
    if not rows:
        return None
    titles = ("Model", "Device", "Data type", "Processor", "Python", "Versions", "Commit", "Last record (UTC)")
    names = ("model", "device", "dtype", "host_cpu", "python", "versions", "commit", "created_utc")
    columns = (
        *(Column(name=n, title=t) for n, t in zip(names, titles, strict=True)),
        Column(name="records", title="Records", kind="integer"),
    )
    return Table(name="environment", title="Where it was measured", columns=columns, rows=tuple(rows.values()))


def gamma_table(data: ReportData) -> Table | None:
    """The plan's best gamma by batch and context; 0 where speculation does not pay."""
    if data.plan is None:
        return None
    grid = data.plan.gamma_table
    columns = (
        Column(name="batch_size", title="Batch", kind="integer"),
        *(Column(name=f"context_{c}", title=thousands(c), kind="integer") for c in grid.context_lens),
        Column(name="break_even_context", title="Faster from context on"),
    )
    rows = []
    for batch, gammas, fits, start in zip(
        grid.batch_sizes, grid.gamma_of_steps, grid.fits, grid.break_even_context, strict=True
    ):
        shown = [gamma if fit else None for gamma, fit in zip(gammas, fits, strict=True)]
        rows.append((batch, *shown, faster_from(start, grid.context_lens[0])))
    note = (
        f"Best γ of {grid.draft_name} for each batch size (rows) and context length (columns), as exported; 0 = draft "
        "nothing; empty = does not fit in memory."
    )
    return Table(name="gamma", title="Which γ to use", note=note, columns=columns, rows=tuple(rows))


def faster_from(start: float | None, shortest: int) -> str | None:
    """A context of break-even; at the edge of what was looked at it is an upper bound."""
    if start is None:
        return None
    return f"≤ {thousands(shortest)}" if start <= shortest else thousands(round(start))


def _report_errors(data: ReportData) -> Table | None:
    return error_table(data.comparison)


def all_tables(data: ReportData) -> list[Table]:
    """The tables that the data has rows for."""
    made = [make(data) for make in (_report_errors, result_table, gamma_table, candidate_table, environment_table)]
    return [table for table in made if table is not None]


TABLE_NAMES = ("errors", "results", "gamma", "candidates", "environment")


def _method(record: Record) -> str:
    name = draft_name(record.draft, record.draft_method) if record.is_speculative else "none"
    return f"{name}, γ up to" if record.adaptive else name


def _interval(record: Record) -> str | None:
    if record.speedup_low is None or record.speedup_high is None or not record.is_speculative:
        return None
    return f"{record.speedup_low:.2f}–{record.speedup_high:.2f}"


def _order(record: Record) -> tuple[object, ...]:
    return (
        record.model,
        record.batch_size,
        record.context_len,
        record.draft_method,
        record.draft_budget or 0,
        record.gamma,
    )
