"""Figures of measurements: what the draft gets right, and how near the predictions come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from magicdec.counts import Z_90, rate_and_error
from magicdec.naming import describe, draft_name
from magicdec.reports.columns import Column
from magicdec.reports.data import ReportData
from magicdec.reports.figures.chart import (
    GREY,
    INK,
    MARKERS,
    MUTED,
    SERIES,
    Chart,
    spread_of,
)
from magicdec.reports.tables import label_of
from magicdec.reports.text import GAMMA, percent
from magicdec.schema.comparison import Pair, is_paired, summarise
from magicdec.schema.record import Record
from magicdec.units import INTERVAL

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
    intervals: list[tuple[float, float] | None] = [None] * len(rates)
    for place, (rate, count) in enumerate(zip(rates, trials, strict=False)):
        if not count:
            continue
        clustered = row.acceptance_stderr_by_position
        if clustered:
            error = clustered[place]
        else:
            _, error = rate_and_error(rate * count, count)
        low = max(0.0, rate - Z_90 * error)
        high = min(1.0, rate + Z_90 * error)
        intervals[place] = (low, high)
    return intervals


# By position
# --------------------------------------------------------------------------------------------------


def acceptance_by_position(data: ReportData) -> Chart | None:
    """Rate of acceptance at each position, given that all before were accepted; and how many a step
    accepts.
    """
    rows = []
    for row in data.measured:
        if row.is_speculative and row.acceptance_by_position:
            rows.append(row)
    if not rows:
        return None
    comparable = _comparable(rows, data.reference)
    drafts = _deepest_per_method(comparable, data.reference)
    with_histogram = [row for row in drafts if sum(row.acceptance_histogram or ())]
    if with_histogram:
        chart = Chart("positions", height=4.3, rows=2)
    else:
        chart = Chart("positions", height=2.7)
    axes = chart.axes[0]
    for i, row in enumerate(drafts):
        _position_series(chart, row, data.find_predicted(row), i)
    deepest = max(row.gamma for row in drafts)
    axes.set(ylabel="acceptance rate", xlabel="position in the drafted block")
    axes.set_xticks(range(1, deepest + 1))
    axes.set_ylim(top=1.02)  # marks at a rate of 1 are not cut off
    axes.legend(loc="best")
    if with_histogram:
        _histogram(chart, chart.axes[1], with_histogram)
    caption = (
        "Rate at which a drafted token is accepted, given that all before it in its block were. "
        f"Bars: {INTERVAL}s, clustered by sequence (blocks of one resemble each other) where the "
        "record holds it. Dashed: predicted."
    )
    if with_histogram:
        caption += " Below: share of steps by number of accepted tokens."
    return chart.told(
        title=_position_title(drafts[0]),
        caption=caption,
        table="Acceptance by position",
        columns=[
            CONFIGURATION,
            Column("position", "Position", "integer"),
            Column("rate", "Measured", "percent"),
            Column("low", INTERVAL.replace("interval", "from"), "percent"),
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
    if reference is not None:
        for row in rows:
            if is_paired(row, reference):
                return groups[setting(row)]

    def width(rows: Sequence[Record]) -> tuple[int, int]:
        methods = {row.draft_method for row in rows}
        return len(methods), len(rows)

    return max(groups.values(), key=width)


def _position_title(row: Record) -> str:
    """Says that acceptance rises or falls only where the intervals of the first and the last
    position are apart.
    """
    rates = row.acceptance_by_position or [0.0]
    first = f"{percent(rates[0])} of first drafted tokens are accepted"
    intervals = rate_intervals(row)
    if len(rates) < 2 or intervals[0] is None or intervals[-1] is None:
        return first
    first_low, first_high = intervals[0]
    last_low, last_high = intervals[-1]
    trend = "and about as many"
    if last_low > first_high:
        trend = "and more"
    elif last_high < first_low:
        trend = "but fewer"
    last = percent(rates[-1])
    return f"{first}, {trend} of those that reach position {len(rates)}: {last}"


def _deepest_per_method(
    rows: Sequence[Record], reference: Record | None
) -> list[Record]:
    """For each draft, the measured row nearest to the reference's setting, then with the most
    positions.
    """

    def nearness(row: Record) -> tuple[bool, bool, int, float]:
        trials = sum(row.acceptance_trials_by_position or [0])
        if reference is None:
            return False, False, row.gamma, trials
        same_batch = row.batch_size == reference.batch_size
        same_load = same_batch and row.context_len == reference.context_len
        same_budget = row.draft_budget == reference.draft_budget
        return same_load, same_budget, row.gamma, trials

    deepest: dict[tuple[str, str], Record] = {}
    for row in rows:
        key = (row.draft, row.draft_method)
        deepest[key] = max(deepest.get(key, row), row, key=nearness)
    first = None
    if reference is not None:
        first = (reference.draft, reference.draft_method)

    def place(row: Record) -> tuple[bool, str]:
        return (row.draft, row.draft_method) != first, row.draft_method

    return sorted(deepest.values(), key=place)[:4]


def _position_series(
    chart: Chart, row: Record, guess: Record | None, index: int
) -> None:
    """Draws one draft: its measured rates with their intervals, and the predicted ones dashed."""
    axes = chart.axes[0]
    colour = SERIES[index % len(SERIES)]
    marker = MARKERS[index % len(MARKERS)]
    offset = 0.06 * index  # else intervals of several drafts would cover each other
    series = describe(row, symbol=GAMMA)
    predicted: Sequence[float] = []
    if guess is not None:
        predicted = guess.acceptance_by_position or []
    tried = _tried_positions(row)
    places = [position + offset for position, _, _ in tried]
    rates = [rate for _, rate, _ in tried]
    chart.part(series, *axes.plot(places, rates, color=colour, lw=1, alpha=0.5))
    intervals = rate_intervals(row)
    for position, rate, trials in tried:
        ends = intervals[position - 1] or (None, None)
        at = (position + offset, rate)
        chart.interval(axes, at, ends, series, colour)
        tip = f"{series}, position {position}: {rate * 100:.1f} %"
        if trials:
            tip += f" of {trials}"
        chart.mark(axes, at, marker, tip, series, color=colour)
        prediction = None
        if position <= len(predicted):
            prediction = predicted[position - 1]
        chart.rows.append((series, position, rate, *ends, trials, prediction))
    if predicted:
        positions = range(1, len(predicted) + 1)
        dashed = axes.plot(positions, list(predicted), color=colour, ls="--", lw=1.2)
        chart.part(series, *dashed)
    axes.plot([], [], marker, color=colour, label=series)


def _tried_positions(row: Record) -> list[tuple[int, float, int | None]]:
    """Position, rate and number of trials, without positions that no draft reached."""
    rates = row.acceptance_by_position or []
    trials: Sequence[int | None] = row.acceptance_trials_by_position or [None] * len(
        rates
    )
    tried = []
    for position, (rate, count) in enumerate(zip(rates, trials, strict=False), 1):
        if count != 0:
            tried.append((position, rate, count))
    return tried


def _histogram(chart: Chart, axes: Axes, rows: Sequence[Record]) -> None:
    width = 0.8 / len(rows)
    middle = (len(rows) - 1) / 2
    for i, row in enumerate(rows):
        counts = row.acceptance_histogram or []
        series = describe(row, symbol=GAMMA)
        colour = SERIES[i % len(SERIES)]
        total = sum(counts)
        shift = (i - middle) * width
        for accepted, count in enumerate(counts):
            share = 100 * count / total
            place = accepted + shift
            (bar,) = axes.bar(place, share, width * 0.92, color=colour, lw=0)
            tip = f"{series}: {accepted} accepted in {share:.1f} % of {total} steps"
            chart.tip(bar, tip, series)
    axes.set(ylabel="share of steps (%)", xlabel="tokens accepted in a step")
    lengths = [len(row.acceptance_histogram or []) for row in rows]
    axes.set_xticks(range(max(lengths)))
    axes.grid(visible=False, axis="x")


# Predicted against measured
# ------------------------------------------------------------------------------------------


def predicted_vs_measured(data: ReportData) -> Chart | None:
    """Speedup of every configuration: measured across, predicted upwards; on the diagonal they
    agree.
    """
    pairs = [
        pair for pair in data.comparison.pairs if pair.error("speedup") is not None
    ]
    summary = summarise("speedup", pairs)
    if summary is None:
        return None
    chart = Chart("scatter", height=3.9)
    (axes,) = chart.axes
    values = []
    for pair in pairs:
        for row in (pair.measured, pair.predicted):
            for value in (row.speedup, row.speedup_low, row.speedup_high):
                if value is not None:
                    values.append(value)
    low = min(*values, 1.0) * 0.94
    high = max(*values, 1.0) * 1.06
    _agreement(axes, low, high)
    by_draft: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        name = draft_name(pair.measured.draft, pair.measured.draft_method)
        by_draft[name].append(pair)
    for i, draft in enumerate(sorted(by_draft)):
        colour = SERIES[i % len(SERIES)]
        marker = MARKERS[i % len(MARKERS)]
        for pair in by_draft[draft]:
            _draw_pair(chart, pair, draft, colour, marker)
        axes.plot([], [], marker, color=colour, ls="none", label=draft)
    axes.set(xlabel="measured speedup (×)", ylabel="predicted speedup (×)")
    axes.set(xlim=(low, high), ylim=(low, high))
    axes.set_aspect("equal")
    if len(by_draft) > 1:
        axes.legend(loc="upper left", handletextpad=0.2)
    points = "one configuration"
    if len(pairs) > 1:
        points = f"{len(pairs)} configurations"
    error = percent(summary.median_error, 1)
    return chart.told(
        title=f"Predicted speedups are off by {error} (median of {points})",
        caption="Each mark is one configuration. On the diagonal prediction and measurement agree; "
        "the band is ±10 %. "
        f"Bars: lowest to highest repetition across, {INTERVAL} of the prediction upwards.",
        table="Measured and predicted speedups",
        columns=[
            CONFIGURATION,
            Column("measured", "Measured", "ratio"),
            Column("predicted", "Predicted", "ratio"),
            ERROR,
        ],
    )


def _draw_pair(chart: Chart, pair: Pair, draft: str, colour: str, marker: str) -> None:
    """The mark of one configuration with the bars of both intervals."""
    (axes,) = chart.axes
    measured = pair.measured
    predicted = pair.predicted
    if measured.speedup is None or predicted.speedup is None:
        return
    bars = axes.errorbar(
        measured.speedup,
        predicted.speedup,
        xerr=spread_of(measured.speedup, (measured.speedup_low, measured.speedup_high)),
        yerr=spread_of(
            predicted.speedup, (predicted.speedup_low, predicted.speedup_high)
        ),
        fmt="none",
        ecolor=GREY,
        lw=0.7,
        alpha=0.6,
    )
    chart.part(draft, *bars.lines[2])
    label = label_of(measured)
    at = (measured.speedup, predicted.speedup)
    tip = "{}: measured {:.2f}×, predicted {:.2f}×".format(label, *at)
    chart.mark(axes, at, marker, tip, draft, color=colour, mew=0.5)
    chart.rows.append((label, *at, pair.error("speedup")))


def _agreement(axes: Axes, low: float, high: float) -> None:
    """The diagonal with the band around it, and the lines at which nothing is gained."""
    ends = [low, high]
    axes.plot(ends, ends, color=INK, lw=1, zorder=1)
    lower = [end * (1 - BAND) for end in ends]
    upper = [end * (1 + BAND) for end in ends]
    axes.fill_between(ends, lower, upper, color=GREY, alpha=0.15, lw=0, zorder=0)
    if low < 1 < high:
        axes.axvline(1, color=MUTED, lw=0.8, ls=":")
        axes.axhline(1, color=MUTED, lw=0.8, ls=":")
