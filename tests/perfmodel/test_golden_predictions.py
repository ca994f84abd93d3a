"""Answers of the planner that change only on purpose."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "golden_predictions.py"))


def test_predictions_change_only_on_purpose() -> None:
    """If they were meant to: python scripts/golden_predictions.py, and look at the difference."""
    recorded = json.loads((ROOT / "tests" / "data" / "golden_predictions.json").read_text(encoding="utf-8"))
    present = SCRIPT["predictions"]()
    assert present.keys() == recorded.keys()
    for name, row in recorded.items():
        for key, value in row.items():
            expected = pytest.approx(value, rel=1e-3) if isinstance(value, float) else value
            assert present[name][key] == expected, (name, key)
