"""A plan's choice in sentences: what to do and by how much, from what acceptance, what bounds it,
and what would change it. Terminal, page, report and exports use the same ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from magicdec.counts import CAUSES, Z_90
from magicdec.naming import ENGINE_TITLES, METHODS, device_name, draft_name, method_name
from magicdec.schema import (
    Candidate,
    CaseAnswer,
    Choice,
    Drafting,
    Gain,
    LaneEvidence,
    NeedsAcceptance,
    Percentiles,
    Plan,
    Request,
    Traffic,
    TrafficLoad,
)
from magicdec.tasks import NO_TASK, usual_lengths
from magicdec.units import (
    MILLI,
    PERCENT,
    format_count,
    format_interval,
    format_number,
    format_percent,
    format_seconds,
    format_tokens,
)

LOW_RATE = 0.6
"""Published drafts accept at least this share of first tokens on the text they were trained for."""
WORTH_A_TRY = 0.4
"""Rate up to which a draft of unknown acceptance that pays from there is suggested."""
BOUND_WORTH_SAYING = 0.5
"""Share of prefill from which its bound on every draft's gain is said."""
MOST_SURE = 0.99
QUITE_SURE = 0.9
"""Probability of a gain above which no other draft is suggested."""
BOTH_SAID = 0.03
"""Relative difference of two gains from which both are said."""
LEAST_NAMED = 0.02
"""Change of a rate from which its reason is named."""
REASONS = {
    "waves and prompts": "whole steps, chunks of prompts and replicas of their own",
    "arrivals that bunch": "arrivals that bunch",
    "percentiles": "limits on percentiles instead of means",
}
"""Words for the parts of what lies between steady batches and a simulation."""
FEW_NAMED = 4
"""Loads without a draft that are still named one by one."""
USUAL_FORMAT = "bf16"
"""Format of weights that goes without saying."""
GIVEN = "given"
"""Source of an acceptance rate that was asked with."""
SLOW_VERIFICATION = 1.5
"""Decode steps that a verification takes, from which it is said."""


def drafting_of(row: Candidate) -> str:
    """The draft and gamma: "EAGLE-3, gamma 3"."""
    name = draft_name(row.draft, row.draft_method, row.draft_budget)
    return f"{name}, gamma {row.gamma}"


def gain_of(row: Candidate, on_texts: str = "") -> str:
    """The gain with its interval and probability: "1.35x faster (90 % interval 0.92–1.71); 87 % likely
    to pay". It is the expected one, which configurations are ranked by; the median is named where it
    differs."""
    gain = row.gain
    direction = "as fast"
    if gain.speedup >= 1.0:
        direction = "faster"
    interval = format_interval(gain.low, gain.high)
    if abs(gain.median / gain.speedup - 1.0) > BOTH_SAID:
        interval += f", median {gain.median:.2f}"
    text = f"{gain.speedup:.2f}x {direction} ({interval})"
    if on_texts:
        text += f", {on_texts}"
    return f"{text}; {probability_of(row)} likely to pay"


def with_ends(gain: Gain) -> str:
    """A speedup and its 90 % interval: "1.35x (0.92–1.71)"."""
    return f"{gain.speedup:.2f}x ({gain.low:.2f}–{gain.high:.2f})"


def probability_of(row: Candidate) -> str:
    """The probability that a draft pays, never as certain."""
    probability = row.gain.probability
    if probability > MOST_SURE:
        return f"over {format_percent(MOST_SURE)}"
    if probability < 1.0 - MOST_SURE:
        return f"under {format_percent(1.0 - MOST_SURE)}"
    return format_percent(probability)


def users_of(row: Candidate) -> str:
    """Users that are served at once, of all replicas."""
    return format_count(row.batch_size * row.num_replicas, "user")


def devices_of(row: Candidate) -> str:
    """The devices of all replicas: "8 x H200 SXM 141 GB (4 replicas)"."""
    count = row.num_gpus * row.num_replicas
    name = device_name(row.hardware).replace("\u00a0", " ")
    devices = f"{count} x {name}"
    if row.num_replicas > 1:
        return f"{devices} ({row.num_replicas} replicas)"
    return devices


