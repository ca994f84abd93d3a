"""Figures of tokens per step and speedup against gamma and the draft's budget: predicted as lines,
measured as points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from magicdec.comparison import is_paired
from magicdec.naming import draft_name
from magicdec.records import Record
from magicdec.reports.data import ReportData, fastest, siblings
from magicdec.reports.figures.chart import GREY, MARKERS, MUTED, SERIES, Chart, plain_ticks
from magicdec.reports.tables import BUDGET, GAMMA_COLUMN, Column
from magicdec.reports.text import GAMMA_IS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIDES = ("predicted", "measured")
PANELS = (("expected_tokens_per_step", "tokens per step"), ("speedup", "speedup (×)"))
COLUMNS = (
    *(Column(f"tokens_{side}", f"Tokens/step {side}", "number") for side in SIDES),
    *(Column(f"step_{side}", f"Step {side}", "seconds") for side in SIDES),
    *(Column(f"speedup_{side}", f"Speedup {side}", "ratio") for side in SIDES),
    Column("speedup_low", "90 % from", "ratio"), Column("speedup_high", "to", "ratio"),
)  # fmt: skip


class Line(NamedTuple):
    """Configurations of one draft, predicted and measured, in the order of the axis."""

    name: str
    predicted: Sequence[Record]
    measured: Sequence[Record]

    @property
    def rows(self) -> list[Record]:
        return [*self.predicted, *self.measured]


def speedup_by_gamma(data: ReportData) -> Chart | None:
    """Tokens per step and speedup against gamma, at the report's draft, budget, batch and context."""
    reference = _with_gammas(data)
    if reference is None:
        return None
    name = draft_name(reference.draft, reference.draft_method)
    line = Line(name, *(siblings(getattr(data, side), reference, "gamma") for side in SIDES))
    gammas = sorted({row.gamma for row in line.rows})
    if len(gammas) < 2:
        return None
    if reference.draft_budget is not None:
        budget = f" with a budget of {reference.draft_budget}"
    else:
        budget = ""
    setting = f"{_place(reference)}: {name}{budget}, temperature {reference.temperature:g}"
    chart = _drawn("gamma", GAMMA_COLUMN, [line], setting, lambda row: f"{GAMMA_IS}{row.gamma}")
    chart.axes[1].set(xlabel="γ, tokens drafted per step", xlim=(gammas[0] - 0.4, gammas[-1] + 0.4))
    chart.axes[1].set_xticks(gammas)
    return chart


def _with_gammas(data: ReportData) -> Record | None:
    """The report's reference where several gammas are known for it, else the configuration with the
    most of them: of a plan, at its answer's batch and context."""

    def width(row: Record) -> tuple[int, int]:
        measured, predicted = (
            len(siblings(rows, row, "gamma")) for rows in (data.measured, data.predicted)
        )
        return measured, predicted

    reference = data.reference
    if (
        reference is not None
        and reference.is_speculative
        and (width(reference)[0] > 1 or width(reference)[1] > 2)
    ):
        return reference
    rows = [row for row in data.rows if row.is_speculative]
    if data.plan is not None and reference is not None:
        rows = [row for row in rows if _is_alike(row, reference)]
    return max(rows, key=width, default=None)


def _is_alike(row: Record, other: Record) -> bool:
    """Whether two rows are of one model, batch, context, tp size, temperature and, where it is
    known, device.
    """
    same = ("model", "batch_size", "context_len", "tp_size", "temperature")
    is_there = (row.hardware or other.hardware) == other.hardware
    return is_there and all(getattr(row, each) == getattr(other, each) for each in same)


def _place(record: Record) -> str:
    return f"{record.model}, batch {record.batch_size}, context {record.context_len}"


def speedup_by_budget(data: ReportData) -> Chart | None:
    """Tokens per step and speedup against the budget, each at the gamma predicted best, for each
    way to keep one.
    """
    reference = data.reference
    if reference is None or not reference.is_speculative:
        reference = fastest(row for row in data.rows if row.is_speculative and row.speedup)
    if reference is None:
        return None
    by_draft: dict[tuple[str, str], list[Record]] = {}
    for row in data.rows:
        is_comparable = row.draft_budget and row.speedup and row.is_speculative
        if is_comparable and _is_alike(row, reference):
            by_draft.setdefault((row.draft, row.draft_method), []).append(row)
    lines = []
    budgets: set[int] = set()
    for draft, rows in sorted(by_draft.items()):
        line = _best_line(rows, draft_name(*draft))
        own_budgets = {row.draft_budget or 0 for row in line.rows}
        if len(own_budgets) > 1:
            lines.append(line)
            budgets |= own_budgets
    if not lines:
        return None
    setting = f"{_place(reference)}, the best γ of each budget"
    chart = _drawn(
        "budget",
        BUDGET,
        lines,
        setting,
        lambda row: f"{draft_name(row.draft, row.draft_method)} {row.draft_budget}",
    )
    chart.axes[1].set_xscale("log", base=2)
    plain_ticks(chart.axes[1].xaxis, sorted(budgets))
    chart.axes[1].set(xlabel="draft budget (KV slots read per step)")
    return chart


