"""A plan's answer on a terminal: what to do, by how much and how sure, then at most a few rows; plain when piped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from magicdec.naming import ENGINE_TITLES, draft_id, draft_name
from magicdec.plan_document import Candidate, Case, GammaTable, Operation, Plan, Reach, Traffic, TrafficLoad
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
    """The answer of each case; `every` adds all rows, layouts, gammas and notes, `why` the breakdown and the memory."""
    if answer.traffic is not None:
        _print_traffic(answer, answer.traffic, console, every=every)
        if not every and not why:
            return
    if len(answer.cases) > 1:
        _print_cases(console, answer)
    for case in answer.cases if every or len(answer.cases) == 1 else ():
        _print_case(console, answer, case, every=every)
    shown = answer.rows if every else [*(case.best for case in answer.cases), *_few(answer, answer.cases[0])]
    if any(row.acceptance_extrapolated for row in shown):
        console.print("* acceptance extrapolated beyond the budgets, contexts or gammas measured", style="dim")
    if why:
        console.print("[bold]where a step's time goes (the draft's row is one of its steps)[/bold]")
        console.print(_breakdown_table(answer.breakdown, answer.best.gamma))
        console.print(_memory_line(answer))
    if answer.needs_acceptance:
        wanted = []
        for each in answer.needs_acceptance:
            name = each.draft_method if each.draft in ("self", each.draft_method) else each.draft
            rate = each.break_even_acceptance_rate
            wanted.append(f"{name} none" if rate is None else f"{name} {rate:.2f}")
        console.print(f"not ranked, acceptance unknown; faster from a rate of: {'; '.join(wanted)}", style="dim")
    for note in answer.notes if every else answer.key_notes:
        console.print(f"note: {note}", style="dim")
    console.print(f"next: {_next(answer, every=every)}")


def _next(answer: Plan, *, every: bool) -> str:
    """The step that follows the answer."""
    more = "" if every else " (--all, --why: more)"
    if answer.best.is_speculative:
        use = f"export {answer.engine} plan.json" if answer.engine in ENGINE_TITLES else "run --plan plan.json"
        return f"add -o plan.json, then magicdec {use}{more}"
    if answer.needs_acceptance and not answer.candidates:
        return f"give --acceptance-rate or --acceptance FILE{more}"
    return f"magicdec explore tries other loads and devices{more}"


def _print_cases(console: Console, answer: Plan) -> None:
    """Several devices or contexts: one row of each."""
    paying = [case.best for case in answer.cases if case.best.is_speculative]
    sure = sum(best.verdict == "pays" for best in paying)
    doubt = f", in {len(paying) - sure} more it may" if len(paying) > sure else ""
    console.print(
        f"[bold]Speculation pays in {sure} of {len(answer.cases)} cases{doubt}[/bold]: {answer.model}, engine "
        f"{answer.engine}"
    )
    loads = [row for case in answer.cases for row in (case.best_by_batch or [case.best])]
    console.print(_table(loads, console.width))


def _print_case(console: Console, answer: Plan, case: Case, *, every: bool) -> None:
    """One device and context: the answer, what was compared, and where it changes."""
    console.print(f"[bold]{_answer(answer, case)}[/bold]")
    for line in _setting(answer, case):
        console.print(line)
    if rows := _few(answer, case) if not every else _of_case(answer, case):
        console.print(_table(_with_baselines(case, rows), console.width))
    if case.best.request_s is not None:
        console.print(_whole_requests(case.best))
    for line in (*_stock(answer, case), *_elsewhere(case)):
        console.print(line)
    if not every:
        return
    for title, others in (
        ("latency against throughput: nothing beats these in both", [] if case.best_by_batch else case.pareto),
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


def _answer(answer: Plan, case: Case) -> str:
    """One line: the action, its gain and interval."""
    best = case.best
    if best.is_speculative:
        value, low, high = best.gain
        gain = f"{_draft(best)}: {value:.2f}x (90%: {low:.2f} to {high:.2f})."
        return f"Speculate with {gain}" if best.verdict == "pays" else f"Unclear, measure first: {gain}"
    rivals = [row for row in _of_case(answer, case) if row.batch_size == best.batch_size]
    if not rivals and answer.needs_acceptance:
        return "Do not speculate yet: no draft has a known acceptance here."
    if not rivals:
        return "Decode without a draft, as asked."
    row = max(rivals, key=lambda each: each.request_speedup or each.speedup)
    value, low, high = row.gain
    return f"Do not speculate: at best {_draft(row)}: {value:.2f}x (90%: {low:.2f} to {high:.2f})."


def _setting(answer: Plan, case: Case) -> list[str]:
    """Lines on what was asked, and on decoding with and without the draft."""
    best, alone, ceiling = case.best, case.autoregressive, case.best_autoregressive
    replicas = best.num_replicas
    spread = f"in {replicas} replicas ({best.layout})" if replicas > 1 else f"({best.layout})"
    lines = [
        f"{answer.model} on {best.num_gpus * replicas} x {case.hardware} {spread}, engine {answer.engine}, batch "
        f"{best.batch_size}{' each' if replicas > 1 else ''}{'' if case.best_by_batch else ' (searched)'}, context "
        f"{case.context_len}"
    ]

    def rate(row: Candidate) -> str:
        return f"{_ms(row.between_tokens_s)} ms, {row.rate_per_gpu * row.num_gpus:.0f} tokens/s"

    per, told = " per replica" * (replicas > 1), rate(best).replace("ms,", "ms per token,")
    lines.append(
        f"{'whole requests: ' * (best.request_s is not None)}{told}{per}, bound by {best.bound_by}, first token after "
        f"{format_seconds(best.first_token_s)}"
    )
    if best.is_speculative:
        lines.append(f"without a draft {rate(alone)}{per}")
    if ceiling is not None and (ceiling.batch_size, ceiling.tp_size) != (alone.batch_size, alone.tp_size):
        limited = answer.request.tpot_limit_s is not None or answer.request.ttft_limit_s is not None
        where = f"{' within the limits' if limited else ''} {ceiling.batch_size}"
        where += f" at tp {ceiling.tp_size}" if ceiling.tp_size != best.tp_size else ""
        lines[-1] += f"; best batch{where}: {rate(ceiling)}"
    elif ceiling is None and best.is_speculative:
        lines[-1] += "; no batch keeps the limits"
    if best.request_s is None and best.cost_per_million_tokens_usd is not None:
        lines.append("$/Mtok is of decoding alone; --gen-len or --workload adds whole requests")
    return lines


def _whole_requests(best: Candidate) -> str:
    prefill = f"prefill takes {best.prefill_share:.0%} of the devices' time"
    if best.gpu_hours_per_million_requests is not None:
        prefill += f", {best.gpu_hours_per_million_requests:.4g} GPU-hours per million requests"
    if not best.is_speculative:
        return prefill
    paid = best.break_even_gen_len
    back = f"; the draft's prefill is paid back from {paid} tokens" if paid and paid > 1 else ""
    waits = best.speedup_static_batch
    static = "" if waits is None else f"; with a static batch, which waits for its slowest sequence: {waits:.2f}x"
    return f"whole requests; decoding alone is {best.speedup:.2f}x as fast; {prefill}{back}{static}"


def _stock(answer: Plan, case: Case) -> list[str]:
    """The best of the drafts that the engine runs as released, where the answer needs more than that."""
    if PLUGIN not in case.best.marks:
        return []
    title = ENGINE_TITLES.get(answer.engine, answer.engine)
    rows = [row for row in _of_case(answer, case) if PLUGIN not in row.marks]
    if not rows:
        return [f"with {title} as released: no draft of known acceptance"]
    row = max(rows, key=lambda each: (each.fits, each.rate))
    value, low, high = row.gain
    batch = f", batch {row.batch_size}" if row.batch_size != case.best.batch_size else ""
    return [f"with {title} as released: {_draft(row)}{batch}: {value:.2f}x ({low:.2f} to {high:.2f}), {row.verdict}"]


def _elsewhere(case: Case) -> list[str]:
    """Where the answer would be another one: at other contexts, for latency alone, for throughput alone."""
    best, lines = case.best, []
    if reaches := [each for each in case.reach if each.pays or each.possibly] or case.reach[:1]:
        lines.append(f"by context, at batch {best.batch_size} (90%): {'; '.join(map(_reach, reaches))}")
    if not case.best_by_batch and case.pareto and case.pareto[0].batch_size != best.batch_size:
        row = case.pareto[0]
        with_draft = f", {_draft(row)}" if row.is_speculative else ", no draft"
        lines.append(f"for latency alone: batch {row.batch_size}{with_draft}, {_ms(row.between_tokens_s)} ms per token")
    ceiling = case.best_autoregressive
    if best.is_speculative and ceiling is not None and ceiling.rate_per_gpu > best.rate_per_gpu:
        lines.append(
            f"for throughput alone: batch {ceiling.batch_size} at tp {ceiling.tp_size} without a draft gives "
            f"{format_number(ceiling.rate_per_gpu / best.rate_per_gpu)} times the tokens per second and device"
        )
    return lines


def _reach(each: Reach) -> str:
    """From or up to which context a draft pays, with the contexts from or up to which it surely and possibly does."""
    name, (first, last) = draft_name(each.draft, each.draft_method), each.contexts
    if each.pays is None:
        return f"{name} pays nowhere" + (f", possibly up to {format_tokens(each.possibly[1])}" if each.possibly else "")
    (start, end), sure, may = each.pays, each.surely, each.possibly or each.pays
    if start > first and end == last:
        surely = "surely nowhere" if sure is None else f"surely from {format_tokens(sure[0])}"
        return f"{name} pays from {format_tokens(start)} ({surely}, possibly from {format_tokens(may[0])})"
    surely = "surely nowhere" if sure is None else f"surely to {format_tokens(sure[1])}"
    if end == last:
        return f"{name} pays to {format_tokens(end)} and beyond ({surely})"
    between = f"from {format_tokens(start)} " if start > first else ""
    beyond = " and beyond" if may[1] == last else ""
    return f"{name} pays {between}to {format_tokens(end)} ({surely}, possibly to {format_tokens(may[1])}{beyond})"


def _of_case(answer: Plan, case: Case) -> list[Candidate]:
    """The case's candidates at the best gamma of each draft, budget and batch, best first."""
    found: dict[tuple[object, ...], Candidate] = {}
    for row in answer.candidates:
        if (row.hardware, row.context_len) == (case.hardware, case.context_len):
            load = row.batch_size if case.best_by_batch else None
            found.setdefault((row.draft, row.draft_method, row.draft_budget, load), row)
    return list(found.values())


