"""Time of speculation beyond its kernels in models with recurrent states next to attention (Gated
DeltaNet, Mamba).

    T_step' = T_step^(1 − w) · max(T_step, layers · t_layer)^w

No whole captured graph replays such a step, so the host launches its layers one after the other;
before 0.14 the step of a mixture of experts with a trained head takes that much longer on several
ranks. Reports disagree, so it carries an error that spans them: a share of what the host would add.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.kernels.op import Basis, Op, fixed
from magicdec.perfmodel.setup import Setup
from magicdec.specs.mixers import Attention, LatentAttention
from magicdec.specs.model import ModelSpec
from magicdec.specs.speculation import HEAD_METHODS


def is_hybrid(model: ModelSpec) -> bool:
    """Whether some layers keep a state instead of a cache."""
    return any(
        not isinstance(mixer, Attention | LatentAttention) for mixer, _ in model.mixers
    )


def _is_launched(setup: Setup, tp: Any) -> Any:
    """Whether the host may launch a step's layers: a hybrid's, and in some versions a split mixture's
    with a trained head."""
    is_split = np.asarray(tp) > 1
    if is_hybrid(setup.model):
        return np.full(is_split.shape, True)
    is_mixture = any(mlp.num_experts for mlp, _ in setup.model.feed_forwards)
    has_head = setup.speculation.draft_method in HEAD_METHODS
    counts = setup.engine.hybrids.hybrid_mixtures and is_mixture and has_head
    return is_split & counts


def launched(setup: Setup, step_s: Array, tp: Any) -> list[Op]:
    """Time that a speculative step of `step_s` waits where the host launches its layers."""
    hybrids = setup.engine.hybrids
    is_launched = _is_launched(setup, tp)
    if not hybrids.hybrid_layer_s or not np.any(is_launched):
        return []
    floor_s = is_launched * hybrids.hybrid_layer_s * setup.model.num_hidden_layers
    ratio = np.maximum(floor_s / np.maximum(step_s, 1e-12), 1.0)
    waiting_s = step_s * (ratio**hybrids.hybrid_layer_weight - 1.0)
    longest_s = np.maximum(floor_s - step_s, 0.0)
    if not is_hybrid(setup.model):
        waiting_s = floor_s  # ranks wait for each other, so nothing hides it
        longest_s = floor_s
    basis = Basis(
        kernel="launches of a hybrid's layers", source="report", relative_error=0.0
    )
    op = fixed("hybrid launches", "overhead", waiting_s, bases=(basis,))
    return [replace(op, spread_s=hybrids.hybrid_layer_error * longest_s)]
