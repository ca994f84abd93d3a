"""Figures of where a step's time and a device's memory go."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from magicdec.comparison import is_paired
from magicdec.plan_document import Ceilings, Operation
from magicdec.records import Record
from magicdec.reports.data import ReportData, fastest
from magicdec.reports.figures.chart import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MARKERS,
    MUTED,
    OCHRE,
    ON_COLOUR,
    PURPLE,
    RED,
    Chart,
)
from magicdec.reports.tables import Column
from magicdec.reports.text import percent
from magicdec.units import GIB, GIGA, MILLI, format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_KEYS_IN_A_ROW = 4
FENCES = (
    " Measured phases are timed apart, with fences that the full step, "
    "whose time stands at the bar, does not have."
)


class Part(NamedTuple):
    """A part of a bar: its title in the key, its colour, and its name in a sentence."""

    title: str
    colour: str
    text: str = ""


PHASES = {
    name: Part(name, colour)
    for name, colour in (("autoregressive", GREY), ("draft", BLUE), ("verify", RED), ("accept", GREEN),
                         ("upkeep", PURPLE), ("other", OCHRE))
}  # fmt: skip
LIMITS = {
    "weights": Part("weights", BLUE, "reading weights"), "kv": Part("KV", RED, "reading KV"),
    "compute": Part("compute", GREEN, "computing"), "link": Part("link", PURPLE, "the link"),
    "overhead": Part("overhead", GREY, "overhead"),
}  # fmt: skip
MEMORY = {
    "weights_bytes": Part("weights", BLUE), "kv_bytes": Part("KV cache", RED),
    "draft_weights_bytes": Part("draft weights", PURPLE), "draft_kv_bytes": Part("draft KV cache", OCHRE),
    "workspace_bytes": Part("workspace", GREEN),
}  # fmt: skip


class Bar(NamedTuple):
    """Seconds by part, and the total at its end: by default that of the parts."""

    label: str
    parts: dict[str, float]
    total: float | None = None


def _stacked(
    chart: Chart,
    bars: Sequence[Bar],
    kinds: Mapping[str, Part],
    unit: float = MILLI,
    written: Callable[[float], str] = format_seconds,
) -> None:
    """Stacked horizontal bars with the total at the end of each, and their key."""
    from matplotlib.patches import Patch

    (axes,) = chart.axes
    longest = max(sum(bar.parts.values()) for bar in bars)
    for i, (label, parts, total) in enumerate(bars):
        left = 0.0
        line = label.replace("\n", ", ")
        for name in [n for n in kinds if n in parts]:
            value = parts[name]
            kind = kinds[name]
            text = written(parts[name])
            (drawn,) = axes.barh(
                i, value / unit, left=left / unit, height=0.62, color=kind.colour, lw=0
            )
            chart.tip(drawn, f"{line}: {kind.title} {text}")
            if value > 0.15 * longest:
                axes.text(
                    (left + value / 2) / unit, i, text, ha="center", va="center", color=ON_COLOUR
                )
            chart.rows.append((line, kind.title, value))
            left += value
        end = written(left if total is None else total)
        axes.text((left + 0.015 * longest) / unit, i, end, va="center", fontweight="bold")
    axes.set_yticks(range(len(bars)), labels=[bar.label for bar in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, 1.17 * longest / unit)
    axes.grid(visible=False, axis="y")
    shown = [part for name, part in kinds.items() if any(name in bar.parts for bar in bars)]
    if len(shown) < MAX_KEYS_IN_A_ROW:
        columns = len(shown)
    else:
        columns = -(-len(shown) // 2)
    handles = [Patch(color=part.colour, label=part.title) for part in shown]
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=columns,
        handlelength=1,
        handleheight=1,
        columnspacing=1.0,
        borderaxespad=0.1,
    )


_STACK_COLUMNS = (
    Column("bar", "What"),
    Column("part", "Part"),
    Column("time_s", "Time", "seconds"),
)


# Phases
# --------------------------------------------------------------------------------------------------------------


def step_phases(data: ReportData) -> Chart | None:
    """Time per emitted token, autoregressive against speculative, split into draft, verify and
    accept.
    """
    reference = _with_phases(data)
    if reference is None:
        return None
    bars: list[Bar] = []
    for word, rows in (("measured", data.measured), ("predicted", data.predicted)):
        row = next((r for r in rows if is_paired(r, reference)), None)
        alone, parts = (None, None) if row is None else (row.autoregressive_step_s, _phases(row))
        if row is not None and alone is not None and parts is not None:
            per_token = (row.step_s or 0.0) / (row.expected_tokens_per_step or 1.0)
            bars.append(Bar(f"autoregressive\n{word}", {"autoregressive": alone}, alone))
            bars.append(Bar(f"speculative\n{word}", parts, per_token))
    if not bars:
        return None
    chart = Chart("phases", height=1.15 + 0.5 * len(bars))
    _stacked(chart, bars, PHASES)
    chart.axes[0].set(xlabel="time per token and sequence (ms)")
    (_, _, before), (_, parts, after) = bars[:2]
    share = parts.get("verify", 0.0) / sum(parts.values())
    emitted = f"{reference.expected_tokens_per_step or 1.0:.2f} tokens"
    return chart.told(
        title=f"A token takes {format_seconds(after or 0.0)} instead of {format_seconds(before or 0.0)}; "
        f"verification is {percent(share)} of it",
        caption=f"A speculative step drafts {reference.gamma} tokens, verifies them in one pass and emits {emitted}; "
        f"its time is divided by these. Batch {reference.batch_size}, context {reference.context_len}."
        + (FENCES if any("measured" in bar.label for bar in bars) else ""),
        table="Time per token by phase",
        columns=_STACK_COLUMNS,
    )


def _with_phases(data: ReportData) -> Record | None:
    """The reference's row, or else the fastest measured one, for which the phases are known."""
    reference = data.reference
    rows = [r for r in data.rows if r.is_speculative and _phases(r) is not None]
    return next(
        (r for r in rows if reference is not None and is_paired(r, reference)), fastest(rows)
    )