def first_line(case: CaseAnswer) -> str:
    """The action with its gain and probability, or why no draft is chosen; before it, which
    measured draft does not work."""
    choice = case.choice
    row = choice.row
    where = f"{users_of(row)} on {devices_of(row)}"
    if not row.is_speculative:
        # a fault says already why the measured draft is not taken
        why = "" if choice.faults else _why_not(choice)
        action = f"Serve {where} without a draft{why}."
    else:
        verb = "Serve"
        if row.gain.probability < QUITE_SURE:
            verb = "Try serving"
        gain = gain_of(row, on_texts(choice))
        action = f"{verb} {where} with {drafting_of(row)}: {gain}."
    return " ".join([*choice.faults, action])


def on_texts(choice: Choice) -> str:
    """The least and the largest gain on the texts that count, where none was named: "1.41x on chat
    to 1.83x on math"."""
    outlook = choice.outlook
    if outlook is None:
        return ""
    counted = [task for task in outlook.tasks if task.weight > 0.0]
    if not counted:
        return ""
    low = min(counted, key=lambda task: task.own.speedup)
    high = max(counted, key=lambda task: task.own.speedup)
    if f"{low.own.speedup:.2f}" == f"{high.own.speedup:.2f}":
        return ""
    texts = f"{low.own.speedup:.2f}x on {low.task} to {high.own.speedup:.2f}x on {high.task}"
    # a text that is not known is less sure than any, which costs time in the mean
    if choice.row.gain.speedup < low.own.speedup:
        return f"with the text known {texts}"
    return texts


def _why_not(choice: Choice) -> str:
    left_out = choice.left_out
    if left_out is None:
        if choice.outcome == "not published" and choice.to_train is not None:
            return f": {unpublished(choice.to_train)}"
        if choice.outcome == "no acceptance":
            return ": no draft has a known acceptance here"
        if choice.outcome == "not asked":
            return ", as asked"
        return ": no draft that was considered pays"
    drafting = drafting_of(left_out)
    gain = gain_of(left_out)
    if choice.outcome == "no room":
        return f": {drafting} would be {gain}, but does not fit in memory"
    if choice.outcome == "over limits":
        return f": {drafting} would be {gain}, but exceeds the limits"
    if left_out.batch_size != choice.row.batch_size:
        return f": with so many, no draft gains; with {users_of(left_out)}, {drafting} would be {gain}"
    if left_out.gain.speedup > 1.0:  # the choice is by the mean loss over texts
        none = "no draft gains on average over kinds of text"
        return f": {none}; with its known acceptance, {drafting} would be {gain}"
    return f": the best draft, {drafting}, would be {gain}"


def causes_line(choice: Choice) -> str:
    """Why a measured draft may accept nothing."""
    return CAUSES if choice.faults else ""


def at_limit(plan: Plan, case: CaseAnswer) -> str:
    """Throughput of a device where each user gets the tokens per second asked for, with and without
    a draft, each at its own batch and layout.
    """
    limit_s = plan.request.tpot_limit_s
    if not limit_s or case.best_by_batch or plan.traffic is not None:
        return ""
    alone = case.best_autoregressive
    users = f"At {format_number(1.0 / limit_s)} tokens/s per user"
    best = case.best
    if alone is None:
        without = "no batch keeps it without a draft"
    else:
        without = f"{_per_device(alone)} without a draft"
    if not best.is_speculative:
        return f"{users}: {without}."
    line = f"{users}: {_per_device(best)} with {drafting_of(best)}; {without}"
    ratio = best.speedup_vs_best_autoregressive
    if ratio is None:
        return f"{line}."
    return f"{line}: {ratio:.2f}x."


def _per_device(row: Candidate) -> str:
    """Tokens per second of a device, and the users that share a replica."""
    rate = format_number(row.rate_per_gpu)
    users = format_count(row.batch_size, "user")
    return f"{rate} tokens/s per GPU ({row.layout.label}, {users} per replica)"


