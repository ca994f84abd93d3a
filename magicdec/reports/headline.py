"""The question and its answer in one sentence, when not to speculate, and how to reproduce it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from magicdec.naming import describe, device_name
from magicdec.reports.arrivals import (
    arrivals_line,
    asked_of_traffic,
    sure_devices_line,
    traffic_line,
)
from magicdec.reports.data import ReportData, fastest, has_weak_baseline, median_pair
from magicdec.reports.sentences import (
    acceptance_line,
    asked_line,
    first_line,
    limits_text,
)
from magicdec.reports.several import loads_lines, to_buy
from magicdec.reports.story import ON_A_PAGE, of_kinds, story_of
from magicdec.reports.text import GAMMA, GAMMA_IS, percent, thousands, whole
from magicdec.schema.plan import GammaTable, Percentiles, Plan, Traffic
from magicdec.schema.record import BASELINE_MBU_FLOOR, Record
from magicdec.schema.request import given, plan_command
from magicdec.schema.row import Gain
from magicdec.units import INTERVAL, format_interval, format_number, format_seconds


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One number of the header: what it is, its value, and how sure it is."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Headline:
    question: str
    answer: str
    certainty: str
    when_not: str
    better: str = ""
    """A sentence about a configuration that measured faster than the answer, at its batch and
    context.
    """
    facts: tuple[Fact, ...]
    setting: str = ""
    """The plan's devices, engine, lengths and limits, as asked for."""
    cases: tuple[str, ...] = ()
    """The answer of each of several devices and contexts."""
    further: tuple[str, ...] = ()
    """Further sentences of the plan on its choice, most important first."""


UNKNOWN_ANSWER = "Not known: no draft has a measured acceptance rate"


def headline_of(data: ReportData) -> Headline:
    reference = data.reference
    if reference is None:
        baseline = data.rows[0]
        rate = ""
        if baseline.tokens_per_s:
            rate = f" at {baseline.tokens_per_s:.0f} tokens/s"
        return Headline(
            question=_question(baseline),
            answer=f"Decoded without a draft{rate}; no speculation was tried",
            certainty="",
            when_not="",
            facts=(),
        )
    if data.plan is not None and data.plan.traffic is not None:
        return _under_arrivals(data.plan, data.plan.traffic, reference)
    measured = data.find_measured(reference)
    predicted = data.find_predicted(reference)
    certainty = ""
    if reference.is_speculative:
        certainty = _certainty(measured, predicted)
    is_planned = data.plan is not None and data.plan.best.requests is not None
    if data.plan is not None and measured is None and certainty:
        # the answer's own
        certainty = ""
        if is_planned and predicted is not None and predicted.speedup:
            of_decoding = _certainty(None, predicted).removeprefix("predicted")
            certainty = f"decoding alone: {predicted.speedup:.2f}×{of_decoding}"
    better = ""
    if measured is not None:
        better = _better(data, measured)
    of = ""
    if is_planned:
        of = " of decoding"
    setting = ""
    cases = []
    further = []
    if data.plan is not None:
        first = ""
        if len(data.plan.cases) > 1:
            first = "The figures are of the first: "
            for case in data.plan.cases:
                context = thousands(case.context_len)
                cases.append(f"Context {context}: {first_line(case)}")
        asked = asked_line(data.plan, data.plan).removesuffix(".")
        setting = f"{first}{asked}; {limits_text(data.plan.request)}"
        for line in of_kinds(story_of(data.plan, data.plan), ON_A_PAGE):
            further.append(_capital(line))
    return Headline(
        question=_question(reference, data.plan),
        answer=_headline_answer(data, reference, measured, predicted),
        certainty=certainty,
        when_not=when_not(data, reference),
        better=better,
        facts=(*_facts(reference, measured, predicted, of=of), *_plan_facts(data)),
        setting=setting,
        cases=tuple(cases),
        further=tuple(further),
    )


def _headline_answer(
    data: ReportData,
    reference: Record,
    measured: Record | None,
    predicted: Record | None,
) -> str:
    """The plan's choice, unless its configuration was measured."""
    plan = data.plan
    if plan is not None and measured is None:
        # the line that the answer begins with on a terminal, too
        if len(plan.cases) == 1:
            line = first_line(plan)
        elif plan.offers:
            line = to_buy(plan.offers, num_asked=len(plan.request.hardware))
        else:
            line = loads_lines(plan)[0]
        return line.removesuffix(".")
    # a plan without acceptance rates
    if not any(row.is_speculative for row in data.rows):
        return UNKNOWN_ANSWER
    return _answer(reference, measured, predicted)


