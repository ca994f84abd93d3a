"""Which gamma would serve the observed load best now, what it would gain, and how sure that is.

    goodput(γ) = b · E(γ) / step(γ)             step(γ) = Σ_n P(n) · T_step(γ · n / b)

E and the times are `predict`'s at the observed batch b and context, as in a plan. n of the b
sequences have a draft: all, but for n-gram, whose look-up may find nothing (the others verify one
token; without any the step is autoregressive), in the share of steps that was observed. gamma 0 is
among the choices. The gain is goodput over that of the gamma in use; its error is that of a speedup
(perfmodel/intervals.py): terms that both steps have cancel, and so do the rates of positions that
both draft.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from magicdec.counts import Z_90
from magicdec.errors import ConfigError
from magicdec.live.observation import Observation, ServedDraft
from magicdec.live.profile import MIN_DRAFTS, acceptance_profile
from magicdec.naming import ENGINE_TITLES
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.acceptance.believed import Question, completed
from magicdec.perfmodel.intervals import (
    OTHER_HEAD_ERROR,
    engine_error,
    interval,
    is_one_head_of_many,
    ratio_variance,
    reported_error,
    tokens_error,
)
from magicdec.perfmodel.plan.drafts import check_profiles
from magicdec.perfmodel.plan.request import deepest_gamma
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import Prediction, predict
from magicdec.reports.deployment import Deployment
from magicdec.reports.exports import write_settings
from magicdec.schema.gamma_table import BatchBand, TableGamma
from magicdec.schema.plan import Site
from magicdec.schema.record import Record
from magicdec.schema.row import Gain
from magicdec.specs.catalog import served_checkpoint
from magicdec.specs.engine import engine_names
from magicdec.specs.speculation import AUTOREGRESSIVE, SamplingSpec, SpeculationSpec

WORTH_A_CHANGE = 1.02
"""A gain below this is not worth a restart."""
MAY_MATTER = 1.1
"""To keep the gamma in use is no sure advice where another may gain so much, by the end of its
interval.
"""
TABLE_STEPS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Batches and contexts of the table, as factors on the observed ones."""
AdvisedAction = Literal["change", "keep", "unclear"]


@dataclass(frozen=True, kw_only=True)
class DraftedLoad:
    """The load, and what is drafted with."""

    setup: Setup
    acceptance: AcceptanceProfile
    batch_size: float
    context_len: float
    gamma: int
    """The gamma in use."""
    tp_size: int = 1

    @property
    def gammas(self) -> tuple[int, ...]:
        """0 to the deepest that a plan chooses with this acceptance, or to the gamma in use."""
        return tuple(range(max(deepest_gamma(self.acceptance), self.gamma) + 1))


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A server as its user describes it. Formats that are None are those of a plan; an engine that
    is None is the one that the server's metrics name, else ours."""

    model: str
    hardware: str
    engine: str | None = None
    tp_size: int = 1
    temperature: float = 1.0
    weight_dtype: str | None = None
    kv_dtype: str | None = None

    def setup(self, draft: ServedDraft | None, serving_engine: str = "") -> Setup:
        """The server as it is predicted; `draft` None: without one.

        Raises ConfigError for a name that is not known, or a draft of another vocabulary.
        """
        engine = self.engine
        if not engine:
            engine = "ours"
            if serving_engine in engine_names():
                engine = serving_engine
        speculation = AUTOREGRESSIVE
        if draft is not None:
            speculation = SpeculationSpec(
                draft=draft.name,
                draft_method=draft.method,
                draft_budget=draft.budget,
                gamma=1,
            )
        return Setup.of(
            self.model,
            self.hardware,
            engine,
            speculation,
            weight_dtype=self.weight_dtype,
            kv_dtype=self.kv_dtype,
            sampling=SamplingSpec(temperature=self.temperature),
        )


