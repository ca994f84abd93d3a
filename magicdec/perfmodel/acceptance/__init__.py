"""Acceptance profiles: a law of acceptance (law.py; fitted in fit.py) with where it came from and
how sure it is.

A profile is one JSON file. The shipped ones (specs/data/acceptance) are fitted on published
measurements and say which; a user's own measurement replaces them. What was never measured has no
profile: `default_profile` then returns None.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from magicdec.counts import (
    Array,
    all_accepted,
    expected_tokens_per_step,
    is_nothing,
    nothing_accepted,
)
from magicdec.errors import ConfigError
from magicdec.files import converted, read_json, write_atomic
from magicdec.naming import draft_name
from magicdec.perfmodel.acceptance.counted import (
    Beyond,
    cells_of,
    from_logit,
    logit,
    rates_near,
)
from magicdec.perfmodel.acceptance.fit import (
    MeasuredRates,
    fit_law,
    held_out,
    measured_rates,
    measurements_from_rows,
)
from magicdec.perfmodel.acceptance.law import (
    LARGEST,
    MAX_POSITIONS,
    Law,
    LawError,
    Runs,
    fit_runs,
    rejected_before,
)
from magicdec.perfmodel.acceptance.replayed import Replay
from magicdec.perfmodel.acceptance.uncertain import mean_tokens
from magicdec.specs import HEAD_METHODS, LOOKUP_METHODS, HeadSpec

PROFILES_DIRECTORY = (
    Path(__file__).resolve().parents[2] / "specs" / "data" / "acceptance"
)
SCHEMA_VERSION = 1
WINDOWED_CONTEXT_ERROR = 0.15
"""Error of the context exponent, 0, of a head that attends over a window: long texts differ (see
scripts/fit_published_acceptance.py)."""


LOOKUP_PRECISION = 0.5
"""Share of the tokens that a look-up drafts which are accepted, where nobody counted it: 0.2 to 0.9
in replays of logged requests."""


class AcceptanceProfile(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """Acceptance of one (target, draft, method) on one dataset, at one way of sampling."""

    schema_version: int = SCHEMA_VERSION
    name: str = ""
    model: str
    """The target it was measured on."""
    draft: str = "self"
    draft_method: str
    applies_to: list[str] = []
    """Other targets of the family that this profile may stand in for, with the wider error of
    `carried_error`.
    """
    carried_from: str = ""
    """The target that it was measured on, where it stands in for another."""
    checkpoint: str = ""
    """The draft's weights that were measured, where they are published."""
    draft_weight_dtype: str = ""
    """Format of the draft's weights, where it is a narrower copy of its target."""
    is_assumed: bool = False
    """Whether it is a belief: nobody counted this draft on this text."""
    carried_error: float = 0.35
    """Standard deviation of log(1 - alpha) added when the profile stands in for another target."""
    dataset: str = ""
    temperature: float | None = None
    """Sampling temperature. None: the source does not say."""
    top_p: float | None = None
    definition: str = ""
    """The source's definition of acceptance, and its gamma."""
    source: str = ""
    fitted: bool = False
    """Whether the rate was fitted to speedups rather than counted."""
    law: Law
    error: LawError = LawError()
    spread: float = 0.0
    """Standard deviation of alpha between sequences."""
    measured_budgets: list[float] = []
    measured_contexts: list[float] = []
    measured_gamma: int | None = None
    """The largest gamma that was measured."""
    most_drafts: int | None = None
    """Tokens that the draft proposes at most in a step, by the block that it was trained on; None:
    any number."""
    drafted_share: float = 1.0
    """Share of a sequence's steps that have a draft at all, where look-ups may find none: the
    others verify one token, and count among the steps that the rates are of."""
    num_trials: int | None = None
    fit_rms: float | None = None
    """Root mean square of measured minus fitted rates, weighted by trials."""
    held_out_error: float | None = None
    """Mean absolute error of the law on budgets that it was not fitted on, leaving out one at a
    time.
    """
    held_out_noise: float | None = None
    """Value of that error if the law were right, from the counts' own standard errors."""
    measured: list[MeasuredRates] = []
    """The counted rates that the law was fitted to."""
    beyond: Beyond | None = None
    """How rates go on beyond the positions that were counted or given. None: as the law has it."""
    replay: Replay | None = None
    """All settings of a look-up that was replayed from logged requests."""

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(
                f"schema_version {self.schema_version} is not supported; this release reads "
                f"{SCHEMA_VERSION}"
            )
        if not 0.0 <= self.spread <= 0.5:
            raise ValueError(f"'spread' must be between 0 and 0.5, not {self.spread!r}")
        if not 0.0 <= self.carried_error <= 10.0:
            raise ValueError(
                f"'carried_error' must be between 0 and 10, not {self.carried_error!r}"
            )

    def conditional_rates(
        self,
        *,
        budget: Any,
        context: Any,
        gamma_max: int,
        num_sigma: float = 0.0,
    ) -> Array:
        """P(position i accepted | all before accepted), of shape broadcast(budget, context) +
        (gamma_max,).

        `num_sigma` standard deviations above (below, when negative) the middle; ±1.645 spans a 90 %
        interval. A budget of None is the full cache.
        """
        rates, deviation = self._known(
            budget=budget, context=context, gamma_max=gamma_max
        )
        if not num_sigma:
            return rates
        return rates ** np.exp(-num_sigma * deviation)

    def _known(
        self, *, budget: Any, context: Any, gamma_max: int
    ) -> tuple[Array, Array]:
        """Rates by position, and the standard deviation of log(−log rate): of the counts where
        there are some, of the law where there are none."""
        at: dict[str, Any] = {"budget": budget, "context": context}
        rates = self.law.conditional_rates(**at, gamma_max=gamma_max)
        error = self.error
        own: Array = np.zeros(())
        if self.measured and self.replay is None:
            cells = cells_of(self.measured, self.law)
            rates, own = rates_near(cells, rates, **at)
            error = msgspec.structs.replace(error, log_rejection=0.0, depth=0.0)
        away = error.deviation(self.law, **at, gamma_max=gamma_max)
        beyond = self._beyond
        if beyond is None:
            return rates, np.hypot(own, away)
        octaves = beyond.octaves(gamma_max)
        if beyond.slope:
            rates = from_logit(logit(rates) + beyond.slope * octaves)
        of_slope = beyond.error * octaves * log_deviation(rates)
        return rates, np.sqrt(own**2 + away**2 + of_slope**2)

    @property
    def _beyond(self) -> Beyond | None:
        """The belief beyond the known positions; of counts without a belief, the law's error
        by depth."""
        if self.beyond is not None or not self.measured or self.replay is not None:
            return self.beyond
        return Beyond(position=self.num_counted, error=self.error.depth)

    @property
    def num_counted(self) -> int:
        """Positions whose rates were counted; 0: none."""
        return max((len(counted.rates) for counted in self.measured), default=0)

    @property
    def accepts_nothing(self) -> bool:
        """Whether a network was counted long enough to know that it accepts nothing: that is a fault,
        not a text. A look-up may find nothing in a text."""
        if self.draft_method in LOOKUP_METHODS or not self.measured:
            return False
        return is_nothing(self._accepted_first, self._tried_first)

    @property
    def fault(self) -> str:
        """The sentence that this draft does not work; "" for one that may."""
        if not self.accepts_nothing:
            return ""
        return nothing_accepted(
            draft_name(self.draft, self.draft_method),
            accepted=self._accepted_first,
            tried=self._tried_first,
        )

    @property
    def _tried_first(self) -> float:
        return sum(counted.trials[0] for counted in self.measured)

    @property
    def _accepted_first(self) -> float:
        """Drafts whose first token was accepted."""
        return sum(each.rates[0] * each.trials[0] for each in self.measured)

    @property
    def is_partly_drafted(self) -> bool:
        """Whether some steps of a look-up have no draft, or one shorter than gamma."""
        return self.replay is not None or self.is_assumed or self.drafted_share < 1.0

    def drafted_share_at(self, gamma: Any) -> Array:
        """Share of the steps that have a draft: as replayed at each gamma, else the profile's."""
        if (
            self.replay is None
            and self.is_assumed
            and self.draft_method in LOOKUP_METHODS
        ):
            return self._believed_share(gamma)
        if self.replay is None:
            return np.asarray(self.drafted_share, dtype=np.float64)
        share: Array = self.replay.setting.drafted_share_at(gamma)
        return share

    def _believed_share(self, gamma: Any) -> Array:
        """The share of steps with a draft that makes a look-up's usual share of right tokens."""
        depth = np.maximum(np.asarray(gamma, dtype=np.int64), 1)
        at: dict[str, Any] = {"budget": None, "context": 1.0, "gamma": depth}
        middle, _ = self.tokens_per_step(**at)
        tokens = mean_tokens(middle, depth, self.tokens_error(**at))
        drafted = (tokens - 1.0) / LOOKUP_PRECISION
        return np.asarray(np.minimum(drafted / depth, 1.0))

    def draft_len_at(self, gamma: Any) -> Array:
        """Mean drafted tokens of the steps that have a draft: as replayed, else gamma."""
        depth: Array = np.asarray(gamma, dtype=np.float64)
        if self.replay is None:
            return depth
        share = np.maximum(self.replay.setting.drafted_share_at(gamma), 1e-9)
        lengths: Array = np.minimum(
            self.replay.setting.drafted_at(gamma) / share, depth
        )
        return lengths

    def with_setting(self, chosen: int) -> AcceptanceProfile:
        """Return the profile of another of its replayed settings, whose counts by context it does
        not hold.
        """
        if self.replay is None or chosen == self.replay.chosen:
            return self
        replay = msgspec.structs.replace(
            self.replay, chosen=chosen, by_context=[], by_output=[]
        )
        setting = replay.setting
        law = Law(
            rejection=1.0 - setting.rates[0],
            by_position=setting.rates if len(setting.rates) > 1 else [],
        )
        return msgspec.structs.replace(
            self,
            law=law,
            drafted_share=float(setting.drafted_share_at(setting.rates_gamma)),
            num_trials=sum(setting.trials),
            measured=[],
            replay=replay,
        )

    @property
    def max_gamma(self) -> int | None:
        """The deepest gamma that a plan chooses on its own. Without counts, the error of a deeper
        one is not known, so it is the measured one; no draft proposes more than it can. None: any.
        """
        bounds = [self.most_drafts]
        if not self.measured:
            bounds.append(self.measured_gamma)
        return min((bound for bound in bounds if bound is not None), default=None)

    @property
    def runs(self) -> Runs | None:
        """Runs fitted to the counts, where those are of one budget and context, and rise with the
        position.
        """
        if len(self.measured) != 1 or self.replay is not None:
            return None
        return fit_runs(tuple(self.measured[0].rates), tuple(self.measured[0].stderr))

    def tokens_per_step(
        self,
        *,
        budget: Any,
        context: Any,
        gamma: Any,
        shift: Any = 0.0,
    ) -> tuple[Array, Array]:
        """Expected tokens per step, E(gamma), and the probability that all `gamma` drafts are
        accepted; arrays broadcast. By the runs of the counts where they have some, else by the law.

        `shift` is added to the rates by position: those of sequences that differ from the mean.
        """
        gamma = np.asarray(gamma, dtype=np.int64)
        if self.replay is not None:
            return self._replayed_tokens(
                budget=budget, context=context, gamma=gamma, shift=shift
            )
        runs = self.runs
        at: dict[str, Any] = {"budget": budget, "context": context}
        if runs is None:
            deepest = max(int(gamma.max(initial=0)), 1)
            rates = self.conditional_rates(**at, gamma_max=deepest)
            return _by_position(_shifted(rates, shift), gamma)
        rates = self.conditional_rates(**at, gamma_max=runs.counted)
        first = rates[..., 0]
        moved = logit(first + shift) - logit(self.measured[0].rates[0])
        expected, everything = runs.tokens_per_step(gamma, shift=moved)
        at_counted, _ = runs.tokens_per_step(runs.counted, shift=moved)
        counted, _ = _by_position(_shifted(rates, shift), runs.counted)
        # the runs tell how E changes with gamma; at the counted gamma the counts tell E itself
        gain = (counted - 1.0) / (at_counted - 1.0)
        return 1.0 + (expected - 1.0) * gain, everything

    def _replayed_tokens(
        self,
        *,
        budget: Any,
        context: Any,
        gamma: Array,
        shift: Any,
    ) -> tuple[Array, Array]:
        """Tokens per step as replayed at each gamma; a shift moves their gain as it moves the
        law's."""
        assert self.replay is not None
        deepest = max(int(gamma.max(initial=0)), 1)
        rates = self.law.conditional_rates(
            budget=budget, context=context, gamma_max=deepest
        )
        of_law, _ = _by_position(rates, gamma)
        moved, everything = _by_position(_shifted(rates, shift), gamma)
        gain = (moved - 1.0) / np.maximum(of_law - 1.0, 1e-12)
        expected = 1.0 + (self.replay.setting.tokens_at(gamma) - 1.0) * gain
        return np.where(gamma > 0, expected, 1.0), everything

    def tokens_error(
        self,
        *,
        budget: Any,
        context: Any,
        gamma: Any,
        shifts: Sequence[Any] = (),
    ) -> Array:
        """One relative standard deviation of E(gamma): from the law's errors and, by runs, that of
        E(gamma) over the counted gamma's; and from each of `shifts` of the rates."""
        gamma = np.asarray(gamma, dtype=np.int64)
        runs = self.runs
        at: dict[str, Any] = {"budget": budget, "context": context}
        if runs is None:
            deepest = max(int(gamma.max(initial=0)), 1)
        else:
            deepest = runs.counted
        rates, deviation = self._known(**at, gamma_max=deepest)
        depth = gamma if runs is None else deepest
        low, high = (
            expected_tokens_per_step(rates ** np.exp(-sigma * deviation), depth)
            for sigma in (-1.0, 1.0)
        )
        own = _half_range(low, high)
        if runs is not None:
            own = np.hypot(own, runs.log_ratio_error(gamma, deepest))
        if self.replay is not None:
            own = self.replay.setting.error_at(gamma)
        variance: Array = own**2
        for shift in shifts:
            if not np.any(shift):
                continue
            if runs is None and self.replay is None:
                fewer, more = (
                    expected_tokens_per_step(_shifted(rates, sign * shift), gamma)
                    for sign in (-1.0, 1.0)
                )
            else:
                fewer, more = (
                    self.tokens_per_step(**at, gamma=gamma, shift=sign * shift)[0]
                    for sign in (-1.0, 1.0)
                )
            variance = variance + _half_range(fewer, more) ** 2
        return np.sqrt(variance)

    def ratio_error(
        self,
        gamma: int,
        over: int,
        *,
        budget: Any,
        context: Any,
        shift: float = 0.0,
    ) -> float:
        """One standard deviation of log(E(gamma) / E(over)). Errors at positions that both draft
        cancel.
        """
        if (runs := self.runs) is not None:
            return float(runs.log_ratio_error(gamma, over))
        at: dict[str, Any] = {
            "budget": budget,
            "context": context,
            "gamma_max": max(gamma, over, 1),
        }

        def log_ratio(num_sigma: float, by: float) -> float:
            rates = _shifted(self.conditional_rates(**at, num_sigma=num_sigma), by)
            one, other = expected_tokens_per_step(rates, np.array([gamma, over]))
            return float(np.log(one / other))

        own = (log_ratio(1.0, 0.0) - log_ratio(-1.0, 0.0)) / 2.0
        return float(
            np.hypot(own, (log_ratio(0.0, shift) - log_ratio(0.0, -shift)) / 2.0)
        )

    @property
    def trained_len(self) -> int | None:
        """Tokens up to which a head is taken to be trained, where it accepts less beyond; None of
        any other draft, and of prediction heads, which are trained as long as their model."""
        is_head = self.draft_method in HEAD_METHODS and self.draft_method != "mtp"
        falls = (
            self.law.context_exponent > 0.0 < self.law.flat_below
            and self.law.flat_beyond == LARGEST
        )
        if is_head and falls:
            return round(self.law.flat_below)
        return None

    def of_head(self, head: HeadSpec, *, target_len: int) -> AcceptanceProfile:
        """The profile with this head's own window or length in place of the published one's. A
        length that is its target's (`target_len`) says nothing of training: published
        configurations copy it."""
        if self.trained_len is None:
            return self
        if head.window is not None:
            law = msgspec.structs.replace(self.law, context_exponent=0.0)
            error = min(self.error.context_exponent, WINDOWED_CONTEXT_ERROR)
            return msgspec.structs.replace(
                self,
                law=law,
                error=msgspec.structs.replace(self.error, context_exponent=error),
            )
        if head.trained_len is None or head.trained_len >= target_len:
            return self
        own = float(head.trained_len)
        return msgspec.structs.replace(
            self,
            law=msgspec.structs.replace(
                self.law, flat_below=own, reference_context=own
            ),
        )

    def at_rate(
        self, rate: float, *, budget: float, context: float
    ) -> AcceptanceProfile:
        """The profile scaled so position 1 at (budget, context) is accepted at `rate`; without an
        error of its own.
        """
        present = 1.0 - float(self.law.first_rate(budget=budget, context=context))
        floor = self.law.floor
        if not 0.0 < rate < 1.0 or present <= floor:
            return constant_profile(
                rate,
                model=self.model,
                draft=self.draft,
                draft_method=self.draft_method,
            )
        floor = min(floor, 0.5 * (1.0 - rate))
        now, growth = (
            float(each) for each in self.law.rejected(budget=budget, context=context)
        )
        then = rejected_before((1.0 - rate - floor) / (1.0 - floor), growth)
        law = msgspec.structs.replace(
            self.law,
            rejection=self.law.rejection * then / now,
            floor=floor,
        )
        error = msgspec.structs.replace(self.error, log_rejection=0.0)
        return msgspec.structs.replace(
            self,
            law=law,
            error=error,
            fitted=True,
            measured=[],
            replay=None,
        )


