"""Predicts pairs of servers as a plan does: seconds per token without and with the draft, and the
speedup with its interval. The median time between tokens (`tpot_p50_ms`) belongs to the median request,
whose text is easier than the mean step's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from magicdec.counts import Z_90, Array, constant_rate, expected_tokens_per_step
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.acceptance.law import sequence_rates
from magicdec.perfmodel.intervals import engine_error, interval, tokens_error
from magicdec.perfmodel.serving import Cycle, largest_active, whole_requests
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import predict
from magicdec.specs.speculation import AUTOREGRESSIVE
from magicdec.units import INTERVAL_ENDS
from magicdec.validate.pairs import PairRow
from magicdec.validate.rows import columns, places

REQUEST_SPREAD = 0.134
"""Standard deviation of the acceptance rate between the requests of a mixed load: the one number
with which medians and means of 30 loads (gamma 1 to 7, 1 to 256 users) agree."""


@dataclass(frozen=True)
class StatedTokens:
    """An acceptance law that gives each of several configurations its stated tokens per step, with
    one rate for all positions. A figure below one token cannot be a mean length, so it is read as
    the rate."""

    tokens: Array
    gamma: Array
    drafted_share: Any = 1.0
    """Share of steps with a draft; the others verify one token."""
    draft_len: Any = None
    """Mean drafted tokens of the steps with a draft; None: gamma."""

    @property
    def is_partly_drafted(self) -> bool:
        return bool(np.any(np.asarray(self.drafted_share) < 1.0))

    @cached_property
    def rates(self) -> Array:
        return np.where(
            self.tokens < 1.0, self.tokens, constant_rate(self.tokens, self.gamma)
        )

    def drafted_share_at(self, gamma: Any) -> Array:
        return np.asarray(self.drafted_share, dtype=np.float64)

    def draft_len_at(self, gamma: Any) -> Array:
        length = self.draft_len
        if length is None:
            length = gamma
        return np.asarray(length, dtype=np.float64)

    def tokens_per_step(
        self, *, budget: Any, context: Any, gamma: Any
    ) -> tuple[Array, Array]:
        """The stated tokens, and the probability that all drafts are accepted."""
        expected = expected_tokens_per_step(
            np.repeat(self.rates[:, None], int(self.gamma.max()), axis=1), self.gamma
        )
        return expected, self.rates**self.gamma


class Predicted(NamedTuple):
    """Seconds per token of several pairs, as in `PairRow.measured`, the ends of the speedup's 90 %
    interval, and the probability that it is above 1."""

    baseline_s: Array
    speculative_s: Array
    low: Array
    high: Array
    chance: Array

    @property
    def speedup(self) -> Array:
        return self.baseline_s / self.speculative_s

    @property
    def log_deviation(self) -> Array:
        """Standard deviation of the speedup's logarithm, by its interval."""
        return np.asarray(np.log(self.high / self.low) / (2.0 * Z_90))

    def is_inside(self, pairs: Sequence[PairRow]) -> Array:
        """Whether each pair's measured speedup lies in its interval."""
        measured = np.array([pair.speedup for pair in pairs])
        return np.asarray((self.low <= measured) & (measured <= self.high))


def predict_pairs(
    pairs: Sequence[PairRow], tokens: Sequence[float | None]
) -> Predicted:
    """Predictions at these tokens per step; NaN for pairs without any."""
    predicted = np.full((len(Predicted._fields), len(pairs)), np.nan)
    keys = []
    for pair, stated in zip(pairs, tokens, strict=True):
        keys.append([] if stated is None else [pair.alike])
    for indices in places(keys).values():
        rows = [pairs[index] for index in indices]
        law = stated_tokens(rows, [tokens[index] for index in indices])
        setup = rows[0].setup
        predicted[:, indices] = predict_alike(
            setup, rows, law, width=engine_error(setup)
        )
    return Predicted(*predicted)


def stated_tokens(
    rows: Sequence[PairRow], tokens: Sequence[float | None]
) -> StatedTokens:
    """The law of rows of one setup that have these tokens per step."""
    return StatedTokens(
        np.array(tokens, np.float64),
        np.array([row.num_drafted for row in rows]),
        np.array([row.share for row in rows]),
        draft_len=np.array([row.draft_len for row in rows]),
    )


def without_draft(setup: Setup) -> Setup:
    """The server of this setup, with no draft."""
    return dataclasses.replace(
        setup,
        speculation=AUTOREGRESSIVE,
        draft_model=None,
        draft_precision=None,
    )


def predict_alike(
    setup: Setup,
    rows: Sequence[PairRow],
    law: AcceptanceProfile | StatedTokens,
    *,
    width: Any,
) -> Array:
    """[figures of `Predicted`, rows] of rows of one setup, whose engine's error is `width`. Where the
    version is not known, the interval spans those that the rows may mean."""
    likeliest, *others = rows[0].possible_engines
    if others:
        logs = []
        for engine in (likeliest, *others):
            of_version = dataclasses.replace(setup, engine=engine)
            predicted = Predicted(*_predict_version(of_version, rows, law, width=width))
            logs.append(np.log(predicted.speedup))
        apart = np.abs(np.array(logs) - logs[0]).max(axis=0)
        width = np.hypot(width, apart / Z_90)
    return _predict_version(setup, rows, law, width=width)


