"""The interface of an acceptance profile, with the answers of a law with an error and of given
rates.

Each sort of knowledge is a class that answers these questions in its own way:

    RateProfile        given rates by position, the same at any budget and context      (here)
    MeasuredProfile    counts, or a law fitted to published figures                     (measured.py)
    ReplayedProfile    a look-up's tokens per step at each gamma, from logged requests  (replayed.py)
    BelievedProfile    nobody measured it: a mean and a width, made in believed.py      (here)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec
import numpy as np

from magicdec.counts import Array, all_accepted, expected_tokens_per_step
from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance.law import (
    LARGEST,
    MAX_POSITIONS,
    Beyond,
    Law,
    LawError,
    rejected_before,
)
from magicdec.specs.speculation import HEAD_METHODS, LOOKUP_METHODS

SCHEMA_VERSION = 1


class Acceptance(Protocol):
    """The questions that a prediction asks of an acceptance; arrays broadcast."""

    @property
    def is_partly_drafted(self) -> bool:
        """Whether some steps have no draft, or one shorter than gamma."""
        ...

    def tokens_per_step(
        self, *, budget: Any, context: Any, gamma: Any
    ) -> tuple[Array, Array]:
        """Tokens per step, the median where they are only believed, and the probability that all drafts
        are accepted."""
        ...

    def drafted_share_at(self, gamma: Any) -> Array:
        """Share of the steps that have a draft."""
        ...

    def draft_len_at(self, gamma: Any) -> Array:
        """Mean drafted tokens of the steps that have a draft."""
        ...


class KnownRates(NamedTuple):
    """Rates by position that were given or counted; the positions beyond are a matter of belief."""

    rates: Array
    variance: Array
    """Variance of each rate's logit."""
    is_last_kept: bool
    """Whether all further positions are taken to have the last rate."""


