"""Figures over many operating points: where speculation pays, what throughput costs in latency, and
what users see as the rate of arrivals rises."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby, product
from typing import TYPE_CHECKING, Any, NamedTuple

from magicdec.naming import describe
from magicdec.reports.arrivals import load_name, traffic_line
from magicdec.reports.columns import BATCH, CONTEXT, GAMMA_COLUMN, SPEEDUP, Column
from magicdec.reports.data import ReportData, candidate_record
from magicdec.reports.figures.chart import (
    GREY,
    GRID,
    INK,
    MARKERS,
    MUTED,
    RED,
    SERIES,
    Chart,
)
from magicdec.reports.text import GAMMA, compact_tokens, percent, thousands
from magicdec.schema.plan import TrafficLoad
from magicdec.schema.record import Record
from magicdec.schema.row import Gain, Verdict
from magicdec.units import MILLI, format_count, format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSS, NEUTRAL, GAIN = "#c9500b", "#f4f2ee", "#0069a9"
CELL_INK, CELL_PAPER = "#15181b", "#fffffe"


class GridCell(NamedTuple):
    """The best configuration at one batch and context."""

    speedup: float
    gamma: int
    verdict: Verdict


class Grid(NamedTuple):
    batches: list[int]
    contexts: list[int]
    cells: dict[tuple[int, int], GridCell]
    """Cells by the indices of batch and context."""
    word: str
    is_planned: bool = False
    """Whether a plan tried every setting: a missing cell then does not fit in memory."""


def speedup_heatmap(data: ReportData) -> Chart | None:
    """Best predicted speedup by batch and context, with the gamma that reaches it and the line of
    break-even.
    """
    grid = _planned_grid(data) or _record_grid(data)
    if grid is None:
        return None
    batches = grid.batches
    contexts = grid.contexts
    chart = Chart("heatmap", height=1.3 + 0.42 * len(batches))
    (axes,) = chart.axes
    reach = _reach(grid)
    for (b, c), cell in grid.cells.items():
        chart.rows.append(
            (batches[b], contexts[c], cell.speedup, cell.gamma, cell.verdict)
        )
        place = f"batch {batches[b]}, context {contexts[c]}"
        _draw_cell(chart, (b, c), cell, reach, place)
    _break_even(axes, grid)
    _grid_axes(axes, grid)
    caption = (
        f"{grid.word} speedup of the best γ (in small print) over autoregressive decoding at the "
        "same batch. Blue gains, orange loses; the heavy line is around what pays; ?: less than 90 % likely"
        f"{_hole(grid)}."
    )
    if data.plan is not None and data.plan.request.gen_len:
        length = thousands(data.plan.request.gen_len)
        caption += f" What pays is judged by whole requests of {length} tokens."
    return chart.told(
        title=_heatmap_title(grid),
        caption=caption,
        table="Speedup by batch and context",
        columns=[BATCH, CONTEXT, SPEEDUP, GAMMA_COLUMN, Column("verdict", "Verdict")],
    )


def _reach(grid: Grid) -> float:
    """The logarithm of the speedup that has the deepest colour. A grid whose gains all lie within
    25 % stays pale."""
    deepest = max(abs(math.log(cell.speedup)) for cell in grid.cells.values())
    return max(deepest, math.log(1.25))


def _grid_axes(axes: Axes, grid: Grid) -> None:
    """Labels batches and contexts, and takes the frame off."""
    num_batches = len(grid.batches)
    num_contexts = len(grid.contexts)
    contexts = list(map(compact_tokens, grid.contexts))
    batches = list(map(str, grid.batches))
    axes.set_xticks(range(num_contexts), labels=contexts)
    axes.set_yticks(range(num_batches), labels=batches)
    axes.set_xlabel("context length (tokens)")
    axes.set_ylabel("batch size")
    axes.set_xlim(-0.5, num_contexts - 0.5)
    axes.set_ylim(-0.5, num_batches - 0.5)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _hole(grid: Grid) -> str:
    """The settings that the map leaves empty, and why."""
    empty = len(grid.batches) * len(grid.contexts) - len(grid.cells)
    if not empty:
        return ""
    why = "was not tried"
    if grid.is_planned:
        why = "does not fit in memory"
    return f"; empty, in {empty} of {len(grid.cells) + empty} settings: {why}"


def _planned_grid(data: ReportData) -> Grid | None:
    if data.plan is None:
        return None
    table = data.plan.gamma_table
    cells = {}
    for b in range(len(table.batch_sizes)):
        for c in range(len(table.context_lens)):
            if table.fits[b][c]:
                cells[b, c] = GridCell(
                    table.speedup[b][c],
                    table.gamma[b][c],
                    table.verdict[b][c],
                )
    if len(cells) > 1:
        return Grid(
            table.batch_sizes, table.context_lens, cells, "Predicted", is_planned=True
        )
    return None


def _record_grid(data: ReportData) -> Grid | None:
    """The best speedup of each batch and context among the records: predicted where there are any,
    else measured.
    """
    for rows, word in ((data.predicted, "Predicted"), (data.measured, "Measured")):
        best = _best_cells(rows)
        batches = sorted({batch for batch, _ in best})
        contexts = sorted({context for _, context in best})
        is_grid = len(batches) > 1 and len(contexts) > 1
        if is_grid and len(best) >= 4:
            cells = {}
            for (batch, context), cell in best.items():
                place = (batches.index(batch), contexts.index(context))
                cells[place] = cell
            return Grid(batches, contexts, cells, word)
    return None


def _best_cells(rows: Sequence[Record]) -> dict[tuple[int, int], GridCell]:
    """The best speculative configuration by (batch, context)."""
    best: dict[tuple[int, int], GridCell] = {}
    for row in rows:
        if not row.is_speculative or not row.speedup:
            continue
        place = (row.batch_size, row.context_len)
        gain = Gain(
            speedup=row.speedup,
            low=row.speedup_low or row.speedup,
            high=row.speedup_high or row.speedup,
        )
        cell = GridCell(row.speedup, row.gamma, gain.verdict)
        best[place] = max(best.get(place, cell), cell)
    return best


def _draw_cell(
    chart: Chart,
    at: tuple[int, int],
    cell: GridCell,
    reach: float,
    place: str,
) -> None:
    from matplotlib.colors import LinearSegmentedColormap, to_hex
    from matplotlib.patches import Rectangle

    (axes,) = chart.axes
    b, c = at
    depth = math.log(cell.speedup) / reach
    colours = LinearSegmentedColormap.from_list("speedup", [LOSS, NEUTRAL, GAIN])
    colour = colours((depth + 1) / 2)
    patch = axes.add_patch(
        Rectangle(
            (c - 0.48, b - 0.46),
            0.96,
            0.92,
            facecolor=to_hex(colour),
            lw=0,
        )
    )
    setting = "leave speculation off"
    if cell.gamma:
        setting = f"γ = {cell.gamma}, {cell.verdict}"
    speedup = f"{cell.speedup:.2f}×"
    chart.tip(patch, f"{place}: {speedup}, {setting}")
    middle: dict[str, Any] = {"ha": "center", "va": "center"}
    if not cell.gamma:
        patch.set_facecolor(GRID)
        axes.text(c, b, "off", color=MUTED, **middle)
        return
    red, green, blue, _ = colour
    # how bright a colour looks (ITU-R BT.601): ink on bright cells, paper on dark ones
    luminance = 0.299 * red + 0.587 * green + 0.114 * blue
    ink = CELL_INK
    if luminance < 0.55:
        ink = CELL_PAPER
    doubt = ""
    if cell.verdict == "unclear":
        doubt = " ?"
    gamma = f"γ {cell.gamma}{doubt}"
    axes.text(c, b + 0.1, speedup, color=ink, **middle)
    axes.text(c, b - 0.24, gamma, color=ink, **middle)


def _break_even(axes: Axes, grid: Grid) -> None:
    """A line along the cells' edges between those that pay and the others."""
    pays = {place: cell.verdict == "pays" for place, cell in grid.cells.items()}
    for (b, c), cell_pays in pays.items():
        left = c - 0.5
        right = c + 0.5
        below = b - 0.5
        above = b + 0.5
        if pays.get((b, c + 1), cell_pays) != cell_pays:
            _draw_edge(axes, [right, right], [below, above])
        if pays.get((b + 1, c), cell_pays) != cell_pays:
            _draw_edge(axes, [left, right], [above, above])


