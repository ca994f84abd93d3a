"""Acceptance profiles from replays: one of each look-up, with every setting that was replayed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import msgspec
import numpy as np
from scipy.optimize import brentq

from magicdec.errors import ConfigError
from magicdec.logs import tally_kernel as columns
from magicdec.logs.lookups import MAX_NGRAM, Lookup, lookup
from magicdec.logs.replay import LogReplay
from magicdec.logs.requests import Account
from magicdec.logs.tally import CONTEXT_BOUNDS, OUTPUT_BOUNDS, SettingCounts, Whole
from magicdec.perfmodel.acceptance import ReplayedProfile
from magicdec.perfmodel.acceptance.fit import MeasuredRates
from magicdec.perfmodel.acceptance.law import Law, LawError
from magicdec.perfmodel.acceptance.profile import law_of_rates
from magicdec.perfmodel.acceptance.replayed import LookupSetting, RangeOfSteps, Replay

NGRAM_GAMMAS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""Gammas of a sweep, dense where one more token changes most."""
NGRAM_RANGES = (
    (1, 3),
    (1, 5),
    (2, 3),
    (2, 4),
    (2, 5),
    (2, 8),
    (3, 4),
    (3, 5),
    (3, 8),
    (4, 5),
    (4, 8),
    (5, 5),
    (5, 8),
)
"""Shortest and longest n-gram of a sweep."""
MODEL_GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8)
LLAMA_LENGTHS = (4, 8, 12, 16)
SHORTEST_NGRAMS = (1, 2, 3, 4, 5)
"""Shortest n-grams of a sweep where only the longest are given."""
LONGEST_NGRAMS = (3, 4, 5, 8)
"""Longest n-grams of a sweep where only the shortest are given."""
SUFFIX_GAMMAS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
SHOWN_GAMMA = 4
"""Gamma of the ranges that a profile shows, unless it has none so deep."""
VERIFIED_TOKEN_COST = 0.02
"""Time of one more verified token over that of a step, by which a setting is chosen before a plan
prices it: a long draft that is rarely right costs more than it gains."""
RULE_METHODS = {
    "ngram": "ngram",
    "ngram-gpu": "ngram",
    "llama.cpp": "ngram",
    "suffix": "suffix",
    "suffix-local": "suffix",
    "draft-model": "full",
}
MIN_TRIALS = 30
"""Trials below which a range of context is not listed on its own."""


def sweep(
    rules: Sequence[str],
    *,
    gammas: Sequence[int] = (),
    min_ngrams: Sequence[int] = (),
    max_ngrams: Sequence[int] = (),
) -> list[Lookup]:
    """Return the settings to replay for these rules: all that are given, else a grid of those in
    use.

    Raises:
        ConfigError: a rule is unknown, or its settings do not go together.
    """
    lookups: dict[Lookup, None] = {}
    for rule in rules:
        if rule.startswith("suffix"):
            if min_ngrams or max_ngrams:
                raise ConfigError(
                    f"{rule} has no shortest or longest n-gram; give neither"
                )
            for gamma in gammas or SUFFIX_GAMMAS:
                lookups[lookup(rule, gamma=gamma)] = None
            continue
        for low, high in _ranges(rule, min_ngrams, max_ngrams):
            for gamma in gammas or NGRAM_GAMMAS:
                lookups[lookup(rule, gamma=gamma, min_ngram=low, max_ngram=high)] = None
    return list(lookups)


def _ranges(
    rule: str,
    min_ngrams: Sequence[int],
    max_ngrams: Sequence[int],
) -> list[tuple[int, int]]:
    """Shortest and longest n-grams to replay under one rule."""
    given = [*min_ngrams, *max_ngrams]
    if given and not 1 <= min(given) <= max(given) <= MAX_NGRAM:
        raise ConfigError(
            f"n-grams are 1 to {MAX_NGRAM} tokens, not {min(given)} to {max(given)}"
        )
    if rule == "llama.cpp":
        lengths = given or LLAMA_LENGTHS
        return [(length, length) for length in lengths]
    if not given:
        return list(NGRAM_RANGES)
    pairs = [
        (low, high)
        for low, high in product(
            min_ngrams or SHORTEST_NGRAMS, max_ngrams or LONGEST_NGRAMS
        )
        if low <= high
    ]
    if not pairs:
        raise ConfigError("no longest n-gram is as long as the shortest")
    return pairs


