"""Memory that a configuration takes on each device, and the largest batch that fits.

    weights / tp + KV(context + generated) + draft weights / draft tp + draft KV(budget) + workspace

compared with the engine's share of the device's usable memory; an engine that sets memory aside for its
workspace beforehand (SGLang) has none of it in its share, and one that gives caches a share of what the
rest leaves (TensorRT-LLM) keeps the other part free next to its workspace.

A pipeline stage holds its share of the layers. With whole experts a rank holds ceil(E / ranks) of
E. A rank of a data-parallel group holds all other weights, and the caches of the group's own
sequences.

The caches and the logits grow with the batch, so the need is affine in it and the largest batch
follows in closed form. The parts are computed in footprint.py, the draft's in drafting/.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.drafting import KeptTokens, draft_of
from magicdec.perfmodel.footprint import (
    kv_bytes,
    state_bytes,
    weights_bytes,
    workspace_bytes,
)
from magicdec.perfmodel.kernels.profile import HardwareProfile
from magicdec.perfmodel.setup import ModelSetup
from magicdec.specs.engine import EngineProfile


class MemoryNeed(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per device; arrays broadcast."""

    weights_bytes: Array
    kv_bytes: Array
    draft_weights_bytes: Array
    draft_kv_bytes: Array
    workspace_bytes: Array
    capacity_bytes: Array

    @property
    def total_bytes(self) -> Array:
        parts = (
            self.weights_bytes,
            self.kv_bytes,
            self.draft_weights_bytes,
            self.draft_kv_bytes,
            self.workspace_bytes,
        )
        return sum(parts, np.asarray(0.0))

    @property
    def fits(self) -> Any:
        return self.total_bytes <= self.capacity_bytes


def memory_need(
    setup: ModelSetup,
    *,
    batch: Any,
    max_len: Any,
    budget: Any,
    gamma: Any,
    tp_size: Any,
    capacity: Any = np.inf,
) -> MemoryNeed:
    """Bytes of the fullest device when each of `batch` sequences grows to `max_len` tokens (the
    block in flight on top)."""
    tp = np.asarray(tp_size, dtype=np.float64)
    batch = np.asarray(batch, dtype=np.float64)
    gamma = np.asarray(gamma, dtype=np.float64)
    spread = setup.spread
    # of the fullest group
    if spread.dp > 1:
        batch = np.ceil(batch / spread.dp)
    of_stage = spread.stage_share(setup.model.num_hidden_layers)
    length = np.asarray(max_len, dtype=np.float64) + gamma + 1.0
    draft = draft_of(setup)
    kept = KeptTokens(batch=batch, length=length, budget=budget, gamma=gamma, tp=tp)
    states = draft.states_of(gamma) * state_bytes(
        setup.model, setup.engine, setup.precision, tp
    )
    per_sequence = (
        kv_bytes(setup.model, setup.engine, setup.precision, length, tp) + states
    )
    workspace = workspace_bytes(
        setup.model,
        setup.engine,
        setup.precision,
        batch=batch / spread.pp,
        gamma=gamma,
        tp_size=tp,
        sampling=setup.sampling,
    )
    if spread.dp > 1:
        workspace = workspace + _exchange_bytes(setup, batch * (gamma + 1.0), tp)
    workspace = workspace + draft.workspace_bytes(kept)
    of_sequences = of_stage * batch * per_sequence
    of_draft = np.asarray(draft.cache_bytes(kept), dtype=np.float64)
    memory = setup.engine.memory
    if not memory.workspace_in_share:
        workspace = np.zeros(())
    if memory.share_of == "rest":
        left_free = 1.0 / memory.memory_fraction - 1.0
        workspace = workspace + left_free * (of_sequences + of_draft)
    own_weights = weights_bytes(
        setup.model, setup.precision, tp, spread, memory.embedding
    )
    on_host = memory.host_weight_bytes
    return MemoryNeed(
        weights_bytes=np.maximum(own_weights - on_host, 0.0),
        kv_bytes=of_sequences,
        draft_weights_bytes=np.asarray(draft.weights_bytes(tp), dtype=np.float64),
        draft_kv_bytes=of_draft,
        workspace_bytes=workspace,
        capacity_bytes=np.asarray(capacity),
    )


def prompt_bytes(
    setup: ModelSetup, *, prompt_len: Any, budget: Any, gamma: Any, tp_size: Any
) -> Array:
    """Keys and values of one prompt, the draft's too, on each device of its group and stage."""

    # in flight, on top of what is held
    block = np.asarray(gamma, dtype=np.float64) + 1.0

    def held(batch: float) -> Array:
        need = memory_need(
            setup,
            batch=batch,
            max_len=prompt_len - block,
            budget=budget,
            gamma=gamma,
            tp_size=tp_size,
        )
        return need.kv_bytes + need.draft_kv_bytes

    return held(setup.spread.dp) - held(0.0)


def _exchange_bytes(setup: ModelSetup, tokens: Array, tp: Array) -> Array:
    """Buffers in 16 bits in which a rank's tokens are sent to all experts and received, two of each
    (DeepEP)."""
    of_rank = tokens / setup.spread.pp / tp
    buffers: Array = (
        4.0 * setup.model.most_experts * of_rank * setup.model.hidden_size * 2.0
    )
    return buffers


def capacity_bytes(hw: HardwareProfile, engine: EngineProfile, ranks: Any = 1) -> Array:
    """The part of each device's memory that may be planned with, on so many ranks of a group."""
    usable = hw.usable_memory.num_bytes
    aside = engine.memory.set_aside_bytes(usable)
    if engine.memory.share_of == "rest":
        return np.asarray(usable)
    if aside is None:
        return np.asarray(usable * engine.memory.memory_fraction)
    ranks = np.asarray(ranks, dtype=np.float64)
    per_rank = engine.memory.set_aside_per_rank_bytes
    kept: Array = np.maximum(usable - aside - per_rank * ranks, 0.0)
    return kept


def largest_batch(total_at_zero: Any, total_at_one: Any, capacity: Any) -> Array:
    """The largest batch whose need, affine in the batch, stays within the capacity (0: not even
    one).
    """
    zero = np.asarray(total_at_zero, dtype=np.float64)
    capacity = np.asarray(capacity, dtype=np.float64)
    per_sequence = np.maximum(np.asarray(total_at_one, dtype=np.float64) - zero, 1e-30)
    batch = np.floor(np.maximum(capacity - zero, 0.0) / per_sequence + 1e-9)
    return np.where(zero > capacity, 0.0, batch)
