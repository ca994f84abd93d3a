"""A plan's answer on a terminal: what to do, by how much and how sure, then at most a few rows;
plain when piped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from magicdec.naming import ENGINE_TITLES, draft_id, draft_name
from magicdec.plan_document import (
    CaseAnswer,
    GammaTable,
    Operation,
    Plan,
    Reach,
    Traffic,
    TrafficLoad,
)
from magicdec.plan_rows import COLUMNS as COLUMNS_OF_ROWS
from magicdec.plan_rows import Candidate, column
from magicdec.reports.sentences import (
    drafting_of,
    first_line,
    further_lines,
    left_aside,
    load_name,
    percentiles_line,
    traffic_line,
)
from magicdec.reports.text import needed_width, text_table
from magicdec.units import GIB, MILLI, format_bytes, format_number, format_seconds, format_tokens

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FEW = 5
"""Rows of a table, unless all are asked for."""
PLUGIN = "plugin"
"""Mark of a draft that no release of the engine runs."""
MARK, DRAFT = "mark", "draft"
BREAKING = ("device", "layout", DRAFT, MARK)
"""Headings of the columns that may break over lines."""


def print_plan(answer: Plan, console: Console, *, why: bool = False, every: bool = False) -> None:
    """The answer of each case; `every` adds all rows, layouts, gammas and notes, `why` the
    breakdown and the memory.
    """
    if answer.traffic is not None:
        _print_traffic(answer, answer.traffic, console, every=every)
        if not every and not why:
            return
    if len(answer.cases) > 1:
        _print_cases(console, answer)
    for case in answer.cases if every or len(answer.cases) == 1 else ():
        _print_case(console, answer, case, every=every)
    if every:
        shown = answer.rows
    else:
        shown = [*(case.best for case in answer.cases), *_few(answer, answer.cases[0])]
    if any(row.drafting.is_extrapolated for row in shown):
        console.print(
            "* acceptance extrapolated beyond the budgets, contexts or gammas measured", style="dim"
        )
    if why:
        row = answer.choice.left_out or answer.best
        drafted = f" with {drafting_of(row)}" if row.is_speculative else ""
        console.print(
            f"[bold]where a step's time goes{drafted} (the draft's row is one of its steps)[/bold]"
        )
        console.print(_breakdown_table(answer.breakdown))
        console.print(_memory_line(answer))
    if answer.needs_acceptance:
        wanted = []
        for each in answer.needs_acceptance:
            if each.draft in ("self", each.draft_method):
                name = each.draft_method
            else:
                name = each.draft
            rate = each.break_even_acceptance_rate
            wanted.append(f"{name} none" if rate is None else f"{name} {rate:.2f}")
        console.print(
            f"not ranked, acceptance unknown; faster from a rate of: {'; '.join(wanted)}",
            style="dim",
        )
    for note in answer.notes if every else answer.key_notes:
        console.print(f"note: {note}", style="dim")
    console.print(f"next: {_next(answer, every=every)}")


def _next(answer: Plan, *, every: bool) -> str:
    """The step that follows the answer."""
    more = "" if every else " (--all, --why: more)"
    if answer.best.is_speculative:
        if answer.engine in ENGINE_TITLES:
            use = f"export {answer.engine} plan.json"
        else:
            use = "run --plan plan.json"
        return f"add -o plan.json, then magicdec {use}{more}"
    if answer.needs_acceptance and not answer.candidates:
        return f"give --acceptance-rate or --acceptance FILE{more}"
    return f"magicdec explore tries other loads and devices{more}"


def _print_cases(console: Console, answer: Plan) -> None:
    """Several devices or contexts: which to buy, and one row of each."""
    if answer.offers:
        console.print(f"[bold]{to_buy(answer.offers)}[/bold]")
    loads = [row for case in answer.cases for row in (case.best_by_batch or [case.best])]
    drafted = [row for row in loads if row.is_speculative]
    sure = sum(row.verdict == "pays" for row in drafted)
    doubt = ""
    if len(drafted) > sure:
        doubt = f", in {len(drafted) - sure} more it may"
    console.print(
        f"[bold]Speculation pays at {sure} of {len(loads)} loads{doubt}[/bold]: {answer.model}, engine "
        f"{answer.engine}"
    )
    console.print(_table(loads, console.width))
    for case in answer.cases:
        if line := left_aside(case):
            console.print(line)


def to_buy(offers: Sequence[Candidate]) -> str:
    """The best of several devices, and the next, in a sentence."""
    best, following = offers[:2]
    cost = best.cost.per_million_tokens_usd
    other_cost = following.cost.per_million_tokens_usd
    if cost is None or other_cost is None:
        return (
            f"Most tokens per device: {_offered(best)}, {best.rate_per_gpu:.0f} per second "
            f"({_offered(following)}: {following.rate_per_gpu:.0f}); prices (h100=2.5,b200=5) would "
            "say which to buy."
        )
    return (
        f"Buy {_offered(best)}: ${cost:.2f} per million tokens, the least of {len(offers)} devices "
        f"({_offered(following)}: {other_cost / cost - 1.0:.0%} more)."
    )


def _offered(row: Candidate) -> str:
    draft = draft_name(row.draft, row.draft_method, row.draft_budget)
    drafting = f"with {draft}, gamma {row.gamma}" if row.is_speculative else "without a draft"
    return f"{row.num_gpus} x {row.hardware} {drafting}"


def _print_case(console: Console, answer: Plan, case: CaseAnswer, *, every: bool) -> None:
    """One device and context: the answer, what was compared, and where it changes."""
    console.print(f"[bold]{first_line(case)}[/bold]")
    for line in (*further_lines(answer, case), *_setting(answer, case)):
        console.print(line)
    if rows := _few(answer, case) if not every else _of_case(answer, case):
        console.print(_table(_with_baselines(case, rows), console.width))
    if case.best.requests is not None:
        console.print(_whole_requests(case.best))
    for line in _elsewhere(case):
        console.print(line)
    if not every:
        return
    for title, others in (
        (
            "latency against throughput: nothing beats these in both",
            [] if case.best_by_batch else case.pareto,
        ),
        ("the best of each batch", case.best_by_batch if len(case.best_by_batch) > 1 else []),
        ("layouts of a replica, each at its best", case.layouts),
    ):
        if others:
            console.print(f"[bold]{title}[/bold]")
            console.print(_table(others, console.width))
    if any(any(row) for row in case.gamma_table.gamma):
        console.print(
            f"[bold]gamma of {case.gamma_table.draft_name} by batch and context, as exported; 0: off, ?: unclear, "
            "!: slower than without it, -: no room[/bold]"
        )
        console.print(_gamma_table(case.gamma_table, console.width))


def _setting(answer: Plan, case: CaseAnswer) -> list[str]:
    """Lines on what was asked, and on decoding with and without the draft."""
    best = case.best
    alone = case.autoregressive
    ceiling = case.best_autoregressive
    replicas = best.num_replicas
    if replicas > 1:
        spread = f"in {replicas} replicas ({best.layout.label})"
    else:
        spread = f"({best.layout.label})"
    lines = [
        f"{answer.model} on {best.num_gpus * replicas} x {case.hardware} {spread}, engine {answer.engine}, batch "
        f"{best.batch_size}{' each' if replicas > 1 else ''}{'' if case.best_by_batch else ' (searched)'}, context "
        f"{case.context_len}"
    ]

    def rate(row: Candidate) -> str:
        return f"{_ms(row.between_tokens_s)} ms, {row.rate_per_gpu * row.num_gpus:.0f} tokens/s"

    per = " per replica" * (replicas > 1)
    told = rate(best).replace("ms,", "ms per token,")
    told = f"whole requests: {told}" if best.requests is not None else f"decoding only: {told}"
    first_token = format_seconds(best.first_token_s)
    lines.append(f"{told}{per}, bound by {best.step.bound_by}, first token after {first_token}")
    if best.is_speculative:
        lines.append(f"without a draft {rate(alone)}{per}")
    if ceiling is not None and (ceiling.batch_size, ceiling.tp_size) != (
        alone.batch_size,
        alone.tp_size,
    ):
        limited = answer.request.tpot_limit_s is not None or answer.request.ttft_limit_s is not None
        where = f"{' within the limits' if limited else ''} {ceiling.batch_size}"
        where += f" at tp {ceiling.tp_size}" if ceiling.tp_size != best.tp_size else ""
        lines[-1] += f"; best batch{where}: {rate(ceiling)}"
    elif ceiling is None and best.is_speculative:
        lines[-1] += "; no batch keeps the limits"
    if best.requests is None and best.cost.per_million_tokens_usd is not None:
        lines.append("$/Mtok is of decoding alone; --gen-len or --workload adds whole requests")
    return lines


def _whole_requests(best: Candidate) -> str:
    requests = best.requests
    assert requests is not None  # only whole requests are said something of
    prefill = f"prefill takes {requests.prefill_share:.0%} of the devices' time"
    hours = best.cost.gpu_hours_per_million_requests
    if hours is not None:
        prefill += f", {hours:.4g} GPU-hours per million requests"
    if not best.is_speculative:
        return prefill
    paid = best.drafting.break_even_gen_len
    back = ""
    if paid and paid > 1:
        back = f"; the draft's prefill is paid back from {paid} tokens"
    waits = best.decoding.speedup_static_batch
    static = ""
    if waits is not None:
        static = f"; with a static batch, which waits for its slowest sequence: {waits:.2f}x"
    return f"whole requests; decoding alone is {best.speedup:.2f}x as fast; {prefill}{back}{static}"


def _elsewhere(case: CaseAnswer) -> list[str]:
    """Where the answer would be another one: at other contexts, for latency alone, for throughput
    alone.
    """
    best = case.best
    lines = []
    if reaches := [each for each in case.reach if each.pays or each.possibly] or case.reach[:1]:
        lines.append(
            f"by context, at batch {best.batch_size} (90%): {'; '.join(map(_reach, reaches))}"
        )
    if not case.best_by_batch and case.pareto and case.pareto[0].batch_size != best.batch_size:
        row = case.pareto[0]
        if row.is_speculative:
            with_draft = f", {drafting_of(row)}"
        else:
            with_draft = ", no draft"
        lines.append(
            f"for latency alone: batch {row.batch_size}{with_draft}, {_ms(row.between_tokens_s)} ms per token"
        )
    ceiling = case.best_autoregressive
    if best.is_speculative and ceiling is not None and ceiling.rate_per_gpu > best.rate_per_gpu:
        lines.append(
            f"for throughput alone: batch {ceiling.batch_size} at tp {ceiling.tp_size} without a draft gives "
            f"{format_number(ceiling.rate_per_gpu / best.rate_per_gpu)} times the tokens per second and device"
        )
    return lines


def _reach(each: Reach) -> str:
    """From or up to which context a draft pays, with the contexts from or up to which it surely and
    possibly does.
    """
    name, (first, last) = draft_name(each.draft, each.draft_method), each.contexts
    if each.pays is None:
        return f"{name} pays nowhere" + (
            f", possibly up to {format_tokens(each.possibly[1])}" if each.possibly else ""
        )
    (start, end), sure, may = each.pays, each.surely, each.possibly or each.pays
    if start > first and end == last:
        if sure is None:
            surely = "surely nowhere"
        else:
            surely = f"surely from {format_tokens(sure[0])}"
        return f"{name} pays from {format_tokens(start)} ({surely}, possibly from {format_tokens(may[0])})"
    if sure is None:
        surely = "surely nowhere"
    else:
        surely = f"surely to {format_tokens(sure[1])}"
    if end == last:
        return f"{name} pays to {format_tokens(end)} and beyond ({surely})"
    if start > first:
        between = f"from {format_tokens(start)} "
    else:
        between = ""
    beyond = " and beyond" if may[1] == last else ""
    return f"{name} pays {between}to {format_tokens(end)} ({surely}, possibly to {format_tokens(may[1])}{beyond})"


def _of_case(answer: Plan, case: CaseAnswer) -> list[Candidate]:
    """The case's candidates at the best gamma of each draft, budget and batch, best first."""
    found: dict[tuple[object, ...], Candidate] = {}
    for row in answer.candidates:
        if (row.hardware, row.context_len) == (case.hardware, case.context_len):
            load = row.batch_size if case.best_by_batch else None
            found.setdefault((row.draft, row.draft_method, row.draft_budget, load), row)
    return list(found.values())


