"""The one distribution of a speedup, against plain draws of every source of error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import magicdec
from magicdec.perfmodel.acceptance import BelievedProfile, default_profile
from magicdec.perfmodel.acceptance.law import LawError, tokens_at
from magicdec.perfmodel.intervals import (
    Gains,
    engine_error,
    interval,
    step_errors,
    tokens_error,
)
from magicdec.perfmodel.serving import whole_requests
from magicdec.perfmodel.setup import Points
from magicdec.perfmodel.speedup import Prediction, predict
from magicdec.specs.speculation import SpeculationSpec
from tests.perfmodel.test_planner import setup_of

RNG = np.random.default_rng(11)
NUM_DRAWS = 200_000
OF_ACCEPTANCE, OF_KERNELS, OF_ENGINE = RNG.standard_normal((3, NUM_DRAWS, 1))
OUTPUT_LEN = 200.0


@pytest.fixture(scope="module", params=[0.05, 0.3, 0.9])
def predicted(request: pytest.FixtureRequest) -> tuple[Prediction, np.ndarray]:
    """A self-draft at three batches, and the relative error of its tokens per step."""
    published = default_profile("llama-3.1-8b", "streamingllm")
    profile = BelievedProfile(
        model=published.model,
        draft_method=published.draft_method,
        law=published.law,
        error=LawError(log_rejection=request.param),
    )
    spec = SpeculationSpec(
        draft="self", draft_method="streamingllm", draft_budget=512, gamma=3
    )
    batch = np.array([4.0, 64.0, 128.0])
    points = Points(batch=batch, context=8192.0, tp=8, budget=512, gamma=3)
    prediction = predict(setup_of(spec), profile, points)
    return prediction, prediction.full(tokens_error(prediction, profile))


def drawn_times(prediction: Prediction, error: np.ndarray) -> np.ndarray:
    """Times per token over those of decoding without a draft, [draws, points], with the median that
    was predicted."""
    deviation, _ = step_errors(prediction.setup, prediction.terms, prediction.points.tp)
    of_engine = engine_error(prediction.setup)
    of_kernels = np.sqrt(deviation**2 - of_engine**2)
    costs = OF_KERNELS * of_kernels + OF_ENGINE * of_engine
    tokens = tokens_at(OF_ACCEPTANCE, prediction.expected_tokens_per_step, 3, error)
    times = np.exp(costs) / tokens
    return times / np.median(times, axis=0) / prediction.speedup


def agrees(gains: Gains, drawn: np.ndarray) -> None:
    """Quantiles and probabilities of a distribution and of draws."""
    levels = (0.05, 0.25, 0.5, 0.75, 0.95)
    for level, quantile in zip(levels, gains.quantiles(levels), strict=True):
        below = (drawn <= quantile).mean(axis=0)
        assert below == pytest.approx(np.full(below.shape, level), abs=0.015)
    for least in (0.8, 1.0, 1.3):
        above = (drawn > least).mean(axis=0)
        assert gains.above(least) == pytest.approx(above, abs=0.015)


def test_decoding_s_distribution_is_that_of_many_draws(
    predicted: tuple[Prediction, np.ndarray],
) -> None:
    prediction, error = predicted
    agrees(interval(prediction, error).gains, 1.0 / drawn_times(prediction, error))


def test_that_of_whole_requests_is_that_of_many_draws(
    predicted: tuple[Prediction, np.ndarray],
) -> None:
    """Kernels' errors move decoding alone; the engine's moves the whole request."""
    prediction, error = predicted
    requests = whole_requests(prediction, output_len=OUTPUT_LEN)
    own = OF_ENGINE * engine_error(prediction.setup)
    decoding = np.exp(own) / drawn_times(prediction, error)
    drawn = requests.speedup_at(decoding) * np.exp(-own)
    drawn *= requests.speedup_at(prediction.speedup) / np.median(drawn, axis=0)
    agrees(requests.gains(interval(prediction, error).gains), drawn)


def test_the_median_gain_is_the_one_that_configurations_are_ranked_by(
    predicted: tuple[Prediction, np.ndarray],
) -> None:
    prediction, error = predicted
    gains = interval(prediction, error).gains
    (median,) = gains.quantiles((0.5,))
    assert median == pytest.approx(prediction.full(prediction.speedup), rel=1e-3)
    requests = whole_requests(prediction, output_len=OUTPUT_LEN)
    (median,) = requests.gains(gains).quantiles((0.5,))
    assert median == pytest.approx(requests.speedup_at(prediction.speedup), rel=1e-3)


def test_the_median_at_the_median_acceptance_is_near_that_of_the_whole(
    predicted: tuple[Prediction, np.ndarray],
) -> None:
    """The distribution is moved onto the prediction by its skew alone, at most 4 %."""
    prediction, error = predicted
    deviation, _ = step_errors(prediction.setup, prediction.terms, prediction.points.tp)
    tokens = tokens_at(OF_ACCEPTANCE, prediction.expected_tokens_per_step, 3, error)
    drawn = tokens * np.exp(OF_KERNELS * deviation)
    median = np.median(drawn, axis=0)
    assert median == pytest.approx(
        prediction.full(prediction.expected_tokens_per_step), rel=0.04
    )


def test_a_probability_and_the_quantiles_tell_the_same() -> None:
    """P(speedup <= 1) lies between the levels of the quantiles around 1, whatever is drawn."""
    draws = np.exp(RNG.normal(0.0, 0.4, (48, 500)))
    gains = Gains(
        speedups=np.sort(draws, axis=0) * RNG.uniform(0.5, 2.0, 500),
        deviations=RNG.uniform(1e-6, 0.4, 500),
    )
    between = (0.05, 0.25, 0.5, 0.75, 0.95)
    quantiles = gains.quantiles(between)
    below = gains.below(1.0)
    levels = np.array([0.0, *between, 1.0])
    place = (quantiles <= 1.0).sum(axis=0)
    assert np.all(below >= levels[place] - 1e-3)
    assert np.all(below <= levels[place + 1] + 1e-3)


PLANS = [
    {"model": "llama-3.1-8b", "hardware": "h100", "context": 2048, "batch": 16},
    {
        "model": "gpt-oss-120b",
        "hardware": "h100",
        "context": 8192,
        "gen_len": 300,
        "batch": 64,
    },
    {
        "model": "qwen3-32b",
        "hardware": "a100",
        "task": "rag",
        "batch": 16,
        "engine": "sglang",
    },
]


@pytest.mark.parametrize("question", PLANS)
def test_no_row_s_probability_contradicts_its_interval(
    question: dict[str, Any],
) -> None:
    """P(slower) lies between the levels of the quantiles around 1, of decoding and of requests."""
    plan = magicdec.plan(**question)
    levels = [0.0, 0.05, 0.5, 0.95, 1.0]
    for row in plan.candidates:
        gains = [row.decoding.gain]
        if row.requests is not None:
            gains.append(row.requests.gain)
        for gain in gains:
            quantiles = [gain.low, gain.speedup, gain.high]
            assert quantiles == sorted(quantiles)
            place = sum(quantile <= 1.0 for quantile in quantiles)
            assert levels[place] - 0.02 <= 1.0 - gain.pays <= levels[place + 1] + 0.02


@pytest.mark.parametrize("question", PLANS)
def test_all_figures_of_a_row_are_of_one_point(question: dict[str, Any]) -> None:
    """The speedup is the ratio of the times next to it, the tokens per step those of its step, and it is
    above 1 where the draft is more likely than not to pay."""
    plan = magicdec.plan(**question)
    assert plan.candidates
    assert {row.verdict for row in plan.autoregressive_rows} == {"does not pay"}
    for row in plan.candidates:
        times = row.step.autoregressive_s / row.tpot_s
        assert row.speedup == pytest.approx(times)
        assert row.drafting.tokens_per_step == pytest.approx(row.step_s / row.tpot_s)
        for gain in (row.decoding.gain, row.gain):
            chance = (1.0 - gain.speedup) * (gain.probability - 0.5)
            assert chance <= 1e-4


def test_no_speedup_is_above_the_tokens_of_a_step() -> None:
    """Draws of a cost that is known within a factor of ten, none of whose steps is shorter than one
    without a draft."""
    speedups = np.array([[1.2], [1.8]])
    gains = Gains(speedups=speedups, deviations=np.array(1.2), most=np.array([3.0]))
    costs = np.exp(RNG.standard_normal((NUM_DRAWS, 1, 1)) * 1.2)
    drawn = np.minimum(speedups * costs, 3.0).ravel()
    levels = (0.05, 0.5, 0.95)
    found = gains.quantiles(levels)[:, 0]
    assert found == pytest.approx(np.quantile(drawn, levels), rel=0.02)
    assert found[-1] == 3.0
    assert gains.below(3.0) == 1.0
    assert gains.above()[0] == pytest.approx((drawn > 1.0).mean(), abs=0.01)
