"""Changes to a command that gain: another gamma, another draft, none or one at all, gamma by batch,
and how many are served at once. All times are a plan's.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from magicdec.counts import Z_90
from magicdec.errors import CapacityError
from magicdec.live.advice import DraftedLoad, choices_at
from magicdec.live.options import (
    batch_option,
    draft_option,
    gamma_option,
    options_of,
    table_option,
    takes_draft,
    without_draft,
)
from magicdec.live.settings import (
    NOTEWORTHY,
    USUAL_OUTPUT,
    Change,
    Served,
    costs_of,
    staying_times,
)
from magicdec.naming import draft_name
from magicdec.perfmodel.intervals import engine_error
from magicdec.perfmodel.plan.draws import Draws, draws_of
from magicdec.perfmodel.plan.other_kernel import other_kernel
from magicdec.perfmodel.plan.request import Case, DraftOption, PlanRequest
from magicdec.perfmodel.plan.search import DraftRows, every_gamma, most_that_fit
from magicdec.perfmodel.plan.standing import Standing, packages_of
from magicdec.perfmodel.planner import Answer, answered, make_plan
from magicdec.perfmodel.trees import TREES_LOSE, tree_error
from magicdec.reports.sentences import acceptance_of
from magicdec.schema.row import Candidate
from magicdec.specs.catalog import known_model
from magicdec.specs.engine import load_engine
from magicdec.specs.heads import listed_as
from magicdec.specs.model import ModelSpec
from magicdec.specs.serve_command import ServeCommand
from magicdec.specs.serve_command.speculation import UNKNOWN_DRAFTS
from magicdec.specs.speculation import HEAD_METHODS, MAX_GAMMA, OWN_METHOD
from magicdec.units import INTERVAL_ENDS, format_count, format_percent

LIGHT_LOADS = (1, 4, 16)
"""Batches at which a table by batch is compared, in addition to the requested one."""
UNMEASURED_FORMS = {"dflash2": "DFlash2", "lilicorr": "LiLiCorr", "xpress": "XPress"}
"""Forms of DFlash that vLLM runs by the same method (vllm/v1/worker/gpu/spec_decode), by a word of the
checkpoint's name or of the configuration: they choose among several candidates a position."""
PREEMPTING = ("vllm", "sglang")
"""Engines that admit what does not fit with its output, and take its memory back later."""


def without_acceptance(request: PlanRequest, **changes: Any) -> PlanRequest:
    """The request without the acceptance of the command's own draft, which is no other's."""
    return msgspec.structs.replace(
        request,
        acceptance_rate=None,
        accept_length=None,
        drafted_share=None,
        **changes,
    )


class Over(NamedTuple):
    """A gain over the command as it is, with its 90 % interval."""

    gain: float
    low: float
    high: float
    chance: float | None = None
    """Probability that it is above 1; None: by the interval alone."""

    def change(self, change: str, option: str, reason: str) -> Change:
        """The advice to make a change that gains so much."""
        return Change(
            change=change,
            option=option,
            reason=reason,
            gain=self.gain,
            gain_low=self.low,
            gain_high=self.high,
            chance=self.chance,
        )


def over_draft(row: Candidate) -> Over:
    """The gain of no draft over a row's: its own gain, turned round."""
    gain = row.gain
    return Over(
        gain=1.0 / gain.speedup,
        low=1.0 / gain.high,
        high=1.0 / gain.low,
        chance=1.0 - gain.probability,
    )


# The command's own draft


