"""The planner: which draft, method, budget and gamma, on how many devices and at which batch; or no speculation at all.

    answer = plan(PlanRequest(model="llama-3.1-8b", hardware=("a100-sxm-80gb",), tp_size=8, batch_sizes=(64,)))
    answer.best.gamma, answer.best.speedup, answer.best.verdict

Each (device, context) is a case, answered for itself (search.py): tokens per second are compared within a case only.
With batch sizes given, the best is the best of these; without them the batch is searched too, under the
latency limits and the memory.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import cast

import msgspec
import numpy as np

from magicdec.counts import Z_90, expected_tokens_per_step
from magicdec.errors import CapacityError
from magicdec.perfmodel.acceptance import constant_profile
from magicdec.perfmodel.acceptance.law import static_batch_efficiency
from magicdec.perfmodel.plan.drafts import RATE_BUDGET, draft_options
from magicdec.perfmodel.plan.gamma import gamma_table
from magicdec.perfmodel.plan.notes import notes
from magicdec.perfmodel.plan.request import (
    DEFAULT_MAX_GAMMA,
    Device,
    DraftOption,
    PlanRequest,
    engine_of,
    lengths_of,
    resolve,
)
from magicdec.perfmodel.plan.search import Found, best_autoregressive, breakdown, candidates, ceilings, search
from magicdec.perfmodel.setup import Points
from magicdec.perfmodel.speedup import Prediction, predict
from magicdec.plan_document import Candidate, Case, Formats, MemoryUse, NeedsAcceptance, Plan
from magicdec.progress import Progress
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.model import ModelSpec
from magicdec.specs.speculation import SPARSE_METHODS, DraftMethod, draft_model_name
from magicdec.units import format_seconds

__all__ = ["Plan", "PlanRequest", "plan"]

SOURCE_ERROR = 0.08
"""Tokens per step of two harnesses on one task differ by about this share (acceptance rates by 0.05)."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One case's answer, and where it came from."""

    device: Device
    case: Case
    alone: list[Candidate]
    drafted: list[Candidate]
    option: DraftOption | None
    """The draft of the best configuration."""
    found: list[Found]
    """The predictions that the rows are of."""
    point: Points
    """The best configuration."""
    lacking: list[NeedsAcceptance] = dataclasses.field(default_factory=list)
    """The drafts that this case could not rank."""


def plan(request: PlanRequest, progress: Progress = lambda _: None) -> Plan:
    """Answers a request; `progress` hears of simulations, which take seconds.

    Raises:
        ConfigError: an impossible combination; the message names the nearest that works.
        CapacityError: the model fits on no number of the devices, or not with this batch and context.
    """
    model = request.model if isinstance(request.model, ModelSpec) else load_model_spec(request.model)
    if request.has_arrivals:
        return _under_arrivals(request, model, progress)
    request, refused = _readable(request, model)
    answers, devices = answered(request, model, refused)
    first = answers[0]
    key, others = notes(devices, first.device, first.case, first.drafted)
    return Plan(
        **msgspec.structs.asdict(first.case), model=model.name, engine=first.device.engine.name,
        request=request.record(), precision=_formats(first), other_cases=[each.case for each in answers[1:]],
        needs_acceptance=[
            _with_paying_rate(first, each)
            for each in first.lacking
            if first.device.engine.runs_staged(each.draft, each.draft_method, first.device.spread.pp)
        ],
        notes=[*key, *others, *refused], key_notes=[*key, *refused],
        autoregressive_rows=[row for each in answers for row in each.alone],
        candidates=[row for each in answers for row in each.drafted],
    )  # fmt: skip


