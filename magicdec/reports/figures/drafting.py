"""Figures of what the draft gets right: by position and by budget."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from magicdec.comparison import is_paired
from magicdec.counts import Z_90, rate_and_error
from magicdec.naming import describe, method_name
from magicdec.records import Record
from magicdec.reports.data import ReportData
from magicdec.reports.figures.chart import Chart
from magicdec.reports.figures.sweeps import Line, Spot, draw
from magicdec.reports.style import GAMMA, MARKERS, PAPER, SERIES, Tips, new_figure, percent, plain_ticks
from magicdec.reports.tables import BUDGET, CONTEXT, Column, Table, Value

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def rate_interval(rate: float, stderr: float) -> tuple[float, float]:
    """90 % interval of a rate."""
    return max(0.0, rate - Z_90 * stderr), min(1.0, rate + Z_90 * stderr)


def rate_errors(row: Record) -> list[float | None]:
    """Standard error of each position's rate: clustered by sequence, or of independent trials in older records; None
    without trials."""
    rates, trials = row.acceptance_by_position or [], row.acceptance_trials_by_position or []
    errors = row.acceptance_stderr_by_position
    found = [
        None if not count else errors[place] if errors else rate_and_error(rate * count, count)[1]
        for place, (rate, count) in enumerate(zip(rates, trials, strict=False))
    ]
    return [*found, *[None] * (len(rates) - len(found))]


def rate_intervals(row: Record) -> list[tuple[float, float] | None]:
    """90 % interval of each position's rate; None without trials."""
    pairs = zip(row.acceptance_by_position or [], rate_errors(row), strict=True)
    return [None if error is None else rate_interval(rate, error) for rate, error in pairs]


# By position ---------------------------------------------------------------------------------------------------------


def acceptance_by_position(data: ReportData) -> Chart | None:
    """Rate of acceptance at each position, given that all before were accepted; and how many a step accepts."""
    rows = [r for r in data.measured if r.acceptance_by_position and r.is_speculative]
    if not rows:
        return None
    rows = _comparable(rows, data.reference)
    chosen = _deepest_per_method(rows, data.reference)
    histograms = [r for r in chosen if r.acceptance_histogram and sum(r.acceptance_histogram)]
    figure, axes = new_figure(height=4.3 if histograms else 2.7, rows=2 if histograms else 1)
    tips = Tips("positions")
    table: list[tuple[Value, ...]] = []
    for i, row in enumerate(chosen):
        table += _position_series(axes[0], row, data.find_predicted(row), i, tips)
    axes[0].set(ylabel="acceptance rate", xlabel="position in the drafted block")
    axes[0].set_xticks(range(1, max(r.gamma for r in chosen) + 1))
    axes[0].set_ylim(top=1.02)
    axes[0].legend(loc="best")
    if histograms:
        _histogram(axes[1], histograms, tips)
    columns = (
        Column("configuration", "Configuration"),
        Column("position", "Position", "integer"),
        Column("rate", "Measured", "percent"),
        Column("low", "90 % from", "percent"),
        Column("high", "to", "percent"),
        Column("trials", "Trials", "integer"),
        Column("predicted", "Predicted", "percent"),
    )
    return Chart(
        title=_position_title(chosen[0]),
        caption=(
            "Rate at which a drafted token is accepted, given that all before it in its block were. Bars: 90 % "
            "intervals, clustered by sequence (blocks of one resemble each other) where the record holds it. "
            "Dashed: predicted." + (" Below: share of steps by number of accepted tokens." if histograms else "")
        ),
        figure=figure,
        marks=tips,
        table=Table("positions", "Acceptance by position", columns, tuple(table)),
    )


def _comparable(rows: Sequence[Record], reference: Record | None) -> list[Record]:
    """The rows of one model, prompts and temperature: where the reference was measured, else of the most drafts.

    Acceptance on other prompts is another quantity, so drafts are compared on the same ones.
    """

    def setting(row: Record) -> tuple[object, ...]:
        return row.model, row.prompts, row.temperature, bool(row.simulated_acceptance)

    groups: dict[tuple[object, ...], list[Record]] = defaultdict(list)
    for row in rows:
        groups[setting(row)].append(row)
    own = [setting(r) for r in rows if reference is not None and is_paired(r, reference)]
    return groups[own[0]] if own else max(groups.values(), key=lambda g: (len({r.draft_method for r in g}), len(g)))