def waiting_line(plan: Plan, case: CaseAnswer) -> str:
    """Users that were asked for and do not fit."""
    asked = min(plan.request.batch_sizes, default=0)
    served = case.best.batch_size
    if asked <= served or not case.best_by_batch:
        return ""
    line = f"{asked} users do not fit at once: {served} are served, the others wait"
    alone = int(case.memory.largest_autoregressive_batch)
    if alone > served:
        return f"{line} ({alone} fit without a draft)."
    return f"{line}."


NAME_THE_TEXT = "name your text with --task"


def acceptance_line(choice: Choice) -> str:
    """The text that acceptance is of, and where it comes from."""
    row = choice.left_out
    if choice.row.is_speculative:
        row = choice.row
    if row is None:
        return ""
    return acceptance_of(row.drafting)


def acceptance_of(drafting: Drafting) -> str:
    """The text that a draft's acceptance is of, and where it comes from."""
    source, *others = drafting.acceptance_source.split(", http")
    more = ""
    if others:
        more = f" and {len(others)} more"
    if source.split("; ")[0] == GIVEN:
        return f"Acceptance as {source}."
    if drafting.acceptance_text:
        return f"Acceptance on {drafting.acceptance_text}: {source}{more}."
    return f"Acceptance: {source}{more}; {NAME_THE_TEXT}."


def tie_line(choice: Choice) -> str:
    """The draft that is as good as the one taken, over the texts that count where none was named."""
    tied = choice.tied
    if tied is None:
        return ""
    # its interval and its probability stand in the table, too
    gain = with_ends(tied.gain)
    apart = abs(tied.gain.speedup / choice.row.gain.speedup - 1.0)
    outlook = choice.outlook
    if outlook is not None and apart > BOTH_SAID:
        aside = [task.task for task in outlook.tasks if task.weight == 0.0]
        if aside:  # the gains are over all texts, the choice is not
            texts = " and ".join(aside)
            return _sentence(
                f"{drafting_of(tied)} is as good on average; {gain} counting {texts}"
            )
    return _sentence(f"{drafting_of(tied)} is as good: {gain}")


def evidence_line(evidence: LaneEvidence | None) -> str:
    """The number of measured servers that such predictions were checked on, and their error."""
    if evidence is None or not evidence.lane:
        return ""
    within = math.expm1(Z_90 * evidence.width)
    if not evidence.rows:
        return f"No server of this kind was measured with such a draft: ±{format_percent(within)}."
    servers = format_count(evidence.rows, "server")
    line = f"Checked on {servers} of this kind"
    if not evidence.rows_here:
        line += ", none with this device"
    elif evidence.rows_here < evidence.rows:
        line += f", {evidence.rows_here} with this device"
    if evidence.median_error is not None:
        line += f": {format_percent(evidence.median_error)} off"
    if evidence.width_of == evidence.lane:
        return f"{line}."
    sources = format_count(evidence.sources, "source")
    return f"{line}, from {sources} only: ±{format_percent(within)}, as for {evidence.width_of}."


def where_it_fits(choice: Choice) -> str:
    verbs = {"no room": "fits", "over limits": "keeps the limits"}
    left_out = choice.left_out
    if left_out is None or choice.outcome not in verbs:
        return ""
    verb = verbs[choice.outcome]
    name = draft_name(left_out.draft, left_out.draft_method, left_out.draft_budget)
    row = choice.left_out_fits
    if row is None:
        return f"{name} {verb} with no number of users."
    users = format_count(row.batch_size, "user")
    gain = f"gamma {row.gamma}, {gain_of(row)}"
    return f"{name} {verb} with up to {users}: {gain}."


def unpublished(row: Candidate) -> str:
    """Why a draft is not run that nobody published for the model."""
    kind = method_name(row.draft_method)
    return f"no {kind} head is published for this model, one would have to be trained first"


def to_train_line(choice: Choice) -> str:
    """The gain of a draft that would have to be trained first."""
    row = choice.to_train
    if row is None:
        return ""
    return (
        f"If one were trained, with the acceptance of other models' heads, {drafting_of(row)} would be "
        f"{gain_of(row)}."
    )


