"""One thing to change in a server's command: what it says, what it gains, and whether it is named."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from magicdec.perfmodel.plan.request import Case, DraftOption
from magicdec.perfmodel.plan.search import same_on
from magicdec.schema.row import Candidate, Gain
from magicdec.specs.engine import EngineProfile
from magicdec.specs.serve_command import ServeCommand

NOTEWORTHY = 1.02
"""Gain below which a change is not worth a restart, and not named."""
LIKELY = 2.0 / 3.0
"""Probability to gain from which a change is named: no toss of a coin."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to change, and what it gains in tokens per second at the same load."""

    change: str
    """The setting to change, in a few words."""
    option: str
    """The option, as the engine calls it."""
    reason: str
    gain: float | None = None
    """Null: not priced."""
    gain_low: float | None = None
    gain_high: float | None = None
    """The 90 % interval."""
    chance: float | None = None
    """Probability that it gains; null: by the interval alone."""
    is_of_first_token: bool = False
    """Whether it gains time to the first token, not time per token."""
    is_alternative: bool = False
    """Whether it is another way to draft than the change before it, in whose place it can be made."""
    at_batch: int | None = None
    """Batch at which it gains, where that is not the load's."""
    kind: Literal["cost", "exactness", "gain"] = "gain"
    """A setting that costs time whatever is drafted, one that changes what is generated, or another
    way to serve."""
    needs_gpus: int | None = None
    """Devices that it takes, where the command uses fewer."""

    def gaining(self, gain: Gain) -> Change:
        """The change with its price."""
        return msgspec.structs.replace(
            self,
            gain=gain.speedup,
            gain_low=gain.low,
            gain_high=gain.high,
            chance=gain.pays,
        )

    @property
    def is_here(self) -> bool:
        """Whether it is of this load, on these devices."""
        return self.at_batch is None and self.needs_gpus is None

    @property
    def gain_text(self) -> str:
        """Its gain in words; not of one without a price."""
        of = " sooner to the first token" if self.is_of_first_token else ""
        if self.at_batch is not None:
            of += f" at batch {self.at_batch}"
        if self.needs_gpus is not None:
            of += f" on {self.needs_gpus} devices"
        return (
            f"{self.gain:.2f}x (90 %: {self.gain_low:.2f} to {self.gain_high:.2f}){of}"
        )

    @property
    def is_sure(self) -> bool:
        """Whether it gains a noteworthy part, whatever its uncertainty."""
        return self.gain_low is not None and self.gain_low > NOTEWORTHY

    @property
    def probability(self) -> float:
        """Probability that it gains."""
        if self.gain is None or self.gain_low is None or self.gain_high is None:
            return 0.0
        gain = Gain(
            speedup=self.gain, low=self.gain_low, high=self.gain_high, pays=self.chance
        )
        return gain.probability

    @property
    def is_advice(self) -> bool:
        """Whether it is worth a line: it loses exactness, surely costs an unknown time, or gains a
        noteworthy part rather than loses."""
        if self.gain is None:
            return self.kind != "gain"
        return self.gain >= NOTEWORTHY and self.probability >= LIKELY


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A server that runs: a row of a plan, and the case that gives it at other settings."""

    case: Case
    option: DraftOption | None
    """Its draft; None: it has none."""
    row: Candidate

    def row_as(self, engine: EngineProfile) -> Candidate | None:
        """The row's configuration on an engine that is set otherwise; None: it does not run."""
        return same_on(engine, self.case, self.option, self.row)


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """Another way to serve: the change that leads to it, and what is then known of it."""

    change: Change
    served: Served | None = None
    """The server that would then run, where it has another draft or none."""
    command: ServeCommand | None = None
    """The command with the change made, where all other changes are to be weighed on it."""


def advised(changes: Sequence[Change]) -> list[Change]:
    """The changes that are worth a line, in order, each once: of those that differ by a size the largest
    size, which does for the others."""
    by_words: dict[str, Change] = {}
    for change in changes:
        if change.is_advice:
            words = re.sub(r"\d+", "", f"{change.change} {change.option}")
            same = by_words.get(words, change)
            largest = max(same, change, key=_size)
            by_words[words] = msgspec.structs.replace(
                same, change=largest.change, option=largest.option
            )
    return in_order(list(by_words.values()))


def _size(change: Change) -> int:
    return max(map(int, re.findall(r"\d+", change.change)), default=0)


def in_order(changes: Sequence[Change]) -> list[Change]:
    """Changes by worth: those that restore exactness; those that surely gain, the most first; those
    that may gain, the most first; those without a price; then gains of the first token alone, and gains
    at another load or on other devices."""

    def place(change: Change) -> tuple[int, float]:
        gain = -(change.gain or 0.0)
        if change.kind == "exactness":
            return 0, gain
        if not change.is_here:
            return 5, gain
        if change.is_of_first_token:
            return 4, gain
        if change.gain is None:
            return 3, gain
        return 1 if change.is_sure else 2, gain

    return sorted(changes, key=place)
