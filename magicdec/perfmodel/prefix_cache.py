"""Prefix-cache hits that vLLM finds with and without a draft.

A hit is a whole number of units. Drafts that read the target's hidden states drop the last
matched unit, because their keys and values at its end depend on the next token (vLLM's
`use_eagle` in the cache coordinator):

    hit = unit · max(0, ⌊m / unit⌋ − 1)    with such a draft
    hit = unit · ⌊m / unit⌋                without one

m is the shared prefix, at most the prompt less one token, since one token has to be computed.

The unit is the cache's block, 16 tokens, on models whose layers all cache by token. On hybrids the
block is enlarged until its page holds one recurrent layer's state, so it follows from the formats,
from tp and from gamma:

    unit = ⌈state bytes / KV bytes per token and layer⌉, rounded up to a multiple of 16
    state bytes = 4 · recurrent elements + bytes · convolution's width · (kernel − 1 + gamma)

all of one rank. Assumed: recurrent states in 32 bits and one kind of attention layer. Ignored:
models with caches of several block sizes (their unit is the least common multiple), evicted blocks,
and options that keep the last unit (`disable_eagle_block_drop` of vLLM's speculative
configuration, pull request 53388).

Sources: vLLM issues 53670 and 54360 (units of 1,648 and 2,144 tokens as their logs print them).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.forward import share
from magicdec.perfmodel.kernels.op import FP32_BYTES
from magicdec.perfmodel.setup import Cached, ModelSetup
from magicdec.specs.mixers import Mixer
from magicdec.specs.model import ModelSpec
from magicdec.specs.precision import Precision

BLOCK_TOKENS = 16
"""Tokens of a block of vLLM's KV cache by default."""


def hit_unit_tokens(
    model: ModelSpec,
    precision: Precision,
    *,
    tp_size: int,
    gamma: int,
    block_tokens: int = BLOCK_TOKENS,
) -> int:
    """Tokens of the smallest prefix that the cache can hold and find again."""
    states = [
        _state_bytes(mixer, precision, tp_size, gamma) for mixer, _ in model.mixers
    ]
    largest_state = max(states, default=0.0)
    kv_bytes = _kv_bytes_per_token_and_layer(model, precision, tp_size)
    if largest_state == 0.0 or kv_bytes == 0.0:
        return block_tokens
    blocks = math.ceil(math.ceil(largest_state / kv_bytes) / block_tokens)
    return blocks * block_tokens


def hits_of(setup: ModelSetup, cached: Cached, *, tp_size: Any, gamma: Any) -> Cached:
    """Tokens that an engine finds of cached prompts with this draft set up; none at gamma 0."""
    block = setup.engine.prefix_cache.prefix_block_tokens
    if not block or not (cached.tokens or cached.share):
        return cached

    def unit(tp: float, depth: float) -> float:
        tokens = hit_unit_tokens(
            setup.model,
            setup.precision,
            tp_size=int(tp),
            gamma=int(depth),
            block_tokens=block,
        )
        return float(tokens)

    drops = setup.speculation.draft_method in setup.engine.prefix_cache.drops_last_unit
    units = np.vectorize(unit, otypes=[float])(tp_size, gamma)
    dropped = np.where(np.asarray(gamma) > 0, float(drops), 0.0)
    return cached._replace(unit_tokens=units, dropped_units=dropped)


def found_tokens(
    setup: ModelSetup,
    matched: Any,
    prompt_len: Any,
    *,
    tp_size: int,
    gamma: int,
) -> Array:
    """Tokens that an engine finds of prompts whose first `matched` tokens are cached."""
    whole = hits_of(setup, Cached(share=1.0), tp_size=tp_size, gamma=gamma)
    return whole._replace(tokens=matched, share=0.0).of(prompt_len)


def hit_tokens(
    shared_tokens: int,
    prompt_tokens: int,
    *,
    unit_tokens: int,
    drops_last_unit: bool,
) -> int:
    """Tokens of a prompt that need no prefill, its first `shared_tokens` having been cached."""
    cached = Cached(
        tokens=shared_tokens,
        unit_tokens=unit_tokens,
        dropped_units=float(drops_last_unit),
    )
    return int(cached.of(prompt_tokens))


def _state_bytes(mixer: Mixer, precision: Precision, tp_size: int, gamma: int) -> float:
    """One rank's state of one sequence in one layer, with the inputs its convolution keeps."""
    num_bytes = 0.0
    for state in mixer.states():
        kernel = getattr(mixer, "conv_kernel", 0)
        columns = 0.0
        if kernel:
            columns = state.conv_elements / kernel * (kernel - 1 + gamma)
        head_bytes = (
            state.recurrent_elements * FP32_BYTES + columns * precision.activation_bytes
        )
        num_bytes += float(share(state.num_heads, tp_size)) * head_bytes
    return num_bytes


def _kv_bytes_per_token_and_layer(
    model: ModelSpec, precision: Precision, tp_size: int
) -> float:
    """One rank's keys and values of one token in the layer that keeps most of them."""
    elements = []
    for cache, _ in model.caches:
        elements.append(
            float(share(cache.num_heads, tp_size)) * cache.elements_per_token
        )
    return max(elements, default=0.0) * precision.kv_bytes
