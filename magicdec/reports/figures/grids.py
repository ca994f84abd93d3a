"""Figures over many operating points: where speculation pays, and what throughput costs in latency."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from magicdec.naming import describe
from magicdec.plan_document import Verdict, verdict_of
from magicdec.records import Record
from magicdec.reports.data import ReportData
from magicdec.reports.figures.chart import Chart
from magicdec.reports.style import (
    GAMMA,
    GREY,
    GRID,
    INK,
    MUTED,
    PAPER,
    RED,
    Tips,
    compact_tokens,
    new_figure,
    percent,
    thousands,
)
from magicdec.reports.tables import BATCH, CONTEXT, GAMMA_COLUMN, SPEEDUP, Column, Table, Value
from magicdec.units import MILLI, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSS, NEUTRAL, GAIN = "#c9500b", "#f4f2ee", "#0069a9"
CELL_INK, CELL_PAPER = "#15181b", "#fffffe"


class Cell(NamedTuple):
    """The best configuration at one batch and context."""

    speedup: float
    gamma: int
    verdict: Verdict


def speedup_heatmap(data: ReportData) -> Chart | None:
    """Best predicted speedup by batch and context, with the gamma that reaches it and the line of break-even."""
    grid = _planned_grid(data) or _record_grid(data)
    if grid is None:
        return None
    batches, contexts, cells, predicted = grid
    figure, (axes,) = new_figure(height=1.3 + 0.42 * len(batches))
    tips = Tips("heatmap")
    rows: list[tuple[Value, ...]] = []
    reach = max(abs(math.log(cell.speedup)) for cell in cells.values()) or 0.01
    for (b, c), cell in cells.items():
        rows.append((batches[b], contexts[c], cell.speedup, cell.gamma, cell.verdict))
        _draw_cell(axes, b, c, cell, max(reach, math.log(1.25)), tips, (batches[b], contexts[c]))
    _break_even(axes, cells, len(batches), len(contexts))
    axes.set_xticks(range(len(contexts)), labels=[compact_tokens(c) for c in contexts])
    axes.set_yticks(range(len(batches)), labels=[str(b) for b in batches])
    axes.set(xlabel="context length (tokens)", ylabel="batch size", xlim=(-0.5, len(contexts) - 0.5))
    axes.set_ylim(-0.5, len(batches) - 0.5)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    columns = (
        BATCH,
        CONTEXT,
        SPEEDUP,
        GAMMA_COLUMN,
        Column("verdict", "Verdict"),
    )
    word = "Predicted" if predicted else "Measured"
    caption = (
        f"{word} speedup of the best γ (in small print) over autoregressive decoding at the same batch. Blue gains, "
        "orange loses; the heavy line is around what pays; ?: unclear; empty: does not fit or was not tried."
    )
    return Chart(
        title=_heatmap_title(batches, contexts, cells),
        caption=caption,
        figure=figure,
        marks=tips,
        table=Table("heatmap", "Speedup by batch and context", columns, tuple(rows)),
    )


Grid = tuple[list[int], list[int], dict[tuple[int, int], Cell], bool]


def _planned_grid(data: ReportData) -> Grid | None:
    if data.plan is None:
        return None
    table = data.plan.gamma_table
    batches, contexts = table.batch_sizes, table.context_lens
    cells = {
        (b, c): Cell(table.speedup[b][c], table.gamma[b][c], table.verdict[b][c])
        for b in range(len(batches))
        for c in range(len(contexts))
        if table.fits[b][c]
    }
    return (batches, contexts, cells, True) if len(cells) > 1 else None


def _record_grid(data: ReportData) -> Grid | None:
    """The best speedup of each batch and context among the records: predicted where there are any, else measured."""
    for rows, predicted in ((data.predicted, True), (data.measured, False)):
        best: dict[tuple[int, int], Cell] = {}
        for row in rows:
            if row.is_speculative and row.speedup:
                place = (row.batch_size, row.context_len)
                low, high = row.speedup_low or row.speedup, row.speedup_high or row.speedup
                verdict = verdict_of(speedup_low=low, speedup_high=high)
                best[place] = max(best.get(place, Cell(0.0, 0, "unclear")), Cell(row.speedup, row.gamma, verdict))
        batches, contexts = sorted({b for b, _ in best}), sorted({c for _, c in best})
        if len(best) >= 4 and len(batches) > 1 and len(contexts) > 1:
            cells = {(batches.index(b), contexts.index(c)): cell for (b, c), cell in best.items()}
            return batches, contexts, cells, predicted
    return None


def _draw_cell(axes: Axes, b: int, c: int, cell: Cell, reach: float, tips: Tips, place: tuple[int, int]) -> None:
    from matplotlib.colors import LinearSegmentedColormap, to_hex
    from matplotlib.patches import Rectangle

    speedup, gamma, verdict = cell
    depth = math.log(speedup) / reach
    colour = LinearSegmentedColormap.from_list("speedup", [LOSS, NEUTRAL, GAIN])((depth + 1) / 2)
    patch = axes.add_patch(Rectangle((c - 0.48, b - 0.46), 0.96, 0.92, facecolor=to_hex(colour), lw=0))
    setting = f"γ = {gamma}, {verdict}" if gamma else "leave speculation off"
    tips.add(patch, f"batch {place[0]}, context {place[1]}: {speedup:.2f}×, {setting}")
    dark = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] < 0.55
    ink = CELL_PAPER if dark else CELL_INK
    if not gamma:
        patch.set_facecolor(GRID)
        axes.text(c, b, "off", ha="center", va="center", color=MUTED)
        return
    axes.text(c, b + 0.1, f"{speedup:.2f}×", ha="center", va="center", color=ink)
    axes.text(
        c,
        b - 0.24,
        f"γ {gamma}{' ?' if verdict == 'unclear' else ''}",
        ha="center",
        va="center",
        color=ink,
    )


def _break_even(axes: Axes, cells: Mapping[tuple[int, int], Cell], num_rows: int, num_columns: int) -> None:
    """A line along the cells' edges between those that pay and the others."""

    def pays(b: int, c: int) -> bool | None:
        cell = cells.get((b, c))
        return None if cell is None else cell.verdict == "pays"

    for b in range(num_rows):
        for c in range(num_columns):
            here = pays(b, c)
            right, above = pays(b, c + 1), pays(b + 1, c)
            if None not in (here, right) and here != right:
                axes.plot([c + 0.5, c + 0.5], [b - 0.5, b + 0.5], color=INK, lw=2.4, solid_capstyle="projecting")
            if None not in (here, above) and here != above:
                axes.plot([c - 0.5, c + 0.5], [b + 0.5, b + 0.5], color=INK, lw=2.4, solid_capstyle="projecting")


