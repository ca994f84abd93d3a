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

from typing import NamedTuple

import msgspec
import numba
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
_compiled = numba.njit(cache=True, nogil=True, _nrt=False)
_inlined = numba.njit(cache=True, nogil=True, _nrt=False, forceinline=True)
# Nothing here allocates, and its callers hold the arrays: counting references to them took half of the time, and
# calls, which pass an array's shape and strides beside its address, most of the rest.
NONE = -1
NOT_ENTERED = -2
"""In place of a node's chain: the node is in no bucket."""
ROOT = 0
NUM_NODES, FREE_NODE, NUM_GROUPS, FREE_GROUP, NUM_ACTIVE, MASK = range(6)
"""Places in `Tree.state`."""


NODE = np.dtype(
    [
        ("count", np.int32),
        ("token", np.int32),  # first of the edge
        ("length", np.int32),  # tokens of the edge
        ("reference", np.int32),  # index of the edge's first token in the tree's texts
        ("parent", np.int32),
        ("first_child", np.int32),
        ("last_child", np.int32),
        ("following", np.int32),  # next sibling
        ("preceding", np.int32),
        ("group", np.int32),
        ("chain", np.int32),  # next node in the same bucket, or NOT_ENTERED
    ]
)
"""A node, which stands for the tokens on its edge. Its children are a list in order of falling count, in
which a group is a run of equal counts."""
GROUP = np.dtype([("first", np.int32), ("last", np.int32)])


class Tree(NamedTuple):
    """A suffix tree in arrays. What is known of one node lies together, since a step reads most of it and
    a large tree's nodes are not in the processor's caches."""

    nodes: npt.NDArray[np.void]
    groups: npt.NDArray[np.void]
    bucket: Ints
    """First node of each bucket of (parent, first token). The root's children are in it, and those that have
    had siblings; an only child is found without."""
    active: Ints
    """Nodes at which the suffixes of the sequence that grows end, the longest first."""
    state: npt.NDArray[np.int64]


def new_tree(num_nodes: int, max_depth: int) -> Tree:
    """Return a tree with only its root, and room for `num_nodes`."""
    tree = Tree(
        nodes=np.zeros(num_nodes, dtype=NODE),
        groups=np.zeros(num_nodes, dtype=GROUP),
        bucket=np.full(bucket_size(num_nodes), NONE, dtype=np.int32),
        active=np.zeros(max_depth + 1, dtype=np.int32),
        state=np.zeros(6, dtype=np.int64),
    )
    clear(tree, len(tree.bucket))
    return tree


def most_nodes(num_tokens: int) -> int:
    """Return the most nodes that a sequence of so many tokens adds to a tree, the root among the first's: each token
    begins a suffix and is the end of at most one other's common part."""
    return 2 * max(num_tokens, 1)


def bucket_size(num_nodes: int) -> int:
    return 1 << max(num_nodes - 1, 15).bit_length()


def with_room(tree: Tree, num_more: int) -> Tree:
    """Return the tree with room for so many more nodes: itself, or a larger copy."""
    needed = int(tree.state[NUM_NODES]) + num_more
    num_nodes = len(tree.nodes)
    if needed <= num_nodes:
        return tree
    size = max(needed, 2 * num_nodes)
    larger = Tree(
        nodes=np.zeros(size, dtype=NODE),
        groups=np.zeros(size, dtype=GROUP),
        bucket=np.full(bucket_size(size), NONE, dtype=np.int32),
        active=tree.active,
        state=tree.state,
    )
    larger.nodes[:num_nodes] = tree.nodes
    larger.groups[:num_nodes] = tree.groups
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


@_compiled
def clear(tree, num_buckets):
    """Leave only the root, and use this many buckets (a power of two)."""
    tree.bucket[:num_buckets] = NONE
    tree.state[NUM_NODES] = 1
    tree.state[FREE_NODE] = NONE
    tree.state[NUM_GROUPS] = 0
    tree.state[FREE_GROUP] = NONE
    tree.state[NUM_ACTIVE] = 0
    tree.state[MASK] = num_buckets - 1
    tree.nodes[ROOT].count = 0
    tree.nodes[ROOT].length = 0
    tree.nodes[ROOT].parent = NONE
    tree.nodes[ROOT].first_child = NONE
    tree.nodes[ROOT].last_child = NONE


@_compiled
def rebuild_buckets(tree):
    """Enter all nodes under their parents and tokens into empty buckets."""
    tree.state[MASK] = len(tree.bucket) - 1
    free = tree.state[FREE_NODE]
    while free != NONE:
        tree.nodes[free].parent = NONE
        free = tree.nodes[free].following
    for node in range(1, tree.state[NUM_NODES]):
        if tree.nodes[node].parent != NONE and tree.nodes[node].chain != NOT_ENTERED:
            _enter(tree, node)


