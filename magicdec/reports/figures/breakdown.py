"""Figures of where a step's time and a device's memory go."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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
from magicdec.schema import Ceilings, Operation, Plan, Record, is_paired
from magicdec.units import GIB, GIGA, MILLI, format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_KEYS_IN_A_ROW = 4
FENCES = (
    " Measured phases are timed apart, with fences that the full step, "
    "whose time stands at the bar, does not have."
)


class BarPart(NamedTuple):
    """A part of a bar: its title in the key, its colour, and its name in a sentence."""

    title: str
    colour: str
    text: str = ""


PHASES = {
    name: BarPart(name, colour)
    for name, colour in (
        ("autoregressive", GREY),
        ("draft", BLUE),
        ("verify", RED),
        ("accept", GREEN),
        ("upkeep", PURPLE),
        ("other", OCHRE),
    )
}
LIMITS = {
    "weights": BarPart("weights", BLUE, "reading weights"), "kv": BarPart("KV", RED, "reading KV"),
    "compute": BarPart("compute", GREEN, "computing"), "link": BarPart("link", PURPLE, "the link"),
    "overhead": BarPart("overhead", GREY, "overhead"),
}  # fmt: skip
MEMORY = {
    "weights_bytes": BarPart("weights", BLUE),
    "kv_bytes": BarPart("KV cache", RED),
    "draft_weights_bytes": BarPart("draft weights", PURPLE),
    "draft_kv_bytes": BarPart("draft KV cache", OCHRE),
    "workspace_bytes": BarPart("workspace", GREEN),
}


SHARE_OF_CHARACTER = 0.03
"""Width of a character of a part's text, as a share of the longest bar."""


class Bar(NamedTuple):
    """Seconds by part, and the total at its end: by default that of the parts."""

    label: str
    parts: dict[str, float]
    total: float | None = None


def _stacked(
    chart: Chart,
    bars: Sequence[Bar],
    kinds: Mapping[str, BarPart],
    unit: float = MILLI,
    written: Callable[[float], str] = format_seconds,
    *,
    has_totals: bool = True,
) -> None:
    """Stacked horizontal bars with the total at the end of each, and their key."""
    (axes,) = chart.axes
    totals = [sum(bar.parts.values()) for bar in bars]
    longest = max(totals)
    for place, bar in enumerate(bars):
        line = bar.label.replace("\n", ", ")
        end = 0.0
        for name, kind in kinds.items():
            if name not in bar.parts:
                continue
            value = bar.parts[name]
            text = written(value)
            (patch,) = axes.barh(
                place,
                value / unit,
                left=end / unit,
                height=0.62,
                color=kind.colour,
                lw=0,
            )
            chart.tip(patch, f"{line}: {kind.title} {text}")
            # narrower parts have their value in the tip and the table alone
            if value > SHARE_OF_CHARACTER * len(text) * longest:
                at = ((end + value / 2) / unit, place)
                axes.text(*at, text, ha="center", va="center", color=ON_COLOUR)
            chart.rows.append((line, kind.title, value))
            end += value
        total = bar.total
        if total is None:
            total = end
        if has_totals:
            right = (end + 0.015 * longest) / unit
            axes.text(right, place, written(total), va="center", fontweight="bold")
    labels = [bar.label for bar in bars]
    axes.set_yticks(range(len(bars)), labels=labels)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    # beyond the longest bar stands its total
    axes.set_xlim(0, 1.17 * longest / unit)
    axes.grid(visible=False, axis="y")
    has = {name for bar in bars for name in bar.parts}
    _draw_key(axes, [kind for name, kind in kinds.items() if name in has])