def _heatmap_title(batches: Sequence[int], contexts: Sequence[int], cells: Mapping[tuple[int, int], Cell]) -> str:
    paying = {place: cell for place, cell in cells.items() if cell.verdict == "pays"}
    if not paying:
        return "Speculation surely pays nowhere on this grid"
    place, cell = max(paying.items(), key=lambda item: item[1].speedup)
    best = f"{cell.speedup:.2f}× at batch {batches[place[0]]} and context {thousands(contexts[place[1]])}"
    if len(paying) == len(cells):
        return f"Speculation pays everywhere on this grid, up to {best}"
    return f"Speculation pays in {len(paying)} of {len(cells)} settings, up to {best}"


# Throughput and latency ----------------------------------------------------------------------------------------------


def throughput_latency(data: ReportData) -> Chart | None:
    """Tokens per second against the time between tokens; the frontier of each way to decode."""
    rows, context = _one_context(data)
    baselines = _frontier([_point(r) for r in rows if not r.is_speculative] + _implied_baselines(rows))
    spec = _frontier([_point(r) for r in rows if r.is_speculative])
    if len(spec) < 2 or len({p[2].batch_size for p in (*spec, *baselines)}) < 2:
        return None
    figure, (axes,) = new_figure(height=3.4)
    tips = Tips("pareto")
    table: list[tuple[Value, ...]] = []
    for points, colour, marker, name in ((baselines, GREY, "s", "autoregressive"), (spec, RED, "o", "speculative")):
        if not points:
            continue
        tips.belongs(name, *axes.plot([p[0] / MILLI for p in points], [p[1] for p in points], color=colour, lw=1.4))
        for latency, rate, row in points:
            (mark,) = axes.plot(latency / MILLI, rate, marker, color=colour, mec=PAPER, mew=0.5)
            what = describe(row, symbol=GAMMA) if name == "speculative" else name
            tips.add(mark, f"batch {row.batch_size}, context {row.context_len}, {what}: {rate:.0f} tokens/s, "
                           f"{format_seconds(latency)} per token", name)  # fmt: skip
            table.append((name, row.batch_size, row.context_len, describe(row, symbol=GAMMA), rate, latency))
        latency, rate, row = points[-1]
        note = axes.annotate(
            f"batch {row.batch_size}", (latency / MILLI, rate), xytext=(5, 5), textcoords="offset points", color=colour,
        )  # fmt: skip
        tips.belongs(name, note)
        axes.plot([], [], marker, color=colour, ls="-", label=name)
    axes.set(xlabel="time per token and sequence (ms)", ylabel="tokens/s per device")
    axes.margins(0.12)
    axes.set_ylim(bottom=0)
    axes.legend(loc="best")
    columns = (
        Column("decoding", "Decoding"),
        BATCH,
        CONTEXT,
        Column("configuration", "Configuration"),
        Column("tokens_per_s", "Tokens/s per device", "rate"),
        Column("tpot_s", "Time per token", "seconds"),
    )
    word = "Measured" if rows[0].source == "measured" else "Predicted"
    return Chart(
        title=_pareto_title(baselines, spec),
        caption=(
            f"{word}, context {thousands(context)}. Only points that no other point of the same line beats in both are "
            "drawn. Up and to the left is better."
        ),
        figure=figure,
        marks=tips,
        table=Table("pareto", "Throughput and latency", columns, tuple(table)),
    )


