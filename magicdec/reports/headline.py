"""The question and its answer in one sentence, when not to speculate, and how to reproduce it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from magicdec.naming import describe, device_name
from magicdec.plan_document import GammaTable, Plan, Traffic
from magicdec.plan_rows import verdict_of
from magicdec.records import BASELINE_MBU_FLOOR, Record
from magicdec.reports.data import ReportData, fastest, has_weak_baseline, median_pair
from magicdec.reports.sentences import first_line, traffic_line
from magicdec.reports.text import GAMMA, GAMMA_IS, percent, thousands, whole
from magicdec.units import format_number, format_seconds


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


UNKNOWN = "Not known: no draft has a measured acceptance rate"


def headline(data: ReportData) -> Headline:
    reference = data.reference
    if reference is None:
        baseline = data.rows[0]
        if baseline.tokens_per_s:
            rate = f" at {baseline.tokens_per_s:.0f} tokens/s"
        else:
            rate = ""
        answer = f"Decoded without a draft{rate}; no speculation was tried"
        return Headline(
            question=_question(baseline), answer=answer, certainty="", when_not="", facts=()
        )
    if data.plan is not None and data.plan.traffic is not None:
        return _under_arrivals(data.plan, data.plan.traffic, reference)
    measured = data.find_measured(reference)
    predicted = data.find_predicted(reference)
    was_ranked = any(
        row.is_speculative for row in data.rows
    )  # not so in a plan without acceptance rates
    return Headline(
        question=_question(reference),
        answer=_headline_answer(data, reference, measured, predicted, was_ranked=was_ranked),
        certainty=_certainty(measured, predicted) if reference.is_speculative else "",
        when_not=when_not(data, reference),
        better=_better(data, measured) if measured is not None else "",
        facts=(*_facts(reference, measured, predicted), *_plan_facts(data)),
    )


def _headline_answer(
    data: ReportData,
    reference: Record,
    measured: Record | None,
    predicted: Record | None,
    *,
    was_ranked: bool,
) -> str:
    """The plan's choice, unless its configuration was measured."""
    if data.plan is not None and measured is None:
        return first_line(data.plan).removesuffix(".")
    if not was_ranked:
        return UNKNOWN
    return _answer(reference, measured, predicted)


def _under_arrivals(plan: Plan, traffic: Traffic, reference: Record) -> Headline:
    """The devices for a rate of arrivals; the steady state of a batch that is always full is said
    next to it.
    """
    best, request = traffic.best, plan.request
    limits = {"TTFT": (best.ttft, request.ttft_p95_s), "TPOT": (best.tpot, request.tpot_p95_s)}
    facts = [
        Fact(
            label=f"{name} p95",
            value=format_seconds(found.p95),
            detail="" if limit is None else f"limit {format_seconds(limit)}",
        )
        for name, (found, limit) in limits.items()
        if found is not None
    ]
    if best.highest_rate_per_s:
        rate = f"{format_number(best.highest_rate_per_s)}/s"
        facts.append(Fact(label="Highest rate", value=rate, detail="that keeps the limits"))
    full = _answer(reference, None, reference)
    return Headline(
        question=f"How many {device_name(plan.hardware)} serve {plan.model} at {format_number(traffic.rate_per_s)} "
        "requests/s, and does a draft help?",
        answer=traffic_line(traffic),
        certainty=f"simulated, {traffic.num_requests} requests",
        facts=tuple(facts),
        when_not=f"If a batch of {reference.batch_size} were always full: {full[0].lower()}{full[1:]}.",
    )


def _question(record: Record) -> str:
    model = "the embedded model" if record.model == "embedded" else record.model
    if record.num_devices > 1:
        devices = f"{record.num_devices} × "
    else:
        devices = ""
    if record.hardware:
        where = f" on {devices}{device_name(record.hardware)}"
    else:
        where = ""
    place = f"batch {record.batch_size} and context {thousands(record.context_len)}"
    return f"Does speculative decoding pay for {model}{where}, at {place}?"


