"""Figures of where a step's time and a device's memory go."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from magicdec.comparison import is_paired
from magicdec.plan_document import Operation
from magicdec.records import Record
from magicdec.reports.data import ReportData
from magicdec.reports.figures.chart import Chart
from magicdec.reports.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LIMIT_COLOURS,
    LIMIT_NAMES,
    LIMIT_TITLES,
    MARKERS,
    MUTED,
    OCHRE,
    ON_COLOUR,
    PAPER,
    PHASE_COLOURS,
    PURPLE,
    RED,
    Tips,
    new_figure,
    percent,
)
from magicdec.reports.tables import Column, Table, Value
from magicdec.units import GIB, GIGA, MILLI, format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_KEYS_IN_A_ROW = 4
Bar = tuple[str, dict[str, float]]
FENCES = (
    " Measured phases are timed apart, with fences that the full step, whose time stands at the bar, does not have."
)


# Phases --------------------------------------------------------------------------------------------------------------


def step_phases(data: ReportData) -> Chart | None:
    """Time per emitted token, autoregressive against speculative, split into draft, verify and accept."""
    reference = _with_phases(data)
    if reference is None:
        return None
    bars: list[Bar] = []
    totals: list[float] = []
    for word, rows in (("measured", data.measured), ("predicted", data.predicted)):
        row = next((r for r in rows if is_paired(r, reference)), None)
        if row is None or row.autoregressive_step_s is None or _phases(row) is None:
            continue
        bars.append((f"autoregressive\n{word}", {"autoregressive": row.autoregressive_step_s}))
        bars.append((f"speculative\n{word}", _phases(row) or {}))
        totals += [row.autoregressive_step_s, (row.step_s or 0.0) / (row.expected_tokens_per_step or 1.0)]
    if not bars:
        return None
    figure, (axes,) = new_figure(height=1.15 + 0.5 * len(bars))
    tips = Tips("phases")
    table = _stack(axes, bars, PHASE_COLOURS, tips, totals)
    axes.set(xlabel="time per token and sequence (ms)")
    _key(axes, [p for p in PHASE_COLOURS if any(p in parts for _, parts in bars)], PHASE_COLOURS)
    ar, spec = totals[:2]
    share = bars[1][1].get("verify", 0.0) / sum(bars[1][1].values())
    tokens = reference.expected_tokens_per_step or 1.0
    return Chart(
        title=(
            f"A token takes {format_seconds(spec)} instead of {format_seconds(ar)}; "
            f"verification is {percent(share)} of it"
        ),
        caption=(
            f"A speculative step drafts {reference.gamma} tokens, verifies them in one pass and "
            f"emits {tokens:.2f} tokens; its time is divided by these. Batch {reference.batch_size}, context "
            f"{reference.context_len}." + (FENCES if any("measured" in label for label, _ in bars) else "")
        ),
        figure=figure,
        marks=tips,
        table=_stack_table("phases", "Time per token by phase", table),
    )


def _with_phases(data: ReportData) -> Record | None:
    """The reference's row, or else the fastest measured one, for which the phases are known."""
    reference = data.reference
    rows = [r for r in (*data.measured, *data.predicted) if r.is_speculative and _phases(r) is not None]
    matching = [r for r in rows if reference is not None and is_paired(r, reference)]
    return matching[0] if matching else max(rows, key=lambda r: r.speedup or 0, default=None)


def _phases(row: Record) -> dict[str, float] | None:
    """Seconds per emitted token by phase; what the phases leave of the step is "other"."""
    tokens, step = row.expected_tokens_per_step, row.step_s
    if not tokens or step is None or row.draft_step_s is None or row.verify_step_s is None:
        return None
    parts = {"draft": row.gamma * row.draft_step_s, "verify": row.verify_step_s, "accept": row.accept_step_s or 0.0}
    parts["upkeep"] = (row.breakdown_s or {}).get("upkeep", 0.0)
    parts["other"] = max(step - sum(parts.values()), 0.0)
    return {name: value / tokens for name, value in parts.items() if value > 0}


