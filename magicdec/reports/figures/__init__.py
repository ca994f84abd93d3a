"""The figures: one function each, which draws where its data is there and returns None where it is not."""

from __future__ import annotations

from collections.abc import Callable

from magicdec.errors import unknown_choice
from magicdec.reports.data import ReportData
from magicdec.reports.figures import breakdown, drafting, grids, sweeps, traffic, validation
from magicdec.reports.figures.chart import Chart
from magicdec.reports.style import RC

FIGURES: dict[str, Callable[[ReportData], Chart | None]] = {
    "heatmap": grids.speedup_heatmap,
    "pareto": grids.throughput_latency,
    "scatter": validation.predicted_vs_measured,
    "residuals": validation.residuals_by_term,
    "phases": breakdown.step_phases,
    "limits": breakdown.time_by_limit,
    "gamma": sweeps.speedup_by_gamma,
    "speedup-by-batch": sweeps.speedup_by_batch,
    "speedup-by-budget": sweeps.speedup_by_budget,
    "positions": drafting.acceptance_by_position,
    "budget": drafting.acceptance_by_budget,
    "roofline": breakdown.roofline,
    "memory": breakdown.memory_bar,
    "traffic": traffic.latency_by_rate,
    "goodput": traffic.goodput_by_policy,
    "timeline": traffic.timeline,
}
"""In the order of the report."""


def draw(name: str, data: ReportData) -> Chart | None:
    """Draws one figure by name. Raises ConfigError for an unknown name."""
    import matplotlib

    if name not in FIGURES:
        raise unknown_choice("figure", name, FIGURES)
    with matplotlib.rc_context(RC):
        return FIGURES[name](data)


def draw_all(data: ReportData) -> list[Chart]:
    return [chart for name in FIGURES if (chart := draw(name, data)) is not None]


__all__ = ["FIGURES", "Chart", "draw", "draw_all"]