def _answer(reference: Record, measured: Record | None, predicted: Record | None) -> str:
    if not reference.is_speculative:
        return "No: no draft that was considered pays"
    draft = _draft(reference)
    if measured is not None and measured.speedup:
        best = measured
    else:
        best = predicted or reference
    speedup = best.speedup or 0.0
    if speedup <= 1:
        return f"No: {draft} is no faster than decoding without a draft ({speedup:.2f}×)"
    verdict = verdict_of(
        speedup_low=best.speedup_low or speedup, speedup_high=best.speedup_high or speedup
    )
    if best is measured or verdict == "pays":
        word = "decodes"
    else:
        word = "may decode"
    return f"{'Yes' if verdict == 'pays' else 'Unclear'}: {draft}, {word} {speedup:.2f}× as fast as without a draft"


def _certainty(measured: Record | None, predicted: Record | None) -> str:
    parts = []
    if measured is not None and measured.speedup:
        text = "measured"
        if (
            measured.speedup_low is not None
            and measured.speedup_high is not None
            and (measured.repetitions or 0) > 1
        ):
            text += f", {measured.speedup_low:.2f}–{measured.speedup_high:.2f} over {measured.repetitions} repetitions"
        if has_weak_baseline(measured):
            mbu = percent(measured.autoregressive_mbu or 0.0)
            text += f", over a baseline at {mbu} of the memory's bandwidth (less than {percent(BASELINE_MBU_FLOOR)})"
        parts.append(text)
    if predicted is not None and predicted.speedup:
        if parts:
            text = f"predicted {predicted.speedup:.2f}×"
        else:
            text = "predicted"
        if predicted.speedup_low is not None and predicted.speedup_high is not None:
            text += f", 90\u202f% interval {predicted.speedup_low:.2f}–{predicted.speedup_high:.2f}"
        parts.append(text)
    return "; ".join(parts) or "as recorded"


def _facts(reference: Record, measured: Record | None, predicted: Record | None) -> Iterable[Fact]:
    best = measured or predicted or reference
    if reference.is_speculative:
        for title, row in (("Measured", measured), ("Predicted", predicted)):
            if row is not None and row.speedup:
                yield Fact(
                    label=f"{title} speedup", value=f"{row.speedup:.2f}×", detail=_range(row)
                )
        if best.expected_tokens_per_step:
            detail = f"of at most {reference.gamma + 1}"
            yield Fact(
                label="Tokens per step", value=f"{best.expected_tokens_per_step:.2f}", detail=detail
            )
    rate, base = median_pair(best)
    if rate:
        if base and best.is_speculative:
            detail = f"instead of {whole(base)}"
        else:
            detail = ""
        yield Fact(label="Tokens per second", value=whole(rate), detail=detail)


def _better(data: ReportData, chosen: Record) -> str:
    """Another draft setting of the same batch, context and sampling that measured better than the
    chosen one.
    """

    def place(row: Record) -> tuple[object, ...]:
        return (
            row.model,
            row.device,
            row.dtype,
            row.tp_size,
            row.batch_size,
            row.context_len,
            row.temperature,
        )

    rivals = (
        r for r in data.measured if r.is_speculative and r.speedup and place(r) == place(chosen)
    )
    best = fastest(rivals) or chosen
    speedup = best.speedup or 0.0
    own = chosen.speedup or 0.0
    if best is chosen or speedup <= own or not own:
        return ""
    low = best.speedup_low or speedup
    high = chosen.speedup_high or own
    doubt = "; their repetitions overlap" if low <= high else ""
    return (
        f"{_draft(best)}, measured better: {speedup:.2f}× ({_span(best)}) instead of {own:.2f}× "
        f"({_span(chosen)}){doubt}."
    )


def _span(record: Record) -> str:
    return f"{record.speedup_low or record.speedup or 0:.2f}–{record.speedup_high or record.speedup or 0:.2f}"


def _plan_facts(data: ReportData) -> Iterable[Fact]:
    """Time and cost of requests of a known length; and another batch without a draft, where it does
    more.
    """
    if data.plan is None:
        return
    best, ceiling = data.plan.best, data.plan.best_autoregressive
    if best.requests is None:
        yield Fact(
            label="First token", value=format_seconds(best.ttft_s), detail="one request alone"
        )
    else:
        detail = f"first token after {format_seconds(best.first_token_s)}"
        if best.is_speculative:
            detail += f"; {best.gain.speedup:.2f}× as fast as without speculation"
        yield Fact(
            label="Whole request", value=format_seconds(best.requests.request_s), detail=detail
        )
        if best.cost.per_million_tokens_usd is not None:
            value = f"${best.cost.per_million_tokens_usd:.2f}"
            yield Fact(label="Per million tokens", value=value, detail="prefill included")
    gain = best.speedup_vs_best_autoregressive
    if best.is_speculative and gain is not None and ceiling is not None and gain < 1.0:
        detail = f"the tokens per second and device, without a draft at batch {ceiling.batch_size}"
        yield Fact(label="For throughput alone", value=f"{1.0 / gain:.3g}×", detail=detail)


