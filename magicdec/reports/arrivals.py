"""Sentences on servers under a rate of requests."""

from __future__ import annotations

from magicdec.naming import draft_name
from magicdec.reports.sentences import lengths_text, limits_text
from magicdec.schema.plan import Percentiles, Plan, Traffic, TrafficLoad
from magicdec.units import format_count, format_number, format_percent, format_seconds

LEAST_NAMED = 0.02
"""Change of a rate from which its reason is named."""
REASONS = {
    "waves and prompts": "whole steps, chunks of prompts and replicas of their own",
    "arrivals that bunch": "arrivals that bunch",
    "percentiles": "limits on percentiles instead of means",
}
"""Words for the parts of what lies between steady batches and a simulation."""


def load_name(load: TrafficLoad) -> str:
    """A draft with its policy in a few words."""
    if not load.is_speculative:
        return "no draft"
    gamma = load.policy
    if not load.policy.startswith("gamma"):
        gamma = f"gamma {load.policy}"
    name = draft_name(load.draft, load.draft_method, load.draft_budget)
    return f"{name}, {gamma}"


def traffic_line(traffic: Traffic) -> str:
    """The devices for a rate, and what speculation changes; or what too few devices keep."""
    best = traffic.best
    rate = format_number(traffic.rate_per_s)
    spread = f"{_replicas(best)} with {load_name(best)}"
    if not traffic.is_enough:
        highest = _highest_rate(best)
        verb = "serves" if best.num_gpus == 1 else "serve"
        line = f"{spread} {verb} up to {highest} of {rate} requests/s"
        if best.may_keep:
            line += ", so perhaps all"
        return f"{line}: {_needed(traffic)}"
    line = f"Serve {rate} requests/s on {spread}"
    other = traffic.autoregressive
    if not best.is_speculative:
        other = traffic.speculative
    if other is None:
        return f"{line}{_no_other(traffic)}"
    with_other = f"with {load_name(other)}"
    if other.num_gpus > best.num_gpus:
        return f"{line}; {with_other} it takes {_devices_for(other)}"
    line = f"{line}; {with_other} it takes {other.num_gpus} too"
    if best.highest_rate_per_s is None or other.highest_rate_per_s is None:
        return line
    highest = _highest_rate(best)
    line = f"{line}; they keep up to {highest} requests/s"
    return f"{line}, {with_other} {_highest_rate(other)}"


def _highest_rate(load: TrafficLoad) -> str:
    """The highest rate that a load's devices keep, with its interval."""
    highest = format_number(load.highest_rate_per_s or 0.0)
    if load.highest_rate_low_per_s is None or load.highest_rate_high_per_s is None:
        return highest
    low = format_number(load.highest_rate_low_per_s)
    high = format_number(load.highest_rate_high_per_s)
    return f"{highest} ({low}–{high})"


def _devices_for(load: TrafficLoad) -> str:
    """The devices that a load takes, and with 90 % at least and at most."""
    ends = load.num_gpus_low, load.num_gpus_high
    if None in ends or ends == (load.num_gpus, load.num_gpus):
        return str(load.num_gpus)
    return f"{load.num_gpus} ({ends[0]}–{ends[1]})"


def sure_devices_line(traffic: Traffic) -> str:
    """The devices that keep the rate with 95 %, where those of the answer may be too few."""
    best = traffic.best
    if not traffic.is_enough or best.highest_rate_low_per_s is None:
        return ""
    if best.highest_rate_low_per_s >= traffic.rate_per_s:
        return "these devices keep the rate with over 95 %"
    if best.num_gpus_high is None:
        return "no number of these devices keeps the rate with 95 %"
    return f"it takes {best.num_gpus_high} devices to keep the rate with 95 %"


def _replicas(load: TrafficLoad) -> str:
    """The devices of a load, and how they are spread: "8 devices (4 replicas, tp 2)"."""
    devices = format_count(load.num_gpus, "device")
    replicas = format_count(load.num_replicas, "replica")
    return f"{devices} ({replicas}, {load.layout})"


def _needed(traffic: Traffic) -> str:
    """The devices that the whole rate takes, the fewest first."""
    loads = []
    for load in (traffic.autoregressive, traffic.speculative):
        if load is not None:
            loads.append(load)
    if not loads:
        return "no number of devices was found to serve all"
    loads.sort(key=lambda load: load.num_gpus)
    first, *others = loads
    line = f"for all it takes {_devices_for(first)} with {load_name(first)}"
    for other in others:
        line += f", and {_devices_for(other)} with {load_name(other)}"
    return line


def _no_other(traffic: Traffic) -> str:
    """Why nothing is compared with the best."""
    kept = "keeps the limits" if traffic.has_limits else "keeps up"
    if traffic.best.is_speculative:
        return f"; without a draft no number of devices {kept}"
    if traffic.lacking:
        return f": {traffic.lacking[0]}"
    return f"; no draft {kept} there, or none has a known acceptance"


def percentiles_line(load: TrafficLoad) -> str:
    """p50 and p95 of both latencies, and the headroom."""
    if load.ttft is None:
        return "overloaded: the queue grows without bound"
    of_ttft = load.ttft_p95_low_s, load.ttft_p95_high_s
    parts = [_p50_and_p95("first token", load.ttft, *of_ttft)]
    if load.tpot is not None:
        of_tpot = load.tpot_p95_low_s, load.tpot_p95_high_s
        parts.append(_p50_and_p95("time per token", load.tpot, *of_tpot))
    if load.within_limits and load.highest_rate_per_s:
        headroom = load.highest_rate_per_s / load.rate_per_s - 1.0
        parts.append(f"headroom {format_percent(headroom)}")
    return "; ".join(parts)


def arrivals_line(load: TrafficLoad) -> str:
    """How far the simulated rate is from that of steady, full batches, and from what."""
    highest = load.highest_rate_per_s
    if not highest:
        return ""
    steady = format_number(load.analytic_rate_per_s)
    left = format_number(highest)
    line = (
        f"batches that are always full would serve {steady} requests/s on these devices"
    )
    if not load.reasons:
        return f"{line}, the simulation keeps {left}"
    kept = [reason.rate_per_s for reason in load.reasons[1:]] + [highest]
    parts = []
    for reason, after in zip(load.reasons, kept, strict=True):
        change = after / max(reason.rate_per_s, 1e-9) - 1.0
        if abs(change) >= LEAST_NAMED:
            parts.append(f"{REASONS[reason.of]} {format_percent(change, signed=True)}")
    return f"{line}, the simulation keeps {left}: {', '.join(parts)}"


def _p50_and_p95(
    name: str, times: Percentiles, low_s: float | None, high_s: float | None
) -> str:
    """`low_s` and `high_s`: the ends of the 95th percentile's interval; no upper one: the costs may
    be too large for the devices."""
    median = format_seconds(times.p50)
    p95 = format_seconds(times.p95)
    text = f"{name} p50 {median}, p95 {p95}"
    if low_s is None:
        return text
    if high_s is None:
        return f"{text} (from {format_seconds(low_s)})"
    return f"{text} ({format_seconds(low_s)} to {format_seconds(high_s)})"


def asked_of_traffic(answer: Plan, traffic: Traffic) -> str:
    """Model, device, engine, rate, lengths and limits of an answer for a rate."""
    served = f"{answer.model} on {answer.hardware}, {answer.engine}"
    rate = format_number(traffic.rate_per_s)
    lengths = lengths_text(answer, answer.context_len)
    limits = limits_text(answer.request)
    return f"{served}: {rate} requests/s, {lengths}, {limits}"