def situation_of(
    observation: Observation,
    draft: ServedDraft,
    serving: Serving,
    *,
    acceptance: AcceptanceProfile | None = None,
    context: float | None = None,
    batch: float | None = None,
) -> DraftedLoad:
    """The observed load with the observed acceptance, or with a given one where none was observed.
    `context` and `batch` replace what was observed.

    Raises ConfigError where the batch or the sequences' length is not known, or there is no
    acceptance at all.
    """
    length = context or observation.context_len
    batch = batch or observation.batch_size
    if not length or not batch:
        raise ConfigError(
            "no advice without a load: this window does not show a running batch, or sequences' "
            "length"
        )
    gamma = 0
    if observation.is_speculative and (observation.counts.drafts or 0.0) >= MIN_DRAFTS:
        gamma = observation.gamma or 0
        acceptance = acceptance_profile(
            observation, draft, model=serving.model, context=context
        )
    elif acceptance is None:
        raise ConfigError(
            "no advice without acceptance, and this server verified no drafts: give a profile with "
            "--acceptance, or "
            "let it draft for a while"
        )
    else:
        check_profiles([acceptance], draft=draft.name, method=draft.method)
    setup = serving.setup(draft, observation.target.series.engine)
    question = Question.about(
        setup.model,
        draft.name,
        draft.method,
        temperature=serving.temperature,
        context=length,
    )
    return DraftedLoad(
        setup=setup,
        acceptance=completed(acceptance, question),
        batch_size=batch,
        context_len=length,
        gamma=gamma,
        tp_size=serving.tp_size,
    )


@dataclass(frozen=True, kw_only=True)
class GammaChoice:
    """One gamma at the observed load. `gain` is over the gamma in use, with its 90 % interval."""

    gamma: int
    tokens_per_step: float
    tpot_s: float
    gain: float
    gain_low: float
    gain_high: float
    is_sure_depth: bool
    """Whether it is no deeper than the acceptance tells of."""
    is_offered: bool = True
    """Whether the engine drafts so many: of some drafts it takes their whole block alone."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """`table`: the best gamma by batch and context, and whether it surely beats 0 there (True) or
    perhaps (False).
    """

    situation: DraftedLoad
    choices: tuple[GammaChoice, ...]
    """Every gamma at the observed load."""
    best: GammaChoice
    speedup: GammaChoice
    """The best choice, with its gain over gamma 0."""
    answer: AdvisedAction
    batch_sizes: tuple[int, ...]
    context_lens: tuple[int, ...]
    table: tuple[tuple[tuple[int, bool], ...], ...]

    @property
    def in_use(self) -> GammaChoice:
        return self.choices[self.situation.gamma]

    @property
    def rival(self) -> GammaChoice:
        """The other gamma whose interval over the one in use reaches highest."""
        others = [
            choice
            for choice in self.choices
            if choice.is_offered and choice.gamma != self.situation.gamma
        ]
        return max(others, key=lambda choice: choice.gain_high)


def advise(situation: DraftedLoad) -> Advice:
    """Raises ConfigError where the load is none."""
    if situation.batch_size < 1e-3 or situation.context_len < 1:
        raise ConfigError(
            "there is no load to advise on: nothing decoded in this window"
        )
    batch = max(situation.batch_size, 1.0)
    context = situation.context_len
    choices = choices_at(situation, batch, context, over=situation.gamma)
    best = best_of(choices, situation.gamma)
    batches = _around(situation.batch_size)
    contexts = _around(context)
    table = []
    for row_batch in batches:
        row = []
        for column_context in contexts:
            cell = best_of(choices_at(situation, row_batch, column_context, over=0))
            # to draft nothing gains nothing, so it is as sure as it can be
            is_sure = cell.gamma == 0 or cell.gain_low > 1.0
            row.append((cell.gamma, is_sure))
        table.append(tuple(row))
    return Advice(
        situation=situation,
        choices=choices,
        best=best,
        speedup=choices_at(situation, batch, context, over=0)[best.gamma],
        answer=answer_of(choices, situation.gamma),
        batch_sizes=batches,
        context_lens=contexts,
        table=tuple(table),
    )


def _around(value: float) -> tuple[int, ...]:
    """The table's batches or contexts around an observed one."""
    return tuple(sorted({max(round(value * step), 1) for step in TABLE_STEPS}))


