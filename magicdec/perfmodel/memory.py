"""Each device's memory that a configuration takes, and the largest batch that fits.

    weights / tp + KV(context + generated) + draft weights / draft tp + draft KV(budget) + workspace

Of a stage of a pipeline its share of the layers; of whole experts ceil(E / ranks) of E; of data-parallel groups the
weights of all else, and the caches of the group's own sequences.

The caches and the logits grow with the batch, so the need is affine in it and the largest batch follows in closed form.
A rank keeps at least one KV head, so beyond tp = KV heads the cache per rank no longer shrinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.forward import share, size
from magicdec.perfmodel.kernels.op import FP32_BYTES
from magicdec.perfmodel.kernels.profile import HardwareProfile
from magicdec.perfmodel.setup import ModelSetup, draft_kv_tokens, draft_tp
from magicdec.specs.engine import EngineProfile
from magicdec.specs.model import ModelSpec
from magicdec.specs.parallel import TENSOR_PARALLEL, Parallelism
from magicdec.specs.precision import Precision
from magicdec.specs.speculation import SPARSE_METHODS, SamplingSpec

SORTING_BYTES = 4 + 8 + 4 + 4 + 4
"""Per token of the vocabulary, to keep the likeliest: logits in order, their indices, probabilities, sums, and back."""
PARTS: tuple[Literal["mixer", "mlp", "experts", "head"], ...] = ("mixer", "mlp", "experts", "head")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes per device; arrays broadcast."""

    weights_bytes: Array
    kv_bytes: Array
    draft_weights_bytes: Array
    draft_kv_bytes: Array
    workspace_bytes: Array
    capacity_bytes: Array

    @property
    def total_bytes(self) -> Array:
        parts = (self.weights_bytes, self.kv_bytes, self.draft_weights_bytes, self.draft_kv_bytes, self.workspace_bytes)
        return sum(parts, np.asarray(0.0))

    @property
    def fits(self) -> Any:
        return self.total_bytes <= self.capacity_bytes


def weights_bytes(model: ModelSpec, precision: Precision, tp_size: Any, spread: Parallelism = TENSOR_PARALLEL) -> Array:
    """One rank's weights: heads, widths, experts and vocabulary rows split; what has none of these replicated, as are
    heads where there are more ranks than heads. Of a pipeline's first stage: one of the tables is on the last.

    With scales and zero points where this is the format that they are published in; embeddings, routers and norms are
    in 16 bits where the other weights are narrower.
    """
    tp, wide = np.asarray(tp_size, dtype=np.float64), precision.tables.weight_bytes
    mixer, mlp, experts, head = (model.part_format(part, precision).num_bytes for part in PARTS)
    tables = model.embedding_parameters
    others = model.num_parameters - tables * (1 if model.tie_word_embeddings else 2) - model.expert_parameters
    narrow: Array = np.asarray(0.0)
    for part, count, num_bytes in (
        *((*each, mixer) for each in model.mixers),
        *((*each, mlp) for each in model.feed_forwards),
    ):
        for projection in part.projections(model.hidden_size):
            held = size(projection.outputs, tp) * size((projection.inputs,), tp)
            narrow = narrow + count * held * (wide if projection.name == "router" else num_bytes)
            others -= count * projection.num_parameters
    layers = narrow + others / tp * wide + model.expert_parameters * expert_share(model, tp, spread) * experts
    has_both = not model.tie_word_embeddings and spread.pp == 1
    rows = tables / tp * (wide + (head if has_both else 0.0))
    return np.asarray(layers * (spread.stage_share(model.num_hidden_layers) if spread.pp > 1 else 1.0) + rows)


def expert_share(model: ModelSpec, tp_size: Any, spread: Parallelism) -> Any:
    """One rank's share of the routed experts' weights."""
    if not spread.whole_experts or not model.is_moe:
        return 1.0 / np.asarray(tp_size, dtype=np.float64)
    return np.ceil(model.most_experts / spread.ep_size(np.asarray(tp_size, dtype=np.float64))) / model.most_experts


