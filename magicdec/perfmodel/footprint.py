"""Bytes that weights, caches, states and activations take on one device.

A rank keeps at least one KV head, so beyond tp = KV heads the cache per rank no longer shrinks.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.forward import share, size
from magicdec.perfmodel.kernels.op import FP32_BYTES
from magicdec.specs.engine import EngineProfile
from magicdec.specs.model import ModelSpec
from magicdec.specs.parallel import TENSOR_PARALLEL, Parallelism
from magicdec.specs.precision import Precision
from magicdec.specs.speculation import SamplingSpec

SORTING_BYTES = 4 + 8 + 4 + 4 + 4
"""Per token of the vocabulary, to keep the likeliest: logits in order, their indices,
probabilities, sums, and back.
"""
PARTS: tuple[Literal["mixer", "mlp", "experts", "head"], ...] = ("mixer", "mlp", "experts", "head")


def weights_bytes(
    model: ModelSpec, precision: Precision, tp_size: Any, spread: Parallelism = TENSOR_PARALLEL
) -> Array:
    """One rank's weights: heads, widths, experts and vocabulary rows split; what has none of these
    replicated, as are heads where there are more ranks than heads. Of a pipeline's first stage: one
    of the tables is on the last.

    With scales and zero points where this is the format that they are published in; embeddings,
    routers and norms are in 16 bits where the other weights are narrower.
    """
    tp = np.asarray(tp_size, dtype=np.float64)
    wide = precision.tables.weight_bytes
    mixer, mlp, experts, head = (model.part_format(part, precision).num_bytes for part in PARTS)
    tables = model.embedding_parameters
    others = (
        model.num_parameters
        - tables * (1 if model.tie_word_embeddings else 2)
        - model.expert_parameters
    )
    narrow: Array = np.asarray(0.0)
    for part, count, num_bytes in (
        *((*each, mixer) for each in model.mixers),
        *((*each, mlp) for each in model.feed_forwards),
    ):
        for projection in part.projections(model.hidden_size):
            held = size(projection.outputs, tp) * size((projection.inputs,), tp)
            narrow = narrow + count * held * (wide if projection.name == "router" else num_bytes)
            others -= count * projection.num_parameters
    layers = (
        narrow
        + others / tp * wide
        + model.expert_parameters * expert_share(model, tp, spread) * experts
    )
    has_both = not model.tie_word_embeddings and spread.pp == 1
    rows = tables / tp * (wide + (head if has_both else 0.0))
    return np.asarray(
        layers * (spread.stage_share(model.num_hidden_layers) if spread.pp > 1 else 1.0) + rows
    )


def expert_share(model: ModelSpec, tp_size: Any, spread: Parallelism) -> Any:
    """One rank's share of the routed experts' weights."""
    if not spread.whole_experts or not model.is_moe:
        return 1.0 / np.asarray(tp_size, dtype=np.float64)
    return (
        np.ceil(model.most_experts / spread.ep_size(np.asarray(tp_size, dtype=np.float64)))
        / model.most_experts
    )


def kv_bytes(
    model: ModelSpec,
    engine: EngineProfile,
    precision: Precision,
    length: Any,
    tp_size: Any,
    *,
    is_head: bool = False,
) -> Array:
    """One rank's slots for the keys and values of a sequence of `length` tokens: a window or a
    chunk needs no more than itself and the engine's `window_slots`, where the engine keeps it so. A
    trained head's slots go with its target's, one for each token, whatever its window (vllm pull
    request 40898, sglang 40563)."""
    slots = np.asarray(length, dtype=np.float64) + engine.spare_slots
    elements: Array = np.asarray(0.0)
    for cache, count in model.caches:
        is_bounded = (
            cache.max_tokens is not None and engine.window_cache == "window" and not is_head
        )
        if is_bounded:
            kept = np.minimum(slots, float((cache.max_tokens or 0) + engine.window_slots))
        else:
            kept = slots
        elements = (
            elements + count * share(cache.num_heads, tp_size) * cache.elements_per_token * kept
        )
    return elements * precision.kv_bytes


def sparse_kv_bytes_per_token(model: ModelSpec, precision: Precision, tp_size: Any) -> Array:
    """One rank's keys and values of one token in the layers whose cache a sparse draft may thin
    out: full attention's. In the others it reads what the target keeps."""
    thinned = ((cache, count) for cache, count in model.caches if cache.is_sparsifiable)
    held = (
        count * share(cache.num_heads, tp_size) * cache.elements_per_token
        for cache, count in thinned
    )
    return sum(held, np.asarray(0.0)) * precision.kv_bytes


def state_bytes(model: ModelSpec, precision: Precision, tp_size: Any) -> Array:
    """One rank's recurrent states of one sequence, with the last inputs of its convolutions."""
    num_bytes: Array = np.asarray(0.0)
    for state, count in model.states:
        each = (
            state.recurrent_elements * FP32_BYTES + state.conv_elements * precision.activation_bytes
        )
        num_bytes = num_bytes + count * share(state.num_heads, tp_size) * each
    return num_bytes


def workspace_bytes(
    model: ModelSpec,
    engine: EngineProfile,
    precision: Precision,
    *,
    batch: Any,
    gamma: Any,
    tp_size: Any,
    sampling: SamplingSpec,
) -> Array:
    """Activations of a prefill pass, and what the verified tokens are chosen with: of each its fp32
    logits; where it is sampled also its probabilities, the draft's, and the residual that a
    rejection draws from; for top-p also the whole vocabulary in order."""
    tp = np.asarray(tp_size, dtype=np.float64)
    shard = np.asarray(1.0)
    if engine.vocabulary == "sharded":
        shard = tp
    batch = np.asarray(batch, dtype=np.float64)
    gamma = np.asarray(gamma, dtype=np.float64)
    tables: Array = np.asarray((1.0 if sampling.is_greedy else 4.0) * FP32_BYTES / shard)
    if not sampling.is_greedy and sampling.top_p not in (None, 1.0):
        tables = tables + SORTING_BYTES
    choosing = batch * (gamma + 1.0) * model.vocab_size * tables
    width = model.widest_feed_forward
    element = precision.activation_bytes
    activations = engine.prefill_tokens * (4.0 * model.hidden_size + 3.0 * width / tp) * element
    return np.asarray(engine.workspace_bytes + activations + choosing)
