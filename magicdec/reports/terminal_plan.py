"""A plan's answer on a terminal: the tables of `magicdec plan`, plain when piped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from magicdec.naming import draft_id
from magicdec.plan_document import Candidate, Case, GammaTable, MemoryUse, NeedsAcceptance, Operation, Plan
from magicdec.units import GIB, MILLI, format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod
    from rich.table import Table

WIDE = 110
"""Columns of a terminal from which the tables show more of each candidate."""
MAX_FRONTIER_ROWS = 16
NO_ROOM = "no room"
DRAFT = "draft method"
"""Heading of the only column that may break over lines."""
RIGHT: JustifyMethod = "right"


def print_plan(answer: Plan, console: Console, *, why: bool = False) -> None:
    """Every case with its tables; `why` adds the breakdown by operation and the memory."""
    for case in answer.cases:
        _print_case(console, answer, case)
    if any(row.acceptance_extrapolated for row in answer.candidates):
        console.print("* acceptance extrapolated from the budgets and contexts it was measured at", style="dim")
    if why:
        _print(
            console,
            "where a step's time goes (the draft's row is one of its steps)",
            _breakdown_table(answer.breakdown, answer.best.gamma),
        )
        console.print(_memory_line(answer.memory))
    if answer.needs_acceptance:
        names = "; ".join(_wanted(each) for each in answer.needs_acceptance)
        console.print(
            f"not ranked without acceptance measured on your text; faster from an acceptance rate of: {names}",
            style="dim",
        )
    for note in answer.notes:
        console.print(f"note: {note}", style="dim")


def _print_case(console: Console, answer: Plan, case: Case) -> None:
    """One device and context: what was compared, the best, and the best gamma around it."""
    best, alone, ceiling = case.best, case.autoregressive, case.best_autoregressive
    console.print(
        f"[bold]{answer.model}[/bold] on {best.num_gpus * best.num_replicas} x {case.hardware}"
        + _spread(best)
        + f", engine {answer.engine}, batch {best.batch_size}{' each' if best.num_replicas > 1 else ''}"
        + f"{'' if case.best_by_batch else ' (searched)'}, context {case.context_len}"
    )
    rate = f"{alone.tokens_per_s:.0f} tokens/s" + (" per replica" if best.num_replicas > 1 else "")
    console.print(f"autoregressive: {_ms(alone.tpot_s)} ms per token, {rate}, bound by {alone.bound_by}")
    if ceiling is not None and (ceiling.batch_size, ceiling.tp_size) != (alone.batch_size, alone.tp_size):
        limited = answer.request.tpot_limit_s is not None or answer.request.ttft_limit_s is not None
        console.print(
            f"at its best batch{' within the limits' if limited else ''}, {ceiling.batch_size} at tp "
            f"{ceiling.tp_size}: {_ms(ceiling.tpot_s)} ms, {ceiling.tokens_per_s:.0f} tokens/s"
        )
    of = " (whole requests)" if best.request_s is not None else ""
    of_case = [row for row in answer.candidates if (row.hardware, row.context_len) == (case.hardware, case.context_len)]
    if not case.best_by_batch and len(case.pareto) > 1:
        shown = case.pareto[:: max(1, -(-len(case.pareto) // MAX_FRONTIER_ROWS))]
        _print(
            console, f"latency against throughput: nothing beats these in both{of}", _cases_table(shown, console.width)
        )
    elif len(case.best_by_batch) > 1:
        _print(console, f"the best of each batch{of}", _cases_table(case.best_by_batch, console.width))
    elif of_case:
        _print(
            console,
            "candidates, each with its best gamma (draft step and verification in ms)",
            _candidates_table(of_case, console.width),
        )
    of_each_draft = _first_of_each_draft(of_case)
    if len(of_each_draft) > 1 and (len(case.best_by_batch) > 1 or not case.best_by_batch):
        _print(console, f"each draft at its best{of}", _cases_table(of_each_draft, console.width))
    if case.layouts:
        _print(console, f"layouts of a replica, each at its best{of}", _layouts_table(case.layouts))
    console.print(_verdict(answer, case, has_candidates=bool(of_case)))
    if best.speedup_static_batch is not None:
        console.print(f"with a static batch, which waits for its slowest sequence: {best.speedup_static_batch:.2f}x")
    _print_requests(console, case)
    if any(any(row) for row in case.gamma_table.gamma):
        _print(
            console,
            f"gamma of {case.gamma_table.draft_name} by batch and context, as exported; 0: off, ?: unclear, "
            "!: slower than without it, -: no room",
            _gamma_table(case.gamma_table, console.width),
        )


def _spread(best: Candidate) -> str:
    """How many replicas there are, each with its layout where it is not plain tp; rates are those of one."""
    if best.num_replicas > 1:
        return f" in {best.num_replicas} replicas ({best.layout})"
    return f" ({best.layout})" if best.num_gpus != best.tp_size or best.ep_size > 1 else ""


def _print_requests(console: Console, case: Case) -> None:
    """The time and cost of whole requests, prefill included; without their length, the time to the first token."""
    best, alone, ceiling = case.best, case.autoregressive, case.best_autoregressive
    if best.request_s is None:
        priced = "; $/Mtok is of decoding alone" if best.cost_per_million_tokens_usd else ""
        console.print(
            f"first token of one request after {format_seconds(best.ttft_s)}; --gen-len or --workload adds the time "
            f"and cost of whole requests{priced}"
        )
        return
    rows = [("autoregressive", alone)]
    if ceiling is not None and (ceiling.batch_size, ceiling.tp_size) != (alone.batch_size, alone.tp_size):
        rows.append(("at its best batch", ceiling))
    if best.is_speculative:
        rows.append((_draft_name(best), best))
    columns: list[tuple[str, JustifyMethod]] = [
        ("", "left"), ("batch", RIGHT), ("tp", RIGHT), ("1st token", RIGHT), ("ms/tok", RIGHT), ("request", RIGHT),
        ("tok/s/GPU", RIGHT), ("GPU-h/Mreq", RIGHT),
    ]  # fmt: skip
    is_priced = best.cost_per_million_tokens_usd is not None
    table = _table([*columns, ("$/Mtok", RIGHT)] if is_priced else columns)
    for name, row in rows:
        cells = [
            name, str(row.batch_size), str(row.tp_size), format_seconds(row.first_token_s), _ms(row.between_tokens_s),
            format_seconds(row.request_s or 0.0), f"{row.rate_per_gpu:.3g}",
            f"{row.gpu_hours_per_million_requests or 0:.4g}",
        ]  # fmt: skip
        table.add_row(*cells, *([f"{row.cost_per_million_tokens_usd or 0:.2f}"] if is_priced else []))
    _print(console, "whole requests, as many at a time as the batch, their prefills included", table)
    if best.is_speculative:
        console.print(
            f"a whole request: {_speedup(best.request_speedup, best.request_speedup_low, best.request_speedup_high)} "
            f"(decoding alone: {best.speedup:.2f}x); prefill takes {best.prefill_share:.0%} of the devices' time"
        )
    else:
        console.print(f"prefill takes {best.prefill_share:.0%} of the devices' time")


def _speedup(value: float | None, low: float | None, high: float | None) -> str:
    return f"{value:.2f}x ({low:.2f}-{high:.2f})"


def _first_of_each_draft(ranked: Sequence[Candidate]) -> list[Candidate]:
    firsts: dict[tuple[str, str], Candidate] = {}
    for row in ranked:
        firsts.setdefault((row.draft, row.draft_method), row)
    return list(firsts.values())


def _wanted(lacking: NeedsAcceptance) -> str:
    rate = lacking.break_even_acceptance_rate
    name = lacking.draft_method if lacking.draft in ("self", lacking.draft_method) else lacking.draft
    return f"{name} {rate:.2f}" if rate is not None else f"{name} none"


def _ms(seconds: float) -> str:
    return f"{seconds / MILLI:.3g}" if seconds < 1 else f"{seconds / MILLI:.0f}"


def _print(console: Console, title: str, table: Table) -> None:
    console.print(f"[bold]{title}[/bold]")
    console.print(table)


def _table(columns: Sequence[tuple[str, JustifyMethod]]) -> Table:
    """Names break over lines where they do not fit, so nothing is cut off; numbers do not."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name, side in columns:
        table.add_column(name, justify=side, no_wrap=name != DRAFT, overflow="fold")
    return table