def _few(answer: Plan, case: CaseAnswer) -> list[Candidate]:
    """The best of each batch where several were asked for; else each draft at its best, then the
    next budgets.
    """
    if len(case.best_by_batch) > 1:
        return case.best_by_batch[:: -(-len(case.best_by_batch) // FEW)]
    every = _of_case(answer, case)
    firsts = {(row.draft, row.draft_method): row for row in reversed(every)}.values()
    first = [row for row in every if row in firsts][:FEW]
    fill = [row for row in every if row not in first][: FEW - len(first)]
    return [row for row in every if row in first or row in fill]


def _with_baselines(case: CaseAnswer, rows: list[Candidate]) -> list[Candidate]:
    """The rows, and of whole requests what the same takes without a draft."""
    alone, ceiling = case.autoregressive, case.best_autoregressive
    if case.best.requests is None:
        return rows
    return [*rows, *(row for row in (alone, ceiling) if row is not None and row not in rows)]


def _ms(seconds: float) -> str:
    return format_number(seconds / MILLI)


BREAKS_FIRST = 3


class Column(NamedTuple):
    head: str
    text: Callable[[Any], str]
    shown: Callable[[Sequence[Any]], bool] = lambda rows: True
    rank: int = 0
    """Where there is no room, the highest rank goes first; 0 stays. Below `BREAKS_FIRST`, names
    break before that.
    """


def _differs(name: str) -> Callable[[Sequence[Any]], bool]:
    return lambda rows: len({_value(row, name) for row in rows}) > 1


def _any(name: str) -> Callable[[Sequence[Any]], bool]:
    return lambda rows: any(_value(row, name) for row in rows)


def _value(row: Any, name: str) -> Any:
    """A candidate's column or property, or a field of another row."""
    if isinstance(row, Candidate) and name in COLUMNS_OF_ROWS:
        return column(row, name)
    return getattr(row, name)


def _speedup(row: Candidate) -> str:
    gain = row.gain
    if row.is_speculative:
        return f"{gain.speedup:.2f} {gain.low:.2f}-{gain.high:.2f}"
    return "1.00"


def _verdict(row: Candidate) -> str:
    """Whether it pays, from its interval, or why it cannot be run so."""
    if not row.fits:
        return "no room"
    if row.is_speculative:
        return row.verdict
    return "-"


def _with_budget(row: Candidate) -> str:
    """The draft and its budget; a star marks acceptance outside the range that it was measured in."""
    return (
        draft_id(row.draft, row.draft_method, row.draft_budget) + "*" * row.drafting.is_extrapolated
    )


COLUMNS = (
    Column("device", lambda row: row.hardware, _differs("hardware")),
    Column("context", lambda row: format_tokens(row.context_len), _differs("context_len")),
    Column("layout", lambda row: row.layout.label, _differs("layout")),
    Column("batch", lambda row: str(row.batch_size), _differs("batch_size")),
    Column(DRAFT, _with_budget),
    Column("gamma", lambda row: str(row.gamma)),
    Column("draft ms", lambda row: _ms(row.step.draft_s), rank=6),
    Column("verify ms", lambda row: _ms(row.step.verify_s), rank=6),
    Column("tokens", lambda row: f"{row.drafting.tokens_per_step:.2f}", rank=3),
    Column("1st tok", lambda row: format_seconds(row.first_token_s), _any("request_s"), 3),
    Column("ms/tok", lambda row: _ms(row.between_tokens_s), rank=1),
    Column(
        "request", lambda row: format_seconds(column(row, "request_s") or 0.0), _any("request_s"), 2
    ),
    Column("tok/s/GPU", lambda row: format_number(row.rate_per_gpu), _differs("batch_size"), 3),
    Column(
        "GPU-h/Mreq",
        lambda row: format_number(row.cost.gpu_hours_per_million_requests or 0),
        _any("request_s"),
        7,
    ),
    Column(
        "$/Mtok",
        lambda row: f"{row.cost.per_million_tokens_usd or 0:.2f}",
        _any("cost_per_million_tokens_usd"),
    ),
    Column("speedup (90%)", _speedup),
    Column("x best batch", lambda row: f"{row.speedup_vs_best_autoregressive or 0:.2f}", rank=5),
    Column("GiB/GPU", lambda row: f"{row.memory.bytes_per_gpu / GIB:.1f}", rank=4),
    Column("bound by", lambda row: row.step.bound_by, rank=6),
    Column("verdict", _verdict),
    Column(MARK, lambda row: ", ".join(row.drafting.marks), _any("marks")),
)
"""Every column of every table of candidates: shown where it tells rows apart, and there is room."""


def _table(rows: Sequence[Any], width: int, columns: Sequence[Column] = COLUMNS) -> Table:
    """Names and marks break over lines between words, so nothing is cut off; numbers do not."""
    shown = [each for each in columns if each.shown(rows)]

    def cells() -> tuple[list[str], list[list[str]]]:
        return [each.head for each in shown], [[each.text(row) for each in shown] for row in rows]

    for rank in sorted({each.rank for each in shown} - {0}, reverse=True):
        if needed_width(*cells(), wraps=BREAKING if rank < BREAKS_FIRST else ()) > width:
            shown = [each for each in shown if each.rank != rank]
    return text_table(*cells(), wraps=BREAKING)


def _gamma_table(table: GammaTable, width: int) -> Table:
    """The best gamma by batch and context, with the speedup where there is room for it, and the
    context from which on it is above 1; the table's first context is only a bound."""
    contexts = table.context_lens
    wide = 6 + 10 * len(contexts) + 13 <= width

    def cell(row: int, column: int) -> str:
        if not table.fits[row][column]:
            return "-"
        gamma = table.gamma_of_steps[row][column]
        pays = table.gamma[row][column] > 0
        if table.verdict[row][column] == "unclear":
            mark = "?"
        elif gamma and not pays:
            mark = "!"
        else:
            mark = ""
        if wide and pays:
            return f"{gamma}{mark} ({table.speedup[row][column]:.2f})"
        return f"{gamma}{mark}"

    rows = [
        [
            str(batch),
            *(cell(row, column) for column in range(len(contexts))),
            "-"
            if (start := table.break_even_context[row]) is None
            else f"<= {format_tokens(contexts[0])}"
            if start <= contexts[0]
            else format_tokens(start),
        ]
        for row, batch in enumerate(table.batch_sizes)
    ]
    return text_table(["batch", *map(format_tokens, contexts), "faster from"], rows, wraps=())


def _breakdown_table(breakdown: dict[str, list[Operation]]) -> Table:
    rows = [
        (name, op.op, _ms(op.time_s), _ms(op.ceiling_s), op.bound_by)
        for name, operations in breakdown.items()
        for op in sorted(operations, key=lambda each: -each.time_s)
    ]
    return text_table(("pass", "operation", "ms", "ceiling ms", "bound by"), rows, wraps=())


def _memory_line(answer: Plan) -> str:
    memory = answer.memory
    parts = {
        "weights": memory.weights_bytes,
        "KV": memory.kv_bytes,
        "draft weights": memory.draft_weights_bytes,
        "draft KV": memory.draft_kv_bytes,
        "workspace": memory.workspace_bytes,
        "of": memory.capacity_bytes,
    }
    return (
        f"memory per device: {', '.join(f'{label} {format_bytes(size)}' for label, size in parts.items())}; largest "
        f"batch {memory.largest_batch:.0f} (autoregressive {memory.largest_autoregressive_batch:.0f})"
    )


# Under arrivals
# ------------------------------------------------------------------------------------------------------


def _print_traffic(answer: Plan, traffic: Traffic, console: Console, *, every: bool) -> None:
    """The devices, the percentiles of the layouts compared, and what to note; `every` adds all
    rates.
    """
    console.print(f"[bold]{traffic_line(traffic)}[/bold]")
    limits = (
        ("p95 of TTFT", answer.request.ttft_p95_s),
        ("p95 of TPOT", answer.request.tpot_p95_s),
        ("mean TTFT", answer.request.ttft_limit_s),
        ("mean TPOT", answer.request.tpot_limit_s),
    )
    told = [f"{name} {format_seconds(limit)}" for name, limit in limits if limit is not None]
    rate = format_number(traffic.rate_per_s)
    console.print(
        f"{answer.model} on {answer.hardware}, engine {answer.engine}: {rate} requests/s, limits "
        f"{' and '.join(told) or 'none'}; {traffic.num_requests} requests simulated"
    )
    console.print(percentiles_line(traffic.best))
    compared = [each for each in (traffic.autoregressive, traffic.speculative) if each is not None]
    at_rate = [each for each in traffic.curves if each.rate_per_s == traffic.rate_per_s]
    for title, loads in (
        (f"at {rate}/s, the fewest devices of each", compared),
        (f"the policies on {traffic.best.num_gpus} devices", at_rate),
        ("over rates", traffic.curves if every else []),
    ):
        if loads:
            console.print(f"[bold]{title}[/bold] (p50/p95/p99)")
            console.print(_table(loads, console.width, TRAFFIC_COLUMNS))
    for load in compared:
        if load.highest_rate_per_s is None:
            continue
        highest = format_number(load.highest_rate_per_s)
        console.print(
            f"{load.num_gpus} devices with {load_name(load)} keep the limits up to {highest} requests/s"
        )
    for note in traffic.notes:
        console.print(f"note: {note}", style="dim")


def _percentiles(what: str, unit: float) -> Callable[[TrafficLoad], str]:
    def read(load: TrafficLoad) -> str:
        if (found := getattr(load, what)) is None:
            return "overload"
        return "/".join(format_number(value / unit) for value in (found.p50, found.p95, found.p99))

    return read


TRAFFIC_COLUMNS = (
    Column("requests/s", lambda load: format_number(load.rate_per_s), _differs("rate_per_s")),
    Column(DRAFT, load_name),
    Column("devices", lambda load: str(load.num_gpus)),
    Column("TTFT ms", _percentiles("ttft", MILLI)),
    Column("TPOT ms", _percentiles("tpot", MILLI)),
    Column("request s", _percentiles("request", 1.0)),
    Column("kept/s", lambda load: format_number(load.goodput_per_s)),
    Column("waiting", lambda load: format_number(load.mean_waiting), _differs("rate_per_s")),
    Column("preempted", lambda load: str(load.preemptions), _differs("rate_per_s")),
)
"""Percentiles are p50/p95/p99; a table of one rate fits 80 characters."""
