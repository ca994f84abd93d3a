"""The answer of one case: the choice and the tables around it; and the plan document of all cases."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from magicdec.counts import expected_tokens_per_step
from magicdec.perfmodel.acceptance import constant_profile
from magicdec.perfmodel.acceptance.law import static_batch_efficiency
from magicdec.perfmodel.drafting import draft_of
from magicdec.perfmodel.kernels.gemm import GemmCurve
from magicdec.perfmodel.kernels.op import BOUNDS, ForwardTime, Op
from magicdec.perfmodel.plan.choice import (
    DEFAULT_MAX_GAMMA,
    Ranking,
    best_to_train,
    faster_with_plugin,
    fastest_left_out,
    outcome_of,
    pareto,
)
from magicdec.perfmodel.plan.drafts import RATE_BUDGET
from magicdec.perfmodel.plan.draws import Draws
from magicdec.perfmodel.plan.gamma import follows_table, gamma_table
from magicdec.perfmodel.plan.notes import notes
from magicdec.perfmodel.plan.request import Case, DraftOption, PlanRequest
from magicdec.perfmodel.plan.rows import candidates
from magicdec.perfmodel.plan.search import (
    Found,
    Searched,
    largest_that_runs,
)
from magicdec.perfmodel.plan.texts import Texts
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import Prediction, predict
from magicdec.schema import (
    DEFAULT_CONTEXTS,
    Candidate,
    CaseAnswer,
    Ceilings,
    Choice,
    Formats,
    GammaTable,
    KernelTime,
    Limit,
    MemoryUse,
    NeedsAcceptance,
    Operation,
    Outlook,
    Plan,
    bands_of,
)
from magicdec.specs import (
    LOOKUP_METHODS,
    SELF,
    SPARSE_METHODS,
    ModelSpec,
    draft_model_name,
    load_model_spec,
)


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One case spread in one way, with its best configuration (planner.py)."""

    case: Case
    found: Searched
    alone: list[Candidate]
    drafted: list[Candidate]
    rankings: list[Ranking]
    """The rankings of each load, the best first."""
    row: Candidate
    """The best configuration, as it was found."""
    tied: Candidate | None
    """Another draft that is as good."""
    texts: Texts | None
    """The competing configurations on each text, where none was named."""
    draws: Draws | None
    """The configurations that compete with the best one under the same draws, where it drafts."""

    @property
    def origin(self) -> Found:
        """The draft of the best configuration."""
        return self.found.origin(self.row)

    @cached_property
    def best(self) -> Candidate:
        """The best configuration."""
        return _with_static_batch(self.case, self.origin.option, self.row)


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
    found: Searched
    """The predictions that the rows are of."""
    point: Points
    """The best configuration."""
    lacking: list[NeedsAcceptance]
    """The drafts that this case could not rank."""


def answer_of(
    ranked: Ranked, baseline: Candidate | None, lacking: list[NeedsAcceptance]
) -> Answer:
    """The best configuration with the tables around it. `baseline`: autoregressive decoding at its
    best."""
    case = ranked.case
    best = ranked.best
    prediction = ranked.found.prediction(ranked.row)
    leading = None
    if best.is_speculative:
        leading = best
    elif ranked.drafted and case.admits(ranked.drafted[0]):
        # else the first draft breaks the limits, and the table describes none
        leading = ranked.drafted[0]
    table = gamma_table(case, best, leading)
    choice = _choice(ranked, table, baseline, lacks_acceptance=bool(lacking))
    shown = prediction
    if choice.left_out is not None:
        # the passes of the best draft are broken down, even if it is not chosen
        shown = ranked.found.prediction(choice.left_out)
    by_batch: list[Candidate] = []
    if not case.searches_batch:
        in_order = sorted(ranked.rankings, key=attrgetter("place"))
        by_batch = [ranking.best for ranking in in_order]
    document = CaseAnswer(
        hardware=case.hardware.name,
        context_len=best.context_len,
        choice=choice,
        best_by_batch=by_batch,
        pareto=pareto([*ranked.alone, *filter(case.admits, ranked.drafted)]),
        gamma_table=table,
        breakdown=breakdown(shown),
        path=draft_of(shown.setup).path.with_runner,
        memory=_memory(case, ranked.origin.option, best, prediction),
        ceilings=ceilings(prediction.setup),
    )
    return Answer(
        case=case,
        document=document,
        alone=ranked.alone,
        drafted=ranked.drafted,
        option=ranked.origin.option,
        found=ranked.found,
        point=prediction.points,
        lacking=lacking,
    )


