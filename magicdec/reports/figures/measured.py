"""Figures of measurements: what the draft gets right, and how near the predictions come."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

from magicdec.comparison import TERMS, Comparison, is_paired, summarise
from magicdec.counts import Z_90, rate_and_error
from magicdec.naming import describe, draft_name, method_name
from magicdec.records import Record
from magicdec.reports.data import ReportData
from magicdec.reports.figures.chart import BLUE, GREY, INK, MARKERS, MUTED, RED, SERIES, Chart, plain_ticks, spread_of
from magicdec.reports.figures.sweeps import Line, Spot, draw
from magicdec.reports.tables import BUDGET, CONTEXT, Column, label_of
from magicdec.reports.text import GAMMA, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAND = 0.1
RATE_COLUMNS = (
    Column("rate", "Measured", "percent"), Column("low", "90 % from", "percent"), Column("high", "to", "percent"),
    Column("trials", "Trials", "integer"),
)  # fmt: skip
CONFIGURATION, ERROR = Column("configuration", "Configuration"), Column("error", "Error", "signed_percent")


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
    chosen = _deepest_per_method(_comparable(rows, data.reference), data.reference)
    histograms = [r for r in chosen if r.acceptance_histogram and sum(r.acceptance_histogram)]
    chart = Chart("positions", height=4.3 if histograms else 2.7, rows=2 if histograms else 1)
    axes = chart.axes[0]
    for i, row in enumerate(chosen):
        _position_series(chart, row, data.find_predicted(row), i)
    axes.set(ylabel="acceptance rate", xlabel="position in the drafted block")
    axes.set_xticks(range(1, max(r.gamma for r in chosen) + 1))
    axes.set_ylim(top=1.02)
    axes.legend(loc="best")
    if histograms:
        _histogram(chart, chart.axes[1], histograms)
    return chart.told(
        title=_position_title(chosen[0]),
        caption="Rate at which a drafted token is accepted, given that all before it in its block were. Bars: 90 % "
        "intervals, clustered by sequence (blocks of one resemble each other) where the record holds it. "
        "Dashed: predicted." + (" Below: share of steps by number of accepted tokens." if histograms else ""),
        table="Acceptance by position",
        columns=[CONFIGURATION, Column("position", "Position", "integer"), *RATE_COLUMNS,
                 Column("predicted", "Predicted", "percent")],
    )  # fmt: skip


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

    def nearness(row: Record) -> tuple[bool, bool, int, float]:
        trials = sum(row.acceptance_trials_by_position or [0])
        if reference is None:
            return False, False, row.gamma, trials
        same = (row.batch_size, row.context_len) == (reference.batch_size, reference.context_len)
        return same, row.draft_budget == reference.draft_budget, row.gamma, trials

    found: dict[tuple[str, str], Record] = {}
    for row in rows:
        key = (row.draft, row.draft_method)
        found[key] = max(found.get(key, row), row, key=nearness)
    first = (reference.draft, reference.draft_method) if reference is not None else None
    return sorted(found.values(), key=lambda r: ((r.draft, r.draft_method) != first, r.draft_method))[:4]


def _position_series(chart: Chart, row: Record, guess: Record | None, index: int) -> None:
    rates, axes = row.acceptance_by_position or [], chart.axes[0]
    trials: Sequence[int | None] = row.acceptance_trials_by_position or [None] * len(rates)
    predicted = (guess.acceptance_by_position or []) if guess is not None else []
    colour, marker = SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)]
    offset, series, intervals = 0.06 * index, describe(row, symbol=GAMMA), rate_intervals(row)
    seen = [(i, r, n) for i, (r, n) in enumerate(zip(rates, trials, strict=False), 1) if n != 0]
    line = axes.plot([i + offset for i, _, _ in seen], [r for _, r, _ in seen], color=colour, lw=1, alpha=0.5)
    chart.part(series, *line)
    for i, rate, count in seen:
        ends, at = intervals[i - 1] or (None, None), (i + offset, rate)
        chart.interval(axes, at, ends, series, colour)
        tip = f"{series}, position {i}: {100 * rate:.1f} %" + (f" of {count}" if count else "")
        chart.mark(axes, at, marker, tip, series, color=colour)
        chart.rows.append((series, i, rate, *ends, count, predicted[i - 1] if i <= len(predicted) else None))
    if predicted:
        dashed = axes.plot(range(1, len(predicted) + 1), list(predicted), color=colour, ls="--", lw=1.2)
        chart.part(series, *dashed)
    axes.plot([], [], marker, color=colour, label=series)


def _histogram(chart: Chart, axes: Axes, rows: Sequence[Record]) -> None:
    width = 0.8 / len(rows)
    for i, row in enumerate(rows):
        counts, series = row.acceptance_histogram or [], describe(row, symbol=GAMMA)
        total = sum(counts)
        for accepted, count in enumerate(counts):
            position, share = accepted + (i - (len(rows) - 1) / 2) * width, 100 * count / total
            (bar,) = axes.bar(position, share, width * 0.92, color=SERIES[i % len(SERIES)], lw=0)
            chart.tip(bar, f"{series}: {accepted} accepted in {share:.1f} % of {total} steps", series)
    axes.set(ylabel="share of steps (%)", xlabel="tokens accepted in a step")
    axes.set_xticks(range(max(len(r.acceptance_histogram or []) for r in rows)))
    axes.grid(visible=False, axis="x")


# By budget -----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Pooled:
    """First drafted tokens of several runs at one budget; the variance is that of the accepted ones."""

    accepted: float = 0.0
    tried: float = 0.0
    variance: float = 0.0

    @property
    def rate(self) -> float:
        return self.accepted / self.tried

    @property
    def interval(self) -> tuple[float, float]:
        return rate_interval(self.rate, math.sqrt(self.variance) / self.tried)


def acceptance_by_budget(data: ReportData) -> Chart | None:
    """Acceptance at the first position against the draft's budget; all gammas of one budget pooled."""
    rows = [
        r for r in data.measured
        if r.is_speculative and r.draft_budget and r.acceptance_by_position and not r.simulated_acceptance
    ]  # fmt: skip
    pooled: dict[tuple[str, int], dict[int, Pooled]] = defaultdict(lambda: defaultdict(Pooled))
    for row in _comparable(rows, data.reference) if rows else ():
        trials, error = (row.acceptance_trials_by_position or [0])[0], rate_errors(row)[0]
        pool = pooled[row.draft_method, row.context_len][row.draft_budget or 0]
        pool.accepted += trials * (row.acceptance_by_position or [0.0])[0]
        pool.tried += trials
        pool.variance += (trials * (error or 0.0)) ** 2
    curves = {k: v for k, v in sorted(pooled.items()) if len(v) > 1 and all(each.tried for each in v.values())}
    if not curves:
        return None
    deepest = dict(sorted(curves))  # of each draft the longest context, which comes last
    chart = Chart("budget", height=3.2)
    (axes,) = chart.axes
    shown = {method: (context, curves[method, context]) for method, context in deepest.items()}
    for i, (method, (context, values)) in enumerate(shown.items()):
        look, name = (SERIES[i % len(SERIES)], MARKERS[i % len(MARKERS)]), method_name(method)
        measured = [Spot(budget, each.rate, *each.interval) for budget, each in sorted(values.items())]
        predicted = {
            Spot(r.draft_budget, r.acceptance_by_position[0])
            for r in data.predicted
            if r.draft_method == method and r.context_len == context and r.draft_budget and r.acceptance_by_position
        }
        draw(chart, axes, Line(name, sorted(predicted), measured), look, ", budget")
        axes.plot([], [], look[1], color=look[0], ls="-", label=f"{name}, context {context}")
        for spot in measured:
            budget = int(spot.x)
            chart.rows.append((name, context, budget, *spot[1:], round(values[budget].tried)))
    axes.set_xscale("log", base=2)
    plain_ticks(axes.xaxis, sorted({budget for _, values in shown.values() for budget in values}))
    axes.set(xlabel="draft budget (KV slots read per step)", ylabel="acceptance, first position")
    axes.legend(loc="lower right")
    return chart.told(
        title=_budget_title({method: values for method, (_, values) in shown.items()}),
        caption="Share of first drafted tokens accepted, all γ of a budget pooled, with 90 % intervals. Line: "
        "predicted. Every draft reads the same number of KV slots per step at one budget.",
        table="Acceptance by budget",
        columns=[Column("method", "Draft"), CONTEXT, BUDGET, *RATE_COLUMNS],
    )