def _predict_version(
    setup: Setup,
    rows: Sequence[PairRow],
    law: AcceptanceProfile | StatedTokens,
    *,
    width: Any,
) -> Array:
    """As `predict_alike`, by the version of the setup's engine."""
    names = ("users", "prompt_len", "output_len", "tp", "budget")
    users, prompt_len, output_len, tp, budgets = columns(rows, *names)
    gamma = np.array([row.num_drafted for row in rows])
    spec = setup.speculation
    alone = without_draft(setup)

    def at(which: Setup, gamma: Any, budget: Any) -> Points:
        most = largest_active(
            which,
            prompt_len=prompt_len,
            output_len=output_len,
            tp_size=tp,
            budget=budget,
            gamma=gamma,
        )
        if rows[0].is_decoding:
            batch = users
        else:
            batch = np.minimum(users, most)
        return Points(
            batch=batch,
            context=prompt_len,
            tp=tp,
            gamma=gamma,
            budget=budget,
            gen_len=output_len,
        )

    before = predict(alone, None, at(alone, np.zeros_like(gamma), None))
    budget = None
    if spec.draft_budget is not None:
        budget = budgets
    after = predict(setup, law, at(setup, gamma, budget))
    profile = None
    if not isinstance(law, StatedTokens):
        profile = law
    elif spec.tree is not None:
        # a tree's tokens, which no chain's rates give
        after = msgspec.structs.replace(after, expected_tokens_per_step=law.tokens)
    gains = interval(after, tokens_error(after, profile)).gains
    # errors of the median request's tokens, beside those of the costs
    of_request = np.zeros(len(rows))
    if rows[0].is_decoding:
        baseline_s = before.full(1.0 / before.tokens_per_s)
        speculative_s = after.full(1.0 / after.tokens_per_s)
    else:
        requests = whole_requests(after, output_len=output_len)
        alone_requests = whole_requests(before, output_len=output_len)
        is_rate = np.array([row.is_rate for row in rows])

        def seconds_per_token(cycle: Cycle) -> Array:
            of_server_s = cycle.in_slot_s / (cycle.active * output_len)
            return np.where(is_rate, of_server_s, cycle.tpot_s)

        baseline_s = seconds_per_token(alone_requests.alone)
        speculative_s = seconds_per_token(requests.drafted)
        is_median = np.array([row.unit.startswith("tpot_p50") for row in rows])
        if is_median.any():
            tokens_expected = after.full(after.expected_tokens_per_step)
            factors = np.where(is_median, median_request(tokens_expected, gamma), 1.0)
            speculative_s = speculative_s / factors
            of_request = np.log(factors)
        whole = requests.gains(gains)
        gains = msgspec.structs.replace(
            gains,
            speedups=np.where(is_rate, whole.speedups, gains.speedups),
            deviations=np.where(is_rate, whole.deviations, gains.deviations),
        )
    others = np.maximum(gains.deviations**2 - engine_error(setup) ** 2, 0.0)
    # a server without a draft may hold more requests at once than one with: pairs are not plans' rows
    gains = msgspec.structs.replace(
        gains, deviations=np.sqrt(others + width**2 + of_request**2)
    ).around(baseline_s / speculative_s)
    low, high = gains.quantiles(INTERVAL_ENDS)
    return np.array(
        np.broadcast_arrays(baseline_s, speculative_s, low, high, gains.above())
    )


def median_request(tokens: Array, gamma: Array) -> Array:
    """Tokens per step of the median request over those of all steps, where the rates of requests
    differ by `REQUEST_SPREAD`: slow requests take more of the steps than of the requests. How much
    a load's rates differ is not stated (requests of one kind hardly do), so this factor is as
    uncertain as it is large."""
    factors = []
    for expected, deepest in zip(tokens, gamma, strict=True):
        factors.append(_median_factor(float(expected), int(deepest)))
    return np.array(factors)


@lru_cache(maxsize=1024)
def _median_factor(expected: float, gamma: int) -> float:
    """Solves for the mean rate at which all requests together make `expected` tokens per step."""
    from scipy.optimize import brentq

    def of_requests(mean: float) -> tuple[Array, Array, float]:
        """Tokens per step of the requests, their weights, and steps per token of all."""
        rates, weights = sequence_rates(mean, REQUEST_SPREAD)
        by_position = np.repeat(rates[:, None], gamma, axis=1)
        tokens = expected_tokens_per_step(by_position, gamma)
        return tokens, weights, float(weights @ (1.0 / tokens))

    within = float(np.clip(expected, 1.01, gamma + 0.99))

    def excess(mean: float) -> float:
        _, _, steps_per_token = of_requests(mean)
        return 1.0 / steps_per_token - within

    mean = brentq(excess, 1e-3, 1.0 - 1e-3)
    tokens, weights, steps_per_token = of_requests(float(mean))
    middle = np.searchsorted(np.cumsum(weights), 0.5)
    return float(tokens[middle]) * steps_per_token
