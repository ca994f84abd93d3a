"""`magicdec run`: decode for real, autoregressive and speculative, and measure."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from magicdec.commands import completion
from magicdec.commands.options import OutputFormat, console, parse_floats, parse_ints, require
from magicdec.commands.run_plan import NOT_RUN, read_plan
from magicdec.errors import ConfigError, MagicdecError
from magicdec.specs.speculation import SELF, SPARSE_METHODS, SamplingSpec, SpeculationSpec

if TYPE_CHECKING:
    from magicdec.measure.configuration import BenchmarkRequest, Outputs
    from magicdec.records import Record

EPILOG = """\b
Examples:
  magicdec run --batch 32 --context 4096 --draft-budget 256 --gamma 3
  magicdec run --gamma 1,2,3 --draft-budget 128,256 --records results.jsonl --resume
  magicdec run --model llama-3.2-1b --weights random --prompts random --simulate-acceptance 0.8
  magicdec run --plan plan.json --tp 2
"""
MAX_COUNT = 1_000_000
FIRST_RANK_SPEAKS_S = 6.0
"""Under torchrun, how long the other ranks wait with an error that the first one may have as well."""


def run_command(
    context_: typer.Context,
    engine: Annotated[
        Literal["ours", "vllm"], typer.Option(help="ours, or vllm with magicdec's plugin (docs/vllm.md).")
    ] = "ours",
    model: Annotated[
        str,
        typer.Option(help="Catalog name, or a Hugging Face checkpoint directory.", autocompletion=completion.models),
    ] = "embedded",
    weights: Annotated[
        Literal["checkpoint", "random"], typer.Option(help="checkpoint, or random (seeded) for a model without one.")
    ] = "checkpoint",
    draft: Annotated[
        str, typer.Option(help="self, none, ngram, or a draft model.", autocompletion=completion.run_drafts)
    ] = "self",
    draft_method: Annotated[
        str,
        typer.Option(
            help="streamingllm, snapkv or topk; of a model: full, streamingllm.", autocompletion=completion.run_methods
        ),
    ] = "streamingllm",
    draft_budget: Annotated[
        str | None, typer.Option(help="KV slots a draft step reads; a list measures each.")
    ] = "256",
    gamma: Annotated[str, typer.Option(help="Drafted tokens per step; a list measures each.")] = "3",
    plan: Annotated[Path | None, typer.Option(help="Run a plan's best and runner-up; options override.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Ranks that share the model; starts them itself.")] = 1,
    draft_tp: Annotated[int | None, typer.Option(min=1, help="Ranks of the draft model; default: all.")] = None,
    draft_weight_dtype: Annotated[
        str | None,
        typer.Option(
            help="The draft's weights: bf16, fp8, int8 or int4; a list measures each.",
            autocompletion=completion.draft_formats,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 8,
    context: Annotated[int, typer.Option(min=2, help="Tokens of the longest prompt.")] = 2048,
    context_spread: Annotated[
        float, typer.Option(min=0, max=0.9, help="Shorten prompts by up to this share, evenly spread.")
    ] = 0,
    gen_len: Annotated[int, typer.Option(min=1, help="Tokens to generate per sequence.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the smallest set with this probability.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seeds prompts, weights and sampling.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16.", autocompletion=completion.dtypes)
    ] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.", autocompletion=completion.devices)] = "cpu",
    prompts: Annotated[
        str,
        typer.Option(
            help="stdlib, recall, random, noise, or a text file or directory.", autocompletion=completion.prompts
        ),
    ] = "stdlib",
    simulate_acceptance: Annotated[
        str | None, typer.Option(help="Prescribed acceptance: a rate, or one per position.")
    ] = None,
    queue: Annotated[
        int | None, typer.Option(min=1, max=MAX_COUNT, help="Prompts in all; those that wait refill free slots.")
    ] = None,
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive", help="Choose gamma each step, up to --gamma: learnt while decoding, or from --plan's table."
        ),
    ] = False,
    cuda_graphs: Annotated[bool, typer.Option(help="Replay steps as captured graphs, on a CUDA device.")] = True,
    repetitions: Annotated[int, typer.Option(min=1, max=MAX_COUNT, help="Interleaved repetitions.")] = 3,
    run_to_end: Annotated[bool, typer.Option(help="Also measure the drain of a static batch.")] = False,
    stop_at_eos: Annotated[bool, typer.Option(help="Let a sequence end at its end-of-sequence token.")] = False,
    records: Annotated[Path | None, typer.Option(help="Append one record per configuration to this file.")] = None,
    resume: Annotated[bool, typer.Option(help="Skip what the records file already holds.")] = False,
    save_output: Annotated[Path | None, typer.Option(help="Write prompts and generated text as JSON lines.")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="At the end, show one sequence's text.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")] = False,
    output_format: Annotated[OutputFormat, typer.Option("--format", help="How to print.")] = OutputFormat.TABLE,
) -> None:
    """Decode with and without a draft, and measure both.

    Autoregressive and speculative runs are interleaved, in one engine and from one prefill.
    """
    given = dict(context_.params)
    explicit = {name for name in given if (source := context_.get_parameter_source(name)) and source.name != "DEFAULT"}
    planned: list[dict[str, Any]] = [{}]
    if plan is not None:
        is_draft_given = bool(explicit & {"draft", "draft_method"})
        planned = read_plan(plan, is_draft_given=is_draft_given, is_dtype_given="dtype" in explicit)
    chosen = [{**given, **_not_in(explicit, row)} for row in planned]
    requests = _merge([_request(options, explicit) for options in chosen])
    require(not stream or prompts not in ("random", "noise"), f"--stream shows text, and --prompts {prompts} has none")
    require(not resume or records is not None, "--resume goes on with a records file; give --records too")
    from magicdec.measure.configuration import Outputs

    outputs = Outputs(records=records, resume=resume, save_output=save_output, stream=stream, quiet=quiet)
    outputs.check(plan=plan, prompts=Path(prompts))
    results = _run_in_vllm(requests, outputs) if engine == "vllm" else _run(requests, outputs)
    if results is not None:
        _print(results, output_format)


def _not_in(explicit: set[str], row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in explicit}


def _request(options: dict[str, Any], explicit: set[str]) -> BenchmarkRequest:
    from magicdec.measure.configuration import BenchmarkRequest
    from magicdec.runtime.hub import resolve_hub_name

    weights = options["weights"]
    model, draft = (resolve_hub_name(options[k], with_weights=weights == "checkpoint") for k in ("model", "draft"))
    text = options["simulate_acceptance"]
    rates = parse_floats(text, "--simulate-acceptance") if text else None
    table = options.get("gamma_table") if options["adaptive"] else None
    if table is not None and "gamma" not in explicit:
        options = {**options, "gamma": str(max(table.max_gamma, 1))}
    require(rates is None or all(0 <= r <= 1 for r in rates), "--simulate-acceptance must be rates between 0 and 1")
    return BenchmarkRequest(
        model=model,
        weights=weights,
        dtype=options["dtype"],
        device=options["device"],
        batch_size=options["batch"],
        context_len=options["context"],
        context_spread=options["context_spread"],
        gen_len=options["gen_len"],
        speculations=_speculations({**options, "draft": draft}),
        sampling=SamplingSpec(
            temperature=options["temperature"], top_k=options["top_k"], top_p=options["top_p"], seed=options["seed"]
        ),
        prompts=options["prompts"],
        repetitions=options["repetitions"],
        simulate_acceptance=tuple(rates) if rates else None,
        stop_at_eos=options["stop_at_eos"],
        run_to_end=options["run_to_end"],
        adaptive=options["adaptive"],
        gamma_table=table,
        num_prompts=options["queue"],
        cuda_graphs=options["cuda_graphs"],
        tp_size=_tp_size(options["tp"], is_explicit="tp" in explicit),
    )


def _speculations(options: dict[str, Any]) -> tuple[SpeculationSpec, ...]:
    draft, method = options["draft"], options["draft_method"]
    if draft == "none":
        return ()
    if draft in NOT_RUN or method in NOT_RUN:
        raise ConfigError(
            f"{method if method in NOT_RUN else draft} is planned for but not run; use --draft self, ngram or a model"
        )
    if draft == "ngram" or (draft == SELF and method == "ngram"):
        draft, method = "ngram", "ngram"
    budgets: list[int] | list[None] = [None]
    if method in SPARSE_METHODS:
        require(options["draft_budget"] is not None, f"--draft-method {method} needs --draft-budget")
        budgets = parse_ints(options["draft_budget"], "--draft-budget")
    formats = (options["draft_weight_dtype"] or "").split(",")
    return tuple(
        SpeculationSpec(
            draft=draft,
            draft_method=method,
            draft_budget=budget,
            gamma=gamma,
            draft_tp_size=options["draft_tp"],
            draft_weight_dtype=weight_dtype.strip() or None,
        )
        for budget, weight_dtype, gamma in product(budgets, formats, parse_ints(options["gamma"], "--gamma"))
        if gamma > 0
    )


def _tp_size(wanted: int, *, is_explicit: bool) -> int:
    """Under torchrun the size of its world decides."""
    world_size = os.environ.get("WORLD_SIZE")
    if world_size is None:
        return wanted
    require(not is_explicit or wanted == int(world_size), f"--tp {wanted}, but torchrun started {world_size} ranks")
    return int(world_size)


def _merge(requests: list[BenchmarkRequest]) -> list[BenchmarkRequest]:
    """Requests that differ in what is drafted only become one, so that they are measured side by side."""
    merged: dict[BenchmarkRequest, list[SpeculationSpec]] = {}
    for request in requests:
        merged.setdefault(replace(request, speculations=()), []).extend(request.speculations)
    return [replace(request, speculations=tuple(dict.fromkeys(found))) for request, found in merged.items()]


def _run(requests: list[BenchmarkRequest], outputs: Outputs) -> list[Record] | None:
    """The records; None on ranks other than the first of torchrun's."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return _run_under_torchrun(requests, outputs)
    from magicdec.measure.environment import bind_threads

    if all(request.tp_size == 1 for request in requests):
        bind_threads()
    from magicdec.measure.configuration import check_request
    from magicdec.measure.rank import measure_request
    from magicdec.runtime.launch import launch
    from magicdec.specs.catalog import load_model_spec

    for request in requests:
        check_request(request, load_model_spec(request.model))
    results: list[Record] = []
    for request in requests:
        device_type = request.device.partition(":")[0]
        results += launch(measure_request, request.tp_size, request, outputs, device_type=device_type)
    return results


