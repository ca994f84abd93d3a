"""Writes docs/accuracy.md and its figure from evidence/data: its lanes and calibration, the tables that these are
made of, the tables of traffic, and the paper's rows.

    python -m evidence.accuracy_page
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from evidence import DATA
from evidence.beliefs import validate_beliefs
from evidence.calibration import CalibrationRow, published_calibration
from evidence.lane_table import PAIR_TABLES, SERVER_TABLES
from evidence.serving import ServingRow, predict_rows
from evidence.traffic import validate_traffic
from magicdec.perfmodel.lanes import (
    ANY,
    FIGURES,
    LANES,
    LEAST_SOURCES,
    Figure,
    Lane,
    LaneRow,
    read_lanes,
)
from magicdec.reports.figures.chart import PAPER, SERIES, Chart, plain_ticks, raw_svg
from magicdec.validate.pair_errors import tokens_of_cells
from magicdec.validate.pair_prediction import predict_pairs
from magicdec.validate.pairs import PairRow
from magicdec.validate.published_speedups import validate_published
from magicdec.validate.rows import read_rows

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "accuracy.md"
PICTURE = ROOT / "docs" / "accuracy.svg"
TRAFFIC = sorted((DATA / "traffic").glob("*.csv"))
ERROR_BINS = (
    ("within 5 %", 0.05),
    ("5 to 10 %", 0.1),
    ("10 to 20 %", 0.2),
    ("over 20 %", np.inf),
)
BIN_COLOURS = (SERIES[2], SERIES[0], SERIES[4], SERIES[1])
BIN_MARKERS = ("o", "^", "s", "D")
EVERYTHING = Lane(ANY, ANY, ANY, ANY, ANY)
BELIEVED, GIVEN = FIGURES[3], FIGURES[2]
INSIDE = "inside the 90 % interval"
EXPLANATION = f"""## How to read it

A *lane* is an engine and a range of its versions, a sort of draft, a kind of model (dense, mixture of experts,
hybrid), and whether the device's own kernels were timed or another's are borrowed; every row of a plan names its
lane. *Off* is the median absolute error, *bias* the median of the signed errors, *inside* the share of rows within
the 90 % interval, whose width comes from the other sources. A lane with fewer than {LEAST_SOURCES} sources takes the
width of the next wider lane that has as many, unless its own rows need more; in a plan it is no narrower than its
engine's profile states (`errors.speedup_relative_error`). The tables here are by engine and sort of draft;
`magicdec/specs/data/lanes.csv` has every lane, with its width.

Times per token are a server's total time over tokens, prompts inside, where a source states its rate; a request's
time between tokens where it states that. Speedups are ratios of the same figure with and without the draft.