def kv_bytes(
    model: ModelSpec, engine: EngineProfile, precision: Precision, length: Any, tp_size: Any, *, is_head: bool = False
) -> Array:
    """One rank's slots for the keys and values of a sequence of `length` tokens: a window or a chunk needs no more than
    itself and the engine's `window_slots`, where the engine keeps it so. A trained head's slots go with its target's,
    one for each token, whatever its window (vllm pull request 40898, sglang 40563)."""
    slots = np.asarray(length, dtype=np.float64) + engine.spare_slots
    elements: Array = np.asarray(0.0)
    for cache, count in model.caches:
        is_bounded = cache.max_tokens is not None and engine.window_cache == "window" and not is_head
        kept = np.minimum(slots, float((cache.max_tokens or 0) + engine.window_slots)) if is_bounded else slots
        elements = elements + count * share(cache.num_heads, tp_size) * cache.elements_per_token * kept
    return elements * precision.kv_bytes


def sparse_kv_bytes_per_token(model: ModelSpec, precision: Precision, tp_size: Any) -> Array:
    """One rank's keys and values of one token in the layers whose cache a sparse draft may thin out: full attention's.
    In the others it reads what the target keeps."""
    thinned = ((cache, count) for cache, count in model.caches if cache.is_sparsifiable)
    held = (count * share(cache.num_heads, tp_size) * cache.elements_per_token for cache, count in thinned)
    return sum(held, np.asarray(0.0)) * precision.kv_bytes


def state_bytes(model: ModelSpec, precision: Precision, tp_size: Any) -> Array:
    """One rank's recurrent states of one sequence, with the last inputs of its convolutions."""
    num_bytes: Array = np.asarray(0.0)
    for state, count in model.states:
        each = state.recurrent_elements * FP32_BYTES + state.conv_elements * precision.activation_bytes
        num_bytes = num_bytes + count * share(state.num_heads, tp_size) * each
    return num_bytes


def workspace_bytes(
    model: ModelSpec, engine: EngineProfile, precision: Precision, *, batch: Any, gamma: Any, tp_size: Any,
    sampling: SamplingSpec,
) -> Array:  # fmt: skip
    """Activations of a prefill pass, and what the verified tokens are chosen with: of each its fp32 logits; where it is
    sampled also its probabilities, the draft's, and the residual that a rejection draws from; for top-p also the whole
    vocabulary in order."""
    tp = np.asarray(tp_size, dtype=np.float64)
    shard = tp if engine.vocabulary == "sharded" else 1.0
    batch, gamma = np.asarray(batch, dtype=np.float64), np.asarray(gamma, dtype=np.float64)
    tables: Array = np.asarray((1.0 if sampling.is_greedy else 4.0) * FP32_BYTES / shard)
    if not sampling.is_greedy and sampling.top_p not in (None, 1.0):
        tables = tables + SORTING_BYTES
    choosing = batch * (gamma + 1.0) * model.vocab_size * tables
    width = model.widest_feed_forward
    element = precision.activation_bytes
    activations = engine.prefill_tokens * (4.0 * model.hidden_size + 3.0 * width / tp) * element
    return np.asarray(engine.workspace_bytes + activations + choosing)


