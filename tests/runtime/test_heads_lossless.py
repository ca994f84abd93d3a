"""Heads of every sort leave greedy output as it is, with blocks accepted whole, in part and not at all."""

from __future__ import annotations

import pytest

from magicdec.runtime.launch import launch_ranks
from magicdec.specs.speculation import HEAD_METHODS
from tests.runtime.planted import (
    GAMMAS,
    MODEL_TYPES,
    SHARE,
    Ranks,
    Run,
    campaign,
    divides,
    is_planted,
    spec_of,
)

NUM_TOKENS = 14
"""Of each sequence: five steps and more."""
FAST = ("gemma3_text", "deepseek_v3")
WHOLE = ("gemma3_text", "deepseek_v3")
"""Models that have heads of every sort on two ranks among the slow tests; the others have one, in turn."""


def check(runs: list[Run]) -> None:
    assert [run for run in runs if not run.is_equal] == []
    assert {run.method for run in runs} == set(HEAD_METHODS)
    lively = [run for run in runs if run.tokens_per_step > 1.5 and run.is_partial]
    assert len(lively) > len(runs) / 3


def test_heads_are_lossless_over_ragged_batches_and_queues() -> None:
    """Prompts of 1, 9 and 40 tokens, two queued ones, and gammas that change from step to step."""
    runs = list(
        campaign(FAST, seeds=(0,), gammas=(), tp_sizes=(1,), num_tokens=NUM_TOKENS)
    )
    assert len(runs) == len(FAST) * len(HEAD_METHODS)
    check(runs)


def sorts_of(model_type: str, count: int) -> tuple[str, ...]:
    """So many sorts of head, others for each model."""
    first = MODEL_TYPES.index(model_type)
    return tuple(HEAD_METHODS[(first + n) % len(HEAD_METHODS)] for n in range(count))


@pytest.mark.slow
def test_heads_are_lossless_over_all_models() -> None:
    """Three sorts of head for each on one rank, at a gamma of the campaign's in turn and at gammas that change."""
    runs: list[Run] = []
    for number, model_type in enumerate(MODEL_TYPES):
        runs += campaign(
            (model_type,),
            seeds=(0,),
            gammas=(GAMMAS[number % len(GAMMAS)],),
            tp_sizes=(1,),
            methods=sorts_of(model_type, 3),
            num_tokens=NUM_TOKENS,
        )
    assert len(runs) == 2 * 3 * len(MODEL_TYPES)
    check(runs)


@pytest.mark.slow
def test_heads_are_lossless_on_two_ranks() -> None:
    """Every model that two ranks can share, at gammas that change; the ranks are started once for all."""
    dividing = [one for one in MODEL_TYPES if divides(spec_of(one, 0), 2)]
    assert {*WHOLE} <= {*dividing}
    models = [
        {
            "model_type": one,
            "seed": 0,
            "gammas": (),
            "methods": HEAD_METHODS if one in WHOLE else sorts_of(one, 1),
            "num_tokens": NUM_TOKENS,
        }
        for one in dividing
    ]
    runs = launch_ranks(Ranks(models), 2)
    assert {run.tp_size for run in runs} == {2}
    assert {run.model_type for run in runs} == {*dividing}
    check(runs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_whole_campaign_is_lossless(model_type: str) -> None:
    """Both seeds and every gamma on one rank, and on two (`python -m tests.runtime.planted`), a model at a time."""
    runs = list(campaign((model_type,)))
    alone = [run for run in runs if run.tp_size == 1]
    assert len(alone) == 2 * len((*GAMMAS, 0)) * len(HEAD_METHODS)
    check(runs)


def test_the_share_that_is_planted() -> None:
    planted = [
        is_planted(sequence, place) for sequence in range(50) for place in range(200)
    ]
    assert sum(planted) / len(planted) == pytest.approx(SHARE, abs=0.03)