def _run_in_vllm(requests: list[BenchmarkRequest], outputs: Outputs) -> list[Record]:
    from magicdec.measure.vllm_benchmark import benchmark_in_vllm
    from magicdec.measure.vllm_session import check_vllm_request

    require(outputs.save_output is None and not outputs.stream, "--save-output and --stream need --engine ours")
    for request in requests:
        check_vllm_request(request)
    results: list[Record] = []
    for request in requests:
        results += benchmark_in_vllm(request, records=outputs.records, resume=outputs.resume)
    return results


def _run_under_torchrun(requests: list[BenchmarkRequest], outputs: Outputs) -> list[Record] | None:
    """One error of all ranks is printed by the first alone: it fails at once, and torchrun then ends the others."""
    from magicdec.runtime.launch import end_with_torchrun, take_own_cores

    end_with_torchrun()
    take_own_cores()
    from magicdec.measure.configuration import check_devices
    from magicdec.measure.rank import measure_request
    from magicdec.runtime.distributed import join_world, leave_world

    try:
        for request in requests:
            check_devices(request)
        tp = join_world(requests[0].device.partition(":")[0])
        results = [record for request in requests for record in measure_request(tp, request, outputs)]
        leave_world()
    except MagicdecError:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(FIRST_RANK_SPEAKS_S)
        raise
    return results if tp.rank == 0 else None


def _print(results: list[Record], output_format: OutputFormat) -> None:
    from magicdec.files import rows_to_csv
    from magicdec.records import record_rows
    from magicdec.reports.terminal import print_run

    if output_format is OutputFormat.TABLE:
        print_run(results, console())
    elif output_format is OutputFormat.CSV:
        print(rows_to_csv(record_rows(results)), end="")
    else:
        import msgspec

        print(json.dumps(msgspec.to_builtins(results), indent=1))
