"""Expected tokens of a tree of drafts, from the acceptance rates of a chain.

    E = 1 + Σ_j Π_{i≤j} A_i      A_1 = a_1 + (1 − a_1) · r(u)      A_j = f · (a_j + (1 − a_j) · r(u − 1))
    f = 1 − (1 − HELD_BY_TREE)^u         r(v) = 1 − (1 + min(v, top_k − 1))^−RANK      u = γ / num_steps

a_j is a chain's conditional rate at position j, u the verified tokens per draft pass. A tree of as many
tokens as the chain (u = 1) spends some of them on siblings, so the target's path often goes on beyond
what it holds: f is the chance that it does not. r is the chance that a sibling is the target's token
where the likeliest draft is not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.acceptance import Acceptance
from magicdec.specs.speculation import TreeSpec

TREES_LOSE = (
    "trees (top-k above 1) of as many tokens as draft passes were slower than the best chain in 79 of "
    "88 public cells of EAGLE-3 in SGLang, by 16 % in the median"
)
MAX_TREE = 256
"""Most drafted tokens of a tree."""
HELD_BY_TREE = 0.822
"""Chance that a tree of as many tokens as draft passes holds the target's next token where the
draft's likeliest one is it, beyond the first position."""
RANK = 0.2
"""Exponent with which the target's token is still not among more siblings, where the likeliest draft
is not it."""
EQUAL_ROWS_ERROR = 0.09
"""Relative error (one standard deviation) of the tokens with each of four models left out of the fit:
60 trees of EAGLE-3 in SGLang (SpecForge's SpecBundle, December 2025; evidence/fits/trees.py)."""
MORE_ROWS_ERROR = 0.2
"""That of trees of more tokens than passes, of which none was in the fit. Four of one server (3 × 8,
4 × 12, 4 × 16, 8 × 60 rows) lie within 2 % of what its 3 × 4 tree leads to."""


def tree_tokens(
    rates: Array,
    tree: TreeSpec,
    gamma: Any,
    *,
    held_by_tree: float = HELD_BY_TREE,
    rank: float = RANK,
) -> Array:
    """Tokens per step of a tree of gamma drafted tokens; `rates`: conditional rates of a chain by
    position, on the last axis, as many as draft passes."""
    gamma = np.asarray(gamma, dtype=np.float64)[..., None]
    per_pass = gamma / tree.num_steps
    siblings = np.minimum(per_pass, tree.top_k - 1.0)
    later = np.clip(per_pass - 1.0, 0.0, tree.top_k - 1.0)
    is_first = np.arange(rates.shape[-1]) == 0
    held = np.where(is_first, 1.0, 1.0 - (1.0 - held_by_tree) ** per_pass)
    found = 1.0 - (1.0 + np.where(is_first, siblings, later)) ** -rank
    accepted = held * (rates + (1.0 - rates) * found)
    return np.asarray(1.0 + np.cumprod(accepted, axis=-1).sum(axis=-1))


def tokens_of_tree(
    acceptance: Acceptance,
    tree: TreeSpec,
    *,
    budget: Any,
    context: Any,
    gamma: Any,
) -> Array:
    """Tokens per step of a tree by the acceptance of a chain."""
    survivals = []
    before: Array = np.ones(())
    for depth in range(1, tree.num_steps + 1):
        tokens, _ = acceptance.tokens_per_step(
            budget=budget, context=context, gamma=np.full(np.shape(gamma), depth)
        )
        survivals.append(tokens - before)
        before = tokens
    survival = np.stack(np.broadcast_arrays(*survivals), axis=-1)
    ones = np.ones_like(survival[..., :1])
    ahead = np.concatenate([ones, survival[..., :-1]], axis=-1)
    rates = survival / np.maximum(ahead, 1e-12)
    return tree_tokens(np.clip(rates, 0.0, 1.0), tree, gamma)


def tree_error(tree: TreeSpec | None, gamma: Any) -> Array:
    """Relative error of a tree's tokens per step; 0 for a chain."""
    if tree is None:
        return np.zeros(())
    is_equal = np.asarray(gamma) <= tree.num_steps
    return np.where(is_equal, EQUAL_ROWS_ERROR, MORE_ROWS_ERROR)
