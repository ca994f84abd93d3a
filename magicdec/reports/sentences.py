"""Sentences on a plan's choice for one case, by what they are about. Terminal, page, report and exports
use the same ones; story.py says in which order.
"""

from __future__ import annotations

import math
from collections import defaultdict

from magicdec.counts import Z_90
from magicdec.naming import (
    ENGINE_TITLES,
    HEADS_LISTED,
    METHODS,
    draft_name,
    method_name,
)
from magicdec.reports.words import (
    devices_of,
    drafting_of,
    gain_of,
    sentence,
    users_of,
    with_ends,
)
from magicdec.schema.evidence import LaneEvidence
from magicdec.schema.plan import CaseAnswer, Choice, OfTask, Outlook, Plan
from magicdec.schema.request import Request
from magicdec.schema.row import PLUGIN, Candidate, Drafting
from magicdec.tasks import NO_TASK, usual_lengths
from magicdec.units import (
    MILLI,
    PERCENT,
    format_count,
    format_interval,
    format_number,
    format_percent,
    format_seconds,
)

# The answer
# --------------------------------------------------------------------------------------------------


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
        if row.verdict != "pays":
            verb = "Try serving"
        action = f"{verb} {where} with {drafting_of(row)}: {gain_of(row)}."
    return " ".join([*choice.faults, action])


def considered(choice: Choice) -> Candidate | None:
    """The draft that is taken, else the best of those that are not."""
    if choice.row.is_speculative:
        return choice.row
    return choice.left_out


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
    return f": {drafting}, would be {gain}"


def unpublished(row: Candidate) -> str:
    """Why a draft is not run of which no head for the model is known."""
    kind = method_name(row.draft_method)
    return f"no {kind} head of this model is known to magicdec (list of {HEADS_LISTED})"


# Other drafts
# --------------------------------------------------------------------------------------------------


EXPECTED_TO_PAY = 0.5
"""Probability from which a draft is expected to pay."""
ABOUT_PLUGIN = "our vLLM plugin, not yet measured on a GPU"
LOW_RATE = 0.6
"""Published drafts accept at least this share of first tokens on the text they were trained for."""
WORTH_A_TRY = 0.4
"""Rate up to which a draft of unknown acceptance that pays from there is suggested."""


def tie_line(choice: Choice) -> str:
    """The draft that is as good as the one taken."""
    tied = choice.tied
    if tied is None:
        return ""
    # its interval and its probability stand in the table, too
    return sentence(f"{drafting_of(tied)} is as good: {with_ends(tied.gain)}")


def to_train_line(choice: Choice) -> str:
    """The gain of a draft of which no head for the model is known."""
    row = choice.to_train
    if row is None:
        return ""
    return (
        f"With one that accepts like other models' heads, {drafting_of(row)} would be "
        f"{gain_of(row)}."
    )


def self_drafted(plan: Plan, case: CaseAnswer) -> Candidate | None:
    """The best row that drafts with the model itself and a sparse cache; None where none is expected to
    pay."""
    rows = []
    for row in plan.candidates:
        is_here = (row.hardware, row.context_len) == (case.hardware, case.context_len)
        runs = is_here and row.fits and row.within_limits
        pays = row.gain.probability >= EXPECTED_TO_PAY
        if runs and pays and is_sparse_self(row):
            rows.append(row)
    return max(rows, key=lambda row: row.rate, default=None)


def is_sparse_self(row: Candidate) -> bool:
    """Whether the model drafts for itself, with a sparse cache."""
    return row.draft == "self" and METHODS[row.draft_method].sort == "sparse"


def plugin_line(plan: Plan, case: CaseAnswer) -> str:
    """The gain of a draft that needs our plugin, where it is not taken."""
    row = self_drafted(plan, case)
    if row is None or not row.drafting.needs_plugin or case.best.draft == "self":
        return ""
    drafting = f"{drafting_of(row)} with {users_of(row)}"
    return f"With {PLUGIN} ({ABOUT_PLUGIN}): {drafting}, {gain_of(row)}."