def _by_position(rates: Array, gamma: Any) -> tuple[Array, Array]:
    """E(gamma) and the probability that all `gamma` drafts are accepted, from rates by position on
    a last axis.
    """
    return expected_tokens_per_step(rates, gamma), all_accepted(rates, gamma)


def _shifted(rates: Array, shift: Any) -> Array:
    if not np.any(shift):
        return rates
    shifted: Array = np.clip(rates + np.asarray(shift)[..., None], 0.0, 1.0)
    return shifted


def _half_range(low: Array, high: Array) -> Array:
    """Half the relative difference of two values."""
    return (high - low) / (high + low)


def log_deviation(rate: Any) -> Array:
    """Standard deviation of log(−log rate) per standard deviation of the rate's logit."""
    inside = np.clip(rate, 1e-12, 1.0 - 1e-12)
    return np.asarray((1.0 - inside) / -np.log(inside))


def constant_profile(
    rate: float | Sequence[float],
    *,
    model: str = "",
    draft: str = "self",
    draft_method: str = "constant",
    source: str = "given",
) -> AcceptanceProfile:
    """One rate for every position, budget and context; or one by position, the last for all further
    ones.

    Raises ConfigError unless each rate is between 0 and 1.
    """
    if isinstance(rate, float | int):
        given = [rate]
    else:
        given = list(rate)
    if not given:
        raise ConfigError("no acceptance rate is given")
    for each in given:
        if not 0.0 <= each <= 1.0:
            raise ConfigError(f"acceptance rate must be between 0 and 1, not {each}")
    if len(given) > MAX_POSITIONS:
        raise ConfigError(
            f"{len(given)} acceptance rates are given; at most {MAX_POSITIONS} positions are read"
        )
    law = Law(rejection=1.0 - given[0], by_position=given if len(given) > 1 else [])
    return AcceptanceProfile(
        model=model,
        draft=draft,
        draft_method=draft_method,
        source=source,
        law=law,
    )


