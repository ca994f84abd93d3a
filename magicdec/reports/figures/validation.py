"""Figures that compare predictions with measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magicdec.comparison import TERMS, Comparison, summarise
from magicdec.naming import draft_name
from magicdec.reports.data import ReportData
from magicdec.reports.figures.chart import Chart
from magicdec.reports.style import BLUE, GREY, INK, MARKERS, MUTED, PAPER, RED, SERIES, Tips, new_figure, percent
from magicdec.reports.tables import Column, Table, Value, label_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAND = 0.1


def predicted_vs_measured(data: ReportData) -> Chart | None:
    """Speedup of every configuration: measured across, predicted upwards; on the diagonal they agree."""
    pairs = [p for p in data.comparison.pairs if p.error("speedup") is not None]
    summary = summarise("speedup", pairs)
    if summary is None:
        return None
    figure, (axes,) = new_figure(height=3.9)
    tips = Tips("scatter")
    values = [v for p in pairs for v in (p.measured.speedup, p.predicted.speedup) if v is not None]
    low, high = min(*values, 1.0) * 0.94, max(*values, 1.0) * 1.06
    _agreement(axes, low, high)
    groups = sorted({draft_name(p.measured.draft, p.measured.draft_method) for p in pairs})
    rows: list[tuple[Value, ...]] = []
    for i, group in enumerate(groups):
        colour, marker = SERIES[i % len(SERIES)], MARKERS[i % len(MARKERS)]
        for pair in pairs:
            m, p = pair.measured, pair.predicted
            if draft_name(m.draft, m.draft_method) != group or m.speedup is None or p.speedup is None:
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
            rows.append((label_of(m), m.speedup, p.speedup, pair.error("speedup")))
        axes.plot([], [], marker, color=colour, ls="none", label=group)
    axes.set(xlabel="measured speedup (×)", ylabel="predicted speedup (×)", xlim=(low, high), ylim=(low, high))
    axes.set_aspect("equal")
    if len(groups) > 1:
        axes.legend(loc="upper left", handletextpad=0.2)
    return Chart(
        title=f"Predicted speedups are off by {percent(summary.median_error, 1)} (median of {_points(len(pairs))})",
        caption=(
            "Each mark is one configuration. On the diagonal prediction and measurement agree; the band is ±10 %. "
            "Bars: lowest to highest repetition across, 90 % interval of the prediction upwards."
        ),
        figure=figure,
        marks=tips,
        table=Table("scatter", "Measured and predicted speedups", _COLUMNS, tuple(rows)),
    )


_COLUMNS = (
    Column("configuration", "Configuration"),
    Column("measured", "Measured", "ratio"),
    Column("predicted", "Predicted", "ratio"),
    Column("error", "Error", "signed_percent"),
)


def _agreement(axes: Axes, low: float, high: float) -> None:
    axes.plot([low, high], [low, high], color=INK, lw=1, zorder=1)
    axes.fill_between([low, high], [low * (1 - BAND), high * (1 - BAND)], [low * (1 + BAND), high * (1 + BAND)],
                      color=GREY, alpha=0.15, lw=0, zorder=0)  # fmt: skip
    if low < 1 < high:
        axes.axvline(1, color=MUTED, lw=0.8, ls=":")
        axes.axhline(1, color=MUTED, lw=0.8, ls=":")


def residuals_by_term(data: ReportData) -> Chart | None:
    """Signed error of every prediction, by term, which shows the term that is wrong."""
    terms = data.comparison.summaries
    if not terms or sum(summary.points for summary in terms.values()) < 2:
        return None
    figure, (axes,) = new_figure(height=0.75 + 0.42 * len(terms))
    tips = Tips("residuals")
    axes.axvspan(-100 * BAND, 100 * BAND, color=GREY, alpha=0.15, lw=0)
    axes.axvline(0, color=INK, lw=1)
    rows: list[tuple[Value, ...]] = []
    for i, (term, summary) in enumerate(terms.items()):
        found = [(pair, error) for pair in data.comparison.pairs if (error := pair.error(term)) is not None]
        for j, (pair, error) in enumerate(found):
            offset, label = 0.22 * (((j * 7) % 10) / 4.5 - 1), label_of(pair.measured)
            (mark,) = axes.plot(100 * error, i + offset, "o", color=BLUE, ms=4.5, alpha=0.8, mec="none")
            tips.add(mark, f"{label}: {TERMS[term]} predicted {100 * error:+.1f} %".replace("-", "−"))
            rows.append((TERMS[term], label, error))
        axes.plot([100 * summary.bias] * 2, [i - 0.34, i + 0.34], color=RED, lw=2.2)
    axes.set_yticks(range(len(terms)), labels=[TERMS[term] for term in terms])
    axes.set_ylim(len(terms) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    size = max(100 * max(summary.max_error for summary in terms.values()), 12) * 1.08
    axes.set(xlabel="predicted / measured − 1 (%)", xlim=(-size, size))
    columns = (Column("term", "Term"), *_COLUMNS[:1], _COLUMNS[3])
    return Chart(
        title=_residual_title(data.comparison),
        caption="One point per configuration and term, predicted / measured − 1. Bars: medians. The band is ±10 %.",
        figure=figure,
        marks=tips,
        table=Table("residuals", "Errors of the predictions by term", columns, tuple(rows)),
    )


def _residual_title(comparison: Comparison) -> str:
    term, worst = max(comparison.summaries.items(), key=lambda item: item[1].median_error)
    if worst.median_error < 0.03:
        return "No term of the prediction is off by more than 3\u202f% in the median"
    signed = [error for pair in comparison.pairs if (error := pair.error(term)) is not None]
    high = sum(error > 0 for error in signed) / worst.points
    side = ", mostly too high" if high > 0.75 else (", mostly too low" if high < 0.25 else "")
    return f"The weakest term is {TERMS[term]}: {percent(worst.median_error, 1)} off in the median{side}"


def _points(count: int) -> str:
    return f"{count} configurations" if count > 1 else "one configuration"
