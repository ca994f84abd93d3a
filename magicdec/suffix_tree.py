"""Suffix decoding: trees of a request's text and of earlier responses, and the drafts along their
likeliest paths.

The rule (SuffixDecoding, arXiv 2411.04975; arctic-inference, as vLLM's `suffix` uses it): a tree counts
every sequence of up to `max_depth` tokens of its texts. For m = 1, 2, … the last m tokens are looked up
as long as the tree has them; from there at most int(m · max_factor) tokens are drafted along the most
frequent children, while the product of count(child) / count(parent) is at least `min_probability`. The
draft with the highest sum of these products wins; of equal sums, the one of the longer m; the request's
own tree, unless the tree of responses has a higher sum.

Among children of equal count the order is that of the engine's lists, which keep it as counts change:

    a count rises   the first of its count becomes the first of the next count, any other the last of it
    a count falls   it becomes the first of its new count
    a new child     becomes the last

Paths without a branch are one node, so a tree takes memory linear in its texts. Products are float32,
like the engine's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numba
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
NONE = -1
ROOT = 0
NUM_NODES, FREE_NODE, NUM_GROUPS, FREE_GROUP, NUM_ACTIVE, MASK = range(6)
"""Places in `Tree.state`."""


class Tree(NamedTuple):
    """A suffix tree in arrays. A node stands for the tokens on its edge; its children are a list in order of
    falling count, in which a group is a run of equal counts."""

    counts: Ints
    token: Ints
    """First token of the edge."""
    length: Ints
    reference: Ints
    """Index of the edge's first token in the tree's texts."""
    parent: Ints
    first_child: Ints
    last_child: Ints
    following: Ints
    """Next sibling."""
    preceding: Ints
    group: Ints
    chain: Ints
    """Next node in the same bucket."""
    group_first: Ints
    group_last: Ints
    bucket: Ints
    """First node of each bucket of (parent, first token)."""
    active: Ints
    """Nodes at which the suffixes of the sequence that grows end, the longest first."""
    state: npt.NDArray[np.int64]


PER_NODE = Tree._fields[:13]


def new_tree(num_nodes: int, max_depth: int) -> Tree:
    """Return a tree with only its root, and room for `num_nodes`."""
    arrays: list[Any] = [np.full(num_nodes, NONE, dtype=np.int32) for _ in PER_NODE]
    bucket = np.full(bucket_size(num_nodes), NONE, dtype=np.int32)
    active = np.zeros(max_depth + 1, dtype=np.int32)
    tree = Tree._make([*arrays, bucket, active, np.zeros(6, dtype=np.int64)])
    clear(tree, len(bucket))
    return tree


def bucket_size(num_nodes: int) -> int:
    return 1 << max(num_nodes - 1, 15).bit_length()


def with_room(tree: Tree, num_more: int) -> Tree:
    """Return the tree with room for so many more nodes: itself, or a larger copy."""
    needed = int(tree.state[NUM_NODES]) + num_more
    if needed <= len(tree.counts):
        return tree
    size = max(needed, 2 * len(tree.counts))
    arrays: list[Any] = []
    for name in PER_NODE:
        old = getattr(tree, name)
        arrays.append(
            np.concatenate([old, np.full(size - len(old), NONE, dtype=np.int32)])
        )
    bucket = np.full(bucket_size(size), NONE, dtype=np.int32)
    larger = Tree._make([*arrays, bucket, tree.active, tree.state])
    rebuild_buckets(larger)
    return larger


class SuffixSettings(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Settings of suffix decoding that all gammas share, with vLLM's defaults."""

    max_depth: int = 24
    """Longest sequence of tokens that the trees hold (`suffix_decoding_max_tree_depth`)."""
    max_factor: float = 1.0
    """Most drafted tokens per matched token (`suffix_decoding_max_spec_factor`)."""
    min_probability: float = 0.1
    """Probability below which no further token is drafted (`suffix_decoding_min_token_prob`)."""
    max_cached_requests: int = 10_000
    """Responses that the global tree holds (`suffix_decoding_max_cached_requests`)."""


