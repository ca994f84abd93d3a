"""Figures over many operating points: where speculation pays, what throughput costs in latency, and
what users see as the rate of arrivals rises."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from magicdec.naming import describe, draft_name
from magicdec.plan_document import Traffic, TrafficLoad
from magicdec.plan_rows import Verdict, verdict_of
from magicdec.records import Record
from magicdec.reports.data import ReportData
from magicdec.reports.figures.chart import BLUE, GREY, GRID, INK, MARKERS, MUTED, RED, SERIES, Chart
from magicdec.reports.sentences import load_name, traffic_line
from magicdec.reports.tables import BATCH, CONTEXT, GAMMA_COLUMN, SPEEDUP, Column
from magicdec.reports.text import GAMMA, compact_tokens, percent, thousands
from magicdec.units import MILLI, format_number, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSS, NEUTRAL, GAIN = "#c9500b", "#f4f2ee", "#0069a9"
CELL_INK, CELL_PAPER = "#15181b", "#fffffe"


class Cell(NamedTuple):
    """The best configuration at one batch and context."""

    speedup: float
    gamma: int
    verdict: Verdict


class Grid(NamedTuple):
    batches: list[int]
    contexts: list[int]
    cells: dict[tuple[int, int], Cell]
    """By the indices of batch and context."""
    word: str


def speedup_heatmap(data: ReportData) -> Chart | None:
    """Best predicted speedup by batch and context, with the gamma that reaches it and the line of
    break-even.
    """
    grid = _planned_grid(data) or _record_grid(data)
    if grid is None:
        return None
    batches, contexts, cells, word = grid
    if data.plan is not None:
        length = data.plan.request.gen_len
    else:
        length = 0
    chart = Chart("heatmap", height=1.3 + 0.42 * len(batches))
    (axes,) = chart.axes
    reach = max(abs(math.log(cell.speedup)) for cell in cells.values()) or 0.01
    for (b, c), cell in cells.items():
        chart.rows.append((batches[b], contexts[c], *cell))
        _draw_cell(
            chart,
            (b, c),
            cell,
            max(reach, math.log(1.25)),
            f"batch {batches[b]}, context {contexts[c]}",
        )
    _break_even(axes, grid)
    axes.set_xticks(range(len(contexts)), labels=[compact_tokens(c) for c in contexts])
    axes.set_yticks(range(len(batches)), labels=[str(b) for b in batches])
    axes.set(
        xlabel="context length (tokens)", ylabel="batch size", xlim=(-0.5, len(contexts) - 0.5)
    )
    axes.set_ylim(-0.5, len(batches) - 0.5)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return chart.told(
        title=_heatmap_title(grid),
        caption=f"{word} speedup of the best γ (in small print) over autoregressive decoding at the same batch. Blue "
        "gains, orange loses; the heavy line is around what pays; ?: unclear; empty: does not fit or was not tried."
        + (
            f" What pays is judged by whole requests of {thousands(length)} tokens."
            if length
            else ""
        ),
        table="Speedup by batch and context",
        columns=[BATCH, CONTEXT, SPEEDUP, GAMMA_COLUMN, Column("verdict", "Verdict")],
    )


def _planned_grid(data: ReportData) -> Grid | None:
    if data.plan is None:
        return None
    table = data.plan.gamma_table
    cells = {
        (b, c): Cell(table.speedup[b][c], table.gamma[b][c], table.verdict[b][c])
        for b in range(len(table.batch_sizes))
        for c in range(len(table.context_lens))
        if table.fits[b][c]
    }
    if len(cells) > 1:
        return Grid(table.batch_sizes, table.context_lens, cells, "Predicted")
    return None


def _record_grid(data: ReportData) -> Grid | None:
    """The best speedup of each batch and context among the records: predicted where there are any,
    else measured.
    """
    for rows, word in ((data.predicted, "Predicted"), (data.measured, "Measured")):
        best: dict[tuple[int, int], Cell] = {}
        for row in rows:
            if row.is_speculative and row.speedup:
                place = (row.batch_size, row.context_len)
                low = row.speedup_low or row.speedup
                high = row.speedup_high or row.speedup
                cell = Cell(row.speedup, row.gamma, verdict_of(speedup_low=low, speedup_high=high))
                best[place] = max(best.get(place, cell), cell)
        batches = sorted({b for b, _ in best})
        contexts = sorted({c for _, c in best})
        if len(best) >= 4 and len(batches) > 1 and len(contexts) > 1:
            cells = {(batches.index(b), contexts.index(c)): cell for (b, c), cell in best.items()}
            return Grid(batches, contexts, cells, word)
    return None


def _draw_cell(chart: Chart, at: tuple[int, int], cell: Cell, reach: float, place: str) -> None:
    from matplotlib.colors import LinearSegmentedColormap, to_hex
    from matplotlib.patches import Rectangle

    (axes,), (b, c) = chart.axes, at
    speedup, gamma, verdict = cell
    depth = math.log(speedup) / reach
    colour = LinearSegmentedColormap.from_list("speedup", [LOSS, NEUTRAL, GAIN])((depth + 1) / 2)
    patch = axes.add_patch(
        Rectangle((c - 0.48, b - 0.46), 0.96, 0.92, facecolor=to_hex(colour), lw=0)
    )
    if gamma:
        setting = f"γ = {gamma}, {verdict}"
    else:
        setting = "leave speculation off"
    chart.tip(patch, f"{place}: {speedup:.2f}×, {setting}")
    middle: dict[str, Any] = {"ha": "center", "va": "center"}
    if not gamma:
        patch.set_facecolor(GRID)
        axes.text(c, b, "off", color=MUTED, **middle)
        return
    dark = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] < 0.55
    ink = CELL_PAPER if dark else CELL_INK
    axes.text(c, b + 0.1, f"{speedup:.2f}×", color=ink, **middle)
    axes.text(c, b - 0.24, f"γ {gamma}{' ?' if verdict == 'unclear' else ''}", color=ink, **middle)


def _break_even(axes: Axes, grid: Grid) -> None:
    """A line along the cells' edges between those that pay and the others."""
    pays = {place: cell.verdict == "pays" for place, cell in grid.cells.items()}
    for b in range(len(grid.batches)):
        for c in range(len(grid.contexts)):
            for other, x, y in (
                ((b, c + 1), [c + 0.5, c + 0.5], [b - 0.5, b + 0.5]),
                ((b + 1, c), [c - 0.5, c + 0.5], [b + 0.5, b + 0.5]),
            ):
                if (b, c) in pays and other in pays and pays[b, c] != pays[other]:
                    axes.plot(x, y, color=INK, lw=2.4, solid_capstyle="projecting")


