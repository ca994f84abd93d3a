"""What a choice hangs on: distributions against plain sampling, and what a plan says of texts and measuring."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest

import magicdec
from magicdec.perfmodel.acceptance.law import tokens_at
from magicdec.perfmodel.intervals import (
    normal_cdf,
)
from magicdec.perfmodel.plan.draws import normals
from magicdec.reports.sentences import break_even_line, measure_line, task_lines
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
def test_the_middle_of_tokens_is_the_median_of_many_draws(
    middle: float, error: float
) -> None:
    drawn = tokens_at(MANY, middle, 4, error)
    assert drawn.min() > 1.0
    assert drawn.max() < 5.0
    assert np.median(drawn) == pytest.approx(middle, rel=0.01)


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


@pytest.fixture(scope="module")
def believed() -> Plan:
    return magicdec.plan(**CASE)


def test_a_plan_says_what_to_measure_and_which_text_changes_it(believed: Plan) -> None:
    outlook = believed.choice.outlook
    assert len(outlook.tasks) == 9
    command = "observe http://localhost:8000 --draft eagle3 --model llama-3.1-8b"
    assert command in measure_line(outlook)
    lines = task_lines(outlook)
    named = [line.removeprefix("On ").split(":")[0].split(", ") for line in lines]
    assert sorted(itertools.chain(*named)) == sorted(TASKS)
    assert any("; best " in line for line in lines)
    tasks = [msgspec.structs.replace(outlook.tasks[0], task=task) for task in TASKS]
    (alike,) = task_lines(msgspec.structs.replace(outlook, tasks=tasks))
    assert alike.startswith(f"On {', '.join(TASKS)}: ")


def test_a_given_acceptance_is_not_measured() -> None:
    known = magicdec.plan(**CASE, draft="eagle3", acceptance_rate=0.75, gamma=5)
    assert measure_line(known.choice.outlook) == ""
    assert task_lines(known.choice.outlook) == []
    assert break_even_line(known.choice).startswith("Break-even at")


def test_acceptance_breaks_even_where_it_says(believed: Plan) -> None:
    for row in believed.candidates[:50]:
        even = row.drafting.break_even_tokens_per_step
        assert row.speedup * even / row.drafting.tokens_per_step == pytest.approx(1.0)