def _stack(
    axes: Axes, bars: Sequence[Bar], colours: Mapping[str, str], tips: Tips, totals: Sequence[float] | None = None
) -> list[tuple[Value, ...]]:
    """Stacked horizontal bars in milliseconds, with the total at the end of each (by default that of its parts)."""
    table: list[tuple[Value, ...]] = []
    longest = max(sum(parts.values()) for _, parts in bars)
    for i, (label, parts) in enumerate(bars):
        left = 0.0
        for name in [n for n in colours if n in parts]:
            value = parts[name]
            (bar,) = axes.barh(i, value / MILLI, left=left / MILLI, height=0.62, color=colours[name], lw=0)
            tips.add(bar, f"{label.replace(chr(10), ', ')}: {name} {format_seconds(value)}")
            if value > 0.15 * longest:
                axes.text((left + value / 2) / MILLI, i, format_seconds(value), ha="center", va="center",
                          color=ON_COLOUR)  # fmt: skip
            table.append((label.replace("\n", ", "), name, value))
            left += value
        axes.text(
            (left + 0.015 * longest) / MILLI,
            i,
            format_seconds(totals[i] if totals else left),
            va="center",
            fontweight="bold",
        )
    axes.set_yticks(range(len(bars)), labels=[label for label, _ in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, 1.17 * longest / MILLI)
    axes.grid(visible=False, axis="y")
    return table


def _key(axes: Axes, names: Sequence[str], colours: Mapping[str, str], titles: Mapping[str, str] | None = None) -> None:
    from matplotlib.patches import Patch

    columns = len(names) if len(names) < MAX_KEYS_IN_A_ROW else -(-len(names) // 2)
    handles = [Patch(color=colours[name], label=(titles or {}).get(name, name)) for name in names]
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, handlelength=1,
        handleheight=1, columnspacing=1.0, borderaxespad=0.1,
    )  # fmt: skip


def _stack_table(name: str, title: str, rows: Sequence[tuple[Value, ...]]) -> Table:
    columns = (
        Column("bar", "What"),
        Column("part", "Part"),
        Column("time_s", "Time", "seconds"),
    )
    return Table(name, title, columns, tuple(rows))


# What binds ----------------------------------------------------------------------------------------------------------


def time_by_limit(data: ReportData) -> Chart | None:
    """Predicted time per emitted token by what binds it: weights, KV, compute, link or overhead."""
    if data.plan is None or not data.plan.breakdown.get("autoregressive"):
        return None
    breakdown, best = data.plan.breakdown, data.plan.best
    bars: list[Bar] = [("autoregressive", by_limit(breakdown["autoregressive"]))]
    gamma, tokens = best.gamma, best.expected_tokens_per_step
    if gamma and breakdown.get("verify"):
        speculative: dict[str, float] = {}
        for part, times in (("draft", gamma), ("verify", 1), ("accept", 1), ("upkeep", 1)):
            for limit, seconds in by_limit(breakdown.get(part, [])).items():
                speculative[limit] = speculative.get(limit, 0.0) + times * seconds / tokens
        rest = best.step_s / tokens - sum(speculative.values())
        if rest > 0:
            speculative["overhead"] = speculative.get("overhead", 0.0) + rest
        bars.append((f"speculative,\nγ = {gamma}", speculative))
    figure, (axes,) = new_figure(height=1.25 + 0.55 * len(bars))
    tips = Tips("limits")
    table = _stack(axes, bars, LIMIT_COLOURS, tips)
    axes.set(xlabel="predicted time per token and sequence (ms)")
    _key(axes, [n for n in LIMIT_COLOURS if any(n in parts for _, parts in bars)], LIMIT_COLOURS, LIMIT_TITLES)
    first = bars[0][1]
    largest = max(first, key=lambda n: first[n])
    share = first[largest] / sum(first.values())
    title = f"{percent(share)} of an autoregressive step goes into {LIMIT_NAMES.get(largest, largest)}"
    if len(bars) > 1 and largest in bars[1][1]:
        title += f"; speculation makes it {first[largest] / bars[1][1][largest]:.1f}× less per token"
    return Chart(
        title=title,
        caption=(
            "Every operation counts towards what binds it. The speculative step is divided by the tokens it emits; "
            "accepting and the step's fixed cost count as overhead."
        ),
        figure=figure,
        marks=tips,
        table=_stack_table("limits", "Predicted time per token by what binds", table),
    )


def by_limit(ops: Sequence[Operation]) -> dict[str, float]:
    """Seconds by `bound_by`; an unknown limit counts as overhead."""
    totals: dict[str, float] = {}
    for op in ops:
        limit = op.bound_by if op.bound_by in LIMIT_COLOURS else "overhead"
        totals[limit] = totals.get(limit, 0.0) + op.time_s
    return {name: value for name, value in totals.items() if value > 0}


# Roofline ------------------------------------------------------------------------------------------------------------

_PASSES = (("autoregressive", GREY), ("draft", BLUE), ("verify", RED))


def roofline(data: ReportData) -> Chart | None:
    """Each operation by FLOPs per byte and by the rate it reaches, under the device's ceilings."""
    points = _roofline_points(data.plan.breakdown if data.plan is not None else {})
    if not points:
        return None
    figure, (axes,) = new_figure(height=3.7)
    tips = Tips("roofline")
    table: list[tuple[Value, ...]] = []
    for part, colour, op, intensity, rate, ceiling in points:
        marker = MARKERS[[p for p, _ in _PASSES].index(part)]
        if ceiling is not None:
            axes.plot([intensity, intensity], [rate / GIGA, ceiling / GIGA], color=colour, lw=0.8, alpha=0.6)
            axes.plot(intensity, ceiling / GIGA, "_", color=colour, ms=7)
        (mark,) = axes.plot(intensity, rate / GIGA, marker, color=colour, mec=PAPER, mew=0.5)
        tips.add(mark, f"{op}, {part}: {intensity:.3g} FLOP/byte, {format_rate(rate, 'FLOP')}")
        table.append((part, op, intensity, rate, ceiling))
    for i, (part, colour) in enumerate(_PASSES):
        if any(p[0] == part for p in points):
            axes.plot([], [], MARKERS[i], color=colour, ls="none", label=part)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="GFLOP/s")
    nominal, fitted = _roofs(data)
    if nominal is not None:
        _draw_roofs(axes, nominal, fitted, [p[3] for p in points])
    _whole_decades(axes)
    axes.legend(loc="lower right")
    attention = [p[3] for p in points if "attention" in p[2] and p[0] == "verify"]
    columns = (
        Column("pass", "Pass"),
        Column("op", "Operation"),
        Column("flops_per_byte", "FLOP/byte", "number"),
        Column("flops_per_s", "FLOP/s", "rate"),
        Column("ceiling_flops_per_s", "Datasheet allows", "rate"),
    )
    caption = "Each mark is one operation of a pass as predicted, the tick on its stem what the datasheet allows."
    if nominal is not None:
        caption += " Solid line: the device's nominal ceiling"
        caption += "; dashed: as calibrated for linear layers." if fitted is not None else "."
    title = "How near each operation comes to the device's ceilings"
    if attention:
        title = f"Verification's attention does {max(attention):.2g} FLOP per byte of what it reads"
    return Chart(
        title=title,
        caption=caption,
        figure=figure,
        marks=tips,
        table=Table("roofline", "Operations on the roofline", columns, tuple(table)),
    )


