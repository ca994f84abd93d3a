"""What a plan says about a case, as one list of statements that terminal, page, HTML, PDF and exports pick from.

KINDS stands in the order of reading: the answer, what is not asked for but must be known, what the
answer rests on, what was asked, where it would be another one, what to do next.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from magicdec.reports import outlook_lines, sentences
from magicdec.schema import CaseAnswer, Choice, Plan

MUST = 90
"""Weight from which a statement is always shown."""


class Reading(NamedTuple):
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


class Kind(NamedTuple):
    """A kind of statement: its weight says which stay where there is little room."""

    weight: int
    says: Callable[[Reading], str | list[str]]
    is_on_pages: bool = True
    """Whether pages and reports list it; the others stand there as figures and tables."""


def _notes(reading: Reading) -> list[str]:
    notes = reading.plan.notes if reading.every else reading.plan.key_notes
    return [f"note: {note}" for note in notes]


def _next(reading: Reading) -> str:
    line = sentences.next_line(
        reading.plan, every=reading.every, saved_as=reading.saved_as
    )
    return f"next: {line}"


KINDS: dict[str, Kind] = {
    "answer": Kind(100, lambda r: sentences.first_line(r.case), is_on_pages=False),
    "causes": Kind(98, lambda r: sentences.causes_line(r.choice)),
    "limit": Kind(90, lambda r: sentences.at_limit(r.plan, r.case)),
    "waiting": Kind(96, lambda r: sentences.waiting_line(r.plan, r.case)),
    "assumed": Kind(93, lambda r: r.plan.assumed or ""),
    "to train": Kind(97, lambda r: sentences.to_train_line(r.choice)),
    "acceptance": Kind(80, lambda r: sentences.acceptance_line(r.choice)),
    "evidence": Kind(74, lambda r: sentences.evidence_line(r.choice.evidence)),
    "tie": Kind(92, lambda r: sentences.tie_line(r.choice)),
    "missed limit": Kind(95, lambda r: sentences.limit_lines(r.choice)),
    "prefill": Kind(70, lambda r: sentences.prefill_line(r.choice)),
    "where it fits": Kind(94, lambda r: sentences.where_it_fits(r.choice)),
    "worth profiling": Kind(45, lambda r: sentences.worth_profiling(r.plan, r.case)),
    "verification": Kind(68, lambda r: sentences.verification_line(r.case)),
    "plugin": Kind(50, lambda r: sentences.plugin_line(r.choice)),
    "setting": Kind(
        85,
        lambda r: sentences.asked_line(r.plan, r.case, devices=False),
        is_on_pages=False,
    ),
    "decoding": Kind(
        65, lambda r: sentences.decoding_line(r.plan, r.case), is_on_pages=False
    ),
    "plain": Kind(
        75, lambda r: sentences.plain_line(r.plan, r.case), is_on_pages=False
    ),
    "cost": Kind(28, lambda r: sentences.cost_line(r.case), is_on_pages=False),
    "requests": Kind(
        30,
        lambda r: sentences.requests_line(r.case, every=r.every),
        is_on_pages=False,
    ),
    "spread": Kind(35, lambda r: outlook_lines.spread_line(r.choice)),
    "task": Kind(91, lambda r: outlook_lines.task_lines(r.choice.outlook)),
    "measure": Kind(55, lambda r: outlook_lines.measure_line(r.choice.outlook)),
    "latency": Kind(
        22, lambda r: sentences.for_latency_line(r.case), is_on_pages=False
    ),
    "throughput": Kind(
        24, lambda r: sentences.for_throughput_line(r.case), is_on_pages=False
    ),
    "not ranked": Kind(
        15, lambda r: sentences.not_ranked_line(r.plan), is_on_pages=False
    ),
    "note": Kind(58, _notes, is_on_pages=False),
    "next": Kind(99, _next, is_on_pages=False),
}
ORDER = tuple(KINDS)
BEFORE_TABLE = ORDER[: ORDER.index("cost") + 1]
"""A table of drafts stands behind these."""
CLOSING = ("not ranked", "note", "next")
"""Kinds that are said of the plan, once, whatever the number of its cases."""
AFTER_TABLE = ORDER[len(BEFORE_TABLE) : -len(CLOSING)]
ON_A_PAGE = tuple(name for name, kind in KINDS.items() if kind.is_on_pages)


@dataclass(frozen=True, kw_only=True)
class Statement:
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
    reading = Reading(plan, case, every, saved_as)
    statements = []
    for name, kind in KINDS.items():
        texts = kind.says(reading)
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
