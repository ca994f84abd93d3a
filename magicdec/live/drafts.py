"""Other ways to draft than a command's own: another gamma, another draft, none or one at all, another
attention kernel, and gamma by batch. All times are a plan's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from magicdec.counts import Z_90
from magicdec.live.advice import DraftedLoad, choices_at
from magicdec.live.change import NOTEWORTHY, Change, Served, Way, in_order
from magicdec.live.load import without_acceptance
from magicdec.live.options import (
    draft_option,
    gamma_option,
    table_option,
    takes_draft,
    without_draft,
)
from magicdec.live.settings import Setting, costs_of, settings_of, times_as_long
from magicdec.naming import draft_name
from magicdec.perfmodel.intervals import engine_error
from magicdec.perfmodel.plan.draws import Draws, draws_of
from magicdec.perfmodel.plan.other_kernel import other_kernel
from magicdec.perfmodel.plan.request import PlanRequest
from magicdec.perfmodel.plan.search import DraftRows, every_gamma
from magicdec.perfmodel.plan.standing import Standing, packages_of
from magicdec.perfmodel.planner import Answer, answered, make_plan
from magicdec.perfmodel.trees import TREES_LOSE, tree_error
from magicdec.reports.sentences import acceptance_of
from magicdec.schema.row import NO_GAIN, Candidate, Gain
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


# The command's own draft


def own_draft(
    command: ServeCommand, request: PlanRequest, model: ModelSpec
) -> tuple[Served | None, list[str]]:
    """The command's draft at its gamma, with notes on it; None: it is not priced, and why."""
    speculation = command.speculation
    assert speculation is not None
    draft = speculation.draft
    if draft not in OWN_METHOD and known_model(draft) is None:
        cure = "" if draft in UNKNOWN_DRAFTS else ": its config.json would tell"
        return None, [
            f"nothing is known of the draft {draft}, so it is not priced{cure}"
        ]
    batch = request.batch_sizes[0]
    gamma = speculation.gamma_at(batch)
    if gamma == 0:
        return None, [
            f"gamma follows the batch and drafts nothing for {batch} sequences, so it is priced without "
            "a draft"
        ]
    asked = msgspec.structs.replace(
        request, draft=draft, gamma=gamma, tree=speculation.tree
    )
    if draft in HEAD_METHODS:
        # by its own acceptance, vocabulary and length
        name = listed_as(speculation.checkpoint or "")
        asked = msgspec.structs.replace(asked, draft_name=name)
    if draft not in OWN_METHOD:
        asked = msgspec.structs.replace(asked, draft_method="full")
    answer = answered(asked, model, [])[0][0]
    if not answer.drafted:
        break_even = ""
        unknown = make_plan(without_acceptance(asked, gamma=None)).needs_acceptance
        for other in unknown:
            rate = other.break_even_acceptance_rate
            if rate is not None:
                break_even = f"; it is faster from a rate of {rate:.2f}"
                break
        return None, [
            f"no acceptance of {draft} is known for {model.name}{break_even} (--acceptance-rate)"
        ]
    row = answer.drafted[0]
    for drafted in answer.drafted:
        if drafted.draft_budget == speculation.window:
            row = drafted
            break
    notes = []
    if speculation.gamma is None:
        notes.append(f"gamma is the engine's default; {row.gamma}, the best, was taken")
    option = answer.searched.origin(row).option
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
    for word, form in UNMEASURED_FORMS.items():
        if draft == "dflash" and word in written:
            notes.append(
                f"{form} is priced as DFlash: its own choice among candidates was not measured"
            )
    if speculation.by_batch and not speculation.bands:
        notes.append("gamma follows a table by batch; its deepest was taken")
    elif speculation.by_batch:
        notes.append(
            f"gamma follows a table by batch: {row.gamma} for {batch} sequences"
        )
    return Served(case=answer.case, option=option, row=row), notes


# Another gamma of it


