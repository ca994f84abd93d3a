"""Heads of every sort leave greedy output as it is, with blocks accepted whole, in part and not at all."""

from __future__ import annotations

import pytest

from magicdec.specs.speculation import HEAD_METHODS
from tests.runtime.planted import GAMMAS, MODEL_TYPES, SHARE, Run, campaign, is_planted

FAST = ("qwen3", "gemma3_text", "deepseek_v3")
GROUPS = [MODEL_TYPES[first : first + 4] for first in range(0, len(MODEL_TYPES), 4)]


def check(runs: list[Run]) -> None:
    assert [run for run in runs if not run.is_equal] == []
    assert {run.method for run in runs} == set(HEAD_METHODS)
    lively = [run for run in runs if run.tokens_per_step > 1.5 and run.is_partial]
    assert len(lively) > len(runs) / 3


def test_heads_are_lossless_over_ragged_batches_and_queues() -> None:
    """Prompts of 1, 9 and 40 tokens, two queued ones, and gammas that change from step to step."""
    runs = list(campaign(FAST, seeds=(0,), gammas=(3,), tp_sizes=(1,)))
    assert len(runs) == 2 * len(FAST) * len(HEAD_METHODS)
    check(runs)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_heads_are_lossless_over_all_models(model_type: str) -> None:
    """The whole campaign on one rank (`python -m tests.runtime.planted`), a model at a time."""
    runs = list(campaign((model_type,), tp_sizes=(1,)))
    assert len(runs) == 2 * len((*GAMMAS, 0)) * len(HEAD_METHODS)
    check(runs)


@pytest.mark.slow
@pytest.mark.parametrize("model_types", GROUPS, ids="-".join)
def test_heads_are_lossless_on_two_ranks(model_types: tuple[str, ...]) -> None:
    """The campaign's part on two ranks, which are started once for several models."""
    runs = list(campaign(model_types, tp_sizes=(2,)))
    assert {run.tp_size for run in runs} == {2}
    check(runs)


def test_the_share_that_is_planted() -> None:
    planted = [
        is_planted(sequence, place) for sequence in range(50) for place in range(200)
    ]
    assert sum(planted) / len(planted) == pytest.approx(SHARE, abs=0.03)