@numba.njit(cache=True, nogil=True)
def clear(tree, num_buckets):
    """Leave only the root, and use this many buckets (a power of two)."""
    tree.bucket[:num_buckets] = NONE
    tree.state[NUM_NODES] = 1
    tree.state[FREE_NODE] = NONE
    tree.state[NUM_GROUPS] = 0
    tree.state[FREE_GROUP] = NONE
    tree.state[NUM_ACTIVE] = 0
    tree.state[MASK] = num_buckets - 1
    tree.counts[ROOT] = 0
    tree.length[ROOT] = 0
    tree.parent[ROOT] = NONE
    tree.first_child[ROOT] = NONE
    tree.last_child[ROOT] = NONE


@numba.njit(cache=True, nogil=True)
def rebuild_buckets(tree):
    """Enter all nodes under their parents and tokens into empty buckets."""
    tree.state[MASK] = len(tree.bucket) - 1
    free = tree.state[FREE_NODE]
    while free != NONE:
        tree.parent[free] = NONE
        free = tree.following[free]
    for node in range(1, tree.state[NUM_NODES]):
        if tree.parent[node] != NONE:
            _enter(tree, node)


@numba.njit(cache=True, nogil=True)
def _bucket_of(tree, parent, token):
    key = (np.uint64(parent) << np.uint64(32)) ^ np.uint64(token)
    key *= np.uint64(0x9E3779B97F4A7C15)
    key ^= key >> np.uint64(31)
    return np.int64(key & np.uint64(tree.state[MASK]))


@numba.njit(cache=True, nogil=True)
def _child(tree, parent, token):
    node = tree.bucket[_bucket_of(tree, parent, token)]
    while node != NONE:
        if tree.parent[node] == parent and tree.token[node] == token:
            return node
        node = tree.chain[node]
    return NONE


@numba.njit(cache=True, nogil=True)
def _enter(tree, node):
    place = _bucket_of(tree, tree.parent[node], tree.token[node])
    tree.chain[node] = tree.bucket[place]
    tree.bucket[place] = node


@numba.njit(cache=True, nogil=True)
def _leave(tree, node):
    place = _bucket_of(tree, tree.parent[node], tree.token[node])
    other = tree.bucket[place]
    if other == node:
        tree.bucket[place] = tree.chain[node]
        return
    while tree.chain[other] != node:
        other = tree.chain[other]
    tree.chain[other] = tree.chain[node]


@numba.njit(cache=True, nogil=True)
def _new_node(tree, parent, token, length, reference, count):
    node = tree.state[FREE_NODE]
    if node == NONE:
        node = tree.state[NUM_NODES]
        tree.state[NUM_NODES] = node + 1
    else:
        tree.state[FREE_NODE] = tree.following[node]
    tree.parent[node] = parent
    tree.token[node] = token
    tree.length[node] = length
    tree.reference[node] = reference
    tree.counts[node] = count
    tree.first_child[node] = NONE
    tree.last_child[node] = NONE
    tree.following[node] = NONE
    tree.preceding[node] = NONE
    tree.group[node] = NONE
    return node


@numba.njit(cache=True, nogil=True)
def _free_node(tree, node):
    tree.following[node] = tree.state[FREE_NODE]
    tree.state[FREE_NODE] = node


@numba.njit(cache=True, nogil=True)
def _group_alone(tree, node):
    """Put a node into a new group of its own."""
    group = tree.state[FREE_GROUP]
    if group == NONE:
        group = tree.state[NUM_GROUPS]
        tree.state[NUM_GROUPS] = group + 1
    else:
        tree.state[FREE_GROUP] = tree.group_last[group]
    tree.group_first[group] = node
    tree.group_last[group] = node
    tree.group[node] = group