def _under_arrivals(request: PlanRequest, model: ModelSpec, progress: Progress) -> Plan:
    """The plan of the layout and devices that a rate of arrivals takes."""
    from magicdec.perfmodel.plan.capacity import Load, plan_traffic  # most plans need no simulator

    traffic = plan_traffic(request, model, progress)
    best = traffic.best
    settled = plan(
        msgspec.structs.replace(
            request, rate=None, burstiness=1.0, requests=None, cached_len=0, ttft_p95_s=None, tpot_p95_s=None,
            balance="round-robin", workload=Load.of(request, model).workload, tp_size=best.tp_size,
            pp_size=best.pp_size, ep_size=best.ep_size if best.ep_size > 1 else None, dp_attention=best.dp_size > 1,
            num_gpus=best.num_gpus,
        )
    )  # fmt: skip
    return msgspec.structs.replace(settled, traffic=traffic, request=request.record())


def answered(request: PlanRequest, model: ModelSpec, refused: list[str]) -> tuple[list[Answer], list[Device]]:
    """Every case that can be answered, and each device as it was first spread; `refused` gets the others' reasons.

    Raises CapacityError where there is no case.
    """
    answers: list[Answer] = []
    devices: list[Device] = []
    for hardware in request.hardware:
        used: list[Device] = []
        for lengths in lengths_of(request):
            engine, context = engine_of(request, hardware), int(lengths.prompt_len)
            options, lacking = draft_options(model, request, engine=engine, context=context)
            ways = resolve(request, model, hardware, options, lengths)
            used.append(ways[0])
            try:
                found = _best_of(ways)
            except CapacityError as error:
                refused.append(str(error))
                continue
            if found is not None:
                answers.append(dataclasses.replace(found, lacking=lacking))
                used.insert(0, found.device)
        devices.append(used[0])
    if not answers:
        raise CapacityError("; ".join(refused)) if refused else _too_slow(request)
    return answers, devices


def _too_slow(request: PlanRequest) -> CapacityError:
    """The error for limits that nothing keeps, naming the least that one sequence alone reaches."""
    free = plan(msgspec.structs.replace(request, tpot_limit_s=None, ttft_limit_s=None, batch_sizes=(1,), workload=None))
    tpot, ttft = min(row.between_tokens_s for row in free.rows), min(row.first_token_s for row in free.rows)
    return CapacityError(
        f"nothing keeps the limits on latency; at batch 1 it takes at least {format_seconds(tpot)} per token and "
        f"{format_seconds(ttft)} to the first one"
    )


def _readable(request: PlanRequest, model: ModelSpec) -> tuple[PlanRequest, list[str]]:
    """The request with the contexts that the model can read, and why the others are refused. Raises CapacityError where
    it can read none."""

    def refusal(longest: int) -> str:
        stretch = (
            "; if its publisher extends it, plan a config.json with that rope_scaling "
            f"(yarn, factor {longest / room:.3g} or more)"
            if model.is_unscaled
            else ""
        )
        return f"{model.name} reads at most {room} tokens; {longest}, prompt and output together, is too long{stretch}"

    room = model.longest_context
    if request.workload is not None:
        if request.workload.max_len > room:
            raise CapacityError(refusal(request.workload.max_len))
        return request, []
    kept = tuple(context for context in request.context_lens if context + request.gen_len <= room)
    refused = [refusal(each + request.gen_len) for each in request.context_lens if each not in kept]
    if not kept:
        raise CapacityError(refused[0])
    if model.extension is not None and max(kept) + request.gen_len > model.max_position_embeddings:
        refused.append(
            f"{model.name} reads more than {model.max_position_embeddings} tokens with its publisher's rope_scaling "
            f"({model.extension.rope_type}, factor {model.extension.factor:g}; see its model card) set in its "
            "configuration only"
        )
    if model.limit is not None:
        refused.append(f"{model.name}: {model.limit}")
    return msgspec.structs.replace(request, context_lens=kept), refused


def _best_of(ways: list[Device]) -> Answer | None:
    """One case, spread in the way with the best configuration. Raises CapacityError where nothing fits."""
    alone = (best_autoregressive(device) for device in ways)
    baseline = max((row for row in alone if row is not None), key=lambda row: row.rate, default=None)
    found: list[Answer] = []
    refused: list[CapacityError] = []
    for device in ways:
        try:
            if (answer := _answer(device, baseline)) is not None:
                found.append(answer)
        except CapacityError as error:
            refused.append(error)
    if not found and refused:
        raise refused[0]
    ranked = sorted(found, key=lambda each: _objective(each.case.best), reverse=True)
    if len(ways) == 1 or not ranked:
        return ranked[0] if ranked else None
    case = msgspec.structs.replace(ranked[0].case, layouts=[each.case.best for each in ranked])
    return dataclasses.replace(ranked[0], case=case)


