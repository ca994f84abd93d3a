"""`magicdec plan`: which draft, budget and gamma; on how many devices; or no speculation. Needs no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicdec.commands import completion
from magicdec.commands.options import OutputFormat, parse_ints, parse_rates
from magicdec.units import MILLI

if TYPE_CHECKING:
    from magicdec.plan_document import Candidate, Case, GammaTable, MemoryUse, NeedsAcceptance, Operation, Plan

DEFAULT_MODEL = "llama-3.1-8b"
DEFAULT_HARDWARE = "a100-sxm-80gb"
TABLE_WIDTH = 80
MAX_FRONTIER_ROWS = 16
NO_ROOM = "no room"
EPILOG = """Examples:\n
  magicdec plan\n
  magicdec plan --model llama-3.1-70b --hardware h100-sxm-80gb --gpus 8 --context 16384,65536\n
  magicdec plan --draft none --batch 64 --why\n
  magicdec plan --acceptance-rate 0.8 --format json
"""


def plan_command(
    model: Annotated[
        str, typer.Option(help="Catalog name, config.json or its directory.", autocompletion=completion.models)
    ] = DEFAULT_MODEL,
    hardware: Annotated[
        str, typer.Option(help="Catalog names or TOML files, comma-separated.", autocompletion=completion.hardware_list)
    ] = DEFAULT_HARDWARE,
    engine: Annotated[
        str | None,
        typer.Option(help="magicdec-2024 (GPUs), ours (CPUs), or a TOML file.", autocompletion=completion.engines),
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel size; default: the node.")] = None,
    gpus: Annotated[int | None, typer.Option(help="Devices to use: searches tp and replicas.")] = None,
    batch: Annotated[str | None, typer.Option(help="Sequences per replica, a list; default 64, or searched.")] = None,
    context: Annotated[str, typer.Option(help="Prompt lengths, a list.")] = "32768",
    gen_len: Annotated[int, typer.Option(help="Tokens generated after the prompt.")] = 0,
    gamma: Annotated[int | None, typer.Option(help="Drafted tokens per step; default: searched.")] = None,
    draft: Annotated[
        str | None, typer.Option(help="self, none, ngram, eagle, or a model.", autocompletion=completion.planned_drafts)
    ] = None,
    draft_method: Annotated[
        str | None, typer.Option(help="streamingllm, snapkv, topk or full.", autocompletion=completion.planned_methods)
    ] = None,
    draft_budget: Annotated[str | None, typer.Option(help="KV slots per sequence, a list.")] = None,
    draft_tp: Annotated[int | None, typer.Option(help="Ranks of the draft; default: all.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None,
    acceptance_rate: Annotated[
        str | None, typer.Option(help="One rate for every position, or a list by position.")
    ] = None,
    acceptance: Annotated[list[Path] | None, typer.Option(help="Measured acceptance profile; repeatable.")] = None,
    weight_dtype: Annotated[
        str | None, typer.Option(help="bf16, fp8, int8, int4 or fp32.", autocompletion=completion.formats)
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="bf16, fp8, int4 or fp32.", autocompletion=completion.formats)
    ] = None,
    draft_weight_dtype: Annotated[
        str | None, typer.Option(help="Weights of the draft.", autocompletion=completion.formats)
    ] = None,
    draft_kv_dtype: Annotated[
        str | None, typer.Option(help="KV cache of the draft.", autocompletion=completion.formats)
    ] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Limit on the time per output token.")] = None,
    ttft_ms: Annotated[float | None, typer.Option(help="Limit on the time to the first token.")] = None,
    price: Annotated[float | None, typer.Option(help="Dollars per device and hour.")] = None,
    workload: Annotated[Path | None, typer.Option(help="Distribution of prompt and output lengths.")] = None,
    record: Annotated[Path | None, typer.Option(help="Append the evaluated grid as records.")] = None,
    output_format: Annotated[OutputFormat, typer.Option("--format", help="table, json or csv.")] = OutputFormat.TABLE,
    why: Annotated[bool, typer.Option("--why", help="Show the breakdown by operation.")] = False,
) -> None:
    """Predict which speculative decoding pays, and by how much."""
    from magicdec.api import plan

    answer = plan(
        model=model,
        hardware=[part.strip() for part in hardware.split(",") if part.strip()],
        engine=engine,
        tp=tp,
        gpus=gpus,
        batch=parse_ints(batch, "--batch") if batch else (),
        context=parse_ints(context, "--context"),
        gen_len=gen_len,
        gamma=gamma,
        draft=draft,
        draft_method=draft_method,
        draft_budget=parse_ints(draft_budget, "--draft-budget") if draft_budget else (),
        draft_tp=draft_tp,
        temperature=temperature,
        top_p=top_p,
        acceptance_rate=parse_rates(acceptance_rate),
        acceptance=acceptance or (),
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        draft_weight_dtype=draft_weight_dtype,
        draft_kv_dtype=draft_kv_dtype,
        tpot_ms=tpot_ms,
        ttft_ms=ttft_ms,
        price=price,
        workload=workload,
    )
    if record is not None:
        _record(answer, record)
    if output_format is OutputFormat.JSON:
        print(answer.to_json())
    elif output_format is OutputFormat.CSV:
        print(answer.to_csv(), end="")
    else:
        _print_tables(answer, why)


def _record(answer: Plan, path: Path) -> None:
    """Appends every evaluated row as a record of `source: analytical`."""
    import msgspec

    from magicdec.records import append_record, current_environment
    from magicdec.reports.data import candidate_record

    environment = current_environment()
    for row in answer.rows:
        planned = candidate_record(answer, row)
        append_record(path, msgspec.structs.replace(planned, kind="plan", environment=environment))


def _print_tables(answer: Plan, why: bool) -> None:
    from rich.console import Console

    on_terminal = sys.stdout.isatty()
    console = Console(width=None if on_terminal else TABLE_WIDTH, highlight=False, soft_wrap=False)
    for case in answer.cases:
        _print_case(console, answer, case)
    if any(row.acceptance_extrapolated for row in answer.candidates):
        console.print("* acceptance extrapolated from the budgets and contexts it was measured at", style="dim")
    if why:
        console.print(_breakdown_table(answer.breakdown, answer.best.gamma))
        console.print(_memory_line(answer.memory))
    if answer.needs_acceptance:
        names = ", ".join(_wanted(each) for each in answer.needs_acceptance)
        console.print(f"needs acceptance (none published for {answer.model}): {names}", style="dim")
    for note in answer.notes:
        console.print(f"note: {note}", style="dim")


def _print_case(console: Any, answer: Plan, case: Case) -> None:
    """One device and context: what was compared, the best, and the best gamma around it."""
    best, alone, ceiling = case.best, case.autoregressive, case.best_autoregressive
    console.print(
        f"[bold]{answer.model}[/bold] on {best.tp_size} x {case.hardware}, engine {answer.engine}, "
        f"batch {best.batch_size}, context {case.context_len}"
    )
    console.print(
        f"autoregressive: {_ms(alone.tpot_s)} ms per token, {alone.tokens_per_s:.0f} tokens/s, "
        f"bound by {alone.bound_by}"
        + (f"; at its best batch {ceiling.batch_size}: {ceiling.tokens_per_s:.0f}" if ceiling is not None else "")
    )
    of_case = [row for row in answer.candidates if (row.hardware, row.context_len) == (case.hardware, case.context_len)]
    if not case.best_by_batch and len(case.pareto) > 1:
        shown = case.pareto[:: max(1, -(-len(case.pareto) // MAX_FRONTIER_ROWS))]
        console.print(_cases_table(shown, "latency against throughput: nothing beats these in both"))
    elif len(case.best_by_batch) > 1:
        console.print(_cases_table(case.best_by_batch, "the best of each batch"))
    elif of_case:
        console.print(_candidates_table(of_case))
    console.print(_verdict(answer, case, has_candidates=bool(of_case)))
    if best.speedup_static_batch is not None:
        console.print(f"with a static batch, which waits for its slowest sequence: {best.speedup_static_batch:.2f}x")
    if best.prefill_share is not None:
        console.print(
            f"workload: prefill takes {best.prefill_share:.0%} of the devices' time; "
            f"{best.gpu_hours_per_million_requests:.0f} GPU-hours per million requests"
        )
    if any(any(row) for row in case.gamma_table.gamma):
        console.print(_gamma_table(case.gamma_table))


def _wanted(lacking: NeedsAcceptance) -> str:
    rate = lacking.break_even_acceptance_rate
    pays = f"quicker from a rate of {rate:.2f}" if rate is not None else "quicker at no rate"
    return f"{lacking.draft}/{lacking.draft_method} ({pays})"


def _ms(seconds: float) -> str:
    return f"{seconds / MILLI:.3g}" if seconds < 1 else f"{seconds / MILLI:.0f}"


def _table(columns: list[tuple[str, str]], title: str) -> Any:
    from rich.table import Table

    table = Table(title=title, box=None, padding=(0, 1, 0, 0), title_justify="left", title_style="bold")
    for name, side in columns:
        table.add_column(name, justify="right" if side == "r" else "left", no_wrap=True)
    return table


def _candidates_table(rows: list[Candidate], limit: int = 12) -> Any:
    """The best gamma of each draft and budget, best first."""
    table = _table(
        [("draft", "l"), ("budget", "r"), ("gamma", "r"), ("draft", "r"), ("verify", "r"), ("tokens", "r"),
         ("ms/tok", "r"), ("speedup (90 %)", "r"), ("verdict", "l")],
        "candidates, each with its best gamma (draft step and verification in ms)",
    )  # fmt: skip
    seen: set[tuple[Any, ...]] = set()
    for row in rows:
        key = (row.draft, row.draft_method, row.draft_budget)
        if key in seen or len(seen) == limit:
            continue
        seen.add(key)
        table.add_row(
            _draft_name(row), _budget(row), str(row.gamma), _ms(row.draft_step_s),
            _ms(row.verify_step_s), f"{row.expected_tokens_per_step:.2f}", _ms(row.tpot_s),
            f"{row.speedup:.2f} {row.speedup_low:.2f}-{row.speedup_high:.2f}",
            row.verdict if row.fits else NO_ROOM,
        )  # fmt: skip
    return table


def _budget(row: Candidate) -> str:
    """A star marks acceptance outside the range that it was measured in."""
    return str(row.draft_budget or "-") + ("*" if row.acceptance_extrapolated else "")


def _draft_name(row: Candidate) -> str:
    if row.draft in ("self", "ngram", "eagle", "none"):
        return row.draft_method
    return f"{row.draft[:8]}/{row.draft_method[:4]}"


def _cases_table(rows: list[Candidate], title: str, limit: int = 40) -> Any:
    table = _table(
        [("batch", "r"), ("tp", "r"), ("draft", "l"), ("budget", "r"), ("gamma", "r"), ("ms/tok", "r"),
         ("tok/s/GPU", "r"), ("x", "r"), ("verdict", "l"), ("$/Mtok", "r")],
        title,
    )  # fmt: skip
    for row in rows[:limit]:
        cost = row.cost_per_million_tokens_usd
        table.add_row(
            str(row.batch_size), str(row.tp_size), _draft_name(row)[:13], _budget(row), str(row.gamma),
            _ms(row.tpot_s), f"{row.tokens_per_s_per_gpu:.0f}", f"{row.speedup:.2f}",
            (row.verdict if row.is_speculative else "-") if row.fits else NO_ROOM, f"{cost:.2f}" if cost else "-",
        )  # fmt: skip
    return table


def _verdict(answer: Plan, case: Case, *, has_candidates: bool) -> str:
    best = case.best
    if not best.is_speculative and not has_candidates and answer.needs_acceptance:
        return (
            "[bold]best: autoregressive[/bold], for want of a draft whose acceptance is known; "
            "give --acceptance-rate or --acceptance FILE"
        )
    if not best.is_speculative:
        return "[bold]best: no speculation[/bold], decode autoregressively"
    budget = f", budget {best.draft_budget}" if best.draft_budget else ""
    gain, paid = best.speedup_vs_best_autoregressive, best.break_even_gen_len
    return (
        f"[bold]best: {best.draft}/{best.draft_method}{budget}, gamma {best.gamma}: {best.verdict}[/bold]; "
        f"{best.speedup:.2f}x ({best.speedup_low:.2f}-{best.speedup_high:.2f}), {best.tokens_per_s:.0f} tokens/s; "
        + (f"{gain:.2f}x autoregressive at its best batch" if gain is not None else "alone in keeping the limits")
        + (f"; prefill paid back from {paid} tokens" if paid and paid > 1 else "")
    )


def _gamma_table(table: GammaTable) -> Any:
    """Cells that do not fit are empty; a question mark stands where it is unclear whether speculation pays."""
    contexts = table.context_lens
    shown = _table(
        [("batch", "r"), *((_short(context), "r") for context in contexts), ("quicker from", "r")],
        "best gamma by batch and context; 0: off, ?: unclear, -: no room",
    )
    wide = len(contexts) <= 6

    def cell(row: int, column: int) -> str:
        if not table.fits[row][column]:
            return "-"
        gamma, doubt = table.gamma[row][column], "?" if table.verdict[row][column] == "unclear" else ""
        return f"{gamma}{doubt} ({table.speedup[row][column]:.2f})" if wide and gamma else f"{gamma}{doubt}"

    for row, batch in enumerate(table.batch_sizes):
        start = table.break_even_context[row]
        cells = [cell(row, column) for column in range(len(contexts))]
        shown.add_row(str(batch), *cells, _short(round(start)) if start else "never")
    return shown


def _short(tokens: int) -> str:
    return f"{tokens / 1024:.3g}k" if tokens >= 1024 else str(tokens)


def _breakdown_table(breakdown: dict[str, list[Operation]], gamma: int) -> Any:
    table = _table(
        [("pass", "l"), ("operation", "l"), ("ms", "r"), ("ceiling ms", "r"), ("bound by", "l")],
        "where a step's time goes (the draft's row is one of its steps)",
    )
    for name, operations in breakdown.items():
        if gamma == 0 and name != "autoregressive":
            continue
        for op in sorted(operations, key=lambda each: -each.time_s):
            table.add_row(name, op.op, _ms(op.time_s), _ms(op.ceiling_s), op.bound_by)
    return table


def _memory_line(memory: MemoryUse) -> str:
    from magicdec.units import format_bytes

    parts = (("weights", memory.weights_bytes), ("KV", memory.kv_bytes), ("draft weights", memory.draft_weights_bytes),
             ("draft KV", memory.draft_kv_bytes), ("workspace", memory.workspace_bytes),
             ("of", memory.capacity_bytes))  # fmt: skip
    sizes = ", ".join(f"{label} {format_bytes(size)}" for label, size in parts)
    return (
        f"memory per device: {sizes}; largest batch {memory.largest_batch:.0f} "
        f"(autoregressive {memory.largest_autoregressive_batch:.0f})"
    )
