"""Tables of a report: the errors of predictions, what was measured, and what a plan considered."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from magicdec.naming import describe, draft_name
from magicdec.reports.columns import (
    BATCH,
    BUDGET,
    CONTEXT,
    GAMMA_COLUMN,
    SPEEDUP,
    Column,
    Kind,
    Table,
    Value,
)
from magicdec.reports.data import (
    WEAK_BASELINE_NOTE,
    ReportData,
    candidate_record,
    has_weak_baseline,
    median_pair,
)
from magicdec.reports.text import GAMMA, thousands
from magicdec.schema.comparison import TERMS, Comparison, Pair
from magicdec.schema.record import SPREAD_FIELDS, Record
from magicdec.schema.row import Candidate
from magicdec.schema.row import column as value_of
from magicdec.units import (
    INTERVAL,
)

# Error of the predictions
# --------------------------------------------------------------------------------------------


def label_of(record: Record) -> str:
    at = f"batch {record.batch_size}, context {record.context_len}"
    return f"{at}, {describe(record, symbol=GAMMA)}"


def error_table(comparison: Comparison) -> Table | None:
    """The error statistics of each term; those normalised to the machine's speed where the records
    allow it.
    """
    summaries = comparison.summaries
    if not summaries:
        return None

    def of_summary(name: str, title: str, kind: Kind = "percent") -> Column:
        return Column(
            name,
            title,
            kind,
            lambda item: getattr(item[1], name),
        )

    columns = (
        Column("term", "Term", value=lambda item: TERMS[item[0]]),
        of_summary("points", "Points", "integer"),
        of_summary("median_error", "Median error"),
        of_summary("p90_error", "90th percentile"),
        of_summary("max_error", "Largest"),
        of_summary("bias", "Bias", "signed_percent"),
        of_summary("normalised_median_error", "Median, normalised"),
        of_summary("normalised_p90_error", "90th, normalised"),
        of_summary("noise_floor", "Noise floor"),
    )
    inside, total = comparison.covered
    note = "Error is predicted / measured − 1; the bias is the median of the signed errors."
    if any(
        summary.normalised_median_error is not None for summary in summaries.values()
    ):
        note += (
            " Normalised: with every prediction rescaled to the machine's speed during the "
            "measurement."
        )
    if total:
        note += f" {inside} of {total} measured speedups lie inside their predicted {INTERVAL}."
    table = Table.of(
        "errors",
        "Error of the predictions, term by term",
        columns,
        list(summaries.items()),
        note=note,
    )
    return table.without_empty(
        "normalised_median_error", "normalised_p90_error", "noise_floor"
    )


def case_table(comparison: Comparison) -> Table:
    """The errors of the speedups, and what following the plan loses, by batch, context and
    temperature.
    """
    columns = (
        BATCH,
        CONTEXT,
        Column("temperature", "Temperature", "number"),
        Column("points", "Points", "integer"),
        Column("median_error", "Median error", "percent"),
        Column("p90_error", "90th percentile", "percent"),
        Column("regret", "Regret", "percent"),
    )
    return Table.of("cases", "Speedups by case", columns, comparison.cases)


def point_table(comparison: Comparison) -> Table:
    """Predicted and measured speedup of every point."""
    columns = (
        replace(BATCH, value=lambda pair: pair.measured.batch_size),
        replace(CONTEXT, value=lambda pair: pair.measured.context_len),
        Column(
            "configuration",
            "Configuration",
            value=lambda pair: describe(pair.measured, symbol=GAMMA),
        ),
        Column("predicted", "Predicted", "ratio", lambda pair: pair.predicted.speedup),
        Column("low", "Low", "ratio", lambda pair: pair.predicted.speedup_low),
        Column("high", "High", "ratio", lambda pair: pair.predicted.speedup_high),
        Column("measured", "Measured", "ratio", lambda pair: pair.measured.speedup),
        Column("error", "Error", "signed_percent", lambda pair: pair.error("speedup")),
    )
    return Table.of(
        "points", "Predicted and measured speedups", columns, comparison.pairs
    )


# Results
# --------------------------------------------------------------------------------------------------


def result_table(data: ReportData) -> Table | None:
    """One row per configuration, with its measurement and prediction."""
    if not data.measured:
        return None
    pairs = {pair.measured.key: pair for pair in data.comparison.pairs}

    def drafted(name: str) -> Callable[[Record], Value]:
        """A field of the rows that speculate."""

        def read(row: Record) -> Value:
            value: Value = None
            if row.is_speculative:
                value = getattr(row, name)
            return value

        return read

    def paired(value: Callable[[Pair], Value]) -> Callable[[Record], Value]:
        """A value of the rows that were predicted."""

        def read(row: Record) -> Value:
            pair = pairs.get(row.key)
            if pair is None:
                return None
            return value(pair)

        return read

    columns = (
        Column("draft", "Draft", value=_method),
        BUDGET,
        GAMMA_COLUMN,
        replace(SPEEDUP, value=drafted("speedup")),
        Column("spread", "Lowest–highest", value=_interval),
        Column(
            "predicted_speedup",
            "Predicted",
            "ratio",
            paired(lambda pair: pair.predicted.speedup),
        ),
        Column(
            "error",
            "Error",
            "signed_percent",
            paired(lambda pair: pair.error("speedup")),
        ),
        BATCH,
        CONTEXT,
        Column("step_s", "Step", "seconds"),
        Column(
            "tokens_per_step",
            "Tokens per step",
            "number",
            drafted("expected_tokens_per_step"),
        ),
        Column(
            "tokens_per_s",
            "Tokens/s",
            "rate",
            lambda row: median_pair(row)[0],
        ),
        Column(
            "baseline_tokens_per_s",
            "Its baseline",
            "rate",
            lambda row: median_pair(row)[1] if row.is_speculative else None,
        ),
        Column("baseline_mbu", "Baseline MBU", "mbu", drafted("autoregressive_mbu")),
        Column("speedup_static_batch", "Static batch", "ratio"),
        Column("refilled_tokens_per_s", "Refilled tokens/s", "rate"),
        Column("speedup_refilled", "Refilled", "ratio"),
    )
    rows = sorted(data.measured, key=_result_order)
    note = (
        "Steady state. Each repetition is paired with an autoregressive run beside it: the speedup "
        "is the median of "
        "the pairs, tokens/s and baseline are of that pair, and the spread is the lowest and "
        "highest pair."
    )
    if any(has_weak_baseline(record) for record in data.measured):
        note += f" {WEAK_BASELINE_NOTE}"
    if any(record.adaptive for record in data.measured):
        note += " “γ up to”: chosen anew each step."
    table = Table.of(
        "results",
        "Measured configurations",
        columns,
        rows,
        note=note,
    )
    return table.without_empty(
        "baseline_mbu",
        "speedup_static_batch",
        "refilled_tokens_per_s",
        "speedup_refilled",
    )


def _result_order(row: Record) -> tuple[object, ...]:
    return (
        row.model,
        row.batch_size,
        row.context_len,
        row.draft_method,
        math.inf if row.draft_budget is None else row.draft_budget,
        row.gamma,
    )


def candidate_table(data: ReportData) -> Table | None:
    """The plan's candidates, fastest first."""
    if data.plan is None or not data.plan.candidates:
        return None
    plan = data.plan
    columns = (
        Column(
            "draft",
            "Draft",
            value=lambda row: _method(candidate_record(plan, row)),
        ),
        BUDGET,
        GAMMA_COLUMN,
        SPEEDUP,
        Column(
            "interval",
            INTERVAL,
            value=lambda row: _interval(candidate_record(plan, row)),
        ),
        Column("verdict", "Verdict"),
        BATCH,
        CONTEXT,
        Column("tp_size", "TP", "integer"),
        *map(_spread_column, SPREAD_FIELDS),
        Column("step_s", "Step", "seconds"),
        Column(
            "tokens_per_step",
            "Tokens/step",
            "number",
            lambda row: row.drafting.tokens_per_step,
        ),
        Column("break_even_tokens_per_step", "Even at", "number"),
        Column("tokens_per_s", "Tokens/s", "rate"),
        Column("request_ttft_s", "First token", "seconds"),
        Column("request_s", "Whole request", "seconds"),
        Column("request_speedup", "Its speedup", "ratio"),
        Column("cost_per_million_tokens_usd", "$ per million tokens", "number"),
        Column("bound_by", "Bound by"),
        Column("fits", "Fits", value=lambda row: "yes" if row.fits else "no"),
        Column(
            "acceptance_range",
            "Acceptance",
            value=lambda row: (
                "extrapolated" if row.drafting.is_extrapolated else "in range"
            ),
        ),
    )
    fastest_first = sorted(plan.candidates, key=lambda row: -row.speedup)
    table = Table.of("candidates", "What the plan considered", columns, fastest_first)
    return table.without_empty(
        *SPREAD_FIELDS,
        "request_ttft_s",
        "request_s",
        "request_speedup",
        "cost_per_million_tokens_usd",
    )