def plugin_line(choice: Choice) -> str:
    row = choice.with_plugin
    if row is None:
        return ""
    drafting = f"{drafting_of(row)} with {users_of(row)}"
    own = f"{drafting}, {gain_of(row)}"
    return f"With --plugin (our vLLM plugin, not yet measured on a GPU): {own}."


def plugin_lines(cases: Sequence[CaseAnswer]) -> list[str]:
    """A line on the drafts that need the plugin in several cases, where they gain most."""
    rows = [case.choice.with_plugin for case in cases]
    gains = [row for row in rows if row is not None]
    if not gains:
        return []
    best = max(gains, key=lambda row: row.speedup)
    count = f"{len(gains)} of {len(cases)}"
    where = f"{best.hardware} at {format_tokens(best.context_len)}"
    return [
        "With --plugin (our vLLM plugin, not yet measured on a GPU) a draft is faster in "
        f"{count}, most on {where}: {drafting_of(best)}, {gain_of(best)}."
    ]


def left_aside(case: CaseAnswer) -> str:
    """A line on the fastest draft of one case of several, where it does not fit or is too slow."""
    fits = where_it_fits(case.choice)
    if not fits:
        return ""
    context = format_tokens(case.context_len)
    return f"{case.hardware}, context {context}: {fits}"


def limit_lines(choice: Choice) -> list[str]:
    lines = []
    for limit in choice.limits:
        allowed = format_seconds(limit.limit_s)
        verdict = "missed"
        if limit.is_kept:
            verdict = "kept"
        reached = ", overload"
        if limit.value_s is not None:
            reached = f" ({format_seconds(limit.value_s)})"
        lines.append(f"Limit on {limit.of} {allowed}: {verdict}{reached}.")
    return lines


def is_prefill_bound(choice: Choice) -> bool:
    """Whether prefill takes so much of each request that it bounds the gain."""
    requests = choice.without_draft.requests
    return requests is not None and requests.prefill_share >= BOUND_WORTH_SAYING


def prefill_line(choice: Choice) -> str:
    """The bound that prefill sets to every draft's gain."""
    requests = choice.without_draft.requests
    if requests is None or not is_prefill_bound(choice):
        return ""
    share = requests.prefill_share
    bound = f"{1.0 / share:.2f}x"
    users = users_of(choice.row)
    return f"Prefill is {format_percent(share)} of each request, so with {users} no draft gains more than {bound}."


def verification_line(case: CaseAnswer) -> str:
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
    num_tokens = row.gamma + 1
    line = f"Verifying {num_tokens} tokens takes {steps:.1f} decode steps"
    once = _seconds_by_operation(case, "autoregressive")
    verified = _seconds_by_operation(case, "verify")
    if not verified:
        return f"{line}."
    name = max(verified, key=lambda name: verified[name] - once.get(name, 0.0))
    before_ms = once.get(name, 0.0) / MILLI
    after_ms = verified[name] / MILLI
    times = f"{format_number(after_ms)} ms instead of {format_number(before_ms)}"
    takes = "take" if name.endswith("s") else "takes"
    return f"{line}; {name} alone {takes} {times}."


def _seconds_by_operation(case: CaseAnswer, name: str) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for operation in case.breakdown.get(name, []):
        seconds[operation.op] += operation.time_s
    return seconds


def worth_profiling(plan: Plan, case: CaseAnswer) -> str:
    """A draft of unknown acceptance that pays from a low rate, where no draft surely does."""
    if case is not plan.cases[0]:
        return ""
    if case.choice.is_speculative and case.choice.row.gain.probability > QUITE_SURE:
        return ""
    if any(METHODS[row.draft_method].is_trained_apart for row in plan.candidates):
        return ""  # a published head is ranked already
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
        f"No acceptance of {name} is known for this model; it pays from a rate of {format_percent(rate)}, and "
        f"published heads reach {format_percent(LOW_RATE)} and more: find or train one."
    )


# Several cases
# --------------------------------------------------------------------------------------------------


