"""Runs of accepted drafts against a simulation of steps, and against the law where tokens are all alike."""

from __future__ import annotations

import math

import numpy as np
import pytest

from magicdec.perfmodel.acceptance_runs import fit_runs


def simulate(gamma: int, *, a: float, k: float, runs: int, seed: int) -> list[int]:
    """Drafts accepted in each step of a text made of runs, whose tokens the draft gets right at a rate of its own."""
    rng = np.random.default_rng(seed)
    text = []
    for rate in rng.beta(a * k, (1 - a) * k, runs):
        text += [True] * min(int(rng.geometric(max(1.0 - rate, 1e-3))) - 1, 1023) + [False]
    accepted, at = [], 0
    while at + gamma < len(text):
        count = 0
        while count < gamma and text[at + count]:
            count += 1
        accepted.append(count)
        at += count + 1  # the verification's own token, whether the draft would have known it or not
    return accepted


def counted(accepted: list[int], gamma: int) -> tuple[list[float], list[float]]:
    steps = np.array(accepted)
    rates, errors = [], []
    for position in range(1, gamma + 1):
        tried, hit = (steps >= position - 1).sum(), (steps >= position).sum()
        rates.append(hit / tried)
        errors.append(math.sqrt(hit / tried * (1 - hit / tried) / tried))
    return rates, errors


@pytest.mark.parametrize(("a", "k"), [(0.4, 2.5), (0.7, 4.0), (0.85, 20.0)])
def test_tokens_at_other_gammas_are_those_of_simulated_steps(a: float, k: float) -> None:
    """Fitted to what is counted at gamma 3."""
    runs = fit_runs(*counted(simulate(3, a=a, k=k, runs=20_000, seed=1), 3))
    assert runs is not None
    for gamma in (1, 2, 3, 5, 8, 12):
        steps = simulate(gamma, a=a, k=k, runs=20_000, seed=2)
        assert runs.tokens(gamma) == pytest.approx(1 + np.mean(steps), rel=0.05), gamma


def test_where_tokens_are_alike_they_are_the_laws() -> None:
    """Rates that hardly rise: E = (1 - alpha^(gamma+1)) / (1 - alpha)."""
    runs = fit_runs([0.8, 0.8001, 0.8002], [1e-4] * 3)
    assert runs is not None
    for gamma in (1, 4, 10):
        assert runs.tokens(gamma) == pytest.approx((1 - 0.8 ** (gamma + 1)) / 0.2, rel=0.01)


def test_rates_that_fall_are_no_runs() -> None:
    assert fit_runs([0.8, 0.7, 0.6], [0.01] * 3) is None
    assert fit_runs([0.8], [0.01]) is None


def test_the_error_grows_with_the_distance_and_with_that_of_the_rates() -> None:
    sure, unsure = (fit_runs([0.7, 0.85, 0.9], [error] * 3) for error in (0.005, 0.05))
    assert sure is not None
    assert unsure is not None
    assert sure.log_ratio_error(3, 3) == 0.0
    for gamma in (1, 2, 6, 12):
        assert 0.0 < sure.log_ratio_error(gamma, 3) < unsure.log_ratio_error(gamma, 3)
    assert sure.log_ratio_error(4, 3) < sure.log_ratio_error(8, 3) < sure.log_ratio_error(12, 3)
