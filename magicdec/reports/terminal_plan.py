"""A plan's answer on a terminal: what to do, by how much and how sure, then at most a few rows;
plain when piped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from magicdec.naming import draft_id
from magicdec.reports.arrivals import (
    arrivals_line,
    asked_of_traffic,
    load_name,
    percentiles_line,
    sure_devices_line,
    traffic_line,
)
from magicdec.reports.columns import (
    Column,
    Table,
    differs,
    fitted,
    is_known,
)
from magicdec.reports.sentences import (
    acceptance_line,
    considered,
    is_sparse_self,
    lengths_text,
    model_text,
    self_drafted,
)
from magicdec.reports.several import (
    left_aside,
    loads_lines,
    loads_of,
    plugin_lines,
    to_buy,
)
from magicdec.reports.story import (
    AFTER_TABLE,
    BEFORE_TABLE,
    CLOSING,
    FIRST_READING,
    FURTHER,
    Statement,
    of_kinds,
    story_of,
)
from magicdec.reports.text import text_table
from magicdec.reports.words import drafting_of, probability_of
from magicdec.schema.plan import (
    CaseAnswer,
    Choice,
    GammaTable,
    Plan,
    Traffic,
    TrafficLoad,
)
from magicdec.schema.row import Candidate, same_configuration
from magicdec.units import (
    GIB,
    INTERVAL_SHARE,
    MILLI,
    format_bytes,
    format_number,
    format_tokens,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

MOST_LINES = 12
"""Lines of the answer to one question."""
FEW = 3
"""Rows of a table, unless all are asked for."""
WORTH_A_ROW = FURTHER[: FURTHER.index("at the limit")]
"""Kinds that the short answer rather says than the rows below the first."""
LEFT_OUT = ("acceptance", "plain", "texts")
"""Kinds that the short answer drops first where the lines are too few."""
BREAKING = ("device", "layout", "draft", "mark")
"""Headings of the columns that may break over lines."""


def print_plan(
    answer: Plan,
    console: Console,
    *,
    why: bool = False,
    every: bool = False,
    saved_as: str | None = None,
) -> None:
    """The answer to one question in at most MOST_LINES lines; `every` adds all rows, layouts, gammas
    and statements, `why` the breakdown and the memory. `saved_as`: the file that it was written to.
    """
    if answer.traffic is not None:
        _print_traffic(answer, answer.traffic, console, every=every)
        if not every and not why:
            return
    if len(answer.cases) > 1:
        _print_cases(console, answer)
    story = story_of(answer, answer.cases[0], every=every, saved_as=saved_as)
    if every:
        for case in answer.cases:
            told = story_of(answer, case, every=True)
            rows = _with_baselines(case, _of_case(answer, case))
            _print_told(console, told, rows)
            _print_further_tables(console, case)
    elif len(answer.cases) == 1:
        story = _print_short(console, answer, story)
    if why:
        _print_why(console, answer)
    for line in of_kinds(story, CLOSING):
        console.print(line)


def _print_why(console: Console, answer: Plan) -> None:
    """Where a step's time and the memory go."""
    row = answer.choice.left_out or answer.best
    drafted = ""
    if row.is_speculative:
        drafted = f" with {drafting_of(row)}"
    console.print(
        f"where a step's time goes{drafted} (the draft's row is one of its steps)",
        style="bold",
    )
    if answer.path:
        console.print(f"priced as {answer.engine} runs it, {answer.path}")
    rows: list[tuple[str, ...]] = []
    for name, operations in answer.breakdown.items():
        slowest_first = sorted(operations, key=lambda op: -op.time_s)
        for op in slowest_first:
            taken = format_number(op.time_s / MILLI)
            ceiling = format_number(op.ceiling_s / MILLI)
            rows.append((name, op.op, taken, ceiling, op.bound_by, op.time_from))
    heads = ("pass", "operation", "ms", "ceiling ms", "bound by", "time from")
    console.print(text_table(heads, rows, wraps=()))
    memory = answer.memory
    parts = {
        "weights": memory.weights_bytes,
        "KV": memory.kv_bytes,
        "draft weights": memory.draft_weights_bytes,
        "draft KV": memory.draft_kv_bytes,
        "workspace": memory.workspace_bytes,
        "of": memory.capacity_bytes,
    }
    # an engine that sets memory aside for its workspace has none in its share
    sizes = [f"{label} {format_bytes(size)}" for label, size in parts.items() if size]
    console.print(
        f"memory per device: {', '.join(sizes)}; largest batch {memory.largest_batch:.0f} "
        f"(autoregressive {memory.largest_autoregressive_batch:.0f})"
    )