def loads_lines(plan: Plan) -> list[str]:
    """The devices, contexts or batches at which a draft is expected to pay, and its gain there."""
    loads = loads_of(plan.cases)
    where = _told_apart(loads)
    drafted = [row for row in loads if row.is_speculative]
    total = f"{len(loads)} {_kind_of_loads(loads)}"
    if not drafted:
        line = f"Decode without a draft at all {total}"
        to_train = [case.choice.to_train for case in plan.cases if case.choice.to_train]
        if not to_train:
            return [f"{line}: none is expected to pay.", *_acceptance_lines(plan)]
        most = max(to_train, key=lambda row: row.gain.speedup)
        gain = f"trained, {drafting_of(most)} would be {gain_of(most)} at {where(most)}"
        return [f"{line}: {unpublished(most)}.", f"{gain[0].upper()}{gain[1:]}."]
    alone = [row for row in loads if not row.is_speculative]
    best = max(drafted, key=lambda row: row.gain.speedup)
    least = min(drafted, key=lambda row: row.gain.speedup)
    likely = [row for row in drafted if row.gain.probability >= 0.5]
    line = f"A draft gains on average at {len(drafted)} of {total}"
    if len(likely) < len(drafted):
        line += f" (more likely than not at {len(likely)})"
    line += f", most at {where(best)}: {drafting_of(best)}, {gain_of(best)}"
    if least is not best:
        gain = f"{least.gain.speedup:.2f}x, {probability_of(least)}"
        line += f"; least at {where(least)}: {gain}"
    if alone and len(alone) <= FEW_NAMED:
        places = ", ".join(map(where, alone))
        line += f". Without a draft at {places}"
    return [f"{line}.", *_acceptance_lines(plan)]


def loads_of(cases: Sequence[CaseAnswer]) -> list[Candidate]:
    """The best of each load of several cases."""
    rows: list[Candidate] = []
    for case in cases:
        rows += case.best_by_batch or [case.best]
    return rows


def _acceptance_lines(plan: Plan) -> list[str]:
    lines: list[str] = []
    for case in plan.cases:
        line = acceptance_line(case.choice)
        if line and line not in lines:
            lines.append(line)
    if len(lines) > 1:
        first = lines[0].removesuffix(".")
        return [f"{first}; other loads have other sources (--all)."]
    return lines


def _told_apart(loads: Sequence[Candidate]) -> Callable[[Candidate], str]:
    """Name a load by its device, context and batch, as far as these differ among the loads."""
    devices = {row.hardware for row in loads}
    contexts = {row.context_len for row in loads}
    places = {(row.hardware, row.context_len) for row in loads}

    def words(row: Candidate) -> str:
        parts = []
        if len(devices) > 1:
            parts.append(row.hardware)
        if len(contexts) > 1:
            parts.append(format_tokens(row.context_len))
        if len(places) < len(loads):
            parts.append(f"batch {row.batch_size}")
        return " ".join(parts)

    return words


def _kind_of_loads(loads: Sequence[Candidate]) -> str:
    """Name what tells loads apart: "devices", "contexts" or "batches", or "loads" if several do."""
    differing = {
        "devices": len({row.hardware for row in loads}),
        "contexts": len({row.context_len for row in loads}),
        "batches": len({row.batch_size for row in loads}),
    }
    for kind, num_values in differing.items():
        if num_values == len(loads):
            return kind
    return "loads"


# What was asked, and decoding with and without the draft
# --------------------------------------------------------------------------------------------------


def decoding_line(plan: Plan, case: CaseAnswer) -> str:
    """Time per token and rate of the answer, what bounds them, and the first token."""
    best = case.best
    times = _ms_and_rate(best).replace("ms,", "ms per token,")
    first_token = format_seconds(best.first_token_s)
    line = (
        f"{times}{_per_replica(best)}; bound by {best.step.bound_by}, first token after "
        f"{first_token}"
    )
    if best.is_speculative:
        return f"{line}."
    return f"{line}{_best_batch(plan, case)}."


def plain_line(plan: Plan, case: CaseAnswer) -> str:
    """The server without a draft, at the answer's batch and at its own best one."""
    best = case.best
    if not best.is_speculative:
        return ""
    without = _ms_and_rate(case.autoregressive)
    return f"Without a draft: {without}{_per_replica(best)}{_best_batch(plan, case)}."


