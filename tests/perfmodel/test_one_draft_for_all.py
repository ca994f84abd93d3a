"""One draft for the usual texts: eight models at three loads, five texts, each planned by itself."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from magicdec.api import request_of
from magicdec.perfmodel.planner import make_plan
from magicdec.schema.plan import Plan
from magicdec.schema.row import Candidate

TEXTS = ("chat", "code", "math", "rag", "summarization")
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {},
    "llama-3.3-70b": {"tp": 4},
    "qwen3-8b": {},
    "qwen3-32b": {},
    "qwen3-30b-a3b-instruct-2507": {},
    "gpt-oss-20b": {},
    "gpt-oss-120b": {},
    "deepseek-v3": {"tp": 8, "hardware": "h200-sxm-141gb"},
}
LOADS: tuple[dict[str, Any], ...] = (
    {"hardware": "h100-sxm-80gb", "batch": 1, "context": 2048},
    {"hardware": "h200-sxm-141gb", "batch": 16, "context": 8192},
    {"hardware": "h100-sxm-80gb", "batch": 64, "context": 4096},
)


def planned(**question: Any) -> Plan:
    return make_plan(request_of(**question))


def rates_by_draft(plan: Plan) -> dict[str, float]:
    """The rate of each draft that can be served, at its best gamma, and without one."""
    rates = {"none": plan.autoregressive.rate}
    for row in plan.candidates:
        needs_more = row.drafting.is_hypothetical or row.drafting.needs_plugin
        if row.fits and not needs_more:
            rates[name_of(row)] = max(rates.get(name_of(row), 0.0), row.rate)
    return rates


def name_of(row: Candidate) -> str:
    return f"{row.draft} {row.draft_method}" if row.is_speculative else "none"


@pytest.mark.parametrize(
    "num_loads",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(len(LOADS), marks=pytest.mark.exhaustive),
    ],
)
def test_one_draft_loses_little_to_each_texts_own_best(num_loads: int) -> None:
    """1 % on average and 16 % at worst, each model at one of the loads in turn, or at all: no single draft does better
    than 0.7 and 14.5 % over all."""
    losses = []
    for (number, (model, options)), turn in itertools.product(
        enumerate(MODELS.items()), range(num_loads)
    ):
        load = LOADS[(number + turn) % len(LOADS)]
        question = load | options | {"model": model}
        chosen = name_of(planned(**question).best)
        for text in TEXTS:
            rates = rates_by_draft(planned(**question, task=text))
            losses.append(1.0 - rates[chosen] / max(rates.values()))
    assert len(losses) == len(MODELS) * num_loads * len(TEXTS)
    assert np.mean(losses) <= 0.01
    assert max(losses) <= 0.16
