"""A plan's answer on a terminal: what to do, by how much and how sure, then at most a few rows;
plain when piped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from magicdec.naming import draft_id
from magicdec.reports.arrivals import (
    arrivals_line,
    asked_of_traffic,
    load_name,
    percentiles_line,
    sure_devices_line,
    traffic_line,
)
from magicdec.reports.sentences import lengths_text, model_text
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
    Statement,
    of_kinds,
    shortest,
    story_of,
)
from magicdec.reports.text import needed_width, text_table
from magicdec.reports.words import drafting_of, probability_of
from magicdec.schema.plan import CaseAnswer, GammaTable, Plan, Traffic, TrafficLoad
from magicdec.schema.row import COLUMNS as COLUMNS_OF_ROWS
from magicdec.schema.row import Candidate
from magicdec.schema.row import column as value_of
from magicdec.units import (
    GIB,
    INTERVAL_SHARE,
    MILLI,
    format_bytes,
    format_number,
    format_seconds,
    format_tokens,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MOST_LINES = 12
"""Lines of the answer to one question."""
FEW = 3
"""Rows of a table, unless all are asked for."""
MARK, DRAFT = "mark", "draft"
BREAKING = ("device", "layout", DRAFT, MARK)
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
        f"[bold]where a step's time goes{drafted} (the draft's row is one of its steps)[/bold]"
    )
    if answer.path:
        console.print(f"priced as {answer.engine} runs it, {answer.path}")
    rows: list[tuple[str, ...]] = []
    for name, operations in answer.breakdown.items():
        slowest_first = sorted(operations, key=lambda op: -op.time_s)
        for op in slowest_first:
            times = (_ms(op.time_s), _ms(op.ceiling_s))
            rows.append((name, op.op, *times, op.bound_by, op.time_from))
    heads = ("pass", "operation", "ms", "ceiling ms", "bound by", "time from")
    console.print(text_table(heads, rows, wraps=()))
    console.print(_memory_line(answer))


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
    console.print(f"[bold]{first}[/bold]")
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
    for line in plugin_lines(answer.cases):
        console.print(line)


def _print_short(
    console: Console, answer: Plan, story: Sequence[Statement]
) -> list[Statement]:
    """The answer to one question in MOST_LINES lines. Returns the statements that fit; the closing ones
    among them are still to be printed."""
    rows = _few(answer, answer.cases[0])
    table = _table(rows, console.width)
    height = 0
    if rows:
        height = len(console.render_lines(table)) + _has_star(rows)
    told = shortest(story, lines=MOST_LINES - height, width=console.width)
    _print_told(console, told, rows)
    return told


def _print_told(
    console: Console, story: Sequence[Statement], rows: Sequence[Candidate]
) -> None:
    """Statements around the table of drafts, without those that close the answer."""
    first, *others = story
    console.print(f"[bold]{first.text}[/bold]")
    for line in of_kinds(others, BEFORE_TABLE):
        console.print(line)
    if rows:
        console.print(_table(rows, console.width))
    if _has_star(rows):
        console.print("* acceptance extrapolated beyond what was measured", style="dim")
    for line in of_kinds(others, AFTER_TABLE):
        console.print(line)


def _has_star(rows: Sequence[Candidate]) -> bool:
    return any(row.drafting.is_extrapolated for row in rows)


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
            f"[bold]gamma of {case.gamma_table.draft_name} by batch and context; 0: "
            "off, ?: unclear, !: slower than without it, -: no room[/bold]"
        )
        console.print(_gamma_table(case.gamma_table, console.width))


def _print_rows(console: Console, title: str, rows: Sequence[Candidate]) -> None:
    if rows:
        console.print(f"[bold]{title}[/bold]")
        console.print(_table(rows, console.width))


def _of_case(answer: Plan, case: CaseAnswer) -> list[Candidate]:
    """The case's candidates at the best gamma of each draft, budget and batch, best first."""
    best: dict[tuple[object, ...], Candidate] = {}
    for row in answer.candidates:
        if row.hardware != case.hardware or row.context_len != case.context_len:
            continue
        batch = None
        if case.best_by_batch:
            batch = row.batch_size
        configuration = (row.draft, row.draft_method, row.draft_budget, batch)
        best.setdefault(configuration, row)
    return list(best.values())