Cell = tuple[str, "JustifyMethod", Callable[[Candidate], str]]
"""A column's heading, its side, and its text for a row."""


def _candidate_rows(rows: Sequence[Candidate], columns: Sequence[Cell]) -> Table:
    table = _table([(name, side) for name, side, _ in columns])
    for row in rows:
        table.add_row(*(text(row) for _, _, text in columns))
    return table


def _candidates_table(rows: Sequence[Candidate], width: int, limit: int = 12) -> Table:
    """The best gamma of each draft and budget, best first; a wide terminal shows more of each."""
    best: dict[tuple[Any, ...], Candidate] = {}
    for row in rows:
        best.setdefault((row.draft, row.draft_method, row.draft_budget), row)
    columns: list[Cell] = [
        (DRAFT, "left", _draft_name),
        ("budget", "right", _budget),
        ("gamma", "right", lambda row: str(row.gamma)),
        ("draft", "right", lambda row: _ms(row.draft_step_s)),
        ("verify", "right", lambda row: _ms(row.verify_step_s)),
        ("tokens", "right", lambda row: f"{row.expected_tokens_per_step:.2f}"),
        ("ms/tok", "right", lambda row: _ms(row.tpot_s)),
        ("speedup (90 %)", "right", lambda row: f"{row.speedup:.2f} {row.speedup_low:.2f}-{row.speedup_high:.2f}"),
        ("verdict", "left", _verdict_cell),
    ]
    if width >= WIDE:
        columns += WIDE_COLUMNS
    return _candidate_rows(list(best.values())[:limit], columns)


