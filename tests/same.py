"""Documents that are equal but for the last digits of their numbers."""

from __future__ import annotations

from typing import Any

import pytest


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Equal documents, numbers to 1e-9: threads of another library may add in another order."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_same(found[name], value, f"{where}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{place}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-9), (where, found, expected)
    else:
        assert found == expected, (where, found, expected)
