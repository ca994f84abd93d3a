"""Acceptance that is believed: nobody measured this draft on this text (assumed.py makes them)."""

from __future__ import annotations

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
