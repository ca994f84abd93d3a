"""A decoding run: what it is asked for, and the tokens, acceptance and times that it gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from magicdec.counts import Counts
from magicdec.runtime.adaptive import GammaPolicy

INACTIVE = -1


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """How far to decode, and what to measure.

    max_new_tokens: for all sequences, or for each. simulate_acceptance: conditional acceptance rates by position that
    replace the verdict (the last one holds for all further positions). stop_when_first_ends: end with the first
    sequence, so that the whole run is steady state. on_step: hears, after each step, (sequence ids, their newly
    emitted tokens). queue: prompts that take the place of sequences that end, numbered on from the batch's;
    max_new_tokens and the result's tokens cover them too. policy: chooses each step's gamma, `gamma` at most.
    cuda_graphs: capture steps where the device can.
    """

    gamma: int = 0
    max_new_tokens: int | Sequence[int]
    eos_token_ids: tuple[int, ...] = ()
    fences: bool = False
    simulate_acceptance: Sequence[float] | None = None
    stop_when_first_ends: bool = False
    max_steps: int | None = None
    on_step: Callable[[np.ndarray, list[list[int]]], None] | None = None
    queue: Sequence[Sequence[int]] = ()
    policy: GammaPolicy | None = None
    cuda_graphs: bool = True


@dataclass(frozen=True, kw_only=True)
class DecodeResult:
    """The decoded tokens, and the time they took. Steady state ends with the step in which a slot first stays
    empty: the first sequence ends with no queued prompt to follow it."""

    tokens: list[list[int]]
    num_accepted: np.ndarray
    """Drafted tokens accepted, [steps, sequences]; -1 where the sequence had ended, or was still queued."""
    gamma: int
    gammas: np.ndarray
    """Drafted tokens of each step: `gamma`, unless a policy chose fewer."""
    setup_s: float
    """Building the draft's state, before decoding."""
    elapsed_s: float
    step_s: np.ndarray
    """Wall-clock of each step."""
    steady_steps: int
    steady_elapsed_s: float
    steady_tokens: int
    refill_s: float = 0.0
    """Prefilling queued prompts, and building their drafts' state: contained in the times above."""
    phases: dict[str, list[float]] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        return len(self.num_accepted)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def steady_decode_s(self) -> float:
        """Time of the steady state without the refilling, all of which lies in it."""
        return self.steady_elapsed_s - self.refill_s

    @property
    def steady_tokens_per_s(self) -> float:
        return self.steady_tokens / self.steady_decode_s if self.steady_elapsed_s else 0.0

    @property
    def steady_step_s(self) -> float:
        return self.steady_decode_s / self.steady_steps

    @property
    def phases_s(self) -> dict[str, float]:
        """Mean seconds of each phase over the steady state's steps but the first; empty without fences."""
        steady = {name: times[: self.steady_steps][1:] or times for name, times in self.phases.items()}
        return {name: fmean(times) for name, times in steady.items() if times}

    @property
    def refilled_tokens_per_s(self) -> float:
        """Throughput of the full batch, prefilling queued prompts included."""
        return self.steady_tokens / self.steady_elapsed_s if self.steady_elapsed_s else 0.0

    @property
    def counts(self) -> Counts:
        """Drafts tried and accepted by each sequence; a policy may have drafted fewer than `gamma` in a step."""
        return Counts.of_steps(self.num_accepted, self.gammas, self.gamma)