def fit_profile(
    measurements: Any,
    *,
    model: str = "",
    draft: str = "self",
    dataset: str = "",
    source: str = "measured",
    spread: float | None = None,
    cluster_factor: float | None = None,
) -> AcceptanceProfile:
    """The profile of one draft method at one temperature, from counts.

    `measurements` are rows (mappings, structs or a dict of columns) with draft_method, budget,
    context, position (1 is the first draft), trials (blocks whose drafts before `position` were all
    accepted), accepted, temperature, and optionally `sequence`: with it the spread between
    sequences is estimated and the errors are clustered by sequence.

    Raises:
        ConfigError: no usable row, or rows of several methods or temperatures.
    """
    rows = measurements_from_rows(measurements)
    methods = {row.draft_method for row in rows}
    temperatures = {row.temperature for row in rows}
    for what, values in (("draft method", methods), ("temperature", temperatures)):
        if len(values) > 1:
            raise ConfigError(
                f"one profile describes one {what}; the measurements hold "
                f"{sorted(map(str, values))}"
            )
    is_self = draft == "self"
    law, error, between, rms = fit_law(
        rows,
        is_self=is_self,
        spread=spread,
        cluster_factor=cluster_factor,
    )
    missed, noise = held_out(rows, is_self=is_self) or (None, None)
    return AcceptanceProfile(
        model=model,
        draft=draft,
        draft_method=methods.pop(),
        dataset=dataset,
        temperature=temperatures.pop(),
        definition="conditional rate by position, from real speculative blocks",
        source=source,
        law=law,
        error=error,
        spread=between,
        measured_budgets=sorted({row.budget for row in rows}),
        measured_contexts=sorted({row.context for row in rows}),
        measured_gamma=max(row.position for row in rows),
        num_trials=round(sum(row.trials for row in rows)),
        fit_rms=rms,
        held_out_error=missed,
        held_out_noise=noise,
        measured=measured_rates(rows),
    )