def _heatmap_title(grid: Grid) -> str:
    paying = {place: cell for place, cell in grid.cells.items() if cell.verdict == "pays"}
    if not paying:
        return "Speculation surely pays nowhere on this grid"
    (b, c), cell = max(paying.items(), key=lambda item: item[1].speedup)
    best = (
        f"{cell.speedup:.2f}× at batch {grid.batches[b]} and context {thousands(grid.contexts[c])}"
    )
    if len(paying) == len(grid.cells):
        where = "everywhere on this grid"
    else:
        where = f"in {len(paying)} of {len(grid.cells)} settings"
    return f"Speculation pays {where}, up to {best}"


# Throughput and latency
# ----------------------------------------------------------------------------------------------

Point = tuple[float, float, Record]
"""Seconds per token, tokens per second and device, and whose they are."""


def throughput_latency(data: ReportData) -> Chart | None:
    """Tokens per second against the time between tokens; the frontier of each way to decode."""
    rows = _one_context(data)
    drafted = [row for row in rows if row.is_speculative]
    implied = [(row.autoregressive_step_s, row) for row in drafted if row.autoregressive_step_s]
    baselines = _frontier(
        [_point(row) for row in rows if not row.is_speculative]
        + [(step, row.batch_size / step / row.tp_size, row) for step, row in implied]
    )
    spec = _frontier([_point(row) for row in drafted])
    if len(spec) < 2 or len({p[2].batch_size for p in (*spec, *baselines)}) < 2:
        return None
    chart = Chart("pareto", height=3.4)
    (axes,) = chart.axes
    for points, colour, marker, name in (
        (baselines, GREY, "s", "autoregressive"),
        (spec, RED, "o", "speculative"),
    ):
        if not points:
            continue
        chart.part(
            name,
            *axes.plot(
                [p[0] / MILLI for p in points], [p[1] for p in points], color=colour, lw=1.4
            ),
        )
        for latency, rate, row in points:
            what = describe(row, symbol=GAMMA)
            tip = f"batch {row.batch_size}, context {row.context_len}, {what if points is spec else name}: "
            tip += f"{rate:.0f} tokens/s, {format_seconds(latency)} per token"
            chart.mark(axes, (latency / MILLI, rate), marker, tip, name, color=colour, mew=0.5)
            chart.rows.append((name, row.batch_size, row.context_len, what, rate, latency))
        latency, rate, row = points[-1]
        note = axes.annotate(
            f"batch {row.batch_size}",
            (latency / MILLI, rate),
            xytext=(5, 5),
            textcoords="offset points",
            color=colour,
        )
        chart.part(name, note)
        axes.plot([], [], marker, color=colour, ls="-", label=name)
    axes.set(xlabel="time per token and sequence (ms)", ylabel="tokens/s per device")
    axes.margins(0.12)
    axes.set_ylim(bottom=0)
    axes.legend(loc="best")
    if rows[0].source == "measured":
        word = "Measured"
    else:
        word = "Predicted"
    return chart.told(
        title=_pareto_title(baselines, spec),
        caption=f"{word}, context {thousands(rows[0].context_len)}. Only points that no other point of the same line "
        "beats in both are drawn. Up and to the left is better.",
        table="Throughput and latency",
        columns=[
            Column("decoding", "Decoding"),
            BATCH,
            CONTEXT,
            Column("configuration", "Configuration"),
            Column("tokens_per_s", "Tokens/s per device", "rate"),
            Column("tpot_s", "Time per token", "seconds"),
        ],
    )