def not_ranked_line(plan: Plan) -> str:
    """Drafts of unknown acceptance, each with the rate from which it would be faster."""
    if not plan.needs_acceptance:
        return ""
    wanted = []
    for draft in plan.needs_acceptance:
        name = draft.draft
        if name == "self":
            name = draft.draft_method
        rate = draft.break_even_acceptance_rate
        wanted.append(f"{name} at no rate" if rate is None else f"{name} {rate:.2f}")
    return (
        f"Not ranked, since no acceptance is known for {plan.model}; a draft would pay from a rate "
        f"of: {', '.join(wanted)}."
    )


def worth_profiling(plan: Plan, case: CaseAnswer) -> str:
    """A draft of unknown acceptance that pays from a low rate, where no draft surely does."""
    if case is not plan.cases[0]:
        return ""
    if case.choice.is_speculative and case.choice.row.verdict == "pays":
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


# Room and limits
# --------------------------------------------------------------------------------------------------


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


def limits_line(choice: Choice) -> str:
    """The limits that were asked for, and whether they are kept."""
    parts = []
    for limit in choice.limits:
        allowed = format_seconds(limit.limit_s)
        verdict = "missed"
        if limit.is_kept:
            verdict = "kept"
        reached = ", overload"
        if limit.value_s is not None:
            reached = f" ({format_seconds(limit.value_s)})"
        parts.append(f"{limit.of} {allowed} {verdict}{reached}")
    if not parts:
        return ""
    return f"Limits: {', '.join(parts)}."


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


# Acceptance, and what rests on it
# --------------------------------------------------------------------------------------------------


NAME_THE_TEXT = "give --task"
PUBLISHED = "published for "
SUCH_TEXT = "and such text"
"""Words of a believed acceptance's source."""
GIVEN = "given"
"""Source of an acceptance rate that was asked with."""
NONE_IS_FASTER = "no draft is faster"
CHANGES = 0.02
"""Loss of tokens per second from which another text is said to change the choice."""


def acceptance_line(choice: Choice) -> str:
    """The text that acceptance is of, where it comes from, and what settles it."""
    row = considered(choice)
    if row is None:
        return ""
    line = acceptance_of(row.drafting)
    if row.drafting.acceptance_text and choice.outlook is not None:
        command = " ".join(choice.outlook.measure.split()[:2])
        if command:
            return f"{line.removesuffix('.')}; yours: {command}."
    return line


def acceptance_of(drafting: Drafting) -> str:
    """The text that a draft's acceptance is of, and where it comes from."""
    source, *others = drafting.acceptance_source.split(", http")
    more = ""
    if others:
        more = f" and {len(others)} more"
    if source.split("; ")[0] == GIVEN:
        return f"Acceptance as {source}."
    text = drafting.acceptance_text
    published = source.removeprefix(PUBLISHED)
    is_published = published != source
    if is_published and text and SUCH_TEXT in published:
        line = f"Published acceptance of {published.replace(SUCH_TEXT, f'on {text}')}"
    elif is_published and not text:
        line = f"Published acceptance of {published}"
    elif text:
        line = f"Acceptance on {text}: {source}"
    else:
        line = f"Acceptance: {source}"
    if text:
        return f"{line}{more}."
    return f"{line}{more}; {NAME_THE_TEXT}."


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


def break_even_line(choice: Choice) -> str:
    """The tokens per step with which the draft that was considered breaks even."""
    row = considered(choice)
    if row is None:
        return ""
    least = row.drafting.break_even_tokens_per_step
    most = row.gamma + 1
    if least is None:
        return "No number of tokens per step breaks even."
    if least > most:
        return (
            f"Break-even at {least:.2f} tokens per step, more than the {most} that gamma "
            f"{row.gamma} allows."
        )
    expected = row.drafting.tokens_per_step
    return f"Break-even at {least:.2f} tokens per step; {expected:.2f} expected."


