"""Golden values: one number per request and term, for tests/perfmodel/test_golden.py.

The number of a term with the values v is its weighted mean logarithm Σ w·log|v| / Σ w, so a change of a value by some
factor moves it by that factor's logarithm, times the value's share. Values of 0 and texts count with their kinds.
"""

from __future__ import annotations

import json
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from proof_answers import Answer, answer
from proof_requests import CORNERS, draw

FILE = Path(__file__).resolve().parents[1] / "data" / "golden.npz"
SEED = 1
NUMBER = 240
FREE_TEXTS = (
    "refusal",
    "notes",
    "key_notes",
    "traffic.notes",
    "needs_acceptance.reason",
    "candidates.acceptance_source",
    "request.",
    "context_is_default",
    "model",
    "engine",
)
"""Terms that are words for people (of notes the number counts), or repeat the request."""
REPEATED = (
    "autoregressive_rows.", "pareto.", "best_by_batch.", "other_cases.pareto.", "other_cases.best_by_batch.", "layouts."
)  # fmt: skip
"""Rows that are among the candidates too: their numbers hold nothing new."""


NOT_COMPARED = (
    "schema_version",
    "acceptance_source",
    "marks",
    "marks.length",
    "lookup_min",
    "lookup_max",
)
"""Ends of terms that are no predictions."""


@cache
def golden_requests() -> list[dict[str, Any]]:
    return [*draw(NUMBER, seed=SEED), *CORNERS]


def digests(found: Answer) -> dict[str, float]:
    """One number per term."""
    return {
        term: _digest(values) for term, values in found.items() if _is_compared(term)
    }


def _is_compared(term: str) -> bool:
    if term.endswith(NOT_COMPARED):
        return False
    return not term.startswith((*FREE_TEXTS, *REPEATED)) or term.endswith(
        "notes.length"
    )


def _digest(values: list[Any]) -> float:
    logs = np.asarray([_logarithm(each) for each in values])
    weights = 1.0 + np.modf(np.arange(len(logs)) * 0.6180339887498949)[0]
    return float(np.sum(weights * logs) / np.sum(weights)) if len(logs) else 0.0


def _logarithm(value: Any) -> float:
    if isinstance(value, list | tuple):
        return _digest(list(value))
    if not isinstance(value, int | float | None):
        return zlib.crc32(str(value).encode()) / 2**32
    if value is None or not np.isfinite(value):
        return -777.0
    return float(np.log(abs(value))) if abs(value) > 1e-300 else -700.0


def update_golden() -> None:
    with np.errstate(all="ignore"):
        found = [digests(answer(each)) for each in golden_requests()]
    terms = sorted({term for each in found for term in each})
    place = {term: number for number, term in enumerate(terms)}
    table = np.full((len(found), len(terms)), np.nan)
    for row, each in zip(table, found, strict=True):
        for term, value in each.items():
            row[place[term]] = value
    np.savez_compressed(
        FILE,
        table=table,
        terms=np.frombuffer(json.dumps(terms).encode(), dtype=np.uint8),
    )
    print(
        f"{FILE}: {np.count_nonzero(~np.isnan(table))} values, {FILE.stat().st_size} bytes"
    )


@cache
def read_golden() -> list[dict[str, float]]:
    with np.load(FILE) as file:
        table, terms = file["table"], json.loads(file["terms"].tobytes())
    rows = [dict(zip(terms, row.tolist(), strict=True)) for row in table]
    return [
        {
            term: value
            for term, value in row.items()
            if not np.isnan(value) and _is_compared(term)
        }
        for row in rows
    ]