def _print_cases(console: Console, answer: Plan) -> None:
    """Several devices or contexts: which to buy, and one row of each."""
    lines = loads_lines(answer)
    contexts = {case.context_len for case in answer.cases}
    if answer.offers:
        load = ""
        if len(contexts) > 1:
            load = f" at {format_tokens(answer.offers[0].context_len)}"
        num_asked = len(answer.request.hardware)
        lines.insert(0, to_buy(answer.offers, num_asked=num_asked, load=load))
    first, *others = lines
    console.print(first, style="bold")
    for line in others:
        console.print(line)
    place = f"{model_text(answer)}, {answer.engine}"
    if len(contexts) == 1:
        lengths = lengths_text(answer, answer.context_len)
        place += f": {lengths}"
    console.print(place)
    # one row per load, the devices in the order of the offers
    order = {row.hardware: rank for rank, row in enumerate(answer.offers)}
    loads = loads_of(answer.cases)
    loads.sort(key=lambda row: order.get(row.hardware, len(order)))
    console.print(_table(loads, console.width))
    for case in answer.cases:
        line = left_aside(case)
        if line:
            console.print(line)
    for line in plugin_lines(answer):
        console.print(line)


def _print_short(
    console: Console, answer: Plan, story: Sequence[Statement]
) -> list[Statement]:
    """The answer to one question in MOST_LINES lines. Returns its statements, of which the closing ones
    are still to be printed."""

    rows = _few(answer, answer.cases[0])
    told = [statement for statement in story if statement.kind in FIRST_READING]

    def height(statement: Statement) -> int:
        return len(console.render_lines(statement.text))

    def left() -> int:
        table = console.render_lines(_table(rows, console.width)) if rows else []
        return MOST_LINES - sum(map(height, told)) - len(table)

    def shorten(fewest: int) -> None:
        """Fewer rows; the first is the answer's, the last may be the model's own."""
        while left() < 0 and len(rows) > fewest:
            rows.pop(-2 if len(rows) > 2 else -1)

    shorten(2)
    for kind in LEFT_OUT:
        if left() < 0:
            told = [statement for statement in told if statement.kind != kind]
    shorten(1)
    further = [statement for statement in story if statement.kind in FURTHER]
    further.sort(key=lambda statement: FURTHER.index(statement.kind))
    for statement in further:
        room = left()
        if statement.kind in WORTH_A_ROW and rows:
            room += len(rows) - 1
        if height(statement) <= room:
            told.insert(-1, statement)
            shorten(1)
            break
    _print_told(console, told, rows)
    return told


def _print_told(
    console: Console, story: Sequence[Statement], rows: Sequence[Candidate]
) -> None:
    """Statements around the table of drafts, without those that close the answer."""
    first, *others = story
    console.print(first.text, style="bold")
    for line in of_kinds(others, BEFORE_TABLE):
        console.print(line)
    if rows:
        console.print(_table(rows, console.width))
    for line in of_kinds(others, AFTER_TABLE):
        console.print(line)


def _print_further_tables(console: Console, case: CaseAnswer) -> None:
    """The frontier or the best of each batch, the layouts, and the gammas."""
    if not case.best_by_batch:
        title = "latency against throughput: nothing beats these in both"
        _print_rows(console, title, case.pareto)
    if len(case.best_by_batch) > 1:
        _print_rows(console, "the best of each batch", case.best_by_batch)
    _print_rows(console, "layouts of a replica, each at its best", case.layouts)
    if any(map(any, case.gamma_table.gamma)):
        console.print(
            f"gamma of {case.gamma_table.draft_name} by batch and context; "
            "?: less than 90 % likely to pay, -: no room",
            style="bold",
        )
        console.print(_gamma_table(case.gamma_table, console.width))


def _of_case(answer: Plan, case: CaseAnswer) -> list[Candidate]:
    """The case's candidates at the best gamma of each draft, budget and batch: the one that was chosen,
    one that is as good, and the others in the order of the choice."""
    best: dict[tuple[object, ...], Candidate] = {}
    first = [considered(case.choice), case.choice.tied]
    for row in [*filter(None, first), *answer.candidates]:
        if row.hardware != case.hardware or row.context_len != case.context_len:
            continue
        batch = None
        if case.best_by_batch:
            batch = row.batch_size
        configuration = (row.draft, row.draft_method, row.draft_budget, batch)
        best.setdefault(configuration, row)
    return [_with_reason(case.choice, row) for row in best.values()]