def _spread_column(name: str) -> Column:
    """Stages or groups of a replica, where there are several."""

    def read(row: Candidate) -> Value:
        size: int = value_of(row, name)
        if size > 1:
            return size
        return None

    return Column(name, name[:2].upper(), "integer", read)


def environment_table(data: ReportData) -> Table | None:
    """Where the records come from, one row per distinct environment."""
    last: dict[tuple[Value, ...], Value] = {}
    counts: Counter[tuple[Value, ...]] = Counter()
    for record in data.measured:
        env = record.environment
        versions = ", ".join(map(" ".join, sorted(env.versions.items())))
        key = (
            record.model,
            record.device,
            record.dtype,
            env.host_cpu,
            env.python,
            versions,
            env.commit,
        )
        counts[key] += 1
        last[key] = env.created_utc
    if not last:
        return None
    columns = (
        Column("model", "Model"),
        Column("device", "Device"),
        Column("dtype", "Data type"),
        Column("host_cpu", "Processor"),
        Column("python", "Python"),
        Column("versions", "Versions"),
        Column("commit", "Commit"),
        Column("created_utc", "Last record (UTC)"),
        Column("records", "Records", "integer"),
    )
    rows = tuple((*key, last[key], count) for key, count in counts.items())
    return Table("environment", "Where it was measured", columns, rows)


