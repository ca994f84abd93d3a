"""The answer for a rate of arrivals on a terminal: how many devices, with and without speculation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from magicdec.naming import draft_name
from magicdec.plan_document import Plan, Traffic, TrafficLoad
from magicdec.reports.text import text_table
from magicdec.units import MILLI, format_number, format_seconds

if TYPE_CHECKING:
    from rich.console import Console


def name_of(load: TrafficLoad) -> str:
    """A draft with its policy in a few words."""
    if not load.is_speculative:
        return "no draft"
    budget = f" {load.draft_budget}" if load.draft_budget else ""
    gamma = load.policy if load.policy.startswith("gamma") else f"gamma {load.policy}"
    return f"{draft_name(load.draft, load.draft_method)}{budget}, {gamma}"


def headline(traffic: Traffic) -> str:
    """One line: the devices, and what speculation changes."""
    best, alone, drafted = traffic.best, traffic.autoregressive, traffic.speculative
    layout = f"{best.num_gpus} devices ({best.num_replicas} x tp {best.tp_size}), {name_of(best)}"
    if alone is None:
        return f"{layout}; without a draft no number of them keeps the limits"
    if drafted is None:
        return f"{layout}; no draft keeps the limits there, or none has a known acceptance"
    other = alone if best.is_speculative else drafted
    what = "without a draft" if best.is_speculative else f"with {name_of(drafted)}"
    if other.num_gpus > best.num_gpus:
        return f"{layout}; {what} {other.num_gpus}"
    gain = (best.highest_rate_per_s or 0.0) / max(other.highest_rate_per_s or 0.0, 1e-9)
    return f"{layout}; {what} as many, for {format_number(gain)} times less load at most"


def print_traffic(answer: Plan, traffic: Traffic, console: Console, *, every: bool = False) -> None:
    """The devices, the percentiles of the layouts compared, and what to note; `every` adds all rates."""
    console.print(f"[bold]{headline(traffic)}[/bold]")
    request = answer.request
    limits = [
        f"p95 of {name} {format_seconds(limit)}"
        for name, limit in (("TTFT", request.ttft_p95_s), ("TPOT", request.tpot_p95_s))
        if limit is not None
    ]
    console.print(
        f"{answer.model} on {answer.hardware}, engine {answer.engine}: {format_number(traffic.rate_per_s)} requests/s, "
        f"limits {' and '.join(limits) or 'none'}; {traffic.num_requests} requests simulated"
    )
    compared = [each for each in (traffic.autoregressive, traffic.speculative) if each is not None]
    at_rate = [each for each in traffic.curves if each.rate_per_s == traffic.rate_per_s]
    _print(console, f"at {format_number(traffic.rate_per_s)}/s, the fewest devices of each", compared)
    _print(console, f"the policies on {traffic.best.num_gpus} devices", at_rate)
    if every:
        _print(console, "over rates", traffic.curves)
    for load in compared:
        highest = format_number(load.highest_rate_per_s or 0.0)
        console.print(f"{load.num_gpus} devices with {name_of(load)} keep the limits up to {highest} requests/s")
    for note in traffic.notes:
        console.print(f"note: {note}", style="dim")


def _percentiles(what: str, unit: float) -> Callable[[TrafficLoad], str]:
    def read(load: TrafficLoad) -> str:
        found = getattr(load, what)
        if found is None:
            return "overload"
        return "/".join(format_number(value / unit) for value in (found.p50, found.p95, found.p99))

    return read


COLUMNS: tuple[tuple[str, Callable[[TrafficLoad], str]], ...] = (
    ("requests/s", lambda load: format_number(load.rate_per_s)),
    ("draft", name_of),
    ("devices", lambda load: str(load.num_gpus)),
    ("TTFT ms", _percentiles("ttft", MILLI)),
    ("TPOT ms", _percentiles("tpot", MILLI)),
    ("request s", _percentiles("request", 1.0)),
    ("kept/s", lambda load: format_number(load.goodput_per_s)),
    ("waiting", lambda load: format_number(load.mean_waiting)),
    ("preempted", lambda load: str(load.preemptions)),
)
"""Percentiles are p50/p95/p99."""
BRIEF = 7
"""Columns up to which a table of one rate goes, so that it fits 80 characters."""


def _print(console: Console, title: str, loads: list[TrafficLoad]) -> None:
    columns = COLUMNS if len({load.rate_per_s for load in loads}) > 1 else COLUMNS[1:BRIEF]
    if loads:
        console.print(f"[bold]{title}[/bold] (p50/p95/p99)")
        rows = [[read(load) for _, read in columns] for load in loads]
        console.print(text_table([head for head, _ in columns], rows, wraps={"draft"}))
