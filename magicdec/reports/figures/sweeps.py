"""Figures of the speedup against gamma, the draft's budget and the batch: predicted as lines, measured as points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from magicdec.comparison import is_paired
from magicdec.naming import draft_name
from magicdec.plan_document import GammaTable
from magicdec.records import Record
from magicdec.reports.data import ReportData, fastest, siblings
from magicdec.reports.figures.chart import BLUE, GREY, MARKERS, MUTED, RED, SERIES, Chart, plain_ticks
from magicdec.reports.tables import GAMMA_COLUMN, Column, Kind
from magicdec.reports.text import GAMMA, GAMMA_IS, compact_tokens

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

    @property
    def spots(self) -> list[Spot]:
        return [*self.predicted, *self.measured]

    @property
    def is_sweep(self) -> bool:
        return len({spot.x for spot in self.spots}) > 1


def spots(rows: Iterable[Record], x: str, field: str = "speedup") -> list[Spot]:
    """The values of a field of records, in the order of the axis."""
    has_ends = field == "speedup"
    return sorted(
        Spot(getattr(row, x), value, *((row.speedup_low, row.speedup_high) if has_ends else ()))
        for row in rows
        if (value := getattr(row, field)) is not None
    )


def draw(chart: Chart, axes: Axes, line: Line, look: tuple[str, str], what: str, *, apart: bool = False) -> None:
    """A line with its band, and points with bars; `apart` shows and hides predictions and measurements each."""
    colour, marker = look
    guess, real = ("predicted", "measured") if apart else (line.name, line.name)
    if line.predicted:
        x, y = [spot.x for spot in line.predicted], [spot.value for spot in line.predicted]
        chart.part(guess, *axes.plot(x, y, color=colour))
        low, high = [s.low for s in line.predicted if s.low], [s.high for s in line.predicted if s.high]
        if len(low) == len(high) == len(x):
            chart.part(guess, axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0))
    for spot in line.measured:
        chart.interval(axes, spot[:2], spot[2:], real, colour)
        chart.mark(axes, spot[:2], marker, f"{line.name}{what} {spot.x:g}: {spot.value:.2f}, measured", real,
                   color=colour)  # fmt: skip


def _legend(axes: Axes, lines: Sequence[Line]) -> None:
    if any(line.predicted for line in lines) and any(line.measured for line in lines):
        axes.plot([], [], color=GREY, label="predicted")
        axes.plot([], [], "o", color=GREY, label="measured")
        axes.legend(loc="upper left", ncols=2)


def _label_ends(axes: Axes, lines: Sequence[Line]) -> None:
    """Each line's name at its right end, moved up where two would overlap; long names, and those of lines that end amid
    others, stand in the legend."""
    coloured = list(zip(lines, SERIES, strict=False))
    lasts = {(line.predicted or line.measured)[-1].x for line in lines}
    if max(len(line.name) for line in lines) > LONGEST_LABEL or len(lasts) > 1:
        for line, colour in coloured:
            axes.plot([], [], color=colour, label=line.name)
        axes.legend(loc="best")
        return
    low, high = axes.get_ylim()
    last = low - (high - low)
    ends = [((line.predicted or line.measured)[-1], line.name, colour) for line, colour in coloured]
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

_GAMMA_FIELDS: tuple[tuple[str, str, Kind, str], ...] = (
    ("tokens", "Tokens/step", "number", "expected_tokens_per_step"),
    ("step", "Step", "seconds", "step_s"),
    ("speedup", "Speedup", "ratio", "speedup"),
)
_SIDES = ("predicted", "measured")


def speedup_by_gamma(data: ReportData) -> Chart | None:
    """Tokens per step and speedup against gamma: the predicted curve, and the measured points on it."""
    reference = _swept_reference(data)
    if reference is None:
        return None
    predicted, measured = (siblings(rows, reference, "gamma") for rows in (data.predicted, data.measured))
    gammas = sorted({r.gamma for r in (*predicted, *measured)})
    if len(gammas) < 2:
        return None
    chart = Chart("gamma", height=4.3, rows=2, sharex=True)
    upper, lower = chart.axes
    for axes, field, colour, name in (
        (upper, "expected_tokens_per_step", BLUE, "tokens per step"), (lower, "speedup", RED, "speedup"),
    ):  # fmt: skip
        line = Line(name, spots(predicted, "gamma", field), spots(measured, "gamma", field))
        draw(chart, axes, line, (colour, "o"), ", γ =", apart=True)
    lower.axhline(1, color=MUTED, lw=0.9, ls=":")
    upper.set(ylabel="tokens per step")
    lower.set(ylabel="speedup (×)", xlabel="γ, tokens drafted per step", xlim=(min(gammas) - 0.4, max(gammas) + 0.4))
    lower.set_xticks(gammas)
    _legend(upper, [line])
    sides = [{row.gamma: row for row in side} for side in (predicted, measured)]
    for gamma in gammas:
        values = [getattr(side.get(gamma), field, None) for *_, field in _GAMMA_FIELDS for side in sides]
        chart.rows.append((gamma, *values))
    draft = draft_name(reference.draft, reference.draft_method)
    budget = f" with a budget of {reference.draft_budget}" if reference.draft_budget is not None else ""
    return chart.told(
        title=_best_title(lambda gamma: f"{GAMMA_IS}{gamma:g}", [line]),
        caption=_caption(f"{_place(reference)}: {draft}{budget}, temperature {reference.temperature:g}", [line]),
        table="By γ", name="gamma-values",
        columns=[GAMMA_COLUMN, *(Column(f"{name}_{side}", f"{title} {side}", kind)
                                 for name, title, kind, _ in _GAMMA_FIELDS for side in _SIDES)],
    )  # fmt: skip


def _swept_reference(data: ReportData) -> Record | None:
    """The report's reference where several gammas are known for it, else the configuration with the most of them."""

    def width(row: Record) -> tuple[int, int]:
        measured, predicted = (len(siblings(rows, row, "gamma")) for rows in (data.measured, data.predicted))
        return measured, predicted

    reference = data.reference
    if reference is not None and reference.is_speculative and (width(reference)[0] > 1 or width(reference)[1] > 2):
        return reference
    return max((row for row in data.rows if row.is_speculative), key=width, default=None)


