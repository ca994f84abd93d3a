"""Which of the searched configurations to run.

Configurations within the limits go before others, then those that fit in memory; of these the highest
rate wins. Where no text was named, a server may meet any of several classes of text, and the rate gives
way to what a configuration loses on them:

    loss(configuration, text) = 1 - rate / rate of the fastest configuration on that text

The least mean loss wins, by the weights of `tasks.WEIGHTS`; of configurations whose mean losses are
nearly equal, the one that loses least where it loses most. Each draft competes with the gamma of its
highest expected rate, which the gamma table names too. Costs of a step are those that were searched: only
the tokens per step differ between texts, and how often a look-up finds a draft.

Of drafts that are as good as the best, one is taken that was checked on servers, needs no extra package
and drafts less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.acceptance import BelievedProfile
from magicdec.perfmodel.acceptance.believed import profile_on
from magicdec.perfmodel.acceptance.profile import BeliefByText
from magicdec.perfmodel.drafting import draft_of
from magicdec.perfmodel.plan.draws import draws_of
from magicdec.perfmodel.plan.request import Case, DraftOption
from magicdec.perfmodel.plan.search import (
    DraftRows,
    SearchResult,
)
from magicdec.perfmodel.speedup import Prediction, predict
from magicdec.perfmodel.trees import tokens_of_tree
from magicdec.schema.evidence import LaneEvidence
from magicdec.schema.plan import Outcome
from magicdec.schema.row import (
    Candidate,
    at_any_gamma,
    configuration,
    same_configuration,
)
from magicdec.tasks import TASKS, WEIGHTS

EXTRA_PACKAGES = {"suffix": "arctic-inference"}
"""Packages that serving engines need for a draft and do not bring along."""
NEARLY_AS_FAST = 0.03
"""Difference of two drafts' rates, relative, up to which they may be tied."""
SURELY_AHEAD = 0.75
"""Probability of being faster from which one is not tied with another."""
NEARLY_EQUAL_LOSS = 0.003
"""Difference of two mean losses up to which the largest loss decides."""
TASK_WEIGHTS = np.array([WEIGHTS[task] for task in TASKS])
IS_WEIGHED = TASK_WEIGHTS > 0.0

Scores = Mapping[tuple[object, ...], float]
"""The score by which each configuration competes, in place of its rate."""


class Objective(NamedTuple):
    """Order of configurations: those within the limits first, then those that fit in memory, then
    by generated tokens per second of all devices, or by what they lose on texts that were not named.
    """

    is_within_limits: bool
    fits: bool
    score: float


def objective(row: Candidate) -> Objective:
    return Objective(row.within_limits, row.fits, row.rate)


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one load that compete, ranked."""

    place: int
    """Place among the requested loads."""
    best: Candidate
    """The configuration to run."""
    drafted: list[Candidate]
    """The drafted rows, best first: those that may be chosen before the others."""
    admitted: list[Candidate]
    """Those of them that may be chosen."""


class CaseChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration to run of one case, spread in one way, and what it was chosen from."""

    case: Case
    searched: SearchResult
    alone: list[Candidate]
    drafted: list[Candidate]
    rankings: list[Ranking]
    """The rankings of each load, the best first."""
    row: Candidate
    """The configuration to run."""
    tied: Candidate | None
    """Another draft that is as good."""
    texts: TextRates | None
    """The competing configurations on each text, where none was named."""

    @property
    def option(self) -> DraftOption | None:
        """The draft of the configuration to run."""
        return self.searched.origin(self.row).option