def _phases(row: Record) -> dict[str, float] | None:
    """Seconds per emitted token by phase; what the phases leave of the step is "other"."""
    tokens, step = row.expected_tokens_per_step, row.step_s
    if not tokens or step is None or row.draft_step_s is None or row.verify_step_s is None:
        return None
    parts = {
        "draft": row.gamma * row.draft_step_s,
        "verify": row.verify_step_s,
        "accept": row.accept_step_s or 0.0,
    }
    parts["upkeep"] = (row.breakdown_s or {}).get("upkeep", 0.0)
    parts["other"] = max(step - sum(parts.values()), 0.0)
    return {name: value / tokens for name, value in parts.items() if value > 0}


# What binds
# ----------------------------------------------------------------------------------------------------------


def time_by_limit(data: ReportData) -> Chart | None:
    """Predicted time per emitted token by what binds it: weights, KV, compute, link or overhead."""
    if data.plan is None or not data.plan.breakdown.get("autoregressive"):
        return None
    breakdown, best = data.plan.breakdown, data.plan.best
    bars = [Bar("autoregressive", by_limit(breakdown["autoregressive"]))]
    gamma = best.gamma
    tokens = best.drafting.tokens_per_step
    if gamma and breakdown.get("verify"):
        speculative: dict[str, float] = {}
        for part, times in (("draft", gamma), ("verify", 1), ("accept", 1), ("upkeep", 1)):
            for limit, seconds in by_limit(breakdown.get(part, [])).items():
                speculative[limit] = speculative.get(limit, 0.0) + times * seconds / tokens
        rest = best.step_s / tokens - sum(speculative.values())
        if rest > 0:
            speculative["overhead"] = speculative.get("overhead", 0.0) + rest
        bars.append(Bar(f"speculative,\nγ = {gamma}", speculative))
    chart = Chart("limits", height=1.25 + 0.55 * len(bars))
    _stacked(chart, bars, LIMITS)
    chart.axes[0].set(xlabel="predicted time per token and sequence (ms)")
    first, last = bars[0].parts, bars[-1].parts
    largest = max(first, key=lambda name: first[name])
    share = percent(first[largest] / sum(first.values()))
    title = f"{share} of an autoregressive step goes into {LIMITS[largest].text}"
    if len(bars) > 1 and largest in last:
        title += f"; speculation makes it {first[largest] / last[largest]:.1f}× less per token"
    return chart.told(
        title=title,
        caption="Every operation counts towards what binds it. The speculative step is divided by the tokens it emits; "
        "accepting and the step's fixed cost count as overhead.",
        table="Predicted time per token by what binds",
        columns=_STACK_COLUMNS,
    )


def by_limit(ops: Sequence[Operation]) -> dict[str, float]:
    """Seconds by `bound_by`; an unknown limit counts as overhead."""
    totals: dict[str, float] = {}
    for op in ops:
        limit = op.bound_by if op.bound_by in LIMITS else "overhead"
        totals[limit] = totals.get(limit, 0.0) + op.time_s
    return {name: value for name, value in totals.items() if value > 0}


# Roofline
# ------------------------------------------------------------------------------------------------------------

_PASSES = {
    "autoregressive": (GREY, MARKERS[0]),
    "draft": (BLUE, MARKERS[1]),
    "verify": (RED, MARKERS[2]),
}