def texts_line(choice: Choice) -> str:
    """The least and the largest gain over all classes of text, where none was named, and the draft that
    is better by most on either."""
    if choice.outlook is None or not choice.outlook.tasks:
        return ""
    tasks = choice.outlook.tasks
    if not choice.is_speculative:
        if choice.outcome != "no gain":
            return ""
        gaining = [task for task in tasks if task.draft != "none"]
        if not gaining:
            return "On no kind of text does a draft gain."
        most = max(gaining, key=lambda task: task.best.speedup)
        gain = f"{_best_on(most)}, {most.best.speedup:.2f}x on {most.task}"
        if len(gaining) == 1:
            return f"By text: {gain}; no draft gains on the others."
        return (
            f"By text: {gain}; a draft gains on {len(gaining)} of {len(tasks)} kinds."
        )
    low = min(tasks, key=lambda task: task.own.speedup)
    high = max(tasks, key=lambda task: task.own.speedup)
    lost = max((low, high), key=lambda task: task.changes)
    ends = []
    for task in (low, high):
        end = f"{task.own.speedup:.2f}x on {task.task}"
        if task is lost and task.changes >= CHANGES:
            end += f" ({_best_on(task)} {task.best.speedup:.2f}x)"
        ends.append(end)
    if f"{low.own.speedup:.2f}" == f"{high.own.speedup:.2f}":
        return ""
    return f"By text: {' to '.join(ends)}."


def _best_on(task: OfTask) -> str:
    """The draft that is the fastest on a text."""
    if task.draft == "none":
        return "no draft"
    return draft_name(task.draft, task.draft_method, task.draft_budget)


def task_lines(outlook: Outlook | None) -> list[str]:
    """A line per class of text where none was named: the choice's gain, and a faster draft. Classes
    with equal lines share one."""
    if outlook is None:
        return []
    tasks: dict[str, list[str]] = {}
    for task in outlook.tasks:
        tasks.setdefault(_gains_on(task), []).append(task.task)
    none = tasks.pop(NONE_IS_FASTER, [])
    if none:  # said last
        tasks[NONE_IS_FASTER] = none
    return [f"On {', '.join(names)}: {gains}." for gains, names in tasks.items()]


def _gains_on(task: OfTask) -> str:
    """A text's gain with the chosen draft, and with its own best one where that is faster."""
    parts = []
    drafts = task.own.high > task.own.low
    if drafts:
        parts.append(with_ends(task.own))
    if task.changes >= CHANGES:
        if task.draft == "none":
            parts.append("faster without a draft")
        else:
            gain = with_ends(task.best)
            parts.append(f"{_best_on(task)}, gamma {task.gamma}, {gain}")
    return "; best ".join(parts) or NONE_IS_FASTER


def measure_line(outlook: Outlook | None) -> str:
    """The command that measures the draft's acceptance, where nobody did."""
    if outlook is None or not outlook.measure:
        return ""
    return f"To measure its acceptance: {outlook.measure}"


# Time and cost
# --------------------------------------------------------------------------------------------------


SLOW_VERIFICATION = 1.5
"""Decode steps that a verification takes, from which it is said."""
BOUND_WORTH_SAYING = 0.5
"""Share of prefill from which its bound on every draft's gain is said."""


def decoding_line(case: CaseAnswer) -> str:
    """Rate of the answer, what bounds it, and the first token."""
    best = case.best
    first_token = format_seconds(best.first_token_s)
    return (
        f"{_rate(best)}{_per_replica(best)}; bound by {best.step.bound_by}, first token after "
        f"{first_token}."
    )


def plain_line(plan: Plan, case: CaseAnswer) -> str:
    """The server without a draft, at the answer's batch and at its own best one."""
    without = _time_and_rate(case.autoregressive)
    replicas = _per_replica(case.best)
    return f"Without a draft: {without}{replicas}{_best_batch(plan, case)}."


def _per_replica(row: Candidate) -> str:
    if row.num_replicas > 1:
        return " per replica"
    return ""


