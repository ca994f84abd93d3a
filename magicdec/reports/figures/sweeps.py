"""Figures of the speedup against gamma, the draft's budget and the batch: predicted as lines, measured as points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from magicdec.comparison import is_paired
from magicdec.naming import draft_name
from magicdec.plan_document import GammaTable
from magicdec.records import Record
from magicdec.reports.data import ReportData, siblings
from magicdec.reports.figures.chart import Chart
from magicdec.reports.style import (
    BLUE,
    GAMMA,
    GAMMA_IS,
    GREY,
    MARKERS,
    MUTED,
    PAPER,
    RED,
    SERIES,
    Tips,
    compact_tokens,
    new_figure,
    plain_ticks,
)
from magicdec.reports.tables import GAMMA_COLUMN, Column, Kind, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LINES = 4
LONGEST_LABEL = 14
APART = 0.07
"""Least distance between the labels of two lines, as a share of the axis."""


class Spot(NamedTuple):
    """A value at a place, with the ends of its interval or of its repetitions."""

    x: float
    value: float
    low: float | None = None
    high: float | None = None


class Line(NamedTuple):
    """Predictions and measurements that differ in what the axis shows alone."""

    name: str
    predicted: Sequence[Spot]
    measured: Sequence[Spot]


def spots(rows: Iterable[Record], x: str, field: str = "speedup") -> list[Spot]:
    """The values of a field of records, in the order of the axis."""
    has_ends = field == "speedup"
    found = [
        Spot(getattr(row, x), value, *((row.speedup_low, row.speedup_high) if has_ends else ()))
        for row in rows
        if (value := getattr(row, field)) is not None
    ]
    return sorted(found)


def draw(axes: Axes, line: Line, tips: Tips, colour: str, marker: str, what: str, *, apart: bool = False) -> None:
    """A line with its band, and points with bars; `apart` shows and hides predictions and measurements each."""
    guess, real = ("predicted", "measured") if apart else (line.name, line.name)
    if line.predicted:
        x, y = [spot.x for spot in line.predicted], [spot.value for spot in line.predicted]
        tips.belongs(guess, *axes.plot(x, y, color=colour))
        low, high = [s.low for s in line.predicted if s.low], [s.high for s in line.predicted if s.high]
        if len(low) == len(high) == len(x):
            tips.belongs(guess, axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0))
    for spot in line.measured:
        if spot.low is not None and spot.high is not None:
            spread = [[max(spot.value - spot.low, 0)], [max(spot.high - spot.value, 0)]]
            bars = axes.errorbar(spot.x, spot.value, yerr=spread, fmt="none", ecolor=colour, lw=1)
            tips.belongs(real, *bars.lines[2])
        (mark,) = axes.plot(spot.x, spot.value, marker, color=colour, mec=PAPER, mew=0.6)
        tips.add(mark, f"{line.name}{what} {spot.x:g}: {spot.value:.2f}, measured", real)


def _legend(axes: Axes, lines: Sequence[Line]) -> None:
    if any(line.predicted for line in lines) and any(line.measured for line in lines):
        axes.plot([], [], color=GREY, label="predicted")
        axes.plot([], [], "o", color=GREY, label="measured")
        axes.legend(loc="upper left", ncols=2)


def _label_ends(axes: Axes, lines: Sequence[Line], colours: Sequence[str]) -> None:
    """Each line's name at its right end, moved up where two would overlap; long names stand in the legend."""
    if max(len(line.name) for line in lines) > LONGEST_LABEL:
        for line, colour in zip(lines, colours, strict=True):
            axes.plot([], [], color=colour, label=line.name)
        axes.legend(loc="best")
        return
    ends = [
        ((line.predicted or line.measured)[-1], line.name, colour) for line, colour in zip(lines, colours, strict=True)
    ]
    low, high = axes.get_ylim()
    last = low - (high - low)
    for spot, name, colour in sorted(ends, key=lambda end: end[0].value):
        last = max(spot.value, last + APART * (high - low))
        axes.annotate(name, (spot.x, last), xytext=(6, 0), textcoords="offset points", va="center", color=colour)


