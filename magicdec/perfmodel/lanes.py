"""Evidence: on how many measured servers predictions of a kind were checked, and how far off they
were.

A lane is an engine and a range of its versions, a sort of draft, a kind of model, and whether the
device's own kernels were timed. `python -m evidence lanes` compares predictions with tables of measured
servers and writes what ships here: aggregates only. The width of a lane is the error of a speedup that
is left when its kernels' errors are taken out. A lane with fewer than `LEAST_SOURCES` sources takes the
width of the next wider one that has as many, and no less than each lane on the way needs that has
`LEAST_ROWS` rows, itself among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from magicdec.files import read_csv
from magicdec.naming import METHODS
from magicdec.perfmodel.setup import Setup
from magicdec.schema.evidence import LaneEvidence
from magicdec.specs.engine import SERVING_ENGINES, EngineProfile, version_number
from magicdec.specs.speculation import SELF

LANES = Path(__file__).resolve().parents[1] / "specs" / "data" / "lanes.csv"
LEAST_SOURCES = 3
LEAST_ROWS = 10
"""Nine tenths of fewer rows are all of them, which tells no width."""
ANY = "any"
WITHOUT_DRAFT = "no draft"
Figure = Literal[
    "step without a draft",
    "speculative step",
    "speedup",
    "speedup, acceptance believed",
]
FIGURES: tuple[Figure, ...] = (
    "step without a draft",
    "speculative step",
    "speedup",
    "speedup, acceptance believed",
)
"""The last is a plan's answer as it is given before anything is measured: its interval holds the
belief's errors too, and no width is taken from it."""
SORTS = {
    "lookup": "look-up",
    "head": "trained head",
    "parallel": "trained head",
    "sparse": "sparse draft",
}
"""Sorts of drafts by those of `naming.METHODS`."""


class Lane(NamedTuple):
    """A kind of server; `ANY` in place of a part stands for all of it."""

    engine: str
    versions: str
    draft: str
    model: str
    device: str

    @property
    def label(self) -> str:
        """Its parts in a few words: "vllm from 0.14, trained head, dense, device measured"."""
        engine = "any engine"
        if self.engine != ANY:
            engine = self.engine
            if self.versions not in ("", ANY):
                engine += f" {self.versions}"
        parts = [engine]
        for part, prefix in (
            (self.draft, ""),
            (self.model, ""),
            (self.device, "device "),
        ):
            if part != ANY:
                parts.append(prefix + part)
        return ", ".join(parts)

    def wider(self) -> Iterator[Lane]:
        """This lane, then ever wider ones. The sort of draft, which the engine's fixed costs hang on
        most, is given up last."""
        wider = self
        yield wider
        for part in ("device", "model", "versions", "engine", "draft"):
            wider = wider._replace(**{part: ANY})
            yield wider


class LaneRow(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of a lane, as shipped."""

    engine: str
    versions: str
    draft: str
    model: str
    device: str
    figure: Figure
    rows: int
    sources: int
    median_error: float | None = None
    """Median absolute error; None: no rows."""
    bias: float | None = None
    """Median of the signed errors."""
    coverage: float | None = None
    """Share of rows inside the 90 % interval whose width comes from the other sources."""
    width: float
    """One standard deviation of the logarithm that 90 % of the rows need."""
    width_of: str
    """The lane that has this width: its own, or the next wider one with enough sources."""
    devices: str = ""
    """Its rows by device: "a100-sxm-80gb 12, gh200-96gb 153"."""

    @property
    def rows_by_device(self) -> dict[str, int]:
        counts = {}
        for part in filter(None, self.devices.split(", ")):
            device, count = part.rsplit(" ", 1)
            counts[device] = int(count)
        return counts

    @property
    def lane(self) -> Lane:
        return Lane(self.engine, self.versions, self.draft, self.model, self.device)


def versions_of(engine: EngineProfile, version: str = "") -> str:
    """The range of an engine's versions that one belongs to; "" is its profile's."""
    since = engine.scheduler.asynchronous_since
    if not since:
        return ""
    number = version_number(version or engine.version)
    if number and number < version_number(since):
        return f"before {since}"
    return f"from {since}"


def lane_of(setup: Setup, version: str = "") -> Lane:
    """The lane of a setup on a version of its engine; "" is its profile's."""
    speculation = setup.speculation
    sort = METHODS[speculation.draft_method].sort
    if sort == "none":
        draft = WITHOUT_DRAFT
    elif sort in SORTS:
        draft = SORTS[sort]
    elif speculation.draft == SELF:
        draft = "quantised copy"
    else:
        draft = "draft model"
    model = "dense"
    if setup.model.states:
        model = "hybrid"
    elif setup.model.is_moe:
        model = "mixture"
    device = "borrowed"
    if setup.hardware.is_measured:
        device = "measured"
    return Lane(
        engine=setup.engine.name,
        versions=versions_of(setup.engine, version),
        draft=draft,
        model=model,
        device=device,
    )


@cache
def shipped() -> dict[tuple[Lane, Figure], LaneRow]:
    """The figures that ship, by lane."""
    return read_lanes(LANES)


def read_lanes(path: Path) -> dict[tuple[Lane, Figure], LaneRow]:
    """A table of lanes, as `python -m evidence lanes` writes it."""
    rows = {}
    for line in read_csv(path):
        filled = {
            name: text for name, text in line.items() if text or name == "versions"
        }
        row = msgspec.convert(filled, LaneRow, strict=False)
        rows[row.lane, row.figure] = row
    return rows


def evidence_of(setup: Setup) -> LaneEvidence:
    """The measured speedups of a setup's kind, counted, and the width that follows. An engine that no
    lane is of, such as one calibrated by its user, has the error that its profile states, and one with
    fewer than `LEAST_SOURCES` sources in the lane no less: most of the others are another engine's."""
    stated = setup.engine.errors.speedup_relative_error
    if setup.engine.name not in SERVING_ENGINES:
        return LaneEvidence(width=stated)
    lane = lane_of(setup)
    evidence = evidence_in(lane)
    own = shipped().get((lane, "speedup"))
    if own is not None:
        here = own.rows_by_device.get(setup.hardware.name, 0)
        evidence = msgspec.structs.replace(evidence, rows_here=here)
    if evidence.sources >= LEAST_SOURCES or evidence.width >= stated:
        return evidence
    return msgspec.structs.replace(
        evidence, width=stated, width_of=f"{setup.engine.name}'s servers at large"
    )


@cache
def evidence_in(lane: Lane) -> LaneEvidence:
    """The measured speedups of a lane, counted, and the width that follows."""
    table = shipped()
    own = table.get((lane, "speedup"))
    if own is not None:
        return LaneEvidence(
            lane=lane.label,
            rows=own.rows,
            sources=own.sources,
            median_error=own.median_error,
            width=own.width,
            width_of=own.width_of,
        )
    for wider in lane.wider():
        row = table.get((wider, "speedup"))
        if row is not None and (row.rows >= LEAST_ROWS or row.sources >= LEAST_SOURCES):
            return LaneEvidence(lane=lane.label, width=row.width, width_of=wider.label)
    raise LookupError(lane)  # all rows together are a lane of the table