def roofline(data: ReportData) -> Chart | None:
    """Each operation by FLOPs per byte and by the rate it reaches, under the device's ceilings."""
    chart = Chart("roofline", height=3.7)
    (axes,) = chart.axes
    intensities = []
    attention = []
    for part, (colour, marker) in _PASSES.items():
        for op in data.plan.breakdown.get(part, ()) if data.plan is not None else ():
            if op.flops <= 0 or op.bytes <= 0 or op.time_s <= 0 or op.bound_by == "link":
                continue
            ceiling = None
            if op.ceiling_s > 0:
                ceiling = op.flops / op.ceiling_s
            intensity = op.flops / op.bytes
            rate = op.flops / op.time_s
            if ceiling is not None:
                axes.plot(
                    [intensity] * 2, [rate / GIGA, ceiling / GIGA], color=colour, lw=0.8, alpha=0.6
                )
                axes.plot(intensity, ceiling / GIGA, "_", color=colour, ms=7)
            tip = f"{op.op}, {part}: {intensity:.3g} FLOP/byte, {format_rate(rate, 'FLOP')}"
            chart.mark(axes, (intensity, rate / GIGA), marker, tip, color=colour, mew=0.5)
            chart.rows.append((part, op.op, intensity, rate, ceiling))
            intensities.append(intensity)
            attention += [intensity] if "attention" in op.op and part == "verify" else []
        if any(row[0] == part for row in chart.rows):
            axes.plot([], [], marker, color=colour, ls="none", label=part)
    if data.plan is None or not intensities:
        return None
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="GFLOP/s")
    caption = "Each mark is one operation of a pass as predicted, the tick on its stem what the datasheet allows."
    if data.plan.ceilings is not None:
        _draw_roofs(axes, data.plan.ceilings, intensities)
        caption += " Solid line: the device's nominal ceiling; dashed: as fitted to linear layers."
    _whole_decades(axes)
    axes.legend(loc="lower right")
    title = "How near each operation comes to the device's ceilings"
    if attention:
        title = f"Verification's attention does {max(attention):.2g} FLOP per byte of what it reads"
    return chart.told(
        title=title,
        caption=caption,
        table="Operations on the roofline",
        columns=[
            Column("pass", "Pass"),
            Column("op", "Operation"),
            Column("flops_per_byte", "FLOP/byte", "number"),
            Column("flops_per_s", "FLOP/s", "rate"),
            Column("ceiling_flops_per_s", "Datasheet allows", "rate"),
        ],
    )


def _whole_decades(axes: Axes) -> None:
    """Labels only powers of ten on logarithmic axes, and at least two of them."""
    from matplotlib.ticker import NullFormatter

    for axis, (low, high), set_limits in (
        (axes.xaxis, axes.get_xlim(), axes.set_xlim),
        (axes.yaxis, axes.get_ylim(), axes.set_ylim),
    ):
        if math.floor(math.log10(high)) - math.ceil(math.log10(low)) < 1:
            set_limits(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
        axis.set_minor_formatter(NullFormatter())


def _draw_roofs(axes: Axes, found: Ceilings, intensities: Sequence[float]) -> None:
    """Over the intensities of the marks and the ridge, with the nominal roof's two numbers."""
    bandwidth, peak = found.memory_bytes_per_s, found.flops_per_s
    low = min(*intensities, peak / bandwidth) / 3
    high = max(*intensities, peak / bandwidth) * 4
    for slope, top, style in (
        (bandwidth, peak, "-"),
        (found.gemm_bytes_per_s, found.gemm_flops_per_s, "--"),
    ):
        axes.plot(
            [low, top / slope, high],
            [low * slope / GIGA, top / GIGA, top / GIGA],
            color=INK,
            lw=1,
            ls=style,
        )
    middle = (low * peak / bandwidth) ** 0.5
    look: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "color": MUTED}
    axes.annotate(
        format_rate(bandwidth, "B"), (middle, middle * bandwidth / GIGA), xytext=(-7, 3), **look
    )
    axes.annotate(format_rate(peak, "FLOP"), (high, peak / GIGA), xytext=(0, 4), **look)
    axes.set_ylim(top=max(peak / GIGA * 2.5, axes.get_ylim()[1]))


# Memory
# --------------------------------------------------------------------------------------------------------------


def memory_bar(data: ReportData) -> Chart | None:
    """Memory that the planned configuration takes on one device."""
    memory = None
    if data.plan is not None:
        memory = data.plan.memory
    parts = {name: value for name in MEMORY if (value := getattr(memory, name, 0.0))}
    if memory is None or not parts:
        return None
    chart = Chart("memory", height=1.75)
    (axes,) = chart.axes
    capacity = memory.capacity_bytes
    total = sum(parts.values())
    _stacked(chart, [Bar("memory", parts)], MEMORY, GIB, format_bytes)
    if capacity:
        axes.axvline(capacity / GIB, color=INK, lw=1.4)
        chart.rows.append(("memory", "capacity", capacity))
    axes.set(xlabel="GiB per device", xlim=(0, max(1.05 * capacity, 1.2 * total) / GIB))
    axes.set_yticks([])
    draft = parts.get("draft_kv_bytes", 0.0) + parts.get("draft_weights_bytes", 0.0)
    title = f"{format_bytes(total)} per device"
    title += f" of {format_bytes(capacity)}" if capacity else ""
    title += f"; the draft adds {percent(draft / (total - draft), 1)}" if 0 < draft < total else ""
    return chart.told(
        title=title,
        caption="What the planned configuration holds in memory at its full context. The line is the device's memory.",
        table="Memory per device",
        columns=[*_STACK_COLUMNS[:2], Column("bytes", "Size", "bytes")],
    )
