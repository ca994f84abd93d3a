"""Trees of drafts against what a public server and a public dashboard measured."""

import msgspec
import numpy as np
import pytest
from scipy.optimize import brentq

from magicdec.counts import constant_rate
from magicdec.perfmodel.plan.request import PlanRequest
from magicdec.perfmodel.planner import make_plan
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.step import step_terms
from magicdec.perfmodel.trees import EQUAL_ROWS_ERROR, tree_tokens
from magicdec.specs.speculation import SpeculationSpec, TreeSpec

ONE_SERVER = [(3, 8, 3, 2.20), (4, 12, 6, 2.42), (4, 16, 7, 2.52), (8, 60, 8, 3.20)]
"""Top-k, rows, passes and measured tokens per step of zhuyksir/EAGLE3-Qwen3-30B-A3B-DenseHead
(SGLang, one user); none was in the fit. Its tree of top-k 3, 4 rows and 3 passes: 1.99."""
CELLS = [
    ("qwen3-coder-480b humaneval", 3, 6, 4.284, 4.686),
    ("kimi-k2 mtbench", 3, 6, 2.394, 2.739),
    ("llama-3.1-8b financeqa", 3, 6, 2.226, 2.044),
    ("llama-3.1-8b math500", 4, 8, 4.256, 5.403),
    ("qwen3-30b gpqa", 4, 8, 2.917, 3.217),
]
"""SpecForge's SpecBundle (December 2025): top-k, rows, tokens per step of the tree and of the chain of
as many rows."""


def tokens(rate, top_k, rows, steps):
    tree = TreeSpec(top_k=top_k, num_steps=steps)
    return float(tree_tokens(np.full(steps, rate), tree, rows - 1))


@pytest.mark.parametrize(("top_k", "rows", "steps", "measured"), ONE_SERVER)
def test_larger_trees_of_one_server_follow_from_its_smallest(
    top_k, rows, steps, measured
):
    rate = brentq(lambda rate: tokens(rate, 3, 4, 3) - 1.99, 0.1, 0.9)
    assert tokens(rate, top_k, rows, steps) == pytest.approx(measured, rel=0.04)


@pytest.mark.parametrize(("cell", "top_k", "rows", "of_tree", "of_chain"), CELLS)
def test_trees_of_as_many_rows_accept_what_was_measured(
    cell, top_k, rows, of_tree, of_chain
):
    rate = constant_rate(np.array([of_chain]), np.array([rows - 1])).item()
    predicted = tokens(rate, top_k, rows, rows - 1)
    assert abs(np.log(predicted / of_tree)) < 2.0 * EQUAL_ROWS_ERROR, cell


def test_a_tree_of_as_many_rows_loses_where_the_chain_is_good():
    """Most of a good chain's tokens are deep, where the tree has fewest."""
    for rate, is_less in ((0.9, True), (0.75, True), (0.3, False)):
        chain = sum(rate**place for place in range(8))
        assert (tokens(rate, 4, 8, 7) < chain) == is_less


def test_a_step_with_a_tree_takes_longer_than_one_with_a_chain_of_as_many_rows():
    def step_s(tree, gamma):
        spec = SpeculationSpec(
            draft="eagle3", draft_method="eagle3", gamma=gamma, tree=tree
        )
        setup = Setup.of("llama-3.1-8b", "h100", "sglang", spec)
        return float(
            step_terms(setup, batch=1, kv_len=800, draft_kv_len=800, gamma=gamma).step_s
        )

    chain = step_s(None, 5)
    assert 1.02 * chain < step_s(TreeSpec(top_k=3, num_steps=5), 5) < 1.2 * chain
    deep = step_s(TreeSpec(top_k=4, num_steps=3), 15)
    assert deep < step_s(None, 15)


def test_a_tree_gains_on_each_text_what_a_plan_for_that_text_says():
    """Where no text is named, its tokens are those of the tree there too, not those of a chain."""
    request = PlanRequest(
        model="llama-3.1-8b",
        hardware=("h100",),
        engine="sglang",
        draft="eagle3",
        gamma=15,
        tree=TreeSpec(top_k=4, num_steps=4),
        batch_sizes=(1,),
        context_lens=(2048,),
    )
    outlook = make_plan(request).choice.outlook
    by_text = {on.task: on.own.speedup for on in outlook.tasks}
    for task in ("chat", "code", "math"):
        named = make_plan(msgspec.structs.replace(request, task=task))
        row = next(row for row in named.candidates if row.is_speculative)
        assert by_text[task] == pytest.approx(row.speedup, rel=1e-6), task
