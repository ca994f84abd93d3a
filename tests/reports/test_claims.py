"""A statement of a plan hangs on the fields that it claims and on no other, and every number that it prints is one of
them, or follows from them by the arithmetic written here."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import pytest

import magicdec
from magicdec.naming import device_name
from magicdec.reports.story import KINDS, story_of
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
    "another kernel": {"model": "llama-3.1-8b", "hardware": "a100", "batch": 32, "context": "8k", "draft": "eagle3",
                       "gamma": 3, "accept_length": 2.6, "engine": "vllm@0.32"},
    "a draft that accepts nothing": {"model": "qwen3-30b-a3b", "hardware": "a100", "batch": 32, "context": "4k",
                                     "draft": "eagle3", "gamma": 7, "acceptance_rate": 0.0},
}  # fmt: skip


CLAIMS = {
    "answer": (
        "choice.faults",
        "choice.outcome",
        "choice.row.batch_size",
        "choice.row.hardware",
        "choice.row.layout",
        "choice.row.drafting.draft",
        "choice.row.drafting.method",
        "choice.row.drafting.budget",
        "choice.row.drafting.gamma",
        "choice.row.decoding.gain",
        "choice.row.requests.gain",
        "choice.left_out",
        "choice.to_train.drafting.method",
    ),
    "causes": ("choice.faults",),
    "limits": ("choice.limits",),
    "setting": (
        "model",
        "engine",
        "precision.weight_dtype",
        "context_len",
        "context_is_default",
        "best_by_batch",
        "request.batch_sizes",
        "request.gen_len",
        "request.rate",
        "request.task",
        "request.workload",
        "choice.row.batch_size",
        "choice.row.layout",
        "choice.row.requests",
        "choice.row.drafting.budget",
        "choice.row.drafting.budget_share",
        "memory.largest_autoregressive_batch",
    ),
    "plain": (
        "choice.row.layout",
        "choice.without_draft",
        "choice.best_without_draft",
        "request.tpot_limit_s",
        "request.ttft_limit_s",
    ),
    "texts": ("choice.row.drafting.gamma", "choice.outlook.tasks"),
    "acceptance": (
        "choice.row.drafting.gamma",
        "choice.row.drafting.acceptance_source",
        "choice.row.drafting.acceptance_text",
        "choice.left_out.drafting.acceptance_source",
        "choice.left_out.drafting.acceptance_text",
        "choice.outlook.measure",
    ),
    "where it fits": (
        "choice.outcome",
        "choice.left_out.drafting",
        "choice.left_out_fits",
    ),
    "at the limit": (
        "request.tpot_limit_s",
        "best_by_batch",
        "choice.row.batch_size",
        "choice.row.layout",
        "choice.row.drafting",
        "choice.row.decoding.tokens_per_s_per_gpu",
        "choice.row.requests.output_tokens_per_s_per_gpu",
        "choice.row.speedup_vs_best_autoregressive",
        "choice.best_without_draft.batch_size",
        "choice.best_without_draft.layout",
        "choice.best_without_draft.decoding.tokens_per_s_per_gpu",
        "choice.best_without_draft.requests.output_tokens_per_s_per_gpu",
    ),
    "kernel": (
        "choice.other_kernel.option",
        "choice.other_kernel.row.drafting",
        "choice.other_kernel.row.step.verify_s",
        "choice.other_kernel.usual_verify_s",
        "choice.other_kernel.gain",
        "choice.other_kernel.kernel",
        "choice.other_kernel.usual_kernel",
        "choice.other_kernel.loses_graphs",
        "choice.other_kernel.costs",
        "choice.row.drafting",
    ),
    "assumed": ("assumed",),
    "tie": (
        "choice.tied.drafting",
        "choice.tied.decoding.gain",
        "choice.tied.requests.gain",
    ),
    "to train": ("choice.to_train",),
    "prefill": (
        "choice.row.batch_size",
        "choice.row.layout.num_replicas",
        "choice.without_draft.requests.prefill_share",
    ),
    "evidence": ("choice.evidence",),
    "worth profiling": (
        "needs_acceptance.*.draft_method",
        "needs_acceptance.*.break_even_acceptance_rate",
        "candidates.*.drafting.method",
        "choice.row.decoding.gain.pays",
        "choice.row.requests.gain.pays",
    ),
    "verification": (
        "choice.row.drafting.gamma",
        "choice.row.step",
        "choice.left_out.drafting.gamma",
        "choice.left_out.step",
        "breakdown.*.*.op",
        "breakdown.*.*.time_s",
    ),
    "plugin": (
        "hardware",
        "context_len",
        "candidates",
    ),
    "decoding": (
        "choice.row.step.bound_by",
        "choice.row.decoding.tokens_per_s_per_gpu",
        "choice.row.decoding.ttft_s",
        "choice.row.requests.output_tokens_per_s_per_gpu",
        "choice.row.requests.ttft_s",
        "choice.row.layout",
    ),
    "requests": (
        "choice.row.requests.prefill_share",
        "choice.row.drafting.gamma",
        "choice.row.drafting.break_even_gen_len",
        "choice.row.decoding.gain.speedup",
        "choice.row.decoding.speedup_static_batch",
        "choice.row.cost.gpu_hours_per_million_requests",
        "choice.without_draft.requests.prefill_share",
    ),
    "break-even": (
        "choice.row.drafting",
        "choice.left_out.drafting",
    ),
    "task": ("choice.outlook.tasks",),
    "measure": ("choice.outlook.measure",),
    "not ranked": ("model", "needs_acceptance"),
    "note": ("notes", "key_notes"),
    "next": (
        "engine",
        "other_cases",
        "candidates",
        "choice.row.drafting.gamma",
    ),
}
"""The fields of a plan's document that each kind of statement claims, with what lies below them; `*` is any entry of a
list. A statement says nothing that another field changes, and no number that is not of these."""

QUICK = ("decoding alone", "whole requests at a price", "no room for the draft")


def test_each_kind_of_statement_has_its_claims() -> None:
    assert list(CLAIMS) == list(KINDS)


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


@pytest.mark.slow
def test_the_fields_that_change_a_statement_are_those_that_it_claims() -> None:
    """No other field changes it; and a claim that nothing hangs on would let a false number pass below."""
    moved = [moved_by(plan_of(question), said) for question in QUESTIONS]
    assert [unclaimed(each, CLAIMS) for each in moved] == [set()] * len(QUESTIONS)
    assert idle(moved, CLAIMS) == set()


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
            *(plan.candidates if kind == "plugin" else ()),
        ):
            if row is not None:
                layout = row.layout
                devices = layout.tp_size * layout.pp_size * layout.dp_size
                yield from (
                    row.batch_size * layout.num_replicas,
                    devices * layout.num_replicas,
                )
    if kind == "acceptance":
        for number in re.findall(r"\d+", asked.drafting.acceptance_source):
            yield float(number)
    if kind == "at the limit":
        yield 1.0 / (plan.request.tpot_limit_s or math.inf)
    if kind == "evidence" and choice.evidence is not None:
        yield math.expm1(1.6449 * choice.evidence.width)
    if kind == "prefill" and choice.without_draft.requests is not None:
        yield 1.0 / choice.without_draft.requests.prefill_share
    if kind in ("verification", "break-even"):
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
