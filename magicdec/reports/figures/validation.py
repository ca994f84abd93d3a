"""Figures of the predictions held against the measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from magicdec.reports.data import ReportData
from magicdec.reports.figures.chart import Chart
from magicdec.reports.style import BLUE, GREY, INK, MARKERS, MUTED, PAPER, RED, SERIES, Tips, new_figure, percent
from magicdec.reports.tables import Column, Table, TermError, Value, describe_draft, label_of, term_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAND = 0.1


def predicted_vs_measured(data: ReportData) -> Chart | None:
    """Speedup of every configuration: measured across, predicted upwards; on the diagonal they agree."""
    pairs = [p for p in data.speculative_pairs if p.measured.speedup and p.predicted.speedup]
    if not pairs:
        return None
    figure, (axes,) = new_figure(height=3.9)
    tips = Tips("scatter")
    values = [v for p in pairs for v in (p.measured.speedup, p.predicted.speedup) if v is not None]
    low, high = min(*values, 1.0) * 0.94, max(*values, 1.0) * 1.06
    _agreement(axes, low, high)
    groups = sorted({describe_draft(p.measured.draft, p.measured.draft_method) for p in pairs})
    rows: list[tuple[Value, ...]] = []
    for i, group in enumerate(groups):
        colour, marker = SERIES[i % len(SERIES)], MARKERS[i % len(MARKERS)]
        for pair in pairs:
            m, p = pair.measured, pair.predicted
            if describe_draft(m.draft, m.draft_method) != group or m.speedup is None or p.speedup is None:
                continue
            x_spread = y_spread = None
            if m.speedup_low is not None and m.speedup_high is not None:
                x_spread = [[max(m.speedup - m.speedup_low, 0)], [max(m.speedup_high - m.speedup, 0)]]
            if p.speedup_low is not None and p.speedup_high is not None:
                y_spread = [[max(p.speedup - p.speedup_low, 0)], [max(p.speedup_high - p.speedup, 0)]]
            bars = axes.errorbar(
                m.speedup, p.speedup, xerr=x_spread, yerr=y_spread, fmt="none", ecolor=GREY, lw=0.7, alpha=0.6
            )
            tips.belongs(group, *bars.lines[2])
            (mark,) = axes.plot(m.speedup, p.speedup, marker, color=colour, ls="none", mec=PAPER, mew=0.5)
            tips.add(mark, f"{label_of(m)}: measured {m.speedup:.2f}×, predicted {p.speedup:.2f}×", group)
            rows.append((label_of(m), m.speedup, p.speedup, p.speedup / m.speedup - 1))
        axes.plot([], [], marker, color=colour, ls="none", label=group)
    axes.set(xlabel="measured speedup (×)", ylabel="predicted speedup (×)", xlim=(low, high), ylim=(low, high))
    axes.set_aspect("equal")
    if len(groups) > 1:
        axes.legend(loc="upper left", handletextpad=0.2)
    speedup = next(term for term in term_errors(pairs) if term.name == "speedup")
    return Chart(
        name="scatter",
        title=f"Predicted speedups are off by {percent(speedup.median_abs, 1)} in the median of {_points(len(pairs))}",
        caption=(
            "Each mark is one configuration. On the diagonal prediction and measurement agree; the band is ±10 %. "
            "Bars: lowest to highest repetition across, 90 % interval of the prediction upwards."
        ),
        figure=figure,
        tips=tips.texts,
        series=tips.series,
        table=Table(name="scatter", title="Measured and predicted speedups", columns=_COLUMNS, rows=tuple(rows)),
    )


_COLUMNS = (
    Column(name="configuration", title="Configuration"),
    Column(name="measured", title="Measured", kind="ratio"),
    Column(name="predicted", title="Predicted", kind="ratio"),
    Column(name="error", title="Error", kind="signed_percent"),
)


def _agreement(axes: Axes, low: float, high: float) -> None:
    axes.plot([low, high], [low, high], color=INK, lw=1, zorder=1)
    axes.fill_between([low, high], [low * (1 - BAND), high * (1 - BAND)], [low * (1 + BAND), high * (1 + BAND)],
                      color=GREY, alpha=0.15, lw=0, zorder=0)  # fmt: skip
    if low < 1 < high:
        axes.axvline(1, color=MUTED, lw=0.8, ls=":")
        axes.axhline(1, color=MUTED, lw=0.8, ls=":")


def residuals_by_term(data: ReportData) -> Chart | None:
    """Signed error of every prediction, by term, so that one sees which term is wrong."""
    terms = term_errors(data.pairs)
    if not terms or sum(len(t.errors) for t in terms) < 2:
        return None
    figure, (axes,) = new_figure(height=0.75 + 0.42 * len(terms))
    tips = Tips("residuals")
    axes.axvspan(-100 * BAND, 100 * BAND, color=GREY, alpha=0.15, lw=0)
    axes.axvline(0, color=INK, lw=1)
    rows: list[tuple[Value, ...]] = []
    for i, term in enumerate(terms):
        for j, (error, label) in enumerate(zip(term.errors, term.labels, strict=True)):
            offset = 0.22 * (((j * 7) % 10) / 4.5 - 1)
            (mark,) = axes.plot(100 * error, i + offset, "o", color=BLUE, ms=4.5, alpha=0.8, mec="none")
            tips.add(mark, f"{label}: {term.title} predicted {100 * error:+.1f} %".replace("-", "−"))
            rows.append((term.title, label, error))
        middle = 100 * sorted(term.errors)[len(term.errors) // 2]
        axes.plot([middle, middle], [i - 0.34, i + 0.34], color=RED, lw=2.2)
    axes.set_yticks(range(len(terms)), labels=[t.title for t in terms])
    axes.set_ylim(len(terms) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    size = max(100 * max(abs(e) for t in terms for e in t.errors), 12) * 1.08
    axes.set(xlabel="predicted / measured − 1 (%)", xlim=(-size, size))
    columns = (Column(name="term", title="Term"), *_COLUMNS[:1], _COLUMNS[3])
    worst = max(terms, key=lambda t: t.median_abs)
    return Chart(
        name="residuals",
        title=_residual_title(terms, worst),
        caption="One point per configuration and term, predicted / measured − 1. Bars: medians. The band is ±10 %.",
        figure=figure,
        tips=tips.texts,
        table=Table(name="residuals", title="Errors of the predictions by term", columns=columns, rows=tuple(rows)),
    )


def _residual_title(terms: Sequence[TermError], worst: TermError) -> str:
    if worst.median_abs < 0.03:
        return "No term of the prediction is off by more than 3\u202f% in the median"
    high = sum(e > 0 for e in worst.errors) / len(worst.errors)
    side = ", mostly too high" if high > 0.75 else (", mostly too low" if high < 0.25 else "")
    return f"The weakest term is {worst.title}: {percent(worst.median_abs, 1)} off in the median{side}"


def _points(count: int) -> str:
    return f"{count} configurations" if count > 1 else "one configuration"
