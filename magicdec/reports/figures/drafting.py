"""Figures of what the draft gets right: by position, by budget, and what follows from it for gamma."""

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
    new_figure,
    percent,
    plain_ticks,
)
from magicdec.reports.tables import BUDGET, CONTEXT, GAMMA_COLUMN, Column, Table, Value

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


# By gamma ------------------------------------------------------------------------------------------------------------


def speedup_by_gamma(data: ReportData) -> Chart | None:
    """Tokens per step and speedup against gamma: the predicted curve, and the measured points on it."""
    reference = _swept_reference(data)
    if reference is None:
        return None
    predicted = siblings(data.predicted, reference, "gamma")
    measured = siblings(data.measured, reference, "gamma")
    if len({r.gamma for r in (*predicted, *measured)}) < 2:
        return None
    figure, (upper, lower) = new_figure(height=4.3, rows=2, sharex=True)
    tips = Tips("gamma")
    _curve(upper, predicted, "expected_tokens_per_step", BLUE, tips)
    _points(upper, measured, "expected_tokens_per_step", BLUE, tips, "tokens per step")
    _curve(lower, predicted, "speedup", RED, tips)
    _points(lower, measured, "speedup", RED, tips, "speedup")
    lower.axhline(1, color=MUTED, lw=0.9, ls=":")
    gammas = sorted({r.gamma for r in (*predicted, *measured)})
    upper.set(ylabel="tokens per step")
    lower.set(ylabel="speedup (×)", xlabel="γ, tokens drafted per step", xlim=(min(gammas) - 0.4, max(gammas) + 0.4))
    lower.set_xticks(gammas)
    _legend(upper, bool(predicted), bool(measured))
    rows = _gamma_rows(gammas, predicted, measured)
    parts = []
    if predicted:
        parts.append("Line: predicted" + (", with its 90 % interval" if any(r.speedup_low for r in predicted) else ""))
    if measured:
        parts.append("Points: measured, with the lowest and highest repetition")
    caption = ". ".join([_setting(reference), *parts]) + "."
    return Chart(
        title=_gamma_title(predicted, measured),
        caption=caption,
        figure=figure,
        marks=tips,
        table=Table("gamma-values", "By γ", _GAMMA_COLUMNS, rows),
    )


def _gamma_title(predicted: Sequence[Record], measured: Sequence[Record]) -> str:
    """The measured best, with the prediction next to it; without measurements, the predicted best."""
    best, guess = (
        max(rows, key=lambda r: r.speedup or 0.0, default=None) for rows in (measured or predicted, predicted)
    )
    assert best is not None
    speedup = best.speedup or 0.0
    beside = f"; predicted γ = {guess.gamma}, {guess.speedup:.2f}×" if measured and guess and guess.speedup else ""
    kind = "measured" if measured else "predicted"
    title = f"γ = {best.gamma} pays most: {speedup:.2f}× as fast {kind}{beside}"
    if speedup <= 1:
        title = f"No γ pays here: the best, γ = {best.gamma}, runs at {speedup:.2f}×{beside}"
    return title.replace("γ = ", GAMMA_IS)


_GAMMA_COLUMNS = (
    GAMMA_COLUMN,
    Column("tokens_predicted", "Tokens/step predicted", "number"),
    Column("tokens_measured", "measured", "number"),
    Column("step_predicted", "Step predicted", "seconds"),
    Column("step_measured", "measured", "seconds"),
    Column("speedup_predicted", "Speedup predicted", "ratio"),
    Column("speedup_measured", "measured", "ratio"),
)


def _gamma_rows(
    gammas: Sequence[int], predicted: Sequence[Record], measured: Sequence[Record]
) -> tuple[tuple[Value, ...], ...]:
    rows = []
    for gamma in gammas:
        guess = next((r for r in predicted if r.gamma == gamma), None)
        real = next((r for r in measured if r.gamma == gamma), None)
        row: list[Value] = [gamma]
        for field in ("expected_tokens_per_step", "step_s", "speedup"):
            row += [getattr(guess, field, None), getattr(real, field, None)]
        rows.append(tuple(row))
    return tuple(rows)


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


