"""The planner: which draft, method, budget and gamma, on how many devices and at which batch; or no
speculation at all.

    answer = make_plan(PlanRequest(model="llama-3.1-8b", hardware=("h100",), batch_sizes=(64,)))
    answer.best.gamma, answer.best.speedup, answer.best.verdict

Each device and context is a case, answered on its own: its drafts (plan/drafts.py), every configuration
(plan/search.py), the one to run (plan/choice.py), and the document that tells it (plan/tables.py,
plan/explain.py). Tokens per second are compared within a case only. With batch sizes given, the best is
the best of these; without them the batch is searched too, under the latency limits and the memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from magicdec.errors import CapacityError
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.drafting import draft_of
from magicdec.perfmodel.kernels.profile import (
    EVERY_GPU,
    counted,
    every_gpu,
    load_hardware,
)
from magicdec.perfmodel.plan.choice import (
    CaseChoice,
    Ranking,
    best_to_train,
    choose,
    fastest_left_out,
    objective,
    outcome_of,
    pareto,
)
from magicdec.perfmodel.plan.drafts import draft_options, load_profiles
from magicdec.perfmodel.plan.explain import notes, outlook, with_paying_rate
from magicdec.perfmodel.plan.other_kernel import other_kernel
from magicdec.perfmodel.plan.request import (
    Case,
    DraftOption,
    PlanRequest,
    check_starts,
    engine_of,
    lengths_of,
    resolve,
    with_devices,
)
from magicdec.perfmodel.plan.search import (
    SearchResult,
    best_autoregressive,
    largest_that_runs,
    search,
    with_best_settings,
    within_memory,
)
from magicdec.perfmodel.plan.standing import is_known_in_stages
from magicdec.perfmodel.plan.tables import (
    breakdown,
    ceilings,
    follows_table,
    gamma_table,
    limits_of,
    memory_use,
    with_static_batch,
    without_draft,
)
from magicdec.perfmodel.setup import Points, Setup
from magicdec.progress import Progress
from magicdec.schema.plan import (
    CaseAnswer,
    Choice,
    Formats,
    GammaTable,
    Limit,
    NeedsAcceptance,
    Percentiles,
    Plan,
    TrafficLoad,
    bands_of,
)
from magicdec.schema.request import DEFAULT_CONTEXTS, fields_of
from magicdec.schema.row import Candidate, TokenCost
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.hf_config import model_from_hf_config
from magicdec.specs.model import ModelSpec
from magicdec.specs.workload import load_workload
from magicdec.units import format_seconds

__all__ = ["Plan", "PlanRequest", "make_plan", "request_of"]


def request_of(**options: Any) -> PlanRequest:
    """The planner's request for plain options, files read. Raises ConfigError."""
    model = options.get("model")
    if isinstance(model, dict):
        name = str(model.get("_name_or_path") or model.get("model_type") or "model")
        spec = model_from_hf_config(model, name=name, where="the model's configuration")
        options["model"] = spec
    values = fields_of(options)
    values["acceptance"] = _profiles(values)
    if EVERY_GPU in values.get("hardware", ()):
        # the named devices, which may have a price, then every other GPU of the catalog
        named = [name for name in values["hardware"] if name != EVERY_GPU]
        known = {load_hardware(name).name for name in named}
        others = [name for name in every_gpu() if name not in known]
        values["hardware"] = (*named, *others)
    workload = values.get("workload")
    if isinstance(workload, str):
        values["workload"] = load_workload(Path(workload))
    return PlanRequest(**values)


def _profiles(values: Mapping[str, Any]) -> tuple[AcceptanceProfile, ...]:
    """The acceptance profiles that were given, then those of the files that were."""
    profiles = []
    files = []
    for profile in values.get("acceptance", ()):
        if isinstance(profile, str):
            files.append(Path(profile))
        else:
            profiles.append(profile)
    draft = values.get("draft")
    loaded = load_profiles(files, draft=draft, method=values.get("draft_method"))
    return (*profiles, *loaded)


