"""How far predictions of a kind of server are off: statistics by lane (magicdec/perfmodel/lanes.py).

The width of a lane is the standard deviation that 90 % of its rows need on top of their kernels'
errors. Each sort of draft weighs the same in it, and of a sort each source. Whether a source's rows lie
inside is judged by the width that its lane has without it, so that no coverage is measured on what set
the width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import nan
from typing import NamedTuple

import numpy as np

from magicdec.counts import Z_90, Array
from magicdec.errors import unknown_choice
from magicdec.perfmodel.lanes import LEAST_ROWS, LEAST_SOURCES, Figure, Lane, LaneRow

HELD_SHARE = 0.9
"""Share of a lane's rows that its interval holds."""
LEAST_WIDTH = 0.03
"""Servers that are measured again differ by about as much, however well a lane's few rows agree."""
BELIEVED: Figure = "speedup, acceptance believed"
"""Judged by the ends of a plan's interval, of the answer that the other sources give."""


class JudgedFigure(NamedTuple):
    """One figure of one measured server."""

    lane: Lane
    source: str
    figure: Figure
    log_error: float
    """Logarithm of predicted over measured."""
    of_kernels: float = 0.0
    """One standard deviation of it that the kernels' errors explain."""
    log_speedup: float = nan
    """Logarithm of the predicted speedup, where it is one."""
    chance: float = nan
    """The plan's probability that it is above 1, the acceptance believed."""
    is_inside: bool = False
    """Whether it lies in the plan's interval, the acceptance believed."""
    device: str = ""


def needed(judged: Sequence[JudgedFigure]) -> float:
    """The width that 90 % of some rows need."""
    errors = np.array([abs(row.log_error) for row in judged])
    of_kernels = np.array([row.of_kernels for row in judged])
    widths = np.sqrt(np.maximum((errors / Z_90) ** 2 - of_kernels**2, 0.0))
    order = np.argsort(widths)
    reached = np.cumsum(_weights(judged)[order])
    place = int(np.searchsorted(reached, HELD_SHARE - 1e-9))
    return max(LEAST_WIDTH, float(widths[order][place]))


def _weights(judged: Sequence[JudgedFigure]) -> Array:
    """Weights by which each source of a sort of draft counts the same, and so does each sort."""
    rows = Counter((row.lane.draft, row.source) for row in judged)
    sources = Counter(draft for draft, _ in rows)
    weights = []
    for row in judged:
        draft = row.lane.draft
        weights.append(1.0 / (len(sources) * sources[draft] * rows[draft, row.source]))
    return np.array(weights)


class Lanes:
    """Judged figures by lane and by each wider one."""

    def __init__(self, judged: Sequence[JudgedFigure]) -> None:
        self.by_lane: dict[tuple[Lane, Figure], list[JudgedFigure]] = {}
        self._nested: dict[tuple[Lane, Figure, str], float] = {}
        for row in judged:
            for lane in dict.fromkeys(row.lane.wider()):
                self.by_lane.setdefault((lane, row.figure), []).append(row)

    def width(
        self, lane: Lane, figure: Figure, *, without: str = ""
    ) -> tuple[float, Lane]:
        """A lane's width by all sources but one, and the lane that it is of: a lane with too few
        sources has that of a wider one, or what a lane of enough rows on the way to it needs if that is
        more."""
        least = 0.0
        for wider in lane.wider():
            rows = []
            for row in self.by_lane.get((wider, figure), []):
                if row.source != without:
                    rows.append(row)
            if len({row.source for row in rows}) >= LEAST_SOURCES:
                return max(needed(rows), least), wider
            if len(rows) >= LEAST_ROWS:
                least = max(least, needed(rows))
        return max(needed(rows), least) if rows else least, wider

    def deviation(self, row: JudgedFigure) -> float:
        """One standard deviation of a row's error by the width that the other sources give its lane."""
        key = (row.lane, row.figure, row.source)
        if key not in self._nested:
            self._nested[key], _ = self.width(*key[:2], without=row.source)
        return float(np.hypot(self._nested[key], row.of_kernels))

    def is_inside(self, row: JudgedFigure) -> bool:
        """Whether a row lies inside the interval that the other sources give its lane; inside the
        plan's where the acceptance is believed."""
        if row.figure == BELIEVED:
            return row.is_inside
        return abs(row.log_error) <= Z_90 * self.deviation(row)

    def coverage(self, rows: Sequence[JudgedFigure]) -> float:
        """Share of rows inside their intervals."""
        return float(np.mean([self.is_inside(row) for row in rows]))

    def rows(self) -> list[LaneRow]:
        """The rows that ship: one row per lane, the wider ones among them, and figure."""
        table = []
        for (lane, figure), rows in sorted(self.by_lane.items()):
            width, owner = self.width(lane, figure)
            errors: Array = np.expm1([row.log_error for row in rows])
            devices = Counter(row.device for row in rows)
            row = LaneRow(
                **lane._asdict(),
                figure=figure,
                rows=len(rows),
                sources=len({row.source for row in rows}),
                median_error=round(float(np.median(np.abs(errors))), 4),
                bias=round(float(np.median(errors)), 4),
                coverage=round(self.coverage(rows), 3),
                width=round(width, 4),
                width_of=owner.label,
                devices=", ".join(
                    f"{device} {count}" for device, count in sorted(devices.items())
                ),
            )
            table.append(row)
        return table


def check_source(source: str, known: Sequence[str]) -> None:
    """Raises ConfigError for a source that no row names."""
    if source not in known:
        raise unknown_choice("source", source, list(dict.fromkeys(known)))
