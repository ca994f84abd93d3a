"""Sentences on several devices, contexts or batches: which to buy, and where a draft pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from magicdec.reports.sentences import (
    ABOUT_PLUGIN,
    acceptance_line,
    self_drafted,
    unpublished,
    where_it_fits,
)
from magicdec.reports.words import devices_of, drafting_of, gain_of, probability_of
from magicdec.schema.plan import CaseAnswer, Plan
from magicdec.schema.row import PLUGIN, Candidate
from magicdec.units import format_percent, format_tokens

FEW_NAMED = 4
"""Loads without a draft that are still named one by one."""


def to_buy(offers: Sequence[Candidate], *, num_asked: int = 0, load: str = "") -> str:
    """The best of several devices, and the next, in a sentence. `num_asked` counts those that
    cannot serve the load, too; `load` names the load among several.
    """
    best, following = offers[:2]
    cost = best.cost.per_million_tokens_usd
    other_cost = following.cost.per_million_tokens_usd
    if cost is None or other_cost is None:
        other_rate = f"{_offered(following)}: {following.rate_per_gpu:.0f}"
        return (
            f"Most tokens per device{load}: {_offered(best)}, {best.rate_per_gpu:.0f} per second "
            f"({other_rate}); prices (h100=2.5,b200=5) would say which to buy."
        )
    more = other_cost / cost - 1.0
    compared = f"{len(offers)} devices"
    if num_asked > len(offers):
        compared = f"the {len(offers)} devices that can serve it"
    return (
        f"Buy {_offered(best)}: ${cost:.2f} per million tokens{load}, the least of {compared} "
        f"({_offered(following)}: {format_percent(more)} more)."
    )


def _offered(row: Candidate) -> str:
    drafting = "without a draft"
    if row.is_speculative:
        drafting = f"with {drafting_of(row)}"
    return f"{devices_of(row)} {drafting}"


def loads_lines(plan: Plan) -> list[str]:
    """The devices, contexts or batches at which a draft is expected to pay, and its gain there."""
    loads = loads_of(plan.cases)
    where = _told_apart(loads)
    drafted = [row for row in loads if row.is_speculative]
    total = f"{len(loads)} {_kind_of_loads(loads)}"
    if not drafted:
        line = f"Decode without a draft at all {total}"
        to_train = [case.choice.to_train for case in plan.cases if case.choice.to_train]
        if not to_train:
            return [f"{line}: none is expected to pay.", *_acceptance_lines(plan)]
        most = max(to_train, key=lambda row: row.gain.speedup)
        gain = f"trained, {drafting_of(most)} would be {gain_of(most)} at {where(most)}"
        return [f"{line}: {unpublished(most)}.", f"{gain[0].upper()}{gain[1:]}."]
    alone = [row for row in loads if not row.is_speculative]
    best = max(drafted, key=lambda row: row.gain.speedup)
    least = min(drafted, key=lambda row: row.gain.speedup)
    likely = [row for row in drafted if row.gain.probability >= 0.5]
    line = f"A draft gains on average at {len(drafted)} of {total}"
    if len(likely) < len(drafted):
        line += f" (more likely than not at {len(likely)})"
    line += f", most at {where(best)}: {drafting_of(best)}, {gain_of(best)}"
    if least is not best:
        gain = f"{least.gain.speedup:.2f}x, {probability_of(least)}"
        line += f"; least at {where(least)}: {gain}"
    if alone and len(alone) <= FEW_NAMED:
        places = ", ".join(map(where, alone))
        line += f". Without a draft at {places}"
    return [f"{line}.", *_acceptance_lines(plan)]


def loads_of(cases: Sequence[CaseAnswer]) -> list[Candidate]:
    """The best of each load of several cases."""
    rows: list[Candidate] = []
    for case in cases:
        rows += case.best_by_batch or [case.best]
    return rows


def _acceptance_lines(plan: Plan) -> list[str]:
    lines: list[str] = []
    for case in plan.cases:
        line = acceptance_line(case.choice)
        if line and line not in lines:
            lines.append(line)
    if len(lines) > 1:
        first = lines[0].removesuffix(".")
        return [f"{first}; other loads have other sources (--all)."]
    return lines


def _told_apart(loads: Sequence[Candidate]) -> Callable[[Candidate], str]:
    """Name a load by its device, context and batch, as far as these differ among the loads."""
    devices = {row.hardware for row in loads}
    contexts = {row.context_len for row in loads}
    places = {(row.hardware, row.context_len) for row in loads}

    def words(row: Candidate) -> str:
        parts = []
        if len(devices) > 1:
            parts.append(row.hardware)
        if len(contexts) > 1:
            parts.append(format_tokens(row.context_len))
        if len(places) < len(loads):
            parts.append(f"batch {row.batch_size}")
        return " ".join(parts)

    return words


def _kind_of_loads(loads: Sequence[Candidate]) -> str:
    """Name what tells loads apart: "devices", "contexts" or "batches", or "loads" if several do."""
    differing = {
        "devices": len({row.hardware for row in loads}),
        "contexts": len({row.context_len for row in loads}),
        "batches": len({row.batch_size for row in loads}),
    }
    for kind, num_values in differing.items():
        if num_values == len(loads):
            return kind
    return "loads"


def left_aside(case: CaseAnswer) -> str:
    """A line on the fastest draft of one case of several, where it does not fit or is too slow."""
    fits = where_it_fits(case.choice)
    if not fits:
        return ""
    context = format_tokens(case.context_len)
    return f"{case.hardware}, context {context}: {fits}"


def plugin_lines(plan: Plan) -> list[str]:
    """A line on the drafts that need the plugin in several cases, where they gain most."""
    gains = []
    for case in plan.cases:
        row = self_drafted(plan, case)
        if row is not None and row.drafting.needs_plugin:
            gains.append(row)
    if not gains or plan.request.plugin:
        return []
    best = max(gains, key=lambda row: row.gain.speedup)
    count = f"{len(gains)} of {len(plan.cases)}"
    where = f"{best.hardware} at {format_tokens(best.context_len)}"
    return [
        f"With {PLUGIN} ({ABOUT_PLUGIN}) the model drafts for itself in {count}, most on {where}: "
        f"{drafting_of(best)}, {gain_of(best)}."
    ]