def make_plan(request: PlanRequest, progress: Progress = lambda _: None) -> Plan:
    """Answers a request; `progress` hears of simulations, which take seconds.

    Raises:
        ConfigError: an impossible combination; the message names the nearest that works.
        CapacityError: the model fits on no number of the devices, or not with this batch and
        context, or the engine does not start on them.
    """
    if isinstance(request.model, ModelSpec):
        model = request.model
    else:
        model = load_model_spec(request.model)
    if request.has_arrivals:
        return _under_arrivals(request, model, progress)
    request, refused = _readable(request, model)
    answers, cases = answered(request, model, refused)
    document = document_of(request, model, answers, cases, refused)
    if not document.offers or document.offers[0].hardware == document.hardware:
        return document
    best = document.offers[0].hardware
    answers.sort(key=lambda answer: answer.document.hardware != best)
    return document_of(request, model, answers, cases, refused)


def answered(
    request: PlanRequest,
    model: ModelSpec,
    refused: list[str],
) -> tuple[list[Answer], list[Case]]:
    """Every case that can be answered, and one case of each device, answered where one was;
    `refused` gets the others' reasons.

    Raises CapacityError where there is no case.
    """
    answers: list[Answer] = []
    cases: list[Case] = []
    for hardware in request.hardware:
        answered_here: list[Case] = []
        tried: list[Case] = []
        engine = engine_of(request, hardware)
        for lengths in lengths_of(request):
            context = int(lengths.prompt_len)
            options, lacking = draft_options(
                model, request, engine=engine, context=context
            )
            ways = []
            for way in resolve(request, model, hardware, options, lengths):
                ways.append(with_best_settings(within_memory(way)))
            tried.append(ways[0])
            try:
                check_starts(ways[0])
                answer = best_of_layouts(ways, lacking)
            except CapacityError as error:
                refused.append(str(error))
                continue
            if answer is not None:
                answers.append(answer)
                answered_here.append(answer.case)
        cases.append([*answered_here[::-1], *tried][0])
    if answers:
        return answers, cases
    if refused:
        raise CapacityError("; ".join(refused))
    raise _too_slow(request)


def best_of_layouts(ways: list[Case], lacking: list[NeedsAcceptance]) -> Answer | None:
    """One case, spread in the way with the best configuration; None where nothing keeps the latency
    limits. Raises CapacityError where nothing fits.
    """
    alone = filter(None, map(best_autoregressive, ways))
    baseline = max(alone, key=attrgetter("rate"), default=None)
    choices: list[CaseChoice] = []
    refused: list[CapacityError] = []
    for case in ways:
        try:
            chosen = choose(case, search(case, baseline))
        except CapacityError as error:
            refused.append(error)
            continue
        if chosen is not None:
            choices.append(chosen)
    if not choices and refused:
        raise refused[0]
    if not choices:
        return None
    choices.sort(key=lambda chosen: objective(chosen.row), reverse=True)
    answer = answer_of(choices[0], baseline, lacking)
    if len(ways) == 1:
        return answer
    layouts = [with_static_batch(chosen) for chosen in choices]
    document = msgspec.structs.replace(answer.document, layouts=layouts)
    return dataclasses.replace(answer, document=document)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One case's answer, and where it came from."""

    case: Case
    document: CaseAnswer
    alone: list[Candidate]
    drafted: list[Candidate]
    """Drafted rows, best first."""
    option: DraftOption | None
    """The draft of the best configuration."""
    searched: SearchResult
    """The predictions that the rows are of."""
    point: Points
    """The best configuration."""
    lacking: list[NeedsAcceptance]
    """The drafts that this case could not rank."""


def answer_of(
    chosen: CaseChoice, baseline: Candidate | None, lacking: list[NeedsAcceptance]
) -> Answer:
    """The best configuration with the tables around it. `baseline`: autoregressive decoding at its
    best."""
    case = chosen.case
    best = with_static_batch(chosen)
    prediction = chosen.searched.prediction(chosen.row)
    leading = None
    if best.is_speculative:
        leading = best
    elif chosen.drafted and case.admits(chosen.drafted[0]):
        # else the first draft breaks the limits, and the table describes none
        leading = chosen.drafted[0]
    table = gamma_table(case, best, leading)
    choice = _choice(chosen, best, table, baseline, lacks_acceptance=bool(lacking))
    shown = prediction
    if choice.left_out is not None:
        # the passes of the best draft are broken down, even if it is not chosen
        shown = chosen.searched.prediction(choice.left_out)
    by_batch: list[Candidate] = []
    if not case.searches_batch:
        in_order = sorted(chosen.rankings, key=attrgetter("place"))
        by_batch = [ranking.best for ranking in in_order]
    document = CaseAnswer(
        hardware=case.hardware.name,
        context_len=best.context_len,
        choice=choice,
        best_by_batch=by_batch,
        pareto=pareto([*chosen.alone, *filter(case.admits, chosen.drafted)]),
        gamma_table=table,
        breakdown=breakdown(shown),
        path=_as_run(shown.setup),
        memory=memory_use(case, chosen.option, best, prediction),
        ceilings=ceilings(prediction.setup),
    )
    return Answer(
        case=case,
        document=document,
        alone=chosen.alone,
        drafted=chosen.drafted,
        option=chosen.option,
        searched=chosen.searched,
        point=prediction.points,
        lacking=lacking,
    )