def _caption(setting: str, lines: Sequence[Line]) -> str:
    parts = [setting]
    if predicted := [spot for line in lines for spot in line.predicted]:
        parts.append("Line: predicted" + (", with its 90\u202f% interval" if any(s.low for s in predicted) else ""))
    if any(line.measured for line in lines):
        parts.append("Points: measured, with the lowest and highest repetition")
    return ". ".join(parts) + "."


def _best_title(word: Callable[[float], str], lines: Sequence[Line]) -> str:
    """The measured best, with the prediction next to it; without measurements, the predicted best."""
    best, guess = (
        max((spot for line in lines for spot in getattr(line, side)), key=lambda spot: spot.value, default=None)
        for side in ("measured", "predicted")
    )
    kind, found = ("measured", best) if best is not None else ("predicted", guess)
    assert found is not None
    beside = f"; predicted {word(guess.x)}, {guess.value:.2f}×" if best is not None and guess is not None else ""
    text = word(found.x)
    if found.value <= 1:
        return f"Nothing gains here: the best, {text}, runs at {found.value:.2f}×{beside}"
    text = text if text.startswith(GAMMA) else text[0].upper() + text[1:]
    return f"{text} gains most: {found.value:.2f}× as fast {kind}{beside}"


# By gamma ------------------------------------------------------------------------------------------------------------


def speedup_by_gamma(data: ReportData) -> Chart | None:
    """Tokens per step and speedup against gamma: the predicted curve, and the measured points on it."""
    reference = _swept_reference(data)
    if reference is None:
        return None
    predicted, measured = (siblings(rows, reference, "gamma") for rows in (data.predicted, data.measured))
    gammas = sorted({r.gamma for r in (*predicted, *measured)})
    if len(gammas) < 2:
        return None
    figure, (upper, lower) = new_figure(height=4.3, rows=2, sharex=True)
    tips = Tips("gamma")
    for axes, field, colour, name in (
        (upper, "expected_tokens_per_step", BLUE, "tokens per step"), (lower, "speedup", RED, "speedup"),
    ):  # fmt: skip
        line = Line(name, spots(predicted, "gamma", field), spots(measured, "gamma", field))
        draw(axes, line, tips, colour, "o", ", γ =", apart=True)
    lower.axhline(1, color=MUTED, lw=0.9, ls=":")
    upper.set(ylabel="tokens per step")
    lower.set(ylabel="speedup (×)", xlabel="γ, tokens drafted per step", xlim=(min(gammas) - 0.4, max(gammas) + 0.4))
    lower.set_xticks(gammas)
    _legend(upper, [line])
    sides = [{row.gamma: row for row in side} for side in (predicted, measured)]
    rows = tuple(
        (gamma, *(getattr(side.get(gamma), field, None) for *_, field in _GAMMA_FIELDS for side in sides))
        for gamma in gammas
    )
    draft = draft_name(reference.draft, reference.draft_method)
    budget = f" with a budget of {reference.draft_budget}" if reference.draft_budget is not None else ""
    return Chart(
        title=_best_title(lambda gamma: f"{GAMMA_IS}{gamma:g}", [line]),
        caption=_caption(f"{_place(reference)}: {draft}{budget}, temperature {reference.temperature:g}", [line]),
        figure=figure,
        marks=tips,
        table=Table("gamma-values", "By γ", _GAMMA_COLUMNS, rows),
    )


_GAMMA_FIELDS: tuple[tuple[str, str, Kind, str], ...] = (
    ("tokens", "Tokens/step", "number", "expected_tokens_per_step"),
    ("step", "Step", "seconds", "step_s"),
    ("speedup", "Speedup", "ratio", "speedup"),
)
_GAMMA_COLUMNS = (
    GAMMA_COLUMN,
    *(Column(f"{name}_{side}", f"{title} {side}", kind) for name, title, kind, _ in _GAMMA_FIELDS
      for side in ("predicted", "measured")),
)  # fmt: skip