def _draw_edge(axes: Axes, x: list[float], y: list[float]) -> None:
    axes.plot(x, y, color=INK, lw=2.4, solid_capstyle="projecting")


def _heatmap_title(grid: Grid) -> str:
    paying = {
        place: cell for place, cell in grid.cells.items() if cell.verdict == "pays"
    }
    if not paying:
        return "Speculation surely pays nowhere on this grid"
    (b, c), cell = max(paying.items(), key=lambda item: item[1].speedup)
    batch = grid.batches[b]
    context = thousands(grid.contexts[c])
    best = f"{cell.speedup:.2f}× at batch {batch} and context {context}"
    if len(paying) == len(grid.cells):
        where = "everywhere on this grid"
    else:
        where = f"in {len(paying)} of {len(grid.cells)} settings"
    return f"Speculation pays {where}, up to {best}"


class ParetoPoint(NamedTuple):
    """A configuration by its latency and throughput."""

    seconds: float
    """Per token of a sequence."""
    rate: float
    """Tokens per second and device."""
    row: Record
    is_drafted: bool = False


# Throughput and latency
# ----------------------------------------------------------------------------------------------


def throughput_latency(data: ReportData) -> Chart | None:
    """Tokens per second of a device against those of each user; the frontier with and without a
    draft, as operators buy: what a device serves where every user gets so much.
    """
    points = _planned_points(data) or _recorded_points(data)
    baselines = _frontier([point for point in points if not point.is_drafted])
    drafted = _frontier([point for point in points if point.is_drafted])
    batches = {point.row.batch_size for point in baselines + drafted}
    if len(drafted) < 2 or len(batches) < 2:
        return None
    chart = Chart("pareto", height=3.4)
    (axes,) = chart.axes
    if baselines:
        _draw_frontier(chart, baselines, GREY, "s", "without a draft")
    _draw_frontier(chart, drafted, RED, "o", "with a draft")
    axes.set(xlabel="tokens/s per user", ylabel="tokens/s per device")
    axes.margins(0.12)
    axes.set_ylim(bottom=0)
    axes.legend(loc="best")
    word = "Predicted"
    if drafted[0].row.source == "measured":
        word = "Measured"
    caption = (
        f"{word}, context {thousands(drafted[0].row.context_len)}. Only points that no other point "
        "of the same line beats in both are drawn. Up and to the right is better."
    )
    limit_s = None if data.plan is None else data.plan.request.tpot_limit_s
    if limit_s:
        chart.part("limit", axes.axvline(1.0 / limit_s, color=GREY, lw=0.8, ls=":"))
        caption += f" Dotted: the limit, {1.0 / limit_s:.3g} tokens/s per user."
    return chart.told(
        title=_pareto_title(baselines, drafted),
        caption=caption,
        table="Throughput at so many tokens/s per user",
        columns=[
            Column("decoding", "Decoding"),
            BATCH,
            CONTEXT,
            Column("configuration", "Configuration"),
            Column("tokens_per_s", "Tokens/s per device", "rate"),
            Column("tokens_per_s_per_user", "Tokens/s per user", "rate"),
        ],
    )