@_inlined
def _bucket_of(tree, parent, token):
    key = (np.uint64(parent) << np.uint64(32)) ^ np.uint64(token)
    key *= np.uint64(0x9E3779B97F4A7C15)
    key ^= key >> np.uint64(31)
    return np.int64(key & np.uint64(tree.state[MASK]))


@_inlined
def _child(tree, parent, token):
    if parent != ROOT:
        node = tree.nodes[parent].first_child
        if node == NONE or tree.nodes[node].token == token:
            return node
        if tree.nodes[node].following == NONE:
            return NONE
    node = tree.bucket[_bucket_of(tree, parent, token)]
    while node != NONE:
        if tree.nodes[node].parent == parent and tree.nodes[node].token == token:
            return node
        node = tree.nodes[node].chain
    return NONE


@_inlined
def _enter(tree, node):
    place = _bucket_of(tree, tree.nodes[node].parent, tree.nodes[node].token)
    tree.nodes[node].chain = tree.bucket[place]
    tree.bucket[place] = node


@_inlined
def _leave(tree, node):
    """Take a node out of its bucket; return whether it was in one."""
    if tree.nodes[node].chain == NOT_ENTERED:
        return False
    place = _bucket_of(tree, tree.nodes[node].parent, tree.nodes[node].token)
    other = tree.bucket[place]
    if other == node:
        tree.bucket[place] = tree.nodes[node].chain
    else:
        while tree.nodes[other].chain != node:
            other = tree.nodes[other].chain
        tree.nodes[other].chain = tree.nodes[node].chain
    tree.nodes[node].chain = NOT_ENTERED
    return True


@_inlined
def _new_node(tree, parent, token, length, reference, count):
    node = tree.state[FREE_NODE]
    if node == NONE:
        node = tree.state[NUM_NODES]
        tree.state[NUM_NODES] = node + 1
    else:
        tree.state[FREE_NODE] = tree.nodes[node].following
    tree.nodes[node].parent = parent
    tree.nodes[node].token = token
    tree.nodes[node].length = length
    tree.nodes[node].reference = reference
    tree.nodes[node].count = count
    tree.nodes[node].first_child = NONE
    tree.nodes[node].last_child = NONE
    tree.nodes[node].following = NONE
    tree.nodes[node].preceding = NONE
    tree.nodes[node].group = NONE
    tree.nodes[node].chain = NOT_ENTERED
    return node


@_inlined
def _free_node(tree, node):
    tree.nodes[node].following = tree.state[FREE_NODE]
    tree.state[FREE_NODE] = node


@_inlined
def _group_alone(tree, node):
    """Put a node into a new group of its own."""
    group = tree.state[FREE_GROUP]
    if group == NONE:
        group = tree.state[NUM_GROUPS]
        tree.state[NUM_GROUPS] = group + 1
    else:
        tree.state[FREE_GROUP] = tree.groups[group].last
    tree.groups[group].first = node
    tree.groups[group].last = node
    tree.nodes[node].group = group


@_inlined
def _free_group(tree, group):
    tree.groups[group].last = tree.state[FREE_GROUP]
    tree.state[FREE_GROUP] = group


@_inlined
def _leave_group(tree, node):
    """Take a node out of its group; call it while its siblings still stand around it."""
    group = tree.nodes[node].group
    is_first = tree.groups[group].first == node
    is_last = tree.groups[group].last == node
    if is_first and is_last:
        _free_group(tree, group)
    elif is_first:
        tree.groups[group].first = tree.nodes[node].following
    elif is_last:
        tree.groups[group].last = tree.nodes[node].preceding


@_inlined
def _unlink(tree, node):
    """Take a node out of its parent's list."""
    parent = tree.nodes[node].parent
    before = tree.nodes[node].preceding
    after = tree.nodes[node].following
    if before == NONE:
        tree.nodes[parent].first_child = after
    else:
        tree.nodes[before].following = after
    if after == NONE:
        tree.nodes[parent].last_child = before
    else:
        tree.nodes[after].preceding = before


@_inlined
def _link_between(tree, node, before, after):
    """Put a node into its parent's list between two neighbours, either of which may be none."""
    parent = tree.nodes[node].parent
    tree.nodes[node].preceding = before
    tree.nodes[node].following = after
    if before == NONE:
        tree.nodes[parent].first_child = node
    else:
        tree.nodes[before].following = node
    if after == NONE:
        tree.nodes[parent].last_child = node
    else:
        tree.nodes[after].preceding = node


