"""An observation as an acceptance profile, which plans read, and as a measured record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from magicdec.counts import CAUSES, Counts, clustered_stderr, constant_rate
from magicdec.errors import ConfigError
from magicdec.live.observation import CounterIncreases, Observation, ServedDraft
from magicdec.live.reading import summed
from magicdec.perfmodel.acceptance import AcceptanceProfile, fit_profile
from magicdec.perfmodel.acceptance.believed import (
    kind_of,
    told_gammas,
    usual_depth,
)
from magicdec.perfmodel.acceptance.fit import (
    MeasuredRates,
    Measurement,
    measured_rates,
    measurements_of,
)
from magicdec.perfmodel.acceptance.law import MAX_POSITIONS
from magicdec.schema.record import Record, current_environment
from magicdec.units import format_percent

ODD = 0.5
"""An engine whose first drafts are accepted less than this share of the others' times is no part of their
mean."""
SURELY = 4.0
"""Standard deviations by which it must be so."""
BY_SEQUENCE = ("sequences", "requests")
"""Segments that are of one sequence each."""
MIN_DRAFTS = 20
"""Fewer drafts than this say next to nothing; a profile is not written from them."""


def weighed(
    observation: Observation, draft: ServedDraft, gamma: int | None = None
) -> Observation:
    """The observation as this draft's, with its drafted tokens per step and without engines at which it
    does not work; `gamma`: as the user gives it."""
    return without_odd_engines(at_depth(observation, draft, gamma), draft)


def at_depth(
    observation: Observation, draft: ServedDraft, given: int | None = None
) -> Observation:
    """The observation with its drafted tokens per step, where it does not tell them: those given, else
    the draft's usual ones.

    Raises ConfigError where it tells others, or made more tokens than that.
    """
    tokens = observation.counts.tokens_per_step
    if not observation.is_speculative or tokens is None:
        return observation
    told = observation.gamma
    if told is not None:
        if given not in (None, told):
            raise ConfigError(
                f"it tells of {told} drafted tokens per step, not {given}: leave --gamma out"
            )
        return observation
    drafts = observation.counts.drafts or 1.0
    length = 1.0 + (observation.counts.accepted or 0.0) / drafts
    least = max(math.ceil(round(length, 6)) - 1, 1)
    if given is not None and given < least:
        raise ConfigError(
            f"--gamma {given}: {length:.2f} tokens per step take {least} drafted ones at least"
        )
    gamma = given or max(usual_depth(draft.name, draft.method), least)
    notes = observation.notes
    if given is None:
        notes += (
            f"drafted tokens per step are not told: {gamma} assumed, the usual number (--gamma)",
        )
    return replace(
        observation,
        load=replace(observation.load, gamma=min(gamma, MAX_POSITIONS)),
        is_gamma_assumed=given is None,
        notes=notes,
        parts=tuple(
            replace(part, load=replace(part.load, gamma=gamma))
            for part in observation.parts
        ),
    )


def without_odd_engines(observation: Observation, draft: ServedDraft) -> Observation:
    """The observation without the engines whose drafts are hardly accepted while the others' are, which
    it names: a mean over both is neither's."""
    counted = []
    for part in observation.parts:
        measured = rates(part, draft) if part.is_speculative else None
        if measured is not None and measured.trials[0] >= MIN_DRAFTS:
            counted.append((part, measured.rates[0], measured.trials[0]))
    odd = []
    faults = []
    for part, rate, trials in counted:
        others = [(each, tried) for other, each, tried in counted if other is not part]
        tried = math.fsum(each for _, each in others)
        if draft.may_be_absent or not tried:
            continue
        usual = math.fsum(each * weight for each, weight in others) / tried
        error = math.sqrt(max(rate * (1.0 - rate), 1.0 / trials) / trials)
        if rate + SURELY * error < ODD * usual:
            odd.append(part)
            faults.append(
                f"engine {part.target.replica} accepts {format_percent(rate)} of its first drafts, the others "
                f"{format_percent(usual)}; all below is of the others; {CAUSES}"
            )
    rest = [part for part in observation.parts if part not in odd]
    if not odd or not rest:
        return observation
    return replace(
        summed(rest),
        parts=observation.parts,
        faults=(*faults, *observation.faults),
        notes=observation.notes,
        is_gamma_assumed=observation.is_gamma_assumed,
    )


def measurements(
    observation: Observation, draft: ServedDraft, *, context: float
) -> list[Measurement]:
    """Counts by position and interval between scrapes, which is a cluster, since its sequences are
    alike. Trials of position 1 are the verified drafts, or all steps where a draft may be
    absent."""
    rows = []
    segments = observation.segments
    survivors = _survivors(observation, segments)
    for counters, accepted in zip(segments, survivors, strict=True):
        drafts = counters.drafts or 0.0
        blocks = drafts
        if draft.may_be_absent:
            blocks = max(counters.steps or drafts, drafts)
        rows.append(np.minimum.accumulate((blocks, *accepted)))
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
    observation: Observation, segments: Sequence[CounterIncreases]
) -> list[tuple[float, ...]]:
    """Drafts accepted at each position of each segment; where only their sum is counted, as one rate
    for all positions would.
    """
    gamma = observation.gamma or 0
    lengths = [
        1.0 + (each.accepted or 0.0) / (each.drafts or math.inf) for each in segments
    ]
    rates = constant_rate(lengths, gamma).tolist()
    rows = []
    for counters, rate in zip(segments, rates, strict=True):
        drafts = counters.drafts
        row = counters.accepted_by_position[: observation.gamma]
        if not row and drafts and counters.accepted is not None:
            row = tuple(drafts * rate**position for position in range(1, gamma + 1))
        rows.append(row)
    return rows


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
    survival = np.array(_survivors(observation, [observation.counts])[0]) / steps
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