def _choice(
    ranked: Ranked,
    table: GammaTable,
    baseline: Candidate | None,
    *,
    lacks_acceptance: bool,
) -> Choice:
    case = ranked.case
    best = ranked.best
    found = ranked.found
    ranking = dataclasses.replace(ranked.rankings[0], best=best)
    left_out = fastest_left_out(ranking, case.admits)
    to_train = best_to_train(ranking)
    outcome = outcome_of(best, left_out, to_train, lacks_acceptance=lacks_acceptance)
    runs_at = None
    if left_out is not None and outcome in ("no room", "over limits"):
        runs_at = largest_that_runs(case, case.option_of(left_out), left_out)
    shown = left_out
    if best.is_speculative:
        shown = best
    gammas = []
    if best.is_speculative:
        gammas = bands_of(best, table, is_followed=follows_table(case, table, best))
    faults = []
    for of_draft in found:
        if of_draft.option is not None and of_draft.option.acceptance.fault:
            faults.append(of_draft.option.acceptance.fault)
    return Choice(
        row=best,
        outcome=outcome,
        without_draft=_without_draft(ranked, baseline),
        best_without_draft=baseline,
        gammas=gammas,
        limits=_limits(case, best),
        left_out=left_out,
        left_out_fits=runs_at,
        faults=faults,
        outlook=_outlook(ranked, ranking, best, shown),
        tied=ranked.tied,
        evidence=None if shown is None else found.evidence(shown),
        with_plugin=faster_with_plugin(ranking, case.admits),
        to_train=to_train,
    )


def _outlook(
    ranked: Ranked, ranking: Ranking, best: Candidate, weighed: Candidate | None
) -> Outlook | None:
    """The outlook of a choice; None where no draft competes."""
    if weighed is None:
        return None
    case = ranked.case
    here = (weighed.batch_size, weighed.tp_size)
    if not any(
        (row.batch_size, row.tp_size) == here and row.within_limits and row.fits
        for row in ranked.alone
    ):
        return None
    option = case.option_of(weighed)
    measure = ""
    if option.question is not None:
        measure = measuring_command(case, option)
    tasks = []
    if ranked.texts is not None:
        admitted = [row for row in ranking.drafted if case.admits(row)]
        rows = []
        for row in [*ranked.alone, *admitted]:
            if row.batch_size == best.batch_size and row.within_limits and row.fits:
                rows.append(row)
        tasks = ranked.texts.of_tasks(ranked.row, rows or [ranked.row])
    return Outlook(tasks=tasks, measure=measure)


LOGS = "requests.jsonl"
SERVER = "http://localhost:8000"


def measuring_command(case: Case, option: DraftOption) -> str:
    """The command that measures a draft's acceptance: look-ups and draft models are replayed on logged
    requests, others are counted on a server."""
    replay = f"magicdec profile-acceptance --outputs {LOGS} --draft"
    if option.method in LOOKUP_METHODS:
        return f"{replay} {option.draft}"
    if option.model is not None and option.draft != SELF:
        return f"{replay} path/to/{option.draft}"
    draft = f"--draft {option.draft}"
    if option.draft == SELF:
        draft += f" --draft-method {option.method}"
    return (
        f"magicdec observe {SERVER} {draft} --model {case.model.name} --seconds 600 "
        "-o acceptance.json"
    )


def _limits(case: Case, best: Candidate) -> list[Limit]:
    request = case.request
    limits = []
    if request.tpot_limit_s is not None:
        between_s = best.between_tokens_s
        limits.append(
            Limit(of="time per token", limit_s=request.tpot_limit_s, value_s=between_s)
        )
    if request.ttft_limit_s is not None:
        first_s = best.first_token_s
        limits.append(
            Limit(of="first token", limit_s=request.ttft_limit_s, value_s=first_s)
        )
    return limits