def _planned_points(data: ReportData) -> list[ParetoPoint]:
    """The plan's rows on its first device and context, as users see them: whole requests where
    their lengths are known. None where measured rows hold several batches.
    """
    plan = data.plan
    measured = {row.batch_size for row in data.measured if row.is_speculative}
    if plan is None or len(measured) >= 2:
        return []
    where = (plan.hardware, plan.context_len)
    points = []
    for row in plan.rows:
        if not row.fits or (row.hardware, row.context_len) != where:
            continue
        seconds = row.between_tokens_s
        rate = row.rate_per_gpu
        record = candidate_record(plan, row)
        point = ParetoPoint(
            seconds,
            rate,
            record,
            is_drafted=row.is_speculative,
        )
        points.append(point)
    return points


def _recorded_points(data: ReportData) -> list[ParetoPoint]:
    """The points of records, then those without a draft that the speculative ones imply."""
    points = []
    for row in _one_context(data):
        points.append(_point(row))
        step_s = row.autoregressive_step_s
        if row.is_speculative and step_s:
            rate = row.batch_size / step_s / row.num_devices
            alone = ParetoPoint(
                step_s,
                rate,
                row,
                is_drafted=False,
            )
            points.append(alone)
    return points


def _draw_frontier(
    chart: Chart,
    points: Sequence[ParetoPoint],
    colour: str,
    marker: str,
    name: str,
) -> None:
    (axes,) = chart.axes
    users = [1.0 / point.seconds for point in points]
    rates = [point.rate for point in points]
    chart.part(name, *axes.plot(users, rates, color=colour, lw=1.4))
    for point in points:
        row = point.row
        at = (1.0 / point.seconds, point.rate)
        configuration = describe(row, symbol=GAMMA)
        decoding = name
        if point.is_drafted:
            decoding = configuration
        tip = (
            f"batch {row.batch_size}, context {row.context_len}, {decoding}: "
            f"{point.rate:.0f} tokens/s per device, {1.0 / point.seconds:.3g} per user"
        )
        chart.mark(axes, at, marker, tip, name, color=colour, mew=0.5)
        load = (row.batch_size, row.context_len)
        chart.rows.append((name, *load, configuration, point.rate, 1.0 / point.seconds))
    last = points[-1]
    note = axes.annotate(
        f"batch {last.row.batch_size}",
        (1.0 / last.seconds, last.rate),
        xytext=(5, 5),
        textcoords="offset points",
        color=colour,
    )
    chart.part(name, note)
    axes.plot([], [], marker, color=colour, ls="-", label=name)


