"""Loads to fit an engine to, stated in advance: their cost in tokens and minutes, and which of them only judge the fit.

A load is `concurrency` requests sent at once, of one prompt length and one output length. While all of them decode, the
batch and the lengths are known: that window alone is timed, so that neither prefill nor queueing is in it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from magicdec.errors import ConfigError

MAX_CONCURRENCY = 1024
MAX_TOKENS = 50_000_000
PREFILL_TOKENS = 2048
"""Least tokens of a chunk of prefill in engines' defaults: meanwhile sequences whose prompt is in already decode."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """`is_judge`: kept out of the fit."""

    concurrency: int
    prompt_len: int
    output_len: int
    is_judge: bool = False

    @property
    def num_tokens(self) -> int:
        return self.concurrency * (self.prompt_len + self.output_len)

    def __str__(self) -> str:
        return f"{self.concurrency} x {self.prompt_len} + {self.output_len}"


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """Every load once per round, each round in an order of its own, so that a drifting machine favours none of them."""

    loads: tuple[Load, ...]
    rounds: int
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        return self.rounds * sum(load.num_tokens for load in self.loads)

    @property
    def num_requests(self) -> int:
        return self.rounds * sum(load.concurrency for load in self.loads)

    @property
    def order(self) -> list[Load]:
        generator = random.Random(self.seed)
        return [load for _ in range(self.rounds) for load in generator.sample(self.loads, len(self.loads))]


def plan_loads(
    *,
    concurrencies: Sequence[int],
    prompt_lens: Sequence[int],
    output_len: int,
    rounds: int,
    max_len: int,
    gamma: int = 0,
    seed: int = 0,
) -> LoadPlan:
    """All pairs of concurrency and prompt length; of a chequerboard over them one colour judges, the other is fitted.

    `output_len` is what a sequence decodes while all do; it generates more while the others' prompts are taken in, with
    drafts up to `gamma` + 1 tokens in a step.

    Raises ConfigError for loads that cannot be sent, and for too few to fit and to judge.
    """
    pairs = [
        (i, c, j, p) for i, c in enumerate(sorted(set(concurrencies))) for j, p in enumerate(sorted(set(prompt_lens)))
    ]

    def meanwhile(concurrency: int, prompt_len: int) -> int:
        return (gamma + 1) * (concurrency * prompt_len // PREFILL_TOKENS)

    for _, concurrency, _, prompt_len in pairs:
        if not 1 <= concurrency <= MAX_CONCURRENCY:
            raise ConfigError(f"concurrency must be between 1 and {MAX_CONCURRENCY}, not {concurrency}")
        longest = output_len + meanwhile(concurrency, prompt_len)
        if prompt_len < 1 or prompt_len + longest > max_len:
            raise ConfigError(
                f"a prompt of {prompt_len} and {longest} output tokens do not fit {max_len} tokens; "
                f"the longest prompt is {max(max_len - longest, 1)}"
            )
    if output_len < 8 or not 1 <= rounds <= 100:
        raise ConfigError("loads need at least 8 output tokens, and 1 to 100 rounds")
    loads = tuple(
        Load(concurrency=c, prompt_len=p, output_len=output_len + meanwhile(c, p), is_judge=(i + j) % 2 == 1)
        for i, c, j, p in pairs
    )
    check_enough(loads)
    plan = LoadPlan(loads=loads, rounds=rounds, seed=seed)
    if plan.num_tokens > MAX_TOKENS:
        raise ConfigError(f"the loads would send {plan.num_tokens} tokens, more than the {MAX_TOKENS} of a calibration")
    return plan


def check_enough(loads: Sequence[Load]) -> None:
    """Raises ConfigError for too few loads to fit four constants and to judge them."""
    if sum(not load.is_judge for load in loads) < 4 or not any(load.is_judge for load in loads):
        raise ConfigError(
            f"{len(loads)} loads are too few: with 3 concurrencies and 3 prompt lengths 5 are fitted and 4 judge"
        )