def _position_title(row: Record) -> str:
    """Says that acceptance rises or falls only where the intervals of the first and the last position are apart."""
    rates = row.acceptance_by_position or [0.0]
    first = f"{percent(rates[0])} of first drafted tokens are accepted"
    intervals = rate_intervals(row)
    if len(rates) < 2 or intervals[0] is None or intervals[-1] is None:
        return first
    (low, high), (last_low, last_high) = intervals[0], intervals[-1]
    trend = "and more" if last_low > high else ("but fewer" if last_high < low else "and about as many")
    return f"{first}, {trend} of those that reach position {len(rates)}: {percent(rates[-1])}"


def _deepest_per_method(rows: Sequence[Record], reference: Record | None) -> list[Record]:
    """For each draft the measured row with the most positions, nearest to the reference's setting."""
    found: dict[tuple[str, str], Record] = {}

    def nearness(row: Record) -> tuple[bool, bool, int, float]:
        same = reference is not None and (row.batch_size, row.context_len) == (
            reference.batch_size,
            reference.context_len,
        )
        budget = reference is not None and row.draft_budget == reference.draft_budget
        return same, budget, row.gamma, sum(row.acceptance_trials_by_position or [0])

    for row in rows:
        key = (row.draft, row.draft_method)
        if key not in found or nearness(row) > nearness(found[key]):
            found[key] = row
    first = (reference.draft, reference.draft_method) if reference is not None else None
    return sorted(found.values(), key=lambda r: ((r.draft, r.draft_method) != first, r.draft_method))[:4]


def _position_series(axes: Axes, row: Record, guess: Record | None, index: int, tips: Tips) -> list[tuple[Value, ...]]:
    rates = row.acceptance_by_position or []
    trials: Sequence[int | None] = row.acceptance_trials_by_position or [None] * len(rates)
    predicted = (guess.acceptance_by_position or []) if guess is not None else []
    colour, marker = SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)]
    offset = 0.06 * index
    series = describe(row, symbol=GAMMA)
    intervals = rate_intervals(row)
    seen = [(i, r, n) for i, (r, n) in enumerate(zip(rates, trials, strict=False), 1) if n != 0]
    line = axes.plot([i + offset for i, _, _ in seen], [r for _, r, _ in seen], color=colour, lw=1, alpha=0.5)
    tips.belongs(series, *line)
    table: list[tuple[Value, ...]] = []
    for i, rate, count in seen:
        low, high = intervals[i - 1] or (None, None)
        if low is not None and high is not None:
            spread = [[rate - low], [high - rate]]
            bars = axes.errorbar(i + offset, rate, yerr=spread, fmt="none", ecolor=colour, lw=1)
            tips.belongs(series, *bars.lines[2])
        (mark,) = axes.plot(i + offset, rate, marker, color=colour, mec=PAPER, mew=0.6)
        tips.add(mark, f"{series}, position {i}: {100 * rate:.1f} %" + (f" of {count}" if count else ""), series)
        table.append((series, i, rate, low, high, count, predicted[i - 1] if i <= len(predicted) else None))
    if predicted:
        dashed = axes.plot(range(1, len(predicted) + 1), list(predicted), color=colour, ls="--", lw=1.2)
        tips.belongs(series, *dashed)
    axes.plot([], [], marker, color=colour, label=series)
    return table


def _histogram(axes: Axes, rows: Sequence[Record], tips: Tips) -> None:
    width = 0.8 / len(rows)
    for i, row in enumerate(rows):
        counts = row.acceptance_histogram or []
        total = sum(counts)
        for accepted, count in enumerate(counts):
            position = accepted + (i - (len(rows) - 1) / 2) * width
            (bar,) = axes.bar(position, 100 * count / total, width * 0.92, color=SERIES[i % len(SERIES)], lw=0)
            tips.add(
                bar,
                f"{describe(row, symbol=GAMMA)}: {accepted} accepted in {100 * count / total:.1f} % of {total} steps",
                describe(row, symbol=GAMMA),
            )
    axes.set(ylabel="share of steps (%)", xlabel="tokens accepted in a step")
    axes.set_xticks(range(max(len(r.acceptance_histogram or []) for r in rows)))
    axes.grid(visible=False, axis="x")


# By budget -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """First drafted tokens of several runs at one budget; the variance is that of the accepted ones."""

    accepted: float = 0.0
    tried: float = 0.0
    variance: float = 0.0

    @property
    def rate(self) -> float:
        return self.accepted / self.tried

    @property
    def stderr(self) -> float:
        return math.sqrt(self.variance) / self.tried