def memory_need(
    setup: ModelSetup, *, batch: Any, max_len: Any, budget: Any, gamma: Any, tp_size: Any, capacity: float = np.inf
) -> Memory:
    """Bytes of the fullest device when each of `batch` sequences grows to `max_len` tokens (the block in flight on
    top)."""
    tp, batch = np.asarray(tp_size, dtype=np.float64), np.asarray(batch, dtype=np.float64)
    gamma, spread = np.asarray(gamma, dtype=np.float64), setup.spread
    batch = np.ceil(batch / spread.dp) if spread.dp > 1 else batch  # of the fullest group
    of_stage = spread.stage_share(setup.model.num_hidden_layers)
    length = np.asarray(max_len, dtype=np.float64) + gamma + 1.0
    draft_weights: Any = 0.0
    draft_kv: Any = 0.0
    ranks, precision = draft_tp(setup, tp), setup.drafting_precision
    if setup.kind == "standalone" or (setup.kind == "self" and precision.weight_dtype != setup.precision.weight_dtype):
        draft_weights = weights_bytes(setup.drafter, precision, ranks, setup.draft_spread)
    elif setup.kind == "eagle":
        head, rows = setup.drafter, setup.drafter.vocab_size
        own = sum(head.layer_parameters(each) for each in head.layers) + 2.0 * setup.model.hidden_size**2
        own += rows * setup.model.hidden_size if rows < setup.model.vocab_size else 0.0
        experts = head.expert_parameters
        held = (own - experts) / ranks + experts * expert_share(setup.drafter, ranks, setup.draft_spread)
        draft_weights = held * precision.weight_bytes
    tokens = draft_kv_tokens(setup, length, budget)
    if setup.speculation.draft_method in SPARSE_METHODS:
        tokens = tokens + gamma + 1.0
    if setup.kind in ("standalone", "eagle"):
        draft_kv = kv_bytes(setup.drafter, setup.engine, precision, tokens, ranks, is_head=setup.kind == "eagle")
        draft_kv = batch * (draft_kv + state_bytes(setup.drafter, precision, ranks))
    elif setup.keeps_draft_cache:
        draft_kv = (
            batch * (tokens + setup.engine.spare_slots) * sparse_kv_bytes_per_token(setup.drafter, precision, ranks)
        ) * of_stage
    # A recurrence keeps the state after each token of a block, to go back to the one that a rejection needs.
    states = gamma + 1.0 + setup.engine.states_beside if setup.kind != "none" else 1.0
    workspace = workspace_bytes(
        setup.model, setup.engine, setup.precision, batch=batch / spread.pp, gamma=gamma, tp_size=tp,
        sampling=setup.sampling,
    )  # fmt: skip
    if spread.dp > 1:
        # buffers in 16 bits in which a rank's tokens are sent to all experts and received, two of each (DeepEP)
        tokens = batch / spread.pp * (gamma + 1.0) / tp
        workspace = workspace + 4.0 * setup.model.most_experts * tokens * setup.model.hidden_size * 2.0
    if setup.speculation.draft_method == "topk":
        # the fp32 attention of each verified token, by layer and KV head, which it chooses by
        caches = (each for each in setup.model.caches if each[0].is_sparsifiable)
        heads = sum(count * share(cache.num_heads, tp) for cache, count in caches)
        workspace = workspace + heads * (batch * (gamma + 1.0)) * length * FP32_BYTES
    return Memory(
        weights_bytes=weights_bytes(setup.model, setup.precision, tp, spread),
        kv_bytes=of_stage * batch * (
            kv_bytes(setup.model, setup.engine, setup.precision, length, tp)
            + states * state_bytes(setup.model, setup.precision, tp)
        ),
        draft_weights_bytes=np.asarray(draft_weights, dtype=np.float64),
        draft_kv_bytes=np.asarray(draft_kv, dtype=np.float64),
        workspace_bytes=workspace,
        capacity_bytes=np.asarray(capacity),
    )  # fmt: skip


def capacity_bytes(hw: HardwareProfile, engine: EngineProfile) -> float:
    """The part of a device's memory that may be planned with."""
    return hw.memory_bytes * engine.memory_fraction


def largest_batch(total_at_zero: Any, total_at_one: Any, capacity: Any) -> Array:
    """The largest batch whose need, affine in the batch, stays within the capacity (0: not even one)."""
    zero, capacity = np.asarray(total_at_zero, dtype=np.float64), np.asarray(capacity, dtype=np.float64)
    per_sequence = np.maximum(np.asarray(total_at_one, dtype=np.float64) - zero, 1e-30)
    batch = np.floor(np.maximum(capacity - zero, 0.0) / per_sequence + 1e-9)
    return np.where(zero > capacity, 0.0, batch)
