"""Evidence that a row carries: on how many measured servers predictions of its kind were checked,
and how they fared."""

from __future__ import annotations

import msgspec


class LaneEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of a lane, summed up: an engine and its versions, a sort of draft, a kind of model, and
    whether the device's kernels were timed."""

    lane: str = ""
    """"": an engine that no lane is of."""
    rows: int = 0
    """Servers of the lane that were measured with and without such a draft."""
    rows_here: int = 0
    """Those of them on the row's own device."""
    sources: int = 0
    """Publications that they come from."""
    median_error: float | None = None
    """Median absolute error of the speedup at the acceptance that each measured; null: no rows."""
    width: float
    """One relative standard deviation of a speedup that its kernels' errors do not explain."""
    width_of: str = ""
    """The lane that has this width; another, wider one where too few sources measured this one."""