def _as_run(setup: Setup) -> str:
    """The path of a setup's steps in words, its attention backends last."""
    words = draft_of(setup).path.with_runner
    backends = dict.fromkeys(path.backend for path in setup.attention_paths())
    named = ", ".join(filter(None, backends))
    return f"{words}; attention by {named}" if named else words


def _choice(
    chosen: CaseChoice,
    best: Candidate,
    table: GammaTable,
    baseline: Candidate | None,
    *,
    lacks_acceptance: bool,
) -> Choice:
    """The choice as documents hold it, with what it leaves out."""
    case = chosen.case
    searched = chosen.searched
    ranking: Ranking = msgspec.structs.replace(chosen.rankings[0], best=best)
    left_out = fastest_left_out(ranking)
    to_train = best_to_train(ranking)
    outcome = outcome_of(best, left_out, to_train, lacks_acceptance=lacks_acceptance)
    runs_at = None
    if left_out is not None and outcome in ("no room", "over limits"):
        runs_at = largest_that_runs(case, case.option_of(left_out), left_out)
    shown = left_out
    gammas = []
    if best.is_speculative:
        shown = best
        gammas = bands_of(best, table, is_followed=follows_table(case, table, best))
    faults = []
    for draft in searched:
        if draft.option is not None and draft.option.acceptance.fault:
            faults.append(draft.option.acceptance.fault)
    return Choice(
        row=best,
        outcome=outcome,
        without_draft=without_draft(chosen, baseline),
        best_without_draft=baseline,
        gammas=gammas,
        limits=limits_of(case, best),
        left_out=left_out,
        left_out_fits=runs_at,
        faults=faults,
        outlook=None if shown is None else outlook(chosen, ranking, shown),
        tied=chosen.tied,
        evidence=None if shown is None else searched.evidence(shown),
        other_kernel=other_kernel(case, best),
        to_train=to_train,
    )


def document_of(
    request: PlanRequest,
    model: ModelSpec,
    answers: list[Answer],
    cases: list[Case],
    refused: list[str],
) -> Plan:
    """The plan document of answered cases; the first is the plan's own: what it chooses, and what
    is exported."""
    first = answers[0]
    needed = []
    for draft in first.lacking:
        # of drafts without a known acceptance, those that the case's layout can run
        if is_known_in_stages(
            first.case.engine,
            draft.draft,
            draft.draft_method,
            model,
            first.case.spread.pp,
        ):
            context = first.document.context_len
            needed.append(with_paying_rate(first.case, first.point, context, draft))
    setup = first.case.setup(first.option or next(iter(first.case.options), None))
    drafting = first.case.drafting_precision(setup)
    key, others = notes(cases, first.case, first.document, first.drafted)
    return Plan(
        **msgspec.structs.asdict(first.document),
        model=model.name,
        engine=first.case.engine.name,
        request=request.record(),
        context_is_default=request.context_lens is DEFAULT_CONTEXTS
        and request.workload is None
        and request.requests is None,
        precision=Formats(
            weight_dtype=setup.precision.weight_dtype,
            kv_dtype=setup.precision.kv_dtype,
            draft_weight_dtype=drafting.weight_dtype,
            draft_kv_dtype=drafting.kv_dtype,
        ),
        other_cases=[answer.document for answer in answers[1:]],
        needs_acceptance=needed,
        notes=[*key, *others, *refused],
        key_notes=[*key, *refused],
        assumed=model.assumed,
        autoregressive_rows=[row for answer in answers for row in answer.alone],
        candidates=[row for answer in answers for row in answer.drafted],
    )


