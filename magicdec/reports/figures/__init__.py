"""The figures: one function each, which draws where its data is there and returns None where it is
not.
"""

from __future__ import annotations

from collections.abc import Callable

from magicdec.errors import unknown_choice
from magicdec.reports.data import ReportData
from magicdec.reports.figures import grids, measured, sweeps
from magicdec.reports.figures.chart import RC, Chart

__all__ = ["FIGURES", "Chart", "draw", "draw_all"]

FIGURES: dict[str, Callable[[ReportData], Chart | None]] = {
    "heatmap": grids.speedup_heatmap,
    "pareto": grids.throughput_latency,
    "scatter": measured.predicted_vs_measured,
    "gamma": sweeps.speedup_by_gamma,
    "budget": sweeps.speedup_by_budget,
    "positions": measured.acceptance_by_position,
    "traffic": grids.latency_by_rate,
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