def _few(answer: Plan, case: CaseAnswer) -> list[Candidate]:
    """The best of a few batches where several were asked for; else each draft at its best, then the next
    budgets. The last is the model drafting for itself, where that is expected to pay."""
    by_batch = case.best_by_batch
    if len(by_batch) > 1:
        return sorted(by_batch, key=lambda row: -row.rate)[:FEW]
    rows = _of_case(answer, case)
    best_of_draft: dict[tuple[str, str], Candidate] = {}
    for row in rows:
        best_of_draft.setdefault((row.draft, row.draft_method), row)
    first_of_each = list(best_of_draft.values())[:FEW]
    others = [row for row in rows if row not in first_of_each]
    kept = first_of_each + others[: FEW - len(first_of_each)]
    shown = [row for row in rows if row in kept]
    own = self_drafted(answer, case)
    if own is not None and not any(map(is_sparse_self, shown)):
        shown = [*shown[: FEW - 1], own]
    return shown


def _with_reason(choice: Choice, row: Candidate) -> Candidate:
    """The row, marked with why it is not taken where it is as fast as the one that is."""
    best = choice.row
    tied = choice.tied
    if tied is not None and same_configuration(row, tied):
        reason = "as good"
    elif (
        not best.is_speculative
        or row.gain.speedup <= best.gain.speedup
        or (row.batch_size, row.layout) != (best.batch_size, best.layout)
        or not row.fits
        or not row.within_limits
        or row.drafting.needs_plugin
        or row.drafting.is_hypothetical
    ):
        return row
    else:
        # the choice is by what is lost over the usual texts, the gain over all of them
        reason = "by rare texts"
    marks = [*row.drafting.marks, reason]
    drafting = msgspec.structs.replace(row.drafting, marks=marks)
    return msgspec.structs.replace(row, drafting=drafting)


def _with_baselines(case: CaseAnswer, rows: list[Candidate]) -> list[Candidate]:
    """The drafted rows, and for whole requests those without a draft."""
    if case.best.requests is None:
        return rows
    alone = case.autoregressive
    shown = [*rows, alone]
    best = case.best_autoregressive
    if best is not None and (best.batch_size, best.layout.label) != (
        alone.batch_size,
        alone.layout.label,
    ):
        shown.append(best)
    return shown


def _speedup(row: Candidate) -> str:
    if not row.is_speculative:
        return "1.00"
    gain = row.gain
    return f"{gain.speedup:.2f} {gain.low:.2f}-{gain.high:.2f}"


def _pays(row: Candidate) -> str:
    """How probable it is that the draft pays, or why it cannot be run so."""
    if not row.fits:
        return "no room"
    if not row.within_limits:
        return "too slow"
    if not row.is_speculative:
        return "-"
    return probability_of(row).replace("over ", ">").replace("under ", "<")


def _with_budget(row: Candidate) -> str:
    return draft_id(row.draft, row.draft_method, row.draft_budget)


PLAN_COLUMNS = (
    Column("hardware", "device", shown=differs("hardware")),
    Column(
        "context_len",
        "context",
        value=lambda row: format_tokens(row.context_len),
        shown=differs("context_len"),
    ),
    Column(
        "layout",
        "layout",
        value=lambda row: row.layout.label,
        shown=differs("layout"),
    ),
    Column("batch_size", "batch", "integer", shown=differs("batch_size")),
    Column("draft", "draft", value=_with_budget),
    Column("gamma", "gamma", "integer"),
    Column("draft_step_s", "draft ms", "milliseconds", rank=6),
    Column("verify_step_s", "verify ms", "milliseconds", rank=6),
    Column("expected_tokens_per_step", "tokens", "number", rank=3),
    Column("first_token_s", "1st tok", "seconds", shown=is_known("request_s"), rank=3),
    Column("between_tokens_s", "ms/tok", "milliseconds", rank=1),
    Column("request_s", "request", "seconds", shown=is_known("request_s"), rank=2),
    Column("rate_per_gpu", "tok/s/GPU", "figure", shown=differs("batch_size"), rank=3),
    Column(
        "gpu_hours_per_million_requests",
        "GPU-h/Mreq",
        "figure",
        shown=is_known("request_s"),
        rank=7,
    ),
    Column(
        "cost_per_million_tokens_usd",
        "$/Mtok",
        "number",
        shown=is_known("cost_per_million_tokens_usd"),
    ),
    Column("speedup", f"speedup ({INTERVAL_SHARE:.0%})", value=_speedup),
    Column(
        "speedup_vs_best_autoregressive",
        "x best batch",
        "number",
        rank=5,
    ),
    Column(
        "memory_bytes_per_gpu",
        "GiB/GPU",
        value=lambda row: f"{row.memory.bytes_per_gpu / GIB:.1f}",
        rank=4,
    ),
    Column("bound_by", "bound by", rank=6),
    Column("pays_probability", "pays", value=_pays),
    Column(
        "marks",
        "mark",
        value=lambda row: ", ".join(row.drafting.marks),
        shown=is_known("marks"),
    ),
)
"""Every column of every table of candidates: shown where it tells rows apart, and there is room."""


