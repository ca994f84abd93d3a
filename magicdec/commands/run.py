"""`magicdec run`: decode for real, autoregressive and speculative, and measure."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from magicdec.commands.options import (
    OutputFormat,
    console,
    end_progress,
    parse_floats,
    parse_ints,
    progress_printer,
    require,
)
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec

if TYPE_CHECKING:
    from magicdec.records import Record
    from magicdec.validate.request import BenchmarkRequest

EPILOG = """Examples:\n
  magicdec run --batch 32 --context 4096 --draft-budget 256 --gamma 3\n
  magicdec run --gamma 1,2,3 --draft-budget 128,256 --records results.jsonl --resume\n
  magicdec run --model llama-3.2-1b --weights random --prompts random --simulate-acceptance 0.8
"""


def run_command(
    model: Annotated[str, typer.Option(help="Catalog name, or a Hugging Face checkpoint directory.")] = "embedded",
    weights: Annotated[
        Literal["checkpoint", "random"], typer.Option(help="checkpoint, or random (seeded) for a model without one.")
    ] = "checkpoint",
    draft: Annotated[str, typer.Option(help="self, none, ngram, or a draft model.")] = "self",
    draft_method: Annotated[str, typer.Option(help="streamingllm, snapkv, topk, full or ngram.")] = "streamingllm",
    draft_budget: Annotated[str, typer.Option(help="KV slots a draft step reads; a list measures each.")] = "256",
    gamma: Annotated[str, typer.Option(help="Drafted tokens per step; a list measures each.")] = "3",
    batch: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 8,
    context: Annotated[int, typer.Option(min=2, help="Tokens of the longest prompt.")] = 2048,
    context_spread: Annotated[float, typer.Option(min=0, max=0.9, help="Prompts are this share shorter, evenly.")] = 0,
    gen_len: Annotated[int, typer.Option(min=1, help="Tokens to generate per sequence.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the smallest set with this probability.")] = None,
    seed: Annotated[int, typer.Option(help="Seeds prompts, weights and sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    prompts: Annotated[str, typer.Option(help="stdlib, recall, random, or a text file or directory.")] = "stdlib",
    simulate_acceptance: Annotated[
        str | None, typer.Option(help="Prescribed acceptance: a rate, or one per position.")
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Interleaved repetitions.")] = 3,
    run_to_end: Annotated[bool, typer.Option(help="Also measure the drain of a static batch.")] = False,
    stop_at_eos: Annotated[bool, typer.Option(help="Let a sequence end at its end-of-sequence token.")] = False,
    records: Annotated[Path | None, typer.Option(help="Append one record per configuration to this file.")] = None,
    resume: Annotated[bool, typer.Option(help="Skip what the records file already holds.")] = False,
    save_output: Annotated[Path | None, typer.Option(help="Write prompts and generated text as JSON lines.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")] = False,
    output_format: Annotated[OutputFormat, typer.Option("--format", help="How to print.")] = OutputFormat.TABLE,
) -> None:
    """Decode a batch for real, autoregressive and speculative, and measure both."""
    from magicdec.validate.environment import bind_threads

    bind_threads()
    from magicdec.validate.request import BenchmarkRequest

    methods = [draft_method] if draft not in ("none", "ngram") else [draft]
    budgets = parse_ints(draft_budget, "--draft-budget") if methods[0] in ("streamingllm", "snapkv", "topk") else [None]
    speculations = tuple(
        SpeculationSpec(draft=draft, draft_method=method, draft_budget=budget, gamma=g)  # type: ignore[arg-type]  # checked
        for method, budget, g in product(methods, budgets, parse_ints(gamma, "--gamma"))
        if method != "none" and g > 0
    )
    rates = parse_floats(simulate_acceptance, "--simulate-acceptance") if simulate_acceptance else None
    require(rates is None or all(0 <= r <= 1 for r in rates), "--simulate-acceptance must be rates between 0 and 1")
    request = BenchmarkRequest(
        model=model,
        weights=weights,
        dtype=dtype,
        device=device,
        batch_size=batch,
        context_len=context,
        context_spread=context_spread,
        gen_len=gen_len,
        speculations=speculations,
        sampling=SamplingSpec(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
        prompts=prompts,
        repetitions=repetitions,
        simulate_acceptance=tuple(rates) if rates else None,
        stop_at_eos=stop_at_eos,
        run_to_end=run_to_end,
    )
    results = _measure(request, records=records, resume=resume, save_output=save_output, quiet=quiet)
    _print(results, output_format)


def _measure(
    request: BenchmarkRequest, *, records: Path | None, resume: bool, save_output: Path | None, quiet: bool
) -> list[Record]:
    from magicdec.validate.measurement import benchmark, write_outputs

    show = progress_printer(quiet)
    try:
        session, results = benchmark(request, records=records, resume=resume, progress=show)
        if save_output is not None and session is not None:
            write_outputs(session, save_output)
    finally:
        end_progress(quiet)
    return results


def _print(results: list[Record], output_format: OutputFormat) -> None:
    from magicdec.reports import tables

    if output_format is OutputFormat.TABLE:
        tables.print_run(results, console())
    elif output_format is OutputFormat.CSV:
        print(tables.records_to_csv(results), end="")
    else:
        import msgspec

        print(json.dumps(msgspec.to_builtins(results), indent=1))