def _without_draft(ranked: Ranked, baseline: Candidate | None) -> Candidate:
    """Autoregressive decoding at the best row's tp and batch, within the limits or not."""
    best = ranked.best
    for row in ranked.alone:
        if (row.tp_size, row.batch_size) == (best.tp_size, best.batch_size):
            return row
    case = ranked.case
    point = ranked.found.prediction(ranked.row).points
    at = dataclasses.replace(point, gamma=np.zeros_like(point.gamma), budget=None)
    rate = None
    if baseline is not None:
        rate = baseline.rate
    (row,) = candidates(case, predict(case.setup(None), None, at), None, baseline=rate)
    return row


def _with_static_batch(
    case: Case, option: DraftOption | None, best: Candidate
) -> Candidate:
    """The best row with what it keeps in a batch that waits for its slowest sequence, where a
    length is generated.
    """
    gen_len = case.request.gen_len
    lengths = case.lengths
    if option is None or gen_len == 0:
        return best
    kept = static_batch_efficiency(
        option.acceptance,
        budget=best.draft_budget,
        context=lengths.prompt_len + lengths.growth / 2.0,
        gamma=best.gamma,
        batch_size=best.batch_size,
        gen_len=gen_len,
    )
    decoding = msgspec.structs.replace(
        best.decoding, speedup_static_batch=best.speedup * kept
    )
    return msgspec.structs.replace(best, decoding=decoding)


def _memory(
    case: Case,
    option: DraftOption | None,
    best: Candidate,
    prediction: Prediction,
) -> MemoryUse:
    where = case.tp_sizes.index(best.tp_size)
    drafted = case.largest_batches(
        option=option, budget=best.draft_budget, gamma=best.gamma
    )
    use = {}
    for name, value in vars(prediction.memory).items():
        use[name] = float(np.ravel(value)[0])
    return MemoryUse(
        **use,
        largest_batch=float(drafted[where]),
        largest_autoregressive_batch=float(case.largest_batches()[where]),
    )


def breakdown(prediction: Prediction) -> dict[str, list[Operation]]:
    """Operations of one configuration: time, the datasheet's ceiling for the same work, and what
    binds.
    """
    terms = prediction.terms
    tp_size = int(prediction.points.tp.flat[0])
    return {
        name: [
            _operation(prediction.setup, op, tp_size)
            for op in getattr(terms, name).ops
            if _first(op.time_s) > 0
        ]
        for name in ("autoregressive", "draft", "verify", "accept", "upkeep")
    }


def ceilings(setup: Setup) -> Ceilings:
    """The device's roof for the formats of a setup."""
    hw, dtype = setup.hardware, setup.precision.compute_dtype
    gemm = GemmCurve.of(hw, dtype)
    rate = hw.compute_rate(dtype)
    return Ceilings(
        memory_bytes_per_s=hw.memory_bytes_per_s,
        flops_per_s=rate,
        gemm_bytes_per_s=gemm.bandwidth_efficiency * hw.memory_bytes_per_s,
        gemm_flops_per_s=gemm.flops_efficiency * rate,
    )


def _first(value: Any) -> float:
    return float(np.ravel(np.asarray(value, dtype=np.float64))[0])


def _operation(setup: Setup, op: Op, tp_size: int) -> Operation:
    hw = setup.hardware
    flops, weight_bytes, kv_bytes, activation_bytes, sent = (
        _first(value) for value in op.cost
    )
    num_bytes = weight_bytes + kv_bytes + activation_bytes
    wire = 2.0 * (tp_size - 1) / tp_size * sent / hw.link.bytes_per_s
    ceiling = max(
        num_bytes / hw.memory_bytes_per_s,
        flops / hw.compute_rate(setup.precision.compute_dtype),
        wire,
    )
    one = ForwardTime((op,)).bound_seconds()
    kernels: list[KernelTime] = []
    for basis in op.bases:
        time = KernelTime(
            kernel=basis.kernel,
            source=basis.source,
            relative_error=basis.relative_error,
            is_inside=basis.is_inside,
        )
        if time not in kernels:
            kernels.append(time)
    return Operation(
        op=op.name,
        time_s=_first(op.time_s),
        ceiling_s=ceiling,
        bound_by=max(BOUNDS, key=lambda each: _first(one[each])),
        flops=flops,
        bytes=num_bytes if op.group != "link" else sent,
        kernels=kernels,
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
        if first.case.engine.runs_staged(
            draft.draft, draft.draft_method, first.case.spread.pp
        ):
            needed.append(_with_paying_rate(first, draft))
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
