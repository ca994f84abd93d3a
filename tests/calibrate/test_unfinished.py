"""An interrupted calibration keeps what it timed, and the next one goes on from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from magicdec.calibrate.engine import _time_rounds
from magicdec.calibrate.local_profile import EngineShape, TimedPoint
from magicdec.calibrate.unfinished import Unfinished, unfinished_path
from magicdec.specs.speculation import SamplingSpec

SHAPES = [(EngineShape(batch, 300, 72, 3), SamplingSpec()) for batch in (1, 5)]


class Machine:
    """A machine whose every step takes a second longer than the one before, until it is stopped."""

    def __init__(self, *, steps: float = float("inf"), begins: int = 0) -> None:
        self.left = steps
        self.taken = begins

    def phases(self, shape: EngineShape, sampling: SamplingSpec) -> dict[str, float]:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        self.taken += 1
        return {"verify": float(self.taken), "accept": self.taken / 10.0}


def rounds(machine: Machine, path: Path | None) -> list[TimedPoint]:
    return _time_rounds(
        SHAPES,
        machine.phases,
        rounds=3,
        unfinished=Unfinished(path, of="one machine"),
        name="steps",
    )


@pytest.mark.parametrize("steps", [1, 3, 4, 5, 7])
def test_rounds_that_ended_are_not_timed_again(steps: int, tmp_path: Path) -> None:
    """Two steps a round, the first to warm up, which every attempt needs."""
    path = unfinished_path(tmp_path / "local.toml")
    with pytest.raises(KeyboardInterrupt):
        rounds(Machine(steps=steps), path)
    whole = max(steps // 2 - 1, 0)
    second = Machine(begins=100)
    points = rounds(second, path)
    assert second.taken - 100 == 2 * (1 + 3 - whole)
    verify = next(point for point in points if point.table == "verify")
    kept = [3.0, 5.0][:whole]
    assert verify.seconds[:whole] == kept
    assert all(seconds > 100.0 for seconds in verify.seconds[whole:])
    third = Machine(begins=900)
    assert rounds(third, path) == points
    assert third.taken == 900
    uninterrupted = rounds(Machine(), None)
    assert [(point.table, point.shape) for point in uninterrupted] == [
        (point.table, point.shape) for point in points
    ]


def test_a_torn_line_and_another_machines_points_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    point = TimedPoint("linear", {"m": 1}, [0.5, 0.25], [(1.0, 2.0)])
    kept = Unfinished(path, of="one")
    assert kept.part("linear layers", lambda: [point]) == [point]
    with path.open("ab") as file:
        file.write(b'["attention",[{"tab')

    def again() -> list[TimedPoint]:
        raise AssertionError("timed again")

    later = Unfinished(path, of="one")
    (found,) = later.part("linear layers", again)
    assert (found.table, dict(found.shape)) == ("linear", {"m": 1})
    assert found.seconds == [0.5, 0.25]
    assert [tuple(pair) for pair in found.speeds] == [(1.0, 2.0)]
    assert later.part("attention", list) == []
    other = Unfinished(path, of="another")
    with pytest.raises(AssertionError, match="timed again"):
        other.part("linear layers", again)
