"""How a choice hangs on its acceptance, in sentences: break-even, the text that would change it,
and
the measurement to make first. Terminal, page and report say them alike.
"""

from __future__ import annotations

from magicdec.naming import draft_name
from magicdec.plan_document import WORTH_MEASURING, Choice, OfTask, Outlook
from magicdec.plan_rows import Candidate

CHANGES = 0.02
"""Loss of tokens per second from which another text is said to change the choice."""


def outlook_lines(choice: Choice) -> list[str]:
    """Lines on what is not known of the choice, none where no draft was considered."""
    row = choice.row if choice.is_speculative else choice.left_out
    lines = []
    if row is not None:
        lines.append(by_acceptance(row))
    outlook = choice.outlook
    if outlook is not None:
        lines += [by_task(outlook), to_measure(outlook)]
    return [line for line in lines if line]


def by_acceptance(row: Candidate) -> str:
    """The gain at the acceptance's 10th, 50th and 90th percentile, and where it breaks even."""
    known = row.by_acceptance
    if known is None:
        return ""
    low, middle, high = (f"{value:.2f}" for value in known.speedup)
    least = row.drafting.break_even_tokens_per_step
    expected = row.drafting.tokens_per_step
    even = "no number of tokens per step breaks even"
    if least is not None and least <= row.gamma + 1:
        even = f"even at {least:.2f} tokens per step, {expected:.2f} expected"
    elif least is not None:
        even = f"even at {least:.2f} tokens per step, at most {row.gamma + 1} are made"
    if low == high:
        return even
    return f"by acceptance (10/50/90%): {low}/{middle}/{high}x; {even}"


def by_task(outlook: Outlook) -> str:
    """The class of text that would change the choice most, where none was named."""
    if not outlook.tasks:
        return ""
    most = outlook.tasks[0]
    if most.changes >= CHANGES:
        return f"--task {most.task} would change it most: {_on(most)}"
    if all(each.draft == "none" for each in outlook.tasks):
        return "on no --task does a draft pay"
    low = min(outlook.tasks, key=lambda each: each.speedup)
    high = max(outlook.tasks, key=lambda each: each.speedup)
    return (
        f"no --task would change the choice: {_gain(low)} on {low.task} to {_gain(high)} on "
        f"{high.task}"
    )


def _on(of: OfTask) -> str:
    if of.draft == "none":
        return "no draft"
    name = draft_name(of.draft, of.draft_method, of.draft_budget)
    return f"{name}, gamma {of.gamma}, {_gain(of)}"


def _gain(of: OfTask) -> str:
    return f"{of.speedup:.2f}x"


def to_measure(outlook: Outlook) -> str:
    """The measurement to make first, with its cost; or that none is worth it."""
    first = outlook.advice
    if first is None:
        return f"measuring is not worth it: knowing more would gain under {WORTH_MEASURING:.0%}"
    return f"measure first (+{first.worth:.0%} expected; {first.effort}): {first.command}"