def gammas_at(drafted: Served, batch: int) -> DraftRows:
    """Every gamma of a draft, as a chain, at a batch: a tree may hold more tokens than any chain."""
    assert drafted.option is not None
    here = msgspec.structs.replace(drafted.row, batch_size=batch)
    chain = replace(drafted.option, tree=None)
    deepest = min(drafted.row.gamma, MAX_GAMMA)
    return every_gamma(drafted.case, chain, here, deepest=deepest)


def best_gamma(rows: Sequence[Candidate]) -> int:
    """The best gamma of a batch's rows; 0: to draft nothing."""
    best = max(rows, key=lambda row: row.rate)
    return best.gamma if best.gain.speedup >= 1.0 else 0


def gain_of_gamma(
    drafted: Served, rows: Sequence[Candidate], gamma: int, now: int
) -> Gain:
    """The gain of a gamma of a batch's rows over another one, 0 for no draft."""
    by_gamma = {row.gamma: row for row in rows}
    if now == gamma:
        return NO_GAIN
    if gamma == 0:
        return gain_of_none(by_gamma[now])
    if now == 0:
        return by_gamma[gamma].gain
    return gain_over(drafted, by_gamma[gamma], by_gamma[now])


def gain_of_none(row: Candidate) -> Gain:
    """The gain of no draft over a row's: its own gain, turned round."""
    gain = row.gain
    return Gain(
        speedup=1.0 / gain.speedup,
        low=1.0 / gain.high,
        high=1.0 / gain.low,
        pays=1.0 - gain.probability,
    )


