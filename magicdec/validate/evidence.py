"""The evidence that ships: all tables of measured servers, compared and summed up by lane."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from magicdec.files import rows_to_csv, write_atomic
from magicdec.perfmodel import LaneRow
from magicdec.validate.calibration import CALIBRATION, CalibrationRow, calibration_of
from magicdec.validate.lanes import JudgedFigure, Lanes
from magicdec.validate.pairs import (
    PairRow,
    judged_beliefs,
    judged_pairs,
    predict_pairs,
    tokens_of_cells,
)
from magicdec.validate.rows import read_lines, read_rows
from magicdec.validate.serving import ServingRow, judged_servers


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
    paths: Sequence[Path], *, output: Path | None = None
) -> dict[str, Any]:
    """{"groups": [one per lane and figure], "refused": [one line per row that is not judged]};
    `output` gets the table that the package ships, and `calibration.csv` beside it the calibration of
    the speedups.

    Raises ConfigError for a file that cannot be read, lacks a column or has no usable row."""
    judged, refused = judged_of(paths)
    rows = Lanes(judged).rows()
    calibration = calibration_of(judged)
    if output is not None:
        documents = map(msgspec.to_builtins, rows)
        write_atomic(output, rows_to_csv(documents, LaneRow.__struct_fields__))
        write_atomic(
            output.with_name(CALIBRATION.name),
            rows_to_csv(
                map(msgspec.to_builtins, calibration), CalibrationRow.__struct_fields__
            ),
        )
    groups = []
    for figure in calibration:
        name = {"name": f"{figure.figure}: {figure.of}"}
        groups.append(name | msgspec.to_builtins(figure))
    for row in rows:
        name = {"name": f"{row.figure}: {row.lane.label}"}
        groups.append(name | msgspec.to_builtins(row))
    return {"groups": groups, "refused": refused}
