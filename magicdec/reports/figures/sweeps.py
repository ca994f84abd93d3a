"""Figures of tokens per step and speedup against gamma and the draft's budget: predicted as lines,
measured as points."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from magicdec.naming import draft_name
from magicdec.reports.columns import BUDGET, GAMMA_COLUMN, Column, Value
from magicdec.reports.data import ReportData, fastest, siblings
from magicdec.reports.figures.chart import (
    GREY,
    MARKERS,
    MUTED,
    SERIES,
    Chart,
    plain_ticks,
)
from magicdec.reports.text import GAMMA_IS
from magicdec.schema.comparison import is_paired
from magicdec.schema.record import Record
from magicdec.units import INTERVAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIDES = ("predicted", "measured")
PANELS = (("expected_tokens_per_step", "tokens per step"), ("speedup", "speedup (×)"))
SWEEP_COLUMNS = (
    Column("tokens_predicted", "Tokens/step predicted", "number"),
    Column("tokens_measured", "Tokens/step measured", "number"),
    Column("step_predicted", "Step predicted", "seconds"),
    Column("step_measured", "Step measured", "seconds"),
    Column("speedup_predicted", "Speedup predicted", "ratio"),
    Column("speedup_measured", "Speedup measured", "ratio"),
    Column("speedup_low", INTERVAL.replace("interval", "from"), "ratio"),
    Column("speedup_high", "to", "ratio"),
)


class DraftCurve(NamedTuple):
    """Configurations of one draft, predicted and measured, in the order of the axis."""

    name: str
    predicted: Sequence[Record]
    measured: Sequence[Record]

    @property
    def rows(self) -> list[Record]:
        return [*self.predicted, *self.measured]


def speedup_by_gamma(data: ReportData) -> Chart | None:
    """Tokens per step and speedup against gamma, at the report's draft, budget and load."""
    reference = _with_gammas(data)
    if reference is None:
        return None
    name = draft_name(reference.draft, reference.draft_method)
    predicted = siblings(data.predicted, reference, "gamma")
    measured = siblings(data.measured, reference, "gamma")
    line = DraftCurve(name, predicted, measured)
    gammas = sorted({row.gamma for row in line.rows})
    if len(gammas) < 2:
        return None
    budget = ""
    if reference.draft_budget is not None:
        budget = f" with a budget of {reference.draft_budget}"
    draft = f"{name}{budget}, temperature {reference.temperature:g}"
    setting = f"{_place(reference)}: {draft}"
    chart = _drawn(
        "gamma", GAMMA_COLUMN, [line], setting, lambda row: f"{GAMMA_IS}{row.gamma}"
    )
    lower = chart.axes[1]
    ends = (gammas[0] - 0.4, gammas[-1] + 0.4)
    lower.set(xlabel="γ, tokens drafted per step", xlim=ends)
    lower.set_xticks(gammas)
    return chart


def _with_gammas(data: ReportData) -> Record | None:
    """The report's reference where several gammas are known for it, else the configuration with the
    most of them: of a plan, at its answer's batch and context."""

    def width(row: Record) -> tuple[int, int]:
        measured = len(siblings(data.measured, row, "gamma"))
        predicted = len(siblings(data.predicted, row, "gamma"))
        return measured, predicted

    reference = data.reference
    if reference is not None and reference.is_speculative:
        measured, predicted = width(reference)
        if measured > 1 or predicted > 2:
            return reference
    rows = [row for row in data.rows if row.is_speculative]
    if data.plan is not None and reference is not None:
        rows = [row for row in rows if _is_alike(row, reference)]
    return max(rows, key=width, default=None)


def _is_alike(row: Record, other: Record) -> bool:
    """Whether two rows are of one model, batch, context, tp size, temperature and, where it is
    known, device.
    """
    if (row.hardware or other.hardware) != other.hardware:
        return False
    for field in ("model", "batch_size", "context_len", "tp_size", "temperature"):
        if getattr(row, field) != getattr(other, field):
            return False
    return True


def _place(record: Record) -> str:
    return f"{record.model}, batch {record.batch_size}, context {record.context_len}"