def choose(
    case: Case, searched: SearchResult, *, settled: Candidate | None = None
) -> CaseChoice | None:
    """The configuration to run of everything that was searched; `settled`: the one that a simulation
    chose. None: nothing keeps the latency limits."""
    alone: list[Candidate] = []
    drafted: list[Candidate] = []
    for draft in searched:
        if draft.option is None:
            alone.extend(draft.rows)
        else:
            drafted.extend(draft.rows)
    if not alone and not drafted:
        return None
    texts = texts_of(case, searched)
    rankings = _rankings(case, alone, drafted, texts)
    best = rankings[0].best
    asked = case.request.batch_sizes
    if (
        not case.searches_batch
        and asked
        and not {ranking.best.batch_size for ranking in rankings}.issubset(asked)
    ):
        # smaller batches were tried because the requested ones do not fit
        rankings = rankings[:1]
        alone = [row for row in alone if row.batch_size == best.batch_size]
    tied = None
    if settled is not None:
        best = next(
            row for row in [*alone, *drafted] if same_configuration(row, settled)
        )
    else:
        # every load is settled, so that one is answered alike alone and in company
        for place, ranking in enumerate(rankings):
            as_good = _tied_with_best(case, searched, ranking, texts)
            if as_good:
                taken = preferred(ranking.best, as_good, searched.evidence)
                other = ranking.best if taken is not ranking.best else as_good[0]
                rankings[place] = msgspec.structs.replace(ranking, best=taken)
                if place == 0:
                    tied = other
        best = rankings[0].best
    drafted = []
    for ranking in rankings:
        drafted.extend(ranking.drafted)
    return CaseChoice(
        case=case,
        searched=searched,
        alone=alone,
        drafted=drafted,
        rankings=rankings,
        row=best,
        tied=tied,
        texts=texts,
    )


