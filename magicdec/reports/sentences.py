"""A plan's choice in sentences: what to do and by how much, from what acceptance, what bounds it,
and
what would change it. Terminal, page, report and exports say them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from magicdec.naming import device_name, draft_name, method_name
from magicdec.plan_document import (
    CaseAnswer,
    Choice,
    Percentiles,
    Plan,
    Reach,
    Traffic,
    TrafficLoad,
)
from magicdec.plan_request import DEFAULT_CONTEXT, Request
from magicdec.plan_rows import Candidate
from magicdec.tasks import NO_TASK, usual_lengths
from magicdec.units import MILLI, PERCENT, format_number, format_seconds, format_tokens

LOW_RATE = 0.6
"""Published drafts accept at least this share of first tokens on the text they were trained for."""
WORTH_A_TRY = 0.4
"""Rate up to which a draft of unknown acceptance that pays from there is suggested."""
BOUND_WORTH_SAYING = 0.5
"""Share of prefill from which its bound on every draft's gain is said."""
MOST_SURE = 0.99
QUITE_SURE = 0.9
"""Probability of a gain above which no other draft is suggested."""
DISAGREEMENT = 0.25
"""Share by which a steady figure exceeds the simulated one, from which that is said."""
FEW_NAMED = 4
"""Loads without a draft that are still named one by one."""
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
    """Users that are served at once, of all replicas."""
    return counted(row.batch_size * row.num_replicas, "user")


def devices_of(row: Candidate) -> str:
    """The devices of all replicas: "8 x H200 SXM 141 GB (4 replicas)"."""
    count = row.num_gpus * row.num_replicas
    name = device_name(row.hardware).replace("\u00a0", " ")
    devices = f"{count} x {name}"
    if row.num_replicas > 1:
        return f"{devices} ({row.num_replicas} replicas)"
    return devices


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 user", "8 users"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def first_line(case: CaseAnswer) -> str:
    """The action with its gain and probability, or why no draft is chosen."""
    choice = case.choice
    row = choice.row
    served = f"Serve {users_of(row)} on {devices_of(row)}"
    if row.is_speculative and row.gain.probability < QUITE_SURE:
        tried = f"Try serving {users_of(row)} on {devices_of(row)}"
        return f"{tried} with {drafting_of(row)}: {gain_of(row)}."
    if row.is_speculative:
        return f"{served} with {drafting_of(row)}: {gain_of(row)}."
    return f"{served} without a draft{_why_not(choice)}."


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
    if left_out.batch_size != choice.row.batch_size:
        return (
            f": at so many no draft gains; with {users_of(left_out)}, {drafting_of(left_out)} is "
            f"{gain_of(left_out)}"
        )
    return f": the best, {drafting_of(left_out)}, is {gain_of(left_out)}"


def further_lines(plan: Plan, case: CaseAnswer) -> list[str]:
    """The lines after the first, most important first."""
    lines = [
        _waiting(plan, case),
        acceptance_line(case.choice),
        *_limits(case.choice),
        _prefill_bound(case.choice),
        _where_it_fits(case.choice),
        _better_gamma(case.choice),
        _worth_profiling(plan, case),
        _verification(case),
        _plugin(case.choice),
    ]
    return [line for line in lines if line]


def _waiting(plan: Plan, case: CaseAnswer) -> str:
    """Users that were asked for and do not fit."""
    asked = min(plan.request.batch_sizes, default=0)
    served = case.best.batch_size
    if asked <= served or not case.best_by_batch:
        return ""
    line = f"{asked} users do not fit at once: the answer is for {served}, the others wait"
    alone = int(case.memory.largest_autoregressive_batch)
    if alone > served:
        return f"{line} (without a draft {alone} fit)"
    return line


def acceptance_line(choice: Choice) -> str:
    """The text that acceptance is of, and where it comes from."""
    row = choice.left_out
    if choice.row.is_speculative:
        row = choice.row
    if row is None:
        return ""
    drafting = row.drafting
    source, *others = drafting.acceptance_source.split(", http")
    more = ""
    if others:
        more = f" and {len(others)} more"
    text = drafting.acceptance_text or "no one text (--task names yours)"
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


