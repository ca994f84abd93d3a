"""`magicdec run`: decode for real, autoregressive and speculative, and measure."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from msgspec import to_builtins

from magicdec.commands import options
from magicdec.commands.options import (
    OutputFormat,
    console,
    option,
    parse_counts,
    parse_floats,
    parse_ints,
    print_as,
    require,
)
from magicdec.errors import ConfigError, MagicdecError
from magicdec.specs import (
    DTYPE_OF_FORMAT,
    HEAD_METHODS,
    LOOKUP_METHODS,
    NOT_RUN,
    SELF,
    SPARSE_METHODS,
    SamplingSpec,
    SpeculationSpec,
    budget_at,
)

if TYPE_CHECKING:
    from magicdec.measure import BenchmarkRequest, Outputs
    from magicdec.schema import Candidate, Plan, Record
    from magicdec.specs import NamedHead

EPILOG = options.examples(
    "run --batch 32 --context 4096 --draft-budget 256 --gamma 3",
    "run --gamma 1,2,3 --draft-budget 128,256 --records results.jsonl --resume",
    "run --model llama-3.2-1b --weights random --prompts random --simulate-acceptance 0.8",
    "run --plan plan.json --tp 2",
)
MAX_COUNT = 1_000_000
FIRST_RANK_SPEAKS_S = 6.0
"""Under torchrun, how long the other ranks wait with an error that the first one may have as well.
"""
OPTION_OF_KEY = {
    "draft": "draft",
    "draft_method": "draft_method",
    "draft_budget": "draft_budget",
    "draft_tp_size": "draft_tp",
    "gamma": "gamma",
    "tp_size": "tp",
    "batch_size": "batch",
    "context_len": "context",
}
"""Keys of a plan's row, and the run's option that each sets."""
REQUESTED = (
    "engine",
    "weights",
    "dtype",
    "device",
    "context_spread",
    "gen_len",
    "prompts",
    "repetitions",
    "stop_at_eos",
    "run_to_end",
    "cuda_graphs",
)
"""Options that a request to measure takes as they are."""
FORMATS_OF_DTYPE = {
    "weight_dtype": "weights",
    "kv_dtype": "a KV cache",
    "draft_weight_dtype": "a draft's weights",
    "draft_kv_dtype": "a draft's KV cache",
}
"""Formats of a plan that the run's dtype decides."""


