"""Acceptance that a user gives: rates by position, and profiles of the planned draft only."""

from __future__ import annotations

import numpy as np
import pytest

from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance import constant_profile, load_profile, save_profile
from magicdec.perfmodel.plan.drafts import load_profiles
from magicdec.perfmodel.plan.planner import PlanRequest, plan

RATES = (0.9, 0.7, 0.5)


def tokens(rates: tuple[float, ...], gamma: int) -> float:
    """Expected tokens per step by simulation-free enumeration: the last rate holds beyond the list."""
    padded = [*rates, *[rates[-1]] * gamma][:gamma]
    return 1.0 + sum(np.prod(padded[: i + 1]) for i in range(gamma))


def test_rates_by_position_give_the_tokens_per_step_they_mean():
    document = plan(PlanRequest(batch_sizes=(8,), draft="ngram", acceptance_rate=RATES))
    for row in document.candidates:
        assert row.expected_tokens_per_step == pytest.approx(tokens(RATES, row.gamma), rel=1e-12)


def test_one_rate_is_the_same_as_a_list_of_it():
    one = plan(PlanRequest(batch_sizes=(8,), draft="ngram", acceptance_rate=0.8))
    listed = plan(PlanRequest(batch_sizes=(8,), draft="ngram", acceptance_rate=(0.8, 0.8)))
    assert [row.speedup for row in listed.candidates] == pytest.approx([row.speedup for row in one.candidates])


def test_given_rates_survive_a_file_and_move_together(tmp_path):
    profile = constant_profile(RATES, draft="ngram", draft_method="ngram")
    save_profile(profile, tmp_path / "given.json")
    law = load_profile(tmp_path / "given.json")
    assert law.conditional_rates(budget=64, context=512, gamma_max=4) == pytest.approx([0.9, 0.7, 0.5, 0.5])
    other = law.at_rate(0.8, budget=64, context=512).conditional_rates(budget=64, context=512, gamma_max=3)
    power = np.log(0.8) / np.log(0.9)
    assert other == pytest.approx(np.array(RATES) ** power)


@pytest.mark.parametrize("rates", [(), (0.5, 1.2), (-0.1,), (0.5,) * 65, (float("nan"), 0.5)])
def test_rates_that_are_none_are_refused(rates):
    with pytest.raises(ConfigError, match="acceptance rate"):
        PlanRequest(acceptance_rate=rates)


@pytest.mark.parametrize(
    ("draft", "method"), [("eagle", None), ("self", None), (None, "snapkv"), ("none", None), ("tinyllama-1.1b", None)]
)
def test_a_profile_of_another_draft_is_refused_with_both_names(draft, method, tmp_path):
    save_profile(constant_profile(0.8, draft="ngram", draft_method="ngram"), tmp_path / "ngram.json")
    with pytest.raises(ConfigError) as caught:
        load_profiles([tmp_path / "ngram.json"], draft=draft, method=method)
    assert "draft ngram (ngram)" in str(caught.value)
    assert f"the plan is for {draft or 'self'}" in str(caught.value)


def test_a_profile_of_one_draft_model_is_not_taken_for_another(tmp_path):
    save_profile(constant_profile(0.8, draft="llama-3.2-1b", draft_method="full"), tmp_path / "small.json")
    (profile,) = load_profiles([tmp_path / "small.json"], draft="llama-3.2-1b", method=None)
    document = plan(PlanRequest(batch_sizes=(8,), draft="llama-3.2-3b", acceptance=(profile,)))
    assert not document.candidates
    assert plan(PlanRequest(batch_sizes=(8,), draft="llama-3.2-1b", acceptance=(profile,))).candidates