@numba.njit(cache=True, nogil=True)
def _free_group(tree, group):
    tree.group_last[group] = tree.state[FREE_GROUP]
    tree.state[FREE_GROUP] = group


@numba.njit(cache=True, nogil=True)
def _leave_group(tree, node):
    """Take a node out of its group; call it while its siblings still stand around it."""
    group = tree.group[node]
    is_first = tree.group_first[group] == node
    is_last = tree.group_last[group] == node
    if is_first and is_last:
        _free_group(tree, group)
    elif is_first:
        tree.group_first[group] = tree.following[node]
    elif is_last:
        tree.group_last[group] = tree.preceding[node]


@numba.njit(cache=True, nogil=True)
def _unlink(tree, node):
    """Take a node out of its parent's list."""
    parent = tree.parent[node]
    before = tree.preceding[node]
    after = tree.following[node]
    if before == NONE:
        tree.first_child[parent] = after
    else:
        tree.following[before] = after
    if after == NONE:
        tree.last_child[parent] = before
    else:
        tree.preceding[after] = before


@numba.njit(cache=True, nogil=True)
def _link_between(tree, node, before, after):
    """Put a node into its parent's list between two neighbours, either of which may be none."""
    parent = tree.parent[node]
    tree.preceding[node] = before
    tree.following[node] = after
    if before == NONE:
        tree.first_child[parent] = node
    else:
        tree.following[before] = node
    if after == NONE:
        tree.last_child[parent] = node
    else:
        tree.preceding[after] = node


@numba.njit(cache=True, nogil=True)
def _append_child(tree, node):
    """Make a node of count 1 the last of its parent's children. The root's need no order."""
    parent = tree.parent[node]
    _enter(tree, node)
    if parent == ROOT:
        return
    last = tree.last_child[parent]
    _link_between(tree, node, last, NONE)
    if last != NONE and tree.counts[last] == 1:
        group = tree.group[last]
        tree.group[node] = group
        tree.group_last[group] = node
    else:
        _group_alone(tree, node)


@numba.njit(cache=True, nogil=True)
def _raise_count(tree, node):
    """Add one to a node's count and keep its siblings in order."""
    count = tree.counts[node] + 1
    tree.counts[node] = count
    if tree.parent[node] == ROOT:
        return
    group = tree.group[node]
    first = tree.group_first[group]
    above = tree.preceding[first]
    joins = above != NONE and tree.counts[above] == count
    _leave_group(tree, node)
    if first == node:
        if not joins:
            _group_alone(tree, node)
            return
        upper = tree.group[above]
        front = tree.group_first[upper]
        _unlink(tree, node)
        _link_between(tree, node, tree.preceding[front], front)
        tree.group_first[upper] = node
        tree.group[node] = upper
        return
    _unlink(tree, node)
    _link_between(tree, node, above, first)
    if joins:
        upper = tree.group[above]
        tree.group_last[upper] = node
        tree.group[node] = upper
    else:
        _group_alone(tree, node)


@numba.njit(cache=True, nogil=True)
def _lower_count(tree, node):
    """Take one from a node's count and keep its siblings in order."""
    count = tree.counts[node] - 1
    tree.counts[node] = count
    if tree.parent[node] == ROOT:
        return
    group = tree.group[node]
    last = tree.group_last[group]
    below = tree.following[last]
    joins = below != NONE and tree.counts[below] == count
    _leave_group(tree, node)
    if last != node:
        _unlink(tree, node)
        _link_between(tree, node, last, below)
    if joins:
        lower = tree.group[below]
        tree.group_first[lower] = node
        tree.group[node] = lower
    else:
        _group_alone(tree, node)