def _print_rows(
    console: Console,
    title: str,
    rows: Sequence[Any],
    columns: Sequence[Column] = PLAN_COLUMNS,
    *,
    of: str = "",
) -> None:
    """A table under its title; `of`: what its cells hold, where the headings do not say."""
    from rich.text import Text

    if rows:
        suffix = f" ({of})" if of else ""
        console.print(Text.assemble((title, "bold"), suffix))
        console.print(_table(rows, console.width, columns))


def _table(
    rows: Sequence[Any], width: int, columns: Sequence[Column] = PLAN_COLUMNS
) -> RichTable:
    """Names and marks break over lines between words, so nothing is cut off; numbers do not."""
    return fitted(Table.of("", "", columns, rows), width, wraps=BREAKING)


def _gamma_table(table: GammaTable, width: int) -> RichTable:
    """The best gamma by batch and context, with the speedup where there is room for it, and the
    context from which on it is above 1; the table's first context is only a bound."""
    contexts = table.context_lens
    # characters of the batch, of "16 (1.23)" at each context, and of "faster from"
    wide = 6 + 10 * len(contexts) + 13 <= width
    rows = []
    for row, batch in enumerate(table.batch_sizes):
        cells = [str(batch)]
        for column in range(len(contexts)):
            cells.append(_gamma_cell(table, row, column, wide=wide))
        start = table.break_even_context[row]
        if start is None:
            cells.append("-")
        elif start <= contexts[0]:
            cells.append(f"<= {format_tokens(contexts[0])}")
        else:
            cells.append(format_tokens(start))
        rows.append(cells)
    heads = ["batch", *map(format_tokens, contexts), "faster from"]
    return text_table(heads, rows, wraps=())


def _gamma_cell(table: GammaTable, row: int, column: int, *, wide: bool) -> str:
    if not table.fits[row][column]:
        return "-"
    gamma = table.gamma[row][column]
    if not gamma:
        return "off"
    mark = "?" if table.verdict[row][column] == "unclear" else ""
    if not wide:
        return f"{gamma}{mark}"
    speedup = table.speedup[row][column]
    return f"{gamma}{mark} ({speedup:.2f})"


# Under arrivals
# --------------------------------------------------------------------------------------------------


def _print_traffic(
    answer: Plan, traffic: Traffic, console: Console, *, every: bool
) -> None:
    """The devices, the percentiles of the layouts compared, and what to note; `every` adds all
    rates.
    """
    console.print(traffic_line(traffic), style="bold")
    acceptance = acceptance_line(answer.choice)
    if acceptance:
        console.print(acceptance)
    rate = format_number(traffic.rate_per_s)
    console.print(percentiles_line(traffic.best))
    sure = sure_devices_line(traffic)
    if sure:
        console.print(sure)
    steady = arrivals_line(traffic.best)
    if steady and every:
        console.print(steady)
    simulated = f"{traffic.num_requests} requests simulated"
    console.print(f"{asked_of_traffic(answer, traffic)}; {simulated}")
    compared = list(filter(None, (traffic.autoregressive, traffic.speculative)))
    loads = {f"at {rate}/s, the fewest devices of each": compared}
    if every:
        loads["over rates"] = traffic.curves
    for title, rows in loads.items():
        _print_rows(console, title, rows, TRAFFIC_COLUMNS, of="p50/p95/p99")
    for note in traffic.notes:
        console.print(f"note: {note}", style="dim")


def _percentiles(latency: str, unit: float) -> Callable[[TrafficLoad], str]:
    def read(load: TrafficLoad) -> str:
        spread = getattr(load, latency)
        if spread is None:
            return "overload"
        values = (spread.p50, spread.p95, spread.p99)
        return "/".join(format_number(value / unit) for value in values)

    return read


TRAFFIC_COLUMNS = (
    Column("rate_per_s", "requests/s", "figure", shown=differs("rate_per_s")),
    Column("draft", "draft", value=load_name),
    Column("num_gpus", "devices", "integer"),
    Column("ttft", "TTFT ms", value=_percentiles("ttft", MILLI)),
    Column("tpot", "TPOT ms", value=_percentiles("tpot", MILLI)),
    Column("request", "request s", value=_percentiles("request", 1.0)),
    Column("goodput_per_s", "kept/s", "figure", rank=3),
    Column("mean_waiting", "waiting", "figure", shown=differs("rate_per_s"), rank=4),
    Column("preemptions", "preempted", "integer", shown=differs("rate_per_s"), rank=5),
)
"""Percentiles are p50/p95/p99; a table of one rate fits 80 characters."""
