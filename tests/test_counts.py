"""Counts of accepted drafts against steps gone through one by one, and their errors against resampled clusters."""

from __future__ import annotations

import math

import numpy as np
import pytest

from magicdec.counts import (
    Counts,
    clustered_stderr,
    constant_rate,
    expected_tokens_per_step,
    rate_and_error,
)


def test_counts_of_steps_histograms_and_survivors_are_those_of_the_steps_themselves() -> (
    None
):
    """Three sequences of up to 200 steps, some ended, at gamma 0 to 4 a step: each draft by itself."""
    rng = np.random.default_rng(3)
    drafted = rng.integers(0, 5, 200)
    steps = np.minimum(rng.integers(0, 5, (200, 3)), drafted[:, None])
    steps[150:, 1] = -1
    counts = Counts.of_steps(steps, drafted, 4)
    for sequence in range(3):
        for position in range(4):
            pairs = [
                (each, gamma)
                for each, gamma in zip(steps[:, sequence], drafted, strict=True)
                if each >= 0
            ]
            tried = sum(each >= position and gamma > position for each, gamma in pairs)
            assert counts.tried[sequence, position] == tried
            assert counts.accepted[sequence, position] == sum(
                each > position for each, _ in pairs
            )
    assert counts.steps.tolist() == [200, 150, 200]
    assert counts.histogram == np.bincount(steps[steps >= 0], minlength=5).tolist()
    assert counts.tokens_per_step == pytest.approx(1 + steps[steps >= 0].mean())
    assert counts.trials == [round(each) for each in counts.tried.sum(axis=0)]
    whole = Counts.of_steps(steps, np.full(200, 4), 4)
    histograms = [
        np.bincount(steps[steps[:, i] >= 0, i], minlength=5) for i in range(3)
    ]
    again = Counts.of_histograms(histograms)
    for name in ("steps", "tried", "accepted"):
        assert np.array_equal(getattr(again, name), getattr(whole, name)), name
    assert (again + again).trials == [2 * each for each in again.trials]


def test_shorter_blocks_tried_nothing_beyond_them() -> None:
    """10 steps of two drafts and 20 of one: position 2 is tried by the first cluster's alone."""
    counts = Counts.of_survivors([(10, 6, 3), (20, 5)])
    assert counts.trials == [30, 6]
    assert counts.rates == [11 / 30, 0.5]
    assert list(counts.cells()) == [(0, 1, 10, 6), (0, 2, 6, 3), (1, 1, 20, 5)]


def test_the_error_of_a_rate_is_that_of_resampled_sequences_and_never_of_certainty() -> (
    None
):
    """40 sequences with rates of their own, 5,000 times: the spread of the pooled rate within 5 % (its own error 1 %;
    that of the linearised error about 2 %)."""
    rng = np.random.default_rng(0)
    found, errors = [], []
    for _ in range(5000):
        tried = rng.integers(10, 60, 40)
        accepted = rng.binomial(tried, rng.beta(6, 2, 40))
        rate, error = rate_and_error(accepted, tried)
        found.append(rate)
        errors.append(error)
    assert np.mean(errors) == pytest.approx(np.std(found), rel=0.05)
    assert rate_and_error([50], [50]) == pytest.approx(
        (1.0, math.sqrt(50.5 * 0.5 / 51**2 / 50))
    )
    assert clustered_stderr([3.0], [5.0]) is None


def test_tokens_per_step_are_a_sum_of_products_and_one_rate_gives_them_back() -> None:
    rates = [0.9, 0.7, 0.8]
    wanted = [1.0, 1.9, 1.9 + 0.63, 1.9 + 0.63 + 0.504]
    assert expected_tokens_per_step(rates, np.arange(4)) == pytest.approx(wanted)
    assert constant_rate(
        float(expected_tokens_per_step([0.6] * 5, 5)), 5
    ) == pytest.approx(0.6)
    with pytest.raises(ValueError, match="3 positions"):
        expected_tokens_per_step(rates, 4)
