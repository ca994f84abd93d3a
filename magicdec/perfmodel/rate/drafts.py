"""The tokens that a sequence's steps emit, drawn once for all requests of a class.

A request accepts drafts at the rates of its class (how easy its text is) and of its context. Of each
class, context and gamma, NUM_STEPS steps are drawn, one in each NUM_STEPS-th part of the
distribution, so their mean is that of the probabilities; a request begins somewhere among them, and
the steps that it takes for its tokens are looked up. Steps of a request are at the rates of the
middle of what it has yet to emit, as `predict` has them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from magicdec.counts import Array, survival
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.drafting import draft_kv_tokens, draft_of
from magicdec.perfmodel.rate.costs import nodes
from magicdec.perfmodel.rate.requests import Whole
from magicdec.perfmodel.setup import Setup

NUM_CLASSES = 32
"""Kinds of requests by how easy their text is to draft."""
NUM_CONTEXTS = 9
NUM_STEPS = 4096
"""Far more than an answer takes: those of two requests are then nearly independent."""


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """The probability that a sequence accepts at least i drafts of a step, by gamma: [context,
    class, i]; its mean over classes is the profile's, so that tokens per step are those of
    `predict`.

    A row is a context and a class, an index a place in `emitted`.
    """

    contexts: Array
    survivors: dict[int, Array]
    drawn: dict[int, npt.NDArray[np.int32]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def of(
        cls,
        setup: Setup,
        profile: AcceptanceProfile,
        *,
        budget: int | None,
        gammas: Iterable[int],
        lengths: tuple[int, int],
    ) -> Drafts:
        """Requests differ by the profile's spread: each has one rate for all of its steps, of
        NUM_CLASSES.
        """
        contexts = nodes(lengths[0], lengths[1], NUM_CONTEXTS)
        read = draft_kv_tokens(setup, contexts, budget)
        seen = draft_of(setup).context_seen(contexts, budget)
        quantiles = (np.arange(NUM_CLASSES) + 0.5) / NUM_CLASSES
        shift = profile.spread * np.array(list(map(NormalDist().inv_cdf, quantiles)))
        survivors = {}
        for gamma in set(gammas) - {0}:
            rates = profile.conditional_rates(
                budget=read, context=seen, gamma_max=gamma
            )
            of_law = survival(rates)
            emitted, _ = profile.tokens_per_step(budget=read, context=seen, gamma=gamma)
            correction = (emitted - 1.0) / np.maximum(of_law.sum(axis=-1), 1e-12)
            wanted = of_law * correction[:, None]
            class_rates = np.clip(rates[:, None, :] + shift[:, None], 0.0, 1.0)
            of_classes = survival(class_rates)
            scale = wanted / np.maximum(of_classes.mean(axis=1), 1e-12)
            survivors[gamma] = np.minimum(of_classes * scale[:, None, :], 1.0)
        return cls(contexts=contexts, survivors=survivors)

    def rows(self, kinds: Whole, contexts: Any) -> Whole:
        """The rows of requests of these classes at these contexts."""
        place = self.contexts[:-1].searchsorted(contexts)
        rows: Whole = place * NUM_CLASSES + kinds
        return rows

    def emitted(self, gamma: int) -> npt.NDArray[np.int32]:
        """Tokens emitted up to each step, from row to row; the steps of a row come twice, so that
        NUM_STEPS follow each of its first half."""
        if gamma not in self.drawn:
            chances = self.survivors[gamma].reshape(-1, gamma)
            below = np.round(NUM_STEPS * chances)
            order = np.random.default_rng(0).permutation(NUM_STEPS)
            tokens = np.ones((len(chances), 2, NUM_STEPS), dtype=np.int32)
            for position in range(gamma):
                tokens += (order < below[:, position, None])[:, None]
            emitted = np.zeros(tokens.size + 1, dtype=np.int32)
            np.cumsum(tokens, out=emitted[1:])
            self.drawn[gamma] = emitted
        return self.drawn[gamma]

    def index(self, rows: Whole, begins: Whole) -> Whole:
        """Where requests begin among the steps of their rows."""
        return rows * (2 * NUM_STEPS) + begins

    def steps_of(self, gamma: int, index: Whole, tokens: Whole) -> Whole:
        """The fewest steps that emit so many tokens."""
        emitted = self.emitted(gamma)
        whole, left = np.divmod(tokens, self._around(emitted, index))
        # sought as whole numbers of the same size: others would copy all that are searched
        sought = (emitted[index] + left).astype(emitted.dtype)
        steps = emitted.searchsorted(sought) - index
        return np.asarray(whole * NUM_STEPS + steps)

    def tokens_of(self, gamma: int, index: Whole, steps: Whole) -> Whole:
        """The tokens that so many steps emit."""
        emitted = self.emitted(gamma)
        whole, left = np.divmod(steps, NUM_STEPS)
        tokens = emitted[index + left] - emitted[index]
        return np.asarray(whole * self._around(emitted, index) + tokens)

    def _around(self, emitted: npt.NDArray[np.int32], index: Whole) -> Whole:
        """Tokens of all steps of a row."""
        first = index // (2 * NUM_STEPS) * (2 * NUM_STEPS)
        return np.asarray(emitted[first + NUM_STEPS] - emitted[first])
