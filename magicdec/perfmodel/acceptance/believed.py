"""Acceptance that is believed: nobody measured this draft on this text (assumed.py makes them)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.acceptance.profile import AcceptanceProfile
from magicdec.perfmodel.acceptance.uncertain import mean_tokens
from magicdec.specs import LOOKUP_METHODS

LOOKUP_PRECISION = 0.5
"""Share of the tokens that a look-up drafts which are accepted, where nobody counted it: 0.2 to 0.9
in replays of logged requests."""


class BelievedProfile(AcceptanceProfile, frozen=True, kw_only=True):
    """A mean by position and how wide it is, for a text, a run and a harness not seen so far."""

    is_assumed: ClassVar[bool] = True

    def mean_tokens(
        self, middle: Array, *, budget: Any, context: Any, gamma: Any
    ) -> Array:
        """The mean over what the acceptance may be, which is not its middle where it is wide."""
        error = self.tokens_error(budget=budget, context=context, gamma=gamma)
        return mean_tokens(middle, gamma, error)

    @property
    def is_partly_drafted(self) -> bool:
        return True

    def drafted_share_at(self, gamma: Any) -> Array:
        """The share of steps with a draft that makes a look-up's usual share of right tokens."""
        if self.draft_method not in LOOKUP_METHODS:
            return super().drafted_share_at(gamma)
        depth = np.maximum(np.asarray(gamma, dtype=np.int64), 1)
        at: dict[str, Any] = {"budget": None, "context": 1.0, "gamma": depth}
        middle, _ = self.tokens_per_step(**at)
        drafted = (self.mean_tokens(middle, **at) - 1.0) / LOOKUP_PRECISION
        return np.asarray(np.minimum(drafted / depth, 1.0))


@dataclass(frozen=True)
class BeliefByText:
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

    def tokens_per_step(self, **where: Any) -> tuple[Array, Array]:
        middles = []
        everything = []
        for place, profile in enumerate(self.profiles):
            middle, full = profile.tokens_per_step(**_on_text(place, where))
            middle, full = np.broadcast_arrays(middle, full)
            middles.append(middle)
            everything.append(full)
        return np.stack(middles), np.stack(everything)

    def mean_tokens(self, middle: Array, **where: Any) -> Array:
        return mean_tokens(middle, where["gamma"], self.tokens_error(**where))

    def tokens_error(self, *, shifts: Sequence[Any] = (), **where: Any) -> Array:
        errors = []
        for place, profile in enumerate(self.profiles):
            here = _on_text(place, where)
            errors.append(profile.tokens_error(shifts=shifts, **here))
        return np.stack(errors)

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