def plugin_lines(cases: Sequence[CaseAnswer]) -> list[str]:
    """A line on the drafts that need the plugin in several cases, where they gain most."""
    rows = [case.choice.with_plugin for case in cases]
    gains = [row for row in rows if row is not None]
    if not gains:
        return []
    best = max(gains, key=lambda row: row.speedup)
    return [
        f"--plugin admits magicdec's own draft, never measured on a GPU: faster than that in "
        f"{len(gains)} of {len(cases)}, most on {best.hardware} at "
        f"{format_tokens(best.context_len)}: "
        f"{drafting_of(best)}, {gain_of(best)}"
    ]


def left_aside(case: CaseAnswer) -> str:
    """A line on the fastest draft of one case of several, where it does not fit or is too slow."""
    fits = _where_it_fits(case.choice)
    if not fits:
        return ""
    return f"{case.hardware}, context {format_tokens(case.context_len)}: {fits}"


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


def is_prefill_bound(choice: Choice) -> bool:
    """Whether prefill takes so much of each request that it bounds the gain."""
    requests = choice.without_draft.requests
    return requests is not None and requests.prefill_share >= BOUND_WORTH_SAYING


def _prefill_bound(choice: Choice) -> str:
    """The bound that prefill sets to every draft's gain."""
    requests = choice.without_draft.requests
    if requests is None or not is_prefill_bound(choice):
        return ""
    share = requests.prefill_share
    most = 1.0 / share
    users = users_of(choice.row)
    return f"prefill is {share:.0%} of each request: with {users} no draft gains over {most:.2f}x"


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
    """A draft of unknown acceptance that pays from a low rate, where no draft surely does."""
    if case is not plan.cases[0]:
        return ""
    if case.choice.is_speculative and case.choice.row.gain.probability > QUITE_SURE:
        return ""
    rates: dict[str, float] = {}
    for draft in plan.needs_acceptance:
        if draft.break_even_acceptance_rate is not None:
            rates[method_name(draft.draft_method)] = draft.break_even_acceptance_rate
    if not rates:
        return ""
    name = min(rates, key=lambda method: rates[method])
    rate = rates[name]
    if rate > WORTH_A_TRY:
        return ""
    return (
        f"{name}: no acceptance is known for this model; it pays from {rate:.0%} of its tokens "
        f"accepted, and published heads reach {LOW_RATE:.0%} and more: find or train one"
    )


# Several cases
# --------------------------------------------------------------------------------------------------


def loads_lines(plan: Plan) -> list[str]:
    """At which of several devices, contexts or batches a draft is expected to pay, and how much."""
    loads = loads_of(plan.cases)
    where = _told_apart(loads)
    drafted = [row for row in loads if row.is_speculative]
    total = f"{len(loads)} loads"
    if not drafted:
        line = f"Decode without a draft at all {total}: none is expected to pay."
        return [line, *_acceptance_lines(plan)]
    alone = [row for row in loads if not row.is_speculative]
    best = max(drafted, key=lambda row: row.gain.speedup)
    least = min(drafted, key=lambda row: row.gain.speedup)
    likely = sum(row.gain.probability >= 0.5 for row in drafted)
    line = f"A draft gains on average at {len(drafted)} of {total}"
    if likely < len(drafted):
        line += f" (more likely than not at {likely})"
    line += f", most at {where(best)}: {drafting_of(best)}, {gain_of(best)}"
    if least is not best:
        line += f"; least at {where(least)}: {least.gain.speedup:.2f}x, {probability_of(least)}"
    if alone and len(alone) <= FEW_NAMED:
        line += f". Without a draft at {', '.join(map(where, alone))}"
    return [f"{line}.", *_acceptance_lines(plan)]


def loads_of(cases: Sequence[CaseAnswer]) -> list[Candidate]:
    """The best of each load of several cases."""
    return [row for case in cases for row in (case.best_by_batch or [case.best])]


def _acceptance_lines(plan: Plan) -> list[str]:
    lines = [acceptance_line(case.choice) for case in plan.cases]
    found = [line for line in dict.fromkeys(lines) if line]
    if len(found) > 1:
        return [f"{found[0]}; other loads have other sources (--all)"]
    return found


def _told_apart(loads: Sequence[Candidate]) -> Callable[[Candidate], str]:
    """Words for a load among others: what tells it apart."""
    devices = len({row.hardware for row in loads}) > 1
    contexts = len({row.context_len for row in loads}) > 1

    def words(row: Candidate) -> str:
        parts = []
        if devices:
            parts.append(row.hardware)
        if contexts:
            parts.append(format_tokens(row.context_len))
        if len({(each.hardware, each.context_len) for each in loads}) < len(loads):
            parts.append(f"batch {row.batch_size}")
        return " ".join(parts)

    return words