def cost_line(case: CaseAnswer) -> str:
    """That a cost leaves out prefill, where no length of answers is known."""
    best = case.best
    if best.requests is not None or best.cost.per_million_tokens_usd is None:
        return ""
    return "$/Mtok counts decoding alone; --gen-len or --workload adds prefill."


def _per_replica(row: Candidate) -> str:
    if row.num_replicas > 1:
        return " per replica"
    return ""


def _ms_and_rate(row: Candidate) -> str:
    tokens_per_s = row.rate_per_gpu * row.num_gpus
    per_token = format_number(row.between_tokens_s / MILLI)
    return f"{per_token} ms, {tokens_per_s:.0f} tokens/s"


def _best_batch(answer: Plan, case: CaseAnswer) -> str:
    """Throughput of another batch without a draft, where that is the better one."""
    best = case.best
    alone = case.autoregressive
    ceiling = case.best_autoregressive
    if ceiling is None:
        if best.is_speculative:
            return "; no batch keeps the limits"
        return ""
    same_batch = ceiling.batch_size == alone.batch_size
    if same_batch and ceiling.tp_size == alone.tp_size:
        return ""
    request = answer.request
    which = "best batch"
    if request.tpot_limit_s is not None or request.ttft_limit_s is not None:
        which = "best batch within the limits"
    where = str(ceiling.batch_size)
    if ceiling.tp_size != best.tp_size:
        where += f" at tp {ceiling.tp_size}"
    return f"; {which} {where}: {_ms_and_rate(ceiling)}"


def requests_line(case: CaseAnswer, *, every: bool) -> str:
    """The time of decoding next to that of whole requests."""
    best = case.best
    requests = best.requests
    if requests is None:
        return ""
    parts = []
    if best.is_speculative:
        parts.append(f"Decoding alone is {best.speedup:.2f}x as fast")
    if every or not is_prefill_bound(case.choice):
        parts.append(
            f"prefill takes {format_percent(requests.prefill_share)} of the GPUs' time"
        )
    hours = best.cost.gpu_hours_per_million_requests
    if hours is not None:
        parts.append(f"{hours:.4g} GPU-hours per million requests")
    break_even = best.drafting.break_even_gen_len
    if break_even and break_even > 1:
        parts.append(f"the draft's prefill is paid back from {break_even} tokens")
    static = best.decoding.speedup_static_batch
    if every and best.is_speculative and static is not None:
        parts.append(
            f"with a static batch, which waits for its slowest sequence: {static:.2f}x"
        )
    return _sentence("; ".join(parts))


def _sentence(text: str) -> str:
    if not text:
        return ""
    return f"{text[0].upper()}{text[1:]}."


# Where the answer changes
# --------------------------------------------------------------------------------------------------


def lengths_text(answer: Plan, context_len: int) -> str:
    """Tokens in and out, and whether they are the usual ones of the task."""
    request = answer.request
    if not request.gen_len or request.workload is not None:
        if answer.context_is_default:
            return f"context {context_len} (default)"
        return f"context {context_len}"
    text = f"{context_len} tokens in, {request.gen_len} out"
    if request.task is None and request.rate is None:
        return text
    usual = usual_lengths(request.task)
    if request.gen_len != usual.output_len:
        return text
    task = request.task or NO_TASK
    return f"{text} (usual for {task})"


def model_text(answer: Plan) -> str:
    """The model, and the format of its weights where that is not the usual one."""
    weights = answer.precision.weight_dtype
    if weights == USUAL_FORMAT:
        return answer.model
    return f"{answer.model} in {weights}"


def asked_line(answer: Plan, case: CaseAnswer, *, devices: bool = True) -> str:
    """Model, devices (where no line before names them), engine, batch and context of the answer."""
    best = case.best
    replicas = best.num_replicas
    spread = f"({best.layout.label})"
    batch = f"batch {best.batch_size}"
    if replicas > 1:
        spread = f"in {replicas} replicas {spread}"
        batch += " each"
    if not case.best_by_batch:
        batch += " (searched)"
    num_devices = best.num_gpus * replicas
    model = model_text(answer)
    where = spread
    if devices:
        where = f"on {num_devices} x {case.hardware} {spread}"
    served = f"{model} {where}, {answer.engine}"
    lengths = lengths_text(answer, case.context_len)
    scope = "whole requests"
    if best.requests is None:
        scope = "decoding alone"
    budget = ""
    share = best.drafting.budget_share
    if best.draft_budget is not None and share is not None:
        percent = format_number(PERCENT * share)
        budget = f", draft budget {best.draft_budget} ({percent} %)"
    return f"{served}: {batch}, {lengths}{budget}, {scope}."