def _one_context(data: ReportData) -> list[Record]:
    """The rows of one context, device and temperature: measured ones where they hold several batch
    sizes.
    """

    def batches(rows: Sequence[Record]) -> int:
        return len({r.batch_size for r in rows if r.is_speculative})

    for rows in (data.measured, data.predicted):
        groups: dict[tuple[object, ...], list[Record]] = {}
        for row in rows:
            groups.setdefault(
                (row.model, row.hardware, row.context_len, row.temperature), []
            ).append(row)
        widest = max(groups.values(), key=lambda g: (batches(g), g[0].context_len), default=[])
        if batches(widest) >= 2:
            return widest
    return []


def _point(row: Record) -> Point:
    return row.tpot_s or 0.0, (row.tokens_per_s or 0.0) / row.tp_size, row


def _frontier(points: Sequence[Point]) -> list[Point]:
    """Points that none other beats in both latency and throughput, fastest first."""
    kept: list[Point] = []
    for point in sorted((p for p in points if p[0] > 0 and p[1] > 0), key=lambda p: (p[0], -p[1])):
        if not kept or point[1] > kept[-1][1] * 1.001:
            kept.append(point)
    return kept


def _pareto_title(baselines: Sequence[Point], spec: Sequence[Point]) -> str:
    best = f"{spec[-1][1]:.0f} tokens/s per device"
    if not baselines:
        return f"Up to {best}"
    gain = spec[-1][1] / baselines[-1][1]
    if gain > 1:
        return f"Speculation lifts the highest throughput by {percent(gain - 1)}, to {best}"
    return f"Autoregressive decoding reaches the highest throughput, {baselines[-1][1]:.0f} tokens/s per device"


# Under arrivals
# ------------------------------------------------------------------------------------------------------

RATE = Column("rate_per_s", "Requests/s", "number")
NAME = Column("draft", "Draft")
ARRIVALS = "arrivals (requests per second)"
WHICH = ("p50", "p95", "p99")


def _traffic(data: ReportData) -> Traffic | None:
    if data.plan is None:
        return None
    return data.plan.traffic


def _series(traffic: Traffic) -> list[tuple[str, list[TrafficLoad]]]:
    return [(name, list(loads)) for name, loads in groupby(traffic.curves, key=load_name)]


def _devices(traffic: Traffic) -> str:
    return f"{traffic.best.num_gpus} device{'s' if traffic.best.num_gpus > 1 else ''}"