def _rankings(
    case: Case,
    alone: list[Candidate],
    drafted: list[Candidate],
    texts: TextRates | None,
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
        admitted = [row for row in drafted_here if case.admits(row)]
        others = [row for row in drafted_here if not case.admits(row)]
        scores: Scores = {}
        if texts is not None:
            scores = texts.scores([*alone_here, *admitted])
        ranking = ranked(place, alone_here, admitted, others, scores)
        best = ranking.best
        if alone_here and best.is_speculative and best.gain.speedup <= 1.0:
            # the least loss over the texts is no gain over all of them together, which the answer names
            gaining = [row for row in admitted if row.gain.speedup > 1.0]
            best = ranked(place, alone_here, gaining, [], scores).best
            ranking = msgspec.structs.replace(ranking, best=best)
        rankings.append(ranking)
    rankings.sort(key=lambda ranking: objective(ranking.best), reverse=True)
    return rankings


def ranked(
    place: int,
    alone: Sequence[Candidate],
    admitted: Sequence[Candidate],
    others: Sequence[Candidate],
    scores: Scores,
) -> Ranking:
    """Rows that compete, by `objective`: the rate is the expected one, whatever is known of a draft's
    acceptance. Drafts that are not admitted are ranked behind the others, and never chosen.
    """

    def order(row: Candidate) -> Objective:
        score = row.rate
        if scores:
            score = scores.get(configuration(row), row.rate)
        return Objective(row.within_limits, row.fits, score)

    may_be_chosen = sorted(admitted, key=order, reverse=True)
    drafted = [*may_be_chosen, *sorted(others, key=order, reverse=True)]
    best = max([*alone, *may_be_chosen], key=order, default=None)
    if best is None:
        best = drafted[0]  # nothing else runs here at all
    return Ranking(place=place, best=best, drafted=drafted, admitted=may_be_chosen)


# Drafts that are as good
# ------------------------------------------------------------


def _tied_with_best(
    case: Case, searched: SearchResult, ranking: Ranking, texts: TextRates | None
) -> list[Candidate]:
    """The best rows of other drafts that are as good as the choice, the best first: nearly as fast,
    and neither surely ahead of the other."""
    best = ranking.best
    if not best.is_speculative:
        return []
    draws = draws_of(case, searched, best)
    if draws is None:
        return []
    tied = []
    seen = {(best.draft, best.draft_method)}
    for row in ranking.admitted:
        if (row.draft, row.draft_method) in seen:
            continue
        if (row.batch_size, row.tp_size) != (best.batch_size, best.tp_size):
            continue
        seen.add((row.draft, row.draft_method))
        if texts is None:
            loss = 1.0 - row.rate / best.rate
        else:
            loss = texts.loss(row, best)
        if loss > NEARLY_AS_FAST or row.gain.speedup <= 1.0:
            continue
        if not row.fits or not row.within_limits:
            continue
        chance = draws.chance_ahead(best, row)
        if chance is not None and chance < SURELY_AHEAD:
            tied.append(row)
    return tied


def preferred(
    best: Candidate,
    tied: Sequence[Candidate],
    evidence: Callable[[Candidate], LaneEvidence],
) -> Candidate:
    """The one to take of drafts that are as good: one that was checked on servers, that needs no
    extra package, that drafts less."""

    def order(row: Candidate) -> tuple[bool, bool, int]:
        is_unchecked = evidence(row).rows == 0
        return is_unchecked, row.draft_method in EXTRA_PACKAGES, row.gamma

    return min([best, *tied], key=order)


# What the choice leaves out
# ------------------------------------------------------------


def fastest_left_out(ranking: Ranking) -> Candidate | None:
    """The drafted row of the same batch and layout with the highest gain, where no draft is chosen; of
    all batches and layouts where none is of the same. A gain is over the same layout without a draft,
    so another layout's, which may not even fit, tells nothing of the choice.
    """
    best = ranking.best
    if best.is_speculative:
        return None
    same_batch = [row for row in ranking.admitted if row.batch_size == best.batch_size]
    rows = same_batch or ranking.admitted
    same_layout = [row for row in rows if row.layout == best.layout]
    rows = same_layout or rows
    return max(rows, key=lambda row: row.gain.speedup, default=None)


def outcome_of(
    best: Candidate,
    left_out: Candidate | None,
    to_train: Candidate | None,
    *,
    lacks_acceptance: bool,
) -> Outcome:
    """Whether speculation is chosen, or why not. `left_out`: the fastest draft that is not chosen;
    `to_train`: the best that is not published."""
    if best.is_speculative:
        return "speculate"
    if left_out is None:
        if to_train is not None:
            return "not published"
        if lacks_acceptance:
            return "no acceptance"
        return "not asked"
    if left_out.gain.speedup <= 1.0:
        return "no gain"
    if not left_out.fits:
        return "no room"
    if not left_out.within_limits:
        return "over limits"
    return "no gain"


def best_to_train(ranking: Ranking) -> Candidate | None:
    """The best row of drafts that are not published for the model."""
    rows = [row for row in ranking.drafted if row.drafting.is_hypothetical]
    return max(rows, key=objective, default=None)


def pareto(rows: Iterable[Candidate]) -> list[Candidate]:
    """Rows that no other beats in both latency and throughput of all devices, fastest first."""
    frontier: list[Candidate] = []
    highest = 0.0
    for row in sorted(rows, key=lambda row: (row.between_tokens_s, -row.rate)):
        if row.fits and row.within_limits and row.rate > highest:
            frontier.append(row)
            highest = row.rate
    return frontier


# The texts that a server may meet
# ------------------------------------------------------------


class DraftOnTexts(msgspec.Struct, frozen=True, kw_only=True):
    """The searched configurations of one draft on each text."""

    rows: DraftRows
    law: BeliefByText | None
    """None: its acceptance is the same on any text, or it drafts nothing."""
    prediction: Prediction
    """[texts, rows]; of drafts without a law [rows]."""
    rates: Array
    """Generated tokens per second of all replicas: [texts, rows]."""


class TextRates(msgspec.Struct, frozen=True, kw_only=True):
    """The rate of every searched configuration of a case on each text."""

    case: Case
    searched: SearchResult
    drafts: list[DraftOnTexts]
    """In the order of those searched."""

    def rates(self, row: Candidate) -> Array:
        """Rate of a configuration by text."""
        number, place = self.searched.place(row)
        return np.asarray(self.drafts[number].rates[:, place])

    def scores(self, rows: Sequence[Candidate]) -> Scores:
        """The score by which each of these rows competes: minus the mean loss, of nearly equal ones in
        the order of their largest loss."""
        if not rows:
            return {}
        rates = np.stack([self.rates(row) for row in rows], axis=1)
        able = np.array([row.fits and row.within_limits for row in rows])
        best = np.where(able | ~able.any(), rates, 0.0).max(axis=1, keepdims=True)
        losses = 1.0 - rates / best
        mean = TASK_WEIGHTS @ losses / TASK_WEIGHTS.sum()
        most = losses[IS_WEIGHED].max(axis=0)
        least = mean[able].min() if able.any() else mean.min()
        is_near = mean <= least + NEARLY_EQUAL_LOSS
        values = np.where(
            is_near, -least - NEARLY_EQUAL_LOSS * most, -mean - NEARLY_EQUAL_LOSS
        )
        values = np.where(_is_best_depth(rows), values, values - 1.0)
        return dict(zip(map(configuration, rows), values.tolist(), strict=True))

    def loss(self, row: Candidate, other: Candidate) -> float:
        """Mean loss of a configuration against another."""
        losses = 1.0 - self.rates(row) / self.rates(other)
        return float(TASK_WEIGHTS @ losses / TASK_WEIGHTS.sum())


def _is_best_depth(rows: Sequence[Candidate]) -> Array:
    """Whether each row's gamma is the best of its draft, layout and batch."""
    best: dict[tuple[object, ...], Candidate] = {}
    for row in rows:
        key = at_any_gamma(row)
        best[key] = max(best.get(key, row), row, key=objective)
    chosen = {id(row) for row in best.values()}
    return np.array([id(row) in chosen for row in rows])


def texts_of(case: Case, searched: SearchResult) -> TextRates | None:
    """The rate of every searched configuration on each text. None: a text was named, or no draft's
    acceptance is believed."""
    if case.request.task is not None:
        return None
    drafts = [_draft_on_texts(case, draft) for draft in searched]
    if not any(draft.law for draft in drafts):
        return None
    return TextRates(case=case, searched=searched, drafts=drafts)


def _draft_on_texts(case: Case, draft: DraftRows) -> DraftOnTexts:
    option = draft.option
    prediction = draft.prediction
    usual = np.array([row.rate for row in draft.rows])
    if option is None or option.question is None or not case.admits(draft.rows[0]):
        rates = np.broadcast_to(usual, (len(TASKS), len(usual)))
        return DraftOnTexts(rows=draft, law=None, prediction=prediction, rates=rates)
    law = BeliefByText(_beliefs(option))
    by_text = _predicted_by_text(prediction, law)
    prefill = np.zeros(len(draft.rows))
    for place, row in enumerate(draft.rows):
        if row.requests is not None:
            prefill[place] = row.requests.prefill_share
    longer = by_text.full(by_text.tpot_s) / prediction.full(prediction.tpot_s)
    return DraftOnTexts(
        rows=draft,
        law=law,
        prediction=by_text,
        rates=usual / (prefill + (1.0 - prefill) * longer),
    )


def _beliefs(option: DraftOption) -> list[BelievedProfile]:
    """The draft's believed acceptance on each text."""
    assert option.question is not None  # asked only of beliefs
    profiles = []
    for task in TASKS:
        question = option.question._replace(task=task)
        profile = profile_on(question, draft=option.draft, method=option.method)
        most = option.acceptance.most_drafts
        profiles.append(msgspec.structs.replace(profile, most_drafts=most))
    return profiles


def _predicted_by_text(prediction: Prediction, law: BeliefByText) -> Prediction:
    """The prediction's rows on each text, [texts, rows]."""
    row_points = prediction.points
    gen_len = np.broadcast_to(row_points.gen_len, row_points.shape)
    points = dataclasses.replace(row_points, gen_len=np.tile(gen_len, (len(TASKS), 1)))
    setup = prediction.setup
    draft = draft_of(setup)
    if draft.is_by_sequence:
        return predict(setup, law, points)
    kv_len = row_points.context + row_points.gen_len / 2.0
    where = {
        "budget": draft.tokens_read(kv_len, row_points.budget),
        "context": draft.context_seen(kv_len, row_points.budget),
        "gamma": row_points.gamma,
    }
    tokens, _ = law.tokens_per_step(**where)
    tree = setup.speculation.tree
    if tree is not None:
        tokens = tokens_of_tree(law, tree, **where)
    return msgspec.structs.replace(
        prediction, points=points, expected_tokens_per_step=tokens
    )