def _one_context(data: ReportData) -> list[Record]:
    """The rows of one context, device and temperature: measured ones where they hold several batch
    sizes.
    """

    def batches(rows: Sequence[Record]) -> int:
        return len({row.batch_size for row in rows if row.is_speculative})

    def width(rows: Sequence[Record]) -> tuple[int, int]:
        return batches(rows), rows[0].context_len

    for rows in (data.measured, data.predicted):
        groups: dict[tuple[object, ...], list[Record]] = defaultdict(list)
        for row in rows:
            setting = (row.model, row.hardware, row.context_len, row.temperature)
            groups[setting].append(row)
        widest = max(groups.values(), key=width, default=[])
        if batches(widest) >= 2:
            return widest
    return []


def _point(row: Record) -> ParetoPoint:
    rate = (row.tokens_per_s or 0.0) / row.num_devices
    return ParetoPoint(row.tpot_s or 0.0, rate, row, row.is_speculative)


def _frontier(points: Sequence[ParetoPoint]) -> list[ParetoPoint]:
    """Points that none other beats in both latency and throughput, fastest first."""
    known = [point for point in points if point.seconds > 0 and point.rate > 0]
    known.sort(key=lambda point: (point.seconds, -point.rate))
    frontier: list[ParetoPoint] = []
    highest = 0.0
    for point in known:
        # a gain below 0.1 % is no further point, but clutter on the line
        if point.rate > highest * 1.001:
            frontier.append(point)
            highest = point.rate
    return frontier


