"""An observation as an acceptance profile, which plans read, and as a measured record."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from magicdec.counts import Counts, clustered_stderr, constant_rate
from magicdec.errors import ConfigError
from magicdec.live.observation import CounterIncreases, Observation, ServedDraft
from magicdec.perfmodel.acceptance import AcceptanceProfile, fit_profile
from magicdec.perfmodel.acceptance.believed import kind_of, told_gammas
from magicdec.perfmodel.acceptance.fit import (
    MeasuredRates,
    Measurement,
    measured_rates,
    measurements_of,
)
from magicdec.perfmodel.acceptance.law import MAX_POSITIONS
from magicdec.schema.record import Record, current_environment

BY_SEQUENCE = ("sequences", "requests")
"""Segments that are of one sequence each."""
MIN_DRAFTS = 20
"""Fewer drafts than this say next to nothing; a profile is not written from them."""


def measurements(
    observation: Observation, draft: ServedDraft, *, context: float
) -> list[Measurement]:
    """Counts by position and interval between scrapes, which is a cluster, since its sequences are
    alike. Trials of position 1 are the verified drafts, or all steps where a draft may be
    absent."""
    rows = []
    for counters in observation.segments:
        drafts = counters.drafts or 0.0
        blocks = drafts
        if draft.may_be_absent:
            blocks = max(counters.steps or drafts, drafts)
        rows.append(np.minimum.accumulate((blocks, *_survivors(observation, counters))))
    budget = context
    if draft.budget is not None:
        budget = min(float(draft.budget), context)
    return measurements_of(
        Counts.of_survivors(rows),
        draft_method=draft.method,
        budget=budget,
        context=context,
    )


def _survivors(
    observation: Observation, counters: CounterIncreases
) -> tuple[float, ...]:
    """Drafts accepted at each position; where only their sum is counted, as one rate for all
    positions would.
    """
    drafts = counters.drafts
    gamma = observation.gamma
    if counters.accepted_by_position:
        return counters.accepted_by_position[:gamma]
    if not drafts or not gamma or counters.accepted is None:
        return ()
    rate = float(constant_rate(1.0 + counters.accepted / drafts, gamma))
    return tuple(drafts * rate**position for position in range(1, gamma + 1))


def rates(observation: Observation, draft: ServedDraft) -> MeasuredRates | None:
    """Conditional rates with standard errors; None where nothing was drafted."""
    rows = []
    for row in measurements(observation, draft, context=_context(observation, None)):
        if row.trials > 0:
            rows.append(row)
    if rows:
        return measured_rates(rows)[0]
    return None


def tokens_stderr(observation: Observation) -> float | None:
    """Standard error of the tokens per step: of independent steps, or where greater of intervals as
    clusters.

    Independent: Var(N) = Σ (2i − 1)·S_i − (Σ S_i)², S_i = P(N ≥ i).
    """
    steps = observation.counts.steps
    if not steps:
        return None
    survival = np.array(_survivors(observation, observation.counts)) / steps
    odd = 2.0 * np.arange(1, len(survival) + 1) - 1.0
    variance = math.fsum(odd * survival) - math.fsum(survival) ** 2
    independent = math.sqrt(max(variance, 0.0) / steps)
    if len(observation.segments) < 3:
        return independent
    accepted = [counts.accepted or 0.0 for counts in observation.segments]
    steps_of = [counts.steps or 0.0 for counts in observation.segments]
    return max(independent, clustered_stderr(accepted, steps_of) or 0.0)


def _context(observation: Observation, given: float | None) -> float:
    return max(given or observation.context_len or 1.0, 1.0)


def acceptance_profile(
    observation: Observation,
    draft: ServedDraft,
    *,
    model: str,
    context: float | None = None,
    dataset: str = "",
) -> AcceptanceProfile:
    """The profile that `plan --acceptance` reads.

    Raises ConfigError: nothing was drafted, too little was, or the context is not known.
    """
    counts = observation.counts
    if not observation.is_speculative:
        raise ConfigError(
            "no draft was verified in this window, so there is no acceptance to write: the server "
            "runs without "
            "speculation, or had no load"
        )
    if (counts.drafts or 0.0) < MIN_DRAFTS and observation.unit not in BY_SEQUENCE:
        raise ConfigError(
            f"{counts.drafts:.0f} drafts were verified in this window; at least {MIN_DRAFTS} are "
            "needed for a profile"
        )
    if context is None and observation.context_len is None:
        raise ConfigError(
            "this engine does not say how long its sequences are; give their length with --context"
        )
    where = observation.form or f"observed on {observation.target.series.engine}"
    source = f"{where}: {counts.drafts:.0f} drafts, {counts.steps:.0f} steps"
    spread: float | None = 0.0  # between intervals, in which sequences mix
    if observation.unit in BY_SEQUENCE:
        spread = None
    rows = measurements(observation, draft, context=_context(observation, context))
    profile = fit_profile(
        rows,
        model=model,
        draft=draft.name,
        dataset=dataset,
        source=source,
        spread=spread,
    )
    counters = observation.form or "an engine's counters"
    definition = f"conditional rate by position, from {counters}"
    if not counts.accepted_by_position:
        definition = (
            "one rate for all positions, from the tokens per step that an engine counts"
        )
        profile = msgspec.structs.replace(
            profile, told_gammas=_told_gammas(observation, draft)
        )
    if draft.may_be_absent:
        definition += "; a step without a draft counts as one that was not accepted"
        share = 1.0
        if observation.drafted_share is not None:
            share = min(observation.drafted_share, 1.0)
        profile = msgspec.structs.replace(profile, drafted_share=share)
    return msgspec.structs.replace(profile, definition=definition, name="observed")


def _told_gammas(observation: Observation, draft: ServedDraft) -> tuple[int, ...]:
    """The gammas of which the tokens per step of one gamma tell something."""
    gamma = observation.gamma
    counts = observation.counts
    if not gamma or not counts.drafts:
        return ()
    if observation.is_gamma_assumed:
        return (gamma,)
    tokens = 1.0 + (counts.accepted or 0.0) / counts.drafts
    rates = np.full(MAX_POSITIONS, float(constant_rate(tokens, gamma)))
    return told_gammas(kind_of(draft.name, draft.method), gamma, rates)


def record(
    observation: Observation,
    draft: ServedDraft,
    *,
    model: str,
    hardware: str,
    tp_size: int,
) -> Record:
    """The observation as a measured record.

    Raises ConfigError where the engine says neither its batch nor its sequences' length.
    """
    counts = observation.counts
    batch = observation.batch_size
    context = observation.context_len
    if not batch or not context:
        raise ConfigError(
            "a record needs the running batch and the sequences' length; this window does not show "
            "both"
        )
    measured = None
    if observation.is_speculative:
        measured = rates(observation, draft)
    speculation: dict[str, Any] = {"draft": "none", "draft_method": "none", "gamma": 0}
    if measured is not None:
        speculation = {
            "draft": draft.name,
            "draft_method": draft.method,
            "draft_budget": draft.budget,
            "gamma": observation.gamma or 0,
            "acceptance_by_position": measured.rates,
            "acceptance_trials_by_position": [
                round(trials) for trials in measured.trials
            ],
        }
    return Record(
        kind="observed",
        source="measured",
        model=model,
        hardware=hardware,
        engine=observation.target.series.engine,
        tp_size=tp_size,
        batch_size=max(round(batch), 1),
        context_len=max(round(context), 1),
        expected_tokens_per_step=counts.tokens_per_step,
        tokens_per_step_stderr=tokens_stderr(observation),
        step_s=counts.step_s,
        tpot_s=counts.tpot_s,
        ttft_s=counts.ttft_s,
        tokens_per_s=observation.tokens_per_s,
        notes=[
            f"{observation.num_scrapes} scrapes",
            f"{counts.output_tokens or 0:.0f} tokens",
        ],
        environment=current_environment(),
        **speculation,
    )
