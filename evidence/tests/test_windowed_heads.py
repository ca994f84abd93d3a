"""Heads whose cache is a window, predicted from their own rates at short contexts."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from evidence.beliefs import validate_beliefs
from magicdec.errors import ConfigError

COLUMNS = (
    "model",
    "draft_kind",
    "draft_name",
    "task",
    "task_class",
    "gamma",
    "shape",
    "mean_acceptance_length",
    "context_len",
    "window",
    "trained_length",
    "source",
)
SPECULATORS_684 = {2000: 1.584, 8000: 1.517, 10000: 1.541, 16000: 1.557, 20000: 1.537}
"""Tokens per step of Qwen3-8B's EAGLE-3 head that was trained with a window, by context."""
SPEC_EXTEND = {1024: 3.214, 2048: 3.116, 4096: 2.901, 8192: 2.876, 16384: 2.851}
"""EAGLE-3 of Llama-3.1-8B over 2,048 tokens of its cache, GovReport: accepted per step and one."""


TRAINED_SO = "a head (trained with a sliding window)"


def table(path: Path, heads: dict[tuple[str, str], dict[int, float]]) -> Path:
    """A published table of heads' rates by context, each under its name and its window."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for (draft, window), rows in heads.items():
            for context, tokens in rows.items():
                shown = (
                    "Some-Model-8B",
                    "eagle3",
                    draft,
                    "its task",
                    "summarisation",
                    3,
                    "chain",
                )
                writer.writerow([*shown, tokens, context, window, 2048, "its source"])
    return path


def test_a_head_is_flat_beyond_its_window(tmp_path: Path) -> None:
    """Its own rates up to 2k tell those of longer contexts, within 12 % in the median. A head with
    its whole cache has no such line.
    """
    path = table(
        tmp_path / "rates.csv",
        {
            (TRAINED_SO, ""): SPECULATORS_684,
            ("another head", "2048"): SPEC_EXTEND,
            ("a whole one", ""): {2048: 3.1, 8192: 1.6},
        },
    )
    found = validate_beliefs([path], leave_out="long-context")
    lines = {each.group: each for each in found.groups if each.by == "window"}
    assert found.rows == 8
    assert {name.rsplit("|")[-1]: each.rows for name, each in lines.items()} == {
        "all checkpoints": 7,
        "aheadtrainedwithaslidingwindow": 4,
        "anotherhead": 3,
    }
    for line in lines.values():
        assert line.median_error <= 0.12


def test_long_contexts_alone_are_refused(tmp_path: Path) -> None:
    """Without a rate at a short context nothing is given, so nothing is tested."""
    path = table(tmp_path / "rates.csv", {("a head", "2048"): {8192: 2.9}})
    with pytest.raises(ConfigError, match="no rate beyond 2048 tokens"):
        validate_beliefs([path], leave_out="long-context")
