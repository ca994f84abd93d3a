"""The belief about a mixture of texts: one draft for chat and code, by shares of generated tokens.

A sequence of a text that accepts less takes more steps for its tokens, so that of the sequences in a
batch a share of s_k / E_k decodes text k, with E_k its tokens per step. Of such a batch

    P(draft 1..i accepted) = Σ w_k · Π_{j <= i} c_kj,    w_k = (s_k / E_k) / Σ_l s_l / E_l

and the tokens per step are 1 / Σ s_k / E_k: the time of a token is the texts' mean. What is believed
of one draft on two texts is largely one belief, so that errors add up by their correlation.
"""

from __future__ import annotations

import msgspec
import numpy as np

from magicdec.counts import Array, expected_tokens_per_step
from magicdec.perfmodel.acceptance.assumed import (
    POSITIONS,
    USUAL_GAMMA,
    Question,
    joint_levels,
    profile_of,
)
from magicdec.perfmodel.acceptance.belief import USUAL_BUDGET
from magicdec.perfmodel.acceptance.believed import BelievedProfile
from magicdec.perfmodel.acceptance.law import LawError
from magicdec.tasks import shares_of


def profile_on(question: Question, *, draft: str, method: str) -> BelievedProfile:
    """The belief about a question whose text may be a mixture ("chat=70,code=30")."""
    shares = shares_of(question.task) if question.task else {}
    if len(shares) < 2:
        return profile_of(question, draft=draft, method=method)
    questions = [question._replace(task=task) for task in shares]
    profiles = [profile_of(each, draft=draft, method=method) for each in questions]
    rates = [_rates(profile, question) for profile in profiles]
    weights, tokens = _weights(np.array(list(shares.values())), rates)
    mixed = _mixed(weights, rates)
    gains = weights * (tokens - 1.0)
    correlation = _correlation(questions)
    error = _error([each.error for each in profiles], gains / gains.sum(), correlation)
    lead = profiles[int(np.argmax(list(shares.values())))]
    # at the question's context, from where the law goes on as the lead's does
    budget = question.budget or USUAL_BUDGET
    law = lead.at_rate(float(mixed[0]), budget=budget, context=question.context).law
    if law.by_position:
        by_position = [round(float(rate), 5) for rate in mixed]
        law = msgspec.structs.replace(law, by_position=by_position)
    return msgspec.structs.replace(
        lead,
        law=law,
        error=error,
        dataset=question.task,
        source=f"{lead.source} (mixture by shares of tokens)",
    )


def _rates(profile: BelievedProfile, question: Question) -> Array:
    """Conditional rates by position, at the question's context."""
    return profile.law.conditional_rates(
        budget=question.budget, context=question.context, gamma_max=POSITIONS
    )


def _weights(shares: Array, rates: list[Array]) -> tuple[Array, Array]:
    """Shares of the sequences in a batch by text, and the tokens per step of each."""
    tokens = np.array(
        [float(expected_tokens_per_step(each, USUAL_GAMMA)) for each in rates]
    )
    slots = shares / tokens
    return slots / slots.sum(), tokens


def _mixed(weights: Array, rates: list[Array]) -> Array:
    """Conditional rates of a batch with these shares of sequences."""
    survivors = weights @ np.cumprod(np.stack(rates), axis=-1)
    before = np.concatenate([[1.0], survivors[:-1]])
    mixed: Array = survivors / np.maximum(before, 1e-12)
    return mixed


def _correlation(questions: list[Question]) -> Array:
    """Correlation of what is believed of the texts."""
    _, covariance = joint_levels(questions)
    deviation = np.sqrt(covariance.diagonal())
    correlation: Array = covariance / np.outer(deviation, deviation)
    return correlation


def _error(errors: list[LawError], parts: Array, correlation: Array) -> LawError:
    """The mixture's error, of texts with these parts of the accepted drafts."""
    combined = {}
    for name in LawError.__struct_fields__:
        each = parts * np.array([getattr(error, name) for error in errors])
        combined[name] = float(np.sqrt(max(each @ correlation @ each, 0.0)))
    return LawError(**combined)