def default_profile_names() -> list[str]:
    return sorted(path.stem for path in PROFILES_DIRECTORY.glob("*.json"))


@lru_cache(maxsize=1)
def _defaults() -> tuple[AcceptanceProfile, ...]:
    return tuple(
        load_profile(PROFILES_DIRECTORY / f"{name}.json")
        for name in default_profile_names()
    )


def published_drafts(model_name: str) -> list[tuple[str, str]]:
    """The (draft, method) pairs with a shipped profile of this target, or of one that stands in for
    it.
    """
    known = (
        each for each in _defaults() if model_name in (each.model, *each.applies_to)
    )
    pairs = (
        (each.draft, each.draft_method) for each in known if not each.draft_weight_dtype
    )
    return list(dict.fromkeys(pairs))


def default_profile(
    model_name: str,
    draft_method: str,
    draft: str = "self",
    temperature: float | None = None,
    weight_dtype: str = "",
) -> AcceptanceProfile | None:
    """The shipped profile of a target, draft and method; None where none was ever measured ("needs
    acceptance").

    Of several, the one measured nearest to `temperature`. A profile of another member of the
    model's family stands in with a wider error, and says so in its source. A self-draft with the
    full cache and the target's own weights accepts everything, by construction; one with a copy of
    them in `weight_dtype` has a profile of its own.
    """
    if draft == "self" and draft_method == "full" and not weight_dtype:
        return constant_profile(
            1.0,
            model=model_name,
            draft_method=draft_method,
            source="exact: the draft is the target",
        )
    wanted = (draft, draft_method, weight_dtype)
    found = [
        each
        for each in _defaults()
        if (each.draft, each.draft_method, each.draft_weight_dtype) == wanted
    ]
    if temperature is not None:
        found.sort(
            key=lambda each: (
                0.0 if each.temperature is None else abs(each.temperature - temperature)
            )
        )
    for profile in found:
        if profile.model == model_name:
            return profile
    for profile in found:
        if model_name in profile.applies_to:
            error = profile.error
            wider = (error.log_rejection**2 + profile.carried_error**2) ** 0.5
            carried = f"measured on {profile.model}, carried over to {model_name}"
            return msgspec.structs.replace(
                profile,
                model=model_name,
                carried_from=profile.model,
                checkpoint="",
                source=f"{carried}: {profile.source}",
                error=msgspec.structs.replace(error, log_rejection=wider),
            )
    return None


def load_profile(path: str | Path) -> AcceptanceProfile:
    """Reads a profile.

    Raises ConfigError naming the file and the key.
    """
    return converted(
        read_json(Path(path), "acceptance profile"),
        AcceptanceProfile,
        where=str(path),
    )


def save_profile(profile: AcceptanceProfile, path: str | Path) -> None:
    """Writes a profile, whole or not at all.

    Raises StorageError when the file cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"
    write_atomic(Path(path), text)