@numba.njit(cache=True, nogil=True)
def _take_place(tree, old, new):
    """Put `new`, of the same count and parent, where `old` stands among its siblings."""
    if tree.parent[old] == ROOT:
        return
    _link_between(tree, new, tree.preceding[old], tree.following[old])
    group = tree.group[old]
    tree.group[new] = group
    if tree.group_first[group] == old:
        tree.group_first[group] = new
    if tree.group_last[group] == old:
        tree.group_last[group] = new


@numba.njit(cache=True, nogil=True)
def append(tree, texts, place, max_depth):
    """Add the token at `place` of `texts` to the sequence that grows, and so to its last
    `max_depth` suffixes.
    """
    active = tree.active
    num_active = tree.state[NUM_ACTIVE]
    if num_active == max_depth:
        active[: max_depth - 1] = active[1:max_depth]
        num_active -= 1
    active[num_active] = ROOT
    tree.state[NUM_ACTIVE] = num_active + 1
    for number in range(num_active + 1):
        active[number] = _extend(tree, texts, place, active[number])


@numba.njit(cache=True, nogil=True)
def _extend(tree, texts, place, node):
    """Extend the suffix that ends at `node` by a token; return the node at which it then ends."""
    token = texts[place]
    if tree.counts[node] == 1 and node != ROOT:
        tree.length[node] += 1
        return node
    child = _child(tree, node, token)
    if child == NONE:
        new = _new_node(tree, node, token, 1, place, 1)
        _append_child(tree, new)
        return new
    if tree.counts[node] == tree.counts[child] + 1 and node != ROOT:
        return _stretch(tree, texts, place, node, child)
    if tree.length[child] > 1:
        child = _split(tree, texts, place, child)
    _raise_count(tree, child)
    return child


@numba.njit(cache=True, nogil=True)
def _stretch(tree, texts, place, node, child):
    """Extend a suffix into the only child of its node: the node takes a token of the child's edge,
    or all of it.
    """
    _leave(tree, child)
    if tree.length[child] > 1:
        tree.length[node] += 1
        tree.reference[node] = place + 1 - tree.length[node]
        tree.length[child] -= 1
        tree.reference[child] += 1
        tree.token[child] = texts[tree.reference[child]]
        _enter(tree, child)
        return node
    _free_group(tree, tree.group[child])
    _leave(tree, node)
    tree.counts[child] += 1
    tree.token[child] = tree.token[node]
    tree.length[child] = tree.length[node] + 1
    tree.reference[child] = place + 1 - tree.length[child]
    tree.parent[child] = tree.parent[node]
    _take_place(tree, node, child)
    _enter(tree, child)
    _free_node(tree, node)
    return child


@numba.njit(cache=True, nogil=True)
def _split(tree, texts, place, child):
    """Give the first token of an edge a node of its own, which takes the child's place; return
    it."""
    _leave(tree, child)
    parent = tree.parent[child]
    upper = _new_node(tree, parent, tree.token[child], 1, place, tree.counts[child])
    _take_place(tree, child, upper)
    _enter(tree, upper)
    tree.length[child] -= 1
    tree.reference[child] += 1
    tree.token[child] = texts[tree.reference[child]]
    tree.parent[child] = upper
    _enter(tree, child)
    _link_between(tree, child, NONE, NONE)
    _group_alone(tree, child)
    return upper


@numba.njit(cache=True, nogil=True)
def remove(tree, texts, begin, end):
    """Take a sequence out of the tree again."""
    for start in range(begin, end):
        node = ROOT
        place = start
        while place < end:
            child = _child(tree, node, texts[place])
            if child == NONE:
                break
            if tree.counts[child] == 1:
                _prune(tree, child)
                break
            _lower_count(tree, child)
            place += tree.length[child]
            node = child
        if node != ROOT:
            _merge(tree, node)