def _layouts_table(rows: Sequence[Candidate]) -> Table:
    columns: list[Cell] = [
        ("layout", "left", lambda row: row.layout),
        ("GPUs", "right", lambda row: str(row.num_gpus)),
        ("batch", "right", lambda row: str(row.batch_size)),
        (DRAFT, "left", _draft_name),
        ("gamma", "right", lambda row: str(row.gamma)),
        ("ms/tok", "right", lambda row: _ms(row.between_tokens_s)),
        ("tok/s/GPU", "right", lambda row: f"{row.rate_per_gpu:.3g}"),
        ("x", "right", lambda row: f"{row.speedup:.2f}"),
        ("bound by", "left", lambda row: row.bound_by),
    ]
    return _candidate_rows(rows, columns)


def _budget(row: Candidate) -> str:
    """A star marks acceptance outside the range that it was measured in."""
    return str(row.draft_budget or "-") + ("*" if row.acceptance_extrapolated else "")


def _draft_name(row: Candidate) -> str:
    return draft_id(row.draft, row.draft_method)


def _verdict_cell(row: Candidate) -> str:
    return (row.verdict if row.is_speculative else "-") if row.fits else NO_ROOM


def _over_best(row: Candidate) -> str:
    gain = row.speedup_vs_best_autoregressive
    return "-" if gain is None else f"{gain:.2f}"


WIDE_COLUMNS: tuple[Cell, ...] = (
    ("tok/s", "right", lambda row: f"{row.tokens_per_s:.0f}"),
    ("x best batch", "right", _over_best),
    ("GiB/GPU", "right", lambda row: f"{row.memory_bytes_per_gpu / GIB:.1f}"),
    ("bound by", "left", lambda row: row.bound_by),
)


def _cases_table(rows: Sequence[Candidate], width: int, limit: int = 40) -> Table:
    columns: list[Cell] = [
        ("batch", "right", lambda row: str(row.batch_size)),
        ("tp", "right", lambda row: str(row.tp_size)),
        (DRAFT, "left", _draft_name),
        ("budget", "right", _budget),
        ("gamma", "right", lambda row: str(row.gamma)),
        ("ms/tok", "right", lambda row: _ms(row.between_tokens_s)),
        ("tok/s/GPU", "right", lambda row: f"{row.rate_per_gpu:.0f}"),
        ("x", "right", lambda row: f"{row.request_speedup or row.speedup:.2f}"),
        ("verdict", "left", _verdict_cell),
    ]
    shown = rows[:limit]
    if any(row.cost_per_million_tokens_usd for row in shown):
        columns.append(("$/Mtok", "right", lambda row: f"{row.cost_per_million_tokens_usd or 0:.2f}"))
    if width >= WIDE:
        columns += WIDE_COLUMNS[1:]
    return _candidate_rows(shown, columns)