def gamma_table(data: ReportData) -> Table | None:
    """The plan's best gamma by batch and context, off where no draft is faster: the cells of the heat
    map."""
    if data.plan is None:
        return None
    grid = data.plan.gamma_table
    rows = []
    for row, batch in enumerate(grid.batch_sizes):
        gammas: list[Value] = [gamma or "off" for gamma in grid.gamma[row]]
        for place, fits in enumerate(grid.fits[row]):
            if not fits:
                gammas[place] = None
        start = faster_from(grid.break_even_context[row], grid.context_lens[0])
        rows.append((batch, *gammas, start))
    note = (
        f"Best γ of {grid.draft_name} for each batch size (rows) and context length (columns); empty: "
        "does not fit in memory."
    )
    columns = [BATCH]
    for context in grid.context_lens:
        columns.append(Column(f"context_{context}", thousands(context), "integer"))
    columns.append(Column("break_even_context", "Faster from context on"))
    return Table("gamma", "Which γ to use", tuple(columns), tuple(rows), note)


def faster_from(start: float | None, shortest: int) -> str | None:
    """A context of break-even; at the edge of what was looked at it is an upper bound."""
    if start is None:
        return None
    if start <= shortest:
        return f"≤ {thousands(shortest)}"
    return thousands(round(start))


TABLES: dict[str, Callable[[ReportData], Table | None]] = {
    "errors": lambda data: error_table(data.comparison),
    "results": result_table,
    "gamma": gamma_table,
    "candidates": candidate_table,
    "environment": environment_table,
}
"""In the order of the report."""


def all_tables(data: ReportData) -> list[Table]:
    """The tables that the data has rows for."""
    tables = []
    for make in TABLES.values():
        table = make(data)
        if table is not None:
            tables.append(table)
    return tables


def _method(record: Record) -> str:
    name = "none"
    if record.is_speculative:
        name = draft_name(record.draft, record.draft_method)
    if record.adaptive:
        return f"{name}, γ up to"
    return name


def _interval(record: Record) -> str | None:
    if not record.is_speculative:
        return None
    if record.speedup_low is None or record.speedup_high is None:
        return None
    return f"{record.speedup_low:.2f}–{record.speedup_high:.2f}"
