"""Runs of accepted drafts against a simulation of steps, and against the law where tokens are all alike."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from magicdec.counts import expected_tokens_per_step
from magicdec.live.advice import DraftedLoad, Serving, advise
from magicdec.live.observation import parse_draft
from magicdec.perfmodel.acceptance import fit_profile
from magicdec.perfmodel.acceptance.fit import Measurement
from magicdec.perfmodel.acceptance.law import Law, fit_runs
from magicdec.perfmodel.setup import Points
from magicdec.perfmodel.speedup import predict


def simulate(gamma: int, *, a: float, k: float, runs: int, seed: int) -> list[int]:
    """Drafts accepted in each step of a text made of runs, whose tokens the draft gets right at a rate of its own."""
    rng = np.random.default_rng(seed)
    text = []
    for rate in rng.beta(a * k, (1 - a) * k, runs):
        text += [True] * min(int(rng.geometric(max(1.0 - rate, 1e-3))) - 1, 1023) + [
            False
        ]
    accepted, at = [], 0
    while at + gamma < len(text):
        count = 0
        while count < gamma and text[at + count]:
            count += 1
        accepted.append(count)
        at += (
            count + 1
        )  # the verification's own token, whether the draft would have known it or not
    return accepted


def counted(
    accepted: list[int], gamma: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    steps = np.array(accepted)
    rates, errors = [], []
    for position in range(1, gamma + 1):
        tried, hit = (steps >= position - 1).sum(), (steps >= position).sum()
        rates.append(hit / tried)
        errors.append(math.sqrt(hit / tried * (1 - hit / tried) / tried))
    return tuple(rates), tuple(errors)


@pytest.mark.parametrize(("a", "k"), [(0.4, 2.5), (0.7, 4.0), (0.85, 20.0)])
def test_tokens_at_other_gammas_are_those_of_simulated_steps(
    a: float, k: float
) -> None:
    """Fitted to what is counted at gamma 3."""
    runs = fit_runs(*counted(simulate(3, a=a, k=k, runs=20_000, seed=1), 3))
    for gamma in (1, 2, 3, 5, 8, 12):
        steps = simulate(gamma, a=a, k=k, runs=20_000, seed=2)
        assert runs.tokens_per_step(gamma)[0] == pytest.approx(
            1 + np.mean(steps), rel=0.05
        ), gamma


def counts(rates: tuple[float, ...], steps: float = 4000.0) -> list[Measurement]:
    """Blocks at gamma = the number of rates, at one context."""
    rows, reached = [], steps
    for position, rate in enumerate(rates, 1):
        rows.append(
            Measurement(
                draft_method="eagle", budget=2048, context=2048, position=position, trials=reached,
                accepted=reached * rate,
            )
        )  # fmt: skip
        reached *= rate
    return rows


def test_predictions_take_tokens_at_other_gammas_from_the_counts_runs() -> None:
    """E(8) from what was counted at gamma 3, whoever asks: a step's rates alone would make it 3.0 instead of 2.6."""
    profile = fit_profile(
        counts((0.55, 0.68, 0.75)), draft="eagle", model="llama-3.1-8b"
    )
    runs = profile.runs
    setup = Serving(model="llama-3.1-8b", hardware="h100-sxm-80gb").setup(
        parse_draft("eagle"), "vllm"
    )
    gammas = np.arange(13)
    for batch in (4.0, 32.0, 96.0):
        found = predict(
            setup, profile, Points(batch=batch, context=2048.0, gamma=gammas)
        )
        tokens = found.expected_tokens_per_step
        assert tokens == pytest.approx(
            [runs.tokens_per_step(int(gamma))[0] for gamma in gammas], rel=0.01
        )
        at = DraftedLoad(
            setup=setup,
            acceptance=profile,
            batch_size=batch,
            context_len=2048.0,
            gamma=3,
        )
        assert advise(at).best.gamma == int(np.argmin(found.tpot_s))
    assert 2.55 < tokens[8] < 2.7
    law = profile.conditional_rates(budget=2048.0, context=2048.0, gamma_max=8)
    assert float(expected_tokens_per_step(law, 8)) > 2.95


def test_a_profile_with_runs_moves_with_the_context_as_its_law_does() -> None:
    """Fewer are accepted where the law accepts fewer; all is the fitted runs' where it was counted, arrays or not."""
    profile = fit_profile(
        counts((0.55, 0.68, 0.75)), draft="eagle", model="llama-3.1-8b"
    )
    law = Law(rejection=0.45, context_exponent=0.3, reference_context=2048)
    profile = msgspec.structs.replace(profile, law=law)
    contexts, gammas = (
        np.array([1024.0, 2048.0, 8192.0])[:, None],
        np.array([[1, 3, 6]]),
    )
    tokens, everything = profile.tokens_per_step(
        budget=512.0, context=contexts, gamma=gammas
    )
    assert tokens.shape == everything.shape == (3, 3)
    assert np.all(np.diff(tokens, axis=0) < 0)
    assert np.all(np.diff(tokens, axis=1) > 0)
    for row, context in enumerate(contexts[:, 0]):
        for column, gamma in enumerate(gammas[0]):
            one, all_accepted = profile.tokens_per_step(
                budget=512.0, context=context, gamma=gamma
            )
            assert (tokens[row, column], everything[row, column]) == pytest.approx(
                (float(one), float(all_accepted))
            )


def test_where_tokens_are_alike_they_are_the_laws() -> None:
    """Rates that hardly rise: E = (1 - alpha^(gamma+1)) / (1 - alpha)."""
    runs = fit_runs((0.8, 0.8001, 0.8002), (1e-4,) * 3)
    for gamma in (1, 4, 10):
        assert runs.tokens_per_step(gamma)[0] == pytest.approx(
            (1 - 0.8 ** (gamma + 1)) / 0.2, rel=0.01
        )


def test_rates_that_fall_are_no_runs() -> None:
    assert fit_runs((0.8, 0.7, 0.6), (0.01,) * 3) is None
    assert fit_runs((0.8,), (0.01,)) is None


def test_the_error_grows_with_the_distance_and_with_that_of_the_rates() -> None:
    sure, unsure = (fit_runs((0.7, 0.85, 0.9), (error,) * 3) for error in (0.005, 0.05))
    assert sure.log_ratio_error(3, 3) == 0.0
    for gamma in (1, 2, 6, 12):
        assert 0.0 < sure.log_ratio_error(gamma, 3) < unsure.log_ratio_error(gamma, 3)
    assert (
        sure.log_ratio_error(4, 3)
        < sure.log_ratio_error(8, 3)
        < sure.log_ratio_error(12, 3)
    )
