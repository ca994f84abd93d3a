"""The answer of one case: its rows, what competes, the choice, and the tables around it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import msgspec
import numpy as np

from magicdec.errors import CapacityError
from magicdec.perfmodel.acceptance.law import static_batch_efficiency
from magicdec.perfmodel.drafting import draft_of
from magicdec.perfmodel.lanes import evidence_of
from magicdec.perfmodel.plan.breakdown import breakdown, ceilings
from magicdec.perfmodel.plan.choice import (
    NEARLY_AS_FAST,
    SURELY_AHEAD,
    Ranking,
    best_to_train,
    choose,
    faster_with_plugin,
    fastest_left_out,
    objective,
    outcome_of,
    pareto,
    preferred,
    same_configuration,
)
from magicdec.perfmodel.plan.gamma import gamma_table
from magicdec.perfmodel.plan.one_gamma import one_gamma
from magicdec.perfmodel.plan.outlook import Draws, draws_of, outlook
from magicdec.perfmodel.plan.reach import reaches_of
from magicdec.perfmodel.plan.request import Case, DraftOption
from magicdec.perfmodel.plan.rows import candidates
from magicdec.perfmodel.plan.search import (
    Found,
    Searched,
    best_autoregressive,
    better_gamma,
    largest_that_runs,
    search,
)
from magicdec.perfmodel.plan.texts import Texts, texts_of
from magicdec.perfmodel.setup import Points
from magicdec.perfmodel.speedup import Prediction, predict
from magicdec.schema import (
    Candidate,
    CaseAnswer,
    Choice,
    GammaTable,
    LaneEvidence,
    Limit,
    MemoryUse,
    NeedsAcceptance,
    Outlook,
    bands_of,
)


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


def best_of_layouts(ways: list[Case], lacking: list[NeedsAcceptance]) -> Answer | None:
    """One case, spread in the way with the best configuration; None where nothing keeps the latency
    limits. Raises CapacityError where nothing fits.
    """
    baseline = _best_autoregressive_of(ways)
    ranked: list[_Ranked] = []
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
    ranked.sort(key=_objective_of_best, reverse=True)
    answer = _answer(ranked[0], baseline, lacking)
    if len(ways) == 1:
        return answer
    layouts = [of_way.best for of_way in ranked]
    document = msgspec.structs.replace(answer.document, layouts=layouts)
    return dataclasses.replace(answer, document=document)


def _best_autoregressive_of(ways: list[Case]) -> Candidate | None:
    """Autoregressive decoding in the fastest way. None: no way keeps the latency limits."""
    best = None
    for case in ways:
        row = best_autoregressive(case)
        if row is not None and (best is None or row.rate > best.rate):
            best = row
    return best


def _is_narrowed(case: Case, rankings: Sequence[Ranking]) -> bool:
    """Whether smaller batches were tried because the requested ones do not fit."""
    asked = case.request.batch_sizes
    if not asked or case.searches_batch:
        return False
    return any(ranking.best.batch_size not in asked for ranking in rankings)


def _objective_of_best(ranked: _Ranked) -> tuple[bool, bool, float]:
    return objective(ranked.best)


@dataclass(frozen=True, kw_only=True)
class _Ranked:
    """One case spread in one way, with its best configuration."""

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


def answer_of(
    case: Case,
    baseline: Candidate | None,
    lacking: list[NeedsAcceptance],
    *,
    settled: Candidate | None = None,
) -> Answer | None:
    """The answer for one case spread in one way. None: nothing keeps the latency limits.

    `baseline` is autoregressive decoding at its best. `settled` is the configuration to run if a
    simulation chose it. Raises CapacityError if nothing fits.
    """
    ranked = _ranked(case, baseline, settled=settled)
    if ranked is None:
        return None
    return _answer(ranked, baseline, lacking)


def _ranked(
    case: Case, baseline: Candidate | None, *, settled: Candidate | None = None
) -> _Ranked | None:
    """Everything that competes, and the best of it. None: nothing keeps the latency limits.

    Raises CapacityError if nothing fits."""
    found = search(case, baseline)
    alone = _rows_of(found, is_drafted=False)
    drafted = _rows_of(found, is_drafted=True)
    if not alone and not drafted:
        return None
    texts = texts_of(case, found)
    rankings = _rankings(case, alone, drafted, texts)
    ranking = rankings[0]
    if _is_narrowed(case, rankings):
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
    return _Ranked(
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
    taken = preferred(best, as_good, partial(_evidence, found))
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


def _answer(
    ranked: _Ranked, baseline: Candidate | None, lacking: list[NeedsAcceptance]
) -> Answer:
    """The best configuration with the tables around it."""
    case = ranked.case
    best = ranked.best
    prediction = ranked.found.prediction(ranked.row)
    leading = _leading(case, best, ranked.drafted)
    table = gamma_table(case, best, leading)
    without_draft = _without_draft(
        case, prediction.points, ranked.alone, best, baseline
    )
    choice = _choice(
        case,
        dataclasses.replace(ranked.rankings[0], best=best),
        ranked,
        table=table,
        without_draft=without_draft,
        baseline=baseline,
        lacks_acceptance=bool(lacking),
    )
    shown = _shown(ranked.found, choice, prediction)
    document = CaseAnswer(
        hardware=case.hardware.name,
        context_len=best.context_len,
        choice=choice,
        best_by_batch=_by_batch(case, ranked.rankings),
        pareto=pareto([*ranked.alone, *filter(case.admits, ranked.drafted)]),
        gamma_table=table,
        reach=reaches_of(case, best, _reaching(case, choice, leading)),
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


def _rows_of(found: Searched, *, is_drafted: bool) -> list[Candidate]:
    rows: list[Candidate] = []
    for of_option in found:
        if (of_option.option is not None) == is_drafted:
            rows.extend(of_option.rows)
    return rows


def _rankings(
    case: Case,
    alone: list[Candidate],
    drafted: list[Candidate],
    texts: Texts | None,
) -> list[Ranking]:
    """The ranking of each load, the best first."""
    rankings = []
    for place, alone_here, drafted_here in _loads(case, alone, drafted):
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
    rankings.sort(key=_objective_of_ranking, reverse=True)
    return rankings


def _leading(case: Case, best: Candidate, drafted: list[Candidate]) -> Candidate | None:
    """The row whose draft the gamma table describes. None: the first draft breaks the limits."""
    if best.is_speculative:
        return best
    if drafted and case.admits(drafted[0]):
        return drafted[0]
    return None


def _reaching(
    case: Case, choice: Choice, leading: Candidate | None
) -> list[DraftOption]:
    """The drafts whose reaches are asked for, that of the gamma table before the others."""
    asked = case.request.reaches
    shown = choice.left_out or choice.row
    options = []
    for option in case.options:
        is_shown = (option.draft, option.method) == (shown.draft, shown.draft_method)
        if asked == "none" or (asked == "chosen" and not is_shown):
            continue
        if option.acceptance.fault:
            continue
        if case.gammas_of(option) != (0,):
            options.append(option)
    if leading is not None and leading.is_speculative:
        first = case.option_of(leading)
        options.sort(key=lambda option: option is not first)
    return options


def _shown(found: Searched, choice: Choice, prediction: Prediction) -> Prediction:
    """The prediction whose passes are broken down: the best draft's, even if it is not chosen."""
    row = choice.left_out
    if row is None:
        return prediction
    return found.prediction(row)