def _place(record: Record) -> str:
    return f"{record.model}, batch {record.batch_size}, context {record.context_len}"


# By budget and by batch ----------------------------------------------------------------------------------------------


def speedup_by_budget(data: ReportData) -> Chart | None:
    """Speedup against the draft's budget, each at the gamma predicted best, for each way to keep a budget."""
    reference = _leading(data)
    if reference is None:
        return None
    place = (reference.model, reference.batch_size, reference.context_len, reference.hardware, reference.temperature)
    every = [
        r for r in data.rows
        if r.is_speculative and r.speedup and r.draft_budget
        if (r.model, r.batch_size, r.context_len, r.hardware or reference.hardware, r.temperature) == place
    ]  # fmt: skip
    methods = sorted({(r.draft, r.draft_method) for r in every})
    lines = [
        _best_line([r for r in every if (r.draft, r.draft_method) == method], "draft_budget", draft_name(*method))
        for method in methods
    ]
    setting = f"{_place(reference)}, the best γ of each budget"
    return _lines("speedup-by-budget", [line for line in lines if line.is_sweep], "draft budget",
                  " (KV slots read per step)", setting,
                  lambda lines: _best_title(lambda x: f"a budget of {x:g}", lines))  # fmt: skip


def speedup_by_batch(data: ReportData) -> Chart | None:
    """Speedup against the batch for several contexts, at the budget and gamma predicted best of each."""
    reference = _leading(data)
    if reference is None:
        return None
    own = (reference.model, reference.draft, reference.draft_method, reference.temperature)
    every = [
        r for r in data.rows
        if r.is_speculative and r.speedup and (r.model, r.draft, r.draft_method, r.temperature) == own
        if not (r.hardware and reference.hardware) or r.hardware == reference.hardware
    ]  # fmt: skip
    lines = [
        _best_line([r for r in every if r.context_len == context], "batch_size", _named(context))
        for context in sorted({r.context_len for r in every})
    ]
    if not any(line.is_sweep for line in lines) and data.plan is not None:
        measured = {line.name: line.measured for line in lines}
        lines = [Line(name, found, measured.get(name, [])) for name, found in _of_table(data.plan.gamma_table)]
    setting = f"{reference.model}, {draft_name(reference.draft, reference.draft_method)}"
    return _lines("speedup-by-batch", lines, "batch size", "", setting, _batch_title)