def _draw_key(axes: Axes, parts: Sequence[BarPart]) -> None:
    from matplotlib.patches import Patch

    columns = len(parts)
    if columns >= MAX_KEYS_IN_A_ROW:
        columns = -(-len(parts) // 2)
    handles = [Patch(color=part.colour, label=part.title) for part in parts]
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
# --------------------------------------------------------------------------------------------------


def step_phases(data: ReportData) -> Chart | None:
    """Time per emitted token, autoregressive against speculative, split into draft, verify and
    accept.
    """
    reference = _with_phases(data)
    if reference is None:
        return None
    measured = _phase_bars("measured", data.measured, reference)
    predicted = _phase_bars("predicted", data.predicted, reference)
    bars = measured + predicted
    if not bars:
        return None
    chart = Chart("phases", height=1.15 + 0.5 * len(bars))
    _stacked(chart, bars, PHASES)
    chart.axes[0].set(xlabel="time per token and sequence (ms)")
    autoregressive, speculative = bars[:2]
    before = format_seconds(autoregressive.total or 0.0)
    after = format_seconds(speculative.total or 0.0)
    verify_s = speculative.parts.get("verify", 0.0)
    share = verify_s / sum(speculative.parts.values())
    emitted = f"{reference.expected_tokens_per_step or 1.0:.2f} tokens"
    caption = (
        f"A speculative step drafts {reference.gamma} tokens, verifies them in one pass and emits "
        f"{emitted}; its time is divided by these. Batch {reference.batch_size}, context "
        f"{reference.context_len}."
    )
    if measured:
        caption += FENCES
    return chart.told(
        title=f"A token takes {after} instead of {before}; verification is {percent(share)} of it",
        caption=caption,
        table="Time per token by phase",
        columns=_STACK_COLUMNS,
    )


def _phase_bars(word: str, rows: Sequence[Record], reference: Record) -> list[Bar]:
    """The bars without and with a draft of the row that is of the reference's configuration."""
    for row in rows:
        if is_paired(row, reference):
            alone = row.autoregressive_step_s
            parts = _phases(row)
            if alone is None or parts is None:
                return []
            tokens = row.expected_tokens_per_step or 1.0
            per_token = (row.step_s or 0.0) / tokens
            return [
                Bar(f"autoregressive\n{word}", {"autoregressive": alone}, alone),
                Bar(f"speculative\n{word}", parts, per_token),
            ]
    return []


def _with_phases(data: ReportData) -> Record | None:
    """The reference's row if its phases are known, else the fastest row whose phases are."""
    reference = data.reference
    rows = []
    for row in data.rows:
        if row.is_speculative and _phases(row) is not None:
            rows.append(row)
    if reference is not None:
        for row in rows:
            if is_paired(row, reference):
                return row
    return fastest(rows)


def _phases(row: Record) -> dict[str, float] | None:
    """Seconds per emitted token by phase; "other" is the rest of the step."""
    tokens = row.expected_tokens_per_step
    if not tokens or row.step_s is None:
        return None
    if row.draft_step_s is None or row.verify_step_s is None:
        return None
    parts = {
        "draft": row.gamma * row.draft_step_s,
        "verify": row.verify_step_s,
        "accept": row.accept_step_s or 0.0,
        "upkeep": (row.breakdown_s or {}).get("upkeep", 0.0),
    }
    rest = row.step_s - sum(parts.values())
    parts["other"] = max(rest, 0.0)
    per_token = {}
    for name, seconds in parts.items():
        if seconds > 0:
            per_token[name] = seconds / tokens
    return per_token


# What binds
# --------------------------------------------------------------------------------------------------


def time_by_limit(data: ReportData) -> Chart | None:
    """Predicted time per emitted token by what binds it: weights, KV, compute, link or overhead."""
    plan = data.plan
    if plan is None or not plan.breakdown.get("autoregressive"):
        return None
    alone = by_limit(plan.breakdown["autoregressive"])
    bars = [Bar("autoregressive", alone)]
    gamma = plan.best.gamma
    if gamma and plan.breakdown.get("verify"):
        label = f"speculative,\nγ = {gamma}"
        bars.append(Bar(label, _speculative_limits(plan)))
    chart = Chart("limits", height=1.25 + 0.55 * len(bars))
    _stacked(chart, bars, LIMITS)
    chart.axes[0].set(xlabel="predicted time per token and sequence (ms)")
    first = bars[0].parts
    last = bars[-1].parts
    largest = max(first, key=lambda name: first[name])
    share = percent(first[largest] / sum(first.values()))
    limit = LIMITS[largest].text
    title = f"{share} of an autoregressive step goes into {limit}"
    if len(bars) > 1 and largest in last:
        ratio = first[largest] / last[largest]
        title += f"; speculation makes it {ratio:.1f}× less per token"
    return chart.told(
        title=title,
        caption="Every operation counts towards what binds it. The speculative step is divided by "
        "the tokens it emits; "
        "accepting and the step's fixed cost count as overhead.",
        table="Predicted time per token by what binds",
        columns=_STACK_COLUMNS,
    )


def _speculative_limits(plan: Plan) -> dict[str, float]:
    """Seconds per emitted token of a speculative step, by limit."""
    best = plan.best
    tokens = best.drafting.tokens_per_step
    passes = {"draft": best.gamma, "verify": 1, "accept": 1, "upkeep": 1}
    totals: dict[str, float] = defaultdict(float)
    for part, times in passes.items():
        operations = plan.breakdown.get(part, [])
        for limit, seconds in by_limit(operations).items():
            totals[limit] += times * seconds / tokens
    rest = best.step_s / tokens - sum(totals.values())
    if rest > 0:
        totals["overhead"] += rest
    return totals


def by_limit(ops: Sequence[Operation]) -> dict[str, float]:
    """Seconds by `bound_by`; an unknown limit counts as overhead."""
    totals: dict[str, float] = defaultdict(float)
    for op in ops:
        limit = op.bound_by
        if limit not in LIMITS:
            limit = "overhead"
        totals[limit] += op.time_s
    return {name: value for name, value in totals.items() if value > 0}


# Roofline
# --------------------------------------------------------------------------------------------------

_PASSES = {
    "autoregressive": (GREY, MARKERS[0]),
    "draft": (BLUE, MARKERS[1]),
    "verify": (RED, MARKERS[2]),
}


def roofline(data: ReportData) -> Chart | None:
    """Each operation by FLOPs per byte and by the rate it reaches, under the device's ceilings."""
    plan = data.plan
    if plan is None:
        return None
    chart = Chart("roofline", height=3.7)
    (axes,) = chart.axes
    marks = []
    for part in _PASSES:
        operations = plan.breakdown.get(part, ())
        drawn = [op for op in operations if _has_intensity(op)]
        for op in drawn:
            marks.append(Mark(part, op, is_last=op is drawn[-1]))
    for mark in marks:
        _draw_operation(chart, mark)
    if not marks:
        return None
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="GFLOP/s")
    caption = (
        "Each mark is one operation of a pass as predicted, the tick on its stem what the "
        "datasheet allows."
    )
    if plan.ceilings is not None:
        _draw_roofs(axes, plan.ceilings, [mark.intensity for mark in marks])
        caption += " Solid line: the device's nominal ceiling; dashed: as fitted to linear layers."
    _whole_decades(axes)
    axes.legend(loc="lower right")
    title = "How near each operation comes to the device's ceilings"
    attention = []
    for mark in marks:
        if mark.part == "verify" and "attention" in mark.op.op:
            attention.append(mark.intensity)
    if attention:
        title = (
            f"Verification's attention does {max(attention):.2g} FLOP per byte of what it "
            "reads"
        )
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


