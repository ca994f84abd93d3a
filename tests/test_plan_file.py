"""A plan's file says what the plan says: reading and writing it again changes no byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import magicdec
from magicdec.errors import ConfigError, MagicdecError
from magicdec.schema.plan import load_plan, plan_of
from tests.same import assert_read_back

QUESTIONS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(
            ["llama-3.1-8b", "qwen3-30b-a3b", "gemma-3-27b", "deepseek-v3"]
        ),
        "hardware": st.sampled_from(
            ["h100-sxm-80gb", "a100-sxm-80gb", "l4-24gb", "h200-141gb"]
        ),
        "context": st.integers(1, 100_000),
    },
    optional={
        "batch": st.integers(1, 300),
        "gen_len": st.integers(0, 2000),
        "gpus": st.sampled_from([1, 8, 16]),
        "tpot_ms": st.integers(5, 200),
        "price": st.integers(1, 9),
        "draft": st.sampled_from(["none", "ngram", "self"]),
    },
)


@settings(
    max_examples=3,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(question=QUESTIONS)
def test_a_plan_read_and_written_again_is_the_same_file(
    question: dict[str, Any], tmp_path: Path
) -> None:
    try:
        written = magicdec.plan(**question).to_json()
    except MagicdecError:
        return
    file = tmp_path / "plan.json"
    file.write_text(written)
    assert load_plan(file).to_json() == written


def test_a_document_is_small_and_read_back_whole() -> None:
    plan = magicdec.plan()
    assert len(plan.to_json()) < 150_000
    assert_read_back(plan)


@pytest.mark.slow
def test_a_document_of_many_cases_is_small() -> None:
    plan = magicdec.plan(
        hardware=["h100", "h200"],
        context=["2k", "8k", "32k"],
        task="chat=70,code=30",
        batch=[1, 8, 32, 128],
        gen_len=512,
        plugin=True,
    )
    assert len(plan.rows) > 1000
    document = plan.to_json()
    assert len(document) < 1_000_000
    assert plan_of(json.loads(document)).to_json() == document


@pytest.fixture(scope="module", name="document")
def document_of_one_case() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        magicdec.plan(hardware="h100", batch=1).to_json()
    )
    return document


@pytest.mark.parametrize(
    "damage",
    [
        {"rows": 3},
        {"rows": [{"same": {}}]},
        {"rows": [{"same": {}, "each": {"gamma": [1], "speedup": [1.0, 2.0]}}]},
        {"rows": [{"same": {}, "each": {"gamma": {"values": [1], "places": [7]}}}]},
        {"candidates": [-1]},
        {"candidates": [10**9]},
        {"candidates": ["first"]},
        {"other_cases": [3]},
    ],
)
def test_damaged_rows_are_refused(
    damage: dict[str, Any], document: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="is not a whole plan"):
        plan_of(document | damage)


def test_a_whole_number_in_a_field_of_floats_is_written_as_it_is_read() -> None:
    plan = magicdec.plan(hardware="h100-sxm-80gb", tp=1, context=1024, batch=4, price=2)
    assert '"price_per_hour_usd": 2.0' in plan.to_json()