def _under_arrivals(plan: Plan, traffic: Traffic, reference: Record) -> Headline:
    """Number of devices for a rate of arrivals, next to the steady state of a batch that is always
    full.
    """
    best = traffic.best
    facts = [
        *_latency_fact("TTFT", best.ttft, plan.request.ttft_p95_s),
        *_latency_fact("TPOT", best.tpot, plan.request.tpot_p95_s),
    ]
    if best.highest_rate_per_s:
        highest = f"{format_number(best.highest_rate_per_s)}/s"
        bound = "that keeps the limits"
        if plan.request.ttft_p95_s is None and plan.request.tpot_p95_s is None:
            bound = "before requests queue up"
        facts.append(Fact(label="Highest rate", value=highest, detail=bound))
    device = device_name(plan.hardware)
    rate = format_number(traffic.rate_per_s)
    _, _, full = _answer(reference, None, reference).partition(": ")
    lines = (
        sure_devices_line(traffic),
        arrivals_line(best),
        acceptance_line(plan.choice),
    )
    return Headline(
        question=f"How many {device} serve {plan.model} at {rate} requests/s, and does a draft "
        "help?",
        answer=traffic_line(traffic),
        certainty=f"simulated, {traffic.num_requests} requests",
        facts=tuple(facts),
        when_not=f"If a batch of {reference.batch_size} were always full, {full}.",
        setting=asked_of_traffic(plan, traffic),
        further=tuple(_capital(line) for line in lines if line),
    )


def _capital(line: str) -> str:
    """The line with a capital, but for an option, a number or a name that begins it."""
    first, _, _ = line.partition(" ")
    if first.isalpha():
        return line[0].upper() + line[1:]
    return line


def _latency_fact(
    name: str, latency: Percentiles | None, limit: float | None
) -> list[Fact]:
    """The 95th percentile of a latency and its limit; nothing if the queue grows without bound."""
    if latency is None:
        return []
    detail = ""
    if limit is not None:
        detail = f"limit {format_seconds(limit)}"
    return [
        Fact(
            label=f"{name} p95",
            value=format_seconds(latency.p95),
            detail=detail,
        )
    ]


def _question(record: Record, plan: Plan | None = None) -> str:
    model = record.model
    if model == "embedded":
        model = "the embedded model"
    where = ""
    if record.hardware:
        device = device_name(record.hardware)
        if record.num_devices > 1:
            device = f"{record.num_devices} × {device}"
        where = f" on {device}"
    contexts = [record.context_len]
    if plan is not None and len(plan.cases) > 1:
        contexts = list(dict.fromkeys(case.context_len for case in plan.cases))
        devices = dict.fromkeys(device_name(case.hardware) for case in plan.cases)
        if len(devices) > 1:
            where = f" on {_listing([*devices])}"
    noun = "contexts"
    if len(contexts) == 1:
        noun = "context"
    texts = _listing([thousands(context) for context in contexts])
    load = f"batch {record.batch_size} and {noun} {texts}"
    return f"Does speculative decoding pay for {model}{where}, at {load}?"


def _answer(
    reference: Record, measured: Record | None, predicted: Record | None
) -> str:
    if not reference.is_speculative:
        return "No: no draft that was considered pays"
    draft = _draft(reference)
    best = predicted or reference
    if measured is not None and measured.speedup:
        best = measured
    speedup = best.speedup or 0.0
    if speedup <= 1:
        return (
            f"No: {draft} is no faster than decoding without a draft ({speedup:.2f}×)"
        )
    low, high = _ends(best)
    if Gain(speedup=speedup, low=low, high=high).verdict == "pays":
        return f"Yes: {draft}, decodes {speedup:.2f}× as fast as without a draft"
    word = "may decode"
    if best is measured:
        word = "decodes"
    return f"Unclear: {draft}, {word} {speedup:.2f}× as fast as without a draft"


def _certainty(measured: Record | None, predicted: Record | None) -> str:
    parts = []
    if measured is not None and measured.speedup:
        parts.append(_measured_certainty(measured))
    if predicted is not None and predicted.speedup:
        text = "predicted"
        if parts:
            text += f" {predicted.speedup:.2f}×"
        low = predicted.speedup_low
        high = predicted.speedup_high
        if low is not None and high is not None:
            text += f", {format_interval(low, high)}".replace(" %", "\u202f%")
        parts.append(text)
    return "; ".join(parts) or "as recorded"


def _measured_certainty(measured: Record) -> str:
    text = "measured"
    low = measured.speedup_low
    high = measured.speedup_high
    repetitions = measured.repetitions or 0
    if repetitions > 1 and low is not None and high is not None:
        text += f", {low:.2f}–{high:.2f} over {repetitions} repetitions"
    if has_weak_baseline(measured):
        mbu = percent(measured.autoregressive_mbu or 0.0)
        floor = percent(BASELINE_MBU_FLOOR)
        text += (
            f", over a baseline at {mbu} of the memory's bandwidth (less than {floor})"
        )
    return text