RooflinePoint = tuple[str, str, str, float, float, float | None]


def _roofline_points(breakdown: Mapping[str, Sequence[Operation]]) -> list[RooflinePoint]:
    points = []
    for part, colour in _PASSES:
        for op in breakdown.get(part, ()):
            if op.flops > 0 and op.bytes > 0 and op.time_s > 0 and op.bound_by != "link":
                ceiling = op.flops / op.ceiling_s if op.ceiling_s > 0 else None
                points.append((part, colour, op.op, op.flops / op.bytes, op.flops / op.time_s, ceiling))
    return points


def _whole_decades(axes: Axes) -> None:
    """Labels only powers of ten on logarithmic axes, and at least two of them."""
    from matplotlib.ticker import NullFormatter

    for axis, (low, high), set_limits in (
        (axes.xaxis, axes.get_xlim(), axes.set_xlim),
        (axes.yaxis, axes.get_ylim(), axes.set_ylim),
    ):
        first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
        if last - first < 1:
            set_limits(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
        axis.set_minor_formatter(NullFormatter())


Roof = tuple[float, float]
"""Bytes per second and FLOP per second."""


def _roofs(data: ReportData) -> tuple[Roof | None, Roof | None]:
    """The device's nominal roof and the calibrated one: the profile's that was given, else the plan's."""
    profile = data.profile
    if profile is None:
        ceilings = data.plan.ceilings if data.plan is not None else None
        if ceilings is None:
            return None, None
        nominal = ceilings.memory_bytes_per_s, ceilings.flops_per_s
        return nominal, (ceilings.gemm_bytes_per_s, ceilings.gemm_flops_per_s)
    bandwidth = profile.get("memory_bytes_per_s")
    rates = profile.get("flops_per_s") or {}
    peak = rates.get("bf16") or rates.get("fp32") or max(rates.values(), default=None)
    if not bandwidth or not peak:
        return None, None
    gemm = profile.get("gemm") or {}
    slope, top = gemm.get("bandwidth_efficiency"), gemm.get("flops_efficiency")
    return (bandwidth, peak), (slope * bandwidth, top * peak) if slope and top else None


def _draw_roofs(axes: Axes, nominal: Roof, fitted: Roof | None, intensities: Sequence[float]) -> None:
    """Over the intensities of the marks and the ridge, with the nominal roof's two numbers."""
    bandwidth, peak = nominal
    low, high = min(*intensities, peak / bandwidth) / 3, max(*intensities, peak / bandwidth) * 4
    for roof, style in ((nominal, "-"), (fitted, "--")):
        if roof is not None:
            slope, top = roof
            axes.plot([low, top / slope, high], [low * slope / GIGA, top / GIGA, top / GIGA], color=INK, lw=1, ls=style)
    middle = (low * peak / bandwidth) ** 0.5
    axes.annotate(
        format_rate(bandwidth, "B"), (middle, middle * bandwidth / GIGA), xytext=(-7, 3), textcoords="offset points",
        ha="right", color=MUTED,
    )  # fmt: skip
    axes.annotate(
        format_rate(peak, "FLOP"), (high, peak / GIGA), xytext=(0, 4), textcoords="offset points", ha="right",
        color=MUTED,
    )  # fmt: skip
    axes.set_ylim(top=max(peak / GIGA * 2.5, axes.get_ylim()[1]))


# Memory --------------------------------------------------------------------------------------------------------------

_MEMORY = {
    "weights_bytes": ("weights", BLUE), "kv_bytes": ("KV cache", RED), "draft_weights_bytes": ("draft weights", PURPLE),
    "draft_kv_bytes": ("draft KV cache", OCHRE), "workspace_bytes": ("workspace", GREEN),
}  # fmt: skip


def memory_bar(data: ReportData) -> Chart | None:
    """Memory that the planned configuration takes on one device."""
    memory = data.plan.memory if data.plan is not None else None
    parts = {name: value for name in _MEMORY if (value := getattr(memory, name, 0.0))}
    if memory is None or not parts:
        return None
    capacity = memory.capacity_bytes
    figure, (axes,) = new_figure(height=1.75)
    tips = Tips("memory")
    total = sum(parts.values())
    scale = max(capacity, total)
    left = 0.0
    table: list[tuple[Value, ...]] = []
    for name, value in parts.items():
        title, colour = _MEMORY[name]
        (bar,) = axes.barh(0, value / GIB, left=left / GIB, height=0.5, color=colour, lw=0)
        tips.add(bar, f"{title}: {format_bytes(value)}, {percent(value / scale, 1)} of the memory")
        table.append((title, value))
        left += value
    if capacity:
        axes.axvline(capacity / GIB, color=INK, lw=1.4)
        table.append(("capacity", capacity))
    axes.set(xlabel="GiB per device", xlim=(0, 1.05 * scale / GIB), ylim=(-0.5, 0.5))
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
    _key(axes, [_MEMORY[n][0] for n in parts], dict(_MEMORY.values()))
    draft = parts.get("draft_kv_bytes", 0.0) + parts.get("draft_weights_bytes", 0.0)
    title = f"{format_bytes(total)} per device"
    title += f" of {format_bytes(capacity)}" if capacity else ""
    title += f"; the draft adds {percent(draft / (total - draft), 1)}" if 0 < draft < total else ""
    columns = (Column("part", "Part"), Column("bytes", "Size", "bytes"))
    return Chart(
        title=title,
        caption="What the planned configuration holds in memory at its full context. The line is the device's memory.",
        figure=figure,
        marks=tips,
        table=Table("memory", "Memory per device", columns, tuple(table)),
    )
