"""Answers of the model that change only on purpose."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))

import proof_golden
from proof_answers import answer

TOLERANCES = {"refit": 1e-2, "acceptance": 1e-2}
"""Of the kinds whose answers an optimiser finds; 1e-9 for others."""


EVERY = 29
"""One request of so many is answered by default, two in the slow tests: no divisor of the order in which engines and
devices take turns. `python scripts/proof.py` answers all."""
SLOW = (1, 9)


def _numbers() -> Iterator[Any]:
    for number in range(len(proof_golden.golden_requests())):
        place = number % EVERY
        marks = pytest.mark.slow if place in SLOW else pytest.mark.exhaustive
        yield pytest.param(number, marks=() if place == 11 else marks)


@pytest.mark.parametrize("number", [*_numbers()])
def test_answers_change_only_on_purpose(number: int) -> None:
    """If they were meant to: `python scripts/proof.py --update-golden`, and say what moved in the commit
    (`python scripts/proof.py` lists it)."""
    request, wanted = (
        proof_golden.golden_requests()[number],
        proof_golden.read_golden()[number],
    )
    with np.errstate(all="ignore"):
        present = proof_golden.digests(answer(request))
    moved = {
        term: (wanted.get(term), present.get(term))
        for term in sorted({*wanted, *present})
        if not abs(wanted.get(term, np.inf) - present.get(term, np.inf))
        <= TOLERANCES.get(request["kind"], 1e-9)
    }
    assert not moved, (
        f"{request} moved (mean logarithms, before and now; if on purpose: python scripts/proof.py --update-golden)"
    )


def test_golden_requests_reach_every_kind_of_layer_engine_draft_and_split() -> None:
    """A golden value guards only what it comes from."""
    asked = [each.get("options", each) for each in proof_golden.golden_requests()]
    refused = sum("refused" in each for each in proof_golden.read_golden())
    assert refused < len(asked) / 4
    assert {each.get("engine") for each in asked} >= {
        "vllm",
        "sglang",
        "trtllm",
        "ours",
        "magicdec-2024",
    }
    drafts = {
        each.get("draft_method") or each.get("method") or each.get("draft")
        for each in asked
    }
    assert drafts >= {
        "streamingllm",
        "snapkv",
        "topk",
        "full",
        "ngram",
        "suffix",
        "eagle",
        "eagle3",
        "mtp",
    }
    assert {each.get("model") for each in asked} >= {
        "deepseek-r1",
        "glm-5",
        "qwen3.5-27b",
        "nemotron-3-nano-30b-a3b",
    }
    for option in (
        "pp",
        "ep",
        "dp_attention",
        "gpus",
        "workload",
        "gen_len",
        "tpot_ms",
        "ttft_ms",
        "kv_dtype",
    ):
        assert any(option in each for each in asked), option
