"""A head beyond the length that it was trained on: the law, and rows of a source that is left out."""

from __future__ import annotations

import math

import pytest

from evidence import published_rates
from magicdec.counts import expected_tokens_per_step
from magicdec.perfmodel.acceptance.believed import Question, assumed
from magicdec.perfmodel.acceptance.trained_length import Trained

AUDIT = "pramodjella/speculative-decoding-draft-length-audit"


@pytest.mark.parametrize(
    ("trained", "seen", "lost"),
    [
        (Trained(2048.0, 10_000.0), 2048.0, 0.0),
        (Trained(2048.0, 10_000.0), 100.0, 0.0),
        (Trained(2048.0, 10_000.0), 4096.0, 1.0 - math.exp(-1.0)),
        (Trained(2048.0, 10_000.0), 8192.0, 1.0 - math.exp(-2.0)),
        (Trained(8192.0, 10_000.0), 8192.0, 0.0),
        (Trained(2048.0, 500_000.0), 4096.0, 0.55 * (1.0 - math.exp(-1.0))),
    ],
)
def test_a_head_loses_beyond_its_own_length(
    trained: Trained, seen: float, lost: float
) -> None:
    assert trained.lost(seen) == pytest.approx(lost)


def test_where_no_length_is_known_both_recipes_are_as_likely() -> None:
    assert {each.length for each in Trained().possible} == {2048.0, 8192.0}
    known = Trained(4096.0, None)
    assert known.possible == (known,)


def test_rows_at_8k_are_believed_within_a_tenth_of_a_token_without_their_source() -> (
    None
):
    """Sixteen rows, two targets, one to four drafted tokens, by the belief of all other sources."""
    without = published_rates.fitted_without(AUDIT)
    lines = [
        line
        for line in published_rates.read_lines(published_rates.BELIEF_RATES)
        if AUDIT in line["source"] and line["context_len"] == "8192"
    ]
    assert len(lines) == 16
    for line in lines:
        question = Question(
            line["model"],
            "eagle3",
            8.0,
            draft=line["draft_name"],
            task=line["task_class"],
            context=8192.0,
            published=without,
        )
        gamma = int(line["gamma"])
        law = assumed(question).law
        rates = law.conditional_rates(budget=None, context=8192.0, gamma_max=gamma)
        believed = float(expected_tokens_per_step(rates, gamma))
        assert believed == pytest.approx(
            float(line["mean_acceptance_length"]), abs=0.105
        )
