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
from magicdec.specs.model import ModelPart, ModelSpec
from magicdec.specs.parallel import TENSOR_PARALLEL, Parallelism
from magicdec.specs.precision import Precision
from magicdec.specs.speculation import SamplingSpec

SORTING_BYTES = 4 + 8 + 4 + 4 + 4
"""Per token of the vocabulary, to keep the likeliest: logits in order, their indices,
probabilities, sums, and back.
"""
PARTS: tuple[ModelPart, ...] = ("mixer", "mlp", "experts", "head", "embeddings")


def weights_bytes(
    model: ModelSpec,
    precision: Precision,
    tp_size: Any,
    spread: Parallelism = TENSOR_PARALLEL,
    embedding: Literal["device", "host"] = "device",
) -> Array:
    """One rank's weights, in the first stage of a pipeline.

    Heads, widths, experts and vocabulary rows are split over ranks. Everything else is replicated,
    and so are heads if there are more ranks than heads. One of the two vocabulary tables is on the
    last stage. Scales and zero points count. Embeddings, routers and norms stay in 16 bits when other
    weights are narrower, unless the format converts embeddings too. With `embedding` on the host the
    table that is only looked up in is not counted, and the other is one more layer.
    """
    tp = np.asarray(tp_size, dtype=np.float64)
    wide = precision.tables.weight_bytes
    mixer, mlp, experts, head, embeddings = (
        model.part_format(part, precision).num_bytes for part in PARTS
    )
    projected: Array = np.asarray(0.0)
    num_projected = 0
    for parts, num_bytes in ((model.mixers, mixer), (model.feed_forwards, mlp)):
        for part, count in parts:
            for projection in part.projections(model.hidden_size):
                held = size(projection.outputs, tp) * size((projection.inputs,), tp)
                element = num_bytes
                if projection.name == "router":
                    element = wide
                projected = projected + count * held * element
                num_projected += count * projection.num_parameters
    tables = model.embedding_parameters
    num_tables = 2
    if model.tie_word_embeddings:
        num_tables = 1
    others = (
        model.num_parameters
        - tables * num_tables
        - model.expert_parameters
        - num_projected
    )
    of_experts = model.expert_parameters * expert_share(model, tp, spread) * experts
    layers = projected + others / tp * wide + of_experts
    if embedding == "host":
        output = tables / tp * (embeddings if model.tie_word_embeddings else head)
        layer = layers / model.num_hidden_layers
        # the output is one more layer to llama.cpp, the last of the last stage
        most = np.ceil((model.num_hidden_layers + 1) / spread.pp)
        return np.asarray(
            (most - 1.0) * layer + np.maximum(layer * (spread.pp > 1), output)
        )
    if spread.pp > 1:
        layers = layers * spread.stage_share(model.num_hidden_layers)
    element = embeddings
    if not model.tie_word_embeddings and spread.pp == 1:
        element = embeddings + head
    return np.asarray(layers + tables / tp * element)


def expert_share(model: ModelSpec, tp_size: Any, spread: Parallelism) -> Any:
    """One rank's share of the routed experts' weights."""
    tp = np.asarray(tp_size, dtype=np.float64)
    if not spread.whole_experts or not model.is_moe:
        return 1.0 / tp
    held = np.ceil(model.most_experts / spread.ep_size(tp))
    return held / model.most_experts


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
    slots = np.asarray(length, dtype=np.float64) + engine.memory.spare_slots
    elements: Array = np.asarray(0.0)
    keeps_windows = engine.memory.window_cache == "window" and not is_head
    for cache, count in model.caches:
        kept = slots
        if keeps_windows and cache.max_tokens is not None:
            kept = np.minimum(
                slots, float(cache.max_tokens + engine.memory.window_slots)
            )
        heads = count * share(cache.num_heads, tp_size)
        elements = elements + heads * cache.elements_per_token * kept
    if not is_head:
        elements = elements / engine.memory.context_ranks
    return elements * precision.kv_bytes


def sparse_kv_bytes_per_token(
    model: ModelSpec, precision: Precision, tp_size: Any
) -> Array:
    """One rank's keys and values of one token in full-attention layers, whose cache a sparse draft
    may thin out. In other layers it reads the target's cache."""
    elements: Array = np.asarray(0.0)
    for cache, count in model.caches:
        if cache.is_sparsifiable:
            heads = count * share(cache.num_heads, tp_size)
            elements = elements + heads * cache.elements_per_token
    return elements * precision.kv_bytes


def state_bytes(
    model: ModelSpec, engine: EngineProfile, precision: Precision, tp_size: Any
) -> Array:
    """One rank's recurrent states of one sequence, with the last inputs of its convolutions."""
    num_bytes: Array = np.asarray(0.0)
    for state, count in model.states:
        recurrent = state.recurrent_elements * engine.memory.state_element_bytes
        conv = state.conv_elements * precision.activation_bytes
        heads = count * share(state.num_heads, tp_size)
        num_bytes = num_bytes + heads * (recurrent + conv)
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
    """Activations of a prefill pass, and the tables that verified tokens are chosen from.

    A greedy token needs its fp32 logits. A sampled one also needs its probabilities, the draft's,
    and the residual that a rejection draws from; with top-p, the sorted vocabulary too.
    """
    tp = np.asarray(tp_size, dtype=np.float64)
    shard = np.asarray(1.0)
    if engine.sampling.vocabulary == "sharded":
        shard = tp
    batch = np.asarray(batch, dtype=np.float64)
    gamma = np.asarray(gamma, dtype=np.float64)
    num_tables = 4.0
    if sampling.is_greedy:
        num_tables = 1.0
    tables: Array = np.asarray(num_tables * FP32_BYTES / shard)
    if not sampling.is_greedy and sampling.top_p not in (None, 1.0):
        tables = tables + SORTING_BYTES
    choosing = batch * (gamma + 1.0) * model.vocab_size * tables
    width = 4.0 * model.hidden_size + 3.0 * model.widest_feed_forward / tp
    activations = engine.scheduler.prefill_tokens * width * precision.activation_bytes
    return np.asarray(engine.memory.workspace_bytes + activations + choosing)