def _budget_title(pools: dict[str, dict[int, Pooled]]) -> str:
    shared = set.intersection(*(set(values) for values in pools.values()))
    if len(pools) > 1 and shared:
        budget = max(shared)
        best, second = sorted(pools, key=lambda method: -pools[method][budget].rate)[:2]
        most = percent(pools[best][budget].rate)
        if pools[best][budget].interval[0] <= pools[second][budget].interval[1]:
            return f"At a budget of {budget} the drafts are accepted about alike: {most}"
        return f"At a budget of {budget}, {method_name(best)} is accepted most: {most}"
    method, values = next(iter(pools.items()))
    small, large = min(values), max(values)
    return (
        f"{method_name(method)}: a budget of {large} lifts acceptance to {percent(values[large].rate)} "
        f"from {percent(values[small].rate)} at {small}"
    )


# Predicted against measured ------------------------------------------------------------------------------------------


def predicted_vs_measured(data: ReportData) -> Chart | None:
    """Speedup of every configuration: measured across, predicted upwards; on the diagonal they agree."""
    pairs = [p for p in data.comparison.pairs if p.error("speedup") is not None]
    summary = summarise("speedup", pairs)
    if summary is None:
        return None
    chart = Chart("scatter", height=3.9)
    (axes,) = chart.axes
    values = [
        v for p in pairs for r in (p.measured, p.predicted)
        for v in (r.speedup, r.speedup_low, r.speedup_high) if v is not None
    ]  # fmt: skip
    low, high = min(*values, 1.0) * 0.94, max(*values, 1.0) * 1.06
    _agreement(axes, low, high)
    groups = sorted({draft_name(p.measured.draft, p.measured.draft_method) for p in pairs})
    for group, colour, marker in zip(groups, cycle(SERIES), cycle(MARKERS), strict=False):
        for pair in pairs:
            m, p, label = pair.measured, pair.predicted, label_of(pair.measured)
            if draft_name(m.draft, m.draft_method) != group or m.speedup is None or p.speedup is None:
                continue
            bars = axes.errorbar(
                m.speedup, p.speedup, xerr=spread_of(m.speedup, (m.speedup_low, m.speedup_high)),
                yerr=spread_of(p.speedup, (p.speedup_low, p.speedup_high)), fmt="none", ecolor=GREY, lw=0.7, alpha=0.6,
            )  # fmt: skip
            chart.part(group, *bars.lines[2])
            tip = f"{label}: measured {m.speedup:.2f}×, predicted {p.speedup:.2f}×"
            chart.mark(axes, (m.speedup, p.speedup), marker, tip, group, color=colour, mew=0.5)
            chart.rows.append((label, m.speedup, p.speedup, pair.error("speedup")))
        axes.plot([], [], marker, color=colour, ls="none", label=group)
    axes.set(xlabel="measured speedup (×)", ylabel="predicted speedup (×)", xlim=(low, high), ylim=(low, high))
    axes.set_aspect("equal")
    if len(groups) > 1:
        axes.legend(loc="upper left", handletextpad=0.2)
    points = f"{len(pairs)} configurations" if len(pairs) > 1 else "one configuration"
    return chart.told(
        title=f"Predicted speedups are off by {percent(summary.median_error, 1)} (median of {points})",
        caption="Each mark is one configuration. On the diagonal prediction and measurement agree; the band is ±10 %. "
        "Bars: lowest to highest repetition across, 90 % interval of the prediction upwards.",
        table="Measured and predicted speedups",
        columns=[CONFIGURATION, Column("measured", "Measured", "ratio"), Column("predicted", "Predicted", "ratio"),
                 ERROR],
    )  # fmt: skip


