"""Figures: each where its data is there and only there, with its values, its tips and its finding."""

from __future__ import annotations

import dataclasses
import math
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import msgspec
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from samples_reports import changed, grid, measured, plan, predicted

from magicdec.errors import ConfigError
from magicdec.naming import method_name
from magicdec.reports.data import ReportData
from magicdec.reports.figures import FIGURES, Chart, draw, draw_all
from magicdec.reports.figures.chart import (
    CSS_VARIABLES,
    GRID,
    INK,
    MUTED,
    PAPER,
    SERIES,
    inline_svg,
    png,
    raw_svg,
)
from magicdec.reports.figures.measured import acceptance_by_position, rate_intervals
from magicdec.schema.plan import Percentiles, Traffic, TrafficLoad
from magicdec.schema.record import read_many

RESULTS = Path(__file__).resolve().parents[2] / "results"


def names(data: ReportData) -> set[str]:
    return {chart.name for chart in draw_all(data)}


@pytest.fixture(scope="module")
def charts(data: ReportData) -> dict[str, Chart]:
    assert data.plan is not None
    under_arrivals = dataclasses.replace(
        data, plan=msgspec.structs.replace(data.plan, traffic=traffic())
    )
    return {chart.name: chart for chart in draw_all(under_arrivals)}


def test_everything_is_drawn_from_records_and_a_plan(charts: dict[str, Chart]) -> None:
    assert set(charts) == set(FIGURES)


def test_a_plan_alone_draws_what_needs_no_measurement() -> None:
    drawn = names(ReportData.from_records([], plan()))
    assert drawn >= {"heatmap", "gamma"}
    assert not drawn & {"scatter", "positions"}


def test_measurements_alone_draw_what_needs_no_prediction() -> None:
    drawn = names(
        ReportData.from_records([r for r in grid() if r.source == "measured"])
    )
    assert drawn >= {"gamma", "positions", "budget", "pareto", "heatmap"}
    assert "scatter" not in drawn


@pytest.mark.parametrize(
    "rows", [[measured(1, 512, gamma=0)], [measured(4, 512)], [predicted(4, 512)]]
)
def test_a_single_record_draws_without_failing(rows: list[Any]) -> None:
    draw_all(ReportData.from_records(rows))


def test_the_gamma_figure_holds_the_measured_and_the_predicted_values(
    charts: dict[str, Chart],
) -> None:
    for row in charts["gamma"].table.records:
        gamma = int(row["gamma"] or 0)
        assert row["speedup_measured"] == pytest.approx(
            measured(32, 4096, gamma=gamma).speedup
        )
        assert row["speedup_predicted"] == pytest.approx(
            predicted(32, 4096, gamma=gamma).speedup
        )


def test_a_budget_s_speedup_is_that_of_its_best_configuration(data: ReportData) -> None:
    """At each budget what is predicted best of all that was measured there, with its interval and its measurement."""
    chart = draw("budget", data)
    assert chart is not None
    pairs = [
        (pair.predicted, pair.measured)
        for pair in data.comparison.pairs
        if pair.measured.speedup
    ]
    found = 0
    for row in chart.table.records:
        here = [
            (p, m) for p, m in pairs
            if (m.batch_size, m.context_len, m.temperature) == (32, 4096, 1.0)
            if (method_name(m.draft_method), m.draft_budget) == (row["line"], row["draft_budget"])
        ]  # fmt: skip
        if row["speedup_measured"] is None or not here:
            continue
        p, m = max(here, key=lambda pair: pair[0].speedup or 0.0)
        names = (
            "speedup_predicted",
            "speedup_low",
            "speedup_high",
            "speedup_measured",
            "tokens_measured",
        )
        expected = (
            p.speedup,
            p.speedup_low,
            p.speedup_high,
            m.speedup,
            m.expected_tokens_per_step,
        )
        assert tuple(row[name] for name in names) == expected
        found += 1
    assert found > 1


