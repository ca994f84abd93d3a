"""One question has one answer: the choice under a rate, between two rows of a table, of advice on a
running server, and how sure it is."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import magicdec
from magicdec.live.advice import DraftedLoad, Serving, choices_at
from magicdec.live.observation import ServedDraft
from magicdec.perfmodel.plan.drafts import draft_options
from magicdec.perfmodel.plan.request import PlanRequest
from magicdec.perfmodel.plan.search import best_of_each_batch
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine


@pytest.mark.usefixtures("few_requests")
def test_the_best_configuration_under_a_rate_is_the_simulated_one() -> None:
    plan = magicdec.plan(
        model="llama-3.1-8b", hardware="a100-sxm-80gb", context=2048, gen_len=40, rate=1, p95_tpot_ms=30, gpus=2,
    )  # fmt: skip
    load, best = plan.traffic.best, plan.best
    for name in ("tp_size", "pp_size", "dp_size", "ep_size", "num_replicas"):
        assert getattr(best.layout, name) == getattr(load, name)
    assert best.draft_budget == load.draft_budget
    assert (best.draft, best.draft_method) == (load.draft, load.draft_method)
    assert best.is_speculative == load.is_speculative
    assert best.cost.per_million_tokens_usd == load.cost_per_million_tokens_usd
    table = plan.gamma_table
    if best.is_speculative:
        assert (table.draft, table.draft_method) == (best.draft, best.draft_method)


def test_bands_of_a_table_hold_what_is_looked_up() -> None:
    plan = magicdec.plan(
        model="llama-3.1-70b",
        hardware="h100-sxm-80gb",
        tp=8,
        batch=64,
        context=4096,
        draft="eagle3",
    )
    policy = plan.gamma_table.policy
    bands = policy.bands(4096)
    assert bands[0].first == 1
    assert bands[-1].last == policy.batch_sizes[-1]
    for band in bands:
        for batch in range(band.first, band.last + 1):
            assert policy.choose(batch_size=batch, context_len=4096) == band.gamma


def _situation(method: str, gamma: int) -> DraftedLoad:
    """A server whose acceptance is what a plan believes."""
    request = PlanRequest(model="llama-3.1-8b", draft=method)
    target = load_model_spec("llama-3.1-8b")
    (option,), _ = draft_options(
        target, request, engine=load_engine("vllm"), context=4096
    )
    profile = option.acceptance
    serving = Serving(model="llama-3.1-8b", hardware="h100-sxm-80gb", engine="vllm")
    setup = serving.setup(ServedDraft(name=method, method=method))
    return DraftedLoad(
        setup=setup, acceptance=profile, batch_size=16, context_len=4096, gamma=gamma
    )


def test_advice_goes_no_deeper_than_a_plan() -> None:
    choices = choices_at(_situation("ngram", 3), 16, 4096, over=0)
    advised = max(choices, key=lambda choice: choice.gain)
    plan = magicdec.plan(
        model="llama-3.1-8b",
        hardware="h100-sxm-80gb",
        tp=1,
        batch=16,
        context=4096,
        draft="ngram",
    )
    planned = max(plan.candidates, key=lambda row: row.speedup)
    assert advised.gamma == planned.gamma
    assert (advised.gain_low, advised.gain_high) == pytest.approx(
        (planned.speedup_low, planned.speedup_high)
    )


@pytest.mark.parametrize(("gamma", "other"), [(1, 0), (3, 0), (7, 0), (3, 1), (2, 7)])
def test_a_gain_and_its_reciprocal_are_as_sure(gamma: int, other: int) -> None:
    situation = _situation("eagle3", gamma)
    back = choices_at(situation, 16, 4096, over=gamma)[other]
    forth = choices_at(situation, 16, 4096, over=other)[gamma]
    assert (back.gain_low, back.gain_high) == pytest.approx(
        (1 / forth.gain_high, 1 / forth.gain_low), rel=0.01
    )


def test_the_best_of_each_batch_is_the_first_in_order() -> None:
    """Against the maximum of tuples, over random points."""
    random = np.random.default_rng(3)
    shape = (4, 3, 5)
    score = random.random(shape)
    is_valid, is_within_limits, fits = (random.random(shape) < 0.5 for _ in range(3))
    found = best_of_each_batch(
        score, is_valid=is_valid, is_within_limits=is_within_limits, fits=fits
    )
    for batch, flat in enumerate(found.tolist()):
        places = [(batch, *place) for place in product(range(3), range(5))]
        best = max(
            places,
            key=lambda at: (is_valid[at], is_within_limits[at], fits[at], score[at]),
        )
        assert np.ravel_multi_index(best, shape) == flat
