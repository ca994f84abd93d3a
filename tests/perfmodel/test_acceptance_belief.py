"""The belief about acceptance: against exact conditioning, what is left out, and a user's counts."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance import (
    AcceptanceProfile,
    constant_profile,
    fit_profile,
)
from magicdec.perfmodel.acceptance import belief as beliefs
from magicdec.perfmodel.acceptance.belief import Point, Situation
from magicdec.perfmodel.acceptance.believed import (
    Question,
    assumed,
    completed,
    known_checkpoints,
    most_tokens,
    of_length,
    yours,
)
from magicdec.perfmodel.planner import PlanRequest, make_plan

HEAD = Question("llama-3.1-8b", "eagle3", 8.0, task="chat", temperature=0.0)


def test_a_constant_rate_is_recovered_and_its_depth_is_the_derivative_of_the_tokens() -> (
    None
):
    step = 1e-5
    for gamma, logit in itertools.product((1, 3, 7), (-1.0, 0.5, 2.0)):
        tokens = beliefs.constant_rate_tokens(logit, gamma)
        assert beliefs.constant_rate_logit(tokens, gamma) == pytest.approx(
            logit, abs=1e-6
        )
        places = np.log(np.arange(1, gamma + 1)) - beliefs.REFERENCE_DEPTH
        tilted = [
            np.cumprod(1.0 / (1.0 + np.exp(-(logit + slope * places)))).sum()
            for slope in (step, -step)
        ]
        level = [
            beliefs.constant_rate_tokens(logit + move, gamma) for move in (step, -step)
        ]
        by_slope = (tilted[0] - tilted[1]) / (level[0] - level[1])
        assert beliefs.mean_depth(logit, gamma) == pytest.approx(by_slope, abs=1e-4)


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "full", "snapkv", "no such kind"])
@pytest.mark.parametrize("gamma", [1, 3, 5])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.99, 1.0])
def test_one_length_tells_of_no_gamma_at_which_nobody_measured_as_many_tokens(
    kind: str, gamma: int, share: float
) -> None:
    """Deeper than the one that it is of; a number at its ceiling tells of none."""
    tokens = 1.0 + share * gamma
    profile = of_length(tokens, gamma, Question("no such model", kind, 8.0))
    first, *deeper = profile.told_gammas
    assert first == gamma
    most = most_tokens(kind)
    for told in deeper:
        expected, _ = profile.tokens_per_step(budget=1024.0, context=1024.0, gamma=told)
        assert float(expected) <= most[told]
    if share > 0.98 and kind != "snapkv":  # whose rows are all at their ceiling
        assert profile.max_gamma == gamma
    assert not profile.tells_of(99)


@pytest.mark.parametrize(
    "kind", ["eagle3", "mtp", "ngram", "suffix", "full", "self", "dflash"]
)
def test_a_belief_is_a_little_narrower_where_the_text_has_no_name(kind: str) -> None:
    """A user's own text has none of the published ones'; no width is none or turned around."""
    named, unnamed, own = (
        beliefs.width_of(Point(Situation(kind=kind, task=task), 0.0))
        for task in ("gsm8k", "", f"{beliefs.YOUR_TEXT}logs")
    )
    assert own == unnamed
    assert 0.5 * named < unnamed < named


def test_a_known_head_on_a_known_text_is_surer_than_any_head_on_any_text() -> None:
    widths = [
        assumed(question).error.log_rejection
        for question in (
            Question("no such model", "eagle3", 8.0),
            Question("no such model", "eagle3", 8.0, task="chat"),
            HEAD._replace(draft="yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
        )
    ]
    assert widths[0] > widths[1] > widths[2] > 0.2
    assert known_checkpoints("Llama-3.1-8B-Instruct", "eagle3")
    assert not known_checkpoints("no such model", "eagle3")


def test_origins_say_in_few_words_where_acceptance_comes_from() -> None:
    assert assumed(HEAD).origin.startswith("published for 6 heads of this model")
    assert assumed(HEAD).origin.endswith(" and such text")
    assert assumed(Question("no such model", "mtp", 8.0)).origin.startswith(
        "assumed from "
    )


def _measured(rates: tuple[float, ...], trials: int) -> AcceptanceProfile:
    rows = []
    for position, rate in enumerate(rates, 1):
        accepted = round(rate * trials)
        rows.append({
            "draft_method": "eagle3", "budget": 1024, "context": 1024, "position": position,
            "trials": trials, "accepted": accepted, "temperature": 0.0,
        })  # fmt: skip
        trials = accepted
    return fit_profile(rows, model="llama-3.1-8b", draft="eagle3")


def _tokens(profile: AcceptanceProfile, gamma: int) -> tuple[float, float]:
    """Tokens per step and their relative error."""
    at = {"budget": None, "context": 1024, "gamma": gamma}
    return float(profile.tokens_per_step(**at)[0]), float(profile.tokens_error(**at))


@pytest.mark.parametrize("rate", [0.0, 0.02, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("trials", [20, 2_000, 100_000])
def test_measured_positions_are_their_counts_whatever_is_believed(rate, trials) -> None:
    """Within half of one trial, the weight that the law has."""
    tokens, _ = _tokens(completed(_measured((rate,), trials), HEAD), 1)
    assert tokens == pytest.approx(
        1.0 + round(rate * trials) / trials, abs=1.0 / trials
    )


def test_a_measurement_is_of_the_users_own_text_and_so_the_same_on_every_task() -> None:
    counted = _measured((0.4, 0.3), 500)
    answers = {
        _tokens(yours(counted, HEAD._replace(task=task)), 6)
        for task in ("", "chat", "code", "rag")
    }
    assert len(answers) == 1


def test_beyond_the_counted_positions_a_rate_is_as_wide_as_the_belief_has_it() -> None:
    """Prediction modules fall off by position; one counted position leaves the later ones open."""
    question = Question("no such model", "mtp", 8.0)
    one = completed(_measured((0.85,), 100_000), question)
    three = completed(_measured((0.85, 0.8, 0.77), 100_000), question)
    assert _tokens(one, 1)[1] < 0.005
    assert _tokens(one, 8)[1] > 0.08
    assert _tokens(one, 8)[1] > 1.5 * _tokens(three, 8)[1]
    rates = one.conditional_rates(budget=None, context=1024, gamma_max=8)
    assert rates[0] == pytest.approx(0.85, abs=1e-3)
    assert rates[7] < rates[0]
    given = completed(constant_profile(0.85), question, num_given=1)
    assert _tokens(given, 1) == (pytest.approx(1.85), 0.0)
    assert _tokens(given, 8)[1] > 0.08


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "ngram"])
@pytest.mark.parametrize(("tokens", "gamma"), [(1.0, 3), (1.5, 1), (2.4, 3), (4.0, 3)])
def test_a_length_at_a_gamma_is_met_there_whatever_its_rates(
    kind, tokens, gamma
) -> None:
    profile = of_length(tokens, gamma, Question("no such model", kind, 8.0))
    assert _tokens(profile, gamma) == (pytest.approx(tokens), 0.0)


def test_what_accepts_nothing_for_long_does_not_work_unless_it_looks_up() -> None:
    assert "none of 396" in _measured((0.0,), 396).fault
    assert not _measured((0.0,), 150).fault
    assert not _measured((0.02,), 2_000).fault
    found = msgspec.structs.replace(_measured((0.0,), 396), draft_method="ngram")
    assert not found.fault


def test_given_rates_are_sure_up_to_the_gamma_in_use() -> None:
    known = completed(constant_profile(0.8), HEAD, num_given=5)
    assert _tokens(known, 5)[1] == 0.0
    assert _tokens(known, 7)[1] > 0.0


def test_a_task_moves_the_answer_and_an_unknown_one_is_refused() -> None:
    case = {"batch_sizes": (1,), "draft": "eagle3", "gamma": 3, "context_lens": (1024,)}
    code, chat = (
        make_plan(PlanRequest(**case, task=task)).candidates[0]
        for task in ("code", "chat")
    )
    assert code.drafting.tokens_per_step > chat.drafting.tokens_per_step
    with pytest.raises(ConfigError, match="unknown task"):
        PlanRequest(task="poetry")