def test_gammas_of_a_plan_are_shown_at_its_answer_s_batch_or_not_at_all() -> None:
    """Where the batch is searched, candidates of other batches have more gammas."""
    document = plan()
    best = document.best
    others = [
        each for each in document.candidates if each.batch_size != best.batch_size
    ]
    only = [
        best,
        *(changed(best, batch_size=2 * best.batch_size, gamma=g) for g in range(1, 8)),
    ]
    assert (
        draw("gamma", ReportData.from_records([], plan(candidates=[*others, *only])))
        is None
    )
    chart = draw("gamma", ReportData.from_records([], document))
    assert chart is not None
    assert f"batch {best.batch_size}," in chart.caption


def test_the_heat_map_marks_where_speculation_is_off(charts: dict[str, Chart]) -> None:
    tips = " ".join(charts["heatmap"].tips.values())
    off = sum(gamma == 0 for row in plan().gamma_table.gamma for gamma in row)
    assert tips.count("leave speculation off") == off
    assert len(charts["heatmap"].tips) == 20


def test_acceptance_has_the_clustered_intervals_that_its_record_holds() -> None:
    """90 % of a normal variable; an older record's trials are taken as independent, which is too narrow."""
    told = measured(8, 512, gamma=2)
    rates, trials = (
        told.acceptance_by_position or [],
        told.acceptance_trials_by_position or [],
    )
    clustered = msgspec.structs.replace(
        told, acceptance_stderr_by_position=[0.03, 0.04]
    )
    (low, high), _ = rate_intervals(clustered)
    assert (low, high) == pytest.approx(
        (rates[0] - 1.645 * 0.03, min(rates[0] + 1.645 * 0.03, 1.0)), abs=1e-4
    )
    (older_low, older_high), _ = rate_intervals(told)
    alone = math.sqrt(rates[0] * (1 - rates[0]) / trials[0])
    assert older_high - older_low == pytest.approx(
        min(2 * 1.645 * alone, 1 - rates[0] + 1.645 * alone), rel=0.03
    )
    chart = acceptance_by_position(ReportData.from_records([clustered]))
    assert chart is not None
    assert [column.title for column in chart.table.columns][3] == "90 % from"
    assert chart.table.rows[0][3] == pytest.approx(low)


@pytest.mark.parametrize("name", FIGURES)
def test_inline_svg_is_themed_named_and_has_identifiers_of_its_own(
    name: str, charts: dict[str, Chart]
) -> None:
    chart = charts[name]
    svg = inline_svg(chart)
    root = ET.fromstring(svg)
    assert root.get("role") == "img"
    assert chart.title in str(root.get("aria-label"))
    identifiers = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(identifiers) == len(set(identifiers))
    assert all(str(identifier).startswith(f"{name}-") for identifier in identifiers)
    tips = [e.get("data-tip") for e in root.iter() if e.get("class") == "tip"]
    assert sorted(map(str, tips)) == sorted(chart.tips.values())
    for colour in (INK, MUTED, GRID, PAPER):
        assert f": {colour}" not in svg, "a colour that does not follow the theme"


def test_a_figure_is_the_same_each_time_it_is_drawn(data: ReportData) -> None:
    first, second = (draw("budget", data) for _ in range(2))
    assert first is not None
    assert second is not None
    assert raw_svg(first.figure) == raw_svg(second.figure)


def test_png_is_a_picture(charts: dict[str, Chart]) -> None:
    assert png(charts["gamma"].standalone(), dpi=50).startswith(b"\x89PNG")


def test_an_unknown_figure_names_the_nearest(data: ReportData) -> None:
    with pytest.raises(ConfigError, match="heatmap"):
        draw("heatmaps", data)


def luminance(colour: str) -> float:
    """WCAG 2 relative luminance."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def themes() -> list[dict[str, str]]:
    """The colours of the stylesheet's light and dark theme."""
    import re

    from magicdec.reports.report import TEMPLATES

    blocks = re.findall(r":root \{([^}]*)\}", (TEMPLATES / "report.css").read_text())
    found = [
        dict(re.findall(r"(--[a-z-]+): (#[0-9a-f]{6})", block)) for block in blocks
    ]
    return [colours for colours in found[:2] if colours]


