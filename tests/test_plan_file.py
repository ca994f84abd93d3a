"""A plan's file says what the plan says: reading and writing it again changes no byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import magicdec
from magicdec.errors import MagicdecError
from magicdec.schema.plan import load_plan

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
    max_examples=15,
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


def test_a_whole_number_in_a_field_of_floats_is_written_as_it_is_read() -> None:
    plan = magicdec.plan(hardware="h100-sxm-80gb", tp=1, context=1024, batch=4, price=2)
    assert '"price_per_hour_usd": 2.0' in plan.to_json()