def _objective_of_ranking(ranking: Ranking) -> tuple[bool, bool, float]:
    return objective(ranking.best)


def _by_batch(case: Case, rankings: Sequence[Ranking]) -> list[Candidate]:
    """The best row of each requested batch, in the order of the search."""
    if case.searches_batch:
        return []
    return [ranking.best for ranking in sorted(rankings, key=_place)]


def _place(ranking: Ranking) -> int:
    return ranking.place


def _loads(
    case: Case,
    alone: list[Candidate],
    drafted: list[Candidate],
) -> list[tuple[int, list[Candidate], list[Candidate]]]:
    """The rows that compete: the rows of each requested batch, or all rows if batches are
    searched."""
    if case.searches_batch:
        return [(0, alone, drafted)]
    batches = dict.fromkeys(row.batch_size for row in [*alone, *drafted])
    loads = []
    for place, batch in enumerate(batches):
        alone_here = [row for row in alone if row.batch_size == batch]
        drafted_here = [row for row in drafted if row.batch_size == batch]
        loads.append((place, alone_here, drafted_here))
    return loads


def _choice(
    case: Case,
    ranking: Ranking,
    ranked: _Ranked,
    *,
    table: GammaTable,
    without_draft: Candidate,
    baseline: Candidate | None,
    lacks_acceptance: bool,
) -> Choice:
    best = ranking.best
    found = ranked.found
    left_out = fastest_left_out(ranking, case.admits)
    to_train = best_to_train(ranking)
    outcome = outcome_of(best, left_out, to_train, lacks_acceptance=lacks_acceptance)
    runs_at = None
    if left_out is not None and outcome in ("no room", "over limits"):
        runs_at = largest_that_runs(case, case.option_of(left_out), left_out)
    shown = left_out
    if best.is_speculative:
        shown = best
    better = None
    if shown is not None and case.request.gamma is not None:
        better = better_gamma(case, case.option_of(shown), shown)
    one = None
    gammas = []
    if best.is_speculative:
        one = one_gamma(case.engine, table, best)
        gammas = bands_of(best, table, one)
    return Choice(
        row=best,
        outcome=outcome,
        without_draft=without_draft,
        best_without_draft=baseline,
        gammas=gammas,
        one_gamma=one,
        limits=_limits(case, best),
        left_out=left_out,
        left_out_fits=runs_at,
        better_gamma=better,
        faults=_faults(found),
        outlook=_outlook(ranked, ranking, best, shown),
        tied=ranked.tied,
        evidence=None if shown is None else _evidence(found, shown),
        with_plugin=faster_with_plugin(ranking, case.admits),
        to_train=to_train,
    )