@pytest.mark.parametrize("theme", [0, 1])
def test_colours_have_contrast_in_both_themes(theme: int) -> None:
    """4.5:1 for text and 3:1 for marks, WCAG's levels AA."""
    colours = themes()[theme]
    assert set(CSS_VARIABLES.values()) <= set(colours)
    for text in ("--ink", "--muted", "--blue"):
        for ground in ("--paper", "--surface"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for series in SERIES:
        assert contrast(colours[CSS_VARIABLES[series]], colours["--paper"]) >= 3.0, (
            series
        )
        assert (
            contrast(colours[CSS_VARIABLES[series]], colours["--on-colour"]) >= 3.0
        ), series


def load(rate: float, policy: str, *, overloaded: bool = False) -> TrafficLoad:
    times = Percentiles(mean=rate / 10, p50=rate / 12, p95=rate / 8, p99=rate / 6)
    seen = None if overloaded else times
    return TrafficLoad(
        draft="none" if policy == "off" else "eagle3", draft_method="none" if policy == "off" else "eagle3",
        draft_budget=None, gamma=0 if policy == "off" else 3, policy=policy, tp_size=4, num_replicas=2, rate_per_s=rate,
        overloaded=overloaded, within_limits=rate <= 4, ttft=seen, tpot=seen, request=seen,
        goodput_per_s=0.0 if overloaded else rate, output_tokens_per_s=100 * rate, preemptions=0, mean_batch=3 * rate,
        mean_waiting=0, kv_share=0.2, analytic_rate_per_s=5, highest_rate_per_s=4 if policy == "off" else 5,
    )  # fmt: skip


def traffic() -> Traffic:
    policies = ("off", "by batch")
    curves = [
        load(rate, policy, overloaded=rate > 5)
        for policy in policies
        for rate in (1.0, 4.0, 6.0)
    ]
    return Traffic(
        rate_per_s=4, num_requests=100, best=load(4.0, "by batch"), autoregressive=load(4.0, "off"),
        speculative=load(4.0, "by batch"), curves=curves, notes=[],
    )  # fmt: skip


def test_a_plan_for_a_rate_draws_what_users_see_as_it_rises() -> None:
    """Values in the tables; an overload has a row and no mark for its percentiles."""
    request = msgspec.structs.replace(plan().request, ttft_p95_s=0.6, tpot_p95_s=None)
    drawn = {
        c.name: c
        for c in draw_all(
            ReportData.from_records([], plan(traffic=traffic(), request=request))
        )
    }
    seen = drawn["traffic"].table
    assert [row[:2] for row in seen.rows] == [
        (r, n) for n in NAMES[:2] for r in (1.0, 4.0, 6.0)
    ]
    assert seen.rows[1][2:5] == (4 / 12, 4 / 8, 4 / 6)
    assert seen.rows[2][2:] == (None,) * 6
    assert len(drawn["traffic"].tips) == 2 * 2 * 2
    assert drawn["traffic"].title.startswith(
        "Serve 4 requests/s on 8 devices (2 replicas, tp 4) with EAGLE-3, gamma by batch; with no draft"
    )


NAMES = ("no draft", "EAGLE-3, gamma by batch")


@pytest.mark.parametrize("name", FIGURES)
def test_title_legends_and_axis_labels_lie_inside_the_figure_and_apart(
    name: str, charts: dict[str, Chart]
) -> None:
    """Figures saved by themselves carry their finding as a title, which nothing covers or cuts off."""
    lies_inside_and_apart(charts[name])


def test_so_they_do_in_the_figures_of_what_was_measured() -> None:
    for chart in draw_all(
        ReportData.from_records(read_many([RESULTS / "grid-2-cores.jsonl"]))
    ):
        lies_inside_and_apart(chart)


def lies_inside_and_apart(chart: Chart) -> None:
    figure = chart.standalone()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    title = figure._suptitle  # type: ignore[attr-defined]  # matplotlib has no public way to its extent
    legends = [each for axes in figure.axes if (each := axes.get_legend()) is not None]
    labels = [
        axis.label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        if axis.label.get_text()
    ]
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