class OwnDraft(NamedTuple):
    """The command's draft at its gamma, priced."""

    row: Candidate
    case: Case
    option: DraftOption
    notes: list[str]

    def gammas(self, batch: int) -> DraftRows:
        """Every gamma of the draft, as a chain, at a batch: a tree may hold more tokens than any
        chain."""
        here = msgspec.structs.replace(self.row, batch_size=batch)
        chain = replace(self.option, tree=None)
        deepest = min(self.row.gamma, MAX_GAMMA)
        return every_gamma(self.case, chain, here, deepest=deepest)

    def best_at(self, batch: int) -> int:
        """The best gamma at a batch, 0 among them."""
        best = max(self.gammas(batch).rows, key=lambda row: row.rate)
        return best.gamma if best.gain.speedup >= 1.0 else 0

    def over_gamma(self, batch: int, gamma: int, now: int) -> Over:
        """The gain at a batch of a gamma over another one, 0 for no draft."""
        rows = {row.gamma: row for row in self.gammas(batch).rows}
        if now == gamma:
            return Over(1.0, 1.0, 1.0)
        if gamma == 0:
            return over_draft(rows[now])
        if now == 0:
            gain = rows[gamma].gain
            return Over(gain.speedup, gain.low, gain.high, gain.probability)
        return self.over(rows[gamma], rows[now])

    def over(self, row: Candidate, now: Candidate) -> Over:
        """A gamma's rate over that of another one, as a chain over a tree too.

        The interval is that of decoding (advice.py), whose part of a request's time is what differs.
        Tree and chain share the errors of acceptance and kernels, so the tree's law and the engine's
        error are left.
        """
        gain = row.rate / now.rate
        setup = self.case.setup(self.option)
        gamma = now.gamma
        tree = self.option.tree
        if tree is not None:
            error = float(tree_error(tree, gamma))
            width = math.exp(Z_90 * math.hypot(error, engine_error(setup)))
            return Over(gain, gain / width, gain * width)
        situation = DraftedLoad(
            setup=setup,
            acceptance=self.option.acceptance,
            batch_size=now.batch_size,
            context_len=now.context_len,
            gamma=max(gamma, row.gamma),
            tp_size=now.tp_size,
        )
        choices = choices_at(situation, now.batch_size, now.context_len, over=gamma)
        choice = choices[row.gamma]
        share = 0.0
        if now.requests is not None:
            share = now.requests.prefill_share

        def of_requests(decoding: float) -> float:
            return 1.0 / (share + (1.0 - share) / decoding)

        middle = of_requests(choice.gain)
        low = gain * of_requests(choice.gain_low) / middle
        high = gain * of_requests(choice.gain_high) / middle
        return Over(gain, low, high)


def own_draft(
    command: ServeCommand, request: PlanRequest, model: ModelSpec
) -> OwnDraft | str:
    """The command's draft at its gamma; or why it is not priced."""
    speculation = command.speculation
    assert speculation is not None
    if speculation.draft not in OWN_METHOD and known_model(speculation.draft) is None:
        cure = (
            ""
            if speculation.draft in UNKNOWN_DRAFTS
            else ": its config.json would tell"
        )
        return f"nothing is known of the draft {speculation.draft}, so it is not priced{cure}"
    batch = request.batch_sizes[0]
    gamma = speculation.gamma_at(batch)
    if gamma == 0:
        return (
            f"gamma follows the batch and drafts nothing for {batch} sequences, so it is priced without "
            "a draft"
        )
    asked = msgspec.structs.replace(
        request,
        draft=speculation.draft,
        gamma=gamma,
        tree=speculation.tree,
    )
    if speculation.draft in HEAD_METHODS:
        # by its own acceptance, vocabulary and length
        name = listed_as(speculation.checkpoint or "")
        asked = msgspec.structs.replace(asked, draft_name=name)
    if speculation.draft not in OWN_METHOD:
        asked = msgspec.structs.replace(asked, draft_method="full")
    first = answered(asked, model, [])[0][0]
    if not first.drafted:
        break_even = ""
        unknown = make_plan(without_acceptance(asked, gamma=None)).needs_acceptance
        for draft in unknown:
            rate = draft.break_even_acceptance_rate
            if rate is not None:
                break_even = f"; it is faster from a rate of {rate:.2f}"
                break
        return (
            f"no acceptance of {speculation.draft} is known for {model.name}{break_even} "
            "(--acceptance-rate)"
        )
    row = first.drafted[0]
    for other in first.drafted:
        if other.draft_budget == speculation.window:
            row = other
            break
    notes = []
    if speculation.gamma is None:
        notes.append(f"gamma is the engine's default; {row.gamma}, the best, was taken")
    option = first.searched.origin(row).option
    assert option is not None
    if option.acceptance.told_gammas == (row.gamma,):
        notes.append(
            f"one number of tokens per step tells nothing sure of more than {row.gamma} drafted tokens: "
            "rates by position would (--acceptance-rate)"
        )
    if speculation.tree is not None:
        notes.append(TREES_LOSE)
    elif speculation.is_tree:
        notes.append("drafts branch here and are priced as chains")
    written = f"{speculation.checkpoint} {command.read}".lower()
    for word, name in UNMEASURED_FORMS.items():
        if speculation.draft == "dflash" and word in written:
            notes.append(
                f"{name} is priced as DFlash: its own choice among candidates was not measured"
            )
    if speculation.by_batch and not speculation.bands:
        notes.append("gamma follows a table by batch; its deepest was taken")
    elif speculation.by_batch:
        notes.append(
            f"gamma follows a table by batch: {row.gamma} for {batch} sequences"
        )
    return OwnDraft(row=row, case=first.case, option=option, notes=notes)