def _verdict(answer: Plan, case: Case, *, has_candidates: bool) -> str:
    best = case.best
    if not best.is_speculative and not has_candidates and answer.needs_acceptance:
        return (
            "[bold]best: autoregressive[/bold], for want of a draft whose acceptance is known; "
            "give --acceptance-rate or --acceptance FILE"
        )
    if not best.is_speculative:
        ceiling = case.best_autoregressive
        rate = f": {best.tokens_per_s:.0f} tokens/s"
        is_same = ceiling is not None and (ceiling.batch_size, ceiling.tp_size) == (best.batch_size, best.tp_size)
        if ceiling is not None and not is_same:
            share = best.rate_per_gpu / ceiling.rate_per_gpu
            rate += f", {share:.2f}x of what its best batch {ceiling.batch_size} gives per device"
        return f"[bold]best: no speculation[/bold], decode autoregressively{rate}"
    budget = f", budget {best.draft_budget}" if best.draft_budget else ""
    gain, paid = best.speedup_vs_best_autoregressive, best.break_even_gen_len
    over_best = "alone in keeping the limits" if gain is None else f"{gain:.2f}x autoregressive at its best batch"
    decoding = " decoding" if best.request_s is not None else ""
    return (
        f"[bold]best: {_draft_name(best)}{budget}, gamma {best.gamma}: {best.verdict}[/bold]; "
        f"{_speedup(best.speedup, best.speedup_low, best.speedup_high)}{decoding}, {best.tokens_per_s:.0f} tokens/s"
        + (f"; {over_best}" if gain is None or gain >= 1.0 else "")
        + (f"; prefill paid back from {paid} tokens" if paid and paid > 1 else "")
        + _more_throughput(case)
    )


def _more_throughput(case: Case) -> str:
    """The second question: whether another batch without a draft does more per device, within the limits."""
    best, ceiling = case.best, case.best_autoregressive
    if ceiling is None or ceiling.rate_per_gpu <= best.rate_per_gpu:
        return ""
    return (
        f"\nfor throughput alone: batch {ceiling.batch_size} at tp {ceiling.tp_size} without a draft gives "
        f"{ceiling.rate_per_gpu / best.rate_per_gpu:.3g} times the tokens per second and device, "
        f"{_ms(ceiling.between_tokens_s)} ms per token"
    )


def _gamma_table(table: GammaTable, width: int) -> Table:
    """The best gamma by batch and context, with the speedup where there is room for it."""
    contexts = table.context_lens
    shown = _table([("batch", "right"), *((_short(context), RIGHT) for context in contexts), ("faster from", "right")])
    wide = 6 + 10 * len(contexts) + 13 <= width

    def cell(row: int, column: int) -> str:
        if not table.fits[row][column]:
            return "-"
        gamma, pays = table.gamma_of_steps[row][column], table.gamma[row][column] > 0
        mark = "?" if table.verdict[row][column] == "unclear" else "!" if gamma and not pays else ""
        return f"{gamma}{mark} ({table.speedup[row][column]:.2f})" if wide and pays else f"{gamma}{mark}"

    for row, batch in enumerate(table.batch_sizes):
        start = table.break_even_context[row]
        cells = [cell(row, column) for column in range(len(contexts))]
        shown.add_row(str(batch), *cells, _faster_from(start, contexts[0]))
    return shown


def _faster_from(start: float | None, shortest: int) -> str:
    """The context from which on the speedup is above 1; the table's first context is only a bound."""
    if start is None:
        return "-"
    return f"<= {_short(shortest)}" if start <= shortest else _short(round(start))


def _short(tokens: int) -> str:
    return f"{tokens / 1024:.3g}k" if tokens >= 1024 else str(tokens)


def _breakdown_table(breakdown: dict[str, list[Operation]], gamma: int) -> Table:
    columns: list[tuple[str, JustifyMethod]] = [
        ("pass", "left"), ("operation", "left"), ("ms", "right"), ("ceiling ms", "right"), ("bound by", "left"),
    ]  # fmt: skip
    table = _table(columns)
    for name, operations in breakdown.items():
        if gamma == 0 and name != "autoregressive":
            continue
        for op in sorted(operations, key=lambda each: -each.time_s):
            table.add_row(name, op.op, _ms(op.time_s), _ms(op.ceiling_s), op.bound_by)
    return table


def _memory_line(memory: MemoryUse) -> str:
    parts = (("weights", memory.weights_bytes), ("KV", memory.kv_bytes), ("draft weights", memory.draft_weights_bytes),
             ("draft KV", memory.draft_kv_bytes), ("workspace", memory.workspace_bytes),
             ("of", memory.capacity_bytes))  # fmt: skip
    sizes = ", ".join(f"{label} {format_bytes(size)}" for label, size in parts)
    return (
        f"memory per device: {sizes}; largest batch {memory.largest_batch:.0f} "
        f"(autoregressive {memory.largest_autoregressive_batch:.0f})"
    )
