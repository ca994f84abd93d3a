"""Measurements that an interrupted calibration keeps for the next one to go on from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from magicdec.calibrate.local_profile import TimedPoint


class Unfinished:
    """A file of finished parts, a line each, after a line that says what is calibrated: parts of
    anything else are dropped."""

    def __init__(self, path: Path | None, *, of: str) -> None:
        """Without a path nothing is kept."""
        self._path = path
        self._parts: dict[str, list[TimedPoint]] = {}
        if path is None:
            return
        lines = []
        if path.exists():
            lines = path.read_bytes().split(b"\n")
        if not lines or lines[0] != msgspec.json.encode(of):
            path.write_bytes(msgspec.json.encode(of) + b"\n")
            return
        for line in lines[1:-1]:  # an interrupted line has no end
            part, points = msgspec.json.decode(line, type=tuple[str, list[TimedPoint]])
            self._parts[part] = points
        whole = b"\n".join(lines[:-1]) + b"\n"
        path.write_bytes(whole)

    def holds(self, name: str) -> bool:
        return name in self._parts

    def part(
        self, name: str, measure: Callable[[], list[TimedPoint]]
    ) -> list[TimedPoint]:
        """The points of a part: those of the file, or measured now."""
        if name not in self._parts:
            points = measure()
            self._parts[name] = points
            if self._path is not None:
                with self._path.open("ab") as file:
                    file.write(msgspec.json.encode((name, points)) + b"\n")
        return self._parts[name]


def unfinished_path(profile: Path) -> Path:
    """The file of a calibration that is to be written to `profile`."""
    return profile.with_suffix(".unfinished.jsonl")