@_inlined
def _append_child(tree, node):
    """Make a node of count 1 the last of its parent's children. The root's need no order."""
    parent = tree.nodes[node].parent
    if parent == ROOT:
        _enter(tree, node)
        return
    last = tree.nodes[parent].last_child
    _link_between(tree, node, last, NONE)
    if last != NONE:
        if tree.nodes[last].chain == NOT_ENTERED:
            _enter(tree, last)
        _enter(tree, node)
    if last != NONE and tree.nodes[last].count == 1:
        group = tree.nodes[last].group
        tree.nodes[node].group = group
        tree.groups[group].last = node
    else:
        _group_alone(tree, node)


@_inlined
def _raise_count(tree, node):
    """Add one to a node's count and keep its siblings in order."""
    count = tree.nodes[node].count + 1
    tree.nodes[node].count = count
    if tree.nodes[node].parent == ROOT:
        return
    above = tree.nodes[node].preceding
    if above == NONE and tree.nodes[node].following == NONE:
        return
    group = tree.nodes[node].group
    first = tree.groups[group].first
    above = tree.nodes[first].preceding
    joins = above != NONE and tree.nodes[above].count == count
    if first == node and not joins and tree.groups[group].last == node:
        return
    _leave_group(tree, node)
    if first == node:
        if not joins:
            _group_alone(tree, node)
            return
        upper = tree.nodes[above].group
        front = tree.groups[upper].first
        _unlink(tree, node)
        _link_between(tree, node, tree.nodes[front].preceding, front)
        tree.groups[upper].first = node
        tree.nodes[node].group = upper
        return
    _unlink(tree, node)
    _link_between(tree, node, above, first)
    if joins:
        upper = tree.nodes[above].group
        tree.groups[upper].last = node
        tree.nodes[node].group = upper
    else:
        _group_alone(tree, node)


@_inlined
def _lower_count(tree, node):
    """Take one from a node's count and keep its siblings in order."""
    count = tree.nodes[node].count - 1
    tree.nodes[node].count = count
    if tree.nodes[node].parent == ROOT:
        return
    group = tree.nodes[node].group
    last = tree.groups[group].last
    below = tree.nodes[last].following
    joins = below != NONE and tree.nodes[below].count == count
    _leave_group(tree, node)
    if last != node:
        _unlink(tree, node)
        _link_between(tree, node, last, below)
    if joins:
        lower = tree.nodes[below].group
        tree.groups[lower].first = node
        tree.nodes[node].group = lower
    else:
        _group_alone(tree, node)


@_inlined
def _take_place(tree, old, new):
    """Put `new`, of the same count and parent, where `old` stands among its siblings."""
    if tree.nodes[old].parent == ROOT:
        return
    _link_between(tree, new, tree.nodes[old].preceding, tree.nodes[old].following)
    group = tree.nodes[old].group
    tree.nodes[new].group = group
    if tree.groups[group].first == old:
        tree.groups[group].first = new
    if tree.groups[group].last == old:
        tree.groups[group].last = new


@_compiled
def append(tree, texts, place, max_depth):
    """Add the token at `place` of `texts` to the sequence that grows, and so to its last
    `max_depth` suffixes.
    """
    active = tree.active
    num_active = tree.state[NUM_ACTIVE]
    if num_active == max_depth:
        for number in range(max_depth - 1):
            active[number] = active[number + 1]
        num_active -= 1
    active[num_active] = ROOT
    tree.state[NUM_ACTIVE] = num_active + 1
    number = 0
    while (
        tree.nodes[active[number]].count == 1
    ):  # what only the longer suffixes pass through
        tree.nodes[active[number]].length += 1
        number += 1
    for shorter in range(number, num_active + 1):
        active[shorter] = _extend(tree, texts, place, active[shorter])


@_inlined
def _extend(tree, texts, place, node):
    """Extend the suffix that ends at `node` by a token; return the node at which it then ends."""
    token = texts[place]
    child = _child(tree, node, token)
    if child == NONE:
        new = _new_node(tree, node, token, 1, place, 1)
        _append_child(tree, new)
        return new
    if tree.nodes[node].count == tree.nodes[child].count + 1 and node != ROOT:
        return _stretch(tree, texts, place, node, child)
    if tree.nodes[child].length > 1:
        child = _split(tree, texts, place, child)
    _raise_count(tree, child)
    return child


@_inlined
def _stretch(tree, texts, place, node, child):
    """Extend a suffix into the only child of its node: the node takes a token of the child's edge,
    or all of it.
    """
    _leave(tree, child)  # it is the only one
    if tree.nodes[child].length > 1:
        tree.nodes[node].length += 1
        tree.nodes[node].reference = place + 1 - tree.nodes[node].length
        tree.nodes[child].length -= 1
        tree.nodes[child].reference += 1
        tree.nodes[child].token = texts[tree.nodes[child].reference]
        return node
    _free_group(tree, tree.nodes[child].group)
    was_entered = _leave(tree, node)
    tree.nodes[child].count += 1
    tree.nodes[child].token = tree.nodes[node].token
    tree.nodes[child].length = tree.nodes[node].length + 1
    tree.nodes[child].reference = place + 1 - tree.nodes[child].length
    tree.nodes[child].parent = tree.nodes[node].parent
    _take_place(tree, node, child)
    if was_entered:
        _enter(tree, child)
    _free_node(tree, node)
    return child