def _facts(
    reference: Record,
    measured: Record | None,
    predicted: Record | None,
    *,
    of: str = "",
) -> Iterable[Fact]:
    """`of` names the quantity of the speedups where it is not the answer's."""
    best = measured or predicted or reference
    if reference.is_speculative:
        for title, row, kind in (
            ("Measured", measured, "lowest to highest"),
            ("Predicted", predicted, INTERVAL.replace(" %", "\u202f%")),
        ):
            if row is None or not row.speedup:
                continue
            detail = ""
            if row.speedup_low is not None and row.speedup_high is not None:
                detail = f"{row.speedup_low:.2f}–{row.speedup_high:.2f}, {kind}"
            speedup = f"{row.speedup:.2f}×"
            yield Fact(label=f"{title} speedup{of}", value=speedup, detail=detail)
        if best.expected_tokens_per_step:
            tokens = f"{best.expected_tokens_per_step:.2f}"
            detail = f"of at most {reference.gamma + 1}"
            yield Fact(label="Tokens per step", value=tokens, detail=detail)
    rate, base = median_pair(best)
    if rate:
        detail = ""
        if base and best.is_speculative:
            detail = f"instead of {whole(base)}"
        yield Fact(label="Tokens per second", value=whole(rate), detail=detail)


def _better(data: ReportData, chosen: Record) -> str:
    """Another draft setting of the same batch, context and sampling that measured better than the
    chosen one.
    """
    best = fastest(_rivals(data.measured, chosen)) or chosen
    speedup = best.speedup or 0.0
    own = chosen.speedup or 0.0
    if best is chosen or speedup <= own or not own:
        return ""
    low, high = _ends(best)
    own_low, own_high = _ends(chosen)
    doubt = ""
    if low <= own_high:
        doubt = "; their repetitions overlap"
    return (
        f"{_draft(best)}, measured better: {speedup:.2f}× ({low:.2f}–{high:.2f}) instead of "
        f"{own:.2f}× ({own_low:.2f}–{own_high:.2f}){doubt}."
    )


def _rivals(rows: Iterable[Record], chosen: Record) -> list[Record]:
    """The speculative rows of the chosen one's model, device, load and sampling."""

    def setting(row: Record) -> tuple[object, ...]:
        return (
            row.model,
            row.device,
            row.dtype,
            row.tp_size,
            row.batch_size,
            row.context_len,
            row.temperature,
        )

    wanted = setting(chosen)
    rivals = []
    for row in rows:
        if not row.is_speculative or not row.speedup:
            continue
        if setting(row) == wanted:
            rivals.append(row)
    return rivals


def _ends(record: Record) -> tuple[float, float]:
    """The speedup's interval, or the speedup twice."""
    speedup = record.speedup or 0.0
    return record.speedup_low or speedup, record.speedup_high or speedup


def _plan_facts(data: ReportData) -> Iterable[Fact]:
    """Time and cost of requests of a known length; and another batch without a draft, where it does
    more.
    """
    if data.plan is None:
        return
    best = data.plan.best
    if best.requests is None:
        first_token = format_seconds(best.ttft_s)
        yield Fact(label="First token", value=first_token, detail="one request alone")
    else:
        detail = f"first token after {format_seconds(best.first_token_s)}"
        if best.is_speculative:
            detail += f"; {best.gain.speedup:.2f}× as fast as without speculation"
        seconds = format_seconds(best.requests.request_s)
        yield Fact(label="Whole request", value=seconds, detail=detail)
        if best.cost.per_million_tokens_usd is not None:
            cost = f"${best.cost.per_million_tokens_usd:.2f}"
            yield Fact(
                label="Per million tokens", value=cost, detail="prefill included"
            )
    ceiling = data.plan.best_autoregressive
    ratio = best.speedup_vs_best_autoregressive
    if not best.is_speculative or ceiling is None or ratio is None:
        return
    if ratio < 1.0:
        detail = f"the tokens per second and device, without a draft at batch {ceiling.batch_size}"
        yield Fact(
            label="For throughput alone",
            value=f"{1.0 / ratio:.3g}×",
            detail=detail,
        )


def _draft(record: Record) -> str:
    description = describe(record, symbol=GAMMA)
    return description.replace(f"{GAMMA} ", GAMMA_IS)