def _few(answer: Plan, case: CaseAnswer) -> list[Candidate]:
    """The best of each batch where several were asked for; else each draft at its best, then the
    next budgets.
    """
    by_batch = case.best_by_batch
    if len(by_batch) > 1:
        stride = -(-len(by_batch) // FEW)
        return by_batch[::stride]
    rows = _of_case(answer, case)
    best_of_draft: dict[tuple[str, str], Candidate] = {}
    for row in rows:
        best_of_draft.setdefault((row.draft, row.draft_method), row)
    first = list(best_of_draft.values())[:FEW]
    others = [row for row in rows if row not in first]
    shown = first + others[: FEW - len(first)]
    return [row for row in rows if row in shown]


def _with_baselines(case: CaseAnswer, rows: list[Candidate]) -> list[Candidate]:
    """The rows, and for whole requests the rows without a draft."""
    if case.best.requests is None:
        return rows
    shown = list(rows)
    loads = [_load(row) for row in rows]
    for row in (case.autoregressive, case.best_autoregressive):
        if row is not None and _load(row) not in loads:
            shown.append(row)
            loads.append(_load(row))
    return shown


def _load(row: Candidate) -> tuple[bool, int, str]:
    return row.is_speculative, row.batch_size, row.layout.label


def _ms(seconds: float) -> str:
    return format_number(seconds / MILLI)


BREAKS_FIRST = 3
"""Rank below which a column is worth more than names on one line."""


class TerminalColumn(NamedTuple):
    head: str
    text: Callable[[Any], str]
    shown: Callable[[Sequence[Any]], bool] = lambda rows: True
    rank: int = 0
    """Where there is no room, the highest rank goes first; 0 stays. Below `BREAKS_FIRST`, names
    break before that.
    """


def _differs(name: str) -> Callable[[Sequence[Any]], bool]:
    def differs(rows: Sequence[Any]) -> bool:
        values = {_value(row, name) for row in rows}
        return len(values) > 1

    return differs


def _any(name: str) -> Callable[[Sequence[Any]], bool]:
    return lambda rows: any(_value(row, name) for row in rows)


def _value(row: Any, name: str) -> Any:
    """A candidate's column or property, or a field of another row."""
    if isinstance(row, Candidate) and name in COLUMNS_OF_ROWS:
        return value_of(row, name)
    return getattr(row, name)


def _speedup(row: Candidate) -> str:
    if not row.is_speculative:
        return "1.00"
    gain = row.gain
    interval = f"{gain.low:.2f}-{gain.high:.2f}"
    return f"{gain.speedup:.2f} {interval}"


def _pays(row: Candidate) -> str:
    """How probable it is that the draft pays, or why it cannot be run so."""
    if not row.fits:
        return "no room"
    if not row.is_speculative:
        return "-"
    return probability_of(row).replace("over ", ">").replace("under ", "<")


def _with_budget(row: Candidate) -> str:
    """The draft and its budget; a star marks acceptance extrapolated beyond what was measured."""
    name = draft_id(row.draft, row.draft_method, row.draft_budget)
    if row.drafting.is_extrapolated:
        name += "*"
    return name


def _request_seconds(row: Candidate) -> str:
    if row.requests is None:
        return format_seconds(0.0)
    return format_seconds(row.requests.request_s)


def _at_percentiles(row: Candidate) -> str:
    """The gain at the 10th, 50th and 90th percentile of the acceptance."""
    if row.by_acceptance is None:
        return ""
    return "/".join(f"{value:.2f}" for value in row.by_acceptance.speedup)


def _even_at(row: Candidate) -> str:
    """Tokens per step with which a draft is as fast as none."""
    least = row.drafting.break_even_tokens_per_step
    if least is None:
        return ""
    return f"{least:.2f}"


TERMINAL_COLUMNS = (
    TerminalColumn("device", lambda row: row.hardware, _differs("hardware")),
    TerminalColumn(
        "context", lambda row: format_tokens(row.context_len), _differs("context_len")
    ),
    TerminalColumn("layout", lambda row: row.layout.label, _differs("layout")),
    TerminalColumn("batch", lambda row: str(row.batch_size), _differs("batch_size")),
    TerminalColumn(DRAFT, _with_budget),
    TerminalColumn("gamma", lambda row: str(row.gamma)),
    TerminalColumn("draft ms", lambda row: _ms(row.step.draft_s), rank=6),
    TerminalColumn("verify ms", lambda row: _ms(row.step.verify_s), rank=6),
    TerminalColumn("tokens", lambda row: f"{row.drafting.tokens_per_step:.2f}", rank=3),
    TerminalColumn(
        "1st tok", lambda row: format_seconds(row.first_token_s), _any("request_s"), 3
    ),
    TerminalColumn("ms/tok", lambda row: _ms(row.between_tokens_s), rank=1),
    TerminalColumn("request", _request_seconds, _any("request_s"), 2),
    TerminalColumn(
        "tok/s/GPU",
        lambda row: format_number(row.rate_per_gpu),
        _differs("batch_size"),
        3,
    ),
    TerminalColumn(
        "GPU-h/Mreq",
        lambda row: format_number(row.cost.gpu_hours_per_million_requests or 0),
        _any("request_s"),
        7,
    ),
    TerminalColumn(
        "$/Mtok",
        lambda row: f"{row.cost.per_million_tokens_usd or 0:.2f}",
        _any("cost_per_million_tokens_usd"),
    ),
    TerminalColumn(f"speedup ({INTERVAL_SHARE:.0%})", _speedup),
    TerminalColumn("10/50/90%", _at_percentiles, _any("break_even_tokens_per_step"), 8),
    TerminalColumn("even at", _even_at, _any("break_even_tokens_per_step"), 8),
    TerminalColumn(
        "x best batch",
        lambda row: f"{row.speedup_vs_best_autoregressive or 0:.2f}",
        rank=5,
    ),
    TerminalColumn(
        "GiB/GPU", lambda row: f"{row.memory.bytes_per_gpu / GIB:.1f}", rank=4
    ),
    TerminalColumn("bound by", lambda row: row.step.bound_by, rank=6),
    TerminalColumn("pays", _pays),
    TerminalColumn(MARK, lambda row: ", ".join(row.drafting.marks), _any("marks")),
)
"""Every column of every table of candidates: shown where it tells rows apart, and there is room."""


def _table(
    rows: Sequence[Any],
    width: int,
    columns: Sequence[TerminalColumn] = TERMINAL_COLUMNS,
) -> Table:
    """Names and marks break over lines between words, so nothing is cut off; numbers do not."""
    shown = [column for column in columns if column.shown(rows)]

    def heads() -> list[str]:
        return [column.head for column in shown]

    def cells() -> list[list[str]]:
        return [[column.text(row) for column in shown] for row in rows]

    ranks = {column.rank for column in columns}
    for rank in sorted(ranks - {0}, reverse=True):
        breaking: Sequence[str] = ()
        if rank < BREAKS_FIRST:
            breaking = BREAKING
        if needed_width(heads(), cells(), wraps=breaking) > width:
            shown = [column for column in shown if column.rank != rank]
    return text_table(heads(), cells(), wraps=BREAKING)


def _gamma_table(table: GammaTable, width: int) -> Table:
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
        cells.append(_faster_from(table, row))
        rows.append(cells)
    heads = ["batch", *map(format_tokens, contexts), "faster from"]
    return text_table(heads, rows, wraps=())


def _gamma_cell(table: GammaTable, row: int, column: int, *, wide: bool) -> str:
    if not table.fits[row][column]:
        return "-"
    gamma = table.gamma_of_steps[row][column]
    pays = table.gamma[row][column] > 0
    mark = ""
    if table.verdict[row][column] == "unclear":
        mark = "?"
    elif gamma and not pays:
        mark = "!"
    if not wide or not pays:
        return f"{gamma}{mark}"
    speedup = table.speedup[row][column]
    return f"{gamma}{mark} ({speedup:.2f})"


def _faster_from(table: GammaTable, row: int) -> str:
    start = table.break_even_context[row]
    first = table.context_lens[0]
    if start is None:
        return "-"
    if start <= first:
        return f"<= {format_tokens(first)}"
    return format_tokens(start)


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
    sizes = []
    for label, size in parts.items():
        sizes.append(f"{label} {format_bytes(size)}")
    largest = f"{memory.largest_batch:.0f}"
    largest_alone = f"{memory.largest_autoregressive_batch:.0f}"
    return (
        f"memory per device: {', '.join(sizes)}; largest batch {largest} (autoregressive "
        f"{largest_alone})"
    )


# Under arrivals
# --------------------------------------------------------------------------------------------------


def _print_traffic(
    answer: Plan, traffic: Traffic, console: Console, *, every: bool
) -> None:
    """The devices, the percentiles of the layouts compared, and what to note; `every` adds all
    rates.
    """
    console.print(f"[bold]{traffic_line(traffic)}[/bold]")
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
    compared = []
    for load in (traffic.autoregressive, traffic.speculative):
        if load is not None:
            compared.append(load)
    at_rate = [load for load in traffic.curves if load.rate_per_s == traffic.rate_per_s]
    _print_loads(console, f"at {rate}/s, the fewest devices of each", compared)
    if every:
        _print_loads(
            console, f"the policies on {traffic.best.num_gpus} devices", at_rate
        )
        _print_loads(console, "over rates", traffic.curves)
    for note in traffic.notes:
        console.print(f"note: {note}", style="dim")


def _print_loads(console: Console, title: str, loads: Sequence[TrafficLoad]) -> None:
    if loads:
        console.print(f"[bold]{title}[/bold] (p50/p95/p99)")
        console.print(_table(loads, console.width, TRAFFIC_COLUMNS))


def _percentiles(latency: str, unit: float) -> Callable[[TrafficLoad], str]:
    def read(load: TrafficLoad) -> str:
        spread = getattr(load, latency)
        if spread is None:
            return "overload"
        values = (spread.p50, spread.p95, spread.p99)
        return "/".join(format_number(value / unit) for value in values)

    return read


TRAFFIC_COLUMNS = (
    TerminalColumn(
        "requests/s",
        lambda load: format_number(load.rate_per_s),
        _differs("rate_per_s"),
    ),
    TerminalColumn(DRAFT, load_name),
    TerminalColumn("devices", lambda load: str(load.num_gpus)),
    TerminalColumn("TTFT ms", _percentiles("ttft", MILLI)),
    TerminalColumn("TPOT ms", _percentiles("tpot", MILLI)),
    TerminalColumn("request s", _percentiles("request", 1.0)),
    TerminalColumn("kept/s", lambda load: format_number(load.goodput_per_s), rank=3),
    TerminalColumn(
        "waiting",
        lambda load: format_number(load.mean_waiting),
        _differs("rate_per_s"),
        rank=4,
    ),
    TerminalColumn(
        "preempted",
        lambda load: str(load.preemptions),
        _differs("rate_per_s"),
        rank=5,
    ),
)
"""Percentiles are p50/p95/p99; a table of one rate fits 80 characters."""