# Another draft


class DraftChange(NamedTuple):
    """Another way to draft, and what would then run."""

    change: Change
    served: Served


def changes_of_draft(
    command: ServeCommand, drafted: OwnDraft, free: Answer
) -> list[DraftChange]:
    """Another gamma, no draft, and another draft; `free`: every draft's answer."""
    speculation = command.speculation
    assert speculation is not None
    row = drafted.row
    own = drafted.gammas(row.batch_size)
    chains = [chain for chain in own.rows if chain.fits]
    best = max(chains, key=lambda chain: chain.rate, default=row)
    changes = []
    words = ""
    if speculation.tree is not None:
        words = f"Draft a chain of {format_count(best.gamma, 'token')}, not a tree of {row.gamma}"
        option = f"--speculative-eagle-topk 1 {gamma_option(command, best.gamma)}"
        reason = (
            f"{best.drafting.tokens_per_step:.2f} tokens per step for "
            f"{row.drafting.tokens_per_step:.2f}"
        )
        for chain in chains:
            if chain.gamma == row.gamma != best.gamma:
                gain = chain.rate / row.rate
                reason += f"; a chain of {chain.gamma}: {gain:.2f}x"
    elif best.gamma != row.gamma:
        words = f"Draft {format_count(best.gamma, 'token')} per step, not {row.gamma}"
        option = gamma_option(command, best.gamma)
        reason = _steps(best, row)
    if words:
        chain_option = replace(drafted.option, tree=None)
        served = Served(case=drafted.case, option=chain_option, row=best)
        change = drafted.over(best, row).change(words, option, reason)
        changes.append(DraftChange(change, served))
    alone = free.document.autoregressive
    change = over_draft(row).change(
        f"Do not speculate at {format_count(row.batch_size, 'user')}",
        without_draft(command),
        "a step with drafts costs more than its tokens are worth",
    )
    served = Served(case=free.case, option=None, row=alone)
    changes.append(DraftChange(change, served))
    others = []
    for other in free.drafted:
        is_own = (other.draft, other.draft_method) == (row.draft, row.draft_method)
        if not is_own or other.draft_budget != row.draft_budget:
            others.append(other)
    plain, *of_drafts = free.searched
    draws = draws_of(drafted.case, [plain, own, *of_drafts], row)
    return [*changes, *best_draft(command, free, others, row, "Draft", draws)]


def change_of_kernel(
    command: ServeCommand, drafted: OwnDraft
) -> tuple[Change, ServeCommand] | None:
    """Another attention backend with which the draft is faster, and the command with it."""
    kernel = other_kernel(drafted.case, drafted.row, drafted.option)
    if kernel is None:
        return None
    gain = kernel.gain
    over = Over(gain=gain.speedup, low=gain.low, high=gain.high)
    option = kernel.option
    asked = command.attention_backend
    written = [
        f"{name} {value}"
        for name, value in command.read.items()
        if asked and "attention" in name and value.lower() == asked.lower()
    ]
    if written:
        option = f"leave out {' '.join(written)}; {option}"
    change = over.change(f"Verify with {kernel.backend}", option, kernel.reason)
    other = msgspec.structs.replace(command, attention_backend=kernel.backend)
    return change, other