*In sample*: the constants of steps in vLLM, SGLang and TensorRT-LLM were fitted to a part of these servers, so their
steps without a draft, and the speedups of trained heads in vLLM, are partly in sample;
[validation.md](validation.md#servers-with-and-without-speculation) has the errors with each source left out of the
fit. *Acceptance believed* is a plan's answer before anything is measured: what a pair's source published of its draft
is left out of the belief, its servers out of its lane's width, and *inside* is between the ends that a plan would
print.
"""
CALIBRATION_TEXT = """A pair pays where its measured speedup is above 1. Each source counts the same; the last column is
a bootstrap over sources, wide since there are ten. The Brier score is the mean of (P - outcome)², 0
at best. Of 776 rows of published acceptance 93 % lie inside, each text and its source left out
(`python -m evidence acceptance --leave-out text`).
"""
TRAFFIC_TEXT = """vLLM on H100 (`python -m evidence traffic evidence/data/traffic/*.csv`). The closed loops gave
three of the engine's constants ([traffic.md](traffic.md#how-right)); one server close to saturation sets the mean
errors at a rate.
"""
END = """
## What is not here

`python -m evidence lanes` leaves out and counts rows that state no tokens per step, no baseline or no device, and
those whose source says that arms differ in more than the draft. Sources that state a ratio alone are judged by it.
Kernels alone and our own grids are in [validation.md](validation.md).
"""


def percent(value: float | None) -> str:
    return "" if value is None else f"{100.0 * value:.1f} %"


def table(rows: list[LaneRow]) -> list[str]:
    lines = [
        "| lane | rows | sources | off | bias | inside |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            row.lane.label,
            str(row.rows),
            str(row.sources),
            percent(row.median_error),
            percent(row.bias),
            percent(row.coverage),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


BELIEVED_KINDS = {
    "snapkv": "SnapKV", "streamingllm": "StreamingLLM", "topk": "top-k",
    "self": "all self-drafts", "long-document": "all drafts on long documents",
}  # fmt: skip
LEFT_OUT = ("source", "text", "nothing")


def sparse_lines() -> list[str]:
    """How far beliefs about sparse self-drafts are off, by method and what is left out."""
    lines = [
        "| drafts | rows | source left out: off, inside | text and source left out | given themselves |",
        "|---|---|---|---|---|",
    ]
    of_groups = []
    for left_out in LEFT_OUT:
        found = validate_beliefs(leave_out=left_out)
        of_groups.append({group.group: group for group in found.groups})
    for key, name in BELIEVED_KINDS.items():
        cells = [name, str(of_groups[0][key].rows)]
        for groups in of_groups:
            group = groups[key]
            cells.append(f"{percent(group.median_error)}, {percent(group.coverage)}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def published_lines(acceptance: Literal["profile", "believed"]) -> list[str]:
    lines = [
        "| compared | rows | not fitted | mean error | of rows not fitted | inside | lost by the plan's gamma |",
        "|---|---|---|---|---|---|---|",
    ]
    for group in validate_published(acceptance=acceptance)["groups"]:
        cells = [
            group["name"],
            str(group["rows"]),
            str(group["rows_unfitted"]),
            percent(group["speedup_mape"]),
            percent(group["speedup_mape_unfitted"]),
            percent(group["speedup_coverage"]),
            percent(group["gamma_regret"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def lane_lines(figure: Figure) -> list[str]:
    """Each engine and sort of draft, over all versions, models and devices; one engine alone stands for all of them."""
    rows = {}
    for row in read_lanes(LANES).values():
        lane = row.lane
        if row.figure == figure and lane.versions == lane.model == lane.device == ANY:
            rows[lane.label] = row
    counts = Counter((row.lane.draft, row.rows) for row in rows.values())
    return table(
        [
            row
            for row in rows.values()
            if row.lane.engine != ANY
            or row.lane.draft == ANY
            or counts[row.lane.draft, row.rows] == 1
        ]
    )


def calibration_lines() -> list[str]:
    lines = [
        "| acceptance | | rows | sources | stated | found | 90 % over sources |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in published_calibration():
        is_score = row.of.startswith("Brier")
        ends = ""
        if row.low is not None and row.high is not None:
            ends = f"{figure_of(row.low, is_score)} to {figure_of(row.high, is_score)}"
        stated = "" if row.stated is None else figure_of(row.stated, is_score)
        acceptance = "believed" if row.figure == BELIEVED else "given"
        cells = [
            acceptance,
            row.of,
            str(row.rows),
            str(row.sources),
            stated,
            figure_of(row.found, is_score),
            ends,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def figure_of(value: float, is_score: bool) -> str:
    return f"{value:.3f}" if is_score else f"{100.0 * value:.0f} %"


def share_of(row: CalibrationRow) -> str:
    """A share and its ends: "91 % (82 to 98 over sources)"."""
    assert row.low is not None
    assert row.high is not None
    ends = f"{100.0 * row.low:.0f} to {100.0 * row.high:.0f} over sources"
    return f"{100.0 * row.found:.0f} % ({ends})"


def calibration_at(figure: Figure, of: str) -> CalibrationRow:
    return next(
        row for row in published_calibration() if (row.figure, row.of) == (figure, of)
    )


def summary() -> list[str]:
    """The page in five lines, end to end first; README has them too."""
    lanes = read_lanes(LANES)
    rows = {figure: lanes[EVERYTHING, figure] for figure in FIGURES}
    believed, given, alone = rows[BELIEVED], rows[GIVEN], rows[FIGURES[0]]
    inside = calibration_at(GIVEN, INSIDE)
    inside_believed = calibration_at(BELIEVED, INSIDE)
    score = calibration_at(BELIEVED, "Brier score")
    of_share = calibration_at(BELIEVED, "Brier score of the share that pays")
    sure = calibration_at(BELIEVED, "pays, P above 90 %")
    errors = [group["speedup_mape"] for group in validate_published()["groups"]]
    count = sum(group["rows"] for group in validate_published()["groups"])
    return [
        f"- End to end, the acceptance believed: {believed.rows} pairs of {believed.sources} sources err by "
        f"{percent(believed.median_error)} (median), each answered without what its own source told; "
        f"{share_of(inside_believed)} of the 90 % intervals hold.",
        f"- Does it pay, before anything is measured: Brier score {score.found:.3f} ({of_share.found:.3f} by the bare "
        f"share); where {figure_of(sure.stated or 0.0, False)} is said, {figure_of(sure.found, False)} pay.",
        f"- At the acceptance that each server measured: {given.rows} pairs of {given.sources} sources err by "
        f"{percent(given.median_error)}; {share_of(inside)} of the 90 % intervals hold, by widths of "
        f"the other sources.",
        f"- A step without a draft: {alone.rows} servers of {alone.sources} sources, {percent(alone.median_error)}.",
        f"- The paper's own {count} rows err by {100.0 * min(errors):.0f} to {100.0 * max(errors):.0f} %.",
    ]


def traffic_lines() -> list[str]:
    lines = [
        "| figure | rows | median error | mean error | bias |",
        "|---|---|---|---|---|",
    ]
    for group in validate_traffic(TRAFFIC)["groups"]:
        if group.get("median_error") is not None:
            cells = [
                group["name"].replace("/", ", ").replace("_", " "),
                str(group["rows"]),
                percent(group["median_error"]),
                percent(group["mape"]),
                percent(group["bias"]),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


Measured = tuple[float, float, float]
"""Context, users and relative error of one measured figure."""


def servers() -> list[Measured]:
    """Times of servers without a draft."""
    rows, _ = read_rows(SERVER_TABLES, ServingRow)
    kept = [
        row
        for row in rows
        if not (row.is_left_out or row.is_prefix_cached or row.is_capped)
        and row.metric != "speedup"
    ]
    points = []
    for row, predicted in zip(kept, predict_rows(kept), strict=True):
        context = row.context or row.prompt_len + row.output_len / 2.0
        points.append(
            (
                float(context),
                float(row.batch_size),
                float(predicted / row.measured - 1.0),
            )
        )
    return points


def pairs() -> list[Measured]:
    """Speedups at the measured acceptance."""
    rows, _ = read_rows(PAIR_TABLES, PairRow)
    predicted = predict_pairs(rows, tokens_of_cells(rows))
    points = []
    for row, speedup in zip(rows, predicted.speedup, strict=True):
        if np.isfinite(speedup):
            context = row.prompt_len + row.output_len / 2.0
            points.append((context, row.users, float(speedup / row.speedup - 1.0)))
    return points


def picture() -> str:
    """Where it was measured, context by batch, coloured by how far off it is."""
    of_tables = {"Time per token without a draft": servers(), "Speedup": pairs()}
    chart = Chart("accuracy", height=5.6, width=6.4, rows=2, sharex=True)
    for axes, (name, points) in zip(chart.axes, of_tables.items(), strict=True):
        errors = np.abs([error for _, _, error in points])
        least = 0.0
        for (label, most), colour, marker in zip(
            ERROR_BINS, BIN_COLOURS, BIN_MARKERS, strict=True
        ):
            chosen = np.flatnonzero((errors >= least) & (errors < most))
            least = most
            look: dict[str, Any] = {
                "color": colour,
                "marker": marker,
                "ls": "none",
                "alpha": 0.8,
                "mec": PAPER,
                "mew": 0.4,
            }
            contexts = [points[place][0] for place in chosen]
            users = [points[place][1] for place in chosen]
            axes.plot(contexts, users, label=f"{label}: {len(chosen)}", **look)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylabel("Users at once")
        axes.set_title(f"{name}, {len(points)} rows", loc="left")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        plain_ticks(axes.yaxis, [1, 4, 16, 64, 256, 1024])
        plain_ticks(axes.xaxis, [256, 2048, 16_384, 131_072])
    chart.axes[-1].set_xlabel("Tokens in the cache")
    chart.told(
        title="Where servers were measured, and how far off predictions are",
        caption="",
        table="",
        columns=(),
    )
    return raw_svg(chart.standalone(), background=PAPER)


def page() -> str:
    lines = [
        "# Accuracy\n",
        "How far predictions are off where somebody measured. The rows lie in",
        "[evidence/data](../evidence/data/README.md);",
        "`python -m evidence lanes -o magicdec/specs/data/lanes.csv --calibration evidence/data/calibration.csv` makes",
        "the lanes of them, which plans read, and `python -m evidence.accuracy_page` this page.\n",
        *summary(),
        "",
        EXPLANATION,
        "## End to end, the acceptance believed\n",
        *lane_lines(BELIEVED),
        "\n## Is a probability what it says?\n",
        CALIBRATION_TEXT,
        *calibration_lines(),
    ]
    for figure in FIGURES[-2::-1]:
        lines.append(f"\n## {figure.capitalize()}\n")
        lines += lane_lines(figure)
    lines += [
        "\n## Where it was measured\n",
        "![Context by users at once of the measured servers and pairs, coloured by error.](accuracy.svg)\n",
        "## Percentiles under load\n",
        TRAFFIC_TEXT,
        *traffic_lines(),
        "\n## The paper's own measurements\n",
        "MagicDec on 8 A100 in its own runtime (`magicdec validate published`):\n",
        *published_lines("profile"),
        "\nAsked by model, device, context, batch, method and budget alone (`--acceptance believed`; half of the",
        "speedups told the belief, *not fitted* counts the profiles'):\n",
        *published_lines("believed"),
        "\n## Acceptance of sparse self-drafts\n",
        "Tokens per step, median error and share inside (`python -m evidence acceptance --leave-out source`, `text`,",
        "`nothing`). SnapKV on PG-19 at 8k and 12k accepts nearly all, on text that repeats itself: no other source",
        "tells that.\n",
        *sparse_lines(),
    ]
    return "\n".join(lines) + "\n" + END


if __name__ == "__main__":
    PICTURE.write_text(picture())
    PAGE.write_text(page())
