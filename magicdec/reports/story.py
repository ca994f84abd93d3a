"""The statements of a plan about a case, as one list that terminal, page, HTML, PDF and exports pick from.

KINDS is in the order of reading: the answer, warnings, what the answer rests on, what was asked,
where the answer would change, and what to do next.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from magicdec.counts import CAUSES
from magicdec.reports import sentences
from magicdec.schema.plan import CaseAnswer, Choice, Plan

MUST = 90
"""Weight from which a statement is always shown."""


class Subject(NamedTuple):
    """A case of a plan that is put into words."""

    plan: Plan
    case: CaseAnswer
    every: bool
    """Whether to add what a first reading can do without."""
    saved_as: str | None
    """The file that the plan was written to."""

    @property
    def choice(self) -> Choice:
        return self.case.choice


class StatementKind(NamedTuple):
    """A kind of statement: its weight says which stay where there is little room."""

    weight: int
    says: Callable[[Subject], str | list[str]]
    is_on_pages: bool = True
    """Whether pages and reports list it; the others stand there as figures and tables."""


def _notes(subject: Subject) -> list[str]:
    notes = subject.plan.notes if subject.every else subject.plan.key_notes
    return [f"note: {note}" for note in notes]


def _next(subject: Subject) -> str:
    line = sentences.next_line(
        subject.plan, every=subject.every, saved_as=subject.saved_as
    )
    return f"next: {line}"


KINDS: dict[str, StatementKind] = {
    "answer": StatementKind(
        100, lambda s: sentences.first_line(s.case), is_on_pages=False
    ),
    "causes": StatementKind(98, lambda s: CAUSES if s.choice.faults else ""),
    "limit": StatementKind(90, lambda s: sentences.at_limit(s.plan, s.case)),
    "waiting": StatementKind(96, lambda s: sentences.waiting_line(s.plan, s.case)),
    "assumed": StatementKind(93, lambda s: s.plan.assumed or ""),
    "to train": StatementKind(97, lambda s: sentences.to_train_line(s.choice)),
    "acceptance": StatementKind(80, lambda s: sentences.acceptance_line(s.choice)),
    "evidence": StatementKind(74, lambda s: sentences.evidence_line(s.choice.evidence)),
    "tie": StatementKind(92, lambda s: sentences.tie_line(s.choice)),
    "missed limit": StatementKind(95, lambda s: sentences.limit_lines(s.choice)),
    "prefill": StatementKind(70, lambda s: sentences.prefill_line(s.choice)),
    "where it fits": StatementKind(94, lambda s: sentences.where_it_fits(s.choice)),
    "worth profiling": StatementKind(
        45, lambda s: sentences.worth_profiling(s.plan, s.case)
    ),
    "verification": StatementKind(68, lambda s: sentences.verification_line(s.case)),
    "kernel": StatementKind(88, lambda s: sentences.kernel_line(s.choice)),
    "plugin": StatementKind(50, lambda s: sentences.plugin_line(s.choice)),
    "setting": StatementKind(
        85,
        lambda s: sentences.asked_line(s.plan, s.case, devices=False),
        is_on_pages=False,
    ),
    "decoding": StatementKind(
        65, lambda s: sentences.decoding_line(s.plan, s.case), is_on_pages=False
    ),
    "plain": StatementKind(
        75, lambda s: sentences.plain_line(s.plan, s.case), is_on_pages=False
    ),
    "cost": StatementKind(28, lambda s: sentences.cost_line(s.case), is_on_pages=False),
    "requests": StatementKind(
        30,
        lambda s: sentences.requests_line(s.case, every=s.every),
        is_on_pages=False,
    ),
    "spread": StatementKind(35, lambda s: sentences.spread_line(s.choice)),
    "task": StatementKind(91, lambda s: sentences.task_lines(s.choice.outlook)),
    "measure": StatementKind(55, lambda s: sentences.measure_line(s.choice.outlook)),
    "latency": StatementKind(
        22, lambda s: sentences.for_latency_line(s.case), is_on_pages=False
    ),
    "throughput": StatementKind(
        24, lambda s: sentences.for_throughput_line(s.case), is_on_pages=False
    ),
    "not ranked": StatementKind(
        15, lambda s: sentences.not_ranked_line(s.plan), is_on_pages=False
    ),
    "note": StatementKind(58, _notes, is_on_pages=False),
    "next": StatementKind(99, _next, is_on_pages=False),
}
ORDER = tuple(KINDS)
BEFORE_TABLE = ORDER[: ORDER.index("cost") + 1]
"""A table of drafts stands behind these."""
CLOSING = ("not ranked", "note", "next")
"""Kinds that are said of the plan, once, whatever the number of its cases."""
AFTER_TABLE = ORDER[len(BEFORE_TABLE) : -len(CLOSING)]
ON_A_PAGE = tuple(name for name, kind in KINDS.items() if kind.is_on_pages)


class Statement(NamedTuple):
    """One thing that a plan says."""

    kind: str
    text: str

    @property
    def weight(self) -> int:
        return KINDS[self.kind].weight


def story_of(
    plan: Plan,
    case: CaseAnswer,
    *,
    every: bool = False,
    saved_as: str | None = None,
) -> list[Statement]:
    """The statements of a plan about one of its cases; `every` adds what a first reading can do without.
    `saved_as`: the file that the plan was written to."""
    subject = Subject(plan, case, every, saved_as)
    statements = []
    for name, kind in KINDS.items():
        texts = kind.says(subject)
        for text in [texts] if isinstance(texts, str) else texts:
            if text:
                statements.append(Statement(kind=name, text=text))
    return statements


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
