"""The texts that a server may meet, where none was named: what every configuration gives on each class
of text, and the one that serves them.

    loss(configuration, text) = 1 - rate / rate of the fastest configuration on that text

The least mean loss wins, by the weights of `tasks.WEIGHTS`; of configurations whose mean losses are
nearly equal, the one that loses least where it loses most. Each draft competes with the gamma of its
highest expected rate, which the gamma table names too. Costs of a step are those that were searched: only
the tokens per step differ between texts, and how often a look-up finds a draft.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.acceptance import AcceptanceProfile, BelievedProfile
from magicdec.perfmodel.acceptance.mixed import profile_on
from magicdec.perfmodel.acceptance.uncertain import mean_tokens
from magicdec.perfmodel.drafting import draft_of
from magicdec.perfmodel.intervals import QUARTILES, interval, tokens_error
from magicdec.perfmodel.plan.choice import at_any_gamma, configuration, objective
from magicdec.perfmodel.plan.request import Case, DraftOption
from magicdec.perfmodel.plan.rows import requests_of
from magicdec.perfmodel.plan.search import Found, Searched
from magicdec.perfmodel.speedup import Prediction, predict
from magicdec.perfmodel.trees import tokens_of_tree
from magicdec.schema import NO_GAIN, Candidate, Gain, OfTask
from magicdec.tasks import TASKS, WEIGHTS

NEARLY_EQUAL_LOSS = 0.003
"""Difference of two mean losses up to which the largest loss decides."""
TASK_WEIGHTS = np.array([WEIGHTS[task] for task in TASKS])
IS_WEIGHED = TASK_WEIGHTS > 0.0


@dataclass(frozen=True)
class Stacked:
    """One law of several texts: the first axis of its points is the text."""

    profiles: Sequence[AcceptanceProfile]

    is_assumed: ClassVar[bool] = True
    is_counted: ClassVar[bool] = False

    @property
    def is_partly_drafted(self) -> bool:
        return any(profile.is_partly_drafted for profile in self.profiles)

    def _on_each(self, of: Any, **at: Any) -> Array:
        values = []
        for place, profile in enumerate(self.profiles):
            own = {}
            for name, value in at.items():
                is_by_text = np.ndim(value) > 1
                own[name] = value[place] if is_by_text else value
            values.append(of(profile)(**own))
        return np.stack(values)

    def tokens_per_step(self, **at: Any) -> tuple[Array, Array]:
        both = self._on_each(
            lambda profile: (
                lambda **at: np.stack(
                    np.broadcast_arrays(*profile.tokens_per_step(**at))
                )
            ),
            **at,
        )
        return both[:, 0], both[:, 1]

    @property
    def spread(self) -> float:
        """Beliefs have the same on any text."""
        return self.profiles[0].spread

    @property
    def draft_method(self) -> str:
        return self.profiles[0].draft_method

    def mean_tokens(self, middle: Array, **at: Any) -> Array:
        return mean_tokens(middle, at["gamma"], self.tokens_error(**at))

    def tokens_error(self, *, shifts: Sequence[Any] = (), **at: Any) -> Array:
        return self._on_each(
            lambda profile: partial(profile.tokens_error, shifts=shifts), **at
        )

    def drafted_share_at(self, gamma: Any) -> Array:
        return self._on_each(
            lambda profile: (
                lambda gamma: np.broadcast_to(
                    profile.drafted_share_at(gamma), np.shape(gamma)
                )
            ),
            gamma=gamma,
        )

    def draft_len_at(self, gamma: Any) -> Array:
        return self._on_each(
            lambda profile: (
                lambda gamma: np.broadcast_to(
                    profile.draft_len_at(gamma), np.shape(gamma)
                )
            ),
            gamma=gamma,
        )


@dataclass(frozen=True, kw_only=True)
class OnTexts:
    """The searched configurations of one draft on each text."""

    found: Found
    profiles: Sequence[AcceptanceProfile]
    """None: its acceptance is the same on any, or it drafts nothing."""
    prediction: Prediction
    """[texts, rows]; of drafts without profiles [rows]."""
    rates: Array
    """Generated tokens per second of all replicas: [texts, rows]."""

    @cached_property
    def _error(self) -> Array:
        """Relative error of the tokens per step: [texts, rows]."""
        law: Any = Stacked(self.profiles)
        error: Array = self.prediction.full(tokens_error(self.prediction, law))
        return error

    def gains(
        self, case: Case, texts: Sequence[int], places: Sequence[int]
    ) -> list[Gain]:
        """The gains of rows, each on a text."""
        if self.found.option is None:
            return [NO_GAIN] * len(texts)
        num_rows = len(self.found.rows)
        if not self.profiles:
            return [self.found.rows[place].gain for place in places]
        flat = np.array(texts) * num_rows + np.array(places)
        rows = self.prediction.take(flat)
        gains = interval(rows, self._error.ravel()[flat]).gains
        whole = requests_of(case, rows)
        expected = rows.full(rows.speedup)
        if whole is not None:
            gains = whole.gains(gains)
            expected = rows.full(whole.speedup_at(rows.speedup))
        quantiles = gains.quantiles()
        pays = gains.above()
        found = []
        for number in range(len(texts)):
            found.append(
                Gain(
                    speedup=float(expected[number]),
                    low=float(quantiles[0, number]),
                    high=float(quantiles[-1, number]),
                    pays=float(pays[number]),
                    quartiles=quantiles[QUARTILES, number].tolist(),
                )
            )
        return found


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The gain of every searched configuration of a case on each text."""

    case: Case
    searched: Searched
    drafts: list[OnTexts]
    """In the order of those searched."""

    def rates(self, row: Candidate) -> Array:
        """Rate of a configuration by text."""
        number, place = self.searched.place(row)
        return np.asarray(self.drafts[number].rates[:, place])

    def score_of(self, rows: Sequence[Candidate]) -> Callable[[Candidate], float]:
        """The score by which these rows compete: minus the mean loss, of nearly equal ones in the
        order of their largest loss. That of any other row is its rate."""
        scores: dict[tuple[object, ...], float] = {}
        if rows:
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
            scores = dict(zip(map(configuration, rows), values.tolist(), strict=True))

        def score(row: Candidate) -> float:
            return scores.get(configuration(row), row.rate)

        return score

    def loss(self, row: Candidate, other: Candidate) -> float:
        """Mean loss of a configuration against another."""
        losses = 1.0 - self.rates(row) / self.rates(other)
        return float(TASK_WEIGHTS @ losses / TASK_WEIGHTS.sum())

    def of_tasks(self, chosen: Candidate, rows: Sequence[Candidate]) -> list[OfTask]:
        """The choice's gain on each text, and the fastest configuration there of these."""
        number, place = self.searched.place(chosen)
        every = range(len(TASKS))
        own = self.drafts[number].gains(self.case, every, [place] * len(TASKS))
        kept = self.rates(chosen)
        rates = np.stack([self.rates(row) for row in rows], axis=1)
        fastest = np.argmax(rates, axis=1)
        best = self._best_gains([rows[place] for place in fastest])
        tasks = []
        for text in every:
            row = rows[fastest[text]]
            tasks.append(
                OfTask(
                    task=TASKS[text],
                    weight=WEIGHTS[TASKS[text]],
                    own=own[text],
                    draft=row.draft,
                    draft_method=row.draft_method,
                    draft_budget=row.draft_budget,
                    gamma=row.gamma,
                    best=best[text],
                    changes=max(
                        float(rates[text, fastest[text]] / kept[text]) - 1.0, 0.0
                    ),
                )
            )
        return tasks

    def _best_gains(self, rows: Sequence[Candidate]) -> list[Gain]:
        """The gain of one row on each text."""
        by_draft: dict[int, list[tuple[int, int]]] = {}
        for text, row in enumerate(rows):
            number, place = self.searched.place(row)
            by_draft.setdefault(number, []).append((text, place))
        gains: dict[int, Gain] = {}
        for number, at in by_draft.items():
            texts = [text for text, _ in at]
            places = [place for _, place in at]
            found = self.drafts[number].gains(self.case, texts, places)
            gains |= dict(zip(texts, found, strict=True))
        return [gains[text] for text in range(len(rows))]


