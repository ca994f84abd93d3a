"""What a decoding run is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from magicdec.runtime.adaptive import GammaPolicy


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