def _swept_reference(data: ReportData) -> Record | None:
    """The report's reference where several gammas are known for it, else the configuration with the most of them."""
    rows = [r for r in (*data.measured, *data.predicted) if r.is_speculative]
    if not rows:
        return None

    def width(row: Record) -> tuple[int, int]:
        measured, predicted = (len(siblings(rs, row, "gamma")) for rs in (data.measured, data.predicted))
        return measured, predicted

    reference = data.reference
    if reference is not None and reference.is_speculative and (width(reference)[0] > 1 or width(reference)[1] > 2):
        return reference
    return max(rows, key=width)


def _place(record: Record) -> str:
    return f"{record.model}, batch {record.batch_size}, context {record.context_len}"


# By budget and by batch ----------------------------------------------------------------------------------------------


def speedup_by_budget(data: ReportData) -> Chart | None:
    """Speedup against the draft's budget, each at the gamma predicted best, for each way to keep a budget."""
    reference = _leading(data)
    if reference is None:
        return None
    place = (reference.batch_size, reference.context_len, reference.hardware, reference.temperature)

    def here(rows: Sequence[Record]) -> list[Record]:
        return [
            r for r in rows if r.is_speculative and r.speedup and r.draft_budget and r.model == reference.model
            if (r.batch_size, r.context_len, r.hardware or place[2], r.temperature) == place
        ]  # fmt: skip

    every = [*here(data.measured), *here(data.predicted)]
    methods = sorted({(r.draft, r.draft_method) for r in every})
    lines = [
        line for method in methods
        if (line := _best_line(data, [r for r in every if (r.draft, r.draft_method) == method],
                               "draft_budget", draft_name(*method)))
    ]  # fmt: skip
    return _chart(data, "speedup-by-budget", [line for line in lines if len({s.x for s in _all(line)}) > 1],
                  "draft budget (KV slots read per step)", f"{_place(reference)}, the best γ of each budget",
                  lambda lines: _best_title(lambda x: f"a budget of {x:g}", lines))  # fmt: skip


def speedup_by_batch(data: ReportData) -> Chart | None:
    """Speedup against the batch for several contexts, at the budget and gamma predicted best of each."""
    reference = _leading(data)
    if reference is None:
        return None
    own = (reference.model, reference.draft, reference.draft_method, reference.temperature)
    every = [
        r for r in (*data.measured, *data.predicted)
        if r.is_speculative and r.speedup and (r.model, r.draft, r.draft_method, r.temperature) == own
        if not (r.hardware and reference.hardware) or r.hardware == reference.hardware
    ]  # fmt: skip
    contexts = sorted({r.context_len for r in every})
    lines = [
        line for context in contexts
        if (line := _best_line(data, [r for r in every if r.context_len == context], "batch_size", _named(context)))
    ]  # fmt: skip
    if not any(len({s.x for s in _all(line)}) > 1 for line in lines) and data.plan is not None:
        measured = {line.name: line.measured for line in lines}
        lines = [Line(name, found, measured.get(name, [])) for name, found in _of_table(data.plan.gamma_table)]
    draft = draft_name(reference.draft, reference.draft_method)
    return _chart(data, "speedup-by-batch", lines, "batch size", f"{reference.model}, {draft}", _batch_title)


def _leading(data: ReportData) -> Record | None:
    """The report's reference, or where that is no draft the fastest draft."""
    if data.reference is not None and data.reference.is_speculative:
        return data.reference
    rows = [r for r in (*data.measured, *data.predicted) if r.is_speculative and r.speedup]
    return max(rows, key=lambda r: r.speedup or 0.0, default=None)


def _named(context: int) -> str:
    return f"context {compact_tokens(context)}"


def _of_table(table: GammaTable) -> list[tuple[str, list[Spot]]]:
    """Lines of the plan's table, of contexts at which it pays somewhere."""
    if table.speedup_low is None or table.speedup_high is None:
        return []
    low, high, found = table.speedup_low, table.speedup_high, []
    for c, context in enumerate(table.context_lens):
        line = [
            Spot(batch, (low[b][c] * high[b][c]) ** 0.5, low[b][c], high[b][c])
            for b, batch in enumerate(table.batch_sizes)
            if table.fits[b][c] and low[b][c] > 0
        ]
        found += [(_named(context), line)] if len(line) > 1 else []
    return found