def _few(answer: Plan, case: Case) -> list[Candidate]:
    """The best of each batch where several were asked for; else each draft at its best, then the next budgets."""
    if len(case.best_by_batch) > 1:
        return case.best_by_batch[:: -(-len(case.best_by_batch) // FEW)]
    every = _of_case(answer, case)
    firsts = {(row.draft, row.draft_method): row for row in reversed(every)}.values()
    first = [row for row in every if row in firsts][:FEW]
    fill = [row for row in every if row not in first][: FEW - len(first)]
    return [row for row in every if row in first or row in fill]


def _with_baselines(case: Case, rows: list[Candidate]) -> list[Candidate]:
    """The rows, and of whole requests what the same takes without a draft."""
    alone, ceiling = case.autoregressive, case.best_autoregressive
    if case.best.request_s is None:
        return rows
    return [*rows, *(row for row in (alone, ceiling) if row is not None and row not in rows)]


def _draft(row: Candidate) -> str:
    return f"{draft_name(row.draft, row.draft_method, row.draft_budget)}, gamma {row.gamma}"


def _ms(seconds: float) -> str:
    return format_number(seconds / MILLI)


BREAKS_FIRST = 3


class Column(NamedTuple):
    head: str
    text: Callable[[Any], str]
    shown: Callable[[Sequence[Any]], bool] = lambda rows: True
    rank: int = 0
    """Where there is no room, the highest rank goes first; 0 stays. Below `BREAKS_FIRST`, names break before that."""


def _differs(name: str) -> Callable[[Sequence[Any]], bool]:
    return lambda rows: len({getattr(row, name) for row in rows}) > 1


def _any(name: str) -> Callable[[Sequence[Any]], bool]:
    return lambda rows: any(getattr(row, name) for row in rows)


def _speedup(row: Candidate) -> str:
    value, low, high = row.gain
    return f"{value:.2f} {low:.2f}-{high:.2f}" if row.is_speculative else "1.00"


def _verdict(row: Candidate) -> str:
    """Whether it pays, from its interval, or why it cannot be run so."""
    return "no room" if not row.fits else row.verdict if row.is_speculative else "-"


def _with_budget(row: Candidate) -> str:
    """The draft and its budget; a star marks acceptance outside the range that it was measured in."""
    return draft_id(row.draft, row.draft_method, row.draft_budget) + "*" * row.acceptance_extrapolated


COLUMNS = (
    Column("device", lambda row: row.hardware, _differs("hardware")),
    Column("context", lambda row: format_tokens(row.context_len), _differs("context_len")),
    Column("layout", lambda row: row.layout, _differs("layout")),
    Column("batch", lambda row: str(row.batch_size), _differs("batch_size")),
    Column(DRAFT, _with_budget),
    Column("gamma", lambda row: str(row.gamma)),
    Column("draft ms", lambda row: _ms(row.draft_step_s), rank=6),
    Column("verify ms", lambda row: _ms(row.verify_step_s), rank=6),
    Column("tokens", lambda row: f"{row.expected_tokens_per_step:.2f}", rank=3),
    Column("1st tok", lambda row: format_seconds(row.first_token_s), _any("request_s"), 3),
    Column("ms/tok", lambda row: _ms(row.between_tokens_s), rank=1),
    Column("request", lambda row: format_seconds(row.request_s or 0.0), _any("request_s"), 2),
    Column("tok/s/GPU", lambda row: format_number(row.rate_per_gpu), _differs("batch_size"), 3),
    Column("GPU-h/Mreq", lambda row: format_number(row.gpu_hours_per_million_requests or 0), _any("request_s"), 7),
    Column("$/Mtok", lambda row: f"{row.cost_per_million_tokens_usd or 0:.2f}", _any("cost_per_million_tokens_usd")),
    Column("speedup (90%)", _speedup),
    Column("x best batch", lambda row: f"{row.speedup_vs_best_autoregressive or 0:.2f}", rank=5),
    Column("GiB/GPU", lambda row: f"{row.memory_bytes_per_gpu / GIB:.1f}", rank=4),
    Column("bound by", lambda row: row.bound_by, rank=6),
    Column("verdict", _verdict),
    Column(MARK, lambda row: ", ".join(row.marks), _any("marks")),
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
    """The best gamma by batch and context, with the speedup where there is room for it, and the context from which on
    it is above 1; the table's first context is only a bound."""
    contexts = table.context_lens
    wide = 6 + 10 * len(contexts) + 13 <= width

    def cell(row: int, column: int) -> str:
        if not table.fits[row][column]:
            return "-"
        gamma, pays = table.gamma_of_steps[row][column], table.gamma[row][column] > 0
        mark = "?" if table.verdict[row][column] == "unclear" else "!" if gamma and not pays else ""
        return f"{gamma}{mark} ({table.speedup[row][column]:.2f})" if wide and pays else f"{gamma}{mark}"

    rows = [
        [str(batch), *(cell(row, column) for column in range(len(contexts))),
         "-" if (start := table.break_even_context[row]) is None
         else f"<= {format_tokens(contexts[0])}" if start <= contexts[0] else format_tokens(start)]
        for row, batch in enumerate(table.batch_sizes)
    ]  # fmt: skip
    return text_table(["batch", *map(format_tokens, contexts), "faster from"], rows, wraps=())


def _breakdown_table(breakdown: dict[str, list[Operation]], gamma: int) -> Table:
    rows = [
        (name, op.op, _ms(op.time_s), _ms(op.ceiling_s), op.bound_by)
        for name, operations in breakdown.items()
        if gamma or name == "autoregressive"
        for op in sorted(operations, key=lambda each: -each.time_s)
    ]
    return text_table(("pass", "operation", "ms", "ceiling ms", "bound by"), rows, wraps=())


def _memory_line(answer: Plan) -> str:
    memory = answer.memory
    parts = {
        "weights": memory.weights_bytes, "KV": memory.kv_bytes, "draft weights": memory.draft_weights_bytes,
        "draft KV": memory.draft_kv_bytes, "workspace": memory.workspace_bytes, "of": memory.capacity_bytes,
    }  # fmt: skip
    return (
        f"memory per device: {', '.join(f'{label} {format_bytes(size)}' for label, size in parts.items())}; largest "
        f"batch {memory.largest_batch:.0f} (autoregressive {memory.largest_autoregressive_batch:.0f})"
    )


# Under arrivals ------------------------------------------------------------------------------------------------------


def name_of(load: TrafficLoad) -> str:
    """A draft with its policy in a few words."""
    if not load.is_speculative:
        return "no draft"
    gamma = load.policy if load.policy.startswith("gamma") else f"gamma {load.policy}"
    return f"{draft_name(load.draft, load.draft_method, load.draft_budget)}, {gamma}"


def traffic_answer(traffic: Traffic) -> str:
    """One line: the devices, and what speculation changes."""
    best, alone, drafted = traffic.best, traffic.autoregressive, traffic.speculative
    devices = "1 device" if best.num_gpus == 1 else f"{best.num_gpus} devices"
    layout = f"{devices} ({best.num_replicas} x {best.layout}), {name_of(best)}"
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


def _print_traffic(answer: Plan, traffic: Traffic, console: Console, *, every: bool) -> None:
    """The devices, the percentiles of the layouts compared, and what to note; `every` adds all rates."""
    console.print(f"[bold]{traffic_answer(traffic)}[/bold]")
    limits = (("TTFT", answer.request.ttft_p95_s), ("TPOT", answer.request.tpot_p95_s))
    told = [f"p95 of {name} {format_seconds(limit)}" for name, limit in limits if limit is not None]
    rate = format_number(traffic.rate_per_s)
    console.print(
        f"{answer.model} on {answer.hardware}, engine {answer.engine}: {rate} requests/s, limits "
        f"{' and '.join(told) or 'none'}; {traffic.num_requests} requests simulated"
    )
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
        highest = format_number(load.highest_rate_per_s or 0.0)
        console.print(f"{load.num_gpus} devices with {name_of(load)} keep the limits up to {highest} requests/s")
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
    Column(DRAFT, name_of),
    Column("devices", lambda load: str(load.num_gpus)),
    Column("TTFT ms", _percentiles("ttft", MILLI)),
    Column("TPOT ms", _percentiles("tpot", MILLI)),
    Column("request s", _percentiles("request", 1.0)),
    Column("kept/s", lambda load: format_number(load.goodput_per_s)),
    Column("waiting", lambda load: format_number(load.mean_waiting), _differs("rate_per_s")),
    Column("preempted", lambda load: str(load.preemptions), _differs("rate_per_s")),
)
"""Percentiles are p50/p95/p99; a table of one rate fits 80 characters."""
