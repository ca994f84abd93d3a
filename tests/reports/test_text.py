"""Tables as text."""

from __future__ import annotations

from magicdec.reports.text import table_lines


def test_names_between_colons_stay_names() -> None:
    """They are no emoji's."""
    lines = table_lines(["model"], [["runs/my:warning:model"]])
    assert "my:warning:model" in "\n".join(lines)
