"""The drain of a static batch against simulated batches."""

from __future__ import annotations

import numpy as np
import pytest

from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.acceptance.law import Law, static_batch_efficiency


def profile_with(spread: float, rate: float = 0.8) -> AcceptanceProfile:
    return AcceptanceProfile(model="m", draft_method="streamingllm", law=Law(rejection=1 - rate), spread=spread)


def simulated_efficiency(
    rate: float, spread: float, *, gamma: int, batch_size: int, gen_len: int, repeats: int
) -> float:
    rng = np.random.default_rng(11)
    slowest = []
    for _ in range(repeats):
        own = np.full(batch_size, rate)
        if spread:
            total = rate * (1 - rate) / spread**2 - 1
            own = rng.beta(rate * total, (1 - rate) * total, batch_size)
        tokens = 1 + np.cumprod(rng.random((batch_size, gen_len, gamma)) < own[:, None, None], axis=2).sum(axis=2)
        slowest.append((np.cumsum(tokens, axis=1) < gen_len).sum(axis=1).max() + 1)
    return gen_len / (sum(rate**i for i in range(gamma + 1)) * float(np.mean(slowest)))


@pytest.mark.parametrize(("spread", "batch_size"), [(0.0, 32), (0.03, 32), (0.05, 64), (0.1, 16)])
def test_the_drain_matches_simulated_batches(spread: float, batch_size: int) -> None:
    """Within 3 %: a sequence's steps are only nearly normal; the simulation's own error is below 0.5 %."""
    simulated = simulated_efficiency(0.8, spread, gamma=4, batch_size=batch_size, gen_len=128, repeats=200)
    predicted = static_batch_efficiency(
        profile_with(spread), budget=512, context=8192, gamma=4, batch_size=batch_size, gen_len=128
    )
    assert predicted == pytest.approx(simulated, rel=0.03)


def test_the_drain_grows_with_the_batch_and_the_spread_and_shrinks_with_length() -> None:
    def at(spread: float, batch_size: int, gen_len: int) -> float:
        return static_batch_efficiency(
            profile_with(spread), budget=512, context=8192, gamma=3, batch_size=batch_size, gen_len=gen_len
        )

    assert at(0.0, 8, 128) > at(0.0, 64, 128) > at(0.05, 64, 128) > at(0.1, 64, 128)
    assert at(0.0, 32, 64) < at(0.0, 32, 1024) < at(0.0, 32, 50_000) <= 1.0


def test_nothing_is_lost_where_all_sequences_take_the_same_steps_and_an_empty_batch_is_refused() -> None:
    at = {"budget": 512, "context": 8192, "gamma": 3}
    for rate in (0.0, 1.0):
        assert static_batch_efficiency(profile_with(0.0, rate), **at, batch_size=64, gen_len=400) == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="batch size"):
        static_batch_efficiency(profile_with(0.0), **at, batch_size=0, gen_len=4)