class Mark(NamedTuple):
    """An operation of a pass on the roofline."""

    part: str
    op: Operation
    is_last: bool
    """Whether no operation of its pass follows."""

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.op.flops / self.op.bytes

    @property
    def rate(self) -> float:
        """FLOPs per second that it reaches."""
        return self.op.flops / self.op.time_s

    @property
    def ceiling(self) -> float | None:
        """FLOPs per second that the datasheet allows."""
        if self.op.ceiling_s <= 0:
            return None
        return self.op.flops / self.op.ceiling_s


def _has_intensity(op: Operation) -> bool:
    if op.bound_by == "link":
        return False
    return op.flops > 0 and op.bytes > 0 and op.time_s > 0


def _draw_operation(chart: Chart, mark: Mark) -> None:
    (axes,) = chart.axes
    colour, marker = _PASSES[mark.part]
    intensity = mark.intensity
    rate = mark.rate
    ceiling = mark.ceiling
    if ceiling is not None:
        stem = [rate / GIGA, ceiling / GIGA]
        axes.plot([intensity] * 2, stem, color=colour, lw=0.8, alpha=0.6)
        axes.plot(intensity, ceiling / GIGA, "_", color=colour, ms=7)
    name = mark.op.op
    reached = format_rate(rate, "FLOP")
    tip = f"{name}, {mark.part}: {intensity:.3g} FLOP/byte, {reached}"
    chart.mark(axes, (intensity, rate / GIGA), marker, tip, color=colour, mew=0.5)
    chart.rows.append((mark.part, name, intensity, rate, ceiling))
    if mark.is_last:
        axes.plot([], [], marker, color=colour, ls="none", label=mark.part)


