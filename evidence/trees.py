"""Compares trees of drafts with the chain of as many verified tokens of the same run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.trees import tree_error, tree_tokens
from magicdec.schema.comparison import ErrorSummary
from magicdec.validate.pair_prediction import StatedTokens, predict_pairs
from magicdec.validate.pairs import PairRow
from magicdec.validate.rows import places

TREES = "tokens per second over the chain's"
"""The figure by which trees and chains are compared."""


class TreeOverChain(NamedTuple):
    """A tree of as many verified tokens as the chain of the same run, and what it makes over it."""

    tree: PairRow
    chain: PairRow
    rates: Array
    """Conditional rates of the chain by position: one that gives its measured tokens per step."""
    step_ratio: float
    """Seconds of the tree's step over the chain's, predicted."""

    @property
    def measured(self) -> float:
        """Tokens per second over the chain's."""
        _, of_chain = self.chain.measured
        _, of_tree = self.tree.measured
        return of_chain / of_tree

    def predicted(self, **law: float) -> float:
        """The ratio that the rates and the cost of the chain alone lead to; `law`: other numbers for `tree_tokens`."""
        assert self.tree.tree is not None
        assert self.chain.tokens_per_step is not None
        drafted = self.tree.num_drafted
        tokens = tree_tokens(self.rates, self.tree.tree, drafted, **law)
        return float(tokens) / self.chain.tokens_per_step / self.step_ratio


def twin(pair: PairRow) -> tuple[Any, ...]:
    """Equal for a tree and the chain of as many draft passes of the same run."""
    checkpoint, _, _ = pair.draft_detail.partition(";")
    return (
        pair.origin,
        pair.model,
        pair.hardware,
        pair.tp,
        pair.engine,
        pair.engine_version,
        pair.weight_dtype,
        pair.kv_dtype,
        pair.draft,
        checkpoint.strip(),
        pair.users,
        pair.prompt_len,
        pair.output_len,
        pair.unit,
        pair.note,
        pair.gamma,
    )


def trees_over_chains(pairs: Sequence[PairRow]) -> list[TreeOverChain]:
    """The trees whose chain of as many verified tokens is there too, both with measured tokens per
    step."""
    chains = {}
    for pair in pairs:
        if pair.tree is None and pair.tokens_per_step is not None:
            chains[twin(pair)] = pair
    found = []
    for pair in pairs:
        chain = chains.get(twin(pair))
        is_equal = pair.tree is not None and pair.num_drafted == pair.gamma
        if is_equal and chain is not None and pair.tokens_per_step is not None:
            found.append((pair, chain))
    if not found:
        return []
    step_s = []
    for own in zip(*found, strict=True):
        tokens = [pair.tokens_per_step for pair in own]
        step_s.append(predict_pairs(own, tokens).speculative_s * np.array(tokens))
    ratios = step_s[0] / step_s[1]
    trees = []
    for (pair, chain), ratio in zip(found, ratios, strict=True):
        of_chain = StatedTokens(
            np.array([chain.tokens_per_step]), np.array([chain.gamma])
        )
        rates = np.repeat(of_chain.rates, chain.gamma)
        trees.append(TreeOverChain(pair, chain, rates, float(ratio)))
    return trees


def tree_groups(trees: Sequence[TreeOverChain]) -> list[dict[str, Any]]:
    """Errors of what trees make over chains, by model and of all."""
    names = []
    for each in trees:
        labels = each.tree.labels | {"compared": TREES}
        names.append(["/".join(labels.values()), f"all/{TREES}"])
    groups = []
    for name, chosen in sorted(places(names).items()):
        own = [trees[place] for place in chosen]
        signed = np.array([each.predicted() / each.measured - 1.0 for each in own])
        errors = [
            float(tree_error(each.tree.tree, each.tree.num_drafted)) for each in own
        ]
        group: dict[str, Any] = {"name": name}
        if not name.startswith("all/"):
            group |= own[0].tree.labels | {"compared": TREES}
        groups.append(group | ErrorSummary.of(signed, np.array(errors)).figures())
    return groups
