"""Writes docs/accuracy.md from the aggregates that ship (specs/data/lanes.csv) and from the paper's rows.

    python scripts/accuracy_page.py

`magicdec validate lanes FILES -o magicdec/specs/data/lanes.csv` makes the aggregates of tables of measured servers.
"""

from __future__ import annotations

from pathlib import Path

from magicdec.perfmodel.lanes import FIGURES, LEAST_SOURCES, LaneRow, shipped
from magicdec.validate.published_speedups import validate_published

PAGE = Path(__file__).resolve().parents[1] / "docs" / "accuracy.md"
INTRODUCTION = f"""# Accuracy

How far predictions are off where somebody measured, by kind of server. This page is made by `python
scripts/accuracy_page.py` from the aggregates that ship with the package; `magicdec validate lanes FILES` makes them
of tables of measured servers.

A *lane* is an engine and a range of its versions, a sort of draft, a kind of model (dense, mixture of experts,
hybrid), and whether the device's own kernels were timed or another's are borrowed. Every row of a plan names its
lane. *Off* is the median absolute error, *bias* the median of the signed errors, *inside* the share of rows within
the 90 % interval whose width comes from the other sources: no source is judged by a width that it set. A lane with
fewer than {LEAST_SOURCES} sources takes the width of the next wider lane that has as many, where its own rows do
not need more; in a plan it is no narrower than what its engine's profile states (`errors.speedup_relative_error`).

What is compared is predicted at the acceptance that each server measured. A *step without a draft* is the time of a
token: of the whole server where a source states its rate (total time over tokens, prompts inside), between tokens
where it states that. The constants of steps in vLLM, SGLang and TensorRT-LLM were fitted to a part of these
servers, so their steps without a draft, and the speedups of trained heads in vLLM, are partly in sample; with each
source left out of the fit, errors are in [validation.md](validation.md#servers-with-and-without-speculation).
*Acceptance believed* is the answer of a plan before anything is measured, of every pair, whether it states its
tokens per step or not; *inside* is the plan's own interval there.
"""
END = """
## What is not here

Rows that state no tokens per step, no baseline or no device, and those whose source says that arms differ in more
than the draft, are left out and counted by `magicdec validate lanes`. The belief's own errors, kernels alone,
percentiles under arrivals and our own grids are in [validation.md](validation.md) too.
"""


def percent(value: float | None) -> str:
    return "" if value is None else f"{100.0 * value:.1f} %"


def table(rows: list[LaneRow]) -> list[str]:
    lines = [
        "| lane | rows | sources | off | bias | inside | 1.645 widths | width of |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        is_of_lane = row.figure != FIGURES[-1]
        owner = "" if row.width_of == row.lane.label else row.width_of
        cells = [
            row.lane.label,
            str(row.rows),
            str(row.sources),
            percent(row.median_error),
            percent(row.bias),
            percent(row.coverage),
            percent(1.645 * row.width) if is_of_lane else "",
            owner if is_of_lane else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def published_lines() -> list[str]:
    lines = [
        "| compared | rows | not fitted | mean error | of rows not fitted | inside | lost by the plan's gamma |",
        "|---|---|---|---|---|---|---|",
    ]
    for group in validate_published()["groups"]:
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


def page() -> str:
    lines = [INTRODUCTION, "## The paper's own measurements\n"]
    lines += [
        "MagicDec on 8 A100 in its own runtime (`magicdec validate published`):\n"
    ]
    lines += published_lines()
    for figure in FIGURES[::-1]:
        of_figure = [row for row in shipped().values() if row.figure == figure]
        lines.append(f"\n## {figure.capitalize()}\n")
        lines += table(of_figure)
    return "\n".join(lines) + "\n" + END


if __name__ == "__main__":
    PAGE.write_text(page())
