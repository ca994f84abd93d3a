"""Documents that are equal but for the last digits of their numbers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from magicdec.schema.plan import Plan, plan_of


def assert_same(
    found: Any, expected: Any, where: str = "", *, rel: float = 1e-9
) -> None:
    """Equal documents, numbers to `rel`: threads of another library may add in another order."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_same(found[name], value, f"{where}.{name}", rel=rel)
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{place}]", rel=rel)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=rel), (where, found, expected)
    else:
        assert found == expected, (where, found, expected)


def assert_read_back(plan: Plan) -> None:
    """A plan's document says what the plan says, rows other than the choice's to five digits."""
    document = plan.to_json()
    again = plan_of(json.loads(document))
    assert again.to_json() == document
    for case, other in zip(plan.cases, again.cases, strict=True):
        assert other.choice == case.choice
        assert other.gamma_table == case.gamma_table
    assert_same(msgspec.to_builtins(again), msgspec.to_builtins(plan), rel=1e-4)
