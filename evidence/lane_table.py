"""All tables of measured servers, compared and summed up by lane: the widths that plans state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from evidence import DATA
from evidence.calibration import CalibrationRow, calibration_of
from evidence.lanes import JudgedFigure, Lanes
from evidence.pairs import judged_beliefs, judged_pairs, predict_pairs
from evidence.serving import ServingRow, judged_servers
from magicdec.files import rows_to_csv, write_atomic
from magicdec.perfmodel.lanes import LaneRow
from magicdec.validate.pair_errors import tokens_of_cells
from magicdec.validate.pairs import PairRow
from magicdec.validate.rows import read_lines, read_rows

PAIR_TABLES = [
    DATA / "pairs" / f"{name}.csv"
    for name in ("pairs", "pairs_2", "pairs_3", "pairs_4", "lookups")
]
SERVER_TABLES = sorted((DATA / "servers").glob("*.csv*"))
TABLES = [*PAIR_TABLES, *SERVER_TABLES]
"""The tables behind the widths of plans and the figures of docs/accuracy.md."""


def judged_of(paths: Sequence[Path]) -> tuple[list[JudgedFigure], list[str]]:
    """The figures of every table's servers, and one line for each row that cannot be used. A table
    with a column `baseline` holds pairs of servers, any other single ones."""
    judged: list[JudgedFigure] = []
    refused: list[str] = []
    every_pair: list[PairRow] = []
    for path in paths:
        if "baseline" in read_lines(path)[0]:
            pairs, lines = read_rows([path], PairRow)
            judged += judged_pairs(pairs, predict_pairs(pairs, tokens_of_cells(pairs)))
            every_pair += pairs
            for pair in pairs:
                if pair.tokens_per_step is None:
                    lines.append(f"{pair.where}: no measured tokens per step")
        else:
            rows, lines = read_rows([path], ServingRow)
            judged += judged_servers(rows)
        refused += lines
    judged += judged_beliefs(every_pair, Lanes(judged))
    return judged, refused


def validate_lanes(
    paths: Sequence[Path],
    *,
    output: Path | None = None,
    calibration_output: Path | None = None,
) -> dict[str, Any]:
    """{"groups": [one per lane and figure], "refused": [one line per row that is not judged]};
    `output` gets the table that the package ships, and `calibration_output` the calibration of the
    speedups.

    Raises ConfigError for a file that cannot be read, lacks a column or has no usable row."""
    judged, refused = judged_of(paths)
    rows = Lanes(judged).rows()
    calibration = calibration_of(judged)
    if output is not None:
        documents = map(msgspec.to_builtins, rows)
        write_atomic(output, rows_to_csv(documents, LaneRow.__struct_fields__))
    if calibration_output is not None:
        documents = map(msgspec.to_builtins, calibration)
        columns = CalibrationRow.__struct_fields__
        write_atomic(calibration_output, rows_to_csv(documents, columns))
    groups = []
    for figure in calibration:
        name = {"name": f"{figure.figure}: {figure.of}"}
        groups.append(name | msgspec.to_builtins(figure))
    for row in rows:
        name = {"name": f"{row.figure}: {row.lane.label}"}
        groups.append(name | msgspec.to_builtins(row))
    return {"groups": groups, "refused": refused}