# Where the answer changes
# --------------------------------------------------------------------------------------------------


def lengths_text(request: Request, context_len: int) -> str:
    """Tokens in and out, and whether they are the usual ones of the task."""
    if not request.gen_len or request.workload is not None:
        is_default = request.context_lens == (DEFAULT_CONTEXT,)
        return f"context {context_len}{' (default)' if is_default else ''}"
    usual = usual_lengths(request.task)
    text = f"{context_len} tokens in, {request.gen_len} out"
    if request.gen_len != usual.output_len or (request.task is None and request.rate is None):
        return text
    return f"{text} (usual for {request.task or NO_TASK})"


def asked_line(answer: Plan, case: CaseAnswer) -> str:
    """Model, devices, engine, batch and context of the answer."""
    best = case.best
    replicas = best.num_replicas
    spread = f"({best.layout.label})"
    batch = f"batch {best.batch_size}"
    if replicas > 1:
        spread = f"in {replicas} replicas {spread}"
        batch += " each"
    if not case.best_by_batch:
        batch += " (searched)"
    devices = f"{best.num_gpus * replicas} x {case.hardware}"
    lengths = lengths_text(answer.request, case.context_len)
    return (
        f"{answer.model} on {devices} {spread}, {answer.engine}: {batch}, {lengths}{_budget(best)}"
    )


def limits_text(request: Request) -> str:
    """The limits that were asked for."""
    limits = {
        "p95 of TTFT": request.ttft_p95_s,
        "p95 of TPOT": request.tpot_p95_s,
        "mean TTFT": request.ttft_limit_s,
        "mean TPOT": request.tpot_limit_s,
    }
    asked = []
    for name, limit in limits.items():
        if limit is not None:
            asked.append(f"{name} {format_seconds(limit)}")
    return " and ".join(asked) or "none"


def _budget(best: Candidate) -> str:
    """The draft's budget in tokens and as a share of the context."""
    share = best.drafting.budget_share
    if best.draft_budget is None or share is None:
        return ""
    return f", draft budget {best.draft_budget} ({format_number(PERCENT * share)}%)"


def asked_of_traffic(answer: Plan, traffic: Traffic) -> str:
    """Model, device, engine, rate, lengths and limits of an answer for a rate."""
    rate = format_number(traffic.rate_per_s)
    lengths = lengths_text(answer.request, answer.context_len)
    return (
        f"{answer.model} on {answer.hardware}, {answer.engine}: {rate} requests/s, {lengths}, "
        f"limits {limits_text(answer.request)}"
    )


def reach_text(reach: Reach) -> str:
    """From or up to which context a draft is expected to pay, and is sure to."""
    name = draft_name(reach.draft, reach.draft_method)
    first, last = reach.contexts
    if reach.pays is None:
        if reach.possibly is None:
            return f"{name} pays at no context"
        return (
            f"{name} is expected to pay at no context, and may up to "
            f"{format_tokens(reach.possibly[1])}"
        )
    start, end = reach.pays
    if start > first and end == last:
        where = f"from a context of {format_tokens(start)} on"
        sure = reach.surely and f"from {format_tokens(reach.surely[0])}"
    elif end == last:
        where = f"at every context to {format_tokens(last)}"
        sure = reach.surely and f"to {format_tokens(reach.surely[1])}"
    else:
        where = f"up to a context of {format_tokens(end)}"
        if start > first:
            where = f"at contexts of {format_tokens(start)} to {format_tokens(end)}"
        sure = reach.surely and f"to {format_tokens(reach.surely[1])}"
    surely = f", surely {sure}" if sure else ""
    return f"{name} is expected to pay {where}{surely}"


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


def arrivals_line(load: TrafficLoad) -> str:
    """Why the simulation needs more devices than steady, full batches would."""
    highest = load.highest_rate_per_s
    if not highest or load.analytic_rate_per_s / highest < 1.0 + DISAGREEMENT:
        return ""
    steady = format_number(load.analytic_rate_per_s)
    return (
        f"batches that are always full would serve {steady} requests/s on these devices; arrivals "
        f"bunch, wait, and hold up others with their prompts, which leaves {format_number(highest)}"
    )


def _p50_and_p95(name: str, times: Percentiles) -> str:
    return f"{name} p50 {format_seconds(times.p50)}, p95 {format_seconds(times.p95)}"
