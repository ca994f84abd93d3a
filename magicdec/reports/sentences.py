"""A plan's choice in sentences: what to do and by how much, from what acceptance, what bounds it,
and
what would change it. Terminal, page, report and exports say them alike.
"""

from __future__ import annotations

from magicdec.naming import draft_name, method_name
from magicdec.plan_document import CaseAnswer, Choice, Percentiles, Plan, Traffic, TrafficLoad
from magicdec.plan_rows import Candidate
from magicdec.reports.outlook_lines import outlook_lines
from magicdec.units import MILLI, format_number, format_seconds, format_tokens

LOW_RATE = 0.6
"""Published drafts accept at least this share of first tokens on the text they were trained for."""
BOUND_WORTH_SAYING = 0.5
"""Share of prefill from which its bound on every draft's gain is said."""
MOST_SURE = 0.99
SLOW_VERIFICATION = 1.5
"""Decode steps that a verification takes, from which it is said."""


def drafting_of(row: Candidate) -> str:
    """The draft and gamma: "EAGLE-3, gamma 3"."""
    return f"{draft_name(row.draft, row.draft_method, row.draft_budget)}, gamma {row.gamma}"


def gain_of(row: Candidate) -> str:
    """The gain with its interval and probability: "1.35x faster (0.92-1.71), pays with 87 %"."""
    gain = row.gain
    direction = "faster" if gain.speedup >= 1.0 else "as fast"
    interval = f"({gain.low:.2f}-{gain.high:.2f})"
    return f"{gain.speedup:.2f}x {direction} {interval}, pays with {probability_of(row)}"


def probability_of(row: Candidate) -> str:
    """The probability that a draft pays, never as certain."""
    probability = row.gain.probability
    if probability > MOST_SURE:
        return f"over {MOST_SURE:.0%}"
    if probability < 1.0 - MOST_SURE:
        return f"under {1.0 - MOST_SURE:.0%}"
    return f"{probability:.0%}"


def users_of(row: Candidate) -> str:
    users = counted(row.batch_size, "user")
    if row.num_replicas > 1:
        return f"{users} on each of {row.num_replicas} replicas"
    return users


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 user", "8 users"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def first_line(case: CaseAnswer) -> str:
    """The action with its gain and probability, or why no draft is chosen."""
    choice = case.choice
    row = choice.row
    if row.is_speculative:
        return f"Serve {users_of(row)} with {drafting_of(row)}: {gain_of(row)}."
    return f"Serve {users_of(row)} without a draft{_why_not(choice)}."


def _why_not(choice: Choice) -> str:
    left_out = choice.left_out
    if left_out is None:
        if choice.outcome == "no acceptance":
            return ": no draft has a known acceptance here"
        if choice.outcome == "not asked":
            return ", as asked"
        return ": no draft that was considered pays"
    if choice.outcome == "no room":
        return f": {drafting_of(left_out)} would be {gain_of(left_out)}, but does not fit in memory"
    if choice.outcome == "over limits":
        return f": {drafting_of(left_out)} would be {gain_of(left_out)}, but exceeds the limits"
    return f": the best, {drafting_of(left_out)}, is {gain_of(left_out)}"


def further_lines(plan: Plan, case: CaseAnswer) -> list[str]:
    """The lines after the first, most important first."""
    lines = [
        _acceptance(case.choice),
        *outlook_lines(case.choice),
        _where_it_fits(case.choice),
        _better_gamma(case.choice),
        _plugin(case.choice),
        *_limits(case.choice),
        _prefill_bound(case.choice),
        _verification(case),
        _worth_profiling(plan, case),
    ]
    return [line for line in lines if line]


def _acceptance(choice: Choice) -> str:
    """The text that acceptance is of, and where it comes from."""
    row = choice.left_out
    if choice.row.is_speculative:
        row = choice.row
    if row is None:
        return ""
    drafting = row.drafting
    text = drafting.acceptance_text or "no named text"
    source, *others = drafting.acceptance_source.split(", http")
    more = ""
    if others:
        more = f" and {len(others)} more"
    return f"acceptance on {text}: {source}{more}"


def _where_it_fits(choice: Choice) -> str:
    left_out = choice.left_out
    if left_out is None or choice.outcome not in ("no room", "over limits"):
        return ""
    name = draft_name(left_out.draft, left_out.draft_method, left_out.draft_budget)
    row = choice.left_out_fits
    verb = "keeps the limits"
    if choice.outcome == "no room":
        verb = "fits"
    if row is None:
        return f"{name} {verb} with no number of users"
    users = counted(row.batch_size, "user")
    return f"{name} {verb} with up to {users}: gamma {row.gamma}, {gain_of(row)}"


def _better_gamma(choice: Choice) -> str:
    row = choice.better_gamma
    if row is None:
        return ""
    gain = row.gain
    return f"gamma {row.gamma} is better: {gain.speedup:.2f}x ({gain.low:.2f}-{gain.high:.2f})"


def _plugin(choice: Choice) -> str:
    row = choice.with_plugin
    if row is None:
        return ""
    return (
        f"--plugin admits magicdec's own draft, never measured on a GPU: {drafting_of(row)} with "
        f"{users_of(row)}, {gain_of(row)}"
    )