Point = tuple[float, float, Record]


def _one_context(data: ReportData) -> tuple[list[Record], int]:
    """The rows of one context, device and temperature: measured ones where they hold several batch sizes."""

    def setting(row: Record) -> tuple[object, ...]:
        return row.model, row.hardware, row.context_len, row.temperature

    def batches(rows: Sequence[Record]) -> int:
        return len({r.batch_size for r in rows if r.is_speculative})

    best: list[Record] = []
    for candidates in (data.measured, data.predicted):
        groups: dict[tuple[object, ...], list[Record]] = {}
        for row in candidates:
            groups.setdefault(setting(row), []).append(row)
        widest = max(groups.values(), key=lambda g: (batches(g), g[0].context_len), default=[])
        if batches(widest) >= 2 and not best:
            best = widest
    return best, best[0].context_len if best else 0


def _point(row: Record) -> Point:
    return row.tpot_s or 0.0, (row.tokens_per_s or 0.0) / row.tp_size, row


def _implied_baselines(rows: Sequence[Record]) -> list[Point]:
    """Autoregressive points that speculative rows carry with them."""
    return [
        (r.autoregressive_step_s, r.batch_size / r.autoregressive_step_s / r.tp_size, r)
        for r in rows
        if r.is_speculative and r.autoregressive_step_s
    ]


def _frontier(points: Sequence[Point]) -> list[Point]:
    """Points that none other beats in both latency and throughput, fastest first."""
    kept: list[Point] = []
    for point in sorted((p for p in points if p[0] > 0 and p[1] > 0), key=lambda p: (p[0], -p[1])):
        if not kept or point[1] > kept[-1][1] * 1.001:
            kept.append(point)
    return kept


def _pareto_title(baselines: Sequence[Point], spec: Sequence[Point]) -> str:
    if not baselines:
        return f"Up to {spec[-1][1]:.0f} tokens/s per device"
    gain = spec[-1][1] / baselines[-1][1]
    if gain > 1:
        return (
            f"Speculation lifts the highest throughput by {percent(gain - 1)}, to {spec[-1][1]:.0f} tokens/s per device"
        )
    return f"Autoregressive decoding reaches the highest throughput, {baselines[-1][1]:.0f} tokens/s per device"
