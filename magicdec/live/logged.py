"""Engines' logs and load generators' results as observations like those of a server's metrics.

A reader (live/engine_logs.py, live/reported.py) gives stretches of decoding: their counts, and the
time of a step where nothing but decoding took it. A stretch whose clock also ran while the server
was idle or read prompts counts with the median step of the others.
"""

from __future__ import annotations

import functools
import math
import operator
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from magicdec.errors import ConfigError
from magicdec.live.metrics import Series, Target
from magicdec.live.observation import (
    MAX_COUNTED_CONTEXT,
    CounterIncreases,
    MeanGauges,
    Observation,
    ServedDraft,
)
from magicdec.schema import LARGEST_NUMBER

IDLE = 3.0
"""A step that takes so many times the median of the others spans idle time."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Decoding that one line, or one request, of a log tells of."""

    counts: CounterIncreases
    engine: str = ""
    """Which of several data-parallel engines it was."""
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    context_len: float | None = None
    step_s: float | None = None
    """Time of a step; None: its clock did more than decode."""
    seconds: float | None = None
    """Time that its tokens took."""


@dataclass(frozen=True, kw_only=True)
class LoggedSeries:
    """All that a log tells."""

    series: Series
    stretches: Sequence[Stretch]
    form: str = ""
    """Its name in the table of forms."""
    unit: str = "lines"
    """A name of stretches, in the plural."""
    number: int | None = None
    """How many there are, where not every stretch is one."""
    model: str = ""
    draft: ServedDraft | None = None
    """The draft that the log names."""
    gamma: int | None = None
    faults: tuple[str, ...] = ()
    """Faults that it tells of, in sentences."""
    notes: tuple[str, ...] = ()


def observation_of(logged: LoggedSeries) -> Observation:
    """The log as an observation; that of several engines is their sum, with each as a part.

    Raises ConfigError where it tells of no decoding.
    """
    if not logged.stretches:
        raise ConfigError(f"this {logged.form} tells of no decoding")
    _check(logged.stretches)
    engines = list(dict.fromkeys(stretch.engine for stretch in logged.stretches))
    parts = [_of_engine(logged, engine) for engine in engines]
    if len(parts) == 1:
        return replace(parts[0], target=replace(parts[0].target, replica=""))
    return summed(parts)


def _check(stretches: Iterable[Stretch]) -> None:
    for stretch in stretches:
        counts = stretch.counts
        for value in (counts.accepted, counts.drafts, counts.output_tokens):
            if value is not None and not 0.0 <= value <= LARGEST_NUMBER:
                raise ConfigError(f"it counts {value:g} tokens, which no engine has")
        if (
            stretch.context_len is not None
            and stretch.context_len > MAX_COUNTED_CONTEXT
        ):
            raise ConfigError(
                f"it tells of sequences of {stretch.context_len:g} tokens, longer than any"
            )


def _of_engine(logged: LoggedSeries, engine: str) -> Observation:
    stretches = [stretch for stretch in logged.stretches if stretch.engine == engine]
    step_s, left_out = _usual_step(stretches)
    segments = []
    seconds: list[float | None] = []
    for stretch in stretches:
        counts = stretch.counts
        steps = counts.counted_steps
        taken_s = stretch.seconds
        if step_s is not None and steps is not None and counts.step_seconds is None:
            own_s = stretch.step_s
            if own_s is None or own_s > IDLE * step_s:
                own_s = step_s
                if stretch.running:
                    taken_s = own_s * steps / stretch.running
            counts = replace(counts, step_seconds=own_s * steps)
        segments.append(counts)
        seconds.append(taken_s)
    notes = list(logged.notes)
    if left_out:
        notes.append(
            f"{left_out} of {len(stretches)} {logged.unit} span idle time or prompts: their speed "
            "is taken from the others"
        )
    return Observation(
        target=Target(
            series=logged.series,
            model=logged.model,
            replica=engine,
        ),
        segments=tuple(segments),
        counts=functools.reduce(operator.add, segments),
        load=MeanGauges(
            running=_mean(stretches, "running"),
            waiting=_mean(stretches, "waiting"),
            kv_usage=_mean(stretches, "kv_usage"),
            context_len=_mean(stretches, "context_len"),
            gamma=logged.gamma,
        ),
        window_s=_total(seconds),
        num_scrapes=logged.number or len(stretches),
        announced=logged.draft,
        form=logged.form,
        unit=logged.unit,
        faults=logged.faults,
        notes=tuple(notes),
        own_tokens_per_s=_speed(stretches, step_s),
    )


def _speed(stretches: Sequence[Stretch], step_s: float | None) -> float | None:
    """Tokens per second of the stretches that decoded all the time; None: there is none."""
    tokens = []
    seconds = []
    for stretch in stretches:
        is_like = step_s and stretch.step_s and stretch.step_s <= IDLE * step_s
        if is_like and stretch.seconds and stretch.counts.output_tokens:
            tokens.append(stretch.counts.output_tokens)
            seconds.append(stretch.seconds)
    if not seconds:
        return None
    return math.fsum(tokens) / math.fsum(seconds)


def _usual_step(stretches: Sequence[Stretch]) -> tuple[float | None, int]:
    """The usual time of a step, and how many stretches have none that is like it."""
    times = [stretch.step_s for stretch in stretches if stretch.step_s]
    if not times:
        return None, 0
    # idle time and prompts only lengthen a step, so the lower quarter is the cleanest
    usual = sorted(times)[(len(times) - 1) // 4]
    like = [seconds for seconds in times if seconds <= IDLE * usual]
    return statistics.median(like), len(stretches) - len(like)


def _mean(stretches: Sequence[Stretch], name: str) -> float | None:
    values = []
    for stretch in stretches:
        value = getattr(stretch, name)
        if value is not None and (stretch.running is None or stretch.running > 0):
            values.append(value)
    if values:
        return math.fsum(values) / len(values)
    return None


def _total(seconds: Sequence[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    if len(known) < len(seconds) or not math.fsum(known):
        return None
    return math.fsum(known)


def _mean_load(parts: Sequence[Observation], name: str) -> float | None:
    """Mean of a quantity of the load over the parts that tell it."""
    values = [getattr(part.load, name) for part in parts]
    known = [value for value in values if value is not None]
    if known:
        return math.fsum(known) / len(known)
    return None


def summed(parts: Sequence[Observation]) -> Observation:
    """Data-parallel engines of one model as one: counts and speeds are sums, a batch is that of each
    engine.
    """
    first = parts[0]
    segments = [segment for part in parts for segment in part.segments]
    if len({len(part.segments) for part in parts}) == 1:
        together = zip(*(part.segments for part in parts), strict=True)
        segments = [functools.reduce(operator.add, each) for each in together]
    windows = [part.window_s for part in parts if part.window_s is not None]
    speeds = [part.own_tokens_per_s for part in parts]
    own_speed = None
    if None not in speeds:
        own_speed = math.fsum(speed for speed in speeds if speed is not None)
    return replace(
        first,
        target=replace(first.target, replica=""),
        segments=tuple(segments),
        counts=functools.reduce(operator.add, [part.counts for part in parts]),
        load=MeanGauges(
            running=_mean_load(parts, "running"),
            waiting=_mean_load(parts, "waiting"),
            kv_usage=_mean_load(parts, "kv_usage"),
            context_len=_mean_load(parts, "context_len"),
            gamma=max((part.load.gamma or 0 for part in parts), default=0) or None,
        ),
        window_s=max(windows, default=None),
        own_tokens_per_s=own_speed,
        parts=tuple(parts),
    )
