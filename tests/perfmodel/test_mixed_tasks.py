"""One draft for several texts: tokens per step of the mixture, and how far errors add up."""

from __future__ import annotations

import numpy as np
import pytest

from magicdec.counts import expected_tokens_per_step
from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance.believed import (
    Question,
    joint_levels,
    profile_of,
    profile_on,
)
from magicdec.perfmodel.planner import make_plan, request_of
from magicdec.tasks import shares_of, task_named, usual_lengths

QUESTION = Question(model="llama-3.1-8b", kind="eagle3", billions=8.0)


def tokens(profile, gamma: int = 4) -> float:
    rates = profile.law.conditional_rates(budget=None, context=1024.0, gamma_max=gamma)
    return float(expected_tokens_per_step(rates, gamma))


def test_the_time_of_a_token_is_the_texts_mean() -> None:
    """Against a server counted request by request: as many tokens of each text as its share."""
    alone = {
        task: tokens(
            profile_of(QUESTION._replace(task=task), draft="eagle3", method="eagle3")
        )
        for task in ("chat", "code")
    }
    mixed = profile_on(
        QUESTION._replace(task="chat=70,code=30"), draft="eagle3", method="eagle3"
    )
    steps = 700 / alone["chat"] + 300 / alone["code"]
    assert tokens(mixed) == pytest.approx(1000 / steps, rel=1e-3)
    assert min(alone.values()) < tokens(mixed) < max(alone.values())
    one = profile_on(QUESTION._replace(task="chat"), draft="eagle3", method="eagle3")
    assert tokens(one) == alone["chat"]


def test_errors_add_up_by_what_the_texts_share() -> None:
    """More than those of independent texts, and no more than the larger one."""
    questions = [QUESTION._replace(task=task) for task in ("chat", "code")]
    own = [
        profile_of(each, draft="eagle3", method="eagle3").error.log_rejection
        for each in questions
    ]
    _, covariance = joint_levels(questions)
    assert covariance[0, 1] > 0.0
    mixed = profile_on(
        QUESTION._replace(task="chat=1,code=1"), draft="eagle3", method="eagle3"
    )
    assert 0.5 * np.hypot(*own) < mixed.error.log_rejection < max(own)


def test_shares_are_read_and_refused() -> None:
    assert task_named("Assistant=70%, coding=30") == "chat=70,code=30"
    assert shares_of("chat=70,code=30") == pytest.approx({"chat": 0.7, "code": 0.3})
    assert usual_lengths("chat=50,code=50").prompt_len == 1536
    for text in ("chat=0,code=1", "chat=x", "chat=70,poems=30", "chat=70,code"):
        with pytest.raises(ConfigError):
            task_named(text)


def test_a_plan_lies_between_those_of_its_texts() -> None:
    gains = []
    for task in ("chat", "chat=50,code=50", "code"):
        asked = request_of(
            model="llama-3.1-8b", hardware="h100", draft="eagle3", gamma=4, batch=8,
            context=1024, gen_len=300, task=task,
        )  # fmt: skip
        (row,) = [
            row
            for row in make_plan(asked).candidates
            if row.gamma == 4 and not row.draft_budget
        ]
        gains.append(row.gain.speedup)
    assert min(gains[0], gains[2]) < gains[1] < max(gains[0], gains[2])
