"""The answer for one batch and context does not hang on what else is asked for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from magicdec.errors import CapacityError
from magicdec.perfmodel.planner import PlanRequest, make_plan
from magicdec.schema.row import Candidate, columns

OF_THE_CASE = ("speedup_static_batch",)
"""What only a case's best has."""
REQUESTS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["llama-3.1-8b", "qwen3-8b", "llama-2-7b-32k"]),
        "hardware": st.just(("h100-sxm-80gb",)),
        "tp_size": st.sampled_from([1, 2, 8]),
        "gen_len": st.sampled_from([0, 200]),
        "batch_sizes": st.lists(
            st.integers(1, 96), min_size=2, max_size=4, unique=True
        ).map(tuple),
        "context_lens": st.lists(
            st.integers(600, 20_000), min_size=1, max_size=2, unique=True
        ).map(tuple),
    },
    optional={"num_gpus": st.just(8), "tpot_limit_s": st.sampled_from([0.004, 0.02])},
)


def values(row: Candidate) -> dict[str, Any]:
    return {
        name: value for name, value in columns(row).items() if name not in OF_THE_CASE
    }


@pytest.mark.slow
@settings(max_examples=2, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(REQUESTS)
@example(
    {
        "model": "llama-3.1-8b", "hardware": ("h100-sxm-80gb",), "tp_size": 1, "gen_len": 200,
        "batch_sizes": (1, 16, 64), "context_lens": (4096,),
    }
)  # fmt: skip
@example(
    {
        "model": "llama-3.1-8b",
        "tp_size": 8,
        "batch_sizes": (1, 3, 24, 25, 40),
        "context_lens": (8192,),
    }
)
@example(
    {
        "model": "llama-3.1-8b",
        "tp_size": 8,
        "batch_sizes": (16, 64),
        "context_lens": (5000, 40_000),
    }
)
def test_a_batch_and_context_are_answered_alike_alone_and_in_company(
    fields: dict[str, Any],
) -> None:
    try:
        document = make_plan(PlanRequest(**fields))
    except CapacityError:
        return
    asked = list(fields["batch_sizes"])
    for case in document.cases:
        shown = [row.batch_size for row in case.best_by_batch]
        if shown != asked:  # none fits: answered for as many as do
            assert len(shown) == 1
            assert shown[0] < min(asked)
        for row in case.best_by_batch[:2]:
            one = {
                **fields,
                "batch_sizes": (row.batch_size,),
                "context_lens": (case.context_len,),
            }
            try:
                alone = make_plan(PlanRequest(**one)).best
            except CapacityError:
                assert not row.fits
                continue
            expected = {
                name: pytest.approx(value, rel=1e-12)
                if isinstance(value, float)
                else value
                for name, value in values(row).items()
            }
            assert values(alone) == expected
