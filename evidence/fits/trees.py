"""Fits the tokens of trees of drafts to trees beside chains of as many verified tokens.

    python -m evidence.fits.trees [FILE.csv…]     errors as shipped, as fitted, and with each model left out of the fit

FILEs have the columns of `python -m evidence pairs`, chains and trees of the same runs (without any: SpecForge's
SpecBundle). What is compared is a tree's tokens per second over its chain's; the chain's tokens per step are given, the
tree's are not. Each model weighs the same. The constants are `HELD_BY_TREE` and `RANK` of magicdec/perfmodel/trees.py.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from evidence import DATA
from evidence.pairs import read_pairs
from evidence.trees import TreeOverChain, trees_over_chains
from magicdec.counts import Array
from magicdec.fitting import Free, solve
from magicdec.perfmodel.trees import EQUAL_ROWS_ERROR, HELD_BY_TREE, RANK

SPECBUNDLE = DATA / "trees" / "specbundle.csv.gz"
PRIORS = {
    "held_by_tree": Free(prior=0.8, spread=0.1),
    "rank": Free(prior=0.2, spread=0.5),
}
SHIPPED = {"held_by_tree": HELD_BY_TREE, "rank": RANK}
CONSTANT = 0.8
"""The ratio that a constant would state of every tree."""


def log_errors(trees: Sequence[TreeOverChain], law: dict[str, float]) -> Array:
    errors = [np.log(each.predicted(**law) / each.measured) for each in trees]
    return np.array(errors)


def fit(trees: Sequence[TreeOverChain]) -> dict[str, float]:
    counts = Counter(each.tree.model for each in trees)
    weights = np.array([1.0 / np.sqrt(counts[each.tree.model]) for each in trees])

    def residuals(law: dict[str, float]) -> Array:
        return weights * log_errors(trees, law) / EQUAL_ROWS_ERROR

    return {
        name: float(value) for name, value in solve(PRIORS, residuals).values.items()
    }


def shown(errors: Array) -> str:
    spread = float(np.sqrt(np.mean(errors**2)))
    mean = float(np.mean(np.abs(np.expm1(errors))))
    return f"{errors.size} trees, {mean:.1%}, root mean square {spread:.1%}"


def main(arguments: list[str]) -> None:
    paths = list(map(Path, arguments)) or [SPECBUNDLE]
    pairs, _ = read_pairs(paths)
    trees = trees_over_chains(pairs)
    measured = np.array([each.measured for each in trees])
    print(f"constant {CONSTANT}:", shown(np.log(CONSTANT / measured)))
    print("as shipped:", shown(log_errors(trees, SHIPPED)), SHIPPED)
    fitted = fit(trees)
    print("as fitted:", shown(log_errors(trees, fitted)), fitted)
    left_out = []
    for model in dict.fromkeys(each.tree.model for each in trees):
        others = [each for each in trees if each.tree.model != model]
        own = [each for each in trees if each.tree.model == model]
        errors = log_errors(own, fit(others))
        left_out.append(errors)
        print(f"left out, {model}:", shown(errors))
    print("left out, all:", shown(np.concatenate(left_out)))


if __name__ == "__main__":
    main(sys.argv[1:])