def run_command(
    context_: typer.Context,
    engine: Annotated[
        options.Runtime, option("ours, or vllm with magicdec's plugin (docs/vllm.md).")
    ] = "ours",
    model: options.Checkpoint = "embedded",
    weights: Annotated[
        Literal["checkpoint", "random"],
        option("checkpoint, or random (seeded) for a model without one."),
    ] = "checkpoint",
    draft: Annotated[
        str,
        option(
            "self, none, ngram, suffix, a head's method or directory, or a draft model."
        ),
    ] = "self",
    draft_model: Annotated[
        str | None,
        option("A trained head's directory; of --draft mtp: default, the target's."),
    ] = None,
    draft_method: Annotated[
        str, option("streamingllm, snapkv or topk; of a model: full, streamingllm.")
    ] = "streamingllm",
    draft_budget: Annotated[
        str | None,
        option("KV slots a draft step reads, or shares (7%); a list measures each."),
    ] = "256",
    gamma: Annotated[
        str, option("Drafted tokens per step; a list measures each.")
    ] = "3",
    plan: Annotated[
        Path | None, option("Run a plan's best and runner-up; options override.")
    ] = None,
    tp: Annotated[
        int, option("Ranks that share the model; starts them itself.", min=1)
    ] = 1,
    draft_tp: Annotated[
        int | None, option("Ranks of the draft model; default: all.", min=1)
    ] = None,
    batch: Annotated[int, option("Sequences decoded together.", min=1)] = 8,
    context: Annotated[int, option("Tokens of the longest prompt.", min=2)] = 2048,
    context_spread: Annotated[
        float,
        option("Shorten prompts by up to this share, evenly spread.", min=0, max=0.9),
    ] = 0,
    gen_len: Annotated[int, option("Tokens to generate per sequence.", min=1)] = 64,
    temperature: options.Temperature = 1.0,
    top_k: Annotated[int | None, option("Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, option("Sample from the smallest set with this probability.")
    ] = None,
    seed: Annotated[
        int, option("Seeds prompts, weights and sampling.", min=0, max=2**63 - 1)
    ] = 0,
    dtype: options.Dtype = "float32",
    device: options.DeviceName = "cpu",
    prompts: Annotated[
        str, option("stdlib, recall, random, noise, or a text file or directory.")
    ] = "stdlib",
    simulate_acceptance: Annotated[
        str | None, option("Prescribed acceptance: a rate, or one per position.")
    ] = None,
    queue: Annotated[
        int | None,
        option(
            "Prompts in all; those that wait refill free slots.", min=1, max=MAX_COUNT
        ),
    ] = None,
    adaptive: Annotated[
        bool,
        option(
            "Choose gamma each step, up to --gamma, from --plan's table.", "--adaptive"
        ),
    ] = False,
    cuda_graphs: Annotated[
        bool, option("Replay steps as captured graphs, on a CUDA device.")
    ] = True,
    repetitions: Annotated[
        int, option("Interleaved repetitions.", min=1, max=MAX_COUNT)
    ] = 3,
    run_to_end: Annotated[
        bool, option("Also measure the drain of a static batch.")
    ] = False,
    stop_at_eos: Annotated[
        bool, option("Let a sequence end at its end-of-sequence token.")
    ] = False,
    records: Annotated[
        Path | None, option("Append one record per configuration to this file.")
    ] = None,
    resume: Annotated[
        bool, option("Skip what the records file already holds.")
    ] = False,
    save_output: Annotated[
        Path | None, option("Write prompts and generated text as JSON lines.")
    ] = None,
    stream: Annotated[
        bool, option("At the end, show one sequence's text.", "--stream")
    ] = False,
    quiet: options.Quiet = False,
    output_format: options.Format = OutputFormat.TABLE,
) -> None:
    """Decode with and without a draft, and measure both.

    Autoregressive and speculative runs are interleaved, in one engine and from one prefill.
    """
    given = dict(context_.params)
    explicit = _explicit(context_)
    planned: list[dict[str, Any]] = [{}]
    if plan is not None:
        is_draft_given = bool(explicit & {"draft", "draft_method"})
        planned = read_plan(
            plan, is_draft_given=is_draft_given, is_dtype_given="dtype" in explicit
        )
    wanted = []
    for row in planned:
        from_plan = {name: value for name, value in row.items() if name not in explicit}
        wanted.append(_request(given | from_plan, explicit))
    requests = _merge(wanted)
    require(
        not stream or prompts not in ("random", "noise"),
        f"--stream shows text, and --prompts {prompts} has none",
    )
    require(
        not resume or records is not None,
        "--resume goes on with a records file; give --records too",
    )
    from magicdec.measure import Outputs

    outputs = Outputs(
        records=records,
        resume=resume,
        save_output=save_output,
        stream=stream,
        quiet=quiet,
    )
    outputs.check(plan=plan, prompts=Path(prompts))
    require(
        engine == "ours" or not outputs.wants_decoding,
        "--save-output and --stream need --engine ours",
    )
    results = _run(requests, outputs)
    if results is not None:
        _print_results(results, output_format)


def _print_results(results: list[Record], output_format: OutputFormat) -> None:
    from magicdec.reports import print_run
    from magicdec.schema import record_rows

    print_as(
        output_format,
        to_builtins(results),
        record_rows(results),
        lambda: print_run(results, console()),
    )


def _explicit(context: typer.Context) -> set[str]:
    """The options that the command line names."""
    names = set()
    for name in context.params:
        source = context.get_parameter_source(name)
        if source and source.name != "DEFAULT":
            names.add(name)
    return names


def _request(given: dict[str, Any], explicit: set[str]) -> BenchmarkRequest:
    from magicdec.measure import BenchmarkRequest
    from magicdec.specs import local_model, named_head

    is_whole = given["weights"] == "checkpoint"
    head = named_head(
        given["model"],
        given["draft"],
        given["draft_model"],
        with_weights=is_whole,
    )
    model = local_model(given["model"], with_weights=is_whole)
    if head is not None:
        _check_starts(model, head, given)
    drafting: dict[str, Any]
    if head is None:
        drafting = {"draft": local_model(given["draft"], with_weights=is_whole)}
    else:
        drafting = {"draft": head.method, "draft_method": head.method, "head": head}
        if given["plan"] is None and "draft_budget" not in explicit:
            drafting["draft_budget"] = None
    rates = _simulated_rates(given["simulate_acceptance"])
    table = None
    if given["adaptive"]:
        table = given.get("gamma_table")
        require(
            table is not None,
            "--adaptive reads a plan's table of gammas; give --plan too",
        )
    if table is not None and "gamma" not in explicit:
        given = {**given, "gamma": str(max(table.max_gamma, 1))}
    require(
        all(0 <= rate <= 1 for rate in rates),
        "--simulate-acceptance must be rates between 0 and 1",
    )
    sampling = SamplingSpec(
        temperature=given["temperature"],
        top_k=given["top_k"],
        top_p=given["top_p"],
        seed=given["seed"],
    )
    return BenchmarkRequest(
        model=model,
        batch_size=given["batch"],
        context_len=given["context"],
        speculations=_speculations({**given, **drafting}),
        sampling=sampling,
        simulate_acceptance=tuple(rates) or None,
        gamma_table=table,
        num_prompts=given["queue"],
        tp_size=_tp_size(given["tp"], is_explicit="tp" in explicit),
        **{name: given[name] for name in REQUESTED},
    )


def _check_starts(model: str, head: NamedHead, given: dict[str, Any]) -> None:
    """Raises ConfigError for a head that cannot be started for the model, before anything is
    loaded."""
    from magicdec.perfmodel import AskedDraft, standing
    from magicdec.specs import load_engine, load_model_spec

    asked = AskedDraft(
        draft=head.method,
        method=head.method,
        checkpoint=head.checkpoint or "",
        head=head.spec,
        exists=True,
        is_measured=True,
    )
    found = standing(asked, load_model_spec(model), load_engine(given["engine"]))
    if not found.starts:
        raise ConfigError(found.sentence)


def _simulated_rates(text: str | None) -> list[float]:
    if not text:
        return []
    return parse_floats(text, "--simulate-acceptance")


def _draft_and_method(draft: str, method: str) -> tuple[str, str]:
    """A draft and its method; a look-up is either. Raises ConfigError for a draft that is planned
    for only."""
    for name in (draft, method):
        if name in NOT_RUN:
            raise ConfigError(
                f"{name} is planned for but not run; use --draft self, ngram, a head or a model"
            )
    if draft in LOOKUP_METHODS:
        return draft, draft
    if draft == SELF and method in LOOKUP_METHODS:
        return method, method
    return draft, method


def _speculations(given: dict[str, Any]) -> tuple[SpeculationSpec, ...]:
    """Every combination of budget and gamma."""
    if given["draft"] == "none":
        return ()
    draft, method = _draft_and_method(given["draft"], given["draft_method"])
    head: NamedHead | None = given.get("head")
    spec = None
    checkpoint = None
    if head is not None:
        spec = head.spec
        checkpoint = head.checkpoint
    budgets = _budgets(
        method,
        given["draft_budget"],
        context_len=given["context"],
        has_head=head is not None,
    )
    gammas = parse_ints(given["gamma"], "--gamma")
    speculations = []
    for budget, gamma in product(budgets, gammas):
        if gamma <= 0:
            continue
        speculation = SpeculationSpec(
            draft=draft,
            draft_method=method,
            draft_budget=budget,
            gamma=gamma,
            draft_tp_size=given["draft_tp"],
            head=spec,
            checkpoint=checkpoint,
        )
        speculations.append(speculation)
    return tuple(speculations)


def _budgets(
    method: str,
    text: str | None,
    *,
    context_len: int,
    has_head: bool,
) -> list[int] | list[None]:
    """The budgets to measure in tokens, of which some may be asked for as shares of the context;
    None for a draft that keeps its whole cache.
    """
    if method in SPARSE_METHODS:
        require(text is not None, f"--draft-method {method} needs --draft-budget")
    elif not has_head:
        return [None]
    if text is None:
        return [None]
    budgets = parse_counts(text, "--draft-budget")
    return [budget_at(budget, context_len) for budget in budgets]


def _tp_size(wanted: int, *, is_explicit: bool) -> int:
    """Under torchrun the size of its world decides."""
    world_size = os.environ.get("WORLD_SIZE")
    if world_size is None:
        return wanted
    require(
        not is_explicit or wanted == int(world_size),
        f"--tp {wanted}, but torchrun started {world_size} ranks",
    )
    return int(world_size)


def _merge(requests: list[BenchmarkRequest]) -> list[BenchmarkRequest]:
    """Joins requests that differ only in their drafts, which are then measured side by side."""
    merged: dict[BenchmarkRequest, list[SpeculationSpec]] = {}
    for request in requests:
        merged.setdefault(replace(request, speculations=()), []).extend(
            request.speculations
        )
    joined = []
    for request, speculations in merged.items():
        joined.append(replace(request, speculations=tuple(dict.fromkeys(speculations))))
    return joined


def _run(requests: list[BenchmarkRequest], outputs: Outputs) -> list[Record] | None:
    """The records; None on ranks other than the first of torchrun's."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return _run_under_torchrun(requests, outputs)
    from magicdec.measure import bind_threads

    if all(request.tp_size == 1 and request.engine == "ours" for request in requests):
        bind_threads()
    from magicdec.measure import check_request, measure_request
    from magicdec.runtime import launch_ranks
    from magicdec.specs import load_model_spec

    for request in requests:
        check_request(request, load_model_spec(request.model))
    results: list[Record] = []
    for request in requests:
        device_type = request.device.partition(":")[0]
        results += launch_ranks(
            measure_request,
            request.tp_size,
            request,
            outputs,
            device_type=device_type,
        )
    return results


def _run_under_torchrun(
    requests: list[BenchmarkRequest], outputs: Outputs
) -> list[Record] | None:
    """One error of all ranks is printed by the first alone: it fails at once, and torchrun then
    ends the others.
    """
    from magicdec.runtime import end_with_torchrun, take_own_cores

    end_with_torchrun()
    take_own_cores()
    from magicdec.measure import check_devices, measure_request
    from magicdec.runtime import join_world, leave_world

    try:
        for request in requests:
            check_devices(request)
        tp = join_world(requests[0].device.partition(":")[0])
        results: list[Record] = []
        for request in requests:
            results += measure_request(tp, request, outputs)
        leave_world()
    except MagicdecError:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(FIRST_RANK_SPEAKS_S)
        raise
    if tp.rank == 0:
        return results
    return None


def read_plan(
    path: Path,
    *,
    is_draft_given: bool = False,
    is_dtype_given: bool = False,
) -> list[dict[str, Any]]:
    """The options of the plan's best configuration and of its runner-up (the next best of the same
    batch, context and devices, where there is one), each with the plan's `gamma_table`.

    With `is_draft_given` the command line names the draft, and the plan's own need not be one that
    runs; with `is_dtype_given` likewise for the plan's number formats.
    Raises ConfigError when the file is no plan, or plans a draft, a number format or a spread over
    devices that cannot be run; StorageError when it cannot be read.
    """
    from magicdec.schema import load_plan

    plan = load_plan(path)
    if plan.best.num_gpus != plan.best.tp_size:
        raise ConfigError(
            f"{path} spreads a replica as {plan.best.layout.label}, which is planned for but not "
            "run; plan for one --tp"
        )
    if not is_draft_given:
        _check_runs(path, plan)
    request = plan.request
    common: dict[str, Any] = {
        "model": request.model,
        "temperature": request.temperature,
        "gamma_table": plan.gamma_table.policy,
    }
    if not is_dtype_given:
        common["dtype"] = _dtype(path, plan, is_draft_given=is_draft_given)
    if request.gen_len:
        common["gen_len"] = request.gen_len
    if request.top_k is not None:
        common["top_k"] = request.top_k
    if request.top_p is not None:
        common["top_p"] = request.top_p
    return [_options_of(row, common) for row in (plan.best, *_runner_up(plan))]


def _check_runs(path: Path, plan: Plan) -> None:
    """Raises ConfigError, naming what can be run instead, when the plan's draft cannot."""
    method = plan.best.draft_method
    if method in NOT_RUN:
        raise ConfigError(
            f"{path} drafts with {method}, which is planned for but not run; {_instead(plan)}"
        )
    if not plan.candidates and plan.needs_acceptance:
        drafts = ", ".join(
            f"{unknown.draft}/{unknown.draft_method}"
            for unknown in plan.needs_acceptance
        )
        first = plan.needs_acceptance[0]
        example = first.draft
        if first.draft_method in NOT_RUN:
            example = "self"
        raise ConfigError(
            f"{path} holds no draft to run: the acceptance of {drafts} on {plan.model} is not "
            "known; "
            f"plan with --acceptance-rate or --acceptance, or name a draft here, such as "
            f"--draft {example}"
        )