def _curve(axes: Axes, rows: Sequence[Record], field: str, colour: str, tips: Tips) -> None:
    points = [(r.gamma, getattr(r, field), r) for r in rows if getattr(r, field) is not None]
    if not points:
        return
    x, y, kept = zip(*points, strict=True)
    tips.belongs("predicted", *axes.plot(x, y, color=colour))
    if field == "speedup" and all(r.speedup_low is not None and r.speedup_high is not None for r in kept):
        low, high = [r.speedup_low for r in kept], [r.speedup_high for r in kept]
        tips.belongs("predicted", axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0))


def _points(axes: Axes, rows: Sequence[Record], field: str, colour: str, tips: Tips, what: str) -> None:
    for row in rows:
        value = getattr(row, field)
        if value is None:
            continue
        if field == "speedup" and row.speedup_low is not None and row.speedup_high is not None:
            spread = [[max(value - row.speedup_low, 0)], [max(row.speedup_high - value, 0)]]
            bars = axes.errorbar(row.gamma, value, yerr=spread, fmt="none", ecolor=colour, lw=1)
            tips.belongs("measured", *bars.lines[2])
        (mark,) = axes.plot(row.gamma, value, "o", color=colour, mec=PAPER, mew=0.6)
        tips.add(mark, f"γ = {row.gamma}: {what} {value:.2f}, measured", "measured")


def _legend(axes: Axes, predicted: bool, measured: bool) -> None:
    if predicted and measured:
        axes.plot([], [], color=GREY, label="predicted")
        axes.plot([], [], "o", color=GREY, label="measured")
        axes.legend(loc="upper left", ncols=2)


def _setting(record: Record) -> str:
    budget = f" with a budget of {record.draft_budget}" if record.draft_budget is not None else ""
    draft = "self-speculation, " if record.draft == "self" else ""
    return (
        f"{record.model}, batch {record.batch_size}, context {record.context_len}: "
        f"{draft}{method_name(record.draft_method)}{budget}, temperature {record.temperature:g}"
    )


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
            "Share of first drafted tokens accepted, all γ of a budget pooled, with 90 % bands. Dashed: "
            "predicted. Every draft reads the same number of KV slots per step at one budget."
        ),
        figure=figure,
        marks=tips,
        table=Table("budget", "Acceptance by budget", columns, tuple(table)),
    )


def _budget_title(series: dict[tuple[str, int], dict[int, Pooled]], deepest: dict[str, int]) -> str:
    rates = {m: {b: each.rate for b, each in series[m, c].items()} for m, c in deepest.items()}
    if len(rates) > 1:
        shared = set.intersection(*(set(r) for r in rates.values()))
        if shared:
            budget = max(shared)
            best = max(rates, key=lambda m: rates[m][budget])
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
    colour, marker = SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)]
    budgets = sorted(values)
    rates = [values[b].rate for b in budgets]
    bands = [rate_interval(values[b].rate, values[b].stderr) for b in budgets]
    name = method_name(method)
    band = axes.fill_between(budgets, [b[0] for b in bands], [b[1] for b in bands], color=colour, alpha=0.18, lw=0)
    tips.belongs(name, band, *axes.plot(budgets, rates, color=colour))
    table: list[tuple[Value, ...]] = []
    for budget, rate, (low, high) in zip(budgets, rates, bands, strict=True):
        (mark,) = axes.plot(budget, rate, marker, color=colour, mec=PAPER, mew=0.6)
        trials = round(values[budget].tried)
        tips.add(mark, f"{name}, budget {budget}: {100 * rate:.1f} % of {trials}", name)
        table.append((name, context, budget, rate, low, high, trials))
    guesses = {
        r.draft_budget: r.acceptance_by_position[0]
        for r in data.predicted
        if r.draft_method == method and r.context_len == context and r.draft_budget and r.acceptance_by_position
    }
    if len(guesses) > 1:
        x = sorted(guesses)
        tips.belongs(name, *axes.plot(x, [guesses[b] for b in x], color=colour, ls="--", lw=1.2))
    axes.plot([], [], marker, color=colour, ls="-", label=f"{name}, context {context}")
    return table
