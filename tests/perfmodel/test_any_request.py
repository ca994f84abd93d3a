"""Whatever is asked: a document of finite numbers, none below zero, or one line that says what was wrong."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.errors import ConfigError, MagicdecError
from magicdec.perfmodel.kernels.profile import hardware_names
from magicdec.perfmodel.planner import PlanRequest, make_plan
from magicdec.specs.catalog import model_names

NUMBERS = st.one_of(
    st.sampled_from(
        [0, -1, 1, 3, 8, 10**6, 10**12, 0.5, 1e-9, math.nan, math.inf, -math.inf]
    ),
    st.integers(1, 512),
)
DTYPES = st.sampled_from(["bf16", "fp8", "int8", "int4", "fp32"])
DRAFTS = st.sampled_from(
    ["self", "none", "ngram", "eagle", "llama-68m", "llama-3.2-1b", "tinyllama-1.1b"]
)
METHODS = st.sampled_from(
    ["streamingllm", "snapkv", "topk", "full", "none", "eagle", "ngram"]
)
REQUESTS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(model_names()),
        "hardware": st.tuples(st.sampled_from(hardware_names())),
        "context_lens": st.tuples(
            st.one_of(st.integers(1, 131_072), st.sampled_from([0, 10**9]))
        ),
    },
    optional={
        "batch_sizes": st.tuples(st.one_of(st.integers(1, 512), NUMBERS)),
        "engine": st.sampled_from(["ours", "magicdec-2024"]),
        "draft": DRAFTS,
        "draft_method": METHODS,
        "draft_budgets": st.tuples(st.one_of(st.integers(5, 4096), NUMBERS)),
        "weight_dtype": DTYPES,
        "kv_dtype": DTYPES,
        "draft_weight_dtype": DTYPES,
        "temperature": st.sampled_from([0.0, 1.0]),
        "top_p": st.sampled_from([None, 0.9]),
        "acceptance_rate": st.one_of(st.floats(0.0, 1.0), NUMBERS),
        "tp_size": NUMBERS,
        "num_gpus": NUMBERS,
        "gen_len": NUMBERS,
        "gamma": NUMBERS,
        "draft_tp_size": NUMBERS,
        "tpot_limit_s": NUMBERS,
        "ttft_limit_s": NUMBERS,
        "price_per_hour_usd": NUMBERS,
    },
)


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for each in value.values() for number in numbers(each)]
    if isinstance(value, list | tuple):
        return [number for each in value for number in numbers(each)]
    return [float(value)] if isinstance(value, float | int) else []


def answers_or_refuses(fields: dict[str, Any]) -> None:
    try:
        document = make_plan(PlanRequest(**fields))
    except MagicdecError as error:
        refusal = str(error)
    else:
        refusal = ""
    assert "\n" not in refusal
    if refusal:
        return
    found = numbers(json.loads(document.to_json()))
    assert all(math.isfinite(number) for number in found)
    assert min(found) >= 0.0
    assert document.to_csv()


@pytest.mark.filterwarnings("error")
@given(REQUESTS)
def test_a_document_of_finite_numbers_or_one_line(fields: dict[str, Any]) -> None:
    answers_or_refuses(fields)


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@settings(max_examples=100)
@given(REQUESTS)
def test_a_document_of_finite_numbers_or_one_line_anywhere(
    fields: dict[str, Any],
) -> None:
    answers_or_refuses(fields)


def test_a_draft_on_more_ranks_than_its_target_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft tp 8 is more than the target's tp 4"):
        make_plan(PlanRequest(tp_size=4, draft_tp_size=8))
