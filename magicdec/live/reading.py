"""Engines' logs and load generators' results as observations like those of a server's metrics.

A reader (engine_logs.py, llama_cpp.py, load_results.py) gives readings: counts of some decoding, and the
time of a step where nothing but decoding took it. A reading whose clock also ran while the server was
idle or read prompts counts with the median step of the others.
"""

from __future__ import annotations

import functools
import math
import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from magicdec.errors import ConfigError
from magicdec.live.metrics import Series, Target
from magicdec.live.observation import (
    MAX_COUNTED_CONTEXT,
    CounterIncreases,
    MeanGauges,
    Observation,
    ServedDraft,
    check_counts,
    check_time,
    mean_of_known,
)
from magicdec.redaction import quoted

IDLE = 3.0
"""A step that takes so many times the median of the others spans idle time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The decoding of one line, request or run of a file."""

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
class Readings:
    """The readings of a file, and what it says of its server."""

    series: Series
    readings: Sequence[Reading]
    form: str = ""
    """Its name in the table of forms."""
    unit: str = "lines"
    """A name of the readings, in the plural."""
    number: int | None = None
    """How many there are, where not every reading is one."""
    model: str = ""
    draft: ServedDraft | None = None
    """The draft that the log names."""
    gamma: int | None = None
    faults: tuple[str, ...] = ()
    """Faults that it tells of, in sentences."""
    notes: tuple[str, ...] = ()


def observation_of(logged: Readings) -> Observation:
    """The readings as an observation; that of several engines is their sum, with each as a part.

    Raises ConfigError where they tell of no decoding, or of more than any engine does.
    """
    if not logged.readings:
        raise ConfigError(f"this {logged.form} tells of no decoding")
    by_engine: dict[str, list[Reading]] = {}
    for reading in logged.readings:
        check_counts(reading.counts, logged.gamma)
        check_time("time of a step", reading.step_s)
        check_time("duration", reading.seconds)
        length = reading.context_len
        if length is not None and length > MAX_COUNTED_CONTEXT:
            raise ConfigError(
                f"it tells of sequences of {length:g} tokens, longer than any"
            )
        by_engine.setdefault(reading.engine, []).append(reading)
    parts = [
        _of_engine(logged, engine, readings) for engine, readings in by_engine.items()
    ]
    if len(parts) == 1:
        return replace(parts[0], target=replace(parts[0].target, replica=""))
    return summed(parts)


def _of_engine(
    logged: Readings, engine: str, readings: Sequence[Reading]
) -> Observation:
    step_s, left_out = _usual_step(readings)
    segments = []
    seconds: list[float | None] = []
    for reading in readings:
        counts = reading.counts
        steps = counts.counted_steps
        taken_s = reading.seconds
        if step_s is not None and steps is not None and counts.step_seconds is None:
            own_s = reading.step_s
            if own_s is None or own_s > IDLE * step_s:
                own_s = step_s
                if reading.running:
                    taken_s = own_s * steps / reading.running
            counts = replace(counts, step_seconds=own_s * steps)
        segments.append(counts)
        seconds.append(taken_s)
    notes = list(logged.notes)
    if left_out:
        notes.append(
            f"{left_out} of {len(readings)} {logged.unit} span idle time or prompts: their speed "
            "is taken from the others"
        )
    window_s = math.fsum(taken_s or 0.0 for taken_s in seconds) or None
    if None in seconds:
        window_s = None
    busy = [each for each in readings if each.running is None or each.running > 0]
    return Observation(
        target=Target(series=logged.series, model=quoted(logged.model), replica=engine),
        segments=tuple(segments),
        counts=functools.reduce(operator.add, segments),
        load=MeanGauges(
            running=mean_of_known(reading.running for reading in busy),
            waiting=mean_of_known(reading.waiting for reading in busy),
            kv_usage=mean_of_known(reading.kv_usage for reading in busy),
            context_len=mean_of_known(reading.context_len for reading in busy),
            gamma=logged.gamma,
        ),
        window_s=window_s,
        num_scrapes=logged.number or len(readings),
        announced=logged.draft,
        form=logged.form,
        unit=logged.unit,
        faults=logged.faults,
        notes=tuple(notes),
        own_tokens_per_s=_speed(readings, step_s),
    )


def _speed(readings: Sequence[Reading], step_s: float | None) -> float | None:
    """Tokens per second of the readings that decoded all the time; None: there is none."""
    tokens = []
    seconds = []
    for reading in readings:
        is_like = step_s and reading.step_s and reading.step_s <= IDLE * step_s
        if is_like and reading.seconds and reading.counts.output_tokens:
            tokens.append(reading.counts.output_tokens)
            seconds.append(reading.seconds)
    if not seconds:
        return None
    return math.fsum(tokens) / math.fsum(seconds)


def _usual_step(readings: Sequence[Reading]) -> tuple[float | None, int]:
    """The usual time of a step, and how many readings have none that is like it."""
    times = [reading.step_s for reading in readings if reading.step_s]
    if not times:
        return None, 0
    # idle time and prompts only lengthen a step, so the lower quarter is the cleanest
    usual = sorted(times)[(len(times) - 1) // 4]
    like = [seconds for seconds in times if seconds <= IDLE * usual]
    return statistics.median(like), len(readings) - len(like)


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
            running=mean_of_known(part.load.running for part in parts),
            waiting=mean_of_known(part.load.waiting for part in parts),
            kv_usage=mean_of_known(part.load.kv_usage for part in parts),
            context_len=mean_of_known(part.load.context_len for part in parts),
            gamma=max((part.load.gamma or 0 for part in parts), default=0) or None,
        ),
        window_s=max(windows, default=None),
        own_tokens_per_s=own_speed,
        parts=tuple(parts),
    )
