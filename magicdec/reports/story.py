"""The statements of a plan about a case, as one list of statements that terminal, page, HTML, PDF and exports
pick from.

A statement is one sentence of `sentences.py` or `outlook_lines.py`, with its kind. The list stands in
the order of reading: the answer, what is not asked for but must be known, what the answer rests on,
what was asked, where it would be another one, what to do next. Its kind's weight says which statements
stay where there is little room.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from magicdec.reports.outlook_lines import spread_line, task_lines, to_measure
from magicdec.reports.sentences import (
    acceptance_line,
    asked_line,
    at_limit,
    better_gamma_line,
    causes_line,
    cost_line,
    decoding_line,
    evidence_line,
    first_line,
    for_latency_line,
    for_throughput_line,
    gamma_by_batch,
    limit_lines,
    next_line,
    not_ranked_line,
    plain_line,
    plugin_line,
    prefill_line,
    reach_lines,
    requests_line,
    tie_line,
    to_train_line,
    verification_line,
    waiting_line,
    where_it_fits,
    worth_profiling,
)
from magicdec.schema import CaseAnswer, Plan

WEIGHTS = {
    "answer": 100,
    "causes": 98,
    "limit": 90,
    "waiting": 96,
    "assumed": 93,
    "to train": 97,
    "acceptance": 80,
    "evidence": 74,
    "tie": 92,
    "missed limit": 95,
    "prefill": 70,
    "where it fits": 94,
    "better gamma": 60,
    "gamma by batch": 40,
    "worth profiling": 45,
    "verification": 68,
    "plugin": 50,
    "setting": 85,
    "decoding": 65,
    "plain": 75,
    "cost": 28,
    "requests": 30,
    "spread": 35,
    "task": 91,
    "measure": 55,
    "reach": 20,
    "latency": 22,
    "throughput": 24,
    "not ranked": 15,
    "note": 58,
    "next": 99,
}
"""Kinds of statement in the order of reading, each with its weight; a table of drafts stands after
"cost"."""
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
        "choice.outlook.tasks.*.task",
        "choice.outlook.tasks.*.weight",
        "choice.outlook.tasks.*.own",
        "choice.left_out",
        "choice.to_train.drafting.method",
    ),
    "causes": ("choice.faults",),
    "limit": (
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
    "waiting": (
        "request.batch_sizes",
        "best_by_batch",
        "choice.row.batch_size",
        "memory.largest_autoregressive_batch",
    ),
    "assumed": ("assumed",),
    "to train": ("choice.to_train",),
    "acceptance": (
        "choice.row.drafting.gamma",
        "choice.row.drafting.acceptance_source",
        "choice.row.drafting.acceptance_text",
        "choice.left_out.drafting.acceptance_source",
        "choice.left_out.drafting.acceptance_text",
    ),
    "evidence": ("choice.evidence",),
    "tie": (
        "choice.tied.drafting",
        "choice.tied.decoding.gain",
        "choice.tied.requests.gain",
        "choice.row.decoding.gain.speedup",
        "choice.row.requests.gain.speedup",
        "choice.outlook.tasks.*.task",
        "choice.outlook.tasks.*.weight",
    ),
    "missed limit": ("choice.limits",),
    "prefill": (
        "choice.row.batch_size",
        "choice.row.layout.num_replicas",
        "choice.without_draft.requests.prefill_share",
    ),
    "where it fits": (
        "choice.outcome",
        "choice.left_out.drafting",
        "choice.left_out_fits",
    ),
    "better gamma": (
        "choice.better_gamma.drafting.gamma",
        "choice.better_gamma.decoding.gain",
        "choice.better_gamma.requests.gain",
    ),
    "gamma by batch": ("choice.one_gamma", "choice.row.drafting.gamma"),
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
        "choice.with_plugin.batch_size",
        "choice.with_plugin.layout.num_replicas",
        "choice.with_plugin.drafting",
        "choice.with_plugin.decoding.gain",
        "choice.with_plugin.requests.gain",
    ),
    "setting": (
        "model",
        "engine",
        "precision.weight_dtype",
        "context_len",
        "context_is_default",
        "best_by_batch",
        "request.gen_len",
        "request.rate",
        "request.task",
        "request.workload",
        "choice.row.batch_size",
        "choice.row.layout",
        "choice.row.requests",
        "choice.row.drafting.budget",
        "choice.row.drafting.budget_share",
    ),
    "decoding": (
        "choice.row.step.bound_by",
        "choice.row.decoding.tokens_per_s_per_gpu",
        "choice.row.decoding.tpot_s",
        "choice.row.decoding.ttft_s",
        "choice.row.requests.output_tokens_per_s_per_gpu",
        "choice.row.requests.tpot_s",
        "choice.row.requests.ttft_s",
        "choice.row.drafting.gamma",
        "choice.row.layout",
        "choice.without_draft.batch_size",
        "choice.without_draft.layout.tp_size",
        "choice.best_without_draft",
        "request.tpot_limit_s",
        "request.ttft_limit_s",
    ),
    "plain": (
        "choice.row.drafting.gamma",
        "choice.row.layout",
        "choice.without_draft",
        "choice.best_without_draft",
        "request.tpot_limit_s",
        "request.ttft_limit_s",
    ),
    "cost": ("choice.row.requests", "choice.row.cost.per_million_tokens_usd"),
    "requests": (
        "choice.row.requests.prefill_share",
        "choice.row.drafting.gamma",
        "choice.row.drafting.break_even_gen_len",
        "choice.row.decoding.gain.speedup",
        "choice.row.decoding.speedup_static_batch",
        "choice.row.cost.gpu_hours_per_million_requests",
        "choice.without_draft.requests.prefill_share",
    ),
    "spread": (
        "choice.row.by_acceptance",
        "choice.row.drafting",
        "choice.left_out.by_acceptance",
        "choice.left_out.drafting",
    ),
    "task": ("choice.outlook.tasks",),
    "measure": ("choice.outlook.measurements",),
    "reach": ("reach", "choice.row.drafting", "choice.left_out.drafting"),
    "latency": (
        "best_by_batch",
        "choice.row.batch_size",
        "pareto.*.batch_size",
        "pareto.*.drafting",
        "pareto.*.decoding.tpot_s",
        "pareto.*.requests.tpot_s",
    ),
    "throughput": (
        "choice.row.drafting.gamma",
        "choice.row.decoding.tokens_per_s_per_gpu",
        "choice.row.requests.output_tokens_per_s_per_gpu",
        "choice.best_without_draft",
    ),
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
BEFORE_TABLE = tuple(WEIGHTS)[: tuple(WEIGHTS).index("cost") + 1]
CLOSING = ("not ranked", "note", "next")
"""Kinds that are said of the plan, once, whatever the number of its cases."""
AFTER_TABLE = tuple(WEIGHTS)[len(BEFORE_TABLE) : -len(CLOSING)]
ON_A_PAGE = (
    "causes",
    "limit",
    "waiting",
    "assumed",
    "to train",
    "acceptance",
    "evidence",
    "tie",
    "missed limit",
    "prefill",
    "where it fits",
    "better gamma",
    "gamma by batch",
    "worth profiling",
    "verification",
    "plugin",
    "spread",
    "task",
    "measure",
)
"""Kinds that pages and reports list; the others stand there as figures and tables."""
MUST = 90
"""Weight from which a statement is always shown."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One thing that a plan says."""

    kind: str
    text: str

    @property
    def weight(self) -> int:
        return WEIGHTS[self.kind]

    @property
    def claims(self) -> tuple[str, ...]:
        """The fields of the plan's document that it speaks of."""
        return CLAIMS[self.kind]


