"""A checked command in words, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from magicdec.live.change import Change
from magicdec.live.check import Check
from magicdec.naming import draft_name
from magicdec.reports.sentences import acceptance_of
from magicdec.schema.row import Candidate
from magicdec.units import format_seconds


class TextLine(NamedTuple):
    text: str
    kind: str = ""

    @property
    def is_option(self) -> bool:
        """Whether it is to copy."""
        return self.kind == "option"


def lines_of(result: Check) -> Iterator[TextLine]:
    """A command in words: what is wrong with it, what to change first, and what was not understood
    last."""
    for problem in result.problems:
        yield TextLine(f"wrong: {problem}", "wrong")
    first = result.first
    if first is not None or not result.problems:
        yield TextLine(result.advice, "advice")
    if first is not None:
        yield TextLine(first.option, "option")
        if first.gain is not None:
            yield TextLine(f"why: {first.reason}", "why")
    row = result.as_it_is
    if row is not None:
        as_it_is = "once it starts" if result.problems else "as it is"
        yield TextLine(f"{as_it_is}: {_described(result, row)}", "as it is")
        if row.is_speculative:
            yield TextLine(acceptance_of(row.drafting), "acceptance")
    alone = result.without_draft
    if alone is not None and result.command.speculation is not None:
        time = format_seconds(alone.between_tokens_s)
        yield TextLine(f"without a draft: {time} per token", "without a draft")
    for question in result.asked:
        yield TextLine(f"asked: {question}", "asked")
    if result.assumed:
        yield TextLine(f"assumed: {', '.join(result.assumed)}", "assumed")
    for change in result.changes:
        if change is not first:
            reason = f"{change.reason[:1].upper()}{change.reason[1:]}".removesuffix(".")
            kind = "or " if change.is_alternative else ""
            text = f"- {kind}{_gain(change)}: {change.change}. {reason}."
            yield TextLine(text, "why")
            yield TextLine(change.option, "option")
    for note in result.notes:
        yield TextLine(f"note: {note}", "note")
    if result.not_understood:
        why = result.command.why_not_understood
        unread = ", ".join(result.not_understood)
        yield TextLine(f"not understood ({why}): {unread}", "not understood")
    names_by_note: dict[str, list[str]] = {}
    for name, note in result.command.noted.items():
        names_by_note.setdefault(note, []).append(name)
    for note, names in names_by_note.items():
        yield TextLine(f"not priced: {', '.join(names)}: {note}", "noted")
    if result.command.not_looked_at:
        names = result.command.not_looked_at
        yield TextLine(f"not looked at: {', '.join(names)}", "not looked at")
    if result.command.without_effect:
        names = result.command.without_effect
        yield TextLine(f"without effect: {', '.join(names)}", "without effect")


def _gain(change: Change) -> str:
    if change.kind == "exactness":
        return "not exact"
    if change.gain is None:
        return "not priced"
    return change.gain_text


def _described(result: Check, row: Candidate) -> str:
    """The command's own configuration in words."""
    draft = draft_name(row.draft, row.draft_method, row.draft_budget)
    drafting = "no draft"
    if row.is_speculative:
        speculation = result.command.speculation
        is_tree = speculation is not None and speculation.tree is not None
        shape = f"a tree of {row.gamma}" if is_tree else f"gamma {row.gamma}"
        drafting = f"{draft}, {shape}"
    speedup = ""
    if row.is_speculative:
        gain = row.gain
        speedup = f", {gain.speedup:.2f}x over no draft (90 %: {gain.low:.2f} to {gain.high:.2f})"
    batch = f"batch {row.batch_size}"
    if result.command.dp_size > 1:
        batch += f" on each of {result.command.dp_size} replicas"
    return (
        f"{drafting} on {result.num_gpus} x {result.hardware} (tp {row.tp_size}), engine "
        f"{result.command.engine}, {batch}, context {row.context_len}: "
        f"{format_seconds(row.between_tokens_s)} per token{speedup}"
    )
