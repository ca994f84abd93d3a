"""A look-up as replayed on logged requests: tokens per step, drafts and their spread for every
setting.

A step without a draft verifies one token, so a batch verifies the sum of drafted + 1 over its
sequences. The profile therefore holds the drafted tokens per step, over all steps, next to the
tokens per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.acceptance.measured import CountedProfile, MeasuredProfile
from magicdec.perfmodel.acceptance.profile import (
    AcceptanceProfile,
    by_position,
    deepest_of,
    law_of_rates,
    shifted,
    with_shifts,
)


class LookupSetting(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """One shortest and longest n-gram, at each gamma that was replayed."""

    min_ngram: int = 0
    """Shortest n-gram that is looked up (`prompt_lookup_min`); 0 for suffix decoding."""
    max_ngram: int = 0
    """Longest n-gram that is looked up (`prompt_lookup_max`); 0 for suffix decoding."""
    gammas: list[int]
    tokens_per_step: list[float]
    """Emitted tokens per step of decoding, drafted or not, by gamma."""
    tokens_stderr: list[float]
    """Their standard errors, clustered by request."""
    drafted_share: list[float]
    """Share of the steps that have a draft, by gamma."""
    drafted_per_step: list[float]
    """Mean drafted tokens of all steps, by gamma."""
    rates: list[float]
    """P(position i accepted | all before accepted) of all steps, at `rates_gamma`."""
    stderr: list[float]
    """Their standard errors, clustered by request."""
    trials: list[int]
    rates_gamma: int
    """Gamma of the rates: a deeper one takes long runs in fewer steps, so its first rate is
    lower."""

    def __post_init__(self) -> None:
        by_gamma = (
            "tokens_per_step",
            "tokens_stderr",
            "drafted_share",
            "drafted_per_step",
        )
        for name in by_gamma:
            if len(getattr(self, name)) != len(self.gammas) or not self.gammas:
                raise ValueError(
                    f"'{name}' needs one value for each of the {len(self.gammas)} gammas"
                )
        if not len(self.rates) == len(self.stderr) == len(self.trials):
            raise ValueError("'rates', 'stderr' and 'trials' must have equal lengths")

    def tokens_at(self, gamma: Any) -> Array:
        """Return the tokens per step at these gammas; between replayed ones linear."""
        return self._at(gamma, self.tokens_per_step, at_zero=1.0)

    def error_at(self, gamma: Any) -> Array:
        """Return the relative standard error of the tokens per step."""
        return self._at(gamma, self.tokens_stderr, at_zero=0.0) / self.tokens_at(gamma)

    def drafted_share_at(self, gamma: Any) -> Array:
        """Return the share of the steps that have a draft."""
        return self._at(gamma, self.drafted_share, at_zero=self.drafted_share[0])

    def drafted_at(self, gamma: Any) -> Array:
        """Return the mean drafted tokens of all steps."""
        return self._at(gamma, self.drafted_per_step, at_zero=0.0)

    def _at(self, gamma: Any, values: list[float], *, at_zero: float) -> Array:
        return np.asarray(
            np.interp(
                np.asarray(gamma, dtype=np.float64),
                [0, *self.gammas],
                [at_zero, *values],
            )
        )


class RangeOfSteps(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Steps of one range of context, or of place in the output, at the setting and gamma chosen."""

    upto: int | None
    """Last token of the range. None: no end."""
    steps: int
    tokens_per_step: float
    drafted_share: float