def left_aside(case: CaseAnswer) -> str:
    """A line on the drafts of one case of several that the choice leaves aside."""
    lines = [_where_it_fits(case.choice), _plugin(case.choice)]
    text = "; ".join(filter(None, lines))
    if not text:
        return ""
    return f"{case.hardware}, context {format_tokens(case.context_len)}: {text}"


def _limits(choice: Choice) -> list[str]:
    lines = []
    for limit in choice.limits:
        name = f"limit on {limit.of} {format_seconds(limit.limit_s)}"
        if limit.value_s is None:
            lines.append(f"{name}: missed, overload")
        elif limit.is_kept:
            lines.append(f"{name}: kept ({format_seconds(limit.value_s)})")
        else:
            lines.append(f"{name}: missed ({format_seconds(limit.value_s)})")
    return lines


def _prefill_bound(choice: Choice) -> str:
    """The bound that prefill sets to every draft's gain."""
    requests = choice.without_draft.requests
    if requests is None or requests.prefill_share < BOUND_WORTH_SAYING:
        return ""
    share = requests.prefill_share
    most = 1.0 / share
    return f"prefill is {share:.0%} of each request: no draft gains more than {most:.2f}x"


def _verification(case: CaseAnswer) -> str:
    """How many decode steps a verification takes, where it is slow, and its slowest operation."""
    choice = case.choice
    row = choice.left_out
    if choice.row.is_speculative:
        row = choice.row
    if row is None:
        return ""
    steps = row.step.verify_s / row.step.autoregressive_s
    if steps < SLOW_VERIFICATION:
        return ""
    line = f"verifying {row.gamma + 1} tokens takes {steps:.1f} decode steps here"
    once = _seconds_by_operation(case, "autoregressive")
    verified = _seconds_by_operation(case, "verify")
    added = {name: seconds - once.get(name, 0.0) for name, seconds in verified.items()}
    if not added:
        return line
    name = max(added, key=lambda operation: added[operation])
    before_ms = format_number(once.get(name, 0.0) / MILLI)
    after_ms = format_number(verified[name] / MILLI)
    return f"{line}: {name} alone takes {after_ms} ms instead of {before_ms}"


def _seconds_by_operation(case: CaseAnswer, name: str) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for operation in case.breakdown.get(name, []):
        seconds[operation.op] = seconds.get(operation.op, 0.0) + operation.time_s
    return seconds


def _worth_profiling(plan: Plan, case: CaseAnswer) -> str:
    """A draft of unknown acceptance that pays from a low rate, where no draft is chosen."""
    if case.choice.is_speculative or case is not plan.cases[0]:
        return ""
    rates: dict[str, float] = {}
    for draft in plan.needs_acceptance:
        if draft.break_even_acceptance_rate is not None:
            rates[method_name(draft.draft_method)] = draft.break_even_acceptance_rate
    if not rates:
        return ""
    name = min(rates, key=lambda method: rates[method])
    rate = rates[name]
    if rate > LOW_RATE:
        return ""
    return (
        f"{name} would pay from {rate:.0%} of its tokens accepted: `magicdec profile-acceptance` "
        "counts how many your texts accept"
    )


# Under arrivals
# --------------------------------------------------------------------------------------------------


def load_name(load: TrafficLoad) -> str:
    """A draft with its policy in a few words."""
    if not load.is_speculative:
        return "no draft"
    gamma = load.policy
    if not load.policy.startswith("gamma"):
        gamma = f"gamma {load.policy}"
    return f"{draft_name(load.draft, load.draft_method, load.draft_budget)}, {gamma}"


def traffic_line(traffic: Traffic) -> str:
    """The devices for a rate, and what speculation changes."""
    best = traffic.best
    devices = counted(best.num_gpus, "device")
    replicas = counted(best.num_replicas, "replica")
    line = (
        f"Serve {format_number(traffic.rate_per_s)} requests/s on {devices} "
        f"({replicas}, {best.layout}) with {load_name(best)}"
    )
    alone = traffic.autoregressive
    drafted = traffic.speculative
    if alone is None:
        return f"{line}; without a draft no number of devices keeps the limits"
    if drafted is None:
        return f"{line}; no draft keeps the limits there, or none has a known acceptance"
    other = drafted
    if best.is_speculative:
        other = alone
    with_other = f"with {load_name(other)}"
    if other.num_gpus > best.num_gpus:
        return f"{line}; {with_other} it takes {other.num_gpus}"
    if best.highest_rate_per_s is None or other.highest_rate_per_s is None:
        return f"{line}; {with_other} it takes as many"
    highest = format_number(best.highest_rate_per_s)
    highest_of_other = format_number(other.highest_rate_per_s)
    return f"{line}: up to {highest} requests/s, {with_other} {highest_of_other}"


def percentiles_line(load: TrafficLoad) -> str:
    """p50 and p95 of both latencies, and the headroom."""
    if load.ttft is None:
        return "overloaded: the queue grows without bound"
    parts = [_p50_and_p95("first token", load.ttft)]
    if load.tpot is not None:
        parts.append(_p50_and_p95("time per token", load.tpot))
    if load.highest_rate_per_s:
        headroom = load.highest_rate_per_s / load.rate_per_s - 1.0
        parts.append(f"headroom {headroom:.0%}")
    return "; ".join(parts)


def _p50_and_p95(name: str, times: Percentiles) -> str:
    return f"{name} p50 {format_seconds(times.p50)}, p95 {format_seconds(times.p95)}"