def _whole_decades(axes: Axes) -> None:
    """Labels only powers of ten on logarithmic axes, and at least two of them."""
    from matplotlib.ticker import NullFormatter

    for axis, (low, high), set_limits in (
        (axes.xaxis, axes.get_xlim(), axes.set_xlim),
        (axes.yaxis, axes.get_ylim(), axes.set_ylim),
    ):
        first = math.log10(low)
        last = math.log10(high)
        num_decades = math.floor(last) - math.ceil(first)
        if num_decades < 1:
            lower = 10 ** math.floor(first)
            upper = 10 ** math.ceil(last)
            set_limits(lower, upper)
        axis.set_minor_formatter(NullFormatter())


def _draw_roofs(axes: Axes, ceilings: Ceilings, intensities: Sequence[float]) -> None:
    """Draws the roofs over the intensities of the marks and the ridge, with the nominal roof's two
    numbers.
    """
    bandwidth = ceilings.memory_bytes_per_s
    peak = ceilings.flops_per_s
    ridge = peak / bandwidth
    low = min(*intensities, ridge) / 3
    high = max(*intensities, ridge) * 4
    _draw_roof(axes, (low, high), bandwidth, peak, "-")
    _draw_roof(
        axes, (low, high), ceilings.gemm_bytes_per_s, ceilings.gemm_flops_per_s, "--"
    )
    middle = (low * peak / bandwidth) ** 0.5
    look: dict[str, Any] = {
        "textcoords": "offset points",
        "ha": "right",
        "color": MUTED,
    }
    slope_label = format_rate(bandwidth, "B")
    axes.annotate(
        slope_label,
        (middle, middle * bandwidth / GIGA),
        xytext=(-7, 3),
        **look,
    )
    axes.annotate(
        format_rate(peak, "FLOP"),
        (high, peak / GIGA),
        xytext=(0, 4),
        **look,
    )
    _, top = axes.get_ylim()
    # the roof's label stands above it
    axes.set_ylim(top=max(peak / GIGA * 2.5, top))


def _draw_roof(
    axes: Axes, ends: tuple[float, float], slope: float, top: float, style: str
) -> None:
    """The line of a memory's rate up to a peak, then the peak."""
    low, high = ends
    intensities = [low, top / slope, high]
    rates = [low * slope / GIGA, top / GIGA, top / GIGA]
    axes.plot(intensities, rates, color=INK, lw=1, ls=style)


# Memory
# --------------------------------------------------------------------------------------------------


def memory_bar(data: ReportData) -> Chart | None:
    """Memory that the planned configuration takes on one device."""
    if data.plan is None:
        return None
    memory = data.plan.memory
    parts = {}
    for name in MEMORY:
        value = getattr(memory, name)
        if value:
            parts[name] = value
    if not parts:
        return None
    chart = Chart("memory", height=1.75)
    (axes,) = chart.axes
    capacity = memory.capacity_bytes
    total = sum(parts.values())
    bars = [Bar("memory", parts)]
    # the title has it
    _stacked(chart, bars, MEMORY, GIB, format_bytes, has_totals=False)
    if capacity:
        axes.axvline(capacity / GIB, color=INK, lw=1.4)
        chart.rows.append(("memory", "capacity", capacity))
    right = max(1.05 * capacity, 1.2 * total)
    axes.set(xlabel="GiB per device", xlim=(0, right / GIB))
    axes.set_yticks([])
    held = sum(parts.values())
    of_draft = parts.get("draft_kv_bytes", 0.0)
    of_draft += parts.get("draft_weights_bytes", 0.0)
    title = f"{format_bytes(held)} per device"
    if capacity:
        title += f" of {format_bytes(capacity)}"
    if 0 < of_draft < held:
        added = of_draft / (held - of_draft)
        title += f"; the draft adds {percent(added, 1)}"
    return chart.told(
        title=title,
        caption="What the planned configuration holds in memory at its full context. The line is "
        "the device's memory.",
        table="Memory per device",
        columns=[*_STACK_COLUMNS[:2], Column("bytes", "Size", "bytes")],
    )