def _faults(found: Searched) -> list[str]:
    """Sentences on the drafts that were measured and do not work."""
    faults = []
    for of_draft in found:
        if of_draft.option is not None and of_draft.option.acceptance.fault:
            faults.append(of_draft.option.acceptance.fault)
    return faults


def _outlook(
    ranked: _Ranked, ranking: Ranking, best: Candidate, weighed: Candidate | None
) -> Outlook | None:
    """The outlook of a choice; None where no draft competes."""
    if weighed is None:
        return None
    case = ranked.case
    draws = ranked.draws
    if draws is None or draws.place(weighed) is None:
        draws = draws_of(case, ranked.found, weighed)
    if draws is None:
        return None
    tasks = []
    if ranked.texts is not None:
        admitted = [row for row in ranking.drafted if case.admits(row)]
        rows = []
        for row in [*ranked.alone, *admitted]:
            if row.batch_size == best.batch_size and row.within_limits and row.fits:
                rows.append(row)
        tasks = ranked.texts.of_tasks(ranked.row, rows or [ranked.row])
    return outlook(case, draws, best, weighed, tasks)


def _evidence(found: Searched, row: Candidate) -> LaneEvidence:
    """The evidence from measured servers like a row's."""
    return evidence_of(found.origin(row).prediction.setup)


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


def _without_draft(
    case: Case,
    point: Points,
    alone: list[Candidate],
    best: Candidate,
    baseline: Candidate | None,
) -> Candidate:
    """Autoregressive decoding at the best row's tp and batch, within the limits or not."""
    for row in alone:
        if (row.tp_size, row.batch_size) == (best.tp_size, best.batch_size):
            return row
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