def acceptance_by_budget(data: ReportData) -> Chart | None:
    """Acceptance at the first position against the draft's budget; all gammas of one budget pooled."""
    pooled: dict[tuple[str, int], dict[int, Pooled]] = defaultdict(dict)
    rows = [
        row
        for row in data.measured
        if row.is_speculative and row.draft_budget and row.acceptance_by_position and not row.simulated_acceptance
    ]
    for row in _comparable(rows, data.reference) if rows else ():
        assert row.draft_budget is not None
        assert row.acceptance_by_position is not None
        trials, error = (row.acceptance_trials_by_position or [0])[0], rate_errors(row)[0]
        before = pooled[row.draft_method, row.context_len].get(row.draft_budget, Pooled())
        pooled[row.draft_method, row.context_len][row.draft_budget] = Pooled(
            accepted=before.accepted + trials * row.acceptance_by_position[0],
            tried=before.tried + trials,
            variance=before.variance + (trials * (error or 0.0)) ** 2,
        )
    curves = {k: v for k, v in sorted(pooled.items()) if len(v) > 1 and all(each.tried for each in v.values())}
    if not curves:
        return None
    deepest = {m: max(c for method, c in curves if method == m) for m, _ in curves}
    figure, (axes,) = new_figure(height=3.2)
    tips = Tips("budget")
    table: list[tuple[Value, ...]] = []
    for i, (method, context) in enumerate(sorted(deepest.items())):
        table += _budget_series(axes, (method, context), curves[method, context], data, i, tips)
    axes.set_xscale("log", base=2)
    budgets = sorted({b for m, c in deepest.items() for b in curves[m, c]})
    plain_ticks(axes.xaxis, budgets)
    axes.set(xlabel="draft budget (KV slots read per step)", ylabel="acceptance, first position")
    axes.legend(loc="lower right")
    columns = (
        Column("method", "Draft"),
        CONTEXT,
        BUDGET,
        Column("rate", "Measured", "percent"),
        Column("low", "90 % from", "percent"),
        Column("high", "to", "percent"),
        Column("trials", "Trials", "integer"),
    )
    return Chart(
        title=_budget_title(curves, deepest),
        caption=(
            "Share of first drafted tokens accepted, all γ of a budget pooled, with 90 % intervals. Line: predicted. "
            "Every draft reads the same number of KV slots per step at one budget."
        ),
        figure=figure,
        marks=tips,
        table=Table("budget", "Acceptance by budget", columns, tuple(table)),
    )


def _budget_title(series: dict[tuple[str, int], dict[int, Pooled]], deepest: dict[str, int]) -> str:
    rates = {m: {b: each.rate for b, each in series[m, c].items()} for m, c in deepest.items()}
    shared = set.intersection(*(set(r) for r in rates.values()))
    if len(rates) > 1 and shared:
        budget = max(shared)
        best, second = sorted(rates, key=lambda m: -rates[m][budget])[:2]
        ends = [rate_interval(series[m, deepest[m]][budget].rate, series[m, deepest[m]][budget].stderr)
                for m in (best, second)]  # fmt: skip
        if ends[0][0] <= ends[1][1]:
            return f"At a budget of {budget} the drafts are accepted about alike: {percent(rates[best][budget])}"
        return f"At a budget of {budget}, {method_name(best)} is accepted most: {percent(rates[best][budget])}"
    method, values = next(iter(rates.items()))
    small, large = min(values), max(values)
    return (
        f"{method_name(method)}: a budget of {large} lifts acceptance to {percent(values[large])} "
        f"from {percent(values[small])} at {small}"
    )


def _budget_series(
    axes: Axes, key: tuple[str, int], values: dict[int, Pooled], data: ReportData, index: int, tips: Tips
) -> list[tuple[Value, ...]]:
    method, context = key
    colour, marker, name = SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)], method_name(method)
    measured = [Spot(b, each.rate, *rate_interval(each.rate, each.stderr)) for b, each in sorted(values.items())]
    predicted = [
        Spot(r.draft_budget, r.acceptance_by_position[0])
        for r in data.predicted
        if r.draft_method == method and r.context_len == context and r.draft_budget and r.acceptance_by_position
    ]
    draw(axes, Line(name, sorted(set(predicted)), measured), tips, colour, marker, ", budget")
    axes.plot([], [], marker, color=colour, ls="-", label=f"{name}, context {context}")
    return [(name, context, int(s.x), s.value, s.low, s.high, round(values[int(s.x)].tried)) for s in measured]
