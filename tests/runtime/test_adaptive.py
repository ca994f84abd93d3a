"""The adaptive choice of gamma, against runs whose best gamma is known by enumeration."""

from __future__ import annotations

import numpy as np
import pytest

from magicdec.runtime.adaptive import AdaptiveGamma


def simulate(rate: float, times: list[float], *, steps: int = 400, seed: int = 0) -> tuple[AdaptiveGamma, float]:
    """Steps of 8 sequences with this acceptance rate and step times (10 % noise); and the tokens per second reached."""
    generator = np.random.default_rng(seed)
    policy = AdaptiveGamma(len(times) - 1)
    tokens = elapsed = 0.0
    for _ in range(steps):
        gamma = policy.choose()
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
        gamma = policy.choose()
        rate = 0.95 if step < 300 else 0.02
        policy.observe(gamma, (generator.random((8, gamma)) < rate).cumprod(axis=1).sum(axis=1), 1.0 + 0.2 * gamma)
        chosen.append(gamma)
    assert np.mean(chosen[100:300]) > 4
    assert np.mean(chosen[500:]) < 0.5
