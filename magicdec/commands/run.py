"""`magicdec run`: decode for real, autoregressive and speculative, and measure."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
from magicdec.progress import kept
from magicdec.specs.speculation import (
    LOOKUP_METHODS,
    NOT_RUN,
    SELF,
    SPARSE_METHODS,
    SamplingSpec,
    SpeculationSpec,
    budget_at,
)

if TYPE_CHECKING:
    from magicdec.measure.configuration import BenchmarkRequest, Outputs
    from magicdec.schema.gamma_table import TableGamma
    from magicdec.schema.record import Record
    from magicdec.specs.known_heads import NamedHead

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


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of `magicdec run`: the configurations to measure."""

    invocation: typer.Context
    engine: Annotated[
        options.Runtime, option("ours, or vllm with magicdec's plugin (docs/vllm.md).")
    ] = "ours"
    model: options.Checkpoint = "embedded"
    weights: Annotated[
        Literal["checkpoint", "random"],
        option("checkpoint, or random (seeded) for a model without one."),
    ] = "checkpoint"
    draft: Annotated[
        str,
        option(
            "self, none, ngram, suffix, a head's method or directory, or a draft model."
        ),
    ] = "self"
    draft_model: Annotated[
        str | None,
        option("A trained head's directory; of --draft mtp: default, the target's."),
    ] = None
    draft_method: Annotated[
        str, option("streamingllm, snapkv or topk; of a model: full, streamingllm.")
    ] = "streamingllm"
    draft_budget: Annotated[
        str | None,
        option("KV slots a draft step reads, or shares (7%); a list measures each."),
    ] = "256"
    gamma: Annotated[str, option("Drafted tokens per step; a list measures each.")] = (
        "3"
    )
    plan: Annotated[
        Path | None, option("Run a plan's best and runner-up; options override.")
    ] = None
    tp: Annotated[
        int, option("Ranks that share the model; starts them itself.", min=1)
    ] = 1
    draft_tp: Annotated[
        int | None, option("Ranks of the draft model; default: all.", min=1)
    ] = None
    batch: Annotated[int, option("Sequences decoded together.", min=1)] = 8
    context: Annotated[int, option("Tokens of the longest prompt.", min=2)] = 2048
    context_spread: Annotated[
        float,
        option("Shorten prompts by up to this share, evenly spread.", min=0, max=0.9),
    ] = 0
    gen_len: Annotated[int, option("Tokens to generate per sequence.", min=1)] = 64
    temperature: options.Temperature = 1.0
    top_k: Annotated[int | None, option("Sample from the k likeliest tokens.")] = None
    top_p: Annotated[
        float | None, option("Sample from the smallest set with this probability.")
    ] = None
    seed: Annotated[
        int, option("Seeds prompts, weights and sampling.", min=0, max=2**63 - 1)
    ] = 0
    dtype: options.Dtype = "float32"
    device: options.DeviceName = "cpu"
    prompts: Annotated[
        str, option("stdlib, recall, random, noise, or a text file or directory.")
    ] = "stdlib"
    simulate_acceptance: Annotated[
        str | None, option("Prescribed acceptance: a rate, or one per position.")
    ] = None
    queue: Annotated[
        int | None,
        option(
            "Prompts in all; those that wait refill free slots.", min=1, max=MAX_COUNT
        ),
    ] = None
    adaptive: Annotated[
        bool,
        option(
            "Choose gamma each step, up to --gamma, from --plan's table.", "--adaptive"
        ),
    ] = False
    cuda_graphs: Annotated[
        bool, option("Replay steps as captured graphs, on a CUDA device.")
    ] = True
    repetitions: Annotated[
        int, option("Interleaved repetitions.", min=1, max=MAX_COUNT)
    ] = 3
    run_to_end: Annotated[bool, option("Also measure the drain of a static batch.")] = (
        False
    )
    stop_at_eos: Annotated[
        bool, option("Let a sequence end at its end-of-sequence token.")
    ] = False
    records: Annotated[
        Path | None, option("Append one record per configuration to this file.")
    ] = None
    resume: Annotated[bool, option("Skip what the records file already holds.")] = False
    save_output: Annotated[
        Path | None, option("Write prompts and generated text as JSON lines.")
    ] = None
    quiet: options.Quiet = False
    output_format: options.Format = OutputFormat.TABLE

    @property
    def stated(self) -> frozenset[str]:
        """The options that the command line names; a plan sets the others."""
        return options.stated(self.invocation)


