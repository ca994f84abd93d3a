"""Figures of a plan for a rate of arrivals: what users see as load rises, and what keeps the limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from magicdec.naming import draft_name
from magicdec.plan_document import Plan, Traffic, TrafficLoad
from magicdec.reports.data import ReportData
from magicdec.reports.figures.chart import Chart
from magicdec.reports.style import BLUE, GREY, MARKERS, RED, SERIES, Tips, new_figure
from magicdec.reports.tables import Column, Table, Value
from magicdec.reports.terminal_traffic import headline, name_of
from magicdec.units import MILLI, format_number

RATE = Column("rate_per_s", "Requests/s", "number")
NAME = Column("draft", "Draft")


def _traffic(data: ReportData) -> tuple[Plan, Traffic] | None:
    plan = data.plan
    return (plan, plan.traffic) if plan is not None and plan.traffic is not None else None


def _series(traffic: Traffic) -> list[tuple[str, list[TrafficLoad]]]:
    return [(name, list(loads)) for name, loads in groupby(traffic.curves, key=name_of)]


def _devices(traffic: Traffic) -> str:
    return f"{traffic.best.num_gpus} device{'s' if traffic.best.num_gpus > 1 else ''}"


def latency_by_rate(data: ReportData) -> Chart | None:
    """95th percentiles of TTFT and TPOT over rates of arrivals, with and without speculation."""
    if (found := _traffic(data)) is None:
        return None
    plan, traffic = found
    figure, axes = new_figure(height=4.6, rows=2, sharex=True)
    tips, table = Tips("traffic"), list[tuple[Value, ...]]()
    shown = [each for each in _series(traffic) if each[1][0].policy in ("off", traffic.best.policy, "by batch")]
    parts: tuple[tuple[str, float | None], ...] = (("ttft", plan.request.ttft_p95_s), ("tpot", plan.request.tpot_p95_s))
    for ax, (what, limit) in zip(axes, parts, strict=True):
        for i, (name, loads) in enumerate(shown):
            kept = [load for load in loads if not load.overloaded]
            seconds = [getattr(load, what).p95 for load in kept]
            _line(ax, tips, i, name, kept, [each / MILLI for each in seconds], lambda value: f"{value:.3g} ms")
        if limit is not None:
            ax.axhline(limit / MILLI, color=RED, lw=1, ls="--")
        ax.set(ylabel=f"{what.upper()} p95 (ms)", yscale="log")
    for name, loads in shown:
        for load in loads:
            ttft, tpot = load.ttft, load.tpot
            table.append((
                load.rate_per_s, name, *(None if ttft is None else each for each in _of(ttft)),
                *(None if tpot is None else each for each in _of(tpot)),
            ))  # fmt: skip
    axes[-1].set(xlabel="arrivals (requests per second)")
    axes[0].legend(loc="best")
    heads = [(f"{what}_{which}_s", f"{what.upper()} {which}") for what in ("ttft", "tpot") for which in WHICH]
    columns = (RATE, NAME, *(Column(name, title, "seconds") for name, title in heads))
    return Chart(
        title=headline(traffic)[0].upper() + headline(traffic)[1:],
        caption=(
            f"95th percentiles of the time to the first token and between tokens on {_devices(traffic)}, simulated. "
            "Dashed: the limits. A line ends where the queue would grow without bound."
        ),
        figure=figure, marks=tips, table=Table("traffic", "Latency by rate of arrivals", columns, tuple(table)),
    )  # fmt: skip


WHICH = ("p50", "p95", "p99")


def _of(percentiles: object) -> list[float | None]:
    return [getattr(percentiles, which, None) for which in WHICH]


def _line(
    ax: object, tips: Tips, i: int, name: str, loads: Sequence[TrafficLoad], values: Sequence[float],
    text: Callable[[float], str],
) -> None:  # fmt: skip
    """One series over rates."""
    colour, rates = (
        GREY if loads and loads[0].policy == "off" else SERIES[i % len(SERIES)],
        [load.rate_per_s for load in loads],
    )
    tips.belongs(name, *ax.plot(rates, values, color=colour, lw=1.2, alpha=0.7))  # type: ignore[attr-defined]
    for j, (rate, value) in enumerate(zip(rates, values, strict=True)):
        label = name if j == 0 else None
        (mark,) = ax.plot(  # type: ignore[attr-defined]
            [rate], [value], ls="", marker=MARKERS[i % len(MARKERS)], ms=4.5, color=colour, label=label
        )
        tips.add(mark, f"{name}, {format_number(rate)} requests/s: {text(value)}", series=name)


def goodput_by_policy(data: ReportData) -> Chart | None:
    """Requests per second that keep the limits, over rates, for each policy of gamma."""
    if (found := _traffic(data)) is None:
        return None
    _, traffic = found
    figure, (ax,) = new_figure()
    tips, table = Tips("goodput"), list[tuple[Value, ...]]()
    for i, (name, loads) in enumerate(_series(traffic)):
        _line(ax, tips, i, name, loads, [load.goodput_per_s for load in loads], lambda value: f"{value:.3g} kept per s")
        table += [(load.rate_per_s, name, load.goodput_per_s, "yes" if load.overloaded else "no") for load in loads]
    highest = max(load.rate_per_s for load in traffic.curves)
    ax.plot([0, highest], [0, highest], color=GREY, lw=0.8, ls=":")
    ax.set(xlabel="arrivals (requests per second)", ylabel="kept within limits (per second)")
    ax.legend(loc="best")
    best = max(traffic.curves, key=lambda load: load.goodput_per_s)
    columns = (RATE, NAME, Column("goodput_per_s", "Kept/s", "number"), Column("overloaded", "Overloaded"))
    return Chart(
        title=f"{_devices(traffic)} keep the limits for up to {format_number(best.goodput_per_s)} requests/s: "
        f"{name_of(best)}",
        caption=(
            f"Requests per second that keep both limits on {_devices(traffic)}, simulated; dotted: all that arrive. A "
            "policy is one gamma, or the plan's table of gammas by batch, or by batch and context."
        ),
        figure=figure, marks=tips, table=Table("goodput", "Goodput by policy", columns, tuple(table)),
    )  # fmt: skip


def timeline(data: ReportData) -> Chart | None:
    """A replica's batch, queue and use of its cache over time."""
    if (found := _traffic(data)) is None or not found[1].timeline:
        return None
    _, traffic = found
    moments, best = traffic.timeline, traffic.best
    figure, axes = new_figure(height=3.6, rows=2, sharex=True)
    times = [each.time_s for each in moments]
    tips = Tips("timeline")
    for name, colour in (("batch", BLUE), ("waiting", RED)):
        axes[0].step(times, [getattr(each, name) for each in moments], where="post", color=colour, lw=1, label=name)
    axes[1].step(times, [100.0 * each.kv_share for each in moments], where="post", color=BLUE, lw=1)
    axes[0].set(ylabel="requests")
    axes[1].set(ylabel="cache in use (%)", xlabel="time (s)")
    axes[0].legend(loc="best")
    columns = (
        Column("time_s", "Time", "seconds"), Column("batch", "Batch", "integer"),
        Column("waiting", "Waiting", "integer"), Column("kv_share", "Cache", "percent"),
    )  # fmt: skip
    rows = tuple((each.time_s, round(each.batch), round(each.waiting), each.kv_share) for each in moments)
    peak = max(each.batch for each in moments)
    drafted = draft_name(best.draft, best.draft_method) if best.is_speculative else "no draft"
    return Chart(
        title=f"A replica's batch reaches {peak:g} at {format_number(traffic.rate_per_s)} requests/s",
        caption=f"One of {best.num_replicas} replicas over the simulated time, {drafted}: requests that decode or are "
        "prefilled, those that wait for a slot or for room, and the share of the cache in use.",
        figure=figure, marks=tips, table=Table("timeline", "A replica over time", columns, rows),
    )  # fmt: skip