@numba.njit(cache=True, nogil=True)
def _prune(tree, node):
    """Remove a node of count 1 and what hangs below it: nodes of one child at most."""
    _leave(tree, node)
    if tree.parent[node] != ROOT:
        _leave_group(tree, node)
        _unlink(tree, node)
    child = tree.first_child[node]
    _free_node(tree, node)
    while child != NONE:
        below = tree.first_child[child]
        _leave(tree, child)
        _free_group(tree, tree.group[child])
        _free_node(tree, child)
        child = below


@numba.njit(cache=True, nogil=True)
def _merge(tree, node):
    """Make a node and its only child one where all suffixes of the node go on into the child."""
    child = tree.first_child[node]
    if (
        child == NONE
        or tree.following[child] != NONE
        or tree.counts[child] != tree.counts[node]
    ):
        return
    _leave(tree, child)
    _leave(tree, node)
    _free_group(tree, tree.group[child])
    tree.token[child] = tree.token[node]
    tree.length[child] += tree.length[node]
    tree.reference[child] -= tree.length[node]
    tree.parent[child] = tree.parent[node]
    _take_place(tree, node, child)
    _enter(tree, child)
    _free_node(tree, node)


@numba.njit(cache=True, nogil=True)
def refer(tree, texts, begin, end, max_depth):
    """Let every edge that a sequence's suffixes use refer to that sequence's tokens."""
    for start in range(begin, end):
        node = ROOT
        place = start
        while place < min(end, start + max_depth):
            node = _child(tree, node, texts[place])
            tree.reference[node] = place
            place += tree.length[node]


@numba.njit(cache=True, nogil=True)
def _match(tree, texts, text, place, num_matched):
    """Return where the last `num_matched` tokens up to `place` end in the tree: a node, and tokens
    along its edge.
    """
    node = ROOT
    along = 0
    for back in range(num_matched - 1, -1, -1):
        token = text[place - back]
        if along == tree.length[node]:
            node = _child(tree, node, token)
            if node == NONE:
                return NONE, 0
            along = 0
        elif texts[tree.reference[node] + along] != token:
            return NONE, 0
        along += 1
    return node, along


@numba.njit(cache=True, nogil=True)
def speculate(
    tree,
    texts,
    text,
    place,
    own_len,
    max_tokens,
    factor,
    min_probability,
    max_depth,
    draft,
    best,
):
    """Write the best draft of one tree into `best`; return its tokens and its score.

    The last `own_len` tokens up to `place` are those of the sequence that grows, so its active
    nodes are where their
    suffixes end.
    """
    best_len = 0
    best_score = np.float32(0.0)
    num_active = tree.state[NUM_ACTIVE]
    for num_matched in range(1, min(place + 1, max_depth)):
        if num_matched <= own_len:
            node = tree.active[num_active - num_matched]
            along = tree.length[node]
            if tree.counts[node] == 1:
                break  # only the sequence itself: nothing follows, nor after longer matches
        else:
            node, along = _match(tree, texts, text, place, num_matched)
            if node == NONE:
                break
        limit = np.int64(np.float64(np.float32(num_matched) * factor) + 1e-6)
        room = max(min(limit, max_tokens), 0)
        length, score = _path(tree, texts, node, along, room, min_probability, draft)
        if score >= best_score:
            best_score = score
            best_len = length
            best[:length] = draft[:length]
    return best_len, best_score


@numba.njit(cache=True, nogil=True)
def _path(tree, texts, node, along, room, min_probability, draft):
    """Draft along the most frequent children; return the number of tokens and the sum of their
    probabilities.
    """
    probability = np.float32(1.0)
    score = np.float32(0.0)
    length = 0
    while length < room and probability >= min_probability:
        if along < tree.length[node]:
            draft[length] = texts[tree.reference[node] + along]
            score = np.float32(score + probability)
            length += 1
            along += 1
            continue
        child = tree.first_child[node]
        if child == NONE:
            break
        share = np.float32(tree.counts[child]) / np.float32(tree.counts[node])
        probability = np.float32(probability * share)
        node = child
        along = 0
    return length, score
