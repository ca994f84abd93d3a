"""The planner: which draft, method, budget and gamma, on how many devices and at which batch; or no
speculation at all.

    answer = make_plan(PlanRequest(model="llama-3.1-8b", hardware=("h100",), batch_sizes=(64,)))
    answer.best.gamma, answer.best.speedup, answer.best.verdict

Each device and context is a case, answered on its own (plan/search.py): tokens per second are compared
within a case only. With batch sizes given, the best is the best of these; without them the batch is
searched too, under the latency limits and the memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from magicdec.errors import CapacityError
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.kernels.profile import (
    EVERY_GPU,
    counted,
    every_gpu,
    load_hardware,
)
from magicdec.perfmodel.plan.answer import Answer, Ranked, answer_of, document_of
from magicdec.perfmodel.plan.choice import (
    NEARLY_AS_FAST,
    SURELY_AHEAD,
    Ranking,
    choose,
    objective,
    preferred,
    same_configuration,
)
from magicdec.perfmodel.plan.drafts import draft_options, load_profiles
from magicdec.perfmodel.plan.draws import Draws, draws_of
from magicdec.perfmodel.plan.request import (
    Case,
    PlanRequest,
    check_starts,
    engine_of,
    lengths_of,
    resolve,
    with_devices,
)
from magicdec.perfmodel.plan.search import (
    Searched,
    best_autoregressive,
    search,
    with_best_settings,
)
from magicdec.perfmodel.plan.texts import Texts, texts_of
from magicdec.progress import Progress
from magicdec.schema import (
    DEFAULT_CONTEXTS,
    Candidate,
    Choice,
    Limit,
    NeedsAcceptance,
    Percentiles,
    Plan,
    TokenCost,
    TrafficLoad,
    fields_of,
)
from magicdec.specs import (
    ModelSpec,
    load_model_spec,
    load_workload,
    model_from_hf_config,
)
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
    ranked = _ranked(case, baseline, settled=settled.layout.row)
    assert ranked is not None  # the settled row is one of its rows
    answer = answer_of(ranked, baseline, [])
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
                ways.append(with_best_settings(way))
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
    ranked: list[Ranked] = []
    refused: list[CapacityError] = []
    for case in ways:
        try:
            of_way = _ranked(case, baseline)
        except CapacityError as error:
            refused.append(error)
            continue
        if of_way is not None:
            ranked.append(of_way)
    if not ranked and refused:
        raise refused[0]
    if not ranked:
        return None
    ranked.sort(key=lambda of_way: objective(of_way.best), reverse=True)
    answer = answer_of(ranked[0], baseline, lacking)
    if len(ways) == 1:
        return answer
    layouts = [of_way.best for of_way in ranked]
    document = msgspec.structs.replace(answer.document, layouts=layouts)
    return dataclasses.replace(answer, document=document)


def _ranked(
    case: Case, baseline: Candidate | None, *, settled: Candidate | None = None
) -> Ranked | None:
    """Everything that competes, and the best of it. None: nothing keeps the latency limits.

    Raises CapacityError if nothing fits."""
    found = search(case, baseline)
    alone: list[Candidate] = []
    drafted: list[Candidate] = []
    for of_draft in found:
        if of_draft.option is None:
            alone.extend(of_draft.rows)
        else:
            drafted.extend(of_draft.rows)
    if not alone and not drafted:
        return None
    texts = texts_of(case, found)
    rankings = _rankings(case, alone, drafted, texts)
    ranking = rankings[0]
    asked = case.request.batch_sizes
    if (
        not case.searches_batch
        and asked
        and not {of_load.best.batch_size for of_load in rankings}.issubset(asked)
    ):
        # smaller batches were tried because the requested ones do not fit
        rankings = [ranking]
        alone = [row for row in alone if row.batch_size == ranking.best.batch_size]
    best = ranking.best
    tied = None
    draws = None
    if settled is not None:
        best = next(
            row for row in [*alone, *drafted] if same_configuration(row, settled)
        )
    else:
        for place, of_load in enumerate(rankings):
            rankings[place], tied_here, draws_here = _tie_settled(
                case, found, of_load, texts
            )
            if place == 0:
                best, tied, draws = rankings[0].best, tied_here, draws_here
    drafted = []
    for of_load in rankings:
        drafted.extend(of_load.drafted)
    return Ranked(
        case=case,
        found=found,
        alone=alone,
        drafted=drafted,
        rankings=rankings,
        row=best,
        tied=tied,
        texts=texts,
        draws=draws,
    )


def _tie_settled(
    case: Case, found: Searched, ranking: Ranking, texts: Texts | None
) -> tuple[Ranking, Candidate | None, Draws | None]:
    """A load's ranking with the best of drafts that are as good as the first, the other that a tie
    names, and the draws that tell. The same for every load, so that one is answered alike alone and
    in company."""
    best = ranking.best
    if not best.is_speculative:
        return ranking, None, None
    draws = draws_of(case, found, best)
    as_good = _tied(case, ranking, texts, draws)
    if not as_good:
        return ranking, None, draws
    taken = preferred(best, as_good, found.evidence)
    tied = best if taken is not best else as_good[0]
    return dataclasses.replace(ranking, best=taken), tied, draws


def _tied(
    case: Case, ranking: Ranking, texts: Texts | None, draws: Draws | None
) -> list[Candidate]:
    """The best rows of other drafts that are as good as the choice, the best first: nearly as fast,
    and neither surely ahead of the other."""
    best = ranking.best
    if draws is None:
        return []
    tied = []
    seen = {(best.draft, best.draft_method)}
    for row in ranking.drafted:
        if (row.draft, row.draft_method) in seen or not case.admits(row):
            continue
        if (row.batch_size, row.tp_size) != (best.batch_size, best.tp_size):
            continue
        seen.add((row.draft, row.draft_method))
        if texts is None:
            loss = 1.0 - row.rate / best.rate
        else:
            loss = texts.loss(row, best)
        ahead = draws.chance_ahead(best, row)
        is_near = loss <= NEARLY_AS_FAST and row.fits and row.within_limits
        if is_near and ahead is not None and ahead < SURELY_AHEAD:
            tied.append(row)
    return tied


def _rankings(
    case: Case,
    alone: list[Candidate],
    drafted: list[Candidate],
    texts: Texts | None,
) -> list[Ranking]:
    """The ranking of each load, the best first."""
    loads = [(alone, drafted)]
    if not case.searches_batch:
        # the rows of each requested batch compete among themselves
        loads = []
        for batch in dict.fromkeys(row.batch_size for row in [*alone, *drafted]):
            alone_here = [row for row in alone if row.batch_size == batch]
            drafted_here = [row for row in drafted if row.batch_size == batch]
            loads.append((alone_here, drafted_here))
    rankings = []
    for place, (alone_here, drafted_here) in enumerate(loads):
        score = None
        if texts is not None:
            admitted = [row for row in drafted_here if case.admits(row)]
            score = texts.score_of([*alone_here, *admitted])
        ranking = choose(place, alone_here, drafted_here, case.admits, score)
        best = ranking.best
        if alone_here and best.is_speculative and best.gain.speedup <= 1.0:
            # the least loss over the texts is no gain over all of them together, which the answer names
            gaining = [row for row in drafted_here if row.gain.speedup > 1.0]
            best = choose(place, alone_here, gaining, case.admits, score).best
            ranking = dataclasses.replace(ranking, best=best)
        rankings.append(ranking)
    rankings.sort(key=lambda ranking: objective(ranking.best), reverse=True)
    return rankings


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