def speedup_by_budget(data: ReportData) -> Chart | None:
    """Tokens per step and speedup against the budget, each at the gamma predicted best, for each
    way to keep one.
    """
    reference = data.reference
    if reference is None or not reference.is_speculative:
        reference = fastest(
            row for row in data.rows if row.is_speculative and row.speedup
        )
    if reference is None:
        return None
    lines = []
    budgets: set[int] = set()
    # The rows with a budget that are of the reference's setting, by draft and method.
    by_draft: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for row in data.rows:
        has_gain = row.is_speculative and row.speedup
        has_budget = row.draft_budget is not None
        if has_gain and has_budget and _is_alike(row, reference):
            by_draft[row.draft, row.draft_method].append(row)
    for draft, rows in sorted(by_draft.items()):
        line = _best_line(rows, draft_name(*draft))
        own_budgets = {_slots(row) for row in line.rows}
        if len(own_budgets) > 1:
            lines.append(line)
            budgets |= own_budgets
    if not lines:
        return None
    setting = f"{_place(reference)}, the best γ of each budget"

    def word(row: Record) -> str:
        return f"{draft_name(row.draft, row.draft_method)} {row.draft_budget}"

    chart = _drawn("budget", BUDGET, lines, setting, word)
    lower = chart.axes[1]
    lower.set_xscale("log", base=2)
    plain_ticks(lower.xaxis, sorted(budgets))
    lower.set(xlabel="draft budget (KV slots read per step)")
    return chart


def _slots(row: Record) -> int:
    """The budget of a row that has one."""
    assert row.draft_budget is not None
    return row.draft_budget


def _best_line(rows: Sequence[Record], name: str) -> DraftCurve:
    """At each budget, the configuration with the best predicted speedup, among the measured ones
    where any was measured.
    """
    by_budget: dict[int, list[Record]] = defaultdict(list)
    for row in rows:
        by_budget[_slots(row)].append(row)
    predicted: list[Record] = []
    measured: list[Record] = []
    for _, of_budget in sorted(by_budget.items()):
        guesses = [row for row in of_budget if row.source != "measured"]
        pairs = _pairs(guesses, of_budget)
        if pairs:
            guess, real = max(pairs, key=lambda pair: _speedup(pair[0]))
            predicted.append(guess)
            measured.append(real)
        elif guesses:
            predicted.append(max(guesses, key=_speedup))
        else:
            measured.append(max(of_budget, key=_speedup))
    return DraftCurve(name, predicted, measured)


def _pairs(
    guesses: Sequence[Record], rows: Sequence[Record]
) -> list[tuple[Record, Record]]:
    """Predictions with the measurements of the same configuration."""
    pairs = []
    for guess in guesses:
        for row in rows:
            if row.source == "measured" and is_paired(guess, row):
                pairs.append((guess, row))
    return pairs


def _speedup(row: Record) -> float:
    return row.speedup or 0.0


def _drawn(
    name: str,
    column: Column,
    lines: Sequence[DraftCurve],
    setting: str,
    word: Callable[[Record], str],
) -> Chart:
    """Two panels over one axis; a single line's predictions and measurements are shown and hidden
    each.
    """
    chart = Chart(name, height=4.3, rows=2, sharex=True)
    for axes, (field, title) in zip(chart.axes, PANELS, strict=True):
        panel = Panel(chart, axes, column.name, field)
        for line, colour, marker in zip(lines, SERIES, MARKERS, strict=False):
            if len(lines) == 1:
                series = SIDES
            else:
                series = (line.name, line.name)
            _draw_predicted(panel, line, series[0], colour)
            _draw_measured(panel, line, series[1], colour, marker, column.title)
        axes.set(ylabel=title)
    chart.axes[1].axhline(1, color=MUTED, lw=0.9, ls=":")
    _legend(chart.axes[0], lines)
    for line in lines:
        chart.rows += _values(line, column.name)
    return chart.told(
        title=_title(lines, word),
        caption=_caption(setting, lines),
        table=f"By {column.title}",
        name=f"{name}-values",
        columns=[Column("line", "Draft"), column, *SWEEP_COLUMNS],
    )


