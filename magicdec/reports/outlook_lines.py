"""Sentences on how far a choice depends on its acceptance: break-even, the text that would change
it, and the command that measures it. Terminal, page and report use the same ones.
"""

from __future__ import annotations

from magicdec.naming import draft_name
from magicdec.reports.sentences import with_ends
from magicdec.schema import Candidate, Choice, OfTask, Outlook

NONE_IS_FASTER = "no draft is faster"
CHANGES = 0.02
"""Loss of tokens per second from which another text is said to change the choice."""


def spread_line(choice: Choice) -> str:
    """The gain of the draft that was considered, by its acceptance, and where it breaks even."""
    row = choice.left_out
    if choice.is_speculative:
        row = choice.row
    if row is None:
        return ""
    return by_acceptance(row)


def by_acceptance(row: Candidate) -> str:
    """The gain at the acceptance's 10th, 50th and 90th percentile, and where it breaks even."""
    known = row.by_acceptance
    if known is None:
        return ""
    even = _break_even(row)
    speedups = [f"{value:.2f}" for value in known.speedup]
    if speedups[0] == speedups[-1]:
        return even
    return (
        f"If acceptance is low, typical or high (10th, 50th, 90th percentile): "
        f"{speedups[0]}x, {speedups[1]}x, {speedups[2]}x. {even}"
    )


def _break_even(row: Candidate) -> str:
    """Tokens per step at which the draft is as fast as none, next to what is expected."""
    least = row.drafting.break_even_tokens_per_step
    if least is None:
        return "No number of tokens per step breaks even."
    even = f"Break-even at {least:.2f} tokens per step"
    most = row.gamma + 1
    if least > most:
        return f"{even}, more than the {most} that gamma {row.gamma} allows."
    expected = row.drafting.tokens_per_step
    return f"{even}; {expected:.2f} expected."


def task_lines(outlook: Outlook | None) -> list[str]:
    """A line per class of text where none was named: the choice's gain, and a faster draft. Classes
    with equal lines share one."""
    if outlook is None:
        return []
    tasks: dict[str, list[str]] = {}
    for task in outlook.tasks:
        tasks.setdefault(_gains_on(task), []).append(task.task)
    none = tasks.pop(NONE_IS_FASTER, [])
    if none:  # said last
        tasks[NONE_IS_FASTER] = none
    return [f"On {', '.join(names)}: {gains}." for gains, names in tasks.items()]


def _gains_on(task: OfTask) -> str:
    """A text's gain with the chosen draft, and with its own best one where that is faster."""
    parts = []
    drafts = task.own.high > task.own.low
    if drafts:
        parts.append(with_ends(task.own))
    if task.changes >= CHANGES:
        if task.draft == "none":
            parts.append("faster without a draft")
        else:
            name = draft_name(task.draft, task.draft_method, task.draft_budget)
            parts.append(f"{name}, gamma {task.gamma}, {with_ends(task.best)}")
    return "; best ".join(parts) or NONE_IS_FASTER


def measure_line(outlook: Outlook | None) -> str:
    """The command that measures the draft's acceptance, where nobody did."""
    if outlook is None or not outlook.measure:
        return ""
    return f"To measure its acceptance: {outlook.measure}"
