"""A calibrated machine: its hardware profile, our engine's profile on it, and acceptance measured
with a model.

PROFILE.toml              hardware       (magicdec plan --hardware)
PROFILE.engine.toml       engine         (magicdec plan --engine)
PROFILE.acceptance.*.json acceptance     (magicdec plan --acceptance), one file per draft and method
PROFILE.points.json       the timings that the first two were fitted to, each with its spread
between rounds

Neither torch nor an engine is needed.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from magicdec.errors import ConfigError
from magicdec.files import write_atomic
from magicdec.perfmodel.acceptance import AcceptanceProfile, load_profile, save_profile
from magicdec.perfmodel.kernels.profile import (
    HardwareProfile,
    load_hardware,
    save_hardware,
)
from magicdec.specs.engine import EngineProfile, load_engine, save_engine
from magicdec.specs.speculation import SELF

Shape = dict[str, int]


@dataclass(frozen=True)
class TimedPoint:
    """One timed operation: its shape, and seconds per call of each round. `speeds`: the reference
    kernels' times (memory, compute) just before, by round, where they were timed."""

    table: str
    shape: Shape
    seconds: list[float]
    speeds: Sequence[tuple[float, float]] = ()

    @property
    def time_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        if len(self.seconds) < 3:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / self.time_s


@dataclass(frozen=True)
class EngineShape:
    """A batch at a context, with a draft."""

    batch_size: int
    context_len: int
    draft_budget: int | None
    gamma: int

    def columns(self, *, is_greedy: bool) -> Shape:
        """The shape's columns in files of points, whole numbers: a budget of 0 is the whole cache."""
        shape = asdict(self)
        shape["draft_budget"] = self.draft_budget or 0
        return {**shape, "is_greedy": int(is_greedy)}


@dataclass(frozen=True, kw_only=True)
class LocalProfile:
    """Profiles that predictions for this machine are made from."""

    hardware: HardwareProfile
    engine: EngineProfile
    acceptance: tuple[AcceptanceProfile, ...]

    def save(self, path: Path) -> list[Path]:
        """Writes the files of the profile at `path` (ending in .toml), and returns their paths."""
        save_hardware(self.hardware, path)
        save_engine(self.engine, engine_path(path))
        files = [path, engine_path(path)]
        for profile in self.acceptance:
            files.append(
                acceptance_path(path, profile.draft_method, draft=profile.draft)
            )
            save_profile(profile, files[-1])
        return files


def save_points(points: Sequence[TimedPoint], path: Path) -> Path:
    """Writes the timings next to the profile named `path`; returns the file.

    Raises StorageError when it cannot be written.
    """
    file = path.with_suffix(".points.json")
    rows = [
        {
            "table": p.table,
            **p.shape,
            "time_s": p.time_s,
            "spread": p.spread,
            "seconds": list(p.seconds),
            "speeds": list(p.speeds),
        }
        for p in points
    ]
    write_atomic(
        file, b"[\n" + b",\n".join(msgspec.json.encode(row) for row in rows) + b"\n]\n"
    )
    return file


def engine_path(path: Path) -> Path:
    return path.with_suffix(".engine.toml")


def acceptance_path(path: Path, draft_method: str, *, draft: str = SELF) -> Path:
    """A self-draft's file is named by its method, another draft's by itself too."""
    if draft not in (SELF, draft_method):
        of = [re.sub(r"[^\w.-]+", "-", draft).strip("-")]
    else:
        of = []
    return path.with_suffix("." + ".".join(["acceptance", *of, draft_method, "json"]))


def load_local_profile(path: Path) -> LocalProfile:
    """Reads a profile that `magicdec calibrate` wrote, with the files next to it.

    Raises ConfigError when the hardware or the engine profile is missing or damaged.
    """
    if not engine_path(path).exists():
        raise ConfigError(
            f"{engine_path(path)} is missing; `magicdec calibrate -o {path}` writes both"
        )
    files = sorted(path.parent.glob(path.with_suffix(".acceptance.*.json").name))
    return LocalProfile(
        hardware=load_hardware(path),
        engine=load_engine(engine_path(path)),
        acceptance=tuple(load_profile(file) for file in files),
    )