def _under_arrivals(request: PlanRequest, model: ModelSpec, progress: Progress) -> Plan:
    """The plan for a rate of arrivals. A simulation chooses the configuration and the number of
    devices.
    """
    # most plans need no simulator
    from magicdec.perfmodel.rate.capacity import plan_traffic

    hardware = request.hardware[0]
    is_one = len(request.hardware) == 1
    if is_one and isinstance(hardware, str) and counted(hardware).num_gpus is not None:
        # the only device's name, such as 4xh100, says how many there are to simulate
        request = with_devices(request, hardware)
        device = load_hardware(hardware)
        request = msgspec.structs.replace(request, hardware=(device,))
    settled = plan_traffic(request, model, progress)
    load = settled.traffic.best
    case = settled.layout.case
    check_starts(case)
    case = dataclasses.replace(
        case,
        request=msgspec.structs.replace(case.request, num_gpus=load.num_gpus),
    )
    baseline = best_autoregressive(case)
    chosen = choose(case, search(case, baseline), settled=settled.layout.row)
    assert chosen is not None  # the settled row is one of its rows
    answer = answer_of(chosen, baseline, [])
    document = document_of(request, model, [answer], [case], [])
    choice = _served(document.choice, load, request)
    return msgspec.structs.replace(document, choice=choice, traffic=settled.traffic)


def _served(choice: Choice, load: TrafficLoad, request: PlanRequest) -> Choice:
    """The choice at the load that was simulated: its cost and its limits on percentiles."""
    cost = TokenCost(per_million_tokens_usd=load.cost_per_million_tokens_usd)
    limits = []
    if request.ttft_p95_s is not None:
        value_s = _p95(load.ttft)
        limits.append(
            Limit(of="p95 of first token", limit_s=request.ttft_p95_s, value_s=value_s)
        )
    if request.tpot_p95_s is not None:
        value_s = _p95(load.tpot)
        limits.append(
            Limit(
                of="p95 of time per token", limit_s=request.tpot_p95_s, value_s=value_s
            )
        )
    row = msgspec.structs.replace(choice.row, cost=cost)
    return msgspec.structs.replace(choice, row=row, limits=limits)


def _p95(times: Percentiles | None) -> float | None:
    if times is None:
        return None
    return times.p95


def _readable(request: PlanRequest, model: ModelSpec) -> tuple[PlanRequest, list[str]]:
    """The request with the contexts that the model can read, and the reasons for refusing others.
    Raises CapacityError if it can read none."""

    def refusal(longest: int) -> str:
        text = (
            f"{model.name} reads at most {room} tokens; {longest}, prompt and output together, is "
            "too long"
        )
        if model.is_unscaled:
            text += (
                "; if its publisher extends it, plan a config.json with that rope_scaling "
                f"(yarn, factor {longest / room:.3g} or more)"
            )
        return text

    room = model.longest_context
    if request.workload is not None:
        if request.workload.max_len > room:
            raise CapacityError(refusal(request.workload.max_len))
        return request, []
    kept = []
    refused = []
    for context in request.context_lens:
        longest = context + request.gen_len
        if longest <= room:
            kept.append(context)
        else:
            refused.append(refusal(longest))
    if not kept and request.context_lens is DEFAULT_CONTEXTS and request.gen_len < room:
        kept = [room - request.gen_len]
        refused = [
            f"{model.name} reads at most {room} tokens: planned at {kept[0]} of context"
        ]
    if not kept:
        raise CapacityError(refused[0])
    if (
        model.extension is not None
        and max(kept) + request.gen_len > model.max_position_embeddings
    ):
        refused.append(
            f"{model.name} reads more than {model.max_position_embeddings} tokens only if its "
            f"configuration sets its publisher's rope_scaling ({model.extension.rope_type}, factor "
            f"{model.extension.factor:g}; see its model card)"
        )
    if model.limit is not None:
        refused.append(f"{model.name}: {model.limit}")
    if tuple(kept) != request.context_lens:
        request = msgspec.structs.replace(request, context_lens=tuple(kept))
    return request, refused


def _too_slow(request: PlanRequest) -> CapacityError:
    """The error for limits that nothing keeps, with the times of a single sequence."""
    free = make_plan(
        msgspec.structs.replace(
            request,
            tpot_limit_s=None,
            ttft_limit_s=None,
            batch_sizes=(1,),
            workload=None,
        )
    )
    tpot = min(row.between_tokens_s for row in free.rows)
    ttft = min(row.first_token_s for row in free.rows)
    return CapacityError(
        f"nothing keeps the limits on latency; at batch 1 it takes at least {format_seconds(tpot)} "
        f"per token and {format_seconds(ttft)} to the first one"
    )
