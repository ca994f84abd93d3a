"""Changes between two settings of the page, in words: the controls, then the answers."""

from __future__ import annotations

from magicdec.explore.controls import CONTROLS, YES
from magicdec.explore.state import shown
from magicdec.naming import draft_name
from magicdec.reports import ReportData, headline_of
from magicdec.schema import Plan, Request

SHORT_NUMBER = 5
"""Digits from which a whole number is divided into thousands."""


def changed_controls(before: Request, now: Request) -> str:
    """ "Context was 2048, now 65,536; Draft was all, now eagle3."; "" where nothing did."""
    parts = []
    texts = shown(before)
    for name, text in shown(now).items():
        if text != texts[name]:
            label = CONTROLS[name].label.removesuffix(", ms")
            parts.append(
                f"{label} was {_said(name, texts[name])}, now {_said(name, text)}"
            )
    return _sentence(parts)


def _said(name: str, text: str) -> str:
    """A control's value as people write it."""
    control = CONTROLS[name]
    if not text:
        return "off" if control.kind == "switch" else control.empty
    if text == YES and control.kind == "switch":
        return "on"
    if control.kind == "milliseconds":
        return f"{text} ms"
    if control.kind == "file":
        return text.partition("-")[2]
    if control.kind == "whole" and len(text) >= SHORT_NUMBER:
        return f"{int(text):,}"
    return text


def changed_answers(before: Plan, now: Plan) -> str:
    """Changes of the answer: the draft, and the facts under its headline."""
    parts = []
    earlier = _answers(before)
    for name, value in _answers(now).items():
        was = earlier.get(name, value)
        if was != value:
            parts.append(f"{name} was {was}, now {value}")
    return _sentence(parts)


def _answers(plan: Plan) -> dict[str, str]:
    row = plan.best
    draft = draft_name(row.draft, row.draft_method, row.draft_budget)
    if row.is_speculative:
        draft = f"{draft} at γ {row.gamma}"
    facts = headline_of(ReportData.from_records([], plan)).facts
    named = {fact.label.lower(): fact.value for fact in facts}
    return {"the answer's draft": draft} | named


def _sentence(parts: list[str]) -> str:
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""