def _range(record: Record) -> str:
    if record.speedup_low is None or record.speedup_high is None:
        return ""
    kind = "lowest to highest" if record.source == "measured" else "90\u202f% interval"
    return f"{record.speedup_low:.2f}–{record.speedup_high:.2f}, {kind}"


def _draft(record: Record) -> str:
    return describe(record, symbol=GAMMA).replace(f"{GAMMA} ", GAMMA_IS)


def when_not(data: ReportData, reference: Record) -> str:
    """Where to leave speculation off: from the plan's table, else from the rows that lost."""
    if data.plan is not None:
        length = data.plan.request.gen_len
        table = data.plan.gamma_table
        said = _when_not_planned(table, reference)
        if said and table.draft not in ("", "none"):
            said = f"Of {table.draft_name}: {said[0].lower()}{said[1:]}"
        if said and length:
            return f"{said} That is of whole requests of {thousands(length)} tokens."
        return said
    for rows, word in ((data.measured, "measured"), (data.predicted, "predicted")):
        drafted = [row for row in rows if row.is_speculative]
        paying = {(row.batch_size, row.context_len) for row in drafted if (row.speedup or 0) >= 1}
        if losses := sorted({(row.batch_size, row.context_len) for row in drafted} - paying):
            places = _listing([f"batch {b} with context {thousands(c)}" for b, c in losses[:3]])
            if len(losses) > 3:
                more = f" and {len(losses) - 3} more"
            else:
                more = ""
            return f"Leave it off at {places}{more}: every draft {word} there was slower than none."
    return ""


def _when_not_planned(grid: GammaTable, reference: Record) -> str:
    verdicts = {
        batch: {verdict for verdict, fits in zip(row, room, strict=True) if fits}
        for batch, row, room in zip(grid.batch_sizes, grid.verdict, grid.fits, strict=True)
    }
    seen = set[str]().union(*verdicts.values())
    if "pays" not in seen:
        return "It surely pays at no batch size and context that was planned."
    never = [batch for batch, cells in verdicts.items() if cells == {"does not pay"}]
    unsure = [
        batch for batch, cells in verdicts.items() if "unclear" in cells and "pays" not in cells
    ]
    parts = []
    longest = thousands(max(grid.context_lens))
    if never:
        parts.append(f"at batch {_listing(never)}, where it pays at no context up to {longest}")
    start = dict(zip(grid.batch_sizes, grid.break_even_context, strict=True)).get(
        reference.batch_size
    )
    if start and reference.batch_size not in never and start > min(grid.context_lens):
        parts.append(f"below a context of {_about(start)} at batch {reference.batch_size}")
    if unsure:
        doubt = f"At batch {_listing(unsure)} it may pay, but surely at no context up to {longest}."
    else:
        doubt = ""
    if parts:
        return f"Leave it off {'; and '.join(parts)}. {doubt}".strip()
    return (
        "It pays at every batch size and context that was planned." if seen == {"pays"} else doubt
    )


def _about(tokens: float) -> str:
    """Two significant digits, since a break-even is not known more precisely. Powers of two are
    kept.
    """
    if float(tokens).is_integer() and int(tokens) & (int(tokens) - 1) == 0:
        return thousands(tokens)
    digits = len(str(round(tokens))) - 2
    return f"about {thousands(round(tokens, -digits))}"


def _listing(values: Sequence[object]) -> str:
    words = [str(v) for v in values]
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def commands_to_reproduce(data: ReportData) -> list[str]:
    """The distinct command lines that made the records, in order, then the one that made the
    report.
    """
    commands = [r.environment.command for r in data.measured if r.environment.command]
    return list(dict.fromkeys([*commands, *([data.command] if data.command else [])]))