def profiles_of(
    replay: LogReplay,
    *,
    model: str,
    dataset: str,
    draft: str = "",
) -> list[ReplayedProfile]:
    """Return one profile of each rule that was replayed; `draft` names a draft model.

    Raises:
        ConfigError: no request decodes more than one token.
    """
    by_rule: dict[str, list[SettingCounts]] = {}
    for counts in replay.settings:
        by_rule.setdefault(counts.lookup.rule, []).append(counts)
    profiles = []
    for of_rule in by_rule.values():
        if not any(counts.num_steps for counts in of_rule):
            raise ConfigError("no logged output has two tokens, so no step drafted any")
        profiles.append(
            _profile(of_rule, replay.account, model=model, dataset=dataset, draft=draft)
        )
    return profiles


def _profile(
    of_rule: Sequence[SettingCounts],
    account: Account,
    *,
    model: str,
    dataset: str,
    draft: str,
) -> ReplayedProfile:
    rule = of_rule[0].lookup.rule
    groups: dict[tuple[int, int], list[SettingCounts]] = {}
    for counts in of_rule:
        groups.setdefault(
            (counts.lookup.min_ngram, counts.lookup.max_ngram), []
        ).append(counts)
    settings = [_setting(group) for group in groups.values()]
    chosen = max(range(len(settings)), key=lambda number: _worth(settings[number]))
    group = list(groups.values())[chosen]
    shown = _shown(group)
    replay = Replay(
        rule=rule,
        requests=shown.num_requests,
        prompt_tokens=account.prompt_tokens,
        output_tokens=account.output_tokens,
        steps=shown.num_steps,
        gamma=shown.lookup.gamma,
        chosen=chosen,
        settings=settings,
        by_context=_ranges_of(shown.by_context, CONTEXT_BOUNDS),
        by_output=_ranges_of(shown.by_output, OUTPUT_BOUNDS),
        requests_for_5_percent=shown.requests_for(0.05),
        not_determined=int(shown.totals[columns.OPEN_DRAFTED]),
        without_prompt=account.without_prompt,
    )
    method = RULE_METHODS[rule]
    profile = ReplayedProfile(
        name=f"{dataset}-{draft or rule}",
        model=model,
        draft=draft or method,
        draft_method=method,
        dataset=dataset,
        definition="conditional rate by position of all steps, replayed from logged requests",
        source=f"replay of {shown.num_requests} logged requests by the rule {rule}",
        law=law_of_rates(replay.setting.rates),
        replay=replay,
    )
    return described(profile, group)


def described(
    profile: ReplayedProfile, group: Sequence[SettingCounts]
) -> ReplayedProfile:
    """Return the profile with the law, errors and counts of the setting that its replay chose."""
    replay = profile.replay
    setting = replay.setting
    counts = _shown(group)
    law = law_of_rates(setting.rates)
    shown = setting.gammas.index(replay.gamma)
    relative = setting.tokens_stderr[shown] / setting.tokens_per_step[shown]
    return msgspec.structs.replace(
        profile,
        law=law,
        error=LawError(log_rejection=_deviation(law, replay.gamma, relative)),
        spread=_spread(counts),
        measured_contexts=[row.context for row in _by_context(counts)],
        measured_gamma=max(setting.gammas),
        drafted_share=setting.drafted_share[shown],
        num_trials=sum(setting.trials),
        measured=_by_context(counts),
    )


def _shown(group: Sequence[SettingCounts]) -> SettingCounts:
    """The gamma that a profile shows in detail."""
    return min(group, key=lambda counts: abs(counts.lookup.gamma - SHOWN_GAMMA))


def _setting(group: Sequence[SettingCounts]) -> LookupSetting:
    """All gammas of one shortest and longest n-gram."""
    ordered = sorted(group, key=lambda counts: counts.lookup.gamma)
    shown = _shown(group)
    rates = shown.rates
    tokens = [counts.tokens_per_step for counts in ordered]
    return LookupSetting(
        min_ngram=ordered[0].lookup.min_ngram,
        max_ngram=ordered[0].lookup.max_ngram,
        gammas=[counts.lookup.gamma for counts in ordered],
        tokens_per_step=[ratio.value for ratio in tokens],
        tokens_stderr=[_error_of(ratio.value, ratio.stderr) for ratio in tokens],
        drafted_share=[counts.drafted_share for counts in ordered],
        drafted_per_step=[counts.drafted_per_step for counts in ordered],
        rates=[rate.value for rate in rates],
        # one request alone tells no error: its rate may be any
        stderr=[0.5 if rate.stderr is None else rate.stderr for rate in rates],
        trials=[rate.trials for rate in rates],
        rates_gamma=shown.lookup.gamma,
    )


