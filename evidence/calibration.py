"""Whether what is said to be likely happens as often as it is said, where both arms were measured.

A pair of servers pays where its measured speedup is above 1. The Brier score is the mean of (P − o)²,
with P the stated probability and o 1 where it pays, else 0: 0 is perfect, and to state the share that
pays everywhere gets share · (1 − share). Each source counts the same, whatever its rows, and the ends
of every figure are the 5th and 95th percentile of a bootstrap over sources: the rows of one source
share their server, their model and often their text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import msgspec
import numpy as np

from evidence import DATA
from evidence.lanes import BELIEVED, JudgedFigure, Lanes
from magicdec.counts import Array
from magicdec.files import read_csv
from magicdec.perfmodel.lanes import Figure

CALIBRATION = DATA / "calibration.csv"
BINS = ((0.0, 0.1), (0.1, 0.9), (0.9, 1.0))
"""Surely not, unclear, surely."""
BIN_NAMES = ("pays, P below 10 %", "pays, P 10 to 90 %", "pays, P above 90 %")
DRAWS = 4000
LEAST_BOOTSTRAPPED = 2
"""Sources below which no end is given."""


class CalibrationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One figure over all pairs."""

    figure: Figure
    of: str
    rows: int
    sources: int
    stated: float | None = None
    """The figure of calibrated answers; None: nothing is stated."""
    found: float
    low: float | None = None
    high: float | None = None
    """The ends by a bootstrap over sources; None: too few."""


@cache
def published_calibration() -> list[CalibrationRow]:
    """The figures of docs/accuracy.md."""
    rows = []
    for line in read_csv(CALIBRATION):
        filled = {name: text for name, text in line.items() if text}
        rows.append(msgspec.convert(filled, CalibrationRow, strict=False))
    return rows


class JudgedPair(NamedTuple):
    """One pair's answer and outcome."""

    source: str
    chance: float
    """Stated probability that the draft pays."""
    pays: bool
    is_inside: bool
    """Whether the measured speedup lies in the 90 % interval."""

    @property
    def squared_error(self) -> float:
        return (self.chance - float(self.pays)) ** 2


def calibration_of(judged: Sequence[JudgedFigure]) -> list[CalibrationRow]:
    """Calibration of the speedups, with the acceptance given and believed."""
    table = []
    lanes = Lanes(judged)
    for figure in ("speedup", BELIEVED):
        answers = []
        for row in judged:
            if row.figure == figure:
                answers.append(_answer(lanes, row))
        if answers:
            table += _rows(figure, answers)
    return table


def _answer(lanes: Lanes, row: JudgedFigure) -> JudgedPair:
    """The answer with the width that the other sources give its lane; a plan's where the acceptance is
    believed."""
    if row.figure == BELIEVED:
        chance = row.chance
    else:
        deviation = lanes.deviation(row)
        chance = NormalDist().cdf(row.log_speedup / deviation)
    return JudgedPair(
        source=row.source,
        chance=chance,
        pays=row.log_speedup - row.log_error > 0.0,
        is_inside=lanes.is_inside(row),
    )


def _rows(figure: Figure, answers: Sequence[JudgedPair]) -> list[CalibrationRow]:
    def row(
        name: str,
        chosen: Sequence[JudgedPair],
        value: Callable[[JudgedPair], float],
        stated: float | None,
    ) -> CalibrationRow:
        by_source: dict[str, list[float]] = {}
        for answer in chosen:
            by_source.setdefault(answer.source, []).append(value(answer))
        found, low, high = over_sources(by_source)
        return CalibrationRow(
            figure=figure,
            of=name,
            rows=len(chosen),
            sources=len(by_source),
            stated=None if stated is None else round(stated, 4),
            found=round(found, 4),
            low=low if low is None else round(low, 4),
            high=high if high is None else round(high, 4),
        )

    def pays(answer: JudgedPair) -> float:
        return float(answer.pays)

    base = row("pays", answers, pays, None)
    table = [
        row(
            "inside the 90 % interval",
            answers,
            lambda answer: float(answer.is_inside),
            0.9,
        ),
        row("Brier score", answers, lambda answer: answer.squared_error, 0.0),
        row(
            "Brier score of the share that pays",
            answers,
            lambda answer: (base.found - pays(answer)) ** 2,
            None,
        ),
    ]
    for name, (low, high) in zip(BIN_NAMES, BINS, strict=True):
        chosen = []
        for answer in answers:
            is_last = high == BINS[-1][1]
            if low <= answer.chance < high or (is_last and answer.chance == high):
                chosen.append(answer)
        if chosen:
            by_source: dict[str, list[float]] = {}
            for answer in chosen:
                by_source.setdefault(answer.source, []).append(answer.chance)
            stated, _, _ = over_sources(by_source)
            table.append(row(name, chosen, pays, stated))
    return table


def over_sources(
    by_source: Mapping[str, Sequence[float]],
) -> tuple[float, float | None, float | None]:
    """The mean of the sources' means, and its 5th and 95th percentile where sources are drawn anew
    with replacement."""
    means: Array = np.array(
        [math.fsum(rows) / len(rows) for rows in by_source.values()]
    )
    found = float(means.mean())
    if len(means) < LEAST_BOOTSTRAPPED:
        return found, None, None
    drawn = np.random.default_rng(0).choice(means, (DRAWS, len(means)))
    low, high = np.quantile(drawn.mean(axis=1), (0.05, 0.95)).tolist()
    return found, low, high