def _answer(device: Device, baseline: Candidate | None) -> Answer | None:
    """One case spread in one way; None where nothing keeps the latency limits. `baseline`: autoregressive decoding at
    its best. Raises CapacityError where nothing fits."""
    found = search(device, baseline)
    alone = [row for each in found if each.option is None for row in each.rows]
    drafted = [row for each in found if each.option is not None for row in each.rows]
    if not alone and not drafted:
        return None
    loads = _loads(alone, drafted, is_one=device.searches_batch)
    answered = [_ranked(*load) for load in loads]
    by_load = sorted(answered, key=lambda each: _objective(each[0]), reverse=True)
    best, drafted = by_load[0][0], [row for _, rows in by_load for row in rows]
    leading = best if best.is_speculative else next(iter(drafted), None)
    origin = next(each for each in found if best in each.rows)
    prediction = origin.of(best)
    best = _with_static_batch(device, origin, best)
    frontier = _pareto([*alone, *drafted])
    table, reach = gamma_table(device, best, leading)
    case = Case(
        hardware=device.hardware.name, context_len=best.context_len, best=best,
        autoregressive=_alone(device, prediction.points, alone, best, baseline), best_autoregressive=baseline,
        best_by_batch=[] if device.searches_batch else [row for row, _ in answered], pareto=frontier, gamma_table=table,
        reach=reach, breakdown=breakdown(prediction), memory=_memory(device, origin.option, best, prediction),
        ceilings=ceilings(prediction.setup),
    )  # fmt: skip
    return Answer(
        device=device, case=case, alone=alone, drafted=drafted, found=found, option=origin.option,
        point=prediction.points,
    )  # fmt: skip


def _objective(row: Candidate) -> tuple[bool, bool, float]:
    return row.within_limits, row.fits, row.rate


def _loads(
    alone: list[Candidate], drafted: list[Candidate], *, is_one: bool
) -> list[tuple[list[Candidate], list[Candidate]]]:
    """The rows that are ranked against each other: those of one given batch, or of all where it is searched."""
    if is_one:
        return [(alone, drafted)]
    batches = dict.fromkeys(row.batch_size for row in [*alone, *drafted])
    return [
        ([row for row in alone if row.batch_size == batch], [row for row in drafted if row.batch_size == batch])
        for batch in batches
    ]


def _ranked(alone: list[Candidate], drafted: list[Candidate]) -> tuple[Candidate, list[Candidate]]:
    """The answer for one load, and its drafted rows, best first.

    Sources of acceptance are ranked by the best lower end of an interval that each reaches, to which all but the first
    add their difference; rows of one source, and autoregressive decoding against the leading source, by their rate.
    """
    reached: dict[str, float] = {}
    for row in drafted:
        if row.fits and row.within_limits:
            own = np.log(row.rate_per_gpu / row.rate_low_per_gpu)
            apart = 0.0 if row.acceptance_source == drafted[0].acceptance_source else Z_90 * SOURCE_ERROR
            low = row.rate_per_gpu * float(np.exp(-np.hypot(own, apart)))
            reached[row.acceptance_source] = max(reached.get(row.acceptance_source, 0.0), low)

    def key(row: Candidate) -> tuple[bool, bool, float, float]:
        within, fits, rate = _objective(row)
        return within, fits, reached.get(row.acceptance_source, 0.0), rate

    ranked = sorted(drafted, key=key, reverse=True)
    of_one_source = [row for row in ranked if row.acceptance_source == ranked[0].acceptance_source]
    return max([*alone, *of_one_source], key=_objective), ranked


