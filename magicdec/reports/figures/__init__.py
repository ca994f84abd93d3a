"""The figures: one function each, which draws where its data is there and returns None where it is not."""

from __future__ import annotations

from collections.abc import Callable

from magicdec.errors import unknown_choice
from magicdec.reports.data import ReportData
from magicdec.reports.figures import acceptance, grids, steps, validation
from magicdec.reports.figures.chart import Chart
from magicdec.reports.style import RC

FIGURES: dict[str, Callable[[ReportData], Chart | None]] = {
    "heatmap": grids.speedup_heatmap,
    "pareto": grids.throughput_latency,
    "scatter": validation.predicted_vs_measured,
    "residuals": validation.residuals_by_term,
    "phases": steps.step_phases,
    "limits": steps.time_by_limit,
    "gamma": acceptance.speedup_by_gamma,
    "positions": acceptance.acceptance_by_position,
    "budget": acceptance.acceptance_by_budget,
    "roofline": steps.roofline,
    "memory": steps.memory_bar,
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
