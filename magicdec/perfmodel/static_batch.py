"""What a static batch loses while its last sequences finish: the drain.

    efficiency = (gen_len / E[max_j n_j]) / expected_tokens_per_step

n_j = speculative steps that sequence j takes for gen_len tokens. Its own rate p_j comes from a Beta distribution with
mean α and standard deviation `spread`; given p_j, the tokens of a step are independent, and their sum over t steps is
taken as normal, so P(n_j ≤ t) = Φ((t·μ − gen_len + ½)/√(t·v)), μ and v being the mean and variance of the tokens per
step. A batch is done when its slowest sequence is; autoregressive sequences all take gen_len steps and lose nothing.
Assumed: a step takes as long with idle slots as without. Ignored: correlation between the steps of a sequence beyond
p_j.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance_law import Array, Law, survival

NUM_NODES = 240
MAX_STEPS_EVALUATED = 2048


def sequence_rates(mean: float, spread: float) -> tuple[Array, Array]:
    """Rates of sequences and their weights: a Beta distribution by midpoints. One node where the spread is 0."""
    variance = min(spread**2, 0.95 * mean * (1.0 - mean))
    if variance <= 1e-12:
        return np.array([mean]), np.array([1.0])
    total = mean * (1.0 - mean) / variance - 1.0
    reach = 8.0 * math.sqrt(variance)
    low, high = max(0.0, mean - reach), min(1.0, mean + reach)
    nodes = low + (high - low) * (np.arange(NUM_NODES) + 0.5) / NUM_NODES
    log_density = (mean * total - 1.0) * np.log(nodes) + ((1.0 - mean) * total - 1.0) * np.log1p(-nodes)
    weights = np.exp(log_density - log_density.max())
    return nodes, weights / weights.sum()


def expected_steps_of_slowest(
    law: Law, *, first_rate: float, gamma: int, batch_size: int, gen_len: int, spread: float
) -> tuple[float, float]:
    """E[max_j n_j] over a batch, and the expected tokens per step of all sequences together."""
    from scipy.special import ndtr  # most plans need no drain, and need not wait for the import

    nodes, weights = sequence_rates(first_rate, spread)
    survivors = survival(law.rates_after(nodes, gamma))
    accepted = survivors.sum(axis=-1)
    variance = (survivors * (2.0 * np.arange(1, gamma + 1) - 1.0)).sum(axis=-1) - accepted**2
    expected = 1.0 + float(survival(law.rates_after(first_rate, gamma)).sum())
    mean = np.clip((1.0 + accepted) * expected / float(weights @ (1.0 + accepted)), 1.0, gamma + 1.0)
    fewest = math.ceil(gen_len / (gamma + 1))
    stride = max(1, math.ceil((gen_len - fewest) / MAX_STEPS_EVALUATED))
    steps = np.arange(fewest, gen_len, stride, dtype=np.float64)
    if not steps.size:
        return float(fewest), expected
    deviation = np.sqrt(np.maximum(steps[:, None] * np.maximum(variance, 0.0), 1e-9))
    finished = ndtr((steps[:, None] * mean - gen_len + 0.5) / deviation) @ weights
    unfinished = 1.0 - np.clip(finished, 0.0, 1.0) ** batch_size
    return fewest + stride * float(unfinished.sum()), expected


def static_batch_efficiency(
    profile: Any, *, budget: Any, context: float, gamma: int, batch_size: int, gen_len: int
) -> float:
    """Share of the steady-state throughput that a static batch of equal lengths keeps (1 where nothing is drafted).

    `profile` is an AcceptanceProfile: its law and its spread are used.

    Raises ConfigError for a batch or a length below 1.
    """
    if batch_size < 1 or gen_len < 1 or gamma < 0:
        raise ConfigError("a static batch needs batch size and generated length of at least 1, and gamma of at least 0")
    if gamma == 0:
        return 1.0
    first_rate = float(profile.law.first_rate(budget=budget, context=context))
    slowest, expected = expected_steps_of_slowest(
        profile.law, first_rate=first_rate, gamma=gamma, batch_size=batch_size, gen_len=gen_len, spread=profile.spread
    )
    return min(1.0, gen_len / (expected * slowest))


def speedup_static_batch(
    speedup: float, profile: Any, *, budget: Any, context: float, gamma: int, batch_size: int, gen_len: int
) -> float:
    """The speedup of a static batch, from the steady state's and the spread between sequences."""
    efficiency = static_batch_efficiency(
        profile, budget=budget, context=context, gamma=gamma, batch_size=batch_size, gen_len=gen_len
    )
    return speedup * efficiency
