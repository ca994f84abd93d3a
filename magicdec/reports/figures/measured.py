"""Figures of measurements: what the draft gets right, and how near the predictions come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from magicdec.comparison import is_paired, summarise
from magicdec.counts import Z_90, rate_and_error
from magicdec.naming import describe, draft_name
from magicdec.records import Record
from magicdec.reports.data import ReportData
from magicdec.reports.figures.chart import GREY, INK, MARKERS, MUTED, SERIES, Chart, spread_of
from magicdec.reports.tables import Column, label_of
from magicdec.reports.text import GAMMA, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAND = 0.1
CONFIGURATION = Column("configuration", "Configuration")
ERROR = Column("error", "Error", "signed_percent")


def rate_intervals(row: Record) -> list[tuple[float, float] | None]:
    """90 % interval of each position's rate, clustered by sequence, or of independent trials in
    older records; None without trials."""
    rates = row.acceptance_by_position or []
    trials = row.acceptance_trials_by_position or []
    found: list[tuple[float, float] | None] = [None] * len(rates)
    for place, (rate, count) in enumerate(zip(rates, trials, strict=False)):
        if count:
            clustered = row.acceptance_stderr_by_position
            if clustered:
                error = clustered[place]
            else:
                error = rate_and_error(rate * count, count)[1]
            found[place] = max(0.0, rate - Z_90 * error), min(1.0, rate + Z_90 * error)
    return found


# By position
# ---------------------------------------------------------------------------------------------------------


def acceptance_by_position(data: ReportData) -> Chart | None:
    """Rate of acceptance at each position, given that all before were accepted; and how many a step
    accepts.
    """
    rows = []
    for r in data.measured:
        if r.acceptance_by_position and r.is_speculative:
            rows.append(r)
    if not rows:
        return None
    chosen = _deepest_per_method(_comparable(rows, data.reference), data.reference)
    histograms = []
    for r in chosen:
        if r.acceptance_histogram and sum(r.acceptance_histogram):
            histograms.append(r)
    num_rows = 1
    if histograms:
        num_rows = 2
    height = 2.7
    if histograms:
        height = 4.3
    chart = Chart("positions", height=height, rows=num_rows)
    axes = chart.axes[0]
    for i, row in enumerate(chosen):
        _position_series(chart, row, data.find_predicted(row), i)
    axes.set(ylabel="acceptance rate", xlabel="position in the drafted block")
    axes.set_xticks(range(1, max(r.gamma for r in chosen) + 1))
    axes.set_ylim(top=1.02)
    axes.legend(loc="best")
    if histograms:
        _histogram(chart, chart.axes[1], histograms)
    below = ""
    if histograms:
        below = " Below: share of steps by number of accepted tokens."
    return chart.told(
        title=_position_title(chosen[0]),
        caption="Rate at which a drafted token is accepted, given that all before it in its block were. Bars: 90 % "
        "intervals, clustered by sequence (blocks of one resemble each other) where the record holds it. "
        "Dashed: predicted." + below,
        table="Acceptance by position",
        columns=[
            CONFIGURATION,
            Column("position", "Position", "integer"),
            Column("rate", "Measured", "percent"),
            Column("low", "90 % from", "percent"),
            Column("high", "to", "percent"),
            Column("trials", "Trials", "integer"),
            Column("predicted", "Predicted", "percent"),
        ],
    )


def _comparable(rows: Sequence[Record], reference: Record | None) -> list[Record]:
    """The rows of one model, prompts and temperature: where the reference was measured, else of the
    most drafts.

    Acceptance on other prompts is another quantity, so drafts are compared on the same ones.
    """

    def setting(row: Record) -> tuple[object, ...]:
        return row.model, row.prompts, row.temperature, bool(row.simulated_acceptance)

    groups: dict[tuple[object, ...], list[Record]] = defaultdict(list)
    for row in rows:
        groups[setting(row)].append(row)
    own = []
    for r in rows:
        if reference is not None and is_paired(r, reference):
            own.append(setting(r))
    if own:
        return groups[own[0]]
    return max(groups.values(), key=lambda g: (len({r.draft_method for r in g}), len(g)))


def _position_title(row: Record) -> str:
    """Says that acceptance rises or falls only where the intervals of the first and the last
    position are apart.
    """
    rates = row.acceptance_by_position or [0.0]
    first = f"{percent(rates[0])} of first drafted tokens are accepted"
    intervals = rate_intervals(row)
    if len(rates) < 2 or intervals[0] is None or intervals[-1] is None:
        return first
    (low, high), (last_low, last_high) = intervals[0], intervals[-1]
    if last_low > high:
        trend = "and more"
    elif last_high < low:
        trend = "but fewer"
    else:
        trend = "and about as many"
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
    first = None
    if reference is not None:
        first = (reference.draft, reference.draft_method)
    return sorted(
        found.values(), key=lambda r: ((r.draft, r.draft_method) != first, r.draft_method)
    )[:4]


def _position_series(chart: Chart, row: Record, guess: Record | None, index: int) -> None:
    rates = row.acceptance_by_position or []
    axes = chart.axes[0]
    trials: Sequence[int | None] = row.acceptance_trials_by_position or [None] * len(rates)
    if guess is not None:
        predicted = guess.acceptance_by_position or []
    else:
        predicted = []
    colour = SERIES[index % len(SERIES)]
    marker = MARKERS[index % len(MARKERS)]
    offset = 0.06 * index
    series = describe(row, symbol=GAMMA)
    intervals = rate_intervals(row)
    seen = []
    for i, (r, n) in enumerate(zip(rates, trials, strict=False), 1):
        if n != 0:
            seen.append((i, r, n))
    line = axes.plot(
        [i + offset for i, _, _ in seen], [r for _, r, _ in seen], color=colour, lw=1, alpha=0.5
    )
    chart.part(series, *line)
    for i, rate, count in seen:
        ends = intervals[i - 1] or (None, None)
        at = (i + offset, rate)
        chart.interval(axes, at, ends, series, colour)
        of_count = ""
        if count:
            of_count = f" of {count}"
        tip = f"{series}, position {i}: {100 * rate:.1f} %" + of_count
        chart.mark(axes, at, marker, tip, series, color=colour)
        prediction = None
        if i <= len(predicted):
            prediction = predicted[i - 1]
        chart.rows.append((series, i, rate, *ends, count, prediction))
    if predicted:
        dashed = axes.plot(
            range(1, len(predicted) + 1), list(predicted), color=colour, ls="--", lw=1.2
        )
        chart.part(series, *dashed)
    axes.plot([], [], marker, color=colour, label=series)


def _histogram(chart: Chart, axes: Axes, rows: Sequence[Record]) -> None:
    width = 0.8 / len(rows)
    for i, row in enumerate(rows):
        counts = row.acceptance_histogram or []
        series = describe(row, symbol=GAMMA)
        total = sum(counts)
        for accepted, count in enumerate(counts):
            position = accepted + (i - (len(rows) - 1) / 2) * width
            share = 100 * count / total
            (bar,) = axes.bar(position, share, width * 0.92, color=SERIES[i % len(SERIES)], lw=0)
            chart.tip(
                bar, f"{series}: {accepted} accepted in {share:.1f} % of {total} steps", series
            )
    axes.set(ylabel="share of steps (%)", xlabel="tokens accepted in a step")
    axes.set_xticks(range(max(len(r.acceptance_histogram or []) for r in rows)))
    axes.grid(visible=False, axis="x")


# Predicted against measured
# ------------------------------------------------------------------------------------------


def predicted_vs_measured(data: ReportData) -> Chart | None:
    """Speedup of every configuration: measured across, predicted upwards; on the diagonal they
    agree.
    """
    pairs = [p for p in data.comparison.pairs if p.error("speedup") is not None]
    summary = summarise("speedup", pairs)
    if summary is None:
        return None
    chart = Chart("scatter", height=3.9)
    (axes,) = chart.axes
    values = [
        v
        for p in pairs
        for r in (p.measured, p.predicted)
        for v in (r.speedup, r.speedup_low, r.speedup_high)
        if v is not None
    ]
    low = min(*values, 1.0) * 0.94
    high = max(*values, 1.0) * 1.06
    _agreement(axes, low, high)
    groups = sorted({draft_name(p.measured.draft, p.measured.draft_method) for p in pairs})
    for group, colour, marker in zip(groups, cycle(SERIES), cycle(MARKERS), strict=False):
        for pair in pairs:
            m = pair.measured
            p = pair.predicted
            label = label_of(pair.measured)
            if (
                draft_name(m.draft, m.draft_method) != group
                or m.speedup is None
                or p.speedup is None
            ):
                continue
            bars = axes.errorbar(
                m.speedup,
                p.speedup,
                xerr=spread_of(m.speedup, (m.speedup_low, m.speedup_high)),
                yerr=spread_of(p.speedup, (p.speedup_low, p.speedup_high)),
                fmt="none",
                ecolor=GREY,
                lw=0.7,
                alpha=0.6,
            )
            chart.part(group, *bars.lines[2])
            tip = f"{label}: measured {m.speedup:.2f}×, predicted {p.speedup:.2f}×"
            chart.mark(axes, (m.speedup, p.speedup), marker, tip, group, color=colour, mew=0.5)
            chart.rows.append((label, m.speedup, p.speedup, pair.error("speedup")))
        axes.plot([], [], marker, color=colour, ls="none", label=group)
    axes.set(
        xlabel="measured speedup (×)",
        ylabel="predicted speedup (×)",
        xlim=(low, high),
        ylim=(low, high),
    )
    axes.set_aspect("equal")
    if len(groups) > 1:
        axes.legend(loc="upper left", handletextpad=0.2)
    if len(pairs) > 1:
        points = f"{len(pairs)} configurations"
    else:
        points = "one configuration"
    return chart.told(
        title=f"Predicted speedups are off by {percent(summary.median_error, 1)} (median of {points})",
        caption="Each mark is one configuration. On the diagonal prediction and measurement agree; the band is ±10 %. "
        "Bars: lowest to highest repetition across, 90 % interval of the prediction upwards.",
        table="Measured and predicted speedups",
        columns=[
            CONFIGURATION,
            Column("measured", "Measured", "ratio"),
            Column("predicted", "Predicted", "ratio"),
            ERROR,
        ],
    )


def _agreement(axes: Axes, low: float, high: float) -> None:
    axes.plot([low, high], [low, high], color=INK, lw=1, zorder=1)
    lower, upper = ([low * scale, high * scale] for scale in (1 - BAND, 1 + BAND))
    axes.fill_between([low, high], lower, upper, color=GREY, alpha=0.15, lw=0, zorder=0)
    if low < 1 < high:
        axes.axvline(1, color=MUTED, lw=0.8, ls=":")
        axes.axhline(1, color=MUTED, lw=0.8, ls=":")
