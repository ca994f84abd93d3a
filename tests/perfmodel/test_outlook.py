"""What a choice hangs on: distributions against plain sampling, the worth of a measurement against
closed forms, and what a plan says of both."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest

import magicdec
from magicdec.perfmodel.acceptance.uncertain import mean_tokens, tokens_at
from magicdec.perfmodel.intervals import (
    normal_cdf,
)
from magicdec.perfmodel.plan.outlook import _chance_after, _worth, normals
from magicdec.reports.outlook_lines import (
    by_acceptance,
    task_lines,
    to_measure,
)
from magicdec.schema.plan import Plan
from magicdec.tasks import TASKS

RNG = np.random.default_rng(5)
MANY = RNG.standard_normal(200_000)
CASE = {
    "model": "llama-3.1-8b",
    "hardware": "h100-sxm-80gb",
    "tp": 1,
    "context": 2048,
    "batch": 8,
}


@pytest.mark.parametrize("middle", [1.05, 1.5, 3.0, 4.6])
@pytest.mark.parametrize("error", [0.02, 0.2, 0.5])
def test_the_mean_of_tokens_is_that_of_many_draws(middle: float, error: float) -> None:
    drawn = tokens_at(MANY, middle, 4, error)
    assert drawn.min() > 1.0
    assert drawn.max() < 5.0
    assert np.median(drawn) == pytest.approx(middle, rel=0.01)
    harmonic = 1.0 / float((1.0 / drawn).mean())
    assert float(mean_tokens(middle, 4, error)) == pytest.approx(harmonic, rel=0.01)


def test_tokens_have_the_relative_error_that_was_asked_for() -> None:
    drawn = tokens_at(MANY, 3.0, 5, 0.03)
    assert np.log(drawn).std() == pytest.approx(0.03, rel=0.02)


def test_a_rate_s_logit_is_normal_as_the_belief_has_it() -> None:
    """A constant rate of normal logit gives the same tails of the tokens per step to some percent."""
    rates = 1.0 / (1.0 + np.exp(-(0.7 + 0.8 * MANY)))
    tokens = sum(rates**accepted for accepted in range(5))
    low, high = np.exp(np.quantile(np.log(tokens), (0.1587, 0.8413)))
    error = 0.5 * math.log(high / low)
    ends = np.quantile(tokens, (0.05, 0.95))
    assert tokens_at(
        np.array([-1.645, 1.645]), np.median(tokens), 4, error
    ) == pytest.approx(ends, rel=0.03)


def test_the_normal_distribution_is_close_to_the_exact_one() -> None:
    sigmas = np.linspace(-5.0, 5.0, 1001)
    exact = [0.5 * (1.0 + math.erf(each / math.sqrt(2.0))) for each in sigmas]
    assert normal_cdf(sigmas) == pytest.approx(np.array(exact), abs=4e-4)


def test_draws_are_standard_and_nearly_independent() -> None:
    draws = normals(18)
    assert np.abs(draws.mean(axis=0)).max() < 1e-12
    assert draws.std(axis=0) == pytest.approx(np.ones(18))
    correlation = np.corrcoef(draws.T) - np.eye(18)
    assert np.abs(correlation).max() < 1e-9
    assert np.quantile(draws, 0.95, axis=0) == pytest.approx(
        1.645 * np.ones(18), abs=0.3
    )


def test_measuring_is_worth_what_the_better_of_two_normals_exceeds_the_sure_one_by() -> (
    None
):
    """1 / E[min(1, 1 + 0.1 z)] - 1, with E = 1 - 0.1 phi(0); what tells nothing is worth nothing."""
    draws = normals(3)
    times = np.stack([np.ones(len(draws)), 1.0 + 0.1 * draws[:, 0]], axis=1)
    exact = 0.1 / math.sqrt(2.0 * math.pi)
    assert _worth(times, draws[:, :1]) == pytest.approx(exact / (1.0 - exact), rel=0.03)
    assert _worth(times, draws[:, 1:2]) < 0.01
    half = (draws[:, 0] + draws[:, 2])[:, None]  # as much noise as signal
    exact = 0.1 / math.sqrt(4.0 * math.pi)
    assert _worth(times, half) == pytest.approx(exact / (1.0 - exact), rel=0.15)


def test_a_measurement_settles_what_it_tells_and_nothing_else() -> None:
    draws = normals(3)
    gain = 0.05 + 0.3 * draws[:, 0] + 0.02 * draws[:, 1]
    settled = _chance_after(gain, draws[:, :1])
    assert ((settled > 0.1) & (settled < 0.9)).mean() < 0.1
    assert _chance_after(gain, draws[:, 2:]) == pytest.approx(
        0.566 * np.ones(len(draws)), abs=0.08
    )


@pytest.fixture(scope="module")
def believed() -> Plan:
    return magicdec.plan(**CASE)


def test_a_plan_says_what_to_measure_and_which_text_changes_it(believed: Plan) -> None:
    outlook = believed.choice.outlook
    assert outlook.pays == believed.best.gain.probability
    assert 0.0 < outlook.is_best <= 1.0
    assert outlook.advice is not None
    assert outlook.advice.worth == max(each.worth for each in outlook.measurements[:1])
    assert outlook.advice.worth >= 0.8 * max(
        each.worth for each in outlook.measurements
    )
    assert {each.kind for each in outlook.measurements} >= {
        "replay",
        "observe",
        "calibrate",
    }
    assert len(outlook.tasks) == 9
    assert to_measure(outlook).startswith("Measure first")
    lines = task_lines(outlook)
    named = [line.removeprefix("On ").split(":")[0].split(", ") for line in lines]
    assert sorted(itertools.chain(*named)) == sorted(TASKS)
    assert any("; best " in line for line in lines)
    tasks = [msgspec.structs.replace(outlook.tasks[0], task=task) for task in TASKS]
    (alike,) = task_lines(msgspec.structs.replace(outlook, tasks=tasks))
    assert alike.startswith(f"On {', '.join(TASKS)}: ")


def test_what_is_known_is_not_worth_measuring() -> None:
    """A given acceptance is not replayed. With gamma given too, nothing is left to choose."""
    rate = {"draft": "eagle3", "acceptance_rate": 0.75}
    free = magicdec.plan(**CASE, **rate).choice.outlook
    assert "replay" not in {each.kind for each in free.measurements}
    known = magicdec.plan(**CASE, **rate, gamma=5)
    outlook = known.choice.outlook
    assert outlook.advice is None
    assert to_measure(outlook).startswith("Measuring first would gain under")
    assert task_lines(outlook) == []
    assert by_acceptance(known.best).startswith("Break-even at")


def test_acceptance_moves_the_gain_and_breaks_even_where_it_says(
    believed: Plan,
) -> None:
    for row in believed.candidates[:50]:
        low, middle, high = row.by_acceptance.speedup
        assert low < middle < high
        even = row.drafting.break_even_tokens_per_step
        assert row.speedup * even / row.drafting.tokens_per_step == pytest.approx(1.0)