def _values(line: DraftCurve, axis: str) -> Iterable[tuple[Value, ...]]:
    """Rows of the table: a place on the axis, then predicted and measured values in the order of
    SWEEP_COLUMNS.
    """
    predicted = {getattr(row, axis): row for row in line.predicted}
    measured = {getattr(row, axis): row for row in line.measured}
    for place in sorted({*predicted, *measured}):
        guess = predicted.get(place)
        real = measured.get(place)
        values: list[Value] = [line.name, place]
        for field in ("expected_tokens_per_step", "step_s", "speedup"):
            values.append(getattr(guess, field, None))
            values.append(getattr(real, field, None))
        values.append(getattr(guess, "speedup_low", None))
        values.append(getattr(guess, "speedup_high", None))
        yield tuple(values)


class Panel(NamedTuple):
    """Axes of a chart, and the fields that they show across and upwards."""

    chart: Chart
    axes: Axes
    across: str
    upwards: str

    def spots(
        self, rows: Iterable[Record], upwards: str = ""
    ) -> list[tuple[float, float]]:
        """The points of the rows that have the value."""
        points = []
        for row in rows:
            value = getattr(row, upwards or self.upwards)
            if value is not None:
                points.append((getattr(row, self.across), value))
        return points


def _draw_predicted(panel: Panel, line: DraftCurve, series: str, colour: str) -> None:
    """A line, with the band of its interval where that is of every point."""
    points = panel.spots(line.predicted)
    if not points:
        return
    places = [place for place, _ in points]
    values = [value for _, value in points]
    panel.chart.part(series, *panel.axes.plot(places, values, color=colour))
    if panel.upwards != "speedup":
        return
    low = panel.spots(line.predicted, "speedup_low")
    high = panel.spots(line.predicted, "speedup_high")
    if len(low) == len(high) == len(points):
        lower = [value for _, value in low]
        upper = [value for _, value in high]
        band = panel.axes.fill_between(
            places, lower, upper, color=colour, alpha=0.15, lw=0
        )
        panel.chart.part(series, band)


def _draw_measured(
    panel: Panel,
    line: DraftCurve,
    series: str,
    colour: str,
    marker: str,
    axis_title: str,
) -> None:
    """Points, with the ends of their repetitions."""
    chart = panel.chart
    for row in line.measured:
        value = getattr(row, panel.upwards)
        if value is None:
            continue
        place = getattr(row, panel.across)
        at = (place, value)
        if panel.upwards == "speedup":
            ends = (row.speedup_low, row.speedup_high)
            chart.interval(panel.axes, at, ends, series, colour)
        tip = f"{line.name}, {axis_title} {place}: {value:.2f}, measured"
        chart.mark(panel.axes, at, marker, tip, series, color=colour)


def _legend(axes: Axes, lines: Sequence[DraftCurve]) -> None:
    if len(lines) > 1:
        for line, colour, marker in zip(lines, SERIES, MARKERS, strict=False):
            axes.plot([], [], marker, color=colour, ls="-", label=line.name)
    has_predicted = any(line.predicted for line in lines)
    if has_predicted and any(line.measured for line in lines):
        axes.plot([], [], color=GREY, label="predicted")
        axes.plot([], [], "o", color=GREY, label="measured")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="best", ncols=2)


def _caption(setting: str, lines: Sequence[DraftCurve]) -> str:
    parts = [setting]
    predicted = list(chain.from_iterable(line.predicted for line in lines))
    if predicted:
        interval = ""
        if any(row.speedup_low for row in predicted):
            interval = f", with its {INTERVAL}".replace(" %", "\u202f%")
        parts.append("Line: predicted" + interval)
    if any(line.measured for line in lines):
        parts.append("Points: measured, with the lowest and highest repetition")
    return ". ".join(parts) + "."


def _title(lines: Sequence[DraftCurve], word: Callable[[Record], str]) -> str:
    """Names the measured best with its prediction; without measurements, the predicted best."""
    measured = fastest(chain.from_iterable(line.measured for line in lines))
    predicted = fastest(chain.from_iterable(line.predicted for line in lines))
    best = measured or predicted
    assert best is not None
    kind = "predicted"
    prediction = ""
    if measured is not None:
        kind = "measured"
        if predicted is not None:
            prediction = f"; predicted {word(predicted)}, {_speedup(predicted):.2f}×"
    text = word(best)
    gain = f"{_speedup(best):.2f}×"
    if round(_speedup(best), 2) <= 1:
        return f"Nothing gains here: the best, {text}, runs at {gain}{prediction}"
    return f"{text} gains most: {gain} as fast {kind}{prediction}"