def _error_of(value: float, stderr: float | None) -> float:
    """A standard error; of one request, which tells none, half of what a draft gained."""
    if stderr is None:
        return 0.5 * max(value - 1.0, 0.1)
    return stderr


def _worth(setting: LookupSetting) -> float:
    """The best gain over gammas, each drafted token costing a little."""
    tokens = np.array(setting.tokens_per_step)
    drafted = np.array(setting.drafted_per_step)
    return float(np.max(tokens / (1.0 + VERIFIED_TOKEN_COST * drafted)))


def _ranges_of(sums: Whole, bounds: Whole) -> list[RangeOfSteps]:
    rows = []
    ends: list[int | None] = [*bounds.tolist(), None]
    for upto, row in zip(ends, sums.tolist(), strict=True):
        steps = row[columns.STEPS]
        if not steps:
            continue
        rows.append(
            RangeOfSteps(
                upto=upto,
                steps=steps,
                tokens_per_step=row[columns.EMITTED] / steps,
                drafted_share=row[columns.DRAFTED_STEPS] / steps,
            )
        )
    return rows


def _by_context(counts: SettingCounts) -> list[MeasuredRates]:
    """Rates by position of each range of context, their errors widened by what requests differ."""
    widening = [
        _design_effect(rate.value, rate.stderr, rate.trials) for rate in counts.rates
    ]
    tables = []
    for place, by_position in enumerate(counts.context_positions.tolist()):
        if by_position[0][columns.TRIED] < MIN_TRIALS:
            continue
        # the middle of the range on a log scale; ranges double, and the first ends at its bound
        if place == 0:
            middle = float(CONTEXT_BOUNDS[0]) / math.sqrt(2.0)
        else:
            middle = float(CONTEXT_BOUNDS[place - 1]) * math.sqrt(2.0)
        table = MeasuredRates(
            budget=middle, context=middle, rates=[], stderr=[], trials=[]
        )
        tried = [row for row in by_position if row[columns.TRIED]]
        for factor, row in zip(widening, tried, strict=False):
            trials = row[columns.TRIED]
            rate = row[columns.ACCEPTED] / trials
            variance = factor * _binomial_variance(rate, trials)
            table.rates.append(rate)
            table.stderr.append(math.sqrt(variance))
            table.trials.append(float(trials))
        tables.append(table)
    return tables


def _binomial_variance(rate: float, trials: int) -> float:
    """Variance of a rate by its own trials; a rate of 0 or 1 counts as half a trial from there."""
    inside = min(max(rate, 0.5 / trials), 1.0 - 0.5 / trials)
    return inside * (1.0 - inside) / trials


def _design_effect(rate: float, stderr: float | None, trials: int) -> float:
    """Variance clustered by request, over that of independent trials; at least 1."""
    if stderr is None:
        return 1.0
    return max(stderr**2 / _binomial_variance(rate, trials), 1.0)


def _spread(counts: SettingCounts) -> float:
    """Standard deviation of the first position's rate between requests, by moments."""
    sums = [int(value) for value in counts.positions[0].tolist()]
    tried = sums[columns.TRIED]
    pairs = sums[columns.TRIED_SQUARED] - tried
    if pairs <= 0:
        return 0.0
    rate = sums[columns.ACCEPTED] / tried
    squares = (
        sums[columns.ACCEPTED_SQUARED]
        - 2.0 * rate * sums[columns.TRIED_ACCEPTED]
        + rate**2 * sums[columns.TRIED_SQUARED]
    )
    variance = (squares - rate * (1.0 - rate) * tried) / pairs
    # few requests give a variance below 0, or above 1/4, which rates of 0 and 1 alone would have
    return math.sqrt(min(max(variance, 0.0), 0.25))


def _deviation(law: Law, gamma: int, relative: float) -> float:
    """The law's error for which its tokens per step have this relative error: all rates move
    together."""
    # rates to the power of e^±3 are next to 0 and 1: no error is larger
    largest = 3.0

    def excess(deviation: float) -> float:
        low, high = (_tokens(law, gamma, sign * deviation) for sign in (-1.0, 1.0))
        return (high - low) / (high + low) - relative

    if excess(largest) <= 0.0:
        return largest
    return float(brentq(excess, 0.0, largest, xtol=1e-5))


def _tokens(law: Law, gamma: int, shift: float) -> float:
    rates = law.conditional_rates(budget=1.0, context=1.0, gamma_max=gamma) ** math.exp(
        -shift
    )
    return float(1.0 + np.cumprod(rates).sum())
