"""Figures saved by themselves carry their finding as a title, which nothing covers or cuts off."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from samples_reports import plan
from test_figures import OF_ARRIVALS, traffic

from magicdec.records import read_many
from magicdec.reports.data import ReportData
from magicdec.reports.figures import FIGURES, Chart, draw, draw_all

RESULTS = Path(__file__).resolve().parents[2] / "results"


@pytest.mark.parametrize("name", [name for name in FIGURES if name not in OF_ARRIVALS])
def test_title_legends_and_axis_labels_lie_inside_the_figure_and_apart(name: str, data: ReportData) -> None:
    chart = draw(name, data)
    assert chart is not None
    lies_inside_and_apart(chart)


@pytest.mark.parametrize("records", ["demo-2-cores", "grid-2-cores"])
def test_so_they_do_in_the_figures_of_what_was_measured(records: str) -> None:
    for chart in draw_all(ReportData.from_records(read_many([RESULTS / f"{records}.jsonl"]))):
        lies_inside_and_apart(chart)


def test_so_they_do_in_the_figures_of_arrivals() -> None:
    for chart in draw_all(ReportData.from_records([], plan(traffic=traffic()))):
        lies_inside_and_apart(chart)


def lies_inside_and_apart(chart: Chart) -> None:
    figure = chart.standalone()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    title = figure._suptitle  # type: ignore[attr-defined]  # matplotlib has no public way to its extent
    legends = [each for axes in figure.axes if (each := axes.get_legend()) is not None]
    labels = [axis.label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) if axis.label.get_text()]
    boxes = [each.get_window_extent() for each in (title, *legends, *labels)]
    for box in boxes:
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0
        assert box.y1 <= figure.bbox.y1
    for one, other in combinations(boxes, 2):
        assert not one.overlaps(other)
    tops = [axes.get_position().y1 * figure.bbox.height for axes in figure.axes]
    assert max(tops) < boxes[0].y0
    assert title.get_text().replace("\n", " ") == chart.title