def _pareto(rows: list[Candidate]) -> list[Candidate]:
    """Rows that no other beats in both latency and throughput of all devices, fastest first."""
    frontier: list[Candidate] = []
    for row in sorted(rows, key=lambda each: (each.between_tokens_s, -each.rate)):
        if row.fits and row.within_limits and row.rate > (frontier[-1].rate if frontier else 0.0):
            frontier.append(row)
    return frontier


def _alone(
    device: Device, point: Points, alone: list[Candidate], best: Candidate, baseline: Candidate | None
) -> Candidate:
    """Autoregressive decoding at the best row's tp and batch, within the limits or not."""
    for row in alone:
        if (row.tp_size, row.batch_size) == (best.tp_size, best.batch_size):
            return row
    at = dataclasses.replace(point, gamma=np.zeros_like(point.gamma), budget=None)
    rate = baseline.rate if baseline is not None else None
    return candidates(device, predict(device.setup(None), None, at), None, baseline=rate)[0]


def _with_static_batch(device: Device, origin: Found, best: Candidate) -> Candidate:
    """The best row with what it keeps in a batch that waits for its slowest sequence, where a length is generated."""
    option, gen_len, lengths = origin.option, device.request.gen_len, device.lengths
    if option is None or gen_len == 0:
        return best
    kept = static_batch_efficiency(
        option.acceptance, budget=best.draft_budget, context=lengths.prompt_len + lengths.growth / 2.0,
        gamma=best.gamma, batch_size=best.batch_size, gen_len=gen_len,
    )  # fmt: skip
    return msgspec.structs.replace(best, speedup_static_batch=best.speedup * kept)


def _memory(device: Device, option: DraftOption | None, best: Candidate, prediction: Prediction) -> MemoryUse:
    where = device.tp_sizes.index(best.tp_size)
    drafted = device.largest_batches(option=option, budget=best.draft_budget, gamma=best.gamma)
    return MemoryUse(
        **{name: float(np.ravel(value)[0]) for name, value in vars(prediction.memory).items()},
        largest_batch=float(drafted[where]),
        largest_autoregressive_batch=float(device.largest_batches()[where]),
    )


def _with_paying_rate(answer: Answer, lacking: NeedsAcceptance) -> NeedsAcceptance:
    """The least rate, alike at all positions, from which a draft would pay at the best row's batch, context and tp (a
    sparse one with a budget of RATE_BUDGET); None where none does. Steps are those at a rate of 0.8."""
    device, context = answer.device, answer.case.context_len
    method = cast(DraftMethod, lacking.draft_method)
    budget = min(RATE_BUDGET, max(8, context // 2)) if method in SPARSE_METHODS else 0
    usual = constant_profile(0.8)
    option = DraftOption(
        draft=lacking.draft, method=method,
        model=load_model_spec(name) if (name := draft_model_name(lacking.draft)) else None, budgets=(budget,),
        acceptance=usual, draft_tp_size=device.request.draft_tp_size,
    )  # fmt: skip
    gammas = np.arange(1, DEFAULT_MAX_GAMMA + 1)
    at = dataclasses.replace(answer.point, budget=float(budget), gamma=gammas)
    rates = np.linspace(0.0, 1.0, 201)
    tokens = expected_tokens_per_step(np.repeat(rates[:, None, None], len(gammas), axis=-1), gammas)
    prediction = predict(device.setup(option), usual, at)
    speedups = dataclasses.replace(prediction, expected_tokens_per_step=tokens).speedup
    pays = np.flatnonzero(speedups.max(axis=-1) > 1.0)
    return msgspec.structs.replace(lacking, break_even_acceptance_rate=float(rates[pays[0]]) if len(pays) else None)


def _formats(answer: Answer) -> Formats:
    device = answer.device
    setup = device.setup(answer.option or next(iter(device.options), None))
    draft = device.drafting_precision(setup)
    return Formats(
        weight_dtype=setup.precision.weight_dtype, kv_dtype=setup.precision.kv_dtype,
        draft_weight_dtype=draft.weight_dtype, draft_kv_dtype=draft.kv_dtype,
    )  # fmt: skip