def _is_best_depth(rows: Sequence[Candidate]) -> Array:
    """Whether each row's gamma is the best of its draft, layout and batch."""
    best: dict[tuple[object, ...], Candidate] = {}
    for row in rows:
        key = at_any_gamma(row)
        best[key] = max(best.get(key, row), row, key=objective)
    chosen = {id(row) for row in best.values()}
    return np.array([id(row) in chosen for row in rows])


def texts_of(case: Case, searched: Searched) -> Texts | None:
    """The gain of every searched configuration on each text. None: a text was named, or no draft's
    acceptance is believed."""
    if case.request.task is not None:
        return None
    drafts = [_on_texts(case, of_draft) for of_draft in searched]
    if not any(draft.profiles for draft in drafts):
        return None
    return Texts(case=case, searched=searched, drafts=drafts)


def _on_texts(case: Case, found: Found) -> OnTexts:
    option = found.option
    prediction = found.prediction
    usual = np.array([row.rate for row in found.rows])
    if option is None or option.question is None or not case.admits(found.rows[0]):
        rates = np.broadcast_to(usual, (len(TASKS), len(usual)))
        return OnTexts(found=found, profiles=(), prediction=prediction, rates=rates)
    profiles = _profiles(option)
    stacked = _stacked(prediction, Stacked(profiles))
    prefill = np.zeros(len(found.rows))
    for place, row in enumerate(found.rows):
        if row.requests is not None:
            prefill[place] = row.requests.prefill_share
    longer = stacked.full(stacked.tpot_s) / prediction.full(prediction.tpot_s)
    return OnTexts(
        found=found,
        profiles=profiles,
        prediction=stacked,
        rates=usual / (prefill + (1.0 - prefill) * longer),
    )


def _profiles(option: DraftOption) -> list[BelievedProfile]:
    """The draft's believed acceptance on each text."""
    assert option.question is not None  # asked only of beliefs
    profiles = []
    for task in TASKS:
        question = option.question._replace(task=task)
        profile = profile_on(question, draft=option.draft, method=option.method)
        most = option.acceptance.most_drafts
        profiles.append(msgspec.structs.replace(profile, most_drafts=most))
    return profiles


def _stacked(prediction: Prediction, law: Stacked) -> Prediction:
    """The prediction's rows on each text, [texts, rows]."""
    at = prediction.points
    gen_len = np.broadcast_to(at.gen_len, at.shape)
    points = dataclasses.replace(at, gen_len=np.tile(gen_len, (len(TASKS), 1)))
    setup = prediction.setup
    draft = draft_of(setup)
    if draft.is_by_sequence:
        return predict(setup, law, points)
    kv_len = at.context + at.gen_len / 2.0
    where = {
        "budget": draft.tokens_read(kv_len, at.budget),
        "context": draft.context_seen(kv_len, at.budget),
        "gamma": at.gamma,
    }
    middle, _ = law.tokens_per_step(**where)
    tree = setup.speculation.tree
    if tree is not None:
        middle = tokens_of_tree(law, tree, **where)
    return dataclasses.replace(
        prediction,
        points=points,
        middle_tokens_per_step=middle,
        expected_tokens_per_step=law.mean_tokens(middle, **where),
    )