def changes_instead(
    command: ServeCommand,
    found: Standing,
    request: PlanRequest,
    model: ModelSpec,
    free: Answer,
) -> list[DraftChange]:
    """The draft to use in place of one that cannot be started, compared with no draft: the command's
    checkpoint by the method and depth that it has, and the best of the other drafts."""
    changes: list[DraftChange] = []
    others = free.drafted
    alone = free.document.autoregressive
    if found.method is not None:
        asked = without_acceptance(request, draft=found.method, gamma=None)
        own = answered(asked, model, [])[0][0]
        rows = []
        for row in own.drafted:
            if found.most_drafts is None or row.gamma <= found.most_drafts:
                rows.append(row)
        changes += best_draft(command, own, rows, alone, "Draft")
        others = [row for row in others if row.draft_method != found.method]
    return [*changes, *best_draft(command, free, others, alone, "Speculate")]


def best_draft(
    command: ServeCommand,
    answer: Answer,
    rows: Sequence[Candidate],
    now: Candidate,
    verb: str,
    draws: Draws | None = None,
) -> list[DraftChange]:
    """The best row that runs of an answer's drafts, over what runs now; `draws`: of all of them and of
    what runs now, where that is a draft. Drafts share errors of costs and of acceptance, so the interval
    between two is of draws of both."""
    able = []
    for row in rows:
        needs_more = row.drafting.needs_plugin or row.drafting.is_hypothetical
        is_able = not needs_more and takes_draft(command, row)
        if row.is_speculative and row.fits and is_able:
            able.append(row)
    if not able:
        return []
    best = max(able, key=lambda row: row.rate)
    gain = best.rate / now.rate
    times = None if draws is None else draws.times_as_fast(best, now)
    if not now.is_speculative:
        over = Over(gain, best.gain.low, best.gain.high, best.gain.probability)
    elif times is not None:
        low, high = np.quantile(times, INTERVAL_ENDS).tolist()
        over = Over(gain, low, high, float((times > 1.0).mean()))
    else:
        widths = [math.log(row.gain.high / row.gain.low) / 2.0 for row in (best, now)]
        width = math.exp(math.hypot(*widths))
        over = Over(gain, gain / width, gain * width)
    name = draft_name(best.draft, best.draft_method, best.draft_budget)
    engine = load_engine(command.engine_profile)
    package = packages_of(engine, best.draft, best.draft_method)
    reason = f"{_steps(best, now)}. {acceptance_of(best.drafting)}"
    if package:
        reason += f" {package[0].upper()}{package[1:]}."
    change = over.change(
        f"{verb} with {name}, {format_count(best.gamma, 'token')} per step",
        draft_option(command, best),
        reason,
    )
    option = answer.searched.origin(best).option
    served = Served(case=answer.case, option=option, row=best)
    return [DraftChange(change, served)]


def weighed(
    command: ServeCommand, now: Served, drafts: Sequence[DraftChange]
) -> list[Change]:
    """The ways to draft that are worth a line, as alternatives to each other, and the settings that the
    one which gains most then needs.

    Gains are of the server's own path without the settings that other advice leaves out.
    """
    now_times = staying_times(command, now)
    worth = []
    for change, served in drafts:
        times = now_times / staying_times(_drafting(command, served), served)
        scaled = msgspec.structs.replace(
            change,
            gain=(change.gain or 0.0) * times,
            gain_low=(change.gain_low or 0.0) * times,
            gain_high=(change.gain_high or 0.0) * times,
        )
        if scaled.is_advice:
            worth.append(DraftChange(scaled, served))
    if not worth:
        return []
    most, served = max(worth, key=lambda each: each.change.gain or 0.0)
    ordered = in_order([each.change for each in worth])
    alternatives = [
        msgspec.structs.replace(change, is_alternative=place > 0)
        for place, change in enumerate(ordered)
    ]
    costs = costs_of(command, now).changes
    named = {change.change for change in costs if change.is_advice}
    needed = []
    for change in costs_of(_drafting(command, served), served).changes:
        if change.kind != "exactness" and change.change not in named:
            reason = f"{change.reason}, once this is made: {most.change}"
            needed.append(msgspec.structs.replace(change, reason=reason))
    return [*alternatives, *needed]