def _leading(data: ReportData) -> Record | None:
    """The report's reference, or where that is no draft the fastest draft."""
    if data.reference is not None and data.reference.is_speculative:
        return data.reference
    return fastest(r for r in data.rows if r.is_speculative and r.speedup)


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


def _best_line(rows: Sequence[Record], x: str, name: str) -> Line:
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
        else:
            best = max(guesses or here, key=lambda r: r.speedup or 0.0)
            (predicted if guesses else measured).append(best)
    return Line(name, spots(predicted, x), spots(measured, x))


def _batch_title(lines: Sequence[Line]) -> str:
    """The two ends of the line that reaches highest: measured where both ends were."""
    line = max((each for each in lines if len(each.spots) > 1), key=lambda each: each.spots[-1].value)
    kind, ends = ("measured", line.measured) if len(line.measured) > 1 else ("predicted", line.predicted)
    first, last = ends[0], ends[-1]
    trend = "rises" if last.value > first.value * 1.02 else "falls" if last.value < first.value * 0.98 else "stays"
    return (
        f"At {line.name} the {kind} speedup {trend} from {first.value:.2f}× at batch {first.x:g} to {last.value:.2f}× "
        f"at {last.x:g}"
    )


def _lines(
    name: str, lines: Sequence[Line], x: str, unit: str, setting: str, title: Callable[[Sequence[Line]], str]
) -> Chart | None:
    """Lines over a logarithmic axis, labelled at their ends."""
    if not any(line.is_sweep for line in lines):
        return None
    if len(lines) > MOST_LINES:
        lines = [lines[round(i * (len(lines) - 1) / (MOST_LINES - 1))] for i in range(MOST_LINES)]
    chart = Chart(name, height=3.4)
    (axes,) = chart.axes
    axes.set_xscale("log", base=2)
    for line, *look in zip(lines, SERIES, MARKERS, strict=False):
        draw(chart, axes, line, (look[0], look[1]), f", {x}")
    axes.axhline(1, color=MUTED, lw=0.9, ls=":")
    places = sorted({spot.x for line in lines for spot in line.spots})
    plain_ticks(axes.xaxis, places)
    axes.set(xlabel=x + unit, ylabel="speedup (×)")
    axes.set(xlim=(places[0] / 1.15, places[-1] * (places[-1] / places[0]) ** 0.3))
    _legend(axes, lines)
    _label_ends(axes, lines)
    for line in lines:
        real, guess = ({spot.x: spot for spot in side} for side in (line.measured, line.predicted))
        for place in sorted({*real, *guess}):
            predicted = guess[place][1:] if place in guess else (None,) * 3
            chart.rows.append((line.name, place, *predicted, real[place].value if place in real else None))
    kinds = (("predicted", "Predicted"), ("low", "90 % from"), ("high", "to"), ("measured", "Measured"))
    return chart.told(
        title=title(lines), caption=_caption(setting, lines), table=f"Speedup by {x}",
        columns=[Column("line", "Line"), Column("x", f"{x[0].upper()}{x[1:]}{unit}", "integer"),
                 *(Column(f"speedup_{kind}", text, "ratio") for kind, text in kinds)],
    )  # fmt: skip
