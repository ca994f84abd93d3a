"""`magicdec plan`: which draft, budget and gamma; on how many devices; or no speculation. Needs no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from magicdec.commands import completion
from magicdec.commands.options import OutputFormat, parse_ints, parse_rates
from magicdec.units import MILLI

DEFAULT_MODEL = "llama-3.1-8b"
DEFAULT_HARDWARE = "a100-sxm-80gb"
TABLE_WIDTH = 80
MAX_FRONTIER_ROWS = 16
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
    from magicdec.perfmodel.drafts import load_profiles
    from magicdec.perfmodel.planner import PlanRequest, plan
    from magicdec.specs.speculation import SamplingSpec
    from magicdec.specs.workload import load_workload

    request = PlanRequest(
        model=model,
        hardware=tuple(part.strip() for part in hardware.split(",") if part.strip()),
        engine=engine,
        tp_size=tp,
        num_gpus=gpus,
        batch_sizes=tuple(parse_ints(batch, "--batch")) if batch else (),
        context_lens=tuple(parse_ints(context, "--context")),
        gen_len=gen_len,
        gamma=gamma,
        draft=draft,
        draft_method=draft_method,
        draft_budgets=tuple(parse_ints(draft_budget, "--draft-budget")) if draft_budget else (),
        draft_tp_size=draft_tp,
        sampling=SamplingSpec(temperature=temperature, top_p=top_p),
        acceptance_rate=parse_rates(acceptance_rate),
        acceptance=load_profiles(acceptance or (), draft=draft, method=draft_method),
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        draft_weight_dtype=draft_weight_dtype,
        draft_kv_dtype=draft_kv_dtype,
        tpot_limit_s=tpot_ms * MILLI if tpot_ms is not None else None,
        ttft_limit_s=ttft_ms * MILLI if ttft_ms is not None else None,
        workload=load_workload(workload) if workload else None,
        price_per_hour_usd=price,
    )
    document = plan(request)
    if record is not None:
        _record(document.document, record)
    if output_format is OutputFormat.JSON:
        print(document.to_json())
    elif output_format is OutputFormat.CSV:
        print(document.to_csv(), end="")
    else:
        _print_tables(document.document, why)


def _record(document: dict[str, Any], path: Path) -> None:
    """Appends every evaluated row as a record of `source: analytical`."""
    from magicdec.records import Record, append_record, current_environment

    environment = current_environment()
    fields = set(Record.__struct_fields__)
    request = document["request"]
    for row in [*document["autoregressive_rows"], *document["candidates"]]:
        known = {key: value for key, value in row.items() if key in fields}
        append_record(
            path,
            Record(
                **{
                    **known,
                    "kind": "plan",
                    "source": "analytical",
                    "model": document["model"],
                    "engine": document["engine"],
                    "temperature": request["temperature"],
                    "top_p": request["top_p"],
                    "gen_len": request["gen_len"] or None,
                    "environment": environment,
                }
            ),
        )


def _print_tables(document: dict[str, Any], why: bool) -> None:
    from rich.console import Console

    on_terminal = sys.stdout.isatty()
    console = Console(width=None if on_terminal else TABLE_WIDTH, highlight=False, soft_wrap=False)
    best, alone = document["best"], document["autoregressive"]
    console.print(
        f"[bold]{document['model']}[/bold] on {best['tp_size']} x {document['hardware']}, engine {document['engine']}, "
        f"batch {best['batch_size']}, context {best['context_len']}"
    )
    ceiling = document["best_autoregressive"]
    console.print(
        f"autoregressive: {_ms(alone['tpot_s'])} ms per token, {alone['tokens_per_s']:.0f} tokens/s, "
        f"bound by {alone['bound_by']}"
        + (f"; at its best batch {ceiling[0]['batch_size']}: {ceiling[0]['tokens_per_s']:.0f}" if ceiling else "")
    )
    searched = not document["request"]["batch_sizes"] and len(document["pareto"]) > 1
    if searched:
        rows = document["pareto"]
        shown = rows[:: max(1, -(-len(rows) // MAX_FRONTIER_ROWS))]
        console.print(_cases_table(shown, "latency against throughput: nothing beats these in both"))
    elif len(document["best_by_case"]) > 1:
        console.print(_cases_table(document["best_by_case"], "the best of each case"))
    elif document["candidates"]:
        console.print(_candidates_table(document["candidates"]))
    if any(row["acceptance_extrapolated"] for row in document["candidates"]):
        console.print("* acceptance extrapolated from the budgets and contexts it was measured at", style="dim")
    console.print(_verdict(document))
    if "speedup_static_batch" in best:
        console.print(f"with a static batch, which waits for its slowest sequence: {best['speedup_static_batch']:.2f}x")
    if "prefill_share" in best:
        console.print(
            f"workload: prefill takes {best['prefill_share']:.0%} of the devices' time; "
            f"{best['gpu_hours_per_million_requests']:.0f} GPU-hours per million requests"
        )
    if any(any(row) for row in document["gamma_table"]["gamma"]):
        console.print(_gamma_table(document["gamma_table"]))
    if why:
        console.print(_breakdown_table(document["breakdown"], best["gamma"]))
        console.print(_memory_line(document["memory"]))
    if document["needs_acceptance"]:
        names = ", ".join(_wanted(each) for each in document["needs_acceptance"])
        console.print(f"needs acceptance (none published for {document['model']}): {names}", style="dim")
    for note in document["notes"]:
        console.print(f"note: {note}", style="dim")


def _wanted(lacking: dict[str, Any]) -> str:
    rate = lacking["break_even_acceptance_rate"]
    pays = f"pays from a rate of {rate:.2f}" if rate is not None else "pays at no rate"
    return f"{lacking['draft']}/{lacking['draft_method']} ({pays})"


def _ms(seconds: float) -> str:
    return f"{seconds / MILLI:.3g}" if seconds < 1 else f"{seconds / MILLI:.0f}"


def _table(columns: list[tuple[str, str]], title: str) -> Any:
    from rich.table import Table

    table = Table(title=title, box=None, padding=(0, 1, 0, 0), title_justify="left", title_style="bold")
    for name, side in columns:
        table.add_column(name, justify="right" if side == "r" else "left", no_wrap=True)
    return table


def _candidates_table(rows: list[dict[str, Any]], limit: int = 12) -> Any:
    """The best gamma of each draft and budget, best first."""
    table = _table(
        [("draft", "l"), ("budget", "r"), ("gamma", "r"), ("draft", "r"), ("verify", "r"), ("tokens", "r"),
         ("ms/tok", "r"), ("speedup (90 %)", "r"), ("bound by", "l")],
        "candidates, each with its best gamma (draft step and verification in ms)",
    )  # fmt: skip
    seen: set[tuple[Any, ...]] = set()
    for row in rows:
        key = (row["draft"], row["draft_method"], row["draft_budget"])
        if key in seen or len(seen) == limit:
            continue
        seen.add(key)
        table.add_row(
            _draft_name(row), _budget(row), str(row["gamma"]), _ms(row["draft_step_s"]),
            _ms(row["verify_step_s"]), f"{row['expected_tokens_per_step']:.2f}", _ms(row["tpot_s"]),
            f"{row['speedup']:.2f} {row['speedup_low']:.2f}-{row['speedup_high']:.2f}",
            row["bound_by"] if row["fits"] else "no room",
        )  # fmt: skip
    return table


def _budget(row: dict[str, Any]) -> str:
    """A star marks acceptance outside the range that it was measured in."""
    return str(row["draft_budget"] or "-") + ("*" if row["acceptance_extrapolated"] else "")


def _draft_name(row: dict[str, Any]) -> str:
    if row["draft"] in ("self", "ngram", "eagle", "none"):
        return str(row["draft_method"])
    return f"{row['draft'][:8]}/{row['draft_method'][:4]}"


def _cases_table(rows: list[dict[str, Any]], title: str, limit: int = 40) -> Any:
    table = _table(
        [("hardware", "l"), ("context", "r"), ("batch", "r"), ("tp", "r"), ("draft", "l"),
         ("budget", "r"), ("gamma", "r"), ("ms/tok", "r"), ("tok/s/GPU", "r"), ("x", "r"), ("$/Mtok", "r")],
        title,
    )  # fmt: skip
    for row in rows[:limit]:
        cost = row["cost_per_million_tokens_usd"]
        table.add_row(
            row["hardware"][:9], str(row["context_len"]), str(row["batch_size"]), str(row["tp_size"]),
            _draft_name(row)[:9], _budget(row), str(row["gamma"]), _ms(row["tpot_s"]),
            f"{row['tokens_per_s_per_gpu']:.0f}", f"{row['speedup']:.2f}", f"{cost:.2f}" if cost else "-",
        )  # fmt: skip
    return table


def _verdict(document: dict[str, Any]) -> str:
    best = document["best"]
    places = {(row["hardware"], row["context_len"]) for row in document["best_by_case"]}
    several = len(places) > 1 or len(document["request"]["batch_sizes"]) > 1
    label = "most tokens/s per device of all" if several else "best"
    if best["gamma"] == 0 and not document["candidates"] and document["needs_acceptance"]:
        return (
            "[bold]best: autoregressive[/bold], for want of a draft whose acceptance is known; "
            "give --acceptance-rate or --acceptance FILE"
        )
    if best["gamma"] == 0:
        return f"[bold]{label}: no speculation[/bold], decode autoregressively"
    budget = f", budget {best['draft_budget']}" if best["draft_budget"] else ""
    pays = best["break_even_gen_len"]
    return (
        f"[bold]{label}: {best['draft']}/{best['draft_method']}{budget}, gamma {best['gamma']}[/bold]: "
        f"{best['speedup']:.2f}x ({best['speedup_low']:.2f}-{best['speedup_high']:.2f}), "
        f"{best['tokens_per_s']:.0f} tokens/s; {best['speedup_vs_best_autoregressive']:.2f}x autoregressive at "
        "its best batch" + (f"; pays from {pays} generated tokens" if pays and pays > 1 else "")
    )


def _gamma_table(table: dict[str, Any]) -> Any:
    contexts = table["context_lens"]
    shown = _table(
        [("batch", "r"), *((_short(context), "r") for context in contexts), ("pays from", "r")],
        "best gamma (speedup) by batch and context; 0: leave speculation off",
    )
    wide = len(contexts) <= 6
    for batch, gammas, speedups, start in zip(
        table["batch_sizes"], table["gamma"], table["speedup"], table["break_even_context"], strict=True
    ):
        cells = [
            f"{gamma} ({speedup:.2f})" if wide and gamma else str(gamma)
            for gamma, speedup in zip(gammas, speedups, strict=True)
        ]
        shown.add_row(str(batch), *cells, _short(start) if start else "never")
    if not wide:
        shown.title = "best gamma by batch and context; 0: leave speculation off"
    return shown


def _short(tokens: int) -> str:
    return f"{tokens / 1024:.3g}k" if tokens >= 1024 else str(tokens)


def _breakdown_table(breakdown: dict[str, list[dict[str, Any]]], gamma: int) -> Any:
    table = _table(
        [("pass", "l"), ("operation", "l"), ("ms", "r"), ("ceiling ms", "r"), ("bound by", "l")],
        "where a step's time goes (the draft's row is one of its steps)",
    )
    for name, rows in breakdown.items():
        if gamma == 0 and name != "autoregressive":
            continue
        for row in sorted(rows, key=lambda each: -float(each["time_s"])):
            table.add_row(name, row["op"], _ms(row["time_s"]), _ms(row["ceiling_s"]), row["bound_by"])
    return table


def _memory_line(memory: dict[str, float]) -> str:
    from magicdec.units import format_bytes

    parts = (("weights", "weights_bytes"), ("KV", "kv_bytes"), ("draft weights", "draft_weights_bytes"),
             ("draft KV", "draft_kv_bytes"), ("workspace", "workspace_bytes"), ("of", "capacity_bytes"))  # fmt: skip
    sizes = ", ".join(f"{label} {format_bytes(memory[key])}" for label, key in parts)
    return (
        f"memory per device: {sizes}; largest batch {memory['largest_batch']:.0f} "
        f"(autoregressive {memory['largest_autoregressive_batch']:.0f})"
    )