def _drafting(command: ServeCommand, served: Served) -> ServeCommand:
    """The command with what would run in place of its own draft."""
    speculation = command.speculation
    row = served.row
    if speculation is not None and speculation.draft in (row.draft, row.draft_method):
        return command
    return msgspec.structs.replace(command, speculation=None)


def advised(changes: Sequence[Change]) -> list[Change]:
    """The changes that are worth a line, in order, each once: of those that differ by a size the largest
    size, which does for the others."""
    by_words: dict[str, Change] = {}
    for change in changes:
        if change.is_advice:
            words = re.sub(r"\d+", "", f"{change.change} {change.option}")
            same = by_words.get(words, change)
            largest = max(same, change, key=lambda each: _size(each.change))
            by_words[words] = msgspec.structs.replace(
                same, change=largest.change, option=largest.option
            )
    return in_order(list(by_words.values()))


def _size(text: str) -> int:
    return max(map(int, re.findall(r"\d+", text)), default=0)


def in_order(changes: Sequence[Change]) -> list[Change]:
    """Changes by worth: those that restore exactness; those that surely gain, the most first; those
    that may gain, the most first; those without a price; then gains of the first token alone, and gains
    at another load or on other devices."""

    def place(change: Change) -> tuple[int, float]:
        gain = -(change.gain or 0.0)
        if change.kind == "exactness":
            return 0, gain
        if not change.is_here:
            return 5, gain
        if change.is_of_first_token:
            return 4, gain
        if change.gain is None:
            return 3, gain
        return 1 if change.is_sure else 2, gain

    return sorted(changes, key=place)


def _steps(row: Candidate, now: Candidate) -> str:
    """The tokens per step of a row and of what runs now, and which has the longer steps."""
    length = "longer" if row.step_s > now.step_s else "shorter"
    return (
        f"{row.drafting.tokens_per_step:.2f} tokens per step for {now.drafting.tokens_per_step:.2f}, "
        f"in {length} steps"
    )


def table_by_batch(command: ServeCommand, drafted: OwnDraft) -> list[Change]:
    """A table of gammas by batch, weighed where it differs most from the best gamma of this load."""
    speculation = command.speculation
    assert speculation is not None
    if drafted.option.tree is not None or speculation.by_batch:
        return []
    here = drafted.row.batch_size
    gammas = {here: drafted.best_at(here)}
    over: dict[int, Over] = {}
    for batch in LIGHT_LOADS:
        if batch < here:
            gammas[batch] = drafted.best_at(batch)
            over[batch] = drafted.over_gamma(batch, gammas[batch], gammas[here])
    gammas = dict(sorted(gammas.items()))
    option = table_option(command, gammas, drafted.row.context_len)
    if len(set(gammas.values())) == 1 or not option:
        return []
    cost, cost_low, cost_high = drafted.case.engine.table_costs(drafted.row.draft)
    gains = [1.0, *(of_batch.gain for of_batch in over.values())]
    if statistics.geometric_mean(gains) < NOTEWORTHY * (1.0 + cost):
        return []
    batch = max(over, key=lambda batch: over[batch].gain)
    most = over[batch]
    bands = ", ".join(f"{batch}: {gamma}" for batch, gamma in gammas.items())
    reason = "few sequences leave more room for drafts"
    if gammas[min(gammas)] < gammas[here]:  # a mixture reads further experts for each
        reason = "a step of few sequences pays more for each token that it verifies"
    if cost:
        # it is paid at every batch, also where the table's gamma is the one that runs now
        reason += (
            f"; following a table makes every step {format_percent(cost)} longer, which is "
            "counted here"
        )
    return [
        Change(
            change=f"Let gamma follow the batch ({bands})",
            option=option,
            reason=reason,
            gain=most.gain / (1.0 + cost),
            gain_low=most.low / (1.0 + cost_high),
            gain_high=most.high / (1.0 + cost_low),
            at_batch=batch,
        )
    ]


