"""Tokens per step that are not known: how they are distributed around their middle, and their mean.

A step makes between 1 and gamma + 1 tokens, so the share of gamma drafts that is accepted is taken as
normal on the logit. Its middle and its error at the middle are a profile's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from magicdec.counts import Array

LEAST_SHARE = 1e-4
"""Nearest to 0 and 1 that the accepted share of drafts is taken to lie, where it has an error."""
MOST_LOGIT_ERROR = 3.0
"""Most of one standard deviation of the accepted share's logit: the share may be anything then."""
# numpy.polynomial.hermite_e.hermegauss(7), which takes a hundredth of a second to load
FAR = (3.7504397177257425, 2.366759410734541, 1.1544053947399682)
FAR_WEIGHTS = (0.0013743062164795505, 0.07709667658348317, 0.6018995488855944)
NODES = np.array([*(-node for node in FAR), 0.0, *FAR[::-1]])
WEIGHTS = np.array([*FAR_WEIGHTS, 1.145887211259886, *FAR_WEIGHTS[::-1]])
"""Standard deviations and weights with which a mean over a normal variable is taken."""


def tokens_at(sigmas: Any, middle: Any, gamma: Any, relative_error: Any) -> Array:
    """Tokens per step this many standard deviations above their middle, where `relative_error` is
    one of their relative deviation at it; the three last and `sigmas` broadcast."""
    middle = np.asarray(middle, dtype=np.float64)
    error = np.asarray(relative_error, dtype=np.float64)
    most = np.maximum(np.asarray(gamma, dtype=np.float64), 1.0)
    share = np.clip((middle - 1.0) / most, LEAST_SHARE, 1.0 - LEAST_SHARE)
    growth = share * (1.0 - share) * most / middle
    deviation = np.minimum(error / growth, MOST_LOGIT_ERROR)
    odds = share / (1.0 - share) * np.exp(sigmas * deviation)
    is_sure = (error <= 0.0) | (np.asarray(gamma) <= 0)
    return np.asarray(np.where(is_sure, middle, 1.0 + most * odds / (1.0 + odds)))


def mean_tokens(middle: Any, gamma: Any, relative_error: Any) -> Array:
    """The harmonic mean of tokens per step that have this middle and relative error.

    Users wait for tokens and pay for devices' time, so what is expected is the time per token,
    step · E[1 / tokens]. The arithmetic mean would prefer the draft whose acceptance is known least.
    """
    steps: Array = np.zeros(())
    for sigmas, weight in zip(NODES, WEIGHTS / WEIGHTS.sum(), strict=True):
        steps = steps + weight / tokens_at(sigmas, middle, gamma, relative_error)
    return 1.0 / steps