def _pareto_title(
    baselines: Sequence[ParetoPoint], drafted: Sequence[ParetoPoint]
) -> str:
    highest = drafted[-1].rate
    best = f"{highest:.0f} tokens/s per device"
    if not baselines:
        return f"Up to {best}"
    alone = baselines[-1].rate
    gain = highest / alone
    if gain > 1:
        return f"Speculation lifts the highest throughput by {percent(gain - 1)}, to {best}"
    most = f"{alone:.0f} tokens/s per device"
    return f"Autoregressive decoding reaches the highest throughput, {most}"


# Under arrivals
# --------------------------------------------------------------------------------------------------

ARRIVALS = "arrivals (requests per second)"
PERCENTILES = tuple(product(("ttft", "tpot"), ("p50", "p95", "p99")))


def latency_by_rate(data: ReportData) -> Chart | None:
    """95th percentiles of TTFT and TPOT over rates of arrivals, with and without speculation."""
    if data.plan is None or data.plan.traffic is None:
        return None
    traffic = data.plan.traffic
    chart = Chart("traffic", height=4.6, rows=2, sharex=True)
    series = []
    for name, loads in groupby(traffic.curves, key=load_name):
        series.append((name, list(loads)))
    request = data.plan.request
    upper, lower = chart.axes
    _percentile_panel(chart, upper, "ttft", series, request.ttft_p95_s)
    _percentile_panel(chart, lower, "tpot", series, request.tpot_p95_s)
    for name, curve in series:
        for load in curve:
            chart.rows.append((load.rate_per_s, name, *_percentiles(load)))
    lower.set(xlabel=ARRIVALS)
    upper.legend(loc="best")
    answer = traffic_line(traffic)
    columns = [Column("rate_per_s", "Requests/s", "number"), Column("draft", "Draft")]
    for latency, which in PERCENTILES:
        columns.append(
            Column(
                f"{latency}_{which}_s",
                f"{latency.upper()} {which}",
                "seconds",
            )
        )
    limits = ""
    if request.ttft_p95_s is not None or request.tpot_p95_s is not None:
        limits = "Dashed: the limits. "
    devices = format_count(traffic.best.num_gpus, "device")
    return chart.told(
        title=answer[0].upper() + answer[1:],
        caption="95th percentiles of the time to the first token and between tokens on "
        f"{devices}, simulated. {limits}A line ends where the queue would grow without bound.",
        table="Latency by rate of arrivals",
        columns=columns,
    )


def _percentiles(load: TrafficLoad) -> list[float | None]:
    """The values of PERCENTILES; None for a load whose queue grows without bound."""
    values = []
    for latency, which in PERCENTILES:
        spread = getattr(load, latency)
        values.append(getattr(spread, which, None))
    return values


def _percentile_panel(
    chart: Chart,
    axes: Axes,
    latency: str,
    series: Sequence[tuple[str, Sequence[TrafficLoad]]],
    limit: float | None,
) -> None:
    """The 95th percentile of one latency over rates, a line for each series, and its limit."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for (name, loads), hue, marker in zip(series, SERIES, MARKERS, strict=False):
        steady = [load for load in loads if not load.overloaded]
        colour = GREY if loads[0].policy == "off" else hue
        rates = [load.rate_per_s for load in steady]
        values = [getattr(load, latency).p95 / MILLI for load in steady]
        chart.part(name, *axes.plot(rates, values, color=colour, lw=1.2, alpha=0.7))
        look: dict[str, Any] = {"ls": "", "marker": marker, "ms": 4.5, "color": colour}
        label: str | None = name
        for rate, value in zip(rates, values, strict=True):
            (mark,) = axes.plot([rate], [value], label=label, **look)
            tip = f"{name}, {format_number(rate)} requests/s: {value:.3g} ms"
            chart.tip(mark, tip, name)
            label = None
    if limit is not None:
        axes.axhline(limit / MILLI, color=RED, lw=1, ls="--")
    axes.set(ylabel=f"{latency.upper()} p95 (ms)", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: thousands(value))
    axes.yaxis.set_minor_formatter(NullFormatter())
