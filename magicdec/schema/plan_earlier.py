"""Plan documents of schema 3, read as those of schema 4."""

from __future__ import annotations

from typing import Any

from magicdec.errors import ConfigError
from magicdec.schema.gamma_table import BatchBand, TableGamma
from magicdec.schema.row import PLUGIN, nested

ROW_LISTS = ("best_by_batch", "pareto", "layouts")


def from_earlier(document: dict[str, Any]) -> dict[str, Any]:
    """A document of schema 4 from one of schema 3, whose candidates were flat and whose answer was
    spread over `best`, `autoregressive` and `best_autoregressive`. Damaged parts are left as they
    are, for the reader to name.
    """
    whole: dict[str, Any] = _case(document)
    whole["other_cases"] = [_case(case) for case in _items(document.get("other_cases"))]
    for name in ("autoregressive_rows", "candidates"):
        if name in document:
            whole[name] = _rows(document[name])
    return whole


def _case(case: Any) -> Any:
    if not isinstance(case, dict):
        return case
    moved = dict(case)
    best = moved.pop("best", None)
    without_draft = moved.pop("autoregressive", None)
    best_without_draft = moved.pop("best_autoregressive", None)
    for name in ROW_LISTS:
        if name in moved:
            moved[name] = _rows(moved[name])
    if best is not None:
        drafts = isinstance(best, dict) and best.get("gamma")
        moved["choice"] = {
            "row": _row(best),
            "outcome": "speculate" if drafts else "no gain",
            "without_draft": _row(without_draft),
            "best_without_draft": _row(best_without_draft),
            "gammas": _bands(best, moved.get("gamma_table")),
        }
    return moved


def _rows(rows: Any) -> Any:
    if not isinstance(rows, list):
        return rows
    return [_row(row) for row in rows]


def _row(row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    document = nested(row)
    document.setdefault("drafting", {})["needs_plugin"] = PLUGIN in (
        row.get("marks") or []
    )
    return document


def _items(values: Any) -> list[Any]:
    return values if isinstance(values, list) else []


def _bands(best: Any, table: Any) -> list[BatchBand]:
    """Gamma by batch: the bands of the document's table up to the best batch."""
    try:
        gammas = table.get("gamma_set_up") or table["gamma"]
        policy = TableGamma(
            batch_sizes=tuple(table["batch_sizes"]),
            context_lens=tuple(table["context_lens"]),
            gammas=tuple(tuple(row) for row in gammas),
        )
        return [*policy.bands(best["context_len"], most=best["batch_size"])]
    except (AttributeError, KeyError, TypeError, ConfigError):
        return []  # a damaged table or row, which the reader names