def best_of(choices: Sequence[GammaChoice], in_use: int = 0) -> GammaChoice:
    """The choice that gains most of those that are no deeper than the acceptance tells of, or than
    what is in use."""
    weighed = []
    for choice in choices:
        is_weighed = choice.is_sure_depth or choice.gamma <= in_use
        if is_weighed and choice.is_offered:
            weighed.append(choice)
    return max(weighed, key=lambda choice: choice.gain)


def answer_of(choices: Sequence[GammaChoice], in_use: int) -> AdvisedAction:
    """Advise to keep the gamma in use only where no other one's interval reaches a gain that
    matters.
    """
    best = best_of(choices, in_use)
    if best.gamma != in_use and best.gain >= WORTH_A_CHANGE and best.gain_low > 1.0:
        return "change"
    is_far = all(
        choice.gain_high < MAY_MATTER
        for choice in choices
        if choice.is_offered and choice.gamma != in_use
    )
    if is_far and (best.gamma == in_use or best.gain < WORTH_A_CHANGE):
        return "keep"
    return "unclear"


def choices_at(
    situation: DraftedLoad,
    batch: float,
    context: float,
    *,
    over: int,
) -> tuple[GammaChoice, ...]:
    """Every gamma at one load, with its gain over another one. Between a gamma and 0 the interval
    is that of a plan's speedup.
    """
    gammas = np.array(situation.gammas)
    acceptance = situation.acceptance
    at = Points(
        batch=batch,
        context=context,
        tp=float(situation.tp_size),
        budget=situation.setup.speculation.draft_budget,
        gamma=gammas,
    )
    prediction = predict(situation.setup, acceptance, at)
    tokens = prediction.full(prediction.expected_tokens_per_step)
    tpot = prediction.full(prediction.tpot_s)
    gains = tpot[over] / tpot
    bounds = interval(prediction, tokens_error(prediction, acceptance))
    speedup_low = prediction.full(bounds.speedup_low)
    speedup_high = prediction.full(bounds.speedup_high)
    low = speedup_low
    high = speedup_high
    if over != 0:
        errors = [
            _gain_error(prediction, acceptance, gamma, over)
            for gamma in gammas.tolist()
        ]
        width = np.exp(Z_90 * np.array(errors))
        low = gains / width
        high = gains * width
        low[0] = 1.0 / speedup_high[over]
        high[0] = 1.0 / speedup_low[over]
    speculation = situation.setup.speculation
    draft = situation.setup.engine.draft(speculation.draft, speculation.draft_method)
    block = acceptance.most_drafts or situation.gamma
    choices = []
    for gamma in gammas.tolist():
        is_offered = not draft.is_whole_block or gamma in (0, block, situation.gamma)
        choice = GammaChoice(
            gamma=gamma,
            tokens_per_step=tokens[gamma].item(),
            tpot_s=tpot[gamma].item(),
            gain=gains[gamma].item(),
            gain_low=low[gamma].item(),
            gain_high=high[gamma].item(),
            is_sure_depth=acceptance.tells_of(gamma),
            is_offered=is_offered,
        )
        choices.append(choice)
    return tuple(choices)