class Replay(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replay of logged requests."""

    rule: str
    """Rule of the look-up: magicdec.logs.lookups lists them."""
    requests: int
    prompt_tokens: int
    output_tokens: int
    steps: int
    """Steps at the setting and gamma chosen."""
    gamma: int
    """Gamma of the ranges below and of `drafted_share`."""
    chosen: int
    """Place in `settings` of the one that the profile's law describes."""
    settings: list[LookupSetting]
    by_context: list[RangeOfSteps] = []
    by_output: list[RangeOfSteps] = []
    """By the number of tokens emitted before."""
    requests_for_5_percent: int | None = None
    """Requests after which the tokens per step are known to ± 5 % (95 %), as these spread."""
    not_determined: int = 0
    """Drafted tokens beyond the ends of the logs, of which the engine may have accepted some: they
    are not counted."""
    without_prompt: int = 0
    """Requests whose log lacks the prompt: what would be found in it is missed."""

    def __post_init__(self) -> None:
        if not 0 <= self.chosen < len(self.settings):
            raise ValueError(
                f"'chosen' must be below {len(self.settings)}, not {self.chosen}"
            )

    @property
    def setting(self) -> LookupSetting:
        return self.settings[self.chosen]

    @property
    def leading(self) -> list[int]:
        """Places of the settings that a plan compares: no other has more tokens per step with no
        more drafted tokens at the gamma of the ranges.
        """
        tokens = np.array(
            [float(setting.tokens_at(self.gamma)) for setting in self.settings]
        )
        drafted = np.array(
            [float(setting.drafted_at(self.gamma)) for setting in self.settings]
        )
        places = []
        for place in range(len(self.settings)):
            is_better = (tokens >= tokens[place]) & (drafted <= drafted[place])
            is_other = (tokens > tokens[place]) | (drafted < drafted[place])
            if place == self.chosen or not np.any(is_better & is_other):
                places.append(place)
        return places


class ReplayedProfile(CountedProfile, frozen=True, kw_only=True):
    """A look-up, or a draft model, replayed from logged requests: what each gamma gave is known.

    Its law is that of the chosen setting, by which rates of other sequences are told.
    """

    replay: Replay
    """All settings that were replayed."""

    def tokens_per_step(
        self,
        *,
        budget: Any,
        context: Any,
        gamma: Any,
        shift: Any = 0.0,
    ) -> tuple[Array, Array]:
        """Tokens per step as replayed at each gamma; a shift moves their gain as it moves the
        law's."""
        gamma = np.asarray(gamma, dtype=np.int64)
        rates = self.law.conditional_rates(
            budget=budget, context=context, gamma_max=deepest_of(gamma)
        )
        of_law, _ = by_position(rates, gamma)
        moved, everything = by_position(shifted(rates, shift), gamma)
        gain = (moved - 1.0) / np.maximum(of_law - 1.0, 1e-12)
        return 1.0 + (self.replay.setting.tokens_at(gamma) - 1.0) * gain, everything

    def tokens_error(
        self,
        *,
        budget: Any,
        context: Any,
        gamma: Any,
        shifts: Sequence[Any] = (),
    ) -> Array:
        """The standard errors of the replayed tokens per step, clustered by request."""
        at: dict[str, Any] = {"budget": budget, "context": context, "gamma": gamma}
        return with_shifts(
            self.replay.setting.error_at(gamma),
            shifts,
            lambda shift: self.tokens_per_step(**at, shift=shift)[0],
        )

    @property
    def is_partly_drafted(self) -> bool:
        return True

    def drafted_share_at(self, gamma: Any) -> Array:
        return self.replay.setting.drafted_share_at(gamma)

    def draft_len_at(self, gamma: Any) -> Array:
        depth: Array = np.asarray(gamma, dtype=np.float64)
        share = np.maximum(self.drafted_share_at(gamma), 1e-9)
        lengths: Array = np.minimum(
            self.replay.setting.drafted_at(gamma) / share, depth
        )
        return lengths

    @property
    def settings(self) -> Sequence[ReplayedProfile]:
        return [self.with_setting(place) for place in self.replay.leading]

    @property
    def lookup_lengths(self) -> tuple[int | None, int | None]:
        setting = self.replay.setting
        if not setting.max_ngram:
            return None, None
        return setting.min_ngram, setting.max_ngram

    def with_setting(self, chosen: int) -> ReplayedProfile:
        """Return the profile of another of its replayed settings, whose counts by context it does
        not hold.
        """
        if chosen == self.replay.chosen:
            return self
        replay = msgspec.structs.replace(
            self.replay, chosen=chosen, by_context=[], by_output=[]
        )
        setting = replay.setting
        return msgspec.structs.replace(
            self,
            law=law_of_rates(setting.rates),
            drafted_share=float(setting.drafted_share_at(setting.rates_gamma)),
            num_trials=sum(setting.trials),
            measured=[],
            replay=replay,
        )

    def at_rate(
        self, rate: float, *, budget: float, context: float
    ) -> AcceptanceProfile:
        """The law at another rate, which nothing was replayed at."""
        fields = msgspec.structs.asdict(self)
        del fields["replay"]
        of_law = MeasuredProfile(**fields)
        return of_law.at_rate(rate, budget=budget, context=context)
