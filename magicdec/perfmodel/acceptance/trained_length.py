"""How far a head falls beyond the length of the texts that it was trained on.

    lost = f · (1 − exp(−max(log2(S / T), 0)))        S: tokens that it attends to, T: its trained length
    logit = (1 − lost) · logit within T + lost · dead

Whatever the text, the head and the position in the block, rates near one level: texts that differ by half
a token per step at T differ by a tenth at 4·T.
f is 1 for a head whose rotary base is small: its positions turn fast, and those beyond T look like none
that it has seen. With its target's base of half a million and more it loses a part.

A configuration's `max_position_embeddings` bounds T and does not tell it: T is its makers' recipe's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

LOSING_KINDS = ("eagle", "eagle2", "hass", "eagle3", "p-eagle")
"""Kinds of draft that attend to the context by features of their own. Blocks, which read the target's, lose no more
than prediction modules do."""

USUAL_LENGTH = 4096.0
"""T where a published rate's head does not say it: the middle of the recipes' 2048 to 8192."""

SMALL_BASE = 10_000.0
"""Largest of the small rotary bases: Llama's default, where a configuration names none."""

LOST_WITH_LARGE_BASE = 0.55
"""f of the others: EAGLE-1 for Llama-3.1-8B, base 500,000, from 2k to 16k on GovReport
(https://github.com/jycha98/SpecExtend_Reb, results/EAGLE1)."""

LOST_UNKNOWN = (1.0 + LOST_WITH_LARGE_BASE) / 2.0
"""f where nobody says the base."""


DEAD_LOGIT = -2.43
"""Logit of a chain's rates far beyond T, 1.09 tokens per step: EAGLE-3 for Qwen3-8B from 16k on
(https://github.com/vllm-project/speculators/pull/684), and that for Llama-3.1-8B at 7.4k."""

DEAD_TREE_LOGIT = -0.8
"""That of trees, of whose many branches one may be right: EAGLE-3 for Llama-3.1-8B at 16k and 32k
(https://github.com/jycha98/SpecExtend_Reb, results/EAGLE3)."""


class Trained(NamedTuple):
    """How a head was trained; None: not known."""

    length: float | None = None
    rotary_base: float | None = None

    def lost(self, seen: float) -> float:
        """Share of what it knows of a text that is lost where it attends to so many tokens."""
        length = self.length or USUAL_LENGTH
        octaves = math.log2(max(seen, length) / length)
        return self._most_lost * (1.0 - math.exp(-octaves))

    @property
    def _most_lost(self) -> float:
        if self.rotary_base is None:
            return LOST_UNKNOWN
        if self.rotary_base <= SMALL_BASE:
            return 1.0
        return LOST_WITH_LARGE_BASE

    @property
    def possible(self) -> tuple[Trained, ...]:
        """Readings that are as likely each: itself where its length is known, else trained by the shortest
        and the longest of the usual recipes."""
        if self.length is not None:
            return (self,)
        if self.rotary_base is None:
            return (SHORTEST, LONGEST)
        return (
            SHORTEST._replace(rotary_base=self.rotary_base),
            LONGEST._replace(rotary_base=self.rotary_base),
        )

    @property
    def shortest(self) -> float:
        """The shortest that its length may be."""
        return min(each.length or USUAL_LENGTH for each in self.possible)


SHORTEST = Trained(2048.0, 10_000.0)
"""EAGLE's own recipe (https://github.com/SafeAILab/EAGLE, eagle/traineagle3)."""

LONGEST = Trained(8192.0, 1_000_000.0)
"""The speculators library's (https://github.com/vllm-project/speculators, docs/cli/train.md), with the base of
a target."""
