"""The terminal view that stays: the last window's observation and advice, and the trend of what moved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from magicdec.live.http import Address
from magicdec.live.metrics import Scrape
from magicdec.live.observation import Observation
from magicdec.live.metrics import MAX_WINDOW_S, scrapes

BARS = "▁▂▃▄▅▆▇█"
TREND_WIDTH = 60


def windows(
    address: Address, *, seconds: float, interval_s: float, sleep: Callable[[float], None] = time.sleep
) -> Iterator[list[Scrape]]:
    """After each scrape from the second on, those of the last `seconds`; for a day at most."""
    taken: list[Scrape] = []
    for scrape in scrapes(address, seconds=MAX_WINDOW_S, interval_s=interval_s, sleep=sleep):
        taken.append(scrape)
        oldest = (scrape.time_s or 0.0) - seconds
        taken = [each for each in taken if (each.time_s or 0.0) >= oldest]
        if len(taken) > 1:
            yield taken


def trend_lines(history: Sequence[Observation]) -> list[str]:
    """The latest interval of each observation, as bars between the least and the greatest."""
    latest = [each.segments[-1] for each in history[-TREND_WIDTH:]]
    series = (
        ("batch", [each.load.running for each in history[-TREND_WIDTH:]], "{:.1f}"),
        ("tokens/step", [each.tokens_per_step for each in latest], "{:.2f}"),
        ("ms per token", [each.tpot_s and each.tpot_s * 1e3 for each in latest], "{:.1f}"),
    )
    lines = []
    for name, values, form in series:
        known = [value for value in values if value is not None]
        if len(known) > 1:
            low, high = min(known), max(known)
            lines.append(f"  {name:<12} {bars(values)} {form.format(low)} to {form.format(high)}")
    return lines


def bars(values: Sequence[float | None]) -> str:
    """One character for each value; a space where it is not known."""
    known = [value for value in values if value is not None]
    low, width = min(known), (max(known) - min(known)) or 1.0
    return "".join(
        " " if value is None else BARS[min(int((value - low) / width * len(BARS)), len(BARS) - 1)] for value in values
    )