def _best_line(rows: Sequence[Record], name: str) -> Line:
    """At each budget, the configuration with the best predicted speedup, among the measured ones
    where any was measured.
    """
    by_budget: dict[int, list[Record]] = {}
    for row in rows:
        by_budget.setdefault(row.draft_budget or 0, []).append(row)
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
    return Line(name, predicted, measured)


def _pairs(guesses: Sequence[Record], rows: Sequence[Record]) -> list[tuple[Record, Record]]:
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
    name: str, column: Column, lines: Sequence[Line], setting: str, word: Callable[[Record], str]
) -> Chart:
    """Two panels over one axis; a single line's predictions and measurements are shown and hidden
    each.
    """
    chart = Chart(name, height=4.3, rows=2, sharex=True)
    for axes, (field, title) in zip(chart.axes, PANELS, strict=True):
        for line, *look in zip(lines, SERIES, MARKERS, strict=False):
            _draw(chart, axes, line, (column, field), look, is_alone=len(lines) == 1)
        axes.set(ylabel=title)
    chart.axes[1].axhline(1, color=MUTED, lw=0.9, ls=":")
    _legend(chart.axes[0], lines)
    for line in lines:
        sides = [
            {getattr(row, column.name): row for row in side}
            for side in (line.predicted, line.measured)
        ]
        for place in sorted({*sides[0], *sides[1]}):
            pair = [side.get(place) for side in sides]
            values = []
            for each in (PANELS[0][0], "step_s", "speedup"):
                for row in pair:
                    values.append(getattr(row, each, None))
            ends = [getattr(pair[0], f"speedup_{end}", None) for end in ("low", "high")]
            chart.rows.append((line.name, place, *values, *ends))
    return chart.told(
        title=_title(lines, word),
        caption=_caption(setting, lines),
        table=f"By {column.title}",
        name=f"{name}-values",
        columns=[Column("line", "Draft"), column, *COLUMNS],
    )


def _draw(
    chart: Chart,
    axes: Axes,
    line: Line,
    of: tuple[Column, str],
    look: Sequence[str],
    *,
    is_alone: bool,
) -> None:
    (column, field), (colour, marker) = of, look
    if is_alone:
        names = SIDES
    else:
        names = (line.name, line.name)

    def spots(rows: Iterable[Record], name: str = field) -> list[tuple[float, float]]:
        points = []
        for row in rows:
            value = getattr(row, name)
            if value is not None:
                points.append((getattr(row, column.name), value))
        return points

    guesses = spots(line.predicted)
    if guesses:
        chart.part(names[0], *axes.plot(*zip(*guesses, strict=True), color=colour))
    low, high = (spots(line.predicted, f"speedup_{end}") for end in ("low", "high"))
    if field == "speedup" and len(low) == len(high) == len(guesses) > 0:
        band = axes.fill_between(
            [x for x, _ in low],
            [y for _, y in low],
            [y for _, y in high],
            color=colour,
            alpha=0.15,
            lw=0,
        )
        chart.part(names[0], band)
    for row in line.measured:
        if (value := getattr(row, field)) is not None:
            at = (getattr(row, column.name), value)
            if field == "speedup":
                chart.interval(axes, at, (row.speedup_low, row.speedup_high), names[1], colour)
            tip = f"{line.name}, {column.title} {at[0]}: {value:.2f}, measured"
            chart.mark(axes, at, marker, tip, names[1], color=colour)


def _legend(axes: Axes, lines: Sequence[Line]) -> None:
    if len(lines) > 1:
        for line, colour, marker in zip(lines, SERIES, MARKERS, strict=False):
            axes.plot([], [], marker, color=colour, ls="-", label=line.name)
    if any(line.predicted for line in lines) and any(line.measured for line in lines):
        axes.plot([], [], color=GREY, label="predicted")
        axes.plot([], [], "o", color=GREY, label="measured")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="best", ncols=2)


def _caption(setting: str, lines: Sequence[Line]) -> str:
    parts = [setting]
    predicted = list(chain.from_iterable(line.predicted for line in lines))
    if predicted:
        interval = ""
        if any(r.speedup_low for r in predicted):
            interval = ", with its 90\u202f% interval"
        parts.append("Line: predicted" + interval)
    if any(line.measured for line in lines):
        parts.append("Points: measured, with the lowest and highest repetition")
    return ". ".join(parts) + "."


def _title(lines: Sequence[Line], word: Callable[[Record], str]) -> str:
    """The measured best, with the prediction next to it; without measurements, the predicted best."""
    best, guess = (
        fastest(row for line in lines for row in getattr(line, side)) for side in reversed(SIDES)
    )
    kind = "predicted"
    found = guess
    if best is not None:
        kind = "measured"
        found = best
    assert found is not None
    if best is not None and guess is not None:
        beside = f"; predicted {word(guess)}, {guess.speedup or 0:.2f}×"
    else:
        beside = ""
    text = word(found)
    gain = found.speedup or 0.0
    if round(gain, 2) <= 1:
        return f"Nothing gains here: the best, {text}, runs at {gain:.2f}×{beside}"
    return f"{text} gains most: {gain:.2f}× as fast {kind}{beside}"