def when_not(data: ReportData, reference: Record) -> str:
    """Where to leave speculation off: from the plan's table, else from the rows that lost."""
    if data.plan is not None:
        return _when_not_planned(data.plan, reference)
    measured_losses = _losses(data.measured, "measured")
    if measured_losses:
        return measured_losses
    return _losses(data.predicted, "predicted")


def _losses(rows: Iterable[Record], word: str) -> str:
    """The loads at which every draft lost, up to three of them by name."""
    loads = set()
    paying = set()
    for row in rows:
        if not row.is_speculative:
            continue
        load = (row.batch_size, row.context_len)
        loads.add(load)
        if (row.speedup or 0) >= 1:
            paying.add(load)
    losses = sorted(loads - paying)
    if not losses:
        return ""
    places = []
    for batch, context in losses[:3]:
        places.append(f"batch {batch} with context {thousands(context)}")
    named = _listing(places)
    left_out = len(losses) - len(places)
    if left_out:
        named += f" and {left_out} more"
    return f"Leave it off at {named}: every draft {word} there was slower than none."


def _when_not_planned(plan: Plan, reference: Record) -> str:
    """A sentence about the draft of the plan's table, by decoding or by whole requests."""
    table = plan.gamma_table
    sentence = _when_not_by_table(table, reference)
    if not sentence:
        return ""
    if table.draft not in ("", "none"):
        continued = sentence[0].lower() + sentence[1:]
        sentence = f"With {table.draft_name}: {continued}"
    length = plan.request.gen_len
    if length:
        sentence += (
            f" This counts whole requests, with {thousands(length)} output tokens."
        )
    return sentence


def _when_not_by_table(table: GammaTable, reference: Record) -> str:
    # of each batch, over the contexts with room for the cache
    verdicts: dict[int, set[str]] = {}
    for row, batch in enumerate(table.batch_sizes):
        verdicts[batch] = set()
        for verdict, has_room in zip(table.verdict[row], table.fits[row], strict=True):
            if has_room:
                verdicts[batch].add(verdict)
    all_verdicts: set[str] = set()
    for of_batch in verdicts.values():
        all_verdicts |= of_batch
    if "pays" not in all_verdicts:
        return "It is not sure to pay at any batch size and context that was planned."
    never = [
        batch for batch, of_batch in verdicts.items() if of_batch == {"does not pay"}
    ]
    unsure = []
    for batch, of_batch in verdicts.items():
        if "unclear" in of_batch and "pays" not in of_batch:
            unsure.append(batch)
    longest = thousands(max(table.context_lens))
    sentences = []
    where = _where_to_leave_it_off(table, reference.batch_size, never)
    if where:
        sentences.append(f"Leave it off {where}.")
    elif all_verdicts == {"pays"}:
        return "It pays at every batch size and context that was planned."
    if unsure:
        batches = _listing(unsure)
        sentences.append(
            f"At batch {batches} it may pay, but no context up to {longest} is sure to."
        )
    return " ".join(sentences)


def _where_to_leave_it_off(table: GammaTable, batch: int, never: Sequence[int]) -> str:
    """Batches at which the draft pays nowhere, and shorter contexts at the answer's batch."""
    longest = thousands(max(table.context_lens))
    parts = []
    if never:
        parts.append(
            f"at batch {_listing(never)}, where it pays at no context up to {longest}"
        )
    start = None
    if batch in table.batch_sizes and batch not in never:
        start = table.break_even_context[table.batch_sizes.index(batch)]
    # a draft that pays from the shortest context on is nowhere to be left off
    if start is not None and start > min(table.context_lens):
        parts.append(f"below a context of {_about(start)} at batch {batch}")
    return "; and ".join(parts)


def _about(tokens: float) -> str:
    """Two significant digits, since a break-even is not known more precisely. Powers of two are
    kept.
    """
    whole_tokens = round(tokens)
    is_power_of_two = whole_tokens & (whole_tokens - 1) == 0
    if whole_tokens == tokens and is_power_of_two:
        return thousands(tokens)
    digits = len(str(whole_tokens)) - 2
    rounded = round(tokens, -digits)
    return f"about {thousands(rounded)}"


def _listing(values: Sequence[object]) -> str:
    *words, last = map(str, values)
    if not words:
        return last
    first_words = ", ".join(words)
    return f"{first_words} and {last}"


def commands_to_reproduce(data: ReportData) -> list[str]:
    """The distinct command lines that made the records, in order, then those that make the plan
    and the report.
    """
    commands = [row.environment.command for row in data.measured]
    if data.plan is not None and data.command:
        request = data.plan.request
        named = {
            "model": request.model,
            "hardware": request.hardware,
            "batch": request.batch_sizes,
        }
        commands.append(plan_command(named | given(request)))
    commands.append(data.command)
    return list(dict.fromkeys(command for command in commands if command))