def story_of(
    plan: Plan,
    case: CaseAnswer,
    *,
    every: bool = False,
    saved_as: str | None = None,
) -> list[Statement]:
    """The statements of a plan about one of its cases; `every` adds what a first reading can do without.
    `saved_as`: the file that the plan was written to."""
    choice = case.choice
    texts = {
        "answer": [first_line(case)],
        "causes": [causes_line(choice)],
        "limit": [at_limit(plan, case)],
        "waiting": [waiting_line(plan, case)],
        "assumed": [plan.assumed or ""],
        "to train": [to_train_line(choice)],
        "acceptance": [acceptance_line(choice)],
        "evidence": [evidence_line(choice.evidence)],
        "tie": [tie_line(choice)],
        "missed limit": limit_lines(choice),
        "prefill": [prefill_line(choice)],
        "where it fits": [where_it_fits(choice)],
        "better gamma": [better_gamma_line(choice)],
        "gamma by batch": [gamma_by_batch(choice)],
        "worth profiling": [worth_profiling(plan, case)],
        "verification": [verification_line(case)],
        "plugin": [plugin_line(choice)],
        "setting": [asked_line(plan, case, devices=False)],
        "decoding": [decoding_line(plan, case)],
        "plain": [plain_line(plan, case)],
        "cost": [cost_line(case)],
        "requests": [requests_line(case, every=every)],
        "spread": [spread_line(choice)],
        "task": task_lines(choice.outlook),
        "measure": [to_measure(choice.outlook)],
        "reach": reach_lines(case, every=every),
        "latency": [for_latency_line(case)],
        "throughput": [for_throughput_line(case)],
        "not ranked": [not_ranked_line(plan)],
        "note": [f"note: {note}" for note in (plan.notes if every else plan.key_notes)],
        "next": [f"next: {next_line(plan, every=every, saved_as=saved_as)}"],
    }
    return [
        Statement(kind=kind, text=text)
        for kind in WEIGHTS
        for text in texts[kind]
        if text
    ]


def of_kinds(statements: Sequence[Statement], kinds: Collection[str]) -> Iterator[str]:
    """Texts of the statements of these kinds, in their order."""
    for statement in statements:
        if statement.kind in kinds:
            yield statement.text


def shortest(
    statements: Sequence[Statement], *, lines: int, width: int
) -> list[Statement]:
    """The heaviest statements that fit in a number of physical lines, in their order.

    Those from MUST on are kept however many lines they take; lines per text, and the draft that is as
    good over these, come on top.
    """
    left = lines
    kept = set()
    for statement in sorted(statements, key=lambda statement: -statement.weight):
        height = len(textwrap.wrap(statement.text, width))
        if statement.kind in ("task", "tie"):
            height = 0
        if statement.weight >= MUST or height <= left:
            kept.add(statement)
            left -= height
    return [statement for statement in statements if statement in kept]