def _best_line(data: ReportData, rows: Sequence[Record], x: str, name: str) -> Line | None:
    """At each place the configuration that is predicted best, of those that were measured there if any was."""
    predicted, measured = [], []
    for value in sorted({getattr(r, x) for r in rows}):
        here = [r for r in rows if getattr(r, x) == value]
        guesses = [r for r in here if r.source != "measured"]
        pairs = [(g, m) for g in guesses for m in here if m.source == "measured" and is_paired(g, m)]
        if pairs:
            guess, real = max(pairs, key=lambda pair: pair[0].speedup or 0.0)
            predicted.append(guess)
            measured.append(real)
        elif guesses:
            predicted.append(max(guesses, key=lambda r: r.speedup or 0.0))
        else:
            measured.append(max(here, key=lambda r: r.speedup or 0.0))
    return Line(name, spots(predicted, x), spots(measured, x)) if rows else None


def _all(line: Line) -> list[Spot]:
    return [*line.predicted, *line.measured]


def _batch_title(lines: Sequence[Line]) -> str:
    """The two ends of the line that reaches highest: measured where both ends were."""
    line = max((each for each in lines if len(_all(each)) > 1), key=lambda each: _all(each)[-1].value)
    kind, ends = ("measured", line.measured) if len(line.measured) > 1 else ("predicted", line.predicted)
    first, last = ends[0], ends[-1]
    trend = "rises" if last.value > first.value * 1.02 else "falls" if last.value < first.value * 0.98 else "stays"
    return (
        f"At {line.name} the {kind} speedup {trend} from {first.value:.2f}× at batch {first.x:g} to {last.value:.2f}× "
        f"at {last.x:g}"
    )


def _chart(
    data: ReportData,
    name: str,
    lines: Sequence[Line],
    xlabel: str,
    setting: str,
    title: Callable[[Sequence[Line]], str],
) -> Chart | None:
    """Lines over a logarithmic axis, labelled at their ends."""
    if not any(len({spot.x for spot in _all(line)}) > 1 for line in lines):
        return None
    if len(lines) > MOST_LINES:
        lines = [lines[round(i * (len(lines) - 1) / (MOST_LINES - 1))] for i in range(MOST_LINES)]
    figure, (axes,) = new_figure(height=3.4)
    tips = Tips(name)
    axes.set_xscale("log", base=2)
    for i, line in enumerate(lines):
        draw(axes, line, tips, SERIES[i], MARKERS[i], f", {xlabel.partition(' (')[0]}")
    axes.axhline(1, color=MUTED, lw=0.9, ls=":")
    places = sorted({spot.x for line in lines for spot in _all(line)})
    plain_ticks(axes.xaxis, places)
    axes.set(xlabel=xlabel, ylabel="speedup (×)", xlim=(places[0] / 1.15, places[-1] * (places[-1] / places[0]) ** 0.3))
    _legend(axes, lines)
    _label_ends(axes, lines, SERIES[: len(lines)])
    columns = (
        Column("line", "Line"),
        Column("x", xlabel[0].upper() + xlabel[1:], "integer"),
        *(Column(f"speedup_{kind}", text, "ratio") for kind, text in
          (("predicted", "Predicted"), ("low", "90 % from"), ("high", "to"), ("measured", "Measured"))),
    )  # fmt: skip
    rows = []
    for line in lines:
        real, guess = ({spot.x: spot for spot in side} for side in (line.measured, line.predicted))
        for x in sorted({*real, *guess}):
            rows.append(
                (line.name, x, *(guess[x][1:] if x in guess else (None,) * 3), real[x].value if x in real else None)
            )
    return Chart(
        title=title(lines),
        caption=_caption(setting, lines),
        figure=figure,
        marks=tips,
        table=Table(name, f"Speedup by {xlabel.partition(' (')[0]}", columns, tuple(rows)),
    )
