"""Calibration of probabilities: against answers that are right by construction, and their rows against a hand count."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from evidence.calibration import (
    BELIEVED,
    CALIBRATION,
    CalibrationRow,
    calibration_of,
    over_sources,
    published_calibration,
)
from evidence.lanes import JudgedFigure
from magicdec.counts import Z_90
from magicdec.perfmodel.lanes import Lane

HEAD = Lane("vllm", "from 0.14", "trained head", "dense", "measured")
RNG = np.random.default_rng(7)


def drawn(
    num: int, stated: float, true: float, sources: int = 40
) -> list[JudgedFigure]:
    """Plans that state a deviation, where the true one is another."""
    rows = []
    for number in range(num):
        log_speedup = float(RNG.normal(0.0, 0.3))
        log_error = float(RNG.normal(0.0, true))
        rows.append(
            JudgedFigure(
                lane=HEAD,
                source=f"source {number % sources}",
                figure=BELIEVED,
                log_error=log_error,
                log_speedup=log_speedup,
                chance=NormalDist().cdf(log_speedup / stated),
                is_inside=abs(log_error) <= Z_90 * stated,
            )
        )
    return rows


def figures(rows: list[JudgedFigure]) -> dict[str, CalibrationRow]:
    return {row.of: row for row in calibration_of(rows)}


def test_answers_that_are_right_by_construction_are_calibrated() -> None:
    """Over 8000 rows a share of 90 % has a standard error of 0.3 %: false alarms at 3.7 of them, 1 in 5000."""
    found = figures(drawn(8000, stated=0.2, true=0.2))
    assert found["inside the 90 % interval"].found == pytest.approx(0.9, abs=0.0125)
    for name in ("pays, P below 10 %", "pays, P 10 to 90 %", "pays, P above 90 %"):
        row = found[name]
        assert row.stated == pytest.approx(row.found, abs=0.03)
        assert row.low is not None
        assert row.high is not None
        assert row.stated is not None
        assert row.low - 0.02 <= row.stated <= row.high + 0.02
    # E[P(1 - P)], the score of calibrated probabilities
    chances = np.array([NormalDist().cdf(x / 0.2) for x in RNG.normal(0.0, 0.3, 20000)])
    best = float((chances * (1.0 - chances)).mean())
    assert found["Brier score"].found == pytest.approx(best, abs=0.01)
    assert (
        found["Brier score"].found < found["Brier score of the share that pays"].found
    )


def test_answers_that_are_too_sure_are_seen() -> None:
    found = figures(drawn(4000, stated=0.1, true=0.3))
    assert found["inside the 90 % interval"].high is not None
    assert found["inside the 90 % interval"].high < 0.7
    assert found["pays, P above 90 %"].found < 0.85


def test_each_source_counts_the_same_and_few_have_no_ends() -> None:
    mean, low, high = over_sources({"large": [1.0] * 99, "small": [0.0]})
    assert mean == 0.5
    assert (low, high) == (0.0, 1.0)
    assert over_sources({"one": [0.0, 1.0]}) == (0.5, None, None)


def test_the_ends_are_those_of_a_mean_of_sources() -> None:
    """Against the normal law of a mean: 5 % and 95 % lie 1.645 standard errors off."""
    values = {
        str(number): [float(value)]
        for number, value in enumerate(RNG.normal(0.0, 1.0, 200))
    }
    mean, low, high = over_sources(values)
    deviation = float(np.std([rows[0] for rows in values.values()])) / math.sqrt(200)
    assert low == pytest.approx(mean - 1.645 * deviation, abs=0.15 * deviation)
    assert high == pytest.approx(mean + 1.645 * deviation, abs=0.15 * deviation)


def test_what_ships_has_every_figure_of_both_acceptances() -> None:
    rows = published_calibration()
    assert CALIBRATION.is_file()
    assert {row.figure for row in rows} == {"speedup", BELIEVED}
    for row in rows:
        assert 0.0 <= row.found <= 1.0
        assert row.low is None or row.low <= row.found <= (row.high or 1.0)