def latency_by_rate(data: ReportData) -> Chart | None:
    """95th percentiles of TTFT and TPOT over rates of arrivals, with and without speculation."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if data.plan is None or (traffic := _traffic(data)) is None:
        return None
    chart = Chart("traffic", height=4.6, rows=2, sharex=True)
    shown = [
        each
        for each in _series(traffic)
        if each[1][0].policy in ("off", traffic.best.policy, "by batch")
    ]
    limits = {"ttft": data.plan.request.ttft_p95_s, "tpot": data.plan.request.tpot_p95_s}
    for axes, (what, limit) in zip(chart.axes, limits.items(), strict=True):
        for i, (name, loads) in enumerate(shown):
            kept = [load for load in loads if not load.overloaded]
            values = [getattr(load, what).p95 / MILLI for load in kept]
            _over_rates(chart, axes, (i, name, kept), values, lambda value: f"{value:.3g} ms")
        if limit is not None:
            axes.axhline(limit / MILLI, color=RED, lw=1, ls="--")
        axes.set(ylabel=f"{what.upper()} p95 (ms)", yscale="log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(lambda value, _: thousands(value))
        axes.yaxis.set_minor_formatter(NullFormatter())
    for name, loads in shown:
        for load in loads:
            seconds = [
                getattr(getattr(load, what), which, None) for what in limits for which in WHICH
            ]
            chart.rows.append((load.rate_per_s, name, *seconds))
    chart.axes[-1].set(xlabel=ARRIVALS)
    chart.axes[0].legend(loc="best")
    answer = traffic_line(traffic)
    heads = [(f"{what}_{which}_s", f"{what.upper()} {which}") for what in limits for which in WHICH]
    return chart.told(
        title=answer[0].upper() + answer[1:],
        caption=f"95th percentiles of the time to the first token and between tokens on {_devices(traffic)}, "
        "simulated. Dashed: the limits. A line ends where the queue would grow without bound.",
        table="Latency by rate of arrivals",
        columns=[RATE, NAME, *(Column(name, title, "seconds") for name, title in heads)],
    )


def _over_rates(
    chart: Chart,
    axes: Axes,
    line: tuple[int, str, Sequence[TrafficLoad]],
    values: Sequence[float],
    text: Callable[[float], str],
) -> None:
    """One series: its place in the order, its name, and the loads that `values` are of."""
    i, name, loads = line
    if loads and loads[0].policy == "off":
        colour = GREY
    else:
        colour = SERIES[i % len(SERIES)]
    rates = [load.rate_per_s for load in loads]
    chart.part(name, *axes.plot(rates, values, color=colour, lw=1.2, alpha=0.7))
    look: dict[str, Any] = {
        "ls": "",
        "marker": MARKERS[i % len(MARKERS)],
        "ms": 4.5,
        "color": colour,
    }
    for j, (rate, value) in enumerate(zip(rates, values, strict=True)):
        (mark,) = axes.plot([rate], [value], label=name if j == 0 else None, **look)
        chart.tip(mark, f"{name}, {format_number(rate)} requests/s: {text(value)}", name)


def goodput_by_policy(data: ReportData) -> Chart | None:
    """Requests per second that keep the limits, over rates, for each policy of gamma."""
    if (traffic := _traffic(data)) is None:
        return None
    chart = Chart("goodput")
    (axes,) = chart.axes
    for i, (name, loads) in enumerate(_series(traffic)):
        kept = [load.goodput_per_s for load in loads]
        _over_rates(chart, axes, (i, name, loads), kept, lambda value: f"{value:.3g} kept per s")
        chart.rows += [
            (each.rate_per_s, name, each.goodput_per_s, "yes" if each.overloaded else "no")
            for each in loads
        ]
    highest = max(load.rate_per_s for load in traffic.curves)
    axes.plot([0, highest], [0, highest], color=GREY, lw=0.8, ls=":")
    axes.set(xlabel=ARRIVALS, ylabel="kept within limits (per second)")
    axes.legend(loc="best")
    best = max(traffic.curves, key=lambda load: load.goodput_per_s)
    rate = format_number(best.goodput_per_s)
    return chart.told(
        title=f"At most {rate} requests/s keep the limits on {_devices(traffic)}: {load_name(best)}",
        caption=f"Requests per second that keep both limits on {_devices(traffic)}, simulated; dotted: all that "
        "arrive. A policy is one gamma, or the plan's table of gammas by batch, or by batch and context.",
        table="Goodput by policy",
        columns=[
            RATE,
            NAME,
            Column("goodput_per_s", "Kept/s", "number"),
            Column("overloaded", "Overloaded"),
        ],
    )


def timeline(data: ReportData) -> Chart | None:
    """A replica's batch, queue and use of its cache over time."""
    if (traffic := _traffic(data)) is None or not traffic.timeline:
        return None
    moments, best = traffic.timeline, traffic.best
    chart = Chart("timeline", height=3.6, rows=2, sharex=True)
    upper, lower = chart.axes
    times = [each.time_s for each in moments]
    for name, colour in (("batch", BLUE), ("waiting", RED)):
        upper.step(
            times,
            [getattr(each, name) for each in moments],
            where="post",
            color=colour,
            lw=1,
            label=name,
        )
    lower.step(times, [100.0 * each.kv_share for each in moments], where="post", color=BLUE, lw=1)
    upper.set(ylabel="requests")
    lower.set(ylabel="cache in use (%)", xlabel="time (s)")
    upper.legend(loc="best")
    chart.rows += [
        (each.time_s, round(each.batch), round(each.waiting), each.kv_share) for each in moments
    ]
    peak = max(each.batch for each in moments)
    if best.is_speculative:
        drafted = draft_name(best.draft, best.draft_method)
    else:
        drafted = "no draft"
    return chart.told(
        title=f"A replica's batch reaches {peak:g} at {format_number(traffic.rate_per_s)} requests/s",
        caption=f"One replica of {best.num_replicas} over time, {drafted}: requests that decode or are "
        "prefilled, those that wait for a slot or for room, and the share of the cache in use.",
        table="A replica over time",
        columns=[
            Column("time_s", "Time", "seconds"),
            Column("batch", "Batch", "integer"),
            Column("waiting", "Waiting", "integer"),
            Column("kv_share", "Cache", "percent"),
        ],
    )
