"""An observed server as its user describes it, and what follows from both: the load, the advice, the
step that it should have, and what is wrong.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

from magicdec.counts import CAUSES, is_nothing, nothing_accepted
from magicdec.errors import ConfigError
from magicdec.live.advice import Advice, DraftedLoad, Serving, advise, situation_of
from magicdec.live.faults import ExpectedStep, expected_step, slow_line
from magicdec.live.observation import Observation, ServedDraft, agreed
from magicdec.live.profile import MIN_DRAFTS, rates
from magicdec.perfmodel.acceptance import AcceptanceProfile, constant_profile

UNTOLD_CONTEXT = 1024.0
"""Tokens of a sequence, where a file does not tell."""


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """A server as its user describes it. `serving` without a model takes the server's own name for it,
    None gives no advice; `draft` None is the one that the server names."""

    draft: ServedDraft | None = None
    serving: Serving | None = None
    acceptance: AcceptanceProfile | None = None
    context: float | None = None


@dataclass(frozen=True)
class Judgement:
    """An observation, and what follows from it; each fact is found when it is asked for."""

    observation: Observation
    facts: ServerFacts

    @cached_property
    def draft(self) -> ServedDraft:
        """The draft in use. Raises ConfigError where the server drafts with another draft."""
        return agreed(self.facts.draft, self.observation.announced)

    @cached_property
    def fault(self) -> str:
        """The sentence that the server's draft does not work; "" where it may."""
        return fault_in(self.observation, self.draft)

    @property
    def serving(self) -> Serving:
        """Raises ConfigError where neither the user nor the server names the model."""
        assert self.facts.serving is not None
        model = self.facts.serving.model or self.observation.target.model
        if not model:
            raise ConfigError(
                "the model is not named there: give it by --model, beside --hardware"
            )
        return dataclasses.replace(self.facts.serving, model=model)

    @property
    def load(self) -> tuple[float | None, float | None]:
        """Sequences' length and the batch to predict at; of a file that does not tell, usual ones."""
        context = self.facts.context
        batch = None
        if self.observation.form:
            context = context or self.observation.context_len or UNTOLD_CONTEXT
            batch = self.observation.batch_size or 1.0
        return context, batch

    @cached_property
    def situation(self) -> DraftedLoad | None:
        """The load and what drafts; None where no device was given, or a file counts no drafts.

        Raises ConfigError where it is not known, or no model is."""
        observation = self.observation
        acceptance = self.facts.acceptance
        if self.facts.serving is None:
            return None
        counts = observation.counts
        is_counted = observation.is_speculative and (counts.drafts or 0.0) >= MIN_DRAFTS
        if observation.form and not is_counted and acceptance is None:
            return None
        serving = self.serving
        context, batch = self.load
        return situation_of(
            observation,
            self.draft,
            serving,
            acceptance=acceptance,
            context=context,
            batch=batch,
        )

    @cached_property
    def advice(self) -> Advice | None:
        """Which gamma to run; None: there is no load to advise on."""
        if self.situation is None:
            return None
        return advise(self.situation)

    @cached_property
    def expected(self) -> ExpectedStep | None:
        """The step that a file's load should have; None where no device was given."""
        if self.facts.serving is None:
            return None
        context, batch = self.load
        gamma = self.observation.gamma or 0
        situation = self.situation
        if situation is not None:
            setup = situation.setup
            acceptance: AcceptanceProfile | None = situation.acceptance
            gamma = situation.gamma
        else:
            engine = self.observation.target.series.engine
            setup = self.serving.setup(self.draft if gamma else None, engine)
            acceptance = None
            if gamma:
                # a step takes as long whatever is accepted: any rate prices it
                acceptance = constant_profile(
                    0.5, draft=self.draft.name, draft_method=self.draft.method
                )
        return expected_step(
            setup,
            acceptance,
            batch=batch or 1.0,
            context=context or UNTOLD_CONTEXT,
            gamma=gamma,
            tp_size=self.facts.serving.tp_size,
        )

    @property
    def is_length_assumed(self) -> bool:
        """Whether neither the user nor the file tells how long sequences are."""
        return (self.facts.context or self.observation.context_len) is None

    def wrongs(self) -> list[str]:
        """Faults by a file's own words, its counts, and the time of its steps."""
        counts = self.observation.counts
        wrong = list(self.observation.faults)
        if counts.accepted == 0.0 and (counts.drafts or 0.0) >= MIN_DRAFTS:
            wrong.append(
                f"none of {counts.drafts:.0f} drafts had a token accepted; {CAUSES}"
            )
        if counts.step_s and self.expected is not None:
            wrong.append(slow_line(self.expected, counts.step_s, self.situation))
        return [line for line in wrong if line]


def fault_in(observation: Observation, draft: ServedDraft) -> str:
    """The sentence that the server's draft does not work; "" where it may."""
    if draft.may_be_absent or not observation.is_speculative:
        return ""
    measured = rates(observation, draft)
    if measured is None:
        return ""
    tried = measured.trials[0]
    accepted = measured.rates[0] * tried
    if not is_nothing(accepted, tried):
        return ""
    return nothing_accepted(str(draft), accepted=accepted, tried=tried)