class AcceptanceProfile(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """Acceptance of one (target, draft, method) on one dataset, at one way of sampling.

    What every sort has, and the answers of a law with an error, which sorts that know more override.
    """

    schema_version: int = SCHEMA_VERSION
    name: str = ""
    model: str
    """The target that it is about."""
    draft: str = "self"
    draft_method: str
    checkpoint: str = ""
    """The draft's weights that were measured, where they are published."""
    dataset: str = ""
    temperature: float | None = None
    """Sampling temperature. None: the source does not say."""
    top_p: float | None = None
    definition: str = ""
    """The source's definition of acceptance, and its gamma."""
    source: str = ""
    law: Law
    error: LawError = LawError()
    spread: float = 0.0
    """Standard deviation of alpha between sequences."""
    measured_budgets: list[float] = []
    measured_contexts: list[float] = []
    measured_gamma: int | None = None
    """The largest gamma that was measured, or that several sources of a belief counted."""
    told_gammas: tuple[int, ...] = ()
    """The gamma whose tokens per step are all that is known, and the deeper ones of which that tells
    something (believed.told_gammas). Empty: more is known."""
    most_drafts: int | None = None
    """Tokens that the draft proposes at most in a step, by the block that it was trained on; None:
    any number."""
    drafted_share: float = 1.0
    """Share of a sequence's steps that have a draft at all, where look-ups may find none: the
    others verify one token, and count among the steps that the rates are of."""

    is_assumed: ClassVar[bool] = False
    """Whether it is a belief: nobody counted this draft on this text."""

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(
                f"schema_version {self.schema_version} is not supported; this release reads "
                f"{SCHEMA_VERSION}"
            )
        if not 0.0 <= self.spread <= 0.5:
            raise ValueError(f"'spread' must be between 0 and 0.5, not {self.spread!r}")

    # Tokens per step
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
        """Rates by position, and the standard deviation of log(−log rate)."""
        at: dict[str, Any] = {"budget": budget, "context": context}
        rates = self.law.conditional_rates(**at, gamma_max=gamma_max)
        return rates, self.error.deviation(self.law, **at, gamma_max=gamma_max)

    def tokens_per_step(
        self,
        *,
        budget: Any,
        context: Any,
        gamma: Any,
        shift: Any = 0.0,
    ) -> tuple[Array, Array]:
        """Expected tokens per step, E(gamma), and the probability that all `gamma` drafts are
        accepted; arrays broadcast.

        `shift` is added to the rates by position: those of sequences that differ from the mean.
        """
        gamma = np.asarray(gamma, dtype=np.int64)
        rates = self.conditional_rates(
            budget=budget, context=context, gamma_max=deepest_of(gamma)
        )
        return by_position(shifted(rates, shift), gamma)

    def tokens_error(
        self,
        *,
        budget: Any,
        context: Any,
        gamma: Any,
        shifts: Sequence[Any] = (),
    ) -> Array:
        """One relative standard deviation of E(gamma): its own, and that of each of `shifts` of the
        rates."""
        gamma = np.asarray(gamma, dtype=np.int64)
        rates, deviation = self._known(
            budget=budget, context=context, gamma_max=deepest_of(gamma)
        )
        return with_shifts(
            error_of_rates(rates, deviation, gamma),
            shifts,
            lambda shift: expected_tokens_per_step(shifted(rates, shift), gamma),
        )

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
        at: dict[str, Any] = {
            "budget": budget,
            "context": context,
            "gamma_max": max(gamma, over, 1),
        }

        def log_ratio(num_sigma: float, by: float) -> float:
            rates = shifted(self.conditional_rates(**at, num_sigma=num_sigma), by)
            one, other = expected_tokens_per_step(rates, np.array([gamma, over]))
            return float(np.log(one / other))

        own = (log_ratio(1.0, 0.0) - log_ratio(-1.0, 0.0)) / 2.0
        return float(
            np.hypot(own, (log_ratio(0.0, shift) - log_ratio(0.0, -shift)) / 2.0)
        )

    # Drafted tokens
    @property
    def is_partly_drafted(self) -> bool:
        """Whether some steps of a look-up have no draft, or one shorter than gamma."""
        return self.drafted_share < 1.0

    def drafted_share_at(self, gamma: Any) -> Array:
        """Share of the steps that have a draft."""
        return np.asarray(self.drafted_share, dtype=np.float64)

    def draft_len_at(self, gamma: Any) -> Array:
        """Mean drafted tokens of the steps that have a draft."""
        return np.asarray(gamma, dtype=np.float64)

    @property
    def max_gamma(self) -> int | None:
        """The deepest gamma that a plan chooses on its own. Without counts, the error of a deeper
        one is not known, so it is the measured one; no draft proposes more than it can, and one number
        tells little of deeper ones. None: any.
        """
        bounds = [self.most_drafts, max(self.told_gammas, default=None)]
        if not self.is_counted:
            bounds.append(self.measured_gamma)
        return min((bound for bound in bounds if bound is not None), default=None)

    def tells_of(self, gamma: int) -> bool:
        """Whether a gamma may be chosen by what is known of it."""
        return not self.told_gammas or (
            gamma <= self.told_gammas[0] or gamma in self.told_gammas
        )

    # What it is known from
    @property
    def is_counted(self) -> bool:
        """Whether this very draft was counted by position."""
        return False

    @property
    def measured_on(self) -> str:
        """The other target that it was measured on, where it stands in for that one's; else ""."""
        return ""

    def known_rates(self, *, context: float, num_given: int) -> KnownRates | None:
        """The rates by position that were given or counted, of which `num_given` were given. None:
        it answers for every position itself."""
        return None

    @property
    def fault(self) -> str:
        """The sentence that this draft does not work; "" for one that may."""
        return ""

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

    # Other settings and rates
    @property
    def settings(self) -> Sequence[AcceptanceProfile]:
        """One profile for each setting of the draft that a plan compares."""
        return (self,)

    @property
    def lookup_lengths(self) -> tuple[int | None, int | None]:
        """Shortest and longest n-gram that is looked up, where that is known."""
        return None, None

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
        return msgspec.structs.replace(self, law=law, error=error)


class RateProfile(AcceptanceProfile, frozen=True, kw_only=True):
    """Rates that were given: sure as far as they go."""

    beyond: Beyond | None = None
    """How rates go on beyond the positions that were given. None: as the last one."""

    def known_rates(self, *, context: float, num_given: int) -> KnownRates | None:
        if not num_given:
            return None
        rates = self.conditional_rates(
            budget=None, context=context, gamma_max=num_given
        )
        return KnownRates(rates, variance=np.zeros(num_given), is_last_kept=True)

    def _known(
        self, *, budget: Any, context: Any, gamma_max: int
    ) -> tuple[Array, Array]:
        rates, deviation = super()._known(
            budget=budget, context=context, gamma_max=gamma_max
        )
        if self.beyond is None:
            return rates, deviation
        return self.beyond.continued(rates, deviation**2)


LOOKUP_PRECISION = 0.5
"""Share of the tokens that a look-up drafts which are accepted, where nobody counted it: 0.2 to 0.9
in replays of logged requests."""


class BelievedProfile(AcceptanceProfile, frozen=True, kw_only=True):
    """A mean by position and how wide it is, for a text, a run and a harness not seen so far."""

    is_assumed: ClassVar[bool] = True

    @property
    def is_partly_drafted(self) -> bool:
        return True

    def drafted_share_at(self, gamma: Any) -> Array:
        """The share of steps with a draft that makes a look-up's usual share of right tokens."""
        if self.draft_method not in LOOKUP_METHODS:
            return super().drafted_share_at(gamma)
        depth = np.maximum(np.asarray(gamma, dtype=np.int64), 1)
        at: dict[str, Any] = {"budget": None, "context": 1.0, "gamma": depth}
        tokens, _ = self.tokens_per_step(**at)
        drafted = (tokens - 1.0) / LOOKUP_PRECISION
        return np.asarray(np.minimum(drafted / depth, 1.0))


class BeliefByText(msgspec.Struct, frozen=True):
    """One draft's beliefs on several texts: the first axis of every answer is the text. Arguments of
    more than one axis have a text on their first one, too."""

    profiles: Sequence[BelievedProfile]

    is_assumed: ClassVar[bool] = True
    is_counted: ClassVar[bool] = False

    @property
    def is_partly_drafted(self) -> bool:
        return any(profile.is_partly_drafted for profile in self.profiles)

    @property
    def spread(self) -> float:
        """Beliefs have the same on any text."""
        return self.profiles[0].spread

    @property
    def draft_method(self) -> str:
        return self.profiles[0].draft_method

    def _known(self, *, gamma_max: int, **where: Any) -> tuple[Array, Array]:
        """Rates by position on each text, and the standard deviations of log(−log rate)."""
        rates = []
        deviations = []
        for place, profile in enumerate(self.profiles):
            rate, deviation = profile._known(
                **_on_text(place, where), gamma_max=gamma_max
            )
            rates.append(rate)
            deviations.append(deviation)
        return np.stack(rates), np.stack(deviations)

    def tokens_per_step(self, *, gamma: Any, **where: Any) -> tuple[Array, Array]:
        gamma = np.asarray(gamma, dtype=np.int64)
        rates, _ = self._known(gamma_max=deepest_of(gamma), **where)
        return by_position(rates, gamma)

    def tokens_error(
        self, *, gamma: Any, shifts: Sequence[Any] = (), **where: Any
    ) -> Array:
        gamma = np.asarray(gamma, dtype=np.int64)
        rates, deviation = self._known(gamma_max=deepest_of(gamma), **where)
        return with_shifts(
            error_of_rates(rates, deviation, gamma),
            shifts,
            lambda shift: expected_tokens_per_step(shifted(rates, shift), gamma),
        )

    def drafted_share_at(self, gamma: Any) -> Array:
        shares = []
        for place, profile in enumerate(self.profiles):
            here = _on_text(place, {"gamma": gamma})["gamma"]
            share = profile.drafted_share_at(here)
            shares.append(np.broadcast_to(share, np.shape(here)))
        return np.stack(shares)

    def draft_len_at(self, gamma: Any) -> Array:
        lengths = []
        for place, profile in enumerate(self.profiles):
            here = _on_text(place, {"gamma": gamma})["gamma"]
            length = profile.draft_len_at(here)
            lengths.append(np.broadcast_to(length, np.shape(here)))
        return np.stack(lengths)


def _on_text(place: int, where: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of one text of several."""
    here = {}
    for name, value in where.items():
        here[name] = value[place] if np.ndim(value) > 1 else value
    return here


def constant_profile(
    rate: float | Sequence[float],
    *,
    model: str = "",
    draft: str = "self",
    draft_method: str = "constant",
    source: str = "given",
) -> RateProfile:
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
    return RateProfile(
        model=model,
        draft=draft,
        draft_method=draft_method,
        source=source,
        law=law_of_rates(given),
    )


def law_of_rates(rates: Sequence[float]) -> Law:
    """The law that has these rates by position at any budget and context."""
    by_position: list[float] = []
    if len(rates) > 1:
        by_position = list(rates)
    return Law(rejection=1.0 - rates[0], by_position=by_position)


def deepest_of(gamma: Array) -> int:
    """The largest of several gammas, at least 1."""
    return max(int(gamma.max(initial=0)), 1)


def by_position(rates: Array, gamma: Any) -> tuple[Array, Array]:
    """E(gamma) and the probability that all `gamma` drafts are accepted, from rates by position on
    a last axis.
    """
    return expected_tokens_per_step(rates, gamma), all_accepted(rates, gamma)


def shifted(rates: Array, shift: Any) -> Array:
    """Rates by position on a last axis, moved by `shift` and kept between 0 and 1."""
    if not np.any(shift):
        return rates
    moved: Array = np.clip(rates + np.asarray(shift)[..., None], 0.0, 1.0)
    return moved


def error_of_rates(rates: Array, deviation: Array, gamma: Any) -> Array:
    """Relative standard deviation of E(gamma) from that of log(−log rate) of the rates."""
    low, high = (
        expected_tokens_per_step(rates ** np.exp(-sigma * deviation), gamma)
        for sigma in (-1.0, 1.0)
    )
    return _half_range(low, high)


def with_shifts(
    own: Array, shifts: Sequence[Any], tokens: Callable[[Any], Array]
) -> Array:
    """Relative standard deviation of E(gamma), of one of its own and of one standard deviation of
    each shift; `tokens` gives E(gamma) under a shift."""
    variance: Array = own**2
    for shift in shifts:
        if not np.any(shift):
            continue
        variance = variance + _half_range(tokens(-shift), tokens(shift)) ** 2
    return np.sqrt(variance)


def _half_range(low: Array, high: Array) -> Array:
    """Half the relative difference of two values."""
    return (high - low) / (high + low)
