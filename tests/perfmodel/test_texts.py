"""The choice where no text was named: against the plan of each text, and against every configuration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import magicdec
from magicdec.perfmodel.plan.choice import preferred
from magicdec.schema.evidence import LaneEvidence
from magicdec.schema.plan import Plan
from magicdec.schema.row import Candidate
from magicdec.tasks import TASKS, WEIGHTS

QUESTION: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "hardware": "h100",
    "context": 2048,
    "gen_len": 300,
    "batch": 16,
}


@pytest.fixture(scope="module")
def unnamed() -> Plan:
    return magicdec.plan(**QUESTION)


@pytest.fixture(scope="module")
def named() -> dict[str, Plan]:
    return {task: magicdec.plan(**QUESTION, task=task) for task in TASKS}


def configuration(row: Candidate) -> tuple[Any, ...]:
    return row.draft, row.draft_method, row.draft_budget, row.gamma


def by_configuration(plan: Plan) -> dict[tuple[Any, ...], Candidate]:
    return {configuration(row): row for row in plan.rows}


def test_each_text_s_line_is_what_naming_it_says(
    unnamed: Plan, named: dict[str, Plan]
) -> None:
    assert unnamed.choice.outlook is not None
    for task in unnamed.choice.outlook.tasks:
        rows = by_configuration(named[task.task])
        own = rows[configuration(unnamed.best)].gain
        best = rows[task.draft, task.draft_method, task.draft_budget, task.gamma].gain
        for said, wanted in ((task.own, own), (task.best, best)):
            assert said.speedup == pytest.approx(wanted.speedup, rel=0.02)
            assert said.low == pytest.approx(wanted.low, rel=0.02)
            assert said.high == pytest.approx(wanted.high, rel=0.02)
            assert said.probability == pytest.approx(wanted.probability, abs=0.02)


def test_no_admitted_configuration_loses_less_on_average(
    unnamed: Plan, named: dict[str, Plan]
) -> None:
    """By the rates of nine plans, each of its own text: but for a tie, which is taken otherwise."""
    weights = np.array([WEIGHTS[task] for task in TASKS])
    tables = [by_configuration(named[task]) for task in TASKS]
    able = [
        configuration(row)
        for row in unnamed.rows
        if not row.drafting.needs_plugin
        and all(configuration(row) in t for t in tables)
    ]
    rates = np.array([[table[key].rate for key in able] for table in tables])
    losses = weights @ (1.0 - rates / rates.max(axis=1, keepdims=True)) / weights.sum()
    loss = dict(zip(able, losses, strict=True))
    chosen = loss[configuration(unnamed.best)]
    if unnamed.choice.tied is not None:
        assert loss[configuration(unnamed.choice.tied)] == pytest.approx(
            losses.min(), abs=0.031
        )
        assert chosen <= losses.min() + 0.031
    else:
        assert chosen <= losses.min() + 0.004


def test_a_named_text_has_no_lines_of_others(named: dict[str, Plan]) -> None:
    for plan in named.values():
        assert plan.choice.outlook is None or not plan.choice.outlook.tasks


def test_a_given_acceptance_is_the_same_on_any_text() -> None:
    plan = magicdec.plan(**QUESTION, draft="eagle3", acceptance_rate=0.7)
    assert plan.choice.outlook is not None
    assert not plan.choice.outlook.tasks


def test_of_tied_drafts_the_one_that_was_checked_is_taken(unnamed: Plan) -> None:
    rows = {row.draft: row for row in unnamed.candidates}
    few = LaneEvidence(width=0.1)
    many = LaneEvidence(width=0.1, rows=12)
    suffix, eagle3, ngram = rows["suffix"], rows["eagle3"], rows["ngram"]
    by_draft = {"suffix": few, "eagle3": many, "ngram": few}
    taken = preferred(suffix, [ngram, eagle3], lambda row: by_draft[row.draft])
    assert taken is eagle3
    assert preferred(suffix, [ngram], lambda row: few) is ngram
    assert preferred(eagle3, [], lambda row: few) is eagle3


def test_a_tie_is_near_and_of_another_draft(unnamed: Plan) -> None:
    tied = unnamed.choice.tied
    if tied is not None:
        assert (tied.draft, tied.batch_size) != (unnamed.best.draft, 0)
        assert tied.is_speculative
        assert tied.batch_size == unnamed.best.batch_size
