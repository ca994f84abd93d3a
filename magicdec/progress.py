"""The work being done right now, on stderr: one line that renews itself on a terminal; off it, a line
of long work now and then; nothing when quiet. `Done` lines stay.

A `StepMessage` also says how much is done; the line then has a bar and the time that is left at the
pace so far. `Stages` makes one bar of work that is done in several parts. Nothing is drawn between
messages, so no thread runs next to the work that is being timed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from magicdec.units import format_seconds

LINE_EVERY_S = 15.0
"""Seconds between two lines where they cannot renew themselves: a log stays short."""


class StepMessage(str):
    """A message that begins step number `done` (from 0) of `total` of about equal length."""

    done: int
    total: int

    def __new__(cls, message: str, *, done: int, total: int) -> StepMessage:
        step = super().__new__(cls, message)
        step.done, step.total = done, total
        return step


class Done(str):
    """A message that stays: a line of its own, on a terminal and off it."""


Progress = Callable[[str], None]
STAGE_STEPS = 10_000
"""Steps of a whole that is made of stages."""


class Stages:
    """Work done in several stages, of which each is about that share of the time: their steps as
    steps of the whole.
    """

    def __init__(self, progress: Progress, shares: Sequence[float]) -> None:
        self._progress = progress
        total = sum(shares) or 1.0
        self._shares = [share / total for share in shares]

    def stage(self, number: int) -> Progress:
        """The progress of stage `number` (from 0). The share of the whole never goes back."""
        before = sum(self._shares[:number])
        share = self._shares[number]
        inside = 0.0

        def show(message: str) -> None:
            nonlocal inside
            if isinstance(message, Done):
                self._progress(message)
                return
            if isinstance(message, StepMessage):
                inside = max(inside, message.done / message.total)
            self._progress(
                StepMessage(
                    message,
                    done=int(STAGE_STEPS * (before + share * inside)),
                    total=STAGE_STEPS,
                )
            )

        return show


class Interrupted(BaseException):
    """An interrupt, with what is kept: the line in which the program ends."""


@contextmanager
def kept(what: Callable[[], str]) -> Iterator[None]:
    """Has an interrupt say `what` is kept."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(what()) from None


def _lines() -> Progress:
    """Prints lines that stay: those that are `Done`, and every LINE_EVERY_S the work of now, with
    the time since the beginning and the time left at the pace so far."""
    started = time.monotonic()
    printed = started

    def show(message: str) -> None:
        nonlocal printed
        now = time.monotonic()
        line = str(message)
        if not isinstance(message, Done):
            if now < printed + LINE_EVERY_S:
                return
            line = f"{format_seconds(now - started)}: {message}"
            if isinstance(message, StepMessage) and message.done:
                left_s = (now - started) * (message.total / message.done - 1.0)
                line += f" (about {format_seconds(left_s)} left)"
        printed = now
        print(line, file=sys.stderr, flush=True)

    return show


@contextmanager
def shown_progress(quiet: bool, *, after_s: float = 0.0) -> Iterator[Progress]:
    """Gives a function that shows a message or a step; the line is cleared at the end, also after
    an error. `after_s`: a terminal has none before so many seconds.
    """
    if quiet:
        yield lambda _: None
        return
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    bar = Progress(
        TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
        ),
        BarColumn(bar_width=12),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True, markup=False),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        speed_estimate_period=3600.0,
        expand=True,
    )
    task = bar.add_task("", total=None)
    begins = time.monotonic() + after_s

    def show(message: str) -> None:
        if time.monotonic() >= begins:
            bar.start()
        if isinstance(message, Done):
            bar.console.print(message, highlight=False, soft_wrap=True)
        elif isinstance(message, StepMessage):
            if (
                bar.tasks[0].total != message.total
                or message.done < bar.tasks[0].completed
            ):
                bar.reset(task, total=message.total)
            bar.update(task, completed=message.done, description=message)
        else:
            bar.update(task, description=message)
        if time.monotonic() >= begins:
            bar.refresh()

    try:
        yield show
    finally:
        bar.stop()