def limits_text(request: Request) -> str:
    """The limits on latency that were asked for."""
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
    if not asked:
        return "no limits on latency"
    return f"limits {' and '.join(asked)}"


def asked_of_traffic(answer: Plan, traffic: Traffic) -> str:
    """Model, device, engine, rate, lengths and limits of an answer for a rate."""
    served = f"{answer.model} on {answer.hardware}, {answer.engine}"
    rate = format_number(traffic.rate_per_s)
    lengths = lengths_text(answer, answer.context_len)
    limits = limits_text(answer.request)
    return f"{served}: {rate} requests/s, {lengths}, {limits}"


def for_latency_line(case: CaseAnswer) -> str:
    """The batch with the least time per token, where that is not the answer's."""
    if case.best_by_batch or not case.pareto:
        return ""
    quickest = case.pareto[0]
    if quickest.batch_size == case.best.batch_size:
        return ""
    draft = "no draft"
    if quickest.is_speculative:
        draft = drafting_of(quickest)
    per_token = format_number(quickest.between_tokens_s / MILLI)
    return f"For latency alone: batch {quickest.batch_size}, {draft}, {per_token} ms per token."


def for_throughput_line(case: CaseAnswer) -> str:
    """The batch that decodes more tokens per second without a draft, where there is one."""
    best = case.best
    ceiling = case.best_autoregressive
    if not best.is_speculative or ceiling is None:
        return ""
    ratio = ceiling.rate_per_gpu / best.rate_per_gpu
    if ratio <= 1.0:
        return ""
    return (
        f"For throughput alone: batch {ceiling.batch_size} at tp {ceiling.tp_size} without a "
        f"draft gives {format_number(ratio)} times the tokens/s per GPU."
    )


def not_ranked_line(plan: Plan) -> str:
    """Drafts of unknown acceptance, each with the rate from which it would be faster."""
    if not plan.needs_acceptance:
        return ""
    wanted = ", ".join(map(_break_even_rate, plan.needs_acceptance))
    return (
        f"Not ranked, since no acceptance is known for {plan.model}; a draft would pay from a rate "
        f"of: {wanted}."
    )


def _break_even_rate(draft: NeedsAcceptance) -> str:
    """A draft of unknown acceptance, and the rate from which it would be faster."""
    name = draft.draft
    if name == "self":
        name = draft.draft_method
    rate = draft.break_even_acceptance_rate
    if rate is None:
        return f"{name} at no rate"
    return f"{name} {rate:.2f}"


def next_line(answer: Plan, *, every: bool, saved_as: str | None) -> str:
    """The step that follows the answer; `saved_as`: the file that it was written to."""
    more = " (--all, --why: more)"
    if every:
        more = ""
    if len(answer.cases) > 1:
        return f"plan one alone with -o plan.json to export it{more}"
    if answer.best.is_speculative:
        file = saved_as or "plan.json"
        use = f"magicdec run --plan {file}"
        if answer.engine in ENGINE_TITLES:
            use = f"magicdec export {answer.engine} {file}"
        if saved_as is None:
            use = f"add -o {file}; {use}"
        return f"{use}{more}"
    if answer.needs_acceptance and not answer.candidates:
        return f"give --acceptance-rate or --acceptance FILE{more}"
    return f"magicdec explore tries other loads and devices{more}"


# Under arrivals
# --------------------------------------------------------------------------------------------------


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
    if best.highest_rate_per_s is None or other.highest_rate_per_s is None:
        return f"{line}; {with_other} it takes as many"
    highest = _highest_rate(best)
    return f"{line}: up to {highest} requests/s, {with_other} {_highest_rate(other)}"


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