def _instead(plan: Plan) -> str:
    """The best candidate that is run, as options."""
    for row in plan.candidates:
        if row.draft_method not in NOT_RUN:
            break
    else:
        return "plan again with another --draft"
    words = []
    for name in ("draft", "draft_method", "draft_budget", "gamma"):
        value = getattr(row, name)
        if value is not None:
            words.append(f"--{name.replace('_', '-')} {value}")
    return f"its best that is run: {' '.join(words)}"


def _dtype(path: Path, plan: Plan, *, is_draft_given: bool) -> str:
    """The run's dtype. Raises ConfigError where the plan has formats that are not run."""
    formats = plan.precision
    dtype = DTYPE_OF_FORMAT.get(formats.weight_dtype, "bfloat16")
    without_weights = ("none", *LOOKUP_METHODS, *HEAD_METHODS)
    has_weights = not is_draft_given and plan.best.draft_method not in without_weights
    lacking = []
    for name, title in FORMATS_OF_DTYPE.items():
        value = getattr(formats, name)
        is_used = has_weights or name != "draft_weight_dtype"
        if is_used and DTYPE_OF_FORMAT.get(value) != dtype:
            lacking.append(f"{title} in {value}")
    if lacking:
        raise ConfigError(
            f"{path} plans {' and '.join(lacking)}, which is not run; --dtype {dtype} runs the "
            "rest of it"
        )
    return dtype