@_inlined
def _split(tree, texts, place, child):
    """Give the first token of an edge a node of its own, which takes the child's place; return
    it."""
    was_entered = _leave(tree, child)
    parent = tree.nodes[child].parent
    upper = _new_node(
        tree, parent, tree.nodes[child].token, 1, place, tree.nodes[child].count
    )
    _take_place(tree, child, upper)
    if was_entered:
        _enter(tree, upper)
    tree.nodes[child].length -= 1
    tree.nodes[child].reference += 1
    tree.nodes[child].token = texts[tree.nodes[child].reference]
    tree.nodes[child].parent = upper
    _link_between(tree, child, NONE, NONE)
    _group_alone(tree, child)
    return upper


@_compiled
def remove(tree, texts, begin, end):
    """Take a sequence out of the tree again."""
    for start in range(begin, end):
        node = ROOT
        place = start
        while place < end:
            child = _child(tree, node, texts[place])
            if child == NONE:
                break
            if tree.nodes[child].count == 1:
                _prune(tree, child)
                break
            _lower_count(tree, child)
            place += tree.nodes[child].length
            node = child
        if node != ROOT:
            _merge(tree, node)


@_inlined
def _prune(tree, node):
    """Remove a node of count 1 and what hangs below it: nodes of one child at most."""
    _leave(tree, node)
    if tree.nodes[node].parent != ROOT:
        _leave_group(tree, node)
        _unlink(tree, node)
    child = tree.nodes[node].first_child
    _free_node(tree, node)
    while child != NONE:
        below = tree.nodes[child].first_child
        _leave(tree, child)
        _free_group(tree, tree.nodes[child].group)
        _free_node(tree, child)
        child = below


@_inlined
def _merge(tree, node):
    """Make a node and its only child one where all suffixes of the node go on into the child."""
    child = tree.nodes[node].first_child
    if (
        child == NONE
        or tree.nodes[child].following != NONE
        or tree.nodes[child].count != tree.nodes[node].count
    ):
        return
    _leave(tree, child)
    was_entered = _leave(tree, node)
    _free_group(tree, tree.nodes[child].group)
    tree.nodes[child].token = tree.nodes[node].token
    tree.nodes[child].length += tree.nodes[node].length
    tree.nodes[child].reference -= tree.nodes[node].length
    tree.nodes[child].parent = tree.nodes[node].parent
    _take_place(tree, node, child)
    if was_entered:
        _enter(tree, child)
    _free_node(tree, node)


@_compiled
def refer(tree, texts, begin, end, max_depth):
    """Let every edge that a sequence's suffixes use refer to that sequence's tokens."""
    for start in range(begin, end):
        node = ROOT
        place = start
        while place < min(end, start + max_depth):
            node = _child(tree, node, texts[place])
            tree.nodes[node].reference = place
            place += tree.nodes[node].length


@_inlined
def _match(tree, texts, text, place, num_matched):
    """Return where the last `num_matched` tokens up to `place` end in the tree: a node, and tokens
    along its edge.
    """
    node = ROOT
    along = 0
    for back in range(num_matched - 1, -1, -1):
        token = text[place - back]
        if along == tree.nodes[node].length:
            node = _child(tree, node, token)
            if node == NONE:
                return NONE, 0
            along = 0
        elif texts[tree.nodes[node].reference + along] != token:
            return NONE, 0
        along += 1
    return node, along


@_compiled
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
            along = tree.nodes[node].length
            if tree.nodes[node].count == 1:
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
            for drafted in range(length):
                best[drafted] = draft[drafted]
    return best_len, best_score


@_inlined
def _path(tree, texts, node, along, room, min_probability, draft):
    """Draft along the most frequent children; return the number of tokens and the sum of their
    probabilities.
    """
    probability = np.float32(1.0)
    score = np.float32(0.0)
    length = 0
    while length < room and probability >= min_probability:
        if along < tree.nodes[node].length:
            draft[length] = texts[tree.nodes[node].reference + along]
            score = np.float32(score + probability)
            length += 1
            along += 1
            continue
        child = tree.nodes[node].first_child
        if child == NONE:
            break
        share = np.float32(tree.nodes[child].count) / np.float32(tree.nodes[node].count)
        probability = np.float32(probability * share)
        node = child
        along = 0
    return length, score