@options.asks(RunOptions)
def run_command(asked: RunOptions) -> None:
    """Decode with and without a draft, and measure both.

    Autoregressive and speculative runs are interleaved, in one engine and from one prefill.
    """

    def what_is_kept() -> str:
        if asked.records is None:
            return "nothing is kept: --records keeps what is measured"
        if not asked.records.exists():
            return f"nothing was measured yet for {asked.records}"
        return f"{asked.records} keeps what was measured; --resume goes on with it"

    with kept(what_is_kept):
        runs = [asked]
        gamma_table: TableGamma | None = None
        if asked.plan is not None:
            from magicdec.measure.plan_runs import options_of_plan

            planned, gamma_table = options_of_plan(asked.plan, asked.stated)
            runs = [replace(asked, **settings) for settings in planned]
        requests = _merge([_request(run, gamma_table) for run in runs])
        require(
            not asked.resume or asked.records is not None,
            "--resume goes on with a records file; give --records too",
        )
        from magicdec.measure.configuration import Outputs

        outputs = Outputs(
            records=asked.records,
            resume=asked.resume,
            save_output=asked.save_output,
            quiet=asked.quiet,
        )
        outputs.check(plan=asked.plan, prompts=Path(asked.prompts))
        require(
            asked.engine == "ours" or asked.save_output is None,
            "--save-output needs --engine ours",
        )
        results = _run(requests, outputs)
    if results is None:
        return  # the first of torchrun's ranks prints
    from magicdec.reports.terminal import print_run
    from magicdec.schema.record import record_rows

    print_as(
        asked.output_format,
        to_builtins(results),
        record_rows(results),
        lambda: print_run(results, console()),
    )


def _request(run: RunOptions, gamma_table: TableGamma | None) -> BenchmarkRequest:
    """A run's options as what is measured; `gamma_table` is its plan's."""
    from magicdec.measure.configuration import BenchmarkRequest
    from magicdec.specs.catalog import local_model
    from magicdec.specs.known_heads import named_head

    is_whole = run.weights == "checkpoint"
    head = named_head(run.model, run.draft, run.draft_model, with_weights=is_whole)
    model = local_model(run.model, with_weights=is_whole)
    if head is None:
        run = replace(run, draft=local_model(run.draft, with_weights=is_whole))
    else:
        _check_starts(model, head, run.engine)
        run = replace(run, draft=head.method, draft_method=head.method)
        # the usual budget is a self-draft's: a head keeps its whole cache unless it is asked
        if run.plan is None and "draft_budget" not in run.stated:
            run = replace(run, draft_budget=None)
    rates: list[float] = []
    if run.simulate_acceptance:
        rates = parse_floats(run.simulate_acceptance, "--simulate-acceptance")
    if not run.adaptive:
        gamma_table = None
    elif gamma_table is None:
        raise ConfigError("--adaptive reads a plan's table of gammas; give --plan too")
    elif "gamma" not in run.stated:
        run = replace(run, gamma=str(max(gamma_table.max_gamma, 1)))
    require(
        all(0 <= rate <= 1 for rate in rates),
        "--simulate-acceptance must be rates between 0 and 1",
    )
    return BenchmarkRequest(
        model=model,
        engine=run.engine,
        weights=run.weights,
        dtype=run.dtype,
        device=run.device,
        batch_size=run.batch,
        context_len=run.context,
        context_spread=run.context_spread,
        gen_len=run.gen_len,
        speculations=_speculations(run, head),
        sampling=SamplingSpec(
            temperature=run.temperature,
            top_k=run.top_k,
            top_p=run.top_p,
            seed=run.seed,
        ),
        prompts=run.prompts,
        repetitions=run.repetitions,
        simulate_acceptance=tuple(rates) or None,
        stop_at_eos=run.stop_at_eos,
        run_to_end=run.run_to_end,
        tp_size=_tp_size(run.tp, is_explicit="tp" in run.stated),
        gamma_table=gamma_table,
        num_prompts=run.queue,
        cuda_graphs=run.cuda_graphs,
    )


def _check_starts(model: str, head: NamedHead, engine: str) -> None:
    """Raises ConfigError for a head that cannot be started for the model, before anything is
    loaded."""
    from magicdec.perfmodel.plan.standing import AskedDraft, standing
    from magicdec.specs.catalog import load_model_spec
    from magicdec.specs.engine import load_engine

    asked = AskedDraft(
        draft=head.method,
        method=head.method,
        checkpoint=head.checkpoint or "",
        head=head.spec,
        exists=True,
        is_measured=True,
    )
    found = standing(asked, load_model_spec(model), load_engine(engine))
    if not found.starts:
        raise ConfigError(found.sentence)


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


def _speculations(
    run: RunOptions, head: NamedHead | None
) -> tuple[SpeculationSpec, ...]:
    """Every combination of budget and gamma."""
    if run.draft == "none":
        return ()
    draft, method = _draft_and_method(run.draft, run.draft_method)
    spec = None
    checkpoint = None
    if head is not None:
        spec = head.spec
        checkpoint = head.checkpoint
    budgets = _budgets(
        method, run.draft_budget, context_len=run.context, has_head=head is not None
    )
    gammas = parse_ints(run.gamma, "--gamma")
    speculations = []
    for budget, gamma in product(budgets, gammas):
        if gamma <= 0:
            continue
        speculation = SpeculationSpec(
            draft=draft,
            draft_method=method,
            draft_budget=budget,
            gamma=gamma,
            draft_tp_size=run.draft_tp,
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
    from magicdec.measure.environment import bind_threads

    if all(request.tp_size == 1 and request.engine == "ours" for request in requests):
        bind_threads()
    from magicdec.measure.configuration import check_request
    from magicdec.measure.rank import measure_request
    from magicdec.runtime.launch import launch_ranks
    from magicdec.specs.catalog import load_model_spec

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