def _runner_up(plan: Plan) -> list[Candidate]:
    """The next best that can be run, of the same batch, context and devices where there is one."""
    best = plan.best
    load = attrgetter("batch_size", "context_len", "tp_size")
    others = []
    at_same_load = []
    for row in plan.candidates:
        if row.draft_method in NOT_RUN or _options_of_row(row) == _options_of_row(best):
            continue
        others.append(row)
        if load(row) == load(best):
            at_same_load.append(row)
    return (at_same_load or others)[:1]


def _options_of_row(row: Candidate) -> dict[str, Any]:
    from magicdec.schema import column

    return {option: column(row, name) for name, option in OPTION_OF_KEY.items()}


def _options_of(row: Candidate, common: dict[str, Any]) -> dict[str, Any]:
    options = common | _options_of_row(row)
    if options["draft"] == "none":
        # a draft named on the command line takes its method, budget and gamma from there
        for name in ("draft_method", "draft_budget", "gamma", "draft_tp"):
            options.pop(name, None)
        return options
    if row.draft_method in HEAD_METHODS:
        options["draft_model"] = row.drafting.checkpoint
    if options["draft_tp"] == options["tp"]:
        del options["draft_tp"]  # all ranks, whose number --tp may change
    for name in ("gamma", "draft_budget"):  # lists of values, as options
        if options[name] is not None:
            options[name] = str(options[name])
    return options