# Another number of sequences at once


class BatchAdvice(NamedTuple):
    """How many sequences to serve at once."""

    changes: list[Change]
    notes: list[str]
    serves: int | None = None
    """The most sequences to admit, by the command's option, in place of fewer."""


def changes_of_batch(
    command: ServeCommand,
    users: int,
    request: PlanRequest,
    model: ModelSpec,
) -> BatchAdvice:
    """More devices for users that do not fit, and a most of sequences below them or above what fits;
    `users` 0: it is not known how many there are."""
    alone = without_acceptance(request, draft="none", gamma=None)
    first = answered(alone, model, [])[0][0]
    fits = int(most_that_fit(first.case)) * command.dp_size
    now = first.document.best
    most = command.most_sequences
    advice = BatchAdvice([], [])
    if users > fits:
        advice.changes.extend(_more_devices(command, alone, users, now))
    if most is not None and most > fits:
        if users > fits and command.engine in PREEMPTING:
            # no request's prompt is read again, or each one's once
            output_s = (request.gen_len or USUAL_OUTPUT) * now.tpot_s
            again = now.decoding.ttft_s / (now.decoding.ttft_s + output_s)
            expected = Change(
                change=f"Expect {fits} sequences at once, not {most}",
                option=batch_option(command, fits),
                reason=f"more do not fit at {request.context_lens[0]} tokens: they are preempted and "
                "computed again",
                gain=1.0 + again / 2.0,
                gain_low=1.0,
                gain_high=1.0 + again,
                kind="cost",
            )
            advice.changes.append(expected)
        else:
            fit = format_count(fits, "sequence")
            advice.notes.append(
                f"{fit} of {request.context_lens[0]} tokens fit at once, not {most}: others wait, or are "
                f"preempted ({batch_option(command, fits)})"
            )
    served = min(users, fits)
    if most is None or served <= most:
        return advice
    wider = (served // command.dp_size,)
    row = make_plan(msgspec.structs.replace(alone, batch_sizes=wider)).best
    option = batch_option(command, served)
    change = _throughput(row, now).change(
        f"Serve {format_count(served, 'user')} at once, not {most}",
        option,
        "the others wait; each token then takes longer",
    )
    if not change.is_advice:
        return advice
    advice.changes.append(change)
    return advice._replace(serves=int(option.rpartition(" ")[2]))


def _more_devices(
    command: ServeCommand, alone: PlanRequest, users: int, now: Candidate
) -> list[Change]:
    """The fewest devices of a replica that hold all users, or else those of a node."""
    if command.pp_size > 1:
        return []
    batch = max(users // command.dp_size, 1)
    asked = msgspec.structs.replace(alone, tp_size=None, batch_sizes=(batch,))
    try:
        row = make_plan(asked).best
    except CapacityError:
        return []
    if row.tp_size <= command.tp_size:
        return []
    change = _throughput(row, now).change(
        f"Use tp {row.tp_size}: it holds {row.batch_size * command.dp_size} of {users} users",
        options_of(command).tp.format(row.tp_size),
        f"{now.batch_size * command.dp_size} fit at once now",
    )
    return [msgspec.structs.replace(change, needs_gpus=row.tp_size * command.dp_size)]


def _throughput(row: Candidate, now: Candidate) -> Over:
    """The gain in tokens per second of a replica."""
    gain = row.tokens_per_s / now.tokens_per_s
    return Over(
        gain=gain,
        low=gain * row.decoding.tpot_low_s / row.tpot_s,
        high=gain * row.decoding.tpot_high_s / row.tpot_s,
    )
