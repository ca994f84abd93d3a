"""The trees of suffix decoding against plain counts of every sequence, and the room that they take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba")

from magicdec import suffix_tree
from magicdec.suffix_tree import NUM_ACTIVE, NUM_NODES, Tree, new_tree
from tests.logs.plain_rules import PlainTree

sequences = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=6
)


def count_of(tree: Tree, texts: np.ndarray, key: tuple[int, ...]) -> int:
    """How often a sequence stands in a tree, by walking down its edges."""
    node = along = 0
    for token in key:
        if along == tree.nodes[node]["length"]:
            node, along = child_of(tree, texts, node, token), 0
            if node < 0:
                return 0
        elif texts[tree.nodes[node]["reference"] + along] != token:
            return 0
        along += 1
    return int(tree.nodes[node]["count"])


def child_of(tree: Tree, texts: np.ndarray, parent: int, token: int) -> int:
    """Found among all nodes, not by the tree's own buckets."""
    for node in range(1, int(tree.state[NUM_NODES])):
        row = tree.nodes[node]
        if row["parent"] == parent and row["count"] > 0 and row["token"] == token:
            return node
    return -1


@given(given_texts=sequences, depth=st.sampled_from([1, 3, 24]))
def test_a_tree_counts_every_sequence_within_its_room(
    given_texts: list[list[int]], depth: int
) -> None:
    """Of several texts one after the other; the kernels look at no bounds, so the room is exact."""
    texts = np.array([token for text in given_texts for token in text], dtype=np.int32)
    tree = new_tree(1, depth)
    plain = PlainTree(depth)
    place = 0
    for text in given_texts:
        tree = suffix_tree.with_room(tree, suffix_tree.most_nodes(len(text)))
        tree.state[NUM_ACTIVE] = 0
        for length in range(1, len(text) + 1):
            suffix_tree.append(tree, texts, place, depth)
            plain.append(text[:length])
            place += 1
            assert tree.state[NUM_NODES] <= len(tree.nodes)
    found = {key: count_of(tree, texts, key) for key in plain.count}
    assert found == plain.count


def test_the_room_is_no_larger_than_a_text_takes() -> None:
    """One token takes all of it, and a long text of two tokens nearly."""
    for length, share in ((1, 1.0), (400, 0.9)):
        text = np.random.default_rng(1).integers(0, 2, length).astype(np.int32)
        tree = new_tree(suffix_tree.most_nodes(length), 24)
        for place in range(length):
            suffix_tree.append(tree, text, place, 24)
        assert tree.state[NUM_NODES] >= share * len(tree.nodes)
