"""The adaptive choice of gamma, against runs whose best gamma is known by enumeration."""

from __future__ import annotations

import numpy as np
import pytest

from magicdec.runtime.adaptive import AdaptiveGamma
from magicdec.specs.gamma_table import TableGamma


def simulate(rate: float, times: list[float], *, steps: int = 400, seed: int = 0) -> tuple[AdaptiveGamma, float]:
    """Steps of 8 sequences with this acceptance rate and step times (10 % noise); and the tokens per second reached."""
    generator = np.random.default_rng(seed)
    policy = AdaptiveGamma(len(times) - 1)
    tokens = elapsed = 0.0
    for _ in range(steps):
        gamma = policy.choose(batch_size=8, context_len=100)
        accepted = (generator.random((8, gamma)) < rate).cumprod(axis=1).sum(axis=1)
        step_s = times[gamma] * float(generator.uniform(0.95, 1.05))
        policy.observe(gamma, accepted, step_s)
        tokens, elapsed = tokens + float(accepted.mean()) + 1, elapsed + step_s
    return policy, tokens / elapsed


@pytest.mark.parametrize(
    ("rate", "draft_s"),
    [(0.9, 0.1), (0.8, 0.3), (0.6, 0.2), (0.3, 0.5), (0.05, 0.4)],
)
def test_throughput_comes_close_to_the_best_fixed_gamma(rate: float, draft_s: float) -> None:
    """Within 5 % over 400 steps, the tries at the start included; best gammas from 0 to the largest occur."""
    times = [1.0] + [1.0 + 0.02 * g + draft_s * g for g in range(1, 7)]
    best = max(sum(rate**i for i in range(g + 1)) / time for g, time in enumerate(times))
    _, reached = simulate(rate, times)
    assert reached > 0.95 * best


def test_what_was_learnt_is_what_was_shown() -> None:
    """Rates within 0.05 of the true ones where they were tried; times of gammas never tried lie on the line."""
    policy, _ = simulate(0.8, [1.0, 1.2, 1.4, 1.6, 1.8])
    assert policy.rates()[:2] == pytest.approx([0.8, 0.8], abs=0.05)
    fresh = AdaptiveGamma(4)
    for gamma in (4, 4, 0, 0):
        fresh.observe(gamma, np.zeros(2, dtype=int), 1.0 + 0.5 * gamma)
    by_gamma = fresh.tokens_per_s()
    assert by_gamma[0] == pytest.approx(1.0)
    rates = fresh.rates()
    assert by_gamma[1] == pytest.approx((1 + rates[0]) / 1.5)


def test_it_follows_when_acceptance_drops() -> None:
    generator = np.random.default_rng(1)
    policy, chosen = AdaptiveGamma(5), []
    for step in range(600):
        gamma = policy.choose(batch_size=8, context_len=100)
        rate = 0.95 if step < 300 else 0.02
        policy.observe(gamma, (generator.random((8, gamma)) < rate).cumprod(axis=1).sum(axis=1), 1.0 + 0.2 * gamma)
        chosen.append(gamma)
    assert np.mean(chosen[100:300]) > 4
    assert np.mean(chosen[500:]) < 0.5


@pytest.mark.parametrize(
    ("batch_size", "context_len", "gamma"),
    [(1, 512, 0), (1, 10, 0), (5, 512, 0), (6, 512, 3), (400, 512, 3), (32, 4096, 4), (32, 1500, 4), (32, 1400, 3)],
)
def test_a_table_is_read_at_the_nearest_batch_and_context(batch_size: int, context_len: int, gamma: int) -> None:
    """Nearest in logarithm (between 1 and 32 that is 5.66, between 512 and 4096 it is 1448), and at the ends beyond."""
    table = TableGamma(batch_sizes=(1, 32), context_lens=(512, 4096), gammas=((0, 1), (3, 4)))
    assert table.choose(batch_size=batch_size, context_len=context_len) == gamma