def _gain_error(
    prediction: Prediction,
    acceptance: AcceptanceProfile,
    gamma: int,
    over: int,
) -> float:
    """One relative standard deviation of goodput(gamma) / goodput(over), both above 0. Of the
    engine's error of a speedup it has the share in which the two gammas differ.
    """
    if gamma == over:
        return 0.0
    setup = prediction.setup
    at = prediction.points
    one = {}
    other = {}
    for group, seconds in prediction.terms.step_seconds("group").items():
        shares = prediction.full(seconds / prediction.step_s)
        one[group] = shares[gamma]
        other[group] = shares[over]
    run = prediction.terms.autoregressive
    of_steps = float(ratio_variance(setup, run, one, other, at.tp))
    of_engine = engine_error(setup) * abs(gamma - over) / max(gamma, over)
    reported = prediction.full(reported_error(prediction.terms))
    of_reports = float(reported[gamma] - reported[over])
    context = float(at.context)
    of_sequences = acceptance.spread / float(np.sqrt(at.batch))
    of_head = 0.0
    if is_one_head_of_many(acceptance):
        of_head = OTHER_HEAD_ERROR
    of_tokens = acceptance.ratio_error(
        gamma,
        over,
        budget=context,
        context=context,
        shift=float(np.hypot(of_sequences, of_head)),
    )
    return float(np.sqrt(of_steps + of_engine**2 + of_tokens**2 + of_reports**2))


def bands(advice: Advice) -> tuple[BatchBand, ...]:
    """(first batch, last batch, gamma) at the observed context, without gaps from batch 1 on; one
    gamma where the engine takes more for following several than they gain over these batches.
    """
    situation = advice.situation
    context = situation.context_len
    gains = []
    for batch in advice.batch_sizes:
        choices = choices_at(situation, batch, context, over=advice.best.gamma)
        gains.append(best_of(choices).gain)
    cost, _, _ = situation.setup.engine.table_costs(situation.setup.speculation.draft)
    # times as fast by the table's gammas as by the best one alone, after the engine's cost
    if statistics.geometric_mean(gains) / (1.0 + cost) <= 1.0:
        return (BatchBand(1, advice.batch_sizes[-1], advice.best.gamma),)
    policy = TableGamma(
        batch_sizes=advice.batch_sizes,
        context_lens=advice.context_lens,
        gammas=tuple(tuple(gamma for gamma, _ in row) for row in advice.table),
    )
    return tuple(policy.bands(advice.situation.context_len))


def setting(advice: Advice, engine: str) -> str:
    """The text that starts `engine` with the advised gamma, by batch where the best differs."""
    if engine not in ENGINE_TITLES:
        gamma = advice.best.gamma
        return (
            f"# {engine}: draft {gamma} tokens per step (0: start it without a draft)\n"
        )
    situation = advice.situation
    best = advice.best
    speedup = advice.speedup
    setup = situation.setup
    speculation = AUTOREGRESSIVE
    gammas: tuple[BatchBand, ...] = ()
    if best.gamma > 0:
        speculation = setup.speculation
        gammas = bands(advice)
    record = Record(
        source="calibrated",
        model=setup.model.name,
        hardware=setup.hardware.name,
        engine=setup.engine.name,
        draft=speculation.draft,
        draft_method=speculation.draft_method,
        draft_budget=speculation.draft_budget,
        gamma=best.gamma,
        tp_size=situation.tp_size,
        batch_size=max(round(situation.batch_size), 1),
        context_len=max(round(situation.context_len), 1),
        temperature=setup.sampling.temperature,
        speedup=speedup.gain,
        speedup_low=speedup.gain_low,
        speedup_high=speedup.gain_high,
    )
    name = setup.model.name
    checkpoints = {}
    checkpoint = served_checkpoint(name)
    if checkpoint is not None:
        checkpoints[name] = checkpoint
    gain = Gain(speedup=speedup.gain, low=speedup.gain_low, high=speedup.gain_high)
    deployment = Deployment(
        model=name,
        best=record,
        verdict=gain.verdict,
        bands=gammas,
        site=Site(checkpoints=checkpoints, is_cpu=setup.hardware.kind == "cpu"),
        weight_dtype=setup.precision.weight_dtype,
    )
    return write_settings(engine, deployment)
