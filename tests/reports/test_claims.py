"""A statement of a plan hangs on the fields that it claims and on no other, and every number that it prints is one of
them, or follows from them by the arithmetic written here."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import pytest

import magicdec
from magicdec.naming import device_name
from magicdec.reports.story import CLAIMS, story_of
from magicdec.schema.plan import Plan
from tests.claims import claimed, idle, moved_by, unclaimed, unfounded

QUESTIONS: dict[str, dict[str, Any]] = {
    "decoding alone": {"model": "llama-3.1-8b", "hardware": "h100", "batch": 8, "context": "4k"},
    "whole requests at a price": {"model": "llama-3.1-8b", "hardware": "h100", "batch": 8, "context": "32k",
                                  "task": "chat", "price": 2, "gen_len": 300, "tpot_ms": 60},
    "a mixture, several loads": {"model": "qwen3-30b-a3b", "hardware": "a100", "batch": [1, 32],
                                 "context": ["2k", "32k"], "task": "chat"},
    "a limit, batch searched": {"model": "llama-3.1-70b", "hardware": "h100", "tp": 4, "context": "4k",
                                "gen_len": 300, "tpot_ms": 40},
    "prediction modules": {"model": "deepseek-v3", "hardware": "h200", "tp": 8, "context": "4k", "draft": "mtp",
                           "batch": 64},
    "users that wait": {"model": "qwen3-8b", "hardware": "h100", "batch": 256, "context": "32k"},
    "another gamma is better": {"model": "llama-3.1-8b", "hardware": "h100", "draft": "eagle3", "gamma": 1,
                                "batch": 1, "context": "2k", "task": "math"},
    "a head to train": {"model": "qwen2.5-7b", "hardware": "h100", "batch": 4, "context": "2k", "draft": "eagle3"},
    "no room for the draft": {"model": "llama-3.1-8b", "hardware": "h100", "tp": 1, "batch": 109, "context": "4k",
                              "draft": "eagle3", "gamma": 3},
    "a limit, decoding alone": {"model": "llama-3.1-70b", "hardware": "h100", "tp": 4, "context": "4k", "tpot_ms": 20},
    "two drafts as good": {"model": "qwen3-8b", "hardware": "h100", "batch": 64, "context": "4k", "gen_len": 1000},
    "a sparse draft of its own": {"model": "llama-3.1-8b", "hardware": "h100", "batch": 32, "context": "32k",
                                  "engine": "ours", "draft": "self", "acceptance_rate": 0.8, "price": 2},
    "a head that nobody published": {"model": "olmo-2-7b", "hardware": "h100", "batch": 4, "context": "2k",
                                     "draft": "eagle3"},
    "a draft that accepts nothing": {"model": "qwen3-30b-a3b", "hardware": "a100", "batch": 32, "context": "4k",
                                     "draft": "eagle3", "gamma": 7, "acceptance_rate": 0.0},
}  # fmt: skip


QUICK = ("decoding alone", "whole requests at a price", "no room for the draft")


@cache
def plan_of(question: str) -> Plan:
    """As read back from its file, where no two places hold the same object."""
    plan = magicdec.plan(**QUESTIONS[question])
    return msgspec.convert(msgspec.to_builtins(plan), Plan)


def said(plan: Plan) -> dict[str, list[str]]:
    texts = defaultdict(list)
    for every in (False, True):
        for statement in story_of(plan, plan, every=every):
            texts[statement.kind].append(statement.text)
    return texts


@cache
def moved_of(question: str) -> dict[str, frozenset[str]]:
    return moved_by(plan_of(question), said)


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_no_other_field_changes_a_statement(question: str) -> None:
    assert unclaimed(moved_of(question), CLAIMS) == set()


@pytest.mark.slow
def test_each_claim_is_of_a_field_that_changes_the_statement() -> None:
    """A claim that nothing hangs on would let a false number pass below."""
    assert idle(map(moved_of, QUESTIONS), CLAIMS) == set()


# Numbers
# --------------------------------------------------------------------------------------------------


def follows(plan: Plan, kind: str) -> Iterator[float]:
    """What a statement works out from its fields."""
    choice = plan.choice
    asked = choice.left_out or choice.row
    if kind in ("answer", "prefill", "to train", "where it fits", "plugin", "tie"):
        for row in (
            choice.row,
            choice.left_out,
            choice.left_out_fits,
            choice.to_train,
            choice.with_plugin,
        ):
            if row is not None:
                layout = row.layout
                devices = layout.tp_size * layout.pp_size * layout.dp_size
                yield from (
                    row.batch_size * layout.num_replicas,
                    devices * layout.num_replicas,
                )
    if kind == "limit":
        yield 1.0 / (plan.request.tpot_limit_s or math.inf)
    if kind == "evidence" and choice.evidence is not None:
        yield math.expm1(1.6449 * choice.evidence.width)
    if kind == "prefill" and choice.without_draft.requests is not None:
        yield 1.0 / choice.without_draft.requests.prefill_share
    if kind in ("verification", "spread"):
        yield asked.gamma + 1
    if kind == "verification":
        yield asked.step.verify_s / asked.step.autoregressive_s
        for operations in plan.breakdown.values():
            for name in {each.op for each in operations}:
                yield sum(each.time_s for each in operations if each.op == name)
    if kind in ("decoding", "plain"):
        for row in (choice.row, choice.without_draft, choice.best_without_draft):
            if row is not None:
                yield (
                    row.rate_per_gpu
                    * row.layout.tp_size
                    * row.layout.pp_size
                    * row.layout.dp_size
                )
    if kind == "throughput" and choice.best_without_draft is not None:
        yield choice.best_without_draft.rate_per_gpu / choice.row.rate_per_gpu
    if kind == "gamma by batch" and choice.one_gamma is not None:
        yield abs(choice.one_gamma.by_batch - 1.0)


@pytest.mark.parametrize(
    "question",
    [
        pytest.param(question, marks=() if question in QUICK else pytest.mark.slow)
        for question in QUESTIONS
    ],
)
def test_each_number_of_a_statement_is_of_the_fields_that_it_claims(
    question: str,
) -> None:
    """As it stands there, in percent or in thousandths (ms), to the last digit that is printed."""
    plan = plan_of(question)
    titles = {
        device_name(plan.hardware).replace("\u00a0", " "),
        "EAGLE-3",
        "llama-3.2-3b",
        "llama-3.2-1b",
    }
    for kind, texts in said(plan).items():
        numbers, names = claimed(plan, CLAIMS[kind])
        for text in texts:
            values = [*numbers, *follows(plan, kind)]
            assert unfounded(text, values, names | titles) == [], (kind, text)