def _rate(row: Candidate) -> str:
    return f"{row.rate_per_gpu * row.num_gpus:.0f} tokens/s"


def _time_and_rate(row: Candidate) -> str:
    """Time per token or per whole request, and the rate."""
    if row.requests is None:
        time = f"{format_number(row.between_tokens_s / MILLI)} ms"
    else:
        time = f"{format_seconds(row.requests.request_s)} a request"
    return f"{time}, {_rate(row)}"


def _best_batch(answer: Plan, case: CaseAnswer) -> str:
    """Another batch without a draft, where that is the better one and nothing limits it."""
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
    if request.tpot_limit_s is not None or request.ttft_limit_s is not None:
        return ""
    where = str(ceiling.batch_size)
    if ceiling.tp_size != best.tp_size:
        where += f" at tp {ceiling.tp_size}"
    rate = _rate(ceiling) if ceiling.requests else _time_and_rate(ceiling)
    return f"; best batch {where}: {rate.removesuffix(' tokens/s')}/s"


def verification_line(case: CaseAnswer) -> str:
    """How many decode steps a verification takes, where it is slow, and its slowest operation."""
    row = considered(case.choice)
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


def kernel_line(choice: Choice, *, every: bool) -> str:
    """Another attention backend that surely gains; `every` adds why."""
    other = choice.other_kernel
    if other is None:
        return ""
    gain = other.gain
    draft = ""
    if drafting_of(other.row) != drafting_of(choice.row):
        draft = f" with {drafting_of(other.row)}"
    line = f"{other.option}{draft}: {gain.speedup:.2f}x as fast ({format_interval(gain.low, gain.high)})"
    if every:
        return f"{line}; {other.reason}."
    if other.loses_graphs:
        line += "; piecewise graphs are priced"
    return f"{line}; no server was measured with both."


def _seconds_by_operation(case: CaseAnswer, name: str) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for operation in case.breakdown.get(name, []):
        seconds[operation.op] += operation.time_s
    return seconds


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
    return sentence("; ".join(parts))


# What was asked, and what to ask next
# --------------------------------------------------------------------------------------------------


USUAL_FORMAT = "bf16"
"""Format of weights that goes without saying."""


def asked_line(answer: Plan, case: CaseAnswer, *, devices: bool = True) -> str:
    """Model, devices (where no line before names them), engine, batch and context of the answer."""
    best = case.best
    replicas = best.num_replicas
    spread = f"({best.layout.label})"
    batch = f"batch {best.batch_size}"
    if replicas > 1:
        spread = f"in {replicas} replicas {spread}"
        batch += " each"
    batch += _not_fitting(answer, case)
    num_devices = best.num_gpus * replicas
    model = model_text(answer)
    where = spread
    if devices:
        where = f"on {num_devices} x {case.hardware} {spread}"
    served = f"{model} {where}, {answer.engine}"
    lengths = lengths_text(answer, case.context_len)
    scope = "Whole requests"
    if best.requests is None:
        scope = "Decoding alone"
    budget = ""
    share = best.drafting.budget_share
    if best.draft_budget is not None and share is not None:
        percent = format_number(PERCENT * share)
        budget = f", draft budget {best.draft_budget} ({percent} %)"
    return f"{scope}: {served}, {batch}, {lengths}{budget}."


def _not_fitting(plan: Plan, case: CaseAnswer) -> str:
    """The users that were asked for and do not fit at once, and how many do without a draft."""
    asked = min(plan.request.batch_sizes, default=0)
    served = case.best.batch_size
    if asked <= served or not case.best_by_batch:
        return ""
    alone = int(case.memory.largest_autoregressive_batch)
    if alone > served:
        return f" ({asked} do not fit, without a draft {alone} do)"
    return f" ({asked} do not fit)"


def model_text(answer: Plan) -> str:
    """The model, and the format of its weights where that is not the usual one."""
    weights = answer.precision.weight_dtype
    if weights == USUAL_FORMAT:
        return answer.model
    return f"{answer.model} in {weights}"


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
