"""The statements of a plan about a case, as one list that terminal, page, HTML, PDF and exports pick from.

KINDS is in the order of reading: the answer, what was asked, what the answer rests on, warnings, where
the answer would change, and what to do next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from magicdec.counts import CAUSES
from magicdec.reports import sentences
from magicdec.schema.plan import CaseAnswer, Choice, Plan


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
    """A kind of statement."""

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
    "answer": StatementKind(lambda s: sentences.first_line(s.case), is_on_pages=False),
    "causes": StatementKind(lambda s: CAUSES if s.choice.faults else ""),
    "limits": StatementKind(lambda s: sentences.limits_line(s.choice)),
    "setting": StatementKind(
        lambda s: sentences.asked_line(s.plan, s.case, devices=False),
        is_on_pages=False,
    ),
    "plain": StatementKind(
        lambda s: sentences.plain_line(s.plan, s.case), is_on_pages=False
    ),
    "texts": StatementKind(lambda s: sentences.texts_line(s.choice), is_on_pages=False),
    "acceptance": StatementKind(lambda s: sentences.acceptance_line(s.choice)),
    "where it fits": StatementKind(lambda s: sentences.where_it_fits(s.choice)),
    "at the limit": StatementKind(lambda s: sentences.at_limit(s.plan, s.case)),
    "kernel": StatementKind(lambda s: sentences.kernel_line(s.choice, every=s.every)),
    "assumed": StatementKind(lambda s: s.plan.assumed or ""),
    "tie": StatementKind(lambda s: sentences.tie_line(s.choice)),
    "to train": StatementKind(lambda s: sentences.to_train_line(s.choice)),
    "prefill": StatementKind(lambda s: sentences.prefill_line(s.choice)),
    "evidence": StatementKind(lambda s: sentences.evidence_line(s.choice.evidence)),
    "worth profiling": StatementKind(
        lambda s: sentences.worth_profiling(s.plan, s.case)
    ),
    "verification": StatementKind(lambda s: sentences.verification_line(s.case)),
    "plugin": StatementKind(lambda s: sentences.plugin_line(s.plan, s.case)),
    "decoding": StatementKind(
        lambda s: sentences.decoding_line(s.case), is_on_pages=False
    ),
    "requests": StatementKind(
        lambda s: sentences.requests_line(s.case, every=s.every), is_on_pages=False
    ),
    "break-even": StatementKind(lambda s: sentences.break_even_line(s.choice)),
    "task": StatementKind(lambda s: sentences.task_lines(s.choice.outlook)),
    "measure": StatementKind(lambda s: sentences.measure_line(s.choice.outlook)),
    "not ranked": StatementKind(
        lambda s: sentences.not_ranked_line(s.plan), is_on_pages=False
    ),
    "note": StatementKind(_notes, is_on_pages=False),
    "next": StatementKind(_next, is_on_pages=False),
}
ORDER = tuple(KINDS)
BEFORE_TABLE = ORDER[: ORDER.index("plain") + 1]
"""A table of drafts stands behind these."""
CLOSING = ("not ranked", "note", "next")
"""Kinds that are said of the plan, once, whatever the number of its cases."""
AFTER_TABLE = ORDER[len(BEFORE_TABLE) : -len(CLOSING)]
ON_A_PAGE = tuple(name for name, kind in KINDS.items() if kind.is_on_pages)
FIRST_READING = (*BEFORE_TABLE, "texts", "acceptance", "next")
"""Kinds that the short answer consists of."""
FURTHER = (
    "where it fits",
    "kernel",
    "assumed",
    "to train",
    "at the limit",
    "note",
    "prefill",
    "evidence",
    "worth profiling",
    "verification",
)
"""Kinds of which the short answer adds the first that there is, the most consequential first."""


class Statement(NamedTuple):
    """One thing that a plan says."""

    kind: str
    text: str


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
