"""The figures: one function each, which draws where its data is there and returns None where it is
not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from magicdec.errors import unknown_choice
from magicdec.reports.data import ReportData
from magicdec.reports.figures import breakdown, grids, measured, sweeps
from magicdec.reports.figures.chart import RC, Chart
from magicdec.schema import Plan

__all__ = ["FIGURES", "Chart", "draw", "draw_all", "draw_by_device"]

FIGURES: dict[str, Callable[[ReportData], Chart | None]] = {
    "heatmap": grids.speedup_heatmap,
    "best": grids.best_drafts,
    "pareto": grids.throughput_latency,
    "scatter": measured.predicted_vs_measured,
    "phases": breakdown.step_phases,
    "limits": breakdown.time_by_limit,
    "gamma": sweeps.speedup_by_gamma,
    "budget": sweeps.speedup_by_budget,
    "positions": measured.acceptance_by_position,
    "roofline": breakdown.roofline,
    "memory": breakdown.memory_bar,
    "traffic": grids.latency_by_rate,
    "goodput": grids.goodput_by_policy,
    "timeline": grids.timeline,
}
"""In the order of the report."""


def draw(name: str, data: ReportData) -> Chart | None:
    """Draws one figure by name. Raises ConfigError for an unknown name."""
    import matplotlib

    if name not in FIGURES:
        raise unknown_choice("figure", name, FIGURES)
    with matplotlib.rc_context(RC):
        return FIGURES[name](data)


def draw_by_device(plans: Sequence[Plan]) -> list[Chart]:
    """The best drafts of one question on several devices, a small figure each."""
    import matplotlib

    with matplotlib.rc_context(RC):
        return grids.best_drafts_by_device(plans)


def draw_all(data: ReportData) -> list[Chart]:
    return [chart for name in FIGURES if (chart := draw(name, data)) is not None]