def gain_over(drafted: Served, row: Candidate, now: Candidate) -> Gain:
    """A gamma's rate over that of another one, as a chain over a tree too.

    The interval is that of decoding (advice.py), whose part of a request's time is what differs.
    Tree and chain share the errors of acceptance and kernels, so the tree's law and the engine's
    error are left.
    """
    assert drafted.option is not None
    gain = row.rate / now.rate
    setup = drafted.case.setup(drafted.option)
    gamma = now.gamma
    tree = drafted.option.tree
    if tree is not None:
        error = float(tree_error(tree, gamma))
        width = math.exp(Z_90 * math.hypot(error, engine_error(setup)))
        return Gain(speedup=gain, low=gain / width, high=gain * width)
    situation = DraftedLoad(
        setup=setup,
        acceptance=drafted.option.acceptance,
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
    return Gain(speedup=gain, low=low, high=high)


# Ways to draft


def ways_to_draft(command: ServeCommand, drafted: Served, free: Answer) -> list[Way]:
    """Another gamma, no draft, and another draft; `free`: every draft's answer."""
    speculation = command.speculation
    assert speculation is not None
    assert drafted.option is not None
    row = drafted.row
    own = gammas_at(drafted, row.batch_size)
    chains = [chain for chain in own.rows if chain.fits]
    best = max(chains, key=lambda chain: chain.rate, default=row)
    ways = []
    change = None
    if speculation.tree is not None:
        reason = (
            f"{best.drafting.tokens_per_step:.2f} tokens per step for "
            f"{row.drafting.tokens_per_step:.2f}"
        )
        for chain in chains:
            if chain.gamma == row.gamma != best.gamma:
                reason += f"; a chain of {chain.gamma}: {chain.rate / row.rate:.2f}x"
        change = Change(
            change=f"Draft a chain of {format_count(best.gamma, 'token')}, not a tree of {row.gamma}",
            option=f"--speculative-eagle-topk 1 {gamma_option(command, best.gamma)}",
            reason=reason,
        )
    elif best.gamma != row.gamma:
        change = Change(
            change=f"Draft {format_count(best.gamma, 'token')} per step, not {row.gamma}",
            option=gamma_option(command, best.gamma),
            reason=_steps(best, row),
        )
    if change is not None:
        chain_option = replace(drafted.option, tree=None)
        served = Served(case=drafted.case, option=chain_option, row=best)
        gain = gain_over(drafted, best, row)
        ways.append(Way(change=change.gaining(gain), served=served))
    none = Change(
        change=f"Do not speculate at {format_count(row.batch_size, 'user')}",
        option=without_draft(command),
        reason="a step with drafts costs more than its tokens are worth",
    )
    alone = Served(case=free.case, option=None, row=free.document.autoregressive)
    ways.append(Way(change=none.gaining(gain_of_none(row)), served=alone))
    others = []
    for other in free.drafted:
        is_own = (other.draft, other.draft_method) == (row.draft, row.draft_method)
        if not is_own or other.draft_budget != row.draft_budget:
            others.append(other)
    plain, *of_drafts = free.searched
    draws = draws_of(drafted.case, [plain, own, *of_drafts], row)
    best_other = best_draft(command, free, others, row, "Draft", draws)
    return ways if best_other is None else [*ways, best_other]


def ways_instead(
    command: ServeCommand,
    found: Standing,
    request: PlanRequest,
    model: ModelSpec,
    free: Answer,
) -> list[Way]:
    """The drafts to use in place of one that cannot be started, compared with no draft: the command's
    checkpoint by the method and depth that it has, and the best of the other drafts."""
    own = None
    others = free.drafted
    alone = free.document.autoregressive
    if found.method is not None:
        asked = without_acceptance(request, draft=found.method, gamma=None)
        answer = answered(asked, model, [])[0][0]
        rows = []
        for row in answer.drafted:
            if found.most_drafts is None or row.gamma <= found.most_drafts:
                rows.append(row)
        own = best_draft(command, answer, rows, alone, "Draft")
        others = [row for row in others if row.draft_method != found.method]
    other = best_draft(command, free, others, alone, "Speculate")
    return [way for way in (own, other) if way is not None]


def best_draft(
    command: ServeCommand,
    answer: Answer,
    rows: Sequence[Candidate],
    now: Candidate,
    verb: str,
    draws: Draws | None = None,
) -> Way | None:
    """The best row that runs of an answer's drafts, over what runs now; None: none runs. `draws`: of all
    of them and of what runs now, where that is a draft. Drafts share errors of costs and of acceptance,
    so the interval between two is of draws of both."""
    able = []
    for row in rows:
        needs_more = row.drafting.needs_plugin or row.drafting.is_hypothetical
        is_able = not needs_more and takes_draft(command, row)
        if row.is_speculative and row.fits and is_able:
            able.append(row)
    if not able:
        return None
    best = max(able, key=lambda row: row.rate)
    times = best.rate / now.rate
    drawn = None if draws is None else draws.times_as_fast(best, now)
    low, high, pays = best.gain.low, best.gain.high, None
    if not now.is_speculative:
        pays = best.gain.probability
    elif drawn is not None:
        low, high = np.quantile(drawn, INTERVAL_ENDS).tolist()
        pays = float((drawn > 1.0).mean())
    else:
        widths = [math.log(row.gain.high / row.gain.low) / 2.0 for row in (best, now)]
        width = math.exp(math.hypot(*widths))
        low = times / width
        high = times * width
    name = draft_name(best.draft, best.draft_method, best.draft_budget)
    engine = load_engine(command.engine_profile)
    package = packages_of(engine, best.draft, best.draft_method)
    reason = f"{_steps(best, now)}. {acceptance_of(best.drafting)}"
    if package:
        reason += f" {package[0].upper()}{package[1:]}."
    change = Change(
        change=f"{verb} with {name}, {format_count(best.gamma, 'token')} per step",
        option=draft_option(command, best),
        reason=reason,
    )
    option = answer.searched.origin(best).option
    return Way(
        change=change.gaining(Gain(speedup=times, low=low, high=high, pays=pays)),
        served=Served(case=answer.case, option=option, row=best),
    )


def _steps(row: Candidate, now: Candidate) -> str:
    """The tokens per step of a row and of what runs now, and which has the longer steps."""
    length = "longer" if row.step_s > now.step_s else "shorter"
    return (
        f"{row.drafting.tokens_per_step:.2f} tokens per step for {now.drafting.tokens_per_step:.2f}, "
        f"in {length} steps"
    )


def weighed(
    command: ServeCommand, now: Served, ways: Sequence[Way], costs: Sequence[Change]
) -> list[Change]:
    """The ways to draft that are worth a line, as alternatives to each other, and the settings that the
    one which gains most then needs, but for those that `costs` names already.

    Gains are of the server's own path without the settings that other advice leaves out.
    """
    now_times = _staying_times(command, now)
    worth = []
    for way in ways:
        change = way.change
        assert way.served is not None
        times = now_times / _staying_times(command, way.served)
        change = msgspec.structs.replace(
            change,
            gain=(change.gain or 0.0) * times,
            gain_low=(change.gain_low or 0.0) * times,
            gain_high=(change.gain_high or 0.0) * times,
        )
        if change.is_advice:
            worth.append((change, way.served))
    if not worth:
        return []
    alternatives = [
        msgspec.structs.replace(change, is_alternative=place > 0)
        for place, change in enumerate(in_order([change for change, _ in worth]))
    ]
    most, served = max(worth, key=lambda each: each[0].gain or 0.0)
    named = {change.change for change in costs if change.is_advice}
    needed = []
    for change in costs_of(served, _settings_with(command, served)):
        if change.kind != "exactness" and change.change not in named:
            reason = f"{change.reason}, once this is made: {most.change}"
            needed.append(msgspec.structs.replace(change, reason=reason))
    return [*alternatives, *needed]


def _settings_with(command: ServeCommand, served: Served) -> list[Setting]:
    """The command's settings with what would run in place of its own draft."""
    speculation = command.speculation
    row = served.row
    if speculation is None or speculation.draft not in (row.draft, row.draft_method):
        command = msgspec.structs.replace(command, speculation=None)
    return settings_of(command, served)


def _staying_times(command: ServeCommand, served: Served) -> float:
    """Times as long as a step takes with the settings that cannot be left out."""
    settings = _settings_with(command, served)
    return times_as_long(served, [each for each in settings if each.advice is None])


# Its kernel, and its gamma by batch


def way_by_kernel(command: ServeCommand, drafted: Served) -> Way | None:
    """Another attention backend with which the draft is faster."""
    kernel = other_kernel(drafted.case, drafted.row, drafted.option)
    if kernel is None:
        return None
    option = kernel.option
    asked = command.attention_backend
    written = [
        f"{name} {value}"
        for name, value in command.read.items()
        if asked and "attention" in name and value.lower() == asked.lower()
    ]
    if written:
        option = f"leave out {' '.join(written)}; {option}"
    change = Change(
        change=f"Verify with {kernel.backend}", option=option, reason=kernel.reason
    )
    return Way(
        change=change.gaining(kernel.gain),
        command=msgspec.structs.replace(command, attention_backend=kernel.backend),
    )


def table_by_batch(command: ServeCommand, drafted: Served) -> list[Change]:
    """A table of gammas by batch, weighed where it differs most from the best gamma of this load."""
    speculation = command.speculation
    assert speculation is not None
    assert drafted.option is not None
    if drafted.option.tree is not None or speculation.by_batch:
        return []
    here = drafted.row.batch_size
    batches = [*(batch for batch in LIGHT_LOADS if batch < here), here]
    rows = {batch: gammas_at(drafted, batch).rows for batch in batches}
    gammas = {batch: best_gamma(rows[batch]) for batch in batches}
    option = table_option(command, gammas, drafted.row.context_len)
    if len(set(gammas.values())) == 1 or not option:
        return []
    cost, cost_low, cost_high = drafted.case.engine.table_costs(drafted.row.draft)
    gains = {
        batch: gain_of_gamma(drafted, rows[batch], gammas[batch], gammas[here])
        for batch in batches
    }
    speedups = [gain.speedup for gain in gains.values()]
    if statistics.geometric_mean(speedups) < NOTEWORTHY * (1.0 + cost):
        return []
    batch = max(gains, key=lambda batch: gains[batch].speedup)
    most = gains[batch]
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
    change = Change(
        change=f"Let gamma follow the batch ({bands})",
        option=option,
        reason=reason,
        at_batch=batch,
    )
    gain = Gain(
        speedup=most.speedup / (1.0 + cost),
        low=most.low / (1.0 + cost_high),
        high=most.high / (1.0 + cost_low),
    )
    return [change.gaining(gain)]