def _agreement(axes: Axes, low: float, high: float) -> None:
    axes.plot([low, high], [low, high], color=INK, lw=1, zorder=1)
    lower, upper = ([low * scale, high * scale] for scale in (1 - BAND, 1 + BAND))
    axes.fill_between([low, high], lower, upper, color=GREY, alpha=0.15, lw=0, zorder=0)
    if low < 1 < high:
        axes.axvline(1, color=MUTED, lw=0.8, ls=":")
        axes.axhline(1, color=MUTED, lw=0.8, ls=":")


def residuals_by_term(data: ReportData) -> Chart | None:
    """Signed error of every prediction, by term, which shows the term that is wrong."""
    terms = data.comparison.summaries
    if not terms or sum(summary.points for summary in terms.values()) < 2:
        return None
    chart = Chart("residuals", height=0.75 + 0.42 * len(terms))
    (axes,) = chart.axes
    axes.axvspan(-100 * BAND, 100 * BAND, color=GREY, alpha=0.15, lw=0)
    axes.axvline(0, color=INK, lw=1)
    for i, (term, summary) in enumerate(terms.items()):
        for j, (label, error) in enumerate(_errors(data.comparison, term)):
            at = (100 * error, i + 0.22 * (((j * 7) % 10) / 4.5 - 1))
            tip = f"{label}: {TERMS[term]} predicted {100 * error:+.1f} %".replace("-", "−")
            chart.mark(axes, at, "o", tip, color=BLUE, ms=4.5, alpha=0.8, mec="none", mew=1)
            chart.rows.append((TERMS[term], label, error))
        axes.plot([100 * summary.bias] * 2, [i - 0.34, i + 0.34], color=RED, lw=2.2)
    axes.set_yticks(range(len(terms)), labels=[TERMS[term] for term in terms])
    axes.set_ylim(len(terms) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    size = max(100 * max(summary.max_error for summary in terms.values()), 12) * 1.08
    axes.set(xlabel="predicted / measured − 1 (%)", xlim=(-size, size))
    return chart.told(
        title=_residual_title(data.comparison),
        caption="One point per configuration and term, predicted / measured − 1. Bars: medians. The band is ±10 %.",
        table="Errors of the predictions by term",
        columns=[Column("term", "Term"), CONFIGURATION, ERROR],
    )


def _errors(comparison: Comparison, term: str) -> list[tuple[str, float]]:
    """The error of every pair that has the term, with the pair's label."""
    return [(label_of(p.measured), error) for p in comparison.pairs if (error := p.error(term)) is not None]


def _residual_title(comparison: Comparison) -> str:
    term, worst = max(comparison.summaries.items(), key=lambda item: item[1].median_error)
    if worst.median_error < 0.03:
        return "No term of the prediction is off by more than 3\u202f% in the median"
    high = sum(error > 0 for _, error in _errors(comparison, term)) / worst.points
    side = ", mostly too high" if high > 0.75 else (", mostly too low" if high < 0.25 else "")
    return f"The weakest term is {TERMS[term]}: {percent(worst.median_error, 1)} off in the median{side}"
