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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from magicdec.counts import expected_tokens_per_step
from magicdec.errors import CapacityError
from magicdec.perfmodel.acceptance import AcceptanceProfile, constant_profile
from magicdec.perfmodel.kernels.profile import (
    EVERY_GPU,
    counted,
    every_gpu,
    load_hardware,
)
from magicdec.perfmodel.plan.answer import Answer, answer_of, best_of_layouts
from magicdec.perfmodel.plan.choice import DEFAULT_MAX_GAMMA
from magicdec.perfmodel.plan.drafts import RATE_BUDGET, draft_options, load_profiles
from magicdec.perfmodel.plan.notes import notes
from magicdec.perfmodel.plan.request import (
    Case,
    DraftOption,
    PlanRequest,
    engine_of,
    lengths_of,
    resolve,
    with_devices,
)
from magicdec.perfmodel.plan.search import best_autoregressive, with_best_settings
from magicdec.perfmodel.speedup import predict
from magicdec.progress import Progress
from magicdec.schema import (
    DEFAULT_CONTEXT,
    CaseAnswer,
    Choice,
    Formats,
    Limit,
    NeedsAcceptance,
    Percentiles,
    Plan,
    TokenCost,
    TrafficLoad,
    fields_of,
)
from magicdec.specs import (
    SPARSE_METHODS,
    ModelSpec,
    draft_model_name,
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
        values["hardware"] = _with_every_gpu(values["hardware"])
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


def _with_every_gpu(hardware: Iterable[str]) -> tuple[str, ...]:
    """The named devices, which may have a price, then every other GPU of the catalog."""
    named = [name for name in hardware if name != EVERY_GPU]
    known = {load_hardware(name).name for name in named}
    others = [name for name in every_gpu() if name not in known]
    return (*named, *others)


def make_plan(request: PlanRequest, progress: Progress = lambda _: None) -> Plan:
    """Answers a request; `progress` hears of simulations, which take seconds.

    Raises:
        ConfigError: an impossible combination; the message names the nearest that works.
        CapacityError: the model fits on no number of the devices, or not with this batch and
        context.
    """
    if isinstance(request.model, ModelSpec):
        model = request.model
    else:
        model = load_model_spec(request.model)
    if request.has_arrivals:
        return _under_arrivals(request, model, progress)
    request, refused = _readable(request, model)
    answers, cases = answered(request, model, refused)
    document = _document(request, model, answers, cases, refused)
    if not document.offers or document.offers[0].hardware == document.hardware:
        return document
    best = document.offers[0].hardware
    answers.sort(key=lambda answer: answer.document.hardware != best)
    return _document(request, model, answers, cases, refused)


def _document(
    request: PlanRequest,
    model: ModelSpec,
    answers: list[Answer],
    cases: list[Case],
    refused: list[str],
) -> Plan:
    """The plan document of answered cases; the first is the plan's own: what it chooses, and what
    is exported."""
    first = answers[0]
    key, others = notes(cases, first.case, first.document, first.drafted)
    return Plan(
        **_fields(first.document),
        model=model.name,
        engine=first.case.engine.name,
        request=request.record(),
        precision=_formats(first),
        other_cases=[answer.document for answer in answers[1:]],
        needs_acceptance=_needed(first),
        notes=[*key, *others, *refused],
        key_notes=[*key, *refused],
        assumed=model.assumed,
        autoregressive_rows=[row for answer in answers for row in answer.alone],
        candidates=[row for answer in answers for row in answer.drafted],
    )


def _fields(answer: CaseAnswer) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in CaseAnswer.__struct_fields__}


def _needed(answer: Answer) -> list[NeedsAcceptance]:
    """The drafts without a known acceptance that the case's layout can run."""
    case = answer.case
    return [
        _with_paying_rate(answer, draft)
        for draft in answer.lacking
        if case.engine.runs_staged(draft.draft, draft.draft_method, case.spread.pp)
    ]


def _under_arrivals(request: PlanRequest, model: ModelSpec, progress: Progress) -> Plan:
    """The plan for a rate of arrivals. A simulation chooses the configuration and the number of
    devices.
    """
    # most plans need no simulator
    from magicdec.perfmodel.rate.capacity import (
        plan_traffic,
    )

    request = _with_one_device(request)
    settled = plan_traffic(request, model, progress)
    load = settled.traffic.best
    case = settled.layout.case
    case = dataclasses.replace(
        case,
        request=msgspec.structs.replace(case.request, num_gpus=load.num_gpus),
    )
    answer = answer_of(case, best_autoregressive(case), [], settled=settled.layout.row)
    assert answer is not None  # the settled row is one of its rows
    document = _document(request, model, [answer], [case], [])
    choice = _served(document.choice, load, request)
    return msgspec.structs.replace(document, choice=choice, traffic=settled.traffic)


def _with_one_device(request: PlanRequest) -> PlanRequest:
    """The request with the number of devices, and the nodes, that its only device's name gives."""
    hardware = request.hardware[0]
    if len(request.hardware) > 1 or not isinstance(hardware, str):
        return request
    if counted(hardware).num_gpus is None:
        return request
    request = with_devices(request, hardware)
    return msgspec.structs.replace(request, hardware=(load_hardware(hardware),))


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
    if (
        not kept
        and request.context_lens == (DEFAULT_CONTEXT,)
        and request.gen_len < room
    ):
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
    return msgspec.structs.replace(request, context_lens=tuple(kept)), refused


def _with_paying_rate(answer: Answer, lacking: NeedsAcceptance) -> NeedsAcceptance:
    """A draft with the least acceptance rate, equal at all positions, at which it would pay at the
    best row's batch, context and tp; None if it pays at no rate. A sparse draft has a budget of
    RATE_BUDGET. A step's time is that at a rate of 0.8."""
    case = answer.case
    context = answer.document.context_len
    method = lacking.draft_method
    budget: int | None = None
    if method in SPARSE_METHODS:
        budget = min(RATE_BUDGET, max(8, context // 2))
    model = None
    name = draft_model_name(lacking.draft)
    if name:
        model = load_model_spec(name)
    usual = constant_profile(0.8)
    option = DraftOption(
        draft=lacking.draft,
        method=method,
        model=model,
        budgets=(budget,),
        acceptance=usual,
        draft_tp_size=case.request.draft_tp_size,
    )
    gammas = np.arange(1, DEFAULT_MAX_GAMMA + 1)
    at = dataclasses.replace(answer.point, budget=budget, gamma=gammas)
    rates = np.linspace(0.0, 1.0, 201)
    by_position = np.repeat(rates[:, None, None], len(gammas), axis=-1)
    tokens = expected_tokens_per_step(by_position, gammas)
    prediction = predict(case.setup(option), usual, at)
    speedups = dataclasses.replace(prediction, expected_tokens_per_step=tokens).speedup
    pays = np.flatnonzero(speedups.max(axis=-1) > 1.0)
    least = None
    if len(pays):
        least = float(rates[pays[0]])
    return msgspec.structs.replace(lacking, break_even_acceptance_rate=least)


def _formats(answer: Answer) -> Formats:
    case = answer.case
    setup = case.setup(answer.option or next(iter(case.options), None))
    draft = case.drafting_precision(setup)
    return Formats(
        weight_dtype=setup.precision.weight_dtype,
        kv_dtype=setup.precision.kv_dtype,
        draft_weight_dtype=draft.weight_dtype,
        draft_kv_dtype=draft.kv_dtype,
    )
