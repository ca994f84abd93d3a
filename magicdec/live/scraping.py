"""Scrapes over time: of a live address at an interval, or the two that were saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from magicdec.errors import ConfigError
from magicdec.live.http import Address, parse_address
from magicdec.live.metrics import Scrape, read_address, read_dump

MIN_INTERVAL_S = 0.2
MAX_WINDOW_S = 24 * 3600.0
Source = Address | tuple[Path, Path]


def parse_source(arguments: Sequence[str]) -> Source:
    """One address, or two files in the order in which they were saved. Raises ConfigError."""
    if len(arguments) == 1 and not Path(arguments[0]).is_file():
        return parse_address(arguments[0])
    if len(arguments) == 2 and not any("://" in each for each in arguments):
        return Path(arguments[0]), Path(arguments[1])
    raise ConfigError("observe takes one address, or two saved scrapes (the earlier one first): counters need two")


def scrapes(
    source: Source,
    *,
    seconds: float,
    interval_s: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Scrape]:
    """Yields each scrape when it is read: those of the window's start, end and every interval between; at least two,
    should one take as long as the window.

    Raises ConfigError for a window or interval out of range, ServerError or StorageError for what cannot be read.
    """
    if isinstance(source, tuple):
        yield from (read_dump(path) for path in source)
        return
    if not MIN_INTERVAL_S <= interval_s <= seconds <= MAX_WINDOW_S:
        raise ConfigError(
            f"the interval must be at least {MIN_INTERVAL_S} s and at most the window, and the window at most "
            f"{MAX_WINDOW_S:.0f} s; not {interval_s:g} s of {seconds:g} s"
        )
    started = clock()
    number = 0
    while True:
        yield read_address(source)
        number += 1
        due = min(number * interval_s, seconds)
        if number > 1 and clock() - started >= seconds:
            return
        sleep(max(due - (clock() - started), 0.0))
